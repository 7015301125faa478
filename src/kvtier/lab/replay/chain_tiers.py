"""A chain of tiers L1 to L4 in virtual time: the policies rank L1 and L2, a node's own Coordinator runs L3 and L4. Pure.

A request is atomic: what its prefix has in any tier comes up to L1, the rest is computed, and what is too much then goes
down a tier. L1 and L2 are closed towards the head, so what is below continues what is above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.chain_node import ChainNode
from kvtier.lab.replay.chain_upper import Upper
from kvtier.tier.policy.base import Costs, PolicySettings, Use
from kvtier.tier.protocol.messages import WriteMode

TIERS = ("L1", "L2", "L3", "L4")
LOAD_S = {"L1": 0.0, "L2": 0.25e-3, "L3": 1.3e-3, "L4": 11e-3}  # a page of 512 tokens of an 8 B model
COSTS = Costs(20e-3, 64.0)  # of recomputing such a page


@dataclass(slots=True)
class ChainTotals:
    """What a chain did: pages by the tier they were hit in, pages that moved, and seconds."""

    pages: int = 0  # asked for
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    loads_s: float = 0.0
    recompute_s: float = 0.0
    recompute_all_s: float = 0.0
    ssd_writes: int = 0  # pages written to L4
    moved: int = 0  # pages, up or down, between any two tiers

    @property
    def time_saved(self) -> float:
        """The share of the time of recomputing all that the chain saves."""
        return 1.0 - (self.loads_s + self.recompute_s) / self.recompute_all_s if self.recompute_all_s else 0.0

    def copy(self) -> ChainTotals:
        """As it stands."""
        return replace(self, hits=dict(self.hits))

    def since(self, before: ChainTotals) -> ChainTotals:
        """What was done after `before` was copied."""
        names = [f.name for f in fields(self) if f.name != "hits"]
        hits = {tier: self.hits[tier] - before.hits[tier] for tier in TIERS}
        return ChainTotals(hits=hits, **{name: getattr(self, name) - getattr(before, name) for name in names})


class ChainModel:
    """A CacheModel (tier/policy/ghost_cache.py) of four tiers; `totals` says more than how many pages were hit.

    `capacities` are pages by tier: L1 of all workers together, shared out evenly. `load_s` are the seconds in which a
    page comes up from each tier, `costs` what recomputing it takes. L3 holds at least 2 pages.
    """

    name = "chain"

    def __init__(
        self,
        capacities: Mapping[str, int],
        settings: PolicySettings = PolicySettings(),  # noqa: B008  frozen
        *,
        workers: int = 1,
        load_s: Mapping[str, float] | None = None,
        costs: Costs = COSTS,
        write: WriteMode = "demote",
    ) -> None:
        missing = [tier for tier in TIERS if capacities.get(tier, 0) < 0 or tier not in capacities]
        if missing or capacities["L3"] < 2:
            raise ValueError(f"a chain needs pages for L1, L2, L3 (2 or more) and L4, got {dict(capacities)}")
        self.capacity = sum(capacities[tier] for tier in TIERS)
        self.totals = ChainTotals()
        self._load_s = dict(LOAD_S if load_s is None else load_s)
        self._costs = costs
        share, more = divmod(capacities["L1"], workers)
        each = [share + (number < more) for number in range(workers)]
        self._upper = Upper(settings, each, capacities["L2"], costs)
        self._node = ChainNode(settings, write, capacities["L3"], capacities["L4"], workers, costs)
        self._parents: dict[int, tuple[int | None, int]] = {}  # of a page, and its depth
        self._requests = 0
        self._computed = 0

    @property
    def evicted_pages(self) -> int:
        """Pages that were computed and are in no tier any more."""
        return self._computed - len(self._upper.numbers() | self._node.numbers())

    def request(self, pages: npt.NDArray[np.int64], use: Use, now: float) -> int:
        """A request for a chain of pages, head first: how many leading ones were in any tier."""
        ids: list[int] = pages.tolist()
        worker = self._route(ids)
        self._node.now = now
        own = self._upper.prefix(worker, ids)
        above = max(own, self._upper.resident(ids))
        from_l3, from_l4 = self._node.take_up(worker, above, ids) if above < len(ids) else (0, 0)
        hits = above + from_l3 + from_l4
        self._count(len(ids), {"L1": own, "L2": above - own, "L3": from_l3, "L4": from_l4})
        use = replace(use, pages=len(ids), new_pages=len(ids) - hits)
        self._learn_parents(ids)
        self._upper.use(worker, ids, use, now)
        self._node.finished(worker, ids, use)
        gone, down = self._upper.lower(worker, now)
        self._node.bring_down(worker, [(n, *self._parents[n]) for n in gone])
        self._computed += len(ids) - hits
        written = self._node.written_pages - self.totals.ssd_writes
        self.totals.ssd_writes += written
        self.totals.moved += down + len(gone) + written + hits - own
        return hits

    def check(self) -> None:
        """All tables agree."""
        self._upper.check()
        self._node.check()

    def _route(self, ids: list[int]) -> int:
        """The worker whose L1 has the longest prefix; they take turns where several have it."""
        self._requests += 1
        count = len(self._upper.workers)
        turn = [(self._requests + number) % count for number in range(count)]
        return max(turn, key=lambda worker: self._upper.prefix(worker, ids)) if count > 1 else 0

    def _count(self, asked: int, hits: dict[str, int]) -> None:
        totals = self.totals
        totals.pages += asked
        for tier, pages in hits.items():
            totals.hits[tier] += pages
            totals.loads_s += pages * self._load_s.get(tier, 0.0)
        totals.recompute_all_s += self._recompute_s(0, asked)
        totals.recompute_s += self._recompute_s(sum(hits.values()), asked)

    def _recompute_s(self, first: int, end: int) -> float:
        """Of the pages of these depths, in sum."""
        pages = end - first
        return self._costs.page_s * (pages + pages * (first + end - 1) / 2 / self._costs.double_pages)

    def _learn_parents(self, ids: list[int]) -> None:
        above: int | None = None
        for depth, number in enumerate(ids):
            self._parents.setdefault(number, (above, depth))
            above = number
