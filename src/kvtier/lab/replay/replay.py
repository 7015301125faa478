"""Replays a trace through a model of one cache, and scores what it hit. Pure: time is the trace's.

Requests are atomic: a request looks its pages up, all of them are put in, and the cache is cut to its capacity. A page
counts as hit when all pages before it are cached too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtier.lab.traces.trace import Ids, Trace
from kvtier.tier.policy.base import Costs, Use
from kvtier.tier.policy.ghost_cache import CacheModel

DOUBLE_TOKENS = (
    32_768  # depth at which attention doubles what a token's prefill costs: a model of 8 B parameters
)
PAGE_TOKENS, PAGE_RECOMPUTE_S = 512, 20e-3  # so long takes the prefill of so many tokens at depth 0 there
TOKEN_BYTES = 131_072  # of such a model: 32 layers, 8 KV heads of 128, 16 bits
TIERS = ("L1", "L2", "L3", "L4")
LOAD_S = {"L1": 0.0, "L2": 0.25e-3, "L3": 1.3e-3, "L4": 11e-3}  # the same tokens from each tier
_TICK_REQUESTS = 64
LEAST_GAP = 0.005  # between LRU and Belady: in less there is nothing to close

Half = Literal["second", "all"]
Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Prices:
    """What a page is and costs; by default one of an 8 B model, scaled to the trace's tokens a page."""

    page_bytes: int
    recompute_s: float  # at depth 0
    load_s: dict[str, float]  # by tier
    double_tokens: int = DOUBLE_TOKENS

    @staticmethod
    def of(page_tokens: int) -> Prices:
        """The defaults for pages of so many tokens."""
        part = page_tokens / PAGE_TOKENS
        loads = {tier: part * seconds for tier, seconds in LOAD_S.items()}
        return Prices(page_tokens * TOKEN_BYTES, part * PAGE_RECOMPUTE_S, loads)

    def costs(self, page_tokens: int) -> Costs:
        """As policies take them."""
        return Costs(self.recompute_s, self.double_tokens / page_tokens)


@dataclass(frozen=True, slots=True)
class Score:
    """What requests hit. `work` is prefill, in pages at depth 0: a page costs 1 + depth in tokens / `double_tokens`."""

    requests: int
    pages: int
    hit_pages: int
    tokens: int  # of all prompts
    hit_tokens: int
    work: float
    hit_work: float

    @property
    def block_hit_rate(self) -> float:
        """Hit pages over all pages asked for."""
        return self.hit_pages / max(1, self.pages)

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens that were cached over all: a prompt's last page counts by the tokens in it."""
        return self.hit_tokens / max(1, self.tokens)

    @property
    def compute_saved(self) -> float:
        """Share of the prefill work that hits made needless."""
        return self.hit_work / max(1.0, self.work)


@dataclass(frozen=True, slots=True)
class Result:
    """One policy at one size. Pages moved and evicted are those of the scored requests only."""

    policy: str
    capacity_pages: int
    score: Score
    evicted_pages: int
    time_saved: float  # 1 - (loading hits + computing the rest) / computing everything
    by_tier: dict[str, float]  # hit pages over all pages
    moved_pages: int  # written into the cache after misses, and read or written between tiers
    ssd_written_pages: int = 0
    tiers: dict[str, int] | None = None  # capacities in pages, of a chain of tiers
    gap_closed: float | None = None  # of the gap in hits from lru to belady; None where there is none
    notes: tuple[str, ...] = ()


