"""Conversations and a crowd behind one long system prompt, in tiers so small that pages must sink and rise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from worker_kit import PAGE_TOKENS, caching, serving, settle, tiny_runner

from kvtier.tier.pages.page import TierName

pytestmark = pytest.mark.slow

SYSTEM_TOKENS = 1_500
TURNS = 8
CROWD = 50
AT_ONCE = 5
L1_PAGES = 160
L3_PAGES = 64


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(512) for _ in range(count)]


def test_two_conversations_and_fifty_requests_behind_one_prompt_stay_right_in_tiny_tiers(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rng = random.Random(7)
    system = words(rng, SYSTEM_TOKENS)
    crowd = [system + words(rng, rng.randrange(10, 60)) for _ in range(CROWD)]
    asked: list[tuple[list[int], list[int]]] = []  # prompt, answer
    runner = tiny_runner(tiny_llama, pages=L1_PAGES, max_batch_tokens=512)

    with (
        caching(tmp_path, l3_pages=L3_PAGES) as service,
        serving(runner, tmp_path / "s", max_batch_tokens=512, always_load=True) as client,
    ):
        histories = [system + words(rng, 20), system + words(rng, 30)]
        for turn in range(TURNS):
            for talk, history in enumerate(histories):
                answer = client.generate(history, max_tokens=12).tokens
                asked.append((list(history), answer))
                histories[talk] = history + answer + words(rng, 15)
            group = crowd[turn * AT_ONCE : (turn + 1) * AT_ONCE]
            names = [client.send(prompt, max_tokens=10) for prompt in group]
            asked.extend(
                (prompt, client.result(name).tokens) for prompt, name in zip(group, names, strict=True)
            )
            held = client.worker.stats().tiers[TierName.HBM]
            assert held.used_bytes <= held.capacity_bytes
            client.worker.check()
            service.check()
            if turn % 3 == 2:  # someone else needs L1: the whole prompt must come back from below
                settle(client.worker, service)
                client.worker.evict([bytes.fromhex(page.key) for page in client.worker.pages(limit=10_000)])
        rest = crowd[TURNS * AT_ONCE :]
        names = [client.send(prompt, max_tokens=10) for prompt in rest]
        asked.extend((prompt, client.result(name).tokens) for prompt, name in zip(rest, names, strict=True))

        settle(client.worker, service)
        worker, node = client.worker.stats(), service.stats()
        totals = worker.totals
        hits = sum(tier.hit_tokens for tier in worker.tiers.values())
        assert totals.requests == 2 * TURNS + CROWD
        assert totals.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
        assert hits + totals.computed_tokens == totals.prompt_tokens
        assert hits == totals.cached_tokens
        assert totals.used_page_tokens >= 0.96 * totals.held_page_tokens
        assert worker.tiers[TierName.HBM].evicted_pages > 0
        assert node.tiers[TierName.HOST].evicted_pages > 0
        assert worker.tiers[TierName.HOST].hit_tokens > 0
        assert worker.tiers[TierName.SSD].hit_tokens > SYSTEM_TOKENS // PAGE_TOKENS
        for snapshot in (worker, node):
            for tier in snapshot.tiers.values():
                assert tier.used_bytes <= tier.capacity_bytes

        without = [
            client.generate(prompt, max_tokens=len(answer), use_cache=False) for prompt, answer in asked
        ]

    for (_, answer), alone in zip(asked, without, strict=True):
        assert answer == alone.tokens
