"""RVI: what it learns, what it is worth to keep a page, and that its owner can do to runs what the interface allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.policy.base import Costs, Kind, PolicySettings, Use
from kvtier.tier.policy.ghost_cache import GhostCache
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.policy.rvi.reuse_intervals import NONE, slots
from kvtier.tier.policy.rvi.reuse_model import AGES, EDGES, WIDTHS, ReuseModel, best_rates

requests = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 30),
        st.integers(0, 2),
        st.sampled_from(Kind),
        st.integers(0, 3),
        st.booleans(),
        st.floats(0.0, 500.0),
    ),
    min_size=1,
    max_size=60,
)


def chain(stem: int, length: int, tail: int) -> np.ndarray:
    """Pages of one of four stems, of which up to three tails hang at every length."""
    own = 400 + stem * 90 + length * 3 + tail
    return np.append(stem * 100 + np.arange(length), own)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 60), st.sampled_from([(4, 1), (4, 2), (64, 1)]))
def test_its_rows_follow_the_runs_of_its_owner(
    asked: list[tuple[int, int, int, Kind, int, bool, float]], capacity: int, draw: tuple[int, int]
) -> None:
    policy = Rvi(PolicySettings(draw=draw[0], per_draw=draw[1], ghosts=2.0))
    cache, now = GhostCache(policy, capacity), 0.0

    for stem, length, tail, kind, session, closed, wait in asked:
        now += wait
        cache.request(chain(stem, length, tail), Use(0, 0, length, kind, 0, session, closed), now)
        cache.check()
        policy.check(now)

    assert (
        sum(policy.run_pages(run.row) for run in cache._runs.values())
        == cache.resident_pages + cache.ghost_pages
    )


def best_by_trying(hazard: np.ndarray, start: int) -> float:
    """The best ratio over all ends of hits to seconds, page by page of the definition."""
    best, alive, hits, seconds = 0.0, 1.0, 0.0, 0.0
    for age in range(start, AGES):
        seconds += alive * WIDTHS[age] * (1 - hazard[age] / 2)
        hits += alive * hazard[age]
        alive *= 1 - hazard[age]
        best = max(best, hits / seconds)
    return best


@given(st.lists(st.floats(0.0, 1.0), min_size=AGES, max_size=AGES))
def test_the_index_is_the_best_rate_over_all_times_of_keeping(hazard: list[float]) -> None:
    index = best_rates(np.array([hazard]))[0]

    assert index == pytest.approx([best_by_trying(np.array(hazard), age) for age in range(AGES)], rel=1e-9)


@given(st.integers(0, 400), st.integers(1, 600), st.booleans())
def test_slots_count_every_page_where_it_lies(behind: int, pages: int, last: bool) -> None:
    found = slots(np.array([behind]), np.array([pages]), np.array([last]))[0]

    inner = range(behind + last, behind + pages)
    edges = [2 * 2.2**i for i in range(7)]
    expected = [sum(sum(x >= edge for edge in edges) == bucket for x in inner) for bucket in range(8)]
    assert found.tolist() == [*expected, int(last)]


def replay(policy: Rvi, capacity: int, rng: np.random.Generator, count: int, base: int = 0) -> list[int]:
    """Chains of 4 pages: those of kind TOOL come again after about 10 s, those of kind TURN never. All page ids used."""
    cache, hits = GhostCache(policy, capacity), []
    again: list[tuple[float, int, int]] = []
    for number in range(count):
        now = float(number)
        if again and again[0][0] <= now:
            _, start, left = again.pop(0)
        else:
            start, left = base + number * 4, 3 * int(rng.integers(0, 2))
        kind = Kind.TOOL if left else Kind.TURN
        hits.append(cache.request(np.arange(start, start + 4), Use(0, 0, 10, kind), now))
        if left:
            again.append((now + 10 + float(rng.uniform(0, 2)), start, left - 1))
            again.sort()
    cache.check()
    return hits


def test_it_learns_which_stop_reason_brings_pages_back() -> None:
    policy = Rvi(PolicySettings())

    hits = replay(policy, 40, np.random.default_rng(1), 4000)

    rows = [policy.add(1, 0, 1, 1, 4000.0) for _ in range(2)]
    for row, kind in zip(rows, (Kind.TOOL, Kind.TURN), strict=True):
        policy.release([row], [0], Use(4, 4, 10, kind), 4000.0)
    tool, turn = (policy.value(row, 4005.0) for row in rows)
    assert tool > 5 * turn
    assert sum(hits[2000:]) > 1.3 * sum(hits[:500]) * 4 or sum(hits[2000:]) > 0.5 * 4 * 2000


def test_nothing_but_what_has_happened_is_learned_from() -> None:
    """Two streams that part after a while give the same values up to there."""
    first, second = Rvi(PolicySettings()), Rvi(PolicySettings())
    replay(first, 40, np.random.default_rng(1), 1000)
    replay(second, 40, np.random.default_rng(1), 1000)
    before = first.hazard.index.copy()

    replay(second, 40, np.random.default_rng(2), 200, base=10**5)

    assert (first.hazard.index == before).all()
    assert not (second.hazard.weights == first.hazard.weights).all()


def test_one_seed_gives_one_result() -> None:
    runs = [
        replay(Rvi(PolicySettings(seed=3, draw=4, per_draw=1)), 20, np.random.default_rng(5), 600)
        for _ in range(2)
    ]

    assert runs[0] == runs[1]


def one_page(policy: Rvi, depth: int = 0, nbytes: int = 1, **use: object) -> int:
    row = policy.add(1, depth, nbytes, 1, 0.0)
    policy.release([row], [0], Use(depth + 1, 1, **use), 0.0)  # type: ignore[arg-type]
    return row


def test_deeper_and_smaller_pages_are_worth_more_by_the_exponent() -> None:
    policy = Rvi(PolicySettings(exponent=0.5))
    policy.costs = Costs(page_s=0.02, double_pages=100)
    head, deep, large = one_page(policy), one_page(policy), one_page(policy, nbytes=4)
    policy._depth[deep] = 300
    policy._tail_changed(deep)

    value = policy.value(head, 10.0)

    assert policy.value(deep, 10.0) == pytest.approx(2 * value)  # sqrt of 4 times the cost
    assert policy.value(large, 10.0) == pytest.approx(value / 4)
    assert policy.value(head, 10.0, load_s=0.015) == pytest.approx(value / 2)
    assert policy.value(head, 10.0, load_s=0.03) == 0.0


@pytest.mark.parametrize("exponent", [0.0, 0.25, 1.0])
def test_what_takes_longer_to_load_than_to_compute_is_worth_nothing(exponent: float) -> None:
    policy = Rvi(PolicySettings(exponent=exponent))
    policy.costs = Costs(page_s=0.01)

    assert policy.value(one_page(policy), 1.0, load_s=0.011) == 0.0


def test_costs_that_were_not_measured_make_all_pages_alike() -> None:
    policy = Rvi(PolicySettings(exponent=1.0))

    assert policy.value(one_page(policy), 1.0, load_s=0.5) == policy.value(one_page(policy), 1.0) > 0.0


@pytest.mark.parametrize("exponent", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("page_s", [0.0, 0.02])
def test_the_value_of_one_run_is_that_among_many(exponent: float, page_s: float) -> None:
    policy = Rvi(PolicySettings(exponent=exponent))
    replay(policy, 30, np.random.default_rng(4), 300)
    policy.costs = Costs(page_s)
    rows = [policy.add(n, n, n, n, 0.0) for n in range(1, 40)]
    for n, row in enumerate(rows):
        policy.release([row], [n], Use(n, n, n, Kind(n % 4), session=n % 3, closed=n % 5 == 0), 300.0 + n)

    for now in (340.0, 341.0, 400.0, 1e4, 1e7):
        for load_s in (0.0, 0.021):
            many = policy.worth(np.array(rows), now, load_s)
            assert [policy.value(row, now, load_s) for row in rows] == pytest.approx(many.tolist())


def test_the_value_of_a_page_falls_while_it_is_idle() -> None:
    policy = Rvi(PolicySettings())
    row = one_page(policy)

    values = [policy.value(row, now) for now in (1.0, 10.0, 100.0, 1e4)]

    assert values == sorted(values, reverse=True)


def test_a_closed_session_s_own_runs_leave_first_and_a_shared_one_stays() -> None:
    policy = Rvi(PolicySettings(draw=2, per_draw=1))
    cache = GhostCache(policy, 300)
    for session in range(1, 41):
        cache.request(
            np.array([0, *range(session * 6, session * 6 + 5)]), Use(0, 0, session=session), float(session)
        )

    cache.request(np.array([0, *range(42, 47)]), Use(0, 0, session=7, closed=True), 50.0)
    cache.request(np.arange(1000, 1104), Use(0, 0, session=99), 51.0)

    assert not any(cache.is_resident(page) for page in range(42, 47))
    assert cache.is_resident(0)


def test_a_session_that_goes_on_is_worth_more() -> None:
    policy = Rvi(PolicySettings())

    assert policy.value(one_page(policy, open=True), 1.0) > policy.value(one_page(policy), 1.0)


def test_described_with_score_idle_time_and_uses() -> None:
    policy = Rvi(PolicySettings())
    row = one_page(policy)

    assert policy.describe(row, 12.0).startswith("rvi, score = ")
    assert policy.describe(row, 12.0).endswith("(idle 12.0 s, 1 uses)")


def test_the_log_of_releases_is_bounded_and_what_fell_out_is_not_learned_from() -> None:
    from kvtier.tier.policy.rvi.reuse_intervals import ReuseIntervals

    learned = ReuseModel()
    policy = Rvi(PolicySettings())
    policy._releases = ReuseIntervals(learned, capacity=16)
    rows = [policy.add(1, 0, 1, 1, 0.0) for _ in range(100)]

    for now, row in enumerate(rows):
        policy.release([row], [0], Use(1, 1), float(now))
    policy.reuse(rows[:50], 101.0)
    policy._releases.learn(101.0)

    assert policy._releases.count == 100
    assert len(policy._releases._time) == 32
    assert learned._hits.sum() == 0.0
    assert (policy._release[rows[:50]] == NONE).all()


def test_hits_and_time_at_risk_are_counted_once_each() -> None:
    policy = Rvi(PolicySettings())
    row = policy.add(10, 0, 1, 10, 0.0)
    policy.release([row], [0], Use(10, 10), 0.0)
    policy._releases.learn(3.5)  # edges at 0, 2 and 3 s
    policy.reuse([row], 5.0)  # in the bucket from 4.5 s on
    policy._releases.learn(9.0)
    rate = policy.hazard._rate

    assert policy.hazard._hits.sum() == pytest.approx(10 * rate)
    reached = policy.hazard._at_risk.sum(axis=0) > 0
    assert reached.tolist() == [edge <= 5.0 for edge in EDGES.tolist()]
