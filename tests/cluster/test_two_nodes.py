"""Two nodes on one machine, as a user starts them: pages go between them, and what dies is started again.

Real processes: two raylets, a cache, an exchange and a worker with a tiny random model each, a directory, a gateway.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import trustme
from deployment_kit import Shell, wait_for

from kvtier.cli.client import Client, ClientError, completion, connect

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).resolve().parents[2] / "cluster" / "two-nodes.yaml"
STALLED_AFTER_S = 8
PROMPT = [(11 * i + 5) % 500 for i in range(100)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[tuple[Shell, Shell]]:
    """The deployment of two nodes, and another one on this machine all the while."""
    folder = tmp_path_factory.mktemp("two-nodes")
    up = Shell(
        folder,
        tiny_llama,
        cache__load="always",  # such a small model computes any prompt sooner than a page can be fetched
        transfer__tls=json.dumps(pem_files(folder)),
        cluster__stalled_after_s=STALLED_AFTER_S,
    )
    neighbour = Shell(tmp_path_factory.mktemp("neighbour"), tiny_llama)
    shells = (up, neighbour)
    try:
        with ThreadPoolExecutor(len(shells)) as pool:  # at once: much of a start is waiting
            starts = [
                pool.submit(up, "up", str(CONFIG), *up.up_arguments[1:], "--detach"),
                pool.submit(neighbour, *neighbour.up_arguments, "--detach"),
            ]
        for start in starts:
            start.result()
        yield shells
    finally:
        for shell in shells:
            if (shell.state / "deployment.json").exists():
                shell("down")


@pytest.fixture(scope="module")
def up(both: tuple[Shell, Shell]) -> Shell:
    return both[0]


@pytest.fixture(scope="module")
def neighbour(both: tuple[Shell, Shell]) -> Shell:
    return both[1]


def pem_files(folder: Path) -> dict[str, str]:
    """What both nodes show each other."""
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca")
    pair.private_key_pem.write_to_path(folder / "key")
    pair.cert_chain_pems[0].write_to_path(folder / "cert")
    return {name: str(folder / name) for name in ("cert", "key", "ca")}


@pytest.fixture(scope="module")
def client(up: Shell) -> Iterator[Client]:
    """One that stays connected: a `kvtier` for each question would take longer than what is asked."""
    endpoint = json.loads((up.state / "deployment.json").read_text())["endpoint"]
    with connect(endpoint) as client:
        yield client


def generate(client: Client, prompt: list[int], worker: str = "") -> dict[str, Any]:
    done = completion(client.generate(prompt, max_tokens=8, worker=worker))
    usage = done["usage"]
    assert sum(usage["cached_tokens"].values()) + usage["computed_tokens"] == len(prompt)
    return done


def all_well(client: Client) -> dict[str, Any] | None:
    """The status, once every part of it is healthy; None before."""
    try:
        status = client.status()
    except ClientError:
        return None
    parts = [*status["nodes"], *status["workers"], status["directory"]]
    healths = {part["health"] for part in parts} | {node["exchange_health"] for node in status["nodes"]}
    return status if healths == {"healthy"} else None


def test_status_names_two_nodes_with_a_worker_each(up: Shell, client: Client) -> None:
    status = wait_for(lambda: all_well(client), "all parts to be healthy")

    assert [node["id"] for node in status["nodes"]] == ["node-0", "node-1"]
    assert [(worker["id"], worker["node"]) for worker in status["workers"]] == [
        ("worker-0", "node-0"),
        ("worker-1", "node-1"),
    ]
    pids = [pid for pid, since in lives(status).values()]
    assert len(set(pids)) == 6 and all(map(psutil.pid_exists, pids))
    assert len({node["exchange"] for node in status["nodes"]} - {""}) == 2
    assert {node["host"] for node in status["nodes"]} == {socket.gethostname()}
    began = psutil.Process(json.loads((up.state / "deployment.json").read_text())["pid"]).create_time()
    assert all(began < since <= time.time() for pid, since in lives(status).values())


def test_what_one_node_computed_the_other_fetches(client: Client) -> None:
    """Each try is with a prompt of its own. The directory hears of pages a moment after they are there."""
    rng = Random(5)

    def known() -> int:
        entries: int = client.status()["directory"]["entries"]
        return entries

    def fetched() -> bool:
        before = known()
        prompt = [rng.randrange(500) for _ in range(200)]
        first = generate(client, prompt, "worker-0")
        wait_for(lambda: known() >= before + len(prompt) // 16, "the directory to hear of it")
        second = generate(client, prompt, "worker-1")
        assert (first["worker"], second["worker"]) == ("worker-0", "worker-1")
        assert second["token_ids"] == first["token_ids"]
        return bool(second["usage"]["cached_tokens"]["remote"])

    wait_for(fetched, "pages from the other node")


def test_each_node_keeps_pages_in_its_own_folder(up: Shell, client: Client) -> None:
    catalogues = sorted(up.state.parent.rglob("catalogue.mdb"))

    assert [file.parent.name for file in catalogues] == ["node-0", "node-1"]


@pytest.mark.parametrize("name", ["worker-1", "cache node node-1", "gateway"])
def test_what_is_killed_comes_back_and_serves(up: Shell, client: Client, name: str) -> None:
    before = generate(client, PROMPT)
    status = client.status()

    process_of(up, status, name).kill()

    assert_comes_back(up, client, status, before, {name})


def test_what_is_stalled_is_told_killed_and_comes_back_and_serves(up: Shell, client: Client) -> None:
    before = generate(client, PROMPT)
    status = client.status()
    names = {"exchange of node-1", "directory"}
    processes = [process_of(up, status, name) for name in names]
    began = min(process.create_time() for process in processes)

    for process in processes:
        process.suspend()

    def both_told() -> dict[str, Any] | None:
        now = client.status()
        told = [now["directory"]["health"], now["nodes"][1]["exchange_health"]]
        return now if told == ["stalled", "stalled"] else None

    told = wait_for(both_told, "the status to say so")
    assert all(began < since_s <= time.time() for since_s in changes_of(told))
    assert generate(client, PROMPT, "worker-0")["token_ids"] == before["token_ids"], "the others serve"
    assert_comes_back(up, client, status, before, names)
    log = (up.state / "up.log").read_text()
    for name in names:
        assert re.search(rf"{name} is stalled for \d+ s, and is killed", log)


def changes_of(status: dict[str, Any]) -> list[float]:
    """Since when these two are as they are."""
    return [status["directory"]["since"], status["nodes"][1]["exchange_since"]]


def assert_comes_back(
    up: Shell, client: Client, status: dict[str, Any], before: dict[str, Any], names: set[str]
) -> None:
    """Those that died run again, and no others; they serve at the same address."""
    log = up.state / "up.log"
    wait_for(lambda: all(f"{name} runs again" in log.read_text() for name in names), "its return")
    assert all(f"{name} died" in log.read_text() for name in names)

    def serves() -> bool:
        try:
            return bool(generate(client, PROMPT, "worker-1")["token_ids"] == before["token_ids"])
        except ClientError:
            return False

    wait_for(serves, "it to serve again")
    after = wait_for(lambda: all_well(client), "all parts to be healthy")
    assert after["endpoint"] == status["endpoint"]
    assert_only_these_are_new(status, after, names)


def process_of(shell: Shell, status: dict[str, Any], name: str) -> psutil.Process:
    """The process of a part, by what the supervisor calls it."""
    if not name.startswith("exchange"):
        return psutil.Process(lives(status)[name][0])
    [address] = [node["exchange"] for node in status["nodes"] if node["id"] == "node-1"]
    port = int(address.rsplit(":", 1)[1])
    [process] = [
        process
        for process in shell.processes()
        if any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("inet")
        )
    ]
    return process


def lives(status: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Process and beginning of each part that has a line of its own."""
    parts = {"gateway": {"pid": status["gateway_pid"], "since": status["since"]}}
    parts |= {"directory": status["directory"]}
    parts |= {worker["id"]: worker for worker in status["workers"]}
    parts |= {f"cache node {node['id']}": node for node in status["nodes"]}
    return {name: (part["pid"], part["since"]) for name, part in parts.items()}


def assert_only_these_are_new(before: dict[str, Any], after: dict[str, Any], names: set[str]) -> None:
    old, new = lives(before), lives(after)
    pids_before, pids_after = ({part: life[0] for part, life in all_.items()} for all_ in (old, new))
    assert {part for part in old if pids_before[part] != pids_after[part]} == names & set(old)
    for name in names & set(new):
        assert new[name][1] > old[name][1]


def test_status_is_a_table_for_people_too(up: Shell) -> None:
    shown = up("status")

    for word in ("node-0", "node-1", "worker-0", "worker-1", "gateway", "directory", "holders"):
        assert word in shown


def test_down_leaves_nothing_and_ends_nothing_of_others(up: Shell, neighbour: Shell) -> None:
    here, beside = (shell.json("status") for shell in (up, neighbour))
    assert not {life[0] for life in lives(here).values()} & {part["pid"] for part in beside["workers"]}
    up.remember_session()
    neighbour.remember_session()

    up("down")

    up.check_nothing_left()
    assert neighbour.json("status")["workers"] == beside["workers"]
    neighbour("down")
    neighbour.check_nothing_left()
