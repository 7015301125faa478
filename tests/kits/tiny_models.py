"""Builds tiny random models in Hugging Face folders, so that tests need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
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
        least = -0.5 if model.__name__.startswith("Gemma") else 0.5  # their norms multiply by 1 + weight
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith(("bias", "sinks")):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(least, least + 1.0)
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


def make_tiny_gemma2(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Gemma 2: layers with a window of 32 and full ones in turn, softcaps on scores and logits."""
    shape = {
        **_SHAPE,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 1,  # scores as large as a trained model's, so that the softcap bends them
        "sliding_window": 32,
        "attn_logit_softcapping": 1.0,
        "tie_word_embeddings": True,
    }
    return _save(Gemma2Config(**{**shape, **changes}), Gemma2ForCausalLM, folder, seed)


def make_tiny_gemma3(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Gemma 3: two layers with a window of 32 before each full one, a rope of their own for each kind."""
    shape = {
        **_SHAPE,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    }
    return _save(Gemma3TextConfig(**{**shape, **changes}), Gemma3ForCausalLM, folder, seed)


def make_tiny_gpt_oss(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random gpt-oss: learned sink logits, experts, layers with a window of 32 and full ones in turn."""
    shape = {**_SHAPE, "head_dim": 32, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _save(GptOssConfig(**{**shape, **changes}), GptOssForCausalLM, folder, seed)


_LATENTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}


def make_tiny_deepseek_v2(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random DeepSeek V2: latent attention, queries at full rank, one dense layer and two of experts."""
    shape = {**_SHAPE, **_LATENTS, "qk_rope_head_dim": 8, "q_lora_rank": None, **changes}
    return _save(DeepseekV2Config(**shape), DeepseekV2ForCausalLM, folder, seed)


def make_tiny_deepseek_v3(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random DeepSeek V3: latent attention under YaRN, queries through a latent of their own."""
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "rope_theta": 10000.0,
    }
    own = {"qk_rope_head_dim": 16, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "rope_parameters": rope}
    return _save(
        DeepseekV3Config(**{**_SHAPE, **_LATENTS, **own, **changes}), DeepseekV3ForCausalLM, folder, seed
    )
