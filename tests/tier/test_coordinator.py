"""The coordinator against a world that distrusts it: golden stories first, then random lives under hypothesis."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from cache_world import (
    BF16,
    FP8,
    INT4C,
    LRU,
    ONE_SIZE,
    PAGE_TOKENS,
    PAYLOAD_BYTES,
    ROOT,
    SLOT_BYTES,
    Kind,
    SimWorker,
    World,
    chain_keys,
    chain_of,
    hello_of,
    key_of,
    spec_of,
    stored_page,
    tenant_of,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.events import (
    BeginClear,
    Clear,
    ClearPages,
    CommitCatalogue,
    Continue,
    Disconnect,
    Drain,
    Evict,
    Failure,
    FromWorker,
    PageId,
    Pin,
    Quiesce,
    ReadDone,
    Send,
    Unpin,
    Verify,
    WorkerRef,
    WritePage,
)
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Grant,
    Granted,
    HostPage,
    Loaded,
    LoadFailed,
    Refused,
    ReturnSlots,
    Stored,
    WantSlots,
    WriteMode,
)
from kvtier.tier.stores.base import Outcome, SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots, host_slots

TENANT = "ada"
TWO_FORMATS = {(0, FP8): PAYLOAD_BYTES, (0, INT4C): PAYLOAD_BYTES}


def pages_of(pages: Iterable[HostPage]) -> list[int]:
    """Which pages of the first chain these are."""
    return [page.page[1] for page in pages if page.page[0] == 0]


def world_with(path: str, *, num_slots: int = 8, ssd_slots: int = 32, **more: Any) -> tuple[World, SimWorker]:
    """A world whose node holds a chain in L4, and in L3 as far as it fits."""
    world = World(num_slots, ssd_slots, **more)
    worker = world.connect()
    stored = 0
    while stored < len(path):
        world.want(worker, len(path) - stored)
        world.finish_all()
        stored += world.store(worker, TENANT, path[: stored + len(worker.grants)], first=stored)
        world.finish_all()
    return world, worker


def evict_all(world: World, path: str, tier: TierName) -> None:
    world.ask(Evict, tuple(chain_keys(TENANT, path)), tier)


# ---- stories -----------------------------------------------------------------------------------------------------


def test_a_stored_page_is_found_and_written_through_to_l4() -> None:
    world, worker = world_with("abc")

    located = world.locate(worker, "r", TENANT, "abcd")

    assert pages_of(located.host) == [0, 1, 2] and not located.loading
    assert located.missing is not None and (located.missing.page, located.missing.reason) == (
        3,
        "never_stored",
    )
    assert world.catalogue.keys() == world.held(TierName.SSD) == world.held(TierName.HOST)


def test_a_chain_of_fifty_pages_comes_up_through_two_free_slots() -> None:
    path = "a" * 50
    world, worker = world_with(path, num_slots=2, ssd_slots=64)

    located = world.locate(worker, "r", TENANT, path)
    got = pages_of(located.host)
    while world.reads or worker.leases["r"]:
        got += pages_of(worker.leases["r"].values())
        world.copied(worker, "r", list(worker.leases["r"]))
        if world.reads:
            world.finish_read()

    assert len(located.host) + len(located.loading) == 50
    assert set(got) == set(range(50))
    assert world.node.is_idle


def world_full_above_l4(path: str, num_slots: int, write: WriteMode) -> tuple[World, SimWorker]:
    """A world whose L3 is full of another chain, of "b"; `path` is in L4 alone."""
    before, _ = world_with(path, num_slots=num_slots, ssd_slots=4 * num_slots)
    catalogue = list(before.catalogue.values())
    world = World(num_slots, 4 * num_slots, recovered=catalogue, disk=before.disk, write=write)
    worker = world.connect()
    stored, others = 0, "b" * num_slots
    while stored < num_slots:
        world.want(worker, num_slots - stored)
        stored += world.store(worker, TENANT, others[: stored + len(worker.grants)], first=stored)
        world.finish_writes()
    return world, worker


@pytest.mark.parametrize("write", ["through", "demote"])
def test_what_is_on_its_way_up_takes_a_bounded_part_of_l3_until_it_is_copied(write: WriteMode) -> None:
    path = "a" * 60
    world, worker = world_full_above_l4(path, 64, write)

    world.locate(worker, "r", TENANT, path)
    world.finish_writes()
    assert len(world.reads) == 16
    while len(worker.leases["r"]) < 24:
        world.finish_read()
        world.finish_writes()
        assert len(world.reads) == max(1, 16 - len(worker.leases["r"]))  # one at a time for others' sake

    world.copied(worker, "r", list(worker.leases["r"]))
    world.finish_writes()
    assert len(world.reads) == 16
    world.settle()
    assert world.node.is_idle


def test_that_part_is_a_share_of_a_large_l3() -> None:
    path = "a" * 40
    world, worker = world_full_above_l4(path, 320, "through")

    world.locate(worker, "r", TENANT, path)
    while len(worker.leases["r"]) < 20:
        assert len(world.reads) == min(16, 20 - len(worker.leases["r"]))
        world.finish_read()

    assert len(world.reads) == 1


def test_a_long_prompt_that_is_copied_as_it_comes_leaves_the_others_in_l3() -> None:
    path = "a" * 60
    world, worker = world_full_above_l4(path, 64, "demote")
    world.locate(worker, "r", TENANT, path)
    world.finish_writes()

    while world.reads:
        before = len(world.reads)
        world.finish_read()
        ((page, lease),) = worker.leases["r"].items()
        world.copied(worker, "r", [page])
        if len(world.reads) == before:
            assert (
                world.reads[-1].slot == lease.grant.slot
            )  # what was taken up makes room for what comes next

    others = set(chain_keys(TENANT, "b" * 64))
    assert not worker.coming["r"]
    assert len({key for key, _ in world.held(TierName.HOST)} & others) >= 64 - 17


def test_a_page_is_on_its_way_up_until_all_have_copied_it() -> None:
    path = "a" * 60
    world, worker = world_full_above_l4(path, 64, "demote")
    other = world.connect("w1")
    world.locate(worker, "r", TENANT, path)
    world.locate(other, "r", TENANT, path[:1])
    world.finish_writes()
    for _ in range(16):
        world.finish_read()
    assert len(worker.leases["r"]) == 16 and len(world.reads) == 1

    world.release(worker, "r", 1)
    world.locate(worker, "s", TENANT, path)  # finds in L3 what has come
    for request in "rs":
        world.copied(worker, request, [0])
    world.finish_writes()
    assert len(world.reads) == 15  # the first page is leased to the other yet
    world.die(other)
    world.finish_writes()
    assert len(world.reads) == 16

    world.settle()
    assert world.node.is_idle


def test_pages_come_up_while_every_slot_is_held_that_may_be() -> None:
    world, worker = world_with("abcd", num_slots=8, ssd_slots=32)
    evict_all(world, "abcd", TierName.HOST)
    for i in range(8):
        world.want(worker, 8)
        world.finish_all()
        world.store(worker, TENANT, "xy"[i % 2] + "z" * i, hold_for=f"preempted{i}")
    assert not world.node.is_idle

    world.locate(worker, "r", TENANT, "abcd")
    world.settle()

    assert worker.coming["r"] == set()


def test_a_duplicate_frees_its_slot_and_the_hold_goes_to_the_copy_that_is_there() -> None:
    world, worker = world_with("ab")
    free_before = world.node.snapshot().tiers[TierName.HOST].used_bytes
    world.want(worker, 2)

    world.store(worker, TENANT, "ab", hold_for="r")

    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == free_before
    for outcome in world.answers[world.ask(Evict, tuple(chain_keys(TENANT, "ab")), TierName.HOST)]:
        assert outcome[1] is Outcome.DEFERRED
    world.release(worker, "r")
    assert world.held(TierName.HOST) == set()


def test_held_pages_stay_in_l3_whatever_else_is_stored() -> None:
    world = World(num_slots=8, ssd_slots=0)
    worker = world.connect()
    world.want(worker, 3)
    world.store(worker, TENANT, "abc", hold_for="preempted")

    for i in range(40):
        world.want(worker, 4)
        world.store(worker, TENANT, "x" * (i % 5 + 1) + "y" * i)

    assert {(key, "bf16") for key in chain_keys(TENANT, "abc")} <= world.held(TierName.HOST)


def test_a_corrupt_page_in_l4_ends_the_chain_and_is_dropped() -> None:
    world, worker = world_with("abcd")
    evict_all(world, "abcd", TierName.HOST)
    world.locate(worker, "r", TENANT, "abcd")
    worker.messages.clear()

    assert [read.key for read in world.reads] == chain_keys(TENANT, "ab")  # two at a time in so small a tier
    world.finish_read("corrupt", which=1)

    (failed,) = [m for m in worker.messages if isinstance(m, LoadFailed)]
    assert (failed.missing.page, failed.missing.reason) == (1, "corrupt")
    world.settle()
    assert world.node.snapshot().tiers[TierName.SSD].corrupt_pages == 1
    assert [note for note in world.notes if "dropped from L4" in note] == world.notes
    again = world.locate(worker, "r2", TENANT, "abcd")
    assert again.missing is not None and (again.missing.page, again.missing.reason) == (1, "corrupt")


def test_a_read_of_other_bytes_than_were_written_is_never_served() -> None:
    """The slot holds a whole page of the right key, of an earlier life: its bytes are not those that the record names."""
    world, worker = world_with("a")
    evict_all(world, "a", TierName.HOST)
    world.locate(worker, "r", TENANT, "a")
    worker.messages.clear()
    read = world.reads.popleft()
    earlier = replace(world.catalogue_envelope(read), checksum=b"e" * 16)

    world.tell(ReadDone(read.transfer, earlier))

    (failed,) = [m for m in worker.messages if isinstance(m, LoadFailed)]
    assert failed.missing.reason == "corrupt" and not worker.leases["r"]
    assert world.node.snapshot().tiers[TierName.SSD].corrupt_pages == 1
    assert world.held(TierName.SSD) == world.held(TierName.HOST) == set()


def test_a_disk_that_fails_to_read_is_a_miss_for_all_that_wait() -> None:
    world, worker = world_with("ab")
    other = world.connect("w1")
    evict_all(world, "ab", TierName.HOST)
    world.locate(worker, "r", TENANT, "ab")
    world.locate(other, "r", TENANT, "ab")
    worker.messages.clear()
    other.messages.clear()

    world.finish_read("io")

    for one in (worker, other):
        (failed,) = [m for m in one.messages if isinstance(m, LoadFailed)]
        assert (failed.missing.page, failed.missing.reason) == (0, "load_failed")
    world.finish_all()
    assert world.node.is_idle


def test_two_requests_for_one_page_share_one_read() -> None:
    world, worker = world_with("ab")
    evict_all(world, "ab", TierName.HOST)

    world.locate(worker, "r1", TENANT, "ab")
    world.locate(worker, "r2", TENANT, "ab")

    assert len(world.reads) == 2
    worker.messages.clear()
    world.finish_all()
    loaded = [
        (m.request_id, p.page[1], p.came_from)
        for m in worker.messages
        if isinstance(m, Loaded)
        for p in m.pages
    ]
    assert sorted(loaded) == [("r1", 0, "L4"), ("r1", 1, "L4"), ("r2", 0, "L4"), ("r2", 1, "L4")]


def test_a_page_stored_while_it_is_loaded_is_served_from_the_store() -> None:
    world, worker = world_with("a")
    evict_all(world, "a", TierName.HOST)
    world.want(worker, 1)
    world.locate(worker, "r", TENANT, "a")
    worker.messages.clear()

    world.store(worker, TENANT, "a")

    assert worker.coming["r"] == set() and len(worker.leases["r"]) == 1
    world.settle()
    assert world.node.is_idle


def test_a_load_slower_than_computing_is_not_made() -> None:
    world, worker = world_with("abcd")
    evict_all(world, "bcd", TierName.HOST)
    evict_all(world, "abcd", TierName.HOST)
    world.locate(worker, "r0", TENANT, "a")
    world.settle()

    located = world.locate(worker, "r", TENANT, "abcd", recompute_s=1e-9)

    assert pages_of(located.host) == [0] and not located.loading
    assert located.missing is not None and (located.missing.page, located.missing.reason) == (1, "costlier")
    assert len(world.locate(worker, "r", TENANT, "abcd", recompute_s=10.0).loading) == 3


@pytest.mark.parametrize(("share", "pages"), [(0.5, 3), (1.5, 4)], ids=["slower", "quicker"])
def test_a_load_is_held_against_computing_what_it_brings_and_no_more(share: float, pages: int) -> None:
    """Three pages of a chain that isn't simple are in L3, and the last one in L4 alone."""
    world, worker = world_with("abcd")
    world.ask(Evict, (key_of(TENANT, "abcd"),), TierName.HOST)
    chain = chain_of(chain_keys(TENANT, "abcd"), decayed=INT4C, any_variant=True)
    load_s = PAYLOAD_BYTES / 1e9

    located = world.locate(worker, "r", TENANT, "abcd", chains=[chain], recompute_s=share * load_s)

    assert located.pages == pages and len(located.loading) == pages - 3
    assert (located.missing is None) == (pages == 4)


