"""Which source each run of pages comes from, against all choices there are."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.node.remote.sources import L4, Compute, Plan, Prices, Run, Way, cheapest

FAST, SLOW = Way(1.0, 1.0), Way(1.0, 10.0)


def total_s(plan: Plan, first: int, last: int, runs: list[Run], prices: Prices) -> float:
    """When the first `last` pages are there, by the rule as it is written and no clever order."""
    asked, came_s, copied, at = [0] * len(prices.ways), 0.0, 0, first
    for run, way in zip(runs, plan.choices, strict=False):
        end = min(run.end, plan.end)
        assert (way is None) == (not run.ways) and (way is None or way in run.ways)
        if way is not None:
            asked[way] += 0 if run.is_coming else end - at
            came_s = max(came_s, prices.ways[way].start_s + asked[way] * prices.ways[way].page_s)
            copied += end - at
        at = end
    assert at == plan.end
    copying_s = min(copied, prices.batch) * prices.copy_s
    return came_s + copying_s + sum(page_s(prices.compute, page) for page in range(plan.end, last))


def page_s(compute: Compute, page: int) -> float:
    return compute.page_s * (1.0 + (page + 0.5) / compute.double_pages)


def all_plans(first: int, runs: list[Run]) -> list[Plan]:
    """Every prefix of whole runs, with every way of each."""
    return [
        Plan(runs[number - 1].end if number else first, list(choice))
        for number in range(len(runs) + 1)
        for choice in product(*(run.ways or (None,) for run in runs[:number]))
    ]


@st.composite
def cases(draw: st.DrawFn, ways: int = 3, choices: int = 3) -> tuple[int, int, list[Run], Prices]:
    first = end = draw(st.integers(0, 5))
    runs = []
    for _ in range(draw(st.integers(0, 5))):
        end += draw(st.integers(1, 9))
        numbers = draw(st.lists(st.integers(0, ways - 1), max_size=choices, unique=True))
        runs.append(Run(end, tuple(sorted(numbers)), len(numbers) == 1 and draw(st.booleans())))
    seconds = st.floats(0.0, 20.0)
    prices = Prices(
        [Way(draw(seconds), draw(st.floats(0.01, 5.0))) for _ in range(ways)],
        Compute(draw(st.floats(0.01, 8.0)), draw(st.sampled_from([inf, 1.0, 8.0]))),
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.integers(1, 4)),
    )
    return first, end + draw(st.integers(0, 6)), runs, prices


@given(cases(choices=1))
@settings(max_examples=400, deadline=None)
def test_where_each_run_has_one_way_no_prefix_is_there_sooner(
    case: tuple[int, int, list[Run], Prices],
) -> None:
    first, last, runs, prices = case

    plan = cheapest(first, last, runs, prices)

    best_s = min(total_s(other, first, last, runs, prices) for other in all_plans(first, runs))
    assert total_s(plan, first, last, runs, prices) == pytest.approx(best_s)


@given(cases())
@settings(max_examples=400, deadline=None)
def test_of_several_ways_the_plan_is_no_worse_than_any_one_alone_or_none(
    case: tuple[int, int, list[Run], Prices],
) -> None:
    first, last, runs, prices = case

    plan = cheapest(first, last, runs, prices)

    took_s = total_s(plan, first, last, runs, prices)
    for only in range(len(prices.ways)):
        for number, run in enumerate(runs, 1):
            if run.ways and only not in run.ways:
                break
            alone = Plan(run.end, [only if run.ways else None for run in runs[:number]])
            assert took_s <= total_s(alone, first, last, runs, prices) + 1e-9
    assert took_s <= total_s(Plan(first), first, last, runs, prices) + 1e-9


@given(cases(), st.floats(0.0, 60.0))
@settings(max_examples=300, deadline=None)
def test_what_comes_later_than_it_is_waited_for_is_not_asked_for(
    case: tuple[int, int, list[Run], Prices], patience_s: float
) -> None:
    first, last, runs, prices = case
    prices = Prices(
        prices.ways, prices.compute, prices.copy_s, prices.batch, prices.room, patience_s=patience_s
    )

    plan = cheapest(first, last, runs, prices)

    computed_s = sum(page_s(prices.compute, page) for page in range(plan.end, last))
    loaded_s = total_s(plan, first, last, runs, prices) - computed_s
    assert loaded_s <= patience_s + 1e-9
    assert (
        plan.end == first or loaded_s + computed_s <= total_s(Plan(first), first, last, runs, prices) + 1e-9
    )


def test_a_run_goes_where_it_comes_soonest_behind_what_is_asked_there_already() -> None:
    runs = [Run(10, (1,)), Run(20, (1, 2)), Run(30, (1, 2))]

    plan = cheapest(0, 30, runs, Prices([SLOW, FAST, Way(1.0, 1.5)], Compute(100.0)))

    assert (plan.end, plan.choices, plan.refused) == (30, [1, 2, 1], None)


def test_l4_is_preferred_while_something_else_takes_longer_anyhow() -> None:
    runs = [Run(30, (2,)), Run(32, (L4, 1))]

    plan = cheapest(0, 32, runs, Prices([SLOW, FAST, FAST], Compute(100.0)))

    assert plan.choices == [2, L4]


def test_a_node_that_failed_lately_gives_what_nothing_else_has() -> None:
    doubtful = Way(0.0, 0.1, is_doubtful=True)

    plan = cheapest(0, 20, [Run(10, (1, 2)), Run(20, (1,))], Prices([SLOW, doubtful, FAST], Compute(100.0)))

    assert plan.choices == [2, 1]


def test_a_run_too_dear_is_computed_with_all_behind_it_and_the_plan_says_what_it_would_take() -> None:
    runs = [Run(10, (1,)), Run(20, (L4,)), Run(22)]

    plan = cheapest(0, 22, runs, Prices([SLOW, FAST], Compute(2.0)))

    assert (plan.end, plan.choices) == (10, [1])
    assert plan.refused is not None
    assert (plan.refused.way, plan.refused.load_s, plan.refused.compute_s) == (L4, 101.0 - 11.0, 24.0)


def test_pages_that_are_here_behind_a_gap_pay_for_what_fills_it() -> None:
    gap, behind = Run(10, (L4,)), Run(60)

    alone = cheapest(0, 10, [gap], Prices([SLOW], Compute(2.0)))
    bridge = cheapest(0, 60, [gap, behind], Prices([SLOW], Compute(2.0)))

    assert (alone.end, bridge.end) == (0, 60)


def test_deep_pages_cost_more_to_compute() -> None:
    compute = Compute.at(3.0, depth=8.0, double_pages=4.0)

    assert compute.page_s == pytest.approx(1.0)
    assert compute.between(2, 5) == pytest.approx(sum(page_s(compute, page) for page in (2, 3, 4)))
    runs = [Run(10, (L4,))]
    assert cheapest(0, 10, runs, Prices([Way(0.0, 2.5)], Compute(1.0, 4.0))).end == 0
    assert cheapest(10, 20, [Run(20, (L4,))], Prices([Way(0.0, 2.5)], Compute(1.0, 4.0))).end == 20


def test_what_costs_nothing_to_wait_for_is_loaded_however_long_it_takes() -> None:
    plan = cheapest(0, 30, [Run(20, (L4,)), Run(30, (1,))], Prices([SLOW, SLOW], Compute(0.0)))

    assert (plan.end, plan.refused) == (30, None)


def test_more_pages_than_go_into_the_queue_end_the_plan() -> None:
    runs = [Run(10, (1,)), Run(20, (L4, 1)), Run(25, (1,))]

    plan = cheapest(0, 25, runs, Prices([SLOW, FAST], Compute(100.0), room=12))

    assert (plan.end, plan.choices, plan.is_full, plan.refused) == (20, [1, L4], True, None)


def test_loads_cost_nothing_while_the_worker_computes_for_others() -> None:
    runs = [Run(10, (1,))]
    dear = Prices([SLOW, FAST], Compute(0.5))

    idle = cheapest(0, 10, runs, dear)
    busy = cheapest(0, 10, runs, Prices([SLOW, FAST], Compute(0.5), busy_s=20.0))

    assert (idle.end, busy.end) == (0, 10)
