"""The tiers above a node in a replay: an L1 per worker and L2, of pages without bytes, under one policy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tier.node.state.ranking import Histories, Order
from kvtier.tier.policy.base import Costs, Policy, PolicySettings, Row, Use
from kvtier.tier.policy.registry import make_policy

STRETCH = 8
GHOSTS = 16.0  # pages remembered that left, in capacities: also of a policy that needs none of them


@dataclass(slots=True, eq=False)
class UpperPage:
    """A page that is in at least one arena."""

    number: int
    parent: int | None
    row: Row
    used: int = 0  # number of the request that used it last
    arenas: int = 0


class Arena:
    """Up to `capacity` pages, of which only those leave by themselves that no page here comes after."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.capacity = capacity
        self._leaves: Order[UpperPage] = Order(policy.candidates())
        self._pages: dict[int, UpperPage] = {}
        self._children: dict[int, int] = {}  # pages here that come after each page, where there are any

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: UpperPage) -> bool:
        return page.number in self._pages

    def add(self, page: UpperPage) -> None:
        """Put a page in; it must not be in yet."""
        self._pages[page.number] = page
        page.arenas += 1
        if page.number not in self._children:
            self._leaves.add(page)
        if page.parent is not None:
            siblings = self._children.get(page.parent, 0)
            self._children[page.parent] = siblings + 1
            if not siblings and page.parent in self._pages:
                self._leaves.discard(self._pages[page.parent])

    def remove(self, page: UpperPage) -> None:
        """Take a page out."""
        above = self._detach(page)
        if above is not None:
            self._leaves.add(above)

    def _detach(self, page: UpperPage) -> UpperPage | None:
        """Take a page out; the page before it, if that is a leaf now."""
        del self._pages[page.number]
        page.arenas -= 1
        self._leaves.discard(page)
        if page.parent is None:
            return None
        self._children[page.parent] -= 1
        if self._children[page.parent]:
            return None
        del self._children[page.parent]
        return self._pages.get(page.parent)

    def add_chain(self, pages: Sequence[UpperPage]) -> None:
        """Put in those pages of a chain that aren't in yet, the last first: so only that one is ever a leaf."""
        for page in reversed(pages):
            if page.number not in self._pages:
                self.add(page)

    def take_lowest(self, most: int, now: float) -> list[UpperPage]:
        """Take out the leaf that leaves first, and pages before it in its chain that would follow at once.

        Those used by the same request are worth about the same, as far as they stay alone; at most STRETCH of them.
        """
        page = self._leaves.lowest(now)
        taken: list[UpperPage] = []
        while page is not None:
            taken.append(page)
            above = self._detach(page)
            if above is not None and (above.used != page.used or len(taken) == min(most, STRETCH)):
                self._leaves.add(above)
                break
            page = above
        return taken

    def redraw(self) -> None:
        """After pages were used."""
        self._leaves.redraw()

    def check(self) -> None:
        """The leaves are those without children."""
        self._leaves.check()
        assert len(self._leaves) == sum(number not in self._children for number in self._pages)


class Upper:
    """The arenas: one per worker, and L2 behind them. `capacities` in pages."""

    def __init__(self, settings: PolicySettings, workers: Sequence[int], l2: int, costs: Costs) -> None:
        pages = sum(workers) + l2
        self.policy = make_policy(settings, max(1, pages))
        self.policy.costs = costs
        self._histories: Histories[int] = Histories(self.policy, int(GHOSTS * pages))
        self._pages: dict[int, UpperPage] = {}
        self._requests = 0
        self.workers = [Arena(self.policy, capacity) for capacity in workers]
        self.l2 = Arena(self.policy, l2)

    def numbers(self) -> set[int]:
        """The pages that any arena has."""
        return set(self._pages)

    def prefix(self, worker: int, ids: Sequence[int]) -> int:
        """Leading pages that a worker's own L1 has."""
        own = self.workers[worker]
        for n, number in enumerate(ids):
            page = self._pages.get(number)
            if page is None or page not in own:
                return n
        return len(ids)

    def resident(self, ids: Sequence[int]) -> int:
        """Leading pages that any arena has."""
        pages = self._pages
        return next((n for n, number in enumerate(ids) if number not in pages), len(ids))

    def use(self, worker: int, ids: Sequence[int], use: Use, now: float) -> None:
        """A request has used a chain: all of it is in the worker's L1 now, and no longer in L2."""
        self._requests += 1
        chain: list[UpperPage] = []
        for depth, number in enumerate(ids):
            page = self._pages.get(number)
            if page is None:
                # With a row of a page elsewhere it has the history of one whose request brought so many pages.
                self._histories.elsewhere(number, depth, 1, use.new_pages, now)
                row = self._histories.came(number, depth, 1, now)
                page = self._pages[number] = UpperPage(number, ids[depth - 1] if depth else None, row)
            elif page in self.l2:
                self.l2.remove(page)
            page.used = self._requests
            chain.append(page)
        self.workers[worker].add_chain(chain)
        self._histories.end([page.row for page in chain], range(len(ids) - 1, -1, -1), use, now, now)
        self.policy.observe(ids, use, now)
        for arena in (*self.workers, self.l2):
            arena.redraw()

    def lower(self, worker: int, now: float) -> tuple[list[int], int]:
        """Trim the worker's L1 and L2: the pages that leave both, in that order, and how many went from L1 to L2."""
        own, down = self.workers[worker], 0
        while len(own) > own.capacity:
            for page in own.take_lowest(len(own) - own.capacity, now):
                if not page.arenas:
                    down += 1
                    self.l2.add(page)
        gone: list[int] = []
        while len(self.l2) > self.l2.capacity:
            for page in self.l2.take_lowest(len(self.l2) - self.l2.capacity, now):
                del self._pages[page.number]
                self._histories.left(page.number, page.row)
                gone.append(page.number)
        return gone, down

    def check(self) -> None:
        """Every page is in an arena, and no arena is too full."""
        arenas = (*self.workers, self.l2)
        assert sum(map(len, arenas)) == sum(page.arenas for page in self._pages.values())
        for arena in arenas:
            arena.check()
            assert len(arena) <= arena.capacity
        self._histories.check({page.row for page in self._pages.values()})
