"""`kvtier replay`: what would each eviction policy hit on my traffic, in a cache of this size?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvtier.cli.common import (
    CliError,
    check_target,
    err,
    print_json,
    steps,
)
from kvtier.cli.connection import JsonOption

if TYPE_CHECKING:
    from kvtier.lab.replay.models import Setup
    from kvtier.lab.replay.replay import Half, Prices, Result
    from kvtier.lab.replay.report import Report
    from kvtier.lab.traces.trace import Trace
    from kvtier.tier.policy.base import PolicySettings

_PARTS = (200, 50, 20, 10, 4)  # of the distinct pages: sizes that are tried where none is given
_Progress = Callable[[str, int, int | None], None]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(no_args_is_help=True)(replay)


def replay(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...", help="Files, plain or gzip; - is stdin. Several are merged by time."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(metavar="P,P2,...", help="Policies, or all; lru and belady run beside them anyway."),
    ] = "rvi",
    capacity_blocks: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="Sizes of the cache in blocks; default: parts of the distinct blocks."
        ),
    ] = "",
    tiers: Annotated[
        str,
        typer.Option(
            metavar="L1=N,L2=N,L3=N,L4=N",
            help="A chain of tiers in place of one cache; L1 is each worker's.",
        ),
    ] = "",
    workers: Annotated[
        int, typer.Option(min=1, max=1024, help="Decode workers, each with an L1 of its own. With --tiers.")
    ] = 1,
    load_ms: Annotated[
        str,
        typer.Option(
            metavar="L1=MS,...",
            help="What loading a block takes; without --tiers only L1. Default: 0, 0.25, 1.3 and 11 ms per 512 tokens.",
        ),
    ] = "",
    recompute_ms: Annotated[
        float | None,
        typer.Option(help="What prefilling a block takes at depth 0; default: 20 ms per 512 tokens."),
    ] = None,
    half: Annotated[
        Literal["second", "all"],
        typer.Option(help="Requests that are scored; the first half fills the cache."),
    ] = "second",
    exponent: Annotated[
        float, typer.Option(min=0, max=1, help="Of rvi: 0 hits the most blocks, 1 saves the most compute.")
    ] = 0.25,
    no_guard: Annotated[bool, typer.Option("--no-guard", help="Never let rvi fall back to lru.")] = False,
    session_ends: Annotated[
        bool,
        typer.Option("--session-ends", help="A session's last request says that it is, as a client can."),
    ] = False,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="Tokens a block, where the trace doesn't say."),
    ] = None,
    bytes_per_block: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 50, help="Of your model; default: 128 KiB a token, an 8 B model with 8 KV heads."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on without lines that can't be read, and count them.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the hit rate over the capacity.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace of requests, and show what each eviction policy would have hit.

    Nothing needs to be running: time is the trace's, and the policies are the classes that the service runs. A block
    counts as hit when all blocks before it are cached too. "compute saved" weighs a block by its prefill, which grows
    with depth. belady knows the future: no policy can hit more. "gap closed" is how far a policy gets from lru to it.

    Traces: Mooncake's JSONL (timestamp, input_length, output_length, hash_ids), Qwen-Bailian's (chat_id,
    parent_chat_id, ...), or kvtier's own, which `kvtier record export` writes.

    \b
    Examples:
      kvtier replay conversation_trace.jsonl
      kvtier replay trace.jsonl.gz --policy rvi,arc,s3fifo --capacity-blocks 1000,5000,20000 --plot hits.png
      kvtier replay trace.jsonl --tiers L1=300,L2=300,L3=1200,L4=9600 --policy rvi --json
      zcat part-*.gz | kvtier replay - --policy all --capacity-blocks 10000
    """
    if plot is not None:
        check_target("--plot", plot, ".png")
    sizes = _sizes(capacity_blocks)
    chain = _by_tier("--tiers", tiers)
    loads = _by_tier("--load-ms", load_ms)
    _check_together(sizes, chain, workers, loads)
    policies = _policies(policy, bool(chain))
    with steps() as shown:
        progress: _Progress = (lambda *_: None) if as_json and not err.is_terminal else shown
        trace = _loaded(traces, block_tokens, skip_bad, progress)
        prices = _prices(trace.page_tokens, bytes_per_block, recompute_ms, loads)
        settings = _settings(exponent, not no_guard)
        setups = _setups(policies, sizes or _default_sizes(trace), chain, workers, prices, settings)
        setups = [replace(setup, half=half, session_ends=session_ends) for setup in setups]
        results = _run(trace, setups, half, prices, progress)
    from kvtier.cli.replay_table import print_report
    from kvtier.lab.replay.report import Report

    report = Report(tuple(traces), trace, half, prices, tuple(results))
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report)
    _draw(report, plot)  # last: what took minutes is on the screen, whatever the disk says


# ---- what was asked for ----------------------------------------------------------------------------------------------


def _policies(text: str, chain: bool) -> list[str]:
    from kvtier.lab.replay.models import LIVE, POLICIES

    known = LIVE if chain else POLICIES
    named = [name.strip() for name in text.split(",") if name.strip()]
    if named == ["all"]:
        return list(known)
    for name in named:
        if name not in known:
            why = " with --tiers, which runs live policies only," if chain and name in POLICIES else ""
            raise CliError(f"--policy{why} must be all or among {', '.join(known)}, got {name!r}", 2)
    if not named:
        raise CliError(f"--policy names none: use all or some of {', '.join(known)}", 2)
    return list(dict.fromkeys(named))


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if not part.isascii() or not part.isdigit() or not 0 < int(part) < 1 << 40:
            raise CliError(
                f"--capacity-blocks must be whole numbers from 1, as in 1000,5000, got {part!r}", 2
            )
        sizes.append(int(part))
    return sorted(set(sizes))


