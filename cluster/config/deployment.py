"""The configuration of a deployment: read at the edge, checked once, taken apart in cluster/supervisor/launch.py. Pure.

Each field says what it does and what more and less of it mean; `kvtier up --set key.path=value` overrides any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from kvtier.cluster.config.nodes import (
    MAX_DEADLINE_MS,
    ClusterConfig,
    NodesConfig,
    RayConfig,
    RoutingConfig,
    TransferConfig,
    WorkerConfig,
    check_nodes,
    check_weights,
)
from kvtier.cluster.config.values import Bytes, Host, Section
from kvtier.tier.pages.page import MIN_QUANTIZED_PAGE_TOKENS

CacheFormat = Literal["auto", "fp8", "int8", "k8v4", "int4", "int4c", "timedecay"]
L4Format = Literal["", "fp8", "int8", "int4c"]
MAX_STREAM_TOKENS = 2**24  # of a sequence with a window, prompt and output together
MAX_STREAM_PROMPT = 2**18  # ... and its prompt: hashing so many tokens takes a worker's step loop some 50 ms

# What pages of a cache format may still become: a page is quantized to 8 bits once, and from 8 bits to 4 once.
_L4_FORMATS: dict[str, tuple[str, ...]] = {
    "auto": ("fp8", "int8", "int4c"),
    "fp8": ("int4c",),
    "int8": ("int4c",),
}


class ConfigError(ValueError):
    """A configuration that can't be used; the message names the key, the value and what would be right."""


class ModelConfig(Section):
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
    # Temperature, top_k, top_p, min_p and repetition_penalty of requests that leave them unset: kvtier's own defaults
    # (greedy), or those of the model's generation_config.json.
    sampling: Literal["kvtier", "model"] = "kvtier"
    window: int = Field(default=0, ge=0, le=MAX_STREAM_TOKENS)  # of requests that set none; 0: no window
    sinks: int = Field(default=0, ge=0)  # first tokens attended beside it

    @model_validator(mode="after")
    def _sinks_fit_the_window(self) -> Self:
        if self.sinks and not self.window:
            raise ValueError(f"sinks {self.sinks} need a window beside them: set model.window too")
        if self.sinks > self.window:
            raise ValueError(f"sinks must be at most the window ({self.window} tokens), got {self.sinks}")
        return self


class L1Config(Section):
    """The arena of each worker, in its HBM (in RAM without a GPU)."""

    bytes: Bytes = Field(default=512 * 2**20, gt=0)


class L2Config(Section):
    """Frames of a worker's arena that it doesn't need now hold pages of the other workers of its node."""

    share: float = Field(default=0.5, ge=0, le=1)  # of each arena, at most; 0 turns the tier off


class L3Config(Section):
    """The node's slab of pinned shared memory; 0 turns the tier off, but for a small staging slab if L4 is on."""

    bytes: Bytes = Field(default=1024 * 2**20, ge=0)


class L4Config(Section):
    """The node's pages on SSD; 0 bytes turns the tier off."""

    # Each node takes a subfolder of its own, by its id; default: a folder of this deployment's name under the user's
    # cache folder.
    path: str = ""
    bytes: Bytes = Field(default=4 * 2**30, ge=0)  # budget of all files, free pages included
    store: Literal["slab", "lmdb"] = "slab"  # page bytes in O_DIRECT slab files, or as LMDB values
    format: L4Format = ""  # pages are kept here in this format only; "": as they are above


class TiersConfig(Section):
    """Sizes of the tiers. Larger tiers hold more prefixes; each is bounded by its bytes."""

    l1: L1Config = L1Config()
    l2: L2Config = L2Config()
    l3: L3Config = L3Config()
    l4: L4Config = L4Config()
    write: Literal["through", "demote"] = (
        "through"  # full pages are copied down at once, so a dying worker loses little; demote: when they must leave
    )


class PageWeights(Section):
    """Of the terms of a cached page's score, each term from 0 to 1; what scores lowest goes first.

    Below 0 a term is turned round.
    """

    recency: float = Field(default=0.5, ge=-1, le=1)  # used a short time ago
    memory: float = Field(default=0.2, ge=-1, le=1)  # of a long prefix
    remaining: float = Field(default=0.3, ge=-1, le=1)  # given a long answer

    @model_validator(mode="after")
    def _some_term_counts(self) -> Self:
        check_weights(self.recency, self.memory, self.remaining)
        return self


