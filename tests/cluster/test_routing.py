"""Which worker a request goes to, and who its node is told of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.routing import MAX_REMOTES, Costs, Held, Load, Policy, Speed, WorkerView, choose

PAGE = 16
COSTS = Costs(token_s=1e-3)


def worker(name: str, node: str = "n0", queued: int = 0, sequences: int = 0, chosen: int = 0) -> WorkerView:
    return WorkerView(name, node, Load(queued, sequences), chosen)


def l1(name: str, pages: int, node: str = "n0") -> Held:
    return Held(node, name, "L1", f"{node}:1", pages)


def below(node: str, pages: int, tier: str = "L3") -> Held:
    return Held(node, "", tier, f"{node}:1", pages)


def chosen(workers: list[WorkerView], held: list[Held] = [], tokens: int = 64 * PAGE) -> str:  # noqa: B006
    return choose(tokens, PAGE, workers, held, COSTS).worker_id


def test_a_conversation_stays_where_its_pages_are() -> None:
    workers = [worker("a"), worker("b"), worker("c", "n1")]

    assert chosen(workers, [l1("b", 40), below("n0", 40), below("n1", 40)]) == "b"
    assert chosen(workers, [below("n1", 40, "L4")]) == "c"


def test_a_worker_with_the_pages_does_not_drown() -> None:
    """Its queue counts: from some length on, computing the prompt elsewhere is sooner."""
    held = [l1("b", 60)]

    assert chosen([worker("a"), worker("b", queued=800, sequences=3)], held) == "b"
    assert chosen([worker("a"), worker("b", queued=1200, sequences=3)], held) == "a"


def test_answers_under_way_count_the_more_the_longer_the_prompt() -> None:
    """A page of everybody's system prompt draws no long prompts past an idle worker."""
    workers, held = [worker("a"), worker("b", sequences=2)], [l1("b", 1)]

    assert chosen(workers, held, tokens=2 * PAGE) == "a"
    assert chosen([worker("a"), worker("b", sequences=1)], held, tokens=2 * PAGE) == "b"
    assert chosen([worker("a"), worker("b", sequences=1)], held, tokens=64 * PAGE) == "a"


def test_of_a_thousand_workers_the_one_with_the_pages_takes_it() -> None:
    workers = [worker(f"w{i}", f"n{i // 8}", queued=i, sequences=i % 5, chosen=i) for i in range(1000)]

    # Without addresses nothing goes from node to node.
    assert chosen(workers, [Held("n87", "w700", "L1", "", 50), Held("n3", "", "L3", "", 4)]) == "w700"
    assert chosen(workers, [Held("n3", "", "L3", "", 50)]) == "w25"
    assert chosen(workers) == "w0"


def test_a_shorter_prefix_nearby_beats_a_long_one_that_is_slow_to_load() -> None:
    slow = replace(COSTS, l4_page_s=0.015)
    workers = [worker("a"), worker("c", "n1")]
    held = [l1("a", 30), below("n1", 31, "L4")]

    assert choose(64 * PAGE, PAGE, workers, held, slow).worker_id == "a"


def test_a_tier_that_is_slower_than_computing_counts_for_nothing() -> None:
    useless = replace(COSTS, l4_page_s=1.0, remote_page_s=1.0)
    plan = choose(64 * PAGE, PAGE, [worker("a")], [below("n0", 60, "L4"), below("n1", 60)], useless)

    assert plan.computed_tokens == 64 * PAGE


def test_tiers_of_a_node_add_up_the_nearest_first_and_another_node_has_the_rest() -> None:
    held = [l1("a", 10), below("n0", 20, "L3"), below("n0", 30, "L4"), below("n1", 50)]

    choice = choose(64 * PAGE, PAGE, [worker("a")], held, COSTS)

    assert choice.computed_tokens == 14 * PAGE
    assert choice.remotes == (("n1", "n1:1", 50),)


def test_the_last_token_is_always_computed() -> None:
    assert choose(4 * PAGE, PAGE, [worker("a")], [l1("a", 4)], COSTS).computed_tokens == 1


