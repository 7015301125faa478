"""What a lookup takes from L4 and from other nodes, by what was measured of each; and what is asked next where one fails."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from cache_world import (
    BF16,
    PAGE_TOKENS,
    PAYLOAD_BYTES,
    SimWorker,
    World,
    assert_nothing_leaks,
    chain_keys,
    checksum_of,
    key_of,
    spec_of,
)

from kvtier.tier.node.state.fetches import DOUBT_S, PeerSpeed
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import Evict
from kvtier.tier.protocol.messages import (
    Copied,
    Fetch,
    LentPage,
    LoadFailed,
    Located,
    Remote,
    StoredInPeer,
    WantFrames,
)

TENANT = "ada"
PAGE_S = PAYLOAD_BYTES / 1e9  # as long as nothing is measured, from L4 and from a node alike
LATENCY_S = PeerSpeed.PRIOR_LATENCY_S


def world_with(path: str, slots: int = 256, **more: Any) -> tuple[World, SimWorker, SimWorker]:
    """A world whose node holds a chain in L3 and L4 and has an exchange; its worker and its exchange."""
    world = World(slots, slots, **more)
    worker, exchange = world.connect(), world.connect_exchange()
    world.want(worker, len(path))
    while path and worker.grants and world.store(worker, TENANT, path) < len(path):
        world.want(worker, len(path))
    world.finish_all()
    return world, worker, exchange


def only_in_l4(world: World, path: str, first: int = 0) -> None:
    world.ask(Evict, tuple(chain_keys(TENANT, path)[first:]), TierName.HOST)


def nowhere(world: World, path: str, first: int, end: int) -> None:
    world.ask(Evict, tuple(chain_keys(TENANT, path)[first:end]), None)


def fetches(exchange: SimWorker) -> list[Fetch]:
    return [fetch for fetch, _ in exchange.fetches.values()]


def asked(exchange: SimWorker) -> dict[str, list[int]]:
    """The pages that each node is asked for, by their place in the chain."""
    found: dict[str, list[int]] = {}
    for fetch in fetches(exchange):
        pages = range(fetch.first_page, fetch.first_page + len(fetch.pages))
        found.setdefault(fetch.node_id, []).extend(pages)
    return found


def measured(world: World, node_id: str, bytes_s: float, latency_s: float = LATENCY_S) -> None:
    """A node has shown how fast it is, just now."""
    peer = world.node.in_flight.fetches.peer(node_id)
    assert peer is not None
    speed, now = PeerSpeed(), world.now
    speed.began(now - latency_s - 10.0)
    for second in range(11):
        speed.came(int(bytes_s) if second else 1, now - 10.0 + second)
    peer.speed = speed


def locate(
    world: World, worker: SimWorker, path: str, remotes: list[tuple[str, int]], **fields: Any
) -> Located:
    """Ask for a chain, with what the world's own `locate` has no word for."""
    world.locate(worker, "r", TENANT, path)
    world.release(worker, "r")
    named = [Remote(node_id, f"{node_id}:1", pages) for node_id, pages in remotes]
    message = msgspec.structs.replace(worker.asked["r"], remotes=named, **fields)
    worker.asked["r"] = message
    (located,) = [reply for reply in world.say(worker, message) if isinstance(reply, Located)]
    return located


def pages(located: Located) -> tuple[int, list[int]]:
    return located.pages, sorted(page for _, page in located.loading)


def end(world: World) -> None:
    """All that is under way ends, all workers go, and nothing is left."""
    world.settle()
    assert_nothing_leaks(world)


# ---- load, fetch or recompute ------------------------------------------------------------------------------------


def test_an_l4_slower_than_computing_hides_no_node_that_is_quicker() -> None:
    path = "a" * 16
    world, worker, exchange = world_with(path)
    only_in_l4(world, path)
    measured(world, "n1", bytes_s=1e11)
    world.node.in_flight.bandwidth._average, world.node.in_flight.bandwidth._measured_at = (
        1e6,
        world.now,
    )  # 4 ms a page

    alone = world.locate(worker, "r", TENANT, path, recompute_s=1e-3)
    helped = world.locate(worker, "r", TENANT, path, recompute_s=1e-3, remotes=[("n1", 12)])

    assert pages(alone) == (0, []) and alone.missing is not None and "L4" in alone.missing.detail
    assert pages(helped) == (12, [*range(12)]) and asked(exchange) == {"n1": [*range(12)]}
    assert helped.missing is not None and (helped.missing.page, helped.missing.reason) == (12, "costlier")
    world.settle()
    assert world.node.snapshot().fetches.fetched_pages == 12
    end(world)


