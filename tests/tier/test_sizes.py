"""Pages of several sizes in one L3: how room is made, who may have how much, and that nothing waits for ever."""

from __future__ import annotations

import msgspec
import pytest
from cache_world import FP8, INT4C, Kind, SimWorker, World, chain_of, key_of, stored_page
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.protocol.events import Evict, Pin
from kvtier.tier.protocol.messages import LoadFailed, ReturnSlots, Stored
from kvtier.tier.stores.base import Outcome
from kvtier.tier.stores.host_slots import HostSlots, host_slots

TENANT = "ada"
LARGE, SMALL = (0, FP8), (0, INT4C)
SIZES: dict[Kind, int] = {LARGE: 28 * 1024, SMALL: 12 * 1024}  # slots of 32 and 16 KiB
LARGE_ONLY, SMALL_ONLY = {LARGE: SIZES[LARGE]}, {SMALL: SIZES[SMALL]}


def fill(world: World, worker: SimWorker, kind: Kind, count: int, first: str = "x") -> list[bytes]:
    """Store `count` chains of one page and let them sink; their keys."""
    paths = [first, *(chr(0x1000 * (ord(first) - 0x60) + n) for n in range(1, count))]
    for path in paths:
        world.want(worker, 1, kind)
        world.finish_all()
        assert world.store(worker, TENANT, path, kind=kind) == 1
        world.now += 1
    world.finish_all()
    return [key_of(TENANT, path) for path in paths]


def test_a_size_without_slots_gets_a_segment_whose_pages_are_worth_least() -> None:
    world = World(4, 32, payloads=SIZES, host_segment_slots=1)
    worker = world.connect()
    keys = fill(world, worker, LARGE, 4)
    world.locate(worker, "r", TENANT, "x", chains=[chain_of([keys[0]], variant=FP8)])
    world.settle()
    world.finished(worker, TENANT, "x")

    world.want(worker, 1, SMALL)

    assert len(worker.grants) == 1
    assert world.held(TierName.HOST) == {(keys[n], FP8) for n in (0, 2, 3)}, (
        "the oldest goes, the used one stays"
    )


def test_old_pages_of_one_size_make_room_for_new_ones_of_another() -> None:
    """No size keeps what it had first: whole segments of old pages go before young pages of the size that needs room."""
    world = World(8, 64, payloads=SIZES, host_segment_slots=2)
    worker = world.connect()
    fill(world, worker, LARGE, 8)

    fill(world, worker, SMALL, 12, "y")

    variants = world.node.snapshot().tiers[TierName.HOST].variants
    assert variants[INT4C] == 12 and variants[FP8] >= 1


def test_an_original_makes_room_for_another_size_before_all_that_are_older() -> None:
    world = World(4, 32, payloads=SIZES, host_segment_slots=1)
    worker = world.connect()
    keys = fill(world, worker, LARGE, 3)
    for path, original in ((chr(0x1000 * 0x18 + 2), FP8), ("y", "")):
        world.want(worker, 1, SMALL)
        assert world.store(worker, TENANT, path, kind=SMALL, made_from=original) == 1
        world.finish_all()

    world.want(worker, 1, SMALL)

    assert len(worker.grants) == 1
    large = {(key, variant) for key, variant in world.held(TierName.HOST) if variant == FP8}
    assert large == {(keys[0], FP8), (keys[1], FP8)}


def test_an_original_keeps_no_segment_of_old_pages() -> None:
    world = World(4, 32, payloads=SIZES, host_segment_slots=2)
    worker = world.connect()
    stores = [
        ("x", LARGE, ""),
        ("y", SMALL, ""),
        ("a", LARGE, ""),
        ("a", SMALL, FP8),
        ("b", SMALL, ""),
        ("c", SMALL, ""),
    ]
    for path, kind, original in stores:
        world.want(worker, 1, kind)
        assert world.store(worker, TENANT, path, kind=kind, made_from=original) == 1
        world.finish_all()
        world.now += 1

    world.want(worker, 1, SMALL)

    assert len(worker.grants) == 1
    assert world.held(TierName.HOST) == {(key_of(TENANT, path), INT4C) for path in "yabc"}


def test_a_hot_size_keeps_its_segments() -> None:
    world = World(8, 64, payloads=SIZES, host_segment_slots=2)
    worker = world.connect()
    keys = fill(world, worker, LARGE, 4)
    for n in range(30):
        world.locate(worker, "r", TENANT, "x", chains=[chain_of([key], variant=FP8) for key in keys])
        world.settle()
        fill(world, worker, SMALL, 1, chr(0x61 + n))

    assert {(key, FP8) for key in keys} <= world.held(TierName.HOST)


