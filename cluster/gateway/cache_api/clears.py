"""Clears of tenants over all parts: each has a number that outlasts the gateway, and each part's answer is named.

What can't be asked now, since its process is gone or says nothing, applies the clear before it serves again: it is told of
all numbers when it is attached, and requests and lookups carry their tenant's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtier.cluster.gateway.owners.ask import Silence, together, within
from kvtier.cluster.gateway.ports import OwnerDown, OwnerPort, Tenant, Told
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.proto import cache_pb2
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.protocol.results import Cleared
from kvtier.tier.stores.base import Outcome
from kvtier.tier.stores.ssd.clear_file import ClearFile

AGAIN_S = (
    1.0,
    4.0,
    16.0,
    60.0,
)  # pauses before a part that said nothing is told again; the last one again and again

log = logging.getLogger(__name__)


class ClearRecord:
    """The numbers of all clears, in memory and in a file. Owned by the gateway's event loop.

    A number is a millisecond of the wall clock, made larger than all before it: where the file is lost, and no node that
    could tell is there, the next ones are still larger. `folder` None keeps no file.
    """

    def __init__(self, folder: Path | None, wall_s: Callable[[], float] = time.time) -> None:
        self.clears = Clears()
        self.refused = ""  # why the file doesn't have all of them
        self._folder, self._wall_s = folder, wall_s
        self._saving = asyncio.Lock()
        self._file: ClearFile | None = None

    def load(self) -> None:
        """Take over what an earlier gateway has put down."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = ClearFile.load(self._folder)
        except OSError as error:
            self._refuse(error)
            return
        if self._file.note:
            log.warning("%s", self._file.note)
        self.clears = self._file.clears

    async def begin(self, tenant: bytes | None) -> int:
        """The number of a new clear of a tenant (its digest; None: of all); it is on the disk unless `refused` says why."""
        number = max(self.clears.latest + 1, int(self._wall_s() * 1e3))
        self.clears.note(tenant, number)
        await self._save()
        return number

    async def hear(self, told: Told) -> bool:
        """A node has applied these; whether there is one that this record lacked."""
        missing = self.clears.behind(told)
        for tenant, number in missing:
            self.clears.note(tenant, number)
        if missing:
            await self._save()
        return bool(missing)

    async def _save(self) -> None:
        if self._folder is None:
            return
        async with self._saving:
            try:
                if self._file is None:
                    self._file = await asyncio.to_thread(ClearFile.load, self._folder)
                self._file.clears = self.clears.copy()
                await asyncio.to_thread(self._file.save)
                self.refused = ""
            except OSError as error:
                self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        self.refused = errno.errorcode.get(error.errno or 0, "") or str(error)
        log.error("the record of clears in %s can't be kept: %s", self._folder, error)


@dataclass(frozen=True, slots=True)
class Asked:
    """A part that is to clear. `down` says why its process is gone, None where it is there."""

    part: str
    port: OwnerPort
    lose: Callable[[str], None]  # with the reason
    keeps: bool  # its pages outlast its process
    down: Callable[[], str | None]


