"""What all baseline caches share: which pages are in, what a request hits, what leaves. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tier.policy.base import Use

Pages = npt.NDArray[np.int64]


class BaselineCache(ABC):
    """A cache of page ids without bytes, for replay: at most `capacity` pages after each request.

    Ids are dense, from 0, for every per-page figure is kept in an array indexed by them. Of one request each page is
    touched once, the tail first, so that of pages used together the deepest is the oldest and leaves first. A request
    is one step: all its pages come in, and only then does what is too much leave, its own pages too.
    """

    name: str

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a cache holds at least 1 page, got a capacity of {capacity}")
        self.capacity = capacity
        self.evicted_pages = 0
        self.num_resident = 0
        self._resident = np.zeros(0, np.bool_)  # [page]

    def request(self, pages: Pages, use: Use, now: float) -> int:
        """How many pages of the chain, head first, were in before the first that wasn't; then all of it is used."""
        if not pages.size:
            return 0
        self._reserve(int(pages.max()) + 1)
        was_in = self._resident[pages]
        hits = pages.size if was_in.all() else int(was_in.argmin())
        self._resident[pages] = True
        self.num_resident += int(pages.size - np.count_nonzero(was_in))
        self._use(pages[::-1], was_in[::-1], use, now)
        if self.num_resident > self.capacity:
            self._leave(self._choose(self.num_resident - self.capacity, now))
        return hits

    def resident(self) -> Pages:
        """All pages that are in, in ascending order."""
        return np.flatnonzero(self._resident).astype(np.int64)

    @abstractmethod
    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        """A request touches these pages in this order; all of them are in now, and `was_in` were before."""

    @abstractmethod
    def _choose(self, excess: int, now: float) -> Pages:
        """Exactly so many of the pages that are in, taken out of whatever this policy keeps of them."""

    def _grow(self, pages: int) -> None:  # noqa: B027
        """Room for ids below `pages`, in what a policy keeps per page."""

    def _reserve(self, pages: int) -> None:
        if pages > self._resident.size:
            room = max(1024, pages, 2 * self._resident.size)
            self._resident = grown(self._resident, room)
            self._grow(room)

    def _leave(self, pages: Pages) -> None:
        self._resident[pages] = False
        self.num_resident -= pages.size
        self.evicted_pages += pages.size


def grown(array: npt.NDArray[Any], size: int, fill: int = 0) -> npt.NDArray[Any]:
    """A copy with `size` elements, the new ones holding `fill`."""
    longer = np.full(size, fill, array.dtype)
    longer[: array.size] = array
    return longer
