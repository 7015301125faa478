"""Every kind of kernel refuses, before it touches a byte, what would lead outside the pages or over others' pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import KINDS, kernels
from layout_kit import make_layout, poisoned_arena, spread_frames

from kvtier.kernels.layout import check_conversion, check_plan
from kvtier.kernels.ops import Format, IntArray, Kernels, KVLayout, PlanSequence, StepPlan, make_plan
from kvtier.kernels.triton_kernels import TritonKernels

pytestmark = pytest.mark.slow

ALL_KINDS = [
    *(functools.partial(kernels, kind) for kind in KINDS),
    lambda: TritonKernels(torch.device("cpu")),
]
IDS = [*KINDS, "triton"]
HIGHEST = 2**31 - 1
every_kind = pytest.mark.parametrize("kind", ALL_KINDS, ids=IDS)

Make = Callable[[], Kernels]


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def attend(kind: Make, layout: KVLayout, arena: torch.Tensor, plan: StepPlan, rows: int = 1) -> None:
    q = torch.ones(rows, layout.num_kv_heads, layout.head_dim)
    kind().paged_attention(q, arena, layout, plan, 0, 0.1)


def write(kind: Make, layout: KVLayout, arena: torch.Tensor, plan: StepPlan, rows: int = 1) -> None:
    x = torch.ones(rows, layout.num_kv_heads, layout.head_dim)
    kind().write_kv(x, x, arena, layout, plan, 0)


# ---- plans ------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("call", [attend, write], ids=["attend", "write"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": ints(HIGHEST)}, "outside the step's 1 rows"),
        ({"starts": ints(-1)}, "outside the step's 1 rows"),
        ({"first_pages": ints(2**28), "windows": ints(16)}, "pages that its sequence doesn't name"),
        ({"first_pages": ints(HIGHEST), "windows": ints(16)}, "pages that its sequence doesn't name"),
        ({"first_frames": ints(HIGHEST - 3)}, "fewer frames than its context needs"),
        ({"first_frames": ints(-1)}, "can't be negative"),
        ({"contexts": ints(HIGHEST)}, "may have 1073741824 tokens, got 2147483647"),
        ({"contexts": ints(65)}, "fewer frames than its context needs"),
        ({"lengths": ints(-5)}, "less than none"),
        ({"lengths": ints(65)}, "more rows than context"),
        ({"windows": ints(-16)}, "can't be negative"),
        ({"lengths": ints(1, 1)}, "of one length"),
        ({"frames": ints(0, 8, 16, -1)}, "RAW frames must be in"),
        ({"frames": ints(0, 8, 16, 500)}, "RAW frames must be in"),
        ({"frames": ints(0, 8, 16)}, "need as many formats"),
        ({"formats": np.array([0, 0, 0, 9], np.uint8)}, "no pages of format 9"),
    ],
)
def test_a_plan_that_leads_outside_is_refused_whatever_its_numbers(
    kind: Make,
    call: Callable[[Make, KVLayout, torch.Tensor, StepPlan], None],
    changes: dict[str, np.ndarray],
    message: str,
) -> None:
    """Sums and products that wrap around in 32 bits once passed, and the process died of them."""
    layout = make_layout(heads=1, formats=[Format.RAW])
    arena = poisoned_arena(layout, 4)
    plan = make_plan([PlanSequence(0, 1, 64, spread_frames(layout, 4).numpy())], 16)

    with pytest.raises(ValueError, match=message):
        call(kind, layout, arena, replace(plan, **changes))

    assert bool((arena == 0xFF).all())


EXTREMES = [0, 1, 2, 3, 4, 15, 16, 17, 48, 64, 2**26, 2**27, 2**28, 2**30, HIGHEST - 3, HIGHEST, -1, -(2**31)]


USUAL = {"starts": 0, "lengths": 1, "contexts": 64, "first_frames": 1, "sink_pages": 1, "first_pages": 2}
USUAL |= {"windows": 20, "sinks": 4}
SMALL = make_layout(heads=1, formats=[Format.RAW], layers=1)
SMALL_ARENA = poisoned_arena(SMALL, 5)
FRAMES = spread_frames(SMALL, 5).numpy()


@settings(deadline=None, max_examples=300)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(USUAL)), st.sampled_from(EXTREMES), max_size=4),
    rows=st.sampled_from([1, 4]),
)
def test_a_plan_that_passes_leads_nowhere_but_to_its_rows_and_frames(
    changes: dict[str, int], rows: int
) -> None:
    """Against Python's own integers, which don't wrap around."""
    drawn = USUAL | changes
    arrays = {name: ints(value) for name, value in drawn.items()}
    plan = StepPlan(frames=FRAMES, formats=np.zeros(5, np.uint8), **arrays)

    try:
        check_plan(plan, rows, SMALL_ARENA, SMALL)
    except ValueError:
        return

    start, length, context = (drawn[name] for name in ("starts", "lengths", "contexts"))
    assert 0 <= start and 0 <= length <= context and start + length <= rows
    window, kept, first = (drawn[name] for name in ("windows", "sink_pages", "first_pages"))
    lowest = max(0, context - length - window + 1) if window else 0
    assert (context - lowest) // 16 <= len(FRAMES)
    pages = {t // 16 for t in range(lowest, context)}
    pages |= {t // 16 for t in range(min(drawn["sinks"], lowest))}
    for page in pages:
        assert page < kept or page >= first
        entry = drawn["first_frames"] + (page if page < kept else kept + page - first)
        assert 0 <= entry < len(FRAMES)


@every_kind
def test_a_plan_is_checked_again_for_another_arena_and_for_other_rows(kind: Make) -> None:
    layout = make_layout(heads=1, formats=[Format.RAW])
    arena = torch.zeros_like(poisoned_arena(layout, 4))
    plan = make_plan([PlanSequence(0, 2, 64, spread_frames(layout, 4).numpy())], 16)
    one = kind()
    attend(lambda: one, layout, arena, plan, 2)

    with pytest.raises(ValueError, match="frames must be in"):
        attend(lambda: one, layout, arena[:20], plan, 2)
    with pytest.raises(ValueError, match="outside the step's 1 rows"):
        attend(lambda: one, layout, arena, plan, 1)


@every_kind
def test_rows_go_only_into_pages_of_the_format_that_is_written(kind: Make) -> None:
    layout = make_layout(heads=1, write_format=Format.FP8)
    arena = poisoned_arena(layout, 3)
    frames = spread_frames(layout, 3).numpy()
    formats = np.array([Format.INT4C, Format.INT4C, Format.FP8], np.uint8)

    write(kind, layout, arena, make_plan([PlanSequence(0, 8, 40, frames, formats)], 16), 8)
    before = arena.clone()
    with pytest.raises(ValueError, match="rows are written as FP8, page 1 is INT4C"):
        write(kind, layout, arena, make_plan([PlanSequence(0, 9, 40, frames, formats)], 16), 9)
    with pytest.raises(ValueError, match="INT4C needs a whole page"):
        whole = make_plan([PlanSequence(0, 1, 1, frames)], 16, Format.INT4C)
        write(kind, replace(layout, write_format=Format.INT4C), arena, whole)
    with pytest.raises(ValueError, match="no pages of its write_format FP8"):
        few = replace(layout, records={Format.RAW: layout.records[Format.RAW]})
        write(kind, few, arena, make_plan([], 16), 0)
    assert torch.equal(arena, before)


# ---- arguments --------------------------------------------------------------------------------------------------


@every_kind
def test_keys_need_as_many_values_and_a_layer_that_there_is(kind: Make) -> None:
    layout = make_layout(heads=1, formats=[Format.RAW])
    arena = poisoned_arena(layout, 1)
    plan = make_plan([(0, 16, 16, ints(0))], 16)
    k = torch.ones(16, 1, 64)

    with pytest.raises(ValueError, match="got 16 and 8"):
        kind().write_kv(k, k[:8], arena, layout, plan, 0)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"no layer {layer} of 2"):
            kind().write_kv(k, k, arena, layout, plan, layer)
        with pytest.raises(ValueError, match=f"no layer {layer} of 2"):
            kind().paged_attention(k, arena, layout, plan, layer, 0.1)
    assert bool((arena == 0xFF).all())


@every_kind
def test_options_of_attention_that_dont_fit_the_queries_are_refused(kind: Make) -> None:
    layout = make_layout(heads=1, formats=[Format.RAW])
    arena = poisoned_arena(layout, 1)
    plan, q = make_plan([(0, 1, 1, ints(0))], 16), torch.ones(1, 2, 64)

    with pytest.raises(ValueError, match=r"q_sinks must be torch.float32 \[1, 2, 64\]"):
        kind().paged_attention(q, arena, layout, plan, 0, 0.1, q_sinks=q[:, :1])
    with pytest.raises(ValueError, match="q_sinks must be torch.float32 .* got torch.float16"):
        kind().paged_attention(q, arena, layout, plan, 0, 0.1, q_sinks=q.half())
    with pytest.raises(ValueError, match=r"sink_logits must be \[2\], got \[1\]"):
        kind().paged_attention(q, arena, layout, plan, 0, 0.1, sink_logits=torch.zeros(1))
    for softcap in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="softcap must be positive"):
            kind().paged_attention(q, arena, layout, plan, 0, 0.1, softcap=softcap)


@every_kind
def test_sink_logits_may_be_a_column_of_a_matrix(kind: Make) -> None:
    layout = make_layout(heads=1, formats=[Format.RAW])
    arena = torch.zeros_like(poisoned_arena(layout, 1))
    plan, q = make_plan([(0, 1, 1, ints(0))], 16), torch.ones(1, 2, 64)
    logits = torch.arange(6.0).view(2, 3)[:, 1]

    _, lse = kind().paged_attention(q, arena, layout, plan, 0, 0.1, sink_logits=logits)

    torch.testing.assert_close(lse[0], torch.logaddexp(torch.zeros(2), torch.tensor([1.0, 4.0])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 65}, "must be even, got 65 and 0"),
        ({"rope_dim": 7}, "must be even, got 64 and 7"),
        ({"page_tokens": 8}, "power of two from 16 up .* got 8 and 64"),
        ({"page_tokens": 24}, "power of two from 16 up .* got 24 and 64"),
        ({"head_dim": 60}, "that 8 divides, got 16 and 60"),
    ],
)
def test_a_layout_that_kernels_would_misread_can_not_be_made(changes: dict[str, int], message: str) -> None:
    layout = make_layout()
    with pytest.raises(ValueError, match=message):
        replace(layout, **changes)  # type: ignore[arg-type]


def test_raw_pages_may_have_any_number_of_tokens_and_an_even_head_but_no_odd_one() -> None:
    layout = make_layout(formats=[Format.RAW])
    replace(layout, page_tokens=8, head_dim=60)
    with pytest.raises(ValueError, match="must be even, got 65"):
        replace(layout, head_dim=65)


# ---- latents ----------------------------------------------------------------------------------------------------


@every_kind
def test_latents_are_read_only_where_all_pages_of_the_range_are_named(kind: Make) -> None:
    """A range that began among the sinks and ended in the window once read other pages for those between."""
    layout = make_layout(heads=1, dim=32, rope_dim=16, formats=(Format.RAW, Format.FP8))
    arena = torch.zeros_like(poisoned_arena(layout, 4))
    frames = spread_frames(layout, 4).numpy()
    plan = make_plan([PlanSequence(0, 1, 100, frames, None, 1, 4, 20, 4)], 16)

    def read(first: int, last: int, sequence: int = 0) -> int:
        return len(kind().read_latents(arena, layout, plan, 0, sequence, first, last)[0])

    assert [read(0, 16), read(3, 10), read(64, 100), read(30, 30)] == [16, 7, 36, 0]
    for first, last in ((0, 100), (0, 17), (15, 65), (16, 64), (20, 30), (63, 100)):
        with pytest.raises(ValueError, match="pages 1 to 3 of sequence 0 have left its window"):
            read(first, last)
    for first, last, sequence in ((90, 101, 0), (-1, 5, 0), (9, 8, 0), (0, 1, 1), (0, 1, -1)):
        with pytest.raises(ValueError, match=f"positions {first} to {last} of sequence {sequence}"):
            read(first, last, sequence)
    with pytest.raises(ValueError, match="no layer 2 of 2"):
        kind().read_latents(arena, layout, plan, 2, 0, 0, 1)
    with pytest.raises(ValueError, match="RAW frames must be in"):
        kind().read_latents(arena, layout, replace(plan, frames=plan.frames + 500), 0, 0, 0, 1)


# ---- conversions ------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 40], [80, 87], "target frames that are written must differ by 8 or more, got 80 and 87"),
        ([0], [15], "target frame of its own.* source 0 of 16 units and target 15 of 8"),
        ([20], [13], "target frame of its own.* source 20 of 16 units and target 13 of 8"),
        ([0, 40], [80, 0], "target frame of its own"),
        ([0, 80], [100, 40], None),
        ([8], [0], None),
        ([0, 0], [16, 24], None),
    ],
)
def test_pages_of_several_units_are_not_converted_over_each_other(
    kind: Make, sources: list[int], targets: list[int], message: str | None
) -> None:
    layout = make_layout(heads=1, dim=128, layers=1, formats=(Format.RAW, Format.FP8), unit_bytes=1024)
    record = layout.records[Format.FP8]
    layout = replace(layout, records=layout.records | {Format.FP8: replace(record, nbytes=8 * 1024)})
    assert layout.page_units(Format.RAW) == 16
    arena = torch.zeros(128, 1024, dtype=torch.uint8)

    def convert() -> None:
        kind().convert_pages(arena, layout, ints(*sources), Format.RAW, ints(*targets), Format.FP8)

    if message is None:
        convert()
    else:
        with pytest.raises(ValueError, match=message):
            convert()
        assert not arena.any()


@settings(deadline=None, max_examples=300)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4),
    units=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_a_conversion_passes_exactly_if_no_unit_is_written_twice_or_read_as_well(
    pairs: list[tuple[int, int]], units: tuple[int, int]
) -> None:
    layout = make_layout(heads=1, dim=16, layers=1, formats=(Format.RAW, Format.FP8))
    records = {
        format: replace(layout.records[format], nbytes=n * 1024 - 256)
        for format, n in zip((Format.RAW, Format.FP8), units, strict=True)
    }
    layout = replace(layout, records=records)
    arena = torch.zeros(44, 1024, dtype=torch.uint8)
    read = {unit for source, _ in pairs for unit in range(source, source + units[0])}
    written = [unit for _, target in pairs for unit in range(target, target + units[1])]
    right = len(set(written)) == len(written) and not read & set(written)

    try:
        sources, targets = (ints(*(pair[i] for pair in pairs)) for i in range(2))
        check_conversion(arena, layout, sources, Format.RAW, targets, Format.FP8)
        passed = True
    except ValueError:
        passed = False

    assert passed == right