class Clearer:
    """Asks parts to clear, and tells those again that didn't answer. Owned by the gateway's event loop."""

    def __init__(self, record: ClearRecord) -> None:
        self.record = record
        self._behind: dict[str, asyncio.Task[None]] = {}  # by part; about one for each

    async def clear(
        self, asked: Iterable[Asked], tenant: Tenant, number: int, limit_s: float
    ) -> tuple[list[tuple[str, Cleared]], list[cache_pb2.PartOutcome]]:
        """What became of it: the answers, and a line for each part and for each folder that no node uses."""
        answers: list[tuple[str, Cleared]] = []
        parts: list[cache_pb2.PartOutcome] = []

        async def ask(one: Asked) -> None:
            if (down := one.down()) is not None:
                parts.extend(_gone(one, down))
                return
            try:
                answer = await within(limit_s, one.port.clear(tenant, number))
            except OwnerDown as error:
                one.lose(str(error))
                parts.extend(_gone(one, str(error)))
            except (Silence, Refusal, RuntimeError, TimeoutError) as error:
                why = (
                    error.message if isinstance(error, Refusal) else str(error) or "it waits for its own loop"
                )
                parts.append(
                    _later(one.part, f"it has not answered ({why}): it clears before it serves any of that")
                )
                self.tell_later(one)
            else:
                answers.append((one.part, answer))
                parts.append(_answered(one.part, answer))

        await together(map(ask, asked))
        unused = {folder: left for _, answer in answers for folder, left in answer.unused}
        parts += [_later(folder, left.detail, left.tier.value, left.error) for folder, left in unused.items()]
        parts.sort(key=lambda part: (part.outcome == cache_pb2.OUTCOME_ACCEPTED, part.part))
        return answers, parts + self._unkept(parts)

    def _unkept(self, parts: Iterable[cache_pb2.PartOutcome]) -> list[cache_pb2.PartOutcome]:
        """Where the number is in no file, what is to be done later is done only by those who hear of it from this gateway."""
        if not self.record.refused or all(part.outcome == cache_pb2.OUTCOME_ACCEPTED for part in parts):
            return []
        detail = (
            "its record of clears can't be written: should it end before the others are done, clear once more"
        )
        return [
            cache_pb2.PartOutcome(
                part="gateway",
                outcome=cache_pb2.OUTCOME_REJECTED,
                error=self.record.refused,
                detail=detail,
            )
        ]

    async def know(self, port: OwnerPort, limit_s: float) -> None:
        """Have a part apply all that it missed. Raises Silence, OwnerDown and Refusal."""
        await within(limit_s, port.know(self.record.clears.numbers()))

    def tell_later(self, one: Asked) -> None:
        """Again and again, until it has heard or is gone."""
        if one.part in self._behind and not self._behind[one.part].done():
            return
        self._behind[one.part] = asyncio.get_running_loop().create_task(self._tell(one))

    async def _tell(self, one: Asked) -> None:
        attempt = 0
        while one.down() is None:
            await asyncio.sleep(AGAIN_S[min(attempt, len(AGAIN_S) - 1)])
            attempt += 1
            try:
                await self.know(one.port, AGAIN_S[-1])
                log.warning("%s has applied the clears that it had missed", one.part)
                return
            except OwnerDown as error:
                one.lose(str(error))
            except (Silence, Refusal, RuntimeError, TimeoutError) as error:
                log.warning("%s has not applied a clear yet: %s", one.part, error)

    def close(self) -> None:
        """Tell nothing any more."""
        for task in self._behind.values():
            task.cancel()


def _gone(one: Asked, why: str) -> list[cache_pb2.PartOutcome]:
    """A worker's L1 went with its process; a node's pages may be on its disk."""
    if not one.keeps:
        return []
    return [_later(one.part, f"it is down ({why}): its pages are cleared before it serves again", "L4")]


def _answered(part: str, answer: Cleared) -> cache_pb2.PartOutcome:
    pages = len(answer.pages.codes)
    if answer.left:
        first = answer.left[0]
        detail = "; ".join(dict.fromkeys(left.detail for left in answer.left))
        return _later(part, detail, first.tier.value, first.error, pages)
    in_use = sum(outcome is Outcome.DEFERRED for outcome in answer.pages.outcomes())
    if in_use:
        return _later(
            part,
            f"{in_use} of them are in use: nothing finds them, and they go with their users",
            pages=pages,
        )
    return cache_pb2.PartOutcome(part=part, outcome=cache_pb2.OUTCOME_ACCEPTED, pages=pages)


def _later(part: str, detail: str, tier: str = "", error: str = "", pages: int = 0) -> cache_pb2.PartOutcome:
    return cache_pb2.PartOutcome(
        part=part,
        outcome=cache_pb2.OUTCOME_DEFERRED,
        pages=pages,
        tier=tier,
        error=error,
        detail=detail,
    )
