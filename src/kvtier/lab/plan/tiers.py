"""How large the tiers must be for a hit rate or a time to the first token, found by replaying a trace. Pure.

The search treats all tiers as one cache of so many pages, which is what a chain holds that demotes (`tiers.write:
demote`). With copies in every tier (`through`) the lowest one must have that size alone, and so L4 is given all of it.
What a smaller cache would have hit is taken to be hit in the upper tiers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvtier.lab.plan.model_numbers import ModelNumbers
from kvtier.lab.plan.plan import Inputs, kv_heads_gpu, recipe_of, spec_of, stored_page_bytes, sums
from kvtier.lab.replay.replay import LOAD_S, PAGE_RECOMPUTE_S, PAGE_TOKENS, TOKEN_BYTES, Prices, Result

SEARCH_RATIO = 1.02  # the size found is at most so much too large
WARRANTY_YEARS = 5  # drive writes a day are promised for so long
DAY_S, DAYS = 86_400, 365  # of a day and of a year
TB = 10**12
_PRICED_PARAMETERS = 8e9  # of the model that the default prices are for

Replay = Callable[[int], Result]  # of one policy at so many pages, at least one


class Unreachable(ValueError):
    """No cache reaches the target on this trace; the message says what an infinite one does."""


@dataclass(frozen=True, slots=True)
class Target:
    """One of both: hit pages over all pages, or the mean time until the prompt is in the cache, in seconds."""

    hit_rate: float | None = None
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        if (self.hit_rate is None) == (self.ttft_s is None):
            raise ValueError("name one target: a hit rate or a time to the first token")
        if self.hit_rate is not None and not 0 < self.hit_rate < 1:
            raise ValueError(f"a hit rate lies between 0 and 1, got {self.hit_rate:g}")
        if self.ttft_s is not None and not self.ttft_s > 0:
            raise ValueError(f"a time to the first token must be positive, got {1e3 * self.ttft_s:g} ms")


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the tiers above the SSD can hold, in pages of the trace, and what such a page takes in bytes."""

    l1_pages: int
    l3_pages: int
    page_bytes_gpu: int  # in each GPU's L1
    slot_bytes: int  # in L3 and L4, with its envelope


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The smallest tiers that reach the target under one policy. Pages are the trace's."""

    policy: str
    capacity_pages: int
    l1_pages: int
    l3_pages: int
    l4_pages: int  # when pages are demoted; with `through` it is capacity_pages
    result: Result
    ttft_s: float
    written_pages: dict[str, int]  # to the SSD in the scored part of the trace, by tiers.write


@dataclass(frozen=True, slots=True)
class Endurance:
    """SSD writes. `years` is None where nothing is written."""

    drives: int
    bytes_a_day: float
    drive_writes_a_day: float
    tbw: float  # bytes that all the drives may take, in TB
    years: float | None


