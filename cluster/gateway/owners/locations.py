"""Asks the directory who holds a prompt's pages. A directory that is slow or dead costs next to nothing: no hints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.tier.transport.peer_health import Breaker

LOOKUP_S = 0.03  # a request waits no longer for hints; more finds more of a busy directory's
FAILURES = 3  # in a row, and it isn't asked for a while
PAUSE_S = 1.0  # doubles with each try that fails
MOST_PAUSE_S = 30.0
KEY_BYTES = 8  # of each key, that the directory goes by

log = logging.getLogger(__name__)


class HoldersPort(Protocol):
    """The directory. `keys` are the leading KEY_BYTES of the keys of a prompt's pages. Raises OwnerDown and Refusal."""

    async def lookup(self, keys: bytes) -> Sequence[Held]: ...


class Addresses:
    """HOST:PORT of each node's exchange: as it said itself when it was attached, else as the directory has it.

    The directory may have the address of an exchange that is gone, until the node gives it another one: of a node whose
    exchange was dropped, no hint's address counts before one is attached. Owned by the gateway's event loop.
    """

    def __init__(self) -> None:
        self._attached: dict[str, str] = {}
        self._heard: dict[str, str] = {}
        self._dropped: set[str] = set()

    def attach(self, node_id: str, address: str) -> None:
        """The node's exchange is there."""
        self._attached[node_id] = address
        self._dropped.discard(node_id)

    def drop(self, node_id: str) -> None:
        """The node's exchange is gone. Idempotent."""
        self._attached.pop(node_id, None)
        self._heard.pop(node_id, None)
        self._dropped.add(node_id)

    def of(self, node_id: str) -> str:
        """Where the node's exchange is; "" where it has none that is known."""
        return self._attached.get(node_id) or self._heard.get(node_id, "")

    def hear(self, held: Iterable[Held]) -> list[Held]:
        """What the directory says, with the addresses that are known to be right."""
        attached = self._attached  # that of nearly all hints, which may be hundreds of each request
        return [one if one.address == attached.get(one.node_id) else self._heard_of(one) for one in held]

    def _heard_of(self, one: Held) -> Held:
        node_id = one.node_id
        if one.address and node_id not in self._dropped and node_id not in self._attached:
            self._heard[node_id] = one.address
        address = self.of(node_id)
        return one if one.address in (address, "") else one._replace(address=address)


class Holders:
    """Owned by the gateway's event loop, whose clock is `clock`."""

    def __init__(self, port: HoldersPort, clock: Callable[[], float]) -> None:
        self.lookups = 0
        self.failures = 0
        self.skipped = 0  # requests that went without, since it had failed
        self._port = port
        self._clock = clock
        self._breaker = Breaker(FAILURES, PAUSE_S, MOST_PAUSE_S)

    async def lookup(self, keys: Iterable[bytes]) -> list[Held]:
        """Holders of a prompt's pages, whose keys these are; none where the directory doesn't say in time."""
        joined = b"".join(key[:KEY_BYTES] for key in keys)
        if not joined:
            return []
        breaker = self._breaker
        if breaker.why_not(self._clock()) is not None:
            self.skipped += 1
            return []
        is_probe = breaker.begin()
        self.lookups += 1
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await self._port.lookup(joined)
        except TimeoutError:
            return self._fail(is_probe, f"it does not answer within {1e3 * LOOKUP_S:.0f} ms")
        except (OwnerDown, Refusal) as error:
            return self._fail(is_probe, str(error))
        finally:
            breaker.ended(is_probe=is_probe)
        if breaker.open_until is not None:
            log.warning("the directory answers again")
        breaker.succeeded()
        return list(found)

    def _fail(self, is_probe: bool, why: str) -> list[Held]:
        self.failures += 1
        was_open = self._breaker.open_until is not None
        if self._breaker.failed(self._clock(), is_probe=is_probe) and not was_open:
            log.warning("the directory is asked no more for now, requests go without hints: %s", why)
        return []
