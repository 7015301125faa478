"""Decides where a node's pages live. Performs no copy, reads no clock, never sees a page's content.

The cache coordinator of a node as a pure state machine: `handle(event, now) -> commands`. It owns the slots of L3, the
catalogue mirror and the slots of L4, the grants and leases of the workers, and every transfer in flight.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtier.tier.base import CatalogueEntry, Outcome, PageInfo, Place, SegmentAllocator
from kvtier.tier.events import (
    Answer,
    Clear,
    Command,
    CommitCatalogue,
    Disconnect,
    Drain,
    Event,
    Evict,
    Failure,
    ForgetTenant,
    FromWorker,
    Note,
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
    VerifyPage,
    WipeSlots,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.identity import root_key
from kvtier.tier.lru import Lru
from kvtier.tier.messages import (
    Copied,
    Grant,
    Granted,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Missing,
    Refused,
    Release,
    ReturnSlots,
    Stored,
    StoredPage,
    ToNode,
    ToWorker,
    WantSlots,
    Welcome,
)
from kvtier.tier.misses import Misses, at
from kvtier.tier.page import Envelope, PageKey, RootKey, TierName, slot_bytes
from kvtier.tier.stats import Snapshot, TierCounters


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a coordinator's tables and of what it has in flight."""

    writes: int = 32  # pages on their way to L4 at once; more batch better, fewer leave more of L3 evictable
    write_bytes: int = 128 * 2**20  # ... and their bytes
    reads: int = 16  # pages on their way up at once; enough to keep the reader threads fed
    verifies: int = 4
    workers: int = 256
    requests_per_worker: int = 4096
    gone: int = 65536  # pages whose leaving `explain` can still tell
    roots: int = 64
    contents: int = 4096
    persist_every: int = 512  # used pages whose use the catalogue doesn't know yet
    evictions_per_write: int = 4096  # L4 pages of other sizes that one page may push out


@dataclass(slots=True, eq=False)
class _HostCopy:
    """A sealed page in an L3 slot. It is findable while `page.host is self`, and stays until its readers are gone."""

    page: _Page
    grant: Grant
    readers: int = 0  # leases, holds, and transfers that read it
    holds: int = 0  # those of the readers that are preempted requests
    leave: bool = False  # to be dropped when the readers are gone


@dataclass(slots=True, eq=False)
class _SsdCopy:
    """A sealed page in L4. It is findable while `page.ssd is self`, and its slot stays until its readers are gone."""

    entry: CatalogueEntry
    readers: int = 0  # loads, queued ones too, and verifications
    leave: bool = False
    wipe: bool = False


@dataclass(slots=True, eq=False)
class _Page:
    """What the node knows of one (key, variant) that at least one tier holds."""

    id: PageId
    envelope: Envelope
    last_use: float
    content: bytes = b""
    uses: int = 0
    pinned: bool = False
    host: _HostCopy | None = None
    ssd: _SsdCopy | None = None
    load: _Load | None = None
    host_order: Lru[_Page] | None = None  # the order its copy in L3 is evicted by; see `_settle`
    ssd_order: Lru[_Page] | None = None

    @property
    def depth(self) -> int:
        """Position in its chain."""
        return self.envelope.depth


@dataclass(slots=True, eq=False)
class _Request:
    """A worker's request as far as this node serves it. Indexes are those of its latest Locate."""

    worker: _Worker
    request_id: str
    leases: dict[int, _HostCopy] = field(default_factory=dict)
    waits: dict[int, _Load] = field(default_factory=dict)
    held: dict[_HostCopy, None] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Nothing is leased to it and nothing is coming."""
        return not (self.leases or self.waits or self.held)


@dataclass(slots=True, eq=False)
class _Worker:
    ref: WorkerRef
    hello: Hello
    grants: dict[int, Grant] = field(default_factory=dict)  # its stock, by slot
    wanted: int = 0
    requests: dict[str, _Request] = field(default_factory=dict)
    fenced: bool = False  # heard no more; its grants and leases stand until it is gone


@dataclass(slots=True, eq=False)
class _Load:
    """A page's way from L4 to L3: queued while `transfer` is None. Abandoned when `page.load is not self`."""

    page: _Page
    source: _SsdCopy
    queued_at: float
    waiters: dict[tuple[_Request, int], None] = field(default_factory=dict)
    transfer: int | None = None
    grant: Grant | None = None


