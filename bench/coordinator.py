#!/usr/bin/env python3
"""What a page costs the node's coordinator, in CPU time: a worker brings pages down, and as many leave L3.

  bench/coordinator.py [--pages 10000,100000] [--rounds 21] [--json FILE]

A page is told of at its request's end (Finished) and stored (Stored); a slot of L3 is made free for it, and a page is
written to L4, for which another leaves: all but the I/O itself. Chains of 8 pages. The cost must not grow with the pages
held.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import count

from common import Figure, argument_parser, finish

from kvtier.lab.replay.chain_node import ChainNode
from kvtier.tier.policy.base import Costs, Kind, PolicySettings, Use
from kvtier.tier.protocol.messages import WriteMode

CHAIN = 8  # pages
BATCH = 16  # chains of a round
POLICIES = {"lru": PolicySettings(name="lru"), "rvi": PolicySettings()}
WRITES: tuple[WriteMode, ...] = ("through", "demote")


@dataclass
class Filled:
    """A node whose L3 is full, and whose L4, as large again, is as well."""

    node: ChainNode
    numbers: count[int]
    now: float = 0.0

    @classmethod
    def make(cls, pages: int, policy: PolicySettings, write: WriteMode) -> Filled:
        """L3 of so many pages."""
        filled = cls(ChainNode(policy, write, pages, pages, 1, Costs(20e-3, 64.0)), count())
        for _ in range(2 * pages // (CHAIN * BATCH) + 1):
            filled.round()
        return filled

    def round(self) -> None:
        """BATCH requests end, and their pages come down."""
        for _ in range(BATCH):
            ids = [next(self.numbers) for _ in range(CHAIN)]
            self.now += 1.0
            self.node.now = self.now
            self.node.finished(0, ids, Use(CHAIN, CHAIN, 100, Kind.TURN))
            above = [None, *ids[:-1]]
            self.node.bring_down(0, list(zip(ids, above, range(CHAIN), strict=True))[::-1])


def main() -> None:
    """Print the figures."""
    parser = argument_parser(__doc__, rounds=21)
    parser.add_argument("--pages", default="10000,100000", help="of L3 (default: %(default)s)")
    args = parser.parse_args()
    figures = []
    for pages in map(int, args.pages.split(",")):
        for name, policy in POLICIES.items():
            for write in WRITES:
                filled = Filled.make(pages, policy, write)
                samples = []
                for _ in range(args.rounds):
                    start = time.process_time()
                    filled.round()
                    samples.append((time.process_time() - start) / (CHAIN * BATCH) * 1e6)
                figures.append(Figure(f"{name}, {write}, {pages} pages", samples, "us/page"))
    sys.exit(finish({"coordinator, CPU time of a page brought down": figures}, args.json))


if __name__ == "__main__":
    main()
