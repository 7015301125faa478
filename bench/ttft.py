#!/usr/bin/env python3
"""Time to the first token by where the prompt's prefix lies, through the whole service, by gRPC from this process.

  bench/ttft.py --model FOLDER [--vllm VENV/bin/python] [--rounds 5] [--json FILE]

In each round: cold, hit in L1, in L3, in L4 (L1 and L3 emptied, the page cache dropped where we may), and once after a
restart. The limits (memcpy and O_DIRECT slab reads of that page size) are measured in the same run. Goals:
  L1 hit    at most 1/30 of cold, and at most half of vLLM's prefix hit
  L3 hit    at most the L1 hit + bytes / (half of memcpy speed)
  L4 hit    at most the L1 hit + bytes / (0.7 of the slab limit), after a restart too
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from peer_line import prompt_ids
from service import Peer, Service, running, vllm_preload


def memcpy_gbps(page_bytes: int, total: int = 256 * 2**20) -> float:
    """GB/s of copying pages between two touched areas, one thread."""
    pages = total // page_bytes
    source, target = (np.ones((pages, page_bytes), np.uint8) for _ in range(2))
    order = np.random.default_rng(0).permutation(pages)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for at, index in enumerate(order):
            np.copyto(target[at], source[index])
        best = max(best, pages * page_bytes / (time.perf_counter() - start) / 1e9)
    return best


def slab_read_gbps(folder: Path, slot_bytes: int, pages: int) -> float:
    """GB/s of O_DIRECT reads of whole slots from a file, one after another in random order, two threads."""
    from concurrent.futures import ThreadPoolExecutor

    path = folder / "limit.dat"
    buffers = [mmap.mmap(-1, slot_bytes) for _ in range(2)]
    filler = os.urandom(2**20)
    with path.open("wb") as file:
        left = slot_bytes * pages
        while left > 0:
            left -= file.write(filler[: min(left, len(filler))])
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    order = list(range(pages))
    random.Random(0).shuffle(order)

    def read(half: int) -> None:
        for index in order[half::2]:
            os.preadv(fd, [buffers[half]], index * slot_bytes)

    try:
        best = 0.0
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                start = time.perf_counter()
                list(pool.map(read, (0, 1)))
                best = max(best, pages * slot_bytes / (time.perf_counter() - start) / 1e9)
    finally:
        os.close(fd)
        path.unlink()
    return best


def drop_page_cache() -> None:
    """Empty the kernel's page cache where we may; the slab files are read past it anyway."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        print("the page cache stays: not allowed to drop it", file=sys.stderr)


def hit(service: Service, prompt: list[int], tier: str) -> float:
    """Seconds to the first token, which must come mostly from `tier`."""
    seconds, usage = service.first_token_s(prompt)
    cached = usage["cached_tokens"]
    if cached[tier] < 0.9 * len(prompt):
        raise SystemExit(f"expected a hit in {tier}, got {usage}")
    return seconds


def main() -> None:
    """Measure, print the table, exit 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder (kvtier model ls names the demo model's)"
    )
    parser.add_argument("--vllm", default="", help="python of an environment made by bench/setup-vllm.sh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--json", default="", help="write the figures to this file")
    a = parser.parse_args()
    fresh = random.Random(time.time_ns())
    peer = Peer(a.vllm, "vllm", a.model, vllm_preload(a.vllm)) if a.vllm else None
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    with running(
        f"model.path={Path(a.model).resolve()}",
        "tiers.l1.bytes=512MiB",
        "tiers.l3.bytes=1GiB",
        "tiers.l4.bytes=4GiB",
    ) as service:
        service.first_token_s(prompt_ids(fresh.randrange(2**40), a.prompt))
        for number in range(a.rounds):
            prompt = prompt_ids(fresh.randrange(2**40), a.prompt)
            cold, usage = service.first_token_s(prompt)
            assert usage["computed_tokens"] == a.prompt, usage
            note("cold", cold)
            for _ in range(3):
                note("L1", hit(service, prompt, "L1"))
            service.settle()
            for _ in range(3):
                service.empty("L1")
                note("L3", hit(service, prompt, "L3"))
            for _ in range(2):
                service.empty("L1")
                service.empty("L3")
                drop_page_cache()
                note("L4", hit(service, prompt, "L4"))
            if peer:
                seed = fresh.randrange(2**40)
                note("vLLM cold", peer.ask(op="ttft", prompt_tokens=a.prompt, seed=seed)["seconds"])
                for _ in range(2):
                    note("vLLM hit", peer.ask(op="ttft", prompt_tokens=a.prompt, seed=seed)["seconds"])
            print(f"round {number + 1} of {a.rounds}", file=sys.stderr)
        for _ in range(3):
            service.down()
            drop_page_cache()
            service.up()
            service.first_token_s(prompt_ids(fresh.randrange(2**40), a.prompt))
            service.settle()  # the pages of that prompt are on their way down
            note("L4 after restart", hit(service, prompt, "L4"))
        page = service.client.pages_ls(tier="L1", limit=1)[0]
        page_bytes = page["nbytes"]
        folder = Path(tempfile.mkdtemp(dir=service.folder))
        memcpy, slab = memcpy_gbps(page_bytes), slab_read_gbps(folder, page_bytes + 4096, 512)
    if peer:
        peer.close()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    nbytes = a.prompt // page["tokens"] * page_bytes
    goals = {
        "L1": middle["cold"] / 30,
        "L3": middle["L1"] + nbytes / (0.5 * memcpy * 1e9),
        "L4": middle["L1"] + nbytes / (0.7 * slab * 1e9),
        "L4 after restart": middle["L1"] + nbytes / (0.7 * slab * 1e9),
    }
    if peer:
        goals["L1 against vLLM's hit"] = middle["vLLM hit"] / 2
        middle["L1 against vLLM's hit"] = middle["L1"]
    print(f"prompt {a.prompt} tokens, {nbytes / 1e6:.1f} MB of pages of {page_bytes / 1024:.0f} KiB")
    print(f"limits in this run: memcpy {memcpy:.1f} GB/s, O_DIRECT slab reads {slab:.2f} GB/s")
    missed = False
    for name, value in middle.items():
        goal = goals.get(name)
        verdict = ""
        if goal is not None:
            missed |= value > goal
            verdict = f"  at most {1e3 * goal:7.1f} ms: {'ok' if value <= goal else 'ABOVE'}"
        print(f"{name:<24}{1e3 * value:>9.1f} ms  ({middle['cold'] / value:5.1f}x faster than cold){verdict}")
    if a.json:
        Path(a.json).write_text(
            json.dumps(
                {"seconds": seconds, "goals": goals, "memcpy_gbps": memcpy, "slab_gbps": slab}, indent=1
            )
        )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
