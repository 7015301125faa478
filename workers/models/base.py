"""What a model is to the worker: its shape as config.json says it, its groups of layers, and the step it computes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from kvtier.kernels.ops import IntArray, StepPlan
from kvtier.tier.pages.page import PageFormat, PageSpec
from kvtier.workers.models.files.config import causal_class, load_config, settings_of
from kvtier.workers.models.files.files import read_config
from kvtier.workers.models.formats import LayerGroup, raw_format

LATENT_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # angles that depend on a token's position alone
_IGNORE_WINDOWS = ("LlamaForCausalLM",)  # its attention is full, whatever a config says


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What config.json says of a causal LM, with transformers' defaults where it says nothing.

    `num_kv_heads` and `head_dim` are those of its pages: with latent attention one head of the latent's rank, and
    `rope_dim` is the size of the key that carries the position (0 without).
    """

    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    layer_windows: tuple[int, ...]  # by layer, 0: full attention
    vocab_size: int
    max_positions: int  # that the model is meant for; a rope's scaling counts where it says of what length
    longest_positions: int  # that its rope can be asked for
    norm_eps: float
    tied: bool
    eos_ids: tuple[int, ...]
    rope: str  # canonical text of the rope settings
    config: dict[str, Any]  # all settings, defaults included

    @property
    def is_latent(self) -> bool:
        """Pages hold latents (MLA)."""
        return self.rope_dim > 0

    @property
    def has_experts(self) -> bool:
        """Its rows choose experts."""
        return any(int(self.config.get(name) or 0) > 1 for name in _EXPERTS)

    @property
    def config_digest(self) -> str:
        """Digest of all settings, in hex."""
        text = json.dumps(self.config, sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows that layers have, full attention (0) first."""
        return tuple(sorted(set(self.layer_windows)))


def page_spec(path: str, dtype: str, page_tokens: int) -> PageSpec:
    """Unquantized pages of the first layer group of the model in a folder; reads its config only.

    Raises ValueError for a model that isn't supported.
    """
    shape = read_shape(Path(path))
    raw = raw_format(dtype)
    return layer_groups(shape, raw, page_tokens, (raw,))[0].specs[raw]


def layer_groups(
    shape: ModelShape, raw: PageFormat, page_tokens: int, formats: Iterable[PageFormat]
) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers, full attention first, with pages in these formats. Raises ValueError."""
    formats = tuple(formats)
    if shape.head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8, {shape.architecture} has {shape.head_dim}")
    groups = []
    for window in shape.windows:
        layers = tuple(i for i, own in enumerate(shape.layer_windows) if own == window)
        specs = {
            format: PageSpec(
                num_layers=len(layers),
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                page_tokens=page_tokens,
                format=format,
                rope_dim=shape.rope_dim,
                rope_format=raw,
            )
            for format in formats
        }
        groups.append(LayerGroup(layers, window, specs))
    return tuple(groups)


def window_refusal(shape: ModelShape) -> str:
    """Why a request of this model can't have a window of its own; "" when it may."""
    if shape.is_latent:
        return f"{shape.architecture} has latent attention, for which there is no window"
    if len(shape.windows) > 1:
        return (
            f"{shape.architecture} has layers with a window of their own ({shape.windows[-1]}) and full ones"
        )
    return ""


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`. Raises ValueError naming what isn't supported, and why."""
    raw = read_config(folder)
    named = list(raw.get("architectures") or ())
    _check_supported(raw, named[0] if named else "unknown")
    config = load_config(folder)
    settings = settings_of(config)
    architecture = causal_class(config)
    if not architecture or (named and architecture not in named):
        own = f"transformers' causal LM of it is {architecture}" if architecture else "it is no causal LM"
        raise ValueError(
            f"{named[0] if named else 'this model'} isn't supported yet: its model_type is {config.model_type}, and {own}"
        )
    _check_supported(settings, architecture)

    def number(name: str) -> int:
        value = getattr(config, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{architecture} isn't supported: its config's {name} is {value!r}")
        return value

    def number_or(name: str, other: int) -> int:
        return other if getattr(config, name, None) is None else number(name)

    rank = number_or("kv_lora_rank", 0)
    hidden, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    rope = rope_settings(settings)
    positions, longest = _reach(number("max_position_embeddings"), rope)
    intermediate = getattr(config, "intermediate_size", None)
    return ModelShape(
        architecture=architecture,
        num_layers=layers,
        hidden=hidden,
        intermediate=intermediate if isinstance(intermediate, int) else 0,
        num_heads=heads,
        num_kv_heads=1 if rank else number_or("num_key_value_heads", heads),
        head_dim=rank or number_or("head_dim", hidden // max(1, heads)),
        rope_dim=number("qk_rope_head_dim") if rank else 0,
        layer_windows=_layer_windows(config, architecture, layers),
        vocab_size=number("vocab_size"),
        max_positions=positions,
        longest_positions=longest,
        norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        eos_ids=_eos_ids(folder, raw),
        rope=json.dumps(rope, sort_keys=True),
        config=settings,
    )


def _reach(positions: int, rope: dict[str, Any]) -> tuple[int, int]:
    """Positions that a model is meant for, and those that its rope can be asked for.

    YaRN says of which length it multiplies, and model cards leave max_position_embeddings at that. Linear scaling
    doesn't say it: max_position_embeddings may be the length before or after.
    """
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or positions
        meant = max(positions, int(original * float(rope.get("factor") or 1.0)))
        return meant, meant
    if rope.get("rope_type") == "linear":
        return positions, int(positions * max(1.0, float(rope.get("factor") or 1.0)))
    return positions, positions


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings in one form, whichever transformers version wrote the config; by kind of layer where they differ."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if rope and all(isinstance(v, dict) for v in rope.values()):
        return rope
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "rope_local_base_freq" in config:
        rope["rope_local_base_freq"] = config["rope_local_base_freq"]
    return rope


def _check_supported(config: dict[str, Any], architecture: str) -> None:
    reason = _unsupported(config, architecture)
    if reason:
        raise ValueError(f"{architecture} isn't supported yet: {reason}")


def _unsupported(config: dict[str, Any], architecture: str) -> str:
    """Why pages can't hold this model's attention; "" when they can."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder model; only decoder-only models have the pages kept here"
    if "text_config" in config:
        return "it takes more than text"
    if config.get("kv_lora_rank") and architecture not in LATENT_ARCHITECTURES:
        return f"multi-head latent attention is known for {', '.join(LATENT_ARCHITECTURES)} only"
    if config.get("use_bidirectional_attention"):
        return "its attention isn't causal"
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}; only full and sliding-window attention have pages"
    rope = rope_settings(config)
    for settings in (rope,) if "rope_type" in rope else rope.values():
        kind = settings.get("rope_type") or settings.get("type") or "default"
        if kind not in _FIXED_ROPES:
            return (
                f"rope type {kind!r} changes with the length of the text, so cached keys would go stale"
                f" (supported: {', '.join(_FIXED_ROPES)})"
            )
    return ""


def _layer_windows(config: Any, architecture: str, layers: int) -> tuple[int, ...]:
    """Each layer's window."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if not window or architecture in _IGNORE_WINDOWS:
        return (0,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


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


@dataclass(frozen=True, slots=True)
class ModelStep:
    """The rows of one step, and by layer group which pages they write and attend."""

    token_ids: IntArray  # [rows]
    positions: IntArray  # [rows]
    plans: tuple[StepPlan, ...]
    logit_rows: IntArray  # [m]


class Model(Protocol):
    """A forward over one step's rows."""

    kind: Literal["lean", "transformers"]
    invariant: bool  # a row's bits don't depend on the step's other rows, whatever the step's shape
    window_refusal: str  # why a request can't have a window of its own; "" when it may

    def forward(self, step: ModelStep, arena: torch.Tensor) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of the step's `logit_rows`, float32 [m, vocab]."""

    def close(self) -> None:
        """Free what isn't Python's; no call may follow."""


def on_device(device: torch.device, *arrays: IntArray) -> tuple[torch.Tensor, ...]:
    """The arrays as int64 tensors."""
    return tuple(torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
