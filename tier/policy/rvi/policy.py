"""RVI, the reuse-value index: keep what saves the most prefill per second and byte that it is kept. Pure.

The value of a page is I x T^a / bytes: I the best rate of hits per second that keeping it can give (`hazard`), T the
seconds saved when it is used again, recomputing less loading. An exponent a of 0 counts hits, 1 counts compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvtier.tier.policy.base import PolicySettings, Row, Use
from kvtier.tier.policy.candidates import Rows
from kvtier.tier.policy.rvi import reuse_model as hazard
from kvtier.tier.policy.rvi.reuse_intervals import NONE, End, ReuseIntervals, slots
from kvtier.tier.policy.rvi.reuse_model import (
    AGES,
    BUCKETS,
    FEATURES,
    Z_LEVELS,
    Z_MAX,
    Z_STEP,
    Floats,
    Ints,
    ReuseModel,
    bucket,
)
from kvtier.tier.policy.span_table import Column, RunTable

PER_KIND = FEATURES * BUCKETS
OWN = (
    np.array([hazard.USES, hazard.GAP, hazard.CREATED]) * BUCKETS
)  # features that a request's runs differ in
USES_CAP = int(hazard.USES_EDGES[-1]) + 1  # from here on all are in the last bucket
FOLLOWERS_CAP = BUCKETS - 1
OPEN_Z = 1.0  # at least, of a session that goes on
LAST_CENTRE = AGES - 1.000001  # between the middles of the last two age buckets
FIRST_AGE = 2.0 / 1.5**0.5  # s, middle of the first age bucket
PER_BUCKET = 1.0 / math.log(1.5)  # from the logarithm of an age to its bucket
FIRST_BUCKET = 0.5 - math.log(2.0) / math.log(1.5)
EVENTS = 32  # runs used again, and releases, from which is learned at once

_USES = np.array([bucket(hazard.USES_EDGES, n) for n in range(USES_CAP + 1)])
_BEHIND = np.array([bucket(hazard.BEHIND_EDGES, n) for n in range(int(hazard.BEHIND_EDGES[-1]) + 2)])
_BEHIND += hazard.BEHIND * BUCKETS
_BEHIND_END = [*np.ceil(hazard.BEHIND_EDGES).astype(int).tolist(), 1 << 31]


class Rvi(RunTable):
    """Learns from its own pages only, resident and evicted ones, as they are used; settings.seed fixes its draws.

    With a hazard that another one has `learned`, it goes by that.
    """

    name = "rvi"
    columns = RunTable.columns | {
        "uses": np.int16,
        "gap": np.int16,  # bucket of the time between its last two uses
        "created": np.int16,  # bucket of the new pages of the request that brought it
        "followers": np.int16,  # runs that came to hang on its last page
        "turn": np.int32,
        "kind": np.int16,
        "open": np.bool_,
        "release": np.int64,  # its last one's number
        "z": np.float64,  # sum of all weights but those of `behind` and `followers`
    }
    # where the last page's class and z begin in the index; e to what z is above its level, over bytes; what
    # recomputing it takes, by a page at depth 0
    drawn = ("last_use", "cell", "scale", "effort")

    def __init__(self, settings: PolicySettings, learned: ReuseModel | None = None) -> None:
        super().__init__(settings)
        self.ghosts = settings.ghosts
        self._exponent = settings.exponent
        self.hazard = learned or ReuseModel()
        self._releases = ReuseIntervals(self.hazard)
        self._learns = learned is None
        self._numbered = 0  # releases, when another learns
        self._any_open = False
        self._events = 0

    # rows

    def add(self, pages: int, depth: int, nbytes: int, created: int, now: float) -> Row:
        row = super().add(pages, depth, nbytes, created, now)
        self._created[row] = bucket(hazard.CREATED_EDGES, created)
        self._release[row] = NONE
        self._tail_changed(row)
        return row

    def alike(self, upper: Row, lower: Row) -> bool:
        release = self._release.item(upper)
        return bool(
            release == self._release.item(lower) != NONE
            and self._uses.item(upper) == self._uses.item(lower)
            and self._session.item(upper) == self._session.item(lower)
            and self._followers.item(upper) == 1
        )

    def grow(self, row: Row, pages: int) -> None:
        self._end(row, self._pages.item(row))
        self._release[row] = NONE
        super().grow(row, pages)
        self._followers[row] = 0
        self._tail_changed(row)

    def cut(self, row: Row, pages: int) -> None:
        self._end(row, pages)
        super().cut(row, pages)

    def forget(self, row: Row) -> None:
        self._end(row, self._pages.item(row))
        super().forget(row)

    def _tail_moved(self, row: Row, pages: int) -> None:
        behind, most = self._behind.item(row), len(_BEHIND) - 1
        same = _BEHIND.item(min(behind, most)) == _BEHIND.item(min(behind - pages, most))
        if same and self._followers.item(row) == 1:  # all features are as they were
            self._effort[row] -= pages / self.costs.double_pages
        else:
            self._followers[row] = 1
            self._tail_changed(row)

    def _tail_changed(self, row: Row) -> None:
        """As `_value`, for one run: on single numbers Python is faster."""
        weights, kind = self.hazard.weights, self._kind.item(row)
        first = kind * PER_KIND
        z = self._z.item(row) + weights.item(
            first + _BEHIND.item(min(self._behind.item(row), len(_BEHIND) - 1))
        )
        z += weights.item(first + hazard.FOLLOWERS * BUCKETS + self._followers.item(row))
        if self._open.item(row):
            z = max(z, OPEN_Z)
        z = min(max(z, -Z_MAX), Z_MAX) + Z_MAX
        level = int(z / Z_STEP + 0.5)
        cell = ((kind * BUCKETS + self._gap.item(row)) * Z_LEVELS + level) * AGES
        scale = 0.0 if self._dead.item(row) else math.exp(z - level * Z_STEP) / self._nbytes.item(row)
        depth = self._depth.item(row) + self._pages.item(row) - 1
        self.drawn_table[row, 1:] = cell, scale, 1.0 + depth / self.costs.double_pages

    def tail_pages(self, row: Row) -> int:
        pages, behind = int(self._pages[row]), int(self._behind[row])
        level = int(_BEHIND[min(behind, len(_BEHIND) - 1)]) - hazard.BEHIND * BUCKETS
        return min(pages, int(_BEHIND_END[level]) - behind)

    # what happens

    def reuse(self, rows: Sequence[Row], now: float) -> None:
        at = np.array(rows, np.int64)
        waited = now - self._last_use[at]
        known = self._release[at] != NONE
        self._end_all(at[known], waited[known], hit=True)
        self._gap[at] = np.minimum(1 + hazard.GAP_EDGES.searchsorted(waited, "right"), BUCKETS - 1)
        self._last_use[at] = now
        self._release[at] = NONE

    def release(self, rows: Sequence[Row], behind: Sequence[int], use: Use, now: float) -> None:
        at = np.array(rows, np.int64)
        self._turn[at] = self._turn_of(at, use)
        open_ended = self._release[at] != NONE  # a second request has used it beside the first
        if open_ended.any():
            ended = at[open_ended]
            self._end_all(ended, now - self._last_use[ended], hit=False)
        self._follow(at)
        self._uses[at] = np.minimum(self._uses[at] + 1, USES_CAP)
        self._behind[at] = behind
        self._last_use[at] = now
        self._kind[at] = use.kind
        self._open[at] = use.open
        self._any_open |= use.open
        self._used_by(at, use.session, use.closed)
        self._score(at, use, now)
        self._learn(use.pages, now)

    def _turn_of(self, at: Rows, use: Use) -> int:
        """Told, or one more than its deepest known page's; where several go on from that, a session begins."""
        if use.turn:
            return use.turn
        known = self._uses[at].nonzero()[0]
        if len(known) == 0:
            return 1
        deepest = at[known[-1]]
        return 1 if self._followers.item(deepest) >= 3 else int(self._turn[deepest]) + 1

    def _follow(self, at: Rows) -> None:
        """A run used for the first time is a new one that goes on from the one above it."""
        above = at[:-1][self._uses[at[1:]] == 0]
        self._followers[above] = np.minimum(self._followers[above] + 1, FOLLOWERS_CAP)

    def _score(self, at: Rows, use: Use, now: float) -> None:
        """Features, weights and value of runs just released, and an entry for each stretch of one history."""
        kind = int(use.kind) * PER_KIND
        request = [
            kind + hazard.CONSTANT * BUCKETS,
            kind + hazard.CHAIN * BUCKETS + bucket(hazard.CHAIN_EDGES, use.pages),
            kind + hazard.OUTPUT * BUCKETS + bucket(hazard.OUTPUT_EDGES, use.output_tokens),
            kind + hazard.TURN * BUCKETS + bucket(hazard.TURN_EDGES, self._turn.item(at.item(0))),
        ]
        own = np.empty((3, len(at)), np.int64)
        own[0] = _USES[self._uses[at]]
        own[1] = gap = self._gap[at]
        own[2] = self._created[at]
        own += (kind + OWN)[:, None]
        weights = self.hazard.weights
        z = weights[own].sum(axis=0)
        z += sum(weights.item(one) for one in request)
        self._z[at] = z
        classes = gap.astype(np.int64)
        classes += int(use.kind) * BUCKETS
        behind, followers = self._tail_features(at)
        self._value(at, classes, behind, followers)
        self._enter(at, classes, request, own, behind, followers, now)

    def _tail_features(self, at: Rows) -> tuple[Ints, Ints]:
        """Weights of the runs' last pages by what lies behind them and what follows them."""
        kind = self._kind[at] * np.int64(PER_KIND)
        behind = _BEHIND[np.minimum(self._behind[at], len(_BEHIND) - 1)]
        behind += kind
        kind += self._followers[at]
        kind += hazard.FOLLOWERS * BUCKETS
        return behind, kind

    def _value(self, at: Rows, classes: Ints, behind: Ints, followers: Ints) -> None:
        weights = self.hazard.weights
        z = self._z[at]
        z += weights[behind]
        z += weights[followers]
        if self._any_open:
            z[self._open[at]] = np.maximum(z[self._open[at]], OPEN_Z)
        z = np.minimum(np.maximum(z, -Z_MAX), Z_MAX)
        z += Z_MAX
        z *= 1.0 / Z_STEP
        level = (z + 0.5).astype(np.int64)
        z -= level
        z *= Z_STEP
        self._cell[at] = (classes * Z_LEVELS + level) * AGES
        scale = np.exp(z)
        scale /= self._nbytes[at]
        scale[self._dead[at]] = 0.0
        self._scale[at] = scale
        effort = self._depth[at] + self._pages[at] - 1.0
        effort /= self.costs.double_pages
        effort += 1.0
        self._effort[at] = effort

    def _enter(
        self,
        at: Rows,
        classes: Ints,
        request: list[int],
        own: Ints,
        behind: Ints,
        followers: Ints,
        now: float,
    ) -> None:
        """Number the releases. Neighbours with the same features are one, up to a last page that many follow or none."""
        last = self._followers[at] != 1
        starts = np.ones(len(at), np.bool_)
        starts[1:] = last[:-1] | (own[:, 1:] != own[:, :-1]).any(axis=0)
        first = starts.nonzero()[0]
        if self._learns:
            ends = np.append(first[1:], len(at)) - 1
            waiting = slots(self._behind[at], self._pages[at], last)
            waiting[self._dead[at]] = 0.0  # nothing is to be learned of what is known to be over
            waiting = np.add.reduceat(waiting, first, axis=0)
            common = np.empty((len(first), FEATURES - 2), np.int16)
            common[:, :4] = request
            common[:, 4:] = own[:, first].T
            tail = np.stack([behind[ends], followers[ends]], axis=1)
            self._events += len(first)
            number = self._releases.add(now, classes[first], common, tail, waiting)
        else:
            number, self._numbered = self._numbered, self._numbered + len(first)
        self._release[at] = np.where(self._dead[at], NONE, starts.cumsum() + (number - 1))

    def _end(self, row: Row, pages: int) -> None:
        """The last pages of a run are forgotten."""
        release = self._release.item(row)
        if self._learns and release != NONE:
            self._releases.forget(release, self._behind.item(row), pages, self._followers.item(row) != 1)

    def _end_all(self, at: Rows, waited: Floats, hit: bool) -> None:
        """Runs are used again, after so long, or only begin to wait again."""
        if self._learns:
            last = self._followers[at] != 1
            ages = hazard.ages(waited)
            self._releases.end(End(self._release[at], self._behind[at], self._pages[at], last, ages), hit)
            self._events += len(at)

    def _learn(self, pages: int, now: float) -> None:
        if self._learns:
            self.hazard.requested(pages)
            if self._events >= EVENTS:
                self._events = 0
                self._releases.learn(now)

    # what leaves

    def worth(self, rows: Rows, now: float, load_s: float) -> Floats:
        last_use, cell, scale, effort = self.drawn_table.take(rows, axis=0).T
        x = now - last_use
        np.maximum(x, FIRST_AGE, out=x)
        np.log(x, out=x)
        x *= PER_BUCKET
        x += FIRST_BUCKET
        np.minimum(x, LAST_CENTRE, out=x)
        j = x.astype(np.int64)
        x -= j
        j += cell.astype(np.int64)
        index = self.hazard.index
        rate: Floats = index.take(j)
        j += 1
        after = index.take(j)
        after -= rate
        after *= x
        rate += after
        rate *= scale
        if self.costs.page_s and (self._exponent or load_s):
            effort *= self.costs.page_s
            rate *= self._gain(effort - load_s) if load_s else effort**self._exponent
        return rate

    def value(self, row: Row, now: float, load_s: float = 0.0) -> float:
        """As `worth`, for one run: on single numbers Python is faster."""
        last_use, cell, scale, effort = self.drawn_table[row].tolist()
        x = min(math.log(max(now - last_use, FIRST_AGE)) * PER_BUCKET + FIRST_BUCKET, LAST_CENTRE)
        at = int(x)
        rate, after = self.hazard.index[int(cell) + at : int(cell) + at + 2].tolist()
        value: float = (rate + (after - rate) * (x - at)) * scale
        if self.costs.page_s and (self._exponent or load_s):
            saved = max(effort * self.costs.page_s - load_s, 0.0)
            value *= saved**self._exponent if self._exponent else saved > 0.0
        return value

    def _gain(self, saved: Floats) -> Floats:
        gain: Floats = np.maximum(saved, 0.0) ** self._exponent
        if not self._exponent:
            gain[saved <= 0.0] = 0.0
        return gain

    def describe(self, row: Row, now: float) -> str:
        idle, uses = now - self._last_use.item(row), self._uses.item(row)
        return f"rvi, score = {self.value(row, now):.1e} (idle {idle:.1f} s, {uses} uses)"

    def check(self, now: float) -> None:
        """Every run in a set has pages and a value; raises AssertionError where one hasn't."""
        for one in self._sets:
            rows = one.members()
            assert (self.worth(rows, now, 0.0) >= 0.0).all()
            assert (self._pages[rows] > 0).all() and (self._behind[rows] >= 0).all()

    _uses: Column
    _gap: Column
    _created: Column
    _followers: Column
    _turn: Column
    _kind: Column
    _open: Column
    _release: Column
    _z: Column
    _cell: Column
    _scale: Column
    _effort: Column
