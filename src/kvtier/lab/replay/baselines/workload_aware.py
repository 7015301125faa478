"""WA: pages rank by how likely requests of their sort come back in time. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import BaselineCache, Pages, grown
from kvtier.lab.replay.baselines.page_queue import PageQueue
from kvtier.lab.replay.baselines.page_tree import PageTree
from kvtier.lab.replay.baselines.turns import Turns
from kvtier.tier.policy.base import Kind, Use

TURNS = 8  # told apart; later ones count as the last
SORTS = len(Kind) * TURNS
NONE = -1  # sort of a page never used
SHORTEST_S = 1e-3  # of mean times: requests may come at one time


class WorkloadAware(BaselineCache):
    """Workload-aware eviction (J. Wang, J. Han, X. Wei et al., "KVCache cache in the wild: Characterizing and optimizing
    KVCache cache at a large cloud provider", ATC, 2025), rebuilt from its description, and learning as it goes.

    Requests are sorted by why their answer ended and by their turn. For each sort, an exponential distribution of the
    time to reuse is fitted, and the share of pages reused at all. A page ranks by the probability that it is used within
    the time that pages live unused at present; of equals the deepest leaves first, and none before pages that hang on
    it. Within a sort that is LRU, so only the oldest pages of each are looked at.
    """

    name = "wa"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._turns, self._tree = Turns(), PageTree()
        self._by_sort = [PageQueue() for _ in range(SORTS)]
        self._sort = np.zeros(0, np.int64)  # [page]
        self._last_use = np.zeros(0, np.float64)  # [page], seconds
        self._depth = np.zeros(0, np.int64)  # [page]
        self._uses = np.zeros(SORTS, np.float64)
        self._reuses = np.zeros(SORTS, np.float64)
        self._reuse_s = np.zeros(SORTS, np.float64)  # sum of times to reuse
        self._life_s = 0.0  # how long pages that left were unused, a mean over about one capacity of them

    def _grow(self, pages: int) -> None:
        self._sort = grown(self._sort, pages, NONE)
        self._last_use = grown(self._last_use, pages)
        self._depth = grown(self._depth, pages)
        self._turns.grow(pages)
        self._tree.grow(pages)
        for queue in self._by_sort:
            queue.grow(pages)

    def _use(self, order: Pages, was_in: npt.NDArray[np.bool_], use: Use, now: float) -> None:
        sort = use.kind * TURNS + min(self._turns.next(order[::-1], use.turn), TURNS) - 1
        self._learn(order, sort, now)
        self._tree.arrive(order[::-1], was_in[::-1])
        self._remove(order[was_in])
        self._by_sort[sort].append(order)
        self._sort[order] = sort
        self._last_use[order] = now
        self._depth[order] = np.arange(order.size)[::-1]

    def _learn(self, order: Pages, sort: int, now: float) -> None:
        known = order[self._sort[order] != NONE]
        sorts = self._sort[known]
        self._reuses += np.bincount(sorts, minlength=SORTS)
        self._reuse_s += np.bincount(sorts, now - self._last_use[known], minlength=SORTS)
        self._uses[sort] += order.size

    def _remove(self, pages: Pages) -> None:
        sorts = self._sort[pages]
        for sort in np.unique(sorts).tolist():
            self._by_sort[sort].remove(pages[sorts == sort])

    def _choose(self, excess: int, now: float) -> Pages:
        oldest, leaving = excess, np.empty(0, np.int64)
        while leaving.size < excess:
            oldest = 2 * oldest + 64
            leaving = self._tree.leaves_first(self._ranked(oldest, now), excess)
        self._tree.leave(leaving)
        self._remove(leaving)
        unused_s = float((now - self._last_use[leaving]).mean())
        part = 1.0 - (1.0 - 1.0 / self.capacity) ** excess
        self._life_s += (part if self._life_s else 1.0) * (unused_s - self._life_s)
        return leaving

    def _ranked(self, oldest: int, now: float) -> Pages:
        """So many pages of each sort, the lowest first, without those that a page not among them may be lower than."""
        by_sort = [queue.oldest(oldest) for queue in self._by_sort if len(queue)]
        pages = np.concatenate(by_sort)
        chance = self._log_chance(pages, now)
        ends = np.cumsum([some.size for some in by_sort])
        limit = min(
            (chance[end - 1] for some, end in zip(by_sort, ends, strict=True) if some.size == oldest),
            default=np.inf,
        )
        order = np.lexsort((-self._depth[pages], chance))
        return pages[order[chance[order] <= limit]]

    def _log_chance(self, pages: Pages, now: float) -> npt.NDArray[np.float64]:
        """Of use within the time that pages live; each sort's figures lean on those of all by one use and one reuse."""
        uses, reuses, reuse_s = self._uses.sum(), self._reuses.sum(), self._reuse_s.sum()
        share = (self._reuses + (reuses + 1) / (uses + 2)) / (self._uses + 1)
        mean_s = (self._reuse_s + (reuse_s + 1) / (reuses + 1)) / (self._reuses + 1)
        mean_s = np.maximum(mean_s, SHORTEST_S)
        within = -np.expm1(-max(self._life_s, SHORTEST_S) / mean_s)
        sorts = self._sort[pages]
        chance: npt.NDArray[np.float64] = np.log(share * within)[sorts]
        chance += (self._last_use[pages] - now) / mean_s[sorts]
        return chance
