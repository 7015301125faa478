"""Writes of rows and conversions of pages by Triton: the bytes of the reference, and no other byte touched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import make_layout, poisoned_arena, spread_frames

from kvtier.kernels import reference
from kvtier.kernels.ops import Format, IntArray, KVLayout, PlanSequence, StepPlan, make_plan
from kvtier.kernels.write import PageWriter

TOKEN_WISE = (Format.RAW, Format.FP8, Format.INT8, Format.K8V4, Format.INT4)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXACT_DIM = 64  # where the rotation's norm is a power of two
ROUNDED_DIMS = (80, 96, 128)


def _numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with outliers; one row of zeros, one of negative zeros, one that needs saturation."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 9, (*shape[:-1], 1), generator=generator).float())
    x[..., 3] *= 20
    rows = x.view(-1, shape[-1])
    rows[0], rows[1] = 0.0, -0.0
    if dtype is not torch.float16:
        rows[2] *= 1e9
    return x.to(dtype)


def _plan(layout: KVLayout, frames: IntArray) -> StepPlan:
    """Two sequences: rows 0 to 4 end at 21, rows 7 to 23 at 40 (in pages of 16); rows 5, 6 and 24 on belong to none."""
    tokens = layout.page_tokens
    parts = [
        PlanSequence(0, 5, tokens + 5, frames[:2]),
        PlanSequence(7, 17, 2 * tokens + 8, frames[2:6]),
    ]
    return make_plan(parts, tokens, layout.write_format)


def _write_both(layout: KVLayout, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole arenas after the kernel's write and after the reference's."""
    plan = _plan(layout, spread_frames(layout, 8).numpy())
    found = poisoned_arena(layout, 8)
    expected = found.clone()
    PageWriter().write_kv(k, v, found, layout, plan, 1)
    reference.write_kv(k, v, expected, layout, plan, 1)
    return found, expected


@pytest.mark.parametrize("format", TOKEN_WISE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_become_the_references_bytes(format: Format, dtype: torch.dtype) -> None:
    layout = make_layout(dim=EXACT_DIM, dtype=dtype, write_format=format)
    k, v = (_numbers(30, 2, EXACT_DIM, dtype=dtype, seed=i) for i in range(2))
    if format is Format.INT4:  # few bits, so that every order of the rotation's sums gives the same number
        k = torch.randint(-8, 9, k.shape, generator=torch.Generator().manual_seed(2)).to(dtype)

    found, expected = _write_both(layout, k, v)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", [Format.FP8, Format.K8V4])
@pytest.mark.parametrize("dim", ROUNDED_DIMS)
def test_halves_that_are_no_power_of_two_are_quantized_alike(format: Format, dim: int) -> None:
    """Their padding is zeros, which rows of one sign don't have."""
    layout = make_layout(heads=3, dim=dim, dtype=torch.bfloat16, write_format=format, page_tokens=32)
    k, v = (_numbers(30, 3, dim, dtype=torch.bfloat16, seed=i) for i in range(2))
    v[10:16] = v[10:16].abs() + 1
    v[16:24] = -v[16:24].abs() - 1

    found, expected = _write_both(layout, k, v)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("dim", ROUNDED_DIMS)
def test_rotated_rows_differ_from_the_references_by_a_code_where_sums_round(dim: int) -> None:
    layout = make_layout(dim=dim, write_format=Format.INT4, formats=(Format.INT4,))
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(30, 2, dim, generator=generator) for _ in range(2))

    found, expected = _write_both(layout, k, v)

    frames = spread_frames(layout, 8).long()[:6]
    mine, theirs = (
        reference.record_views(arena, layout, Format.INT4, 1).k[frames] for arena in (found, expected)
    )
    apart = reference.unpack_nibbles(mine) - reference.unpack_nibbles(theirs)
    assert apart.abs().max() <= 1
    assert (apart != 0).float().mean() < 0.002
    difference = found != expected
    views = reference.record_views(difference.to(torch.uint8), layout, Format.INT4, 1)
    assert int(difference.sum()) == int(views.k[frames].sum() + _bytes_of(views.k_scales, frames))


def _bytes_of(view: torch.Tensor | None, frames: torch.Tensor) -> torch.Tensor:
    assert view is not None
    return view[frames].contiguous().view(torch.uint8).sum()


