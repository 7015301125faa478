"""Copies pages between L1 frames and slots of the node's L3 slab or peers' frames, on threads of its own. Decides nothing.

Verifying and copying release the GIL for most of a page's time, so a second thread is real. A job is a list of pages:
no thread is woken per page. Loads go before saves, because something waits for a load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvtier.tier.l1.arena import Arena, PeerArena
from kvtier.tier.pages.page import (
    HEADER_BYTES,
    PACKED_ENVELOPE_BYTES,
    Envelope,
    PageCorrupt,
    PageKey,
    PageSpec,
    RootKey,
    TierName,
    page_checksum,
)
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import Grant, PageRef, PeerGrant
from kvtier.workers.paging.frame_checks import FramePage, PageChecks
from kvtier.workers.paging.frames import PageRecord

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadPage:
    """A page of a lease: what must lie in `slot` (header and payload), and the frame it goes into.

    `made_from` is what its envelope says, once it is copied.
    """

    ref: PageRef
    slot: memoryview
    grant: Grant
    key: PageKey
    spec: PageSpec
    checksum: bytes
    tokens: int
    frame: int
    came_from: TierName
    made_from: str = ""


@dataclass(slots=True)
class PeerLoad:
    """A page of a lease that lies in a peer's frame, and the `check` that it was put there with.

    `checksum` is filled in by the copy, where the check is one.
    """

    ref: PageRef
    peer: PeerArena
    grant: PeerGrant
    key: PageKey
    spec: PageSpec
    check: bytes
    frame: int
    made_from: str
    came_from: TierName = TierName.PEER
    checksum: bytes = b""


@dataclass(slots=True)
class LoadJob:
    """Pages of one lease to verify and copy into L1. `bad` says why a page was not taken."""

    lease: str
    pages: list[LoadPage] | list[PeerLoad]
    bad: dict[PageRef, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class SavePage:
    """A page to write from its frame into `slot`, envelope first; a checksum of b"" is taken from what was written.

    `made_from` is the variant it was converted from; "" when the model computed it. `record` is the cached page in the
    frame, None for one that nothing finds in L1: a preempted sequence's tail, or a variant for a tier below.
    """

    frame: int
    slot: memoryview
    grant: Grant
    key: PageKey
    spec: PageSpec
    made_from: str
    parent: bytes
    root: RootKey
    tenant: bytes
    depth: int
    tokens: int
    content: bytes
    checksum: bytes
    record: PageRecord | None

    @property
    def is_variant(self) -> bool:
        """It was made for a tier below."""
        return self.record is None and bool(self.made_from)


@dataclass(slots=True)
class SaveJob:
    """Sealed pages to write down to L3. `lease` keeps them there for a preempted sequence. `error`: nothing counts.

    `connection` is the one that granted the slots, `clears` how many clears came before the job.
    """

    connection: int
    pages: list[SavePage]
    lease: str | None = None
    clears: int = 0
    error: str | None = None


@dataclass(slots=True)
class PeerSave:
    """A cached page to copy into a peer's frame, which keeps it beside the copy below.

    `checksum` is what L1 knows of it, b"" where it knows none; `check`, what it is to be found by there, is filled in by
    the copy.
    """

    frame: int
    peer: PeerArena
    grant: PeerGrant
    record: PageRecord
    spec: PageSpec
    checksum: bytes
    check: bytes = b""
    cleared: int = 0  # clear epoch of its tenant when the copy began


@dataclass(slots=True)
class PeerSaveJob:
    """Pages to copy into peers' frames that were granted on `connection`. `error`: nothing counts."""

    connection: int
    pages: list[PeerSave]
    error: str | None = None


Job = LoadJob | SaveJob | PeerSaveJob
Peer = TypeVar("Peer", PeerLoad, PeerSave)


class FrameCopies(Protocol):
    """Copies between frames; tier.hbm.Arena says what they do."""

    def copy_head(self, src: int, dst: int, tokens: int, spec: PageSpec) -> None:
        """Copy what a page holds of its first `tokens` tokens."""

    def move(self, src: int, dst: int, nbytes: int) -> None:
        """Copy a frame's first bytes."""


class Copies(Protocol):
    """What carries out jobs, on the copy threads."""

    def do(self, job: Job) -> None:
        """Copy a job's pages. What is wrong with them goes into the job; an exception fails it as a whole."""

    def follow(self, client: NodeClient | None) -> None:
        """Slots are from now on those of this connection; None: there are none, and no job is under way."""


