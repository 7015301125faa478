"""Pages that only a worker's L1 has, and another node asks for: who is asked, what is waited for, and how that ends."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from cache_world import BF16, SimWorker, World, chain_keys, chain_of, key_of, spec_of, tenant_of

from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import Clear, Drain, Evict
from kvtier.tier.protocol.messages import Loaded, LoadFailed, Unsaved, WantSlots

TENANT = "ada"


def asked_of(worker: SimWorker) -> list[bytes]:
    """The keys of the pages that a worker owes a word on."""
    return [key for key, _ in worker.to_save]


def world_of(*, workers: int = 1, **more: Any) -> tuple[World, list[SimWorker], SimWorker]:
    """A node whose workers save what they are asked for, and another node's exchange."""
    world = World(16, 16, **more)
    there = [world.connect(f"w{number}", saves=True) for number in range(workers)]
    for worker in there:
        world.want(worker, 4)
    return world, there, world.connect_exchange("n1")


def loaded(exchange: SimWorker) -> list[int]:
    return [
        page.page[1] for message in exchange.messages if isinstance(message, Loaded) for page in message.pages
    ]


def failed(exchange: SimWorker) -> list[tuple[int, str]]:
    found = [message.missing for message in exchange.messages if isinstance(message, LoadFailed)]
    return [(missing.page, missing.reason) for missing in found]


def assert_nothing_is_left(world: World, exchange: SimWorker) -> None:
    for request in list(exchange.leases):
        world.copied(exchange, request, list(exchange.leases[request]))
        world.release(exchange, request)
    world.finish_all()
    assert world.node.is_idle
    world.node.check()


@pytest.mark.parametrize("write", ["through", "demote"])
def test_what_only_l1_has_is_saved_for_another_node_and_sent(write: Literal["through", "demote"]) -> None:
    world, (worker,), exchange = world_of(write=write)
    world.store(worker, TENANT, "a")

    located = world.locate(exchange, "p", TENANT, "abcd")

    assert located.pages == 4 and located.missing is None
    assert [page.page for page in located.host] == [(0, 0)] and located.loading == [(0, 1), (0, 2), (0, 3)]
    assert asked_of(worker) == chain_keys(TENANT, "abcd")[1:]
    exchange.messages.clear()
    assert world.save_asked(worker, 2) == 2
    world.want(worker, 1)
    assert world.save_asked(worker, 1) == 1
    assert loaded(exchange) == [1, 2, 3] and not failed(exchange)
    assert_nothing_is_left(world, exchange)
    again = world.locate(exchange, "p2", TENANT, "abcd")
    assert len(again.host) + len(again.loading) == 4 and not worker.to_save
    world.settle()


def test_the_pages_end_where_the_last_worker_that_was_asked_has_none() -> None:
    world, (first, second), exchange = world_of(workers=2)

    world.locate(exchange, "p", TENANT, "abc")
    exchange.messages.clear()
    world.refuse_asked(first, 3)
    assert not failed(exchange)  # the other may have them
    world.save_asked(second, 1)
    world.refuse_asked(second, 1)

    assert loaded(exchange) == [0] and failed(exchange) == [(1, "never_stored")]
    assert exchange.coming["p"] == set()
    world.say(second, Unsaved([(key_of(TENANT, "abc"), BF16)]))  # nothing waits for it any more
    assert failed(exchange) == [(1, "never_stored")]
    assert_nothing_is_left(world, exchange)


def test_pages_behind_in_l4_are_read_meanwhile() -> None:
    world, (worker,), exchange = world_of()
    world.store(worker, TENANT, "abc")
    world.finish_all()
    world.ask(Evict, (key_of(TENANT, "ab"),), None)
    world.ask(Evict, (key_of(TENANT, "abc"),), TierName.HOST)

    located = world.locate(exchange, "p", TENANT, "abc")

    assert sorted(located.loading) == [(0, 1), (0, 2)] and asked_of(worker) == [key_of(TENANT, "ab")]
    world.finish_all()
    world.save_asked(worker, 1)
    assert {page for _, page in exchange.leases["p"]} == {0, 1, 2}
    assert_nothing_is_left(world, exchange)


