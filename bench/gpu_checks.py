"""The checks of bench/gpu.py: each kernel on the device against plain torch on the same bytes. A check returns its row.

Pages are written by kernels/reference.py, so that a kernel that reads is never checked by a kernel of ours that writes.
Every byte that holds nothing is 0xff, which reads as NaN.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

DRY = "--dry" in sys.argv
if DRY:  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.kernels import reference
from kvtier.kernels.gather import engine_to_pages, gather_pages, pages_to_engine, scatter_pages
from kvtier.kernels.ops import Format, IntArray, KVLayout, PlanSequence, StepPlan, make_plan, merge
from kvtier.kernels.triton_kernels import TritonKernels
from kvtier.tier.pages.page import PageFormat, PageSpec
from kvtier.workers.models.formats import FORMAT_CODES, RAW_FORMATS, LayerGroup, layout_of

DEVICE = torch.device("cpu" if DRY else "cuda")
DTYPE = torch.float16 if DRY else torch.bfloat16  # the interpreter truncates to bfloat16
QUANTIZED = (Format.FP8, Format.INT8, Format.K8V4, Format.INT4, Format.INT4C)
NAMES = {Format.RAW: "bf16", **{f: f.name.lower() for f in QUANTIZED}}
STORED = {code: name for name, code in FORMAT_CODES.items() if code is not Format.RAW}
LAYER = 1  # the one that is checked, of two
LONG_PAGES = 20  # of a context that is split, at pages of 64 by fixed splits too
PAGE_LATENTS = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Heads of one attention layer."""

    name: str
    query_heads: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Latents:
    """Heads of one layer of latent attention."""

    heads: int
    rank: int
    rope: int


@dataclass(frozen=True)
class Want:
    """What an attention check is about. `rows` is what each of its sequences has, 1 is decode."""

    rows: int = 1
    long: bool = False
    window: int = 0
    sinks: int = 0
    second_query: bool = False  # for sinks
    logits: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = DTYPE


def layout(
    shape: Shape,
    page_tokens: int,
    layers: int,
    dtype: torch.dtype = DTYPE,
    write: Format = Format.RAW,
    rope_dim: int = 0,
) -> KVLayout:
    """Pages of a shape in all formats that it can have."""
    raw = RAW_FORMATS[str(dtype).removeprefix("torch.")]
    formats = (raw, PageFormat.FP8) if rope_dim else (raw, *STORED.values())
    specs = {
        format: PageSpec(
            layers, shape.heads, shape.dim, page_tokens, format, rope_dim=rope_dim, rope_format=raw
        )
        for format in formats
    }
    group = LayerGroup(tuple(range(layers)), 0, specs)
    return layout_of(group, dtype, 1024, STORED.get(write, raw))


def latent_layout(
    latents: Latents, layers: int, dtype: torch.dtype = DTYPE, write: Format = Format.RAW
) -> KVLayout:
    """Pages of latents, raw and FP8."""
    return layout(
        Shape("latent", latents.heads, 1, latents.rank), PAGE_LATENTS, layers, dtype, write, latents.rope
    )


