"""LengthAware: LFU that lets the pages farthest from the head of their chain leave first among equals. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages
from kvtier.lab.replay.baselines.lfu import Lfu
from kvtier.tier.policy.base import Use


class LengthAware(Lfu):
    """LengthAwareCache (R. Qin, Z. Li, W. He et al., "Mooncake: Trading more storage for less computation", FAST,
    2025): like LFU, but of pages used equally often the one that lies deepest leaves first, then the oldest."""

    name = "length_aware"

    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        return self._by_depth(self._counted(order))
