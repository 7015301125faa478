"""The cache verbs on one worker's L1: list, pin, evict, clear, verify. Runs on the step loop, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b

from kvtier.tier.base import Outcome, PageInfo
from kvtier.tier.identity import tenant_digest
from kvtier.tier.page import PageKey, PageSpec, RootKey, TierName
from kvtier.tier.stats import TierCounters
from kvtier.workers.page_table import PageTable
from kvtier.workers.pager import Pager
from kvtier.workers.sequence import Tenancy

log = logging.getLogger(__name__)

Outcomes = list[tuple[bytes, Outcome]]


class Level1:
    """What an administrator sees and does. Owned by the step loop; `clock` is its monotonic clock.

    `tenancies` says, by tenant, where its pages are found; `clear` gives a tenant a new one.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        root: RootKey,
        tenants: Mapping[str, bytes],
        table: PageTable,
        pager: Pager,
        spec: PageSpec,
        clock: Callable[[], float],
    ) -> None:
        self.tenancies = {
            name: _tenancy(root, tenant_digest(name), salt, 0) for name, salt in tenants.items()
        }
        self._worker_id = worker_id
        self._root = root
        self._table = table
        self._pager = pager
        self._spec = spec
        self._clock = clock
        self._clears = 0

    def counters(self) -> TierCounters:
        """L1's own numbers; what requests looked for and found is not in them."""
        table, moved = self._table, self._pager.counters
        used = table.capacity - table.frames.free_frames
        return TierCounters(
            capacity_bytes=moved.capacity_bytes,
            used_bytes=used * self._spec.nbytes,
            pages=used,
            promoted_pages=moved.promoted_pages,
            evicted_pages=table.evicted_pages,
            bytes_in=moved.bytes_in,
            bytes_out=moved.bytes_out,
            corrupt_pages=moved.corrupt_pages,
            loads_s=moved.loads_s.copy(),
        )

    def pages(self, tenant: str | None, limit: int) -> list[PageInfo]:
        """At most `limit` cached pages, of a tenant or of all."""
        digest = None if tenant is None else tenant_digest(tenant)
        now = self._clock()
        found: list[PageInfo] = []
        for frame, record, is_held in self._table.cached():
            if len(found) >= limit:
                break
            if digest not in (None, record.tenant):
                continue
            is_pinned = record.key in self._table.pinned
            found.append(
                PageInfo(
                    key=record.key.hex(),
                    tier=TierName.HBM,
                    owner=self._worker_id,
                    tenant=record.tenant.hex(),
                    root=record.root.hex(),
                    parent=record.parent.hex(),
                    variant=self._spec.format.value,
                    depth=record.depth,
                    tokens=self._spec.page_tokens,
                    nbytes=self._spec.nbytes,
                    uses=record.uses,
                    idle_s=max(0.0, now - record.last_use_s),
                    pinned=is_pinned,
                    readers=self._table.copies_of(frame) + (is_held and not is_pinned),
                    state="sealed",
                )
            )
        return found

    def pin(self, keys: list[bytes]) -> Outcomes:
        """Keep pages, and those before them. REJECTED past the bound."""
        outcomes = {None: Outcome.MISSING, True: Outcome.ACCEPTED, False: Outcome.REJECTED}
        return [(key, outcomes[self._table.pin(PageKey(key))]) for key in keys]

    def unpin(self, keys: list[bytes]) -> Outcomes:
        """Undo `pin`."""
        found: Outcomes = []
        for key in keys:
            is_here = key in self._table.by_key
            self._table.unpin(PageKey(key), self._clock())
            found.append((key, Outcome.ACCEPTED if is_here else Outcome.MISSING))
        return found

    def evict(self, keys: list[bytes]) -> Outcomes:
        """Drop pages, with those behind them. REJECTED: it is pinned. DEFERRED: as soon as its users end."""
        here = {key for key in keys if key in self._table.by_key}  # one may go with another
        return [(key, self._evict(PageKey(key)) if key in here else Outcome.MISSING) for key in keys]

    def _evict(self, key: PageKey) -> Outcome:
        if self._table.is_pinned(key):
            return Outcome.REJECTED
        waits = self._table.remove(key, self._clock()) is False
        return Outcome.DEFERRED if waits else Outcome.ACCEPTED

    def clear(self, tenant: str | None) -> Outcomes:
        """Drop a tenant's pages, or everybody's. DEFERRED: not found any more, gone when its users end."""
        self._clears += 1
        outcomes: Outcomes = []
        for name in self.tenancies if tenant is None else self.tenancies.keys() & {tenant}:
            old = self.tenancies[name]
            keys = self._keys(old.tree)
            self._table.clear(old.tree, self._clock())
            left = set(self._keys(old.tree))
            outcomes += [(key, Outcome.DEFERRED if key in left else Outcome.ACCEPTED) for key in keys]
            self._pager.cleared(old.digest)
            self.tenancies[name] = _tenancy(self._root, old.digest, old.salt, self._clears)
        return outcomes

    def verify(self, keys: list[bytes] | None) -> Outcomes:
        """Check pages (None: all) against their checksums; a bad one is dropped, and then MISSING."""
        wanted = list(self._table.by_key) if keys is None else [PageKey(key) for key in keys]
        return [(key, self._verify(key)) for key in wanted]

    def _verify(self, key: PageKey) -> Outcome:
        if key not in self._table.by_key:
            return Outcome.MISSING
        if self._pager.verify(key) is not False:
            return Outcome.ACCEPTED
        log.error("page %s in L1 is not what was sealed; it is dropped", key.hex()[:16])
        self._pager.counters.corrupt_pages += 1
        self._table.unpin(key, self._clock())
        waits = self._table.remove(key, self._clock()) is False
        return Outcome.DEFERRED if waits else Outcome.MISSING

    def _keys(self, tree: RootKey) -> list[PageKey]:
        return [record.key for _, record, _ in self._table.cached() if record.tree == tree]


def _tenancy(root: RootKey, tenant: bytes, salt: bytes, clears: int) -> Tenancy:
    name = root + tenant + clears.to_bytes(8, "little")
    tree = RootKey(blake2b(name, digest_size=32, person=b"kvtier.tree").digest())
    return Tenancy(root=root, salt=salt, digest=tenant, tree=tree)
