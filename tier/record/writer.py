"""Writes a recording while the service runs: a thread of its own takes what the loop has seen, and is never waited for."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import __version__
from kvtier.tier.record import checkpoint
from kvtier.tier.record.checkpoint import CheckpointError
from kvtier.tier.record.format import (
    SUM_EVERY,
    VERSION,
    Alias,
    Header,
    Machine,
    RecordingError,
    RecordingWriter,
    code_digest,
)
from kvtier.tier.record.snapshot import Snapshot

log = logging.getLogger(__name__)

DEFAULT_BYTES = 2**30
MIN_BYTES = 2**20
MAX_QUEUED = 131_072  # events: what a busy node hears while the state of a million pages is written
FLUSH_S = 0.5  # what a killed node may lose of its recording
END_BYTES = 4096  # kept free for the last record
_PENDING_BYTES = 2**16  # that a compressor may hold back, and give out later


@dataclass(frozen=True, slots=True)
class RecordingStatus:
    """How a recording goes. `ended` says why it is over, and is "" while it goes on.

    `is_on_disk`: what has been written outlives the process.
    """

    owner: str
    path: str
    events: int
    nbytes: int
    seconds: float
    ended: str
    is_on_disk: bool


def file_of(path: str, owner: str, *, is_only: bool) -> Path:
    """Each owner's own file: run.kvrec.gz is n0's run.n0.kvrec.gz, where n0 isn't the only one that records."""
    asked = Path(path)
    if is_only:
        return asked
    stem, dot, ending = asked.name.partition(".")
    return asked.with_name(f"{stem}.{owner}{dot}{ending}")


@dataclass(frozen=True, slots=True)
class _Heard:
    event: Any
    now: float
    answer: Any
    counters: object | None
    failure: str = ""


