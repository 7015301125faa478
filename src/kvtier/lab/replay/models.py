"""Which policies a replay can run, and a cache of each. The live ones are the classes that the service runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np

from kvtier.lab.replay.baselines.registry import BASELINES, make_baseline
from kvtier.lab.replay.chain import replay_chain
from kvtier.lab.replay.replay import Half, Prices, Result, Tick, replay
from kvtier.lab.traces.trace import Ids, Trace
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.policy.ghost_cache import CacheModel, GhostCache
from kvtier.tier.policy.plugins import load_policies
from kvtier.tier.policy.registry import make_policy

UNGUARDED = "rvi-noguard"
LIVE = ("rvi", UNGUARDED, *(name for name in load_policies() if name != "rvi"))
POLICIES = (*LIVE, *(name for name in BASELINES if name not in (*LIVE, "infinite")))


@dataclass(frozen=True, slots=True)
class Setup:
    """One policy at one size: what a replay is told beside its trace."""

    policy: str
    capacity_pages: int
    settings: PolicySettings = field(default_factory=PolicySettings)  # of live policies; `policy` says which
    half: Half = "second"
    session_ends: bool = False
    prices: Prices | None = None
    tiers: dict[str, int] | None = None  # pages of each, in a chain of them in place of one cache
    workers: int = 1  # of a chain: each has an L1 of its own


def run_setup(trace: Trace, setup: Setup, tick: Tick = lambda pages: None) -> Result:
    """Replay the trace once."""
    prices = setup.prices or Prices.of(trace.page_tokens)
    scoring = _Scoring(half=setup.half, session_ends=setup.session_ends, prices=prices, tick=tick)
    if setup.tiers is not None:
        settings = live_settings(setup.settings, setup.policy)
        return replay_chain(trace, settings, setup.policy, setup.tiers, workers=setup.workers, **scoring)
    model = _model(trace, setup, prices)
    result = replay(trace, model, setup.policy, setup.capacity_pages, **scoring)
    return replace(result, notes=_notes(model))


class _Scoring(TypedDict):
    half: Half
    session_ends: bool
    prices: Prices
    tick: Tick


def live_settings(settings: PolicySettings, policy: str) -> PolicySettings:
    """The settings that a live policy of this name has."""
    if policy == UNGUARDED:
        return replace(settings, name="rvi", guard=False)
    return replace(settings, name=policy)


def _model(trace: Trace, setup: Setup, prices: Prices) -> CacheModel:
    if setup.policy not in LIVE:
        return make_baseline(setup.policy, setup.capacity_pages, _Asking(trace))
    policy = make_policy(live_settings(setup.settings, setup.policy), setup.capacity_pages)
    policy.costs = prices.costs(trace.page_tokens)
    return GhostCache(policy, setup.capacity_pages)


def _notes(model: CacheModel) -> tuple[str, ...]:
    if not isinstance(model, GhostCache) or not model.policy.fallbacks:
        return ()
    times = "once" if model.policy.fallbacks == 1 else f"{model.policy.fallbacks} times"
    return (f"{model.name} at {model.capacity:,} blocks: its guard fell back to lru {times}",)


class _Asking:
    """The requests of a trace that ask for any page: what a cache hears of."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._requests = np.flatnonzero(trace.page_counts())

    def __len__(self) -> int:
        return len(self._requests)

    def pages(self, request: int) -> Ids:
        return self._trace.pages(int(self._requests[request]))
