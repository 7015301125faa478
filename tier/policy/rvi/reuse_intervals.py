"""Releases of spans in the order of their times, and what of them hasn't been used again yet. Pure.

One pointer per age edge goes through them: whatever lies behind it has reached that age. So each release costs a step
per edge it lives to see, and no timer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tier.policy.rvi import reuse_model as hazard
from kvtier.tier.policy.rvi.reuse_model import (
    AGES,
    BEHIND,
    BUCKETS,
    EDGES,
    FEATURES,
    FOLLOWERS,
    Floats,
    Ints,
    ReuseModel,
)

SLOTS = (
    BUCKETS + 1
)  # a bucket of pages behind, each, of pages with one follower; and a last page with none or several
LAST = BUCKETS
BEHIND_FROM = np.append(np.append(0, np.ceil(hazard.BEHIND_EDGES)), 1 << 31).astype(np.int64)
NONE = -1
MOST_FORGOTTEN = 1024


def slots(behind: Ints, pages: Ints, last: npt.NDArray[np.bool_]) -> Floats:
    """How the pages of runs spread over the slots: float [n, 9].

    `behind`, `pages` int [n]: a run's last page has so many behind it. `last`: that page has a slot of its own.
    """
    below = np.minimum((behind + pages)[:, None], BEHIND_FROM) - np.minimum(
        (behind + last)[:, None], BEHIND_FROM
    )
    out = np.empty((len(behind), SLOTS))
    out[:, :BUCKETS] = below[:, 1:] - below[:, :-1]
    out[:, LAST] = last
    return out


class End(NamedTuple):
    """Pages of n releases stop waiting, at ages in buckets `age`."""

    release: Ints  # [n]
    behind: Ints
    pages: Ints
    last: npt.NDArray[np.bool_]
    age: Ints


class ReuseIntervals:
    """At most 2 x `capacity` of them; of what is older nothing more is learned."""

    def __init__(self, learned: ReuseModel, capacity: int = 1 << 16) -> None:
        self._hazard = learned
        self._capacity = capacity
        size = 2 * capacity
        self._first = 0  # number of the release at index 0
        self.count = 0  # releases ever
        self._time = np.zeros(size)
        self._class = np.zeros(size, np.int16)
        self._common = np.zeros((size, FEATURES - 2), np.int16)  # weights of all its pages
        self._tail = np.zeros((size, 2), np.int16)  # and of its last page
        self._waiting = np.zeros((size, SLOTS), np.float32)  # pages
        self._passed = np.zeros(AGES, np.int64)  # by age edge: releases before this one have reached it
        self._used: list[End] = []
        self._unused: list[End] = []
        self._forgotten: list[tuple[int, int, int, bool]] = []

    def add(
        self, now: float, classes: Ints, common: npt.NDArray[np.int16], tail: Ints, waiting: Floats
    ) -> int:
        """Note n releases; the number of the first."""
        n = len(classes)
        if self.count - self._first + n > len(self._time):
            self._move()
        at = slice(self.count - self._first, self.count - self._first + n)
        self._time[at] = now
        self._class[at] = classes
        self._common[at] = common
        self._tail[at] = tail
        self._waiting[at] = waiting
        self.count += n
        return self.count - n

    def end(self, end: End, hit: bool) -> None:
        """Pages are used again, or begin to wait again; learned from at the next `learn`."""
        (self._used if hit else self._unused).append(end)

    def forget(self, release: int, behind: int, pages: int, last: bool) -> None:
        """So many pages of a release are forgotten: it isn't known any more when they are used again."""
        self._forgotten.append((release, behind, pages, last))
        if len(self._forgotten) == MOST_FORGOTTEN:
            self._fold()

    def _fold(self) -> None:
        columns = np.array(self._forgotten, np.int64).reshape(-1, 4).T
        release, behind, pages, last = columns
        self._unused.append(End(release, behind, pages, last.astype(bool), np.zeros_like(release)))
        self._forgotten.clear()

    def learn(self, now: float) -> None:
        """From all that has happened up to now."""
        release, waited, age, hits = self._ended()
        self._take(release, waited)
        early, early_age = self._ages_of_ended(release, age)
        late, late_age = self._ages_of_waiting(now)
        releases = np.concatenate([release[:hits], release[early], late])
        age = np.concatenate([age[:hits], early_age, late_age])
        pages = np.concatenate([waited[:hits], waited[early], self._waiting[late - self._first]])
        self._learn_from(releases - self._first, age, pages, hits)

    def _take(self, release: Ints, pages: Floats) -> None:
        """Pages of releases no longer wait."""
        if len(release):
            order = release.argsort(kind="stable")
            each, first = np.unique(release[order], return_index=True)
            left = self._waiting[each - self._first] - np.add.reduceat(pages[order], first, axis=0)
            self._waiting[each - self._first] = np.maximum(left, 0.0)

    def _ended(self) -> tuple[Ints, Floats, Ints, int]:
        """The releases that pages have left since the last time, those pages, their ages; how many of them were hits."""
        self._fold()
        ends = self._used + self._unused
        release, behind, pages, last, age = (np.concatenate(column) for column in zip(*ends, strict=True))
        hits = sum(len(end.release) for end in self._used)
        self._used.clear()
        self._unused.clear()
        known = release >= self._first
        waited = slots(behind[known], pages[known], last[known])
        return release[known], waited, age[known], int(np.count_nonzero(known[:hits]))

    def _ages_of_ended(self, release: Ints, age: Ints) -> tuple[Ints, Ints]:
        """The age edges that ended waits had reached, those not counted yet: indices of the waits, and the edges."""
        counted = (-self._passed).searchsorted(-release, "left")
        more = np.maximum(age + 1 - counted, 0)
        which = np.repeat(np.arange(len(release)), more)
        return which, counted[which] + _within(more)

    def _ages_of_waiting(self, now: float) -> tuple[Ints, Ints]:
        """The releases that have reached an age edge since the last time, and which."""
        reach = self._first + self._time[: self.count - self._first].searchsorted(now - EDGES, "right")
        reach = np.maximum(reach, self._passed)
        more = reach - self._passed
        releases = np.repeat(self._passed, more) + _within(more)
        self._passed = reach
        return releases, np.repeat(np.arange(AGES), more)

    def _learn_from(self, at: Ints, age: Ints, pages: Floats, hits: int) -> None:
        event, slot = np.nonzero(pages)
        if len(event):
            hits = int(event.searchsorted(hits))
            where = at[event]
            self._hazard.learn(
                self._features(where, slot),
                self._class[where].astype(np.int64),
                age[event],
                pages[event, slot],
                hits,
            )

    def _features(self, at: Ints, slot: Ints) -> Ints:
        """Weights of the pages in one slot of each release: int [n, 9]."""
        out = np.empty((len(at), FEATURES), np.int64)
        out[:, : FEATURES - 2] = self._common[at]
        kind = self._class[at].astype(np.int64) // BUCKETS * (FEATURES * BUCKETS)
        last = (slot == LAST)[:, None]
        inner = np.stack([kind + BEHIND * BUCKETS + slot, kind + FOLLOWERS * BUCKETS + 1], axis=1)
        out[:, FEATURES - 2 :] = np.where(last, self._tail[at], inner)
        return out

    def _move(self) -> None:
        keep = self._capacity
        have = self.count - self._first
        gone = have - keep
        for column in (self._time, self._class, self._common, self._tail, self._waiting):
            column[:keep] = column[gone:have]
        self._first += gone
        self._passed = np.maximum(self._passed, self._first)


def _within(counts: Ints) -> Ints:
    """0, 1, .. up to each count, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)
