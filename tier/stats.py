"""Counters of tiers and requests, and how they add up over workers and nodes. Pure; the numbers users read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from kvtier.tier.pages.page import TierName

LATENCY_SAMPLES = 1024  # of the latest loads, for the percentiles


@dataclass(slots=True)
class TierCounters:
    """One tier's numbers, as its owner counts them. Loads are seconds, kept for percentiles."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    pages: int = 0
    lookups_tokens: int = 0
    hit_tokens: int = 0
    promoted_pages: int = 0  # pages that came up into this tier
    demoted_pages: int = 0  # pages that came down into this tier
    evicted_pages: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    corrupt_pages: int = 0
    converted_pages: int = 0  # rewritten in another format
    dropped_pages: int = 0  # that left a stream's window, or were converted, and went at once
    page_bytes: int = 0  # payloads of the pages held
    raw_bytes: int = 0  # what they would take in the model's raw format, each key once in whatever formats
    variants: dict[str, int] = field(default_factory=dict)  # pages held, by the format they are in
    policy: str = ""  # what chooses the pages that leave; of several owners that differ, all
    fallbacks: int = 0  # times that a guard has fallen back to lru
    refused_writes: int = 0  # pages not written down into this tier: loading would cost more than computing
    loads_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCY_SAMPLES))

    def add(self, other: TierCounters) -> None:
        """Add another owner's numbers of the same tier."""
        for f in fields(self):
            if f.name == "loads_s":
                self.loads_s.extend(other.loads_s)
            elif f.name == "variants":
                for variant, pages in other.variants.items():
                    self.variants[variant] = self.variants.get(variant, 0) + pages
            elif f.name == "policy":
                self.policy = _joined(self.policy, other.policy)
            else:
                setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def to_json(self) -> dict[str, Any]:
        """The tier's object in `kvtier stats --json`."""
        loads = sorted(self.loads_s)
        return {
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes,
            "pages": self.pages,
            "lookups_tokens": self.lookups_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_tokens / self.lookups_tokens if self.lookups_tokens else 0.0,
            "promoted_pages": self.promoted_pages,
            "demoted_pages": self.demoted_pages,
            "evicted_pages": self.evicted_pages,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "load_ms_p50": _percentile_ms(loads, 0.50),
            "load_ms_p99": _percentile_ms(loads, 0.99),
            "corrupt_pages": self.corrupt_pages,
            "converted_pages": self.converted_pages,
            "dropped_pages": self.dropped_pages,
            "page_bytes": self.page_bytes,
            "raw_bytes": self.raw_bytes,
            "variants": dict(sorted(self.variants.items())),
            "policy": self.policy,
            "fallbacks": self.fallbacks,
            "refused_writes": self.refused_writes,
        }


def _joined(one: str, other: str) -> str:
    """Both texts, each once, in alphabetical order."""
    return "; ".join(sorted({part for text in (one, other) for part in text.split("; ") if part}))


def _percentile_ms(ordered: list[float], share: float) -> float:
    if not ordered:
        return 0.0
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class RequestTotals:
    """Prompt tokens over all requests; a request counts once, at its first token."""

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    aborted_prompt_tokens: int = 0  # of requests that ended before a first token
    failed_requests: int = 0  # ended by an error of their own
    used_page_tokens: int = 0  # filled tokens of the L1 pages held
    held_page_tokens: int = 0  # tokens those pages could hold

    def add(self, other: RequestTotals) -> None:
        """Add another worker's totals."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def to_json(self) -> dict[str, Any]:
        """The totals in `kvtier stats --json`."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "cached_tokens": self.cached_tokens,
            "aborted_prompt_tokens": self.aborted_prompt_tokens,
            "failed_requests": self.failed_requests,
            "page_fill": self.used_page_tokens / self.held_page_tokens if self.held_page_tokens else 1.0,
        }


