"""The form of a recording: a state machine's state, then what it heard, with digests of all that it answered. Pure.

A recording is a line that says so, and frames: a length, a checksum, and a Record. First the Header, then the state in
parts, then an Input for each event. An Input carries a digest of all commands up to its own, so a run that differs is
caught at the event where it begins to; every SUM_EVERY of them a Sum adds digests of the counters and of the recording
itself. The last record is an End: a recording without one was cut off. Commands are not in it, since the events and the
state make them.
"""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from kvtier.tier.record import checkpoint

VERSION = 1
MAGIC = b"kvtier recording\n"
SUM_EVERY = 256  # events between two Sums: a Sum costs about as much as ten events
MAX_FRAME_BYTES = 64 * 2**20  # four times the longest message of a worker
STATE_PART_BYTES = 2**20
_LENGTHS = 8  # bytes of length and checksum before a frame
_CHECK_BYTES = 8  # of an Input: two runs that differ have equal ones once in 2**64 times


class RecordingError(ValueError):
    """A recording can't be made or can't be used; the message says why, and which record it is about."""


# ---- records -----------------------------------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Whose recording it is. `code` is `code_digest` of the state machine, `about` what its owner says of it."""

    version: int
    machine: str
    owner: str
    incarnation: str
    kvtier: str
    code: bytes
    wall_s: float
    about: dict[str, Any]


