"""Puts the pages that come from a peer into the slots granted for them; each is checked before the node hears of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from kvtier.cluster.exchange_node import NodeSession
from kvtier.tier.messages import Fetch, FetchPage, Stored, StoredPage
from kvtier.tier.page import HEADER_BYTES, Envelope, PageCorrupt, page_hasher
from kvtier.tier.peer import Expected, PagesRequest

# Of a checked copy: it leaves them in the core's own cache, where the checksum finds them (as in tier/host.py).
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
        self._fetch = fetch
        self._pages: dict[bytes, FetchPage] = {page.key: page for page in fetch.pages}
        self._expected = Expected(request)
        self._came = came
        self._envelope: Envelope | None = None  # of the page that has begun
        self._packed = b""
        self._hasher: xxhash.xxh3_128
        self._at = 0
        self._stored: list[StoredPage] = []
        self._nbytes = 0  # since `came` was told

    def page(self, envelope: Envelope, packed: memoryview) -> None:
        """A page begins."""
        assert self._envelope is None
        self._expected.take(envelope)
        self._envelope, self._packed, self._at = envelope, bytes(packed), 0
        self._hasher = page_hasher(envelope.key, envelope.variant, envelope.spec_digest)

    def piece(self, data: memoryview) -> None:
        """The next bytes of its payload; the last ones seal it."""
        envelope = self._envelope
        assert envelope is not None
        session, grant = self._session, self._pages[envelope.key].grant
        with session.touching(), session.slot(grant) as slot:
            start = HEADER_BYTES + self._at
            with slot[start : start + len(data)] as target:
                _copy(target, data, self._hasher)
            self._at += len(data)
            self._nbytes += len(data)
            if self._at == envelope.payload_bytes:
                self._seal(envelope, slot)

    def flush(self) -> None:
        """Tell the node of the pages that are whole."""
        if self._stored:
            self._session.send(Stored(self._stored))
        if self._nbytes:
            self._came(tuple(page.key for page in self._stored), self._nbytes)
        self._stored, self._nbytes = [], 0

    def _seal(self, envelope: Envelope, slot: memoryview) -> None:
        if self._hasher.digest() != envelope.checksum:
            raise PageCorrupt(f"checksum of page {envelope.key.hex()[:16]} differs")
        slot[: len(self._packed)] = self._packed
        self._stored.append(
            StoredPage(
                grant=self._pages[envelope.key].grant,
                key=envelope.key,
                variant=envelope.variant,
                made_from=envelope.made_from,
                spec_digest=envelope.spec_digest,
                root=envelope.root,
                parent=envelope.parent,
                tenant=envelope.tenant,
                depth=envelope.depth,
                tokens=envelope.tokens,
                checksum=envelope.checksum,
                content=b"",  # which prompt it begins, only the node that computed it knows
            )
        )
        self._envelope = None


def _copy(target: memoryview, source: memoryview, hasher: xxhash.xxh3_128) -> None:
    """Copy, and hash what has arrived."""
    if len(target) < _SMALL_BYTES:
        target[:] = source
        hasher.update(target)
        return
    for at in range(0, len(target), _PIECE_BYTES):
        with target[at : at + _PIECE_BYTES] as part:
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(source[at : at + _PIECE_BYTES], np.uint8))
            hasher.update(part)
