#!/usr/bin/env python3
"""Makes the workloads that eviction is judged on, from public traces, as files that `kvtier replay` reads.

  bench/workloads.py NAME [--seed N] [--traces FOLDER] [--out FILE.jsonl.gz]

conv      Mooncake's conversations: an hour of a real chat service, 512-token blocks
synth     Mooncake's synthetic trace: 17 minutes, built by its authors of public data sets
agents    sessions of three kinds of agents, begun at random at 0.02 a second, in blocks of 128 tokens
cc        Claude Code sessions with their real times inside; they begin at random within 24 hours (cc_dense: 8)
cc_nohint the same, without why answers ended
mix       conv, and Claude Code sessions that all begin within its hour

--traces (or KVTIER_TRACES; else a folder `traces` here or beside the repository) has the public traces in kvtier's own
form, gzip'd, under these names:

mooncake_conversation, mooncake_synthetic  github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0
claude_code                                github.com/callanjfox/kv-cache-tester, traces, Apache-2.0
lmcache_agents                             github.com/LMCache/lmcache-agent-trace, Apache-2.0

A line of claude_code needs `s` (session), `t` (seconds in it), `i`, `o`, `h` (64-token ids that are the session's own), `m`
(model), `tt` (tokens of tool definitions) and `f` (why the answer ended); of lmcache_agents `s`, `t`, `i`, `o`, `h` (16-token ids).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

ROOT = Path(__file__).resolve().parents[1]
SMALL_BLOCKS = 8  # blocks of a source that make one of a workload
OWN_IDS = 1 << 22  # apart lie the ids of a session and the next
TOOL_IDS = 4096  # and those of two sets of tool definitions, which are below 0
CONV_IDS = 1 << 50  # above all others
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One request, with raw block ids."""

    arrival_s: float
    session: int
    ids: Ids
    input_tokens: int
    output_tokens: int
    stop: str | None = None


class Sources:
    """The public traces of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def requests(self, name: str) -> list[dict[str, Any]]:
        """All requests of one. Raises SystemExit with a sentence where the file is missing."""
        file = self._folder / f"{name}.jsonl.gz"
        if not file.is_file():
            raise SystemExit(
                f"{file} is missing: --traces (or KVTIER_TRACES) must be the folder of the traces"
            )
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            next(lines)  # the header
            return [json.loads(line) for line in lines]


def chat(sources: Sources, name: str) -> list[Row]:
    """A trace of Mooncake's as it is."""
    return [Row(line["t"], -1, ids_of(line["h"]), line["i"], line["o"]) for line in sources.requests(name)]


def agents(sources: Sources, seed: int) -> list[Row]:
    """Sessions in random order, each begun an exponential wait after the one before."""
    sessions: dict[int, list[dict[str, Any]]] = {}
    for line in sources.requests("lmcache_agents"):
        sessions.setdefault(line["s"], []).append(line)
    rng = np.random.default_rng(seed)
    rows, begin = [], 0.0
    for session in rng.permutation(sorted(sessions)):
        begin += rng.exponential(1 / 0.02)
        lines = sessions[session]
        first = min(line["t"] for line in lines)
        for line in lines:
            ids = whole_blocks(ids_of(line["h"]))
            rows.append(Row(begin + line["t"] - first, int(session), ids, line["i"], line["o"]))
    return [row for row in rows if len(row.ids)]


