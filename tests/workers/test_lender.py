"""What a worker lends of its L1, and when it wants it back: an L1 without a model, whose peers write into what is lent."""

from __future__ import annotations

import os
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from l1_worlds import POLICIES, drive, workload
from scheduler_kit import Machine, Page

from kvtier.tier.pages.page import PageFormat
from kvtier.workers.node_io.peer_export import (
    PATIENCE_S,
    STARVED_S,
    PeerExport,
    starved,
    to_lend,
    to_take_back,
)
from kvtier.workers.requests.api import FinishReason
from kvtier.workers.requests.sequence import SequenceState

RAW, SMALL = PageFormat.FP32, PageFormat.INT4C


class NoLink:
    """The node is away."""

    is_up = False


class Peers:
    """The worker's peers: each step frames are lent and asked for, and come back some steps later, written over."""

    def __init__(self, made: Machine, share: float, slowness: float) -> None:
        self.made, self.share, self.slowness = made, share, slowness
        self.asked: dict[int, float] = {}
        self.lent = self.returned = 0
        self._step = made.step
        made.step = self.step  # type: ignore[method-assign]

    def step(self) -> None:
        made, table = self.made, self.made.table
        back = [frame for frame in self.asked if made.rng.random() > self.slowness]
        for frame in back:
            del self.asked[frame]
        if back:
            self.returned += len(back)
            made.table.take_back(back)
        elif self.asked and made.now - min(self.asked.values()) > 10.0:
            made.table.lent_overdue = True
        missing = made.scheduler.needed_soon()
        if table.frames.lent:
            self.asked.update(dict.fromkeys(to_take_back(table, missing, self.asked), made.now))
        if not self.asked:
            self.lend(*to_lend(table, missing, self.share))
        table.check(made.scheduler.active)
        self._step()

    def lend(self, size: int, count: int) -> None:
        for frame in self.made.table.frames.lend(size, count):
            self.lent += 1
            self.made.memory.write(frame, size, Page(0, RAW, []))  # of no token


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_whatever_is_lent_no_token_changes_and_nothing_starves(seed: int) -> None:
    rng = Random(seed)
    life = workload(rng, rng.choice(POLICIES))
    peers = Peers(life.made, rng.choice([0.3, 0.8, 1.0]), rng.choice([0.0, 0.5, 0.95]))

    drive(life, meddle=rng.random() < 0.5)

    frames = life.made.table.frames
    assert len(frames.lent) == peers.lent - peers.returned


class Keepers(Peers):
    """Peers that give nothing back. Who waits for that too long is ended, as a worker does."""

    def __init__(self, made: Machine, share: float) -> None:
        super().__init__(made, share, slowness=1.0)
        self.lender = PeerExport(made.scheduler, NoLink(), share)  # type: ignore[arg-type]
        self.given_up = 0

    def step(self) -> None:
        made = self.made
        seq = self.lender.given_up(made.now)
        for sibling in [] if seq is None else list(seq.request.sequences):
            if sibling.state is not SequenceState.FINISHED:
                made.end(sibling, FinishReason.CANCELLED)
                self.given_up += 1
                del made.finished[sibling.request.spec.request_id, sibling.index]
        super().step()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_whatever_peers_keep_for_good_each_request_ends_and_no_token_changes(seed: int) -> None:
    rng = Random(seed)
    life = workload(rng, rng.choice(POLICIES))
    peers = Keepers(life.made, rng.choice([0.5, 0.8, 1.0]))

    drive(life, meddle=rng.random() < 0.5)

    assert len(life.made.table.frames.lent) == peers.lent


def test_who_needs_what_peers_keep_is_given_up_after_a_while_and_nothing_else() -> None:
    made = idle(16)
    lender = PeerExport(made.scheduler, NoLink(), 1.0)  # type: ignore[arg-type]
    made.table.frames.lend(1, 10)
    large = made.submit("large", [0] * 8, 2).sequences[0]
    made.submit("small", [1] * 2, 2)
    assert starved(made.scheduler) is large
    assert lender.given_up(100.0) is None and lender.next_deadline_s is None  # they may come back in time

    made.table.lent_overdue = True
    assert lender.given_up(100.0) is None
    assert lender.next_deadline_s == 100.0 + STARVED_S
    assert lender.given_up(100.0 + STARVED_S / 2) is None
    assert lender.given_up(100.0 + STARVED_S) is large
    made.end(large, FinishReason.CANCELLED)

    assert lender.given_up(200.0) is None and lender.next_deadline_s is None
    made.run()
    assert made.finished["small", 0] is FinishReason.LENGTH


