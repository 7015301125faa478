"""What a worker knows of a request and of each of its sequences, and the transitions between their states. Pure.

A sequence is a list of known tokens of which the first `computed` have keys and values in L1 pages. All work is the
same: compute tokens [computed, length), and when none are left, sample one more. Prefill, decode, and recompute after
a preemption differ only in how many tokens that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.tier.identity import TokenIds, page_keys
from kvtier.tier.messages import Missing
from kvtier.tier.page import PageKey, RootKey, TierName
from kvtier.tier.prefix import Path
from kvtier.workers.api import EngineRequest, FinishReason, PageNote, Timings, Usage


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # in the queue, holds nothing
    LOADING = "loading"  # holds frames that pages from lower tiers are being copied into
    RUNNING = "running"  # gets rows in steps
    PREEMPTED = "preempted"  # in the queue again; its pages are in lower tiers, or to be recomputed
    FINISHED = "finished"


_ALLOWED: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset((SequenceState.LOADING, SequenceState.RUNNING, SequenceState.FINISHED)),
    SequenceState.LOADING: frozenset((SequenceState.RUNNING, SequenceState.FINISHED)),
    SequenceState.RUNNING: frozenset((SequenceState.PREEMPTED, SequenceState.FINISHED)),
    SequenceState.PREEMPTED: frozenset(
        (SequenceState.LOADING, SequenceState.RUNNING, SequenceState.FINISHED)
    ),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What keeps a request's pages apart from those of other tenants and other models.

    `tree` names the prefix tree its pages live in: it changes with tenant, root and each `clear` of the tenant.
    """

    root: RootKey
    salt: bytes
    digest: bytes
    tree: RootKey


@dataclass(frozen=True, slots=True)
class Hit:
    """Prompt tokens [start, end) that came from a tier."""

    start: int
    end: int
    tier: TierName


