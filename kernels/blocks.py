"""Cuts the attention of a step's longer sequences into blocks of rows. Numpy only; once a step, shared by all layers.

A block takes all its keys of one page format in one launch. The pages of a format are a list, in order of position; a list
says of each page which one it is, so that formats may alternate as they like. Sinks are a list of their own, because
they are scored with queries of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.kernels.layout import MAX_CONTEXT, Format, IntArray, LongArray, StepPlan

Ints = LongArray

NO_WINDOW = MAX_CONTEXT  # what a window of 0 is to a kernel: further back than any context
BLOCK_FIELDS = 13  # of an item, see PrefillWork


@dataclass(frozen=True, slots=True)
class Cutting:
    """How blocks are cut: `rows` rows, and tiles at multiples of their size in the sequence.

    A block takes those tiles first that all its rows attend wholly, and without masks.
    """

    rows: int
    page_tokens: int
    tile_tokens: Callable[[Format], int]


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Items of one format, of sinks or of the rest."""

    format: Format
    is_sinks: bool
    items: IntArray  # [n, BLOCK_FIELDS], those with most tokens first


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Launches to be run in order: where a block of rows has several, each goes on from what the one before left.

    An item: first row, rows, position of the first row | first of its list in `pages`, first token of the list, first
    and end of the tokens that all rows attend, end | window, first key position, end of the key positions | first row
    of the scratch between launches, 1 if it begins there + 2 if it ends there.
    """

    launches: list[PrefillLaunch]
    pages: IntArray  # frames
    numbers: IntArray  # page numbers; -1: the entry stands for a page of another format
    num_scratch_rows: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one sequence that a program takes together, as arrays over the sequence's blocks."""

    row: Ints
    length: Ints
    position: Ints
    window: int
    sink_end: int
    index: Ints  # of each block in the step

    @property
    def end(self) -> Ints:
        return self.position + self.length


def prefill_work(plan: StepPlan, sequences: Ints, cutting: Cutting) -> PrefillWork:
    """Work of these sequences."""
    parts: dict[tuple[bool, int], list[Ints]] = {}
    pages: list[Ints] = []
    numbers: list[Ints] = []
    num_pages = num_blocks = 0
    for sequence in sequences.tolist():
        block = _blocks(plan, sequence, cutting.rows, num_blocks)
        num_blocks += len(block.row)
        for is_sinks in (True, False):
            for format, unit in _units(plan, sequence, block, is_sinks, cutting):
                items = _block_items(block, is_sinks, unit, num_pages)
                parts.setdefault((not is_sinks, format), []).append(items)
                pages.append(unit.frames.reshape(-1))
                numbers.append(unit.numbers.reshape(-1))
                num_pages += unit.numbers.size
    keys = sorted(parts)
    tables = [np.concatenate(parts[key]) for key in keys]
    num_rows = _chain(tables, num_blocks)
    launches = [
        PrefillLaunch(Format(format), not rest, _longest_first(item))
        for (rest, format), item in zip(keys, tables, strict=True)
        if len(item)
    ]
    joined = [np.concatenate(x) if x else np.zeros(0, np.int64) for x in (pages, numbers)]
    return PrefillWork(launches, joined[0].astype(np.int32), joined[1].astype(np.int32), num_rows)


