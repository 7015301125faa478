"""Which page lies behind which in all chains, so that no page leaves before those that hang on it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages, grown

NONE = -1  # above a chain's first page


class PageTree:
    """Of pages in a cache, what they follow and how many follow them. A page follows the same one in every chain."""

    def __init__(self) -> None:
        self._above: Pages = np.zeros(0, np.int64)  # [page]
        self._behind: Pages = np.zeros(0, np.int64)  # [page]: pages in the cache that follow it directly

    def grow(self, pages: int) -> None:
        """Room for ids below `pages`."""
        self._above = grown(self._above, pages, NONE)
        self._behind = grown(self._behind, pages)

    def arrive(self, chain: Pages, was_in: npt.NDArray[np.bool_]) -> None:
        """A chain, head first, comes in; `was_in` were already."""
        self._above[chain[1:]] = chain[:-1]
        self._count(chain[~was_in], 1)

    def leave(self, pages: Pages) -> None:
        """Pages leave on which none hangs but some of themselves."""
        self._count(pages, -1)

    def leaves_first(self, ranked: Pages, count: int) -> Pages:
        """The first `count` to leave of pages in that order, or fewer: each waits for those that hang on it.

        A page whose turn came before goes as soon as the last of those has gone.
        """
        above = dict(zip(ranked.tolist(), self._above[ranked].tolist(), strict=True))
        behind = dict(zip(ranked.tolist(), self._behind[ranked].tolist(), strict=True))
        waiting: set[int] = set()
        leaving: list[int] = []
        for page in above:
            if behind[page]:
                waiting.add(page)
                continue
            leaving.extend(_freed(page, above, behind, waiting))
            if len(leaving) >= count:
                break
        return np.array(leaving[:count], np.int64)

    def _count(self, pages: Pages, change: int) -> None:
        above = self._above[pages]
        np.add.at(self._behind, above[above != NONE], change)


def _freed(page: int, above: dict[int, int], behind: dict[int, int], waiting: set[int]) -> Iterable[int]:
    """This page, and those above it that waited for it alone."""
    yield page
    while (page := above[page]) in behind:
        behind[page] -= 1
        if behind[page] or page not in waiting:
            return
        waiting.remove(page)
        yield page
