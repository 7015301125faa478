"""A model runs as its files say, or is refused by name: sizes, tensors, their shapes, and quantized checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import KINDS, Kind
from runner_kit import Pool, Sequence, feed, generate, random_tokens, runner_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvtier.kernels.ops import TorchKernels
from kvtier.workers.models.base import read_shape
from kvtier.workers.models.files.quantized import Scheme, dequantize, scheme_of
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.forwards import lean as model_lean
from kvtier.workers.models.forwards.rope import Rope

pytestmark = pytest.mark.slow

FORWARDS = ("lean", "transformers")
SEEN_KINDS = tuple(kind for kind in KINDS if kind != "portable")
Tensors = dict[str, torch.Tensor]


def rewrite(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors: Callable[[Tensors], Tensors] | None = None,
) -> Path:
    """Change a model's files in place: settings of config.json (None in `drop` of them), and its tensors."""
    file = folder / "config.json"
    settings = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop}
    file.write_text(json.dumps({**settings, **(config or {})}))
    if tensors is not None:
        changed = tensors(load_file(folder / "model.safetensors"))
        save_file(
            {k: v.contiguous() for k, v in changed.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
    return folder


def reference(folder: Path, tokens: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(tokens.astype("int64"))[None]).logits[0].float()
    return logits


def load(folder: Path, **options: Any) -> None:
    with runner_of(folder, **options):
        pass


# What config.json leaves out


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_window_that_config_json_leaves_out_is_the_architectures_own(tmp_path: Path, forward: str) -> None:
    """MistralConfig's is 4096: it isn't full attention."""
    folder = tiny_models.make_tiny_mistral(tmp_path, max_position_embeddings=8192)
    rewrite(folder, drop=("sliding_window",))
    tokens = random_tokens(0, 4200, tiny_models.VOCAB)
    expected = reference(folder, tokens)

    with runner_of(folder, kind="native", forward=forward, max_context=4224) as runner:
        windows = [group.window for group in runner.groups]
        logits = feed(runner, Sequence(Pool(runner), tokens), [512] * 8 + [104])

    assert windows == [4096]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "make", [tiny_models.make_tiny_mistral, tiny_models.make_tiny_llama, tiny_models.make_tiny_qwen3]
)
def test_sizes_that_config_json_leaves_out_are_those_of_transformers(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    left_out = (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "sliding_window",
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "rope_parameters",
    )
    folder = make(tmp_path)
    for name in left_out:
        rewrite(folder, drop=(name,))
        theirs, shape = AutoConfig.from_pretrained(folder), read_shape(folder)

        assert shape.num_kv_heads == theirs.num_key_value_heads, name
        assert shape.head_dim == (theirs.head_dim or theirs.hidden_size // theirs.num_attention_heads), name
        assert shape.norm_eps == theirs.rms_norm_eps, name
        assert shape.max_positions == theirs.max_position_embeddings, name
        assert shape.tied == theirs.tie_word_embeddings, name
        assert shape.vocab_size == theirs.vocab_size, name
        assert shape.intermediate == theirs.intermediate_size, name
        assert shape.windows == (getattr(theirs, "sliding_window", None) or 0,), name
        assert json.loads(shape.rope)["rope_theta"] == theirs.rope_parameters["rope_theta"], name


def test_a_checkpoint_of_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = rewrite(
        tiny_models.make_tiny_llama(tmp_path), config={"architectures": ["LlamaForSequenceClassification"]}
    )

    with pytest.raises(
        ValueError, match=r"LlamaForSequenceClassification isn't supported yet: .* LlamaForCausalLM"
    ):
        read_shape(folder)


def test_a_config_that_transformers_cannot_read_is_refused_in_its_words(tmp_path: Path) -> None:
    folder = rewrite(tiny_models.make_tiny_llama(tmp_path), config={"model_type": "unheard-of"})

    with pytest.raises(ValueError, match=r"transformers can't read the config of .*unheard-of"):
        read_shape(folder)


def test_yarn_as_model_cards_describe_it_reaches_as_far_as_its_factor_says(tmp_path: Path) -> None:
    """The cards of Qwen say to add a factor over the original length, and leave max_position_embeddings as it is."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    folder = tiny_models.make_tiny_qwen2(tmp_path, max_position_embeddings=512)
    rewrite(folder, config={"rope_scaling": yarn}, drop=("rope_parameters",))
    tokens = random_tokens(4, 1500, tiny_models.VOCAB)
    expected = reference(folder, tokens)

    with runner_of(folder, kind="native", max_context=0) as runner:
        reach = runner.max_context
        logits = feed(runner, Sequence(Pool(runner), tokens), [500, 500, 1, 499])

    assert reach == 2048
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises(ValueError, match="max_context 2049 is more than the model's 2048"):
        load(folder, max_context=2049)


def test_linear_scaling_can_be_asked_for_more_than_it_is_by_default(tmp_path: Path) -> None:
    """Its max_position_embeddings may be the length before or after, so the shorter one is what is taken unasked."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    folder = tiny_models.make_tiny_llama(tmp_path, max_position_embeddings=512, rope_parameters=rope)

    reaches = []
    for asked in (0, 1024):
        with runner_of(folder, max_context=asked) as runner:
            reaches.append(runner.max_context)

    assert reaches == [512, 1024]


# Tensors


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_a_tensor_that_the_files_lack_is_named_and_never_made_up(
    tmp_path: Path, forward: str, name: str
) -> None:
    folder = rewrite(tiny_models.make_tiny_llama(tmp_path), tensors=without(name))

    with pytest.raises(ValueError, match=rf"lacks 1 of the model's tensors: {name}"):
        load(folder, forward=forward)


@pytest.mark.parametrize("make", [tiny_models.make_tiny_deepseek_v3, tiny_models.make_tiny_gpt_oss])
def test_other_architectures_lack_no_tensor_either(tmp_path: Path, make: Callable[..., Path]) -> None:
    folder = make(tmp_path)
    name = next(n for n in load_file(folder / "model.safetensors") if "o_proj.weight" in n)
    rewrite(folder, tensors=without(name))

    with pytest.raises(ValueError, match=rf"lacks 1 of the model's tensors: {name}"):
        load(folder)


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path, forward: str) -> None:
    """A bias that config.json doesn't tell of would else be left out without a word."""
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = rewrite(
        tiny_models.make_tiny_llama(tmp_path), tensors=lambda tensors: {**tensors, name: torch.zeros(64)}
    )

    with pytest.raises(ValueError, match=rf"1 tensors that the model of its config.json doesn't: {name}"):
        load(folder, forward=forward)


def test_constants_that_old_checkpoints_keep_beside_their_weights_are_no_matter(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = rewrite(
        tiny_models.make_tiny_llama(tmp_path), tensors=lambda tensors: {**tensors, name: torch.ones(8)}
    )

    for forward in FORWARDS:
        load(folder, forward=forward)


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"intermediate_size": 4096}, "down_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"head_dim": 32}, "o_proj"),
        ({"hidden_size": 128, "head_dim": 16}, "embed_tokens"),
        ({"vocab_size": 600}, "embed_tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_weights_of_other_shapes_than_config_json_says_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], tensor: str, forward: str, kind: Kind
) -> None:
    """Compiled code reads what the sizes say, wherever a weight ends."""
    folder = rewrite(tiny_models.make_tiny_llama(tmp_path), config=changes)

    with pytest.raises(
        ValueError, match=rf"isn't the model .*{tensor}.weight is \[.*\] in the files and \[.*\] by"
    ):
        load(folder, forward=forward, kind=kind)


@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_two_different_ends_that_config_json_calls_tied_are_used_as_the_files_hold_them(
    tmp_path: Path, kind: Kind
) -> None:
    """transformers 5 ties no weights that differ."""
    folder = rewrite(tiny_models.make_tiny_llama(tmp_path), config={"tie_word_embeddings": True})
    tokens = random_tokens(5, 60, tiny_models.VOCAB)
    expected = reference(folder, tokens)

    for forward in FORWARDS:
        with runner_of(folder, kind=kind, forward=forward) as runner:
            logits = feed(runner, Sequence(Pool(runner), tokens), [60])
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize(
    ("make", "forward"),
    [
        (tiny_models.make_tiny_llama, "lean"),
        (tiny_models.make_tiny_llama, "transformers"),
        (tiny_models.make_tiny_deepseek_v3, "auto"),
    ],
)
def test_a_loaded_model_keeps_nothing_of_its_files_in_memory(
    tmp_path: Path, make: Callable[..., Path], forward: str, kind: Kind
) -> None:
    """One norm that is a view of the mapping would keep all of it resident, the weights a second time."""
    folder = make(tmp_path)

    with runner_of(folder, forward=forward, kind=kind):
        mapped = Path("/proc/self/maps").read_text()

    assert str(folder) not in mapped


def test_only_the_files_that_transformers_would_read_are_read(tmp_path: Path) -> None:
    """Mistral's folders hold the same weights once more, under other names."""
    folder = tiny_models.make_tiny_mistral(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")

    load(folder, forward="lean")


def test_a_folder_of_which_files_are_absent_says_which(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {k: v for k, v in tensors.items() if "layers.1" not in k}
    save_file(first, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    where = {k: f"model-0000{1 if k in first else 2}-of-00002.safetensors" for k in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    with pytest.raises(ValueError, match=r"lacks 9 of .* aren't there: model-00002-of-00002.safetensors"):
        load(folder)


# Quantized checkpoints


def fp8(weight: torch.Tensor, name: str, block: int = 32) -> tuple[Tensors, torch.Tensor]:
    """A weight as FP8 checkpoints store it, and the numbers that stands for."""
    rows, columns = weight.shape
    pad = torch.nn.functional.pad(weight, (0, -columns % block, 0, -rows % block))
    tiles = pad.view(pad.shape[0] // block, block, pad.shape[1] // block, block)
    scale = (tiles.abs().amax((1, 3)) / 448).clamp(min=1e-6)
    full = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    stored = (weight / full).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scale}, stored.float() * full


def int8(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """A weight as compressed-tensors stores it, and the numbers that stands for."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {name: stored, f"{name}_scale": scale, f"{name}_zero_point": torch.zeros_like(stored[:, :1])}, (
        stored.float() * scale
    )


SCHEMES = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
    },
}


def quantized(folder: Path, plain: Path, scheme: str) -> None:
    """Turn a folder's projections into a quantized checkpoint, and `plain`'s into the numbers these stand for."""
    made, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" in name and weight.dim() == 2:
            parts, meant[name] = (fp8 if scheme == "fp8" else int8)(weight, name)
            made |= parts
        else:
            made[name] = meant[name] = weight
    rewrite(folder, config={"quantization_config": SCHEMES[scheme]}, tensors=lambda _: made)
    rewrite(plain, tensors=lambda _: meant)


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [tiny_models.make_tiny_qwen3, tiny_models.make_tiny_deepseek_v3])
def test_a_quantized_checkpoint_gives_the_tokens_of_the_numbers_that_it_stands_for(
    tmp_path: Path, make: Callable[..., Path], scheme: str, kind: Kind
) -> None:
    folder, plain = make(tmp_path / "q", hidden_size=96), make(tmp_path / "plain", hidden_size=96)
    quantized(folder, plain, scheme)
    tokens = random_tokens(6, 70, tiny_models.VOCAB)
    expected = reference(plain, tokens)

    for forward in ("auto", "transformers"):
        with runner_of(folder, kind=kind, forward=forward) as runner:
            logits = feed(runner, Sequence(Pool(runner), tokens), [40, 1, 29])
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", SEEN_KINDS)
def test_gpt_oss_in_mxfp4_gives_what_transformers_makes_of_it(tmp_path: Path, kind: Kind) -> None:
    """As its makers publish it, and nothing else does."""
    folder = tiny_models.make_tiny_gpt_oss(tmp_path)
    numbers = torch.Generator().manual_seed(0)

    def pack(tensors: Tensors) -> Tensors:
        made = {}
        for name, weight in tensors.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, inputs, outputs = weight.shape
                size = (experts, outputs, inputs // 32)
                made[f"{name}_blocks"] = torch.randint(
                    0, 256, (*size, 16), generator=numbers, dtype=torch.uint8
                )
                made[f"{name}_scales"] = torch.randint(120, 125, size, generator=numbers, dtype=torch.uint8)
            else:
                made[name] = weight
        return made

    rewrite(folder, config={"quantization_config": {"quant_method": "mxfp4"}}, tensors=pack)
    tokens = random_tokens(9, 60, tiny_models.VOCAB)
    expected = reference(folder, tokens)

    with runner_of(folder, kind=kind) as runner:
        logits = feed(runner, Sequence(Pool(runner), tokens), [40, 1, 19])

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes in 4 bits"),
        ({"quant_method": "gptq", "bits": 4}, "gptq in 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "awq in 4 bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "in the format pack-quantized"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4}}},
            },
            "compressed-tensors in 4 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "with sparse weights",
        ),
        ({"bits": 3}, "unnamed in 3 bits"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path: Path, found: dict[str, Any], said: str) -> None:
    folder = rewrite(tiny_models.make_tiny_llama(tmp_path), config={"quantization_config": found})

    for forward in FORWARDS:
        with pytest.raises(
            ValueError, match=rf"quantized by .*{said}, which can't be loaded; supported: FP8"
        ):
            load(folder, forward=forward)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_numbers_that_are_stored_in_few_bits_without_a_scale_are_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, forward: str
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = rewrite(
        tiny_models.make_tiny_llama(tmp_path), tensors=lambda all: {**all, name: all[name].to(dtype)}
    )

    with pytest.raises(ValueError, match=rf"tensor {name} is stored as {dtype} .* names no quantization"):
        load(folder, forward=forward)


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    seed=st.integers(0, 99),
)
def test_each_number_of_a_block_has_the_blocks_scale(
    rows: int, columns: int, block: tuple[int, int], seed: int
) -> None:
    high, wide = block
    numbers = torch.Generator().manual_seed(seed)
    stored = torch.randn(rows, columns, generator=numbers).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // high), -(-columns // wide), generator=numbers) + 0.5

    values = dequantize("w", stored, scale, None, Scheme("fp8", block))

    expected = [
        [float(stored[r, c].float() * scale[r // high, c // wide]) for c in range(columns)]
        for r in range(rows)
    ]
    assert torch.equal(values, torch.tensor(expected))


def test_a_scale_that_does_not_fit_its_weight_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"scale of w has shape \[3, 3\], which doesn't fit a weight of \[8, 8\]"
    ):
        dequantize("w", torch.zeros(8, 8, dtype=torch.int8), torch.ones(3, 3), None, Scheme("x"))


def test_what_a_plain_config_says_is_no_quantization() -> None:
    assert scheme_of({"model_type": "llama"}) is None


# The comparison with transformers


@pytest.mark.parametrize("kind", SEEN_KINDS)
@pytest.mark.parametrize("part", ["rope", "weights", "norm"])
def test_a_lean_forward_that_differs_from_transformers_is_refused_when_loaded(
    tmp_path: Path, part: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundredth of a layer, which tokens may not show."""
    folder = tiny_models.make_tiny_llama(tmp_path)
    if part == "rope":
        load_rope = model_lean.load_rope

        def off(files: Checkpoint, shape: Any) -> Rope:
            rope = load_rope(files, shape)
            rope._frequencies = rope._frequencies * 1.001
            return rope

        monkeypatch.setattr("kvtier.workers.runner.runner.load_rope", off)
    else:
        name = "model.layers.1.mlp.up_proj.weight" if part == "weights" else "model.norm.weight"
        get = model_lean.LeanWeights.get
        monkeypatch.setattr(
            model_lean.LeanWeights,
            "get",
            lambda self, wanted, *at, **by: get(self, wanted, *at, **by) * (1.02 if wanted == name else 1.0),
        )

    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM isn't supported: (over pages its logits|its rope)"
    ):
        load(folder, forward="lean", kind=kind)


@pytest.mark.parametrize("forward", FORWARDS)
def test_weights_that_give_no_numbers_are_refused(tmp_path: Path, forward: str) -> None:
    folder = rewrite(
        tiny_models.make_tiny_llama(tmp_path),
        tensors=lambda all: {**all, "model.norm.weight": torch.full((64,), float("nan"))},
    )

    with pytest.raises(ValueError, match="LlamaForCausalLM can't be served: .* are no numbers"):
        load(folder, forward=forward)


def test_checking_a_lean_model_leaves_its_pages_and_its_numbers_as_they_were(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path)
    prompt = [random_tokens(1, 40, tiny_models.VOCAB).tolist()]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor(prompt), max_new_tokens=8, do_sample=False)[0, 40:].tolist()

    for kind in SEEN_KINDS:
        with runner_of(folder, kind=kind, cache_format="auto") as runner:
            assert not runner.arena.any()
            assert generate(runner, prompt, 8, 64) == [expected]


def test_a_lean_forward_over_quantized_pages_is_compared_over_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path)

    for kind in SEEN_KINDS:
        load(folder, kind=kind, cache_format="int4")
    monkeypatch.setattr(
        TorchKernels,
        "paged_attention",
        lambda self, q, *_, **__: (torch.zeros_like(q), q.new_zeros(q.shape[:2])),
    )
    with pytest.raises(ValueError, match="over pages its logits differ"):
        load(folder, kind="torch", cache_format="int4", forward="lean")
