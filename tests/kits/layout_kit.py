"""Page layouts for kernel tests, from the same PageSpec that the tiers use."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvtier.kernels.ops import Format, KVLayout, Record
from kvtier.tier.pages.page import PageFormat, PageSpec

RAW = {torch.float32: PageFormat.FP32, torch.bfloat16: PageFormat.BF16, torch.float16: PageFormat.FP16}
STORED = {
    Format.FP8: PageFormat.FP8,
    Format.INT8: PageFormat.INT8,
    Format.K8V4: PageFormat.K8V4,
    Format.INT4: PageFormat.INT4,
    Format.INT4C: PageFormat.INT4C,
}


def make_layout(
    *,
    heads: int = 2,
    dim: int = 64,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    formats: Iterable[Format] = tuple(Format),
    layers: int = 2,
    write_format: Format = Format.RAW,
    unit_bytes: int = 1024,
    rope_dim: int = 0,
) -> KVLayout:
    """Pages of these formats, in units of `unit_bytes` (0: the size of the largest page)."""
    records = {}
    for format in formats:
        spec = PageSpec(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=dim,
            page_tokens=page_tokens,
            format=STORED.get(format, RAW[dtype]),
            rope_dim=rope_dim,
            rope_format=RAW[dtype],
        )
        _, v, k_scales, v_scales = (section.offset for section in spec.sections)
        records[format] = Record(v, k_scales, v_scales, spec.record_bytes)
    largest = layers * max(record.nbytes for record in records.values())
    return KVLayout(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        page_tokens=page_tokens,
        dtype=dtype,
        unit_bytes=unit_bytes or largest,
        records=records,
        write_format=write_format,
        rope_dim=rope_dim,
    )


def poisoned_arena(layout: KVLayout, pages: int) -> torch.Tensor:
    """uint8 [units, unit bytes] with room for so many of the largest pages; every byte is 0xff, which reads as NaN."""
    largest = max(layout.page_bytes(format) for format in layout.records)
    return torch.full(
        (pages * -(-largest // layout.unit_bytes) + 1, layout.unit_bytes), 0xFF, dtype=torch.uint8
    )


def spread_frames(layout: KVLayout, pages: int, seed: int = 0) -> torch.Tensor:
    """First units of so many pages of any format, in scattered order: int32 [pages]."""
    largest = max(layout.page_bytes(format) for format in layout.records)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    return (order * -(-largest // layout.unit_bytes)).to(torch.int32)
