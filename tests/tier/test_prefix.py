"""The prefix index beside a plain model: a dict from (root, tokens of the chain so far) to a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_kit import Strict

from kvtier.tier.l1.prefix import Frames, Path, PrefixIndex
from kvtier.tier.l1.prefix_node import PARTIAL_CANDIDATES
from kvtier.tier.pages.identity import TokenIds
from kvtier.tier.pages.page import PageMissing, RootKey
from kvtier.tier.policy.base import Policy, PolicySettings, Row, Use
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.rvi.policy import Rvi

ROOT, OTHER = RootKey(b"r" * 32), RootKey(b"s" * 32)

Prompt = tuple[int, list[int], int]  # a chain that is there, pages behind it, tokens missing at the end
Chain = tuple[int, ...]  # the tokens of whole pages, from a chain's beginning


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def frames(*numbers: int) -> Frames:
    return np.array(numbers, np.int32)


def number_of_runs(index: PrefixIndex) -> int:
    return sum(1 for root in index._roots.values() for node in index._subtree(root) if node is not root)


def run_of(tokens: Sequence[int], page_tokens: int) -> list[Chain]:
    """The chains of the pages of `tokens`, shortest first."""
    return [
        tuple(tokens[:end])
        for end in range(page_tokens, len(tokens) - len(tokens) % page_tokens + 1, page_tokens)
    ]


@dataclass
class Page:
    frame: int
    last_use_s: float
    pins: int = 0


class Model:
    """What the index should hold, page by page, with nothing clever in it."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages: dict[tuple[RootKey, Chain], Page] = {}

    def children(self, root: RootKey, chain: Chain) -> list[Chain]:
        deeper = len(chain) + self.page_tokens
        return [c for r, c in self.pages if r == root and len(c) == deeper and c[: len(chain)] == chain]

    def below(self, root: RootKey, chain: Chain) -> list[Chain]:
        return [c for r, c in self.pages if r == root and c[: len(chain)] == chain]

    def match(self, root: RootKey, tokens: Sequence[int]) -> Chain:
        held: Chain = ()
        for chain in run_of(tokens, self.page_tokens):
            if (root, chain) not in self.pages:
                break
            held = chain
        return held

    def partials(self, root: RootKey, held: Chain, rest: Sequence[int]) -> tuple[int, set[int]]:
        """Tokens of the longest head in common with `rest`, and the frames that have it."""
        heads: dict[int, set[int]] = {}
        for chain in self.children(root, held):
            page = chain[len(held) :]
            n = 0
            while n < len(rest) and page[n] == rest[n]:
                n += 1
            heads.setdefault(n, set()).add(self.pages[root, chain].frame)
        best = max(heads, default=0)
        return best, heads.get(best, set())

    def use(self, root: RootKey, chain: Chain, now: float) -> None:
        for c in run_of(chain, self.page_tokens):
            self.pages[root, c].last_use_s = now

    def pin(self, root: RootKey, chain: Chain, by: int) -> None:
        for c in run_of(chain, self.page_tokens):
            self.pages[root, c].pins += by

    def evict(self, pages: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < pages:
            leaves = [k for k, p in self.pages.items() if not p.pins and not self.children(*k)]
            if not leaves:
                break
            taken.append(self.pages.pop(min(leaves, key=lambda k: self.pages[k].last_use_s)).frame)
        return taken

    def remove(self, root: RootKey, chain: Chain) -> tuple[set[int], int]:
        behind = self.below(root, chain)
        gone = [c for c in behind if not self.pages[root, c].pins]
        return {self.pages.pop((root, c)).frame for c in gone}, len(behind) - len(gone)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Every operation on the index and on the model, compared; few different pages, so that chains collide.

    A prompt continues a chain that is cached. Page k begins with zeros and ends with k tokens k, so that different pages
    have heads of different lengths in common.
    """

    @initialize(page_tokens=st.sampled_from([1, 2, 4]))
    def start(self, page_tokens: int) -> None:
        self.policy = self.new_policy()
        self.index = PrefixIndex(page_tokens, self.policy)
        self.model = Model(page_tokens)
        self.now = 0.0
        self.next_frame = 0
        self.pinned: list[tuple[Path, Chain]] = []
        self.stale: Path | None = None

    def new_policy(self) -> Policy:
        return Strict()

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def new_frames(self, n: int) -> list[int]:
        self.next_frame += n
        return list(range(self.next_frame - n, self.next_frame))

    def whole_pages(self, prompt: Prompt) -> list[int]:
        return self.tokens((prompt[0], prompt[1], 0))

    roots = st.sampled_from([ROOT, OTHER])
    prompts = st.tuples(st.integers(0, 99), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 3))

    def tokens(self, prompt: Prompt) -> list[int]:
        number, pages, cut = prompt
        chains = [(), *(chain for _, chain in self.model.pages)]
        p = self.model.page_tokens
        tokens = [*chains[number % len(chains)], *(k if i + k >= p else 0 for k in pages for i in range(p))]
        return tokens[: max(0, len(tokens) - cut)]

    def grow(self, root: RootKey, before: Chain, tokens: list[int], own: list[int], now: float) -> list[int]:
        """What the model expects of inserting `tokens` behind `before` with frames `own`: the tree's frames."""
        tree = []
        for chain, frame in zip(
            run_of([*before, *tokens], self.model.page_tokens)[len(before) // self.model.page_tokens :],
            own,
            strict=True,
        ):
            tree.append(self.model.pages.setdefault((root, chain), Page(frame, now)).frame)
        return tree

    @rule(root=roots, prompt=prompts, keep=st.integers(0, 6))
    def insert(self, root: RootKey, prompt: Prompt, keep: int) -> None:
        """A caller's frames are the tree's for a part of what it matched, its own for the rest."""
        tokens, now = self.whole_pages(prompt), self.tick()
        own = self.new_frames(len(tokens) // self.model.page_tokens)
        for i, chain in enumerate(run_of(self.model.match(root, tokens), self.model.page_tokens)[:keep]):
            own[i] = self.model.pages[root, chain].frame
        tree = self.grow(root, (), tokens, own, now)
        self.model.use(root, tuple(tokens), now)

        inserted = self.index.insert(root, ids(*tokens), frames(*own), now)

        assert inserted.frames.tolist() == tree
        assert inserted.duplicates == [a for a, b in zip(own, tree, strict=True) if a != b]
        assert inserted.node.depth == len(own)

    @rule(
        root=roots,
        prompt=prompts,
        limit=st.none() | st.integers(0, 20),
        pin=st.booleans(),
        begin=st.booleans(),
    )
    def match(self, root: RootKey, prompt: Prompt, limit: int | None, pin: bool, begin: bool) -> None:
        tokens = self.tokens(prompt)
        allowed = tokens if limit is None else tokens[:limit]
        held = self.model.match(root, allowed)
        rest = allowed[len(held) : len(held) + self.model.page_tokens]

        match = self.index.match(root, ids(*tokens), limit)

        chains = run_of(held, self.model.page_tokens)
        assert match.frames.tolist() == [self.model.pages[root, c].frame for c in chains]
        assert match.tokens == len(held)
        shared, candidates = self.model.partials(root, held, rest)
        if match.partial is None:
            assert shared == 0
        else:
            assert match.partial[1] == shared > 0
            assert match.partial[0] in candidates
        if pin:
            self.index.pin(match.node)
            self.model.pin(root, held, 1)
            self.pinned.append((match.node, held))
            if begin:
                self.index.begin(match.node, self.tick())
        else:
            self.stale = match.node

    @rule(root=roots, prompt=prompts)
    def touch(self, root: RootKey, prompt: Prompt) -> None:
        now = self.tick()
        tokens = self.tokens(prompt)
        self.model.use(root, self.model.match(root, tokens), now)

        self.index.touch(self.index.match(root, ids(*tokens)).node, now)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), more=prompts)
    def extend(self, data: st.DataObject, more: Prompt) -> None:
        i = data.draw(st.integers(0, len(self.pinned) - 1))
        path, chain = self.pinned[i]
        tokens, now = self.whole_pages(more), self.tick()
        own = self.new_frames(len(tokens) // self.model.page_tokens)
        tree = self.grow(path.root, chain, tokens, own, now)
        longer = (*chain, *tokens)
        self.model.pin(path.root, chain, -1)
        self.model.pin(path.root, longer, 1)
        self.pinned[i] = path, longer

        extended = self.index.extend(path, ids(*tokens), frames(*own), now)

        assert extended.node is path and path.depth == len(longer) // self.model.page_tokens
        assert extended.frames.tolist() == tree
        assert extended.duplicates == [a for a, b in zip(own, tree, strict=True) if a != b]

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), only_last=st.booleans())
    def unpin(self, data: st.DataObject, only_last: bool) -> None:
        path, chain = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        now = self.tick()
        self.model.pin(path.root, chain, -1)
        held = run_of(chain, self.model.page_tokens)
        unpinned = [c for c in held if not self.model.pages[path.root, c].pins]
        for c in unpinned if only_last else held:
            self.model.pages[path.root, c].last_use_s = now

        self.index.unpin(path, now, Use(path.depth, 0), only_last=only_last)

    @rule(pages=st.integers(0, 4))
    def evict(self, pages: int) -> None:
        evicted = self.index.evict(pages, self.tick())

        self.agree_on_evicted(evicted, pages)
        self.refuse_stale(bool(evicted))

    def agree_on_evicted(self, evicted: list[int], pages: int) -> None:
        assert evicted == self.model.evict(pages)

    @rule(root=roots, prompt=prompts)
    def remove(self, root: RootKey, prompt: Prompt) -> None:
        tokens = self.whole_pages(prompt)
        if not tokens:
            return
        there = (root, tuple(tokens)) in self.model.pages

        removed = self.index.remove(root, ids(*tokens))

        assert (removed is not None) == there
        if removed is not None:
            assert (set(removed.frames), removed.pinned_pages) == self.model.remove(root, tuple(tokens))
            self.refuse_stale(bool(removed.frames))

    @rule(data=st.data())
    def remove_frames(self, data: st.DataObject) -> None:
        held = sorted(p.frame for p in self.model.pages.values())
        wanted = data.draw(st.lists(st.sampled_from([*held, -1]), max_size=3))
        chains = {p.frame: key for key, p in self.model.pages.items()}

        removed = self.index.remove_frames(wanted)

        gone: set[int] = set()
        for frame in wanted:
            if frame in chains and chains[frame] in self.model.pages:
                gone |= self.model.remove(*chains[frame])[0]
        assert set(removed.frames) == gone
        assert len(removed.frames) == len(gone)
        self.refuse_stale(bool(gone))

    @precondition(lambda self: len(self.model.pages) > 12)
    @rule(root=st.none() | roots)
    def clear(self, root: RootKey | None) -> None:
        removed = self.index.clear(root)

        gone: set[int] = set()
        kept = 0
        for r in [ROOT, OTHER] if root is None else [root]:
            frames_gone, pinned = self.model.remove(r, ())
            gone |= frames_gone
            kept += pinned
        assert (set(removed.frames), removed.pinned_pages) == (gone, kept)
        self.refuse_stale(bool(gone))

    def refuse_stale(self, something_left: bool) -> None:
        if something_left and self.stale is not None:
            with pytest.raises(PageMissing):
                self.index.pin(self.stale)
            self.stale = None

    @invariant()
    def index_agrees_with_model(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        if isinstance(self.policy, Strict):
            self.policy.agrees_with(self.index)
        page_tokens = self.model.page_tokens
        assert self.index.num_pages == len(self.model.pages)
        assert self.index.evictable_pages == sum(not p.pins for p in self.model.pages.values())
        listed = {(p.root, p.depth, p.frame, tuple(p.tokens.tolist()), p.pinned) for p in self.index.pages()}
        assert listed == {
            (root, len(chain) // page_tokens - 1, p.frame, chain[-page_tokens:], p.pins > 0)
            for (root, chain), p in self.model.pages.items()
        }


class AnyOrderMachine(PrefixIndexMachine):
    """The same with policies of their own mind: what leaves must be free to leave."""

    def new_policy(self) -> Policy:
        return Rvi(PolicySettings(draw=4, per_draw=2))

    def agree_on_evicted(self, evicted: list[int], pages: int) -> None:
        keys = {page.frame: key for key, page in self.model.pages.items()}
        for frame in evicted:
            root, chain = keys[frame]
            assert not self.model.pages.pop((root, chain)).pins
            assert not self.model.children(root, chain)
        assert len(evicted) == pages or all(page.pins for page in self.model.pages.values())


class GuardedMachine(AnyOrderMachine):
    def new_policy(self) -> Policy:
        policy = Guarded(PolicySettings(draw=4, per_draw=2), 64)
        policy.by_lru = True
        return policy


PrefixIndexMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPrefixIndexAgreesWithADictOfPages = PrefixIndexMachine.TestCase
AnyOrderMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixIndexUnderRvi = AnyOrderMachine.TestCase
GuardedMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPrefixIndexUnderAGuardThatFellBack = GuardedMachine.TestCase


def test_an_empty_index_matches_nothing_and_keeps_nothing() -> None:
    index = PrefixIndex(4)

    match = index.match(ROOT, ids(1, 2, 3, 4, 5))

    assert (match.frames.tolist(), match.tokens, match.partial, match.node.depth) == ([], 0, None, 0)
    index.pin(match.node)
    index.check()
    index.unpin(match.node, 1.0)
    index.check()
    assert (index.num_pages, index.evict(5, 1e3)) == (0, [])


def test_a_full_hit_up_to_the_last_token_ends_in_a_partial_page() -> None:
    index = PrefixIndex(4)
    index.insert(ROOT, ids(*range(8)), frames(10, 11), 1.0)

    match = index.match(ROOT, ids(*range(8)), limit=7)

    assert (match.frames.tolist(), match.tokens, match.partial) == ([10], 4, (11, 3))


def test_roots_share_nothing() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2), frames(0), 1.0)

    assert index.match(OTHER, ids(1, 2)).tokens == 0


