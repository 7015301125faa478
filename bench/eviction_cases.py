"""Which replays docs/eviction.md is made of, and what each gave."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eviction_reference import CAPACITIES, CHAIN_GOALS

from kvtier.lab.replay.models import LIVE, POLICIES, Setup
from kvtier.lab.replay.replay import TIERS, Result
from kvtier.tier.policy.base import PolicySettings

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("conv", "synth", "agents")
MAIN = ("lru", "arc", "s3fifo", "lirs", "wa", "rvi", "belady")
EXPONENTS = (0.0, 1.0)
TYPICAL = {
    "cc": 2000,
    "mix": 10000,
}  # of the workloads of millions of blocks: what is slow is replayed here only
SLOW = ("score", "rvi-noguard")
OTHER_SEEDS = {  # not tuned on
    ("cc", 1): (2000, 5000),
    ("cc", 2): (1000, 2000),
    ("mix", 1): (5000, 10000),
    ("agents", 1): (100, 200),
    ("agents", 2): (100, 200),
}
SESSIONS = {"cc": (1000, 2000, 5000), "agents": (100, 200), "conv": (1953, 5859, 10000)}
TITLES = {
    "conv": "Chat (Mooncake conversation)",
    "synth": "Mooncake synthetic",
    "cc": "Coding agent (Claude Code)",
    "mix": "Chat and coding agent",
    "agents": "Three small agents",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One replay."""

    workload: str
    seed: int
    policy: str
    capacity: int
    exponent: float = 0.25
    session_ends: bool = False
    tiers: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Tells it from all others."""
        tiers = "-".join(map(str, self.tiers))
        ends = "ends" if self.session_ends else ""
        parts = (f"{self.workload}.{self.seed}", self.policy, self.capacity, self.exponent, ends, tiers)
        return " ".join(str(part) for part in parts if part != "")

    @property
    def kind(self) -> str:
        """Which sources its result depends on."""
        if self.tiers:
            return "chain"
        return "lru" if self.policy == "lru" else "live" if self.policy in LIVE else "baseline"

    def setup(self) -> Setup:
        """As a replay takes it."""
        return Setup(
            self.policy,
            self.capacity,
            PolicySettings(exponent=self.exponent),
            session_ends=self.session_ends,
            tiers=dict(zip(TIERS, self.tiers, strict=True)) if self.tiers else None,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What a case gave."""

    hit: float
    saved: float
    time_saved: float
    by_tier: dict[str, float]
    ssd_per_page: float  # pages written to the SSD over pages asked for
    cpu_us: float  # per page asked for, of the whole trace

    @staticmethod
    def of(result: Result, references: int, cpu_s: float) -> Row:
        """A result's row."""
        return Row(
            result.score.block_hit_rate,
            result.score.compute_saved,
            result.time_saved,
            result.by_tier,
            result.ssd_written_pages / max(1, result.score.pages),
            1e6 * cpu_s / max(1, references),
        )


class Rows:
    """Results by case, kept in a file from run to run as long as the sources are the same.

    A result belongs to the sources as they were when this process first looked, which is when it imported them.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[str, dict[str, Any]] = {}
        for kind in _ROOTS:
            sources(kind)
        if file.is_file():
            found = json.loads(file.read_text())
            self._rows = {key: row for key, row in found.items() if row["sources"] == sources(row["kind"])}

    def __contains__(self, case: Case) -> bool:
        return case.key in self._rows

    def __getitem__(self, case: Case) -> Row:
        return Row(**{name: self._rows[case.key][name] for name in Row.__slots__})

    def put(self, case: Case, row: Row) -> None:
        """Keep one, on the disk too."""
        kept = {name: getattr(row, name) for name in Row.__slots__}
        self._rows[case.key] = {**kept, "kind": case.kind, "sources": sources(case.kind)}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._rows, indent=0))
        part.replace(self._file)

    def at(self, workload: str, policy: str, capacity: int, seed: int = 0, **more: Any) -> Row:
        """The row of a case."""
        return self[Case(workload, seed, policy, capacity, **more)]

    def find(self, workload: str, policy: str, capacity: int, **more: Any) -> Row | None:
        """The row of a case that may not have been replayed."""
        case = Case(workload, 0, policy, capacity, **more)
        if case not in self:
            return None
        return self[case]


_SHARED = ("lab.replay.replay", "lab.traces.trace")
_ROOTS = {  # the modules that a replay of a kind begins with
    "lru": ("tier.policy.ghost_cache", "tier.policy.base", *_SHARED),
    "live": ("tier.policy.ghost_cache", "tier.policy.registry", *_SHARED),
    "baseline": ("lab.replay.baselines.registry", *_SHARED),
    "chain": ("lab.replay.chain_tiers", "tier.policy.registry", *_SHARED),
}
_IMPORT = re.compile(r"^ *from kvtier\.((?:tier|lab)[\w.]*) import ([\w, ]+|\([^)]*\))", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?: as \w+)?")


@cache
def sources(kind: str) -> str:
    """A digest of all files that the results of this kind depend on."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(map(_file_of, _with_imports(_ROOTS[kind]))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _file_of(module: str) -> Path:
    return (ROOT / "src" / "kvtier").joinpath(*module.split(".")).with_suffix(".py")


def _with_imports(modules: Iterable[str]) -> set[str]:
    """The modules and all of tier/ and lab/ that they import, and those do."""
    found: set[str] = set()
    left = list(modules)
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            for package, names in _IMPORT.findall(_file_of(module).read_text()):
                is_module = _file_of(package).is_file()
                left += [package] if is_module else [f"{package}.{name}" for name in _NAME.findall(names)]
    return found


def cases(quick: bool) -> Iterator[Case]:
    """All of them, those of one workload together."""
    policies = MAIN if quick else POLICIES
    for workload, capacities in CAPACITIES.items():
        if quick and workload not in QUICK:
            continue
        for capacity in capacities:
            is_slow = capacity != TYPICAL.get(workload, capacity)
            shown = [policy for policy in policies if not (is_slow and policy in SLOW)]
            yield from (Case(workload, 0, policy, capacity) for policy in shown)
            if not (quick or is_slow):
                yield from (Case(workload, 0, "rvi", capacity, exponent) for exponent in EXPONENTS)
    if not quick:
        yield from _other_cases()


def _other_cases() -> Iterator[Case]:
    for workload, capacities in SESSIONS.items():
        told = sessions_of(workload)
        yield from (
            Case(told, 0, policy, capacity, session_ends=ends)
            for capacity in capacities
            for policy in ("lru", "rvi")
            for ends in (False, True)
        )
    for goal in CHAIN_GOALS:
        policies = ("rvi",) if goal.workload in TYPICAL else ("lru", "rvi")
        yield from (Case(goal.workload, 0, policy, sum(goal.pages), tiers=goal.pages) for policy in policies)
    for (workload, seed), capacities in OTHER_SEEDS.items():
        yield from (Case(workload, seed, policy, capacity) for capacity in capacities for policy in MAIN)


def sessions_of(workload: str) -> str:
    """The workload whose sessions are told: chat's aren't in its trace, and are made out of it."""
    return "conv+sessions" if workload == "conv" else workload
