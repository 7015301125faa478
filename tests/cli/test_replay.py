"""`kvtier replay` on small traces, in every form it reads, and what it says of mistakes."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from kvtier.cli import main
from kvtier.lab.replay.jobs import ReplayFailed, run_jobs
from kvtier.lab.replay.models import LIVE, POLICIES, Setup
from kvtier.lab.replay.replay import LOAD_S
from kvtier.lab.traces.files import load_trace

pytestmark = pytest.mark.slow

RESULT = {
    *(
        "policy",
        "capacity_blocks",
        "tiers",
        "block_hit_rate",
        "token_hit_rate",
        "compute_saved",
        "gap_closed",
    ),
    *("time_saved", "by_tier", "requests", "blocks", "hit_blocks", "evicted_blocks", "bytes_moved"),
    *("ssd_bytes_written", "notes"),
}


def mooncake_lines(requests: int, seed: int = 0) -> list[str]:
    """Chats over a few shared prompts: each turn asks for all pages of the one before and some new ones."""
    rng = np.random.default_rng(seed)
    next_id, chats, lines = 10, [[page] for page in range(8)], []
    for at in range(requests):
        chat = int(rng.integers(len(chats)))
        grown = int(rng.integers(1, 9))
        pages = [*chats[chat], *range(next_id, next_id + grown)]
        next_id += grown
        chats[chat] = [chat] if len(pages) > 60 else pages
        row = {"timestamp": 500 * at, "input_length": 512 * len(pages) - 100, "output_length": 80}
        lines.append(json.dumps({**row, "hash_ids": pages}))
    return lines


def bailian_lines(mooncake: Sequence[str]) -> list[str]:
    """The same requests in the other form."""
    lines = []
    for number, line in enumerate(mooncake):
        row = json.loads(line)
        more = {"chat_id": number, "parent_chat_id": -1, "type": "text", "turn": 1}
        lines.append(json.dumps({**row, **more, "timestamp": row["timestamp"] / 1e3}))
    return lines


def our_lines(mooncake: Sequence[str]) -> list[str]:
    """The same requests in kvtier's own form."""
    lines = [json.dumps({"trace": "own", "block": 512})]
    for line in mooncake:
        row = json.loads(line)
        runs = [number for page in row["hash_ids"] for number in (page, 1)]
        times = {"t": row["timestamp"] / 1e3, "i": row["input_length"], "o": row["output_length"]}
        lines.append(json.dumps({**times, "s": -1, "h": runs}))
    return lines


@pytest.fixture
def lines() -> list[str]:
    """Two hundred requests."""
    return mooncake_lines(200)


@pytest.fixture
def trace(tmp_path: Path, lines: list[str]) -> Path:
    """A file of them."""
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run `kvtier replay` with these arguments: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", "replay", *map(str, arguments)])
        code: str | int | None = 0
        try:
            main()
        except SystemExit as done:
            code = done.code
        told = capsys.readouterr()
        assert isinstance(code, int)
        return code, told.out, told.err

    return call