def test_match_changes_nothing() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2, 3, 4), frames(0, 1), 1.0)
    index.insert(ROOT, ids(7, 8), frames(2), 2.0)

    index.match(ROOT, ids(1, 2))

    assert index.evict(3, 1e3) == [1, 0, 2]


def test_a_pin_ends_where_its_match_ended() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2, 3, 4, 5, 6), frames(0, 1, 2), 1.0)

    index.pin(index.match(ROOT, ids(1, 2, 9, 9)).node)

    assert index.evictable_pages == 2
    assert index.evict(9, 1e3) == [2, 1]
    index.check()


def test_pins_stay_right_when_another_insert_splits_the_run_they_end_in() -> None:
    index = PrefixIndex(2)
    path = index.insert(ROOT, ids(1, 2, 3, 4, 5, 6), frames(0, 1, 2), 1.0).node
    index.pin(path)

    index.insert(ROOT, ids(1, 2, 8, 8), frames(0, 3), 2.0)

    assert index.evict(9, 1e3) == [3]
    index.unpin(path, 3.0)
    assert index.evict(9, 1e3) == [2, 1, 0]
    index.check()


def test_a_match_made_before_a_split_can_still_be_pinned() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2, 3, 4, 5, 6), frames(0, 1, 2), 1.0)
    whole, head = index.match(ROOT, ids(1, 2, 3, 4, 5, 6)).node, index.match(ROOT, ids(1, 2)).node

    index.insert(ROOT, ids(1, 2, 3, 4, 8, 8), frames(0, 1, 3), 2.0)
    index.pin(head)
    index.pin(whole)

    assert index.evict(9, 1e3) == [3]
    index.check()


