"""Pages from another node: what is asked, how pages lie in a stream of frames, what is checked of them. Pure.

A stream is page after page: envelope, length of the payload, payload. It is cut into frames of about FRAME_BYTES; a
page that is larger than a frame begins one and goes on in the next ones. Nothing here knows how frames travel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec
import xxhash

from kvtier.tier.pages.clear_epochs import MAX_NUMBER
from kvtier.tier.pages.page import (
    PACKED_ENVELOPE_BYTES,
    Buffer,
    Envelope,
    PageCorrupt,
    PageFormat,
    PageKey,
    RootKey,
)
from kvtier.tier.pages.recipe import HAS_WRITTEN
from kvtier.tier.protocol.messages import Chain, Fetch, FetchPage, Locate

FRAME_BYTES = (
    2 * 2**20
)  # of payloads; measured on one machine: 1 to 2 MiB is fastest, anything above 4 falls off
MAX_PAYLOAD_BYTES = 2**30  # of a page
MAX_KEYS = 4096  # of one request
MAX_FIRST_PAGE = 2**20
MAX_PAGE_TOKENS = 2**16 - 1
KEY_BYTES, ROOT_BYTES, TENANT_BYTES, SPEC_BYTES = 32, 32, 16, 16
_LENGTH = struct.Struct("<Q")
# A packed envelope, less its checksum: magic and version, key, variant, made_from, spec digest and length, checksum,
# root, parent, tenant, depth, tokens.
_FIELDS = struct.Struct("<6s32s16s16s24s16s32s32s16sIH")
HEAD_BYTES = PACKED_ENVELOPE_BYTES + _LENGTH.size
_VARIANTS = frozenset(format.value for format in PageFormat)
_WRITTEN = frozenset(format.value for format in PageFormat if format.is_token_wise)  # what may be asked for
_SOURCES = {name.encode().ljust(16, b"\0"): name for name in ("", *_VARIANTS)}  # made_from, as packed

# lost: no connection, or it broke. busy: the peer serves as many as it can. corrupt: what came is not what was asked
# for. refused: the peer won't serve us. slow: too late. away: our own node's cache went, the peer is not to blame.
# broke: a fault in our own code, nor is it then.
FailureKind = Literal["lost", "busy", "corrupt", "refused", "slow", "away", "broke"]


class PeerFailed(Exception):
    """A peer did not give what was asked of it; what had come before stands."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FailureKind = kind
        self.detail = detail


class Interrupted(Exception):
    """Nothing waits any more for what is being fetched."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a peer sends no more: `reason` is one of Missing's, "" when all that was asked for was sent."""

    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PagesRequest:
    """Pages of one chain that follow each other, in one format; `held` has a byte per key, not 0: not this one."""

    root: bytes
    tenant: bytes
    page_tokens: int
    first_page: int
    keys: tuple[bytes, ...]
    held: bytes
    variant: str
    spec_digest: bytes
    payload_bytes: int
    checks: bool = False  # the peer is to compare checksums before it sends
    cleared: int = 0  # the tenant's clear epoch, as of Locate

    def without(self, keys: set[bytes]) -> PagesRequest:
        """The same, less pages that have come."""
        held = bytes(have or key in keys for have, key in zip(self.held, self.keys, strict=True))
        return replace(self, held=held)

    def malformed(self) -> str | None:
        """What can't be asked for, in words for the asker; None when all is well."""
        lengths = len(self.root), len(self.tenant), len(self.spec_digest)
        checks: list[tuple[bool, str]] = [
            (1 <= len(self.keys) <= MAX_KEYS, f"{len(self.keys)} keys, 1 to {MAX_KEYS} expected"),
            (all(len(key) == KEY_BYTES for key in self.keys), f"keys must have {KEY_BYTES} bytes each"),
            (
                len(self.held) == len(self.keys),
                f"held has {len(self.held)} bytes for {len(self.keys)} keys, a byte each expected",
            ),
            (
                lengths == (ROOT_BYTES, TENANT_BYTES, SPEC_BYTES),
                f"root, tenant and spec_digest of {lengths} bytes, {(ROOT_BYTES, TENANT_BYTES, SPEC_BYTES)} expected",
            ),
            (self.variant in _WRITTEN, f"variant must be one of {sorted(_WRITTEN)}, got {self.variant!r}"),
            (
                1 <= self.page_tokens <= MAX_PAGE_TOKENS,
                f"page_tokens must be from 1 to {MAX_PAGE_TOKENS}, got {self.page_tokens}",
            ),
            (
                0 <= self.first_page <= MAX_FIRST_PAGE,
                f"first_page must be from 0 to {MAX_FIRST_PAGE}, got {self.first_page}",
            ),
            (
                1 <= self.payload_bytes <= MAX_PAYLOAD_BYTES,
                f"payload_bytes must be from 1 to {MAX_PAYLOAD_BYTES}, got {self.payload_bytes}",
            ),
            (
                0 <= self.cleared <= MAX_NUMBER,
                f"cleared must be from 0 to {MAX_NUMBER}, got {self.cleared}",
            ),
        ]
        return next((message for ok, message in checks if not ok), None)

    def locate(self, request_id: str) -> Locate:
        """The question to a node that may have the pages."""
        held = bytes(HAS_WRITTEN if have else 0 for have in self.held)
        chain = Chain(
            keys=list(self.keys),
            other_keys=[],
            held=held,
            variant=self.variant,
            decayed="",
            recent_tokens=0,
            sink_tokens=0,
            stride_tokens=1,
            window_tokens=0,
            window_sinks=0,
            any_variant=False,
            spec_digest=self.spec_digest,
        )
        return Locate(
            request_id=request_id,
            root=self.root,
            tenant=self.tenant,
            page_tokens=self.page_tokens,
            first_page=self.first_page,
            last_position=(self.first_page + len(self.keys)) * self.page_tokens,
            chains=[chain],
            recompute_s=0.0,
            cleared=self.cleared,
        )


