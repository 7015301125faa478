"""Model forwards over pages: equal to transformers, and each row's bits its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from gateway_kit import EOS, IM_START, TEMPLATE, make_byte_tokenizer
from kernel_kit import COMPILED, KINDS, Kind
from runner_kit import Pool, Sequence, feed, random_tokens, runner_of, step
from transformers import AutoModelForCausalLM

from kvtier.kernels.ops import TorchKernels
from kvtier.tier.pages.page import PageFormat, PageSpec
from kvtier.workers.models.base import page_spec, read_shape
from kvtier.workers.runner.runner import IntArray, Runner, StepBatch

pytestmark = pytest.mark.slow

TOKENS = 150
FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": tiny_models.make_tiny_llama,
    "mistral": tiny_models.make_tiny_mistral,
    "qwen2": tiny_models.make_tiny_qwen2,
    "qwen3": tiny_models.make_tiny_qwen3,
    "mistral with a window": partial(tiny_models.make_tiny_mistral, sliding_window=32),
    "qwen2 with a window": partial(
        tiny_models.make_tiny_qwen2, use_sliding_window=True, sliding_window=32, max_window_layers=0
    ),
}
QUANTIZED = ("fp8", "int8", "k8v4", "int4", "int4c", "timedecay")
SEEN_KINDS = tuple(kind for kind in KINDS if kind != "portable")  # as a runner can be asked for them


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in FAMILIES.items()}


def tokens_of(seed: int, n: int = TOKENS) -> IntArray:
    return random_tokens(seed, n, tiny_models.VOCAB)


def transformers_logits(folder: Path, tokens: IntArray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float()
    return logits


@pytest.mark.parametrize("forward", ["lean", "transformers"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_forward_over_pages_equals_transformers(
    folders: dict[str, Path], family: str, kind: Kind, forward: str
) -> None:
    tokens = tokens_of(0)
    expected = transformers_logits(folders[family], tokens)

    with runner_of(folders[family], kind=kind, forward=forward) as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [33, 1, 1, 80, 35])

    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("forward", ["lean", "transformers"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_errs_at_most_twice_what_transformers_errs(
    folders: dict[str, Path], dtype: str, forward: str, kind: Kind
) -> None:
    tokens = tokens_of(1)
    exact = transformers_logits(folders["llama"], tokens)
    fair = (transformers_logits(folders["llama"], tokens, getattr(torch, dtype)) - exact).pow(2).mean().sqrt()

    with runner_of(folders["llama"], kind=kind, forward=forward, dtype=dtype) as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [100, 1, 49])

    assert (logits - exact).pow(2).mean().sqrt() <= 2 * fair


@pytest.mark.parametrize("cache_format", QUANTIZED)
def test_quantized_pages_cost_little_accuracy_and_all_forwards_agree_on_it(
    folders: dict[str, Path], cache_format: str
) -> None:
    """Of random weights; a trained model loses less. The bound is about twice what was measured."""
    bound = {"int8": 0.01}.get(cache_format, 0.1)
    tokens = tokens_of(2, 200)
    exact = transformers_logits(folders["llama"], tokens)
    options = {"cache_format": cache_format, "recent_tokens": 48}
    ways = [(kind, forward) for kind in SEEN_KINDS for forward in ("lean", "transformers")]

    logits = []
    for kind, forward in ways:
        with runner_of(folders["llama"], kind=kind, forward=forward, **options) as runner:
            logits.append(feed(runner, Sequence(Pool(runner), tokens), [33, 1, 1, 110, 55]))

    assert 1e-4 < (logits[0] - exact).norm() / exact.norm() < bound
    for way, other in zip(
        ways, logits, strict=True
    ):  # a code on the border may fall either way in two forwards
        assert (other - logits[0]).norm() / exact.norm() < bound / 5, way


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", ["lean", "transformers"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral with a window"])
def test_invariant_rows_are_the_same_bits_in_any_chunk_batch_prefill_or_decode(
    folders: dict[str, Path], family: str, kind: Kind, forward: str, dtype: str
) -> None:
    tokens = tokens_of(2)
    options = {"kind": kind, "forward": forward, "dtype": dtype, "numerics": "invariant"}

    with runner_of(folders[family], **options) as runner:
        pool = Pool(runner)
        whole, chunked, decoded = (Sequence(pool, tokens) for _ in range(3))
        expected = feed(runner, whole, [TOKENS])
        in_chunks = feed(runner, chunked, [7, 100, 43])
        one_by_one = feed(runner, decoded, [100] + [1] * 30)
        kept = [runner.arena[s.frames].clone() for s in (whole, chunked)]
        crowded = crowd(runner, pool, decoded)

    assert torch.equal(in_chunks, expected)
    assert torch.equal(one_by_one, expected[:130])
    assert torch.equal(crowded, expected[130])
    if not runner.groups[0].window:
        assert torch.equal(kept[1][:9], kept[0][:9])  # full pages: what the cache keeps is the same too


def crowd(runner: Runner, pool: Pool, sequence: Sequence) -> torch.Tensor:
    """Logits of the next row of a sequence, decoded among 6 rows and a chunk of other sequences."""
    others = [Sequence(pool, tokens_of(5 + i, 1)) for i in range(6)]
    parts = [(other, 1) for other in others] + [(sequence, 1), (Sequence(pool, tokens_of(6, 70)), 70)]
    return step(runner, parts)[6][0]


@pytest.mark.parametrize("cache_format", QUANTIZED)
@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_a_recipes_rows_are_the_same_bits_in_any_chunk_and_batch(
    folders: dict[str, Path], kind: Kind, cache_format: str
) -> None:
    tokens = tokens_of(3, 300)
    options = {"kind": kind, "numerics": "invariant", "cache_format": cache_format, "recent_tokens": 32}

    with runner_of(folders["llama"], **options) as runner:
        pool = Pool(runner)
        decoded = Sequence(pool, tokens)
        expected = feed(runner, Sequence(pool, tokens), [300])
        in_chunks = feed(runner, Sequence(pool, tokens), [7, 100, 43, 150])
        one_by_one = feed(runner, decoded, [250] + [1] * 20)
        crowded = crowd(runner, pool, decoded)

    assert torch.equal(in_chunks, expected)
    assert torch.equal(one_by_one, expected[:270])
    assert torch.equal(crowded, expected[270])


@pytest.mark.parametrize("kind", COMPILED[:1])
def test_a_rows_bits_do_not_depend_on_the_number_of_threads(folders: dict[str, Path], kind: Kind) -> None:
    tokens = tokens_of(3)

    logits = []
    for threads in (1, 2, 3):
        with runner_of(folders["llama"], kind=kind, dtype="bfloat16", threads=threads) as runner:
            logits.append(feed(runner, Sequence(Pool(runner), tokens), [120, 1, 29]))

    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("forward", ["lean", "transformers"])
def test_logits_are_of_the_rows_asked_for_in_their_order(
    folders: dict[str, Path], forward: str, kind: Kind
) -> None:
    tokens = tokens_of(4, 40)
    with runner_of(folders["llama"], kind=kind, forward=forward) as runner:
        sequence = Sequence(Pool(runner), tokens)
        rows = [sequence.rows(0, 40)]
        every = feed(runner, sequence, [40])
        at = np.arange(40, dtype=np.int32)

        some = runner.forward(StepBatch(tokens, at, rows, np.array([39, 3, 17], np.int32)))
        none = runner.forward(StepBatch(tokens, at, rows, np.array([], np.int32)))

    assert torch.equal(some, every[[39, 3, 17]])
    assert none.shape == (0, tiny_models.VOCAB)


@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_odd_shapes_and_tied_embeddings_equal_transformers(tmp_path: Path, kind: Kind) -> None:
    """No size but the hidden one is a multiple of a vector's or panel's, and tied weights serve both ends."""
    shape = {
        "hidden_size": 96,
        "intermediate_size": 136,
        "head_dim": 24,
        "num_attention_heads": 6,
        "vocab_size": 301,
        "tie_word_embeddings": True,
    }
    folder = tiny_models.make_tiny_llama(tmp_path, **shape)
    tokens = tokens_of(7, 60) % 301
    expected = transformers_logits(folder, tokens)

    with runner_of(folder, kind=kind, forward="lean", page_tokens=1) as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [20, 40])

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_equals_transformers(tmp_path: Path, rope: dict[str, Any], kind: Kind) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path, rope_parameters=rope)
    tokens = tokens_of(8)
    expected = transformers_logits(folder, tokens)

    with runner_of(folder, kind=kind, forward="lean") as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [100, 50])

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind linear_attention"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layers of kind chunked_attention"),
        ({"kv_lora_rank": 512}, "multi-head latent attention is known for DeepseekV2ForCausalLM, Deepseek"),
        ({"use_bidirectional_attention": True}, "its attention isn't causal"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"text_config": {}}, "more than text"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope type 'dynamic'"),
    ],
)
def test_a_model_that_pages_cannot_hold_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))

    with pytest.raises(ValueError, match=rf"LlamaForCausalLM isn't supported yet: .*{reason}"):
        page_spec(str(tmp_path), "float32", 16)


def test_the_lean_forward_is_refused_where_it_does_not_know_the_architecture(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path, mlp_bias=True)

    refused = pytest.raises(ValueError, match="lean can't run this model: biases on projections")
    with refused, runner_of(folder, forward="lean"):
        pass
    with runner_of(folder, forward="auto") as runner:
        assert runner.forward_kind == "transformers"


def test_a_model_whose_logits_over_pages_are_wrong_is_refused_when_loaded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an architecture's would be that does more than it tells its attention function."""
    monkeypatch.setattr(
        TorchKernels,
        "paged_attention",
        lambda self, q, *_, **__: (torch.zeros_like(q), q.new_zeros(q.shape[:2])),
    )

    refused = pytest.raises(ValueError, match=r"LlamaForCausalLM isn't supported: .* differ by [\d.]+%")
    with refused, runner_of(folders["llama"], forward="transformers"):
        pass


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_checking_a_model_leaves_the_arena_as_it_was(folders: dict[str, Path], page_tokens: int) -> None:
    with runner_of(folders["llama"], forward="transformers", page_tokens=page_tokens) as runner:
        assert not runner.arena.any()


def test_invariant_numerics_are_refused_for_mixtures_of_experts(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))

    refused = pytest.raises(ValueError, match="numerics invariant isn't supported for LlamaForCausalLM")
    with refused, runner_of(tmp_path, numerics="invariant"):
        pass


def test_page_spec_needs_config_json_only(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["qwen3"] / "config.json").read_text())

    assert page_spec(str(tmp_path), "bfloat16", 32) == PageSpec(2, 2, 32, 32, PageFormat.BF16)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int3'"):
        page_spec(str(tmp_path), "int3", 32)


def test_end_tokens_come_from_the_generation_config(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))

    assert read_shape(tmp_path).eos_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_shape(tmp_path).eos_ids == (7, 8)


def test_a_runner_ends_sequences_as_configs_tokenizer_and_chat_template_say(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Ids outside the vocabulary can't come, so they end nothing."""
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9999, -1]}')
    template = TEMPLATE.replace("<|im_end|>", "<|im_start|>")
    make_byte_tokenizer(folder, template=template)

    with runner_of(folder) as runner:
        assert runner.eos_ids == (7, EOS, IM_START)
