"""The kernels, as callers see them: one object per worker, which runs Triton, our compiled CPU code, or plain torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, Protocol

import torch

from kvtier.kernels import reference
from kvtier.kernels.cpu.build import BuildError
from kvtier.kernels.cpu.native import (
    LlamaLayerWeights,
    NativeKernels,
    NativeLinear,
    NativeLlama,
    llama_refusal,
)
from kvtier.kernels.layout import (
    FixedShape,
    Format,
    FormatArray,
    IntArray,
    KVLayout,
    PlanSequence,
    Record,
    StepPlan,
    check_arena,
    check_attention,
    check_conversion,
    check_dense,
    check_latent_queries,
    check_latents,
    check_layer,
    check_new_rows,
    check_plan,
    check_span,
    make_plan,
)
from kvtier.kernels.memory import HugeRoom, give_back, raise_malloc_thresholds
from kvtier.kernels.plans import PerPlan, ShapeExceeded
from kvtier.kernels.reference import merge

__all__ = [
    "BuildError",
    "FixedShape",
    "Format",
    "FormatArray",
    "HugeRoom",
    "IntArray",
    "KVLayout",
    "Kernels",
    "LlamaLayerWeights",
    "NativeKernels",
    "NativeLinear",
    "NativeLlama",
    "PlanSequence",
    "Record",
    "ShapeExceeded",
    "StepPlan",
    "TorchKernels",
    "UseNative",
    "choose_kernels",
    "give_back",
    "llama_refusal",
    "make_plan",
    "merge",
    "raise_malloc_thresholds",
]

log = logging.getLogger(__name__)

UseNative = Literal["auto", "off", "require"]


class Kernels(Protocol):
    """Attention over pages, and the writes into them. reference.py defines what each method computes.

    Results of a row don't depend on the other rows of the call, bit for bit, where `invariant` is true.
    """

    name: str  # for logs and statistics
    invariant: bool

    def close(self) -> None:
        """End what threads there are; no call may follow."""

    def write_kv(
        self,
        k: torch.Tensor,  # [rows, H, D]
        v: torch.Tensor,  # [rows, H, D]
        arena: torch.Tensor,  # uint8 [units, unit bytes]
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """Write the planned rows' keys and values into their pages, in the layout's write_format."""

    def paged_attention(
        self,
        q: torch.Tensor,  # [rows, Hq, D]
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
        *,
        q_sinks: torch.Tensor | None = None,  # [rows, Hq, D]: what sink keys see of rows with a window
        sink_logits: torch.Tensor | None = None,  # [Hq]: learned, part of the denominator only
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention over each row's pages: out [rows, Hq, D] like q, natural lse [rows, Hq] in float32.

        A row that attends nothing has out 0 and lse -inf.
        """

    def write_latents(
        self,
        latents: torch.Tensor,  # [rows, R]
        rope_keys: torch.Tensor,  # [rows, E]
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """Write the planned rows' latents and rope keys into their pages."""

    def latent_attention(
        self,
        q: torch.Tensor,  # [rows, Hq, R + E], W_UK absorbed
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed latent attention: out [rows, Hq, R] in the latent space, to go through W_UV, and lse [rows, Hq]."""

    def read_latents(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        sequence: int,
        first: int,
        last: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [n, R] and rope keys [n, E] of positions [first, last), in the layout's dtype, to be expanded."""

    def dense_attention(
        self,
        q: torch.Tensor,  # [rows, H, Dk]
        k: torch.Tensor,  # [keys, H, Dk]
        v: torch.Tensor,  # [keys, H, Dv]
        offset: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Row r attends the keys j <= offset + r: out [rows, H, Dv], lse [rows, H]; `merge` joins several."""

    def convert_pages(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        sources: IntArray,
        source_format: Format,
        targets: IntArray,
        target_format: Format,
    ) -> None:
        """Rewrite whole pages of one format in another, in other frames, all layers at once."""


class TorchKernels:
    """Everything in plain torch, on any device."""

    name = "torch"
    invariant = True

    def __init__(self) -> None:
        self._checked: PerPlan[None] = PerPlan()

    def close(self) -> None:
        """See Kernels."""

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See Kernels."""
        check_new_rows(k, v, arena, layout)
        self._check(plan, len(k), arena, layout, layer, writes=True)
        reference.write_kv(k, v, arena, layout, plan, layer)

    def paged_attention(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
        *,
        q_sinks: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels."""
        check_attention(q, arena, layout, q_sinks, sink_logits, softcap)
        self._check(plan, len(q), arena, layout, layer)
        return reference.paged_attention(
            q,
            arena,
            layout,
            plan,
            layer,
            scale,
            q_sinks=q_sinks,
            sink_logits=sink_logits,
            softcap=softcap,
        )

    def write_latents(
        self,
        latents: torch.Tensor,
        rope_keys: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See Kernels."""
        check_latents(latents, rope_keys, arena, layout)
        self._check(plan, len(latents), arena, layout, layer, writes=True)
        reference.write_latents(latents, rope_keys, arena, layout, plan, layer)

    def latent_attention(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels."""
        check_latent_queries(q, arena, layout)
        self._check(plan, len(q), arena, layout, layer)
        return reference.latent_attention(q, arena, layout, plan, layer, scale)

    def read_latents(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        sequence: int,
        first: int,
        last: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels."""
        check_arena(arena, layout)
        self._check(plan, None, arena, layout, layer)
        check_span(plan, layout, sequence, first, last)
        return reference.read_latents(arena, layout, plan, layer, sequence, first, last)

    def dense_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels."""
        check_dense(q, k, v)
        return reference.dense_attention(q, k, v, offset, scale)

    def convert_pages(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        sources: IntArray,
        source_format: Format,
        targets: IntArray,
        target_format: Format,
    ) -> None:
        """See Kernels."""
        check_conversion(arena, layout, sources, source_format, targets, target_format)
        reference.convert_pages(arena, layout, sources, source_format, targets, target_format)

    def _check(
        self,
        plan: StepPlan,
        rows: int | None,
        arena: torch.Tensor,
        layout: KVLayout,
        layer: int,
        *,
        writes: bool = False,
    ) -> None:
        check_layer(layer, layout)
        self._checked.get(
            plan,
            (layout, rows, arena.numel(), writes),
            lambda plan: check_plan(plan, rows, arena, layout, writes=writes),
        )


def choose_kernels(
    device: torch.device, cache_dir: Path, threads: int, use_native: UseNative, invariant: bool = False
) -> Kernels:
    """The kernels for a device: Triton's on a GPU, compiled ones on a CPU where a compiler is; plain torch with "off".

    "require" raises BuildError where there is no compiler. The compiled code is kept under `cache_dir`. `invariant`
    asks for results that depend on no other row; on a CPU they never do. Raises ValueError for a GPU without kernels.
    """
    if use_native not in ("auto", "off", "require"):
        raise ValueError(f"native kernels must be auto, off or require, got {use_native!r}")
    if use_native == "off":
        return TorchKernels()
    if device.type != "cpu":
        # Not above: a machine without a GPU never needs triton, which takes a second to import.
        from kvtier.kernels.triton_kernels import TritonKernels

        return TritonKernels(device, invariant)
    try:
        return NativeKernels(cache_dir, threads)
    except BuildError as error:
        if use_native == "require":
            raise
        log.warning("no compiled CPU kernels, plain torch serves: %s", error)
        return TorchKernels()
