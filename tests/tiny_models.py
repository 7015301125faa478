"""Builds tiny random models in Hugging Face folders, so that tests need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def _save(config: PreTrainedConfig, model: type[PreTrainedModel], folder: Path, seed: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model(config)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.08)
    made.save_pretrained(folder)
    return folder


def make_tiny_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random two-layer Llama in float32; `changes` go to its config."""
    return _save(LlamaConfig(**{**_SHAPE, **changes}), LlamaForCausalLM, folder, seed)


def make_tiny_mistral(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random two-layer Mistral without a sliding window."""
    shape = {**_SHAPE, "sliding_window": None, **changes}
    return _save(MistralConfig(**shape), MistralForCausalLM, folder, seed)


def make_tiny_qwen2(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random two-layer Qwen2: biases on q, k and v."""
    return _save(Qwen2Config(**{**_SHAPE, **changes}), Qwen2ForCausalLM, folder, seed)


def make_tiny_qwen3(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random two-layer Qwen3: norms on q and k, a head size of its own."""
    return _save(Qwen3Config(**{**_SHAPE, "head_dim": 32, **changes}), Qwen3ForCausalLM, folder, seed)
