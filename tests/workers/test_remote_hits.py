"""Prompts whose pages another node has: real workers, two real nodes, and a plain exchange between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from exchange_kit import PlainExchange, exchanging
from waiting import until
from worker_kit import PAGE_TOKENS, Client, Result, serving, settle, sink_to_l3, tiny_runner

from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import HEADER_BYTES, TierName, slot_bytes
from kvtier.workers.requests.api import EngineRequest, SamplingParams

PAGE_BYTES = 8192
PROMPT: list[int] = np.random.default_rng(5).integers(0, 512, 6 * PAGE_TOKENS + 5).tolist()


@contextmanager
def node(folder: Path, node_id: str) -> Iterator[CacheService]:
    size = slot_bytes(PAGE_BYTES)
    service = CacheService(
        node_id, folder / node_id, PAGE_BYTES, 256 * size, folder / f"l4-{node_id}", 32 << 20
    )
    service.start()
    try:
        yield service
        if service.health() is None:
            until(service.idle, f"the cache of {node_id} is idle")
            service.check()
    finally:
        service.stop(0)


@dataclass
class Nodes:
    """Node n1 has computed PROMPT, and node n0 has a worker that has not."""

    folder: Path
    here: CacheService
    there: CacheService
    client: Client
    cold: Result

    def ask(self, pages: int = 6, prompt: list[int] = PROMPT, name: str = "hinted", n: int = 1) -> Result:
        """Ask for the prompt, with the hint that n1 holds so many of its pages."""
        params = SamplingParams(max_tokens=8, n=n)
        remotes = (("n1", "there:1", pages),)
        self.client.worker.submit(
            EngineRequest(name, "default", tuple(prompt), params, arrived_s=time.time(), remotes=remotes)
        )
        result = self.client.result(name)
        usage = result.usage
        assert sum(usage.cached_tokens.values()) + usage.computed_tokens == usage.prompt_tokens == len(prompt)
        return result

    def exchange(self, **options: object) -> PlainExchange:
        return PlainExchange(self.folder / "n0", self.folder / "n1", **options)  # type: ignore[arg-type]


@pytest.fixture
def nodes(tiny_llama: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    deadline_ms = getattr(request, "param", 20_000.0)
    with ExitStack() as stack:
        there = stack.enter_context(node(tmp_path, "n1"))
        with serving(tiny_runner(tiny_llama, 64), tmp_path / "n1", node_id="n1") as client:
            cold = client.generate(PROMPT)
            settle(client.worker, there)
        here = stack.enter_context(node(tmp_path, "n0"))
        client = stack.enter_context(
            serving(
                tiny_runner(tiny_llama, 64), tmp_path / "n0", load_deadline_ms=deadline_ms, always_load=True
            )
        )
        yield Nodes(tmp_path, here, there, client, cold)


def test_a_prompt_that_another_node_has_is_fetched_and_gives_the_same_tokens(nodes: Nodes) -> None:
    with exchanging(nodes.folder / "n0", nodes.folder / "n1"):
        hinted = nodes.ask()

        assert hinted.tokens == nodes.cold.tokens
        assert hinted.cached == {"remote": 6 * PAGE_TOKENS}
        told = nodes.client.worker.explain("hinted")
        assert told is not None
        assert (told.notes[0].start, told.notes[0].end, told.notes[0].tier) == (0, 96, "remote")
        stats = nodes.client.worker.stats().tiers
        assert (stats[TierName.REMOTE].hit_tokens, stats[TierName.REMOTE].lookups_tokens) == (96, len(PROMPT))
        assert stats[TierName.SSD].hit_tokens == stats[TierName.HOST].hit_tokens == 0
        counted = nodes.here.stats()
        assert (
            counted.fetches.fetched_pages == 6 and counted.tiers[TierName.REMOTE].bytes_out == 6 * PAGE_BYTES
        )
        until(lambda: nodes.there.stats().fetches.served_pages == 6, "the other node has served them")

        sink_to_l3(nodes.client.worker, nodes.here)
        again = nodes.ask(name="again")
    assert again.tokens == nodes.cold.tokens and again.cached == {"L3": 6 * PAGE_TOKENS}


def test_pages_of_l4_there_and_of_l3_here_make_one_prefix(nodes: Nodes) -> None:
    with exchanging(nodes.folder / "n0", nodes.folder / "n1"):
        first = nodes.ask(prompt=PROMPT[: 2 * PAGE_TOKENS + 1], pages=0, name="first")
        assert first.cached == {}
        sink_to_l3(nodes.client.worker, nodes.here)
        in_l3 = [bytes.fromhex(page.key) for page in nodes.there.pages(tier=TierName.HOST)]
        nodes.there.evict(in_l3, TierName.HOST)

        hinted = nodes.ask(n=2)

    assert hinted.tokens == nodes.cold.tokens
    assert hinted.cached == {"L3": 2 * PAGE_TOKENS, "remote": 4 * PAGE_TOKENS}


def test_a_hint_that_says_too_much_costs_a_miss(nodes: Nodes) -> None:
    nodes.there.clear()
    with exchanging(nodes.folder / "n0", nodes.folder / "n1"):
        hinted = nodes.ask()

    assert hinted.tokens == nodes.cold.tokens and hinted.cached == {}
    told = nodes.client.worker.explain("hinted")
    assert told is not None and told.notes[0].tier == "computed" and told.notes[0].reason == "cleared"
    assert nodes.here.stats().fetches.failed_pages == {"cleared": 6}


def test_bits_that_flipped_on_the_way_are_found_before_l1_and_computed(nodes: Nodes) -> None:
    def spoil(slot: memoryview) -> None:
        slot[HEADER_BYTES + 100] ^= 1

    with exchanging(nodes.folder / "n0", nodes.folder / "n1", spoil=spoil):
        hinted = nodes.ask()

    assert hinted.tokens == nodes.cold.tokens and hinted.cached == {}
    told = nodes.client.worker.explain("hinted")
    assert told is not None and told.notes[0].reason == "corrupt"
    assert nodes.here.stats().tiers[TierName.HOST].corrupt_pages >= 1


def test_an_exchange_that_dies_with_a_fetch_under_way_is_a_miss(nodes: Nodes) -> None:
    exchange = nodes.exchange(silent=True)
    params = SamplingParams(max_tokens=8)
    remotes = (("n1", "there:1", 6),)
    nodes.client.worker.submit(
        EngineRequest("hinted", "default", tuple(PROMPT), params, arrived_s=time.time(), remotes=remotes)
    )
    assert exchange.heard_fetch.wait(120)

    exchange.close()

    hinted = nodes.client.result("hinted")
    assert hinted.tokens == nodes.cold.tokens and hinted.cached == {}
    told = nodes.client.worker.explain("hinted")
    assert told is not None and told.notes[0].reason == "load_failed"
    until(nodes.here.idle, "no slot is the exchange's any more")


@pytest.mark.parametrize("nodes", [50.0], indirect=True)
def test_an_exchange_that_never_answers_is_waited_for_until_the_loads_deadline(nodes: Nodes) -> None:
    with exchanging(nodes.folder / "n0", nodes.folder / "n1", silent=True):
        hinted = nodes.ask()

        assert hinted.tokens == nodes.cold.tokens and hinted.cached == {}
        told = nodes.client.worker.explain("hinted")
        assert told is not None and told.notes[0].reason == "deadline"
