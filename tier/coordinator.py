"""Decides where a node's pages live. Performs no copy, reads no clock, never sees a page's content.

The cache coordinator of a node as a pure state machine: `handle(event, now) -> commands`. It owns the slots of L3, the
catalogue mirror and the slots of L4, the grants and leases of the workers, and every transfer in flight.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

from collections import deque

from kvtier.tier.base import CatalogueEntry, Outcome, Place
from kvtier.tier.cache_state import CacheState
from kvtier.tier.events import (
    Clear,
    Command,
    Disconnect,
    Drain,
    Event,
    Evict,
    Failure,
    ForgetTenant,
    FromWorker,
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
    VerifyPage,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.identity import root_key
from kvtier.tier.messages import (
    Copied,
    Grant,
    Granted,
    Hello,
    HostPage,
    Locate,
    Located,
    Missing,
    Refused,
    Release,
    ReturnSlots,
    Stored,
    StoredPage,
    ToNode,
    WantSlots,
    Welcome,
)
from kvtier.tier.page import Envelope, PageKey, RootKey, TierName
from kvtier.tier.records import Check, HostCopy, Job, Page, Request, SsdCopy, Worker, Write


class Coordinator(CacheState):
    """All decisions of a node's cache. One owner calls it, from one thread.

    L3 is `num_slots` slots of one size (fewer than two: the tier is off, and with it what it would reach); L4 is what
    `ssd` allocates (None: off), `recovered` its catalogue at the start, `lost` what was in it but is no longer in L4's
    files. `wall_offset_s` is wall clock minus the clock
    of `now`. Invariants are those that `check` states.

    Liveness: grants in stock, held (preempted) and pinned pages may take all slots but `reserve`. What is in the other
    slots goes by itself: it is evictable, being written, or leased to a copy that the worker makes at once. So a load
    always finds a slot sooner or later, however long the queue.
    """

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; `now` never goes back. Commands are to be carried out in their order."""
        self._now = now
        self._apply(event)
        self._pump_writes()
        self._pump_loads()
        self._pump_grants()
        self._pump_checks()
        return self._take_commands()

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
            case Clear():
                self._answer(event.ticket, self._clear(event.tenant))
            case Verify():
                self._verify(event.ticket, event.keys)
            case Drain():
                self._drain()
            case Quiesce():
                self._quiesced = True
                self._to_write = {}
                self._persist_uses()
                self._save_stored()

    def _hear(self, ref: WorkerRef, message: ToNode) -> None:
        if isinstance(message, Hello):
            self._hello(ref, message)
            return
        worker = self._workers.get(ref)
        if worker is None or worker.fenced:
            return
        match message:
            case WantSlots():
                worker.wanted = max(0, message.count)
                self._wants.pop(worker, None)
                if worker.wanted:
                    self._wants[worker] = None
                else:
                    self._send(worker, Granted([]))
            case ReturnSlots():
                for grant in message.grants:
                    if self._end_grant(worker, grant):
                        self._free.append(grant.slot)
            case Stored():
                self._stored(worker, message)
            case Locate():
                self._locate(worker, message)
            case Copied():
                self._copied(worker, message)
            case Release():
                request = worker.requests.get(message.request_id)
                if request is not None:
                    self._release(request, message.from_index)

    def _hello(self, ref: WorkerRef, hello: Hello) -> None:
        if ref in self._workers:
            return
        refusal = None
        if hello.payload_bytes != self.payload_bytes:
            refusal = f"pages of {hello.payload_bytes} bytes can't go into slots for {self.payload_bytes}"
        elif len(self._workers) >= self.limits.workers:
            refusal = f"{self.limits.workers} workers are connected, no more are served"
        if refusal is not None:
            self._out.append(Send(ref, Refused(refusal)))
            self._out.append(Disconnect(ref, refusal))
            return
        for older in self._live():
            if older.ref.worker_id == ref.worker_id:
                self._fence(older, "a newer start of the same worker has connected")
        worker = self._workers[ref] = Worker(ref, hello)
        root = root_key(hello.root_fields)
        if not self._misses.knows_root(root):
            self._misses.add_root(root, hello.root_fields)
            self._out.append(SaveRoots(self._misses.roots()))
        total = self.num_slots * self.slot_bytes
        self._send(worker, Welcome(self.node_id, self.incarnation, total, self.slot_bytes))

    def _worker_gone(self, ref: WorkerRef) -> None:
        worker = self._workers.pop(ref, None)
        if worker is None:
            return
        worker.fenced = True
        worker.wanted = 0
        self._wants.pop(worker, None)
        for request in list(worker.requests.values()):
            self._release(request, 0)
        for grant in list(worker.grants.values()):
            self._end_grant(worker, grant)
            self._free.append(grant.slot)

    def _fence(self, worker: Worker, reason: str) -> None:
        if not worker.fenced:
            worker.fenced = True
            worker.wanted = 0
            self._wants.pop(worker, None)
            self._out.append(Disconnect(worker.ref, reason))

    # ---- stored pages ------------------------------------------------------------------------------------------

    def _stored(self, worker: Worker, message: Stored) -> None:
        request = None if message.hold_for is None else self._request(worker, message.hold_for)
        for stored in message.pages:
            wrong = _malformed(stored)
            if wrong:
                self._fence(worker, f"it stored a page with {wrong}")
                break
            if self._end_grant(worker, stored.grant):
                copy = self._seal(worker, stored)
                if request is not None and copy not in request.held:
                    request.held[copy] = None
                    copy.readers += 1
                    copy.holds += 1
                    self._held += copy.holds == 1
            else:
                self._note(
                    f"worker {worker.ref.worker_id} stored into slot {stored.grant.slot}, which isn't granted to it"
                )
        if request is not None:
            self._forget_if_over(request)

    def _seal(self, worker: Worker, stored: StoredPage) -> HostCopy:
        """The page's copy in L3 from now on: the one that was there before, else the one just stored."""
        page_id = (stored.key, stored.variant)
        page = self._pages.get(page_id)
        if page is not None and page.host is not None:
            self._free.append(stored.grant.slot)
            page.last_use = self._now
            return page.host
        if page is None:
            page = self._create(_envelope(worker.hello, stored), stored.content)
        page.last_use = self._now
        self._host_counters.demoted_pages += 1
        self._host_counters.bytes_in += self.payload_bytes
        copy = self._arrive(page, stored.grant)
        self._serve_waiters(page, copy, from_ssd=False)
        if page.ssd is None and self._ssd is not None and not self._quiesced:
            self._to_write[page] = None
        if stored.content and stored.depth == 0:
            self._misses.add_content(stored.tenant, stored.content, stored.root, page_id)
            if self._misses.unsaved >= self.limits.contents_unsaved:
                self._save_stored()
        return copy

    # ---- lookups and leases ------------------------------------------------------------------------------------

    def _locate(self, worker: Worker, message: Locate) -> None:
        request = self._request(worker, message.request_id)
        if request is None:
            why = f"{self.limits.requests_per_worker} requests of this worker are served, no more are"
            self._send(worker, Located(message.request_id, [], [], Missing(0, "no_room", why)))
            return
        before = list(request.leases.values())
        self._end_waits(request, 0)
        request.leases = {}

        chain, missing = self._find(message)
        host: list[HostPage] = []
        loading: list[int] = []
        for index, page in enumerate(chain):
            page.uses += 1
            page.last_use = self._now
            if page.ssd is not None:
                self._touched[page] = None
            copy = page.host
            if copy is not None:
                copy.readers += 1
                request.leases[index] = copy
                host.append(HostPage(index, copy.grant, page.envelope.checksum, page.envelope.tokens, False))
            else:
                self._wait_for(page, request, index)
                loading.append(index)

        for copy in before:
            self._end_read(copy)
        self._forget_if_over(request)
        if len(self._touched) >= self.limits.persist_every:
            self._persist_uses()
        self._send(worker, Located(message.request_id, host, loading, missing))

    def _find(self, message: Locate) -> tuple[list[Page], Missing | None]:
        """The pages of the chain that are here and worth having, and why there are no more."""
        if self.num_slots == 0:
            return [], Missing(0, "cache_off", "the node has no L3") if message.keys else None
        chain: list[Page] = []
        missing: Missing | None = None
        first_load: int | None = None
        to_load = 0
        for index, key in enumerate(message.keys):
            if index == self.limits.keys_per_locate:
                missing = Missing(index, "no_room", f"a chain is looked up for at most {index} pages")
                break
            page = self._pages.get((key, message.variant))
            if page is None or not self._fits(page, message.tenant):
                content = message.first_content if index == 0 else b""
                gone = self._misses.why((key, message.variant), message.root, message.tenant, content)
                missing = Missing(index, gone.reason, gone.detail)
                break
            if page.host is None:
                first_load = index if first_load is None else first_load
                to_load += page.load is None
            chain.append(page)
        if first_load is not None and message.recompute_s > 0:
            ahead = len(self._queue) + len(self._reads)
            load_s = (ahead + to_load) * self.payload_bytes / self._bandwidth.at(self._now)
            compute_s = (len(chain) - first_load) * message.recompute_s
            if load_s > compute_s:
                detail = (
                    f"loading from L4 would take {load_s * 1e3:.1f} ms ({ahead} pages ahead), "
                    f"computing {compute_s * 1e3:.1f} ms"
                )
                return chain[:first_load], Missing(first_load, "costlier", detail)
        return chain, missing

    def _fits(self, page: Page, tenant: bytes) -> bool:
        # Keys are salted per tenant and digest the page's shape, so a page found by key fits; this is the second lock.
        return page.envelope.tenant == tenant and page.envelope.payload_bytes == self.payload_bytes

    def _copied(self, worker: Worker, message: Copied) -> None:
        request = worker.requests.get(message.request_id)
        if request is None:
            return
        corrupt = set(message.corrupt)
        for index in message.indexes:
            copy = request.leases.pop(index, None)
            if copy is not None:
                if index in corrupt:
                    self._drop_corrupt(copy, "a worker's read")
                self._end_read(copy)
        self._forget_if_over(request)
        self._host_counters.bytes_out += message.nbytes
        if message.indexes:
            self._host_counters.loads_s.append(message.seconds / len(message.indexes))

    def _release(self, request: Request, from_index: int) -> None:
        self._end_waits(request, from_index)
        for index in [i for i in request.leases if i >= from_index]:
            self._end_read(request.leases.pop(index))
        if from_index <= 0:
            for copy in request.held:
                copy.holds -= 1
                self._held -= copy.holds == 0
                self._end_read(copy)
            request.held = {}
        self._forget_if_over(request)

    # ---- L4 -> L3 ----------------------------------------------------------------------------------------------

    def _pump_loads(self) -> None:
        while self._queue and len(self._reads) < self.max_reads:
            grant = self._take_slot()
            if grant is None:
                return
            load = next(iter(self._queue))
            del self._queue[load]
            if not self._reads:
                self._bandwidth.started(self._now)
            load.transfer, load.grant = self._next_transfer(), grant
            self._reads[load.transfer] = load
            self._arriving[grant.slot] = load
            entry = load.source.entry
            key, variant = entry.envelope.key, entry.envelope.variant
            self._out.append(ReadPage(load.transfer, entry.place, grant.slot, key, variant))

    def _read_done(self, transfer: int, envelope: Envelope) -> None:
        if envelope.checksum != self._reads[transfer].source.entry.envelope.checksum:
            self._read_failed(transfer, "corrupt", "the slot holds other bytes than the catalogue says")
            return
        load = self._reads.pop(transfer)
        page, grant = load.page, load.grant
        assert grant is not None
        del self._arriving[grant.slot]
        self._bandwidth.finished(self.payload_bytes, self._now)
        self._ssd_counters.bytes_out += self.payload_bytes
        self._ssd_counters.loads_s.append(self._now - load.queued_at)
        if page.load is load:
            self._host_counters.promoted_pages += 1
            self._host_counters.bytes_in += self.payload_bytes
            copy = self._arrive(page, grant)
            self._serve_waiters(page, copy, from_ssd=True)
        else:
            self._free.append(grant.slot)
        self._end_ssd_read(page, load.source)

    def _read_failed(self, transfer: int, failure: Failure, detail: str) -> None:
        load = self._reads.pop(transfer)
        page, grant = load.page, load.grant
        assert grant is not None
        del self._arriving[grant.slot]
        self._free.append(grant.slot)
        reason = "corrupt" if failure == "corrupt" else "load_failed"
        if page.ssd is load.source:
            self._ssd_counters.corrupt_pages += failure == "corrupt"
            self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._drop_ssd(page)
        self._end_ssd_read(page, load.source)
        self._lost_if_nowhere(page, reason, f"its copy in L4 was {failure} at {self._wall()}")

    # ---- L3 -> L4 ----------------------------------------------------------------------------------------------

    def _pump_writes(self) -> None:
        while self._to_write and len(self._writes) < self.max_writes:
            # A page whose former life is still being written waits: its record must be the later one.
            page = next((p for p in self._to_write if p.id not in self._writing), None)
            if page is None:
                return
            place = self._ssd_place()
            if place is None and (self._leaving or self._reads or self._queue or self._checks):
                return  # room may come when these are done
            del self._to_write[page]
            if place is None:
                continue
            assert page.host is not None
            self._ssd_generation += 1
            entry = CatalogueEntry(
                page.envelope, place, self.slot_bytes, self._ssd_generation, page.content, page.uses
            )
            entry.last_use_s = page.last_use + self._wall_offset_s
            page.host.readers += 1
            write = Write(page, page.host, entry)
            transfer = self._next_transfer()
            self._writes[transfer] = self._writing[page.id] = write
            self._write_commands.append(WritePage(transfer, page.host.grant.slot, entry))

    def _write_done(self, transfer: int) -> None:
        write = self._writes.pop(transfer)
        page = write.page
        del self._writing[page.id]
        self._ssd_counters.bytes_in += self.payload_bytes
        self._host_counters.bytes_out += self.payload_bytes
        self._ssd_failing = False
        if self._pages.get(page.id) is not page:  # it was dropped meanwhile
            self._drops.append(page.id)
            self._free_place(write.entry.place, write.wipe)
        else:
            self._ssd_counters.demoted_pages += 1
            page.ssd = SsdCopy(write.entry)
            self._ssd_pages += 1
            self._settle(page)
        self._end_read(write.copy)

    def _write_failed(self, transfer: int, failure: Failure, detail: str) -> None:
        write = self._writes.pop(transfer)
        del self._writing[write.page.id]
        self._free_place(write.entry.place, wipe=False)
        if failure == "corrupt":
            self._drop_corrupt(write.copy, "the write to L4")
        elif not self._ssd_failing:
            self._ssd_failing = True
            self._note(f"L4 takes no writes, pages stay in L3 alone: {detail}")
        self._end_read(write.copy)

    def _ssd_place(self) -> Place | None:
        assert self._ssd is not None
        for _ in range(self.limits.evictions_per_write):
            place = self._ssd.alloc(self.slot_bytes)
            if place is not None:
                return place
            page = self._ssd_victim(self._ssd_leaves) or self._ssd_victim(self._ssd_inner)
            if page is None:
                return None
            self._ssd_counters.evicted_pages += 1
            self._drop_ssd(page)
            self._lost_if_nowhere(page, "evicted", self._by_lru(page, TierName.SSD))
        return None

    # ---- room in L3 --------------------------------------------------------------------------------------------

    def _pump_grants(self) -> None:
        if self._draining:
            return
        for worker in list(self._wants):
            share = max(1, self.num_slots // (2 * len(self._workers)))
            # Long-lived slots never touch the reserve, so that a load can always go on; see the class docstring.
            lasting = len(self._granted) + self._held + self._pinned
            room = min(worker.wanted, share - len(worker.grants), self.num_slots - self.reserve - lasting)
            grants: list[Grant] = []
            while len(grants) < room and (grant := self._take_slot()) is not None:
                grants.append(grant)
            if not grants:
                continue  # answered when there is one
            for grant in grants:
                worker.grants[grant.slot] = grant
                self._granted[grant.slot] = worker
            worker.wanted = 0
            del self._wants[worker]
            self._send(worker, Granted(grants))

    def _take_slot(self) -> Grant | None:
        """A free slot, made free if need be: clean pages go first, dirty ones only while no write is about to end."""
        if not self._free:
            page = self._host_victim(self._clean)
            if page is None and not self._writes:
                page = self._host_victim(self._dirty) or self._host_victim(self._dirty_inner)
            if page is None:
                return None
            self._host_counters.evicted_pages += 1
            self._drop_host(page)
            self._lost_if_nowhere(page, "evicted", self._by_lru(page, TierName.HOST))
        slot = self._free.pop()
        self._generation[slot] += 1
        return Grant(slot, self._generation[slot])

    # ---- admin verbs -------------------------------------------------------------------------------------------

    def _pin(self, key: bytes) -> Outcome:
        outcome = Outcome.MISSING
        for page in self._named(key):
            outcome = Outcome.ACCEPTED
            if page.pinned:
                continue
            lasting = len(self._granted) + self._held + self._pinned
            if self._pinned >= self._max_pinned() or lasting >= self.num_slots - self.reserve:
                return Outcome.REJECTED
            page.pinned = True
            self._pinned += 1
        return outcome

    def _unpin(self, key: bytes) -> Outcome:
        outcome = Outcome.MISSING
        for page in self._named(key):
            outcome = Outcome.ACCEPTED
            self._pinned -= page.pinned
            page.pinned = False
            self._settle(page)
        return outcome

    def _evict_key(self, key: bytes, tier: TierName | None) -> Outcome:
        outcomes = [self._evict_page(page, tier) for page in self._named(key)]
        for outcome in (Outcome.REJECTED, Outcome.DEFERRED, Outcome.ACCEPTED):
            if outcome in outcomes:
                return outcome
        return Outcome.MISSING

    def _evict_page(self, page: Page, tier: TierName | None) -> Outcome:
        if page.pinned:
            return Outcome.REJECTED
        if tier is None:
            return self._purge(page, "evicted", wipe=False)
        if tier is TierName.HOST and page.host is not None:
            if page.host.readers:
                page.host.leave = True
                return Outcome.DEFERRED
            self._host_counters.evicted_pages += 1
            self._drop_host(page)
        elif tier is TierName.SSD and page.ssd is not None:
            if page.ssd.readers:
                page.ssd.leave = True
                return Outcome.DEFERRED
            self._ssd_counters.evicted_pages += 1
            self._drop_ssd(page)
        else:
            return Outcome.MISSING
        self._lost_if_nowhere(page, "evicted", self._by_request(tier))
        return Outcome.ACCEPTED

    def _purge(self, page: Page, reason: str, *, wipe: bool) -> Outcome:
        """Make the page unfindable now; its memory goes when its readers do."""
        detail = f"{reason} by request at {self._wall()}"
        write = self._writing.get(page.id)
        if write is not None and write.page is page:
            write.wipe = wipe
        busy = False
        if page.host is not None:
            busy |= page.host.readers > 0
            self._host_counters.evicted_pages += 1
            self._drop_host(page)
        if page.ssd is not None:
            busy |= page.ssd.readers > 0
            self._ssd_counters.evicted_pages += 1
            self._drop_ssd(page, wipe=wipe)
        self._lost_if_nowhere(page, reason, detail)
        return Outcome.DEFERRED if busy else Outcome.ACCEPTED

    def _clear(self, tenant: bytes | None) -> list[tuple[bytes, Outcome]]:
        self._misses.forget_tenant(tenant)
        self._save_stored()
        if self._ssd is not None:
            self._forget = ForgetTenant(tenant)
        pages = [p for p in self._pages.values() if tenant is None or p.envelope.tenant == tenant]
        return [(page.envelope.key, self._purge(page, "cleared", wipe=True)) for page in pages]

    def _verify(self, ticket: int, keys: tuple[bytes, ...] | None) -> None:
        pages = self._pages.values() if keys is None else (p for key in keys for p in self._named(key))
        job = Job(
            ticket, keys if keys is not None else tuple(p.envelope.key for p in self._pages.values()), deque()
        )
        for page in pages:
            if page.host is not None:
                job.todo.append((page.id, TierName.HOST))
            if page.ssd is not None:
                job.todo.append((page.id, TierName.SSD))
        self._jobs.append(job)

    def _pump_checks(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            while job.todo and len(self._checks) < self.limits.verifies:
                page_id, tier = job.todo.popleft()
                page = self._pages.get(page_id)
                copy = None if page is None else page.host if tier is TierName.HOST else page.ssd
                if page is None or copy is None:
                    continue
                copy.readers += 1
                job.running += 1
                transfer = self._next_transfer()
                self._checks[transfer] = Check(job, page, copy)
                place = Place(0, copy.grant.slot) if isinstance(copy, HostCopy) else copy.entry.place
                self._out.append(VerifyPage(transfer, tier, place, page.envelope))
            if job.todo or job.running:
                return
            self._jobs.popleft()
            self._answer(job.ticket, ((key, self._verdict(job, key)) for key in dict.fromkeys(job.keys)))

    def _verified(self, transfer: int, failure: Failure | None, detail: str) -> None:
        check = self._checks.pop(transfer)
        page, copy, job = check.page, check.copy, check.job
        job.running -= 1
        job.seen.add(page.envelope.key)
        if failure is not None:
            job.corrupt.add(page.envelope.key)
        if isinstance(copy, HostCopy):
            if failure is not None:
                self._drop_corrupt(copy, "verification")
            self._end_read(copy)
            return
        if failure is not None and page.ssd is copy:
            self._ssd_counters.corrupt_pages += failure == "corrupt"
            self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._drop_ssd(page)
            self._lost_if_nowhere(page, "corrupt", f"its copy in L4 was {failure} at {self._wall()}")
        self._end_ssd_read(page, copy)

    def _verdict(self, job: Job, key: bytes) -> Outcome:
        """ACCEPTED: every copy is whole. CLIPPED: a bad one was dropped, another is whole. MISSING: none is left."""
        if key not in job.seen or not any(True for _ in self._named(key)):
            return Outcome.MISSING
        return Outcome.CLIPPED if key in job.corrupt else Outcome.ACCEPTED

    def _drain(self) -> None:
        self._draining = True
        if self._ssd is None:
            return
        for copy in self._copies.values():
            page = copy.page
            if page.host is copy and page.ssd is None and page.id not in self._writing:
                self._to_write[page] = None


def _envelope(hello: Hello, stored: StoredPage) -> Envelope:
    return Envelope(
        key=PageKey(stored.key),
        variant=stored.variant,
        spec_digest=hello.spec_digest,
        payload_bytes=hello.payload_bytes,
        checksum=stored.checksum,
        root=RootKey(stored.root),
        parent=stored.parent,
        tenant=stored.tenant,
        depth=stored.depth,
        tokens=stored.tokens,
    )


def _malformed(stored: StoredPage) -> str | None:
    """What an envelope couldn't hold of a page's description; None when all is well."""
    for name, value, length in (
        ("key", stored.key, 32),
        ("root", stored.root, 32),
        ("parent", stored.parent, 32),
        ("tenant", stored.tenant, 16),
        ("checksum", stored.checksum, 16),
    ):
        if len(value) != length:
            return f"a {name} of {len(value)} bytes, {length} expected"
    if len(stored.content) not in (0, 16):
        return f"a content digest of {len(stored.content)} bytes, 16 expected"
    if not 0 < len(stored.variant.encode()) <= 16:
        return f"variant {stored.variant!r}, 1 to 16 bytes expected"
    if not 0 < stored.tokens < 2**16:
        return f"{stored.tokens} tokens"
    if not 0 <= stored.depth < 2**32:
        return f"depth {stored.depth}"
    return None