class Recorder:
    """One recording. Its owner's loop calls `begin`, `heard`, `broke` and `end`; any thread may call the rest.

    It ends by itself, with a word to `on_end` from its own thread, when its file has `max_bytes`, can't be written, or
    takes events more slowly than they come: `max_queued` wait at most. The owner goes on in any case.
    """

    def __init__(
        self,
        machine: Machine,
        owner: str,
        path: Path,
        max_bytes: int,
        on_end: Callable[[str], None],
        *,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """Make the file, for this user's eyes alone; a name in .gz makes it compressed. Raises RecordingError."""
        if max_bytes < MIN_BYTES:
            raise RecordingError(f"a recording takes at least {MIN_BYTES} bytes, got a limit of {max_bytes}")
        self.owner, self.path = owner, path
        self._machine = machine
        self._max_bytes = max_bytes
        self._max_queued = max_queued
        self._on_end = on_end
        self._alias = Alias(secrets.token_bytes(32))
        self._fd = _create(path)
        self._zip = zlib.compressobj(1, wbits=31) if path.suffix == ".gz" else None
        self._written = 0
        self._is_flushed = True
        self._is_last = False  # the record to be written, for which room is kept
        self._writer = RecordingWriter(machine, self._alias, self._write)
        self._code = code_digest(machine.modules)
        self._counted = 0
        self._since = time.monotonic()
        self._seconds: float | None = None  # it took, once it is over
        # Between the loop, which only appends, and the thread: the queue, why it is to end, and the last counters.
        self._changed = threading.Condition()
        self._queue: deque[_Heard] = deque()
        self._why = ""
        self._last_counters: object | None = None
        self._is_asked = False  # to end, by its owner
        self._beginning: tuple[Header, Snapshot] | None = None
        self._has_begun = threading.Event()  # its state is in the file, or won't be
        self._thread: threading.Thread | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more is recorded."""
        return bool(self._why)

    # ---- the owner's loop ----------------------------------------------------------------------------------------

    def begin(self, state: object, incarnation: str, about: dict[str, Any]) -> None:
        """Take the state as it is now; all that the owner hears from here on is recorded. Raises RecordingError.

        A forked child makes the state into bytes, 25 us for each page of a node; the loop is held for the fork alone.
        """
        alias, machine = self._alias, self._machine
        header = Header(
            VERSION, machine.name, self.owner, incarnation, __version__, self._code, time.time(), about
        )
        try:
            snapshot = Snapshot(
                lambda: checkpoint.dump(
                    state, machine.modules, lambda one, its: machine.hide_state(one, its, alias)
                )
            )
        except OSError as error:
            raise RecordingError(f"the state can't be written: fork: {error.strerror}") from error
        self._beginning = header, snapshot
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def heard(self, event: object, now: float, answer: object, counters: Callable[[], object]) -> None:
        """An event, and what came of it."""
        if self.is_over:
            return
        self._counted += 1
        is_time = self._counted % SUM_EVERY == 0
        self._put(_Heard(event, now, answer, counters() if is_time else None))

    def broke(self, event: object, now: float, error: BaseException) -> None:
        """The event that ended the state machine."""
        self._put(_Heard(event, now, None, None, type(error).__name__))

    def _put(self, item: _Heard) -> None:
        with self._changed:
            if self._why:
                return
            if len(self._queue) >= self._max_queued:
                self._why = f"its file takes events more slowly than they come ({self._max_queued} wait)"
            else:
                self._queue.append(item)
            self._changed.notify()

    def end(self, why: str, counters: object | None = None) -> None:
        """Record nothing more; `counters` are those after the last event. What has been heard is still written."""
        with self._changed:
            if not self._why:
                self._why, self._last_counters, self._is_asked = why, counters, True
            self._changed.notify()
        if self._beginning is not None:
            self._beginning[1].abandon()

    # ---- any thread ----------------------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """End it, and wait until all that was heard is in the file. Idempotent."""
        self.end(why)
        if self._thread is None:
            self._close_file()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def wait_begun(self) -> None:
        """Wait until the state that `begin` took is in the file. Raises RecordingError where it won't be."""
        self._has_begun.wait()
        if self._beginning is not None:
            raise RecordingError(f"{self.path} is not recorded: {self._why}")

    def discard(self, why: str) -> None:
        """End it, and leave no file: it never began."""
        self.close(why)
        self.path.unlink(missing_ok=True)

    def status(self) -> RecordingStatus:
        """How it goes."""
        seconds = time.monotonic() - self._since if self._seconds is None else self._seconds
        with self._changed:
            ended = self._why
        return RecordingStatus(
            self.owner, str(self.path), self._writer.events, self._written, seconds, ended, self._is_flushed
        )

    # ---- its thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
        except _Full:
            what = "it has taken" if self._beginning is None else "the state at its beginning takes more than"
            self._end_early(f"{what} the {self._max_bytes} bytes that it may", can_write=True)
        except OSError as error:
            self._end_early(f"its file can't be written: {error.strerror}", can_write=False)
        except CheckpointError as error:
            self._end_early(self._why or f"the state can't be written: {error}", can_write=False)
        except Exception as error:  # a bug of ours must not cost the owner more than its recording
            log.exception("a recording failed")
            self._end_early(f"it failed: {error!r}", can_write=False)
        self._finish()

    def _write_all(self) -> None:
        assert self._beginning is not None
        header, snapshot = self._beginning
        self._writer.begin(header, snapshot.take())
        self._beginning = None
        self._has_begun.set()
        while (items := self._taken()) is not None:
            for item in items:
                self._record(item)
            if not items:
                self._flush()
        self._end_file()

    def _taken(self) -> list[_Heard] | None:
        """What has come, [] when nothing did for a while; None when all is taken and it is to end."""
        with self._changed:
            if not self._queue and not self._why:
                self._changed.wait(None if self._is_flushed else FLUSH_S)
            if self._why and not self._queue:
                return None
            items = list(self._queue)
            self._queue.clear()
            return items

    def _record(self, item: _Heard) -> None:
        if item.failure:
            self._writer.broke(item.event, item.now, item.failure)
        else:
            self._writer.heard(item.event, item.now, item.answer, item.counters)

    def _end_file(self) -> None:
        self._is_last = True
        self._writer.end(self._why, self._last_counters)
        if self._zip is not None:
            self._emit(self._zip.flush())

    def _end_early(self, why: str, *, can_write: bool) -> None:
        """It ends by itself; what still waits is left out."""
        with self._changed:
            self._why, self._last_counters = why, None
            self._queue.clear()
        try:
            if can_write:
                self._end_file()
        except OSError as error:
            log.warning("the last record of %s can't be written: %s", self.path, error.strerror)

    def _finish(self) -> None:
        self._seconds = time.monotonic() - self._since
        self._close_file()
        self._has_begun.set()
        if not self._is_asked:
            self._on_end(f"the recording {self.path} ended after {self._writer.events} events: {self._why}")

    def _write(self, frame: bytes) -> None:
        """RecordingWriter's."""
        kept = 0 if self._is_last else END_BYTES + (0 if self._zip is None else _PENDING_BYTES)
        if self._written + len(frame) + kept > self._max_bytes:
            raise _Full
        self._is_flushed = self._zip is None
        self._emit(frame if self._zip is None else self._zip.compress(frame))

    def _flush(self) -> None:
        """So that a killed process leaves what it had recorded."""
        if self._zip is not None and not self._is_flushed:
            self._emit(self._zip.flush(zlib.Z_SYNC_FLUSH))
        self._is_flushed = True

    def _emit(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._written += len(data)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Full(Exception):
    """The file has as many bytes as it may."""


def _create(path: Path) -> int:
    """A new file that only this user can read."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RecordingError(f"{path} is there already: give the recording another name") from None
    except OSError as error:
        raise RecordingError(f"can't make {path}: {error.strerror}") from error
