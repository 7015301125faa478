"""Runs one model for one worker: owns the weights, the page arena, and the step that writes one and reads the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.ops import (
    FormatArray,
    Kernels,
    KVLayout,
    NativeKernels,
    PlanSequence,
    UseNative,
    choose_kernels,
    give_back,
    llama_refusal,
    make_plan,
)
from kvtier.tier.l1 import arena as hbm
from kvtier.tier.l1.arena import Arena
from kvtier.tier.pages.page import MIN_QUANTIZED_PAGE_TOKENS, PageFormat
from kvtier.tier.pages.recipe import Recipe
from kvtier.workers.models.base import Model, ModelShape, ModelStep, layer_groups, read_shape
from kvtier.workers.models.files.files import resolve_model, weights_fingerprint
from kvtier.workers.models.files.store import default_cache
from kvtier.workers.models.files.versions import versions
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.formats import (
    DTYPES,
    FORMAT_CODES,
    LayerGroup,
    choose_l4_format,
    choose_recipe,
    largest_page_bytes,
    layout_of,
    raw_format,
    unit_bytes_of,
)
from kvtier.workers.models.forwards.latent import LatentModel
from kvtier.workers.models.forwards.lean import (
    LeanModel,
    LeanWeights,
    NativeModel,
    lean_refusal,
    load_rope,
    probe_logits,
)
from kvtier.workers.models.forwards.reference import Reference
from kvtier.workers.models.forwards.transformers import TransformersModel
from kvtier.workers.models.shards.collective import Reduce, alone
from kvtier.workers.models.shards.share import WHOLE, Share, share_unit_bytes
from kvtier.workers.models.text import Text, TextError, tokenizer_digest
from kvtier.workers.paging.copier import Copies, FrameCopies, PageCopies
from kvtier.workers.paging.frame_checks import page_checks
from kvtier.workers.runner.decode_graphs import Capture, DecodeGraphs, Tables, cuda_capture

log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int32]

FIXED_ROWS = (
    16  # rows of each torch forward in invariant mode; fewer is slower prefill, more is slower decode
)
MIN_FRAMES = 4
_FP8_CAPABILITY = (8, 9)  # of a CUDA device that has e4m3 numbers
_MAX_FIELD = 200  # characters of a root field


@dataclass(slots=True)
class GroupPages:
    """A sequence's pages in one layer group; the fields are those of kernels.layout.PlanSequence.

    `window` 0 means that rows attend everything: where the group's layers have a window, it is given here.
    """

    frames: IntArray
    formats: FormatArray | None = None
    sink_pages: int = 0
    first_page: int = 0
    window: int = 0
    sinks: int = 0


@dataclass(slots=True)
class SequenceRows:
    """One sequence's part of a step.

    `start` is its first row in the batch, `length` its rows (1 in decode, the chunk in prefill), `context` the tokens
    whose KV is in pages after this step, `pages` its pages by layer group.
    """

    start: int
    length: int
    context: int
    pages: tuple[GroupPages, ...]


@dataclass(slots=True)
class StepBatch:
    """One step of a batch of sequences: `token_ids` and `positions` by row, and the rows whose logits are wanted."""

    token_ids: IntArray  # [rows]
    positions: IntArray  # [rows]
    sequences: list[SequenceRows]
    logit_rows: IntArray  # [m]


class ModelRunner(Protocol):
    """What a worker needs of a model."""

    groups: tuple[LayerGroup, ...]  # full attention first
    recipe: Recipe
    raw_format: PageFormat
    l4_format: PageFormat | None  # what tier L4 keeps instead of L1's format
    page_tokens: int
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    model_name: str
    dtype: str
    device: torch.device
    arena: (
        torch.Tensor
    )  # uint8 [units, unit bytes]; frame f begins at unit f. On the meta device: a shape, no bytes
    share: hbm.ArenaShare | None  # what peers open the arena by; it serves one worker
    window: int  # of requests that don't set their own; 0: none
    sinks: int
    window_refusal: str  # why a request can't have a window of its own; "" when it may

    @property
    def error(self) -> str | None:
        """Why it can run nothing any more; None while it can."""

    def root_fields(
        self, group: int = 0, window: int = 0, sinks: int = 0, lossy: bool = False
    ) -> dict[str, str]:
        """All that a group's pages depend on beside their tokens; `window` 0 means the model's own."""

    def open_l1(self) -> tuple[FrameCopies, Copies]:
        """What copies pages between frames, and between frames and the tiers below. It serves one worker."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab]."""

    def convert(
        self,
        group: int,
        sources: IntArray,
        source_format: PageFormat,
        targets: IntArray,
        target_format: PageFormat,
    ) -> None:
        """Rewrite whole pages of one format in another, in other frames."""


