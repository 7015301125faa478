"""The tables of a node's cache, and the moves that keep them consistent with each other; tier/node/coordinator.py decides. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from kvtier.tier.node.state.fetches import Fetches
from kvtier.tier.node.state.misses import Misses, at
from kvtier.tier.node.state.peer_frames import LentFrames
from kvtier.tier.node.state.ranking import Histories, Order
from kvtier.tier.node.state.records import (
    Bandwidth,
    Check,
    CopyTime,
    Emptying,
    Holdings,
    HostCopy,
    HostRank,
    Job,
    Kind,
    Leaving,
    Limits,
    Load,
    Page,
    PeerCopy,
    RemoteLoad,
    Request,
    Saving,
    SsdCopy,
    SsdRank,
    Worker,
    Write,
    host_orders,
    kind_of,
    page_info,
    parent_key,
    ssd_orders,
)
from kvtier.tier.node.state.shares import UNLIMITED, Shares
from kvtier.tier.pages.clear_epochs import EVERYONE, Clears, Tenant
from kvtier.tier.pages.page import Envelope, TierName, slot_bytes
from kvtier.tier.policy.base import PolicySettings, Use
from kvtier.tier.policy.registry import make_policy
from kvtier.tier.protocol.events import (
    CommitCatalogue,
    PageId,
    SaveStored,
    StoredBefore,
    WorkerRef,
)
from kvtier.tier.protocol.messages import (
    CameFrom,
    Grant,
    HostPage,
    Loaded,
    LoadFailed,
    Missing,
    PageRef,
    WriteMode,
)
from kvtier.tier.stats import FetchCounters, Snapshot, TierCounters
from kvtier.tier.stores.base import CatalogueEntry, PageInfo, Place, SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots

NO_KINDS: frozenset[Kind] = frozenset()
MAX_GHOSTS = 1_000_000  # pages that aren't here and whose uses are remembered


class CacheState(LentFrames):
    """All that a node knows of its cache: slots, pages, workers, requests and transfers, and the commands to give.

    `check` (tier/node/checks/cache.py) states the invariants; every event leaves them true.
    """

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: str,
        host: HostSlots,
        ssd: SegmentAllocator | None = None,
        ssd_variants: frozenset[str] | None = None,
        recovered: Sequence[CatalogueEntry] = (),
        lost: Sequence[CatalogueEntry] = (),
        roots: Iterable[tuple[bytes, Mapping[str, str]]] = (),
        stored_before: StoredBefore | None = None,
        wall_offset_s: float = 0.0,
        now: float = 0.0,
        limits: Limits | None = None,
        policy: PolicySettings = PolicySettings(),  # noqa: B008  frozen
        write: WriteMode = "through",
        shares: Mapping[bytes, float] | None = None,
        page_bytes: int | None = None,
        directory: bool = False,
        clears: Clears | None = None,
        awaits_clears: bool = False,
    ) -> None:
        super().__init__(directory)
        self.node_id, self.incarnation = node_id, incarnation
        self.limits = limits or Limits()
        # Bytes of slots in flight; one page more than none may always be.
        self.max_write_bytes = min(self.limits.write_bytes, host.capacity_bytes // 2)
        # ... on their way up: a sixteenth of L3, of a small one as much as may be read at once, up to a quarter.
        read_bytes = self.limits.reads * slot_bytes(page_bytes or 1)
        self.max_rising_bytes = max(host.capacity_bytes // 16, min(read_bytes, host.capacity_bytes // 4))

        self._now = now
        self._wall_offset_s = wall_offset_s
        self._pages: dict[PageId, Page] = {}
        self._variants: Counter[str] = Counter()  # pages of each variant
        self._children: dict[bytes, int] = {}  # pages here whose parent has this key, where there are any
        self._pinned = 0
        self._pinned_bytes = 0  # of their slots
        # Pinned pages that no slot in L3 is kept for yet: those without a copy there, and those whose copy is held (a
        # held copy that is dropped stays until it is released, and the page may come back meanwhile).
        self._pins_to_come: dict[Page, None] = {}
        self._misses = Misses(self.limits.gone, self.limits.roots, self.limits.contents)
        self._clears = clears or Clears()  # that what is here has been cleared by
        # Clears that have begun, with their numbers: nothing of theirs is looked up until they are over.
        self._clearing: dict[tuple[Tenant, int], None] = {}
        self._awaits_clears = awaits_clears  # it may have missed some: nothing is served until ClearsKnown

        self._slots = host
        self._generation = 0  # of the latest grant
        self._granted: dict[int, Worker] = {}
        self._copies: dict[int, HostCopy] = {}
        self._arriving: dict[int, Load | RemoteLoad] = {}
        capacity_bytes = host.capacity_bytes + (0 if ssd is None else ssd.capacity_bytes)
        capacity_pages = max(1, capacity_bytes // slot_bytes(page_bytes or 1))
        self._policy = make_policy(policy, capacity_pages)
        self._demotes = write == "demote"
        # Where pages are stored after their use, their uses must be known until they are.
        ghosts = max(self._policy.ghosts, 1.0 if self._demotes else 0.0)
        max_ghosts = min(MAX_GHOSTS, int(ghosts * capacity_pages))
        self._histories: Histories[bytes] = Histories(self._policy, max_ghosts)
        self._shares = Shares(shares or {}, host.capacity_bytes, 0 if ssd is None else ssd.capacity_bytes)
        # By slot size and owner, then HostRank. Of UNLIMITED are all pages, of an owner with a share its own once more:
        # while it is over its share only these are looked at, and else no other's are, however many owners there are.
        self._orders: dict[tuple[int, bytes], list[Order[Page]]] = {}
        self._order_sizes: dict[int, None] = {}  # of all orders
        self._spare_orders: list[list[Order[Page]]] = []  # of sizes that nobody uses any more
        self._values: dict[Page, float] = {}  # of copies in L3, lately
        self._ssd_values: dict[Page, float] = {}
        self._valued_at = now
        self._copy_time = CopyTime()
        self._emptying: Emptying | None = None
        self._has_emptied = False
        self._host_holds = Holdings()

        self._ssd = ssd
        self._ssd_variants = ssd_variants  # those that go to L4; None: all
        self._ssd_holds = Holdings()
        self._ssd_orders: dict[bytes, list[Order[Page]]] = {}  # by owner as in _orders, then SsdRank
        self._redraws = 0  # times that pages were used
        self._has_refused = False  # a page was not written, because loading it takes too long; said once
        self._leaving: dict[SsdCopy, Page] = {}  # dropped from the catalogue, still being read
        self._ssd_generation = 0
        self._ssd_failing = False
        self._ssd_at: dict[Place, Page] = {}  # the pages that are found in L4, by where they lie
        self._ssd_emptying: int | None = None  # a segment whose pages leave in parts, for another size
        self._ssd_restored_at = 0.0  # when segments that the disk had no room for are tried again
        self._touched: dict[Page, None] = {}
        self._above: dict[WorkerRef, dict[Page, None]] = {}  # `page.above`, by worker
        # Pages that a gone worker had `above`, or, of a node that drains, that still wait for L4 by their old ranking.
        self._unsettled: dict[Page, None] = {}

        self._workers: dict[WorkerRef, Worker] = {}
        self._bad_messages = 0
        self._sizes: Counter[int] = Counter()  # slot size -> live workers that use it
        self._raw_payloads: dict[bytes, int] = {}  # spec digest -> bytes in the model's raw format
        self._wants: dict[tuple[Worker, int], int] = {}  # slots wanted, by payload size
        self._queue: dict[Load, None] = {}
        self._queued_bytes = 0  # payloads of the queued loads
        self._reads: dict[int, Load] = {}
        self._fetches = Fetches(self.limits, host.capacity_bytes)
        self._savings: dict[PageId, Saving] = {}
        self._exchange: Worker | None = None  # of this node, where there is one that is heard
        self._num_exchanges = 0  # of the workers
        self._read_bytes = 0  # slots of the reads
        self._rising_bytes = 0  # slots of the copies that rise
        self._to_write: dict[Page, None] = {}
        self._writes: dict[int, Write] = {}
        self._write_bytes = 0  # slots of the writes
        self._writing: dict[PageId, Write] = {}
        self._jobs: deque[Job] = deque()
        self._checks: dict[int, Check] = {}
        self._draining = False
        self._quiesced = False
        self._bandwidth = Bandwidth()
        self._host_counters = TierCounters()
        self._ssd_counters = TierCounters()

        self._remote_counters = TierCounters()
        self._fetch_counters = FetchCounters()

        for root, fields in roots:
            self._misses.add_root(root, fields)
        if stored_before is not None:
            self._misses.recall(stored_before)
        for _ in self.recover(recovered):
            pass
        self._mourn(lost)

    # ---- what others may ask -----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight or waiting, and nothing is leased (pins and stocks aside)."""
        if not (self.is_written and self._fetches.is_idle):
            return False
        return not (
            self._unsettled
            or self._queue
            or self._reads
            or self._checks
            or self._jobs
            or any(w.requests for w in self._live())
        )

    @property
    def is_written(self) -> bool:
        """No page waits for L4."""
        return not (self._to_write or self._writes or (self._draining and self._unsettled))

    @property
    def has_more(self) -> bool:
        """Some work of an earlier event is left for `Continue`."""
        return bool(self._unsettled)

    def snapshot(self) -> Snapshot:
        """The counters of L3 and L4. Hits are counted by the workers, at a request's first token."""
        host = replace(self._host_counters, loads_s=self._host_counters.loads_s.copy())
        host.capacity_bytes, host.used_bytes = self._slots.capacity_bytes, self._slots.used_bytes
        self._host_holds.describe(host, self._raw_payloads)
        ssd = replace(self._ssd_counters, loads_s=self._ssd_counters.loads_s.copy())
        if self._ssd is not None:
            ssd.capacity_bytes, ssd.used_bytes = self._ssd.capacity_bytes, self._ssd.used_bytes
        self._ssd_holds.describe(ssd, self._raw_payloads)
        host.policy = ssd.policy = self._policy.state
        host.fallbacks = ssd.fallbacks = self._policy.fallbacks
        peer = self._peer_snapshot(self._raw_payloads)
        remote = replace(self._remote_counters, loads_s=self._remote_counters.loads_s.copy())
        fetches = replace(self._fetch_counters, failed_pages=dict(self._fetch_counters.failed_pages))
        return Snapshot(
            tiers={
                TierName.PEER: peer,
                TierName.HOST: host,
                TierName.SSD: ssd,
                TierName.REMOTE: remote,
            },
            fetches=fetches,
            bad_messages=self._bad_messages,
        )

    def clears(self) -> list[tuple[bytes, int]]:
        """The clear epochs that what is here has been cleared by: not those of clears that are under way."""
        under_way = {tenant or EVERYONE for tenant, _ in self._clearing}
        return [one for one in self._clears.numbers() if one[0] not in under_way]

    def holds(self, among: Iterable[PageId] | None = None) -> dict[TierName, list[bytes]]:
        """Keys of the pages (of all, or of these) that each tier holds as the model computed them.

        What was made from others is not among them: no other node can use it.
        """
        held: dict[TierName, list[bytes]] = {TierName.PEER: [], TierName.HOST: [], TierName.SSD: []}
        ids = self._pages if among is None else among
        for page in (self._pages[id] for id in ids if id in self._pages):
            if not page.envelope.made_from:
                for tier, keys in held.items():
                    if _copy_in(page, tier) is not None:
                        keys.append(page.envelope.key)
        return held

    def pages(
        self,
        tenant: bytes | None,
        tier: TierName | None,
        limit: int,
        now: float,
        among: Iterable[PageId] | None = None,
    ) -> list[PageInfo]:
        """Copies of a tenant's pages (None: of all) in a tier (None: in all), at most `limit`; only of those in `among`."""
        found: list[PageInfo] = []
        ids = self._pages if among is None else among
        for page in (self._pages[id] for id in ids if id in self._pages):
            if tenant is not None and page.envelope.tenant != tenant:
                continue
            host, ssd, load, peer = page.host, page.ssd, page.load, page.peer
            if peer is not None and tier in (None, TierName.PEER):
                found.append(
                    page_info(self.node_id, page, page.envelope, TierName.PEER, peer.readers, "sealed", now)
                )
            if host is not None and tier in (None, TierName.HOST):
                found.append(
                    page_info(self.node_id, page, host.envelope, TierName.HOST, host.readers, "sealed", now)
                )
            if ssd is not None and tier in (None, TierName.SSD):
                found.append(
                    page_info(
                        self.node_id, page, ssd.entry.envelope, TierName.SSD, ssd.readers, "sealed", now
                    )
                )
            if load is not None and load.transfer is not None and tier in (None, TierName.HOST):
                found.append(
                    page_info(
                        self.node_id, page, load.source.entry.envelope, TierName.HOST, 0, "arriving", now
                    )
                )
            if len(found) >= limit:
                return found[:limit]
        return found

    # ---- pages come and go -------------------------------------------------------------------------------------

    def recover(self, recovered: Sequence[CatalogueEntry]) -> Iterator[None]:
        """The pages of the catalogue, as if each had been let go when it was last used; in parts, before any event.

        `recovered` is in any order. A part is at least `limits.part` pages, and all those of one last use.
        """
        entries = sorted(recovered, key=lambda entry: (entry.last_use_s, entry.envelope.depth))
        self._ssd_generation = max((entry.generation for entry in entries), default=0)
        num_pages = 0
        for _, used_together in groupby(entries, key=lambda entry: entry.last_use_s):
            pages = [self._recover(entry) for entry in used_together]
            deepest, last_use = pages[-1].envelope.depth, pages[-1].last_use
            behind = [deepest - page.envelope.depth for page in pages]
            rows = [page.row for page in pages]
            self._histories.end(rows, behind, Use(deepest + 1, 0), last_use, last_use)
            num_pages += len(pages)
            if num_pages >= self.limits.part:
                num_pages = 0
                self._holds = {}  # `holds` has what was recovered
                yield
        for number, page in enumerate(self._pages.values(), 1):
            original = self._original(page)
            if original is not None and original.last_use <= page.last_use:
                self._supersede(original)
            self._settle(page)
            if number % self.limits.part == 0:
                yield
        self._holds = {}

    def _recover(self, entry: CatalogueEntry) -> Page:
        last_use = min(self._now, entry.last_use_s - self._wall_offset_s)
        page = self._create(entry.envelope, entry.content, last_use)
        page.ssd = SsdCopy(entry)
        self._ssd_at[entry.place] = page
        page.uses = entry.uses
        self._shares.take(TierName.SSD, page.owner, entry.slot_bytes)
        self._enter(page, TierName.SSD)
        if page.content:
            self._misses.add_content(entry.envelope.tenant, page.content, entry.envelope.root, page.id)
        return page

    def _mourn(self, lost: Sequence[CatalogueEntry]) -> None:
        detail = f"its place in the files of L4 was gone when the node started at {self._wall()}"
        for entry in lost:
            envelope = entry.envelope
            page_id = (envelope.key, envelope.variant)
            if entry.content:
                self._misses.add_content(envelope.tenant, entry.content, envelope.root, page_id)
            self._misses.left(page_id, "lost", detail)

    def _create(self, envelope: Envelope, content: bytes, now: float) -> Page:
        nbytes = slot_bytes(envelope.payload_bytes)
        row = self._histories.came(envelope.key, envelope.depth, nbytes, now)
        owner = self._shares.owner(envelope.tenant)
        if envelope.depth:
            content = b""
        page = Page((envelope.key, envelope.variant), envelope, row, now, content, owner)
        self._pages[page.id] = page
        self._variants[envelope.variant] += 1
        self._misses.came(page.id)
        parent = parent_key(page)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            if self._children[parent] == 1:
                for above in self._named(parent):
                    if above.leaving is Leaving.GOES:
                        above.leaving = Leaving.STAYS
                    self._settle(above)
        return page

    def _arrive(self, page: Page, grant: Grant, envelope: Envelope) -> HostCopy:
        copy = HostCopy(page, grant, envelope)
        self._copies[grant.slot] = copy
        page.host = copy
        self._shares.take(TierName.HOST, page.owner, page.slot_bytes)
        self._enter(page, TierName.HOST)
        if page.pinned:
            self._mark_lasting(copy)
        self._settle(page)
        return copy

    def _lost_if_nowhere(self, page: Page, reason: str, detail: str) -> None:
        """Forget a page whose last copy is gone."""
        if page.host is not None or page.ssd is not None or self._pages.get(page.id) is not page:
            return
        self._fail_waiters(page, reason, detail)
        del self._pages[page.id]
        if page.peer is not None:
            self._drop_peer(page)
        self._touched.pop(page, None)
        self._not_above(page)
        self._unsettled.pop(page, None)
        if page.pinned:
            self._set_pinned(page, False)
        self._variants[page.id[1]] -= 1
        if not self._variants[page.id[1]]:
            del self._variants[page.id[1]]
        self._misses.left(page.id, reason, detail)
        self._histories.left(page.envelope.key, page.row)
        self._values.pop(page, None)
        self._ssd_values.pop(page, None)
        original = self._original(page)
        if original is not None and original.superseded and not self._is_converted(original):
            self._restore(original)
        parent = parent_key(page)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                self._settle_all(parent)

    def _evict_host(self, page: Page) -> None:
        self._host_counters.evicted_pages += 1
        self._drop_host(page)
        self._lost_if_nowhere(page, "evicted", self._by_policy(page, TierName.HOST))

    def _drop_host(self, page: Page) -> None:
        copy, page.host = page.host, None
        assert copy is not None
        page.leaving = Leaving.STAYS
        self._exit(page, TierName.HOST)
        self._to_write.pop(page, None)
        self._settle(page)
        if page.pinned or copy.holds:
            self._mark_lasting(copy)
        if not copy.readers:
            self._free_slot(copy)

    def _drop_ssd(self, page: Page, *, wipe: bool = False) -> None:
        """The record goes now, the slot when its readers are gone."""
        copy, page.ssd = page.ssd, None
        assert copy is not None
        del self._ssd_at[copy.entry.place]
        if page.leaving is Leaving.SINKS and page.envelope.key not in self._children:
            page.leaving = Leaving.GOES
        self._exit(page, TierName.SSD)
        self._drops.append(page.id)
        self._touched.pop(page, None)
        self._settle(page)
        if copy.readers:
            copy.wipe = wipe
            self._leaving[copy] = page
        else:
            self._free_place(page, copy.entry.place, wipe)

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

    def _end_lease(self, copy: HostCopy) -> None:
        """A worker has copied the page, or won't."""
        copy.leases -= 1
        if copy.rises and not copy.leases:
            copy.rises = False
            self._rising_bytes -= copy.page.slot_bytes
        self._end_read(copy)

    def _end_ssd_read(self, page: Page, copy: SsdCopy) -> None:
        copy.readers -= 1
        if copy.readers:
            return
        if copy in self._leaving:
            del self._leaving[copy]
            self._free_place(page, copy.entry.place, copy.wipe)
        elif copy.leave:
            self._drop_ssd(page)
            self._lost_if_nowhere(page, "evicted", self._by_request(TierName.SSD))
        else:
            self._settle(page)

    def _free_slot(self, copy: HostCopy) -> None:
        del self._copies[copy.grant.slot]
        self._shares.take(TierName.HOST, copy.page.owner, -copy.page.slot_bytes)
        self._slots.free(copy.grant.slot)

    def _mark_lasting(self, copy: HostCopy) -> None:
        """After its holds, its page's pin, or whether it can be found have changed."""
        pinned = copy.page.pinned and copy.page.host is copy
        self._slots.set_lasting(copy.grant.slot, copy.holds > 0 or pinned)
        self._note_pin(copy.page)

    def _note_pin(self, page: Page) -> None:
        if page.pinned and (page.host is None or page.host.holds):
            self._pins_to_come[page] = None
        else:
            self._pins_to_come.pop(page, None)

    def _set_pinned(self, page: Page, pinned: bool) -> None:
        """Pin or unpin a page that is not so yet."""
        assert page.pinned != pinned
        if pinned:
            self._restore(page)
        page.pinned = pinned
        self._pinned += 1 if pinned else -1
        self._pinned_bytes += page.slot_bytes if pinned else -page.slot_bytes
        self._note_pin(page)
        if page.host is not None:
            self._mark_lasting(page.host)

    def _free_place(self, page: Page, place: Place, wipe: bool) -> None:
        assert self._ssd is not None
        self._ssd.free(place)
        self._shares.take(TierName.SSD, page.owner, -page.slot_bytes)
        if wipe:
            self._wipes.append(place)

    def _end_grant(self, worker: Worker, grant: Grant) -> bool:
        """The grant is used up or given back; False when it isn't this worker's, or is of an earlier generation."""
        if worker.grants.get(grant.slot) != grant:
            return False
        del worker.grants[grant.slot], self._granted[grant.slot]
        worker.stock[self._slots.size(grant.slot)] -= 1
        self._slots.set_lasting(grant.slot, False)
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

    def _wait_for(self, page: Page, request: Request, ref: PageRef) -> None:
        load = page.load
        if load is None:
            assert page.ssd is not None
            load = page.load = Load(page, page.ssd, self._now)
            page.ssd.readers += 1
            self._queue[load] = None
            self._queued_bytes += page.envelope.payload_bytes
        load.waiters[request, ref] = None
        request.waits[ref] = load

    def _end_waits(self, request: Request, from_page: int) -> None:
        """Ends a request's waits; a queued load that nobody waits for is given up, a running one goes on."""
        for ref in [ref for ref in request.waits if ref[1] >= from_page]:
            load = request.waits.pop(ref)
            del load.waiters[request, ref]
            if load.waiters:
                continue
            if isinstance(load, Saving):
                self._savings.pop(load.id, None)
            elif isinstance(load, RemoteLoad):
                self._fetches.unwanted(load)
            elif load.page.load is load and load.transfer is None:
                load.page.load = None
                self._unqueue(load)

    def _unqueue(self, load: Load) -> None:
        """A queued load is given up."""
        self._leave_queue(load)
        self._end_ssd_read(load.page, load.source)

    def _leave_queue(self, load: Load) -> None:
        del self._queue[load]
        self._queued_bytes -= load.page.envelope.payload_bytes

    def _serve_waiters(self, page: Page, copy: HostCopy, came_from: CameFrom) -> None:
        """The page is in L3: all that wait for it get a lease. Loads that another way overtook are abandoned."""
        load, page.load = page.load, None
        if load is not None:
            self._serve(load, copy, came_from)
            if load.transfer is None:
                self._unqueue(load)
        fetch = self._fetches.forget(page.id)
        if fetch is not None:
            self._serve(fetch, copy, came_from)
        saving = self._savings.pop(page.id, None)
        if saving is not None and saving.fits(page.envelope):
            self._serve(saving, copy, came_from)
        elif saving is not None:
            self._fail(
                saving, "identity_differs", "a page of this key came from another tenant, root or shape"
            )

    def _serve(self, load: Load | RemoteLoad | Saving, copy: HostCopy, came_from: CameFrom) -> None:
        for request, ref in load.waiters:
            del request.waits[ref]
            found = self._lease(request, ref, copy, came_from)
            self._send(request.worker, Loaded(request.request_id, [found]))
        load.waiters = {}

    def _lease(self, request: Request, ref: PageRef, copy: HostCopy, came_from: CameFrom) -> HostPage:
        copy.readers += 1
        copy.leases += 1
        request.leases[ref] = copy
        page = copy.envelope
        return HostPage(
            ref, copy.grant, page.key, page.variant, page.spec_digest, page.checksum, page.tokens, came_from
        )

    def _fail_waiters(self, page: Page, reason: str, detail: str) -> None:
        """The page will not come: chains that wait for it end there. Its load is abandoned."""
        load, page.load = page.load, None
        if load is None:
            return
        self._fail(load, reason, detail)
        if load.transfer is None:
            self._unqueue(load)

    def _fail(self, load: Load | RemoteLoad | Saving, reason: str, detail: str) -> None:
        for request, ref in list(load.waiters):
            if request.waits.get(ref) is load:
                self._send(request.worker, LoadFailed(request.request_id, Missing(ref[1], reason, detail)))
                self._end_waits(request, ref[1])
                self._forget_if_over(request)

    # ---- pages made from others ----------------------------------------------------------------------------

    def _original(self, page: Page) -> Page | None:
        """The page that this one was made from, where the node has it and it isn't wanted for itself.

        Where L4 keeps formats of its own, every page is made into those, which says nothing of the original.
        """
        made_from = page.envelope.made_from
        kept = self._ssd_variants
        if made_from in ("", page.id[1]) or (kept is not None and not {made_from, page.id[1]} <= kept):
            return None
        return self._pages.get((page.id[0], made_from))

    def _is_converted(self, page: Page) -> bool:
        """Is a page here that was made from this one?"""
        return any(self._original(other) is page for other in self._named(page.envelope.key))

    def _supersede(self, page: Page) -> None:
        """A page made from this one is here: until its next use it goes first, and not to L4."""
        if not page.pinned and not page.superseded:
            page.superseded = True
            self._settle(page)

    def _restore(self, page: Page) -> None:
        """A use of the page, or the loss of what was made from it, makes it one like any other."""
        if not page.superseded:
            return
        page.superseded = False
        self._settle(page)
        if page.host is not None:
            self._queue_write(page)

    def _queue_write(self, page: Page) -> None:
        """A page has come to L3, or counts again: it goes on to L4, unless that is left to its ranking."""
        if not self._demotes:
            self._sink(page)

    def _sink(self, page: Page) -> None:
        """Queue a page of L3 for L4, unless it is there, on its way, superseded, or never goes there."""
        write = self._writing.get(page.id)
        is_underway = page.ssd is not None or (write is not None and write.page is page)
        if not (is_underway or page.superseded or self._quiesced) and self._sinks(page):
            if self._is_worth_loading(page):
                self._to_write[page] = None
            else:
                self._ssd_counters.refused_writes += 1

    def _is_worth_loading(self, page: Page) -> bool:
        """Whether reading a page from L4 takes less than computing it, as far as both have been measured."""
        load_s = self._ssd_load_s(page.slot_bytes)
        compute_s = self._policy.costs.recompute_s(page.envelope.depth)
        is_slow = 0 < compute_s < load_s
        if is_slow and not self._has_refused:
            self._has_refused = True
            self._note(
                f"pages such as {page.envelope.key.hex()[:16]} are not written to L4: reading one takes "
                f"{load_s * 1e3:.1f} ms, computing it {compute_s * 1e3:.1f} ms"
            )
        return not is_slow

    def _enter(self, page: Page, tier: TierName) -> None:
        """A tier holds the page from now on."""
        self._holds_of(tier).add(page.envelope, self._kinds_beside(page, tier))
        self._tell_directory(page, tier)

    def _exit(self, page: Page, tier: TierName) -> None:
        """A tier holds the page no longer."""
        self._holds_of(tier).remove(page.envelope, self._kinds_beside(page, tier))
        self._tell_directory(page, tier)

    def _holds_of(self, tier: TierName) -> Holdings:
        if tier is TierName.PEER:
            return self._peer_holds
        return self._host_holds if tier is TierName.HOST else self._ssd_holds

    def _tell_directory(self, page: Page, tier: TierName) -> None:
        """Of pages as the model computed them alone: what was made from others serves no other node."""
        if self._tells_holds and not page.envelope.made_from:
            key = page.envelope.key
            copies = (_copy_in(other, tier) for other in self._named(key) if not other.envelope.made_from)
            self._holds_changed(tier, key, any(copy is not None for copy in copies))

    def _kinds_beside(self, page: Page, tier: TierName) -> frozenset[Kind]:
        """The kinds of the other pages of this page's key that a tier holds."""
        if len(self._variants) == 1:
            return NO_KINDS
        return frozenset(
            kind_of(other.envelope)
            for other in self._named(page.envelope.key)
            if other is not page and _copy_in(other, tier) is not None
        )

    # ---- the orders of eviction --------------------------------------------------------------------------------

    def _settle(self, page: Page) -> None:
        """Put the page's copies into the orders they are evicted by. Leaves of the forest of chains come before inner
        pages, so that what stays can still be found by its prefix; a clean copy in L3 is no loss, so any will do.
        Spent pages come before all: superseded ones, whose place in the chain others have taken, and copies of what a
        worker will bring down again. Where pages are demoted, clean copies go only when their turn has come (`leaving`),
        and copies in L4 of what stays above are spare.

        A copy that turns out to be in use when its turn comes leaves its order, and is settled again after use.
        """
        order: Order[Page] | None = None
        own: Order[Page] | None = None
        if page.host is not None:
            size, rank = page.slot_bytes, self._rank(page)
            order = (self._orders.get((size, UNLIMITED)) or self._orders_of(size, UNLIMITED))[rank]
            if page.owner:
                own = (self._orders.get((size, page.owner)) or self._orders_of(size, page.owner))[rank]
            if (page.superseded or page.above) and not page.host.readers:
                self._to_write.pop(page, None)
        if order is not page.host_order:
            page.host_order = _moved(page, page.host_order, order)
        if own is not page.own_host_order:
            page.own_host_order = _moved(page, page.own_host_order, own)
        order = own = None
        if page.ssd is not None:
            ssd_rank = self._ssd_rank(page)
            order = self._ssd_orders_of(UNLIMITED)[ssd_rank]
            own = self._ssd_orders_of(page.owner)[ssd_rank] if page.owner else None
        if order is not page.ssd_order:
            page.ssd_order = _moved(page, page.ssd_order, order)
        if own is not page.own_ssd_order:
            page.own_ssd_order = _moved(page, page.own_ssd_order, own)

    def _rank(self, page: Page) -> HostRank:
        """Which of the orders of L3 a page belongs to."""
        if page.superseded or page.above:
            return HostRank.SPENT
        if self._demotes:
            if page.leaving is not Leaving.STAYS:
                can_go = page.ssd is not None or page.leaving is Leaving.GOES
                return HostRank.CLEAN if can_go else HostRank.SINKING
        elif page.ssd is not None:
            return HostRank.CLEAN
        return HostRank.INNER if page.envelope.key in self._children else HostRank.LEAF

    def _ssd_rank(self, page: Page) -> SsdRank:
        """Which of the orders of L4 a page belongs to."""
        if page.superseded:
            return SsdRank.SPENT
        if page.above or (self._demotes and page.host is not None and page.leaving is Leaving.STAYS):
            return SsdRank.SPARE
        return SsdRank.INNER if page.envelope.key in self._children else SsdRank.LEAF

    def _not_above(self, page: Page) -> None:
        """A page's copies here are no longer spare; it is to be settled."""
        ref, page.above = page.above, None
        if ref is not None and ref in self._above:
            del self._above[ref][page]
            if not self._above[ref]:
                del self._above[ref]

    def _settle_all(self, key: bytes) -> None:
        for page in self._named(key):
            self._settle(page)

    def _stay(self, page: Page) -> None:
        """Its turn to leave L3 has not come after all."""
        if page.leaving is not Leaving.STAYS:
            page.leaving = Leaving.STAYS
            self._to_write.pop(page, None)
            self._settle(page)

    def _orders_of(self, size: int, owner: bytes) -> list[Order[Page]]:
        """The orders of a size that comes into use; those of sizes that nobody uses any more make place."""
        for other in [s for s in self._order_sizes if s not in self._sizes and not self._slots.used_slots(s)]:
            del self._order_sizes[other]
            for key in [key for key in self._orders if key[0] == other]:
                self._spare_orders.append(self._orders.pop(key))
        self._order_sizes[size] = None
        spare = self._spare_orders
        orders = spare.pop() if spare else host_orders(self._policy, demotes=self._demotes)
        self._orders[size, owner] = orders
        return orders

    def _ssd_orders_of(self, owner: bytes) -> list[Order[Page]]:
        orders = self._ssd_orders.get(owner)
        if orders is None:
            orders = self._ssd_orders[owner] = ssd_orders(self._policy, demotes=self._demotes)
        return orders

    def _host_load_s(self, size: int) -> float:
        """Seconds that bringing a page up from L3 takes; 0.0 while not measured."""
        return size * self._copy_time.byte_s

    def _ssd_load_s(self, size: int) -> float:
        """Seconds that bringing a page up from L4 takes; 0.0 while not measured."""
        bandwidth = self._bandwidth.measured(self._now)
        return 0.0 if bandwidth is None else size / bandwidth + self._host_load_s(size)

    def _sinks(self, page: Page) -> bool:
        """Whether pages such as this one go to L4."""
        return (
            self._ssd is not None
            and page.slot_bytes <= self._ssd.segment_bytes
            and (self._ssd_variants is None or page.id[1] in self._ssd_variants)
        )

    # ---- what is to be kept, and words for what happened -----------------------------------------------------------------

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

    def _live(self) -> list[Worker]:
        return list(self._workers.values())

    def _named(self, key: bytes) -> list[Page]:
        """The pages of a key, one per variant."""
        pages = self._pages
        return [page for variant in self._variants if (page := pages.get((key, variant))) is not None]

    def _max_pinned_bytes(self) -> int:
        """Pins may take half of the smallest tier that is on: there is always something to evict."""
        if self._ssd is None:
            return self._slots.capacity_bytes // 2
        return min(self._slots.capacity_bytes, self._ssd.capacity_bytes) // 2

    def _wall(self) -> str:
        return at(self._now + self._wall_offset_s)

    def _by_policy(self, page: Page, tier: TierName) -> str:
        if page.host is not None or page.ssd is not None:
            return ""  # it hasn't left the node
        if page.superseded:
            idle_s = max(0.0, self._now - page.last_use)
            return f"evicted from {tier} for a page made from it, idle {idle_s:.1f} s, at {self._wall()}"
        return f"evicted from {tier} by {self._policy.describe(page.row, self._now)}, at {self._wall()}"

    def _by_request(self, tier: TierName) -> str:
        return f"evicted from {tier} by request at {self._wall()}"


def _copy_in(page: Page, tier: TierName) -> PeerCopy | HostCopy | SsdCopy | None:
    """A page's copy in a tier of the node."""
    if tier is TierName.PEER:
        return page.peer
    return page.host if tier is TierName.HOST else page.ssd


def _moved(page: Page, before: Order[Page] | None, after: Order[Page] | None) -> Order[Page] | None:
    """Take a page out of one order and put it into another; the latter."""
    if before is not None:
        before.discard(page)
    if after is not None:
        after.add(page)
    return after
