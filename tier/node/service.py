"""The cache of one node, running: glues the socket, the coordinator, the mover and the tiers together.

One thread, the loop, owns the coordinator and the socket; it blocks while nothing happens. All else reaches it through
its inbox. Performs no decision that the coordinator could take.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

import errno
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.executor.mover import Mover, load_roots, load_stored_before
from kvtier.tier.node.recording import NODE, about
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.clear_epochs import Clears, Tenant
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.policy.plugins import load_policies
from kvtier.tier.protocol.events import (
    Answer,
    BeginClear,
    CatchUp,
    Clear,
    ClearPages,
    ClearsKnown,
    Command,
    CommitCatalogue,
    Continue,
    Disconnect,
    Drain,
    Event,
    Evict,
    ForgetTenant,
    HintWrong,
    HoldsChanged,
    MarkClear,
    Note,
    NoteClears,
    PageId,
    Pin,
    Quiesce,
    ReadPage,
    SaveRoots,
    SaveStored,
    Send,
    Unpin,
    Verify,
    VerifyPage,
    WipeSlots,
    WritePage,
)
from kvtier.tier.protocol.ipc import NodeServer
from kvtier.tier.protocol.key_query import HeldKeys, keys_with
from kvtier.tier.protocol.messages import WriteMode
from kvtier.tier.record.format import RecordingError
from kvtier.tier.record.writer import DEFAULT_BYTES, Recorder, RecordingStatus
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import CatalogueEntry, Outcome, PageInfo, Uncleared
from kvtier.tier.stores.host import HostTier
from kvtier.tier.stores.host_slots import host_slots
from kvtier.tier.stores.ssd.clear_file import ClearFile
from kvtier.tier.stores.ssd.store import SsdTier, open_ssd

log = logging.getLogger(__name__)

MIN_SLOTS = 2  # one to come up, one to go down; with less L3 is off
STAGING_SLOTS = 8  # of an L3 that is there only because L4 is reached through it
MAX_NOTES = 256
CALL_TIMEOUT_S = 60.0
LIST_STEP = 1024  # pages that are looked at, or that a verb is for, in one go: 40 ms of the loop at most
CLEAR_PASSES = 2  # of parts, before all that is left is cleared at once
CLEAR_AGAIN_S = 5.0  # until what a disk refused of a clear is tried again

T = TypeVar("T")
Item = TypeVar("Item")
Results = tuple[tuple[bytes, Outcome], ...]


class ServiceStopped(RuntimeError):
    """The service doesn't run: not started, stopped, or failed; the message says which."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Something another thread has the loop do; `fail` tells its caller that it won't be. Some only look."""

    do: Callable[[], None]
    fail: Callable[[BaseException], None]
    only_looks: bool = False


@dataclass(frozen=True, slots=True)
class _Ticket:
    future: Future[Results]
    durable: bool  # answered when its writes are on the disk


class CacheService:
    """A node's L3 and L4, served to its workers over `socket_path`. Its methods may be called from any thread.

    `payload_bytes` is the size of the largest pages, `min_payload_bytes` that of the smallest (None: all are alike).
    `l4_bytes` 0 turns L4 off; it takes pages of the variants in `l4_variants` (None: of all). Without `needs_l4` a disk
    that refuses turns it off too, with a note, and what lies there stays as it is. `l3_bytes` with room for
    fewer than two pages turns L3 off, or, where L4 is on, makes it STAGING_SLOTS pages: what L4 is reached through.
    `policy` says which pages leave; with `write="demote"` they go down to L4 only when their turn comes. `shares` are by
    tenant digest, over 0 to 1: the most of each tier that a tenant's pages take. `on_holds` is told, on the loop's
    thread, which pages come to and leave each tier after the start (`holds` has those of before), and `on_wrong` which
    page another node turned out not to have; neither may block. `on_failed` is called, on that thread, when a fault has
    ended the service and all is closed. With `awaits_clears` nothing is looked up here until `know`:
    the node may have been away while a tenant was cleared.
    Pages of L4 are found again after `start` has returned, a part at a time (22 us each); workers are heard when all are.
    Starting raises ValueError for sizes or paths that can't be, and OSError when the L4 folder or the socket can't be
    opened; a damaged L4 is healed and noted.
    """

    def __init__(
        self,
        node_id: str,
        socket_path: str | Path,
        payload_bytes: int,
        l3_bytes: int,
        l4_path: str | Path,
        l4_bytes: int,
        l4_store: Literal["slab", "lmdb"] = "slab",
        *,
        min_payload_bytes: int | None = None,
        l4_variants: frozenset[str] | None = None,
        needs_l4: bool = True,
        policy: PolicySettings = PolicySettings(),  # noqa: B008  frozen
        write: WriteMode = "through",
        shares: Mapping[bytes, float] | None = None,
        on_holds: Callable[[HoldsChanged], None] | None = None,
        on_wrong: Callable[[HintWrong], None] | None = None,
        on_failed: Callable[[], None] | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
        awaits_clears: bool = False,
    ) -> None:
        load_policies()
        self.node_id = node_id
        self.incarnation = uuid.uuid4().hex
        self._socket_path = Path(socket_path)
        self._payload_bytes = payload_bytes
        self._min_payload_bytes = payload_bytes if min_payload_bytes is None else min_payload_bytes
        self._l4_variants, self._needs_l4 = l4_variants, needs_l4
        self._l4_refused: tuple[str, str] | None = (
            None  # the error's name, and why it is off where it should be on
        )
        self._policy, self._write_mode, self._shares = policy, write, dict(shares or {})
        self._on_holds, self._on_wrong, self._limits = on_holds, on_wrong, limits
        self._on_failed = on_failed
        self._l3_bytes, self._l4_path, self._l4_bytes = l3_bytes, Path(l4_path), l4_bytes
        self._l4_store: Literal["slab", "lmdb"] = l4_store
        self._inbox: deque[Event | Note | _Call] = deque()
        # Guards the life of the loop against callers: a call is taken only while the loop will still answer it.
        self._lock = threading.Lock()
        self._state = "not started"
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self._drain_until: float | None = None
        self._is_quiescing = False
        self._awaits_clears = awaits_clears
        self._left: tuple[Uncleared, ...] = ()  # of clears, as of the latest barrier
        self._clear_again_at: float | None = None
        self._host: HostTier | None = None
        self._ssd: SsdTier | None = None
        self._mover: Mover | None = None
        self._server: NodeServer | None = None
        self._recorder: Recorder | None = None  # of the latest recording, over or not
        self._coordinator: Coordinator
        self._recovery: Iterator[None] = iter(())
        self._is_recovered = False
        self._thread: threading.Thread

    def start(self) -> None:
        """Open the tiers and serve. When it raises, nothing is left open."""
        assert self._state == "not started"
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        self._state = "running"
        self._thread = threading.Thread(target=self._run, name="cache-loop", daemon=True)
        self._thread.start()

    def stop(self, drain_s: float = 30.0) -> None:
        """Write pages that only L3 holds to L4, for at most `drain_s`, and close everything. Idempotent."""
        with self._lock:
            if self._state == "running":
                self._append(_Call(lambda: self._begin_drain(drain_s), lambda error: None))
                self._state = "stopped"
        if self._state != "not started":
            self._thread.join()

    # ---- admin -------------------------------------------------------------------------------------------------

    def health(self) -> str | None:
        """None when all is well, else what isn't, in one line."""
        return None if self._state == "running" else f"the cache of node {self.node_id} is {self._state}"

    def stats(self) -> Snapshot:
        """The counters of L3 and L4."""
        return self._ask(self._snapshot)

    def pages(
        self, tenant: str | bytes | None = None, tier: TierName | None = None, limit: int = 1000
    ) -> list[PageInfo]:
        """Copies of a tenant's pages in a tier (None: in L3 and L4), at most `limit`.

        A tenant is named, or given by its digest where its name isn't known; None is all. The loop is asked for a few
        pages at a time, so that it never stops for long: what moves meanwhile is listed where it is seen first.
        """
        digest = tenant_digest(tenant) if isinstance(tenant, str) else tenant
        found: list[PageInfo] = []
        for most in (LIST_STEP, None):  # most listings end soon: only others have all ids copied
            ids, found = self._ask(partial(self._page_ids, most)), []
            for start in range(0, len(ids), LIST_STEP):
                among = ids[start : start + LIST_STEP]
                found += self._ask(partial(self._pages_among, digest, tier, limit - len(found), among))
                if len(found) >= limit:
                    return found
            if most is not None and len(ids) < most:
                break
        return found

    def pages_of(self, keys: Iterable[bytes]) -> list[PageInfo]:
        """All copies of the pages of these keys."""
        wanted = tuple(keys)
        return self._ask(lambda: self._coordinator.admin.pages_of(wanted, time.monotonic()))

    def held(self, keys: Sequence[bytes]) -> list[HeldKeys]:
        """Of which of these keys a whole copy is here, by tier and variant."""
        wanted = list(keys)
        return self._ask(lambda: self._coordinator.admin.held(wanted))

    def keys_with(self, heads: Sequence[str], limit: int) -> list[list[bytes]]:
        """For each head, hex digits in lower case, at most `limit` keys of pages here that begin with it.

        The loop only copies the ids (page_ids); looking through them is the calling thread's work, 0.2 s a million.
        """
        ids = self._ask(partial(self._page_ids, None))
        return keys_with([key for key, _ in ids], heads, limit)

    def _snapshot(self) -> Snapshot:
        """The coordinator's, and what it never heard of: its socket lets no message through that can't be."""
        assert self._server is not None
        snapshot = self._coordinator.snapshot()
        snapshot.bad_messages += self._server.bad_messages
        return snapshot

    def _page_ids(self, most: int | None) -> list[PageId]:
        return self._coordinator.admin.page_ids(most)

    def _pages_among(
        self, tenant: bytes | None, tier: TierName | None, limit: int, among: Sequence[PageId]
    ) -> list[PageInfo]:
        return self._coordinator.admin.pages(tenant, tier, limit, time.monotonic(), among)

    def holds(self) -> dict[TierName, list[bytes]]:
        """Keys of the pages that each tier holds, those aside that were made from others in another format.

        In parts: of each page it is true at some moment of the call, and `on_holds` tells what changes after that moment.
        """
        held: dict[TierName, list[bytes]] = {
            tier: [] for tier in (TierName.PEER, TierName.HOST, TierName.SSD)
        }
        for part in self._in_parts(
            self._ask(partial(self._page_ids, None), only_looks=False),  # all that was recovered
            lambda ids: [self._ask(partial(self._coordinator.admin.holds, ids))],
        ):
            for tier, keys in part.items():
                held[tier].extend(keys)
        return held

    def pin(self, keys: Iterable[bytes]) -> list[tuple[bytes, Outcome]]:
        """Keep pages from being evicted until `unpin`, or the node's restart. REJECTED past the bound."""
        return self._in_parts(keys, lambda part: self._verb(lambda ticket: Pin(ticket, part)))

    def unpin(self, keys: Iterable[bytes]) -> list[tuple[bytes, Outcome]]:
        """End `pin`."""
        return self._in_parts(keys, lambda part: self._verb(lambda ticket: Unpin(ticket, part)))

    def evict(
        self, keys: Iterable[bytes] | None, tier: TierName | None = None
    ) -> list[tuple[bytes, Outcome]]:
        """Drop pages (None: all there are) from a tier, or (None) from all of the node's."""
        if keys is None:
            return [one for one in self.evict(self._keys(), tier) if one[1] is not Outcome.MISSING]
        return self._in_parts(keys, lambda part: self._verb(lambda ticket: Evict(ticket, part, tier)))

    def clear(self, tenant: str | bytes | None = None, number: int = 0) -> list[tuple[bytes, Outcome]]:
        """Drop and wipe all pages of a tenant, as in `pages`. On the disk when it returns, DEFERRED ones aside: those are
        read yet, or the disk refused, and `uncleared` says what; then it is tried again until it works.

        Most go in parts; what those drop a rebuild of the catalogue may still find, so until this returns nothing is sure
        to be gone. The last step ends that, and takes all that is left at that moment: what is stored meanwhile is cleared
        too, and a page that comes back in between is listed twice. What is stored later stays. That a clear has begun is on
        the disk first: one that is cut short is finished by the next start, before it serves. `number` is the clear's
        epoch (tier/pages/clear_epochs.py); 0: it has none, and workers' saves under way aren't told from later ones.
        """
        digest = tenant_digest(tenant) if isinstance(tenant, str) else tenant
        outcomes: list[tuple[bytes, Outcome]] = []
        self._clear_step(lambda ticket: BeginClear(ticket, digest, number))
        for _ in range(CLEAR_PASSES):
            # Each part is on the disk before the next, so that wipes of a large tier don't queue up.
            outcomes += self._in_parts(
                self._ids_of(digest),
                lambda part: self._clear_step(lambda ticket: ClearPages(ticket, part)),
            )
        outcomes += self._clear_step(lambda ticket: Clear(ticket, digest, number))
        if not self._left:
            return outcomes
        deferred = {Outcome.ACCEPTED: Outcome.DEFERRED}
        return [(key, deferred.get(outcome, outcome)) for key, outcome in outcomes]

    def _clear_step(self, make: Callable[[int], Event]) -> list[tuple[bytes, Outcome]]:
        return self._verb(make, durable=True)

    def uncleared(self) -> list[Uncleared]:
        """What clears could not do yet, as of the latest try."""
        if self._l4_refused is None:
            return list(self._left)
        error, why = self._l4_refused
        detail = f"L4 is off, since {why}: its pages are cleared when the disk can be written and the node has restarted"
        return [Uncleared(TierName.SSD, error, detail)]

    def clears(self) -> list[tuple[bytes, int]]:
        """The clear epochs that what is here has been cleared by, as clears.Clears has them."""
        return self._ask(lambda: self._coordinator.admin.clears())

    def know(self, told: Sequence[tuple[bytes, int]]) -> None:
        """Apply the clears that are told and were missed here; from then on what is here may be looked up."""
        if self._awaits_clears:  # else what is on its way here may be of a tenant that has no pages yet
            missed = Clears(self.clears()).behind(told)
            self._ask(lambda: self._handle(NoteClears(tuple(missed))), only_looks=False)
            self._awaits_clears = False
        for tenant, number in Clears(self.clears()).behind(told):
            self.clear(tenant, number)
        self._ask(lambda: self._handle(ClearsKnown()), only_looks=False)

    def _ids_of(self, tenant: bytes | None) -> list[PageId]:
        ids = self._ask(partial(self._page_ids, None), only_looks=False)
        if tenant is None:
            return ids
        return self._in_parts(
            ids, lambda part: self._ask(lambda: self._coordinator.admin.ids_of(tenant, part))
        )

    def verify(
        self, keys: Iterable[bytes] | None = None, timeout_s: float | None = None
    ) -> list[tuple[bytes, Outcome]]:
        """Check every copy of these pages (None: of all): ACCEPTED whole, CLIPPED one copy was bad and is dropped,
        MISSING none is left. Raises TimeoutError when some LIST_STEP of them take longer than `timeout_s`."""
        return self._in_parts(
            self._keys() if keys is None else keys,
            lambda part: self._verb(lambda ticket: Verify(ticket, part), timeout_s=timeout_s),
        )

    def _keys(self) -> Iterable[bytes]:
        """The keys of all pages that are here, each once."""
        return dict.fromkeys(key for key, _ in self._ask(partial(self._page_ids, None), only_looks=False))

    def _in_parts(self, items: Iterable[Item], do: Callable[[tuple[Item, ...]], list[T]]) -> list[T]:
        """Have the loop do something to few items at a time, so that it never stops for long; all that it found."""
        wanted, found = tuple(items), list[T]()
        for start in range(0, len(wanted), LIST_STEP):
            found += do(wanted[start : start + LIST_STEP])
        return found

    def idle(self) -> bool:
        """Nothing is in flight, and nothing is leased (pins and workers' stocks aside)."""
        return self._ask(lambda: self._is_recovered and self._coordinator.is_idle)

    def check(self) -> None:
        """Re-derive every counter; AssertionError says what doesn't hold."""
        self._ask(self._check, only_looks=False)

    def notes(self) -> list[str]:
        """The latest one-line notices, such as a healed catalogue; the latest last."""
        return list(self._notes)

    # ---- recording -----------------------------------------------------------------------------------------------

    def record(self, path: str | Path, max_bytes: int = DEFAULT_BYTES) -> RecordingStatus:
        """Write all that the coordinator hears from now on into a new file, of at most `max_bytes`.

        Raises RecordingError. See Recorder for how it ends.
        """
        recorder = Recorder(NODE, self.node_id, Path(path), max_bytes, lambda note: self._post([Note(note)]))
        try:
            self._ask(lambda: self._begin_recording(recorder), only_looks=False)
            recorder.wait_begun()
        except BaseException:
            recorder.discard("it did not begin")
            raise
        return recorder.status()

    def stop_recording(self) -> RecordingStatus | None:
        """End the recording; how the latest one went, None when there was none."""
        recorder = self._ask(self._end_recording, only_looks=False)
        if recorder is None:
            return None
        recorder.close("it was stopped")
        return recorder.status()

    def recording(self) -> RecordingStatus | None:
        """How the latest recording goes or went."""
        recorder = self._recorder
        return None if recorder is None else recorder.status()

    def _begin_recording(self, recorder: Recorder) -> None:
        running = self._recorder
        if running is not None and not running.is_over:
            raise RecordingError(f"node {self.node_id} records into {running.path} already: stop that first")
        recorder.begin(self._coordinator, self.incarnation, about(self._coordinator))
        self._recorder = recorder

    def _end_recording(self) -> Recorder | None:
        if self._recorder is not None:
            self._recorder.end("it was stopped", self._coordinator.snapshot())
        return self._recorder

    # ---- calls from other threads ------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], T], *, only_looks: bool = True) -> T:
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question())
            except (AssertionError, RecordingError) as error:  # of `check`: the asker's to handle
                future.set_exception(error)

        self._put(_Call(answer, future.set_exception, only_looks))
        return future.result(CALL_TIMEOUT_S)

    def _verb(
        self, make: Callable[[int], Event], *, durable: bool = False, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> list[tuple[bytes, Outcome]]:
        future: Future[Results] = Future()

        def ask() -> None:
            self._last_ticket += 1
            ticket = self._last_ticket
            self._tickets[ticket] = _Ticket(future, durable)
            future.add_done_callback(lambda _: self._tickets.pop(ticket, None))
            self._handle(make(ticket))

        self._put(_Call(ask, future.set_exception))
        return list(future.result(timeout_s))

    def _put(self, call: _Call) -> None:
        with self._lock:
            if self._state != "running":
                raise ServiceStopped(f"the cache of node {self.node_id} is {self._state}")
            self._append(call)

    def _append(self, *items: Event | Note | _Call) -> None:
        """From any thread; those of the mover end before the server is closed."""
        self._inbox.extend(items)
        if self._server is not None:
            self._server.wake()

    def _post(self, events: Sequence[Event | Note]) -> None:
        self._append(*events)

    def _part_died(self, part: str, error: BaseException) -> None:
        """A thread that the node can't do without has ended: so does the node, at once, and its supervisor starts another."""

        def end() -> None:
            raise RuntimeError(f"{part} ended") from error

        self._append(_Call(end, lambda _: None))

    # ---- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._server is not None
        try:
            self._recover()
            while not self._is_over():
                for event in self._server.poll(self._poll_timeout_s()):
                    self._handle(event)
                while self._inbox:
                    self._take_inbox(self._server)
                if self._coordinator.has_more:
                    self._handle(Continue())
                while self._server.notes:
                    self._note(self._server.notes.popleft())
                self._settle_clears()
        except BaseException as error:
            cause = f", by {error.__cause__!r}" if error.__cause__ is not None else ""
            self._note(f"the cache of node {self.node_id} fails: {error!r}{cause}")
            log.exception("what the cache of node %s fails by", self.node_id)
            raise
        finally:
            self._end()
            if self._state == "failed" and self._on_failed is not None:
                self._on_failed()

    def _recover(self) -> None:
        """L4's pages are found again before the first worker is heard; questions are answered in between."""
        for _ in self._recovery:
            self._answer_those_that_look()
            if self._state != "running":
                return
        self._is_recovered = True

    def _take_inbox(self, server: NodeServer) -> None:
        # What a worker sent before an admin call was made is heard before the call: nothing is stored behind a clear.
        waiting = tuple(self._inbox)  # in one piece: other threads go on appending
        if any(isinstance(item, _Call) for item in waiting):
            for event in server.poll(0):
                self._handle(event)
        for _ in waiting:
            item = self._inbox.popleft()
            if isinstance(item, Note):
                self._note(item.text)
            elif isinstance(item, _Call):
                self._call(item)
            else:
                self._handle(item)

    def _answer_those_that_look(self) -> None:
        """Questions are answered while L4 is recovered, so that the node is known to live; all else waits."""
        waiting: list[Event | Note | _Call] = []
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, _Call) and item.only_looks:
                try:
                    item.do()
                except BaseException as error:  # noqa: BLE001  raised again when all is recovered
                    item.fail(error)
                    self._part_died("an answer", error)
            else:
                waiting.append(item)
        self._inbox.extendleft(reversed(waiting))

    def _call(self, call: _Call) -> None:
        try:
            call.do()
        except BaseException as error:
            call.fail(error)
            raise

    def _handle(self, event: Event) -> None:
        now, recorder = time.monotonic(), self._recorder
        try:
            commands = self._coordinator.handle(event, now)
        except BaseException as error:
            if recorder is not None:
                recorder.broke(event, now, error)
            raise
        if recorder is not None:
            recorder.heard(event, now, commands, self._coordinator.snapshot)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Send():
                assert self._server is not None
                self._server.send(command.worker, command.message)
            case Disconnect():
                assert self._server is not None
                self._server.disconnect(command.worker, command.reason)
            case ReadPage() | WritePage() | CommitCatalogue() | WipeSlots() | MarkClear() | VerifyPage():
                assert self._mover is not None
                self._mover.submit(command)
            case ForgetTenant():
                assert self._mover is not None
                self._mover.submit(command)
                self._try_clears_again()  # where nothing waits for a barrier behind it
            case CatchUp():
                threading.Thread(
                    target=self._catch_up,
                    args=(command.tenant, command.number),
                    name="clear-catch-up",
                    daemon=True,
                ).start()
            case SaveRoots() | SaveStored():
                if self._mover is not None:
                    self._mover.submit(command)
            case Answer():
                self._answer(self._tickets[command.ticket], command.results)
            case HoldsChanged():
                if self._on_holds is not None:
                    self._on_holds(command)
            case HintWrong():
                if self._on_wrong is not None:
                    self._on_wrong(command)
            case Note():
                self._note(command.text)

    def _catch_up(self, tenant: bytes, number: int) -> None:
        """On a thread of its own, as a caller of `clear`; one for each number that a worker brings."""
        while True:
            try:
                self.clear(tenant, number)
                return
            except TimeoutError:  # the disk is slow: nothing of the tenant's is looked up until it is done
                log.warning("a clear that this node missed takes long, and goes on")
            except ServiceStopped:
                return  # the next start finishes it

    def _answer(self, ticket: _Ticket, results: Results) -> None:
        if not ticket.durable or self._mover is None:
            ticket.future.set_result(results)
            return

        def done(left: tuple[Uncleared, ...]) -> None:
            self._are_left(left)
            ticket.future.set_result(results)

        self._mover.barrier(done)

    def _are_left(self, left: tuple[Uncleared, ...]) -> None:
        """On the writer's thread, behind a barrier: what clears could not do. It is tried again until it works."""
        was_left, self._left = self._left, left
        if left:
            self._append(_Call(self._try_clears_again, lambda error: None))
        elif was_left:
            self._append(Note("what a disk refused of a clear is done now"))

    def _try_clears_again(self) -> None:
        if self._clear_again_at is None:
            self._clear_again_at = time.monotonic() + CLEAR_AGAIN_S

    def _settle_clears(self) -> None:
        if self._clear_again_at is not None and time.monotonic() >= self._clear_again_at:
            self._clear_again_at = None
            assert self._mover is not None
            self._mover.barrier(self._are_left)

    def _note(self, text: str) -> None:
        self._notes.append(text)
        log.warning("%s", text)

    def _check(self) -> None:
        self._coordinator.check()
        if self._ssd is not None:
            self._ssd.allocator.check()

    def _begin_drain(self, drain_s: float) -> None:
        self._drain_until = time.monotonic() + drain_s
        self._handle(Drain())

    def _is_over(self) -> bool:
        """Drained, or out of time for it; either way no write is left in the middle."""
        if self._drain_until is not None and (
            self._coordinator.is_written or time.monotonic() >= self._drain_until
        ):
            self._drain_until = None
            self._is_quiescing = True
            self._handle(Quiesce())
        return self._is_quiescing and self._coordinator.is_written

    def _poll_timeout_s(self) -> float | None:
        if self._coordinator.has_more:
            return 0.0
        times = [at for at in (self._drain_until, self._clear_again_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    # ---- opening and closing -----------------------------------------------------------------------------------

    def _open(self) -> None:
        size = slot_bytes(self._payload_bytes)
        l3_bytes = self._l3_bytes
        if l3_bytes < MIN_SLOTS * size:
            too_small = f"{l3_bytes} bytes hold fewer than {MIN_SLOTS} pages of {size}"
            if self._l4_bytes:
                l3_bytes = STAGING_SLOTS * size
                self._note(f"L3 is {STAGING_SLOTS} pages, to reach L4 through: {too_small}")
            elif l3_bytes:
                self._note(f"L3 is off: {too_small}")
        slots = host_slots(l3_bytes, size)
        known, recovered = Clears(), list[CatalogueEntry]()
        if slots.capacity_bytes:
            self._host = HostTier(slots.capacity_bytes)
        if self._l4_bytes and self._host is not None:
            self._ssd = self._open_l4(size)
        if self._ssd is not None and self._host is not None:
            for note in self._ssd.notes:
                self._note(note)
            clears = ClearFile.load(self._l4_path)
            if clears.note:
                self._note(clears.note)
            self._mover = Mover(self._host, self._ssd, self._l4_path, self._post, self._part_died, clears)
            known, recovered = clears.clears.copy(), self._finish_clears(clears.unfinished)
            self._ssd.watch(lambda text: self._post([Note(text)]))
        now = time.monotonic()
        self._coordinator = Coordinator(
            node_id=self.node_id,
            incarnation=self.incarnation,
            host=slots,
            ssd=None if self._ssd is None else self._ssd.allocator,
            ssd_variants=self._l4_variants,
            lost=() if self._ssd is None else self._ssd.lost,
            roots=() if self._ssd is None else load_roots(self._l4_path),
            stored_before=None if self._ssd is None else load_stored_before(self._l4_path),
            wall_offset_s=time.time() - now,
            now=now,
            policy=self._policy,
            write=self._write_mode,
            shares=self._shares,
            page_bytes=self._payload_bytes,
            directory=self._on_holds is not None,
            limits=self._limits,
            clears=known,
            awaits_clears=self._awaits_clears,
        )
        self._recovery = self._coordinator.recover(recovered)
        if self._ssd is not None:
            self._ssd.lost = []  # told; it could be long
        self._server = NodeServer(self._socket_path, None if self._host is None else self._host.fd)

    def _finish_clears(self, unfinished: Iterable[Tenant]) -> list[CatalogueEntry]:
        """Clears that an earlier life of the node began and did not finish are done; the pages that they leave."""
        assert self._ssd is not None and self._mover is not None
        whose = set(unfinished)
        if not whose:
            return self._ssd.recovered
        cleared, left = list[CatalogueEntry](), list[CatalogueEntry]()
        for entry in self._ssd.recovered:
            (cleared if None in whose or entry.envelope.tenant in whose else left).append(entry)
        for entry in cleared:
            self._ssd.allocator.free(entry.place)
        self._mover.submit(CommitCatalogue((), tuple((e.envelope.key, e.envelope.variant) for e in cleared)))
        self._mover.submit(WipeSlots(tuple(entry.place for entry in cleared)))
        for tenant in whose:
            self._mover.submit(ForgetTenant(tenant))
        self._mover.barrier(self._are_left)
        self._note(f"L4 at {self._l4_path}: a clear was cut short, and is finished: {len(cleared)} pages")
        return left

    def _open_l4(self, size: int) -> SsdTier | None:
        """None, and a note, for a disk that refuses where the node can do without. OSError names a file or the folder."""
        smallest = slot_bytes(self._min_payload_bytes)
        try:
            return open_ssd(self._l4_path, self._l4_bytes, self._l4_store, size, min_slot_bytes=smallest)
        except OSError as error:
            why = error.strerror or str(error)
            if self._needs_l4 or error.errno == errno.EBUSY:  # who has it open may be about to end
                raise OSError(error.errno, why, error.filename or str(self._l4_path)) from error
            refused = f"{self._l4_path} can't be used: {why}"
            self._l4_refused = errno.errorcode.get(error.errno or 0, ""), refused
            self._note(
                f"L4 is off: {refused}; its pages are neither found nor cleared until the disk can be written"
                " and the node restarts"
            )
            return None

    def _end(self) -> None:
        """The loop is over: no call is taken from here on, and those not answered are told."""
        with self._lock:
            if self._state == "running":
                self._state = "failed"
        self._close()
        stopped = ServiceStopped(f"the cache of node {self.node_id} is {self._state}")
        for ticket in list(self._tickets.values()):
            ticket.future.set_exception(stopped)
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Call):
                item.fail(stopped)

    def _close(self) -> None:
        """The mover and the recorder first: they post to the server's wake, and the mover uses the tiers."""
        if self._recorder is not None:
            self._recorder.close("the node stopped")
        if self._mover is not None:
            self._mover.close()
        if self._server is not None:
            self._server.close()
        if self._ssd is not None:
            self._ssd.close()
        if self._host is not None:
            self._host.close()