def test_a_worker_with_another_set_of_sizes_is_served_beside_the_first() -> None:
    world = World(8, 32, payloads=SIZES, host_segment_slots=1)
    one = world.connect("w0", payloads=LARGE_ONLY)
    other = world.connect("w1", payloads=SMALL_ONLY)

    fill(world, one, LARGE, 20)
    fill(world, other, SMALL, 20, "y")
    fill(world, one, LARGE, 4, "z")

    world.want(other, 100, SMALL)
    world.want(one, 100, LARGE)
    assert len(one.grants) == 2 and len(other.grants) == 4, "a quarter of the slab each"


def test_a_workers_share_is_shared_by_its_sizes() -> None:
    world = World(16, 0, payloads=SIZES, host_segment_slots=1)
    worker = world.connect()

    world.want(worker, 100, LARGE)
    world.want(worker, 100, SMALL)

    large = sum(grant.payload_bytes == SIZES[LARGE] for grant in worker.grants)
    assert large == 4 and len(worker.grants) - large == 8, "a quarter of the slab each"


def test_a_busy_size_cannot_starve_another() -> None:
    """A segment is let run empty for the size that waits, though the other's pages are read all the time."""
    world = World(4, 64, payloads=SIZES, host_segment_slots=1)
    busy = world.connect("w0", payloads=LARGE_ONLY)
    other = world.connect("w1", payloads=SMALL_ONLY)
    keys = fill(world, busy, LARGE, 4)
    for n, key in enumerate(keys):
        world.locate(busy, f"r{n}", TENANT, "x", chains=[chain_of([key], variant=FP8)])

    world.want(other, 1, SMALL)
    assert not other.grants, "all is leased"
    for round_ in range(3):
        for n, key in enumerate(keys):  # each page is leased again before the lease on it ends
            world.locate(busy, f"s{round_}{n}", TENANT, "x", chains=[chain_of([key], variant=FP8)])
            world.copied(busy, f"r{n}" if round_ == 0 else f"s{round_ - 1}{n}", [0])
        world.finish_all()

    assert len(other.grants) == 1
    world.settle()


def test_what_is_let_run_empty_is_used_again_when_nothing_waits_any_more() -> None:
    world = World(2, 64, payloads=SIZES, host_segment_slots=1)
    busy = world.connect("w0", payloads=LARGE_ONLY)
    other = world.connect("w1", payloads=SMALL_ONLY)
    keys = fill(world, busy, LARGE, 2)
    for n, key in enumerate(keys):
        world.locate(busy, f"r{n}", TENANT, "x", chains=[chain_of([key], variant=FP8)])
    world.want(other, 1, SMALL)
    world.die(other)
    world.settle()

    fill(world, busy, LARGE, 2, "y")

    assert len(world.held(TierName.HOST)) == 2


def test_a_load_of_a_size_that_finds_only_lasting_slots_fails() -> None:
    """What is in stock and held was there before the other size came into use: waiting would have no end."""
    world = World(4, 64, payloads=SIZES, host_segment_slots=4)
    small = world.connect("w0", payloads=SMALL_ONLY)
    (key,) = fill(world, small, SMALL, 1)
    world.ask(Evict, (key,), TierName.HOST)
    world.die(small)
    large = world.connect("w1", payloads=LARGE_ONLY)
    world.want(large, 1, LARGE)  # a stock of one slot in the only segment
    small = world.connect("w2", payloads=SMALL_ONLY)
    decayed = chain_of([key], variant=FP8, decayed=INT4C)

    located = world.locate(small, "r", TENANT, "x", chains=[decayed])

    assert located.loading == [(0, 0)]
    (failed,) = [m for m in small.messages if isinstance(m, LoadFailed)]
    assert failed.missing.reason == "no_room"
    assert world.node.is_idle
    world.say(large, ReturnSlots([large.grants.pop()]))
    world.locate(small, "r", TENANT, "x", chains=[decayed])
    world.settle()
    assert (key, INT4C) in world.held(TierName.HOST)


def test_a_page_waits_for_the_writes_that_fill_l4_and_then_has_its_turn() -> None:
    """The only segment of L4 is being filled with pages of another size: they may go as soon as they are there."""
    world = World(8, 2, payloads=SIZES, host_segment_slots=1, segment_slots=2)
    worker = world.connect()
    world.want(worker, 1, LARGE)
    world.want(worker, 1, SMALL)
    world.store(worker, TENANT, "x", kind=LARGE)
    world.store(worker, TENANT, "y", kind=SMALL)
    assert len(world.writer) == 1

    world.finish_all()

    assert world.held(TierName.SSD) == {(key_of(TENANT, "y"), INT4C)}
    assert len(world.held(TierName.HOST)) == 2 and world.node.is_written


