"""What a worker knows of a request and of each of its sequences, and the transitions between their states. Pure.

A sequence is a list of known tokens of which the first `computed` have keys and values in L1 pages. All work is the
same: compute tokens [computed, length), and when none are left, sample one more. Prefill, decode, and recompute after
a preemption differ only in how many tokens that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tier.l1.prefix import Path
from kvtier.tier.pages.identity import TokenIds, content_digest, page_keys
from kvtier.tier.pages.page import PageFormat, PageKey, RootKey, TierName
from kvtier.tier.pages.recipe import ChainNeeds
from kvtier.tier.policy.base import Kind, Use
from kvtier.tier.protocol.messages import Missing, PageRef
from kvtier.workers.requests.api import EngineRequest, FinishReason, PageNote, Timings, Usage

Frames = npt.NDArray[np.int32]  # [pages]
Formats = npt.NDArray[np.uint8]  # [pages], codes of kernels' Format

FIRST_TOKENS = 4096  # room for so many more tokens than the prompt's is made at once; anything alike will do


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
class Namespace:
    """Everything by which a request's pages are found, and what its rows need of them.

    There are one root and one entry of `needs` for each layer group. `tree` names what is cleared together: it changes
    with tenant, roots and each `clear` of the tenant. A lossy request takes pages in `lossy_format` too, also such as
    hang under `other_roots`, those of the exact request.
    """

    roots: tuple[RootKey, ...]
    salt: bytes
    digest: bytes
    tree: RootKey
    needs: tuple[ChainNeeds, ...]
    other_roots: tuple[RootKey, ...] = ()
    lossy_format: PageFormat | None = None

    @property
    def root(self) -> RootKey:
        """The root of the first layer group."""
        return self.roots[0]

    @property
    def is_plain(self) -> bool:
        """All rows attend all pages, which are all alike: a radix tree finds them. The others' lie in a pool."""
        if len(self.needs) > 1:
            return False
        (need,) = self.needs
        return need.recipe.is_uniform and not need.window.tokens and not need.any_variant

    @property
    def is_stream(self) -> bool:
        """Pages that leave the window are of no use to the sequence's model any more, in no layer."""
        return len(self.needs) == 1 and self.needs[0].window.tokens > 0

    def other_format(self, group: int) -> PageFormat | None:
        """The format beside the written one that a group's pages may be in."""
        return self.needs[group].recipe.decayed or self.lossy_format


