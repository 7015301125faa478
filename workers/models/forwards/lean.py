"""Our own forward of the Llama family: its weights, fused, and the step over pages in compiled code or in torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from kvtier.kernels.ops import (
    Kernels,
    KVLayout,
    LlamaLayerWeights,
    NativeKernels,
    NativeLlama,
    StepPlan,
)
from kvtier.workers.models.base import ModelShape, ModelStep, on_device, rope_settings
from kvtier.workers.models.files.weights import Checkpoint, check_fit
from kvtier.workers.models.formats import LayerGroup
from kvtier.workers.models.forwards.probe import PROBE_TOKENS, run_probe
from kvtier.workers.models.forwards.rope import Rope, Turns, rotate, spread
from kvtier.workers.models.shards.collective import Reduce, alone
from kvtier.workers.models.shards.share import WHOLE, Share

_LEAN_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def lean_refusal(shape: ModelShape) -> str:
    """Why our own forward can't run this model; "" when it can."""
    config = shape.config
    if shape.architecture not in _LEAN_ARCHITECTURES:
        return f"architecture {shape.architecture} (known: {', '.join(_LEAN_ARCHITECTURES)})"
    if len(shape.windows) > 1:
        return "layers with and without a window"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']}"
    if config.get("mlp_bias") or (shape.architecture.startswith("Llama") and config.get("attention_bias")):
        return "biases on projections"
    if shape.architecture.startswith("Qwen3") and config.get("attention_bias"):
        return "biases on projections"
    if rope_settings(config).get("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor"):
        return "rope on a part of each head"
    return ""


class LeanWeights:
    """The weights of a Llama-family model in its compute dtype, copied out of its files when asked for.

    With a `share`: a rank's heads and columns, and all of what is small or read by row.
    """

    def __init__(
        self,
        files: Checkpoint,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        share: Share = WHOLE,
    ) -> None:
        """`shape` is the whole model's."""
        self._files = files
        self._dtype = dtype
        self._device = device
        self._heads = _times(share.heads(shape.num_heads), shape.head_dim)
        self._kv_heads = _times(share.kv_heads(shape.num_kv_heads), shape.head_dim)
        self._columns = _times(share.columns(shape.intermediate), 1)
        self._is_first = share.rank == 0
        self.num_layers = shape.num_layers
        # As transformers does it: tied where the config says so, unless the files hold two that differ.
        both = _HEAD in files and _EMBEDDING in files
        self.tied = shape.tied and not (both and not torch.equal(files.get(_HEAD), files.get(_EMBEDDING)))

    def get(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> torch.Tensor:
        """A tensor by its name, or a part of it. Raises ValueError when there is none.

        It is a copy, so that nothing keeps the files' memory.
        """
        if name not in self._files:
            check_fit(self._files.folder, [name], [], [])
        part = self._files.get(name)[rows]
        if columns is not None:
            part = part[:, columns]
        return part.to(device=self._device, dtype=self._dtype, copy=True).contiguous()

    def _maybe(self, name: str, rows: slice = slice(None)) -> torch.Tensor | None:
        return self.get(name, rows) if name in self._files else None

    def layer(self, index: int) -> LlamaLayerWeights:
        """One layer, with q, k and v in one matrix."""
        at = f"model.layers.{index}."
        rows = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}
        biases = [self._maybe(f"{at}self_attn.{x}_proj.bias", rows[x]) for x in "qkv"]
        present = [b for b in biases if b is not None]
        return LlamaLayerWeights(
            attention_norm=self.get(at + "input_layernorm.weight"),
            qkv=torch.cat([self.get(f"{at}self_attn.{x}_proj.weight", rows[x]) for x in "qkv"]),
            qkv_bias=torch.cat(present) if len(present) == 3 else None,
            q_norm=self._maybe(at + "self_attn.q_norm.weight"),
            k_norm=self._maybe(at + "self_attn.k_norm.weight"),
            out=self.get(at + "self_attn.o_proj.weight", columns=self._heads),
            mlp_norm=self.get(at + "post_attention_layernorm.weight"),
            gate=self.get(at + "mlp.gate_proj.weight", self._columns),
            up=self.get(at + "mlp.up_proj.weight", self._columns),
            down=self.get(at + "mlp.down_proj.weight", columns=self._columns),
        )

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self.get(_HEAD if self.tied and _EMBEDDING not in self._files else _EMBEDDING)

    @property
    def head(self) -> torch.Tensor | None:
        """[vocab, hidden]; None: the embedding, as on ranks that are asked for no logits."""
        return None if self.tied or not self._is_first else self.get(_HEAD)

    @property
    def norm(self) -> torch.Tensor:
        """[hidden]"""
        return self.get("model.norm.weight")


