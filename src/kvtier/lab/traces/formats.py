"""One line of a request trace in, one request out, in the three forms that are about. Pure.

- Mooncake (FAST'25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`; 512 tokens a page.
- Qwen-Bailian (ATC'25): `chat_id`, `parent_chat_id`, `timestamp` in s, `input_length`, `output_length`, `type`, `turn`,
  `hash_ids`; 16 tokens a page. A session is what hangs on one first chat.
- Ours: a header line with `block` (tokens a page), then `t` (s), `s` (session, -1: not told), `i` and `o` (tokens), `h`
  (page ids as runs: first id, how many, first id, how many, ...), `f` (why the answer ended), `turn` where it is known.

A page's id stands for all tokens before it too; the last page of a prompt may be partial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.tier.policy.base import Kind

MOONCAKE_PAGE_TOKENS = 512
BAILIAN_PAGE_TOKENS = 16
MAX_PAGES = 1 << 24  # of one prompt: what is longer is a mistake, and would take all memory
_MAX_ID = 1 << 62
_LAST_ID = (1 << 63) - 1
_KINDS = {"tool_use": Kind.TOOL, "end_turn": Kind.TURN}
_FORMS = "Mooncake (timestamp, hash_ids), Qwen-Bailian (chat_id, hash_ids) or kvtier's own (t, h)"

Ids = npt.NDArray[np.int64]
_Line = TypeVar("_Line")
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class TraceError(ValueError):
    """A trace that can't be replayed; the message names the file and what is wrong."""


class BadLine(ValueError):
    """A line that is no request; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A line's request. Its pages are runs of consecutive raw ids, head first."""

    arrival_s: float
    session: int  # from 1 within the file; 0: not told
    input_tokens: int
    output_tokens: int
    kind: Kind
    turn: int  # of the session, from 1; 0: not told
    starts: Ids  # [runs]
    lengths: Ids  # [runs]


class Form(ABC):
    """How a file's lines are read. `own_ids`: a session's ids mean nothing in another session."""

    page_tokens: int
    own_ids: bool = False

    @abstractmethod
    def request(self, line: bytes) -> Request | None:
        """None for a line that says something about the trace. Raises BadLine."""


class _MooncakeLine(msgspec.Struct):
    timestamp: Moment
    input_length: Amount
    output_length: Amount
    hash_ids: list[int]


class _BailianLine(msgspec.Struct):
    chat_id: int
    timestamp: Moment
    input_length: Amount
    output_length: Amount
    hash_ids: list[int]
    parent_chat_id: int = -1
    turn: Amount = 0


class _OurLine(msgspec.Struct):
    t: Moment
    h: list[int]
    i: Amount
    o: Amount = 0
    s: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)] = -1
    f: str | None = None
    turn: Amount = 0


class Mooncake(Form):
    """Requests of unknown sessions."""

    def __init__(self, page_tokens: int | None) -> None:
        self.page_tokens = page_tokens or MOONCAKE_PAGE_TOKENS
        self._decoder = msgspec.json.Decoder(_MooncakeLine)

    def request(self, line: bytes) -> Request:
        found = _decoded(self._decoder, line)
        tokens = found.input_length, found.output_length
        return Request(found.timestamp / 1e3, 0, *tokens, Kind.UNKNOWN, 0, *as_runs(found.hash_ids))


class Bailian(Form):
    """Requests that name the one before them in their session."""

    def __init__(self, page_tokens: int | None) -> None:
        self.page_tokens = page_tokens or BAILIAN_PAGE_TOKENS
        self._decoder = msgspec.json.Decoder(_BailianLine)
        self._sessions: dict[int, int] = {}  # by chat
        self._count = 0

    def request(self, line: bytes) -> Request:
        found = _decoded(self._decoder, line)
        runs = as_runs(found.hash_ids)
        session = self._session(found.chat_id, found.parent_chat_id)
        tokens = found.input_length, found.output_length
        return Request(found.timestamp, session, *tokens, Kind.UNKNOWN, found.turn, *runs)

    def _session(self, chat: int, parent: int) -> int:
        if chat not in self._sessions:
            # A parent that is not in the trace (it begins in the middle) still ties its children together.
            first = chat if parent < 0 else parent
            if first not in self._sessions:
                self._count += 1
                self._sessions[first] = self._count
            self._sessions[chat] = self._sessions[first]
        return self._sessions[chat]


