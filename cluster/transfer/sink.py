"""Puts the pages that come from a peer into the slots granted for them; each is checked before the node hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from kvtier.cluster.transfer.node_link import NodeSession
from kvtier.tier.pages.page import HEADER_BYTES, PageCorrupt, page_hasher
from kvtier.tier.protocol.messages import Fetch, Grant, Stored, StoredPage
from kvtier.tier.transport.frames import Expected, PageHead, PagesRequest, Piece

# Of a checked copy: it leaves them in the core's own cache, where the checksum finds them (as in tier/stores/host.py).
_PIECE_BYTES = 256 * 1024
_SMALL_BYTES = 128 * 1024  # a smaller copy takes less time than letting other threads run meanwhile


class SlotSink:
    """A PageSink for one run of a Fetch; one thread uses it. Raises PageCorrupt and NodeGone.

    `came` hears the keys of the pages that the node has just been told of, and how many bytes came.
    """

    def __init__(
        self,
        session: NodeSession,
        fetch: Fetch,
        request: PagesRequest,
        came: Callable[[tuple[bytes, ...], int], None],
    ) -> None:
        self._session = session
        self._request = request
        self._grants = [page.grant for page in fetch.pages]
        self._expected = Expected(request)
        self._came = came
        self._head: PageHead | None = None  # of the page that has begun
        self._packed = b""
        self._hasher: xxhash.xxh3_128
        self._at = 0
        self._stored: list[StoredPage] = []
        self._nbytes = 0  # since `came` was told

    def take(self, pieces: Iterable[Piece]) -> None:
        """Each goes where its page's slot wants it; the last one of a page seals it."""
        with self._session.touching():
            for packed, data in pieces:
                if packed is not None:
                    self._begin(bytes(packed))
                self._add(data)

    def flush(self) -> None:
        """Tell the node of the pages that are whole."""
        if self._stored:
            self._session.send(Stored(self._stored))
        if self._nbytes:
            self._came(tuple(page.key for page in self._stored), self._nbytes)
        self._stored, self._nbytes = [], 0

    def _begin(self, packed: bytes) -> None:
        assert self._head is None
        head = self._head = self._expected.take(packed)
        self._packed, self._at = packed, 0
        self._hasher = page_hasher(head.key, self._request.variant, self._request.spec_digest)

    def _add(self, data: memoryview) -> None:
        head = self._head
        assert head is not None
        grant = self._grants[head.index]
        slot = self._session.slot(grant)
        start = HEADER_BYTES + self._at
        _copy(slot[start : start + len(data)], data, self._hasher)
        self._at += len(data)
        self._nbytes += len(data)
        if self._at == grant.payload_bytes:
            self._seal(head, grant, slot)

    def _seal(self, head: PageHead, grant: Grant, slot: memoryview) -> None:
        if self._hasher.digest() != head.checksum:
            raise PageCorrupt(f"checksum of page {head.key.hex()[:16]} differs")
        slot[: len(self._packed)] = self._packed
        request = self._request
        self._stored.append(
            StoredPage(
                grant=grant,
                key=head.key,
                variant=request.variant,
                made_from=head.made_from,
                spec_digest=request.spec_digest,
                root=request.root,
                parent=head.parent,
                tenant=request.tenant,
                depth=head.depth,
                tokens=head.tokens,
                checksum=head.checksum,
                content=b"",  # which prompt it begins, only the node that computed it knows
            )
        )
        self._head = None


def _copy(target: memoryview, source: memoryview, hasher: xxhash.xxh3_128) -> None:
    """Copy, and hash what has arrived."""
    if len(target) < _SMALL_BYTES:
        target[:] = source
        hasher.update(target)
        return
    arrived, sent = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    for at in range(0, len(target), _PIECE_BYTES):
        part = arrived[at : at + _PIECE_BYTES]
        np.copyto(part, sent[at : at + _PIECE_BYTES])
        hasher.update(part)  # type: ignore[arg-type]
