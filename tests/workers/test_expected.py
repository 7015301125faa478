"""What a worker measures and estimates: cost of prefill by depth, tokens still to come, turns of sessions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.workers.requests.api import EngineRequest, SamplingParams
from kvtier.workers.requests.output_length import CLASSES, Expected
from kvtier.workers.requests.sessions import Turns
from kvtier.workers.runner.prefill_costs import LARGEST, PrefillCosts

PAGE_TOKENS = 16


def request(max_tokens: int = 1000, tenant: str = "t", guess: int = 0, tools: bool = False) -> EngineRequest:
    return EngineRequest(
        "r",
        tenant,
        (1,),
        SamplingParams(max_tokens=max_tokens),
        expected_output_tokens=guess,
        tool_stop_ids=(5,) if tools else (),
    )


def measured(
    rows: list[tuple[int, int]], token_s: float, double_tokens: float, noise: float = 0.0
) -> tuple[float, float]:
    rng = random.Random(0)
    costs = PrefillCosts(PAGE_TOKENS)
    for start, length in rows:
        pairs = length * (start + length / 2)
        seconds = token_s * (length + pairs / double_tokens) * (1 + rng.uniform(-noise, noise))
        costs.measure([(start, length)], seconds)
    return costs.costs.page_s, costs.costs.double_pages


@given(
    token_s=st.floats(1e-6, 1e-2),
    double_tokens=st.floats(2_000, 100_000),
    chunk=st.sampled_from([64, 512, 2048]),
)
def test_the_cost_of_a_page_at_any_depth_is_found_from_the_steps_of_long_prompts(
    token_s: float, double_tokens: float, chunk: int
) -> None:
    rows = [(start, chunk) for start in range(0, 16 * 2048, chunk)][-200:]

    page_s, double_pages = measured(rows, token_s, double_tokens)

    for depth in (rows[0][0] // PAGE_TOKENS, rows[-1][0] // PAGE_TOKENS):
        true = token_s * PAGE_TOKENS * (1 + depth * PAGE_TOKENS / double_tokens)
        assert page_s * (1 + depth / double_pages) == pytest.approx(true, rel=0.1)


def test_steps_of_one_kind_leave_the_depth_to_what_is_taken_for_granted() -> None:
    page_s, double_pages = measured([(0, 256)] * 20, 1e-4, 32768.0, noise=0.05)

    assert page_s == pytest.approx(1e-4 * PAGE_TOKENS, rel=0.1)
    assert double_pages == pytest.approx(2048.0, rel=0.05)


def test_attention_that_costs_nothing_gives_a_cost_that_depth_does_not_change() -> None:
    page_s, double_pages = measured([(start, 512) for start in range(0, 16384, 512)], 1e-4, 1e12)

    assert page_s == pytest.approx(1e-4 * PAGE_TOKENS, rel=0.01)
    assert 1e5 < double_pages <= LARGEST


def test_the_costs_follow_a_machine_that_got_slower() -> None:
    costs = PrefillCosts(PAGE_TOKENS)
    for i in range(400):
        start = 512 * (i % 8)
        costs.measure([(start, 512)], (1e-4 if i < 100 else 3e-4) * (512 + 512 * (start + 256) / 32768))

    assert costs.costs.page_s == pytest.approx(3e-4 * PAGE_TOKENS, rel=0.05)


def test_without_answers_half_of_what_is_allowed_is_expected() -> None:
    assert Expected().remaining(request(), 0, 1000) == 500


def test_what_is_still_to_come_is_learned_by_class() -> None:
    expected = Expected()
    for _ in range(100):
        expected.learn(request(), 50)
        expected.learn(request(tenant="long"), 900)

    assert 40 < expected.remaining(request(), 0, 1000) < 80
    assert 700 < expected.remaining(request(tenant="long"), 100, 900) <= 900
    assert expected.remaining(request(tools=True), 0, 1000) == 500


def test_an_answer_longer_than_most_is_expected_to_go_on_as_the_longest_did() -> None:
    expected = Expected()
    for tokens in [20] * 300 + [400] * 100:
        expected.learn(request(), tokens)

    assert expected.remaining(request(), 0, 1000) < 150
    assert 250 < expected.remaining(request(), 60, 940) < 400


def test_the_clients_guess_goes_first_until_it_is_reached() -> None:
    expected = Expected()
    assert expected.remaining(request(guess=30), 10, 990) == 20
    assert expected.remaining(request(guess=30), 10, 5) == 5
    assert expected.remaining(request(guess=30), 30, 970) == 485


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 4000)), max_size=50),
    st.integers(0, 3000),
    st.integers(0, 5000),
)
def test_what_is_expected_is_never_more_than_what_is_allowed(
    answers: list[tuple[int, int]], tokens: int, most: int
) -> None:
    expected = Expected()
    for number, length in answers:
        expected.learn(request(tenant=str(number)), length)
        expected.learn(request(), length)

    left = expected.remaining(request(), tokens, most)

    assert 0 <= left <= most
    assert (left > 0) == (most > 0)


def test_classes_are_bounded() -> None:
    expected = Expected()
    for i in range(CLASSES + 10):
        expected.learn(request(tenant=str(i)), 5)

    assert len(expected) == CLASSES
    assert expected.remaining(request(tenant="0"), 0, 100) == 50


def test_turns_are_counted_by_session_taken_as_told_and_forgotten_when_it_is_over() -> None:
    turns = Turns(most=2)

    assert [turns.count(7, 0, closed=False) for _ in range(3)] == [1, 2, 3]
    assert turns.count(7, 9, closed=False) == 9
    assert turns.count(7, 0, closed=True) == 10
    assert turns.count(7, 0, closed=False) == 1
    assert turns.count(0, 0, closed=False) == 0
    assert turns.count(0, 4, closed=False) == 4
    for session in (8, 9):
        turns.count(session, 0, closed=False)
    assert len(turns) == 2
    assert turns.count(7, 0, closed=False) == 1
