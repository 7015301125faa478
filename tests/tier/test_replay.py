"""Replays: what counts as hit, which requests are scored, and what hits are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.lab.replay.chain import with_chain_gaps
from kvtier.lab.replay.models import LIVE, POLICIES, Setup, live_settings, run_setup
from kvtier.lab.replay.replay import (
    Prices,
    Result,
    infinite,
    replay,
    requests,
    score_hits,
    with_gaps,
    work,
)
from kvtier.lab.traces.trace import Ids, Source, Trace, read_trace
from kvtier.tier.policy.base import Lru, PolicySettings, Use
from kvtier.tier.policy.ghost_cache import GhostCache

CHAINS = [[1, 2, 3], [1, 2, 4], [9], [1, 2, 3, 5], [1, 2], [9, 10]]


def trace_of(chains: Sequence[Sequence[int]], block: int = 16, every_s: float = 1.0, **fields: Any) -> Trace:
    """A request for each of these chains of ids; `fields` are those of all lines."""
    rows: list[dict[str, Any]] = [{"block": block}]
    for at, chain in enumerate(chains):
        runs = [number for page in chain for number in (page, 1)]
        rows.append({"t": every_s * at, "i": block * len(chain), "h": runs, **fields})
    return read_trace([Source("test", [msgspec.json.encode(row) for row in rows])])


def lru(trace: Trace, capacity: int, **options: Any) -> Result:
    """A replay of LRU."""
    return replay(trace, GhostCache(Lru(), capacity), "lru", capacity, **options)


class Listening:
    """A cache that hits nothing and keeps what it is told."""

    name, capacity = "listening", 1

    def __init__(self) -> None:
        self.evicted_pages = 0
        self.told: list[tuple[list[int], Use, float]] = []

    def request(self, pages: Ids, use: Use, now: float) -> int:
        self.evicted_pages += len(pages)
        self.told.append((pages.tolist(), use, now))
        return 0


def test_a_page_is_hit_when_all_before_it_are_cached() -> None:
    result = lru(trace_of(CHAINS), 100, half="all")

    assert (result.score.pages, result.score.hit_pages) == (15, 0 + 2 + 0 + 3 + 2 + 1)
    assert result.score.block_hit_rate == 8 / 15
    assert result.by_tier == {"L1": 8 / 15}
    assert (result.evicted_pages, result.moved_pages) == (0, 7)


def test_the_second_half_is_scored_and_the_first_fills_the_cache() -> None:
    second, everything = (lru(trace_of(CHAINS), 100, half=half) for half in ("second", "all"))

    assert (second.score.requests, second.score.pages, second.score.hit_pages) == (3, 8, 6)
    assert everything.score.requests == 6
    assert second.moved_pages == 2


def test_evictions_of_requests_that_are_not_scored_do_not_count() -> None:
    model = Listening()

    result = replay(trace_of(CHAINS), model, "listening", 1)

    assert model.evicted_pages == 15
    assert result.evicted_pages == 8


def test_tokens_count_to_the_end_of_the_prompt() -> None:
    trace = replace(trace_of([[1, 2], [1, 2], [1, 2]]), input_tokens=np.array([20, 20, 50]))

    score = score_hits(trace, np.array([0, 2, 2]), 0)

    assert (score.tokens, score.hit_tokens) == (90, 20 + 32)  # of the last prompt 18 tokens have no page
    assert score.block_hit_rate == 4 / 6


def test_work_grows_with_depth() -> None:
    assert work(np.array([0, 1, 2, 3]), 16, 32).tolist() == [0, 1, 1 + 1.5, 1 + 1.5 + 2]


def test_compute_saved_weighs_a_hit_by_its_prefill() -> None:
    prices = Prices(page_bytes=1, recompute_s=0.02, load_s={"L1": 0.0}, double_tokens=32)

    result = lru(trace_of([[1, 2, 3, 4], [1, 2]]), 2, half="all", prices=prices)

    assert result.score.hit_pages == 2
    assert result.score.compute_saved == pytest.approx(2.5 / (7 + 2.5))
    assert result.time_saved == pytest.approx(result.score.compute_saved)


def test_time_saved_takes_off_what_loading_costs() -> None:
    prices = Prices(page_bytes=1, recompute_s=0.02, load_s={"L1": 0.01}, double_tokens=32)

    result = lru(trace_of([[1, 2, 3, 4], [1, 2]]), 2, half="all", prices=prices)

    assert result.time_saved == pytest.approx((2.5 - 2 * 0.5) / 9.5)


def test_costs_are_those_of_the_tokens_of_a_page() -> None:
    big, small = Prices.of(512), Prices.of(16)

    assert (big.recompute_s, big.load_s["L4"]) == (0.02, 0.011)
    assert small.page_bytes * 32 == big.page_bytes
    assert small.recompute_s * 32 == pytest.approx(big.recompute_s)
    assert small.costs(16).recompute_s(32768 / 16) == pytest.approx(2 * small.recompute_s)


def test_policies_hear_of_sessions_and_of_their_ends_if_clients_tell() -> None:
    trace = trace_of(CHAINS, s=3, o=7, f="tool_use", turn=2)
    silent, telling = Listening(), Listening()

    replay(trace, silent, "", 1)
    replay(trace, telling, "", 1, session_ends=True)

    assert [use.closed for _, use, _ in silent.told] == 6 * [False]
    assert [use.closed for _, use, _ in telling.told] == 5 * [False] + [True]
    pages, use, now = silent.told[3]
    assert (pages, now) == ([0, 1, 2, 5], 3.0)
    assert (use.pages, use.output_tokens, use.session, use.turn) == (4, 7, 4, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_without_pages_hits_none_and_changes_nothing(policy: str) -> None:
    chains: list[list[int]] = [[1, 2], [3], [1, 2, 4], [3, 5], [1, 2]]
    between = [part for chain in chains for part in (chain, [])]

    setup = Setup(policy, 3, half="all")
    with_empty = run_setup(trace_of(between, every_s=0.5), setup)
    without = run_setup(trace_of(chains), setup)

    assert with_empty.score.requests == 2 * without.score.requests
    assert with_empty.score.hit_pages == without.score.hit_pages


def test_progress_ends_at_all_pages() -> None:
    heard: list[int] = []

    for _ in requests(trace_of(CHAINS), tick=heard.append):
        pass

    assert heard == sorted(heard)
    assert heard[-1] == 15


def test_the_gap_is_measured_at_each_size_between_lru_and_belady() -> None:
    score = score_hits(trace_of(CHAINS), np.zeros(6, np.int64), 0)
    rows = [
        ("lru", 10, 3),
        ("rvi", 10, 6),
        ("belady", 10, 9),
        ("rvi", 20, 9),
        ("lru", 30, 5),
        ("belady", 30, 5),
    ]
    results = [
        replace(lru(trace_of(CHAINS), size), policy=name, score=replace(score, hit_pages=hits))
        for name, size, hits in rows
    ]

    gaps = [result.gap_closed for result in with_gaps(results)]

    assert gaps == [0, pytest.approx(0.5), 1, None, None, None]


def test_a_chain_closes_the_gap_from_a_chain_under_lru_to_belady_on_all_its_pages() -> None:
    score = score_hits(trace_of(CHAINS), np.zeros(6, np.int64), 0)
    tiers = {"L1": 2, "L2": 2, "L3": 2, "L4": 4}
    results = [
        replace(lru(trace_of(CHAINS), 10), policy=name, score=replace(score, hit_pages=hits), tiers=chain)
        for name, hits, chain in (("lru", 2, tiers), ("rvi", 4, tiers), ("belady", 10, None))
    ]

    assert [result.gap_closed for result in with_chain_gaps(results)] == [0, pytest.approx(0.25), 1]


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=12))
def test_an_infinite_cache_hits_all_that_was_used_before(chains: list[list[int]]) -> None:
    seen: set[tuple[int, ...]] = set()
    expected = 0
    for chain in chains:
        prefixes = [tuple(chain[: at + 1]) for at in range(len(chain))]
        expected += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    trace = trace_of(chains)

    assert infinite(trace, "all").score.hit_pages == expected
    assert lru(trace, len(seen) + 1, half="all").score.hit_pages == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_replays_and_hits_no_more_than_belady_can(policy: str) -> None:
    """Chains that come and go in a cache that is too small for them."""
    rng = np.random.default_rng(1)
    chains = [[int(rng.zipf(1.3)) % 40, *range(100, 100 + int(rng.integers(1, 6)))] for _ in range(400)]
    trace = trace_of(chains, f="end_turn")

    one, again = (run_setup(trace, Setup(policy, 30)) for _ in range(2))

    assert one == again
    best = run_setup(trace, Setup("belady", 30))
    assert 0 < one.score.hit_pages <= best.score.hit_pages
    assert best.score.hit_pages <= infinite(trace).score.hit_pages
    assert (one.policy, one.capacity_pages) == (policy, 30)


def test_policies_are_told_apart_by_name_and_settings() -> None:
    settings = PolicySettings(exponent=1.0)

    assert live_settings(settings, "rvi-noguard") == PolicySettings("rvi", exponent=1.0, guard=False)
    assert [live_settings(settings, name).name for name in LIVE] == ["rvi", "rvi", "score", "lru"]
    assert {"lru", "rvi", "belady", "arc", "s3fifo"} <= set(POLICIES)
    assert len(set(POLICIES)) == len(POLICIES)