def test_the_queue_ahead_counts_in_the_cost_of_a_load() -> None:
    world, worker = world_with("a" * 8 + "b" * 8, num_slots=4, ssd_slots=64)
    evict_all(world, "a" * 8 + "b" * 8, TierName.HOST)
    page_s = PAYLOAD_BYTES / 1e9

    alone = world.locate(worker, "r1", TENANT, "a" * 4, recompute_s=1.5 * page_s)
    behind = world.locate(worker, "r2", TENANT, "a" * 8, recompute_s=1.5 * page_s)

    assert alone.missing is None and len(alone.loading) == 4
    assert behind.missing is None  # 4 ahead and 4 more: 8 pages in the time of 12
    world.locate(worker, "r1", TENANT, "a" * 8 + "b" * 8)
    late = world.locate(worker, "r3", TENANT, "a", recompute_s=1.5 * page_s)
    assert late.missing is not None and late.missing.reason == "costlier"


def test_a_copy_that_is_said_to_have_taken_years_keeps_l4_from_being_read_no_more_than_a_slow_one() -> None:
    world, worker = world_with("abcd")
    world.locate(worker, "r", TENANT, "abcd")
    world.say(worker, Copied("r", list(worker.leases["r"]), PAYLOAD_BYTES, 1e9))
    worker.leases["r"].clear()
    evict_all(world, "abcd", TierName.HOST)

    located = world.locate(worker, "s", TENANT, "abcd", recompute_s=1.0)

    assert located.missing is None and len(located.loading) == 4


def test_releasing_the_tail_cancels_its_queued_loads_and_lets_running_ones_finish() -> None:
    world, worker = world_with("abcdefgh", num_slots=8, ssd_slots=32)
    evict_all(world, "abcdefgh", TierName.HOST)
    world.locate(worker, "r", TENANT, "abcdefgh")
    running = len(world.reads)

    world.release(worker, "r", 1)
    world.finish_all()

    assert 0 < running < 8
    assert len(world.held(TierName.HOST)) == running
    assert worker.leases["r"].keys() == {(0, 0)}
    world.copied(worker, "r", [0])
    assert world.node.is_idle


def test_a_corrupt_copy_in_l3_is_never_served_again() -> None:
    world, worker = world_with("ab")
    world.locate(worker, "r", TENANT, "ab")
    world.locate(worker, "r2", TENANT, "ab")

    world.copied(worker, "r", [0, 1], corrupt=[1])

    again = world.locate(worker, "r3", TENANT, "ab")
    assert pages_of(again.host) == [0] and again.loading == [(0, 1)]  # from L4, where it is whole
    assert world.node.snapshot().tiers[TierName.HOST].corrupt_pages == 1
    world.settle()
    assert world.node.is_idle


def test_the_write_to_l4_that_finds_a_corrupt_page_drops_it_from_l3() -> None:
    world = World(num_slots=4, ssd_slots=8)
    worker = world.connect()
    world.want(worker, 1)
    world.store(worker, TENANT, "a")

    world.finish_write("corrupt")

    located = world.locate(worker, "r", TENANT, "a")
    assert located.missing is not None and located.missing.reason == "corrupt"
    assert world.node.is_idle and world.held(TierName.HOST) == set()


def test_a_failed_write_leaves_the_page_in_l3_and_drain_tries_once_more() -> None:
    world = World(num_slots=4, ssd_slots=8)
    worker = world.connect()
    world.want(worker, 1)
    world.store(worker, TENANT, "a")
    world.finish_write("io")
    assert world.held(TierName.SSD) == set() and world.node.is_idle

    world.tell(Drain())
    world.finish_all()

    assert world.held(TierName.SSD) == world.held(TierName.HOST) != set()


