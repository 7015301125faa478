"""Moves a worker's pages between L1 and its node: loads, write-through, demotions.

All methods run on the step loop's thread; only the copies themselves run on the copier's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.page import PageFormat, PageKey, PageSpec, TierName, page_checksum
from kvtier.tier.policy.base import Kind
from kvtier.tier.protocol.messages import (
    Arena,
    ArenaGone,
    Chain,
    Copied,
    Finished,
    FramesGranted,
    Granted,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Missing,
    NewRoot,
    PageRef,
    PeerPage,
    RecallFrames,
    Reclaimed,
    Release,
    Remote,
    ReturnSlots,
    SavePages,
    Stored,
    StoredPage,
    ToWorker,
    Unsaved,
)
from kvtier.tier.protocol.parts import cut_chains
from kvtier.tier.stats import TierCounters
from kvtier.workers.models.formats import LayerGroup
from kvtier.workers.node_io.arena_ops import ArenaOps
from kvtier.workers.node_io.namespaces import Namespaces
from kvtier.workers.node_io.node_link import (
    Connected,
    ConnectionLost,
    ConnectionRefused,
    LinkEvent,
    NodeLink,
    NodeMessage,
)
from kvtier.workers.node_io.peer_export import PeerExport
from kvtier.workers.node_io.peer_import import PeerImport
from kvtier.workers.paging.copier import (
    Copier,
    Job,
    LoadJob,
    LoadPage,
    PeerLoad,
    PeerSave,
    PeerSaveJob,
    SaveJob,
    SavePage,
)
from kvtier.workers.paging.frames import Convert, PageRecord, SaveState
from kvtier.workers.requests.sequence import Load, LoadChain, Sequence, SequenceState
from kvtier.workers.scheduling.scheduler import DemotedPage, Demotion, Scheduler

log = logging.getLogger(__name__)

LOAD_JOB_PAGES = 8  # fewer pages than this aren't worth waking another thread for
SAVE_JOB_PAGES = 16  # a load waits for at most so many pages of a save under way
VARIANTS_AT_ONCE = 16  # frames that tier variants may take from L1 at a time
QUEUE_SLACK = 64  # below this a queue isn't worth tidying up
MOST_KEYS = Limits().keys_per_locate  # most keys per message; the node rejects longer ones
NEVER_DECAYED = 1 << 30  # recent_tokens of a recipe whose decayed format is wanted nowhere, only taken


class Pager:
    """Loads in flight, pages to be saved, and L1's counters. Owned by the step loop.

    A load's pages are bounded by the frames reserved for it, `_unsaved` and `_unmade` by the pages cached. Nothing here
    waits: what the node doesn't give in time is computed, and a page for which there is no slot stays unsaved until
    there is.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        link: NodeLink,
        copier: Copier,
        ops: ArenaOps,
        roots: Namespaces,
        groups: tuple[LayerGroup, ...],
        l4_format: PageFormat | None,
        memory: npt.NDArray[np.uint8] | None,
        lender: PeerExport,
        borrower: PeerImport,
        is_through: bool = True,
        always_load: bool = False,
    ) -> None:
        """`memory` is L1's arena, uint8 [units, unit bytes], where it is host memory; else None.

        Full pages are saved at once (`is_through`), or shortly before they must leave.
        """
        self.counters = TierCounters(capacity_bytes=scheduler.table.capacity_bytes)
        self.made_variants = 0
        self.clears = Clears()  # that L1 has been cleared by; what is said to the node goes by them
        self._scheduler = scheduler
        self._table = scheduler.table
        self._link = link
        self._copier = copier
        self._ops = ops
        self._roots = roots
        self._groups = groups
        self._specs = {spec.digest: spec for group in groups for spec in group.specs.values()}
        self._l4_format = l4_format
        self._always_load = always_load
        self._peer_export = lender
        self._peer_import = borrower
        self._is_through = is_through
        self._unit_bytes = 0 if memory is None else memory.shape[1]
        self._memory = None if memory is None else memory.reshape(-1).data
        self._loads: dict[str, Sequence] = {}
        # Of each load that the node has answered: what it leased or is loading, and the worker hasn't copied yet.
        self._leased: dict[str, set[PageRef]] = {}
        self._holding: dict[str, Sequence] = {}  # by the lease of their demotion under way
        # By bytes of a page, since slots are; in each the oldest first.
        self._unsaved: dict[int, OrderedDict[PageRecord, None]] = {
            spec.nbytes: OrderedDict() for spec in self._specs.values()
        }
        self._unmade: OrderedDict[PageRecord, None] = OrderedDict()  # pages whose tier variant isn't made yet
        self._variants = 0  # being saved
        self._copies = 0
        self._clears = 0
        self._cleared: dict[bytes, int] = {}  # tenant -> number of its latest clear; bounded by the tenants

    # What the step loop asks for

    @property
    def in_flight(self) -> bool:
        """True while a copy, a load or a reclaim is under way: an event will come by itself."""
        return bool(self._copies or self._loads or self._peer_export.is_waiting)

    @property
    def is_quiet(self) -> bool:
        """True if nothing is in flight and nothing is left that could be saved."""
        if self.in_flight or self._table.has_due:
            return False
        if any(pages and self._link.can_save(size) for size, pages in self._unsaved.items()):
            return False
        return not self._unmade or not self._link.can_save(self._variant_of(next(iter(self._unmade))).nbytes)

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the next deadline: of a load, or of frames lent to peers. None if there is none."""
        times = [seq.load.deadline_s for seq in self._loads.values() if seq.load]
        if (lender := self._peer_export.next_deadline_s) is not None:
            times.append(lender)
        return min(times, default=None)

    def locate(self, seq: Sequence) -> None:
        """Asks the node for the pages of a sequence that is LOADING."""
        load = seq.load
        assert load is not None
        request = seq.request
        page_tokens = self._table.page_tokens
        self._loads[load.lease] = seq
        request.looked(TierName.HOST, request.prompt_tokens - load.first_page * page_tokens)
        content = b""
        if load.first_page == 0 and seq.length > page_tokens:
            content = seq.content()
        recompute_s = self._recompute_s(seq, load)
        chains = [_chain(chain, group) for chain, group in zip(load.chains, self._groups, strict=True)]
        self._link.send(
            Locate(
                request_id=load.lease,
                root=request.namespace.root,
                tenant=request.namespace.digest,
                page_tokens=page_tokens,
                first_page=load.first_page,
                last_position=load.last_position,
                chains=cut_chains(chains, MOST_KEYS),
                recompute_s=recompute_s,
                first_content=content,
                remotes=[Remote(*remote) for remote in request.spec.remotes],
                double_pages=self._table.policy.costs.double_pages,
                patience_s=max(0.0, load.deadline_s - load.started_s) if recompute_s else 0.0,
                busy_s=self._busy_s(seq) if recompute_s else 0.0,
                cleared=self.clears.of(request.namespace.digest),
            )
        )

    def _recompute_s(self, seq: Sequence, load: Load) -> float:
        """Seconds that computing a page of the load takes on average; 0.0 to load it in any case."""
        if self._always_load or seq.saved:
            return (
                0.0  # what was preempted comes back from wherever it is: the sequence has waited long enough
            )
        return self._table.policy.costs.recompute_s(0.5 * (load.first_page + load.pages))

    def _busy_s(self, seq: Sequence) -> float:
        """Seconds until older sequences have computed their prompts."""
        costs, page_tokens = self._table.policy.costs, self._table.page_tokens
        older = (other for other in self._scheduler.active if other.number < seq.number)
        left = ((other.computed, other.length) for other in older if other.state is SequenceState.RUNNING)
        return sum(
            (end - start) / page_tokens * costs.recompute_s(0.5 * (start + end) / page_tokens)
            for start, end in left
            if end - start > 1
        )

    def finished(self, seq: Sequence, kind: Kind, now: float) -> None:
        """Tells the node which pages a request used, when its last sequence is about to end."""
        request = seq.request
        if not (self._link.is_up and request.spec.use_cache and seq.is_last) or request.admitted_s is None:
            return
        use, keys = self._scheduler.use_of(seq, kind)
        if not use.pages or sum(map(len, keys)) > MOST_KEYS:
            return
        costs = self._table.policy.costs
        self._link.send(
            Finished(
                request_id=request.spec.request_id,
                keys=[[*chain] for chain in keys],
                new_pages=use.new_pages,
                output_tokens=use.output_tokens,
                kind=use.kind,
                turn=use.turn,
                session=use.session,
                closed=use.closed,
                open=use.open,
                seconds=max(0.0, now - request.admitted_s),
                page_s=costs.page_s,
                double_pages=costs.double_pages,
            )
        )

    def save(self, records: list[PageRecord], now: float) -> None:
        """Takes the checksums of sealed pages, and writes them through to L3 as slots allow."""
        for record in records:
            if not self._table.is_cached(record):
                continue  # its sequence ended with this step, and the page was to go with it
            if self._memory is not None:
                record.checksum = self._checksum(record)
            if self._is_through:
                self._to_save(record)
        self.flush(now)

    def save_all(self, now: float) -> None:
        """Saves all unsaved pages, and writes through from now on."""
        if self._is_through:
            return
        self._is_through = True
        for record, _ in self._table.cached():
            if record.save is SaveState.DIRTY:
                self._to_save(record)
        self.flush(now)

    def save_now(self, records: list[PageRecord], now: float) -> None:
        """Saves these pages now: a decode worker or another node waits for them."""
        for record in records:
            if record.save is SaveState.DIRTY:
                self._to_save(record)
        self.flush(now)

    def _save_asked(self, pages: Iterable[tuple[bytes, str]], now: float) -> None:
        """Saves the pages that another node asks for and L1 has, and tells the node which it has not."""
        unsaved: list[tuple[bytes, str]] = []
        for key, variant in pages:
            records = self._table.records_of(PageKey(key))
            record = next((one for one in records if one.format.value == variant and not one.made_from), None)
            if record is None or not (self._may_go_down(record) and self._link.can_save(record.nbytes)):
                unsaved.append((key, variant))
                continue
            if record.save is SaveState.CLEAN:
                record.save = SaveState.DIRTY
            if record.save is SaveState.DIRTY:
                self._to_save(record)
        if unsaved:
            self._link.send(Unsaved(unsaved))
        self.flush(now)

    def flush(self, now: float) -> None:
        """Starts saving as many unsaved pages as there are slots for, the oldest first."""
        self._run_ops(now)  # what is saved must lie where it is said to lie
        for record in self._table.take_due() if self._table.has_due else ():
            if self._is_through or record.leaves:
                self._to_save(record)
        if self._table.can_save and self._table.is_below_watermark:
            self._choose_to_evict(now)
        pages: list[SavePage] = []
        for size, unsaved in self._unsaved.items():
            while unsaved and self._link.free_slots(size):
                record, _ = unsaved.popitem(last=False)
                if not self._table.is_cached(record) or record.save is not SaveState.DIRTY:
                    continue  # evicted meanwhile, or saved by a preemption
                self._table.start_save(record)
                pages.append(self._save_page(record, record.frame, self._spec(record), record.made_from))
        pages += self._make_variants(now)
        self._put_saves(
            [
                SaveJob(self._link.number, pages[start : start + SAVE_JOB_PAGES])
                for start in range(0, len(pages), SAVE_JOB_PAGES)
            ]
        )
        if pages or self._unmade or any(self._unsaved.values()):
            self._link.refill()
        self._save_to_peers(now)
        self._peer_export.balance(now)

    def _choose_to_evict(self, now: float) -> None:
        """Chooses the pages to evict next, to save them or to move them to peers before."""
        if self._is_through and not self._peer_import.has_stock:
            return
        chosen = self._table.choose_to_evict(now)
        self._peer_import.choose(chosen)
        for record in chosen if not self._is_through else ():
            if record.save is SaveState.DIRTY:
                self._to_save(record)

    def _save_to_peers(self, now: float) -> None:
        jobs: list[Job] = [*self._peer_import.to_save(self._spec)]
        for job in jobs:
            for page in job.pages:
                if isinstance(page, PeerSave):
                    page.cleared = self.clears.of(page.record.tenant)
                self._table.start_copy(page.frame)
        self._copies += len(jobs)
        if jobs:
            self._copier.put(jobs)

    def close(self) -> None:
        """Releases peers' frames, after the copier has ended."""
        self._peer_import.close()
        self._peer_export.close()

    def demote(self, demotion: Demotion) -> None:
        """Copy a preempted sequence's unsaved pages to L3, to be held there for it. There are slots for them."""
        if not demotion.pages:
            return
        seq = demotion.seq
        pages: list[SavePage] = []
        for page in demotion.pages:
            record = page.record
            if record is None:
                pages.append(self._save_tail(seq, page))
            else:
                pages.append(self._save_page(record, page.frame, self._spec(record), record.made_from))
        assert seq.lease is not None
        self._holding[seq.lease] = seq
        self._put_saves([SaveJob(self._link.number, pages, seq.lease)])
        self._link.refill()

    def forget(self, seq: Sequence) -> None:
        """Ends what the node holds or loads for a sequence that is over."""
        if seq.load is not None:
            self._loads.pop(seq.load.lease, None)
            self._leased.pop(seq.load.lease, None)
            self._link.send(Release(seq.load.lease))
        elif seq.lease is not None and seq.lease not in self._holding:
            self._link.send(Release(seq.lease))

    def release(self, lease: str) -> None:
        """Tells the node that nothing needs what it holds under this lease."""
        self._link.send(Release(lease))

    def expire(self, now: float) -> None:
        """Gives up loads past their deadline, and lent frames that don't come back."""
        self._peer_export.expire(now)
        for seq in list(self._loads.values()):
            load = seq.load
            assert load is not None
            if now < load.deadline_s:
                continue
            waited = f"{1e3 * (now - load.started_s):.0f} ms"
            log.warning("load of %s: not all of its pages came in %s", load.lease, waited)
            self._give_up(seq, "deadline", f"the load took longer than {waited}", now)

    def given_up(self, now: float) -> Sequence | None:
        """Returns a sequence that has waited too long for frames lent to peers. Before a step."""
        return self._peer_export.given_up(now)

    def cleared(self, tenant: bytes) -> None:
        """Discards saves under way of a tenant whose pages were cleared."""
        self._clears += 1
        self._cleared[tenant] = self._clears

    def verify(self, record: PageRecord) -> bool | None:
        """Returns whether a page's bytes in L1 match its checksum; None if that isn't known."""
        if not record.checksum or self._memory is None:
            return None
        return self._checksum(record) == record.checksum

    def check(self) -> None:
        """The bounds of what is kept here; AssertionError where one doesn't hold."""
        most = QUEUE_SLACK + 2 * (self._table.capacity_bytes // min(self._unsaved)) + 1
        assert all(len(queue) <= most for queue in (*self._unsaved.values(), self._unmade)), (
            "pages to be saved"
        )
        assert 0 <= self._variants <= VARIANTS_AT_ONCE, f"{self._variants} tier variants at once"
        assert self._leased.keys() <= self._loads.keys(), "leases of loads that are over"
        self._peer_export.check()
        self._peer_import.check()
        if not self.in_flight:
            assert not self._variants and not self._holding, "copies that nothing makes"

    # Events

    def on_link(self, event: LinkEvent, now: float) -> None:
        """Handles an event of the connection to the node."""
        match event:
            case Connected():
                if self._link.take_connection(event):
                    self._peer_export.came(event.lifeline)
                    self._introduce(now)
            case ConnectionLost():
                self._lose(event.number, now)
            case ConnectionRefused():
                log.error("the cache node refuses this worker, which goes on with L1 alone: %s", event.reason)
            case NodeMessage():
                if event.number == self._link.number and self._link.is_up:
                    self._hear(event.message, now)

    def on_copied(self, job: Job, now: float) -> None:
        """Handles the end of a copy job."""
        self._copies -= 1
        for page in job.pages:
            self._table.end_copy(page.frame)
        if isinstance(job, LoadJob):
            self._peer_import.loaded(job)
            self._on_loaded(job, now)
        elif isinstance(job, PeerSaveJob):
            self._peer_import.saved(job)
        else:
            self._on_saved(job, now)

    # Loads

    def _hear(self, message: ToWorker, now: float) -> None:
        if isinstance(message, Granted):
            self._link.granted(message.grants)
            self.flush(now)
        elif isinstance(message, Located):
            seq = self._loads.get(message.request_id)
            if seq is None or seq.load is None:
                return
            here: list[HostPage | PeerPage] = [*message.peer, *message.host]
            refs = [page.page for page in here] + message.loading
            self._leased[message.request_id] = set(refs)
            seq.load.locate(message.pages, refs, message.missing)
            self._copy_up(seq, here, now)
            self._finish_if_complete(seq, now)
        elif isinstance(message, Loaded):
            seq = self._loads.get(message.request_id)
            if seq is not None:
                self._copy_up(seq, [*message.peer, *message.pages], now)
                self._finish_if_complete(seq, now)
        elif isinstance(message, SavePages):
            self._save_asked(message.pages, now)
        elif isinstance(message, LoadFailed):
            seq = self._loads.get(message.request_id)
            if seq is None or seq.load is None:
                return
            seq.load.cut(message.missing.page, message.missing)
            self._finish_if_complete(seq, now)
        else:
            self._hear_of_peers(message, now)

    def _hear_of_peers(self, message: ToWorker, now: float) -> None:
        if isinstance(message, Arena):
            self._peer_import.opened(message)
        elif isinstance(message, ArenaGone):
            self._peer_import.gone(message.lender)
        elif isinstance(message, FramesGranted):
            self._peer_import.granted(message.grants)
            self.flush(now)
        elif isinstance(message, RecallFrames):
            self._peer_import.recalled(message.grants)
        elif isinstance(message, Reclaimed):
            self._peer_export.reclaimed(message.offsets, now)

    def _copy_up(self, seq: Sequence, found: Iterable[HostPage | PeerPage], now: float) -> None:
        load = seq.load
        assert load is not None
        placed: list[tuple[HostPage | PeerPage, PageSpec, int]] = []
        for page in found:
            if not load.wants(page.page):
                continue
            if isinstance(page, PeerPage) and self._peer_import.arena(page.grant.lender) is None:
                why = "it is in the memory of a peer that is gone"
                load.cut(page.page[1], Missing(page.page[1], "load_failed", why))
                continue
            spec = self._specs.get(page.spec_digest)
            if spec is None or spec.format != page.variant:
                why = f"it is stored as {page.variant}, in a shape that this worker doesn't have"
                load.cut(page.page[1], Missing(page.page[1], "variant", why))
                continue
            frame = self._table.place(seq, page.page, spec.format, now)
            if frame is not None:
                placed.append((page, spec, frame))
        self._run_ops(now)  # what lay in these frames may have to be moved out first
        # Twice as many jobs as threads: a thread that the system holds up delays a part, not half.
        share = max(LOAD_JOB_PAGES, -(-len(placed) // (2 * self._copier.num_threads)))
        of_node = [self._load_page(p, spec, frame) for p, spec, frame in placed if isinstance(p, HostPage)]
        of_peers = [self._peer_load(p, spec, frame) for p, spec, frame in placed if isinstance(p, PeerPage)]
        jobs: list[Job] = [
            LoadJob(load.lease, pages[start : start + share])
            for pages in (of_peers, of_node)
            for start in range(0, len(pages), share)
        ]
        self._copies += len(jobs)
        self._copier.put(jobs)

    def _load_page(self, page: HostPage, spec: PageSpec, frame: int) -> LoadPage:
        return LoadPage(
            ref=page.page,
            slot=self._link.slot(page.grant),
            grant=page.grant,
            key=PageKey(page.key),
            spec=spec,
            checksum=page.checksum,
            tokens=page.tokens,
            frame=frame,
            came_from=TierName(page.came_from),
        )

    def _peer_load(self, page: PeerPage, spec: PageSpec, frame: int) -> PeerLoad:
        arena = self._peer_import.arena(page.grant.lender)
        assert arena is not None
        self._peer_import.started(page.grant.lender)
        return PeerLoad(
            ref=page.page,
            peer=arena,
            grant=page.grant,
            key=PageKey(page.key),
            spec=spec,
            check=page.checksum,
            frame=frame,
            made_from=page.made_from,
        )

    def _on_loaded(self, job: LoadJob, now: float) -> None:
        seq = self._loads.get(job.lease)
        if seq is None or seq.load is None:
            return  # given up; the lease is ended, the frames are free by now
        load = seq.load
        done: list[PageRef] = []
        corrupt: list[PageRef] = []
        nbytes = 0
        for page in job.pages:
            if not load.wants(page.ref):
                continue
            done.append(page.ref)
            why = job.bad.get(page.ref)
            if why is None:
                nbytes += page.spec.nbytes
                self._table.arrive(seq, page.ref, page.came_from, now)
                self._describe(page)
                continue
            corrupt.append(page.ref)
            load.cut(page.ref[1], Missing(page.ref[1], "corrupt", why))
            log.warning("load of %s: page %d is not taken: %s", job.lease, page.ref[1], why)
        self.counters.bytes_in += nbytes
        self._leased[job.lease].difference_update(done)
        self._link.send(Copied(job.lease, done, nbytes, job.seconds, corrupt))
        self._finish_if_complete(seq, now)

    def _describe(self, page: LoadPage | PeerLoad) -> None:
        """Copies what only the envelope told into the record of a cached page."""
        record = self._table.record(page.frame)
        if record is not None and record.format is page.spec.format:
            record.made_from = page.made_from
            if record.key == page.key:  # not found as the exact request's, and taken over by a lossy one
                record.checksum = page.checksum

    def _give_up(self, seq: Sequence, reason: str, detail: str, now: float) -> None:
        assert seq.load is not None
        seq.load.give_up(reason, detail)
        self._finish_if_complete(seq, now)

    def _finish_if_complete(self, seq: Sequence, now: float) -> None:
        load = seq.load
        assert load is not None
        if not load.is_complete:
            return
        del self._loads[load.lease]
        leased = self._leased.pop(load.lease, None)
        if leased is None or leased or seq.lease is not None:
            self._link.send(Release(load.lease))  # the pages held for it, and those it doesn't wait for
        request = seq.request
        if request.first_token_s is None:
            request.load_s += now - load.started_s
        pages = self._scheduler.loaded(seq, now)
        if load.missing is not None:
            request.missed(pages * self._table.page_tokens, load.missing.reason, load.missing.detail)
        if load.came:
            self.counters.promoted_pages += len(load.came)
            self.counters.loads_s.append(now - load.started_s)

    # Saves

    def _put_saves(self, jobs: list[SaveJob]) -> None:
        for job in jobs:
            job.clears = self._clears
        self._copies += len(jobs)
        if jobs:
            self._copier.put([*jobs])

    def _to_save(self, record: PageRecord) -> None:
        """Queues a page to be saved, unless no node takes it. A page that is put off is queued when it is due."""
        if not self._may_go_down(record):
            return
        self._queue(self._unsaved[record.nbytes], record)
        if self._l4_format not in (None, record.format) and not record.made_from:
            self._queue(self._unmade, record)

    def _may_go_down(self, record: PageRecord) -> bool:
        return self._link.is_configured and not (record.is_put_off or self._table.is_dead(record.tree))

    def _queue(self, queue: OrderedDict[PageRecord, None], record: PageRecord) -> None:
        """Appends to a queue of cached pages; evicted ones stay in it until they are half of it."""
        queue[record] = None
        if len(queue) > QUEUE_SLACK + 2 * sum(self._table.counts.values()):
            for queued in [queued for queued in queue if not self._table.is_cached(queued)]:
                del queue[queued]

    def _make_variants(self, now: float) -> list[SavePage]:
        """Converts pages to the format of L4, into frames that are free again once they are saved."""
        pages: list[SavePage] = []
        by_kind: dict[tuple[int, PageFormat], Convert] = {}
        sources: list[int] = []
        while self._unmade and self._variants < VARIANTS_AT_ONCE:
            record = next(iter(self._unmade))
            spec = self._variant_of(record)
            if not self._table.is_cached(record) or self._table.is_dead(record.tree):
                del self._unmade[record]  # evicted meanwhile
                continue
            if not self._link.free_slots(spec.nbytes):
                break
            sources.append(record.frame)
            self._table.start_copy(record.frame)  # it stays what and where it is until it is converted
            frame = self._table.borrow(record.group, spec.format, now)
            if frame is None:
                if not (self._copies or self._scheduler.active or self._table.lent_bytes):
                    self._unmade.clear()  # L1 is too small for one page more, and nothing will change that
                break
            del self._unmade[record]
            convert = by_kind.setdefault(
                (record.group, record.format), Convert(record.group, [], record.format, [], spec.format)
            )
            convert.sources.append(record.frame)
            convert.targets.append(frame)
            self._variants += 1
            pages.append(self._save_page(record, frame, spec, record.format.value))
        self._run_ops(now)
        self._ops.run([*by_kind.values()])
        self.made_variants += len(pages)
        if sources:
            for source in sources:
                self._table.end_copy(source)
        return pages

    def _variant_of(self, record: PageRecord) -> PageSpec:
        """Returns the spec of a page in L4's format. There must be one."""
        assert self._l4_format is not None
        return self._groups[record.group].specs[self._l4_format]

    def _save_page(self, record: PageRecord, frame: int, spec: PageSpec, made_from: str) -> SavePage:
        is_variant = spec.format is not record.format
        grant = self._link.take_slot(spec.nbytes)
        assert grant is not None, "pages are saved as slots allow"
        return SavePage(
            frame=frame,
            slot=self._link.slot(grant),
            grant=grant,
            key=record.key,
            spec=spec,
            made_from=made_from,
            parent=record.parent,
            root=record.root,
            tenant=record.tenant,
            depth=record.depth,
            tokens=spec.page_tokens,
            content=record.content,
            checksum=b"" if is_variant else record.checksum,
            record=None if is_variant else record,
        )

    def _save_tail(self, seq: Sequence, page: DemotedPage) -> SavePage:
        """The partial page that a preempted sequence ends with."""
        namespace = seq.request.namespace
        spec = self._groups[page.group].specs[page.format]
        grant = self._link.take_slot(spec.nbytes)
        assert grant is not None, "the scheduler saves as many pages as there are slots"
        return SavePage(
            frame=page.frame,
            slot=self._link.slot(grant),
            grant=grant,
            key=page.key,
            spec=spec,
            made_from="",
            parent=page.parent,
            root=namespace.roots[page.group],
            tenant=namespace.digest,
            depth=page.depth,
            tokens=page.tokens,
            content=b"",
            checksum=b"",
            record=None,
        )

    def _on_saved(self, job: SaveJob, now: float) -> None:
        seq = None if job.lease is None else self._holding.pop(job.lease)
        is_current = self._link.is_up and job.connection == self._link.number
        stored: list[SavePage] = []
        unused: list[SavePage] = []
        for page in job.pages:
            self._variants -= page.is_variant
            is_cleared = self._cleared.get(page.tenant, 0) > job.clears
            is_written = is_current and job.error is None and not is_cleared
            (stored if is_written else unused).append(page)
            record = page.record
            if record is None or not self._is_still_cached(record, is_written, now):
                continue
            if not is_written and self._link.is_configured and not self._table.is_dead(record.tree):
                self._queue(self._unsaved[record.nbytes], record)
        if is_current and unused:
            self._link.send(ReturnSlots([page.grant for page in unused]))
        self.counters.bytes_out += sum(page.spec.nbytes for page in stored)
        hold_for = job.lease
        if seq is not None:
            is_held = seq.state is not SequenceState.FINISHED and not unused
            if not is_held:
                hold_for = None
            if seq.state is not SequenceState.FINISHED:
                seq.copies = 0
                if not is_held:
                    seq.lease = None
        if stored:
            pages = [_stored_page(page, self.clears.of(page.tenant)) for page in stored]
            self._link.send(Stored(pages, hold_for))
        self.flush(now)

    def _is_still_cached(self, record: PageRecord, is_written: bool, now: float) -> bool:
        """Ends a save. Returns whether the page is still cached."""
        return self._table.is_cached(record) and self._table.saved(record, is_written, now)

    def _run_ops(self, now: float) -> None:
        """Runs the queued operations on frames, before anything else touches them."""
        if self._table.has_ops:
            self._ops.run(self._table.take_ops())

    def _spec(self, record: PageRecord) -> PageSpec:
        return self._groups[record.group].specs[record.format]

    def _checksum(self, record: PageRecord) -> bytes:
        assert self._memory is not None
        start = record.frame * self._unit_bytes
        payload = self._memory[start : start + record.nbytes]
        return page_checksum(record.key, record.format.value, self._spec(record).digest, payload)

    # The connection

    def _introduce(self, now: float) -> None:
        """Introduces the worker to a node that has connected: sends all roots, and saves every cached page as slots come."""
        for fields in self._roots.fields():
            self._link.send(NewRoot(fields))
        self._table.node_came(can_save=any(map(self._link.can_save, self._unsaved)))
        self._run_ops(now)
        for record, _ in self._table.cached():
            if self._is_through or record.leaves:
                self._to_save(record)
        self.flush(now)

    def _lose(self, number: int, now: float) -> None:
        """Handles the loss of the node: its leases are void, and loads fall back to computing."""
        self._copier.wait_idle()  # a slot must not be touched once the slab is let go
        if not self._link.lose_connection(number):
            return
        self._peer_import.lost()
        self._peer_export.went()
        log.warning("the cache node went away; going on with L1 alone")
        self._table.can_save = False
        for seq in list(self._loads.values()):
            self._give_up(seq, "load_failed", "the cache node went away", now)
        for seq in self._scheduler.waiting:
            if seq.lease not in self._holding:
                seq.lease = None


def _chain(chain: LoadChain, group: LayerGroup) -> Chain:
    needs = chain.needs
    recipe, window = needs.recipe, needs.window
    other = recipe.decayed or chain.lossy_format
    return Chain(
        keys=list(chain.keys),
        other_keys=list(chain.other_keys),
        held=chain.held,
        variant=recipe.write.value,
        decayed="" if other in (None, recipe.write) else other.value,
        recent_tokens=recipe.recent_tokens if recipe.decayed else NEVER_DECAYED,
        sink_tokens=recipe.sink_tokens,
        stride_tokens=recipe.stride_tokens,
        window_tokens=window.tokens,
        window_sinks=window.sinks,
        any_variant=needs.any_variant,
        spec_digest=group.specs[recipe.write].digest,
    )


def _stored_page(page: SavePage, cleared: int) -> StoredPage:
    return StoredPage(
        grant=page.grant,
        key=page.key,
        variant=page.spec.format.value,
        made_from=page.made_from,
        spec_digest=page.spec.digest,
        root=page.root,
        parent=page.parent,
        tenant=page.tenant,
        depth=page.depth,
        tokens=page.tokens,
        checksum=page.checksum,
        content=page.content,
        cleared=cleared,
    )
