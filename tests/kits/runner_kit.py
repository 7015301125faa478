"""Runs a runner by hand, without a worker: pages from a counter, formats and windows by the recipe's rules, greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import Window
from kvtier.workers.models.formats import FORMAT_CODES, largest_page_bytes
from kvtier.workers.runner.runner import GroupPages, IntArray, Runner, SequenceRows, StepBatch, load_runner

NO_WINDOW = Window()


@contextmanager
def runner_of(folder: Path, cache_dir: Path | None = None, **changes: Any) -> Iterator[Runner]:
    """A runner with room for some thousand tokens of a tiny model; `kind` is torch or native."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "page_tokens": 16,
        "l1_bytes": 4 << 20,
        "numerics": "auto",
        "forward": "auto",
        "threads": 1,
        "max_context": 1024,
        "max_batch_tokens": 512,
        "epoch": 0,
    }
    native = "off" if changes.pop("kind", "torch") == "torch" else "require"
    runner = load_runner(str(folder), **{**options, **changes}, native=native, cache_dir=cache_dir)
    try:
        yield runner
    finally:
        runner.close()


class Pool:
    """Frames of a runner's arena, in no order, each with room for the largest page.

    What isn't in use is poisoned, so that a late reader gets NaN.
    """

    def __init__(self, runner: Runner, seed: int = 99) -> None:
        self.runner = runner
        self.in_use = 0
        self._units = -(-largest_page_bytes(runner.groups) // runner.arena.shape[1])
        frames = np.random.default_rng(seed).permutation(len(runner.arena) // self._units) * self._units
        self._free: list[int] = frames.tolist()
        runner.arena[:] = 0xFF

    def take(self) -> int:
        self.in_use += 1
        return self._free.pop()

    def give(self, frame: int) -> None:
        self.in_use -= 1
        self.runner.arena[frame : frame + self._units] = 0xFF
        self._free.append(frame)


class Chain:
    """One sequence's pages of one layer group, in the formats and within the window that its next rows need."""

    def __init__(self, pool: Pool, group: int, window: Window) -> None:
        self.pool, self.group, self.window = pool, group, window
        self.pages: dict[int, tuple[int, PageFormat]] = {}

    def prepare(self, position: int, context: int) -> GroupPages:
        """Pages for rows from `position` on, the last of which is at context - 1."""
        runner, recipe, tokens = self.pool.runner, self.pool.runner.recipe, self.pool.runner.page_tokens
        for page in range(position // tokens, -(-context // tokens)):
            if page not in self.pages:
                self.pages[page] = self.pool.take(), recipe.write
        for page, (frame, format) in list(self.pages.items()):
            wanted = recipe.format_at(page, position, tokens)
            if not self.window.needs(page, position, tokens):
                self.pool.give(frame)
                del self.pages[page]
            elif format != wanted:
                new = self.pool.take()
                source, target = np.array([frame], np.int32), np.array([new], np.int32)
                runner.convert(self.group, source, format, target, wanted)
                self.pool.give(frame)
                self.pages[page] = new, wanted
        order = sorted(self.pages)
        return GroupPages(
            np.array([self.pages[p][0] for p in order], np.int32),
            np.array([FORMAT_CODES[self.pages[p][1]] for p in order], np.uint8),
            self.window.sink_pages(tokens),
            self.window.first_page(position, tokens),
            self.window.tokens,
            self.window.sinks,
        )


class Sequence:
    """One sequence's tokens and pages."""

    def __init__(self, pool: Pool, tokens: list[int] | IntArray, window: Window = NO_WINDOW) -> None:
        self.tokens: list[int] = np.asarray(tokens).tolist()
        self.done = 0  # tokens whose KV is in pages
        self.chains = [
            Chain(pool, number, window if window.tokens else Window(group.window))
            for number, group in enumerate(pool.runner.groups)
        ]

    @property
    def frames(self) -> list[int]:
        """Those of the first layer group, by page."""
        pages = self.chains[0].pages
        return [pages[page][0] for page in sorted(pages)]

    def rows(self, start: int, length: int) -> SequenceRows:
        end = self.done + length
        pages = tuple(chain.prepare(self.done, end) for chain in self.chains)
        return SequenceRows(start, length, end, pages)


def step(runner: Runner, parts: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
    """One forward over so many next tokens of each sequence; logits [length, vocab] of each."""
    ids, positions, sequences, at = [], [], [], 0
    for sequence, length in parts:
        ids += sequence.tokens[sequence.done : sequence.done + length]
        positions += range(sequence.done, sequence.done + length)
        sequences.append(sequence.rows(at, length))
        at += length
    every = np.arange(at, dtype=np.int32)
    logits = runner.forward(
        StepBatch(np.array(ids, np.int32), np.array(positions, np.int32), sequences, every)
    )
    for sequence, length in parts:
        sequence.done += length
    return list(logits.split([length for _, length in parts]))


def feed(runner: Runner, sequence: Sequence, chunks: list[int]) -> torch.Tensor:
    """Logits of all rows of one sequence, taken in chunks, which are cut where the recipe's formats change."""
    out = []
    for length in chunks:
        while length:
            n = min(length, runner.recipe.rows_until_decay(sequence.done))
            out += step(runner, [(sequence, n)])
            length -= n
    return torch.cat(out)


def generate(
    runner: Runner, prompts: list[list[int]], new_tokens: int, chunk: int, window: Window = NO_WINDOW
) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch: chunks of prompts run beside the decode rows of those that are done."""
    pool = Pool(runner)
    sequences = [Sequence(pool, prompt, window) for prompt in prompts]
    ends = [len(prompt) + new_tokens for prompt in prompts]
    while True:
        parts = [
            (s, min(chunk, len(s.tokens) - s.done, runner.recipe.rows_until_decay(s.done)))
            for s, end in zip(sequences, ends, strict=True)
            if len(s.tokens) < end
        ]
        if not parts:
            return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
        for (sequence, _), logits in zip(parts, step(runner, parts), strict=True):
            if sequence.done == len(sequence.tokens):
                sequence.tokens.append(int(logits[-1].argmax()))


def random_tokens(seed: int, n: int, vocab: int) -> IntArray:
    """`n` token ids."""
    return np.random.default_rng(seed).integers(0, vocab, n).astype(np.int32)