def test_splitting_a_run_changes_the_last_use_of_no_page() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1, 2, 3, 4), frames(0, 1, 2, 3), 7.0)
    before = {page.frame: page.last_use_s for page in index.pages()}

    index.pin(index.match(ROOT, ids(1, 2)).node)

    assert number_of_runs(index) == 2
    assert {page.frame: page.last_use_s for page in index.pages()} == before == dict.fromkeys(range(4), 7.0)


def test_two_sequences_behind_one_prompt_extend_without_pinning_each_others_pages() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2), frames(0), 1.0)
    first, second = index.match(ROOT, ids(1, 2)).node, index.match(ROOT, ids(1, 2)).node
    index.pin(first)
    index.pin(second)

    index.extend(first, ids(3, 4), frames(1), 2.0)
    index.extend(second, ids(5, 6), frames(2), 3.0)
    index.unpin(first, 4.0)

    assert index.evictable_pages == 1
    assert index.evict(9, 1e3) == [1]
    index.check()


def test_the_second_of_two_equal_sequences_gets_the_firsts_frames() -> None:
    index = PrefixIndex(2)
    first, second = index.match(ROOT, ids(1, 2)).node, index.match(ROOT, ids(1, 2)).node
    index.pin(first)
    index.pin(second)
    index.extend(first, ids(1, 2), frames(5), 1.0)

    extended = index.extend(second, ids(1, 2, 3, 4), frames(6, 7), 2.0)

    assert extended.duplicates == [6]
    assert extended.frames.tolist() == [5, 7]
    index.check()


