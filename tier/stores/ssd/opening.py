"""Decides how an L4 folder is opened: what of it is taken over, set aside or made again, and which pages stay. Pure.

The law: what could be read before is found, or a note says how much was lost. So nothing is deleted before that which
takes its place is complete, and what a note is derived from is deleted last. A start that is cut short anywhere leaves a
folder whose next start decides the same. The states are in docs/design.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.tier.stores.base import CatalogueEntry, Place, SegmentAllocator
from kvtier.tier.stores.ssd.layout import MIN_SEGMENT_SLOTS, Layout, Plan, Store


@dataclass(frozen=True, slots=True)
class Seen:
    """What lies in a folder, or in the part of it that is set aside."""

    has_pages: bool  # files with pages; else there is nothing to lose
    layout: Layout | None = None
    trouble: str = ""  # why the layout can't be read; "": it can, or there is none
    is_other_format: bool = False  # of another version of this program, which can read it


NOTHING = Seen(has_pages=False)


class Way(Enum):
    """How a folder is opened."""

    TAKE = auto()  # as it is
    MEND = auto()  # as it is, but the layout is made again from the files
    FRESH = auto()  # there is nothing
    SET_ASIDE = auto()  # another's pages are put aside, and it starts empty
    ADOPT = auto()  # what lies aside is put back
    SWAP = auto()  # both: what lies aside takes the place of what is here


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why what is here can't be taken over as it is; "" where it can or there is nothing."""

    way: Way
    why: str = ""


def decide(here: Seen, aside: Seen, plan: Plan, store: Store) -> Decision:
    """How to open a folder with `here` in it and `aside` beside it."""
    fits_aside = aside.layout is not None and not why_not(aside.layout, plan, store)
    if not here.has_pages:
        if fits_aside:
            return Decision(Way.ADOPT)
        fits = here.layout is not None and not why_not(here.layout, plan, store)
        return Decision(Way.TAKE if fits else Way.FRESH)
    if here.is_other_format:
        why = here.trouble
    elif here.layout is None:
        return Decision(Way.MEND, here.trouble)
    else:
        why = why_not(here.layout, plan, store)
    if (
        fits_aside
        and _was_made_for(aside.layout, plan, store)
        and not _was_made_for(here.layout, plan, store)
    ):
        return Decision(Way.SWAP, why or "what lies aside was made for these sizes")
    if not why:
        return Decision(Way.TAKE)
    return Decision(Way.SWAP if fits_aside else Way.SET_ASIDE, why)


def _was_made_for(layout: Layout | None, plan: Plan, store: Store) -> bool:
    return layout is not None and layout.segment_bytes == plan.segment_bytes(store) and layout.store == store


def why_not(layout: Layout, plan: Plan, store: Store) -> str:
    """Why files of this layout can't hold the pages of this plan; "": they can."""
    if layout.store != store:
        return f"it was store {layout.store!r} and is {store!r} now"
    if layout.segment_bytes == plan.segment_bytes(store):
        return ""
    if not MIN_SEGMENT_SLOTS * plan.slot_bytes <= layout.segment_bytes <= plan.page_bytes(store):
        return f"segments of {layout.segment_bytes} bytes don't suit the new sizes"
    return ""


@dataclass(frozen=True, slots=True)
class Kept:
    """The pages that stay, the latest used last; those that go; and who hands out the places from here on."""

    found: list[CatalogueEntry]
    lost: list[CatalogueEntry]
    num_gone: int  # of those that go: their place isn't there, or holds another page
    allocator: SegmentAllocator
    segments: list[int]


def keep(
    entries: Iterable[CatalogueEntry],
    holds: Callable[[Place, int], bool],
    present: Collection[int],
    segment_bytes: int,
    num_segments: int,
    max_records: int,
) -> Kept:
    """Choose at most `max_records` that stay in `num_segments` segments; `holds`: is a slot of that size in the files?

    A segment goes with all its pages: those stay that hold most of the pages used last. Of two records of one place
    the one written later counts: the other's drop was never committed. Files that are there (`present`) are used first.
    """
    in_order = sorted(entries, key=lambda entry: entry.last_use_s)
    latest: dict[Place, CatalogueEntry] = {}
    for entry in in_order:
        other = latest.get(entry.place)
        if (other is None or entry.generation >= other.generation) and holds(entry.place, entry.slot_bytes):
            latest[entry.place] = entry
    whole = [entry for entry in in_order if latest.get(entry.place) is entry]
    usable = whole[max(0, len(whole) - max_records) :]
    kept = _segments_kept(usable, num_segments, num_segments * segment_bytes)
    segments = _numbers(kept, present, num_segments)
    allocator = SegmentAllocator(num_segments * segment_bytes, segment_bytes, segments)
    found: list[CatalogueEntry] = []
    for entry in reversed(usable):  # the latest used first: of two sizes in one segment its size counts
        if entry.place.segment in kept and allocator.take(entry.place, entry.slot_bytes):
            found.append(entry)
    found.reverse()
    if len(found) == len(in_order):
        return Kept(found, [], 0, allocator, segments)
    stays = set(map(id, found))
    lost = [entry for entry in in_order if id(entry) not in stays]
    return Kept(found, lost, len(in_order) - len(whole), allocator, segments)


def _segments_kept(usable: Sequence[CatalogueEntry], num_segments: int, room_bytes: int) -> set[int]:
    """The segments with most bytes of the pages that would be kept if pages could be moved."""
    there = {entry.place.segment for entry in usable}
    if len(there) <= num_segments:
        return there
    worth: dict[int, int] = defaultdict(int)
    for entry in reversed(usable):
        room_bytes -= entry.slot_bytes
        if room_bytes < 0:
            break
        worth[entry.place.segment] += entry.slot_bytes
    return set(sorted(there, key=lambda segment: (-worth[segment], segment))[:num_segments])


def _numbers(kept: set[int], present: Collection[int], num_segments: int) -> list[int]:
    """The numbers of all segments: those kept, then those that have files, then the lowest."""
    numbers = set(kept)
    for number in (*sorted(present), *range(num_segments)):
        if len(numbers) >= num_segments:
            break
        numbers.add(number)
    return sorted(numbers)
