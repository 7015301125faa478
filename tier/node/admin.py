"""What operators ask of a node's cache: what it has of which keys, and to pin, evict, clear and verify pages. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.tier.node.residency.accesses import Uses
from kvtier.tier.node.state.records import Check, HostCopy, Job, Page
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import CatchUp, Failure, ForgetTenant, MarkClear, PageId, VerifyPage
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.stores.base import Outcome, PageInfo, Place


class Verbs(Uses):
    """The part of the coordinator that operators ask and command."""

    def page_ids(self, most: int | None = None) -> list[PageId]:
        """The pages that are here, at most so many: copied in one go, some 20 ms for a million."""
        return list(islice(self._pages, most))

    def ids_of(self, tenant: bytes, among: Sequence[PageId]) -> list[PageId]:
        """Those of these pages that are here and a tenant's (its digest)."""
        pages = self._pages
        return [
            page_id
            for page_id in among
            if (page := pages.get(page_id)) is not None and page.envelope.tenant == tenant
        ]

    def pages_of(self, keys: Iterable[bytes], now: float) -> list[PageInfo]:
        """All copies of the pages of these keys. Takes microseconds a key, whatever is here."""
        ids = [page.id for key in keys for page in self._named(key)]
        return self.pages(None, None, len(TierName) * len(ids), now, ids)

    def held(self, keys: list[bytes]) -> list[HeldKeys]:
        """Of which of these keys a whole copy is here, by tier and variant. Takes about a microsecond a key."""
        found: dict[tuple[TierName, str], list[int]] = {}
        for position, key in enumerate(keys):
            for page in self._named(key):
                for tier, copy in (
                    (TierName.PEER, page.peer),
                    (TierName.HOST, page.host),
                    (TierName.SSD, page.ssd),
                ):
                    if copy is not None:
                        found.setdefault((tier, page.id[1]), []).append(position)
        return HeldKeys.of(found, len(keys))

    def _pin(self, key: bytes) -> Outcome:
        outcome = Outcome.MISSING
        for page in self._named(key):
            outcome = Outcome.ACCEPTED
            if page.pinned:
                self._stay_after_all(page)
                continue
            is_over = self._pinned_bytes + page.slot_bytes > self._max_pinned_bytes()
            sizes = self._sizes.keys() | {page.slot_bytes}
            if is_over or not self._slots.room_to_last(page.slot_bytes, sizes, len(self._pins_to_come)):
                return Outcome.REJECTED
            self._set_pinned(page, True)
            self._stay_after_all(page)
        return outcome

    def _stay_after_all(self, page: Page) -> None:
        """Evictions that wait for the page's readers are off."""
        for copy in (page.host, page.ssd):
            if copy is not None:
                copy.leave = False

    def _unpin(self, key: bytes) -> Outcome:
        outcome = Outcome.MISSING
        for page in self._named(key):
            outcome = Outcome.ACCEPTED
            if page.pinned:
                self._set_pinned(page, False)
            self._settle(page)
        return outcome

    def _evict_key(self, key: bytes, tier: TierName | None) -> Outcome:
        outcomes = [self._evict_page(page, tier) for page in self._named(key)]
        for outcome in (Outcome.REJECTED, Outcome.DEFERRED, Outcome.ACCEPTED):
            if outcome in outcomes:
                return outcome
        return Outcome.MISSING

    def _evict_page(self, page: Page, tier: TierName | None) -> Outcome:
        if page.pinned:
            return Outcome.REJECTED
        if tier is None:
            return self._purge(page, "evicted", wipe=False)
        if tier is TierName.HOST and page.host is not None:
            if page.host.readers:
                page.host.leave = True
                return Outcome.DEFERRED
            self._host_counters.evicted_pages += 1
            self._drop_host(page)
        elif tier is TierName.SSD and page.ssd is not None:
            if page.ssd.readers:
                page.ssd.leave = True
                return Outcome.DEFERRED
            self._ssd_counters.evicted_pages += 1
            self._drop_ssd(page)
        elif tier is TierName.PEER and page.peer is not None:
            is_read = page.peer.readers > 0
            self._drop_peer(page)
            return Outcome.DEFERRED if is_read else Outcome.ACCEPTED
        else:
            return Outcome.MISSING
        self._lost_if_nowhere(page, "evicted", self._by_request(tier))
        return Outcome.ACCEPTED

    def _purge(self, page: Page, reason: str, *, wipe: bool) -> Outcome:
        """Make the page unfindable now; its memory goes when its readers do."""
        detail = f"{reason} by request at {self._wall()}"
        write = self._writing.get(page.id)
        if write is not None and write.page is page:
            write.wipe = wipe
        busy = page.peer is not None and page.peer.readers > 0
        if page.host is not None:
            busy |= page.host.readers > 0
            self._host_counters.evicted_pages += 1
            self._drop_host(page)
        if page.ssd is not None:
            busy |= page.ssd.readers > 0
            self._ssd_counters.evicted_pages += 1
            self._drop_ssd(page, wipe=wipe)
        self._lost_if_nowhere(page, reason, detail)
        return Outcome.DEFERRED if busy else Outcome.ACCEPTED

    def _begin_clear(self, tenant: bytes | None, number: int) -> None:
        """From now on pages count as the tenant's only if they were made since the clear of this number."""
        self._clearing[tenant, number] = None
        if number:
            self._clears.note(tenant, number)
        if self._ssd is not None:
            self._out.append(MarkClear(((tenant, number),)))

    def _note_clears(self, clears: Sequence[tuple[bytes | None, int]]) -> None:
        """Clears of tenants that nothing is here of take no more than a note, and that no old slot of theirs counts."""
        here = {page.envelope.tenant for page in self._pages.values()}
        here |= {page.envelope.tenant for page in self._leaving.values()}
        here |= {write.page.envelope.tenant for write in self._writes.values()}
        done = tuple((one, number) for one, number in clears if (one not in here if one else not here))
        prompts_of = self._misses.tenants()
        for tenant, number in done:
            self._clears.note(tenant, number)
            if tenant is None or tenant in prompts_of:
                self._misses.forget_tenant(tenant)
        self._save_stored()
        if done and self._ssd is not None:
            self._out.append(MarkClear(done))
            self._out += [ForgetTenant(tenant) for tenant, _ in done]

    def _catch_up(self, tenant: bytes, number: int) -> None:
        """A worker knows of a clear that this node hasn't heard of: nothing of before is looked up any more."""
        if number > self._clears.of(tenant):
            self._begin_clear(tenant, number)
            self._out.append(CatchUp(tenant, number))

    def _is_being_cleared(self, tenant: bytes) -> bool:
        return any(whose in (None, tenant) for whose, _ in self._clearing)

    def _end_clear(self, tenant: bytes | None, number: int) -> None:
        """The last step of a clear, or all of one that has not begun: `_clear` follows."""
        if (tenant, number) not in self._clearing:
            self._begin_clear(tenant, number)
        del self._clearing[tenant, number]

    def _clears_known(self) -> None:
        """Nothing was cleared while the node was away, or it is done here too."""
        self._awaits_clears = False

    def _clear(self, tenant: bytes | None) -> list[tuple[bytes, Outcome]]:
        """Drop and wipe all pages of a tenant (None: of all) that are here."""
        self._misses.forget_tenant(tenant)
        self._save_stored()
        if self._ssd is not None:
            self._forget = ForgetTenant(tenant)
        self._wipe_what_left(tenant)
        return self._clear_pages(
            [
                page_id
                for page_id, page in self._pages.items()
                if tenant is None or page.envelope.tenant == tenant
            ]
        )

    def _wipe_what_left(self, tenant: bytes | None) -> None:
        """What was dropped earlier and is still read or written in L4 is wiped too, once that is over.

        The record of a page that is being written may be in the catalogue already: it must not outlast this.
        """
        for copy, page in self._leaving.items():
            copy.wipe |= tenant in (None, page.envelope.tenant)
        for write in self._writes.values():
            if tenant in (None, write.page.envelope.tenant):
                write.wipe = True
                self._drops.append(write.page.id)

    def _clear_pages(self, pages: Sequence[PageId]) -> list[tuple[bytes, Outcome]]:
        """Those of these pages that are here."""
        here = [page for page_id in pages if (page := self._pages.get(page_id)) is not None]
        return [(page.envelope.key, self._purge(page, "cleared", wipe=True)) for page in here]

    def _verify(self, ticket: int, keys: tuple[bytes, ...]) -> None:
        job = Job(ticket, keys, deque())
        for page in (page for key in keys for page in self._named(key)):
            if page.host is not None:
                job.todo.append((page.id, TierName.HOST))
            if page.ssd is not None:
                job.todo.append((page.id, TierName.SSD))
        self._jobs.append(job)

    def _pump_checks(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            while job.todo and len(self._checks) < self.limits.verifies:
                page_id, tier = job.todo.popleft()
                page = self._pages.get(page_id)
                copy = None if page is None else page.host if tier is TierName.HOST else page.ssd
                if page is None or copy is None:
                    continue
                copy.readers += 1
                job.running += 1
                transfer = self._next_transfer()
                self._checks[transfer] = Check(job, page, copy)
                if isinstance(copy, HostCopy):
                    place, envelope = Place(0, copy.grant.slot), copy.envelope
                else:
                    place, envelope = copy.entry.place, copy.entry.envelope
                self._out.append(VerifyPage(transfer, tier, place, envelope))
            if job.todo or job.running:
                return
            self._jobs.popleft()
            self._answer(job.ticket, ((key, self._verdict(job, key)) for key in dict.fromkeys(job.keys)))

    def _verified(self, transfer: int, failure: Failure | None, detail: str) -> None:
        check = self._checks.pop(transfer)
        page, copy, job = check.page, check.copy, check.job
        job.running -= 1
        job.seen.add(page.envelope.key)
        if failure is not None:
            job.corrupt.add(page.envelope.key)
        if isinstance(copy, HostCopy):
            if failure is not None:
                self._drop_corrupt(copy, "verification")
            self._end_read(copy)
            return
        if failure is not None and page.ssd is copy:
            self._ssd_counters.corrupt_pages += failure == "corrupt"
            self._note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._drop_ssd(page)
            self._lost_if_nowhere(page, "corrupt", f"its copy in L4 was {failure} at {self._wall()}")
        self._end_ssd_read(page, copy)

    def _verdict(self, job: Job, key: bytes) -> Outcome:
        """ACCEPTED: every copy is whole. CLIPPED: a bad one was dropped, another is whole. MISSING: none is left."""
        if key not in job.seen or not any(True for _ in self._named(key)):
            return Outcome.MISSING
        return Outcome.CLIPPED if key in job.corrupt else Outcome.ACCEPTED
