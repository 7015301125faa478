"""The tables of `kvtier replay`."""

from __future__ import annotations

from kvtier.cli.common import human_bytes, human_count, human_seconds, out, share
from kvtier.cli.tables import table
from kvtier.lab.replay.replay import TIERS, Prices, Result
from kvtier.lab.replay.report import CHAIN_COLUMNS, COLUMNS, Report, odd_requests


def print_report(report: Report) -> None:
    """What was replayed, a row for each policy at each size, and what is worth knowing about the trace."""
    trace, prices = report.trace, report.prices
    _say(
        f"{human_count(len(trace))} requests in {human_seconds(trace.span_s)}, {human_count(trace.references)} blocks of"
        f" {trace.page_tokens} tokens, {human_count(trace.distinct_pages)} of them distinct"
    )
    scored = human_count(report.results[0].score.requests)
    which = f"scored: the last {scored} requests" if report.half == "second" else "scored: all requests"
    _say(
        f"{which}; a block is {human_bytes(prices.page_bytes)}, its prefill {1e3 * prices.recompute_s:g} ms at depth 0"
    )
    is_chain = any(result.tiers for result in report.results)
    columns = CHAIN_COLUMNS if is_chain else COLUMNS
    rows = [(_chain_row if is_chain else _row)(result, prices) for result in report.results]
    out.print(
        table(None, columns, _grouped(rows), right=[name for name in columns if name != "policy"], keys=2)
    )
    if trace.skipped_lines:
        _say(
            f"{human_count(trace.skipped_lines)} lines were skipped; the first: {trace.first_skipped}",
            "yellow",
        )
    if trace.split_pages:
        _say(
            f"{human_count(trace.split_pages)} blocks came after several parents; each counts as another block there",
            "yellow",
        )
    if (odd := odd_requests(trace)) > len(trace) // 100:
        _say(
            f"{human_count(odd)} requests have other lengths than blocks of {trace.page_tokens} tokens give: "
            "--block-tokens says how large they are",
            "yellow",
        )
    for note in dict.fromkeys(note for result in report.results for note in result.notes):
        _say(note, "yellow")


def _row(result: Result, prices: Prices) -> list[str]:
    score = result.score
    return [
        human_count(result.capacity_pages),
        result.policy,
        share(score.block_hit_rate),
        share(score.token_hit_rate),
        share(score.compute_saved),
        _gap(result),
        human_bytes(result.moved_pages * prices.page_bytes),
    ]


def _chain_row(result: Result, prices: Prices) -> list[str]:
    score, chain = result.score, result.tiers is not None
    by_tier = [share(result.by_tier[tier]) if chain else "" for tier in TIERS]
    return [
        human_count(result.capacity_pages),
        result.policy,
        share(score.block_hit_rate),
        share(score.compute_saved),
        share(result.time_saved) if chain else "",
        _gap(result),
        *by_tier,
        human_bytes(result.moved_pages * prices.page_bytes) if chain else "",
        human_bytes(result.ssd_written_pages * prices.page_bytes) if chain else "",
    ]


def _gap(result: Result) -> str:
    if result.gap_closed is None or result.policy == "lru":
        return ""
    return share(result.gap_closed) if result.gap_closed > -1 else "< -100 %"


def _grouped(rows: list[list[str]]) -> list[list[str]]:
    """A size stands before its first row only."""
    sizes = [row[0] for row in rows]
    return [["" if at and sizes[at - 1] == row[0] else row[0], *row[1:]] for at, row in enumerate(rows)]


def _say(text: str, style: str = "") -> None:
    out.print(text, soft_wrap=True, style=style)
