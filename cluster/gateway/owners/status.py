"""Since when each part that `kvtier status` shows is as it is. Pure: hears no clock."""

from __future__ import annotations

from kvtier.cluster.gateway.ports import HEALTHY


class Condition:
    """Of one life of a part: it begins healthy. Its owner says when it looks."""

    def __init__(self, now: float) -> None:
        self._health = HEALTHY
        self.since_s = now

    def is_now(self, health: str, now: float) -> float:
        """It is found in this health at `now`; since when it has been."""
        if health != self._health:
            self._health, self.since_s = health, now
        return self.since_s
