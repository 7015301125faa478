"""Takes pages into L3 that workers store and other nodes give. Pure."""

from __future__ import annotations

from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.records import HostCopy, Page, envelope_of
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.messages import CameFrom, StoredPage


class Intake:
    """Takes pages into L3 that a worker stored, or another node gave."""

    def __init__(self, tables: NodeTables, residency: Residency) -> None:
        self._tables, self._residency = tables, residency

    # ---- pages come into L3 ----------------------------------------------------------------------------------------

    def page_of(self, stored: StoredPage) -> Page:
        """The page that was stored, used now; it has no copy in L3."""
        page = self._tables.pages.get((stored.key, stored.variant))
        if page is not None and page.envelope.payload_bytes != stored.grant.payload_bytes:
            self._residency.purge(page, "lost", wipe=False)  # no keys of ours name pages of two sizes
            page = None
        if page is None:
            page = self._residency.create(envelope_of(stored), stored.content, self._tables.now)
        page.last_use = self._tables.now
        self._residency.restore(page)
        return page

    def put_in(self, page: Page, stored: StoredPage, came_from: CameFrom) -> HostCopy:
        """The page is in L3 from now on."""
        self._residency.host_counters.bytes_in += page.envelope.payload_bytes
        copy = self._residency.arrive(page, stored.grant, envelope_of(stored))
        self._residency.serve_waiters(page, copy, came_from)
        self._residency.queue_write(page)
        if stored.content and stored.depth == 0:
            self._tables.misses.add_content(stored.tenant, stored.content, stored.root, page.id)
            if self._tables.misses.unsaved >= self._tables.limits.contents_unsaved:
                self._residency.save_stored()
        return copy