def _times(numbers: range, size: int) -> slice:
    """The rows of so many things of a size."""
    return slice(numbers.start * size, numbers.stop * size)


def load_rope(files: Checkpoint, shape: ModelShape) -> Rope:
    """The rope of a model, with the frequencies that transformers computes."""
    settings = rope_settings(shape.config)
    factor = 1.0
    if settings["rope_type"] == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        frequencies = 1.0 / settings["rope_theta"] ** exponents
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](files.config, torch.device("cpu"))
    return Rope(frequencies, factor, own_window=shape.windows[0])


class LeanForward(Protocol):
    """A lean forward, and the same over other pages than it was made for."""

    def forward(self, step: ModelStep, arena: torch.Tensor) -> torch.Tensor:
        """See Model."""

    def probe(self, step: ModelStep, arena: torch.Tensor, layout: KVLayout) -> torch.Tensor:
        """`forward` over pages of this layout, for a step of few rows."""


def probe_logits(
    model: LeanForward,
    shape: ModelShape,
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Logits of the probe's text by a model, over pages. All ranks of a group call it, since they sum in it."""
    return run_probe(
        shape.vocab_size, groups, dtype, device, lambda s, arena, pages: model.probe(s, arena, pages[0])
    )


class NativeModel:
    """Our compiled forward of the Llama family."""

    kind: Literal["lean", "transformers"] = "lean"
    invariant = True
    window_refusal = ""

    def __init__(
        self,
        shape: ModelShape,
        weights: LeanWeights,
        rope: Rope,
        layout: KVLayout,
        kernels: NativeKernels,
        max_rows: int,
    ) -> None:
        self._rope = rope
        self._llama = NativeLlama(
            kernels,
            layout,
            layers=(weights.layer(i) for i in range(weights.num_layers)),
            embedding=weights.embedding,
            head=weights.head,
            norm=weights.norm,
            query_heads=shape.num_heads,
            eps=shape.norm_eps,
            intermediate=shape.intermediate,
            max_rows=max_rows,
        )

    def forward(self, step: ModelStep, arena: torch.Tensor) -> torch.Tensor:
        """See Model."""
        plan = step.plans[0]
        return self._llama.forward(
            step.token_ids,
            self._rope.rows(step.positions, plan),
            plan,
            arena,
            step.logit_rows,
            self._rope.sink_rows(step.positions, plan),
        )

    def probe(self, step: ModelStep, arena: torch.Tensor, layout: KVLayout) -> torch.Tensor:
        """See LeanForward."""
        plan = step.plans[0]
        llama = self._llama.over(layout, PROBE_TOKENS)
        try:
            return llama.forward(
                step.token_ids, self._rope.rows(step.positions, plan), plan, arena, step.logit_rows
            )
        finally:
            llama.close()

    def close(self) -> None:
        """See Model."""
        self._llama.close()


class StepInputs(NamedTuple):
    """A step's tensors on the device; the sinks' where a sequence has a window and sinks."""

    token_ids: torch.Tensor  # [rows]
    logit_rows: torch.Tensor  # [m]
    cos: torch.Tensor  # [rows, 1, D]
    sin: torch.Tensor
    sink_cos: torch.Tensor | None  # float32 [rows, 1, D]
    sink_sin: torch.Tensor | None


class LeanModel:
    """Our forward of the Llama family in torch; owns its weights.

    With a rank's share of heads and columns, `reduce` sums what comes out of attention and MLP over the ranks.
    """

    kind: Literal["lean", "transformers"] = "lean"
    invariant = False
    window_refusal = ""

    def __init__(
        self,
        shape: ModelShape,
        weights: LeanWeights,
        rope: Rope,
        layout: KVLayout,
        kernels: Kernels,
        reduce: Reduce = alone,
    ) -> None:
        self._shape = shape
        self._rope = rope
        self._reduce = reduce
        self._embedding, self._norm_weight = weights.embedding, weights.norm
        self._head = self._embedding if weights.head is None else weights.head
        self._layers = [weights.layer(i) for i in range(weights.num_layers)]
        self._layout = layout
        self._kernels = kernels

    def close(self) -> None:
        """See Model."""

    def forward(self, step: ModelStep, arena: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self.run(self.inputs(step), step.plans[0], arena)

    def probe(self, step: ModelStep, arena: torch.Tensor, layout: KVLayout) -> torch.Tensor:
        """See LeanForward."""
        return self._run(self.inputs(step), step.plans[0], arena, layout)

    def inputs(self, step: ModelStep) -> StepInputs:
        """What of a step comes from the host, on the device."""
        device, dtype = self._embedding.device, self._embedding.dtype
        plan = step.plans[0]
        ids, wanted = on_device(device, step.token_ids, step.logit_rows)
        turns = spread(self._rope.rows(step.positions, plan), device, dtype)
        back = self._rope.sink_rows(step.positions, plan)
        return StepInputs(
            ids, wanted, *turns, *((None, None) if back is None else spread(back, device, torch.float32))
        )

    def run(self, inputs: StepInputs, plan: StepPlan, arena: torch.Tensor) -> torch.Tensor:
        """The step's logits, by work on the device alone: a graph can be captured of it."""
        return self._run(inputs, plan, arena, self._layout)

    def _run(self, inputs: StepInputs, plan: StepPlan, arena: torch.Tensor, layout: KVLayout) -> torch.Tensor:
        turns = inputs.cos, inputs.sin
        sink_turns = None
        if inputs.sink_cos is not None and inputs.sink_sin is not None:
            sink_turns = inputs.sink_cos, inputs.sink_sin
        x = F.embedding(inputs.token_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            x = x + self._attend(
                i, layer, self._norm(x, layer.attention_norm), turns, sink_turns, plan, arena, layout
            )
            y = self._norm(x, layer.mlp_norm)
            y = F.linear(F.silu(F.linear(y, layer.gate)) * F.linear(y, layer.up), layer.down)
            x = x + self._reduce(y)
        return F.linear(self._norm(x[inputs.logit_rows], self._norm_weight), self._head).float()

    def _attend(
        self,
        index: int,
        layer: LlamaLayerWeights,
        x: torch.Tensor,
        turns: Turns,
        sink_turns: Turns | None,
        plan: StepPlan,
        arena: torch.Tensor,
        layout: KVLayout,
    ) -> torch.Tensor:
        s = self._shape
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, s.head_dim)
        keys_end = s.num_heads + s.num_kv_heads
        q, k, v = qkv[:, : s.num_heads], qkv[:, s.num_heads : keys_end], qkv[:, keys_end:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = rotate(q, *turns), rotate(k, *turns)
        q_sinks = None if sink_turns is None else rotate(q.float(), *sink_turns).to(q.dtype)
        self._kernels.write_kv(k, v, arena, layout, plan, index)
        out, _ = self._kernels.paged_attention(
            q, arena, layout, plan, index, s.head_dim**-0.5, q_sinks=q_sinks
        )
        return self._reduce(F.linear(out.reshape(len(x), -1), layer.out))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self._shape.norm_eps)
        return weight * y.to(x.dtype)
