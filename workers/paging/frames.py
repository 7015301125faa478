"""Knows which L1 frame is in which roles: held by sequences, cached, in a copy, lent, or free. Pure: moves no bytes.

A frame is free exactly when nothing holds it, no cached page lies in it, no copy to or from it is in flight, and it isn't
lent to the worker's peers, whose it is until it is taken back. What is
to be done to the bytes stands in one queue of operations, so that each reads what those before it wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtier.tier.l1.arena import SlabAllocator
from kvtier.tier.pages.page import PageFormat, PageKey, RootKey
from kvtier.tier.policy.base import Row

MAX_CONVERTED = 256  # pages in one operation; chosen by hand
MOVED_SLABS = 4  # emptied in one step at most; each is at most 1/64 of L1, or a few pages


class SaveState(StrEnum):
    """Whether a cached page has a copy below L1."""

    DIRTY = "dirty"
    SAVING = "saving"
    CLEAN = "clean"


@dataclass(slots=True, eq=False)
class PageRecord:
    """What is known of a cached page. `checksum` is b"" until it is taken.

    `frame` is where it lies now: pages move. A page that `is_spent` has been converted, or has left a stream's window:
    it goes before all others, and one that `leaves` as soon as nothing holds it and it needs not be saved any more. One
    that `is_put_off` is a stream's own, and isn't saved before its sequence ends or is preempted. A page of the pool has
    a `row` of the policy, which takes it to be `in_use` until a request releases it.
    """

    frame: int
    group: int
    format: PageFormat
    nbytes: int
    key: PageKey
    tokens: bytes  # int32, one page
    parent: bytes
    root: RootKey
    tree: RootKey
    tenant: bytes
    content: bytes
    depth: int
    save: SaveState
    is_pooled: bool
    made_from: str = ""  # the variant that it was converted from
    checksum: bytes = b""
    uses: int = 0
    last_use_s: float = 0.0
    is_spent: bool = False
    leaves: bool = False
    is_put_off: bool = False
    row: Row = -1
    in_use: bool = True


@dataclass(frozen=True, slots=True)
class CopyHead:
    """Copy the first `tokens` tokens of a page into another frame."""

    group: int
    source: int
    target: int
    tokens: int
    format: PageFormat


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a frame's bytes into another one."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Convert:
    """Write pages in another format into frames of their own: no target is there twice, or is a source too."""

    group: int
    sources: list[int]
    source_format: PageFormat
    targets: list[int]
    target_format: PageFormat

    def joins(self, other: Convert) -> bool:
        """Whether `other`, next to be done, can be done in one go with this one, whose sources are read first."""
        alike = (self.group, self.source_format, self.target_format) == (
            other.group,
            other.source_format,
            other.target_format,
        )
        if not alike or len(self.sources) >= MAX_CONVERTED:
            return False
        touched = {*self.sources, *self.targets}
        return touched.isdisjoint(other.targets) and set(self.targets).isdisjoint(other.sources)


Op = CopyHead | Move | Convert


class Frames:
    """The frames of one worker's L1. Owned by the step loop.

    Sizes are in units of the arena. `records` are the cached pages by frame, `limbo` counts frames that only a copy
    keeps from being free. A frame with a copy, or one that is lent, is never moved.
    """

    def __init__(self, num_units: int, unit_bytes: int, page_bytes: Iterable[int]) -> None:
        self.unit_bytes = unit_bytes
        self.slabs = SlabAllocator(num_units, map(self.units, page_bytes))
        self.records: dict[int, PageRecord] = {}
        self.limbo = 0
        self.lent: dict[int, None] = {}
        self.lent_units = 0
        self._holders: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        self._ops: list[Op] = []
        self._moves_left = MOVED_SLABS

    def units(self, nbytes: int) -> int:
        """Units that a page of so many bytes takes."""
        return -(-nbytes // self.unit_bytes)

    # Roles

    def take(self, size: int, count: int) -> list[int]:
        """At most `count` free frames of a size, each for one holder."""
        frames = self.slabs.alloc(size, count)
        for frame in frames:
            self._holders[frame] = 1
        return frames

    def hold(self, frame: int) -> None:
        """One more holds the frame."""
        self._holders[frame] = self._holders.get(frame, 0) + 1

    def let_go(self, frame: int) -> bool:
        """A holder lets the frame go; whether it was the last one."""
        left = self._holders[frame] - 1
        if left:
            self._holders[frame] = left
            return False
        del self._holders[frame]
        self._free_if_unused(frame)
        return True

    def is_held(self, frame: int) -> bool:
        """Something holds it; of a page in the radix tree its path says that."""
        return frame in self._holders

    def holders_of(self, frame: int) -> int:
        """How many hold it."""
        return self._holders.get(frame, 0)

    def copies_of(self, frame: int) -> int:
        """Copies from or into the frame under way."""
        return self._copies.get(frame, 0)

    @property
    def copies_in_flight(self) -> int:
        """Copies from or into frames; 0 when idle."""
        return sum(self._copies.values())

    def start_copy(self, frame: int) -> None:
        """A copy from or into the frame begins: it won't be free before `end_copy`."""
        self._copies[frame] = self._copies.get(frame, 0) + 1

    def end_copy(self, frame: int) -> None:
        """The copy is over."""
        left = self._copies[frame] - 1
        if left:
            self._copies[frame] = left
            return
        del self._copies[frame]
        if frame not in self._holders and frame not in self.records:
            self.limbo -= 1
            self.slabs.give_back(frame)

    def cache(self, record: PageRecord) -> None:
        """The record's page lies in its frame, which something holds."""
        assert record.frame not in self.records, f"frame {record.frame} holds a page"
        self.records[record.frame] = record

    def uncache(self, frames: list[int]) -> None:
        """Nothing will find these pages any more; those who hold their frames keep them."""
        for frame in frames:
            del self.records[frame]
            self._free_if_unused(frame)

    # Peers

    def lend(self, size: int, count: int) -> list[int]:
        """At most `count` free frames of a size for the worker's peers, in whole slabs where there are several sizes."""
        slabs = self.slabs
        if len(slabs.sizes) == 1:
            frames = slabs.alloc(size, count)
        else:
            frames = []
            while len(frames) + slabs.per_slab(size) <= count and (more := slabs.alloc_slab(size)):
                frames += more
        self.lent.update(dict.fromkeys(frames))
        self.lent_units += size * len(frames)
        return frames

    def take_back(self, frames: Iterable[int]) -> None:
        """Nothing reads or writes these lent frames any more: they are free."""
        for frame in frames:
            del self.lent[frame]
            self.lent_units -= self.slabs.size_of(frame)
            self.slabs.give_back(frame)

    def _free_if_unused(self, frame: int) -> None:
        if frame in self._holders or frame in self.records:
            return
        if frame in self._copies:
            self.limbo += 1
        else:
            self.slabs.give_back(frame)

    # What is to be done to the bytes

    def add_op(self, op: Op) -> None:
        """Queue an operation behind all others."""
        last = self._ops[-1] if self._ops else None
        if isinstance(op, Convert) and isinstance(last, Convert) and last.joins(op):
            last.sources.extend(op.sources)
            last.targets.extend(op.targets)
        else:
            self._ops.append(op)

    @property
    def has_ops(self) -> bool:
        """Something is queued."""
        return bool(self._ops)

    def take_ops(self) -> list[Op]:
        """What is queued, to be done in this order before anything else touches these frames."""
        ops, self._ops = self._ops, []
        return ops

    def begin_step(self) -> None:
        """Slabs may be emptied again."""
        self._moves_left = MOVED_SLABS

    def empty_slab(self, size: int) -> Mapping[int, int] | None:
        """Empty one slab of this size, which has room for its pages elsewhere; where they went.

        None when that must wait: for copies to end, or for the next step.
        """
        stays = self._copies.keys() | self.lent.keys()
        moved = self.slabs.vacate(size, stays) if self._moves_left else None
        if moved is None:
            return None
        self._moves_left -= 1
        for old, new in moved.items():
            self.add_op(Move(old, new, size * self.unit_bytes))
            if old in self._holders:
                self._holders[new] = self._holders.pop(old)
            record = self.records.pop(old, None)
            if record is not None:
                record.frame = new
                self.records[new] = record
        return moved

    # Self-check

    def check(self, holders: Counter[int]) -> None:
        """Re-derive the counts; `holders` are counted from all who hold. AssertionError where one differs."""
        self.slabs.check()
        assert holders == Counter(self._holders), "holders differ from who holds frames"
        roles = self._holders.keys() | self.records.keys() | self._copies.keys()
        for frame in roles:
            self.slabs.size_of(frame)  # asserts that it is handed out
        assert roles.isdisjoint(self.lent), "a lent frame is used"
        assert len(roles) + len(self.lent) == sum(self.slabs.used.values()), "frames leaked, or in two roles"
        assert self.lent_units == sum(map(self.slabs.size_of, self.lent)), "units of lent frames"
        limbo = self._copies.keys() - self._holders.keys() - self.records.keys()
        assert len(limbo) == self.limbo, f"limbo is {self.limbo}, {len(limbo)} counted"
        for frame, record in self.records.items():
            assert record.frame == frame, f"the record of frame {frame} names frame {record.frame}"
            assert self.units(record.nbytes) == self.slabs.size_of(frame), (
                f"a page of frame {frame} fits it not"
            )