def rooms_of(
    model: ModelNumbers, inputs: Inputs, trace_page_tokens: int, running: int, host_bytes: int
) -> Rooms:
    """L1 is what HBM has left beside `running` requests, L3 the host memory given to it."""
    part = trace_page_tokens / inputs.page_tokens
    _, slot = stored_page_bytes(model, inputs.format, inputs.page_tokens)
    recipe = recipe_of(inputs.format, inputs.page_tokens)
    heads = kv_heads_gpu(model, inputs.tp)
    kept = recipe.decayed or recipe.write
    page = sum(spec_of(model, kind, kept, inputs.page_tokens, heads).nbytes for kind in model.kinds)
    left = inputs.room_bytes_gpu - running * sums(model, inputs, inputs.format).paged_bytes_gpu
    return Rooms(
        l1_pages=max(0, int(left // (page * part))),
        l3_pages=int(host_bytes // (slot * part)),
        page_bytes_gpu=round(page * part),
        slot_bytes=round(slot * part),
    )


def prices_of(
    model: ModelNumbers, inputs: Inputs, trace_page_tokens: int, recompute_s: float | None
) -> Prices:
    """What a page of the trace costs with this model: replay's prices, by its parameters, GPUs and bytes."""
    page, _ = stored_page_bytes(model, inputs.format, inputs.page_tokens)
    page_bytes = round(page * trace_page_tokens / inputs.page_tokens)
    slower = model.active_parameters / _PRICED_PARAMETERS / inputs.tp
    guess = PAGE_RECOMPUTE_S * trace_page_tokens / PAGE_TOKENS * slower
    loads = {tier: seconds * page_bytes / (PAGE_TOKENS * TOKEN_BYTES) for tier, seconds in LOAD_S.items()}
    return Prices(page_bytes, recompute_s if recompute_s is not None else guess, loads)


def find_sizes(
    policy: str, replay: Replay, target: Target, rooms: Rooms, prices: Prices, most: Result
) -> TierSizes:
    """The smallest sizes that reach the target, within SEARCH_RATIO. `most`: the infinite cache.

    Takes a hit rate to grow with the size. Raises Unreachable.
    """
    upper = rooms.l1_pages + rooms.l3_pages
    remembered = {most.capacity_pages: most}

    def run(pages: int) -> Result:
        if pages not in remembered:
            remembered[pages] = replay(pages)
        return remembered[pages]

    def ttft_s(pages: int, result: Result) -> float:
        sizes = (min(pages, size) for size in (rooms.l1_pages, upper))
        in_l1, in_l3 = (run(size).score.hit_pages if size else 0 for size in sizes)
        return mean_ttft_s(result, in_l1, in_l3, prices)

    def reached(pages: int, result: Result) -> bool:
        if target.hit_rate is not None:
            return result.score.block_hit_rate >= target.hit_rate
        assert target.ttft_s is not None
        return ttft_s(pages, result) <= target.ttft_s

    low, high = 0, most.capacity_pages
    if not reached(high, most):
        best = 1e3 * ttft_s(high, most)
        raise Unreachable(
            f"no cache reaches that on this trace: one that never evicts hits {most.score.block_hit_rate:.4f} of "
            f"the pages, and its mean time to the first token is {best:,.0f} ms"
        )
    while high - low > 1 and high > SEARCH_RATIO * low:
        middle = max(low + 1, min(high - 1, round((max(low, 1) * high) ** 0.5)))
        low, high = (low, middle) if reached(middle, run(middle)) else (middle, high)
    found = run(high)
    l1 = min(high, rooms.l1_pages)
    l3 = min(high - l1, rooms.l3_pages)
    l4 = high - l1 - l3
    return TierSizes(
        policy=policy,
        capacity_pages=high,
        l1_pages=l1,
        l3_pages=l3,
        l4_pages=l4,
        result=found,
        ttft_s=ttft_s(high, found),
        written_pages=_written(found, run(l1 + l3) if l1 + l3 else None)
        if l4
        else {"through": 0, "demote": 0},
    )


def mean_ttft_s(result: Result, l1_hits: int, l3_hits: int, prices: Prices) -> float:
    """Mean of loading what is cached below L1 and computing the rest, per request; no queue, no overlap.

    `l1_hits` pages hit in L1, `l3_hits` in L1 or L3.
    """
    score = result.score
    hits = [l1_hits, max(l1_hits, l3_hits), score.hit_pages]
    loading = (hits[1] - hits[0]) * prices.load_s["L3"] + max(0, hits[2] - hits[1]) * prices.load_s["L4"]
    return ((score.work - score.hit_work) * prices.recompute_s + loading) / max(1, score.requests)


def _written(all_tiers: Result, upper: Result | None) -> dict[str, int]:
    """Through: each page that was computed. Demote: what leaves the upper tiers and has no copy below yet."""
    computed = all_tiers.score.pages - all_tiers.score.hit_pages
    return {"through": computed, "demote": min(computed, upper.evicted_pages) if upper else computed}


def endurance(
    written_bytes: float, span_s: float, tier_bytes: float, drive_tb: float, dwpd: float
) -> Endurance:
    """How long drives last that hold so much, written at the trace's pace day and night. Raises ValueError."""
    if not (0 < drive_tb < inf and 0 < dwpd < inf):
        raise ValueError(f"an SSD has a size and writes a day above 0, got {drive_tb:g} TB and {dwpd:g} DWPD")
    drives = max(1, -int(-tier_bytes // (drive_tb * TB)))
    a_day = written_bytes * DAY_S / span_s if span_s > 0 else 0.0
    tbw = drives * drive_tb * dwpd * DAYS * WARRANTY_YEARS
    return Endurance(
        drives=drives,
        bytes_a_day=a_day,
        drive_writes_a_day=a_day / (drives * drive_tb * TB),
        tbw=tbw,
        years=tbw * TB / (a_day * DAYS) if a_day else None,
    )
