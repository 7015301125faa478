"""Tells a copy which queued work its frame has to wait for: the last step that used it, and none queued since.

Without it a copy waits for everything on the compute stream, so for steps that have nothing to do with its page.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

E = TypeVar("E")

Units = npt.NDArray[np.integer[Any]]
KEPT_EVENTS = 64  # more than the steps that a worker queues ahead: a copy of an older page waits for the oldest one kept


class FrameFences(Generic[E]):
    """For each unit of an arena, the latest event behind work that used it, and behind work that wrote it.

    `record` queues an event on the compute stream. The step loop calls `mark` after it has queued work, copy threads call
    `last_use` and `last_write`; what a copy thread asks about is not marked meanwhile, since no step uses a frame that is
    being filled, and none writes one that is being saved. Events are numbered, and the latest `kept` of them are kept: a
    stream reaches its events in order, so the oldest one kept stands for all before it.
    """

    def __init__(self, num_units: int, record: Callable[[], E], kept: int = KEPT_EVENTS) -> None:
        if kept < 1:
            raise ValueError(f"at least one event must be kept, got {kept}")
        self._record = record
        self._kept = kept
        self._used = np.zeros(num_units, np.int64)  # number of the event; 0: never
        self._written = np.zeros(num_units, np.int64)
        self._changed = threading.Lock()  # guards the two fields below, which all threads read
        self._events: deque[E] = deque()
        self._last = 0  # number of the latest event

    def mark(self, used: Units, written: Units) -> None:
        """Work that reads or writes the units `used`, and writes the units `written`, has been queued."""
        event = self._record()
        with self._changed:
            self._events.append(event)
            if len(self._events) > self._kept:
                self._events.popleft()
            self._last += 1
        self._used[used] = self._last
        self._used[written] = self._last
        self._written[written] = self._last

    def last_use(self, first: int, end: int) -> E | None:
        """The event to wait for before units [first, end) are overwritten; None where no work has used them."""
        return self._event(int(self._used[first:end].max(initial=0)))

    def last_write(self, first: int, end: int) -> E | None:
        """The event to wait for before units [first, end) are read; None where no work has written them."""
        return self._event(int(self._written[first:end].max(initial=0)))

    def _event(self, number: int) -> E | None:
        if number == 0:
            return None
        with self._changed:
            oldest = self._last - len(self._events) + 1
            return self._events[max(number, oldest) - oldest]
