"""The baseline caches against plain models of themselves, on traces checked by hand, and against the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest
from baseline_models import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.lab.replay.baselines.belady import Future
from kvtier.lab.replay.baselines.cache import BaselineCache, Pages
from kvtier.lab.replay.baselines.page_queue import PageQueue
from kvtier.lab.replay.baselines.page_tree import PageTree
from kvtier.lab.replay.baselines.registry import BASELINES, make_baseline
from kvtier.lab.replay.baselines.turns import Turns
from kvtier.tier.policy.base import Kind, Lru, Use
from kvtier.tier.policy.ghost_cache import CacheModel, GhostCache

ONLINE = [name for name in BASELINES if name not in ("belady", "infinite")]


@dataclass
class Chains:
    """A trace's requests, each a chain of page ids, head first."""

    chains: list[list[int]]

    def __len__(self) -> int:
        return len(self.chains)

    def pages(self, request: int) -> Pages:
        return np.array(self.chains[request], np.int64)


def grow_chains(steps: Sequence[tuple[int, int, int]]) -> Chains:
    """Each step is a request that keeps some pages of an earlier one and goes on with new ones."""
    chains: list[list[int]] = []
    new = 0
    for earlier, keep, more in steps:
        stem = chains[earlier % len(chains)][:keep] if chains else []
        chains.append(stem + list(range(new, new + more)))
        new += more
    return Chains([chain for chain in chains if chain])


traces = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=60
).map(grow_chains)
short_traces = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6
).map(grow_chains)


def run(cache: CacheModel, trace: Chains) -> list[int]:
    """Hits of each request; they come a second apart."""
    pages = [trace.pages(i) for i in range(len(trace))]
    return [cache.request(p, Use(pages=p.size, new_pages=0), float(i)) for i, p in enumerate(pages)]


def run_singles(cache: BaselineCache, letters: str) -> str:
    """Requests for one page each, a letter; the letters that hit."""
    hits = run(cache, Chains([[ord(letter) - ord("a")] for letter in letters]))
    return "".join(letter if hit else "." for letter, hit in zip(letters, hits, strict=True))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None)
@given(trace=traces, capacity=st.integers(1, 40))
def test_a_cache_hits_and_holds_what_the_plain_model_does(name: str, trace: Chains, capacity: int) -> None:
    cache, model = make_baseline(name, capacity), MODELS[name](capacity)

    for i, chain in enumerate(trace.chains):
        hits = cache.request(trace.pages(i), Use(pages=len(chain), new_pages=0), float(i))

        assert hits == model.request(list(chain))
        assert cache.resident().tolist() == sorted(model.held)


@pytest.mark.parametrize("name", MODELS)
def test_a_large_cache_does_too(name: str) -> None:
    """Large enough for stretches of queues, holes in them, and ranks that are drawn but not all looked at."""
    rng = np.random.default_rng(7)
    steps = [(int(rng.integers(30) ** 2), int(rng.integers(60)), int(rng.integers(40))) for _ in range(180)]
    trace = grow_chains([(max(0, i - earlier), keep, new) for i, (earlier, keep, new) in enumerate(steps)])
    cache, model = make_baseline(name, 700), MODELS[name](700)

    hits = run(cache, trace)

    assert hits == [model.request(list(chain)) for chain in trace.chains]
    assert cache.resident().tolist() == sorted(model.held)
    assert cache.evicted_pages > 1000


@pytest.mark.parametrize(
    ("name", "capacity", "asked", "hit"),
    [
        ("fifo", 3, "abcadabc", "...a...."),  # a came first and leaves for d although it was just used
        ("lfu", 2, "aabcbcc", ".a....c"),  # b and c push each other out, until they were used as often as a
        ("slru", 5, "aabcdefa", ".a.....a"),  # a is protected from pages used once
        ("arc", 2, "aabcdba", ".a....a"),  # of T1 and T2 the first is over its target: b, c and d pass a by
        ("arc", 2, "aabcbca", ".a...c."),  # b was lost from T1: it gets room, at the cost of a
        ("s3fifo", 10, "aabcdefghijka", ".a..........a"),  # a was used in the small queue: on to the main one
        ("sieve", 3, "abcadebac", "...a...a."),  # the hand spares a once, takes b, c, d, and then e
        ("gdsf", 2, "aaabcdea", ".aa....a"),
        ("gdsf", 2, "aabcdea", ".a....."),  # two uses weigh no more than one after pages with one have left
        ("lirs", 3, "ababcdefab", "..ab....ab"),  # what is used once passes through the one cold place
    ],
)
def test_a_trace_checked_by_hand(name: str, capacity: int, asked: str, hit: str) -> None:
    assert run_singles(make_baseline(name, capacity), asked) == hit