def units(kv: KVLayout, format: Format) -> int:
    """Units of a page."""
    return -(-kv.page_bytes(format) // kv.unit_bytes)


def empty_pages(kv: KVLayout, pages: int) -> tuple[torch.Tensor, IntArray]:
    """An arena of 0xff with room for pages of any format, and their frames in scattered order."""
    step = max(units(kv, format) for format in kv.records)
    arena = torch.full((pages * step + 1, kv.unit_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    return arena, np.random.default_rng(0).permutation(pages).astype(np.int32) * step


def _randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(DEVICE, dtype)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- attention over keys and values -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Two sequences, one of them shorter than a page, in one format (a last page that isn't full: in 8 bits).

    `plan` names what the rows attend; `whole` names all pages, for torch. The last of `rows` belongs to no sequence.
    """

    kv: KVLayout
    arena: torch.Tensor
    parts: tuple[PlanSequence, ...]
    plan: StepPlan
    whole: StepPlan
    rows: int


def case_of(shape: Shape, page: int, format: Format, want: Want) -> Case:
    """Sequences of pages as an option needs them."""
    kv = layout(shape, page, 2, want.dtype)
    lengths = ((LONG_PAGES if want.long else 3) * page + 5, page - 1)
    pages = [-(-n // page) for n in lengths]
    arena, frames = empty_pages(kv, sum(pages))
    g = _seeded(1)
    wholes: list[PlanSequence] = []
    for length, own in zip(lengths, np.split(frames, [pages[0]]), strict=True):
        codes = np.full(len(own), format, np.uint8)
        codes[length // page :] = Format.INT8 if format is Format.INT4C else format
        k, v = (_randn(g, length, shape.heads, shape.dim) for _ in "kv")
        start = sum(part.length for part in wholes)
        wholes.append(PlanSequence(start, min(want.rows, length), length, own, codes))
        for code in sorted(set(codes.tolist())):
            if Format(code) is not Format.INT4C:
                plan = make_plan([(0, length, length, own)], page, Format(code))
                reference.write_kv(k, v, arena, replace(kv, write_format=Format(code)), plan, LAYER)
            else:
                full = (x[: length // page * page] for x in (k, v))
                keys, values = (x.view(-1, page, shape.heads, shape.dim).transpose(1, 2) for x in full)
                at = torch.from_numpy(own[codes == code].astype(np.int64)).to(DEVICE)
                reference.write_pages(arena, kv, Format.INT4C, LAYER, at, keys, values)
    parts = tuple(_through_window(part, page, want) for part in wholes)
    rows = sum(part.length for part in wholes) + 1
    return Case(kv, arena, parts, make_plan(parts, page), make_plan(wholes, page), rows)


def _through_window(part: PlanSequence, page: int, want: Want) -> PlanSequence:
    """The sequence with the window, without the pages that no row attends."""
    if not want.window:
        return part
    assert part.formats is not None
    sink_pages = min(-(-want.sinks // page), len(part.frames))
    first = max(sink_pages, max(0, part.context - part.length - want.window + 1) // page)
    kept = np.r_[0:sink_pages, first : len(part.frames)]
    return part._replace(
        frames=part.frames[kept],
        formats=part.formats[kept],
        sink_pages=sink_pages,
        first_page=first,
        window=want.window,
        sinks=want.sinks,
    )


def torch_attention(
    q: torch.Tensor,  # [H, rows, D]
    k: torch.Tensor,  # [H, keys, D]
    v: torch.Tensor,
    seen: torch.Tensor,  # bool [rows, keys]
    scale: float,
    *,
    q_sinks: torch.Tensor | None = None,
    sinks: int = 0,
    logits: torch.Tensor | None = None,  # [H]
    softcap: float = 0.0,
) -> torch.Tensor:
    """What torch makes of it in the tensors' dtype: [rows, H, D], zeros where a row attends nothing."""
    if q_sinks is None and logits is None and not softcap:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return torch.where(seen.any(1)[None, :, None], out, 0.0).transpose(0, 1)
    scores = q @ k.transpose(1, 2) * scale
    if q_sinks is not None:
        scores[..., :sinks] = q_sinks @ k[:, :sinks].transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if logits is not None:
        scores = torch.cat([scores, logits.to(q.dtype)[:, None, None].expand(-1, q.shape[1], -1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1)


def fair_error(q: torch.Tensor, case: Case, ours: torch.Tensor, scale: float, options: dict[str, Any]) -> Row:
    """Ours may err at most twice what torch errs in the same dtype, over the numbers that the pages hold."""
    kv, torchs, exact = case.kv, [], []
    for s, part in enumerate(case.parts):
        keys, values = reference.read_positions(case.arena, kv, case.whole, LAYER, s, 0, part.context)
        row = torch.arange(part.context - part.length, part.context, device=DEVICE)[:, None]
        key = torch.arange(part.context, device=DEVICE)[None]
        seen = key <= row
        if part.window:
            seen &= (key > row - part.window) | (key < part.sinks)
        span = slice(part.start, part.start + part.length)
        for dtype, found in ((q.dtype, torchs), (torch.float64, exact)):
            k, v = (x.to(dtype).repeat_interleave(q.shape[1] // kv.num_kv_heads, 0) for x in (keys, values))
            mine, second = (
                None if x is None else x[span].transpose(0, 1).to(dtype) for x in (q, options["q_sinks"])
            )
            assert mine is not None
            found.append(
                torch_attention(
                    mine,
                    k,
                    v,
                    seen,
                    scale,
                    q_sinks=second,
                    sinks=part.sinks,
                    logits=options["sink_logits"],
                    softcap=options["softcap"],
                )
            )
    return errors(ours[:-1], torch.cat(torchs), torch.cat(exact))


def errors(ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> Row:
    """The row of a check by errors: at most twice torch's."""
    mine, fair = ((x.double() - exact).abs().max().item() for x in (ours, torchs))
    return {"ok": mine <= 2 * fair + 1e-6, "error": mine, "torch_error": fair}


def _same_lse(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(ours, exact, rtol=1e-3, atol=2e-2)


def check_attention(k: TritonKernels, shape: Shape, page: int, format: Format, want: Want) -> Row:
    """Rows over pages of one format, with what the check is about."""
    case = case_of(shape, page, format, want)
    g = _seeded(2)
    size = (case.rows, shape.query_heads, shape.dim)
    q, second = (_randn(g, *size, dtype=want.dtype) for _ in range(2))
    options = {
        "q_sinks": second if want.second_query else None,
        "sink_logits": _randn(g, shape.query_heads) if want.logits else None,
        "softcap": want.softcap,
    }
    scale = shape.dim**-0.5
    out, lse = k.paged_attention(q, case.arena, case.kv, case.plan, LAYER, scale, **options)  # type: ignore[arg-type]
    _, exact = reference.paged_attention(q, case.arena, case.kv, case.plan, LAYER, scale, **options)  # type: ignore[arg-type]
    found = fair_error(q, case, out, scale, options)
    attends_nothing = not out[-1].any() and bool(torch.isneginf(lse[-1]).all())
    found["ok"] = found["ok"] and _same_lse(lse, exact) and attends_nothing
    return found


def check_fixed_splits(k: TritonKernels, shape: Shape, page: int, format: Format) -> Row:
    """A row's bits are the same in a chunk beside another sequence and alone; `k` is invariant."""
    want = Want(rows=3, long=True)
    case = case_of(shape, page, format, want)
    q = _randn(_seeded(2), case.rows, shape.query_heads, shape.dim, dtype=want.dtype)
    scale = shape.dim**-0.5
    out, lse = k.paged_attention(q, case.arena, case.kv, case.plan, LAYER, scale)
    found = fair_error(q, case, out, scale, {"q_sinks": None, "sink_logits": None, "softcap": 0.0})
    same = True
    for part in case.parts:
        alone = make_plan([part._replace(start=0, length=1)], page)
        last = slice(part.start + part.length - 1, part.start + part.length)
        out_alone, lse_alone = k.paged_attention(q[last], case.arena, case.kv, alone, LAYER, scale)
        same = same and torch.equal(out_alone, out[last]) and torch.equal(lse_alone, lse[last])
    return {**found, "ok": found["ok"] and same, "same_bits": same}


# ---- writes -----------------------------------------------------------------------------------------------------


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor, exact: bool) -> Row:
    """Not one byte may differ, or at most one in ten thousand of those that were written."""
    differ, written = int((ours != theirs).sum()), int((theirs != 0xFF).sum())
    ok = written > 0 and differ <= (0 if exact else written // 10_000)
    return {"ok": ok, "bytes": written, "differ": differ}


def check_write(k: TritonKernels, shape: Shape, page: int, format: Format, dtype: torch.dtype = DTYPE) -> Row:
    """The bytes that new tokens leave. INT4's keys are rotated, a sum whose order is each implementation's own."""
    kv = layout(shape, page, 2, dtype, format)
    tokens = 2 * page + 3
    arena, frames = empty_pages(kv, 3)
    plan = make_plan([(0, tokens, tokens, frames)], page, format)
    g = _seeded(3)
    keys, values = (_randn(g, tokens, shape.heads, shape.dim, dtype=dtype) for _ in "kv")
    theirs = arena.clone()
    k.write_kv(keys, values, arena, kv, plan, LAYER)
    reference.write_kv(keys, values, theirs, kv, plan, LAYER)
    return same_bytes(arena, theirs, exact=format is not Format.INT4)


def check_convert(k: TritonKernels, kv: KVLayout, source: Format, target: Format) -> Row:
    """Pages rewritten in another format, all layers; a compiler may join a product and a sum, which rounds once less."""
    arena, frames = empty_pages(kv, 4)
    sources, targets = frames[:2], frames[2:]
    tokens = 2 * kv.page_tokens
    plan = make_plan([(0, tokens, tokens, sources)], kv.page_tokens, source)
    g = _seeded(4)
    for layer in range(kv.num_layers):
        keys = _randn(g, tokens, kv.num_kv_heads, kv.head_dim, dtype=kv.dtype)
        values = _randn(g, tokens, kv.num_kv_heads, kv.rope_dim or kv.head_dim, dtype=kv.dtype)
        reference.write_kv(keys, values, arena, replace(kv, write_format=source), plan, layer)
    theirs = arena.clone()
    k.convert_pages(arena, kv, sources, source, targets, target)
    reference.convert_pages(theirs, kv, sources, source, targets, target)
    return same_bytes(arena, theirs, exact=False)


# ---- latents ----------------------------------------------------------------------------------------------------


def _latent_pages(
    latents: Latents, format: Format, contexts: tuple[int, ...], dtype: torch.dtype
) -> tuple[KVLayout, torch.Tensor, list[PlanSequence]]:
    """Pages that torch wrote; each sequence has one row."""
    kv = latent_layout(latents, 2, dtype, format)
    pages = [-(-n // PAGE_LATENTS) for n in contexts]
    arena, frames = empty_pages(kv, sum(pages))
    g = _seeded(5)
    parts: list[PlanSequence] = []
    for i, (n, own) in enumerate(zip(contexts, np.split(frames, np.cumsum(pages)[:-1]), strict=True)):
        plan = make_plan([(0, n, n, own)], PAGE_LATENTS, format)
        rows, ropes = (_randn(g, n, width, dtype=dtype) for width in (latents.rank, latents.rope))
        reference.write_latents(rows, ropes, arena, kv, plan, LAYER)
        parts.append(PlanSequence(i, 1, n, own, np.full(len(own), format, np.uint8)))
    return kv, arena, parts


def check_latent(k: TritonKernels, latents: Latents, format: Format, dtype: torch.dtype = DTYPE) -> Row:
    """Absorbed attention of one row over a context that is split, and of one over less than a page.

    With fixed splits a row's bits are the same alone.
    """
    contexts = ((4 if DRY else LONG_PAGES) * PAGE_LATENTS + 9, 40)
    kv, arena, parts = _latent_pages(latents, format, contexts, dtype)
    plan = make_plan(parts, PAGE_LATENTS)
    q = _randn(_seeded(6), 2, latents.heads, latents.rank + latents.rope, dtype=dtype)
    scale = (latents.rank + latents.rope) ** -0.5
    out, lse = k.latent_attention(q, arena, kv, plan, LAYER, scale)
    torchs, exact = [], []
    for s, n in enumerate(contexts):
        latent, rope = reference.read_positions(arena, kv, plan, LAYER, s, 0, n)
        seen = torch.ones(1, n, dtype=torch.bool, device=DEVICE)
        for t, found in ((dtype, torchs), (torch.float64, exact)):
            keys, values = (
                x.to(t).expand(latents.heads, -1, -1) for x in (torch.cat([latent, rope], -1), latent)
            )
            found.append(torch_attention(q[s : s + 1].transpose(0, 1).to(t), keys, values, seen, scale))
    row = errors(out, torch.cat(torchs), torch.cat(exact))
    exact_lse = reference.latent_attention(q, arena, kv, plan, LAYER, scale)[1]
    row["ok"] = row["ok"] and _same_lse(lse, exact_lse)
    if k.invariant:
        alone = make_plan([parts[0]], PAGE_LATENTS)
        row["same_bits"] = torch.equal(k.latent_attention(q[:1], arena, kv, alone, LAYER, scale)[0], out[:1])
        row["ok"] = row["ok"] and row["same_bits"]
    return row


def check_write_latents(
    k: TritonKernels, latents: Latents, format: Format, dtype: torch.dtype = DTYPE
) -> Row:
    """The bytes that new tokens' latents and rope keys leave."""
    kv = latent_layout(latents, 2, dtype, format)
    tokens = 2 * PAGE_LATENTS + 3
    arena, frames = empty_pages(kv, 3)
    plan = make_plan([(0, tokens, tokens, frames)], PAGE_LATENTS, format)
    g = _seeded(7)
    rows, ropes = (_randn(g, tokens, width, dtype=dtype) for width in (latents.rank, latents.rope))
    theirs = arena.clone()
    k.write_latents(rows, ropes, arena, kv, plan, LAYER)
    reference.write_latents(rows, ropes, theirs, kv, plan, LAYER)
    return same_bytes(arena, theirs, exact=True)


def check_read_latents(k: TritonKernels, latents: Latents, dtype: torch.dtype = DTYPE) -> Row:
    """Positions from the middle of an FP8 page to the middle of a raw one, as they were written or as FP8 holds them."""
    kv = latent_layout(latents, 2, dtype)
    fp8, tokens = PAGE_LATENTS, 2 * PAGE_LATENTS + 20
    arena, frames = empty_pages(kv, 3)
    g = _seeded(8)
    rows, ropes = (_randn(g, tokens, width, dtype=dtype) for width in (latents.rank, latents.rope))
    for format, span in ((Format.FP8, slice(0, fp8)), (Format.RAW, slice(fp8, tokens))):
        plan = make_plan([(0, span.stop - span.start, span.stop, frames)], PAGE_LATENTS, format)
        reference.write_latents(rows[span], ropes[span], arena, replace(kv, write_format=format), plan, LAYER)
    codes = np.array([Format.FP8, Format.RAW, Format.RAW], np.uint8)
    plan = make_plan([PlanSequence(0, 1, tokens, frames, codes)], PAGE_LATENTS)
    first, last = 10, tokens - 3
    ours = k.read_latents(arena, kv, plan, LAYER, 0, first, last)
    theirs = reference.read_latents(arena, kv, plan, LAYER, 0, first, last)
    as_read = all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    as_written = torch.equal(ours[0][fp8 - first :], rows[fp8:last]) and torch.equal(
        ours[1], ropes[first:last]
    )
    return {"ok": as_read and as_written}


def check_dense(k: TritonKernels, dtype: torch.dtype = DTYPE) -> Row:
    """Prefill by expansion, in two pieces of keys, the second of which the first rows see nothing of."""
    rows, keys, heads, dk, dv = (20, 33, 2, 24, 16) if DRY else (200, 333, 16, 192, 128)
    g = _seeded(9)
    q, key, value = (_randn(g, n, heads, d, dtype=dtype) for n, d in ((rows, dk), (keys, dk), (keys, dv)))
    offset, scale, cut = keys - rows, dk**-0.5, keys // 2
    row: Row = {"ok": True, "error": 0.0, "torch_error": 0.0}
    pieces = []
    for span in (slice(0, cut), slice(cut, keys)):
        part, here = (x[span] for x in (key, value)), offset - span.start
        own_keys, own_values = part
        out, lse = k.dense_attention(q, own_keys, own_values, here, scale)
        _, exact_lse = reference.dense_attention(q, own_keys, own_values, here, scale)
        seen = torch.arange(len(own_keys), device=DEVICE)[None] <= (
            torch.arange(rows, device=DEVICE)[:, None] + here
        )
        theirs, exact = (
            torch_attention(*(x.to(t).transpose(0, 1) for x in (q, own_keys, own_values)), seen, scale)
            for t in (dtype, torch.float64)
        )
        found = errors(out, theirs, exact)
        row["ok"] = row["ok"] and found["ok"] and _same_lse(lse, exact_lse)
        row |= {name: max(row[name], found[name]) for name in ("error", "torch_error")}
        pieces.append((out.float(), lse))
    whole, _ = reference.dense_attention(q.float(), key.float(), value.float(), offset, scale)
    merged = (merge(pieces)[0] - whole).abs().max().item()
    row["ok"] = row["ok"] and merged <= 2 * row["torch_error"] + 1e-6
    return row


# ---- whole pages ------------------------------------------------------------------------------------------------


def check_gather(shape: Shape) -> Row:
    """Pages to contiguous staging and back, to other frames."""
    kv = layout(shape, 64, 2)
    step = units(kv, Format.FP8)
    arena = torch.randint(0, 255, (8 * step + 1, kv.unit_bytes), dtype=torch.uint8, device=DEVICE)
    frames = np.array([5, 0, 3], np.int32) * step
    staged = gather_pages(arena, kv, frames, Format.FP8)
    ok = torch.equal(staged, reference.gather_pages(arena, kv, frames, Format.FP8))
    theirs = arena.clone()
    back = np.array([1, 7, 2], np.int32) * step
    scatter_pages(staged, arena, kv, back, Format.FP8)
    reference.scatter_pages(staged, theirs, kv, back, Format.FP8)
    return {"ok": ok and torch.equal(arena, theirs)}


def check_engine(shape: Shape) -> Row:
    """Blocks of a layer-first engine's caches become pages, and blocks elsewhere in the caches; all else stays."""
    kv = layout(shape, 16, 2)
    caches = _randn(_seeded(10), 2, 2, 5, 16, shape.heads, shape.dim, dtype=kv.dtype)
    expected = caches.clone()
    addresses = torch.tensor([caches[n, part].data_ptr() for n in range(2) for part in range(2)])
    block_bytes = caches.stride(2) * kv.dtype.itemsize
    arena, frames = empty_pages(kv, 3)
    before = arena.clone()
    taken, given = np.array([4, 0], np.int32), np.array([1, 3], np.int32)
    engine_to_pages(addresses.to(DEVICE), block_bytes, taken, arena, kv, frames[:2])
    for layer in range(2):
        at = torch.from_numpy(frames[:2].astype(np.int64)).to(DEVICE)
        keys, values = (caches[layer, part][taken.tolist()].transpose(1, 2) for part in range(2))
        reference.write_pages(before, kv, Format.RAW, layer, at, keys, values)
    pages_to_engine(addresses.to(DEVICE), block_bytes, given, arena, kv, frames[:2])
    expected[:, :, given.tolist()] = expected[:, :, taken.tolist()]
    return {"ok": torch.equal(arena, before) and torch.equal(caches, expected)}
