"""Who of a deployment lives, who must be restarted, and who must be told of whom. Pure: decides, reads no clock.

The shell tells what it sees of the parts' processes; each answer is what to say and what to do. What must be told to whom
follows from who lives, so nothing that gets lost on the way, and no order in which parts come back, leaves a gap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

GIVE_UP = (
    8  # attempts in a row, about two minutes, after which a part that all others need ends the deployment
)
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
ABSENT_S = 300.0  # the least time in which a part that is being made, or can't be reached, must answer

Incarnation = str  # of a part: one process


class Kind(Enum):
    """What a part is."""

    GATEWAY = "gateway"
    DIRECTORY = "directory"
    NODE = "node"
    EXCHANGE = "exchange"
    WORKER = "worker"


class Wire(Enum):
    """Something that a part must be told once for each process of the parts it is about.

    A directory that Ray has started again asks by itself for all that it must know: of it only another handle is told.
    """

    START = "start"  # the gateway: serve, with all workers, nodes and exchanges that live
    ATTACH = "attach"  # the gateway: this worker, node, exchange or directory is there
    ANNOUNCE = "announce"  # a worker or node: this is the directory, and its node's exchange


@dataclass(frozen=True, slots=True)
class Member:
    """One part. `node` is the node it belongs to, "" for none."""

    name: str
    kind: Kind
    node: str = ""


# ---- what is seen ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """A part's process answers."""

    part: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Lost:
    """A part's process is gone, or can't be reached. `is_over`: Ray will not start it again."""

    part: str
    reason: str
    is_over: bool = False
    is_dead: bool = True  # False: nothing knows, it can't be reached


@dataclass(frozen=True, slots=True)
class Told:
    """A Tell has been answered: by an error, where `failure` says which."""

    tell: Tell
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Postponed:
    """A part can't be made yet, and nothing was tried: there is no machine for it."""

    part: str
    reason: str


