"""Measures how long the device takes for each step that computes prompts. Clocks and events come in as arguments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

StepRows = list[
    tuple[int, int]
]  # of each sequence: tokens that its first row attends before it, and its rows

MAX_PENDING = 64  # steps whose events the device has not reached; later ones are not measured until it has


class StepTimer(Protocol):
    """Called by the step loop, around each forward that is to be measured."""

    def begin(self) -> None:
        """The forward of a step is about to be queued."""

    def end(self, rows: StepRows) -> None:
        """It is queued: `rows` is what it computes."""

    def finished(self) -> Iterable[tuple[StepRows, float]]:
        """Steps that have ended on the device since the last call, in order, with their seconds."""


class HostTimer:
    """For a forward that is over when it returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._measured: list[tuple[StepRows, float]] = []

    def begin(self) -> None:
        """See StepTimer."""
        self._began_s = self._clock()

    def end(self, rows: StepRows) -> None:
        """See StepTimer."""
        self._measured.append((rows, self._clock() - self._began_s))

    def finished(self) -> list[tuple[StepRows, float]]:
        """See StepTimer."""
        measured, self._measured = self._measured, []
        return measured


class Event(Protocol):
    """What this needs of torch.cuda.Event."""

    def record(self) -> None:
        """Queue it behind the work on the current stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`; both reached."""


class DeviceTimer:
    """For a forward that is only queued when it returns: two events around it tell the device's own time.

    Waits for nothing: a step is reported once the device is behind it. Of steps that are under way at most `max_pending`
    are kept; while there are so many, later ones are not measured.
    """

    def __init__(self, make_event: Callable[[], Event], max_pending: int = MAX_PENDING) -> None:
        self._make_event = make_event
        self._max_pending = max_pending
        self._start: Event | None = None
        self._pending: deque[tuple[StepRows, Event, Event]] = deque()

    def begin(self) -> None:
        """See StepTimer."""
        self._start = None
        if len(self._pending) < self._max_pending:
            self._start = self._make_event()
            self._start.record()

    def end(self, rows: StepRows) -> None:
        """See StepTimer."""
        if self._start is not None:
            event = self._make_event()
            event.record()
            self._pending.append((rows, self._start, event))
            self._start = None

    def finished(self) -> list[tuple[StepRows, float]]:
        """See StepTimer."""
        measured: list[tuple[StepRows, float]] = []
        while self._pending and self._pending[0][2].query():
            rows, start, end = self._pending.popleft()
            measured.append((rows, start.elapsed_time(end) * 1e-3))
        return measured


def step_timer(device: torch.device) -> StepTimer:
    """The timer of steps on a device."""
    if device.type != "cuda":
        return HostTimer()

    def make_event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    return DeviceTimer(make_event)
