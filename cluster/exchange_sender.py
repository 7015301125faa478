"""Turns leased pages of a node's slab into frames for a peer; each lease ends soon after its page is in a frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.cluster import exchange_wire as wire
from kvtier.cluster.exchange_node import NodeGone, NodeSession, Reading
from kvtier.tier.messages import HostPage
from kvtier.tier.page import HEADER_BYTES, Buffer, page_checksum
from kvtier.tier.peer import FRAME_BYTES, Ending, PagesRequest, page_head

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
                yield from self._large(batch[0]) if payload_bytes > FRAME_BYTES else self._frame(batch)
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

    def _frame(self, pages: list[HostPage]) -> Iterator[bytes]:
        """One frame with several pages, whose leases end."""
        start = time.perf_counter()
        parts: list[Buffer] = []
        views: list[memoryview] = []
        corrupt: list[HostPage] = []
        with self._reads_slots():
            for page in pages:
                slot = self._session.slot(page.grant)
                payload = slot[HEADER_BYTES : HEADER_BYTES + page.grant.payload_bytes]
                views += (payload, slot)
                if self._is_damaged(page, payload):
                    corrupt.append(page)
                    break  # what is behind it is of no use
                parts += (page_head(slot, len(payload)), payload)
            frame = wire.pages_frame(parts) if parts else b""
            for view in views:
                view.release()
        self._sent(pages, len(parts) // 2, time.perf_counter() - start, corrupt)
        if frame:
            yield frame

    def _large(self, page: HostPage) -> Iterator[bytes]:
        """Several frames with one page, whose lease ends behind the last one."""
        nbytes = page.grant.payload_bytes
        seconds = 0.0
        for at in range(0, nbytes, FRAME_BYTES):
            start = time.perf_counter()
            with (
                self._reads_slots(),
                self._session.slot(page.grant) as slot,
                slot[HEADER_BYTES : HEADER_BYTES + nbytes] as payload,
            ):
                if at == 0 and self._is_damaged(page, payload):
                    self._sent([page], 0, 0.0, [page])
                    return
                head = page_head(slot, nbytes) if at == 0 else b""
                with payload[at : at + FRAME_BYTES] as piece:
                    frame = wire.pages_frame((head, piece))
            seconds += time.perf_counter() - start
            yield frame
        self._sent([page], 1, seconds, [])

    def _is_damaged(self, page: HostPage, payload: memoryview) -> bool:
        return self._request.checks and (
            page_checksum(page.key, page.variant, page.spec_digest, payload) != page.checksum
        )

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
