"""DeepSeek V2 and V3: latent attention of our own over pages of latents, in transformers' module tree.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) caches one latent and one rope key per token for all heads.
Rows that are decoded alone attend the latents themselves: W_UK is multiplied into the query, W_UV into the result.
Rows of a prompt's chunk attend keys and values expanded from the latents, a bounded piece of the context at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from kvtier.kernels.ops import Kernels, KVLayout, NativeKernels, StepPlan, merge
from kvtier.workers.models.base import ModelShape, ModelStep, window_refusal
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.formats import LayerGroup
from kvtier.workers.models.forwards.probe import check_probe, own_logits, run_probe
from kvtier.workers.models.forwards.transformers import (
    ATTENTION_NAME,
    compile_linears,
    leave_files,
    load_modules,
    run_modules,
)
from kvtier.workers.models.shards.collective import Reduce, alone
from kvtier.workers.models.shards.modules import split_feed_forward, split_linear
from kvtier.workers.models.shards.share import WHOLE, Share

# Tokens of context that are expanded at once. All heads' keys and values of so many lie in memory for one layer: in
# DeepSeek-V3 80 KB a token. Fewer cost more merging.
EXPAND_TOKENS = {"cuda": 16384, "cpu": 512}


@dataclass(frozen=True, slots=True)
class LatentStep:
    """What each layer's attention needs of a step; travels as the keyword kvtier_step through transformers' layers."""

    plan: StepPlan
    arena: torch.Tensor
    layout: KVLayout
    kernels: Kernels
    alone: torch.Tensor  # int64 [n]: rows of sequences of one row
    alone_plan: StepPlan  # those sequences; row i is the i-th of `alone`
    chunks: tuple[int, ...]  # numbers of the sequences of several rows


class LatentModel:
    """A DeepSeek model: experts, norms and weights are transformers', attention is ours; owns the module tree.

    `absorbed_rows` and `expanded_rows` count the rows that were attended in either way since the model was loaded.
    """

    kind: Literal["lean", "transformers"] = "transformers"
    invariant = False

    def __init__(
        self,
        files: Checkpoint,
        shape: ModelShape,
        groups: tuple[LayerGroup, ...],
        layout: KVLayout,
        kernels: Kernels,
        device: torch.device,
        share: Share = WHOLE,
        reduce: Reduce = alone,
    ) -> None:
        """Load the model of `files`, and compare it with its own attention. Raises ValueError where that can't be.

        With a `share`, attention is of a rank's heads, over latents that all ranks have. While it
        loads, each rank has room for the whole model.
        """
        self._model = load_modules(files, layout.dtype)
        self._model.eval().to(device)
        own = own_logits(self._model, device, ATTENTION_NAME)
        if share.ranks > 1:
            split_feed_forward(self._model, share, reduce)
        for layer in self._model.base_model.layers:
            layer.self_attn = LatentAttention(layer.self_attn, share, reduce)
        if isinstance(kernels, NativeKernels):
            compile_linears(self._model, kernels)
        leave_files(self._model)
        self.window_refusal = window_refusal(shape)
        self.absorbed_rows = 0
        self.expanded_rows = 0
        self._layout = layout
        self._kernels = kernels
        self._device = device

        def forward(step: ModelStep, arena: torch.Tensor, layouts: tuple[KVLayout, ...]) -> torch.Tensor:
            return run_modules(self._model, step, self._call(step, arena, layouts[0]), device)

        ours = run_probe(shape.vocab_size, groups, layout.dtype, device, forward)
        check_probe(shape.architecture, own, ours, layout.dtype, routed=shape.has_experts)

    def close(self) -> None:
        """See Model."""

    def forward(self, step: ModelStep, arena: torch.Tensor) -> torch.Tensor:
        """See Model."""
        call = self._call(step, arena, self._layout)
        self.absorbed_rows += len(call.alone)
        self.expanded_rows += int(call.plan.lengths.sum()) - len(call.alone)
        return run_modules(self._model, step, call, self._device)

    def _call(self, step: ModelStep, arena: torch.Tensor, layout: KVLayout) -> LatentStep:
        plan = step.plans[0]
        alone = np.flatnonzero(plan.lengths == 1)
        by_sequence = ("lengths", "contexts", "first_frames", "sink_pages", "first_pages", "windows", "sinks")
        of_alone: dict[str, Any] = {
            name: np.ascontiguousarray(getattr(plan, name)[alone]) for name in by_sequence
        }
        alone_plan = replace(plan, starts=np.arange(len(alone), dtype=np.int32), **of_alone)
        rows = torch.from_numpy(plan.starts[alone].astype(np.int64)).to(self._device)
        chunks = tuple(np.flatnonzero(plan.lengths > 1).tolist())
        return LatentStep(plan, arena, layout, self._kernels, rows, alone_plan, chunks)


class LatentAttention(torch.nn.Module):
    """Takes the place of a DeepSeek attention module and keeps its projections; kv_b_proj is split in its two halves.

    Of projections to and from heads a rank keeps its share; `reduce` sums over the ranks.
    """

    def __init__(self, theirs: Any, share: Share = WHOLE, reduce: Reduce = alone) -> None:
        super().__init__()
        heads = share.heads(int(theirs.num_heads))
        config = theirs.config
        self._layer = int(theirs.layer_idx)
        self._heads, self._rank = len(heads), int(theirs.kv_lora_rank)
        self._reduce = reduce
        self._nope, self._rope = int(theirs.qk_nope_head_dim), int(theirs.qk_rope_head_dim)
        self._scale = float(theirs.scaling)  # YaRN's mscale is in it
        self._interleaved = bool(getattr(config, "rope_interleave", True))
        if theirs.q_lora_rank is None:
            self.q_proj = _of_heads(theirs.q_proj, 0, heads, share)
        else:
            self.q_a_proj, self.q_a_layernorm, self.q_b_proj = (
                theirs.q_a_proj,
                theirs.q_a_layernorm,
                _of_heads(theirs.q_b_proj, 0, heads, share),
            )
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = theirs.kv_a_proj_with_mqa, theirs.kv_a_layernorm
        self.o_proj = _of_heads(theirs.o_proj, 1, heads, share)
        if type(theirs.kv_b_proj) is not torch.nn.Linear:
            raise ValueError(
                f"{type(theirs).__name__} isn't supported with a kv_b_proj of {type(theirs.kv_b_proj).__name__}: it must"
                " be a plain linear layer, of unquantized weights"
            )
        both = theirs.kv_b_proj.weight.detach().view(int(theirs.num_heads), -1, self._rank)
        both = both[heads.start : heads.stop]
        self.up_k = torch.nn.Buffer(both[:, : self._nope].contiguous(), persistent=False)  # [H, nope, R]
        self.up_v = torch.nn.Buffer(both[:, self._nope :].contiguous(), persistent=False)  # [H, V, R]

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, rows, hidden]
        position_embeddings: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kvtier_step: LatentStep,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Write the rows' latents into their pages, then attend the pages."""
        step = kvtier_step
        x = hidden_states[0]
        rows = len(x)
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.view(rows, self._heads, -1).split([self._nope, self._rope], -1)
        latents, rope_keys = self.kv_a_proj_with_mqa(x).split([self._rank, self._rope], -1)
        latents = self.kv_a_layernorm(latents)
        turns = _turns(position_embeddings)
        q_rope = _turn(q_rope, turns, self._interleaved)
        rope_keys = _turn(rope_keys[:, None], turns, self._interleaved)[:, 0]
        step.kernels.write_latents(latents, rope_keys, step.arena, step.layout, step.plan, self._layer)

        out = x.new_zeros(rows, self._heads, self.up_v.shape[1])
        if len(step.alone):
            out[step.alone] = self._absorbed(q_nope[step.alone], q_rope[step.alone], step)
        q = torch.cat([q_nope, q_rope], -1) if step.chunks else q
        for sequence in step.chunks:
            at = int(step.plan.starts[sequence])
            span = slice(at, at + int(step.plan.lengths[sequence]))
            out[span] = self._expanded(q[span], sequence, step)
        return self._reduce(self.o_proj(out.view(rows, -1)))[None], None

    def _absorbed(self, q_nope: torch.Tensor, q_rope: torch.Tensor, step: LatentStep) -> torch.Tensor:
        q = torch.cat([torch.einsum("rhn,hnl->rhl", q_nope, self.up_k), q_rope], -1)
        out, _ = step.kernels.latent_attention(
            q, step.arena, step.layout, step.alone_plan, self._layer, self._scale
        )
        return torch.einsum("rhl,hvl->rhv", out, self.up_v)

    def _expanded(self, q: torch.Tensor, sequence: int, step: LatentStep) -> torch.Tensor:
        context = int(step.plan.contexts[sequence])
        piece = EXPAND_TOKENS[q.device.type]
        total: tuple[torch.Tensor, torch.Tensor] | None = None
        for first in range(0, context, piece):
            latents, rope_keys = step.kernels.read_latents(
                step.arena, step.layout, step.plan, self._layer, sequence, first, min(first + piece, context)
            )
            k_nope = torch.einsum("tl,hnl->thn", latents, self.up_k)
            k = torch.cat([k_nope, rope_keys[:, None].expand(-1, self._heads, -1)], -1)
            v = torch.einsum("tl,hvl->thv", latents, self.up_v)
            out, lse = step.kernels.dense_attention(q, k, v, context - len(q) - first, self._scale)
            total = (out.float(), lse) if total is None else merge([total, (out, lse)])
        assert total is not None, "a sequence with rows has context"
        return total[0].to(q.dtype)


def _of_heads(linear: Any, dim: int, heads: range, share: Share) -> Any:
    """What a rank has of a linear layer whose output (dim 0) or input (dim 1) is of all heads."""
    size = linear.weight.shape[dim] // (len(heads) * share.ranks)
    return split_linear(linear, dim, range(heads.start * size, heads.stop * size), share)


def _turns(given: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [rows, 1, E / 2]: V2's rotary module gives complex numbers, V3's gives both halves alike."""
    if isinstance(given, torch.Tensor):
        return given.real[0, :, None], given.imag[0, :, None]
    cos, sin = (t[0, :, None, : t.shape[-1] // 2] for t in given)
    return cos, sin


def _turn(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """Rows x [rows, heads, E] turned, in float32 where the turns are; pairs end up a half apart, for q and k alike."""
    cos, sin = turns
    even, odd = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)
