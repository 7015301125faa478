"""Runs a scheduler the way a worker does, over an L1 that knows which token's keys and values lie where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from policy_kit import Strict

from kvtier.tier.pages.identity import page_keys
from kvtier.tier.pages.page import PageFormat, PageKey, RootKey, TierName
from kvtier.tier.pages.recipe import HAS_DECAYED, HAS_WRITTEN, ChainNeeds, Recipe, longest_hit
from kvtier.tier.policy.base import Policy, PolicySettings, ScoreWeights
from kvtier.tier.policy.registry import make_policy
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.protocol.messages import Missing, PageRef
from kvtier.workers.models.formats import FORMAT_CODES
from kvtier.workers.paging.frames import Convert, CopyHead, Move, Op, PageRecord, SaveState
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.api import EngineRequest, FinishReason, SamplingParams
from kvtier.workers.requests.sequence import Load, Namespace, Request, Sequence, SequenceState
from kvtier.workers.scheduling.scheduler import PREEMPTION, SPARED_AFTER, DemotedPage, Row, Scheduler, Step

VOCAB = 50
LONGEST = 1 << 24
RAW = PageFormat.FP32
PLAIN = (ChainNeeds(Recipe(RAW)),)
ONE_SIZE: tuple[Mapping[PageFormat, int], ...] = ({RAW: 1},)
ENOUGH_SLOTS = 100
TENANT = b"t" * 16

# What a token's keys and values depend on: the root they hang under, and all tokens up to it.
Content = tuple[bytes, int]


@dataclass
class Page:
    """What lies in a frame: a format, and by token what its numbers depend on."""

    group: int
    format: PageFormat
    tokens: list[Content | None]

    def copy(self) -> Page:
        return Page(self.group, self.format, list(self.tokens))


@dataclass
class Saving:
    """A page on its way to L3: of a preempted sequence, or written through."""

    frame: int
    key: PageKey
    page: Page
    seq: Sequence | None
    record: PageRecord | None


@dataclass
class Coming:
    """A page on its way up into a frame."""

    load: Load
    seq: Sequence
    ref: PageRef
    frame: int
    page: Page


@dataclass
class Memory:
    """The arena's bytes: a page that another one was written over isn't there any more."""

    pages: dict[int, Page] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)  # unit -> frame of the page that lies there

    def write(self, frame: int, units: int, page: Page) -> None:
        for other in {self.owner[unit] for unit in range(frame, frame + units) if unit in self.owner}:
            self.owner = {unit: owner for unit, owner in self.owner.items() if owner != other}
            del self.pages[other]
        self.owner.update(dict.fromkeys(range(frame, frame + units), frame))
        self.pages[frame] = page

    def read(self, frame: int) -> Page:
        return self.pages[frame]


@dataclass
class Machine:
    """A worker without model, with everything that takes time taking a random number of steps.

    `pages` are the bytes of a page by format, by layer group. A node, where there is one, remembers pages by key and
    format. `faults` is the chance that it, or a copy, fails.
    """

    capacity: int
    page_tokens: int
    max_batch_tokens: int
    max_sequences: int
    rng: Random
    has_node: bool = True
    slots: int = 8
    unit_bytes: int = 1
    pages: tuple[Mapping[PageFormat, int], ...] = ONE_SIZE
    faults: float = 0.0
    shares: Mapping[bytes, float] = field(default_factory=dict)  # by digest of a tenant
    margin: int = 0  # bytes; above 0 pages are saved when they are about to leave
    rvi: bool = False
    settings: PolicySettings | None = None  # of the policy, where it is one of those that workers have
    weights: ScoreWeights = PREEMPTION
    policy: Policy = field(init=False)
    table: PageTable = field(init=False)
    scheduler: Scheduler = field(init=False)
    memory: Memory = field(default_factory=Memory)
    node: dict[tuple[PageKey, PageFormat], Page] = field(default_factory=dict)
    saving: list[Saving] = field(default_factory=list)
    leaving: list[PageRecord] = field(default_factory=list)  # to be saved before they are evicted
    asked: list[Sequence] = field(default_factory=list)  # LOADING, before the node says what it has
    below: list[tuple[Load, Sequence, PageRef, Page]] = field(default_factory=list)  # leased, not yet copied
    coming: list[Coming] = field(default_factory=list)
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    demoting: Counter[Sequence] = field(default_factory=Counter)  # copies of preempted ones' pages
    now: float = 0.0
    computed_rows: int = 0
    loaded_pages: list[PageRef] = field(default_factory=list)
    tails: dict[Sequence, int] = field(default_factory=dict)  # partial pages that the last preemption saved
    most_held: int = 0
    moves: int = 0

    def __post_init__(self) -> None:
        self.policy = Rvi(PolicySettings(ghosts=4.0)) if self.rvi else Strict()
        if self.settings is not None:
            self.policy = make_policy(self.settings, self.capacity)
        self.table = PageTable(
            self.capacity, self.unit_bytes, self.page_tokens, self.pages, self.policy, self.shares
        )
        self.table.can_save = self.has_node
        self.table.watermark_bytes = self.margin
        self.scheduler = Scheduler(
            self.table,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            load_deadline_s=5.0,
            weights=self.weights,
        )

    # From outside

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        use_cache: bool = True,
        namespace: Namespace | None = None,
    ) -> Request:
        spec = EngineRequest(
            name, "t", tuple(prompt), SamplingParams(max_tokens=max_tokens, n=n), use_cache=use_cache
        )
        number = sum(r.spec.sampling.n for r in self.requests)
        where = namespace or namespace_of("plain", PLAIN)
        request = self.scheduler.submit(
            spec, number, where, LONGEST, submitted_s=self.now, wall_s=0.0, turn=0
        )
        self.requests.append(request)
        return request

    def clear(self, namespace: Namespace) -> Namespace:
        """Clear a tree; running requests of it go on under another."""
        self.table.clear(namespace.tree, self.now)
        fresh = replace(namespace, tree=RootKey(self.rng.randbytes(32)))
        for request in self.requests:
            going = [seq.number for seq in request.sequences if seq.state is not SequenceState.FINISHED]
            if request.namespace.tree == namespace.tree and going:
                request.namespace = fresh
        return fresh

    # Steps

    def run(self, max_steps: int = 5000) -> None:
        """Until all is done; AssertionError when that takes more steps than it can."""
        for _ in range(max_steps):
            if not self.scheduler.unfinished:
                break
            self.step()
        assert not self.scheduler.unfinished, "sequences starve"
        while self.saving or self.coming:
            self.end_saves(1.0)
            self.end_copies(1.0)
        self.scheduler.check()
        self.check_rows()
        table = self.table
        assert table.limbo == table.copies_in_flight == 0
        used = sum(table.frames.slabs.used.values())
        assert used == sum(table.counts.values()) + len(table.frames.lent)

    def step(self) -> None:
        self.now += 1.0
        self.end_saves(0.5)
        self.answer_some(0.5)
        self.copy_up(0.5)
        self.end_copies(0.5)
        self.expire()
        before = set(self.scheduler.active)
        slots = dict.fromkeys((nbytes for group in self.pages for nbytes in group.values()), self.slots)
        step = self.scheduler.schedule(self.now, can_load=self.has_node, free_slots=slots)
        self.check_bounds(step, slots)
        self.check_fairness(step, before)
        self.do(step.ops)
        for record in step.converted:
            assert not self.table.is_cached(record) or record.made_from
        for demotion in step.demotions:
            for page in demotion.pages:
                self.demote(demotion.seq, page)
            self.tails[demotion.seq] = sum(page.record is None for page in demotion.pages)
        for seq in step.loads:
            assert seq.load is not None
            saved = self.tails.get(seq, 0) == len(seq.groups)
            assert saved or not seq.load.tail_tokens, "a partial page is asked for that nothing saved"
        self.asked += step.loads
        busy = self.saving or self.below or self.coming or self.asked
        assert step.rows or step.ops or step.demotions or busy or self.table.lent_bytes, "nothing can go on"
        self.answer_some(0.2)
        for row in step.rows:
            self.compute(row)
        if step.rows:
            for record in self.scheduler.computed(self.now):
                assert self.table.is_cached(record)
        for row in step.rows:
            if row.samples:
                self.sample(row.seq)
        self.scheduler.check()

    def check_rows(self) -> None:
        """The policy knows each cached page, and each that is remembered, and nothing else."""
        table, policy = self.table, self.policy
        if not isinstance(policy, Strict):
            return
        pooled = [record for record, _ in table.cached() if record.is_pooled]
        others = {record.row: record.depth for record in pooled}
        others |= {ghost.row: policy._runs[ghost.row].depth for ghost in table.ghosts._pages.values()}
        policy.agrees_with(table.index, others)
        rows = {record.row: record.in_use for record in pooled}
        rows |= {ghost.row: ghost.in_use for ghost in table.ghosts._pages.values()}
        assert all(policy.in_use[row] == in_use for row, in_use in rows.items())

    def check_fairness(self, step: Step, before: set[Sequence]) -> None:
        """Who was preempted often gives way only to others like it, and nothing is overtaken who could go on."""
        victims = [demotion.seq for demotion in step.demotions]
        running = [seq for seq in self.scheduler.active if seq.state is SequenceState.RUNNING]
        for i, victim in enumerate(victims):
            others = sorted({*running, *victims[i:]}, key=lambda seq: seq.number)[1:]
            if victim.preemptions > SPARED_AFTER:
                assert all(seq.preemptions >= SPARED_AFTER for seq in others), "a spared one is preempted"
                assert victim is others[-1], "a spared one gives way to a younger one"
        entered = [seq.number for seq in self.scheduler.active if seq not in before]
        for seq in self.scheduler.waiting:
            if seq not in victims and entered and seq.number < max(entered):
                assert seq.copies or seq.blocked_on is not None, "a younger request goes first"

    def check_bounds(self, step: Step, slots: Mapping[int, int]) -> None:
        assert sum(row.length for row in step.rows) <= self.max_batch_tokens
        assert len({id(row.seq) for row in step.rows}) == len(step.rows) <= self.max_sequences
        assert all(row.length > 0 and row.seq.state is SequenceState.RUNNING for row in step.rows)
        saved = [self.pages[p.group][p.format] for demotion in step.demotions for p in demotion.pages]
        assert all(saved.count(nbytes) <= slots[nbytes] for nbytes in slots)

    def units(self, group: int, format: PageFormat) -> int:
        return self.table.size_of(group, format)

    def do(self, ops: Iterable[Op]) -> None:
        memory = self.memory
        for op in ops:
            match op:
                case CopyHead():
                    page = memory.read(op.source)
                    assert (page.group, page.format) == (op.group, op.format)
                    head = page.tokens[: op.tokens] + [None] * (self.page_tokens - op.tokens)
                    memory.write(op.target, self.units(op.group, op.format), Page(op.group, op.format, head))
                case Move():
                    self.moves += 1
                    page = memory.pages.get(op.source)  # a frame that nothing was written to yet moves too
                    if page is not None:
                        memory.write(op.target, op.nbytes // self.unit_bytes, page.copy())
                case Convert():
                    assert len(set(op.targets)) == len(op.targets) == len(op.sources)
                    assert not {*op.sources} & {*op.targets}
                    for page in [memory.read(source) for source in op.sources]:
                        assert (page.group, page.format) == (op.group, op.source_format)
                        assert None not in page.tokens, "a page is converted before it is full"
                    made = [Page(op.group, op.target_format, memory.read(s).tokens) for s in op.sources]
                    for target, page in zip(op.targets, made, strict=True):
                        memory.write(target, self.units(op.group, op.target_format), page.copy())

    def compute(self, row: Row) -> None:
        """Write the rows' places, after checking that all that they attend holds what it should."""
        seq, start, end = row.seq, row.start, row.start + row.length
        prefix = self.contents(seq, end)
        for group, pages in enumerate(seq.groups):
            self.check_pages(seq, group, start, end)
            write = seq.request.namespace.needs[group].recipe.write
            for i in range(start, end):
                frame, place = int(pages.frames[i // self.page_tokens]), i % self.page_tokens
                assert self.table.copies_of(frame) == 0, "written under a copy"
                assert self.table.record(frame) is None, "a cached page is overwritten"
                if place == 0:
                    self.memory.write(
                        frame, self.units(group, write), Page(group, write, [None] * self.page_tokens)
                    )
                page = self.memory.read(frame)
                assert (page.group, page.format) == (group, write)
                page.tokens[place] = (pages.root, prefix[i])
        self.computed_rows += row.length
        self.most_held = max(self.most_held, seq.num_held)

    def check_pages(self, seq: Sequence, group: int, start: int, end: int) -> None:
        """A sequence has exactly what rows [start, end) attend, in the formats that the recipe says."""
        namespace, pages, page_tokens = seq.request.namespace, seq.groups[group], self.page_tokens
        need, window = namespace.needs[group], namespace.needs[group].window
        prefix = self.contents(seq, start)
        num_pages = -(-end // page_tokens)
        held = list(pages.held())
        wanted = [i for i in range(num_pages) if window.needs(i, start, page_tokens)]
        full = start - start % page_tokens  # rows behind the last full page may need one page more
        allowed = {i for i in range(num_pages) if window.needs(i, full, page_tokens)}
        here = [i for i in held if i < num_pages]
        assert set(wanted) <= set(here) <= allowed, "other pages are held than rows attend"
        run = pages.run(num_pages)
        assert run.frames.tolist() == [int(pages.frames[i]) for i in here]
        roots = {pages.root, *namespace.other_roots[group : group + 1]}
        for i in wanted:
            if i * page_tokens >= start:
                continue
            page = self.memory.read(int(pages.frames[i]))
            formats = {need.recipe.format_at(i, start, page_tokens)}
            assert formats == {need.recipe.format_at(i, end - 1, page_tokens)}, "a chunk crosses a boundary"
            if need.any_variant:
                formats |= {need.recipe.write, namespace.other_format(group) or need.recipe.write}
            assert page.group == group and page.format in formats, f"page {i} is {page.format}"
            if run.formats is not None:
                assert run.formats[here.index(i)] == FORMAT_CODES[page.format]
            for place in range(min(page_tokens, start - i * page_tokens)):
                content = page.tokens[place]
                assert content is not None and content[0] in roots, "another request's keys and values"
                assert content[1] == prefix[i * page_tokens + place], f"place {place} of page {i}"

    def contents(self, seq: Sequence, tokens: int) -> list[int]:
        """By token, a digest of all tokens up to it."""
        digest, found = 0, []
        for token in seq.tokens[:tokens].tolist():
            digest = hash((digest, token))
            found.append(digest)
        return found

    def sample(self, seq: Sequence) -> None:
        request = seq.request
        siblings: list[Sequence] = []
        if request.usage is None:
            siblings = self.scheduler.siblings(seq, LONGEST)
        for child in siblings:
            self.do(self.scheduler.fork(seq, child, self.now))
        for each in [seq, *siblings]:
            token = next_token(each.tokens[: each.length].tolist(), each.index)
            self.scheduler.sampled([each], [token], self.now)
            usage = request.usage
            assert usage is not None
            assert sum(usage.cached_tokens.values()) + usage.computed_tokens == usage.prompt_tokens
            self.outputs.setdefault((request.spec.request_id, each.index), []).append(token)
            reason = each.ends_with(token)
            if reason is not None:
                self.end(each, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        self.asked = [s for s in self.asked if s is not seq]
        self.below = [entry for entry in self.below if entry[1] is not seq]
        self.scheduler.finish(seq, self.now, reason, seq.kind(reason))
        self.finished[seq.request.spec.request_id, seq.index] = reason

    # The node

    def answer_some(self, chance: float) -> None:
        """The node's answers come whenever they come: between steps, or while one is computed."""
        left, self.asked = self.asked, []
        for seq in left:
            if self.rng.random() < chance:
                self.answer(seq)
            else:
                self.asked.append(seq)

    def answer(self, seq: Sequence) -> None:
        load = seq.load
        assert load is not None
        first, page_tokens = load.first_page, self.page_tokens
        needs = [chain.needs for chain in load.chains]
        present = []
        for group, chain in enumerate(load.chains):
            assert len(chain.keys) == len(chain.held)
            bits = bytearray([HAS_WRITTEN | HAS_DECAYED]) * first
            if seq.request.namespace.other_format(group) is None:
                bits = bytearray([HAS_WRITTEN]) * first
            for i in range(len(chain.keys)):
                have = self.found(seq, load, group, first + i)
                written = HAS_WRITTEN * (chain.needs.recipe.write in have)
                decayed = HAS_DECAYED * any(format is not chain.needs.recipe.write for format in have)
                bits.append(chain.held[i] | written | decayed)
            present.append(bytes(bits))
        pages = longest_hit(needs, present, first, load.last_position, page_tokens)
        position = min(pages * page_tokens, load.last_position)
        refs: list[tuple[PageRef, Page]] = []
        for group, need in enumerate(needs):
            for i in range(first, pages):
                if need.window.needs(i, position, page_tokens):
                    page = self.missing(seq, load, group, i, need.recipe.format_at(i, position, page_tokens))
                    if page is not None:
                        refs.append(((group, i), page))
        missing = Missing(pages, "never_stored", "")
        load.locate(pages, [ref for ref, _ in refs], missing)
        self.rng.shuffle(refs)
        self.below += [(load, seq, ref, page) for ref, page in refs]
        self.finish_load(seq)

    def found(self, seq: Sequence, load: Load, group: int, page: int) -> dict[PageFormat, Page]:
        """What the node has of a page, by format."""
        chain = load.chains[group]
        keys = [chain.keys[page - load.first_page]]
        keys += chain.other_keys[page - load.first_page : page - load.first_page + 1]
        formats = [chain.needs.recipe.write, seq.request.namespace.other_format(group)]
        have = {
            f: self.node[key, f] for key in reversed(keys) for f in formats if f and (key, f) in self.node
        }
        return have

    def missing(self, seq: Sequence, load: Load, group: int, page: int, wanted: PageFormat) -> Page | None:
        """The page that the node sends for a place in the prefix; None where L1 has it."""
        chain = load.chains[group]
        held = chain.held[page - load.first_page]
        if held and (chain.needs.any_variant or held & HAS_WRITTEN or wanted is not chain.needs.recipe.write):
            return None
        have = self.found(seq, load, group, page)
        for format in (wanted, chain.needs.recipe.write, *have):
            if format in have:
                return have[format]
        raise AssertionError("the prefix has a page that nothing has")

    def copy_up(self, chance: float) -> None:
        left, self.below = self.below, []
        for load, seq, ref, page in left:
            if not load.wants(ref):
                continue
            if self.rng.random() > chance:
                self.below.append((load, seq, ref, page))
            elif self.rng.random() < self.faults:
                load.cut(ref[1], Missing(ref[1], "load_failed", ""))
                self.finish_load(seq)
            else:
                frame = self.table.place(seq, ref, page.format, self.now)
                self.do(self.table.take_ops())
                if frame is None:
                    self.finish_load(seq)
                else:
                    self.coming.append(Coming(load, seq, ref, frame, page.copy()))

    def end_copies(self, chance: float) -> None:
        left, self.coming = self.coming, []
        for each in left:
            if self.rng.random() > chance:
                self.coming.append(each)
                continue
            page, ref = each.page, each.ref
            self.memory.write(each.frame, self.units(page.group, page.format), page)
            self.table.end_copy(each.frame)
            if each.seq.load is not each.load or each.seq.state is not SequenceState.LOADING:
                continue
            if not each.load.wants(ref):
                continue
            if self.rng.random() < self.faults:
                each.load.cut(ref[1], Missing(ref[1], "corrupt", ""))
            else:
                self.table.arrive(each.seq, ref, TierName.HOST, self.now)
                self.loaded_pages.append(ref)
            self.finish_load(each.seq)

    def expire(self) -> None:
        for seq in [seq for seq in self.scheduler.active if seq.load is not None]:
            assert seq.load is not None
            if self.now > seq.load.deadline_s and self.faults:
                self.asked = [s for s in self.asked if s is not seq]
                seq.load.give_up("deadline", "")
                self.finish_load(seq)

    def finish_load(self, seq: Sequence) -> None:
        if seq.load is not None and seq.load.is_complete and seq.state is SequenceState.LOADING:
            pages = self.scheduler.loaded(seq, self.now)
            assert pages >= 0

    # Saves

    def demote(self, seq: Sequence, page: DemotedPage) -> None:
        full = page.tokens == self.page_tokens
        root, end = seq.groups[page.group].root, page.depth * self.page_tokens + page.tokens
        salt = seq.request.namespace.salt
        chain = page_keys(root, salt, seq.tokens[:end], self.page_tokens, include_partial=True)
        *_, parent, key = (root, *chain)
        copy = self.memory.read(page.frame).copy()
        if not full:
            copy.tokens[page.tokens :] = [None] * (self.page_tokens - page.tokens)
        assert copy.format is page.format and None not in copy.tokens[: page.tokens]
        assert (page.key, page.parent) == (key, parent)
        self.demoting[seq] += 1
        self.saving.append(Saving(page.frame, page.key, copy, seq, page.record))

    def end_saves(self, chance: float) -> None:
        left, self.saving = self.saving, []
        for saving in left:
            if self.rng.random() > chance:
                self.saving.append(saving)
                continue
            page = self.memory.read(saving.frame)
            tokens = [token for token in saving.page.tokens if token is not None]
            assert page.format is saving.page.format and page.tokens[: len(tokens)] == tokens, (
                "reused under a copy"
            )
            self.table.end_copy(saving.frame)
            if saving.seq is not None:
                self.end_demotion(saving.seq)
            is_written = self.rng.random() >= self.faults
            if is_written:
                self.node[saving.key, page.format] = saving.page
            if saving.record is not None and self.table.is_cached(saving.record):
                self.table.saved(saving.record, is_written, self.now)
        self.save_through()

    def end_demotion(self, seq: Sequence) -> None:
        """One of a preempted sequence's pages has been copied down."""
        self.demoting[seq] -= 1
        if not self.demoting[seq] and seq.state is not SequenceState.FINISHED:
            seq.copies = 0

    def save_through(self) -> None:
        """Cached pages reach the node sooner or later, unless it has no room for them."""
        if not self.has_node or not self.slots:
            return
        self.do(self.table.take_ops())
        due = self.table.take_due()
        assert not any(record.is_put_off for record in due)
        records = [record for record, _ in self.table.cached()]
        if self.margin:
            self.leaving += [record for record in due if record.leaves]
            self.leaving += self.table.choose_to_evict(self.now)
            self.leaving = [record for record in self.leaving if self.table.is_cached(record)]
            records = self.leaving
        for record in list(records):
            if record.save is SaveState.DIRTY and not record.is_put_off and self.rng.random() < 0.5:
                self.table.start_save(record)
                page = self.memory.read(record.frame).copy()
                self.saving.append(Saving(record.frame, record.key, page, None, record))


def namespace_of(
    name: str, needs: tuple[ChainNeeds, ...], exact: Namespace | None = None, lossy: PageFormat | None = None
) -> Namespace:
    """Where pages of one kind of request are found; `exact` is the kind that a lossy one may take pages of."""
    roots = tuple(RootKey(f"{name} {group}".encode().ljust(32)) for group in range(len(needs)))
    others = exact.roots if exact else ()
    return Namespace(
        roots, b"s" * 64, TENANT, RootKey(f"tree {name}".encode().ljust(32)), needs, others, lossy
    )


def next_token(tokens: list[int], index: int) -> int:
    """A model: some function of the last tokens."""
    return hash((tuple(tokens[-64:]), len(tokens), index)) % VOCAB


def expected(prompt: list[int], max_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]
