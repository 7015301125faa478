"""The three-term score: recency, memory usage and expected remaining tokens, each from 0 to 1, weighted. Pure.

A baseline that users know from the literature on tiered KV caches; `rvi` is better on every trace that we have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.tier.policy.base import PolicySettings, Row, Use
from kvtier.tier.policy.candidates import Rows
from kvtier.tier.policy.rvi.reuse_model import Floats
from kvtier.tier.policy.span_table import Column, RunTable

HALF_RECENT_S = 600.0  # idle time at which recency is 1/2
MOST_PAGES = 256.0  # of a request's chain, at which memory is 1
MOST_TOKENS = 2048.0  # of a request's answer, at which remaining is 1


class WeightedScore(RunTable):
    """What scores lowest leaves first; the last request that used a run tells two of its terms."""

    name = "score"
    columns = RunTable.columns | {"fixed": np.float64}  # of memory and remaining, weighted

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._weights = settings.weights

    def alike(self, upper: Row, lower: Row) -> bool:
        return all(
            column.item(upper) == column.item(lower)
            for column in (self._last_use, self._fixed, self._session)
        )

    def release(self, rows: Sequence[Row], behind: Sequence[int], use: Use, now: float) -> None:
        at = np.array(rows, np.int64)
        memory, remaining = min(1.0, use.pages / MOST_PAGES), min(1.0, use.output_tokens / MOST_TOKENS)
        self._last_use[at] = now
        self._behind[at] = behind
        self._fixed[at] = self._weights.memory * memory + self._weights.remaining * remaining
        self._used_by(at, use.session, use.closed)

    def worth(self, rows: Rows, now: float, load_s: float) -> Floats:
        recency = HALF_RECENT_S / (HALF_RECENT_S + now - self._last_use[rows])
        score: Floats = self._weights.recency * recency + self._fixed[rows]
        score[self._dead[rows]] = -np.inf
        return score

    def describe(self, row: Row, now: float) -> str:
        return f"score, score = {self.value(row, now):.3f} (idle {now - self._last_use.item(row):.1f} s)"

    def _tail_moved(self, row: Row, pages: int) -> None:
        """A run's pages score alike."""

    _fixed: Column
