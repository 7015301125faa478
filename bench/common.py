"""What the benchmarks share: interleaved rounds, figures with their goals, a table, --json.

Keep a round's piece of work to a few milliseconds and let rounds be many: most pieces then run undisturbed on a busy
machine too, and medians ignore the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Seconds = dict[str, list[float]]  # contender -> one sample per round


def argument_parser(doc: str | None, rounds: int = 9) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: --rounds, --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="more is steadier (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser


def interleave(contenders: Mapping[str, Callable[[], None]], rounds: int) -> Seconds:
    """Time every contender once per round, in an order drawn again, so that noise meets all of them alike.

    Two rounds before are not counted.
    """
    names = list(contenders)
    seconds: Seconds = {name: [] for name in names}
    rng = random.Random(0)
    for number in range(-2, rounds):
        rng.shuffle(names)
        for name in names:
            start = time.perf_counter()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclass
class Figure:
    """One line of a benchmark: a measured value, and its share of a limit measured in the same rounds."""

    name: str
    samples: list[float]  # one per round
    unit: str
    of: str = ""  # the limit's name
    share: float | None = None  # of the limit
    goal: float | None = None  # share to reach

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    def percentile(self, percent: int) -> float:
        """Of the samples."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None or self.share is None else self.share >= self.goal

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "value": self.value,
            "p10": self.percentile(10),
            "p90": self.percentile(90),
            "unit": self.unit,
            "of": self.of,
            "share": self.share,
            "goal": self.goal,
            "ok": self.reached,
        }


def throughput(seconds: Seconds, name: str, nbytes: int, of: str = "", goal: float | None = None) -> Figure:
    """GB/s of a contender that moved `nbytes` a round; its share of contender `of`'s, both by their medians."""
    samples = [nbytes / s / 1e9 for s in seconds[name]]
    share = statistics.median(seconds[of]) / statistics.median(seconds[name]) if of else None
    return Figure(name, samples, "GB/s", of, share, goal)


def print_table(title: str, figures: list[Figure]) -> None:
    """Value with its spread, share of the limit, goal, ok or below."""
    print(f"\n{title}")
    print(f"  {'':<44} {'median':>9} {'p10 - p90':>19}   {'share of the limit':<34} goal")
    for f in figures:
        spread = f"{f.percentile(10):.2f} - {f.percentile(90):.2f}"
        share = "" if f.share is None else f"{f.share:6.1%} of {f.of}"
        verdict = {None: "", True: "ok", False: "below"}[f.reached]
        goal = "" if f.goal is None else f"{f.goal:.0%} {verdict}"
        print(f"  {f.name:<44} {f.value:>9.2f} {spread:>19} {f.unit:<4} {share:<32} {goal}".rstrip())


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def finish(tables: Mapping[str, list[Figure]], path: Path | None, **more: Any) -> int:
    """Print the tables, write the JSON file, with `more` in it; the exit code: 1 when a goal is missed."""
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, load {here['load_average']:.1f}, kernel {here['kernel']}")
    for title, figures in tables.items():
        print_table(title, figures)
    if path is not None:
        content = {
            "machine": here,
            "tables": {title: [f.to_json() for f in rows] for title, rows in tables.items()},
            **more,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(f.reached is False for rows in tables.values() for f in rows))


def row_texts(row: Mapping[str, Any]) -> list[str]:
    """Names and values of a row, numbers in four digits."""
    return [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]


def write_section(path: Path, name: str, lines: list[str]) -> None:
    """Put lines between the marks of `name` in a Markdown file, at its end where there are none yet."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    text = path.read_text() if path.is_file() else "# GPU results\n"
    section = "\n".join([begin, "", *lines, "", end])
    if begin in text and end in text:
        head, rest = text.split(begin, 1)
        text = head + section + rest.split(end, 1)[1]
    else:
        text = text.rstrip() + "\n\n" + section + "\n"
    path.write_text(text)
