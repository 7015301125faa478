"""Keeps pages that are about to leave a worker's L1 in idle frames of its peers (L2), and opens their arenas.

A page goes to a peer ahead of need: of those that L1 has chosen to leave next, and only when it has a copy below already.
So no eviction waits, and where there is no frame for it, or no time, the page is in L3 all the same.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping

import torch

from kvtier.tier.l1.arena import PeerArena, open_peer
from kvtier.tier.pages.page import PageSpec
from kvtier.tier.protocol.messages import (
    MAX_TEXT,
    Arena,
    ArenaUnopened,
    LentPage,
    PeerGrant,
    ReturnFrames,
    StoredInPeer,
    WantFrames,
)
from kvtier.workers.node_io.node_link import NodeLink
from kvtier.workers.paging.copier import LoadJob, PeerLoad, PeerSave, PeerSaveJob
from kvtier.workers.paging.frames import PageRecord, SaveState
from kvtier.workers.paging.page_table import PageTable

log = logging.getLogger(__name__)

MOST_COPIES = 32  # pages on their way to peers at once: more wait, and may be gone by then
JOB_PAGES = 8
LOOKED_AT = 64  # chosen pages that are looked at in one step, for those that may go
FREE_PARTS = 4  # frames are asked for once less than one part in so many of L1 is free


class PeerImport:
    """Peers' frames in stock, pages that wait for one, and peers' arenas. Owned by the step loop.

    `stock` frames for each size of page, at most; 0: this worker borrows none, and only reads. An arena is closed once
    its lender is gone and no copy touches it.
    """

    def __init__(
        self,
        table: PageTable,
        link: NodeLink,
        specs: Mapping[bytes, PageSpec],
        device: torch.device,
        stock: int,
    ) -> None:
        self._table = table
        self._link = link
        self._device = device
        self._most = stock
        self._stock: dict[int, deque[PeerGrant]] = {spec.nbytes: deque() for spec in specs.values()}
        self._wanted: set[int] = set()  # sizes for which the node owes an answer
        self._arenas: dict[str, PeerArena] = {}
        self._lifelines: dict[str, int] = {}  # by lender; open as long as something may be written there
        self._copies: Counter[str] = Counter()  # under way, by lender
        self._saving = 0  # pages on their way to peers
        self._gone: set[str] = set()  # lenders whose arenas are to be closed after their copies
        self._chosen: OrderedDict[PageRecord, None] = OrderedDict()  # to leave next

    # Arenas

    def opened(self, message: Arena) -> None:
        """A peer lends: open its arena."""
        fds = self._link.take_arena_fds(message.lender)
        if not fds:
            return  # it came on a connection that is over
        lifeline, memfds = fds[0], fds[1:]
        try:
            arena = open_peer(message.nbytes, memfds[0] if memfds else None, message.handle, self._device)
        except (ValueError, OSError, RuntimeError) as error:
            os.close(lifeline)
            log.warning("the arena of a peer can't be opened: %s", error)
            self._link.send(ArenaUnopened(message.lender, str(error)[:MAX_TEXT]))
        else:
            self._arenas[message.lender] = arena
            self._lifelines[message.lender] = lifeline
        finally:
            for fd in memfds:
                os.close(fd)

    def gone(self, lender: str) -> None:
        """A peer is gone, with all that was in its frames."""
        for stock in self._stock.values():
            for grant in [grant for grant in stock if grant.lender == lender]:
                stock.remove(grant)
        self._gone.add(lender)
        self._close_unused(lender)

    def arena(self, lender: str) -> PeerArena | None:
        """A peer's arena, where it could be opened."""
        return self._arenas.get(lender)

    def started(self, lender: str) -> None:
        """A page is being copied from or into a peer's frame."""
        self._copies[lender] += 1

    def loaded(self, job: LoadJob) -> None:
        """Copies out of peers' frames are over."""
        for page in job.pages:
            if isinstance(page, PeerLoad):
                self._end_copy(page.grant.lender)

    def _end_copy(self, lender: str) -> None:
        self._copies[lender] -= 1
        if not self._copies[lender]:
            del self._copies[lender]
            self._close_unused(lender)

    def _close_unused(self, lender: str) -> None:
        if lender not in self._gone or lender in self._copies:
            return
        self._gone.discard(lender)
        arena = self._arenas.pop(lender, None)
        if arena is not None:
            arena.close()
            os.close(self._lifelines.pop(lender))

    def lost(self) -> None:
        """The connection is over, and no copy is under way: all that was granted is void."""
        for stock in self._stock.values():
            stock.clear()
        self._wanted.clear()
        for lender in list(self._arenas):
            self.gone(lender)

    # Stock

    @property
    def has_stock(self) -> bool:
        """There are frames of peers for pages that leave."""
        return any(self._stock.values())

    @property
    def in_flight(self) -> bool:
        """Pages are on their way to peers."""
        return bool(self._saving)

    def granted(self, grants: list[PeerGrant]) -> None:
        """The node answered WantFrames for one size."""
        for grant in grants:
            self._wanted.discard(grant.payload_bytes)
            self._stock[grant.payload_bytes].append(grant)

    def recalled(self, grants: list[PeerGrant]) -> None:
        """Lenders want these frames back: those that no copy goes into are."""
        unused = [grant for grant in grants if grant in self._stock.get(grant.payload_bytes, ())]
        for grant in unused:
            self._stock[grant.payload_bytes].remove(grant)
        if unused:
            self._link.send(ReturnFrames(unused))

    def _refill(self) -> None:
        """Ask for frames while L1 fills up."""
        table = self._table
        if FREE_PARTS * (table.capacity_bytes - table.used_bytes) > table.capacity_bytes:
            return
        for size, stock in self._stock.items():
            if size not in self._wanted and len(stock) <= self._most // 2:
                self._wanted.add(size)
                self._link.send(WantFrames(self._most - len(stock), size))

    # Pages

    def choose(self, records: list[PageRecord]) -> None:
        """These pages leave next."""
        if not self._most:
            return
        self._chosen.update(dict.fromkeys(records))
        while len(self._chosen) > sum(self._table.counts.values()) + LOOKED_AT:
            self._chosen.popitem(last=False)

    def to_save(self, spec_of: Callable[[PageRecord], PageSpec]) -> list[PeerSaveJob]:
        """Chosen pages that have a copy below, each with a peer's frame to go into: to be copied there now."""
        if not self._most or not self._link.is_up:
            return []
        pages: list[PeerSave] = []
        for record in self._first_chosen() if self.has_stock else ():
            if not self._table.is_cached(record):
                del self._chosen[record]
            elif record.save is not SaveState.CLEAN:
                self._chosen.move_to_end(record)
            elif self._saving + len(pages) < MOST_COPIES:
                page = self._placed(record, spec_of(record))
                if page is not None:
                    del self._chosen[record]
                    self.started(page.grant.lender)
                    pages.append(page)
        self._saving += len(pages)
        self._refill()
        number = self._link.number
        return [PeerSaveJob(number, pages[at : at + JOB_PAGES]) for at in range(0, len(pages), JOB_PAGES)]

    def _first_chosen(self) -> list[PageRecord]:
        return [record for record, _ in zip(self._chosen, range(LOOKED_AT), strict=False)]

    def _placed(self, record: PageRecord, spec: PageSpec) -> PeerSave | None:
        """A page with the next frame of the stock, if there is one whose arena is open."""
        stock = self._stock[spec.nbytes]
        while stock:
            grant = stock.popleft()
            arena = self._arenas.get(grant.lender)
            if arena is not None and grant.lender not in self._gone:
                return PeerSave(record.frame, arena, grant, record, spec, record.checksum)
            self._link.send(ReturnFrames([grant]))
        return None

    def saved(self, job: PeerSaveJob) -> None:
        """Pages are in peers' frames, or couldn't be copied there."""
        self._saving -= len(job.pages)
        if self._link.is_up and job.connection == self._link.number:
            if job.error is None:
                self._link.send(StoredInPeer([_lent_page(page) for page in job.pages]))
            else:
                self._link.send(ReturnFrames([page.grant for page in job.pages]))
        for page in job.pages:
            self._end_copy(page.grant.lender)

    def close(self) -> None:
        """No copy is under way any more: give the stock back, and let all arenas go."""
        unused = [grant for stock in self._stock.values() for grant in stock]
        if unused:
            self._link.send(ReturnFrames(unused))
        self._copies.clear()
        self.lost()

    def check(self) -> None:
        """The bounds of what is kept here; AssertionError where one doesn't hold."""
        assert (
            self._saving <= MOST_COPIES and len(self._chosen) <= sum(self._table.counts.values()) + LOOKED_AT
        )
        assert all(len(stock) <= self._most for stock in self._stock.values()), (
            "more frames than were asked for"
        )
        assert self._gone <= self._copies.keys(), "arenas of peers that are gone"


def _lent_page(page: PeerSave) -> LentPage:
    record = page.record
    return LentPage(
        grant=page.grant,
        key=record.key,
        variant=page.spec.format.value,
        spec_digest=page.spec.digest,
        checksum=page.check,
        tokens=page.spec.page_tokens,
        cleared=page.cleared,
    )
