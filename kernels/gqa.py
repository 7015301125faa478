"""Attention over paged keys and values with grouped heads (MHA, GQA, MQA), pages of every format. Triton.

A program works for one KV head and all query heads of its group. Decode, of sequences of one row, takes work items
(items.py), one launch per page format, and merges partial results by their logarithmic sums (FlashDecoding); an item that
is all of its row writes it directly. Prefill takes blocks of rows (blocks.py) through all their keys of one format, and
with the next format goes on from the (out, lse) that is there. Softmax runs online, in base 2 (FlashAttention-2, arXiv
2307.08691).

Codes are multiplied as float16 numbers with factors left out (packed.py): scales and factors go into scores and weights,
where they cost an operation per token and not per number. Per-channel scales of INT4C go into the queries in decode, and
zeros into one more product: q . (code * scale + zero) = (q * scale) . code + q . zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvtier.kernels.blocks import BLOCK_FIELDS, Cutting, PrefillLaunch, prefill_work
from kvtier.kernels.codes import E4M3_BITS_SCALE
from kvtier.kernels.combine import LN2, LOG2E, combine, with_sink_logit
from kvtier.kernels.items import (
    ITEM_FIELDS,
    WorkItems,
    balanced_split,
    most_items,
    overwrite_items,
    work_items,
)
from kvtier.kernels.layout import (
    Format,
    KVLayout,
    StepPlan,
    check_attention,
    check_layer,
    check_plan,
)
from kvtier.kernels.packed import (
    BYTE_UNIT,
    HIGH_UNIT,
    LOW_UNIT,
    fp16_of_byte,
    fp16_of_fp8,
    fp16_of_nibbles,
    fp16_of_two_codes,
    fp16_of_two_packed,
)
from kvtier.kernels.plans import PerPlan
from kvtier.kernels.reference import hadamard
from kvtier.kernels.variants import MAX_STACK_BYTES, AotVariant, Target, make_variant
from kvtier.kernels.write import gate_layout

ITEM = tl.constexpr(ITEM_FIELDS)
BLOCK_ITEM = tl.constexpr(BLOCK_FIELDS)

RAW = tl.constexpr(int(Format.RAW))
FP8 = tl.constexpr(int(Format.FP8))
INT8 = tl.constexpr(int(Format.INT8))
K8V4 = tl.constexpr(int(Format.K8V4))
INT4 = tl.constexpr(int(Format.INT4))
INT4C = tl.constexpr(int(Format.INT4C))

# What V scales are multiplied by before they meet the softmax's weights in float16, so that small weights of small
# values don't vanish there. A scale that would overflow (values above 1e5, beyond float16 themselves) is held.
LIFT_FP8 = tl.constexpr(256.0)
LIFT_INT8 = tl.constexpr(64.0)
LIFT_NIBBLES = tl.constexpr(8.0)
FP16_MAX = tl.constexpr(65504.0)

# Accumulators hold the result in these units.
ACC_FP8 = tl.constexpr(1.0 / LIFT_FP8.value)
ACC_INT8 = tl.constexpr(1.0 / LIFT_INT8.value)
ACC_LOW = tl.constexpr(1.0 / (LOW_UNIT.value * LIFT_NIBBLES.value))
ACC_HIGH = tl.constexpr(1.0 / (HIGH_UNIT.value * LIFT_NIBBLES.value))


# ---- device: loads ----------------------------------------------------------------------------------------------


@triton.jit
def load_rows(at, ok, W: tl.constexpr, WP: tl.constexpr, MASKED: tl.constexpr):
    """[T, WP] from pointers [T] to rows of W; columns from W on are 0, and rows that are not `ok` where MASKED."""
    column = tl.arange(0, WP)
    pointers = at[:, None] + column[None, :]
    if MASKED:
        if W == WP:
            return tl.load(pointers, mask=ok[:, None], other=0)
        else:
            return tl.load(pointers, mask=ok[:, None] & (column < W)[None, :], other=0)
    else:
        if W == WP:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(column < W)[None, :], other=0)


@triton.jit
def load_vector(at, ok, MASKED: tl.constexpr):
    """[T] from pointers [T]; 0 where not `ok`, if MASKED."""
    if MASKED:
        return tl.load(at, mask=ok, other=0)
    else:
        return tl.load(at)


@triton.jit
def load_queries(
    at, ok, FMT: tl.constexpr, DOT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SCALES_K: tl.constexpr
):
    """Operands (q0, q1) and sums [M] of query rows: by halves where K is nibbles, as far as the format needs them.

    The second half carries 2^-4, the ratio of the nibbles' units. Both halves for INT4C carry 2^-2 more where they are
    to be multiplied by the channels' scales in float16, to centre its range; with SCALES_K (see scores_of) nothing.
    """
    HALF: tl.constexpr = D // 2
    HP: tl.constexpr = DP // 2
    if FMT == INT4:
        low = load_rows(at, ok, HALF, HP, True).to(DOT)
        high = load_rows(at + HALF, ok, HALF, HP, True).to(DOT)
        total = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
        return low, (high.to(tl.float32) * 0.0625).to(DOT), total
    elif FMT == INT4C and SCALES_K:
        return (
            load_rows(at, ok, HALF, HP, True).to(DOT),
            load_rows(at + HALF, ok, HALF, HP, True).to(DOT),
            0.0,
        )
    elif FMT == INT4C:
        low = load_rows(at, ok, HALF, HP, True).to(tl.float32) * 0.25
        high = load_rows(at + HALF, ok, HALF, HP, True).to(tl.float32) * 0.015625
        return low.to(DOT), high.to(DOT), 0.0
    else:
        q = load_rows(at, ok, D, DP, True).to(DOT)
        return q, 0.0, tl.sum(q.to(tl.float32), 1)


@triton.jit
def record_of(
    pages, n0, ok, unit_bytes, layer_offset, P: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Byte offsets of the records (one, or [TILE]) of tokens n0 to n0 + TILE of a list, and slots in them [TILE]."""
    n = tl.arange(0, TILE)
    if P >= TILE:
        frame = tl.load(pages + n0 // P)
        slot = n0 % P + n
    else:
        frame = load_vector(pages + (n0 + n) // P, ok, MASKED)
        slot = (n0 + n) % P
    return frame.to(tl.int64) * unit_bytes + layer_offset, slot


# ---- device: arithmetic -----------------------------------------------------------------------------------------


@triton.jit
def tanh(x):
    """A series near 0, where the quotient would cancel; to about 1e-7 absolutely and 5e-7 relatively."""
    square = x * x
    series = x * (
        1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    )
    return tl.where(tl.abs(x) < 0.3, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def scores_of(
    q0, q1, total, raw, u8, f16, record, row, head, ok, scale,
    FMT: tl.constexpr, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, KS: tl.constexpr, SCALES_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """scale * q . k [M, T] of the tokens in rows `row` [T] of the heads' rows in their records.

    Channels' scales go into the keys with SCALES_K, which is cheaper for many queries, and into the queries without.
    """
    HALF: tl.constexpr = D // 2
    HP: tl.constexpr = DP // 2
    scales = f16 + (record >> 1) + KS // 2
    if FMT == RAW:
        SHIFT: tl.constexpr = 2 if raw.dtype.element_ty.primitive_bitwidth == 32 else 1
        k = load_rows(raw + (record >> SHIFT) + row * D, ok, D, DP, MASKED).to(DOT)
        return tl.dot(q0, tl.trans(k), input_precision="ieee") * scale
    elif FMT == FP8:
        k = fp16_of_fp8(load_rows(u8 + record + row * D, ok, D, DP, MASKED), NATIVE_FP8, PTX).to(DOT)
        unit = scale if NATIVE_FP8 else scale * E4M3_BITS_SCALE
        ks = load_vector(scales + row, ok, MASKED).to(tl.float32) * unit
        return tl.dot(q0, tl.trans(k), input_precision="ieee") * ks[None, :]
    elif FMT == INT8 or FMT == K8V4:
        k = fp16_of_byte(load_rows(u8 + record + row * D, ok, D, DP, MASKED), PTX).to(DOT)
        ks = load_vector(scales + row, ok, MASKED).to(tl.float32) * (scale * (1.0 / BYTE_UNIT))
        biased = tl.dot(q0, tl.trans(k), input_precision="ieee")
        return (biased - (total * (128.0 * BYTE_UNIT))[:, None]) * ks[None, :]
    else:
        packed = load_rows(u8 + record + row * HALF, ok, HALF, HP, MASKED)
        low, high = fp16_of_nibbles(packed, PTX)
        low = low.to(DOT)
        high = high.to(DOT)
        if FMT == INT4:
            ks = load_vector(scales + row * 2, ok, MASKED).to(tl.float32) * (scale * (1.0 / LOW_UNIT))
            kz = load_vector(scales + row * 2 + 1, ok, MASKED).to(tl.float32)
            s = tl.dot(q0, tl.trans(low), input_precision="ieee")
            s = tl.dot(q1, tl.trans(high), s, input_precision="ieee")
            return s * ks[None, :] + (total * scale)[:, None] * kz[None, :]
        else:
            column = tl.arange(0, HP)
            channel = scales + head * (2 * D) + column
            here = column < HALF
            s0 = load_vector(channel, here, HALF != HP).to(DOT)
            s1 = load_vector(channel + HALF, here, HALF != HP).to(DOT)
            z0 = load_vector(channel + D, here, HALF != HP).to(DOT)
            z1 = load_vector(channel + D + HALF, here, HALF != HP).to(DOT)
            if SCALES_K:
                # 2^24 and 2^20 in two steps: float16 has neither.
                k0 = (low * 4096.0) * 4096.0 * s0[None, :] + z0[None, :]
                k1 = (high * 1024.0) * 1024.0 * s1[None, :] + z1[None, :]
                s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
                return tl.dot(q1, tl.trans(k1), s, input_precision="ieee") * scale
            else:
                # The zeros as a matrix of equal columns: cheaper than sums over the operand's registers, and exact.
                zero = tl.dot(q0, tl.broadcast_to(z0[:, None], (HP, 8)), input_precision="ieee")
                zero += tl.dot(q1, tl.broadcast_to(z1[:, None], (HP, 8)), input_precision="ieee") * 16.0
                s = tl.dot(q0 * s0[None, :], tl.trans(low), input_precision="ieee")
                s = tl.dot(q1 * s1[None, :], tl.trans(high), s, input_precision="ieee")
                return s * (scale * (4.0 / LOW_UNIT)) + (tl.max(zero, 1) * (scale * 4.0))[:, None]


@triton.jit
def attend(
    q0, q1, total, peak, weight, az, a0, a1, a2, a3,
    raw, u8, f16, record, row, head, ok, seen, scale, cap,
    FMT: tl.constexpr, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
    CAPPED: tl.constexpr, SCALES_K: tl.constexpr, MASKED: tl.constexpr, HAS_BLIND_ROWS: tl.constexpr,
):  # fmt: skip
    """The state after a tile more: peak and weight [M], sum of weighted zeros [M], accumulators [M, ...].

    MASKED: tokens that are not `ok` [T] are not read, and scores not `seen` don't count; rows that see nothing at all
    are allowed where HAS_BLIND_ROWS.
    """
    HALF: tl.constexpr = D // 2
    HP: tl.constexpr = DP // 2
    s = scores_of(
        q0, q1, total, raw, u8, f16, record, row, head, ok, scale,
        FMT, NATIVE_FP8, PTX, DOT, D, DP, KS, SCALES_K, MASKED,
    )  # fmt: skip
    if CAPPED:
        s = tanh(s) * cap
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(peak, tl.max(s, 1))
    if HAS_BLIND_ROWS:
        base = tl.where(top == float("-inf"), 0.0, top)
    else:
        base = top
    shrink = tl.exp2(peak - base)
    p = tl.exp2(s - base[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    if FMT == RAW:
        SHIFT: tl.constexpr = 2 if raw.dtype.element_ty.primitive_bitwidth == 32 else 1
        at = raw + (record >> SHIFT) + V // (1 << SHIFT) + row * D
        v = load_rows(at, ok, D, DP, MASKED).to(DOT)
        a0 = tl.dot(p.to(DOT), v, a0 * shrink[:, None], input_precision="ieee")
    else:
        at = f16 + (record >> 1)
        if FMT == FP8 or FMT == INT8:
            two = load_rows(at + V // 2 + row * HALF, ok, HALF, HP, MASKED).to(tl.uint16, bitcast=True)
            v0, v1 = fp16_of_two_codes(two, FMT == FP8, NATIVE_FP8, PTX)
            vs = load_vector(at + VS // 2 + row, ok, MASKED).to(tl.float32)
            vs = vs * (LIFT_FP8 if FMT == FP8 else LIFT_INT8)
        else:
            QUARTER: tl.constexpr = HALF // 2
            two = load_rows(at + V // 2 + row * QUARTER, ok, QUARTER, HP // 2, MASKED)
            v0, v1, v2, v3 = fp16_of_two_packed(two.to(tl.uint16, bitcast=True), PTX)
            vs = load_vector(at + VS // 2 + row * 2, ok, MASKED).to(tl.float32) * LIFT_NIBBLES
            vz = load_vector(at + VS // 2 + row * 2 + 1, ok, MASKED).to(tl.float32)
            az = az * shrink + tl.sum(p * vz[None, :], 1)
        p = (p * tl.minimum(vs, FP16_MAX)[None, :]).to(DOT)
        a0 = tl.dot(p, v0.to(DOT), a0 * shrink[:, None], input_precision="ieee")
        a1 = tl.dot(p, v1.to(DOT), a1 * shrink[:, None], input_precision="ieee")
        if FMT > INT8:
            a2 = tl.dot(p, v2.to(DOT), a2 * shrink[:, None], input_precision="ieee")
            a3 = tl.dot(p, v3.to(DOT), a3 * shrink[:, None], input_precision="ieee")
    return top, weight, az, a0, a1, a2, a3


# ---- device: accumulators ---------------------------------------------------------------------------------------


@triton.jit
def column_of(FMT: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Columns of the result that an accumulator's columns are, and which of them there are."""
    if FMT == RAW:
        j = tl.arange(0, DP)
        return j, j < D
    elif FMT <= INT8:
        j = tl.arange(0, DP // 2)
        return 2 * j + PART, j < D // 2
    else:
        j = tl.arange(0, DP // 4)
        return 2 * j + PART % 2 + (PART // 2) * (D // 2), j < D // 4


@triton.jit
def unit_of(FMT: tl.constexpr, PART: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """What an accumulator's number 1 is of the result."""
    if FMT == RAW:
        return 1.0
    elif FMT == FP8:
        return ACC_FP8 if NATIVE_FP8 else ACC_FP8 * E4M3_BITS_SCALE
    elif FMT == INT8:
        return ACC_INT8
    else:
        return ACC_LOW if PART < 2 else ACC_HIGH


@triton.jit
def begin_part(
    at, ok, FMT: tl.constexpr, PART: tl.constexpr, NATIVE_FP8: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, RESUME: tl.constexpr,
):  # fmt: skip
    """An accumulator, zeros or (RESUME) from the normalized result at pointers [M] where `ok`; 0.0 if the format has none."""
    if PART == 0 or (PART == 1 and FMT != RAW) or FMT > INT8:
        column, here = column_of(FMT, PART, D, DP)
        if RESUME:
            mask = ok[:, None] & here[None, :]
            result = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
            return result * (1.0 / unit_of(FMT, PART, NATIVE_FP8))
        else:
            return tl.zeros([M, column.shape[0]], tl.float32)
    else:
        return 0.0


@triton.jit
def end_part(
    at, ok, acc, az, inverse, FMT: tl.constexpr, PART: tl.constexpr, NATIVE_FP8: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store an accumulator's columns of the result at pointers [M] where `ok`; nothing if the format has no such part."""
    if PART == 0 or (PART == 1 and FMT != RAW) or FMT > INT8:
        column, here = column_of(FMT, PART, D, DP)
        result = acc * unit_of(FMT, PART, NATIVE_FP8)
        if FMT > INT8:
            result += az[:, None]
        result = (result * inverse[:, None]).to(at.dtype.element_ty)
        tl.store(at[:, None] + column[None, :], result, mask=ok[:, None] & here[None, :])


@triton.jit
def end(
    at, ok, az, a0, a1, a2, a3, inverse, FMT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store the result, columns times `inverse` [M], at pointers [M] where `ok`."""
    end_part(at, ok, a0, az, inverse, FMT, 0, NATIVE_FP8, D, DP)
    end_part(at, ok, a1, az, inverse, FMT, 1, NATIVE_FP8, D, DP)
    end_part(at, ok, a2, az, inverse, FMT, 2, NATIVE_FP8, D, DP)
    end_part(at, ok, a3, az, inverse, FMT, 3, NATIVE_FP8, D, DP)


# ---- kernels ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["items_ptr", "pages_ptr"])
def decode_kernel(
    q_ptr,  # [rows, H * G, D]
    q_sinks_ptr,  # [rows, H * G, D]
    raw_ptr, u8_ptr, f16_ptr,  # the arena
    items_ptr,  # i32 [items, ITEM_FIELDS], see items.py
    pages_ptr,  # i32
    partial_ptr,  # f32 [slots, H * G, D]
    lse2_ptr,  # f32 [slots, H * G]
    out_ptr,  # [rows, H * G, D]
    lse_ptr,  # f32 [rows, H * G]
    logits_ptr,  # [H * G]
    unit_bytes: tl.int64,
    layer_offset: tl.int64,  # bytes
    scale,  # of scores in base 2; CAPPED: over the cap
    cap,  # in base 2
    FMT: tl.constexpr, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
    CAPPED: tl.constexpr, HAS_LOGITS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one work item and one KV head. Whole tiles run without masks; at most two at the edges have them."""
    item = items_ptr + tl.program_id(0) * ITEM
    head = tl.program_id(1)
    pages = pages_ptr + tl.load(item + 1)
    first = tl.load(item + 2)
    last = tl.load(item + 3)
    slot = tl.load(item + 4)
    if tl.load(item + 5) != 0:
        q_ptr = q_sinks_ptr
    m = tl.arange(0, M)
    ok = m < G
    of = tl.load(item).to(tl.int64) * (H * G) + head * G + m
    q0, q1, total = load_queries(q_ptr + of * D, ok, FMT, DOT, D, DP, False)
    peak = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    az = weight
    a0 = begin_part(of, ok, FMT, 0, NATIVE_FP8, M, D, DP, False)
    a1 = begin_part(of, ok, FMT, 1, NATIVE_FP8, M, D, DP, False)
    a2 = begin_part(of, ok, FMT, 2, NATIVE_FP8, M, D, DP, False)
    a3 = begin_part(of, ok, FMT, 3, NATIVE_FP8, M, D, DP, False)
    n = tl.arange(0, TILE)
    up = (first + TILE - 1) // TILE * TILE
    down = last // TILE * TILE
    for n0 in tl.range(up, down, TILE):
        record, row = record_of(pages, n0, ok, unit_bytes, layer_offset, P, TILE, False)
        peak, weight, az, a0, a1, a2, a3 = attend(
            q0, q1, total, peak, weight, az, a0, a1, a2, a3,
            raw_ptr, u8_ptr, f16_ptr, record, head * P + row, head, ok, ok, scale, cap,
            FMT, NATIVE_FP8, PTX, DOT, D, DP, V, KS, VS, CAPPED, False, False, False,
        )  # fmt: skip
    for edge in tl.range(0, 2, num_stages=1):
        low = first if edge == 0 else tl.maximum(down, up)
        high = tl.minimum(up, last) if edge == 0 else last
        if low < high:
            n0 = low // TILE * TILE
            here = (n0 + n >= low) & (n0 + n < high)
            record, row = record_of(pages, n0, here, unit_bytes, layer_offset, P, TILE, True)
            peak, weight, az, a0, a1, a2, a3 = attend(
                q0, q1, total, peak, weight, az, a0, a1, a2, a3,
                raw_ptr, u8_ptr, f16_ptr, record, head * P + row, head, here, here[None, :], scale, cap,
                FMT, NATIVE_FP8, PTX, DOT, D, DP, V, KS, VS, CAPPED, False, True, False,
            )  # fmt: skip
    if slot < 0:
        shrink = 1.0
        if HAS_LOGITS:
            logit = tl.load(logits_ptr + head * G + m, mask=ok, other=0.0)
            peak, weight, shrink = with_sink_logit(peak, weight, logit)
        end(out_ptr + of * D, ok, az, a0, a1, a2, a3, shrink / weight, FMT, NATIVE_FP8, D, DP)
        tl.store(lse_ptr + of, (peak + tl.log2(weight)) * LN2, mask=ok)
    else:
        to = slot.to(tl.int64) * (H * G) + head * G + m
        end(partial_ptr + to * D, ok, az, a0, a1, a2, a3, 1.0 / weight, FMT, NATIVE_FP8, D, DP)
        tl.store(lse2_ptr + to, peak + tl.log2(weight), mask=ok)


@triton.jit(do_not_specialize=["items_ptr", "pages_ptr", "numbers_ptr"])
def prefill_kernel(
    q_ptr,  # [rows, H * G, D]
    raw_ptr, u8_ptr, f16_ptr,  # the arena
    items_ptr,  # i32 [items, BLOCK_FIELDS], see PrefillWork
    pages_ptr,  # i32
    numbers_ptr,  # i32
    scratch_ptr,  # f32 [scratch rows, H * G, D], between launches
    lse2_ptr,  # f32 [scratch rows, H * G]
    out_ptr,  # [rows, H * G, D]
    lse_ptr,  # f32 [rows, H * G]
    logits_ptr,  # [H * G]
    unit_bytes: tl.int64,
    layer_offset: tl.int64,
    scale,
    cap,
    FMT: tl.constexpr, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
    CAPPED: tl.constexpr, HAS_LOGITS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one block of rows, the group's heads of each row side by side, and one KV head."""
    item = items_ptr + tl.program_id(0) * BLOCK_ITEM
    head = tl.program_id(1)
    rows = tl.load(item + 1)
    list_at = tl.load(item + 3)
    first = tl.load(item + 4)
    open_first = tl.load(item + 5)
    open_last = tl.load(item + 6)
    last = tl.load(item + 7)
    window = tl.load(item + 8)
    low = tl.load(item + 9)
    high = tl.load(item + 10)
    flags = tl.load(item + 12)
    pages = pages_ptr + list_at
    numbers = numbers_ptr + list_at
    m = tl.arange(0, M)
    r = m // G
    ok = (r < rows) & (r < M // G)
    of = (tl.load(item) + r).to(tl.int64) * (H * G) + head * G + m % G
    to = (tl.load(item + 11) + r).to(tl.int64) * (H * G) + head * G + m % G
    position = tl.load(item + 2) + r
    q0, q1, total = load_queries(q_ptr + of * D, ok, FMT, DOT, D, DP, True)
    az = tl.zeros([M], tl.float32)
    resumed = ok & ((flags & 1) == 0)
    peak = tl.load(lse2_ptr + to, mask=resumed, other=float("-inf"))
    weight = tl.where(peak == float("-inf"), 0.0, 1.0)
    a0 = begin_part(scratch_ptr + to * D, resumed, FMT, 0, NATIVE_FP8, M, D, DP, True)
    a1 = begin_part(scratch_ptr + to * D, resumed, FMT, 1, NATIVE_FP8, M, D, DP, True)
    a2 = begin_part(scratch_ptr + to * D, resumed, FMT, 2, NATIVE_FP8, M, D, DP, True)
    a3 = begin_part(scratch_ptr + to * D, resumed, FMT, 3, NATIVE_FP8, M, D, DP, True)
    for n0 in tl.range(open_first, open_last, TILE):
        record, row = record_of(pages, n0, ok, unit_bytes, layer_offset, P, TILE, False)
        peak, weight, az, a0, a1, a2, a3 = attend(
            q0, q1, total, peak, weight, az, a0, a1, a2, a3,
            raw_ptr, u8_ptr, f16_ptr, record, head * P + row, head, ok, ok, scale, cap,
            FMT, NATIVE_FP8, PTX, DOT, D, DP, V, KS, VS, CAPPED, True, False, False,
        )  # fmt: skip
    for at in tl.range(first, last - (open_last - open_first), TILE):
        n0 = at + tl.where(at < open_first, 0, open_last - open_first)
        record, row = record_of(pages, n0, ok, unit_bytes, layer_offset, P, TILE, False)
        if P >= TILE:
            key = tl.load(numbers + n0 // P) * P + row
        else:
            key = tl.load(numbers + (n0 + tl.arange(0, TILE)) // P) * P + row
        here = (key >= low) & (key < high)
        seen = here[None, :] & (key[None, :] <= position[:, None])
        seen = seen & (key[None, :] > (position - window)[:, None])
        peak, weight, az, a0, a1, a2, a3 = attend(
            q0, q1, total, peak, weight, az, a0, a1, a2, a3,
            raw_ptr, u8_ptr, f16_ptr, record, head * P + row, head, here, seen, scale, cap,
            FMT, NATIVE_FP8, PTX, DOT, D, DP, V, KS, VS, CAPPED, True, True, True,
        )  # fmt: skip
    if flags >= 2:
        shrink = 1.0
        if HAS_LOGITS:
            logit = tl.load(logits_ptr + head * G + m % G, mask=ok, other=0.0)
            peak, weight, shrink = with_sink_logit(peak, weight, logit)
        safe = tl.where(ok, weight, 1.0)
        end(out_ptr + of * D, ok, az, a0, a1, a2, a3, shrink / safe, FMT, NATIVE_FP8, D, DP)
        tl.store(lse_ptr + of, (peak + tl.log2(safe)) * LN2, mask=ok)
    else:
        safe = tl.where(weight == 0.0, 1.0, weight)
        end(scratch_ptr + to * D, ok, az, a0, a1, a2, a3, 1.0 / safe, FMT, NATIVE_FP8, D, DP)
        tl.store(lse2_ptr + to, tl.where(weight == 0.0, float("-inf"), peak + tl.log2(safe)), mask=ok)


# ---- launching --------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How a kernel is compiled."""

    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """What differs by target. Pairs are for raw pages and for codes. aot.py says what it gives."""

    native_fp8: bool
    ptx: bool
    decode: tuple[Form, Form]
    prefill: tuple[Form, Form]
    prefill_rows: int  # of a program, times heads of the group
    # float32 has no matrix instructions here, and twice the bytes: smaller tiles keep it in registers and shared memory.
    float32_rows: int = 16
    float32_tile: int = 16
    float32_warps: int = 8
    wide_code_warps: int = 1  # at least, of codes of heads wider than 128

    def block(self, layout: KVLayout, group: int) -> int:
        """Rows times heads of a prefill program: the wider a head's accumulators, the fewer."""
        rows = self.prefill_rows
        if layout.dtype is torch.float32:
            rows = self.float32_rows // (1 if layout.head_dim <= 128 else 2)
        elif layout.head_dim > 128:
            rows = max(16, rows // (2 if layout.head_dim <= 256 else 4))
        return max(rows, int(triton.next_power_of_2(group)))


TUNING: dict[Target, Tuning] = {
    "sm_80": Tuning(False, True, (Form(4, 3), Form(2, 3)), (Form(4, 2), Form(4, 2)), 64),
    "sm_86": Tuning(False, True, (Form(4, 3), Form(2, 3)), (Form(4, 2), Form(4, 2)), 64),
    "sm_89": Tuning(True, True, (Form(4, 3), Form(2, 3)), (Form(4, 2), Form(4, 2)), 64),
    "sm_90": Tuning(True, True, (Form(4, 3), Form(2, 3)), (Form(8, 3), Form(8, 2)), 128),
    "sm_100": Tuning(True, True, (Form(4, 3), Form(2, 3)), (Form(8, 3), Form(8, 2)), 64),
    "sm_120": Tuning(True, True, (Form(4, 3), Form(2, 3)), (Form(4, 2), Form(4, 2)), 64, wide_code_warps=4),
    "gfx942": Tuning(False, False, (Form(4, 1), Form(4, 1)), (Form(4, 1), Form(4, 1)), 64, float32_warps=4),
}
# In the interpreter blocks are small, so that tests have several.
INTERPRETED = Tuning(True, False, (Form(1, 1), Form(1, 1)), (Form(1, 1), Form(1, 1)), 32, 32, 64)

MIN_SPLIT_TOKENS = 256  # a program with less work spends its time on starting
MIN_PAGE_TOKENS = 16
# Matrix instructions take 16 numbers of a row at least. Codes come by halves.
MIN_RAW_DIM, MIN_CODED_DIM = 16, 32


def tile_tokens(format: Format, layout: KVLayout, tuning: Tuning) -> int:
    """Tokens that a program takes at a time; those of one page where its channels have scales."""
    tile = 64 if layout.head_dim <= 128 else 32
    if layout.dtype is torch.float32:
        tile = min(tile, tuning.float32_tile)
    return min(tile, layout.page_tokens) if format is Format.INT4C else tile


def decode_rows(group: int) -> int:
    """Rows of a decode program's matrices: the group's heads, and at least what matrix instructions take."""
    return max(16, int(triton.next_power_of_2(group)))


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's work on the device, shared by its layers."""

    decode: WorkItems | None
    prefill: list[tuple[PrefillLaunch, torch.Tensor]]
    prefill_pages: torch.Tensor
    prefill_numbers: torch.Tensor
    num_scratch_rows: int


class PagedAttention:
    """Attention over pages of keys and values. Keeps the work of the last plans, on the device.

    `split_tokens` above 0 fixes where a row's keys are split and in which order they are summed, and takes each row by
    itself, so that a row's result depends on no other row, in decode and in any chunk of prefill alike; chunks then read
    their keys once per row. 0 splits so that the device is filled.
    """

    def __init__(
        self,
        target: Target,
        programs: int,
        split_tokens: int = 0,
        *,
        tuning: Tuning | None = None,
        dot: torch.dtype | None = None,
    ) -> None:
        """`programs`: so many fill the device. For tests, a tuning other than the target's, and operands of another dtype
        than the layout's.
        """
        self._target = target
        self._tuning = tuning
        self._programs = programs
        self._split_tokens = split_tokens
        self._dot = dot
        self._work: PerPlan[_Work] = PerPlan(_overwrite)
        self.tables: tuple[PerPlan[_Work], ...] = (self._work,)

    def paged_attention(
        self,
        q: torch.Tensor,  # [rows, Hq, D]
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
        *,
        q_sinks: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels.paged_attention."""
        check_attention(q, arena, layout, q_sinks, sink_logits, softcap)
        check_layer(layer, layout)
        _check_page_tokens(layout)
        rows, heads, dim = q.shape
        tuning = self._tuning or (INTERPRETED if q.device.type == "cpu" else TUNING[self._target])
        work = self._work.get(
            plan,
            (layout, rows, heads, q.device, arena.numel()),
            lambda plan: self._cut(plan, arena, layout, tuning, rows, heads, q.device),
        )
        q = q.contiguous()
        q_sinks = q if q_sinks is None else q_sinks.contiguous()
        sink_logits = None if sink_logits is None else sink_logits.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        call = _Call(
            q, q_sinks, arena, layout, layer, scale, softcap, sink_logits, out, lse, tuning, self._dot
        )
        if work.decode is not None:
            slots = work.decode.num_slots
            partial = torch.empty(slots, heads, dim, dtype=torch.float32, device=q.device)
            lse2 = torch.empty(slots, heads, dtype=torch.float32, device=q.device)
            for format, items in work.decode.by_format:
                call.decode(format, items, work.decode.pages, partial, lse2)
            combine(partial, lse2, work.decode.indptr, out, lse, sink_logits, work.decode.rows)
        scratch = torch.empty(work.num_scratch_rows, heads, dim, dtype=torch.float32, device=q.device)
        lse2 = torch.empty(work.num_scratch_rows, heads, dtype=torch.float32, device=q.device)
        for launch, items in work.prefill:
            call.prefill(launch, items, work.prefill_pages, work.prefill_numbers, scratch, lse2)
        return out, lse

    def _cut(
        self,
        plan: StepPlan,
        arena: torch.Tensor,
        layout: KVLayout,
        tuning: Tuning,
        rows: int,
        heads: int,
        device: torch.device,
    ) -> _Work:
        check_plan(plan, rows, arena, layout)
        # With fixed splits every row goes by the decode kernel, so that its bits don't depend on its chunk either.
        long = (plan.lengths > 1) & (self._split_tokens == 0)
        elsewhere = np.zeros(rows, np.bool_)
        for start, length in zip(plan.starts[long].tolist(), plan.lengths[long].tolist(), strict=True):
            elsewhere[start : start + length] = True
        decode = None
        if not elsewhere.all():
            short = _those(plan, ~long)
            least = max(MIN_SPLIT_TOKENS, layout.page_tokens)
            wanted = max(1, self._programs // layout.num_kv_heads)
            decode = work_items(
                short,
                layout.page_tokens,
                self._split_tokens or balanced_split(short, wanted, least),
                rows,
                device,
                separate_sinks=True,
                written_elsewhere=elsewhere,
                most_items=most_items(wanted, plan.shape),
            )
        group = heads // layout.num_kv_heads
        cutting = Cutting(
            rows=tuning.block(layout, group) // group,
            page_tokens=layout.page_tokens,
            tile_tokens=lambda format: tile_tokens(format, layout, tuning),
        )
        blocks = prefill_work(plan, np.flatnonzero(long), cutting)
        tables = [blocks.pages, blocks.numbers, *(launch.items for launch in blocks.launches)]
        on_device = torch.from_numpy(np.concatenate([table.reshape(-1) for table in tables])).to(
            device, non_blocking=True
        )
        pages, numbers, *items = torch.split(on_device, [table.size for table in tables])
        return _Work(
            decode,
            [(launch, x.view(-1, BLOCK_FIELDS)) for launch, x in zip(blocks.launches, items, strict=True)],
            pages,
            numbers,
            blocks.num_scratch_rows,
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's attention: what all its launches share."""

    q: torch.Tensor
    q_sinks: torch.Tensor
    arena: torch.Tensor
    layout: KVLayout
    layer: int
    scale: float
    softcap: float
    sink_logits: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    tuning: Tuning
    dot: torch.dtype | None

    def decode(
        self,
        format: Format,
        items: torch.Tensor,
        pages: torch.Tensor,
        partial: torch.Tensor,
        lse2: torch.Tensor,
    ) -> None:
        """The items of one format."""
        q = _rotated(self.q, format)
        q_sinks = q if self.q_sinks is self.q else _rotated(self.q_sinks, format)
        decode_kernel[(len(items), self.layout.num_kv_heads)](
            q,
            q_sinks,
            *self._arena(),
            items,
            pages,
            partial,
            lse2,
            *self._results(),
            *self._numbers(format),
            **self._constants(format),
            M=decode_rows(self._group),
            **_options(self.tuning, self.tuning.decode, format, self.layout),
        )

    def prefill(
        self,
        launch: PrefillLaunch,
        items: torch.Tensor,
        pages: torch.Tensor,
        numbers: torch.Tensor,
        scratch: torch.Tensor,
        lse2: torch.Tensor,
    ) -> None:
        """One of the launches that go on from each other."""
        format = launch.format
        prefill_kernel[(len(items), self.layout.num_kv_heads)](
            _rotated(self.q_sinks if launch.is_sinks else self.q, format),
            *self._arena(),
            items,
            pages,
            numbers,
            scratch,
            lse2,
            *self._results(),
            *self._numbers(format),
            **self._constants(format),
            M=self.tuning.block(self.layout, self._group),
            **_options(self.tuning, self.tuning.prefill, format, self.layout),
        )

    @property
    def _group(self) -> int:
        return self.q.shape[1] // self.layout.num_kv_heads

    def _arena(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.arena.view(self.layout.dtype), self.arena, self.arena.view(torch.float16)

    def _results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.out, self.lse, self.lse if self.sink_logits is None else self.sink_logits

    def _numbers(self, format: Format) -> tuple[int, int, float, float]:
        offset = self.layer * self.layout.records[format].nbytes
        if self.softcap:
            return self.layout.unit_bytes, offset, self.scale / self.softcap, self.softcap * LOG2E.value
        return self.layout.unit_bytes, offset, self.scale * LOG2E.value, 0.0

    def _constants(self, format: Format) -> dict[str, Any]:
        dot = self.dot or _dot(format, self.layout.dtype, self.q.device)
        return kernel_constants(format, self.layout, self.tuning, dot, self._group) | {
            "CAPPED": self.softcap > 0,
            "HAS_LOGITS": self.sink_logits is not None,
        }


_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def kernel_constants(
    format: Format, layout: KVLayout, tuning: Tuning, dot: torch.dtype, group: int
) -> dict[str, Any]:
    """Constants of both kernels for pages of one format."""
    record = layout.records[format]
    return {
        "FMT": int(format),
        "NATIVE_FP8": tuning.native_fp8,
        "PTX": tuning.ptx,
        "DOT": _TRITON_TYPES[dot],
        "H": layout.num_kv_heads,
        "G": group,
        "D": layout.head_dim,
        "DP": max(
            MIN_RAW_DIM if format is Format.RAW else MIN_CODED_DIM, triton.next_power_of_2(layout.head_dim)
        ),
        "P": layout.page_tokens,
        "V": record.v,
        "KS": record.k_scales,
        "VS": record.v_scales,
        "TILE": tile_tokens(format, layout, tuning),
    }


def _dot(format: Format, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Type of dot operands. Codes are exact in float16; the interpreter can't do arithmetic in bfloat16."""
    return torch.float32 if device.type == "cpu" else _dot_on_gpu(format, dtype)


def _dot_on_gpu(format: Format, dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.float32:
        return torch.float32
    return dtype if format is Format.RAW else torch.float16


def _options(tuning: Tuning, forms: tuple[Form, Form], format: Format, layout: KVLayout) -> dict[str, int]:
    """Codes of wide heads leave no registers for a third stage; float32 numbers want many threads' registers, and one stage."""
    if layout.dtype is torch.float32:
        return {"num_warps": tuning.float32_warps, "num_stages": 1}
    warps, stages = forms[format is not Format.RAW]
    if layout.head_dim > 128 and format is not Format.RAW:
        warps, stages = max(warps, tuning.wide_code_warps), min(stages, 2)
    return {"num_warps": warps, "num_stages": stages}


@cache
def _rotation(dim: int, device: torch.device) -> torch.Tensor:
    return hadamard(dim).to(device)


def _rotated(q: torch.Tensor, format: Format) -> torch.Tensor:
    """The queries as pages of a format see them."""
    return q.float() @ _rotation(q.shape[-1], q.device) if format is Format.INT4 else q


def _overwrite(target: _Work, source: _Work) -> None:
    """Of decode steps in one fixed shape."""
    assert target.decode is not None and source.decode is not None and not source.prefill
    overwrite_items(target.decode, source.decode)


def _those(plan: StepPlan, which: npt.NDArray[np.bool_]) -> StepPlan:
    """A plan of some of the sequences."""
    parts = ("starts", "lengths", "contexts", "first_frames", "sink_pages", "first_pages", "windows", "sinks")
    return replace(plan, **{name: getattr(plan, name)[which] for name in parts})


def _check_page_tokens(layout: KVLayout) -> None:
    if layout.page_tokens < MIN_PAGE_TOKENS or layout.page_tokens & (layout.page_tokens - 1):
        raise ValueError(
            f"page_tokens must be a power of two from {MIN_PAGE_TOKENS} on a GPU, got {layout.page_tokens}"
        )


def aot_variants(target: Target) -> list[AotVariant]:
    """Compiled forms for the ahead-of-time gate: Llama-3-8B's heads over pages of 64 tokens, and some others."""
    shapes: list[tuple[Kind, Format, int, int]] = [("decode", format, 64, 128) for format in Format]
    few = (Format.RAW, Format.FP8, Format.INT4C)
    shapes += [("decode", format, 16, 128) for format in few]
    shapes += [("decode", format, 64, dim) for dim in (80, 256) for format in few]
    shapes += [("prefill", format, 64, 128) for format in Format]
    shapes += [("prefill", format, 64, 256) for format in (Format.RAW, Format.INT4C)]
    variants = [_variant(target, *shape, torch.bfloat16) for shape in shapes]
    # float32 models: their dot operands are float32 in every format, which takes the most shared memory.
    floats: list[tuple[Kind, Format, int, int]] = [(kind, Format.RAW, 16, 128) for kind in KINDS]
    floats += [("prefill", Format.RAW, 16, 256), ("decode", Format.FP8, 16, 128)]
    variants += [_variant(target, *shape, torch.float32) for shape in floats]
    # Tiny and wide heads, whose tiles are the smallest and the largest.
    variants += [
        _variant(target, kind, Format.RAW, 16, dim, torch.bfloat16) for kind in KINDS for dim in (8, 512)
    ]
    variants += [_variant(target, kind, Format.INT4, 16, 8, torch.bfloat16) for kind in KINDS]
    return variants


Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, Kind] = ("decode", "prefill")


def _variant(
    target: Target, kind: Kind, format: Format, page_tokens: int, dim: int, dtype: torch.dtype
) -> AotVariant:
    tuning = TUNING[target]
    layout = gate_layout(format, page_tokens=page_tokens, head_dim=dim, dtype=dtype)
    group = 4
    number = "*fp32:16" if dtype is torch.float32 else "*bf16:16"
    types = dict.fromkeys(("raw_ptr", "out_ptr"), number)
    types |= {"u8_ptr": "*u8:16", "f16_ptr": "*fp16:16", "items_ptr": "*i32", "pages_ptr": "*i32"}
    types |= dict.fromkeys(("lse2_ptr", "lse_ptr", "logits_ptr"), "*fp32:16")
    types |= {"unit_bytes": "i64:16", "layer_offset": "i64:16", "scale": "fp32", "cap": "fp32"}
    queries = "*fp32:16" if format is Format.INT4 else number
    if kind == "decode":
        types |= {"q_ptr": queries, "q_sinks_ptr": queries, "partial_ptr": "*fp32:16"}
        forms, rows = tuning.decode, decode_rows(group)
    else:
        types |= {"q_ptr": queries, "numbers_ptr": "*i32", "scratch_ptr": "*fp32:16"}
        forms, rows = tuning.prefill, tuning.block(layout, group)
    constants = kernel_constants(format, layout, tuning, _dot_on_gpu(format, dtype), group)
    is_float32 = dtype is torch.float32
    is_hot = kind == "decode" and not is_float32  # without matrix instructions no loop is measured
    return make_variant(
        f"{kind}_{format.name.lower()}_p{page_tokens}_d{dim}{'_fp32' if is_float32 else ''}",
        decode_kernel if kind == "decode" else prefill_kernel,
        types,
        constants | {"CAPPED": False, "HAS_LOGITS": False, "M": rows},
        _options(tuning, forms, format, layout),
        constants["TILE"] if is_hot else 0,
        max_stack_bytes=2 * MAX_STACK_BYTES if is_float32 and dim > 128 else MAX_STACK_BYTES,
    )
