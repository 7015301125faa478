"""Pages of a node on the same machine: copied out of its slab, which both processes map, with no network between.

Towards the peer's CacheNode this is a client of the worker socket, like the peer's own exchange.
"""

from __future__ import annotations

import time

from kvtier.cluster.transfer.node_link import NodeGone, NodeSession, Order, is_damaged
from kvtier.tier.pages.page import HEADER_BYTES, PACKED_ENVELOPE_BYTES, PageCorrupt
from kvtier.tier.protocol.messages import HostPage
from kvtier.tier.transport.frames import Call, Ending, Interrupted, PageSink, PagesRequest, PeerFailed

CONNECT_TIMEOUT_S = 1.0  # a run waits for it, and can't be interrupted meanwhile
PAGES_AT_ONCE = 8  # copied before their leases end


def connect(socket_path: str, worker_id: str, node_id: str, incarnation: str) -> NodeSession:
    """The CacheNode that a peer on this machine named. ConnectionError when another answers there, or nothing."""
    session = NodeSession(0, _ignore)
    session.connect(socket_path, worker_id, CONNECT_TIMEOUT_S)
    if (session.node_id, session.incarnation) != (node_id, incarnation):
        session.close()
        raise ConnectionError(
            f"at {socket_path} answers node {session.node_id}, not node {node_id} as it is now"
        )
    return session


def _ignore(session: NodeSession, order: Order) -> None:
    """Only its own exchange gets orders of a node."""


class LocalChannel:
    """A PageChannel into a peer's slab. Several may share one session; its owner closes it."""

    def __init__(self, session: NodeSession) -> None:
        self._session = session

    def close(self) -> None:
        """Nothing of its own to let go of."""

    def fetch(self, request: PagesRequest, sink: PageSink, call: Call) -> Ending:
        """Copy what the peer has. See PageChannel."""
        try:
            return self._fetch(request, sink, call)
        except NodeGone as error:
            # The sink touches our own node's slab, and either may be the one that is gone.
            raise PeerFailed("lost" if self._session.lost.is_set() else "away", str(error)) from error

    def _fetch(self, request: PagesRequest, sink: PageSink, call: Call) -> Ending:
        reading = self._session.read(request)
        call.on_interrupt(reading.wake)
        try:
            while True:
                left_s = call.left_s()
                if call.is_interrupted:
                    raise Interrupted
                if left_s <= 0:
                    raise PeerFailed("slow", "the pages did not come up in time")
                pages = reading.take(left_s)
                for at in range(0, len(pages), PAGES_AT_ONCE):
                    if call.is_interrupted:
                        raise Interrupted
                    batch = pages[at : at + PAGES_AT_ONCE]
                    start = time.perf_counter()
                    bad = self._copy(batch, sink)
                    nbytes = request.payload_bytes * len(batch)
                    reading.copied(batch, nbytes, time.perf_counter() - start, bad)
                    sink.flush()
                    if bad:
                        return Ending(
                            "corrupt", f"the copy of page {bad[0].key.hex()[:16]} was damaged and is dropped"
                        )
                ending = reading.ending
                if ending is not None:
                    return ending
        finally:
            reading.release()

    def _copy(self, pages: list[HostPage], sink: PageSink) -> list[HostPage]:
        """Pass pages on; those (one at most) whose copy is damaged, at which it stops."""
        for page in pages:
            nbytes = page.grant.payload_bytes
            with (
                self._session.touching(),
                self._session.slot(page.grant) as slot,
                slot[HEADER_BYTES : HEADER_BYTES + nbytes] as payload,
            ):
                try:
                    sink.take([(bytes(slot[:PACKED_ENVELOPE_BYTES]), payload)])
                except PageCorrupt:
                    if is_damaged(page, slot):
                        return [page]
                    raise  # a whole page, but not the one asked for
        return []
