"""Runs one model for one worker: owns the weights, the page arena, and the step that writes one and reads the other."""

from __future__ import annotations

import json
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
    KVLayout,
    NativeKernels,
    TorchKernels,
    UseNative,
    choose_kernels,
    llama_refusal,
    make_plan,
)
from kvtier.tier import hbm
from kvtier.tier.page import PageSpec
from kvtier.workers.model import (
    LeanModel,
    LeanWeights,
    Model,
    ModelShape,
    NativeModel,
    TransformersModel,
    lean_refusal,
    read_shape,
    rope_tables,
    spec_of,
)
from kvtier.workers.model_files import resolve_model, weights_fingerprint
from kvtier.workers.model_store import default_cache
from kvtier.workers.model_text import tokenizer_digest

log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int32]

FIXED_ROWS = (
    16  # rows of each torch forward in invariant mode; fewer is slower prefill, more is slower decode
)
MIN_FRAMES = 4
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(slots=True)
class SequenceRows:
    """One sequence's part of a step.

    `start` is its first row in the batch, `length` its rows (1 in decode, the chunk in prefill), `context` the tokens
    whose KV is in pages after this step, `frames` the L1 frames of its pages in order: page i holds positions
    [i * page_tokens, ...).
    """

    start: int
    length: int
    context: int
    frames: IntArray


@dataclass(slots=True)
class StepBatch:
    """One step of a batch of sequences: `token_ids` and `positions` by row, and the rows whose logits are wanted."""

    token_ids: IntArray  # [rows]
    positions: IntArray  # [rows]
    sequences: list[SequenceRows]
    logit_rows: IntArray  # [m]


