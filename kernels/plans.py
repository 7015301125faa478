"""Keeps what kernels derive from a step's plan, so that all layers share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.kernels.layout import StepPlan

T = TypeVar("T")

KEPT_PLANS = 4  # a step has one plan for each layer group, and models have one or two groups


class PerPlan(Generic[T]):
    """Remembers what was made from the last few plans. A plan is known by its identity: it never changes."""

    def __init__(self) -> None:
        self._kept: list[tuple[StepPlan, object, T]] = []

    def get(self, plan: StepPlan, key: object, make: Callable[[], T]) -> T:
        """What `make` gave for this plan and key, or gives now."""
        for kept, of, value in self._kept:
            if kept is plan and of == key:
                return value
        value = make()
        self._kept = [(plan, key, value), *self._kept[: KEPT_PLANS - 1]]
        return value
