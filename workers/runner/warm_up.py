"""The steps that a runner takes before it serves, so that kernels are compiled then and not under a request.

Triton compiles a kernel for each page format, and again where a size is 1 or a multiple of 16. These steps bring all of
that about: one decode row and several, a context so long that its keys are split, chunks of odd and even size, pages in each
format that the cache has, and conversions between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.tier.pages.page import PageFormat
from kvtier.workers.models.formats import FORMAT_CODES, LayerGroup
from kvtier.workers.runner.runner import GroupPages, Runner, SequenceRows, StepBatch

LONG_TOKENS = 1025  # more than the kernels give one program
CHUNKS = (17, 64)
DECODE_ROWS = (1, 3, 16)


def warm_up(runner: Runner) -> None:
    """Run all of it over an arena that holds no pages yet, and leave it zeroed. Ranks of a group do so side by side."""
    for batch in warm_up_steps(runner):
        runner.forward(batch)
    for number, group in enumerate(runner.groups):
        for format, spec in group.specs.items():
            if format is not runner.recipe.write:
                behind = -(-group.specs[runner.recipe.write].nbytes // runner.arena.shape[1])
                if (behind * runner.arena.shape[1]) + spec.nbytes <= runner.arena.nbytes:
                    source, target = np.array([0], np.int32), np.array([behind], np.int32)
                    runner.convert(number, source, runner.recipe.write, target, format)
    runner.arena.zero_()


def warm_up_steps(runner: Runner) -> Iterator[StepBatch]:
    """Steps whose pages are all in frame 0."""
    max_rows, max_context, page_tokens = runner.max_batch_tokens, runner.max_context, runner.page_tokens
    for rows in sorted({min(rows, max_rows, page_tokens, max_context) for rows in DECODE_ROWS}):
        # Each row writes a token of its own in the one page.
        yield _step(runner, [(context, 1) for context in range(1, rows + 1)], None)
    for length in sorted({min(length, max_rows, max_context) for length in CHUNKS}):
        yield _step(runner, [(length, length)], None)
    long = min(LONG_TOKENS, max_context)
    for format in dict.fromkeys(format for group in runner.groups for format in group.specs):
        yield _step(runner, [(long, 1)], format)
        yield _step(runner, [(long, min(CHUNKS[0], max_rows, long))], format)


def _step(runner: Runner, parts: list[tuple[int, int]], old: PageFormat | None) -> StepBatch:
    """One sequence for each (context, rows); `old`: the format of all its pages but those that are written."""
    sequences: list[SequenceRows] = []
    positions: list[int] = []
    for context, length in parts:
        pages = tuple(_pages(runner, group, context, length, old) for group in runner.groups)
        sequences.append(SequenceRows(len(positions), length, context, pages))
        positions += range(context - length, context)
    last = np.cumsum([length for _, length in parts]) - 1
    return StepBatch(
        np.zeros(len(positions), np.int32), np.array(positions, np.int32), sequences, last.astype(np.int32)
    )


def _pages(
    runner: Runner, group: LayerGroup, context: int, length: int, old: PageFormat | None
) -> GroupPages:
    page_tokens = runner.page_tokens
    pages = -(-context // page_tokens)
    lowest = max(0, context - length - group.window + 1) if group.window else 0
    first = lowest // page_tokens
    formats = None
    if old is not None:
        formats = np.full(pages - first, FORMAT_CODES[old], np.uint8)
        formats[(context - length) // page_tokens - first :] = FORMAT_CODES[runner.recipe.write]
    return GroupPages(np.zeros(pages - first, np.int32), formats, 0, first, group.window)
