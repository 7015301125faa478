"""Asks the directory who holds a prompt's pages. A directory that is slow or dead costs next to nothing: no hints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtier.cluster.gateway_ports import OwnerDown
from kvtier.cluster.gateway_requests import Refusal
from kvtier.cluster.routing import Held

LOOKUP_S = 0.03  # a request waits no longer for hints; more finds more of a busy directory's
FAILURES = 3  # in a row, and it isn't asked for a while
PAUSE_S = 1.0  # doubles with each try that fails
MOST_PAUSE_S = 30.0
KEY_BYTES = 8  # of each key, that the directory goes by

log = logging.getLogger(__name__)


class HoldersPort(Protocol):
    """The directory. `keys` are the leading KEY_BYTES of the keys of a prompt's pages. Raises OwnerDown and Refusal."""

    async def lookup(self, keys: bytes) -> Sequence[Held]: ...


class Breaker:
    """Says whether to ask one who has failed. Pure: `now` comes from outside."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = PAUSE_S
        self._closed_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """The last answers were failures."""
        return self._failures >= FAILURES

    def may_ask(self, now: float) -> bool:
        """Whether to try; while it fails, one try at a time."""
        if not self.is_open:
            return True
        if now < self._closed_until_s:
            return False
        self._closed_until_s = now + self._pause_s
        return True

    def failed(self, now: float) -> bool:
        """It did not answer; whether it isn't asked any more from now on."""
        was_open = self.is_open
        self._failures += 1
        if not self.is_open:
            return False
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s) if was_open else PAUSE_S
        self._closed_until_s = now + self._pause_s
        return not was_open

    def answered(self) -> bool:
        """It answered; whether it hadn't for a while."""
        was_open = self.is_open
        self._failures = 0
        return was_open


class Holders:
    """Owned by the gateway's event loop, whose clock is `clock`."""

    def __init__(self, port: HoldersPort, clock: Callable[[], float]) -> None:
        self.lookups = 0
        self.failures = 0
        self.skipped = 0  # requests that went without, since it had failed
        self._port = port
        self._clock = clock
        self._breaker = Breaker()

    async def lookup(self, keys: Iterable[bytes]) -> list[Held]:
        """Holders of a prompt's pages, whose keys these are; none where the directory doesn't say in time."""
        joined = b"".join(key[:KEY_BYTES] for key in keys)
        if not joined:
            return []
        if not self._breaker.may_ask(self._clock()):
            self.skipped += 1
            return []
        self.lookups += 1
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await self._port.lookup(joined)
        except TimeoutError:
            return self._fail(f"it does not answer within {1e3 * LOOKUP_S:.0f} ms")
        except (OwnerDown, Refusal) as error:
            return self._fail(str(error))
        if self._breaker.answered():
            log.warning("the directory answers again")
        return list(found)

    def _fail(self, why: str) -> list[Held]:
        self.failures += 1
        if self._breaker.failed(self._clock()):
            log.warning("the directory is asked no more for now, requests go without hints: %s", why)
        return []
