"""The scheduler and its page table against a model of L1 that knows which token's keys and values lie where."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.messages import Missing
from kvtier.tier.page import PageKey, RootKey, TierName
from kvtier.workers.api import EngineRequest, FinishReason, SamplingParams
from kvtier.workers.page_table import CopyHead, PageTable, SaveState
from kvtier.workers.scheduler import DemotedPage, Row, Scheduler, Step
from kvtier.workers.sequence import Request, Sequence, SequenceState, Tenancy

VOCAB = 50
Content = tuple[int, ...]  # the whole prefix that a token's keys and values depend on


@dataclass
class Saving:
    """A preempted sequence's page on its way to L3."""

    seq: Sequence
    page: DemotedPage
    tokens: Content


@dataclass
class Machine:
    """Runs a scheduler the way a worker does, with everything that takes time taking a random number of steps.

    `frames[f][i]` is the prefix whose last token's keys and values lie at place i of frame f. A node, where there is
    one, remembers pages by key.
    """

    capacity: int
    page_tokens: int
    max_batch_tokens: int
    max_sequences: int
    rng: Random
    has_node: bool = True
    slots: int = 8
    table: PageTable = field(init=False)
    scheduler: Scheduler = field(init=False)
    frames: list[list[Content | None]] = field(init=False)
    node: dict[PageKey, list[Content | None]] = field(default_factory=dict)
    saving: list[Saving] = field(default_factory=list)
    asked: list[Sequence] = field(default_factory=list)  # LOADING, before the node says what it has
    loading: list[tuple[Sequence, int]] = field(default_factory=list)
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    now: float = 0.0
    computed_rows: int = 0

    def __post_init__(self) -> None:
        self.table = PageTable(self.capacity, self.page_tokens, 1)
        self.scheduler = Scheduler(
            self.table,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            load_deadline_s=5.0,
        )
        self.frames = [[None] * self.page_tokens for _ in range(self.capacity)]

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, n: int = 1, use_cache: bool = True
    ) -> Request:
        spec = EngineRequest(
            name, "t", tuple(prompt), SamplingParams(max_tokens=max_tokens, n=n), use_cache=use_cache
        )
        tenancy = Tenancy(RootKey(b"r" * 32), b"s" * 64, b"t" * 16, RootKey(b"tree" * 8))
        number = sum(r.spec.sampling.n for r in self.requests)
        request = Request(spec, number, tenancy, self.now, 0.0)
        seq = Sequence(request, 0, self.page_tokens, (), 10_000)
        request.sequences.append(seq)
        self.requests.append(request)
        self.scheduler.add(seq)
        return request

    def run(self, max_steps: int = 5000) -> None:
        """Until all is done; AssertionError when that takes more steps than it can."""
        for _ in range(max_steps):
            if not self.scheduler.unfinished:
                break
            self.step()
        assert not self.scheduler.unfinished, "sequences starve"
        while self.saving:
            self.end_saves(1.0)
        self.scheduler.check()
        assert self.table.limbo == self.table.copies_in_flight == 0
        assert self.table.frames.free_frames + self.table.index.num_pages == self.capacity

    def step(self) -> None:
        self.now += 1.0
        self.end_saves(0.5)
        self.answer_some(0.5)
        self.end_loads(0.5)
        step = self.scheduler.schedule(self.now, can_load=self.has_node, free_slots=self.slots)
        self.check_bounds(step)
        for copy in step.copies:
            self.copy(copy)
        for demotion in step.demotions:
            for page in demotion.pages:
                end = page.depth * self.page_tokens + page.tokens
                tokens = tuple(demotion.seq.tokens[:end].tolist())
                self.saving.append(Saving(demotion.seq, page, tokens))
        self.asked += step.loads
        assert step.rows or step.demotions or self.saving or self.loading or self.asked, "nothing can go on"
        self.answer_some(0.2)
        for row in step.rows:
            self.compute(row)
        for row in step.rows:
            self.scheduler.advance(row, self.now)
        for row in step.rows:
            if row.samples:
                self.sample(row.seq)
        self.scheduler.check()

    def check_bounds(self, step: Step) -> None:
        assert sum(row.length for row in step.rows) <= self.max_batch_tokens
        assert len({id(row.seq) for row in step.rows}) == len(step.rows) <= self.max_sequences
        assert all(row.length > 0 and row.seq.state is SequenceState.RUNNING for row in step.rows)
        assert sum(len(demotion.pages) for demotion in step.demotions) <= self.slots

    def copy(self, copy: CopyHead) -> None:
        assert self.table.copies_of(copy.target) == 0
        self.frames[copy.target][: copy.tokens] = self.frames[copy.source][: copy.tokens]

    def compute(self, row: Row) -> None:
        """Write the rows' places, after checking that all before them hold what they should."""
        tokens = row.seq.tokens[: row.start + row.length].tolist()
        for i in range(row.start):
            frame = int(row.seq.frames[i // self.page_tokens])
            assert self.frames[frame][i % self.page_tokens] == tuple(tokens[: i + 1]), f"place {i} of {row}"
        for i in range(row.start, row.start + row.length):
            frame = int(row.seq.frames[i // self.page_tokens])
            assert self.table.copies_of(frame) == 0, "written under a copy"
            assert self.table.record(frame) is None, "a cached page is overwritten"
            self.frames[frame][i % self.page_tokens] = tuple(tokens[: i + 1])
        self.computed_rows += row.length

    def sample(self, seq: Sequence) -> None:
        request = seq.request
        siblings = []
        if request.usage is None:
            usage = request.count_usage()
            assert sum(usage.cached_tokens.values()) + usage.computed_tokens == usage.prompt_tokens
            for index in range(1, request.spec.sampling.n):
                child = Sequence(request, index, self.page_tokens, (), 10_000)
                request.sequences.append(child)
                siblings.append(child)
        for child in siblings:
            for copy in self.scheduler.fork(seq, child, self.now):
                self.copy(copy)
        for each in [seq, *siblings]:
            token = next_token(each.tokens[: each.length].tolist(), each.index)
            each.append(token, self.now)
            self.outputs.setdefault((request.spec.request_id, each.index), []).append(token)
            reason = each.ends_with(token)
            if reason is not None:
                self.end(each, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        self.asked = [s for s in self.asked if s is not seq]
        self.loading = [(s, i) for s, i in self.loading if s is not seq]
        self.scheduler.finish(seq, self.now)
        self.finished[seq.request.spec.request_id, seq.index] = reason

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
        load.located = True
        found = next((i for i, key in enumerate(load.keys) if key not in self.node), len(load.keys))
        load.cut(found, Missing(found, "never_stored", ""))
        order = list(range(found))
        self.rng.shuffle(order)
        for index in order:
            self.table.start_copy(int(seq.frames[load.first_page + index]))
            self.loading.append((seq, index))
        if load.is_complete:
            self.scheduler.loaded(seq, self.now)

    def end_loads(self, chance: float) -> None:
        left, self.loading = self.loading, []
        for seq, index in left:
            load = seq.load
            if load is None or seq.state is SequenceState.FINISHED:
                continue
            frame = int(seq.frames[load.first_page + index])
            if self.rng.random() > chance:
                self.loading.append((seq, index))
                continue
            self.frames[frame] = list(self.node[load.keys[index]])
            self.table.end_copy(frame)
            load.arrive(index, TierName.HOST)
            if load.is_complete:
                self.scheduler.loaded(seq, self.now)

    def end_saves(self, chance: float) -> None:
        left, self.saving = self.saving, []
        for saving in left:
            if self.rng.random() > chance:
                self.saving.append(saving)
                continue
            page, first = saving.page, saving.page.depth * self.page_tokens
            expected = [saving.tokens[: first + i + 1] for i in range(page.tokens)]
            assert self.frames[page.frame][: page.tokens] == expected, "a page was reused under its copy"
            whole = page.tokens == self.page_tokens
            seq = saving.seq
            if whole:
                key = seq.page_keys(page.depth + 1, self.page_tokens)[page.depth]
            else:
                key = seq.tail_key(first + page.tokens, self.page_tokens)
            self.node[key] = [*self.frames[page.frame][: page.tokens]] + [None] * (
                self.page_tokens - page.tokens
            )
            self.table.end_copy(page.frame)
            seq.copies -= 1
        self.save_through()

    def save_through(self) -> None:
        """Cached pages reach the node sooner or later, unless it has no room for them."""
        if not self.has_node:
            return
        for frame, record, _ in self.table.cached():
            if record.save is SaveState.DIRTY and self.slots and self.rng.random() < 0.5:
                record.save = SaveState.CLEAN
                self.node[record.key] = list(self.frames[frame])


def next_token(tokens: list[int], index: int) -> int:
    """A model: some function of all tokens before."""
    return hash((tuple(tokens), index)) % VOCAB


def expected(prompt: list[int], max_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


def machine(capacity: int = 32, **changes: int | bool) -> Machine:
    shape = {"page_tokens": 4, "max_batch_tokens": 16, "max_sequences": 4, **changes}
    return Machine(capacity, rng=Random(0), **shape)  # type: ignore[arg-type]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Machine, list[tuple[int, list[int], int, int, bool]]]:
    """A small machine and requests that fit it, many with a prefix in common: (step, prompt, max_tokens, n, cached)."""
    page_tokens = draw(st.sampled_from([1, 2, 4, 8]))
    capacity = draw(st.integers(3, 24))
    has_node = draw(st.sampled_from([True, True, False]))
    made = Machine(
        capacity,
        page_tokens,
        max_batch_tokens=draw(st.integers(4, 40)),
        max_sequences=draw(st.integers(2, 4)),
        rng=Random(draw(st.integers(0, 2**32))),
        has_node=has_node,
        slots=draw(st.sampled_from([0, 2, 100, 100])) if has_node else 0,
    )
    shared = draw(st.lists(st.integers(0, 3), max_size=capacity * page_tokens // 2))
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        room = capacity * page_tokens
        max_tokens = draw(st.integers(1, max(1, min(room - 1, 30))))
        longest = room - max_tokens + 1
        head = shared[: draw(st.integers(0, len(shared)))]
        prompt = (head + draw(st.lists(st.integers(0, 3), min_size=1, max_size=20)))[:longest]
        step = draw(st.integers(0, 10))
        requests.append((step, prompt, max_tokens, draw(st.integers(1, 3)), draw(st.booleans())))
    return made, sorted(requests, key=lambda r: r[0])


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_any_workload_ends_with_the_right_tokens_within_all_bounds(
    workload: tuple[Machine, list[tuple[int, list[int], int, int, bool]]],
) -> None:
    made, requests = workload
    for i, (step, prompt, max_tokens, n, use_cache) in enumerate(requests):
        while made.now < step and made.scheduler.unfinished:
            made.step()
        made.scheduler.check_fits(len(prompt), max_tokens)
        made.submit(str(i), prompt, max_tokens, n, use_cache)
    made.run()
    for i, (_, prompt, max_tokens, n, _) in enumerate(requests):
        for index in range(n):
            assert made.outputs[str(i), index] == expected(prompt, max_tokens, index)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_cancelling_at_any_moment_leaks_no_page(
    workload: tuple[Machine, list[tuple[int, list[int], int, int, bool]]], rng: Random
) -> None:
    made, requests = workload
    for i, (_, prompt, max_tokens, n, use_cache) in enumerate(requests):
        made.submit(str(i), prompt, max_tokens, n, use_cache)
    for _ in range(40):
        if not made.scheduler.unfinished:
            break
        made.step()
        alive = made.scheduler.active + made.scheduler.waiting
        if alive and rng.random() < 0.4:
            seq = rng.choice(alive)
            frames = [
                int(seq.frames[seq.load.first_page + i]) for s, i in made.loading if s is seq and seq.load
            ]
            made.end(seq, FinishReason.CANCELLED)
            for frame in frames:
                made.table.end_copy(frame)
            made.scheduler.check()
    made.run()


def test_decode_rows_come_before_prefill_chunks() -> None:
    made = machine(has_node=False)
    made.submit("old", [1] * 4, 8)
    made.step()
    made.submit("new", [2] * 40, 1)

    step = made.scheduler.schedule(2.0, can_load=False, free_slots=0)

    assert [(row.seq.request.spec.request_id, row.length) for row in step.rows] == [("old", 1), ("new", 15)]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    made = machine(capacity=4)
    made.scheduler.check_fits(12, 5)
    with pytest.raises(
        ValueError, match="prompt of 13 tokens and max_tokens 5 need 5 pages of 4 tokens; L1 has 4"
    ):
        made.scheduler.check_fits(13, 5)


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    made = machine(capacity=200, max_batch_tokens=64, max_sequences=8, has_node=False)
    prefix = [7] * 40
    for i in range(8):
        made.submit(str(i), [*prefix, i], 2)

    made.run()

    assert made.computed_rows < len(prefix) + 8 * (made.page_tokens + 2)
    assert made.table.evicted_pages == 0


def test_what_is_preempted_comes_back_without_recompute_while_l3_has_room() -> None:
    made = machine(capacity=12, slots=100, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 14, 30)
    made.submit("b", [2] * 14, 30)

    made.run()

    assert made.scheduler.preemptions > 0
    assert made.outputs["a", 0] == expected([1] * 14, 30)
    assert made.outputs["b", 0] == expected([2] * 14, 30)
    assert made.computed_rows == 2 * (14 + 29)  # each token once: the last one sampled is never computed


def test_without_l3_what_is_preempted_is_recomputed() -> None:
    made = machine(capacity=12, has_node=False, slots=0, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 14, 30)
    made.submit("b", [2] * 14, 30)

    made.run()

    assert made.scheduler.preemptions > 0
    assert made.outputs["b", 0] == expected([2] * 14, 30)


def test_the_oldest_running_sequence_is_never_preempted() -> None:
    made = machine(capacity=12, has_node=False, slots=0, max_sequences=4, max_batch_tokens=32)
    old = made.submit("old", [1] * 8, 38)
    for i in range(3):
        made.submit(str(i), [i + 2] * 8, 2)

    made.run()

    assert old.preemptions == 0


def test_preemption_takes_the_one_with_most_tokens_to_go() -> None:
    made = machine(capacity=16, has_node=False, slots=0, max_sequences=3, max_batch_tokens=32)
    made.submit("old", [1] * 8, 30)
    long = made.submit("long", [2] * 8, 50)
    short = made.submit("short", [3] * 8, 12)

    made.run()

    assert long.preemptions > 0
    assert short.preemptions == 0


def test_a_whole_prompt_in_l1_still_computes_its_last_token() -> None:
    made = machine()
    prompt = list(range(16))
    made.submit("first", prompt, 1)
    made.run()
    before = made.computed_rows
    again = made.submit("again", prompt, 1)

    made.run()

    assert made.computed_rows == before + 1
    assert again.usage is not None
    assert again.usage.cached_tokens["L1"] == 15
    assert again.usage.computed_tokens == 1


def test_the_shared_head_of_a_page_is_copied_not_shared() -> None:
    made = machine()
    made.submit("first", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    made.run()
    second = made.submit("second", [1, 2, 3, 4, 5, 6, 9, 9, 9], 1)

    made.run()

    assert second.usage is not None
    assert second.usage.cached_tokens["L1"] == 6


def test_a_head_is_copied_before_a_sibling_takes_its_page() -> None:
    """A load ends during a step, and its sequence is to start from the head of a cached page; then a fork in that same
    step evicts the page and fills the frame at once, so that the head, copied a step later, was the sibling's.
    """
    made = machine(capacity=3, slots=0)
    made.submit("cached", [1, 2, 3, 4], 1)
    made.run()
    loads = made.submit("loads", [1, 2, 9, 9], 1)
    made.submit("forks", [5], 1, n=2)
    step = made.scheduler.schedule(made.now, can_load=True, free_slots=0)
    (row,) = step.rows
    made.answer(loads.sequences[0])
    made.compute(row)
    made.scheduler.advance(row, made.now)
    made.sample(row.seq)

    made.run()

    assert made.table.evicted_pages == 1
    assert loads.usage is not None
    assert loads.usage.cached_tokens["L1"] == 2


def test_siblings_share_the_prompt_which_counts_once() -> None:
    made = machine(has_node=False)
    request = made.submit("r", [1] * 10, 6, n=3)

    made.run()

    assert made.computed_rows == 10 + 3 * 5
    assert request.usage is not None
    assert request.usage.computed_tokens == 10


def test_preemption_changes_nothing_in_the_usage() -> None:
    made = machine(capacity=12, slots=100, max_sequences=2, max_batch_tokens=32)
    made.submit("a", [1] * 14, 30)
    b = made.submit("b", [2] * 14, 30)

    made.run()

    assert b.preemptions + made.requests[0].preemptions > 0
    assert b.usage is not None
    assert b.usage.computed_tokens == 14


def test_an_uncached_request_leaves_nothing_behind() -> None:
    made = machine()
    made.submit("a", [1] * 14, 4, n=2, use_cache=False)

    made.run()

    assert made.table.index.num_pages == 0
    assert made.table.frames.free_frames == made.capacity


def test_pinned_pages_stay_until_a_request_needs_their_room() -> None:
    made = machine(capacity=8, has_node=False)
    made.submit("a", [1] * 16, 1)
    made.run()
    keys = list(made.table.by_key)
    assert made.table.pin(keys[-1]) is True
    made.submit("b", [2] * 15, 1)
    made.run()
    assert set(keys) <= set(made.table.by_key)

    made.submit("c", [3] * 31, 1)
    made.run()

    assert not set(keys) & set(made.table.by_key)
    assert not made.table.pinned


def test_a_cleared_tree_is_not_found_and_goes_with_its_last_holder() -> None:
    made = machine(has_node=False)
    made.submit("a", [1] * 8, 20)
    made.step()
    tree = made.requests[0].tenancy.tree
    gone, held = made.table.clear(tree, made.now)
    assert (gone, held) == (0, 2)
    assert not made.table.by_key

    made.run()

    assert made.table.index.num_pages == 0
    assert not made.table.is_dead(tree)


def test_an_evicted_page_in_use_goes_when_its_users_end() -> None:
    made = machine(has_node=False)
    made.submit("a", [1] * 8, 20)
    made.step()
    key = next(iter(made.table.by_key))
    assert made.table.remove(key, made.now) is False

    made.run()

    assert key not in made.table.by_key


def test_duplicate_pages_are_given_up_for_the_cached_ones() -> None:
    """Two sequences whose claims don't meet, since one follows another prompt's output, may compute the same page."""
    made = machine(has_node=False)
    tokens = np.array(expected([1] * 4, 8), np.int32)
    made.submit("a", [1] * 4, 9)
    for _ in range(3):
        made.step()
    made.submit("b", [1] * 4 + tokens.tolist(), 3)

    made.run()

    assert made.outputs["b", 0] == expected([1] * 4 + tokens.tolist(), 3)
