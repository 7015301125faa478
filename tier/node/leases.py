"""Handles stored pages, lookups of prefixes, and leases of pages that workers copy. Pure."""

from __future__ import annotations

from kvtier.tier.node.admin import Admin
from kvtier.tier.node.lookup import Hit, Lookup
from kvtier.tier.node.remote.fetching import RemoteFetches
from kvtier.tier.node.remote.pricing import Pricing
from kvtier.tier.node.remote.save_on_demand import SaveOnDemand
from kvtier.tier.node.residency.accesses import Accesses
from kvtier.tier.node.residency.intake import Intake
from kvtier.tier.node.residency.l3_room import L3Room
from kvtier.tier.node.residency.peer_memory import PeerMemory
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import HostCopy, Leaving, Page, Request, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.events import PageId
from kvtier.tier.protocol.messages import (
    Copied,
    Finished,
    HostPage,
    Locate,
    Located,
    Missing,
    PageRef,
    PeerPage,
    Release,
    Stored,
    StoredPage,
    Unsaved,
)


class Leases:
    """Handles what the requests of workers ask of the node."""

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        in_flight: InFlight,
        frames: PeerFrames,
        eviction: Eviction,
        residency: Residency,
        l3: L3Room,
        accesses: Accesses,
        intake: Intake,
        peers: PeerMemory,
        admin: Admin,
        pricing: Pricing,
        remote: RemoteFetches,
        saves: SaveOnDemand,
    ) -> None:
        self._tables, self._out, self._in_flight = tables, out, in_flight
        self._frames, self._eviction, self._residency = frames, eviction, residency
        self._l3, self._accesses, self._intake = l3, accesses, intake
        self._peers, self._admin, self._pricing = peers, admin, pricing
        self._remote, self._saves = remote, saves

    # ---- stored pages ------------------------------------------------------------------------------------------

    def stored(self, worker: Worker, message: Stored) -> str | None:
        wrong: str | None = None
        request = None if message.hold_for is None else self._residency.request(worker, message.hold_for)
        for stored in message.pages:
            nbytes = stored.grant.payload_bytes
            if worker.hello.payloads.get(stored.spec_digest) != nbytes:
                wrong = (
                    f"it stored a page in a slot for {nbytes} bytes, which its Hello doesn't say of that spec"
                )
                break
            is_granted = self._l3.end_grant(worker, stored.grant)
            if is_granted and self._is_cleared(stored):
                self._tables.slots.free(stored.grant.slot)
                self._saves.unsaved(worker, Unsaved([(stored.key, stored.variant)]))
            elif is_granted:
                copy = self._seal(worker, stored)
                original = self._tables.original(copy.page)
                if original is not None:
                    self._residency.supersede(original)
                if request is not None and copy not in request.held:
                    request.held[copy] = None
                    copy.readers += 1
                    copy.holds += 1
                    self._residency.mark_lasting(copy)
            else:
                self._out.note(
                    f"worker {worker.ref.worker_id} stored into slot {stored.grant.slot}, which isn't granted to it"
                )
        if request is not None:
            self._residency.forget_if_over(request)
        return wrong

    def _is_cleared(self, stored: StoredPage) -> bool:
        """Returns whether the page's tenant was cleared after the worker made it."""
        self._admin.catch_up(stored.tenant, stored.cleared)
        return stored.cleared < self._tables.clear_epochs.of(stored.tenant)

    def _seal(self, worker: Worker, stored: StoredPage) -> HostCopy:
        """Returns the page's copy in L3: the one that was there already, else the stored one."""
        page_id = (stored.key, stored.variant)
        page = self._tables.pages.get(page_id)
        if page is not None and page.host is not None:
            self._tables.slots.free(stored.grant.slot)
            page.last_use = self._tables.now
            self._residency.restore(page)
            self._came_down(page, worker)
            return page.host
        page = self._intake.page_of(stored)
        self._came_down(page, worker)
        self._residency.host_counters.demoted_pages += 1
        return self._intake.put_in(page, stored, "L3")

    def _came_down(self, page: Page, worker: Worker) -> None:
        """Records that a worker has stored a page: it is no longer exclusive in an L1, nor being demoted."""
        self._residency.is_used_by(page, worker)
        self._residency.bring_back(page)
        self._eviction.stay(page)
        if not self._tables.demotes:
            self._tables.histories.begin([page.row], self._tables.now)  # its request still runs

    # ---- lookups and leases ------------------------------------------------------------------------------------

    def locate(self, worker: Worker, message: Locate) -> None:
        self._admin.catch_up(message.tenant, message.cleared)
        request = self._residency.request(worker, message.request_id)
        if request is None:
            why = f"{self._tables.limits.requests_per_worker} requests of this worker are served, no more are"
            self._located(worker, message, self._without_node(message, "no_room", why))
            return
        before, of_peers = list(request.leases.values()), list(request.peer_leases.values())
        self._residency.end_waits(request, 0)
        request.leases, request.peer_leases = {}, {}
        self._located(worker, message, self._find(worker, message), request)
        for copy in before:
            self._residency.end_lease(copy)
        self._peers.end_peer_reads(of_peers)
        self._residency.forget_if_over(request)
        if len(self._residency.touched) >= self._tables.limits.persist_every:
            self._residency.persist_uses()

    def _located(
        self,
        worker: Worker,
        message: Locate,
        found: tuple[Hit, Missing | None],
        request: Request | None = None,
    ) -> None:
        """Leases the pages of the prefix that are in L2 and L3, starts loading the others, and answers the worker."""
        hit, missing = found
        host: list[HostPage] = []
        loading: list[PageRef] = []
        peers: list[PeerPage] = []
        for ref, page in hit.needed:
            assert request is not None
            page.last_use = self._tables.now
            if not worker.is_exchange:
                self._residency.restore(page)
                self._residency.is_used_by(page, worker)
                self._residency.bring_back(page)
            peer = self._frames.copy_for(worker, page)
            if peer is not None:
                peers.append(self._peers.lease_peer(request, ref, peer))
            elif page.host is not None:
                host.append(self._residency.lease(request, ref, page.host, "L3"))
            else:
                self._residency.wait_for(page, request, ref)
                loading.append(ref)
        if not worker.is_exchange:
            self._tables.histories.begin([page.row for _, page in hit.needed], self._tables.now)
        if request is not None:
            loading += self._remote.fetch_pages(request, message, hit)
            loading += self._saves.have_saved(request, message, hit)
        located = Located(message.request_id, hit.pages, host, loading, missing, peers, hit.unsaved)
        self._out.send(worker, located)

    def _without_node(self, message: Locate, reason: str, detail: str) -> tuple[Hit, Missing | None]:
        """Returns the prefix that L1 alone has, and why no more is served."""
        lookup = Lookup(message, lambda key, variant: None, self._tables.limits.keys_per_locate)
        hit = lookup.longest()
        asked = message.first_page + len(message.chains[0].keys)
        return hit, Missing(hit.pages, reason, detail) if hit.pages < asked else None

    def _find(self, worker: Worker, message: Locate) -> tuple[Hit, Missing | None]:
        """Returns the longest prefix that costs less to bring than to compute, and why it is no longer."""
        if not self._tables.slots.capacity_bytes:
            return self._without_node(message, "cache_off", "the node has no L3")
        if self._admin.is_being_cleared(message.tenant):
            return self._without_node(message, "cleared", "its tenant's pages are being cleared")
        if self._admin.awaits_clears:
            unheard = "the node has not heard yet what was cleared while it was away"
            return self._without_node(message, "cache_off", unheard)
        pages, payloads, tenant = self._tables.pages, worker.hello.payloads, message.tenant

        def find(key: bytes, variant: str) -> Page | None:
            page = pages.get((key, variant))
            # Keys are salted per tenant and digest the page's shape, so a page found by key fits; this is the second lock.
            if page is None or page.envelope.tenant != tenant:
                return None
            if worker.is_exchange:
                # What was made from another page is no page to give away: the other node computes as it is told.
                is_own = page.envelope.root == message.root and not page.envelope.made_from
                return page if is_own else None
            return page if payloads.get(page.envelope.spec_digest) == page.envelope.payload_bytes else None

        lookup = Lookup(message, find, self._tables.limits.keys_per_locate)
        if lookup.is_simple:
            hit, missing = self._pricing.cheapest(worker, message, lookup)
            if worker.is_exchange and missing is None:
                hit = self._saves.with_l1(message, lookup, hit)
            return hit, missing or self._why_not_longer(lookup, hit, message)
        hit = lookup.longest()
        to_load = [
            page for _, page in hit.needed if page.host is None and not self._frames.copy_for(worker, page)
        ]
        if to_load and message.recompute_s > 0:
            resident = lookup.longest_resident()
            why = self._pricing.costlier(to_load, (hit.pages - resident.pages) * message.recompute_s)
            if why is not None and resident.pages < hit.pages:
                return resident, Missing(resident.pages, "costlier", why)
            if why is not None:
                hit = resident
        return hit, self._why_not_longer(lookup, hit, message)

    def _why_not_longer(self, lookup: Lookup, hit: Hit, message: Locate) -> Missing | None:
        if hit.pages == lookup.end:
            limit = f"prefixes are looked up for at most {self._tables.limits.keys_per_locate} pages at once"
            return Missing(hit.pages, "no_room", limit) if lookup.is_cut else None
        blocked = lookup.blocked_at(hit.pages)
        where = ""
        if (blocked.chain, blocked.page) != (0, hit.pages):
            where = f"page {blocked.page} of layer group {blocked.chain}: "
        if blocked.is_here:
            wanted = " or ".join(dict.fromkeys(variant for _, variant in blocked.wanted))
            return Missing(hit.pages, "variant", f"{where}it is here, but not as {wanted}")
        if smaller := self._smaller_variant(blocked.wanted, message.tenant):
            return Missing(
                hit.pages, "variant", f"{where}it is here as {smaller}, for requests that say lossy"
            )
        is_first = blocked.page == 0 and blocked.chain == 0
        content = message.first_content if is_first else b""
        gone = self._tables.misses.why(blocked.wanted, message.root, message.tenant, content)
        return Missing(hit.pages, gone.reason, where + gone.detail)

    def _smaller_variant(self, wanted: tuple[PageId, ...], tenant: bytes) -> str:
        """Returns the lossier format that L4 has one of these pages in; "" for none."""
        for key, _ in wanted:
            for variant in sorted(self._tables.ssd_variants or ()):
                page = self._tables.pages.get((key, variant))
                if page is not None and page.envelope.tenant == tenant:
                    return variant
        return ""

    def copied(self, worker: Worker, message: Copied) -> None:
        request = worker.requests.get(message.request_id)
        if request is None:
            return
        if self._peers.copied_from_peers(worker, request, message):
            self._residency.forget_if_over(request)
            return
        corrupt = set(message.corrupt)
        was_leased = False  # else they were read from the memory of a lender that is gone
        for ref in message.pages:
            copy = request.leases.pop(ref, None)
            if copy is not None:
                was_leased = True
                if ref in corrupt:
                    self._residency.drop_corrupt(copy, "a worker's read")
                elif self._tables.demotes and not worker.is_exchange:
                    self._taken_up(copy.page, worker)
                self._residency.end_lease(copy)
        self._residency.forget_if_over(request)
        if not was_leased:
            return
        self._residency.host_counters.bytes_out += message.nbytes
        if worker.is_exchange:
            self._remote.served(message)
            return
        self._in_flight.copy_time.copied(message.nbytes, message.seconds)
        self._residency.host_counters.loads_s.append(message.seconds / len(message.pages))

    def _taken_up(self, page: Page, worker: Worker) -> None:
        """Marks a page that a worker has copied as exclusive in its L1, where no other worker uses it and it will be saved again."""
        if self._tables.pages.get(page.id) is not page:
            return
        if page.shared or page.user != worker.ref or not worker.hello.brings_down:
            self._eviction.stay(page)
        else:
            page.above, page.leaving = worker.ref, Leaving.STAYS
            self._eviction.above.setdefault(worker.ref, {})[page] = None
            self._eviction.unsettled.pop(page, None)
        self._eviction.settle(page)

    def finished(self, worker: Worker, message: Finished) -> str | None:
        if worker.is_exchange:
            return "it told of a request with pages in use"
        if sum(map(len, message.keys)) > self._tables.limits.keys_per_locate:
            return f"it told of a request with more than {self._tables.limits.keys_per_locate} pages"
        self._accesses.end_use(worker, message)
        return None

    def release_asked(self, worker: Worker, message: Release) -> None:
        request = worker.requests.get(message.request_id)
        if request is not None:
            self.release(request, message.from_page)

    def release(self, request: Request, from_page: int) -> None:
        self._residency.end_waits(request, from_page)
        self._peers.end_peer_leases(request, from_page)
        for ref in [ref for ref in request.leases if ref[1] >= from_page]:
            self._residency.end_lease(request.leases.pop(ref))
        if from_page <= 0:
            for copy in request.held:
                copy.holds -= 1
                self._residency.mark_lasting(copy)
                self._residency.end_read(copy)
            request.held = {}
        self._residency.forget_if_over(request)
