"""Writes keys, values and latents into pages, and rewrites whole pages of one format in another. Triton.

A record has a K part and a V part (for latents: the latents and the rope keys), and each part one code of rows: raw
numbers, 8-bit codes, or nibbles. Every kernel here works on one part of one record at a time, and on a row as two
halves of its columns, because a byte of nibbles holds column j and column j + D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.kernels.codes import (
    E4M3_BITS_SCALE,
    as_bits,
    encode4,
    encode8,
    fp16_of_e4m3_bits,
    fp16_of_int8,
    nibble,
    nibble_scale,
    raw_bits,
    raw_number,
)
from kvtier.kernels.layout import (
    Format,
    IntArray,
    KVLayout,
    Record,
    StepPlan,
    check_conversion,
    check_latents,
    check_layer,
    check_new_rows,
    check_plan,
)
from kvtier.kernels.plans import PerPlan
from kvtier.kernels.reference import places
from kvtier.kernels.variants import AotVariant, Target, make_variant

WRITE_TOKENS = 16  # a program's tokens; small, so that the few rows of a decode step fill more of the device
CONVERT_TOKENS = 16  # of a part without per-channel scales; one with them takes the whole page at once


class RowCode(IntEnum):
    """How one part of a record stores its rows."""

    RAW = 0
    FP8 = 1
    INT8 = 2
    NIBBLES = 3  # scale and zero per row
    ROTATED = 4  # the same after a Hadamard rotation of the row
    CHANNELS = 5  # scale and zero per column, over the page's rows


RAW = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)
NIBBLES = tl.constexpr(3)
ROTATED = tl.constexpr(4)
CHANNELS = tl.constexpr(5)

PART_CODES = {
    Format.RAW: (RowCode.RAW, RowCode.RAW),
    Format.FP8: (RowCode.FP8, RowCode.FP8),
    Format.INT8: (RowCode.INT8, RowCode.INT8),
    Format.K8V4: (RowCode.INT8, RowCode.NIBBLES),
    Format.INT4: (RowCode.ROTATED, RowCode.NIBBLES),
    Format.INT4C: (RowCode.CHANNELS, RowCode.NIBBLES),
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Constants of device code about the rows of one part, and how a program takes them."""

    D: int
    BLOCK: int  # columns of half a row, rounded up to a power of two
    P: int
    TOKENS: int  # rows of one program
    UNIT: int  # columns of half a Hadamard block
    STEPS: int  # log2(UNIT)
    BITS: int  # of a raw number
    IS_BF16: bool


# ---- rows of one part, on the device ----------------------------------------------------------------------------
# `arena` is (uint8, float16, raw numbers' bits): three pointers to the same bytes. Addresses in it are bytes, int64.


