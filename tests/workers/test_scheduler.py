"""The scheduler and its page table against a model of L1 that knows which token's keys and values lie where."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_kit import PLAIN, TENANT, Machine, expected, namespace_of

from kvtier.tier.pages.page import PageKey
from kvtier.tier.policy.base import ScoreWeights
from kvtier.workers.requests.api import FinishReason


def keys(made: Machine) -> list[PageKey]:
    """Keys of all cached pages, each behind the one before it in its chain."""
    return [record.key for record, _ in made.table.cached()]


def machine(capacity: int = 32, **changes: int | bool) -> Machine:
    shape = {"page_tokens": 4, "max_batch_tokens": 16, "max_sequences": 4, **changes}
    return Machine(capacity, rng=Random(0), **shape)  # type: ignore[arg-type]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Machine, list[tuple[int, list[int], int, int, bool]]]:
    """A small machine and requests that fit it, many with a prefix in common: (step, prompt, max_tokens, n, cached)."""
    page_tokens = draw(st.sampled_from([1, 2, 4, 8]))
    capacity = draw(st.integers(3, 24))
    has_node = draw(st.sampled_from([True, True, False]))
    made = Machine(
        capacity,
        page_tokens,
        max_batch_tokens=draw(st.integers(4, 40)),
        max_sequences=draw(st.integers(2, 4)),
        rng=Random(draw(st.integers(0, 2**32))),
        has_node=has_node,
        slots=draw(st.sampled_from([0, 2, 100, 100])) if has_node else 0,
        margin=draw(st.sampled_from([0, 0, 1, capacity // 2])),
        rvi=draw(st.booleans()),
        shares=draw(st.sampled_from([{}, {TENANT: 0.5}, {TENANT: 0.01}])),
    )
    shared = draw(st.lists(st.integers(0, 3), max_size=capacity * page_tokens // 2))
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        room = capacity * page_tokens
        max_tokens = draw(st.integers(1, max(1, min(room - 1, 30))))
        longest = room - max_tokens + 1
        head = shared[: draw(st.integers(0, len(shared)))]
        prompt = (head + draw(st.lists(st.integers(0, 3), min_size=1, max_size=20)))[:longest]
        step = draw(st.integers(0, 10))
        requests.append((step, prompt, max_tokens, draw(st.integers(1, 3)), draw(st.booleans())))
    return made, sorted(requests, key=lambda r: r[0])


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_any_workload_ends_with_the_right_tokens_within_all_bounds(
    workload: tuple[Machine, list[tuple[int, list[int], int, int, bool]]],
) -> None:
    made, requests = workload
    for i, (step, prompt, max_tokens, n, use_cache) in enumerate(requests):
        while made.now < step and made.scheduler.unfinished:
            made.step()
        made.scheduler.check_fits(len(prompt), max_tokens, PLAIN)
        made.submit(str(i), prompt, max_tokens, n, use_cache)
    made.run()
    for i, (_, prompt, max_tokens, n, _) in enumerate(requests):
        for index in range(n):
            assert made.outputs[str(i), index] == expected(prompt, max_tokens, index)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_cancelling_at_any_moment_leaks_no_page(
    workload: tuple[Machine, list[tuple[int, list[int], int, int, bool]]], rng: Random
) -> None:
    made, requests = workload
    for i, (_, prompt, max_tokens, n, use_cache) in enumerate(requests):
        made.submit(str(i), prompt, max_tokens, n, use_cache)
    for _ in range(40):
        if not made.scheduler.unfinished:
            break
        made.step()
        alive = made.scheduler.active + made.scheduler.waiting
        if alive and rng.random() < 0.4:
            seq = rng.choice(alive)
            made.end(seq, FinishReason.CANCELLED)
            made.scheduler.check()
    made.run()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_the_weights_nothing_is_preempted_again_and_again_for_younger_ones(seed: int) -> None:
    """The machine checks at each step who is preempted and who goes first."""
    rng = Random(seed)
    capacity, page_tokens = rng.randint(6, 30), rng.choice([1, 1, 2])
    weights = ScoreWeights(*(rng.choice([-1.0, 0.0, 1.0]) for _ in range(3)))
    made = Machine(
        *(capacity, page_tokens, 16, rng.choice([4, 6, 8]), rng),
        has_node=rng.random() < 0.5,
        slots=100,
        weights=weights,
    )
    answers = [min(rng.randint(3, 40), capacity * page_tokens) for _ in range(rng.randint(4, 20))]
    for i, tokens in enumerate(answers):
        made.submit(str(i), [i], tokens)

    made.run()

    for i, tokens in enumerate(answers):
        assert made.outputs[str(i), 0] == expected([i], tokens)


def test_decode_rows_come_before_prefill_chunks() -> None:
    made = machine(has_node=False)
    made.submit("old", [1] * 4, 8)
    made.step()
    made.submit("new", [2] * 40, 1)

    step = made.scheduler.schedule(2.0, can_load=False, free_slots={})

    assert [(row.seq.request.spec.request_id, row.length) for row in step.rows] == [("old", 1), ("new", 15)]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    made = machine(capacity=4)
    made.scheduler.check_fits(12, 5, PLAIN)
    with pytest.raises(
        ValueError,
        match=r"prompt of 13 tokens and max_tokens 5 need 5 pages of 4 tokens at once, 5 bytes; L1 has 4 \(tiers.l1.bytes\)$",
    ):
        made.scheduler.check_fits(13, 5, PLAIN)


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    made = machine(capacity=200, max_batch_tokens=64, max_sequences=8, has_node=False)
    prefix = [7] * 40
    for i in range(8):
        made.submit(str(i), [*prefix, i], 2)

    made.run()

    assert made.computed_rows < len(prefix) + 8 * (made.page_tokens + 2)
    assert made.table.evicted_pages == 0


def test_what_is_preempted_comes_back_without_recompute_while_l3_has_room() -> None:
    made = machine(capacity=12, slots=100, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 14, 30)
    made.submit("b", [2] * 14, 30)

    made.run()

    assert made.scheduler.preemptions > 0
    assert made.outputs["a", 0] == expected([1] * 14, 30)
    assert made.outputs["b", 0] == expected([2] * 14, 30)
    assert made.computed_rows == 2 * (14 + 29)  # each token once: the last one sampled is never computed


def test_a_partial_page_that_found_no_slot_is_not_asked_for_when_its_sequence_comes_back() -> None:
    """The machine checks it at each step."""
    made = machine(capacity=12, slots=0, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 16, 28)
    b = made.submit("b", [2] * 14, 30).sequences[0]
    while b.preemptions == 0:
        made.step()
    assert (b.length - 1) % made.page_tokens  # its last page was not full

    made.run()


def test_a_request_is_admitted_only_where_those_that_run_can_each_have_one_page_more() -> None:
    """Else it would be preempted for them at once. Of three pages the first fills two, and the second needs one."""
    made = machine(capacity=3, has_node=False)
    made.submit("grows", [1] * 5, 5)
    made.step()
    made.submit("waits", [2] * 2, 4)

    made.run()

    assert made.scheduler.preemptions == 0


def test_without_l3_what_is_preempted_is_recomputed() -> None:
    made = machine(capacity=12, has_node=False, slots=0, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 14, 30)
    made.submit("b", [2] * 14, 30)

    made.run()

    assert made.scheduler.preemptions > 0
    assert made.outputs["b", 0] == expected([2] * 14, 30)


def test_the_oldest_running_sequence_is_never_preempted() -> None:
    made = machine(capacity=12, has_node=False, slots=0, max_sequences=4, max_batch_tokens=32)
    old = made.submit("old", [1] * 8, 38)
    for i in range(3):
        made.submit(str(i), [i + 2] * 8, 2)

    made.run()

    assert old.preemptions == 0


def test_preemption_takes_the_one_with_most_tokens_to_go() -> None:
    made = machine(capacity=16, has_node=False, slots=0, max_sequences=3, max_batch_tokens=32)
    made.submit("old", [1] * 8, 30)
    long = made.submit("long", [2] * 8, 50)
    short = made.submit("short", [3] * 8, 12)

    made.run()

    assert long.preemptions > 0
    assert short.preemptions == 0


def test_a_whole_prompt_in_l1_still_computes_its_last_token() -> None:
    made = machine()
    prompt = list(range(16))
    made.submit("first", prompt, 1)
    made.run()
    before = made.computed_rows
    again = made.submit("again", prompt, 1)

    made.run()

    assert made.computed_rows == before + 1
    assert again.usage is not None
    assert again.usage.cached_tokens["L1"] == 15
    assert again.usage.computed_tokens == 1


def test_the_shared_head_of_a_page_is_copied_not_shared() -> None:
    made = machine()
    made.submit("first", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    made.run()
    second = made.submit("second", [1, 2, 3, 4, 5, 6, 9, 9, 9], 1)

    made.run()

    assert second.usage is not None
    assert second.usage.cached_tokens["L1"] == 6


def test_a_head_is_copied_before_a_sibling_takes_its_page() -> None:
    """A load ends during a step, and its sequence is to start from the head of a cached page; then a fork in that same
    step evicts the page and fills the frame at once, so that the head, copied a step later, was the sibling's.
    """
    made = machine(capacity=3, slots=0)
    made.submit("cached", [1, 2, 3, 4], 1)
    made.run()
    loads = made.submit("loads", [1, 2, 9, 9], 1)
    made.submit("forks", [5], 1, n=2)
    step = made.scheduler.schedule(made.now, can_load=True, free_slots={})
    (row,) = step.rows
    made.answer(loads.sequences[0])
    made.compute(row)
    made.scheduler.advance(row, made.now)
    made.sample(row.seq)

    made.run()

    assert made.table.evicted_pages == 1
    assert loads.usage is not None
    assert loads.usage.cached_tokens["L1"] == 2


def test_siblings_share_the_prompt_which_counts_once() -> None:
    made = machine(has_node=False)
    request = made.submit("r", [1] * 10, 6, n=3)

    made.run()

    assert made.computed_rows == 10 + 3 * 5
    assert request.usage is not None
    assert request.usage.computed_tokens == 10


def test_preemption_changes_nothing_in_the_usage() -> None:
    made = machine(capacity=12, slots=100, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 14, 30)
    b = made.submit("b", [2] * 14, 30)

    made.run()

    assert b.preemptions + made.requests[0].preemptions > 0
    assert b.usage is not None
    assert b.usage.computed_tokens == 14


def test_an_uncached_request_leaves_nothing_behind() -> None:
    made = machine()
    made.submit("a", [1] * 14, 4, n=2, use_cache=False)

    made.run()

    assert made.table.index.num_pages == 0
    assert made.table.used_bytes == 0


def test_pinned_pages_stay_until_a_request_needs_their_room() -> None:
    made = machine(capacity=8, has_node=False)
    made.submit("a", [1] * 16, 1)
    made.run()
    cached = keys(made)
    assert made.table.pin(cached[-1]) is True
    made.submit("b", [2] * 15, 1)
    made.run()
    assert set(cached) <= set(keys(made))

    made.submit("c", [3] * 31, 1)
    made.run()

    assert not set(cached) & set(keys(made))
    assert not made.table.pinned


def test_half_of_l1_can_be_pinned_and_no_page_more() -> None:
    made = machine(capacity=8, has_node=False)
    made.submit("a", [1] * 23, 1)
    made.run()
    cached = keys(made)
    assert len(cached) == 5

    assert [made.table.pin(key) for key in cached] == [True] * 4 + [False]
    assert made.table.pin(cached[0]) is True  # one that is pinned stays so
    assert made.table.unpin(cached[0], made.now)
    assert made.table.pin(cached[4]) is True


def test_clearing_a_tree_undoes_its_pins_and_no_others() -> None:
    made = machine(has_node=False)
    other = namespace_of("other", PLAIN)
    cleared = made.submit("a", [1] * 9, 1).namespace.tree
    made.submit("b", [1] * 9, 1, namespace=other)
    made.run()
    records = [record for record, _ in made.table.cached()]
    for record in records:
        assert made.table.pin(record.key)

    assert made.table.clear(cleared, made.now) == (2, 0)

    kept = {record.key for record in records if record.tree == other.tree}
    assert len(kept) == 2
    assert set(keys(made)) == set(made.table.pinned) == kept
    made.scheduler.check()


def test_a_cleared_tree_is_not_found_and_goes_with_its_last_holder() -> None:
    made = machine(has_node=False)
    made.submit("a", [1] * 8, 20)
    made.step()
    tree = made.requests[0].namespace.tree
    gone, held = made.table.clear(tree, made.now)
    assert (gone, held) == (0, 2)
    assert not any(made.table.has(key) for key in keys(made))

    made.run()

    assert made.table.index.num_pages == 0
    assert not made.table.is_dead(tree)


def test_an_evicted_page_in_use_goes_when_its_users_end() -> None:
    made = machine(has_node=False)
    made.submit("a", [1] * 8, 20)
    made.step()
    key = keys(made)[0]
    assert made.table.remove(key, made.now) is False

    made.run()

    assert not made.table.has(key)


def test_duplicate_pages_are_given_up_for_the_cached_ones() -> None:
    """Two sequences whose claims don't meet, since one follows another prompt's output, may compute the same page."""
    made = machine(has_node=False)
    tokens = np.array(expected([1] * 4, 8), np.int32)
    made.submit("a", [1] * 4, 9)
    for _ in range(3):
        made.step()
    made.submit("b", [1] * 4 + tokens.tolist(), 3)

    made.run()

    assert made.outputs["b", 0] == expected([1] * 4 + tokens.tolist(), 3)
