"""A worker's end of the socket, for tests: stores and fetches pages whose bytes follow from their tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from waiting import until

from kvtier.tier.identity import TokenIds, content_digest, page_keys, root_key, tenant_digest, tenant_salt
from kvtier.tier.ipc import NodeClient
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
    Missing,
    Stored,
    StoredPage,
    ToWorker,
    WantSlots,
)
from kvtier.tier.page import HEADER_BYTES, Envelope, PageKey, RootKey, page_checksum, slot_bytes
from kvtier.tier.service import CacheService

PAYLOAD_BYTES = 16 * 1024
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
PAGE_TOKENS = 16
VARIANT = "bf16"
SPEC = b"spec of tests..."
FIELDS = {"weights": "abc", "epoch": "0"}
DEADLINE_S = 30.0

M = TypeVar("M")


@contextmanager
def running(
    folder: Path, *, l3_pages: int = 16, l4_bytes: int = 16 << 20, store: Any = "slab", drain_s: float = 10.0
) -> Iterator[CacheService]:
    """A node's cache whose files lie in `folder`; checked and stopped at the end."""
    service = CacheService(
        "n0", folder / "run" / "sock", PAYLOAD_BYTES, l3_pages * SLOT_BYTES, folder / "l4", l4_bytes, store
    )
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
    ) -> None:
        fields = FIELDS if fields is None else fields
        self.page_tokens = page_tokens
        self.root = root_key(fields)
        self.tenant, self.salt = tenant_digest(tenant), tenant_salt(tenant)
        self.is_closed = threading.Event()
        self._heard: list[ToWorker] = []
        self._changed = threading.Condition()
        self._requests = 0
        hello = Hello(name, incarnation, SPEC, PAYLOAD_BYTES, fields)
        self.client = NodeClient.connect(folder / "run" / "sock", hello, self._hear, self.is_closed.set)

    def close(self) -> None:
        self.client.close()

    def keys(self, start: int, num_pages: int) -> list[PageKey]:
        """Keys of the chain of pages whose tokens count up from `start`."""
        return page_keys(self.root, self.salt, self._tokens(start, num_pages), self.page_tokens)

    def _tokens(self, start: int, num_pages: int) -> TokenIds:
        return np.arange(start, start + num_pages * self.page_tokens, dtype=np.int32)

    def store(self, start: int, num_pages: int, hold_for: str | None = None) -> list[PageKey]:
        """Put a chain into L3, as slots come; its keys."""
        keys = self.keys(start, num_pages)
        parent: bytes = self.root
        grants: list[Grant] = []
        for depth, key in enumerate(keys):
            if not grants:
                self.client.send(WantSlots(num_pages - depth))
                grants = list(self.hear(Granted).grants)
            grant = grants.pop()
            self._write(
                grant, key, parent, depth, content_digest(self.salt, self._tokens(start, 1)), hold_for
            )
            parent = key
        return keys

    def _write(
        self, grant: Grant, key: PageKey, parent: bytes, depth: int, content: bytes, hold_for: str | None
    ) -> None:
        slot = self.client.slot(grant.slot)
        payload = slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
        payload[:] = payload_of(key)
        checksum = page_checksum(key, VARIANT, SPEC, payload)
        root = RootKey(self.root)
        envelope = Envelope(
            key, VARIANT, SPEC, PAYLOAD_BYTES, checksum, root, parent, self.tenant, depth, self.page_tokens
        )
        packed = envelope.pack()
        slot[: len(packed)] = packed
        page = StoredPage(
            grant, key, VARIANT, self.root, parent, self.tenant, depth, self.page_tokens, checksum,
            content if depth == 0 else b"",
        )  # fmt: skip
        self.client.send(Stored([page], hold_for))

    def fetch(self, start: int, num_pages: int) -> tuple[list[HostPage], Missing | None]:
        """Locate a chain, check the bytes of each page that comes, and say Copied; what came, and what didn't."""
        self._requests += 1
        request = f"request{self._requests}"
        keys = self.keys(start, num_pages)
        content = content_digest(self.salt, self._tokens(start, 1))
        self.client.send(Locate(request, self.root, self.tenant, list(keys), VARIANT, 0.0, content))
        located = self.hear(Located)
        missing = located.missing
        pages, coming = list(located.host), set(located.loading)
        self._copy(request, keys, located.host)
        while coming:
            message = self.hear(Loaded, LoadFailed)
            if isinstance(message, LoadFailed):
                missing = message.missing
                coming = {index for index in coming if index < message.missing.index}
            else:
                coming -= {page.index for page in message.pages}
                pages += message.pages
                self._copy(request, keys, message.pages)
        return sorted(pages, key=lambda page: page.index), missing

    def _copy(self, request: str, keys: list[PageKey], pages: list[HostPage]) -> None:
        corrupt = []
        for page in pages:
            key = keys[page.index]
            payload = self.client.slot(page.grant.slot)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
            if page_checksum(key, VARIANT, SPEC, payload) != page.checksum:
                corrupt.append(page.index)
            else:
                assert payload == payload_of(key), "another page's bytes"
        if pages:
            self.client.send(
                Copied(request, [page.index for page in pages], len(pages) * PAYLOAD_BYTES, 1e-4, corrupt)
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


def payload_of(key: bytes) -> bytes:
    """The right bytes of a page."""
    return key * (PAYLOAD_BYTES // len(key))
