"""The configuration is checked once, at the edge, with sentences that name the key and the value."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvtier.cluster.config.deployment import Config, ConfigError, load_config
from kvtier.cluster.config.nodes import WorkerConfig
from kvtier.cluster.config.values import parse_bytes

FOLDER = Path(__file__).resolve().parents[2] / "cluster"
LOCAL = FOLDER / "local.yaml"
OURS = ["local.yaml", "two-nodes.yaml", "h200.yaml"]  # of `kvtier up`


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


@pytest.mark.parametrize("name", OURS)
def test_a_config_says_something_about_every_key_it_sets(name: str) -> None:
    for line in (FOLDER / name).read_text().splitlines():
        if ": " in line and not line.lstrip().startswith("#"):
            assert " # " in line, f"no comment: {line}"


def test_every_file_beside_local_yaml_is_known_here() -> None:
    assert {file.name for file in FOLDER.glob("*.yaml")} == {*OURS, "on-prem.yaml", "kuberay.yaml"}


@pytest.mark.parametrize("name", OURS)
def test_a_config_that_comes_with_kvtier_is_taken(name: str) -> None:
    load_config(FOLDER / name)


def test_two_nodes_fit_a_small_laptop() -> None:
    config = load_config(FOLDER / "two-nodes.yaml")
    tiers, nodes = config.tiers, config.nodes.count

    assert nodes == config.ray.raylets == 2
    assert nodes * (config.worker.count * tiers.l1.bytes + tiers.l3.bytes) <= 2**30
    assert nodes * config.worker.count * config.worker.threads <= 2


def test_the_h200_config_uses_all_gpus_of_every_machine() -> None:
    config = load_config(FOLDER / "h200.yaml")

    assert config.worker.count * config.worker.tensor_parallel * float(config.worker.gpus) == 8
    assert (config.page_tokens, config.nodes.count, config.ray.is_ours) == (64, 0, False)


def test_one_machine_can_try_the_h200_config_alone() -> None:
    """As its own comment says."""
    assert load_config(FOLDER / "h200.yaml", ("ray.address=local", "nodes.count=1")).ray.is_ours


def test_ray_would_take_the_launcher_file() -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    launcher = yaml.safe_load((FOLDER / "on-prem.yaml").read_text())

    jsonschema.validate(launcher, schema)
    starts = [*launcher["head_start_ray_commands"], *launcher["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in line for line in starts if "ray start" in line)
    assert all("RAY_worker_niceness=0" in line for line in starts if "ray start" in line)


def test_the_manifest_for_kubernetes_holds_a_config_for_as_many_nodes_as_it_starts(tmp_path: Path) -> None:
    manifests = list(yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text()))
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    [(name, text)] = by_kind["ConfigMap"]["data"].items()
    (tmp_path / name).write_text(text)
    config = load_config(tmp_path / name)
    cluster = by_kind["RayCluster"]["spec"]
    [workers] = cluster["workerGroupSpecs"]
    [head] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    [worker] = workers["template"]["spec"]["containers"]
    gpus = int(worker["resources"]["limits"]["nvidia.com/gpu"])

    assert config.nodes.count == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert config.worker.count * config.worker.tensor_parallel * float(config.worker.gpus) == gpus
    assert f"kvtier up /etc/kvtier/{name}" in head["args"][0]
    assert config.tiers.l4.path in [mount["mountPath"] for mount in worker["volumeMounts"]]
    assert by_kind["Service"]["spec"]["ports"][0]["port"] == config.grpc.port
    [_, pause_s] = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert 0 < int(pause_s) < workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.tiers.write == "through", "the pause saves what is written by itself"
    assert config.ray.address == "auto"


def test_no_pod_is_left_to_probes_that_plain_ray_does_not_answer() -> None:
    """KubeRay gives its own to containers that lack one: those ask the dashboard, and it kills pods that fail them."""
    [cluster] = [
        manifest
        for manifest in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
        if manifest["kind"] == "RayCluster"
    ]
    [head] = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    [workers] = cluster["spec"]["workerGroupSpecs"]
    [worker] = workers["template"]["spec"]["containers"]

    assert head["livenessProbe"]["exec"]["command"] == ["ray", "health-check"]
    assert head["readinessProbe"]["grpc"]["port"] in [port["containerPort"] for port in head["ports"]]
    for probe in ("livenessProbe", "readinessProbe"):
        assert str(worker[probe]["tcpSocket"]["port"]) == workers["rayStartParams"]["node-manager-port"]


def test_every_pod_keeps_the_model_on_a_volume_and_may_fetch_one_that_is_not_open_to_all() -> None:
    [cluster] = [
        manifest
        for manifest in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
        if manifest["kind"] == "RayCluster"
    ]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]

    for group in groups:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        environment = {each["name"]: each for each in container["env"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for name in ("HF_HOME", "KVTIER_CACHE"):
            volume = mounts[str(Path(environment[name]["value"]).parent)]
            assert volume in [each["name"] for each in pod["volumes"]]
        assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"]


def test_the_recipe_of_the_launcher_file_waits_for_all_its_hosts_and_names_what_is_on_them() -> None:
    text = (FOLDER / "on-prem.yaml").read_text()
    launcher = yaml.safe_load(text)
    hosts = [launcher["provider"]["head_ip"], *launcher["provider"]["worker_ips"]]
    [recipe] = [line for line in text.splitlines() if "kvtier up" in line]
    venv, config, *options = recipe.removeprefix("#").replace(" up ", " ").split()

    assert any(
        command.endswith(f"venv {venv.removesuffix('/bin/kvtier')}") for command in launcher["setup_commands"]
    )
    assert launcher["file_mounts"]["~/kvtier"] == "." and config == "~/kvtier/cluster/h200.yaml"
    assert f"--address {hosts[0]}:6379" in recipe and "--port=6379" in str(
        launcher["head_start_ray_commands"]
    )
    assert f"--set nodes.count={len(hosts)}" in recipe and options


@pytest.mark.parametrize(
    ("name", "instead"), [("on-prem.yaml", "`ray up "), ("kuberay.yaml", "`kubectl apply ")]
)
def test_a_file_for_another_program_is_refused_with_what_to_run_instead(name: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(FOLDER / name)

    assert instead in str(caught.value) and name in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_file_of_two_documents_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("name: a\n---\nname: b\n")

    with pytest.raises(ConfigError, match="one YAML document, got 2"):
        load_config(file)


def test_local_yaml_fits_a_small_laptop() -> None:
    tiers = load_config(LOCAL).tiers

    assert tiers.l1.bytes + tiers.l3.bytes <= 2**30
    assert tiers.l4.bytes <= 4 * 2**30


def test_an_override_reaches_a_nested_key_and_leaves_the_others() -> None:
    config = load_config(LOCAL, ("tiers.l3.bytes=1GiB", "page_tokens=32", "grpc.port=0", "model.path=/m"))

    assert (config.tiers.l3.bytes, config.page_tokens, config.grpc.port) == (2**30, 32, 0)
    assert config.model.path == "/m"
    assert config.tiers.l1.bytes == load_config(LOCAL).tiers.l1.bytes


def test_off_is_a_word_though_yaml_reads_a_truth_value() -> None:
    assert load_config(None, ("transfer.same_host=off",)).transfer.same_host == "off"


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
        ("name=..", ["name", "'..'"]),
        ("name=.hidden", ["name", "'.hidden'"]),
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
        ("worker.count=65", ["worker.count", "65", "64"]),
        ("worker.role=encode", ["worker.role", "both, prefill or decode", "'encode'"]),
        ("worker.role=[]", ["worker.role", "[]"]),
        ("worker.role=prefill", ["worker.role", "only prefill", "decode", "[prefill, decode]"]),
        ("worker.role=[decode, decode]", ["worker.role", "only decode", "no worker would prefill"]),
        ("worker.count=true", ["worker.count", "must not be true or false", "true"]),
        ("worker.max_sequences=100000000", ["worker.max_sequences", "65536"]),
        ("grpc.max_message_bytes=2147483648", ["grpc.max_message_bytes", "2147483647"]),
        ('tenants=[{name: "a\\nb"}]', ["tenants.0.name", "printable"]),
        ("tenants=[{name: a, name: b}]", ["tenants", "'name' is there twice"]),
        ("worker.gpus=some", ["worker.gpus", "auto", "'some'"]),
        ("worker.gpus=1.5", ["worker.gpus", "1.5", "from 0 to 1"]),
        ("worker.tensor_parallel=0", ["worker.tensor_parallel", "0"]),
        ("tiers.l2.share=1.5", ["tiers.l2.share", "1.5"]),
        ("nodes.count=-1", ["nodes.count", "-1"]),
        ("nodes.count=2", ["nodes.count 2", "ray.raylets 2", "ray.address HOST:PORT"]),
        ("ray.raylets=0", ["ray.raylets", "0"]),
        ("ray.address=here", ["ray.address", "local, auto or HOST:PORT", "'here'"]),
        ("ray.address=10.0.0.1:99999", ["ray.address", "'10.0.0.1:99999'"]),
        ("transfer.in_flight_bytes=64KiB", ["transfer.in_flight_bytes", "1048576", "65536"]),
        ("transfer.streams=0", ["transfer.streams", "0"]),
        ("transfer.deadline_ms=0", ["transfer.deadline_ms", "0"]),
        ("transfer.deadline_ms=.inf", ["transfer.deadline_ms", "finite", "inf"]),
        ("transfer.deadline_ms=600001", ["transfer.deadline_ms", "600000", "600001"]),
        ("cache.load_deadline_ms=.inf", ["cache.load_deadline_ms", "finite", "inf"]),
        ("cache.exponent=.nan", ["cache.exponent", "finite", "nan"]),
        ("worker.gpus=.inf", ["worker.gpus", "inf"]),
        ("transfer.host=10.1.0.0/33", ["transfer.host", "10.1.0.0/16", "'10.1.0.0/33'"]),
        ("transfer.host=10.1.0.7/16", ["transfer.host", "'10.1.0.7/16'", "host bits"]),
        ("transfer.port=70000", ["transfer.port", "70000", "65535"]),
        ("transfer.same_host=never", ["transfer.same_host", "'never'", "off"]),
        ("routing.policy=random", ["routing.policy", "'random'", "round_robin"]),
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
        (
            ("ray.address=auto", "ray.raylets=2"),
            ["ray.raylets 2", "ray.address auto", "leave ray.raylets at 1"],
        ),
        (("ray.raylets=2", "nodes.count=3"), ["nodes.count 3", "2", "ray.raylets 3"]),
        (("ray.raylets=2", "transfer.port=5000"), ["transfer.port 5000", "2 nodes", "use 0"]),
        (
            ("worker.role=[prefill, decode]", "worker.count=1"),
            ["[prefill, decode]", "1 worker", "worker.count 2"],
        ),
        (("worker.gpus=0.5", "worker.tensor_parallel=2"), ["tensor_parallel 2", "gpus 0.5"]),
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
        ("worker.role=[prefill, decode]", "worker.count=2"),
        ("worker.role=[prefill, decode]", "ray.raylets=2", "nodes.count=2"),
        ("worker.gpus=0.5", "worker.count=2"),
        ("ray.address=auto", "nodes.count=0", "worker.role=[prefill, decode, decode]"),
        ('ray.address="[fd00::1]:6379"', "nodes.count=64", "transfer.port=5000"),
    ],
)
def test_values_that_go_together_are_taken(overrides: tuple[str, ...]) -> None:
    load_config(LOCAL, overrides)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("a: [", "no YAML"),
        ("model: 5\n", "model"),
        ("tenants: [{name: a, salt: s}]\ntenants: [{name: b}]\n", "'tenants' is there twice"),
    ],
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


@pytest.mark.parametrize(("seconds", "is_hasty"), [("5", True), ("29.5", True), ("30", False), ("60", False)])
def test_a_stall_shorter_than_a_slow_step_is_named(seconds: str, is_hasty: bool) -> None:
    caution = load_config(LOCAL, [f"cluster.stalled_after_s={seconds}"]).cluster.caution

    assert (caution is not None) == is_hasty
    if caution is not None:
        assert (
            f"cluster.stalled_after_s {seconds} is below 30" in caution
            and "worker.max_batch_tokens" in caution
        )


def test_roles_are_gone_through_again_and_again() -> None:
    assert WorkerConfig().roles(3) == ("both", "both", "both")
    assert WorkerConfig(role=("prefill", "decode")).roles(3) == ("prefill", "decode", "prefill")