def test_clean_pages_leave_l3_before_dirty_ones_and_the_least_recent_first() -> None:
    world, worker = world_with("abcd", num_slots=6, ssd_slots=32)
    world.want(worker, 1)
    world.store(worker, TENANT, "x")
    world.now += 10
    world.locate(worker, "r", TENANT, "ab")
    world.copied(worker, "r", [0, 1])
    world.finish_write("io")  # x stays dirty

    world.want(worker, 2)
    world.want(worker, 1)

    left = world.held(TierName.HOST)
    assert {(key, "bf16") for key in [*chain_keys(TENANT, "ab"), key_of(TENANT, "x")]} <= left


def test_chains_leave_l4_from_their_tails() -> None:
    world, worker = world_with("abcdef", num_slots=4, ssd_slots=6)

    world.want(worker, 2)
    world.store(worker, TENANT, "xy")
    world.finish_all()

    left = world.held(TierName.SSD)
    assert {(key, "bf16") for key in chain_keys(TENANT, "abcd")} <= left
    assert (key_of(TENANT, "abcdef"), "bf16") not in left


def test_a_page_that_left_its_last_tier_is_explained() -> None:
    world, worker = world_with("abcd", num_slots=4, ssd_slots=4)
    world.now += 12.5
    for tail in ("xyz", "xyzu", "xyzuv"):
        world.want(worker, 2)
        world.store(worker, TENANT, tail, first=len(tail) - 2)
        world.finish_all()

    located = world.locate(worker, "r", TENANT, "abcd")

    assert located.missing is not None and located.missing.reason == "evicted"
    assert "by lru, score = idle 12." in located.missing.detail and "2001-09-09T01:" in located.missing.detail


def test_a_page_that_is_here_only_as_l4_keeps_it_is_explained_as_such() -> None:
    world = World(6, 6, payloads=MIXED, ssd_variants=frozenset({INT4C}))
    worker = world.connect("w0", "1", payloads=MIXED)
    world.want(worker, 2, (0, INT4C))
    world.store(worker, TENANT, "ab", kind=(0, INT4C), made_from=FP8)
    world.finish_all()

    exact = chain_of(chain_keys(TENANT, "ab"), variant=FP8)
    located = world.locate(worker, "r", TENANT, "ab", chains=[exact])

    assert located.pages == 0
    assert located.missing is not None and located.missing.reason == "variant"
    assert "int4c" in located.missing.detail and "lossy" in located.missing.detail


def test_another_identity_is_named_by_the_field_that_differs_within_a_tenant_only() -> None:
    world = World(num_slots=8, ssd_slots=8)
    before = world.connect("w0", fields={"weights": "w", "epoch": "0"})
    after = world.connect("w1", fields={"weights": "w", "epoch": "1"})
    old, new = root_key({"weights": "w", "epoch": "0"}), root_key({"weights": "w", "epoch": "1"})
    content = b"c" * 16
    world.want(before, 1)
    world.store(before, TENANT, "a", content=content, root=old)

    same = world.locate(after, "r1", TENANT, "z", content=content, root=new)
    other = world.locate(after, "r2", "eve", "z", content=content, root=new)

    assert same.missing is not None and same.missing.reason == "identity_differs"
    assert same.missing.detail.endswith("epoch is '1', stored with '0'")
    assert other.missing is not None and other.missing.reason == "never_stored"
    assert dict(world.saved_roots).keys() == {old, new}


OLD, NEW = {"weights": "w", "epoch": "0"}, {"weights": "w", "epoch": "1"}
CONTENT = b"c" * 16


def world_of_two_identities(limits: Limits | None = None) -> World:
    """Page "a" is stored under NEW, and "z", with the same tokens, was under OLD."""
    world = World(num_slots=8, ssd_slots=8, limits=limits)
    for name, fields, path in (("w0", OLD, "z"), ("w1", NEW, "a")):
        worker = world.connect(name, fields=fields)
        world.want(worker, 1)
        world.store(worker, TENANT, path, content=CONTENT, root=root_key(fields))
        world.finish_all()
    return world


def why_missing(world: World, path: str, fields: dict[str, str], tenant: str = TENANT) -> tuple[str, str]:
    worker = world.connect("asks", fields=fields)
    missing = world.locate(worker, "r", tenant, path, content=CONTENT, root=root_key(fields)).missing
    assert missing is not None
    world.die(worker)
    return missing.reason, missing.detail


def test_a_page_evicted_before_a_restart_is_not_blamed_on_another_identity() -> None:
    world = world_of_two_identities()
    evict_all(world, "a", TierName.HOST)
    evict_all(world, "a", TierName.SSD)
    world.finish_all()
    assert why_missing(world, "a", NEW)[0] == "evicted"
    world.tell(Quiesce())
    world.finish_all()

    after = World(
        8,
        8,
        recovered=list(world.catalogue.values()),
        disk=world.disk,
        roots=world.saved_roots,
        stored_before=world.saved_before,
    )

    reason, detail = why_missing(after, "a", NEW)
    assert reason == "evicted"
    assert detail == "stored before under this identity; when and why it left is not known any more"
    assert why_missing(after, "a", NEW, tenant="eve")[0] == "never_stored"
    assert why_missing(after, "b", NEW)[0] == "never_stored", "another page of a known prompt and identity"
    third = why_missing(after, "c", {**NEW, "epoch": "2"})
    assert third[0] == "identity_differs" and "epoch is '2'" in third[1]


def test_a_page_whose_place_in_l4_is_gone_at_the_start_is_lost() -> None:
    world = world_of_two_identities()
    lost = world.catalogue.pop((key_of(TENANT, "a"), "bf16"))

    after = World(8, 8, recovered=list(world.catalogue.values()), lost=[lost], disk=world.disk)

    reason, detail = why_missing(after, "a", NEW)
    assert reason == "lost" and "gone when the node started at 2001-" in detail
    worker = after.connect("w1", fields=NEW)
    after.want(worker, 1)
    after.store(worker, TENANT, "a", content=CONTENT, root=root_key(NEW))
    assert len(after.locate(worker, "r", TENANT, "a").host) == 1


def test_a_cleared_tenants_prompts_are_forgotten_over_a_restart_too() -> None:
    world = world_of_two_identities()
    world.tell(Quiesce())
    assert world.saved_before.contents and world.saved_before.first_pages

    world.ask(Clear, tenant_of(TENANT))

    assert world.saved_before.contents == world.saved_before.first_pages == ()


def test_what_was_stored_is_saved_every_so_many_prompts() -> None:
    world = world_of_two_identities(Limits(contents_unsaved=2))
    assert len(world.saved_before.first_pages) == 2
    assert world.saved_before.contents == ((tenant_of(TENANT), CONTENT, (root_key(OLD), root_key(NEW))),)


def test_a_dead_workers_slots_and_leases_come_back() -> None:
    world, worker = world_with("abcd", num_slots=8)
    world.want(worker, 2)
    world.locate(worker, "r", TENANT, "abcd")
    other = world.connect("w1")

    world.die(worker)

    evict_all(world, "abcd", TierName.HOST)
    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == 0
    world.want(other, 8)
    assert len(other.grants) == 4  # half of the slots may lie in stocks


def test_a_fenced_incarnation_is_not_heard_but_keeps_its_slots_until_it_is_gone() -> None:
    world = World(num_slots=8, ssd_slots=0)
    old = world.connect("w0", "1")
    world.want(old, 2)
    new = world.connect("w0", "2")

    world.store(old, TENANT, "ab")

    assert world.held(TierName.HOST) == set()
    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == 2 * SLOT_BYTES
    world.die(old)
    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == 0
    world.want(new, 1)
    assert world.store(new, TENANT, "a") == 1


def test_a_grant_of_an_earlier_generation_stores_nothing() -> None:
    world = World(num_slots=4, ssd_slots=0)
    worker = world.connect()
    world.want(worker, 1)
    stale = worker.grants[0]
    world.say(worker, ReturnSlots([worker.grants.pop()]))
    world.want(worker, 1)

    world.say(worker, Stored([stored_page(stale, TENANT, "a")]))

    assert worker.grants[0].slot == stale.slot and worker.grants[0] != stale
    assert world.held(TierName.HOST) == set() and len(world.notes) == 1


