"""Turns leased pages of a node's slab into frames for a peer; each lease ends soon after its page is in a frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.node_link import NodeGone, NodeSession, Reading, is_damaged
from kvtier.tier.pages.page import HEADER_BYTES, PACKED_ENVELOPE_BYTES, Buffer
from kvtier.tier.protocol.messages import HostPage
from kvtier.tier.transport.frames import FRAME_BYTES, Ending, PagesRequest, page_length

COPIED_BYTES = 8 * 2**20  # whose leases are ended at once: telling the node of each frame costs it a turn


class PageSender:
    """Turns leased pages into frames, as they come; one thread does, any may `end` it."""

    def __init__(self, session: NodeSession, reading: Reading, request: PagesRequest) -> None:
        self._session = session
        self._reading = reading
        self._request = request
        self._ending: Ending | None = None
        self._copying = threading.Lock()  # held while slots are read: none is after `end`
        self._is_over = False
        self._copied: list[HostPage] = []  # that the node hasn't been told of
        self._copied_s = 0.0
        self.num_pages = 0
        self.nbytes = 0

    @property
    def ending(self) -> Ending | None:
        """How it ended; None: the time was up."""
        return self._ending or self._reading.ending

    def end(self) -> None:
        """End all leases. Idempotent."""
        with self._copying:
            if not self._is_over:
                self._is_over = True
                self._reading.release()

    @contextmanager
    def _reads_slots(self) -> Iterator[None]:
        with self._copying:
            if self._is_over:
                raise NodeGone("the call was ended")
            with self._session.touching():
                yield

    def frames(self, left_s: Callable[[], float]) -> Iterator[bytes]:
        """Frames as full as what is at hand makes them. Raises NodeGone."""
        payload_bytes = self._request.payload_bytes
        per_frame = max(1, FRAME_BYTES // payload_bytes)
        ready: list[HostPage] = []
        while self._ending is None:
            if not ready:
                self._tell([])  # before a wait
            ready += self._at_hand(0.0 if ready else left_s(), per_frame - len(ready))
            if ready:
                batch, ready = ready[:per_frame], ready[per_frame:]
                if payload_bytes > FRAME_BYTES:
                    yield from self._large(batch[0])
                elif frame := self._frame(batch):
                    yield frame
            elif self._reading.ending is not None or left_s() <= 0:
                return

    def _at_hand(self, timeout_s: float, room: int) -> list[HostPage]:
        """Pages that are there, `room` or some more; where none is yet, those that come first."""
        found: list[HostPage] = []
        while self._reading.ending is None and len(found) < room:
            pages = self._reading.take(0.0 if found else timeout_s)
            if not pages:
                break
            found += pages
        return found

    def _frame(self, pages: list[HostPage]) -> bytes:
        """One frame with several pages, whose leases end; with fewer, or empty, where a copy is damaged."""
        start = time.perf_counter()
        parts: list[Buffer] = []
        corrupt: list[HostPage] = []
        length = page_length(self._request.payload_bytes)
        end = HEADER_BYTES + self._request.payload_bytes
        slot_of, checks = self._session.slot, self._request.checks
        with self._reads_slots():
            for page in pages:
                slot = slot_of(page.grant)
                if checks and is_damaged(page, slot):
                    corrupt.append(page)
                    break  # what is behind it is of no use
                parts += (slot[:PACKED_ENVELOPE_BYTES], length, slot[HEADER_BYTES:end])
            frame = wire.pages_frame(parts) if parts else b""
        self._sent(pages, len(parts) // 3, time.perf_counter() - start, corrupt)
        return frame

    def _large(self, page: HostPage) -> Iterator[bytes]:
        """Several frames with one page, whose lease ends behind the last one; none where its copy is damaged."""
        nbytes = page.grant.payload_bytes
        seconds = 0.0
        for at in range(0, nbytes, FRAME_BYTES):
            start = time.perf_counter()
            frame = self._part(page, at)
            seconds += time.perf_counter() - start
            if not frame:
                self._sent([page], 0, seconds, [page])
                return
            yield frame
        self._sent([page], 1, seconds, [])

    def _part(self, page: HostPage, at: int) -> bytes:
        """The frame with a large page's bytes from `at` on; empty where its copy is damaged."""
        with self._reads_slots():
            slot = self._session.slot(page.grant)
            payload = slot[HEADER_BYTES : HEADER_BYTES + page.grant.payload_bytes]
            parts: list[Buffer] = []
            if at == 0:
                if self._request.checks and is_damaged(page, slot):
                    return b""
                parts += (slot[:PACKED_ENVELOPE_BYTES], page_length(page.grant.payload_bytes))
            return wire.pages_frame([*parts, payload[at : at + FRAME_BYTES]])

    def _sent(self, pages: list[HostPage], num_sent: int, seconds: float, corrupt: list[HostPage]) -> None:
        self.num_pages += num_sent
        self.nbytes += num_sent * self._request.payload_bytes
        self._copied += pages
        self._copied_s += seconds
        if corrupt:
            detail = f"the copy of page {corrupt[0].key.hex()[:16]} there was damaged and is dropped"
            self._ending = Ending("corrupt", detail)
        if corrupt or len(self._copied) * self._request.payload_bytes >= COPIED_BYTES:
            self._tell(corrupt)

    def _tell(self, corrupt: list[HostPage]) -> None:
        """End the leases of what has been copied."""
        if self._copied:
            nbytes = (len(self._copied) - len(corrupt)) * self._request.payload_bytes
            self._reading.copied(self._copied, nbytes, self._copied_s, corrupt)
        self._copied, self._copied_s = [], 0.0
