"""What is remembered of a peer: its counts, and whether it failed so often that it is left alone for a while. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

OPEN_AFTER = 3  # failures in a row
OPEN_FIRST_S, OPEN_LAST_S = 5.0, 60.0

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(slots=True)
class Breaker:
    """Opens after `open_after` failures in a row, for `first_s` seconds, each time in a row twice as long, to `last_s`.

    Then one probe goes: it closes the breaker, or opens it again.
    """

    open_after: int = OPEN_AFTER
    first_s: float = OPEN_FIRST_S
    last_s: float = OPEN_LAST_S
    failures: int = 0  # in a row
    open_until: float | None = None
    open_s: float = 0.0  # how long it opened the last time
    is_probing: bool = False

    def state(self, now: float) -> BreakerState:
        """For people."""
        if self.open_until is None:
            return "closed"
        return "open" if now < self.open_until else "half-open"

    def why_not(self, now: float) -> str | None:
        """Why nothing may be asked of the peer now; None when it may."""
        if self.open_until is None:
            return None
        if now < self.open_until:
            return f"it failed {self.failures} times in a row and is left alone for {self.open_until - now:.1f} s"
        return (
            f"it failed {self.failures} times in a row and is being asked once more"
            if self.is_probing
            else None
        )

    def begin(self) -> bool:
        """Something is asked of the peer; whether it is the probe."""
        self.is_probing = self.open_until is not None
        return self.is_probing

    def succeeded(self) -> None:
        """The peer did as it should."""
        self.failures, self.open_until, self.open_s, self.is_probing = 0, None, 0.0, False

    def failed(self, now: float, *, is_probe: bool) -> bool:
        """The peer did not; whether the breaker opens by it. What was begun before it opened changes nothing."""
        if self.open_until is not None and not is_probe:
            return False
        self.failures += 1
        if self.failures < self.open_after:
            return False
        self.open_s = min(2 * self.open_s, self.last_s) if self.open_s else self.first_s
        self.open_until, self.is_probing = now + self.open_s, False
        return True

    def ended(self, *, is_probe: bool) -> None:
        """What was asked ended without telling of the peer: another may probe."""
        self.is_probing &= not is_probe


@dataclass(slots=True)
class PeerRecord:
    """What is known of a peer, and what runs there."""

    breaker: Breaker = field(default_factory=lambda: Breaker(OPEN_AFTER))
    is_doubted: bool = (
        False  # it sent a damaged page: it is asked to look before it sends, until it ends one well
    )
    runs: int = 0
    in_flight_bytes: int = 0
    pages: int = 0
    nbytes: int = 0
    failures: Counter[str] = field(
        default_factory=Counter
    )  # Fetches by the reason that some page did not come