def test_a_page_of_l4_is_read_there_while_a_node_takes_longer_for_what_the_node_lacks() -> None:
    path = "abcdefgh"
    world, worker, exchange = world_with(path)
    only_in_l4(world, path)
    nowhere(world, path, 0, 4)

    located = world.locate(worker, "r", TENANT, path, recompute_s=1.0, remotes=[("n1", 8)])

    assert pages(located) == (8, [*range(8)]) and asked(exchange) == {"n1": [0, 1, 2, 3]}
    assert len(world.reads) == 4
    end(world)


@pytest.mark.parametrize("margin", [0.99, 1.01])
def test_what_is_here_behind_a_gap_is_not_paid_for_and_is_worth_filling_the_gap(margin: float) -> None:
    """A gap of 4 pages before 12 that are here was priced as 16 pages from the node."""
    path = "a" * 16
    world, worker, _ = world_with(path)
    nowhere(world, path, 0, 4)
    measured(world, "n1", bytes_s=1e7, latency_s=0.5)
    gap_s = 0.5 + 4 * PAYLOAD_BYTES / 1e7

    located = world.locate(worker, "r", TENANT, path, recompute_s=margin * gap_s / 16, remotes=[("n1", 16)])

    assert pages(located) == ((16, [0, 1, 2, 3]) if margin > 1 else (0, []))
    end(world)


@pytest.mark.parametrize("margin", [0.99, 1.01])
def test_what_must_be_read_from_l4_behind_a_gap_is_waited_for_too(margin: float) -> None:
    path = "a" * 16
    world, worker, _ = world_with(path)
    only_in_l4(world, path)
    nowhere(world, path, 0, 4)
    measured(world, "n1", bytes_s=1e9)
    world.node.in_flight.bandwidth._average, world.node.in_flight.bandwidth._measured_at = 1e6, world.now
    l4_s = 12 * PAYLOAD_BYTES / 1e6
    fetch_s = LATENCY_S + 4 * PAYLOAD_BYTES / 1e9
    assert fetch_s < l4_s

    located = world.locate(
        worker, "r", TENANT, path, recompute_s=margin * (l4_s - fetch_s) / 12, remotes=[("n1", 4)]
    )

    assert pages(located) == ((16, [*range(16)]) if margin > 1 else (4, [0, 1, 2, 3]))
    end(world)


@pytest.mark.parametrize(("first", "page_s", "is_worth_it"), [(0, 1.6e-3, False), (32, 2.4e-3, True)])
def test_pages_are_as_dear_to_compute_as_they_are_deep(first: int, page_s: float, is_worth_it: bool) -> None:
    """Of 64 pages that cost 2 ms on average the first half costs 1.5 ms each, the second one 2.5 ms."""
    path = "a" * 64
    world, worker, _ = world_with(path)
    nowhere(world, path, first, first + 32)
    if not first:
        nowhere(world, path, 32, 64)
    measured(world, "n1", bytes_s=PAYLOAD_BYTES / page_s, latency_s=1e-4)

    located = locate(world, worker, path, [("n1", first + 32)], recompute_s=2e-3, double_pages=32.0)

    assert pages(located)[0] == (first + 32 if is_worth_it else first)
    end(world)


def test_no_more_is_asked_for_than_comes_while_the_worker_waits() -> None:
    world, worker, _ = world_with("")
    measured(world, "n1", bytes_s=PAYLOAD_BYTES / 0.1)  # ten pages a second

    located = locate(world, worker, "a" * 64, [("n1", 64)], recompute_s=1.0, patience_s=2.0)

    assert located.pages == 19
    assert located.missing is not None and located.missing.reason == "costlier"
    end(world)


def test_a_fetch_has_no_more_pages_than_come_well_within_its_deadline() -> None:
    path = "a" * 128
    world, worker, exchange = world_with("", limits=Limits(fetch_deadline_s=4.0))
    world.locate(worker, "quick", TENANT, path[:16], recompute_s=1.0, remotes=[("n1", 16)])
    assert len(fetches(exchange)[0].pages) == 16
    world.settle()
    measured(world, "n1", bytes_s=PAYLOAD_BYTES / 0.1)

    world.locate(worker, "slow", "bob", path, recompute_s=1.0, remotes=[("n1", 128)])

    assert [len(fetch.pages) for fetch in fetches(exchange)] == [5, 5]  # half a second's each
    end(world)


