"""Longest first: pages of the longest requests leave first. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages
from kvtier.lab.replay.baselines.ranked import MAX_MAJOR, RankedCache
from kvtier.tier.policy.base import Use


class LengthFirst(RankedCache):
    """A page ranks by how many pages the last request had that used it, the longest leave first, LRU among equals.

    The memory term of a three-term score alone: freeing the most at once looks cheap, and is what replay speaks against.
    """

    name = "length_first"

    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        return self._by_touch(np.full(order.size, MAX_MAJOR - min(order.size, MAX_MAJOR)))
