"""Decides where a node's pages live. Pure: performs no copy, reads no clock, never sees a page's content.

The cache coordinator of a node as a pure state machine: `handle(event, now) -> commands`. It owns the slots of L3, the
catalogue mirror and the slots of L4, the grants and leases of the workers, and every transfer in flight.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtier.tier.node.admin import Admin
from kvtier.tier.node.checks.cache import Invariants
from kvtier.tier.node.connections import Connections
from kvtier.tier.node.leases import Leases
from kvtier.tier.node.remote.fetching import RemoteFetches
from kvtier.tier.node.remote.pricing import Pricing
from kvtier.tier.node.remote.save_on_demand import SaveOnDemand
from kvtier.tier.node.residency.accesses import Accesses
from kvtier.tier.node.residency.demotion import Demotion
from kvtier.tier.node.residency.intake import Intake
from kvtier.tier.node.residency.l3_room import L3Room
from kvtier.tier.node.residency.peer_memory import PeerMemory
from kvtier.tier.node.residency.promotion import Promotion
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.eviction import Eviction
from kvtier.tier.node.state.holders import Holders
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import Limits
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.policy.registry import make_policy
from kvtier.tier.protocol.events import (
    BeginClear,
    Clear,
    ClearPages,
    ClearsKnown,
    Command,
    Continue,
    Drain,
    Event,
    Evict,
    FromWorker,
    NoteClears,
    Pin,
    Quiesce,
    ReadDone,
    ReadFailed,
    StoredBefore,
    Unpin,
    Verified,
    Verify,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
)
from kvtier.tier.protocol.messages import (
    ArenaUnopened,
    Copied,
    Fetched,
    Finished,
    Hello,
    Lend,
    Locate,
    NewRoot,
    Reclaim,
    Release,
    ReturnFrames,
    ReturnSlots,
    Stored,
    StoredInPeer,
    ToNode,
    Unsaved,
    WantFrames,
    WantSlots,
    WriteMode,
)
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import CatalogueEntry, Outcome, SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots

MAX_GHOSTS = 1_000_000  # pages that aren't here and whose uses are remembered


class Coordinator:
    """All decisions of a node's cache. One owner calls it, from one thread.

    L3 is what `host` has of slots (none: the tier is off, and with it what it would reach); L4 is what `ssd` allocates
    (None: off), of pages in `ssd_variants` (None: in all), `recovered` its catalogue at the start, `lost` what was in it
    but is no longer in L4's files. `wall_offset_s` is wall clock minus the clock of `now`. Invariants are those that
    `check` states.

    It is made of parts, each of which has what it needs of those before it: tables that all look at; what is in flight;
    the order of eviction; residency, which moves pages; and above those what one kind of event has done.

    Liveness: grants in stock, held (preempted) and pinned pages leave some slots of every size in use alone, or
    segments that can become such. What is there goes by itself: it is evictable, being written, or leased to a copy
    that the worker makes at once. So a load finds a slot sooner or later, however long the queue; where what lasts was
    there before its size came into use and leaves nothing, it fails.

    Pages on their way up, from the start of their read until they are copied, take a bounded part of L3, so that a long
    prompt doesn't push out what others have there. While that part is full, pages are read one at a time: those leased
    may be a worker's that has stopped, and others wait.
    """

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: str,
        host: HostSlots,
        ssd: SegmentAllocator | None = None,
        ssd_variants: frozenset[str] | None = None,
        recovered: Sequence[CatalogueEntry] = (),
        lost: Sequence[CatalogueEntry] = (),
        roots: Iterable[tuple[bytes, Mapping[str, str]]] = (),
        stored_before: StoredBefore | None = None,
        wall_offset_s: float = 0.0,
        now: float = 0.0,
        limits: Limits | None = None,
        policy: PolicySettings = PolicySettings(),  # noqa: B008  frozen
        write: WriteMode = "through",
        shares: Mapping[bytes, float] | None = None,
        page_bytes: int | None = None,
        directory: bool = False,
        clears: Clears | None = None,
        awaits_clears: bool = False,
    ) -> None:
        capacity_bytes = host.capacity_bytes + (0 if ssd is None else ssd.capacity_bytes)
        capacity_pages = max(1, capacity_bytes // slot_bytes(page_bytes or 1))
        made = make_policy(policy, capacity_pages)
        # Where pages are stored after their use, their uses must be known until they are.
        ghosts = max(made.ghosts, 1.0 if write == "demote" else 0.0)
        self.out = out = Outbox(directory)
        self.tables = tables = NodeTables(
            node_id=node_id,
            incarnation=incarnation,
            limits=limits or Limits(),
            host=host,
            ssd=ssd,
            ssd_variants=ssd_variants,
            policy=made,
            max_ghosts=min(MAX_GHOSTS, int(ghosts * capacity_pages)),
            shares=shares or {},
            demotes=write == "demote",
            wall_offset_s=wall_offset_s,
            now=now,
            clears=clears or Clears(),
        )
        self.holders = holders = Holders(tables, out)
        self.in_flight = in_flight = InFlight(tables, page_bytes)
        self.frames = frames = PeerFrames(tables, holders)
        self.eviction = eviction = Eviction(tables, in_flight, frames)
        self.residency = residency = Residency(tables, out, holders, in_flight, frames, eviction)
        self.l3 = l3 = L3Room(tables, out, in_flight, eviction, residency)
        self.demotion = Demotion(tables, out, holders, in_flight, eviction, residency)
        self.promotion = Promotion(tables, out, in_flight, residency, l3)
        self.peers = peers = PeerMemory(tables, out, frames, residency)
        self.admin = admin = Admin(
            tables, out, in_flight, frames, eviction, residency, awaits_clears=awaits_clears
        )
        self.accesses = accesses = Accesses(tables, eviction, residency)
        self.intake = intake = Intake(tables, residency)
        self.pricing = pricing = Pricing(tables, in_flight, frames)
        self.remote = remote = RemoteFetches(tables, out, in_flight, residency, l3, intake, pricing)
        self.saves = saves = SaveOnDemand(tables, out, in_flight, residency)
        self.leases = leases = Leases(
            tables,
            out,
            in_flight,
            frames,
            eviction,
            residency,
            l3,
            accesses,
            intake,
            peers,
            admin,
            pricing,
            remote,
            saves,
        )
        self.connections = Connections(tables, out, frames, residency, l3, peers, remote, saves, leases)
        self._invariants = Invariants(
            tables, out, holders, in_flight, frames, eviction, residency, l3, self.promotion, admin, remote
        )
        for root, fields in roots:
            tables.misses.add_root(root, fields)
        if stored_before is not None:
            tables.misses.recall(stored_before)
        for _ in self.recover(recovered):
            pass
        residency.record_lost(lost)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; `now` never goes back. Commands are to be carried out in their order."""
        self.tables.now = now
        self._apply(event)
        self.demotion.pump_demotions()
        self.demotion.pump_writes()
        self.l3.pump_shares()
        self.l3.pump_emptying()
        self._pump_slots()
        while self._pump_more():
            self._pump_slots()
        self.admin.pump_checks()
        self.peers.pump_frames()
        return self.out.take_commands()

    def _pump_more(self) -> bool:
        """Free more slots for waiters. Returns True on progress."""
        begun = bool(self.l3.wants or self.in_flight.queue) and self.demotion.pump_demotions()
        if begun:
            self.demotion.pump_writes()
        return self.l3.pump_shares() or begun

    def _pump_slots(self) -> None:
        self.remote.end_late_fetches()
        self.l3.has_emptied = True
        while self.l3.has_emptied:  # one size has got its slot, so another's turn may have come
            self.l3.has_emptied = False
            self.promotion.pump_loads()
            self.remote.pump_fetches()
            self.l3.pump_grants()

    # ---- events ------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        match event:
            case FromWorker():
                self._hear(event.worker, event.message)
            case WorkerGone():
                self.connections.worker_gone(event.worker)
            case ReadDone():
                self.promotion.read_done(event.transfer, event.envelope)
            case ReadFailed():
                self.promotion.read_failed(event.transfer, event.failure, event.detail)
            case WriteDone():
                self.demotion.write_done(event.transfer)
            case WriteFailed():
                self.demotion.write_failed(event.transfer, event.failure, event.detail)
            case Verified():
                self.admin.verified(event.transfer, event.failure, event.detail)
            case Pin():
                self.out.answer(event.ticket, ((key, self.admin.pin(key)) for key in event.keys))
            case Unpin():
                self.out.answer(event.ticket, ((key, self.admin.unpin(key)) for key in event.keys))
            case Evict():
                self.out.answer(
                    event.ticket, ((key, self.admin.evict_key(key, event.tier)) for key in event.keys)
                )
            case BeginClear():
                self.admin.begin_clear(event.tenant, event.number)
                self.out.answer(event.ticket, ())
            case NoteClears():
                self.admin.note_clears(event.clears)
            case ClearsKnown():
                self.admin.clears_known()
            case ClearPages():
                self.out.answer(event.ticket, self.admin.clear_pages(event.pages))
            case Clear():
                self.out.answer(event.ticket, self._clear_all(event.tenant, event.number))
            case Verify():
                self.admin.verify(event.ticket, event.keys)
            case Drain():
                self._drain()
            case Continue():
                self.residency.go_on()
            case Quiesce():
                self._quiesce()

    def _clear_all(self, tenant: bytes | None, number: int) -> list[tuple[bytes, Outcome]]:
        """The last step of a clear: what is on its way here ends with what is here."""
        self.admin.end_clear(tenant, number)
        self.saves.clear_saves(tenant)
        self.remote.clear_fetches(tenant)
        return self.admin.clear(tenant)

    def _hear(self, ref: WorkerRef, message: ToNode) -> None:
        if isinstance(message, Hello):
            self.connections.hello(ref, message)
            return
        worker = self.tables.workers.get(ref)
        if worker is None or worker.fenced:
            return
        match message:
            case NewRoot():
                self.connections.learn_root(message.root_fields)
            case WantSlots():
                self.connections.blame(worker, self.l3.want(worker, message))
            case ReturnSlots():
                self.l3.return_slots(worker, message.grants)
            case Stored() if worker.is_exchange:
                self.remote.fetched_pages(worker, message)
            case Stored():
                self.connections.blame(worker, self.leases.stored(worker, message))
            case Unsaved():
                self.saves.unsaved(worker, message)
            case Fetched():
                self.remote.fetched(worker, message)
            case Locate():
                self.leases.locate(worker, message)
            case Copied():
                self.leases.copied(worker, message)
            case Finished():
                self.connections.blame(worker, self.leases.finished(worker, message))
            case Release():
                self.leases.release_asked(worker, message)
            case Lend():
                self.connections.blame(worker, self.peers.lend(worker, message))
            case Reclaim():
                self.peers.reclaim(worker, message)
            case WantFrames():
                self.connections.blame(worker, self.peers.want_frames(worker, message))
            case ReturnFrames():
                self.peers.return_frames(worker, message)
            case StoredInPeer():
                self.peers.stored_in_peer(worker, message)
            case ArenaUnopened():
                self.peers.unopened(worker, message)

    def _quiesce(self) -> None:
        self.tables.quiesced = True
        self.eviction.unsettled = {}
        self.in_flight.to_write = {}
        self.residency.persist_uses()
        self.residency.save_stored()

    def _drain(self) -> None:
        """All goes to L4 from now on, whatever it is worth."""
        self.tables.draining = True
        self.tables.demotes = False
        self.saves.end_saves(self.in_flight.saves.values(), "load_failed", "the node is about to stop")
        self.residency.settle_for_drain()

    # ---- what others may ask -----------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """The bounds of its tables and of what it has in flight."""
        return self.tables.limits

    def check(self) -> None:
        """Re-derive every counter and table from scratch; AssertionError names what doesn't hold."""
        self._invariants.check()

    def recover(self, recovered: Sequence[CatalogueEntry]) -> Iterator[None]:
        """See Residency.recover. Before any event."""
        return self.residency.recover(recovered)

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight or waiting, and nothing is leased (pins and stocks aside)."""
        if not (self.is_written and self.in_flight.fetches.is_idle):
            return False
        return not (
            self.eviction.unsettled
            or self.in_flight.queue
            or self.in_flight.reads
            or self.in_flight.checks
            or self.in_flight.jobs
            or any(w.requests for w in self.tables.live())
        )

    @property
    def is_written(self) -> bool:
        """No page waits for L4."""
        return not (
            self.in_flight.to_write
            or self.in_flight.writes
            or (self.tables.draining and self.eviction.unsettled)
        )

    @property
    def has_more(self) -> bool:
        """Some work of an earlier event is left for `Continue`."""
        return bool(self.eviction.unsettled)

    def snapshot(self) -> Snapshot:
        """The counters of L3 and L4. Hits are counted by the workers, at a request's first token."""
        host = replace(self.residency.host_counters, loads_s=self.residency.host_counters.loads_s.copy())
        host.capacity_bytes, host.used_bytes = self.tables.slots.capacity_bytes, self.tables.slots.used_bytes
        self.holders.host_holds.describe(host, self.tables.raw_payloads)
        ssd = replace(self.residency.ssd_counters, loads_s=self.residency.ssd_counters.loads_s.copy())
        if self.tables.ssd is not None:
            ssd.capacity_bytes, ssd.used_bytes = self.tables.ssd.capacity_bytes, self.tables.ssd.used_bytes
        self.holders.ssd_holds.describe(ssd, self.tables.raw_payloads)
        host.policy = ssd.policy = self.tables.policy.state
        host.fallbacks = ssd.fallbacks = self.tables.policy.fallbacks
        peer = self.frames.peer_snapshot(self.tables.raw_payloads)
        remote = replace(self.remote.remote_counters, loads_s=self.remote.remote_counters.loads_s.copy())
        fetches = replace(
            self.remote.fetch_counters, failed_pages=dict(self.remote.fetch_counters.failed_pages)
        )
        return Snapshot(
            tiers={
                TierName.PEER: peer,
                TierName.HOST: host,
                TierName.SSD: ssd,
                TierName.REMOTE: remote,
            },
            fetches=fetches,
            bad_messages=self.connections.bad_messages,
        )
