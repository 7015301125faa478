"""The decode worker, with a real tiny model and, where tiers below L1 matter, a real node's cache."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waiting import until
from worker_kit import (
    PAGE_TOKENS,
    Slowed,
    caching,
    flip_bit,
    keys,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import TierName
from kvtier.tier.stores.base import Outcome
from kvtier.workers.requests.api import EngineRequest, FinishReason, QueueFull, SamplingParams, WorkerStopped
from kvtier.workers.runner.runner import StepBatch


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    """A runner with more L1 than any test here fills; its arena is used by one worker after the other."""
    return tiny_runner(tiny_llama, 256)


class Gate:
    """Stops a runner before a step, by default its next one, until the test lets it go on."""

    def __init__(self, runner: Slowed, step: int = 1) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._steps_left = step
        runner.before = self._wait
        self._runner = runner

    def _wait(self, batch: StepBatch) -> None:
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        self._reached.set()
        assert self._open.wait(120)

    def reached(self) -> None:
        assert self._reached.wait(120)

    def open(self) -> None:
        self._runner.before = lambda batch: None
        self._open.set()


# ---- the same-tokens law and the usage law ---------------------------------------------------------------------


def test_tokens_are_the_same_from_every_tier_and_usage_names_it(roomy: Slowed, tmp_path: Path) -> None:
    p = prompt(100)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        off = client.generate(p, use_cache=False, max_tokens=40)
        cold = client.generate(p, max_tokens=40)
        hit = client.generate(p, max_tokens=40)
        sink_to_l3(client.worker, service)
        from_l3 = client.generate(p, max_tokens=40)
        sink_to_l4(client.worker, service)
        from_l4 = client.generate(p, max_tokens=40)
        stats = client.worker.stats()

    assert off.cached == cold.cached == {}
    assert hit.cached == {"L1": 99}
    assert from_l3.cached == {"L3": 96}
    assert from_l4.cached == {"L4": 96}
    assert off.tokens == cold.tokens == hit.tokens == from_l3.tokens == from_l4.tokens
    assert stats.totals.prompt_tokens == 500
    assert stats.totals.cached_tokens == 99 + 96 + 96
    assert {tier.value: counters.hit_tokens for tier, counters in stats.tiers.items()} == {
        "L1": 99,
        "L3": 96,
        "L4": 96,
        "L2": 0,
        "remote": 0,
    }
    assert {tier.value: counters.lookups_tokens for tier, counters in stats.tiers.items()} == {
        "L1": 400,
        "L3": 300,
        "L4": 204,
        "L2": 0,
        "remote": 0,
    }


def test_a_conversation_finds_its_own_answers_again(roomy: Slowed) -> None:
    with serving(roomy) as client:
        first = client.generate(prompt(50), max_tokens=30)
        history = prompt(50) + first.tokens + prompt(10, seed=1)
        second = client.generate(history, max_tokens=5)
        off = client.generate(history, max_tokens=5, use_cache=False)

    assert second.cached == {"L1": 64}  # whole pages: the answer's last tokens fill none
    assert second.tokens == off.tokens


def test_preempted_requests_say_the_same_and_recompute_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    runner = tiny_runner(tiny_llama, 24)
    prompts = [prompt(60 + i, seed=i) for i in range(4)]
    with caching(tmp_path) as service, serving(runner, tmp_path / "s") as client:
        wanted = [client.generate(p, max_tokens=100, use_cache=False).tokens for p in prompts]
        settle(client.worker, service)
        runner.rows = 0
        names = [client.send(p, max_tokens=100) for p in prompts]
        results = [client.result(name) for name in names]
        told = [client.worker.explain(name) for name in names]
        lost = sum(r.usage.computed_tokens for r in results) - sum(map(len, prompts))

    assert [r.tokens for r in results] == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0
    assert lost == 0
    assert runner.rows == sum(len(p) + 99 for p in prompts)


def test_preempted_requests_say_the_same_without_a_node(tiny_llama: Path) -> None:
    runner = tiny_runner(tiny_llama, 24)
    prompts = [prompt(60 + i, seed=i) for i in range(4)]
    with serving(runner) as client:
        wanted = [client.generate(p, max_tokens=100, use_cache=False).tokens for p in prompts]
        names = [client.send(p, max_tokens=100, use_cache=i % 2 == 0) for i, p in enumerate(prompts)]
        results = [client.result(name) for name in names]
        told = [client.worker.explain(name) for name in names]

    assert [r.tokens for r in results] == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0


def test_pages_sink_and_rise_through_small_tiers_unharmed(tiny_llama: Path, tmp_path: Path) -> None:
    runner = tiny_runner(tiny_llama, 40)
    system = prompt(150, seed=99)
    with (
        caching(tmp_path, l3_pages=48, l4_bytes=4 << 20) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        wanted = [
            client.generate(system + prompt(40, seed=i), max_tokens=20, use_cache=False).tokens
            for i in range(12)
        ]
        for _ in range(2):
            names = [client.send(system + prompt(40, seed=i), max_tokens=20) for i in range(12)]
            assert [client.result(name).tokens for name in names] == wanted
        settle(client.worker, service)
        stats = client.worker.stats()

    assert stats.tiers[TierName.HBM].evicted_pages > 0
    assert stats.tiers[TierName.HBM].promoted_pages > 0
    assert stats.tiers[TierName.HBM].used_bytes <= stats.tiers[TierName.HBM].capacity_bytes


def test_a_prompt_of_whole_pages_still_computes_its_last_token(roomy: Slowed, tmp_path: Path) -> None:
    p = prompt(4 * PAGE_TOKENS)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        cold = client.generate(p)
        hit = client.generate(p)
        sink_to_l3(client.worker, service)
        from_l3 = client.generate(p)

    assert hit.cached == {"L1": len(p) - 1}
    assert from_l3.cached == {"L3": len(p) - 1}
    assert cold.tokens == hit.tokens == from_l3.tokens


def test_a_burst_with_one_prefix_computes_it_once(roomy: Slowed) -> None:
    system = prompt(200, seed=5)
    with serving(roomy) as client:
        roomy.rows = 0
        names = [client.send([*system, i, i], max_tokens=1) for i in range(8)]
        results = [client.result(name) for name in names]
        rows = roomy.rows

    assert sum(r.usage.computed_tokens for r in results) == rows
    assert rows < 200 + 8 * (2 + PAGE_TOKENS)


def test_a_request_without_cache_leaves_nothing_anywhere(roomy: Slowed, tmp_path: Path) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(prompt(70), use_cache=False)
        settle(client.worker, service)
        assert client.worker.pages() == service.pages() == []
        stats = client.worker.stats()

    assert all(counters.lookups_tokens == 0 for counters in stats.tiers.values())


def test_tenants_never_find_each_others_pages(roomy: Slowed, tmp_path: Path) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        mine = client.generate(prompt(70))
        settle(client.worker, service)
        theirs = client.generate(prompt(70), tenant="other")

    assert theirs.cached == {}
    assert theirs.tokens == mine.tokens


# ---- saving and loading ----------------------------------------------------------------------------------------


def test_full_pages_are_written_through_once(roomy: Slowed, tmp_path: Path) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(prompt(100), max_tokens=30)
        settle(client.worker, service)
        assert {page.key for page in service.pages(tier=TierName.HOST)} == {
            p.key for p in client.worker.pages()
        }
        stored = service.stats().tiers[TierName.HOST].demoted_pages
        assert stored == (100 + 29) // PAGE_TOKENS
        sink_to_l3(client.worker, service)
        client.generate(prompt(100), max_tokens=30)
        settle(client.worker, service)

        # The prompt's pages came from L3; the answer's were computed again, and L3 had them.
        assert service.stats().tiers[TierName.HOST].demoted_pages == stored


def test_pages_that_find_no_slot_are_saved_when_there_is_one(roomy: Slowed, tmp_path: Path) -> None:
    """The stock is an eighth of L3: a long prompt fills more pages in one step than it has slots."""
    with caching(tmp_path, l3_pages=64) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(prompt(255), max_tokens=1)
        settle(client.worker, service)

        assert len(service.pages(tier=TierName.HOST)) == 15


def test_a_damaged_page_in_l3_is_a_miss_and_is_dropped(roomy: Slowed, tmp_path: Path) -> None:
    p = prompt(100)
    with caching(tmp_path, l4_bytes=0) as service, serving(roomy, tmp_path / "s") as client:
        cold = client.generate(p)
        sink_to_l3(client.worker, service)
        flip_bit(tmp_path / "s", roomy, depth=2)

        again = client.generate(p)
        settle(client.worker, service)

        assert again.tokens == cold.tokens
        assert again.cached == {"L3": 2 * PAGE_TOKENS}
        told = client.worker.explain("r2")
        assert told is not None
        assert [(n.start, n.end, n.tier, n.reason) for n in told.notes] == [
            (0, 32, "L3", ""),
            (32, 96, "computed", "corrupt"),
            (96, 100, "computed", "partial_page"),
        ]
        assert service.stats().tiers[TierName.HOST].corrupt_pages == 1


def test_a_late_load_loses_to_recompute(roomy: Slowed, tmp_path: Path) -> None:
    p = prompt(100)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        cold = client.generate(p)
        sink_to_l4(client.worker, service)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s", load_deadline_ms=1e-6) as client:
        late = client.generate(p)
        told = client.worker.explain("r1")
        settle(client.worker, service)

    assert late.tokens == cold.tokens
    assert late.cached == {}
    assert told is not None
    assert told.notes[0].reason == "deadline"


def test_a_restarted_worker_and_node_find_everything_in_l4(roomy: Slowed, tmp_path: Path) -> None:
    p = prompt(100)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        cold = client.generate(p)
        settle(client.worker, service)
    with caching(tmp_path), serving(roomy, tmp_path / "s") as client:
        warm = client.generate(p)

    assert warm.tokens == cold.tokens
    assert warm.cached == {"L4": 96}


NODE = """
import sys
from pathlib import Path
from kvtier.tier.node.service import CacheService
folder = Path(sys.argv[1])
service = CacheService("n0", folder / "s", 8192, 256 * 12288, folder / "l4", 32 << 20)
service.start()
print("ready", flush=True)
sys.stdin.read()
"""


def start_node(folder: Path) -> subprocess.Popen[str]:
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    assert node.stdout.readline() == "ready\n"
    return node


def test_a_killed_node_costs_hits_and_no_request(tiny_llama: Path, tmp_path: Path) -> None:
    runner = tiny_runner(tiny_llama, 24)
    prompts = [prompt(60 + i, seed=i) for i in range(4)]
    node = start_node(tmp_path)
    try:
        with serving(runner, tmp_path / "s") as client:
            wanted = [client.generate(p, max_tokens=100, use_cache=False).tokens for p in prompts]
            names = [client.send(p, max_tokens=100) for p in prompts]
            client.first(names[0])
            node.kill()
            assert [client.result(name).tokens for name in names] == wanted
            until(lambda: not client.worker.is_connected, "the worker sees that its node is gone")
            client.worker.check()

            node.wait()
            node = start_node(tmp_path)
            until(lambda: client.worker.is_connected, "the worker finds its node again")
            assert [client.generate(p, max_tokens=100).tokens for p in prompts] == wanted
    finally:
        node.kill()
        node.wait()


def test_pages_sealed_while_the_node_was_away_are_saved_when_it_comes(roomy: Slowed, tmp_path: Path) -> None:
    with serving(roomy, tmp_path / "s", connected=False) as client:
        cold = client.generate(prompt(100))
        with caching(tmp_path) as service:
            until(lambda: client.worker.is_connected, "the worker finds its node")
            sink_to_l3(client.worker, service)
            assert client.generate(prompt(100)).cached == {"L3": 96}
            settle(client.worker, service)
        assert client.generate(prompt(100)).tokens == cold.tokens


def test_what_is_to_be_saved_stays_bounded_while_no_node_comes(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_runner(tiny_llama, 8), tmp_path / "s", connected=False) as client:
        for seed in range(30):
            client.generate(prompt(110, seed), max_tokens=1)
        client.worker.check()
        assert client.worker.stats().tiers[TierName.HBM].evicted_pages > 100


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_everything_at_once_changes_no_token_and_leaks_nothing(
    tiny_llama: Path, roomy: Slowed, tmp_path: Path, seed: int
) -> None:
    """Tiny tiers, siblings, cancellations, evictions, pins, clears, and a node that restarts in the middle."""
    rng = random.Random(seed)
    requests = [stormy(rng) for _ in range(20)]
    with serving(roomy) as client:
        truth = []
        for tokens, options in requests:
            name = client.send(tokens, **{**options, "use_cache": False})
            truth.append([client.result(name, index).tokens for index in range(options["n"])])

    runner = tiny_runner(tiny_llama, 16)
    with serving(
        runner, tmp_path / "s", connected=False, load_deadline_ms=rng.choice([2.0, 2000.0])
    ) as client:
        for half in range(2):
            with caching(tmp_path, l3_pages=24, l4_bytes=4 << 20) as service:
                until(lambda: client.worker.is_connected, "the worker finds its node")
                sent = [client.send(tokens, **options) for tokens, options in requests]
                for name in rng.sample(sent, 4):
                    rng.choice([client.worker.cancel, client.worker.explain])(name)
                    client.worker.pin(keys(client.worker)[:2])
                    client.worker.evict(keys(client.worker)[-1:])
                if half:
                    client.worker.clear()
                else:
                    service.stop(0)
                for name, expected in zip(sent, truth, strict=True):
                    for index, tokens in enumerate(expected):
                        result = client.result(name, index)
                        is_whole = result.reason is not FinishReason.CANCELLED
                        assert result.tokens == (tokens if is_whole else tokens[: len(result.tokens)])
                client.worker.unpin(keys(client.worker))
                until(client.worker.idle, "the worker is idle")
                client.worker.check()


def stormy(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A request that fits 16 pages, with a prefix that others have too."""
    family = prompt(rng.choice([20, 64, 100]), seed=rng.randrange(3))
    tokens = family[: rng.randint(5, 100)] + prompt(rng.randint(1, 30), seed=rng.randrange(4))
    options = {
        "n": rng.choice([1, 1, 2, 3]),
        "max_tokens": rng.randint(1, 50),
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.randrange(3),
        "use_cache": rng.random() < 0.9,
    }
    return tokens, options