@pytest.mark.parametrize(("bytes_s", "at_once"), [(1e6, 2), (1.3e7, 3), (1e9, 4)])
def test_a_slow_node_has_fewer_fetches_at_once(bytes_s: float, at_once: int) -> None:
    """Side by side each of them would come so slowly that the exchange ends it."""
    world, worker, exchange = world_with("")
    measured(world, "n1", bytes_s=bytes_s)

    for number in range(6):
        path = chr(300 + number)
        world.locate(worker, path, TENANT, path, recompute_s=10.0, remotes=[("n1", 1)])

    assert len(fetches(exchange)) == at_once
    end(world)


def serve(world: World, exchange: SimWorker, rng: Random, bytes_s: float, latency_s: float) -> None:
    """One node sends all that it is asked for: eight pages at a time, at about so many bytes a second."""
    world.now += latency_s * rng.uniform(0.8, 1.2)
    while exchange.fetches:
        number, (_, left) = next(iter(exchange.fetches.items()))
        pages = min(8, len(left))
        world.now += pages * PAYLOAD_BYTES / bytes_s * rng.uniform(0.8, 1.2)
        world.arrive(exchange, number, pages)
        if not exchange.fetches[number][1]:
            world.end_fetch(exchange, number)


@pytest.mark.parametrize("seed", range(4))
def test_after_one_fetch_of_a_node_the_cheaper_side_is_taken_nearly_always(seed: int) -> None:
    rng = Random(seed)
    right, wrong = 0, []
    for node in range(12):
        world, worker, exchange = world_with("", limits=Limits(fetch_pages=16))
        bytes_s, latency_s = 10 ** rng.uniform(5.5, 9), 10 ** rng.uniform(-4, -1.5)
        world.locate(worker, "warm", TENANT, "a" * 32, remotes=[("n1", 32)])
        serve(world, exchange, rng, bytes_s, latency_s)
        world.settle()
        for number in range(10):
            length = rng.randrange(4, 64)
            fetch_s = latency_s + length * PAYLOAD_BYTES / bytes_s
            compute_s = fetch_s * 10 ** rng.uniform(-0.7, 0.7)
            path = chr(300 + number) * length
            world.now += rng.uniform(0.0, 3.0)
            located = world.locate(
                worker, "r", TENANT, path, recompute_s=compute_s / length, remotes=[("n1", length)]
            )
            is_cheaper = (fetch_s < compute_s) == (located.pages > 0)
            if is_cheaper or 0.9 < fetch_s / compute_s < 1 / 0.9:
                right += 1
            else:
                wrong.append((node, bytes_s, latency_s, length, fetch_s, compute_s))
            serve(world, exchange, rng, bytes_s, latency_s)
            world.release(worker, "r")
            world.settle()
    assert right >= 0.95 * (right + len(wrong)), wrong


# ---- several nodes -----------------------------------------------------------------------------------------------


def test_what_one_node_lacks_another_gives_to_the_same_prefix() -> None:
    world, worker, exchange = world_with("ab")

    located = world.locate(worker, "r", TENANT, "abcdefgh", remotes=[("n1", 5), ("n2", 7)])

    assert pages(located) == (7, [2, 3, 4, 5, 6])
    assert asked(exchange) in ({"n1": [2, 3, 4], "n2": [5, 6]}, {"n2": [2, 3, 4, 5, 6]})
    world.settle()
    assert world.node.snapshot().fetches.fetched_pages == 5
    end(world)


def test_of_nodes_that_have_the_same_the_one_that_is_sooner_is_asked() -> None:
    world, worker, exchange = world_with("")
    measured(world, "n1", bytes_s=1e6)
    measured(world, "n2", bytes_s=1e8)

    world.locate(worker, "r", TENANT, "abcd", recompute_s=1.0, remotes=[("n1", 4), ("n2", 4)])

    assert asked(exchange) == {"n2": [0, 1, 2, 3]}
    end(world)