def load_runner(
    path: str,
    *,
    dtype: str,
    page_tokens: int,
    l1_bytes: int,
    numerics: str,
    forward: str,
    threads: int,
    max_context: int,
    max_batch_tokens: int,
    epoch: int,
    cache_dir: Path | None = None,
    native: UseNative = "auto",
    cache_format: str = "auto",
    recent_tokens: int = 1024,
    decay_sinks: int = 16,
    l4_format: str = "",
    window: int = 0,
    sinks: int = 0,
    share_arena: bool = False,
    share: Share = WHOLE,
    reduce: Reduce = alone,
    cuda_graphs: bool = False,
) -> Runner:
    """Load the model of `path` and allocate its arena.

    `max_context` 0 means what the model's config says. `native` is "auto" (compiled kernels where a compiler is),
    "off", or "require". `cache_format` is a name of formats.CACHE_FORMATS; `recent_tokens` and `decay_sinks` belong to
    timedecay. `l4_format` names what L4 keeps instead ("": the same). `window` and `sinks` are those of requests that
    say nothing. With `share_arena` other workers on the node can open the arena, at the price of small pages on a CPU
    (attention reads a tenth slower there, measured). With a `share` the runner is one rank's, of a group whose ranks sum
    by `reduce` and load the same at the same time; `l1_bytes` are those of each rank. `cuda_graphs` replays decode
    steps as captured graphs where the device and the model allow it (workers/runner/decode_graphs.py). On a GPU all kernels are compiled
    before it returns (workers/runner/warm_up.py), which takes minutes where none is in Triton's cache. Raises ValueError or
    FileNotFoundError with the way out.
    """
    cache = cache_dir or default_cache()
    folder = resolve_model(path, cache)
    shape = read_shape(folder)
    share.check(shape)
    raw = raw_format(dtype)
    threads = max(1, threads)
    torch.set_num_threads(threads)
    invariant = _is_invariant(numerics, dtype, shape)
    positions = _context_limit(shape, max_context)
    device = _device(share)
    recipe = choose_recipe(
        cache_format,
        raw=raw,
        eight_bit=eight_bit_format(device),
        page_tokens=page_tokens,
        recent_tokens=recent_tokens,
        decay_sinks=decay_sinks,
    )
    l4 = choose_l4_format(l4_format, page_tokens)
    if shape.is_latent and {cache_format, l4_format} - {"auto", "fp8", ""}:
        raise ValueError(
            f"{shape.architecture} keeps latents, for which cache.format is auto or fp8 and tiers.l4.format empty or"
            f" fp8, got {cache_format!r} and {l4_format!r}"
        )
    formats = [f for f in dict.fromkeys((recipe.write, recipe.decayed, l4)) if f is not None]
    whole = layer_groups(shape, raw, page_tokens, formats)
    groups = layer_groups(share.of(shape), raw, page_tokens, formats)
    if device.type != "cpu" and page_tokens < MIN_QUANTIZED_PAGE_TOKENS:
        raise ValueError(
            f"on a GPU page_tokens must be at least {MIN_QUANTIZED_PAGE_TOKENS}, which fills a tile of its kernels,"
            f" got {page_tokens}"
        )
    unit = unit_bytes_of(whole)
    if share.ranks > 1:
        unit = share_unit_bytes(groups, whole, unit)
    layouts = tuple(layout_of(group, DTYPES[dtype], unit, recipe.write) for group in groups)
    arena, opened_by = new_arena(l1_bytes, groups, unit, device, share_arena)
    kernels = choose_kernels(device, cache, threads, native, invariant)
    model = _load_model(
        folder, shape, groups, layouts, kernels, forward, max_batch_tokens, device, share, reduce, cache
    )
    give_back()
    _check_window(window, sinks, model, groups[0].window, page_tokens)
    # Sums over ranks round otherwise than sums within one.
    ranks = f", {share.ranks} ranks" if share.ranks > 1 else ""
    computed_by = f"{model.kind}, {kernels.name}{ranks}" if invariant else model.kind
    if model.invariant:
        torch.set_num_threads(1)  # little is left to torch; its threads would be in our threads' way
    runner = Runner(
        model=model,
        kernels=kernels,
        shape=shape,
        groups=groups,
        whole_groups=whole,
        layouts=layouts,
        recipe=recipe,
        raw=raw,
        l4_format=l4,
        arena=arena,
        share=opened_by,
        dtype=dtype,
        model_name=Path(path).stem if path.endswith(".gguf") else Path(path).name,
        max_context=positions,
        max_batch_tokens=max_batch_tokens,
        fixed_rows=FIXED_ROWS if invariant and not model.invariant else 0,
        fields=_fields(folder, shape, dtype, invariant, epoch, cache, computed_by),
        eos_ids=_end_ids(folder, shape) if share.rank == 0 else (),
        tokenizer=tokenizer_digest(folder),
        window=window,
        sinks=sinks,
    )
    if cuda_graphs and device.type == "cuda":
        refusal = "ranks sum between launches" if share.ranks > 1 else runner.use_graphs(cuda_capture(device))
        if refusal:
            log.warning("decode steps are launched one by one: %s", refusal)
    if device.type != "cpu":
        from kvtier.workers.runner.warm_up import warm_up  # not above: it imports this module

        warm_up(runner)
    return runner


