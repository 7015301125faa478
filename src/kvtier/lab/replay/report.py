"""What a replay found: as JSON, as rows of a table, as curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.lab.plots import Curve, Panel, draw
from kvtier.lab.replay.replay import Half, Prices, Result
from kvtier.lab.traces.trace import Trace

REFERENCES = ("belady", "infinite")
COLUMNS = ("blocks", "policy", "hit rate", "of tokens", "compute saved", "gap closed", "moved")
CHAIN_COLUMNS = (
    *("blocks", "policy", "hit rate", "compute saved", "time saved", "gap closed"),
    *("L1", "L2", "L3", "L4", "moved", "SSD written"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """Results of one trace, those of one size together."""

    names: tuple[str, ...]  # of the trace's files
    trace: Trace
    half: Half
    prices: Prices
    results: tuple[Result, ...]

    def to_json(self) -> dict[str, Any]:
        """For --json; a block is a page."""
        trace = self.trace
        return {
            "trace": {
                "files": list(self.names),
                "requests": len(trace),
                "sessions": int(np.count_nonzero(np.unique(trace.session))),
                "blocks": trace.references,
                "distinct_blocks": trace.distinct_pages,
                "block_tokens": trace.page_tokens,
                "seconds": trace.span_s,
                "skipped_lines": trace.skipped_lines,
                "blocks_with_two_parents": trace.split_pages,
                "requests_of_odd_length": odd_requests(trace),
            },
            "half": self.half,
            "bytes_per_block": self.prices.page_bytes,
            "recompute_ms": 1e3 * self.prices.recompute_s,
            "load_ms": {tier: 1e3 * seconds for tier, seconds in self.prices.load_s.items()},
            "results": [self._row(result) for result in self.results],
        }

    def _row(self, result: Result) -> dict[str, Any]:
        score = result.score
        return {
            "policy": result.policy,
            "capacity_blocks": result.capacity_pages,
            "tiers": result.tiers,
            "block_hit_rate": score.block_hit_rate,
            "token_hit_rate": score.token_hit_rate,
            "compute_saved": score.compute_saved,
            "gap_closed": result.gap_closed,
            "time_saved": result.time_saved,
            "by_tier": result.by_tier,
            "requests": score.requests,
            "blocks": score.pages,
            "hit_blocks": score.hit_pages,
            "evicted_blocks": result.evicted_pages,
            "bytes_moved": result.moved_pages * self.prices.page_bytes,
            "ssd_bytes_written": result.ssd_written_pages * self.prices.page_bytes,
            "notes": list(result.notes),
        }


def odd_requests(trace: Trace) -> int:
    """Requests whose tokens don't end in their last page or right behind it: `page_tokens` may be wrong."""
    pages, tokens = trace.page_counts(), trace.input_tokens
    fits = (tokens > (pages - 1) * trace.page_tokens) & (tokens < (pages + 1) * trace.page_tokens)
    return len(trace) - int(np.count_nonzero(fits))


def curves(results: Sequence[Result]) -> list[Curve]:
    """Hit rate over size, one curve a policy."""
    found = []
    for policy in dict.fromkeys(result.policy for result in results if result.policy != "infinite"):
        points = sorted(
            (result.capacity_pages, result.score.block_hit_rate)
            for result in results
            if result.policy == policy
        )
        x, y = zip(*points, strict=True)
        found.append(Curve(policy, x, y, policy in REFERENCES))
    return found


def panel(title: str, results: Sequence[Result]) -> Panel:
    """Axes of hit rate over size; the infinite cache is a level."""
    levels = [r.score.block_hit_rate for r in results if r.policy == "infinite"]
    return Panel(
        title=title,
        xlabel="capacity (blocks)",
        ylabel="block hit rate",
        curves=curves(results),
        log_x=True,
        level=(levels[0], "infinite cache") if levels else None,
        highlighted="rvi",
    )


def draw_report(report: Report, file: Path) -> None:
    """A PNG of hit rate over size. Raises OSError."""
    names = ", ".join(Path(name).name for name in report.names)
    which = {"second": "second half", "all": "all requests"}[report.half]
    draw([panel(f"{names} ({which})", report.results)], file)
