"""Log probabilities of a prompt's tokens: those of transformers' own forward, each told once, beside other requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from worker_kit import PAGE_TOKENS, Client, Result, Slowed, serving, tiny_runner

from kvtier.workers.requests.api import MAX_TOLD_PROMPT, EngineRequest, SamplingParams, TokenLogprobs
from kvtier.workers.scheduling.scheduler import PROMPT_LOGITS


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    return tiny_runner(tiny_llama, 256)


@pytest.fixture(scope="module")
def worker(roomy: Slowed) -> Iterator[Client]:
    with serving(roomy) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return model


def told(result: Result) -> list[TokenLogprobs]:
    """What was said of the prompt, in order and each position once, all before the first token."""
    entries: list[TokenLogprobs] = []
    for output in result.outputs:
        if output.prompt_logprobs:
            assert output.prompt_position == 1 + len(entries)
            assert not output.token_ids
        entries += output.prompt_logprobs
    first = next(i for i, output in enumerate(result.outputs) if output.token_ids)
    assert not any(output.prompt_logprobs for output in result.outputs[first:])
    return entries


def assert_is_references(
    entries: list[TokenLogprobs], tokens: list[int], most: int, reference: torch.nn.Module
) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits.double(), -1)
    assert len(entries) == len(tokens) - 1
    for position, entry in enumerate(entries):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[tokens[position + 1]]), abs=1e-4)
        values, ids = row.topk(most)
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [float(row[token]) for token, _ in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert len({token for token, _ in entry.top}) == len(ids)


@pytest.mark.parametrize("length", [1, 2, PAGE_TOKENS, PROMPT_LOGITS + 1, 3 * PROMPT_LOGITS + 5])
def test_a_prompts_log_probabilities_are_those_of_transformers(
    worker: Client, reference: torch.nn.Module, length: int
) -> None:
    tokens = prompt(length, length)
    plain = worker.generate(tokens, max_tokens=5)

    result = worker.generate(tokens, max_tokens=5, prompt_logprobs=4)

    assert_is_references(told(result), tokens, 4, reference)
    assert result.tokens == plain.tokens


def test_cached_pages_are_not_read_and_none_are_left(roomy: Slowed) -> None:
    tokens = prompt(5 * PAGE_TOKENS, 7)
    with serving(roomy) as client:
        first = client.generate(tokens, max_tokens=3, prompt_logprobs=1)
        assert client.worker.pages() == []
        client.generate(tokens, max_tokens=3)

        again = client.generate(tokens, max_tokens=3, prompt_logprobs=1)

    assert again.cached == {}
    assert told(again) == told(first)


def test_requests_beside_each_other_get_their_own_and_change_no_token(
    worker: Client, reference: torch.nn.Module
) -> None:
    prompts = [prompt(40 + 30 * i, 50 + i) for i in range(4)]
    alone = [worker.generate(tokens, max_tokens=12, n=1).tokens for tokens in prompts]

    names = [
        worker.send(tokens, max_tokens=12, n=1 + i % 2, prompt_logprobs=2 * (i % 3))
        for i, tokens in enumerate(prompts)
    ]
    results = [worker.result(name) for name in names]

    assert [result.tokens for result in results] == alone
    for i, (tokens, result) in enumerate(zip(prompts, results, strict=True)):
        if 2 * (i % 3):
            assert_is_references(told(result), tokens, 2 * (i % 3), reference)
        else:
            assert told(result) == []


def test_a_prompt_that_is_computed_again_is_told_once(tiny_llama: Path, reference: torch.nn.Module) -> None:
    """It is computed three tokens a step, meanwhile an older one grows, and takes its pages in the middle of it."""
    tokens = prompt(110, 2)
    with serving(tiny_runner(tiny_llama, 10), max_batch_tokens=4, max_sequences=2) as client:
        old = client.send(prompt(17, 1), max_tokens=70)
        client.first(old)
        name = client.send(tokens, max_tokens=3, prompt_logprobs=1)
        result = client.result(name)
        explained = client.worker.explain(name)
        client.result(old)

    assert explained is not None
    assert explained.preemptions
    assert_is_references(told(result), tokens, 1, reference)


def test_what_goes_on_from_another_worker_tells_nothing_of_the_prompt_again(worker: Client) -> None:
    tokens = prompt(50, 4)
    params = SamplingParams(max_tokens=8, prompt_logprobs=2)
    whole = worker.result(worker.send(tokens, max_tokens=8, prompt_logprobs=2)).tokens

    spec = EngineRequest("resumed", "default", tuple(tokens), params, resumed=(tuple(whole[:3]),))
    worker.worker.submit(spec)
    result = worker.result("resumed")

    assert result.tokens == whole[3:]
    assert told(result) == []


def test_a_prompt_too_long_to_be_told_of_is_refused(worker: Client) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_TOLD_PROMPT} tokens, got {MAX_TOLD_PROMPT + 1}"):
        worker.send([1] * (MAX_TOLD_PROMPT + 1), prompt_logprobs=1)