def results(out: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of --json by policy and size."""
    return {(row["policy"], row["capacity_blocks"]): row for row in json.loads(out)["results"]}


def test_json_has_a_row_for_each_policy_and_size_beside_lru_belady_and_the_infinite_cache(
    run: Any, trace: Path
) -> None:
    code, out, err = run(trace, "--policy", "arc,rvi", "--capacity-blocks", "300,100", "--json")

    assert (code, err) == (0, "")
    told, rows = json.loads(out), results(out)
    assert set(rows) == {
        *((policy, size) for policy in ("lru", "arc", "rvi", "belady") for size in (100, 300)),
        ("infinite", told["trace"]["distinct_blocks"]),
    }
    assert all(set(row) == RESULT for row in rows.values())
    assert told["trace"]["requests"] == 200 and told["trace"]["block_tokens"] == 512
    assert told["trace"]["blocks"] == sum(len(json.loads(x)["hash_ids"]) for x in mooncake_lines(200))
    assert (told["half"], told["bytes_per_block"], told["recompute_ms"]) == ("second", 64 * 2**20, 20)
    for size in (100, 300):
        low, high = rows["lru", size]["block_hit_rate"], rows["belady", size]["block_hit_rate"]
        assert (rows["lru", size]["gap_closed"], rows["belady", size]["gap_closed"]) == (0, 1)
        for policy in ("rvi", "arc"):
            row = rows[policy, size]
            assert row["gap_closed"] == pytest.approx((row["block_hit_rate"] - low) / (high - low))
            assert row["block_hit_rate"] <= high
    for row in rows.values():
        assert row["requests"] == 100
        assert row["block_hit_rate"] == row["hit_blocks"] / row["blocks"] == row["by_tier"]["L1"]
        assert row["bytes_moved"] == (row["blocks"] - row["hit_blocks"]) * told["bytes_per_block"]
        assert row["time_saved"] == pytest.approx(row["compute_saved"])


def test_the_table_names_policies_sizes_and_what_they_hit(run: Any, trace: Path) -> None:
    code, out, _ = run(trace, "--policy", "rvi", "--capacity-blocks", 100)
    told = results(run(trace, "--policy", "rvi", "--capacity-blocks", 100, "--json")[1])

    assert code == 0
    for policy in ("lru", "rvi", "belady"):
        row = told[policy, 100]
        assert re.search(rf"{policy} +{100 * row['block_hit_rate']:.1f} %", out)
    for part in ("200 requests", "blocks of 512 tokens", "the last 100 requests", "gap closed", "infinite"):
        assert part in out


def test_every_form_and_packing_gives_the_same(
    run: Any, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "\n".join(lines).encode()
    (tmp_path / "mooncake").write_bytes(plain)
    (tmp_path / "packed").write_bytes(gzip.compress(plain))
    (tmp_path / "parts").write_bytes(gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]))
    (tmp_path / "bailian").write_text("\n".join(bailian_lines(lines)))
    (tmp_path / "ours").write_text("\n".join(our_lines(lines)))

    sizes = ("--policy", "arc", "--capacity-blocks", 100, "--block-tokens", 512)

    def rows(name: str) -> dict[tuple[str, int], dict[str, Any]]:
        code, out, err = run(name, *sizes, "--json")
        assert code == 0, err
        return results(out)

    expected = rows("mooncake")
    for name in ("packed", "parts", "bailian", "ours"):
        assert rows(name) == expected, name
    for content in (plain, gzip.compress(plain)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        assert rows("-") == expected


def test_pages_of_bailian_hold_16_tokens(run: Any, tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "b.jsonl").write_text("\n".join(bailian_lines(lines)))

    _, out, _ = run("b.jsonl", "--capacity-blocks", 100, "--json")

    assert json.loads(out)["trace"]["block_tokens"] == 16
    assert json.loads(out)["bytes_per_block"] == 2 * 2**20
    assert json.loads(out)["trace"]["sessions"] == 200


def test_several_files_are_replayed_together(run: Any, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("\n".join(mooncake_lines(100, seed=1)))

    _, out, _ = run(trace, "other.jsonl", "--capacity-blocks", 100, "--half", "all", "--json")

    told = json.loads(out)
    assert (told["trace"]["requests"], told["half"]) == (300, "all")
    assert told["trace"]["files"] == [str(trace), "other.jsonl"]
    assert {row["requests"] for row in told["results"]} == {300}


def test_sizes_are_chosen_where_none_is_given(run: Any, trace: Path) -> None:
    _, out, _ = run(trace, "--json")

    told = json.loads(out)
    sizes = {row["capacity_blocks"] for row in told["results"] if row["policy"] == "rvi"}
    distinct = told["trace"]["distinct_blocks"]
    assert len(sizes) == 5
    assert 1 <= min(sizes) < max(sizes) < distinct


def test_all_means_every_policy(run: Any, trace: Path) -> None:
    _, out, _ = run(trace, "--policy", "all", "--capacity-blocks", 100, "--json")

    assert {row["policy"] for row in json.loads(out)["results"]} == {*POLICIES, "infinite"}


def test_a_broken_line_is_named_or_counted(run: Any, tmp_path: Path, lines: list[str]) -> None:
    broken = [*lines[:50], '{"timestamp": 3, "input_len', *lines[50:], '{"timestamp": -1}']
    (tmp_path / "broken.jsonl").write_text("\n".join(broken))

    code, out, err = run("broken.jsonl")

    assert (code, out) == (1, "")
    assert re.search(
        r"kvtier: broken.jsonl line 51: JSON is malformed.* \(--skip-bad goes on", err.splitlines()[-1]
    )

    code, out, _ = run("broken.jsonl", "--skip-bad", "--capacity-blocks", 100, "--json")
    assert code == 0
    assert json.loads(out)["trace"]["skipped_lines"] == 2
    assert json.loads(out)["trace"]["requests"] == 200

    _, out, _ = run("broken.jsonl", "--skip-bad", "--capacity-blocks", 100)
    assert "2 lines were skipped; the first: broken.jsonl line 51" in out


def test_pages_with_two_parents_are_told_of(run: Any, tmp_path: Path, lines: list[str]) -> None:
    row = json.loads(lines[0])
    strange = [json.dumps({**row, "hash_ids": ids}) for ids in ([1, 2], [3, 2])]
    (tmp_path / "strange.jsonl").write_text("\n".join(strange))

    _, out, _ = run("strange.jsonl", "--capacity-blocks", 10)

    assert "1 blocks came after several parents" in out


def test_pages_that_are_too_large_or_too_small_for_the_lengths_are_told_of(run: Any, trace: Path) -> None:
    small = ("--capacity-blocks", 20)
    _, out, _ = run(trace, *small)
    assert "other lengths" not in out

    for tokens in (16, 4096):
        code, out, err = run(trace, *small, "--block-tokens", tokens)
        assert code == 0, err
        assert f"requests have other lengths than blocks of {tokens} tokens give" in out


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_line_without_an_end_is_refused_before_it_takes_all_memory(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any
) -> None:
    monkeypatch.setattr("kvtier.lab.traces.files.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "zeros").write_bytes(pack(bytes(3 << 20)))

    code, out, err = run("zeros", "--skip-bad")

    assert (code, out) == (1, "")
    assert "zeros has a line of 1 MiB or more" in err


def test_the_plot_is_a_png(run: Any, trace: Path, tmp_path: Path) -> None:
    code, _, _ = run(trace, "--policy", "arc", "--plot", "hits.png")

    assert code == 0
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_model_costs_can_be_told(run: Any, trace: Path) -> None:
    costs = ("--bytes-per-block", 1000, "--recompute-ms", 4, "--load-ms", "L1=1")

    _, out, _ = run(trace, "--capacity-blocks", 100, *costs, "--json")

    told, row = json.loads(out), results(out)["lru", 100]
    assert (told["bytes_per_block"], told["recompute_ms"]) == (1000, 4)
    assert told["load_ms"] == {**{tier: 1e3 * s for tier, s in LOAD_S.items()}, "L1": 1}
    assert row["bytes_moved"] == 1000 * (row["blocks"] - row["hit_blocks"])
    assert row["time_saved"] < row["compute_saved"]


def test_a_sessions_end_frees_what_is_its_own(run: Any, tmp_path: Path) -> None:
    """Sessions come one by one, twice as large as what is over; only who hears of ends keeps the shared prompt."""
    rows: list[dict[str, Any]] = [{"block": 512}]
    for session in range(40):
        pages = [0, 20, 1000 + 50 * session, 50]
        rows += [{"t": 2 * session, "s": session, "i": 70 * 512, "h": pages}]
        rows += [{"t": 2 * session + 1, "s": 9999, "i": 30 * 512, "h": [9000, 30]}]
    (tmp_path / "sessions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    size = ("--policy", "lru", "--capacity-blocks", 60, "--json")

    without, told = (
        results(run("sessions.jsonl", *size, *option)[1])["lru", 60] for option in ((), ("--session-ends",))
    )

    assert told["block_hit_rate"] > without["block_hit_rate"]


def test_a_chain_of_tiers_says_where_hits_were_and_what_was_written(run: Any, trace: Path) -> None:
    tiers = ("--tiers", "L1=20,L2=20,L3=60,L4=200")

    code, out, err = run(trace, *tiers, "--policy", "rvi,score", "--json")

    assert code == 0, err
    rows = results(out)
    distinct = json.loads(out)["trace"]["distinct_blocks"]
    assert set(rows) == {(name, 300) for name in ("lru", "rvi", "score", "belady")} | {("infinite", distinct)}
    for policy in ("lru", "rvi", "score"):
        row = rows[policy, 300]
        assert row["tiers"] == {"L1": 20, "L2": 20, "L3": 60, "L4": 200}
        assert sum(row["by_tier"].values()) == pytest.approx(row["block_hit_rate"])
        assert (
            0 < row["by_tier"]["L4"] < row["block_hit_rate"] <= rows["infinite", distinct]["block_hit_rate"]
        )
        assert 0 < row["time_saved"] < row["compute_saved"]
        assert 0 < row["ssd_bytes_written"] <= row["bytes_moved"]
    assert rows["belady", 300]["tiers"] is None
    low, high = (rows[policy, 300]["block_hit_rate"] for policy in ("lru", "belady"))
    for policy in ("lru", "rvi", "score", "belady"):
        row = rows[policy, 300]
        assert row["gap_closed"] == pytest.approx((row["block_hit_rate"] - low) / (high - low))

    _, out, _ = run(trace, *tiers)
    for part in ("time saved", "L4", "SSD written", "rvi", "belady"):
        assert part in out


def test_workers_have_an_l1_each(run: Any, trace: Path) -> None:
    tiers = ("--tiers", "L1=20,L3=60,L4=200", "--policy", "lru", "--json")

    one, three = (results(run(trace, *tiers, "--workers", count)[1]) for count in (1, 3))

    assert {size for policy, size in one if policy == "lru"} == {280}
    assert {size for policy, size in three if policy == "lru"} == {320}
    assert three["lru", 320]["tiers"]["L1"] == 20


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("nowhere.jsonl",), 1, "can't read nowhere.jsonl: No such file or directory"),
        (("folder.png",), 1, "can't read folder.png: Is a directory"),
        (("empty.jsonl",), 1, "empty.jsonl has no requests"),
        (("text.txt",), 1, "text.txt line 1: JSON is malformed"),
        (("cut.gz",), 1, "cut.gz is no whole gzip file .*: fetch it again"),
        (("-", "-"), 2, "stdin .-. can be read once only"),
        (
            ("chat.jsonl", "--policy", "lru,mru"),
            2,
            f"--policy must be all or among .*{POLICIES[-1]}, got 'mru'",
        ),
        (("chat.jsonl", "--policy", ","), 2, "--policy names none: use all or some of rvi, "),
        (("chat.jsonl", "--capacity-blocks", "10,many"), 2, "--capacity-blocks must be whole .* got 'many'"),
        (
            ("chat.jsonl", "--capacity-blocks", "0"),
            2,
            "--capacity-blocks must be whole numbers from 1.* got '0'",
        ),
        (("chat.jsonl", "--capacity-blocks", "-5"), 2, "--capacity-blocks .* got '-5'"),
        (("chat.jsonl", "--tiers", "L1=5,L9=3"), 2, "--tiers must be like L1=300,.* got 'L9=3'"),
        (("chat.jsonl", "--tiers", "L1=5,L1=3"), 2, "--tiers must be like .* got 'L1=3'"),
        (("chat.jsonl", "--tiers", "L1=x"), 2, "--tiers must be like .* got 'L1=x'"),
        (("chat.jsonl", "--tiers", "L1=1.5"), 2, "--tiers must be whole numbers of blocks, got L1=1.5"),
        (("chat.jsonl", "--tiers", "L3=10"), 2, "--tiers needs an L1 and an L3"),
        (("chat.jsonl", "--tiers", "L1=3,L3=1"), 2, "--tiers needs an L1 and an L3, of at least 2"),
        (("chat.jsonl", "--tiers", "L1=5", "--capacity-blocks", "5"), 2, "two ways to say it: give one"),
        (("chat.jsonl", "--tiers", "L1=5,L3=5", "--policy", "arc"), 2, "--policy with --tiers, .* got 'arc'"),
        (("chat.jsonl", "--workers", "2"), 2, "--workers 2 needs --tiers"),
        (("chat.jsonl", "--load-ms", "L1=-1"), 2, "--load-ms must be like .* from 0, got 'L1=-1'"),
        (("chat.jsonl", "--load-ms", "L1=1,L3=2"), 2, "--load-ms L3 needs --tiers"),
        (("chat.jsonl", "--recompute-ms", "1e-300"), 2, "--recompute-ms must be at least 1e-6"),
        (("chat.jsonl", "--recompute-ms", "0"), 2, "--recompute-ms must be at least 1e-6.* got 0"),
        (("chat.jsonl", "--exponent", "2"), 2, "exponent"),
        (("chat.jsonl", "--plot", "q.jpg"), 2, "--plot writes a .png file, got q.jpg"),
        (("chat.jsonl", "--plot", "folder.png"), 2, "--plot folder.png: this is a folder"),
        (("own.jsonl",), 1, "own.jsonl line 1: no header with `block` comes before it: give --block-tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_line_that_names_it(
    run: Any, trace: Path, tmp_path: Path, lines: list[str], options: tuple[str, ...], code: int, named: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.txt").write_text("Alice was beginning to get very tired\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-200])
    (tmp_path / "own.jsonl").write_text(our_lines(lines)[1])
    (tmp_path / "folder.png").mkdir()

    got, out, err = run(*options)

    last = err.splitlines()[-1]
    assert (got, out) == (code, ""), last
    assert last.startswith("kvtier: ")
    assert re.search(named, last), last


# ---- processes -------------------------------------------------------------------------------------------------------


def test_processes_find_what_one_finds_in_the_order_asked_for(trace: Path) -> None:
    loaded = load_trace([str(trace)])
    setups = [Setup(policy, size) for policy in ("belady", "rvi", "lru") for size in (200, 50)]
    heard: list[tuple[int, int]] = []

    here = run_jobs(loaded, setups, lambda *_: None, processes=1)
    there = run_jobs(loaded, setups, lambda done, total: heard.append((done, total)), processes=2)

    assert there == here
    assert [(result.policy, result.capacity_pages) for result in here] == [
        (setup.policy, setup.capacity_pages) for setup in setups
    ]
    assert heard[-1] == (6 * loaded.references, 6 * loaded.references)
    assert not psutil.Process().children() or all(
        "resource_tracker" in " ".join(child.cmdline()) for child in psutil.Process().children()
    )


def test_a_process_that_dies_is_an_error_and_not_a_wait(trace: Path) -> None:
    loaded = load_trace([str(trace)])

    def kill(done: int, total: int) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()

    with pytest.raises(ReplayFailed, match="exit code -9"):
        run_jobs(loaded, 50 * [Setup("belady", 100)], kill, processes=2)


def test_what_fails_in_a_process_is_told(trace: Path) -> None:
    loaded = load_trace([str(trace)])

    with pytest.raises(RuntimeError, match="(?s)a replay failed:.*ValueError: .* at least"):
        run_jobs(loaded, 2 * [Setup("lru", 0)], lambda *_: None, processes=2)


def test_ctrl_c_ends_the_command_and_its_processes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join(mooncake_lines(15_000)))
    command = [sys.executable, "-m", "kvtier", "replay", str(file), "--policy", "all"]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert started.stderr is not None
    for line in started.stderr:
        if "replaying" in line:
            break
    processes = psutil.Process(started.pid).children(recursive=True)

    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=300)

    assert (started.returncode, out, err) == (130, "", "")
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_the_live_policies_are_the_services_own() -> None:
    assert LIVE[0] == "rvi"
    assert set(LIVE) <= set(POLICIES)