def _end_ids(folder: Path, shape: ModelShape) -> tuple[int, ...]:
    """Ids in the vocabulary that end a sequence: those of the configs, the tokenizer, and the chat template."""
    try:
        text = Text.load(folder)
    except TextError as error:
        log.warning("sequences end as the model's configs say, not as its tokenizer does: %s", error)
        text = None
    ids = dict.fromkeys([*shape.eos_ids, *(text.end_ids if text else ())])
    return tuple(token_id for token_id in ids if 0 <= token_id < shape.vocab_size)


def _device(share: Share) -> torch.device:
    """A GPU of its own for each rank, where there are as many."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if share.ranks == 1:
        return torch.device("cuda")
    device = torch.device("cuda", share.rank if torch.cuda.device_count() >= share.ranks else 0)
    torch.cuda.set_device(device)
    return device


def eight_bit_format(device: torch.device) -> PageFormat:
    """What is written in eight bits where a config doesn't say which: FP8, or INT8 on GPUs before sm_89."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return PageFormat.INT8
    return PageFormat.FP8


def _is_invariant(numerics: str, dtype: str, shape: ModelShape) -> bool:
    if numerics not in ("auto", "fast", "invariant"):
        raise ValueError(f"numerics must be auto, fast or invariant, got {numerics!r}")
    experts = shape.has_experts
    if experts and numerics == "invariant":
        raise ValueError(
            f"numerics invariant isn't supported for {shape.architecture}: which rows share a product depends on the"
            " experts they choose; use fast"
        )
    if shape.is_latent and numerics == "invariant":
        raise ValueError(
            f"numerics invariant isn't supported for {shape.architecture}: its rows are attended in two ways, absorbed"
            " when decoded and expanded in a chunk; use fast"
        )
    return numerics == "invariant" or (
        numerics == "auto" and dtype == "float32" and not experts and not shape.is_latent
    )


def _context_limit(shape: ModelShape, max_context: int) -> int:
    if max_context > shape.longest_positions:
        raise ValueError(f"max_context {max_context} is more than the model's {shape.longest_positions}")
    return max_context or shape.max_positions


def _check_window(window: int, sinks: int, model: Model, own: int, page_tokens: int) -> None:
    if not window and not sinks:
        return
    if model.window_refusal:
        raise ValueError(f"model.window {window} can't be: {model.window_refusal}; leave it 0")
    if window < page_tokens:
        raise ValueError(f"model.window must be 0 or at least a page of {page_tokens} tokens, got {window}")
    if own and window > own:
        raise ValueError(f"model.window must be at most the model's own {own}, got {window}")
    if not 0 <= sinks <= window:
        raise ValueError(f"model.sinks must be from 0 to the window of {window}, got {sinks}")


