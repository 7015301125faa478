"""The plan's ledger and order: who has answered what, when a rank is late, and what a rank takes for its next step."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.tier.protocol.ipc import MessageReader, frame
from kvtier.workers.parallel.plan import (
    MAX_UNANSWERED,
    Done,
    Forward,
    GroupBroken,
    Ledger,
    Order,
    Step,
    ToRank,
    batch_of,
    forward_step,
)
from kvtier.workers.runner.runner import GroupPages, SequenceRows, StepBatch


def test_a_result_is_there_once_the_last_rank_has_answered() -> None:
    ledger = Ledger([1, 2], patience_s=10.0)
    first, second = (ledger.number("CopyIn", 0.0, wanted=True) for _ in range(2))
    assert (first, second) == (1, 2)

    ledger.done(2, Done(second))
    ledger.done(1, Done(second))
    ledger.done(1, Done(first, {3: "no memory"}))

    assert ledger.take(first) is None
    assert ledger.take(second) == {}
    ledger.done(2, Done(first, {3: "corrupt", 4: "gone"}))
    assert ledger.take(first) == {3: "rank 1: no memory", 4: "rank 2: gone"}


def test_steps_that_nothing_waits_for_leave_nothing_behind() -> None:
    ledger = Ledger([1], patience_s=10.0)
    for n in range(1, MAX_UNANSWERED + 1):
        assert ledger.has_room
        assert ledger.number("Forward", float(n), wanted=False) == n
    assert not ledger.has_room

    for n in range(1, MAX_UNANSWERED + 1):
        assert ledger.done(1, Done(n)) is None

    assert ledger.has_room
    assert not (ledger._unanswered or ledger._wanted or ledger._results)


def test_the_oldest_step_says_who_is_late() -> None:
    ledger = Ledger([1, 2, 3], patience_s=10.0)
    ledger.number("Forward", 5.0, wanted=False)
    ledger.number("Move", 14.0, wanted=False)
    ledger.done(2, Done(1))

    assert ledger.overdue(15.0) is None
    assert ledger.overdue(15.5) == "rank 1, 3 has not answered step 1 (Forward) for 10.5 s"


@pytest.mark.parametrize("answer", [Done(2), Done(0), Done(1)])
def test_an_answer_that_was_not_asked_for_is_seen(answer: Done) -> None:
    ledger = Ledger([1, 2], patience_s=10.0)
    ledger.number("Forward", 0.0, wanted=False)
    ledger.done(1, Done(1))

    assert ledger.done(1, answer) == f"rank 1 answered step {answer.number}, which it wasn't asked for"


def test_a_broken_group_gives_no_result_but_those_it_has() -> None:
    ledger = Ledger([1], patience_s=10.0)
    done, open_ = (ledger.number("CopyOut", 0.0, wanted=True) for _ in range(2))
    ledger.done(1, Done(done))

    assert ledger.fail("rank 1 is gone") and not ledger.fail("something else")

    assert ledger.take(done) == {}
    with pytest.raises(GroupBroken, match="rank 1 is gone"):
        ledger.take(open_)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_rank_takes_no_step_out_of_its_order(number: int) -> None:
    order = Order()
    order.next(1)

    with pytest.raises(GroupBroken, match=f"step {number} came after step 1"):
        order.next(number)


def test_a_batch_goes_over_the_wire_without_its_wanted_logits() -> None:
    pages = (
        GroupPages(np.array([4, 2, 9], np.int32), np.array([1, 1, 0], np.uint8), 1, 5, 64, 16),
        GroupPages(np.array([7], np.int32)),
    )
    batch = StepBatch(
        np.array([5, 6, 7], np.int32),
        np.array([10, 11, 3], np.int32),
        [SequenceRows(0, 2, 12, pages), SequenceRows(2, 1, 4, pages[1:])],
        np.array([1, 2], np.int32),
    )

    (step,) = MessageReader(ToRank).feed(frame(Step(9, forward_step(batch))))

    assert isinstance(step, Step) and step.number == 9 and isinstance(step.body, Forward)
    found = batch_of(step.body)
    assert found.token_ids.tolist() == [5, 6, 7] and found.positions.tolist() == [10, 11, 3]
    assert found.logit_rows.tolist() == []
    for mine, theirs in zip(batch.sequences, found.sequences, strict=True):
        assert (mine.start, mine.length, mine.context) == (theirs.start, theirs.length, theirs.context)
        for a, b in zip(mine.pages, theirs.pages, strict=True):
            assert a.frames.tolist() == b.frames.tolist()
            assert (a.formats is None) == (b.formats is None)
            assert a.formats is None or b.formats is None or a.formats.tolist() == b.formats.tolist()
            assert (a.sink_pages, a.first_page, a.window, a.sinks) == (
                b.sink_pages,
                b.first_page,
                b.window,
                b.sinks,
            )
