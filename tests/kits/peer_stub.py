"""A node's cache for tests of exchanges: speaks the worker socket, has the pages it is told to have, counts leases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S, until

from kvtier.cluster.transfer.actor import PageExchangeProcess
from kvtier.tier.pages.page import (
    ALIGN_BYTES,
    HEADER_BYTES,
    Envelope,
    PageKey,
    RootKey,
    page_checksum,
    slot_bytes,
)
from kvtier.tier.protocol.events import FromWorker, WorkerGone, WorkerRef
from kvtier.tier.protocol.ipc import NodeServer
from kvtier.tier.protocol.messages import (
    CancelFetch,
    Copied,
    Fetch,
    Fetched,
    FetchPage,
    Grant,
    Hello,
    HostPage,
    Loaded,
    Locate,
    Located,
    Missing,
    Release,
    Stored,
    StoredPage,
    ToWorker,
    Welcome,
)
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier

VARIANT, SPEC = "bf16", b"spec of tests..."
ROOT, TENANT = bytes(range(32)), b"tenant of tests."
PAGE_TOKENS = 16
SECRET = "the secret of this deployment"


def key_of(number: int) -> PageKey:
    """The key of page `number` of the tests' chain."""
    return PageKey(b"page" + number.to_bytes(4, "little") + bytes(24))


