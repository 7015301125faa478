"""Keeps what kernels derive from a step's plan, so that all layers share it, and all replays of a captured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.kernels.layout import StepPlan

T = TypeVar("T")

KEPT_PLANS = 4  # a step has one plan for each layer group, and models have one or two groups


class ShapeExceeded(Exception):
    """A step needs more work items than the fixed shape of its plan has places for."""


@dataclass(slots=True)
class _Kept(Generic[T]):
    plan: StepPlan
    key: object
    make: Callable[[StepPlan], T]
    value: T


class PerPlan(Generic[T]):
    """Remembers what was made from the last few plans. A plan is known by its identity: it never changes.

    A pinned plan is one that a captured graph was made with: what was made from it is kept, at the same addresses, and
    `refill` puts what another plan gives in its place.
    """

    def __init__(self, copy: Callable[[T, T], None] | None = None) -> None:
        """`copy(target, source)` overwrites device tables by others of the same sizes."""
        self._copy = copy
        self._kept: list[_Kept[T]] = []
        self._pinned: list[_Kept[T]] = []

    def get(self, plan: StepPlan, key: object, make: Callable[[StepPlan], T]) -> T:
        """What `make` gave for this plan and key, or gives now."""
        for entries in (self._kept, self._pinned):
            for entry in entries:
                if entry.plan is plan and entry.key == key:
                    return entry.value
        value = make(plan)
        self._kept = [_Kept(plan, key, make, value), *self._kept[: KEPT_PLANS - 1]]
        return value

    def pin(self, plan: StepPlan) -> None:
        """Keep all that was made from a plan for good: a graph that was captured of it reads it."""
        self._pinned += [entry for entry in self._kept if entry.plan is plan]
        self._kept = [entry for entry in self._kept if entry.plan is not plan]

    def refill(self, plan: StepPlan, by: StepPlan) -> None:
        """Overwrite what was made from a pinned plan with what `by`, of the same fixed shape, gives. Raises ShapeExceeded."""
        entries = [entry for entry in self._pinned if entry.plan is plan]
        values = [entry.make(by) for entry in entries]  # all of them, before any is overwritten
        for entry, value in zip(entries, values, strict=True):
            if self._copy is not None:
                self._copy(entry.value, value)
