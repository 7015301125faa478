"""`kvtier record ...`: write down what the state machines hear, run that again, and make traces of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.common import (
    CliError,
    err,
    human_bytes,
    human_count,
    human_seconds,
    out,
    print_json,
    share,
    steps,
)
from kvtier.cli.connection import EndpointOption, JsonOption, TlsOption, connected
from kvtier.cli.tables import table

if TYPE_CHECKING:
    from collections import Counter

    from kvtier.lab.recordings import Exported, Summary
    from kvtier.tier.record.rerun import Verdict

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A recording, plain or .gz.")]

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Record what the cache's state machines hear, run it again, and make traces of it.\n\n"
        "A recording holds digests and numbers: no text, no token, no request id.",
        rich_markup_mode=None,
    )
    group.command()(start)
    group.command()(stop)
    for verb in (show, verify, export):
        group.command(no_args_is_help=True)(verb)
    app.add_typer(group, name="record")


def start(
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file, on the machine of who records; .gz compresses. Where several do, each puts its id "
            "before the ending. Default: named by the time, here.",
        ),
    ] = None,
    max_bytes: Annotated[
        str,
        typer.Option(
            "--max-bytes", help="Where each file ends, such as 200MiB; who is busy writes some MiB a second."
        ),
    ] = "1GiB",
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="ID", help="Only this node and others named; may be given again."),
    ] = None,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Begin to record: the state as it is, then all that is heard, until `kvtier record stop`.

    All nodes record (L3 and L4), each into its own file, unless some are named.
    The service goes on at its pace: where the disk can't keep up, or the file is full, the recording ends, and says so in
    its last line. Only this user can read the file.

    \b
    Examples:
      kvtier record start
      kvtier record start --out /var/tmp/monday.kvrec.gz --max-bytes 200MiB
      kvtier record start --node node-0
    """
    path = (file or Path(time.strftime("kvtier-%Y%m%d-%H%M%S.kvrec"))).expanduser().absolute()
    limit = _bytes(max_bytes)
    with connected(endpoint, tls) as client:
        started = client.record_start(str(path), max_bytes=limit, nodes=node or ())
        _report(started, as_json)


def stop(endpoint: EndpointOption = "", tls: TlsOption = "", as_json: JsonOption = False) -> None:
    """End the recording, and say what is in it.

    \b
    Examples:
      kvtier record stop
    """
    with connected(endpoint, tls) as client:
        _report(client.record_stop(), as_json)


def show(file: FileArgument, as_json: JsonOption = False) -> None:
    """What happened in a recording: events and commands by kind, and where a node's lookups found their pages.

    \b
    Examples:
      kvtier record show monday.kvrec.gz
      kvtier record show monday.kvrec.gz --json | jq .found_pages
    """
    from kvtier.lab.recordings import summed_up

    with _reading(file, as_json) as tick:
        summary, verdict = summed_up(file, tick)
    if as_json:
        print_json(_summary(summary, verdict))
    else:
        _print_summary(summary, verdict)
    _warn(verdict)


def verify(file: FileArgument, as_json: JsonOption = False) -> None:
    """Run a recording again: every command and every counter must come out as it did.

    The exit code is 1 where one doesn't, and the first event that differs is named.

    \b
    Examples:
      kvtier record verify monday.kvrec.gz
    """
    from kvtier.lab.recordings import verified

    with _reading(file, as_json) as tick:
        verdict = verified(file, tick)
    if as_json:
        print_json(asdict(verdict))
    elif verdict.difference is None:
        out.print(
            f"{human_count(verdict.events)} events over {human_seconds(verdict.seconds)}: all "
            f"{human_count(verdict.commands)} commands and all counters are as recorded"
        )
    if verdict.difference is not None:
        raise CliError(f"{file}: {verdict.difference}{_other_code(verdict)}")
    _warn(verdict)


def export(
    file: FileArgument,
    trace: Annotated[Path, typer.Option("--out", help="The trace to write; it must not be there yet.")],
    as_json: JsonOption = False,
) -> None:
    """Make a request trace of a node's recording, for `kvtier replay` and `kvtier plan --trace`. It is approximate.

    Of each request the trace has its moment, its pages as numbers, its tokens, how its answer ended and its session. What is
    approximate in that, and why, is in the trace's first line, and printed here.

    \b
    Examples:
      kvtier record export monday.kvrec.gz --out monday.jsonl
    """
    from kvtier.lab.recordings import export as write

    with _reading(file, as_json) as tick:
        done = write(file, trace, tick)
    if as_json:
        print_json({"path": str(trace), **asdict(done)})
    else:
        _print_export(trace, done)


