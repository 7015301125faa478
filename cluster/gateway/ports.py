"""What the gateway calls of workers, nodes and their like. That they are Ray actors is known to cluster/gateway/actor.py alone."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.protocol.results import Cleared, ManyOutcomes
from kvtier.tier.record.writer import RecordingStatus
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.requests.api import EngineRequest, Explanation

HEALTH_S = 5.0  # an owner that doesn't answer in this time is not well
HEALTHY, UNHEALTHY, DEAD = "healthy", "unhealthy", "dead"
STALLED = "stalled"  # it lives for all that is known, and is stalled
Outcomes = list[tuple[bytes, Outcome]]
Told = list[tuple[bytes, int]]  # clear epochs by tenant, as tier.clears.Clears has them
Tenant = str | bytes | None  # by name; by digest where the configuration doesn't know it; None: all


class OwnerDown(Exception):
    """A worker or node is gone for good; the message says how that is known."""


class OwnerPort(Protocol):
    """What the Cache verbs call of each that holds pages. All raise OwnerDown. Only nodes are asked by digest.

    `held` is asked for page keys that lie one behind the other, `keys_with` for keys' first digits (by_key.keys_with).
    `clear` does what a clear epoch (`number`) stands for, `know` all that are told and that the owner has missed.
    `health` is None when all is well, else what isn't.
    """

    async def health(self) -> str | None: ...
    async def stats(self) -> Snapshot: ...
    async def pages(self, tenant: Tenant, tier: TierName | None, limit: int) -> list[PageInfo]: ...
    async def pages_of(self, keys: list[bytes]) -> list[PageInfo]: ...
    async def held(self, keys: bytes) -> list[HeldKeys]: ...
    async def keys_with(self, heads: list[str], limit: int) -> list[list[bytes]]: ...
    async def pin(self, keys: list[bytes]) -> Outcomes: ...
    async def unpin(self, keys: list[bytes]) -> Outcomes: ...
    async def evict(self, keys: list[bytes], tier: TierName | None) -> Outcomes: ...
    async def evict_all(self, tier: TierName | None) -> ManyOutcomes: ...
    async def clear(self, tenant: Tenant, number: int) -> Cleared: ...
    async def know(self, told: Told) -> None: ...
    async def verify(self, keys: list[bytes]) -> Outcomes: ...
    async def verify_all(self) -> ManyOutcomes: ...


async def asked_health(port: OwnerPort) -> tuple[str, str]:
    """An owner's health by its own word, and what is wrong with it."""
    try:
        async with asyncio.timeout(HEALTH_S):
            wrong = await port.health()
    except OwnerDown as error:
        return DEAD, str(error)
    except Refusal as refusal:
        return UNHEALTHY, refusal.message
    except TimeoutError:
        return UNHEALTHY, f"it does not answer within {HEALTH_S:g} s"
    return (HEALTHY, "") if wrong is None else (UNHEALTHY, wrong)


class NodePort(OwnerPort, Protocol):
    """A CacheNode. `notes` are one-line notices, `pid` is that of its process now, `clears` what it has been cleared by.

    `record` raises RecordingError, see writer.file_of; `stop_recording` is None where nothing was recorded.
    """

    async def notes(self) -> list[str]: ...
    async def pid(self) -> int: ...
    async def clears(self) -> Told: ...
    async def record(self, path: str, max_bytes: int, is_only: bool) -> RecordingStatus: ...
    async def stop_recording(self) -> RecordingStatus | None: ...


class WorkerPort(OwnerPort, Protocol):
    """A decode worker. `submit` raises ValueError for a request it can't take, QueueFull, and RuntimeError once it
    takes no more. A request that is cancelled `is_stopped` has given its whole answer, which a stop string ended.
    """

    async def submit(self, request: EngineRequest) -> None: ...
    async def cancel(self, request_id: str, is_stopped: bool) -> None: ...
    async def explain(self, request_id: str) -> Explanation | None: ...
