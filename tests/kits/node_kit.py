"""A worker's end of the socket, for tests: stores and fetches pages whose bytes follow from their tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from waiting import until

from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.identity import (
    TokenIds,
    content_digest,
    page_keys,
    root_key,
    tenant_digest,
    tenant_salt,
)
from kvtier.tier.pages.page import HEADER_BYTES, Envelope, PageKey, RootKey, page_checksum, slot_bytes
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Grant,
    Granted,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Missing,
    Stored,
    StoredPage,
    ToWorker,
    WantSlots,
)

PAYLOAD_BYTES = 16 * 1024
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
PAGE_TOKENS = 16
VARIANT, SMALL_VARIANT = "bf16", "int4c"
SMALL_BYTES = 4 * 1024  # of a page in SMALL_VARIANT
SPEC, SMALL_SPEC = b"spec of tests...", b"spec of small..."
KINDS = {VARIANT: (SPEC, PAYLOAD_BYTES), SMALL_VARIANT: (SMALL_SPEC, SMALL_BYTES)}
FIELDS = {"weights": "abc", "epoch": "0"}
DEADLINE_S = 120.0

M = TypeVar("M")


def service_in(
    folder: Path,
    *,
    l3_pages: int = 16,
    l4_bytes: int = 16 << 20,
    store: Any = "slab",
    l4_variants: frozenset[str] | None = None,
    node_id: str = "n0",
    **more: Any,
) -> CacheService:
    """A node's cache whose files lie in `folder`, not started."""
    return CacheService(
        node_id,
        folder / "run" / "sock",
        PAYLOAD_BYTES,
        l3_pages * SLOT_BYTES,
        folder / "l4",
        l4_bytes,
        store,
        min_payload_bytes=SMALL_BYTES,
        l4_variants=l4_variants,
        **more,
    )


