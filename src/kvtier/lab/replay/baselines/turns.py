"""Tells the turn of a conversation from the chain alone, where nothing says it. Pure."""

from __future__ import annotations

import numpy as np

from kvtier.lab.replay.baselines.cache import Pages, grown

SHARED = 3  # so many different continuations make a page a prompt that conversations share


class Turns:
    """A request is one turn later than the last that used the deepest page known of it, or the first of its session."""

    def __init__(self) -> None:
        self._turn = np.zeros(0, np.int64)  # [page]: of the last request that used it; 0: never used
        self._children = np.zeros(0, np.int64)  # [page]: different pages seen behind it

    def grow(self, pages: int) -> None:
        """Room for ids below `pages`."""
        self._turn = grown(self._turn, pages)
        self._children = grown(self._children, pages)

    def next(self, chain: Pages, told: int) -> int:
        """The turn, from 1, of a request for this chain, head first; `told` is what its client says, or 0."""
        known = int(np.count_nonzero(self._turn[chain]))
        turn = told or self._guess(chain[known - 1] if known else None)
        self._children[chain[max(0, known - 1) : -1]] += known < chain.size
        self._turn[chain] = turn
        return turn

    def _guess(self, deepest: np.int64 | None) -> int:
        if deepest is None or self._children[deepest] >= SHARED:
            return 1
        return int(self._turn[deepest]) + 1
