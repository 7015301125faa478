"""Says where keys and values lie in the page arena, and which rows of a step attend what. Holds no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

N = TypeVar("N", np.int32, np.uint8)

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FormatArray = npt.NDArray[np.uint8]

MAX_CONTEXT = 1 << 30  # so that the sum of two positions fits in the kernels' 32 bits
MIN_QUANTIZED_PAGE_TOKENS = 16


class Format(IntEnum):
    """How a page stores its numbers; the codes are those of all kernels. tier/pages/page.py describes the formats."""

    RAW = 0  # in the layout's dtype, as they are
    FP8 = 1
    INT8 = 2
    K8V4 = 3
    INT4 = 4
    INT4C = 5


@dataclass(frozen=True, slots=True)
class Record:
    """Byte offsets of one layer's record in a page of one format: K codes at 0, then these. For latents see KVLayout."""

    v: int
    k_scales: int
    v_scales: int
    nbytes: int  # distance to the next layer's record


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pages of one layer group, in every format that it may have at once.

    An arena is uint8 [units, unit bytes]; frame f begins at unit f, and a page reaches over as many units as it needs.
    New rows are written as `write_format`. `rope_dim` above 0 means latent attention: `num_kv_heads` is 1, `head_dim`
    the latent's rank, latents [P, head_dim] lie at 0, rope keys [P, rope_dim] in `dtype` at `v`, and in FP8 pages the
    latents' scales [P] at `k_scales`. Raises ValueError for a shape that the kernels don't take.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype  # what raw pages store and what queries, new keys and values come in
    unit_bytes: int
    records: dict[Format, Record] = field(hash=False)
    write_format: Format = Format.RAW
    rope_dim: int = 0

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.rope_dim % 2:
            raise ValueError(f"head_dim and rope_dim must be even, got {self.head_dim} and {self.rope_dim}")
        tokens = self.page_tokens
        if not self.is_raw and (
            tokens < MIN_QUANTIZED_PAGE_TOKENS or tokens & (tokens - 1) or self.head_dim % 8
        ):
            raise ValueError(
                f"quantized pages need a power of two from {MIN_QUANTIZED_PAGE_TOKENS} up as page_tokens and a head_dim"
                f" that 8 divides, got {tokens} and {self.head_dim}"
            )

    def page_bytes(self, format: Format) -> int:
        """Bytes of a page of all layers."""
        return self.num_layers * self.records[format].nbytes

    def page_units(self, format: Format) -> int:
        """Units of the arena that a page of all layers reaches over."""
        return -(-self.page_bytes(format) // self.unit_bytes)

    @property
    def is_raw(self) -> bool:
        """No page is quantized."""
        return set(self.records) == {Format.RAW}


class PlanSequence(NamedTuple):
    """One sequence's part of a step: rows [start, start + length), the last of which is at position context - 1.

    `frames` are its pages in order. With a window: first the `sink_pages` pages that hold its sinks, then the pages
    from page `first_page` on (at least `sink_pages`); without one: all pages from 0. `formats` (codes of Format, by
    page) None: all pages are in the layout's write_format. A row at position t attends the keys j <= t with
    j > t - window or j < sinks; window 0 means all.
    """

    start: int
    length: int
    context: int
    frames: IntArray
    formats: FormatArray | None = None
    sink_pages: int = 0
    first_page: int = 0
    window: int = 0
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class FixedShape:
    """Sizes of the device tables of decode steps that replay one captured graph, whatever the steps hold.

    `rows` are the rows of the batch, of which the last may belong to no sequence; `formats` those that have a launch;
    `pages` the places for page numbers.
    """

    rows: int
    formats: tuple[Format, ...]
    pages: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The sequences of one step and one layer group; made once, shared by all layers.

    Fields as in PlanSequence. Page i of sequence s is entry first_frames[s] + (i if i < sink_pages[s] else
    sink_pages[s] + i - first_pages[s]) of `frames` and `formats`. A row that belongs to no sequence attends nothing.
    """

    starts: IntArray  # [sequences]
    lengths: IntArray  # [sequences]
    contexts: IntArray  # [sequences]
    first_frames: IntArray  # [sequences]
    frames: IntArray  # [all pages]
    formats: FormatArray  # [all pages]
    sink_pages: IntArray  # [sequences]
    first_pages: IntArray  # [sequences]
    windows: IntArray  # [sequences]
    sinks: IntArray  # [sequences]
    shape: FixedShape | None = None  # of decode steps: tables are padded to it

    @property
    def num_sequences(self) -> int:
        """How many sequences take part."""
        return len(self.starts)

    def entry(self, sequence: int, page: int) -> int:
        """Where in `frames` and `formats` a sequence's page is named."""
        sinks, first = int(self.sink_pages[sequence]), int(self.first_pages[sequence])
        return int(self.first_frames[sequence]) + (page if page < sinks else sinks + page - first)

    def entries(self, sequences: LongArray, pages: LongArray) -> LongArray:
        """`entry` of many pages, each of the sequence beside it."""
        sinks = self.sink_pages[sequences].astype(np.int64)
        skipped = np.where(pages < sinks, 0, self.first_pages[sequences] - sinks)
        return self.first_frames[sequences] + pages - skipped


def make_plan(
    sequences: Iterable[PlanSequence | tuple[int, int, int, IntArray]],
    page_tokens: int,
    write_format: Format = Format.RAW,
) -> StepPlan:
    """A plan of these sequences. Raises ValueError when one names too few frames for what its rows attend."""
    parts = [PlanSequence(*s) for s in sequences]
    frames: list[IntArray] = []
    formats: list[FormatArray] = []
    firsts: list[int] = []
    total = 0
    for part in parts:
        need = _pages_needed(part, page_tokens)
        firsts.append(total)
        frames.append(part.frames[:need])
        if part.formats is None:
            formats.append(np.full(need, write_format, np.uint8))
        else:
            formats.append(part.formats[:need])
        total += need
    return StepPlan(
        starts=_ints([p.start for p in parts]),
        lengths=_ints([p.length for p in parts]),
        contexts=_ints([p.context for p in parts]),
        first_frames=_ints(firsts),
        frames=_joined(frames, np.int32),
        formats=_joined(formats, np.uint8),
        sink_pages=_ints([p.sink_pages for p in parts]),
        first_pages=_ints([max(p.first_page, p.sink_pages) for p in parts]),
        windows=_ints([p.window for p in parts]),
        sinks=_ints([p.sinks for p in parts]),
    )


def _pages_needed(part: PlanSequence, page_tokens: int) -> int:
    pages = -(-part.context // page_tokens)
    need = min(pages, part.sink_pages) + max(0, pages - part.first_page)
    if part.length > part.context or len(part.frames) < need:
        raise ValueError(
            f"{part.context} tokens, {part.length} of them new, need {need} pages, got {len(part.frames)}"
        )
    if part.formats is not None and len(part.formats) < need:
        raise ValueError(f"{need} pages need as many formats, got {len(part.formats)}")
    if part.first_page < part.sink_pages:
        raise ValueError(f"first_page {part.first_page} lies among the {part.sink_pages} pages of sinks")
    lowest = max(0, part.context - part.length - part.window + 1) if part.window else 0
    if part.first_page > part.sink_pages and part.first_page * page_tokens > lowest:
        raise ValueError(
            f"a row attends position {lowest}, but no page from {part.sink_pages} to {part.first_page - 1} is named"
        )
    if part.first_page > part.sink_pages and part.sinks > part.sink_pages * page_tokens:
        raise ValueError(f"{part.sinks} sinks don't fit in {part.sink_pages} pages")
    return need


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)


def _joined(parts: Sequence[npt.NDArray[N]], dtype: type[N]) -> npt.NDArray[N]:
    return np.ascontiguousarray(np.concatenate(parts), dtype) if parts else np.zeros(0, dtype)


def check_rows(x: torch.Tensor, arena: torch.Tensor, layout: KVLayout, heads: int | None = None) -> None:
    """Raise ValueError unless x [rows, heads, head_dim] and the arena are what `layout` says.

    `heads` None: any multiple of the KV heads.
    """
    if layout.rope_dim:
        raise ValueError("the pages hold latents: use write_latents and latent_attention")
    if x.dtype != layout.dtype:
        raise ValueError(f"rows must be {layout.dtype} like the layout, got {x.dtype}")
    if x.dim() != 3 or x.shape[2] != layout.head_dim:
        raise ValueError(f"rows must be [rows, heads, {layout.head_dim}], got {list(x.shape)}")
    if x.shape[1] % layout.num_kv_heads or x.shape[1] != (heads or x.shape[1]):
        raise ValueError(f"heads must be {heads or f'a multiple of {layout.num_kv_heads}'}, got {x.shape[1]}")
    check_arena(arena, layout)


def check_attention(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: KVLayout,
    q_sinks: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    softcap: float,
) -> None:
    """Raise ValueError unless q [rows, Hq, D], paged_attention's options and the arena are what `layout` says."""
    check_rows(q, arena, layout)
    if q_sinks is not None and (q_sinks.shape != q.shape or q_sinks.dtype != q.dtype):
        raise ValueError(
            f"q_sinks must be {q.dtype} {list(q.shape)}, got {q_sinks.dtype} {list(q_sinks.shape)}"
        )
    if sink_logits is not None and sink_logits.shape != q.shape[1:2]:
        raise ValueError(f"sink_logits must be [{q.shape[1]}], got {list(sink_logits.shape)}")
    if not softcap >= 0:
        raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")


def check_new_rows(k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, layout: KVLayout) -> None:
    """Raise ValueError unless k and v, both [rows, H, D], and the arena are what `layout` says."""
    check_rows(k, arena, layout, layout.num_kv_heads)
    check_rows(v, arena, layout, layout.num_kv_heads)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have as many rows as each other, got {len(k)} and {len(v)}")


def check_arena(arena: torch.Tensor, layout: KVLayout) -> None:
    """Raise ValueError unless the arena is what `layout` says."""
    if arena.dtype != torch.uint8 or arena.dim() != 2 or arena.shape[1] != layout.unit_bytes:
        raise ValueError(
            f"arena must be uint8 [units, {layout.unit_bytes}], got {arena.dtype} {list(arena.shape)}"
        )
    if not arena.is_contiguous():
        raise ValueError(f"arena must be contiguous, got strides {arena.stride()}")


def check_latents(
    latents: torch.Tensor, rope_keys: torch.Tensor, arena: torch.Tensor, layout: KVLayout
) -> None:
    """Raise ValueError unless latents [rows, R], rope keys [rows, E] and the arena are what `layout` says."""
    if not layout.rope_dim:
        raise ValueError("the pages hold keys and values: use write_kv and paged_attention")
    rows = len(latents)
    if latents.shape != (rows, layout.head_dim) or rope_keys.shape != (rows, layout.rope_dim):
        raise ValueError(
            f"latents and rope keys must be [rows, {layout.head_dim}] and [rows, {layout.rope_dim}], "
            f"got {list(latents.shape)} and {list(rope_keys.shape)}"
        )
    if latents.dtype != layout.dtype or rope_keys.dtype != layout.dtype:
        raise ValueError(f"latents must be {layout.dtype}, got {latents.dtype} and {rope_keys.dtype}")
    check_arena(arena, layout)


def check_latent_queries(q: torch.Tensor, arena: torch.Tensor, layout: KVLayout) -> None:
    """Raise ValueError unless q [rows, Hq, R + E] and the arena are what `layout` says."""
    if not layout.rope_dim:
        raise ValueError("the pages hold keys and values: use paged_attention")
    width = layout.head_dim + layout.rope_dim
    if q.dim() != 3 or q.shape[2] != width or q.dtype != layout.dtype:
        raise ValueError(
            f"queries must be {layout.dtype} [rows, heads, {width}], got {q.dtype} {list(q.shape)}"
        )
    check_arena(arena, layout)


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless q [rows, H, Dk], k [keys, H, Dk] and v [keys, H, Dv] fit together."""
    fits = q.dim() == k.dim() == v.dim() == 3 and q.shape[1:] == k.shape[1:] and k.shape[:2] == v.shape[:2]
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "q, k and v must be [rows, H, Dk], [keys, H, Dk] and [keys, H, Dv] of one dtype, got "
            f"{q.dtype} {list(q.shape)}, {k.dtype} {list(k.shape)}, {v.dtype} {list(v.shape)}"
        )


_BY_SEQUENCE = (
    "starts",
    "lengths",
    "contexts",
    "first_frames",
    "sink_pages",
    "first_pages",
    "windows",
    "sinks",
)


def check_plan(
    plan: StepPlan, rows: int | None, arena: torch.Tensor, layout: KVLayout, *, writes: bool = False
) -> None:
    """Raise ValueError unless each access that the plan leads to lies in the arena and among the step's rows.

    `rows` None: the rows are not accessed. `writes`: new rows are written, all into pages of the layout's write_format.
    What an array holds may be anything, so all arithmetic is in int64.
    """
    numbers = {name: getattr(plan, name).astype(np.int64) for name in _BY_SEQUENCE}
    sizes = {name: len(array) for name, array in numbers.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"a plan's arrays by sequence must be of one length, got {sizes}")
    if len(plan.frames) != len(plan.formats):
        raise ValueError(f"{len(plan.frames)} frames need as many formats, got {len(plan.formats)}")
    if plan.num_sequences:
        _check_rows_of_sequences(numbers, rows)
        _check_pages_of_sequences(numbers, layout.page_tokens, len(plan.frames))
    for code in np.unique(plan.formats).tolist():
        if code not in layout.records:
            raise ValueError(f"the layout has no pages of format {code}")
        check_frames(plan.frames[plan.formats == code], Format(code), arena, layout)
    if writes:
        _check_written(plan, layout)


def _check_rows_of_sequences(numbers: dict[str, LongArray], rows: int | None) -> None:
    starts, lengths, contexts = (numbers[name] for name in ("starts", "lengths", "contexts"))
    if int(lengths.min()) < 0 or bool((contexts < lengths).any()):
        raise ValueError("a sequence has more rows than context, or less than none")
    if int(contexts.max()) > MAX_CONTEXT:
        raise ValueError(f"a sequence may have {MAX_CONTEXT} tokens, got {contexts.max()}")
    ends = starts + lengths
    if rows is not None and (int(starts.min()) < 0 or int(ends.max()) > rows):
        raise ValueError(
            f"a sequence's rows {starts.min()} to {ends.max()} lie outside the step's {rows} rows"
        )


def _check_pages_of_sequences(numbers: dict[str, LongArray], page_tokens: int, num_frames: int) -> None:
    """`frames` has an entry for each page that a row attends or writes."""
    windows, sinks, contexts = (numbers[name] for name in ("windows", "sinks", "contexts"))
    kept, first, at = (numbers[name] for name in ("sink_pages", "first_pages", "first_frames"))
    if min(int(a.min()) for a in (kept, first, windows, sinks, at)) < 0:
        raise ValueError("windows, sinks and pages can't be negative")
    pages = -(-contexts // page_tokens)
    lowest = np.where(windows > 0, np.maximum(contexts - numbers["lengths"] - windows + 1, 0), 0)
    gap = (first != kept) & (pages > kept)
    if bool((gap & (first * page_tokens > lowest)).any()):
        raise ValueError("a row attends pages that its sequence doesn't name")
    if bool((first < kept).any()) or bool((gap & (np.minimum(sinks, lowest) > kept * page_tokens)).any()):
        raise ValueError("a sequence's sinks don't fit in its pages of sinks")
    ends = at + np.where(gap, kept + pages - first, pages)
    if int(ends.max()) > num_frames:
        raise ValueError(
            f"a sequence has fewer frames than its context needs: the last of {num_frames} would be {ends.max()}"
        )


def _check_written(plan: StepPlan, layout: KVLayout) -> None:
    """New rows go to pages of the layout's write_format, which is written token by token."""
    if layout.write_format is Format.INT4C:
        raise ValueError("INT4C needs a whole page at once; write in an 8-bit format and convert")
    if layout.write_format not in layout.records:
        raise ValueError(f"the layout has no pages of its write_format {layout.write_format.name}")
    lengths, contexts = plan.lengths.astype(np.int64), plan.contexts.astype(np.int64)
    first = (contexts - lengths) // layout.page_tokens
    counts = np.where(lengths > 0, -(-contexts // layout.page_tokens) - first, 0)
    sequences = np.repeat(np.arange(plan.num_sequences), counts)
    pages = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    formats = plan.formats[plan.entries(sequences, pages)]
    wrong = np.flatnonzero(formats != layout.write_format)
    if len(wrong):
        raise ValueError(
            f"rows are written as {layout.write_format.name}, page {pages[wrong[0]]} is"
            f" {Format(int(formats[wrong[0]])).name}"
        )


def check_layer(layer: int, layout: KVLayout) -> None:
    """Raise ValueError unless the layout has this layer."""
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"there is no layer {layer} of {layout.num_layers}, which count from 0")


def check_span(plan: StepPlan, layout: KVLayout, sequence: int, first: int, last: int) -> None:
    """Raise ValueError unless the plan names a page for each position in [first, last) of a sequence of latents."""
    if not layout.rope_dim:
        raise ValueError("the pages hold keys and values, no latents")
    if not 0 <= sequence < plan.num_sequences or not 0 <= first <= last <= int(plan.contexts[sequence]):
        raise ValueError(
            f"positions {first} to {last} of sequence {sequence}: there are {plan.num_sequences} sequences of"
            f" {plan.contexts.tolist()} tokens"
        )
    kept, named = int(plan.sink_pages[sequence]), int(plan.first_pages[sequence])
    pages = range(first // layout.page_tokens, -(-last // layout.page_tokens))
    if first < last and max(pages.start, kept) < min(pages.stop, named):
        raise ValueError(
            f"pages {kept} to {named - 1} of sequence {sequence} have left its window, positions {first} to"
            f" {last - 1} lie in pages {pages.start} to {pages.stop - 1}"
        )


def check_frames(frames: IntArray, format: Format, arena: torch.Tensor, layout: KVLayout) -> None:
    """Raise ValueError unless the layout has pages of this format and each frame has room for one."""
    if format not in layout.records:
        raise ValueError(f"the layout has no pages of format {format.name}")
    last = (arena.numel() - layout.page_bytes(format)) // layout.unit_bytes
    if len(frames) and (int(frames.min()) < 0 or int(frames.max()) > last):
        raise ValueError(f"{format.name} frames must be in [0, {last}], got {frames.min()} to {frames.max()}")


def check_apart(what: str, places: IntArray, units: int) -> None:
    """Raise ValueError where things of so many units, which begin at `places`, overlap each other."""
    at = np.sort(places.astype(np.int64))
    near = np.flatnonzero(np.diff(at) < units)
    if len(near):
        raise ValueError(
            f"{what} that are written must differ by {units} or more, got {at[near[0]]} and {at[near[0] + 1]}"
        )


def check_conversion(
    arena: torch.Tensor,
    layout: KVLayout,
    sources: IntArray,
    source_format: Format,
    targets: IntArray,
    target_format: Format,
) -> None:
    """Raise ValueError unless the layout has both formats and all pages lie in the arena, none that is written over another."""
    check_arena(arena, layout)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source pages can't become {len(targets)} target pages")
    check_frames(sources, source_format, arena, layout)
    check_frames(targets, target_format, arena, layout)
    source_units, target_units = layout.page_units(source_format), layout.page_units(target_format)
    check_apart("target frames", targets, target_units)
    at, written = sources.astype(np.int64), np.sort(targets.astype(np.int64))
    # Targets don't overlap, so one that a source overlaps is the last to begin before the source's end.
    before = np.searchsorted(written, at + source_units) - 1
    overlaps = (before >= 0) & (written[before] + target_units > at)
    if bool(overlaps.any()):
        i = int(np.argmax(overlaps))
        raise ValueError(
            "each page needs a target frame of its own, in which no source lies, got source"
            f" {at[i]} of {source_units} units and target {written[before[i]]} of {target_units}"
        )
