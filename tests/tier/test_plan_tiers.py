"""Tier sizes for a target: found by few replays, they are those that trying every size finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvtier.lab.plan.model_numbers import ModelNumbers, read_numbers
from kvtier.lab.plan.model_presets import PRESETS
from kvtier.lab.plan.plan import GB, Inputs
from kvtier.lab.plan.tiers import (
    SEARCH_RATIO,
    Rooms,
    Target,
    TierSizes,
    Unreachable,
    endurance,
    find_sizes,
    mean_ttft_s,
    prices_of,
    rooms_of,
)
from kvtier.lab.replay.replay import Prices, Result, infinite, replay
from kvtier.lab.traces.trace import Source, Trace, read_trace
from kvtier.tier.policy.base import Lru
from kvtier.tier.policy.ghost_cache import GhostCache

ROOMS = Rooms(l1_pages=20, l3_pages=50, page_bytes_gpu=1000, slot_bytes=2000)
PRICES = Prices(page_bytes=1000, recompute_s=10e-3, load_s={"L1": 0.0, "L2": 0.0, "L3": 1e-3, "L4": 5e-3})


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Conversations of growing length that come back in random order, with one prompt before all."""
    rng = np.random.default_rng(0)
    lines, turns = [], [0] * 30
    for request in range(300):
        session = int(rng.integers(30) * rng.random())  # some come back more often than others
        turns[session] += 1
        ids = [0, 1, 2, *(1000 * (session + 1) + page for page in range(2 + turns[session]))]
        lines.append(
            {"timestamp": 1000 * request, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}
        )
    return read_trace([Source("made", [json.dumps(line).encode() for line in lines])])


@pytest.fixture(scope="module")
def results(trace: Trace) -> dict[int, Result]:
    """lru at every size."""
    sizes = range(1, trace.distinct_pages + 1)
    return {n: replay(trace, GhostCache(Lru(), n), "lru", n, half="all", prices=PRICES) for n in sizes}


@pytest.fixture
def find(trace: Trace, results: dict[int, Result]) -> Callable[[Target], TierSizes]:
    """Search for a target; replays are looked up."""
    most = infinite(trace, "all", PRICES)
    return lambda target: find_sizes("lru", results.__getitem__, target, ROOMS, PRICES, most)


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.8])
def test_the_size_for_a_hit_rate_is_the_smallest_that_reaches_it(
    find: Callable[[Target], TierSizes], results: dict[int, Result], rate: float
) -> None:
    smallest = min(n for n, result in results.items() if result.score.block_hit_rate >= rate)

    found = find(Target(hit_rate=rate))

    assert found.result.score.block_hit_rate >= rate
    assert smallest <= found.capacity_pages <= max(smallest + 1, SEARCH_RATIO * smallest)
    assert found.l1_pages + found.l3_pages + found.l4_pages == found.capacity_pages
    assert found.l1_pages == min(20, found.capacity_pages) and found.l3_pages == min(
        50, found.capacity_pages - found.l1_pages
    )


def test_the_size_for_a_time_loads_what_lies_below_l1(
    find: Callable[[Target], TierSizes], results: dict[int, Result]
) -> None:
    def ttft_s(pages: int) -> float:
        score = results[pages].score
        in_l1, in_l3 = (results[min(pages, n)].score.hit_pages for n in (20, 70))
        loads = (in_l3 - in_l1) * 1e-3 + (score.hit_pages - in_l3) * 5e-3
        return ((score.work - score.hit_work) * 10e-3 + loads) / score.requests

    target_s = ttft_s(110)
    smallest = min(n for n in results if ttft_s(n) <= target_s)

    found = find(Target(ttft_s=target_s))

    assert found.ttft_s == pytest.approx(ttft_s(found.capacity_pages)) and found.ttft_s <= target_s
    assert smallest <= found.capacity_pages <= max(smallest + 1, SEARCH_RATIO * smallest)


def test_what_no_cache_reaches_says_what_an_endless_one_does(
    find: Callable[[Target], TierSizes], trace: Trace
) -> None:
    best = infinite(trace, "all", PRICES).score.block_hit_rate

    for target in (Target(hit_rate=best + 0.001), Target(ttft_s=1e-6)):
        with pytest.raises(Unreachable, match=f"hits {best:.4f}"):
            find(target)
    assert find(Target(hit_rate=best)).result.score.block_hit_rate >= best