@pytest.mark.parametrize("reason", ["evicted", "load_failed", "corrupt", "no_room"])
def test_what_a_node_doesnt_give_the_next_one_is_asked_for_at_once(reason: str) -> None:
    world, worker, exchange = world_with("")
    world.locate(worker, "r", TENANT, "abcd", recompute_s=1.0, remotes=[("n1", 4), ("n2", 4)])
    (first,) = fetches(exchange)
    world.arrive(exchange, first.fetch_id, 1)
    world.now += 1.0
    worker.messages.clear()

    world.end_fetch(exchange, first.fetch_id, reason)

    assert asked(exchange) == {"n2": [1, 2, 3]} and not worker.messages
    (second,) = fetches(exchange)
    assert second.deadline_s == pytest.approx(first.deadline_s - 1.0), "both within one deadline"
    assert world.wrong == ([("n1", key_of(TENANT, "ab"))] if reason == "evicted" else [])
    world.arrive(exchange, second.fetch_id, 3)
    assert worker.coming["r"] == set() and len(worker.leases["r"]) == 4
    end(world)


def test_only_one_other_node_is_asked_for_what_doesnt_come() -> None:
    world, worker, exchange = world_with("")
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2), ("n2", 2), ("n3", 2)])

    for _ in range(2):
        world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "evicted")

    assert not exchange.fetches and worker.coming["r"] == set()
    assert world.node.snapshot().fetches.failed_pages == {"evicted": 4}
    end(world)


def test_a_node_that_has_less_is_asked_for_what_it_has_and_the_rest_is_computed() -> None:
    world, worker, exchange = world_with("")
    world.locate(worker, "r", TENANT, "abcd", remotes=[("n1", 4), ("n2", 2)])
    worker.messages.clear()

    world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "evicted")

    assert asked(exchange) == {"n2": [0, 1]} and worker.coming["r"] == {(0, 0), (0, 1)}
    (failed,) = [message for message in worker.messages if isinstance(message, LoadFailed)]
    assert (failed.missing.page, failed.missing.reason) == (2, "evicted")
    end(world)


@pytest.mark.parametrize(("left_s", "bytes_s"), [(0.001, 9e8), (3.0, 1e3)])
def test_no_other_node_is_asked_where_it_would_be_too_late_or_dearer_than_computing(
    left_s: float, bytes_s: float
) -> None:
    world, worker, exchange = world_with("")
    measured(world, "n2", bytes_s=bytes_s)
    world.locate(worker, "r", TENANT, "ab", recompute_s=0.5, remotes=[("n1", 2), ("n2", 2)])
    (first,) = fetches(exchange)
    assert first.node_id == "n1"
    world.now += first.deadline_s - left_s

    world.end_fetch(exchange, first.fetch_id, "load_failed")

    assert not exchange.fetches and worker.coming["r"] == set()
    end(world)


def test_a_node_that_may_be_asked_next_is_remembered_while_a_third_one_is_looked_at() -> None:
    """With as many nodes busy as are remembered, the third one took the place of the second, which was then asked."""
    world, worker, exchange = world_with("", limits=Limits(peers=3))
    world.locate(worker, "r", TENANT, "abcd", recompute_s=1.0, remotes=[(f"n{n}", 4) for n in (1, 2, 3)])
    for busy in ("n8", "n9"):
        world.locate(worker, busy, busy, "xy", recompute_s=1.0, remotes=[(busy, 2)])
    (first,) = (fetch for fetch in fetches(exchange) if fetch.node_id == "n1")

    world.end_fetch(exchange, first.fetch_id, "load_failed")

    assert asked(exchange)["n2"] == [0, 1, 2, 3]
    end(world)


def test_what_no_node_gives_is_read_from_l4_where_that_has_it() -> None:
    path = "a" * 8
    world, worker, exchange = world_with(path)
    only_in_l4(world, path)
    world.node.in_flight.bandwidth._average, world.node.in_flight.bandwidth._measured_at = 1e5, world.now
    world.locate(worker, "r", TENANT, path, recompute_s=0.02, remotes=[("n1", 8)])
    assert asked(exchange) == {"n1": [*range(8)]} and not world.reads
    worker.messages.clear()

    world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "load_failed")

    assert not worker.messages and len(world.reads) == 8
    world.settle()
    assert worker.coming["r"] == set()
    end(world)


@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_node_reads_for_another_one_what_it_has_asked_it_for(is_read_first: bool) -> None:
    """Both had the pages in a slow L4 and asked each other: each waited for what the other one was to fetch from it."""
    path = "abcd"
    world, worker, exchange = world_with(path)
    only_in_l4(world, path)
    world.node.in_flight.bandwidth._average, world.node.in_flight.bandwidth._measured_at = 1e5, world.now
    world.locate(worker, "r", TENANT, path, recompute_s=1.0, remotes=[("n1", 4)])
    (fetch,) = fetches(exchange)
    assert len(fetch.pages) == 4
    other = world.connect_exchange("n1")

    located = world.locate(other, "x", TENANT, path)

    assert pages(located) == (4, [0, 1, 2, 3]) and len(world.reads) == 4
    if is_read_first:
        world.finish_all()
    else:
        world.arrive(exchange, fetch.fetch_id, 4)
    assert len(other.leases["x"]) == len(worker.leases["r"]) == 4
    end(world)


