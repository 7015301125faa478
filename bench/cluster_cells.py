"""What bench/cluster.py measured of each length at each peer, and what that says: crossovers, and whether choices were right."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cluster_engines import Answer, Side
from cluster_nodes import Peer
from common import Figure

GOAL = 0.95
LEAST_NOISE, MOST_NOISE = 1.1, 1.25  # sides whose medians are within this factor at least, at most, are alike
FAR = 2.0  # a side that takes so many times as long as the other is measured once, a fetch not to its end


@dataclass
class Cell:
    """A length, asked for at a peer: seconds of each side, and what was chosen."""

    length: int
    peer: Peer
    seconds: dict[Side, list[float]] = field(default_factory=lambda: {"fetch": [], "recompute": []})
    picks: list[Side] = field(default_factory=list)
    num_fetched: int = 0  # fetches by which pages came before the request was over or given up
    whys: list[str] = field(default_factory=list)  # of picks whose prefix was not all fetched

    def add(self, answer: Answer) -> None:
        """What a request took."""
        self.seconds[answer.picked].append(answer.seconds)
        self.num_fetched += answer.remote_tokens > 0

    def median_s(self, side: Side) -> float:
        """Of a fetch in vain: at least."""
        return statistics.median(self.seconds[side])

    @property
    def ratio(self) -> float:
        """Of a fetch to computing."""
        return self.median_s("fetch") / self.median_s("recompute")

    @property
    def is_in_vain(self) -> bool:
        """Fetching gives nothing."""
        return bool(self.seconds["fetch"]) and not self.num_fetched

    @property
    def is_clear(self) -> bool:
        """Both sides were measured, and fetching is in vain, or one takes more than FAR times as long."""
        return all(self.seconds.values()) and (self.is_in_vain or not 1 / FAR <= self.ratio <= FAR)

    @property
    def cheaper(self) -> Side:
        """By the medians."""
        return "recompute" if self.is_in_vain or self.ratio >= 1.0 else "fetch"

    def is_alike(self, noise: float) -> bool:
        """Neither side is to be called cheaper."""
        return not self.is_in_vain and 1 / noise <= self.ratio <= noise

    def right(self, noise: float) -> float:
        """Share of the picks."""
        return 1.0 if self.is_alike(noise) else self.picks.count(self.cheaper) / len(self.picks)

    def to_json(self, noise: float) -> dict[str, Any]:
        """For --json."""
        return {
            "length": self.length,
            "peer": self.peer.label,
            "bytes_s": self.peer.bytes_s,
            "fetch_s": self.seconds["fetch"],
            "recompute_s": self.seconds["recompute"],
            "picks": self.picks,
            "is_in_vain": self.is_in_vain,
            "is_alike": self.is_alike(noise),
            "right": self.right(noise),
            "whys": self.whys,
        }


def first_tokens(cells: list[Cell], lengths: list[int], page_bytes: int, page_tokens: int) -> list[Figure]:
    """Time to the first token by length, at peers that nothing slows."""
    figures = []
    for length in lengths:
        alike = [cell for cell in cells if cell.length == length]
        computed = [1e3 * s for cell in alike for s in cell.seconds["recompute"]]
        nbytes = length // page_tokens * page_bytes
        figures.append(Figure(f"{length} tokens computed", computed, "ms"))
        for cell in alike:
            if cell.peer.bytes_s is None and cell.num_fetched:
                name = f"{length} tokens, {nbytes / 1e6:.1f} MB by {cell.peer.label}"
                samples = [1e3 * s for s in cell.seconds["fetch"]]
                figures.append(Figure(name, samples, "ms", "computed", cell.ratio))
    return figures


def crossover(cells: list[Cell]) -> tuple[float, float] | None:
    """Between which speeds, in bytes/s, fetching a length becomes cheaper; one speed where it was measured on both sides.

    `cells` are of that length, over wires, the slowest first. None: no speed is enough.
    """
    if cells and cells[0].cheaper == "fetch":
        assert cells[0].peer.bytes_s is not None
        return 0.0, cells[0].peer.bytes_s
    for slow, fast in pairwise(cells):
        if (slow.cheaper, fast.cheaper) != ("recompute", "fetch"):
            continue
        assert slow.peer.bytes_s is not None and fast.peer.bytes_s is not None
        if slow.is_in_vain:
            return slow.peer.bytes_s, fast.peer.bytes_s
        # The time of a fetch is a line over the seconds of a byte.
        at = (1.0 - fast.ratio) / (slow.ratio - fast.ratio)
        byte_s = 1 / fast.peer.bytes_s + at * (1 / slow.peer.bytes_s - 1 / fast.peer.bytes_s)
        return 1 / byte_s, 1 / byte_s
    return None


def crossovers(cells: list[Cell], lengths: list[int]) -> dict[int, tuple[float, float] | None]:
    """By length."""
    slowed = [cell for cell in cells if cell.peer.bytes_s is not None]
    return {length: crossover([cell for cell in slowed if cell.length == length]) for length in lengths}


def noise_of(cells: list[Cell]) -> float:
    """The factor between the slowest and the quickest of the times of computing that should be equal, by the median."""
    several = [cell.seconds["recompute"] for cell in cells if len(cell.seconds["recompute"]) > 1]
    spread = statistics.median(max(seconds) / min(seconds) for seconds in several) if several else 1.0
    return min(MOST_NOISE, max(LEAST_NOISE, spread))


def print_cells(cells: list[Cell], noise: float) -> None:
    """A line for each length at each speed."""
    print(f"\n  {'prefix':>6}  {'speed':<10} {'fetched':>12} {'computed':>12}   {'chosen':<16} right")
    for cell in cells:
        fetched = f"{'> ' if cell.is_in_vain else ''}{1e3 * cell.median_s('fetch'):.0f} ms"
        computed = f"{1e3 * cell.median_s('recompute'):.0f} ms"
        fetches = cell.picks.count("fetch")
        chosen = " ".join(
            f"{name} {count}"
            for name, count in (("fetch", fetches), ("compute", len(cell.picks) - fetches))
            if count
        )
        verdict = f"{cell.right(noise):.0%}{' (alike)' if cell.is_alike(noise) else ''}"
        print(
            f"  {cell.length:>6}  {cell.peer.label:<10} {fetched:>12} {computed:>12}   {chosen:<16} {verdict}"
        )
        for why in dict.fromkeys(cell.whys if cell.right(noise) < 1.0 else ()):
            print(f"          {why}")


def print_crossovers(found: dict[int, tuple[float, float] | None]) -> None:
    """The speed from which on fetching is cheaper."""
    print("\nfetching is cheaper than computing from")
    for length, speeds in found.items():
        if speeds is None:
            said = "no speed measured here"
        elif speeds[0] == speeds[1]:
            said = f"{speeds[0] / 1e6:.1f} MB/s on"
        else:
            said = f"some speed between {speeds[0] / 1e6:.0f} and {speeds[1] / 1e6:.0f} MB/s on"
        print(f"  {length:>6} tokens  {said}")


def choices(cells: list[Cell], noise: float) -> Figure:
    """Whether the cheaper side was chosen."""
    shares = [cell.right(noise) for cell in cells]
    alike = sum(cell.is_alike(noise) for cell in cells)
    name = f"right; {alike} of {len(cells)} alike, within {noise - 1:.0%}"
    return Figure(name, [100 * share for share in shares], "%", "choices", statistics.mean(shares), GOAL)
