"""Keeps a worker's books: prompt tokens by tier, requests, and what `explain` tells of the latest ones.

Usage law: over all requests, hit tokens by tier + computed tokens == prompt tokens, each request counted at its first
token and never again: one that is resumed was counted where it gave that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kvtier.tier.pages.page import TierName
from kvtier.tier.stats import RequestTotals, TierCounters
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.api import Explanation, PageNote
from kvtier.workers.requests.sequence import Request

EXPLANATIONS = 1024  # of the latest requests


class RequestMetrics:
    """Owned by the step loop. `explanations` holds at most EXPLANATIONS, the oldest go first."""

    def __init__(self, table: PageTable, worker_id: str, *, has_l2: bool = False) -> None:
        self.totals = RequestTotals()
        # What the requests looked for and found in each tier; the tiers' own numbers are their owners'.
        self.tiers = {tier: TierCounters() for tier in TierName}
        self.explanations: OrderedDict[str, Explanation] = OrderedDict()
        self._table = table
        self._worker_id = worker_id
        self._has_l2 = has_l2

    def count(self, request: Request, now: float) -> None:
        """The request's first token here: its prompt counts, now and never again."""
        request.first_token_s = now
        usage = request.usage or request.count_usage()
        if request.spec.is_resumed:
            self._remember(request, now)
            return
        totals = self.totals
        totals.requests += 1
        totals.prompt_tokens += usage.prompt_tokens
        totals.computed_tokens += usage.computed_tokens
        totals.cached_tokens += usage.prompt_tokens - usage.computed_tokens
        hits = request.cached_tokens()
        if TierName.HOST in request.lookups:
            if self._has_l2 or hits[TierName.PEER]:
                request.looked(TierName.PEER, request.lookups[TierName.HOST])
                request.lookups[TierName.HOST] = max(0, request.lookups[TierName.HOST] - hits[TierName.PEER])
            request.looked(TierName.SSD, request.lookups[TierName.HOST] - hits[TierName.HOST])
            if request.spec.remotes:
                request.looked(TierName.REMOTE, request.lookups[TierName.SSD] - hits[TierName.SSD])
        for tier, counters in self.tiers.items():
            counters.lookups_tokens += request.lookups.get(tier, 0)
            counters.hit_tokens += hits[tier]
        self._remember(request, now)

    def close(self, request: Request, now: float) -> None:
        """The request is over."""
        if request.usage is None:
            if not request.spec.is_resumed:
                self.totals.aborted_prompt_tokens += request.prompt_tokens
            self._remember(request, now)
            return
        told = self.explanations.get(request.spec.request_id)
        if told is not None:
            tokens = sum(seq.completion_tokens for seq in request.sequences)
            self.explanations[request.spec.request_id] = replace(
                told, usage=request.usage_of(tokens), preemptions=request.preemptions
            )

    def explanation(self, request_id: str) -> Explanation | None:
        """Of the request that has this id here; else of the latest that a client gave it, as gateways name them: ID#ANYTHING."""
        told = self.explanations.get(request_id)
        if told is not None:
            return told
        names = (
            name for name in reversed(self.explanations) if name.rpartition("#")[:2] == (request_id, "#")
        )
        return self.explanations.get(next(names, ""))

    def check(self) -> None:
        """The usage law; AssertionError where it doesn't hold."""
        totals = self.totals
        assert totals.cached_tokens == sum(c.hit_tokens for c in self.tiers.values()), "hits by tier"
        assert totals.cached_tokens + totals.computed_tokens == totals.prompt_tokens, "the usage law"
        assert len(self.explanations) <= EXPLANATIONS

    def _remember(self, request: Request, now: float) -> None:
        request_id = request.spec.request_id
        self.explanations.pop(request_id, None)
        self.explanations[request_id] = Explanation(
            request_id=request_id,
            tenant=request.spec.tenant,
            worker_id=self._worker_id,
            prompt_tokens=request.prompt_tokens,
            notes=tuple(self._known(request, note, now) for note in request.notes(self._table.page_tokens)),
            usage=request.usage,
            preemptions=request.preemptions,
        )
        if len(self.explanations) > EXPLANATIONS:
            self.explanations.popitem(last=False)

    def _known(self, request: Request, note: PageNote, now: float) -> PageNote:
        """The note, with what L1 itself remembers of a page that nothing else knows."""
        if not request.spec.use_cache or note.reason not in ("never_stored", "cache_off"):
            return note
        page = note.start // self._table.page_tokens
        for stretch in request.evicted:
            if stretch.start <= page < stretch.end:
                ago = f"{now - stretch.evicted_s:.1f} s ago"
                detail = f"from L1 by {stretch.text}, {ago}; in no tier below"
                return replace(note, reason="evicted", detail=detail)
        return note if note.detail else replace(note, detail="no lower tier was there to ask")