def test_rows_of_raw_pages_keep_every_bit() -> None:
    """A NaN's payload is what a typed copy would be first to change."""
    layout = make_layout(dtype=torch.bfloat16)
    bits = torch.randint(0, 1 << 16, (30, 2, 64), generator=torch.Generator().manual_seed(0))
    k = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)

    found, expected = _write_both(layout, k, k.flip(0))

    assert k.isnan().any()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", [Format.RAW, Format.FP8])
def test_keys_and_values_may_be_views_of_one_projection(format: Format) -> None:
    layout = make_layout(write_format=format)
    fused = _numbers(30, 8, 64, dtype=torch.float32)
    k, v = fused[:, 4:6], fused.transpose(1, 2).contiguous().transpose(1, 2)[:, 6:]

    found, expected = _write_both(layout, k, v)

    assert not k.is_contiguous() and v.stride(2) != 1
    assert torch.equal(found, expected)


def test_a_step_without_rows_writes_nothing() -> None:
    layout = make_layout()
    arena = poisoned_arena(layout, 2)
    none = torch.zeros(3, 2, 64)

    PageWriter().write_kv(none, none, arena, layout, make_plan([], 16), 0)

    assert bool((arena == 0xFF).all())


def test_a_page_of_per_channel_scales_is_refused_row_by_row() -> None:
    layout = make_layout(write_format=Format.INT4C)
    k = torch.zeros(5, 2, 64)
    plan = make_plan([(0, 5, 5, np.zeros(1, np.int32))], 16)

    with pytest.raises(ValueError, match="INT4C needs a whole page"):
        PageWriter().write_kv(k, k, poisoned_arena(layout, 2), layout, plan, 0)


