#!/usr/bin/env python3
"""What page size costs and saves: memory used over memory held, tokens/s, and the page table's overhead.

  bench/page_size.py --model FOLDER [--sizes 1,16,64,256] [--json FILE]

One workload of requests of mixed lengths runs at each page size, and once with contiguous preallocation: every sequence
holds one run of the maximum length from its first token on (a page as long as the longest sequence may get). Nothing is
shared between the requests, so that only the granularity differs. `used / held` is averaged over the steps with tokens
in flight. Sources put it at 20-40 % for preallocation and above 90 % for 16-token pages.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path

from kvtier.kernels.memory import raise_malloc_thresholds
from kvtier.tier.pages.identity import tenant_salt
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.requests.api import EngineRequest, Output, SamplingParams
from kvtier.workers.runner.runner import load_runner
from kvtier.workers.scheduling.settings import EngineSettings


class Crowd:
    """All requests of the workload, and when the last one is over."""

    def __init__(self, requests: int) -> None:
        self.left = requests
        self.tokens = 0
        self.over = threading.Event()

    def sink(self, outputs: list[Output]) -> None:
        """Count what comes out."""
        for output in outputs:
            self.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.left -= 1
        if not self.left:
            self.over.set()


def workload(requests: int, longest: int) -> list[tuple[tuple[int, ...], int]]:
    """(prompt, new tokens) of each request: lengths spread evenly over orders of magnitude."""
    rng = random.Random(1)
    drawn = []
    for _ in range(requests):
        prompt = int(16 * (longest * 0.75 / 16) ** rng.random())
        new = rng.randrange(16, max(17, longest // 8))
        drawn.append((tuple(rng.randrange(10, 40000) for _ in range(prompt)), new))
    return drawn


def measure(a: argparse.Namespace, page_tokens: int) -> dict[str, float]:
    """Run the workload at one page size."""
    runner = load_runner(
        a.model,
        dtype=a.dtype,
        page_tokens=page_tokens,
        l1_bytes=a.l1_mib * 2**20,
        numerics="fast",
        forward="auto",
        threads=a.threads,
        max_context=a.longest,
        max_batch_tokens=512,
        epoch=0,
    )
    requests = workload(a.requests, a.longest)
    crowd = Crowd(len(requests))
    worker = DecodeWorker(
        runner,
        EngineSettings(max_batch_tokens=512, max_sequences=a.at_once),
        worker_id="w",
        node_id="n",
        socket_path=None,
        tenants={"default": tenant_salt("default")},
        sink=crowd.sink,
    )
    worker.start()
    fills: list[float] = []
    entries: list[float] = []
    start = time.perf_counter()
    for number, (prompt, new) in enumerate(requests):
        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        worker.submit(EngineRequest(f"r{number}", "default", prompt, sampling, use_cache=False))
    while not crowd.over.wait(0.05):
        totals = worker.stats().totals
        if totals.held_page_tokens:
            fills.append(totals.used_page_tokens / totals.held_page_tokens)
            entries.append(totals.held_page_tokens / page_tokens)
    seconds = time.perf_counter() - start
    worker.stop()
    table_bytes = 4 * statistics.mean(entries)
    page_bytes = sum(group.specs[runner.recipe.write].nbytes for group in runner.groups)
    return {
        "page_tokens": page_tokens,
        "used_over_held": statistics.mean(fills),
        "tokens_per_s": sum(len(p) for p, _ in requests) / seconds + crowd.tokens / seconds,
        "output_tokens_per_s": crowd.tokens / seconds,
        "page_kib": page_bytes / 1024,
        "table_entries": statistics.mean(entries),
        "table_share": table_bytes / (statistics.mean(entries) * page_bytes),
    }


def main() -> None:
    """Measure each size and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder (kvtier model ls names the demo model's)"
    )
    parser.add_argument("--sizes", default="1,16,64,256")
    parser.add_argument("--longest", type=int, default=1024, help="tokens a sequence may get; a power of two")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--l1-mib", type=int, default=768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="", help="write the figures to this file")
    a = parser.parse_args()
    raise_malloc_thresholds()
    rows = []
    print(
        f"{'page':>12} {'used/held':>10} {'tokens/s':>10} {'output/s':>10} {'entries':>9} {'table share':>12}"
    )
    for size in [*map(int, a.sizes.split(",")), a.longest]:
        row = measure(a, size)
        rows.append(row)
        name = f"{size} (whole)" if size == a.longest else str(size)
        print(
            f"{name:>12} {row['used_over_held']:>10.3f} {row['tokens_per_s']:>10.0f} "
            f"{row['output_tokens_per_s']:>10.1f} {row['table_entries']:>9.0f} {row['table_share']:>12.2e}",
            flush=True,
        )
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))
    sys.exit(0)


if __name__ == "__main__":
    main()