@dataclass(slots=True)
class FetchCounters:
    """What a node fetched from others, and what it served them. The reasons are those of messages.Missing."""

    fetched_pages: int = 0
    fetched_bytes: int = 0
    fetch_failed_pages: int = 0
    failed_pages: dict[str, int] = field(default_factory=dict)  # the same, by reason
    served_pages: int = 0
    served_bytes: int = 0

    def add(self, other: FetchCounters) -> None:
        """Add another node's numbers."""
        for f in fields(self):
            if f.name == "failed_pages":
                for reason, pages in other.failed_pages.items():
                    self.failed_pages[reason] = self.failed_pages.get(reason, 0) + pages
            else:
                setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def failed(self, reason: str) -> None:
        """One page will not come."""
        self.fetch_failed_pages += 1
        self.failed_pages[reason] = self.failed_pages.get(reason, 0) + 1


@dataclass(slots=True)
class Snapshot:
    """What one owner (a worker or a CacheNode) counts: its tiers' numbers, a worker also its requests'."""

    tiers: dict[TierName, TierCounters] = field(default_factory=dict)
    totals: RequestTotals = field(default_factory=RequestTotals)
    fetches: FetchCounters = field(default_factory=FetchCounters)
    bad_messages: int = 0  # that a node heard and that couldn't be; each ended its sender's connection


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot that adds all up; has every tier, absent ones as zeros."""
    total = Snapshot(tiers={name: TierCounters() for name in TierName})
    for one in snapshots:
        for name, counters in one.tiers.items():
            total.tiers[name].add(counters)
        total.totals.add(one.totals)
        total.fetches.add(one.fetches)
        total.bad_messages += one.bad_messages
    return total


def lasting(snapshot: Snapshot) -> Snapshot:
    """What of an owner's numbers stays true when the owner is gone: what it counted, not what it holds."""
    return Snapshot(
        tiers={
            name: replace(
                counters,
                capacity_bytes=0,
                used_bytes=0,
                pages=0,
                page_bytes=0,
                raw_bytes=0,
                variants={},
                policy="",
                loads_s=deque(maxlen=LATENCY_SAMPLES),
            )
            for name, counters in snapshot.tiers.items()
        },
        totals=replace(snapshot.totals, used_page_tokens=0, held_page_tokens=0),
        fetches=replace(snapshot.fetches, failed_pages=dict(snapshot.fetches.failed_pages)),
        bad_messages=snapshot.bad_messages,
    )


def has_restarted(before: Snapshot, now: Snapshot) -> bool:
    """Whether any of an owner's counters fell, which they do only when it restarts."""
    old, new = lasting(before), lasting(now)
    if new.bad_messages < old.bad_messages:
        return True
    if _fell(old.totals, new.totals) or _fell(old.fetches, new.fetches):
        return True
    return any(_fell(counters, new.tiers.get(name, TierCounters())) for name, counters in old.tiers.items())


Counters = TypeVar("Counters", TierCounters, RequestTotals, FetchCounters)


def _fell(old: Counters, new: Counters) -> bool:
    return any(
        getattr(new, f.name) < getattr(old, f.name)
        for f in fields(old)
        if f.name not in ("loads_s", "variants", "policy", "failed_pages")
    )


class Ledger:
    """Adds up owners' numbers such that no counter of the sum falls when an owner ends or restarts.

    It knows of an owner what the latest snapshot said: what an owner counted after that and before its end is
    missing from the sum, and so are the old counts of one that has restarted and has counted past them since.
    Snapshots of one owner must be recorded in the order in which they were made. Holds one snapshot per living owner.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Snapshot] = {}
        self._gone = Snapshot()

    def record(self, owner: str, snapshot: Snapshot) -> None:
        """What the owner counts now."""
        before = self._latest.get(owner)
        if before is not None and has_restarted(before, snapshot):
            self._keep(before)
        self._latest[owner] = snapshot

    def lose(self, owner: str) -> None:
        """The owner is gone: what it held counts no more, what it counted stays. Idempotent."""
        before = self._latest.pop(owner, None)
        if before is not None:
            self._keep(before)

    def total(self) -> Snapshot:
        """The sum over all owners there are and were."""
        return merge([self._gone, *self._latest.values()])

    def _keep(self, snapshot: Snapshot) -> None:
        self._gone = merge([self._gone, lasting(snapshot)])


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """The object of `kvtier stats --json`: one object per tier, and the totals beside them."""
    full = merge([snapshot])
    return {
        "tiers": {name.value: full.tiers[name].to_json() for name in TierName},
        **full.totals.to_json(),
        "bad_messages": full.bad_messages,
    }