def test_pinned_pages_of_a_size_no_worker_uses_any_more_stay() -> None:
    world = World(8, 64, payloads=SIZES, host_segment_slots=1)
    large = world.connect("w0", payloads=LARGE_ONLY)
    keys = fill(world, large, LARGE, 3)
    assert dict(world.answers[world.ask(Pin, tuple(keys))]) == dict.fromkeys(keys, Outcome.ACCEPTED)
    world.die(large)
    small = world.connect("w1", payloads=SMALL_ONLY)

    fill(world, small, SMALL, 40, "y")

    assert {(key, FP8) for key in keys} <= world.held(TierName.HOST)


def test_a_page_stored_again_in_another_size_takes_the_place_of_the_old_one() -> None:
    """Keys digest the page's shape, so only a broken worker does this; the two must not be mixed up."""
    world = World(8, 8, payloads=SIZES, host_segment_slots=1)
    worker = world.connect()
    (key,) = fill(world, worker, LARGE, 1)
    world.ask(Evict, (key,), TierName.HOST)
    world.want(worker, 1, SMALL)
    (grant,) = worker.grants
    worker.grants.clear()
    page = msgspec.structs.replace(stored_page(grant, TENANT, "x", kind=SMALL), variant=FP8)

    world.fill(grant, (page.key, FP8))
    world.say(worker, Stored([page]))

    world.finish_all()
    (info,) = world.node.admin.pages(None, TierName.HOST, 9, world.now)
    assert (info.key, info.nbytes) == (key.hex(), SIZES[SMALL])
    assert [e.slot_bytes for e in world.catalogue.values()] == [slot_bytes(SIZES[SMALL])]


@pytest.mark.parametrize("num_slots", [0, 1, 2, 5, 15, 16, 33, 97, 100, 640, 4097])
def test_an_l3_for_one_size_wastes_next_to_nothing(num_slots: int) -> None:
    size = 20 * 1024

    slots = host_slots(num_slots * size + size // 2, size)

    usable = slots.capacity_bytes // size
    assert usable == 0 if num_slots < 2 else 0.98 * num_slots <= usable <= num_slots
    taken = 0
    while slots.take(size, may_start=True) is not None:
        taken += 1
    assert taken == usable


@st.composite
def lives_of_slots(draw: st.DrawFn) -> tuple[HostSlots, list[int], list[tuple[int, int]]]:
    largest = slot_bytes(draw(st.sampled_from([8192, 20480])))
    slots = HostSlots(draw(st.integers(2, 20)) * largest, draw(st.integers(1, 4)) * largest)
    fitting = [size for size in (8192, 12288, largest) if size <= slots.segment_bytes]
    steps = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=60))
    return slots, sorted(set(fitting)), steps


@given(life=lives_of_slots())
@settings(max_examples=300, deadline=None)
def test_what_may_last_leaves_every_size_some_slots(
    life: tuple[HostSlots, list[int], list[tuple[int, int]]],
) -> None:
    """However stocks come and go, each size can still have what `available` says, and that is as much as is spared."""
    slots, sizes, steps = life
    lasting: set[int] = set()
    passing: set[int] = set()
    enough = all(slots.available(size) >= slots.spare_slots(size) for size in sizes)
    for what, number in steps:
        size = sizes[number % len(sizes)]
        if what == 0 and slots.room_to_last(size, sizes, 0) > 0:
            slot = slots.take(size, may_start=True)
            if slot is not None:
                slots.set_lasting(slot, True)
                lasting.add(slot)
        elif what == 1 and (slot := slots.take(size, may_start=True)) is not None:
            passing.add(slot)
        elif what == 2 and lasting:
            slot = sorted(lasting)[number % len(lasting)]
            lasting.remove(slot)
            slots.free(slot)
        elif what == 3 and passing:
            slot = sorted(passing)[number % len(passing)]
            passing.remove(slot)
            slots.free(slot)
        slots.check(lasting)
        assert not enough or all(slots.available(size) >= slots.spare_slots(size) for size in sizes)

    for slot in passing:
        slots.free(slot)
    for size in sizes:
        available = slots.available(size)
        got = []
        while (slot := slots.take(size, may_start=True)) is not None:
            got.append(slot)
        assert len(got) == available
        for slot in got:
            slots.free(slot)
