"""A tier of page ids without bytes: what a policy keeps and what it hits, for replays and for the guard. Pure.

Chains are kept as runs of pages that were always used together, so a request costs what its runs cost, not its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.tier.policy.base import Policy, Row, Use

Pages = npt.NDArray[np.int64]

UNKNOWN = -1  # row of a page id that no run holds; page above a chain's first one


class CacheModel(Protocol):
    """One tier that answers requests in the order of their times."""

    name: str
    capacity: int
    evicted_pages: int

    def request(self, pages: Pages, use: Use, now: float) -> int:
        """A request for a whole chain, head first: how many leading pages were resident. Then all of it is, room allowing.

        `pages` int64 [n], ids dense from 0 on; an id follows the same id in every chain. The model itself fills in
        `use.pages` and `use.new_pages`.
        """


@dataclass(slots=True, eq=False)
class _Run:
    """Pages ids[low:high]. `evicted` is the run that its own last pages went to, as long as both have one history."""

    row: Row
    ids: Pages
    low: int
    high: int
    above: int  # id of the page that its first one follows
    resident: bool = True
    children: int = 0  # resident runs that follow its last page
    evicted: _Run | None = None

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def pages(self) -> Pages:
        return self.ids[self.low : self.high]


class GhostCache:
    """Up to `capacity_pages` of pages under one policy, and the policy's memory of evicted ones. Owns both.

    Resident pages are closed towards the head: only leaves leave. Evicted pages stay known, as ghosts, up to
    `policy.ghosts` capacities; the runs evicted longest ago are forgotten first, which are leaves too.
    """

    def __init__(self, policy: Policy, capacity_pages: int, page_bytes: int = 1) -> None:
        if capacity_pages < 1:
            raise ValueError(f"a cache holds at least one page, got a capacity of {capacity_pages}")
        self.name = policy.name
        self.policy = policy
        self.capacity = capacity_pages
        self.resident_pages = 0
        self.ghost_pages = 0
        self.evicted_pages = 0
        self._page_bytes = page_bytes
        self._max_ghosts = int(policy.ghosts * capacity_pages)
        self._leaves = policy.candidates()
        self._runs: dict[Row, _Run] = {}
        self._ghosts: OrderedDict[Row, _Run] = OrderedDict()  # evicted longest ago first
        self._row_of = np.full(1024, UNKNOWN, np.int64)  # by page id

    def request(self, pages: Pages, use: Use, now: float) -> int:
        if len(pages) == 0:
            return 0
        self._reserve(int(np.maximum.reduce(pages)))
        path, known = self._path(pages)
        hits = self._hits(path)
        if path:
            self.policy.reuse([run.row for run in path], now)
            self._revive(path)
        if known < len(pages):
            self._insert(path, pages[known:], known, now)
        use = _of_chain(use, len(pages), len(pages) - hits)
        self._release(path, use, now)
        self.policy.observe(pages.tolist(), use, now)
        self._join(path, pages)
        self._offer(path[-1])
        self._trim(now)
        return hits

    def is_resident(self, page: int) -> bool:
        """Whether a page is held, not only remembered."""
        return page < len(self._row_of) and self._row_of.item(page) >= 0 and self._run_of(page).resident

    def known(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Which pages are held or remembered: bool [n]."""
        inside = pages < len(self._row_of)
        return inside & (self._row_of[np.where(inside, pages, 0)] >= 0)

    def check(self) -> None:
        """Derive every counter and link again from the runs; raises AssertionError where one is wrong."""
        runs = list(self._runs.values())
        resident = [run for run in runs if run.resident]
        assert self.resident_pages == sum(map(len, resident)) <= self.capacity
        assert self.ghost_pages == sum(map(len, runs)) - self.resident_pages <= self._max_ghosts
        assert set(self._ghosts) == {run.row for run in runs if not run.resident}
        assert np.count_nonzero(self._row_of >= 0) == sum(map(len, runs))
        parents = [self._run_of(run.above) for run in resident if run.above >= 0]
        for run in runs:
            assert len(run) > 0 and (self._row_of[run.pages] == run.row).all()
            assert run.above < 0 or self._row_of[run.above] >= 0, "forgotten before what follows it"
            assert run.children == sum(parent is run for parent in parents)
            assert (run.row in self._leaves) == (run.resident and run.children == 0)
        for run in resident:
            assert run.above < 0 or (
                self._run_of(run.above).resident and self._run_of(run.above).pages[-1] == run.above
            )
        assert len(self._leaves) == sum(run.children == 0 for run in resident)

    # a request's way down

    def _reserve(self, page: int) -> None:
        if page >= len(self._row_of):
            more = np.full(max(page + 1, 2 * len(self._row_of)) - len(self._row_of), UNKNOWN, np.int64)
            self._row_of = np.concatenate([self._row_of, more])

    def _run_of(self, page: int) -> _Run:
        return self._runs[int(self._row_of[page])]

    def _path(self, pages: Pages) -> tuple[list[_Run], int]:
        """The known runs that a chain goes through, the last one cut where the chain leaves it, and their pages."""
        row_of, runs = self._row_of, self._runs
        path: list[_Run] = []
        at, count = 0, len(pages)
        while at < count and (row := row_of.item(pages.item(at))) >= 0:
            run = runs[row]
            end = at + run.high - run.low
            if end > count or run.ids.item(run.high - 1) != pages.item(end - 1):
                end = at + self._common(run, pages[at:])
                self._split(run, end - at)
            path.append(run)
            at = end
        return path, at

    @staticmethod
    def _common(run: _Run, pages: Pages) -> int:
        size = min(len(run), len(pages))
        same = run.ids[run.low : run.low + size] == pages[:size]
        return size if same.all() else int(same.argmin())

    @staticmethod
    def _hits(path: list[_Run]) -> int:
        hits = 0
        for run in path:
            if not run.resident:
                break
            hits += run.high - run.low
        return hits

    def _split(self, run: _Run, keep: int) -> None:
        """Cut a run in two; the lower part keeps what hung on it."""
        self._leaves.discard(run.row)
        cut = run.low + keep
        lower = _Run(
            self.policy.split(run.row, keep), run.ids, cut, run.high, run.ids.item(cut - 1), run.resident
        )
        lower.children, lower.evicted = run.children, run.evicted
        run.high, run.children, run.evicted = cut, int(run.resident), None
        self._runs[lower.row] = lower
        self._row_of[lower.pages] = lower.row
        if lower.resident:
            self._offer(lower)
        else:
            self._ghosts[lower.row] = lower

    def _revive(self, path: list[_Run]) -> None:
        """A request brings what it used of the ghosts back."""
        above: _Run | None = None
        for run in path:
            run.evicted = None
            if not run.resident:
                run.resident = True
                del self._ghosts[run.row]
                self.ghost_pages -= len(run)
                self.resident_pages += len(run)
                self._follow(above)
            above = run

    def _insert(self, path: list[_Run], pages: Pages, depth: int, now: float) -> None:
        count = len(pages)
        row = self.policy.add(count, depth, self._page_bytes, count, now)
        above = path[-1].ids.item(path[-1].high - 1) if path else UNKNOWN
        run = _Run(row, pages.copy(), 0, count, above)
        self._runs[row] = run
        self._row_of[pages] = row
        self.resident_pages += count
        self._follow(path[-1] if path else None)
        path.append(run)

    def _follow(self, above: _Run | None) -> None:
        """One more resident run follows this one."""
        if above is not None:
            above.children += 1
            self._leaves.discard(above.row)

    def _release(self, path: list[_Run], use: Use, now: float) -> None:
        behind, left = [], use.pages
        for run in path:
            left -= run.high - run.low
            behind.append(left)
        self.policy.release([run.row for run in path], behind, use, now)

    def _join(self, path: list[_Run], pages: Pages) -> None:
        """Make one run of neighbours that have one history from now on: paths stay short."""
        group = path[:1]
        start = end = 0
        for run in path[1:]:
            end += len(group[-1])
            if group[-1].children == 1 and self.policy.alike(group[-1].row, run.row):
                self.policy.join(group[-1].row, run.row)
                group.append(run)
            else:
                self._merge(group, pages[start:end])
                group, start = [run], end
        self._merge(group, pages[start:])

    def _merge(self, group: list[_Run], pages: Pages) -> None:
        """The last of these runs holds the pages of all."""
        if len(group) == 1:
            return
        last = group[-1]
        for run in group[:-1]:
            del self._runs[run.row]
        last.ids, last.low, last.high, last.above = pages.copy(), 0, len(pages), group[0].above
        self._row_of[pages] = last.row

    def _offer(self, run: _Run) -> None:
        if run.children == 0 and run.row not in self._leaves:
            self._leaves.add(run.row)

    # what leaves

    def _trim(self, now: float) -> None:
        while (excess := self.resident_pages - self.capacity) > 0:
            for row, pages in self._leaves.victims(excess, now):
                self._evict(self._runs[row], pages)
        while self.ghost_pages > self._max_ghosts:
            self._forget(next(iter(self._ghosts.values())))

    def _evict(self, run: _Run, pages: int) -> None:
        self.resident_pages -= pages
        self.evicted_pages += pages
        if pages == len(run):
            self._leave(run)
        if self._max_ghosts:
            self.ghost_pages += pages
            self._remember(run, pages)
        else:
            self._drop(run, pages)

    def _leave(self, run: _Run) -> None:
        """The last of a run's pages goes: what it hung on may be a leaf now."""
        run.resident = False
        self._leaves.discard(run.row)
        if run.above >= 0:
            parent = self._run_of(run.above)
            parent.children -= 1
            self._offer(parent)

    def _remember(self, run: _Run, pages: int) -> None:
        """A run's last pages become ghosts, in one run with those that went before them."""
        whole, ghost = pages == len(run), run.evicted
        if ghost is not None and self._ghosts.get(ghost.row) is ghost:
            gone = run.ids[run.high - pages : run.high]
            if whole:
                self.policy.join(run.row, ghost.row)
                del self._runs[run.row]
                ghost.above = run.above
            else:
                self.policy.shift(run.row, ghost.row, pages)
                ghost.above = run.ids.item(run.high - pages - 1)
            run.high -= pages
            ghost.low -= pages
            self._row_of[gone] = ghost.row
        elif whole:
            self._ghosts[run.row] = run
        else:
            self._cut_off(run, pages)

    def _cut_off(self, run: _Run, pages: int) -> None:
        cut = run.high - pages
        row = self.policy.split(run.row, cut - run.low)
        ghost = _Run(row, run.ids, cut, run.high, run.ids.item(cut - 1), resident=False)
        run.high, run.evicted = cut, ghost
        self._runs[row] = self._ghosts[row] = ghost
        self._row_of[ghost.pages] = row

    def _drop(self, run: _Run, pages: int) -> None:
        self._row_of[run.ids[run.high - pages : run.high]] = UNKNOWN
        if pages == len(run):
            del self._runs[run.row]
            self.policy.forget(run.row)
        else:
            self.policy.cut(run.row, pages)
            run.high -= pages

    def _forget(self, run: _Run) -> None:
        del self._runs[run.row], self._ghosts[run.row]
        self.ghost_pages -= len(run)
        self._row_of[run.pages] = UNKNOWN
        self.policy.forget(run.row)


def _of_chain(use: Use, pages: int, new_pages: int) -> Use:
    """The use with both counts: every request comes here, and `dataclasses.replace` is slow."""
    told = use.output_tokens, use.kind, use.turn, use.session, use.closed, use.open
    return Use(pages, new_pages, *told)
