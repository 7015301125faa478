"""`kvtier record`: what a node heard is written down, runs again, and becomes a trace that `kvtier replay` reads."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_kit import Shell
from gateway_kit import serving
from node_kit import Peer, running
from recording_kit import SECRETS, a_life
from recording_node import recording_node

from kvtier.cli import main

Run = Callable[..., tuple[int, str, str]]
PROMPT = [(7 * i + 3) % 500 for i in range(100)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvtier` with these arguments: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, said.out, said.err

    return call


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a node's life."""
    file = tmp_path_factory.mktemp("life") / "life.kvrec"
    file.write_bytes(a_life(11, before=50, steps=400).ended())
    return file


def test_verify_says_that_all_is_as_recorded_plain_or_compressed(
    run: Run, life: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "life.kvrec.gz"
    packed.write_bytes(gzip.compress(life.read_bytes()))

    for file in (life, packed):
        code, out, _ = run("record", "verify", str(file))
        assert code == 0 and "all" in out and "as recorded" in out

    code, out, _ = run("record", "verify", str(life), "--json")
    told = json.loads(out)
    assert told["difference"] is None and told["events"] > 300 and told["is_same_code"]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_comes_to_the_same(life: Path, hash_seed: str) -> None:
    """Sets of texts have another order in each process: no decision may hang on it."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "record", "verify", str(life)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, "as recorded" in done.stdout) == (0, True), done.stderr


def test_a_changed_file_fails_with_one_line_that_says_where(run: Run, life: Path, tmp_path: Path) -> None:
    data = bytearray(life.read_bytes())
    data[-2000] ^= 1
    changed = tmp_path / "changed"
    changed.write_bytes(data)

    code, out, err = run("record", "verify", str(changed))

    assert (code, out) == (1, "") and "record " in err and "damaged" in err and str(changed) in err


def test_a_file_that_was_cut_off_is_verified_as_far_as_it_goes(run: Run, life: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(life.read_bytes()[:-3000])

    for verb in ("verify", "show"):
        code, out, err = run("record", verb, str(cut))
        assert code == 0 and out and "cut off" in err

    code, out, _ = run("record", "show", str(cut), "--json")
    assert json.loads(out)["is_torn"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["verify", "/nowhere.kvrec"], 1, "/nowhere.kvrec: No such file"),
        (["show", "/"], 1, "directory"),
        (["show", "{text}"], 1, "no recording of kvtier"),
        (["export", "{life}", "--out", "{text}"], 1, "another name"),
        (["export", "{life}", "--out", "/nowhere/trace"], 1, "/nowhere/trace"),
        (["start", "--max-bytes", "lots", "--endpoint", "h:1"], 2, "'lots'"),
        (["start", "--max-bytes", "5XB", "--endpoint", "h:1"], 2, "'5XB'"),
        (["stop", "--endpoint", "127.0.0.1:1"], 3, "127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    run: Run, life: Path, tmp_path: Path, arguments: list[str], code: int, named: str
) -> None:
    text = tmp_path / "text"
    text.write_text("no recording at all, and long enough to be one")

    got, out, err = run("record", *(one.format(life=life, text=text) for one in arguments))

    assert (got, out) == (code, "") and named in err
    assert err.splitlines()[-1].startswith("kvtier: ")


def test_show_counts_events_commands_and_where_pages_were_found(run: Run, life: Path) -> None:
    code, out, _ = run("record", "show", str(life), "--json")
    told = json.loads(out)

    assert code == 0 and told["machine"] == "cache node" and told["owner"] == "n0"
    assert told["events"]["Locate"] == told["lookups"] == sum(told["lookup_ends"].values()) > 0
    assert told["commands"]["Located"] == told["lookups"]
    assert told["found_pages"]["L3"] > 0 and set(told["found_pages"]) == {"L1", "L3", "L4"}
    assert sum(told["found_pages"].values()) <= told["asked_pages"]
    assert told["difference"] is None and not told["is_torn"] and told["seconds"] > 0

    code, table, _ = run("record", "show", str(life))
    assert code == 0 and "Locate" in table and "found in" in table
    assert not any(secret in out + table for secret in SECRETS)


def test_a_trace_of_it_is_read_by_replay(run: Run, life: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"

    code, out, _ = run("record", "export", str(life), "--out", str(trace))
    assert code == 0 and "approximate" in out and "rounded down to pages" in out
    code, out, _ = run("replay", str(trace), "--policy", "lru", "--capacity-blocks", "4", "--json")

    assert code == 0
    [row] = [row for row in json.loads(out)["results"] if row["policy"] == "lru"]
    assert row["requests"] > 0 and 0 <= row["block_hit_rate"] <= 1


def test_start_and_stop_by_the_command_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with running(tmp_path) as service, serving(nodes=[recording_node(service)]) as served:
        code, out, _ = run(
            *("record", "start", "--endpoint", served.endpoint, "--max-bytes", "20MiB", "--node", "n0")
        )
        assert code == 0 and "n0: " in out and "kvtier record stop" in out
        other = ("record", "start", "--endpoint", served.endpoint, "--out", "other.kvrec")
        code, _, err = run(*other, "--node", "n0")
        assert code == 2 and "already" in err
        code, _, err = run(*other, "--node", "w7")
        assert code == 2 and "'w7'" in err and "n0" in err
        peer = Peer(tmp_path)
        peer.store(0, 3)
        peer.close()
        code, out, _ = run("record", "stop", "--endpoint", served.endpoint, "--json")
        assert code == 0
        code, again, _ = run("record", "stop", "--endpoint", served.endpoint)

    [told] = json.loads(out)["recordings"]
    file = Path(told["path"])
    assert file.parent == tmp_path and file.name.startswith("kvtier-") and file.suffix == ".kvrec"
    assert told["ended"] == "it was stopped" and told["events"] > 3 and "it was stopped" in again
    assert run("record", "verify", str(file))[0] == 0


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("recorded"), tiny_llama)
    yield made
    if (made.state / "deployment.json").exists():
        made("down")


def test_a_deployment_is_recorded_and_its_trace_has_its_requests(shell: Shell, tmp_path: Path) -> None:
    """Real processes: gateway, worker and node; the recordings begin in the middle of their life."""
    file, trace = tmp_path / "run.kvrec.gz", tmp_path / "run.jsonl"
    shell(*shell.up_arguments, "--detach")
    shell.generate(PROMPT, "--request-id", "before-it-began")
    shell("record", "start", "--out", str(file))
    assert "already: stop that first" in shell("record", "start", "--out", str(tmp_path / "two"), code=2)
    for i in range(4):
        shell.generate([*PROMPT, *range(20 * i)], "--request-id", f"my-own-name-{i}")
    shell("pages", "evict", "--tier", "L1")
    shell.generate([*PROMPT, 7], "--request-id", "my-own-name-4")
    stopped = shell.json("record", "stop")
    shell("down")

    told: Any = shell.json("record", "verify", str(file))
    shown: Any = shell.json("record", "show", str(file))
    shell("record", "export", str(file), "--out", str(trace))
    rows = [json.loads(line) for line in trace.read_text().splitlines()]

    assert told["difference"] is None and not told["is_torn"]
    assert [one["path"] for one in stopped["recordings"]] == [str(file)]
    assert told["events"] == stopped["recordings"][0]["events"] > 5
    assert shown["events"]["Locate"] >= 4 and shown["found_pages"]["L3"] >= 6
    text = gzip.decompress(file.read_bytes())
    assert b"my-own-name" not in text and b"before-it-began" not in text
    header, *requests = rows
    assert header["block"] == 16 and header["approximate"] and len(requests) == 5
    prompts = [*(len(PROMPT) + 20 * i for i in range(4)), len(PROMPT) + 1]
    assert all(abs(row["i"] - tokens) <= 16 for row, tokens in zip(requests, prompts, strict=True))
    assert [row["o"] for row in requests] == [8] * 5
    assert all(row["h"][:2] == [0, 6] or row["h"][1] > 6 for row in requests)  # all begin with the same pages
