"""What requests leave behind at their end: uses of pages, of those that aren't here too. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.records import Page, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.policy.base import Costs, Kind, Row, Use
from kvtier.tier.protocol.messages import Finished


class UsedChain(NamedTuple):
    """A chain as a request had it: its keys, the pages here of each, and their depths where these are known."""

    keys: list[bytes]
    here: list[list[Page]]
    depths: Sequence[int | None]
    pages: int  # behind the last one there is none


class Accesses:
    """Tells the policy which pages a request used."""

    def __init__(self, tables: NodeTables, eviction: Eviction, residency: Residency) -> None:
        self._tables, self._eviction, self._residency = tables, eviction, residency

    def end_use(self, worker: Worker, message: Finished) -> None:
        if message.page_s > 0:
            self._tables.policy.costs = Costs(message.page_s, message.double_pages)
        chains = [self._used_chain(worker, keys) for keys in message.keys]
        use = Use(
            max((chain.pages for chain in chains), default=0),
            message.new_pages,
            message.output_tokens,
            Kind(message.kind),
            message.turn,
            message.session,
            message.closed,
            message.open,
        )
        for chain in chains:
            self._let_go(worker, chain, use, self._tables.now - message.seconds)
        if message.keys:
            # As numbers, which have the same hash in every process.
            self._tables.policy.observe(
                [int.from_bytes(key[:7], "little") for key in message.keys[0]], use, self._tables.now
            )
        self._eviction.redraw()
        if len(self._residency.touched) >= self._tables.limits.persist_every:
            self._residency.persist_uses()

    def _used_chain(self, worker: Worker, keys: list[bytes]) -> UsedChain:
        """What is here of a chain: pages that this worker can have used, of one tenant."""
        payloads, tenant = worker.hello.payloads, None
        here: list[list[Page]] = []
        at: list[int | None] = []
        for key in keys:
            pages = [
                page
                for page in self._tables.named(key)
                if tenant in (None, page.envelope.tenant)
                and payloads.get(page.envelope.spec_digest) == page.envelope.payload_bytes
            ]
            if pages:
                tenant = pages[0].envelope.tenant
            here.append(pages)
            at.append(pages[0].envelope.depth if pages else None)
        depths = depths_of(at)
        return UsedChain(keys, here, depths, depths[-1] + 1 if depths and depths[-1] is not None else 0)

    def _let_go(self, worker: Worker, chain: UsedChain, use: Use, began: float) -> None:
        """A request has used these pages, those too that are in L1 alone, and uses them no more."""
        nbytes = max(worker.sizes)
        rows: list[Row] = []
        behind: list[int] = []
        for key, pages, depth in zip(chain.keys, chain.here, chain.depths, strict=True):
            used = [self._used(page, use) for page in pages]
            if not used and depth is not None and not self._tables.named(key):
                row = self._tables.histories.elsewhere(key, depth, nbytes, use.new_pages, self._tables.now)
                used = [] if row is None else [row]
            if depth is not None:
                rows += used
                behind += [max(0, chain.pages - 1 - depth)] * len(used)
        self._tables.histories.end(rows, behind, use, began, self._tables.now)

    def _used(self, page: Page, use: Use) -> Row:
        """A page has been used by a request; its row."""
        page.last_use = self._tables.now
        if page.ssd is not None:
            self._residency.touched[page] = None
        self._eviction.stay(page)
        if self._tables.histories.is_new(page.row):
            self._eviction.renew(page, use.new_pages)
        else:
            page.uses += 1
        return page.row


def depths_of(here: list[int | None]) -> Sequence[int | None]:
    """Depths of a chain's pages, head first, given those of the pages that are here, or None.

    Of a stream some in the middle are missing. Where they do between two pages that are here, it isn't known of those
    in between on which side of them they lie: None. What comes behind the last that is here follows it without a gap.
    """
    known = [(-1, -1), *((at, depth) for at, depth in enumerate(here) if depth is not None)]
    at, depth = known[-1]
    if at == depth and all(a == b for a, b in known):
        return range(len(here))
    depths = list(here)
    for (above, least), (below, most) in pairwise(known):
        if most - least == below - above:
            depths[above + 1 : below] = range(least + 1, most)
    depths[at + 1 :] = range(depth + 1, depth + len(here) - at)
    return depths