def test_whatever_is_computed_meanwhile_begins_the_wait_again() -> None:
    made = idle(16)
    lender = PeerExport(made.scheduler, NoLink(), 1.0)  # type: ignore[arg-type]
    lent = made.table.frames.lend(1, 10)
    made.table.lent_overdue = True
    seq = made.submit("grows", [0] * 4, 12).sequences[0]

    def starve() -> None:
        while starved(made.scheduler) is None:
            made.step()

    starve()
    start, computed = made.now, seq.computed
    assert seq.state is SequenceState.RUNNING and lender.given_up(start) is None
    made.table.take_back(lent[:1])
    starve()

    assert seq.computed > computed
    assert lender.given_up(start + STARVED_S) is None
    assert lender.given_up(start + 2 * STARVED_S) is seq


def idle(num_pages: int) -> Machine:
    return Machine(num_pages, 1, max_batch_tokens=8, max_sequences=2, rng=Random(0))


def test_an_idle_worker_lends_its_share_and_keeps_a_reserve() -> None:
    made = idle(64)

    assert to_lend(made.table, {}, 0.5) == (1, 32)
    assert to_lend(made.table, {}, 1.0) == (1, 64 - 8)
    assert to_lend(made.table, {1: 40}, 1.0) == (1, 64 - 8 - 40)
    assert to_lend(made.table, {1: 55}, 1.0) == (1, 0)  # not worth a message


def test_what_is_free_or_evictable_is_used_before_anything_is_asked_back() -> None:
    made = idle(64)
    lent = made.table.frames.lend(1, 32)

    assert to_take_back(made.table, {1: 32}, {}) == []
    assert len(to_take_back(made.table, {1: 33}, {})) == 1 + 2  # and a batch
    assert to_take_back(made.table, {1: 33}, {lent[0]: None}) == []
    assert sorted(to_take_back(made.table, {1: 1000}, {})) == sorted(lent)


def test_of_several_sizes_whole_slabs_are_lent_and_asked_back() -> None:
    made = Machine(256, 1, max_batch_tokens=8, max_sequences=2, rng=Random(0), pages=({RAW: 2, SMALL: 1},))
    slabs = made.table.frames.slabs
    lent = []
    for expected in (2, 1):
        size, count = to_lend(made.table, {}, 0.5)
        assert size == expected and count % slabs.per_slab(size) == 0
        lent += made.table.frames.lend(size, count)

    assert to_lend(made.table, {}, 0.5)[1] == 0
    assert 2 * len(set(map(slabs.slab_of, lent))) == slabs.num_slabs
    wanted = to_take_back(made.table, {2: slabs.num_slabs // 2 * slabs.per_slab(2) + 1}, {})
    assert {slabs.slab_of(frame) for frame in lent if frame not in wanted}.isdisjoint(
        map(slabs.slab_of, wanted)
    )
    made.table.take_back(lent)
    assert slabs.free_slabs == slabs.num_slabs


def test_frames_that_a_stopped_borrower_keeps_after_its_node_died_are_waited_for_as_long_as_others() -> None:
    made = idle(64)
    lender = PeerExport(made.scheduler, NoLink(), 1.0)  # type: ignore[arg-type]
    lifeline, borrowers = os.pipe()
    os.set_blocking(lifeline, False)
    lender.came(lifeline)
    lent = made.table.frames.lend(1, 32)
    lender.went()
    lender.expire(100.0)
    assert not made.table.lent_overdue  # nothing waits for them

    assert made.table.wait_for_lent()
    for now in (200.0, 200.0 + PATIENCE_S / 2):
        lender.expire(now)
        lender.balance(now)
        assert made.table.wait_for_lent()
    assert (at := lender.next_deadline_s) is not None and at <= 200.0 + PATIENCE_S
    lender.expire(200.0 + PATIENCE_S)

    assert not made.table.wait_for_lent() and len(made.table.frames.lent) == len(lent)
    lender.check()
    os.close(borrowers)
    lender.expire(300.0)
    assert not made.table.frames.lent and not made.table.lent_overdue
