"""Which pages leave a tier first: what every policy is asked, what it is told, and LRU. Pure.

A *run* is a stretch of consecutive pages of one chain that were always used together, so one history is kept of it.
The owner of the pages (the prefix index of an L1, the tables of a node, a ghost cache) keeps the chains, and names each
run to the policy by a *row*. The policy knows nothing of chains: its owner puts those runs whose last page may leave
into a set of candidates, and takes them out while something holds them or a page hangs on them.

One policy ranks all that one owner has, in however many tiers and sizes: `value` is comparable among its rows.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NamedTuple

Row = int


class Kind(IntEnum):
    """Why the last answer ended that used a page: what comes next differs much between them."""

    UNKNOWN = 0
    TOOL = 1  # the model called a tool: its result comes soon
    TURN = 2  # the model had finished: a person answers, or doesn't
    OTHER = 3


@dataclass(frozen=True, slots=True)
class Use:
    """What a request leaves behind when it lets its pages go.

    `session` names a conversation (0: not told); `closed` says that it is over, `open` that it will go on.
    """

    pages: int  # of its chain
    new_pages: int  # of them that weren't cached when it came
    output_tokens: int = 0
    kind: Kind = Kind.UNKNOWN
    turn: int = 0  # of its session, from 1; 0: not told
    session: int = 0
    closed: bool = False
    open: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """What recomputing a page costs: `page_s` seconds at depth 0 (0: not measured), twice that at `double_pages`.

    Linear layers cost the same at every position, attention in proportion to it.
    """

    page_s: float = 0.0
    double_pages: float = 2048.0

    def recompute_s(self, depth: float) -> float:
        """Seconds of prefill that the page at this depth takes."""
        return self.page_s * (1.0 + depth / self.double_pages)


@dataclass(frozen=True, slots=True)
class ScoreWeights:
    """Of the three-term score; each term is from 0 to 1, and what scores lowest leaves first."""

    recency: float = 0.5
    memory: float = 0.2
    remaining: float = 0.3


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How a tier chooses what leaves."""

    name: str = "rvi"  # rvi, score, lru, or one that another package registers
    exponent: float = 0.25  # of rvi: 0 saves the most pages, 1 the most prefill compute
    guard: bool = True  # of rvi: go by lru while that saves more
    draw: int = 384  # of rvi: candidates looked at at once
    per_draw: int = 8  # of them that leave
    ghosts: float = 16.0  # of rvi: evicted pages remembered, in capacities
    weights: ScoreWeights = ScoreWeights()
    seed: int = 0


class Victim(NamedTuple):
    """So many pages at the end of a run are to leave."""

    row: Row
    pages: int


class Candidates(ABC):
    """Runs of one tier whose last page may leave. `load_s` is what reading a page back from there costs."""

    load_s: float = 0.0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, row: Row) -> bool: ...

    @abstractmethod
    def add(self, row: Row) -> None:
        """Put a run in; it must not be in yet."""

    @abstractmethod
    def discard(self, row: Row) -> None:
        """Take a run out; no matter if it isn't in."""

    @abstractmethod
    def victims(self, pages: int, now: float) -> list[Victim]:
        """What leaves first: at least one page and at most `pages` in all, each row once; [] when nothing is in.

        Changes nothing: the owner evicts what it can of them, says `cut`, takes out what it can't, and asks again.
        """

    @abstractmethod
    def check(self) -> None:
        """What is remembered of members, and of those that were, is bounded by the members; AssertionError where not."""


class Policy(ABC):
    """All that is known of one owner's pages, and which of them leave first. One owner calls it, from one thread.

    `now` is in seconds of one clock and never goes back. A row that is `add`ed is in no set of candidates.
    """

    name: ClassVar[str]
    ghosts: float = (
        0.0  # evicted runs that its owner should go on naming, in capacities; 0: forget them at once
    )

    def __init__(self) -> None:
        self.costs = Costs()
        self.fallbacks = 0  # times that a guard has left the choice to another policy

    @property
    def state(self) -> str:
        """What chooses now, for `kvtier stats`."""
        return self.name

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows that have not ended."""

    # rows

    @abstractmethod
    def add(self, pages: int, depth: int, nbytes: int, created: int, now: float) -> Row:
        """A run of pages never seen, `nbytes` each, the first at `depth`; its request brought `created` new pages."""

    @abstractmethod
    def split(self, row: Row, keep: int) -> Row:
        """Cut a run after `keep` pages: `row` is the upper part from now on, the result the lower one, in no set."""

    @abstractmethod
    def alike(self, upper: Row, lower: Row) -> bool:
        """Whether two runs, one behind the other, have the same history from now on and may be joined."""

    @abstractmethod
    def join(self, upper: Row, lower: Row) -> None:
        """`lower` takes over the pages of `upper`, whose row ends."""

    @abstractmethod
    def grow(self, row: Row, pages: int) -> None:
        """So many pages come to the run's end."""

    @abstractmethod
    def cut(self, row: Row, pages: int) -> None:
        """So many pages at the run's end are gone, not all of it."""

    @abstractmethod
    def shift(self, upper: Row, lower: Row, pages: int) -> None:
        """The last pages of `upper`, not all of it, become the first ones of `lower`, split off it before."""

    @abstractmethod
    def forget(self, row: Row) -> None:
        """The row ends. It must be in no set of candidates."""

    # what happens

    def reuse(self, rows: Sequence[Row], now: float) -> None:  # noqa: B027
        """A request begins to use these runs, of resident or evicted pages; told late, `now` lies back."""

    @abstractmethod
    def release(self, rows: Sequence[Row], behind: Sequence[int], use: Use, now: float) -> None:
        """A request that used these runs, head first, lets them go; `behind` each lie so many pages of its chain."""

    def observe(self, pages: Sequence[Hashable], use: Use, now: float) -> None:  # noqa: B027
        """A request's whole chain, head first, at its end: what a guard goes by."""

    # what leaves

    @abstractmethod
    def candidates(self) -> Candidates:
        """A new set."""

    @abstractmethod
    def value(self, row: Row, now: float, load_s: float = 0.0) -> float:
        """What keeping the run's last page is worth, per byte; what is worth least leaves first."""

    @abstractmethod
    def is_dead(self, row: Row) -> bool:
        """Whether only a closed session has used the run: nothing will use it again."""

    @abstractmethod
    def describe(self, row: Row, now: float) -> str:
        """The policy and the score of a run's last page, for `explain`: "lru, score = idle 1.2 s"."""