def test_a_growing_sequence_stays_one_run() -> None:
    index = PrefixIndex(1)
    path = index.match(ROOT, ids(0)).node
    index.pin(path)
    for i in range(1000):
        index.extend(path, ids(i), frames(i), float(i))
    index.unpin(path, 1000.0)

    (run,) = index.evict_runs(1000, 1e3)

    assert (run.frames, run.depth, run.last_use_s) == (list(range(999, -1, -1)), 999, 1000.0)


def test_a_released_run_and_pages_put_behind_it_later_keep_their_own_histories() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1, 2), frames(0, 1), 0.0)
    turn = index.match(ROOT, ids(1, 2)).node
    index.pin(turn)
    index.begin(turn, 1.0)

    index.extend(turn, ids(3), frames(2), 2.0)
    index.extend(turn, ids(4), frames(3), 3.0)

    assert number_of_runs(index) == 2


def test_pages_that_come_back_take_the_rows_that_they_had() -> None:
    policy = Strict()
    left: list[Row] = []
    index = PrefixIndex(1, policy, on_leave=lambda row, frames, in_use: left.append(row))
    index.insert(ROOT, ids(1, 2, 3), frames(0, 1, 2), 0.0)
    index.evict(1, 1.0)
    index.evict(1, 2.0)
    again = index.match(ROOT, ids(1, 2, 3)).node
    index.pin(again)
    index.begin(again, 3.0)
    policy.reuse(left, 3.0)

    index.extend(again, ids(2, 3, 4), frames(5, 6, 7), 4.0, pieces=[(left[1], 1), (left[0], 1), (None, 1)])
    index.unpin(again, 5.0, Use(4, 3))

    index.check()
    policy.agrees_with(index)
    assert number_of_runs(index) == 1  # LRU has no reason to tell them apart
    assert index.evict(9, 6.0) == [7, 6, 5, 0]