def payload_of(number: int, nbytes: int) -> bytes:
    """Its bytes."""
    return (key_of(number) * (nbytes // 32 + 1))[:nbytes]


def envelope_of(number: int, nbytes: int, **changes: Any) -> Envelope:
    """Its envelope, less some truths."""
    key = key_of(number)
    fields: dict[str, Any] = {
        "key": key,
        "variant": VARIANT,
        "spec_digest": SPEC,
        "payload_bytes": nbytes,
        "checksum": page_checksum(key, VARIANT, SPEC, payload_of(number, nbytes)),
        "root": RootKey(ROOT),
        "parent": key_of(number - 1) if number else ROOT,
        "tenant": TENANT,
        "depth": number,
        "tokens": PAGE_TOKENS,
    }
    return Envelope(**{**fields, **changes})


class StubNode:
    """A CacheNode of slots of one size: serves what `put` was told, orders fetches, counts leases as the real one does.

    Its thread owns the socket; tests call the rest.
    """

    def __init__(self, folder: Path, node_id: str, nbytes: int = 4096, num_slots: int = 64) -> None:
        self.node_id = node_id
        self.nbytes = nbytes
        self.path = str(folder / node_id / "sock")
        self.host = HostTier(num_slots * slot_bytes(nbytes), pretouch=False)
        self.heard: list[tuple[WorkerRef, Any]] = []
        self.leases: dict[tuple[WorkerRef, str], set[int]] = {}
        self.held_back: set[int] = set()  # pages that are "loading" until `load`
        self.workers: list[WorkerRef] = []
        self._slots: dict[PageKey, int] = {}
        self._waiting: dict[int, list[tuple[WorkerRef, str]]] = {}
        self._last_slot = 0
        self._last_fetch = 0
        self._calls: list[Callable[[], None]] = []
        self._stopping = False
        self._server = NodeServer(self.path, self.host.fd)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ---- what tests tell it ------------------------------------------------------------------------------------

    def put(self, *numbers: int, **changes: Any) -> None:
        """Have these pages of the chain, with such envelopes."""
        for number in numbers:
            grant = self.grant()
            envelope = envelope_of(number, self.nbytes, **changes)
            self.host.write(Place(0, grant.slot), envelope, payload_of(number, self.nbytes))
            self._slots[key_of(number)] = grant.slot

    def spoil(self, number: int, at: int | None = None) -> None:
        """Flip a bit of a page's slot: of its byte `at`; in the middle of its payload."""
        slot = self.host.slot(Place(0, self._slots[key_of(number)]), self.nbytes)
        slot[HEADER_BYTES + self.nbytes // 2 if at is None else at] ^= 1

    def overwrite(self, number: int, payload: bytes, **changes: Any) -> None:
        """Put another whole page into a page's slot, with checksums that fit it; the node doesn't know."""
        said = envelope_of(number, self.nbytes, **changes)
        checksum = page_checksum(said.key, said.variant, said.spec_digest, payload)
        place = Place(0, self._slots[key_of(number)])
        self.host.write(place, envelope_of(number, self.nbytes, **changes, checksum=checksum), payload)

    def has(self, number: int) -> bool:
        """Whether the page is still there."""
        return key_of(number) in self._slots

    def grant(self) -> Grant:
        """A free slot."""
        step = slot_bytes(self.nbytes) // ALIGN_BYTES
        slot, self._last_slot = self._last_slot, self._last_slot + step
        return Grant(slot, 1, self.nbytes)

    def load(self, number: int) -> None:
        """A page that was held back is there now."""

        def loaded() -> None:
            self.held_back.discard(number)
            for ref, request_id in self._waiting.pop(number, []):
                self._server.send(ref, Loaded(request_id, [self._lease(ref, request_id, number)]))

        self.call(loaded)

    def order(
        self, peer: str, address: str, numbers: range, deadline_s: float = PATIENCE_S, **changes: Any
    ) -> Fetch:
        """Order the connected exchange of this node to fetch pages."""
        self._last_fetch += 1
        pages = [FetchPage(self.grant(), key_of(number), VARIANT, SPEC) for number in numbers]
        fields: dict[str, Any] = {
            "fetch_id": self._last_fetch,
            "node_id": peer,
            "address": address,
            "root": ROOT,
            "tenant": TENANT,
            "page_tokens": PAGE_TOKENS,
            "first_page": numbers.start,
            "pages": pages,
            "deadline_s": deadline_s,
        }
        fetch = Fetch(**{**fields, **changes})
        self.say(fetch)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """Wait for a Fetch no more."""
        self.say(CancelFetch(fetch.fetch_id))

    def say(self, message: ToWorker) -> None:
        """To this node's own exchange."""
        until(lambda: self.own(), "the exchange is connected")
        self.call(lambda: self._server.send(self.own()[-1], message))

    def own(self) -> list[WorkerRef]:
        """Connections of this node's own exchange."""
        return [ref for ref in self.workers if ref.worker_id == f"exchange:{self.node_id}"]

    def ended(self, fetch: Fetch) -> Fetched:
        """How a Fetch ended."""
        return until(lambda: next(iter(self.ends(fetch)), None), f"fetch {fetch.fetch_id} ends")  # type: ignore[return-value]

    def ends(self, fetch: Fetch) -> list[Fetched]:
        """What was said of its end so far."""
        told = [message for _, message in self.heard if isinstance(message, Fetched)]
        return [message for message in told if message.fetch_id == fetch.fetch_id]

    def stored(self, fetch: Fetch) -> set[int]:
        """The depths of the pages that were stored into a Fetch's slots; all of them are whole."""
        slots = {page.grant.slot for page in fetch.pages}
        told = [message for _, message in self.heard if isinstance(message, Stored)]
        pages: list[StoredPage] = [page for m in told for page in m.pages if page.grant.slot in slots]
        for page in pages:
            slot = self.host.slot(Place(0, page.grant.slot), self.nbytes)
            envelope = Envelope.unpack(slot)
            envelope.verify(slot[HEADER_BYTES : HEADER_BYTES + self.nbytes])
            told_of = {name: getattr(page, name) for name in Envelope.__slots__ if name != "payload_bytes"}
            assert told_of == {name: getattr(envelope, name) for name in told_of}
            assert (page.key, page.root, page.tenant) == (key_of(page.depth), fetch.root, fetch.tenant)
        return {page.depth for page in pages}

    def num_leases(self) -> int:
        """Leases that nothing has ended."""
        return sum(len(pages) for pages in self.leases.values())

    def call(self, work: Callable[[], None]) -> None:
        """Do something on the node's thread."""
        self._calls.append(work)
        self._server.wake()

    def close(self) -> None:
        """Close all connections, as a dying node's kernel does."""
        if not self._stopping:
            self._stopping = True
            self._server.wake()
            self._thread.join()
            self._server.close()
            self.host.close()

    # ---- its thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            for event in self._server.poll(1.0):
                if isinstance(event, WorkerGone):
                    self.workers.remove(event.worker)
                    self.leases = {who: pages for who, pages in self.leases.items() if who[0] != event.worker}
                else:
                    self._hear(event)
            while self._calls:
                self._calls.pop(0)()

    def _hear(self, event: FromWorker) -> None:
        ref, message = event.worker, event.message
        self.heard.append((ref, message))
        match message:
            case Hello():
                assert message.role == "exchange"
                self.workers.append(ref)
                life = f"life of {self.path}"
                self._server.send(ref, Welcome(self.node_id, life, self.host.capacity_bytes))
            case Locate():
                self._locate(ref, message)
            case Copied():
                for _, page in message.pages:
                    self.leases.get((ref, message.request_id), set()).discard(page)
                for _, page in message.corrupt:
                    self._slots.pop(key_of(page), None)
            case Release():
                self.leases.pop((ref, message.request_id), None)
            case _:
                pass

    def _locate(self, ref: WorkerRef, message: Locate) -> None:
        host: list[HostPage] = []
        loading: list[tuple[int, int]] = []
        missing: Missing | None = None
        chain = message.chains[0]
        number = message.first_page
        for key, held in zip(chain.keys, chain.held, strict=True):
            if not held and key not in self._slots:
                missing = Missing(number, "evicted", f"page {number} is gone")
                break
            if not held and number in self.held_back:
                loading.append((0, number))
                self._waiting.setdefault(number, []).append((ref, message.request_id))
            elif not held:
                host.append(self._lease(ref, message.request_id, number))
            number += 1
        self._server.send(ref, Located(message.request_id, number, host, loading, missing))

    def _lease(self, ref: WorkerRef, request_id: str, number: int) -> HostPage:
        self.leases.setdefault((ref, request_id), set()).add(number)
        key = key_of(number)
        checksum = envelope_of(number, self.nbytes).checksum
        grant = Grant(self._slots[key], 1, self.nbytes)
        return HostPage((0, number), grant, key, VARIANT, SPEC, checksum, PAGE_TOKENS, "L3")


@contextmanager
def stub(folder: Path, node_id: str, **options: Any) -> Iterator[StubNode]:
    """A node, closed at the end."""
    node = StubNode(folder, node_id, **options)
    try:
        yield node
    finally:
        node.close()


@contextmanager
def exchange(
    node_id: str, socket_path: str, secret: str = SECRET, **options: Any
) -> Iterator[PageExchangeProcess]:
    """An exchange in this process, connected, and stopped at the end; patient unless it is told otherwise."""
    patient = {"deadline_s": PATIENCE_S, "grace_s": PATIENCE_S}
    process = PageExchangeProcess(node_id, socket_path, "127.0.0.1", 0, secret, **{**patient, **options})
    try:
        until(lambda: process.health() is None, f"the exchange of {node_id} is connected")
        yield process
    finally:
        process.stop()
