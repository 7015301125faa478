"""Endless streams: the second rotated query gives what turning every cached key again for each row would give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import KINDS, Kind
from runner_kit import Pool, Sequence, feed, generate, random_tokens, runner_of, step

from kvtier.kernels.ops import PlanSequence, make_plan
from kvtier.tier.pages.recipe import Window
from kvtier.workers.models.base import read_shape
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.forwards.lean import LeanWeights, load_rope
from kvtier.workers.models.forwards.rope import Rope
from kvtier.workers.runner.runner import IntArray

pytestmark = pytest.mark.slow

SEEN_KINDS = tuple(kind for kind in KINDS if kind != "portable")
STREAM = Window(64, 4)
TOKENS = 360
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
MODELS: dict[str, Callable[..., Path]] = {  # all end at 256 positions: streams go beyond
    "llama": partial(tiny_models.make_tiny_llama, max_position_embeddings=256),
    "llama3 rope": partial(tiny_models.make_tiny_llama, max_position_embeddings=256, rope_parameters=LLAMA3),
    "yarn": partial(tiny_models.make_tiny_llama, max_position_embeddings=256, rope_parameters=YARN),
    "qwen3": partial(tiny_models.make_tiny_qwen3, max_position_embeddings=256),
    "mistral": partial(tiny_models.make_tiny_mistral, max_position_embeddings=256, sliding_window=96),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind."""
    return {name: make(tmp_path_factory.mktemp("stream")) for name, make in MODELS.items()}


def explicit_logits(folder: Path, tokens: IntArray, window: Window) -> torch.Tensor:
    """Logits of all rows, float64, by the rule as it was published (arXiv 2309.17453).

    Keys are cached without rope. For each row, those it attends (the sinks and the window) are put at positions 0, 1,
    2, ... with no gap, the row itself at the last of them, and all are turned by where they stand now.
    """
    shape = read_shape(folder)
    weights = LeanWeights(Checkpoint(folder), shape, torch.float64, torch.device("cpu"))
    rope = load_rope(Checkpoint(folder), shape)
    frequencies, factor = torch.from_numpy(rope._frequencies).double(), float(rope._factor)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_eps)

    def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [n, heads, D]
        angles = positions.double()[:, None] * frequencies
        cos, sin = (t.repeat(1, 2)[:, None] * factor for t in (angles.cos(), angles.sin()))
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    x = weights.embedding[torch.from_numpy(tokens.astype(np.int64))]
    group = shape.num_heads // shape.num_kv_heads
    for layer in (weights.layer(i) for i in range(shape.num_layers)):
        y = norm(x, layer.attention_norm)
        qkv = (y @ layer.qkv.T + (0 if layer.qkv_bias is None else layer.qkv_bias)).view(
            len(x), -1, shape.head_dim
        )
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        rows = []
        for t in range(len(x)):
            low = max(0, t - window.tokens + 1)
            kept = torch.cat([torch.arange(min(window.sinks, low)), torch.arange(low, t + 1)])
            stands = torch.arange(len(kept))
            keys = turn(k[kept], stands).repeat_interleave(group, 1)
            query = turn(q[t : t + 1], stands[-1:])[0]
            scores = torch.einsum("hd,jhd->hj", query, keys) * shape.head_dim**-0.5
            rows.append(
                torch.einsum("hj,jhd->hd", scores.softmax(-1), v[kept].repeat_interleave(group, 1)).flatten()
            )
        x = x + torch.stack(rows) @ layer.out.T
        y = norm(x, layer.mlp_norm)
        x = x + (torch.nn.functional.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T
    head = weights.embedding if weights.head is None else weights.head
    return norm(x, weights.norm) @ head.T


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str], torch.Tensor]:
    """The explicit logits of a model's stream, computed once."""
    made: dict[str, torch.Tensor] = {}

    def of(name: str) -> torch.Tensor:
        if name not in made:
            made[name] = explicit_logits(folders[name], random_tokens(0, TOKENS, tiny_models.VOCAB), STREAM)
        return made[name]

    return of