def _load_model(
    folder: Path,
    shape: ModelShape,
    groups: tuple[LayerGroup, ...],
    layouts: tuple[KVLayout, ...],
    kernels: Kernels,
    forward: str,
    max_rows: int,
    device: torch.device,
    share: Share,
    reduce: Reduce,
    cache: Path,
) -> Model:
    if forward not in ("auto", "lean", "transformers"):
        raise ValueError(f"forward must be auto, lean or transformers, got {forward!r}")
    refusal = lean_refusal(shape)
    if forward == "lean" and refusal:
        raise ValueError(f"forward: lean can't run this model: {refusal}; use auto or transformers")
    files = Checkpoint(folder)
    try:
        if shape.is_latent:
            return LatentModel(files, shape, groups, layouts[0], kernels, device, share, reduce)
        if forward == "transformers" or refusal:
            model = TransformersModel(files, shape, groups, layouts, kernels, device, share, reduce)
            model.verify()
            return model
        return _load_lean(files, shape, groups, layouts[0], kernels, max_rows, device, share, reduce, cache)
    finally:
        files.close()


def _load_lean(
    files: Checkpoint,
    shape: ModelShape,
    groups: tuple[LayerGroup, ...],
    layout: KVLayout,
    kernels: Kernels,
    max_rows: int,
    device: torch.device,
    share: Share,
    reduce: Reduce,
    cache: Path,
) -> LeanModel | NativeModel:
    """Our own forward, compared with transformers' of the same weights. A whole model of which ranks have parts may
    need more memory than a rank's GPU has, so that is computed on the CPU."""
    rope = load_rope(files, shape)
    reference = Reference(
        files, shape, layout.dtype, device if share.ranks == 1 else torch.device("cpu"), cache
    )
    if share.rank == 0:
        reference.prepare()  # before the weights: its memory is free again then
    weights = LeanWeights(files, shape, layout.dtype, device, share)
    refusal = llama_refusal(shape.hidden, shape.num_heads, layout)
    model: LeanModel | NativeModel
    if share.ranks == 1 and isinstance(kernels, NativeKernels) and not refusal:
        model = NativeModel(shape, weights, rope, layout, kernels, max_rows)
    else:  # compiled forwards know no other ranks
        if share.ranks == 1 and isinstance(kernels, NativeKernels):
            log.warning("no compiled forward for this model, torch serves: %s", refusal)
        model = LeanModel(share.of(shape), weights, rope, layout, kernels, reduce)
    ours = probe_logits(model, shape, groups, layout.dtype, device)
    if share.rank == 0:
        reference.compare(ours, rope)
    return model


def _fields(
    folder: Path,
    shape: ModelShape,
    dtype: str,
    invariant: bool,
    epoch: int,
    cache_dir: Path,
    computed_by: str,
) -> dict[str, str]:
    """What all pages of a model depend on, as short readable text.

    `computed_by` names the code that computes a page. Lean and transformers forwards round differently, so they never
    share pages. Compiled kernels and plain torch share them in fast numerics, where both are within the dtype's error,
    but not in invariant ones, which promise the bits.
    """
    return {
        "architecture": shape.architecture,
        "config": shape.config_digest,
        "weights": weights_fingerprint(folder, cache_dir),
        "adapter": "",
        "compute_dtype": dtype,
        "numerics": "invariant" if invariant else "fast",
        "forward": computed_by,
        **versions(),
        "rope": _short(shape.rope),
        "epoch": str(epoch),
    }


def _short(text: str) -> str:
    if len(text) <= _MAX_FIELD:
        return text
    return f"{text[: _MAX_FIELD - 40]}... {blake2b(text.encode(), digest_size=16).hexdigest()}"


def new_arena(
    l1_bytes: int,
    groups: tuple[LayerGroup, ...],
    unit_bytes: int,
    device: torch.device,
    is_shared: bool = False,
) -> tuple[torch.Tensor, hbm.ArenaShare | None]:
    """uint8 [units, unit_bytes], touched; what others open it by, if it is to be shared. Raises ValueError when it would hold too few pages."""
    largest = largest_page_bytes(groups)
    pages, needed = l1_bytes // largest, MIN_FRAMES * len(groups)
    if pages < needed:
        raise ValueError(
            f"L1 of {l1_bytes} bytes holds {pages} pages of {largest}; it needs at least {needed}"
        )
    num_units = l1_bytes // unit_bytes
    if is_shared:
        return hbm.new_shared_arena(num_units, unit_bytes, device)
    return hbm.new_arena(num_units, unit_bytes, device), None


