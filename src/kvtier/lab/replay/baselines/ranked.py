"""Caches whose pages have a rank that changes only when they are used: the lowest leave. Pure."""

from __future__ import annotations

from abc import abstractmethod
from math import isqrt

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages, grown
from kvtier.tier.policy.base import Use

MAJOR_BITS, TOUCH_BITS = 24, 39
DEPTH_BITS, REQUEST_BITS = 15, 24
MAX_MAJOR, MAX_DEPTH = (1 << MAJOR_BITS) - 1, (1 << DEPTH_BITS) - 1


class RankedCache(BaselineCache):
    """Evicts the pages of lowest rank, exactly, without looking at all of them.

    `_low` holds every page that is in and ranks at most `_limit`, beside some that no longer do; whatever leaves is
    chosen from it. Once it runs out, it is drawn again from all pages with a limit that makes it about as long as the
    square root of (pages that leave at once x pages that are in), where both kinds of work come to the same.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._rank = np.zeros(0, np.int64)  # [page]
        self._is_low = np.zeros(0, np.bool_)  # [page]: in _low
        self._low: Pages = np.empty(0, np.int64)
        self._limit = -1
        self._touches = 0
        self._requests = 0

    @abstractmethod
    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        """Of the pages that a request touches in this order; not negative."""

    def _grow(self, pages: int) -> None:
        self._rank = grown(self._rank, pages)
        self._is_low = grown(self._is_low, pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        ranks = self._ranks(order, use)
        self._rank[order] = ranks
        self._touches += order.size
        self._requests += 1
        self._add_low(order[(ranks <= self._limit) & ~self._is_low[order]])

    def _choose(self, excess: int, now: float) -> Pages:
        low = self._low
        keep = self._resident[low] & (self._rank[low] <= self._limit)
        if not keep.all():
            self._is_low[low[~keep]] = False
            low = low[keep]
        if low.size < excess:
            low = self._draw(excess)
        chosen = lowest(self._rank[low], excess)
        leaving = low[chosen]
        self._low = low[~chosen]
        self._is_low[leaving] = False
        return leaving

    def _add_low(self, pages: Pages) -> None:
        if pages.size:
            self._is_low[pages] = True
            self._low = np.concatenate([self._low, pages])

    def _draw(self, excess: int) -> Pages:
        pages = self.resident()
        ranks = self._rank[pages]
        count = min(pages.size, excess + isqrt(excess * pages.size) + 256)
        self._limit = int(ranks[lowest(ranks, count)].max())
        self._is_low[self._low] = False
        low = pages[ranks <= self._limit]
        self._is_low[low] = True
        return low

    def _by_touch(self, major: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ranks by one number for each page of a request; of those alike what was touched first is the lowest."""
        ranks = np.minimum(major, MAX_MAJOR) << TOUCH_BITS
        ranks |= np.arange(self._touches, self._touches + major.size)
        return ranks

    def _by_depth(self, major: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ranks by one number for each page of a request; of those alike what lies deepest is the lowest."""
        ranks = np.minimum(major, MAX_MAJOR) << DEPTH_BITS
        ranks |= MAX_DEPTH - np.minimum(np.arange(major.size)[::-1], MAX_DEPTH)
        return (ranks << REQUEST_BITS) | self._requests


def lowest(ranks: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    """A mask of the `count` lowest."""
    mask = np.zeros(ranks.size, np.bool_)
    mask[np.argpartition(ranks, count - 1)[:count]] = True
    return mask
