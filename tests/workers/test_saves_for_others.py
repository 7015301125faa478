"""Pages that only a worker's L1 has, and a worker of another node needs: real workers, two real nodes, a plain exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from exchange_kit import exchanging
from peer_stub import exchange
from waiting import until
from worker_kit import PAGE_TOKENS, Client, Result, Slowed, keys, serving, settle, tiny_runner

from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.workers.requests.api import EngineRequest, SamplingParams
from kvtier.workers.runner.runner import StepBatch

Write = Literal["through", "demote"]

PAGE_BYTES = 8192
PROMPT: list[int] = np.random.default_rng(6).integers(0, 512, 6 * PAGE_TOKENS + 5).tolist()


@dataclass
class Nodes:
    """Two nodes with a worker each, whose pages go down when they are about to leave L1."""

    here: CacheService
    there: CacheService
    reader: Client
    writer: Client
    writes: Slowed  # the writer's runner
    address: str = "there:1"

    def ask(self, name: str) -> Result:
        """Ask the worker here for the prompt, with the hint that the other node holds all of it."""
        params = SamplingParams(max_tokens=8)
        request = EngineRequest(
            name,
            "default",
            tuple(PROMPT),
            params,
            arrived_s=time.time(),
            remotes=(("n1", self.address, 6),),
        )
        self.reader.worker.submit(request)
        return self.reader.result(name)


@contextmanager
def caches(folder: Path, write: Write) -> Iterator[tuple[CacheService, CacheService]]:
    """Two nodes; at the end nothing may be left in use."""
    with ExitStack() as stack:
        services = []
        for node_id in ("n0", "n1"):
            service = CacheService(
                node_id,
                folder / node_id,
                PAGE_BYTES,
                256 * slot_bytes(PAGE_BYTES),
                folder / f"l4-{node_id}",
                32 << 20,
                write=write,
            )
            service.start()
            stack.callback(service.stop, 0)
            services.append(service)
        here, there = services
        yield here, there
        for service in services:
            until(service.idle, "nothing is leased or waited for")
            service.check()


@contextmanager
def working(
    model: Path, folder: Path, here: CacheService, there: CacheService, write: Write
) -> Iterator[Nodes]:
    """A worker on each."""
    reads, writes = tiny_runner(model, 64), tiny_runner(model, 64)
    with (
        serving(reads, folder / "n0", node_id="n0", write=write, always_load=True) as reader,
        serving(writes, folder / "n1", node_id="n1", write=write, always_load=True) as writer,
    ):
        yield Nodes(here, there, reader, writer, writes)


@pytest.fixture
def nodes(tiny_llama: Path, tmp_path: Path) -> Iterator[Nodes]:
    with (
        caches(tmp_path, "demote") as (here, there),
        exchanging(tmp_path / "n0", tmp_path / "n1"),
        working(tiny_llama, tmp_path, here, there, "demote") as nodes,
    ):
        yield nodes


def test_another_node_gets_what_only_l1_has_and_gives_the_same_tokens(nodes: Nodes) -> None:
    cold = nodes.writer.generate(PROMPT)
    settle(nodes.writer.worker, nodes.there)
    assert nodes.there.pages() == []

    hinted = nodes.ask("hinted")

    assert hinted.tokens == cold.tokens
    assert hinted.cached == {"remote": 6 * PAGE_TOKENS}
    told = nodes.reader.worker.explain("hinted")
    assert told is not None
    assert (told.notes[0].start, told.notes[0].end, told.notes[0].tier) == (0, 6 * PAGE_TOKENS, "remote")
    until(lambda: nodes.there.stats().fetches.served_pages == 6, "the other node has served them")
    assert (
        nodes.there.stats().tiers[TierName.HOST].pages == 6
    )  # and no page more was saved than was asked for
    assert nodes.writer.generate(PROMPT).cached == {"L1": 6 * PAGE_TOKENS}


def test_pages_that_were_saved_once_and_left_the_node_are_saved_again(nodes: Nodes) -> None:
    cold = nodes.writer.generate(PROMPT)
    nodes.ask("first")
    settle(nodes.reader.worker, nodes.here)
    nodes.reader.worker.evict(keys(nodes.reader.worker))
    for service in (nodes.here, nodes.there):
        until(service.idle, "nothing is leased")
        service.evict([bytes.fromhex(page.key) for page in service.pages()], None)
        assert service.pages() == []

    again = nodes.ask("again")

    assert again.tokens == cold.tokens and again.cached == {"remote": 6 * PAGE_TOKENS}


def test_what_l1_has_dropped_costs_a_miss(nodes: Nodes) -> None:
    cold = nodes.writer.generate(PROMPT)
    settle(nodes.writer.worker, nodes.there)
    nodes.writer.worker.evict(keys(nodes.writer.worker))
    until(nodes.there.idle, "what was evicted is saved, or not")
    nodes.there.clear()

    hinted = nodes.ask("hinted")

    assert hinted.tokens == cold.tokens and hinted.cached == {}
    told = nodes.reader.worker.explain("hinted")
    assert told is not None and told.notes[0].tier == "computed"
    assert sum(nodes.here.stats().fetches.failed_pages.values()) == 6


def test_a_worker_that_goes_away_meanwhile_costs_a_miss(nodes: Nodes) -> None:
    cold = nodes.writer.generate(PROMPT)
    settle(nodes.writer.worker, nodes.there)
    nodes.writer.worker.stop()

    hinted = nodes.ask("hinted")

    assert hinted.tokens == cold.tokens
    assert hinted.cached.get("remote", 0) in (
        0,
        6 * PAGE_TOKENS,
    )  # a worker that is stopped saves what it has first


@pytest.mark.parametrize(("write", "reason"), [("demote", "unsaved"), ("through", "evicted")])
def test_a_worker_in_a_long_step_costs_a_miss_and_its_node_no_trust(
    tiny_llama: Path, tmp_path: Path, write: Write, reason: str
) -> None:
    """Workers were asked whatever they did, and a step longer than an exchange's patience made their node one that is slow."""
    in_step, go_on = threading.Event(), threading.Event()

    def wait(batch: StepBatch) -> None:
        in_step.set()
        assert go_on.wait(120)

    with (
        caches(tmp_path, write) as (here, there),
        exchange("n0", str(tmp_path / "n0")) as fetching,
        exchange("n1", str(tmp_path / "n1")) as serves,
        working(tiny_llama, tmp_path, here, there, write) as nodes,
    ):
        nodes.address = serves.info()["address"]
        cold = nodes.writer.generate(PROMPT)
        settle(nodes.writer.worker, there)
        there.evict([bytes.fromhex(page.key) for page in there.pages()], None)
        nodes.writes.before = wait
        other = nodes.writer.send(PROMPT[7:])
        assert in_step.wait(120)

        try:
            hinted = nodes.ask("hinted")
        finally:
            nodes.writes.before = lambda batch: None
            go_on.set()

        assert hinted.tokens == cold.tokens and hinted.cached == {}
        told = nodes.reader.worker.explain("hinted")
        assert told is not None and told.notes[0].reason == reason
        peer = fetching.stats()["fetched"]["n1"]
        assert peer["breaker"] == "closed" and peer["failures"] == {reason: 1}
        assert not [note for note in here.notes() if "don't come" in note]
        nodes.writer.result(other)
        if write == "demote":
            until(lambda: len(there.pages()) == 6, "the worker saves what it was asked for, late as it is")
