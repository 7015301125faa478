"""Opens the files of an L4 folder as tier/stores/ssd/opening.py decides, and heals what is damaged.

Nothing is deleted before that which takes its place is complete: a catalogue is made beside the damaged one and renamed
over it. Pages that go are dropped from the catalogue by the first commit after it is opened, and what lies aside goes when
the notes have been told. So a start that is cut short leaves all that the next one's notes are derived from.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtier.tier.pages.page import Buffer, Envelope
from kvtier.tier.stores.base import CatalogueEntry, Place
from kvtier.tier.stores.ssd import moves as ssd_moves
from kvtier.tier.stores.ssd.aside import Aside, mebibytes, pages_of
from kvtier.tier.stores.ssd.catalogue import (
    CATALOGUE,
    PAGES,
    Catalogue,
    LmdbPages,
    copy_pages,
    open_pages,
    read_catalogue,
)
from kvtier.tier.stores.ssd.layout import Layout, OtherFormat, Plan, Store
from kvtier.tier.stores.ssd.lmdb_format import Damaged, check_database
from kvtier.tier.stores.ssd.moves import ASIDE, OLD
from kvtier.tier.stores.ssd.opening import NOTHING, Decision, Kept, Seen, Way, decide, keep
from kvtier.tier.stores.ssd.records import PageId, page_id
from kvtier.tier.stores.ssd.slab import FoundPage, SlabFiles, sync_folder


class PageStore(Protocol):
    """Where page bytes lie: slab files, or LMDB values."""

    era: int
    direct: bool

    @property
    def present(self) -> Collection[int]: ...

    @property
    def unreadable(self) -> int: ...

    def use(self, segments: Collection[int]) -> None: ...

    def holds(self, place: Place, size: int) -> bool: ...

    def scan(self, verify_s: float) -> Iterator[FoundPage]: ...

    def delete_others(self) -> None: ...

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None: ...

    def read(self, place: Place, out: memoryview) -> None: ...

    def wipe(self, place: Place) -> None: ...

    def is_gone(self) -> bool: ...

    def growth(self, place: Place, size: int) -> int: ...

    def taken_bytes(self) -> int: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Opened:
    """The files of a folder, open, and what came of its pages. `notes` are for the operator, one line each."""

    pages: PageStore
    catalogue: Catalogue
    layout: Layout
    kept: Kept
    aside: Aside | None
    notes: list[str]
    plan: Plan


def open_files(folder: Path, plan: Plan, store: Store, verify_s: float) -> Opened:
    """Open the folder, which is locked. OSError, and nothing is lost, where the disk refuses."""
    notes: list[str] = []
    ssd_moves.finish(folder)
    here, aside = _look(folder), _look(folder / ASIDE)
    decision = decide(here, aside, plan, store)
    if decision.way is Way.MEND:
        _mend(folder, plan)
        notes.append(f"{decision.why}; it is made again from the files")
        here = _look(folder)
        decision = decide(here, aside, plan, store)
    layout = _act(folder, decision, here, plan, store)
    opened = _take(folder, layout, plan, store, verify_s, notes)
    try:
        _tidy(folder, opened, decision)
    except BaseException:
        opened.pages.close()
        opened.catalogue.close()
        raise
    opened.notes[:] = [f"L4 at {folder}: {note}" for note in notes]
    return opened


def _look(folder: Path) -> Seen:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return NOTHING
    has_slabs = any(SlabFiles.is_slab(name) and os.stat(folder / name).st_size for name in names)
    empty_bytes = 2 * mmap.PAGESIZE  # an LMDB file without values has two pages
    has_pages = has_slabs or (PAGES in names and os.stat(folder / PAGES).st_size > empty_bytes)
    try:
        return Seen(has_pages, Layout.load(folder))
    except FileNotFoundError:
        return Seen(has_pages, trouble="its layout file is gone")
    except OtherFormat as error:
        return Seen(has_pages, trouble=str(error), is_other_format=True)
    except ValueError as error:
        return Seen(has_pages, trouble=str(error))


def _act(folder: Path, decision: Decision, here: Seen, plan: Plan, store: Store) -> Layout:
    match decision.way:
        case Way.TAKE:
            assert here.layout is not None
            return here.layout
        case Way.FRESH:
            ssd_moves.delete_files(folder)
        case Way.SET_ASIDE:
            ssd_moves.set_aside(folder)
        case Way.ADOPT:
            ssd_moves.adopt(folder)
            return Layout.load(folder)
        case Way.SWAP:
            ssd_moves.swap(folder)
            return Layout.load(folder)
        case Way.MEND:
            raise AssertionError("a layout that is mended is decided on again")
    return _start_fresh(folder, plan, store)


def _start_fresh(folder: Path, plan: Plan, store: Store) -> Layout:
    """The layout file comes last, so that a start cut short is seen as one."""
    Catalogue(folder / CATALOGUE, plan.map_bytes, flush=True).close()
    if store == "lmdb":
        open_pages(folder / PAGES, plan.pages_map_bytes).close()
    layout = Layout(store, plan.segment_bytes(store))
    layout.save(folder)
    return layout


def _mend(folder: Path, plan: Plan) -> None:
    """Make the layout again. Who was cleared is not known any more, so no slot from before counts in a rebuild."""
    sizes = [os.stat(folder / name).st_size for name in os.listdir(folder) if SlabFiles.is_slab(name)]
    store: Store = "slab" if sizes else "lmdb"
    now = int(time.time() * 1000)  # more than clears were ever counted
    Layout(store, max(sizes) if sizes else plan.segment_bytes(store), era=now, floor=now).save(folder)


def _take(
    folder: Path, layout: Layout, plan: Plan, store: Store, verify_s: float, notes: list[str]
) -> Opened:
    """Take the folder's pages over; for store "lmdb" within a file that LMDB may use."""
    healed: list[str] = []  # what was damaged or lost: one note
    is_mended = bool(notes)
    if store == "lmdb" and (damage := _damage_of_pages(folder)) is not None:
        healed.append(f"{damage}; its {mebibytes(folder)} are lost")
        _replace(folder / PAGES, lambda new: open_pages(new, plan.pages_map_bytes).close())
    entries, damage = read_catalogue(folder / CATALOGUE)
    if store == "lmdb" and os.stat(folder / PAGES).st_size > plan.pages_map_bytes:
        _shrink_pages(folder, layout, plan, entries)
    pages: PageStore
    if store == "slab":
        pages = SlabFiles(folder, layout.segment_bytes, layout.era)
    else:
        pages = LmdbPages(folder, plan.pages_map_bytes, plan.slot_bytes, layout.era)
    try:
        if not pages.direct:
            notes.append("O_DIRECT is refused here, pages go through the page cache (slower)")
        if damage is not None:
            entries, num_dead = _scan(pages, layout, entries, verify_s)
        cleared = [entry for entry in entries if layout.was_cleared_aside(entry.envelope.tenant)]
        if cleared:
            entries = [entry for entry in entries if not layout.was_cleared_aside(entry.envelope.tenant)]
        plan = plan.for_records(len(entries), store, layout.segment_bytes)
        num_segments = plan.page_bytes(store) // layout.segment_bytes
        kept = keep(entries, pages.holds, pages.present, layout.segment_bytes, num_segments, plan.max_records)
        if damage is not None:
            listed = entries if len(entries) <= plan.max_records else kept.found
            _replace(folder / CATALOGUE, lambda new: _fill(new, plan, listed))
            healed.append(f"{damage}; catalogue rebuilt from slot headers, {len(kept.found)} pages found")
            if is_mended and num_dead:
                healed.append(f"{num_dead} pages dropped that may have been cleared")
            if pages.unreadable:
                healed.append(f"{pages.unreadable} slots can't be read")
        healed += _about_lost(kept)
        if healed:
            notes.append("; ".join(healed))
        catalogue = Catalogue(folder / CATALOGUE, plan.map_bytes, flush=store == "lmdb")
        try:
            if layout.aside_era is not None:
                _end_aside(folder, layout, catalogue, [page_id(entry) for entry in cleared])
        except BaseException:
            catalogue.close()
            raise
    except BaseException:
        pages.close()
        raise
    return Opened(pages, catalogue, layout, kept, None, notes, plan)


