"""The verbs that look at a running deployment: `status`, `stats`, `explain`."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvtier.cli.client import Client
from kvtier.cli.common import human_bytes, human_count, human_seconds, out, print_json, share
from kvtier.cli.connection import EndpointOption, JsonOption, TlsOption, connected
from kvtier.cli.tables import table

TIERS = ("L1", "L2", "L3", "L4", "remote")
_PLACES = {"L1": "HBM", "L2": "peer", "L3": "host", "L4": "SSD", "remote": "other node"}


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(status)
    app.command()(stats)
    app.command(no_args_is_help=True)(explain)


def status(endpoint: EndpointOption = "", tls: TlsOption = "", as_json: JsonOption = False) -> None:
    """What is running: endpoint, model, nodes, exchanges, workers and directory, and for how long each has been as it is.

    \b
    Examples:
      kvtier status
      kvtier status --json | jq -r .endpoint
      kvtier status --json | jq '.workers[] | select(.health != "healthy")'
    """
    with connected(endpoint, tls) as client:
        now = client.status()
    if as_json:
        print_json(now)
        return
    model = now.get("model") or {}
    out.print(
        f"{now['endpoint']}  {model.get('name', '')} {model.get('dtype', '')}, {human_count(model.get('max_context', 0))} "
        f"tokens of context, pages of {model.get('page_tokens', 0)} tokens ({human_bytes(model.get('page_bytes', 0))})"
        f"{_attention(model)}"
    )
    columns = ("what", "id", "where", "pid", "does", "in flight", "health", "for")
    out.print(table(None, columns, _parts(now), right=("pid", "in flight"), keys=2))
    for node in now["nodes"]:
        for note in node.get("notes", ()):
            out.print(f"{node['id']}: {note}", style="yellow", soft_wrap=True)


def _parts(now: dict[str, Any]) -> list[tuple[str, ...]]:
    gateway = {"pid": now["gateway_pid"], "health": "healthy", "since": now["since"]}  # it has just answered
    rows = [_part("gateway", gateway, now["endpoint"], in_flight=str(now["in_flight"]))]
    if directory := now["directory"]:
        knows = f"knows {human_count(directory['entries'])} pages of {directory['holders']} holders"
        rows.append(_part("directory", directory, "", knows))
    for node in now["nodes"]:
        rows.append(
            _part("node", node, node["host"], f"pages at {node['exchange']}" if node["exchange"] else "")
        )
        if node.get("exchange_health"):
            rows.append(_exchange(node))
    for worker in now["workers"]:
        rows.append(_part("worker", worker, worker["node"], worker["role"], str(worker["in_flight"])))
    return rows


def _exchange(node: dict[str, Any]) -> tuple[str, ...]:
    told = {name: node[f"exchange_{name}"] for name in ("health", "detail", "since")}
    return _part("exchange", told | {"pid": ""}, node["id"], "gives pages to other nodes")


def _part(
    what: str, part: dict[str, Any], where: str, does: str = "", in_flight: str = ""
) -> tuple[str, ...]:
    lasted = human_seconds(max(0.0, time.time() - part["since"]))
    return what, part.get("id", ""), where, str(part["pid"]), does, in_flight, _health(part), lasted


def _attention(model: dict[str, Any]) -> str:
    recipe = f", stored as {model['recipe']}" if model.get("recipe") else ""
    if not model.get("window"):
        return recipe
    return (
        f"{recipe}, window of {human_count(model['window'])} tokens and {human_count(model['sinks'])} sinks"
    )


def _health(row: dict[str, Any]) -> str:
    return f"{row['health']}: {row['detail']}" if row.get("detail") else str(row["health"])


def stats(
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until Ctrl-C; with --json one object a line.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes.")] = 1.0,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Hits by tier, what moved between tiers, how full they are, what quantized pages save, and how pages are chosen to leave.

    "Used" is all that a tier has given out, "in pages" what the pages held take, and "unquantized" what the same pages
    would take in the model's own numbers. "Converted" pages were rewritten in another format; those that "left window"
    are no longer attended by the stream that made them. "Guard fell back" counts how often `cache.policy` found less than
    lru would and lru took over; pages "not written" to a tier would take longer to load from there than to compute.

    \b
    Examples:
      kvtier stats
      kvtier stats --watch
      kvtier stats --json | jq .tiers.L3.hit_rate
      kvtier stats --json | jq '.tiers.L1 | .page_bytes, .raw_bytes, .saved, .variants'
      kvtier stats --json | jq '.tiers | map_values(.policy)'
    """
    if watch:
        with (
            suppress(KeyboardInterrupt),
            connected(endpoint, tls) as client,
        ):  # Ctrl-C is how it is meant to end
            _watch(client, interval, as_json)
        return
    with connected(endpoint, tls) as client:
        now = client.stats()
    print_json(now) if as_json else out.print(stats_view(now))


