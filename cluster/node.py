"""The Ray actor around a node's cache: one process per node, so that its disk and checksums never delay a decode step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import ray

from kvtier.tier.base import Outcome, PageInfo
from kvtier.tier.page import TierName
from kvtier.tier.recorder import RecordingStatus, file_of
from kvtier.tier.score import PolicySettings
from kvtier.tier.service import CacheService
from kvtier.tier.stats import Snapshot

CALLS_AT_ONCE = 8  # threads of the actor; they only wait for the service's loop


class CacheNodeProcess:
    """What the actor's process runs; `CacheNode` is this class as a Ray actor. See CacheService for the methods.

    No page bytes go through these calls: workers and the service share them in memory.
    """

    def __init__(
        self,
        *,
        node_id: str,
        socket_path: str,
        payload_bytes: int,
        l3_bytes: int,
        l4_path: str,
        l4_bytes: int,
        l4_store: Literal["slab", "lmdb"] = "slab",
        min_payload_bytes: int | None = None,
        l4_variants: frozenset[str] | None = None,
        policy: PolicySettings,
        write: Literal["through", "demote"],
        shares: Mapping[bytes, float],
    ) -> None:
        self._service = CacheService(
            node_id,
            socket_path,
            payload_bytes,
            l3_bytes,
            l4_path,
            l4_bytes,
            l4_store,
            min_payload_bytes=min_payload_bytes,
            l4_variants=l4_variants,
            policy=policy,
            write=write,
            shares=shares,
        )
        self._service.start()

    def info(self) -> dict[str, Any]:
        """{"id", "pid"}; answers once the tiers are open."""
        return {"id": self._service.node_id, "pid": os.getpid()}

    def health(self) -> str | None:
        """None when all is well, else what isn't."""
        return self._service.health()

    def notes(self) -> list[str]:
        """The latest one-line notices."""
        return self._service.notes()

    def stats(self) -> Snapshot:
        """The counters of L3 and L4."""
        return self._service.stats()

    def pages(
        self, tenant: str | bytes | None = None, tier: TierName | None = None, limit: int = 1000
    ) -> list[PageInfo]:
        """Copies of pages in L3 and L4."""
        return self._service.pages(tenant, tier, limit)

    def pin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Keep pages."""
        return self._service.pin(keys)

    def unpin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Undo `pin`."""
        return self._service.unpin(keys)

    def evict(self, keys: list[bytes], tier: TierName | None = None) -> list[tuple[bytes, Outcome]]:
        """Drop pages from a tier, or (None) from L3 and L4."""
        return self._service.evict(keys, tier)

    def clear(self, tenant: str | bytes | None = None) -> list[tuple[bytes, Outcome]]:
        """Drop and wipe a tenant's pages, or everybody's."""
        return self._service.clear(tenant)

    def verify(self, keys: list[bytes] | None = None) -> list[tuple[bytes, Outcome]]:
        """Check pages against their checksums."""
        return self._service.verify(keys)

    def record(self, path: str, max_bytes: int, is_only: bool = True) -> RecordingStatus:
        """Write what the node's cache hears into a new file (see file_of). Raises RecordingError."""
        return self._service.record(file_of(path, self._service.node_id, is_only=is_only), max_bytes)

    def stop_recording(self) -> RecordingStatus | None:
        """End the recording."""
        return self._service.stop_recording()

    def idle(self) -> bool:
        """Nothing in flight, nothing leased."""
        return self._service.idle()

    def check(self) -> None:
        """Re-derive all counts; AssertionError where one differs."""
        self._service.check()

    def stop(self, drain_s: float = 30.0) -> None:
        """Save what only L3 holds for at most `drain_s`, and close everything."""
        self._service.stop(drain_s)


CacheNode = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(CacheNodeProcess)  # type: ignore[call-overload]  # Ray's types lack max_concurrency
