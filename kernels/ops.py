"""The kernels, as callers see them: one object per worker, which runs plain torch or our compiled CPU code."""

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
from kvtier.kernels.layout import IntArray, KVLayout, StepPlan, check_rows, make_plan
from kvtier.kernels.memory import raise_malloc_thresholds

__all__ = [
    "BuildError",
    "IntArray",
    "KVLayout",
    "Kernels",
    "LlamaLayerWeights",
    "NativeKernels",
    "NativeLinear",
    "NativeLlama",
    "StepPlan",
    "TorchKernels",
    "UseNative",
    "choose_kernels",
    "llama_refusal",
    "make_plan",
    "raise_malloc_thresholds",
]

log = logging.getLogger(__name__)

UseNative = Literal["auto", "off", "require"]


class Kernels(Protocol):
    """Attention over pages. Results of a row don't depend on the other rows of the call, bit for bit."""

    name: str  # for logs and statistics

    def close(self) -> None:
        """End what threads there are; no call may follow."""

    def write_kv(
        self,
        k: torch.Tensor,  # [rows, H, D]
        v: torch.Tensor,  # [rows, H, D]
        arena: torch.Tensor,  # uint8 [frames, page bytes]
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """Write the planned rows' keys and values into their pages."""

    def paged_attention(
        self,
        q: torch.Tensor,  # [rows, Hq, D]
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention over each row's pages: out [rows, Hq, D] like q, natural lse [rows, Hq] in float32.

        A row that belongs to no sequence has out 0 and lse -inf.
        """


class TorchKernels:
    """Everything in plain torch, on any device."""

    name = "torch"

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
        check_rows(k, arena, layout, layout.num_kv_heads)
        check_rows(v, arena, layout, layout.num_kv_heads)
        reference.write_kv(k, v, arena, layout, plan, layer)

    def paged_attention(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels."""
        check_rows(q, arena, layout)
        return reference.paged_attention(q, arena, layout, plan, layer, scale)


def choose_kernels(
    device: torch.device, cache_dir: Path, threads: int, use_native: UseNative
) -> TorchKernels | NativeKernels:
    """The kernels for a device: compiled ones on a CPU where a compiler is ("auto"), never ("off"), or BuildError.

    The compiled code is kept under `cache_dir`.
    """
    if use_native not in ("auto", "off", "require"):
        raise ValueError(f"native kernels must be auto, off or require, got {use_native!r}")
    if device.type != "cpu" or use_native == "off":
        return TorchKernels()
    try:
        return NativeKernels(cache_dir, threads)
    except BuildError as error:
        if use_native == "require":
            raise
        log.warning("no compiled CPU kernels, plain torch serves: %s", error)
        return TorchKernels()
