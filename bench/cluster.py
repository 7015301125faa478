#!/usr/bin/env python3
"""A prefix that another node has: fetched over PageTransfer against computed again, and which of both is chosen.

  bench/cluster.py --model FOLDER [--lengths 512,1024,2048,4096] [--speeds 1,4,8,16,32,64,128] [--rounds 3] [--json FILE]

Two nodes on this machine, each with a cache and an exchange in processes of their own: one has computed a long prompt,
the other is asked for prompts that begin alike, and knows nothing of them. A request is timed at the worker, from its
submission to its first token. The node away is reached as fast as gRPC goes, out of its memory as nodes of one machine
do, and over wires of so many MB/s (--speeds); to the node at home each of these is a node of its own.

In each round every length is asked for as in production: the node loads or recomputes, by the speed that it has seen
of that node and the prefill steps that it has timed. What it did not choose is done then, too, by a request that has no
choice; but only once where one side takes more than twice as long as the other. "> 1234 ms": a fetch that was given up
after twice the time of computing, or of which nothing came.
What it knows of a node comes from a short fetch before each round, and from what was fetched in the rounds. A load may
take a minute here (cache.load_deadline_ms).

A choice was right if its side has the lower median, or if the medians are alike: within 10 %, or within the noise where
that is more, but never more than 25 %. Noise is by how much the times of computing a prefix differ, one speed's rounds
taken by themselves. Goal: 95 % of the choices right, each length at each speed counting alike.
"""

from __future__ import annotations

import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from cluster_cells import (
    FAR,
    Cell,
    choices,
    crossovers,
    first_tokens,
    noise_of,
    print_cells,
    print_crossovers,
)
from cluster_engines import Nodes, running
from cluster_nodes import Peer
from common import argument_parser, finish

from kvtier.cluster.transfer.actor import keep_freed_memory
from kvtier.tier.pages.page import slot_bytes
from kvtier.workers.models.base import page_spec

FAST_ASKS = 3  # in a round, of a node that nothing slows: its fetches take little time
WARM_UP_S = 4.0  # for the fetch before a round: what came by then tells the speed


# ---- measuring ---------------------------------------------------------------------------------------------------


def measure(nodes: Nodes, peers: list[Peer], lengths: list[int], rounds: int) -> list[Cell]:
    """All lengths at all peers, one peer after the other."""
    nodes.ask(nodes.fetches, min(lengths))
    for length in lengths:
        nodes.ask(nodes.chooses, length)
    cells: list[Cell] = []
    rng = random.Random(0)
    for peer in peers:
        mine = [Cell(length, peer) for length in lengths]
        cells += mine
        for number in range(rounds):
            nodes.ask(nodes.fetches, min(lengths), peer, WARM_UP_S)
            for cell in rng.sample(mine, len(mine)):
                measure_once(nodes, cell)
            print(f"{peer.label}: round {number + 1} of {rounds}", file=sys.stderr)
    return cells


def measure_once(nodes: Nodes, cell: Cell) -> None:
    """Ask, and then do what was not chosen."""
    asks = FAST_ASKS if cell.peer.bytes_s is None else 1
    answers = [nodes.ask(nodes.chooses, cell.length, cell.peer) for _ in range(asks)]
    for answer in answers:
        cell.add(answer)
        cell.picks.append(answer.picked)
        cell.whys += [answer.why] if answer.why else []
    picked = {answer.picked for answer in answers}
    if "recompute" not in picked and not cell.is_clear:
        cell.add(nodes.ask(nodes.chooses, cell.length))
    if "fetch" not in picked and not cell.is_clear:
        cell.add(nodes.ask(nodes.fetches, cell.length, cell.peer, FAR * cell.median_s("recompute")))


# ---- the command -------------------------------------------------------------------------------------------------


def read_options() -> Namespace:
    """With what follows from them: the bytes of a page and of the tiers."""
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="Hugging Face folder (kvtier model ls names the demo model's)",
    )
    parser.add_argument(
        "--lengths", default="512,1024,2048,4096", help="tokens of the prefixes (default: %(default)s)"
    )
    parser.add_argument(
        "--speeds", default="1,4,8,16,32,64,128", help="of the wires, in MB/s (default: %(default)s)"
    )
    parser.add_argument("--page-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the worker (default: %(default)s)")
    options = parser.parse_args()
    options.lengths = sorted(int(length) for length in options.lengths.split(","))
    options.speeds = [float(speed) for speed in options.speeds.split(",")]
    options.page_bytes = page_spec(str(options.model), options.dtype, options.page_tokens).nbytes
    pages = options.lengths[-1] // options.page_tokens + 4
    options.l1_bytes = pages * options.page_bytes
    # As in cluster/two-nodes.yaml L3 is twice as large as L1: an eighth of it bounds what is on its way.
    options.l3_bytes = 2 * pages * slot_bytes(options.page_bytes)
    return options


def main() -> int:
    """Measure, print, write."""
    options = read_options()
    keep_freed_memory()
    peers = Peer.all(options.speeds)
    print(f"two nodes start, and one computes {options.lengths[-1]} tokens", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory(prefix="kv") as name,
        running(options, peers, Path(name), options.lengths[-1]) as nodes,
    ):
        cells = measure(nodes, peers, options.lengths, options.rounds)
    noise = noise_of(cells)
    print_cells(cells, noise)
    found = crossovers(cells, options.lengths)
    print_crossovers(found)
    tables = {
        "time to the first token": first_tokens(
            cells, options.lengths, options.page_bytes, options.page_tokens
        ),
        "load or recompute": [choices(cells, noise)],
    }
    rows = [cell.to_json(noise) for cell in cells]
    return finish(tables, options.json, noise=noise, cells=rows, crossovers=found)


if __name__ == "__main__":
    sys.exit(main())
