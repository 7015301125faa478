"""The leader's end of a tensor parallel group: starts the other ranks, sends them the plan, hears their answers.

A rank that dies, says that it can't go on, or doesn't answer in time breaks the group: the others are ended, so that
nothing waits for them in a sum, and every call raises GroupBroken from then on. A group is never mended; its worker ends
and is restarted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.tier.protocol.ipc import Garbage, MessageReader, frame
from kvtier.workers.parallel.plan import (
    Begin,
    Body,
    Done,
    Failed,
    FromRank,
    GroupBroken,
    Joined,
    Ledger,
    Ready,
    Step,
    Stop,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024
BUFFER_BYTES = 4 << 20  # of a socket: a step of a large batch fits, so that sending it waits for nothing
LOOKS = 4  # of the watchdog in a group's patience
EXIT_S = 10.0  # for ranks that were told to end


class Child(Protocol):
    """A rank's process."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout: float | None = None) -> object:
        """Until it has ended. Raises subprocess.TimeoutExpired."""


Launch = Callable[[int, socket.socket], Child]


def launch_process(rank: int, connection: socket.socket) -> Child:
    """Start a rank in a process of its own, which ends with this one: its end of the socket then reads nothing more."""
    fd = connection.fileno()
    # It finds modules where this process does, which may have been told so after its own start.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "kvtier.workers.parallel.rank", str(fd)]
    return subprocess.Popen(command, pass_fds=(fd,), env=environment)


class _Rank:
    """One of the others. Its reader thread passes on what it says."""

    def __init__(self, rank: int, launch: Launch) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        try:
            with theirs:
                self.child = launch(rank, theirs)
        except BaseException:
            ours.close()
            raise
        self.rank = rank
        self.socket = ours
        self.ready: Ready | None = None
        self.has_joined = False
        self.thread: threading.Thread | None = None


