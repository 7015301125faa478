"""Latent attention by Triton against float64, and its pages' size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import make_layout, poisoned_arena, spread_frames

from kvtier.kernels import reference
from kvtier.kernels.combine import combine
from kvtier.kernels.mla import INTERPRETED, LatentAttention, dense_shape, latent_form
from kvtier.kernels.ops import Format, KVLayout, PlanSequence, StepPlan, make_plan, merge
from kvtier.kernels.write import PageWriter

BOTH = (Format.RAW, Format.FP8)
SCALE = 0.2


def _attention(split_tokens: int = 0, dot: torch.dtype | None = None) -> LatentAttention:
    return LatentAttention("sm_90", 8, split_tokens, dot)


def _latent_layout(
    rank: int = 32,
    rope: int = 16,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
) -> KVLayout:
    return make_layout(
        heads=1,
        dim=rank,
        rope_dim=rope,
        page_tokens=page_tokens,
        dtype=dtype,
        formats=BOTH,
        layers=layers,
    )


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence to be: rows at the end of `context` tokens in pages of these formats; a cycle of them."""

    length: int
    context: int
    formats: tuple[Format, ...] = (Format.RAW,)
    window: int = 0
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    arena: torch.Tensor
    plan: StepPlan
    num_rows: int


def _step(layout: KVLayout, sequences: list[_Sequence], gap: int = 1) -> _Step:
    """Pages of random latents, NaN wherever nothing was written; `gap` rows of no sequence before each sequence.

    Pages that no row attends are not named where a window allows that, and hold NaN.
    """
    tokens = layout.page_tokens
    num_pages = [-(-s.context // tokens) for s in sequences]
    frames = spread_frames(layout, sum(num_pages) + 1).numpy()
    arena = poisoned_arena(layout, sum(num_pages) + 1)
    generator = torch.Generator().manual_seed(0)
    parts: list[PlanSequence] = []
    row = page = 0
    for sequence, pages in zip(sequences, num_pages, strict=True):
        row += gap
        mine = frames[page : page + pages]
        formats = np.array([sequence.formats[i % len(sequence.formats)] for i in range(pages)], np.uint8)
        sink_pages = -(-sequence.sinks // tokens)
        lowest = max(0, sequence.context - sequence.length - sequence.window + 1) if sequence.window else 0
        first_page = lowest // tokens if lowest // tokens > sink_pages else 0
        named = [i for i in range(pages) if not first_page or i < sink_pages or i >= first_page]
        for i in named:
            _fill(arena, layout, Format(int(formats[i])), mine[i], sequence.context - i * tokens, generator)
        parts.append(
            PlanSequence(
                row,
                sequence.length,
                sequence.context,
                mine[named],
                formats[named],
                sink_pages if first_page else 0,
                first_page,
                sequence.window,
                sequence.sinks,
            )
        )
        row, page = row + sequence.length, page + pages
    return _Step(arena, make_plan(parts, tokens), row + gap)


def _fill(
    arena: torch.Tensor,
    layout: KVLayout,
    format: Format,
    frame: int,
    written: int,
    generator: torch.Generator,
) -> None:
    """A page of random latents of which only the first `written` tokens exist."""
    at = torch.tensor([frame]).long()
    for layer in range(layout.num_layers):
        latents = torch.randn(1, 1, layout.page_tokens, layout.head_dim, generator=generator)
        rope = torch.randn(1, 1, layout.page_tokens, layout.rope_dim, generator=generator)
        reference.write_pages(arena, layout, format, layer, at, latents, rope)
        views = reference.record_views(arena, layout, format, layer)
        views.k[frame, :, written:] = 0xFF
        views.v[frame, :, written:] = 0xFF
        if views.k_scales is not None:
            views.k_scales[frame, :, written:] = torch.nan


def _queries(layout: KVLayout, rows: int, heads: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, layout.head_dim + layout.rope_dim, generator=generator).to(layout.dtype)


def _exact(q: torch.Tensor, step: _Step, layout: KVLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over the numbers of the pages' codes."""
    plan = step.plan
    out = torch.zeros(*q.shape[:2], layout.head_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for s in range(plan.num_sequences):
        length, context, window = int(plan.lengths[s]), int(plan.contexts[s]), int(plan.windows[s])
        for i in range(length):
            t = context - length + i
            first = max(0, t - window + 1) if window else 0
            spans = [(first, t + 1), (0, min(int(plan.sinks[s]), first) if window else 0)]
            found = [
                torch.cat(reference.read_positions(step.arena, layout, plan, layer, s, a, b), -1)[0]
                for a, b in spans
                if a < b
            ]
            keys = torch.cat(found).double()
            row = int(plan.starts[s]) + i
            scores = q[row].double() @ keys.T * SCALE
            lse[row] = torch.logsumexp(scores, -1)
            out[row] = torch.softmax(scores, -1) @ keys[:, : layout.head_dim]
    return out, lse


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the root mean square; what is exactly 0 must be so."""
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def _agrees(
    found: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor], tolerance: float
) -> None:
    (out, lse), (exact_out, exact_lse) = found, exact
    blind = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    assert bool((out[blind] == 0).all())
    assert _error(out, exact_out) <= tolerance
    assert not bool(out.isnan().any())
    if not bool(blind.all()):
        assert float((lse.double() - exact_lse)[~blind].abs().max()) <= 10 * tolerance


# ---- the absorbed form ------------------------------------------------------------------------------------------

SEVERAL = [
    _Sequence(1, 41, (Format.RAW, Format.FP8, Format.FP8)),
    _Sequence(3, 64, (Format.FP8,)),
    _Sequence(1, 1),
    _Sequence(2, 150, (Format.FP8, Format.RAW)),
]


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("split_tokens", [0, 64])
def test_absorbed_attention_agrees_with_float64(page_tokens: int, split_tokens: int) -> None:
    layout = _latent_layout(page_tokens=page_tokens)
    step = _step(layout, SEVERAL)
    q = _queries(layout, step.num_rows, 5)

    found = _attention(split_tokens).latent_attention(q, step.arena, layout, step.plan, 1, SCALE)

    _agrees(found, _exact(q, step, layout, 1), 1e-6)


@pytest.mark.parametrize(("rank", "rope", "heads"), [(512, 64, 16), (40, 8, 3), (64, 32, 33)])
def test_ranks_and_heads_of_any_size_agree_with_float64(rank: int, rope: int, heads: int) -> None:
    layout = _latent_layout(rank, rope, page_tokens=32, layers=1)
    step = _step(layout, [_Sequence(1, 37, (Format.RAW, Format.FP8)), _Sequence(2, 33, (Format.FP8,))], 0)
    q = _queries(layout, step.num_rows, heads) * rank**-0.25

    found = _attention().latent_attention(q, step.arena, layout, step.plan, 0, SCALE)

    _agrees(found, _exact(q, step, layout, 0), 2e-6)


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize("unit_bytes", [0, 1024])
def test_the_descriptor_form_reads_no_byte_behind_the_last_token(page_tokens: int, unit_bytes: int) -> None:
    """Its tiles have no masks: 0 * NaN would be NaN. Every length of the last tile that matters is there."""
    layout = make_layout(
        heads=1,
        dim=32,
        rope_dim=16,
        page_tokens=page_tokens,
        dtype=torch.float16,
        formats=(Format.RAW,),
        unit_bytes=unit_bytes,
    )
    contexts = [1, 31, 32, 33, page_tokens, page_tokens + 1, 2 * page_tokens - 1]
    step = _step(layout, [_Sequence(1, context) for context in contexts])
    q = _queries(layout, step.num_rows, 20)

    found = _attention().latent_attention(q, step.arena, layout, step.plan, 1, SCALE)

    assert latent_form(INTERPRETED, layout, Format.RAW, 20)[1]
    _agrees(found, _exact(q, step, layout, 1), 1e-3)


@pytest.mark.parametrize("format", BOTH)
def test_float16_errs_at_most_twice_as_much_as_torch_in_float16(format: Format) -> None:
    layout = _latent_layout(64, 16, page_tokens=64, dtype=torch.float16, layers=1)
    step = _step(layout, [_Sequence(1, 190, (format,))], 0)
    q = _queries(layout, step.num_rows, 16)

    out, _ = _attention(dot=torch.float16).latent_attention(q, step.arena, layout, step.plan, 0, SCALE)

    exact, _ = _exact(q, step, layout, 0)
    latents, rope = reference.read_latents(step.arena, layout, step.plan, 0, 0, 0, 190)
    weights = torch.softmax((q[0] @ torch.cat([latents, rope], 1).T) * SCALE, -1)
    assert _error(out, exact) <= 2 * _error((weights @ latents)[None], exact)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 30.0])
def test_latents_of_any_size_survive_the_weights_in_float16(size: float) -> None:
    """Weights times scales of small latents are below float16's normal numbers, those of large ones above."""
    layout = _latent_layout(dtype=torch.float16, layers=1)
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
    x[:, :32] *= size
    frames = spread_frames(layout, 3).numpy()
    arena = poisoned_arena(layout, 3)
    layout = _written_as(layout, Format.FP8)
    PageWriter().write_latents(
        x[:, :32].half(), x[:, 32:].half(), arena, layout, make_plan([(0, 40, 40, frames)], 16, Format.FP8), 0
    )
    step = _Step(arena, make_plan([(0, 1, 40, frames)], 16, Format.FP8), 1)
    q = _queries(layout, 1, 4)

    out, _ = _attention(dot=torch.float16).latent_attention(q.half(), arena, layout, step.plan, 0, SCALE)

    exact, _ = _exact(q, step, layout, 0)
    step_of_result = 2.0**-24 / float(
        exact.abs().max()
    )  # float16's smallest number, where the result is as small
    assert _error(out, exact) <= max(2e-3, step_of_result)


def _written_as(layout: KVLayout, format: Format) -> KVLayout:
    return replace(layout, write_format=format)


@st.composite
def _sequences(draw: st.DrawFn) -> list[_Sequence]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        context = draw(st.integers(1, 90))
        window = draw(st.sampled_from([0, 0, 5, 20, 64]))
        found.append(
            _Sequence(
                draw(st.integers(1, min(context, 4))),
                context,
                tuple(draw(st.lists(st.sampled_from(BOTH), min_size=1, max_size=4))),
                window,
                draw(st.integers(0, 20)) if window else 0,
            )
        )
    return found


@given(_sequences(), st.sampled_from([0, 16, 48]))
@settings(deadline=None, max_examples=20)
def test_any_list_of_runs_agrees_with_float64(sequences: list[_Sequence], split_tokens: int) -> None:
    layout = _latent_layout(layers=1)
    step = _step(layout, sequences)
    q = _queries(layout, step.num_rows, 4)

    found = _attention(split_tokens).latent_attention(q, step.arena, layout, step.plan, 0, SCALE)

    _agrees(found, _exact(q, step, layout, 0), 1e-6)


def test_a_rows_result_is_the_same_bits_in_any_step_where_splits_are_fixed() -> None:
    layout = _latent_layout()
    step = _step(layout, SEVERAL, 0)
    attention = _attention(32)
    q = _queries(layout, step.num_rows, 4)
    whole, _ = attention.latent_attention(q, step.arena, layout, step.plan, 0, SCALE)
    plan = step.plan
    last = plan.num_sequences - 1
    frames = plan.frames[plan.first_frames[last] :]
    formats = plan.formats[plan.first_frames[last] :]

    for i in range(2):
        context = int(plan.contexts[last]) - 1 + i
        one = make_plan([PlanSequence(0, 1, context, frames, formats)], 16)
        row = int(plan.starts[last]) + i
        alone, _ = attention.latent_attention(q[row : row + 1], step.arena, layout, one, 0, SCALE)
        assert torch.equal(alone[0], whole[row])


def test_a_step_without_sequences_attends_nothing() -> None:
    layout = _latent_layout()
    arena = poisoned_arena(layout, 1)
    q = _queries(layout, 3, 4)

    out, lse = _attention().latent_attention(q, arena, layout, make_plan([], 16), 0, SCALE)

    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_queries_of_another_width_are_refused() -> None:
    layout = _latent_layout()
    with pytest.raises(ValueError, match=r"\[rows, heads, 48\], got torch.float32 \[2, 4, 32\]"):
        _attention().latent_attention(
            torch.zeros(2, 4, 32), poisoned_arena(layout, 1), layout, make_plan([], 16), 0, SCALE
        )


# ---- pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_a_page_takes_576_numbers_for_each_token_and_layer_and_no_byte_more(page_tokens: int) -> None:
    """DeepSeek's 512 + 64: all of a page's bytes are written by writing its tokens, and no others."""
    layout = _latent_layout(512, 64, page_tokens, torch.bfloat16, layers=3)
    layout = _written_as(layout, Format.RAW)
    arena = torch.zeros_like(poisoned_arena(layout, 2))
    x = torch.ones(page_tokens, 576, dtype=torch.bfloat16)  # no byte of which is 0
    x *= 1.0078125
    plan = make_plan([(0, page_tokens, page_tokens, np.zeros(1, np.int32))], page_tokens)

    for layer in range(3):
        PageWriter().write_latents(x[:, :512], x[:, 512:], arena, layout, plan, layer)

    assert layout.page_bytes(Format.RAW) == 3 * page_tokens * 576 * 2
    assert int((arena != 0).sum()) == layout.page_bytes(Format.RAW)
    assert bool((arena.view(-1)[: layout.page_bytes(Format.RAW)] != 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope", "page_tokens"), [(32, 16, 16), (40, 8, 64)])
def test_latents_are_read_as_the_reference_reads_them(
    dtype: torch.dtype, rank: int, rope: int, page_tokens: int
) -> None:
    layout = _latent_layout(rank, rope, page_tokens, dtype)
    step = _step(layout, [_Sequence(1, 40), _Sequence(1, 150, (Format.FP8, Format.RAW, Format.FP8))])
    for sequence, first, last in ((0, 0, 40), (1, 0, 150), (1, 7, 133), (1, 64, 65), (1, 30, 30)):
        found = _attention().read_latents(step.arena, layout, step.plan, 1, sequence, first, last)

        assert [len(x) for x in found] == [last - first] * 2
        if first < last:
            expected = reference.read_latents(step.arena, layout, step.plan, 1, sequence, first, last)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


# ---- the expanded form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "dk", "dv", "offset"),
    [
        (70, 70, 2, 24, 16, 0),  # a prompt's first chunk
        (5, 100, 2, 192, 128, 95),  # a later one, at DeepSeek's sizes
        (33, 64, 1, 48, 32, 1000),  # a chunk of context before it: all keys are seen
        (40, 20, 2, 16, 24, -7),  # rows that see nothing
        (64, 129, 1, 40, 24, 65),
        (3, 40, 1, 16, 16, 30),  # the first row misses the last key of a tile
        (3, 0, 2, 16, 16, 0),
        (1, 1, 1, 17, 5, 0),
    ],
)
def test_dense_attention_agrees_with_float64(
    rows: int, keys: int, heads: int, dk: int, dv: int, offset: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, width, generator=generator) for n, width in ((rows, dk), (keys, dk), (keys, dv))
    )

    found = _attention().dense_attention(q, k, v, offset, SCALE)

    scores = torch.einsum("rhd,thd->rht", q.double(), k.double()) * SCALE
    hidden = torch.arange(keys)[None] > torch.arange(rows)[:, None] + offset
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    _agrees(found, (torch.einsum("rht,thd->rhd", weights, v.double()), torch.logsumexp(scores, -1)), 1e-6)


def test_keys_and_values_may_be_views_of_one_expansion() -> None:
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(50, 2, 48, generator=generator)
    both[..., 24:32] = torch.nan  # what lies beside a row is none of it
    q = torch.randn(2, 10, 24, generator=generator).transpose(0, 1)
    k, v = both[..., :24], both[..., 32:]

    found = _attention().dense_attention(q, k, v, 40, SCALE)

    expected = _attention().dense_attention(q.contiguous(), k.contiguous(), v.contiguous(), 40, SCALE)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_chunks_of_keys_merge_to_attention_over_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(20, 2, 24, generator=generator)
    k, v = (torch.randn(90, 2, width, generator=generator) for width in (24, 16))
    attention = _attention()
    whole = attention.dense_attention(q, k, v, 70, SCALE)

    cuts = [(0, 33), (33, 64), (64, 90)]
    parts = [attention.dense_attention(q, k[a:b], v[a:b], 70 - a, SCALE) for a, b in cuts]

    out, lse = merge(parts)
    assert _error(out, whole[0].double()) < 1e-6
    assert float((lse - whole[1]).abs().max()) < 1e-5


def test_expansion_gives_what_absorption_gives() -> None:
    """W_UK in the query and W_UV behind, against keys and values expanded by both: the two ways of one model."""
    layout = _latent_layout(page_tokens=32)
    step = _step(layout, [_Sequence(6, 75, (Format.FP8, Format.RAW))], 0)
    generator = torch.Generator().manual_seed(0)
    nope, heads, dv = 24, 3, 16
    up_k, up_v = (torch.randn(heads, 32, width, generator=generator) * 0.2 for width in (nope, dv))
    q_nope = torch.randn(6, heads, nope, generator=generator)
    q_rope = torch.randn(6, heads, 16, generator=generator)
    attention = _attention()

    absorbed = torch.cat([torch.einsum("rhd,hcd->rhc", q_nope, up_k), q_rope], -1)
    mixed, lse = attention.latent_attention(absorbed, step.arena, layout, step.plan, 1, SCALE)
    latents, rope = attention.read_latents(step.arena, layout, step.plan, 1, 0, 0, 75)
    k = torch.cat([torch.einsum("tc,hcd->thd", latents, up_k), rope[:, None].expand(-1, heads, -1)], -1)
    v = torch.einsum("tc,hcd->thd", latents, up_v)
    out, expanded_lse = attention.dense_attention(torch.cat([q_nope, q_rope], -1), k, v, 69, SCALE)

    assert _error(torch.einsum("rhc,hcd->rhd", mixed, up_v), out.double()) < 1e-5
    assert float((lse - expanded_lse).abs().max()) < 1e-4


def test_widths_are_taken_in_two_powers_of_two() -> None:
    assert (dense_shape(192, 128).D0, dense_shape(192, 128).D1) == (128, 64)
    assert (dense_shape(64, 64).D0, dense_shape(64, 64).D1) == (64, 0)
    with pytest.raises(ValueError, match="16 numbers or more, got 8"):
        dense_shape(8, 16)


# ---- joining ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [24, 64])
def test_partial_results_are_joined_by_their_sums(dim: int) -> None:
    """Row 3 has no slots, row 0 two of which one attended nothing, row 2 one that attended nothing."""
    generator = torch.Generator().manual_seed(0)
    partial = torch.randn(6, 3, dim, generator=generator)
    lse2 = torch.randn(6, 3, generator=generator) * 5
    lse2[1] = lse2[5] = -torch.inf
    indptr = torch.tensor([0, 2, 5, 6, 6], dtype=torch.int32)
    rows = torch.tensor([4, 0, 2, 3], dtype=torch.int32)
    out = torch.full((5, 3, dim), 7.0)
    lse = torch.full((5, 3), 7.0)

    combine(partial, lse2, indptr, out, lse, rows=rows)

    for i, row in enumerate(rows.tolist()):
        of = slice(int(indptr[i]), int(indptr[i + 1]))
        exact = torch.logsumexp(lse2[of].double() * np.log(2), 0)
        weights = torch.exp(lse2[of].double() * np.log(2) - exact).nan_to_num(0.0)
        assert torch.allclose(lse[row].double(), exact, atol=1e-5)
        assert torch.allclose(out[row].double(), (weights[..., None] * partial[of]).sum(0), atol=1e-6)
    assert bool((out[1] == 7).all()) and bool((lse[1] == 7).all())


def test_a_sinks_logit_joins_the_denominator_only() -> None:
    generator = torch.Generator().manual_seed(0)
    partial = torch.randn(3, 2, 16, generator=generator)
    lse2 = torch.randn(3, 2, generator=generator)
    lse2[2] = -torch.inf
    logits = torch.tensor([0.7, 30.0])
    out, lse = torch.empty(2, 2, 16), torch.empty(2, 2)

    combine(partial, lse2, torch.tensor([0, 2, 3], dtype=torch.int32), out, lse, logits)

    plain, plain_lse = torch.empty(2, 2, 16), torch.empty(2, 2)
    combine(partial, lse2, torch.tensor([0, 2, 3], dtype=torch.int32), plain, plain_lse)
    expected, expected_lse = reference.join_sink_logits(plain, plain_lse, logits)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse, expected_lse, atol=1e-5)
    assert bool((out[1] == 0).all()) and bool((lse[1] == -torch.inf).all())
