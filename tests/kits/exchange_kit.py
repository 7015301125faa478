"""A plain exchange for tests: fetches for one node from another on this machine, by a copy from slab to slab."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from kvtier.tier.pages.page import PACKED_ENVELOPE_BYTES, Envelope
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Fetch,
    Fetched,
    FetchPage,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Stored,
    StoredPage,
    ToWorker,
)


@dataclass
class _Running:
    fetch: Fetch
    waits: set[int]  # pages of the chain that are to come yet
    nbytes: int = 0
    reason: str = ""
    detail: str = ""
    failed: list[tuple[bytes, str]] = field(default_factory=list)


class PlainExchange:
    """Serves the fetches of the node at `own`, whose id is `node_id`, from the node at `peer`. One thread does it all.

    `spoil` is given each slot after the copy, and may change it; a `silent` one hears its fetches and answers none.
    """

    def __init__(
        self,
        own: Path,
        peer: Path,
        node_id: str = "n0",
        spoil: Callable[[memoryview], None] = lambda slot: None,
        silent: bool = False,
    ) -> None:
        self.heard_fetch = threading.Event()
        self._spoil, self._is_silent = spoil, silent
        self._inbox: SimpleQueue[ToWorker | None] = SimpleQueue()
        self._running: dict[str, _Running] = {}
        hello = Hello(f"exchange:{node_id}", "1", {}, {}, {}, role="exchange")
        self._peer = NodeClient.connect(peer, hello, self._inbox.put, lambda: None)
        self._own = NodeClient.connect(own, hello, self._inbox.put, lambda: None)
        self._thread = threading.Thread(target=self._run, name="plain-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """It dies: no slot is touched after."""
        self._inbox.put(None)
        self._thread.join()
        self._own.close()
        self._peer.close()

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            match message:
                case Fetch():
                    self.heard_fetch.set()
                    if not self._is_silent:
                        self._fetch(message)
                case Located():
                    running = self._running[message.request_id]
                    running.waits = {page for _, page in message.loading}
                    if message.missing is not None:
                        running.reason, running.detail = message.missing.reason, message.missing.detail
                    self._copy(message.request_id, message.host)
                case Loaded():
                    self._copy(message.request_id, message.pages)
                case LoadFailed():
                    running = self._running[message.request_id]
                    running.waits = {page for page in running.waits if page < message.missing.page}
                    running.reason, running.detail = message.missing.reason, message.missing.detail
                    self._copy(message.request_id, [])
                case _:
                    pass

    def _fetch(self, fetch: Fetch) -> None:
        first, pages = fetch.first_page, fetch.pages
        self._running[str(fetch.fetch_id)] = _Running(fetch, set())
        chain = Chain(
            [page.key for page in pages], [], bytes(len(pages)), pages[0].variant, "", 0, 0, 1, 0, 0, False,
            pages[0].spec_digest,
        )  # fmt: skip
        end = (first + len(pages)) * fetch.page_tokens
        self._peer.send(
            Locate(str(fetch.fetch_id), fetch.root, fetch.tenant, fetch.page_tokens, first, end, [chain], 0.0)
        )

    def _copy(self, request_id: str, pages: list[HostPage]) -> None:
        running = self._running[request_id]
        stored = []
        for page in pages:
            wanted = running.fetch.pages[page.page[1] - running.fetch.first_page]
            running.waits.discard(page.page[1])
            running.nbytes += page.grant.payload_bytes
            stored.append(self._copy_slot(page, wanted))
        if pages:
            self._peer.send(Copied(request_id, [page.page for page in pages], running.nbytes, 1e-4))
            self._own.send(Stored(stored))
        if not running.waits:
            del self._running[request_id]
            fetch_id = running.fetch.fetch_id
            self._own.send(Fetched(fetch_id, [], running.reason, running.detail, running.nbytes, 1e-3))

    def _copy_slot(self, page: HostPage, wanted: FetchPage) -> StoredPage:
        source, target = self._peer.slot(page.grant), self._own.slot(wanted.grant)
        target[:] = source
        envelope = Envelope.unpack(target[:PACKED_ENVELOPE_BYTES])
        self._spoil(target)
        source.release()
        target.release()
        return StoredPage(
            grant=wanted.grant,
            key=envelope.key,
            variant=envelope.variant,
            made_from=envelope.made_from,
            spec_digest=envelope.spec_digest,
            root=envelope.root,
            parent=envelope.parent,
            tenant=envelope.tenant,
            depth=envelope.depth,
            tokens=envelope.tokens,
            checksum=envelope.checksum,
            content=b"",
        )


@contextmanager
def exchanging(own: Path, peer: Path, **options: object) -> Iterator[PlainExchange]:
    """An exchange that is gone at the end."""
    exchange = PlainExchange(own, peer, **options)  # type: ignore[arg-type]
    try:
        yield exchange
    finally:
        exchange.close()