def a_node(num_slots: int = 4, **more: Any) -> Coordinator:
    return Coordinator(
        node_id="n", incarnation="i", host=HostSlots(num_slots * SLOT_BYTES, SLOT_BYTES), **more
    )


def test_a_worker_that_stores_pages_of_another_size_than_it_has_named_is_disconnected() -> None:
    node = a_node()
    ref = WorkerRef("w", "1")
    node.handle(FromWorker(ref, hello_of("w", "1", ONE_SIZE)), 0.0)
    (granted,) = node.handle(FromWorker(ref, WantSlots(1, PAYLOAD_BYTES)), 0.0)
    assert isinstance(granted, Send) and isinstance(granted.message, Granted)
    page = msgspec.structs.replace(stored_page(granted.message.grants[0], TENANT, "a"), spec_digest=b"?" * 16)

    (command,) = node.handle(FromWorker(ref, Stored([page])), 0.0)

    assert isinstance(command, Disconnect) and "which its Hello doesn't say of that spec" in command.reason
    assert node.snapshot().bad_messages == 1
    assert node.handle(FromWorker(ref, WantSlots(1, PAYLOAD_BYTES)), 0.0) == []
    node.check()


@pytest.mark.parametrize(
    ("payloads", "why"),
    [
        ({(0, BF16): 2 * PAYLOAD_BYTES}, "pages of 8192 bytes can't go into L3"),
        ({}, "names 0 kinds of pages"),
        ({(n, BF16): 1 for n in range(65)}, "names 65 kinds of pages, 1 to 64"),
    ],
)
def test_a_worker_whose_pages_do_not_fit_is_refused(payloads: dict[Kind, int], why: str) -> None:
    node = a_node()
    refused, disconnect = node.handle(FromWorker(WorkerRef("w", "1"), hello_of("w", "1", payloads)), 0.0)
    assert isinstance(refused, Send) and isinstance(refused.message, Refused)
    assert why in refused.message.reason
    assert isinstance(disconnect, Disconnect)
    node.check()


def test_a_worker_that_wants_slots_of_a_size_it_has_not_named_is_disconnected() -> None:
    node = a_node()
    ref = WorkerRef("w", "1")
    node.handle(FromWorker(ref, hello_of("w", "1", ONE_SIZE)), 0.0)

    (command,) = node.handle(FromWorker(ref, WantSlots(1, 77)), 0.0)

    assert isinstance(command, Disconnect) and "77 bytes, which it hasn't named" in command.reason


def test_pinned_pages_stay_in_both_tiers_and_pins_are_bounded() -> None:
    world, worker = world_with("abcd", num_slots=8, ssd_slots=8)
    keys = tuple(chain_keys(TENANT, "abcd"))
    results = world.answers[world.ask(Pin, keys[:2])]
    assert [outcome for _, outcome in results] == [Outcome.ACCEPTED] * 2

    for i in range(30):
        world.want(worker, 4)
        world.store(worker, TENANT, "x" * (i + 1), first=max(0, i - 3))
        world.finish_all()

    pinned = {(key, "bf16") for key in keys[:2]}
    assert pinned <= world.held(TierName.HOST) and pinned <= world.held(TierName.SSD)
    assert world.answers[world.ask(Evict, keys[:1], None)] == ((keys[0], Outcome.REJECTED),)
    many = tuple((bytes.fromhex(i.key)) for i in world.node.admin.pages(None, TierName.SSD, 99, world.now))
    outcomes = [outcome for _, outcome in world.answers[world.ask(Pin, many)]]
    assert outcomes.count(Outcome.ACCEPTED) == 4 and outcomes.count(Outcome.REJECTED) == len(many) - 4
    world.ask(Unpin, many)
    assert world.answers[world.ask(Evict, keys[:1], None)] == ((keys[0], Outcome.ACCEPTED),)


def test_clear_makes_a_tenants_pages_unfindable_at_once_and_wipes_them() -> None:
    world, worker = world_with("abcd", num_slots=8)
    world.want(worker, 2)
    world.store(worker, "bob", "ab")
    world.locate(worker, "r", TENANT, "ab")
    places = {entry.place for page, entry in world.catalogue.items() if page[0] in chain_keys(TENANT, "abcd")}

    results = dict(world.answers[world.ask(Clear, tenant_of(TENANT))])

    assert [results[key] for key in chain_keys(TENANT, "abcd")] == [Outcome.DEFERRED] * 2 + [
        Outcome.ACCEPTED
    ] * 2
    missing = world.locate(worker, "r2", TENANT, "abcd").missing
    assert missing is not None and (missing.page, missing.reason) == (0, "cleared")
    world.copied(worker, "r", [0, 1])
    world.finish_all()
    assert not places & world.disk.keys()
    assert world.held(TierName.HOST) == world.held(TierName.SSD) == {
        (key, "bf16") for key in chain_keys("bob", "ab")
    }  # fmt: skip


def test_a_cleared_page_that_is_read_from_l4_is_wiped_when_its_last_reader_is_done() -> None:
    world, worker = world_with("ab")
    evict_all(world, "ab", TierName.HOST)
    world.locate(worker, "r", TENANT, "ab")
    places = {entry.place for entry in world.catalogue.values()}
    assert len(world.reads) == 2

    world.ask(Clear, tenant_of(TENANT))
    while world.writer:
        world.finish_write()
    assert world.disk.keys() == places and not world.catalogue, "slots that are read"
    world.finish_all()

    assert not world.disk


@pytest.mark.parametrize("how", ["read", "written"])
def test_what_was_evicted_in_use_before_its_tenants_clear_is_wiped_as_well(how: str) -> None:
    world, worker = world_with("a")
    if how == "read":
        evict_all(world, "a", TierName.HOST)
        world.locate(worker, "r", TENANT, "a")
    else:
        world.want(worker, 1)
        world.store(worker, TENANT, "b")
    world.ask(Evict, (key_of(TENANT, "a"), key_of(TENANT, "b")), None)
    assert world.reads or any(isinstance(order, WritePage) for order in world.writer)

    world.ask(Clear, tenant_of(TENANT))
    world.finish_all()

    assert not world.to_wipe & world.disk.keys() and not world.catalogue


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.SSD])
def test_a_page_that_is_pinned_while_its_eviction_waits_for_its_readers_stays(tier: TierName) -> None:
    """An operator evicts a page that a worker reads, thinks better of it, and pins it: the pin was accepted."""
    world, worker = world_with("a", ssd_slots=8 if tier is TierName.SSD else 0)
    key = key_of(TENANT, "a")
    if tier is TierName.SSD:
        evict_all(world, "a", TierName.HOST)
    world.locate(worker, "r", TENANT, "a")
    assert world.answers[world.ask(Evict, (key,), tier)] == ((key, Outcome.DEFERRED),)

    assert world.answers[world.ask(Pin, (key,))] == ((key, Outcome.ACCEPTED),)
    world.settle()

    assert (key, BF16) in world.held(tier)


def test_pins_take_half_of_the_smaller_tier_at_most_whichever_that_is() -> None:
    """L4 with room for four pages below an L3 for sixteen, and the other way round: two pages may be pinned."""
    for num_slots, ssd_slots in ((16, 4), (4, 16)):
        world, _ = world_with("abcd", num_slots=num_slots, ssd_slots=ssd_slots)

        outcomes = dict(world.answers[world.ask(Pin, tuple(chain_keys(TENANT, "abcd")))])

        assert [*outcomes.values()].count(Outcome.ACCEPTED) == 2, f"L3 of {num_slots}, L4 of {ssd_slots}"


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_restart_lets_an_original_go_first_only_where_it_was_not_used_since_the_conversion(
    is_newer: bool,
) -> None:
    """Both formats of a page are in L4; which was used last decides which of them L4 keeps."""
    before = World(8, 8, payloads=TWO_FORMATS)
    worker = before.connect()
    for kind, made_from in (((0, FP8), ""), ((0, INT4C), FP8)):
        before.want(worker, 1, kind)
        before.store(worker, TENANT, "a", kind=kind, made_from=made_from)
        before.finish_all()
    entries = list(before.catalogue.values())
    for entry in entries:
        is_original = entry.envelope.variant == FP8
        entry.last_use_s = 1e9 + (50.0 if is_original == is_newer else 10.0)

    after = World(8, 4, payloads=TWO_FORMATS, recovered=entries, disk=before.disk)
    worker = after.connect()
    gone: list[str] = []
    for i in range(8):
        here = {variant for key, variant in after.held(TierName.SSD) if key == key_of(TENANT, "a")}
        gone += [variant for variant in (FP8, INT4C) if variant not in here and variant not in gone]
        after.want(worker, 1, (0, FP8))
        after.store(worker, TENANT, "xyzuvwst"[i], kind=(0, FP8))
        after.finish_all()

    assert gone[0] == (INT4C if is_newer else FP8)


