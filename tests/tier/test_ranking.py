"""What leaves a node's tiers: who goes first, what sinks and what gives way, and what a tenant's share means."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import msgspec
import pytest
from cache_world import (
    FP8,
    LRU,
    ONE_SIZE,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    SimWorker,
    World,
    chain_keys,
    hello_of,
    key_of,
    tenant_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.residency.accesses import depths_of
from kvtier.tier.node.state.ranking import Histories, Order
from kvtier.tier.node.state.records import Limits, Page
from kvtier.tier.node.state.shares import Shares
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Kind, PolicySettings, Use
from kvtier.tier.policy.registry import make_policy
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.protocol.events import Disconnect, Drain, Evict, FromWorker, WorkerRef
from kvtier.tier.protocol.messages import Finished, WantSlots, WriteMode
from kvtier.tier.stores.host_slots import HostSlots

ADA, BOB = "ada", "bob"
RVI = PolicySettings(guard=False, draw=8, per_draw=1)


def demoting(num_slots: int = 8, ssd_slots: int = 16, **more: Any) -> tuple[World, SimWorker]:
    """A node that writes a page to L4 when its turn has come."""
    world = World(num_slots, ssd_slots, write="demote", **more)
    return world, world.connect()


def bring_down(world: World, worker: SimWorker, tenant: str, path: str, first: int = 0) -> None:
    """A worker's L1 gives up a chain, one page after the other, the last one first."""
    for length in range(len(path), first, -1):
        world.want(worker, 1)
        world.finish_all()
        assert world.store(worker, tenant, path[:length], first=length - 1) == 1
        world.finish_all()


def held(world: World, tier: TierName, tenant: str = ADA) -> set[str]:
    """The paths of a tenant's pages in a tier, of those that the tests use."""
    infos = world.node.admin.pages(tenant_of(tenant), tier, 10**9, world.now)
    keys = {bytes.fromhex(info.key) for info in infos}
    paths = [letter * n for letter in "abcdefgh" for n in range(1, 12)]
    found = {path for path in paths if key_of(tenant, path) in keys}
    assert len(found) == len(keys)
    return found


def pages_of(world: World, tenant: str) -> list[Page]:
    """What the node knows of a tenant's pages, the head first."""
    pages = [page for page in world.node.tables.pages.values() if page.envelope.tenant == tenant_of(tenant)]
    return sorted(pages, key=lambda page: page.envelope.depth)


# ---- uses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LRU, RVI], ids=["lru", "rvi"])
def test_a_finished_request_makes_its_pages_stay_and_l1_hits_count_too(policy: PolicySettings) -> None:
    world = World(8, 0, policy=policy)
    worker = world.connect()
    for path in "abcd":
        world.want(worker, 1)
        world.store(worker, ADA, path)
        world.finished(worker, ADA, path)
        world.now += 10
    for _ in range(20):  # no Locate: the page is in L1
        world.finished(worker, ADA, "a", new_pages=0)
        world.now += 1

    for path in "efg":
        world.want(worker, 4)
        world.store(worker, ADA, path)
        world.finished(worker, ADA, path)

    assert "a" in held(world, TierName.HOST)


@pytest.mark.parametrize("policy", [LRU, RVI], ids=["lru", "rvi"])
def test_what_only_a_closed_session_used_goes_first(policy: PolicySettings) -> None:
    world = World(4, 0, policy=policy)
    worker = world.connect()
    for session, path in enumerate(["a", "b", "c"], 1):
        world.want(worker, 1)
        world.store(worker, ADA, path)
        world.finished(worker, ADA, path, session=session)
        world.now += 1
    world.finished(worker, ADA, "a", new_pages=0, session=9)  # used by two sessions

    world.finished(worker, ADA, "b", new_pages=0, session=2, closed=True)
    world.finished(worker, ADA, "a", new_pages=0, session=9, closed=True)
    world.want(worker, 2)

    assert held(world, TierName.HOST) == {"a", "c"}


def test_a_page_that_left_is_explained_by_the_policy_that_chose_it() -> None:
    world = World(2, 0, policy=RVI)
    worker = world.connect()
    world.want(worker, 1)
    world.store(worker, ADA, "a")
    world.finished(worker, ADA, "a")
    world.now += 12.0
    world.want(worker, 1)
    world.store(worker, ADA, "b")
    world.want(worker, 1)

    missing = world.locate(worker, "r", ADA, "a").missing

    assert missing is not None and missing.reason == "evicted"
    assert missing.detail.startswith("evicted from L3 by rvi, score = ")
    assert "idle 12.0 s, 1 uses" in missing.detail and ", at 2001-" in missing.detail


