"""L4's opening is killed before each of its calls, and each call fails with each error: nothing is lost in silence.

The law: what could be read before is found, or a note says how much was lost.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest
from fault_shim import AUDITED, Audit, Calls, killed_at, shimmed
from tier_pages import entry_of, page_key, read_page, write_page

from kvtier.tier.pages.page import PageCorrupt, PageMissing, slot_bytes
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.ssd.layout import Store
from kvtier.tier.stores.ssd.opening import keep
from kvtier.tier.stores.ssd.store import SsdTier, open_ssd

pytestmark = pytest.mark.slow

PAGE_BYTES = 60 * 1024
SLOT_BYTES = slot_bytes(PAGE_BYTES)
CAPACITY = 5 * 2**20
READ_ERRORS = (errno.EIO,)
WRITE_ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES)
PAGES = range(24)
OTHER_PAGES = range(100, 104)


@dataclass(frozen=True)
class Sizes:
    """What a folder is opened for."""

    store: Store = "slab"
    capacity: int = CAPACITY
    slot: int = SLOT_BYTES

    def open(self, folder: Path) -> SsdTier:
        return open_ssd(
            folder, self.capacity, self.store, self.slot, min_slot_bytes=min(self.slot, SLOT_BYTES // 2)
        )


SAME, SMALLER = Sizes(), Sizes(capacity=CAPACITY // 2)
OTHER = Sizes(capacity=10 * 2**20, slot=slot_bytes(400 * 1024))
LMDB, LMDB_SMALLER = Sizes("lmdb"), Sizes("lmdb", capacity=CAPACITY // 2)


def fill(folder: Path, sizes: Sizes, numbers: range) -> None:
    tier = sizes.open(folder)
    for number in numbers:
        place = tier.allocator.alloc(SLOT_BYTES)
        assert place is not None
        write_page(tier, place, number, PAGE_BYTES)
        tier.commit([entry_of(number, place, PAGE_BYTES)])
    tier.close()


def damage_catalogue(folder: Path) -> None:
    path = folder / "catalogue.mdb"
    content = bytearray(path.read_bytes())
    content[8192:12288] = bytes(range(256)) * 16
    path.write_bytes(content)


def set_aside(folder: Path) -> None:
    """Its pages lie aside, and there are a few of the other sizes."""
    fill(folder, OTHER, OTHER_PAGES)


def set_aside_twice(folder: Path) -> None:
    set_aside(folder)
    tier = LMDB.open(folder)
    assert any("lay aside before" in note for note in tier.notes)
    tier.close()


def damage_pages(folder: Path) -> None:
    path = folder / "pages.mdb"
    os.truncate(path, path.stat().st_size // 2)


@dataclass(frozen=True)
class Scene:
    """A folder filled with PAGES for `before`, something done to it, and opened for `after`."""

    before: Sizes
    after: Sizes
    do: Callable[[Path], None] = lambda folder: None


SCENES = {
    "sound": Scene(SAME, SAME),
    "damaged catalogue": Scene(SAME, SAME, damage_catalogue),
    "no catalogue": Scene(SAME, SAME, lambda folder: (folder / "catalogue.mdb").unlink()),
    "no layout": Scene(SAME, SAME, lambda folder: (folder / "layout").unlink()),
    "smaller budget": Scene(SAME, SMALLER),
    "smaller budget, damaged catalogue": Scene(SAME, SMALLER, damage_catalogue),
    "other sizes": Scene(SAME, OTHER),
    "other store": Scene(SAME, LMDB),
    "other sizes, and something aside": Scene(SAME, LMDB, set_aside),
    "sizes that lie aside": Scene(SAME, SAME, set_aside),
    "lmdb": Scene(LMDB, LMDB),
    "lmdb, damaged catalogue": Scene(LMDB, LMDB, damage_catalogue),
    "lmdb, damaged pages": Scene(LMDB, LMDB, damage_pages),
    "lmdb, smaller budget": Scene(LMDB, LMDB_SMALLER),
}
by_scene = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())


def readable(tier: SsdTier) -> set[int]:
    """The pages that are found, with their right bytes."""
    numbers = {page_key(number): number for number in (*PAGES, *OTHER_PAGES)}
    found = set()
    for entry in tier.recovered:
        try:
            read_page(tier, entry.place, numbers[entry.envelope.key], PAGE_BYTES)
            found.add(numbers[entry.envelope.key])
        except (PageCorrupt, PageMissing):
            pass
    return found


def said(notes: list[str], lacking: int = 0) -> int:
    """How many pages the notes account for, as lost or as lying aside; where nothing can count them they say the bytes."""
    told = " ".join(notes)
    counts = re.findall(
        r"(\d+) (?:pages dropped|pages of other sizes|more were deleted|slots can't be read|pages that lay aside)",
        told,
    )
    has_bytes = re.search(r"\d MiB of pages (of other sizes|that lay aside|are lost)", told)
    return max(sum(map(int, counts)), lacking if has_bytes else 0)


def made(folder: Path, scene: Scene) -> tuple[Path, int]:
    """The folder of a scene, and how many pages it has."""
    template = folder / "template"
    fill(template, scene.before, PAGES)
    scene.do(template)
    return template, len(PAGES) + (len(OTHER_PAGES) if (template / "aside").exists() else 0)


def copied(template: Path) -> Path:
    folder = template.with_name("l4")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder


def calls_of(folder: Path, sizes: Sizes) -> list[str]:
    calls = Calls()
    with shimmed(calls):
        tier = sizes.open(folder)
        names = list(calls.names)
    tier.close()
    return names


READS = re.compile(
    r"os\.(listdir|stat|fstat|read|pread|preadv|close|path\.\w+)|mmap\.mmap|begin\.(get|cursor)|cursor\.\w+|fcntl\.flock"
)


def changing(names: list[str]) -> list[int]:
    """The calls that change the disk: a kill before any other call leaves what a kill before the next of these does."""
    return [number for number, name in enumerate(names) if not READS.fullmatch(name)]


def picked(names: list[str]) -> list[int]:
    """The calls to try: of the many that read one thing in parts the first, the second and the last."""
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        numbers.setdefault(name, []).append(number)
    chosen = set()
    for name, at in numbers.items():
        is_many = name in ("os.pread", "os.preadv", "begin.get", "begin.put", "open.begin", "begin.commit")
        chosen.update(at if not is_many else [*at[:2], *at[-2:]])
    return sorted(chosen)


@by_scene
def test_no_call_of_opening_goes_unseen(tmp_path: Path, scene: Scene) -> None:
    """What Python's audit tells of files is what the tests below kill and fail: `os.stat` and reads aren't audited."""
    template, _ = made(tmp_path, scene)
    folder, calls = copied(template), Calls()

    with shimmed(calls), Audit.of() as audited:
        tier = scene.after.open(folder)
    tier.close()

    names = {
        "os.open": "open",
        "os.unlink": "os.remove",
        "os.replace": "os.rename",
        "mmap.mmap": "mmap.__new__",
    }
    names["os.makedirs"] = "os.mkdir"
    seen = Counter(names.get(name, name) for name in calls.names)
    assert Counter(audited) == Counter({name: seen[name] for name in AUDITED if seen[name]})


@by_scene
def test_a_kill_before_any_call_of_opening_loses_nothing_in_silence(tmp_path: Path, scene: Scene) -> None:
    template, num_pages = made(tmp_path, scene)
    names = calls_of(copied(template), scene.after)
    control = scene.after.open(copied(template))
    expected = readable(control)
    assert len(expected) + said(control.notes) == num_pages, control.notes
    control.close()

    for number in changing(names):
        folder = copied(template)
        assert killed_at(number, lambda folder=folder: scene.after.open(folder))  # type: ignore[misc]

        tier = scene.after.open(folder)

        assert readable(tier) == expected, f"killed before call {number}, {names[number]}: {tier.notes}"
        assert said(tier.notes) == num_pages - len(expected), f"call {number}, {names[number]}: {tier.notes}"
        tier.allocator.check()
        tier.close()


def errors_of(name: str) -> list[Exception]:
    """What a call may fail with."""
    if name.partition(".")[0] not in ("os", "fcntl", "mmap"):
        return [lmdb.MapFullError("injected"), lmdb.Error("injected")]
    codes = READ_ERRORS if READS.fullmatch(name) else WRITE_ERRORS
    return [OSError(code, os.strerror(code)) for code in codes]


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """What would show that a file was changed."""
    stats = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*") if path.name != "lock"}
    return {name: (stat.st_size, 0 if "." not in name else stat.st_mtime_ns) for name, stat in stats.items()}


@by_scene
def test_a_call_of_opening_that_fails_loses_nothing_in_silence(tmp_path: Path, scene: Scene) -> None:
    template, num_pages = made(tmp_path, scene)
    names = calls_of(copied(template), scene.after)
    control = scene.after.open(copied(template))
    expected = readable(control)
    control.close()

    folder = copied(template)
    before = state(folder)
    for number in picked(names):
        for error in errors_of(names[number]):
            where = f"call {number}, {names[number]}, {error!r}"
            try:
                with shimmed(Calls(raising(number, error))):
                    tier = scene.after.open(folder)
            except OSError:
                if state(folder) == before:
                    continue
                tier = scene.after.open(folder)
                assert readable(tier) == expected, f"{where}: {tier.notes}"
                assert said(tier.notes) == num_pages - len(expected), f"{where}: {tier.notes}"
                tier.close()
            else:
                found = readable(tier)
                assert len(found) + said(tier.notes, num_pages - len(found)) >= num_pages, (
                    f"{where}: {tier.notes}"
                )
                tier.close()
                again = scene.after.open(folder)
                assert found <= readable(again), f"{where}, and then: {again.notes}"
                again.close()
            folder = copied(template)
            before = state(folder)


def raising(number: int, error: Exception) -> Callable[[int, str], None]:
    def before(at: int, name: str) -> None:
        if at == number:
            raise type(error)(*error.args)  # a new one: a traceback kept alive would keep buffers open

    return before


def test_of_two_records_of_one_place_the_one_written_later_counts_though_the_other_was_used_later() -> None:
    """The other's drop was never committed: it must not take the place of a newer page."""
    zombie, page = (entry_of(number, Place(0, 3), PAGE_BYTES) for number in (1, 2))
    zombie.last_use_s = page.last_use_s + 1e6

    kept = keep([zombie, page], lambda place, size: True, (), 8 * SLOT_BYTES, 1, 100)

    assert (kept.found, kept.lost, kept.num_gone) == ([page], [zombie], 1)
    kept.allocator.check()
