"""The sampler against a plain reference in float64, and the laws of its randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.workers.engine.sampling import sampler
from kvtier.workers.engine.sampling.sampler import (
    SampleRow,
    has_penalty,
    is_plain,
    sample,
    sample_greedy,
    uniform,
)
from kvtier.workers.engine.sampling.seen_tokens import CATCH_UP, FIRST_ROOM, SeenTokens
from kvtier.workers.requests.api import RANGES, SamplingParams

VOCAB = 97


PROMPT, OUTPUT = [1, 2, 3, 2], [4, 2, 5, 4, 4]


def row(
    params: SamplingParams,
    position: int = 5,
    index: int = 0,
    tokens: list[int] = PROMPT + OUTPUT,
    banned: frozenset[int] = frozenset(),
    vocab: int = VOCAB,
) -> SampleRow:
    seen = None
    if has_penalty(params):
        seen = SeenTokens(params, len(PROMPT), vocab, torch.device("cpu"))
        seen.follow(np.array(tokens, np.int32))
    return SampleRow(params, index, position, seen, banned)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def reference_logits(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], banned: set[int]
) -> list[float]:
    """Logits as OpenAI's documentation and vLLM's define them, in vLLM's order: bias, bans, then the penalties."""
    x = list(logits)
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in banned:
        x[token] = -math.inf
    for token in set(prompt + output):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty
    return x


def reference_probs(logits: list[float], params: SamplingParams, banned: set[int]) -> list[float]:
    """Probabilities by the textbook, one filter after the other."""
    x = reference_logits(logits, params, PROMPT, OUTPUT, banned)
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
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.3])),
        logit_bias=tuple(
            draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=3)).items()
        ),
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
        probs = reference_probs(logits[i].double().tolist(), p, banned)
        assert sampled.tokens[i] in reference_token(probs, uniform(p.seed, i, seed + i))


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    logits = random_logits(1, vocab=8)
    probs = torch.softmax(logits[0].double(), 0)
    draws = 4000
    batch = logits.expand(draws, -1).contiguous()

    tokens = sample(batch, [row(params, position=i) for i in range(draws)]).tokens

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
        sample(logits, [row(SamplingParams(temperature=1.0, top_p=0.7, seed=s))]).tokens[0] for s in range(50)
    ]

    assert all(token is not None and token < 2500 for token in tokens)  # the likelier half has 0.73


def test_only_greedy_without_extras_is_plain() -> None:
    assert is_plain(SamplingParams())
    assert not is_plain(SamplingParams(temperature=0.5))
    assert not is_plain(SamplingParams(repetition_penalty=1.1))
    assert not is_plain(SamplingParams(presence_penalty=0.1))
    assert not is_plain(SamplingParams(frequency_penalty=-0.1))
    assert not is_plain(SamplingParams(logit_bias=((3, 1.0),)))
    assert not is_plain(SamplingParams(logprobs=1))


# ---- penalties ---------------------------------------------------------------------------------------------------


@given(st.data(), st.integers(0, 3), st.booleans())
def test_seen_tokens_are_those_of_a_fresh_count_however_they_are_followed(
    data: st.DataObject, prompt_tokens: int, is_repetition: bool
) -> None:
    params = SamplingParams(repetition_penalty=1.2 if is_repetition else 1.0, presence_penalty=1.0)
    seen = SeenTokens(params, prompt_tokens, 40, torch.device("cpu"))
    tokens: list[int] = data.draw(st.lists(st.integers(0, 39), min_size=prompt_tokens))
    for _ in range(4):
        more = st.lists(st.integers(0, 39), max_size=2 * CATCH_UP)
        tokens += data.draw(more)

        seen.follow(np.array(tokens, np.int32))

        output = tokens[prompt_tokens:]
        followed = dict(zip(seen.ids.tolist(), seen.given.tolist(), strict=True))
        assert len(followed) == len(seen.ids)
        assert followed == {t: output.count(t) for t in (tokens if is_repetition else output)}


def test_seen_tokens_find_room_for_each_of_a_large_vocabulary() -> None:
    vocab = 3 * FIRST_ROOM
    seen = SeenTokens(SamplingParams(presence_penalty=1.0), 0, vocab, torch.device("cpu"))
    tokens = np.random.default_rng(0).permutation(vocab).astype(np.int32)

    for length in range(vocab + 1):
        seen.follow(tokens[:length])

    assert seen.ids.tolist() == tokens.tolist()


@pytest.mark.parametrize("penalty", [0.01, 0.7, 1.3, 100.0])
def test_a_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(1, seed=5)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    params = SamplingParams(repetition_penalty=penalty)

    assert edited(logits, params) == pytest.approx(expected[0].tolist(), rel=1e-6)


