"""Replays a trace through a chain of tiers. Pure: time is the trace's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvtier.lab.replay.chain_tiers import ChainModel
from kvtier.lab.replay.replay import (
    TIERS,
    Half,
    Prices,
    Result,
    Tick,
    first_scored,
    requests,
    score_hits,
    with_gaps,
)
from kvtier.lab.traces.trace import Trace
from kvtier.tier.policy.base import PolicySettings


def replay_chain(
    trace: Trace,
    settings: PolicySettings,
    policy: str,
    tiers: Mapping[str, int],
    *,
    workers: int = 1,
    half: Half = "second",
    session_ends: bool = False,
    prices: Prices | None = None,
    tick: Tick = lambda pages: None,
) -> Result:
    """As `replay`, with `tiers` pages in each tier, L1 those of each worker; `settings` are those of all tiers."""
    prices = prices or Prices.of(trace.page_tokens)
    model = ChainModel(
        {**tiers, "L1": workers * tiers["L1"]},
        settings,
        workers=workers,
        load_s=prices.load_s,
        costs=prices.costs(trace.page_tokens),
    )
    first = first_scored(trace, half)
    hits = np.zeros(len(trace), np.int64)
    before, evicted_before = model.totals.copy(), 0
    for request, (pages, use, now) in enumerate(requests(trace, session_ends, tick)):
        if request == first:
            before, evicted_before = model.totals.copy(), model.evicted_pages
        if len(pages):
            hits[request] = model.request(pages, use, now)
    totals = model.totals.since(before)
    score = score_hits(trace, hits, first, prices.double_tokens)
    return Result(
        policy=policy,
        capacity_pages=model.capacity,
        score=score,
        evicted_pages=model.evicted_pages - evicted_before,
        time_saved=totals.time_saved,
        by_tier={tier: totals.hits[tier] / max(1, score.pages) for tier in TIERS},
        moved_pages=totals.moved,
        ssd_written_pages=totals.ssd_writes,
        tiers={tier: tiers[tier] for tier in TIERS},
    )


def with_chain_gaps(results: Sequence[Result]) -> list[Result]:
    """As `with_gaps`, where a chain counts as one cache of all its pages, which can hit no more than belady does."""
    gaps = with_gaps([replace(result, tiers=None) for result in results])
    return [replace(result, gap_closed=one.gap_closed) for result, one in zip(results, gaps, strict=True)]
