#!/usr/bin/env python3
"""Choosing what leaves a tier: CPU time of an eviction, a release and a reuse, at 10k, 100k and 1M candidates.

  bench/eviction.py [--runs 10000,100000,1000000] [--json FILE]

Candidates are runs of one page, as in a node, which keeps a row per page. An eviction is all of it: the draw, and taking the
victim out of the set and forgetting it; a new page takes its place, whose cost isn't counted. A release and a reuse are
of 256 pages at once. Process CPU time, so that other load on the machine hardly shows; median [min - max] over batches.
Goals: at most 5 us a page evicted, and at the largest size at most 3 times what it takes at the smallest.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from common import machine

from kvtier.tier.policy.base import Candidates, Costs, Kind, Lru, Policy, PolicySettings, Row, Use
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.rvi.policy import Rvi

REQUEST = 256  # pages
EVICTED, BATCHES = 2048, 9
EVICT_US, FLAT = 5.0, 3.0

POLICIES: dict[str, Callable[[int], Policy]] = {
    "rvi, 8 of 384": lambda n: Rvi(PolicySettings()),
    "rvi, 1 of 64": lambda n: Rvi(PolicySettings(draw=64, per_draw=1)),
    "rvi, 8 of 512": lambda n: Rvi(PolicySettings(draw=512, per_draw=8)),
    "rvi fallen back": lambda n: fallen(n),
    "lru": lambda n: Lru(),
}


def fallen(n: int) -> Policy:
    """A guarded policy that goes by LRU."""
    policy = Guarded(PolicySettings(), n)
    policy.by_lru = True
    return policy


class Tier:
    """Pages in rows of their own, all of them candidates."""

    def __init__(self, policy: Policy, pages: int) -> None:
        self.policy = policy
        policy.costs = Costs(page_s=0.02)
        self.leaves: Candidates = policy.candidates()
        self.rng = np.random.default_rng(0)
        self.now = 0.0
        self.rows: list[Row] = []
        while len(self.rows) < pages:
            self.fill(min(REQUEST, pages - len(self.rows)))

    def fill(self, pages: int) -> None:
        """A request of new pages."""
        self.now += 0.1
        rows = [self.policy.add(1, depth, 1 << 20, pages, self.now) for depth in range(pages)]
        self.release(rows)
        for row in rows:
            self.leaves.add(row)
        self.rows += rows

    def release(self, rows: list[Row]) -> None:
        """A request lets its pages go."""
        use = Use(len(rows), len(rows), int(self.rng.integers(1, 999)), Kind(int(self.rng.integers(4))))
        self.policy.release(rows, range(len(rows) - 1, -1, -1), use, self.now)

    def evict(self, pages: int) -> None:
        """As an owner does: ask, take out, forget."""
        left = pages
        while left > 0:
            victims = self.leaves.victims(left, self.now)
            for row, count in victims:
                self.leaves.discard(row)
                self.policy.forget(row)
                left -= count


def us_per_page(work: Callable[[], None], pages: int) -> float:
    """CPU microseconds."""
    gc.disable()
    start = time.process_time()
    work()
    spent = time.process_time() - start
    gc.enable()
    return spent / pages * 1e6


def measure(name: str, pages: int) -> dict[str, list[float]]:
    """Samples of one policy at one size."""
    tier = Tier(POLICIES[name](pages), pages)
    samples: dict[str, list[float]] = {"evict": [], "release": [], "reuse": []}
    for _ in range(BATCHES):
        tier.now += 5.0
        samples["evict"].append(us_per_page(lambda: tier.evict(EVICTED), EVICTED))
        tier.rows = []
        for _ in range(EVICTED // REQUEST):
            tier.fill(REQUEST)
        rows = tier.rows[:REQUEST]
        samples["reuse"].append(us_per_page(partial(tier.policy.reuse, rows, tier.now + 1.0), REQUEST))
        samples["release"].append(us_per_page(partial(tier.release, rows), REQUEST))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default="10000,100000,1000000", help="sizes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()
    sizes = [int(size) for size in args.runs.split(",")]
    figures: list[dict[str, object]] = []
    missed = []
    print(f"{'policy':<16} {'work':<8} {'candidates':>10} {'us a page':>10}")
    for name in POLICIES:
        medians = []
        for size in sizes:
            for work, samples in measure(name, size).items():
                median = statistics.median(samples)
                figures.append({"policy": name, "work": work, "candidates": size, "us_per_page": samples})
                print(
                    f"{name:<16} {work:<8} {size:>10,} {median:>10.2f} [{min(samples):.2f} - {max(samples):.2f}]"
                )
                if work == "evict":
                    medians.append(median)
        if max(medians) > EVICT_US or medians[-1] > FLAT * medians[0]:
            missed.append(name)
    print(
        f"goal, at most {EVICT_US} us a page evicted and flat within {FLAT}: "
        + (", ".join(missed) + " missed it" if missed else "reached")
    )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
