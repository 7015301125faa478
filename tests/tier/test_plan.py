"""The sums of `kvtier plan`, against reference figures and against pages counted one by one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.lab.plan.model_numbers import LayerKind, ModelNumbers, read_numbers
from kvtier.lab.plan.model_presets import PRESETS
from kvtier.lab.plan.notes import notes, smallest_tp
from kvtier.lab.plan.plan import (
    FORMATS,
    GB,
    RECENT_TOKENS,
    SINK_TOKENS,
    Inputs,
    Plan,
    Sums,
    make_plan,
    numbers_by_attention,
    numbers_per_token_layer,
    raw_name,
    recipe_of,
    spec_of,
    stored_page_bytes,
    sums,
)
from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import Window
from kvtier.workers.models.formats import CACHE_FORMATS, choose_recipe

HEADS_128 = {**PRESETS["llama-3-8b"], "num_attention_heads": 128, "head_dim": 128}


def model_of(name: str, **changes: Any) -> ModelNumbers:
    """A preset with some fields changed."""
    return read_numbers({**PRESETS[name], **changes}, name)


def inputs_of(**changes: Any) -> Inputs:
    """One 80 GB GPU with 14 GB of weights, and requests of 2,048 tokens."""
    given = {
        "hbm_bytes": 80 * GB,
        "weights_bytes": 14 * GB,
        "overhead": 0.1,
        "prompt_tokens": 2048,
        "output_tokens": 0,
        "format": "fp16",
        "page_tokens": 16,
        "tp": 1,
    }
    return Inputs(**{**given, **changes})


def plan_of(name: str, **changes: Any) -> Plan:
    """The plan of a preset."""
    return make_plan(model_of(name), inputs_of(**changes))


# ---- reference figures -----------------------------------------------------------------------------------------------


def test_llama_2_7b_takes_512_kib_a_token_and_1_0737_gb_for_2048() -> None:
    plan = plan_of("llama-2-7b")

    assert plan.chosen.bytes_per_token == 512 * 1024
    assert plan.chosen.content_bytes == plan.chosen.paged_bytes == 2**30
    assert round(float(plan.chosen.content_bytes) / GB, 4) == 1.0737


@pytest.mark.parametrize(("kv_heads", "max_batch"), [(32, 54), (8, 216)])
def test_80_gb_hold_54_requests_of_llama_2_7b_and_216_with_8_kv_heads(kv_heads: int, max_batch: int) -> None:
    model = model_of("llama-2-7b").with_kv_heads(kv_heads)

    assert make_plan(model, inputs_of()).chosen.max_batch == max_batch


@pytest.mark.parametrize(("kv_heads", "numbers"), [(128, 32768), (8, 2048), (1, 256)])
def test_numbers_of_a_token_and_layer_at_128_heads_of_128(kv_heads: int, numbers: int) -> None:
    model = read_numbers({**HEADS_128, "num_key_value_heads": kv_heads}, "wide")

    assert numbers_per_token_layer(model) == numbers


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_a_latent_is_576_numbers_and_what_other_attention_would_take_is_told(name: str) -> None:
    assert numbers_per_token_layer(model_of(name)) == 576
    assert numbers_by_attention(model_of(name)) == {"mha": 32768, "gqa-8": 2048, "mqa": 256, "mla": 576}


@pytest.mark.parametrize(("kv_heads", "gb"), [(64, 10.7), (8, 1.34)])
def test_llama_70b_at_4096_tokens(kv_heads: int, gb: float) -> None:
    model = model_of("llama-2-70b").with_kv_heads(kv_heads)

    found = make_plan(model, inputs_of(prompt_tokens=4096, weights_bytes=0)).chosen.content_bytes

    assert float(found) / GB == pytest.approx(gb, abs=0.05)


@pytest.mark.parametrize(
    ("format", "nbytes"),
    [("bf16", 4096), ("fp8", 2080), ("int8", 2080), ("k8v4", 1584), ("int4", 1088), ("fp32", 8192)],
)
def test_a_layer_of_8_heads_of_128_takes_its_codes_and_scales(format: str, nbytes: int) -> None:
    found = make_plan(model_of("llama-3-8b"), inputs_of(format=format, page_tokens=64))

    assert found.chosen.bytes_per_token == 32 * nbytes


def test_old_tokens_of_int4c_take_their_channels_scales_too() -> None:
    """The limit for long requests; the last tokens are in 8 bits until their page is old."""
    found = sums(model_of("llama-3-8b"), inputs_of(prompt_tokens=2**26, page_tokens=64), "int4c")

    assert float(found.bytes_per_token) == pytest.approx(32 * 1120, rel=1e-5)


def test_a_latent_in_fp8_takes_642_bytes_a_layer() -> None:
    found = make_plan(model_of("deepseek-v2"), inputs_of(format="fp8", page_tokens=64, tp=8))

    assert found.chosen.bytes_per_token == 60 * 642
    assert sorted(found.refused) == ["int4", "int4c", "int8", "k8v4", "timedecay"]


# ---- pages counted one by one ----------------------------------------------------------------------------------------

PAGE_TOKENS = st.sampled_from([16, 32, 64, 128, 256])
LENGTHS = st.integers(1, 3000)


def mixed_model(window: int) -> ModelNumbers:
    """Two layers with full attention and three with a window, small heads."""
    model = model_of("smollm2-135m")
    kinds = (LayerKind(2, 0), *((LayerKind(3, window),) if window else ()))
    return replace(model, kinds=kinds, head_dim=16, dtype="float16")


def counted_pages(model: ModelNumbers, format: str, page_tokens: int, tokens: int) -> int:
    """Bytes of all pages that a row at the last position attends, each in the format that the recipe says."""
    recipe, total = recipe_of(format, page_tokens), 0
    for kind in model.kinds:
        for page in range(-(-tokens // page_tokens)):
            if Window(kind.window).needs(page, tokens - 1, page_tokens):
                one = recipe.format_at(page, tokens, page_tokens)
                total += spec_of(model, kind, one, page_tokens, model.kv_heads).nbytes
    return total


@given(format=st.sampled_from(FORMATS), page_tokens=PAGE_TOKENS, tokens=LENGTHS)
def test_a_requests_bytes_are_those_of_its_pages(format: str, page_tokens: int, tokens: int) -> None:
    model = mixed_model(window=0)

    found = sums(model, inputs_of(prompt_tokens=tokens, page_tokens=page_tokens), format)

    assert found.paged_bytes == counted_pages(model, format, page_tokens, tokens)
    assert 0 < found.content_bytes <= found.paged_bytes


@given(
    format=st.sampled_from(["fp32", "fp16", "fp8", "int8", "k8v4", "int4"]),
    page_tokens=PAGE_TOKENS,
    tokens=LENGTHS,
    window=st.integers(1, 600),
)
def test_layers_with_a_window_hold_what_they_may_attend_and_no_more(
    format: str, page_tokens: int, tokens: int, window: int
) -> None:
    model = mixed_model(window)

    found = sums(model, inputs_of(prompt_tokens=tokens, page_tokens=page_tokens), format)

    now = counted_pages(model, format, page_tokens, tokens)
    one_page_each = sum(
        spec_of(model, kind, recipe_of(format, page_tokens).write, page_tokens, 3).nbytes
        for kind in model.kinds
    )
    assert now <= found.paged_bytes <= now + one_page_each
    endless = sums(mixed_model(0), inputs_of(prompt_tokens=tokens, page_tokens=page_tokens), format)
    layer = endless.content_bytes / 2 / tokens
    assert found.content_bytes == layer * (2 * tokens + 3 * min(tokens, window))


@given(format=st.sampled_from(FORMATS), tokens=LENGTHS, window=st.integers(0, 600))
def test_as_many_requests_fit_as_there_is_room_for(format: str, tokens: int, window: int) -> None:
    inputs = inputs_of(prompt_tokens=tokens, hbm_bytes=GB, weights_bytes=GB // 10)

    found = sums(mixed_model(window), inputs, format)

    assert found.max_batch * found.paged_bytes <= inputs.room_bytes_gpu
    assert (found.max_batch + 1) * found.paged_bytes > inputs.room_bytes_gpu


@given(
    name=st.sampled_from([*PRESETS]),
    tp=st.integers(1, 32),
    tokens=LENGTHS,
    format=st.sampled_from(["bf16", "fp8"]),
)
def test_gpus_share_kv_heads_as_far_as_these_divide(name: str, tp: int, tokens: int, format: str) -> None:
    model = model_of(name)

    found = sums(model, inputs_of(prompt_tokens=tokens, tp=tp), format)

    if model.is_latent:
        assert found.content_bytes_gpu == found.content_bytes
    else:
        heads = max(1, -(-model.kv_heads // tp))
        assert found.content_bytes_gpu == found.content_bytes * Fraction(heads, model.kv_heads)


def test_output_tokens_count_as_those_of_the_prompt_do() -> None:
    split = plan_of("llama-3-8b", prompt_tokens=1500, output_tokens=548)

    assert split.chosen == plan_of("llama-3-8b", prompt_tokens=2048).chosen


def test_waste_of_pages_and_of_reserved_memory() -> None:
    plan = plan_of("llama-2-7b", prompt_tokens=1000)

    assert plan.chosen.paged_waste == pytest.approx(8 / 1008)  # 62.5 pages are 63
    lengths = range(993, 1009)
    assert plan.paged_waste_mean == pytest.approx(1 - sum(lengths) / (16 * 1008))
    assert plan.contiguous_waste == pytest.approx(1 - 1000 / 4096)
    assert plan.max_batch_contiguous == 58 * GB // (4096 * 512 * 1024)


def test_more_positions_than_the_model_knows_are_reserved_as_asked() -> None:
    assert plan_of("llama-2-7b", prompt_tokens=8192).contiguous_waste == 0


# ---- the same formats as the service ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 64, 256])
@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_a_format_is_the_recipe_that_the_service_has_by_that_name(name: str, page_tokens: int) -> None:
    served = choose_recipe(
        name,
        raw=PageFormat.BF16,
        eight_bit=PageFormat.FP8,
        page_tokens=page_tokens,
        recent_tokens=RECENT_TOKENS,
        decay_sinks=SINK_TOKENS,
    )

    planned = recipe_of(raw_name(model_of("llama-3-8b")) if name == "auto" else name, page_tokens)

    assert planned == served or (planned.is_uniform and served.is_uniform and planned.write == served.write)


def test_stored_pages_of_a_decaying_format_are_old_ones() -> None:
    model = model_of("gemma-2-9b")

    in_l1, below = stored_page_bytes(model, "timedecay", 64)

    spec = spec_of(model, LayerKind(21, 0), PageFormat.INT4C, 64, model.kv_heads)
    assert (in_l1, below) == (2 * spec.nbytes, 2 * spec.slot_bytes)


# ---- what can't be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"hbm_bytes": 0},
        {"weights_bytes": -1},
        {"overhead": 1.0},
        {"overhead": -0.1},
        {"overhead": float("nan")},
        {"prompt_tokens": 0},
        {"output_tokens": -1},
        {"prompt_tokens": 1 << 40},
        {"format": "fp7"},
        {"tp": 0},
    ],
)
def test_inputs_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        inputs_of(**change)


def test_a_format_that_the_model_cannot_have_names_those_it_can() -> None:
    with pytest.raises(ValueError, match="fp32, fp16, bf16, fp8"):
        plan_of("deepseek-v3", format="int4")
    with pytest.raises(ValueError, match="power of two"):
        plan_of("llama-3-8b", page_tokens=7)


@pytest.mark.parametrize("kv_heads", [0, 3, 64])
def test_kv_heads_must_divide_heads(kv_heads: int) -> None:
    with pytest.raises(ValueError, match="1, 2, 4, 8, 16, 32"):
        model_of("llama-2-7b").with_kv_heads(kv_heads)
    with pytest.raises(ValueError, match="latent"):
        model_of("deepseek-v3").with_kv_heads(8)


# ---- notes -----------------------------------------------------------------------------------------------------------


def said(plan: Plan, start: str) -> str:
    """The note that begins so; "" for none."""
    return next((note for note in notes(plan) if note.startswith(start)), "")


def test_weights_that_do_not_fit_name_the_gpus_that_would_do() -> None:
    plan = plan_of("llama-3-70b", weights_bytes=141 * GB)

    assert plan.chosen.max_batch == 0
    assert "from --tp 2 on" in said(plan, "no request fits")
    assert smallest_tp(plan.model, plan.inputs) == 2
    assert not said(plan, "reserving")


def test_a_request_too_long_for_the_room_is_told_apart_from_weights_that_do_not_fit() -> None:
    plan = plan_of("llama-2-7b", prompt_tokens=1 << 20)

    assert "one request takes" in said(plan, "no request fits")


def test_latents_that_no_number_of_gpus_divides_fit_none() -> None:
    plan = plan_of("deepseek-v2", prompt_tokens=1 << 24, weights_bytes=GB)

    assert smallest_tp(plan.model, plan.inputs) is None
    assert "no --tp" in said(plan, "no request fits")


def test_output_that_nothing_counted_is_counted_in_a_note() -> None:
    without, with_output = plan_of("llama-2-7b"), plan_of("llama-2-7b", output_tokens=512)

    assert said(without, "output counts too").endswith(
        f"max_batch is {with_output.chosen.max_batch}, not {without.chosen.max_batch}"
    )
    assert "20 % of them" in said(with_output, "output counts too")


def test_activations_that_the_overhead_does_not_cover_are_named() -> None:
    assert "of which" in said(plan_of("llama-2-7b"), "activations")
    assert "LESS" in said(plan_of("llama-2-7b", overhead=0.001), "activations")


@pytest.mark.parametrize(
    ("name", "tp", "text"),
    [
        ("deepseek-v3", 8, "MLA does not divide"),
        ("qwen2.5-7b", 8, "2 copies"),
        ("smollm2-135m", 2, "does not divide 3"),
        ("llama-3-8b", 4, "2 of 8 KV heads"),
        ("llama-3-8b", 1, ""),
    ],
)
def test_what_a_split_over_gpus_does_to_the_cache_is_said(name: str, tp: int, text: str) -> None:
    assert text in said(plan_of(name, tp=tp), f"tp {tp}")
    assert bool(said(plan_of(name, tp=tp), f"tp {tp}")) == bool(text)


def test_heads_taken_for_kv_heads_are_shown_as_too_much() -> None:
    plan = plan_of("llama-2-70b", prompt_tokens=4096)

    assert "10.74 GB" in said(plan, "KV heads count") and "8 times" in said(plan, "KV heads count")
    assert not said(plan_of("llama-2-7b"), "KV heads count")
    assert "57 times" in said(plan_of("deepseek-v3"), "MLA")


def test_windows_are_said_to_spare_what_they_spare() -> None:
    assert "25 % less" in said(plan_of("gemma-2-9b", prompt_tokens=8192), "21 of 42 layers")
    assert "spares nothing" in said(plan_of("gemma-2-9b"), "21 of 42 layers")


def test_more_tokens_than_positions_are_noted() -> None:
    assert said(plan_of("llama-2-7b", prompt_tokens=5000), "llama-2-7b knows 4,096 positions")


def test_sums_of_a_plan_are_those_of_its_formats() -> None:
    plan = plan_of("llama-3-8b", format="int8")

    assert plan.chosen is plan.by_format["int8"]
    assert [*plan.by_format] == [*FORMATS]
    assert all(isinstance(one, Sums) for one in plan.by_format.values())