class Copier:
    """The copy threads. Jobs come from the step loop; `done` is called on a copy thread with each finished job.

    The number of jobs is bounded by the frames of L1: each job's pages have a copy started in the page table.
    """

    def __init__(self, copies: Copies, threads: int, done: Callable[[Job], None]) -> None:
        self._copies = copies
        self._done = done
        self._loads: deque[LoadJob] = deque()
        self._saves: deque[SaveJob | PeerSaveJob] = deque()
        # Guards the queues and the two fields below: the step loop adds jobs, the copy threads take them.
        self._changed = threading.Condition()
        self._closed = False
        self._unfinished = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"page-copy-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        """Copies that can run at once."""
        return len(self._threads)

    def put(self, jobs: list[Job]) -> None:
        """Queue jobs."""
        with self._changed:
            for job in jobs:
                if isinstance(job, LoadJob):
                    self._loads.append(job)
                else:
                    self._saves.append(job)
            self._unfinished += len(jobs)
            self._changed.notify(len(jobs))

    def wait_idle(self) -> None:
        """Until no thread touches a slot: jobs are few and short, and none waits for anything."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)

    def close(self) -> None:
        """Finish what is queued, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._copies.do(job)
            except Exception as error:  # whatever it is, the step loop must hear that the job is over
                log.exception("a page copy failed")
                if isinstance(job, LoadJob):
                    job.bad = {page.ref: f"copy failed: {error}" for page in job.pages}
                else:
                    job.error = str(error)
            for page in job.pages:
                if isinstance(page, LoadPage | SavePage):
                    page.slot.release()  # the slab can't be unmapped under a view
            self._done(job)
            with self._changed:
                self._unfinished -= 1
                if not self._unfinished:
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            while not (self._loads or self._saves or self._closed):
                self._changed.wait()
            if self._loads:
                return self._loads.popleft()
            return self._saves.popleft() if self._saves else None


class PageCopies:
    """Copies of whole pages between an arena and slots or peers' frames."""

    def __init__(self, arena: Arena, checks: PageChecks) -> None:
        """`checks` are the arena's."""
        self._arena = arena
        self._checks = checks

    def follow(self, client: NodeClient | None) -> None:
        """See Copies: jobs bring their slots along."""

    def do(self, job: Job) -> None:
        """See Copies."""
        if isinstance(job, LoadJob):
            self._load(job)
        elif isinstance(job, SaveJob):
            self._save(job)
        else:
            self._save_to_peers(job)

    def _load(self, job: LoadJob) -> None:
        start = time.perf_counter()
        of_peers: list[PeerLoad] = []
        for page in job.pages:
            if isinstance(page, PeerLoad):
                of_peers.append(page)
                continue
            payload = page.slot[HEADER_BYTES : HEADER_BYTES + page.spec.nbytes]
            try:
                verify(page, payload)
            except PageCorrupt as error:
                job.bad[page.ref] = str(error)
                continue
            self._arena.copy_in(page.frame, payload)
        for pages in self._parts(of_peers):
            self._load_from_peers(pages, job.bad)
        job.seconds = time.perf_counter() - start

    def _load_from_peers(self, pages: list[PeerLoad], bad: dict[PageRef, str]) -> None:
        """Checked where they arrive: a frame whose lender is gone may change under the copy."""
        for page in pages:
            self._arena.copy_from_peer(page.frame, page.peer, page.grant.offset, page.spec.nbytes)
        found = self._checks.take([FramePage(page.frame, page.key, page.spec) for page in pages])
        for page, check in zip(pages, found, strict=True):
            if check != page.check:
                bad[page.ref] = f"page {page.key.hex()[:16]} in a peer's frame isn't what was put there"
            elif self._checks.are_checksums:
                page.checksum = check

    def _save_to_peers(self, job: PeerSaveJob) -> None:
        for pages in self._parts(job.pages):
            for page in pages:
                self._arena.copy_to_peer(page.frame, page.peer, page.grant.offset, page.spec.nbytes)
                page.check = page.checksum if self._checks.are_checksums else b""
            unknown = [page for page in pages if not page.check]
            taken = self._checks.take([FramePage(p.frame, p.record.key, p.spec) for p in unknown])
            for page, check in zip(unknown, taken, strict=True):
                page.check = check

    def _parts(self, pages: list[Peer]) -> Iterator[list[Peer]]:
        size = self._checks.at_once
        return (pages[at : at + size] for at in range(0, len(pages), size))

    def _save(self, job: SaveJob) -> None:
        for page in job.pages:
            spec = page.spec
            payload = page.slot[HEADER_BYTES : HEADER_BYTES + spec.nbytes]
            if page.tokens < spec.page_tokens:
                self._arena.zero_tail(page.frame, page.tokens, spec)
            self._arena.copy_out(page.frame, payload)
            if not page.checksum:
                page.checksum = page_checksum(page.key, spec.format.value, spec.digest, payload)
            write_envelope(page)


def write_envelope(page: SavePage) -> None:
    """Say at the head of its slot what page it is; its payload is written, its checksum taken."""
    spec = page.spec
    envelope = Envelope(
        key=page.key,
        variant=spec.format.value,
        spec_digest=spec.digest,
        payload_bytes=spec.nbytes,
        checksum=page.checksum,
        root=page.root,
        parent=page.parent,
        tenant=page.tenant,
        depth=page.depth,
        tokens=page.tokens,
        made_from=page.made_from,
    ).pack()
    page.slot[: len(envelope)] = envelope


def verify(page: LoadPage, payload: memoryview) -> None:
    """Raise PageCorrupt unless the slot holds the page that it should; fills in what only the envelope tells."""
    envelope = Envelope.unpack(page.slot[:PACKED_ENVELOPE_BYTES])
    variant = page.spec.format.value
    if (
        envelope.key != page.key
        or envelope.variant != variant
        or envelope.spec_digest != page.spec.digest
        or envelope.tokens != page.tokens
        or envelope.checksum != page.checksum
    ):
        raise PageCorrupt(
            f"slot holds page {envelope.key.hex()[:16]} ({envelope.variant}, {envelope.tokens} tokens), "
            f"{page.key.hex()[:16]} ({variant}, {page.tokens} tokens) expected"
        )
    envelope.verify(payload)
    page.made_from = envelope.made_from
