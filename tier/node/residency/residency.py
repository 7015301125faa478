"""Adds pages to L3 and L4, removes them, and serves or fails the requests that wait for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice

from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.holders import Holders
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import (
    HostCopy,
    Leaving,
    Load,
    Page,
    RemoteLoad,
    Request,
    Saving,
    SsdCopy,
    Worker,
    parent_key,
)
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import Envelope, TierName, slot_bytes
from kvtier.tier.policy.base import Use
from kvtier.tier.protocol.events import CommitCatalogue, SaveStored, WorkerRef
from kvtier.tier.protocol.messages import CameFrom, Grant, HostPage, Loaded, LoadFailed, Missing, PageRef
from kvtier.tier.stats import TierCounters
from kvtier.tier.stores.base import CatalogueEntry, Outcome, Place


class Residency:
    """Every change of where a page is, and of who waits for it. Each method leaves all tables consistent."""

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        holders: Holders,
        in_flight: InFlight,
        frames: PeerFrames,
        eviction: Eviction,
    ) -> None:
        self._tables, self._out, self._holders = tables, out, holders
        self._in_flight, self._frames, self._eviction = in_flight, frames, eviction
        self.copies: dict[int, HostCopy] = {}  # by slot
        self.ssd_at: dict[Place, Page] = {}  # the pages that are found in L4, by where they lie
        self.touched: dict[Page, None] = {}
        self._pinned = 0
        self.pinned_bytes = 0  # of their slots
        # Pinned pages that no slot in L3 is kept for yet: those without a copy there, and those whose copy is held (a
        # held copy that is dropped stays until it is released, and the page may come back meanwhile).
        self.pins_to_come: dict[Page, None] = {}
        self._has_refused = False  # a page was not written, because loading it takes too long; said once
        self.host_counters = TierCounters()
        self.ssd_counters = TierCounters()

    def recover(self, recovered: Sequence[CatalogueEntry]) -> Iterator[None]:
        """Adds the pages of L4's catalogue, as if each had been released at its last use. Yields after each part; before any event.

        `recovered` is in any order. A part is at least `limits.part` pages, and all those of one last use.
        """
        entries = sorted(recovered, key=lambda entry: (entry.last_use_s, entry.envelope.depth))
        self._tables.ssd_generation = max((entry.generation for entry in entries), default=0)
        num_pages = 0
        for _, used_together in groupby(entries, key=lambda entry: entry.last_use_s):
            pages = [self._recover(entry) for entry in used_together]
            deepest, last_use = pages[-1].envelope.depth, pages[-1].last_use
            behind = [deepest - page.envelope.depth for page in pages]
            rows = [page.row for page in pages]
            self._tables.histories.end(rows, behind, Use(deepest + 1, 0), last_use, last_use)
            num_pages += len(pages)
            if num_pages >= self._tables.limits.part:
                num_pages = 0
                self._out.holds_changes = {}  # `holds` has what was recovered
                yield
        for number, page in enumerate(self._tables.pages.values(), 1):
            original = self._tables.original(page)
            if original is not None and original.last_use <= page.last_use:
                self.supersede(original)
            self._eviction.settle(page)
            if number % self._tables.limits.part == 0:
                yield
        self._out.holds_changes = {}

    def _recover(self, entry: CatalogueEntry) -> Page:
        last_use = min(self._tables.now, entry.last_use_s - self._tables.wall_offset_s)
        page = self.create(entry.envelope, entry.content, last_use)
        page.ssd = SsdCopy(entry)
        self.ssd_at[entry.place] = page
        page.uses = entry.uses
        self._tables.shares.take(TierName.SSD, page.owner, entry.slot_bytes)
        self._holders.enter(page, TierName.SSD)
        if page.content:
            self._tables.misses.add_content(entry.envelope.tenant, page.content, entry.envelope.root, page.id)
        return page

    def record_lost(self, lost: Sequence[CatalogueEntry]) -> None:
        detail = f"its place in the files of L4 was gone when the node started at {self._tables.wall()}"
        for entry in lost:
            envelope = entry.envelope
            page_id = (envelope.key, envelope.variant)
            if entry.content:
                self._tables.misses.add_content(envelope.tenant, entry.content, envelope.root, page_id)
            self._tables.misses.left(page_id, "lost", detail)

    def create(self, envelope: Envelope, content: bytes, now: float) -> Page:
        nbytes = slot_bytes(envelope.payload_bytes)
        row = self._tables.histories.came(envelope.key, envelope.depth, nbytes, now)
        owner = self._tables.shares.owner(envelope.tenant)
        if envelope.depth:
            content = b""
        page = Page((envelope.key, envelope.variant), envelope, row, now, content, owner)
        self._tables.pages[page.id] = page
        self._tables.variants[envelope.variant] += 1
        self._tables.misses.came(page.id)
        parent = parent_key(page)
        if parent is not None:
            self._tables.children[parent] = self._tables.children.get(parent, 0) + 1
            if self._tables.children[parent] == 1:
                for above in self._tables.named(parent):
                    if above.leaving is Leaving.GOES:
                        above.leaving = Leaving.STAYS
                    self._eviction.settle(above)
        return page

    def arrive(self, page: Page, grant: Grant, envelope: Envelope) -> HostCopy:
        copy = HostCopy(page, grant, envelope)
        self.copies[grant.slot] = copy
        page.host = copy
        self._tables.shares.take(TierName.HOST, page.owner, page.slot_bytes)
        self._holders.enter(page, TierName.HOST)
        if page.pinned:
            self.mark_lasting(copy)
        self._eviction.settle(page)
        return copy

    def lost_if_nowhere(self, page: Page, reason: str, detail: str) -> None:
        """Forgets a page that no tier holds any more."""
        if page.host is not None or page.ssd is not None or self._tables.pages.get(page.id) is not page:
            return
        self.fail_waiters(page, reason, detail)
        del self._tables.pages[page.id]
        if page.peer is not None:
            self._frames.drop_peer(page)
        self.touched.pop(page, None)
        self._eviction.not_above(page)
        self._eviction.unsettled.pop(page, None)
        if page.pinned:
            self.set_pinned(page, False)
        self._tables.variants[page.id[1]] -= 1
        if not self._tables.variants[page.id[1]]:
            del self._tables.variants[page.id[1]]
        self._tables.misses.left(page.id, reason, detail)
        self._tables.histories.left(page.envelope.key, page.row)
        self._eviction.values.pop(page, None)
        self._eviction.ssd_values.pop(page, None)
        original = self._tables.original(page)
        if original is not None and original.superseded and not self._tables.is_converted(original):
            self.restore(original)
        parent = parent_key(page)
        if parent is not None:
            self._tables.children[parent] -= 1
            if not self._tables.children[parent]:
                del self._tables.children[parent]
                self._eviction.settle_all(parent)

    def evict_host(self, page: Page) -> None:
        self.host_counters.evicted_pages += 1
        self.drop_host(page)
        self.lost_if_nowhere(page, "evicted", self._tables.by_policy(page, TierName.HOST))

    def drop_host(self, page: Page) -> None:
        copy, page.host = page.host, None
        assert copy is not None
        page.leaving = Leaving.STAYS
        self._holders.exit(page, TierName.HOST)
        self._in_flight.to_write.pop(page, None)
        self._eviction.settle(page)
        if page.pinned or copy.holds:
            self.mark_lasting(copy)
        if not copy.readers:
            self._free_slot(copy)

    def drop_ssd(self, page: Page, *, wipe: bool = False) -> None:
        """Drops the page from L4: its catalogue record now, its slot once nothing reads it."""
        copy, page.ssd = page.ssd, None
        assert copy is not None
        del self.ssd_at[copy.entry.place]
        if page.leaving is Leaving.SINKS and page.envelope.key not in self._tables.children:
            page.leaving = Leaving.GOES
        self._holders.exit(page, TierName.SSD)
        self._out.drops.append(page.id)
        self.touched.pop(page, None)
        self._eviction.settle(page)
        if copy.readers:
            copy.wipe = wipe
            self._in_flight.leaving[copy] = page
        else:
            self.free_place(page, copy.entry.place, wipe)

    def drop_corrupt(self, copy: HostCopy, found_by: str) -> None:
        """Drops a copy in L3 that failed its checksum. It is never served again, though readers may still hold it."""
        page = copy.page
        if page.host is not copy:
            return
        self.host_counters.corrupt_pages += 1
        self._out.note(f"page {page.envelope.key.hex()[:16]} is dropped from L3: {found_by} found it corrupt")
        self.drop_host(page)
        self.lost_if_nowhere(page, "corrupt", f"its copy in L3 was corrupt at {self._tables.wall()}")

    def end_read(self, copy: HostCopy) -> None:
        copy.readers -= 1
        if copy.readers:
            return
        page = copy.page
        if page.host is not copy:
            self._free_slot(copy)
        elif copy.leave:
            self.drop_host(page)
            self.lost_if_nowhere(page, "evicted", self._tables.by_request(TierName.HOST))
        else:
            self._eviction.settle(page)

    def end_lease(self, copy: HostCopy) -> None:
        """Ends a lease: the worker has copied the page, or won't."""
        copy.leases -= 1
        if copy.promoting and not copy.leases:
            copy.promoting = False
            self._in_flight.promoting_bytes -= copy.page.slot_bytes
        self.end_read(copy)

    def end_ssd_read(self, page: Page, copy: SsdCopy) -> None:
        copy.readers -= 1
        if copy.readers:
            return
        if copy in self._in_flight.leaving:
            del self._in_flight.leaving[copy]
            self.free_place(page, copy.entry.place, copy.wipe)
        elif copy.leave:
            self.drop_ssd(page)
            self.lost_if_nowhere(page, "evicted", self._tables.by_request(TierName.SSD))
        else:
            self._eviction.settle(page)

    def _free_slot(self, copy: HostCopy) -> None:
        del self.copies[copy.grant.slot]
        self._tables.shares.take(TierName.HOST, copy.page.owner, -copy.page.slot_bytes)
        self._tables.slots.free(copy.grant.slot)

    def mark_lasting(self, copy: HostCopy) -> None:
        """Tells the allocator whether a slot is held or pinned. Call it when either has changed."""
        pinned = copy.page.pinned and copy.page.host is copy
        self._tables.slots.set_lasting(copy.grant.slot, copy.holds > 0 or pinned)
        self._note_pin(copy.page)

    def _note_pin(self, page: Page) -> None:
        if page.pinned and (page.host is None or page.host.holds):
            self.pins_to_come[page] = None
        else:
            self.pins_to_come.pop(page, None)

    def set_pinned(self, page: Page, pinned: bool) -> None:
        """Sets or clears the pin of a page. It must not have that value yet."""
        assert page.pinned != pinned
        if pinned:
            self.restore(page)
        page.pinned = pinned
        self._pinned += 1 if pinned else -1
        self.pinned_bytes += page.slot_bytes if pinned else -page.slot_bytes
        self._note_pin(page)
        if page.host is not None:
            self.mark_lasting(page.host)

    def free_place(self, page: Page, place: Place, wipe: bool) -> None:
        assert self._tables.ssd is not None
        self._tables.ssd.free(place)
        self._tables.shares.take(TierName.SSD, page.owner, -page.slot_bytes)
        if wipe:
            self._out.wipes.append(place)

    # ---- requests and the loads they wait for ------------------------------------------------------------------

    def request(self, worker: Worker, request_id: str) -> Request | None:
        request = worker.requests.get(request_id)
        if request is None and len(worker.requests) < self._tables.limits.requests_per_worker:
            request = worker.requests[request_id] = Request(worker, request_id)
        return request

    def forget_if_over(self, request: Request) -> None:
        if request.is_over:
            request.worker.requests.pop(request.request_id, None)

    def wait_for(self, page: Page, request: Request, ref: PageRef) -> None:
        load = page.load
        if load is None:
            assert page.ssd is not None
            load = page.load = Load(page, page.ssd, self._tables.now)
            page.ssd.readers += 1
            self._in_flight.queue[load] = None
            self._in_flight.queued_bytes += page.envelope.payload_bytes
        load.waiters[request, ref] = None
        request.waits[ref] = load

    def end_waits(self, request: Request, from_page: int) -> None:
        """Ends a request's waits from a page on. A queued load without waiters is cancelled; a running one goes on."""
        for ref in [ref for ref in request.waits if ref[1] >= from_page]:
            load = request.waits.pop(ref)
            del load.waiters[request, ref]
            if load.waiters:
                continue
            if isinstance(load, Saving):
                self._in_flight.saves.pop(load.id, None)
            elif isinstance(load, RemoteLoad):
                self._in_flight.fetches.unwanted(load)
            elif load.page.load is load and load.transfer is None:
                load.page.load = None
                self._unqueue(load)

    def _unqueue(self, load: Load) -> None:
        """Cancels a queued load."""
        self.leave_queue(load)
        self.end_ssd_read(load.page, load.source)

    def leave_queue(self, load: Load) -> None:
        del self._in_flight.queue[load]
        self._in_flight.queued_bytes -= load.page.envelope.payload_bytes

    def serve_waiters(self, page: Page, copy: HostCopy, came_from: CameFrom) -> None:
        """Leases a page that has come to L3 to all waiters, and abandons loads of it by other ways."""
        load, page.load = page.load, None
        if load is not None:
            self._serve(load, copy, came_from)
            if load.transfer is None:
                self._unqueue(load)
        fetch = self._in_flight.fetches.forget(page.id)
        if fetch is not None:
            self._serve(fetch, copy, came_from)
        saving = self._in_flight.saves.pop(page.id, None)
        if saving is not None and saving.fits(page.envelope):
            self._serve(saving, copy, came_from)
        elif saving is not None:
            self.fail(
                saving, "identity_differs", "a page of this key came from another tenant, root or shape"
            )

    def _serve(self, load: Load | RemoteLoad | Saving, copy: HostCopy, came_from: CameFrom) -> None:
        for request, ref in load.waiters:
            del request.waits[ref]
            found = self.lease(request, ref, copy, came_from)
            self._out.send(request.worker, Loaded(request.request_id, [found]))
        load.waiters = {}

    def lease(self, request: Request, ref: PageRef, copy: HostCopy, came_from: CameFrom) -> HostPage:
        copy.readers += 1
        copy.leases += 1
        request.leases[ref] = copy
        page = copy.envelope
        return HostPage(
            ref, copy.grant, page.key, page.variant, page.spec_digest, page.checksum, page.tokens, came_from
        )

    def fail_waiters(self, page: Page, reason: str, detail: str) -> None:
        """Fails all waiters of a page that will not come, and abandons its load."""
        load, page.load = page.load, None
        if load is None:
            return
        self.fail(load, reason, detail)
        if load.transfer is None:
            self._unqueue(load)

    def fail(self, load: Load | RemoteLoad | Saving, reason: str, detail: str) -> None:
        for request, ref in list(load.waiters):
            if request.waits.get(ref) is load:
                self._out.send(
                    request.worker, LoadFailed(request.request_id, Missing(ref[1], reason, detail))
                )
                self.end_waits(request, ref[1])
                self.forget_if_over(request)

    def supersede(self, page: Page) -> None:
        """Marks a page from which another was made: until its next use it is evicted first and not written to L4."""
        if not page.pinned and not page.superseded:
            page.superseded = True
            self._eviction.settle(page)

    def restore(self, page: Page) -> None:
        """Clears `superseded`: the page was used, or the page made from it is gone."""
        if not page.superseded:
            return
        page.superseded = False
        self._eviction.settle(page)
        if page.host is not None:
            self.queue_write(page)

    def queue_write(self, page: Page) -> None:
        """Queues a page of L3 to be written to L4 where writes are `through`; with `demote` eviction decides."""
        if not self._tables.demotes:
            self.queue_write_back(page)

    def queue_write_back(self, page: Page) -> None:
        """Queues a page of L3 to be written to L4, unless it is there, being written, superseded, or of a format that L4 refuses."""
        write = self._in_flight.writing.get(page.id)
        is_underway = page.ssd is not None or (write is not None and write.page is page)
        if not (is_underway or page.superseded or self._tables.quiesced) and self._tables.goes_to_l4(page):
            if self._is_worth_loading(page):
                self._in_flight.to_write[page] = None
            else:
                self.ssd_counters.refused_writes += 1

    def _is_worth_loading(self, page: Page) -> bool:
        """Returns whether reading a page from L4 takes less time than computing it. True while either isn't measured."""
        load_s = self._in_flight.ssd_load_s(page.slot_bytes)
        compute_s = self._tables.policy.costs.recompute_s(page.envelope.depth)
        is_slow = 0 < compute_s < load_s
        if is_slow and not self._has_refused:
            self._has_refused = True
            self._out.note(
                f"pages such as {page.envelope.key.hex()[:16]} are not written to L4: reading one takes "
                f"{load_s * 1e3:.1f} ms, computing it {compute_s * 1e3:.1f} ms"
            )
        return not is_slow

    # ---- what is to be kept, and words for what happened -----------------------------------------------------------------

    def persist_uses(self) -> None:
        puts = []
        for page in self.touched:
            assert page.ssd is not None
            wall_s = page.last_use + self._tables.wall_offset_s
            page.ssd.entry = replace(page.ssd.entry, uses=page.uses, last_use_s=wall_s)
            puts.append(page.ssd.entry)
        self.touched = {}
        if puts:
            self._out.commands.append(CommitCatalogue(tuple(puts), ()))

    def save_stored(self) -> None:
        if self._tables.misses.unsaved and self._tables.ssd is not None:
            self._out.commands.append(SaveStored(self._tables.misses.stored_before()))

    def max_pinned_bytes(self) -> int:
        """Most bytes of pinned pages: half of the smallest tier that is on, so that there is always something to evict."""
        if self._tables.ssd is None:
            return self._tables.slots.capacity_bytes // 2
        return min(self._tables.slots.capacity_bytes, self._tables.ssd.capacity_bytes) // 2

    def leave(self, page: Page) -> None:
        """Starts demoting a page of L3: writes it to L4, or marks it to be dropped where it isn't worth a write."""
        page.leaving = Leaving.SINKS
        if page.ssd is None:
            if not self._tables.policy.is_dead(page.row):
                self.queue_write_back(page)
            if page not in self._in_flight.to_write:
                self.give_up(page)
        self._eviction.settle(page)

    def give_up(self, page: Page) -> None:
        """Marks a page that can't be written to L4 to be dropped, unless a page behind it in its chain is here."""
        if page.leaving is Leaving.SINKS and page.envelope.key not in self._tables.children:
            page.leaving = Leaving.GOES
            self._eviction.settle(page)

    def is_used_by(self, page: Page, worker: Worker) -> None:
        """Records a use: which worker, and whether another has used the page too."""
        page.shared |= page.user not in (None, worker.ref)
        page.user = worker.ref

    def bring_back(self, page: Page) -> None:
        """Makes a page that was exclusive in a worker's L1 count here again."""
        if page.above is not None:
            self._eviction.not_above(page)
            if page.host is not None and page.ssd is not None:
                page.leaving = Leaving.SINKS  # on its way through L3, until it is known who has it
            self._eviction.settle(page)

    def purge(self, page: Page, reason: str, *, wipe: bool) -> Outcome:
        """Removes a page from all tables now; its slots are freed once nothing reads them."""
        detail = f"{reason} by request at {self._tables.wall()}"
        write = self._in_flight.writing.get(page.id)
        if write is not None and write.page is page:
            write.wipe = wipe
        busy = page.peer is not None and page.peer.readers > 0
        if page.host is not None:
            busy |= page.host.readers > 0
            self.host_counters.evicted_pages += 1
            self.drop_host(page)
        if page.ssd is not None:
            busy |= page.ssd.readers > 0
            self.ssd_counters.evicted_pages += 1
            self.drop_ssd(page, wipe=wipe)
        self.lost_if_nowhere(page, reason, detail)
        return Outcome.DEFERRED if busy else Outcome.ACCEPTED

    def settle_above(self, ref: WorkerRef) -> None:
        """Makes pages that were exclusive in a gone worker's L1 count again, `limits.part` of them now."""
        self._eviction.unsettled.update(self._eviction.above.pop(ref, {}))
        self.go_on()

    def settle_for_drain(self) -> None:
        """Queues all pages of L3 to be written to L4, `limits.part` of them now."""
        self._eviction.unsettled = dict.fromkeys(self._tables.pages.values())
        self.go_on()

    def go_on(self) -> None:
        """Handles the next `limits.part` pages of `settle_above` or `settle_for_drain`."""
        for page in list(islice(self._eviction.unsettled, self._tables.limits.part)):
            del self._eviction.unsettled[page]
            if self._tables.draining:
                self._eviction.not_above(page)
                page.leaving = Leaving.STAYS
                self._eviction.settle(page)
                if page.host is not None:
                    self.queue_write(page)
            else:
                self.bring_back(page)