def test_a_fetch_that_nothing_waits_for_any_more_is_no_fault_of_the_node() -> None:
    world, worker, exchange = world_with("")
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    world.release(worker, "r")

    world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "deadline")

    peer = world.node.in_flight.fetches.peer("n1")
    assert peer is not None and not peer.is_doubtful(world.now) and not world.notes
    end(world)


def test_a_node_that_failed_is_asked_last_for_a_while() -> None:
    world, worker, exchange = world_with("")
    both = {"recompute_s": 1.0, "remotes": [("n1", 2), ("n2", 2)]}
    measured(world, "n1", bytes_s=1e8)
    measured(world, "n2", bytes_s=1e6)
    world.locate(worker, "r", TENANT, "ab", **both)  # type: ignore[arg-type]
    world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "load_failed")
    world.settle()

    world.locate(worker, "r2", TENANT, "cd", **both)  # type: ignore[arg-type]
    world.locate(worker, "r3", TENANT, "xy", recompute_s=1.0, remotes=[("n1", 2)])
    assert [fetch.node_id for fetch in fetches(exchange)] == ["n2", "n1"]
    for fetch in fetches(exchange):
        world.end_fetch(exchange, fetch.fetch_id, "load_failed" if fetch.node_id == "n1" else "")
    world.now += DOUBT_S
    world.locate(worker, "r4", TENANT, "ef", **both)  # type: ignore[arg-type]

    assert [fetch.node_id for fetch in fetches(exchange)] == ["n1"]
    end(world)


def test_no_more_nodes_are_weighed_than_may_be_remembered() -> None:
    world, worker, exchange = world_with("", limits=Limits(peers=1))

    located = world.locate(worker, "r", TENANT, "abcd", remotes=[("n1", 2), ("n2", 4)])

    assert asked(exchange) == {"n1": [0, 1]}
    assert located.missing is not None and (located.missing.page, located.missing.reason) == (2, "no_room")
    end(world)


def test_pages_that_come_from_a_node_without_a_hint_of_it_are_joined() -> None:
    world, worker, exchange = world_with("")
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, "abc", remotes=[("n1", 3)])

    located = world.locate(other, "r", TENANT, "abcd", remotes=[("n2", 4)])

    assert pages(located) == (4, [0, 1, 2, 3]) and asked(exchange) == {"n1": [0, 1, 2], "n2": [3]}
    end(world)


# ---- how fast a node is ------------------------------------------------------------------------------------------

MIB = 2**20


def test_after_a_slow_spell_one_fetch_finds_out_and_nothing_else_pays() -> None:
    """After TRUSTED_S all requests took a node for fast again, until the first fetch of it was over."""
    path = "a" * 64
    world, worker, exchange = world_with("")
    measured(world, "n1", bytes_s=1e5)  # 40 ms a page
    world.now += PeerSpeed.TRUSTED_S + 1.0
    cost = {"recompute_s": 1e-2, "remotes": [("n1", 64)]}

    one = world.locate(worker, "r", TENANT, path, **cost)  # type: ignore[arg-type]
    others = [world.locate(worker, f"r{n}", TENANT, chr(300 + n) * 64, **cost) for n in range(4)]  # type: ignore[arg-type]

    assert pages(one)[0] == world.node.limits.fetch_pages
    assert [pages(other)[0] for other in others] == [0] * 4
    while exchange.fetches:  # it is fast again
        number = fetches(exchange)[0].fetch_id
        world.now += 4 * PAYLOAD_BYTES / 1e7
        world.arrive(exchange, number, 4)
        if not exchange.fetches[number][1]:
            world.end_fetch(exchange, number)
    assert pages(world.locate(worker, "s", TENANT, "b" * 64, **cost))[0] == 64  # type: ignore[arg-type]
    end(world)