def test_a_use_names_pages_of_one_tenant_only() -> None:
    world = World(8, 8)
    worker = world.connect()
    for tenant in ADA, BOB:
        bring_down(world, worker, tenant, "aa")
        world.finished(worker, tenant, "aa")
    before = [(page.uses, page.last_use) for page in pages_of(world, BOB)]

    world.now += 5.0
    mixed = [*chain_keys(ADA, "aa"), *chain_keys(BOB, "aa")]
    world.say(worker, Finished("r", [mixed], 1, 8, 0, 0, 7, True, False, 0.0, 0.0, 0.0))

    assert [page.uses for page in pages_of(world, ADA)] == [1, 1]
    assert [(page.uses, page.last_use) for page in pages_of(world, BOB)] == before


def test_a_use_names_pages_that_its_worker_can_have_used() -> None:
    other = {(0, FP8): 2 * PAYLOAD_BYTES}
    world = World(8, 8, payloads=ONE_SIZE | other)
    first, second = world.connect("w0", payloads=ONE_SIZE), world.connect("w1", payloads=other)
    bring_down(world, first, ADA, "aa")

    world.finished(second, ADA, "aa")
    unused = [page.uses for page in pages_of(world, ADA)]
    for _ in range(2):
        world.finished(first, ADA, "aa")

    assert unused == [0, 0] and [page.uses for page in pages_of(world, ADA)] == [1, 1]


@pytest.mark.parametrize(
    ("here", "depths"),
    [
        ([], []),
        ([None, None], [0, 1]),
        ([0, None, 2, None], [0, 1, 2, 3]),
        ([0, None, None, 9, None, 11, None], [0, None, None, 9, 10, 11, 12]),
        ([None, 7], [None, 7]),
        ([5, None, 3], [5, None, 3]),
    ],
)
def test_depths_of_a_stream_are_those_of_its_pages_here(
    here: list[int | None], depths: list[int | None]
) -> None:
    assert list(depths_of(here)) == depths


def test_a_page_of_a_stream_is_ranked_by_its_own_depth_and_what_lies_behind_it() -> None:
    """Its place among the keys that are told was taken for its depth, though pages between them are gone."""
    world = World(12, 0, policy=RVI)
    worker = world.connect()
    bring_down(world, worker, ADA, "aaaaaaaaa")
    keys = chain_keys(ADA, "aaaaaaaaaa")

    window = [keys[0], *keys[6:10]]  # the last one isn't here
    world.say(worker, Finished("r", [window], 1, 8, 0, 0, 0, False, False, 0.0, 0.0, 0.0))

    policy = world.node.tables.policy
    assert isinstance(policy, Rvi)
    rows = [page.row for key in window[:-1] for page in world.node.tables.named(key)]
    rows.append(world.node.tables.histories.elsewhere(keys[9], 0, 1, 1, world.now) or 0)
    assert policy._depth[rows].tolist() == [0, 6, 7, 8, 9]
    assert policy._behind[rows].tolist() == [9, 3, 2, 1, 0]


def test_the_snapshot_says_which_policy_chooses() -> None:
    world = World(2, 4, policy=RVI)
    tiers = world.node.snapshot().tiers
    assert tiers[TierName.HOST].policy == tiers[TierName.SSD].policy == "rvi"


def test_a_use_of_more_pages_than_a_node_looks_at_ends_its_worker_and_one_of_as_many_does_not() -> None:
    node = Coordinator(
        node_id="n",
        incarnation="i",
        host=HostSlots(4 * SLOT_BYTES, SLOT_BYTES),
        policy=LRU,
        limits=Limits(keys_per_locate=2),
    )
    ref = WorkerRef("w", "1")
    node.handle(FromWorker(ref, hello_of("w", "1", ONE_SIZE)), 0.0)
    keys = [[b"k" * 32], [b"l" * 32]]
    use = Finished("r", keys, 1, 1, 0, 0, 0, False, False, 1.0, 0.0, 0.0)
    assert node.handle(FromWorker(ref, use), 0.0) == []

    more = msgspec.structs.replace(use, keys=[*keys, [b"m" * 32]])
    (command,) = node.handle(FromWorker(ref, more), 0.0)

    assert isinstance(command, Disconnect) and "more than 2 pages" in command.reason
    node.check()


