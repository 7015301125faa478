"""What cluster/supervisor/launch.py makes of a configuration before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_tiny_deepseek_v3, make_tiny_gemma3, make_tiny_llama

from kvtier.cluster.config.deployment import Config, load_config
from kvtier.cluster.machines.stored_pages import StoredPages, latent_refusal, stored_pages
from kvtier.cluster.supervisor.launch import Launched, LaunchError
from kvtier.tier.pages.page import PageFormat, PageSpec


def configured(*overrides: str) -> Config:
    """The defaults but for these."""
    return load_config(None, ("model.dtype=float32", *overrides))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of two heads of 16."""
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def nbytes(*formats: PageFormat) -> list[int]:
    """What pages of that model take."""
    return sorted(PageSpec(2, 2, 16, 16, format).nbytes for format in formats)


@pytest.mark.parametrize(
    ("overrides", "formats", "l4"),
    [
        ((), [PageFormat.FP32], None),
        (("cache.format=k8v4",), [PageFormat.K8V4], None),
        (("cache.format=timedecay",), [PageFormat.FP8, PageFormat.INT4C], None),
        (("tiers.l4.format=int4c",), [PageFormat.FP32, PageFormat.INT4C], {"int4c"}),
        (("cache.format=int8", "tiers.l4.format=int4c"), [PageFormat.INT8, PageFormat.INT4C], {"int4c"}),
    ],
)
def test_the_node_hears_of_every_page_size_and_of_what_l4_keeps(
    llama: Path, overrides: tuple[str, ...], formats: list[PageFormat], l4: set[str] | None
) -> None:
    stored = stored_pages(llama, configured(*overrides))

    assert stored == StoredPages(nbytes(*formats), None if l4 is None else frozenset(l4))


def test_every_layer_group_has_its_own_page_size(tmp_path: Path) -> None:
    sizes = stored_pages(make_tiny_gemma3(tmp_path), configured("cache.format=timedecay")).sizes

    assert len(sizes) >= 3
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("cache.format=timedecay",),
            "cache.format timedecay can't be for DeepseekV3ForCausalLM, which keeps latents: use auto or fp8",
        ),
        (
            ("tiers.l4.format=int4c",),
            "tiers.l4.format int4c can't be for DeepseekV3ForCausalLM, which keeps latents: use fp8, or leave it empty",
        ),
        (
            ("cache.format=fp8", "tiers.l4.format=int4c"),
            "tiers.l4.format int4c can't be for DeepseekV3ForCausalLM, which keeps latents: leave it empty",
        ),
    ],
)
def test_formats_that_latents_cannot_have_are_refused_before_ray_starts(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    model = make_tiny_deepseek_v3(tmp_path / "v3")
    steps: list[str] = []
    launched = Launched(configured(*overrides), model, tmp_path, tmp_path)

    with pytest.raises(LaunchError) as refused:
        launched.start(lambda step, done=0, total=None: steps.append(step), lambda: None)

    assert str(refused.value) == sentence
    assert steps == []


def test_formats_that_a_model_can_have_are_not_refused(llama: Path, tmp_path: Path) -> None:
    latents = make_tiny_deepseek_v3(tmp_path / "v3")

    assert latent_refusal(latents, configured("cache.format=fp8")) == ""
    assert latent_refusal(latents, configured("tiers.l4.format=fp8")) == ""
    assert latent_refusal(llama, configured("cache.format=timedecay")) == ""
    assert latent_refusal(tmp_path / "nowhere", configured("cache.format=timedecay")) == ""


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(llama: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        stored_pages(llama / "nowhere", configured())