def request_of(fetch: Fetch) -> PagesRequest:
    """What a Fetch asks of its peer. ValueError when its pages are not of one kind, or can't be."""
    kinds = {(page.variant, page.spec_digest, page.grant.payload_bytes) for page in fetch.pages}
    if len(kinds) != 1:
        raise ValueError(f"a Fetch of pages of {len(kinds)} kinds, 1 expected")
    ((variant, spec_digest, payload_bytes),) = kinds
    request = PagesRequest(
        root=fetch.root,
        tenant=fetch.tenant,
        page_tokens=fetch.page_tokens,
        first_page=fetch.first_page,
        keys=tuple(page.key for page in fetch.pages),
        held=bytes(len(fetch.pages)),
        variant=variant,
        spec_digest=spec_digest,
        payload_bytes=payload_bytes,
        cleared=fetch.cleared,
    )
    wrong = request.malformed()
    if wrong is None and len(set(request.keys)) < len(request.keys):
        wrong = "the same page twice"
    if wrong is not None:
        raise ValueError(wrong)
    return request


# ---- what comes ------------------------------------------------------------------------------------------------


# A page's bytes as they come: where the page begins its packed envelope, and what there is of its payload.
Piece = tuple[Buffer | None, memoryview]


class PageSink(Protocol):
    """Takes a stream of pages, each of which comes in one piece or in several that follow each other.

    Raises PageCorrupt at once where what comes isn't what was asked for.
    """

    def take(self, pieces: Iterable[Piece]) -> None:
        """The next pieces; they are valid for the call only."""

    def flush(self) -> None:
        """Nothing more is at hand now: tell of the pages that are whole."""


class Call(Protocol):
    """One run of a fetch, which another thread may interrupt."""

    @property
    def is_interrupted(self) -> bool:
        """Nothing waits any more."""

    def on_interrupt(self, interrupt: Callable[[], object]) -> None:
        """What lets a wait end at once: called when the run is interrupted, at once if it is already."""

    def left_s(self) -> float:
        """Seconds until the deadline, 0 when it has passed."""


class PageChannel(Protocol):
    """A way to one peer. One thread at a time uses it."""

    def fetch(self, request: PagesRequest, sink: PageSink, call: Call) -> Ending:
        """Pass what the peer sends to `sink`, in any order of pages. Raises PeerFailed, Interrupted, PageCorrupt."""

    def close(self) -> None:
        """Let go of the connection."""


class PageHead(msgspec.Struct, frozen=True):
    """What an envelope says beyond what is the same in all pages of a request; `index` is the page's among its keys."""

    index: int
    key: bytes
    made_from: str
    parent: bytes
    depth: int
    tokens: int
    checksum: bytes


