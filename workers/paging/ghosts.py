"""Remembers, by key, pages that left L1: when that was, and the policy's row with all that it knew of them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tier.l1.prefix import Piece
from kvtier.tier.pages.page import PageKey
from kvtier.tier.policy.base import Policy, Row
from kvtier.workers.requests.sequence import EvictedSpan

EXPLAINED = 16384  # at least so many, which `explain` can tell of; about 6 MB
MOST = 1_000_000  # whatever the policy wants; about 400 MB
TEXTS = 16  # stretches of one request's pages that are described


@dataclass(slots=True)
class Ghost:
    """A page that isn't here. `in_use`: the policy was told that a request uses it again."""

    row: Row
    nbytes: int
    evicted_s: float
    last_use_s: float
    in_use: bool = False


class Ghosts:
    """At most `most` pages, those evicted longest ago are forgotten first. Owned by the page cache."""

    def __init__(self, policy: Policy, most: int) -> None:
        self._policy = policy
        self._most = most
        self._pages: OrderedDict[PageKey, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def push(self, key: PageKey, ghost: Ghost) -> None:
        """A page has left, and its row is the ghost's from now on."""
        self.forget(key)
        self._pages[key] = ghost
        if len(self._pages) > self._most:
            _, oldest = self._pages.popitem(last=False)
            self._policy.forget(oldest.row)

    def forget(self, key: PageKey) -> None:
        """End the history of a page, if there is one."""
        ghost = self._pages.pop(key, None)
        if ghost is not None:
            self._policy.forget(ghost.row)

    def begin(self, keys: Sequence[PageKey], now: float) -> None:
        """A request begins to use these pages, as far as they are remembered."""
        found = [ghost for key in keys if (ghost := self._pages.get(key)) is not None and not ghost.in_use]
        if found:
            self._policy.reuse([ghost.row for ghost in found], now)
            for ghost in found:
                ghost.in_use = True

    def pop(self, key: PageKey, nbytes: int, now: float) -> Row | None:
        """The row of a page that comes back, in use; None when it isn't remembered, or came back in another size."""
        ghost = self._pages.get(key)
        if ghost is None:
            return None
        if ghost.nbytes != nbytes:
            self.forget(key)
            return None
        del self._pages[key]
        if not ghost.in_use:
            self._policy.reuse([ghost.row], now)
        return ghost.row

    def revive_all(self, keys: Sequence[PageKey], nbytes: int, now: float) -> list[Piece]:
        """The same for pages of a chain, those never seen counted together; [] where all are such."""
        if not any(key in self._pages for key in keys):
            return []
        pieces: list[Piece] = []
        for key in keys:
            row = self.pop(key, nbytes, now)
            if row is None and pieces and pieces[-1][0] is None:
                pieces[-1] = None, pieces[-1][1] + 1
            else:
                pieces.append((row, 1))
        return pieces

    def explain(self, keys: Sequence[PageKey], first: int) -> list[EvictedSpan]:
        """What the policy thought when it let these pages of a chain go, the first at `first`; before `begin`."""
        told: list[EvictedSpan] = []
        last_use_s: float | None = None
        for page, key in enumerate(keys, start=first):
            ghost = self._pages.get(key)
            if ghost is None:
                last_use_s = None
            elif ghost.last_use_s == last_use_s:
                told[-1] = told[-1]._replace(end=page + 1)
            elif len(told) < TEXTS:
                last_use_s = ghost.last_use_s
                text = self._policy.describe(ghost.row, ghost.evicted_s)
                told.append(EvictedSpan(page, page + 1, ghost.evicted_s, text))
        return told

    def check(self) -> None:
        """The bound; AssertionError where it doesn't hold, or two pages have one row."""
        assert len(self._pages) <= self._most, f"{len(self._pages)} evicted pages are remembered"
        assert len({ghost.row for ghost in self._pages.values()}) == len(self._pages), (
            "two pages with one row"
        )
