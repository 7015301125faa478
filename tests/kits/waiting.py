"""Waits in tests for what other threads and processes do: polls with a deadline, and says what did not come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0  # of a busy machine: only a test that fails waits so long


def eventually(question: Callable[[], T], timeout_s: float = PATIENCE_S, every_s: float = 0.002) -> T:
    """The question's first true answer, or its last one when none is true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (answer := question()) and time.monotonic() <= deadline:
        time.sleep(every_s)
    return answer


def until(question: Callable[[], T], what: str, patience_s: float = PATIENCE_S, every_s: float = 0.002) -> T:
    """The question's first true answer; AssertionError when there is none within `patience_s`."""
    answer = eventually(question, patience_s, every_s)
    assert answer, f"not within {patience_s:g} s: {what}"
    return answer


def cpu_s() -> float:
    """Seconds that this process, and children of it that have ended, had of a core: the clock tells of others' work too."""
    return sum(os.times()[:4])
