"""Fetches from other nodes what this one lacks, where that takes less than computing it; serves them in return. Pure.

Both go through an exchange, a process of its own that talks to other nodes: this decides which pages, into which slots.
"""

from __future__ import annotations

from math import inf

import msgspec

from kvtier.tier.node.lookup import Hit, Sources
from kvtier.tier.node.remote.pricing import LATE, Pricing, compute_of
from kvtier.tier.node.residency.intake import Intake
from kvtier.tier.node.residency.l3_room import L3Room
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.fetches import Peer, Running
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.records import RemoteLoad, Request, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.events import HintWrong, PageId
from kvtier.tier.protocol.messages import (
    CancelFetch,
    Copied,
    Fetch,
    Fetched,
    FetchPage,
    Locate,
    PageRef,
    Remote,
    Stored,
    StoredPage,
    Welcome,
)
from kvtier.tier.stats import FetchCounters, TierCounters

EXCHANGE = "exchange:"  # before the node's id: the worker_id of its own exchange
PATIENCE = 2.0  # a Fetch is waited for at most so many times its deadline
MUCH_LONGER = 2.0  # than computing: below that what was measured may be chance
CANCEL_S = 1.0  # until a cancelled Fetch is over: its exchange is stalled where it takes longer
# Why a page may not be had of the other node, which is no fault of that: the hint was wrong, or its worker is busy.
MISSES = frozenset(
    ("never_stored", "evicted", "lost", "identity_differs", "variant", "cleared", "cache_off", "unsaved")
)
NOWHERE = frozenset(("never_stored", "evicted", "lost"))  # of these: the page is in no tier of the node
REASONS = MISSES | {"corrupt", "deadline", "no_room", "load_failed"}  # others count as the last of these


