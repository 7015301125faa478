"""Where each page of a chain comes from soonest: from L4, from another node, or by computing it. Pure: prices in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

L4 = 0  # the number of L4 among the ways


@dataclass(frozen=True, slots=True)
class Compute:
    """What computing pages takes: `page_s` seconds for one at depth 0 (0: never worth it), twice that at `double_pages`."""

    page_s: float
    double_pages: float = inf

    @classmethod
    def at(cls, page_s: float, depth: float, double_pages: float) -> Compute:
        """As `page_s` is that of a page at `depth`; where `double_pages` isn't known (0), of all."""
        double_pages = double_pages or inf
        return cls(page_s / (1.0 + depth / double_pages), double_pages)

    def between(self, first: int, end: int) -> float:
        """Seconds for the pages [first, end)."""
        if end <= first:
            return 0.0
        if self.page_s <= 0.0:
            return inf
        return self.page_s * (end - first) * (1.0 + 0.5 * (first + end) / self.double_pages)


@dataclass(frozen=True, slots=True)
class Way:
    """One source: `start_s` until the first page that is asked for now begins to come, then `page_s` for each."""

    start_s: float
    page_s: float
    is_doubtful: bool = False  # it failed lately: taken where nothing else has a page


@dataclass(frozen=True, slots=True)
class Run:
    """Pages up to `end` that can be had by the same ways: none of them where L1 or L3 has these pages.

    `is_coming`: they are on their way already, by the only one of `ways`.
    """

    end: int
    ways: tuple[int, ...] = ()
    is_coming: bool = False


@dataclass(frozen=True, slots=True)
class Prices:
    """What a plan goes by. All loads go on at the same time; pages are copied to L1 as they come, the last ones behind it.

    `copy_s` is that of a page, `batch` how many come at once. More than `room` pages can't be asked of other nodes. Loads
    that take longer than `patience_s` are waited for no more. Nothing is computed before `busy_s`.
    """

    ways: Sequence[Way]
    compute: Compute
    copy_s: float = 0.0
    batch: int = 1
    room: int = 2**31
    patience_s: float = inf
    busy_s: float = 0.0

    def total_s(self, load_s: float, end: int, last: int) -> float:
        """When the pages before `last` are there, of which those before `end` are loaded in so long."""
        return max(load_s, self.busy_s) + self.compute.between(end, last)


@dataclass(frozen=True, slots=True)
class Refused:
    """Loading the next pages too, by `way`, was not worth it: `load_s` more for what takes `compute_s`.

    `is_late`: it would take longer than anything waits.
    """

    way: int
    load_s: float
    compute_s: float
    is_late: bool = False


@dataclass(slots=True)
class Plan:
    """The prefix up to page `end`: of each run before it, by which way (None: it is here). The last may be cut."""

    end: int
    choices: list[int | None] = field(default_factory=list)
    load_s: float = 0.0
    refused: Refused | None = None
    is_full: bool = False  # the next pages don't go into the queue


@dataclass(frozen=True, slots=True)
class _Step:
    end: int
    load_s: float
    total_s: float
    way: int | None


def cheapest(first: int, last: int, runs: Sequence[Run], prices: Prices) -> Plan:
    """The prefix behind page `first`, made of `runs`, with which the pages before `last` are there soonest.

    Each run goes by the way that ends soonest with what it carries already; of two, the earlier one.
    """
    steps = [_Step(first, 0.0, prices.total_s(0.0, first, last), None)]
    asked = [0] * len(prices.ways)  # pages
    came_s, copied, room = 0.0, 0, prices.room
    is_full = False
    for run in runs:
        at, way, load_s = steps[-1].end, None, steps[-1].load_s
        end = run.end
        if run.ways:
            pages = 0 if run.is_coming else end - at
            open_ways = [number for number in run.ways if number == L4 or pages <= room]
            if not open_ways:
                is_full = True
                break
            came_s, way = _soonest(prices.ways, open_ways, asked, pages, came_s)
            asked[way] += pages
            room -= 0 if way == L4 else pages
            copied += end - at
            load_s = came_s + min(copied, prices.batch) * prices.copy_s
        if load_s > prices.patience_s and way is not None and not run.is_coming:
            end = at + _in_time(prices, way, asked[way] - (end - at), end - at)
            if end > at:
                late_s = prices.patience_s
                steps.append(_Step(end, late_s, prices.total_s(late_s, end, last), way))
        steps.append(_Step(run.end, load_s, prices.total_s(load_s, run.end, last), way))
        if load_s > prices.patience_s:
            break
    best = min(
        (number for number, step in enumerate(steps) if step.load_s <= prices.patience_s),
        key=lambda number: (steps[number].total_s, -number),
    )
    plan = Plan(steps[best].end, [step.way for step in steps[1 : best + 1]], steps[best].load_s)
    plan.is_full = is_full and best == len(steps) - 1
    if best < len(steps) - 1:
        plan.refused = _refused(steps[best], steps[best + 1 :], prices)
    return plan


def _soonest(
    ways: Sequence[Way], open_ways: Sequence[int], asked: Sequence[int], pages: int, came_s: float
) -> tuple[float, int]:
    """When all that is asked for has come if these pages go by the best way, and which that is."""

    def end_s(number: int) -> float:
        way = ways[number]
        return max(came_s, way.start_s + (asked[number] + pages) * way.page_s)

    way = min(open_ways, key=lambda number: (ways[number].is_doubtful, end_s(number)))
    return end_s(way), way


def _in_time(prices: Prices, number: int, asked: int, pages: int) -> int:
    """How many of so many pages a way brings, behind those asked of it, before nothing waits any more."""
    way = prices.ways[number]
    time_s = prices.patience_s - prices.batch * prices.copy_s - way.start_s
    if asked * way.page_s > time_s:
        return 0
    return min(pages - 1, int(time_s / way.page_s) - asked)


def _refused(best: _Step, others: Sequence[_Step], prices: Prices) -> Refused:
    """Why it isn't longer, by the longer prefix that comes closest."""
    other = min(others, key=lambda step: step.total_s)
    way = next((step.way for step in others if step.way is not None), None)
    assert way is not None, "what is here costs nothing"
    is_late = other.load_s > prices.patience_s
    compute_s = prices.compute.between(best.end, other.end)
    return Refused(way, other.load_s - best.load_s, compute_s, is_late)
