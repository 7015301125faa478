#!/usr/bin/env python3
"""Decode and cold prefill through the whole service (gRPC, Ray, paged cache on) against peers, in one run.

  bench/decode.py --model FOLDER [--vllm VENV/bin/python] [--rounds 5] [--json FILE]

Rounds alternate the engines, so that a noisy machine disturbs all of them alike; the ratios are of medians.
bench/setup-vllm.sh makes the vLLM environment; without --vllm only transformers is the baseline.
Goals: at least 1.0x vLLM's CPU build at batch 1, at batch 8 and in cold prefill; 6x and 10x transformers' decode.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from peer_line import prompt_ids
from service import Peer, Service, running, vllm_preload

GOALS = {"vllm": (1.0, 1.0, 1.0), "transformers": (6.0, 10.0, 1.0)}  # decode b1, decode b8, cold prefill
ROWS = ("decode b1, tokens/s", "decode b8, tokens/s", "cold prefill, tokens/s")


def ours(service: Service, a: argparse.Namespace, fresh: random.Random) -> tuple[float, float, float]:
    """One round of the service."""
    seconds, usage = service.first_token_s(prompt_ids(fresh.randrange(2**40), a.prompt))
    assert usage["computed_tokens"] == a.prompt, usage
    return (
        service.decode_tokens_per_s(1, a.context, a.new, fresh),
        service.decode_tokens_per_s(8, a.context, a.new, fresh),
        a.prompt / seconds,
    )


def theirs(peer: Peer, a: argparse.Namespace, fresh: random.Random) -> tuple[float, float, float]:
    """One round of a peer."""
    return (
        peer.ask(op="decode", batch=1, context=a.context, new=a.new)["tokens_per_s"],
        peer.ask(op="decode", batch=8, context=a.context, new=a.new)["tokens_per_s"],
        a.prompt / peer.ask(op="ttft", prompt_tokens=a.prompt, seed=fresh.randrange(2**40))["seconds"],
    )


def main() -> None:
    """Measure, print the table, exit 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder (kvtier model ls names the demo model's)"
    )
    parser.add_argument("--vllm", default="", help="python of an environment made by bench/setup-vllm.sh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=1755, help="tokens of the cold prefill")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="", help="write the figures to this file")
    a = parser.parse_args()
    fresh = random.Random(time.time_ns())
    peers = {"transformers": Peer(sys.executable, "transformers", a.model)}
    if a.vllm:
        peers["vllm"] = Peer(a.vllm, "vllm", a.model, vllm_preload(a.vllm))
    figures: dict[str, list[tuple[float, float, float]]] = {"kvtier": [], **{name: [] for name in peers}}
    with running(f"model.path={Path(a.model).resolve()}", f"worker.threads={a.threads}") as service:
        ours(service, a, fresh)
        for number in range(a.rounds):
            figures["kvtier"].append(ours(service, a, fresh))
            for name, peer in peers.items():
                if name != "transformers" or number < 2:  # slow and steady: two rounds tell
                    figures[name].append(theirs(peer, a, fresh))
            print(f"round {number + 1} of {a.rounds}", file=sys.stderr)
    for peer in peers.values():
        peer.close()
    medians = {
        name: [statistics.median(r[i] for r in rounds) for i in range(3)] for name, rounds in figures.items()
    }
    print(f"{'':<24}" + "".join(f"{name:>14}" for name in medians) + "   ratio (goal)")
    ratios: dict[str, float] = {}
    missed = False
    for i, row in enumerate(ROWS):
        line = f"{row:<24}" + "".join(f"{values[i]:>14.1f}" for values in medians.values())
        for name in peers:
            ratio, goal = medians["kvtier"][i] / medians[name][i], GOALS[name][i]
            ratios[f"{row} / {name}"] = ratio
            missed |= ratio < goal
            line += f"   {ratio:.2f}x {name} ({goal:g}x {'ok' if ratio >= goal else 'BELOW'})"
        print(line)
    if a.json:
        Path(a.json).write_text(
            json.dumps({"medians": medians, "rounds": figures, "ratios": ratios}, indent=1)
        )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
