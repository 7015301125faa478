"""What sums about a model's KV cache need to know of it, read from the fields of its config.json. Pure.

Parameters are counted from the shape, as the published modules have them: every weight, norm and bias of the text
model. Extra prediction heads that a checkpoint may carry beside it (DeepSeek-V3's) are not part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_COUNTED = (  # their modules are the ones that _parameters knows
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
    ),
    *("deepseek_v2", "deepseek_v3", "smollm3"),
)
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")  # where a config leaves it open


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that see the same tokens: `window` tokens back, 0 for all of them."""

    layers: int
    window: int


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """A causal LM as a KV cache sees it.

    `kv_heads` and `head_dim` are those of what is cached: with latent attention (MLA) one latent of rank `head_dim`
    for all heads, and `rope_dim` is the size of the key that carries the position (0 without). `value_dim` is the size
    of one head of attention, `width` the activations of one token in the widest layer, in numbers.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    value_dim: int
    width: int
    vocab: int
    max_tokens: int
    dtype: str
    parameters: int
    active_parameters: int  # those that one token passes; all of them without experts
    weights_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Layers that keep something of each token."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def is_latent(self) -> bool:
        """One latent is cached for all heads (MLA)."""
        return self.rope_dim > 0

    def with_kv_heads(self, kv_heads: int) -> ModelNumbers:
        """The same model with another number of KV heads, its weights as they are. Raises ValueError."""
        if self.is_latent:
            raise ValueError(f"{self.name} caches one latent for all heads: it has no KV heads to change")
        if not 0 < kv_heads <= self.heads or self.heads % kv_heads:
            raise ValueError(
                f"KV heads must divide the {self.heads} heads of {self.name}, got {kv_heads}: "
                f"choose one of {', '.join(str(n) for n in range(1, self.heads + 1) if not self.heads % n)}"
            )
        kept = "the weights are those of the model as it is, not of one with other KV heads"
        changed = kv_heads != self.kv_heads
        return replace(self, kv_heads=kv_heads, notes=(*self.notes, kept)) if changed else self


def read_numbers(config: Mapping[str, Any], name: str, weights_bytes: int | None = None) -> ModelNumbers:
    """The numbers of a config.json's fields; `weights_bytes` where the weights themselves are at hand.

    Raises ValueError that names the field that is missing or can't be used.
    """
    text = config.get("text_config")
    fields: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    _refuse(fields, name)
    try:
        return _numbers(fields, name, weights_bytes)
    except KeyError as error:
        raise ValueError(f"{name}: its config.json has no {error}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{name}: a number of its config.json can't be used: {error}") from error


def _refuse(config: Mapping[str, Any], name: str) -> None:
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{name} is an encoder-decoder model; only decoder-only models are planned here")
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(
            f"{name} has layers of kind {', '.join(others)}; only full and sliding-window attention are summed"
        )


def _numbers(config: Mapping[str, Any], name: str, weights_bytes: int | None) -> ModelNumbers:
    rank = int(config.get("kv_lora_rank") or 0)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    total, active = _parameters(config)
    kind = str(config.get("model_type", ""))
    numbers = ModelNumbers(
        name=name,
        kinds=_kinds(config),
        hidden=hidden,
        heads=heads,
        kv_heads=1 if rank else _kv_heads(config),
        head_dim=rank or head_dim,
        rope_dim=int(config["qk_rope_head_dim"]) if rank else 0,
        value_dim=int(config["v_head_dim"]) if rank else head_dim,
        width=4 * hidden + 2 * _active_intermediate(config),
        vocab=int(config["vocab_size"]),
        max_tokens=int(config.get("max_position_embeddings") or 2048),
        dtype=dtype if dtype in _DTYPE_BYTES else "bfloat16",
        parameters=total,
        active_parameters=active,
        weights_bytes=0,
    )
    if weights_bytes is not None:
        return replace(numbers, weights_bytes=weights_bytes)
    note = (
        f"the weights of model_type {kind!r} were counted as those of a gated transformer; "
        "give --weights-gb if you know them"
    )
    counted = _weights_bytes(config, numbers)
    return replace(numbers, weights_bytes=counted, notes=() if kind in _COUNTED else (note,))


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _kinds(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Layers by window, full attention first."""
    counts = Counter(layer_windows(config))
    return tuple(LayerKind(layers, window) for window, layers in sorted(counts.items()))


