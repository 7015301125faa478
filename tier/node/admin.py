"""What operators ask of a node's cache: what it has of which keys, and to pin, evict, clear and verify pages. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.holders import copy_in
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import Check, HostCopy, Job, Page, page_info
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.clear_epochs import EVERYONE, Tenant
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import CatchUp, Failure, ForgetTenant, MarkClear, PageId, VerifyPage
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.stores.base import Outcome, PageInfo, Place


class Admin:
    """What operators ask of the cache, and have it do."""

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        in_flight: InFlight,
        frames: PeerFrames,
        eviction: Eviction,
        residency: Residency,
        *,
        awaits_clears: bool,
    ) -> None:
        self._tables, self._out, self._in_flight = tables, out, in_flight
        self._frames, self._eviction, self._residency = frames, eviction, residency
        # Clears that have begun, with their numbers: nothing of theirs is looked up until they are over.
        self._clearing: dict[tuple[Tenant, int], None] = {}
        self.awaits_clears = awaits_clears  # it may have missed some: nothing is served until ClearsKnown

    def clears(self) -> list[tuple[bytes, int]]:
        """The clear epochs that what is here has been cleared by: not those of clears that are under way."""
        under_way = {tenant or EVERYONE for tenant, _ in self._clearing}
        return [one for one in self._tables.clear_epochs.numbers() if one[0] not in under_way]

    def holds(self, among: Iterable[PageId] | None = None) -> dict[TierName, list[bytes]]:
        """Keys of the pages (of all, or of these) that each tier holds as the model computed them.

        What was made from others is not among them: no other node can use it.
        """
        held: dict[TierName, list[bytes]] = {TierName.PEER: [], TierName.HOST: [], TierName.SSD: []}
        ids = self._tables.pages if among is None else among
        for page in (self._tables.pages[id] for id in ids if id in self._tables.pages):
            if not page.envelope.made_from:
                for tier, keys in held.items():
                    if copy_in(page, tier) is not None:
                        keys.append(page.envelope.key)
        return held

    def pages(
        self,
        tenant: bytes | None,
        tier: TierName | None,
        limit: int,
        now: float,
        among: Iterable[PageId] | None = None,
    ) -> list[PageInfo]:
        """Copies of a tenant's pages (None: of all) in a tier (None: in all), at most `limit`; only of those in `among`."""
        found: list[PageInfo] = []
        ids = self._tables.pages if among is None else among
        for page in (self._tables.pages[id] for id in ids if id in self._tables.pages):
            if tenant is not None and page.envelope.tenant != tenant:
                continue
            host, ssd, load, peer = page.host, page.ssd, page.load, page.peer
            if peer is not None and tier in (None, TierName.PEER):
                found.append(
                    page_info(
                        self._tables.node_id, page, page.envelope, TierName.PEER, peer.readers, "sealed", now
                    )
                )
            if host is not None and tier in (None, TierName.HOST):
                found.append(
                    page_info(
                        self._tables.node_id, page, host.envelope, TierName.HOST, host.readers, "sealed", now
                    )
                )
            if ssd is not None and tier in (None, TierName.SSD):
                found.append(
                    page_info(
                        self._tables.node_id,
                        page,
                        ssd.entry.envelope,
                        TierName.SSD,
                        ssd.readers,
                        "sealed",
                        now,
                    )
                )
            if load is not None and load.transfer is not None and tier in (None, TierName.HOST):
                found.append(
                    page_info(
                        self._tables.node_id,
                        page,
                        load.source.entry.envelope,
                        TierName.HOST,
                        0,
                        "arriving",
                        now,
                    )
                )
            if len(found) >= limit:
                return found[:limit]
        return found

    def page_ids(self, most: int | None = None) -> list[PageId]:
        """The pages that are here, at most so many: copied in one go, some 20 ms for a million."""
        return list(islice(self._tables.pages, most))

    def ids_of(self, tenant: bytes, among: Sequence[PageId]) -> list[PageId]:
        """Those of these pages that are here and a tenant's (its digest)."""
        pages = self._tables.pages
        return [
            page_id
            for page_id in among
            if (page := pages.get(page_id)) is not None and page.envelope.tenant == tenant
        ]

    def pages_of(self, keys: Iterable[bytes], now: float) -> list[PageInfo]:
        """All copies of the pages of these keys. Takes microseconds a key, whatever is here."""
        ids = [page.id for key in keys for page in self._tables.named(key)]
        return self.pages(None, None, len(TierName) * len(ids), now, ids)

    def held(self, keys: list[bytes]) -> list[HeldKeys]:
        """Of which of these keys a whole copy is here, by tier and variant. Takes about a microsecond a key."""
        found: dict[tuple[TierName, str], list[int]] = {}
        for position, key in enumerate(keys):
            for page in self._tables.named(key):
                for tier, copy in (
                    (TierName.PEER, page.peer),
                    (TierName.HOST, page.host),
                    (TierName.SSD, page.ssd),
                ):
                    if copy is not None:
                        found.setdefault((tier, page.id[1]), []).append(position)
        return HeldKeys.of(found, len(keys))

    def pin(self, key: bytes) -> Outcome:
        outcome = Outcome.MISSING
        for page in self._tables.named(key):
            outcome = Outcome.ACCEPTED
            if page.pinned:
                self._stay_after_all(page)
                continue
            is_over = self._residency.pinned_bytes + page.slot_bytes > self._residency.max_pinned_bytes()
            sizes = self._tables.sizes.keys() | {page.slot_bytes}
            if is_over or not self._tables.slots.room_to_last(
                page.slot_bytes, sizes, len(self._residency.pins_to_come)
            ):
                return Outcome.REJECTED
            self._residency.set_pinned(page, True)
            self._stay_after_all(page)
        return outcome

    def _stay_after_all(self, page: Page) -> None:
        """Evictions that wait for the page's readers are off."""
        for copy in (page.host, page.ssd):
            if copy is not None:
                copy.leave = False

    def unpin(self, key: bytes) -> Outcome:
        outcome = Outcome.MISSING
        for page in self._tables.named(key):
            outcome = Outcome.ACCEPTED
            if page.pinned:
                self._residency.set_pinned(page, False)
            self._eviction.settle(page)
        return outcome

    def evict_key(self, key: bytes, tier: TierName | None) -> Outcome:
        outcomes = [self._evict_page(page, tier) for page in self._tables.named(key)]
        for outcome in (Outcome.REJECTED, Outcome.DEFERRED, Outcome.ACCEPTED):
            if outcome in outcomes:
                return outcome
        return Outcome.MISSING

    def _evict_page(self, page: Page, tier: TierName | None) -> Outcome:
        if page.pinned:
            return Outcome.REJECTED
        if tier is None:
            return self._residency.purge(page, "evicted", wipe=False)
        if tier is TierName.HOST and page.host is not None:
            if page.host.readers:
                page.host.leave = True
                return Outcome.DEFERRED
            self._residency.host_counters.evicted_pages += 1
            self._residency.drop_host(page)
        elif tier is TierName.SSD and page.ssd is not None:
            if page.ssd.readers:
                page.ssd.leave = True
                return Outcome.DEFERRED
            self._residency.ssd_counters.evicted_pages += 1
            self._residency.drop_ssd(page)
        elif tier is TierName.PEER and page.peer is not None:
            is_read = page.peer.readers > 0
            self._frames.drop_peer(page)
            return Outcome.DEFERRED if is_read else Outcome.ACCEPTED
        else:
            return Outcome.MISSING
        self._residency.lost_if_nowhere(page, "evicted", self._tables.by_request(tier))
        return Outcome.ACCEPTED

    def begin_clear(self, tenant: bytes | None, number: int) -> None:
        """From now on pages count as the tenant's only if they were made since the clear of this number."""
        self._clearing[tenant, number] = None
        if number:
            self._tables.clear_epochs.note(tenant, number)
        if self._tables.ssd is not None:
            self._out.commands.append(MarkClear(((tenant, number),)))

    def note_clears(self, clears: Sequence[tuple[bytes | None, int]]) -> None:
        """Clears of tenants that nothing is here of take no more than a note, and that no old slot of theirs counts."""
        here = {page.envelope.tenant for page in self._tables.pages.values()}
        here |= {page.envelope.tenant for page in self._in_flight.leaving.values()}
        here |= {write.page.envelope.tenant for write in self._in_flight.writes.values()}
        done = tuple((one, number) for one, number in clears if (one not in here if one else not here))
        prompts_of = self._tables.misses.tenants()
        for tenant, number in done:
            self._tables.clear_epochs.note(tenant, number)
            if tenant is None or tenant in prompts_of:
                self._tables.misses.forget_tenant(tenant)
        self._residency.save_stored()
        if done and self._tables.ssd is not None:
            self._out.commands.append(MarkClear(done))
            self._out.commands += [ForgetTenant(tenant) for tenant, _ in done]

    def catch_up(self, tenant: bytes, number: int) -> None:
        """A worker knows of a clear that this node hasn't heard of: nothing of before is looked up any more."""
        if number > self._tables.clear_epochs.of(tenant):
            self.begin_clear(tenant, number)
            self._out.commands.append(CatchUp(tenant, number))

    def is_being_cleared(self, tenant: bytes) -> bool:
        return any(whose in (None, tenant) for whose, _ in self._clearing)

    def end_clear(self, tenant: bytes | None, number: int) -> None:
        """The last step of a clear, or all of one that has not begun: `_clear` follows."""
        if (tenant, number) not in self._clearing:
            self.begin_clear(tenant, number)
        del self._clearing[tenant, number]

    def clears_known(self) -> None:
        """Nothing was cleared while the node was away, or it is done here too."""
        self.awaits_clears = False

    def clear(self, tenant: bytes | None) -> list[tuple[bytes, Outcome]]:
        """Drop and wipe all pages of a tenant (None: of all) that are here."""
        self._tables.misses.forget_tenant(tenant)
        self._residency.save_stored()
        if self._tables.ssd is not None:
            self._out.forget = ForgetTenant(tenant)
        self._wipe_what_left(tenant)
        return self.clear_pages(
            [
                page_id
                for page_id, page in self._tables.pages.items()
                if tenant is None or page.envelope.tenant == tenant
            ]
        )

    def _wipe_what_left(self, tenant: bytes | None) -> None:
        """What was dropped earlier and is still read or written in L4 is wiped too, once that is over.

        The record of a page that is being written may be in the catalogue already: it must not outlast this.
        """
        for copy, page in self._in_flight.leaving.items():
            copy.wipe |= tenant in (None, page.envelope.tenant)
        for write in self._in_flight.writes.values():
            if tenant in (None, write.page.envelope.tenant):
                write.wipe = True
                self._out.drops.append(write.page.id)

    def clear_pages(self, pages: Sequence[PageId]) -> list[tuple[bytes, Outcome]]:
        """Those of these pages that are here."""
        here = [page for page_id in pages if (page := self._tables.pages.get(page_id)) is not None]
        return [(page.envelope.key, self._residency.purge(page, "cleared", wipe=True)) for page in here]

    def verify(self, ticket: int, keys: tuple[bytes, ...]) -> None:
        job = Job(ticket, keys, deque())
        for page in (page for key in keys for page in self._tables.named(key)):
            if page.host is not None:
                job.todo.append((page.id, TierName.HOST))
            if page.ssd is not None:
                job.todo.append((page.id, TierName.SSD))
        self._in_flight.jobs.append(job)

    def pump_checks(self) -> None:
        while self._in_flight.jobs:
            job = self._in_flight.jobs[0]
            while job.todo and len(self._in_flight.checks) < self._tables.limits.verifies:
                page_id, tier = job.todo.popleft()
                page = self._tables.pages.get(page_id)
                copy = None if page is None else page.host if tier is TierName.HOST else page.ssd
                if page is None or copy is None:
                    continue
                copy.readers += 1
                job.running += 1
                transfer = self._out.next_transfer()
                self._in_flight.checks[transfer] = Check(job, page, copy)
                if isinstance(copy, HostCopy):
                    place, envelope = Place(0, copy.grant.slot), copy.envelope
                else:
                    place, envelope = copy.entry.place, copy.entry.envelope
                self._out.commands.append(VerifyPage(transfer, tier, place, envelope))
            if job.todo or job.running:
                return
            self._in_flight.jobs.popleft()
            self._out.answer(job.ticket, ((key, self._verdict(job, key)) for key in dict.fromkeys(job.keys)))

    def verified(self, transfer: int, failure: Failure | None, detail: str) -> None:
        check = self._in_flight.checks.pop(transfer)
        page, copy, job = check.page, check.copy, check.job
        job.running -= 1
        job.seen.add(page.envelope.key)
        if failure is not None:
            job.corrupt.add(page.envelope.key)
        if isinstance(copy, HostCopy):
            if failure is not None:
                self._residency.drop_corrupt(copy, "verification")
            self._residency.end_read(copy)
            return
        if failure is not None and page.ssd is copy:
            self._residency.ssd_counters.corrupt_pages += failure == "corrupt"
            self._out.note(f"page {page.envelope.key.hex()[:16]} is dropped from L4: {detail}")
            self._residency.drop_ssd(page)
            self._residency.lost_if_nowhere(
                page, "corrupt", f"its copy in L4 was {failure} at {self._tables.wall()}"
            )
        self._residency.end_ssd_read(page, copy)

    def _verdict(self, job: Job, key: bytes) -> Outcome:
        """ACCEPTED: every copy is whole. CLIPPED: a bad one was dropped, another is whole. MISSING: none is left."""
        if key not in job.seen or not any(True for _ in self._tables.named(key)):
            return Outcome.MISSING
        return Outcome.CLIPPED if key in job.corrupt else Outcome.ACCEPTED
