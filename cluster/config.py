"""The configuration of a deployment: read at the edge, checked once, taken apart in launch.py. Pure.

Each field says what it does and what more and less of it mean; `kvtier up --set key.path=value` overrides any.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from kvtier.tier.page import MIN_QUANTIZED_PAGE_TOKENS

CacheFormat = Literal["auto", "fp8", "int8", "k8v4", "int4", "int4c", "timedecay"]
L4Format = Literal["", "fp8", "int8", "int4c"]
MAX_STREAM_TOKENS = 2**24  # of a sequence with a window, prompt and output together

# What pages of a cache format may still become: a page is quantized to 8 bits once, and from 8 bits to 4 once.
_L4_FORMATS: dict[str, tuple[str, ...]] = {
    "auto": ("fp8", "int8", "int4c"),
    "fp8": ("int4c",),
    "int8": ("int4c",),
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*$", re.IGNORECASE)
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


class ConfigError(ValueError):
    """A configuration that can't be used; the message names the key, the value and what would be right."""


def parse_bytes(value: Any) -> Any:
    """Sizes are integers in bytes, or text such as 512MiB or 2GB."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if not match:
        raise ValueError(f"not a size in bytes (say 512MiB, 2GB or 1048576): {value!r}")
    unit = (match.group(2) or "").upper().removesuffix("B")
    return int(float(match.group(1)) * _UNITS[unit])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Section):
    """Which model is served."""

    path: str = (
        "smollm2-135m-instruct"  # a name from `kvtier model ls`, a Hugging Face folder or id, or a .gguf file
    )
    name: str = ""  # what clients see; default: the path's last part
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    max_context: int = Field(
        default=0, ge=0
    )  # tokens of prompt and output; 0: what the model's own config says
    forward: Literal["auto", "lean", "transformers"] = (
        "auto"  # our fused forward where the architecture is known
    )
    window: int = Field(default=0, ge=0, le=MAX_STREAM_TOKENS)  # of requests that set none; 0: no window
    sinks: int = Field(default=0, ge=0)  # first tokens attended beside it

    @model_validator(mode="after")
    def _sinks_fit_the_window(self) -> Self:
        if self.sinks and not self.window:
            raise ValueError(f"sinks {self.sinks} need a window beside them: set model.window too")
        if self.sinks > self.window:
            raise ValueError(f"sinks must be at most the window ({self.window} tokens), got {self.sinks}")
        return self


class L1Config(_Section):
    """The arena of each worker, in its HBM (in RAM without a GPU)."""

    bytes: Bytes = Field(default=512 * 2**20, gt=0)


class L3Config(_Section):
    """The node's slab of pinned shared memory; 0 turns the tier off, but for a small staging slab if L4 is on."""

    bytes: Bytes = Field(default=1024 * 2**20, ge=0)


class L4Config(_Section):
    """The node's pages on SSD; 0 bytes turns the tier off."""

    path: str = ""  # folder; default: a folder of this deployment's name under the user's cache folder
    bytes: Bytes = Field(default=4 * 2**30, ge=0)  # budget of all files, free pages included
    store: Literal["slab", "lmdb"] = "slab"  # page bytes in O_DIRECT slab files, or as LMDB values
    format: L4Format = ""  # pages are kept here in this format only; "": as they are above


class TiersConfig(_Section):
    """Sizes of the tiers. Larger tiers hold more prefixes; each is bounded by its bytes."""

    l1: L1Config = L1Config()
    l3: L3Config = L3Config()
    l4: L4Config = L4Config()
    write: Literal["through", "demote"] = (
        "through"  # full pages are copied down at once, so a dying worker loses little; demote: when they must leave
    )


class _Weights(_Section):
    """Of the terms of a score, each term from 0 to 1; what scores lowest goes first. Below 0 a term is turned round."""

    recency: float
    memory: float
    remaining: float

    @model_validator(mode="after")
    def _some_term_counts(self) -> Self:
        if self.recency == self.memory == self.remaining == 0:
            raise ValueError("one of recency, memory and remaining must not be 0, got three zeros")
        return self


class PageWeights(_Weights):
    """Of cached pages."""

    recency: float = Field(default=0.5, ge=-1, le=1)  # used a short time ago
    memory: float = Field(default=0.2, ge=-1, le=1)  # of a long prefix
    remaining: float = Field(default=0.3, ge=-1, le=1)  # given a long answer


class RequestWeights(_Weights):
    """Of running requests."""

    recency: float = Field(default=0.2, ge=-1, le=1)  # got a token a short time ago
    memory: float = Field(default=-0.2, ge=-1, le=1)  # has many pages
    remaining: float = Field(default=-0.6, ge=-1, le=1)  # expects many tokens yet


