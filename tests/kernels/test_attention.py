"""Paged attention and page writes: every kind of kernel against float64 and against torch's own attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_kit import COMPILED, KINDS, Kind, kernels
from layout_kit import make_layout

from kvtier.kernels.ops import Format, IntArray, KVLayout, StepPlan, make_plan
from kvtier.kernels.reference import record_views

LAYERS, LAYER = 3, 1
# (context, rows): decode, prefill from nothing, chunks at odd places, ends on the edges of tiles and splits
SEQUENCES = ((5, 1), (300, 1), (129, 7), (1, 1), (128, 128), (260, 50), (64, 64), (257, 1))


@dataclass
class Case:
    """Sequences whose keys and values lie in scattered pages of a poisoned arena."""

    layout: KVLayout
    arena: torch.Tensor
    keys: list[torch.Tensor]  # [context, H, D] of each sequence
    values: list[torch.Tensor]
    frames: list[IntArray]

    def plan(self, sequences: list[tuple[int, int, int]]) -> StepPlan:
        """Of (sequence, context, rows), one behind the other."""
        starts = np.cumsum([0] + [rows for _, _, rows in sequences])
        parts = [(int(at), n, c, self.frames[s]) for at, (s, c, n) in zip(starts, sequences, strict=False)]
        return make_plan(parts, self.layout.page_tokens)


def raw_layout(heads: int, dim: int, page_tokens: int, dtype: torch.dtype) -> KVLayout:
    return make_layout(
        heads=heads,
        dim=dim,
        page_tokens=page_tokens,
        dtype=dtype,
        formats=[Format.RAW],
        layers=LAYERS,
        unit_bytes=0,
    )


def make_case(kind: Kind, heads: int, dim: int, page_tokens: int, dtype: torch.dtype) -> Case:
    """Every byte that holds no key or value of a sequence is 0xff, which reads as NaN."""
    layout = raw_layout(heads, dim, page_tokens, dtype)
    pages = [-(-context // page_tokens) for context, _ in SEQUENCES]
    arena = torch.full((sum(pages) + 3, layout.unit_bytes), 0xFF, dtype=torch.uint8)
    order = np.random.default_rng(0).permutation(len(arena)).astype(np.int32)
    frames = np.split(order[: sum(pages)], np.cumsum(pages)[:-1])
    g = torch.Generator().manual_seed(1)
    shape = (heads, dim)
    keys = [torch.randn(c, *shape, generator=g).to(dtype) for c, _ in SEQUENCES]
    values = [torch.randn(c, *shape, generator=g).to(dtype) for c, _ in SEQUENCES]
    case = Case(layout, arena, keys, values, [np.ascontiguousarray(f) for f in frames])
    plan = case.plan([(s, c, c) for s, (c, _) in enumerate(SEQUENCES)])
    kernels(kind).write_kv(torch.cat(keys), torch.cat(values), arena, layout, plan, LAYER)
    return case


def attend_exactly(
    case: Case, sequence: int, q: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows at the end of a sequence, by definition, in `dtype`: out [rows, Hq, D] and lse [rows, Hq]."""
    k, v = (t[sequence].to(dtype) for t in (case.keys, case.values))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q.to(dtype), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hrt,thd->rhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def attend_as_torch_does(case: Case, sequence: int, q: torch.Tensor) -> torch.Tensor:
    """torch's own attention in the same dtype: the measure of how much error is fair."""
    k, v = case.keys[sequence], case.values[sequence]
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    out = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=visible, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize("heads, group, dim", [(2, 1, 64), (3, 3, 64), (1, 8, 40), (2, 4, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_errs_at_most_twice_what_torch_errs(
    kind: Kind, heads: int, group: int, dim: int, page_tokens: int, dtype: torch.dtype
) -> None:
    case = make_case(kind, heads, dim, page_tokens, dtype)
    plan = case.plan([(s, c, n) for s, (c, n) in enumerate(SEQUENCES)])
    g = torch.Generator().manual_seed(2)
    rows = sum(n for _, n in SEQUENCES)
    q = torch.randn(rows, heads * group, dim, generator=g).to(dtype)

    out, lse = kernels(kind).paged_attention(q, case.arena, case.layout, plan, LAYER, dim**-0.5)

    ours, theirs = [], []
    for s, at in enumerate(plan.starts.tolist()):
        mine = slice(at, at + SEQUENCES[s][1])
        exact, exact_lse = attend_exactly(case, s, q[mine], torch.float64)
        ours.append((out[mine] - exact).flatten())
        theirs.append((attend_as_torch_does(case, s, q[mine]) - exact).flatten())
        torch.testing.assert_close(lse[mine].double(), exact_lse, rtol=1e-4, atol=4e-3)
    our_error, their_error = torch.cat(ours).abs(), torch.cat(theirs).abs()
    assert our_error.max() <= 2 * their_error.max()
    assert our_error.pow(2).mean().sqrt() <= 2 * their_error.pow(2).mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_attention_is_the_same_bits_alone_in_a_batch_and_in_any_chunk(
    kind: Kind, dtype: torch.dtype
) -> None:
    case = make_case(kind, 3, 64, 16, dtype)
    long = 1  # 300 tokens
    q = torch.randn(300, 9, 64, generator=torch.Generator().manual_seed(3)).to(dtype)

    def attend(sequences: list[tuple[int, int, int]], queries: torch.Tensor, threads: int) -> torch.Tensor:
        plan = case.plan(sequences)
        out, _ = kernels(kind, threads).paged_attention(queries, case.arena, case.layout, plan, LAYER, 0.125)
        return out

    whole = attend([(long, 300, 300)], q, 2)
    chunks = [attend([(long, end, n)], q[end - n : end], 1) for n, end in ((7, 7), (121, 128), (172, 300))]
    alone = [attend([(long, t + 1, 1)], q[t : t + 1], 2) for t in (0, 15, 127, 128, 255, 299)]
    others = torch.cat([q[:40], q[299:], q[:1]])
    crowded = attend([(4, 40, 40), (long, 300, 1), (0, 5, 1)], others, 2)

    assert torch.equal(torch.cat(chunks), whole)
    assert torch.equal(torch.cat(alone), whole[[0, 15, 127, 128, 255, 299]])
    assert torch.equal(crowded[40], whole[299])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_no_sequence_has_out_zero_and_lse_minus_infinity(kind: Kind) -> None:
    case = make_case(kind, 2, 64, 16, torch.float32)
    plan = make_plan([(1, 1, 5, case.frames[0])], 16)

    out, lse = kernels(kind).paged_attention(
        torch.ones(3, 4, 64), case.arena, case.layout, plan, LAYER, 0.125
    )

    assert not out[[0, 2]].any() and out[1].isfinite().all()
    assert torch.isneginf(lse[[0, 2]]).all() and lse[1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_step_writes_and_attends_nothing(kind: Kind) -> None:
    case = make_case(kind, 2, 64, 16, torch.float32)
    before = case.arena.clone()
    plan = make_plan([], 16)

    out, lse = kernels(kind).paged_attention(
        torch.ones(0, 4, 64), case.arena, case.layout, plan, LAYER, 0.125
    )
    kernels(kind).write_kv(torch.ones(0, 2, 64), torch.ones(0, 2, 64), case.arena, case.layout, plan, LAYER)

    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    assert torch.equal(case.arena, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_touches_its_rows_of_its_layer_and_nothing_else(kind: Kind, dtype: torch.dtype) -> None:
    layout = raw_layout(2, 24, 16, dtype)
    arena = torch.full((5, layout.unit_bytes), 0xFF, dtype=torch.uint8)
    k, v = torch.randn(6, 2, 24).to(dtype), torch.randn(6, 2, 24).to(dtype)
    plan = make_plan([(1, 4, 18, np.array([3, 0], np.int32)), (5, 1, 1, np.array([2], np.int32))], 16)

    kernels(kind).write_kv(k, v, arena, layout, plan, LAYER)

    expected = torch.full_like(arena, 0xFF)
    views = record_views(expected, layout, Format.RAW, LAYER)
    keys, values = views.k.view(dtype), views.v.view(dtype)
    for row, frame, slot in ((1, 3, 14), (2, 3, 15), (3, 0, 0), (4, 0, 1), (5, 2, 0)):
        keys[frame, :, slot], values[frame, :, slot] = k[row], v[row]
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_kernels_refuse_a_plan_that_leads_outside_the_arena(kind: Kind) -> None:
    case = make_case(kind, 2, 64, 16, torch.float32)
    q = torch.ones(1, 2, 64)
    outside = np.array([len(case.arena)], np.int32)

    for plan in (make_plan([(0, 1, 1, outside)], 16), make_plan([(3, 1, 1, case.frames[0])], 16)):
        with pytest.raises(ValueError, match="frames must be in|outside the step"):
            kernels(kind).paged_attention(q, case.arena, case.layout, plan, LAYER, 0.125)
    with pytest.raises(ValueError, match="layer 3 of 3"):
        kernels(kind).paged_attention(q, case.arena, case.layout, make_plan([], 16), LAYERS, 0.125)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_another_dtype_or_shape_than_the_pages_are_refused(kind: Kind) -> None:
    case = make_case(kind, 2, 64, 16, torch.float32)
    plan = make_plan([(0, 1, 1, case.frames[0])], 16)

    for q in (torch.ones(1, 2, 64, dtype=torch.float16), torch.ones(1, 2, 32), torch.ones(1, 3, 64)):
        with pytest.raises(ValueError, match="must be"):
            kernels(kind).paged_attention(q, case.arena, case.layout, plan, LAYER, 0.125)
    with pytest.raises(ValueError, match="must be"):
        kernels(kind).write_kv(
            torch.ones(1, 3, 64), torch.ones(1, 3, 64), case.arena, case.layout, plan, LAYER
        )


def test_a_plan_needs_a_frame_for_each_page_of_the_context() -> None:
    with pytest.raises(ValueError, match="need 2 pages, got 1"):
        make_plan([(0, 1, 17, np.array([0], np.int32))], 16)
