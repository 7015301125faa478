"""The guard: RVI while it hits more, and exactly LRU while that does."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.policy.base import GONE, Costs, Kind, Lru, PolicySettings, Use
from kvtier.tier.policy.ghost_cache import GhostCache
from kvtier.tier.policy.guard import SHARED_BY, WINDOW, Guarded, PageNames, Stems, head_weight

requests = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=60
)


def chain(stem: int, length: int, tail: int) -> np.ndarray:
    """Pages of one of four stems, of which up to three tails hang at every length."""
    own = 400 + stem * 30 + length * 3 + tail
    return np.append(stem * 100 + np.arange(length), own)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 25))
def test_fallen_back_it_keeps_exactly_what_lru_keeps(
    asked: list[tuple[int, int, int]], capacity: int
) -> None:
    guarded = Guarded(PolicySettings(ghosts=0.0), capacity)  # as forgetful as it
    guarded.by_lru = True
    ours, lru = GhostCache(guarded, capacity), GhostCache(Lru(), capacity)

    for now, (stem, length, tail) in enumerate(asked):
        pages = chain(stem, length, tail)
        assert ours.request(pages, Use(0, 0), float(now)) == lru.request(pages, Use(0, 0), float(now))
    ours.check()
    assert [ours.is_resident(page) for page in range(520)] == [lru.is_resident(page) for page in range(520)]


def sessions(cache: GhostCache, coming: Kind, start: int, count: int) -> None:
    """Chains of 4 pages: those of kind `coming` are asked for 3 more times, after about 10 s, the others never."""
    rng = np.random.default_rng(1)
    other = Kind.TURN if coming is Kind.TOOL else Kind.TOOL
    again: list[tuple[float, int, int]] = []
    for number in range(start, start + count):
        if again and again[0][0] <= number:
            _, first, left = again.pop(0)
        else:
            first, left = number * 4, 3 * int(rng.integers(0, 2))
        use = Use(0, 0, 10, coming if left else other)
        cache.request(np.arange(first, first + 4), use, float(number))
        if left:
            again.append((number + float(rng.uniform(8, 12)), first, left - 1))
            again.sort()


def test_it_falls_back_where_what_was_learned_turns_false_and_comes_back() -> None:
    guarded = Guarded(PolicySettings(draw=16, per_draw=1), 48)
    cache = GhostCache(guarded, 48)

    sessions(cache, Kind.TOOL, 0, 3000)
    first = guarded.by_lru, guarded.fallbacks
    sessions(cache, Kind.TURN, 3000, 1000)
    fallen = guarded.by_lru, guarded.fallbacks, guarded.state
    for number in range(4000, 4000 + 20 * WINDOW):  # a loop a little too large, of which LRU keeps nothing
        start = 10**6 + number % 12 * 8
        cache.request(np.arange(start, start + 8), Use(0, 0), float(number))
    cache.check()

    assert first == (False, 0)
    assert fallen == (True, 1, "rvi, lru for now")
    assert not guarded.by_lru


def looked_at(exponent: float, lru: int, rvi: int, looks: int = 2, page_s: float = 0.02) -> bool:
    """Whether it goes by LRU when of chains of 300 pages LRU hits so many pages, and RVI of every tenth chain so many."""
    guarded = Guarded(PolicySettings(exponent=exponent), 48)
    guarded.costs = Costs(page_s, double_pages=64)
    for ghost, hits in zip(guarded._ghosts, (lambda n: lru, lambda n: rvi * (n % 10 == 0)), strict=True):
        asked = itertools.count()
        ghost.request = lambda *_, asked=asked, hits=hits: hits(next(asked))  # type: ignore[method-assign]
    for number in range(looks * WINDOW):
        guarded.observe(range(300), Use(300, 300), float(number))
    return guarded.by_lru


def test_a_hit_counts_by_what_rvi_is_asked_to_save() -> None:
    """Few deep hits against more shallow ones: .067 of all pages against .1, and .101 of the compute against .039."""
    assert looked_at(0.0, lru=30, rvi=200)
    assert not looked_at(1.0, lru=30, rvi=200)
    assert looked_at(1.0, lru=30, rvi=200, page_s=0.0)  # not measured: all pages are alike
    assert looked_at(1.0, lru=90, rvi=200)


def test_one_look_alone_changes_nothing() -> None:
    assert not looked_at(0.0, lru=30, rvi=0, looks=1)
    assert looked_at(0.0, lru=30, rvi=0, looks=2)


@given(st.integers(0, 2000), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(1.0, 1e9))
def test_the_weight_of_a_head_is_the_sum_over_its_pages(pages: int, exponent: float, double: float) -> None:
    costs = Costs(0.02, double)

    summed = sum((costs.recompute_s(depth) / costs.page_s) ** exponent for depth in range(pages))

    assert head_weight(pages, exponent, costs) == pytest.approx(
        summed, rel=1e-2 if 0 < exponent < 1 else 1e-5
    )


def test_while_lru_chooses_the_value_is_the_last_use() -> None:
    """It stayed RVI's, so that what LRU had chosen was compared with other pages by another measure."""
    guarded, lru = Guarded(PolicySettings(), 48), Lru()
    guarded.by_lru = True
    rows = {}
    for policy in guarded, lru:
        old, young, over = rows[policy.name] = [policy.add(1, 0, nbytes, 1, 0.0) for nbytes in (1, 100, 1)]
        policy.release([old], [0], Use(1, 1), 1.0)
        policy.release([young], [0], Use(1, 1), 2.0)
        policy.release([over], [0], Use(1, 1, session=3, closed=True), 3.0)

    values = [guarded.value(row, 9.0, load_s=5.0) for row in rows["rvi"]]

    assert values == [lru.value(row, 9.0) for row in rows["lru"]] == [1.0, 2.0, GONE]
    assert guarded.describe(rows["rvi"][0], 9.0) == "lru for rvi, score = idle 8.0 s"
    assert guarded.describe(rows["rvi"][2], 9.0) == "lru for rvi, score = its session is closed"
    guarded.by_lru = False
    assert guarded.value(rows["rvi"][2], 9.0) == 0.0 < guarded.value(rows["rvi"][1], 9.0)


