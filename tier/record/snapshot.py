"""Takes the state of a state machine in a forked child, so that the machine's loop goes on at once.

The child has this process's memory as of the fork, shared until either side writes to it, and one thread. It makes the
state into bytes, writes them into a pipe and exits; it touches no file, socket, lock or device of its parent's. Libraries
that start threads in a child must not: gRPC needs GRPC_ENABLE_FORK_SUPPORT=0 in the environment that the process starts with.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from kvtier.tier.record.checkpoint import CheckpointError

TIMEOUT_S = 600.0  # 25 us a page: 20 million pages, or a child that a lock of another thread holds up
_MADE, _FAILED = b"+", b"-"
_READ_BYTES = 2**20
_MAX_FDS = 2**20


class Snapshot:
    """The bytes that `dump` makes of what it refers to, as that is now. One thread calls `take`, any `abandon`."""

    def __init__(self, dump: Callable[[], bytes]) -> None:
        """Fork: some milliseconds for each GiB of this process's own memory. Raises OSError where there is no room."""
        read, write = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if self._pid == 0:
            _child(write, dump)
        os.close(write)
        self._fd = read
        self._lock = threading.Lock()  # the child's number is its own until it has been waited for
        self._is_over = False

    def take(self) -> bytes:
        """Wait for the bytes. Raises CheckpointError: `dump` did, or the child took too long, was killed or abandoned."""
        try:
            found = self._read()
            if found is None:
                self.abandon()
        finally:
            os.close(self._fd)  # a child that still writes ends by that
            with self._lock:
                exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                self._is_over = True
        if found is None:
            raise CheckpointError(f"it takes longer than {TIMEOUT_S:.0f} s")
        how, data = bytes(found[:1]), bytes(found[1:])
        if exit_code or how not in (_MADE, _FAILED):
            raise CheckpointError(f"the process that writes it ended with {exit_code}")
        if how == _FAILED:
            raise CheckpointError(data.decode(errors="replace"))
        return data

    def abandon(self) -> None:
        """End the child, if it hasn't ended; `take` is still to be called."""
        with self._lock:
            if not self._is_over:
                os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> memoryview | None:
        """All that the child writes; None where that takes too long."""
        found = bytearray()
        deadline_s = time.monotonic() + TIMEOUT_S
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if poll.poll(left_s * 1e3):
                part = os.read(self._fd, _READ_BYTES)
                if not part:
                    return memoryview(found)
                found += part
        return None


def _child(write: int, dump: Callable[[], bytes]) -> NoReturn:
    """Never returns into its parent's code, whatever happens. 0: all that there is to say has been written."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        gc.disable()  # it would write to every object, and so copy all memory
        os.nice(5)
        os.closerange(3, write)
        os.closerange(write + 1, _MAX_FDS)
        try:
            made = _MADE + dump()
        except CheckpointError as error:
            made = _FAILED + str(error).encode()
        except Exception as error:  # noqa: BLE001  # the parent names it
            made = _FAILED + repr(error).encode()
        view = memoryview(made)
        while view:
            view = view[os.write(write, view) :]
        code = 0
    finally:
        os._exit(code)
