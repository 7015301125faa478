"""What the pages of a node are worth, which of them is worth least, and whether it may go. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier.tier.node.state.cache_state import CacheState
from kvtier.tier.node.state.ranking import Order
from kvtier.tier.node.state.records import Leaving, Page, SsdRank, Worker
from kvtier.tier.node.state.shares import UNLIMITED
from kvtier.tier.pages.page import slot_bytes

VALUE_S, MAX_VALUES = 1.0, 4096  # for so long, and of so many pages, a value is kept; it changes slowly


class RankedState(CacheState):
    """A CacheState that knows which page leaves first."""

    def _leave(self, page: Page) -> None:
        """A page's turn to leave L3 has come: it sinks, or goes if that isn't worth it, however much room L4 has."""
        page.leaving = Leaving.SINKS
        if page.ssd is None:
            if not self._policy.is_dead(page.row):
                self._sink(page)
            if page not in self._to_write:
                self._give_up(page)
        self._settle(page)

    def _give_up(self, page: Page) -> None:
        """A page whose turn it is won't get to L4: it goes, if none behind it in its chain is here."""
        if page.leaving is Leaving.SINKS and page.envelope.key not in self._children:
            page.leaving = Leaving.GOES
            self._settle(page)

    def _is_used_by(self, page: Page, worker: Worker) -> None:
        """Remember whether one worker alone uses a page."""
        page.shared |= page.user not in (None, worker.ref)
        page.user = worker.ref

    def _bring_back(self, page: Page) -> None:
        """What a worker had taken up may not come down again."""
        if page.above is not None:
            self._not_above(page)
            if page.host is not None and page.ssd is not None:
                page.leaving = Leaving.SINKS  # on its way through L3, until it is known who has it
            self._settle(page)

    def _renew(self, page: Page, created: int) -> None:
        """Of a new page it is known now how many pages its request brought."""
        listed = (page.host_order, page.own_host_order, page.ssd_order, page.own_ssd_order, page.peer_order)
        orders = [order for order in listed if order is not None]
        for order in orders:
            order.discard(page)
        self._values.pop(page, None)
        self._ssd_values.pop(page, None)
        depth = page.envelope.depth
        page.row = self._histories.renew(page.row, depth, page.slot_bytes, created, self._now)
        for order in orders:
            order.add(page)

    def _redraw(self) -> None:
        """After pages were used: what leaves first is another now, and what loading costs may have changed.

        Each order hears of it when it is asked next: there may be many.
        """
        self._forget_values()
        self._redraws += 1
        self._redraw_peers()

    def _host_first(self, order: Order[Page]) -> Page | None:
        """What leaves an order of L3 first, by what has been used up to now; readers are no matter."""
        if order.members and order.drawn_in != self._redraws:
            order.redraw(self._redraws)
            order.candidates.load_s = self._host_load_s(next(iter(order.members.values())).slot_bytes)
        return order.lowest(self._now)

    def _ssd_first(self, order: Order[Page]) -> Page | None:
        """The same of L4."""
        if order.members and order.drawn_in != self._redraws:
            order.redraw(self._redraws)
            order.candidates.load_s = self._ssd_load_s(self._ssd_page_bytes())
        return order.lowest(self._now)

    def _ssd_page_bytes(self) -> int:
        """Slot bytes of the pages of L4, on average."""
        assert self._ssd is not None
        num_pages = sum(len(order) for order in self._ssd_orders_of(UNLIMITED))
        return self._ssd.used_bytes // max(1, num_pages)

    def _value(self, page: Page) -> float:
        """What a page's copy in L3 is worth."""
        return self._cached_value(self._values, page, self._host_load_s)

    def _ssd_value(self, page: Page) -> float:
        """What a page's copy in L4 is worth, or would be."""
        return self._cached_value(self._ssd_values, page, self._ssd_load_s)

    def _cached_value(self, values: dict[Page, float], page: Page, load_s: Callable[[int], float]) -> float:
        """A value holds until pages are used, or for a while."""
        if self._now > self._valued_at + VALUE_S or len(values) > MAX_VALUES:
            self._forget_values()
        value = values.get(page)
        if value is None:
            value = values[page] = self._policy.value(page.row, self._now, load_s(page.slot_bytes))
        return value

    def _forget_values(self) -> None:
        self._valued_at = self._now
        self._values.clear()
        self._ssd_values.clear()

    def _may_lose(self, page: Page) -> bool:
        """May a page go from L3? One that L4 is to have waits while writes may soon leave clean ones.

        Where pages are demoted, each waits until its turn has come.
        """
        if page.superseded or page.above or not self._sinks(page):
            return True
        if self._demotes and page.leaving is Leaving.STAYS:
            return False
        return page.ssd is not None or page.leaving is Leaving.GOES or not self._writes

    def _room_to_grant(self, worker: Worker, payload_bytes: int) -> int:
        """Stocks take at most half of L3; of that each worker has its share, and of it each of its sizes."""
        size = slot_bytes(payload_bytes)
        sharing = len(self._workers) - self._num_exchanges
        share = self._slots.capacity_bytes // (2 * sharing * len(worker.sizes))
        room = max(1, share // size) - worker.stock[size]
        return min(room, self._slots.room_to_last(size, self._sizes, len(self._pins_to_come)))

    def _may_read(self, page: Page) -> bool:
        """May one more page be on its way up? Those that have come and aren't copied still are."""
        fits = self._read_bytes + self._rising_bytes + page.slot_bytes <= self.max_rising_bytes
        return not self._reads or (len(self._reads) < self.limits.reads and fits)

    def _host_victim(self, order: Order[Page]) -> Page | None:
        while (page := self._host_first(order)) is not None:
            assert page.host is not None
            if not page.host.readers and not page.pinned:
                return page
            order.discard(page)
            if page.host_order is order:
                page.host_order = None
            else:
                page.own_host_order = None
        return None

    def _ssd_victim(self, order: Order[Page]) -> Page | None:
        while (page := self._ssd_first(order)) is not None:
            assert page.ssd is not None
            if not page.ssd.readers and not page.pinned:
                return page
            order.discard(page)
            if page.ssd_order is order:
                page.ssd_order = None
            else:
                page.own_ssd_order = None
        return None

    def _lowest(self, pages: Sequence[Page]) -> Page | None:
        """The page of L3 that is worth least."""
        return min(pages, key=self._value) if len(pages) > 1 else pages[0] if pages else None

    def _lowest_ssd(self, groups: Iterable[list[Order[Page]]], rank: SsdRank) -> Page | None:
        """The page of this rank that leaves L4 first."""
        victims = [self._ssd_victim(orders[rank]) for orders in groups if orders[rank].members]
        pages = [page for page in victims if page is not None]
        return min(pages, key=self._ssd_value) if len(pages) > 1 else pages[0] if pages else None