class RemoteFetches:
    """Has pages fetched from other nodes.

    A load from another node is a promise like one from L4: its page comes, or all that wait for it hear why it doesn't.
    The exchange ends each Fetch within its deadline. What it doesn't end is not waited for after PATIENCE times that,
    and its slots are free when the exchange says so, or is gone.
    """

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        in_flight: InFlight,
        residency: Residency,
        l3: L3Room,
        intake: Intake,
        pricing: Pricing,
    ) -> None:
        self._tables, self._out, self._in_flight = tables, out, in_flight
        self._residency, self._l3, self._intake, self._pricing = residency, l3, intake, pricing
        self.remote_counters = TierCounters()
        self.fetch_counters = FetchCounters()

    def clear_fetches(self, tenant: bytes | None) -> None:
        """Nothing of a tenant that is cleared comes from other nodes."""
        detail = f"cleared by request at {self._tables.wall()}"
        for peer in self._in_flight.fetches.waiting():
            for load in [load for load in peer.queue if tenant in (None, load.tenant)]:
                self._wont_come(load, "cleared", detail)
        for fetch in self._in_flight.fetches.running.values():
            if any(tenant in (None, load.tenant) for load in fetch.pages.values()):
                fetch.is_cleared = True
                if not fetch.is_cancelled:
                    self._abandon(fetch, "cleared", detail)

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def exchange_came(self, worker: Worker) -> None:
        """This node's own fetches; those of other nodes on this machine only read."""
        self._tables.num_exchanges += 1
        if worker.ref.worker_id == EXCHANGE + self._tables.node_id:
            self._tables.exchange = worker
        self._out.send(
            worker, Welcome(self._tables.node_id, self._tables.incarnation, self._tables.slots.capacity_bytes)
        )

    def exchange_went(self, worker: Worker) -> None:
        """It is heard no more: nothing waits for what it was to fetch. The slots it had are its own until it is gone."""
        if self._tables.exchange is not worker:
            return
        self._tables.exchange = None
        for fetch in list(self._in_flight.fetches.running.values()):
            if fetch.exchange is worker:
                self._abandon(fetch, "load_failed", "this node's exchange went away")
        for peer in self._in_flight.fetches.waiting():
            for load in list(peer.queue):
                self._wont_come(load, "load_failed", "this node's exchange went away")

    def exchange_gone(self, worker: Worker) -> None:
        """It touches no slot any more."""
        self.exchange_went(worker)
        self._tables.num_exchanges -= 1
        for fetch in list(self._in_flight.fetches.running.values()):
            if fetch.exchange is worker:
                self._end_fetch(fetch, "load_failed", "this node's exchange went away")

    def served(self, message: Copied) -> None:
        self.fetch_counters.served_pages += len(message.pages)
        self.fetch_counters.served_bytes += message.nbytes

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def fetch_pages(self, request: Request, message: Locate, hit: Hit) -> list[PageRef]:
        """Have pages of a hit fetched for a request; they are what it waits for."""
        if not hit.fetched:
            return []
        # What stays to be computed without them, a part each: pages that are here behind a gap are of no use either then.
        lacking_s = compute_of(message).between(hit.fetched[0][0][1], hit.pages)
        compute_s = lacking_s / len(hit.fetched)
        for ref, sources in hit.fetched:
            page_id: PageId = (message.chains[0].keys[ref[1] - message.first_page], message.chains[0].variant)
            load = self._in_flight.fetches.coming.get(page_id)
            if load is None:
                load = self._remote_load(request.worker, message, ref[1], sources, compute_s)
                self._in_flight.fetches.add(load)
            load.compute_s = max(load.compute_s, compute_s)
            load.waiters[request, ref] = None
            request.waits[ref] = load
        return [ref for ref, _ in hit.fetched]

    def _remote_load(
        self, worker: Worker, message: Locate, page: int, sources: Sources, compute_s: float
    ) -> RemoteLoad:
        chain, index = message.chains[0], page - message.first_page
        before = message.root if page == 0 else b""
        first, *others = sources
        return RemoteLoad(
            id=(chain.keys[index], chain.variant),
            spec_digest=chain.spec_digest,
            payload_bytes=worker.hello.payloads[chain.spec_digest],
            root=message.root,
            parent=chain.keys[index - 1] if index else before,
            tenant=message.tenant,
            depth=page,
            tokens=message.page_tokens,
            content=b"" if page else message.first_content,
            owner=self._tables.shares.owner(message.tenant),
            node_id=first.node_id,
            address=first.address,
            queued_at=self._tables.now,
            others=tuple(others),
            compute_s=compute_s,
        )

    # ---- other node -> L3 ------------------------------------------------------------------------------------------

    def end_late_fetches(self) -> None:
        """Nothing waits for what nothing wants, or what takes too long."""
        for fetch in self._in_flight.fetches.take_unwanted():
            self._abandon(fetch, "load_failed", "nothing waits for it")
        for fetch in list(self._in_flight.fetches.running.values()):
            if self._tables.now > fetch.late_at and not fetch.is_cancelled:
                fetch.peer.failed_at = self._tables.now
                fetch.peer.speed.failed(self._tables.now, was_slow=True)
                self._abandon(fetch, "deadline", f"node {fetch.peer.node_id} took too long")
        if self._pricing.is_exchange_late():
            for peer in self._in_flight.fetches.waiting():
                for load in list(peer.queue):
                    self._wont_come(load, "deadline", LATE)
        for peer in self._in_flight.fetches.waiting():
            while (dear := self._too_dear(peer)) is not None:
                took = f"{dear.payload_bytes * peer.speed.byte_s * 1e3:.1f} ms"
                why = (
                    f"a page of node {peer.node_id} takes {took}, computing it {dear.compute_s * 1e3:.1f} ms"
                )
                self._wont_come(dear, "costlier", why)

    def _too_dear(self, peer: Peer) -> RemoteLoad | None:
        """The next load of a node, where the node turned out so slow that computing is better even now."""
        load = next(iter(peer.queue), None)
        if load is None or not peer.speed.is_known(self._tables.now):
            return None
        return load if load.payload_bytes * peer.speed.byte_s > MUCH_LONGER * load.compute_s else None

    def pump_fetches(self) -> None:
        for peer in self._in_flight.fetches.waiting():
            while (run := self._in_flight.fetches.next_run(peer, self._tables.now)) and self._begin_fetch(
                peer, run
            ):
                pass

    def _begin_fetch(self, peer: Peer, run: list[RemoteLoad]) -> bool:
        """Fetch as many of these pages as there are slots for; False where the first has to wait for one."""
        taken: dict[PageId, RemoteLoad] = {}
        for load in run:
            load.grant = self._l3.take_slot(load.payload_bytes, load.owner)
            if load.grant is None:
                break
            taken[load.id] = load
            self._in_flight.arriving[load.grant.slot] = load
        first = run[0]
        if not taken:
            if self._tables.slots.available(first.slot_bytes) > 0:
                return False
            self._in_flight.fetches.forget(first.id)
            self._residency.fail(first, "no_room", f"L3 has no room for pages of {first.payload_bytes} bytes")
            return True
        assert self._tables.exchange is not None
        late_at = (
            self._tables.now + self._tables.limits.fetch_deadline_s
            if first.late_at is None
            else first.late_at
        )
        deadline_s = max(
            CANCEL_S, late_at - self._tables.now
        )  # one that is past already would seem the exchange's fault
        for load in taken.values():
            load.late_at = late_at
        number = self._out.next_transfer()
        fetch = Running(number, self._tables.exchange, peer, taken, self._tables.now + PATIENCE * deadline_s)
        self._in_flight.fetches.begin(fetch, self._tables.now)
        pages = [
            FetchPage(load.grant, *load.id, load.spec_digest)
            for load in taken.values()
            if load.grant is not None
        ]
        self._out.send(
            fetch.exchange,
            Fetch(
                number,
                peer.node_id,
                first.address,
                first.root,
                first.tenant,
                first.tokens,
                first.depth,
                pages,
                deadline_s,
                self._tables.clear_epochs.of(first.tenant),
            ),
        )
        return True

    def fetched_pages(self, worker: Worker, message: Stored) -> None:
        """Pages of a Fetch have come."""
        nbytes: dict[Peer, int] = {}
        for stored in message.pages:
            load = self._in_flight.arriving.get(stored.grant.slot)
            fetch = self._fetch_of(load) if isinstance(load, RemoteLoad) else None
            if (
                not isinstance(load, RemoteLoad)
                or fetch is None
                or fetch.exchange is not worker
                or load.grant != stored.grant
            ):
                self._out.note(
                    f"{worker.ref.worker_id} stored into slot {stored.grant.slot}, which isn't granted to it"
                )
                continue
            self._end_arriving(load)
            if fetch.is_cleared:
                self._tables.slots.free(stored.grant.slot)
                continue
            wrong = _differs(stored, load)
            if wrong is not None:
                self._tables.slots.free(stored.grant.slot)
                self._fail_fetched(fetch, [load], "corrupt", f"it has another {wrong} than was asked for")
                continue
            nbytes[fetch.peer] = nbytes.get(fetch.peer, 0) + load.payload_bytes
            self._take_in(load, stored)
        for peer, came in nbytes.items():
            peer.is_failing, peer.failed_at = False, -inf
            peer.speed.came(came, self._tables.now)

    def _take_in(self, load: RemoteLoad, stored: StoredPage) -> None:
        """A page as it was asked for lies in its slot."""
        self.remote_counters.bytes_out += load.payload_bytes
        self.remote_counters.loads_s.append(self._tables.now - load.queued_at)
        self.fetch_counters.fetched_pages += 1
        self.fetch_counters.fetched_bytes += load.payload_bytes
        page = self._tables.pages.get(load.id)
        if page is not None and page.host is not None:
            self._tables.slots.free(stored.grant.slot)  # it came another way, and all who waited have it
            return
        if load.content:  # which prompt it begins, the request told and no node says
            stored = msgspec.structs.replace(stored, content=load.content)
        page = self._intake.page_of(stored)
        waited = self._in_flight.fetches.coming.get(load.id)
        for request, _ in () if waited is None else waited.waiters:
            self._residency.is_used_by(page, request.worker)
            self._residency.bring_back(page)
            self._tables.histories.begin([page.row], self._tables.now)
        self._residency.host_counters.promoted_pages += 1
        self._intake.put_in(page, stored, "remote")

    def fetched(self, worker: Worker, message: Fetched) -> None:
        """Pages of a Fetch won't come, or it is over."""
        fetch = self._in_flight.fetches.running.get(message.fetch_id)
        if fetch is None or fetch.exchange is not worker:
            return
        pages = fetch.pages if message.is_over else dict.fromkeys(message.failed)
        failed = [fetch.pages[page] for page in pages if page in fetch.pages]
        if self._out.tells_holds and failed and message.reason in NOWHERE and not fetch.is_cleared:
            first = min(
                failed, key=lambda load: load.depth
            )  # the others may be there: the chain ended before them
            self._out.commands.append(HintWrong(fetch.peer.node_id, first.id[0]))
        was_slow = message.reason == "deadline"
        if failed and message.reason == "unsaved":
            fetch.peer.speed.waited(self._tables.now)
        elif failed and (was_slow or not message.nbytes):
            fetch.peer.speed.failed(self._tables.now, was_slow=was_slow)
        detail = f"node {fetch.peer.node_id}: {message.detail}"
        if message.is_over:
            self._end_fetch(fetch, message.reason, detail)
        else:
            self._free_pages(failed)
            self._fail_fetched(fetch, failed, message.reason, detail)

    def _end_fetch(self, fetch: Running, reason: str, detail: str) -> None:
        """No page of a Fetch comes any more."""
        loads = list(fetch.pages.values())
        self._free_pages(loads)
        self._in_flight.fetches.end(fetch, self._tables.now)
        self._fail_fetched(fetch, loads, reason, detail)

    def _abandon(self, fetch: Running, reason: str, detail: str) -> None:
        """Wait no longer for a Fetch; its slots are the exchange's until it is over."""
        fetch.is_cancelled = True
        fetch.late_at = min(fetch.late_at, self._tables.now + CANCEL_S)
        self._out.send(fetch.exchange, CancelFetch(fetch.fetch_id))
        for load in list(fetch.pages.values()):
            if self._in_flight.fetches.coming.get(load.id) is load:
                self._wont_come(load, reason, detail)

    def _fail_fetched(self, fetch: Running, loads: list[RemoteLoad], reason: str, detail: str) -> None:
        """These pages won't come from there; their slots are free already. Another node, or L4, may have them."""
        reason, peer = reason if reason in REASONS else "load_failed", fetch.peer
        if loads and reason not in MISSES and not fetch.is_cancelled:
            peer.failed_at = self._tables.now
            if not peer.is_failing:
                peer.is_failing = True
                self._out.note(f"pages of node {peer.node_id} don't come: {detail}")
        for _ in loads:
            self.fetch_counters.failed(reason)
        self.remote_counters.corrupt_pages += len(loads) if reason == "corrupt" else 0
        waited = sorted(
            (load for load in loads if self._in_flight.fetches.coming.get(load.id) is load),
            key=lambda load: load.depth,
        )
        elsewhere = self._fetch_elsewhere([load for load in waited if load.waiters])
        for load in waited:
            if load not in elsewhere:
                self._wont_come(load, reason, detail)

    def _fetch_elsewhere(self, loads: list[RemoteLoad]) -> set[RemoteLoad]:
        """Have another node asked, once, for pages of a Fetch that don't come; which of them, the first ones.

        Where that takes less than computing them, and they come before the first Fetch was to end.
        """
        if not loads or self._tables.exchange is None:
            return set()
        first, best_s, best = loads[0], inf, set[RemoteLoad]()
        source: Remote | None = None
        kept: list[Peer] = []  # the best so far: looking at another one must not push it out
        for remote in first.others:
            peer = self._in_flight.fetches.peer(remote.node_id, keep=kept)
            alike = [load for load in loads if load.others == first.others and load.depth < remote.pages]
            if peer is None or peer.is_doubtful(self._tables.now) or not alike:
                continue
            nbytes = sum(load.payload_bytes for load in alike)
            load_s = peer.speed.load_s(peer.ahead_bytes + nbytes)
            late_s = inf if first.late_at is None else first.late_at - self._tables.now
            if load_s < min(best_s, late_s, sum(load.compute_s for load in alike)):
                best_s, source, best, kept = load_s, remote, set(alike), [peer]
        for load in loads:
            load.others = ()
            if source is not None and load in best:
                self._in_flight.fetches.move(load, source)
        return best

    def _wont_come(self, load: RemoteLoad, reason: str, detail: str) -> None:
        """Who waits for a page that is coming waits in vain, unless L4 has it."""
        self._in_flight.fetches.forget(load.id)
        page = self._tables.pages.get(load.id)
        if page is None or page.ssd is None or reason == "cleared":
            self._residency.fail(load, reason, detail)
            return
        for request, ref in load.waiters:
            self._residency.wait_for(page, request, ref)
        load.waiters = {}

    def _free_pages(self, loads: list[RemoteLoad]) -> None:
        for load in loads:
            assert load.grant is not None
            self._end_arriving(load)
            self._tables.slots.free(load.grant.slot)

    def _end_arriving(self, load: RemoteLoad) -> None:
        assert load.grant is not None
        del self._in_flight.arriving[load.grant.slot]
        self._in_flight.fetches.end_page(load)

    def _fetch_of(self, load: RemoteLoad) -> Running | None:
        return None if load.fetch is None else self._in_flight.fetches.running.get(load.fetch)


def _differs(stored: StoredPage, load: RemoteLoad) -> str | None:
    """What of a page isn't as it was asked for; None where all is."""
    for name, value, wanted in (
        ("key", stored.key, load.id[0]),
        ("variant", stored.variant, load.id[1]),
        ("spec", stored.spec_digest, load.spec_digest),
        ("root", stored.root, load.root),
        ("parent", stored.parent, load.parent or stored.parent),
        ("tenant", stored.tenant, load.tenant),
        ("depth", stored.depth, load.depth),
        ("number of tokens", stored.tokens, load.tokens),
        ("origin", stored.made_from, ""),
    ):
        if value != wanted:
            return name
    return None