# ---- the life of a request -------------------------------------------------------------------------------------


def test_a_step_is_one_message(roomy: Slowed) -> None:
    with serving(roomy) as client:
        names = [client.send(prompt(20, seed=i), max_tokens=20) for i in range(4)]
        for name in names:
            client.result(name)

    assert max(len(step) for step in client.steps) == 4
    for step in client.steps:
        assert len({(output.request_id, output.index) for output in step}) == len(step)


def test_a_cancelled_request_ends_with_what_it_has_and_frees_its_pages(roomy: Slowed) -> None:
    with serving(roomy) as client:
        name = client.send(prompt(40), max_tokens=1500)
        client.first(name)
        client.worker.cancel(name)
        result = client.result(name)
        until(client.worker.idle, "the worker is idle")
        stats = client.worker.stats()

        assert result.reason is FinishReason.CANCELLED
        assert result.usage.completion_tokens == len(result.tokens)
        assert stats.totals.aborted_prompt_tokens == 0
        assert stats.tiers[TierName.HBM].pages == len(client.worker.pages())


def test_a_request_cancelled_before_its_first_token_counts_as_aborted_only(roomy: Slowed) -> None:
    with serving(roomy) as client:
        gate = Gate(roomy)
        name = client.send(prompt(300), max_tokens=5)
        gate.reached()
        client.worker.cancel(name)
        gate.open()
        result = client.result(name)
        stats = client.worker.stats()

        assert result.tokens == []
        assert result.last.usage is None
        assert stats.totals.aborted_prompt_tokens == 300
        assert stats.totals.prompt_tokens == stats.totals.requests == 0
        assert client.worker.explain(name) is not None


