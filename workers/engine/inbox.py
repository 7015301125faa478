"""Where everything that concerns a worker's step loop is put down until the loop comes by. One reader, any writers."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue whose reader takes all there is at once, and sleeps when there is nothing.

    At most `capacity` events that were offered from outside wait at a time. Those put by the worker's own threads are
    never refused: they are bounded by what the worker has under way.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._events: deque[tuple[T, bool]] = deque()
        # Guards the fields here: written by any thread, read by the step loop.
        self._changed = threading.Condition()
        self._offered = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: T) -> None:
        """Add an event of the worker's own."""
        with self._changed:
            self._events.append((event, False))
            self._changed.notify()

    def offer(self, event: T) -> bool:
        """Add an event from outside; False when as many wait as may."""
        with self._changed:
            if self._offered >= self.capacity:
                return False
            self._offered += 1
            self._events.append((event, True))
            self._changed.notify()
            return True

    def take(self, timeout_s: float) -> list[T]:
        """All events, oldest first; waits at most `timeout_s` for one to come."""
        with self._changed:
            if not self._events and timeout_s != 0:
                self._changed.wait(timeout_s)
            events = [event for event, _ in self._events]
            self._events.clear()
            self._offered = 0
            return events
