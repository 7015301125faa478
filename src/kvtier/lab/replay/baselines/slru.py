"""SLRU: an LRU of pages used again behind an LRU of pages used once. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages
from kvtier.lab.replay.baselines.page_queue import PageQueue
from kvtier.tier.policy.base import Use


class Slru(BaselineCache):
    """Segmented LRU (R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance", IEEE
    Computer, 1994): a new page is on probation; one used again is protected, in four fifths of the cache, until newer
    ones push it back."""

    name = "slru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._probation, self._protected = PageQueue(), PageQueue()

    def _grow(self, pages: int) -> None:
        self._probation.grow(pages)
        self._protected.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        again = order[was_in]
        self._probation.remove(again[self._probation.holds(again)])
        self._protected.append(again)
        self._probation.append(order[~was_in])
        self._probation.append(self._protected.pop(len(self._protected) - self.capacity * 4 // 5))

    def _choose(self, excess: int, now: float) -> Pages:
        return self._probation.pop(excess)
