"""`kvtier demo`: real chat requests that share a long system prompt, through tiers so small that pages sink and rise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from kvtier.cli.client import Client, completion
from kvtier.cli.common import CliError, default_config, err, human_count, human_seconds, out, share, state_dir
from kvtier.cli.connection import connected
from kvtier.cli.demo_text import QUESTIONS, SYSTEM_PROMPT
from kvtier.cli.generate import printing
from kvtier.cli.tables import table
from kvtier.cli.watch import TIERS, stats_view
from kvtier.cluster.machines.leftovers import remove
from kvtier.workers.models.files.store import default_cache

_MAX_TOKENS = 32
# L1 holds about two of the prompts and L3 about three, so a prompt that others have followed must come up from below. Which
# one goes and whether it is loaded again is here no question of this machine's speed, as it is by default.
_OVERRIDES = (
    "name=demo",
    "grpc.port=0",
    "tiers.l1.bytes=64MiB",
    "tiers.l3.bytes=96MiB",
    "tiers.l4.bytes=1GiB",
    "cache.policy=lru",
    "cache.load=always",
    "cache.load_deadline_ms=60000",
)
_STORY = (
    ("Nothing has sent this prompt before: all of it is computed. The next two find it in L1.", "AAA"),
    (
        "Two other teams: what was used least recently, A's prompt, sinks out of L1. It comes back from L3.",
        "BCA",
    ),
    ("Four more: what they push out of L3 too comes back from L4, the disk.", "DEFGCA"),
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(demo)


def demo() -> None:
    """Start the service with small tiers, chat, show the hits by tier, stop it.

    \b
    Examples:
      kvtier demo
    """
    remove(default_cache() / "l4" / "demo")  # pages of an earlier demo would spoil its story
    with _service():
        done: list[tuple[str, dict[str, Any]]] = []
        with connected() as client:
            for line, teams in _STORY:
                out.print(f"\n{line}", style="bold")
                done += [(team, _ask(client, team, len(done) + i)) for i, team in enumerate(teams)]
            out.print("\nHits by tier", style="bold")
            out.print(_requests_table(done))
            out.print()
            out.print(stats_view(client.stats()))


@contextmanager
def _service() -> Iterator[None]:
    """A deployment of its own, in a state folder beside the user's."""
    os.environ["KVTIER_STATE"] = str(state_dir() / "demo")
    started = False
    try:
        _run("up", str(default_config()), "--detach", *(f"--set={override}" for override in _OVERRIDES))
        started = True
        yield
    finally:
        if started:
            err.print()
            _run("down")


def _run(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", "kvtier", *arguments], check=False).returncode
    if code:
        raise CliError(f"the demo ends here, since `kvtier {arguments[0]}` failed (see above)", code)


def _ask(client: Client, team: str, number: int) -> dict[str, Any]:
    question = QUESTIONS[number % len(QUESTIONS)]
    out.print(f"\nteam {team}> {question}", style="cyan")
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT.format(team=f"team {team}")},
        {"role": "user", "content": question},
    ]
    done = completion(printing(client.generate(messages, max_tokens=_MAX_TOKENS)))
    usage = done["usage"]
    cached = [
        f"{human_count(tokens)} from {tier}" for tier, tokens in usage["cached_tokens"].items() if tokens
    ]
    out.print(
        f"  {human_count(usage['prompt_tokens'])} prompt tokens: "
        f"{', '.join([*cached, human_count(usage['computed_tokens']) + ' computed'])}; "
        f"first token after {human_seconds(done['timings_ms']['ttft'] / 1e3)}",
        style="dim",
    )
    return done


def _requests_table(done: list[tuple[str, dict[str, Any]]]) -> Any:
    columns = ("request", "team", "prompt tokens", *TIERS, "computed", "cached", "first token")
    rows = []
    for number, (team, answer) in enumerate(done, 1):
        usage = answer["usage"]
        cached = usage["cached_tokens"]
        rows.append(
            (
                str(number),
                team,
                human_count(usage["prompt_tokens"]),
                *(human_count(cached[tier]) if cached[tier] else "-" for tier in TIERS),
                human_count(usage["computed_tokens"]),
                share(sum(cached.values()) / usage["prompt_tokens"]),
                human_seconds(answer["timings_ms"]["ttft"] / 1e3),
            )
        )
    return table(None, columns, rows, right=(columns[0], *columns[2:]), keys=2)
