"""What always holds of a node's cache, derived from scratch. Pure; tests call it after each event, the node when asked."""

from __future__ import annotations

from collections import Counter

from kvtier.tier.node.checks.peer_memory import CheckedFrames, kinds_by_key
from kvtier.tier.node.state.records import (
    HostCopy,
    Leaving,
    Page,
    RemoteLoad,
    Saving,
    SsdCopy,
    parent_key,
)
from kvtier.tier.node.state.shares import UNLIMITED
from kvtier.tier.node.state.worth import MAX_VALUES
from kvtier.tier.pages.clear_epochs import MAX_TENANTS
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.protocol.events import WorkerRef
from kvtier.tier.protocol.messages import REASONS
from kvtier.tier.stats import LATENCY_SAMPLES


class CheckedState(CheckedFrames):
    """A RankedState that can tell whether its tables agree."""

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
        self._check_peers()
        self._misses.check()
        self._check_shares()
        assert self._histories.policy is self._policy
        self._histories.check({page.row for page in self._pages.values()})
        peer_orders = [*self._peer_orders.values(), *self._spare_peer_orders]
        for orders in (*self._orders.values(), *self._spare_orders, *self._ssd_orders.values(), peer_orders):
            for order in orders:
                order.check()
        self._check_remembered()
        assert not (self._drops or self._wipes or self._write_commands or self._answers or self._out)
        assert not self._holds and self._forget is None

    def _check_remembered(self) -> None:
        """What is kept between events is of pages and transfers that there are, or has a bound."""
        for values in (self._values, self._ssd_values):
            assert len(values) <= MAX_VALUES + 1
            assert all(self._pages.get(page.id) is page for page in values), "a value of a page that left"
        assert self._valued_at <= self._now
        transfers = [*self._reads, *self._writes, *self._checks, *self._fetches.running]
        assert len(set(transfers)) == len(transfers) and max(transfers, default=0) <= self._transfer
        running = Counter(id(check.job) for check in self._checks.values())
        assert running.keys() <= {id(job) for job in self._jobs}
        for job in self._jobs:
            assert job.running == running[id(job)]
            assert job.seen <= set(job.keys) >= job.corrupt
        assert not self._jobs or self._jobs[0].todo or self._jobs[0].running, (
            "a Verify that is done has no answer"
        )
        self._clears.check()
        assert len(self._clearing) <= MAX_TENANTS + 1, "clears are begun and not ended"
        tiers = (self._peer_counters, self._host_counters, self._ssd_counters, self._remote_counters)
        assert all(counters.loads_s.maxlen == LATENCY_SAMPLES for counters in tiers)
        failed = self._fetch_counters.failed_pages
        assert failed.keys() <= REASONS and sum(failed.values()) == self._fetch_counters.fetch_failed_pages

    def _check_slots(self) -> None:
        """Each slot in use is granted, arriving or sealed, and exactly one of these."""
        parts = (self._granted, self._arriving, self._copies)
        assert sorted(slot for part in parts for slot in part) == sorted(self._slots.slots()), "slots leak"
        for slot, worker in self._granted.items():
            assert self._workers.get(worker.ref) is worker
            assert worker.grants[slot].slot == slot
        assert len(self._granted) == sum(len(w.grants) for w in self._live())
        for worker in self._live():
            assert +worker.stock == Counter(
                slot_bytes(grant.payload_bytes) for grant in worker.grants.values()
            )
        generations = [grant.generation for worker in self._live() for grant in worker.grants.values()]
        for slot, copy in self._copies.items():
            generations.append(copy.grant.generation)
            assert copy.grant.slot == slot and copy.grant.payload_bytes == copy.page.envelope.payload_bytes
            assert copy.page.host is copy or copy.readers, "a copy that can't be found and isn't read"
        assert len(set(generations)) == len(generations) and max(generations, default=0) <= self._generation
        lasting = {
            slot
            for slot, copy in self._copies.items()
            if copy.holds or (copy.page.host is copy and copy.page.pinned)
        }
        lasting |= self._granted.keys()
        self._slots.check(lasting)
        assert self._sizes == Counter(size for worker in self._live() for size in worker.sizes)
        assert len(self._raw_payloads) <= self.limits.specs
        has_slots = self._slots.capacity_bytes > 0
        if (
            has_slots
            and len(self._sizes) == 1
            and {self._slots.size(slot) for slot in lasting} <= self._sizes.keys()
        ):
            (size,) = self._sizes  # with several sizes a load may fail for want of room
            assert self._slots.available(size) >= self._slots.spare_slots(size), "the spare slots are taken"

    def _check_readers(self) -> None:
        """Readers are exactly the leases, holds and transfers; only sealed copies have any."""
        readers: Counter[HostCopy | SsdCopy] = Counter()
        leases: Counter[HostCopy] = Counter()
        holds: Counter[HostCopy] = Counter()
        for worker in self._live():
            assert len(worker.requests) <= self.limits.requests_per_worker
            for request_id, request in worker.requests.items():
                assert request.request_id == request_id and request.worker is worker and not request.is_over
                readers.update(request.leases.values())
                leases.update(request.leases.values())
                readers.update(request.held.keys())
                holds.update(request.held.keys())
                for ref, load in request.waits.items():
                    assert (request, ref) in load.waiters
                    if isinstance(load, RemoteLoad):
                        assert self._fetches.coming.get(load.id) is load, "an abandoned load is waited for"
                    elif isinstance(load, Saving):
                        assert self._savings.get(load.id) is load, "what nobody saves is waited for"
                    else:
                        assert load.page.load is load
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
            if isinstance(copy, HostCopy):
                assert copy.holds == holds[copy] and copy.leases == leases[copy]
        assert all(copy.readers for copy in self._leaving)

    def _check_transfers(self) -> None:
        """Each arriving copy belongs to one transfer."""
        assert len(self._reads) <= self.limits.reads and len(self._writes) <= self.limits.writes
        assert len(self._checks) <= self.limits.verifies
        assert self._read_bytes == sum(load.page.slot_bytes for load in self._reads.values())
        assert self._write_bytes == sum(write.page.slot_bytes for write in self._writes.values())
        rising = [copy for copy in self._copies.values() if copy.rises]
        assert self._rising_bytes == sum(copy.page.slot_bytes for copy in rising)
        assert all(copy.leases for copy in rising), "a page that was copied still rises"
        assert len(self._reads) <= 1 or self._read_bytes + self._rising_bytes <= self.max_rising_bytes
        assert len(self._writes) <= 1 or self._write_bytes <= self.max_write_bytes
        assert self._queued_bytes == sum(load.page.envelope.payload_bytes for load in self._queue)
        for slot, arriving in self._arriving.items():
            assert arriving.grant is not None and arriving.grant.slot == slot
            if isinstance(arriving, RemoteLoad):
                assert arriving.fetch is not None
                assert self._fetches.running[arriving.fetch].pages[arriving.id] is arriving
            else:
                assert arriving.transfer is not None and self._reads[arriving.transfer] is arriving
        fetched = sum(len(fetch.pages) for fetch in self._fetches.running.values())
        assert len(self._arriving) == len(self._reads) + fetched
        for load in [*self._queue, *self._reads.values()]:
            if load.page.load is load:
                assert load.page.host is None and load.page.ssd is load.source
            else:
                assert load.transfer is not None and not load.waiters, "an abandoned load is still waited for"
            for request, ref in load.waiters:
                assert request.waits[ref] is load
        for load in self._queue:
            assert load.waiters and load.transfer is None
        assert self._writing == {write.page.id: write for write in self._writes.values()}
        assert len(self._writing) == len(self._writes)
        for page in self._to_write:
            assert page.host is not None and page.ssd is None and self._pages[page.id] is page
            assert self._sinks(page)

    def _check_fetches(self) -> None:
        """What is to come from other nodes isn't here, is waited for while it is queued, and is one exchange's to bring."""
        self._fetches.check()
        exchange = self._exchange
        assert self._num_exchanges == sum(worker.is_exchange for worker in self._live())
        assert exchange is None or (self._workers[exchange.ref] is exchange and not exchange.fenced)
        assert exchange is not None or not self._fetches.queued, "pages are queued that nobody can fetch"
        for fetch in self._fetches.running.values():
            assert self._workers[fetch.exchange.ref] is fetch.exchange and fetch.exchange.is_exchange
            assert exchange is fetch.exchange or not any(load.waiters for load in fetch.pages.values())
        for page_id, load in self._fetches.coming.items():
            page = self._pages.get(page_id)
            assert page is None or page.host is None, "a page is to come that is in L3"
            for request, ref in load.waiters:
                assert request.waits[ref] is load and request.worker.requests[request.request_id] is request

    def _check_savings(self) -> None:
        """What workers are to save is nowhere here, an exchange waits for it, and one of those asked may answer still."""
        assert len(self._savings) <= self.limits.savings
        for page_id, saving in self._savings.items():
            assert saving.id == page_id and page_id not in self._pages and saving.waiters
            assert saving.asked and not self._draining
            for worker in saving.asked:
                assert (
                    self._workers[worker.ref] is worker
                    and not worker.fenced
                    and worker.hello.saves_when_asked
                )
            for request, ref in saving.waiters:
                assert request.waits[ref] is saving and request.worker.is_exchange
                assert request.worker.requests[request.request_id] is request

    def _check_waiting(self) -> None:
        """Nothing waits that could go on, and what waits for a slot can get one."""
        waiting: set[int] = set()  # sizes of the slots that are waited for
        for (worker, payload_bytes), count in self._wants.items():
            assert count > 0 and not worker.fenced and self._workers[worker.ref] is worker
            assert slot_bytes(payload_bytes) in worker.sizes
            if not self._draining and self._room_to_grant(worker, payload_bytes) > 0:
                waiting.add(slot_bytes(payload_bytes))
        if self._queue and self._may_read(next(iter(self._queue)).page):
            waiting.add(next(iter(self._queue)).page.slot_bytes)
        waiting |= self._fetches.sizes_waited_for(self._now)
        for size in waiting:
            assert self._slots.available(size) > 0, "a slot is waited for that will never come"
            assert not self._has_victim(size), "a slot is waited for though one could be had"
            if self._slots.passing_slots(size) == 0:
                assert self._emptying is not None, "a size is waited for that nothing is emptied for"

    def _has_victim(self, size: int, owner: bytes | None = None) -> bool:
        """Is there a copy of this size, and owner, that could go from L3 now?"""
        return any(
            not copy.readers and not copy.page.pinned and self._may_lose(copy.page)
            for copy in self._copies.values()
            if copy.page.host is copy
            and copy.page.slot_bytes == size
            and owner in (None, copy.page.owner)
            and not self._is_closed(copy.grant.slot)
        )

    def _is_closed(self, slot: int) -> bool:
        return self._emptying is not None and self._slots.segment(slot) == self._emptying.segment

    def _check_pages(self) -> None:
        """Pages, their children and pins, and the orders they are evicted by."""
        children: Counter[bytes] = Counter()
        for page_id, page in self._pages.items():
            assert page.id == page_id == (page.envelope.key, page.envelope.variant)
            assert page.slot_bytes == slot_bytes(page.envelope.payload_bytes)
            assert page.host is not None or page.ssd is not None, "a page that no tier holds"
            parent = parent_key(page)
            if parent is not None:
                children[parent] += 1
            if page.host is not None:
                assert self._copies[page.host.grant.slot] is page.host
                if page not in self._unsettled:
                    order = self._orders[page.slot_bytes, UNLIMITED][self._rank(page)]
                    assert page.host_order is None or (page.host_order is order and page in order)
                    own = self._orders[page.slot_bytes, page.owner][self._rank(page)]
                    assert page.own_host_order is None or (page.own_host_order is own and page in own)
                assert page.own_host_order or page.host.readers or page.pinned or not page.owner
                assert page.host_order or page.host.readers or page.pinned, (
                    "a copy in L3 that can't be evicted"
                )
            if page.ssd is not None:
                if page not in self._unsettled:
                    order = self._ssd_orders[UNLIMITED][self._ssd_rank(page)]
                    assert page.ssd_order is None or (page.ssd_order is order and page in order)
                    own = self._ssd_orders[page.owner][self._ssd_rank(page)]
                    assert page.own_ssd_order is None or (page.own_ssd_order is own and page in own)
                assert page.own_ssd_order or page.ssd.readers or page.pinned or not page.owner
                assert page.ssd_order or page.ssd.readers or page.pinned, "a copy in L4 that can't be evicted"
        assert children == self._children
        assert self._variants == Counter(variant for _, variant in self._pages)
        pinned = [page for page in self._pages.values() if page.pinned]
        assert self._pinned == len(pinned)
        assert self._pins_to_come.keys() == {p for p in pinned if p.host is None or p.host.holds}
        assert self._pinned_bytes == sum(page.slot_bytes for page in pinned) <= self._max_pinned_bytes()
        assert all(self._pages[page.id] is page and page.ssd is not None for page in self._touched)
        pages = self._pages.values()
        listed = sum(len(order) for orders in self._orders.values() for order in orders)
        assert listed == sum((p.host_order is not None) + (p.own_host_order is not None) for p in pages)
        listed = sum(len(order) for orders in self._ssd_orders.values() for order in orders)
        assert listed == sum((p.ssd_order is not None) + (p.own_ssd_order is not None) for p in pages)
        assert self._order_sizes.keys() == {size for size, _ in self._orders}
        assert all((size, UNLIMITED) in self._orders for size in self._order_sizes)
        assert all(owner in self._shares.held[TierName.HOST] for _, owner in self._orders if owner)
        assert all(owner in self._shares.held[TierName.SSD] for owner in self._ssd_orders if owner)
        assert len({page.row for page in pages}) == len(pages), "two pages of one history"
        assert self._host_holds.keys == kinds_by_key(p for p in self._pages.values() if p.host is not None)

    def _check_leaving(self) -> None:
        """What leaves L3 has somewhere to be found, or nothing behind it in its chain; what is above is one worker's."""
        above: dict[WorkerRef, dict[Page, None]] = {}
        for page in self._pages.values():
            if page in self._unsettled:
                continue
            if page.above is not None:
                assert self._demotes and not page.shared and page.user == page.above
                assert page.above in self._workers, "a page is above in a worker that is gone"
                above.setdefault(page.above, {})[page] = None
            if page.leaving is not Leaving.STAYS:
                assert self._demotes and page.host is not None
            if page.leaving is Leaving.GOES:
                assert page.envelope.key not in self._children, "a page goes on which others hang"
        assert self._draining or self._above == above
        assert all(self._pages.get(page.id) is page for page in self._unsettled)

    def _check_shares(self) -> None:
        """What tenants hold is counted, and who is over its share has nothing to give."""
        for tier, held in self._shares.held.items():
            counted: Counter[bytes] = Counter(dict.fromkeys(held, 0))
            if tier is TierName.HOST:
                for copy in self._copies.values():
                    counted[copy.page.owner] += copy.page.slot_bytes
            else:
                entries = [(p, p.ssd.entry) for p in self._pages.values() if p.ssd is not None]
                entries += [(write.page, write.entry) for write in self._writes.values()]
                entries += [(page, copy.entry) for copy, page in self._leaving.items()]
                for page, entry in entries:
                    counted[page.owner] += entry.slot_bytes
            del counted[UNLIMITED]
            assert counted == held
        for owner in self._shares.over(TierName.HOST):
            assert not any(self._has_victim(size, owner) for size in self._order_sizes)

    def _check_superseded(self) -> None:
        """What goes first has a page made from it here, and waits for L4 only while somebody reads it."""
        originals = {self._original(page) for page in self._pages.values()}
        for page in self._pages.values():
            if page.superseded:
                assert not page.pinned and page in originals
                assert page not in self._to_write or (page.host is not None and page.host.readers)

    def _check_ssd(self) -> None:
        """L4's slots are exactly those of its pages, of pages leaving, and of writes in flight."""
        if self._ssd is None:
            assert not (self._ssd_holds.keys or self._writes or self._to_write or self._leaving)
            return
        pages = [page for page in self._pages.values() if page.ssd is not None]
        assert self._ssd_holds.keys == kinds_by_key(pages)
        sealed = [page.ssd for page in pages if page.ssd is not None]
        assert self._ssd_at == {page.ssd.entry.place: page for page in pages if page.ssd is not None}
        entries = [c.entry for c in (*sealed, *self._leaving)] + [w.entry for w in self._writes.values()]
        assert len({e.place for e in entries}) == len(entries), "two pages in one slot"
        assert max((entry.generation for entry in entries), default=0) <= self._ssd_generation
        assert self._ssd.used_bytes == sum(e.slot_bytes for e in entries) <= self._ssd.capacity_bytes