def test_a_run_that_others_use_on_is_in_use_again_at_once() -> None:
    policy = Strict()
    index = PrefixIndex(1, policy)
    index.insert(ROOT, ids(1, 2), frames(0, 1), 0.0)
    paths = [index.match(ROOT, ids(1, 2)).node for _ in range(2)]
    for path in paths:
        index.pin(path)
        index.begin(path, 1.0)

    index.unpin(paths[0], 2.0, Use(2, 0))
    assert all(policy.in_use.values())

    index.unpin(paths[1], 3.0, Use(2, 0))
    assert not any(policy.in_use.values())


def test_a_path_that_nothing_used_leaves_the_order_alone() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1), frames(0), 1.0)
    index.insert(ROOT, ids(2), frames(1), 2.0)
    path = index.match(ROOT, ids(1)).node
    index.pin(path)
    index.unpin(path, 3.0, None)

    assert index.evict(2, 4.0) == [0, 1]


def test_a_sequence_that_repeats_another_leaves_one_run() -> None:
    """Each page sealed over pages that are there splits their run; the parts must not stay apart."""
    index = PrefixIndex(1)
    index.insert(ROOT, ids(*range(100)), frames(*range(100)), 0.0)
    path = index.match(ROOT, ids(*range(10))).node
    index.pin(path)
    index.begin(path, 9.0)
    for i in range(10, 100):
        extended = index.extend(path, ids(i), frames(1000 + i), float(i))
        assert (extended.frames.tolist(), extended.duplicates) == ([i], [1000 + i])
        assert number_of_runs(index) <= 2
    index.unpin(path, 100.0)

    assert index.evict(200, 1e3) == list(range(99, -1, -1))


