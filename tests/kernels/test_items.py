"""Work items cover exactly what each row attends, once, whatever the windows, formats and cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.kernels.items import DIRECT, balanced_split, work_items
from kvtier.kernels.ops import PlanSequence, StepPlan, make_plan

PAGE = 16
CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """A plan of a few sequences, some of whose rows belong to none, and its number of rows."""
    parts: list[PlanSequence] = []
    row = page = 0
    for _ in range(draw(st.integers(0, 4))):
        row += draw(st.integers(0, 2))
        context = draw(st.integers(1, 120))
        length = draw(st.integers(1, min(context, 5)))
        window = draw(st.sampled_from([0, 0, 1, 7, 20, 200]))
        sinks = draw(st.integers(0, 20)) if window else 0
        sink_pages = -(-sinks // PAGE)
        lowest = max(0, context - length - window + 1) if window else 0
        first_page = draw(st.integers(sink_pages, lowest // PAGE)) if lowest // PAGE >= sink_pages else 0
        first_page = first_page if window else 0
        pages = -(-context // PAGE)
        named = pages if not first_page else min(pages, sink_pages) + max(0, pages - first_page)
        formats = np.array(draw(st.lists(st.integers(0, 2), min_size=named, max_size=named)), np.uint8)
        frames = np.arange(page, page + named, dtype=np.int32)
        sink_pages = sink_pages if first_page else 0
        parts.append(
            PlanSequence(row, length, context, frames, formats, sink_pages, first_page, window, sinks)
        )
        row, page = row + length, page + named
    return make_plan(parts, PAGE), row + draw(st.integers(0, 2))


def _attended(plan: StepPlan, num_rows: int) -> dict[int, list[tuple[int, int, int]]]:
    """By row: frame, place in the page and format of each token that it attends, in order."""
    found: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(num_rows)}
    for s in range(plan.num_sequences):
        length, context = int(plan.lengths[s]), int(plan.contexts[s])
        window, sinks = int(plan.windows[s]), int(plan.sinks[s])
        for i in range(length):
            t = context - length + i
            for j in range(t + 1):
                if not window or j > t - window or j < sinks:
                    entry = plan.entry(s, j // PAGE)
                    place = (int(plan.frames[entry]), j % PAGE, int(plan.formats[entry]))
                    found[int(plan.starts[s]) + i].append(place)
    return found


@given(plans(), st.sampled_from([16, 32, 64, 1024]), st.booleans())
@settings(deadline=None, max_examples=200)
def test_items_cover_what_each_row_attends_once(
    made: tuple[StepPlan, int], split_tokens: int, separate_sinks: bool
) -> None:
    plan, num_rows = made

    work = work_items(plan, PAGE, split_tokens, num_rows, CPU, separate_sinks=separate_sinks)

    found: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(num_rows)}
    slots: dict[int, list[int]] = {row: [] for row in range(num_rows)}
    for format, table in work.by_format:
        lengths = [end - first for _, _, first, end, _, _ in table.tolist()]
        assert lengths == sorted(lengths, reverse=True)
        for row, base, first, end, slot, _ in table.tolist():
            assert first // split_tokens == (end - 1) // split_tokens
            for j in range(first, end):
                found[row].append((int(work.pages[base + j // PAGE]), j % PAGE, int(format)))
            slots[row].append(slot)
    assert {row: sorted(places) for row, places in found.items()} == {
        row: sorted(places) for row, places in _attended(plan, num_rows).items()
    }
    joined = {row: slots[row] for row in range(num_rows) if len(slots[row]) != 1}
    assert all(slots[row] == [DIRECT] for row in range(num_rows) if row not in joined)
    assert work.rows.tolist() == sorted(joined)
    indptr = work.indptr.tolist()
    for i, row in enumerate(work.rows.tolist()):
        assert sorted(joined[row]) == list(range(indptr[i], indptr[i + 1]))
    assert work.num_slots == indptr[-1] == sum(len(of) for of in joined.values())


def test_sinks_are_items_of_their_own_where_asked() -> None:
    part = PlanSequence(0, 1, 60, np.arange(4, dtype=np.int32), None, 0, 0, 20, 4)
    plan = make_plan([part], PAGE)

    ((_, table),) = work_items(plan, PAGE, 1024, 1, CPU, separate_sinks=True).by_format

    assert sorted((first, end, sinks) for _, _, first, end, _, sinks in table.tolist()) == [
        (0, 4, 1),
        (40, 60, 0),
    ]


def test_a_row_has_the_same_items_whatever_else_is_in_the_step() -> None:
    one = PlanSequence(0, 1, 100, np.arange(7, dtype=np.int32))
    other = PlanSequence(1, 3, 40, np.arange(7, 10, dtype=np.int32))

    alone = work_items(make_plan([one], PAGE), PAGE, 32, 1, CPU)
    together = work_items(make_plan([one, other], PAGE), PAGE, 32, 4, CPU)

    mine = [item[1:4] for item in together.by_format[0][1].tolist() if item[0] == 0]
    assert mine == [item[1:4] for item in alone.by_format[0][1].tolist()]


def test_a_split_must_end_with_a_page() -> None:
    plan = make_plan([PlanSequence(0, 1, 20, np.arange(2, dtype=np.int32))], PAGE)

    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        work_items(plan, PAGE, 24, 1, CPU)


def test_a_balanced_split_fills_the_device_and_is_no_shorter_than_what_pays() -> None:
    long = make_plan([PlanSequence(0, 1, 4096, np.arange(256, dtype=np.int32))], PAGE)
    windowed = make_plan([PlanSequence(0, 1, 4096, np.arange(256, dtype=np.int32), None, 0, 0, 100, 4)], PAGE)

    assert balanced_split(long, 8, 64) == 512
    assert balanced_split(long, 1000, 64) == 64
    assert balanced_split(windowed, 8, 16) == 16