class EvictedSpan(NamedTuple):
    """Pages [start, end) of a chain left L1 at `evicted_s`; `text` is what the policy thought of them."""

    start: int
    end: int
    evicted_s: float
    text: str


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
        "evicted",
        "first_token_s",
        "hits",
        "load_s",
        "lookups",
        "misses",
        "namespace",
        "number",
        "preemptions",
        "prompt_tokens",
        "sequences",
        "spec",
        "started_s",
        "submitted_s",
        "submitted_wall_s",
        "turn",
        "unfinished",
        "usage",
    )

    def __init__(
        self,
        spec: EngineRequest,
        number: int,
        namespace: Namespace,
        now: float,
        wall_now: float,
        turn: int = 0,
    ) -> None:
        self.spec = spec
        self.number = number
        self.namespace = namespace
        self.prompt_tokens = len(spec.token_ids)
        self.hits: list[Hit] = []
        self.lookups: dict[TierName, int] = {}  # prompt tokens looked for in each tier
        self.misses: list[tuple[int, str, str]] = []  # from which token on, reason, detail
        self.accounted = 0  # tokens that have had keys and values once
        self.usage: Usage | None = None  # from the first token on
        self.sequences: list[Sequence] = []
        self.unfinished = spec.sampling.n - len(spec.ended)
        self.preemptions = 0
        self.submitted_s = now
        self.submitted_wall_s = wall_now
        self.admitted_s: float | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.load_s = 0.0
        self.turn = turn  # of its session, from 1; 0: not told
        self.evicted: list[EvictedSpan] = []  # of its prompt's pages, those that had been in L1 before

    def looked(self, tier: TierName, tokens: int) -> None:
        """Count a lookup of `tokens` prompt tokens in a tier, once per request and tier."""
        self.lookups.setdefault(tier, max(0, min(tokens, self.prompt_tokens)))

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

    def new_pages(self, pages: int, page_tokens: int) -> int:
        """How many of a chain's first pages weren't found in any tier."""
        return max(0, pages - sum(hit.end - hit.start for hit in self.hits) // page_tokens)

    def created_pages(self, page_tokens: int) -> int:
        """New pages that its prompt brings, at least one."""
        return max(1, self.new_pages(self.prompt_tokens // page_tokens, page_tokens))

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


class LoadChain(NamedTuple):
    """One layer group's part of a load: the keys of its pages from the load's `first_page` on.

    Under `other_keys`, where there are any, the same tokens' pages may be found too. `held` has the recipe.HAS_ bits of
    what L1 holds of each page for this load.
    """

    keys: list[PageKey]
    other_keys: list[PageKey]
    held: bytes
    needs: ChainNeeds
    lossy_format: PageFormat | None


@dataclass(slots=True)
class Load:
    """Pages of one sequence that come up from lower tiers; those before `first_page` are in L1.

    The prefix will have `wanted` pages once all that are `awaited` have come. The last page may be that of the last
    known tokens, not full (`tail_tokens`), or, of a plain sequence, hold the last known token, which is computed anyhow.
    """

    lease: str
    first_page: int
    chains: list[LoadChain]
    last_position: int
    started_s: float
    deadline_s: float
    tail_tokens: int = 0  # filled tokens of the last page, when it is a preempted sequence's partial one
    wanted: int = field(init=False)
    located: bool = False
    missing: Missing | None = None
    awaited: set[PageRef] = field(default_factory=set)
    came: dict[PageRef, TierName] = field(default_factory=dict)
    # What a pooled sequence holds for its load, by (group, page, format): cached pages, and frames being filled.
    parts: dict[tuple[int, int, PageFormat], int] = field(default_factory=dict)
    kept: frozenset[PageRef] = frozenset()  # those of them that L1 had
    placed: dict[PageRef, PageFormat] = field(default_factory=dict)  # the format that a page comes in

    def __post_init__(self) -> None:
        self.wanted = self.pages

    @property
    def pages(self) -> int:
        """Pages of the longest prefix that is asked for."""
        return self.first_page + len(self.chains[0].keys)

    @property
    def is_complete(self) -> bool:
        """Nothing more to wait for."""
        return self.located and not self.awaited

    def wants(self, ref: PageRef) -> bool:
        """The page is still waited for."""
        return ref in self.awaited

    def locate(self, pages: int, refs: Iterable[PageRef], missing: Missing | None) -> None:
        """The node has answered: a prefix of so many pages, for which these are there or coming."""
        self.located = True
        self.awaited = {(group, page) for group, page in refs}
        self.cut(pages, missing)

    def arrive(self, ref: PageRef, tier: TierName) -> None:
        """The page is in its frame, verified."""
        self.came[ref] = tier
        self.awaited.discard(ref)

    def cut(self, page: int, missing: Missing | None) -> None:
        """Pages from this one on will not be used."""
        if page < self.wanted:
            self.wanted = max(page, self.first_page)
            self.missing = missing
            self.awaited = {ref for ref in self.awaited if ref[1] < page}

    def give_up(self, reason: str, detail: str) -> None:
        """Wait no longer: what has come in one piece from the beginning must do."""
        first = (
            min((page for _, page in self.awaited), default=self.wanted) if self.located else self.first_page
        )
        self.located = True
        self.cut(first, Missing(first, reason, detail))


class PageRun(NamedTuple):
    """A sequence's pages of one layer group as attention wants them; fields as in the kernels' PlanSequence."""

    frames: Frames
    formats: Formats | None
    sink_pages: int
    first_page: int


class SequencePages:
    """One layer group's pages of a sequence, by page number. Owned by the step loop.

    It holds pages [0, sink_pages) and [first_page, num_pages), or all of [0, num_pages) while that is less than
    sink_pages; what stands in `frames` and `formats` for others means nothing. `formats` None: all as they are written.
    Pages before `settled` are in the format that rows at the sequence's position want.
    """

    __slots__ = ("first_page", "formats", "frames", "keys", "num_pages", "root", "settled", "sink_pages")

    def __init__(self, root: RootKey, pages: int, sink_pages: int, is_plain: bool) -> None:
        self.root = root
        self.keys: list[PageKey] = []  # of its full pages, as far as anyone has asked
        self.frames: Frames = np.zeros(pages, np.int32)
        self.formats: Formats | None = None if is_plain else np.zeros(pages, np.uint8)
        self.sink_pages = sink_pages
        self.empty()

    def empty(self) -> None:
        """It holds nothing."""
        self.num_pages = self.settled = 0
        self.first_page = self.sink_pages

    def held(self, first: int = 0, end: int | None = None) -> Iterable[int]:
        """The numbers of the pages it holds, from `first` to before `end`, in order."""
        end = self.num_pages if end is None else min(end, self.num_pages)
        return chain(range(first, min(self.sink_pages, end)), range(max(first, self.first_page), end))

    @property
    def num_held(self) -> int:
        """How many pages it holds."""
        return min(self.sink_pages, self.num_pages) + max(0, self.num_pages - self.first_page)

    def reserve(self, pages: int) -> None:
        """Make room for page numbers below `pages`."""
        room = len(self.frames)
        if pages > room:
            more = max(pages, 2 * room) - room
            self.frames = np.concatenate((self.frames, np.zeros(more, np.int32)))
            if self.formats is not None:
                self.formats = np.concatenate((self.formats, np.zeros(more, np.uint8)))

    def put(self, page: int, frame: int, code: int) -> None:
        """The page lies in this frame, in the format of this code."""
        assert self.formats is not None
        self.frames[page] = frame
        self.formats[page] = code

    def follow(self, moved: Mapping[int, int]) -> None:
        """Pages have moved to other frames."""
        low, high = min(moved), max(moved)
        for part in (
            self.frames[: min(self.sink_pages, self.num_pages)],
            self.frames[self.first_page : self.num_pages],
        ):
            for i in np.flatnonzero((low <= part) & (part <= high)).tolist():
                part[i] = moved.get(int(part[i]), part[i])

    def run(self, pages: int) -> PageRun:
        """What rows whose context ends in page `pages - 1` attend. O(window)."""
        sinks, first = self.sink_pages, self.first_page
        if first == sinks or pages <= sinks:
            return PageRun(self.frames[:pages], None if self.formats is None else self.formats[:pages], 0, 0)
        assert self.formats is not None
        frames = np.concatenate((self.frames[:sinks], self.frames[first:pages]))
        formats = np.concatenate((self.formats[:sinks], self.formats[first:pages]))
        return PageRun(frames, formats, sinks, first)


class Sequence:
    """One of a request's n sequences: its tokens, its pages in each layer group, and how far it is.

    The first `num_cached` pages of each group have been given to the cache: a plain sequence's are kept by `path`, the
    others by holding their frames. Owned by the step loop; the page table changes pages, workers/scheduling/scheduler.py the state.
    """

    __slots__ = (
        "blocked_on",
        "claimed",
        "computed",
        "copies",
        "final_tokens",
        "groups",
        "head_tokens",
        "index",
        "is_plain",
        "last_token_s",
        "lease",
        "length",
        "load",
        "max_length",
        "num_cached",
        "number",
        "path",
        "preemptions",
        "request",
        "saved",
        "state",
        "stop_ids",
        "stored_pages",
        "tokens",
        "tree",
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
        namespace = request.namespace
        self.max_length = min(request.prompt_tokens + sampling.max_tokens, max_context)
        self.request = request
        self.index = index
        self.number = request.number + index  # order of arrival: lower is older
        self.state = SequenceState.WAITING
        given = request.spec.given(index)  # elsewhere: they are computed with the prompt
        self.length = request.prompt_tokens + len(given)
        room = min(self.max_length, self.length + FIRST_TOKENS)
        self.tokens: TokenIds = np.empty(room, np.int32)
        self.tokens[: request.prompt_tokens] = request.spec.token_ids
        self.tokens[request.prompt_tokens : self.length] = given
        self.computed = 0
        # The last token sampled is never computed, so it needs no place in a page.
        self.final_tokens = max(request.prompt_tokens, self.max_length - 1)
        self.is_plain = namespace.is_plain
        self.groups = [
            SequencePages(root, -(-room // page_tokens), need.window.sink_pages(page_tokens), self.is_plain)
            for root, need in zip(namespace.roots, namespace.needs, strict=True)
        ]
        self.num_cached = 0
        self.stored_pages = 0  # the first so many pages of its chain are known to the node
        self.head_tokens = 0  # of the page behind the cached ones, that L1 could give when it was last asked
        self.path: Path | None = None
        self.tree = namespace.tree  # where its pages go, as of its last admission
        self.stop_ids = frozenset(sampling.stop_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        )
        self.load: Load | None = None
        self.claimed = range(0)  # full pages of the prompt that others may wait for
        self.blocked_on: PageKey | None = None
        self.saved = 0  # tokens whose pages a preemption saw to, the partial tail included
        self.lease: str | None = None  # holds pages in L3 over a preemption
        self.copies = 0  # of its pages to L3 in flight
        self.preemptions = 0
        self.last_token_s = request.submitted_s

    @property
    def is_last(self) -> bool:
        """All its siblings are over."""
        others = (seq for seq in self.request.sequences if seq is not self)
        return all(seq.state is SequenceState.FINISHED for seq in others)

    @property
    def pending(self) -> int:
        """Known tokens whose keys and values aren't in pages yet."""
        return self.length - self.computed

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled so far, those given elsewhere among them."""
        return self.length - self.request.prompt_tokens

    @property
    def tells_prompt(self) -> bool:
        """The logits of its next rows are wanted: the log probabilities of the prompt's tokens are asked for."""
        request = self.request
        return (
            request.spec.sampling.prompt_logprobs > 0
            and not request.spec.is_resumed
            and self.computed + 1 < request.prompt_tokens
            and request.usage is None
        )

    @property
    def remaining_tokens(self) -> int:
        """Tokens it may still sample."""
        return self.max_length - self.length

    def kind(self, reason: FinishReason) -> Kind:
        """What kind of end it comes to, over for this reason: its last tokens tell."""
        if reason is FinishReason.PREFILLED:
            return Kind.UNKNOWN
        if reason is not FinishReason.STOP:
            return Kind.OTHER
        return Kind.TOOL if self._has_called_a_tool() else Kind.TURN

    def use(self, kind: Kind, page_tokens: int) -> Use:
        """What it leaves behind, over with this kind of end."""
        spec = self.request.spec
        pages, load = self.computed // page_tokens, self.load
        if load is not None:
            pages = load.pages - bool(load.tail_tokens)
        return Use(
            pages=pages,
            new_pages=self.request.new_pages(pages, page_tokens),
            output_tokens=self.completion_tokens,
            kind=kind,
            turn=self.request.turn,
            session=spec.session,
            closed=spec.session_closed,
            open=spec.session_open,
        )

    def _has_called_a_tool(self) -> bool:
        """Its last tokens end a call: then at most the end of all calls, a newline, and the end of the answer follow."""
        begin = max(self.request.prompt_tokens, self.length - 4)
        return not set(self.request.spec.tool_stop_ids).isdisjoint(self.tokens[begin : self.length].tolist())

    def use_so_far(self, page_tokens: int) -> Use:
        """What it leaves behind where it is preempted, or goes on elsewhere: that is no kind of end."""
        return replace(self.use(Kind.UNKNOWN, page_tokens), closed=False, open=True)

    @property
    def num_pages(self) -> int:
        """Pages that it has room in, counted from its beginning."""
        return min(pages.num_pages for pages in self.groups)

    @property
    def num_held(self) -> int:
        """Pages that it holds, of all layer groups."""
        return sum(pages.num_held for pages in self.groups)

    def enter(self, state: SequenceState) -> None:
        """Change state; only along the allowed transitions."""
        assert state in _ALLOWED[self.state], f"sequence {self.number}: {self.state} -> {state}"
        self.state = state

    def append(self, token: int, now: float) -> None:
        """A token was sampled."""
        if self.length == len(self.tokens):
            room = min(self.max_length, 2 * self.length)
            self.tokens = np.concatenate((self.tokens, np.empty(room - self.length, np.int32)))
        self.tokens[self.length] = token
        self.length += 1
        self.last_token_s = now

    def ends_with(self, token: int) -> FinishReason | None:
        """Whether the sequence is over now that `token` is its last one."""
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.length == self.max_length:
            return FinishReason.LENGTH
        return None

    def page_keys(self, pages: int, page_tokens: int, group: int = 0) -> list[PageKey]:
        """Keys of a group's first `pages` full pages; each is hashed once, as the sequence grows."""
        return self._keys(pages, page_tokens, group)[:pages]

    def used_keys(self, pages: int, page_tokens: int) -> list[PageKey]:
        """Keys of the first group's first `pages` full pages; of a stream's, which are without end, those it holds."""
        keys = self.page_keys(pages, page_tokens)
        if not self.request.namespace.is_stream:
            return keys
        return [keys[page] for page in self.groups[0].held(0, pages)]

    def page_key(self, page: int, page_tokens: int, group: int = 0) -> PageKey:
        """Key of a group's full page."""
        return self._keys(page + 1, page_tokens, group)[page]

    def parent_key(self, page: int, page_tokens: int, group: int = 0) -> bytes:
        """Key of the page before, or the group's root."""
        return self.page_key(page - 1, page_tokens, group) if page else self.groups[group].root

    def tail_key(self, tokens: int, page_tokens: int, group: int = 0) -> PageKey:
        """Key of the group's partial page that ends at `tokens`."""
        full = tokens // page_tokens
        parent = PageKey(self.parent_key(full, page_tokens, group))
        tail = self.tokens[full * page_tokens : tokens]
        assert 0 < len(tail) < page_tokens
        salt = self.request.namespace.salt
        (key,) = page_keys(parent, salt, tail, page_tokens, include_partial=True)
        return key

    def keys_under(self, root: RootKey, tokens: int, page_tokens: int) -> list[PageKey]:
        """Keys that its first so many tokens have under another root, a partial page's too."""
        salt = self.request.namespace.salt
        return page_keys(root, salt, self.tokens[:tokens], page_tokens, include_partial=True)

    def content(self) -> bytes:
        """What its tokens are recognised by whatever their identity."""
        return content_digest(self.request.namespace.salt, self.tokens[: self.length])

    def _keys(self, pages: int, page_tokens: int, group: int) -> list[PageKey]:
        keys = self.groups[group].keys
        known = len(keys)
        if pages > known:
            parent = keys[-1] if keys else self.groups[group].root
            tokens = self.tokens[known * page_tokens : pages * page_tokens]
            keys += page_keys(parent, self.request.namespace.salt, tokens, page_tokens)
        return keys
