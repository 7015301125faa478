"""Model forwards over pages: equal to transformers, and each row's bits its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from kernel_kit import COMPILED, KINDS, Kind
from transformers import AutoModelForCausalLM

from kvtier.kernels.ops import TorchKernels
from kvtier.tier.page import PageFormat, PageSpec
from kvtier.workers.model import page_spec, read_shape
from kvtier.workers.runner import IntArray, Runner, SequenceRows, StepBatch, load_runner

TOKENS = 150
FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": tiny_models.make_tiny_llama,
    "mistral": tiny_models.make_tiny_mistral,
    "qwen2": tiny_models.make_tiny_qwen2,
    "qwen3": tiny_models.make_tiny_qwen3,
}
SEEN_KINDS = tuple(kind for kind in KINDS if kind != "portable")  # as a runner can be asked for them


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in FAMILIES.items()}


@contextmanager
def runner_of(folder: Path, cache_dir: Path | None = None, **changes: Any) -> Iterator[Runner]:
    """A runner with room for a few hundred tokens."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "page_tokens": 16,
        "l1_bytes": 4 << 20,
        "numerics": "auto",
        "forward": "auto",
        "threads": 2,
        "max_context": 1024,
        "max_batch_tokens": 512,
        "epoch": 0,
    }
    kind = changes.pop("kind", "torch")
    native = "off" if kind == "torch" else "require"
    runner = load_runner(str(folder), **{**options, **changes}, native=native, cache_dir=cache_dir)
    try:
        yield runner
    finally:
        runner.close()


def tokens_of(seed: int, n: int = TOKENS) -> IntArray:
    return np.random.default_rng(seed).integers(0, tiny_models.VOCAB, n).astype(np.int32)


def frames_of(runner: Runner, seed: int, n: int = TOKENS) -> IntArray:
    """Frames in no order, for `n` tokens, apart for each of the first few seeds."""
    need = -(-n // runner.spec.page_tokens)
    order = np.random.default_rng(99).permutation(len(runner.arena) - 1).astype(np.int32)
    return np.ascontiguousarray(order[seed * need : (seed + 1) * need])


def feed(runner: Runner, tokens: IntArray, frames: IntArray, chunks: list[int]) -> torch.Tensor:
    """Logits of all rows of one sequence, taken in chunks."""
    out = []
    at = 0
    for n in chunks:
        rows = SequenceRows(0, n, at + n, frames)
        batch = StepBatch(
            tokens[at : at + n], np.arange(at, at + n, dtype=np.int32), [rows], np.arange(n, dtype=np.int32)
        )
        out.append(runner.forward(batch))
        at += n
    return torch.cat(out)


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
        logits = feed(runner, tokens, frames_of(runner, 0), [33, 1, 1, 80, 35])

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
        logits = feed(runner, tokens, frames_of(runner, 0), [100, 1, 49])

    assert (logits - exact).pow(2).mean().sqrt() <= 2 * fair


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", ["lean", "transformers"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_invariant_rows_are_the_same_bits_in_any_chunk_batch_prefill_or_decode(
    folders: dict[str, Path], family: str, kind: Kind, forward: str, dtype: str
) -> None:
    tokens = tokens_of(2)
    options = {"kind": kind, "forward": forward, "dtype": dtype, "numerics": "invariant"}

    with runner_of(folders[family], **options) as runner:
        whole = feed(runner, tokens, frames_of(runner, 0), [TOKENS])
        kept = runner.arena[frames_of(runner, 0)].clone()
        chunked = feed(runner, tokens, frames_of(runner, 1), [7, 100, 43])
        chunked_pages = runner.arena[frames_of(runner, 1)].clone()
        decoded = feed(runner, tokens, frames_of(runner, 2), [100] + [1] * (TOKENS - 100))
        crowded = crowd(runner, tokens, frames_of(runner, 2), 130)

    assert torch.equal(chunked, whole)
    assert torch.equal(decoded, whole)
    assert torch.equal(crowded, whole[130])
    assert torch.equal(chunked_pages[:9], kept[:9])  # full pages: what the cache keeps is the same too


def crowd(runner: Runner, tokens: IntArray, frames: IntArray, at: int) -> torch.Tensor:
    """Logits of the row at position `at` of a sequence, decoded among 6 rows and a chunk of other sequences."""
    others = [frames_of(runner, seed) for seed in range(3, 9)]
    ids = np.concatenate([tokens_of(5, 6), tokens[at : at + 1], tokens_of(6, 70)])
    sequences = [SequenceRows(i, 1, 1, pages) for i, pages in enumerate(others)]
    sequences += [SequenceRows(6, 1, at + 1, frames), SequenceRows(7, 70, 70, frames_of(runner, 9))]
    positions = np.concatenate([np.zeros(6), [at], np.arange(70)]).astype(np.int32)
    batch = StepBatch(ids.astype(np.int32), positions, sequences, np.array([76, 6, 0], np.int32))
    return runner.forward(batch)[1]


@pytest.mark.parametrize("kind", COMPILED[:1])
def test_a_rows_bits_do_not_depend_on_the_number_of_threads(folders: dict[str, Path], kind: Kind) -> None:
    tokens = tokens_of(3)

    logits = []
    for threads in (1, 2, 3):
        with runner_of(folders["llama"], kind=kind, dtype="bfloat16", threads=threads) as runner:
            logits.append(feed(runner, tokens, frames_of(runner, 0), [120, 1, 29]))

    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("forward", ["lean", "transformers"])
def test_logits_are_of_the_rows_asked_for_in_their_order(
    folders: dict[str, Path], forward: str, kind: Kind
) -> None:
    tokens = tokens_of(4, 40)
    with runner_of(folders["llama"], kind=kind, forward=forward) as runner:
        frames = frames_of(runner, 0)
        every = feed(runner, tokens, frames, [40])
        rows = [SequenceRows(0, 40, 40, frames)]
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
        logits = feed(runner, tokens, frames_of(runner, 0, 60), [20, 40])

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
        logits = feed(runner, tokens, frames_of(runner, 0), [100, 50])

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"sliding_window": 4096}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind linear_attention"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"attn_logit_softcapping": 50.0}, "softcap"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"text_config": {}}, "more than text"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope type 'longrope'"),
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
        TorchKernels, "paged_attention", lambda self, q, *_: (torch.zeros_like(q), q.new_zeros(q.shape[:2]))
    )

    refused = pytest.raises(ValueError, match=r"LlamaForCausalLM isn't supported: .* differ by \d+%")
    with refused, runner_of(folders["llama"], forward="transformers"):
        pass


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_checking_a_model_leaves_the_arena_zeroed(folders: dict[str, Path], page_tokens: int) -> None:
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
