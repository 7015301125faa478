"""Model forwards over paged keys and values: our own for the Llama family, transformers' for any other causal LM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvtier.kernels.ops import (
    IntArray,
    Kernels,
    KVLayout,
    LlamaLayerWeights,
    NativeKernels,
    NativeLinear,
    NativeLlama,
    StepPlan,
    make_plan,
)
from kvtier.tier.page import PageFormat, PageSpec
from kvtier.workers.model_files import load_tensors, read_config

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_FORMATS = {"float32": PageFormat.FP32, "bfloat16": PageFormat.BF16, "float16": PageFormat.FP16}
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # angles that depend on a token's position alone
_LEAN_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ATTENTION_NAME = "kvtier_paged"
_PROBE_TOKENS = 8
_PROBE_ERROR = (
    0.1  # of the logits' norm; rounding makes about 0.01 in bfloat16, a wrong mask or position 0.5 and more
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What config.json says of a causal LM with grouped-query attention."""

    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    eos_ids: tuple[int, ...]
    rope: str  # canonical text of the rope settings
    config: dict[str, Any]


def page_spec(path: str, dtype: str, page_tokens: int) -> PageSpec:
    """The pages of a model folder; reads config.json only. Raises ValueError for a model that isn't supported."""
    shape = read_shape(Path(path))
    return spec_of(shape, dtype, page_tokens)


