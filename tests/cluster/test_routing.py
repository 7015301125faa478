"""Which worker a request goes to, and who its node is told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.directory.locations import Held
from kvtier.cluster.routing.fleet import Fleet
from kvtier.cluster.routing.router import MAX_REMOTES, Choice, Costs, Policy, Speed, choose

PAGE = 16
COSTS = Costs(token_s=1e-3)


@dataclass(frozen=True)
class Worker:
    name: str
    node: str
    queued: int
    sequences: int
    chosen: int


def worker(name: str, node: str = "n0", queued: int = 0, sequences: int = 0, chosen: int = 0) -> Worker:
    return Worker(name, node, queued, sequences, chosen)


def fleet_of(workers: Sequence[Worker]) -> Fleet:
    fleet = Fleet()
    for one in workers:
        load = fleet.add(one.name, one.node)
        load.queued_tokens, load.sequences, load.chosen = one.queued, one.sequences, one.chosen
    return fleet


def l1(name: str, pages: int, node: str = "n0") -> Held:
    return Held(node, name, "L1", f"{node}:1", pages)


def below(node: str, pages: int, tier: str = "L3") -> Held:
    return Held(node, "", tier, f"{node}:1", pages)


def chosen(workers: list[Worker], held: list[Held] = [], tokens: int = 64 * PAGE) -> str:  # noqa: B006
    return choose(tokens, PAGE, fleet_of(workers), held, COSTS).worker_id


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
    """A page of all tenants' system prompt draws no long prompts past an idle worker."""
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

    assert choose(64 * PAGE, PAGE, fleet_of(workers), held, slow).worker_id == "a"


def test_a_tier_that_is_slower_than_computing_counts_for_nothing() -> None:
    useless = replace(COSTS, l4_page_s=1.0, remote_page_s=1.0)
    plan = choose(64 * PAGE, PAGE, fleet_of([worker("a")]), [below("n0", 60, "L4"), below("n1", 60)], useless)

    assert plan.computed_tokens == 64 * PAGE


def test_tiers_of_a_node_add_up_the_nearest_first_and_another_node_has_the_rest() -> None:
    held = [l1("a", 10), below("n0", 20, "L3"), below("n0", 30, "L4"), below("n1", 50)]

    choice = choose(64 * PAGE, PAGE, fleet_of([worker("a")]), held, COSTS)

    assert choice.computed_tokens == 14 * PAGE
    assert choice.remotes == (("n1", "n1:1", 50),)


def test_the_last_token_is_always_computed() -> None:
    assert choose(4 * PAGE, PAGE, fleet_of([worker("a")]), [l1("a", 4)], COSTS).computed_tokens == 1


def test_equal_workers_take_turns_those_with_fewer_sequences_first() -> None:
    # A prompt so long that sequences don't decide.
    idle = replace(COSTS, sequence_tokens=0.0)
    busy, late, early = (
        worker("busy", sequences=2),
        worker("late", sequences=1, chosen=9),
        worker("early", sequences=1, chosen=3),
    )

    assert choose(PAGE, PAGE, fleet_of([busy, late, early]), [], idle).worker_id == "early"
    assert choose(PAGE, PAGE, fleet_of([busy, late]), [], idle).worker_id == "late"


def test_only_nodes_that_have_more_and_can_be_reached_are_told_the_best_first() -> None:
    held = [
        *(below("n0", 10), l1("a", 12), l1("z", 60, "n9")),  # no such worker is there any more
        *(below(f"n{i}", 10 + i) for i in range(1, 7)),
        Held("n8", "", "L3", "", 50),
        below("n5", 40, "L4"),
    ]

    choice = choose(64 * PAGE, PAGE, fleet_of([worker("a")]), held, COSTS)

    assert choice.remotes == (("n5", "n5:1", 40), ("n6", "n6:1", 16), ("n4", "n4:1", 14))
    assert len(choice.remotes) == MAX_REMOTES


def test_pages_that_only_a_worker_of_another_node_has_are_sent_too_for_what_saving_them_takes() -> None:
    workers = [worker("a", queued=0), worker("b", "n1", queued=20 * PAGE)]
    held = [below("n1", 20), l1("b", 50, "n1")]

    for l3_page_s, computed in ((COSTS.l3_page_s, 14 * PAGE), (1.0, 64 * PAGE)):
        costs = replace(COSTS, l3_page_s=l3_page_s)
        choice = choose(64 * PAGE, PAGE, fleet_of(workers), held, costs, "least_loaded")
        assert (choice.worker_id, choice.computed_tokens) == ("a", computed)
        assert choice.remotes == (("n1", "n1:1", 50),)


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
    choice = choose(64 * PAGE, PAGE, fleet_of(workers), [l1("warm", 60), below("n1", 61)], far, policy)

    assert choice.worker_id == expected
    assert choice.remotes == (("n1", "n1:1", 61),)


def test_nothing_to_choose_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker"):
        choose(1, PAGE, Fleet(), [], COSTS)


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

    choice = choose(tokens, PAGE, fleet_of(workers), held, COSTS)

    best = next(one for one in workers if one.name == choice.worker_id)
    assert 1 <= choice.computed_tokens <= tokens
    assert all(node != best.node for node, _, _ in choice.remotes)
    pages = [pages for _, _, pages in choice.remotes]
    assert pages == sorted(pages, reverse=True)
    # Nothing with less to do and as much at hand is passed over.
    for other in workers:
        if other.node == best.node and not any(one.worker_id for one in held):
            has_more = other.queued > best.queued or other.sequences > best.sequences
            assert has_more or (other.queued, other.sequences) == (best.queued, best.sequences)


