"""What one request raises on the step loop ends that request, with its reason, and nothing else."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from waiting import until
from worker_kit import PAGE_TOKENS, Client, Result, Slowed, caching, serving, sink_to_l3, tiny_runner

from kvtier.workers.requests.api import EngineRequest, FinishReason, SamplingParams
from kvtier.workers.runner.runner import StepBatch


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 512, length).tolist())


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    return tiny_runner(tiny_llama, 256)


SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}
NEIGHBOURS: list[dict[str, Any]] = [{}, SAMPLED, {"min_tokens": 20, "logprobs": 3}]


def neighbours(client: Client) -> list[str]:
    return [
        client.send(prompt(40, seed), max_tokens=24, **sampling) for seed, sampling in enumerate(NEIGHBOURS)
    ]


def tokens_of(client: Client, names: list[str]) -> list[list[int]]:
    return [client.result(name).tokens for name in names]


def spoil(params: SamplingParams) -> SamplingParams:
    """Values that `validate` refuses, and that the sampler can do nothing with, come in behind it."""
    object.__setattr__(params, "temperature", 1.0)
    object.__setattr__(params, "seed", 2**300)
    return params


def send_bad(client: Client, name: str, n: int = 1) -> None:
    params = SamplingParams(max_tokens=8, n=n)
    client.worker.submit(EngineRequest(name, "default", prompt(30, 77), params))
    spoil(params)


def assert_ended_alone(client: Client, bad: Result, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """It ends as an error with its reason, is counted and logged once with where it was raised; the loop goes on."""
    assert bad.reason is FinishReason.ERROR
    assert said in str(bad.last.error)
    assert client.worker.is_healthy()
    assert client.worker.stats().totals.failed_requests == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None


@pytest.mark.parametrize("n", [1, 3])
def test_what_sampling_one_row_raises_ends_its_request_alone(
    roomy: Slowed, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(roomy) as client:
        alone = tokens_of(client, neighbours(client))

    with serving(roomy) as client:
        first = neighbours(client)[:2]
        send_bad(client, "bad", n)
        last = neighbours(client)
        results = [client.result("bad", index) for index in range(n)]

        assert tokens_of(client, first) == alone[:2]
        assert tokens_of(client, last) == alone
        assert {result.reason for result in results} == {FinishReason.ERROR}
        assert_ended_alone(client, results[0], "sampling failed: ", caplog)
    # `serving` has checked by now that nothing is left in use


def test_what_building_one_sequences_rows_raises_ends_its_request_alone(
    roomy: Slowed, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(roomy) as client:
        alone = tokens_of(client, neighbours(client))

    with serving(roomy) as client:
        bad = client.send(prompt(30, 77), max_tokens=500)
        client.first(bad)
        names = neighbours(client)

        def cut() -> None:
            (seq,) = client.worker._loop.requests.live[bad].sequences
            seq.tokens = seq.tokens[: seq.length - 1]

        client.worker._call(cut)  # on the step loop, between two steps
        result = client.result(bad)

        assert tokens_of(client, names) == alone
        assert_ended_alone(client, result, "building its rows failed: ", caplog)


def test_pages_that_were_never_computed_are_not_cached_when_their_rows_raise(roomy: Slowed) -> None:
    """Its rows leave the step: else its pages would be sealed as if they had been computed."""
    tokens = prompt(3 * PAGE_TOKENS + 1, 5)
    with serving(roomy, max_batch_tokens=2 * PAGE_TOKENS, max_sequences=4) as client:
        name = "bad"

        def cut(batch: StepBatch) -> None:
            (seq,) = client.worker._loop.requests.live[name].sequences
            seq.tokens = seq.tokens[: 2 * PAGE_TOKENS]
            roomy.before = lambda batch: None

        roomy.before = cut
        client.worker.submit(EngineRequest(name, "default", tokens, SamplingParams(max_tokens=4)))

        assert client.result(name).reason is FinishReason.ERROR
        assert len(client.worker.pages()) == 2
        again = client.generate(tokens, max_tokens=4)
        assert again.cached == {"L1": 2 * PAGE_TOKENS}
    with serving(roomy) as client:
        assert client.generate(tokens, max_tokens=4).tokens == again.tokens


def test_what_asking_for_one_sequences_pages_raises_ends_its_request_alone(
    roomy: Slowed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hint of who else holds its prompt lacks a field, so the message for the node can't be made."""
    with serving(roomy) as client:
        alone = tokens_of(client, neighbours(client))

    with caching(tmp_path) as cache, serving(roomy, tmp_path / "s") as client:
        tokens_of(client, neighbours(client))
        sink_to_l3(client.worker, cache)
        names = neighbours(client)
        params = SamplingParams(max_tokens=8)
        spec = EngineRequest("bad", "default", prompt(40, 77), params, remotes=(("n9", "[::1]:1", 2),))
        object.__setattr__(spec, "remotes", (("n9", "[::1]:1"),))
        client.worker.submit(spec)
        result = client.result("bad")

        assert tokens_of(client, names) == alone
        assert_ended_alone(client, result, "asking for its pages failed: TypeError", caplog)
        until(cache.idle, "the node's cache is idle")
        cache.check()


@pytest.mark.parametrize("eos", [[2, 600], [-1], [511, 2**31]])
def test_an_end_of_sequence_outside_the_vocabulary_never_comes_and_harms_nothing(
    tmp_path: Path, eos: list[int]
) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path / "model")
    with serving(tiny_runner(folder, 64)) as client:
        expected = client.generate(prompt(20), max_tokens=6).tokens
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))

    with serving(tiny_runner(folder, 64)) as client:
        result = client.generate(prompt(20), max_tokens=6, min_tokens=6)

        assert result.tokens == expected
        assert set(client.worker.info().eos_ids) == {token for token in eos if 0 <= token < 512}


def test_min_tokens_is_refused_where_every_token_is_a_stop(roomy: Slowed) -> None:
    with serving(roomy) as client, pytest.raises(ValueError, match="all 512 are stop ids"):
        client.send(prompt(20), min_tokens=1, stop_ids=tuple(range(512)))


def test_a_stop_id_outside_the_vocabulary_is_refused(roomy: Slowed) -> None:
    with serving(roomy) as client, pytest.raises(ValueError, match="token 512 is not in the vocabulary"):
        client.send(prompt(20), stop_ids=(512,))
