"""S3-FIFO: a small queue sifts out what is used once, a large one gives second chances. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages, grown
from kvtier.lab.replay.baselines.page_queue import PageQueue, until
from kvtier.tier.policy.base import Use

MAX_USES = 3


class S3Fifo(BaselineCache):
    """S3-FIFO (J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO queues are all you need for cache eviction", SOSP,
    2023): a tenth of the cache for new pages, and nine tenths of its length of pages remembered after they left it.

    A page used again while in the small queue goes on to the main one, where each further use, three at most, takes it
    to the end once more. A remembered page comes back into the main queue.
    """

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small, self._main, self._lost = PageQueue(), PageQueue(), PageQueue()
        self._uses = np.zeros(0, np.int8)  # [page]: since it came into its queue, at most MAX_USES

    def _grow(self, pages: int) -> None:
        self._uses = grown(self._uses, pages)
        for queue in (self._small, self._main, self._lost):
            queue.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        again, new = order[was_in], order[~was_in]
        self._uses[again] = np.minimum(self._uses[again] + 1, MAX_USES)
        self._uses[new] = 0
        lost = self._lost.holds(new)
        self._lost.remove(new[lost])
        self._main.append(new[lost])
        self._small.append(new[~lost])

    def _choose(self, excess: int, now: float) -> Pages:
        leaving: list[Pages] = []
        while excess:
            over = len(self._small) - self.capacity // 10
            if not len(self._main):
                over = max(over, 1)
            gone = self._sift(over, excess) if over > 0 else self._turn(excess)
            leaving.append(gone)
            excess -= gone.size
        return np.concatenate(leaving)

    def _sift(self, most: int, excess: int) -> Pages:
        """Take at most so many pages off the small queue, until `excess` of them left the cache."""
        pages = self._small.oldest(min(most, 2 * excess + 16))
        unused = self._uses[pages] == 0
        taken = until(unused, excess)
        self._small.pop(taken)
        pages, unused = pages[:taken], unused[:taken]
        self._uses[pages] = 0
        self._main.append(pages[~unused])
        self._lost.append(pages[unused])
        self._lost.pop(len(self._lost) - self.capacity * 9 // 10)
        gone: Pages = pages[unused]
        return gone

    def _turn(self, excess: int) -> Pages:
        """Take pages off the main queue's front, those with uses left to its end, until `excess` left the cache."""
        pages = self._main.oldest(2 * excess + 16)
        unused = self._uses[pages] == 0
        pages = self._main.pop(until(unused, excess))
        unused = unused[: pages.size]
        self._uses[pages[~unused]] -= 1
        self._main.append(pages[~unused])
        gone: Pages = pages[unused]
        return gone