def test_cancelling_in_the_middle_of_a_load_leaks_nothing(roomy: Slowed, tmp_path: Path) -> None:
    p = prompt(1000)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(p, max_tokens=1)
        sink_to_l4(client.worker, service)
        for _ in range(5):
            name = client.send(p, max_tokens=1)
            client.worker.cancel(name)
            client.result(name)
        settle(client.worker, service)
        client.worker.check()
        service.check()


def test_every_sequence_of_a_request_is_cancelled(roomy: Slowed) -> None:
    with serving(roomy) as client:
        gate = Gate(roomy)
        name = client.send(prompt(20), n=3, max_tokens=100)
        gate.reached()
        client.worker.cancel(name)
        gate.open()
        reasons = [client.result(name, index).reason for index in range(3)]

    assert reasons == [FinishReason.CANCELLED] * 3


def test_siblings_share_one_prompt(roomy: Slowed) -> None:
    p = prompt(40)
    with serving(roomy) as client:
        roomy.rows = 0
        name = client.send(p, n=3, max_tokens=10, temperature=1.0, seed=7)
        results = [client.result(name, index) for index in range(3)]
        rows = roomy.rows
        stats = client.worker.stats()
        alone = client.generate(p, max_tokens=10, temperature=1.0, seed=7)

    assert rows == 40 + 3 * 9
    assert stats.totals.prompt_tokens == 40
    assert stats.totals.requests == 1
    assert len({tuple(r.tokens) for r in results}) == 3
    assert alone.tokens == results[0].tokens


