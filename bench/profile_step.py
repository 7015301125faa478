#!/usr/bin/env python3
"""Where a worker's step loop spends its time: cProfile of decode steps and prefill, without Ray or gRPC.

  bench/profile_step.py [--model FOLDER] [--streams 8] [--prompt 512] [--new 128] [--sort tottime] [--lines 30]

Prints the functions of the step loop's thread. A share of the time is cProfile's own: compare shares, not seconds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import threading

from kvtier.tier.pages.identity import tenant_salt
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.models.files.store import default_cache, pull
from kvtier.workers.requests.api import EngineRequest, Output, SamplingParams
from kvtier.workers.runner.runner import load_runner


class ProfiledWorker(DecodeWorker):
    """A worker whose step loop runs under a profiler."""

    profile: cProfile.Profile

    def _run(self) -> None:
        self.profile = cProfile.Profile()
        self.profile.runcall(super()._run)


def main() -> None:
    """Run the streams to their ends and print the profile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="Hugging Face folder (default: the demo model, pulled once)"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that each stream decodes")
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumulative"))
    parser.add_argument("--lines", type=int, default=30)
    a = parser.parse_args()
    model = a.model or str(pull("smollm2-135m-instruct", cache=default_cache()))
    runner = load_runner(
        model,
        dtype="bfloat16",
        page_tokens=16,
        l1_bytes=1 << 30,
        numerics="auto",
        forward="auto",
        threads=2,
        max_context=0,
        max_batch_tokens=2048,
        epoch=0,
    )
    left, over = a.streams, threading.Event()

    def sink(outputs: list[Output]) -> None:
        nonlocal left
        left -= sum(output.finish_reason is not None for output in outputs)
        if left <= 0:
            over.set()

    worker = ProfiledWorker(
        runner,
        worker_id="w0",
        node_id="n0",
        socket_path=None,
        tenants={"default": tenant_salt("default")},
        sink=sink,
    )
    worker.start()
    fresh = random.Random(0)
    for number in range(a.streams):
        prompt = tuple(fresh.randrange(runner.vocab_size) for _ in range(a.prompt))
        sampling = SamplingParams(max_tokens=a.new, min_tokens=a.new)
        worker.submit(EngineRequest(f"r{number}", "default", prompt, sampling))
    over.wait()
    worker.stop()
    pstats.Stats(worker.profile).sort_stats(a.sort).print_stats(a.lines)


if __name__ == "__main__":
    main()