# ---- what is to be done ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """One line for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Make:
    """Restart a part, and end what is left of it: Ray won't start it again, or it can't be used."""

    part: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell `wire` of `part`; `about` are the processes that it is about. Answered by Told.

    A START names the workers, nodes and exchanges that live, and the directory: of these the gateway needs no ATTACH.
    """

    wire: Wire
    part: str
    about: tuple[Incarnation, ...]
    living: tuple[tuple[str, Incarnation], ...] = ()


_ATTACHED = (Kind.WORKER, Kind.NODE, Kind.EXCHANGE)  # to the gateway, while they live
_PURPOSES = {
    Wire.START: "starting {}",
    Wire.ATTACH: "connecting {} to the gateway",
    Wire.ANNOUNCE: "connecting {} to the directory",
}
Event = Answered | Lost | Told | Postponed
Command = Say | Make | Tell


@dataclass(slots=True)
class _Part:
    member: Member
    incarnation: Incarnation | None = None  # of the process that lives
    last: Incarnation | None = None  # of the latest one that lived
    is_over: bool = False  # it must be restarted
    attempts: int = 0  # to make it, in a row
    not_before: float = 0.0  # the next attempt
    reason: str = ""  # why the last one failed
    waits_for: str = ""  # why none could be made
    made: int = 0  # how often it was restarted, each time with another handle
    absent_since: float | None = None  # no process of it answers, though Ray may yet bring one


@dataclass(slots=True)
class _Telling:
    done: tuple[Incarnation, ...] | None = None
    under_way: tuple[Incarnation, ...] | None = None
    attempts: int = 0
    not_before: float = 0.0


class Life:
    """All parts of a deployment, from the moment it serves. Owned by the supervisor's main thread."""

    def __init__(self, members: Iterable[Member], absent_s: float = ABSENT_S) -> None:
        """A part that answers nothing for `absent_s`, such as one whose constructor hangs, is restarted."""
        self._absent_s = absent_s
        self._parts = {member.name: _Part(member) for member in members}
        self._tellings: dict[tuple[Wire, str], _Telling] = {}

    def began(self, incarnations: dict[str, Incarnation]) -> None:
        """All these parts live and the gateway serves with all of them; nothing has been told of the directory."""
        for name, incarnation in incarnations.items():
            self._parts[name].incarnation = self._parts[name].last = incarnation
        for wire, part, about in self._needed():
            if wire is not Wire.ANNOUNCE:
                self._tellings[wire, part] = _Telling(done=about)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take what was seen at `now`, in seconds of any clock that only goes forward."""
        match event:
            case Answered():
                return self._answered(event)
            case Lost():
                return self._lost(event, now)
            case Told():
                return self._told(event, now)
            case Postponed():
                return self._postponed(event, now)

    def due(self, now: float) -> list[Command]:
        """What is to be done by now."""
        return [*self._overdue(now), *self._makes(now), *self._tells(now)]

    def hopeless(self) -> str:
        """Why nothing can be served any more, whatever is waited for; "" while that may change."""
        for part in self._of(Kind.GATEWAY):
            if part.attempts >= GIVE_UP:
                return f"the gateway can't be started again: {part.reason}"
        workers = self._of(Kind.WORKER)
        if workers and all(part.attempts >= GIVE_UP for part in workers):
            return f"no worker can be started again: {workers[0].reason}"
        return ""

    def incarnations(self) -> dict[str, Incarnation]:
        """Of the parts that live."""
        return dict(self._incarnations(*Kind))

    def living(self, kind: Kind) -> list[str]:
        """Names of the parts of a kind that live."""
        return [part.member.name for part in self._of(kind) if part.incarnation is not None]

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def _answered(self, event: Answered) -> list[Command]:
        part = self._parts[event.part]
        if part.incarnation == event.incarnation or part.is_over:
            return []
        said: list[Command] = []
        if part.incarnation is not None:  # it died and came back between two looks
            said.append(Say(f"{event.part} died"))
        again = "answers" if part.last == event.incarnation else "runs"
        part.incarnation = part.last = event.incarnation
        part.waits_for, part.absent_since = "", None
        if part.member.kind in (Kind.NODE, Kind.EXCHANGE, Kind.DIRECTORY):
            part.attempts = 0
        return [*said, Say(f"{event.part} {again} again")]

    def _lost(self, event: Lost, now: float) -> list[Command]:
        part = self._parts[event.part]
        was_there, part.incarnation = part.incarnation is not None, None
        if was_there:
            part.absent_since = now
        is_news = event.is_over and not part.is_over
        if event.is_over:
            self._is_over(part, event.reason, now)
        if not was_there:
            return self._failed(part) if is_news else []
        what = "died" if event.is_dead else "can't be reached"
        return [Say(f"{event.part} {what}" + (f": {event.reason}" if event.reason else ""))]

    def _failed(self, part: _Part) -> list[Command]:
        """An attempt to make it has failed: said at the first one, and where it has become hopeless."""
        name, reason = part.member.name, part.reason or "its process ended"
        if part.attempts == 1:
            return [Say(f"{name} can't be started again, and it is tried again: {reason}")]
        if part.attempts == GIVE_UP:
            often = f"{name} can't be started again after {GIVE_UP} attempts in a row"
            return [Say(f"{often}, and is tried every {LONGEST_WAIT_S:g} s from now on: {reason}")]
        return []

    def _told(self, event: Told, now: float) -> list[Command]:
        tell = event.tell
        telling = self._tellings[tell.wire, tell.part]
        if telling.under_way != tell.about:
            return []  # of processes that are gone
        telling.under_way = None
        if not event.failure:
            telling.done, telling.attempts = tell.about, 0
            self._parts[tell.part].attempts = 0
            for name, incarnation in tell.living:
                self._tellings[Wire.ATTACH, name] = _Telling(done=(*tell.about, incarnation))
            return []
        if tell.wire is Wire.START:  # it may have started halfway
            part = self._parts[tell.part]
            part.incarnation = None
            self._is_over(part, event.failure, now)
            return [Say(f"{tell.part} can't start: {event.failure}")] if part.attempts <= 1 else []
        telling.attempts += 1
        telling.not_before = now + _wait(telling.attempts)
        if telling.attempts > 1 or (tell.wire, tell.part, tell.about) not in self._needed():
            return []
        return [Say(f"{_PURPOSES[tell.wire].format(tell.part)} fails, and is tried again: {event.failure}")]

    def _postponed(self, event: Postponed, now: float) -> list[Command]:
        part = self._parts[event.part]
        part.attempts, part.made = part.attempts - 1, part.made - 1
        part.is_over, part.not_before = True, now + FIRST_WAIT_S
        was, part.waits_for = part.waits_for, event.reason
        return [Say(f"{event.part} waits: {event.reason}")] if was != event.reason else []

    def _is_over(self, part: _Part, reason: str, now: float) -> None:
        if not part.is_over:
            part.is_over = True
            part.reason = reason
            part.not_before = now + (_wait(part.attempts) if part.attempts else 0.0)

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def _overdue(self, now: float) -> list[Command]:
        said: list[Command] = []
        for part in self._parts.values():
            if part.incarnation is not None or part.is_over or part.absent_since is None:
                continue
            if now - part.absent_since >= self._absent_s:
                reason = f"answers nothing for {self._absent_s:.0f} s"
                self._is_over(part, f"it {reason}", now)
                said.append(Say(f"{part.member.name} {reason}, and is restarted"))
        return said

    def _makes(self, now: float) -> list[Command]:
        found: list[Command] = []
        for part in self._parts.values():
            if part.is_over and now >= part.not_before:
                part.attempts += 1
                part.made += 1
                part.is_over = False  # until this attempt is over
                part.absent_since = now
                found.append(Make(part.member.name))
        return found

    def _tells(self, now: float) -> list[Command]:
        found: list[Command] = []
        for wire, part, about in self._needed():
            telling = self._tellings.setdefault((wire, part), _Telling())
            if telling.done == about or telling.under_way == about or now < telling.not_before:
                continue
            telling.under_way = about
            living = tuple(self._attachable()) if wire is Wire.START else ()
            found.append(Tell(wire, part, about, living))
        return found

    def _needed(self) -> list[tuple[Wire, str, tuple[Incarnation, ...]]]:
        """All that the parts that live must have been told."""
        needed: list[tuple[Wire, str, tuple[Incarnation, ...]]] = []
        for gateway in self._of(Kind.GATEWAY):
            if gateway.incarnation is None or not self.living(Kind.WORKER):
                continue
            about = (gateway.incarnation,)
            needed.append((Wire.START, gateway.member.name, about))
            started = self._tellings.get((Wire.START, gateway.member.name))
            if started is None or started.done == about:
                needed += [(Wire.ATTACH, name, (*about, inc)) for name, inc in self._attachable()]
        for _, directory in self._directories():
            for name, inc in self._incarnations(Kind.WORKER, Kind.NODE):
                exchange = self._exchange_of(self._parts[name].member.node)
                if exchange is None:
                    needed.append((Wire.ANNOUNCE, name, (inc, directory)))
                elif exchange.incarnation is not None:
                    needed.append((Wire.ANNOUNCE, name, (inc, directory, exchange.incarnation)))
        return needed

    def _attachable(self) -> list[tuple[str, Incarnation]]:
        """What the gateway must know of."""
        return [*self._incarnations(*_ATTACHED), *self._directories()]

    def _directories(self) -> list[tuple[str, Incarnation]]:
        """The directory, where there is one, in the life of its handle, whether a process of it lives or not."""
        return [(part.member.name, f"handle {part.made}") for part in self._of(Kind.DIRECTORY)]

    def _exchange_of(self, node: str) -> _Part | None:
        return next((part for part in self._of(Kind.EXCHANGE) if part.member.node == node), None)

    def _incarnations(self, *kinds: Kind) -> list[tuple[str, Incarnation]]:
        return [
            (part.member.name, part.incarnation)
            for kind in kinds
            for part in self._of(kind)
            if part.incarnation is not None
        ]

    def _of(self, kind: Kind) -> list[_Part]:
        return [part for part in self._parts.values() if part.member.kind is kind]


def _wait(attempts: int) -> float:
    """Seconds before the attempt after so many."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempts - 1)))
