"""Pages that come from other nodes, and go to them: what is asked for, what waits, and what is left when a part dies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cache_world import (
    BF16,
    FP8,
    INT4C,
    PAYLOAD_BYTES,
    ROOT,
    SLOT_BYTES,
    SimWorker,
    World,
    assert_nothing_leaks,
    chain_keys,
    chain_of,
    key_of,
    spec_of,
    stored_page,
    tenant_of,
)

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.remote.fetching import CANCEL_S
from kvtier.tier.node.state.fetches import PeerSpeed
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import (
    Clear,
    Disconnect,
    Drain,
    Evict,
    FromWorker,
    HoldsChanged,
    Send,
    WorkerRef,
)
from kvtier.tier.protocol.messages import (
    CancelFetch,
    Chain,
    Fetch,
    Fetched,
    Finished,
    Hello,
    Loaded,
    LoadFailed,
    Located,
    Refused,
    Stored,
    WantSlots,
)
from kvtier.tier.stores.base import SegmentAllocator
from kvtier.tier.stores.host_slots import host_slots

TENANT = "ada"


def two_nodes(
    path: str = "", *, num_slots: int = 64, ssd_slots: int = 64, **more: Any
) -> tuple[World, SimWorker, SimWorker]:
    """A world whose node holds a chain and has an exchange; its worker and its exchange."""
    world = World(num_slots, ssd_slots, **more)
    worker, exchange = world.connect(), world.connect_exchange()
    if path:
        world.want(worker, len(path))
        assert world.store(worker, TENANT, path) == len(path)
    world.finish_all()
    return world, worker, exchange


def fetches(exchange: SimWorker) -> list[Fetch]:
    """Those that are under way."""
    return [fetch for fetch, _ in exchange.fetches.values()]


def tried(world: World, node_id: str = "n1") -> None:
    """A node was tried just now, and it is not known yet how fast it is."""
    peer = world.node.in_flight.fetches.peer(node_id)
    assert peer is not None
    peer.speed.tries(world.now)


def heard(worker: SimWorker, kind: type) -> list[Any]:
    return [message for message in worker.messages if isinstance(message, kind)]


# ---- what is fetched ---------------------------------------------------------------------------------------------


def test_the_pages_behind_those_here_are_fetched_and_are_pages_like_any_from_then_on() -> None:
    world, worker, exchange = two_nodes("ab")

    located = world.locate(worker, "r", TENANT, "abcdef", remotes=[("n1", 5)])

    assert [page.came_from for page in located.host] == ["L3", "L3"]
    assert located.loading == [(0, 2), (0, 3), (0, 4)]
    assert located.missing is not None and (located.missing.page, located.missing.reason) == (
        5,
        "never_stored",
    )
    (fetch,) = fetches(exchange)
    world.now += 0.25
    assert [page.key for page in fetch.pages] == chain_keys(TENANT, "abcde")[2:]
    assert (fetch.first_page, fetch.root, fetch.tenant) == (2, ROOT, tenant_of(TENANT))
    worker.messages.clear()
    world.arrive(exchange, fetch.fetch_id, 2)
    assert [page.came_from for m in heard(worker, Loaded) for page in m.pages] == ["remote"] * 2
    world.settle()
    assert {(key, BF16) for key in chain_keys(TENANT, "abcde")} <= world.held(TierName.SSD)
    again = world.locate(worker, "r2", TENANT, "abcde")
    assert [page.came_from for page in again.host] == ["L3"] * 5 and again.missing is None
    counted = world.node.snapshot()
    assert (counted.fetches.fetched_pages, counted.fetches.fetch_failed_pages) == (3, 0)
    assert counted.tiers[TierName.HOST].promoted_pages == 3
    assert [*counted.tiers[TierName.REMOTE].loads_s] == pytest.approx([0.25] * 3)
    assert counted.fetches.fetched_bytes == counted.tiers[TierName.REMOTE].bytes_out == 3 * PAYLOAD_BYTES
    assert_nothing_leaks(world)


@pytest.mark.parametrize(
    ("remotes", "why"),
    [([("n0", 4)], "it is this node"), ([("n1", 2)], "no more than is here"), ([], "no hint")],
)
def test_a_hint_that_helps_nothing_is_passed_over(remotes: list[tuple[str, int]], why: str) -> None:
    world, worker, exchange = two_nodes("ab")

    located = world.locate(worker, "r", TENANT, "abcd", remotes=remotes)

    assert not located.loading and not exchange.fetches
    assert located.missing is not None and located.missing.reason == "never_stored"


def test_without_an_exchange_a_hint_is_of_no_use() -> None:
    world = World(8, 8)
    worker = world.connect()
    world.connect_exchange("n1")  # another node's, which only reads here

    located = world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])

    assert located.pages == 0 and not located.loading and world.node.is_idle


@pytest.mark.parametrize(
    "chain",
    [
        chain_of(chain_keys(TENANT, "ab"), window=32, spec=spec_of((0, BF16))),
        chain_of(chain_keys(TENANT, "ab"), decayed=INT4C, recent=16, spec=spec_of((0, BF16))),
        chain_of(chain_keys(TENANT, "ab"), decayed=INT4C, any_variant=True, spec=spec_of((0, BF16))),
        chain_of(chain_keys(TENANT, "ab")),
        chain_of(chain_keys(TENANT, "ab"), spec=b"no one named it."),
    ],
)
def test_pages_that_are_not_all_alike_or_of_an_unknown_size_are_not_fetched(chain: Chain) -> None:
    world, worker, exchange = two_nodes()

    located = world.locate(worker, "r", TENANT, "ab", chains=[chain], remotes=[("n1", 2)])

    assert not located.loading and not exchange.fetches


def test_pages_in_between_that_are_here_or_in_l1_are_not_fetched() -> None:
    world, worker, exchange = two_nodes("abcdef")
    world.ask(Evict, tuple(chain_keys(TENANT, "abcdef")[i] for i in (1, 4)), None)
    world.ask(Evict, (key_of(TENANT, "abc"),), TierName.HOST)
    chain = chain_of(
        chain_keys(TENANT, "abcdefg"), held=bytes([0, 0, 0, 0, 1, 0, 0]), spec=spec_of((0, BF16))
    )

    located = world.locate(worker, "r", TENANT, "abcdefg", chains=[chain], remotes=[("n1", 2)])

    assert located.pages == 6 and sorted(located.loading) == [(0, 1), (0, 2)]  # one from n1, one from L4
    (fetch,) = fetches(exchange)
    assert [page.key for page in fetch.pages] == [key_of(TENANT, "ab")]
    world.settle()
    assert worker.coming["r"] == set() and world.node.is_idle


# ---- load or recompute -------------------------------------------------------------------------------------------


def test_a_fetch_that_takes_longer_than_computing_is_not_made_and_the_node_is_named() -> None:
    world, worker, exchange = two_nodes("a")
    three_pages_s = 0.002 + 3 * PAYLOAD_BYTES / 1e9  # as long as nothing is measured
    tried(world)

    dear = world.locate(
        worker, "r", TENANT, "abcd", recompute_s=0.99 * three_pages_s / 3, remotes=[("n1", 4)]
    )
    cheap = world.locate(
        worker, "r", TENANT, "abcd", recompute_s=1.01 * three_pages_s / 3, remotes=[("n1", 4)]
    )

    assert not dear.loading and dear.missing is not None
    assert (dear.missing.page, dear.missing.reason) == (1, "costlier") and "n1" in dear.missing.detail
    assert len(cheap.loading) == 3 and len(exchange.fetches) == 1


def test_what_is_ahead_at_a_node_counts_and_another_node_may_be_free() -> None:
    world, worker, exchange = two_nodes(num_slots=256)
    world.locate(worker, "r1", TENANT, "a" * 100, remotes=[("n1", 100)])
    tried(world)
    page_s = 1.1 * (0.002 + 4 * PAYLOAD_BYTES / 1e9) / 4  # ten pages more would be too much

    behind = world.locate(worker, "r2", TENANT, "bbbb", recompute_s=page_s, remotes=[("n1", 4)])
    beside = world.locate(worker, "r3", TENANT, "bbbb", recompute_s=page_s, remotes=[("n1", 4), ("n2", 4)])

    assert behind.missing is not None and behind.missing.reason == "costlier"
    assert len(beside.loading) == 4 and fetches(exchange)[-1].node_id == "n2"
    world.settle()


def test_a_node_that_turned_out_slow_is_left_alone_and_tried_again_later() -> None:
    world, worker, exchange = two_nodes()
    cost = {"recompute_s": 0.01, "remotes": [("n1", 4)]}
    assert len(world.locate(worker, "r", TENANT, "aaaa", **cost).loading) == 4  # type: ignore[arg-type]
    (fetch,) = fetches(exchange)
    world.now += 1.0
    world.arrive(exchange, fetch.fetch_id, 4)
    world.end_fetch(exchange, fetch.fetch_id)

    slow = world.locate(worker, "r2", TENANT, "bbbb", **cost)  # type: ignore[arg-type]
    world.now += PeerSpeed.TRUSTED_S + 1
    later = world.locate(worker, "r3", TENANT, "bbbb", **cost)  # type: ignore[arg-type]

    assert slow.missing is not None and slow.missing.reason == "costlier"
    assert len(later.loading) == 4


def test_speed_is_that_of_all_bytes_and_the_first_page_tells_the_latency() -> None:
    speed, mib = PeerSpeed(), 2**20
    assert speed.load_s(1_000_000) == pytest.approx(0.002 + 0.001)

    speed.began(10.0)
    for step in range(100):  # 20 ms until the first MiB, then one each 10 ms
        speed.came(mib, 10.02 + 0.01 * step)

    assert speed.load_s(50 * mib) == pytest.approx(0.02 - 0.01 + 0.5, rel=0.02)


def test_a_node_that_brings_nothing_is_slow() -> None:
    speed = PeerSpeed()
    speed.began(1.0)

    speed.failed(6.0, was_slow=False)

    assert speed.load_s(1000) >= 5.0


def test_a_node_of_unknown_speed_is_tried_by_one_fetch_that_seems_too_dear_and_then_left_alone() -> None:
    world, worker, exchange = two_nodes(num_slots=256)
    cost = {"recompute_s": 1e-9, "remotes": [("n1", 100)]}  # computing takes next to nothing

    first = world.locate(worker, "r", TENANT, "a" * 100, **cost)  # type: ignore[arg-type]
    second = world.locate(worker, "r2", TENANT, "b" * 100, **cost)  # type: ignore[arg-type]

    assert len(first.loading) == world.node.limits.fetch_pages and not second.loading
    (fetch, *_) = fetches(exchange)
    world.now += 1e-3
    world.arrive(exchange, fetch.fetch_id, 1)
    world.settle()
    # As dear as the first byte's wait, not as all: it may be tried again, but not at once.
    cost = {"recompute_s": 1.6e-5, "remotes": [("n1", 64)]}
    third = world.locate(worker, "r3", TENANT, "c" * 64, **cost)  # type: ignore[arg-type]
    assert third.missing is not None and third.missing.reason == "costlier"
    world.now += PeerSpeed.TRY_S
    assert len(world.locate(worker, "r4", TENANT, "d" * 64, **cost).loading) == 64  # type: ignore[arg-type]
    world.settle()
    assert_nothing_leaks(world)


# ---- sharing -----------------------------------------------------------------------------------------------------


def test_two_requests_for_the_same_pages_share_their_loads() -> None:
    world, worker, exchange = two_nodes()
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, "abc", remotes=[("n1", 3)])
    world.locate(other, "r", TENANT, "abcd", remotes=[("n1", 4)])
    first, second = fetches(exchange)
    assert [page.key for page in second.pages] == [key_of(TENANT, "abcd")]

    world.arrive(exchange, first.fetch_id, 3)

    assert len(worker.leases["r"]) == len(other.leases["r"]) == 3
    world.settle()
    assert world.node.snapshot().fetches.fetched_pages == 4
    assert_nothing_leaks(world)


def test_a_page_that_was_computed_meanwhile_serves_and_the_fetched_one_gives_its_slot_back() -> None:
    world, worker, exchange = two_nodes()
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    world.want(other, 1)
    worker.messages.clear()

    world.store(other, TENANT, "a")

    assert [page.came_from for m in heard(worker, Loaded) for page in m.pages] == ["L3"]
    (fetch,) = fetches(exchange)
    used = world.node.snapshot().tiers[TierName.HOST].used_bytes
    world.arrive(exchange, fetch.fetch_id, 1)
    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == used - SLOT_BYTES
    world.settle()
    assert_nothing_leaks(world)


def test_many_pages_go_out_in_bounded_batches_and_come_through_two_slots_in_the_end() -> None:
    path = "a" * 30
    limits = Limits(fetch_pages=4, fetches_per_peer=2)
    world, worker, exchange = two_nodes(limits=limits, num_slots=128)
    world.locate(worker, "r", TENANT, path, remotes=[("n1", 30)])

    assert [(fetch.first_page, len(fetch.pages)) for fetch in fetches(exchange)] == [(0, 4), (4, 4)]
    world.settle()
    assert world.node.snapshot().fetches.fetched_pages == 30

    small, worker, exchange = two_nodes(num_slots=2, ssd_slots=64)
    small.locate(worker, "r", TENANT, path, remotes=[("n1", 30)])
    assert [len(fetch.pages) for fetch in fetches(exchange)] == [1]
    small.settle()
    assert small.node.snapshot().fetches.fetched_pages == 30
    assert_nothing_leaks(small)


def test_pages_on_their_way_from_a_node_have_a_window_and_the_next_batch_waits_for_a_good_part_of_it() -> (
    None
):
    world, worker, exchange = two_nodes(num_slots=256)  # 32 may be on their way, 16 of them from one node
    world.locate(worker, "r", TENANT, "a" * 40, remotes=[("n1", 40)])
    (fetch,) = fetches(exchange)
    assert len(fetch.pages) == 16

    world.arrive(exchange, fetch.fetch_id, 3)
    assert len(exchange.fetches) == 1
    world.arrive(exchange, fetch.fetch_id, 1)

    assert [len(pages) for _, pages in exchange.fetches.values()] == [12, 4]
    world.settle()


def test_a_fetch_holds_pages_of_one_chain_alone() -> None:
    world, worker, exchange = two_nodes(limits=Limits(fetches_per_peer=1))
    world.locate(worker, "r", TENANT, "z", remotes=[("n1", 1)])
    world.locate(worker, "r1", TENANT, "ab", remotes=[("n1", 2)])
    world.locate(worker, "r2", TENANT, "xyz", first=2, remotes=[("n1", 3)])  # by its number the next page
    world.locate(worker, "r3", TENANT, "abc", remotes=[("n1", 2)])

    asked = []
    while exchange.fetches:
        (fetch,) = fetches(exchange)
        asked.append([page.key for page in fetch.pages])
        world.arrive(exchange, fetch.fetch_id, 2)
        world.end_fetch(exchange, fetch.fetch_id)

    assert asked == [chain_keys(TENANT, "z"), chain_keys(TENANT, "ab"), [key_of(TENANT, "xyz")]]


def test_what_a_worker_has_taken_up_alone_is_spare_below_it_where_pages_are_demoted() -> None:
    world, worker, _ = two_nodes(write="demote")
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, "abc", remotes=[("n1", 3)])
    world.locate(other, "r", TENANT, "a", remotes=[("n1", 1)])

    world.settle()

    pages = [world.node.tables.pages[key, BF16] for key in chain_keys(TENANT, "abc")]
    assert [(page.shared, page.above is not None) for page in pages] == [
        (True, False),
        (False, True),
        (False, True),
    ]


def test_slow_fetches_leave_reads_from_l4_alone() -> None:
    world, worker, exchange = two_nodes("abcd", num_slots=8)
    world.ask(Evict, tuple(chain_keys(TENANT, "abcd")), TierName.HOST)
    world.locate(worker, "far", "bob", "b" * 20, remotes=[("n1", 20)])

    world.locate(worker, "near", TENANT, "abcd")
    while world.reads:
        world.finish_read()
        world.copied(worker, "near", list(worker.leases["near"]))

    assert exchange.fetches and worker.coming["near"] == set()


def test_more_pages_than_may_be_queued_are_computed() -> None:
    world, worker, _ = two_nodes(limits=Limits(fetch_queue=3, fetches_per_peer=1, fetch_pages=1, peers=1))
    world.locate(worker, "r", TENANT, "aaa", remotes=[("n1", 3)])

    full = world.locate(worker, "r2", TENANT, "bbbb", remotes=[("n1", 4)])
    busy = world.locate(worker, "r3", TENANT, "b", remotes=[("n2", 1)])

    for located in (full, busy):
        assert located.missing is not None and located.missing.reason == "no_room" and not located.loading
    world.settle()
    assert len(world.locate(worker, "r4", TENANT, "b", remotes=[("n2", 1)]).loading) == 1


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_page_that_the_node_has_not_ends_the_prefix_there_and_what_came_before_serves() -> None:
    world, worker, exchange = two_nodes("a")
    world.locate(worker, "r", TENANT, "abcd", remotes=[("n1", 4)])
    (fetch,) = fetches(exchange)
    world.arrive(exchange, fetch.fetch_id, 1)
    worker.messages.clear()

    world.end_fetch(exchange, fetch.fetch_id, "evicted")

    (failed,) = heard(worker, LoadFailed)
    assert (failed.missing.page, failed.missing.reason) == (2, "evicted") and "n1" in failed.missing.detail
    assert worker.leases["r"].keys() == {(0, 0), (0, 1)} and worker.coming["r"] == set()
    assert world.node.snapshot().fetches.failed_pages == {"evicted": 2}
    assert not world.notes, "a wrong hint is no fault"
    world.settle()
    assert_nothing_leaks(world)


def test_a_fetch_may_lose_pages_and_go_on() -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    world.locate(worker, "r2", TENANT, "ab", remotes=[("n1", 2)])
    (fetch,) = fetches(exchange)
    world.arrive(exchange, fetch.fetch_id, 1)

    world.end_fetch(exchange, fetch.fetch_id, "load_failed", failed=1, is_over=False)

    assert not world.node.is_idle and fetches(exchange) == [fetch]
    assert worker.coming == {"r": set(), "r2": set()}
    assert len(world.notes) == 1 and "n1" in world.notes[0]
    world.end_fetch(exchange, fetch.fetch_id)
    world.settle()
    assert_nothing_leaks(world)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": b"k" * 32},
        {"variant": FP8},
        {"spec_digest": b"s" * 16},
        {"root": b"x" * 32},
        {"parent": b"p" * 32},
        {"tenant": tenant_of("bob")},
        {"depth": 7},
        {"tokens": 3},
        {"made_from": FP8},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_page_that_is_not_the_one_asked_for_is_never_taken(wrong: dict[str, Any]) -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    (fetch,) = fetches(exchange)
    worker.messages.clear()

    world.arrive(exchange, fetch.fetch_id, 2, **wrong)

    (failed,) = heard(worker, LoadFailed)
    assert (failed.missing.page, failed.missing.reason) == (0, "corrupt")
    counted = world.node.snapshot()
    assert (
        counted.fetches.failed_pages == {"corrupt": 1} and counted.tiers[TierName.REMOTE].corrupt_pages == 1
    )
    assert len(world.notes) == 1
    assert world.held(TierName.HOST) == {(key_of(TENANT, "ab"), BF16)}  # the second one was as asked for
    world.settle()
    assert_nothing_leaks(world)


def test_an_exchange_stores_into_the_slots_of_its_fetches_alone() -> None:
    world, worker, exchange = two_nodes()
    other = world.connect_exchange("n1")
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    (fetch,) = fetches(exchange)
    mine = fetch.pages[0].grant
    notes = len(world.notes)

    for who, grant in (
        (other, mine),
        (exchange, msgspec.structs.replace(mine, generation=mine.generation - 1)),
        (exchange, msgspec.structs.replace(mine, slot=mine.slot + 1)),
    ):
        page = stored_page(grant, TENANT, "a")
        world.say(who, Stored([page]))
    world.say(other, Fetched(fetch.fetch_id, [], "", "", 0, 0.0))

    assert len(world.notes) == notes + 3 and not world.held(TierName.HOST)
    assert world.node.snapshot().fetches.fetched_pages == 0
    world.settle()
    assert worker.coming["r"] == set()


def test_when_the_exchange_dies_nothing_waits_and_no_slot_is_lost() -> None:
    world, worker, exchange = two_nodes(limits=Limits(fetch_pages=2, fetches_per_peer=1))
    world.locate(worker, "r", TENANT, "aaaa", remotes=[("n1", 4)])
    (fetch,) = fetches(exchange)
    world.arrive(exchange, fetch.fetch_id, 1)
    worker.messages.clear()

    world.die(exchange)

    (failed,) = heard(worker, LoadFailed)
    assert (failed.missing.page, failed.missing.reason) == (1, "load_failed")
    world.copied(worker, "r", [0])
    world.finish_all()
    assert world.node.is_idle
    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == SLOT_BYTES
    assert not world.locate(worker, "r2", TENANT, "bb", remotes=[("n1", 2)]).loading
    world.connect_exchange(incarnation="2")
    assert len(world.locate(worker, "r3", TENANT, "bb", remotes=[("n1", 2)]).loading) == 2
    world.settle()
    assert_nothing_leaks(world)


def test_a_newer_start_of_the_exchange_takes_over_and_the_olders_slots_stay_its_own_until_it_is_gone() -> (
    None
):
    world, worker, older = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    (fetch,) = fetches(older)
    worker.messages.clear()

    newer = world.connect_exchange(incarnation="2")

    assert [m.missing.reason for m in heard(worker, LoadFailed)] == ["load_failed"]
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    assert [page.key for page in fetches(newer)[0].pages] == [page.key for page in fetch.pages]
    world.arrive(older, fetch.fetch_id, 2)  # not heard any more
    assert not world.held(TierName.HOST)
    older.fetches = {}
    world.die(older)
    world.settle()
    assert len(world.held(TierName.HOST)) == 2
    assert_nothing_leaks(world)


def test_when_the_waiting_worker_dies_its_fetches_are_cancelled_and_what_is_queued_is_forgotten() -> None:
    world, worker, exchange = two_nodes(limits=Limits(fetch_pages=2, fetches_per_peer=1))
    world.locate(worker, "r", TENANT, "aaaa", remotes=[("n1", 4)])
    (fetch,) = fetches(exchange)

    world.die(worker)

    assert exchange.cancelled == {fetch.fetch_id} and [m.fetch_id for m in heard(exchange, CancelFetch)] == [
        fetch.fetch_id
    ]
    assert not world.node.is_idle  # its slots are the exchange's still
    world.end_fetch(exchange, fetch.fetch_id, "load_failed")
    assert world.node.is_idle
    assert_nothing_leaks(world)


def test_what_is_asked_for_again_at_once_is_not_cancelled() -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])

    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])

    assert not exchange.cancelled and len(exchange.fetches) == 1
    world.settle()
    assert worker.coming["r"] == set()


def test_a_page_of_a_cancelled_fetch_that_comes_all_the_same_is_kept() -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    (fetch,) = fetches(exchange)
    world.release(worker, "r")
    assert exchange.cancelled
    world.locate(worker, "r2", TENANT, "ab", remotes=[("n1", 2)])
    assert len(exchange.fetches) == 2  # what is cancelled may not come

    world.arrive(exchange, fetch.fetch_id, 2)

    assert worker.leases["r2"].keys() == {(0, 0), (0, 1)} and worker.coming["r2"] == set()
    world.settle()
    assert_nothing_leaks(world)


def test_an_exchange_that_never_ends_a_fetch_is_not_waited_for() -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    (fetch,) = fetches(exchange)
    worker.messages.clear()
    world.now += 2 * fetch.deadline_s + 0.1

    world.want(world.connect("w1"), 1)  # anything that happens

    (failed,) = heard(worker, LoadFailed)
    assert failed.missing.reason == "deadline" and exchange.cancelled
    assert not world.node.is_idle
    world.end_fetch(exchange, fetch.fetch_id, "deadline")
    assert world.node.is_idle


def test_an_exchange_that_is_stalled_costs_one_request_its_patience_and_the_next_ones_nothing() -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    world.now += 2.0
    world.release(worker, "r")  # the worker's own deadline
    world.now += CANCEL_S + 0.1

    located = world.locate(worker, "r2", TENANT, "cd", remotes=[("n1", 2)], recompute_s=10.0)

    assert not located.loading and located.missing is not None and located.missing.reason == "deadline"
    (fetch,) = fetches(exchange)
    world.end_fetch(exchange, fetch.fetch_id, "deadline")  # it goes on
    assert len(world.locate(worker, "r3", TENANT, "ef", remotes=[("n1", 2)]).loading) == 2
    world.settle()
    assert_nothing_leaks(world)


def test_what_is_queued_behind_an_exchange_that_is_stalled_is_computed() -> None:
    world, worker, exchange = two_nodes(num_slots=256)
    for number in range(8):
        world.locate(worker, f"r{number}", TENANT, chr(300 + number) * 8, remotes=[("n1", 8)])
    waits = {fetch.fetch_id for fetch in fetches(exchange)}
    world.release(worker, "r0")
    worker.messages.clear()
    world.now += CANCEL_S + 0.1

    world.want(world.connect("w1"), 1)  # anything that happens

    assert len(waits) < 8 and {fetch.fetch_id for fetch in fetches(exchange)} == waits
    failed = [message.request_id for message in heard(worker, LoadFailed)]
    assert len(failed) == 8 - len(waits)
    world.finish_fetches()
    world.settle()
    assert_nothing_leaks(world)


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_pages_of_a_cleared_tenant_that_are_on_their_way_are_not_taken_in(is_asked_again: bool) -> None:
    world, worker, exchange = two_nodes("a", num_slots=256)
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, "abcd", remotes=[("n1", 4)])
    world.locate(other, "r", "bob", "xy", remotes=[("n1", 2)])
    its, bobs = fetches(exchange)
    worker.messages.clear()

    world.ask(Clear, tenant_of(TENANT))

    (failed,) = heard(worker, LoadFailed)
    assert failed.missing.reason == "cleared" and its.fetch_id in exchange.cancelled
    world.release(worker, "r")
    if is_asked_again:
        world.locate(worker, "r2", TENANT, "abcd", remotes=[("n1", 4)])
    world.arrive(exchange, its.fetch_id, 3)
    world.arrive(exchange, bobs.fetch_id, 2)
    assert world.held(TierName.HOST) == {(key, BF16) for key in chain_keys("bob", "xy")}
    world.end_fetch(exchange, its.fetch_id)
    world.settle()
    assert_nothing_leaks(world)


def test_queued_pages_of_a_cleared_tenant_are_not_fetched() -> None:
    world, worker, exchange = two_nodes(num_slots=256)
    for number in range(8):
        world.locate(worker, f"r{number}", TENANT, chr(300 + number) * 8, remotes=[("n1", 8)])
    before = len(fetches(exchange))

    world.ask(Clear, None)
    for fetch in fetches(exchange):
        world.end_fetch(exchange, fetch.fetch_id, "deadline")

    assert before < 8 and not exchange.fetches and world.node.is_idle
    assert_nothing_leaks(world)


def test_a_page_that_comes_for_another_tenant_is_a_miss_and_no_crash() -> None:
    world, worker, _ = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    asked = worker.asked["r"]

    forged = msgspec.structs.replace(asked, request_id="x", tenant=tenant_of("bob"))
    commands = world.node.handle(FromWorker(worker.ref, forged), world.now)

    (located,) = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, Located)]
    assert located.missing is not None and located.missing.reason == "identity_differs"
    assert (located.pages, located.loading) == (0, [])


def test_a_fetched_first_page_says_which_prompt_it_begins() -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)], content=b"c" * 16)
    (fetch,) = fetches(exchange)
    world.arrive(exchange, fetch.fetch_id, 2)

    page = world.node.tables.pages[key_of(TENANT, "a"), BF16]
    assert page.content == b"c" * 16
    world.settle()


def test_a_hint_that_was_wrong_is_told_to_the_directory() -> None:
    world, worker, exchange = two_nodes(directory=True)
    world.locate(worker, "r", TENANT, "abc", remotes=[("n1", 3)])
    (fetch,) = fetches(exchange)
    world.arrive(exchange, fetch.fetch_id, 1)

    world.end_fetch(exchange, fetch.fetch_id, "evicted", failed=2)

    assert world.wrong == [("n1", key_of(TENANT, "ab"))]
    world.settle()


def test_a_failing_node_is_noted_once_until_pages_of_it_come_again() -> None:
    world, worker, exchange = two_nodes()
    for path in ("aa", "bb"):
        world.locate(worker, "r", TENANT, path, remotes=[("n1", 2)])
        world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "load_failed")
    assert len(world.notes) == 1

    world.locate(worker, "r", TENANT, "cc", remotes=[("n1", 2)])
    world.settle()
    world.locate(worker, "r", TENANT, "dd", remotes=[("n1", 2)])
    world.end_fetch(exchange, fetches(exchange)[0].fetch_id, "load_failed")

    assert len(world.notes) == 2


def test_pages_of_a_size_that_l3_has_no_room_for_are_computed() -> None:
    sizes = {(0, BF16): PAYLOAD_BYTES, (1, BF16): 3 * PAYLOAD_BYTES}
    world = World(2, 0, payloads=sizes, host_segment_slots=2)  # one segment, which one size has at a time
    small, exchange = world.connect("w1", payloads={(0, BF16): PAYLOAD_BYTES}), world.connect_exchange()
    world.want(small, 1)
    assert world.store(small, TENANT, "a", hold_for="preempted") == 1
    worker = world.connect()
    chain = chain_of(chain_keys(TENANT, "x", 1), spec=spec_of((1, BF16)))

    world.locate(worker, "r", TENANT, "x", chains=[chain], remotes=[("n1", 1)])

    assert not exchange.fetches and worker.coming["r"] == set()
    assert [m.missing.reason for m in heard(worker, LoadFailed)] == ["no_room"]


# ---- exchanges ---------------------------------------------------------------------------------------------------


def test_an_exchange_reads_pages_of_any_shape_and_uses_none() -> None:
    sizes = {(0, FP8): 2 * 4096, (0, INT4C): 4096}
    world = World(32, 32, payloads=sizes, host_segment_slots=1, write="demote")
    worker, other = world.connect(), world.connect("w1")
    for kind, made_from in (((0, FP8), ""), ((0, INT4C), FP8)):
        world.want(worker, 2, kind)
        world.store(worker, TENANT, "ab", kind=kind, made_from=made_from)
    exchange = world.connect_exchange("n1")
    world.now += 10.0

    chain = chain_of(chain_keys(TENANT, "ab"), variant=FP8)
    assert len(world.locate(exchange, "r", TENANT, "ab", chains=[chain]).host) == 2
    world.copied(exchange, "r", [0, 1])

    used = {page.variant: page.idle_s for page in world.node.admin.pages(None, TierName.HOST, 10, world.now)}
    assert used == {FP8: 0.0, INT4C: 10.0}
    counted = world.node.snapshot()
    assert counted.fetches.served_pages == 2 and not counted.tiers[TierName.HOST].loads_s
    # One worker alone has used them: its copy below is spare once it has taken them up.
    for who, shared in ((worker, False), (other, True)):
        world.locate(who, "r", TENANT, "ab", chains=[chain_of(chain_keys(TENANT, "ab"), variant=FP8)])
        world.copied(who, "r", [0, 1])
        assert [world.node.tables.pages[key, FP8].shared for key in chain_keys(TENANT, "ab")] == [shared] * 2
    assert_nothing_leaks(world)


def test_an_exchange_gets_no_page_that_was_made_from_another() -> None:
    world = World(32, 32)
    worker = world.connect()
    world.want(worker, 2)
    world.store(worker, TENANT, "ab", made_from=FP8)
    exchange = world.connect_exchange("n1")

    located = world.locate(exchange, "r", TENANT, "ab")

    assert not located.host and located.missing is not None
    assert (located.missing.page, located.missing.reason) == (0, "never_stored")
    assert_nothing_leaks(world)


def test_pages_of_a_size_that_no_worker_has_any_more_are_kept_in_order_while_another_node_reads_them() -> (
    None
):
    sizes = {(0, BF16): PAYLOAD_BYTES, (1, BF16): 3 * PAYLOAD_BYTES}
    world = World(2, 0, payloads=sizes, host_segment_slots=1)
    large = world.connect("w1", payloads={(1, BF16): 3 * PAYLOAD_BYTES})
    for path in ("x", "y"):
        world.want(large, 1, (1, BF16))
        assert world.store(large, TENANT, path, kind=(1, BF16)) == 1
    exchange = world.connect_exchange("n1")
    for path in ("x", "y"):
        world.locate(exchange, path, TENANT, path, chains=[chain_of(chain_keys(TENANT, path, 1))])
    world.die(large)
    small = world.connect("w0", payloads={(0, BF16): PAYLOAD_BYTES})
    world.want(small, 1)
    assert not small.grants
    world.copied(exchange, "x", [0])

    assert world.store(small, TENANT, "a") == 1

    world.copied(exchange, "y", [0])
    assert_nothing_leaks(world)


@pytest.mark.parametrize("what", [{"tenant": "bob"}, {"root": b"x" * 32}])
def test_an_exchange_gets_no_page_of_another_tenant_or_identity(what: dict[str, Any]) -> None:
    world, _, _ = two_nodes("ab")
    exchange = world.connect_exchange("n1")
    chains = [chain_of(chain_keys(TENANT, "ab"))]

    located = world.locate(
        exchange, "r", what.get("tenant", TENANT), "ab", chains=chains, root=what.get("root", ROOT)
    )

    assert not located.host and located.pages == 0


def test_an_exchanges_lookup_is_not_passed_on_to_further_nodes() -> None:
    world, _, exchange = two_nodes("a")
    other = world.connect_exchange("n1")

    located = world.locate(other, "r", TENANT, "ab", remotes=[("n2", 2)])

    assert located.pages == 1 and not exchange.fetches


@pytest.mark.parametrize(
    "message",
    [Finished("r", [[b"k" * 32]], 0, 0, 0, 0, 0, False, False, 0.0, 0.0, 0.0), WantSlots(1, PAYLOAD_BYTES)],
)
def test_an_exchange_that_acts_as_a_worker_is_disconnected(message: Any) -> None:
    world, worker, exchange = two_nodes()
    world.locate(worker, "r", TENANT, "ab", remotes=[("n1", 2)])
    worker.messages.clear()

    commands = world.node.handle(FromWorker(exchange.ref, message), world.now)

    assert [c.worker for c in commands if isinstance(c, Disconnect)] == [exchange.ref]
    told = [c.message for c in commands if isinstance(c, Send) and c.worker == worker.ref]
    assert [type(m) for m in told] == [LoadFailed]
    world.node.check()


def test_an_exchange_with_pages_of_its_own_is_refused() -> None:
    world = World(4, 0)
    hello = Hello("exchange:n0", "1", {b"s" * 16: PAYLOAD_BYTES}, {}, {}, role="exchange")

    first, second = world.node.handle(FromWorker(WorkerRef("exchange:n0", "1"), hello), world.now)

    assert isinstance(first, Send) and isinstance(first.message, Refused) and isinstance(second, Disconnect)


def test_exchanges_take_no_share_of_the_stock_and_leave_no_identity() -> None:
    alone = World(32, 0)
    worker = alone.connect()
    alone.want(worker, 100)
    crowd = World(32, 0)
    other = crowd.connect()
    for number in range(5):
        crowd.connect_exchange(f"n{number}")

    crowd.want(other, 100)

    assert len(other.grants) == len(worker.grants) > 2
    assert crowd.saved_roots == alone.saved_roots


# ---- what a directory is told ------------------------------------------------------------------------------------


def holds(commands: list[Any]) -> dict[TierName, tuple[set[bytes], set[bytes]]]:
    return {c.tier: (set(c.came), set(c.left)) for c in commands if isinstance(c, HoldsChanged)}


def test_pages_that_come_and_go_are_told_by_tier_and_those_made_from_others_are_not() -> None:
    sizes = {(0, FP8): 2 * 4096, (0, INT4C): 4096}
    world = World(32, 32, payloads=sizes, host_segment_slots=1)
    worker = world.connect()
    keys = set(chain_keys(TENANT, "ab"))
    for kind, made_from in (((0, FP8), ""), ((0, INT4C), FP8)):
        world.want(worker, 2, kind)
        world.store(worker, TENANT, "ab", kind=kind, made_from=made_from)
    world.want(worker, 1, (0, INT4C))
    world.store(worker, TENANT, "x", kind=(0, INT4C), made_from=FP8)
    assert world.told == {TierName.PEER: set(), TierName.HOST: keys, TierName.SSD: set()}

    world.finish_all()
    assert world.told[TierName.SSD] == keys
    world.ask(Evict, (key_of(TENANT, "a"),), TierName.HOST)
    assert world.told[TierName.HOST] == {key_of(TENANT, "ab")}
    gone = holds(world.node.handle(Clear(99, None), world.now))

    assert gone == {
        TierName.HOST: (set(), {key_of(TENANT, "ab")}),
        TierName.SSD: (set(), keys),
    }


def test_what_was_recovered_is_in_what_the_tiers_hold_and_is_not_told() -> None:
    before, _, _ = two_nodes("abc")
    after = World(8, 64, recovered=list(before.catalogue.values()), disk=before.disk)

    commands = after.node.handle(Drain(), after.now)

    assert set(after.node.admin.holds()[TierName.SSD]) == set(chain_keys(TENANT, "abc")) and not holds(
        commands
    )


def test_without_a_directory_nothing_is_told() -> None:
    node = Coordinator(
        node_id="n",
        incarnation="i",
        host=host_slots(4 * SLOT_BYTES, SLOT_BYTES),
        ssd=SegmentAllocator(4 * SLOT_BYTES, SLOT_BYTES),
    )
    world = World(4, 4, directory=False)
    world.told = {}
    world.node = node
    ref = WorkerRef("w", "1")
    commands = node.handle(FromWorker(ref, Hello("w", "1", {spec_of((0, BF16)): PAYLOAD_BYTES}, {}, {})), 0.0)
    granted = [
        c.message
        for c in node.handle(FromWorker(ref, WantSlots(1, PAYLOAD_BYTES)), 0.0)
        if isinstance(c, Send)
    ]
    commands += node.handle(FromWorker(ref, Stored([stored_page(granted[0].grants[0], TENANT, "a")])), 0.0)  # type: ignore[union-attr]
    assert not holds(commands) and node.admin.holds()[TierName.HOST] == [key_of(TENANT, "a")]
