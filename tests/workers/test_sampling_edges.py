"""A real worker with every sampling field at its edges, several requests beside each other: nothing hurts anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_kit import Client, serving, tiny_runner

from kvtier.workers.requests.api import BIAS_RANGE, MAX_LOGIT_BIAS, RANGES, FinishReason

VOCAB = 512
MAX_TOKENS = 6
ENDS = {
    name: [*([0] if allowed.zero else []), 1e-320 if allowed.is_open else allowed.least, allowed.most]
    for name, allowed in RANGES.items()
}
NEIGHBOURS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.6, "seed": 4},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02, "seed": 5, "logprobs": 2, "min_tokens": 4},
]


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def worker(tiny_llama: Path) -> Iterator[Client]:
    """Serves all that hypothesis finds, one after the other; at the end nothing is left in use."""
    with serving(tiny_runner(tiny_llama, 256), max_sequences=24) as client:
        yield client


@pytest.fixture(scope="module")
def alone(worker: Client) -> list[list[int]]:
    return [worker.generate(prompt(20, i), max_tokens=12, **p).tokens for i, p in enumerate(NEIGHBOURS)]


@st.composite
def edges(draw: st.DrawFn) -> dict[str, Any]:
    """Each field at an end of its range, or left as it is."""
    fields: dict[str, Any] = {
        name: draw(st.sampled_from(ends)) for name, ends in ENDS.items() if draw(st.booleans())
    }
    fields["max_tokens"] = draw(st.sampled_from([1, MAX_TOKENS]))
    fields["min_tokens"] = draw(st.sampled_from([0, fields["max_tokens"]]))
    fields["ignore_eos"] = draw(st.booleans())
    fields["stop_ids"] = draw(st.sampled_from([(), (0,), (VOCAB - 1,), tuple(range(64))]))
    count = draw(st.sampled_from([0, 1, min(VOCAB, MAX_LOGIT_BIAS)]))
    bias = draw(st.sampled_from([BIAS_RANGE.least, 0.0, BIAS_RANGE.most]))
    fields["logit_bias"] = tuple((token, bias) for token in range(VOCAB - count, VOCAB))
    return fields


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(edges(), min_size=1, max_size=3), st.integers(1, 40))
def test_requests_at_the_edges_end_well_and_change_no_token_of_those_beside_them(
    worker: Client, alone: list[list[int]], asked: list[dict[str, Any]], length: int
) -> None:
    names = [worker.send(prompt(length, 90 + i), **fields) for i, fields in enumerate(asked)]
    beside = [worker.send(prompt(20, i), max_tokens=12, **p) for i, p in enumerate(NEIGHBOURS)]

    for name, fields in zip(names, asked, strict=True):
        for index in range(fields.get("n", 1)):
            result = worker.result(name, index)
            assert result.reason in (FinishReason.STOP, FinishReason.LENGTH), result.last.error
            assert fields["min_tokens"] <= len(result.tokens) <= fields["max_tokens"]
    assert [worker.result(name).tokens for name in beside] == alone
    assert worker.worker.is_healthy()
    assert worker.worker.stats().totals.failed_requests == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edges(), st.integers(1, 40))
def test_a_request_at_the_edges_gives_the_same_tokens_alone_and_in_company(
    worker: Client, fields: dict[str, Any], length: int
) -> None:
    tokens = prompt(length, 77)
    by_itself = worker.send(tokens, **fields)
    n = fields.get("n", 1)
    expected = [worker.result(by_itself, index).tokens for index in range(n)]

    names = [worker.send(prompt(20, i), max_tokens=12, **p) for i, p in enumerate(NEIGHBOURS)]
    again = worker.send(tokens, **fields)

    assert [worker.result(again, index).tokens for index in range(n)] == expected
    for name in names:
        worker.result(name)
