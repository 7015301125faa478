"""A deployment in a Ray cluster that runs already: it takes a place there, serves, and leaves the cluster as it was."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deployment_kit import Shell, wait_for

from kvtier.cluster.leftovers import remove

PROMPT = [(13 * i + 1) % 500 for i in range(40)]
OBJECT_STORE_BYTES = 80 * 2**20

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("joined"), tiny_llama, worker__count=2)
    shell.environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return shell


@pytest.fixture(scope="module")
def address(shell: Shell) -> Iterator[str]:
    """Of the head of a cluster of one machine, as `ray start` makes it."""
    folder = tempfile.mkdtemp(prefix="kvtier-test-", dir="/tmp")  # short: Ray's sockets lie there
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    options = ["--num-cpus=4", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}"]
    environment = {name: value for name, value in shell.environment.items() if name != "KVTIER_STATE"}
    process = subprocess.Popen(
        [*command, "--include-dashboard=false", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    found = None
    for line in process.stdout:
        said.append(line)
        found = found or re.search(r"ray start --address='([^']+)'", line)
        if "block forever" in line:
            break
    assert found, "".join(said)
    yield found[1]
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        one.kill()
    process.communicate()
    psutil.wait_procs(family[1:], timeout=10)
    remove(Path(folder))


def test_it_serves_there_and_leaves_nothing_of_itself(shell: Shell, address: str) -> None:
    shell(*shell.up_arguments, "--address", address, "--detach")
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
    err = shell(*shell.up_arguments, "--address", "127.0.0.1:1", code=1)

    assert "ray.address 127.0.0.1:1" in err.splitlines()[-1]
