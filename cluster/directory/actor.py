"""The directory of the cluster as a Ray actor: it holds soft state only, so when it dies, its next life is told all again."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray

from kvtier.cluster.directory.core import DirectoryCore, DirectoryStats
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import Batch, Reply

# Lookups have threads of their own: one waits for the batch that is being taken, not for all that wait behind it.
THREADS = {"lookup": 2, "publish": 1, "heartbeat": 1}


class DirectoryProcess:
    """What the actor's process runs; `Directory` is this class as a Ray actor. See DirectoryCore for the methods."""

    def __init__(self, max_entries: int = 16_000_000) -> None:
        self._lock = threading.Lock()  # guards the core: each call has it to itself, for milliseconds
        self._core = DirectoryCore(max_entries)

    def info(self) -> dict[str, Any]:
        """{"pid"}; answers once it is ready."""
        return {"pid": os.getpid()}

    @ray.method(concurrency_group="publish")
    def publish(self, batch: Batch) -> Reply:
        """A source tells what it has; "snapshot": it must tell all again."""
        with self._lock:
            return self._core.publish(batch, time.monotonic())

    @ray.method(concurrency_group="lookup")
    def lookup(self, keys: bytes) -> list[tuple[str, str, str, str, int]]:
        """Who has the first of these pages: KEY_BYTES of each key, one behind the other; the longest first.

        Each is a Held, as the plain tuple that is packed and unpacked in a fifth of the time.
        """
        with self._lock:
            found = self._core.lookup(keys, time.monotonic())
        return [(*one,) for one in found]

    @ray.method(concurrency_group="publish")
    def wrong(self, node_id: str, tier: TierName | None, keys: bytes) -> None:
        """A node said that it doesn't have these pages in a tier, or (None) in none of its own."""
        with self._lock:
            self._core.wrong(node_id, tier, keys)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> float:
        """Seconds since a call went on: 0, once the one that has the core has let go of it."""
        with self._lock:
            return 0.0

    def stats(self) -> DirectoryStats:
        """What there is, and what happened since it began."""
        with self._lock:
            return self._core.stats(time.monotonic())

    def check(self) -> None:
        """Re-derive all counts; AssertionError where one differs."""
        with self._lock:
            self._core.check()


Directory = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=THREADS)(DirectoryProcess)  # type: ignore[call-overload]  # Ray's types lack concurrency_groups
