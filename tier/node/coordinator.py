"""Decides where a node's pages live. Pure: performs no copy, reads no clock, never sees a page's content.

The cache coordinator of a node as a pure state machine: `handle(event, now) -> commands`. It owns the slots of L3, the
catalogue mirror and the slots of L4, the grants and leases of the workers, and every transfer in flight.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from kvtier.tier.node.lookup import Hit, Lookup
from kvtier.tier.node.peer_memory import Lending
from kvtier.tier.node.remote.save_on_demand import Savings
from kvtier.tier.node.state.records import (
    HostCopy,
    Leaving,
    Load,
    Page,
    Request,
    Worker,
)
from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import HEADER_BYTES, Envelope, slot_bytes
from kvtier.tier.protocol.events import (
    BeginClear,
    Clear,
    ClearPages,
    ClearsKnown,
    Command,
    Continue,
    Disconnect,
    Drain,
    Event,
    Evict,
    Failure,
    FromWorker,
    NoteClears,
    PageId,
    Pin,
    Quiesce,
    ReadDone,
    ReadFailed,
    ReadPage,
    SaveRoots,
    Send,
    Unpin,
    Verified,
    Verify,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
)
from kvtier.tier.protocol.messages import (
    ArenaUnopened,
    Copied,
    Fetched,
    Finished,
    Grant,
    Granted,
    Hello,
    HostPage,
    Lend,
    Locate,
    Located,
    Missing,
    NewRoot,
    PageRef,
    PeerPage,
    Reclaim,
    Refused,
    Release,
    ReturnFrames,
    ReturnSlots,
    Stored,
    StoredInPeer,
    StoredPage,
    ToNode,
    Unsaved,
    WantFrames,
    WantSlots,
    Welcome,
)
from kvtier.tier.stores.base import Outcome


class Coordinator(Savings, Lending):
    """All decisions of a node's cache. One owner calls it, from one thread.

    L3 is what `host` has of slots (none: the tier is off, and with it what it would reach); L4 is what `ssd` allocates
    (None: off), of pages in `ssd_variants` (None: in all), `recovered` its catalogue at the start, `lost` what was in it
    but is no longer in L4's files. `wall_offset_s` is wall clock minus the clock of `now`. Invariants are those that
    `check` states.

    Liveness: grants in stock, held (preempted) and pinned pages leave some slots of every size in use alone, or
    segments that can become such. What is there goes by itself: it is evictable, being written, or leased to a copy
    that the worker makes at once. So a load finds a slot sooner or later, however long the queue; where what lasts was
    there before its size came into use and leaves nothing, it fails.

    Pages on their way up, from the start of their read until they are copied, take a bounded part of L3, so that a long
    prompt doesn't push out what others have there. While that part is full, pages are read one at a time: those leased
    may be a worker's that has stopped, and others wait.
    """

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; `now` never goes back. Commands are to be carried out in their order."""
        self._now = now
        self._apply(event)
        self._pump_sinking()
        self._pump_writes()
        self._pump_shares()
        self._pump_emptying()
        self._pump_slots()
        while self._pump_more():
            self._pump_slots()
        self._pump_checks()
        self._pump_frames()
        return self._take_commands()

    def _pump_more(self) -> bool:
        """Whether slots may be had that weren't a moment ago: more pages leave for those that wait, or went."""
        begun = bool(self._wants or self._queue) and self._pump_sinking()
        if begun:
            self._pump_writes()
        return self._pump_shares() or begun

    def _pump_slots(self) -> None:
        self._end_late_fetches()
        self._has_emptied = True
        while self._has_emptied:  # one size has got its slot, so another's turn may have come
            self._has_emptied = False
            self._pump_loads()
            self._pump_fetches()
            self._pump_grants()

    # ---- events ------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        match event:
            case FromWorker():
                self._hear(event.worker, event.message)
            case WorkerGone():
                self._worker_gone(event.worker)
            case ReadDone():
                self._read_done(event.transfer, event.envelope)
            case ReadFailed():
                self._read_failed(event.transfer, event.failure, event.detail)
            case WriteDone():
                self._write_done(event.transfer)
            case WriteFailed():
                self._write_failed(event.transfer, event.failure, event.detail)
            case Verified():
                self._verified(event.transfer, event.failure, event.detail)
            case Pin():
                self._answer(event.ticket, ((key, self._pin(key)) for key in event.keys))
            case Unpin():
                self._answer(event.ticket, ((key, self._unpin(key)) for key in event.keys))
            case Evict():
                self._answer(event.ticket, ((key, self._evict_key(key, event.tier)) for key in event.keys))
            case BeginClear():
                self._begin_clear(event.tenant, event.number)
                self._answer(event.ticket, ())
            case NoteClears():
                self._note_clears(event.clears)
            case ClearsKnown():
                self._clears_known()
            case ClearPages():
                self._answer(event.ticket, self._clear_pages(event.pages))
            case Clear():
                self._answer(event.ticket, self._clear_all(event.tenant, event.number))
            case Verify():
                self._verify(event.ticket, event.keys)
            case Drain():
                self._drain()
            case Continue():
                self._go_on()
            case Quiesce():
                self._quiesce()

    def _clear_all(self, tenant: bytes | None, number: int) -> list[tuple[bytes, Outcome]]:
        """The last step of a clear: what is on its way here ends with what is here."""
        self._end_clear(tenant, number)
        self._clear_savings(tenant)
        self._clear_fetches(tenant)
        return self._clear(tenant)

    def _hear(self, ref: WorkerRef, message: ToNode) -> None:
        if isinstance(message, Hello):
            self._hello(ref, message)
            return
        worker = self._workers.get(ref)
        if worker is None or worker.fenced:
            return
        match message:
            case NewRoot():
                self._learn_root(message.root_fields)
            case WantSlots():
                self._blame(worker, self._want(worker, message))
            case ReturnSlots():
                self._return_slots(worker, message.grants)
            case Stored() if worker.is_exchange:
                self._fetched_pages(worker, message)
            case Stored():
                self._blame(worker, self._stored(worker, message))
            case Unsaved():
                self._unsaved(worker, message)
            case Fetched():
                self._fetched(worker, message)
            case Locate():
                self._locate(worker, message)
            case Copied():
                self._copied(worker, message)
            case Finished():
                self._blame(worker, self._finished(worker, message))
            case Release():
                self._release_asked(worker, message)
            case Lend():
                self._blame(worker, self._lend(worker, message))
            case Reclaim():
                self._reclaim(worker, message)
            case WantFrames():
                self._blame(worker, self._want_frames(worker, message))
            case ReturnFrames():
                self._return_frames(worker, message)
            case StoredInPeer():
                self._stored_in_peer(worker, message)
            case ArenaUnopened():
                self._unopened(worker, message)

    def _hello(self, ref: WorkerRef, hello: Hello) -> None:
        if ref in self._workers:
            return
        refusal = self._refusal(hello)
        if refusal is not None:
            self._out.append(Send(ref, Refused(refusal)))
            self._out.append(Disconnect(ref, refusal))
            return
        for older in self._live():
            if older.ref.worker_id == ref.worker_id:
                self._fence(older, "a newer start of the same worker has connected")
        worker = self._workers[ref] = Worker(ref, hello)
        if worker.is_exchange:
            self._exchange_came(worker)
            return
        self._sizes.update(worker.sizes)
        for spec, nbytes in hello.raw_payloads.items():
            self._raw_payloads.pop(spec, None)
            self._raw_payloads[spec] = nbytes
        while len(self._raw_payloads) > self.limits.specs:
            del self._raw_payloads[next(iter(self._raw_payloads))]
        self._learn_root(hello.root_fields)
        self._send(worker, Welcome(self.node_id, self.incarnation, self._slots.capacity_bytes))
        self._meet(worker)

    def _refusal(self, hello: Hello) -> str | None:
        """Why this worker can't be served; None when it can."""
        if len(self._workers) >= self.limits.workers:
            return f"{self.limits.workers} workers are connected, no more are served"
        if hello.role == "exchange":
            return "an exchange has no pages of its own, this one names some" if hello.payloads else None
        if not 0 < len(hello.payloads) <= self.limits.sizes_per_worker:
            return f"the worker names {len(hello.payloads)} kinds of pages, 1 to {self.limits.sizes_per_worker} are served"
        if hello.arena_bytes and hello.incarnation in self._lenders:
            return f"a worker of incarnation {hello.incarnation} lends frames already"
        largest, smallest = max(hello.payloads.values()), min(hello.payloads.values())
        if smallest <= 0:
            return f"pages of {smallest} bytes can't be"
        if slot_bytes(largest) > self._slots.segment_bytes:
            return (
                f"pages of {largest} bytes can't go into L3: it was made for pages of at most "
                f"{self._slots.segment_bytes - HEADER_BYTES} bytes when the node started"
            )
        return None

    def _learn_root(self, fields: dict[str, str]) -> None:
        root = root_key(fields)
        if not self._misses.knows_root(root):
            self._misses.add_root(root, fields)
            self._out.append(SaveRoots(self._misses.roots()))

    def _worker_gone(self, ref: WorkerRef) -> None:
        worker = self._workers.pop(ref, None)
        if worker is None:
            return
        worker.fenced = True
        self._forget_wants(worker)
        self._sizes -= Counter(worker.sizes)
        if worker.is_exchange:
            self._exchange_gone(worker)
        self._saves_no_more(worker)
        self._settle_above(ref)
        for request in list(worker.requests.values()):
            self._release(request, 0)
        self._return_slots(worker, worker.grants.values())
        self._peer_gone(worker)

    def _blame(self, worker: Worker, wrong: str | None) -> None:
        """A message that takes what the node knows to see that it can't be ends its sender's connection."""
        if wrong is not None:
            self._bad_messages += 1
            self._fence(worker, wrong)

    def _fence(self, worker: Worker, reason: str) -> None:
        if not worker.fenced:
            worker.fenced = True
            self._forget_wants(worker)
            self._out.append(Disconnect(worker.ref, reason))
            if worker.is_exchange:
                self._exchange_went(worker)
            self._saves_no_more(worker)

    def _forget_wants(self, worker: Worker) -> None:
        self._forget_frame_wants(worker)
        for want in [want for want in self._wants if want[0] is worker]:
            del self._wants[want]

    def _want(self, worker: Worker, message: WantSlots) -> str | None:
        if message.payload_bytes not in worker.hello.payloads.values():
            return f"it wants slots for pages of {message.payload_bytes} bytes, which it hasn't named"
        want = (worker, message.payload_bytes)
        self._wants.pop(want, None)
        if message.count > 0:
            self._wants[want] = message.count
        else:
            self._send(worker, Granted([]))
        return None

    def _return_slots(self, worker: Worker, grants: Iterable[Grant]) -> None:
        """A worker has no use for these slots."""
        for grant in list(grants):
            if self._end_grant(worker, grant):
                self._slots.free(grant.slot)

    # ---- stored pages ------------------------------------------------------------------------------------------

    def _stored(self, worker: Worker, message: Stored) -> str | None:
        wrong: str | None = None
        request = None if message.hold_for is None else self._request(worker, message.hold_for)
        for stored in message.pages:
            nbytes = stored.grant.payload_bytes
            if worker.hello.payloads.get(stored.spec_digest) != nbytes:
                wrong = (
                    f"it stored a page in a slot for {nbytes} bytes, which its Hello doesn't say of that spec"
                )
                break
            is_granted = self._end_grant(worker, stored.grant)
            if is_granted and self._is_cleared(stored):
                self._slots.free(stored.grant.slot)
                self._unsaved(worker, Unsaved([(stored.key, stored.variant)]))
            elif is_granted:
                copy = self._seal(worker, stored)
                original = self._original(copy.page)
                if original is not None:
                    self._supersede(original)
                if request is not None and copy not in request.held:
                    request.held[copy] = None
                    copy.readers += 1
                    copy.holds += 1
                    self._mark_lasting(copy)
            else:
                self._note(
                    f"worker {worker.ref.worker_id} stored into slot {stored.grant.slot}, which isn't granted to it"
                )
        if request is not None:
            self._forget_if_over(request)
        return wrong

    def _is_cleared(self, stored: StoredPage) -> bool:
        """Whether the page's tenant was cleared since the worker made it, who hasn't heard of that yet."""
        self._catch_up(stored.tenant, stored.cleared)
        return stored.cleared < self._clears.of(stored.tenant)

    def _seal(self, worker: Worker, stored: StoredPage) -> HostCopy:
        """The page's copy in L3 from now on: the one that was there before, else the one just stored."""
        page_id = (stored.key, stored.variant)
        page = self._pages.get(page_id)
        if page is not None and page.host is not None:
            self._slots.free(stored.grant.slot)
            page.last_use = self._now
            self._restore(page)
            self._came_down(page, worker)
            return page.host
        page = self._page_of(stored)
        self._came_down(page, worker)
        self._host_counters.demoted_pages += 1
        return self._put_in(page, stored, "L3")

    def _came_down(self, page: Page, worker: Worker) -> None:
        """A worker has stored the page: its copies here count."""
        self._is_used_by(page, worker)
        self._bring_back(page)
        self._stay(page)
        if not self._demotes:
            self._histories.begin([page.row], self._now)  # its request still runs

    # ---- lookups and leases ------------------------------------------------------------------------------------

    def _locate(self, worker: Worker, message: Locate) -> None:
        self._catch_up(message.tenant, message.cleared)
        request = self._request(worker, message.request_id)
        if request is None:
            why = f"{self.limits.requests_per_worker} requests of this worker are served, no more are"
            self._located(worker, message, self._without_node(message, "no_room", why))
            return
        before, of_peers = list(request.leases.values()), list(request.peer_leases.values())
        self._end_waits(request, 0)
        request.leases, request.peer_leases = {}, {}
        self._located(worker, message, self._find(worker, message), request)
        for copy in before:
            self._end_lease(copy)
        self._end_peer_reads(of_peers)
        self._forget_if_over(request)
        if len(self._touched) >= self.limits.persist_every:
            self._persist_uses()

    def _located(
        self,
        worker: Worker,
        message: Locate,
        found: tuple[Hit, Missing | None],
        request: Request | None = None,
    ) -> None:
        """Lease, or load, what the prefix needs, and say so."""
        hit, missing = found
        host: list[HostPage] = []
        loading: list[PageRef] = []
        peers: list[PeerPage] = []
        for ref, page in hit.needed:
            assert request is not None
            page.last_use = self._now
            if not worker.is_exchange:
                self._restore(page)
                self._is_used_by(page, worker)
                self._bring_back(page)
            peer = self._peer_copy_for(worker, page)
            if peer is not None:
                peers.append(self._lease_peer(request, ref, peer))
            elif page.host is not None:
                host.append(self._lease(request, ref, page.host, "L3"))
            else:
                self._wait_for(page, request, ref)
                loading.append(ref)
        if not worker.is_exchange:
            self._histories.begin([page.row for _, page in hit.needed], self._now)
        if request is not None:
            loading += self._fetch_pages(request, message, hit)
            loading += self._have_saved(request, message, hit)
        located = Located(message.request_id, hit.pages, host, loading, missing, peers, hit.unsaved)
        self._send(worker, located)

    def _without_node(self, message: Locate, reason: str, detail: str) -> tuple[Hit, Missing | None]:
        """What L1 alone can serve."""
        lookup = Lookup(message, lambda key, variant: None, self.limits.keys_per_locate)
        hit = lookup.longest()
        asked = message.first_page + len(message.chains[0].keys)
        return hit, Missing(hit.pages, reason, detail) if hit.pages < asked else None

    def _find(self, worker: Worker, message: Locate) -> tuple[Hit, Missing | None]:
        """The longest prefix that is here and worth having, and why it is no longer."""
        if not self._slots.capacity_bytes:
            return self._without_node(message, "cache_off", "the node has no L3")
        if self._is_being_cleared(message.tenant):
            return self._without_node(message, "cleared", "its tenant's pages are being cleared")
        if self._awaits_clears:
            unheard = "the node has not heard yet what was cleared while it was away"
            return self._without_node(message, "cache_off", unheard)
        pages, payloads, tenant = self._pages, worker.hello.payloads, message.tenant

        def find(key: bytes, variant: str) -> Page | None:
            page = pages.get((key, variant))
            # Keys are salted per tenant and digest the page's shape, so a page found by key fits; this is the second lock.
            if page is None or page.envelope.tenant != tenant:
                return None
            if worker.is_exchange:
                # What was made from another page is no page to give away: the other node computes as it is told.
                is_own = page.envelope.root == message.root and not page.envelope.made_from
                return page if is_own else None
            return page if payloads.get(page.envelope.spec_digest) == page.envelope.payload_bytes else None

        lookup = Lookup(message, find, self.limits.keys_per_locate)
        if lookup.is_simple:
            hit, missing = self._cheapest(worker, message, lookup)
            if worker.is_exchange and missing is None:
                hit = self._with_l1(message, lookup, hit)
            return hit, missing or self._why_not_longer(lookup, hit, message)
        hit = lookup.longest()
        to_load = [
            page for _, page in hit.needed if page.host is None and not self._peer_copy_for(worker, page)
        ]
        if to_load and message.recompute_s > 0:
            resident = lookup.longest_resident()
            why = self._costlier(to_load, (hit.pages - resident.pages) * message.recompute_s)
            if why is not None and resident.pages < hit.pages:
                return resident, Missing(resident.pages, "costlier", why)
            if why is not None:
                hit = resident
        return hit, self._why_not_longer(lookup, hit, message)

    def _why_not_longer(self, lookup: Lookup, hit: Hit, message: Locate) -> Missing | None:
        if hit.pages == lookup.end:
            limit = f"prefixes are looked up for at most {self.limits.keys_per_locate} pages at once"
            return Missing(hit.pages, "no_room", limit) if lookup.is_cut else None
        blocked = lookup.blocked_at(hit.pages)
        where = ""
        if (blocked.chain, blocked.page) != (0, hit.pages):
            where = f"page {blocked.page} of layer group {blocked.chain}: "
        if blocked.is_here:
            wanted = " or ".join(dict.fromkeys(variant for _, variant in blocked.wanted))
            return Missing(hit.pages, "variant", f"{where}it is here, but not as {wanted}")
        if smaller := self._smaller_variant(blocked.wanted, message.tenant):
            return Missing(
                hit.pages, "variant", f"{where}it is here as {smaller}, for requests that say lossy"
            )
        is_first = blocked.page == 0 and blocked.chain == 0
        content = message.first_content if is_first else b""
        gone = self._misses.why(blocked.wanted, message.root, message.tenant, content)
        return Missing(hit.pages, gone.reason, where + gone.detail)

    def _smaller_variant(self, wanted: tuple[PageId, ...], tenant: bytes) -> str:
        """The format, one of those that L4 keeps instead of L1's, in which one of these pages is here; "" for none."""
        for key, _ in wanted:
            for variant in sorted(self._ssd_variants or ()):
                page = self._pages.get((key, variant))
                if page is not None and page.envelope.tenant == tenant:
                    return variant
        return ""

    def _copied(self, worker: Worker, message: Copied) -> None:
        request = worker.requests.get(message.request_id)
        if request is None:
            return
        if self._copied_from_peers(worker, request, message):
            self._forget_if_over(request)
            return
        corrupt = set(message.corrupt)
        was_leased = False  # else they were read from the memory of a lender that is gone
        for ref in message.pages:
            copy = request.leases.pop(ref, None)
            if copy is not None:
                was_leased = True
                if ref in corrupt:
                    self._drop_corrupt(copy, "a worker's read")
                elif self._demotes and not worker.is_exchange:
                    self._taken_up(copy.page, worker)
                self._end_lease(copy)
        self._forget_if_over(request)
        if not was_leased:
            return
        self._host_counters.bytes_out += message.nbytes
        if worker.is_exchange:
            self._served(message)
            return
        self._copy_time.copied(message.nbytes, message.seconds)
        self._host_counters.loads_s.append(message.seconds / len(message.pages))

    def _taken_up(self, page: Page, worker: Worker) -> None:
        """A worker's L1 has the page now. Where no other uses it, one copy is enough, and that one will come down."""
        if self._pages.get(page.id) is not page:
            return
        if page.shared or page.user != worker.ref or not worker.hello.brings_down:
            self._stay(page)
        else:
            page.above, page.leaving = worker.ref, Leaving.STAYS
            self._above.setdefault(worker.ref, {})[page] = None
            self._unsettled.pop(page, None)
        self._settle(page)

    def _finished(self, worker: Worker, message: Finished) -> str | None:
        if worker.is_exchange:
            return "it told of a request with pages in use"
        if sum(map(len, message.keys)) > self.limits.keys_per_locate:
            return f"it told of a request with more than {self.limits.keys_per_locate} pages"
        self._end_use(worker, message)
        return None

    def _release_asked(self, worker: Worker, message: Release) -> None:
        request = worker.requests.get(message.request_id)
        if request is not None:
            self._release(request, message.from_page)

    def _release(self, request: Request, from_page: int) -> None:
        self._end_waits(request, from_page)
        self._end_peer_leases(request, from_page)
        for ref in [ref for ref in request.leases if ref[1] >= from_page]:
            self._end_lease(request.leases.pop(ref))
        if from_page <= 0:
            for copy in request.held:
                copy.holds -= 1
                self._mark_lasting(copy)
                self._end_read(copy)
            request.held = {}
        self._forget_if_over(request)

    # ---- L4 -> L3 ----------------------------------------------------------------------------------------------

    def _pump_loads(self) -> None:
        while self._queue:
            load = next(iter(self._queue))
            page = load.page
            if not self._may_read(page):
                return
            grant = self._take_slot(page.envelope.payload_bytes, page.owner)
            if grant is None:
                if self._slots.available(page.slot_bytes) > 0:
                    return
                # What is in stock, held and pinned is of other sizes, and leaves no segment to this one.
                self._fail_waiters(
                    page, "no_room", f"L3 has no room for pages of {page.envelope.payload_bytes} bytes"
                )
                continue
            self._leave_queue(load)
            if not self._reads:
                self._bandwidth.started(self._now)
            load.transfer, load.grant = self._next_transfer(), grant
            self._reads[load.transfer] = load
            self._read_bytes += page.slot_bytes
            self._arriving[grant.slot] = load
            entry = load.source.entry
            key, variant = entry.envelope.key, entry.envelope.variant
            self._out.append(
                ReadPage(load.transfer, entry.place, grant.slot, entry.envelope.payload_bytes, key, variant)
            )

    def _end_load(self, transfer: int) -> Load:
        """A read is over; its slot is no longer arriving."""
        load = self._reads.pop(transfer)
        assert load.grant is not None
        del self._arriving[load.grant.slot]
        self._read_bytes -= load.page.slot_bytes
        return load

    def _read_done(self, transfer: int, envelope: Envelope) -> None:
        if envelope.checksum != self._reads[transfer].source.entry.envelope.checksum:
            self._read_failed(transfer, "corrupt", "the slot holds other bytes than the catalogue says")
            return
        load = self._end_load(transfer)
        page, grant = load.page, load.grant
        assert grant is not None
        self._bandwidth.finished(grant.payload_bytes, self._now)
        self._ssd_counters.bytes_out += grant.payload_bytes
        self._ssd_counters.loads_s.append(self._now - load.queued_at)
        if page.load is load:
            self._host_counters.promoted_pages += 1
            self._host_counters.bytes_in += grant.payload_bytes
            if self._demotes and load.waiters:
                page.leaving = Leaving.SINKS
            copy = self._arrive(page, grant, load.source.entry.envelope)
            self._serve_waiters(page, copy, "L4")
            if copy.leases:
                copy.rises = True
                self._rising_bytes += page.slot_bytes
        else:
            self._slots.free(grant.slot)
        self._end_ssd_read(page, load.source)

    def _read_failed(self, transfer: int, failure: Failure, detail: str) -> None:
        load = self._end_load(transfer)
        page, grant = load.page, load.grant
        assert grant is not None
        self._slots.free(grant.slot)
        reason = "corrupt" if failure == "corrupt" else "load_failed"
        if page.ssd is load.source:
            self._ssd_counters.corrupt_pages += failure == "corrupt"
            self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._drop_ssd(page)
        self._end_ssd_read(page, load.source)
        self._lost_if_nowhere(page, reason, f"its copy in L4 was {failure} at {self._wall()}")

    def _quiesce(self) -> None:
        self._quiesced = True
        self._unsettled = {}
        self._to_write = {}
        self._persist_uses()
        self._save_stored()

    def _drain(self) -> None:
        """All goes to L4 from now on, whatever it is worth."""
        self._draining = True
        self._demotes = False
        self._end_savings(self._savings.values(), "load_failed", "the node is about to stop")
        self._settle_for_drain()

    def _settle_above(self, ref: WorkerRef) -> None:
        """What a gone worker's L1 held exclusively counts again here, in parts."""
        self._unsettled.update(self._above.pop(ref, {}))
        self._go_on()

    def _settle_for_drain(self) -> None:
        """All pages of L3 are to be written to L4, in parts."""
        self._unsettled = dict.fromkeys(self._pages.values())
        self._go_on()

    def _go_on(self) -> None:
        """Settle the next pages that a gone worker, or the end of `demote`, has changed the ranks of."""
        for page in list(islice(self._unsettled, self.limits.part)):
            del self._unsettled[page]
            if self._draining:
                self._not_above(page)
                page.leaving = Leaving.STAYS
                self._settle(page)
                if page.host is not None:
                    self._queue_write(page)
            else:
                self._bring_back(page)
