"""Attention of models with latent pages (MLA) in Triton: absorbed for decode, dense over expanded keys for prefill.

A page holds one latent of R numbers and one rope key of E numbers for each token, for all heads. The absorbed form
(DeepSeek-V2, arXiv 2405.04434) never expands them: a query of R + E numbers scores latent and rope key, and the latent
is the value as well. Its work is compute-bound from some 64 heads on, and what limits a tile is the accumulator:
heads x R float32 numbers in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvtier.kernels.codes import (
    E4M3_BITS_SCALE,
    FP16_MAX,
    as_bits,
    fp16_of_code8,
    fp16_of_e4m3_bits,
    raw_bits,
)
from kvtier.kernels.combine import LN2, LOG2E, combine
from kvtier.kernels.items import (
    DIRECT,
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
    check_arena,
    check_dense,
    check_latent_queries,
    check_layer,
    check_plan,
    check_span,
)
from kvtier.kernels.plans import PerPlan
from kvtier.kernels.variants import AotVariant, Target, make_variant
from kvtier.kernels.write import gate_layout

FIELDS = tl.constexpr(ITEM_FIELDS)
WHOLE_ROW = tl.constexpr(DIRECT)


@dataclass(frozen=True, slots=True)
class Form:
    """How a target takes the absorbed kernel: a program has `heads` heads and takes `tokens` tokens at a time."""

    heads: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """What differs by target.

    The accumulator of 64 heads fills the registers of 8 warps: keys must come through descriptors, which take none. FP8
    latents become float16 in registers, which leaves room for 32 heads.
    """

    native_fp8: bool
    descriptors: Form | None  # raw pages, where they suit it
    wide: Form  # from its number of heads up
    narrow: Form
    dense: tuple[int, int, int, int]  # rows, keys, warps, stages of dense attention


TUNING: dict[Target, Tuning] = {
    "sm_80": Tuning(False, None, Form(32, 64, 8, 2), Form(16, 32, 4, 2), (128, 64, 8, 2)),
    "sm_86": Tuning(False, None, Form(32, 32, 8, 2), Form(16, 32, 4, 2), (128, 64, 8, 2)),
    "sm_89": Tuning(True, None, Form(32, 32, 8, 2), Form(16, 32, 4, 2), (128, 64, 8, 2)),
    "sm_90": Tuning(True, Form(64, 64, 8, 2), Form(32, 64, 8, 2), Form(16, 32, 4, 2), (128, 64, 8, 3)),
    "sm_100": Tuning(True, Form(64, 32, 8, 2), Form(32, 64, 8, 2), Form(16, 32, 4, 2), (128, 64, 8, 2)),
    "sm_120": Tuning(True, None, Form(32, 32, 8, 2), Form(16, 32, 4, 2), (128, 64, 8, 2)),
    "gfx942": Tuning(False, None, Form(32, 16, 4, 1), Form(16, 32, 4, 1), (64, 32, 4, 1)),
}
INTERPRETED = Tuning(True, Form(16, 32, 1, 1), Form(16, 32, 1, 1), Form(16, 32, 1, 1), (32, 32, 1, 1))
# float32 has no tensor cores, and takes twice the room.
FLOAT32 = Form(16, 16, 4, 1)
FLOAT32_DENSE = (32, 16, 8, 1)

LEAST_SPLIT_TOKENS = 256  # a program with less work spends its time on starting
INVARIANT_SPLIT_TOKENS = (
    1024  # long enough to pay for a program, short enough to spread one long row over a device
)
READ_TOKENS = 16


# ---- absorbed attention -----------------------------------------------------------------------------------------


@triton.jit
def load_latents(
    arena,  # (uint8, float16, raw numbers)
    record,  # i64: byte address of the record, one or one for each token
    tokens,  # [T]: places in the page
    seen,  # [T]
    IS_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DOT: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Latents [T, BLOCK_R] and rope keys [T, BLOCK_E] as dot operands, 0 where not seen, and the latents' scales [T]."""
    r = tl.arange(0, SHAPE.BLOCK_R)[None, :]
    e = tl.arange(0, SHAPE.BLOCK_E)[None, :]
    rope = (arena[2] + (record + SHAPE.O_ROPE) // SHAPE.ITEM + tokens * SHAPE.E)[:, None] + e
    rope = tl.load(rope, mask=seen[:, None] & (e < SHAPE.E), other=0.0).to(DOT)
    mask = seen[:, None] & (r < SHAPE.R)
    if IS_FP8:
        code = tl.load((arena[0] + record + tokens * SHAPE.R)[:, None] + r, mask=mask, other=0)
        s = tl.load(arena[1] + (record + SHAPE.O_SCALES) // 2 + tokens, mask=seen, other=1.0).to(tl.float32)
        if not NATIVE_FP8:
            s = s * E4M3_BITS_SCALE
        return fp16_of_code8(code, True, NATIVE_FP8).to(DOT), rope, s
    else:
        at = (arena[2] + record // SHAPE.ITEM + tokens * SHAPE.R)[:, None] + r
        return tl.load(at, mask=mask, other=0.0).to(DOT), rope, 1.0


@triton.jit
def latent_tile(q, q_rope, latents, rope, s, seen, scale, peak, total, acc, IS_FP8: tl.constexpr):
    """One tile into the running softmax in base 2.

    FP8 latents are codes times a scale s for each token. As values they are weighed by p * s, which float16 can't
    always hold: the peak is taken over log2(p * s), so that these weights are at most 1, and the sum is of p.
    """
    if IS_FP8:  # the queries carry `scale` already
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee") * s[None, :]
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") + tl.log2(s)[None, :]
    else:
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - top)
    weights = tl.exp2(scores - top[:, None])
    if IS_FP8:
        total = total * shrink + tl.sum(weights / s[None, :], 1)
    else:
        total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def load_queries(q_ptr, row, head, scale, IS_FP8: tl.constexpr, DOT: tl.constexpr, SHAPE: tl.constexpr):
    """Both parts of a row's queries [H, BLOCK_R], [H, BLOCK_E] as dot operands; with `scale` where latents are FP8."""
    r = tl.arange(0, SHAPE.BLOCK_R)[None, :]
    e = tl.arange(0, SHAPE.BLOCK_E)[None, :]
    inside = (head < SHAPE.HQ)[:, None]
    at = q_ptr + ((row * SHAPE.HQ + head) * (SHAPE.R + SHAPE.E))[:, None]
    q = tl.load(at + r, mask=inside & (r < SHAPE.R), other=0.0)
    q_rope = tl.load(at + SHAPE.R + e, mask=inside & (e < SHAPE.E), other=0.0)
    if IS_FP8:
        q = q.to(tl.float32) * scale
        q_rope = q_rope.to(tl.float32) * scale
        if DOT == tl.float16:
            q = tl.minimum(tl.maximum(q, -FP16_MAX), FP16_MAX)
            q_rope = tl.minimum(tl.maximum(q_rope, -FP16_MAX), FP16_MAX)
    return q.to(DOT), q_rope.to(DOT)


@triton.jit
def store_result(
    partial_ptr, lse2_ptr, out_ptr, lse_ptr, row, slot, head, peak, total, acc, SHAPE: tl.constexpr
):
    """An item's result to its slot, or, where the item is all of its row, to the row itself."""
    r = tl.arange(0, SHAPE.BLOCK_R)[None, :]
    inside = head < SHAPE.HQ
    mask = inside[:, None] & (r < SHAPE.R)
    result = acc / total[:, None]
    lse2 = peak + tl.log2(total)
    if slot == WHOLE_ROW:
        at = row * SHAPE.HQ + head
        tl.store(out_ptr + at[:, None] * SHAPE.R + r, result.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + at, lse2 * LN2, mask=inside)
    else:
        at = slot.to(tl.int64) * SHAPE.HQ + head
        tl.store(partial_ptr + at[:, None] * SHAPE.R + r, result, mask=mask)
        tl.store(lse2_ptr + at, lse2, mask=inside)


@triton.jit(do_not_specialize=["items_ptr", "pages_ptr"])
def latent_kernel(
    q_ptr,  # [rows, HQ, R + E]
    bytes_ptr,  # the arena, three times
    halves_ptr,
    raw_ptr,
    items_ptr,  # i32 [items, FIELDS]
    pages_ptr,
    partial_ptr,  # f32 [slots, HQ, R]
    lse2_ptr,  # f32 [slots, HQ]
    out_ptr,  # [rows, HQ, R]
    lse_ptr,  # f32 [rows, HQ]
    layer_bytes: tl.int64,
    scale,  # f32, log2(e) included
    IS_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DOT: tl.constexpr,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: one work item and HEADS heads."""
    BLOCKS: tl.constexpr = (SHAPE.HQ + HEADS - 1) // HEADS
    item = items_ptr + tl.program_id(0) // BLOCKS * FIELDS
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    row = tl.load(item).to(tl.int64)
    pages = pages_ptr + tl.load(item + 1)
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    slot = tl.load(item + 4)
    arena = (bytes_ptr, halves_ptr, raw_ptr)
    q, q_rope = load_queries(q_ptr, row, head, scale, IS_FP8, DOT, SHAPE)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    R: tl.constexpr = SHAPE.BLOCK_R
    acc = tl.zeros([HEADS, R], tl.float32)
    for start in tl.range(first // TOKENS * TOKENS, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = (token >= first) & (token < end)
        if SHAPE.P >= TOKENS:
            frame = tl.load(pages + start // SHAPE.P)
        else:
            frame = tl.load(pages + token // SHAPE.P, mask=seen, other=0)
        record = frame.to(tl.int64) * SHAPE.FRAME_BYTES + layer_bytes
        latents, rope, s = load_latents(arena, record, token % SHAPE.P, seen, IS_FP8, NATIVE_FP8, DOT, SHAPE)
        peak, total, acc = latent_tile(q, q_rope, latents, rope, s, seen, scale, peak, total, acc, IS_FP8)
    store_result(partial_ptr, lse2_ptr, out_ptr, lse_ptr, row, slot, head, peak, total, acc, SHAPE)


@triton.jit(do_not_specialize=["items_ptr", "pages_ptr", "layer"])
def latent_descriptor_kernel(
    q_ptr,  # [rows, HQ, R + E]
    latent_desc,  # [frames, layers, P, R], tiles of [1, 1, TOKENS, R]
    rope_desc,  # [frames, layers, P, E], tiles of [1, 1, TOKENS, E]
    items_ptr,
    pages_ptr,
    partial_ptr,
    lse2_ptr,
    out_ptr,
    lse_ptr,
    layer,
    scale,
    DOT: tl.constexpr,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The same for raw latents through tensor descriptors: whole tiles of one page. R and E are powers of two."""
    BLOCKS: tl.constexpr = (SHAPE.HQ + HEADS - 1) // HEADS
    item = items_ptr + tl.program_id(0) // BLOCKS * FIELDS
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    row = tl.load(item).to(tl.int64)
    pages = pages_ptr + tl.load(item + 1)
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    slot = tl.load(item + 4)
    q, q_rope = load_queries(q_ptr, row, head, scale, False, DOT, SHAPE)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    R: tl.constexpr = SHAPE.R
    acc = tl.zeros([HEADS, R], tl.float32)
    for start in tl.range(first // TOKENS * TOKENS, end, TOKENS):
        # The last tile ends with the last token instead of beginning where it would: bytes behind a page's last token
        # may be NaN, and 0 * NaN is NaN. What it holds before the page's first token is read as 0.
        begin = tl.minimum(start, end - TOKENS)
        token = begin + tl.arange(0, TOKENS)
        seen = (token >= tl.maximum(start, first)) & (token < end)
        frame = tl.load(pages + start // SHAPE.P)
        at = begin - start // SHAPE.P * SHAPE.P
        latents = tl.reshape(latent_desc.load([frame, layer, at, 0]), [TOKENS, SHAPE.R]).to(DOT)
        rope = tl.reshape(rope_desc.load([frame, layer, at, 0]), [TOKENS, SHAPE.E]).to(DOT)
        peak, total, acc = latent_tile(q, q_rope, latents, rope, 1.0, seen, scale, peak, total, acc, False)
    store_result(partial_ptr, lse2_ptr, out_ptr, lse_ptr, row, slot, head, peak, total, acc, SHAPE)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Constants of device code about one kind of latent page."""

    HQ: int
    R: int
    E: int
    BLOCK_R: int
    BLOCK_E: int
    P: int
    ITEM: int  # bytes of a raw number
    FRAME_BYTES: int
    O_ROPE: int
    O_SCALES: int


def latent_shape(layout: KVLayout, format: Format, heads: int) -> LatentShape:
    """The constants for pages of one format."""
    record = layout.records[format]
    return LatentShape(
        HQ=heads,
        R=layout.head_dim,
        E=layout.rope_dim,
        BLOCK_R=max(16, triton.next_power_of_2(layout.head_dim)),
        BLOCK_E=max(16, triton.next_power_of_2(layout.rope_dim)),
        P=layout.page_tokens,
        ITEM=layout.dtype.itemsize,
        FRAME_BYTES=layout.unit_bytes,
        O_ROPE=record.v,
        O_SCALES=record.k_scales,
    )


def latent_form(tuning: Tuning, layout: KVLayout, format: Format, heads: int) -> tuple[Form, bool]:
    """How pages of one format are taken, and whether through descriptors."""
    form = tuning.descriptors
    suits = heads >= (form.heads if form else 0) and layout.dtype.itemsize == 2
    suits = suits and all(n >= 16 and n & (n - 1) == 0 for n in (layout.head_dim, layout.rope_dim))
    if form and suits and format is Format.RAW and layout.page_tokens >= 32:
        return replace(form, tokens=min(form.tokens, layout.page_tokens)), True
    if layout.dtype.itemsize == 4:
        return FLOAT32, False
    return tuning.wide if heads >= tuning.wide.heads else tuning.narrow, False


# ---- latents to be expanded -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pages_ptr", "formats_ptr", "skipped", "n", "layer"])
def read_kernel(
    bytes_ptr,  # the arena, three times
    halves_ptr,
    raw_ptr,
    pages_ptr,  # i32: frames of the sequence's pages, from the first one that is read
    formats_ptr,  # u8: their formats
    latents_ptr,  # bits of raw numbers [n, R]
    rope_ptr,  # [n, E]
    skipped,  # tokens of the first page before the first one that is read
    n,
    layer,
    RAW: tl.constexpr,  # LatentShape of raw pages
    FP8: tl.constexpr,  # and of FP8 pages
    RAW_BYTES: tl.constexpr,  # of a record
    FP8_BYTES: tl.constexpr,
    IS_BF16: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: TOKENS tokens of one page."""
    page = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = page * RAW.P + token - skipped
    wanted = (token < RAW.P) & (row >= 0) & (row < n)
    r = tl.arange(0, RAW.BLOCK_R)[None, :]
    e = tl.arange(0, RAW.BLOCK_E)[None, :]
    mask = wanted[:, None] & (r < RAW.R)
    rope_mask = wanted[:, None] & (e < RAW.E)
    BITS: tl.constexpr = RAW.ITEM * 8
    out = latents_ptr + row.to(tl.int64)[:, None] * RAW.R + r
    rope_out = rope_ptr + row.to(tl.int64)[:, None] * RAW.E + e
    is_raw = tl.load(formats_ptr + page) == 0
    record = tl.load(pages_ptr + page).to(tl.int64) * RAW.FRAME_BYTES
    record += layer * tl.where(is_raw, RAW_BYTES, FP8_BYTES)
    rope_at = raw_ptr + (record + tl.where(is_raw, RAW.O_ROPE, FP8.O_ROPE)) // RAW.ITEM
    rope = tl.load(rope_at + token[:, None] * RAW.E + e, mask=rope_mask)
    tl.store(rope_out, as_bits(rope, BITS), mask=rope_mask)
    if is_raw:
        bits = tl.load(raw_ptr + record // RAW.ITEM + token[:, None] * RAW.R + r, mask=mask)
        tl.store(out, as_bits(bits, BITS), mask=mask)
    else:
        code = tl.load(bytes_ptr + record + token[:, None] * RAW.R + r, mask=mask, other=0)
        s = tl.load(halves_ptr + (record + FP8.O_SCALES) // 2 + token, mask=wanted, other=0.0).to(tl.float32)
        numbers = fp16_of_e4m3_bits(code).to(tl.float32) * (s * E4M3_BITS_SCALE)[:, None]
        tl.store(out, raw_bits(numbers, BITS, IS_BF16), mask=mask)


# ---- attention over expanded keys -------------------------------------------------------------------------------


@triton.jit
def dense_tile(
    q0,
    q1,
    k_at,  # pointers to the tile's keys [1, KEYS]
    v_at,  # pointers to its values [KEYS, 1]
    present,  # [KEYS]: whether there is such a key
    seen,  # [ROWS, KEYS]
    scale,
    peak,
    total,
    acc,
    DOT: tl.constexpr,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys into the running softmax in base 2. Keys come as two parts, whose sizes are powers of two."""
    d0 = tl.arange(0, SHAPE.D0)[:, None]
    v = tl.arange(0, SHAPE.BLOCK_V)[None, :]
    there = present[None, :]
    k0 = tl.load(k_at + d0, mask=there, other=0.0).to(DOT)
    scores = tl.dot(q0, k0, input_precision="ieee")
    if SHAPE.D1 > 0:
        d1 = SHAPE.D0 + tl.arange(0, SHAPE.D1)[:, None]
        k1 = tl.load(k_at + d1, mask=there & (d1 < SHAPE.DK), other=0.0).to(DOT)
        scores = tl.dot(q1, k1, scores, input_precision="ieee")
    scores = scores * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    values = tl.load(v_at + v, mask=present[:, None] & (v < SHAPE.DV), other=0.0).to(DOT)
    acc = tl.dot(weights.to(DOT), values, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit(do_not_specialize=["rows", "keys", "offset"])
def dense_kernel(
    q_ptr,  # [rows, H, DK]
    k_ptr,  # [keys, H, DK]
    v_ptr,  # [keys, H, DV]
    out_ptr,  # [rows, H, DV]
    lse_ptr,  # f32 [rows, H]
    rows,
    keys,
    offset,
    scale,  # f32, log2(e) included
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    DOT: tl.constexpr,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: ROWS rows of one head. Those with the most keys go first."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1).to(tl.int64)
    row = first_row + tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    valid = (row < rows)[:, None]
    q_at = q_ptr + (row.to(tl.int64) * q_row)[:, None] + head * q_head
    q0 = tl.load(q_at + tl.arange(0, SHAPE.D0)[None, :], mask=valid, other=0.0).to(DOT)
    q1 = q0
    if SHAPE.D1 > 0:
        d1 = SHAPE.D0 + tl.arange(0, SHAPE.D1)[None, :]
        q1 = tl.load(q_at + d1, mask=valid & (d1 < SHAPE.DK), other=0.0).to(DOT)
    k_at = k_ptr + head * k_head + (key.to(tl.int64) * k_row)[None, :]
    v_at = v_ptr + head * v_head + (key.to(tl.int64) * v_row)[:, None]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    BLOCK_V: tl.constexpr = SHAPE.BLOCK_V
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    end = tl.minimum(keys, offset + tl.minimum(first_row + ROWS, rows))
    whole = tl.maximum(tl.minimum(keys, offset + first_row + 1), 0) // KEYS * KEYS  # seen by all rows
    for start in tl.range(0, whole, KEYS):
        at = tl.cast(start, tl.int64)
        peak, total, acc = dense_tile(
            q0,
            q1,
            k_at + at * k_row,
            v_at + at * v_row,
            key >= 0,
            row,
            scale,
            peak,
            total,
            acc,
            DOT,
            SHAPE,
            False,
        )
    for start in tl.range(whole, end, KEYS):
        at = tl.cast(start, tl.int64)
        present = start + key < keys
        seen = present[None, :] & ((start + key)[None, :] <= (offset + row)[:, None])
        peak, total, acc = dense_tile(
            q0,
            q1,
            k_at + at * k_row,
            v_at + at * v_row,
            present,
            seen,
            scale,
            peak,
            total,
            acc,
            DOT,
            SHAPE,
            True,
        )
    v = tl.arange(0, SHAPE.BLOCK_V)[None, :]
    safe = tl.where(total == 0.0, 1.0, total)
    to = row.to(tl.int64) * tl.num_programs(1) + head
    result = (acc / safe[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] * SHAPE.DV + v, result, mask=valid & (v < SHAPE.DV))
    lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(safe)) * LN2)
    tl.store(lse_ptr + to, lse, mask=row < rows)


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Constants of device code about expanded keys and values: DK = D0 + D1, up to padding of D1."""

    DK: int
    D0: int
    D1: int
    DV: int
    BLOCK_V: int


def dense_shape(dk: int, dv: int) -> DenseShape:
    """The constants for rows of `dk` and `dv` numbers: 192 is taken as 128 and 64 instead of 256."""
    d0 = 1 << (dk.bit_length() - 1)
    if d0 < 16:
        raise ValueError(f"keys must have 16 numbers or more, got {dk}")
    d1 = max(16, triton.next_power_of_2(dk - d0)) if dk > d0 else 0
    return DenseShape(dk, d0, d1, dv, max(16, triton.next_power_of_2(dv)))


# ---- launchers --------------------------------------------------------------------------------------------------


class LatentAttention:
    """Launches the kernels. Keeps what it made of the last plans, on the device.

    `split_tokens` above 0 fixes where a row's keys are split, so that a row's result depends on no other row; 0 splits
    so that the device is filled.
    """

    def __init__(
        self, target: Target, programs: int, split_tokens: int = 0, dot: torch.dtype | None = None
    ) -> None:
        """`programs`: so many fill the device. `dot`: what is multiplied, instead of what the layout says, in tests."""
        self._target = target
        self._programs = programs
        self._split_tokens = split_tokens
        self._dot = dot
        self._items: PerPlan[WorkItems] = PerPlan(overwrite_items)
        self._pages: PerPlan[tuple[torch.Tensor, torch.Tensor]] = PerPlan()
        self.tables: tuple[PerPlan[WorkItems], ...] = (self._items,)

    def latent_attention(
        self,
        q: torch.Tensor,  # [rows, Hq, R + E], W_UK absorbed
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels.latent_attention. One launch for each format present, and one to combine."""
        check_latent_queries(q, arena, layout)
        check_layer(layer, layout)
        rows, heads, _ = q.shape
        q = q.contiguous()
        tuning = self._tuning(q.device)
        items = self._items.get(
            plan,
            (layout, rows, heads, q.device, arena.numel()),
            lambda plan: self._cut(plan, arena, layout, rows, heads, q.device),
        )
        out = torch.empty(rows, heads, layout.head_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        partial = torch.empty(items.num_slots, heads, layout.head_dim, dtype=torch.float32, device=q.device)
        lse2 = torch.empty(items.num_slots, heads, dtype=torch.float32, device=q.device)
        for format, table in items.by_format:
            form, by_descriptors = latent_form(tuning, layout, format, heads)
            grid = (len(table) * triton.cdiv(heads, form.heads),)
            results = (table, items.pages, partial, lse2, out, lse)
            constants = {
                "DOT": self._dot_type(layout.dtype, format, q.device),
                "SHAPE": latent_shape(layout, format, heads),
                "HEADS": form.heads,
                "TOKENS": form.tokens,
                "num_warps": form.warps,
                "num_stages": form.stages,
            }
            if by_descriptors:
                descriptors = _descriptors(arena, layout, form.tokens)
                latent_descriptor_kernel[grid](
                    q, *descriptors, *results, layer, scale * LOG2E.value, **constants
                )
            else:
                latent_kernel[grid](
                    q,
                    arena,
                    arena.view(torch.float16),
                    arena.view(layout.dtype),
                    *results,
                    layer * layout.records[format].nbytes,
                    scale * LOG2E.value,
                    IS_FP8=format is Format.FP8,
                    NATIVE_FP8=tuning.native_fp8,
                    **constants,
                )
        combine(partial, lse2, items.indptr, out, lse, rows=items.rows)
        return out, lse

    def read_latents(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        sequence: int,
        first: int,
        last: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels.read_latents. Raises ValueError where the plan doesn't name all pages of the range."""
        check_arena(arena, layout)
        check_layer(layer, layout)
        frames, formats = self._pages.get(
            plan, (layout, arena.device, arena.numel()), lambda plan: _device_pages(plan, arena, layout)
        )
        check_span(plan, layout, sequence, first, last)
        pages = range(first // layout.page_tokens, -(-last // layout.page_tokens))
        latents = torch.empty(last - first, layout.head_dim, dtype=layout.dtype, device=arena.device)
        rope = torch.empty(last - first, layout.rope_dim, dtype=layout.dtype, device=arena.device)
        if first == last:
            return latents, rope
        entry = plan.entry(sequence, pages.start)
        bits = torch.uint32 if layout.dtype.itemsize == 4 else torch.uint16
        read_kernel[(len(pages), triton.cdiv(layout.page_tokens, READ_TOKENS))](
            arena,
            arena.view(torch.float16),
            arena.view(bits),
            frames[entry:],
            formats[entry:],
            latents.view(bits),
            rope.view(bits),
            first - pages.start * layout.page_tokens,
            last - first,
            layer,
            **_read_constants(layout),
            num_warps=4,
        )
        return latents, rope

    def dense_attention(
        self,
        q: torch.Tensor,  # [rows, H, Dk]
        k: torch.Tensor,  # [keys, H, Dk]
        v: torch.Tensor,  # [keys, H, Dv]
        offset: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels.dense_attention. Strides may be any, as long as a row's numbers lie side by side."""
        check_dense(q, k, v)
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        rows, heads, dk = q.shape
        out = torch.empty(rows, heads, v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        if rows == 0:
            return out, lse
        block, keys, warps, stages = (
            FLOAT32_DENSE if q.dtype is torch.float32 else self._tuning(q.device).dense
        )
        dense_kernel[(triton.cdiv(rows, block), heads)](
            q,
            k,
            v,
            out,
            lse,
            rows,
            len(k),
            offset,
            scale * LOG2E.value,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            DOT=self._dot_type(q.dtype, Format.RAW, q.device),
            SHAPE=dense_shape(dk, v.shape[2]),
            ROWS=block,
            KEYS=keys,
            num_warps=warps,
            num_stages=stages,
        )
        return out, lse

    def _tuning(self, device: torch.device) -> Tuning:
        return INTERPRETED if device.type == "cpu" else TUNING[self._target]

    def _cut(
        self,
        plan: StepPlan,
        arena: torch.Tensor,
        layout: KVLayout,
        rows: int,
        heads: int,
        device: torch.device,
    ) -> WorkItems:
        check_plan(plan, rows, arena, layout)
        form, _ = latent_form(self._tuning(device), layout, Format.RAW, heads)
        wanted = max(1, self._programs // triton.cdiv(heads, form.heads))
        least = max(LEAST_SPLIT_TOKENS, layout.page_tokens)
        split = self._split_tokens or balanced_split(plan, wanted, least)
        return work_items(
            plan, layout.page_tokens, split, rows, device, most_items=most_items(wanted, plan.shape)
        )

    def _dot_type(self, dtype: torch.dtype, format: Format, device: torch.device) -> Any:
        """Type of dot operands. Codes are exact in float16; the interpreter can't do arithmetic in bfloat16."""
        if self._dot is not None:
            return _DOT[self._dot]
        if device.type == "cpu" or dtype is torch.float32:
            return tl.float32
        return _DOT[dtype] if format is Format.RAW else tl.float16


_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _device_pages(plan: StepPlan, arena: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames and formats of all pages."""
    check_plan(plan, None, arena, layout)
    frames, formats = (torch.from_numpy(x).to(arena.device) for x in (plan.frames, plan.formats))
    return frames, formats


def _read_constants(layout: KVLayout) -> dict[str, Any]:
    shapes = {format: latent_shape(layout, format, 1) for format in layout.records}
    known = next(iter(layout.records))
    raw, fp8 = (format if format in shapes else known for format in (Format.RAW, Format.FP8))
    return {
        "RAW": shapes[raw],
        "FP8": shapes[fp8],
        "RAW_BYTES": layout.records[raw].nbytes,
        "FP8_BYTES": layout.records[fp8].nbytes,
        "IS_BF16": layout.dtype is torch.bfloat16,
        "TOKENS": READ_TOKENS,
    }


def _descriptors(
    arena: torch.Tensor, layout: KVLayout, tokens: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Latents and rope keys of all frames. Where pages reach over several units, frames overlap."""
    record = layout.records[Format.RAW]
    size = layout.dtype.itemsize
    raw = arena.view(layout.dtype).view(-1)
    frames = (arena.numel() - layout.page_bytes(Format.RAW)) // layout.unit_bytes + 1

    def descriptor(offset: int, width: int) -> TensorDescriptor:
        shape = [frames, layout.num_layers, layout.page_tokens, width]
        strides = [layout.unit_bytes // size, record.nbytes // size, width, 1]
        return TensorDescriptor(raw[offset // size :], shape, strides, [1, 1, tokens, width])

    return descriptor(0, layout.head_dim), descriptor(record.v, layout.rope_dim)


def aot_variants(target: Target) -> list[AotVariant]:
    """Compiled forms for the ahead-of-time gate: DeepSeek-V3's 128 heads over pages of 64 tokens, and V2-Lite's 16."""
    found = [
        _latent_variant(target, format, heads, torch.bfloat16)
        for format in (Format.RAW, Format.FP8)
        for heads in (128, 16)
    ]
    found += [_latent_variant(target, format, 16, torch.float32) for format in (Format.RAW, Format.FP8)]
    arena = {"bytes_ptr": "*u8:16", "halves_ptr": "*fp16:16"}
    types = arena | {
        "raw_ptr": "*u16:16",
        "latents_ptr": "*u16:16",
        "rope_ptr": "*u16:16",
        "pages_ptr": "*i32",
    }
    types |= {"formats_ptr": "*u8", "skipped": "i32", "n": "i32", "layer": "i32"}
    constants = _read_constants(gate_layout(Format.RAW, latent=True))
    found.append(make_variant("read_latents", read_kernel, types, constants, {"num_warps": 4}))
    return [*found, *(_dense_variant(target, dtype) for dtype in (torch.bfloat16, torch.float32))]


def _latent_variant(target: Target, format: Format, heads: int, dtype: torch.dtype) -> AotVariant:
    tuning, is_float32 = TUNING[target], dtype is torch.float32
    number = "*fp32:16" if is_float32 else "*bf16:16"
    layout = gate_layout(format, latent=True, dtype=dtype)
    form, by_descriptors = latent_form(tuning, layout, format, heads)
    types = {"items_ptr": "*i32", "pages_ptr": "*i32", "partial_ptr": "*fp32:16", "lse2_ptr": "*fp32:16"}
    types |= {"q_ptr": number, "out_ptr": number, "lse_ptr": "*fp32:16", "scale": "fp32"}
    dot = tl.float32 if is_float32 else tl.bfloat16 if format is Format.RAW else tl.float16
    constants: dict[str, Any] = {
        "DOT": dot,
        "SHAPE": latent_shape(layout, format, heads),
        "HEADS": form.heads,
        "TOKENS": form.tokens,
    }
    kernel = latent_descriptor_kernel if by_descriptors else latent_kernel
    if by_descriptors:
        for name, width in (("latent_desc", layout.head_dim), ("rope_desc", layout.rope_dim)):
            types[name] = f"tensordesc<bf16[1, 1, {form.tokens}, {width}]>"
        types["layer"] = "i32"
    else:
        types |= {"bytes_ptr": "*u8:16", "halves_ptr": "*fp16:16", "raw_ptr": number, "layer_bytes": "i64:16"}
        constants |= {"IS_FP8": format is Format.FP8, "NATIVE_FP8": tuning.native_fp8}
    name = f"latent_{format.name.lower()}_{heads}_heads{'_fp32' if is_float32 else ''}"
    options = {"num_warps": form.warps, "num_stages": form.stages}
    return make_variant(name, kernel, types, constants, options, 0 if is_float32 else form.tokens)


def _dense_variant(target: Target, dtype: torch.dtype) -> AotVariant:
    is_float32 = dtype is torch.float32
    block, keys, warps, stages = FLOAT32_DENSE if is_float32 else TUNING[target].dense
    number = "*fp32:16" if is_float32 else "*bf16:16"
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), number) | {"lse_ptr": "*fp32:16"}
    types |= dict.fromkeys(("rows", "keys", "offset"), "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"), "i32:16")
    dot = tl.float32 if is_float32 else tl.bfloat16
    constants = {"DOT": dot, "SHAPE": dense_shape(192, 128), "ROWS": block, "KEYS": keys}
    options = {"num_warps": warps, "num_stages": stages}
    name = f"dense_192_128{'_fp32' if is_float32 else ''}"
    return make_variant(name, dense_kernel, types, constants, options, 0 if is_float32 else keys)