@triton.jit
def walsh(x, ROWS: tl.constexpr):
    """Unnormalized Walsh-Hadamard transform of each run of UNIT columns of x [TOKENS, BLOCK].

    A step adds and subtracts neighbours and moves their place's lowest bit to the top: after log2(UNIT) of them every
    bit is back where it was.
    """
    LINES: tl.constexpr = ROWS.TOKENS * ROWS.BLOCK // ROWS.UNIT
    STEPS: tl.constexpr = ROWS.STEPS
    y = tl.reshape(x, [LINES, ROWS.UNIT])
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(y, [LINES, ROWS.UNIT // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [LINES, ROWS.UNIT])
    return tl.reshape(y, [ROWS.TOKENS, ROWS.BLOCK])


@triton.jit
def partner_of(columns, ROWS: tl.constexpr):
    """The same column of the other unit of each one's pair: a Hadamard block is a pair of units."""
    return columns + tl.where((columns // ROWS.UNIT) % 2 == 0, ROWS.UNIT, -ROWS.UNIT)


@triton.jit
def rotated(own, partner, columns, norm, ROWS: tl.constexpr):
    """Half a row's columns after rotation by hadamard(D); `partner` holds the row at partner_of(columns).

    A half of a row splits no unit, but may split a pair. Therefore the transform's step across units comes first.
    """
    leads = (columns // ROWS.UNIT) % 2 == 0
    return walsh(tl.where(leads[None, :], partner + own, partner - own), ROWS) * norm


@triton.jit
def load_numbers(arena, codes, scales, head, tokens, columns, mask, CODE: tl.constexpr, ROWS: tl.constexpr):
    """float32 [T, C] of a part's tokens [T] and any columns [C], as they are stored: rotated rows stay rotated."""
    D: tl.constexpr = ROWS.D
    row = (head * ROWS.P + tokens)[:, None]
    column = columns[None, :]
    if CODE == RAW:
        at = arena[2] + codes // (ROWS.BITS // 8) + row * D + column
        return raw_number(tl.load(at, mask=mask, other=0), ROWS.BITS, ROWS.IS_BF16)
    elif CODE == FP8:
        code = fp16_of_e4m3_bits(tl.load(arena[0] + codes + row * D + column, mask=mask, other=0))
        s = tl.load(arena[1] + scales // 2 + row).to(tl.float32) * E4M3_BITS_SCALE
        return code.to(tl.float32) * s
    elif CODE == INT8:
        code = fp16_of_int8(tl.load(arena[0] + codes + row * D + column, mask=mask, other=128))
        return code.to(tl.float32) * tl.load(arena[1] + scales // 2 + row).to(tl.float32)
    else:
        HALF: tl.constexpr = D // 2
        packed = tl.load(arena[0] + codes + row * HALF + column % HALF, mask=mask, other=0)
        code = ((packed >> tl.where(column >= HALF, 4, 0).to(tl.uint8)) & 15).to(tl.float32)
        if CODE == CHANNELS:
            at = arena[1] + scales // 2 + head * 2 * D + column
            s = tl.load(at, mask=column < D, other=0.0).to(tl.float32)
            zero = tl.load(at + D, mask=column < D, other=0.0).to(tl.float32)
        else:
            at = arena[1] + scales // 2 + row * 2
            s = tl.load(at).to(tl.float32)
            zero = tl.load(at + 1).to(tl.float32)
        return code * s + zero


@triton.jit
def store_numbers(
    first, second, arena, codes, scales, head, tokens, present, CODE: tl.constexpr, ROWS: tl.constexpr
):
    """Quantize rows, given as halves [T, BLOCK] with zeros where masked off, and store them with their scales.

    ROTATED wants them rotated already. `codes` and `scales` are one address, or one for each token.
    """
    HALF: tl.constexpr = ROWS.D // 2
    columns = tl.arange(0, ROWS.BLOCK)
    known = (columns < HALF)[None, :]
    mask = present[:, None] & known
    row = head * ROWS.P + tokens
    if CODE == RAW:
        to = (arena[2] + codes // (ROWS.BITS // 8) + row * ROWS.D)[:, None] + columns[None, :]
        tl.store(to, raw_bits(first, ROWS.BITS, ROWS.IS_BF16), mask=mask)
        tl.store(to + HALF, raw_bits(second, ROWS.BITS, ROWS.IS_BF16), mask=mask)
    elif CODE <= INT8:
        amax = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        code1, s = encode8(first, amax, CODE == FP8)
        code2, s = encode8(second, amax, CODE == FP8)
        to = (arena[0] + codes + row * ROWS.D)[:, None] + columns[None, :]
        tl.store(to, code1, mask=mask)
        tl.store(to + HALF, code2, mask=mask)
        tl.store(arena[1] + scales // 2 + row, s, mask=present)
    elif CODE <= ROTATED:
        low = tl.min(tl.where(known, tl.minimum(first, second), float("inf")), 1)
        high = tl.max(tl.where(known, tl.maximum(first, second), float("-inf")), 1)
        packed, s, zero = encode4(first, second, low, high)
        tl.store((arena[0] + codes + row * HALF)[:, None] + columns[None, :], packed, mask=mask)
        tl.store(arena[1] + scales // 2 + row * 2, s, mask=present)
        tl.store(arena[1] + scales // 2 + row * 2 + 1, zero, mask=present)
    else:
        s1, zero1 = nibble_scale(tl.min(first, 0), tl.max(first, 0))
        s2, zero2 = nibble_scale(tl.min(second, 0), tl.max(second, 0))
        code1 = nibble(first, s1.to(tl.float32)[None, :], zero1.to(tl.float32)[None, :])
        code2 = nibble(second, s2.to(tl.float32)[None, :], zero2.to(tl.float32)[None, :])
        tl.store((arena[0] + codes + row * HALF)[:, None] + columns[None, :], code1 | (code2 << 4), mask=mask)
        to = arena[1] + scales // 2 + head * 2 * ROWS.D + columns
        tl.store(to, s1, mask=columns < HALF)
        tl.store(to + HALF, s2, mask=columns < HALF)
        tl.store(to + ROWS.D, zero1, mask=columns < HALF)
        tl.store(to + ROWS.D + HALF, zero2, mask=columns < HALF)


# ---- new rows ---------------------------------------------------------------------------------------------------


@triton.jit
def write_part(x, arena, codes, scales, head, tokens, present, norm, CODE: tl.constexpr, ROWS: tl.constexpr):
    """Store one head's rows in their pages; x [T] points at the rows."""
    HALF: tl.constexpr = ROWS.D // 2
    columns = tl.arange(0, ROWS.BLOCK)
    mask = present[:, None] & (columns < HALF)[None, :]
    first_at = x[:, None] + columns[None, :]
    if CODE == RAW:  # copied, so that every bit pattern stays what it is
        to = (arena[2] + codes // (ROWS.BITS // 8) + (head * ROWS.P + tokens) * ROWS.D)[:, None] + columns[
            None, :
        ]
        tl.store(to, as_bits(tl.load(first_at, mask=mask), ROWS.BITS), mask=mask)
        tl.store(to + HALF, as_bits(tl.load(first_at + HALF, mask=mask), ROWS.BITS), mask=mask)
    else:
        first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(first_at + HALF, mask=mask, other=0.0).to(tl.float32)
        if CODE == ROTATED:
            upper = columns + HALF
            other = tl.load(x[:, None] + partner_of(columns, ROWS)[None, :], mask=mask, other=0.0)
            first = rotated(first, other.to(tl.float32), columns, norm, ROWS)
            other = tl.load(x[:, None] + partner_of(upper, ROWS)[None, :], mask=mask, other=0.0)
            second = rotated(second, other.to(tl.float32), upper, norm, ROWS)
        store_numbers(first, second, arena, codes, scales, head, tokens, present, CODE, ROWS)


@triton.jit(do_not_specialize=["n"])
def write_kernel(
    k_ptr,  # [rows, H, DK]
    v_ptr,  # [rows, H, DV]
    bytes_ptr,  # the arena, three times
    halves_ptr,
    raw_ptr,
    places_ptr,  # i32 [3, n]: row, frame, slot
    n,
    layer_bytes: tl.int64,  # where the layer's record lies in a page
    k_row,
    k_head,
    v_row,
    v_head,
    norm,  # f32: of the rotation
    FRAME_BYTES: tl.constexpr,
    O_V: tl.constexpr,
    O_KS: tl.constexpr,
    O_VS: tl.constexpr,
    K_CODE: tl.constexpr,
    V_CODE: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr,
):
    """One program: some rows of one head, K or V."""
    i = tl.program_id(0) * K_ROWS.TOKENS + tl.arange(0, K_ROWS.TOKENS)
    head = tl.program_id(1)
    row = tl.load(places_ptr + i, mask=i < n, other=0).to(tl.int64)
    frame = tl.load(places_ptr + n + i, mask=i < n, other=-1)
    tokens = tl.load(places_ptr + 2 * n + i, mask=i < n, other=0)
    record = frame.to(tl.int64) * FRAME_BYTES + layer_bytes
    arena = (bytes_ptr, halves_ptr, raw_ptr)
    if tl.program_id(2) == 0:
        x = k_ptr + row * k_row + head * k_head
        write_part(x, arena, record, record + O_KS, head, tokens, frame >= 0, norm, K_CODE, K_ROWS)
    else:
        x = v_ptr + row * v_row + head * v_head
        write_part(x, arena, record + O_V, record + O_VS, head, tokens, frame >= 0, norm, V_CODE, V_ROWS)


# ---- pages again ------------------------------------------------------------------------------------------------


@triton.jit
def convert_part(
    arena,
    source,
    source_scales,
    target,
    target_scales,
    head,
    tokens,
    norm,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Read rows of one head, and store them again."""
    HALF: tl.constexpr = ROWS.D // 2
    columns = tl.arange(0, ROWS.BLOCK)
    upper = columns + HALF
    present = tokens < ROWS.P
    mask = present[:, None] & (columns < HALF)[None, :]
    if SOURCE == RAW and TARGET == RAW:
        at = arena[2] + ((head * ROWS.P + tokens) * ROWS.D)[:, None] + columns[None, :]
        to = at + target // (ROWS.BITS // 8)
        at += source // (ROWS.BITS // 8)
        tl.store(to, tl.load(at, mask=mask), mask=mask)
        tl.store(to + HALF, tl.load(at + HALF, mask=mask), mask=mask)
    else:
        first = load_numbers(arena, source, source_scales, head, tokens, columns, mask, SOURCE, ROWS)
        second = load_numbers(arena, source, source_scales, head, tokens, upper, mask, SOURCE, ROWS)
        if (SOURCE == ROTATED) != (TARGET == ROTATED):  # the rotation is its own inverse
            there = partner_of(columns, ROWS)
            other = load_numbers(arena, source, source_scales, head, tokens, there, mask, SOURCE, ROWS)
            first = rotated(first, other, columns, norm, ROWS)
            there = partner_of(upper, ROWS)
            other = load_numbers(arena, source, source_scales, head, tokens, there, mask, SOURCE, ROWS)
            second = rotated(second, other, upper, norm, ROWS)
        first = tl.where(mask, first, 0.0)
        second = tl.where(mask, second, 0.0)
        store_numbers(first, second, arena, target, target_scales, head, tokens, present, TARGET, ROWS)


@triton.jit(do_not_specialize=["pages"])
def convert_kernel(
    bytes_ptr,  # the arena, three times
    halves_ptr,
    raw_ptr,
    pages_ptr,  # i32 [2, pages]: source frame, target frame
    pages,
    norm,
    FRAME_BYTES: tl.constexpr,
    SOURCE: tl.constexpr,  # a Record
    TARGET: tl.constexpr,
    K_SOURCE: tl.constexpr,  # row codes
    K_TARGET: tl.constexpr,
    V_SOURCE: tl.constexpr,
    V_TARGET: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr,
):
    """One program: some tokens of one head, K or V, in one page and layer."""
    page = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    STEPS: tl.constexpr = K_ROWS.P // K_ROWS.TOKENS
    head = tl.program_id(2) // (2 * STEPS)
    step = tl.program_id(2) // 2 % STEPS
    tokens = step * K_ROWS.TOKENS + tl.arange(0, K_ROWS.TOKENS)
    source = tl.load(pages_ptr + page).to(tl.int64) * FRAME_BYTES + layer * SOURCE.nbytes
    target = tl.load(pages_ptr + pages + page).to(tl.int64) * FRAME_BYTES + layer * TARGET.nbytes
    arena = (bytes_ptr, halves_ptr, raw_ptr)
    if tl.program_id(2) % 2 == 0:
        convert_part(
            arena,
            source,
            source + SOURCE.k_scales,
            target,
            target + TARGET.k_scales,
            head,
            tokens,
            norm,
            K_SOURCE,
            K_TARGET,
            K_ROWS,
        )
    else:
        convert_part(
            arena,
            source + SOURCE.v,
            source + SOURCE.v_scales,
            target + TARGET.v,
            target + TARGET.v_scales,
            head,
            tokens,
            norm,
            V_SOURCE,
            V_TARGET,
            V_ROWS,
        )


# ---- launchers --------------------------------------------------------------------------------------------------


class PageWriter:
    """Writes rows and converts pages. Keeps where the rows of the last plans go, on the device."""

    def __init__(self) -> None:
        self._places: PerPlan[torch.Tensor] = PerPlan(_overwrite)
        self.tables: tuple[PerPlan[torch.Tensor], ...] = (self._places,)

    def write_kv(
        self,
        k: torch.Tensor,  # [rows, H, D]
        v: torch.Tensor,  # [rows, H, D]
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See Kernels.write_kv."""
        check_new_rows(k, v, arena, layout)
        self._write(k, v, arena, layout, plan, layer)

    def write_latents(
        self,
        latents: torch.Tensor,  # [rows, R]
        rope_keys: torch.Tensor,  # [rows, E]
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See Kernels.write_latents."""
        check_latents(latents, rope_keys, arena, layout)
        self._write(latents[:, None], rope_keys[:, None], arena, layout, plan, layer)

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        check_layer(layer, layout)
        where = self._places.get(
            plan,
            (layout, len(k), arena.device, arena.numel()),
            lambda plan: _device_places(plan, len(k), arena, layout),
        )
        n = where.shape[1]
        if n == 0:
            return
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        write_kernel[(triton.cdiv(n, WRITE_TOKENS), layout.num_kv_heads, 2)](
            k,
            v,
            *_typed(arena, layout),
            where,
            n,
            layer * layout.records[layout.write_format].nbytes,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            _norm(layout),
            **_write_constants(layout),
            num_warps=4,
        )

    def convert_pages(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        sources: IntArray,
        source_format: Format,
        targets: IntArray,
        target_format: Format,
    ) -> None:
        """See Kernels.convert_pages: one launch for all layers, K and V."""
        check_conversion(arena, layout, sources, source_format, targets, target_format)
        if len(sources) == 0:
            return
        constants = _convert_constants(layout, source_format, target_format)
        steps = layout.page_tokens // constants["K_ROWS"].TOKENS
        pages = torch.from_numpy(np.stack([sources, targets]).astype(np.int32)).to(arena.device)
        convert_kernel[(len(sources), layout.num_layers, 2 * steps * layout.num_kv_heads)](
            *_typed(arena, layout),
            pages,
            len(sources),
            _norm(layout),
            **constants,
            num_warps=_convert_warps(constants),
        )


def _device_places(plan: StepPlan, rows: int, arena: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """int32 [3, n]: row, frame, slot of each new token. In a fixed shape n is its rows: the first token is written again."""
    check_plan(plan, rows, arena, layout, writes=True)
    where = np.stack(places(plan, layout.page_tokens)).astype(np.int32)
    if plan.shape is not None:
        where = np.concatenate([where, np.repeat(where[:, :1], plan.shape.rows - where.shape[1], 1)], 1)
    return torch.from_numpy(where).to(arena.device)


def _overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _typed(arena: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = torch.uint32 if layout.dtype.itemsize == 4 else torch.uint16
    return arena, arena.view(torch.float16), arena.view(raw)


def _rows(layout: KVLayout, dim: int, tokens: int) -> Rows:
    block = dim & -dim  # of reference.hadamard
    return Rows(
        D=dim,
        BLOCK=triton.next_power_of_2(dim // 2),
        P=layout.page_tokens,
        TOKENS=tokens,
        UNIT=block // 2,
        STEPS=(block // 2).bit_length() - 1,
        BITS=8 * layout.dtype.itemsize,
        IS_BF16=layout.dtype is torch.bfloat16,
    )


def _norm(layout: KVLayout) -> float:
    return float((layout.head_dim & -layout.head_dim) ** -0.5)


def _codes(layout: KVLayout, format: Format) -> tuple[RowCode, RowCode]:
    """Row codes of a record's two parts; a rope key is raw whatever its latent is."""
    k, v = PART_CODES[format]
    return k, RowCode.RAW if layout.rope_dim else v


def _write_constants(layout: KVLayout) -> dict[str, Any]:
    record = layout.records[layout.write_format]
    k, v = _codes(layout, layout.write_format)
    return {
        "FRAME_BYTES": layout.unit_bytes,
        "O_V": record.v,
        "O_KS": record.k_scales,
        "O_VS": record.v_scales,
        "K_CODE": int(k),
        "V_CODE": int(v),
        "K_ROWS": _rows(layout, layout.head_dim, WRITE_TOKENS),
        "V_ROWS": _rows(layout, layout.rope_dim or layout.head_dim, WRITE_TOKENS),
    }


def _convert_constants(layout: KVLayout, source: Format, target: Format) -> dict[str, Any]:
    k_source, v_source = _codes(layout, source)
    k_target, v_target = _codes(layout, target)
    whole = k_target is RowCode.CHANNELS
    tokens = layout.page_tokens if whole else min(layout.page_tokens, CONVERT_TOKENS)
    return {
        "FRAME_BYTES": layout.unit_bytes,
        "SOURCE": layout.records[source],
        "TARGET": layout.records[target],
        "K_SOURCE": int(k_source),
        "K_TARGET": int(k_target),
        "V_SOURCE": int(v_source),
        "V_TARGET": int(v_target),
        "K_ROWS": _rows(layout, layout.head_dim, tokens),
        "V_ROWS": _rows(layout, layout.rope_dim or layout.head_dim, tokens),
    }


def _convert_warps(constants: dict[str, Any]) -> int:
    """So many that a thread holds at most 64 numbers."""
    rows: Rows = constants["K_ROWS"]
    return max(4, min(16, 2 * rows.TOKENS * rows.BLOCK // (64 * 32)))


def aot_variants(target: Target) -> list[AotVariant]:
    """Compiled forms for the ahead-of-time gate; the same for every target."""
    arena = {"bytes_ptr": "*u8:16", "halves_ptr": "*fp16:16", "raw_ptr": "*u16:16"}
    write = arena | {
        "k_ptr": "*bf16:16",
        "v_ptr": "*bf16:16",
        "places_ptr": "*i32:16",
        "n": "i32",
        "norm": "fp32",
    }
    write |= {"layer_bytes": "i64:16", **dict.fromkeys(("k_row", "k_head", "v_row", "v_head"), "i32:16")}
    convert = arena | {"pages_ptr": "*i32:16", "pages": "i32", "norm": "fp32"}
    found = []
    for format in (Format.RAW, Format.FP8, Format.INT8, Format.K8V4, Format.INT4):
        constants = _write_constants(gate_layout(format))
        found.append(
            make_variant(f"write_{format.name.lower()}", write_kernel, write, constants, {"num_warps": 4})
        )
    for format in (Format.RAW, Format.FP8):
        constants = _write_constants(gate_layout(format, latent=True))
        name = f"write_latents_{format.name.lower()}"
        found.append(make_variant(name, write_kernel, write, constants, {"num_warps": 4}))
    for source, to in (
        (Format.FP8, Format.INT4C),
        (Format.INT8, Format.INT4C),
        (Format.RAW, Format.FP8),
        (Format.RAW, Format.INT4),
        (Format.INT4C, Format.RAW),
    ):
        constants = _convert_constants(gate_layout(source), source, to)
        name = f"convert_{source.name.lower()}_{to.name.lower()}"
        options = {"num_warps": _convert_warps(constants)}
        found.append(make_variant(name, convert_kernel, convert, constants, options))
    return found


def gate_layout(
    write_format: Format,
    latent: bool = False,
    *,
    head_dim: int = 128,
    page_tokens: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> KVLayout:
    """Llama-3-8B's pages in every format, or DeepSeek-V3's: what the gate compiles kernels for."""
    size = dtype.itemsize
    heads, dim, rope, tokens = (1, 512, 64, page_tokens) if latent else (8, head_dim, 0, page_tokens)
    row_bytes = {
        RowCode.RAW: (size * dim, 0),
        RowCode.FP8: (dim, 2),
        RowCode.INT8: (dim, 2),
        RowCode.NIBBLES: (dim // 2, 4),
        RowCode.ROTATED: (dim // 2, 4),
        RowCode.CHANNELS: (dim // 2, 4 * dim // tokens),
    }
    records = {}
    for format in (Format.RAW, Format.FP8) if latent else Format:
        (k, ks), (v, vs) = (row_bytes[code] for code in PART_CODES[format])
        if latent:
            v, vs = size * rope, 0
        ends = np.cumsum([heads * tokens * n for n in (k, v, ks, vs)])
        records[format] = Record(int(ends[0]), int(ends[1]), int(ends[2]), -(-int(ends[3]) // 256) * 256)
    return KVLayout(
        num_layers=32,
        num_kv_heads=heads,
        head_dim=dim,
        page_tokens=tokens,
        dtype=dtype,
        unit_bytes=1024,
        records=records,
        write_format=write_format,
        rope_dim=rope,
    )