@contextmanager
def _reading(file: Path, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Progress over the file's bytes; what is wrong with a recording ends the command with one line."""
    from kvtier.tier.record.format import RecordingError

    try:
        with steps() as shown:
            total = file.stat().st_size if file.is_file() else None
            is_quiet = as_json and not err.is_terminal
            yield lambda done: None if is_quiet else shown("reading", done, total)
    except RecordingError as error:
        raise CliError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from error


def _bytes(text: str) -> int:
    number, unit = text.rstrip("BKMGTi"), text[len(text.rstrip("BKMGTi")) :]
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise CliError(f"--max-bytes takes bytes, such as 200MiB, got {text!r}", 2) from None


def _report(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    for one in done["recordings"]:
        if one["ended"]:
            size = f"{human_count(one['events'])} events, {human_bytes(one['nbytes'])}"
            what = f"{size}, {human_seconds(one['seconds'])}; {one['ended']}"
        else:
            what = "recording; `kvtier record stop` ends it"
        out.print(f"{one['owner']}: {one['path']}: {what}", soft_wrap=True)


def _summary(summary: Summary, verdict: Verdict) -> dict[str, Any]:
    return {
        "owner": summary.owner,
        "machine": summary.machine,
        "kvtier": summary.kvtier,
        "started": summary.started,
        "seconds": verdict.seconds,
        "events": dict(summary.events.most_common()),
        "commands": dict(summary.commands.most_common()),
        "lookups": summary.lookups,
        "asked_pages": summary.asked_pages,
        "found_pages": {tier: summary.found[tier] for tier in ("L1", "L3", "L4")},
        "lookup_ends": dict(summary.ends.most_common()),
        "end": verdict.end,
        "is_torn": verdict.is_torn,
        "difference": verdict.difference,
        "about": summary.about,
    }


def _print_summary(summary: Summary, verdict: Verdict) -> None:
    out.print(
        f"{summary.machine} {summary.owner}, kvtier {summary.kvtier}, from {summary.started} for "
        f"{human_seconds(verdict.seconds)}; {verdict.end or 'it was cut off'}",
        soft_wrap=True,
    )
    for title, counts in (("events", summary.events), ("commands", summary.commands)):
        out.print(table(None, (title, "number"), _counted(counts), right=("number",)))
    if not summary.lookups:
        return
    asked = summary.asked_pages
    rows = [
        (tier, human_count(summary.found[tier]), share(summary.found[tier] / asked if asked else 0))
        for tier in ("L1", "L3", "L4")
    ]
    out.print(f"{human_count(summary.lookups)} lookups of {human_count(asked)} pages")
    out.print(table(None, ("found in", "pages", "of all"), rows, right=("pages", "of all")))
    out.print(table(None, ("prefix ended", "lookups"), _counted(summary.ends), right=("lookups",)))


def _counted(counts: Counter[str]) -> list[tuple[str, str]]:
    return [(kind, human_count(number)) for kind, number in counts.most_common()]


def _print_export(trace: Path, done: Exported) -> None:
    out.print(f"{trace}: {human_count(done.requests)} requests", soft_wrap=True)
    if left_out := done.headless + done.other_page_size:
        out.print(
            f"{human_count(left_out)} left out: of {human_count(done.headless)} only the end of the prompt was asked for, "
            f"{human_count(done.other_page_size)} have pages of another size",
            soft_wrap=True,
        )
    if done.is_torn:
        out.print("the recording was cut off: what came after is missing")
    out.print("It is approximate:")
    for reason in done.approximate:
        out.print(f"- {reason}", soft_wrap=True)


def _warn(verdict: Verdict) -> None:
    if verdict.is_torn:
        err.print(
            "the recording was cut off, by a crash or a full disk: nothing is known of what came after",
            soft_wrap=True,
        )


def _other_code(verdict: Verdict) -> str:
    return "" if verdict.is_same_code else "; it was recorded by other code than this, which may be why"
