"""What the names of cache formats in a config mean: recipes, the formats' codes in kernels, and pages as kernels see them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvtier.kernels.ops import Format, KVLayout, Record
from kvtier.tier.pages.page import MIN_QUANTIZED_PAGE_TOKENS, PageFormat, PageSpec
from kvtier.tier.pages.recipe import DECAY_STRIDE_TOKENS, Recipe

MIXED_UNIT_BYTES = 1024  # an arena's unit where pages of several sizes share it

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
RAW_FORMATS = {"float32": PageFormat.FP32, "bfloat16": PageFormat.BF16, "float16": PageFormat.FP16}
FORMAT_CODES: dict[PageFormat, Format] = {
    PageFormat.FP32: Format.RAW,
    PageFormat.FP16: Format.RAW,
    PageFormat.BF16: Format.RAW,
    PageFormat.FP8: Format.FP8,
    PageFormat.INT8: Format.INT8,
    PageFormat.K8V4: Format.K8V4,
    PageFormat.INT4: Format.INT4,
    PageFormat.INT4C: Format.INT4C,
}
LOSSY_FORMATS = {  # by the names that a config gives them
    "fp8": PageFormat.FP8,
    "int8": PageFormat.INT8,
    "k8v4": PageFormat.K8V4,
    "int4": PageFormat.INT4,
    "int4c": PageFormat.INT4C,
}
CACHE_FORMATS = ("auto", *LOSSY_FORMATS, "timedecay")


@dataclass(frozen=True)
class LayerGroup:
    """The layers that share one kind of attention, and so one chain of pages.

    `layers` are the model's layers in the order of their records in a page. `window` is the model's own, 0 means full
    attention. `specs` are all formats that the group's pages may have.
    """

    layers: tuple[int, ...]
    window: int
    specs: dict[PageFormat, PageSpec] = field(hash=False)


def raw_format(dtype: str) -> PageFormat:
    """What pages of plain numbers are in a model of this dtype. Raises ValueError for a dtype that pages can't have."""
    if dtype not in RAW_FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(RAW_FORMATS)}, got {dtype!r}")
    return RAW_FORMATS[dtype]


def choose_recipe(
    cache_format: str,
    *,
    raw: PageFormat,
    eight_bit: PageFormat,
    page_tokens: int,
    recent_tokens: int,
    decay_sinks: int,
) -> Recipe:
    """The recipe of a config's name; `eight_bit` is what this device writes where the name leaves it open.

    `recent_tokens` and `decay_sinks` are those of timedecay; the former is rounded up to whole pages. Raises ValueError.
    """
    if cache_format not in CACHE_FORMATS:
        raise ValueError(f"cache.format must be one of {', '.join(CACHE_FORMATS)}, got {cache_format!r}")
    if cache_format == "auto":
        return Recipe(raw)
    _check_page_tokens(f"cache.format {cache_format}", page_tokens)
    stride = max(DECAY_STRIDE_TOKENS, page_tokens)
    if cache_format == "timedecay":
        recent = -(-recent_tokens // page_tokens) * page_tokens
        return Recipe(eight_bit, PageFormat.INT4C, recent, decay_sinks, stride)
    if cache_format == "int4c":
        return Recipe(eight_bit, PageFormat.INT4C, stride_tokens=stride)
    return Recipe(LOSSY_FORMATS[cache_format])


def choose_l4_format(l4_format: str, page_tokens: int) -> PageFormat | None:
    """What tier L4 keeps instead of L1's format; None for the same. Raises ValueError."""
    if not l4_format:
        return None
    if l4_format not in LOSSY_FORMATS:
        raise ValueError(
            f"tiers.l4.format must be empty or one of {', '.join(LOSSY_FORMATS)}, got {l4_format!r}"
        )
    _check_page_tokens(f"tiers.l4.format {l4_format}", page_tokens)
    return LOSSY_FORMATS[l4_format]


def _check_page_tokens(what: str, page_tokens: int) -> None:
    if page_tokens < MIN_QUANTIZED_PAGE_TOKENS:
        raise ValueError(
            f"{what} needs pages of at least {MIN_QUANTIZED_PAGE_TOKENS} tokens, page_tokens is {page_tokens}"
        )


def unit_bytes_of(groups: tuple[LayerGroup, ...]) -> int:
    """Bytes of an arena's unit: the page where all pages have one size, else MIXED_UNIT_BYTES."""
    sizes = {spec.nbytes for group in groups for spec in group.specs.values()}
    return sizes.pop() if len(sizes) == 1 else MIXED_UNIT_BYTES


def largest_page_bytes(groups: tuple[LayerGroup, ...]) -> int:
    """Bytes of the largest page of any group and format."""
    return max(spec.nbytes for group in groups for spec in group.specs.values())


def layout_of(group: LayerGroup, dtype: torch.dtype, unit_bytes: int, write: PageFormat) -> KVLayout:
    """The same pages, as the kernels see them; new rows are written as `write`."""
    spec = group.specs[write]
    return KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_tokens=spec.page_tokens,
        dtype=dtype,
        unit_bytes=unit_bytes,
        records={FORMAT_CODES[format]: _record(spec) for format, spec in group.specs.items()},
        write_format=FORMAT_CODES[write],
        rope_dim=spec.rope_dim,
    )


def _record(spec: PageSpec) -> Record:
    _, v, k_scales, v_scales = (section.offset for section in spec.sections)
    return Record(v, k_scales, v_scales, spec.record_bytes)
