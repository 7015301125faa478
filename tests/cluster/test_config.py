"""The configuration is checked once, at the edge, with sentences that name the key and the value."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvtier.cluster.config import Config, ConfigError, load_config, parse_bytes

LOCAL = Path(__file__).resolve().parents[2] / "cluster" / "local.yaml"


def keys_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    """All dotted keys of a section that have a value of their own."""
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= keys_of(kind, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def keys_in(data: dict[str, object], prefix: str = "") -> set[str]:
    """All dotted keys of a YAML mapping."""
    found = set()
    for name, value in data.items():
        found |= keys_in(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def test_local_yaml_names_every_key_there_is() -> None:
    assert keys_in(yaml.safe_load(LOCAL.read_text())) == keys_of(Config)


def test_local_yaml_says_something_about_every_key() -> None:
    for line in LOCAL.read_text().splitlines():
        if ": " in line and not line.lstrip().startswith("#"):
            assert " # " in line, f"no comment: {line}"


def test_local_yaml_fits_a_small_laptop() -> None:
    tiers = load_config(LOCAL).tiers

    assert tiers.l1.bytes + tiers.l3.bytes <= 2**30
    assert tiers.l4.bytes <= 4 * 2**30


def test_an_override_reaches_a_nested_key_and_leaves_the_others() -> None:
    config = load_config(LOCAL, ("tiers.l3.bytes=1GiB", "page_tokens=32", "grpc.port=0", "model.path=/m"))

    assert (config.tiers.l3.bytes, config.page_tokens, config.grpc.port) == (2**30, 32, 0)
    assert config.model.path == "/m"
    assert config.tiers.l1.bytes == load_config(LOCAL).tiers.l1.bytes


def test_overrides_can_set_lists_and_sections() -> None:
    config = load_config(
        LOCAL, ("tenants=[{name: a}, {name: b, salt: x}]", "grpc.tls={cert: c.pem, key: k.pem}")
    )

    assert [tenant.name for tenant in config.tenants] == ["a", "b"]
    assert config.grpc.tls is not None and config.grpc.tls.cert == "c.pem"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("tiers.l3.bytes=lots", ["tiers.l3.bytes", "'lots'"]),
        ("tiers.l1.bytes=0", ["tiers.l1.bytes", "0"]),
        ("tiers.l1.bytes=-5", ["tiers.l1.bytes", "-5"]),
        ("page_tokens=12", ["page_tokens", "12", "power of two"]),
        ("model.dtype=int3", ["model.dtype", "'int3'", "bfloat16"]),
        ("grpc.port=70000", ["grpc.port", "70000", "65535"]),
        ("worker.count=0", ["worker.count", "0"]),
        ("name=a/b", ["name", "'a/b'"]),
        ("tiers.l5.bytes=1", ["tiers.l5", "no such key"]),
        ("speed=1", ["speed", "no such key"]),
        ("tenants=[]", ["tenants", "at least one"]),
        ("tenants=[{name: a}, {name: a}]", ["tenants", "once"]),
        ("page_tokens", ["key.path=value", "'page_tokens'"]),
        ("page_tokens.deep=1", ["page_tokens", "no section"]),
        ("name=[", ["name", "no YAML"]),
        ("tiers.l4.store=rocksdb", ["tiers.l4.store", "'rocksdb'", "slab"]),
        ("cache.load_deadline_ms=soon", ["cache.load_deadline_ms", "'soon'"]),
        ("cache.format=fp4", ["cache.format", "'fp4'", "timedecay"]),
        ("cache.recent_tokens=-1", ["cache.recent_tokens", "-1"]),
        ("tiers.l4.format=int4", ["tiers.l4.format", "'int4'", "int4c"]),
        ("cache.policy=arc", ["cache.policy", "'arc'", "rvi"]),
        ("cache.exponent=1.5", ["cache.exponent", "1.5"]),
        ("cache.guard=perhaps", ["cache.guard", "'perhaps'"]),
        ("cache.weights.memory=2", ["cache.weights.memory", "2"]),
        ("cache.weights={recency: 0, memory: 0, remaining: 0}", ["cache.weights", "must not be 0", "zeros"]),
        ("worker.preemption.remaining=-1.5", ["worker.preemption.remaining", "-1.5"]),
        ("tiers.write=back", ["tiers.write", "'back'", "demote"]),
        ("tenants=[{name: a, share: 0}]", ["tenants.0.share", "0"]),
        ("tenants=[{name: a, share: 1.5}]", ["tenants.0.share", "1.5"]),
        ("model.window=-1", ["model.window", "-1"]),
        ("model.window=8", ["model.window", "page's 16 tokens", "8"]),
        ("model.window=16777217", ["model.window", "16777216", "16777217"]),
        ("model.sinks=4", ["model", "sinks 4", "set model.window"]),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_what_would_be_right(override: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(LOCAL, (override,))

    for part in named:
        assert part in str(caught.value)
    assert str(caught.value).count("got ") <= 1


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("page_tokens=8", "cache.format=fp8"), ["cache.format fp8", "at least 16", "page_tokens 8"]),
        (
            ("page_tokens=8", "tiers.l4.format=int4c"),
            ["tiers.l4.format int4c", "at least 16", "page_tokens 8"],
        ),
        (("cache.format=fp8", "tiers.l4.format=int8"), ["l4.format int8", "cache.format fp8", "use int4c"]),
        (("cache.format=int4c", "tiers.l4.format=int4c"), ["l4.format int4c", "leave it empty"]),
        (("cache.format=timedecay", "tiers.l4.format=fp8"), ["l4.format fp8", "timedecay", "leave it empty"]),
        (
            ("tiers.l4.format=int4c", "tiers.l4.bytes=0"),
            ["l4.format int4c", "l4.bytes 0", "leave the format empty"],
        ),
        (("model.window=64", "model.sinks=65"), ["sinks", "at most the window (64 tokens)", "65"]),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_both_and_the_way_out(
    overrides: tuple[str, ...], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(LOCAL, overrides)

    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("cache.format=timedecay", "cache.recent_tokens=0", "cache.sink_tokens=0"),
        ("cache.format=int8", "tiers.l4.format=int4c"),
        ("tiers.l4.format=fp8", "page_tokens=64"),
        ("page_tokens=4", "model.window=4", "model.sinks=4"),
        ("page_tokens=256", "cache.format=k8v4"),
    ],
)
def test_formats_and_windows_that_go_together_are_taken(overrides: tuple[str, ...]) -> None:
    load_config(LOCAL, overrides)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("- a\n- b\n", "must be a mapping"), ("a: [", "no YAML"), ("model: 5\n", "model")],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=complaint):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")

    assert load_config(file) == load_config(None) == Config()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        ("7", 7),
        ("3g", 3 * 10**9),
        ("1TiB", 2**40),
    ],
)
def test_sizes_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@given(st.integers(0, 2**50))
def test_a_size_in_plain_bytes_is_itself(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == parse_bytes(nbytes) == nbytes


def test_the_configuration_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().page_tokens = 32
