"""Heartbeat: seconds since the step loop last iterated."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

TURN_S = 1.0  # a loop that has nothing to do turns once in so long
# Where a kernel is made at its first use, which takes a minute or more for some: that moves on, however slowly.
COMPILERS = ("triton.compiler", "kvtier.kernels.cpu.build")
# Where a group's leader waits for its ranks, one of which may be making kernels: the group ends itself, and with it each of
# these waits, when a rank takes longer than its patience.
WAITS = {("kvtier.workers.parallel.link", "step"), ("kvtier.workers.parallel.link", "result")}
WAITS |= {("kvtier.workers.models.shards.collective", "sum")}


class Heartbeat:
    """Of one loop, on one thread. The loop calls `turned`, anyone `read`.

    A step that makes kernels counts as turning for as long as it makes them, or as its ranks may, as far as that was seen:
    it must be read now and then.
    """

    def __init__(self, thread: threading.Thread, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = thread
        self._clock = clock
        self._turned_s = clock()

    def turned(self) -> None:
        """The loop has come around."""
        self._turned_s = self._clock()

    def read(self) -> float:
        """Seconds since the loop last turned."""
        if self._is_excused():
            self.turned()
        return max(0.0, self._clock() - self._turned_s)

    def _is_excused(self) -> bool:
        """Whether it makes kernels, or waits for who may."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(COMPILERS) or (module, frame.f_code.co_name) in WAITS:
                return True
            frame = frame.f_back
        return False