class Request:
    """One request: its prompt, its accounting, its sequences. Owned by the worker's step loop.

    Usage law: every prompt token is credited to at most one tier, the first time it gets keys and values; the rest is
    computed. What preemption brings back or recomputes afterwards isn't counted again.
    """

    __slots__ = (
        "accounted",
        "admitted_s",
        "first_token_s",
        "hits",
        "load_s",
        "lookups",
        "misses",
        "number",
        "preemptions",
        "prompt_tokens",
        "sequences",
        "spec",
        "started_s",
        "submitted_s",
        "submitted_wall_s",
        "tenancy",
        "unfinished",
        "usage",
    )

    def __init__(
        self, spec: EngineRequest, number: int, tenancy: Tenancy, now: float, wall_now: float
    ) -> None:
        self.spec = spec
        self.number = number
        self.tenancy = tenancy
        self.prompt_tokens = len(spec.token_ids)
        self.hits: list[Hit] = []
        self.lookups: dict[TierName, int] = {}  # prompt tokens looked for in each tier
        self.misses: list[tuple[int, str, str]] = []  # from which token on, reason, detail
        self.accounted = 0  # tokens that have had keys and values once
        self.usage: Usage | None = None  # from the first token on
        self.sequences: list[Sequence] = []
        self.unfinished = spec.sampling.n
        self.preemptions = 0
        self.submitted_s = now
        self.submitted_wall_s = wall_now
        self.admitted_s: float | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.load_s = 0.0

    def looked(self, tier: TierName, tokens: int) -> None:
        """Count a lookup of `tokens` prompt tokens in a tier, once per request and tier."""
        self.lookups.setdefault(tier, min(tokens, self.prompt_tokens))

    def credit(self, start: int, end: int, tier: TierName) -> None:
        """Tokens [start, end) were found in `tier`; those that were accounted for before don't count again."""
        start, end = max(start, self.accounted), min(end, self.prompt_tokens)
        if end <= start:
            return
        self.accounted = end
        last = self.hits[-1] if self.hits else None
        if last is not None and last.tier is tier and last.end == start:
            self.hits[-1] = Hit(last.start, end, tier)
        else:
            self.hits.append(Hit(start, end, tier))

    def missed(self, start: int, reason: str, detail: str) -> None:
        """Remember, for `explain`, why the tokens from `start` on weren't found."""
        if len(self.misses) < 16:  # one per admission; a request preempted more often than that says no more
            self.misses.append((start, reason, detail))

    def cached_tokens(self) -> dict[TierName, int]:
        """Prompt tokens found, by tier."""
        found = dict.fromkeys(TierName, 0)
        for hit in self.hits:
            found[hit.tier] += hit.end - hit.start
        return found

    def count_usage(self) -> Usage:
        """Close the account, at the first token."""
        cached = self.cached_tokens()
        self.usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=0,
            computed_tokens=self.prompt_tokens - sum(cached.values()),
            cached_tokens={tier.value: tokens for tier, tokens in cached.items()},
        )
        return self.usage

    def usage_of(self, completion_tokens: int) -> Usage | None:
        """The prompt's usage with one sequence's completion; None before the first token."""
        if self.usage is None:
            return None
        return Usage(
            self.usage.prompt_tokens, completion_tokens, self.usage.computed_tokens, self.usage.cached_tokens
        )

    def notes(self, page_tokens: int) -> tuple[PageNote, ...]:
        """Which stretch of the prompt came from where, and why the rest was computed."""
        notes: list[PageNote] = []
        at = 0
        for hit in self.hits:
            if hit.start > at:
                notes.extend(self._computed(at, hit.start, page_tokens))
            notes.append(PageNote(hit.start, hit.end, hit.tier.value))
            at = hit.end
        if at < self.prompt_tokens:
            notes.extend(self._computed(at, self.prompt_tokens, page_tokens))
        return tuple(notes)

    def _computed(self, start: int, end: int, page_tokens: int) -> list[PageNote]:
        """Notes of one computed stretch: whole pages with the reason they were missed, then the prompt's tail."""
        if not self.spec.use_cache:
            return [PageNote(start, end, "computed", "cache_off", "the request asked for no cache")]
        tail = max(start, (self.prompt_tokens - 1) // page_tokens * page_tokens)
        notes: list[PageNote] = []
        if start < min(tail, end):
            known = [miss for miss in self.misses if miss[0] <= start] or self.misses[:1]
            reason, detail = (known[-1][1], known[-1][2]) if known else ("never_stored", "")
            notes.append(PageNote(start, min(tail, end), "computed", reason, detail))
        if end > tail:
            detail = "tokens behind the last whole page; the last token is always computed"
            notes.append(PageNote(tail, end, "computed", "partial_page", detail))
        return notes

    def timings(self, now: float) -> Timings:
        """Milliseconds of each stage so far."""
        admitted = self.admitted_s if self.admitted_s is not None else now
        first = self.first_token_s if self.first_token_s is not None else now
        started = self.started_s if self.started_s is not None else first
        before = self.submitted_wall_s - self.spec.arrived_s if self.spec.arrived_s else 0.0
        return Timings(
            queue=1e3 * (admitted - self.submitted_s),
            load=1e3 * self.load_s,
            prefill=1e3 * max(0.0, first - started),
            ttft=1e3 * (first - self.submitted_s + max(0.0, before)),
            decode=1e3 * (now - first),
        )


@dataclass(slots=True)
class Load:
    """Pages of one sequence that come up from lower tiers: page `first_page + i` of the sequence has key `keys[i]`.

    The pages usable in the end are the first `wanted` ones, once all of those have come. The last key may be that of
    the page with the last known token, which is computed anyhow: the page then gives its other tokens.
    """

    lease: str
    first_page: int
    keys: list[PageKey]
    started_s: float
    deadline_s: float
    tail_tokens: int = 0  # filled tokens of the last page, when it is a preempted sequence's partial one
    wanted: int = field(init=False)
    located: bool = False
    missing: Missing | None = None
    came: list[TierName | None] = field(init=False)
    contiguous: int = 0

    def __post_init__(self) -> None:
        self.wanted = len(self.keys)
        self.came = [None] * len(self.keys)

    def arrive(self, index: int, tier: TierName) -> None:
        """Page `index` is in its frame, verified."""
        self.came[index] = tier
        while self.contiguous < len(self.came) and self.came[self.contiguous] is not None:
            self.contiguous += 1

    def cut(self, index: int, missing: Missing | None) -> None:
        """Pages from `index` on will not be used."""
        if index < self.wanted:
            self.wanted = index
            self.missing = missing

    @property
    def is_complete(self) -> bool:
        """Nothing more to wait for."""
        return self.located and self.contiguous >= self.wanted


class Sequence:
    """One of a request's n sequences: its tokens, the frames of its pages, and how far it is.

    `frames[:num_pages]` are its pages' L1 frames in order. The first `num_cached` of them are the prefix index's, kept
    by `path`; the others are its own. Owned by the step loop; page_table.py changes frames, scheduler.py the state.
    """

    __slots__ = (
        "blocked_on",
        "claimed",
        "computed",
        "copies",
        "final_tokens",
        "frames",
        "head_tokens",
        "index",
        "keys",
        "last_token_s",
        "lease",
        "length",
        "load",
        "num_cached",
        "num_pages",
        "number",
        "path",
        "request",
        "saved",
        "state",
        "stop_ids",
        "stored_pages",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        page_tokens: int,
        eos_ids: tuple[int, ...],
        max_context: int,
    ) -> None:
        sampling = request.spec.sampling
        room = min(request.prompt_tokens + sampling.max_tokens, max_context)
        self.request = request
        self.index = index
        self.number = request.number + index  # order of arrival: lower is older
        self.state = SequenceState.WAITING
        self.tokens: TokenIds = np.empty(room, np.int32)
        self.tokens[: request.prompt_tokens] = request.spec.token_ids
        self.length = request.prompt_tokens
        self.computed = 0
        # The last token sampled is never computed, so it needs no place in a page.
        self.final_tokens = max(request.prompt_tokens, room - 1)
        self.frames: npt.NDArray[np.int32] = np.zeros(-(-self.final_tokens // page_tokens), np.int32)
        self.num_pages = 0
        self.num_cached = 0
        self.stored_pages = 0  # the first so many pages of its chain are known to the node
        self.head_tokens = 0  # of the page behind the cached ones, that L1 could give when it was last asked
        self.path: Path | None = None
        self.keys: list[PageKey] = []  # of its full pages, as far as anyone has asked
        self.stop_ids = frozenset(sampling.stop_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        )
        self.load: Load | None = None
        self.claimed = range(0)  # full pages of the prompt that others may wait for
        self.blocked_on: PageKey | None = None
        self.saved = 0  # tokens whose pages a preemption saw to, the partial tail included
        self.lease: str | None = None  # holds pages in L3 over a preemption
        self.copies = 0  # of its pages to L3 in flight
        self.last_token_s = request.submitted_s

    @property
    def pending(self) -> int:
        """Known tokens whose keys and values aren't in pages yet."""
        return self.length - self.computed

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.length - self.request.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens it may still sample."""
        return len(self.tokens) - self.length

    def enter(self, state: SequenceState) -> None:
        """Change state; only along the allowed transitions."""
        assert state in _ALLOWED[self.state], f"sequence {self.number}: {self.state} -> {state}"
        self.state = state

    def append(self, token: int, now: float) -> None:
        """A token was sampled."""
        self.tokens[self.length] = token
        self.length += 1
        self.last_token_s = now

    def ends_with(self, token: int) -> FinishReason | None:
        """Whether the sequence is over now that `token` is its last one."""
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.length == len(self.tokens):
            return FinishReason.LENGTH
        return None

    def page_keys(self, pages: int, page_tokens: int) -> list[PageKey]:
        """Keys of its first `pages` full pages; each is hashed once, as the sequence grows."""
        known = len(self.keys)
        if pages > known:
            parent = self.keys[-1] if self.keys else self.request.tenancy.root
            tokens = self.tokens[known * page_tokens : pages * page_tokens]
            self.keys += page_keys(parent, self.request.tenancy.salt, tokens, page_tokens)
        return self.keys[:pages]

    def tail_key(self, tokens: int, page_tokens: int) -> PageKey:
        """Key of the partial page that ends at `tokens`."""
        full = tokens // page_tokens
        keys = self.page_keys(full, page_tokens)
        parent = keys[-1] if keys else self.request.tenancy.root
        tail = self.tokens[full * page_tokens : tokens]
        assert 0 < len(tail) < page_tokens
        (key,) = page_keys(parent, self.request.tenancy.salt, tail, page_tokens, include_partial=True)
        return key
