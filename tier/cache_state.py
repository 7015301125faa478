"""The tables of a node's cache, and the moves that keep them consistent with each other; coordinator.py decides. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtier.tier.base import CatalogueEntry, Outcome, PageInfo, Place, SegmentAllocator
from kvtier.tier.events import (
    Answer,
    Command,
    CommitCatalogue,
    ForgetTenant,
    Note,
    PageId,
    SaveStored,
    Send,
    StoredBefore,
    WipeSlots,
    WorkerRef,
    WritePage,
)
from kvtier.tier.lru import Lru
from kvtier.tier.messages import Grant, HostPage, Loaded, LoadFailed, Missing, ToWorker
from kvtier.tier.misses import Misses, at
from kvtier.tier.page import Envelope, TierName, slot_bytes
from kvtier.tier.records import (
    Bandwidth,
    Check,
    HostCopy,
    Job,
    Limits,
    Load,
    Page,
    Request,
    SsdCopy,
    Worker,
    Write,
    parent_id,
)
from kvtier.tier.stats import Snapshot, TierCounters


class CacheState:
    """All that a node knows of its cache: slots, pages, workers, requests and transfers, and the commands to give.

    `check` states the invariants; every event leaves them true.
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
        lost: Sequence[CatalogueEntry] = (),
        roots: Iterable[tuple[bytes, Mapping[str, str]]] = (),
        stored_before: StoredBefore | None = None,
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
        self._pages: dict[PageId, Page] = {}
        self._variants: Counter[str] = Counter()  # pages of each variant
        self._children: dict[PageId, int] = {}  # pages here whose parent this is, where there are any
        self._pinned = 0
        self._misses = Misses(self.limits.gone, self.limits.roots, self.limits.contents)

        self._free = list(range(self.num_slots - 1, -1, -1))
        self._generation = [0] * self.num_slots
        self._granted: dict[int, Worker] = {}
        self._copies: dict[int, HostCopy] = {}
        self._arriving: dict[int, Load] = {}
        self._held = 0  # copies with holds
        self._clean: Lru[Page] = Lru()
        self._dirty: Lru[Page] = Lru()
        self._dirty_inner: Lru[Page] = Lru()

        self._ssd = ssd
        self._ssd_leaves: Lru[Page] = Lru()
        self._ssd_inner: Lru[Page] = Lru()
        self._ssd_pages = 0
        self._leaving: dict[SsdCopy, None] = {}  # dropped from the catalogue, still being read
        self._ssd_generation = max((e.generation for e in recovered), default=0)
        self._ssd_failing = False
        self._touched: dict[Page, None] = {}

        self._workers: dict[WorkerRef, Worker] = {}
        self._wants: dict[Worker, None] = {}
        self._transfer = 0
        self._queue: dict[Load, None] = {}
        self._reads: dict[int, Load] = {}
        self._to_write: dict[Page, None] = {}
        self._writes: dict[int, Write] = {}
        self._writing: dict[PageId, Write] = {}
        self._jobs: deque[Job] = deque()
        self._checks: dict[int, Check] = {}
        self._draining = False
        self._quiesced = False
        self._bandwidth = Bandwidth()
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
        if stored_before is not None:
            self._misses.recall(stored_before)
        self._recover(recovered)
        self._mourn(lost)

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

    # ---- pages come and go -------------------------------------------------------------------------------------

    def _recover(self, recovered: Sequence[CatalogueEntry]) -> None:
        for entry in recovered:
            page = self._create(entry.envelope, entry.content)
            page.ssd = SsdCopy(entry)
            page.uses = entry.uses
            page.last_use = min(self._now, entry.last_use_s - self._wall_offset_s)
            self._ssd_pages += 1
            if page.content:
                self._misses.add_content(entry.envelope.tenant, page.content, entry.envelope.root, page.id)
        for page in self._pages.values():
            self._settle(page)

    def _mourn(self, lost: Sequence[CatalogueEntry]) -> None:
        detail = f"its place in the files of L4 was gone when the node started at {self._wall()}"
        for entry in lost:
            envelope = entry.envelope
            page_id = (envelope.key, envelope.variant)
            if entry.content:
                self._misses.add_content(envelope.tenant, entry.content, envelope.root, page_id)
            self._misses.left(page_id, "lost", detail)

    def _create(self, envelope: Envelope, content: bytes) -> Page:
        page = Page(
            (envelope.key, envelope.variant), envelope, self._now, content if envelope.depth == 0 else b""
        )
        self._pages[page.id] = page
        self._variants[envelope.variant] += 1
        self._misses.came(page.id)
        parent = parent_id(page)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            if self._children[parent] == 1 and parent in self._pages:
                self._settle(self._pages[parent])
        return page

    def _arrive(self, page: Page, grant: Grant) -> HostCopy:
        copy = HostCopy(page, grant)
        self._copies[grant.slot] = copy
        page.host = copy
        self._settle(page)
        return copy

    def _lost_if_nowhere(self, page: Page, reason: str, detail: str) -> None:
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
        parent = parent_id(page)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._pages:
                    self._settle(self._pages[parent])

    def _drop_host(self, page: Page) -> None:
        copy, page.host = page.host, None
        assert copy is not None
        self._to_write.pop(page, None)
        self._settle(page)
        if not copy.readers:
            self._free_slot(copy)

    def _drop_ssd(self, page: Page, *, wipe: bool = False) -> None:
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

    def _drop_corrupt(self, copy: HostCopy, found_by: str) -> None:
        """A copy in L3 failed its checksum: it is never served again, whoever still reads it."""
        page = copy.page
        if page.host is not copy:
            return
        self._host_counters.corrupt_pages += 1
        self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L3: {found_by} found it corrupt")
        self._drop_host(page)
        self._lost_if_nowhere(page, "corrupt", f"its copy in L3 was corrupt at {self._wall()}")

    def _end_read(self, copy: HostCopy) -> None:
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

    def _end_ssd_read(self, page: Page, copy: SsdCopy) -> None:
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

    def _free_slot(self, copy: HostCopy) -> None:
        del self._copies[copy.grant.slot]
        self._free.append(copy.grant.slot)

    def _free_place(self, place: Place, wipe: bool) -> None:
        assert self._ssd is not None
        self._ssd.free(place)
        if wipe:
            self._wipes.append(place)

    def _end_grant(self, worker: Worker, grant: Grant) -> bool:
        """The grant is used up or given back; False when it isn't this worker's, or is of an earlier generation."""
        if worker.grants.get(grant.slot) != grant:
            return False
        del worker.grants[grant.slot], self._granted[grant.slot]
        return True

    # ---- requests and the loads they wait for ------------------------------------------------------------------

    def _request(self, worker: Worker, request_id: str) -> Request | None:
        request = worker.requests.get(request_id)
        if request is None and len(worker.requests) < self.limits.requests_per_worker:
            request = worker.requests[request_id] = Request(worker, request_id)
        return request

    def _forget_if_over(self, request: Request) -> None:
        if request.is_over:
            request.worker.requests.pop(request.request_id, None)

    def _wait_for(self, page: Page, request: Request, index: int) -> None:
        load = page.load
        if load is None:
            assert page.ssd is not None
            load = page.load = Load(page, page.ssd, self._now)
            page.ssd.readers += 1
            self._queue[load] = None
        load.waiters[request, index] = None
        request.waits[index] = load

    def _end_waits(self, request: Request, from_index: int) -> None:
        """Ends a request's waits; a queued load that nobody waits for is given up, a running one goes on."""
        for index in [i for i in request.waits if i >= from_index]:
            load = request.waits.pop(index)
            del load.waiters[request, index]
            if not load.waiters and load.page.load is load:
                self._unqueue(load)

    def _unqueue(self, load: Load) -> None:
        if load.transfer is None:
            load.page.load = None
            del self._queue[load]
            self._end_ssd_read(load.page, load.source)

    def _serve_waiters(self, page: Page, copy: HostCopy, *, from_ssd: bool) -> None:
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

    def _fail_waiters(self, page: Page, reason: str, detail: str) -> None:
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

    # ---- the orders of eviction --------------------------------------------------------------------------------

    def _settle(self, page: Page) -> None:
        """Put the page's copies into the orders they are evicted by. Leaves of the forest of chains come before inner
        pages, so that what stays can still be found by its prefix; a clean copy in L3 is no loss, so any will do.

        A copy that turns out to be in use when its turn comes leaves its order, and is settled again after use.
        """
        is_inner = page.id in self._children
        order: Lru[Page] | None = None
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

    def _host_victim(self, order: Lru[Page]) -> Page | None:
        while (page := order.oldest()) is not None:
            assert page.host is not None
            if not page.host.readers and not page.pinned:
                return page
            order.discard(page)
            page.host_order = None
        return None

    def _ssd_victim(self, order: Lru[Page]) -> Page | None:
        while (page := order.oldest()) is not None:
            assert page.ssd is not None
            if not page.ssd.readers and not page.pinned:
                return page
            order.discard(page)
            page.ssd_order = None
        return None

    # ---- commands, and words for what happened -----------------------------------------------------------------

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

    def _save_stored(self) -> None:
        if self._misses.unsaved and self._ssd is not None:
            self._out.append(SaveStored(self._misses.stored_before()))

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

    def _send(self, worker: Worker, message: ToWorker) -> None:
        if not worker.fenced:
            self._out.append(Send(worker.ref, message))

    def _answer(self, ticket: int, results: Iterable[tuple[bytes, Outcome]]) -> None:
        self._answers.append(Answer(ticket, tuple(results)))

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    def _next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer

    def _live(self) -> list[Worker]:
        return list(self._workers.values())

    def _named(self, key: bytes) -> Iterator[Page]:
        """The pages of a key, one per variant."""
        for variant in list(self._variants):
            page = self._pages.get((key, variant))
            if page is not None:
                yield page

    def _max_pinned(self) -> int:
        """Pins may take half of the smallest tier that is on: there is always something to evict."""
        if self._ssd is None:
            return self.num_slots // 2
        return min(self.num_slots, self._ssd.capacity_bytes // self.slot_bytes) // 2

    def _wall(self) -> str:
        return at(self._now + self._wall_offset_s)

    def _by_lru(self, page: Page, tier: TierName) -> str:
        idle_s = max(0.0, self._now - page.last_use)
        return f"evicted from {tier} by lru, score = idle {idle_s:.1f} s, at {self._wall()}"

    def _by_request(self, tier: TierName) -> str:
        return f"evicted from {tier} by request at {self._wall()}"

    def _info(self, page: Page, tier: TierName, readers: int, state: str, now: float) -> PageInfo:
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
        readers: Counter[HostCopy | SsdCopy] = Counter()
        holds: Counter[HostCopy] = Counter()
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
        copies: set[HostCopy | SsdCopy] = set(self._copies.values())
        copies.update(page.ssd for page in self._pages.values() if page.ssd is not None)
        copies.update(self._leaving)
        assert readers.keys() <= copies, "a reader of what no tier holds"
        for copy in copies:
            assert copy.readers == readers[copy], "readers miscounted"
            assert not isinstance(copy, HostCopy) or copy.holds == holds[copy]
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
            parent = parent_id(page)
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
