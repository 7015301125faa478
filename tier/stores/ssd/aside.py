"""The pages of other sizes that lie aside in an L4 folder: they come back with their sizes, unless their room is needed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from kvtier.tier.stores.ssd.catalogue import CATALOGUE, PAGES, read_catalogue
from kvtier.tier.stores.ssd.layout import Layout
from kvtier.tier.stores.ssd.moves import ASIDE, delete_folder, files_of
from kvtier.tier.stores.ssd.slab import SlabFiles


class Aside:
    """What lies aside in `folder`. One thread at a time. Its notes are one line each."""

    def __init__(self, folder: Path, spare_bytes: int) -> None:
        """Its catalogue may take `spare_bytes` that are nothing else's. Raises FileNotFoundError where nothing lies there."""
        self._spare_bytes = spare_bytes
        self._folder = folder
        self._path = folder / ASIDE
        self._sizes = {name: os.stat(self._path / name).st_size for name in files_of(self._path)}
        entries, self._damage = read_catalogue(self._path / CATALOGUE)
        self._pages = Counter(entry.place.segment for entry in entries)
        self._used_s: dict[int, float] = {}
        for entry in entries:
            segment = entry.place.segment
            self._used_s[segment] = max(entry.last_use_s, self._used_s.get(segment, 0.0))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of the room for pages."""
        pages = sum(self._sizes[name] for name in self._page_files())
        return pages + max(0, sum(self._sizes.values()) - pages - self._spare_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether no files of pages are left."""
        return not self._page_files()

    def about(self) -> str:
        """How many pages there are, and how many were deleted."""
        total = self._pages.total()
        there = total if PAGES in self._sizes else sum(self._pages[_segment(n)] for n in self._page_files())
        known = f"{there} pages" if self._damage is None else mebibytes(self._path)
        gone = f", {total - there} more were deleted for room" if there < total else ""
        return f"{known} of other sizes are set aside in {self._path}{gone}"

    def give(self, nbytes: int) -> str:
        """Delete files, used longest ago first, until this much is free or nothing is left; what is to be said."""
        files, deleted, freed = self._page_files(), 0, 0
        while files and freed < nbytes:
            name = files.pop(0)
            os.unlink(self._path / name)
            freed += self._sizes.pop(name)
            deleted += self._pages.total() if name == PAGES else self._pages[_segment(name)]
        if not files:
            delete_folder(self._path)
        left = "the rest stays" if files else "nothing is left there"
        return f"{deleted} pages set aside are deleted, their room is needed; {left}"

    def forget(self, tenant: bytes | None) -> bool:
        """Nothing of the tenant (None: anyone) comes back from there. Durable when it returns; False: it can't be noted."""
        try:
            layout = Layout.load(self._path)
        except (
            FileNotFoundError,
            ValueError,
        ):  # another version of this program may read it and take the pages back
            return False
        layout.forget_aside(tenant)
        layout.save(self._path)
        return True

    def _page_files(self) -> list[str]:
        """Those used longest ago first."""
        names = [name for name in self._sizes if name == PAGES or SlabFiles.is_slab(name)]
        return sorted(names, key=lambda name: (self._used_s.get(_segment(name), 0.0), name))


def mebibytes(path: Path) -> str:
    """How many pages lie in a folder whose catalogue can't be read."""
    nbytes = sum(os.stat(path / name).st_size for name in files_of(path))
    return f"{nbytes / 2**20:.1f} MiB of pages"


def pages_of(path: Path) -> str:
    """How many pages lie in a folder."""
    entries, damage = read_catalogue(path / CATALOGUE)
    return f"{len(entries)} pages" if damage is None else mebibytes(path)


def _segment(name: str) -> int:
    return -1 if name == PAGES else int(name[5:10])