def test_a_page_cleared_while_it_is_written_does_not_stay_in_l4() -> None:
    world = World(num_slots=4, ssd_slots=8)
    worker = world.connect()
    world.want(worker, 2)
    world.store(worker, TENANT, "a")

    ticket = world.ask(Clear, None)
    assert world.answers[ticket] == ((key_of(TENANT, "a"), Outcome.DEFERRED),)
    world.store(worker, TENANT, "a")  # again, while the former life is still being written
    world.finish_all()

    assert world.catalogue.keys() == {(key_of(TENANT, "a"), "bf16")}
    world.ask(Clear, None)
    world.finish_all()
    assert not world.catalogue and not world.disk


def test_verification_drops_bad_copies_and_says_what_is_left() -> None:
    world, _ = world_with("abc")
    evict_all(world, "c", TierName.HOST)
    world.ask(Evict, (key_of(TENANT, "abc"),), TierName.HOST)
    keys = chain_keys(TENANT, "abc")

    ticket = world.ask(Verify, tuple(keys))
    while world.checks:
        key, tier = world.checks[0].envelope.key, world.checks[0].tier
        bad = key == keys[2] or (key == keys[1] and tier is TierName.HOST)
        world.finish_check("corrupt" if bad else None)

    assert world.answers[ticket] == (
        (keys[0], Outcome.ACCEPTED),
        (keys[1], Outcome.CLIPPED),
        (keys[2], Outcome.MISSING),
    )
    unknown = world.ask(Verify, (b"?" * 32,))
    assert world.answers[unknown] == ((b"?" * 32, Outcome.MISSING),)


def test_pages_of_the_catalogue_are_warm_after_a_restart() -> None:
    world, worker = world_with("abc")
    world.finished(worker, TENANT, "abc", new_pages=3)
    world.locate(worker, "r", TENANT, "abc")
    world.settle()
    world.finished(worker, TENANT, "abc", new_pages=0)
    world.tell(Drain())
    world.tell(Quiesce())
    world.finish_all()

    after = World(8, 32, recovered=list(world.catalogue.values()), disk=world.disk)
    located = after.locate(after.connect(), "r", TENANT, "abc")

    assert located.loading == [(0, 0), (0, 1), (0, 2)]
    assert {entry.uses for entry in after.catalogue.values()} == {1}
    after.settle()
    assert after.node.is_idle


def test_drain_grants_nothing_and_quiesce_starts_no_writes() -> None:
    world = World(num_slots=8, ssd_slots=8, limits=Limits(writes=1))
    worker = world.connect()
    world.want(worker, 3)
    world.store(worker, TENANT, "abc")

    world.tell(Drain())
    world.want(worker, 1)
    world.tell(Quiesce())
    world.finish_all()

    assert not worker.grants and world.node.is_written
    assert len(world.held(TierName.SSD)) == 1


@pytest.mark.parametrize("write", ["through", "demote"])
def test_a_drain_in_parts_writes_what_was_there_and_what_comes_meanwhile(write: WriteMode) -> None:
    world = World(num_slots=16, ssd_slots=32, limits=Limits(part=2), write=write)
    worker = world.connect()
    world.want(worker, 8)
    world.store(worker, TENANT, "abcdefg")

    world.tell(Drain())
    assert world.node.has_more and not world.node.is_written
    world.store(worker, TENANT, "x")
    world.tell(Continue())
    assert world.node.has_more
    world.finish_all()

    assert world.node.is_written and world.held(TierName.SSD) == world.held(TierName.HOST)
    assert len(world.held(TierName.SSD)) == 8


def test_a_drain_that_is_cut_short_writes_nothing_more() -> None:
    world = World(num_slots=16, ssd_slots=32, limits=Limits(part=2), write="demote")
    worker = world.connect()
    world.want(worker, 8)
    world.store(worker, TENANT, "abcdefgh")

    world.tell(Drain())
    world.tell(Quiesce())
    world.finish_all()

    assert world.node.is_written and not world.node.has_more
    assert len(world.held(TierName.SSD)) == 2


def test_what_a_gone_worker_alone_had_above_counts_again_in_parts() -> None:
    world = World(num_slots=64, ssd_slots=64, limits=Limits(part=2), write="demote")
    worker, other = world.connect("w0"), world.connect("w1")
    for one, path in ((worker, "abcdef"), (other, "wxyz")):
        world.want(one, len(path))
        world.store(one, TENANT, path)
        world.locate(one, "r", TENANT, path)
        world.settle()
        world.release(one, "r", 0)
    pages = [world.node.tables.pages[key, BF16] for key in chain_keys(TENANT, "abcdef")]
    others = [world.node.tables.pages[key, BF16] for key in chain_keys(TENANT, "wxyz")]
    assert {page.above for page in pages} == {worker.ref}

    world.die(worker)

    counts = []
    while world.node.has_more:
        counts.append(sum(page.above is not None for page in pages))
        world.tell(Continue())
    assert counts == [4, 2] and not any(page.above for page in pages)
    assert {page.above for page in others} == {other.ref}


def test_recovery_goes_in_parts() -> None:
    world, worker = world_with("abcdef")
    for path in ("abcdef", "abcde", "abcd", "abc"):  # so that their last uses differ
        world.now += 1.0
        world.finished(worker, TENANT, path)
    world.tell(Drain())
    world.tell(Quiesce())
    world.finish_all()
    entries = list(world.catalogue.values())
    allocator = SegmentAllocator(32 * SLOT_BYTES, 2 * SLOT_BYTES)
    for entry in entries:
        assert allocator.take(entry.place, entry.slot_bytes)
    node = Coordinator(
        node_id="n0",
        incarnation="i",
        host=HostSlots(8 * SLOT_BYTES, SLOT_BYTES),
        ssd=allocator,
        limits=Limits(part=1),
    )

    here = [len(node.admin.page_ids()) for _ in node.recover(entries)]

    assert here == [1, 2, 3, 6, 6, 6, 6, 6, 6, 6]
    node.check()
    assert {page.key for page in node.admin.pages(None, TierName.SSD, 10, 0.0)} == {
        entry.envelope.key.hex() for entry in entries
    }


@pytest.mark.parametrize("num_slots", [0, 1])
def test_without_l3_all_is_a_miss_and_nothing_is_granted(num_slots: int) -> None:
    world = World(num_slots=num_slots, ssd_slots=8)
    worker = world.connect()
    world.want(worker, 4)

    located = world.locate(worker, "r", TENANT, "abc")

    assert located.missing is not None and located.missing.reason == "cache_off"
    assert not worker.grants and world.node.is_idle


def test_without_l4_pages_live_in_l3_alone() -> None:
    world = World(num_slots=4, ssd_slots=0)
    worker = world.connect()
    world.want(worker, 2)
    world.store(worker, TENANT, "ab")

    assert len(world.locate(worker, "r", TENANT, "ab").host) == 2
    assert world.node.is_written and not world.writer


def test_requests_of_a_worker_are_bounded() -> None:
    world, worker = world_with("a", limits=Limits(requests_per_worker=2))
    for request in ("r1", "r2"):
        world.locate(worker, request, TENANT, "a")

    refused = world.locate(worker, "r3", TENANT, "a")

    assert refused.missing is not None and refused.missing.reason == "no_room"
    world.release(worker, "r1")
    assert world.locate(worker, "r3", TENANT, "a").missing is None


def test_a_chain_is_looked_up_as_far_as_the_limit() -> None:
    world, worker = world_with("abc", limits=Limits(keys_per_locate=2))

    located = world.locate(worker, "r", TENANT, "abc")

    assert len(located.host) == 2 and located.missing is not None and located.missing.reason == "no_room"


