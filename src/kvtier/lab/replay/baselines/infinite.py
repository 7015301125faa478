"""The cache that nothing leaves. Pure."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages
from kvtier.tier.policy.base import Use


class Infinite(BaselineCache):
    """Hits all that was ever used before: no cache can hit more."""

    name = "infinite"

    def __init__(self) -> None:
        super().__init__(sys.maxsize)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        """Nothing to remember: no page ever leaves."""

    def _choose(self, excess: int, now: float) -> Pages:
        raise AssertionError("an infinite cache was over its capacity")
