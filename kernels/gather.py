"""Moves whole pages: to and from contiguous staging, and to and from the caches of engines that are layer-first. Triton.

A page goes below L1 by one copy engine transfer of its own; these kernels are for what wants many pages in one buffer
(one registered region for RDMA), and for other engines' layouts. All layers go in one launch.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.kernels.layout import Format, IntArray, KVLayout, check_apart, check_arena, check_frames
from kvtier.kernels.variants import AotVariant, Target, make_variant
from kvtier.kernels.write import gate_layout

WORDS = 4096  # int32 words of one program: 16 KiB, 16 bytes for each of 8 warps' threads, four times
WARPS = 8


@triton.jit
def pages_kernel(
    arena_ptr,  # i32
    staging_ptr,  # i32 [pages, page words]
    frames_ptr,  # i32 [pages]
    frame_words,
    page_words,
    TO_STAGING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK words of one page."""
    page = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    in_arena = arena_ptr + tl.load(frames_ptr + page).to(tl.int64) * frame_words + word
    in_staging = staging_ptr + page * page_words + word
    if TO_STAGING:
        tl.store(in_staging, tl.load(in_arena, mask=inside), mask=inside)
    else:
        tl.store(in_arena, tl.load(in_staging, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["pages"])
def engine_kernel(
    arena_ptr,  # i32
    caches_ptr,  # i64 [2 * layers]: addresses of K and V of layer 0, of layer 1, ...
    blocks_ptr,  # i32 [2, pages]: block in the caches, frame in the arena
    pages,
    block_words,  # distance of two blocks of a cache
    FRAME_WORDS: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    ROW: tl.constexpr,  # words of one head's row
    TO_ARENA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK words of one page's K or V in one layer, which lie [H, P, ROW] here and [P, H, ROW] there."""
    page = tl.program_id(0)
    part = tl.program_id(1)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < H * P * ROW
    column = word % ROW
    token = word // ROW % P
    head = word // (ROW * P)
    cache = tl.load(caches_ptr + part).to(tl.pointer_type(tl.int32))
    there = tl.load(blocks_ptr + page).to(tl.int64) * block_words
    there_at = tl.multiple_of(cache, 16) + there + (token * H + head) * ROW + column
    here = tl.load(blocks_ptr + pages + page).to(tl.int64) * FRAME_WORDS
    here += (part // 2).to(tl.int64) * RECORD_WORDS + part % 2 * V_WORDS
    here_at = arena_ptr + here + word
    if TO_ARENA:
        tl.store(here_at, tl.load(there_at, mask=inside), mask=inside)
    else:
        tl.store(there_at, tl.load(here_at, mask=inside), mask=inside)


def gather_pages(arena: torch.Tensor, layout: KVLayout, frames: IntArray, format: Format) -> torch.Tensor:
    """Whole pages, all layers, one behind the other: uint8 [frames, page bytes] on the arena's device."""
    check_arena(arena, layout)
    check_frames(frames, format, arena, layout)
    staging = torch.empty(len(frames), layout.page_bytes(format), dtype=torch.uint8, device=arena.device)
    _move(arena, layout, frames, format, staging, to_staging=True)
    return staging


def scatter_pages(
    staging: torch.Tensor, arena: torch.Tensor, layout: KVLayout, frames: IntArray, format: Format
) -> None:
    """The other way round: staging uint8 [frames, page bytes], on the arena's device, into pages.

    Pages that overlap would be written by two programs at once: ValueError.
    """
    check_arena(arena, layout)
    check_frames(frames, format, arena, layout)
    if staging.dtype != torch.uint8 or staging.shape != (len(frames), layout.page_bytes(format)):
        raise ValueError(
            f"staging must be uint8 [{len(frames)}, {layout.page_bytes(format)}], "
            f"got {staging.dtype} {list(staging.shape)}"
        )
    if not staging.is_contiguous() or staging.device != arena.device:
        raise ValueError(
            f"staging must be contiguous on {arena.device}, got {staging.device} {staging.stride()}"
        )
    check_apart("frames", frames, layout.page_units(format))
    _move(arena, layout, frames, format, staging, to_staging=False)


def _move(
    arena: torch.Tensor,
    layout: KVLayout,
    frames: IntArray,
    format: Format,
    staging: torch.Tensor,
    *,
    to_staging: bool,
) -> None:
    if len(frames) == 0:
        return
    words = layout.page_bytes(format) // 4
    pages_kernel[(len(frames), triton.cdiv(words, WORDS))](
        arena.view(torch.int32),
        staging.view(torch.int32),
        torch.from_numpy(frames.astype(np.int32)).to(arena.device),
        layout.unit_bytes // 4,
        words,
        TO_STAGING=to_staging,
        BLOCK=WORDS,
        num_warps=WARPS,
    )


def engine_to_pages(
    caches: torch.Tensor,
    block_bytes: int,
    blocks: IntArray,
    arena: torch.Tensor,
    layout: KVLayout,
    frames: IntArray,
) -> None:
    """Copy blocks of a layer-first engine's caches into raw pages.

    `caches` int64 [2 * layers], on the arena's device: the addresses of layer 0's K cache, its V cache, layer 1's K
    cache and so on. Each holds blocks of [P, H, D] numbers (NHD) in the layout's dtype, `block_bytes` from one to the
    next: twice a block's own size where an engine lays K and V of a block side by side. Block blocks[i] becomes the
    page at frames[i]. The addresses must be valid and 16-byte aligned, and the blocks exist: neither can be checked here.
    """
    _engine(caches, block_bytes, blocks, arena, layout, frames, to_arena=True)


def pages_to_engine(
    caches: torch.Tensor,
    block_bytes: int,
    blocks: IntArray,
    arena: torch.Tensor,
    layout: KVLayout,
    frames: IntArray,
) -> None:
    """The other way round: the raw page at frames[i] becomes block blocks[i]. See engine_to_pages."""
    _engine(caches, block_bytes, blocks, arena, layout, frames, to_arena=False)


def _engine(
    caches: torch.Tensor,
    block_bytes: int,
    blocks: IntArray,
    arena: torch.Tensor,
    layout: KVLayout,
    frames: IntArray,
    *,
    to_arena: bool,
) -> None:
    check_arena(arena, layout)
    check_frames(frames, Format.RAW, arena, layout)
    if layout.rope_dim:
        raise ValueError("the pages hold latents, which have no K and V caches")
    if caches.dtype != torch.int64 or caches.shape != (2 * layout.num_layers,):
        raise ValueError(
            f"caches must be {2 * layout.num_layers} int64 addresses, got {caches.dtype} {list(caches.shape)}"
        )
    if len(blocks) != len(frames):
        raise ValueError(f"{len(blocks)} blocks can't be {len(frames)} pages")
    if to_arena:
        check_apart("frames", frames, layout.page_units(Format.RAW))
    else:
        check_apart("blocks", blocks, 1)
    part_bytes = layout.records[Format.RAW].v
    row_bytes = layout.head_dim * layout.dtype.itemsize
    if block_bytes % 16 or block_bytes < part_bytes or row_bytes % 4:
        raise ValueError(
            f"block_bytes must be a multiple of 16 from {part_bytes} up, and rows whole words; "
            f"got {block_bytes} and rows of {row_bytes} bytes"
        )
    if len(frames) == 0:
        return
    engine_kernel[(len(frames), 2 * layout.num_layers, triton.cdiv(part_bytes // 4, WORDS))](
        arena.view(torch.int32),
        caches,
        torch.from_numpy(np.stack([blocks, frames]).astype(np.int32)).to(arena.device),
        len(frames),
        block_bytes // 4,
        **_engine_constants(layout),
        TO_ARENA=to_arena,
        BLOCK=WORDS,
        num_warps=WARPS,
    )


def _engine_constants(layout: KVLayout) -> dict[str, int]:
    record = layout.records[Format.RAW]
    return {
        "FRAME_WORDS": layout.unit_bytes // 4,
        "RECORD_WORDS": record.nbytes // 4,
        "V_WORDS": record.v // 4,
        "H": layout.num_kv_heads,
        "P": layout.page_tokens,
        "ROW": layout.head_dim * layout.dtype.itemsize // 4,
    }


def aot_variants(target: Target) -> list[AotVariant]:
    """Compiled forms for the ahead-of-time gate; the same for every target."""
    pages = {"arena_ptr": "*i32:16", "staging_ptr": "*i32:16", "frames_ptr": "*i32:16"}
    pages |= {"frame_words": "i32:16", "page_words": "i32:16"}
    engine = {"arena_ptr": "*i32:16", "caches_ptr": "*i64:16", "blocks_ptr": "*i32:16"}
    engine |= {"pages": "i32", "block_words": "i32:16"}
    layout = gate_layout(Format.RAW)
    found = []
    for name, into in (("gather_pages", True), ("scatter_pages", False)):
        constants = {"TO_STAGING": into, "BLOCK": WORDS}
        found.append(make_variant(name, pages_kernel, pages, constants, {"num_warps": WARPS}))
    for name, into in (("engine_to_pages", True), ("pages_to_engine", False)):
        constants = {**_engine_constants(layout), "TO_ARENA": into, "BLOCK": WORDS}
        found.append(make_variant(name, engine_kernel, engine, constants, {"num_warps": WARPS}))
    return found
