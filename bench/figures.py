#!/usr/bin/env python3
"""Eviction on real traces: every policy at every size, tier chains, session ends; docs/eviction.md and its plots.

  bench/figures.py [--traces FOLDER] [--quick] [--processes N] [--work FOLDER] [--report FILE.md]

Makes the workloads of bench/workloads.py from the public traces in --traces (or KVTIER_TRACES; its --help says where they
come from), replays them, and writes tables and plots between the marks of docs/eviction.md. Goals are in
bench/eviction_reference.py; the exit code is 1 when one is missed. Workloads and results stay in --work, and what was
replayed with the same sources is not replayed again; --only POLICY,... fills in some of it. --quick takes conv, synth and
agents, the main policies only, and writes no report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import eviction_tables as tables
import numpy as np
from common import machine, write_section
from eviction_cases import ROOT, TITLES, Case, Row, Rows, cases
from eviction_reference import CAPACITIES, CHAIN_GOALS, GOALS, NEVER_BELOW, WITHIN
from workloads import make, traces_option

from kvtier.lab.plots import Curve, Panel, draw
from kvtier.lab.replay.jobs import run_jobs
from kvtier.lab.replay.models import POLICIES
from kvtier.lab.replay.replay import Result, infinite
from kvtier.lab.traces.files import load_trace
from kvtier.lab.traces.trace import Trace


def replay_all(
    wanted: Iterable[Case], rows: Rows, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Replay what isn't there yet; what an infinite cache hits, by workload."""
    by_trace: dict[tuple[str, int], list[Case]] = {}
    for case in dict.fromkeys(wanted):
        by_trace.setdefault((case.workload, case.seed), []).append(case)
    ideal: dict[str, dict[str, float]] = {}
    for (workload, seed), group in by_trace.items():
        missing = [case for case in group if case not in rows]
        trace = loaded(workload, seed, options)
        best = infinite(trace).score
        ideal[f"{workload}.{seed}"] = {
            "requests": len(trace),
            "references": trace.references,
            "distinct": trace.distinct_pages,
            "hit": best.block_hit_rate,
            "saved": best.compute_saved,
        }
        _replay(trace, missing, rows, options)
    return ideal


def _replay(trace: Trace, group: Sequence[Case], rows: Rows, options: argparse.Namespace) -> None:
    def heard(number: int, result: Result, cpu_s: float) -> None:
        case = group[number]
        rows.put(case, row := Row.of(result, trace.references, cpu_s))
        chain = f" time saved {row.time_saved:.3f}" if case.tiers else ""
        print(
            f"  {case.key:<60} {row.hit:.3f} / {row.saved:.3f}{chain}  {row.cpu_us:6.2f} us/page", flush=True
        )

    run_jobs(trace, [case.setup() for case in group], lambda *_: None, options.processes, heard)


def loaded(workload: str, seed: int, options: argparse.Namespace) -> Trace:
    """The workload's trace, made if it isn't there."""
    name, _, told = workload.partition("+")
    file = options.work / f"{name}.{seed}.jsonl.gz"
    if not file.is_file():
        print(f"making {file}", flush=True)
        make(name, seed, options.traces, file)
    print(f"{workload}, seed {seed}", flush=True)
    trace = load_trace([str(file)])
    return with_sessions(trace) if told else trace


def with_sessions(trace: Trace) -> Trace:
    """Sessions that the trace doesn't tell: a request that goes on where one ended is of the same.

    A prompt is used up to its last page but one, for that one's end may have been partial.
    """
    ends: dict[int, int] = {}  # session by the last whole page of its latest prompt
    session = np.zeros(len(trace), np.int64)
    for request in range(len(trace)):
        pages = trace.pages(request).tolist()
        whole = pages[: int(trace.input_tokens[request]) // trace.page_tokens]
        known = next((ends[page] for page in reversed(whole) if page in ends), request + 1)
        session[request] = known
        if whole:
            ends[whole[-1]] = known
    return replace(trace, session=session)


def write_report(rows: Rows, ideal: dict[str, dict[str, float]], report: Path) -> None:
    """Tables between the marks of the page, and the plots in a folder of its name."""
    workloads = list(CAPACITIES)
    here = machine()
    sections = {
        "workloads": tables.workloads_table(ideal),
        "goals": tables.goals_table(rows, workloads),
        "guard": tables.guard_table(rows, workloads),
        **{f"policies {name}": tables.policies_table(rows, name, ideal[f"{name}.0"]) for name in workloads},
        "simulated": tables.simulated_table(rows, workloads),
        "chains": tables.chains_table(rows),
        "sessions": tables.sessions_table(rows),
        "seeds": tables.seeds_table(rows),
        "speed": [
            *tables.speed_table(rows, workloads),
            "",
            f"{here['cpu']}, {here['cores']} cores, Python {here['python']}.",
        ],
    }
    for name, lines in sections.items():
        write_section(report, name, lines)
    folder = report.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name in workloads:
        draw([plot(rows, name, ideal[f"{name}.0"])], folder / f"{name}.png")


def plot(rows: Rows, workload: str, ideal: dict[str, float]) -> Panel:
    """Hit rate over size, one line a policy."""
    sizes = CAPACITIES[workload]
    shown = [
        policy
        for policy in POLICIES
        if policy != "rvi-noguard" and all(rows.find(workload, policy, size) for size in sizes)
    ]
    return Panel(
        title=TITLES[workload],
        xlabel="capacity (blocks)",
        ylabel="block hit rate, second half",
        curves=[
            Curve(policy, sizes, [rows.at(workload, policy, size).hit for size in sizes], policy == "belady")
            for policy in shown
        ],
        log_x=True,
        level=(ideal["hit"], "infinite cache"),
        highlighted="rvi",
    )


def main() -> None:
    """Replay, write, and say whether every goal is reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    traces_option(parser)
    parser.add_argument("--quick", action="store_true", help="minutes in place of an hour; writes no report")
    parser.add_argument("--only", metavar="POLICY,...", help="replay these policies and end there")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "figures", help="workloads, results")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "eviction.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.work / "results.json")
    wanted = list(cases(options.quick))
    if options.only:
        replay_all((case for case in wanted if case.policy in options.only.split(",")), rows, options)
        return
    ideal = replay_all(wanted, rows, options)
    workloads = [name for name in CAPACITIES if f"{name}.0" in ideal]
    for lines in (tables.goals_table(rows, workloads), tables.simulated_table(rows, workloads)):
        print("", *lines, sep="\n")
    missed = [not tables.goal_reached(rows, goal) for goal in GOALS if goal.workload in workloads]
    missed += [gain < -NEVER_BELOW for _, _, gain in tables.losses(rows, workloads)]
    missed += [worst > WITHIN for _, _, worst in tables.simulated_differences(rows, workloads)]
    if not options.quick:
        print("", *tables.chains_table(rows), sep="\n")
        missed += [not tables.chain_reached(rows, goal) for goal in CHAIN_GOALS]
        write_report(rows, ideal, options.report)
        print(f"\nwrote {options.report}")
    print(f"{len(missed) - sum(missed)} goals reached, {sum(missed)} missed")
    sys.exit(int(any(missed)))


if __name__ == "__main__":
    main()
