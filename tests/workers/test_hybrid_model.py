"""Models whose layers attend in two ways: transformers' tokens over two groups of pages, softcaps and learned sinks too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from kernel_kit import KINDS, Kind
from runner_kit import Pool, Sequence, feed, generate, random_tokens, runner_of, step
from transformers import AutoModelForCausalLM

from kvtier.kernels.ops import Kernels, TorchKernels
from kvtier.kernels.triton_kernels import TritonKernels
from kvtier.tier.pages.identity import root_key
from kvtier.workers.models import base as model

pytestmark = pytest.mark.slow

SEEN_KINDS = tuple(kind for kind in KINDS if kind != "portable")
NEW_TOKENS = 64
WINDOW = 32
MODELS: dict[str, Callable[..., Path]] = {
    "gemma2": tiny_models.make_tiny_gemma2,
    "gemma3": tiny_models.make_tiny_gemma3,
    "gemma3, scaled rope": partial(
        tiny_models.make_tiny_gemma3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt-oss": tiny_models.make_tiny_gpt_oss,
    "qwen2": partial(
        tiny_models.make_tiny_qwen2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        num_hidden_layers=3,
    ),
    "mistral": partial(tiny_models.make_tiny_mistral, sliding_window=WINDOW),
    "qwen3": tiny_models.make_tiny_qwen3,
}
HYBRIDS = [name for name in MODELS if name not in ("mistral", "qwen3")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind."""
    return {name: make(tmp_path_factory.mktemp("hybrid")) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Longer than the window."""
    return [random_tokens(i, 50, tiny_models.VOCAB).tolist() for i in range(3)]


def own_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        whole = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return whole[:, ids.shape[1] :].tolist()


def own_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = own(torch.tensor([tokens])).logits[0].float()
    return logits


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_batch_are_those_of_generate(
    folders: dict[str, Path], prompts: list[list[int]], name: str, kind: Kind
) -> None:
    """Pages that left the window are poisoned: a row that still attended them would not give these tokens."""
    expected = own_tokens(folders[name], prompts)

    with runner_of(folders[name], kind=kind) as runner:
        tokens = generate(runner, prompts, NEW_TOKENS, chunk=20)

    assert tokens == expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_has_a_group_of_layers_for_each_window_full_attention_first(
    folders: dict[str, Path], name: str
) -> None:
    with runner_of(folders[name]) as runner:
        full, windowed = runner.groups
        layers = sorted(full.layers + windowed.layers)
        roots = [runner.root_fields(group) for group in (0, 1)]

    assert (full.window, windowed.window) == (0, WINDOW)
    assert layers == list(range(len(layers)))
    assert full.specs[runner.raw_format].num_layers == len(full.layers)
    assert windowed.specs[runner.raw_format].num_layers == len(windowed.layers)
    assert "layers with a window of their own (32) and full ones" in runner.window_refusal
    assert root_key(roots[0]) != root_key(roots[1])
    assert {n for n in roots[0] if roots[0][n] != roots[1][n]} == {"attention", "layer_group"}


def test_a_windowed_group_needs_no_pages_but_the_windows(folders: dict[str, Path]) -> None:
    with runner_of(folders["gemma3"]) as runner:
        pool = Pool(runner)
        sequence = Sequence(pool, random_tokens(0, 300, tiny_models.VOCAB))

        feed(runner, sequence, [20] * 14 + [1] * 10)

        full, windowed = (len(chain.pages) for chain in sequence.chains)

    assert full == 19 and windowed <= (WINDOW + 20) // 16 + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_invariant_rows_are_the_same_bits_in_any_chunk_and_batch(
    folders: dict[str, Path], name: str, kind: Kind, dtype: str
) -> None:
    tokens = random_tokens(1, 120, tiny_models.VOCAB)

    with runner_of(folders[name], kind=kind, dtype=dtype, numerics="invariant") as runner:
        pool = Pool(runner)
        expected = feed(runner, Sequence(pool, tokens), [120])
        in_chunks = feed(runner, Sequence(pool, tokens), [7, 70, 43])
        decoded = Sequence(pool, tokens)
        one_by_one = feed(runner, decoded, [90] + [1] * 10)
        others = [(Sequence(pool, random_tokens(i, 40, tiny_models.VOCAB)), n) for i, n in ((2, 1), (3, 40))]
        crowded = step(runner, [others[0], (decoded, 1), others[1]])[1][0]

    assert torch.equal(in_chunks, expected)
    assert torch.equal(one_by_one, expected[:100])
    assert torch.equal(crowded, expected[100])


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_bfloat16_errs_at_most_twice_what_transformers_errs(
    folders: dict[str, Path], name: str, kind: Kind
) -> None:
    tokens = random_tokens(2, 120, tiny_models.VOCAB)
    exact = own_logits(folders[name], tokens.tolist())
    fair = (own_logits(folders[name], tokens.tolist(), torch.bfloat16) - exact).pow(2).mean().sqrt()

    with runner_of(folders[name], kind=kind, dtype="bfloat16") as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [100, 1, 19])

    assert (logits - exact).pow(2).mean().sqrt() <= 2 * fair


@pytest.mark.parametrize("cache_format", ["int8", "timedecay"])
@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_both_groups_pages_are_quantized_by_the_recipe(
    folders: dict[str, Path], kind: Kind, cache_format: str
) -> None:
    tokens = random_tokens(3, 200, tiny_models.VOCAB)
    exact = own_logits(folders["gemma3"], tokens.tolist())

    with runner_of(folders["gemma3"], kind=kind, cache_format=cache_format, recent_tokens=16) as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [50, 1, 149])

    error = (logits - exact).norm() / exact.norm()
    assert 1e-4 < error < (0.02 if cache_format == "int8" else 0.2)


@pytest.mark.parametrize(
    "name, forgotten",
    [("gemma2", {"softcap": 0.0}), ("gpt-oss", {"sink_logits": None})],
    ids=["softcap", "sink logits"],
)
def test_a_model_that_is_attended_without_its_softcap_or_sinks_is_refused_when_loaded(
    folders: dict[str, Path], name: str, forgotten: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loading checks sees them: with them, these models load."""
    real = TorchKernels.paged_attention
    monkeypatch.setattr(
        TorchKernels, "paged_attention", lambda self, *a, **k: real(self, *a, **{**k, **forgotten})
    )

    refused = pytest.raises(ValueError, match=r"isn't supported: over pages its logits differ by [\d.]+%")
    with refused, runner_of(folders[name], dtype="float32"):
        pass


def test_a_model_that_is_attended_without_its_window_is_refused_when_loaded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading tries fewer tokens than a real model's window has, with a smaller window in its place."""
    real = TorchKernels.paged_attention

    def attend(
        self: TorchKernels, q: torch.Tensor, arena: torch.Tensor, layout: Any, plan: Any, *a: Any, **k: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan.windows[:] = 0
        return real(self, q, arena, layout, plan, *a, **k)

    monkeypatch.setattr(TorchKernels, "paged_attention", attend)

    refused = pytest.raises(ValueError, match=r"isn't supported: over pages its logits differ by [\d.]+%")
    with refused, runner_of(folders["mistral"], forward="transformers"):
        pass


def test_a_window_that_modules_name_and_the_config_does_not_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an architecture whose config says less than its modules do: the pages would be kept by a wrong rule."""
    monkeypatch.setattr(model, "_layer_windows", lambda config, architecture, layers: (0,) * layers)

    refused = pytest.raises(
        ValueError, match=r"layer 0 has a window of 32, by its config it has 0 \(0: none\)"
    )
    with refused, runner_of(folders["mistral"], forward="transformers"):
        pass


@pytest.mark.parametrize(
    "make, changes",
    [
        pytest.param(
            partial(
                tiny_models.make_tiny_gemma3,
                num_hidden_layers=2,
                layer_types=["sliding_attention", "full_attention"],
            ),
            {},
            id="gemma3",
        ),
        pytest.param(tiny_models.make_tiny_deepseek_v3, {}, id="deepseek-v3"),
        pytest.param(tiny_models.make_tiny_llama, {"cache_format": "k8v4"}, id="lean llama, k8v4"),
    ],
)
def test_a_gpus_kernels_give_the_tokens_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Path], changes: dict[str, Any]
) -> None:
    """The object that a GPU's worker is given, in Triton's interpreter: loading with its probe, chunks and single rows."""
    folder = make(tmp_path)
    prompts = [random_tokens(i, length, tiny_models.VOCAB).tolist() for i, length in ((1, 40), (2, 7))]
    made: list[Kernels] = []

    def triton_kernels(
        device: torch.device, cache: Path, threads: int, native: str, invariant: bool
    ) -> Kernels:
        made.append(TritonKernels(device, invariant))
        return made[-1]

    with runner_of(folder, numerics="fast", **changes) as plain:
        expected = generate(plain, prompts, 4, chunk=24)
    monkeypatch.setattr("kvtier.workers.runner.runner.choose_kernels", triton_kernels)
    with runner_of(folder, numerics="fast", **changes) as on_gpu:
        tokens = generate(on_gpu, prompts, 4, chunk=24)

    assert [kernels.name for kernels in made] == ["triton sm_90"]
    assert tokens == expected
