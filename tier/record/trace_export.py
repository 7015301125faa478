"""Makes a request trace, as `kvtier replay` reads it, of what a node heard. Approximate, for reasons it gives. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.tier.policy.base import Kind
from kvtier.tier.protocol.events import Event, FromWorker, WorkerRef
from kvtier.tier.protocol.messages import Finished, Hello, Locate, Stored

APPROXIMATE = (
    "a request is known by its whole pages: its tokens are rounded down to pages, its last, partial page is missing",
    "where the answer begins inside its pages is reckoned from its length",
    "a request that had not finished when the recording ended has the moment and the pages of its lookup, and no answer",
    "requests that were under way when it began, that are shorter than a page or that used no cache are missing",
)
_REASONS = {Kind.TOOL: "tool_use", Kind.TURN: "end_turn", Kind.OTHER: "other"}  # as traces call them


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, with the keys of its chain's pages, those of its answer too where it has finished."""

    worker: WorkerRef
    arrival_s: float
    keys: list[bytes]
    first_page: int = 0  # the place of the first of `keys` in the chain
    output_tokens: int = 0
    kind: Kind = Kind.UNKNOWN
    turn: int = 0
    session: int = 0


@dataclass(slots=True)
class Collector:
    """The requests of a recording, from its events in order; `lines` makes the trace of them.

    Holds the keys of every request's pages.
    """

    headless: int = 0  # requests left out, since only the end of their chains is known
    other_sizes: int = (
        0  # requests left out, since their pages have another size than most, or an unknown one
    )
    _requests: list[_Asked] = field(default_factory=list)
    _open: dict[tuple[WorkerRef, str], _Asked] = field(default_factory=dict)  # looked up, not finished
    _parents: dict[bytes, bytes] = field(default_factory=dict)  # of stored pages
    _page_tokens: dict[WorkerRef, int] = field(default_factory=dict)

    def take(self, event: Event, now: float) -> None:
        """The next event."""
        if not isinstance(event, FromWorker):
            return
        match event.message:
            case Hello():
                self._end_worker(event.worker)
            case Stored():
                self._stored(event.worker, event.message)
            case Locate():
                self._located(event.worker, event.message, now)
            case Finished():
                self._finished(event.worker, event.message, now)

    def lines(self, about: dict[str, Any]) -> Iterator[str]:
        """The header, with `about` in it, then a line for each request in order of arrival."""
        whole = [self._whole(asked) for asked in (*self._requests, *self._open.values()) if asked.keys]
        requests = sorted((asked for asked in whole if asked), key=lambda asked: asked.arrival_s)
        self.headless = len(whole) - len(requests)
        sizes = Counter(self._page_tokens.get(asked.worker, 0) for asked in requests)
        del sizes[0]
        page_tokens = sizes.most_common(1)[0][0] if sizes else 0
        kept = [asked for asked in requests if 0 < self._page_tokens.get(asked.worker, 0) == page_tokens]
        self.other_sizes = len(requests) - len(kept)
        header = {
            **about,
            "block": page_tokens,
            "ids": "numbers of pages, in order of first appearance",
            "approximate": list(APPROXIMATE),
            "left_out": {"headless": self.headless, "other_page_size": self.other_sizes},
        }
        yield json.dumps(header)
        yield from _numbered(kept, page_tokens)

    def _stored(self, worker: WorkerRef, message: Stored) -> None:
        for page in message.pages:
            self._page_tokens[worker] = max(page.tokens, self._page_tokens.get(worker, 0))
            if page.depth:
                self._parents[page.key] = page.parent

    def _located(self, worker: WorkerRef, message: Locate, now: float) -> None:
        self._page_tokens[worker] = message.page_tokens
        name = (worker, _request_of(message.request_id))
        before = self._open.get(name)
        keys, first = message.chains[0].keys, message.first_page
        if before is None or first + len(keys) > before.first_page + len(before.keys):
            arrival_s = now if before is None else before.arrival_s
            self._open[name] = _Asked(worker, arrival_s, keys, first)

    def _whole(self, asked: _Asked) -> _Asked | None:
        """With its chain from the head on, as far as what was stored tells it; None where it doesn't."""
        head: list[bytes] = []
        key = asked.keys[0] if asked.keys else b""
        while len(head) < asked.first_page:
            if key not in self._parents:
                return None
            key = self._parents[key]
            head.append(key)
        return replace(asked, keys=[*reversed(head), *asked.keys], first_page=0)

    def _finished(self, worker: WorkerRef, message: Finished, now: float) -> None:
        self._open.pop((worker, _request_of(message.request_id)), None)
        self._requests.append(
            _Asked(
                worker,
                now - message.seconds,
                max(message.keys, key=len, default=[]),
                0,
                message.output_tokens,
                Kind(message.kind) if message.kind in _REASONS else Kind.UNKNOWN,
                message.turn,
                message.session,
            )
        )

    def _end_worker(self, worker: WorkerRef) -> None:
        """A worker restarts: what it had not finished it never will."""
        for name in [name for name in self._open if name[0].worker_id == worker.worker_id]:
            self._requests.append(self._open.pop(name))


def _request_of(request_id: str) -> str:
    """The request of a lease's name: all sequences of a request have one prompt."""
    return request_id.split(":")[0]


def _numbered(requests: Iterable[_Asked], page_tokens: int) -> Iterator[str]:
    numbers: dict[bytes, int] = {}
    sessions: dict[int, int] = {}
    first_s: float | None = None
    for asked in requests:
        first_s = asked.arrival_s if first_s is None else first_s
        prompt_tokens = max(1, len(asked.keys) * page_tokens - asked.output_tokens)
        prompt_pages = -(-prompt_tokens // page_tokens)
        ids = [numbers.setdefault(key, len(numbers)) for key in asked.keys[:prompt_pages]]
        session = sessions.setdefault(asked.session, len(sessions)) if asked.session else -1
        line: dict[str, Any] = {
            "t": round(asked.arrival_s - first_s, 6),
            "s": session,
            "i": prompt_tokens,
            "o": asked.output_tokens,
            "h": _runs(ids),
        }
        if asked.kind in _REASONS:
            line["f"] = _REASONS[asked.kind]
        if asked.turn:
            line["turn"] = asked.turn
        yield json.dumps(line, separators=(",", ":"))


def _runs(ids: list[int]) -> list[int]:
    """[first id, how many, first id, how many, ...]"""
    runs: list[int] = []
    for number in ids:
        if runs and runs[-2] + runs[-1] == number:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs
