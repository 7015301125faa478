"""SIEVE: a hand goes over a FIFO queue and evicts what hasn't been used since it last came by. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages, grown
from kvtier.lab.replay.baselines.page_queue import PageQueue, until
from kvtier.tier.policy.base import Use


class Sieve(BaselineCache):
    """SIEVE (Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is simpler than LRU", NSDI, 2024): pages
    stay where they came; the hand moves from the oldest to the newest and starts again."""

    name = "sieve"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = PageQueue()
        self._used = np.zeros(0, np.bool_)  # [page]: since it came or the hand came by
        self._hand: int | None = None  # the page it looks at next; None: the oldest

    def _grow(self, pages: int) -> None:
        self._used = grown(self._used, pages)
        self._queue.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        self._used[order] = was_in
        self._queue.append(order[~was_in])

    def _choose(self, excess: int, now: float) -> Pages:
        leaving: list[Pages] = []
        while excess:
            gone = self._sweep(excess)
            leaving.append(gone)
            excess -= gone.size
        return np.concatenate(leaving)

    def _sweep(self, excess: int) -> Pages:
        """Move the hand until it has found so many unused pages, or over a stretch of the queue, or to its end."""
        count = 2 * excess + 16
        pages = self._queue.oldest(count) if self._hand is None else self._queue.following(self._hand, count)
        unused = ~self._used[pages]
        passed = until(unused[:-1], excess) if pages.size == count else until(unused, excess)
        self._hand = int(pages[passed]) if passed < pages.size else None
        self._used[pages[:passed]] = False
        gone = pages[:passed][unused[:passed]]
        self._queue.remove(gone)
        return gone
