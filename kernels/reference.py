"""The kernels in plain torch: the definition of every page format and of attention over pages, right on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.layout import Format, IntArray, KVLayout, StepPlan

KEY_TILE = 64  # keys per partial softmax; tiles start at multiples of it whatever the chunk
ROW_TILE = 16  # query rows of a sequence that are computed together, padded
MAX_E4M3 = 448.0
_SMALLEST_RANGE = 1e-4  # of a row's numbers, so that a row of zeros has a scale
_LARGEST_HALF = 65504.0


# ---- numbers and their codes ----------------------------------------------------------------------------------


@cache
def hadamard(dim: int) -> torch.Tensor:
    """Orthonormal symmetric float32 [dim, dim]: Sylvester's matrix in blocks of the largest power of two in `dim`."""
    block = dim & -dim
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.kron(torch.eye(dim // block), matrix * block**-0.5)


def encode_rows(x: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes uint8 [..., D] and scale float16 [..., 1] of rows [..., D], by FP8 or INT8."""
    x = x.float()
    largest = MAX_E4M3 if format is Format.FP8 else 127.0
    reach = x.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_RANGE)
    scale = (reach / largest).clamp(max=_LARGEST_HALF).half()
    y = x / scale.float()
    if format is Format.FP8:
        return y.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8), scale
    return (y.round().clamp(-largest, largest) + 128.0).to(torch.uint8), scale


def decode_rows(codes: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """float32 [..., D] of codes uint8 [..., D] and scale float16 [..., 1]."""
    values = codes.view(torch.float8_e4m3fn).float() if format is Format.FP8 else codes.float() - 128.0
    return values * scale.float()


def encode_nibbles(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0 to 15 (uint8, like x), scale and zero float16, both over dimension `dim` of x, which they keep as 1."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low).clamp(min=_SMALLEST_RANGE) / 15.0).clamp(max=_LARGEST_HALF).half()
    zero = low.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
    codes = ((x - zero.float()) / scale.float()).round().clamp(0.0, 15.0)
    return codes.to(torch.uint8), scale, zero


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D / 2] of codes uint8 [..., D]: column j low, column j + D / 2 high."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """float32 [..., D] of uint8 [..., D / 2]."""
    return torch.cat([packed & 15, packed >> 4], -1).float()


# ---- records --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordViews:
    """One layer's records in all frames, as views of the arena: bytes, and scales as halves (None where there are none)."""

    k: torch.Tensor  # uint8 [frames, H, P, bytes of a row]; latents
    v: torch.Tensor  # uint8 [frames, H, P, bytes of a row]; rope keys
    k_scales: torch.Tensor | None  # float16 [frames, H, P or 2, 1, 2 or D]
    v_scales: torch.Tensor | None  # float16 [frames, H, P, 1 or 2]


def record_views(arena: torch.Tensor, layout: KVLayout, format: Format, layer: int) -> RecordViews:
    """Views by which torch reads and writes records of `format`; index them by frame."""
    record = layout.records[format]
    heads, tokens, dim = layout.num_kv_heads, layout.page_tokens, layout.head_dim
    k_row = record.v // (heads * tokens)
    v_row = (record.k_scales - record.v) // (heads * tokens)

    def view(offset: int, rows: int, row_bytes: int) -> torch.Tensor:
        at = arena.storage_offset() + layer * record.nbytes + offset
        end = layer * record.nbytes + offset + heads * rows * row_bytes
        frames = (arena.numel() - end) // layout.unit_bytes + 1  # a page that began later would not fit
        strides = (layout.unit_bytes, rows * row_bytes, row_bytes, 1)
        return arena.as_strided((max(0, frames), heads, rows, row_bytes), strides, at)

    k_scales = v_scales = None
    if format is not Format.RAW:
        rows, row_bytes = {Format.INT4: (tokens, 4), Format.INT4C: (2, 2 * dim)}.get(format, (tokens, 2))
        k_scales = view(record.k_scales, rows, row_bytes).view(torch.float16)
        if not layout.rope_dim:
            width = 2 if format in (Format.FP8, Format.INT8) else 4
            v_scales = view(record.v_scales, tokens, width).view(torch.float16)
    return RecordViews(view(0, tokens, k_row), view(record.v, tokens, v_row), k_scales, v_scales)


def read_pages(
    arena: torch.Tensor, layout: KVLayout, format: Format, layer: int, frames: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [frames, H, P, D] (latents, and rope keys [frames, 1, P, E]) of whole pages, as float32."""
    views = record_views(arena, layout, format, layer)
    k, v = views.k[frames], views.v[frames]
    if layout.rope_dim:
        rope = v.view(layout.dtype).float()
        if format is Format.RAW:
            return k.view(layout.dtype).float(), rope
        assert views.k_scales is not None
        return decode_rows(k, views.k_scales[frames], format), rope
    if format is Format.RAW:
        return k.view(layout.dtype).float(), v.view(layout.dtype).float()
    assert views.k_scales is not None and views.v_scales is not None
    k_scales, v_scales = views.k_scales[frames].float(), views.v_scales[frames].float()
    match format:
        case Format.FP8 | Format.INT8:
            return decode_rows(k, k_scales, format), decode_rows(v, v_scales, format)
        case Format.K8V4:
            keys = decode_rows(k, k_scales, Format.INT8)
        case Format.INT4:
            rotation = hadamard(layout.head_dim).to(arena.device)
            keys = (unpack_nibbles(k) * k_scales[..., :1] + k_scales[..., 1:]) @ rotation
        case Format.INT4C:
            keys = unpack_nibbles(k) * k_scales[..., :1, :] + k_scales[..., 1:, :]
    return keys, unpack_nibbles(v) * v_scales[..., :1] + v_scales[..., 1:]


def write_pages(
    arena: torch.Tensor,
    layout: KVLayout,
    format: Format,
    layer: int,
    frames: torch.Tensor,
    keys: torch.Tensor,  # [frames, H, P, D]
    values: torch.Tensor,
) -> None:
    """Whole pages at once; the only way to write INT4C."""
    views = record_views(arena, layout, format, layer)
    if format is not Format.INT4C:
        k, v, k_scales, v_scales = _encode(keys, values, layout, format)
        views.k[frames], views.v[frames] = k, v
        if views.k_scales is not None and k_scales is not None:
            views.k_scales[frames] = k_scales
        if views.v_scales is not None and v_scales is not None:
            views.v_scales[frames] = v_scales
        return
    assert views.k_scales is not None and views.v_scales is not None
    codes, scale, zero = encode_nibbles(keys, -2)
    views.k[frames] = pack_nibbles(codes)
    views.k_scales[frames] = torch.cat([scale, zero], -2)
    codes, scale, zero = encode_nibbles(values, -1)
    views.v[frames] = pack_nibbles(codes)
    views.v_scales[frames] = torch.cat([scale, zero], -1)


def _encode(
    keys: torch.Tensor, values: torch.Tensor, layout: KVLayout, format: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Bytes of K rows and V rows, and their scales, in a token-wise format; for latents V is the rope key."""

    def raw(x: torch.Tensor) -> torch.Tensor:
        return x.to(layout.dtype).contiguous().view(torch.uint8)

    def nibbles(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale, zero = encode_nibbles(x, -1)
        return pack_nibbles(codes), torch.cat([scale, zero], -1)

    if format is Format.RAW:
        return raw(keys), raw(values), None, None
    if layout.rope_dim:
        k, k_scales = encode_rows(keys, format)
        return k, raw(values), k_scales, None
    match format:
        case Format.FP8 | Format.INT8:
            (k, k_scales), (v, v_scales) = encode_rows(keys, format), encode_rows(values, format)
        case Format.K8V4:
            (k, k_scales), (v, v_scales) = encode_rows(keys, Format.INT8), nibbles(values)
        case Format.INT4:
            rotation = hadamard(layout.head_dim).to(keys.device)
            (k, k_scales), (v, v_scales) = nibbles(keys.float() @ rotation), nibbles(values)
        case Format.INT4C:
            raise ValueError(
                "INT4C needs a whole page at once; write token by token in an 8-bit format and convert"
            )
    return k, v, k_scales, v_scales


# ---- what callers see -----------------------------------------------------------------------------------------


def write_kv(
    k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, layout: KVLayout, plan: StepPlan, layer: int
) -> None:
    """Write the rows' keys and values [rows, H, D] into their pages, in the layout's write_format."""
    rows, frames, slots = (torch.from_numpy(a).to(arena.device) for a in places(plan, layout.page_tokens))
    views = record_views(arena, layout, layout.write_format, layer)
    parts = _encode(k[rows], v[rows], layout, layout.write_format)
    views.k[frames, :, slots], views.v[frames, :, slots] = parts[0], parts[1]
    if views.k_scales is not None and parts[2] is not None:
        views.k_scales[frames, :, slots] = parts[2]
    if views.v_scales is not None and parts[3] is not None:
        views.v_scales[frames, :, slots] = parts[3]


def write_latents(
    latents: torch.Tensor,
    rope_keys: torch.Tensor,
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
) -> None:
    """Write the rows' latents [rows, R] and rope keys [rows, E] into their pages."""
    write_kv(latents[:, None], rope_keys[:, None], arena, layout, plan, layer)


def places(
    plan: StepPlan, page_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row, frame and token slot of each new token of a plan, in the plan's order."""
    lengths = plan.lengths.astype(np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(plan.starts, lengths) + within
    positions = np.repeat(plan.contexts - plan.lengths, lengths) + within
    sequences = np.repeat(np.arange(plan.num_sequences), lengths)
    entries = plan.entries(sequences, positions // page_tokens)
    return rows, plan.frames[entries].astype(np.int64), positions % page_tokens


def read_positions(
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
    sequence: int,
    first: int,
    last: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [H, last - first, D] of positions [first, last) of a sequence, as float32."""
    tokens = layout.page_tokens
    pages = range(first // tokens, -(-last // tokens))
    entries = plan.entries(np.full(len(pages), sequence), np.array(pages, np.int64))
    frames = torch.from_numpy(plan.frames[entries].astype(np.int64)).to(arena.device)
    formats = plan.formats[entries]
    present = np.unique(formats)
    if len(present) == 1:
        k, v = read_pages(arena, layout, Format(int(present[0])), layer, frames)
    else:
        shape = (len(frames), layout.num_kv_heads, tokens)
        k = torch.empty(*shape, layout.head_dim, device=arena.device)
        v = torch.empty(*shape, layout.rope_dim or layout.head_dim, device=arena.device)
        for format in present.tolist():
            of = torch.from_numpy(formats == format).to(arena.device)
            k[of], v[of] = read_pages(arena, layout, Format(format), layer, frames[of])
    begin = first - pages.start * tokens
    k, v = (x.transpose(0, 1).reshape(len(x[0]), -1, x.shape[-1]) for x in (k, v))
    return k[:, begin : begin + last - first], v[:, begin : begin + last - first]


def read_latents(
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
    sequence: int,
    first: int,
    last: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [last - first, R] and rope keys [last - first, E] of a sequence's positions, in the layout's dtype."""
    latents, rope_keys = read_positions(arena, layout, plan, layer, sequence, first, last)
    return latents[0].to(layout.dtype), rope_keys[0].to(layout.dtype)


def paged_attention(
    q: torch.Tensor,  # [rows, Hq, D]
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
    scale: float,
    *,
    q_sinks: torch.Tensor | None = None,  # [rows, Hq, D]
    sink_logits: torch.Tensor | None = None,  # [Hq]
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row over its sequence's pages: out [rows, Hq, D] like q, lse [rows, Hq] float32.

    A row's result depends on its own query and keys alone, bit for bit: keys are taken in tiles that start at
    multiples of KEY_TILE, a sequence's rows in groups of ROW_TILE, and tiles are summed in order. A row without keys
    has out 0 and lse -inf.
    """
    out, lse = _paged(q, arena, layout, plan, layer, scale, q_sinks, softcap)
    return join_sink_logits(out, lse, sink_logits)


def latent_attention(
    q: torch.Tensor,  # [rows, Hq, R + E]
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed latent attention (DeepSeek-V2, arXiv 2405.04434): out [rows, Hq, R] in the latent space, lse [rows, Hq]."""
    return _paged(q, arena, layout, plan, layer, scale, None, 0.0)


def join_sink_logits(
    out: torch.Tensor, lse: torch.Tensor, logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let learned logits [Hq] take their part of each row's softmax; rows that attend nothing stay as they are."""
    if logits is None:
        return out, lse
    joined = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, logits.float()))
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - joined))
    return (out.float() * weight[..., None]).to(out.dtype), joined


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over the union of disjoint sets of keys, from the (out, lse) over each; in float32."""
    lse = torch.stack([e for _, e in parts])
    joined = torch.logsumexp(lse, 0)
    weights = torch.where(joined == -torch.inf, 0.0, torch.exp(lse - joined))
    out = sum(w[..., None] * o.float() for w, (o, _) in zip(weights, parts, strict=True))
    assert isinstance(out, torch.Tensor)
    return out.to(parts[0][0].dtype), joined


def dense_attention(
    q: torch.Tensor,  # [rows, H, Dk]
    k: torch.Tensor,  # [keys, H, Dk]
    v: torch.Tensor,  # [keys, H, Dv]
    offset: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row r attends the keys j <= offset + r: out [rows, H, Dv] like q, lse [rows, H] float32."""
    scores = torch.einsum("rhd,thd->hrt", q.float(), k.float()) * scale
    rows = torch.arange(len(q), device=q.device)[:, None] + offset
    scores = scores.masked_fill(torch.arange(len(k), device=q.device)[None] > rows, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(scores - lse[..., None]))
    return torch.einsum("hrt,thd->rhd", weights, v.float()).to(q.dtype), lse.T.contiguous()


def convert_pages(
    arena: torch.Tensor,
    layout: KVLayout,
    sources: IntArray,
    source_format: Format,
    targets: IntArray,
    target_format: Format,
) -> None:
    """Rewrite pages of one format in another, all layers: from the float32 numbers of their codes."""
    src, dst = (torch.from_numpy(a.astype(np.int64)).to(arena.device) for a in (sources, targets))
    for layer in range(layout.num_layers):
        keys, values = read_pages(arena, layout, source_format, layer, src)
        write_pages(arena, layout, target_format, layer, dst, keys, values)


def gather_pages(arena: torch.Tensor, layout: KVLayout, frames: IntArray, format: Format) -> torch.Tensor:
    """Whole pages, all layers, one behind the other: uint8 [frames, page bytes]."""
    return _pages(arena, layout, format)[torch.from_numpy(frames.astype(np.int64)).to(arena.device)]


def scatter_pages(
    staging: torch.Tensor, arena: torch.Tensor, layout: KVLayout, frames: IntArray, format: Format
) -> None:
    """The other way round: staging uint8 [frames, page bytes] into pages."""
    _pages(arena, layout, format)[torch.from_numpy(frames.astype(np.int64)).to(arena.device)] = staging


def _pages(arena: torch.Tensor, layout: KVLayout, format: Format) -> torch.Tensor:
    nbytes = layout.page_bytes(format)
    frames = (arena.numel() - nbytes) // layout.unit_bytes + 1
    return arena.as_strided((frames, nbytes), (layout.unit_bytes, 1), arena.storage_offset())


# ---- attention ------------------------------------------------------------------------------------------------


def _paged(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: KVLayout,
    plan: StepPlan,
    layer: int,
    scale: float,
    q_sinks: torch.Tensor | None,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = layout.head_dim
    out = torch.zeros(*q.shape[:2], dim, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for s in range(plan.num_sequences):
        context, length, window = int(plan.contexts[s]), int(plan.lengths[s]), int(plan.windows[s])
        lowest = max(0, context - length - window + 1) if window else 0
        sinks = min(int(plan.sinks[s]), lowest)
        spans = [(0, sinks)] if sinks else []
        spans.append((lowest, context))
        keys = _Keys(arena, layout, plan, layer, s, spans)
        for at in range(0, length, ROW_TILE):
            rows = slice(int(plan.starts[s]) + at, int(plan.starts[s]) + min(at + ROW_TILE, length))
            position = context - length + at
            sink_rows = None if q_sinks is None or not window else q_sinks[rows].float()
            limits = _Limits(position, position + rows.stop - rows.start, window, int(plan.sinks[s]))
            o, e = _attend(q[rows].float(), sink_rows, keys, limits, scale, softcap)
            out[rows], lse[rows] = o.to(q.dtype), e
    return out, lse


@dataclass(frozen=True, slots=True)
class _Limits:
    """Rows at positions [first, end), and what each attends."""

    first: int
    end: int
    window: int
    sinks: int


class _Keys:
    """The keys and values of one sequence that a step's rows attend, by tiles of KEY_TILE positions; zeros elsewhere."""

    def __init__(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        sequence: int,
        spans: list[tuple[int, int]],
    ) -> None:
        tiles = sorted({t for a, b in spans for t in range(a // KEY_TILE, -(-b // KEY_TILE))})
        self.starts = [tile * KEY_TILE for tile in tiles]
        room = len(tiles) * KEY_TILE
        device, heads = arena.device, layout.num_kv_heads
        key_dim = layout.head_dim + layout.rope_dim
        self.k = torch.zeros(heads, room, key_dim, device=device)
        self.v = torch.zeros(heads, room, layout.head_dim, device=device)
        for first, last in spans:
            k, v = read_positions(arena, layout, plan, layer, sequence, first, last)
            if layout.rope_dim:
                k, v = torch.cat([k, v], -1), k
            at = tiles.index(first // KEY_TILE) * KEY_TILE + first % KEY_TILE
            self.k[:, at : at + last - first], self.v[:, at : at + last - first] = k, v

    def tiles(self, limits: _Limits) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """First positions of the tiles that the rows attend, and their keys and values [H, tiles, KEY_TILE, ...]."""
        lowest = limits.first - limits.window + 1 if limits.window else 0
        wanted = [
            i
            for i, at in enumerate(self.starts)
            if at < limits.end and (at + KEY_TILE > lowest or at < limits.sinks)
        ]
        heads = len(self.k)
        k, v = (x.view(heads, len(self.starts), KEY_TILE, x.shape[-1]) for x in (self.k, self.v))
        if wanted == list(range(wanted[0], wanted[-1] + 1)):
            span = slice(wanted[0], wanted[-1] + 1)
            return [self.starts[i] for i in wanted], k[:, span], v[:, span]
        return [self.starts[i] for i in wanted], k[:, wanted], v[:, wanted]


def _attend(
    q: torch.Tensor,
    q_sinks: torch.Tensor | None,
    keys: _Keys,
    limits: _Limits,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to ROW_TILE rows of one sequence."""
    num_rows, num_heads, _ = q.shape
    starts, k, v = keys.tiles(limits)
    num_kv, tiles = k.shape[:2]
    group = num_heads // num_kv
    k, v = (x.reshape(num_kv * tiles, KEY_TILE, x.shape[-1]) for x in (k, v))

    def scores_of(rows: torch.Tensor) -> torch.Tensor:  # [kv, tiles, group, rows, keys]
        x = rows.new_zeros(num_kv, 1, group, ROW_TILE, rows.shape[-1])
        x[:, 0, :, :num_rows] = rows.view(num_rows, num_kv, group, -1).permute(1, 2, 0, 3)
        x = x.expand(num_kv, tiles, group, ROW_TILE, -1).reshape(num_kv * tiles, group * ROW_TILE, -1)
        return torch.bmm(x, k.transpose(1, 2)).view(num_kv, tiles, group, ROW_TILE, KEY_TILE) * scale

    key_at = (torch.tensor(starts, device=q.device)[:, None] + torch.arange(KEY_TILE, device=q.device)).view(
        1, tiles, 1, 1, KEY_TILE
    )
    row_at = limits.first + torch.arange(ROW_TILE, device=q.device).view(1, 1, 1, ROW_TILE, 1)
    scores = scores_of(q)
    if q_sinks is not None:
        scores = torch.where(key_at < limits.sinks, scores_of(q_sinks), scores)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = key_at > row_at
    if limits.window:
        hidden = hidden | ((key_at <= row_at - limits.window) & (key_at >= limits.sinks))
    scores = scores.masked_fill(hidden, -torch.inf)
    peak = scores.amax(-1, keepdim=True).amax(1, keepdim=True)  # [kv, 1, group, rows, 1]
    weights = torch.exp(scores - peak)
    sums = _in_order(weights.sum(-1, keepdim=True))
    mixed = torch.bmm(weights.view(num_kv * tiles, group * ROW_TILE, KEY_TILE), v)
    acc = _in_order(mixed.view(num_kv, tiles, group, ROW_TILE, -1))
    out = acc / sums
    lse = (peak[:, 0] + torch.log(sums)).squeeze(-1)  # [kv, group, rows]
    return (
        out.permute(2, 0, 1, 3)[:num_rows].reshape(num_rows, num_heads, -1),
        lse.permute(2, 0, 1)[:num_rows].reshape(num_rows, num_heads),
    )


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the tiles one after another: a tile of zeros changes no bit, which a tree-shaped sum can't promise."""
    total = parts[:, 0]
    for tile in range(1, parts.shape[1]):
        total = total + parts[:, tile]
    return total