def _watch(client: Client, interval: float, as_json: bool) -> NoReturn:
    if as_json:
        while True:
            print(json.dumps(client.stats()), flush=True)
            time.sleep(interval)
    if not out.is_terminal:
        while True:
            out.print(stats_view(client.stats()))
            out.print()
            out.file.flush()
            time.sleep(interval)
    with Live(stats_view(client.stats()), console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(stats_view(client.stats()), refresh=True)


def stats_view(now: dict[str, Any]) -> RenderableType:
    """The tables of `kvtier stats`."""
    tiers = {name: now["tiers"][name] for name in TIERS if name in now["tiers"]}
    held = ("tier", "held in", "used", "of", "pages", "hit rate", "hit tokens", "looked up")
    moved = ("tier", "promoted", "demoted", "evicted", "corrupt", "in", "out", "load p50", "p99")
    stored = ("tier", "in pages", "unquantized", "saved", "converted", "left window", "pages by format")
    policies = ("tier", "evicts by", "guard fell back", "not written")
    prompt = now["prompt_tokens"]
    totals = (
        f"{human_count(now.get('requests', 0))} requests, {human_count(prompt)} prompt tokens: "
        f"{human_count(now['cached_tokens'])} cached ({share(now['cached_tokens'] / prompt if prompt else 0)}), "
        f"{human_count(now['computed_tokens'])} computed; {human_count(now['aborted_prompt_tokens'])} aborted; "
        f"L1 pages are {share(now['page_fill'])} full"
    )
    if now.get("failed_requests", 0):
        totals += f"; {human_count(now['failed_requests'])} requests ended by an error of their own"
    return Group(
        table(None, held, [_held(name, tier) for name, tier in tiers.items()], right=held[2:]),
        Text(),
        table(None, moved, [_moved(name, tier) for name, tier in tiers.items()], right=moved[1:]),
        Text(),
        table(None, stored, [_stored(name, tier) for name, tier in tiers.items()], right=stored[1:6]),
        Text(),
        table(None, policies, _policies(tiers), right=policies[2:]),
        Text(),
        Text(totals),
    )


def _held(name: str, tier: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        _PLACES[name],
        human_bytes(tier["used_bytes"]),
        human_bytes(tier["capacity_bytes"]),
        human_count(tier["pages"]),
        share(tier["hit_rate"]),
        human_count(tier["hit_tokens"]),
        human_count(tier["lookups_tokens"]),
    )


def _moved(name: str, tier: dict[str, Any]) -> tuple[str, ...]:
    counts = (tier["promoted_pages"], tier["demoted_pages"], tier["evicted_pages"], tier["corrupt_pages"])
    loads = (tier["load_ms_p50"], tier["load_ms_p99"])
    return (
        name,
        *map(human_count, counts),
        human_bytes(tier["bytes_in"]),
        human_bytes(tier["bytes_out"]),
        *(f"{load:.2f} ms" if load else "-" for load in loads),
    )


def _stored(name: str, tier: dict[str, Any]) -> tuple[str, ...]:
    formats = sorted(tier["variants"].items(), key=lambda entry: (-entry[1], entry[0]))
    return (
        name,
        human_bytes(tier["page_bytes"]),
        human_bytes(tier["raw_bytes"]),
        share(tier["saved"]) if tier["raw_bytes"] else "-",
        human_count(tier["converted_pages"]),
        human_count(tier["dropped_pages"]),
        ", ".join(f"{variant} {human_count(pages)}" for variant, pages in formats if pages) or "-",
    )


def _policies(tiers: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (name, tier["policy"], human_count(tier["fallbacks"]), human_count(tier["refused_writes"]))
        for name, tier in tiers.items()
        if tier["policy"]
    ]


def explain(
    request_id: Annotated[str, typer.Argument(help="As `kvtier generate` says it.")],
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Where a request's prompt was found, and why the rest was not.

    \b
    Examples:
      kvtier explain 4f1c9a
    """
    with connected(endpoint, tls) as client:
        told = client.explain(request_id)
    if as_json:
        print_json(told)
        return
    out.print(
        f"request {told['request_id']} of tenant {told['tenant']} on {told['worker']}: "
        f"{human_count(told['prompt_tokens'])} prompt tokens, preempted {told['preemptions']} times"
    )
    for move in told["moves"]:
        out.print(f"went on at {move['worker']} after {human_count(move['tokens'])} tokens: {move['reason']}")
    rows = [
        (f"{n['start']}-{n['end']}", human_count(n["end"] - n["start"]), n["tier"], n["reason"], n["detail"])
        for n in told["notes"]
    ]
    out.print(
        table(None, ("prompt", "tokens", "where", "reason", "detail"), rows, right=("prompt", "tokens"))
    )
