"""LFU: what has been used the fewest times leaves first. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages, grown
from kvtier.lab.replay.baselines.ranked import RankedCache
from kvtier.tier.policy.base import Use


class Lfu(RankedCache):
    """Perfect least frequently used, LRU among equals: uses go on being counted after a page has left (L. Breslau,
    P. Cao, L. Fan, G. Phillips, S. Shenker, "Web caching and Zipf-like distributions", INFOCOM, 1999)."""

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses = np.zeros(0, np.int64)  # [page]

    def _grow(self, pages: int) -> None:
        super()._grow(pages)
        self._uses = grown(self._uses, pages)

    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        return self._by_touch(self._counted(order))

    def _counted(self, order: Pages) -> npt.NDArray[np.int64]:
        """Uses of each page, this one among them."""
        self._uses[order] += 1
        return self._uses[order]
