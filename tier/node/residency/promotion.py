"""Promotes pages from L4 to L3 for requests that wait for them. Pure."""

from __future__ import annotations

from kvtier.tier.node.residency.l3_room import L3Room
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.records import Leaving, Load, Page
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import Envelope
from kvtier.tier.protocol.events import Failure, ReadPage


class Promotion:
    """Moves pages from L4 to L3, for the requests that wait for them."""

    def __init__(
        self, tables: NodeTables, out: Outbox, in_flight: InFlight, residency: Residency, l3: L3Room
    ) -> None:
        self._tables, self._out, self._in_flight = tables, out, in_flight
        self._residency, self._l3 = residency, l3

    def _may_read(self, page: Page) -> bool:
        """Returns whether one more read may start. Pages count until they have been copied to L1."""
        fits = (
            self._in_flight.read_bytes + self._in_flight.promoting_bytes + page.slot_bytes
            <= self._in_flight.max_promoting_bytes
        )
        return not self._in_flight.reads or (len(self._in_flight.reads) < self._tables.limits.reads and fits)

    # ---- L4 -> L3 ----------------------------------------------------------------------------------------------

    def pump_loads(self) -> None:
        while self._in_flight.queue:
            load = next(iter(self._in_flight.queue))
            page = load.page
            if not self._may_read(page):
                return
            grant = self._l3.take_slot(page.envelope.payload_bytes, page.owner)
            if grant is None:
                if self._tables.slots.available(page.slot_bytes) > 0:
                    return
                # What is in stock, held and pinned is of other sizes, and leaves no segment to this one.
                self._residency.fail_waiters(
                    page, "no_room", f"L3 has no room for pages of {page.envelope.payload_bytes} bytes"
                )
                continue
            self._residency.leave_queue(load)
            if not self._in_flight.reads:
                self._in_flight.bandwidth.started(self._tables.now)
            load.transfer, load.grant = self._out.next_transfer(), grant
            self._in_flight.reads[load.transfer] = load
            self._in_flight.read_bytes += page.slot_bytes
            self._in_flight.arriving[grant.slot] = load
            entry = load.source.entry
            key, variant = entry.envelope.key, entry.envelope.variant
            self._out.commands.append(
                ReadPage(load.transfer, entry.place, grant.slot, entry.envelope.payload_bytes, key, variant)
            )

    def _end_load(self, transfer: int) -> Load:
        """Removes a read that is over from the tables."""
        load = self._in_flight.reads.pop(transfer)
        assert load.grant is not None
        del self._in_flight.arriving[load.grant.slot]
        self._in_flight.read_bytes -= load.page.slot_bytes
        return load

    def read_done(self, transfer: int, envelope: Envelope) -> None:
        if envelope.checksum != self._in_flight.reads[transfer].source.entry.envelope.checksum:
            self.read_failed(transfer, "corrupt", "the slot holds other bytes than the catalogue says")
            return
        load = self._end_load(transfer)
        page, grant = load.page, load.grant
        assert grant is not None
        self._in_flight.bandwidth.finished(grant.payload_bytes, self._tables.now)
        self._residency.ssd_counters.bytes_out += grant.payload_bytes
        self._residency.ssd_counters.loads_s.append(self._tables.now - load.queued_at)
        if page.load is load:
            self._residency.host_counters.promoted_pages += 1
            self._residency.host_counters.bytes_in += grant.payload_bytes
            if self._tables.demotes and load.waiters:
                page.leaving = Leaving.SINKS
            copy = self._residency.arrive(page, grant, load.source.entry.envelope)
            self._residency.serve_waiters(page, copy, "L4")
            if copy.leases:
                copy.promoting = True
                self._in_flight.promoting_bytes += page.slot_bytes
        else:
            self._tables.slots.free(grant.slot)
        self._residency.end_ssd_read(page, load.source)

    def read_failed(self, transfer: int, failure: Failure, detail: str) -> None:
        load = self._end_load(transfer)
        page, grant = load.page, load.grant
        assert grant is not None
        self._tables.slots.free(grant.slot)
        reason = "corrupt" if failure == "corrupt" else "load_failed"
        if page.ssd is load.source:
            self._residency.ssd_counters.corrupt_pages += failure == "corrupt"
            self._out.note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._residency.drop_ssd(page)
        self._residency.end_ssd_read(page, load.source)
        self._residency.lost_if_nowhere(
            page, reason, f"its copy in L4 was {failure} at {self._tables.wall()}"
        )