@pytest.mark.parametrize("bias", [-100.0, 3.5, 100.0])
def test_a_logit_bias_is_that_of_transformers(bias: float) -> None:
    from transformers import SequenceBiasLogitsProcessor

    logits = random_logits(1, seed=6)
    processor = SequenceBiasLogitsProcessor([[[7], bias], [[9], -bias]])
    expected = processor(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    params = SamplingParams(logit_bias=((7, bias), (9, -bias)))

    assert edited(logits, params) == pytest.approx(expected[0].tolist(), rel=1e-6)


def edited(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    work = logits.clone()
    sampler._edit(work, [row(params)])
    values: list[float] = work[0].tolist()
    return values


def test_presence_counts_a_token_once_and_frequency_each_time_and_neither_the_prompts() -> None:
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)

    work = edited(logits, params)

    assert work[4] == -0.5 - 3 * 0.25
    assert work[5] == work[2] == -0.5 - 0.25
    assert work[1] == work[3] == work[6] == 0.0


# ---- the whole range ---------------------------------------------------------------------------------------------


EDGES: dict[str, list[float]] = {
    name: [
        *([0] if allowed.zero else []),
        max(allowed.least, 1e-320) if allowed.is_open else allowed.least,
        allowed.most,
    ]
    for name, allowed in RANGES.items()
    if name != "n"
}
HUGE = float(torch.finfo(torch.float32).max)
LOGITS = [0.0, -0.0, 1e-45, 1.0, -1.0, 30.0, HUGE, -HUGE, -math.inf]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.lists(st.sampled_from(LOGITS), min_size=VOCAB, max_size=VOCAB))
def test_within_its_range_every_value_gives_a_token_that_may_come(
    data: st.DataObject, values: list[float]
) -> None:
    """Whatever the finite logits, of which one at least isn't banned. None and an exception would both be faults."""
    values[0] = 0.0
    logits = torch.tensor([values])
    fields = {name: data.draw(st.sampled_from(edges), name) for name, edges in EDGES.items()}
    bias = data.draw(
        st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.0, 100.0]), max_size=3)
    )
    params = SamplingParams(**fields, logit_bias=tuple(bias.items()))  # type: ignore[arg-type]
    params.validate()
    banned = frozenset(data.draw(st.sets(st.integers(1, VOCAB - 1), max_size=9)))

    sampled = sample(logits, [row(params, banned=banned)])

    token = sampled.tokens[0]
    assert token is not None
    assert token not in banned
    assert values[token] > -math.inf
    if params.temperature in (0.0, 1e-6):
        changed = edited(logits, params)
        best = max(value for t, value in enumerate(changed) if t not in banned)
        assert changed[token] == best or params.temperature and best - changed[token] < 1e-4


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0 - 2.0**-53])
@given(
    st.lists(st.floats(-40.0, 0.0), min_size=1, max_size=60),
    st.integers(0, 60),
    st.sampled_from([0.3, 1.0, 7.0]),
)
def test_the_smallest_and_the_largest_random_number_draw_a_token_that_may_come(
    chance: float, values: list[float], place: int, temperature: float
) -> None:
    """Rounding may put the largest at the very end of all probabilities, where a token without any may lie."""
    values.insert(min(place, len(values)), 0.0)
    logits = torch.tensor([[-math.inf, *values, -math.inf]])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "uniform", lambda *key: chance)
        params = SamplingParams(temperature=temperature)

        token = sample(logits, [row(params)]).tokens[0]

    assert token is not None
    assert float(logits[0, token]) / temperature > -28.0  # a smaller one has less than one part of 2**40
    assert 1 <= token <= len(values)


@given(st.integers(1, 2**62))
def test_the_largest_random_number_times_any_total_is_less_than_that(total: int) -> None:
    """So no draw lies behind the last token, where one without any probability may be."""
    largest = 1.0 - 2.0**-53

    assert int(largest * float(total)) < total
    assert (torch.tensor([largest], dtype=torch.float64) * torch.tensor([total])).long().item() < total


@pytest.mark.parametrize("vocab", [8192 + 1, 3 * 4096, 100_003, 2**18])
def test_the_largest_random_number_draws_the_last_token_of_a_large_vocabulary_that_may_come(
    vocab: int,
) -> None:
    """All are alike but for the last, which can't come; their sum needs more bits than a float has."""
    logits = torch.zeros(1, vocab)
    logits[0, -1] = -math.inf
    rows = [row(SamplingParams(temperature=1.0), vocab=vocab)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "uniform", lambda *key: 1.0 - 2.0**-53)

        assert sample(logits, rows).tokens == sampler.draw_rows(logits, rows) == [vocab - 2]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2 * sampler.FEW).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(0, 99),
    st.sampled_from([0.1, 3.0, 30.0]),
    st.booleans(),
)
def test_the_floor_is_the_value_that_sorting_finds(
    sizes: tuple[int, int], seed: int, spread: float, has_ties: bool
) -> None:
    vocab, k = sizes
    weights = np.exp(-np.random.default_rng(seed).random(vocab, dtype=np.float32) * np.float32(spread))
    if has_ties:
        weights = np.round(weights, 2)
    weights[0] = 1.0
    amounts = (weights * sampler.SCALE).astype(np.int64)
    bits = weights.view(np.int32)
    order = np.argsort(-weights, kind="stable")
    share = max(1, int(amounts.sum()) * k // vocab)
    place = int(np.searchsorted(amounts[order].cumsum(), share))

    kth = sampler._floor(bits, None, k)
    nucleus = sampler._floor(bits, amounts, share)
    together = sampler._floors(
        torch.from_numpy(bits)[None].repeat(3, 1),
        torch.from_numpy(np.stack([np.ones_like(amounts), amounts, amounts])),
        torch.tensor([[k], [share], [0]]),
    )

    assert kth == bits[order[k - 1]]
    assert nucleus == bits[order[place]]
    assert together.tolist() == [[kth], [nucleus], [0]]


@settings(max_examples=100, deadline=None)
@given(st.lists(sampling(), min_size=1, max_size=5), st.integers(0, 1000), st.sampled_from([VOCAB, 5003]))
def test_rows_drawn_together_on_a_device_get_what_each_gets_alone(
    params: list[SamplingParams], seed: int, vocab: int
) -> None:
    """The path of a GPU, whose sums of whole numbers are the same in any order, and that of a CPU."""
    logits = random_logits(len(params), seed, vocab)
    rows = [row(p, position=seed + i, index=i, vocab=vocab) for i, p in enumerate(params)]

    together = sampler.draw_rows(logits, rows)

    assert together == [sampler.draw_row(x.numpy(), r) for x, r in zip(logits, rows, strict=True)]