def test_longest_first_evicts_from_the_longest_request() -> None:
    cache = make_baseline("length_first", 4)

    run(cache, Chains([[0], [1, 2, 3], [4, 5]]))

    assert cache.resident().tolist() == [0, 1, 4, 5]


def test_of_pages_used_equally_often_length_aware_evicts_the_deepest_and_lfu_the_oldest() -> None:
    trace = Chains([[0], [1, 2, 3]])
    length_aware, lfu = make_baseline("length_aware", 3), make_baseline("lfu", 3)

    run(length_aware, trace)
    run(lfu, trace)

    assert length_aware.resident().tolist() == [0, 1, 2]
    assert lfu.resident().tolist() == [1, 2, 3]


def test_belady_lets_a_page_pass_that_is_used_again_last() -> None:
    trace = Chains([[0], [1], [2], [0], [1], [3]])
    cache = make_baseline("belady", 2, trace)

    assert run(cache, trace) == [0, 0, 0, 1, 1, 0]


def test_belady_refuses_a_request_that_its_future_does_not_hold() -> None:
    cache = make_baseline("belady", 2, Chains([[0, 1]]))

    with pytest.raises(ValueError, match="request 0 with 1 pages"):
        run(cache, Chains([[0]]))


def test_the_future_names_the_next_request_of_each_page() -> None:
    future = Future.of(Chains([[0, 1], [0], [2], [0, 1]]))

    assert future.next_use.tolist() == [1, 3, 3, 4, 4, 4]
    assert future.starts.tolist() == [0, 2, 3, 4, 6]


def test_wa_evicts_pages_of_a_sort_that_does_not_come_back() -> None:
    """Pages that wait for a tool are asked for again; those of ended turns never were."""
    cache = make_baseline("wa", 3)
    tool, turn = Use(1, 0, kind=Kind.TOOL, turn=1), Use(1, 0, kind=Kind.TURN, turn=1)
    for now, (page, use) in enumerate([(0, tool), (0, tool), (1, turn), (2, turn), (0, tool), (3, turn)]):
        cache.request(np.array([page]), use, float(now))

    cache.request(np.array([4]), turn, 6.0)

    assert cache.resident().tolist() == [0, 3, 4]


def test_wa_evicts_no_page_before_one_that_hangs_on_it() -> None:
    """Page 0 was used last by a request of a sort that doesn't come back, page 1 behind it still waits for a tool."""
    cache = make_baseline("wa", 3)
    tool, turn = Use(2, 0, kind=Kind.TOOL, turn=1), Use(1, 0, kind=Kind.TURN, turn=1)
    for now in range(0, 60, 10):
        cache.request(np.array([0, 1]), tool, float(now))

    for i, page in enumerate([2, 3, 4, 0, 5, 6]):
        cache.request(np.array([page]), turn, 50.0 + i / 10)

    assert cache.resident().tolist() == [0, 1, 6]


def test_a_page_waits_for_those_that_hang_on_it_and_then_goes_before_all_that_rank_higher() -> None:
    tree = PageTree()
    tree.grow(8)
    tree.arrive(np.array([0, 1, 2]), np.array([False, False, False]))
    tree.arrive(np.array([0, 3]), np.array([True, False]))
    tree.arrive(np.array([4]), np.array([False]))

    assert tree.leaves_first(np.array([0, 3, 1, 2, 4]), 5).tolist() == [3, 2, 1, 0, 4]
    assert tree.leaves_first(np.array([0, 1, 3, 4]), 5).tolist() == [3, 4]
    tree.leave(np.array([2, 1]))
    assert tree.leaves_first(np.array([0, 3, 4]), 2).tolist() == [3, 0]


