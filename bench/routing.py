#!/usr/bin/env python3
"""Routing on a simulated cluster, in virtual time: hits and time to the first token, by policy and number of workers.

  bench/routing.py [--workers 1,2,4,16,64,256] [--load 0.8] [--traces FOLDER] [--json FILE]

An hour of a real chat service (mooncake_conversation, see bench/workloads.py) is played on simulated workers, eight a node:
src/kvtier/lab/simulation/cluster.py runs the real routing, directory, coordinators and L1 policies; what takes time is an 8 B model's
(pages of 512 tokens, 20 ms each to compute at depth 0, twice that at depth 64; 1.3 ms from L3, 11 ms from one of four SSDs,
3 ms from another node). A worker has an L1 of 400 pages, its node 500 of L3 and 3,000 of L4 for each worker.

So that a run takes minutes, of the trace's conversations some are played, each whole (about --requests requests, or
--per-worker for each worker), and time is compressed until computing all prompts would keep every worker busy for
--load of it, however many there are. No turn comes before the answer that it continues. The first quarter isn't scored.
A second table has one rate, which loads four workers so, on more and more workers.

Ratios are to least_loaded. Exits with 1 where `prefix` has a longer p90 than it, or finds fewer pages, by more than --slack: from
one sample (--seed) of a thousand requests to the next, p90 changes by 5 %, and its ratio by as much.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

from common import argument_parser, machine
from routing_cases import Result, at_load, play, read, requests_of
from workloads import traces_option

from kvtier.cluster.routing.router import Policy
from kvtier.lab.simulation.cluster import Shape
from kvtier.lab.traces.trace import Trace
from kvtier.tier.policy.base import PolicySettings

L1_PAGES, L3_PAGES, L4_PAGES = 400, 500, 3000  # a quarter of what an H200 has, as the sample is of the trace
FIXED_WORKERS = 4
LEAST_WORKERS_HELD = 2  # with one there is nothing to choose
HEAD = (
    "workers",
    "routing",
    "req/s",
    "hits",
    "L1",
    "L3",
    "L4",
    "remote",
    "p50 s",
    "p90 s",
    "p99 s",
    "busy",
    "max/mean",
    "worst p90",
)


def shape_of(workers: int, policy: str) -> Shape:
    """The simulated cluster."""
    return Shape(
        workers, l1_pages=L1_PAGES, l3_pages=L3_PAGES, l4_pages=L4_PAGES, policy=PolicySettings(name=policy)
    )


def same_load(trace: Trace, workers: int, args: argparse.Namespace) -> list[Result]:
    """All policies, each worker as loaded as with any other number of them."""
    sample = requests_of(trace, max(args.requests, args.per_worker * workers), args.seed)
    requests, shape = at_load(sample, shape_of(workers, args.policy), args.load)
    return [shown(play(shape, requests, routing, progress(len(requests)))) for routing in args.routings]


def same_rate(trace: Trace, workers: Iterable[int], args: argparse.Namespace) -> list[Result]:
    """All policies on more and more workers, at one rate."""
    sample = requests_of(trace, args.requests, args.seed)
    requests, base = at_load(sample, shape_of(FIXED_WORKERS, args.policy), args.load)
    results = []
    for count in workers:
        shape = replace(base, workers=count)
        for routing in args.routings:
            results.append(shown(play(shape, requests, routing, progress(len(requests)))))
    return results


def progress(requests: int) -> Callable[[int], None]:
    """Says on a terminal how far a play is."""

    def tick(done: int) -> None:
        if sys.stderr.isatty() and done % 50 == 0:
            print(f"\r{done}/{requests} requests ", end="", file=sys.stderr, flush=True)

    return tick


def shown(result: Result) -> Result:
    """Print a line."""
    tiers = [f"{100 * result.by_tier.get(tier, 0.0):.1f}%" for tier in ("L1", "L3", "L4", "remote")]
    cells = [
        *(str(result.workers), result.routing, f"{result.rate:.1f}", f"{100 * result.hit_rate:.1f}%", *tiers),
        *(f"{seconds:.2f}" for seconds in (result.p50_s, result.p90_s, result.p99_s)),
        *(f"{100 * result.busy:.0f}%", f"{result.imbalance:.2f}", f"{result.worst_p90_s:.2f}"),
    ]
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    print(line(cells), flush=True)
    return result


def line(cells: Iterable[str]) -> str:
    """One of a table."""
    return " ".join(f"{cell:>12}" if place == 1 else f"{cell:>9}" for place, cell in enumerate(cells))


def ratios(results: list[Result]) -> list[dict[str, float | int | str]]:
    """Of each play to that of least_loaded with as many workers: p50, p90, and pages found in L1."""
    base = {one.workers: one for one in results if one.routing == "least_loaded"}
    found = []
    for one in results:
        other = base.get(one.workers)
        if other is None or one is other:
            continue
        l1, others = (play.by_tier.get("L1", 0.0) for play in (one, other))
        row = {
            "workers": one.workers,
            "routing": one.routing,
            "p50": one.p50_s / other.p50_s,
            "p90": one.p90_s / other.p90_s,
        }
        found.append(
            {**row, "l1": l1 / others if others else 1.0, "hits": one.hit_rate / max(1e-9, other.hit_rate)}
        )
    return found


def missed(rows: list[dict[str, Any]], slack: float) -> list[str]:
    """Where `prefix` is worse than least_loaded."""
    return [
        f"{row['workers']} workers: p90 {row['p90']:.2f} and pages found {row['hits']:.2f} of least_loaded's"
        for row in rows
        if row["routing"] == "prefix" and row["workers"] >= LEAST_WORKERS_HELD
        if row["p90"] > 1 + slack or row["hits"] < 1 - slack
    ]


def main() -> None:
    """Play, print, compare."""
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", default="1,2,4,16,64,256", help="numbers of them (default: %(default)s)")
    parser.add_argument(
        "--fixed", default="3,4,6,8", help="the same, at one rate; empty: none (default: %(default)s)"
    )
    parser.add_argument("--routings", default=",".join(get_args(Policy)), help="default: %(default)s")
    parser.add_argument(
        "--requests", type=int, default=1500, help="played at least, of 12,031 (default: %(default)s)"
    )
    parser.add_argument(
        "--per-worker", type=int, default=24, help="played at least, of each worker (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the sample of conversations (default: %(default)s)"
    )
    parser.add_argument(
        "--load", type=float, default=0.8, help="more makes queues longer (default: %(default)s)"
    )
    parser.add_argument(
        "--policy",
        default="lru",
        help="of eviction: lru, or rvi, which costs more time (default: %(default)s)",
    )
    parser.add_argument(
        "--slack", type=float, default=0.1, help="of p90 and hits that is no loss (default: %(default)s)"
    )
    traces_option(parser)
    args = parser.parse_args()
    args.routings = args.routings.split(",")
    trace = read(args.traces)
    tables = {}
    print(f"{machine()}\n\nequal load of each worker: {args.load:g} without a cache\n{line(HEAD)}")
    tables["equal load"] = [one for count in _numbers(args.workers) for one in same_load(trace, count, args)]
    if args.fixed:
        print(f"\none rate, which would load {FIXED_WORKERS} workers so\n{line(HEAD)}")
        tables["one rate"] = same_rate(trace, _numbers(args.fixed), args)
    compared = {name: ratios(results) for name, results in tables.items()}
    for name, rows in compared.items():
        print(f"\nratios to least_loaded, {name}")
        for row in rows:
            print(
                f"  {row['workers']:>4} {row['routing']:<12} p50 {row['p50']:.2f}  p90 {row['p90']:.2f}  pages found in L1 {row['l1']:.2f}, anywhere {row['hits']:.2f}"
            )
    if args.json:
        content = {name: [one.to_json() for one in results] for name, results in tables.items()}
        args.json.write_text(
            json.dumps({"machine": machine(), "tables": content, "ratios": compared}, indent=1) + "\n"
        )
    worse = [text for rows in compared.values() for text in missed(rows, args.slack)]
    print(
        "\nprefix is worse than least_loaded: " + "; ".join(worse)
        if worse
        else "\nprefix is nowhere worse than least_loaded"
    )
    sys.exit(bool(worse))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
