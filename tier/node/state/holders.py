"""Which tier of a node holds which pages: counts, and word for the directory. Pure."""

from __future__ import annotations

from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.records import Holdings, HostCopy, Kind, Page, PeerCopy, SsdCopy, kind_of
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import TierName

NO_KINDS: frozenset[Kind] = frozenset()


class Holders:
    """Which tier holds what, counted by kinds of pages; tells the directory of pages that come to a tier or leave it."""

    def __init__(self, tables: NodeTables, out: Outbox) -> None:
        self._tables, self._out = tables, out
        self.host_holds = Holdings()
        self.ssd_holds = Holdings()
        self.peer_holds = Holdings()

    def enter(self, page: Page, tier: TierName) -> None:
        """A tier holds the page from now on."""
        self._holds_of(tier).add(page.envelope, self._kinds_beside(page, tier))
        self._tell_directory(page, tier)

    def exit(self, page: Page, tier: TierName) -> None:
        """A tier holds the page no longer."""
        self._holds_of(tier).remove(page.envelope, self._kinds_beside(page, tier))
        self._tell_directory(page, tier)

    def _holds_of(self, tier: TierName) -> Holdings:
        if tier is TierName.PEER:
            return self.peer_holds
        return self.host_holds if tier is TierName.HOST else self.ssd_holds

    def _tell_directory(self, page: Page, tier: TierName) -> None:
        """Of pages as the model computed them alone: what was made from others serves no other node."""
        if self._out.tells_holds and not page.envelope.made_from:
            key = page.envelope.key
            copies = (
                copy_in(other, tier) for other in self._tables.named(key) if not other.envelope.made_from
            )
            self._out.holds_changed(tier, key, any(copy is not None for copy in copies))

    def _kinds_beside(self, page: Page, tier: TierName) -> frozenset[Kind]:
        """The kinds of the other pages of this page's key that a tier holds."""
        if len(self._tables.variants) == 1:
            return NO_KINDS
        return frozenset(
            kind_of(other.envelope)
            for other in self._tables.named(page.envelope.key)
            if other is not page and copy_in(other, tier) is not None
        )


def copy_in(page: Page, tier: TierName) -> PeerCopy | HostCopy | SsdCopy | None:
    """A page's copy in a tier of the node."""
    if tier is TierName.PEER:
        return page.peer
    return page.host if tier is TierName.HOST else page.ssd