def test_two_equal_sequences_side_by_side_leave_one_run() -> None:
    index = PrefixIndex(1)
    paths = [index.match(ROOT, ids(0)).node for _ in range(2)]
    for path in paths:
        index.pin(path)
    for i in range(50):
        for path in paths:
            index.extend(path, ids(i), frames(i), float(i))
        index.check()
        assert number_of_runs(index) == 1


def test_a_run_that_was_split_for_a_pin_is_one_again_when_all_of_it_was_used() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1, 2, 3), frames(0, 1, 2), 0.0)
    head, whole = index.match(ROOT, ids(1)).node, index.match(ROOT, ids(1, 2, 3)).node
    index.pin(head)
    index.pin(whole)

    index.unpin(head, 1.0)
    index.unpin(whole, 2.0)

    assert number_of_runs(index) == 1
    index.check()


def test_using_one_of_several_branches_leaves_the_others_in_place() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 1, 0, 1), frames(0, 1), 1.0)
    index.insert(ROOT, ids(1, 1, 0, 2), frames(0, 2), 2.0)
    branch = index.match(ROOT, ids(1, 1, 0, 1)).node
    index.pin(branch)
    index.unpin(branch, 3.0)

    assert index.match(ROOT, ids(1, 1, 0, 2)).frames.tolist() == [0, 2]
    index.check()


def test_an_old_tail_stays_apart_from_a_head_in_use() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1, 2), frames(0, 1), 0.0)
    index.insert(OTHER, ids(1), frames(2), 1.0)
    head = index.match(ROOT, ids(1)).node
    index.pin(head)
    index.unpin(head, 2.0)

    assert index.evict(3, 1e3) == [1, 2, 0]


def test_a_match_made_before_two_runs_became_one_can_still_be_pinned() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1, 2), frames(0, 1), 0.0)
    half = index.match(ROOT, ids(1)).node
    index.pin(half)
    before = index.match(ROOT, ids(1, 2)).node
    also_before = index.match(ROOT, ids(1)).node
    index.extend(half, ids(2), frames(1), 1.0)

    index.pin(before)
    index.pin(also_before)

    index.check()
    assert index.evictable_pages == 0


def test_eviction_takes_the_tail_of_the_run_used_longest_ago_and_says_when_that_was() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2, 3, 4, 5, 6), frames(0, 1, 2), 1.0)
    index.insert(OTHER, ids(1, 2), frames(3), 2.0)

    runs = index.evict_runs(2, 1e3)

    assert [(r.frames, r.depth, r.last_use_s) for r in runs] == [([2, 1], 2, 1.0)]
    index.touch(index.match(ROOT, ids(1, 2)).node, 3.0)
    assert index.evict(2, 1e3) == [3, 0]


def test_partial_is_the_best_of_the_newest_candidates() -> None:
    index = PrefixIndex(4)
    index.insert(ROOT, ids(1, 2, 3, 9), frames(500), 0.0)
    for i in range(PARTIAL_CANDIDATES - 1):
        index.insert(ROOT, ids(1, 2, 10 + i, 0), frames(i), 1.0 + i)

    within = index.match(ROOT, ids(1, 2, 3, 4)).partial
    index.insert(ROOT, ids(1, 2, 99, 0), frames(600), 99.0)
    beyond = index.match(ROOT, ids(1, 2, 3, 4)).partial

    assert within == (500, 3)
    assert beyond is not None and beyond[1] == 2


