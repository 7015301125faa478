"""A policy that checks what its owner tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.tier.l1.prefix import PrefixIndex
from kvtier.tier.policy.base import Lru, Row, Use


class Strict(Lru):
    """LRU that holds its owner to what a policy is promised."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use: dict[Row, bool] = {}  # every row; whether a request uses it that hasn't released it
        self.now = 0.0

    def add(self, pages: int, depth: int, nbytes: int, created: int, now: float) -> Row:
        self.hear(now)
        assert pages > 0
        row = super().add(pages, depth, nbytes, created, now)
        self.in_use[row] = True
        return row

    def split(self, row: Row, keep: int) -> Row:
        assert 0 < keep < self._runs[row].pages
        lower = super().split(row, keep)
        self.in_use[lower] = self.in_use[row]
        return lower

    def join(self, upper: Row, lower: Row) -> None:
        assert self.in_use.pop(upper) == self.in_use[lower]
        assert not any(upper in one for one in self._sets)
        a, b = self._runs[upper], self._runs[lower]
        assert a.depth + a.pages == b.depth
        super().join(upper, lower)

    def cut(self, row: Row, pages: int) -> None:
        assert 0 < pages < self._runs[row].pages
        super().cut(row, pages)

    def forget(self, row: Row) -> None:
        assert not any(row in one for one in self._sets)
        del self.in_use[row]
        super().forget(row)

    def reuse(self, rows: Sequence[Row], now: float) -> None:
        self.hear(now)
        for row in rows:
            assert not self.in_use[row], "a run is reused that nothing has released"
            self.in_use[row] = True
        super().reuse(rows, now)

    def release(self, rows: Sequence[Row], behind: Sequence[int], use: Use, now: float) -> None:
        self.hear(now)
        assert len(set(rows)) == len(rows) == len(behind)
        for row, left in zip(rows, behind, strict=True):
            assert self.in_use[row], "a run is released that nothing uses"
            self.in_use[row] = False
            if use.pages:
                run = self._runs[row]
                assert left == use.pages - run.depth - run.pages
        super().release(rows, behind, use, now)

    def hear(self, now: float) -> None:
        assert now >= self.now
        self.now = now

    def agrees_with(self, index: PrefixIndex, others: Mapping[Row, int] | None = None) -> None:
        """The rows are the index's runs, and `others`, of one page each: their depths."""
        runs = {row: (len(node.frames), node.start) for row, node in index._nodes.items()}
        runs |= {row: (1, depth) for row, depth in (others or {}).items()}
        assert runs == {row: (run.pages, run.depth) for row, run in self._runs.items()}