class GroupLink:
    """Sends steps, in one order to all ranks. Calls may come from the step loop and from copy threads.

    `patience_s` is the longest that a rank may take for a step, `load_s` for loading the model. `abort` is called once
    when the group breaks: it must end this rank's own wait in a sum, as far as that can be done from outside.
    """

    def __init__(
        self, ranks: int, *, patience_s: float, load_s: float, launch: Launch = launch_process
    ) -> None:
        self.abort: Callable[[], None] = lambda: None
        self._poll_timeout_s = patience_s
        self._load_s = load_s
        # Guards numbering and the order of sends; taken before _changed, held for as long as a send takes.
        self._sending = threading.Lock()
        # Guards the ledger and what ranks have said; held for moments only.
        self._changed = threading.Condition()
        self._ledger = Ledger(range(1, ranks), patience_s)
        self._closing = threading.Event()
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, ranks):
                self._ranks.append(_Rank(rank, launch))
        except BaseException:
            self._end_all()
            raise
        for other in self._ranks:
            other.socket.settimeout(patience_s)
            other.thread = threading.Thread(
                target=self._read, args=(other,), name=f"rank-{other.rank}", daemon=True
            )
            other.thread.start()
        self._watchdog = threading.Thread(target=self._watch, name="group-watchdog", daemon=True)
        self._watchdog.start()

    @property
    def error(self) -> str | None:
        """Why the group is broken."""
        return self._ledger.error

    def begin(self, begins: Sequence[Begin]) -> None:
        """Say to each other rank how to begin, and wait until it is there. Raises GroupBroken."""
        with self._sending:
            for other, begin in zip(self._ranks, begins, strict=True):
                self._send(other, frame(begin))
        self._wait(lambda: all(other.has_joined for other in self._ranks), "start")

    def wait_ready(self) -> list[Ready]:
        """What all other ranks have loaded. Raises GroupBroken."""
        self._wait(lambda: all(other.ready is not None for other in self._ranks), "load the model")
        return [other.ready for other in self._ranks if other.ready is not None]

    def step(self, body: Body, *, fds: Sequence[int] = (), wanted: bool = False) -> int:
        """Send the next step of the plan; its number. Its result is to be taken where it is `wanted`. Raises GroupBroken."""
        with self._sending:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._ledger.has_room or self._ledger.error, self._poll_timeout_s
                ):
                    self._break("the plan is too far ahead of the ranks")
                if self._ledger.error is not None:
                    raise GroupBroken(self._ledger.error)
                number = self._ledger.number(type(body).__name__, time.monotonic(), wanted=wanted)
            data = frame(Step(number, body))
            for other in self._ranks:
                self._send(other, data, fds)
        return number

    def result(self, number: int) -> dict[int, str]:
        """Wait until all ranks have applied a step: what failed on any, by its place. Raises GroupBroken."""
        found: dict[int, str] | None = None
        with self._changed:
            while (found := self._ledger.take(number)) is None:
                self._changed.wait()  # a rank's answer, or the watchdog, which ends the group
        return found

    def wait_gone(self) -> None:
        """Wait until the other ranks of a broken group are no more. However long: nothing else is safe to do."""
        for other in self._ranks:
            other.child.wait()

    def wait_broken(self) -> str | None:
        """Wait until the group is broken, and say why; None when it was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._ledger.error is not None)
            return None if self._closing.is_set() else self._ledger.error

    def fail(self, reason: str) -> None:
        """This rank can't go on, so the group can't."""
        with self._changed:
            self._break(reason)

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(GroupBroken), self._sending:
            with self._changed:
                number = self._ledger.number("Stop", time.monotonic(), wanted=False)
            for other in self._ranks:
                self._send(other, frame(Step(number, Stop())))
        self._end_all()
        with self._changed:
            self._ledger.fail("the group is closed")
            self._changed.notify_all()
        for thread in [self._watchdog, *(other.thread for other in self._ranks)]:
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    def _end_all(self) -> None:
        deadline = time.monotonic() + EXIT_S
        for other in self._ranks:
            try:
                other.child.wait(max(0.0, deadline - time.monotonic()) if self.error is None else 0.0)
            except subprocess.TimeoutExpired:
                other.child.kill()
                other.child.wait()
            with contextlib.suppress(OSError):
                other.socket.shutdown(socket.SHUT_RDWR)  # wakes its reader
            other.socket.close()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: is_done() or self._ledger.error, self._load_s):
                self._break(f"not all ranks did {what} in {self._load_s:g} s")
            if self._ledger.error is not None:
                raise GroupBroken(self._ledger.error)

    def _send(self, other: _Rank, data: bytes, fds: Sequence[int] = ()) -> None:
        try:
            sent = socket.send_fds(other.socket, [data], list(fds)) if fds else 0
            other.socket.sendall(data[sent:])
        except OSError as error:
            self.fail(f"rank {other.rank} can't be told: {error}")
            raise GroupBroken(self._ledger.error) from error

    def _read(self, other: _Rank) -> None:
        reader = MessageReader(FromRank)
        while not self._closing.is_set():
            try:
                chunk = other.socket.recv(CHUNK_BYTES)
                messages = reader.feed(chunk)
            except TimeoutError:
                continue  # an idle group says nothing
            except (OSError, Garbage) as error:
                messages, chunk = [Failed(str(error))], b""
            if not chunk and not messages:
                messages = [Failed("it is gone")]
            with self._changed:
                for message in messages:
                    self._hear(other, message)
                self._changed.notify_all()
            if not chunk:
                return

    def _hear(self, other: _Rank, message: object) -> None:
        match message:
            case Joined():
                other.has_joined = True
            case Ready():
                other.ready = message
            case Done():
                wrong = self._ledger.done(other.rank, message)
                if wrong is not None:
                    self._break(wrong)
            case Failed():
                if not self._closing.is_set():
                    self._break(f"rank {other.rank} can't go on: {message.reason}")

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_timeout_s / LOOKS):
            with self._changed:
                overdue = self._ledger.overdue(time.monotonic())
                if overdue is not None and self._ledger.error is None:
                    log.error("the group hangs; the leader's threads: %s", _where_threads_are())
                    self._break(overdue)

    def _break(self, reason: str) -> None:
        """With _changed held."""
        if self._ledger.fail(reason):
            log.error("the tensor parallel group ends: %s", reason)
            self._end_sums()

    def _end_sums(self) -> None:
        """Nothing may wait for a rank: kill them, which closes what they are connected by."""
        for other in self._ranks:
            other.child.kill()
        self._changed.notify_all()
        threading.Thread(target=self.abort, name="group-abort", daemon=True).start()  # it may take its time


def _where_threads_are() -> str:
    """Each thread's innermost calls, on one line."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, top in sys._current_frames().items():
        calls = traceback.extract_stack(top)[-3:]
        where = " > ".join(f"{os.path.basename(c.filename)}:{c.lineno} {c.name}" for c in calls)
        found.append(f"{names.get(ident, ident)} at {where}")
    return "; ".join(found)
