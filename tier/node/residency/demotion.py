"""Demotes pages from L3 to L4, and evicts from L4. Pure.

With `write="demote"` a page goes down when its turn comes, before its slot is wanted: some slots of L3 are free, or hold
pages that may go at once. What is worth less than all that L4 holds is dropped instead of written.
"""

from __future__ import annotations

from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.holders import Holders
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.ranking import Order
from kvtier.tier.node.state.records import HostRank, Leaving, Page, SsdCopy, SsdRank, Write
from kvtier.tier.node.state.shares import UNLIMITED
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import Failure, WritePage
from kvtier.tier.stores.base import CatalogueEntry, Place

READY_SHARE = 128  # one slot in so many of a size is kept free, or ready to be
SPARE_SHARE = 32  # copies in L4 are few that are at most one in so many
OTHERS_TRIED = 16  # pages of other sizes that leave L4 for one that comes, before a whole segment does
RETIRED_S = 60.0  # before a segment that the disk had no room for is tried again
SPARE = (SsdRank.SPENT, SsdRank.SPARE)


class Demotion:
    """Moves pages from L3 to L4, and evicts from L4."""

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        holders: Holders,
        in_flight: InFlight,
        eviction: Eviction,
        residency: Residency,
    ) -> None:
        self._tables, self._out, self._holders = tables, out, holders
        self._in_flight, self._eviction, self._residency = in_flight, eviction, residency
        self._ssd_failing = False
        self._ssd_emptying: int | None = None  # a segment whose pages leave in parts, for another size
        self._ssd_restored_at = 0.0  # when segments that the disk had no room for are tried again

    # ---- whose turn it is --------------------------------------------------------------------------------------

    def pump_demotions(self) -> bool:
        """Starts as many demotions as slots must come free. Returns True if any started."""
        if not self._tables.demotes or self._tables.quiesced:
            return False
        begun = False
        for owner in self._tables.shares.over(TierName.HOST):
            self._demote_excess(owner)
        for size in self._eviction.order_sizes:
            groups = self._eviction.orders_at(size)
            wanted = max(
                1, self._tables.slots.used_slots(size) // READY_SHARE
            ) - self._tables.slots.free_slots(size)
            ready = sum(map(_num_ready, groups)) if wanted > 0 else 0
            while wanted > ready and self._demote_lowest(groups):
                ready += 1
                begun = True
        return begun

    def _demote_excess(self, owner: bytes) -> None:
        """Starts demotions of an owner that is over its share."""
        sizes = {
            size: orders
            for size in self._eviction.order_sizes
            for orders in self._eviction.orders_at(size, [owner])
        }
        excess = self._tables.shares.excess(TierName.HOST, owner)
        while excess > sum(size * _num_ready(orders) for size, orders in sizes.items()):
            if not self._demote_lowest(list(sizes.values())):
                return

    def _demote_lowest(self, groups: list[list[Order[Page]]]) -> bool:
        """Starts demoting the page with the lowest value. Returns False if there is none.

        Demoting needs no order among the pages of a chain, as they can still be found; dropping takes leaves.
        """
        leaf = self._lowest_staying(groups, HostRank.LEAF)
        inner = self._lowest_staying(groups, HostRank.INNER)
        if leaf is not None and inner is not None and not self._tables.goes_to_l4(inner):
            inner = None
        page = self._eviction.lowest([page for page in (leaf, inner) if page is not None])
        if page is None:
            return False
        self._residency.leave(page)
        return True

    def _lowest_staying(self, groups: list[list[Order[Page]]], rank: HostRank) -> Page | None:
        pages = [self._eviction.host_victim(orders[rank]) for orders in groups if orders[rank].members]
        return self._eviction.lowest([page for page in pages if page is not None])

    # ---- writes ------------------------------------------------------------------------------------------------

    def pump_writes(self) -> None:
        while self._in_flight.to_write and len(self._in_flight.writes) < self._tables.limits.writes:
            # A page whose former life is still being written waits: its record must be the later one.
            page = next((p for p in self._in_flight.to_write if p.id not in self._in_flight.writing), None)
            if page is None or (
                self._in_flight.writes
                and self._in_flight.write_bytes + page.slot_bytes > self._in_flight.max_write_bytes
            ):
                return
            place = self._ssd_place(page)
            busy = (
                self._ssd_emptying is not None
                or self._in_flight.leaving
                or self._in_flight.reads
                or self._in_flight.queue
                or self._in_flight.checks
                or self._in_flight.writes
            )
            if page not in self._in_flight.to_write:
                continue  # another gave way for it
            if place is None and busy and page.leaving is not Leaving.GOES:
                return  # room may come when these are done
            del self._in_flight.to_write[page]
            if place is not None:
                self._write(page, place)
            elif page.leaving is Leaving.GOES:
                self._drop_at_once(page)
            else:
                self._residency.give_up(page)

    def _write(self, page: Page, place: Place) -> None:
        assert page.host is not None
        self._tables.ssd_generation += 1
        entry = CatalogueEntry(
            page.host.envelope, place, page.slot_bytes, self._tables.ssd_generation, page.content, page.uses
        )
        entry.last_use_s = page.last_use + self._tables.wall_offset_s
        page.host.readers += 1
        write = Write(page, page.host, entry)
        transfer = self._out.next_transfer()
        self._in_flight.writes[transfer] = self._in_flight.writing[page.id] = write
        self._in_flight.write_bytes += page.slot_bytes
        self._tables.shares.take(TierName.SSD, page.owner, page.slot_bytes)
        self._out.write_commands.append(WritePage(transfer, page.host.grant.slot, entry))

    def _end_write(self, transfer: int) -> Write:
        write = self._in_flight.writes.pop(transfer)
        del self._in_flight.writing[write.page.id]
        self._in_flight.write_bytes -= write.page.slot_bytes
        return write

    def write_done(self, transfer: int) -> None:
        write = self._end_write(transfer)
        page = write.page
        self._residency.ssd_counters.bytes_in += page.envelope.payload_bytes
        self._residency.host_counters.bytes_out += page.envelope.payload_bytes
        self._ssd_failing = False
        if self._tables.pages.get(page.id) is not page:  # it was dropped meanwhile
            self._out.drops.append(page.id)
            self._residency.free_place(page, write.entry.place, write.wipe)
        else:
            self._residency.ssd_counters.demoted_pages += 1
            page.ssd = SsdCopy(write.entry)
            self._residency.ssd_at[write.entry.place] = page
            self._holders.enter(page, TierName.SSD)
            self._eviction.settle(page)
        self._residency.end_read(write.copy)

    def write_failed(self, transfer: int, failure: Failure, detail: str) -> None:
        write = self._end_write(transfer)
        if failure == "full":
            self._retire_segment(write.entry.place.segment)
        self._residency.free_place(write.page, write.entry.place, write.wipe)
        if failure == "corrupt":
            self._residency.drop_corrupt(write.copy, "the write to L4")
        elif not self._ssd_failing:
            self._ssd_failing = True
            if failure == "full":
                self._out.note(
                    f"the disk of L4 has no room for another segment, it goes on with those it has: {detail}"
                )
            else:
                self._out.note(f"L4 takes no writes, pages stay in L3 alone: {detail}")
        if write.page.host is not None:
            self._residency.give_up(write.page)
        self._residency.end_read(write.copy)

    # ---- room in L4 --------------------------------------------------------------------------------------------

    def _retire_segment(self, segment: int) -> None:
        """Retires a segment that the disk has no room for; it is tried again after RETIRED_S.

        One that has pages has its room already.
        """
        assert self._tables.ssd is not None
        if not any(place in self._residency.ssd_at for place in self._tables.ssd.used_in(segment)):
            self._tables.ssd.retire(segment)
            self._ssd_restored_at = self._tables.now + RETIRED_S

    def _ssd_place(self, page: Page) -> Place | None:
        """Returns a slot of L4 for a page, evicting if need be. None if there is none now, or the page isn't worth it.

        Slots of other sizes are of no use to it, but for all of a segment: where what leaves first is of other sizes,
        a segment of it goes.
        """
        assert self._tables.ssd is not None
        if self._tables.ssd.has_retired and self._tables.now >= self._ssd_restored_at:
            self._tables.ssd.restore()
        if self._ssd_emptying is not None and not self._go_on_emptying(self._ssd_emptying):
            return None
        others = 0  # victims of other sizes
        for _ in range(self._tables.limits.evictions_per_write):
            excess = self._tables.shares.excess(TierName.SSD, page.owner, page.slot_bytes)
            place = None if excess else self._tables.ssd.alloc(page.slot_bytes)
            if place is not None:
                return place
            over = [page.owner] if excess else self._tables.shares.over(TierName.SSD)
            victim = self._ssd_victim_of(over)
            if victim is None and not excess:
                victim = self._ssd_victim_of([UNLIMITED])
            if victim is None or self._gives_way(page, victim):
                return None
            is_other = not excess and victim.slot_bytes != page.slot_bytes
            others += is_other
            wants_segment = is_other and (
                others > OTHERS_TRIED or not self._tables.ssd.segments_of(page.slot_bytes)
            )
            if wants_segment and self._begin_ssd_emptying(victim):
                if self._ssd_emptying is not None:
                    return None
            elif others > 2 * OTHERS_TRIED:
                return None
            else:
                self._evict_ssd(victim)
        return None

    def _evict_ssd(self, page: Page) -> None:
        self._residency.ssd_counters.evicted_pages += 1
        self._residency.drop_ssd(page)
        self._residency.lost_if_nowhere(page, "evicted", self._tables.by_policy(page, TierName.SSD))

    def _begin_ssd_emptying(self, victim: Page) -> bool:
        """Starts evicting the whole segment of a page, for another slot size. Returns False, and evicts none, unless all may go."""
        assert self._tables.ssd is not None and victim.ssd is not None
        segment = victim.ssd.entry.place.segment
        pages = [self._residency.ssd_at.get(place) for place in self._tables.ssd.used_in(segment)]
        # None: it is being written, or still read after it left
        if any(page is None or page.pinned or page.ssd is None or page.ssd.readers for page in pages):
            return False
        self._tables.ssd.close(segment)
        self._ssd_emptying = segment
        self._go_on_emptying(segment)
        return True

    def _go_on_emptying(self, segment: int) -> bool:
        """Evicts the next pages of the segment. Returns True when it is empty, or given up because a page was pinned."""
        assert self._tables.ssd is not None
        pages = [
            page
            for place in self._tables.ssd.used_in(segment)
            if (page := self._residency.ssd_at.get(place)) is not None
        ]
        if any(page.pinned for page in pages):
            self._tables.ssd.reopen(segment)
            self._ssd_emptying = None
            return True
        free = [page for page in pages if page.ssd is not None and not page.ssd.readers]
        free.sort(key=lambda page: -page.envelope.depth)  # what is left can be found by its prefix
        for page in free[: None if self._tables.draining else self._tables.limits.evictions_per_write]:
            self._evict_ssd(page)
        if not self._tables.ssd.used_in(segment):
            self._ssd_emptying = None
        return self._ssd_emptying is None

    def _ssd_victim_of(self, owners: list[bytes]) -> Page | None:
        """Returns the page of these owners that is evicted from L4 first."""
        groups = [self._eviction.ssd_orders[owner] for owner in owners if owner in self._eviction.ssd_orders]
        for rank in SsdRank:
            if groups and (page := self._eviction.lowest_ssd(groups, rank)) is not None:
                return page
        return None

    def _gives_way(self, page: Page, victim: Page) -> bool:
        """Returns whether a page to be demoted is worth less than the page that L4 would evict for it; if so, it is dropped.

        Where pages hang on it the lowest leaf of L3 goes in its place, if that is worth less, and it stays.
        """
        least = self._least_staying(victim)
        if page.leaving is not Leaving.SINKS or least is None:
            return False
        bar = self._eviction.ssd_value(least)
        if self._eviction.ssd_value(page) > bar:
            return False
        if page.envelope.key not in self._tables.children:
            self._residency.give_up(page)
            return True
        leaf = self._lowest_staying(self._eviction.orders_at(page.slot_bytes, [page.owner]), HostRank.LEAF)
        if leaf is None or self._eviction.ssd_value(leaf) > bar:
            return False
        self._eviction.stay(page)
        leaf.leaving = Leaving.GOES
        self._eviction.settle(leaf)
        self._drop_at_once(leaf)
        return True

    def _least_staying(self, victim: Page) -> Page | None:
        """Returns the page whose value a page must exceed to be written in the place of `victim`. None: any value will do.

        While few copies in L4 are spare, the pages to come will soon have taken the places of those, and then push out
        what is worth least: what is worth less yet isn't written for that while.
        """
        rank = self._eviction.ssd_rank(victim)
        if rank >= SsdRank.LEAF:
            return victim
        groups = [self._eviction.ssd_orders_of(UNLIMITED)]
        spare, num_pages = (
            sum(len(orders[r]) for orders in groups for r in ranks) for ranks in (SPARE, SsdRank)
        )
        if rank is not SsdRank.SPARE or spare * SPARE_SHARE > num_pages:
            return None
        return self._eviction.lowest_ssd(groups, SsdRank.LEAF)

    def _drop_at_once(self, page: Page) -> None:
        """Evicts a page from L3 now, so that the page before it in its chain can be evicted."""
        if page.host is not None and not page.host.readers and not page.pinned:
            self._residency.evict_host(page)


def _num_ready(orders: list[Order[Page]]) -> int:
    return (
        len(orders[0].members) + len(orders[1].members) + len(orders[2].members)
    )  # SPENT, CLEAN and SINKING