class ModelRunner(Protocol):
    """What a worker needs of a model."""

    spec: PageSpec
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    model_name: str
    dtype: str
    arena: torch.Tensor  # uint8 [frames, spec.nbytes]; the last frame is scratch
    root_fields: dict[str, str]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab]."""


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
) -> Runner:
    """Load the model of `path` and allocate its arena.

    `max_context` 0 means what the model's config says. `native` is "auto" (compiled kernels where a compiler is),
    "off", or "require". Raises ValueError or FileNotFoundError with the way out.
    """
    cache = cache_dir or default_cache()
    folder = resolve_model(path, cache)
    shape = read_shape(folder)
    spec = spec_of(shape, dtype, page_tokens)
    threads = max(1, threads)
    torch.set_num_threads(threads)
    invariant = _is_invariant(numerics, dtype, shape)
    positions = _context_limit(shape, max_context)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = layout_of(spec)
    arena = new_arena(l1_bytes, spec, device)
    kernels = choose_kernels(device, cache, threads, native)
    model = _load_model(folder, shape, layout, kernels, forward, positions, arena, max_batch_tokens)
    computed_by = f"{model.kind}, {kernels.name}" if invariant else model.kind
    if model.invariant:
        torch.set_num_threads(1)  # little is left to torch; its threads would be in our threads' way
    return Runner(
        model=model,
        kernels=kernels,
        shape=shape,
        spec=spec,
        arena=arena,
        dtype=dtype,
        model_name=Path(path).stem if path.endswith(".gguf") else Path(path).name,
        max_context=positions,
        max_batch_tokens=max_batch_tokens,
        fixed_rows=FIXED_ROWS if invariant and not model.invariant else 0,
        root_fields=root_fields(folder, shape, spec, dtype, invariant, epoch, cache, computed_by),
        tokenizer=tokenizer_digest(folder),
    )


def _is_invariant(numerics: str, dtype: str, shape: ModelShape) -> bool:
    if numerics not in ("auto", "fast", "invariant"):
        raise ValueError(f"numerics must be auto, fast or invariant, got {numerics!r}")
    experts = any(int(shape.config.get(name) or 0) > 1 for name in _EXPERTS)
    if experts and numerics == "invariant":
        raise ValueError(
            f"numerics invariant isn't supported for {shape.architecture}: which rows share a product depends on the"
            " experts they choose; use fast"
        )
    return numerics == "invariant" or (numerics == "auto" and dtype == "float32" and not experts)


def _context_limit(shape: ModelShape, max_context: int) -> int:
    if max_context > shape.max_positions:
        raise ValueError(f"max_context {max_context} is more than the model's {shape.max_positions}")
    return max_context or shape.max_positions


def _load_model(
    folder: Path,
    shape: ModelShape,
    layout: KVLayout,
    kernels: TorchKernels | NativeKernels,
    forward: str,
    positions: int,
    arena: torch.Tensor,
    max_rows: int,
) -> Model:
    device = arena.device
    if forward not in ("auto", "lean", "transformers"):
        raise ValueError(f"forward must be auto, lean or transformers, got {forward!r}")
    refusal = lean_refusal(shape)
    if forward == "lean" and refusal:
        raise ValueError(f"forward: lean can't run this model: {refusal}; use auto or transformers")
    if forward == "transformers" or refusal:
        model = TransformersModel(folder, layout, kernels, device)
        with torch.inference_mode():
            model.verify(arena)
        return model
    weights = LeanWeights(folder, shape, layout.dtype, device)
    rope = rope_tables(folder, shape, positions)
    if isinstance(kernels, NativeKernels):
        refusal = llama_refusal(shape.hidden, shape.num_heads, layout)
        if not refusal:
            return NativeModel(shape, weights, rope, layout, kernels, max_rows)
        log.warning("no compiled forward for this model, torch serves: %s", refusal)
    return LeanModel(shape, weights, rope, layout, kernels)


def layout_of(spec: PageSpec) -> KVLayout:
    """The same pages, as the kernels see them."""
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_tokens=spec.page_tokens,
        dtype=dtypes[spec.format.value],
        record_bytes=spec.record_bytes,
    )


def root_fields(
    folder: Path,
    shape: ModelShape,
    spec: PageSpec,
    dtype: str,
    invariant: bool,
    epoch: int,
    cache_dir: Path,
    computed_by: str,
) -> dict[str, str]:
    """Everything the bytes of a page depend on beside its tokens, as short readable text.

    `computed_by` names the code that computes a page. Lean and transformers forwards round differently, so they never
    share pages. Compiled kernels and plain torch share them in fast numerics, where both are within the dtype's error,
    but not in invariant ones, which promise the bits.
    """
    config = json.dumps(shape.config, sort_keys=True).encode()
    return {
        "architecture": shape.architecture,
        "config": blake2b(config, digest_size=16).hexdigest(),
        "weights": weights_fingerprint(folder, cache_dir),
        "adapter": "",
        "compute_dtype": dtype,
        "numerics": "invariant" if invariant else "fast",
        "forward": computed_by,
        "rope": shape.rope,
        "attention": f"full, causal, {shape.num_heads} heads of {shape.head_dim}",
        "kv_heads": f"0-{shape.num_kv_heads}",
        "layer_group": f"0-{shape.num_layers}",
        "page_tokens": str(spec.page_tokens),
        "layout": str(spec.layout_version),
        "recipe": spec.format.value,
        "epoch": str(epoch),
    }


def new_arena(l1_bytes: int, spec: PageSpec, device: torch.device) -> torch.Tensor:
    """uint8 [frames, spec.nbytes], touched. Raises ValueError when it would hold too few pages."""
    frames = l1_bytes // spec.nbytes
    if frames < MIN_FRAMES:
        raise ValueError(
            f"L1 of {l1_bytes} bytes holds {frames} pages of {spec.nbytes}; it needs at least {MIN_FRAMES}"
        )
    return hbm.new_arena(frames, spec.nbytes, device)


class Runner:
    """A model over its arena. Owned by one worker's step loop; forward is called by one thread at a time."""

    def __init__(
        self,
        *,
        model: Model,
        kernels: TorchKernels | NativeKernels,
        shape: ModelShape,
        spec: PageSpec,
        arena: torch.Tensor,
        dtype: str,
        model_name: str,
        max_context: int,
        max_batch_tokens: int,
        fixed_rows: int,
        root_fields: dict[str, str],
        tokenizer: str,
    ) -> None:
        self.spec = spec
        self.vocab_size = shape.vocab_size
        self.max_context = max_context
        self.eos_ids = shape.eos_ids
        self.model_name = model_name
        self.dtype = dtype
        self.arena = arena
        self.root_fields = root_fields
        self.tokenizer_digest = tokenizer
        self.max_batch_tokens = max_batch_tokens
        self.forward_kind = model.kind
        self._model = model
        self._kernels = kernels
        self._fixed_rows = fixed_rows

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab], in their order.

        Raises ValueError when the batch has more rows than max_batch_tokens.
        """
        if len(batch.token_ids) > self.max_batch_tokens:
            raise ValueError(f"{len(batch.token_ids)} rows, at most {self.max_batch_tokens} fit in a step")
        with torch.inference_mode():
            if not self._fixed_rows:
                return self._run(batch)
            parts = [self._run(tile) for tile in fixed_tiles(batch, self._fixed_rows)]
            return _pick(parts, batch.logit_rows, self._fixed_rows)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        plan = make_plan(
            ((s.start, s.length, s.context, s.frames) for s in batch.sequences), self.spec.page_tokens
        )
        return self._model.forward(batch.token_ids, batch.positions, plan, self.arena, batch.logit_rows)

    def close(self) -> None:
        """End the threads of the compiled kernels and free their buffers. No forward may follow."""
        self._model.close()
        self._kernels.close()


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
            yield SequenceRows(first - at, last - first, s.context - left_out, s.frames)


def _pick(parts: list[torch.Tensor], logit_rows: IntArray, rows: int) -> torch.Tensor:
    """The wanted rows' logits out of the tiles' logits, which are of all of a tile's rows or of none."""
    if not len(logit_rows):
        return parts[0][:0]
    return torch.stack([parts[row // rows][row % rows] for row in logit_rows.tolist()])