SAMPLED_OF_BYTES = """
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.base import PolicySettings, Use
guarded = Guarded(PolicySettings(), 100_000)
for number in range(200):
    before = guarded._sampled
    guarded.observe([number.to_bytes(32, "little")], Use(1, 1), float(number))
    print(guarded._sampled - before, end="")
"""


def test_which_requests_are_sampled_is_the_same_in_every_process() -> None:
    """Keys of pages are bytes, whose hash Python draws again for each process: a recording could not be run again."""
    sampled = [
        subprocess.run(
            [sys.executable, "-c", SAMPLED_OF_BYTES],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]

    assert sampled[0] == sampled[1] and {*sampled[0]} == {"0", "1"}


def test_a_shared_beginning_does_not_make_one_session_of_all() -> None:
    stems = Stems()

    found = [stems.of([0, 1, 100 + session, 1000 + session]) for session in range(3 * SHARED_BY)]

    assert found[:SHARED_BY] == [0] * SHARED_BY
    assert found[SHARED_BY:] == [100 + session for session in range(SHARED_BY, 3 * SHARED_BY)]
    assert stems.of([0, 1, 103, 1003, 2003]) == 103


def test_names_of_pages_that_no_ghost_knows_are_used_again() -> None:
    cache = GhostCache(Lru(), 8)
    names = PageNames([cache])

    for number in range(2000):
        chain = [f"{number}/{i}" for i in range(4)]
        named = names.of(chain)
        assert len(set(named.tolist())) == 4
        assert cache.request(named, Use(0, 0), float(number)) == 0
        assert (names.of(chain) == named).all()
    cache.check()

    assert named.max() < 2100
