#!/usr/bin/env python3
"""The directory: bytes and time of its table, and what a cluster sees of it through a real Ray actor.

  bench/directory.py [--entries 1000000,10000000] [--plain 1000000] [--refill 2000000] [--sources 4] [--json FILE]

The table holds prompts of 8,192 pages (128k tokens in pages of 16), of which each lies at 2 of 256 nodes, all at once as
batches of 4,096 keys come. A plain dict of sets of holders, filled and asked in the same way in the same run, stands
beside it, at `--plain` pages (it takes 350 bytes and more for each). Its times are CPU time of
this process, so that other load on the machine hardly shows; p50 and p99 of a few hundred lookups. Goals: 10 million pages in 2 GiB, a prompt looked up in 10 ms, a new life refilled in 10 s, a new page
known in 500 ms.

Through the actor: `--sources` publishers in this process have `--refill` pages together. The actor's process is killed,
and the time counts until its next life knows all pages; without Ray's start of the process beside. Wall clock.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import machine

from kvtier.cluster.directory.hash_table import Keys
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.directory.table import DirectoryTable
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import KEY_BYTES, MAX_KEYS, Feed, Source
from kvtier.workers.engine.kv_publisher import Publisher

PROMPT_PAGES, NODES, COPIES = 8192, 256, 2
LOOKUPS, NEW_PAGES = 300, 40
GIB = 2**30
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Row:
    """One figure, the most that it may be, and what a plain dict of sets takes."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    plain: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None else self.value <= self.goal

    def line(self) -> str:
        """As printed."""
        goal = "" if self.goal is None else f"goal {self.goal:g}: {'ok' if self.reached else 'MISSED'}"
        beside = (
            "" if self.plain is None else f"plain dict {self.plain:,.2f} ({self.plain / self.value:.1f}x)"
        )
        return f"{self.name:<52} {self.value:>12,.2f} {self.unit:<10} {goal:<18} {beside}".rstrip()


# ---- the table -----------------------------------------------------------------------------------------------------


