"""What a worker's L1 says of pages by their keys, beside its listing of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worker_kit import Slowed, serving, tiny_runner

from kvtier.tier.pages.page import PageKey, TierName
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.engine.worker import DecodeWorker

ALL = 10_000


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    """A runner with more L1 than any test here fills; its arena is used by one worker after the other."""
    return tiny_runner(tiny_llama, 512)


def both_ways(worker: DecodeWorker) -> tuple[list[PageInfo], list[PageInfo]]:
    """All pages as they are listed, and by their keys, with no step of a request in between."""

    def ask() -> tuple[list[PageInfo], list[PageInfo]]:
        level1 = worker._loop.l1_admin
        listed = level1.pages(None, ALL)
        return listed, level1.pages_of([bytes.fromhex(page.key) for page in reversed(listed)])

    return worker._call(ask)


def by_key(pages: list[PageInfo]) -> list[tuple[object, ...]]:
    return sorted((page.key, page.variant, page.depth, page.pinned, page.readers) for page in pages)


def test_a_page_looks_alike_by_its_key_and_in_the_listing(roomy: Slowed) -> None:
    """Of plain requests and of windowed ones, pinned, in use by a request as far as that goes, and unused."""
    with serving(roomy) as client:
        client.generate(prompt(70))
        client.generate(prompt(70, seed=1), window=64, sinks=4)
        client.worker.pin([bytes.fromhex(client.worker.pages()[0].key)])
        running = client.send(prompt(40) + prompt(30, seed=2), max_tokens=1500)
        client.first(running)
        windowed = client.send(prompt(60, seed=3), max_tokens=1500, window=64)
        client.first(windowed)

        listed, found = both_ways(client.worker)
        for name in (running, windowed):
            client.worker.cancel(name)
            client.result(name)

    assert by_key(found) == by_key(listed)
    assert {page.readers > 0 for page in listed} == {page.pinned for page in listed} == {True, False}


def test_a_step_loop_says_which_keys_it_holds(roomy: Slowed) -> None:
    with serving(roomy) as client:
        client.generate(prompt(70))
        keys = [bytes.fromhex(page.key) for page in client.worker.pages()]
        asked = [keys[2], bytes(32), keys[0]]

        [held] = client.worker.held(asked)

        assert (held.tier, held.variant) == (TierName.HBM, "fp32")
        assert held.marks(3).tolist() == [True, False, True]
        assert client.worker.held([bytes(32)]) == client.worker.pages_of([bytes(32)]) == []
        assert [page.key for page in client.worker.pages_of(asked)] == [keys[2].hex(), keys[0].hex()]


def test_all_pages_are_evicted_that_nothing_pinned_or_uses(roomy: Slowed) -> None:
    with serving(roomy) as client:
        client.generate(prompt(70))
        client.generate(prompt(70, seed=1), window=64)
        keys = [bytes.fromhex(page.key) for page in client.worker.pages()]
        client.worker.pin(keys[:1])

        outcomes = dict(client.worker.evict(None))

        assert outcomes == {key: Outcome.REJECTED if key == keys[0] else Outcome.ACCEPTED for key in keys}
        assert [page.key for page in client.worker.pages()] == [keys[0].hex()]


def test_the_step_loop_turns_between_parts_of_what_is_asked_of_all_pages(
    roomy: Slowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that checks all of a large L1 in one turn is killed, since it is stalled."""
    with serving(roomy) as client:
        worker = client.worker
        client.generate(prompt(70))
        client.generate(prompt(70, seed=1), window=64)
        keys = {bytes.fromhex(page.key) for page in worker.pages()}
        monkeypatch.setattr(worker._loop, "part_pages", 3)
        turns: list[float] = []
        monkeypatch.setattr(worker._loop.heartbeat, "turned", lambda: turns.append(0.0))
        in_turn: list[int] = []
        here = worker._loop.l1_admin.here

        def part(some: list[bytes]) -> list[bytes]:
            in_turn.append(len(turns))
            return here(some)

        monkeypatch.setattr(worker._loop.l1_admin, "here", part)

        verified, evicted = worker.verify(), worker.evict(None)
        client.generate(prompt(70))
        client.generate(prompt(70, seed=1), window=64)
        worker.pin([*keys][:2])
        cleared = worker.clear()
        assert worker.pages() == []

    assert dict(verified) == dict(evicted) == dict(cleared) == dict.fromkeys(keys, Outcome.ACCEPTED)
    assert len(verified) == len(evicted) == len(cleared) == len(keys) > 6
    parts = -(-len(keys) // 3)
    assert len({*in_turn}) == 3 * parts


def test_named_pages_of_many_parts_have_the_outcomes_of_one(
    roomy: Slowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(roomy) as client:
        worker = client.worker
        client.generate(prompt(70))
        keys = [bytes.fromhex(page.key) for page in sorted(worker.pages(), key=lambda page: page.depth)]
        asked = [*keys, bytes(32)]
        monkeypatch.setattr(worker._loop, "part_pages", 2)
        wanted = [*((key, Outcome.ACCEPTED) for key in keys), (bytes(32), Outcome.MISSING)]

        assert len(keys) == 4
        assert worker.pin(asked) == worker.verify(asked) == worker.unpin(asked) == wanted
        assert worker.evict(asked) == wanted  # though all go with the first
        assert worker.pages() == []


def test_what_was_cleared_is_not_found_by_its_key_while_a_request_still_uses_it(roomy: Slowed) -> None:
    with serving(roomy) as client:
        running = client.send(prompt(40), max_tokens=1500)
        client.first(running)
        [key, *_] = (PageKey(bytes.fromhex(page.key)) for page in client.worker.pages())
        client.worker.clear("default")

        assert client.worker.held([key]) == client.worker.pages_of([key]) == []
        client.worker.cancel(running)
        client.result(running)
