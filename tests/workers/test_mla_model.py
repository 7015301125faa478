"""DeepSeek V2 and V3 over pages of latents: transformers' tokens, absorbed when decoded, expanded in pieces before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from kernel_kit import KINDS, Kind
from runner_kit import Pool, Sequence, feed, generate, random_tokens, runner_of, step
from transformers import AutoModelForCausalLM

from kvtier.kernels import reference
from kvtier.kernels.ops import Format, TorchKernels
from kvtier.tier.pages.page import PageFormat
from kvtier.workers.models.base import page_spec
from kvtier.workers.models.formats import layout_of
from kvtier.workers.models.forwards import latent as model_mla
from kvtier.workers.models.forwards.latent import LatentModel
from kvtier.workers.runner.runner import Runner

pytestmark = pytest.mark.slow

SEEN_KINDS = tuple(kind for kind in KINDS if kind != "portable")
NEW_TOKENS = 64
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
MODELS: dict[str, Callable[..., Path]] = {
    "v2": tiny_models.make_tiny_deepseek_v2,
    "v2 yarn, q latent, groups": partial(
        tiny_models.make_tiny_deepseek_v2,
        rope_parameters=YARN,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        attention_bias=True,
    ),
    "v3": tiny_models.make_tiny_deepseek_v3,
    "v3 halves, full q": partial(
        tiny_models.make_tiny_deepseek_v3, rope_interleave=False, q_lora_rank=None, qk_rope_head_dim=8
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind."""
    return {name: make(tmp_path_factory.mktemp("deepseek")) for name, make in MODELS.items()}


def latent_model(runner: Runner) -> LatentModel:
    assert isinstance(runner.model, LatentModel)
    return runner.model


def own_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def own_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return whole[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_batch_are_those_of_generate_and_decoding_absorbs(
    folders: dict[str, Path], name: str, kind: Kind
) -> None:
    prompts = [random_tokens(i, 50, tiny_models.VOCAB).tolist() for i in range(3)]
    expected = own_tokens(folders[name], prompts)

    with runner_of(folders[name], kind=kind) as runner:
        tokens = generate(runner, prompts, NEW_TOKENS, chunk=23)
        model = latent_model(runner)
        rows = model.absorbed_rows, model.expanded_rows

    assert tokens == expected
    assert rows == (3 * (NEW_TOKENS - 1), 3 * 50)


@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_no_row_is_expanded_in_decode_nor_absorbed_in_a_chunk(
    folders: dict[str, Path], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters say so; this sees the kernels that are called, in a step of both."""
    with runner_of(folders["v3"], kind=kind) as runner:
        pool = Pool(runner)
        decoding = [Sequence(pool, random_tokens(i, 40, tiny_models.VOCAB)) for i in range(2)]
        for sequence in decoding:
            feed(runner, sequence, [39])
        calls: list[tuple[str, int]] = []
        kernels = type(runner._kernels)
        for called in ("latent_attention", "dense_attention"):
            real = getattr(kernels, called)
            monkeypatch.setattr(
                kernels,
                called,
                lambda self, q, *a, _real=real, _name=called, **k: (
                    calls.append((_name, len(q))) or _real(self, q, *a, **k)
                ),
            )

        step(runner, [(decoding[0], 1), (Sequence(pool, random_tokens(7, 30, tiny_models.VOCAB)), 30)])
        step(runner, [(decoding[1], 1)])

    assert calls == [("latent_attention", 1), ("dense_attention", 30)] * 3 + [("latent_attention", 1)] * 3


@pytest.mark.parametrize("piece", [7, 64, 4096])
def test_the_size_of_expanded_pieces_changes_nothing(
    folders: dict[str, Path], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row attends no token of a piece, and a piece ends within a page."""
    tokens = random_tokens(0, 150, tiny_models.VOCAB)
    expected = own_logits(folders["v2"], tokens.tolist())
    monkeypatch.setitem(model_mla.EXPAND_TOKENS, "cpu", piece)

    with runner_of(folders["v2"]) as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [33, 1, 80, 1, 35])

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_bfloat16_errs_at_most_twice_what_transformers_errs(
    folders: dict[str, Path], name: str, kind: Kind
) -> None:
    """By the median of rows: where a row chooses other experts than in float32, both are far off."""
    tokens = random_tokens(1, 120, tiny_models.VOCAB)
    exact = own_logits(folders[name], tokens.tolist())
    fair = (own_logits(folders[name], tokens.tolist(), torch.bfloat16) - exact).norm(dim=1)

    with runner_of(folders[name], kind=kind, dtype="bfloat16") as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [70] + [1] * 50)

    errors = (logits - exact).norm(dim=1)
    assert errors[:70].median() <= 2 * fair.median()
    assert errors[70:].median() <= 2 * fair.median()


