"""A request goes on at another worker: the same tokens and the same end as if it had never been cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until
from worker_kit import PAGE_TOKENS, Client, Result, Slowed, caching, keys, serving, settle, tiny_runner

from kvtier.tier.pages.page import TierName
from kvtier.workers.engine import handoff as handover
from kvtier.workers.requests.api import EngineRequest, FinishReason, SamplingParams

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    return tiny_runner(tiny_llama, 400)


@pytest.fixture(scope="module")
def worker(roomy: Slowed) -> Iterator[Client]:
    """One worker for all tests of the law: what it has cached of other requests must not matter."""
    with serving(roomy) as client:
        yield client


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 512, length).tolist())


_names = iter(range(10**9))


def ask(client: Client, tokens: tuple[int, ...], params: SamplingParams, **fields: Any) -> str:
    """Submit a request; its id."""
    name = f"q{next(_names)}"
    client.worker.submit(EngineRequest(name, "default", tokens, params, **fields))
    return name


def whole(client: Client, tokens: tuple[int, ...], params: SamplingParams) -> list[Result]:
    """The sequences of a request that is never cut."""
    name = ask(client, tokens, params)
    return [client.result(name, index) for index in range(params.n)]


def cut_at(results: list[Result], cuts: list[int]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """What each sequence has given before its cut, and which of them had ended."""
    resumed = tuple(tuple(r.tokens[:cut]) for r, cut in zip(results, cuts, strict=True))
    ended = tuple(i for i, (r, cut) in enumerate(zip(results, cuts, strict=True)) if cut >= len(r.tokens))
    return resumed, ended


def assert_same_when_cut(
    client: Client, tokens: tuple[int, ...], params: SamplingParams, cuts: list[int], **fields: Any
) -> None:
    """The law, for one request and one cut of each sequence."""
    before = whole(client, tokens, params)
    resumed, ended = cut_at(before, cuts)
    if len(ended) == params.n:
        return
    name = ask(client, tokens, params, resumed=resumed, ended=ended, **fields)
    for index, result in enumerate(before):
        if index in ended:
            continue
        after = client.result(name, index)
        assert [*resumed[index], *after.tokens] == result.tokens, (index, cuts)
        assert after.reason is result.reason
        assert after.usage.completion_tokens == len(result.tokens)
        assert after.usage.prompt_tokens == len(tokens)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 3 * PAGE_TOKENS),
    seed=st.integers(0, 5),
    cuts=st.lists(st.integers(0, MAX_TOKENS), min_size=3, max_size=3),
    n=st.sampled_from([1, 3]),
    temperature=st.sampled_from([0.0, 0.8]),
    penalty=st.sampled_from([1.0, 1.3]),
    presence=st.sampled_from([0.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.8]),
    stops=st.booleans(),
    min_tokens=st.sampled_from([0, 15]),
    use_cache=st.booleans(),
)
def test_a_resumed_request_gives_the_same_tokens_and_ends_alike_wherever_it_was_cut(
    worker: Client,
    length: int,
    seed: int,
    cuts: list[int],
    n: int,
    temperature: float,
    penalty: float,
    presence: float,
    frequency: float,
    stops: bool,
    min_tokens: int,
    use_cache: bool,
) -> None:
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        min_tokens=min_tokens,
        temperature=temperature,
        repetition_penalty=penalty,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=((7, -3.0), (8, 2.0)) if presence else (),
        seed=seed,
        stop_ids=tuple(range(0, 512, 25)) if stops else (),
        n=n,
    )

    assert_same_when_cut(worker, prompt(length, seed), params, cuts[:n], use_cache=use_cache)


@pytest.mark.parametrize("total", [2 * PAGE_TOKENS - 1, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1])
@pytest.mark.parametrize("length", [PAGE_TOKENS, PAGE_TOKENS + 5])
def test_a_cut_at_or_beside_the_end_of_a_page_changes_nothing(
    worker: Client, length: int, total: int
) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=3)

    assert_same_when_cut(worker, prompt(length, 9), params, [total - length])


def test_pages_of_given_tokens_are_found_by_their_keys_in_the_tiers_below(
    roomy: Slowed, tiny_llama: Path, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=80, temperature=0.7, seed=3)
    tokens = prompt(40, 21)
    other = tiny_runner(tiny_llama, 100)
    with caching(tmp_path) as service:
        with serving(roomy, tmp_path / "s") as first:
            [result] = whole(first, tokens, params)
            settle(first.worker, service)
        other.rows = 0
        with serving(other, tmp_path / "s", worker_id="w1") as second:
            resumed = (tuple(result.tokens[:60]),)
            after = second.result(ask(second, tokens, params, resumed=resumed))
            totals = second.worker.stats().totals
            told = second.worker.explain(after.last.request_id)

    assert [*resumed[0], *after.tokens] == result.tokens
    assert other.rows - len(after.tokens) < PAGE_TOKENS, "what lies below isn't computed again"
    # The prompt was counted where the first token was given.
    assert (totals.requests, totals.prompt_tokens, totals.aborted_prompt_tokens) == (0, 0, 0)
    assert after.usage.prompt_tokens == 40
    assert sum(after.usage.cached_tokens.values()) + after.usage.computed_tokens == 40
    assert told is not None and told.notes[0].tier == "L3"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"resumed": ((1,),)}, "resumed must have the tokens of each of 2 sequences, got 1"),
        ({"resumed": ((1,), (2,)), "ended": (0, 1)}, r"ended must name some, not all, .* got \(0, 1\)"),
        ({"resumed": ((1,), (2,)), "ended": (2,)}, r"ended .* got \(2,\)"),
        ({"ended": (0,)}, "ended must name some"),
        ({"resumed": ((1,), (1, 2, 3, 4))}, "sequence 1 is resumed with 4 tokens, of max_tokens 4"),
        ({"resumed": ((1,), (512,))}, "token 512 is not in the vocabulary"),
    ],
)
def test_what_can_not_be_resumed_is_refused(worker: Client, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ask(worker, (1, 2, 3), SamplingParams(max_tokens=4, n=2), **fields)


# ---- prefill only ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["through", "demote"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_is_handed_over_once_its_pages_are_below_l1(
    roomy: Slowed, tiny_llama: Path, tmp_path: Path, write: str, n: int
) -> None:
    tokens, params = prompt(100, 50 + n), SamplingParams(max_tokens=30, temperature=0.8, seed=7, n=n)
    decoder = tiny_runner(tiny_llama, 100)
    with caching(tmp_path) as service:
        with serving(roomy, tmp_path / "s", write=write, role="prefill") as first:
            reference = [r.tokens for r in whole(first, tokens, replace(params, max_tokens=30))]
            first.worker.evict(keys(first.worker))
            settle(first.worker, service)
            service.clear()
            name = ask(first, tokens, params, is_prefill_only=True)
            given = [first.result(name, index) for index in range(n)]
            below = {page.key for page in service.pages(tier=TierName.HOST)}
        with serving(decoder, tmp_path / "s", worker_id="w1") as second:
            decoder.rows = 0
            resumed = tuple(tuple(result.tokens) for result in given)
            name = ask(second, tokens, params, resumed=resumed)
            after = [second.result(name, index) for index in range(n)]

    assert [result.reason for result in given] == [FinishReason.PREFILLED] * n
    assert [len(result.tokens) for result in given] == [1] * n
    assert given[0].outputs[0].usage is not None and given[0].outputs[0].timings is not None
    assert len(below) == 100 // PAGE_TOKENS
    assert [[*r, *a.tokens] for r, a in zip(resumed, after, strict=True)] == reference
    assert decoder.rows <= n * (29 + PAGE_TOKENS), "only the tail of the prompt is computed again"


def test_a_sequence_that_ends_with_its_first_token_is_not_handed_over(worker: Client) -> None:
    tokens = prompt(40, 70)
    [result] = whole(worker, tokens, SamplingParams(max_tokens=1))
    params = SamplingParams(max_tokens=9, stop_ids=tuple(result.tokens))

    name = ask(worker, tokens, params, is_prefill_only=True)

    assert worker.result(name).reason is FinishReason.STOP
    assert worker.result(name).tokens == result.tokens


def test_a_handover_without_a_node_waits_for_nothing(worker: Client) -> None:
    name = ask(worker, prompt(40, 71), SamplingParams(max_tokens=9), is_prefill_only=True)

    assert worker.result(name).reason is FinishReason.PREFILLED


def test_pages_that_find_no_room_below_are_waited_for_no_longer_than_the_limit(
    roomy: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LIMIT_S", 0.05)
    with caching(tmp_path) as service, serving(roomy, tmp_path / "s") as client:
        monkeypatch.setattr(client.worker._loop.link, "free_slots", lambda size: 0)
        name = ask(client, prompt(100, 72), SamplingParams(max_tokens=9), is_prefill_only=True)
        result = client.result(name)
        held = service.pages(tier=TierName.HOST)
        monkeypatch.undo()

    assert (result.reason, len(result.tokens), held) == (FinishReason.PREFILLED, 1, [])


def test_a_request_is_cancelled_while_it_waits_for_its_pages(
    roomy: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LIMIT_S", 60.0)
    with caching(tmp_path), serving(roomy, tmp_path / "s") as client:
        monkeypatch.setattr(client.worker._loop.link, "free_slots", lambda size: 0)
        names = [
            ask(client, prompt(100, seed), SamplingParams(max_tokens=9), is_prefill_only=True)
            for seed in (73, 74)
        ]
        for name in names:
            client.first(name)
        with pytest.raises(ValueError, match="in flight already"):
            client.worker.submit(EngineRequest(names[0], "default", (1,), SamplingParams(max_tokens=1)))
        client.worker.cancel(names[0])
        assert client.result(names[0]).reason is FinishReason.CANCELLED
        assert not client.is_over(names[1])
        client.worker.cancel_all()
        assert client.result(names[1]).reason is FinishReason.CANCELLED
        monkeypatch.undo()


def test_all_that_runs_and_waits_is_cancelled_at_once(roomy: Slowed) -> None:
    with serving(roomy, max_sequences=2) as client:
        names = [client.send(prompt(30, seed), max_tokens=1500) for seed in range(5)]
        client.first(names[0])
        client.worker.cancel_all()
        assert [client.result(name).reason for name in names] == [FinishReason.CANCELLED] * 5
        until(client.worker.idle, "nothing is left")
        assert len(client.generate(prompt(30)).tokens) == 8
