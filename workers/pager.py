"""Moves a worker's pages between L1 and its node: loads, write-through, demotions. The step loop's part that copies.

All methods run on the step loop's thread; only the copies themselves run on the copier's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvtier.tier.identity import content_digest
from kvtier.tier.messages import (
    Copied,
    Granted,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Missing,
    Release,
    ReturnSlots,
    Stored,
    StoredPage,
    ToWorker,
)
from kvtier.tier.page import PageKey, PageSpec, TierName, page_checksum
from kvtier.tier.stats import TierCounters
from kvtier.workers.copier import Copier, Job, LoadJob, LoadPage, SaveJob, SavePage
from kvtier.workers.node_link import (
    Connected,
    ConnectionLost,
    ConnectionRefused,
    LinkEvent,
    NodeLink,
    NodeMessage,
)
from kvtier.workers.page_table import PageRecord, PageTable, SaveState
from kvtier.workers.scheduler import Demotion, Scheduler
from kvtier.workers.sequence import Sequence, SequenceState

log = logging.getLogger(__name__)

LOAD_JOB_PAGES = 8  # fewer pages than this aren't worth waking another thread for
SAVE_JOB_PAGES = 16  # a load waits for at most so many pages of a save under way


class Pager:
    """Loads in flight, pages to be saved, and L1's counters. Owned by the step loop.

    A load's pages are bounded by the frames reserved for it, `_unsaved` by the frames of L1. Nothing here waits: what
    the node doesn't give in time is computed, and a page for which there is no slot stays unsaved until there is.
    """

    def __init__(
        self,
        *,
        table: PageTable,
        scheduler: Scheduler,
        link: NodeLink,
        copier: Copier,
        spec: PageSpec,
        frames: npt.NDArray[np.uint8] | None,
    ) -> None:
        """`frames` is L1's arena, uint8 [frames, page bytes], where it is host memory; else None."""
        self.counters = TierCounters(capacity_bytes=table.capacity * spec.nbytes)
        self.recompute_s = 0.0  # seconds to compute one page; 0: always load
        self.pages_without_slot = 0  # that were full before there was a slot for them
        self._table = table
        self._scheduler = scheduler
        self._link = link
        self._copier = copier
        self._spec = spec
        self._variant = spec.format.value
        self._frames = frames
        self._loads: dict[str, Sequence] = {}
        self._found: dict[
            str, int
        ] = {}  # pages of a load that the node has leased or is loading, once it said so
        self._holding: dict[str, Sequence] = {}  # by the lease of their demotion under way
        self._unsaved: OrderedDict[int, PageRecord] = OrderedDict()
        self._copies = 0
        self._clears = 0
        self._cleared: dict[bytes, int] = {}  # tenant -> number of its latest clear; bounded by the tenants

    # What the step loop asks for

    @property
    def in_flight(self) -> bool:
        """An event will come without anybody asking for anything: a copy ends, a load ends."""
        return bool(self._copies or self._loads)

    @property
    def is_quiet(self) -> bool:
        """Nothing in flight, and nothing left to save while there is somewhere to save it."""
        return not self.in_flight and not (self._unsaved and self._link.can_save)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first load in flight loses to recompute."""
        return min((s.load.deadline_s for s in self._loads.values() if s.load), default=None)

    def locate(self, seq: Sequence) -> None:
        """Ask the node for the pages of a sequence that is LOADING."""
        load = seq.load
        assert load is not None
        request = seq.request
        page_tokens = self._spec.page_tokens
        self._loads[load.lease] = seq
        request.looked(TierName.HOST, request.prompt_tokens - load.first_page * page_tokens)
        content = b""
        if load.first_page == 0 and seq.length > page_tokens:
            content = content_digest(request.tenancy.salt, seq.tokens[: seq.length])
        self._link.send(
            Locate(
                request_id=load.lease,
                root=request.tenancy.root,
                tenant=request.tenancy.digest,
                keys=list(load.keys),
                variant=self._variant,
                # What was preempted comes back from wherever it is: the sequence has waited long enough.
                recompute_s=0.0 if seq.saved else self.recompute_s,
                first_content=content,
            )
        )

    def save(self, frames: list[int]) -> None:
        """Pages were sealed: take their checksums and write them through to L3 as slots allow."""
        for frame in frames:
            record = self._table.record(frame)
            if record is None:
                continue  # its sequence ended with this step, and the page was to go with it
            if self._frames is not None:
                record.checksum = self._checksum(record.key, frame)
            if self._link.is_configured and not self._table.is_dead(record.tree):
                self._unsaved[frame] = record
        if frames and self._link.can_save:
            self.pages_without_slot += max(0, len(frames) - self._link.free_slots)
            self.flush()

    def flush(self) -> None:
        """Start saving as many unsaved pages as there are slots for, the oldest first."""
        pages: list[SavePage] = []
        while self._unsaved and self._link.free_slots:
            frame, record = self._unsaved.popitem(last=False)
            if self._table.record(frame) is not record or record.save is not SaveState.DIRTY:
                continue  # evicted meanwhile, or saved by a preemption
            record.save = SaveState.SAVING
            self._table.start_copy(frame)
            pages.append(self._save_page(frame, record))
        jobs: list[SaveJob] = []
        for start in range(0, len(pages), SAVE_JOB_PAGES):
            jobs.append(SaveJob(self._link.number, pages[start : start + SAVE_JOB_PAGES]))
        self._put_saves(jobs)
        if self._unsaved or jobs:
            self._link.refill()

    def demote(self, demotion: Demotion) -> None:
        """Copy a preempted sequence's unsaved pages to L3, to be held there for it. There are slots for them."""
        if not demotion.pages:
            return
        seq = demotion.seq
        tenancy = seq.request.tenancy
        pages: list[SavePage] = []
        for page in demotion.pages:
            grant = self._link.take_slot()
            assert grant is not None, "the scheduler saves as many pages as there are slots"
            end = page.depth * self._spec.page_tokens + page.tokens
            whole = page.tokens == self._spec.page_tokens
            keys = seq.page_keys(page.depth + whole, self._spec.page_tokens)
            key = keys[page.depth] if whole else seq.tail_key(end, self._spec.page_tokens)
            pages.append(
                SavePage(
                    frame=page.frame,
                    slot=self._link.slot(grant),
                    grant=grant,
                    key=key,
                    parent=keys[page.depth - 1] if page.depth else tenancy.root,
                    root=tenancy.root,
                    tenant=tenancy.digest,
                    depth=page.depth,
                    tokens=page.tokens,
                    content=b"",
                    checksum=b"",
                )
            )
        assert seq.lease is not None
        self._holding[seq.lease] = seq
        self._put_saves([SaveJob(self._link.number, pages, seq.lease)])
        self._link.refill()

    def forget(self, seq: Sequence) -> None:
        """The sequence is over: end what the node holds or loads for it."""
        if seq.load is not None:
            self._loads.pop(seq.load.lease, None)
            self._found.pop(seq.load.lease, None)
            self._link.send(Release(seq.load.lease))
        elif seq.lease is not None and seq.lease not in self._holding:
            self._link.send(Release(seq.lease))

    def release(self, lease: str) -> None:
        """Nobody needs what the node holds under this lease."""
        self._link.send(Release(lease))

    def expire(self, now: float) -> None:
        """Loads past their deadline lose to recompute."""
        for seq in list(self._loads.values()):
            load = seq.load
            assert load is not None
            if now < load.deadline_s:
                continue
            waited = f"{1e3 * (now - load.started_s):.0f} ms"
            log.warning("load of %s: page %d did not come in %s", load.lease, load.contiguous, waited)
            self._give_up(seq, "deadline", f"the load took longer than {waited}", now)

    def cleared(self, tenant: bytes) -> None:
        """The tenant's pages are gone: what is being saved of them must not come back to life below."""
        self._clears += 1
        self._cleared[tenant] = self._clears

    def verify(self, key: PageKey) -> bool | None:
        """Whether the page's bytes in L1 are those that were sealed; None when it isn't here or can't be told."""
        frame = self._table.by_key.get(key)
        record = None if frame is None else self._table.record(frame)
        if frame is None or record is None or not record.checksum or self._frames is None:
            return None
        return self._checksum(key, frame) == record.checksum

    # Events

    def on_link(self, event: LinkEvent, now: float) -> None:
        """The connection to the node came, went, or brought a message."""
        match event:
            case Connected():
                if self._link.take_connection(event):
                    self._save_all_again()
            case ConnectionLost():
                self._lose(event.number, now)
            case ConnectionRefused():
                log.error("the cache node refuses this worker, which goes on with L1 alone: %s", event.reason)
            case NodeMessage():
                if event.number == self._link.number and self._link.is_up:
                    self._hear(event.message, now)

    def on_copied(self, job: Job, now: float) -> None:
        """A copy job is over."""
        self._copies -= 1
        for page in job.pages:
            self._table.end_copy(page.frame)
        if isinstance(job, LoadJob):
            self._on_loaded(job, now)
        else:
            self._on_saved(job)

    # Loads

    def _hear(self, message: ToWorker, now: float) -> None:
        if isinstance(message, Granted):
            self._link.granted(message.grants)
            self.flush()
        elif isinstance(message, Located):
            seq = self._loads.get(message.request_id)
            if seq is None or seq.load is None:
                return
            found = len(message.host) + len(message.loading)
            seq.load.located = True
            self._found[message.request_id] = found
            seq.load.cut(found, message.missing)
            self._copy_up(seq, message.host)
            self._finish_if_complete(seq, now)
        elif isinstance(message, Loaded):
            seq = self._loads.get(message.request_id)
            if seq is not None:
                self._copy_up(seq, message.pages)
        elif isinstance(message, LoadFailed):
            seq = self._loads.get(message.request_id)
            if seq is None or seq.load is None:
                return
            seq.load.cut(message.missing.index, message.missing)
            self._finish_if_complete(seq, now)

    def _copy_up(self, seq: Sequence, found: list[HostPage]) -> None:
        load = seq.load
        assert load is not None
        pages: list[LoadPage] = []
        for page in found:
            if page.index >= load.wanted:
                continue
            frame = int(seq.frames[load.first_page + page.index])
            is_tail = load.tail_tokens and page.index == len(load.keys) - 1
            self._table.start_copy(frame)
            pages.append(
                LoadPage(
                    index=page.index,
                    slot=self._link.slot(page.grant),
                    key=load.keys[page.index],
                    checksum=page.checksum,
                    tokens=load.tail_tokens if is_tail else self._spec.page_tokens,
                    frame=frame,
                    from_ssd=page.from_ssd,
                )
            )
        if not pages:
            return
        # Twice as many jobs as threads: a thread that the system holds up delays a part, not half.
        share = max(LOAD_JOB_PAGES, -(-len(pages) // (2 * self._copier.num_threads)))
        jobs: list[Job] = [
            LoadJob(load.lease, pages[start : start + share]) for start in range(0, len(pages), share)
        ]
        self._copies += len(jobs)
        self._copier.put(jobs)

    def _on_loaded(self, job: LoadJob, now: float) -> None:
        seq = self._loads.get(job.lease)
        if seq is None or seq.load is None:
            return  # given up; the lease is ended, the frames are free by now
        load = seq.load
        done: list[int] = []
        corrupt: list[int] = []
        for page in job.pages:
            if page.index >= load.wanted:
                continue
            done.append(page.index)
            why = job.bad.get(page.index)
            if why is None:
                load.arrive(page.index, TierName.SSD if page.from_ssd else TierName.HOST)
                continue
            corrupt.append(page.index)
            load.cut(page.index, Missing(page.index, "corrupt", why))
            log.warning("load of %s: page %d is not taken: %s", job.lease, page.index, why)
        nbytes = (len(done) - len(corrupt)) * self._spec.nbytes
        self.counters.bytes_in += nbytes
        self._link.send(Copied(job.lease, done, nbytes, job.seconds, corrupt))
        self._finish_if_complete(seq, now)

    def _give_up(self, seq: Sequence, reason: str, detail: str, now: float) -> None:
        load = seq.load
        assert load is not None
        load.located = True
        load.cut(load.contiguous, Missing(load.contiguous, reason, detail))
        self._finish_if_complete(seq, now)

    def _finish_if_complete(self, seq: Sequence, now: float) -> None:
        load = seq.load
        assert load is not None
        if not load.is_complete:
            return
        del self._loads[load.lease]
        found = self._found.pop(load.lease, len(load.keys))
        if seq.lease is not None or load.wanted < found:
            self._link.send(Release(load.lease))  # the pages held for it, and those it doesn't wait for
        seq.lease = None
        request = seq.request
        if request.first_token_s is None:
            request.load_s += now - load.started_s
        if load.missing is not None:
            start = (load.first_page + load.wanted) * self._spec.page_tokens
            request.missed(start, load.missing.reason, load.missing.detail)
        if load.wanted:
            self.counters.promoted_pages += load.wanted
            self.counters.loads_s.append(now - load.started_s)
        self._scheduler.loaded(seq, now)

    # Saves

    def _put_saves(self, jobs: list[SaveJob]) -> None:
        for job in jobs:
            job.clears = self._clears
        self._copies += len(jobs)
        if jobs:
            self._copier.put([*jobs])

    def _save_page(self, frame: int, record: PageRecord) -> SavePage:
        grant = self._link.take_slot()
        assert grant is not None
        return SavePage(
            frame=frame,
            slot=self._link.slot(grant),
            grant=grant,
            key=record.key,
            parent=record.parent,
            root=record.root,
            tenant=record.tenant,
            depth=record.depth,
            tokens=self._spec.page_tokens,
            content=record.content,
            checksum=record.checksum,
        )

    def _on_saved(self, job: SaveJob) -> None:
        seq = None if job.lease is None else self._holding.pop(job.lease)
        is_current = self._link.is_up and job.connection == self._link.number
        stored: list[SavePage] = []
        for page in job.pages:
            record = self._table.record(page.frame)
            if record is not None and record.key != page.key:
                record = None  # the frame holds another page by now
            is_cleared = self._cleared.get(page.tenant, 0) > job.clears
            is_written = is_current and job.error is None and not is_cleared
            if is_written:
                stored.append(page)
            if record is not None and record.save is SaveState.SAVING:
                record.save = SaveState.CLEAN if is_written else SaveState.DIRTY
                if not is_written and self._link.is_configured and not self._table.is_dead(record.tree):
                    self._unsaved[page.frame] = record
        if is_current and len(stored) < len(job.pages):
            self._link.send(ReturnSlots([page.grant for page in job.pages if page not in stored]))
        self.counters.bytes_out += len(stored) * self._spec.nbytes
        hold_for = job.lease
        if seq is not None:
            seq.copies = 0
            if seq.state is SequenceState.FINISHED or len(stored) < len(job.pages):
                hold_for = seq.lease = None
        if stored:
            self._link.send(Stored([self._stored_page(page) for page in stored], hold_for))
        self.flush()

    def _stored_page(self, page: SavePage) -> StoredPage:
        return StoredPage(
            grant=page.grant,
            key=page.key,
            variant=self._variant,
            root=page.root,
            parent=page.parent,
            tenant=page.tenant,
            depth=page.depth,
            tokens=page.tokens,
            checksum=page.checksum,
            content=page.content,
        )

    def _checksum(self, key: PageKey, frame: int) -> bytes:
        assert self._frames is not None
        return page_checksum(key, self._variant, self._spec.digest, memoryview(self._frames[frame]))

    # The connection

    def _lose(self, number: int, now: float) -> None:
        """The node went away: what it leased or held is void, and loads fall back to computing."""
        self._copier.wait_idle()  # a slot must not be touched once the slab is let go
        if not self._link.lose_connection(number):
            return
        log.warning("the cache node went away; going on with L1 alone")
        for seq in list(self._loads.values()):
            self._give_up(seq, "load_failed", "the cache node went away", now)
        for seq in self._scheduler.waiting:
            if seq.lease is not None and seq.lease not in self._holding:
                seq.lease = None

    def _save_all_again(self) -> None:
        """A node came (back): it may be a new one, so every cached page is written to it, as slots come."""
        for frame, record, _ in self._table.cached():
            if record.save is SaveState.CLEAN:
                record.save = SaveState.DIRTY
            if not self._table.is_dead(record.tree):
                self._unsaved[frame] = record
        self.flush()