def _default_sizes(trace: Trace) -> list[int]:
    """Two digits are enough for a size that nothing chose."""
    sizes = set()
    for part in _PARTS:
        exact = max(1, trace.distinct_pages // part)
        step = 10 ** max(0, len(str(exact)) - 2)
        sizes.add(exact // step * step)
    return sorted(sizes)


def _by_tier(option: str, text: str) -> dict[str, float]:
    from kvtier.lab.replay.replay import TIERS

    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        tier, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if tier not in TIERS or tier in found or not 0 <= value < 1e12:
            raise CliError(
                f"{option} must be like L1=300,L3=1200, each of {', '.join(TIERS)} once with a number from 0, "
                f"got {part!r}",
                2,
            )
        found[tier] = value
    return found


def _check_together(
    sizes: Sequence[int], chain: dict[str, float], workers: int, loads: dict[str, float]
) -> None:
    if chain and sizes:
        raise CliError("--tiers and --capacity-blocks are two ways to say it: give one", 2)
    if workers > 1 and not chain:
        raise CliError(f"--workers {workers} needs --tiers: they share what is below their L1", 2)
    lower = [] if chain else [tier for tier in loads if tier != "L1"]
    if lower:
        raise CliError(f"--load-ms {lower[0]} needs --tiers: without them the whole cache is L1", 2)
    for tier, pages in chain.items():
        if pages != int(pages):
            raise CliError(f"--tiers must be whole numbers of blocks, got {tier}={pages:g}", 2)
    if chain and (chain.get("L1", 0) < 1 or chain.get("L3", 0) < 2):
        raise CliError("--tiers needs an L1 and an L3, of at least 2 blocks, as in L1=300,L3=1200,L4=9600", 2)


def _prices(
    page_tokens: int, bytes_per_block: int | None, recompute_ms: float | None, loads: dict[str, float]
) -> Prices:
    from kvtier.lab.replay.replay import Prices

    prices = Prices.of(page_tokens)
    if recompute_ms is not None and not 1e-6 <= recompute_ms < 1e9:
        raise CliError(f"--recompute-ms must be at least 1e-6 and less than 1e9, got {recompute_ms:g}", 2)
    return replace(
        prices,
        page_bytes=bytes_per_block or prices.page_bytes,
        recompute_s=prices.recompute_s if recompute_ms is None else recompute_ms / 1e3,
        load_s={**prices.load_s, **{tier: ms / 1e3 for tier, ms in loads.items()}},
    )


def _settings(exponent: float, guard: bool) -> PolicySettings:
    from kvtier.tier.policy.base import PolicySettings

    return PolicySettings(exponent=exponent, guard=guard)


def _setups(
    policies: Sequence[str],
    sizes: Sequence[int],
    chain: dict[str, float],
    workers: int,
    prices: Prices,
    settings: PolicySettings,
) -> list[Setup]:
    """lru first and belady last, at each size, whatever was named."""
    from kvtier.lab.replay.models import Setup
    from kvtier.lab.replay.replay import TIERS

    named = ["lru", *(name for name in policies if name not in ("lru", "belady"))]
    if chain:
        capacities = {tier: int(chain.get(tier, 0)) for tier in TIERS}
        whole = sum(capacities.values()) + (workers - 1) * capacities["L1"]
        own = [
            Setup(name, whole, settings, prices=prices, tiers=capacities, workers=workers) for name in named
        ]
        return [*own, Setup("belady", whole, settings, prices=prices)]
    return [Setup(name, size, settings, prices=prices) for size in sizes for name in (*named, "belady")]


# ---- the work --------------------------------------------------------------------------------------------------------


def _loaded(names: list[str], block_tokens: int | None, skip_bad: bool, progress: _Progress) -> Trace:
    from kvtier.lab.traces.files import load_trace
    from kvtier.lab.traces.formats import TraceError

    if names.count("-") > 1:
        raise CliError("stdin (-) can be read once only", 2)
    progress("reading the trace", 0, None)
    try:
        return load_trace(
            names,
            page_tokens=block_tokens,
            skip_bad=skip_bad,
            tick=lambda lines: progress("reading the trace", lines, None),
        )
    except TraceError as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"can't read {error.filename}: {error.strerror}") from error


def _run(
    trace: Trace, setups: Sequence[Setup], half: Half, prices: Prices, progress: _Progress
) -> list[Result]:
    from kvtier.lab.replay.chain import with_chain_gaps
    from kvtier.lab.replay.jobs import ReplayFailed, run_jobs
    from kvtier.lab.replay.replay import infinite

    what = "replaying 1 time" if len(setups) == 1 else f"replaying {len(setups)} times"
    try:
        results = run_jobs(trace, setups, lambda done, total: progress(what, done, total))
    except ReplayFailed as error:
        raise CliError(str(error)) from error
    return [*with_chain_gaps(results), infinite(trace, half, prices)]


def _draw(report: Report, plot: Path | None) -> None:
    from kvtier.lab.replay.report import draw_report

    if plot is None:
        return
    try:
        draw_report(report, plot)
    except OSError as error:
        raise CliError(f"can't write {error.filename}: {error.strerror}") from error
