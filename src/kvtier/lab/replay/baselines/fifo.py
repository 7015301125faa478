"""FIFO: what came first leaves first, used or not. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages
from kvtier.lab.replay.baselines.page_queue import PageQueue
from kvtier.tier.policy.base import Use


class Fifo(BaselineCache):
    """First in, first out (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal, 1966)."""

    name = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = PageQueue()

    def _grow(self, pages: int) -> None:
        self._queue.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        self._queue.append(order[~was_in])

    def _choose(self, excess: int, now: float) -> Pages:
        return self._queue.pop(excess)
