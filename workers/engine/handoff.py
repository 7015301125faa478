"""Waits until the pages of a prompt are saved below L1, so that another worker can go on from them. Pure.

A request that is only to be prefilled gives its first token and leaves the scheduler; its last word comes when its full
pages are saved, or when there is no use in waiting longer: what isn't saved is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtier.tier.pages.page import PageKey
from kvtier.workers.requests.api import FinishReason, Output
from kvtier.workers.requests.sequence import Request

LIMIT_S = (
    2.0  # more hands over more pages where L3 is short of room; a request waits for its next token meanwhile
)


@dataclass(slots=True)
class _Leaving:
    request: Request
    deadline_s: float
    indexes: list[int] = field(default_factory=list)  # its sequences that go on elsewhere
    keys: deque[PageKey] = field(default_factory=deque)  # of pages that may not be saved yet


class Handoffs:
    """Requests that have left the scheduler and wait for their pages. Owned by the step loop.

    They are bounded by what is cached in L1 and by LIMIT_S.
    """

    def __init__(self) -> None:
        self._leaving: dict[str, _Leaving] = {}
        self._new: list[PageKey] = []

    def __len__(self) -> int:
        return len(self._leaving)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leaving

    @property
    def next_deadline_s(self) -> float | None:
        """When the first of them waits no longer."""
        return min((each.deadline_s for each in self._leaving.values()), default=None)

    def begin(self, request: Request, index: int, keys: Iterable[PageKey], now: float) -> None:
        """One of a request's sequences has given its first token, and has used the pages of these keys.

        Its siblings have used the same ones.
        """
        leaving = self._leaving.setdefault(request.spec.request_id, _Leaving(request, now + LIMIT_S))
        if not leaving.indexes:
            leaving.keys.extend(keys)
            self._new += leaving.keys
        leaving.indexes.append(index)

    def take_new(self) -> list[PageKey]:
        """The pages that are waited for since this was last asked."""
        new, self._new = self._new, []
        return new

    def over(self, now: float, is_saved: Callable[[PageKey], bool]) -> list[Output]:
        """The last words of those that wait no longer. `is_saved`: there is nothing to wait for."""
        outputs: list[Output] = []
        for name, leaving in list(self._leaving.items()):
            while leaving.keys and is_saved(leaving.keys[0]):
                leaving.keys.popleft()
            if not leaving.keys or now >= leaving.deadline_s:
                del self._leaving[name]
                outputs += _last_words(leaving, FinishReason.PREFILLED, now, None)
        return outputs

    def end(
        self, request_id: str, reason: FinishReason, now: float, error: str | None = None
    ) -> list[Output]:
        """A request is not to wait any more, for another reason; its last words."""
        leaving = self._leaving.pop(request_id, None)
        return [] if leaving is None else _last_words(leaving, reason, now, error)

    def end_all(self, reason: FinishReason, now: float, error: str | None = None) -> list[Output]:
        """None is to wait any more."""
        return [output for name in list(self._leaving) for output in self.end(name, reason, now, error)]


def _last_words(leaving: _Leaving, reason: FinishReason, now: float, error: str | None) -> list[Output]:
    request = leaving.request
    return [
        Output(
            request_id=request.spec.request_id,
            index=index,
            token_ids=(),
            finish_reason=reason,
            usage=request.usage_of(1),
            timings=request.timings(now),
            error=error,
        )
        for index in leaving.indexes
    ]
