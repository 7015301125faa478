"""ARC: recency and frequency share the cache, and what each has just lost says which should have more. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages
from kvtier.lab.replay.baselines.page_queue import PageQueue
from kvtier.tier.policy.base import Use


class Arc(BaselineCache):
    """Adaptive replacement cache (N. Megiddo, D. S. Modha, "ARC: A self-tuning, low overhead replacement cache", FAST,
    2003), with requests as single steps.

    `_once` and `_often` (T1, T2) are the pages that are in, used once or more often since they came; `_lost_once` and
    `_lost_often` (B1, B2) remember what left them last. `_target` is the length that `_once` should have. Invariants
    between requests: `_once` and `_lost_once` hold at most a capacity together, all four at most two.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once, self._often = PageQueue(), PageQueue()
        self._lost_once, self._lost_often = PageQueue(), PageQueue()
        self._target = 0.0

    def _grow(self, pages: int) -> None:
        for queue in (self._once, self._often, self._lost_once, self._lost_often):
            queue.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        lost_once, lost_often = self._lost_once.holds(order), self._lost_often.holds(order)
        self._adapt(lost_once, lost_often)
        self._lost_once.remove(order[lost_once])
        self._lost_often.remove(order[lost_often])
        known = was_in | lost_once | lost_often
        self._once.remove(order[self._once.holds(order)])
        self._often.append(order[known])
        self._once.append(order[~known])
        self._bound_lost()

    def _adapt(self, lost_once: npt.NDArray[np.bool_], lost_often: npt.NDArray[np.bool_]) -> None:
        """Each page that is asked for too late moves the target by what one of its queue is worth beside the other."""
        once, often = len(self._lost_once), len(self._lost_often)
        for was_once in lost_once[lost_once | lost_often].tolist():
            if was_once:
                self._target = min(self._target + max(1.0, often / once), self.capacity)
                once -= 1
            else:
                self._target = max(self._target - max(1.0, once / often), 0.0)
                often -= 1

    def _choose(self, excess: int, now: float) -> Pages:
        over = max(0, len(self._once) - int(self._target))
        from_once = max(min(excess, over), excess - len(self._often))
        once, often = self._once.pop(from_once), self._often.pop(excess - from_once)
        self._lost_once.append(once)
        self._lost_often.append(often)
        self._bound_lost()
        return np.concatenate([once, often])

    def _bound_lost(self) -> None:
        self._lost_once.pop(len(self._lost_once) - max(0, self.capacity - len(self._once)))
        known = len(self._once) + len(self._often) + len(self._lost_once) + len(self._lost_often)
        self._lost_often.pop(known - 2 * self.capacity)