@pytest.mark.parametrize("write", ["through", "demote"])
def test_pages_slower_to_load_than_to_compute_are_not_written_to_l4(write: WriteMode) -> None:
    world = World(8, 32, write=write)
    worker = world.connect()
    for path in "aaaaaaaaaaa", "hhhhhhhh":
        bring_down(world, worker, ADA, path)
    world.locate(worker, "r", ADA, "aaaaaaaaaaa")
    world.copied(worker, "r", list(worker.leases["r"]))
    world.now += 0.01
    world.settle()  # so L4 is measured: 4 KiB in 10 ms

    world.finished(worker, ADA, "aaaaaaaaaaa", costs=(1e-5, 100.0))
    for path in ("b", "c", "d", "e", "f", "bb", "cc", "dd"):
        bring_down(world, worker, ADA, path)

    counters = world.node.snapshot().tiers[TierName.SSD]
    assert not held(world, TierName.SSD) & {*"bcdef", "bb", "cc", "dd"} and counters.refused_writes >= 1
    (note,) = [note for note in world.notes if "not written to L4" in note]
    assert "reading one takes" in note and "computing it 0.0 ms" in note
    world.finished(worker, ADA, "aaaaaaaaaaa", costs=(10.0, 100.0))
    bring_down(world, worker, ADA, "ggggggggggg")
    assert held(world, TierName.SSD) & {"g" * n for n in range(1, 12)}


@pytest.mark.parametrize(("share", "is_written"), [(0.9, False), (1.1, True)])
def test_what_is_a_little_quicker_to_load_than_to_compute_is_written(share: float, is_written: bool) -> None:
    world = World(8, 32)
    worker = world.connect()
    bring_down(world, worker, ADA, "a")
    world.ask(Evict, (key_of(ADA, "a"),), TierName.HOST)
    world.locate(worker, "r", ADA, "a")
    world.now += 0.01
    world.settle()  # so L4 is measured
    load_s = world.node.in_flight.ssd_load_s(SLOT_BYTES)

    world.finished(worker, ADA, "a", costs=(share * load_s, 1e12))
    bring_down(world, worker, ADA, "b")

    assert ("b" in held(world, TierName.SSD)) == is_written


# ---- demotion ----------------------------------------------------------------------------------------------------


def test_a_page_is_written_only_when_its_turn_has_come() -> None:
    world, worker = demoting(8, 16)

    bring_down(world, worker, ADA, "aaaaaa")

    assert held(world, TierName.SSD) == set() and len(held(world, TierName.HOST)) == 6
    bring_down(world, worker, ADA, "bbbbbb")
    assert len(held(world, TierName.SSD) | held(world, TierName.HOST)) == 12
    assert len(held(world, TierName.SSD)) <= 6


def test_what_is_worth_less_than_all_of_l4_is_dropped_unwritten() -> None:
    world, worker = demoting(4, 3, segment_slots=1)
    for path in "abcdefg":  # used one after the other, so the first is worth least
        world.finished(worker, ADA, path)
        world.now += 1
    for path in "bcdefg":
        bring_down(world, worker, ADA, path)
    written = world.node.snapshot().tiers[TierName.SSD].demoted_pages

    bring_down(world, worker, ADA, "a")
    bring_down(world, worker, ADA, "h")

    assert "a" not in held(world, TierName.HOST) | held(world, TierName.SSD)
    assert world.node.snapshot().tiers[TierName.SSD].demoted_pages <= written + 1
    missing = world.locate(worker, "r", ADA, "a").missing
    assert missing is not None and missing.detail.startswith("evicted from L3 by lru")


def test_what_is_worth_least_is_not_written_over_the_few_spare_copies_of_l4() -> None:
    """It was, and pushed out again by the next page that came down."""
    world, worker = demoting(4, 64)
    for letter in "abcdefg":
        bring_down(world, worker, ADA, letter * 11)
    for path in "h", *(letter * 11 for letter in "abcdefg"):  # so this one is worth least
        world.now += 1
        world.finished(worker, ADA, path)
    world.locate(worker, "r", ADA, "b")
    world.finish_all()
    world.copied(worker, "r", list(worker.leases["r"]))
    l4 = world.node.snapshot().tiers[TierName.SSD]
    assert l4.used_bytes == l4.capacity_bytes and "b" in held(world, TierName.SSD)  # a spare copy

    for tenant, path in (ADA, "h"), (BOB, "a"), (BOB, "b"):
        bring_down(world, worker, tenant, path)

    assert "h" not in held(world, TierName.HOST) | held(world, TierName.SSD)
    assert "b" in held(world, TierName.SSD)