@pytest.mark.parametrize("use_cache", [True, False])
def test_siblings_in_a_small_l1_say_what_they_say_in_a_large_one(
    tiny_llama: Path, roomy: Slowed, use_cache: bool
) -> None:
    options = {"n": 4, "max_tokens": 60, "temperature": 1.0, "seed": 3, "use_cache": use_cache}
    tokens = []
    for runner in (roomy, tiny_runner(tiny_llama, 10)):
        with serving(runner) as client:
            name = client.send(prompt(70), **options)
            tokens.append([client.result(name, index).tokens for index in range(4)])

    assert tokens[0] == tokens[1]


def test_a_seed_says_the_same_in_any_company(roomy: Slowed) -> None:
    options = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95, "seed": 42}
    with serving(roomy) as client:
        alone = client.generate(prompt(30), **options)
        crowd = [client.send(prompt(33, seed=i), max_tokens=30, temperature=1.2, seed=i) for i in range(5)]
        among = client.generate(prompt(30), **options)
        other = client.generate(prompt(30), **{**options, "seed": 43})
        for name in crowd:
            client.result(name)

    assert among.tokens == alone.tokens
    assert other.tokens != alone.tokens


def test_a_sequence_stops_at_its_stop_ids_but_not_before_min_tokens(roomy: Slowed) -> None:
    with serving(roomy) as client:
        free = client.generate(prompt(30), max_tokens=12)
        stop = free.tokens[3]
        stopped = client.generate(prompt(30), max_tokens=12, stop_ids=(stop,))
        later = client.generate(prompt(30), max_tokens=12, stop_ids=(stop,), min_tokens=8)

    first = free.tokens.index(stop)
    assert free.reason is FinishReason.LENGTH
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.reason is FinishReason.STOP
    assert stop not in later.tokens[:8]


