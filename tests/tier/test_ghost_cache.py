"""Runs against single pages: a ghost cache hits and evicts what a list of pages would."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.policy.base import Lru, Use
from kvtier.tier.policy.ghost_cache import GhostCache


class RememberingLru(Lru):
    ghosts = 2.0


@dataclass
class Pages:
    """Least recently used pages, deepest first, one by one."""

    capacity: int
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # page -> last use, -depth

    def request(self, pages: list[int], now: int) -> int:
        hits = next((i for i, page in enumerate(pages) if page not in self.held), len(pages))
        self.held |= {page: (now, -depth) for depth, page in enumerate(pages)}
        while len(self.held) > self.capacity:
            del self.held[min(self.held, key=self.held.__getitem__)]
        return hits


@dataclass
class Chains:
    """Gives every chain of small numbers its dense page ids: the same id for the same chain so far."""

    ids: dict[tuple[int, ...], int] = field(default_factory=dict)

    def pages(self, chain: list[int]) -> list[int]:
        return [self.ids.setdefault(tuple(chain[: i + 1]), len(self.ids)) for i in range(len(chain))]


# of each request: one of a few long chains, how much of it, and how it goes on
requests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 8), st.lists(st.integers(0, 1), max_size=6)),
    max_size=40,
)


def chain_of(stem: int, length: int, tail: list[int]) -> list[int]:
    return [stem] * length + tail or [stem]


@settings(max_examples=300, deadline=None)
@given(requests, st.integers(1, 30), st.booleans())
def test_runs_hit_and_hold_what_single_pages_do(
    asked: list[tuple[int, int, list[int]]], capacity: int, remembers: bool
) -> None:
    cache = GhostCache(RememberingLru() if remembers else Lru(), capacity)
    model, chains = Pages(capacity), Chains()

    for now, (stem, length, tail) in enumerate(asked):
        pages = chains.pages(chain_of(stem, length, tail))
        hits = cache.request(np.array(pages, np.int64), Use(0, 0), float(now))

        assert hits == model.request(pages, now)
        assert {page for page in chains.ids.values() if cache.is_resident(page)} == set(model.held)
        cache.check()


def test_evicted_pages_are_remembered_up_to_the_bound_and_the_oldest_forgotten_first() -> None:
    cache = GhostCache(RememberingLru(), 4)

    for now in range(10):
        cache.request(np.arange(now * 3, now * 3 + 3), Use(0, 0), float(now))
        cache.check()

    assert cache.resident_pages == 4
    assert cache.ghost_pages == 8  # the most that whole runs allow
    assert cache.evicted_pages == 26


def test_a_request_larger_than_the_cache_leaves_its_head() -> None:
    cache = GhostCache(Lru(), 4)

    cache.request(np.arange(10), Use(0, 0), 0.0)

    assert [page for page in range(10) if cache.is_resident(page)] == [0, 1, 2, 3]
    assert cache.request(np.arange(10), Use(0, 0), 1.0) == 4


def test_the_private_pages_of_a_closed_session_leave_before_older_ones() -> None:
    cache = GhostCache(Lru(), 6)

    cache.request(np.array([0, 1, 2]), Use(0, 0, session=1), 0.0)
    cache.request(np.array([0, 3, 4]), Use(0, 0, session=2, closed=True), 1.0)
    cache.request(np.array([5, 6, 7]), Use(0, 0, session=3), 2.0)

    assert [page for page in range(8) if cache.is_resident(page)] == [0, 1, 2, 5, 6, 7]


def test_an_empty_request_and_an_empty_cache_are_told_apart() -> None:
    assert GhostCache(Lru(), 1).request(np.array([], np.int64), Use(0, 0), 0.0) == 0
    with pytest.raises(ValueError, match="at least one page, got a capacity of 0"):
        GhostCache(Lru(), 0)
