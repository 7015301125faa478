"""The Triton attention kernels, in the interpreter, against attention in float64 over the numbers that the pages hold.

Arenas are poisoned: whatever no row attends, in pages or between them, reads as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import make_layout, poisoned_arena, spread_frames
from ptx_emulator import emulate

from kvtier.kernels import reference
from kvtier.kernels.gqa import INTERPRETED, PagedAttention, Tuning
from kvtier.kernels.ops import Format, KVLayout, PlanSequence, StepPlan, make_plan

pytestmark = pytest.mark.slow

LAYER = 1
SHAPES = [(16, 1, 64), (32, 3, 80), (64, 4, 128), (16, 7, 96), (64, 8, 64), (32, 16, 256)]


class Part(NamedTuple):
    """One sequence: its rows, all its tokens, and what its rows attend."""

    length: int
    context: int
    window: int = 0
    sinks: int = 0


@dataclass(frozen=True)
class Case:
    """A step over pages that are filled, and poisoned where nothing is attended."""

    layout: KVLayout
    arena: torch.Tensor
    plan: StepPlan
    q: torch.Tensor
    q_sinks: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        """The usual one."""
        return float(self.layout.head_dim**-0.5)

    def run(
        self, split_tokens: int = 0, dot: torch.dtype | None = None, tuning: Tuning | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of the kernels."""
        kernels = PagedAttention("sm_90", 12, split_tokens, dot=dot, tuning=tuning)
        return kernels.paged_attention(
            self.q,
            self.arena,
            self.layout,
            self.plan,
            LAYER,
            self.scale,
            q_sinks=self.q_sinks,
            sink_logits=self.sink_logits,
            softcap=self.softcap,
        )


def attended(part: Part) -> torch.Tensor:
    """bool [rows, context]: the keys that each row attends."""
    row = torch.arange(part.context - part.length, part.context)[:, None]
    key = torch.arange(part.context)[None]
    near = key > row - part.window if part.window else torch.ones(1, 1, dtype=torch.bool)
    return (key <= row) & (near | (key < part.sinks))


