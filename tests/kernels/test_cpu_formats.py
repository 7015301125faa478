"""The compiled kernels on pages of every format, with windows, sinks and latents: against float64 and plain torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import COMPILED, Kind, kernels
from layout_kit import make_layout, poisoned_arena, spread_frames

from kvtier.kernels import reference
from kvtier.kernels.ops import (
    Format,
    FormatArray,
    IntArray,
    KVLayout,
    LlamaLayerWeights,
    NativeKernels,
    NativeLlama,
    PlanSequence,
    StepPlan,
    TorchKernels,
    make_plan,
)

pytestmark = pytest.mark.slow

LAYER = 1
TOKEN_WISE = [Format.RAW, Format.FP8, Format.INT8, Format.K8V4, Format.INT4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TORCH = TorchKernels()
# Raw bfloat16 keys' probabilities are summed as they are rounded, so that an output is a true mean of values.
LSE_ERROR = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 4e-3}
# (KV heads, group, head_dim, page_tokens)
SHAPES = [(2, 3, 64, 16), (1, 8, 80, 32), (2, 1, 96, 64), (1, 16, 128, 16), (1, 7, 256, 64), (3, 2, 24, 32)]


@dataclass(frozen=True)
class Sequence:
    """What one sequence of a case is to attend."""

    context: int
    rows: int
    formats: FormatArray  # of all its pages
    window: int = 0
    sinks: int = 0


@dataclass(frozen=True)
class Case:
    """Sequences in scattered pages; all that no row attends is 0xff, which reads as NaN, or isn't named at all."""

    layout: KVLayout
    arena: torch.Tensor
    sequences: list[Sequence]
    frames: list[IntArray]
    keys: list[torch.Tensor]  # float64 [context, H, D] of each sequence, as its pages have them
    values: list[torch.Tensor]

    def plan(self, wanted: list[tuple[int, int, int]] | None = None) -> StepPlan:
        """Of (sequence, context, rows), one behind the other; without them, of all sequences as they are."""
        parts, start = [], 0
        for s, context, rows in wanted or [(i, s.context, s.rows) for i, s in enumerate(self.sequences)]:
            parts.append(self._part(s, start, context, rows))
            start += rows
        return make_plan(parts, self.layout.page_tokens)

    def _part(self, index: int, start: int, context: int, rows: int) -> PlanSequence:
        s, tokens = self.sequences[index], self.layout.page_tokens
        pages = -(-context // tokens)
        kept = -(-s.sinks // tokens) if s.window else 0
        first = max(0, context - rows - s.window + 1) // tokens if s.window else 0
        named = np.arange(pages) if first <= kept else np.r_[0:kept, first:pages]
        gap = (kept, first) if first > kept else (0, 0)
        return PlanSequence(
            start, rows, context, self.frames[index][named], s.formats[named], *gap, s.window, s.sinks
        )


def make_case(layout: KVLayout, sequences: list[Sequence], seed: int = 0) -> Case:
    """Random keys and values. A page that no row attends stays poisoned; so does what is behind a context."""
    tokens = layout.page_tokens
    pages = [-(-s.context // tokens) for s in sequences]
    arena = poisoned_arena(layout, sum(pages) + 1)
    order = spread_frames(layout, sum(pages) + 1, seed).numpy()
    frames = np.split(order[: sum(pages)], np.cumsum(pages)[:-1])
    g = torch.Generator().manual_seed(seed)
    keys, values = [], []
    for s, mine in zip(sequences, frames, strict=True):
        lowest = max(0, s.context - s.rows - s.window + 1) if s.window else 0
        shape = (s.context, layout.num_kv_heads, layout.head_dim)
        k, v = (torch.randn(*shape, generator=g).to(layout.dtype) for _ in range(2))
        exact_k, exact_v = torch.full(shape, torch.nan).double(), torch.full(shape, torch.nan).double()
        for page, frame in enumerate(mine.tolist()):
            at, end = page * tokens, min(s.context, (page + 1) * tokens)
            if end <= lowest and at >= s.sinks:
                continue
            format = Format(int(s.formats[page]))
            write_page(arena, layout, format, frame, k[at:end], v[at:end])
            read = reference.read_pages(arena, layout, format, LAYER, torch.tensor([frame]))
            exact_k[at:end], exact_v[at:end] = (x[0, :, : end - at].transpose(0, 1).double() for x in read)
        keys.append(exact_k)
        values.append(exact_v)
    return Case(layout, arena, sequences, [np.ascontiguousarray(f) for f in frames], keys, values)


def write_page(
    arena: torch.Tensor, layout: KVLayout, format: Format, frame: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """The first tokens of a page; the others keep their bytes."""
    at = torch.tensor([frame])
    if format is Format.INT4C:
        whole = [x.transpose(0, 1)[None].float() for x in (k, v)]
        reference.write_pages(arena, layout, format, LAYER, at, whole[0], whole[1])
        return
    plan = make_plan([(0, len(k), len(k), at.int().numpy())], layout.page_tokens, format)
    reference.write_kv(k, v, arena, replace(layout, write_format=format), plan, LAYER)


def uniform(format: Format, context: int, page_tokens: int) -> FormatArray:
    """Of all pages; where INT4C can't be, because a page isn't full, 8 bits."""
    formats = np.full(-(-context // page_tokens), format, np.uint8)
    if format is Format.INT4C and context % page_tokens:
        formats[-1] = Format.FP8
    return formats


def attend_exactly(
    case: Case, index: int, q: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's last rows in float64, by definition: out [rows, Hq, D] and lse [rows, Hq]."""
    s, k, v = case.sequences[index], case.keys[index], case.values[index]
    group, scale, softcap = q.shape[1] // k.shape[1], q.shape[2] ** -0.5, options.get("softcap", 0.0)
    at, key = torch.arange(s.context - len(q), s.context)[:, None], torch.arange(s.context)[None]
    attended = key <= at
    if s.window:
        attended = attended & ((key > at - s.window) | (key < s.sinks))

    def scores_of(rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("rhd,thd->hrt", rows.double(), k.repeat_interleave(group, 1)) * scale

    scores = scores_of(q)
    if s.window and options.get("q_sinks") is not None:
        scores = torch.where(key < s.sinks, scores_of(options["q_sinks"]), scores)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attended, -torch.inf)
    lse = scores.logsumexp(-1)
    if options.get("sink_logits") is not None:
        lse = torch.logaddexp(lse, options["sink_logits"].double()[:, None])
    weights = (scores - lse[..., None]).exp()
    values = torch.where(attended.any(0)[:, None, None], v, 0.0).repeat_interleave(group, 1)
    return torch.einsum("hrt,thd->rhd", weights, values), lse.T


def exact_step(case: Case, q: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences of a case."""
    outs, lses, start = [], [], 0
    for index, s in enumerate(case.sequences):
        rows = slice(start, start + s.rows)
        mine = dict(options)
        if options.get("q_sinks") is not None:
            mine["q_sinks"] = options["q_sinks"][rows]
        out, lse = attend_exactly(case, index, q[rows], mine)
        outs.append(out)
        lses.append(lse)
        start += s.rows
    return torch.cat(outs), torch.cat(lses)


def torch_error(case: Case, q: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Errors of torch's own attention over the same numbers in the layout's dtype, for sequences without a window."""
    errors, start = [], 0
    for s, k, v in zip(case.sequences, case.keys, case.values, strict=True):
        rows = slice(start, start + s.rows)
        visible = torch.ones(s.rows, s.context, dtype=torch.bool).tril(s.context - s.rows)
        parts = (x.to(case.layout.dtype).transpose(0, 1)[None] for x in (q[rows], k, v))
        out = F.scaled_dot_product_attention(*parts, attn_mask=visible, enable_gqa=True)
        errors.append(out[0].transpose(0, 1) - exact[rows])
        start += s.rows
    return torch.cat(errors).abs()


def queries(case: Case, group: int, seed: int = 7) -> torch.Tensor:
    rows = sum(s.rows for s in case.sequences)
    shape = (rows, case.layout.num_kv_heads * group, case.layout.head_dim)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(case.layout.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", list(Format)[1:], ids=lambda f: f.name)
@pytest.mark.parametrize("heads, group, dim, page_tokens", SHAPES)
@pytest.mark.parametrize("kind", COMPILED)
def test_attention_over_any_format_errs_at_most_twice_what_torch_errs(
    kind: Kind, heads: int, group: int, dim: int, page_tokens: int, format: Format, dtype: torch.dtype
) -> None:
    layout = make_layout(heads=heads, dim=dim, page_tokens=page_tokens, dtype=dtype)
    contexts = ((200, 1), (129, 30), (128, 1), (17, 17))
    case = make_case(layout, [Sequence(c, n, uniform(format, c, page_tokens)) for c, n in contexts])
    q = queries(case, group)

    out, lse = kernels(kind).paged_attention(q, case.arena, layout, case.plan(), LAYER, dim**-0.5)

    exact, exact_lse = exact_step(case, q, {})
    ours, theirs = (out - exact).abs(), torch_error(case, q, exact)
    assert ours.max() <= 2 * theirs.max()
    assert ours.pow(2).mean().sqrt() <= 2 * theirs.pow(2).mean().sqrt()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@st.composite
def sequences_of_any_kind(draw: st.DrawFn, page_tokens: int) -> list[Sequence]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        context = draw(st.integers(1, 300))
        rows = draw(st.one_of(st.just(1), st.integers(1, context)))
        window = draw(st.one_of(st.just(0), st.integers(1, 200)))
        sinks = draw(st.integers(0, 40)) if window else 0
        pages = -(-context // page_tokens)
        formats = np.array(draw(st.lists(st.sampled_from(Format), min_size=pages, max_size=pages)), np.uint8)
        if context % page_tokens and formats[-1] == Format.INT4C:
            formats[-1] = Format.INT8
        found.append(Sequence(context, rows, formats, window, sinks))
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_mix_of_formats_windows_sinks_and_options_is_attended_rightly(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(COMPILED))
    heads, group, dim, page_tokens = data.draw(st.sampled_from(SHAPES))
    layout = make_layout(heads=heads, dim=dim, page_tokens=page_tokens)
    case = make_case(layout, data.draw(sequences_of_any_kind(page_tokens)), seed=data.draw(st.integers(0, 9)))
    q = queries(case, group)
    options: dict[str, Any] = {"softcap": data.draw(st.sampled_from([0.0, 2.0, 30.0]))}
    if data.draw(st.booleans()):
        options["q_sinks"] = queries(case, group, seed=8)
    if data.draw(st.booleans()):
        options["sink_logits"] = torch.randn(heads * group, generator=torch.Generator().manual_seed(9))

    plan = case.plan()
    out, lse = kernels(kind).paged_attention(q, case.arena, layout, plan, LAYER, dim**-0.5, **options)
    fair, _ = TORCH.paged_attention(q, case.arena, layout, plan, LAYER, dim**-0.5, **options)

    exact, exact_lse = exact_step(case, q, options)
    assert (out - exact).abs().max() <= 2 * (fair - exact).abs().max() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window, sinks", [(0, 0), (90, 20), (200, 3)])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_row_over_mixed_pages_is_the_same_bits_alone_in_a_batch_and_in_any_chunk(
    kind: Kind, window: int, sinks: int, dtype: torch.dtype
) -> None:
    """Each row is attended within other rows, whose keys lie in pages of other formats, and by one and by two threads."""
    layout = make_layout(heads=2, dim=64, page_tokens=16, dtype=dtype)
    formats = np.array([(5, 0, 1, 5, 3, 2, 4, 0, 0)[i % 9] for i in range(19)], np.uint8)
    formats[-1] = Format.FP8
    whole_context = Sequence(300, 300, formats, window, sinks)
    case = make_case(layout, [whole_context])
    q, q_sinks = queries(case, 3), queries(case, 3, seed=8)

    def attend(parts: list[tuple[int, int]], threads: int) -> list[torch.Tensor]:
        """Rows [first, last) of each part, in one step."""
        plan = case.plan([(0, last, last - first) for first, last in parts])
        rows = np.r_[tuple(slice(first, last) for first, last in parts)]
        out, lse = kernels(kind, threads).paged_attention(
            q[rows], case.arena, layout, plan, LAYER, 0.125, q_sinks=q_sinks[rows], softcap=20.0
        )
        sizes = [last - first for first, last in parts]
        return [
            torch.cat([o, e[..., None]], -1) for o, e in zip(out.split(sizes), lse.split(sizes), strict=True)
        ]

    [whole] = attend([(0, 300)], 2)
    for parts in ([(0, 7), (7, 128), (128, 300)], [(t, t + 1) for t in (0, 15, 16, 127, 128, 255, 299)]):
        for threads in (1, 2):
            for (first, last), found in zip(parts, attend(parts, threads), strict=True):
                assert torch.equal(found, whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", TOKEN_WISE, ids=lambda f: f.name)
@pytest.mark.parametrize("heads, dim, page_tokens", [(2, 64, 16), (1, 80, 32), (3, 40, 64)])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_write_leaves_the_bytes_that_the_reference_writes(
    kind: Kind, heads: int, dim: int, page_tokens: int, format: Format, dtype: torch.dtype
) -> None:
    layout = make_layout(heads=heads, dim=dim, page_tokens=page_tokens, dtype=dtype, write_format=format)
    frames = spread_frames(layout, 4).numpy()
    plan = make_plan([(1, 40, 45, frames[:3]), (41, 1, 1, frames[3:])], page_tokens, format)
    g = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-6, 3, 43)[:, None, None]
    k, v = ((torch.randn(43, heads, dim, generator=g) * magnitudes).to(dtype) for _ in range(2))
    v[5], k[6] = 0.0, 1.5
    ours, theirs = poisoned_arena(layout, 4), poisoned_arena(layout, 4)

    kernels(kind).write_kv(k, v, ours, layout, plan, LAYER)
    reference.write_kv(k, v, theirs, layout, plan, LAYER)

    if format is Format.INT4:  # its rotation is a sum, which torch takes in another order
        assert_keys_within_a_step(ours, theirs, layout, frames)
    else:
        assert torch.equal(ours, theirs)


def assert_keys_within_a_step(
    ours: torch.Tensor, theirs: torch.Tensor, layout: KVLayout, frames: IntArray
) -> None:
    """The same bytes but for INT4's keys, which are the same within a code, and mostly the same code."""
    at = torch.from_numpy(frames).long()
    views = [reference.record_views(x, layout, Format.INT4, LAYER) for x in (ours, theirs)]
    codes = [reference.unpack_nibbles(v.k[at]) for v in views]
    assert (codes[0] - codes[1]).abs().max() <= 1 and (codes[0] != codes[1]).float().mean() < 0.001
    scales = [v.k_scales[at].float() for v in views if v.k_scales is not None]
    torch.testing.assert_close(*scales, rtol=1e-3, atol=1e-7, equal_nan=True)
    for v in views:
        assert v.k_scales is not None
        v.k[at], v.k_scales[at] = 0, 0
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("source", list(Format), ids=lambda f: f.name)
@pytest.mark.parametrize(
    "heads, dim, page_tokens, dtype", [(2, 64, 16, torch.bfloat16), (1, 24, 32, torch.float32)]
)
@pytest.mark.parametrize("kind", COMPILED)
def test_a_converted_page_has_the_bytes_that_the_reference_gives_it_in_all_layers(
    kind: Kind, heads: int, dim: int, page_tokens: int, dtype: torch.dtype, source: Format
) -> None:
    layout = make_layout(heads=heads, dim=dim, page_tokens=page_tokens, dtype=dtype)
    frames = spread_frames(layout, 6).numpy()
    for target in set(Format) - {source}:
        ours = poisoned_arena(layout, 6)
        for layer in range(layout.num_layers):
            g = torch.Generator().manual_seed(layer)
            k, v = (torch.randn(2, heads, page_tokens, dim, generator=g) for _ in range(2))
            reference.write_pages(ours, layout, source, layer, torch.from_numpy(frames[:2]).long(), k, v)
        theirs = ours.clone()

        kernels(kind).convert_pages(ours, layout, frames[:2], source, frames[2:4], target)
        reference.convert_pages(theirs, layout, frames[:2], source, frames[2:4], target)

        if Format.INT4 not in (source, target):
            assert torch.equal(ours, theirs)
            continue
        at = torch.from_numpy(frames[2:4]).long()
        for layer in range(layout.num_layers):
            found = reference.read_pages(ours, layout, target, layer, at)
            wanted = reference.read_pages(theirs, layout, target, layer, at)
            step = {Format.RAW: 1e-2, Format.INT8: 0.05, Format.FP8: 0.5}.get(target, 0.6)
            assert all((a - b).abs().max() <= step for a, b in zip(found, wanted, strict=True))
            assert all(
                ((a - b).abs() > 1e-2).float().mean() < 0.01 for a, b in zip(found, wanted, strict=True)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rank, rope_dim, heads, page_tokens", [(512, 64, 16, 64), (32, 16, 3, 16), (40, 8, 100, 32)]
)
@pytest.mark.parametrize("kind", COMPILED)
def test_latents_are_written_read_converted_and_attended_as_the_reference_does(
    kind: Kind, rank: int, rope_dim: int, heads: int, page_tokens: int, dtype: torch.dtype
) -> None:
    layout = make_layout(
        heads=1,
        dim=rank,
        page_tokens=page_tokens,
        dtype=dtype,
        formats=[Format.RAW, Format.FP8],
        write_format=Format.FP8,
        rope_dim=rope_dim,
    )
    pages = -(-200 // page_tokens)
    frames = spread_frames(layout, pages + 1).numpy()
    g = torch.Generator().manual_seed(0)
    latents, ropes = (torch.randn(200, n, generator=g).to(dtype) for n in (rank, rope_dim))
    plan = make_plan([(0, 200, 200, frames[:pages])], page_tokens, Format.FP8)
    ours, theirs = poisoned_arena(layout, pages + 1), poisoned_arena(layout, pages + 1)
    for layer in range(layout.num_layers):
        kernels(kind).write_latents(latents, ropes, ours, layout, plan, layer)
        reference.write_latents(latents, ropes, theirs, layout, plan, layer)
    for target, arena in ((kernels(kind), ours), (TORCH, theirs)):
        target.convert_pages(arena, layout, frames[:1], Format.FP8, frames[pages:], Format.RAW)
    assert torch.equal(ours, theirs)

    formats = np.full(pages, Format.FP8, np.uint8)
    formats[0] = Format.RAW
    mixed = make_plan(
        [PlanSequence(0, 30, 200, np.r_[frames[pages:], frames[1:pages]], formats)], page_tokens
    )
    read = kernels(kind).read_latents(ours, layout, mixed, LAYER, 0, 3, 190)
    wanted = reference.read_latents(ours, layout, mixed, LAYER, 0, 3, 190)
    assert torch.equal(read[0], wanted[0]) and torch.equal(read[1], wanted[1])

    q = torch.randn(30, heads, rank + rope_dim, generator=g).to(dtype)
    scale = (rank + rope_dim) ** -0.5
    out, lse = kernels(kind).latent_attention(q, ours, layout, mixed, LAYER, scale)
    k, rope = (x[0].double() for x in reference.read_positions(ours, layout, mixed, LAYER, 0, 0, 200))
    keys = torch.cat([k, rope], -1)
    hidden = torch.ones(30, 200, dtype=torch.bool).triu(171)
    scores = (torch.einsum("rhd,td->hrt", q.double(), keys) * scale).masked_fill(hidden, -torch.inf)
    exact = torch.einsum("hrt,td->rhd", scores.softmax(-1), k)
    parts = [x.to(dtype) for x in (q.transpose(0, 1), keys, k)]
    fair = F.scaled_dot_product_attention(
        *(x[None] if x.dim() == 3 else x[None, None] for x in parts), ~hidden
    )
    assert (out - exact).abs().max() <= 2 * (fair[0].transpose(0, 1) - exact).abs().max()
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).T, rtol=1e-5, atol=LSE_ERROR[dtype])

    alone = make_plan([PlanSequence(0, 1, 181, mixed.frames, formats)], page_tokens)
    single, _ = kernels(kind, 1).latent_attention(q[10:11], ours, layout, alone, LAYER, scale)
    assert torch.equal(single[0], out[10])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, keys, offset", [(1, 300, 299), (150, 150, 0), (40, 200, 500), (30, 100, -10), (3, 0, 0)]
)
@pytest.mark.parametrize("heads, dim, value_dim", [(2, 24, 16), (3, 192, 128)])
@pytest.mark.parametrize("kind", COMPILED)
def test_attention_outside_pages_errs_at_most_twice_what_torch_errs(
    kind: Kind, heads: int, dim: int, value_dim: int, rows: int, keys: int, offset: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(0)
    sizes = ((rows, dim), (keys, dim), (keys, value_dim))
    q, k, v = (torch.randn(n, heads, d, generator=g).to(dtype) for n, d in sizes)

    out, lse = kernels(kind).dense_attention(q, k, v, offset, dim**-0.5)

    visible = torch.arange(keys)[None] <= torch.arange(rows)[:, None] + offset
    scores = torch.einsum("rhd,thd->hrt", q.double(), k.double()) * dim**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    exact = torch.einsum("hrt,thd->rhd", scores.softmax(-1).nan_to_num(), v.double())
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).T, rtol=1e-5, atol=LSE_ERROR[dtype])
    some = visible.any(-1)
    assert not out[~some].any()
    if not some.any():
        return
    transposed = (x.transpose(0, 1)[None] for x in (q[some], k, v))
    fair = F.scaled_dot_product_attention(*transposed, attn_mask=visible[some])[0].transpose(0, 1)
    assert (out - exact)[some].abs().max() <= 2 * (fair - exact[some]).abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("format", TOKEN_WISE, ids=lambda f: f.name)
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_llama_writes_and_attends_the_formats_of_its_plan(kind: Kind, format: Format) -> None:
    """Two chunks and then single rows, with a window; INT4C in place of the first page once that is full."""
    layout = make_layout(heads=2, dim=16, page_tokens=16, write_format=format)
    weights = [tiny_layer(seed) for seed in range(layout.num_layers)]
    g = torch.Generator().manual_seed(9)
    embedding = torch.randn(50, 32, generator=g)
    compiled = kernels(kind)
    assert isinstance(compiled, NativeKernels)
    llama = NativeLlama(
        compiled,
        layout,
        layers=weights,
        embedding=embedding,
        head=None,
        norm=torch.ones(32),
        query_heads=4,
        eps=1e-6,
        intermediate=48,
        max_rows=64,
    )
    frames = spread_frames(layout, 5).numpy()
    formats = np.full(4, format, np.uint8)
    ours, theirs = poisoned_arena(layout, 5), poisoned_arena(layout, 5)
    ids = torch.randint(0, 50, (60,), generator=g).int().numpy()
    mine = frames[:4].copy()
    for first, last in ((0, 20), (20, 45), (45, 46), (46, 47)):
        if first == 45:
            for arena in (ours, theirs):
                reference.convert_pages(arena, layout, mine[:1], format, frames[4:], Format.INT4C)
            mine[0], formats[0] = frames[4], Format.INT4C
        rows = last - first
        pages = -(-last // 16)
        part = PlanSequence(0, rows, last, mine[:pages], formats[:pages], window=30, sinks=3)
        plan = make_plan([part], 16)
        angles = torch.arange(first, last)[:, None] * 0.1 ** torch.arange(8)
        turns = torch.arange(rows)[:, None] * 0.01 * torch.ones(8)
        rope, sink_rope = ((a.cos().float(), a.sin().float()) for a in (angles, turns))
        wanted = np.arange(rows, dtype=np.int32)

        logits = llama.forward(ids[first:last], rope, plan, ours, wanted, sink_rope)

        x = embedding[torch.from_numpy(ids[first:last]).long()]
        expected = plain_llama(x, weights, layout, theirs, plan, rope, sink_rope) @ embedding.T
        torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-2 if format is Format.INT4 else 2e-3)
    llama.close()


def tiny_layer(seed: int) -> LlamaLayerWeights:
    g = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=g) * inputs**-0.5

    return LlamaLayerWeights(
        attention_norm=torch.ones(32),
        qkv=matrix(8 * 16, 32),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        out=matrix(32, 64),
        mlp_norm=torch.ones(32),
        gate=matrix(48, 32),
        up=matrix(48, 32),
        down=matrix(32, 48),
    )


def plain_llama(
    x: torch.Tensor,
    layers: list[LlamaLayerWeights],
    layout: KVLayout,
    arena: torch.Tensor,
    plan: StepPlan,
    rope: tuple[torch.Tensor, torch.Tensor],
    sink_rope: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The same step in torch: [rows, 32] before the head."""

    def turn(y: torch.Tensor, by: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        (a, b), (cos, sin) = y.chunk(2, -1), (t[:, None] for t in by)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for index, w in enumerate(layers):
        q, k, v = (F.rms_norm(x, (32,), eps=1e-6) @ w.qkv.T).view(len(x), 8, 16).split([4, 2, 2], 1)
        q, k = turn(q, rope), turn(k, rope)
        TORCH.write_kv(k, v, arena, layout, plan, index)
        out, _ = TORCH.paged_attention(q, arena, layout, plan, index, 0.25, q_sinks=turn(q, sink_rope))
        x = x + out.flatten(1) @ w.out.T
        y = F.rms_norm(x, (32,), eps=1e-6)
        x = x + (F.silu(y @ w.gate.T) * (y @ w.up.T)) @ w.down.T
    return F.rms_norm(x, (32,), eps=1e-6)


@pytest.mark.parametrize("kind", COMPILED)
def test_rows_go_only_where_their_format_says_they_go(kind: Kind) -> None:
    layout = make_layout(write_format=Format.FP8)
    arena = poisoned_arena(layout, 2)
    rows = torch.ones(1, 2, 64)
    frames = np.zeros(1, np.int32)

    other = make_plan([(0, 1, 1, frames)], 16, Format.INT8)
    with pytest.raises(ValueError, match="rows are written as FP8, page 0 is INT8"):
        kernels(kind).write_kv(rows, rows, arena, layout, other, LAYER)
    whole = replace(layout, write_format=Format.INT4C)
    with pytest.raises(ValueError, match="INT4C needs a whole page"):
        kernels(kind).write_kv(
            rows, rows, arena, whole, make_plan([(0, 1, 1, frames)], 16, Format.INT4C), LAYER
        )
    few = replace(layout, records={Format.RAW: layout.records[Format.RAW]})
    with pytest.raises(ValueError, match="no pages of format 1"):
        kernels(kind).paged_attention(
            rows, arena, few, make_plan([(0, 1, 1, frames)], 16, Format.FP8), LAYER, 0.1
        )
    assert bool((arena == 0xFF).all())


@pytest.mark.parametrize("kind", COMPILED)
def test_a_plan_that_names_too_few_pages_for_its_window_is_refused(kind: Kind) -> None:
    layout = make_layout(formats=[Format.RAW])
    arena = poisoned_arena(layout, 4)
    plan = make_plan([PlanSequence(0, 1, 64, np.arange(2, dtype=np.int32) * 8, None, 0, 2, 30, 0)], 16)
    wider = replace(plan, windows=plan.windows + 20)
    more_sinks = replace(plan, sinks=plan.sinks + 1)

    for wrong, message in ((wider, "pages that its sequence doesn't name"), (more_sinks, "sinks don't fit")):
        with pytest.raises(ValueError, match=message):
            kernels(kind).paged_attention(torch.ones(1, 2, 64), arena, layout, wrong, LAYER, 0.1)


def test_compiling_the_kernels_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a compiler that makes an empty library, which is enough to see who says what."""
    from kvtier.kernels.cpu import build

    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "g++ 1"\nwhile [ "$1" != -o ]; do shift; done; echo > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/bin:/usr/bin")

    for _ in range(2):
        with caplog.at_level(logging.INFO), pytest.raises(build.BuildError, match="can't load"):
            build.load_library(tmp_path / "cache")

    announced = [r for r in caplog.records if "compiling the CPU kernels with g++, once" in r.message]
    assert [r.levelname for r in announced] == ["INFO"]