class CacheConfig(_Section):
    """How pages are stored, used and evicted; `format`, its numbers and `epoch` are part of their identity."""

    policy: Literal["rvi", "score", "lru"] = "rvi"  # which pages leave first, in every tier
    exponent: float = Field(default=0.25, ge=0, le=1)  # of rvi: 0 saves the most pages, 1 the most compute
    guard: bool = True  # of rvi: go by lru while that saves more
    weights: PageWeights = PageWeights()  # of score
    format: CacheFormat = "auto"  # auto: the model's own numbers; all others are quantized
    recent_tokens: int = Field(default=1024, ge=0, le=MAX_STREAM_TOKENS)  # of timedecay, kept in 8 bits
    sink_tokens: int = Field(default=16, ge=0, le=MAX_STREAM_TOKENS)  # of timedecay: the first ones, likewise
    epoch: int = Field(default=0, ge=0)  # raise it to make all cached pages of this deployment unfindable
    load: Literal["auto", "always"] = "auto"  # auto: a load that measures slower than recompute is not made
    load_deadline_ms: float = Field(default=2000.0, gt=0)  # a load that takes longer loses to recompute


class WorkerConfig(_Section):
    """The decode workers of a node."""

    count: int = Field(default=1, ge=1)
    threads: int = Field(default=0, ge=0)  # 0: the physical cores, shared out among the workers
    max_batch_tokens: int = Field(
        default=2048, ge=16
    )  # of one step: more is faster prefill, less is smoother decode
    max_sequences: int = Field(default=64, ge=1)  # running at once
    max_waiting: int = Field(
        default=1024, ge=1
    )  # requests in the queue; more are refused with RESOURCE_EXHAUSTED
    preemption: RequestWeights = RequestWeights()  # of the score by which a running request makes room


class TLSConfig(_Section):
    """PEM files; with `client_ca` clients must show a certificate it signed."""

    cert: str
    key: str
    client_ca: str = ""


class GrpcConfig(_Section):
    """Where the gateway listens."""

    host: str = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)  # 0: any free port; `kvtier status` names it
    max_message_bytes: Bytes = Field(default=16 * 2**20, ge=65536)
    tls: TLSConfig | None = None


class TenantConfig(_Section):
    """A tenant: its pages are never found by another. Changing `salt` makes its cached pages unfindable."""

    name: str = Field(min_length=1, max_length=128)
    salt: str = ""
    share: float = Field(default=1.0, gt=0, le=1)  # of each tier, at most; past it its own pages make room


class RayConfig(_Section):
    """The Ray cluster: `local` starts one on this machine, an address joins one."""

    address: str = "local"


class Config(_Section):
    """A whole deployment."""

    name: str = Field(default="kvtier", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    model: ModelConfig = ModelConfig()
    page_tokens: int = 16
    numerics: Literal["auto", "fast", "invariant"] = "auto"  # auto: invariant in float32, fast else
    tiers: TiersConfig = TiersConfig()
    cache: CacheConfig = CacheConfig()
    worker: WorkerConfig = WorkerConfig()
    grpc: GrpcConfig = GrpcConfig()
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),)
    ray: RayConfig = RayConfig()

    @field_validator("page_tokens")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 1 or value > 4096 or value & (value - 1):
            raise ValueError(f"must be a power of two from 1 to 4096 (16 is the default), got {value}")
        return value

    @field_validator("tenants")
    @classmethod
    def _tenants_differ(cls, value: tuple[TenantConfig, ...]) -> tuple[TenantConfig, ...]:
        names = [t.name for t in value]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"there must be at least one, each name once, got {names}")
        return value

    @model_validator(mode="after")
    def _formats_fit_the_pages(self) -> Self:
        cache, l4, tokens = self.cache.format, self.tiers.l4.format, self.page_tokens
        if (cache != "auto" or l4) and tokens < MIN_QUANTIZED_PAGE_TOKENS:
            what = f"cache.format {cache}" if cache != "auto" else f"tiers.l4.format {l4}"
            raise ValueError(
                f"{what} needs pages of at least {MIN_QUANTIZED_PAGE_TOKENS} tokens, got page_tokens {tokens}"
            )
        if l4 and l4 not in _L4_FORMATS.get(cache, ()):
            raise ValueError(_l4_sentence(cache, l4))
        if l4 and not self.tiers.l4.bytes:
            raise ValueError(
                f"tiers.l4.format {l4} is how L4 keeps pages, and tiers.l4.bytes 0 turns L4 off: "
                "leave the format empty, or give L4 bytes"
            )
        if self.model.window and self.model.window < tokens:
            raise ValueError(
                f"model.window must be at least a page's {tokens} tokens (page_tokens), or 0 for none, "
                f"got {self.model.window}"
            )
        return self


def _l4_sentence(cache: str, l4: str) -> str:
    fitting = _L4_FORMATS.get(cache, ())
    instead = f"use {' or '.join(fitting)}, or leave it empty" if fitting else "leave it empty"
    return f"tiers.l4.format {l4} is no smaller form of pages of cache.format {cache}: {instead}"


def load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML file (None: the defaults) and apply `key.path=value` overrides; ConfigError names what is wrong."""
    try:
        data: Any = yaml.safe_load(path.read_text()) if path else {}
    except OSError as error:
        raise ConfigError(f"can't read config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is no YAML: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"config {path} must be a mapping of sections, got {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from error


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set takes key.path=value, got {override!r}")
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {key}: {section} is no section")
    try:
        data[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is no YAML value: {error}") from error


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        return f"{where}: no such key"
    if error["type"] == "value_error":  # our own sentences name the value
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    return f"{where}: {error['msg']} (got {error['input']!r})"
