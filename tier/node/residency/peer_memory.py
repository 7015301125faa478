"""What lies in frames that workers lend to their peers on the node: who lends, who borrows, who reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import STOCK_PARTS, PeerFrames, peer_page
from kvtier.tier.node.state.records import Page, PeerCopy, PeerFrame, Request, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.messages import (
    Arena,
    ArenaGone,
    ArenaUnopened,
    Copied,
    FramesGranted,
    Lend,
    LentPage,
    LoadFailed,
    Missing,
    PageRef,
    PeerGrant,
    PeerPage,
    RecallFrames,
    Reclaim,
    Reclaimed,
    ReturnFrames,
    StoredInPeer,
    WantFrames,
)


class PeerMemory:
    """Hears the workers that lend frames of their L1, and those that borrow them: L2.

    A frame that its lender wants back goes as soon as nothing uses it: a page in it that nothing reads is dropped at once,
    a grant in a borrower's stock is recalled. What a method returns is what can't be of a message; None when all is well.
    """

    def __init__(self, tables: NodeTables, out: Outbox, frames: PeerFrames, residency: Residency) -> None:
        self._tables, self._out = tables, out
        self._frames, self._residency = frames, residency

    # ---- lenders -------------------------------------------------------------------------------------------------

    def meet(self, worker: Worker) -> None:
        """A worker came: it may open its peers' arenas, and they its own."""
        for lender in self._frames.lenders.values():
            self._introduce(lender, worker)
        if worker.hello.arena_bytes > 0:
            self._frames.lenders[worker.hello.incarnation] = worker
            for other in self._tables.live():
                self._introduce(worker, other)

    def _introduce(self, lender: Worker, worker: Worker) -> None:
        if self._frames.may_use(worker, lender):
            hello = lender.hello
            self._out.send(worker, Arena(hello.incarnation, hello.arena_bytes, hello.arena_handle))

    def lend(self, worker: Worker, message: Lend) -> str | None:
        if self._frames.lenders.get(worker.hello.incarnation) is not worker:
            return "it lent frames, and its Hello named no arena"
        for frame in message.frames:
            wrong = self._frames.why_not_lent(worker, frame)
            if wrong is not None:
                return f"it lent {wrong}"
            self._frames.add_frame(worker, frame)
        return None

    def reclaim(self, worker: Worker, message: Reclaim) -> None:
        recalled: dict[Worker, list[PeerGrant]] = {}
        for offset in message.offsets:
            frame = worker.lent.get(offset)
            if frame is None or frame.is_leaving:
                continue
            frame.is_leaving = True
            if frame.holder is not None and frame.grant is not None:
                recalled.setdefault(frame.holder, []).append(frame.grant)
            elif frame.copy is None:
                self._frames.remove_frame(frame)
                self._frames.reclaimed.setdefault(worker, []).append(offset)
            elif frame.copy.page.peer is frame.copy:
                self._frames.drop_peer(frame.copy.page)
        for holder, grants in recalled.items():
            self._out.send(holder, RecallFrames(grants))

    def peer_gone(self, worker: Worker) -> None:
        """What it had borrowed is free again; all that was in its own frames is gone."""
        self._end_stock(list(worker.borrowed.values()))
        if self._frames.lenders.get(worker.hello.incarnation) is worker:
            self._lender_gone(worker)

    def _lender_gone(self, lender: Worker) -> None:
        frames = list(lender.lent.values())
        for frame in frames:
            self._void(frame)
        self._fail_peer_reads(lender)
        del self._frames.lenders[lender.hello.incarnation]
        for other in self._tables.live():
            if self._frames.may_use(other, lender):
                self._out.send(other, ArenaGone(lender.hello.incarnation))
            other.unopened.discard(lender.hello.incarnation)
        self._frames.reclaimed.pop(lender, None)

    def _void(self, frame: PeerFrame) -> None:
        if frame.holder is not None and frame.grant is not None:
            self._frames.end_peer_grant(frame.holder, frame.grant)
            self._frames.peer_used_bytes -= frame.nbytes
        copy, frame.is_leaving = frame.copy, False
        if copy is not None:
            if copy.page.peer is copy:
                self._frames.drop_peer(copy.page)
            if frame.copy is copy:  # it is read
                frame.copy = None
                self._frames.peer_used_bytes -= frame.nbytes
        self._frames.remove_frame(frame)

    def _fail_peer_reads(self, lender: Worker) -> None:
        """What is read of a lender's memory may be cut off anywhere."""
        why = f"worker {lender.ref.worker_id}, in whose memory it lay, is gone"
        for worker in self._tables.live():
            for request in list(worker.requests.values()):
                refs = [ref for ref, copy in request.peer_leases.items() if copy.frame.lender is lender]
                for ref in refs:
                    self._frames.end_peer_read(request.peer_leases.pop(ref))
                if refs:
                    page = min(page for _, page in refs)
                    self._out.send(worker, LoadFailed(request.request_id, Missing(page, "load_failed", why)))
                    self._residency.end_waits(request, page)
                    self._residency.forget_if_over(request)

    # ---- borrowers -----------------------------------------------------------------------------------------------

    def want_frames(self, worker: Worker, message: WantFrames) -> str | None:
        if message.payload_bytes not in worker.hello.payloads.values():
            return f"it wants peers' frames for pages of {message.payload_bytes} bytes, which it hasn't named"
        want = worker, message.payload_bytes
        self._frames.frame_wants.pop(want, None)
        if message.count > 0:
            self._frames.frame_wants[want] = message.count
        else:
            self._out.send(worker, FramesGranted([]))
        return None

    def return_frames(self, worker: Worker, message: ReturnFrames) -> None:
        for grant in message.grants:
            frame = self._frames.end_peer_grant(worker, grant)
            if frame is not None:
                self._frames.free_frame(frame)

    def unopened(self, worker: Worker, message: ArenaUnopened) -> None:
        lender = self._frames.lenders.get(message.lender)
        if lender is None or lender is worker:
            return
        worker.unopened.add(message.lender)
        self._out.note(
            f"worker {worker.ref.worker_id} can't open the memory that {lender.ref.worker_id} lends: {message.reason}"
        )
        self._end_stock([frame for frame in worker.borrowed.values() if frame.lender is lender])

    def _end_stock(self, frames: list[PeerFrame]) -> None:
        """Frames that are granted to a worker are free again."""
        for frame in frames:
            assert frame.holder is not None and frame.grant is not None
            self._frames.end_peer_grant(frame.holder, frame.grant)
            self._frames.free_frame(frame)

    def stored_in_peer(self, worker: Worker, message: StoredInPeer) -> None:
        for stored in message.pages:
            frame = self._frames.end_peer_grant(worker, stored.grant)
            if frame is None:
                continue  # its lender is gone, which the worker may not have heard yet
            page = self._tables.pages.get((stored.key, stored.variant))
            if page is not None and self._is_wanted_in_peer(page, stored) and not frame.is_leaving:
                self._frames.put_in_peer(page, frame, stored.checksum)
                page.last_use = self._tables.now
                self._residency.bring_back(page)
            else:
                self._frames.free_frame(frame)

    def _is_wanted_in_peer(self, page: Page, stored: LentPage) -> bool:
        """Whether what lies in the frame is a page that is here too and that L2 has not."""
        envelope = page.envelope
        is_same = (stored.spec_digest, stored.tokens, stored.grant.payload_bytes) == (
            envelope.spec_digest,
            envelope.tokens,
            envelope.payload_bytes,
        )
        is_current = stored.cleared >= self._tables.clear_epochs.of(envelope.tenant)
        return is_same and is_current and page.peer is None

    def forget_frame_wants(self, worker: Worker) -> None:
        for want in [want for want in self._frames.frame_wants if want[0] is worker]:
            del self._frames.frame_wants[want]

    def pump_frames(self) -> None:
        """Tell lenders what has come free, and give borrowers what they want."""
        reclaimed, self._frames.reclaimed = self._frames.reclaimed, {}
        for lender, offsets in reclaimed.items():
            self._out.send(lender, Reclaimed(offsets))
        if self._tables.draining or not self._frames.lent_bytes:
            return
        for want in list(self._frames.frame_wants):
            worker, payload_bytes = want
            size = self._frames.size_for(payload_bytes)
            if size is None:
                continue
            grants: list[PeerGrant] = []
            room = min(self._frames.frame_wants[want], self._room_to_borrow(worker, size))
            while len(grants) < room:
                grant = self._frames.grant_frame(worker, size, payload_bytes)
                if grant is None:
                    break
                grants.append(grant)
            if grants:  # else it is answered when there is one
                del self._frames.frame_wants[want]
                self._out.send(worker, FramesGranted(grants))

    def _room_to_borrow(self, worker: Worker, size: int) -> int:
        share = self._frames.frames_of_size[size] // (STOCK_PARTS * len(self._tables.workers))
        return max(1, share) - worker.borrowed_sizes[size]

    # ---- leases ----------------------------------------------------------------------------------------------------

    def lease_peer(self, request: Request, ref: PageRef, copy: PeerCopy) -> PeerPage:
        copy.readers += 1
        request.peer_leases[ref] = copy
        return peer_page(ref, copy)

    def end_peer_leases(self, request: Request, from_page: int) -> None:
        for ref in [ref for ref in request.peer_leases if ref[1] >= from_page]:
            self._frames.end_peer_read(request.peer_leases.pop(ref))

    def end_peer_reads(self, copies: Iterable[PeerCopy]) -> None:
        for copy in copies:
            self._frames.end_peer_read(copy)

    def copied_from_peers(self, worker: Worker, request: Request, message: Copied) -> bool:
        """Pages have been copied from peers' frames; False where none of the message's pages was one of those.

        Where no other worker uses a page its copy in L2 makes room: L1 has it, and it will come again.
        """
        corrupt = set(message.corrupt)
        done = [(ref, copy) for ref in message.pages if (copy := request.peer_leases.pop(ref, None))]
        for ref, copy in done:
            page = copy.page
            self._frames.peer_counters.promoted_pages += 1
            if page.peer is copy and ref in corrupt:
                self._frames.peer_counters.corrupt_pages += 1
                self._out.note(
                    f"page {page.envelope.key.hex()[:16]} is dropped from L2: a worker's read found it corrupt"
                )
                self._frames.drop_peer(page)
            elif page.peer is copy and not page.shared:
                self._frames.drop_peer(page, is_above=True)
            self._frames.end_peer_read(copy)
        if done:
            self._frames.peer_counters.bytes_out += message.nbytes
            self._frames.peer_copy_time.copied(message.nbytes, message.seconds)
            self._frames.peer_counters.loads_s.append(message.seconds / len(message.pages))
        return bool(done)
