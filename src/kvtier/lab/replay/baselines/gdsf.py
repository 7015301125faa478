"""GDSF: LFU whose old counts lose their weight as pages leave. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages, grown
from kvtier.lab.replay.baselines.ranked import TOUCH_BITS, RankedCache
from kvtier.tier.policy.base import Use


class Gdsf(RankedCache):
    """Greedy-Dual-Size-Frequency (L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency
    caching policy", HP Laboratories, 1998), pages being of one size and one cost: a page's priority at its last use is
    the number of its uses plus the clock, which is the highest priority that has left. Uses are counted past eviction.
    """

    name = "gdsf"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses = np.zeros(0, np.int64)  # [page]
        self._clock = 0

    def _grow(self, pages: int) -> None:
        super()._grow(pages)
        self._uses = grown(self._uses, pages)

    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        self._uses[order] += 1
        return self._by_depth(self._uses[order] + self._clock)

    def _choose(self, excess: int, now: float) -> Pages:
        leaving = super()._choose(excess, now)
        self._clock = max(self._clock, int(self._rank[leaving].max()) >> TOUCH_BITS)
        return leaving