def test_the_context_is_the_longest_a_sequence_gets(roomy: Slowed) -> None:
    with serving(roomy) as client:
        result = client.generate(prompt(2040), max_tokens=100)

    assert len(result.tokens) == 8
    assert result.reason is FinishReason.LENGTH


def test_log_probabilities_come_with_each_token(roomy: Slowed) -> None:
    with serving(roomy) as client:
        result = client.generate(prompt(30), max_tokens=4, logprobs=3)

    assert len(result.logprobs) == 4
    for token, logprobs in zip(result.tokens, result.logprobs, strict=True):
        assert logprobs.top[0] == (token, logprobs.logprob)
        assert len(logprobs.top) == 3


def test_timings_cover_the_whole_request(roomy: Slowed) -> None:
    with serving(roomy) as client:
        timings = client.generate(prompt(100), max_tokens=10).last.timings

    assert timings is not None
    assert timings.ttft >= timings.prefill > 0
    assert timings.decode > 0
    assert min(timings.queue, timings.load) >= 0


# ---- refusals and failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EngineRequest("r", "default", (), SamplingParams()), "the prompt is empty"),
        (EngineRequest("r", "nothing", (1,), SamplingParams()), "unknown tenant 'nothing'"),
        (
            EngineRequest("r", "default", (1, 512), SamplingParams()),
            "token 512 is not in the vocabulary of 512",
        ),
        (EngineRequest("r", "default", (-1,), SamplingParams()), "token -1 is not in the vocabulary"),
        (
            EngineRequest("r", "default", (1,) * 2048, SamplingParams()),
            "prompt of 2048 tokens leaves no room",
        ),
        (EngineRequest("r", "default", (1,), SamplingParams(temperature=-1.0)), "temperature must be 0"),
    ],
)
def test_a_bad_request_is_refused_by_name(roomy: Slowed, request_: EngineRequest, message: str) -> None:
    with serving(roomy) as client, pytest.raises(ValueError, match=message):
        client.worker.submit(request_)


def test_a_request_that_l1_can_never_hold_is_refused(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, 4)) as client:
        with pytest.raises(ValueError, match="need 5 pages of 16 tokens at once, 40960 bytes; L1 has 32768"):
            client.send(prompt(60), max_tokens=6)
        assert len(client.generate(prompt(60), max_tokens=5).tokens) == 5
        info = client.worker.info()
        assert (info.max_context, info.is_l1_short) == (64, True)


def test_the_context_that_is_named_is_what_l1_can_hold(tiny_llama: Path, roomy: Slowed) -> None:
    with serving(tiny_runner(tiny_llama, 4)) as client:
        context = client.worker.info().max_context
        assert context == 4 * PAGE_TOKENS
        assert len(client.generate(prompt(context - 1), max_tokens=1).tokens) == 1
    with serving(roomy) as client:
        assert client.worker.info().max_context == 2048


def test_a_full_queue_refuses(roomy: Slowed) -> None:
    with serving(roomy, max_waiting=3, max_sequences=1) as client:
        gate = Gate(roomy)
        names = [client.send(prompt(20), max_tokens=2)]
        gate.reached()
        names += [client.send(prompt(20), max_tokens=2) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests waiting"):
            client.send(prompt(20))
        gate.open()
        for name in names:
            client.result(name)


def test_logits_that_are_no_numbers_end_their_request_alone(roomy: Slowed) -> None:
    def spoil(batch: StepBatch, logits: torch.Tensor) -> torch.Tensor:
        spoiled = logits.clone()
        for i, row in enumerate(batch.logit_rows.tolist()):
            if batch.token_ids[row] == 511:
                spoiled[i, 0] = torch.nan
        return spoiled

    with serving(roomy) as client:
        roomy.after = spoil
        bad = client.send([*prompt(30), 511], n=2)
        good = client.generate(prompt(30))
        results = [client.result(bad, index) for index in range(2)]
        roomy.after = lambda batch, logits: logits
        assert client.worker.is_healthy()

    assert [r.reason for r in results] == [FinishReason.ERROR] * 2
    assert results[0].last.error == "the model's output was not a number"
    assert len(good.tokens) == 8


def test_a_failure_of_the_loop_fails_all_requests_loudly(roomy: Slowed) -> None:
    def fail(batch: StepBatch) -> None:
        raise RuntimeError("the model broke")

    with serving(roomy) as client:
        roomy.before = fail
        results = [client.result(client.send(prompt(30))) for _ in range(1)]
        roomy.before = lambda batch: None
        until(lambda: not client.worker.is_healthy(), "the worker knows that it is broken")

        assert [r.reason for r in results] == [FinishReason.CANCELLED]
        assert "the model broke" in str(results[0].last.error)
        with pytest.raises(WorkerStopped, match="the model broke"):
            client.send(prompt(30))
        with pytest.raises(WorkerStopped):
            client.worker.stats()


def test_stopping_cancels_what_runs_and_answers_who_waits(roomy: Slowed) -> None:
    with serving(roomy) as client:
        name = client.send(prompt(30), max_tokens=1500)
        client.first(name)
        client.worker.stop()

        assert client.result(name).reason is FinishReason.CANCELLED
        with pytest.raises(WorkerStopped):
            client.send(prompt(30))


# ---- explain and administration --------------------------------------------------------------------------------


def test_explain_says_where_each_stretch_was_found_and_why_the_rest_was_not(
    roomy: Slowed, tmp_path: Path
) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        cold = client.send(prompt(100))
        client.result(cold)
        half = client.send(prompt(60) + prompt(60, seed=1))
        client.result(half)
        off = client.send(prompt(100), use_cache=False)
        client.result(off)
        settle(client.worker, service)
        told = [client.worker.explain(name) for name in (cold, half, off)]

    notes = [[(n.start, n.end, n.tier, n.reason) for n in t.notes] for t in told if t is not None]
    assert notes == [
        [(0, 96, "computed", "never_stored"), (96, 100, "computed", "partial_page")],
        [
            (0, 60, "L1", ""),
            (60, 112, "computed", "never_stored"),
            (112, 120, "computed", "partial_page"),
        ],
        [(0, 100, "computed", "cache_off")],
    ]
    assert told[1] is not None
    assert told[1].usage is not None
    assert told[1].usage.completion_tokens == 8


def test_explain_without_a_node_tells_what_l1_evicted(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, 8)) as client:
        client.generate(prompt(100))
        client.generate(prompt(110, seed=1))
        name = client.send(prompt(100))
        client.result(name)
        told = client.worker.explain(name)
        assert client.worker.explain("nothing") is None

    assert told is not None
    assert told.notes[0].reason == "evicted"
    assert "L1" in told.notes[0].detail


def test_explain_with_a_node_that_caches_nothing_tells_what_l1_evicted(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with (
        caching(tmp_path, l3_pages=0, l4_bytes=0),
        serving(tiny_runner(tiny_llama, 8), tmp_path / "s") as client,
    ):
        client.generate(prompt(100))
        client.generate(prompt(110, seed=1))
        name = client.send(prompt(100))
        client.result(name)
        told = client.worker.explain(name)

    assert told is not None
    assert told.notes[0].reason == "evicted"
    assert "L1" in told.notes[0].detail


def test_explain_names_a_page_size_that_differs(roomy: Slowed, tiny_llama: Path, tmp_path: Path) -> None:
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        client.generate(prompt(100))
        settle(client.worker, service)
    large = tiny_runner(tiny_llama, 64, page_tokens=64)
    with caching(tmp_path, page_bytes=page_sizes(large)), serving(large, tmp_path / "s") as client:
        name = client.send(prompt(100))
        client.result(name)
        told = client.worker.explain(name)

    assert told is not None
    assert told.notes[0].reason == "identity_differs"
    assert "page_tokens is '64', stored with '16'" in told.notes[0].detail


def test_pinned_pages_are_not_evicted(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, 16)) as client:
        client.generate(prompt(70))
        pinned = [key for key, _ in client.worker.pin(keys(client.worker))]
        client.generate(prompt(150, seed=1))
        assert set(pinned) <= set(keys(client.worker))
        assert {o for _, o in client.worker.evict(pinned)} == {Outcome.REJECTED}
        assert client.generate(prompt(70)).cached == {"L1": 64}
        assert all(page.pinned for page in client.worker.pages() if bytes.fromhex(page.key) in pinned)

        client.worker.unpin(pinned)
        assert {o for _, o in client.worker.evict(pinned)} == {Outcome.ACCEPTED}
        assert not set(pinned) & set(keys(client.worker))