def _blocks(plan: StepPlan, sequence: int, block_rows: int, num_before: int) -> _Block:
    length, context = int(plan.lengths[sequence]), int(plan.contexts[sequence])
    window = int(plan.windows[sequence])
    at = np.arange(0, length, block_rows, dtype=np.int64)
    return _Block(
        int(plan.starts[sequence]) + at,
        np.minimum(block_rows, length - at),
        context - length + at,
        window or NO_WINDOW,
        min(int(plan.sinks[sequence]), context) if window else 0,
        np.arange(len(at)) + num_before,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """A list of pages of one format, in units of whole pages and whole tiles at multiples of their size."""

    frames: Ints  # [units, pages]
    numbers: Ints  # [units, pages]; -1: not of this format
    starts: Ints  # [units]: first position
    tokens: int  # of a unit
    tile: int


def _units(
    plan: StepPlan, sequence: int, block: _Block, is_sinks: bool, cutting: Cutting
) -> list[tuple[int, _Units]]:
    """By format, the pages of what any of the blocks attends."""
    high = block.sink_end if is_sinks else int(block.end[-1])
    low = 0 if is_sinks else max(0, int(block.position[0]) - block.window + 1, block.sink_end)
    if low >= high:
        return []
    tokens = cutting.page_tokens
    number = np.arange(low // tokens, -(-high // tokens), dtype=np.int64)
    entry = plan.entries(np.full(len(number), sequence), number)
    format = plan.formats[entry]
    found = []
    for f in np.unique(format).tolist():
        tile = cutting.tile_tokens(Format(f))
        pages = max(1, tile // tokens)
        of = format == f
        units = np.unique(number[of] // pages)
        numbers = units[:, None] * pages + np.arange(pages)
        within = np.clip(numbers - number[0], 0, len(number) - 1)
        there = (number[within] == numbers) & of[within]
        found.append(
            (
                f,
                _Units(
                    np.where(there, plan.frames[entry[within]], 0),
                    np.where(there, numbers, -1),
                    units * pages * tokens,
                    pages * tokens,
                    tile,
                ),
            )
        )
    return found


def _block_items(block: _Block, is_sinks: bool, units: _Units, first_page: int) -> Ints:
    """[n, BLOCK_FIELDS + 1]: items of the blocks that attend anything of the list, and behind them the block's index."""
    if is_sinks:
        low = np.zeros_like(block.row)
        high = np.minimum(block.sink_end, block.end)
        open_low = low
    else:
        low = np.maximum(0, np.maximum(block.position - block.window + 1, block.sink_end))
        high = block.end
        open_low = np.maximum(low, block.end - block.window)
    open_high = np.minimum(high, block.position + 1)
    size, starts = units.tokens, units.starts
    u0 = np.searchsorted(starts + size, low, "right")
    u1 = np.searchsorted(starts, high, "left")
    some = (u1 > u0) & (high > low)
    last = len(starts) - 1
    lead = np.maximum(0, low - starts[np.minimum(u0, last)]) // units.tile * units.tile
    trail = np.maximum(0, starts[np.clip(u1 - 1, 0, last)] + size - high) // units.tile * units.tile
    first, end = u0 * size + lead, u1 * size - trail
    o0 = np.searchsorted(starts, open_low, "left")
    gaps = np.append(np.flatnonzero((units.numbers < 0).any(1)), len(starts))
    o1 = np.minimum(
        np.searchsorted(starts + size, open_high, "right"), gaps[np.searchsorted(gaps, o0, "left")]
    )
    open_first = np.clip(o0 * size, first, np.maximum(first, end))
    open_end = np.clip(o1 * size, open_first, np.maximum(open_first, end))
    page = np.full_like(first, first_page)
    window = np.full_like(first, NO_WINDOW if is_sinks else block.window)
    none = np.zeros_like(first)
    columns = [block.row, block.length, block.position, page, first, open_first, open_end, end]
    columns += [window, low, high, none, none, block.index]
    return np.stack(columns, 1)[some]


def _chain(launches: list[Ints], num_blocks: int) -> int:
    """Fill in the scratch rows and where each block begins and ends; how many scratch rows there are."""
    first = np.full(num_blocks, len(launches))
    last = np.full(num_blocks, -1)
    rows = np.zeros(num_blocks, np.int64)
    for i, items in enumerate(launches):
        first[items[:, BLOCK_FIELDS]] = np.minimum(first[items[:, BLOCK_FIELDS]], i)
        last[items[:, BLOCK_FIELDS]] = i
        rows[items[:, BLOCK_FIELDS]] = items[:, 1]
    rows[first == last] = 0
    scratch = np.cumsum(rows) - rows
    for i, items in enumerate(launches):
        block = items[:, BLOCK_FIELDS]
        items[:, 11] = scratch[block]
        items[:, 12] = (first[block] == i) + 2 * (last[block] == i)
    return int(rows.sum())


def _longest_first(items: Ints) -> IntArray:
    return items[np.argsort(items[:, 4] - items[:, 7], kind="stable"), :BLOCK_FIELDS].astype(np.int32)
