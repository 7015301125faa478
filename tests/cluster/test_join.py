"""A deployment in a Ray cluster that runs already: it takes a place there, serves, and leaves the cluster as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deployment_kit import DEADLINE_S, Shell, wait_for
from ray_cluster_kit import head, joined_environment

from kvtier.cluster.machines.environment import prepare

pytestmark = pytest.mark.slow

PROMPT = [(13 * i + 1) % 500 for i in range(40)]


@pytest.fixture(scope="module")
def of_ray() -> dict[str, str]:
    """What the cluster is started with, its token among it."""
    return joined_environment()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, of_ray: dict[str, str]) -> Shell:
    """Of a person who logs in on that machine: they have the token in its file, and nothing of it in the environment."""
    folder = tmp_path_factory.mktemp("joined")
    token = folder / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text(of_ray["RAY_AUTH_TOKEN"])
    shell = Shell(folder, tiny_llama, worker__count=2)
    for name in [name for name in shell.environment if name.startswith("RAY_")]:
        del shell.environment[name]
    shell.environment["HOME"] = str(folder / "home")
    return shell


@pytest.fixture(scope="module")
def address(shell: Shell, of_ray: dict[str, str]) -> Iterator[str]:
    """Of the head of a cluster of one machine, as `ray start` makes it."""
    environment = {name: value for name, value in shell.environment.items() if name != "KVTIER_STATE"}
    with head(environment | of_ray, 4) as address:
        yield address


def test_it_serves_there_and_leaves_nothing_of_itself(shell: Shell, address: str) -> None:
    shell.environment["RAY_ADDRESS"] = address  # else `auto` might find the cluster of another test
    starting = shell.start(*shell.up_arguments, "--address", "auto", "--detach")
    _, said = starting.communicate(timeout=DEADLINE_S)
    assert starting.returncode == 0, said
    assert f"found the Ray cluster at {address}" in said
    status = shell.json("status")
    first = shell.generate(PROMPT, "--worker", "worker-0")
    second = shell.generate(PROMPT, "--worker", "worker-1")
    shell.remember_session()
    parts = [*status["nodes"], *status["workers"], status["directory"]]
    pids = [*(part["pid"] for part in parts), status["gateway_pid"]]

    shell("down")

    assert first["token_ids"] == second["token_ids"]
    assert [(worker["node"], worker["health"]) for worker in status["workers"]] == [("node-0", "healthy")] * 2
    assert len(set(pids)) == 5
    wait_for(lambda: not [pid for pid in pids if is_running(pid)], "its actors to end")
    shell.check_nothing_left()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_cluster_that_is_not_there_is_told_in_one_line(shell: Shell) -> None:
    """Before the model is looked for, which may take long to fetch."""
    err = shell("up", "--set=model.path=/nowhere", "--set=grpc.port=0", "--address", "127.0.0.1:1", code=1)

    assert "ray.address 127.0.0.1:1" in err.splitlines()[-1]


def test_a_token_is_shown_only_where_there_is_one(tmp_path: Path) -> None:
    def prepared(**environment: str) -> dict[str, str]:
        made = {"HOME": str(tmp_path / "home"), **environment}
        prepare(made, is_ours=False)
        return made

    assert "RAY_AUTH_MODE" not in prepared()
    assert prepared(RAY_AUTH_TOKEN="a" * 64)["RAY_AUTH_MODE"] == "token"
    assert prepared(RAY_AUTH_TOKEN_PATH="/some/file")["RAY_AUTH_MODE"] == "token"
    assert prepared(RAY_AUTH_TOKEN="a" * 64, RAY_AUTH_MODE="disabled")["RAY_AUTH_MODE"] == "disabled"
