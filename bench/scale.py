#!/usr/bin/env python3
"""A thousand workers, simulated: CPU time of each process's part per request, and what each could take.

  bench/scale.py [--workers 1000] [--rate 2000] [--seconds 3] [--entries 1000000] [--json FILE]

Conversations begin at random; each turn is the one before, 1 to 3 pages of 512 tokens longer, after a second's pause; the
first two pages are one of 20 system prompts. src/kvtier/lab/simulation/cluster.py plays them on 125 nodes of eight workers with real
routing, directory and coordinators, whose CPU time is taken around each call. Keys are computed beside, of real token
ids. The directory is filled with --entries pages of others first. Pages are
of 512 tokens here; with the 64 of cluster/h200.yaml there are eight times as many keys.

What one process could take is 1 / (CPU seconds of a request): a bound, since nothing is left for anything else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from common import argument_parser, machine
from routing_cases import result_of

from kvtier.cluster.directory.core import DirectoryCore
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.routing.fleet import Fleet
from kvtier.cluster.routing.router import Choice, Costs, Policy, choose
from kvtier.lab.simulation.cluster import Shape, SimRequest, Simulation
from kvtier.lab.simulation.parts import PAGE_TOKENS
from kvtier.tier.pages.identity import page_keys, root_key, tenant_salt
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.events import Command, Event
from kvtier.tier.protocol.kv_events import MAX_KEYS, Batch, Change, Reply, Source

SYSTEMS, SYSTEM_PAGES = 20, 2
TURNS, FIRST_PAGES, TURN_PAGES = 4, (2, 12), (1, 4)  # of a conversation, at most; half-open ranges
OUTPUT_TOKENS = 100
OTHERS = 64  # sources of the pages that fill the directory
T = TypeVar("T")


@dataclass
class Meter:
    """CPU seconds by what they were spent on, and calls."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)

    def timed(self, name: str, call: Callable[[], T], keys: int = 0) -> T:
        """Call, and count."""
        begin = time.process_time()
        result = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        self.calls[name] = self.calls.get(name, 0) + 1
        self.keys[name] = self.keys.get(name, 0) + keys
        return result


