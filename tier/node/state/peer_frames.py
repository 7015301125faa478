"""L2's tables: frames that workers lend to their peers, who may use each, and which pages lie in them. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvtier.tier.node.state.holders import Holders
from kvtier.tier.node.state.ranking import Order
from kvtier.tier.node.state.records import CopyTime, Page, PeerCopy, PeerFrame, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.messages import LentFrame, PeerGrant, PeerPage
from kvtier.tier.stats import TierCounters

SLACK_PARTS = 2  # a page goes into a frame that is larger by at most one part in so many of it
STOCK_PARTS = 8  # the stocks of all borrowers together take at most one frame in so many, one each at least


class PeerFrames:
    """What lies in L2, in frames that workers lend to their peers.

    A page has at most one copy in L2, and that only beside one in L3 or L4: with the last of those it goes too. So a
    frame that its lender wants back is given up without a copy. A frame is evicted from, granted and free by its size
    and lender.
    """

    def __init__(self, tables: NodeTables, holders: Holders) -> None:
        self._tables, self._holders = tables, holders
        self.lenders: dict[str, Worker] = {}  # by incarnation
        self._num_lent = 0
        self.lent_bytes = 0
        self.peer_used_bytes = 0  # of frames that are granted or have a copy
        self._frame_generation = 0
        self._free_frames: dict[tuple[int, Worker], dict[PeerFrame, None]] = {}
        self.frames_of_size: dict[int, int] = {}  # frames lent, by size
        self._peer_orders: dict[tuple[int, Worker], Order[Page]] = {}
        self._spare_peer_orders: list[Order[Page]] = []
        self.frame_wants: dict[tuple[Worker, int], int] = {}  # frames wanted, by payload size
        self.reclaimed: dict[Worker, list[int]] = {}  # to be told at the end of this event
        self.peer_counters = TierCounters()
        self.peer_copy_time = CopyTime()

    # ---- frames come and go ------------------------------------------------------------------------------------

    def why_not_lent(self, lender: Worker, lent: LentFrame) -> str | None:
        """What can't be of a frame that a worker lends; None when all is well."""
        end = lent.offset + lent.nbytes
        if lent.nbytes <= 0 or lent.offset < 0 or end > lender.hello.arena_bytes:
            return f"bytes {lent.offset} to {end} of an arena of {lender.hello.arena_bytes}"
        at = bisect_left(lender.lent_at, end)
        if at and (before := lender.lent[lender.lent_at[at - 1]]).offset + before.nbytes > lent.offset:
            return f"bytes {lent.offset} to {end} of its arena, some of them twice"
        if self._num_lent >= self._tables.limits.lent_frames:
            return f"more than {self._tables.limits.lent_frames} frames"
        return None

    def add_frame(self, lender: Worker, lent: LentFrame) -> None:
        frame = PeerFrame(lender, lent.offset, lent.nbytes)
        lender.lent[lent.offset] = frame
        insort(lender.lent_at, lent.offset)
        self._num_lent += 1
        self.lent_bytes += lent.nbytes
        self.frames_of_size[lent.nbytes] = self.frames_of_size.get(lent.nbytes, 0) + 1
        self._list_free(frame)

    def remove_frame(self, frame: PeerFrame) -> None:
        """Nothing uses the frame, and nothing will."""
        del frame.lender.lent[frame.offset]
        del frame.lender.lent_at[bisect_left(frame.lender.lent_at, frame.offset)]
        self._num_lent -= 1
        self.lent_bytes -= frame.nbytes
        self.frames_of_size[frame.nbytes] -= 1
        if not self.frames_of_size[frame.nbytes]:
            del self.frames_of_size[frame.nbytes]
        self._unlist_free(frame)

    def _list_free(self, frame: PeerFrame) -> None:
        self._free_frames.setdefault((frame.nbytes, frame.lender), {})[frame] = None

    def _unlist_free(self, frame: PeerFrame) -> None:
        key = frame.nbytes, frame.lender
        free = self._free_frames.get(key, {})
        free.pop(frame, None)
        if not free:
            self._free_frames.pop(key, None)

    def free_frame(self, frame: PeerFrame) -> None:
        """A frame that was granted, or had a copy, is unused: it is free, or goes home."""
        frame.grant = frame.copy = None
        self.peer_used_bytes -= frame.nbytes
        if frame.is_leaving:
            self.remove_frame(frame)
            self.reclaimed.setdefault(frame.lender, []).append(frame.offset)
        else:
            self._list_free(frame)

    # ---- grants ------------------------------------------------------------------------------------------------

    def size_for(self, payload_bytes: int) -> int | None:
        """The size of the frames that pages of so many bytes go into."""
        most = payload_bytes + payload_bytes // SLACK_PARTS
        return min((size for size in self.frames_of_size if payload_bytes <= size <= most), default=None)

    def grant_frame(self, worker: Worker, size: int, payload_bytes: int) -> PeerGrant | None:
        """A free frame of another worker, made free if need be."""
        key = max(
            (k for k in self._free_frames if k[0] == size and self.may_use(worker, k[1])),
            key=lambda k: len(self._free_frames[k]),
            default=None,
        )
        frame = self._emptied(worker, size) if key is None else next(iter(self._free_frames[key]))
        if frame is None:
            return None
        self._unlist_free(frame)
        self._frame_generation += 1
        grant = PeerGrant(frame.lender.hello.incarnation, frame.offset, self._frame_generation, payload_bytes)
        frame.holder, frame.grant = worker, grant
        self.peer_used_bytes += size
        worker.borrowed[grant.lender, grant.offset] = frame
        worker.borrowed_sizes[size] += 1
        return grant

    def end_peer_grant(self, worker: Worker, grant: PeerGrant) -> PeerFrame | None:
        """The grant is used up or given back: its frame. None when it isn't this worker's, or void."""
        frame = worker.borrowed.get((grant.lender, grant.offset))
        if frame is None or frame.grant != grant:
            return None
        del worker.borrowed[grant.lender, grant.offset]
        worker.borrowed_sizes[frame.nbytes] -= 1
        frame.holder = None
        return frame

    def _emptied(self, worker: Worker, size: int) -> PeerFrame | None:
        """A frame of another worker that the page worth least has left for it; None where all are in use."""
        keys = [key for key in self._peer_orders if key[0] == size and self.may_use(worker, key[1])]
        pages = [page for key in keys if (page := self._peer_victim(self._peer_orders[key])) is not None]
        if not pages:
            return None
        lowest = pages[0]
        if len(pages) > 1:
            lowest = min(
                pages,
                key=lambda page: self._tables.policy.value(
                    page.row, self._tables.now, self._peer_load_s(size)
                ),
            )
        assert lowest.peer is not None
        frame = lowest.peer.frame
        self.drop_peer(lowest)
        return frame

    def _peer_victim(self, order: Order[Page]) -> Page | None:
        while (page := order.lowest(self._tables.now)) is not None:
            assert page.peer is not None
            if not page.peer.readers:
                return page
            order.discard(page)  # it is put back when its readers are gone
            page.peer_order = None
        return None

    def may_use(self, worker: Worker, lender: Worker) -> bool:
        """Whether a worker may read and write what another lends."""
        return (
            lender is not worker
            and worker.hello.role == "worker"
            and lender.hello.incarnation not in worker.unopened
        )

    # ---- copies ------------------------------------------------------------------------------------------------

    def put_in_peer(self, page: Page, frame: PeerFrame, checksum: bytes) -> None:
        """A page lies in a frame that was granted for it."""
        page.peer = frame.copy = PeerCopy(page, frame, checksum)
        self._holders.enter(page, TierName.PEER)
        self.peer_counters.demoted_pages += 1
        self.peer_counters.bytes_in += page.envelope.payload_bytes
        self._settle_peer(page)

    def drop_peer(self, page: Page, *, is_above: bool = False) -> None:
        """A page's copy in L2 can be found no more; its frame is free when its readers are gone. `is_above`: L1 has it."""
        copy, page.peer = page.peer, None
        assert copy is not None
        self._holders.exit(page, TierName.PEER)
        self.peer_counters.evicted_pages += not is_above
        self._settle_peer(page)
        if not copy.readers:
            self.free_frame(copy.frame)

    def end_peer_read(self, copy: PeerCopy) -> None:
        copy.readers -= 1
        if copy.readers or copy.frame.copy is not copy:  # void, with its lender
            return
        if copy.page.peer is copy:
            self._settle_peer(copy.page)
        else:
            self.free_frame(copy.frame)

    def _settle_peer(self, page: Page) -> None:
        """Put a page's copy in L2 into the order it is evicted by. Any may go: each has another one below."""
        order = None if page.peer is None else self._peer_order_of(page.peer.frame)
        if order is page.peer_order:
            return
        if page.peer_order is not None:
            page.peer_order.discard(page)
        if order is not None:
            order.add(page)
        page.peer_order = order

    def _peer_order_of(self, frame: PeerFrame) -> Order[Page]:
        key = frame.nbytes, frame.lender
        order = self._peer_orders.get(key)
        if order is None:
            for other in [k for k, o in self._peer_orders.items() if not len(o)]:
                self._spare_peer_orders.append(self._peer_orders.pop(other))
            spare = self._spare_peer_orders
            order = self._peer_orders[key] = spare.pop() if spare else Order(self._tables.policy.candidates())
        return order

    def redraw_peers(self) -> None:
        """After pages were used: what leaves first is another now."""
        for (size, _), order in self._peer_orders.items():
            order.redraw()
            order.candidates.load_s = self._peer_load_s(size)

    def _peer_load_s(self, size: int) -> float:
        """Seconds that bringing a page up from L2 takes; 0.0 while not measured."""
        return size * self.peer_copy_time.byte_s

    def copy_for(self, worker: Worker, page: Page) -> PeerCopy | None:
        """A page's copy in L2, where this worker can read it."""
        copy = page.peer
        return copy if copy is not None and self.may_use(worker, copy.frame.lender) else None

    # ---- what others may ask -------------------------------------------------------------------------------------

    def peer_snapshot(self, raw_payloads: Mapping[bytes, int]) -> TierCounters:
        """The counters of L2; hits are counted by the workers."""
        counters = replace(self.peer_counters, loads_s=self.peer_counters.loads_s.copy())
        counters.capacity_bytes, counters.used_bytes = self.lent_bytes, self.peer_used_bytes
        self._holders.peer_holds.describe(counters, raw_payloads)
        counters.policy, counters.fallbacks = self._tables.policy.state, self._tables.policy.fallbacks
        return counters

    def _lent_frames(self) -> Iterator[PeerFrame]:
        """All frames that are lent."""
        return (frame for worker in self._tables.workers.values() for frame in worker.lent.values())


def peer_page(ref: tuple[int, int], copy: PeerCopy) -> PeerPage:
    """A page in L2, as the worker hears of it that it is leased to."""
    envelope, grant = copy.page.envelope, copy.frame.grant
    assert grant is not None
    return PeerPage(
        ref,
        grant,
        envelope.key,
        envelope.variant,
        envelope.spec_digest,
        copy.checksum,
        envelope.tokens,
        envelope.made_from,
    )