def test_ssds_are_written_what_is_computed_or_what_leaves_the_tiers_above(
    find: Callable[[Target], TierSizes], results: dict[int, Result]
) -> None:
    small, large = find(Target(hit_rate=0.3)), find(Target(hit_rate=0.8))

    assert small.l4_pages == 0 and small.written_pages == {"through": 0, "demote": 0}
    score = large.result.score
    assert large.l4_pages > 0
    assert large.written_pages["through"] == score.pages - score.hit_pages
    assert large.written_pages["demote"] == min(large.written_pages["through"], results[70].evicted_pages)


def test_no_room_above_the_ssd_sends_all_of_it_there(trace: Trace, results: dict[int, Result]) -> None:
    nothing = replace(ROOMS, l1_pages=0, l3_pages=0)
    most = infinite(trace, "all", PRICES)

    found = find_sizes("lru", results.__getitem__, Target(hit_rate=0.5), nothing, PRICES, most)

    score = found.result.score
    assert found.l4_pages == found.capacity_pages
    assert found.written_pages["demote"] == found.written_pages["through"] == score.pages - score.hit_pages
    assert found.ttft_s == mean_ttft_s(found.result, 0, 0, PRICES)


def test_a_drive_written_at_its_rating_lives_as_long_as_its_warranty() -> None:
    a_day = 3.84e12

    life = endurance(a_day / 24, span_s=3600, tier_bytes=1e12, drive_tb=3.84, dwpd=1)

    assert (life.drives, life.bytes_a_day, life.drive_writes_a_day) == (1, a_day, 1)
    assert life.tbw == 3.84 * 365 * 5 and life.years == 5


def test_more_drives_share_the_writes_and_none_is_worn_by_nothing() -> None:
    life = endurance(3.84e12 / 24, span_s=3600, tier_bytes=10e12, drive_tb=3.84, dwpd=3)

    assert life.drives == 3 and life.years == pytest.approx(5 * 3 * 3)
    assert endurance(0, 3600, 0, 3.84, 1).years is None
    assert endurance(10, 0, 0, 3.84, 1).years is None  # a trace of one moment has no pace


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Target(), "one target"),
        (lambda: Target(0.5, 1.0), "one target"),
        (lambda: Target(hit_rate=1.5), "between 0 and 1"),
        (lambda: Target(ttft_s=0), "positive"),
        (lambda: endurance(1, 1, 1, 0, 1), "0 TB"),
        (lambda: endurance(1, 1, 1, 1, 0), "0 DWPD"),
    ],
)
def test_wishes_that_cannot_be_are_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


# ---- what a model makes of a trace's blocks --------------------------------------------------------------------------


def llama(**changes: object) -> tuple[ModelNumbers, Inputs]:
    """llama-3-8b on one GPU with 100 GB, in bf16."""
    model = read_numbers(PRESETS["llama-3-8b"], "llama-3-8b")
    given: dict[str, object] = {
        "hbm_bytes": 100 * GB,
        "weights_bytes": 16 * GB,
        "overhead": 0.1,
        "prompt_tokens": 4096,
        "output_tokens": 0,
        "format": "bf16",
        "page_tokens": 16,
        "tp": 1,
    }
    return model, Inputs(**{**given, **changes})  # type: ignore[arg-type]


def test_a_block_is_so_many_pages_each_with_its_envelope_below_l1() -> None:
    rooms = rooms_of(*llama(), trace_page_tokens=512, running=10, host_bytes=10 * GB)

    block, request = 512 * 131_072, 4096 * 131_072
    assert rooms.page_bytes_gpu == block
    assert rooms.slot_bytes == block + 32 * 4096
    assert rooms.l1_pages == (74 * GB - 10 * request) // block
    assert rooms.l3_pages == 10 * GB // rooms.slot_bytes


def test_each_gpu_holds_its_share_and_what_runs_may_leave_nothing() -> None:
    rooms = rooms_of(*llama(tp=4), trace_page_tokens=512, running=100_000, host_bytes=0)

    assert rooms.page_bytes_gpu == 512 * 131_072 // 4
    assert (rooms.l1_pages, rooms.l3_pages) == (0, 0)


def test_prices_follow_the_model_and_can_be_given() -> None:
    guess = prices_of(*llama(), trace_page_tokens=512, recompute_s=None)
    shared = prices_of(*llama(tp=2), trace_page_tokens=512, recompute_s=None)
    given = prices_of(*llama(format="fp8"), trace_page_tokens=512, recompute_s=1.0)

    assert guess.recompute_s == pytest.approx(20e-3, rel=0.01)  # the model that the default is for
    assert shared.recompute_s == guess.recompute_s / 2
    assert given.recompute_s == 1.0
    assert guess.load_s["L4"] == 11e-3
    assert given.load_s["L4"] == pytest.approx(11e-3 * 2080 / 4096)