def replay(
    trace: Trace,
    model: CacheModel,
    policy: str,
    capacity_pages: int,
    *,
    half: Half = "second",
    session_ends: bool = False,
    prices: Prices | None = None,
    tick: Tick = lambda pages: None,
) -> Result:
    """Run all requests and score those of the half; `tick` hears of pages asked for so far.

    With `session_ends` a session's last request says that it is.
    """
    prices = prices or Prices.of(trace.page_tokens)
    first = first_scored(trace, half)
    hits = np.zeros(len(trace), np.int64)
    evicted_before = 0
    for request, (pages, use, now) in enumerate(requests(trace, session_ends, tick)):
        if request == first:
            evicted_before = model.evicted_pages
        if len(pages):
            hits[request] = model.request(pages, use, now)
    score = score_hits(trace, hits, first, prices.double_tokens)
    loading = score.hit_pages * prices.load_s["L1"] / prices.recompute_s
    return Result(
        policy=policy,
        capacity_pages=capacity_pages,
        score=score,
        evicted_pages=model.evicted_pages - evicted_before,
        time_saved=(score.hit_work - loading) / max(1.0, score.work),
        by_tier={"L1": score.block_hit_rate},
        moved_pages=score.pages - score.hit_pages,
    )


def infinite(trace: Trace, half: Half = "second", prices: Prices | None = None) -> Result:
    """What a cache hits that never evicts: ids are dense by first appearance, so what is new is above all before."""
    prices = prices or Prices.of(trace.page_tokens)
    ends = trace.runs.starts + trace.runs.lengths
    highest = np.concatenate(([0], np.maximum.accumulate(ends)))[trace.runs.first]
    hits = trace.page_counts() - np.diff(highest)
    score = score_hits(trace, hits, first_scored(trace, half), prices.double_tokens)
    return Result(
        policy="infinite",
        capacity_pages=trace.distinct_pages,
        score=score,
        evicted_pages=0,
        time_saved=score.compute_saved,
        by_tier={"L1": score.block_hit_rate},
        moved_pages=score.pages - score.hit_pages,
    )


def requests(
    trace: Trace, session_ends: bool = False, tick: Tick = lambda pages: None
) -> Iterator[tuple[Ids, Use, float]]:
    """Pages, what the request leaves behind, and the time, of one request after the other."""
    closed = trace.session_ends() if session_ends else np.zeros(len(trace), np.bool_)
    done = 0
    for request, (now, closes) in enumerate(zip(trace.arrival_s.tolist(), closed.tolist(), strict=True)):
        pages = trace.pages(request)
        yield pages, trace.use(request, len(pages), closes), now
        done += len(pages)
        if request % _TICK_REQUESTS == 0:
            tick(done)
    tick(done)


def first_scored(trace: Trace, half: Half) -> int:
    """The first request that counts: caches begin empty, so by default the second half of the requests does."""
    return len(trace) // 2 if half == "second" else 0


def score_hits(trace: Trace, hits: Ids, first: int, double_tokens: int = DOUBLE_TOKENS) -> Score:
    """Score the requests from `first` on by how many leading pages each hit. `hits`: [requests]."""
    pages, hits = trace.page_counts()[first:], hits[first:]
    tokens = trace.input_tokens[first:]
    return Score(
        requests=len(pages),
        pages=int(pages.sum()),
        hit_pages=int(hits.sum()),
        tokens=int(tokens.sum()),
        hit_tokens=int(np.minimum(hits * trace.page_tokens, tokens).sum()),
        work=float(work(pages, trace.page_tokens, double_tokens).sum()),
        hit_work=float(work(hits, trace.page_tokens, double_tokens).sum()),
    )


def work(pages: Ids, page_tokens: int, double_tokens: int = DOUBLE_TOKENS) -> npt.NDArray[np.float64]:
    """Prefill of the first so many pages of a prompt, in pages at depth 0."""
    return pages + pages * (pages - 1) / 2 * (page_tokens / double_tokens)


def with_gaps(results: Sequence[Result]) -> list[Result]:
    """The results with the share of the gap from lru to belady that each closes, at its own size."""
    rates = {(r.policy, r.capacity_pages): r.score.block_hit_rate for r in results if r.tiers is None}

    def closed(result: Result) -> float | None:
        lru, best = (rates.get((name, result.capacity_pages)) for name in ("lru", "belady"))
        if lru is None or best is None or best - lru < LEAST_GAP or result.tiers is not None:
            return None
        return (result.score.block_hit_rate - lru) / (best - lru)

    return [replace(result, gap_closed=closed(result)) for result in results]
