#!/usr/bin/env python3
"""Page throughput of L3 and L4, as a share of what the machine gives in the same rounds.

  bench/tiers.py [--page-kib 360,2048] [--mib 256] [--folder DIR] [--rounds 101] [--json FILE]

L3: putting a page from an L1 arena into a slot and getting it back, one thread, with and without the checksum, against
memcpy of the same pages. L4: what the service does - two threads read pages into L3 slots, two write them from there
and one commits their records, up to 16 to a transaction - against plain O_DIRECT reads and writes of that size by as
many threads; nothing of L4 is in the page cache. Raw LMDB values (page cache dropped, where that is allowed) stand beside.
Goals: L3 80 % of memcpy without the checksum and 60 % with it; L4 reads 85 %, writes 80 %.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import lmdb
import numpy as np
from common import Figure, argument_parser, finish, interleave, throughput

from kvtier.tier.pages.page import (
    ALIGN_BYTES,
    HEADER_BYTES,
    Envelope,
    PageKey,
    RootKey,
    page_checksum,
    slot_bytes,
)
from kvtier.tier.stores.base import CatalogueEntry, Place
from kvtier.tier.stores.host import HostTier
from kvtier.tier.stores.ssd.store import SsdTier, open_ssd

SPEC = b"s" * 16
READERS, WRITERS = 2, 2  # threads of the service that read L4, and that write it (SsdTier.write_batch)
COMMIT_PAGES = 16  # at most; it commits what is there
ROUND_BYTES = 2 * 2**20  # of L3, thrice that of L4: most rounds end before the scheduler takes a turn


@dataclass
class Pages:
    """`count` pages of `nbytes` in an arena, sealed, and an L3 with a slot for each."""

    nbytes: int
    arena: np.ndarray  # [count, nbytes]
    host: HostTier
    envelopes: list[Envelope]

    @classmethod
    def make(cls, nbytes: int, count: int) -> Pages:
        """Random pages; all memory touched."""
        area = mmap.mmap(-1, count * nbytes)
        area.madvise(mmap.MADV_HUGEPAGE)
        arena = np.frombuffer(area, np.uint8).reshape(count, nbytes)
        arena[:] = np.random.default_rng(0).integers(0, 256, arena.shape, np.uint8)
        envelopes = []
        for index in range(count):
            key = PageKey(random.Random(index).randbytes(32))
            checksum = page_checksum(key, "bf16", SPEC, arena[index].data)
            envelopes.append(
                Envelope(key, "bf16", SPEC, nbytes, checksum, RootKey(bytes(32)), bytes(32), bytes(16), 0, 16)
            )
        size = slot_bytes(nbytes)
        pages = cls(nbytes, arena, HostTier(count * size, pretouch=False), envelopes)
        for index, envelope in enumerate(envelopes):
            pages.host.write(pages.place(index), envelope, arena[index].data)
        return pages

    @property
    def count(self) -> int:
        """How many pages."""
        return len(self.envelopes)

    def place(self, index: int) -> Place:
        """Where the slots lie in L3, one behind the other."""
        return Place(0, index * slot_bytes(self.nbytes) // ALIGN_BYTES)

    def slot(self, index: int) -> memoryview:
        """A slot of L3."""
        return self.host.slot(self.place(index), self.nbytes)

    def payload(self, index: int) -> memoryview:
        """The payload part of a slot of L3."""
        return self.slot(index)[HEADER_BYTES : HEADER_BYTES + self.nbytes]


class Turns:
    """Runs a piece of work over the next `count` pages at each call, in a random order without end."""

    def __init__(self, pages: Pages, count: int) -> None:
        self.count = count
        self.nbytes = count * pages.nbytes
        self.order = random.Random(1).sample(range(pages.count), pages.count)
        self._pool = ThreadPoolExecutor(READERS)
        self._contenders = 0

    def __call__(self, work: Callable[[int], None], threads: int = 1) -> Callable[[], None]:
        """`work` for each page of a round, by so many threads."""

        def share(numbers: Sequence[int]) -> None:
            for number in numbers:
                work(number)

        def run(batch: list[int]) -> None:
            if threads == 1:
                share(batch)
            else:
                list(self._pool.map(share, (batch[thread::threads] for thread in range(threads))))

        return self.batches(run)

    def batches(self, work: Callable[[list[int]], None]) -> Callable[[], None]:
        """`work` for all pages of a round at once."""
        self._contenders += 1
        start = (
            self._contenders * 7 * len(self.order) // 40
        )  # apart from the others' pages, which are in cache
        endless = cycle(self.order[start % len(self.order) :] + self.order[: start % len(self.order)])
        return lambda: work(list(islice(endless, self.count)))


def bench_host(pages: Pages, rounds: int) -> list[Figure]:
    """L3 against memcpy."""
    turns = Turns(pages, max(1, ROUND_BYTES // pages.nbytes))
    host, arena, envelopes = pages.host, pages.arena, pages.envelopes
    slots = [np.frombuffer(pages.payload(i), np.uint8) for i in range(pages.count)]
    size = slot_bytes(pages.nbytes)
    landing = memoryview(mmap.mmap(-1, pages.count * size))
    landing[:] = bytes(len(landing))

    def sealed_put(i: int) -> None:
        payload, envelope = arena[i].data, envelopes[i]
        checksum = page_checksum(envelope.key, envelope.variant, SPEC, payload)
        host.write(pages.place(i), replace(envelope, checksum=checksum), payload)

    def checked_get(i: int) -> None:
        host.read(pages.place(i), envelopes[i].key, "bf16", landing[i * size : (i + 1) * size])

    seconds = interleave(
        {
            "memcpy, arena to slots": turns(lambda i: np.copyto(slots[i], arena[i])),
            "L3 put": turns(lambda i: host.write(pages.place(i), envelopes[i], arena[i].data)),
            "L3 put, with checksum": turns(sealed_put),
            "memcpy, slots to arena": turns(lambda i: np.copyto(arena[i], slots[i])),
            "L3 get": turns(lambda i: np.copyto(arena[i], np.frombuffer(pages.payload(i), np.uint8))),
            "L3 get, with checksum": turns(checked_get),
        },
        rounds,
    )
    up, down = "memcpy, slots to arena", "memcpy, arena to slots"
    return [
        throughput(seconds, down, turns.nbytes),
        throughput(seconds, "L3 put", turns.nbytes, down, 0.80),
        throughput(seconds, "L3 put, with checksum", turns.nbytes, down, 0.60),
        throughput(seconds, up, turns.nbytes),
        throughput(seconds, "L3 get", turns.nbytes, up, 0.80),
        throughput(seconds, "L3 get, with checksum", turns.nbytes, up, 0.60),
    ]


def fill(tier: SsdTier, pages: Pages) -> list[CatalogueEntry]:
    """All pages in the tier, recorded."""
    entries = []
    for index, envelope in enumerate(pages.envelopes):
        place = tier.allocator.alloc(slot_bytes(pages.nbytes))
        assert place is not None, "the bench's L4 is too small for its pages"
        tier.write(place, envelope, pages.payload(index))
        entries.append(CatalogueEntry(envelope, place, slot_bytes(pages.nbytes), index))
    tier.commit(entries)
    return entries


def bench_ssd(pages: Pages, folder: Path, rounds: int) -> list[Figure]:
    """L4 against plain O_DIRECT I/O of the same size."""
    turns = Turns(pages, min(COMMIT_PAGES, max(READERS, 3 * ROUND_BYTES // pages.nbytes)))
    size = slot_bytes(pages.nbytes)
    where = random.Random(2).sample(range(pages.count), pages.count)  # page i is read into slot where[i]
    tier = open_ssd(folder / "l4", int(1.2 * pages.count * size) + 2**26, "slab", size)
    entries = fill(tier, pages)
    whole = -(-pages.nbytes // 4096) * 4096
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(plain, 0, pages.count * size)
    host = pages.host
    aligned = [pages.slot(i)[HEADER_BYTES : HEADER_BYTES + whole] for i in range(pages.count)]

    def plain_read(i: int) -> None:
        assert os.preadv(plain, [aligned[where[i]]], i * size) == whole

    def plain_write(i: int) -> None:
        assert os.pwrite(plain, aligned[i], i * size) == whole

    def read(i: int) -> None:
        tier.read(entries[i].place, entries[i].envelope.key, "bf16", pages.slot(where[i]))

    def write(batch: list[int]) -> None:
        refused = tier.write_batch([(entries[i].place, entries[i].envelope, pages.payload(i)) for i in batch])
        assert not any(refused)
        tier.commit([entries[i] for i in batch])

    for i in range(pages.count):
        plain_write(i)
    reads = interleave(
        {"plain O_DIRECT read": turns(plain_read, READERS), "L4 read": turns(read, READERS)}, rounds
    )
    for index, envelope in enumerate(pages.envelopes):  # the reads have shuffled the slots
        host.write(pages.place(index), envelope, pages.arena[index].data)
    writes = interleave(
        {"plain O_DIRECT write": turns(plain_write, WRITERS), "L4 write": turns.batches(write)}, rounds
    )
    os.close(plain)
    tier.close()
    return [
        throughput(reads, "plain O_DIRECT read", turns.nbytes),
        throughput(reads, "L4 read", turns.nbytes, "plain O_DIRECT read", 0.85),
        throughput(writes, "plain O_DIRECT write", turns.nbytes),
        throughput(writes, "L4 write", turns.nbytes, "plain O_DIRECT write", 0.80),
    ]


def bench_lmdb(pages: Pages, path: Path, rounds: int) -> list[Figure]:
    """Pages as raw LMDB values: put one to a transaction, flushed once a round; got cold, copied into slots."""
    turns = Turns(pages, COMMIT_PAGES)
    map_bytes = 2 * pages.arena.nbytes + 2**25
    keys = [envelope.key for envelope in pages.envelopes]
    stored: list[list[int]] = []
    with lmdb.open(str(path), map_size=map_bytes, subdir=False, sync=False) as env:

        def put(batch: list[int]) -> None:
            stored.append(batch)
            for i in batch:
                with env.begin(write=True) as txn:
                    txn.put(keys[i], pages.payload(i))
            env.sync(True)

        puts = interleave({"LMDB values, put and flush": turns.batches(put)}, rounds)
    seconds: list[float] = []
    for batch in stored[:rounds]:
        drop_page_cache(path)
        with lmdb.open(str(path), map_size=map_bytes, subdir=False, readahead=False) as env:
            start = time.perf_counter()
            with env.begin(buffers=True) as txn:
                for i in batch:
                    value = txn.get(keys[i])
                    assert value is not None
                    np.copyto(np.frombuffer(pages.payload(i), np.uint8), np.frombuffer(value, np.uint8))
            seconds.append(time.perf_counter() - start)
    gets = {"LMDB values, cold get": seconds}
    return [
        throughput(gets, "LMDB values, cold get", turns.nbytes),
        throughput(puts, "LMDB values, put and flush", turns.nbytes),
    ]


def drop_page_cache(path: Path) -> None:
    """Have the next reads of a file come from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main() -> int:
    """Measure and print; 1 when a goal is missed."""
    parser = argument_parser(__doc__, rounds=101)
    parser.add_argument("--page-kib", default="360,2048", help="payload sizes in KiB, with commas")
    parser.add_argument("--mib", type=int, default=256, help="MiB of pages per size (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure (default: /var/tmp)"
    )
    options = parser.parse_args()
    tables: dict[str, list[Figure]] = {}
    for kib in map(int, options.page_kib.split(",")):
        pages = Pages.make(kib * 1024, options.mib * 1024 // kib)
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder or "/var/tmp") as folder:
            figures = bench_host(pages, 4 * options.rounds)
            figures += bench_ssd(pages, Path(folder), options.rounds)
            figures += bench_lmdb(pages, Path(folder) / "values.mdb", min(options.rounds, 5))
        tables[f"pages of {kib} KiB, {pages.count} of them"] = figures
        pages.host.close()
    return finish(tables, options.json)


if __name__ == "__main__":
    sys.exit(main())
