"""bench/workloads.py makes traces that can be replayed out of public ones, and bench/figures.py a report of them."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.lab.traces.files import load_trace
from kvtier.lab.traces.trace import Source, Trace, read_trace
from kvtier.tier.policy.base import Kind

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "workloads.py"
REPORT = ROOT / "docs" / "eviction.md"


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """One public trace of the folder."""
    with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ({"trace": name}, *rows))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Few requests of each kind."""
    chat = [{"t": at, "s": -1, "i": 1024, "o": 5, "h": [0, 1, 100 + at, 1]} for at in range(5)]
    write(tmp_path, "mooncake_conversation", chat)
    write(tmp_path, "mooncake_synthetic", chat[:3])
    sessions = [
        {
            "t": 60.0 * turn,
            "s": session,
            "i": 2048,
            "o": 9,
            "h": [1, 32 + 8 * turn],
            "m": "big",
            "tt": 16 * 64,
        }
        for session in range(3)
        for turn in range(3)
    ]
    for row in sessions:
        row["f"] = "end_turn" if row["t"] == 120 else "tool_use"
    write(tmp_path, "claude_code", [*sessions, {**sessions[0], "m": "small", "tt": 0, "s": 1}])
    agents = [
        {"t": 7.0 + turn, "s": s, "i": 300, "o": 1, "h": [1000 * s, 17]}
        for s in range(4)
        for turn in range(2)
    ]
    write(tmp_path, "lmcache_agents", [*agents, {"t": 9.0, "s": 0, "i": 30, "o": 1, "h": [5000, 3]}])
    return tmp_path


def made(folder: Path, name: str, seed: int = 0) -> Trace:
    """A workload, read back."""
    out = folder / f"{name}.{seed}.gz"
    command = [sys.executable, SCRIPT, name, "--seed", str(seed), "--traces", folder, "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    return load_trace([str(out)])


def chains(trace: Trace) -> list[list[int]]:
    """Page ids of all requests."""
    return [trace.pages(request).tolist() for request in range(len(trace))]


def test_chat_is_taken_as_it_is(sources: Path) -> None:
    conv = made(sources, "conv")

    assert conv.page_tokens == 512
    assert chains(conv) == [[0, 1 + at] for at in range(5)]
    assert len(made(sources, "synth")) == 3


def test_sessions_keep_their_gaps_and_share_tool_definitions_only(sources: Path) -> None:
    cc = made(sources, "cc")

    firsts = {tuple(chain[:2]) for chain in chains(cc)}
    assert len(firsts) == 2  # those of the big model, in all its sessions, and of the small one
    by_session: dict[int, list[int]] = {}
    for at in range(len(cc)):
        by_session.setdefault(int(cc.session[at]), []).append(at)
    own = [set(np.concatenate([cc.pages(at)[2:] for at in ats]).tolist()) for ats in by_session.values()]
    assert len(own) == 3
    assert sum(map(len, own)) == len(set.union(*own))
    gaps = [np.diff(cc.arrival_s[ats]).round(3).tolist() for ats in by_session.values()]
    assert sorted(map(len, gaps)) == [2, 2, 3]
    assert {gap for session in gaps for gap in session} <= {0.0, 60.0}
    assert set(cc.kind.tolist()) == {Kind.TOOL, Kind.TURN}
    assert not made(sources, "cc_nohint").kind.any()


def test_what_begins_after_the_hours_is_cut_off(sources: Path) -> None:
    mix = made(sources, "mix")

    assert mix.arrival_s.max() < 3600
    assert len(mix) <= 15


def test_agents_begin_one_after_the_other_in_blocks_of_128(sources: Path) -> None:
    agents = made(sources, "agents")

    assert agents.page_tokens == 128
    assert len(agents) == 8  # one prompt was shorter than a block
    assert set(agents.page_counts().tolist()) == {2}
    assert agents.distinct_pages == 8


def test_a_seed_gives_the_same_always_and_another_seed_something_else(sources: Path) -> None:
    one, again, other = (made(sources, "cc", seed) for seed in (1, 1, 2))

    assert one.arrival_s.tolist() == again.arrival_s.tolist()
    assert one.arrival_s.tolist() != other.arrival_s.tolist()


def test_a_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "conv", "--traces", tmp_path]

    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 1
    assert "mooncake_conversation.jsonl.gz is missing: --traces (or KVTIER_TRACES) must be" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- the report ------------------------------------------------------------------------------------------------------


def figures(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run bench/figures.py on the folder's traces, in it."""
    command = [sys.executable, ROOT / "bench" / "figures.py", "--traces", folder, "--work", folder, *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)


def test_figures_fill_every_table_keep_the_prose_and_replay_nothing_twice(sources: Path) -> None:
    shutil.copy(REPORT, sources)

    first = figures(sources, "--report", REPORT.name)

    assert first.returncode == 1, first.stderr  # so few requests reach no goal
    assert "goals reached" in first.stdout.splitlines()[-1]
    text = (sources / REPORT.name).read_text()
    marks = re.findall(r"<!-- begin (.*) -->", text)
    assert marks == re.findall(r"<!-- end (.*) -->", text) and len(marks) == len(set(marks)) == 13
    for mark in marks:
        table = text.split(f"<!-- begin {mark} -->")[1].split(f"<!-- end {mark} -->")[0].strip().splitlines()
        assert len(table) > 3 and table[1].startswith("| --- | "), mark
    plots = re.findall(r"\]\((eviction/\w+\.png)\)", text)
    assert len(plots) == 5
    assert all((sources / plot).read_bytes().startswith(b"\x89PNG") for plot in plots)

    again = figures(sources, "--report", REPORT.name)
    assert "us/page" in first.stdout and "us/page" not in again.stdout
    assert (sources / REPORT.name).read_text() == text
    prose = [part.split("-->")[-1] for part in text.split("<!-- begin ")]
    assert prose == [part.split("-->")[-1] for part in REPORT.read_text().split("<!-- begin ")]


def test_chats_that_go_on_are_found_to_be_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from figures import with_sessions

    chains = [[1, 2], [1, 3], [1, 2, 4], [1, 9], [1, 3, 5, 6], [1, 2, 4, 7]]
    rows = [
        {"t": at, "i": 16 * len(chain), "h": [x for page in chain for x in (page, 1)]}
        for at, chain in enumerate(chains)
    ]
    trace = read_trace([Source("test", [json.dumps(row).encode() for row in ({"block": 16}, *rows)])])

    session = with_sessions(trace).session.tolist()

    assert session == [1, 2, 1, 4, 2, 1]