def _about_lost(kept: Kept) -> list[str]:
    told = []
    if kept.num_gone:
        told.append(f"{kept.num_gone} pages dropped, their place in the files is gone")
    if over := len(kept.lost) - kept.num_gone:
        told.append(f"{over} pages dropped that were used longest ago, the budget has no room for them")
    return told


def _end_aside(folder: Path, layout: Layout, catalogue: Catalogue, cleared: list[PageId]) -> None:
    """It is no longer aside: what was cleared meanwhile is dropped for good before that is forgotten."""
    catalogue.commit((), cleared)
    catalogue.sync()
    layout.aside_era = None
    layout.save(folder)


def _tidy(folder: Path, opened: Opened, decision: Decision) -> None:
    """The last step: delete files without use, and say what lies aside."""
    opened.pages.use(opened.kept.segments)
    opened.pages.delete_others()
    why = f"{decision.why}; " if decision.why else ""
    if os.path.lexists(folder / ASIDE):
        opened.aside = Aside(folder, opened.plan.copy_bytes)
        opened.notes.append(f"{why}{opened.aside.about()}")
    if os.path.lexists(folder / OLD):
        opened.notes.append(f"{pages_of(folder / OLD)} that lay aside before those are deleted")


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    """Make a file beside `path`, all of it on the disk, and have it take its place."""
    new = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        os.unlink(new)
    try:
        make(new)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    sync_folder(path.parent)


def _fill(path: Path, plan: Plan, entries: list[CatalogueEntry]) -> None:
    catalogue = Catalogue(path, plan.map_bytes, flush=False)
    try:
        catalogue.fill(entries)
    finally:
        catalogue.close()


def _scan(
    pages: PageStore, layout: Layout, known: list[CatalogueEntry], verify_s: float
) -> tuple[list[CatalogueEntry], int]:
    """Records for all pages in the files: those that are known, and new ones for the others. And how many are dead."""
    num_dead = 0
    found: dict[PageId, CatalogueEntry] = {page_id(entry): entry for entry in known}
    for page in pages.scan(verify_s):
        envelope = page.envelope
        name = (envelope.key, envelope.variant)
        if name in found:
            continue
        if layout.is_dead(envelope.tenant, page.era):
            num_dead += 1
        else:
            found[name] = CatalogueEntry(
                envelope, page.place, page.slot_bytes, generation=0, last_use_s=page.modified_s
            )
    return list(found.values()), num_dead


def _damage_of_pages(folder: Path) -> str | None:
    try:
        check_database(folder / PAGES)
    except Damaged as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{PAGES}: {error.strerror}"
    return None


def _shrink_pages(folder: Path, layout: Layout, plan: Plan, entries: list[CatalogueEntry]) -> None:
    """LMDB's file never shrinks: those pages that were used last go into a new one."""
    old = LmdbPages(folder, 0, plan.slot_bytes, layout.era)
    try:
        num_segments = plan.page_bytes("lmdb") // layout.segment_bytes
        kept = keep(entries, old.holds, (), layout.segment_bytes, num_segments, plan.max_records)
    finally:
        old.close()
    latest_first = kept.found[::-1]
    _replace(folder / PAGES, lambda new: copy_pages(folder / PAGES, new, plan.pages_map_bytes, latest_first))