@dataclass(slots=True, eq=False)
class _Write:
    """A page's way from L3 to L4; `entry.place` is reserved."""

    page: _Page
    copy: _HostCopy
    entry: CatalogueEntry
    cancelled: bool = False  # drop what was written
    wipe: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """A Verify call."""

    ticket: int
    keys: tuple[bytes, ...]
    todo: deque[tuple[PageId, TierName]]
    running: int = 0
    seen: set[bytes] = field(default_factory=set)  # keys of which a copy was there
    corrupt: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Check:
    job: _Job
    page: _Page
    copy: _HostCopy | _SsdCopy


class _Bandwidth:
    """Bytes per second of L4 reads while any are under way, averaged with more weight on the recent."""

    PRIOR = (
        1e9  # until measured, and again when the measurement is old: one bad moment must not end all loads
    )
    WINDOW_S = 0.005
    TRUSTED_S = 60.0
    WEIGHT = 0.2

    def __init__(self) -> None:
        self._average = self.PRIOR
        self._measured_at: float | None = None
        self._since = 0.0
        self._bytes = 0

    def started(self, now: float) -> None:
        """Reads begin after a pause."""
        self._since, self._bytes = now, 0

    def finished(self, nbytes: int, now: float) -> None:
        """One read is done."""
        self._bytes += nbytes
        elapsed = now - self._since
        if elapsed >= self.WINDOW_S:
            self._average += self.WEIGHT * (self._bytes / elapsed - self._average)
            self._measured_at = now
            self._since, self._bytes = now, 0

    def at(self, now: float) -> float:
        """The estimate now."""
        if self._measured_at is None or now - self._measured_at > self.TRUSTED_S:
            return self.PRIOR
        return self._average