@pytest.mark.parametrize("forward", ["lean", "transformers"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_stream_equals_turning_all_keys_again_for_each_row(
    folders: dict[str, Path],
    expected: Callable[[str], torch.Tensor],
    name: str,
    kind: Kind,
    forward: str,
) -> None:
    """In chunks of prefill and in decode, far beyond the window and beyond the model's own positions."""
    tokens = random_tokens(0, TOKENS, tiny_models.VOCAB)
    options = {"kind": kind, "forward": forward, "max_context": 0, "numerics": "fast"}

    with runner_of(folders[name], **options) as runner:
        sequence = Sequence(Pool(runner), tokens, STREAM)
        logits = feed(runner, sequence, [3, 50, 100, 1, 1, 148, 17] + [1] * 40)

    exact = expected(name)
    assert (logits - exact).abs().max() <= 2e-4 * exact.abs().max()


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(16, 70),
    sinks=st.integers(0, 40),
    chunks=st.lists(st.integers(1, 40), min_size=3, max_size=8),
    page_tokens=st.sampled_from([1, 4, 16]),
    forward=st.sampled_from(["lean", "transformers"]),
)
def test_any_window_sinks_chunks_and_pages_equal_the_explicit_rule(
    folders: dict[str, Path], tokens: int, sinks: int, chunks: list[int], page_tokens: int, forward: str
) -> None:
    window = Window(tokens, min(sinks, tokens))
    text = random_tokens(4, sum(chunks), tiny_models.VOCAB)
    exact = explicit_logits(folders["llama"], text, window)

    options = {"kind": SEEN_KINDS[-1], "forward": forward, "max_context": 0, "page_tokens": page_tokens}
    with runner_of(folders["llama"], **options) as runner:
        logits = feed(runner, Sequence(Pool(runner), text, window), chunks)

    assert (logits - exact).abs().max() <= 2e-4 * exact.abs().max()


def test_the_rule_matters(folders: dict[str, Path], expected: Callable[[str], torch.Tensor]) -> None:
    """Without the second query the same stream gives other logits, so that the test above can fail."""
    tokens = random_tokens(0, TOKENS, tiny_models.VOCAB)

    with runner_of(folders["llama"], max_context=0) as runner:
        rope: Rope = runner.model._rope  # type: ignore[attr-defined]
        rope.sink_rows = lambda positions, plan: None  # type: ignore[method-assign]
        logits = feed(runner, Sequence(Pool(runner), tokens, STREAM), [100, 100, 160])

    exact = expected("llama")
    errors = (logits - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors[: STREAM.tokens + STREAM.sinks].max() < 1e-4
    assert errors[STREAM.tokens + STREAM.sinks + 50 :].median() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", ["lean", "transformers"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_a_streams_rows_are_the_same_bits_in_any_chunk_and_beside_other_sequences(
    folders: dict[str, Path], kind: Kind, forward: str, dtype: str
) -> None:
    """And so are the rows of sequences without a window that share a step with it."""
    tokens, other = (random_tokens(i, 200, tiny_models.VOCAB) for i in (1, 2))
    options = {"kind": kind, "forward": forward, "dtype": dtype, "numerics": "invariant", "max_context": 0}

    with runner_of(folders["llama"], **options) as runner:
        pool = Pool(runner)
        expected = feed(runner, Sequence(pool, tokens, STREAM), [200])
        plain = feed(runner, Sequence(pool, other), [200])
        decoded, beside = Sequence(pool, tokens, STREAM), Sequence(pool, other)
        in_chunks = [step(runner, [(beside, 20), (decoded, n)]) for n in (50, 7, 1, 1, 100, 41)]

    assert torch.equal(torch.cat([parts[1] for parts in in_chunks]), expected)
    assert torch.equal(torch.cat([parts[0] for parts in in_chunks]), plain[:120])


@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_a_quantized_stream_keeps_its_memory_and_its_accuracy(
    folders: dict[str, Path], expected: Callable[[str], torch.Tensor], kind: Kind
) -> None:
    tokens = random_tokens(0, TOKENS, tiny_models.VOCAB)

    with runner_of(folders["llama"], kind=kind, cache_format="int8", max_context=0) as runner:
        pool = Pool(runner)
        sequence = Sequence(pool, tokens, STREAM)
        in_use, parts = [], []
        for chunk in [30] * 10 + [1] * 60:
            parts.append(feed(runner, sequence, [chunk]))
            in_use.append(pool.in_use)

    exact = expected("llama")
    assert max(in_use) <= 1 + (STREAM.tokens + 30) // 16 + 2
    assert max(in_use[-20:]) <= 1 + STREAM.tokens // 16 + 1
    assert (torch.cat(parts) - exact).norm() < 0.01 * exact.norm()


def test_a_stream_generates_on_and_on_in_flat_memory(folders: dict[str, Path]) -> None:
    with runner_of(folders["llama"], kind=SEEN_KINDS[-1], max_context=0, l1_bytes=1 << 19) as runner:
        tokens = generate(runner, [random_tokens(3, 40, 512).tolist()] * 2, 600, chunk=32, window=STREAM)

    assert tokens[0] == tokens[1] and len(tokens[0]) == 600


def test_streams_turn_by_exact_angles_at_any_position() -> None:
    """What the plain float32 angle gives at 2^24 is nothing like it."""
    rope = Rope(torch.tensor([1.0, 0.1234567]), 1.0, own_window=0)
    positions = np.array([5, 2**24 - 3], np.int32)
    frames = np.zeros(2**20 + 1, np.int32)
    stream = make_plan(
        [PlanSequence(i, 1, int(p) + 1, frames, window=32) for i, p in enumerate(positions)], 16
    )
    plain = make_plan([PlanSequence(i, 1, int(p) + 1, frames) for i, p in enumerate(positions)], 16)

    cos, sin = rope.rows(positions, stream)
    plain_cos, _ = rope.rows(positions, plain)

    angles = positions.astype(np.float64)[:, None] * np.array([1.0, np.float32(0.1234567)], np.float64)
    assert np.abs(cos.numpy() - np.cos(angles)).max() < 1e-7
    assert np.abs(sin.numpy() - np.sin(angles)).max() < 1e-7
    assert np.abs(plain_cos.numpy() - np.cos(angles)).max() > 1e-3


def test_a_models_own_window_is_no_stream() -> None:
    frames = np.arange(10, dtype=np.int32)
    own, other, sinks = (
        make_plan([PlanSequence(0, 2, 100, frames, window=w, sinks=s)], 16)
        for w, s in ((32, 0), (16, 0), (32, 4))
    )
    rope = Rope(torch.ones(4), 1.0, own_window=32)

    assert rope.streams(own, 2) is None and rope.sink_rows(np.array([98, 99], np.int32), own) is None
    assert rope.streams(other, 3).tolist() == [True, True, False]  # type: ignore[union-attr]
    assert rope.streams(sinks, 2).tolist() == [True, True]  # type: ignore[union-attr]


NOT_IN_OPT = ("intermediate_size", "num_key_value_heads")
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    "architecture, changes, reason",
    [
        (
            "Cohere",
            {},
            "layer 0 of CohereForCausalLM turns its queries in another way than by half-split rope",
        ),
        (
            "SmolLM3",
            {"no_rope_layers": [1, 0]},
            "layer 1 of SmolLM3ForCausalLM turns its queries in another way",
        ),
        ("Phi", {"partial_rotary_factor": 0.5}, "PhiForCausalLM has rope on a part of each head"),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "OPTForCausalLM has no rotary embedding"),
        ("Olmo2", {}, ""),
        ("Granite", {}, ""),
    ],
)
def test_a_model_whose_rope_cannot_be_turned_on_refuses_windows_and_serves_without(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    shape = {k: v for k, v in SMALL.items() if architecture != "OPT" or k not in NOT_IN_OPT}
    config = getattr(transformers, f"{architecture}Config")(**shape, **changes)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(tmp_path)

    with runner_of(tmp_path) as runner:
        assert runner.window_refusal.startswith(reason) and bool(reason) == bool(runner.window_refusal)
    if reason:
        with pytest.raises(ValueError, match="model.window 64 can't be"), runner_of(tmp_path, window=64):
            pass
