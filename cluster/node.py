"""The Ray actor around a node's cache: one process per node, so that its disk and checksums never delay a decode step."""

from __future__ import annotations

import errno
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ray

from kvtier.cluster.machines.l4_folders import kept_in, l4_folder, l4_refusal
from kvtier.tier.node.service import CacheService, ServiceStopped
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.events import HintWrong, HoldsChanged
from kvtier.tier.protocol.key_query import HeldKeys, split_keys
from kvtier.tier.protocol.kv_events import KEY_BYTES, Feed, Source
from kvtier.tier.protocol.results import Cleared, ManyOutcomes
from kvtier.tier.record.writer import RecordingStatus, file_of
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import Outcome, PageInfo, Uncleared
from kvtier.tier.stores.ssd.clear_file import mark_unused
from kvtier.workers.actor import sender_to
from kvtier.workers.engine.kv_publisher import Holds, Outlet, Publisher, PublishError

log = logging.getLogger(__name__)

TOLD_TIERS = (TierName.PEER, TierName.HOST, TierName.SSD)
CALLS_AT_ONCE = 8  # threads of the actor; they only wait for the service's loop
PULSE = {"heartbeat": 1}  # a thread of its own, so that calls that wait don't make the node look stalled


class CacheNodeProcess:
    """What the actor's process runs; `CacheNode` is this class as a Ray actor. See CacheService for the methods.

    No page bytes go through these calls: workers and the service share them in memory. `l4_path` is the folder of all
    nodes, in which this one takes a subfolder; the folder of `socket_path` is made where there is none. Pages of another
    node that don't come within `fetch_deadline_s` are computed. A first start has `needs_l4`, so that a disk that refuses
    is an error; one that is restarted goes on without. One that `awaits_clears` answers no lookup until `know`.
    """

    def __init__(
        self,
        *,
        node_id: str,
        socket_path: str,
        payload_bytes: int,
        l3_bytes: int,
        l4_path: str,
        l4_bytes: int,
        l4_store: Literal["slab", "lmdb"] = "slab",
        min_payload_bytes: int | None = None,
        l4_variants: frozenset[str] | None = None,
        needs_l4: bool = True,
        policy: PolicySettings,
        write: Literal["through", "demote"],
        shares: Mapping[bytes, float],
        fetch_deadline_s: float = 5.0,
        awaits_clears: bool = False,
    ) -> None:
        self._socket_folder = Path(socket_path).parent
        self._socket_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._outlet = Outlet()
        self._directory: Any = None
        self._said_wrong: Any = None  # the latest call of its kind
        self._l4_path, self._has_l4 = Path(l4_path), l4_bytes > 0
        self._folder = folder = l4_folder(self._l4_path, node_id)
        self._service = CacheService(
            node_id,
            socket_path,
            payload_bytes,
            l3_bytes,
            folder,
            l4_bytes,
            l4_store,
            min_payload_bytes=min_payload_bytes,
            l4_variants=l4_variants,
            needs_l4=needs_l4,
            policy=policy,
            write=write,
            shares=shares,
            on_holds=self._on_holds,
            on_wrong=self._on_wrong,
            on_failed=_exit,
            limits=Limits(fetch_deadline_s=fetch_deadline_s),
            awaits_clears=awaits_clears,
        )
        try:
            self._service.start()
        except OSError as error:
            if refusal := l4_refusal(error, folder):
                raise OSError(refusal) from error
            raise

    def connect_directory(self, directory: Any, address: str) -> None:
        """Tell the directory, a handle of its actor, what L2 to L4 hold from now on.

        `address` is that of the node's exchange; when that changes, this is called again.
        """
        node_id, self._directory = self._service.node_id, directory
        feed = Feed(Source(f"node:{node_id}", uuid.uuid4().hex, node_id, "", address), TOLD_TIERS)
        self._outlet.connect(Publisher(feed, sender_to(directory), self._held, node_id))

    def _on_holds(self, changed: HoldsChanged) -> None:
        self._outlet(changed.tier, changed.came, changed.left)

    def _on_wrong(self, hint: HintWrong) -> None:
        """A lookup named a page that isn't there. One call at a time: what is left out is found wrong again."""
        said, directory = self._said_wrong, self._directory
        if directory is None or (said is not None and not ray.wait([said], timeout=0)[0]):
            return
        self._said_wrong = directory.wrong.remote(hint.node_id, None, hint.key[:KEY_BYTES])

    def _held(self) -> Holds:
        try:
            return self._service.holds()
        except (ServiceStopped, TimeoutError) as error:
            raise PublishError(str(error) or f"the cache of node {self._service.node_id} is busy") from error

    def info(self) -> dict[str, Any]:
        """{"id", "pid", "host"}; answers once the tiers are open."""
        return {"id": self._service.node_id, "pid": os.getpid(), "host": socket.gethostname()}

    def health(self) -> str | None:
        """None when all is well, else what isn't."""
        return self._service.health()

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> float:
        """Seconds since the service's loop turned: 0, once it has answered. No answer while it is stalled."""
        self._service.idle()
        return 0.0

    def notes(self) -> list[str]:
        """The latest one-line notices."""
        return self._service.notes()

    def stats(self) -> Snapshot:
        """The counters of L3 and L4."""
        return self._service.stats()

    def pages(
        self, tenant: str | bytes | None = None, tier: TierName | None = None, limit: int = 1000
    ) -> list[PageInfo]:
        """Copies of pages in L3 and L4."""
        return self._service.pages(tenant, tier, limit)

    def pages_of(self, keys: list[bytes]) -> list[PageInfo]:
        """Copies of pages by their keys."""
        return self._service.pages_of(keys)

    def held(self, keys: bytes) -> list[HeldKeys]:
        """Of which of these keys, one behind the other, a copy is here."""
        return self._service.held(split_keys(keys))

    def keys_with(self, heads: list[str], limit: int) -> list[list[bytes]]:
        """See by_key.keys_with: of the pages here."""
        return self._service.keys_with(heads, limit)

    def pin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Keep pages."""
        return self._service.pin(keys)

    def unpin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Undo `pin`."""
        return self._service.unpin(keys)

    def evict(self, keys: list[bytes], tier: TierName | None = None) -> list[tuple[bytes, Outcome]]:
        """Drop pages from a tier, or (None) from all of the node's."""
        return self._service.evict(keys, tier)

    def evict_all(self, tier: TierName | None = None) -> ManyOutcomes:
        """The same with all pages."""
        return ManyOutcomes.of(self._service.evict(None, tier))

    def clear(self, tenant: str | bytes | None = None, number: int = 0) -> Cleared:
        """Drop and wipe a tenant's pages, or all tenants', here and, as far as it can be, beside this node's folder."""
        outcomes = ManyOutcomes.of(self._service.clear(tenant, number))
        digest = tenant_digest(tenant) if isinstance(tenant, str) else tenant
        return Cleared(outcomes, tuple(self._service.uncleared()), self._mark_unused(digest, number))

    def _mark_unused(self, tenant: bytes | None, number: int) -> tuple[tuple[str, Uncleared], ...]:
        """Folders of other nodes under the same root that nothing has open: cleared by the next user."""
        marked: list[tuple[str, Uncleared]] = []
        for kept in kept_in(self._l4_path) if self._has_l4 else ():
            try:
                if Path(kept.path) == self._folder or not mark_unused(Path(kept.path), tenant, number):
                    continue
                error, detail = "", "no node that runs uses it: its pages are cleared before it is used again"
            except OSError as failure:
                error = errno.errorcode.get(failure.errno or 0, "")
                detail = f"no node that runs uses it, and it can't be written: {failure.strerror}"
            marked.append((f"{kept.path} on {socket.gethostname()}", Uncleared(TierName.SSD, error, detail)))
        return tuple(marked)

    def clears(self) -> list[tuple[bytes, int]]:
        """The clear epochs that this node has applied."""
        return self._service.clears()

    def know(self, told: list[tuple[bytes, int]]) -> None:
        """Apply the clears that this node missed; it answers lookups from then on."""
        self._service.know(told)

    def verify(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Check pages against their checksums."""
        return self._service.verify(keys)

    def verify_all(self) -> ManyOutcomes:
        """The same with all pages."""
        return ManyOutcomes.of(self._service.verify())

    def record(self, path: str, max_bytes: int, is_only: bool = True) -> RecordingStatus:
        """Write what the node's cache hears into a new file (see file_of). Raises RecordingError."""
        return self._service.record(file_of(path, self._service.node_id, is_only=is_only), max_bytes)

    def stop_recording(self) -> RecordingStatus | None:
        """End the recording."""
        return self._service.stop_recording()

    def idle(self) -> bool:
        """Nothing in flight, nothing leased."""
        return self._service.idle()

    def check(self) -> None:
        """Re-derive all counts; AssertionError where one differs."""
        self._service.check()

    def stop(self, drain_s: float = 30.0) -> None:
        """Save what only L3 holds for at most `drain_s`, and close everything."""
        self._outlet.close()
        self._service.stop(drain_s)
        with suppress(OSError):  # Ray's session lies there too where Ray is this deployment's own
            self._socket_folder.rmdir()


def _exit() -> None:
    """A node whose service a fault has ended ends too: a process that is gone is restarted at once."""
    log.critical("the cache node ends: it is to be restarted")
    logging.shutdown()
    os._exit(1)


CacheNode = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE, concurrency_groups=PULSE)(CacheNodeProcess)  # type: ignore[call-overload]  # Ray's types lack max_concurrency
