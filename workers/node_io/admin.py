"""The cache verbs on one worker's L1: list, pin, evict, clear, verify. Runs on the step loop, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import PageFormat, PageKey, TierName
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.stats import TierCounters
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.models.formats import LayerGroup
from kvtier.workers.node_io.namespaces import Namespaces
from kvtier.workers.node_io.pager import Pager
from kvtier.workers.paging.frames import PageRecord
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.sequence import Namespace

log = logging.getLogger(__name__)

Outcomes = list[tuple[bytes, Outcome]]


class L1Admin:
    """What an administrator sees and does. Owned by the step loop; `clock` is its monotonic clock."""

    def __init__(
        self,
        *,
        worker_id: str,
        roots: Namespaces,
        table: PageTable,
        pager: Pager,
        groups: tuple[LayerGroup, ...],
        raw_format: PageFormat,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._roots = roots
        self._table = table
        self._pager = pager
        self._nbytes = [{format: spec.nbytes for format, spec in g.specs.items()} for g in groups]
        self._raw_nbytes = [replace(next(iter(g.specs.values())), format=raw_format).nbytes for g in groups]
        self._clock = clock

    def counters(self) -> TierCounters:
        """L1's own numbers; what requests looked for and found is not in them."""
        table, moved = self._table, self._pager.counters
        counters = TierCounters(
            capacity_bytes=table.capacity_bytes,
            used_bytes=table.used_bytes - table.lent_bytes,
            promoted_pages=moved.promoted_pages,
            evicted_pages=table.evicted_pages,
            bytes_in=moved.bytes_in,
            bytes_out=moved.bytes_out,
            corrupt_pages=moved.corrupt_pages,
            converted_pages=table.converted_pages + self._pager.made_variants,
            dropped_pages=table.dropped_pages,
            policy=table.policy.state,
            fallbacks=table.policy.fallbacks,
            loads_s=moved.loads_s.copy(),
        )
        for (group, format), pages in table.counts.items():
            counters.pages += pages
            counters.page_bytes += pages * self._nbytes[group][format]
            if pages:
                counters.variants[format.value] = counters.variants.get(format.value, 0) + pages
        counters.raw_bytes = sum(pages * self._raw_nbytes[group] for group, pages in table.distinct.items())
        return counters

    def pages(self, tenant: str | None, limit: int) -> list[PageInfo]:
        """At most `limit` cached pages, of a tenant or of all."""
        digest = None if tenant is None else tenant_digest(tenant)
        now = self._clock()
        found: list[PageInfo] = []
        for record, is_held in self._table.cached():
            if len(found) >= limit:
                break
            if digest in (None, record.tenant):
                found.append(self._info(record, is_held, now))
        return found

    def pages_of(self, keys: Iterable[bytes]) -> list[PageInfo]:
        """The pages of these keys, in each format that is here. Takes as long as a lookup of their prompts."""
        now = self._clock()
        records = [record for key in keys for record in self._table.records_of(PageKey(key))]
        return [self._info(record, self._table.is_held(record), now) for record in records]

    def held(self, keys: Sequence[bytes]) -> list[HeldKeys]:
        """Which of these keys can be found here, by format. Takes about a microsecond a key."""
        found: dict[tuple[TierName, str], list[int]] = {}
        for position, key in enumerate(keys):
            for record in self._table.records_of(PageKey(key)):
                found.setdefault((TierName.HBM, record.format.value), []).append(position)
        return HeldKeys.of(found, len(keys))

    def _info(self, record: PageRecord, is_held: bool, now: float) -> PageInfo:
        is_pinned = record.key in self._table.pinned
        return PageInfo(
            key=record.key.hex(),
            tier=TierName.HBM,
            owner=self._worker_id,
            tenant=record.tenant.hex(),
            root=record.root.hex(),
            parent=record.parent.hex(),
            variant=record.format.value,
            depth=record.depth,
            tokens=self._table.page_tokens,
            nbytes=record.nbytes,
            uses=record.uses,
            idle_s=max(0.0, now - record.last_use_s),
            pinned=is_pinned,
            readers=self._table.copies_of(record.frame) + (is_held and not is_pinned),
            state="sealed",
            made_from=record.made_from,
        )

    def pin(self, keys: list[bytes]) -> Outcomes:
        """Keep pages, and those before them. REJECTED past the bound."""
        outcomes = {None: Outcome.MISSING, True: Outcome.ACCEPTED, False: Outcome.REJECTED}
        return [(key, outcomes[self._table.pin(PageKey(key))]) for key in keys]

    def unpin(self, keys: list[bytes]) -> Outcomes:
        """Undo `pin`."""
        found: Outcomes = []
        for key in keys:
            is_here = self._table.has(PageKey(key))
            self._table.unpin(PageKey(key), self._clock())
            found.append((key, Outcome.ACCEPTED if is_here else Outcome.MISSING))
        return found

    def deepest_first(self, tenant: str | None = None) -> list[bytes]:
        """The keys of a tenant's pages that can be found (None: of all), each once, those behind a page before it."""
        digest = None if tenant is None else tenant_digest(tenant)
        records = (self._table.records_of(key)[0] for key in [*self._table.keys()])
        found = [(record.depth, record.key) for record in records if digest in (None, record.tenant)]
        return [key for _, key in sorted(found, reverse=True)]

    def here(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys that can be found."""
        return [key for key in keys if self._table.has(PageKey(key))]

    def evict(self, keys: list[bytes]) -> Outcomes:
        """Drop pages, with those behind them. REJECTED: it is pinned. DEFERRED: as soon as its users end."""
        here = set(self.here(keys))  # one may go with another
        return [(key, self._evict(PageKey(key)) if key in here else Outcome.MISSING) for key in keys]

    def _evict(self, key: PageKey) -> Outcome:
        if self._table.is_pinned(key):
            return Outcome.REJECTED
        waits = self._table.remove(key, self._clock()) is False
        return Outcome.DEFERRED if waits else Outcome.ACCEPTED

    def drop(self, keys: list[bytes]) -> Outcomes:
        """Evict pages, pinned ones too, ahead of a `clear`. REJECTED: it is in use, and stays until that."""
        return [(key, self._drop(PageKey(key))) for key in keys]

    def _drop(self, key: PageKey) -> Outcome:
        self._table.unpin(key, self._clock())
        # Not DEFERRED: what waits for its users to end would be evicted then by its key, which a page that is computed
        # again after the clear has too.
        is_in_use = any(self._table.is_held(record) for record in self._table.records_of(key))
        return Outcome.REJECTED if is_in_use else self._evict(key)

    def clear(self, tenant: str | None, in_use: Iterable[Namespace], number: int = 0) -> Outcomes:
        """Drop a tenant's pages, or all tenants'. DEFERRED: not found any more, gone when its users end.

        `number` is the clear's epoch (tier/pages/clear_epochs.py), 0 for none. `in_use` are the tenancies of the requests that aren't over: what they are yet to fill won't be found either.
        """
        outcomes: Outcomes = []
        for name in self._roots.tenants if tenant is None else self._roots.tenants.keys() & {tenant}:
            digest = tenant_digest(name)
            records = [record for record, _ in self._table.cached() if record.tenant == digest]
            trees = {record.tree for record in records}
            trees |= {namespace.tree for namespace in in_use if namespace.digest == digest}
            for tree in trees:
                self._table.clear(tree, self._clock())
            left = {record.key for record, _ in self._table.cached() if record.tenant == digest}
            for key in dict.fromkeys(record.key for record in records):
                outcomes.append((key, Outcome.DEFERRED if key in left else Outcome.ACCEPTED))
            self._pager.cleared(digest)
            self._roots.cleared(name)
        if number:
            self._pager.clears.note(None if tenant is None else tenant_digest(tenant), number)
        return outcomes

    def behind(self, told: Iterable[tuple[bytes, int]]) -> list[tuple[str | None, int]]:
        """The clears that are told and L1 hasn't heard of, of the tenants that it can have pages of (None: of all)."""
        names: dict[bytes | None, str | None] = {tenant_digest(name): name for name in self._roots.tenants}
        names[None] = None
        return [(names[one], number) for one, number in self._pager.clears.behind(told) if one in names]

    def verify(self, keys: list[bytes]) -> Outcomes:
        """Check pages against their checksums; a bad one is dropped, and then MISSING."""
        return [(key, self._verify(PageKey(key))) for key in keys]

    def _verify(self, key: PageKey) -> Outcome:
        records = self._table.records_of(key)
        if not records:
            return Outcome.MISSING
        if all(self._pager.verify(record) is not False for record in records):
            return Outcome.ACCEPTED
        log.error("page %s in L1 is not what was sealed; it is dropped", key.hex()[:16])
        self._pager.counters.corrupt_pages += 1
        self._table.unpin(key, self._clock())
        waits = self._table.remove(key, self._clock()) is False
        return Outcome.DEFERRED if waits else Outcome.MISSING
