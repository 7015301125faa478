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
        self.tells_holds = directory
        # tier -> key -> whether it came or left, whichever was last; what the tiers hold bounds it
        self.holds_changes: dict[TierName, dict[bytes, bool]] = {}
        self._transfer = 0  # number of the latest
        self.commands: list[Command] = []
        self.drops: list[PageId] = []
        self.wipes: list[Place] = []
        self.forget: ForgetTenant | None = None
        self.write_commands: list[WritePage] = []
        self._answers: list[Answer] = []

    def take_commands(self) -> list[Command]:
        # Dropped records are committed, and wiped slots wiped, before anything is written into their slots.
        commands, self.commands = self.commands, []
        if self.drops:
            commands.append(CommitCatalogue((), tuple(self.drops)))
            self.drops = []
        if self.wipes:
            commands.append(WipeSlots(tuple(self.wipes)))
            self.wipes = []
        if self.forget is not None:
            commands.append(self.forget)
            self.forget = None
        commands.extend(self.write_commands)
        self.write_commands = []
        commands.extend(self._answers)
        self._answers = []
        for tier, keys in self.holds_changes.items():
            came = tuple(key for key, is_here in keys.items() if is_here)
            left = tuple(key for key, is_here in keys.items() if not is_here)
            commands.append(HoldsChanged(tier, came, left))
        self.holds_changes = {}
        return commands

    def holds_changed(self, tier: TierName, key: bytes, is_here: bool) -> None:
        """A tier has a page from now on, or has it no longer; to be called where `_tells_holds`."""
        self.holds_changes.setdefault(tier, {})[key] = is_here

    def send(self, worker: Worker, message: ToWorker) -> None:
        if not worker.fenced:
            self.commands.append(Send(worker.ref, message))

    def answer(self, ticket: int, results: Iterable[tuple[bytes, Outcome]]) -> None:
        self._answers.append(Answer(ticket, tuple(results)))

    def note(self, text: str) -> None:
        self.commands.append(Note(text))

    def next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer
