"""Windows in a live worker: endless streams with sinks, and models that have windows of their own in some layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_kit import generate as by_hand
from tiny_models import make_tiny_gemma3
from waiting import until
from worker_kit import (
    PAGE_TOKENS,
    Client,
    Slowed,
    caching,
    keys,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.pages.page import TierName
from kvtier.tier.pages.recipe import Window
from kvtier.tier.protocol import ipc
from kvtier.tier.protocol import parts as message_parts
from kvtier.tier.stores.base import Outcome
from kvtier.workers.node_io import pager
from kvtier.workers.node_io.namespaces import MAX_KINDS

pytestmark = pytest.mark.slow

WINDOW = {"window": 64, "sinks": 4}


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    """A runner with more L1 than any test here fills; its arena is used by one worker after the other."""
    return tiny_runner(tiny_llama, 1024)


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gemma3(tmp_path_factory.mktemp("tiny-gemma"))


class Watch:
    """What a runner's sequences hold, by layer group, at each step: the most pages, and the most in L1."""

    def __init__(self, runner: Slowed) -> None:
        self.most = [0] * len(runner.groups)
        runner.before = self._look

    def _look(self, batch: Any) -> None:
        for sequence in batch.sequences:
            for group, pages in enumerate(sequence.pages):
                self.most[group] = max(self.most[group], len(pages.frames))


def test_a_prompt_of_more_pages_than_a_node_looks_at_is_served_and_its_first_pages_are_found(
    roomy: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Locate of all keys was too long to be sent, and what that raised ended the step loop."""
    monkeypatch.setattr(pager, "MOST_KEYS", 50)
    monkeypatch.setattr(message_parts, "MAX_ITEMS", 8)
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 4000)  # room for 50 keys, and not for 120
    head, tail = prompt(50 * PAGE_TOKENS), prompt(70 * PAGE_TOKENS + 1, seed=1)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(head + tail[:1])
        sink_to_l3(client.worker, service)
        connection = client.worker._loop.link.number

        again = client.generate(head + tail)

        assert again.cached == {"L3": 50 * PAGE_TOKENS}
        assert client.worker._loop.link.number == connection, "no message was too long"


def test_a_message_that_is_too_long_costs_the_connection_and_never_the_step_loop(
    roomy: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caching(tmp_path), serving(roomy, tmp_path / "s") as client:
        alone = client.generate(prompt(800), use_cache=False)
        with monkeypatch.context() as patch:
            patch.setattr(ipc, "MAX_FRAME_BYTES", 1500)  # a Hello fits, 50 keys do not
            told = client.generate(prompt(800))
        until(lambda: client.worker.is_connected, "the worker connects again")

        assert told.tokens == alone.tokens
        assert client.worker.error is None


# ---- endless streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_node", [False, True])
def test_a_stream_past_the_models_context_takes_no_more_memory_than_its_window(
    roomy: Slowed, tmp_path: Path, has_node: bool
) -> None:
    length = 1500
    watch = Watch(roomy)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s" if has_node else None) as client:
        used = []
        name = client.send(prompt(100), max_tokens=length, **WINDOW)
        client.first(name)
        while not client.is_over(name):
            used.append(client.worker.stats().tiers[TierName.HBM].used_bytes)
        result = client.result(name)
        settle(client.worker, service)
        dropped = client.worker.stats().tiers[TierName.HBM].dropped_pages

    roomy.before = lambda batch: None
    window_pages = 64 // PAGE_TOKENS + 2
    assert len(result.tokens) == length
    assert watch.most[0] <= 1 + max(window_pages, 100 // PAGE_TOKENS + 1)
    # The sinks', the window's, and those from which a request with the same prompt starts.
    kept = 1 + 2 * window_pages
    in_flight = 24 if has_node else 0  # pages that are being saved before they go
    assert max(used[len(used) // 4 :]) <= (kept + in_flight) * 8192
    assert dropped >= (100 + length) // PAGE_TOKENS - kept


def test_a_stream_leaves_no_more_below_than_its_prompt_and_its_end(roomy: Slowed, tmp_path: Path) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        result = client.generate(prompt(100), max_tokens=1000, **WINDOW)
        settle(client.worker, service)
        stored = service.stats().tiers[TierName.HOST].pages
        written = client.worker.stats().tiers[TierName.HBM].bytes_out
        sink_to_l3(client.worker, service)
        turn = client.generate(prompt(100) + result.tokens + prompt(20, seed=1), **WINDOW)

    window_pages = 64 // PAGE_TOKENS + 1
    assert stored <= 100 // PAGE_TOKENS + window_pages
    assert written == stored * 8192
    assert turn.cached == {"L3": 1099 // PAGE_TOKENS * PAGE_TOKENS}


def test_a_streams_tokens_are_those_of_pages_moved_by_hand(roomy: Slowed) -> None:
    p = prompt(150)
    with serving(roomy) as client:
        result = client.generate(p, max_tokens=200, **WINDOW)
    (wanted,) = by_hand(roomy, [p], 200, 64, Window(64, 4))  # type: ignore[arg-type]

    assert result.tokens == wanted


def test_a_stream_may_be_longer_than_the_context(tiny_llama: Path) -> None:
    runner = tiny_runner(tiny_llama, 24, max_context=256)
    with serving(runner) as client:
        with pytest.raises(ValueError, match="leaves no room in the context of 256"):
            client.send(prompt(300))
        result = client.generate(prompt(300), max_tokens=40, **WINDOW)

    assert len(result.tokens) == 40


@pytest.mark.parametrize("where", ["L1", "L3", "L4"])
def test_a_streams_prompt_is_found_again(roomy: Slowed, tmp_path: Path, where: str) -> None:
    p = prompt(300)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        cold = client.generate(p, max_tokens=40, **WINDOW)
        settle(client.worker, service)
        if where == "L3":
            sink_to_l3(client.worker, service)
        elif where == "L4":
            sink_to_l4(client.worker, service)
        again = client.generate(p, max_tokens=40, **WINDOW)
        loaded = client.worker.stats().tiers[TierName.HBM].promoted_pages
        full = client.generate(p, max_tokens=40)

    assert cold.cached == {}
    assert again.tokens == cold.tokens
    assert again.usage.computed_tokens <= 300 - 288
    assert loaded <= 1 + 64 // PAGE_TOKENS + 1
    assert full.cached == {}  # another window, another identity


@pytest.mark.parametrize("cache_format", ["auto", "int4c", "timedecay"])
def test_preempted_streams_say_the_same(tiny_llama: Path, tmp_path: Path, cache_format: str) -> None:
    options = {"cache_format": cache_format, "recent_tokens": 32, "decay_sinks": 4}
    prompts = [prompt(10 + 3 * i, seed=i) for i in range(6)]
    with serving(tiny_runner(tiny_llama, 256, **options)) as client:
        wanted = client.together(prompts, max_tokens=150, use_cache=False, **WINDOW)
    runner = tiny_runner(tiny_llama, 16 if cache_format == "auto" else 7, **options)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner)) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        names = [client.send(p, max_tokens=150, **WINDOW) for p in prompts]
        results = [client.result(name).tokens for name in names]
        told = [client.worker.explain(name) for name in names]
        settle(client.worker, service)
        client.worker.check()

    assert results == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0


def test_siblings_of_a_stream_share_its_prompt(roomy: Slowed) -> None:
    options: dict[str, Any] = {"n": 3, "max_tokens": 90, "temperature": 1.0, "seed": 7, **WINDOW}
    with serving(roomy) as client:
        name = client.send(prompt(120), **options)
        results = [client.result(name, index) for index in range(3)]
        alone = client.generate(prompt(120), **{**options, "n": 1})

    assert len({tuple(r.tokens) for r in results}) == 3
    assert alone.tokens == results[0].tokens


def test_a_deployments_window_is_that_of_requests_that_set_none(tiny_llama: Path, roomy: Slowed) -> None:
    with serving(roomy) as client:
        asked = client.generate(prompt(200), max_tokens=50, **WINDOW)
        full = client.generate(prompt(200), max_tokens=50)
    with serving(tiny_runner(tiny_llama, 64, **WINDOW)) as client:
        default = client.generate(prompt(200), max_tokens=50)
        other = client.generate(prompt(200), max_tokens=50, window=32)

    assert default.tokens == asked.tokens
    assert full.tokens != asked.tokens
    assert other.tokens != default.tokens


def test_every_verb_sees_the_pages_of_every_window(roomy: Slowed, tmp_path: Path) -> None:
    kinds: list[dict[str, int]] = [{}, WINDOW, {"window": 64}, {"window": 128, "sinks": 4}]
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        for kind in kinds:
            client.generate(prompt(60), **kind)
        settle(client.worker, service)
        listed = client.worker.pages()
        pinned = client.worker.pin(keys(client.worker))
        refused = client.worker.evict(keys(client.worker))
        client.worker.unpin(keys(client.worker))
        verified = client.worker.verify()
        cleared = client.worker.clear("default")

    assert len({page.root for page in listed}) == len(kinds)
    assert len(listed) == len({page.key for page in listed}) == 4 * len(kinds)
    assert {outcome for _, outcome in pinned + verified + cleared} == {Outcome.ACCEPTED}
    assert {outcome for _, outcome in refused} == {Outcome.REJECTED}
    assert {key for key, _ in cleared} == {bytes.fromhex(page.key) for page in listed}


def test_clear_takes_the_pages_of_a_running_stream(roomy: Slowed) -> None:
    with serving(roomy) as client:
        running = client.send(prompt(60), max_tokens=2000, **WINDOW)
        client.first(running)
        client.worker.clear("default")
        again = client.generate(prompt(60), **WINDOW)
        client.worker.cancel(running)
        client.result(running)

    assert again.cached == {}


def test_the_node_knows_which_window_pages_were_made_for(roomy: Slowed, tmp_path: Path) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(prompt(100), **WINDOW)
        settle(client.worker, service)
        name = client.send(prompt(100))
        client.result(name)
        told = client.worker.explain(name)

    assert told is not None
    assert told.notes[0].reason == "identity_differs"
    assert "stored with 'window 64, sinks 4" in told.notes[0].detail


def test_more_windows_than_are_remembered_come_back_the_same(roomy: Slowed) -> None:
    with serving(roomy) as client:
        for window in range(64, 64 + MAX_KINDS + 5):
            client.generate(prompt(17), max_tokens=1, window=window)
        again = client.generate(prompt(17), max_tokens=1, window=64 + MAX_KINDS)
        forgotten = client.generate(prompt(17, seed=1) + prompt(5), max_tokens=1, window=64)
        first = client.generate(prompt(17, seed=1) + prompt(5), max_tokens=1, window=64)

    assert again.cached == {"L1": PAGE_TOKENS}
    assert forgotten.cached == {}
    assert first.cached == {"L1": PAGE_TOKENS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window must be from 0"),
        ({"window": 2**24 + 1}, "window must be from 0 .* to 16777216, got 16777217"),
        ({"window": 8}, "window must be at least a page, 16 tokens, got 8"),
        ({"window": 5000}, "window 5000 is more than the context of 2048 tokens: at most that"),
        ({"sinks": 4}, "sinks must be 0 without a window, got 4"),
        ({"window": 64, "sinks": 65}, "sinks must be from 0 to the window of 64, got 65"),
        ({"window": 64, "sinks": -1}, "sinks must be from 0 to the window of 64, got -1"),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_name(
    roomy: Slowed, options: dict[str, int], message: str
) -> None:
    with serving(roomy) as client, pytest.raises(ValueError, match=message):
        client.send(prompt(20), **options)


# ---- layers with windows of their own --------------------------------------------------------------------------


def test_a_hybrids_windowed_pages_outside_the_window_are_neither_held_nor_loaded(
    tiny_gemma: Path, tmp_path: Path
) -> None:
    runner = tiny_runner(tiny_gemma, 256, max_batch_tokens=64)
    p = prompt(200)
    watch = Watch(runner)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner)) as service,
        serving(runner, tmp_path / "s", max_batch_tokens=64) as client,
    ):
        off = client.generate(p, use_cache=False, max_tokens=16)
        cold = client.generate(p, max_tokens=16)
        warm = client.generate(p, max_tokens=16)
        before = promoted(client)
        sink_to_l4(client.worker, service)
        from_l4 = client.generate(p, max_tokens=16)
        loaded = promoted(client) - before
    (wanted,) = by_hand(runner, [p], 16, 64)  # type: ignore[arg-type]

    assert off.tokens == cold.tokens == warm.tokens == from_l4.tokens == wanted
    assert warm.usage.computed_tokens <= 200 - 192
    assert from_l4.cached == {"L4": 192}
    assert (
        loaded == 192 // PAGE_TOKENS + 2
    )  # all of the full layers', and what a window of 32 behind 192 reaches
    assert watch.most[0] == -(-215 // PAGE_TOKENS)
    assert watch.most[1] <= (32 + 64) // PAGE_TOKENS + 1


def promoted(client: Client) -> int:
    return client.worker.stats().tiers[TierName.HBM].promoted_pages


def test_a_preempted_hybrid_says_the_same(tiny_gemma: Path, tmp_path: Path) -> None:
    prompts = [prompt(20 + i, seed=i) for i in range(4)]
    with serving(tiny_runner(tiny_gemma, 512)) as client:
        wanted = client.together(prompts, max_tokens=60, use_cache=False)
    runner = tiny_runner(tiny_gemma, 44)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner)) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        names = [client.send(p, max_tokens=60) for p in prompts]
        results = [client.result(name).tokens for name in names]
        told = [client.worker.explain(name) for name in names]
        settle(client.worker, service)

    assert results == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0


def test_a_hybrid_takes_no_window_of_a_request(tiny_gemma: Path) -> None:
    with (
        serving(tiny_runner(tiny_gemma, 64)) as client,
        pytest.raises(ValueError, match="window 64 can't be served"),
    ):
        client.send(prompt(20), **WINDOW)