class Ours(Form):
    """The form that keeps runs, with a header before it or in between, where files were put together."""

    def __init__(self, page_tokens: int | None, header: dict[str, Any] | None) -> None:
        self.page_tokens = _header_tokens(header, page_tokens) if header is not None else page_tokens or 0
        if self.page_tokens <= 0:
            raise BadLine("no header with `block` comes before it: give --block-tokens")
        self.own_ids = "local to a session" in str((header or {}).get("ids", ""))
        self._decoder = msgspec.json.Decoder(_OurLine)

    def request(self, line: bytes) -> Request | None:
        try:
            found = _decoded(self._decoder, line)
        except BadLine:
            if (header := _header(line)) is None:
                raise
            if (tokens := _header_tokens(header, None)) != self.page_tokens:
                raise BadLine(f"a header with block {tokens} after pages of {self.page_tokens}") from None
            return None
        kind = _KINDS.get(found.f, Kind.OTHER) if found.f else Kind.UNKNOWN
        return Request(found.t, found.s + 1, found.i, found.o, kind, found.turn, *_checked(found.h))


def detect(line: bytes, page_tokens: int | None) -> tuple[Form, bool]:
    """The form of a file by its first line, and whether that line is a request. Raises BadLine.

    `page_tokens` counts where the file doesn't say.
    """
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise BadLine(str(error)) from error
    if not isinstance(found, dict):
        raise BadLine("no JSON object")
    if "hash_ids" in found:
        return (Bailian if "chat_id" in found else Mooncake)(page_tokens), True
    if "h" in found:
        return Ours(page_tokens, None), True
    if (header := _header(line)) is not None:
        return Ours(page_tokens, header), False
    fields = ", ".join(sorted(map(str, found))[:8]) or "no field"
    raise BadLine(f"it has {fields}, which is no form that is known: {_FORMS}")


def as_runs(ids: list[int]) -> tuple[Ids, Ids]:
    """First ids and lengths of the runs of consecutive ids. Hashes of 64 bits may be signed or not."""
    _check_count(len(ids))
    if ids and not (-(1 << 63) <= min(ids) and max(ids) < (1 << 64 if min(ids) >= 0 else 1 << 63)):
        raise BadLine(f"page ids must be integers of 64 bits, got {min(ids)} and {max(ids)}")
    is_signed = not ids or max(ids) < 1 << 63
    array = np.array(ids, np.int64) if is_signed else np.array(ids, np.uint64).view(np.int64)
    if (array == _LAST_ID).any():
        raise BadLine(f"the page id {_LAST_ID} can't be: what follows it has no number")
    heads = np.flatnonzero(np.diff(array) != 1) + 1
    bounds = np.concatenate(([0], heads, [len(array)]) if len(array) else ([0],))
    return array[bounds[:-1]], np.diff(bounds)


def _checked(runs: list[int]) -> tuple[Ids, Ids]:
    if len(runs) % 2:
        raise BadLine(f"h must be pairs of a first id and a length, got {len(runs)} numbers")
    lengths = runs[1::2]
    if lengths and min(lengths) < 1:
        raise BadLine(f"the runs of h must be at least 1 long, got {min(lengths)}")
    _check_count(sum(lengths))
    if runs and max(abs(start) for start in runs[::2]) >= _MAX_ID:
        raise BadLine(f"the ids of h must be less than 2^62, got {max(runs[::2], key=abs)}")
    return np.array(runs[::2], np.int64), np.array(lengths, np.int64)


def _check_count(pages: int) -> None:
    if pages > MAX_PAGES:
        raise BadLine(f"{pages:,} pages in one prompt, which is more than {MAX_PAGES:,}")


def _header(line: bytes) -> dict[str, Any] | None:
    """The line if it is a header of our own form."""
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    is_header = isinstance(found, dict) and "h" not in found and ("block" in found or "trace" in found)
    return found if is_header else None


def _header_tokens(header: dict[str, Any], page_tokens: int | None) -> int:
    block = header.get("block", page_tokens)
    if not isinstance(block, int) or isinstance(block, bool) or block < 0:
        raise BadLine(f"block must be a count of tokens, got {block!r}")
    if block == 0:
        raise BadLine("block is 0: this trace has lengths and times but no pages, so nothing to cache")
    return block


def _decoded(decoder: msgspec.json.Decoder[_Line], line: bytes) -> _Line:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise BadLine(str(error)) from error
