"""Watches the processes of a deployment and does what `cluster/health/supervision.py` and `cluster/health/heartbeats.py` decide: ends parts, restarts them, and
tells them of each other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from kvtier.cluster.gateway.owners.part_states import PartState, PartStates
from kvtier.cluster.health.heartbeats import Ask, Heartbeats, Kill
from kvtier.cluster.health.memory_watch import MemoryWatch
from kvtier.cluster.health.supervision import (
    ABSENT_S,
    Answered,
    Command,
    Incarnation,
    Kind,
    Life,
    Lost,
    Make,
    Member,
    Postponed,
    Say,
    Tell,
    Told,
    Wire,
)
from kvtier.cluster.machines.homes import NoHome
from kvtier.cluster.machines.leftovers import Stamp, alive, kill, stamp_of

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 2.0  # an exchange is asked how it is
_ATTACH = {
    Kind.WORKER: "attach_worker",
    Kind.NODE: "attach_node",
    Kind.EXCHANGE: "attach_exchange",
    Kind.DIRECTORY: "attach_directory",
}


@dataclass(slots=True)
class Part:
    """One actor: how to make it, and its process once it answers. `is_here`: on this machine.

    `make` raises NoHome where it can't be made now. The directory alone is started again by Ray: one of the others may
    have to be made elsewhere.
    """

    member: Member
    make: Callable[[], Any]
    is_here: Callable[[], bool]
    handle: Any
    process: Stamp | None = None
    asked: Any = None  # the call that will tell its process
    was_lost: bool = False  # when it was asked

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_kept(self) -> bool:
        """Whether Ray starts it again by itself."""
        return self.member.kind is Kind.DIRECTORY

    @property
    def is_alive(self) -> bool:
        """As far as can be seen from here."""
        return self.process is not None and (not self.is_here() or bool(alive([self.process])))


def made(member: Member, make: Callable[[], Any], *, is_here: Callable[[], bool]) -> Part:
    """A part, its actor just made."""
    return Part(member, make, is_here, make())


def who(actor: object) -> Stamp:
    """Runs in an actor's process: which process that is."""
    return stamp_of(os.getpid())


def address_of(exchange: Any) -> str:
    """Runs in an exchange's process: where others reach it."""
    address: str = exchange.info()["address"]
    return address


def incarnation_of(process: Stamp) -> str:
    pid, start = process
    return f"{pid}@{start}"


@dataclass(slots=True)
class _Question:
    """One that a process of a part has been asked, and has not answered yet."""

    incarnation: Incarnation
    answer: Any


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any


