"""A busy worker with a small L1 that keeps its pages with peers: borrowing_process.py MODEL SOCKET.

It asks the same prompts over and over until its stdin ends, then prints how many prompts it asked, how many tokens of
them L2 had, and how many answers were other ones than without a cache.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

from lending_kit import NOTHING, prompts, uncached, worker
from waiting import until


def main(model: str, socket_path: str) -> None:
    """Until nothing listens."""
    asked = prompts(8)
    found = wrong = rounds = 0
    with worker(Path(model), Path(socket_path).parent, "borrower", 24, NOTHING) as client:
        expected = uncached(client, asked)
        while not select.select([sys.stdin], [], [], 0)[0]:
            names = [client.send(p) for p in asked]
            results = [client.result(name) for name in names]
            rounds += 1
            wrong += sum(r.tokens != tokens for r, tokens in zip(results, expected, strict=True))
            found += sum(r.cached.get("L2", 0) for r in results)
            if rounds == 1:
                print("busy", flush=True)
        until(client.worker.idle, "the worker is idle")
    print(rounds * len(asked), found, wrong, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
