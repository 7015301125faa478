"""Which requests may be what ends workers, and which of them runs where. Pure: a state machine over names.

    free --its worker died--> waiting --begin--> on trial at a worker --gave a token--> free
                                 ^                    |          |
                                 +--left it alive-----+          +--its worker died--> culprit

A worker that dies makes a suspect of each request that it had. Suspects are tried apart, one at a worker, so that a worker
that dies under a trial tells which request it was, and all that were merely beside that one are tried again. What a fault
hangs on comes out the same elsewhere, so a request that ends workers does so in its next step: one token clears it.
"""

from __future__ import annotations

from collections.abc import Iterable


class Suspects:
    """Owned by the gateway's event loop. Bounded by the requests in flight: `over` must follow each one's end."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}  # in the order in which they are to be tried
        self._trials: dict[str, str] = {}  # request -> the worker that it is tried at

    @property
    def waiting(self) -> list[str]:
        """Suspects that are nowhere, the next one to be tried first."""
        return [*self._waiting]

    @property
    def trials(self) -> dict[str, str]:
        """Where suspects are tried: the worker, by request. To be read."""
        return self._trials

    def is_suspect(self, request: str) -> bool:
        """It has not given a token since a worker died under it."""
        return request in self._waiting or request in self._trials

    def died(self, worker: str, requests: Iterable[str]) -> set[str]:
        """A worker died of itself, and had these: all of them wait now but the culprit, which is given back."""
        culprits = {request for request, at in self._trials.items() if at == worker}
        for request in requests:
            if request not in culprits:
                self._trials.pop(request, None)
                self._waiting[request] = None
        for culprit in culprits:
            del self._trials[culprit]
        return culprits

    def left(self, request: str) -> None:
        """It left a worker that did not die of it, having given nothing there: a suspect waits again."""
        if self._trials.pop(request, None) is not None:
            self._waiting[request] = None

    def begin(self, request: str, worker: str) -> None:
        """A suspect is tried at a worker, where none is."""
        assert worker not in self._trials.values(), f"two suspects at {worker}"
        del self._waiting[request]
        self._trials[request] = worker

    def gave(self, request: str) -> bool:
        """It gave a token: whether it was a suspect until now."""
        return self._trials.pop(request, None) is not None

    def over(self, request: str) -> bool:
        """It has ended; whether it was a suspect."""
        was_waiting = self._waiting.pop(request, "") is None
        return self._trials.pop(request, None) is not None or was_waiting
