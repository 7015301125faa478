"""Runs a recording again: does the state machine answer as it did? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtier.tier.record import checkpoint
from kvtier.tier.record.format import (
    CommandDigest,
    End,
    Input,
    Machine,
    RecordingError,
    RecordingReader,
    Sum,
    code_digest,
    counters_digest,
)

# What a broken invariant, or input nothing thought of, raises in a state machine.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

Watch = Callable[[Any, float, Any], None]  # event, now, and what came of it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a rerun.

    `difference` says what differs first, and where; None: every command and counter is as recorded. `is_torn`: the
    recording was cut off, so nothing is known of what came behind its last whole record. `is_same_code`: it was
    recorded by this very code. `end` says why it ended.
    """

    events: int
    commands: int
    seconds: float
    difference: str | None
    is_torn: bool
    is_same_code: bool
    end: str


def rerun(reader: RecordingReader, machine: Machine, watch: Watch | None = None) -> Verdict:
    """Give the events to the machine in the state it had. Raises RecordingError for a recording that can't be used."""
    _check_machine(reader, machine)
    run = _Run(reader, machine, watch)
    difference = next((said for record in reader if (said := run.take(record)) is not None), None)
    return Verdict(
        events=run.events,
        commands=run.commands,
        seconds=run.seconds,
        difference=difference,
        is_torn=difference is None and reader.is_torn,
        is_same_code=reader.header.code == code_digest(machine.modules),
        end=run.end,
    )


def heard(reader: RecordingReader, machine: Machine) -> Iterator[tuple[Any, float]]:
    """The events of a recording, with their moments; the state machine doesn't run. Raises RecordingError."""
    _check_machine(reader, machine)
    reader.state()
    decoders = _decoders(machine)
    events = 0
    for record in reader:
        if isinstance(record, Input):
            events += 1
            yield _decoded(record, events, decoders), record.now


def _check_machine(reader: RecordingReader, machine: Machine) -> None:
    if reader.header.machine != machine.name:
        raise RecordingError(f"it records a {reader.header.machine}, not a {machine.name}")


class _Run:
    def __init__(self, reader: RecordingReader, machine: Machine, watch: Watch | None) -> None:
        try:
            self._state = checkpoint.load(reader.state(), machine.modules)
        except checkpoint.CheckpointError as error:
            raise RecordingError(str(error)) from error
        self._machine = machine
        self._watch = watch
        self._decoders = _decoders(machine)
        self._digest = CommandDigest()
        self._first: float | None = None
        self._last = 0.0
        self.events = self.commands = 0
        self.end = ""

    @property
    def seconds(self) -> float:
        """From the first event to the last, as they came."""
        return 0.0 if self._first is None else self._last - self._first

    def take(self, record: Input | Sum | End) -> str | None:
        """What differs, if anything does."""
        match record:
            case Input():
                return self._input(record)
            case Sum():
                return self._compare(record.counters)
            case End():
                self.end = record.reason
                return self._compare(record.counters) if record.counters else None

    def _input(self, record: Input) -> str | None:
        event = _decoded(record, self.events + 1, self._decoders)
        self._first = record.now if self._first is None else self._first
        self._last = record.now
        self.events += 1
        try:
            commands = self._machine.apply(self._state, event, record.now)
        except _FAILURES as error:
            failure = type(error).__name__
            if failure != record.failure:
                return f"event {self.events} ({record.kind}) failed: {error!r}"
            return None
        if record.failure:
            return f"event {self.events} ({record.kind}) failed with {record.failure}, and doesn't any more"
        if isinstance(commands, list):
            self.commands += len(commands)
        if self._watch is not None:
            self._watch(event, record.now, commands)
        if self._digest.add(commands) != record.check:
            return f"the commands of event {self.events} ({record.kind}) differ"
        return None

    def _compare(self, counters: bytes) -> str | None:
        if counters_digest(self._machine.counters(self._state)) == counters:
            return None
        return f"the counters after event {self.events} differ"


Decoders = Mapping[str, msgspec.msgpack.Decoder[Any]]


def _decoders(machine: Machine) -> Decoders:
    return {name: msgspec.msgpack.Decoder(kind) for name, kind in machine.events.items()}


def _decoded(record: Input, number: int, decoders: Decoders) -> Any:
    if record.kind not in decoders:
        raise RecordingError(f"event {number} is a {record.kind!r}, which this kvtier doesn't know")
    try:
        return decoders[record.kind].decode(record.event)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"event {number} ({record.kind}) is damaged: {error}") from error
