"""What a machine's limits and folders mean for a configuration, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_gemma3, make_tiny_llama

from kvtier.cli import checks
from kvtier.cli.checks import Check, folder_checks, limit_checks, memory_need, weights_bytes
from kvtier.cli.folders import problem
from kvtier.cluster.config.deployment import Config, load_config
from kvtier.cluster.machines.stored_pages import l1_notice, longest_in_l1
from kvtier.cluster.supervisor.launch import LaunchError
from kvtier.cluster.supervisor.launch import _load as load
from kvtier.workers.machine.limits import Limits

GIB, MIB = 2**30, 2**20
ROOMY = Limits(
    cores=8,
    cpu_quota=None,
    memory_bytes=64 * GIB,
    memory_free_bytes=60 * GIB,
    memory_file="",
    shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
    open_files=None,
    locked_bytes=None,
)


def configured(*overrides: str) -> Config:
    return load_config(None, overrides)


def found(name: str, config: Config, limits: Limits, weights: int = 0, on_gpus: bool = False) -> Check:
    [check] = [one for one in limit_checks(config, limits, weights, on_gpus) if one.name == name]
    return check


def test_a_machine_with_room_has_nothing_to_complain_of() -> None:
    assert {check.level for check in limit_checks(configured(), ROOMY, GIB, True)} == {"ok"}


@pytest.mark.parametrize(
    ("overrides", "quota", "level"),
    [
        ((), 1.0, "ok"),
        ((), 0.3, "ok"),
        (("worker.threads=2",), 1.0, "warn"),
        (("worker.threads=2",), 2.0, "ok"),
        (("worker.count=4",), 2.0, "warn"),
    ],
)
def test_threads_that_exceed_a_cpu_quota_are_named_with_how_many_fit(
    overrides: tuple[str, ...], quota: float, level: str
) -> None:
    limits = replace(ROOMY, cpu_quota=quota, cores=max(1, int(quota)))

    check = found("cpus", configured(*overrides), limits)

    assert check.level == level and f"{quota:g} CPUs" in check.found
    assert level == "ok" or "worker.threads=1" in check.way_out


@pytest.mark.parametrize("on_gpus", [False, True])
def test_memory_counts_what_each_rank_of_each_raylet_takes(on_gpus: bool) -> None:
    """L1 and weights are RAM only where no GPU computes."""
    sizes = (f"tiers.{tier}.bytes={size}GiB" for tier, size in (("l1", 3), ("l3", 5), ("l4", 7)))
    ranks = ("worker.count=2", "worker.tensor_parallel=2", "tiers.l2.share=0")
    config = configured(*sizes, *ranks, "ray.raylets=2", "nodes.count=2")
    need = 2 * (5 + (0 if on_gpus else 2 * 2 * 3 + 2 * 1)) * GIB + 2 * checks._PROCESSES_BYTES

    assert memory_need(config, GIB, on_gpus) == need
    for free, level in ((need - 1, "fail"), (need + 1, "warn"), (1.3 * need, "ok")):
        limits = replace(ROOMY, memory_free_bytes=int(free))
        assert found("memory", config, limits, GIB, on_gpus).level == level


def test_a_memory_limit_is_named_with_its_group_and_what_to_lower() -> None:
    group = "/sys/fs/cgroup/memory/docker/7"
    limits = replace(ROOMY, memory_bytes=GIB, memory_free_bytes=GIB - 5 * MIB, memory_file=group)

    check = found("memory", configured(), limits)

    assert check.level == "fail"
    assert "1019.0 MiB" in check.found and "1.0 GiB" in check.found and group in check.found
    assert "tiers.l1.bytes" in check.way_out and "container" in check.way_out
    assert "\n" not in check.notice and check.notice.startswith("memory: ")


@pytest.mark.parametrize(("free_mib", "level"), [(64, "warn"), (79, "warn"), (80, "ok")])
def test_a_small_shared_memory_comes_with_how_to_enlarge_it(free_mib: int, level: str) -> None:
    limits = replace(ROOMY, shm_bytes=free_mib * MIB, shm_free_bytes=free_mib * MIB)

    check = found("shared memory", configured(), limits)

    assert check.level == level and "/dev/shm" in check.found
    assert level == "ok" or "--shm-size" in check.way_out


@pytest.mark.parametrize(
    ("files", "level"), [(None, "ok"), (63, "fail"), (64, "warn"), (1024, "warn"), (1408, "ok")]
)
def test_open_files_are_as_many_as_clients_may_come(files: int | None, level: str) -> None:
    """64 running and 1,024 waiting requests, each of a client of its own."""
    check = found("open files", configured(), replace(ROOMY, open_files=files))

    assert check.level == level
    assert level == "ok" or ("ulimit" in check.way_out and "worker.max_waiting" in check.way_out)


@pytest.mark.parametrize(
    ("locked", "on_gpus", "level"),
    [(8 * MIB, False, "ok"), (8 * MIB, True, "warn"), (GIB, True, "ok"), (None, True, "ok")],
)
def test_memory_may_be_locked_as_far_as_l3_is_pinned(locked: int | None, on_gpus: bool, level: str) -> None:
    check = found("locked memory", configured(), replace(ROOMY, locked_bytes=locked), 0, on_gpus)

    assert check.level == level
    assert level == "ok" or "memlock" in check.way_out


def test_the_weights_of_a_folder_are_its_tensors_files(tmp_path: Path) -> None:
    for name, nbytes in (("a.safetensors", 10), ("b.safetensors", 5), ("tokenizer.json", 100)):
        (tmp_path / name).write_bytes(b"x" * nbytes)

    assert weights_bytes(tmp_path) == 15


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert problem(tmp_path / "not/yet", 1) == ""
    assert os.listdir(tmp_path) == []
    assert problem(Path("/proc/nothing")).startswith("can't write to /proc: ")
    assert "MiB free" in problem(tmp_path, 2**60)
    (tmp_path / "file").write_text("")
    assert "can't write to" in problem(tmp_path / "file" / "below")


def test_every_folder_that_fails_names_the_setting_that_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "problem", lambda folder, need_bytes=0: f"can't write to {folder}: No space left"
    )

    levels = {check.name: (check.level, check.way_out) for check in folder_checks(configured())}

    assert {name: level for name, (level, _) in levels.items()} == {
        "temporary folder": "fail",
        "state folder": "fail",
        "L4 folder": "fail",
        "cache folder": "warn",  # what is there already serves
    }
    assert "KVTIER_STATE" in levels["state folder"][1] and "tiers.l4.path" in levels["L4 folder"][1]
    assert "KVTIER_CACHE" in levels["cache folder"][1]
    without_l4 = {check.name for check in folder_checks(configured("tiers.l4.bytes=0"))}
    assert "L4 folder" not in without_l4


# ---- L1 and the context ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of two heads of 16: 512 bytes a token in float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def context_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])


def test_an_l1_that_holds_the_context_is_not_spoken_of(llama: Path) -> None:
    config = configured("model.dtype=float32")

    assert longest_in_l1(llama, config) == (context_of(llama), context_of(llama))
    assert l1_notice(llama, config) == ""


@pytest.mark.parametrize("pages", [1, 2, 7])
def test_an_l1_smaller_than_the_context_says_how_much_fits_and_what_to_raise(llama: Path, pages: int) -> None:
    page_bytes = 16 * 512
    config = configured("model.dtype=float32", f"tiers.l1.bytes={pages * page_bytes + 5}")

    longest, context = longest_in_l1(llama, config)

    assert longest == 16 * pages
    notice = l1_notice(llama, config)
    for named in ("tiers.l1.bytes", f"{longest:,}", f"{context:,}", f"model.max_context {longest} or less"):
        assert named in notice


def test_the_context_that_was_asked_for_must_fit(llama: Path) -> None:
    small = ("model.dtype=float32", "tiers.l1.bytes=16384")

    assert load(llama, configured(*small))[1]
    assert load(llama, configured(*small, "model.max_context=32"))[1] == ""
    with pytest.raises(
        LaunchError, match=r"tiers\.l1\.bytes holds requests of at most 32 tokens.*context is 33"
    ):
        load(llama, configured(*small, "model.max_context=33"))


def test_with_a_window_for_all_requests_any_context_fits(llama: Path) -> None:
    assert (
        l1_notice(llama, configured("model.dtype=float32", "tiers.l1.bytes=16384", "model.window=64")) == ""
    )


def test_layers_with_windows_of_their_own_need_less(tmp_path: Path) -> None:
    gemma = make_tiny_gemma3(tmp_path)
    small: tuple[Any, ...] = ("model.dtype=float32", "tiers.l1.bytes=1MiB")

    longest, context = longest_in_l1(gemma, configured(*small))

    assert 0 < longest <= context


# ---- `kvtier up` -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        ({"KVTIER_STATE": "/proc/nothing"}, [], "state folder: can't write to /proc: .*; set KVTIER_STATE"),
        (
            {"KVTIER_STATE": "/proc/nothing"},
            ["--detach"],
            "state folder: can't write to /proc: .*; set KVTIER_STATE",
        ),
        ({}, ["--set=tiers.l4.path=/proc/l4"], "L4 folder: can't write to /proc: .*; set tiers.l4.path"),
        ({"KVTIER_CACHE": "/proc/nothing"}, [], "L4 folder: can't write to /proc: .*; set tiers.l4.path"),
    ],
)
def test_a_folder_that_cannot_be_used_ends_up_before_ray_starts(
    tmp_path: Path, llama: Path, environment: dict[str, str], arguments: list[str], said: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "kvtier",
        "up",
        f"--set=model.path={llama}",
        "--set=grpc.port=0",
        *arguments,
    ]
    own = {"KVTIER_STATE": str(tmp_path / "state"), "KVTIER_CACHE": str(tmp_path / "cache")}

    done = subprocess.run(
        command,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(f"kvtier: {said}", done.stderr.splitlines()[-1])
    assert "starting Ray" not in done.stderr
    assert not (tmp_path / "state" / "deployment.json").exists()
