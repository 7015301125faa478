"""Counts the turns of sessions whose requests don't say which they are. Pure."""

from __future__ import annotations

from collections import OrderedDict

SESSIONS = 65536  # about 8 MB


class Turns:
    """Owned by the step loop. At most `most` sessions; those heard of longest ago are forgotten first, and start over."""

    def __init__(self, most: int = SESSIONS) -> None:
        self._most = most
        self._turns: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def count(self, session: int, told: int, *, closed: bool) -> int:
        """The turn of a session's next request: as `told` where that isn't 0; 0 without a session."""
        if not session:
            return told
        turn = told or self._turns.pop(session, 0) + 1
        self._turns[session] = turn
        self._turns.move_to_end(session)
        if closed:
            del self._turns[session]
        elif len(self._turns) > self._most:
            self._turns.popitem(last=False)
        return turn
