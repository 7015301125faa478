"""bench/routing.py and its like run, on a small trace, and what they print adds up."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = 512


def run(script: str, folder: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """What a benchmark wrote to its JSON file."""
    out = folder / "out.json"
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / script, "--json", out, *options],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def conversations(folder: Path, count: int, turns: int) -> None:
    """Conversations that begin with page 0, a second apart, whose turns are 20 s apart and two pages longer each."""
    rows = []
    for talk in range(count):
        for turn in range(turns):
            own = 2 * (turn + 1)
            tokens = (1 + own) * PAGE + 7
            ids = [0, 1, 1000 * (talk + 1), own + 1]  # the last page is a partial one
            rows.append({"t": talk + 20.0 * turn, "s": -1, "i": tokens, "o": 20, "h": ids})
    rows.sort(key=lambda row: row["t"])
    with gzip.open(folder / "mooncake_conversation.jsonl.gz", "wt") as file:
        header = {"trace": "mooncake_conversation", "block": PAGE, "requests": len(rows)}
        file.writelines(json.dumps(row) + "\n" for row in (header, *rows))


def test_all_routings_play_the_same_requests_and_find_their_pages_somewhere(tmp_path: Path) -> None:
    conversations(tmp_path, count=6, turns=4)

    written = run(
        "routing.py", tmp_path, "--traces", str(tmp_path), "--workers", "1,3", "--fixed", "2",
        "--requests", "24", "--per-worker", "1", "--load", "0.3", "--slack", "9",
    )  # fmt: skip

    equal, one_rate = written["tables"]["equal load"], written["tables"]["one rate"]
    assert [row["workers"] for row in equal] == [1, 1, 1, 3, 3, 3] and len(one_rate) == 3
    for row in (*equal, *one_rate):
        assert row["requests"] == 18, "all of 24, the first quarter aside"
        assert abs(sum(row["by_tier"].values()) - row["hit_rate"]) < 1e-9
        assert 0 < row["p50_s"] <= row["p90_s"] <= row["worst_p90_s"]
    found = {(row["workers"], row["routing"]): row["hit_rate"] for row in equal}
    # Of turns 2 to 4 all but the latest two pages have been seen: 3 of 5, 5 of 7, 7 of 9.
    assert found[1, "prefix"] == found[3, "prefix"] == (3 + 5 + 7) / (5 + 7 + 9)


def test_conversations_are_sampled_whole(tmp_path: Path) -> None:
    conversations(tmp_path, count=40, turns=3)

    written = run(
        "routing.py", tmp_path, "--traces", str(tmp_path), "--workers", "1", "--fixed", "",
        "--requests", "40", "--per-worker", "1", "--routings", "prefix",
    )  # fmt: skip

    (row,) = written["tables"]["equal load"]
    played = row["requests"] * 4 // 3
    assert 12 <= played <= 90 and played % 3 == 0


def test_the_cost_of_many_workers_is_measured(tmp_path: Path) -> None:
    written = run(
        "scale.py", tmp_path, "--workers", "16", "--rate", "100", "--seconds", "0.4", "--entries", "1000"
    )

    parts = {part["name"]: part for part in written["parts"]}
    assert parts["choose"]["calls"] == parts["lookup"]["calls"] == 1.0
    assert parts["coordinator"]["processes"] == 2
    assert all(part["us"] > 0 for part in parts.values())


def test_a_gateway_s_cost_is_measured_over_grpc(tmp_path: Path) -> None:
    written = run(
        "scale_gateway.py", tmp_path, "--workers", "3", "--requests", "8", "--tokens", "5", "--prompt", "70"
    )

    assert written["request with its first token, ms of CPU"] > 0