class Coordinator:
    """All decisions of a node's cache. One owner calls it, from one thread.

    L3 is `num_slots` slots of one size (fewer than two: the tier is off, and with it what it would reach); L4 is what
    `ssd` allocates (None: off), `recovered` its catalogue at the start. `wall_offset_s` is wall clock minus the clock
    of `now`. Invariants are those that `check` states.

    Liveness: grants in stock, held (preempted) and pinned pages may take all slots but `reserve`. What is in the other
    slots goes by itself: it is evictable, being written, or leased to a copy that the worker makes at once. So a load
    always finds a slot sooner or later, however long the queue.
    """

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: str,
        payload_bytes: int,
        num_slots: int,
        ssd: SegmentAllocator | None = None,
        recovered: Sequence[CatalogueEntry] = (),
        roots: Iterable[tuple[bytes, Mapping[str, str]]] = (),
        wall_offset_s: float = 0.0,
        now: float = 0.0,
        limits: Limits | None = None,
    ) -> None:
        self.node_id, self.incarnation = node_id, incarnation
        self.payload_bytes = payload_bytes
        self.slot_bytes = slot_bytes(payload_bytes)
        self.num_slots = num_slots if num_slots >= 2 else 0
        self.reserve = min(self.num_slots, max(1, min(16, self.num_slots // 8)))
        self.limits = limits or Limits()
        self.max_writes = max(
            1, min(self.limits.writes, self.limits.write_bytes // self.slot_bytes, self.num_slots // 2)
        )
        self.max_reads = max(1, min(self.limits.reads, self.num_slots // 4))

        self._now = now
        self._wall_offset_s = wall_offset_s
        self._pages: dict[PageId, _Page] = {}
        self._variants: Counter[str] = Counter()  # pages of each variant
        self._children: dict[PageId, int] = {}  # pages here whose parent this is, where there are any
        self._pinned = 0
        self._misses = Misses(self.limits.gone, self.limits.roots, self.limits.contents)

        self._free = list(range(self.num_slots - 1, -1, -1))
        self._generation = [0] * self.num_slots
        self._granted: dict[int, _Worker] = {}
        self._copies: dict[int, _HostCopy] = {}
        self._arriving: dict[int, _Load] = {}
        self._held = 0  # copies with holds
        self._clean: Lru[_Page] = Lru()
        self._dirty: Lru[_Page] = Lru()
        self._dirty_inner: Lru[_Page] = Lru()

        self._ssd = ssd
        self._ssd_leaves: Lru[_Page] = Lru()
        self._ssd_inner: Lru[_Page] = Lru()
        self._ssd_pages = 0
        self._leaving: dict[_SsdCopy, None] = {}  # dropped from the catalogue, still being read
        self._ssd_generation = max((e.generation for e in recovered), default=0)
        self._ssd_failing = False
        self._touched: dict[_Page, None] = {}

        self._workers: dict[WorkerRef, _Worker] = {}
        self._wants: dict[_Worker, None] = {}
        self._transfer = 0
        self._queue: dict[_Load, None] = {}
        self._reads: dict[int, _Load] = {}
        self._to_write: dict[_Page, None] = {}
        self._writes: dict[int, _Write] = {}
        self._writing: dict[PageId, _Write] = {}
        self._jobs: deque[_Job] = deque()
        self._checks: dict[int, _Check] = {}
        self._draining = False
        self._quiesced = False
        self._bandwidth = _Bandwidth()
        self._host_counters = TierCounters()
        self._ssd_counters = TierCounters()

        self._out: list[Command] = []
        self._drops: list[PageId] = []
        self._wipes: list[Place] = []
        self._forget: ForgetTenant | None = None
        self._write_commands: list[WritePage] = []
        self._answers: list[Answer] = []
        for root, fields in roots:
            self._misses.add_root(root, fields)
        self._recover(recovered)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; `now` never goes back. Commands are to be carried out in their order."""
        self._now = now
        self._apply(event)
        self._pump_writes()
        self._pump_loads()
        self._pump_grants()
        self._pump_checks()
        return self._take_commands()

    # ---- what others may ask -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight or waiting, and nothing is leased (pins and stocks aside)."""
        return self.is_written and not (
            self._queue or self._reads or self._checks or self._jobs or any(w.requests for w in self._live())
        )

    @property
    def is_written(self) -> bool:
        """No page waits for L4."""
        return not (self._to_write or self._writes)

    def snapshot(self) -> Snapshot:
        """The counters of L3 and L4. Hits are counted by the workers, at a request's first token."""
        host = replace(self._host_counters, loads_s=self._host_counters.loads_s.copy())
        host.capacity_bytes = self.num_slots * self.slot_bytes
        host.used_bytes = (self.num_slots - len(self._free)) * self.slot_bytes
        host.pages = sum(copy.page.host is copy for copy in self._copies.values())
        ssd = replace(self._ssd_counters, loads_s=self._ssd_counters.loads_s.copy())
        if self._ssd is not None:
            ssd.capacity_bytes, ssd.used_bytes = self._ssd.capacity_bytes, self._ssd.used_bytes
            ssd.pages = self._ssd_pages
        return Snapshot(tiers={TierName.HOST: host, TierName.SSD: ssd})

    def pages(self, tenant: bytes | None, tier: TierName | None, limit: int, now: float) -> list[PageInfo]:
        """Copies of a tenant's pages (None: of all) in a tier (None: in both), at most `limit`."""
        found: list[PageInfo] = []
        for page in self._pages.values():
            if tenant is not None and page.envelope.tenant != tenant:
                continue
            for name, copy in ((TierName.HOST, page.host), (TierName.SSD, page.ssd)):
                if copy is not None and tier in (None, name):
                    found.append(self._info(page, name, copy.readers, "sealed", now))
            if page.load is not None and page.load.transfer is not None and tier in (None, TierName.HOST):
                found.append(self._info(page, TierName.HOST, 0, "arriving", now))
            if len(found) >= limit:
                return found[:limit]
        return found

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
        worker = self._workers[ref] = _Worker(ref, hello)
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

    def _fence(self, worker: _Worker, reason: str) -> None:
        if not worker.fenced:
            worker.fenced = True
            worker.wanted = 0
            self._wants.pop(worker, None)
            self._out.append(Disconnect(worker.ref, reason))

    # ---- stored pages ------------------------------------------------------------------------------------------

    def _stored(self, worker: _Worker, message: Stored) -> None:
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

    def _seal(self, worker: _Worker, stored: StoredPage) -> _HostCopy:
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
            self._misses.add_content(stored.tenant, stored.content, stored.root)
        return copy

    def _arrive(self, page: _Page, grant: Grant) -> _HostCopy:
        copy = _HostCopy(page, grant)
        self._copies[grant.slot] = copy
        page.host = copy
        self._settle(page)
        return copy

    # ---- lookups and leases ------------------------------------------------------------------------------------

    def _locate(self, worker: _Worker, message: Locate) -> None:
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

    def _find(self, message: Locate) -> tuple[list[_Page], Missing | None]:
        """The pages of the chain that are here and worth having, and why there are no more."""
        if self.num_slots == 0:
            return [], Missing(0, "cache_off", "the node has no L3") if message.keys else None
        chain: list[_Page] = []
        missing: Missing | None = None
        first_load: int | None = None
        to_load = 0
        for index, key in enumerate(message.keys):
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

    def _fits(self, page: _Page, tenant: bytes) -> bool:
        # Keys are salted per tenant and digest the page's shape, so a page found by key fits; this is the second lock.
        return page.envelope.tenant == tenant and page.envelope.payload_bytes == self.payload_bytes

    def _copied(self, worker: _Worker, message: Copied) -> None:
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

    def _release(self, request: _Request, from_index: int) -> None:
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

    def _request(self, worker: _Worker, request_id: str) -> _Request | None:
        request = worker.requests.get(request_id)
        if request is None and len(worker.requests) < self.limits.requests_per_worker:
            request = worker.requests[request_id] = _Request(worker, request_id)
        return request

    def _forget_if_over(self, request: _Request) -> None:
        if request.is_over:
            request.worker.requests.pop(request.request_id, None)

    def _end_read(self, copy: _HostCopy) -> None:
        copy.readers -= 1
        if copy.readers:
            return
        page = copy.page
        if page.host is not copy:
            self._free_slot(copy)
        elif copy.leave:
            self._drop_host(page)
            self._lost_if_nowhere(page, "evicted", self._by_request(TierName.HOST))
        else:
            self._settle(page)

    # ---- L4 -> L3 ----------------------------------------------------------------------------------------------

    def _wait_for(self, page: _Page, request: _Request, index: int) -> None:
        load = page.load
        if load is None:
            assert page.ssd is not None
            load = page.load = _Load(page, page.ssd, self._now)
            page.ssd.readers += 1
            self._queue[load] = None
        load.waiters[request, index] = None
        request.waits[index] = load

    def _end_waits(self, request: _Request, from_index: int) -> None:
        """Ends a request's waits; a queued load that nobody waits for is given up, a running one goes on."""
        for index in [i for i in request.waits if i >= from_index]:
            load = request.waits.pop(index)
            del load.waiters[request, index]
            if not load.waiters and load.page.load is load:
                self._unqueue(load)

    def _unqueue(self, load: _Load) -> None:
        if load.transfer is None:
            load.page.load = None
            del self._queue[load]
            self._end_ssd_read(load.page, load.source)

    def _serve_waiters(self, page: _Page, copy: _HostCopy, *, from_ssd: bool) -> None:
        """The page is in L3: all that wait for it get a lease. A load that another way overtook is abandoned."""
        load, page.load = page.load, None
        if load is None:
            return
        for request, index in load.waiters:
            del request.waits[index]
            request.leases[index] = copy
            copy.readers += 1
            found = HostPage(index, copy.grant, page.envelope.checksum, page.envelope.tokens, from_ssd)
            self._send(request.worker, Loaded(request.request_id, [found]))
        load.waiters = {}
        if load.transfer is None:
            del self._queue[load]
            self._end_ssd_read(page, load.source)

    def _fail_waiters(self, page: _Page, reason: str, detail: str) -> None:
        """The page will not come: chains that wait for it end there. Its load is abandoned."""
        load, page.load = page.load, None
        if load is None:
            return
        for request, index in list(load.waiters):
            if request.waits.get(index) is load:
                self._send(request.worker, LoadFailed(request.request_id, Missing(index, reason, detail)))
                self._end_waits(request, index)
                self._forget_if_over(request)
        if load.transfer is None:
            del self._queue[load]
            self._end_ssd_read(page, load.source)

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
            self._fail_waiters(page, reason, f"the copy in L4 couldn't be read: {detail}")
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
            write = _Write(page, page.host, entry)
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
        if write.cancelled or self._pages.get(page.id) is not page:
            self._drops.append(page.id)
            self._free_place(write.entry.place, write.wipe)
        else:
            self._ssd_counters.demoted_pages += 1
            page.ssd = _SsdCopy(write.entry)
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

    def _end_grant(self, worker: _Worker, grant: Grant) -> bool:
        """The grant is used up or given back; False when it isn't this worker's, or is of an earlier generation."""
        if worker.grants.get(grant.slot) != grant:
            return False
        del worker.grants[grant.slot], self._granted[grant.slot]
        return True

    # ---- the orders of eviction --------------------------------------------------------------------------------

    def _settle(self, page: _Page) -> None:
        """Put the page's copies into the orders they are evicted by. Leaves of the forest of chains come before inner
        pages, so that what stays can still be found by its prefix; a clean copy in L3 is no loss, so any will do.

        A copy that turns out to be in use when its turn comes leaves its order, and is settled again after use.
        """
        is_inner = page.id in self._children
        order: Lru[_Page] | None = None
        if page.host is not None:
            order = self._clean if page.ssd is not None else self._dirty_inner if is_inner else self._dirty
        if order is not page.host_order:
            if page.host_order is not None:
                page.host_order.discard(page)
            if order is not None:
                order.add(page)
            page.host_order = order
        order = None
        if page.ssd is not None:
            order = self._ssd_inner if is_inner else self._ssd_leaves
        if order is not page.ssd_order:
            if page.ssd_order is not None:
                page.ssd_order.discard(page)
            if order is not None:
                order.add(page)
            page.ssd_order = order

    def _host_victim(self, order: Lru[_Page]) -> _Page | None:
        while (page := order.oldest()) is not None:
            assert page.host is not None
            if not page.host.readers and not page.pinned:
                return page
            order.discard(page)
            page.host_order = None
        return None

    def _ssd_victim(self, order: Lru[_Page]) -> _Page | None:
        while (page := order.oldest()) is not None:
            assert page.ssd is not None
            if not page.ssd.readers and not page.pinned:
                return page
            order.discard(page)
            page.ssd_order = None
        return None

    # ---- pages come and go -------------------------------------------------------------------------------------

    def _create(self, envelope: Envelope, content: bytes) -> _Page:
        page = _Page(
            (envelope.key, envelope.variant), envelope, self._now, content if envelope.depth == 0 else b""
        )
        self._pages[page.id] = page
        self._variants[envelope.variant] += 1
        self._misses.came(page.id)
        parent = _parent(page)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            if self._children[parent] == 1 and parent in self._pages:
                self._settle(self._pages[parent])
        return page

    def _lost_if_nowhere(self, page: _Page, reason: str, detail: str) -> None:
        """Forget a page whose last copy is gone."""
        if page.host is not None or page.ssd is not None or self._pages.get(page.id) is not page:
            return
        self._fail_waiters(page, reason, detail)
        del self._pages[page.id]
        self._touched.pop(page, None)
        self._pinned -= page.pinned
        page.pinned = False
        self._variants[page.id[1]] -= 1
        if not self._variants[page.id[1]]:
            del self._variants[page.id[1]]
        self._misses.left(page.id, reason, detail)
        parent = _parent(page)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._pages:
                    self._settle(self._pages[parent])

    def _drop_host(self, page: _Page) -> None:
        copy, page.host = page.host, None
        assert copy is not None
        self._to_write.pop(page, None)
        self._settle(page)
        if not copy.readers:
            self._free_slot(copy)

    def _drop_ssd(self, page: _Page, *, wipe: bool = False) -> None:
        """The record goes now, the slot when its readers are gone."""
        copy, page.ssd = page.ssd, None
        assert copy is not None
        self._ssd_pages -= 1
        self._drops.append(page.id)
        self._touched.pop(page, None)
        self._settle(page)
        if copy.readers:
            copy.wipe = wipe
            self._leaving[copy] = None
        else:
            self._free_place(copy.entry.place, wipe)

    def _end_ssd_read(self, page: _Page, copy: _SsdCopy) -> None:
        copy.readers -= 1
        if copy.readers:
            return
        if copy in self._leaving:
            del self._leaving[copy]
            self._free_place(copy.entry.place, copy.wipe)
        elif copy.leave:
            self._drop_ssd(page)
            self._lost_if_nowhere(page, "evicted", self._by_request(TierName.SSD))
        else:
            self._settle(page)

    def _free_slot(self, copy: _HostCopy) -> None:
        del self._copies[copy.grant.slot]
        self._free.append(copy.grant.slot)

    def _free_place(self, place: Place, wipe: bool) -> None:
        assert self._ssd is not None
        self._ssd.free(place)
        if wipe:
            self._wipes.append(place)

    def _drop_corrupt(self, copy: _HostCopy, found_by: str) -> None:
        """A copy in L3 failed its checksum: it is never served again, whoever still reads it."""
        page = copy.page
        if page.host is not copy:
            return
        self._host_counters.corrupt_pages += 1
        self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L3: {found_by} found it corrupt")
        self._cancel_write(page, wipe=False)
        self._drop_host(page)
        self._lost_if_nowhere(page, "corrupt", f"its copy in L3 was corrupt at {self._wall()}")

    def _cancel_write(self, page: _Page, *, wipe: bool) -> bool:
        write = self._writing.get(page.id)
        if write is None or write.page is not page:
            return False
        write.cancelled, write.wipe = True, wipe
        return True

    # ---- admin verbs -------------------------------------------------------------------------------------------

    def _answer(self, ticket: int, results: Iterable[tuple[bytes, Outcome]]) -> None:
        self._answers.append(Answer(ticket, tuple(results)))

    def _named(self, key: bytes) -> Iterator[_Page]:
        """The pages of a key, one per variant."""
        for variant in list(self._variants):
            page = self._pages.get((key, variant))
            if page is not None:
                yield page

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

    def _max_pinned(self) -> int:
        """Pins may take half of the smallest tier that is on: there is always something to evict."""
        if self._ssd is None:
            return self.num_slots // 2
        return min(self.num_slots, self._ssd.capacity_bytes // self.slot_bytes) // 2

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

    def _evict_page(self, page: _Page, tier: TierName | None) -> Outcome:
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

    def _purge(self, page: _Page, reason: str, *, wipe: bool) -> Outcome:
        """Make the page unfindable now; its memory goes when its readers do."""
        detail = f"{reason} by request at {self._wall()}"
        self._fail_waiters(page, reason, detail)
        busy = self._cancel_write(page, wipe=wipe)
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
        if self._ssd is not None:
            self._forget = ForgetTenant(tenant)
        pages = [p for p in self._pages.values() if tenant is None or p.envelope.tenant == tenant]
        return [(page.envelope.key, self._purge(page, "cleared", wipe=True)) for page in pages]

    def _verify(self, ticket: int, keys: tuple[bytes, ...] | None) -> None:
        pages = self._pages.values() if keys is None else (p for key in keys for p in self._named(key))
        job = _Job(
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
                self._checks[transfer] = _Check(job, page, copy)
                place = Place(0, copy.grant.slot) if isinstance(copy, _HostCopy) else copy.entry.place
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
        if isinstance(copy, _HostCopy):
            if failure is not None:
                self._drop_corrupt(copy, "verification")
            self._end_read(copy)
            return
        if failure is not None and page.ssd is copy:
            self._fail_waiters(page, "corrupt", f"the copy in L4 is {failure}")
            self._ssd_counters.corrupt_pages += failure == "corrupt"
            self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._drop_ssd(page)
            self._lost_if_nowhere(page, "corrupt", f"its copy in L4 was {failure} at {self._wall()}")
        self._end_ssd_read(page, copy)

    def _verdict(self, job: _Job, key: bytes) -> Outcome:
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

    # ---- the rest ----------------------------------------------------------------------------------------------

    def _recover(self, recovered: Sequence[CatalogueEntry]) -> None:
        for entry in recovered:
            page = self._create(entry.envelope, entry.content)
            page.ssd = _SsdCopy(entry)
            page.uses = entry.uses
            page.last_use = min(self._now, entry.last_use_s - self._wall_offset_s)
            self._ssd_pages += 1
            if page.content:
                self._misses.add_content(entry.envelope.tenant, page.content, entry.envelope.root)
        for page in self._pages.values():
            self._settle(page)

    def _persist_uses(self) -> None:
        puts = []
        for page in self._touched:
            assert page.ssd is not None
            wall_s = page.last_use + self._wall_offset_s
            page.ssd.entry = replace(page.ssd.entry, uses=page.uses, last_use_s=wall_s)
            puts.append(page.ssd.entry)
        self._touched = {}
        if puts:
            self._out.append(CommitCatalogue(tuple(puts), ()))

    def _take_commands(self) -> list[Command]:
        # Dropped records are committed, and wiped slots wiped, before anything is written into their slots.
        commands, self._out = self._out, []
        if self._drops:
            commands.append(CommitCatalogue((), tuple(self._drops)))
            self._drops = []
        if self._wipes:
            commands.append(WipeSlots(tuple(self._wipes)))
            self._wipes = []
        if self._forget is not None:
            commands.append(self._forget)
            self._forget = None
        commands.extend(self._write_commands)
        self._write_commands = []
        commands.extend(self._answers)
        self._answers = []
        return commands

    def _send(self, worker: _Worker, message: ToWorker) -> None:
        if not worker.fenced:
            self._out.append(Send(worker.ref, message))

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    def _next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer

    def _live(self) -> list[_Worker]:
        return list(self._workers.values())

    def _wall(self) -> str:
        return at(self._now + self._wall_offset_s)

    def _by_lru(self, page: _Page, tier: TierName) -> str:
        idle_s = max(0.0, self._now - page.last_use)
        return f"evicted from {tier} by lru, score = idle {idle_s:.1f} s, at {self._wall()}"

    def _by_request(self, tier: TierName) -> str:
        return f"evicted from {tier} by request at {self._wall()}"

    def _info(self, page: _Page, tier: TierName, readers: int, state: str, now: float) -> PageInfo:
        envelope = page.envelope
        return PageInfo(
            key=envelope.key.hex(),
            tier=tier,
            owner=self.node_id,
            tenant=envelope.tenant.hex(),
            root=envelope.root.hex(),
            parent=envelope.parent.hex(),
            variant=envelope.variant,
            depth=envelope.depth,
            tokens=envelope.tokens,
            nbytes=envelope.payload_bytes,
            uses=page.uses,
            idle_s=max(0.0, now - page.last_use),
            pinned=page.pinned,
            readers=readers,
            state=state,
        )

    # ---- the invariants ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Re-derive every counter and table from scratch; AssertionError names what doesn't hold."""
        self._check_slots()
        self._check_readers()
        self._check_transfers()
        self._check_pages()
        self._check_ssd()
        self._misses.check()
        for order in (self._clean, self._dirty, self._dirty_inner, self._ssd_leaves, self._ssd_inner):
            order.check()
        assert not (self._drops or self._wipes or self._write_commands or self._answers or self._out)

    def _check_slots(self) -> None:
        """Each slot is free, granted, arriving or sealed, and exactly one of these."""
        parts = (self._free, self._granted, self._arriving, self._copies)
        assert sorted(slot for part in parts for slot in part) == list(range(self.num_slots)), "slots leak"
        for slot, worker in self._granted.items():
            assert self._workers.get(worker.ref) is worker
            assert worker.grants[slot] == Grant(slot, self._generation[slot])
        assert len(self._granted) == sum(len(w.grants) for w in self._live())
        for slot, copy in self._copies.items():
            assert copy.grant == Grant(slot, self._generation[slot])
            assert copy.page.host is copy or copy.readers, "a copy that can't be found and isn't read"
        held = sum(copy.holds > 0 for copy in self._copies.values())
        assert self._held == held
        assert len(self._granted) + held <= max(0, self.num_slots - self.reserve), "the reserve is taken"

    def _check_readers(self) -> None:
        """Readers are exactly the leases, holds and transfers; only sealed copies have any."""
        readers: Counter[_HostCopy | _SsdCopy] = Counter()
        holds: Counter[_HostCopy] = Counter()
        for worker in self._live():
            assert len(worker.requests) <= self.limits.requests_per_worker
            for request_id, request in worker.requests.items():
                assert request.request_id == request_id and request.worker is worker and not request.is_over
                readers.update(request.leases.values())
                readers.update(request.held.keys())
                holds.update(request.held.keys())
                for index, load in request.waits.items():
                    assert (request, index) in load.waiters and load.page.load is load
        readers.update(write.copy for write in self._writes.values())
        readers.update(load.source for load in self._queue)
        readers.update(load.source for load in self._reads.values())
        readers.update(check.copy for check in self._checks.values())
        copies: set[_HostCopy | _SsdCopy] = set(self._copies.values())
        copies.update(page.ssd for page in self._pages.values() if page.ssd is not None)
        copies.update(self._leaving)
        assert readers.keys() <= copies, "a reader of what no tier holds"
        for copy in copies:
            assert copy.readers == readers[copy], "readers miscounted"
            assert not isinstance(copy, _HostCopy) or copy.holds == holds[copy]
        assert all(copy.readers for copy in self._leaving)

    def _check_transfers(self) -> None:
        """Each arriving copy belongs to one transfer; nothing waits that could go on."""
        assert len(self._reads) <= self.max_reads and len(self._writes) <= self.max_writes
        assert len(self._checks) <= self.limits.verifies
        for slot, load in self._arriving.items():
            assert load.grant is not None and load.grant.slot == slot
            assert load.transfer is not None and self._reads[load.transfer] is load
        assert len(self._arriving) == len(self._reads)
        for load in [*self._queue, *self._reads.values()]:
            if load.page.load is load:
                assert load.page.host is None and load.page.ssd is load.source
            else:
                assert load.transfer is not None and not load.waiters, "an abandoned load is still waited for"
            for request, index in load.waiters:
                assert request.waits[index] is load
        for load in self._queue:
            assert load.waiters and load.transfer is None
        if self._queue and len(self._reads) < self.max_reads:
            assert self._take_none(), "a load waits though a slot could be had"
        assert self._writing == {write.page.id: write for write in self._writes.values()}
        assert len(self._writing) == len(self._writes)
        for page in self._to_write:
            assert page.host is not None and page.ssd is None and self._pages[page.id] is page
        for worker in self._wants:
            assert worker.wanted > 0 and not worker.fenced and self._workers[worker.ref] is worker

    def _take_none(self) -> bool:
        """Is there truly no slot for a load?"""
        listed = [
            c for c in self._copies.values() if c.page.host is c and not c.readers and not c.page.pinned
        ]
        if self._writes:
            listed = [copy for copy in listed if copy.page.ssd is not None]
        return not self._free and not listed

    def _check_pages(self) -> None:
        """Pages, their children and pins, and the orders they are evicted by."""
        children: Counter[PageId] = Counter()
        for page_id, page in self._pages.items():
            assert page.id == page_id == (page.envelope.key, page.envelope.variant)
            assert page.host is not None or page.ssd is not None, "a page that no tier holds"
            parent = _parent(page)
            if parent is not None:
                children[parent] += 1
            if page.host is not None:
                assert self._copies[page.host.grant.slot] is page.host
                dirty = self._dirty_inner if page.id in self._children else self._dirty
                order = self._clean if page.ssd is not None else dirty
                assert page.host_order is None or (page.host_order is order and page in order)
                assert page.host_order or page.host.readers or page.pinned, (
                    "a copy in L3 that can't be evicted"
                )
            if page.ssd is not None:
                order = self._ssd_inner if page.id in self._children else self._ssd_leaves
                assert page.ssd_order is None or (page.ssd_order is order and page in order)
                assert page.ssd_order or page.ssd.readers or page.pinned, "a copy in L4 that can't be evicted"
        assert children == self._children
        assert self._variants == Counter(variant for _, variant in self._pages)
        assert self._pinned == sum(page.pinned for page in self._pages.values()) <= self._max_pinned()
        assert all(self._pages[page.id] is page and page.ssd is not None for page in self._touched)
        orders = (self._clean, self._dirty, self._dirty_inner)
        assert sum(map(len, orders)) == sum(p.host_order is not None for p in self._pages.values())

    def _check_ssd(self) -> None:
        """L4's slots are exactly those of its pages, of pages leaving, and of writes in flight."""
        if self._ssd is None:
            assert not (self._ssd_pages or self._writes or self._to_write or self._leaving)
            return
        sealed = [page.ssd for page in self._pages.values() if page.ssd is not None]
        assert self._ssd_pages == len(sealed)
        entries = [c.entry for c in (*sealed, *self._leaving)] + [w.entry for w in self._writes.values()]
        assert len({e.place for e in entries}) == len(entries), "two pages in one slot"
        assert self._ssd.used_bytes == sum(e.slot_bytes for e in entries) <= self._ssd.capacity_bytes


def _parent(page: _Page) -> PageId | None:
    return None if page.envelope.depth == 0 else (page.envelope.parent, page.envelope.variant)


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