def test_a_page_taken_up_is_spare_below_until_it_comes_down_again() -> None:
    world, worker = demoting(4, 8)
    bring_down(world, worker, ADA, "aa")
    world.locate(worker, "r", ADA, "aa")
    world.copied(worker, "r", [0, 1])

    for path in "bcde":
        bring_down(world, worker, ADA, path)

    assert not {"a", "aa"} & (held(world, TierName.HOST) | held(world, TierName.SSD))
    assert held(world, TierName.HOST) >= {"c", "d"}
    bring_down(world, worker, ADA, "aa")
    assert {"a", "aa"} <= held(world, TierName.HOST) | held(world, TierName.SSD)


def test_a_page_that_two_workers_use_stays_below() -> None:
    world, worker = demoting(8, 8)
    other = world.connect("w1")
    bring_down(world, worker, ADA, "a")
    world.locate(other, "r", ADA, "a")
    world.copied(other, "r", [0])

    for path in "bcdefgh":
        bring_down(world, worker, ADA, path)

    assert "a" in held(world, TierName.HOST) | held(world, TierName.SSD)


def test_a_page_taken_up_by_a_worker_that_does_not_bring_it_down_stays_below() -> None:
    world = World(4, 8, write="demote")
    worker = world.connect(brings_down=False)
    bring_down(world, worker, ADA, "aa")
    world.locate(worker, "r", ADA, "aa")
    world.copied(worker, "r", [0, 1])

    for path in "bcde":
        bring_down(world, worker, ADA, path)

    assert {"a", "aa"} <= held(world, TierName.HOST) | held(world, TierName.SSD)


def test_what_a_dead_worker_had_taken_up_counts_again() -> None:
    world, worker = demoting(4, 8)
    bring_down(world, worker, ADA, "aa")
    world.locate(worker, "r", ADA, "aa")
    world.copied(worker, "r", [0, 1])

    world.die(worker)
    other = world.connect("w1")
    for path in "bcd":
        bring_down(world, other, ADA, path)

    assert {"a", "aa"} <= held(world, TierName.HOST) | held(world, TierName.SSD)


def test_a_clean_copy_in_l4_saves_the_next_write() -> None:
    world, worker = demoting(4, 32)
    for path in "abcdef":
        bring_down(world, worker, ADA, path)
    assert "a" in held(world, TierName.SSD)
    world.locate(worker, "r", ADA, "a")
    world.settle()
    bring_down(world, worker, ADA, "a")
    before = held(world, TierName.SSD)
    written = world.node.snapshot().tiers[TierName.SSD].demoted_pages

    for path in ("g", "h", "gg", "hh", "ggg"):
        bring_down(world, worker, ADA, path, first=len(path) - 1)

    after = held(world, TierName.SSD)
    assert "a" in before & after and "a" not in held(world, TierName.HOST)
    assert world.node.snapshot().tiers[TierName.SSD].demoted_pages - written == len(after - before)


def test_a_drain_writes_all_that_l3_alone_holds() -> None:
    world, worker = demoting(8, 16)
    bring_down(world, worker, ADA, "aaaaaa")

    world.tell(Drain())
    world.finish_all()

    assert held(world, TierName.SSD) == held(world, TierName.HOST) and len(held(world, TierName.SSD)) == 6


# ---- shares ------------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_share_gives_up_its_own_pages() -> None:
    world = World(8, 0, shares={BOB: 0.25})
    worker = world.connect()
    for path in "abcd":
        world.want(worker, 1)
        world.store(worker, ADA, path)
        world.now += 1
    for path in "abcdefgh":
        world.want(worker, 1)
        world.store(worker, BOB, path)
        world.now += 1

    assert held(world, TierName.HOST, ADA) == {"a", "b", "c", "d"}
    assert held(world, TierName.HOST, BOB) == {"g", "h"}


