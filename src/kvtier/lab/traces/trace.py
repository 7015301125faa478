"""A request trace as arrays: who asked when for which pages. Pure: takes lines, opens no file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.lab.traces.formats import BadLine, Form, Request, TraceError, detect
from kvtier.lab.traces.pages import Runs, concatenated, number_pages
from kvtier.tier.policy.base import Kind, Use

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """A file's lines, and how errors call it."""

    name: str
    lines: Iterable[bytes]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. Page ids are dense, in order of first appearance; an id has one parent always."""

    page_tokens: int
    arrival_s: npt.NDArray[np.float64]  # [requests], never falling
    session: Ids  # [requests], from 1; 0: not told
    input_tokens: Ids  # [requests]
    output_tokens: Ids  # [requests]
    kind: npt.NDArray[np.uint8]  # [requests]
    turn: Ids  # [requests], from 1; 0: not told
    runs: Runs
    distinct_pages: int
    split_pages: int = 0  # of them with an id that had come after another parent
    skipped_lines: int = 0
    first_skipped: str = ""  # the first of them, and what is wrong with it

    def __len__(self) -> int:
        return len(self.arrival_s)

    def pages(self, request: int) -> Ids:
        """Page ids of a request, head first."""
        first, end = self.runs.first[request : request + 2]
        if end - first == 1:
            start = self.runs.starts[first]
            return np.arange(start, start + self.runs.lengths[first])
        return concatenated(self.runs.starts[first:end], self.runs.lengths[first:end])

    def page_counts(self) -> Ids:
        """Pages of each request."""
        ends = np.concatenate(([0], np.cumsum(self.runs.lengths)))[self.runs.first]
        return np.diff(ends)

    @property
    def references(self) -> int:
        """Pages of all requests."""
        return int(self.runs.lengths.sum())

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def use(self, request: int, pages: int, closed: bool = False) -> Use:
        """What a request that asked for so many pages leaves behind."""
        return Use(
            pages=pages,
            new_pages=0,
            output_tokens=int(self.output_tokens[request]),
            kind=Kind(int(self.kind[request])),
            turn=int(self.turn[request]),
            session=int(self.session[request]),
            closed=closed,
        )

    def session_ends(self) -> npt.NDArray[np.bool_]:
        """Whether a request is the last of its session. [requests]"""
        last = np.zeros(len(self), np.bool_)
        backwards = self.session[::-1]
        _, first = np.unique(backwards, return_index=True)
        last[len(self) - 1 - first] = True
        return last & (self.session > 0)


def read_trace(sources: Sequence[Source], *, page_tokens: int | None = None, skip_bad: bool = False) -> Trace:
    """All files as one trace, merged by time; ids and sessions of different files never match.

    `page_tokens` counts where a file doesn't say. A line that is no request is an error, or, with `skip_bad`, counted.
    Raises TraceError.
    """
    found = _Gathered()
    for source in sources:
        _read(source, found, page_tokens, skip_bad)
    return found.trace()


def _read(source: Source, found: _Gathered, page_tokens: int | None, skip_bad: bool) -> None:
    form: Form | None = None
    found.begin()
    for number, line in enumerate(source.lines, 1):
        if line.isspace():
            continue
        try:
            if form is None:
                form, is_request = detect(line, page_tokens)
                found.set_page_tokens(source.name, form.page_tokens)
                if not is_request:
                    continue
            if (request := form.request(line)) is not None:
                found.add(request, form.own_ids)
        except BadLine as error:
            what = f"{source.name} line {number}: {error}"
            if not skip_bad:
                raise TraceError(f"{what} (--skip-bad goes on without such lines)") from error
            found.skip(what)
    if found.begun_at == len(found):
        why = f"; {found.first_skipped}" if found.first_skipped else ""
        raise TraceError(f"{source.name} has no requests{why}")


@dataclass(slots=True)
class _Gathered:
    """Requests in the order of the files."""

    page_tokens: int = 0
    begun_at: int = 0  # the first request of the current file
    skipped: int = 0
    first_skipped: str = ""
    sessions_before: int = 0  # of all files before the current one
    sessions: int = 0
    spaces: int = 0
    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[int] = field(default_factory=lambda: array("q"))  # the columns of _COLUMNS, by request
    starts: list[Ids] = field(default_factory=list)
    lengths: list[Ids] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def begin(self) -> None:
        self.begun_at = len(self)
        self.sessions_before = self.sessions
        self.spaces += 1

    def set_page_tokens(self, name: str, page_tokens: int) -> None:
        if self.page_tokens not in (0, page_tokens):
            raise TraceError(
                f"{name} has pages of {page_tokens} tokens and a file before it of {self.page_tokens}: "
                "replay them one by one"
            )
        self.page_tokens = page_tokens

    def add(self, request: Request, own_ids: bool) -> None:
        session = self.sessions_before + request.session if request.session else 0
        self.sessions = max(self.sessions, session)
        # A file's space is even, one of a session's own odd: they never meet.
        space = 2 * session + 1 if own_ids else 2 * self.spaces
        self.arrival_s.append(request.arrival_s)
        tokens = request.input_tokens, request.output_tokens
        self.numbers.extend((session, *tokens, request.kind, request.turn, space))
        self.starts.append(request.starts)
        self.lengths.append(request.lengths)

    def skip(self, what: str) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or what

    def trace(self) -> Trace:
        arrival_s = np.frombuffer(self.arrival_s, np.float64)
        order = np.argsort(arrival_s, kind="stable")
        columns = np.frombuffer(self.numbers, np.int64).reshape(len(self), -1)[order].T
        session, input_tokens, output_tokens, kind, turn, space = columns
        counts = [len(self.starts[i]) for i in order]
        raw = Runs(
            np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            np.concatenate([self.starts[i] for i in order]),
            np.concatenate([self.lengths[i] for i in order]),
        )
        numbered = number_pages(raw, space)
        return Trace(
            page_tokens=self.page_tokens,
            arrival_s=arrival_s[order],
            session=session.copy(),
            input_tokens=input_tokens.copy(),
            output_tokens=output_tokens.copy(),
            kind=kind.astype(np.uint8),
            turn=turn.copy(),
            runs=numbered.runs,
            distinct_pages=numbered.distinct,
            split_pages=numbered.split,
            skipped_lines=self.skipped,
            first_skipped=self.first_skipped,
        )
