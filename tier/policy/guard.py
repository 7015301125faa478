"""RVI, and LRU for as long as that saves more: judged on a sample of the requests in two ghost caches. Pure.

A policy that learns can be wrong: at first, and where the past says nothing about what comes. Both policies run on the
same sample of whole sessions, in caches as much smaller as the sample is, so their hits can be compared at any time.
A hit counts by what RVI is asked to save: plainly at an exponent of 0, by its recompute time at 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from kvtier.tier.policy.base import Candidates, Costs, Lru, PolicySettings, Row, Use, Victim
from kvtier.tier.policy.candidates import Sampled
from kvtier.tier.policy.ghost_cache import GhostCache
from kvtier.tier.policy.lru_order import Oldest
from kvtier.tier.policy.rvi.policy import Rvi

GHOST_PAGES = 2048  # of each ghost cache, about: a smaller one says little
MOST_SAMPLED = 1 << 16  # one request of so many, at least
WINDOW = 64  # sampled requests between two looks
KEEP = 0.8  # of what was seen before, at each look
MARGIN = 0.01  # of what is asked for that LRU must be ahead, or
SHARE = 0.05  # of what the better one hits, if that is less; RVI must be ahead twice as far to come back
SHARED_BY = 8  # different pages seen after one: it begins many sessions
STEM = 128  # pages at a chain's head that may be shared so
STEM_PAGES = 1 << 16
GHOSTS = 8.0  # evicted pages that the ghost caches remember, in capacities


class Guarded(Rvi):
    """Rvi that leaves the choice to LRU where that saves more. `fallbacks` counts the times it began to."""

    def __init__(self, settings: PolicySettings, capacity_pages: int) -> None:
        super().__init__(settings)
        self.by_lru = False
        self._orders: list[GuardedSet] = []
        self._one_in = 1
        while capacity_pages > 1.5 * GHOST_PAGES * self._one_in and self._one_in < MOST_SAMPLED:
            self._one_in *= 2
        pages = max(1, capacity_pages // self._one_in)
        follower = Rvi(replace(settings, ghosts=GHOSTS), self.hazard)
        self._ghosts = (GhostCache(Lru(), pages), GhostCache(follower, pages))
        self._names = PageNames(self._ghosts)
        self._stems = Stems()
        self._hits = np.zeros(2)  # of both, in weight, and
        self._asked = 0.0  # what was asked for, both faded
        self._sampled = 0
        self._was_ahead = False  # at the last look, the one that doesn't choose: one look alone may be chance

    @property
    def state(self) -> str:
        return f"{self.name}, lru for now" if self.by_lru else self.name

    def candidates(self) -> Candidates:
        one = GuardedSet(self, self._rng, self._draw, self._per_draw)
        self._sets.append(one)
        self._orders.append(one)
        return one

    def observe(self, pages: Sequence[Hashable], use: Use, now: float) -> None:
        if (
            not pages
            or self._one_in > 1
            and _number(self._stems.of(pages)) * 0x9E3779B1 % (1 << 32) % self._one_in
        ):
            return
        names = self._names.of(pages)
        self._ghosts[1].policy.costs = self.costs
        self._hits += [self._weight(ghost.request(names, use, now)) for ghost in self._ghosts]
        self._asked += self._weight(len(pages))
        self._sampled += 1
        if self._sampled % WINDOW == 0:
            self._look()

    def _weight(self, pages: int) -> float:
        return head_weight(pages, self._exponent, self.costs)

    def _look(self) -> None:
        lru, rvi = self._hits / self._asked
        margin = min(MARGIN, SHARE * max(lru, rvi))
        ahead = rvi - lru > 2 * margin if self.by_lru else lru - rvi > margin
        switches = ahead and self._was_ahead
        self._was_ahead = ahead and not switches
        if switches:
            self.by_lru = not self.by_lru
            self.fallbacks += self.by_lru
            for one in self._orders:
                one.oldest.clear()
        self._hits *= KEEP
        self._asked *= KEEP

    def value(self, row: Row, now: float, load_s: float = 0.0) -> float:
        """By what chooses now, so that it agrees with the order in which runs leave."""
        return self.age_key(row)[0] if self.by_lru else super().value(row, now, load_s)

    def describe(self, row: Row, now: float) -> str:
        if not self.by_lru:
            return super().describe(row, now)
        if self.is_dead(row):
            return "lru for rvi, score = its session is closed"
        return f"lru for rvi, score = idle {now - self._last_use.item(row):.1f} s"


class GuardedSet(Sampled):
    """Candidates of a `Guarded`."""

    def __init__(self, guarded: Guarded, rng: np.random.Generator, draw: int, per_draw: int) -> None:
        super().__init__(guarded, rng, draw, per_draw)
        self._guarded = guarded
        self.oldest = Oldest(guarded, self)

    def add(self, row: Row) -> None:
        super().add(row)
        if self._guarded.by_lru:  # it is cleared before it is used
            self.oldest.added(row)

    def victims(self, pages: int, now: float) -> list[Victim]:
        return self.oldest.victims(pages) if self._guarded.by_lru else super().victims(pages, now)


def head_weight(pages: int, exponent: float, costs: Costs) -> float:
    """What hitting the first so many pages of a chain saves: the sum of their recompute times to the `exponent`.

    In those of a page at depth 0, so that one measured again changes nothing. The sum is taken by the midpoint rule,
    which is exact at exponents of 0 and 1 and less than a hundredth off in between.
    """
    if not exponent or not costs.page_s:
        return float(pages)
    power, double = exponent + 1.0, costs.double_pages
    first, last = 1.0 - 0.5 / double, 1.0 + (pages - 0.5) / double
    weight: float = (last**power - first**power) * double / power
    return weight


class Stems:
    """Where the chains of different sessions part: behind the last page that many different ones have come after.

    Remembers the pages that the last requests had at their heads: between one and two generations of `pages`.
    """

    def __init__(self, pages: int = STEM_PAGES) -> None:
        self._most = pages
        self._after: dict[Hashable, list[Hashable]] = {}  # at most SHARED_BY each
        self._before: dict[Hashable, list[Hashable]] = {}  # the generation before

    def of(self, pages: Sequence[Hashable]) -> Hashable:
        """The first page that isn't shared by many sessions, as far as is known."""
        parting, known = -1, self._after
        for at, page in enumerate(pages[: min(len(pages) - 1, STEM)]):
            after = known.get(page)
            if after is None:
                after = self._recall(page)
                known = self._after
            if len(after) == SHARED_BY:
                parting = at
            elif pages[at + 1] not in after:
                after.append(pages[at + 1])
        return pages[parting + 1]

    def _recall(self, page: Hashable) -> list[Hashable]:
        if len(self._after) >= self._most:
            self._before, self._after = self._after, {}
        after = self._after[page] = self._before.pop(page, [])
        return after


class PageNames:
    """Small numbers for pages, taken back from those that no ghost cache knows any more.

    A page goes by the number of the one before it too: of a stream some in the middle are missing, and a ghost cache
    wants each page to follow the same one always. What follows a page is forgotten before it.
    """

    def __init__(self, caches: Sequence[GhostCache]) -> None:
        self._caches = caches
        self._names: dict[tuple[int, Hashable], int] = {}  # by the number before and the page
        self._free: list[int] = []
        self._most = 1024

    def of(self, pages: Sequence[Hashable]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Each page's number: int64 [n]."""
        if len(self._names) > self._most:
            self._sweep()
        known, free = self._names, self._free
        names: list[int] = []
        before = -1
        for page in pages:
            key = before, page
            name = known.get(key)
            if name is None:
                name = known[key] = free.pop() if free else len(known)
            names.append(name)
            before = name
        return np.array(names, np.int64)

    def _sweep(self) -> None:
        names = np.fromiter(self._names.values(), np.int64, len(self._names))
        known = np.logical_or.reduce([cache.known(names) for cache in self._caches])
        kept = {
            page: name for (page, name), keep in zip(self._names.items(), known.tolist(), strict=True) if keep
        }
        self._free += names[~known].tolist()
        self._names = kept
        self._most = 2 * len(kept) + 1024


def _number(page: Hashable) -> int:
    """Of a page; the same in every process, which the hash of bytes isn't."""
    return int.from_bytes(page[:7], "little") if isinstance(page, bytes) else hash(page)
