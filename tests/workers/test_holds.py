"""What a worker says came to its L1 and left it adds up to what is there, whatever happens to the pages."""

from __future__ import annotations

import random
from pathlib import Path

from waiting import until
from worker_kit import Client, keys, page_sizes, serving, tiny_runner

from kvtier.tier.pages.page import PageKey, TierName


class Mirror:
    """What L1 has by what was told, begun with what it said itself. Filled by the step loop."""

    def __init__(self, client: Client) -> None:
        self.worker = client.worker
        self.held: set[bytes] = set()
        self.calls = 0
        self.told: list[tuple[list[PageKey], list[PageKey]]] = []
        self.worker.follow_holds(self.hear)
        self.held |= set(self.worker.holds())

    def hear(self, came: list[PageKey], left: list[PageKey]) -> None:
        assert not set(came) & set(left) and (came or left)
        self.told.append((came, left))

    def check(self) -> int:
        """How many pages L1 has, which both must say; nothing may run."""
        until(self.worker.idle, "the worker is idle")
        there = self.worker.holds()
        assert len(there) == len(set(there)) and set(there) == set(keys(self.worker))
        while self.told:
            came, left = self.told.pop(0)
            self.held = (self.held | set(came)) - set(left)
            self.calls += 1
        assert self.held == set(there)
        return len(there)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 500) for _ in range(length)]


def test_pages_that_come_are_evicted_and_cleared_are_told(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, pages=24)) as client:
        client.generate(prompt(100, 0))  # before anything asks
        mirror = Mirror(client)
        assert mirror.check() == 6

        for seed in range(1, 8):  # more than L1 has room for
            client.generate(prompt(100, seed), tenant="other" if seed % 2 else "default")
        assert mirror.check() > 12
        assert client.worker.stats().tiers  # and counts stay right
        some = client.worker.holds()[3]
        client.worker.evict([some])
        mirror.check()
        assert some not in mirror.held

        client.worker.clear("other")
        assert 0 < mirror.check() < 20
        client.worker.clear()
        assert mirror.check() == 0


def test_a_page_that_is_cleared_while_a_request_uses_it_is_told_to_have_left(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, pages=64)) as client:
        mirror = Mirror(client)
        name = client.send(prompt(100, 1), max_tokens=400, min_tokens=400)
        client.first(name)
        there = set(client.worker.holds())
        assert len(there) >= 6
        client.worker.clear()
        until(lambda: there <= {key for _, left in list(mirror.told) for key in left}, "it is told at once")
        assert not client.is_over(name)
        client.worker.cancel(name)
        client.result(name)
        mirror.check()


def test_streams_and_lossy_requests_are_told_too(tiny_llama: Path) -> None:
    runner = tiny_runner(tiny_llama, pages=16, cache_format="timedecay", recent_tokens=32, decay_sinks=16)
    assert len(page_sizes(runner)) > 1
    with serving(runner) as client:
        mirror = Mirror(client)
        for seed in range(12):
            kind = [{}, {"window": 64, "sinks": 16}, {"lossy": True}][seed % 3]
            client.generate(prompt(120, seed % 5), max_tokens=24, **kind)
            mirror.check()
        assert mirror.held and client.worker.stats().tiers[TierName.HBM].evicted_pages > 0


def test_a_step_tells_once_and_nothing_is_told_any_more_when_it_is_not_wanted(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, pages=64)) as client:
        mirror = Mirror(client)
        client.generate(prompt(200, 1), max_tokens=1)
        assert mirror.check() == 12 and mirror.calls <= 2
        client.worker.follow_holds(None)

        client.generate(prompt(200, 2))
        until(client.worker.idle, "the worker is idle")

        assert not mirror.told