def test_a_fetch_that_was_too_slow_to_bring_anything_teaches_that_it_was() -> None:
    """Nothing was told of before a whole batch had come, so a slow node was taken for a fast one again and again."""
    world, worker, exchange = world_with("")
    length = 4 * MIB // PAYLOAD_BYTES
    cost = {"recompute_s": 2.0 / length, "remotes": [("n1", length)]}
    world.locate(worker, "r", TENANT, "a" * length, **cost)  # type: ignore[arg-type]
    world.now += 1.5

    world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "deadline")

    world.release(worker, "r")
    assert pages(world.locate(worker, "r", TENANT, "b" * length, **cost)) == (0, [])  # type: ignore[arg-type]
    world.now += PeerSpeed.TRUSTED_S + 1.0
    assert pages(world.locate(worker, "r", TENANT, "c" * length, **cost))[0] == 64  # type: ignore[arg-type]
    end(world)


def test_of_a_node_of_which_nothing_is_known_little_is_asked_before_it_answers() -> None:
    world, worker, exchange = world_with("", payloads={(0, BF16): MIB})
    world.locate(worker, "r", TENANT, "a" * 40, remotes=[("n1", 40)])
    assert asked(exchange) == {"n1": [0]}

    world.now += 0.01
    world.arrive(exchange, fetches(exchange)[0].fetch_id, 1)
    world.end_fetch(exchange, fetches(exchange)[0].fetch_id)

    assert len(asked(exchange)["n1"]) > 1
    end(world)


def test_what_is_queued_at_a_node_that_turns_out_slow_is_computed() -> None:
    path = "a" * 64
    world, worker, exchange = world_with("", limits=Limits(fetches_per_peer=1, fetch_pages=8))
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, path, recompute_s=1e-3, remotes=[("n1", 64)])
    world.locate(other, "must", "bob", "xy", remotes=[("n1", 2)])
    (first,) = fetches(exchange)
    worker.messages.clear()

    for _ in range(2):
        world.now += 0.04
        world.arrive(exchange, first.fetch_id, 4)

    (failed,) = [message for message in worker.messages if isinstance(message, LoadFailed)]
    assert (failed.missing.page, failed.missing.reason) == (8, "costlier")
    assert len(worker.leases["r"]) == 8 and worker.coming["r"] == set()
    assert other.coming["must"] == {(0, 0), (0, 1)}, "what nothing would compute still comes"
    end(world)


def test_a_gap_before_pages_that_are_here_is_worth_what_they_are() -> None:
    """A page of the gap takes ten times as long as computing it, and less than computing all that is behind it."""
    path = "a" * 64
    world, worker, exchange = world_with(path, limits=Limits(fetches_per_peer=1, fetch_pages=2))
    nowhere(world, path, 0, 4)
    world.locate(worker, "r", TENANT, path, recompute_s=1e-3, remotes=[("n1", 64)])

    for _ in range(2):
        world.now += 0.01
        world.arrive(exchange, fetches(exchange)[0].fetch_id, 1)

    assert worker.coming["r"] == {(0, 2), (0, 3)}
    end(world)


# ---- counters ----------------------------------------------------------------------------------------------------


def test_what_was_read_of_a_lender_that_died_meanwhile_is_none_of_l3s() -> None:
    """Its leases end with the lender, so the read was taken for one of L3: that tier's bytes, loads and speed were wrong."""
    world = World(32, 32)
    lender = world.connect("lender", "l1", arena_bytes=4 * PAYLOAD_BYTES)
    borrower = world.connect("borrower", "b1", brings_down=False)
    world.lend(lender, range(4))
    world.want(borrower, 1)
    world.store(borrower, TENANT, "a")
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
    grant = borrower.stock.pop()
    key = key_of(TENANT, "a")
    world.peers[grant.lender, grant.offset] = (key, BF16)
    page = LentPage(grant, key, BF16, spec_of((0, BF16)), checksum_of(key), PAGE_TOKENS)
    world.say(borrower, StoredInPeer([page]))
    assert len(world.locate(borrower, "r", TENANT, "a").peer) == 1

    world.die(lender)
    world.say(borrower, Copied("r", [(0, 0)], PAYLOAD_BYTES, 5.0))

    host = world.node.snapshot().tiers[TierName.HOST]
    assert (host.bytes_out, [*host.loads_s]) == (0, [])
    assert world.node.in_flight.copy_time.byte_s == 0.0
    # With pages of L3 on their way to the same request it is known whose they are, too.
    world.want(borrower, 1)
    world.store(borrower, TENANT, "ab", first=1)
    world.locate(borrower, "r", TENANT, "ab")
    world.copied(borrower, "r", [0, 1])
    assert world.node.snapshot().tiers[TierName.HOST].bytes_out == 2 * PAYLOAD_BYTES
    end(world)
