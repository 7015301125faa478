"""Sizes the tiers for a target by replaying a trace many times, under lru and under rvi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvtier.lab.plan.model_numbers import ModelNumbers
from kvtier.lab.plan.plan import GB, Inputs
from kvtier.lab.plan.report import lives_of, sizes_json
from kvtier.lab.plan.tiers import (
    DAYS,
    SEARCH_RATIO,
    Endurance,
    Rooms,
    Target,
    TierSizes,
    endurance,
    find_sizes,
    prices_of,
    rooms_of,
)
from kvtier.lab.replay.models import Setup, run_setup
from kvtier.lab.replay.replay import Prices, Result, first_scored, infinite
from kvtier.lab.traces.files import load_trace
from kvtier.lab.traces.trace import Trace

POLICIES = ("lru", "rvi")

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says of the trace and the tiers."""

    trace_files: tuple[str, ...]
    hit_rate: float | None
    ttft_ms: float | None
    running: int
    host_gb: float
    recompute_ms: float | None
    ssd_tb: float
    dwpd: float
    half: Literal["second", "all"]
    block_tokens: int | None
    skip_bad: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One policy's tiers, and by tiers.write how long the SSDs live."""

    sizes: TierSizes
    lives: dict[str, Endurance]


@dataclass(frozen=True, slots=True)
class Sizing:
    """What reaches the target."""

    trace: Trace
    target: Target
    rooms: Rooms
    prices: Prices
    most: Result  # an infinite cache
    span_s: float  # of the scored requests
    running: int
    rows: tuple[Row, ...]

    @property
    def headline(self) -> str:
        """What was asked of which trace."""
        asked = (
            f"hit rate {self.target.hit_rate:g}"
            if self.target.hit_rate is not None
            else f"time to the first token {1e3 * (self.target.ttft_s or 0):g} ms"
        )
        return (
            f"{asked} on {len(self.trace):,} requests, {self.trace.distinct_pages:,} distinct blocks of "
            f"{self.trace.page_tokens} tokens (a cache that never evicts hits {self.most.score.block_hit_rate:.4f})"
        )

    @property
    def notes(self) -> list[str]:
        """How to read the table."""
        l3, l4 = (f"{1e3 * self.prices.load_s[tier]:.3g} ms to load from {tier}" for tier in ("L3", "L4"))
        said = [
            f"L1 is what each GPU has left beside {self.running:,} running requests, L3 what --host-gb allows, L4 the rest",
            "with tiers.write through, L4 holds copies of all of it and each computed block is written once: "
            + ", ".join(_through(row) for row in self.rows),
            f"a block takes {1e3 * self.prices.recompute_s:.3g} ms to compute at depth 0 (--recompute-ms sets it), {l3}, {l4}",
            f"sizes are at most {100 * (SEARCH_RATIO - 1):.0f} % more than needed; the trace is one sample, so leave room",
        ]
        if self.trace.skipped_lines:
            said.append(f"{self.trace.skipped_lines:,} lines skipped, the first: {self.trace.first_skipped}")
        return said

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "requests": len(self.trace),
            "block_tokens": self.trace.page_tokens,
            "distinct_blocks": self.trace.distinct_pages,
            "skipped_lines": self.trace.skipped_lines,
            "scored_seconds": self.span_s,
            "infinite_block_hit_rate": self.most.score.block_hit_rate,
            "target_hit_rate": self.target.hit_rate,
            "target_ttft_ms": None if self.target.ttft_s is None else 1e3 * self.target.ttft_s,
            "running_requests": self.running,
            "block_bytes_gpu": self.rooms.page_bytes_gpu,
            "block_slot_bytes": self.rooms.slot_bytes,
            "recompute_ms": 1e3 * self.prices.recompute_s,
            "load_ms": {tier: 1e3 * seconds for tier, seconds in self.prices.load_s.items()},
            "results": [sizes_json(row.sizes, self.rooms, row.lives) for row in self.rows],
        }


def _through(row: Row) -> str:
    life = row.lives["through"]
    return f"{row.sizes.policy} {life.bytes_a_day / 1e12:.3g} TB a day, {lifetime(life)}"


def lifetime(life: Endurance) -> str:
    """How long the drives live, in words."""
    if life.years is None:
        return "no writes"
    return f"{life.years:.1f} years" if life.years >= 2 else f"{DAYS * life.years:.0f} days"


def size_tiers(model: ModelNumbers, inputs: Inputs, wishes: Wishes, progress: Progress) -> Sizing:
    """Replay until the smallest sizes are found. Raises TraceError, ValueError and OSError."""
    target = Target(wishes.hit_rate, None if wishes.ttft_ms is None else wishes.ttft_ms / 1e3)
    recompute_s = None if wishes.recompute_ms is None else wishes.recompute_ms / 1e3
    if recompute_s is not None and not recompute_s > 0:
        raise ValueError(f"--recompute-ms must be more than 0, got {wishes.recompute_ms:g}")
    if not 0 <= wishes.host_gb < 1e9:
        raise ValueError(f"--host-gb must not be negative, got {wishes.host_gb:g}")
    endurance(
        0.0, 1.0, 0.0, wishes.ssd_tb, wishes.dwpd
    )  # refuses a drive that can't be before minutes of replays
    trace = _load(wishes, progress)
    rooms = rooms_of(model, inputs, trace.page_tokens, wishes.running, round(wishes.host_gb * GB))
    prices = prices_of(model, inputs, trace.page_tokens, recompute_s)
    most = infinite(trace, wishes.half, prices)
    first = first_scored(trace, wishes.half)
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[first])
    rows = []
    for policy in POLICIES:
        replay = _replayer(trace, policy, wishes.half, prices, progress)
        sizes = find_sizes(policy, replay, target, rooms, prices, most)
        rows.append(Row(sizes, lives_of(sizes, rooms, span_s, wishes.ssd_tb, wishes.dwpd)))
    return Sizing(trace, target, rooms, prices, most, span_s, wishes.running, tuple(rows))


def _load(wishes: Wishes, progress: Progress) -> Trace:
    progress("reading the trace", 0, None)
    return load_trace(
        wishes.trace_files,
        page_tokens=wishes.block_tokens,
        skip_bad=wishes.skip_bad,
        tick=lambda lines: progress("reading the trace", lines, None),
    )


def _replayer(
    trace: Trace, policy: str, half: Literal["second", "all"], prices: Prices, progress: Progress
) -> Callable[[int], Result]:
    def replay(pages: int) -> Result:
        step = f"{policy}, {pages:,} blocks"
        setup = Setup(policy, pages, half=half, prices=prices)
        return run_setup(trace, setup, lambda done: progress(step, done, trace.references))

    return replay
