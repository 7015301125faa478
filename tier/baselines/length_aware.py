"""LengthAware: LFU that lets the pages farthest from the head of their chain leave first among equals. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.tier.baselines.cache import Pages, grown
from kvtier.tier.baselines.ranked import RankedCache
from kvtier.tier.score import Use


class LengthAware(RankedCache):
    """LengthAwareCache (R. Qin, Z. Li, W. He et al., "Mooncake: Trading more storage for less computation", FAST,
    2025): like LFU, but of pages used equally often the one that lies deepest leaves first, then the oldest."""

    name = "length_aware"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses = np.zeros(0, np.int64)  # [page]

    def _grow(self, pages: int) -> None:
        super()._grow(pages)
        self._uses = grown(self._uses, pages)

    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        self._uses[order] += 1
        return self._by_depth(self._uses[order])