def claude_code(sources: Sources, seed: int, hours: float, hints: bool = True) -> list[Row]:
    """Sessions that begin at times drawn evenly from the hours, cut off at their end.

    Ids are a session's own, by model; tool definitions, which come first in a prompt, are shared by all prompts of the
    same model with as many tokens of them.
    """
    lines = sources.requests("claude_code")
    begins = np.random.default_rng(seed).uniform(0, hours * HOUR_S, 1 + max(line["s"] for line in lines))
    spaces: dict[tuple[int, str], int] = {}
    tools: dict[tuple[str, int], int] = {}
    rows = []
    for line in lines:
        ids = ids_of(line["h"])
        ids += OWN_IDS * spaces.setdefault((line["s"], line["m"]), len(spaces) + 1)
        if line["tt"]:
            shared = min(line["tt"] // 64, len(ids))
            ids[:shared] = np.arange(shared)
            ids[:shared] -= TOOL_IDS * (tools.setdefault((line["m"], line["tt"]), len(tools)) + 1)
        arrival_s = float(begins[line["s"]] + line["t"])
        stop = line["f"] if hints else None
        rows.append(Row(arrival_s, line["s"], whole_blocks(ids), line["i"], line["o"], stop))
    return [row for row in rows if len(row.ids) and row.arrival_s < hours * HOUR_S]


def mix(sources: Sources, seed: int) -> list[Row]:
    """Both at once, for an hour."""
    talk = [
        Row(row.arrival_s, -1, row.ids + CONV_IDS, row.input_tokens, row.output_tokens)
        for row in chat(sources, "mooncake_conversation")
    ]
    return talk + claude_code(sources, seed, 1.0)


MAKERS: dict[str, tuple[int, Callable[[Sources, int], list[Row]]]] = {  # tokens a block, and the rows
    "conv": (512, lambda sources, seed: chat(sources, "mooncake_conversation")),
    "synth": (512, lambda sources, seed: chat(sources, "mooncake_synthetic")),
    "agents": (128, agents),
    "cc": (512, lambda sources, seed: claude_code(sources, seed, 24.0)),
    "cc_nohint": (512, lambda sources, seed: claude_code(sources, seed, 24.0, hints=False)),
    "cc_dense": (512, lambda sources, seed: claude_code(sources, seed, 8.0)),
    "mix": (512, mix),
}


def ids_of(runs: list[int]) -> Ids:
    """[first, count, first, count, ...] as ids."""
    spans = [np.arange(first, first + count) for first, count in zip(runs[::2], runs[1::2], strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *spans])


def whole_blocks(ids: Ids) -> Ids:
    """Of small chained blocks the last of every eight: it stands for all before it. A partial rest is left out."""
    return ids[SMALL_BLOCKS - 1 :: SMALL_BLOCKS]


def dense(rows: list[Row]) -> list[Ids]:
    """The rows' ids numbered in order of first appearance, so that new ones of a prompt are one run."""
    flat = np.concatenate([row.ids for row in rows])
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.split(number[inverse], np.cumsum([len(row.ids) for row in rows])[:-1])


def runs_of(ids: Ids) -> list[int]:
    """Ids as [first, count, ...]."""
    heads = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = np.diff(np.append(heads, len(ids)))
    return np.stack((ids[heads], counts), 1).ravel().tolist()


def lines_of(name: str, seed: int, sources: Sources) -> Iterator[str]:
    """A workload's lines, its header first."""
    block, maker = MAKERS[name]
    rows = sorted(maker(sources, seed), key=lambda row: row.arrival_s)
    yield json.dumps({"trace": name, "seed": seed, "block": block, "requests": len(rows)})
    for row, ids in zip(rows, dense(rows), strict=True):
        told = {"f": row.stop} if row.stop else {}
        line = {
            "t": round(row.arrival_s, 3),
            "s": row.session,
            "i": row.input_tokens,
            "o": row.output_tokens,
            "h": runs_of(ids),
        }
        yield json.dumps({**line, **told}, separators=(",", ":"))


def make(name: str, seed: int, traces: Path, out: Path) -> None:
    """Write a workload. It is put in place when it is whole."""
    part = out.with_name(out.name + ".part")
    with gzip.open(part, "wt", compresslevel=6, encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines_of(name, seed, Sources(traces)))
    part.replace(out)


def traces_option(parser: argparse.ArgumentParser) -> None:
    """Add --traces."""
    named = os.environ.get("KVTIER_TRACES")
    places = [ROOT / "traces", ROOT.parent / "traces", ROOT.parent / "shared" / "traces"]
    found = next((place for place in places if place.is_dir()), places[0])
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path(named) if named else found,
        help="folder of the public traces (default: KVTIER_TRACES, or %(default)s)",
    )


def main() -> None:
    """Write one workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MAKERS)
    parser.add_argument("--seed", type=int, default=0)
    traces_option(parser)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(f"{options.name}.{options.seed}.jsonl.gz")
    make(options.name, options.seed, options.traces, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
