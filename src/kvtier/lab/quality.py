"""Measures what a quantized cache costs: perplexity, and KL divergence from the unquantized cache, on real text.

A context is fed to two runners of one model in the same chunks, one with the unquantized cache and one with the format
that is measured, and the two distributions of each next token are compared. Every token is given (teacher forcing), so
errors come from the cache alone and don't add up in the text. A prefill row attends the quantized keys and values of
its own chunk too, so this is what decode sees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.tier.pages.page import MIN_QUANTIZED_PAGE_TOKENS
from kvtier.tier.pages.recipe import DECAY_STRIDE_TOKENS, Recipe, Window
from kvtier.workers.machine.limits import cores_here
from kvtier.workers.models.base import layer_groups, read_shape
from kvtier.workers.models.formats import (
    CACHE_FORMATS,
    FORMAT_CODES,
    MIXED_UNIT_BYTES,
    LayerGroup,
    raw_format,
)
from kvtier.workers.models.text import Text
from kvtier.workers.runner.runner import GroupPages, ModelRunner, Runner, SequenceRows, StepBatch, load_runner

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]

REFERENCE = "auto"
FORMATS = tuple(name for name in CACHE_FORMATS if name != REFERENCE)
LATENT_FORMATS = ("fp8",)  # what pages of latents can be
MIN_CONTEXT = 32
MAX_PAGE_TOKENS = 4096
CHUNK_ROWS = (
    DECAY_STRIDE_TOKENS  # rows of a chunk see pages in the same formats: pages decay between chunks only
)
_PIECE_ROWS = 32  # rows compared at once: five numbers per token of the vocabulary and row are alive
_FIRST_BUCKET = 128
_LEAST_KL = 1e-6  # float32 logits of equal caches differ by about so much: less is drawn as this

Progress = Callable[[str, int, int | None], None]


class QualityError(ValueError):
    """What was asked for can't be measured; the message names the option, its value and what would be right."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: `tokens` of text at most, in contexts of `context` tokens each. `threads` 0: the physical cores."""

    model: Path  # a Hugging Face folder
    name: str  # what reports call it
    context: int = 2048
    tokens: int = 8192
    page_tokens: int = 16
    dtype: str = "bfloat16"
    recent_tokens: int = 1024  # of timedecay, as is sink_tokens
    sink_tokens: int = 16
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Next-token predictions made at positions [start, end) of their contexts."""

    start: int
    end: int
    perplexity: float
    kl: float  # mean, in nats


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """One format's numbers over all positions. Divergences are KL(unquantized || format), in nats."""

    format: str  # as cache.format names it
    recipe: str  # the page formats that it means
    bytes_per_token: float  # of cache, at the end of a context
    ratio: float  # bytes of the unquantized cache over these
    perplexity: float
    perplexity_change: float  # over the unquantized cache's, minus 1
    kl: float  # mean
    kl_p99: float  # 99 of 100 positions diverge less
    same_top: float  # share of positions with the same likeliest token
    by_position: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A measurement, the unquantized cache's own numbers first."""

    model: str
    dtype: str
    forward: str  # which forward computed it
    context: int
    contexts: int
    predictions: int
    page_tokens: int
    reference: FormatQuality
    formats: tuple[FormatQuality, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[FormatQuality, ...]:
        """The unquantized cache and all formats."""
        return (self.reference, *self.formats)

    def to_json(self) -> dict[str, Any]:
        """The object of `kvtier quality --json`."""
        return asdict(self)


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """The formats, each once, without the unquantized one that all are compared with. Raises QualityError."""
    for name in formats:
        if name not in CACHE_FORMATS:
            raise QualityError(f"--formats must be among {', '.join(CACHE_FORMATS)}, got {name!r}")
    found = tuple(name for name in dict.fromkeys(formats) if name != REFERENCE)
    if formats and not found:
        raise QualityError(
            f"--formats {REFERENCE} is what the others are compared with: name some of {', '.join(FORMATS)}"
        )
    return found


def check_numbers(settings: Settings) -> None:
    """What can be said of the numbers before the model is known. Raises QualityError."""
    tokens, context, page_tokens = settings.tokens, settings.context, settings.page_tokens
    if context < MIN_CONTEXT:
        raise QualityError(f"--context must be at least {MIN_CONTEXT}, got {context}")
    if tokens < context:
        smaller = f", or give a --context from {MIN_CONTEXT} to {tokens}" if tokens >= MIN_CONTEXT else ""
        raise QualityError(
            f"--tokens must be at least one context of {context} (--context), got {tokens}: raise it{smaller}"
        )
    if not MIN_QUANTIZED_PAGE_TOKENS <= page_tokens <= MAX_PAGE_TOKENS or page_tokens & (page_tokens - 1):
        raise QualityError(
            f"--page-tokens must be a power of two from {MIN_QUANTIZED_PAGE_TOKENS} to {MAX_PAGE_TOKENS}, "
            f"got {page_tokens}"
        )
    cpus = len(os.sched_getaffinity(0))
    if settings.threads > cpus:
        raise QualityError(
            f"--threads must be at most {cpus}, the CPUs that are there (0: the physical cores), "
            f"got {settings.threads}"
        )


def formats_for(settings: Settings, formats: Sequence[str]) -> tuple[str, ...]:
    """What to measure: `formats`, or all that the model's cache can have where none is named. Reads its config only.

    Raises QualityError for what this model can't do, ValueError for a model that isn't supported.
    """
    shape = read_shape(settings.model)
    if settings.context > shape.max_positions:
        raise QualityError(
            f"--context must be at most the model's {shape.max_positions} tokens, got {settings.context}"
        )
    possible = LATENT_FORMATS if shape.is_latent else FORMATS
    for name in formats:
        if name not in (REFERENCE, *possible):
            raise QualityError(
                f"--formats {name} can't be for {shape.architecture}, which keeps latents: "
                f"use {' or '.join(possible)}"
            )
    return tuple(formats) or possible


def read_contexts(texts: Sequence[tuple[str, str]], text: Text, settings: Settings) -> IntArray:
    """[contexts, context] token ids of (name, content) texts, in turn from each text, each from one place of one text.

    What the tokenizer puts before a text stands before every context. Raises QualityError for too little text.
    """
    check_numbers(settings)
    wanted = settings.tokens // settings.context
    head = text.encode("")
    cut = [_cut(name, text.encode(content), head, settings.context) for name, content in texts]
    turns = (context for turn in zip_longest(*cut) for context in turn if context is not None)
    return np.array([context for context, _ in zip(turns, range(wanted), strict=False)], np.int32)


def _cut(name: str, ids: list[int], head: list[int], context: int) -> list[list[int]]:
    body = ids[len(head) :] if ids[: len(head)] == head else ids
    step = context - len(head)
    if len(body) < step:
        raise QualityError(
            f"{name} has {len(ids)} tokens, fewer than a context of {context}: give a longer text or a smaller --context"
        )
    return [head + body[at : at + step] for at in range(0, len(body) - step + 1, step)]


def run(settings: Settings, contexts: IntArray, formats: Sequence[str], progress: Progress) -> Report:
    """Measure the formats, one after the other; two copies of the weights are in memory at a time.

    `formats` are at least one. Raises QualityError, or ValueError for what the model can't do.
    """
    context = contexts.shape[1]
    progress("loading the model", 0, None)
    reference = _load(settings, REFERENCE)
    try:
        raw_bytes = bytes_per_token(reference.groups, reference.recipe, settings.page_tokens, context)
        found: list[tuple[str, str, float, Samples]] = []
        notes: list[str] = []
        for name in formats:
            progress(f"loading the model for {name}", 0, None)
            candidate = _load(settings, name)
            try:
                nbytes = bytes_per_token(candidate.groups, candidate.recipe, settings.page_tokens, context)
                samples = measure(reference, candidate, contexts, _ticker(progress, name))
                found.append((name, str(candidate.recipe), nbytes, samples))
                notes += _undecayed(name, candidate.recipe, settings.page_tokens, context)
            finally:
                candidate.close()
        plain = found[0][3].of_reference()
        return Report(
            model=settings.name,
            dtype=settings.dtype,
            forward=reference.forward_kind,
            context=context,
            contexts=len(contexts),
            predictions=plain.nll.size,
            page_tokens=settings.page_tokens,
            reference=_summary(REFERENCE, str(reference.recipe), raw_bytes, plain, plain, raw_bytes),
            formats=tuple(_summary(*one, plain, raw_bytes) for one in found),
            notes=tuple(notes),
        )
    finally:
        reference.close()


def _load(settings: Settings, cache_format: str) -> Runner:
    pages = -(-settings.context // settings.page_tokens)
    raw = raw_format(settings.dtype)
    groups = layer_groups(read_shape(settings.model), raw, settings.page_tokens, (raw,))
    # A page as it is written and the same one decayed, each at most as large as an unquantized one.
    page_bytes = 2 * sum(_round_up(group.specs[raw].nbytes, MIXED_UNIT_BYTES) for group in groups)
    return load_runner(
        str(settings.model),
        dtype=settings.dtype,
        page_tokens=settings.page_tokens,
        l1_bytes=(pages + 4) * page_bytes,
        numerics="auto",
        forward="auto",
        threads=settings.threads or cores_here(),
        max_context=settings.context,
        max_batch_tokens=CHUNK_ROWS,
        epoch=0,
        cache_format=cache_format,
        recent_tokens=settings.recent_tokens,
        decay_sinks=settings.sink_tokens,
    )


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _ticker(progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(f"measuring {name}", done, total)


def bytes_per_token(groups: Sequence[LayerGroup], recipe: Recipe, page_tokens: int, context: int) -> float:
    """Bytes of the pages that a sequence of `context` tokens holds, over its tokens."""
    held = 0
    for group in groups:
        window = Window(group.window)
        for page in range(-(-context // page_tokens)):
            if window.needs(page, context, page_tokens):
                held += group.specs[recipe.format_at(page, context, page_tokens)].nbytes
    return held / context


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Samples:
    """By context and position: what one cache made of the next token, [contexts, context - 1] each."""

    reference_nll: FloatArray  # negative log-likelihood of the text's token, unquantized cache
    nll: FloatArray  # the same of the measured cache
    kl: FloatArray  # KL(unquantized || measured)
    same_top: npt.NDArray[np.bool_]  # whether both find the same token likeliest

    def of_reference(self) -> Samples:
        """What the unquantized cache would have given as the measured one."""
        nll = self.reference_nll
        return Samples(nll, nll, np.zeros_like(nll), np.ones_like(self.same_top))


def measure(
    reference: ModelRunner, candidate: ModelRunner, contexts: IntArray, tick: Callable[[int, int], None]
) -> Samples:
    """Feed all contexts to both runners; `tick` hears of chunks done and in all. Raises QualityError for NaN logits."""
    number, rows = len(contexts), contexts.shape[1] - 1  # the last token is only predicted
    nll = np.empty((2, number, rows))
    kl = np.empty((number, rows))
    same = np.empty((number, rows), np.bool_)
    chunks = -(-rows // CHUNK_ROWS)
    for index, ids in enumerate(contexts):
        readings = Reading(reference, len(ids)), Reading(candidate, len(ids))
        for chunk in range(chunks):
            tick(index * chunks + chunk, number * chunks)
            at, end = chunk * CHUNK_ROWS, min(rows, (chunk + 1) * CHUNK_ROWS)
            plain, other = (reading.feed(ids[at:end]) for reading in readings)
            for low in range(at, end, _PIECE_ROWS):
                part = slice(low, min(end, low + _PIECE_ROWS))
                piece = slice(part.start - at, part.stop - at)
                targets = ids[part.start + 1 : part.stop + 1]
                nll[:, index, part], kl[index, part], same[index, part] = _compared(
                    plain[piece], other[piece], targets
                )
    tick(number * chunks, number * chunks)
    for one, runner in zip(nll, (reference, candidate), strict=True):
        if not np.isfinite(one).all():
            raise QualityError(
                f"with pages as {runner.recipe} the model gives logits that are no numbers: try another dtype"
            )
    return Samples(nll[0], nll[1], kl, same)


def _compared(
    plain: torch.Tensor, other: torch.Tensor, targets: IntArray
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """([2, rows] negative log-likelihoods, [rows] divergences, [rows] same likeliest token) of logits [rows, vocab]."""
    p, q = torch.log_softmax(plain.float(), -1), torch.log_softmax(other.float(), -1)
    column = torch.from_numpy(targets.astype(np.int64)).to(p.device)[:, None]
    nll = -torch.cat([p.gather(1, column), q.gather(1, column)], 1).T
    kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
    same = plain.argmax(-1) == other.argmax(-1)
    return nll.double().cpu().numpy(), kl.cpu().numpy(), same.cpu().numpy()


class Reading:
    """One context on its way through a runner, whose whole arena it uses: one reading at a time.

    Each page has a place as it is written and one for when it has decayed.
    """

    def __init__(self, runner: ModelRunner, context: int) -> None:
        self._runner = runner
        self._done = 0  # tokens fed
        self._decayed = 0  # pages before this have decayed, or never will
        pages = -(-context // runner.page_tokens)
        recipe, unit_bytes = runner.recipe, runner.arena.shape[1]
        next_frame = 0
        self._places: list[dict[str, IntArray]] = []  # by layer group: frames of all pages, by format
        for group in runner.groups:
            places = {}
            for format in filter(None, (recipe.write, recipe.decayed)):
                units = -(-group.specs[format].nbytes // unit_bytes)
                places[format.value] = np.arange(
                    next_frame, next_frame + pages * units, units, dtype=np.int32
                )
                next_frame += pages * units
            self._places.append(places)
        assert next_frame <= len(runner.arena), f"{next_frame} units, the arena has {len(runner.arena)}"
        self._frames = [places[recipe.write.value].copy() for places in self._places]
        self._formats = np.full(pages, FORMAT_CODES[recipe.write], np.uint8)

    def feed(self, token_ids: IntArray) -> torch.Tensor:
        """Logits [rows, vocab] of the next tokens of the context; at most Recipe.rows_until_decay of them."""
        assert len(token_ids) <= self._runner.recipe.rows_until_decay(self._done)
        self._decay()
        rows = np.arange(len(token_ids), dtype=np.int32)
        end = self._done + len(token_ids)
        groups = tuple(
            GroupPages(frames, self._formats, window=group.window)
            for frames, group in zip(self._frames, self._runner.groups, strict=True)
        )
        sequence = SequenceRows(0, len(token_ids), end, groups)
        logits = self._runner.forward(StepBatch(token_ids, self._done + rows, [sequence], rows))
        self._done = end
        return logits

    def _decay(self) -> None:
        """Convert the pages that rows from here on attend in the decayed format."""
        recipe = self._runner.recipe
        if recipe.decayed is None:
            return
        first = max(self._decayed, recipe.sink_pages(self._runner.page_tokens))
        end = recipe.decay_end(self._done, self._runner.page_tokens)
        if end <= first:
            return
        for group, (places, frames) in enumerate(zip(self._places, self._frames, strict=True)):
            targets = places[recipe.decayed.value][first:end]
            self._runner.convert(group, frames[first:end], recipe.write, targets, recipe.decayed)
            frames[first:end] = targets
        self._formats[first:end] = FORMAT_CODES[recipe.decayed]
        self._decayed = end


# ---- reporting -------------------------------------------------------------------------------------------------------


def buckets(context: int) -> Iterator[tuple[int, int]]:
    """[start, end) of positions: each as long as all before it."""
    start, end = 0, _FIRST_BUCKET
    while start < context - 1:
        yield start, min(end, context - 1)
        start, end = end, 2 * end


def _summary(
    name: str, recipe: str, nbytes: float, samples: Samples, reference: Samples, raw_bytes: float
) -> FormatQuality:
    perplexity = _perplexity(samples.nll)
    return FormatQuality(
        format=name,
        recipe=recipe,
        bytes_per_token=nbytes,
        ratio=raw_bytes / nbytes,
        perplexity=perplexity,
        perplexity_change=perplexity / _perplexity(reference.nll) - 1,
        kl=float(samples.kl.mean()),
        kl_p99=float(np.quantile(samples.kl, 0.99)),
        same_top=float(samples.same_top.mean()),
        by_position=tuple(
            Bucket(start, end, _perplexity(samples.nll[:, start:end]), float(samples.kl[:, start:end].mean()))
            for start, end in buckets(samples.nll.shape[1] + 1)
        ),
    )


def _perplexity(nll: FloatArray) -> float:
    return float(np.exp(nll.mean()))


def _undecayed(name: str, recipe: Recipe, page_tokens: int, context: int) -> list[str]:
    """A note where no row of a context sees a decayed page."""
    if recipe.decayed is None:
        return []
    # The first page that may decay ends here, and does at the next multiple of the stride that a row has as position.
    oldest = (recipe.sink_pages(page_tokens) + 1) * page_tokens + recipe.recent_tokens
    first_row = -(-oldest // recipe.stride_tokens) * recipe.stride_tokens
    needed = first_row + 2  # the last token of a context is only predicted
    if context >= needed:
        return []
    kept = ""
    if recipe.recent_tokens or recipe.sink_tokens:
        kept = (
            f", but for the last recent_tokens ({recipe.recent_tokens}) and the first sink_tokens "
            f"({recipe.sink_tokens})"
        )
    return [
        (
            f"{name}: nothing decayed in a context of {context} tokens: pages do {recipe.stride_tokens} tokens at a"
            f" time{kept}; measure a --context of {needed} or more"
        )
    ]


def headline(report: Report) -> str:
    """How much was measured."""
    contexts = "1 context" if report.contexts == 1 else f"{report.contexts:,} contexts"
    return f"{report.predictions:,} next-token predictions in {contexts} of {report.context:,} tokens"


def markdown(report: Report, command: str, plot: str = "") -> str:
    """The report as a page of Markdown; `plot` is the picture's path as the page should name it."""
    spans = [f"{bucket.start}-{bucket.end}" for bucket in report.reference.by_position]
    lines = [
        f"# Cache formats of {report.model}",
        "",
        (
            f"{headline(report)}; {report.dtype}, {report.forward} forward, pages of {report.page_tokens} tokens. "
            "Measured by"
        ),
        "",
        f"    {command}",
        "",
        *_markdown_table(MAIN_COLUMNS, [main_row(row) for row in report.rows]),
        "",
        "Mean KL divergence from the unquantized cache, in nats, by the position of the prediction in its context:",
        "",
        *_markdown_table(
            ("cache.format", *spans),
            [(row.format, *(f"{b.kl:.5f}" for b in row.by_position)) for row in report.formats],
        ),
        "",
        "Perplexity by position:",
        "",
        *_markdown_table(
            ("cache.format", *spans),
            [(row.format, *(f"{b.perplexity:.3f}" for b in row.by_position)) for row in report.rows],
        ),
    ]
    lines += [part for note in report.notes for part in ("", note)]
    if plot:
        lines += ["", f"![KL by position, and perplexity by size]({plot})"]
    return "\n".join(lines) + "\n"


MAIN_COLUMNS = (
    *("cache.format", "pages", "bytes/token", "smaller", "perplexity", "change"),
    *("KL", "KL p99", "same top"),
)


def main_row(row: FormatQuality) -> tuple[str, ...]:
    """A format's numbers as text, in the order of MAIN_COLUMNS."""
    return (
        row.format,
        row.recipe,
        f"{row.bytes_per_token:,.0f}",
        f"{row.ratio:.2f}x",
        f"{row.perplexity:.3f}",
        f"{100 * row.perplexity_change:+.2f} %",
        f"{row.kl:.5f}",
        f"{row.kl_p99:.5f}",
        f"{100 * row.same_top:.1f} %",
    )


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (columns, ruler, *rows)]


def draw(report: Report, file: Path) -> None:
    """A PNG: divergence by position, and perplexity by bytes per token. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second that only plots should cost
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_position, by_size = figure.subplots(1, 2)
    spans = [f"{bucket.start}-{bucket.end}" for bucket in report.reference.by_position]
    for row in report.formats:
        shown = [max(bucket.kl, _LEAST_KL) for bucket in row.by_position]
        by_position.plot(spans, shown, marker="o", label=row.format)
        by_size.plot(row.bytes_per_token, 100 * row.perplexity_change, "o")
        by_size.annotate(
            row.format,
            (row.bytes_per_token, 100 * row.perplexity_change),
            textcoords="offset points",
            xytext=(6, 4),
        )
    by_size.annotate(
        REFERENCE,
        (report.reference.bytes_per_token, 0),
        textcoords="offset points",
        xytext=(-6, 4),
        ha="right",
        color="gray",
    )
    by_size.axhline(0, color="gray", linewidth=0.8)
    by_size.axvline(report.reference.bytes_per_token, color="gray", linewidth=0.8, linestyle="--")
    by_position.set(
        xlabel="position in the context",
        ylabel="mean KL from the unquantized cache (nats)",
        yscale="log",
        title=f"{report.model}: divergence of the next token",
    )
    by_size.set(
        xlabel=f"bytes of cache per token (dashed: unquantized {report.dtype})",
        ylabel="change of perplexity (%)",
        xlim=(0, 1.08 * report.reference.bytes_per_token),
        title=f"What it costs, over {report.predictions:,} predictions",
    )
    by_position.legend()
    by_position.grid(alpha=0.3)
    by_size.grid(alpha=0.3)
    figure.savefig(file, dpi=130, format="png")