@contextmanager
def running(folder: Path, *, drain_s: float = 10.0, **more: Any) -> Iterator[CacheService]:
    """A node's cache as of `service_in`, started; checked and stopped at the end."""
    service = service_in(folder, **more)
    service.start()
    try:
        yield service
        if service.health() is None:
            service.check()
    finally:
        service.stop(drain_s)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Until it is so, at most DEADLINE_S."""
    until(is_so, "it comes to be", DEADLINE_S)


class Peer:
    """A worker of a tenant, over a real socket. One test thread uses it."""

    def __init__(
        self,
        folder: Path,
        name: str = "w0",
        incarnation: str = "1",
        fields: dict[str, str] | None = None,
        tenant: str = "ada",
        page_tokens: int = PAGE_TOKENS,
        saves: bool = False,
    ) -> None:
        """`saves`: it may be asked to save pages for other nodes."""
        fields = FIELDS if fields is None else fields
        self.page_tokens = page_tokens
        self.root = root_key(fields)
        self.tenant, self.salt = tenant_digest(tenant), tenant_salt(tenant)
        self.cleared = 0  # clear epoch that it knows of
        self.is_closed = threading.Event()
        self._heard: list[ToWorker] = []
        self._changed = threading.Condition()
        self._requests = 0
        hello = msgspec.structs.replace(hello_of(name, incarnation, fields), saves_when_asked=saves)
        self.client = NodeClient.connect(folder / "run" / "sock", hello, self._hear, self.is_closed.set)

    def close(self) -> None:
        self.client.close()

    def keys(self, start: int, num_pages: int) -> list[PageKey]:
        """Keys of the chain of pages whose tokens count up from `start`."""
        return page_keys(self.root, self.salt, self._tokens(start, num_pages), self.page_tokens)

    def _tokens(self, start: int, num_pages: int) -> TokenIds:
        return np.arange(start, start + num_pages * self.page_tokens, dtype=np.int32)

    def store(
        self, start: int, num_pages: int, hold_for: str | None = None, variant: str = VARIANT
    ) -> list[PageKey]:
        """Put a chain into L3, as slots come; its keys."""
        keys = self.keys(start, num_pages)
        parent: bytes = self.root
        grants: list[Grant] = []
        for depth, key in enumerate(keys):
            if not grants:
                self.client.send(WantSlots(num_pages - depth, KINDS[variant][1]))
                grants = list(self.hear(Granted).grants)
            grant = grants.pop()
            content = content_digest(self.salt, self._tokens(start, 1))
            self._write(grant, key, parent, depth, content, hold_for, variant)
            parent = key
        return keys

    def _write(
        self,
        grant: Grant,
        key: PageKey,
        parent: bytes,
        depth: int,
        content: bytes,
        hold_for: str | None,
        variant: str,
    ) -> None:
        spec, nbytes = KINDS[variant]
        made_from = VARIANT if variant == SMALL_VARIANT else ""
        slot = self.client.slot(grant)
        payload = slot[HEADER_BYTES : HEADER_BYTES + nbytes]
        payload[:] = payload_of(key, nbytes)
        checksum = page_checksum(key, variant, spec, payload)
        envelope = Envelope(
            key,
            variant,
            spec,
            nbytes,
            checksum,
            RootKey(self.root),
            parent,
            self.tenant,
            depth,
            self.page_tokens,
            made_from,
        )
        packed = envelope.pack()
        slot[: len(packed)] = packed
        page = StoredPage(
            grant=grant,
            key=key,
            variant=variant,
            made_from=made_from,
            spec_digest=spec,
            root=self.root,
            parent=parent,
            tenant=self.tenant,
            depth=depth,
            tokens=self.page_tokens,
            checksum=checksum,
            content=content if depth == 0 else b"",
            cleared=self.cleared,
        )
        self.client.send(Stored([page], hold_for))

    def fetch(self, start: int, num_pages: int, lossy: bool = False) -> tuple[list[HostPage], Missing | None]:
        """Locate a chain, check the bytes of each page that comes, and say Copied; what came, and what didn't."""
        self._requests += 1
        request = f"request{self._requests}"
        keys = self.keys(start, num_pages)
        content = content_digest(self.salt, self._tokens(start, 1))
        last_position = num_pages * self.page_tokens
        chains = [lossy_chain(keys) if lossy else plain_chain(keys)]
        locate = Locate(
            request, self.root, self.tenant, self.page_tokens, 0, last_position, chains, 0.0, content
        )
        self.client.send(msgspec.structs.replace(locate, cleared=self.cleared))
        located = self.hear(Located)
        missing = located.missing
        pages, coming = list(located.host), set(located.loading)
        self._copy(request, located.host)
        while coming:
            message = self.hear(Loaded, LoadFailed)
            if isinstance(message, LoadFailed):
                missing = message.missing
                coming = {ref for ref in coming if ref[1] < message.missing.page}
            else:
                coming -= {page.page for page in message.pages}
                pages += message.pages
                self._copy(request, message.pages)
        return sorted(pages, key=lambda page: page.page), missing

    def _copy(self, request: str, pages: list[HostPage]) -> None:
        corrupt = []
        for page in pages:
            spec, nbytes = KINDS[page.variant]
            payload = self.client.slot(page.grant)[HEADER_BYTES : HEADER_BYTES + nbytes]
            if page_checksum(page.key, page.variant, spec, payload) != page.checksum:
                corrupt.append(page.page)
            else:
                assert payload == payload_of(page.key, nbytes), "another page's bytes"
        if pages:
            self.client.send(
                Copied(request, [page.page for page in pages], len(pages) * PAYLOAD_BYTES, 1e-4, corrupt)
            )

    def hear(self, *kinds: type[M]) -> M:
        """The next message of these kinds."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(isinstance(message, kinds) for message in self._heard), DEADLINE_S
            ), f"no {kinds} came"
            found = next(message for message in self._heard if isinstance(message, kinds))
            self._heard.remove(found)  # type: ignore[arg-type]
            return found

    def _hear(self, message: ToWorker) -> None:
        with self._changed:
            self._heard.append(message)
            self._changed.notify_all()


def hello_of(name: str, incarnation: str = "1", fields: dict[str, str] | None = None) -> Hello:
    """The first message of a worker that knows both KINDS of pages."""
    raw = dict.fromkeys((SPEC, SMALL_SPEC), PAYLOAD_BYTES)
    return Hello(name, incarnation, dict(KINDS.values()), raw, FIELDS if fields is None else fields)


def plain_chain(keys: Sequence[bytes], variant: str = VARIANT) -> Chain:
    """A chain without decay, window or anything in L1."""
    return Chain(list(keys), [], bytes(len(keys)), variant, "", 0, 0, 1, 0, 0, False)


def lossy_chain(keys: Sequence[bytes]) -> Chain:
    """A chain of a request that takes small pages where there are no others."""
    return Chain(list(keys), [], bytes(len(keys)), VARIANT, SMALL_VARIANT, 1 << 30, 0, 1, 0, 0, True)


def payload_of(key: bytes, nbytes: int = PAYLOAD_BYTES) -> bytes:
    """The right bytes of a page."""
    return key * (nbytes // len(key))