class CacheConfig(Section):
    """How pages are stored, used and evicted; `format`, its numbers and `epoch` are part of their identity."""

    policy: str = "rvi"  # which pages leave first, in every tier: rvi, score, lru, or another package's
    exponent: float = Field(default=0.25, ge=0, le=1)  # of rvi: 0 saves the most pages, 1 the most compute
    guard: bool = True  # of rvi: go by lru while that saves more
    weights: PageWeights = PageWeights()  # of score
    format: CacheFormat = "auto"  # auto: the model's own numbers; all others are quantized
    recent_tokens: int = Field(default=1024, ge=0, le=MAX_STREAM_TOKENS)  # of timedecay, kept in 8 bits
    sink_tokens: int = Field(default=16, ge=0, le=MAX_STREAM_TOKENS)  # of timedecay: the first ones, likewise
    epoch: int = Field(default=0, ge=0)  # raise it to make all cached pages of this deployment unfindable
    load: Literal["auto", "always"] = "auto"  # auto: a load that measures slower than recompute is not made
    # A load that takes longer loses to recompute.
    load_deadline_ms: float = Field(default=2000.0, gt=0, le=MAX_DEADLINE_MS)

    @field_validator("policy")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        # Here and not above: policies need numpy, and most configurations name none.
        from kvtier.tier.policy.plugins import load_policies

        if value not in load_policies():
            raise ValueError(f"must be one of {', '.join(load_policies())}, got {value!r}")
        return value


class TLSConfig(Section):
    """PEM files; with `client_ca` clients must show a certificate it signed."""

    cert: str
    key: str
    client_ca: str = ""


class GrpcConfig(Section):
    """Where the gateway listens."""

    host: Host = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)  # 0: any free port; `kvtier status` names it
    max_message_bytes: Bytes = Field(default=16 * 2**20, ge=65536, le=2**31 - 1)  # gRPC counts in 32 bits
    tls: TLSConfig | None = None


class TenantConfig(Section):
    """A tenant: its pages are never found by another. Changing `salt` makes its cached pages unfindable."""

    name: str = Field(min_length=1, max_length=128)
    salt: str = ""
    share: float = Field(default=1.0, gt=0, le=1)  # of each tier, at most; past it its own pages make room

    @field_validator("name")
    @classmethod
    def _is_one_line(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError(f"must be printable characters, got {value!r}")
        return value


class Config(Section):
    """A whole deployment."""

    name: str = Field(default="kvtier", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    model: ModelConfig = ModelConfig()
    page_tokens: int = 16
    numerics: Literal["auto", "fast", "invariant"] = "auto"  # auto: invariant in float32, fast else
    tiers: TiersConfig = TiersConfig()
    cache: CacheConfig = CacheConfig()
    worker: WorkerConfig = WorkerConfig()
    routing: RoutingConfig = RoutingConfig()
    transfer: TransferConfig = TransferConfig()
    grpc: GrpcConfig = GrpcConfig()
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),)
    nodes: NodesConfig = NodesConfig()
    ray: RayConfig = RayConfig()
    cluster: ClusterConfig = ClusterConfig()

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

    @model_validator(mode="after")
    def _nodes_can_be_had(self) -> Self:
        check_nodes(self.nodes, self.ray, self.worker, self.transfer)
        return self


def _l4_sentence(cache: str, l4: str) -> str:
    fitting = _L4_FORMATS.get(cache, ())
    instead = f"use {' or '.join(fitting)}, or leave it empty" if fitting else "leave it empty"
    return f"tiers.l4.format {l4} is no smaller form of pages of cache.format {cache}: {instead}"


def load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML file (None: the defaults) and apply `key.path=value` overrides; ConfigError names what is wrong."""
    data = _read(path) if path else {}
    for override in overrides:
        _apply(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings have each key once; PyYAML itself takes the last of several, and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(None, None, f"{key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        documents: list[Any] = list(yaml.load_all(path.read_text(), _UniqueKeys))
    except OSError as error:
        raise ConfigError(f"can't read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is no YAML: {error}") from error
    data = documents[0] if documents and documents[0] is not None else {}
    if not isinstance(data, dict):
        raise ConfigError(f"config {path} must be a mapping of sections, got {type(data).__name__}")
    if instead := _instead(path, data):
        raise ConfigError(instead)
    if len(documents) > 1:
        raise ConfigError(f"config {path} must be one YAML document, got {len(documents)}")
    return data


def _instead(path: Path, data: dict[str, Any]) -> str:
    """What to do with a file that starts what kvtier runs on, and isn't kvtier's own; "" for any other."""
    if "provider" in data and "cluster_name" in data:
        return (
            f"{path} is for Ray's cluster launcher: run `ray up {path}`, then on its head node "
            "`~/kvtier-venv/bin/kvtier up ~/kvtier/cluster/h200.yaml --address auto`"
        )
    if "apiVersion" in data and "kind" in data:
        return f"{path} is for Kubernetes, and starts kvtier too: run `kubectl apply -f {path}`"
    return ""


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
        data[last] = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is no YAML value: {error}") from error


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        return f"{where}: no such key"
    if error["type"] == "value_error":  # our own sentences name the value
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    return f"{where}: {error['msg']} (got {error['input']!r})"
