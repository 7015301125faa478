"""Candidates by the time of their last use, found again a batch at a time. Pure.

The order costs nothing until it is asked for: a set that is drawn from at random can answer so when it has to.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvtier.tier.policy.base import Row, Victim
from kvtier.tier.policy.candidates import Rows, Sampled
from kvtier.tier.policy.span_table import RunTable

Entry = tuple[float, int, Row]  # last use, deeper first

LEAST, MOST = 64, 16_384  # of a batch, which is a sixteenth of the members in between
NOTHING = float("-inf")


class Oldest:
    """Least recently used first, of one chain the tail first: what `Lru` would say of the same runs.

    A batch holds every member that was last used before a certain time; `added` holds those that became members
    since, were used before it too, or have lost their last pages. So the older of both is the oldest of all.
    """

    def __init__(self, runs: RunTable, members: Sampled) -> None:
        self._runs, self._members = runs, members
        self._batch: list[Entry] = []  # the oldest at the end
        self._added: list[Entry] = []  # a heap
        self._until = NOTHING

    def clear(self) -> None:
        """Start over at the next question: the set wasn't told about what came since."""
        self._batch, self._added, self._until = [], [], NOTHING

    def added(self, row: Row) -> None:
        """A run has become a member, or its turn comes earlier."""
        entry = self._runs.age_key(row)
        if entry[0] <= self._until:
            heapq.heappush(self._added, entry)
            if len(self._added) > 2 * len(self._members) + LEAST:
                self.clear()

    def victims(self, pages: int) -> list[Victim]:
        """The oldest run; [] when there is none."""
        while len(self._members):
            if not self._batch and not self._added:
                self._find()
            entry, right = self._first(), None
            if entry[2] in self._members:
                right = self._runs.age_key(entry[2])
            if right == entry:
                return [Victim(entry[2], min(pages, self._runs.run_pages(entry[2])))]
            self._pop(entry)
            if right is not None:
                self.added(entry[2])
        return []

    def _first(self) -> Entry:
        if self._batch and self._added:
            return min(self._batch[-1], self._added[0])
        return self._batch[-1] if self._batch else self._added[0]

    def _pop(self, entry: Entry) -> None:
        if self._batch and self._batch[-1] == entry:
            self._batch.pop()
        else:
            heapq.heappop(self._added)

    def _find(self) -> None:
        rows: Rows = self._members.members()
        last_use = self._runs.last_uses(rows)
        count = min(max(len(rows) // 16, LEAST), MOST, len(rows))
        self._until = float(np.partition(last_use, count - 1)[count - 1])
        old = rows[last_use <= self._until].tolist()
        self._batch = sorted((self._runs.age_key(row) for row in old), reverse=True)
