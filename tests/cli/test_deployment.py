"""A deployment by its command line: it serves, answers for what it did, and leaves nothing behind.

Real processes: `kvtier up` starts Ray, a cache node, a worker with a tiny random model, and the gateway.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from deployment_kit import DEADLINE_S, Shell, read_until, wait_for

pytestmark = pytest.mark.slow

PROMPT = [(7 * i + 3) % 500 for i in range(100)]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Shell:
    return Shell(tmp_path_factory.mktemp("deployment"), tiny_llama)


@pytest.fixture(scope="module")
def said(shell: Shell) -> Iterator[str]:
    """What `up --detach` said of the deployment that the tests share."""
    yield shell(*shell.up_arguments, "--detach")
    if (shell.state / "deployment.json").exists():
        shell("down")


@pytest.fixture
def up(said: str, shell: Shell) -> Shell:
    return shell


def test_up_says_that_it_is_ready_and_how_to_call_it(said: str) -> None:
    assert re.search(r"ready in .*: .* at 127\.0\.0\.1:\d+ \(pid \d+\)", said)
    assert "kvtier generate --token-ids 1,2,3" in said
    assert "kvtier down" in said


def test_a_prompt_is_computed_once_and_found_after_that(up: Shell) -> None:
    cold = up.generate(PROMPT)
    warm = up.generate(PROMPT)

    assert cold["usage"]["computed_tokens"] == len(PROMPT)
    assert 96 <= warm["usage"]["cached_tokens"]["L1"] < len(PROMPT)  # full pages, never the last token
    assert cold["token_ids"] == warm["token_ids"]
    assert len(cold["token_ids"]) == cold["usage"]["completion_tokens"] == 8
    assert cold["finish_reason"] == "length"
    assert set(cold["usage"]["cached_tokens"]) == {"L1", "L2", "L3", "L4", "remote"}
    assert set(cold["timings_ms"]) == {"queue", "load", "prefill", "ttft", "decode"}


def test_without_cache_nothing_is_read_or_left(up: Shell) -> None:
    fresh = [token + 1 for token in PROMPT]

    first = up.generate(fresh, "--no-cache")
    second = up.generate(fresh, "--no-cache", "--worker", "worker-0")

    assert first["usage"]["computed_tokens"] == second["usage"]["computed_tokens"] == len(fresh)
    assert first["token_ids"] == second["token_ids"]


def test_token_ids_stream_as_text_too(up: Shell) -> None:
    out = up("generate", "--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", "8")

    assert [int(token) for token in out.split()] == up.generate(PROMPT)["token_ids"]


def test_stats_add_up(up: Shell) -> None:
    up.generate(PROMPT)
    stats = up.json("stats")

    hits = sum(tier["hit_tokens"] for tier in stats["tiers"].values())
    assert hits + stats["computed_tokens"] == stats["prompt_tokens"]
    assert hits == stats["cached_tokens"] > 0
    for name, tier in stats["tiers"].items():
        assert tier["used_bytes"] <= tier["capacity_bytes"], name
        assert tier["corrupt_pages"] == 0
    assert list(stats["tiers"]) == ["L1", "L2", "L3", "L4", "remote"]


def test_status_names_processes_that_live(up: Shell) -> None:
    status = up.json("status")

    assert re.fullmatch(r"127\.0\.0\.1:\d+", status["endpoint"])
    [node], [worker] = status["nodes"], status["workers"]
    assert psutil.pid_exists(node["pid"]) and psutil.pid_exists(worker["pid"])
    assert (worker["node"], worker["role"], worker["health"]) == (node["id"], "both", "healthy")
    assert status["directory"] is None and node["exchange"] == ""  # nothing to share pages with


def test_nothing_listens_on_an_outside_address(up: Shell) -> None:
    listening = {
        connection.laddr.ip
        for process in up.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }

    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"} and listening


def test_explain_covers_the_prompt(up: Shell) -> None:
    up.generate(PROMPT, "--request-id", "asked-about")
    told = up.json("explain", "asked-about")

    assert told["notes"][0]["start"] == 0 and told["notes"][-1]["end"] == len(PROMPT)
    assert up("explain", "never-asked", code=4).startswith("kvtier: ")


def test_pages_are_listed_shown_pinned_evicted_verified_and_cleared(up: Shell) -> None:
    up.generate(PROMPT)
    key = up.json("pages", "ls", "--tier", "L1")[0]["key"]

    assert {copy["key"] for copy in up.json("pages", "show", key[:12])} == {key}
    up("pages", "pin", key)
    assert any(copy["pinned"] for copy in up.json("pages", "show", key))
    up("pages", "unpin", key)
    up("pages", "verify")
    up("pages", "clear", "--all")
    assert up.json("pages", "ls") == []
    assert up.generate(PROMPT)["usage"]["computed_tokens"] == len(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["generate", "--token-ids", "100000"], 2, "100000"),
        (["generate", "--token-ids", "1", "--temperature=-1"], 2, "-1"),
        (["generate", "--token-ids", "1", "--tenant", "nothing"], 2, "nothing"),
        (["generate", "--token-ids", "1", "--worker", "worker-9"], 4, "worker-9"),
        (["generate", "text, though there is no tokenizer"], 2, "tokenizer"),
        (["pages", "show", "ffffffffffff"], 4, "ffffffffffff"),
        (["status", "--endpoint", "127.0.0.1:1"], 3, "127.0.0.1:1"),
    ],
)
def test_a_bad_request_is_one_line_that_names_it(
    up: Shell, arguments: list[str], code: int, named: str
) -> None:
    err = up(*arguments, code=code)

    assert err.startswith("kvtier: ") and err.count("\n") == 1 and named in err


@pytest.mark.parametrize("how", [[], ["--detach"]])
def test_a_second_up_says_that_one_runs(up: Shell, how: list[str]) -> None:
    endpoint = up.json("status")["endpoint"]

    err = up(*up.up_arguments, *how, code=1)

    assert f"already running at {endpoint}" in err and err.count("\n") == 1
    assert up.json("status")["endpoint"] == endpoint


def test_a_detached_up_that_comes_second_leaves_the_log_of_the_first_alone(up: Shell) -> None:
    """Both may have seen that none ran; the lock is what decides."""
    log = up.state / "up.log"
    before = log.stat().st_ino
    kept = {file.name: file.stat().st_mtime_ns for file in up.state.glob("up.log.*")}
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "kvtier", *up.up_arguments, "--notify-fd", str(writer)]

    late = subprocess.run(
        command,
        env=up.environment,
        pass_fds=(writer,),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(writer)

    with os.fdopen(reader) as reports:
        assert reports.read() == ""
    assert late.returncode == 1 and "already running at" in late.stderr
    assert log.stat().st_ino == before and "already running" not in log.read_text()
    assert {file.name: file.stat().st_mtime_ns for file in up.state.glob("up.log.*")} == kept


def test_nothing_else_may_enter_the_folder_of_the_sockets_after_a_worker_was_made_again(up: Shell) -> None:
    """Ray opens its own folder to all users of the machine each time that it starts a process."""

    def worker_pid() -> int:
        [worker] = up.json("status")["workers"]
        return int(worker["pid"]) if worker["health"] == "healthy" else 0

    folder = Path(json.loads((up.state / "deployment.json").read_text())["ray_dir"])
    first = int(wait_for(worker_pid, "the worker to answer"))
    psutil.Process(first).kill()

    wait_for(lambda: worker_pid() not in (0, first), "a new worker to answer")

    assert [file.name for file in folder.glob("*.sock")] == ["node-0.sock"]
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
    log = (up.state / "up.log").read_text()
    assert "worker-0 died" in log and "(raylet)" not in log, "Ray's own paragraphs aren't for people"


def test_requests_go_on_while_the_cache_node_is_dead_and_it_comes_back(up: Shell) -> None:
    before = up.generate(PROMPT)
    log = up.state / "up.log"

    def healthy_pid() -> int:
        [node] = up.json("status")["nodes"]
        return int(node["pid"]) if node["health"] == "healthy" else 0

    def is_noted(deaths: int, what: str = "died") -> bool:
        return log.read_text().count(f"cache node node-0 {what}") >= deaths

    for deaths in (1, 2):
        psutil.Process(wait_for(healthy_pid, "the cache node to answer")).kill()
        during = up.generate(PROMPT)

        assert during["token_ids"] == before["token_ids"]
        wait_for(partial(is_noted, deaths), f"notice {deaths} of its death")
        wait_for(partial(is_noted, deaths, "runs again"), f"notice {deaths} of its return")
    wait_for(healthy_pid, "the cache node to answer again")


def test_a_worker_of_two_ranks_serves_the_same_tokens_and_finds_its_pages(
    up: Shell, tmp_path: Path, tiny_llama: Path
) -> None:
    alone = up.generate(PROMPT)
    ranks = Shell(tmp_path, tiny_llama, worker__tensor_parallel=2)
    ranks(*ranks.up_arguments, "--detach")
    ranks.remember_session()
    try:
        cold, warm = ranks.generate(PROMPT), ranks.generate(PROMPT)
    finally:
        ranks("down")

    assert alone["token_ids"] == cold["token_ids"] == warm["token_ids"]
    assert warm["usage"]["cached_tokens"]["L1"] >= 96 - 16
    ranks.check_nothing_left()


def test_down_leaves_nothing_and_the_next_up_finds_the_pages_on_disk(up: Shell) -> None:
    up("pages", "clear", "--all")
    before = up.generate(PROMPT)
    up.remember_session()

    up("down")

    up.check_nothing_left()
    assert "no deployment is running" in up("down", code=1)

    foreground = up.start(*up.up_arguments)
    read_until(foreground, "kvtier generate")
    after = up.generate(PROMPT)
    up.remember_session()
    foreground.send_signal(signal.SIGINT)
    assert foreground.wait(DEADLINE_S) == 0
    foreground.communicate()

    up.check_nothing_left()
    assert after["token_ids"] == before["token_ids"]
    assert after["usage"]["cached_tokens"]["L4"] >= 96 - 16  # all full pages but, at most, the last


def test_damage_is_told_by_the_up_that_heals_it_and_what_it_leaves_when_killed_is_cleaned_up(
    shell: Shell,
) -> None:
    [catalogue] = shell.state.parent.rglob(
        "catalogue.mdb"
    )  # of the L4 that the tests before this one have filled
    os.truncate(catalogue, 100)

    starting = shell.start(*shell.up_arguments, "--detach")
    _, said = starting.communicate(timeout=DEADLINE_S)

    [notice] = [line for line in said.splitlines() if "catalogue rebuilt" in line]
    assert notice.startswith(f"node-0: L4 at {catalogue.parent}: ")
    assert notice in (shell.state / "up.log").read_text().splitlines()
    shell.remember_session()
    killed = psutil.Process(json.loads((shell.state / "deployment.json").read_text())["pid"])
    killed.kill()
    wait_for(lambda: not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE, "its end")

    assert f"was killed (pid {killed.pid}): `kvtier down`" in shell("status", code=3)

    hasty = "--set=cluster.stalled_after_s=5"
    err = shell("up", "--set=model.path=/nowhere", "--set=grpc.port=0", hasty, code=1)

    assert f"was killed (pid {killed.pid})" in err
    assert "cluster.stalled_after_s 5 is below 30" in err
    assert err.splitlines()[-1].startswith("kvtier: no model '/nowhere'")
    wait_for(lambda: not shell.processes(), "its processes to end")
    shell.check_nothing_left()


@pytest.mark.parametrize(
    ("how", "step", "number"),
    [
        ([], "starting Ray", signal.SIGINT),
        ([], "loading the model", signal.SIGTERM),
        ([], "opening the gateway", signal.SIGINT),
        (["--detach"], "starting Ray", signal.SIGTERM),
        (["--detach"], "loading the model", signal.SIGINT),
    ],
)
def test_a_signal_in_the_middle_of_a_start_stops_it(
    shell: Shell, how: list[str], step: str, number: int
) -> None:
    """tests/cli/test_interrupted.py has every moment, without Ray."""
    starting = shell.start(*shell.up_arguments, *how)
    assert starting.stderr is not None
    for line in starting.stderr:
        if step in line:
            break
    wait_for(lambda: (shell.state / "deployment.json").exists(), "its record")
    shell.remember_session()

    starting.send_signal(number)

    assert starting.wait(DEADLINE_S) == 130
    starting.communicate()
    wait_for(lambda: not shell.processes(), "its processes to end")
    shell.check_nothing_left()


def test_a_port_that_is_taken_is_said_before_anything_starts(shell: Shell) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = shell(*shell.up_arguments, f"--set=grpc.port={port}", "--detach", code=1)

    assert f"127.0.0.1:{port}" in err.splitlines()[-1] and "grpc.port=0" in err.splitlines()[-1]
    shell.check_nothing_left()


def test_when_ray_dies_the_log_says_so_and_nothing_is_left(shell: Shell) -> None:
    """Ray ended a supervisor whose `up --detach` had ended before it could say why, or clean up."""
    shell(*shell.up_arguments, "--detach")
    shell.remember_session()
    [raylet] = [process for process in shell.processes() if process.name() == "raylet"]

    raylet.kill()

    wait_for(lambda: not shell.processes(), "the supervisor to end")
    last = (shell.state / "up.log").read_text().splitlines()[-1]
    assert last.startswith("kvtier: Ray died, so everything was stopped; logs are in ")
    shell.check_nothing_left()
