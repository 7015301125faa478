"""LIRS: pages rank by the time between their last two uses instead of since the last one. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages, grown
from kvtier.lab.replay.baselines.page_queue import PageQueue, until
from kvtier.tier.policy.base import Use


class Lirs(BaselineCache):
    """Low inter-reference recency set (S. Jiang, X. Zhang, "LIRS: An efficient low inter-reference recency set
    replacement policy to improve buffer cache performance", SIGMETRICS, 2002), with requests as single steps.

    99 of 100 pages are hot; the others (at least one) are cold and leave in their queue's order, unless they come again
    while on the stack of all pages by last use, whose lowest is always hot. It holds pages that have left, too: as many
    as the cache has room for, those that left last.
    """

    name = "lirs"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._stack, self._cold, self._lost = PageQueue(), PageQueue(), PageQueue()
        self._is_hot = np.zeros(0, np.bool_)  # [page]
        self._num_hot = 0
        self._max_hot = min(capacity - 1, capacity * 99 // 100)

    def _grow(self, pages: int) -> None:
        self._is_hot = grown(self._is_hot, pages)
        for queue in (self._stack, self._cold, self._lost):
            queue.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        self._lost.remove(order[self._lost.holds(order)])
        cold = ~self._is_hot[order]
        free = self._max_hot - self._num_hot
        rises = cold & (self._stack.holds(order) | (np.cumsum(cold) <= free))
        self._stack.append(order)
        self._heat(order[rises])
        self._cold.append(order[cold & ~rises])
        self._cool(self._num_hot - self._max_hot)

    def _heat(self, pages: Pages) -> None:
        self._cold.remove(pages[self._cold.holds(pages)])
        self._is_hot[pages] = True
        self._num_hot += pages.size

    def _cool(self, count: int) -> None:
        """Make the lowest so many hot pages of the stack cold, and take off it all below the next hot one."""
        while count > 0:
            pages = self._off_stack(until(self._is_hot[self._stack.oldest(2 * count + 64)], count))
            cooled = pages[self._is_hot[pages]]
            self._is_hot[cooled] = False
            self._num_hot -= cooled.size
            self._cold.append(cooled)
            count -= cooled.size
        found = False
        while len(self._stack) and not found:
            hot = self._is_hot[self._stack.oldest(64)]
            found = bool(hot.any())
            self._off_stack(int(hot.argmax()) if found else hot.size)

    def _off_stack(self, count: int) -> Pages:
        pages = self._stack.pop(count)
        self._lost.remove(pages[self._lost.holds(pages)])
        return pages

    def _choose(self, excess: int, now: float) -> Pages:
        leaving = self._cold.pop(excess)
        self._lost.append(leaving[self._stack.holds(leaving)])
        self._stack.remove(self._lost.pop(len(self._lost) - self.capacity))
        return leaving
