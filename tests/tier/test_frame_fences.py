"""A copy waits for the work that last used its frame, and for nothing queued since."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.l1.frame_fences import FrameFences

UNITS = 6
Marks = list[tuple[set[int], set[int]]]
some_units = st.sets(st.integers(0, UNITS - 1), max_size=4)


class Numbered:
    """Events that are their own numbers, from 1 on, in the order of the stream."""

    def __init__(self) -> None:
        self.last = 0

    def record(self) -> int:
        self.last += 1
        return self.last


def units(of: set[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(sorted(of), np.int64)


@given(
    marks=st.lists(st.tuples(some_units, some_units), max_size=12),
    kept=st.integers(1, 14),
    first=st.integers(0, UNITS - 1),
    count=st.integers(1, 3),
)
def test_a_copy_waits_for_the_last_work_on_its_units(marks: Marks, kept: int, first: int, count: int) -> None:
    fences: FrameFences[int] = FrameFences(UNITS, Numbered().record, kept)
    for used, written in marks:
        fences.mark(units(used), units(written))
    asked = set(range(first, min(UNITS, first + count)))
    oldest = max(1, len(marks) - kept + 1)
    writes = [n for n, (_, written) in enumerate(marks, 1) if written & asked]
    uses = [n for n, (used, written) in enumerate(marks, 1) if (used | written) & asked]
    assert fences.last_write(first, first + count) == (max(writes[-1], oldest) if writes else None)
    assert fences.last_use(first, first + count) == (max(uses[-1], oldest) if uses else None)


def test_work_on_other_units_is_not_waited_for() -> None:
    fences: FrameFences[int] = FrameFences(UNITS, Numbered().record)
    fences.mark(units({0, 1}), units({1}))
    for _ in range(5):
        fences.mark(units({2, 3}), units({3}))
    assert fences.last_use(0, 2) == 1
    assert fences.last_write(0, 1) is None


def test_a_page_that_is_read_by_later_steps_can_be_saved_at_once() -> None:
    fences: FrameFences[int] = FrameFences(UNITS, Numbered().record)
    fences.mark(units({4}), units({4}))
    fences.mark(units({4}), units(set()))
    assert fences.last_write(4, 5) == 1
    assert fences.last_use(4, 5) == 2


def test_no_event_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one event must be kept, got 0"):
        FrameFences(UNITS, Numbered().record, kept=0)
