"""A world for the coordinator to act in: workers, slots and a disk as plain dicts, which distrust every command.

It carries commands out when told to, keeps what each slot truly holds, and asserts that no command or message lets two
parties use one slot, reads what isn't there, or offers a worker another page than the one it asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from kvtier.tier.base import CatalogueEntry, Outcome, Place, SegmentAllocator
from kvtier.tier.coordinator import Coordinator
from kvtier.tier.events import (
    Answer,
    Command,
    CommitCatalogue,
    Disconnect,
    Event,
    Failure,
    ForgetTenant,
    FromWorker,
    Note,
    PageId,
    ReadDone,
    ReadFailed,
    ReadPage,
    SaveRoots,
    SaveStored,
    Send,
    StoredBefore,
    Verified,
    VerifyPage,
    WipeSlots,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.messages import (
    Copied,
    Grant,
    Granted,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Refused,
    Release,
    Stored,
    StoredPage,
    ToNode,
    ToWorker,
    WantSlots,
    Welcome,
)
from kvtier.tier.page import Envelope, TierName, slot_bytes
from kvtier.tier.records import Limits

PAYLOAD_BYTES = 4096
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
FIELDS = {"weights": "w", "epoch": "0"}
ROOT = b"r" * 32
PAGE_TOKENS = 16


def digest(*parts: object, size: int = 32) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=size).digest()


def tenant_of(name: str) -> bytes:
    return digest("tenant", name, size=16)


def key_of(tenant: str, path: str) -> bytes:
    """A chain is a path such as "abba", a page one of its prefixes."""
    return digest("page", tenant, path)


def chain_keys(tenant: str, path: str) -> list[bytes]:
    return [key_of(tenant, path[: i + 1]) for i in range(len(path))]


@dataclass(eq=False)
class SimWorker:
    ref: WorkerRef
    grants: list[Grant] = field(default_factory=list)
    asked: dict[str, list[bytes]] = field(default_factory=dict)  # request -> keys of its latest Locate
    leases: dict[str, dict[int, HostPage]] = field(default_factory=dict)
    coming: dict[str, set[int]] = field(default_factory=dict)
    messages: list[ToWorker] = field(default_factory=list)


class World:
    def __init__(
        self,
        num_slots: int,
        ssd_slots: int,
        limits: Limits | None = None,
        recovered: list[CatalogueEntry] | None = None,
        disk: dict[Place, PageId] | None = None,
        segment_slots: int = 2,
        lost: list[CatalogueEntry] | None = None,
        roots: tuple[tuple[bytes, dict[str, str]], ...] = (),
        stored_before: StoredBefore | None = None,
    ) -> None:
        self.now = 100.0
        self.host: dict[int, PageId] = {}  # slot -> the page whose bytes lie in it
        self.bad: set[int] = set()  # slots of L3 whose page was found corrupt
        self.disk: dict[Place, PageId] = dict(disk or {})
        self.catalogue: dict[PageId, CatalogueEntry] = {}
        self.workers: dict[WorkerRef, SimWorker] = {}
        self.reads: deque[ReadPage] = deque()
        self.checks: deque[VerifyPage] = deque()
        self.writer: deque[WritePage | CommitCatalogue | WipeSlots | ForgetTenant] = deque()
        self.answers: dict[int, tuple[tuple[bytes, Outcome], ...]] = {}
        self.notes: list[str] = []
        self.saved_roots: tuple[tuple[bytes, dict[str, str]], ...] = ()
        self.saved_before = StoredBefore()
        self.ticket = 0
        allocator = (
            SegmentAllocator(ssd_slots * SLOT_BYTES, segment_slots * SLOT_BYTES) if ssd_slots else None
        )
        for entry in recovered or []:
            assert allocator is not None and allocator.take(entry.place, entry.slot_bytes)
            self.catalogue[entry.envelope.key, entry.envelope.variant] = entry
        self.node = Coordinator(
            node_id="n0",
            incarnation="i",
            payload_bytes=PAYLOAD_BYTES,
            num_slots=num_slots,
            ssd=allocator,
            recovered=recovered or [],
            lost=lost or [],
            roots=roots,
            stored_before=stored_before,
            wall_offset_s=1e9,
            now=self.now,
            limits=limits,
        )
        self.node.check()

    # ---- events into the coordinator ---------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for command in self.node.handle(event, self.now):
            self._obey(command)
        self.node.check()

    def say(self, worker: SimWorker, message: ToNode) -> list[ToWorker]:
        """A worker speaks; what it hears back at once."""
        worker.messages.clear()
        self.tell(FromWorker(worker.ref, message))
        return list(worker.messages)

    def connect(
        self, name: str = "w0", incarnation: str = "1", fields: dict[str, str] | None = None
    ) -> SimWorker:
        worker = SimWorker(WorkerRef(name, incarnation))
        self.workers[worker.ref] = worker
        hello = Hello(name, incarnation, b"s" * 16, PAYLOAD_BYTES, FIELDS if fields is None else fields)
        replies = self.say(worker, hello)
        assert [type(reply) for reply in replies] == [Welcome]
        return worker

    def die(self, worker: SimWorker) -> None:
        del self.workers[worker.ref]
        self.tell(WorkerGone(worker.ref))

    def want(self, worker: SimWorker, count: int) -> None:
        self.say(worker, WantSlots(count))

    def store(
        self,
        worker: SimWorker,
        tenant: str,
        path: str,
        *,
        first: int = 0,
        hold_for: str | None = None,
        content: bytes = b"",
        root: bytes = ROOT,
    ) -> int:
        """Store the pages of a chain from `first` on, as far as the worker's stock goes; how many."""
        pages = []
        for depth in range(first, len(path)):
            if not worker.grants:
                break
            grant = worker.grants.pop(0)
            key = key_of(tenant, path[: depth + 1])
            self.host[grant.slot] = (key, "bf16")
            parent = key_of(tenant, path[:depth]) if depth else root
            pages.append(
                StoredPage(
                    grant, key, "bf16", root, parent, tenant_of(tenant), depth, PAGE_TOKENS, checksum_of(key),
                    content if depth == 0 else b"",
                )
            )  # fmt: skip
        self.say(worker, Stored(pages, hold_for))
        return len(pages)

    def locate(
        self,
        worker: SimWorker,
        request: str,
        tenant: str,
        path: str,
        *,
        recompute_s: float = 0.0,
        content: bytes = b"",
        root: bytes = ROOT,
        first: int = 0,
    ) -> Located:
        keys = chain_keys(tenant, path)[first:]
        worker.asked[request] = keys
        worker.leases[request] = {}
        worker.coming[request] = set()
        heard = self.say(worker, Locate(request, root, tenant_of(tenant), keys, "bf16", recompute_s, content))
        (located,) = [m for m in heard if isinstance(m, Located)]
        return located

    def copied(
        self, worker: SimWorker, request: str, indexes: list[int], corrupt: list[int] | None = None
    ) -> None:
        for index in indexes:
            page = worker.leases[request].pop(index, None)
            if page is not None and index in (corrupt or []):
                self.bad.add(page.grant.slot)
        self.say(worker, Copied(request, indexes, len(indexes) * PAYLOAD_BYTES, 0.001, corrupt or []))

    def release(self, worker: SimWorker, request: str, from_index: int = 0) -> None:
        for table in (worker.leases.get(request, {}), worker.coming.get(request, set())):
            for index in [i for i in table if i >= from_index]:
                table.pop(index) if isinstance(table, dict) else table.discard(index)
        self.say(worker, Release(request, from_index))

    def ask(self, make: type, *args: object) -> int:
        self.ticket += 1
        self.tell(make(self.ticket, *args))
        return self.ticket

    # ---- the I/O, one piece at a time --------------------------------------------------------------------------

    def finish_read(self, failure: Failure | None = None, which: int = 0) -> None:
        self.reads.rotate(-(which % len(self.reads)))
        read = self.reads.popleft()
        self.now += 0.001
        found = self.disk.get(read.place)
        if failure is not None:
            self.host.pop(read.slot, None)
            self.tell(ReadFailed(read.transfer, failure, f"simulated {failure}"))
        elif found != (read.key, read.variant):
            self.host.pop(read.slot, None)
            self.tell(ReadFailed(read.transfer, "missing", "the slot holds another page"))
        else:
            self.host[read.slot] = found
            self.tell(ReadDone(read.transfer, self.catalogue_envelope(read)))

    def catalogue_envelope(self, read: ReadPage) -> Envelope:
        """The envelope as it lies in the slot; its record may be dropped already."""
        return Envelope(
            read.key, read.variant, b"s" * 16, PAYLOAD_BYTES, checksum_of(read.key), ROOT, ROOT, b"t" * 16, 0, PAGE_TOKENS
        )  # type: ignore[arg-type]  # fmt: skip

    def finish_write(self, failure: Failure | None = None) -> None:
        """The writer's next order, whatever it is."""
        order = self.writer.popleft()
        match order:
            case CommitCatalogue():
                for page in order.drops:
                    self.catalogue.pop(page, None)
                for entry in order.puts:
                    assert (entry.envelope.key, entry.envelope.variant) in self.catalogue, (
                        "uses of a dropped page"
                    )
                    self.catalogue[entry.envelope.key, entry.envelope.variant] = entry
            case WipeSlots():
                for place in order.places:
                    assert all(e.place != place for e in self.catalogue.values()), "a listed slot is wiped"
                    self.disk.pop(place, None)
            case ForgetTenant():
                pass
            case WritePage():
                place = order.entry.place
                page = (order.entry.envelope.key, order.entry.envelope.variant)
                assert all(e.place != place for e in self.catalogue.values()), "a listed slot is overwritten"
                assert all(read.place != place for read in self.reads), (
                    "a slot is overwritten while it is read"
                )
                assert self.host[order.slot] == page, "the slot to write from holds another page"
                if order.slot in self.bad:
                    failure = "corrupt"
                if failure is not None:
                    if failure == "corrupt":
                        self.bad.add(order.slot)
                    self.disk.pop(place, None)
                    self.tell(WriteFailed(order.transfer, failure, f"simulated {failure}"))
                else:
                    self.disk[place] = page
                    self.catalogue[page] = order.entry
                    self.tell(WriteDone(order.transfer))

    def finish_check(self, failure: Failure | None = None) -> None:
        check = self.checks.popleft()
        page = (check.envelope.key, check.envelope.variant)
        held = self.host.get(check.place.index) if check.tier is TierName.HOST else self.disk.get(check.place)
        assert held == page, "verification reads a slot that holds another page"
        if check.tier is TierName.HOST:
            if check.place.index in self.bad:
                failure = "corrupt"
            if failure is not None:
                self.bad.add(check.place.index)
        self.tell(Verified(check.transfer, failure, "simulated"))

    def finish_all(self) -> None:
        """All I/O, and all that it entails."""
        while self.reads or self.writer or self.checks:
            while self.writer:
                self.finish_write()
            while self.checks:
                self.finish_check()
            if self.reads:
                self.finish_read()

    def settle(self) -> None:
        """Workers copy what they get at once, as they promise; the I/O goes on: nobody is left waiting."""
        progress = True
        while progress:
            self.finish_all()
            progress = False
            for worker in list(self.workers.values()):
                for request in list(worker.leases):
                    if worker.leases[request]:
                        progress = True
                        self.copied(worker, request, list(worker.leases[request]))
        for worker in self.workers.values():
            assert not any(worker.coming.values()), "a load never came"

    # ---- commands ----------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        match command:
            case Send():
                worker = self.workers.get(command.worker)
                assert worker is not None, "a message to a worker that is gone"
                self._hear(worker, command.message)
            case Disconnect() | SaveRoots() | SaveStored() | Note():
                if isinstance(command, Note):
                    self.notes.append(command.text)
                if isinstance(command, SaveRoots):
                    self.saved_roots = command.roots
                if isinstance(command, SaveStored):
                    self.saved_before = command.before
            case ReadPage():
                self._assert_unused(command.slot)
                self.host.pop(command.slot, None)
                self.reads.append(command)
            case VerifyPage():
                self.checks.append(command)
            case WritePage() | CommitCatalogue() | WipeSlots() | ForgetTenant():
                self.writer.append(command)
            case Answer():
                self.answers[command.ticket] = command.results

    def _hear(self, worker: SimWorker, message: ToWorker) -> None:
        worker.messages.append(message)
        match message:
            case Granted():
                for grant in message.grants:
                    self._assert_unused(grant.slot)
                    self.host.pop(grant.slot, None)
                    worker.grants.append(grant)
            case Located():
                for page in message.host:
                    self._lease(worker, message.request_id, page)
                worker.coming[message.request_id] = set(message.loading)
                there = [page.index for page in message.host] + message.loading
                assert sorted(there) == list(range(len(there))), "the chain has a hole"
                if message.missing is not None:
                    assert message.missing.index == len(there)
                else:
                    assert len(there) == len(worker.asked[message.request_id])
            case Loaded():
                for page in message.pages:
                    worker.coming[message.request_id].remove(page.index)
                    self._lease(worker, message.request_id, page)
            case LoadFailed():
                coming = worker.coming[message.request_id]
                assert message.missing.index in coming
                coming -= {i for i in coming if i >= message.missing.index}
            case Welcome() | Refused():
                pass

    def _lease(self, worker: SimWorker, request: str, page: HostPage) -> None:
        key = worker.asked[request][page.index]
        assert self.host[page.grant.slot] == (key, "bf16"), (
            "a worker is offered another page than it asked for"
        )
        assert page.grant.slot not in self.bad, "a corrupt copy is served again"
        assert page.checksum == checksum_of(key)
        worker.leases[request][page.index] = page

    def _assert_unused(self, slot: int) -> None:
        """The slot is about to be overwritten."""
        self.bad.discard(slot)
        for worker in self.workers.values():
            assert all(grant.slot != slot for grant in worker.grants), "a granted slot is given away"
            for leases in worker.leases.values():
                assert all(page.grant.slot != slot for page in leases.values()), "a leased slot is given away"
        assert all(read.slot != slot for read in self.reads), "two transfers into one slot"
        assert all(not isinstance(w, WritePage) or w.slot != slot for w in self.writer), (
            "a source is overwritten"
        )
        for check in self.checks:
            assert check.tier is not TierName.HOST or check.place.index != slot

    # ---- what is where, by the world's own book ----------------------------------------------------------------

    def held(self, tier: TierName) -> set[PageId]:
        """What the coordinator says a tier holds; checked against what is truly there."""
        infos = self.node.pages(None, tier, 10**9, self.now)
        pages = {(bytes.fromhex(i.key), i.variant) for i in infos if i.state == "sealed"}
        if tier is TierName.HOST:
            assert pages <= set(self.host.values())
        return pages


def checksum_of(key: bytes) -> bytes:
    return digest("sum", key, size=16)
