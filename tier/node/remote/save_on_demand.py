"""Has workers save the pages that other nodes ask for and only L1 has. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.tier.node.lookup import Hit, Lookup
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.records import Request, Saving, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.events import PageId
from kvtier.tier.protocol.messages import Chain, Locate, PageRef, SavePages, Unsaved


class SaveOnDemand:
    """Serves other nodes from L1: has workers save what another node asks for and no tier here has.

    A saving is a promise like a load: its page is stored, or all that wait for it hear why it isn't. It ends by a
    worker's Stored, by the Unsaved or the end of the last one that was asked, or when nothing waits any more: an exchange
    waits within its call's deadline.
    """

    def __init__(self, tables: NodeTables, out: Outbox, in_flight: InFlight, residency: Residency) -> None:
        self._tables, self._out, self._in_flight, self._residency = tables, out, in_flight, residency

    def with_l1(self, message: Locate, lookup: Lookup, hit: Hit) -> Hit:
        """An exchange's hit, longer by what workers of this node may have in L1."""
        if not self._savers(message.chains[0]):
            return hit
        room = self._tables.limits.saves - len(self._in_flight.saves)
        for page, found in enumerate(lookup.row(lookup.end), message.first_page):
            if page < hit.pages:
                continue
            if found is False:
                if not self._may_be_saved(message, page, room):
                    break
                room -= _id_of(message, page) not in self._in_flight.saves
                hit.unsaved.append((0, page))
            elif found is not True:
                hit.needed.append(((0, page), found))
            hit.pages = page + 1
        return hit

    def _savers(self, chain: Chain) -> list[Worker]:
        """Workers that may have such pages, and that are heard."""
        if self._tables.draining:
            return []
        return [
            worker
            for worker in self._tables.live()
            if worker.hello.saves_when_asked
            and not worker.fenced
            and chain.spec_digest in worker.hello.payloads
        ]

    def _may_be_saved(self, message: Locate, page: int, room: int) -> bool:
        """Whether workers may be asked for a page that can't be given; not where it is here, and not to be given."""
        page_id = _id_of(message, page)
        saving = self._in_flight.saves.get(page_id)
        if saving is None:
            return page_id not in self._tables.pages and room > 0
        asked = saving.root, saving.tenant, saving.spec_digest
        return asked == (message.root, message.tenant, message.chains[0].spec_digest)

    def have_saved(self, request: Request, message: Locate, hit: Hit) -> list[PageRef]:
        """Ask workers for pages of a hit; they are what the request waits for."""
        if not hit.unsaved:
            return []
        chain = message.chains[0]
        savers = self._savers(chain)
        new: list[PageId] = []
        for ref in hit.unsaved:
            page_id = _id_of(message, ref[1])
            saving = self._in_flight.saves.get(page_id)
            if saving is None:
                saving = Saving(
                    page_id, message.root, message.tenant, chain.spec_digest, dict.fromkeys(savers)
                )
                self._in_flight.saves[page_id] = saving
                new.append(page_id)
            saving.waiters[request, ref] = None
            request.waits[ref] = saving
        for saver in savers if new else ():
            self._out.send(saver, SavePages(new))
        return hit.unsaved

    def unsaved(self, worker: Worker, message: Unsaved) -> None:
        """A worker won't store these pages."""
        for page_id in message.pages:
            saving = self._in_flight.saves.get(page_id)
            if saving is not None:
                self._wont_save(worker, saving)

    def saves_no_more(self, worker: Worker) -> None:
        """A worker isn't heard any more."""
        for saving in list(self._in_flight.saves.values()):
            self._wont_save(worker, saving)

    def _wont_save(self, worker: Worker, saving: Saving) -> None:
        saving.asked.pop(worker, None)
        if not saving.asked:
            gone = self._tables.misses.why((saving.id,), saving.root, saving.tenant, b"")
            self._residency.fail(saving, gone.reason, gone.detail)

    def end_saves(self, saves: Iterable[Saving], reason: str, detail: str) -> None:
        """These are waited for no more."""
        for saving in list(saves):
            self._residency.fail(saving, reason, detail)

    def clear_saves(self, tenant: bytes | None) -> None:
        """Nothing of a tenant that is cleared is saved for other nodes."""
        cleared = [saving for saving in self._in_flight.saves.values() if tenant in (None, saving.tenant)]
        self.end_saves(cleared, "cleared", f"cleared by request at {self._tables.wall()}")


def _id_of(message: Locate, page: int) -> PageId:
    chain = message.chains[0]
    return chain.keys[page - message.first_page], chain.variant