@pytest.mark.parametrize("end", ["dies", "is fenced"])
def test_a_worker_that_is_gone_is_waited_for_no_more(end: str) -> None:
    world, (worker,), exchange = world_of()
    world.locate(exchange, "p", TENANT, "ab")
    exchange.messages.clear()

    if end == "dies":
        world.die(worker)
    else:
        world.say(worker, WantSlots(1, 5))

    assert failed(exchange) == [(0, "never_stored")]
    assert world.locate(exchange, "p2", TENANT, "ab").pages == 0
    assert_nothing_is_left(world, exchange)


def test_a_worker_that_never_answers_holds_nothing_once_the_exchange_waits_no_more() -> None:
    world, (worker,), exchange = world_of()
    world.locate(exchange, "p", TENANT, "ab")
    other = world.connect_exchange("n2")
    world.locate(other, "p", TENANT, "ab")

    world.release(exchange, "p")
    assert other.coming["p"] == {(0, 0), (0, 1)}
    world.die(other)

    assert world.node.is_idle
    world.save_asked(worker, 2)  # late: a page like any
    assert world.locate(exchange, "p2", TENANT, "ab").pages == 2
    assert_nothing_is_left(world, exchange)


def test_two_exchanges_wait_for_one_save() -> None:
    world, (worker,), exchange = world_of()
    other = world.connect_exchange("n2")
    world.locate(exchange, "p", TENANT, "ab")
    worker.messages.clear()
    world.locate(other, "q", TENANT, "ab")

    assert not worker.messages  # it is asked once
    world.save_asked(worker, 2)
    assert exchange.leases["p"].keys() == other.leases["q"].keys() == {(0, 0), (0, 1)}
    world.die(other)
    assert_nothing_is_left(world, exchange)


def test_what_is_cleared_meanwhile_does_not_come() -> None:
    world, _, exchange = world_of()
    world.locate(exchange, "p", TENANT, "ab")
    exchange.messages.clear()

    world.ask(Clear, tenant_of("bob"))
    assert not failed(exchange)
    world.ask(Clear, tenant_of(TENANT))

    assert failed(exchange) == [(0, "cleared")]
    assert_nothing_is_left(world, exchange)


def test_a_node_that_drains_asks_for_nothing() -> None:
    world, _, exchange = world_of()
    world.locate(exchange, "p", TENANT, "ab")
    exchange.messages.clear()

    world.tell(Drain())

    assert failed(exchange) == [(0, "load_failed")]
    assert world.locate(exchange, "p2", TENANT, "ab").pages == 0
    assert_nothing_is_left(world, exchange)


def test_a_page_of_another_identity_is_not_given() -> None:
    world, (worker,), exchange = world_of()
    world.locate(exchange, "p", TENANT, "ab")
    exchange.messages.clear()

    world.save_asked(worker, 1, root=b"o" * 32)

    assert failed(exchange) == [(0, "identity_differs")] and not exchange.leases["p"]
    assert_nothing_is_left(world, exchange)


def test_workers_are_asked_by_exchanges_alone_and_only_for_pages_they_can_have() -> None:
    world, (worker,), exchange = world_of()
    silent = world.connect("silent")

    assert world.locate(silent, "r", TENANT, "ab").pages == 0
    unknown = chain_of(chain_keys(TENANT, "ab"), spec=b"no one named it.")
    assert world.locate(exchange, "p", TENANT, "ab", chains=[unknown]).pages == 0
    windowed = chain_of(chain_keys(TENANT, "ab"), window=32, spec=spec_of((0, BF16)))
    assert world.locate(exchange, "p", TENANT, "ab", chains=[windowed]).pages == 0
    assert not worker.to_save and not silent.to_save


def test_what_is_asked_for_at_once_is_bounded() -> None:
    world, (worker,), exchange = world_of(limits=Limits(saves=3))

    first = world.locate(exchange, "p", TENANT, "ab")
    second = world.locate(exchange, "q", TENANT, "abcd")

    assert first.loading == [(0, 0), (0, 1)]
    assert (
        second.loading == [(0, 0), (0, 1), (0, 2)] and second.missing is not None and second.missing.page == 3
    )
    assert len(worker.to_save) == 3
    world.settle()
