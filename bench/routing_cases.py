"""What the routing benchmarks play on a simulated cluster, and what they say of a play."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from kvtier.cluster.routing.router import Policy
from kvtier.lab.simulation.cluster import Job, Shape, SimRequest, Simulation
from kvtier.lab.simulation.parts import PAGE_TOKENS
from kvtier.lab.traces.files import load_trace
from kvtier.lab.traces.trace import Trace

TRACE = "mooncake_conversation.jsonl.gz"
WARM_UP = 4  # one in so many requests, the first ones, doesn't count: caches begin empty
EASY = 10.0  # times that the trace's time may be compressed before people must read faster too


def read(folder: Path) -> Trace:
    """The public trace. Raises SystemExit with a sentence where it is missing."""
    file = folder / TRACE
    if not file.is_file():
        raise SystemExit(f"{file} is missing: --traces (or KVTIER_TRACES) must be the folder of the traces")
    trace = load_trace([str(file)])
    assert trace.page_tokens == PAGE_TOKENS
    return trace


def requests_of(trace: Trace, most: int, seed: int = 0) -> list[SimRequest]:
    """About `most` requests, at the trace's own times: one in so many conversations, each whole.

    A conversation is what shares its second page (the first one is all tenants' system prompt). A request continues the
    latest one that had the last page of the longest prefix it shares with any.
    """
    every = max(1, round(len(trace) / most))
    chosen: list[SimRequest] = []
    last_with: dict[int, int] = {}
    for number in range(len(trace)):
        input_tokens = int(trace.input_tokens[number])
        pages = tuple(trace.pages(number)[: input_tokens // PAGE_TOKENS].tolist())
        first = pages[1] if len(pages) > 1 else -number
        if crc32(f"{seed} {first}".encode()) % every:
            continue
        parent = None
        for page in pages[1:]:
            if page not in last_with:
                break
            parent = last_with[page]
        last_with.update(dict.fromkeys(pages, len(chosen)))
        arrival_s, output_tokens = float(trace.arrival_s[number]), int(trace.output_tokens[number])
        chosen.append(SimRequest(arrival_s, pages, input_tokens, output_tokens, parent))
    return chosen


def cold_s(requests: Sequence[SimRequest], shape: Shape) -> float:
    """Seconds of one worker that computing all prompts takes, without any cache."""
    pages = (request.input_tokens / PAGE_TOKENS for request in requests)
    return sum(count * shape.costs.recompute_s(count / 2) for count in pages)


def at_load(requests: Sequence[SimRequest], shape: Shape, load: float) -> tuple[list[SimRequest], Shape]:
    """The same at other times: computing all prompts would keep each worker busy for that share of the time.

    What people do is scaled alike where time is compressed more than EASY times: they read, and are given, answers
    faster, at the same cost to the worker. Else the last turns would come long after the others.
    """
    compressed = requests[-1].arrival_s * shape.workers * load / cold_s(requests, shape)
    scaled = [replace(request, arrival_s=request.arrival_s / compressed) for request in requests]
    easy = min(1.0, EASY / compressed)
    return scaled, replace(shape, token_s=shape.token_s * easy, think_s=shape.think_s * easy)


@dataclass(frozen=True, slots=True)
class Result:
    """One play. Shares of pages by the tier they were found in; seconds to the first token."""

    workers: int
    routing: str
    requests: int
    rate: float  # requests a virtual second
    hit_rate: float
    by_tier: dict[str, float]
    p50_s: float
    p90_s: float
    p99_s: float
    busy: float  # share of the time that workers compute prompts
    imbalance: float  # the busiest worker's work, in means
    worst_p90_s: float  # the p90 of the worker whose is longest
    cpu_s: float

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def play(
    shape: Shape, requests: Sequence[SimRequest], routing: Policy, tick: Any = lambda done: None
) -> Result:
    """Simulate, and say what came of it."""
    begin = time.process_time()
    simulation = Simulation(shape, requests, routing)
    simulation.run(tick)
    return result_of(simulation, routing, time.process_time() - begin)


def result_of(simulation: Simulation, routing: str, cpu_s: float) -> Result:
    """Of a simulation that has run; the first requests are left out."""
    jobs = simulation.jobs[len(simulation.jobs) // WARM_UP :]
    waits = _waits(jobs)
    by_worker: dict[int, list[Job]] = {}
    for job in jobs:
        by_worker.setdefault(job.worker.number, []).append(job)
    pages = max(1, sum(len(job.keys) for job in jobs))
    by_tier: dict[str, float] = {}
    for job in jobs:
        for tier, count in job.hits.items():
            by_tier[tier] = by_tier.get(tier, 0.0) + count / pages
    busy = [worker.busy_s for worker in simulation.workers]
    span_s = max(job.arrived_s for job in simulation.jobs)
    return Result(
        workers=len(busy),
        routing=routing,
        requests=len(jobs),
        rate=len(simulation.jobs) / span_s,
        hit_rate=sum(by_tier.values()),
        by_tier=by_tier,
        p50_s=percentile(waits, 50),
        p90_s=percentile(waits, 90),
        p99_s=percentile(waits, 99),
        busy=sum(busy) / len(busy) / span_s,
        imbalance=max(busy) / statistics.mean(busy),
        worst_p90_s=max(percentile(_waits(own), 90) for own in by_worker.values()),
        cpu_s=cpu_s,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, len(values) * percent // 100)]


def _waits(jobs: Sequence[Job]) -> list[float]:
    return sorted(job.first_token_s - job.arrived_s for job in jobs if job.first_token_s is not None)
