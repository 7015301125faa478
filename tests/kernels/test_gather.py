"""Moves of whole pages by Triton: staging, and the caches of layer-first engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layout_kit import make_layout, spread_frames

from kvtier.kernels import reference
from kvtier.kernels.gather import engine_to_pages, gather_pages, pages_to_engine, scatter_pages
from kvtier.kernels.ops import Format, KVLayout


def _random_arena(layout: KVLayout, pages: int) -> torch.Tensor:
    largest = max(layout.page_bytes(format) for format in layout.records)
    units = pages * -(-largest // layout.unit_bytes)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (units, layout.unit_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("format", [Format.RAW, Format.FP8, Format.INT4C])
@pytest.mark.parametrize("unit_bytes", [0, 1024])
def test_pages_of_all_layers_lie_one_behind_the_other(format: Format, unit_bytes: int) -> None:
    layout = make_layout(unit_bytes=unit_bytes)
    arena = _random_arena(layout, 6)
    frames = spread_frames(layout, 6).numpy()[:4]
    before = arena.clone()

    staging = gather_pages(arena, layout, frames, format)

    assert torch.equal(staging, reference.gather_pages(arena, layout, frames, format))
    assert torch.equal(arena, before)


@pytest.mark.parametrize("format", [Format.RAW, Format.K8V4])
def test_staging_becomes_pages_and_touches_nothing_else(format: Format) -> None:
    layout = make_layout(dtype=torch.bfloat16, layers=3, page_tokens=32)
    arena = _random_arena(layout, 6)
    expected = arena.clone()
    frames = spread_frames(layout, 6).numpy()[:3]
    generator = torch.Generator().manual_seed(1)
    staging = torch.randint(0, 256, (3, layout.page_bytes(format)), dtype=torch.uint8, generator=generator)

    scatter_pages(staging, arena, layout, frames, format)
    reference.scatter_pages(staging, expected, layout, frames, format)

    assert torch.equal(arena, expected)


def test_staging_of_another_shape_is_refused() -> None:
    layout = make_layout()
    arena = _random_arena(layout, 3)
    frames = spread_frames(layout, 3).numpy()
    size = layout.page_bytes(Format.FP8)

    with pytest.raises(ValueError, match=rf"uint8 \[3, {size}\], got torch.uint8 \[2, {size}\]"):
        scatter_pages(torch.zeros(2, size, dtype=torch.uint8), arena, layout, frames, Format.FP8)
    with pytest.raises(ValueError, match="must be contiguous"):
        strided = torch.zeros(3, 2 * size, dtype=torch.uint8)[:, ::2]
        scatter_pages(strided, arena, layout, frames, Format.FP8)


def test_frames_outside_the_arena_or_named_twice_are_refused() -> None:
    layout = make_layout()
    arena = _random_arena(layout, 3)

    with pytest.raises(ValueError, match="FP8 frames must be in"):
        gather_pages(arena, layout, np.array([len(arena)], np.int32), Format.FP8)
    with pytest.raises(ValueError, match="must differ"):
        staging = torch.zeros(2, layout.page_bytes(Format.FP8), dtype=torch.uint8)
        scatter_pages(staging, arena, layout, np.array([0, 0], np.int32), Format.FP8)


def test_pages_that_overlap_in_some_of_their_units_are_not_written() -> None:
    layout = make_layout(dtype=torch.bfloat16)
    arena = _random_arena(layout, 4)
    before = arena.clone()
    units = layout.page_units(Format.RAW)
    frames = np.array([2 * units, 0, units - 1], np.int32)
    staging = torch.zeros(3, layout.page_bytes(Format.RAW), dtype=torch.uint8)
    engine = _Engine(layout, 3, False)

    with pytest.raises(ValueError, match=f"frames that are written must differ by {units} or more"):
        scatter_pages(staging, arena, layout, frames, Format.RAW)
    with pytest.raises(ValueError, match=f"got 0 and {units - 1}"):
        blocks = np.arange(3, dtype=np.int32)
        engine_to_pages(engine.caches, engine.block_bytes, blocks, arena, layout, frames)

    assert units > 1 and torch.equal(arena, before)


def test_no_pages_need_no_launch() -> None:
    layout = make_layout()
    arena = _random_arena(layout, 1)
    before = arena.clone()
    none = np.zeros(0, np.int32)

    staging = gather_pages(arena, layout, none, Format.RAW)
    scatter_pages(staging, arena, layout, none, Format.RAW)

    assert staging.shape == (0, layout.page_bytes(Format.RAW))
    assert torch.equal(arena, before)


# ---- engines ----------------------------------------------------------------------------------------------------


class _Engine:
    """Layer-first caches of blocks [P, H, D]; K and V of a layer apart, or side by side in each block."""

    def __init__(self, layout: KVLayout, blocks: int, side_by_side: bool) -> None:
        tokens, heads, dim = layout.page_tokens, layout.num_kv_heads, layout.head_dim
        generator = torch.Generator().manual_seed(2)
        shape = (layout.num_layers, blocks, 2) if side_by_side else (layout.num_layers, 2, blocks)
        both = torch.randn(*shape, tokens, heads, dim, generator=generator).to(layout.dtype)
        self.numbers = both  # keeps the memory alive
        self.parts = both.transpose(1, 2) if side_by_side else both  # [layers, K or V, blocks, P, H, D]
        self.block_bytes = self.parts.stride(2) * layout.dtype.itemsize
        addresses = [
            self.parts[layer, part].data_ptr() for layer in range(layout.num_layers) for part in range(2)
        ]
        self.caches = torch.tensor(addresses)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "page_tokens"),
    [
        (torch.bfloat16, 3, 80, 16),
        (torch.float32, 2, 64, 32),
        (torch.bfloat16, 1, 40, 2),
    ],  # the last one is padded
)
def test_an_engines_blocks_become_pages(
    dtype: torch.dtype, heads: int, dim: int, page_tokens: int, side_by_side: bool
) -> None:
    layout = make_layout(
        dtype=dtype, heads=heads, dim=dim, layers=3, page_tokens=page_tokens, formats=(Format.RAW,)
    )
    engine = _Engine(layout, 5, side_by_side)
    arena = _random_arena(layout, 6)
    expected = arena.clone()
    frames = spread_frames(layout, 6).numpy()[:3]
    blocks = np.array([4, 0, 3], np.int32)

    engine_to_pages(engine.caches, engine.block_bytes, blocks, arena, layout, frames)

    for layer in range(3):
        views = reference.record_views(expected, layout, Format.RAW, layer)
        for view, part in ((views.k, 0), (views.v, 1)):
            numbers = engine.parts[layer, part][torch.from_numpy(blocks).long()].transpose(1, 2)
            view[torch.from_numpy(frames).long()] = numbers.contiguous().view(torch.uint8)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_pages_become_an_engines_blocks_and_touch_no_other(side_by_side: bool) -> None:
    layout = make_layout(dtype=torch.bfloat16, heads=3, page_tokens=32)
    engine = _Engine(layout, 5, side_by_side)
    other = _Engine(layout, 5, not side_by_side)
    arena = _random_arena(layout, 6)
    frames = spread_frames(layout, 6).numpy()[:2]
    expected = engine.parts.clone()

    engine_to_pages(other.caches, other.block_bytes, np.array([1, 2], np.int32), arena, layout, frames)
    pages_to_engine(engine.caches, engine.block_bytes, np.array([4, 0], np.int32), arena, layout, frames)

    expected[:, :, [4, 0]] = other.parts[:, :, [1, 2]]
    assert torch.equal(engine.parts, expected)


def test_an_engines_figures_that_dont_fit_are_refused() -> None:
    layout = make_layout(dtype=torch.bfloat16)
    engine = _Engine(layout, 2, False)
    arena = _random_arena(layout, 2)
    frames = spread_frames(layout, 2).numpy()
    blocks = np.array([0, 1], np.int32)

    with pytest.raises(ValueError, match="caches must be 4 int64 addresses"):
        engine_to_pages(engine.caches[:3], engine.block_bytes, blocks, arena, layout, frames)
    with pytest.raises(ValueError, match="block_bytes must be a multiple of 16 from 4096 up"):
        engine_to_pages(engine.caches, engine.block_bytes // 2, blocks, arena, layout, frames)
    with pytest.raises(ValueError, match="1 blocks can't be 2 pages"):
        pages_to_engine(engine.caches, engine.block_bytes, blocks[:1], arena, layout, frames)
    with pytest.raises(ValueError, match="blocks that are written must differ"):
        pages_to_engine(engine.caches, engine.block_bytes, blocks * 0, arena, layout, frames)
