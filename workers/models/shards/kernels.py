"""Attention of one rank's heads, for models whose modules compute all heads on every rank."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.kernels.ops import Kernels, KVLayout, StepPlan
from kvtier.workers.models.base import ModelShape
from kvtier.workers.models.shards.collective import Reduce
from kvtier.workers.models.shards.share import Share


class SharedKernels:
    """Kernels that take and give all heads, keep this rank's in its pages, and sum the results over the ranks.

    So any architecture is split without knowing its modules: what a rank stores and attends is its share, what comes
    before and after is computed on all of them alike. Only the calls that such a model makes are here.
    """

    def __init__(self, kernels: Kernels, shape: ModelShape, share: Share, reduce: Reduce) -> None:
        """`shape` is the whole model's."""
        heads, kv_heads = share.heads(shape.num_heads), share.kv_heads(shape.num_kv_heads)
        self.name = kernels.name
        self.invariant = kernels.invariant
        self._kernels = kernels
        self._heads = slice(heads.start, heads.stop)
        self._kv_heads = slice(kv_heads.start, kv_heads.stop)
        self._reduce = reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def write_kv(
        self,
        k: torch.Tensor,  # [rows, all H, D]
        v: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See Kernels."""
        self._kernels.write_kv(k[:, self._kv_heads], v[:, self._kv_heads], arena, layout, plan, layer)

    def paged_attention(
        self,
        q: torch.Tensor,  # [rows, all Hq, D]
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
        """See Kernels; `lse` is of this rank's heads alone."""
        out, lse = self._kernels.paged_attention(
            q[:, self._heads],
            arena,
            layout,
            plan,
            layer,
            scale,
            q_sinks=None if q_sinks is None else q_sinks[:, self._heads],
            sink_logits=None if sink_logits is None else sink_logits[self._heads].contiguous(),
            softcap=softcap,
        )
        whole = torch.zeros_like(q)
        whole[:, self._heads] = out
        return self._reduce(whole), lse
