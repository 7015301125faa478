"""L3's slots: which are handed out, by size, and which of them stay so for long. Pure; moves no byte.

A slot is known by its number: it begins at byte number * ALIGN_BYTES of the slab. The slab is cut in segments; a
segment serves one slot size at a time (base.SegmentAllocator).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.tier.pages.page import ALIGN_BYTES
from kvtier.tier.stores.base import Place, SegmentAllocator

MAX_SEGMENT_SLOTS = 64  # of the largest size: what it may cost to look through a segment, or to empty one
SPARE_SLOTS = 16  # of each size are kept from those who keep slots for long; fewer in a small L3


class HostSlots:
    """The slots of an L3 of `capacity_bytes`, for pages whose slots take at most `segment_bytes`. Owned by CacheState.

    Slots in stock, held and pinned ones last: nothing knows when they come back. All others come back by themselves.
    So a slot of a size can be had, sooner or later, while one of its slots doesn't last or a segment has none that
    does: `available`. `room_to_last` keeps it so for every size.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        if segment_bytes % ALIGN_BYTES:
            raise ValueError(f"segment_bytes must be a multiple of {ALIGN_BYTES}, got {segment_bytes}")
        self._allocator = SegmentAllocator(capacity_bytes // segment_bytes * segment_bytes, segment_bytes)
        self._sizes: dict[int, int] = {}  # slot in use -> its size
        self._used: Counter[int] = Counter()  # slot size -> slots in use
        self._lasting: set[int] = set()
        self._lasting_in: dict[int, int] = {}  # segment -> lasting slots, where there are any
        self._lasting_slots: Counter[int] = Counter()  # slot size -> lasting slots
        self._lasting_segments: Counter[int] = Counter()  # slot size -> segments with lasting slots

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the slab."""
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are handed out."""
        return self._allocator.used_bytes

    @property
    def segment_bytes(self) -> int:
        """The largest slot there can be."""
        return self._allocator.segment_bytes

    def take(self, size: int, *, may_start: bool) -> int | None:
        """A free slot of this size; with `may_start` from a free segment too. None: room must be made first."""
        place = self._allocator.alloc(size, may_start=may_start)
        if place is None:
            return None
        slot = self._number(place, size)
        self._sizes[slot] = size
        self._used[size] += 1
        return slot

    def free(self, slot: int) -> None:
        """Take a slot back."""
        if slot in self._lasting:
            self.set_lasting(slot, False)
        size = self._sizes.pop(slot)
        self._used[size] -= 1
        if not self._used[size]:
            del self._used[size]
        segment = self.segment(slot)
        self._allocator.free(Place(segment, (slot * ALIGN_BYTES - segment * self.segment_bytes) // size))

    def set_lasting(self, slot: int, lasts: bool) -> None:
        """Say whether a slot in use is in stock, held or pinned."""
        if lasts == (slot in self._lasting):
            return
        segment, size = self.segment(slot), self._sizes[slot]
        here = self._lasting_in.get(segment, 0)
        if lasts:
            self._lasting.add(slot)
            self._lasting_in[segment] = here + 1
            self._lasting_slots[size] += 1
            self._lasting_segments[size] += here == 0
            return
        self._lasting.remove(slot)
        self._lasting_slots[size] -= 1
        if here > 1:
            self._lasting_in[segment] = here - 1
            return
        del self._lasting_in[segment]
        self._lasting_segments[size] -= 1
        if not self._lasting_segments[size]:  # sizes may come and go for ever
            del self._lasting_slots[size], self._lasting_segments[size]

    def segment(self, slot: int) -> int:
        """The segment that a slot lies in."""
        return slot * ALIGN_BYTES // self.segment_bytes

    def used_in(self, segment: int) -> list[int]:
        """The slots in use of a segment."""
        places = self._allocator.used_in(segment)
        return [self._number(place, self._allocator.slot_size(place)) for place in places]

    def has_lasting(self, segment: int) -> bool:
        """Whether a segment can't be emptied for now."""
        return segment in self._lasting_in

    def passing_segment(self, size: int) -> int | None:
        """A segment of another size than this one without lasting slots."""
        for segment, other in self._allocator.segments():
            if other != size and segment not in self._lasting_in:
                return segment
        return None

    def close(self, segment: int) -> None:
        """Give out no more slots of a segment, so that it becomes free."""
        self._allocator.close(segment)

    def reopen(self, segment: int) -> None:
        """End `close`."""
        self._allocator.reopen(segment)

    def passing_slots(self, size: int) -> int:
        """Slots in segments of this size that don't last, free ones too."""
        return self._allocator.segments_of(size) * (self.segment_bytes // size) - self._lasting_slots[size]

    def used_slots(self, size: int) -> int:
        """Slots of this size in use."""
        return self._used[size]

    def free_slots(self, size: int) -> int:
        """Slots of this size that could be taken now, in free segments too."""
        free = self._allocator.num_segments - sum(map(self._allocator.segments_of, self._used))
        own = free + self._allocator.segments_of(size)
        return own * (self.segment_bytes // size) - self._used[size]

    def available(self, size: int) -> int:
        """Slots of this size that can be had sooner or later; 0 also where no segment is that large."""
        passing = self._allocator.num_segments - sum(self._lasting_segments.values())
        own = passing + self._lasting_segments[size]
        return self.segment_bytes // size * own - self._lasting_slots[size]

    def room_to_last(self, size: int, sizes: Iterable[int], expected: int) -> int:
        """How many more slots of `size` may last and leave, of each of `sizes`, SPARE_SLOTS that don't.

        `expected` slots more will last without asking. With several sizes it may be too few: those slots may lie in
        one segment, or take one each from the other sizes.
        """
        room = self.available(size)
        for other in sizes:
            left = self.available(other) - expected - self.spare_slots(other)
            room = min(room, left if other == size else left // (self.segment_bytes // other))
        return max(0, room)

    def spare_slots(self, size: int) -> int:
        """Slots of this size that `room_to_last` leaves."""
        total = self._allocator.num_segments * (self.segment_bytes // size)
        return max(1, min(SPARE_SLOTS, total // 8))

    def size(self, slot: int) -> int:
        """Bytes of a slot in use."""
        return self._sizes[slot]

    def slots(self) -> Iterable[int]:
        """All slots in use."""
        return self._sizes.keys()

    def check(self, lasting: set[int]) -> None:
        """Re-derive every counter from scratch, given the slots that last."""
        self._allocator.check()
        sizes = dict(self._allocator.segments())
        assert self._sizes == {
            slot: size for segment, size in sizes.items() for slot in self.used_in(segment)
        }
        assert self._used == Counter(self._sizes.values())
        assert self._lasting == lasting <= self._sizes.keys()
        assert self._lasting_in == Counter(map(self.segment, lasting))
        assert self._lasting_slots == Counter(self._sizes[slot] for slot in lasting)
        assert self._lasting_segments == Counter(
            sizes[segment] for segment in set(map(self.segment, lasting))
        )

    def _number(self, place: Place, size: int) -> int:
        return (place.segment * self.segment_bytes + place.index * size) // ALIGN_BYTES


def host_slots(capacity_bytes: int, largest_slot_bytes: int) -> HostSlots:
    """An L3 for pages whose slots take at most `largest_slot_bytes`; with room for fewer than two it has no slots.

    Larger segments waste less on other sizes, more segments let more sizes be there at once.
    """
    num_slots = capacity_bytes // largest_slot_bytes
    if num_slots < 2:
        return HostSlots(0, largest_slot_bytes)
    least = max(1, min(8, num_slots // 16), min(MAX_SEGMENT_SLOTS // 2, num_slots // 64))
    segment_slots = min(range(least, 2 * least), key=lambda slots: num_slots % slots)
    return HostSlots(capacity_bytes, segment_slots * largest_slot_bytes)
