"""Makes room in L3, and shares it out: whose stock may grow, which pages go, which segment changes its size. Pure."""

from __future__ import annotations

from kvtier.tier.cache_check import CheckedState
from kvtier.tier.messages import Grant, Granted
from kvtier.tier.page import slot_bytes
from kvtier.tier.records import Emptying, HostOrders, Page


class HostRoom(CheckedState):
    """The part of the coordinator that hands out slots of L3; see Coordinator for its liveness.

    A size takes its room from its own oldest pages, or from a segment of another size all of whose pages are older.
    Where it has no pages to give up, it lets a segment of another size run empty: one at a time, and only while
    somebody waits for it.
    """

    def _pump_grants(self) -> None:
        if self._draining:
            return
        for want in list(self._wants):
            worker, payload_bytes = want
            grants: list[Grant] = []
            room = min(self._wants[want], self._room_to_grant(worker, payload_bytes))
            while len(grants) < room and (grant := self._take_slot(payload_bytes)) is not None:
                worker.grants[grant.slot] = grant
                self._granted[grant.slot] = worker
                self._slots.set_lasting(grant.slot, True)
                grants.append(grant)
            if grants:  # else it is answered when there is one
                worker.stock[slot_bytes(payload_bytes)] += len(grants)
                del self._wants[want]
                self._send(worker, Granted(grants))

    def _take_slot(self, payload_bytes: int) -> Grant | None:
        """A free slot, made free if need be."""
        size = slot_bytes(payload_bytes)
        # What is being emptied for one size isn't for another.
        may_start = self._emptying is None or self._emptying.slot_bytes == size
        slot = self._slots.take(size, may_start=may_start)
        if slot is None and (self._make_room(size, may_start) or self._begin_emptying(size)):
            slot = self._slots.take(size, may_start=may_start)
        if slot is None:
            return None
        if self._emptying is not None and self._emptying.slot_bytes == size:
            self._end_emptying()
        self._generation += 1
        return Grant(slot, self._generation, payload_bytes)

    def _make_room(self, size: int, may_start: bool) -> bool:
        """Evict a page of this size, or a segment of another whose pages are all worth less.

        Superseded pages go first, then clean ones, dirty ones only while no write is about to end.
        """
        orders = self._orders.get(size)
        for rank in range(4):
            own = None if orders is None else self._oldest(orders, rank)
            if may_start and len(self._orders) > 1:
                before = self._now if own is None else own.last_use
                others = [self._oldest(o, rank) for o in self._orders.values() if o is not orders]
                other = min((p for p in others if p is not None), key=lambda p: p.last_use, default=None)
                if (
                    other is not None
                    and other.last_use <= before
                    and self._evict_segment(other, rank, before)
                ):
                    return True
            if own is not None:
                self._evict_host(own)
                return True
        return False

    def _oldest(self, orders: HostOrders, rank: int) -> Page | None:
        """The page of this size and rank that leaves first, where it may."""
        page = self._host_victim(orders[rank])
        return page if page is not None and self._may_lose(page) else None

    def _evict_segment(self, page: Page, rank: int, before: float) -> bool:
        """Evict all pages of this page's segment, if all of them may go and none is worth more."""
        assert page.host is not None
        segment = self._slots.segment(page.host.grant.slot)
        if self._slots.has_lasting(segment):
            return False
        pages: list[Page] = []
        for slot in self._slots.used_in(segment):
            copy = self._copies.get(slot)
            if copy is None or copy.readers or copy.page.host is not copy or not self._may_lose(copy.page):
                return False
            if self._rank(copy.page) > rank or (copy.page.last_use > before and not copy.page.superseded):
                return False
            pages.append(copy.page)
        for one in pages:
            self._evict_host(one)
        return True

    def _begin_emptying(self, size: int) -> bool:
        """Where no slot of this size will come back by itself: let a segment of another size run empty.

        The one whose oldest page is the oldest, else any; one at a time. Whether it may be empty already.
        """
        if self._emptying is not None or self._slots.passing_slots(size) > 0:
            return False
        oldest = [
            page
            for other, orders in self._orders.items()
            for order in orders
            if other != size and (page := self._host_victim(order)) is not None
        ]
        for page in sorted(oldest, key=lambda page: page.last_use):
            assert page.host is not None
            segment: int | None = self._slots.segment(page.host.grant.slot)
            if segment is not None and not self._slots.has_lasting(segment):
                break
        else:
            segment = self._slots.passing_segment(size)
        if segment is None:
            return False
        self._emptying = Emptying(segment, size)
        self._slots.close(segment)
        self._empty(segment)
        return True

    def _empty(self, segment: int) -> None:
        """Evict what may go, at once where it is read: its slot is free when its readers are done."""
        for slot in self._slots.used_in(segment):
            copy = self._copies.get(slot)
            if copy is not None and copy.page.host is copy and self._may_lose(copy.page):
                self._evict_host(copy.page)

    def _end_emptying(self) -> None:
        assert self._emptying is not None
        self._slots.reopen(self._emptying.segment)
        self._emptying = None
        self._has_emptied = True

    def _pump_emptying(self) -> None:
        """Evict what may go from the segment, and give up when nobody waits for it or something there lasts."""
        emptying = self._emptying
        if emptying is None:
            return
        if self._slots.has_lasting(emptying.segment) or not self._is_waited_for(emptying.slot_bytes):
            self._end_emptying()
        else:
            self._empty(emptying.segment)

    def _is_waited_for(self, size: int) -> bool:
        """Does somebody wait for a slot of this size that may have one?"""
        if self._queue and next(iter(self._queue)).page.slot_bytes == size:
            return True
        return not self._draining and any(
            slot_bytes(payload_bytes) == size and self._room_to_grant(worker, payload_bytes) > 0
            for worker, payload_bytes in self._wants
        )