def test_a_removal_keeps_pinned_pages_and_says_how_many() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2, 3, 4, 5, 6), frames(0, 1, 2), 1.0)
    index.pin(index.match(ROOT, ids(1, 2, 3, 4)).node)

    removed = index.remove(ROOT, ids(1, 2))

    assert removed is not None
    assert (removed.frames, removed.pinned_pages) == ([2], 2)
    assert index.remove(ROOT, ids(7, 7)) is None
    index.check()


def test_removing_the_rest_of_a_pinned_run_takes_nothing_and_counts_only_the_rest() -> None:
    index = PrefixIndex(1)
    path = index.insert(ROOT, ids(1, 2, 3), frames(0, 1, 2), 1.0).node
    index.pin(path)

    assert index.remove(ROOT, ids(1, 2)) == ([], 2)
    assert index.remove_frames([2]) == ([], 1)


def test_only_frames_that_differ_from_the_trees_are_duplicates() -> None:
    index = PrefixIndex(1)
    index.insert(ROOT, ids(1, 2, 3), frames(0, 1, 2), 1.0)

    inserted = index.insert(ROOT, ids(1, 2, 3, 4), frames(0, 8, 9, 10), 2.0)

    assert inserted.duplicates == [8, 9]
    assert inserted.frames.tolist() == [0, 1, 2, 10]


def test_the_index_does_not_keep_the_callers_arrays_alive() -> None:
    index = PrefixIndex(2)
    tokens, own = ids(1, 2, 3, 4), frames(0, 1)
    index.insert(ROOT, tokens, own, 1.0)

    tokens[:] = 9
    own[:] = 9

    assert index.match(ROOT, ids(1, 2, 3, 4)).frames.tolist() == [0, 1]


@pytest.mark.parametrize("tokens", [np.zeros(4, np.int64), np.zeros((2, 2), np.int32)], ids=["int64", "2-d"])
def test_tokens_of_another_dtype_or_shape_are_refused(tokens: TokenIds) -> None:
    index = PrefixIndex(2)

    with pytest.raises(ValueError, match="int32"):
        index.match(ROOT, tokens)


def test_tokens_that_do_not_fill_their_frames_are_refused() -> None:
    index = PrefixIndex(2)

    with pytest.raises(ValueError, match="1 frames hold 2 tokens, got 3"):
        index.insert(ROOT, ids(1, 2, 3), frames(0), 1.0)
    with pytest.raises(ValueError, match="whole pages"):
        index.remove(ROOT, ids(1))
    with pytest.raises(ValueError, match="limit"):
        index.match(ROOT, ids(1), limit=-1)
    with pytest.raises(ValueError, match="page_tokens"):
        PrefixIndex(0)
    index.check()


def test_check_sees_a_count_that_drifted() -> None:
    index = PrefixIndex(2)
    index.insert(ROOT, ids(1, 2), frames(0), 1.0)
    index.evictable_pages += 1

    with pytest.raises(AssertionError, match="evictable_pages"):
        index.check()


def test_pages_that_moved_are_found_in_their_new_frames() -> None:
    index = PrefixIndex(2)
    inserted = index.insert(ROOT, np.arange(8, dtype=np.int32), np.array([4, 5, 6, 7], np.int32), 1.0)
    index.pin(inserted.node)
    index.insert(ROOT, np.array([0, 1, 9, 9], np.int32), np.array([4, 8], np.int32), 2.0)

    index.follow({5: 1, 8: 2})

    assert index.match(ROOT, np.arange(8, dtype=np.int32)).frames.tolist() == [4, 1, 6, 7]
    assert index.match(ROOT, np.array([0, 1, 9, 9], np.int32)).frames.tolist() == [4, 2]
    index.check()