SHARED = -1  # session of a run that several have used, or one that isn't known
SLACK = 64  # stale entries of a heap that are not worth its rebuilding
GONE = float("-inf")  # last use of what nothing will use again


@dataclass(slots=True)
class _Run:
    pages: int
    depth: int
    last_use: float
    session: int = 0


class Lru(Policy):
    """Least recently used first, of one chain the tail first; a closed session's own pages before all others."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._runs: dict[Row, _Run] = {}
        self._sets: list[_Oldest] = []
        self._next = 0

    @property
    def num_rows(self) -> int:
        return len(self._runs)

    def add(self, pages: int, depth: int, nbytes: int, created: int, now: float) -> Row:
        return self._put(_Run(pages, depth, now))

    def split(self, row: Row, keep: int) -> Row:
        run = self._runs[row]
        lower = _Run(run.pages - keep, run.depth + keep, run.last_use, run.session)
        run.pages = keep
        return self._put(lower)

    def alike(self, upper: Row, lower: Row) -> bool:
        a, b = self._runs[upper], self._runs[lower]
        return a.last_use == b.last_use and a.session == b.session

    def join(self, upper: Row, lower: Row) -> None:
        above, run = self._runs.pop(upper), self._runs[lower]
        run.pages += above.pages
        run.depth = above.depth

    def grow(self, row: Row, pages: int) -> None:
        self._runs[row].pages += pages

    def cut(self, row: Row, pages: int) -> None:
        self._runs[row].pages -= pages

    def shift(self, upper: Row, lower: Row, pages: int) -> None:
        self._runs[upper].pages -= pages
        run = self._runs[lower]
        run.pages += pages
        run.depth -= pages

    def forget(self, row: Row) -> None:
        del self._runs[row]

    def release(self, rows: Sequence[Row], behind: Sequence[int], use: Use, now: float) -> None:
        for row in rows:
            run = self._runs[row]
            run.session = joint_session(run.session, use.session)
            run.last_use = now
            if use.closed and run.session == use.session != 0:
                run.last_use = GONE
                for one in self._sets:
                    one.hasten(row)

    def candidates(self) -> Candidates:
        self._sets.append(_Oldest(self._runs))
        return self._sets[-1]

    def value(self, row: Row, now: float, load_s: float = 0.0) -> float:
        return self._runs[row].last_use

    def is_dead(self, row: Row) -> bool:
        return self._runs[row].last_use == GONE

    def describe(self, row: Row, now: float) -> str:
        last_use = self._runs[row].last_use
        return (
            "lru, score = its session is closed"
            if last_use == GONE
            else f"lru, score = idle {now - last_use:.1f} s"
        )

    def _put(self, run: _Run) -> Row:
        self._next += 1
        self._runs[self._next] = run
        return self._next


def joint_session(before: int, session: int) -> int:
    """Whose a run is that was used by `before`'s session (0: by none) and is now by `session` (0: not told)."""
    return session if session and before in (0, session) else SHARED


@dataclass(slots=True)
class _Oldest(Candidates):
    """By (last use, deeper first). A heap whose entries may be too early: each is put right when it comes to the top."""

    runs: dict[Row, _Run]
    load_s: float = 0.0
    rows: set[Row] = field(default_factory=set)
    heap: list[tuple[float, int, Row]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, row: Row) -> bool:
        return row in self.rows

    def add(self, row: Row) -> None:
        assert row not in self.rows
        self.rows.add(row)
        heapq.heappush(self.heap, self._entry(row))
        self._bound()

    def discard(self, row: Row) -> None:
        self.rows.discard(row)
        self._bound()

    def victims(self, pages: int, now: float) -> list[Victim]:
        while self.heap:
            entry = self.heap[0]
            row = entry[2]
            if row not in self.rows:
                heapq.heappop(self.heap)
            elif (right := self._entry(row)) > entry:
                heapq.heapreplace(self.heap, right)
            else:
                return [Victim(row, min(pages, self.runs[row].pages))]
        return []

    def check(self) -> None:
        assert {row for _, _, row in self.heap} >= self.rows <= self.runs.keys()
        assert len(self.heap) <= 2 * len(self.rows) + SLACK

    def hasten(self, row: Row) -> None:
        """A run's turn may come earlier than before."""
        if row in self.rows:
            heapq.heappush(self.heap, self._entry(row))
            self._bound()

    def _entry(self, row: Row) -> tuple[float, int, Row]:
        run = self.runs[row]
        return run.last_use, -run.depth, row

    def _bound(self) -> None:
        """Rebuild the heap once stale entries outnumber the members: no more work than what made them stale."""
        if len(self.heap) > 2 * len(self.rows) + SLACK:
            self.heap = [self._entry(row) for row in self.rows]
            heapq.heapify(self.heap)
