"""The configs of well-known models, in the fields of their published config.json that a KV cache depends on. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False}
_LLAMA2 = {**_LLAMA, "dtype": "float16", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3 = {**_LLAMA, "dtype": "bfloat16", "vocab_size": 128256, "max_position_embeddings": 8192}
_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_MISTRAL = {**_8B, "model_type": "mistral", "dtype": "bfloat16", "max_position_embeddings": 32768}
_DEEPSEEK: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": {
        **_LLAMA2,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-2-70b": {**_LLAMA2, **_70B},
    "llama-3-8b": {**_LLAMA3, **_8B},
    "llama-3-70b": {**_LLAMA3, **_70B},
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "mistral-7b": {**_MISTRAL, "vocab_size": 32000, "sliding_window": 4096},
    "mistral-7b-v0.3": {**_MISTRAL, "vocab_size": 32768, "sliding_window": None},
    "gemma-2-9b": {
        "model_type": "gemma2",
        "dtype": "bfloat16",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "deepseek-v2": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "first_k_dense_replace": 1,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    },
    "smollm2-135m": {
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def preset(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """The preset of a name or a Hugging Face id of the same model ("meta-llama/Llama-2-7b-chat-hf"), with its own name."""
    wanted = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    for ending in ("-v0.1", "-hf", "-instruct", "-chat", "-it", "-base"):
        wanted = wanted.removesuffix(ending)
    return (wanted, PRESETS[wanted]) if wanted in PRESETS else None


def unknown(name: str) -> str:
    """Says which presets there are, the likeliest first."""
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return (
        f"no model {name!r}: {guess}give a config.json, a Hugging Face folder, or one of {', '.join(PRESETS)}"
    )