def layer_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Each layer's window, 0 for full attention; what a config leaves open is as its architecture's modules have it."""
    layers, window = int(config["num_hidden_layers"]), int(config.get("sliding_window") or 0)
    kind = str(config.get("model_type", ""))
    named = config.get("layer_types")
    if not window or kind == "llama" or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return (0,) * layers
    if named:
        return tuple(window if one == "sliding_attention" else 0 for one in named[:layers])
    if kind == "gemma2":  # in turn, the first one with a window
        return tuple(0 if layer % 2 else window for layer in range(layers))
    if kind.startswith("gemma3"):
        every = int(config.get("sliding_window_pattern") or 6)
        return tuple(window if (layer + 1) % every else 0 for layer in range(layers))
    if kind.startswith("qwen"):
        first = int(config.get("max_window_layers") or 0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return (window,) * layers


def _weights_bytes(config: Mapping[str, Any], numbers: ModelNumbers) -> int:
    """Parameters by the bytes of their type; with a quantized checkpoint, embeddings and head keep theirs."""
    each = _DTYPE_BYTES[numbers.dtype]
    scheme = config.get("quantization_config") or {}
    bits = 8 if "fp8" in str(scheme.get("quant_method", "")) else int(scheme.get("bits") or 8 * each)
    kept = _embeddings(config)
    return kept * each + (numbers.parameters - kept) * bits // 8


def _embeddings(config: Mapping[str, Any]) -> int:
    tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED)
    return int(config["vocab_size"]) * int(config["hidden_size"]) * (1 if tied else 2)


def _parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """All parameters, and those that one token passes."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    kind = str(config.get("model_type", ""))
    norms = (4 if kind in _FOUR_NORMS else 2) * hidden
    each = norms + (_latent_attention(config) if config.get("kv_lora_rank") else _attention(config))
    dense, (experts, active) = _dense_layers(config), _experts(config)
    outside = _embeddings(config) + hidden + layers * each + dense * _mlp(config)
    return outside + (layers - dense) * experts, outside + (layers - dense) * active


def _attention(config: Mapping[str, Any]) -> int:
    hidden, heads, kind = (
        int(config["hidden_size"]),
        int(config["num_attention_heads"]),
        config.get("model_type", ""),
    )
    dim = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * dim, _kv_heads(config) * dim
    count = hidden * (2 * queries + 2 * keys) + (2 * dim if kind in _HEAD_NORMS else 0)
    if kind == "qwen2":
        return count + queries + 2 * keys
    if not config.get("attention_bias"):
        return count
    return count + queries + 2 * keys + hidden


def _latent_attention(config: Mapping[str, Any]) -> int:
    """Down to the latents and up again (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    hidden, heads, rank = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    plain, rope, value = (int(config[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent_queries = int(config.get("q_lora_rank") or 0)
    queries = heads * (plain + rope)
    count = latent_queries * (hidden + 1 + queries) if latent_queries else hidden * queries
    count += hidden * (rank + rope) + rank + rank * heads * (plain + value)
    return count + heads * value * hidden


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Layers without experts."""
    layers = int(config["num_hidden_layers"])
    return min(layers, int(config.get("first_k_dense_replace") or 0)) if _num_experts(config) else layers


def _num_experts(config: Mapping[str, Any]) -> int:
    named = (config.get(key) for key in ("n_routed_experts", "num_local_experts", "num_experts"))
    return next((int(count) for count in named if count), 0)


def _mlp(config: Mapping[str, Any]) -> int:
    """Gate, up and down."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    return 3 * hidden * inner + (2 * inner + hidden if config.get("mlp_bias") else 0)


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of a layer of experts with its router, and those of them that one token passes."""
    count = _num_experts(config)
    if not count:
        return 0, 0
    hidden, inner = int(config["hidden_size"]), _expert_intermediate(config)
    one = 3 * hidden * inner
    router = hidden * count + (
        count if config.get("model_type") == "deepseek_v3" else 0
    )  # it corrects scores
    always = router + int(config.get("n_shared_experts") or 0) * one
    return always + count * one, always + int(config["num_experts_per_tok"]) * one


def _expert_intermediate(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def _active_intermediate(config: Mapping[str, Any]) -> int:
    """Numbers in the middle of a token's widest MLP."""
    dense = int(config["intermediate_size"])
    if not _num_experts(config):
        return dense
    chosen = int(config["num_experts_per_tok"]) + int(config.get("n_shared_experts") or 0)
    return max(dense if _dense_layers(config) else 0, chosen * _expert_intermediate(config))