class TimedDirectory:
    """A DirectoryCore behind a meter."""

    def __init__(self, core: DirectoryCore, meter: Meter) -> None:
        self._core, self._meter = core, meter

    def publish(self, batch: Batch, now: float) -> Reply:
        """As the core's."""
        keys = sum(len(change.came) + len(change.left) for change in batch.changes) // 8
        return self._meter.timed(
            "publish" if keys else "heartbeat", lambda: self._core.publish(batch, now), keys
        )

    def lookup(self, keys: bytes, now: float) -> list[Held]:
        """As the core's."""
        return self._meter.timed("lookup", lambda: self._core.lookup(keys, now), len(keys) // 8)


class TimedCoordinator:
    """A Coordinator behind a meter."""

    def __init__(self, inner: Any, meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the coordinator's."""
        commands: list[Command] = self._meter.timed("coordinator", lambda: self._inner.handle(event, now))
        return commands


def conversations(rate: float, seconds: float, seed: int) -> list[SimRequest]:
    """Requests in the order of their arrivals, turns behind the turn before."""
    rng = np.random.default_rng(seed)
    requests: list[SimRequest] = []
    fresh, mean_turns = SYSTEMS * SYSTEM_PAGES, (1 + TURNS) / 2
    for _ in range(int(rate * seconds / mean_turns)):
        system = int(rng.integers(SYSTEMS)) * SYSTEM_PAGES
        pages = tuple(range(system, system + SYSTEM_PAGES))
        begin, parent = float(rng.uniform(0, seconds)), None
        for turn in range(int(rng.integers(1, TURNS + 1))):
            more = int(rng.integers(*(TURN_PAGES if turn else FIRST_PAGES)))
            pages, fresh = (*pages, *range(fresh, fresh + more)), fresh + more
            tokens = len(pages) * PAGE_TOKENS + int(rng.integers(1, PAGE_TOKENS))
            requests.append(SimRequest(begin, pages, tokens, OUTPUT_TOKENS, parent))
            parent = len(requests) - 1
    return requests


def filled(entries: int) -> DirectoryCore:
    """A directory that has heard of so many pages of others, the same for each two of them."""
    core, rng = DirectoryCore(max_sources=1 << 14), np.random.default_rng(1)
    each = entries * 2 // OTHERS
    for number in range(0, OTHERS, 2):
        data = rng.integers(1, 2**64 - 1, each, np.uint64)
        for twin in (number, number + 1):
            source = Source(f"other:{twin}", "1", f"other{twin}", "", "o:1")
            parts = [data[at : at + MAX_KEYS].tobytes() for at in range(0, each, MAX_KEYS)] or [b""]
            for place, part in enumerate(parts):
                change = Change(TierName.HOST, part, b"")
                core.publish(Batch(source, place, (change,), place == 0, place == len(parts) - 1), 0.0)
    return core


def key_ms(page_tokens: int, tokens: int) -> float:
    """CPU milliseconds to compute the keys of a prompt."""
    ids = np.random.default_rng(0).integers(0, 32000, tokens, np.int32)
    root, salt = root_key({"model": "none"}), tenant_salt("default")
    samples = []
    for _ in range(15):
        begin = time.process_time()
        page_keys(root, salt, ids, page_tokens)
        samples.append(time.process_time() - begin)
    return 1e3 * sorted(samples)[len(samples) // 2]


@dataclass(frozen=True, slots=True)
class Part:
    """What one process does, on average for a request of the whole cluster."""

    name: str
    calls: float
    us_per_call: float
    us: float
    keys: float
    processes: int  # that share it

    @property
    def requests_s(self) -> float:
        """Of the whole cluster, that the process or processes could take."""
        return 1e6 * self.processes / self.us if self.us else float("inf")


def simulated(args: argparse.Namespace, meter: Meter) -> tuple[Simulation, int]:
    """Play the conversations, with meters around what is real; how many requests there were."""
    requests = conversations(args.rate, args.seconds, seed=0)
    policy = PolicySettings(name=args.policy)
    shape = Shape(args.workers, l1_pages=400, l3_pages=500, l4_pages=3000, policy=policy)

    def timed_choose(
        tokens: int,
        page_tokens: int,
        fleet: Fleet,
        held: Iterable[Held],
        costs: Costs,
        policy: Policy,
    ) -> Choice:
        return meter.timed("choose", lambda: choose(tokens, page_tokens, fleet, held, costs, policy))

    directory = TimedDirectory(filled(args.entries), meter)
    simulation = Simulation(shape, requests, "prefix", directory=directory, chooser=timed_choose)
    for node in simulation.nodes.values():
        node.coordinator = TimedCoordinator(node.coordinator, meter)  # type: ignore[assignment]
    simulation.run()
    return simulation, len(requests)


def parts_of(meter: Meter, requests: int, nodes: int) -> list[Part]:
    """By process: the gateway chooses, the directory hears and answers, each node's cache decides."""
    found = []
    for name, processes in (
        ("choose", 1),
        ("lookup", 1),
        ("publish", 1),
        ("heartbeat", 1),
        ("coordinator", nodes),
    ):
        seconds, calls = meter.seconds.get(name, 0.0), meter.calls.get(name, 0)
        us_per_call = 1e6 * seconds / max(1, calls)
        keys = meter.keys.get(name, 0) / requests
        found.append(Part(name, calls / requests, us_per_call, 1e6 * seconds / requests, keys, processes))
    return found


def main() -> None:
    """Play, measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="default: %(default)s")
    parser.add_argument(
        "--rate", type=float, default=2000.0, help="requests a virtual second (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="virtual ones (default: %(default)s)")
    parser.add_argument(
        "--entries", type=int, default=1_000_000, help="pages known before (default: %(default)s)"
    )
    parser.add_argument("--policy", default="rvi", help="of eviction (default: %(default)s)")
    args = parser.parse_args()
    meter = Meter()
    print(machine(), flush=True)
    simulation, requests = simulated(args, meter)
    result = result_of(simulation, "prefix", 0.0)
    parts = parts_of(meter, requests, len(simulation.nodes))
    print(
        f"\n{args.workers} workers, {len(simulation.nodes)} nodes, {requests} requests, {result.rate:.0f}/s"
    )
    shares = ", ".join(f"{tier} {100 * share:.1f}%" for tier, share in sorted(result.by_tier.items()))
    print(f"pages found {100 * result.hit_rate:.1f}% ({shares}); first token p50 {result.p50_s:.2f} s, "
          f"p90 {result.p90_s:.2f} s; busiest worker {result.imbalance:.2f} of the mean")  # fmt: skip
    print(
        f"\n{'':<14}{'calls/request':>14}{'keys/request':>14}{'us/call':>10}{'us/request':>12}{'processes':>11}{'requests/s':>12}"
    )
    for part in parts:
        print(
            f"{part.name:<14}{part.calls:>14.2f}{part.keys:>14.1f}{part.us_per_call:>10.0f}{part.us:>12.0f}{part.processes:>11}{part.requests_s:>12,.0f}"
        )
    keys = {
        f"{tokens} tokens, pages of {size}": key_ms(size, tokens)
        for size in (16, 64)
        for tokens in (3072, 131072)
    }
    print("\nkeys of a prompt, ms of CPU: " + "; ".join(f"{name} {ms:.2f}" for name, ms in keys.items()))
    if args.json:
        rows = [{**asdict(part), "requests_s": part.requests_s} for part in parts]
        content = {"machine": machine(), "play": result.to_json(), "parts": rows, "keys_ms": keys}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
