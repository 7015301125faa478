"""A machine is replaced by one at another address: its node goes on there, under its id, with the pages of its disk.

Real raylets, each at an address of its own on the loopback, with a folder of its own for a disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deployment_kit import Shell, wait_for
from ray_cluster_kit import head, joined_environment, machine

from kvtier.cli.client import connect

pytestmark = pytest.mark.slow

PROMPT = [(17 * i + 3) % 500 for i in range(96)]
PAGES = len(PROMPT) // 16


class Machines:
    """Of one cluster: each a raylet at 127.0.0.NUMBER, with a disk by name."""

    def __init__(self, shell: Shell, address: str, disks: Path) -> None:
        self._environment = {k: v for k, v in shell.environment.items() if k != "KVTIER_STATE"}
        self._address = address
        self._disks = disks
        self._there: dict[int, ExitStack] = {}

    def start(self, number: int, disk: str) -> None:
        cache = self._disks / disk
        if not cache.exists():
            cache.mkdir(parents=True)
            (cache / "kernels").symlink_to(Path(self._environment["KVTIER_CACHE"]) / "kernels")
        stack = self._there[number] = ExitStack()
        environment = self._environment | {"KVTIER_CACHE": str(cache)}
        where = (f"--address={self._address}", f"--node-ip-address=127.0.0.{number}")
        stack.enter_context(machine(environment, 1, *where))

    def lose(self, number: int) -> None:
        self._there.pop(number).close()

    def close(self) -> None:
        for number in list(self._there):
            self.lose(number)

    def folders(self) -> dict[str, list[str]]:
        """The nodes whose pages each disk has."""
        return {
            disk.name: sorted(folder.name for folder in disk.glob("l4/*/node-*"))
            for disk in sorted(self._disks.iterdir())
        }


@pytest.fixture
def shell(tmp_path: Path, tiny_llama: Path) -> Shell:
    shell = Shell(
        tmp_path, tiny_llama, nodes__count=2, worker__gpus=0, cache__load="always", transfer__same_host="off"
    )
    shell.environment |= joined_environment()
    return shell


@pytest.fixture
def address(shell: Shell) -> Iterator[str]:
    environment = {name: value for name, value in shell.environment.items() if name != "KVTIER_STATE"}
    with head(environment, 0) as address:  # a head without CPUs is no node
        yield address


@pytest.fixture
def machines(shell: Shell, address: str, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(shell, address, tmp_path / "disks")
    try:
        yield made
    finally:
        made.close()


def test_a_node_follows_its_disk_to_another_address_and_keeps_its_id_and_its_pages(
    shell: Shell, address: str, machines: Machines
) -> None:
    """By addresses alone, the two would have changed ids at the second start, and both would have begun again."""
    machines.start(2, "first")
    machines.start(3, "second")
    shell(*shell.up_arguments, "--address", address, "--detach")
    try:
        before = all_well(shell)
        assert [host_of(node) for node in before["nodes"]] == ["127.0.0.2", "127.0.0.3"]
        computed = shell.generate(PROMPT, "--worker", "worker-0")
        wait_for(lambda: shell.json("stats")["tiers"]["L4"]["pages"] >= PAGES, "its pages to be on the disk")

        machines.lose(2)
        machines.start(9, "first")
        moved = wait_for(lambda: whole_again(shell, before), "the node to go on at its new address")

        assert [host_of(node) for node in moved["nodes"]] == ["127.0.0.9", "127.0.0.3"]
        assert [node["id"] for node in moved["nodes"]] == ["node-0", "node-1"]
        assert moved["nodes"][1] == before["nodes"][1] | {"notes": moved["nodes"][1]["notes"]}
        again = shell.generate(PROMPT, "--worker", "worker-0")
        assert again["token_ids"] == computed["token_ids"]
        assert again["usage"]["cached_tokens"]["L4"] > 0
        fetched = shell.generate(PROMPT, "--worker", "worker-1")
        assert fetched["token_ids"] == computed["token_ids"]
        assert "node-0 goes on at 127.0.0.9" in (shell.state / "up.log").read_text()
    finally:
        shell("down")
    assert machines.folders() == {"first": ["node-0"], "second": ["node-1"]}

    shell(*shell.up_arguments, "--address", address, "--detach")
    try:
        started = all_well(shell)
        assert [host_of(node) for node in started["nodes"]] == ["127.0.0.9", "127.0.0.3"]
        assert shell.generate(PROMPT, "--worker", "worker-0")["usage"]["cached_tokens"]["L4"] > 0
    finally:
        shell("down")
    assert machines.folders() == {"first": ["node-0"], "second": ["node-1"]}


def host_of(node: dict[str, Any]) -> str:
    """Of a node, by its exchange."""
    host: str = node["exchange"].rsplit(":", 1)[0]
    return host


def all_well(shell: Shell) -> dict[str, Any]:
    """The status, once all that it shows is healthy."""
    endpoint = json.loads((shell.state / "deployment.json").read_text())["endpoint"]
    with connect(endpoint) as client:

        def found() -> dict[str, Any] | None:
            status = client.status()
            parts = [*status["nodes"], *status["workers"], status["directory"]]
            healths = {part["health"] for part in parts} | {n["exchange_health"] for n in status["nodes"]}
            return status if healths == {"healthy"} else None

        status: dict[str, Any] = wait_for(found, "all parts to be healthy")
        return status


def whole_again(shell: Shell, before: dict[str, Any]) -> dict[str, Any] | None:
    """The status, once it is healthy and the first node is another process, and so is its worker."""
    status = all_well(shell)
    is_new = [
        status[kind][0]["pid"] != before[kind][0]["pid"] and status[kind][0]["pid"] != 0
        for kind in ("nodes", "workers")
    ]
    return status if all(is_new) else None