def test_latents_in_fp8_cost_little_and_absorbed_and_expanded_rows_see_the_same_ones(
    folders: dict[str, Path],
) -> None:
    tokens = random_tokens(2, 100, tiny_models.VOCAB)
    exact = own_logits(folders["v2"], tokens.tolist())

    logits = []
    for kind in SEEN_KINDS:
        with runner_of(folders["v2"], kind=kind, cache_format="fp8") as runner:
            assert set(runner.groups[0].specs) == {PageFormat.FP8}
            logits.append(feed(runner, Sequence(Pool(runner), tokens), [50] + [1] * 50))
            logits.append(feed(runner, Sequence(Pool(runner), tokens), [50, 50]))

    assert 1e-4 < (logits[0] - exact).norm() / exact.norm() < 0.1
    for other in logits[1:]:
        assert (other - logits[0]).norm() / exact.norm() < 1e-3


@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_converted_pages_of_latents_hold_what_their_sources_held(
    folders: dict[str, Path], kind: Kind
) -> None:
    """As tier L4 keeps them; rope keys stay as they are."""
    with runner_of(folders["v3"], kind=kind, l4_format="fp8") as runner:
        pool = Pool(runner)
        sequence = Sequence(pool, random_tokens(3, 16, tiny_models.VOCAB))
        feed(runner, sequence, [16])
        sources, targets = (np.array([frame], np.int32) for frame in (sequence.frames[0], pool.take()))

        runner.convert(0, sources, PageFormat.FP32, targets, PageFormat.FP8)

        layout = layout_of(runner.groups[0], torch.float32, runner.arena.shape[1], PageFormat.FP32)
        frames = [torch.from_numpy(f.astype(np.int64)) for f in (sources, targets)]
        before = [reference.read_pages(runner.arena, layout, Format.RAW, i, frames[0]) for i in range(3)]
        after = [reference.read_pages(runner.arena, layout, Format.FP8, i, frames[1]) for i in range(3)]
    for (latents, rope_keys), (new_latents, new_rope_keys) in zip(before, after, strict=True):
        assert 0 < (new_latents - latents).norm() < 0.05 * latents.norm()
        assert torch.equal(new_rope_keys, rope_keys)


def test_a_page_takes_the_latent_and_the_rope_key_of_each_token_and_layer_and_no_more(tmp_path: Path) -> None:
    """512 + 64 numbers, whatever the number of heads."""
    folder = tiny_models.make_tiny_deepseek_v3(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)

    with runner_of(folder, dtype="bfloat16", page_tokens=64) as runner:
        assert runner.arena.shape[1] == 3 * 64 * 576 * 2
        pool = Pool(runner)
        feed(runner, Sequence(pool, random_tokens(0, 128, tiny_models.VOCAB)), [128])
        written = int((runner.arena != 0xFF).any(1).sum())

    assert pool.in_use == 2 == written
    assert page_spec(str(folder), "bfloat16", 64).nbytes == 3 * 64 * 576 * 2


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"numerics": "invariant"},
            "numerics invariant isn't supported for DeepseekV3ForCausalLM: which rows",
        ),
        ({"cache_format": "int4"}, "keeps latents, for which cache.format is auto or fp8 .* got 'int4'"),
        ({"cache_format": "timedecay"}, "keeps latents, .* got 'timedecay' and ''"),
        ({"l4_format": "int4c"}, "keeps latents, .* got 'auto' and 'int4c'"),
        ({"window": 64}, "model.window 64 can't be: DeepseekV3ForCausalLM has latent attention"),
        ({"forward": "lean"}, "lean can't run this model: architecture DeepseekV3ForCausalLM"),
    ],
)
def test_what_latents_cannot_have_is_refused(
    folders: dict[str, Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), runner_of(folders["v3"], **change):
        pass


def test_without_experts_numerics_are_fast_all_the_same(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_deepseek_v2(tmp_path, first_k_dense_replace=3, n_routed_experts=1)

    refused = pytest.raises(ValueError, match="attended in two ways, absorbed when decoded")
    with refused, runner_of(folder, numerics="invariant"):
        pass
    with runner_of(folder) as runner:
        assert runner.root_fields()["numerics"] == "fast"


def test_a_model_whose_latents_are_attended_wrongly_is_refused_when_loaded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TorchKernels.latent_attention
    monkeypatch.setattr(
        TorchKernels, "latent_attention", lambda self, q, *a: (torch.zeros_like(real(self, q, *a)[0]), q)
    )

    refused = pytest.raises(ValueError, match=r"DeepseekV2ForCausalLM isn't supported: .* differ by [\d.]+%")
    with refused, runner_of(folders["v2"]):
        pass
