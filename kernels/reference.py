"""The kernels in plain torch: readable, right on any device, and the yardstick of the compiled ones."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.kernels.layout import KVLayout, StepPlan

KEY_TILE = 64  # keys per partial softmax; tiles start at multiples of it whatever the chunk
ROW_TILE = 16  # query rows of a sequence that are computed together, padded


def kv_views(
    arena: torch.Tensor, layout: KVLayout, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:  # 2 x [frames, H, P, D]
    """Keys and values of one layer in all frames, as views of the arena."""
    typed = arena.view(layout.dtype)
    size = layout.dtype.itemsize
    shape = (len(arena), layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    stride = (
        typed.stride(0),
        layout.page_tokens * layout.head_dim,
        layout.head_dim,
        1,
    )
    at = typed.storage_offset() + layer * (layout.record_bytes // size)
    half = layout.num_kv_heads * layout.page_tokens * layout.head_dim
    return typed.as_strided(shape, stride, at), typed.as_strided(shape, stride, at + half)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, layout: KVLayout, plan: StepPlan, layer: int
) -> None:
    """Write the rows' keys and values [rows, H, D] into their pages."""
    keys, values = kv_views(arena, layout, layer)
    rows, frames, slots = (torch.from_numpy(a).to(arena.device) for a in _places(plan, layout.page_tokens))
    keys[frames, :, slots] = k[rows].to(layout.dtype)
    values[frames, :, slots] = v[rows].to(layout.dtype)


def _places(plan: StepPlan, page_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = plan.lengths.astype(np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(plan.starts, lengths) + within
    positions = np.repeat(plan.contexts - plan.lengths, lengths) + within
    frames = plan.frames[np.repeat(plan.first_frames, lengths) + positions // page_tokens]
    return rows, frames.astype(np.int64), positions % page_tokens


def paged_attention(
    q: torch.Tensor,  # [rows, Hq, D]
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row over its sequence's pages: out [rows, Hq, D] like q, lse [rows, Hq] float32.

    A row's result depends on its own query and keys alone, bit for bit: keys are taken in tiles that start at
    multiples of KEY_TILE, a sequence's rows in groups of ROW_TILE, and tiles are summed in order. A row without keys
    has out 0 and lse -inf.
    """
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for s in range(plan.num_sequences):
        first, context = int(plan.first_frames[s]), int(plan.contexts[s])
        pages = plan.frames[first : first + -(-context // layout.page_tokens)]
        keys, values = _gather(arena, layout, layer, pages)
        for at in range(0, int(plan.lengths[s]), ROW_TILE):
            rows = slice(int(plan.starts[s]) + at, int(plan.starts[s] + min(at + ROW_TILE, plan.lengths[s])))
            position = context - int(plan.lengths[s]) + at
            end = position + rows.stop - rows.start
            o, e = _attend_tile(q[rows].float(), position, keys, values, end, scale)
            out[rows], lse[rows] = o.to(q.dtype), e
    return out, lse


def _gather(
    arena: torch.Tensor, layout: KVLayout, layer: int, pages: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:  # 2 x [H, tokens, D] float32
    index = torch.from_numpy(pages.astype(np.int64)).to(arena.device)
    keys, values = kv_views(arena, layout, layer)
    shape = (layout.num_kv_heads, len(pages) * layout.page_tokens, layout.head_dim)
    k = keys[index].transpose(0, 1).reshape(shape).float()
    v = values[index].transpose(0, 1).reshape(shape).float()
    return k, v


def _attend_tile(
    q: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor, end: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to ROW_TILE rows, the first at `position`, over keys [0, end) of one sequence."""
    num_rows, num_heads, dim = q.shape
    num_kv = len(keys)
    group = num_heads // num_kv
    tiles = -(-end // KEY_TILE)
    k = _padded(keys[:, :end], tiles * KEY_TILE).reshape(num_kv * tiles, KEY_TILE, dim)
    v = _padded(values[:, :end], tiles * KEY_TILE).reshape(num_kv * tiles, KEY_TILE, dim)
    rows = q.new_zeros(num_kv, 1, group, ROW_TILE, dim)
    rows[:, 0, :, :num_rows] = q.view(num_rows, num_kv, group, dim).permute(1, 2, 0, 3)
    rows = rows.expand(num_kv, tiles, group, ROW_TILE, dim).reshape(num_kv * tiles, group * ROW_TILE, dim)

    scores = torch.bmm(rows, k.transpose(1, 2)).view(num_kv, tiles, group, ROW_TILE, KEY_TILE) * scale
    key_at = torch.arange(tiles * KEY_TILE, device=q.device).view(1, tiles, 1, 1, KEY_TILE)
    row_at = position + torch.arange(ROW_TILE, device=q.device).view(1, 1, 1, ROW_TILE, 1)
    scores = scores.masked_fill(key_at > row_at, -torch.inf)
    top = scores.amax(-1, keepdim=True)  # [kv, tiles, group, rows, 1]
    peak = top.amax(1, keepdim=True)
    weights = torch.exp(scores - peak)
    sums = _in_order(weights.sum(-1, keepdim=True))
    mixed = torch.bmm(weights.view(num_kv * tiles, group * ROW_TILE, KEY_TILE), v)
    acc = _in_order(mixed.view(num_kv, tiles, group, ROW_TILE, dim))
    out = acc / sums
    lse = (peak[:, 0] + torch.log(sums)).squeeze(-1)  # [kv, group, rows]
    return (
        out.permute(2, 0, 1, 3)[:num_rows].reshape(num_rows, num_heads, dim),
        lse.permute(2, 0, 1)[:num_rows].reshape(num_rows, num_heads),
    )


def _padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Zeros behind the last token, so that what lies in a page behind it can't reach a result."""
    return torch.nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the tiles one after another: a tile of zeros changes no bit, which a tree-shaped sum can't promise."""
    total = parts[:, 0]
    for tile in range(1, parts.shape[1]):
        total = total + parts[:, tile]
    return total