def make_case(
    parts: Sequence[Part],
    formats: Sequence[Format] = (Format.RAW,),
    *,
    page_tokens: int = 16,
    heads: int = 2,
    group: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    with_sink_queries: bool = False,
    with_logits: bool = False,
    softcap: float = 0.0,
    seed: int = 0,
    value_scale: float = 1.0,
) -> Case:
    """Page i of all sequences' pages has format formats[i % len]; before, between and behind the sequences' rows is one idle row."""
    g = torch.Generator().manual_seed(seed)
    layout = make_layout(heads=heads, dim=dim, page_tokens=page_tokens, dtype=dtype)
    total = sum(-(-part.context // page_tokens) for part in parts)
    frames = spread_frames(layout, total, seed).numpy()
    arena = poisoned_arena(layout, total)
    sequences, start, num_pages = [], 1, 0
    for part in parts:
        seen = attended(part).any(0)
        pages = np.arange(-(-part.context // page_tokens))
        lowest = max(0, part.context - part.length - part.window + 1) if part.window else 0
        first_page = lowest // page_tokens
        sink_pages = min(-(-part.sinks // page_tokens), first_page) if part.window else 0
        pages = pages[(pages < sink_pages) | (pages >= first_page)]
        own = np.array([int(formats[(num_pages + i) % len(formats)]) for i in range(len(pages))], np.uint8)
        its_frames = frames[num_pages : num_pages + len(pages)]
        num_pages += len(pages)
        for page, format, frame in zip(pages.tolist(), own.tolist(), its_frames.tolist(), strict=True):
            here = torch.zeros(page_tokens, dtype=torch.bool)
            inside = seen[page * page_tokens : (page + 1) * page_tokens]
            here[: len(inside)] = inside
            fill_page(arena, layout, Format(format), frame, here, value_scale, g)
        sequences.append(
            PlanSequence(
                start,
                part.length,
                part.context,
                its_frames,
                own,
                sink_pages,
                first_page,
                part.window,
                part.sinks,
            )
        )
        start += part.length + 1
    shape = (start, heads * group, dim)
    return Case(
        layout,
        arena,
        make_plan(sequences, page_tokens),
        torch.randn(shape, generator=g).to(dtype),
        torch.randn(shape, generator=g).to(dtype) if with_sink_queries else None,
        torch.randn(heads * group, generator=g) if with_logits else None,
        softcap,
    )


def fill_page(
    arena: torch.Tensor,
    layout: KVLayout,
    format: Format,
    frame: int,
    here: torch.Tensor,
    value_scale: float,
    g: torch.Generator,
) -> None:
    """Keys with outlying channels and values into one page; NaN, or a scale that is, where not `here`."""
    shape = (1, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    keys = torch.randn(shape, generator=g) * torch.linspace(0.5, 3, layout.head_dim)
    values = torch.randn(shape, generator=g) * value_scale
    index = torch.tensor([frame])
    reference.write_pages(arena, layout, format, LAYER, index, keys, values)
    views = reference.record_views(arena, layout, format, LAYER)
    views.k[frame, :, ~here] = 0xFF
    views.v[frame, :, ~here] = 0xFF
    if views.v_scales is not None:
        views.v_scales[frame, :, ~here] = torch.nan
    if views.k_scales is not None and format is not Format.INT4C:
        views.k_scales[frame, :, ~here] = torch.nan


def attend_exactly(case: Case, s: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 out [rows, Hq, D] and lse [rows, Hq] of one sequence."""
    plan, layout = case.plan, case.layout
    part = Part(*(int(x[s]) for x in (plan.lengths, plan.contexts, plan.windows, plan.sinks)))
    seen = attended(part)
    keys = torch.zeros(layout.num_kv_heads, part.context, layout.head_dim, dtype=torch.float64)
    values = torch.zeros_like(keys)
    for position in seen.any(0).nonzero()[:, 0].tolist():
        k, v = reference.read_positions(case.arena, layout, plan, LAYER, s, position, position + 1)
        keys[:, position], values[:, position] = k[:, 0].double(), v[:, 0].double()
    rows = slice(int(plan.starts[s]), int(plan.starts[s]) + part.length)
    group = case.q.shape[1] // layout.num_kv_heads
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
    scores = torch.einsum("rhd,hkd->rhk", case.q[rows].double(), keys) * case.scale
    if case.q_sinks is not None and part.window:
        others = torch.einsum("rhd,hkd->rhk", case.q_sinks[rows].double(), keys) * case.scale
        scores[..., : part.sinks] = others[..., : part.sinks]
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if case.sink_logits is not None:
        logits = case.sink_logits.double()[None, :, None].expand(part.length, -1, 1)
        scores = torch.cat([scores, logits], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None])[..., : part.context]
    return torch.einsum("rhk,hkd->rhd", weights, values), lse


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Error over all numbers."""
    return float((x.double() - exact).norm() / exact.norm())


def check(case: Case, out: torch.Tensor, lse: torch.Tensor, tolerance: float = 2e-6) -> None:
    """All rows, and that those of no sequence are empty."""
    idle = torch.ones(len(out), dtype=torch.bool)
    for s in range(case.plan.num_sequences):
        rows = slice(int(case.plan.starts[s]), int(case.plan.starts[s] + case.plan.lengths[s]))
        idle[rows] = False
        exact, exact_lse = attend_exactly(case, s)
        assert relative(out[rows], exact) < tolerance, f"sequence {s}"
        torch.testing.assert_close(lse[rows].double(), exact_lse, rtol=0, atol=10 * tolerance)
    assert out[idle].abs().max() == 0 and (lse[idle] == -torch.inf).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", Format)
def test_decode_is_attention_over_the_numbers_of_the_pages(
    format: Format, shape: tuple[int, int, int]
) -> None:
    page_tokens, group, dim = shape
    parts = [Part(1, 2 * page_tokens + 37), Part(1, 5)]
    case = make_case(parts, [format], page_tokens=page_tokens, group=group, dim=dim)
    check(case, *case.run())


@pytest.mark.parametrize("shape", SHAPES[1:4])
@pytest.mark.parametrize("format", Format)
def test_prefill_is_attention_over_the_numbers_of_the_pages(
    format: Format, shape: tuple[int, int, int]
) -> None:
    page_tokens, group, dim = shape
    case = make_case(
        [Part(21, 70), Part(3, 3)], [format], page_tokens=page_tokens, group=group, dim=dim, heads=1
    )
    check(case, *case.run())


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("length", [1, 2])
def test_contexts_may_end_anywhere_around_a_page_and_a_tile(length: int, page_tokens: int) -> None:
    contexts = [length, 15, 16, 17, 63, 64, 65, 128, 129]
    case = make_case([Part(length, context) for context in contexts], page_tokens=page_tokens, heads=1)
    check(case, *case.run())


@pytest.mark.parametrize("parts", [[], [Part(1, 9)], [Part(7, 9)]])
@pytest.mark.parametrize("with_logits", [False, True])
def test_rows_of_no_sequence_are_empty(parts: list[Part], with_logits: bool) -> None:
    case = make_case(parts, with_logits=with_logits)
    check(case, *case.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_pages_give_results_of_their_dtype(dtype: torch.dtype) -> None:
    case = make_case([Part(1, 90), Part(9, 40)], [Format.RAW, Format.K8V4], dtype=dtype)
    out, lse = case.run()
    assert out.dtype is dtype and lse.dtype is torch.float32
    check(case, out, lse, 2.0**-7 if dtype is torch.bfloat16 else 2.0**-11)  # the output's rounding


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("with_sink_queries", [False, True])
def test_windows_and_sinks_hide_what_lies_between(with_sink_queries: bool, page_tokens: int) -> None:
    parts = [
        Part(1, 150, window=40, sinks=4),
        Part(1, 30, window=40, sinks=4),  # nothing has left the window
        Part(1, 60, window=50, sinks=20),  # sinks in the window
        Part(1, 3, window=8, sinks=4),  # all keys are sinks
        Part(1, 80, window=16),
        Part(1, 40),
        Part(20, 150, window=40, sinks=4),
        Part(20, 30, window=8, sinks=20),
        Part(6, 6, window=3, sinks=2),
    ]
    case = make_case(
        parts, [Format.FP8, Format.RAW], page_tokens=page_tokens, heads=1, with_sink_queries=with_sink_queries
    )
    check(case, *case.run())


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_sink_logits_join_the_denominator_and_scores_may_be_capped(with_logits: bool, softcap: float) -> None:
    parts = [Part(1, 20), Part(1, 300), Part(9, 40), Part(5, 90, window=30, sinks=4)]
    formats = [Format.INT8, Format.RAW, Format.INT4]
    case = make_case(parts, formats, with_logits=with_logits, softcap=softcap, heads=1)
    check(case, *case.run())


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Part], list[Format], int, int, int]:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.sampled_from([1, 1, 2, 9, 17]))
        context = length + draw(st.integers(0, 130))
        window = draw(st.sampled_from([0, 0, 1, 20, 70]))
        parts.append(Part(length, context, window, draw(st.integers(0, 20)) if window else 0))
    formats = draw(st.lists(st.sampled_from(list(Format)), min_size=1, max_size=7))
    split_tokens = draw(st.sampled_from([0, 64, 128]))
    return parts, formats, draw(st.sampled_from([16, 32, 64])), split_tokens, draw(st.integers(0, 99))


@settings(deadline=None, max_examples=25)
@given(steps())
def test_any_mix_of_formats_windows_and_cuts_is_attention_over_the_numbers_of_the_pages(
    step: tuple[list[Part], list[Format], int, int, int],
) -> None:
    parts, formats, page_tokens, split_tokens, seed = step
    case = make_case(
        parts, formats, page_tokens=page_tokens, heads=1, group=3, with_sink_queries=True, seed=seed
    )
    check(case, *case.run(split_tokens))


def torch_error(case: Case, s: int, exact: torch.Tensor) -> float:
    """What torch's own attention errs in the case's dtype, over the same pages dequantized to it."""
    plan, layout = case.plan, case.layout
    length, context = int(plan.lengths[s]), int(plan.contexts[s])
    k, v = reference.read_positions(case.arena, layout, plan, LAYER, s, 0, context)
    group = case.q.shape[1] // layout.num_kv_heads
    k, v = (x.to(layout.dtype).repeat_interleave(group, 0)[None] for x in (k, v))
    q = case.q[int(plan.starts[s]) : int(plan.starts[s]) + length].transpose(0, 1)[None]
    mask = attended(Part(length, context))
    scores = (q @ k.transpose(-1, -2) * case.scale).masked_fill(~mask, -torch.inf)
    return relative((scores.softmax(-1) @ v)[0].transpose(0, 1), exact)


@pytest.mark.parametrize("value_scale", [1.0, 0.003])
@pytest.mark.parametrize("format", Format)
def test_with_half_precision_operands_the_kernels_err_at_most_twice_what_torch_does(
    format: Format, value_scale: float
) -> None:
    parts = [Part(1, 200), Part(17, 81)]
    case = make_case(
        parts, [format], page_tokens=32, heads=1, group=4, dtype=torch.float16, value_scale=value_scale
    )
    out, _ = case.run(dot=torch.float16)
    for s in range(len(parts)):
        exact, _ = attend_exactly(case, s)
        rows = slice(int(case.plan.starts[s]), int(case.plan.starts[s] + case.plan.lengths[s]))
        assert relative(out[rows], exact) <= 2 * torch_error(case, s, exact)


@pytest.mark.parametrize(("native_fp8", "ptx"), [(False, False), (False, True), (True, True)])
def test_other_targets_unpack_to_the_same_numbers(
    native_fp8: bool, ptx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tl, "inline_asm_elementwise", emulate)
    tuning = replace(INTERPRETED, native_fp8=native_fp8, ptx=ptx)
    parts = [Part(1, 150), Part(9, 90)]
    case = make_case(parts, list(Format)[1:], page_tokens=16, heads=1)
    check(case, *case.run(tuning=tuning))


def alone(case: Case, s: int, first: int = 0) -> Case:
    """The same step with the last rows, from `first` on, of one sequence only."""
    plan = case.plan
    length = int(plan.lengths[s]) - first
    pick = [x[s : s + 1] for x in (plan.contexts, plan.first_frames, plan.sink_pages, plan.first_pages)]
    one = StepPlan(
        np.zeros(1, np.int32),
        np.array([length], np.int32),
        *pick[:2],
        plan.frames,
        plan.formats,
        *pick[2:],
        plan.windows[s : s + 1],
        plan.sinks[s : s + 1],
    )
    start = int(plan.starts[s]) + first
    return Case(case.layout, case.arena, one, case.q[start : start + length])


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_fixed_splits_make_a_row_independent_of_other_sequences_and_of_chunks(page_tokens: int) -> None:
    parts = [Part(1, 300), Part(1, 20), Part(1, 200, window=100, sinks=4), Part(23, 150)]
    parts.append(Part(20, 200, window=70, sinks=4))
    case = make_case(parts, [Format.FP8], page_tokens=page_tokens, heads=1)
    out, lse = case.run(split_tokens=64)

    for s in range(len(parts)):
        start = int(case.plan.starts[s])
        for first in (0, 7, parts[s].length - 1) if parts[s].length > 1 else (0,):
            own, own_lse = alone(case, s, first).run(split_tokens=64)
            rows = slice(start + first, start + parts[s].length)
            assert torch.equal(own, out[rows]) and torch.equal(own_lse, lse[rows])


def test_what_cannot_be_is_refused_with_what_would_be_right() -> None:
    case = make_case([Part(1, 20)])
    with pytest.raises(ValueError, match=r"sink_logits must be \[4\], got \[3\]"):
        Case(**{**vars(case), "sink_logits": torch.zeros(3)}).run()
    with pytest.raises(ValueError, match=r"q_sinks must be torch.float32 \[3, 4, 64\]"):
        Case(**{**vars(case), "q_sinks": torch.zeros(1, 4, 64)}).run()
    with pytest.raises(ValueError, match="softcap must be positive"):
        Case(**{**vars(case), "softcap": -1.0}).run()
    small = make_layout(page_tokens=8, formats=[Format.RAW])
    arena, plan = poisoned_arena(small, 3), make_plan([PlanSequence(1, 1, 20, np.zeros(3, np.int32))], 8)
    with pytest.raises(ValueError, match="page_tokens must be a power of two from 16"):
        Case(small, arena, plan, case.q).run()
