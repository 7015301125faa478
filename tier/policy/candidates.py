"""Candidates of which a few are looked at, at random, and the worst of those leave. Pure.

Random draws need no order kept, so a touch costs nothing and an eviction the same at any number of candidates. Redis
evicts keys so; with 8 of 384 drawn the loss against a full order is a few thousandths of the hits.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.tier.policy.base import Candidates, Row, Victim

Rows = npt.NDArray[np.int64]

FEW = 16  # at most one in so many candidates leaves at once
LANES = 4096  # candidates looked at in one go, over several draws
ABSENT = -1


class Scores(Protocol):
    """What knows the runs."""

    def worth(self, rows: npt.NDArray[np.int64], now: float, load_s: float) -> npt.NDArray[np.float64]: ...

    def run_pages(self, row: Row) -> int: ...

    def tail_pages(self, row: Row) -> int: ...

    def is_dead(self, row: Row) -> bool: ...


class Sampled(Candidates):
    """A set that can be drawn from: its members densely in an array, and each member's place."""

    def __init__(self, scores: Scores, rng: np.random.Generator, draw: int, per_draw: int) -> None:
        if not 0 < per_draw <= draw:
            raise ValueError(f"per_draw must be from 1 to draw = {draw}, got {per_draw}")
        self._scores, self._rng = scores, rng
        self._draw, self._per_draw = draw, per_draw
        self._size = 0
        # Arrays, for numpy is slower at one item. Longer members are a new array: views of the old may be in use.
        self._members = array("q", [ABSENT]) * 256
        self._place = array("q", [ABSENT]) * 256  # by row
        self._dead: dict[
            Row, None
        ] = {}  # members nothing will use again, as far as is known; the latest last

    def __len__(self) -> int:
        return self._size

    def __contains__(self, row: Row) -> bool:
        return row < len(self._place) and self._place[row] >= 0

    def add(self, row: Row) -> None:
        assert row not in self
        if row >= len(self._place):
            self._place += array("q", [ABSENT]) * max(row + 1 - len(self._place), len(self._place))
        if self._size == len(self._members):
            self._members = self._members * 2
        self._members[self._size] = row
        self._place[row] = self._size
        self._size += 1
        if self._scores.is_dead(row):
            self._dead[row] = None

    def discard(self, row: Row) -> None:
        place = self._place[row] if row < len(self._place) else ABSENT
        if place >= 0:
            self._size -= 1
            last = self._members[self._size]
            self._members[place] = last
            self._place[last] = place
            self._place[row] = ABSENT
            self._dead.pop(row, None)

    def members(self) -> Rows:
        """All rows, in no order; good until the set changes."""
        return np.frombuffer(self._members, np.int64, self._size)

    def check(self) -> None:
        assert all(row in self for row in self._dead)
        members = self.members().tolist()
        assert [self._place[row] for row in members] == list(range(self._size))

    def died(self, rows: Iterable[Row]) -> None:
        """Nothing will use these runs again: those of them that are in leave first."""
        for row in rows:
            if row in self:
                self._dead.pop(row, None)
                self._dead[row] = None

    def victims(self, pages: int, now: float) -> list[Victim]:
        if found := self._dead_ones(pages):
            return found
        if self._size <= self._draw:
            return self._worst_of_all(pages, now) if self._size else []
        return self._drawn(pages, now)

    def _dead_ones(self, pages: int) -> list[Victim]:
        while self._dead:
            row = next(reversed(self._dead))
            if self._scores.is_dead(row):
                return [Victim(row, min(pages, self._scores.run_pages(row)))]
            del self._dead[row]
        return []

    def _worst_of_all(self, pages: int, now: float) -> list[Victim]:
        """The last pages of the worst run, and of others of the worst sixteenth as far as they are needed."""
        members = self.members()
        worth, few = self._scores.worth(members, now, self.load_s), max(1, self._size // FEW)
        worst = worth.argpartition(few - 1)[:few]
        found: list[Victim] = []
        for row in members.take(worst.take(worth.take(worst).argsort(kind="stable"))).tolist():
            found.append(Victim(row, min(pages, self._scores.tail_pages(row))))
            pages -= found[-1].pages
            if pages == 0:
                break
        return found

    def _drawn(self, pages: int, now: float) -> list[Victim]:
        """As many draws at once as it takes, up to a bound; a run that several end on loses a page to each."""
        each = min(self._per_draw, pages)
        most = max(1, min(LANES // self._draw, self._size // (FEW * each)))
        draws = min(-(-pages // each), most)
        members = self.members().take(self._rng.integers(0, self._size, draws * self._draw))
        worth = self._scores.worth(members, now, self.load_s).reshape(draws, self._draw)
        lowest = worth.argpartition(each - 1, axis=1)[:, :each]
        lowest += np.arange(0, len(members), self._draw)[:, None]
        return self._one_page_each(members.take(lowest.ravel()[:pages]).tolist())

    def _one_page_each(self, rows: list[Row]) -> list[Victim]:
        if len(set(rows)) == len(rows):
            return [Victim(row, 1) for row in rows]
        times = Counter(rows).items()
        return [Victim(row, n if n == 1 else min(n, self._scores.run_pages(row))) for row, n in times]
