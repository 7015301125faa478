"""What always holds of frames that workers lend, and of what lies in them, derived from scratch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.tier.node.state.holders import Holders
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import Kind, Page, PeerCopy, PeerFrame, Worker, kind_of
from kvtier.tier.node.state.tables import NodeTables


class PeerInvariants:
    """Whether the tables of L2 agree."""

    def __init__(self, tables: NodeTables, holders: Holders, frames: PeerFrames) -> None:
        self._tables, self._holders, self._frames = tables, holders, frames

    def _check_peers(self) -> None:
        """A lent frame is free, granted, or has a page in it that is in L3 or L4 too; what is read is there."""
        frames = list(self._frames._lent_frames())
        assert len(frames) == self._frames._num_lent <= self._tables.limits.lent_frames
        assert self._frames.lent_bytes == sum(frame.nbytes for frame in frames)
        assert self._frames.frames_of_size == Counter(frame.nbytes for frame in frames)
        assert self._frames.peer_used_bytes == sum(
            frame.nbytes for frame in frames if frame.holder is not None or frame.copy is not None
        )
        lenders = [w for w in self._tables.live() if w.hello.arena_bytes > 0 and not w.is_exchange]
        assert self._frames.lenders == {worker.hello.incarnation: worker for worker in lenders}
        free: dict[tuple[int, Worker], dict[PeerFrame, None]] = {}
        for lender in self._tables.live():
            assert sorted(lender.lent) == lender.lent_at
            end = 0
            for offset in lender.lent_at:
                frame = lender.lent[offset]
                assert frame.lender is lender and frame.offset == offset >= end
                end = offset + frame.nbytes
                self._check_frame(frame)
                if frame.holder is None and frame.copy is None:
                    free.setdefault((frame.nbytes, lender), {})[frame] = None
            assert end <= lender.hello.arena_bytes
        assert free == self._frames._free_frames
        borrowed = [(worker, frame) for worker in self._tables.live() for frame in worker.borrowed.values()]
        assert {frame: worker for worker, frame in borrowed} == {f: f.holder for f in frames if f.holder}
        for worker in self._tables.live():
            assert +worker.borrowed_sizes == Counter(frame.nbytes for frame in worker.borrowed.values())
            assert worker.unopened <= self._frames.lenders.keys()
        self._check_peer_copies(frames)
        for (worker, payload_bytes), count in self._frames.frame_wants.items():
            assert count > 0 and not worker.fenced and self._tables.workers[worker.ref] is worker
            assert payload_bytes in worker.hello.payloads.values()
        assert not self._frames.reclaimed

    def _check_frame(self, frame: PeerFrame) -> None:
        grant, copy = frame.grant, frame.copy
        assert frame.holder is None or copy is None, "a frame that is granted holds a page"
        if frame.holder is None and copy is None:
            assert grant is None and not frame.is_leaving, "a frame that its lender wants back is kept"
            return
        assert grant is not None and grant.generation <= self._frames._frame_generation
        assert (grant.lender, grant.offset) == (frame.lender.hello.incarnation, frame.offset)
        assert frame.lender is not frame.holder and grant.payload_bytes <= frame.nbytes
        if frame.holder is not None:
            assert frame.holder.borrowed[grant.lender, grant.offset] is frame
        if copy is not None:
            assert copy.frame is frame and copy.page.envelope.payload_bytes == grant.payload_bytes
            assert copy.page.peer is copy or copy.readers, "a copy that can't be found and isn't read"
            assert copy.page.peer is not copy or not frame.is_leaving

    def _check_peer_copies(self, frames: list[PeerFrame]) -> None:
        copies = {frame.copy for frame in frames if frame.copy is not None}
        readers: Counter[PeerCopy] = Counter()
        for worker in self._tables.live():
            for request in worker.requests.values():
                readers.update(request.peer_leases.values())
        assert readers.keys() <= copies, "a reader of what is in no frame"
        assert all(copy.readers == readers[copy] for copy in copies), "readers miscounted"
        pages = [page for page in self._tables.pages.values() if page.peer is not None]
        assert {page.peer for page in pages} == {copy for copy in copies if copy.page.peer is copy}
        for page in self._tables.pages.values():
            if page.peer is None:
                assert page.peer_order is None
                continue
            order = self._frames._peer_orders.get((page.peer.frame.nbytes, page.peer.frame.lender))
            assert page.peer_order is None or (page.peer_order is order and page in page.peer_order)
            assert page.peer_order or page.peer.readers, "a copy in L2 that can't be evicted"
        listed = sum(len(order) for order in self._frames._peer_orders.values())
        assert listed == sum(page.peer_order is not None for page in pages)
        assert self._holders.peer_holds.keys == kinds_by_key(pages)


def kinds_by_key(pages: Iterable[Page]) -> Counter[frozenset[Kind]]:
    """How many keys have pages of which kinds."""
    kinds: dict[bytes, set[Kind]] = {}
    for page in pages:
        kinds.setdefault(page.envelope.key, set()).add(kind_of(page.envelope))
    return Counter(map(frozenset, kinds.values()))
