"""Room in L4: a size that is new there takes one segment, and segments that the disk has no room for are done without."""

from __future__ import annotations

import random

import msgspec
from cache_world import BF16, FP8, ROOT, hello_of, spec_of, stored_page

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.residency.demotion import RETIRED_S
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import Envelope, PageKey, RootKey, TierName, slot_bytes
from kvtier.tier.protocol.events import (
    Command,
    CommitCatalogue,
    FromWorker,
    Send,
    WorkerRef,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.protocol.messages import Granted, Stored, WantSlots
from kvtier.tier.stores.base import CatalogueEntry, SegmentAllocator
from kvtier.tier.stores.host_slots import host_slots

SMALL, LARGE = 4096, 8192
SLOTS = 16  # small ones in a segment
REF = WorkerRef("w", "1")


class Node:
    """A coordinator whose L4 has `segments`, of which the first `full` are full of small pages, used in a random order."""

    def __init__(self, segments: int, full: int, limits: Limits = Limits()) -> None:  # noqa: B008  frozen
        size = slot_bytes(SMALL)
        self.allocator = SegmentAllocator(segments * SLOTS * size, SLOTS * size)
        order = random.Random(1).sample(range(full * SLOTS), full * SLOTS)
        entries = []
        for number, used in enumerate(order):
            place = self.allocator.alloc(size)
            assert place is not None
            key = PageKey(number.to_bytes(32, "big"))
            envelope = Envelope(
                key, BF16, spec_of((0, BF16)), SMALL, b"c" * 16, RootKey(ROOT), ROOT, b"t" * 16, 0, 16
            )
            entries.append(CatalogueEntry(envelope, place, size, 1, last_use_s=used * 1e-3))
        self.now = 100.0
        self.core = Coordinator(
            node_id="n",
            incarnation="i",
            host=host_slots(64 * slot_bytes(LARGE), slot_bytes(LARGE)),
            ssd=self.allocator,
            recovered=entries,
            now=self.now,
            page_bytes=SMALL,
            limits=limits,
        )
        self.say(hello_of("w", "1", {(0, BF16): SMALL, (0, FP8): LARGE}))
        self.stored = 0

    def say(self, message: object) -> list[Command]:
        commands: list[Command] = self.core.handle(FromWorker(REF, message), self.now)  # type: ignore[arg-type]
        self.core.check()
        return commands

    def store(self, nbytes: int) -> list[Command]:
        """A worker stores another page of a chain of its own."""
        (granted,) = [c.message for c in self.say(WantSlots(1, nbytes)) if isinstance(c, Send)]
        assert isinstance(granted, Granted)
        self.stored += 1
        kind = (0, BF16 if nbytes == SMALL else FP8)
        page = stored_page(granted.grants[0], "ada", "abcdefghijklmnopqrstuvwxyz"[: self.stored], kind=kind)
        return self.say(Stored([msgspec.structs.replace(page)]))

    def pages(self) -> int:
        return self.core.snapshot().tiers[TierName.SSD].pages


def writes(commands: list[Command]) -> list[WritePage]:
    return [command for command in commands if isinstance(command, WritePage)]


def num_dropped(commands: list[Command]) -> int:
    return sum(len(command.drops) for command in commands if isinstance(command, CommitCatalogue))


def test_a_page_of_a_size_that_is_new_to_a_full_l4_takes_the_place_of_one_segment() -> None:
    node = Node(segments=32, full=32)

    first = node.store(LARGE)
    (write,) = writes(first)
    node.core.handle(WriteDone(write.transfer), node.now)
    later = [node.store(LARGE) for _ in range(5)]

    assert num_dropped(first) == SLOTS
    assert all(len(writes(commands)) == 1 and num_dropped(commands) == 0 for commands in later)


def test_a_segment_of_many_pages_leaves_in_parts_and_the_page_that_waits_for_it_is_written() -> None:
    most = 5
    node = Node(segments=4, full=4, limits=Limits(evictions_per_write=most))

    events = [node.store(LARGE)]
    while not any(map(writes, events)):
        events.append(node.say(WantSlots(1, SMALL)))

    assert [num_dropped(commands) for commands in events] == [5, 5, 5, 1]
    assert node.pages() == 3 * SLOTS


def test_l4_goes_on_with_the_segments_it_has_when_the_disk_has_no_room_for_another() -> None:
    node = Node(segments=4, full=1)
    (write,) = writes(node.store(SMALL))
    assert write.entry.place.segment == 1
    node.core.handle(WriteFailed(write.transfer, "full", "No space left on device"), node.now)
    for segment in (2, 3):
        (write,) = writes(node.store(SMALL))
        assert write.entry.place.segment == segment
        node.core.handle(WriteFailed(write.transfer, "full", "No space left on device"), node.now)
    node.core.check()

    for _ in range(3):
        commands = node.store(SMALL)
        (write,) = writes(commands)
        assert write.entry.place.segment == 0 and num_dropped(commands) == 1
        node.core.handle(WriteDone(write.transfer), node.now)
    node.now += RETIRED_S
    (write,) = writes(node.store(SMALL))

    assert write.entry.place.segment in (1, 2, 3)
    node.core.check()


def test_writes_in_flight_to_a_segment_that_has_no_room_keep_no_slot_of_it() -> None:
    node = Node(segments=2, full=1)
    in_flight = [write for _ in range(4) for write in writes(node.store(SMALL))]
    assert {write.entry.place.segment for write in in_flight} == {1}

    for write in in_flight:
        node.core.handle(WriteFailed(write.transfer, "full", "No space left on device"), node.now)
        node.core.check()

    assert node.allocator.used_bytes == SLOTS * slot_bytes(SMALL)
    (write,) = writes(node.store(SMALL))
    assert write.entry.place.segment == 0
