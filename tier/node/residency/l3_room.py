"""Makes room in L3, and shares it out: whose stock may grow, which pages go, which segment changes its size. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.ranking import Order
from kvtier.tier.node.state.records import Emptying, HostRank, Leaving, Page, Worker
from kvtier.tier.node.state.shares import UNLIMITED
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.protocol.messages import Grant, Granted, WantSlots


class L3Room:
    """Hands out slots of L3; see Coordinator for its liveness.

    A size takes its room from its own pages that are worth least, or from a segment of another size all of whose pages
    are worth less. Where it has no pages to give up, it lets a segment of another size run empty: one at a time, and
    only while something waits for it. While a tenant is over its share, its pages go first.
    """

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        in_flight: InFlight,
        eviction: Eviction,
        residency: Residency,
    ) -> None:
        self._tables, self._out, self._in_flight = tables, out, in_flight
        self._eviction, self._residency = eviction, residency
        self._generation = 0  # of the latest grant
        self._granted: dict[int, Worker] = {}  # by slot
        self.wants: dict[tuple[Worker, int], int] = {}  # slots wanted, by payload size
        self._emptying: Emptying | None = None
        self.has_emptied = False

    def end_grant(self, worker: Worker, grant: Grant) -> bool:
        """The grant is used up or given back; False when it isn't this worker's, or is of an earlier generation."""
        if worker.grants.get(grant.slot) != grant:
            return False
        del worker.grants[grant.slot], self._granted[grant.slot]
        worker.stock[self._tables.slots.size(grant.slot)] -= 1
        self._tables.slots.set_lasting(grant.slot, False)
        return True

    def _room_to_grant(self, worker: Worker, payload_bytes: int) -> int:
        """Stocks take at most half of L3; of that each worker has its share, and of it each of its sizes."""
        size = slot_bytes(payload_bytes)
        sharing = len(self._tables.workers) - self._tables.num_exchanges
        share = self._tables.slots.capacity_bytes // (2 * sharing * len(worker.sizes))
        room = max(1, share // size) - worker.stock[size]
        return min(
            room, self._tables.slots.room_to_last(size, self._tables.sizes, len(self._residency.pins_to_come))
        )

    def pump_grants(self) -> None:
        if self._tables.draining:
            return
        for want in list(self.wants):
            worker, payload_bytes = want
            grants: list[Grant] = []
            room = min(self.wants[want], self._room_to_grant(worker, payload_bytes))
            while len(grants) < room and (grant := self.take_slot(payload_bytes)) is not None:
                worker.grants[grant.slot] = grant
                self._granted[grant.slot] = worker
                self._tables.slots.set_lasting(grant.slot, True)
                grants.append(grant)
            if grants:  # else it is answered when there is one
                worker.stock[slot_bytes(payload_bytes)] += len(grants)
                del self.wants[want]
                self._out.send(worker, Granted(grants))

    def take_slot(self, payload_bytes: int, owner: bytes = UNLIMITED) -> Grant | None:
        """A free slot, made free if need be; for a page of this owner, where that is known."""
        size = slot_bytes(payload_bytes)
        # What is being emptied for one size isn't for another.
        may_start = self._emptying is None or self._emptying.slot_bytes == size
        slot = self._tables.slots.take(size, may_start=may_start)
        if slot is None and (self._make_room(size, may_start, owner) or self._begin_emptying(size)):
            slot = self._tables.slots.take(size, may_start=may_start)
        if slot is None:
            return None
        if self._emptying is not None and self._emptying.slot_bytes == size:
            self._end_emptying()
        self._generation += 1
        return Grant(slot, self._generation, payload_bytes)

    def _make_room(self, size: int, may_start: bool, owner: bytes) -> bool:
        """Evicts a page of this size, or a segment of another size whose pages are all worth less.

        Spent pages go first, then clean ones, dirty ones only while no write is about to end.
        """
        over = self._tables.shares.over(TierName.HOST)
        if self._tables.shares.excess(TierName.HOST, owner, size) and owner not in over:
            over.append(owner)
        if over and self._evict_lowest(self._eviction.orders_at(size, over)):
            return True
        own = self._eviction.orders_at(size)
        others = [
            self._eviction.orders[other, UNLIMITED] for other in self._eviction.order_sizes if other != size
        ]
        if not others:
            return self._evict_lowest(own)
        for rank in HostRank:
            mine = self._lowest_of(own, rank)
            if may_start and others and self._evict_older_segment(others, rank, mine):
                return True
            if mine is not None:
                self._residency.evict_host(mine)
                return True
        return False

    def _evict_lowest(self, groups: list[list[Order[Page]]]) -> bool:
        """Evict the page that leaves first of several groups of orders; whether one may."""
        if len(groups) == 1:
            for order in groups[0]:
                if (
                    order.members
                    and (page := self._eviction.host_victim(order)) is not None
                    and self._eviction.may_lose(page)
                ):
                    self._residency.evict_host(page)
                    return True
            return False
        for rank in HostRank:
            if (page := self._lowest_of(groups, rank)) is not None:
                self._residency.evict_host(page)
                return True
        return False

    def _lowest_of(self, groups: Iterable[list[Order[Page]]], rank: HostRank) -> Page | None:
        """The page of this rank that leaves first, where it may."""
        pages = [self._eviction.host_victim(orders[rank]) for orders in groups if orders[rank].members]
        return self._eviction.lowest(
            [page for page in pages if page is not None and self._eviction.may_lose(page)]
        )

    def _evict_older_segment(
        self, others: list[list[Order[Page]]], rank: HostRank, mine: Page | None
    ) -> bool:
        """Evict a segment of another size, if its pages are all worth less than `mine`."""
        other = self._lowest_of(others, rank)
        if other is None:
            return False
        bound = inf if mine is None else self._eviction.value(mine)
        return self._eviction.value(other) <= bound and self._evict_segment(other, rank, bound)

    def _evict_segment(self, page: Page, rank: HostRank, bound: float) -> bool:
        """Evict all pages of this page's segment, if all of them may go and none is worth more."""
        assert page.host is not None
        segment = self._tables.slots.segment(page.host.grant.slot)
        if self._tables.slots.has_lasting(segment):
            return False
        pages: list[Page] = []
        for slot in self._tables.slots.used_in(segment):
            copy = self._residency.copies.get(slot)
            if (
                copy is None
                or copy.readers
                or copy.page.host is not copy
                or not self._eviction.may_lose(copy.page)
            ):
                return False
            its_rank = self._eviction.rank(copy.page)
            if its_rank > rank or (
                its_rank is not HostRank.SPENT and self._eviction.value(copy.page) > bound
            ):
                return False
            pages.append(copy.page)
        for one in pages:
            self._residency.evict_host(one)
        return True

    def _begin_emptying(self, size: int) -> bool:
        """Start draining the segment of another size that holds the lowest-ranked page. Returns True if one may be free now.

        Only where no slot of this size comes back by itself, and one segment at a time.
        """
        if self._emptying is not None or self._tables.slots.passing_slots(size) > 0:
            return False
        lowest = [
            page
            for other in self._eviction.order_sizes
            for order in self._eviction.orders[other, UNLIMITED]
            if other != size and (page := self._eviction.host_victim(order)) is not None
        ]
        for page in sorted(lowest, key=self._eviction.value):
            assert page.host is not None
            segment: int | None = self._tables.slots.segment(page.host.grant.slot)
            if segment is not None and not self._tables.slots.has_lasting(segment):
                break
        else:
            segment = self._tables.slots.passing_segment(size)
        if segment is None:
            return False
        self._emptying = Emptying(segment, size)
        self._tables.slots.close(segment)
        self._empty(segment)
        return True

    def _empty(self, segment: int) -> None:
        """Evict what may go, at once where it is read: its slot is free when its readers are done."""
        for slot in self._tables.slots.used_in(segment):
            copy = self._residency.copies.get(slot)
            if copy is None or copy.page.host is not copy:
                continue
            if self._tables.demotes and copy.page.leaving is Leaving.STAYS:
                self._residency.leave(copy.page)
            if self._eviction.may_lose(copy.page):
                self._residency.evict_host(copy.page)

    def pump_shares(self) -> bool:
        """Who is over its share of L3 gives up its own pages, as far as they may go; whether any went."""
        evicted = False
        for owner in self._tables.shares.over(TierName.HOST):
            groups = [
                orders
                for size in self._eviction.order_sizes
                for orders in self._eviction.orders_at(size, [owner])
            ]
            while self._tables.shares.excess(TierName.HOST, owner) and self._evict_lowest(groups):
                evicted = True
        return evicted

    def _end_emptying(self) -> None:
        assert self._emptying is not None
        self._tables.slots.reopen(self._emptying.segment)
        self._emptying = None
        self.has_emptied = True

    def pump_emptying(self) -> None:
        """Evict what may go from the segment, and give up when nothing waits for it or something there lasts."""
        emptying = self._emptying
        if emptying is None:
            return
        if self._tables.slots.has_lasting(emptying.segment) or not self._is_waited_for(emptying.slot_bytes):
            self._end_emptying()
        else:
            self._empty(emptying.segment)

    def _is_waited_for(self, size: int) -> bool:
        """Does something wait for a slot of this size that may have one?"""
        if self._in_flight.queue and next(iter(self._in_flight.queue)).page.slot_bytes == size:
            return True
        if size in self._in_flight.fetches.sizes_waited_for(self._tables.now):
            return True
        return not self._tables.draining and any(
            slot_bytes(payload_bytes) == size and self._room_to_grant(worker, payload_bytes) > 0
            for worker, payload_bytes in self.wants
        )

    def want(self, worker: Worker, message: WantSlots) -> str | None:
        if message.payload_bytes not in worker.hello.payloads.values():
            return f"it wants slots for pages of {message.payload_bytes} bytes, which it hasn't named"
        want = (worker, message.payload_bytes)
        self.wants.pop(want, None)
        if message.count > 0:
            self.wants[want] = message.count
        else:
            self._out.send(worker, Granted([]))
        return None

    def return_slots(self, worker: Worker, grants: Iterable[Grant]) -> None:
        """A worker has no use for these slots."""
        for grant in list(grants):
            if self.end_grant(worker, grant):
                self._tables.slots.free(grant.slot)
