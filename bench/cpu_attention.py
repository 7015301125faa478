#!/usr/bin/env python3
"""Paged attention on the CPU: our compiled kernels against plain torch, and quantized pages against bfloat16 ones.

  bench/cpu_attention.py [--threads 2] [--rounds 9] [--json FILE]

All layers' attention of one decode step of a model of SmolLM2-135M's shape: 30 layers, 9 query heads over 3 KV heads of
64 numbers, bfloat16. Pages lie scattered in the arena, as they do in use. Contenders take turns in each round; the
exit code is 1 when a goal is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from common import Figure, argument_parser, finish, interleave

from kvtier.kernels import reference
from kvtier.kernels.memory import huge_bytes
from kvtier.kernels.ops import (
    Format,
    Kernels,
    KVLayout,
    NativeKernels,
    PlanSequence,
    Record,
    TorchKernels,
    make_plan,
)
from kvtier.tier.pages.page import PageFormat, PageSpec
from kvtier.workers.models.files.store import default_cache

LAYERS, QUERY_HEADS, HEADS, DIM = 30, 9, 3, 64
FORMATS = {
    Format.RAW: PageFormat.BF16,
    Format.FP8: PageFormat.FP8,
    Format.INT8: PageFormat.INT8,
    Format.K8V4: PageFormat.K8V4,
    Format.INT4: PageFormat.INT4,
    Format.INT4C: PageFormat.INT4C,
}
DISTINCT_PAGES = 8  # encoded once; the other pages are copies, whose numbers cost as much to read
TORCH_GOAL = 4.0  # the compiled kernels' speed over torch's, batch 1, context 512
INT4C_GOAL = 2.0  # over bfloat16 pages' speed, batch 8, context 4,096, pages of 64 tokens


def make_layout(format: Format, page_tokens: int) -> KVLayout:
    """Pages of one format, one to a unit."""
    spec = PageSpec(LAYERS, HEADS, DIM, page_tokens=page_tokens, format=FORMATS[format])
    _, v, k_scales, v_scales = (section.offset for section in spec.sections)
    records = {format: Record(v, k_scales, v_scales, spec.record_bytes)}
    return KVLayout(
        LAYERS, HEADS, DIM, page_tokens, torch.bfloat16, spec.nbytes, records, write_format=format
    )


def make_arena(layout: KVLayout, format: Format, pages: int) -> torch.Tensor:
    """Pages of random keys and values."""
    arena = huge_bytes(pages * layout.unit_bytes).view(pages, layout.unit_bytes)
    first = torch.arange(DISTINCT_PAGES)
    g = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        shape = (DISTINCT_PAGES, HEADS, layout.page_tokens, DIM)
        k, v = (torch.randn(*shape, generator=g) for _ in range(2))
        reference.write_pages(arena, layout, format, layer, first, k, v)
    for at in range(DISTINCT_PAGES, pages, DISTINCT_PAGES):
        arena[at : at + DISTINCT_PAGES] = arena[: min(DISTINCT_PAGES, pages - at)]
    return arena


def decode_step(
    kernels: Kernels, format: Format, page_tokens: int, batch: int, context: int
) -> Callable[[], None]:
    """The attention of all layers for one new token of each sequence."""
    layout = make_layout(format, page_tokens)
    pages = context // page_tokens
    arena = make_arena(layout, format, batch * pages)
    frames = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    plan = make_plan([PlanSequence(b, 1, context, frames[b]) for b in range(batch)], page_tokens, format)
    q = torch.randn(batch, QUERY_HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()

    def step() -> None:
        for layer in range(LAYERS):
            kernels.paged_attention(q, arena, layout, plan, layer, DIM**-0.5)

    return step


def compare(
    contenders: dict[str, Callable[[], None]], baseline: str, goals: dict[str, float], rounds: int
) -> list[Figure]:
    """Steps a second of each contender, and how many times the baseline's that is."""
    seconds = interleave(contenders, rounds)
    figures = []
    for name, samples in seconds.items():
        own = None if name == baseline else Figure("", samples, "").value
        share = None if own is None else Figure("", seconds[baseline], "").value / own
        of = "" if name == baseline else baseline
        figures.append(Figure(name, [s * 1e3 for s in samples], "ms", of, share, goals.get(name)))
    return figures


def main() -> int:
    """Print the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = NativeKernels(default_cache(), options.threads)
    plain = TorchKernels()
    tables = {}
    with torch.inference_mode():
        for page_tokens in (16, 64):
            contenders = {
                "torch": decode_step(plain, Format.RAW, page_tokens, 1, 512),
                native.name: decode_step(native, Format.RAW, page_tokens, 1, 512),
            }
            title = f"batch 1, context 512, bfloat16 pages of {page_tokens} tokens"
            tables[title] = compare(contenders, "torch", {native.name: TORCH_GOAL}, options.rounds)
        for page_tokens in (16, 64):
            contenders = {FORMATS[f].value: decode_step(native, f, page_tokens, 8, 4096) for f in FORMATS}
            title = f"batch 8, context 4,096, pages of {page_tokens} tokens, {native.name}"
            goals = {PageFormat.INT4C.value: INT4C_GOAL} if page_tokens == 64 else {}
            tables[title] = compare(contenders, PageFormat.BF16.value, goals, options.rounds)
    native.close()
    return finish(tables, options.json)


if __name__ == "__main__":
    sys.exit(main())
