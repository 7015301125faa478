"""The workers of bench/cluster.py: real engines at two nodes, asked for prompts one at a time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cluster_nodes import WAIT_S, Part, Peer, part, wait_for

from kvtier.tier.pages.identity import tenant_salt
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.requests.api import EngineRequest, Output, SamplingParams
from kvtier.workers.runner.runner import load_runner
from kvtier.workers.scheduling.settings import EngineSettings

Side = Literal["fetch", "recompute"]

LOAD_DEADLINE_S = 60.0  # what is fetched is waited for, so that its whole time shows


@dataclass(frozen=True)
class Answer:
    """How a request went until its first token: seconds, and what was done about the prefix."""

    seconds: float
    picked: Side
    remote_tokens: int
    why: str = ""  # the prefix isn't all there


class Engine:
    """A worker with the real model at one of the nodes; one request at a time."""

    def __init__(self, options: Any, name: str, node_id: str, folder: Path, *, always_loads: bool) -> None:
        """`always_loads`: it fetches whatever that costs."""
        runner = load_runner(
            str(options.model),
            dtype=options.dtype,
            page_tokens=options.page_tokens,
            l1_bytes=options.l1_bytes,
            numerics="auto",
            forward="auto",
            threads=options.threads,
            max_context=0,
            max_batch_tokens=2048,
            epoch=0,
        )
        self._name = name
        self._came = threading.Condition()
        self._first_at: float | None = None
        self._is_over = False
        self._number = 0
        self.worker = DecodeWorker(
            runner,
            EngineSettings(always_load=always_loads, load_deadline_ms=1e3 * LOAD_DEADLINE_S),
            worker_id=name,
            node_id=node_id,
            socket_path=str(folder / "sock"),
            tenants={"default": tenant_salt("default")},
            sink=self._hear,
        )

    def _hear(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        with self._came:
            for output in outputs:
                if output.token_ids and self._first_at is None:
                    self._first_at = now
                self._is_over |= output.finish_reason is not None
            self._came.notify_all()

    def ask(
        self, prompt: list[int], remotes: tuple[tuple[str, str, int], ...] = (), give_up_s: float = WAIT_S
    ) -> Answer:
        """Time to the first token; the request is cancelled when that takes longer than `give_up_s`."""
        self._number += 1
        name = f"{self._name}-{self._number}"
        self._first_at, self._is_over = None, False
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        started = time.perf_counter()
        self.worker.submit(EngineRequest(name, "default", tuple(prompt), sampling, remotes=remotes))
        with self._came:
            is_cut = not self._came.wait_for(lambda: self._is_over, give_up_s)
            if is_cut:
                self.worker.cancel(name)
                assert self._came.wait_for(lambda: self._is_over, WAIT_S), f"{name} does not end"
            first_at = self._first_at
        if is_cut:
            return Answer(time.perf_counter() - started, "fetch", 0, "given up")
        assert first_at is not None, f"{name} ended without a token: {self.worker.error}"
        told = self.worker.explain(name)
        assert told is not None and told.usage is not None
        remote = told.usage.cached_tokens["remote"]
        whole = remotes[0][2] * self.worker.info().page_tokens if remotes else 0
        short = next((note for note in told.notes if note.tier == "computed" and note.reason), None)
        refused = not remotes or (short is not None and short.reason == "costlier")
        why = "" if short is None or remote >= whole else f"{short.reason}: {short.detail}"
        return Answer(first_at - started, "recompute" if refused and not remote else "fetch", remote, why)

    def forget(self) -> None:
        """Leave L1 empty."""
        wait_for(self.worker.idle, f"{self._name} to be idle")
        self.worker.evict(self.worker.holds())
        assert not self.worker.holds()


@contextmanager
def engine(options: Any, name: str, node_id: str, folder: Path, *, always_loads: bool) -> Iterator[Engine]:
    """An engine that is connected to its node, and ends with the block."""
    made = Engine(options, name, node_id, folder, always_loads=always_loads)
    made.worker.start()
    try:
        wait_for(lambda: made.worker.is_connected, f"{name} to reach its node")
        yield made
    finally:
        made.worker.stop()


@dataclass
class Nodes:
    """Node `home`, whose engines ask, and the node that has `base` and is known by many names."""

    home: Part
    chooses: Engine  # loads or recomputes, as it expects to be quicker
    fetches: Engine  # always loads
    addresses: dict[str, str]
    base: list[int]
    page_tokens: int
    _rng: random.Random = field(default_factory=lambda: random.Random(2))

    def ask(self, engine: Engine, prefix: int, peer: Peer | None = None, give_up_s: float = WAIT_S) -> Answer:
        """A prompt that begins with so many tokens of `base` and ends again, at a node that knows nothing of it."""
        prompt = self.base[:prefix] + self._rng.choices(self.base, k=8)
        remotes = (
            ()
            if peer is None
            else ((peer.node_id, self.addresses[peer.node_id], prefix // self.page_tokens),)
        )
        answer = engine.ask(prompt, remotes, give_up_s)
        self.forget()
        return answer

    def forget(self) -> None:
        """Leave nothing of any prompt at home."""
        for each in (self.chooses, self.fetches):
            each.forget()
        self.home.until("is_idle")
        self.home.ask("forget")


@contextmanager
def running(options: Any, peers: list[Peer], folder: Path, prefix: int) -> Iterator[Nodes]:
    """Both nodes, the one away with a prefix of so many tokens in L3."""
    home_folder, away_folder = folder / "home", folder / "away"
    slow = [peer for peer in peers if peer.bytes_s is not None]
    cache = options.page_bytes, options.l3_bytes
    names = [f"{peer.node_id}={peer.same_host}" for peer in peers]
    with (
        part("the cache away", "cache", "away", away_folder, *cache) as away,
        part("the cache at home", "cache", "home", home_folder, *cache) as home,
        part("the exchanges away", "exchanges", away_folder / "sock", *names) as far,
        part("the exchange at home", "exchanges", home_folder / "sock", "home=auto") as near,
        part("the wires", "wires", *(f"{p.bytes_s}={far.said[p.node_id]}" for p in slow)) as wires,
    ):
        far.until("is_up")
        near.until("is_up")
        with engine(options, "writer", "away", away_folder, always_loads=False) as writer:
            vocabulary = writer.worker.info().vocab_size
            rng = random.Random(1)
            base = [rng.randrange(vocabulary) for _ in range(prefix + 1)]
            writer.ask(base)
            wait_for(writer.worker.idle, "the writer's pages to be saved")
            away.until("is_idle")
        addresses = {**far.said, **dict(zip((peer.node_id for peer in slow), wires.said, strict=True))}
        with (
            engine(options, "chooses", "home", home_folder, always_loads=False) as chooses,
            engine(options, "fetches", "home", home_folder, always_loads=True) as fetches,
        ):
            yield Nodes(home, chooses, fetches, addresses, base, options.page_tokens)