class Expected:
    """The pages of a request that have not come yet; says whether an envelope is that of one of them."""

    def __init__(self, request: PagesRequest) -> None:
        self._request = request
        self._index = {
            key: index
            for index, (key, have) in enumerate(zip(request.keys, request.held, strict=True))
            if not have
        }
        sample = Envelope(
            PageKey(bytes(KEY_BYTES)),
            request.variant,
            request.spec_digest,
            request.payload_bytes,
            bytes(16),
            RootKey(request.root),
            bytes(KEY_BYTES),
            request.tenant,
            0,
            1,
        )
        magic, _, variant, _, shape, _, root, _, tenant, _, _ = _FIELDS.unpack_from(sample.pack())
        self._same = (magic, variant, shape, root, tenant)

    def __len__(self) -> int:
        return len(self._index)

    def take(self, packed: bytes) -> PageHead:
        """Cross a page off. PageCorrupt unless it was asked for, and is what its key and its place say."""
        # All that can be wrong is seen by comparing bytes; only a wrong one is looked at field by field.
        magic, key, variant, source, shape, checksum, root, parent, tenant, depth, tokens = (
            _FIELDS.unpack_from(packed)
        )
        request = self._request
        index = self._index.get(key)
        made_from = _SOURCES.get(source)
        if (
            index is None
            or made_from is None
            or (magic, variant, shape, root, tenant) != self._same
            or depth != request.first_page + index
            or parent != self._parent(index, parent)
            or not 1 <= tokens <= request.page_tokens
            or packed[_FIELDS.size :] != xxhash.xxh3_64_digest(packed[: _FIELDS.size])
        ):
            raise self._wrong(packed)
        del self._index[key]
        return PageHead(index, key, made_from, parent, depth, tokens, checksum)

    def _parent(self, index: int, found: bytes) -> bytes:
        """Which page is before the first one that was asked for is only known where that is the chain's first."""
        if index:
            return self._request.keys[index - 1]
        return found if self._request.first_page else self._request.root

    def _wrong(self, packed: bytes) -> PageCorrupt:
        """What is wrong with an envelope, in words."""
        try:
            envelope = Envelope.unpack(packed)
        except UnicodeDecodeError as error:
            return PageCorrupt(f"a variant that is no text ({error.reason})")
        except PageCorrupt as error:
            return error
        name = f"page {envelope.key.hex()[:16]}"
        request = self._request
        index = self._index.get(envelope.key)
        if index is None:
            return PageCorrupt(f"{name} came, which is not one of those asked for")
        pairs = {
            "format": (envelope.variant, request.variant),
            "shape": (envelope.spec_digest, request.spec_digest),
            "root": (envelope.root, request.root),
            "tenant": (envelope.tenant, request.tenant),
            "payload_bytes": (envelope.payload_bytes, request.payload_bytes),
            "depth": (envelope.depth, request.first_page + index),
            "parent": (envelope.parent, self._parent(index, envelope.parent)),
        }
        differs = [what for what, (found, wanted) in pairs.items() if found != wanted]
        if differs:
            return PageCorrupt(f"{name} came with another {' and '.join(differs)}")
        if not 1 <= envelope.tokens <= request.page_tokens:
            return PageCorrupt(f"{name} came with {envelope.tokens} tokens")
        return PageCorrupt(f"{name} came from format {envelope.made_from!r}")


# ---- the stream ------------------------------------------------------------------------------------------------


def page_head(packed_envelope: Buffer, payload_bytes: int) -> bytes:
    """What stands before a payload in the stream; the envelope as it lies at the head of a slot."""
    return bytes(packed_envelope[:PACKED_ENVELOPE_BYTES]) + page_length(payload_bytes)


def page_length(payload_bytes: int) -> bytes:
    """The second part of a page's head."""
    return _LENGTH.pack(payload_bytes)


class PageReader:
    """Cuts the frames of one stream, of pages of `payload_bytes` each, into pieces for a sink."""

    def __init__(self, sink: PageSink, payload_bytes: int) -> None:
        self._sink = sink
        self._payload_bytes = payload_bytes
        self._left = 0  # bytes of the page that has begun

    def feed(self, frame: memoryview) -> None:
        """One frame. Raises PageCorrupt when it is garbled, and what the sink raises."""
        self._sink.take(self._pieces(frame))
        self._sink.flush()

    def end(self) -> None:
        """The stream is over. PageCorrupt when that is inside a page."""
        if self._left:
            raise PageCorrupt(f"the stream ends {self._left} bytes before the end of a page")

    def _pieces(self, frame: memoryview) -> Iterator[Piece]:
        at, end = 0, len(frame)
        while at < end:
            packed = None
            if not self._left:
                packed = self._begin(frame, at)
                at += HEAD_BYTES
            start, at = at, min(end, at + self._left)
            self._left -= at - start
            yield packed, frame[start:at]

    def _begin(self, frame: memoryview, at: int) -> memoryview:
        """The envelope of the page that begins there."""
        if len(frame) - at < HEAD_BYTES:
            raise PageCorrupt(
                f"{len(frame) - at} bytes at the end of a frame, a page's head has {HEAD_BYTES}"
            )
        (length,) = _LENGTH.unpack_from(frame, at + PACKED_ENVELOPE_BYTES)
        if length != self._payload_bytes:
            raise PageCorrupt(f"a page of {length} bytes came, {self._payload_bytes} were asked for")
        self._left = length
        return frame[at : at + PACKED_ENVELOPE_BYTES]


def left_of(fetch: Fetch, came: set[bytes]) -> list[FetchPage]:
    """The pages of a Fetch that have not come, in the order of their chain."""
    return [page for page in fetch.pages if page.key not in came]