def test_pages_of_another_size_make_room_in_l4_for_those_of_this_one() -> None:
    small, _ = world_with("abcd", ssd_slots=4)
    allocator = SegmentAllocator(4 * SLOT_BYTES, 2 * SLOT_BYTES)
    for entry in small.catalogue.values():
        assert allocator.take(entry.place, entry.slot_bytes)
    large = 3 * PAYLOAD_BYTES  # in a slot of two of the small ones
    node = Coordinator(
        node_id="n",
        incarnation="i",
        host=host_slots(8 * SLOT_BYTES, 2 * SLOT_BYTES),
        ssd=allocator,
        recovered=list(small.catalogue.values()),
    )
    ref = WorkerRef("w", "1")
    node.handle(FromWorker(ref, hello_of("w", "1", {(0, BF16): large})), 0.0)
    (granted,) = node.handle(FromWorker(ref, WantSlots(1, large)), 0.0)
    assert isinstance(granted, Send) and isinstance(granted.message, Granted)
    page = stored_page(granted.message.grants[0], "bob", "a")

    commit, write = node.handle(FromWorker(ref, Stored([page])), 0.0)

    tail = (key_of(TENANT, "abcd"), "bf16"), (key_of(TENANT, "abc"), "bf16")
    assert isinstance(commit, CommitCatalogue) and commit.drops == tail
    assert isinstance(write, WritePage) and write.entry.slot_bytes == 2 * SLOT_BYTES
    node.check()


# ---- random lives ------------------------------------------------------------------------------------------------

# Few chains that share prefixes, so that lives meet each other's pages all the time.
PATHS = ["aaaa", "aaab", "aa", "abbbb", "b"]
TENANTS = ["ada", "ada", "ada", "bob"]
REQUESTS = ["r0", "r1"]
NAMES = ["w0", "w0", "w1"]
READERS = ["w0", "w0", "w1", "exchange:n1"]  # the last serves this node's pages to another
EXCHANGES = ["exchange:n0", "exchange:n0", "exchange:n1"]
PEER_REASONS = ["", "never_stored", "load_failed", "corrupt", "deadline", "what nothing knows"]
READ_FAILURES: list[Failure | None] = [None, None, None, None, "corrupt", "missing", "io"]
WRITE_FAILURES: list[Failure | None] = [None, None, None, None, "corrupt", "io", "full"]
TIERS = [None, TierName.HOST, TierName.SSD]
COSTS = [0.0, 0.0, 1e-7, 1e-5]
POLICIES = [LRU, PolicySettings(draw=4, per_draw=2, ghosts=2.0)]
WRITES: list[WriteMode] = ["through", "demote"]
SHARES: list[dict[str, float]] = [{}, {"bob": 0.3}, {"ada": 0.5, "bob": 1.0}]
FEW = Limits(
    part=1,
    writes=2,
    reads=2,
    verifies=1,
    gone=4,
    contents=2,
    contents_unsaved=2,
    roots=2,
    persist_every=3,
    fetches=2,
    fetches_per_peer=1,
    fetch_pages=2,
    fetch_queue=4,
    peers=1,
)


# Two layer groups, the first of which decays: three slot sizes, no two of which share a segment well.
MIXED: dict[Kind, int] = {(0, FP8): 3 * 4096, (0, INT4C): 4096, (1, FP8): 2 * 4096}
NO_DECAY = 1 << 30
DECAY: dict[str, Any] = {"variant": FP8, "decayed": INT4C, "recent": 16, "sinks": 16}


def lookup_of(how: int, tenant: str, path: str) -> list[Chain]:
    """The chains of a lookup: a plain one, a decaying one, a lossy one, one with a window, or two layer groups."""
    keys, second = chain_keys(tenant, path), chain_keys(tenant, path, 1)
    lossy = {"variant": FP8, "decayed": INT4C, "recent": NO_DECAY, "any_variant": True}
    return [
        [chain_of(keys, variant=FP8, spec=spec_of((0, FP8)))],
        [chain_of(keys, **DECAY)],
        [chain_of(chain_keys(tenant, path, 2), other_keys=keys, **lossy)],
        [chain_of(keys, window=32, window_sinks=16, **DECAY)],
        [chain_of(keys, **DECAY), chain_of(second, variant=FP8, window=32)],
    ][how % 5]


