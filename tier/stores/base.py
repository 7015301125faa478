"""What all tiers below L1 share: places, their pure allocator, catalogue entries, and the protocol of a tier's I/O. Pure.

A tier's owner decides (tier/node/coordinator.py), a tier obeys: it moves bytes to and from places that its owner allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier.tier.pages.page import Buffer, Envelope, PageKey, TierName


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a page lies in a tier: slot `index` of segment `segment`. Segments hold slots of one size."""

    segment: int
    index: int


@dataclass(slots=True)
class CatalogueEntry:
    """What the catalogue of L4 keeps of one page, keyed by (envelope.key, envelope.variant)."""

    envelope: Envelope
    place: Place
    slot_bytes: int
    generation: int
    content: bytes = b""  # content digest of the chain, at depth 0 only
    uses: int = 0
    last_use_s: float = 0.0  # wall clock, so that it means something after a restart


class SegmentAllocator:
    """Hands out slots of any size class within a byte budget. Pure; owned by the owner of the tier.

    The budget is cut into segments; a segment serves one slot size at a time and is free again when its last slot is.
    Invariant: used_bytes == sum of the slot sizes handed out <= capacity_bytes.
    """

    def __init__(
        self, capacity_bytes: int, segment_bytes: int, segments: Sequence[int] | None = None
    ) -> None:
        """`segments` are their numbers, where they aren't 0, 1, 2 ..."""
        if segment_bytes <= 0 or capacity_bytes < 0:
            raise ValueError(f"capacity {capacity_bytes} and segment {segment_bytes} must be positive")
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.num_segments = capacity_bytes // segment_bytes
        self.used_bytes = 0
        self._numbers = range(self.num_segments) if segments is None else sorted(segments)
        assert len(self._numbers) == self.num_segments
        self._free_segments: list[int] = list(reversed(self._numbers))
        self._slot_bytes: dict[int, int] = {}  # segment -> its slot size
        self._free: dict[int, dict[int, None]] = {}  # segment -> free slots, next one last
        # slot size -> segments with a free slot to hand out, in order of opening; no size without any
        self._open: dict[int, dict[int, None]] = {}
        self._segments: Counter[int] = Counter()  # slot size -> segments that serve it
        self._closed: set[int] = set()
        self._retired: dict[int, bool] = {}  # segments that the disk has no room for -> is it free

    def alloc(self, slot_bytes: int, *, may_start: bool = True) -> Place | None:
        """A free slot of this size, or None when the tier must make room first.

        `may_start`: it may take a free segment for this size, where those that serve it are full.
        """
        if slot_bytes not in self._open:
            if not may_start or not self._free_segments or slot_bytes > self.segment_bytes:
                return None
            self._start(self._free_segments.pop(), slot_bytes)
        segment = next(iter(self._open[slot_bytes]))
        free = self._free[segment]
        index, _ = free.popitem()
        if not free:
            self._drop_open(slot_bytes, segment)
        self.used_bytes += slot_bytes
        return Place(segment, index)

    def take(self, place: Place, slot_bytes: int) -> bool:
        """Claim a slot found in a catalogue at start; False when it can't be (taken, or another size's segment)."""
        if place.segment not in self._slot_bytes:
            if place.segment not in self._free_segments:
                return False
            if not 0 <= place.index < self.segment_bytes // slot_bytes:
                return False  # before the segment is begun: it has no such slot
            self._free_segments.remove(place.segment)
            self._start(place.segment, slot_bytes)
        if self._slot_bytes[place.segment] != slot_bytes or place.index not in self._free[place.segment]:
            return False
        del self._free[place.segment][place.index]
        if not self._free[place.segment]:
            self._drop_open(slot_bytes, place.segment)
        self.used_bytes += slot_bytes
        return True

    def free(self, place: Place) -> None:
        """Give a slot back."""
        slot_bytes = self._slot_bytes[place.segment]
        free = self._free[place.segment]
        assert place.index not in free, f"slot {place} freed twice"
        free[place.index] = None
        self.used_bytes -= slot_bytes
        if len(free) == self.segment_bytes // slot_bytes:
            del self._slot_bytes[place.segment], self._free[place.segment]
            self._drop_open(slot_bytes, place.segment)
            self._segments[slot_bytes] -= 1
            if not self._segments[slot_bytes]:
                del self._segments[slot_bytes]
            self._closed.discard(place.segment)
            if place.segment in self._retired:
                self._retired[place.segment] = True
            else:
                self._free_segments.append(place.segment)
        elif place.segment not in self._closed:
            self._open.setdefault(slot_bytes, {})[place.segment] = None

    def close(self, segment: int) -> None:
        """Hand out no more slots of a segment that is in use, until it has been free or is reopened."""
        self._closed.add(segment)
        self._drop_open(self._slot_bytes[segment], segment)

    def reopen(self, segment: int) -> None:
        """End `close`."""
        self._closed.discard(segment)
        if self._free.get(segment):
            self._open.setdefault(self._slot_bytes[segment], {})[segment] = None

    @property
    def has_retired(self) -> bool:
        """Whether there are segments that `retire` took out of use."""
        return bool(self._retired)

    def retire(self, segment: int) -> None:
        """Hand out no slots of a segment that is in use, when it is free neither, until `restore`."""
        self._retired[segment] = False
        self.close(segment)

    def restore(self) -> None:
        """End every `retire`."""
        retired, self._retired = self._retired, {}
        for segment, is_free in retired.items():
            if is_free:
                self._free_segments.append(segment)
            else:
                self.reopen(segment)

    def slot_size(self, place: Place) -> int:
        """Bytes of the slots in this place's segment."""
        return self._slot_bytes[place.segment]

    def segments_of(self, slot_bytes: int) -> int:
        """How many segments serve this size now."""
        return self._segments[slot_bytes]

    def segments(self) -> Iterator[tuple[int, int]]:
        """The segments in use, each with its slot size."""
        return iter(self._slot_bytes.items())

    def used_in(self, segment: int) -> list[Place]:
        """The slots of a segment that are handed out."""
        if segment not in self._slot_bytes:
            return []
        free = self._free[segment]
        slots = self.segment_bytes // self._slot_bytes[segment]
        return [Place(segment, index) for index in range(slots) if index not in free]

    def _drop_open(self, slot_bytes: int, segment: int) -> None:
        """A size without an open segment leaves no trace: sizes may come and go for ever."""
        open_segments = self._open.get(slot_bytes, {})
        open_segments.pop(segment, None)
        if not open_segments:
            self._open.pop(slot_bytes, None)

    def _start(self, segment: int, slot_bytes: int) -> None:
        self._slot_bytes[segment] = slot_bytes
        self._segments[slot_bytes] += 1
        self._free[segment] = dict.fromkeys(range(self.segment_bytes // slot_bytes - 1, -1, -1))
        self._open.setdefault(slot_bytes, {})[segment] = None

    def check(self) -> None:
        """Re-derive every counter from scratch; AssertionError where one differs."""
        used = 0
        for segment, slot_bytes in self._slot_bytes.items():
            slots, free = self.segment_bytes // slot_bytes, self._free[segment]
            assert len(free) < slots, f"segment {segment} is free"
            assert all(0 <= index < slots for index in free), f"segment {segment} frees slots it hasn't"
            is_open = bool(free) and segment not in self._closed
            assert is_open == (segment in self._open.get(slot_bytes, {})), f"segment {segment} open or not"
            used += (slots - len(free)) * slot_bytes
        assert used == self.used_bytes <= self.capacity_bytes, f"{self.used_bytes} used, {used} counted"
        assert all(self._open.values()) and self._closed <= self._slot_bytes.keys()
        assert self._segments == Counter(self._slot_bytes.values())
        retired = [segment for segment, is_free in self._retired.items() if is_free]
        assert sorted([*self._free_segments, *retired, *self._slot_bytes]) == list(self._numbers)
        assert self._retired.keys() - set(retired) <= self._closed


class Tier(Protocol):
    """The I/O of one tier below L1. Calls on different places may run on different threads at once."""

    name: TierName

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        """Put a page's bytes, envelope first, into a slot. Raises OSError; the slot's content is then undefined."""

    def read(self, place: Place, key: PageKey, variant: str, out: memoryview) -> Envelope:
        """Fill `out` (a whole slot: header and payload) and return its verified envelope.

        Raises PageMissing when the slot holds no page or another one, PageCorrupt when bytes and envelope differ.
        """

    def wipe(self, place: Place) -> None:
        """Make the slot unreadable for good: its header is overwritten."""

    def close(self) -> None:
        """Let everything go. Idempotent."""


class Outcome(StrEnum):
    """What became of one key in a cache verb; never a silent success."""

    ACCEPTED = "ACCEPTED"
    CLIPPED = "CLIPPED"  # done in part: a bound was reached
    DEFERRED = "DEFERRED"  # will be done when the page's readers are gone
    REJECTED = "REJECTED"  # not done: pinned, or a bound is reached
    MISSING = "MISSING"  # no tier holds it


@dataclass(frozen=True, slots=True)
class Uncleared:
    """What a clear could not do yet: in which tier, the error's name (such as EROFS; "" for none), and a sentence."""

    tier: TierName
    error: str
    detail: str


@dataclass(frozen=True, slots=True)
class PageInfo:
    """One copy of a page, as `kvtier pages ls` shows it."""

    key: str  # hex
    tier: TierName
    owner: str  # worker or node id
    tenant: str  # hex digest
    root: str  # hex
    parent: str  # hex
    variant: str
    depth: int
    tokens: int
    nbytes: int
    uses: int
    idle_s: float
    pinned: bool
    readers: int
    state: str  # sealed, arriving
    made_from: str = ""  # the variant it was converted from; "" when the model computed it