class Watch:
    """Owned by the supervisor's main thread. Nothing here waits: what isn't answered yet is looked for the next time."""

    def __init__(
        self,
        parts: Sequence[Part],
        stalled_after_s: float,
        absent_s: float = ABSENT_S,
        memory: MemoryWatch | None = None,
    ) -> None:
        """The parts' processes are known and the gateway serves. One that is stalled for so long is killed, and made
        again what answers nothing for `absent_s` while nothing knows of its death."""
        self._parts = {part.name: part for part in parts}
        self._memory = memory or MemoryWatch()
        members = [part.member for part in parts]
        self._life = Life(members, absent_s)
        self._pulses = Heartbeats(stalled_after_s)
        self._pulse_questions: dict[str, _Question] = {}
        self._states = PartStates(members)
        self._health_questions: dict[str, _Question] = {}
        self._healths: dict[str, str | None] = {}  # what exchanges have said last
        self._next_health_at = 0.0
        self._heard: tuple[dict[str, Incarnation], list[PartState]] | None = (
            None  # which gateway was told what
        )
        self._life.began({part.name: incarnation_of(part.process) for part in parts if part.process})
        self._told: list[tuple[Tell, Any]] = []

    def look(self, now: float) -> list[str]:
        """See who has died and who is back, do what that takes, and return one line for each that people should know."""
        said: list[str] = []
        self._memory.look()
        for event in [event for part in self._parts.values() for event in self._seen(part)]:
            if isinstance(event, Lost):
                self._withdraw(self._parts[event.part])
            self._do(self._life.handle(event, now), said, now)
        for told in self._answers():
            self._do(self._life.handle(told, now), said, now)
        self._do(self._life.due(now), said, now)
        self._feel(now, said)
        return said

    def hopeless(self) -> str:
        """Why nothing can be served any more; "" while that may change."""
        return self._life.hopeless()

    def _seen(self, part: Part) -> list[Answered | Lost]:
        events: list[Answered | Lost] = []
        if part.process and not part.is_alive:
            part.process = None
            reason = self._memory.reason() if part.is_here() else ""
            events.append(Lost(part.name, reason, is_over=not part.is_kept))
        if part.asked is None:
            part.was_lost = part.process is None
            part.asked = part.handle.__ray_call__.remote(who)
        elif ray.wait([part.asked], timeout=0)[0]:
            events += self._answer(part)
        return events

    def _answer(self, part: Part) -> list[Answered | Lost]:
        answer, part.asked = part.asked, None
        try:
            process: Stamp = ray.get(answer)
        except ActorUnavailableError:
            if part.is_alive and part.is_here():
                return []
            part.process = None
            return [Lost(part.name, "", is_dead=False)]
        except ActorDiedError as error:
            # One that has just died may be said to be so for good, though Ray is starting it again.
            is_over = part.was_lost or not part.is_kept
            part.process = None
            killed = self._memory.reason() if part.is_here() else ""
            return [Lost(part.name, killed or (last_line(error) if is_over else ""), is_over=is_over)]
        except RayError as error:
            log.warning("%s can't be asked: %s", part.name, last_line(error))
            return []
        if part.is_here() and not alive([process]):
            return []
        part.process = process
        return [Answered(part.name, incarnation_of(process))]

    def _answers(self) -> list[Told]:
        answered: list[Told] = []
        waiting: list[tuple[Tell, Any]] = []
        for tell, call in self._told:
            if ray.wait([call], timeout=0)[0]:
                answered.append(Told(tell, _failure(call)))
            else:
                waiting.append((tell, call))
        self._told = waiting
        return answered

    def _feel(self, now: float, said: list[str]) -> None:
        """The heartbeats of all, and how the exchanges are; what the gateway is to show of it."""
        living = self._life.incarnations()
        for name, incarnation, answer in self._taken(self._pulse_questions):
            if answer is None:
                self._pulses.failed(name, incarnation)
            else:
                self._pulses.answered(name, incarnation, answer.value)
        for command in self._pulses.look(living, now):
            match command:
                case Ask():
                    self._ask(self._pulse_questions, command.part, living, "heartbeat")
                case Kill():
                    self._kill(self._parts[command.part])
                case Say():
                    said.append(command.text)
        self._ask_exchanges(now, living)
        self._tell_states(living)

    def _ask_exchanges(self, now: float, living: dict[str, Incarnation]) -> None:
        self._healths = {name: wrong for name, wrong in self._healths.items() if name in living}
        for name, incarnation, answer in self._taken(self._health_questions):
            if answer is not None and living.get(name) == incarnation:
                self._healths[name] = answer.value
        if now < self._next_health_at:
            return
        self._next_health_at = now + HEALTH_EVERY_S
        for name in self._life.living(Kind.EXCHANGE):
            if name not in self._health_questions:
                self._ask(self._health_questions, name, living, "health")

    def _ask(
        self, questions: dict[str, _Question], name: str, living: dict[str, Incarnation], method: str
    ) -> None:
        questions[name] = _Question(living[name], getattr(self._parts[name].handle, method).remote())

    def _taken(self, questions: dict[str, _Question]) -> list[tuple[str, Incarnation, _Answer | None]]:
        """Of each question that is over: the process that was asked, and its answer, None where the call failed."""
        found: list[tuple[str, Incarnation, _Answer | None]] = []
        for name, question in list(questions.items()):
            if not ray.wait([question.answer], timeout=0)[0]:
                continue
            del questions[name]
            try:
                found.append((name, question.incarnation, _Answer(ray.get(question.answer))))
            except RayError:
                found.append((name, question.incarnation, None))
        return found

    def _tell_states(self, living: dict[str, Incarnation]) -> None:
        """The gateway, when something has changed."""
        gateways = self._life.living(Kind.GATEWAY)
        states = self._states.seen(living, self._pulses.stalled(), self._healths, time.time())
        heard = {name: living[name] for name in gateways}, states
        if gateways and heard != self._heard:
            self._heard = heard
            for name in gateways:
                self._parts[name].handle.hear_states.remote(states)  # said again when it changes

    def _kill(self, part: Part) -> None:
        if part.process and part.is_here():
            kill([part.process])
            return
        with suppress(RayError):
            ray.kill(part.handle, no_restart=not part.is_kept)

    def _do(self, commands: Sequence[Command], said: list[str], now: float) -> None:
        for command in commands:
            match command:
                case Say():
                    said.append(command.text)
                case Make():
                    self._make(self._parts[command.part], said, now)
                case Tell():
                    self._told.append((command, self._tell(command)))

    def _withdraw(self, lost: Part) -> None:
        """Tell the gateway of an exchange that is lost; ATTACH follows when it is back, and is heard after this."""
        if lost.member.kind is Kind.EXCHANGE:
            for gateway in handles(self._parts.values(), Kind.GATEWAY):
                gateway.detach_exchange.remote(lost.member.node)  # nothing hangs on the answer

    def _make(self, part: Part, said: list[str], now: float) -> None:
        with suppress(RayError):
            ray.kill(part.handle, no_restart=True)
        part.process = part.asked = None
        try:
            part.handle = part.make()
        except NoHome as reason:
            self._do(self._life.handle(Postponed(part.name, str(reason)), now), said, now)

    def _tell(self, tell: Tell) -> Any:
        handle = self._parts[tell.part].handle
        match tell.wire:
            case Wire.START:
                living = {name for name, _ in tell.living}
                return start_gateway([part for part in self._parts.values() if _may_be_told(part, living)])
            case Wire.ATTACH:
                [gateway] = handles(self._parts.values(), Kind.GATEWAY)
                return getattr(gateway, _ATTACH[self._parts[tell.part].member.kind]).remote(handle)
            case Wire.ANNOUNCE:
                return handle.connect_directory.remote(self._directory(), self._exchange_address(tell.part))

    def _directory(self) -> Any:
        return next(iter(handles(self._parts.values(), Kind.DIRECTORY)), None)

    def _exchange_address(self, name: str) -> Any:
        """Of the exchange of a part's node, as the answer that will tell it; "" where there is none."""
        node = self._parts[name].member.node
        for part in self._parts.values():
            if part.member.kind is Kind.EXCHANGE and part.member.node == node:
                return part.handle.__ray_call__.remote(address_of)
        return ""


def handles(parts: Iterable[Part], kind: Kind) -> list[Any]:
    """Of all parts of a kind."""
    return [part.handle for part in parts if part.member.kind is kind]


def start_gateway(parts: Sequence[Part]) -> Any:
    """Have the gateway among these parts serve with all the others; the call that will tell where it listens."""
    [gateway] = handles(parts, Kind.GATEWAY)
    directory = next(iter(handles(parts, Kind.DIRECTORY)), None)
    workers, nodes, exchanges = (handles(parts, kind) for kind in (Kind.WORKER, Kind.NODE, Kind.EXCHANGE))
    return gateway.start.remote(workers, nodes, directory, exchanges)


def _may_be_told(part: Part, living: Container[str]) -> bool:
    return part.member.kind not in _ATTACH or part.name in living


def _failure(call: Any) -> str:
    try:
        ray.get(call)
    except RayTaskError as error:
        return first_line(error.cause)
    except RayActorError as error:
        return last_line(error)
    except RayError as error:
        return first_line(error)
    return ""


def first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def last_line(error: object) -> str:
    """Of a traceback in text: what was raised, without its class."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    head, separator, rest = line.partition(": ")
    return rest if separator and head.endswith(("Error", "Exception")) and " " not in head else line