@given(
    share=st.sampled_from([0.2, 0.5]),
    write=st.sampled_from(["through", "demote"]),
    policy=st.sampled_from([LRU, RVI]),
    ssd_slots=st.sampled_from([0, 8]),
    steps=st.lists(
        st.tuples(st.sampled_from([ADA, BOB]), st.sampled_from("abcd"), st.integers(1, 3)), max_size=40
    ),
)
@settings(max_examples=60, deadline=None)
def test_no_page_of_another_tenant_leaves_while_one_is_over_its_share(
    share: float, write: WriteMode, policy: PolicySettings, ssd_slots: int, steps: list[tuple[str, str, int]]
) -> None:
    world = World(8, ssd_slots, shares={BOB: share}, write=write, policy=policy)
    worker = world.connect()
    most = {TierName.HOST: share * 8 * SLOT_BYTES, TierName.SSD: share * ssd_slots * SLOT_BYTES}
    for tenant, letter, length in steps:
        others = {tier: len(held(world, tier, ADA)) for tier in most}
        bob = {tier: len(held(world, tier, BOB)) for tier in most}

        bring_down(world, worker, tenant, letter * length)
        world.finished(worker, tenant, letter * length)
        world.finish_all()
        world.now += 1

        for tier, nbytes in most.items():
            mine = len(held(world, tier, BOB))
            assert mine * SLOT_BYTES <= nbytes or (tier is TierName.HOST and not ssd_slots and mine <= 1)
            is_full = (bob[tier] + length) * SLOT_BYTES > nbytes
            if tenant == BOB and is_full and tier is TierName.SSD:
                assert len(held(world, tier, ADA)) >= others[tier] - length


def test_shares_are_counted_by_owner() -> None:
    shares = Shares({b"x": 0.5, b"y": 1.0}, 100, 40)
    assert (shares.owner(b"x"), shares.owner(b"y"), shares.owner(b"z")) == (b"x", b"", b"")

    shares.take(TierName.HOST, b"x", 60)
    shares.take(TierName.HOST, b"", 1000)
    shares.take(TierName.SSD, b"x", 20)

    assert shares.over(TierName.HOST) == [b"x"] and shares.over(TierName.SSD) == []
    assert shares.excess(TierName.HOST, b"x") == 10 and shares.excess(TierName.SSD, b"x", 1) == 1
    assert shares.excess(TierName.HOST, b"") == 0
    shares.take(TierName.HOST, b"x", -10)
    assert shares.over(TierName.HOST) == []


# ---- the pieces --------------------------------------------------------------------------------------------------


def test_histories_are_kept_of_so_many_pages_that_left() -> None:
    policy = make_policy(LRU, 4)
    histories: Histories[str] = Histories(policy, 2)
    rows = {key: histories.came(key, 0, 1, 0.0) for key in "abc"}
    histories.end(list(rows.values()), [0, 0, 0], Use(1, 1), 1.0, 1.0)

    for key, row in rows.items():
        histories.left(key, row)

    histories.check(set())
    assert histories.came("b", 0, 1, 2.0) == rows["b"] and histories.came("c", 0, 1, 2.0) == rows["c"]
    assert histories.is_new(histories.came("a", 0, 1, 2.0))


def test_a_page_that_left_before_its_first_request_was_over_leaves_no_history() -> None:
    histories: Histories[str] = Histories(make_policy(LRU, 4), 2)
    histories.left("a", histories.came("a", 0, 1, 0.0))
    assert histories.is_new(histories.came("a", 0, 1, 1.0))


def test_a_node_can_be_stored_and_goes_on_alike() -> None:
    world, worker = demoting(4, 4, policy=RVI)
    for path in "abcdef":
        bring_down(world, worker, ADA, path)
        world.finished(worker, ADA, path, kind=Kind.TOOL)
        world.now += 1
    twin = pickle.loads(pickle.dumps(world.node))

    event = FromWorker(worker.ref, WantSlots(2, PAYLOAD_BYTES))
    assert repr(twin.handle(event, world.now)) == repr(world.node.handle(event, world.now))
    twin.check()


@pytest.mark.parametrize("write", ["through", "demote"])
def test_making_room_costs_the_same_however_many_tenants_have_shares(
    write: WriteMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page that came looked at what leaves first of each tenant: 0.4 ms with 400 of them."""
    lowest, looks = Order.lowest, Counter[int]()

    def counted(order: Order[Page], now: float) -> Page | None:
        looks[num_tenants] += 1
        return lowest(order, now)

    for num_tenants in (2, 24):
        world = World(48, 96, write=write, shares={f"t{n}": 0.5 for n in range(num_tenants)})
        worker = world.connect()
        paths = [chr(0x4E00 + n) for n in range(72)]
        for number, path in enumerate(paths):
            if number == 60:  # L3 is full
                monkeypatch.setattr(Order, "lowest", counted)
            bring_down(world, worker, f"t{number % num_tenants}", path)
        monkeypatch.setattr(Order, "lowest", lowest)

    assert 0 < looks[24] <= looks[2] + 12