def spec_of(shape: ModelShape, dtype: str, page_tokens: int) -> PageSpec:
    """The pages of a model of this shape. Raises ValueError for a dtype that pages can't have."""
    if dtype not in _FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(_FORMATS)}, got {dtype!r}")
    if shape.head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8, {shape.architecture} has {shape.head_dim}")
    return PageSpec(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_tokens=page_tokens,
        format=_FORMATS[dtype],
    )


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`. Raises ValueError naming what isn't supported, and why."""
    config = read_config(folder)
    architecture = (config.get("architectures") or ["unknown"])[0]
    _refuse(config, architecture)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            architecture=architecture,
            num_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or 0),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings") or 2048),
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            eos_ids=_eos_ids(folder, config),
            rope=json.dumps(rope_settings(config), sort_keys=True),
            config=config,
        )
    except KeyError as error:
        raise ValueError(f"{architecture} isn't supported: its config.json has no {error}") from error


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings in one form, whichever transformers version wrote the config."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def _refuse(config: dict[str, Any], architecture: str) -> None:
    reason = _unsupported(config)
    if reason:
        raise ValueError(f"{architecture} isn't supported yet: {reason}")


def _unsupported(config: dict[str, Any]) -> str:
    """Why pages as they are now can't hold this model's attention; "" when they can."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder model; only decoder-only models have the pages kept here"
    if "text_config" in config:
        return "it takes more than text"
    if config.get("kv_lora_rank"):
        return "multi-head latent attention needs pages of latents"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return f"sliding-window attention (sliding_window={config['sliding_window']})"
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}; only full attention has pages"
    for softcap in ("attn_logit_softcapping", "attention_logit_cap"):
        if config.get(softcap):
            return f"attention with a logit softcap ({softcap}={config[softcap]})"
    rope = rope_settings(config)
    if rope["rope_type"] not in _FIXED_ROPES:
        return (
            f"rope type {rope['rope_type']!r} changes with the length of the text, so cached keys would go stale"
            f" (supported: {', '.join(_FIXED_ROPES)})"
        )
    return ""


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    value = config.get("eos_token_id")
    if file.is_file():
        try:
            value = json.loads(file.read_text()).get("eos_token_id", value)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file} is no JSON mapping: {error}") from error
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


class Model(Protocol):
    """A forward over one step's rows."""

    kind: Literal["lean", "transformers"]
    invariant: bool  # a row's bits don't depend on the step's other rows, whatever the step's shape

    def forward(
        self,
        token_ids: IntArray,  # [rows]
        positions: IntArray,  # [rows]
        plan: StepPlan,
        arena: torch.Tensor,
        logit_rows: IntArray,  # [m]
    ) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab]."""

    def close(self) -> None:
        """Free what isn't Python's; no call may follow."""


def lean_refusal(shape: ModelShape) -> str:
    """Why our own forward can't run this model; "" when it can."""
    config = shape.config
    if shape.architecture not in _LEAN_ARCHITECTURES:
        return f"architecture {shape.architecture} (known: {', '.join(_LEAN_ARCHITECTURES)})"
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
    """The weights of a Llama-family model in its compute dtype, read from its folder when asked for."""

    def __init__(self, folder: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._tensors = load_tensors(folder)
        self._dtype = dtype
        self._device = device
        self.num_layers = shape.num_layers
        self.tied = shape.tied or "lm_head.weight" not in self._tensors

    def get(self, name: str) -> torch.Tensor:
        """A tensor by its name. Raises ValueError when there is none."""
        if name not in self._tensors:
            raise ValueError(f"{self._folder} has no tensor {name}")
        return self._tensors[name].to(device=self._device, dtype=self._dtype)

    def _maybe(self, name: str) -> torch.Tensor | None:
        return self.get(name) if name in self._tensors else None

    def layer(self, index: int) -> LlamaLayerWeights:
        """One layer, with q, k and v in one matrix."""
        at = f"model.layers.{index}."
        biases = [self._maybe(f"{at}self_attn.{x}_proj.bias") for x in "qkv"]
        present = [b for b in biases if b is not None]
        return LlamaLayerWeights(
            attention_norm=self.get(at + "input_layernorm.weight"),
            qkv=torch.cat([self.get(f"{at}self_attn.{x}_proj.weight") for x in "qkv"]),
            qkv_bias=torch.cat(present) if len(present) == 3 else None,
            q_norm=self._maybe(at + "self_attn.q_norm.weight"),
            k_norm=self._maybe(at + "self_attn.k_norm.weight"),
            out=self.get(at + "self_attn.o_proj.weight"),
            mlp_norm=self.get(at + "post_attention_layernorm.weight"),
            gate=self.get(at + "mlp.gate_proj.weight"),
            up=self.get(at + "mlp.up_proj.weight"),
            down=self.get(at + "mlp.down_proj.weight"),
        )

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self.get("model.embed_tokens.weight")

    @property
    def head(self) -> torch.Tensor | None:
        """[vocab, hidden]; None: the embedding."""
        return None if self.tied else self.get("lm_head.weight")

    @property
    def norm(self) -> torch.Tensor:
        """[hidden]"""
        return self.get("model.norm.weight")


def rope_tables(folder: Path, shape: ModelShape, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [positions, head_dim / 2] each, exactly as transformers computes them."""
    settings = rope_settings(shape.config)
    attention_factor = 1.0
    if settings["rope_type"] == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        frequencies = 1.0 / settings["rope_theta"] ** exponents
    else:
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = AutoConfig.from_pretrained(folder)
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](
            config, torch.device("cpu")
        )
    angles = torch.arange(positions, dtype=torch.float)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


class NativeModel:
    """Our compiled forward of the Llama family."""

    kind: Literal["lean", "transformers"] = "lean"
    invariant = True

    def __init__(
        self,
        shape: ModelShape,
        weights: LeanWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        layout: KVLayout,
        kernels: NativeKernels,
        max_rows: int,
    ) -> None:
        self._llama = NativeLlama(
            kernels,
            layout,
            layers=(weights.layer(i) for i in range(weights.num_layers)),
            embedding=weights.embedding,
            head=weights.head,
            norm=weights.norm,
            rope=rope,
            query_heads=shape.num_heads,
            eps=shape.norm_eps,
            intermediate=shape.intermediate,
            max_rows=max_rows,
        )

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        plan: StepPlan,
        arena: torch.Tensor,
        logit_rows: IntArray,
    ) -> torch.Tensor:
        """See Model."""
        return self._llama.forward(token_ids, positions, plan, arena, logit_rows)

    def close(self) -> None:
        """See Model."""
        self._llama.close()


def _on(device: torch.device, *arrays: IntArray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)


class LeanModel:
    """Our forward of the Llama family in torch; owns its weights and rope tables."""

    kind: Literal["lean", "transformers"] = "lean"
    invariant = False

    def __init__(
        self,
        shape: ModelShape,
        weights: LeanWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        layout: KVLayout,
        kernels: Kernels,
    ) -> None:
        self._shape = shape
        self._embedding, self._norm_weight = weights.embedding, weights.norm
        self._head = self._embedding if weights.head is None else weights.head
        self._layers = [weights.layer(i) for i in range(weights.num_layers)]
        device, dtype = self._embedding.device, self._embedding.dtype
        self._cos, self._sin = (t.repeat(1, 2).to(device=device, dtype=dtype) for t in rope)
        self._layout = layout
        self._kernels = kernels

    def close(self) -> None:
        """See Model."""

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        plan: StepPlan,
        arena: torch.Tensor,
        logit_rows: IntArray,
    ) -> torch.Tensor:
        """See Model."""
        ids, at, wanted = _on(self._embedding.device, token_ids, positions, logit_rows)
        cos, sin = self._cos[at].unsqueeze(1), self._sin[at].unsqueeze(1)
        x = F.embedding(ids, self._embedding)
        for i, layer in enumerate(self._layers):
            x = x + self._attend(i, layer, self._norm(x, layer.attention_norm), cos, sin, plan, arena)
            y = self._norm(x, layer.mlp_norm)
            x = x + F.linear(F.silu(F.linear(y, layer.gate)) * F.linear(y, layer.up), layer.down)
        return F.linear(self._norm(x[wanted], self._norm_weight), self._head).float()

    def _attend(
        self,
        index: int,
        layer: LlamaLayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: StepPlan,
        arena: torch.Tensor,
    ) -> torch.Tensor:
        s = self._shape
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, s.head_dim)
        keys_end = s.num_heads + s.num_kv_heads
        q, k, v = qkv[:, : s.num_heads], qkv[:, s.num_heads : keys_end], qkv[:, keys_end:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self._kernels.write_kv(k, v, arena, self._layout, plan, index)
        out, _ = self._kernels.paged_attention(q, arena, self._layout, plan, index, s.head_dim**-0.5)
        return F.linear(out.reshape(len(x), -1), layer.out)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self._shape.norm_eps)
        return weight * y.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


@dataclass(frozen=True, slots=True)
class _Step:
    """What our attention function needs beside q, k and v; travels as a keyword through transformers' layers."""

    plan: StepPlan
    arena: torch.Tensor
    layout: KVLayout
    kernels: Kernels


class TransformersModel:
    """transformers' own modules, with attention over pages in place of theirs; owns the module tree."""

    kind: Literal["lean", "transformers"] = "transformers"

    def __init__(self, folder: Path, layout: KVLayout, kernels: Kernels, device: torch.device) -> None:
        """Load the model of `folder`. Raises ValueError for an architecture that can't take our attention."""
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(_ATTENTION_NAME, _paged_attention)
        try:
            loader: Any = AutoModelForCausalLM
            self._model = loader.from_pretrained(
                folder, dtype=layout.dtype, attn_implementation=_ATTENTION_NAME
            )
        except KeyError as error:
            if error.args != (_ATTENTION_NAME,):
                raise ValueError(f"transformers can't load {folder}: no {error}") from error
            raise ValueError(f"{folder} isn't supported: its model's attention can't be replaced") from error
        except ValueError as error:
            raise ValueError(f"transformers can't load {folder}: {error}") from error
        if not getattr(self._model, "_supports_attention_backend", False):
            name = type(self._model).__name__
            raise ValueError(f"{name} isn't supported: its attention can't be replaced")
        self._model.eval().to(device)
        self.invariant = False
        if isinstance(kernels, NativeKernels):
            self.invariant = _compile_linears(self._model, kernels)
        self._device = device
        self._layout = layout
        self._kernels = kernels

    def close(self) -> None:
        """See Model."""

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        plan: StepPlan,
        arena: torch.Tensor,
        logit_rows: IntArray,
    ) -> torch.Tensor:
        """See Model."""
        ids, at, wanted = _on(self._device, token_ids, positions, logit_rows)
        output = self._model(
            input_ids=ids[None],
            position_ids=at[None],
            use_cache=False,
            logits_to_keep=wanted,
            kvtier_step=_Step(plan, arena, self._layout, self._kernels),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def verify(self, arena: torch.Tensor) -> None:
        """Compare a short text's logits over pages with those of the model's own attention.

        Finds architectures whose modules do more than they tell their attention function. Uses the arena's last
        frames, and zeroes them. Raises ValueError when the logits differ by more than rounding could make them.
        """
        half = min(_PROBE_TOKENS, len(arena) * self._layout.page_tokens) // 2
        pages = -(-2 * half // self._layout.page_tokens)
        frames = np.arange(len(arena) - pages, len(arena), dtype=np.int32)
        at = np.arange(2 * half, dtype=np.int32)
        ids = at * 7919 % int(self._model.config.vocab_size)
        parts = []
        for rows in (slice(0, half), slice(half, 2 * half)):
            plan = make_plan([(0, half, rows.stop, frames)], self._layout.page_tokens)
            parts.append(self.forward(ids[rows], at[rows], plan, arena, at[:half]))
        arena[len(arena) - pages :] = 0
        self._model.set_attn_implementation("eager")
        own = self._model(input_ids=_on(self._device, ids)[0][None], use_cache=False).logits[0].float()
        self._model.set_attn_implementation(_ATTENTION_NAME)
        error = (torch.cat(parts) - own).norm() / own.norm()
        if not error < _PROBE_ERROR:
            name = type(self._model).__name__
            raise ValueError(
                f"{name} isn't supported: over pages its logits differ by {error:.0%} from its own attention's"
            )


def _compile_linears(model: Any, kernels: NativeKernels) -> bool:
    """Let our kernels do the model's linear layers; True when they do all of its products.

    What remains then works on one row at a time, and row by row its bits don't depend on the number of rows, as long
    as torch runs it in one thread and no row ends within a vector.
    """
    complete = True
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.in_features % 2 == 0:
                setattr(parent, name, NativeLinear(kernels, child))
                complete = complete and child.in_features % 32 == 0
    for module in model.modules():
        matrices = any(p.dim() > 1 for p in module.parameters(recurse=False))
        complete = complete and not (matrices and type(module) is not torch.nn.Embedding)
    return complete


_REFUSED_BY_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")


def _paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, Hq, rows, D]
    key: torch.Tensor,  # [1, H, rows, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    kvtier_step: _Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers' attention modules: write this step's K/V into pages, then attend the pages."""
    if kvtier_step is None:
        raise ValueError(f"{type(module).__name__} doesn't pass our step on to its attention")
    for name in _REFUSED_BY_ATTENTION:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} isn't supported yet: it uses {name}={kwargs[name]}")
    step = kvtier_step
    q, k, v = (t[0].transpose(0, 1).to(step.layout.dtype) for t in (query, key, value))
    layer = int(module.layer_idx)
    step.kernels.write_kv(k, v, step.arena, step.layout, step.plan, layer)
    scale = scaling if scaling is not None else step.layout.head_dim**-0.5
    out, _ = step.kernels.paged_attention(q, step.arena, step.layout, step.plan, layer, scale)
    return out[None], None