class Actors:
    """Workers that come, store, ask, copy, cheat and die; a disk that fails; operators that pin, evict and clear.

    The world asserts at each command that it is safe, the coordinator's `check` runs after each event, and in the end
    all who waits must have been served, and all that was borrowed must be back.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.incarnation = 0
        # Begun: of whom, its number, and what is yet to have its turn.
        self.clears: list[tuple[bytes | None, int, deque[PageId]]] = []

    def worker(self, name: str) -> SimWorker:
        for worker in self.world.workers.values():
            if worker.ref.worker_id == name:
                return worker
        self.incarnation += 1
        if name.startswith("exchange:"):
            return self.world.connect_exchange(name.removeprefix("exchange:"), str(self.incarnation))
        payloads = self.world.payloads
        if name == "w1":  # not all workers know all formats
            payloads = {kind: nbytes for kind, nbytes in payloads.items() if kind[1] != INT4C}
        return self.world.connect(name, str(self.incarnation), payloads=payloads, saves=True)

    def kind(self, worker: SimWorker, which: int) -> Kind:
        kinds = list(worker.payloads)
        return kinds[which % len(kinds)]

    def want(self, name: str, count: int, which: int) -> None:
        worker = self.worker(name)
        self.world.want(worker, count, self.kind(worker, which))

    def store(
        self, name: str, tenant: str, path: str, first: int, hold_for: str | None, refill: bool, which: int
    ) -> None:
        worker = self.worker(name)
        kind = self.kind(worker, which)
        if refill:
            self.world.want(worker, len(path), kind)
        self.world.store(
            worker,
            tenant,
            path,
            first=first % len(path),
            hold_for=hold_for,
            content=b"c" * 16,
            kind=kind,
            made_from=FP8 if kind[1] == INT4C else "",
        )

    def decay(self, tenant: str, path: str, first: int) -> None:
        """A page as it was written, and at once what was made from it."""
        worker = self.worker("w0")
        for kind, made_from in (((0, FP8), ""), ((0, INT4C), FP8)):
            if kind in worker.payloads:
                self.world.want(worker, 1, kind)
                first %= len(path)
                self.world.store(
                    worker, tenant, path[: first + 1], first=first, kind=kind, made_from=made_from
                )

    def store_stale(self, name: str, path: str) -> None:
        worker = self.worker(name)
        if worker.grants:
            mine = worker.grants[0]
            kind = next(k for k, nbytes in self.world.payloads.items() if nbytes == mine.payload_bytes)
            old = Grant(mine.slot, mine.generation - 1, mine.payload_bytes)
            self.world.say(worker, Stored([stored_page(old, "eve", path[:1], kind=kind)]))

    def finish(
        self, name: str, tenant: str, path: str, kind: int, session: int, closed: bool, cost: float
    ) -> None:
        """A request is over, whatever became of its pages."""
        self.world.finished(
            self.worker(name),
            tenant,
            path,
            groups=1 + (self.world.payloads is not ONE_SIZE),
            kind=kind,
            session=session,
            closed=closed,
            seconds=0.5,
            costs=(cost, 100.0 if cost else 0.0),
        )

    def save_asked(self, name: str, count: int, has: bool, other_root: bool) -> None:
        """A worker stores what another node asks for, or says that it doesn't have it."""
        worker = self.worker(name)
        if has:
            self.world.save_asked(worker, count, b"o" * 32 if other_root else ROOT)
        else:
            self.world.refuse_asked(worker, count)

    def give_back(self, name: str) -> None:
        worker = self.worker(name)
        if worker.grants:
            self.world.say(worker, ReturnSlots([worker.grants.pop()]))

    def locate(
        self,
        name: str,
        request: str,
        tenant: str,
        path: str,
        cost: float,
        how: int,
        held: int,
        cut: int,
        hint: int = 0,
    ) -> None:
        """Look up in the way `how`; two bits a page of `held` say what L1 has, `cut` where it is known to have all.

        Two other nodes are said to hold so many pages, `hint` and one less.
        """
        is_plain = self.world.payloads is ONE_SIZE
        plain = chain_of(chain_keys(tenant, path), spec=spec_of((0, BF16)))
        chains = [plain] if is_plain else lookup_of(how, tenant, path)
        first = cut % len(path)
        bits = bytes(held >> 2 * page & (3 if chains[0].decayed else 1) for page in range(len(path)))
        cut_chains = [
            msgspec.structs.replace(
                chain,
                keys=chain.keys[first:],
                other_keys=chain.other_keys[first:],
                held=bytes(b & (3 if chain.decayed else 1) for b in bits[first:]),
            )
            for chain in chains
        ]
        self.world.locate(
            self.worker(name),
            request,
            tenant,
            path,
            recompute_s=cost,
            content=b"c" * 16,
            first=first,
            chains=cut_chains,
            last_position=PAGE_TOKENS * len(path) - held % 2,
            remotes=[("n1", hint - 1), ("n2", hint)] if hint else [],
        )

    def answer(self, which: int, count: int, reason: str, is_wrong: bool, is_over: bool) -> None:
        """The exchange goes on with one of its fetches: pages come, or don't."""
        exchanges = [worker for worker in self.world.workers.values() if worker.fetches]
        for exchange in exchanges:
            number = [*exchange.fetches][which % len(exchange.fetches)]
            if count and exchange.fetches[number][1]:
                wrong = {"tokens": 3} if is_wrong else {}
                self.world.arrive(exchange, number, count, **wrong)
            else:
                self.world.end_fetch(exchange, number, reason, which, is_over)

    def copy(self, name: str, request: str, which: int, corrupt: int) -> None:
        """Say Copied of the leased pages whose bit in `which` is set; the bit in `corrupt` calls it corrupt."""
        worker = self.worker(name)
        pages = [ref for ref in sorted(worker.leases.get(request, {})) if which >> ref[1] & 1]
        self.world.copied(worker, request, pages, [ref for ref in pages if corrupt >> ref[1] & 1])

    def release(self, name: str, request: str, from_page: int) -> None:
        self.world.release(self.worker(name), request, from_page)

    def die(self, name: str) -> None:
        self.world.die(self.worker(name))

    def read_ends(self, failure: Failure | None, which: int) -> None:
        if self.world.reads:
            self.world.finish_read(failure, which)

    def writer_goes_on(self, failure: Failure | None) -> None:
        if self.world.writer:
            self.world.finish_write(failure)

    def check_ends(self, failure: Failure | None) -> None:
        if self.world.checks:
            self.world.finish_check(failure)

    def ask(self, verb: type, tenant: str, path: str, *more: object) -> None:
        keys = chain_keys(tenant, path)
        if len(self.world.payloads) > 1:
            keys += chain_keys(tenant, path, 1)
        self.world.ask(verb, tuple(keys), *more)

    def begin_clear(self, tenant: str | None, is_numbered: bool = False) -> None:
        """As the service does: what is here now goes in parts, and the last step comes when all have had their turn."""
        digest = None if tenant is None else tenant_of(tenant)
        self.world.number += is_numbered
        self._begin_clear(digest, self.world.number if is_numbered else 0)

    def _begin_clear(self, digest: bytes | None, number: int) -> None:
        node = self.world.node
        self.world.ask(BeginClear, digest, number)
        ids = node.admin.page_ids()
        self.clears.append((digest, number, deque(ids if digest is None else node.admin.ids_of(digest, ids))))

    def hears(self, name: str, tenant: str | None) -> None:
        """A worker, or another node's exchange, hears of the latest clear, as if it was this tenant's."""
        if self.world.number:
            self.worker(name).knows[None if tenant is None else tenant_of(tenant)] = self.world.number

    def catch_up(self) -> None:
        """The service goes on with a clear that the node heard of by a worker."""
        if self.world.to_catch_up:
            self._begin_clear(*self.world.to_catch_up.popleft())

    def clear_on(self, which: int) -> None:
        """The next part of a clear, two pages; behind the last one the step that ends it."""
        if not self.clears:
            return
        digest, number, left = self.clears[which % len(self.clears)]
        if left:
            part = tuple(left.popleft() for _ in range(min(2, len(left))))
            self.world.ask(ClearPages, part)
            return
        del self.clears[which % len(self.clears)]
        self.world.ask(Clear, digest, number)
        node = self.world.node
        assert not (
            node.admin.page_ids() if digest is None else node.admin.ids_of(digest, node.admin.page_ids())
        )

    def go_on(self) -> None:
        """The next part of what a gone worker, or a drain, has left to do."""
        if self.world.node.has_more:
            self.world.tell(Continue())

    def compare(self) -> None:
        """Each tier holds what the coordinator says it holds."""
        world = self.world
        assert world.held(TierName.HOST) <= set(world.host.values())
        if world.node.is_idle and not world.writer:
            assert not world.to_wipe & world.disk.keys(), "a cleared page is left on the disk"
        if not world.writer:
            assert world.held(TierName.SSD) == world.catalogue.keys()
            for page, entry in world.catalogue.items():
                assert world.disk[entry.place] == page

    def end(self) -> None:
        """All wait for nothing, all dies, and every byte is free again."""
        world = self.world
        while world.to_catch_up:
            self.catch_up()
        while self.clears:
            self.clear_on(0)
        world.settle()
        for worker in list(world.workers.values()):
            world.die(worker)
        world.finish_all()
        self.compare()
        assert world.node.is_idle
        assert len(world.answers) == world.ticket
        everything = world.ask(Clear, None)
        world.finish_all()
        assert all(outcome is Outcome.ACCEPTED for _, outcome in world.answers[everything])
        snapshot = world.node.snapshot()
        assert snapshot.tiers[TierName.HOST].used_bytes == snapshot.tiers[TierName.SSD].used_bytes == 0
        assert not world.catalogue


names, tenants, paths, requests = map(st.sampled_from, (NAMES, TENANTS, PATHS, REQUESTS))
read_failures, write_failures = st.sampled_from(READ_FAILURES), st.sampled_from(WRITE_FAILURES)
few_bits, few = st.integers(0, 31), st.integers(0, 2)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    limits = FEW if draw(st.booleans()) else None
    num_slots, ssd_slots = draw(st.integers(2, 12)), draw(st.sampled_from([0, 2, 4, 8, 16]))
    how: dict[str, Any] = {
        "limits": limits,
        "policy": draw(st.sampled_from(POLICIES)),
        "write": draw(st.sampled_from(WRITES)),
        "shares": draw(st.sampled_from(SHARES)),
    }
    if draw(st.booleans()):
        return World(num_slots, ssd_slots, **how)
    return World(
        num_slots,
        ssd_slots,
        **how,
        payloads=MIXED,
        host_segment_slots=draw(st.integers(1, min(3, num_slots))),
        ssd_variants=draw(st.sampled_from([None, frozenset({INT4C})])),
    )