def test_equal_workers_take_turns_those_with_fewer_sequences_first() -> None:
    # A prompt so long that sequences don't decide.
    idle = replace(COSTS, sequence_tokens=0.0)
    busy, late, early = (
        worker("busy", sequences=2),
        worker("late", sequences=1, chosen=9),
        worker("early", sequences=1, chosen=3),
    )

    assert choose(PAGE, PAGE, [busy, late, early], [], idle).worker_id == "early"
    assert choose(PAGE, PAGE, [busy, late], [], idle).worker_id == "late"


def test_only_nodes_that_have_more_and_can_be_reached_are_told_the_best_first() -> None:
    held = [
        *(below("n0", 10), l1("a", 12), l1("z", 60, "n9")),  # what only L1 of another node has can't be sent
        *(below(f"n{i}", 10 + i) for i in range(1, 7)),
        Held("n8", "", "L3", "", 50),
        below("n5", 40, "L4"),
    ]

    choice = choose(64 * PAGE, PAGE, [worker("a")], held, COSTS)

    assert choice.remotes == (("n5", "n5:1", 40), ("n6", "n6:1", 16), ("n4", "n4:1", 14))
    assert len(choice.remotes) == MAX_REMOTES


@pytest.mark.parametrize(
    ("policy", "expected"), [("prefix", "warm"), ("least_loaded", "idle"), ("round_robin", "longest ago")]
)
def test_policies_go_by_what_they_are_named_for(policy: Policy, expected: str) -> None:
    workers = [
        worker("warm", queued=100, sequences=2, chosen=7),
        worker("idle", sequences=1, chosen=8),
        worker("longest ago", queued=300, sequences=3, chosen=1),
    ]

    far = replace(COSTS, remote_page_s=0.01)
    choice = choose(64 * PAGE, PAGE, workers, [l1("warm", 60), below("n1", 61)], far, policy)

    assert choice.worker_id == expected
    assert choice.remotes == (("n1", "n1:1", 61),)


def test_nobody_to_choose_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker"):
        choose(1, PAGE, [], [], COSTS)


def test_what_tokens_cost_is_measured() -> None:
    speed = Speed(COSTS)
    for _ in range(100):
        speed.measure(1000, 0.05)
    assert speed.costs.token_s == pytest.approx(5e-5)
    speed.measure(0, 1.0)
    speed.measure(5, 0.0)
    assert speed.costs.token_s == pytest.approx(5e-5)


workers_strategy = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 20)), min_size=1, max_size=8
)
held_strategy = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["L1", "L2", "L3", "L4"]), st.integers(0, 7), st.integers(0, 80)
    ),
    max_size=12,
)


@settings(deadline=None)
@given(views=workers_strategy, facts=held_strategy, tokens=st.integers(1, 64 * PAGE))
def test_a_choice_is_one_of_the_workers_and_its_numbers_can_be(
    views: list[tuple[int, int, int]], facts: list[tuple[int, str, int, int]], tokens: int
) -> None:
    workers = [
        worker(f"w{i}", f"n{node}", queued, sequences, i) for i, (node, queued, sequences) in enumerate(views)
    ]
    held = [
        Held(f"n{node}", f"w{w}" if tier == "L1" else "", tier, f"n{node}:1", pages)
        for node, tier, w, pages in facts
    ]

    choice = choose(tokens, PAGE, workers, held, COSTS)

    best = next(one for one in workers if one.worker_id == choice.worker_id)
    assert 1 <= choice.computed_tokens <= tokens
    assert all(node != best.node_id for node, _, _ in choice.remotes)
    pages = [pages for _, _, pages in choice.remotes]
    assert pages == sorted(pages, reverse=True)
    # Nobody with less to do and as much at hand is passed over.
    for other in workers:
        if other.node_id == best.node_id and not any(one.worker_id for one in held):
            load, own = other.load, best.load
            has_more = load.queued_tokens > own.queued_tokens or load.sequences > own.sequences
            assert has_more or load == own
