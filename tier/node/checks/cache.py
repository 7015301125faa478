"""What always holds of a node's cache, derived from scratch. Pure; tests call it after each event, the node when asked."""

from __future__ import annotations

from collections import Counter

from kvtier.tier.node.admin import Admin
from kvtier.tier.node.checks.peer_memory import PeerInvariants, kinds_by_key
from kvtier.tier.node.remote.fetching import RemoteFetches
from kvtier.tier.node.residency.l3_room import L3Room
from kvtier.tier.node.residency.promotion import Promotion
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import MAX_VALUES, Eviction
from kvtier.tier.node.state.holders import Holders
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import HostCopy, Leaving, Page, RemoteLoad, Saving, SsdCopy, parent_key
from kvtier.tier.node.state.shares import UNLIMITED
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.clear_epochs import MAX_TENANTS
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.protocol.events import WorkerRef
from kvtier.tier.protocol.messages import REASONS
from kvtier.tier.stats import LATENCY_SAMPLES


class Invariants:
    """Whether all tables of a coordinator agree."""

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        holders: Holders,
        in_flight: InFlight,
        frames: PeerFrames,
        eviction: Eviction,
        residency: Residency,
        l3: L3Room,
        promotion: Promotion,
        admin: Admin,
        remote: RemoteFetches,
    ) -> None:
        self._tables, self._out, self._holders, self._in_flight = tables, out, holders, in_flight
        self._frames, self._eviction, self._residency = frames, eviction, residency
        self._l3, self._promotion, self._admin, self._remote = l3, promotion, admin, remote
        self._peer_checks = PeerInvariants(tables, holders, frames)

    def check(self) -> None:
        """Re-derive every counter and table from scratch; AssertionError names what doesn't hold."""
        self._check_slots()
        self._check_readers()
        self._check_transfers()
        self._check_fetches()
        self._check_savings()
        self._check_waiting()
        self._check_pages()
        self._check_superseded()
        self._check_leaving()
        self._check_ssd()
        self._peer_checks._check_peers()
        self._tables.misses.check()
        self._check_shares()
        assert self._tables.histories.policy is self._tables.policy
        self._tables.histories.check({page.row for page in self._tables.pages.values()})
        peer_orders = [*self._frames._peer_orders.values(), *self._frames._spare_peer_orders]
        for orders in (
            *self._eviction.orders.values(),
            *self._eviction._spare_orders,
            *self._eviction.ssd_orders.values(),
            peer_orders,
        ):
            for order in orders:
                order.check()
        self._check_remembered()
        assert not (
            self._out.drops
            or self._out.wipes
            or self._out.write_commands
            or self._out._answers
            or self._out.commands
        )
        assert not self._out.holds_changes and self._out.forget is None

    def _check_remembered(self) -> None:
        """What is kept between events is of pages and transfers that there are, or has a bound."""
        for values in (self._eviction.values, self._eviction.ssd_values):
            assert len(values) <= MAX_VALUES + 1
            assert all(self._tables.pages.get(page.id) is page for page in values), (
                "a value of a page that left"
            )
        assert self._eviction._valued_at <= self._tables.now
        transfers = [
            *self._in_flight.reads,
            *self._in_flight.writes,
            *self._in_flight.checks,
            *self._in_flight.fetches.running,
        ]
        assert len(set(transfers)) == len(transfers) and max(transfers, default=0) <= self._out._transfer
        running = Counter(id(check.job) for check in self._in_flight.checks.values())
        assert running.keys() <= {id(job) for job in self._in_flight.jobs}
        for job in self._in_flight.jobs:
            assert job.running == running[id(job)]
            assert job.seen <= set(job.keys) >= job.corrupt
        assert not self._in_flight.jobs or self._in_flight.jobs[0].todo or self._in_flight.jobs[0].running, (
            "a Verify that is done has no answer"
        )
        self._tables.clear_epochs.check()
        assert len(self._admin._clearing) <= MAX_TENANTS + 1, "clears are begun and not ended"
        tiers = (
            self._frames.peer_counters,
            self._residency.host_counters,
            self._residency.ssd_counters,
            self._remote.remote_counters,
        )
        assert all(counters.loads_s.maxlen == LATENCY_SAMPLES for counters in tiers)
        failed = self._remote.fetch_counters.failed_pages
        assert (
            failed.keys() <= REASONS
            and sum(failed.values()) == self._remote.fetch_counters.fetch_failed_pages
        )

    def _check_slots(self) -> None:
        """Each slot in use is granted, arriving or sealed, and exactly one of these."""
        parts = (self._l3._granted, self._in_flight.arriving, self._residency.copies)
        assert sorted(slot for part in parts for slot in part) == sorted(self._tables.slots.slots()), (
            "slots leak"
        )
        for slot, worker in self._l3._granted.items():
            assert self._tables.workers.get(worker.ref) is worker
            assert worker.grants[slot].slot == slot
        assert len(self._l3._granted) == sum(len(w.grants) for w in self._tables.live())
        for worker in self._tables.live():
            assert +worker.stock == Counter(
                slot_bytes(grant.payload_bytes) for grant in worker.grants.values()
            )
        generations = [grant.generation for worker in self._tables.live() for grant in worker.grants.values()]
        for slot, copy in self._residency.copies.items():
            generations.append(copy.grant.generation)
            assert copy.grant.slot == slot and copy.grant.payload_bytes == copy.page.envelope.payload_bytes
            assert copy.page.host is copy or copy.readers, "a copy that can't be found and isn't read"
        assert (
            len(set(generations)) == len(generations) and max(generations, default=0) <= self._l3._generation
        )
        lasting = {
            slot
            for slot, copy in self._residency.copies.items()
            if copy.holds or (copy.page.host is copy and copy.page.pinned)
        }
        lasting |= self._l3._granted.keys()
        self._tables.slots.check(lasting)
        assert self._tables.sizes == Counter(size for worker in self._tables.live() for size in worker.sizes)
        assert len(self._tables.raw_payloads) <= self._tables.limits.specs
        has_slots = self._tables.slots.capacity_bytes > 0
        if (
            has_slots
            and len(self._tables.sizes) == 1
            and {self._tables.slots.size(slot) for slot in lasting} <= self._tables.sizes.keys()
        ):
            (size,) = self._tables.sizes  # with several sizes a load may fail for want of room
            assert self._tables.slots.available(size) >= self._tables.slots.spare_slots(size), (
                "the spare slots are taken"
            )

    def _check_readers(self) -> None:
        """Readers are exactly the leases, holds and transfers; only sealed copies have any."""
        readers: Counter[HostCopy | SsdCopy] = Counter()
        leases: Counter[HostCopy] = Counter()
        holds: Counter[HostCopy] = Counter()
        for worker in self._tables.live():
            assert len(worker.requests) <= self._tables.limits.requests_per_worker
            for request_id, request in worker.requests.items():
                assert request.request_id == request_id and request.worker is worker and not request.is_over
                readers.update(request.leases.values())
                leases.update(request.leases.values())
                readers.update(request.held.keys())
                holds.update(request.held.keys())
                for ref, load in request.waits.items():
                    assert (request, ref) in load.waiters
                    if isinstance(load, RemoteLoad):
                        assert self._in_flight.fetches.coming.get(load.id) is load, (
                            "an abandoned load is waited for"
                        )
                    elif isinstance(load, Saving):
                        assert self._in_flight.saves.get(load.id) is load, "what nothing saves is waited for"
                    else:
                        assert load.page.load is load
        readers.update(write.copy for write in self._in_flight.writes.values())
        readers.update(load.source for load in self._in_flight.queue)
        readers.update(load.source for load in self._in_flight.reads.values())
        readers.update(check.copy for check in self._in_flight.checks.values())
        copies: set[HostCopy | SsdCopy] = set(self._residency.copies.values())
        copies.update(page.ssd for page in self._tables.pages.values() if page.ssd is not None)
        copies.update(self._in_flight.leaving)
        assert readers.keys() <= copies, "a reader of what no tier holds"
        for copy in copies:
            assert copy.readers == readers[copy], "readers miscounted"
            if isinstance(copy, HostCopy):
                assert copy.holds == holds[copy] and copy.leases == leases[copy]
        assert all(copy.readers for copy in self._in_flight.leaving)

    def _check_transfers(self) -> None:
        """Each arriving copy belongs to one transfer."""
        assert (
            len(self._in_flight.reads) <= self._tables.limits.reads
            and len(self._in_flight.writes) <= self._tables.limits.writes
        )
        assert len(self._in_flight.checks) <= self._tables.limits.verifies
        assert self._in_flight.read_bytes == sum(
            load.page.slot_bytes for load in self._in_flight.reads.values()
        )
        assert self._in_flight.write_bytes == sum(
            write.page.slot_bytes for write in self._in_flight.writes.values()
        )
        rising = [copy for copy in self._residency.copies.values() if copy.promoting]
        assert self._in_flight.promoting_bytes == sum(copy.page.slot_bytes for copy in rising)
        assert all(copy.leases for copy in rising), "a page that was copied still rises"
        assert (
            len(self._in_flight.reads) <= 1
            or self._in_flight.read_bytes + self._in_flight.promoting_bytes
            <= self._in_flight.max_promoting_bytes
        )
        assert (
            len(self._in_flight.writes) <= 1 or self._in_flight.write_bytes <= self._in_flight.max_write_bytes
        )
        assert self._in_flight.queued_bytes == sum(
            load.page.envelope.payload_bytes for load in self._in_flight.queue
        )
        for slot, arriving in self._in_flight.arriving.items():
            assert arriving.grant is not None and arriving.grant.slot == slot
            if isinstance(arriving, RemoteLoad):
                assert arriving.fetch is not None
                assert self._in_flight.fetches.running[arriving.fetch].pages[arriving.id] is arriving
            else:
                assert arriving.transfer is not None and self._in_flight.reads[arriving.transfer] is arriving
        fetched = sum(len(fetch.pages) for fetch in self._in_flight.fetches.running.values())
        assert len(self._in_flight.arriving) == len(self._in_flight.reads) + fetched
        for load in [*self._in_flight.queue, *self._in_flight.reads.values()]:
            if load.page.load is load:
                assert load.page.host is None and load.page.ssd is load.source
            else:
                assert load.transfer is not None and not load.waiters, "an abandoned load is still waited for"
            for request, ref in load.waiters:
                assert request.waits[ref] is load
        for load in self._in_flight.queue:
            assert load.waiters and load.transfer is None
        assert self._in_flight.writing == {write.page.id: write for write in self._in_flight.writes.values()}
        assert len(self._in_flight.writing) == len(self._in_flight.writes)
        for page in self._in_flight.to_write:
            assert page.host is not None and page.ssd is None and self._tables.pages[page.id] is page
            assert self._tables.goes_to_l4(page)

    def _check_fetches(self) -> None:
        """What is to come from other nodes isn't here, is waited for while it is queued, and is one exchange's to bring."""
        self._in_flight.fetches.check()
        exchange = self._tables.exchange
        assert self._tables.num_exchanges == sum(worker.is_exchange for worker in self._tables.live())
        assert exchange is None or (self._tables.workers[exchange.ref] is exchange and not exchange.fenced)
        assert exchange is not None or not self._in_flight.fetches.queued, (
            "pages are queued that nothing can fetch"
        )
        for fetch in self._in_flight.fetches.running.values():
            assert self._tables.workers[fetch.exchange.ref] is fetch.exchange and fetch.exchange.is_exchange
            assert exchange is fetch.exchange or not any(load.waiters for load in fetch.pages.values())
        for page_id, load in self._in_flight.fetches.coming.items():
            page = self._tables.pages.get(page_id)
            assert page is None or page.host is None, "a page is to come that is in L3"
            for request, ref in load.waiters:
                assert request.waits[ref] is load and request.worker.requests[request.request_id] is request

    def _check_savings(self) -> None:
        """What workers are to save is nowhere here, an exchange waits for it, and one of those asked may answer still."""
        assert len(self._in_flight.saves) <= self._tables.limits.saves
        for page_id, saving in self._in_flight.saves.items():
            assert saving.id == page_id and page_id not in self._tables.pages and saving.waiters
            assert saving.asked and not self._tables.draining
            for worker in saving.asked:
                assert (
                    self._tables.workers[worker.ref] is worker
                    and not worker.fenced
                    and worker.hello.saves_when_asked
                )
            for request, ref in saving.waiters:
                assert request.waits[ref] is saving and request.worker.is_exchange
                assert request.worker.requests[request.request_id] is request

    def _check_waiting(self) -> None:
        """Nothing waits that could go on, and what waits for a slot can get one."""
        waiting: set[int] = set()  # sizes of the slots that are waited for
        for (worker, payload_bytes), count in self._l3.wants.items():
            assert count > 0 and not worker.fenced and self._tables.workers[worker.ref] is worker
            assert slot_bytes(payload_bytes) in worker.sizes
            if not self._tables.draining and self._l3._room_to_grant(worker, payload_bytes) > 0:
                waiting.add(slot_bytes(payload_bytes))
        if self._in_flight.queue and self._promotion._may_read(next(iter(self._in_flight.queue)).page):
            waiting.add(next(iter(self._in_flight.queue)).page.slot_bytes)
        waiting |= self._in_flight.fetches.sizes_waited_for(self._tables.now)
        for size in waiting:
            assert self._tables.slots.available(size) > 0, "a slot is waited for that will never come"
            assert not self._has_victim(size), "a slot is waited for though one could be had"
            if self._tables.slots.passing_slots(size) == 0:
                assert self._l3._emptying is not None, "a size is waited for that nothing is emptied for"

    def _has_victim(self, size: int, owner: bytes | None = None) -> bool:
        """Is there a copy of this size, and owner, that could go from L3 now?"""
        return any(
            not copy.readers and not copy.page.pinned and self._eviction.may_lose(copy.page)
            for copy in self._residency.copies.values()
            if copy.page.host is copy
            and copy.page.slot_bytes == size
            and owner in (None, copy.page.owner)
            and not self._is_closed(copy.grant.slot)
        )

    def _is_closed(self, slot: int) -> bool:
        return (
            self._l3._emptying is not None and self._tables.slots.segment(slot) == self._l3._emptying.segment
        )

    def _check_pages(self) -> None:
        """Pages, their children and pins, and the orders they are evicted by."""
        children: Counter[bytes] = Counter()
        for page_id, page in self._tables.pages.items():
            assert page.id == page_id == (page.envelope.key, page.envelope.variant)
            assert page.slot_bytes == slot_bytes(page.envelope.payload_bytes)
            assert page.host is not None or page.ssd is not None, "a page that no tier holds"
            parent = parent_key(page)
            if parent is not None:
                children[parent] += 1
            if page.host is not None:
                assert self._residency.copies[page.host.grant.slot] is page.host
                if page not in self._eviction.unsettled:
                    order = self._eviction.orders[page.slot_bytes, UNLIMITED][self._eviction.rank(page)]
                    assert page.host_order is None or (page.host_order is order and page in order)
                    own = self._eviction.orders[page.slot_bytes, page.owner][self._eviction.rank(page)]
                    assert page.own_host_order is None or (page.own_host_order is own and page in own)
                assert page.own_host_order or page.host.readers or page.pinned or not page.owner
                assert page.host_order or page.host.readers or page.pinned, (
                    "a copy in L3 that can't be evicted"
                )
            if page.ssd is not None:
                if page not in self._eviction.unsettled:
                    order = self._eviction.ssd_orders[UNLIMITED][self._eviction.ssd_rank(page)]
                    assert page.ssd_order is None or (page.ssd_order is order and page in order)
                    own = self._eviction.ssd_orders[page.owner][self._eviction.ssd_rank(page)]
                    assert page.own_ssd_order is None or (page.own_ssd_order is own and page in own)
                assert page.own_ssd_order or page.ssd.readers or page.pinned or not page.owner
                assert page.ssd_order or page.ssd.readers or page.pinned, "a copy in L4 that can't be evicted"
        assert children == self._tables.children
        assert self._tables.variants == Counter(variant for _, variant in self._tables.pages)
        pinned = [page for page in self._tables.pages.values() if page.pinned]
        assert self._residency._pinned == len(pinned)
        assert self._residency.pins_to_come.keys() == {p for p in pinned if p.host is None or p.host.holds}
        assert (
            self._residency.pinned_bytes
            == sum(page.slot_bytes for page in pinned)
            <= self._residency.max_pinned_bytes()
        )
        assert all(
            self._tables.pages[page.id] is page and page.ssd is not None for page in self._residency.touched
        )
        pages = self._tables.pages.values()
        listed = sum(len(order) for orders in self._eviction.orders.values() for order in orders)
        assert listed == sum((p.host_order is not None) + (p.own_host_order is not None) for p in pages)
        listed = sum(len(order) for orders in self._eviction.ssd_orders.values() for order in orders)
        assert listed == sum((p.ssd_order is not None) + (p.own_ssd_order is not None) for p in pages)
        assert self._eviction.order_sizes.keys() == {size for size, _ in self._eviction.orders}
        assert all((size, UNLIMITED) in self._eviction.orders for size in self._eviction.order_sizes)
        assert all(
            owner in self._tables.shares.held[TierName.HOST] for _, owner in self._eviction.orders if owner
        )
        assert all(
            owner in self._tables.shares.held[TierName.SSD] for owner in self._eviction.ssd_orders if owner
        )
        assert len({page.row for page in pages}) == len(pages), "two pages of one history"
        assert self._holders.host_holds.keys == kinds_by_key(
            p for p in self._tables.pages.values() if p.host is not None
        )

    def _check_leaving(self) -> None:
        """What leaves L3 has somewhere to be found, or nothing behind it in its chain; what is above is one worker's."""
        above: dict[WorkerRef, dict[Page, None]] = {}
        for page in self._tables.pages.values():
            if page in self._eviction.unsettled:
                continue
            if page.above is not None:
                assert self._tables.demotes and not page.shared and page.user == page.above
                assert page.above in self._tables.workers, "a page is above in a worker that is gone"
                above.setdefault(page.above, {})[page] = None
            if page.leaving is not Leaving.STAYS:
                assert self._tables.demotes and page.host is not None
            if page.leaving is Leaving.GOES:
                assert page.envelope.key not in self._tables.children, "a page goes on which others hang"
        assert self._tables.draining or self._eviction.above == above
        assert all(self._tables.pages.get(page.id) is page for page in self._eviction.unsettled)

    def _check_shares(self) -> None:
        """What tenants hold is counted, and who is over its share has nothing to give."""
        for tier, held in self._tables.shares.held.items():
            counted: Counter[bytes] = Counter(dict.fromkeys(held, 0))
            if tier is TierName.HOST:
                for copy in self._residency.copies.values():
                    counted[copy.page.owner] += copy.page.slot_bytes
            else:
                entries = [(p, p.ssd.entry) for p in self._tables.pages.values() if p.ssd is not None]
                entries += [(write.page, write.entry) for write in self._in_flight.writes.values()]
                entries += [(page, copy.entry) for copy, page in self._in_flight.leaving.items()]
                for page, entry in entries:
                    counted[page.owner] += entry.slot_bytes
            del counted[UNLIMITED]
            assert counted == held
        for owner in self._tables.shares.over(TierName.HOST):
            assert not any(self._has_victim(size, owner) for size in self._eviction.order_sizes)

    def _check_superseded(self) -> None:
        """What goes first has a page made from it here, and waits for L4 only while something reads it."""
        originals = {self._tables.original(page) for page in self._tables.pages.values()}
        for page in self._tables.pages.values():
            if page.superseded:
                assert not page.pinned and page in originals
                assert page not in self._in_flight.to_write or (page.host is not None and page.host.readers)

    def _check_ssd(self) -> None:
        """L4's slots are exactly those of its pages, of pages leaving, and of writes in flight."""
        if self._tables.ssd is None:
            assert not (
                self._holders.ssd_holds.keys
                or self._in_flight.writes
                or self._in_flight.to_write
                or self._in_flight.leaving
            )
            return
        pages = [page for page in self._tables.pages.values() if page.ssd is not None]
        assert self._holders.ssd_holds.keys == kinds_by_key(pages)
        sealed = [page.ssd for page in pages if page.ssd is not None]
        assert self._residency.ssd_at == {
            page.ssd.entry.place: page for page in pages if page.ssd is not None
        }
        entries = [c.entry for c in (*sealed, *self._in_flight.leaving)] + [
            w.entry for w in self._in_flight.writes.values()
        ]
        assert len({e.place for e in entries}) == len(entries), "two pages in one slot"
        assert max((entry.generation for entry in entries), default=0) <= self._tables.ssd_generation
        assert (
            self._tables.ssd.used_bytes
            == sum(e.slot_bytes for e in entries)
            <= self._tables.ssd.capacity_bytes
        )