class Life(RuleBasedStateMachine):
    """What hypothesis makes of the actors; it shrinks what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.actors = Actors(World(2, 2))

    @initialize(world=worlds())
    def start(self, world: World) -> None:
        self.actors = Actors(world)

    @rule(name=names, count=st.integers(0, 6), which=few)
    def wants_slots(self, **what: Any) -> None:
        self.actors.want(**what)

    @rule(
        name=names,
        tenant=tenants,
        path=paths,
        first=st.integers(0, 4),
        hold_for=st.none() | requests,
        refill=st.booleans(),
        which=few,
    )
    def stores(self, **how: Any) -> None:
        self.actors.store(**how)

    @rule(tenant=tenants, path=paths, first=st.integers(0, 4))
    def decays(self, **what: Any) -> None:
        self.actors.decay(**what)

    @rule(
        name=names,
        tenant=tenants,
        path=paths,
        kind=st.integers(0, 3),
        session=few,
        closed=st.booleans(),
        cost=st.sampled_from(COSTS),
    )
    def finishes(self, **what: Any) -> None:
        self.actors.finish(**what)

    @rule(name=names, path=paths)
    def stores_stale(self, name: str, path: str) -> None:
        self.actors.store_stale(name, path)

    @rule(name=names, count=st.integers(1, 4), has=st.booleans(), other_root=st.booleans())
    def saves_what_is_asked_for(self, **how: Any) -> None:
        self.actors.save_asked(**how)

    @rule(name=names)
    def returns_slots(self, name: str) -> None:
        self.actors.give_back(name)

    @rule(
        name=st.sampled_from(READERS),
        request=requests,
        tenant=tenants,
        path=paths,
        cost=st.sampled_from(COSTS),
        how=st.integers(0, 4),
        held=st.just(0) | st.integers(0, 1023),
        cut=st.just(0) | few,
        hint=st.just(0) | st.integers(1, 6),
    )
    def locates(self, **what: Any) -> None:
        self.actors.locate(**what)

    @rule(name=st.sampled_from(EXCHANGES))
    def exchange_comes(self, name: str) -> None:
        self.actors.worker(name)

    @rule(
        which=st.integers(0, 3),
        count=few,
        reason=st.sampled_from(PEER_REASONS),
        is_wrong=st.booleans(),
        is_over=st.booleans(),
    )
    def peer_answers(self, **what: Any) -> None:
        self.actors.answer(**what)

    @rule(name=st.sampled_from(EXCHANGES))
    def exchange_dies(self, name: str) -> None:
        self.actors.die(name)

    @rule(name=st.sampled_from(READERS), request=requests, which=few_bits, corrupt=st.just(0) | few_bits)
    def copies(self, **which: Any) -> None:
        self.actors.copy(**which)

    @rule(name=st.sampled_from(READERS), request=requests, from_page=st.integers(0, 3))
    def releases(self, **which: Any) -> None:
        self.actors.release(**which)

    @rule(name=names)
    def dies(self, name: str) -> None:
        self.actors.die(name)

    @precondition(lambda self: self.actors.world.reads)
    @rule(failure=read_failures, which=st.integers(0, 3))
    def read_ends(self, failure: Failure | None, which: int) -> None:
        self.actors.read_ends(failure, which)

    @precondition(lambda self: self.actors.world.writer)
    @rule(failure=write_failures)
    def writer_goes_on(self, failure: Failure | None) -> None:
        self.actors.writer_goes_on(failure)

    @precondition(lambda self: self.actors.world.checks)
    @rule(failure=read_failures)
    def check_ends(self, failure: Failure | None) -> None:
        self.actors.check_ends(failure)

    @rule()
    def all_io_ends(self) -> None:
        self.actors.world.finish_all()

    @rule(verb=st.sampled_from([Pin, Unpin]), tenant=tenants, path=paths)
    def operator_pins(self, verb: type, tenant: str, path: str) -> None:
        self.actors.ask(verb, tenant, path)

    @rule(tenant=tenants, path=paths, tier=st.sampled_from(TIERS))
    def operator_evicts(self, tenant: str, path: str, tier: TierName | None) -> None:
        self.actors.ask(Evict, tenant, path, tier)

    @rule(tenant=st.none() | tenants)
    def operator_clears(self, tenant: str | None) -> None:
        self.actors.world.ask(Clear, None if tenant is None else tenant_of(tenant))

    @rule(tenant=st.none() | tenants, is_numbered=st.booleans())
    def operator_begins_to_clear(self, tenant: str | None, is_numbered: bool) -> None:
        self.actors.begin_clear(tenant, is_numbered)

    @rule(name=st.sampled_from(READERS), tenant=st.none() | tenants)
    def hears_of_a_clear(self, name: str, tenant: str | None) -> None:
        self.actors.hears(name, tenant)

    @rule()
    def node_catches_up(self) -> None:
        self.actors.catch_up()

    @rule(which=few)
    def clear_goes_on(self, which: int) -> None:
        self.actors.clear_on(which)

    @rule(tenant=tenants, path=paths)
    def operator_verifies(self, tenant: str, path: str) -> None:
        self.actors.ask(Verify, tenant, path)

    @rule()
    def work_goes_on(self) -> None:
        self.actors.go_on()

    @precondition(lambda self: self.actors.world.node.tables.pages)
    @rule()
    def drains(self) -> None:
        self.actors.world.tell(Drain())

    @rule(seconds=st.sampled_from([0.001, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.actors.world.now += seconds

    @invariant()
    def tiers_hold_what_is_said(self) -> None:
        self.actors.compare()

    def teardown(self) -> None:
        self.actors.end()


Life.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_busy_lives_break_nothing(seed: int) -> None:
    """Longer lives than hypothesis makes, weighted towards traffic; a failure names its seed."""
    rng = Random(seed)
    limits = FEW if rng.random() < 0.3 else None
    num_slots, ssd_slots = rng.randint(2, 12), rng.choice([0, 2, 4, 8, 16])
    how: dict[str, Any] = {
        "limits": limits,
        "policy": rng.choice(POLICIES),
        "write": rng.choice(WRITES),
        "shares": rng.choice(SHARES),
    }
    if rng.random() < 0.4:
        actors = Actors(World(num_slots, ssd_slots, **how))
    else:
        variants = rng.choice([None, frozenset({INT4C})])
        segment = rng.randint(1, min(3, num_slots))
        world = World(
            num_slots,
            ssd_slots,
            **how,
            payloads=MIXED,
            host_segment_slots=segment,
            ssd_variants=variants,
        )
        actors = Actors(world)
    who, whose, chain = (
        (lambda: rng.choice(NAMES)),
        (lambda: rng.choice(TENANTS)),
        (lambda: rng.choice(PATHS)),
    )
    request = lambda: rng.choice(REQUESTS)
    bits = lambda: rng.randrange(32)
    which = lambda: rng.randrange(3)
    weighted: list[tuple[int, Callable[[], object]]] = [
        (10, lambda: actors.store(who(), whose(), chain(), rng.choice([0, 0, 1, 2]), None, True, which())),
        (3, lambda: actors.store(who(), whose(), chain(), rng.choice([0, 0, 1]), request(), True, which())),
        (6, lambda: actors.decay(whose(), chain(), rng.choice([0, 0, 1, 2]))),
        (
            6,
            lambda: actors.finish(
                who(), whose(), chain(), which(), which(), rng.random() < 0.2, rng.choice(COSTS)
            ),
        ),
        (1, lambda: actors.store_stale(who(), chain())),
        (1, lambda: actors.give_back(who())),
        (5, lambda: actors.save_asked(who(), which() + 1, rng.random() < 0.7, rng.random() < 0.1)),
        (
            12,
            lambda: actors.locate(
                who(),
                request(),
                whose(),
                chain(),
                rng.choice(COSTS),
                how=rng.randrange(5),
                held=rng.choice([0, rng.randrange(1024)]),
                cut=rng.choice([0, 0, 1, 2]),
                hint=rng.choice([0, rng.randrange(6)]),
            ),
        ),
        (
            3,
            lambda: actors.locate(
                "exchange:n1", request(), whose(), chain(), 0.0, how=rng.randrange(5), held=0, cut=0
            ),
        ),
        (3, lambda: actors.copy("exchange:n1", request(), bits(), bits() if rng.random() < 0.1 else 0)),
        (
            12,
            lambda: actors.locate(
                who(), request(), whose(), chain(), rng.choice([0.0, 1.0]), 0, rng.choice([0, 1, 4]), 0, 5
            ),
        ),
        (4, lambda: actors.worker("exchange:n0")),
        (1, lambda: actors.die(rng.choice(EXCHANGES))),
        (
            14,
            lambda: actors.answer(
                which(),
                which() + 1 if rng.random() < 0.8 else 0,
                rng.choice(PEER_REASONS),
                rng.random() < 0.1,
                rng.random() < 0.7,
            ),
        ),
        (12, lambda: actors.copy(who(), request(), bits(), bits() if rng.random() < 0.2 else 0)),
        (5, lambda: actors.release(who(), request(), rng.choice([0, 0, 1, 2]))),
        (1, lambda: actors.die(who())),
        (14, lambda: actors.read_ends(rng.choice(READ_FAILURES), rng.randrange(4))),
        (14, lambda: actors.writer_goes_on(rng.choice(WRITE_FAILURES))),
        (4, lambda: actors.check_ends(rng.choice(READ_FAILURES))),
        (2, lambda: actors.world.finish_all()),
        (2, lambda: actors.ask(rng.choice([Pin, Unpin, Unpin]), whose(), chain())),
        (5, lambda: actors.ask(Evict, whose(), chain(), rng.choice([None, *TIERS, TierName.HOST]))),
        (1, lambda: actors.world.ask(Clear, rng.choice([None, tenant_of("ada"), tenant_of("bob")]))),
        (1, lambda: actors.begin_clear(rng.choice([None, "ada", "bob"]), rng.random() < 0.7)),
        (2, lambda: actors.hears(rng.choice([*NAMES, "exchange:n1"]), rng.choice([None, "ada", "bob"]))),
        (2, lambda: actors.catch_up()),
        (3, lambda: actors.clear_on(which())),
        (2, lambda: actors.ask(Verify, whose(), chain())),
        (5, lambda: actors.go_on()),
    ]
    actions = rng.choices([a for _, a in weighted], [w for w, _ in weighted], k=200)
    if rng.random() < 0.3:
        actions.insert(rng.randrange(100, 200), lambda: actors.world.tell(Drain()))

    for action in actions:
        action()
        actors.world.now += rng.choice([0.0, 0.001, 1.0])
        actors.compare()

    actors.end()
