"""Pages in the order of their arrival, many at a time: what all caches with queues are built of. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages, grown

OUT = -1


class PageQueue:
    """Distinct pages, oldest first. A page that is appended again goes to the end, one that is removed leaves a hole.

    `_row[start:end]` holds the pages with holes between them; `_at[page]` is a page's place in it, `OUT` without one.
    A place whose page is `_at` another one is a hole. Closing the holes costs no more than what made them.
    """

    def __init__(self) -> None:
        self._row: Pages = np.empty(1024, np.int64)
        self._at: Pages = np.empty(0, np.int64)  # [page]
        self._start = self._end = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def grow(self, pages: int) -> None:
        """Room for ids below `pages`."""
        self._at = grown(self._at, pages, OUT)

    def holds(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Which of these pages are in."""
        return np.not_equal(self._at[pages], OUT)

    def append(self, pages: Pages) -> None:
        """Put distinct pages at the end, the first of them in front."""
        if self._end + pages.size > self._row.size:
            self._close_holes(pages.size)
        self._size += int(np.count_nonzero(self._at[pages] == OUT))
        self._row[self._end : self._end + pages.size] = pages
        self._at[pages] = np.arange(self._end, self._end + pages.size)
        self._end += pages.size

    def remove(self, pages: Pages) -> None:
        """Take out pages that are in."""
        self._at[pages] = OUT
        self._size -= pages.size

    def oldest(self, count: int) -> Pages:
        """The first `count` pages, or all of them if fewer; they stay."""
        pages = self._pages(self._start, min(count, self._size))
        if pages.size:
            self._start = int(self._at[pages[0]])
        return pages

    def following(self, page: int, count: int) -> Pages:
        """This page, which is in, and those behind it: `count` in all, or fewer at the end."""
        return self._pages(int(self._at[page]), count)

    def pop(self, count: int) -> Pages:
        """Take out the first `count` pages, or all of them if fewer; none if it isn't positive."""
        pages = self.oldest(count)
        if pages.size:
            self._start = int(self._at[pages[-1]]) + 1
            self.remove(pages)
        return pages

    def _pages(self, place: int, count: int) -> Pages:
        found: list[Pages] = []
        while count > 0 and place < self._end:
            stretch = self._row[place : min(place + count + count // 2 + 16, self._end)]
            full = stretch[self._at[stretch] == np.arange(place, place + stretch.size)]
            found.append(full[:count])
            count -= full.size
            place += stretch.size
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _close_holes(self, more: int) -> None:
        pages = self.oldest(self._size)
        room = max(1024, 2 * (self._size + more))
        self._row = self._row if room <= self._row.size else np.empty(room, np.int64)
        self._row[: pages.size] = pages
        self._at[pages] = np.arange(pages.size)
        self._start, self._end = 0, pages.size


def until(wanted: npt.NDArray[np.bool_], count: int) -> int:
    """How many to look at, in order, to find so many that are wanted; all, if there are fewer."""
    found = np.flatnonzero(wanted)
    return int(found[count - 1]) + 1 if found.size >= count else wanted.size