@settings(max_examples=60, deadline=None)
@given(trace=traces, capacity=st.integers(1, 40))
def test_wa_keeps_whole_chains_and_hits_what_it_holds(trace: Chains, capacity: int) -> None:
    cache = make_baseline("wa", capacity)
    above = {page: up for chain in trace.chains for up, page in pairwise(chain)}

    for i, chain in enumerate(trace.chains):
        before = set(cache.resident().tolist())
        hits = cache.request(trace.pages(i), Use(len(chain), 0, kind=Kind(i % 4)), float(i))

        assert hits == len(before & set(chain))
        held = set(cache.resident().tolist())
        assert all(above[page] in held for page in held & above.keys())


def test_wa_evicts_least_recently_used_pages_of_one_sort() -> None:
    cache = make_baseline("wa", 3)

    run(cache, Chains([[0], [1], [2], [0], [3]]))

    assert cache.resident().tolist() == [0, 2, 3]


def test_a_turn_follows_the_last_request_of_its_chain_and_shared_prompts_begin_again() -> None:
    turns = Turns()
    turns.grow(16)

    first, second = turns.next(np.array([0, 1]), 0), turns.next(np.array([0, 1, 2]), 0)
    told = turns.next(np.array([0, 1, 3]), 7)
    after_told, shared = turns.next(np.array([0, 1, 3, 4]), 0), turns.next(np.array([0, 1, 5]), 0)

    assert (first, second, told, after_told) == (1, 2, 7, 8)
    assert shared == 9  # two continuations yet, and the last request that used it was turn 8
    assert turns.next(np.array([0, 1, 6]), 0) == 1


@settings(max_examples=150, deadline=None)
@given(trace=traces, capacity=st.integers(1, 40))
def test_nothing_hits_more_than_belady_or_what_was_never_used_or_holds_too_much(
    trace: Chains, capacity: int
) -> None:
    ever = run(make_baseline("infinite", 1), trace)
    best = sum(run(make_baseline("belady", capacity, trace), trace))

    assert sum(run(GhostCache(Lru(), capacity), trace)) <= best
    for name in (*ONLINE, "belady"):
        cache = make_baseline(name, capacity, trace)
        hits = run(cache, trace)

        assert all(hit <= bound for hit, bound in zip(hits, ever, strict=True)), name
        assert sum(hits) <= best, name
        assert cache.num_resident == cache.resident().size <= capacity, name


@settings(max_examples=150, deadline=None)
@given(trace=short_traces, capacity=st.integers(1, 3))
def test_no_choice_of_pages_to_keep_hits_more_than_belady(trace: Chains, capacity: int) -> None:
    best = {frozenset[int](): 0}  # pages kept -> most hits on the way
    for chain in trace.chains:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += next((i for i, page in enumerate(chain) if page not in kept), len(chain))
            pages = kept | set(chain)
            for left in combinations(sorted(pages), min(capacity, len(pages))):
                after[frozenset(left)] = max(hits, after.get(frozenset(left), 0))
        best = after

    assert sum(run(make_baseline("belady", capacity, trace), trace)) == max(best.values())


@settings(max_examples=50, deadline=None)
@given(trace=traces, capacity=st.integers(1, 40), name=st.sampled_from(ONLINE))
def test_the_same_requests_hit_the_same(trace: Chains, capacity: int, name: str) -> None:
    first, second = make_baseline(name, capacity), make_baseline(name, capacity)

    assert run(first, trace) == run(second, trace)
    assert first.resident().tolist() == second.resident().tolist()
    assert first.evicted_pages == second.evicted_pages


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**32)), max_size=60))
def test_a_queue_keeps_the_order_of_arrivals(steps: list[tuple[bool, int]]) -> None:
    queue, model = PageQueue(), list[int]()
    queue.grow(400)
    for takes, seed in steps:
        pages = np.random.default_rng(seed).permutation(400)[: seed % 130]
        if takes:
            pages = pages[queue.holds(pages)]
            queue.remove(pages)
        else:
            queue.append(pages)
        model = [page for page in model if page not in set(pages.tolist())] + (
            [] if takes else pages.tolist()
        )
        count = seed % 50

        assert queue.oldest(count).tolist() == model[:count]
        if model:
            middle = model[len(model) // 2]
            assert queue.following(middle, count).tolist() == model[len(model) // 2 :][:count]

    assert queue.pop(len(queue)).tolist() == model
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("name", "why"), [("belady", "needs the requests"), ("clock", "no baseline is called")]
)
def test_a_baseline_that_cannot_be_made_says_why(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_baseline(name, 10)


def test_a_cache_of_no_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="got a capacity of 0"):
        make_baseline("arc", 0)
