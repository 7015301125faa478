"""The sampler against a plain reference in float64, and the laws of its randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.workers.api import SamplingParams
from kvtier.workers.sampler import SampleRow, is_plain, sample, sample_greedy, uniform

VOCAB = 97


def row(params: SamplingParams, position: int = 5, index: int = 0, **changes: object) -> SampleRow:
    made = SampleRow(params, index, position, np.array([1, 2, 3], np.int32), frozenset())
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def reference_probs(
    logits: list[float], params: SamplingParams, seen: set[int], banned: set[int]
) -> list[float]:
    """Probabilities by the textbook, one filter after the other."""
    x = list(logits)
    for token in seen:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in banned:
        x[token] = -math.inf
    x = [value / params.temperature for value in x]
    if params.top_k:
        kth = sorted(x, reverse=True)[min(params.top_k, len(x)) - 1]
        x = [value if value >= kth else -math.inf for value in x]
    p = softmax(x)
    if params.top_p < 1.0:
        total, kept = 0.0, set()
        for token in sorted(range(len(p)), key=lambda t: -p[t]):
            kept.add(token)
            total += p[token]
            if total >= params.top_p:
                break
        p = [value if token in kept else 0.0 for token, value in enumerate(p)]
    floor = params.min_p * max(p)
    p = [value if value >= floor else 0.0 for value in p]
    return [value / sum(p) for value in p]


def softmax(x: list[float]) -> list[float]:
    top = max(x)
    e = [math.exp(value - top) for value in x]
    return [value / sum(e) for value in e]


def reference_token(probs: list[float], chance: float) -> set[int]:
    """The token at `chance` of the cumulative probabilities; its neighbour too where rounding may decide."""
    right = set()
    total = 0.0
    for token, p in enumerate(probs):
        if p and total - 1e-5 <= chance <= total + p + 1e-5:
            right.add(token)
        total += p
    return right


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.1, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 5, 50, 1000])),
        top_p=draw(st.sampled_from([0.05, 0.5, 0.9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(sampling(), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.sets(st.integers(0, VOCAB - 1), max_size=9),
)
def test_every_combination_of_filters_is_the_references(
    params: list[SamplingParams], seed: int, banned: set[int]
) -> None:
    logits = random_logits(len(params), seed)
    rows = [row(p, position=seed + i, index=i, banned=frozenset(banned)) for i, p in enumerate(params)]

    sampled = sample(logits, rows)

    for i, p in enumerate(params):
        probs = reference_probs(logits[i].double().tolist(), p, {1, 2, 3}, banned)
        assert sampled.tokens[i] in reference_token(probs, uniform(p.seed, i, seed + i))


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    logits = random_logits(1, vocab=8)
    probs = torch.softmax(logits[0].double(), 0)
    draws = 4000
    batch = logits.expand(draws, -1).contiguous()

    tokens = sample(
        batch, [row(params, position=i, tokens=np.empty(0, np.int32)) for i in range(draws)]
    ).tokens

    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    chi2 = float(((counts - draws * probs) ** 2 / (draws * probs)).sum())
    assert chi2 < 24.3  # 0.1 % of fair samplers exceed it with 7 degrees of freedom; the seed is fixed


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = random_logits(6)
    rows = [row(SamplingParams(temperature=1.3, top_p=0.95, seed=i), position=9) for i in range(6)]

    together = sample(logits, rows).tokens
    alone = [sample(logits[i : i + 1], rows[i : i + 1]).tokens[0] for i in range(6)]
    reversed_ = sample(logits.flip(0), rows[::-1]).tokens

    assert together == alone == reversed_[::-1]


def test_the_random_number_depends_on_seed_sequence_and_position_alone() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    numbers = {uniform(s, i, p) for s in range(5) for i in range(5) for p in range(5)}
    assert len(numbers) == 125
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert uniform(2**63 - 1, 15, 10**6) == uniform(2**63 - 1, 15, 10**6)


def test_greedy_takes_the_most_likely_and_leaves_the_logits_alone() -> None:
    logits = random_logits(3)
    before = logits.clone()

    assert sample_greedy(logits) == logits.argmax(-1).tolist()
    assert sample(logits, [row(SamplingParams(repetition_penalty=1.5))] * 3).tokens

    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_gives_no_token_and_harms_no_other(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 7] = bad
    rows = [row(SamplingParams(temperature=temperature, logprobs=2))] * 3

    sampled = sample(logits, rows)

    assert sampled.tokens[1] is None
    assert sampled.logprobs[1] is None
    assert None not in (sampled.tokens[0], sampled.tokens[2])
    assert sample_greedy(logits)[1] is None


def test_a_row_without_any_possible_token_gives_none() -> None:
    assert sample_greedy(torch.full((1, 4), -math.inf)) == [None]


def test_banned_tokens_do_not_come() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())

    sampled = sample(logits, [row(SamplingParams(), banned=frozenset([best]))])

    assert sampled.tokens[0] != best


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(1)
    expected = torch.log_softmax(logits[0].double(), 0)
    params = SamplingParams(temperature=0.3, top_k=3, repetition_penalty=2.0, logprobs=4, seed=3)

    sampled = sample(logits, [row(params)])

    token, logprobs = sampled.tokens[0], sampled.logprobs[0]
    assert token is not None
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(float(expected[token]))
    assert [t for t, _ in logprobs.top] == expected.argsort(descending=True)[:4].tolist()
    assert [p for _, p in logprobs.top] == pytest.approx(expected.sort(descending=True).values[:4].tolist())


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(4)
    rows = [row(SamplingParams(temperature=1e-6, seed=i)) for i in range(4)]
    assert sample(logits, rows).tokens == sample_greedy(logits)


def test_a_nucleus_larger_than_the_first_look_is_found() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :2500] = 1.0

    tokens = [
        sample(
            logits, [row(SamplingParams(temperature=1.0, top_p=0.7, seed=s), tokens=np.empty(0, np.int32))]
        ).tokens[0]
        for s in range(50)
    ]

    assert all(token is not None and token < 2500 for token in tokens)  # the likelier half has 0.73


def test_only_greedy_without_extras_is_plain() -> None:
    assert is_plain(SamplingParams())
    assert not is_plain(SamplingParams(temperature=0.5))
    assert not is_plain(SamplingParams(repetition_penalty=1.1))
    assert not is_plain(SamplingParams(logprobs=1))