class Runner:
    """A model over its arena. Owned by one worker's step loop; forward is called by one thread at a time."""

    def __init__(
        self,
        *,
        model: Model,
        kernels: Kernels,
        shape: ModelShape,
        groups: tuple[LayerGroup, ...],
        whole_groups: tuple[LayerGroup, ...],
        layouts: tuple[KVLayout, ...],
        recipe: Recipe,
        raw: PageFormat,
        l4_format: PageFormat | None,
        arena: torch.Tensor,
        share: hbm.ArenaShare | None = None,
        dtype: str,
        model_name: str,
        max_context: int,
        max_batch_tokens: int,
        fixed_rows: int,
        fields: dict[str, str],
        eos_ids: tuple[int, ...],
        tokenizer: str,
        window: int,
        sinks: int,
    ) -> None:
        self.model = model
        self.groups = groups
        self.whole_groups = whole_groups  # of all ranks' heads: the pages of the tiers below
        self.recipe = recipe
        self.raw_format = raw
        self.l4_format = l4_format
        self.page_tokens = groups[0].specs[recipe.write].page_tokens
        self.vocab_size = shape.vocab_size
        self.max_context = max_context
        self.eos_ids = eos_ids
        self.model_name = model_name
        self.dtype = dtype
        self.arena = arena
        self.device = arena.device
        self.error: str | None = None
        self.share = share
        self.window = window
        self.sinks = sinks
        self.window_refusal = model.window_refusal
        self.tokenizer_digest = tokenizer
        self.max_batch_tokens = max_batch_tokens
        self.forward_kind = model.kind
        self._shape = shape
        self._kernels = kernels
        self._layouts = layouts
        self._fields = fields
        self._fixed_rows = fixed_rows
        self.fences = hbm.new_fences(arena)
        self._graphs: DecodeGraphs | None = None
        self._units = tuple(_units_by_code(group, arena.shape[1]) for group in groups)

    def root_fields(
        self, group: int = 0, window: int = 0, sinks: int = 0, lossy: bool = False
    ) -> dict[str, str]:
        """See ModelRunner."""
        own = self.groups[group]
        spec, shape = own.specs[self.recipe.write], self._shape
        reach = window or own.window
        attention = f"window {reach}, sinks {sinks}" if reach else "full"
        return {
            **self._fields,
            "attention": f"{attention}, causal, {shape.num_heads} heads of {shape.head_dim}",
            "kv_heads": "latent" if shape.is_latent else f"0-{shape.num_kv_heads}",
            "layer_group": _short(f"{group}: {_ranges(own.layers)}"),
            "page_tokens": str(self.page_tokens),
            "layout": str(spec.layout_version),
            "recipe": f"{self.recipe}, lossy" if lossy else str(self.recipe),
        }

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab], in their order.

        Raises ValueError when the batch has more rows than max_batch_tokens.
        """
        if len(batch.token_ids) > self.max_batch_tokens:
            raise ValueError(f"{len(batch.token_ids)} rows, at most {self.max_batch_tokens} fit in a step")
        with torch.inference_mode():
            if not self._fixed_rows:
                logits = self._run(batch)
            else:
                parts = [self._run(tile) for tile in fixed_tiles(batch, self._fixed_rows)]
                logits = _pick(parts, batch.logit_rows, self._fixed_rows)
        if self.fences is not None:
            self.fences.mark(*self._touched(batch))
        return logits

    def open_l1(self) -> tuple[Arena, PageCopies]:
        """See ModelRunner."""
        arena = Arena(self.arena, self.fences)
        return arena, PageCopies(arena, page_checks(self.arena))

    def _run(self, batch: StepBatch) -> torch.Tensor:
        plans = tuple(
            make_plan(
                (_planned(s, s.pages[group]) for s in batch.sequences), self.page_tokens, layout.write_format
            )
            for group, layout in enumerate(self._layouts)
        )
        step = ModelStep(batch.token_ids, batch.positions, plans, batch.logit_rows)
        logits = None if self._graphs is None else self._graphs.forward(step)
        return self.model.forward(step, self.arena) if logits is None else logits

    def use_graphs(self, capture: Capture) -> str:
        """From now on replay decode steps as graphs, which `capture` makes; why not, or "".

        Logits of a replayed step are overwritten by the next one.
        """
        tables: tuple[Tables, ...] = getattr(self._kernels, "tables", ())
        if not isinstance(self.model, LeanModel):
            return f"the {self.forward_kind} forward of {self._shape.architecture} does work on the host"
        if not tables:
            return f"{self._kernels.name} kernels keep their tables on the host"
        if self._fixed_rows:
            return "numerics invariant computes steps in tiles of fixed size"
        self._graphs = DecodeGraphs(
            self.model,
            tables,
            self.arena,
            capture,
            max_rows=self.max_batch_tokens,
            pages_per_row=-(-self.max_context // self.page_tokens),
        )
        return ""

    def convert(
        self,
        group: int,
        sources: IntArray,
        source_format: PageFormat,
        targets: IntArray,
        target_format: PageFormat,
    ) -> None:
        """Rewrite whole pages of one format in another, in other frames; all layers of the group."""
        with torch.inference_mode():
            self._kernels.convert_pages(
                self.arena,
                self._layouts[group],
                sources,
                FORMAT_CODES[source_format],
                targets,
                FORMAT_CODES[target_format],
            )
        if self.fences is not None:
            sizes = self._units[group]
            self.fences.mark(
                _spread(sources, sizes[FORMAT_CODES[source_format]]),
                _spread(targets, sizes[FORMAT_CODES[target_format]]),
            )

    def _touched(self, batch: StepBatch) -> tuple[IntArray, IntArray]:
        """Units of the pages that a step reads, and of those that it writes."""
        used: list[IntArray] = []
        written: list[IntArray] = []
        for sequence in batch.sequences:
            first = (sequence.context - sequence.length) // self.page_tokens
            num_written = (sequence.context - 1) // self.page_tokens - first + 1
            for sizes, layout, pages in zip(self._units, self._layouts, sequence.pages, strict=True):
                units = sizes[layout.write_format if pages.formats is None else pages.formats]
                used.append(_spread(pages.frames, units))
                written.append(
                    _spread(pages.frames[-num_written:], units[-num_written:] if units.ndim else units)
                )
        return np.concatenate(used), np.concatenate(written)

    def close(self) -> None:
        """End the threads of the compiled kernels and free their buffers. No forward may follow."""
        self.model.close()
        self._kernels.close()


def _units_by_code(group: LayerGroup, unit_bytes: int) -> IntArray:
    """Units of a page, by the code of its format."""
    units = np.zeros(max(FORMAT_CODES.values()) + 1, np.int32)
    for format, spec in group.specs.items():
        units[FORMAT_CODES[format]] = -(-spec.nbytes // unit_bytes)
    return units


def _spread(frames: IntArray, units: IntArray | np.int32) -> IntArray:
    """All units of pages of so many units each, which begin at `frames`."""
    units = np.broadcast_to(units, frames.shape)
    starts = np.repeat(np.cumsum(units) - units, units)
    spread: IntArray = (np.repeat(frames, units) + np.arange(len(starts)) - starts).astype(np.int32)
    return spread


def _planned(rows: SequenceRows, pages: GroupPages) -> PlanSequence:
    return PlanSequence(
        rows.start,
        rows.length,
        rows.context,
        pages.frames,
        pages.formats,
        pages.sink_pages,
        pages.first_page,
        pages.window,
        pages.sinks,
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    """0,1,2,5 as "0-2,5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def fixed_tiles(batch: StepBatch, rows: int) -> Iterator[StepBatch]:
    """The batch in pieces of exactly `rows` rows, padded with rows of no sequence, in order.

    Every torch call of such a piece has the same shape, whatever the batch, so a row's bits can't depend on it. A
    piece asks for the logits of all its rows or of none.
    """
    total = len(batch.token_ids)
    wanted = set((batch.logit_rows // rows).tolist())
    for tile in range(-(-total // rows)):
        at, end = tile * rows, min((tile + 1) * rows, total)
        token_ids, positions = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        token_ids[: end - at] = batch.token_ids[at:end]
        positions[: end - at] = batch.positions[at:end]
        logit_rows = np.arange(rows if tile in wanted else 0, dtype=np.int32)
        yield StepBatch(token_ids, positions, list(_cut(batch.sequences, at, end)), logit_rows)


def _cut(sequences: list[SequenceRows], at: int, end: int) -> Iterator[SequenceRows]:
    for s in sequences:
        first, last = max(at, s.start), min(end, s.start + s.length)
        if first < last:
            left_out = s.start + s.length - last
            yield SequenceRows(first - at, last - first, s.context - left_out, s.pages)


def _pick(parts: list[torch.Tensor], logit_rows: IntArray, rows: int) -> torch.Tensor:
    """The wanted rows' logits out of the tiles' logits, which are of all of a tile's rows or of none."""
    if not len(logit_rows):
        return parts[0][:0]
    return torch.stack([parts[row // rows][row % rows] for row in logit_rows.tolist()])
