"""Runs in columns: what a policy that scores many runs at once keeps of each. Pure.

A row is an index into every column, so a request's runs and a draw of candidates are each one gather.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.tier.policy.base import GONE, SHARED, Candidates, Policy, PolicySettings, Row
from kvtier.tier.policy.candidates import Rows, Sampled

Column = npt.NDArray[Any]

FIRST_ROWS = 256


class RunTable(Policy):
    """The columns that every such policy has; rows of runs that ended are used again, so they stay dense."""

    columns: ClassVar[dict[str, type]] = {
        "pages": np.int32,
        "depth": np.int32,  # of its first page
        "behind": np.int32,  # pages of its last request's chain behind its last page
        "nbytes": np.int64,  # of a page
        "session": np.int64,
        "dead": np.bool_,  # only a closed session has used it
    }
    drawn: ClassVar[tuple[str, ...]] = (
        "last_use",
    )  # float64, side by side: what is looked at of a run that is drawn

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        self._rng = np.random.default_rng(settings.seed)
        self._draw, self._per_draw = settings.draw, settings.per_draw
        self._sets: list[Sampled] = []
        self._free: list[Row] = []
        self._rows = 0  # ever in use
        self._layout = np.dtype(list(self.columns.items()), align=True)
        self._cells = np.zeros((0, self._layout.itemsize), np.uint8)  # the whole table: a row is its bytes
        self.drawn_table = np.zeros((0, len(self.drawn)))
        self._grow_table()

    @property
    def num_rows(self) -> int:
        return self._rows - len(self._free)

    @abstractmethod
    def worth(self, rows: Rows, now: float, load_s: float) -> npt.NDArray[np.float64]:
        """`value` of many runs: float64 [n]."""

    @abstractmethod
    def _tail_moved(self, row: Row, pages: int) -> None:
        """So many pages at the run's end are no longer its own: it ends on one that something followed."""

    def add(self, pages: int, depth: int, nbytes: int, created: int, now: float) -> Row:
        row = self._new_row()
        self._cells[row] = 0
        self.drawn_table[row] = 0.0
        self._pages[row] = pages
        self._depth[row] = depth
        self._nbytes[row] = nbytes
        self._last_use[row] = now
        return row

    def split(self, row: Row, keep: int) -> Row:
        lower = self._new_row()
        self._cells[lower] = self._cells[row]
        self.drawn_table[lower] = self.drawn_table[row]
        gone = self._pages.item(row) - keep
        self._depth[lower] += keep
        self._pages[lower] = gone
        self._take(row, gone)
        return lower

    def join(self, upper: Row, lower: Row) -> None:
        self._pages[lower] += self._pages[upper]
        self._depth[lower] = self._depth[upper]
        self._free.append(upper)

    def grow(self, row: Row, pages: int) -> None:
        self._pages[row] += pages

    def cut(self, row: Row, pages: int) -> None:
        self._take(row, pages)

    def shift(self, upper: Row, lower: Row, pages: int) -> None:
        self._take(upper, pages)
        self._pages[lower] += pages
        self._depth[lower] -= pages

    def forget(self, row: Row) -> None:
        self._free.append(row)

    def candidates(self) -> Candidates:
        self._sets.append(Sampled(self, self._rng, self._draw, self._per_draw))
        return self._sets[-1]

    def value(self, row: Row, now: float, load_s: float = 0.0) -> float:
        return float(self.worth(np.array([row]), now, load_s)[0])

    def run_pages(self, row: Row) -> int:
        """How many pages the run has."""
        return int(self._pages[row])

    def tail_pages(self, row: Row) -> int:
        """How many pages at the run's end are worth about the same."""
        return int(self._pages[row])

    def is_dead(self, row: Row) -> bool:
        """Whether only a closed session has used the run."""
        return bool(self._dead[row])

    def last_uses(self, rows: Rows) -> npt.NDArray[np.float64]:
        """When each run was last used: float64 [n]; GONE when only a closed session did."""
        return np.where(self._dead[rows], GONE, self._last_use[rows])

    def age_key(self, row: Row) -> tuple[float, int, Row]:
        """Orders runs by last use, of those used together the deeper first."""
        last_use = GONE if self._dead.item(row) else self._last_use.item(row)
        return last_use, -self._depth.item(row), row

    def _take(self, row: Row, pages: int) -> None:
        self._pages[row] -= pages
        self._behind[row] += pages
        self._tail_moved(row, pages)

    def _used_by(self, rows: Rows, session: int, closed: bool) -> None:
        """Note whose the runs are; those of a session that is over die with it."""
        before = self._session[rows]
        is_own = ((before == 0) | (before == session)) & (session != 0)
        self._session[rows] = np.where(is_own, session, SHARED)
        dead = is_own & closed
        self._dead[rows] = dead
        if closed:
            for one in self._sets:
                one.died(rows[dead].tolist())

    def _new_row(self) -> Row:
        if self._free:
            return self._free.pop()
        if self._rows == len(self._pages):
            self._grow_table()
        self._rows += 1
        return self._rows - 1

    def _grow_table(self) -> None:
        size = 2 * self._rows or FIRST_ROWS
        cells = np.zeros((size, self._layout.itemsize), np.uint8)
        cells[: self._rows] = self._cells
        drawn = np.zeros((size, len(self.drawn)))
        drawn[: self._rows] = self.drawn_table
        self._cells, self.drawn_table = cells, drawn
        table = cells.view(self._layout).reshape(-1)
        for name in self.columns:
            setattr(self, f"_{name}", table[name])
        for place, name in enumerate(self.drawn):
            setattr(self, f"_{name}", drawn[:, place])

    _pages: Column
    _depth: Column
    _behind: Column
    _nbytes: Column
    _last_use: Column
    _session: Column
    _dead: Column