class PlainTable:
    """What one would write first: for each page the set of its holders."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[int]] = {}

    def add(self, holder: int, keys: Keys) -> None:
        """The holder has these pages."""
        data = keys.tobytes()
        for at in range(0, len(data), KEY_BYTES):
            self._holders.setdefault(data[at : at + KEY_BYTES], set()).add(holder)

    def longest(self, keys: Keys) -> dict[int, int]:
        """How many of the first pages each holder has."""
        data, found = keys.tobytes(), dict[int, int]()
        still = set(self._holders.get(data[:KEY_BYTES], ()))
        for page in range(len(keys)):
            here = self._holders.get(data[KEY_BYTES * page : KEY_BYTES * (page + 1)], set())
            if not still <= here:
                found.update(dict.fromkeys(still - here, page))
                still &= here
                if not still:
                    return found
        return found | dict.fromkeys(still, len(keys))


def prompts(pages: int) -> Keys:
    """Keys of whole prompts behind each other, `pages` in all."""
    return np.random.default_rng(pages).integers(1, 2**64 - 1, pages, np.uint64)


def fill(table: DirectoryTable | PlainTable, keys: Keys) -> tuple[float, float]:
    """Put each prompt at some nodes, in batches; seconds in all, and of the slowest batch."""
    rng, slowest, start = np.random.default_rng(1), 0.0, time.process_time()
    for at in range(0, len(keys), PROMPT_PAGES):
        for holder in rng.choice(NODES, COPIES, replace=False):
            for part in range(at, min(at + PROMPT_PAGES, len(keys)), MAX_KEYS):
                before = time.process_time()
                table.add(int(holder), keys[part : part + MAX_KEYS])
                slowest = max(slowest, time.process_time() - before)
    return time.process_time() - start, slowest


def lookups(table: DirectoryTable | PlainTable, keys: Keys) -> list[float]:
    """Milliseconds of each lookup of a whole prompt that is there."""
    rng, samples = np.random.default_rng(2), []
    for _ in range(LOOKUPS):
        at = PROMPT_PAGES * int(rng.integers(len(keys) // PROMPT_PAGES))
        prompt = keys[at : at + PROMPT_PAGES]
        before = time.process_time()
        found = table.longest(prompt)
        samples.append(1e3 * (time.process_time() - before))
        assert sorted(found.values()) == [PROMPT_PAGES] * COPIES
    return samples


def resident_bytes() -> int:
    """Memory that this process holds, what it has freed given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def percentile(samples: Sequence[float], percent: int) -> float:
    """Of the samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass(frozen=True)
class Measured:
    """Of one table."""

    nbytes: int
    fill_s: float
    slowest_s: float
    lookups_ms: list[float]


def measure(make: Callable[[], DirectoryTable | PlainTable], pages: int) -> Measured:
    """Fill a table and ask it."""
    keys = prompts(pages)
    before = resident_bytes()
    table = make()
    fill_s, slowest_s = fill(table, keys)
    nbytes = resident_bytes() - before
    return Measured(nbytes, fill_s, slowest_s, lookups(table, keys))


def table_rows(pages: int, is_plain_too: bool) -> Iterator[Row]:
    """The table at one size, and the plain one beside it."""
    ours = measure(DirectoryTable, pages)
    plain = measure(PlainTable, pages) if is_plain_too else None
    name = f"{pages / 1e6:g} M pages at {COPIES} nodes each"
    yield Row(f"{name}: memory", ours.nbytes / GIB, "GiB", 2.0, None if plain is None else plain.nbytes / GIB)
    yield Row(
        f"{name}: memory of a page",
        ours.nbytes / pages,
        "bytes",
        plain=None if plain is None else plain.nbytes / pages,
    )
    us = 1e6 / (COPIES * pages)
    yield Row(f"{name}: insert", ours.fill_s * us, "us a page", None, plain and plain.fill_s * us)
    yield Row(f"{name}: slowest batch", 1e3 * ours.slowest_s, "ms")
    for percent in (50, 99):
        yield Row(
            f"{name}: 8,192 pages looked up, p{percent}",
            percentile(ours.lookups_ms, percent),
            "ms",
            10.0,
            None if plain is None else percentile(plain.lookups_ms, percent),
        )


# ---- through Ray ---------------------------------------------------------------------------------------------------


class Owner:
    """Something with pages, and its publisher to the directory."""

    def __init__(self, number: int, pages: int, directory: Any) -> None:
        from kvtier.workers.actor import sender_to

        rng = np.random.default_rng([3, number])
        data = rng.integers(1, 2**64 - 1, pages, np.uint64).tobytes()
        self.keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
        source = Source(f"node:{number}", "life", str(number), "", "host:1")
        feed = Feed(source, (TierName.HOST,))
        self.publisher = Publisher(
            feed, sender_to(directory), lambda: {TierName.HOST: self.keys}, str(number)
        )


def wait_until(question: Callable[[], bool], every_s: float) -> float:
    """Seconds until it is so."""
    start = time.perf_counter()
    while not question():
        assert time.perf_counter() - start < PATIENCE_S, "it never is so"
        time.sleep(every_s)
    return time.perf_counter() - start


def actor_rows(pages: int, sources: int) -> Iterator[Row]:
    """What publishers and gateways see of the directory."""
    import ray

    from kvtier.cluster.directory.actor import Directory

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    directory = Directory.remote()
    owners = [Owner(number, pages // sources, directory) for number in range(sources)]
    try:
        first_pid = ray.get(directory.info.remote())["pid"]
        for owner in owners:
            owner.publisher.start()
        name = f"{pages / 1e6:g} M pages of {sources} sources"
        seconds = wait_until(lambda: _is_full(directory, pages), 0.02)
        yield Row(f"{name}: told to a new directory", seconds, "s", 10.0)

        os.kill(first_pid, signal.SIGKILL)
        killed = time.perf_counter()
        wait_until(lambda: _pid(directory) not in (None, first_pid), 0.02)
        up = time.perf_counter()
        wait_until(lambda: _is_full(directory, pages), 0.02)
        yield Row(f"{name}: told again once it has started", time.perf_counter() - up, "s", 10.0)
        yield Row("  (Ray starting it again beside)", up - killed, "s")

        prompt = b"".join(owners[0].keys[:PROMPT_PAGES])
        samples = []
        for _ in range(LOOKUPS):
            before = time.perf_counter()
            found = ray.get(directory.lookup.remote(prompt))
            samples.append(1e3 * (time.perf_counter() - before))
            assert Held(*found[0]).pages == min(PROMPT_PAGES, len(owners[0].keys))
        for percent in (50, 99):
            name = f"8,192 pages looked up through Ray, p{percent}"
            yield Row(name, percentile(samples, percent), "ms", 30.0)
        known = [1e3 * _new_page(directory, owners[0], number) for number in range(NEW_PAGES)]
        yield Row("a new page is known after, median", statistics.median(known), "ms", 500.0)
        yield Row("a new page is known after, longest", max(known), "ms", 500.0)
    finally:
        for owner in owners:
            owner.publisher.close()
        ray.shutdown()


def _new_page(directory: Any, owner: Owner, number: int) -> float:
    import ray

    key = (2**63 + number).to_bytes(KEY_BYTES, "big")
    time.sleep(0.013 * (number % 11))  # at any time between two batches
    owner.publisher.note(TierName.HOST, [key], [])
    return wait_until(lambda: bool(ray.get(directory.lookup.remote(key))), 0.002)


def _is_full(directory: Any, pages: int) -> bool:
    stats = _answer(directory.stats.remote())
    return stats is not None and stats.entries == pages and all(h.is_whole for h in stats.holders)


def _pid(directory: Any) -> int | None:
    info = _answer(directory.info.remote())
    return None if info is None else info["pid"]


def _answer(call: Any) -> Any:
    import ray

    try:
        return ray.get(call, timeout=10)
    except ray.exceptions.RayError:
        return None  # it starts


def main() -> None:
    """Measure, print, and say whether every goal is reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", default="1000000,10000000", help="pages in the table")
    parser.add_argument("--plain", type=int, default=1_000_000, help="at most, beside it in a dict of sets")
    parser.add_argument("--refill", type=int, default=2_000_000, help="pages told through Ray; 0: no Ray")
    parser.add_argument("--sources", type=int, default=4, help="that tell them")
    parser.add_argument("--json", default="", help="write the figures to this file")
    a = parser.parse_args()
    rows: list[Row] = []

    def show(some: Iterator[Row]) -> None:
        for row in some:
            rows.append(row)
            print(row.line(), flush=True)

    print(f"{machine()}\n")
    for pages in map(int, a.entries.split(",")):
        show(table_rows(pages, pages <= a.plain))
    if a.refill:
        show(actor_rows(a.refill, a.sources))
    if a.json:
        figures = [{**vars(row), "ok": row.reached} for row in rows]
        Path(a.json).write_text(json.dumps({"machine": machine(), "rows": figures}, indent=1) + "\n")
    missed = [row.name for row in rows if row.reached is False]
    print("\nevery goal is reached" if not missed else f"\nmissed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
