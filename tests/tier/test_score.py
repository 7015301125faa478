"""The policies by name, LRU's order and the three-term score."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.policy.base import GONE, SHARED, Costs, Lru, PolicySettings, ScoreWeights, Use, joint_session
from kvtier.tier.policy.ghost_cache import GhostCache
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.registry import make_policy, policy_names
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.policy.weighted import WeightedScore


def test_every_policy_is_made_by_its_name_and_others_are_refused_with_the_choices() -> None:
    made = {name: make_policy(PolicySettings(name=name), 100).name for name in policy_names()}

    assert made == {name: name for name in policy_names()}
    with pytest.raises(ValueError, match=r"must be one of rvi, score, lru, got 'mru'"):
        make_policy(PolicySettings(name="mru"), 100)


def test_the_guard_is_left_out_when_it_is_switched_off() -> None:
    guarded, bare = (make_policy(PolicySettings(guard=guard), 100) for guard in (True, False))

    assert isinstance(guarded, Guarded)
    assert type(bare) is Rvi


@given(st.lists(st.integers(0, 3), max_size=6))
def test_a_run_belongs_to_a_session_as_long_as_no_other_uses_it(sessions: list[int]) -> None:
    owner = 0
    for session in sessions:
        owner = joint_session(owner, session)

    users = set(sessions)
    assert owner == (0 if not users else SHARED if len(users) > 1 or 0 in users else sessions[0])


@pytest.mark.parametrize("name", ["lru", "score", "rvi"])
def test_a_closed_session_takes_no_pages_with_it_that_requests_without_a_session_have_used(name: str) -> None:
    """What was used by them first, such as a common beginning, passed for the session's own and went with it."""
    policy = make_policy(PolicySettings(name=name, guard=False), 4)
    common, own = (policy.add(1, depth, 1, 1, 0.0) for depth in (0, 1))
    policy.release([common], [0], Use(1, 1), 1.0)
    policy.reuse([common], 2.0)
    policy.release([common, own], [1, 0], Use(2, 1, session=7, closed=True), 3.0)

    assert policy.value(common, 4.0) > max(policy.value(own, 4.0), 0.0)


def test_lru_takes_the_tail_of_the_oldest_chain_first() -> None:
    lru = Lru()
    leaves = lru.candidates()
    old, deep, new = (lru.add(2, depth, 1, 2, 0.0) for depth in (0, 2, 0))
    for row, now in ((old, 1.0), (deep, 1.0), (new, 2.0)):
        lru.release([row], [0], Use(2, 2), now)
        leaves.add(row)

    first = leaves.victims(5, 3.0)[0]
    leaves.discard(deep)
    second = leaves.victims(1, 3.0)[0]

    assert (first.row, first.pages) == (deep, 2)
    assert (second.row, second.pages) == (old, 1)
    assert lru.describe(old, 3.0) == "lru, score = idle 2.0 s"


def test_lru_values_nothing_of_a_closed_session() -> None:
    lru = Lru()
    row = lru.add(1, 0, 1, 1, 0.0)
    lru.release([row], [0], Use(1, 1, session=4, closed=True), 5.0)

    assert lru.value(row, 6.0) == GONE
    assert lru.describe(row, 6.0) == "lru, score = its session is closed"


def test_costs_double_where_attention_costs_what_linear_layers_do() -> None:
    costs = Costs(page_s=0.02, double_pages=64)

    assert costs.recompute_s(0) == 0.02
    assert costs.recompute_s(64) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        (ScoreWeights(1.0, 0.0, 0.0), "recent"),
        (ScoreWeights(0.0, 1.0, 0.0), "long"),
        (ScoreWeights(0.0, 0.0, 1.0), "talkative"),
    ],
)
def test_each_term_of_the_score_keeps_what_it_is_for(weights: ScoreWeights, kept: str) -> None:
    policy = WeightedScore(PolicySettings(weights=weights))
    uses = {
        "recent": (500.0, Use(10, 10, 10)),
        "long": (1.0, Use(200, 9, 10)),
        "talkative": (2.0, Use(10, 9, 900)),
    }
    rows = {}
    for name, (now, use) in uses.items():
        rows[name] = policy.add(1, 0, 1, 1, 0.0)
        policy.release([rows[name]], [0], use, now)

    values = {name: policy.value(row, 600.0) for name, row in rows.items()}

    assert max(values, key=values.__getitem__) == kept
    assert all(0.0 <= value <= 1.0 for value in values.values())


def test_the_terms_add_up_as_described() -> None:
    policy = WeightedScore(PolicySettings(weights=ScoreWeights(0.5, 0.2, 0.3)))
    row = policy.add(1, 0, 1, 1, 0.0)
    policy.release([row], [0], Use(128, 1, 1024), 0.0)

    assert policy.value(row, 600.0) == pytest.approx(0.5 * 0.5 + 0.2 * 0.5 + 0.3 * 0.5)
    assert policy.describe(row, 600.0) == "score, score = 0.500 (idle 600.0 s)"


requests = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(1, 30), st.sampled_from(policy_names()))
def test_every_policy_keeps_to_the_capacity_and_to_whole_prefixes(
    asked: list[tuple[int, int, bool]], capacity: int, name: str
) -> None:
    cache = GhostCache(make_policy(PolicySettings(name=name, draw=4, per_draw=1), capacity), capacity)

    for now, (stem, length, closed) in enumerate(asked):
        pages = np.append(stem * 100 + np.arange(length), 400 + stem * 20 + length)
        known = [cache.is_resident(page) for page in pages.tolist()]
        hits = cache.request(pages, Use(0, 0, session=length, closed=closed), float(now))
        cache.check()

        assert hits == sum(known) and all(known[:hits])
