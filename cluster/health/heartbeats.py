"""Which parts of a deployment stall although their processes live. Pure: decides, reads no clock.

Each part that lives is asked for its heartbeat again and again: how many seconds ago its loop turned. One that answers nothing
is stalled as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.cluster.health.supervision import Incarnation, Say

ASK_EVERY_S = 2.0
# The most that a pause between two looks counts: while nothing looked, nothing could see an answer.
LONGEST_LOOK_S = 2.0
_SAID_AFTER = 0.25  # of the time after which a part is killed
_SAID_LEAST_S = 5.0  # an idle loop turns now and then only, and its word of that is a moment old
_ASKED_IN_THAT = 2.0  # times at least, so that no part is said to stall between two questions


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a part for its heartbeat; `answered` or `failed` tells how that went, however late."""

    part: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a part's process at once: nothing else ends one that is stalled. Its death is seen like any other."""

    part: str


@dataclass(slots=True)
class _Heartbeat:
    incarnation: Incarnation
    turned: float  # of our clock: when its loop is known to have turned last
    is_asked: bool = False
    next_ask: float = 0.0
    kills: int = 0
    is_said: bool = False


class Heartbeats:
    """Of all parts that live. Owned by the supervisor's main thread."""

    def __init__(self, stalled_after_s: float) -> None:
        """A part that is stalled for `stalled_after_s` is killed, and again each time as much has passed."""
        self._stalled_after_s = stalled_after_s
        self._said_after_s = min(stalled_after_s, max(_SAID_LEAST_S, stalled_after_s * _SAID_AFTER))
        self._ask_every_s = min(ASK_EVERY_S, self._said_after_s / _ASKED_IN_THAT)
        self._parts: dict[str, _Heartbeat] = {}
        self._clock = 0.0  # seconds in which something looked
        self._looked: float | None = None

    def look(self, living: Mapping[str, Incarnation], now: float) -> list[Ask | Say | Kill]:
        """What is to be done at `now`, where these parts live, each in this process. Forgets all others."""
        if self._looked is not None:
            self._clock += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        old, self._parts = self._parts, {}
        found: list[Ask | Say | Kill] = []
        for name, incarnation in living.items():
            heartbeat = old.get(name)
            if heartbeat is None or heartbeat.incarnation != incarnation:
                heartbeat = _Heartbeat(incarnation, self._clock)
            self._parts[name] = heartbeat
            if not heartbeat.is_asked and self._clock >= heartbeat.next_ask:
                heartbeat.is_asked, heartbeat.next_ask = True, self._clock + self._ask_every_s
                found.append(Ask(name))
            found += self._judged(name, heartbeat)
        return found

    def answered(self, part: str, incarnation: Incarnation, still_s: float) -> None:
        """The process said that its loop turned `still_s` seconds ago."""
        heartbeat = self._parts.get(part)
        if heartbeat is not None and heartbeat.incarnation == incarnation:
            heartbeat.is_asked = False
            heartbeat.turned = max(heartbeat.turned, self._clock - still_s)

    def failed(self, part: str, incarnation: Incarnation) -> None:
        """The process gave no answer: it is asked again, and the time that passes counts."""
        heartbeat = self._parts.get(part)
        if heartbeat is not None and heartbeat.incarnation == incarnation:
            heartbeat.is_asked = False

    def stalled(self) -> dict[str, float]:
        """Those that stall, and for how many seconds."""
        return {
            name: self._clock - heartbeat.turned
            for name, heartbeat in self._parts.items()
            if heartbeat.is_said
        }

    def _judged(self, name: str, heartbeat: _Heartbeat) -> list[Say | Kill]:
        still_s = self._clock - heartbeat.turned
        if still_s < self._said_after_s:
            was_said, heartbeat.is_said, heartbeat.kills = heartbeat.is_said, False, 0
            return [Say(f"{name} goes on")] if was_said else []
        if still_s >= self._stalled_after_s * (heartbeat.kills + 1):
            heartbeat.is_said = True
            heartbeat.kills += 1
            return [Say(f"{name} is stalled for {still_s:.0f} s, and is killed"), Kill(name)]
        if not heartbeat.is_said:
            heartbeat.is_said = True
            return [Say(f"{name} is stalled for {still_s:.0f} s")]
        return []
