"""Cuts the attention of a step's rows into work items of about equal cost. Made once a step, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.layout import FixedShape, Format, StepPlan
from kvtier.kernels.plans import ShapeExceeded

Ints = npt.NDArray[np.integer[Any]]

# row, index in `pages` of the sequence's page 0, first token, end token, slot, whether keys are sinks
ITEM_FIELDS = 6
DIRECT = -1  # the slot of an item that is all of its row: it writes the result itself


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Ranges of tokens of one row and one format each, and where their results are joined. Tensors on the device."""

    by_format: tuple[tuple[Format, torch.Tensor], ...]  # int32 [n, ITEM_FIELDS], long ones first
    pages: torch.Tensor  # int32: the plan's frames
    rows: torch.Tensor  # int32: rows that `combine` writes, those that attend nothing among them
    indptr: torch.Tensor  # int32 [len(rows) + 1]: their slots
    num_slots: int


def work_items(
    plan: StepPlan,
    page_tokens: int,
    split_tokens: int,
    num_rows: int,
    device: torch.device,
    *,
    separate_sinks: bool = False,
    written_elsewhere: npt.NDArray[np.bool_] | None = None,
    most_items: int = 0,
) -> WorkItems:
    """Items of the rows' tokens, cut at multiples of `split_tokens` (a multiple of page_tokens) and between formats.

    A row's items depend on its own tokens and `split_tokens` alone. With `separate_sinks`, the sinks of sequences with
    a window are items of their own. Rows [num_rows] that are `written_elsewhere` are not among those to be joined.
    A plan of a fixed shape has `most_items` for each of its formats, all its rows are joined, and what is too few is
    padded. Raises ShapeExceeded where that is too few.
    """
    if split_tokens % page_tokens:
        raise ValueError(f"split_tokens must be a multiple of {page_tokens}, got {split_tokens}")
    sequence, row, first, end, sinks = _spans(plan, separate_sinks)
    index, first, end = _cut(first, end, split_tokens)
    sequence, row, sinks = sequence[index], row[index], sinks[index]
    base = _page_zero(plan, sequence, first // page_tokens)
    index, first, end = _cut_formats(plan.formats, base, first, end, page_tokens)
    row, sinks, base = row[index], sinks[index], base[index]

    order = np.argsort(row, kind="stable")
    items = np.stack([row, base, first, end, np.zeros_like(row), sinks], 1)[order].astype(np.int32)
    counts = np.bincount(items[:, 0], minlength=num_rows)
    is_joined = np.ones(num_rows, np.bool_) if plan.shape is not None else counts != 1
    joined = np.flatnonzero(is_joined if written_elsewhere is None else is_joined & ~written_elsewhere)
    alone = ~is_joined[items[:, 0]]
    items[:, 4] = np.where(alone, DIRECT, np.cumsum(~alone) - 1)
    indptr = np.concatenate([[0], np.cumsum(counts[joined])])

    formats = plan.formats[items[:, 1] + items[:, 2] // page_tokens]
    order = np.lexsort((items[:, 2] - items[:, 3], formats))
    ordered: Ints = items[order]
    codes: Ints = formats[order]
    frames: Ints = plan.frames
    num_slots = int(indptr[-1])
    if plan.shape is not None:
        num_slots = len(plan.shape.formats) * most_items + 1
        ordered, codes = _padded_items(ordered, codes, plan.shape, most_items, num_slots - 1)
        frames = _padded_frames(frames, plan.shape)
    on_device = torch.from_numpy(
        np.concatenate([ordered.ravel(), frames, joined, indptr]).astype(np.int32)
    ).to(device, non_blocking=True)
    parts = torch.split(on_device, [ordered.size, len(frames), len(joined), len(indptr)])
    table = parts[0].view(-1, ITEM_FIELDS)
    present, starts = np.unique(codes, return_index=True)
    stops = [*starts.tolist(), len(ordered)][1:]
    return WorkItems(
        by_format=tuple(
            (Format(int(code)), table[start:stop])
            for code, start, stop in zip(present, starts.tolist(), stops, strict=True)
        ),
        pages=parts[1],
        rows=parts[2],
        indptr=parts[3],
        num_slots=num_slots,
    )


def most_items(wanted_items: int, shape: FixedShape | None) -> int:
    """Items of one format, at most, that `balanced_split` gives the rows of a fixed shape; 0 without one.

    A row has at most one piece more than its tokens over the split, one for its sinks, and one for each change of format,
    of which a sequence has as many as there are formats.
    """
    return 0 if shape is None else wanted_items + shape.rows * (1 + len(shape.formats))


def overwrite_items(target: WorkItems, source: WorkItems) -> None:
    """Put other items of the same fixed shape into tables that a captured graph reads."""
    for (format, table), (other, items) in zip(target.by_format, source.by_format, strict=True):
        assert format is other and table.shape == items.shape and target.num_slots == source.num_slots
        table.copy_(items)
    target.pages.copy_(source.pages)
    target.rows.copy_(source.rows)
    target.indptr.copy_(source.indptr)


def _padded_items(
    items: Ints, formats: Ints, shape: FixedShape, most: int, spare_slot: int
) -> tuple[Ints, Ints]:
    """As many items of each format of the shape; those added have no token, and leave nothing in a slot that is read."""
    tables: list[Ints] = []
    for format in shape.formats:
        own = items[formats == format]
        if len(own) > most:
            raise ShapeExceeded(f"{len(own)} items of format {format.name}, the shape has places for {most}")
        padding = np.zeros((most - len(own), ITEM_FIELDS), np.int32)
        padding[:, 4] = spare_slot
        tables.append(np.concatenate([own, padding]))
    if not set(formats.tolist()) <= set(shape.formats):
        raise ShapeExceeded(
            f"pages of formats {sorted(set(formats.tolist()))}, the shape has {shape.formats}"
        )
    codes = np.repeat(np.array(shape.formats, np.int64), most)
    order = np.argsort(codes, kind="stable")
    return np.concatenate(tables)[order], codes[order]


def _padded_frames(frames: Ints, shape: FixedShape) -> Ints:
    if len(frames) > shape.pages:
        raise ShapeExceeded(f"{len(frames)} pages, the shape has places for {shape.pages}")
    return np.concatenate([frames, np.zeros(shape.pages - len(frames), frames.dtype)])


def balanced_split(plan: StepPlan, wanted_items: int, least_tokens: int) -> int:
    """A split for about `wanted_items` items: a power of two, at least `least_tokens` (one too)."""
    attended = plan.windows.astype(np.int64) + plan.sinks
    windows = np.where(plan.windows > 0, attended, plan.contexts)
    tokens = int((np.minimum(plan.contexts, windows) * plan.lengths.astype(np.int64)).sum())
    split = least_tokens
    while split * wanted_items < tokens:
        split *= 2
    return split


def _spans(plan: StepPlan, separate_sinks: bool) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Sequence, row, first token, end token, and whether they are sinks, of the ranges that rows attend."""
    lengths = plan.lengths.astype(np.int64)
    sequence = np.repeat(np.arange(plan.num_sequences), lengths)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    row = plan.starts[sequence] + within
    end = (plan.contexts - lengths)[sequence] + within + 1
    window = plan.windows[sequence]
    lowest = np.where(window > 0, np.maximum(0, end - window), 0)
    sinks = np.where(window > 0, np.minimum(plan.sinks[sequence], end), 0)
    if not separate_sinks:  # those that touch the window are part of it
        touch = sinks >= lowest
        lowest = np.where(touch, 0, lowest)
        sinks = np.where(touch, 0, sinks)
    lowest = np.maximum(lowest, sinks)
    nothing = np.zeros_like(sinks)
    both = [np.concatenate(pair) for pair in ((sequence,) * 2, (row,) * 2, (nothing, lowest), (sinks, end))]
    is_sinks = np.repeat([1, 0], len(row))
    real = both[2] < both[3]
    sequence, row, first, end = (x[real] for x in both)
    return sequence, row, first, end, is_sinks[real]


def _cut(first: Ints, end: Ints, every: int) -> tuple[Ints, Ints, Ints]:
    """Ranges cut at multiples of `every`: index of the range each piece is of, first, end."""
    pieces = -(-end // every) - first // every
    index = np.repeat(np.arange(len(first)), pieces)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = (first[index] // every + nth) * every
    return index, np.maximum(first[index], start), np.minimum(end[index], start + every)


def _page_zero(plan: StepPlan, sequence: Ints, page: Ints) -> Ints:
    """Where in plan.frames a sequence's page 0 would be, were all pages up to `page` named."""
    skipped = np.maximum(plan.first_pages - plan.sink_pages, 0)[sequence]
    return plan.first_frames[sequence] - np.where(page < plan.sink_pages[sequence], 0, skipped)


def _cut_formats(
    formats: Ints, base: Ints, first: Ints, end: Ints, page_tokens: int
) -> tuple[Ints, Ints, Ints]:
    """Ranges cut where the format of their pages changes."""
    changes = np.flatnonzero(np.diff(formats)) + 1
    inner = np.searchsorted(changes, base + (end - 1) // page_tokens, "right")
    outer = np.searchsorted(changes, base + first // page_tokens, "right")
    pieces = inner - outer + 1
    index = np.repeat(np.arange(len(first)), pieces)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    at = np.concatenate([[0], changes, [0]])  # in entries; the guards are read, but not used
    here = outer[index] + nth
    starts = (at[np.minimum(here, len(at) - 1)] - base[index]) * page_tokens
    stops = (at[np.minimum(here + 1, len(at) - 1)] - base[index]) * page_tokens
    start = np.where(nth == 0, first[index], starts)
    stop = np.where(nth == pieces[index] - 1, end[index], stops)
    return index, start, stop