class StatePart(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A part of what checkpoint.dump made of the state machine, packed by zlib: tables are mostly zeros."""

    data: bytes
    is_last: bool


class Input(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The state machine heard an event. `failure` names the exception that it raised; it is over then."""

    now: float
    kind: str
    event: msgspec.Raw
    check: bytes
    failure: str = ""


class Sum(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Digests after `events` of them: of the frames before this one, and of the counters."""

    events: int
    frames: bytes
    counters: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The recording was ended, and why; `counters` is b"" where the owner could not be asked."""

    events: int
    frames: bytes
    counters: bytes
    reason: str


Record = Header | StatePart | Input | Sum | End


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be recorded: a state machine that `apply(state, event, now)` moves, and whose result it is.

    `events` are its inputs by their names, `modules` those whose classes its state is made of, `counters(state)` the
    numbers that users read. `hide(event, alias)` and `hide_commands` replace what must not be in a file (request ids:
    clients choose them) by aliases; `hide_state` does so in the state.
    """

    name: str
    events: Mapping[str, type]
    modules: Collection[str]
    apply: Callable[[Any, Any, float], Any]
    counters: Callable[[Any], object]
    hide: Callable[[Any, Alias], Any]
    hide_commands: Callable[[Any, Alias], Any]
    hide_state: Callable[[object, checkpoint.State, Alias], checkpoint.State]


class Alias:
    """Other names for texts that clients choose: the same for the same, and nothing can be read from them."""

    def __init__(self, salt: bytes) -> None:
        """`salt` is 1 to 64 random bytes that are kept nowhere."""
        self._salt = salt

    def __call__(self, text: str) -> str:
        return blake2b(text.encode(), digest_size=12, key=self._salt).hexdigest()


# ---- digests -----------------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError


_CANONICAL = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")
_EVENTS = msgspec.msgpack.Encoder(enc_hook=_plain)


def counters_digest(counters: object) -> bytes:
    """16 bytes that stand for counters."""
    return blake2b(_CANONICAL.encode(counters), digest_size=16).digest()


class CommandDigest:
    """All that a state machine has answered so far, as one running digest."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_CHECK_BYTES)

    def add(self, commands: Any) -> bytes:
        """The digest after one more event's commands. Their classes count: two may have equal fields."""
        if isinstance(commands, list):
            commands = [(type(command).__name__, command) for command in commands]
        self._hash.update(_CANONICAL.encode(commands))
        return self._hash.copy().digest()


def modules_of(root: type) -> frozenset[str]:
    """The modules of a pure state machine: that of its class, and all of the package that they use, and those use.

    What a pure module uses is pure, so making an object of any class in them does nothing else.
    """
    package = root.__module__.partition(".")[0] + "."
    found: dict[str, None] = {root.__module__: None}
    for name in (waiting := [root.__module__]):
        for value in vars(sys.modules[name]).values():
            used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(used, str) and used.startswith(package) and used not in found:
                found[used] = None
                waiting.append(used)
    return frozenset(found)


def code_digest(modules: Collection[str]) -> bytes:
    """16 bytes for the source of these modules: other code may decide otherwise, and rightly so."""
    digest = blake2b(digest_size=16)
    for module in sorted(modules):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            digest.update(Path(spec.origin).read_bytes())
    return digest.digest()


# ---- writing -----------------------------------------------------------------------------------------------------


class RecordingWriter:
    """Makes the bytes of a recording, record by record, which `write` takes."""

    def __init__(self, machine: Machine, alias: Alias, write: Callable[[bytes], None]) -> None:
        self.events = 0
        self._machine = machine
        self._alias = alias
        self._write = write
        self._frames = blake2b(digest_size=16)
        self._commands = CommandDigest()

    def begin(self, header: Header, state: bytes) -> None:
        """The line that says what it is, the header, and the state (checkpoint.dump)."""
        self._frames.update(MAGIC)
        self._write(MAGIC)
        self._put(header)
        packed = zlib.compress(state, 1)
        for start in range(0, len(packed), STATE_PART_BYTES):
            end = start + STATE_PART_BYTES
            self._put(StatePart(packed[start:end], end >= len(packed)))

    def heard(self, event: object, now: float, commands: object, counters: object | None = None) -> None:
        """One event and what came of it; with `counters` a Sum follows."""
        check = self._commands.add(self._machine.hide_commands(commands, self._alias))
        self._input(event, now, check, "")
        if counters is not None:
            self._put(Sum(self.events, self._frames.digest(), counters_digest(counters)))

    def broke(self, event: object, now: float, failure: str) -> None:
        """The event that the state machine failed at."""
        self._input(event, now, self._commands.add([]), failure)

    def end(self, reason: str, counters: object | None = None) -> None:
        """No more comes."""
        digest = b"" if counters is None else counters_digest(counters)
        self._put(End(self.events, self._frames.digest(), digest, reason))

    def _input(self, event: object, now: float, check: bytes, failure: str) -> None:
        body = msgspec.Raw(_EVENTS.encode(self._machine.hide(event, self._alias)))
        self._put(Input(now, type(event).__name__, body, check, failure))
        self.events += 1

    def _put(self, record: Record) -> None:
        frame = _frame(record)
        self._write(frame)  # where it raises the frame isn't there, and doesn't count
        self._frames.update(frame)


def _frame(record: Record) -> bytes:
    body = _EVENTS.encode(record)
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


# ---- reading -----------------------------------------------------------------------------------------------------


class RecordingReader:
    """Reads a recording from pieces of its bytes; holds one frame that isn't whole. Raises RecordingError.

    `is_torn` says, at the end, that it was cut off: what comes before the cut has been read.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""
        self._decoder = msgspec.msgpack.Decoder(Record)
        self._frames = blake2b(MAGIC, digest_size=16)
        self._events = 0
        self._summed = 0  # events before the last Sum, which has vouched for all before it
        self.is_torn = True
        self._more(len(MAGIC))
        if not self._rest.startswith(MAGIC):
            raise RecordingError("this is no recording of kvtier")
        self._rest = self._rest[len(MAGIC) :]
        self.header = self._header()

    def state(self) -> bytes:
        """The state at the beginning. To be asked for first."""
        parts: list[bytes] = []
        while True:
            record = self._next()
            if not isinstance(record, StatePart):
                raise RecordingError("it is cut off before its first event: it has no whole state")
            parts.append(record.data)
            if record.is_last:
                return _unpacked(b"".join(parts))

    def __iter__(self) -> Iterator[Input | Sum | End]:
        """What follows the state, as far as it goes."""
        while (record := self._next()) is not None:
            if not isinstance(record, Input | Sum | End):
                raise RecordingError(
                    f"record {self._events + 1} is damaged: a {type(record).__name__} can't be there"
                )
            if isinstance(record, Input):
                self._events += 1
            yield record
            if isinstance(record, End):
                self.is_torn = False
                return

    def _header(self) -> Header:
        record = self._next()
        if not isinstance(record, Header):
            raise RecordingError("it is cut off, or damaged, before its header's end")
        if record.version != VERSION:
            raise RecordingError(
                f"it is of version {record.version}, this kvtier reads version {VERSION}: use kvtier {record.kvtier}"
            )
        return record

    def _next(self) -> Record | None:
        """The next whole record; what it says of the frames before it is checked."""
        if not self._more(_LENGTHS):
            return None
        length = int.from_bytes(self._rest[:4], "little")
        if length > MAX_FRAME_BYTES:
            raise RecordingError(f"record {self._events + 1} is damaged: it would take {length} bytes")
        if not self._more(_LENGTHS + length):
            return None
        frame, self._rest = self._rest[: _LENGTHS + length], self._rest[_LENGTHS + length :]
        record = self._decoded(frame)
        if isinstance(record, Sum | End) and (record.frames, record.events) != (
            self._frames.digest(),
            self._events,
        ):
            raise RecordingError(
                f"it was changed after it was made, between event {self._summed} and event {self._events}"
            )
        if isinstance(record, Sum):
            self._summed = record.events
        self._frames.update(frame)
        return record

    def _decoded(self, frame: bytes) -> Record:
        body = frame[_LENGTHS:]
        try:
            if zlib.crc32(body) != int.from_bytes(frame[4:_LENGTHS], "little"):
                raise RecordingError(f"record {self._events + 1} is damaged: its checksum differs")
            record: Record = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"record {self._events + 1} is damaged: {error}") from error
        return record

    def _more(self, nbytes: int) -> bool:
        """Have at least so many bytes; False at the end."""
        if len(self._rest) >= nbytes:
            return True
        parts, have = [self._rest], len(self._rest)
        for piece in self._pieces:
            parts.append(piece)
            have += len(piece)
            if have >= nbytes:
                break
        self._rest = b"".join(parts)
        return have >= nbytes


def _unpacked(state: bytes) -> bytes:
    try:
        return zlib.decompress(state)
    except zlib.error as error:
        raise RecordingError(f"the state in it is damaged: {error}") from error
