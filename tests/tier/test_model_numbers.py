"""What `kvtier plan` reads from a config.json is what the published modules have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvtier.lab.plan.model import find_model
from kvtier.lab.plan.model_numbers import LayerKind, layer_windows, read_numbers
from kvtier.lab.plan.model_presets import PRESETS, preset, unknown
from kvtier.lab.plan.plan import spec_of, stored_page_bytes
from kvtier.tier.pages.page import PageFormat
from kvtier.workers.models.base import layer_groups, read_shape

PUBLISHED = {  # parameters, by the models' cards and checkpoints
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-2-9b": 9_241_705_984,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "smollm2-135m": 134_515_008,
}
TINY: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_models.make_tiny_llama,
    "mistral": tiny_models.make_tiny_mistral,
    "mistral-window": lambda folder: tiny_models.make_tiny_mistral(folder, sliding_window=64),
    "qwen2": tiny_models.make_tiny_qwen2,
    "qwen2-windows": lambda folder: tiny_models.make_tiny_qwen2(
        folder, num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=3
    ),
    "qwen3": tiny_models.make_tiny_qwen3,
    "gemma2": tiny_models.make_tiny_gemma2,
    "gemma3": tiny_models.make_tiny_gemma3,
    "deepseek-v2": tiny_models.make_tiny_deepseek_v2,
    "deepseek-v3": tiny_models.make_tiny_deepseek_v3,
}


def modules_of(config: Mapping[str, Any]) -> torch.nn.Module:
    """The model that a config describes, without memory for its weights."""
    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))  # type: ignore[no-any-return]


def count(model: torch.nn.Module) -> int:
    """Parameters, and the corrections of routers' scores, which are trained but no parameters to torch."""
    corrections = [
        buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    return sum(tensor.numel() for tensor in [*model.parameters(), *corrections])


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_parameters_are_those_of_its_modules_and_of_its_card(name: str) -> None:
    counted = read_numbers(PRESETS[name], name).parameters

    assert counted == PUBLISHED[name]
    assert counted == count(modules_of(PRESETS[name]))


@pytest.mark.parametrize("kind", TINY)
def test_a_folders_numbers_are_what_the_worker_serves(kind: str, tmp_path: Path) -> None:
    folder = TINY[kind](tmp_path / kind)
    shape = read_shape(folder)

    numbers = find_model(str(folder))

    groups = layer_groups(shape, PageFormat.FP32, 16, (PageFormat.FP32, PageFormat.FP8))
    assert numbers.kinds == tuple(LayerKind(len(group.layers), group.window) for group in groups)
    for group, one in zip(groups, numbers.kinds, strict=True):
        for format, spec in group.specs.items():
            assert spec_of(numbers, one, format, 16, numbers.kv_heads) == spec
    in_l1 = sum(group.specs[PageFormat.FP8].nbytes for group in groups)
    below = sum(group.specs[PageFormat.FP8].slot_bytes for group in groups)
    assert stored_page_bytes(numbers, "fp8", 16) == (in_l1, below)
    assert numbers.parameters == count(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "gemma2", "sliding_window": 8}, (8, 0, 8, 0, 8, 0, 8)),
        ({"model_type": "gemma3_text", "sliding_window": 8}, (8, 8, 8, 8, 8, 0, 8)),
        (
            {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2},
            (8, 0, 8, 0, 8, 0, 8),
        ),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 7),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 7),
        ({"model_type": "llama", "sliding_window": 8}, (0,) * 7),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, (0,) * 7),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 5},
            (0, 0, 0, 0, 0, 8, 8),
        ),
        (
            {"sliding_window": 8, "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4},
            (0, 0, 0, 8, 8, 8, 8),
        ),
    ],
)
def test_layers_have_the_windows_that_their_architecture_gives_them(
    fields: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert layer_windows({"num_hidden_layers": 7, **fields}) == windows


def test_experts_count_whole_and_a_token_passes_some_of_them() -> None:
    mixtral = {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 1000,
    }

    numbers = read_numbers(mixtral, "mixtral")

    assert numbers.parameters == count(modules_of(mixtral))
    assert numbers.parameters - numbers.active_parameters == 3 * (8 - 2) * 3 * 256 * 512


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [({"quant_method": "fp8"}, 8), ({"quant_method": "awq", "bits": 4}, 4), ({}, 16)],
)
def test_a_quantized_checkpoint_weighs_less_but_for_its_embeddings(scheme: dict[str, Any], bits: int) -> None:
    config = {**PRESETS["llama-3-8b"], "quantization_config": scheme}

    numbers = read_numbers(config, "quantized")

    embeddings = 2 * 128256 * 4096
    assert numbers.weights_bytes == 2 * embeddings + (numbers.parameters - embeddings) * bits // 8


def test_fields_of_the_text_model_win_over_those_around_it() -> None:
    inner = {**PRESETS["llama-3-8b"]}

    numbers = read_numbers({"model_type": "llava", "hidden_size": 1, "text_config": inner}, "both")

    assert numbers.parameters == PUBLISHED["llama-3-8b"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"hidden_size": None}, "can't be used"),
        ({"num_attention_heads": 0}, "can't be used"),
    ],
)
def test_a_config_that_cannot_be_summed_says_why(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_numbers({**PRESETS["llama-3-8b"], **change}, "odd")


def test_a_missing_field_is_named() -> None:
    fields = {key: value for key, value in PRESETS["llama-3-8b"].items() if key != "num_hidden_layers"}

    with pytest.raises(ValueError, match="num_hidden_layers"):
        read_numbers(fields, "odd")


def test_weights_of_an_unknown_architecture_are_said_to_be_a_guess() -> None:
    numbers = read_numbers({**PRESETS["llama-3-8b"], "model_type": "novel"}, "odd")

    assert any("novel" in note and "--weights-gb" in note for note in numbers.notes)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama-2-7b", "llama-2-7b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
    ],
)
def test_a_preset_is_found_by_the_names_it_goes_by(asked: str, name: str) -> None:
    found = preset(asked)

    assert found is not None and found[0] == name


def test_a_name_that_is_near_is_guessed() -> None:
    assert preset("lama-3-8b") is None
    assert "did you mean llama-3-8b?" in unknown("lama-3-8b")