def test_verbs_on_pages_that_are_not_there_say_missing(roomy: Slowed) -> None:
    with serving(roomy) as client:
        for verb in (client.worker.pin, client.worker.unpin, client.worker.evict, client.worker.verify):
            assert verb([b"x" * 32]) == [(b"x" * 32, Outcome.MISSING)]


def test_pages_in_use_are_evicted_when_their_users_end(roomy: Slowed) -> None:
    with serving(roomy) as client:
        name = client.send(prompt(40), max_tokens=1500)
        client.first(name)
        first = keys(client.worker)[0]
        assert client.worker.evict([first]) == [(first, Outcome.DEFERRED)]
        client.worker.cancel(name)
        client.result(name)
        assert first not in keys(client.worker)


def test_a_page_that_fills_in_its_sequences_last_step_goes_with_those_to_be_evicted(roomy: Slowed) -> None:
    """A page was sealed, then dropped at its sequence's end in the same step, and saving it failed the loop."""
    with serving(roomy) as client:
        gate = Gate(roomy, step=8)
        name = client.send(
            prompt(40), max_tokens=9
        )  # 48 tokens are computed: the last step fills the third page
        gate.reached()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: client.worker.evict(keys(client.worker)))
            gate.open()
            outcomes = waiting.result()
        result = client.result(name)

        assert len(result.tokens) == 9
        assert {outcome for _, outcome in outcomes} <= {Outcome.DEFERRED, Outcome.ACCEPTED}


def test_clear_takes_one_tenants_pages_even_from_running_requests(roomy: Slowed) -> None:
    with serving(roomy) as client:
        client.generate(prompt(40), tenant="other")
        running = client.send(prompt(40), max_tokens=1500)
        client.first(running)

        outcomes = client.worker.clear("default")

        assert {outcome for _, outcome in outcomes} == {Outcome.DEFERRED}
        assert client.generate(prompt(40)).cached == {}
        assert client.generate(prompt(40), tenant="other").cached == {"L1": 32}
        client.worker.cancel(running)
        client.result(running)
        assert client.generate(prompt(40)).cached == {"L1": 32}
        client.worker.clear()
        assert client.worker.pages() == []


def test_verify_finds_and_drops_damaged_pages(roomy: Slowed) -> None:
    with serving(roomy) as client:
        cold = client.generate(prompt(70))
        assert {outcome for _, outcome in client.worker.verify()} == {Outcome.ACCEPTED}
        roomy.arena[:, 3] ^= 1

        assert {outcome for _, outcome in client.worker.verify()} == {Outcome.MISSING}

        assert client.worker.pages() == []
        assert client.worker.stats().tiers[TierName.HBM].corrupt_pages >= 1
        assert client.generate(prompt(70)).tokens == cold.tokens


def test_listing_names_whose_and_which_page_it_is(roomy: Slowed) -> None:
    with serving(roomy) as client:
        client.generate(prompt(40))
        client.generate(prompt(40), tenant="other")
        mine = client.worker.pages(tenant="default")

        assert [(page.depth, page.tier, page.owner, page.tokens) for page in mine] == [
            (0, TierName.HBM, "w0", PAGE_TOKENS),
            (1, TierName.HBM, "w0", PAGE_TOKENS),
        ]
        assert mine[0].parent == mine[0].root == root_key(roomy.root_fields()).hex()
        assert mine[1].parent == mine[0].key
        assert client.worker.pages(tier=TierName.HOST) == []
        assert len(client.worker.pages(limit=3)) == 3


def test_page_fill_counts_the_filled_part_of_the_pages_held(roomy: Slowed) -> None:
    with serving(roomy) as client:
        name = client.send(prompt(40), max_tokens=1000)
        client.first(name)
        totals = client.worker.stats().totals
        client.worker.cancel(name)
        client.result(name)
        after = client.worker.stats().totals

    assert 0 < totals.held_page_tokens - totals.used_page_tokens < PAGE_TOKENS
    assert after.held_page_tokens == after.used_page_tokens > 0
