"""How much memory a model's KV cache takes, and how many requests fit a GPU. Sums only. Pure.

A token costs `2 * layers * kv_heads * head_dim` numbers, with latent attention `layers * (rank + rope_dim)`, and in
quantized formats its scales too: the sizes are those of real pages (tier/pages/page.py). Layers with a sliding window hold their
window only. A GPU has room for `hbm * (1 - overhead) - weights / tp` bytes of pages, and a request takes whole pages of
the tokens of its prompt and of its output.

Numbers are for one GPU where a name says `_gpu`, else for one copy of the whole model's cache. GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvtier.lab.plan.model_numbers import LayerKind, ModelNumbers
from kvtier.tier.pages.page import PageFormat, PageSpec
from kvtier.tier.pages.recipe import DECAY_STRIDE_TOKENS, Recipe

GB = 10**9
CHUNK_TOKENS = 2048  # of a prefill step, for the estimate of activations
RAW_FORMATS = {"fp32": PageFormat.FP32, "fp16": PageFormat.FP16, "bf16": PageFormat.BF16}
_RAW_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_UNIFORM = {
    **RAW_FORMATS,
    "fp8": PageFormat.FP8,
    "int8": PageFormat.INT8,
    "k8v4": PageFormat.K8V4,
    "int4": PageFormat.INT4,
}
FORMATS = (*_UNIFORM, "int4c", "timedecay")  # by the names that cache.format has, and the plain types
RECENT_TOKENS, SINK_TOKENS = 1024, 16  # of timedecay, as a config has them by default
DEEPSEEK_LATENT = 512 + 64
_MAX_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is planned for. `hbm_bytes` are one GPU's, `weights_bytes` the whole model's. Raises ValueError."""

    hbm_bytes: int
    weights_bytes: int
    overhead: float
    prompt_tokens: int
    output_tokens: int
    format: str
    page_tokens: int
    tp: int

    def __post_init__(self) -> None:
        if self.hbm_bytes <= 0 or self.weights_bytes < 0:
            raise ValueError(
                f"HBM must be positive and weights not negative, got {self.hbm_bytes / GB:g} and "
                f"{self.weights_bytes / GB:g} GB"
            )
        if not 0 <= self.overhead < 1:
            raise ValueError(
                f"overhead is a share of the HBM, at least 0 and less than 1, got {self.overhead:g}"
            )
        if self.prompt_tokens < 1 or self.output_tokens < 0 or self.tokens > _MAX_TOKENS:
            raise ValueError(
                f"a request has at least 1 prompt token, no negative output and at most {_MAX_TOKENS:,} tokens, got "
                f"{self.prompt_tokens:,} and {self.output_tokens:,}"
            )
        if self.format not in FORMATS:
            raise ValueError(f"format must be auto or one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be a power of two from 1 to 4096, got {self.page_tokens}")
        if self.tp < 1:
            raise ValueError(f"tp counts the GPUs that share the model, so it is at least 1, got {self.tp}")

    @property
    def tokens(self) -> int:
        """What a request holds at its end: its output is in the cache as well."""
        return self.prompt_tokens + self.output_tokens

    @property
    def room_bytes_gpu(self) -> int:
        """What is left for pages on each GPU; negative where the weights don't fit."""
        return round(self.hbm_bytes * (1 - self.overhead)) - -(-self.weights_bytes // self.tp)


@dataclass(frozen=True, slots=True)
class Sums:
    """One format's sums. `content` is what the tokens' numbers and scales take, `paged` the whole pages of them."""

    format: str
    bytes_per_token: (
        Fraction  # content, all layers; where a token's format depends on its age, the request's mean
    )
    content_bytes: Fraction
    paged_bytes: int
    content_bytes_gpu: Fraction
    paged_bytes_gpu: int
    bytes_per_token_gpu: Fraction
    max_batch: int

    @property
    def paged_waste(self) -> float:
        """Share of the pages that holds nothing: the last page's end, padding, and a window's first page."""
        return float(1 - self.content_bytes / self.paged_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """All sums for one model and one set of inputs."""

    model: ModelNumbers
    inputs: Inputs
    chosen: Sums
    by_format: dict[str, Sums]
    refused: dict[str, str]  # formats that the model can't have, and why
    paged_waste_mean: float  # over request lengths that end anywhere in the last page
    contiguous_waste: float
    max_batch_contiguous: int
    activation_bytes_gpu: int


def make_plan(model: ModelNumbers, inputs: Inputs) -> Plan:
    """The plan. Raises ValueError for a format, page size or split that the model can't have."""
    by_format: dict[str, Sums] = {}
    refused: dict[str, str] = {}
    for name in FORMATS:
        try:
            by_format[name] = sums(model, inputs, name)
        except ValueError as error:
            refused[name] = str(error)
    if inputs.format in refused:
        others = f"; it can have {', '.join(by_format)}" if by_format else ""
        raise ValueError(
            f"{model.name} can't be planned in {inputs.format}: {refused[inputs.format]}{others}"
        )
    chosen = by_format[inputs.format]
    reserved = max(model.max_tokens, inputs.tokens)
    return Plan(
        model=model,
        inputs=inputs,
        chosen=chosen,
        by_format=by_format,
        refused=refused,
        paged_waste_mean=_mean_waste(model, inputs),
        contiguous_waste=float(1 - chosen.content_bytes / (chosen.bytes_per_token * reserved)),
        max_batch_contiguous=_fit(inputs, chosen.bytes_per_token_gpu * reserved),
        activation_bytes_gpu=activation_bytes(model, chosen.max_batch),
    )


def sums(model: ModelNumbers, inputs: Inputs, format: str) -> Sums:
    """The sums of one format. Raises ValueError where the model can't have it."""
    whole = _Cache(model, format, inputs.page_tokens, model.kv_heads)
    gpu = _Cache(model, format, inputs.page_tokens, kv_heads_gpu(model, inputs.tp))
    paged_gpu = gpu.paged_bytes(inputs.tokens)
    return Sums(
        format=format,
        bytes_per_token=whole.bytes_per_token(inputs.tokens),
        content_bytes=whole.content_bytes(inputs.tokens),
        paged_bytes=whole.paged_bytes(inputs.tokens),
        content_bytes_gpu=gpu.content_bytes(inputs.tokens),
        paged_bytes_gpu=paged_gpu,
        bytes_per_token_gpu=gpu.bytes_per_token(inputs.tokens),
        max_batch=_fit(inputs, Fraction(paged_gpu)),
    )


def stored_page_bytes(model: ModelNumbers, format: str, page_tokens: int) -> tuple[int, int]:
    """Bytes of one page of all layers, in L1 and as a slot below it.

    Where the format depends on a page's age, it is the one that old pages are in.
    """
    recipe = recipe_of(format, page_tokens)
    specs = [
        spec_of(model, kind, recipe.decayed or recipe.write, page_tokens, model.kv_heads)
        for kind in model.kinds
    ]
    return sum(spec.nbytes for spec in specs), sum(spec.slot_bytes for spec in specs)


def numbers_per_token_layer(model: ModelNumbers) -> int:
    """Numbers that one layer caches of a token."""
    return model.head_dim + model.rope_dim if model.is_latent else 2 * model.kv_heads * model.head_dim


def numbers_by_attention(model: ModelNumbers) -> dict[str, int]:
    """The same for each kind of attention that a model of its heads could have; the latent is DeepSeek's."""
    heads, dim = model.heads, model.value_dim
    grouped = {"gqa-8": 2 * 8 * dim} if heads > 8 and heads % 8 == 0 else {}
    latent = model.head_dim + model.rope_dim if model.is_latent else DEEPSEEK_LATENT
    return {"mha": 2 * heads * dim, **grouped, "mqa": 2 * dim, "mla": latent}


def kv_heads_gpu(model: ModelNumbers, tp: int) -> int:
    """KV heads in each GPU's pages: at least one, so fewer heads than GPUs are kept several times, a latent on all."""
    return -(-model.kv_heads // tp)


def activation_bytes(model: ModelNumbers, batch: int) -> int:
    """An estimate, without tensor parallelism: a prefill chunk in the widest layer, and a decode step's logits in fp32."""
    each = 4 if model.dtype == "float32" else 2
    return CHUNK_TOKENS * model.width * each + batch * model.vocab * 4


def raw_name(model: ModelNumbers) -> str:
    """What `auto` is for a model: its own type."""
    return _RAW_OF_DTYPE[model.dtype]


def recipe_of(format: str, page_tokens: int) -> Recipe:
    """In which formats the pages of a cache.format are, on a device that writes FP8 where the name leaves it open."""
    if format in _UNIFORM:
        return Recipe(_UNIFORM[format])
    stride = max(DECAY_STRIDE_TOKENS, page_tokens)
    if format == "int4c":
        return Recipe(PageFormat.FP8, PageFormat.INT4C, stride_tokens=stride)
    recent = -(-RECENT_TOKENS // page_tokens) * page_tokens
    return Recipe(PageFormat.FP8, PageFormat.INT4C, recent, SINK_TOKENS, stride)


def spec_of(
    model: ModelNumbers, kind: LayerKind, format: PageFormat, page_tokens: int, kv_heads: int
) -> PageSpec:
    """The pages of layers of one kind. Raises ValueError for a shape that can't be."""
    return PageSpec(
        num_layers=kind.layers,
        num_kv_heads=kv_heads,
        head_dim=model.head_dim,
        page_tokens=page_tokens,
        format=format,
        rope_dim=model.rope_dim,
        rope_format=RAW_FORMATS[raw_name(model)],
    )


def _fit(inputs: Inputs, request_bytes_gpu: Fraction) -> int:
    return max(0, int(inputs.room_bytes_gpu // request_bytes_gpu))


def _mean_waste(model: ModelNumbers, inputs: Inputs) -> float:
    cache = _Cache(model, inputs.format, inputs.page_tokens, model.kv_heads)
    last = -(-inputs.tokens // inputs.page_tokens) * inputs.page_tokens
    lengths = range(last - inputs.page_tokens + 1, last + 1)
    content = sum((cache.content_bytes(tokens) for tokens in lengths), Fraction(0))
    return float(1 - content / sum(cache.paged_bytes(tokens) for tokens in lengths))


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages of one format that a request holds of layers of one kind, and the tokens in them that rows attend."""

    spec: PageSpec
    pages: int
    tokens: int

    @property
    def content_bytes(self) -> Fraction:
        return Fraction(
            self.spec.num_layers * self.spec.sections[-1].end * self.tokens, self.spec.page_tokens
        )


class _Cache:
    """One model's cache in one format, with so many KV heads in each page."""

    def __init__(self, model: ModelNumbers, format: str, page_tokens: int, kv_heads: int) -> None:
        self._kinds, self._page_tokens = model.kinds, page_tokens
        self._recipe = recipe_of(format, page_tokens)
        used = {self._recipe.write, self._recipe.decayed or self._recipe.write}
        self._specs = {
            (kind, one): spec_of(model, kind, one, page_tokens, kv_heads)
            for kind in model.kinds
            for one in used
        }

    def bytes_per_token(self, tokens: int) -> Fraction:
        """All layers', as if none had a window."""
        parts = (part for kind in self._kinds for part in self._parts(kind, tokens, window=0))
        return sum((part.content_bytes for part in parts), Fraction(0)) / tokens

    def content_bytes(self, tokens: int) -> Fraction:
        """What a request's tokens take, without what pages waste."""
        return sum((part.content_bytes for part in self._held(tokens)), Fraction(0))

    def paged_bytes(self, tokens: int) -> int:
        """Whole pages of a request, as many as it ever holds at this length."""
        return sum(part.pages * part.spec.nbytes for part in self._held(tokens))

    def _held(self, tokens: int) -> Iterator[_Part]:
        for kind in self._kinds:
            yield from self._parts(kind, tokens, kind.window)

    def _parts(self, kind: LayerKind, tokens: int, window: int) -> Iterator[_Part]:
        size, recipe = self._page_tokens, self._recipe
        attended = min(tokens, window) if window else tokens
        end = -(-tokens // size)
        held = min(end, -(-(window - 1) // size) + 1) if window else end  # a window may begin inside a page
        decayed = max(0, recipe.decay_end(tokens, size) - max(recipe.sink_pages(size), end - held))
        old = min(decayed * size, attended)
        yield _Part(self._specs[kind, recipe.write], held - decayed, attended - old)
        if recipe.decayed is not None:
            yield _Part(self._specs[kind, recipe.decayed], decayed, old)
