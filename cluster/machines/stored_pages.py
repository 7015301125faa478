"""What pages a model's workers will store, and whether it can have them as configured: looked up before anything starts."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cluster.config.deployment import Config

if TYPE_CHECKING:
    from kvtier.tier.pages.page import PageFormat
    from kvtier.tier.pages.recipe import Recipe

_LATENT_FORMATS = ("auto", "fp8", "")  # what pages of latents can be


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The sizes of all pages, smallest first, and the formats that go to L4 (None: all)."""

    sizes: list[int]
    l4_variants: frozenset[str] | None


def latent_refusal(model: Path, config: Config) -> str:
    """Why a model that keeps latents can't have the configured formats; "" when it can, or keeps none.

    Reads config.json alone, at once. What else is wrong with the model is found when it is loaded.
    """
    cache, l4 = config.cache.format, config.tiers.l4.format
    try:
        shape = json.loads((model / "config.json").read_text())
        is_latent, name = bool(shape.get("kv_lora_rank")), (shape.get("architectures") or ["a model"])[0]
    except (OSError, ValueError, AttributeError):
        return ""
    if not is_latent:
        return ""
    if cache not in _LATENT_FORMATS:
        return f"cache.format {cache} can't be for {name}, which keeps latents: use auto or fp8"
    if l4 not in _LATENT_FORMATS:
        instead = "leave it empty" if cache == "fp8" else "use fp8, or leave it empty"
        return f"tiers.l4.format {l4} can't be for {name}, which keeps latents: {instead}"
    return ""


def longest_in_l1(model: Path, config: Config) -> tuple[int, int]:
    """Tokens of the longest request that the pages of one worker's L1 hold, and of the longest that the model takes; of
    requests without a window of their own. Raises ValueError or OSError for a model that can't be served."""
    from kvtier.tier.pages.page import PageFormat
    from kvtier.tier.pages.recipe import Window
    from kvtier.workers.models.base import layer_groups, read_shape
    from kvtier.workers.models.formats import raw_format

    shape, raw, page_tokens = read_shape(model), raw_format(config.model.dtype), config.page_tokens
    context = config.model.max_context or shape.max_positions
    if config.model.window:
        return context, context  # what the window has passed is let go
    recipe = _recipe(config, raw, PageFormat.FP8)
    formats = [format for format in (recipe.write, recipe.decayed) if format is not None]
    groups = layer_groups(shape, raw, page_tokens, formats)
    ranks = 1 if shape.rope_dim else min(config.worker.tensor_parallel, shape.num_kv_heads)

    def fits(tokens: int) -> bool:
        held = sum(
            group.specs[recipe.format_at(page, tokens, page_tokens)].nbytes
            for group in groups
            for page in range(-(-tokens // page_tokens))
            if Window(group.window).needs(page, tokens, page_tokens)
        )
        return held <= config.tiers.l1.bytes * ranks

    if fits(context):
        return context, context
    return bisect_left(range(context), True, key=lambda tokens: not fits(tokens + 1)), context


def l1_notice(model: Path, config: Config) -> str:
    """What an L1 that is smaller than the context means; "" where it isn't."""
    longest, context = longest_in_l1(model, config)
    if longest >= context:
        return ""
    return (
        f"tiers.l1.bytes holds requests of at most {longest:,} tokens, and the context is {context:,}: longer ones are "
        f"refused; raise tiers.l1.bytes, or set model.max_context {longest} or less"
    )


def stored_pages(model: Path, config: Config) -> StoredPages:
    """Raises ValueError or OSError for a model that can't be served."""
    from kvtier.tier.pages.page import PageFormat
    from kvtier.workers.models.base import layer_groups, read_shape
    from kvtier.workers.models.formats import choose_l4_format, raw_format

    raw = raw_format(config.model.dtype)
    recipe = _recipe(config, raw, PageFormat.FP8)  # workers may choose INT8, which is as large
    l4 = choose_l4_format(config.tiers.l4.format, config.page_tokens)
    formats = [format for format in (recipe.write, recipe.decayed, l4) if format is not None]
    groups = layer_groups(read_shape(model), raw, config.page_tokens, formats)
    sizes = sorted({spec.nbytes for group in groups for spec in group.specs.values()})
    return StoredPages(sizes, None if l4 is None else frozenset({l4.value}))


def _recipe(config: Config, raw: PageFormat, eight_bit: PageFormat) -> Recipe:
    from kvtier.workers.models.formats import choose_recipe

    return choose_recipe(
        config.cache.format,
        raw=raw,
        eight_bit=eight_bit,
        page_tokens=config.page_tokens,
        recent_tokens=config.cache.recent_tokens,
        decay_sinks=config.cache.sink_tokens,
    )