# ---- as the formula says ---------------------------------------------------------------------------------------


def plain(
    tokens: int,
    workers: Sequence[Worker],
    held: Sequence[Held],
    costs: Costs,
    policy: Policy,
    present: Sequence[Worker],
) -> Choice:
    """choose among `workers`, one by one; `present` are all that are there."""
    nodes: dict[str, dict[str, int]] = {}
    above: dict[str, int] = {}
    addresses: dict[str, str] = {}
    own_pages: dict[str, int] = {}
    for one in held:
        if one.worker_id and any(one.worker_id == other.name for other in present):
            if one.pages <= own_pages.get(one.worker_id, 0):
                continue
            own_pages[one.worker_id] = one.pages
            above[one.node_id] = max(one.pages, above.get(one.node_id, 0))
        elif not one.worker_id and one.tier in ("L2", "L3", "L4"):
            tiers = nodes.setdefault(one.node_id, {})
            tiers[one.tier] = max(one.pages, tiers.get(one.tier, 0))
        else:
            continue
        addresses[one.node_id] = one.address or addresses.get(one.node_id, "")
    saved = {name: max([0, *nodes.get(name, {}).values()]) for name in addresses}
    senders = sorted(
        (-max(saved[name], above.get(name, 0)), -saved[name], name)
        for name, address in addresses.items()
        if address and (saved[name] or above.get(name))
    )

    def own(one: Worker) -> int:
        return max((fact.pages for fact in held if fact.worker_id == one.name), default=0)

    def plan(one: Worker) -> tuple[float, int]:
        at, seconds, page_s = own(one), 0.0, costs.token_s * PAGE
        for tier in ("L2", "L3", "L4"):
            pages = nodes.get(one.node, {}).get(tier, 0) - at
            if pages > 0 and costs.page_s(tier) < page_s:
                at, seconds = at + pages, seconds + pages * costs.page_s(tier)
        reach, below = next(((-less, -under) for less, under, name in senders if name != one.node), (0, 0))
        pages = reach - at
        transfer_s = costs.remote_s + pages * costs.remote_page_s
        transfer_s += max(0, reach - max(at, below)) * costs.l3_page_s
        if pages > 0 and transfer_s < pages * page_s:
            at, seconds = at + pages, seconds + transfer_s
        return seconds, max(1, tokens - at * PAGE)

    def first_token_s(one: Worker) -> float:
        load_s, computed = plan(one)
        compute_s = computed * costs.token_s + one.queued * costs.token_s
        answers_s = one.sequences * (costs.sequence_tokens * costs.token_s)
        return load_s + compute_s * (1.0 + one.sequences * costs.sequence_share) + answers_s

    ranks = {
        "prefix": lambda one: (first_token_s(one), one.sequences, one.chosen),
        "least_loaded": lambda one: (one.queued, one.sequences, one.chosen),
        "round_robin": lambda one: (one.chosen,),
    }
    best = min(workers, key=ranks[policy])
    here = max(own(best), *nodes.get(best.node, {}).values(), 0)
    remotes = [
        (name, addresses[name], -less) for less, _, name in senders if name != best.node and -less > here
    ]
    return Choice(best.name, tuple(remotes[:MAX_REMOTES]), plan(best)[1])


facts_strategy = st.lists(
    st.builds(
        Held,
        st.integers(0, 5).map("n{}".format),
        st.one_of(st.just(""), st.integers(0, 25).map("w{}".format)),
        st.sampled_from(["L1", "L2", "L3", "L4"]),
        st.sampled_from(["", "here:1", "there:2"]),
        st.integers(0, 80),
    ),
    max_size=20,
)
costs_strategy = st.builds(
    Costs,
    token_s=st.sampled_from([1e-5, 1e-3, 0.02]),
    l3_page_s=st.sampled_from([2e-5, 0.01]),
    l4_page_s=st.sampled_from([5e-5, 0.02]),
    remote_page_s=st.sampled_from([2e-4, 0.01]),
    remote_s=st.sampled_from([0.0, 2e-3]),
    sequence_tokens=st.sampled_from([0.0, 8.0]),
)


@settings(deadline=None)
@given(
    nodes=st.lists(st.integers(0, 4), min_size=1, max_size=24),
    data=st.data(),
    held=facts_strategy,
    tokens=st.integers(1, 90 * PAGE),
    costs=costs_strategy,
    policy=st.sampled_from(["prefix", "least_loaded", "round_robin"]),
)
def test_what_is_chosen_is_what_the_formula_says(
    nodes: list[int], data: st.DataObject, held: list[Held], tokens: int, costs: Costs, policy: Policy
) -> None:
    count = st.sampled_from([0, 0, 1, 2, 500])  # few values, so that many are equally good
    workers = [
        Worker(f"w{i}", f"n{node}", *data.draw(st.tuples(count, count, st.integers(0, 4))))
        for i, node in enumerate(nodes)
    ]
    fleet = fleet_of(workers)
    able = data.draw(st.sets(st.sampled_from(range(len(workers))), min_size=1))

    among = [workers[i] for i in sorted(able)]
    rows = np.array([fleet.rows[i] for i in sorted(able)])

    for able_rows, able_workers in ((rows, among), (None, workers)):
        expected = plain(tokens, able_workers, held, costs, policy, workers)
        assert choose(tokens, PAGE, fleet, held, costs, policy, able_rows) == expected
