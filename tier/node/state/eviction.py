"""Eviction order and value of the pages in L3 and L4, and which of them may be evicted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.ranking import Order
from kvtier.tier.node.state.records import HostRank, Leaving, Page, SsdRank, host_orders, ssd_orders
from kvtier.tier.node.state.shares import UNLIMITED
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.events import WorkerRef

VALUE_S, MAX_VALUES = 1.0, 4096  # for so long, and of so many pages, a value is kept; it changes slowly


class Eviction:
    """Keeps each page in the order it is evicted by, and picks victims.

    Orders of L3 are by slot size and owner, those of L4 by owner. Of UNLIMITED are all pages, of an owner with a share its
    own once more: while it is over its share only these are looked at, and else no other's are, however many owners
    there are.
    """

    def __init__(self, tables: NodeTables, in_flight: InFlight, frames: PeerFrames) -> None:
        self._tables, self._in_flight, self._frames = tables, in_flight, frames
        self.orders: dict[tuple[int, bytes], list[Order[Page]]] = {}  # then by HostRank
        self.order_sizes: dict[int, None] = {}  # of all orders
        self._spare_orders: list[list[Order[Page]]] = []  # of sizes that no worker uses any more
        self.ssd_orders: dict[bytes, list[Order[Page]]] = {}  # then by SsdRank
        self._redraws = 0  # times that pages were used
        self.values: dict[Page, float] = {}  # of copies in L3, lately
        self.ssd_values: dict[Page, float] = {}
        self._valued_at = tables.now
        self.above: dict[WorkerRef, dict[Page, None]] = {}  # `page.above`, by worker
        # Pages that a gone worker had `above`, or, of a node that drains, that still wait for L4 by their old ranking.
        self.unsettled: dict[Page, None] = {}

    # ---- the orders of eviction --------------------------------------------------------------------------------

    def settle(self, page: Page) -> None:
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
            size, rank = page.slot_bytes, self.rank(page)
            order = (self.orders.get((size, UNLIMITED)) or self._orders_of(size, UNLIMITED))[rank]
            if page.owner:
                own = (self.orders.get((size, page.owner)) or self._orders_of(size, page.owner))[rank]
            if (page.superseded or page.above) and not page.host.readers:
                self._in_flight.to_write.pop(page, None)
        if order is not page.host_order:
            page.host_order = _moved(page, page.host_order, order)
        if own is not page.own_host_order:
            page.own_host_order = _moved(page, page.own_host_order, own)
        order = own = None
        if page.ssd is not None:
            ssd_rank = self.ssd_rank(page)
            order = self.ssd_orders_of(UNLIMITED)[ssd_rank]
            own = self.ssd_orders_of(page.owner)[ssd_rank] if page.owner else None
        if order is not page.ssd_order:
            page.ssd_order = _moved(page, page.ssd_order, order)
        if own is not page.own_ssd_order:
            page.own_ssd_order = _moved(page, page.own_ssd_order, own)

    def rank(self, page: Page) -> HostRank:
        """Returns a page's class in L3's eviction order."""
        if page.superseded or page.above:
            return HostRank.SPENT
        if self._tables.demotes:
            if page.leaving is not Leaving.STAYS:
                can_go = page.ssd is not None or page.leaving is Leaving.GOES
                return HostRank.CLEAN if can_go else HostRank.SINKING
        elif page.ssd is not None:
            return HostRank.CLEAN
        return HostRank.INNER if page.envelope.key in self._tables.children else HostRank.LEAF

    def ssd_rank(self, page: Page) -> SsdRank:
        """Returns a page's class in L4's eviction order."""
        if page.superseded:
            return SsdRank.SPENT
        if page.above or (self._tables.demotes and page.host is not None and page.leaving is Leaving.STAYS):
            return SsdRank.SPARE
        return SsdRank.INNER if page.envelope.key in self._tables.children else SsdRank.LEAF

    def not_above(self, page: Page) -> None:
        """Clears `above`; the caller settles the page."""
        ref, page.above = page.above, None
        if ref is not None and ref in self.above:
            del self.above[ref][page]
            if not self.above[ref]:
                del self.above[ref]

    def settle_all(self, key: bytes) -> None:
        for page in self._tables.named(key):
            self.settle(page)

    def stay(self, page: Page) -> None:
        """Cancels a demotion that has begun."""
        if page.leaving is not Leaving.STAYS:
            page.leaving = Leaving.STAYS
            self._in_flight.to_write.pop(page, None)
            self.settle(page)

    def _orders_of(self, size: int, owner: bytes) -> list[Order[Page]]:
        """Returns the orders of a slot size and owner, new ones if need be; drops those of sizes out of use."""
        for other in [
            s
            for s in self.order_sizes
            if s not in self._tables.sizes and not self._tables.slots.used_slots(s)
        ]:
            del self.order_sizes[other]
            for key in [key for key in self.orders if key[0] == other]:
                self._spare_orders.append(self.orders.pop(key))
        self.order_sizes[size] = None
        spare = self._spare_orders
        orders = spare.pop() if spare else host_orders(self._tables.policy, demotes=self._tables.demotes)
        self.orders[size, owner] = orders
        return orders

    def ssd_orders_of(self, owner: bytes) -> list[Order[Page]]:
        orders = self.ssd_orders.get(owner)
        if orders is None:
            orders = self.ssd_orders[owner] = ssd_orders(self._tables.policy, demotes=self._tables.demotes)
        return orders

    def renew(self, page: Page, created: int) -> None:
        """Gives a new page its row again, now that the number of pages its request brought is known."""
        listed = (page.host_order, page.own_host_order, page.ssd_order, page.own_ssd_order, page.peer_order)
        orders = [order for order in listed if order is not None]
        for order in orders:
            order.discard(page)
        self.values.pop(page, None)
        self.ssd_values.pop(page, None)
        depth = page.envelope.depth
        page.row = self._tables.histories.renew(page.row, depth, page.slot_bytes, created, self._tables.now)
        for order in orders:
            order.add(page)

    def redraw(self) -> None:
        """Invalidates values and candidates after pages were used and loads were measured.

        Each order hears of it when it is asked next: there may be many.
        """
        self._forget_values()
        self._redraws += 1
        self._frames.redraw_peers()

    def _host_first(self, order: Order[Page]) -> Page | None:
        """Returns the lowest-valued page of an order of L3, read or not."""
        if order.members and order.drawn_in != self._redraws:
            order.redraw(self._redraws)
            order.candidates.load_s = self._in_flight.host_load_s(
                next(iter(order.members.values())).slot_bytes
            )
        return order.lowest(self._tables.now)

    def _ssd_first(self, order: Order[Page]) -> Page | None:
        """Returns the lowest-valued page of an order of L4, read or not."""
        if order.members and order.drawn_in != self._redraws:
            order.redraw(self._redraws)
            order.candidates.load_s = self._in_flight.ssd_load_s(self._ssd_page_bytes())
        return order.lowest(self._tables.now)

    def _ssd_page_bytes(self) -> int:
        """Mean slot bytes of L4's pages."""
        assert self._tables.ssd is not None
        num_pages = sum(len(order) for order in self.ssd_orders_of(UNLIMITED))
        return self._tables.ssd.used_bytes // max(1, num_pages)

    def value(self, page: Page) -> float:
        """Value of a page's copy in L3: seconds that it is expected to save."""
        return self._cached_value(self.values, page, self._in_flight.host_load_s)

    def ssd_value(self, page: Page) -> float:
        """Value of a page's copy in L4, there or to be written."""
        return self._cached_value(self.ssd_values, page, self._in_flight.ssd_load_s)

    def _cached_value(self, values: dict[Page, float], page: Page, load_s: Callable[[int], float]) -> float:
        """Returns a value computed at most VALUE_S ago and since pages were last used."""
        if self._tables.now > self._valued_at + VALUE_S or len(values) > MAX_VALUES:
            self._forget_values()
        value = values.get(page)
        if value is None:
            value = values[page] = self._tables.policy.value(
                page.row, self._tables.now, load_s(page.slot_bytes)
            )
        return value

    def _forget_values(self) -> None:
        self._valued_at = self._tables.now
        self.values.clear()
        self.ssd_values.clear()

    def may_lose(self, page: Page) -> bool:
        """May a page go from L3? One that L4 is to have waits while writes may soon leave clean ones.

        Where pages are demoted, each waits until its turn has come.
        """
        if page.superseded or page.above or not self._tables.goes_to_l4(page):
            return True
        if self._tables.demotes and page.leaving is Leaving.STAYS:
            return False
        return page.ssd is not None or page.leaving is Leaving.GOES or not self._in_flight.writes

    def host_victim(self, order: Order[Page]) -> Page | None:
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

    def lowest(self, pages: Sequence[Page]) -> Page | None:
        """Returns the page of L3 with the lowest value."""
        return min(pages, key=self.value) if len(pages) > 1 else pages[0] if pages else None

    def lowest_ssd(self, groups: Iterable[list[Order[Page]]], rank: SsdRank) -> Page | None:
        """Returns the page of a rank that is evicted from L4 first."""
        victims = [self._ssd_victim(orders[rank]) for orders in groups if orders[rank].members]
        pages = [page for page in victims if page is not None]
        return min(pages, key=self.ssd_value) if len(pages) > 1 else pages[0] if pages else None

    def orders_at(self, size: int, owners: Iterable[bytes] = (UNLIMITED,)) -> list[list[Order[Page]]]:
        """Returns the orders of a slot size: of all pages, or of these owners."""
        return [orders for owner in owners if (orders := self.orders.get((size, owner))) is not None]


def _moved(page: Page, before: Order[Page] | None, after: Order[Page] | None) -> Order[Page] | None:
    """Moves a page from one order to another. Returns the latter."""
    if before is not None:
        before.discard(page)
    if after is not None:
        after.add(page)
    return after