@pytest.mark.parametrize(("rank", "rope"), [(32, 16), (512, 64), (40, 8)])
@pytest.mark.parametrize("format", [Format.RAW, Format.FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_become_the_references_bytes(
    rank: int, rope: int, format: Format, dtype: torch.dtype
) -> None:
    layout = make_layout(
        heads=1,
        dim=rank,
        rope_dim=rope,
        dtype=dtype,
        formats=(Format.RAW, Format.FP8),
        write_format=format,
        page_tokens=32,
    )
    plan = _plan(layout, spread_frames(layout, 8).numpy())
    x = _numbers(30, rank + rope, dtype=dtype)
    found = poisoned_arena(layout, 8)
    expected = found.clone()

    PageWriter().write_latents(x[:, :rank], x[:, rank:], found, layout, plan, 1)
    reference.write_latents(x[:, :rank], x[:, rank:], expected, layout, plan, 1)

    assert torch.equal(found, expected)


@given(
    rows=st.lists(
        st.lists(st.floats(-65504, 65504, width=16), min_size=16, max_size=16), min_size=1, max_size=12
    ),
    format=st.sampled_from([Format.FP8, Format.INT8, Format.K8V4]),
)
@settings(deadline=None, max_examples=40)
def test_any_row_becomes_the_references_bytes(rows: list[list[float]], format: Format) -> None:
    layout = make_layout(heads=1, dim=16, dtype=torch.float16, write_format=format, layers=1)
    k = torch.tensor(rows, dtype=torch.float16)[:, None]
    plan = make_plan([(0, len(rows), len(rows), np.zeros(1, np.int32))], 16, format)
    found = poisoned_arena(layout, 1)
    expected = found.clone()

    PageWriter().write_kv(k, k.flip(-1), found, layout, plan, 0)
    reference.write_kv(k, k.flip(-1), expected, layout, plan, 0)

    assert torch.equal(found, expected)


# ---- conversions ------------------------------------------------------------------------------------------------


def _full_pages(layout: KVLayout, format: Format, frames: torch.Tensor) -> torch.Tensor:
    """An arena with whole pages of random numbers at `frames` in all layers, and poison elsewhere."""
    arena = poisoned_arena(layout, 8)
    generator = torch.Generator().manual_seed(0)
    heads, width = layout.num_kv_heads, layout.rope_dim or layout.head_dim
    for layer in range(layout.num_layers):
        k = torch.randn(len(frames), heads, layout.page_tokens, layout.head_dim, generator=generator)
        v = torch.randn(len(frames), heads, layout.page_tokens, width, generator=generator)
        reference.write_pages(arena, layout, format, layer, frames.long(), k, v)
    return arena


def _convert_both(layout: KVLayout, source: Format, target: Format) -> tuple[torch.Tensor, torch.Tensor]:
    frames = spread_frames(layout, 8)
    found = _full_pages(layout, source, frames[:2])
    expected = found.clone()
    pages = frames.numpy()
    PageWriter().convert_pages(found, layout, pages[:2], source, pages[2:4], target)
    reference.convert_pages(expected, layout, pages[:2], source, pages[2:4], target)
    return found, expected


PAIRS = [(a, b) for a, b in itertools.product(Format, Format) if a is not b]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_pages_of_all_layers_become_the_references_bytes(source: Format, target: Format) -> None:
    """Rotated keys within what a sum's order may change, a code here and there; all else exactly."""
    layout = make_layout(heads=1, dim=EXACT_DIM, dtype=torch.bfloat16)

    found, expected = _convert_both(layout, source, target)

    if Format.INT4 in (source, target):
        frames = spread_frames(layout, 8).long()[2:4]
        for layer in range(layout.num_layers):
            mine, theirs = (
                reference.read_pages(arena, layout, target, layer, frames) for arena in (found, expected)
            )
            assert (mine[0] - theirs[0]).abs().mean() < 1e-3
            assert torch.equal(mine[1], theirs[1])
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("dim", "page_tokens", "dtype", "source"),
    [(128, 64, torch.bfloat16, Format.FP8), (96, 32, torch.float16, Format.INT8)],
)
def test_decay_is_bit_exact_at_models_shapes(
    dim: int, page_tokens: int, dtype: torch.dtype, source: Format
) -> None:
    layout = make_layout(
        dim=dim, page_tokens=page_tokens, dtype=dtype, formats=(source, Format.INT4C), layers=3
    )

    found, expected = _convert_both(layout, source, Format.INT4C)

    assert torch.equal(found, expected)


@pytest.mark.parametrize(("source", "target"), [(Format.RAW, Format.FP8), (Format.INT4C, Format.RAW)])
def test_long_pages_are_converted_wholly(source: Format, target: Format) -> None:
    layout = make_layout(dim=80, page_tokens=64, dtype=torch.float16, formats=(source, target))

    found, expected = _convert_both(layout, source, target)

    assert torch.equal(found, expected)


def test_a_page_is_made_from_the_codes_that_are_there() -> None:
    """8 bits, then 4: the nibbles are those of the dequantized numbers, so provenance says all there is to say."""
    layout = make_layout()
    frames = spread_frames(layout, 8)
    pages = frames.numpy()
    arena = _full_pages(layout, Format.FP8, frames[:2])
    writer = PageWriter()

    writer.convert_pages(arena, layout, pages[:2], Format.FP8, pages[2:4], Format.INT4C)
    writer.convert_pages(arena, layout, pages[:2], Format.FP8, pages[4:6], Format.RAW)
    writer.convert_pages(arena, layout, pages[4:6], Format.RAW, pages[6:8], Format.INT4C)

    direct, through_raw = (
        reference.gather_pages(arena, layout, pages[i : i + 2], Format.INT4C) for i in (2, 6)
    )
    assert torch.equal(direct, through_raw)


@pytest.mark.parametrize(("source", "target"), [(Format.RAW, Format.FP8), (Format.FP8, Format.RAW)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_latents_are_converted_and_rope_keys_kept(
    source: Format, target: Format, dtype: torch.dtype
) -> None:
    layout = make_layout(heads=1, dim=512, rope_dim=64, dtype=dtype, formats=(Format.RAW, Format.FP8))

    found, expected = _convert_both(layout, source, target)

    assert torch.equal(found, expected)


def test_a_page_is_not_converted_onto_itself_or_another_source() -> None:
    layout = make_layout()
    arena = poisoned_arena(layout, 2)
    pages = spread_frames(layout, 2).numpy()

    with pytest.raises(ValueError, match="target frame of its own"):
        PageWriter().convert_pages(arena, layout, pages, Format.FP8, pages[::-1].copy(), Format.INT4C)


def test_no_pages_need_no_launch() -> None:
    layout = make_layout()
    arena = poisoned_arena(layout, 1)
    none = np.zeros(0, np.int32)

    PageWriter().convert_pages(arena, layout, none, Format.FP8, none, Format.INT4C)

    assert bool((arena == 0xFF).all())
