"""`tiers.write: demote`: pages are saved when they are about to leave L1, with a real tiny model and a real node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from waiting import until
from worker_kit import PAGE_TOKENS, caching, keys, serving, settle, tiny_runner

from kvtier.lab.replay.chain_node import ChainNode
from kvtier.lab.simulation.node import NodeSizes, SimNode
from kvtier.lab.simulation.parts import Agenda
from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Costs, PolicySettings
from kvtier.tier.protocol.messages import Hello, WriteMode

COSTS = Costs(20e-3, 64.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


def in_l3(service: object) -> set[bytes]:
    pages = service.pages(tier=TierName.HOST, limit=100_000)  # type: ignore[attr-defined]
    return {bytes.fromhex(page.key) for page in pages}


def test_while_l1_has_room_nothing_is_written_and_at_the_end_everything_is(
    tiny_llama: Path, tmp_path: Path
) -> None:
    p = prompt(100)
    with caching(tmp_path) as service:
        with serving(tiny_runner(tiny_llama, 256), tmp_path / "s", write="demote") as client:
            cold = client.generate(p)
            settle(client.worker, service)
            assert in_l3(service) == set()
            assert client.worker.stats().tiers[TierName.HBM].bytes_out == 0
            client.worker.stop(drain_s=30.0)
        until(service.idle, "the node's cache is idle")
        with serving(tiny_runner(tiny_llama, 256), tmp_path / "s", write="demote") as client:
            warm = client.generate(p)

    assert warm.cached == {"L3": 96}
    assert warm.tokens == cold.tokens


def test_pages_that_left_l1_are_found_below_and_few_others_were_written(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Twelve conversations go through an L1 of 40 pages that one shared prefix fills half of."""
    system = prompt(20 * PAGE_TOKENS, seed=99)
    prompts = [system + prompt(5 * PAGE_TOKENS + 1, seed=i) for i in range(12)]
    written = {}
    for write in ("through", "demote"):
        folder = tmp_path / write
        folder.mkdir()
        with (
            caching(folder, l3_pages=1024) as service,
            serving(
                *(tiny_runner(tiny_llama, 40), folder / "s"), write=write, policy=PolicySettings("lru")
            ) as client,
        ):
            wanted = []
            for p in prompts:
                wanted.append(client.generate(p, max_tokens=1).tokens)
                settle(client.worker, service)
            written[write] = client.worker.stats().tiers[TierName.HBM].bytes_out
            left = keys(client.worker)
            again = client.generate(prompts[0], max_tokens=1)
            assert again.tokens == wanted[0]
            assert again.cached == {"L1": 20 * PAGE_TOKENS, "L3": 5 * PAGE_TOKENS}
            assert len(left) <= 40

    pages = 20 + 12 * 5
    assert written["through"] == pages * 8192
    margin = 40 // 4
    assert (pages - 40) * 8192 <= written["demote"] <= (pages - 40 + margin) * 8192


def test_pages_for_which_there_is_no_slot_are_dropped_and_requests_go_on(
    tiny_llama: Path, tmp_path: Path
) -> None:
    prompts = [prompt(60 + i, seed=i) for i in range(8)]
    with (
        caching(tmp_path, l3_pages=0, l4_bytes=0),
        serving(tiny_runner(tiny_llama, 24), tmp_path / "s", write="demote") as client,
    ):
        wanted = [client.generate(p, max_tokens=60, use_cache=False).tokens for p in prompts]
        assert client.together(prompts, max_tokens=60) == wanted
        assert client.worker.stats().tiers[TierName.HBM].evicted_pages > 0


def test_preempted_requests_say_the_same_and_recompute_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    runner = tiny_runner(tiny_llama, 24)
    prompts = [prompt(60 + i, seed=i) for i in range(4)]
    with caching(tmp_path) as service, serving(runner, tmp_path / "s", write="demote") as client:
        wanted = [client.generate(p, max_tokens=100, use_cache=False).tokens for p in prompts]
        settle(client.worker, service)
        names = [client.send(p, max_tokens=100) for p in prompts]
        results = [client.result(name) for name in names]
        told = [client.worker.explain(name) for name in names]

    assert [r.tokens for r in results] == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0
    assert sum(r.usage.computed_tokens for r in results) == sum(map(len, prompts))


def test_l1_and_l3_exclude_each_other_so_prompts_that_fit_them_together_are_never_computed_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """88 pages, an L1 of 64 and an L3 of 64: copies of what was loaded go first, and such pages are saved again."""
    prompts = [prompt(8 * PAGE_TOKENS + 1, seed=i) for i in range(11)]
    with (
        caching(tmp_path, l3_pages=64, l4_bytes=0, write="demote") as service,
        serving(
            *(tiny_runner(tiny_llama, 64), tmp_path / "s"), write="demote", policy=PolicySettings("lru")
        ) as client,
    ):
        tokens, hits = [], []
        for p in prompts * 4:
            result = client.generate(p, max_tokens=1)
            settle(client.worker, service)
            tokens.append(result.tokens)
            hits.append(result.cached)

    assert tokens == tokens[:11] * 4
    assert [sum(cached.values()) for cached in hits[11:]] == [8 * PAGE_TOKENS] * 33, hits
    assert all(cached == {"L3": 8 * PAGE_TOKENS} for cached in hits[22:]), hits


def test_a_worker_that_dies_takes_what_it_had_loaded_with_it_and_another_computes_the_same(
    tiny_llama: Path, tmp_path: Path
) -> None:
    prompts = [prompt(8 * PAGE_TOKENS + 1, seed=i) for i in range(11)]
    with caching(tmp_path, l3_pages=64, l4_bytes=0, write="demote") as service:
        with serving(
            *(tiny_runner(tiny_llama, 64), tmp_path / "s"),
            write="demote",
            policy=PolicySettings("lru"),
            max_batch_tokens=32,
        ) as client:
            wanted = [client.generate(p, max_tokens=4).tokens for p in prompts * 2]
            settle(client.worker, service)
            client.worker.stop(drain_s=0.0)
        until(service.idle, "the node's cache is idle")
        service.check()
        with serving(tiny_runner(tiny_llama, 64), tmp_path / "s", write="demote") as client:
            again = [client.generate(p, max_tokens=4).tokens for p in prompts * 2]

    assert again == wanted


@pytest.mark.parametrize("write", ["through", "demote"])
def test_workers_of_the_service_of_replay_and_of_the_simulation_say_hello_alike(
    tiny_llama: Path, tmp_path: Path, write: WriteMode
) -> None:
    with (
        caching(tmp_path, write=write) as service,
        serving(tiny_runner(tiny_llama, 16), tmp_path / "s", write=write),
    ):
        live = hellos(service._coordinator)
    replayed = hellos(ChainNode(PolicySettings("lru"), write, 32, 32, 1, COSTS).coordinator)
    node = SimNode("n0", Agenda(), NodeSizes(32, 32), 1, PolicySettings("lru"), write=write)
    simulated = hellos(node.coordinator)

    assert [hello.brings_down for hello in live] == [write == "demote"]
    assert [hello.brings_down for hello in replayed] == [write == "demote"]
    assert [hello.brings_down for hello in simulated] == [write == "demote"]


def hellos(coordinator: Coordinator) -> list[Hello]:
    """What the node's decode workers said first."""
    return [worker.hello for worker in coordinator.tables.workers.values() if not worker.is_exchange]
