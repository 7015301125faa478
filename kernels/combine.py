"""Merges the partial results of split attention into one result for each row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels.variants import AotVariant, Target, make_variant

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def with_sink_logit(peak, weight, logit):
    """(peak, weight, what results shrink by) after a learned logit joins a softmax's denominator.

    peak and weight are those of a running softmax in base 2; one that saw nothing (weight 0) stays as it is.
    """
    logit2 = logit.to(tl.float32) * LOG2E
    blind = weight == 0.0
    top = tl.where(blind, peak, tl.maximum(peak, logit2))
    base = tl.where(blind, 0.0, top)
    shrink = tl.exp2(peak - base)
    return top, tl.where(blind, 0.0, weight * shrink + tl.exp2(logit2 - base)), shrink


@triton.jit(do_not_specialize=["indptr_ptr", "rows_ptr"])
def combine_kernel(
    partial_ptr,  # f32 [slots, HQ, D]
    lse2_ptr,  # f32 [slots, HQ]
    indptr_ptr,  # i32 [n + 1]
    rows_ptr,  # i32 [n]
    out_ptr,  # [rows, HQ, D]
    lse_ptr,  # f32 [rows, HQ]
    sink_ptr,  # f32 [HQ]
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One program merges one (row, head), its slots in order, so that the result depends on nothing else."""
    i = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(indptr_ptr + i).to(tl.int64)
    end = tl.load(indptr_ptr + i + 1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for slot in tl.range(first, end):
        lse2 = tl.load(lse2_ptr + slot * HQ + head)
        o = tl.load(partial_ptr + (slot * HQ + head) * D + d, mask=d < D, other=0.0)
        top = tl.maximum(peak, lse2)
        base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
        shrink = tl.exp2(peak - base)
        weight = tl.exp2(lse2 - base)
        acc = acc * shrink + o * weight
        total = total * shrink + weight
        peak = top
    if HAS_SINK:
        peak, total, shrink = with_sink_logit(peak, total, tl.load(sink_ptr + head))
        acc = acc * shrink
    row = i.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + i).to(tl.int64)
    safe = tl.where(total == 0.0, 1.0, total)
    out = (row * HQ + head) * D + d
    tl.store(out_ptr + out, (acc / safe).to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + row * HQ + head, tl.where(total == 0.0, float("-inf"), (peak + tl.log2(safe)) * LN2))


def combine(
    partial: torch.Tensor,  # float32 [slots, Hq, D], each normalized by its own sum
    lse2: torch.Tensor,  # float32 [slots, Hq], base 2
    indptr: torch.Tensor,  # int32 [n + 1]
    out: torch.Tensor,  # [rows, Hq, D], contiguous
    lse: torch.Tensor,  # float32 [rows, Hq], natural
    sink_logits: torch.Tensor | None = None,  # float32 [Hq]
    rows: torch.Tensor | None = None,  # int32 [n]
) -> None:
    """Write row rows[i] (i where None) of out and lse from the slots indptr[i] to indptr[i + 1].

    A slot that attended nothing has lse2 -inf and finite numbers in `partial`; a row of nothing but those gets out 0
    and lse -inf. Sink logits join the softmax's denominator, of rows that attend anything.
    """
    n = len(indptr) - 1
    if n == 0:
        return
    heads, dim = partial.shape[1:]
    combine_kernel[(n, heads)](
        partial,
        lse2,
        indptr,
        indptr if rows is None else rows,
        out,
        lse,
        lse2 if sink_logits is None else sink_logits,
        HQ=heads,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        HAS_ROWS=rows is not None,
        HAS_SINK=sink_logits is not None,
        num_warps=combine_warps(dim),
    )


def combine_warps(dim: int) -> int:
    """Warps for rows of `dim` numbers: four a thread, at least one warp."""
    return max(1, min(8, dim // 128))


def aot_variants(target: Target) -> list[AotVariant]:
    """Compiled forms for the ahead-of-time gate; the same for every target."""
    types = {
        "partial_ptr": "*fp32:16",
        "lse2_ptr": "*fp32:16",
        "indptr_ptr": "*i32",
        "rows_ptr": "*i32",
    }
    types |= {"out_ptr": "*bf16:16", "lse_ptr": "*fp32:16", "sink_ptr": "*fp32:16"}
    return [
        make_variant(
            f"combine_d{dim}{'_sink' if sink else ''}",
            combine_kernel,
            types,
            {"HQ": heads, "D": dim, "BLOCK_D": dim, "HAS_ROWS": True, "HAS_SINK": sink},
            {"num_warps": combine_warps(dim)},
        )
        for heads, dim, sink in ((32, 128, False), (32, 128, True), (128, 512, False))
    ]
