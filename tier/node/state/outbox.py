"""What a node's cache has decided on since it was last asked, and in which order that is to be carried out. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.tier.node.state.records import Worker
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import (
    Answer,
    Command,
    CommitCatalogue,
    ForgetTenant,
    HoldsChanged,
    Note,
    PageId,
    Send,
    WipeSlots,
    WritePage,
)
from kvtier.tier.protocol.messages import ToWorker
from kvtier.tier.stores.base import Outcome, Place


class Outbox:
    """The commands to give, empty between two events. With `directory` they tell which pages come and leave, too."""

    def __init__(self, directory: bool = False) -> None:
        self._tells_holds = directory
        # tier -> key -> whether it came or left, whichever was last; what the tiers hold bounds it
        self._holds: dict[TierName, dict[bytes, bool]] = {}
        self._transfer = 0  # number of the latest
        self._out: list[Command] = []
        self._drops: list[PageId] = []
        self._wipes: list[Place] = []
        self._forget: ForgetTenant | None = None
        self._write_commands: list[WritePage] = []
        self._answers: list[Answer] = []

    def _take_commands(self) -> list[Command]:
        # Dropped records are committed, and wiped slots wiped, before anything is written into their slots.
        commands, self._out = self._out, []
        if self._drops:
            commands.append(CommitCatalogue((), tuple(self._drops)))
            self._drops = []
        if self._wipes:
            commands.append(WipeSlots(tuple(self._wipes)))
            self._wipes = []
        if self._forget is not None:
            commands.append(self._forget)
            self._forget = None
        commands.extend(self._write_commands)
        self._write_commands = []
        commands.extend(self._answers)
        self._answers = []
        for tier, keys in self._holds.items():
            came = tuple(key for key, is_here in keys.items() if is_here)
            left = tuple(key for key, is_here in keys.items() if not is_here)
            commands.append(HoldsChanged(tier, came, left))
        self._holds = {}
        return commands

    def _holds_changed(self, tier: TierName, key: bytes, is_here: bool) -> None:
        """A tier has a page from now on, or has it no longer; to be called where `_tells_holds`."""
        self._holds.setdefault(tier, {})[key] = is_here

    def _send(self, worker: Worker, message: ToWorker) -> None:
        if not worker.fenced:
            self._out.append(Send(worker.ref, message))

    def _answer(self, ticket: int, results: Iterable[tuple[bytes, Outcome]]) -> None:
        self._answers.append(Answer(ticket, tuple(results)))

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    def _next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer
