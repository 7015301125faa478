"""Generate over real gRPC on loopback: good requests, bad ones, clients that leave, workers that die."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_kit import (
    CONTEXT,
    EOS,
    IM_START,
    VOCAB_SIZE,
    Served,
    client_id,
    echo_info,
    make_byte_tokenizer,
    make_piece_tokenizer,
    serving,
)
from waiting import eventually

from kvtier.cli.client import Client, ClientError, completion, connect
from kvtier.cluster.config.deployment import MAX_STREAM_PROMPT, GrpcConfig
from kvtier.cluster.gateway.requests import reading as gateway_requests
from kvtier.cluster.gateway.streams import streams as gateway_streams
from kvtier.proto import inference_pb2, inference_pb2_grpc
from kvtier.workers.models.files.sampling import recommended_sampling
from kvtier.workers.models.text import Text, TextError
from kvtier.workers.requests.api import DEFAULT_SAMPLING, EngineRequest, FinishReason, Output, SamplingParams


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """The byte tokenizer."""
    loaded = Text.load(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def shared(text: Text) -> Iterator[Served]:
    """One gateway for tests that leave no trace: two workers, tenants default and acme."""
    with serving(text, workers=2) as served:
        yield served
        assert eventually(lambda: served.core.in_flight == 0)
        assert all(worker.sequences == 0 for worker in served.core.workers.values())


@pytest.fixture
def client(shared: Served) -> Iterator[Client]:
    """A connection to it."""
    with connect(shared.endpoint) as connected:
        yield connected


def raw(endpoint: str) -> tuple[grpc.Channel, Any]:
    """A channel and its Inference stub."""
    channel = grpc.insecure_channel(endpoint)
    return channel, inference_pb2_grpc.InferenceStub(channel)


# ---- what comes back ---------------------------------------------------------------------------------------------


def test_text_goes_in_and_the_whole_completion_comes_back(client: Client) -> None:
    result = completion(client.generate("h\N{LATIN SMALL LETTER E WITH ACUTE}llo ", max_tokens=14))

    assert result["text"] == "h\N{LATIN SMALL LETTER E WITH ACUTE}llo " * 2
    assert result["token_ids"] == list("h\N{LATIN SMALL LETTER E WITH ACUTE}llo ".encode() * 2)
    assert result["finish_reason"] == "length"
    assert result["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 14,
        "computed_tokens": 4,
        "cached_tokens": {"L1": 3, "L2": 0, "L3": 0, "L4": 0, "remote": 0},
    }
    assert result["timings_ms"] == {"queue": 1.0, "load": 2.0, "prefill": 3.0, "ttft": 6.0, "decode": 7.0}
    assert result["worker"] in ("w0", "w1")
    assert len(result["request_id"]) == 16


def test_token_ids_are_taken_as_they_are(client: Client) -> None:
    result = completion(client.generate([1, EOS + 40, 2], max_tokens=4))

    assert result["token_ids"] == [1, EOS + 40, 2, 1]


def test_a_chat_is_rendered_and_ends_at_the_models_end_of_sequence(client: Client) -> None:
    result = completion(client.generate([{"role": "user", "content": "hi"}], max_tokens=99))

    assert result["text"] == "user\nhi"
    assert result["token_ids"][-1] == EOS
    assert result["finish_reason"] == "stop"


def test_a_completion_keeps_the_space_of_its_first_word_and_a_chats_answer_has_none(tmp_path: Path) -> None:
    """The worker says the prompt again."""
    pieces = Text.load(make_piece_tokenizer(tmp_path))
    assert pieces is not None
    ids = pieces.encode("a b")

    with serving(pieces) as served, connect(served.endpoint) as client:
        answers = [
            completion(client.generate(prompt, max_tokens=len(ids)))["text"]
            for prompt in ("a b", ids, [{"role": "user", "content": "a b"}])
        ]

    assert answers == [" a b", " a b", "a b"]


def test_the_token_that_stops_is_delivered_without_its_text(client: Client) -> None:
    result = completion(client.generate("abc", stop_ids=[ord("c")], max_tokens=99))

    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("ab", [*b"abc"], "stop")


def test_sequences_interleave_and_the_prompt_counts_once(client: Client) -> None:
    chunks = list(client.generate("abcd", n=3, max_tokens=5))

    result = completion(chunks)
    assert [sequence["text"] for sequence in result["sequences"]] == ["abcda"] * 3
    assert result["usage"]["prompt_tokens"] == 4
    assert result["usage"]["completion_tokens"] == 15
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_logprobs_come_with_their_tokens(client: Client) -> None:
    result = completion(client.generate([5, 6], max_tokens=2, logprobs=2))

    assert [one["logprob"] for one in result["logprobs"]] == [-0.5, -0.5]
    assert result["logprobs"][1]["top"] == [{"id": 6, "logprob": -0.5}, {"id": 0, "logprob": -1.5}]


def test_a_seed_is_kept_and_an_unset_one_is_chosen_and_told(shared: Served, client: Client) -> None:
    given = completion(client.generate([1], max_tokens=1, seed=42))
    chosen = [completion(client.generate([1], max_tokens=1))["seed"] for _ in range(2)]

    submitted = [request.sampling.seed for worker in shared.workers for request in worker.submitted]
    assert given["seed"] == 42
    assert chosen[0] != chosen[1]
    assert set(chosen) <= set(submitted)


def test_unset_max_tokens_take_what_the_context_leaves(client: Client) -> None:
    result = completion(client.generate([1] * 500))

    assert len(result["token_ids"]) == CONTEXT - 500


def test_the_worker_asked_for_gets_the_request_and_others_share(client: Client) -> None:
    asked = {completion(client.generate([1], max_tokens=1, worker="w1"))["worker"] for _ in range(4)}
    free = {completion(client.generate([1], max_tokens=1))["worker"] for _ in range(4)}

    assert asked == {"w1"}
    assert free == {"w0", "w1"}


def test_cache_options_and_tenant_reach_the_worker(shared: Served, client: Client) -> None:
    completion(client.generate([1], max_tokens=1, tenant="acme", no_cache=True, request_id="mine"))
    completion(client.generate([1], max_tokens=1, lossy=True, window=8, sinks=4, request_id="stream"))

    asked = {
        client_id(request.request_id): request for worker in shared.workers for request in worker.submitted
    }
    mine, stream = asked["mine"], asked["stream"]
    assert (mine.tenant, mine.use_cache, mine.lossy, mine.window, mine.sinks) == ("acme", False, False, 0, 0)
    assert (stream.use_cache, stream.lossy, stream.window, stream.sinks) == (True, True, 8, 4)


def asked_with(shared: Served, client: Client, **options: Any) -> EngineRequest:
    """The worker's request of one whose prompt is a single token, unless told otherwise."""
    name = secrets.token_hex(8)
    completion(client.generate(options.pop("prompt", [1]), max_tokens=1, request_id=name, **options))
    [request] = [r for worker in shared.workers for r in worker.submitted if client_id(r.request_id) == name]
    return request


def test_a_session_is_the_same_at_each_turn_and_another_one_for_each_tenant(
    shared: Served, client: Client
) -> None:
    first = asked_with(shared, client, session_id="chat")
    again = asked_with(shared, client, session_id="chat", session_state="open")
    last = asked_with(shared, client, session_id="chat", session_state="closed")
    other = asked_with(shared, client, session_id="chat 2")
    strange = asked_with(shared, client, session_id="chat", tenant="acme")

    assert first.session == again.session == last.session
    assert len({first.session, other.session, strange.session}) == 3
    assert all(0 < each.session < 2**63 for each in (first, other, strange))
    states = [(each.session_open, each.session_closed) for each in (first, again, last)]
    assert states == [(False, False), (True, False), (False, True)]


def test_a_request_that_tells_nothing_of_what_follows_has_no_session(shared: Served, client: Client) -> None:
    request = asked_with(shared, client)

    assert (request.session, request.session_open, request.session_closed) == (0, False, False)
    assert (request.turn, request.expected_output_tokens, request.tool_stop_ids) == (0, 0, ())


def test_what_a_request_leaves_unset_is_as_the_models_makers_recommend_where_that_is_configured(
    tmp_path: Path,
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "min_p": null}')
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

    asked = []
    for sampling in (recommended_sampling(tmp_path), DEFAULT_SAMPLING):
        with serving(sampling=sampling) as served, connect(served.endpoint) as client:
            for own in ({}, {"temperature": 0.0, "top_k": 0, "top_p": 0.5}):
                request = asked_with(served, client, **own)
                asked.append(tuple(getattr(request.sampling, name) for name in names))

    assert asked == [
        (0.6, 20, 1.0, 0.0, 1.0),
        (0.0, 0, 0.5, 0.0, 1.0),  # what is set is set, to the default too
        (0.0, 0, 1.0, 0.0, 1.0),
        (0.0, 0, 0.5, 0.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "params"),
    [
        (None, SamplingParams()),
        ("{}", SamplingParams()),
        ('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}', SamplingParams(top_p=0.9)),
        ('{"do_sample": true, "temperature": 1}', SamplingParams(temperature=1.0)),
        ('{"repetition_penalty": 1.1, "max_new_tokens": 7}', SamplingParams(repetition_penalty=1.1)),
    ],
)
def test_a_models_recommended_sampling_is_read_from_its_generation_config(
    tmp_path: Path, text: str | None, params: SamplingParams
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)

    assert recommended_sampling(tmp_path) == params


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": -1}', '{"top_p": "x"}', '{"top_k": []}'])
def test_recommended_sampling_that_cannot_be_is_an_error_that_names_the_file(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)

    with pytest.raises(ValueError, match="generation_config.json can't give sampling defaults: "):
        recommended_sampling(tmp_path)


def test_what_a_client_expects_reaches_the_worker(shared: Served, client: Client) -> None:
    assert asked_with(shared, client, expected_output_tokens=2**24).expected_output_tokens == 2**24


def test_a_chat_says_by_its_answers_which_turn_it_is(shared: Served, client: Client) -> None:
    begun = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    later = [*begun, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}]

    assert [asked_with(shared, client, prompt=chat).turn for chat in (begun, later)] == [1, 2]


def test_a_worker_hears_which_tokens_end_a_call_of_a_tool(tmp_path: Path) -> None:
    text = Text.load(make_byte_tokenizer(tmp_path, more=["<|eom_id|>"]))

    with serving(text) as served, connect(served.endpoint) as client:
        assert asked_with(served, client).tool_stop_ids == (IM_START + 1,)


def test_a_session_state_that_is_none_is_the_clients_error(client: Client) -> None:
    with pytest.raises(ClientError, match="open, closed or empty, got 'over'") as refused:
        completion(client.generate([1], session_id="chat", session_state="over"))  # type: ignore[arg-type]

    assert refused.value.exit_code == 2


def test_a_request_with_a_window_may_be_longer_than_the_context(client: Client) -> None:
    result = completion(client.generate([1] * (CONTEXT + 1), window=8, max_tokens=2 * CONTEXT))

    assert len(result["token_ids"]) == 2 * CONTEXT
    assert result["usage"]["prompt_tokens"] == CONTEXT + 1


def test_the_deployments_window_lets_every_request_be_longer_than_the_context() -> None:
    with serving(window=8) as served, connect(served.endpoint) as client:
        result = completion(client.generate([1] * (CONTEXT + 1), max_tokens=2))
        found = client.lookup([1] * (CONTEXT + 1))

        [request] = served.workers[0].submitted
    assert (len(result["token_ids"]), found["prompt_tokens"]) == (2, CONTEXT + 1)
    assert (request.window, request.sinks) == (0, 0), "the worker knows its own"


@pytest.mark.parametrize("over", [0, 1])
def test_a_prompt_with_a_window_has_a_bound_that_is_named(client: Client, over: int) -> None:
    prompt = [1] * (MAX_STREAM_PROMPT + over)

    if not over:
        assert completion(client.generate(prompt, window=8, max_tokens=1))["token_ids"] == [1]
        return
    with pytest.raises(
        ClientError, match="262145 tokens is too long: .* 262144 of them its prompt's"
    ) as refused:
        completion(client.generate(prompt, window=8, max_tokens=1))
    assert refused.value.status == "INVALID_ARGUMENT"


def test_the_ids_of_a_long_prompt_are_checked_off_the_gateways_loop(
    shared: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[int, int] = {}
    check = gateway_requests.check_vocabulary

    def noting(what: str, ids: Any, *rest: int) -> None:
        where[len(ids)] = threading.get_ident()
        check(what, ids, *rest)

    monkeypatch.setattr(gateway_requests, "check_vocabulary", noting)
    for tokens in (100, 100_000):
        completion(client.generate([1] * tokens, window=8, max_tokens=1))

    assert where[100] == shared.call(threading.get_ident)
    assert shared.call(threading.get_ident) not in [at for size, at in where.items() if size > 1000]
    assert max(where) <= gateway_requests.PART_IDS


def test_an_id_out_of_the_vocabulary_is_found_in_any_part_of_a_long_prompt(client: Client) -> None:
    for at in (0, 70_000, 99_999):
        prompt = [1] * 100_000
        prompt[at] = VOCAB_SIZE
        with pytest.raises(ClientError, match=f"token id {VOCAB_SIZE} at position {at} of prompt"):
            completion(client.generate(prompt, window=8))


def test_a_model_without_tokenizer_serves_token_ids() -> None:
    with serving(None) as served, connect(served.endpoint) as client:
        result = completion(client.generate([1, 2, 3], max_tokens=4))

        assert (result["text"], result["token_ids"]) == ("", [1, 2, 3, 1])
        for prompt, options in (("text", {}), ([1], {"stop": ["x"]})):
            with pytest.raises(ClientError, match="no tokenizer") as refused:
                completion(client.generate(prompt, **options))
            assert refused.value.status == "FAILED_PRECONDITION"


# ---- stop strings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["STOP", "P d", "\N{SNOWMAN}"])
def test_a_stop_string_across_chunks_ends_the_sequence_before_it(
    shared: Served, client: Client, stop: str
) -> None:
    prompt = "abc STOP def \N{SNOWMAN}\N{SNOWMAN} "

    result = completion(client.generate(prompt, stop=["never", stop], max_tokens=200))

    assert result["text"] == prompt[: prompt.index(stop)]
    assert result["finish_reason"] == "stop"
    assert result["token_ids"] == list(prompt[: prompt.index(stop) + len(stop)].encode())
    assert result["usage"]["completion_tokens"] == len(result["token_ids"])
    assert result["timings_ms"]["decode"] == 7.0
    assert any(result["request_id"] in worker.stop_names() for worker in shared.workers)


def test_text_that_may_begin_a_stop_is_held_back_until_it_does_not(client: Client) -> None:
    chunks = list(client.generate("aSTOW", stop=["STOP"], max_tokens=5))

    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert shown in ("", "a", "aSTOW")
    assert shown == "aSTOW"


def test_the_end_of_a_sequence_gives_out_what_was_held_back(client: Client) -> None:
    result = completion(client.generate("abcST", stop=["STOP"], max_tokens=5))

    assert (result["text"], result["finish_reason"]) == ("abcST", "length")


def test_no_stop_string_ends_a_sequence_before_min_tokens(client: Client) -> None:
    result = completion(client.generate("abcd", stop=["b"], min_tokens=5, max_tokens=20))

    assert result["text"] == "abcda"


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "status", "named"),
    [
        ("", {}, "INVALID_ARGUMENT", "prompt is empty"),
        ([], {}, "INVALID_ARGUMENT", "prompt is empty"),
        ([1, VOCAB_SIZE], {}, "INVALID_ARGUMENT", "token id 300 at position 1 of prompt .* 0 to 299"),
        ([-7], {}, "INVALID_ARGUMENT", "token id -7"),
        ([2**40], {}, "INVALID_ARGUMENT", "token id 1099511627776"),
        ([1] * CONTEXT, {}, "INVALID_ARGUMENT", "prompt of 512 tokens .* 512"),
        ("x" * 5000, {}, "INVALID_ARGUMENT", "prompt of 5000 tokens"),
        ([1] * 500, {"max_tokens": 13}, "INVALID_ARGUMENT", "500 tokens and max_tokens 13 are 513 .* 512"),
        ([1], {"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens must be at least 1, got 0"),
        ([1], {"max_tokens": -3}, "INVALID_ARGUMENT", "got -3"),
        ([1], {"min_tokens": 9, "max_tokens": 8}, "INVALID_ARGUMENT", "min_tokens .* got 9"),
        (
            [1],
            {"temperature": -0.1},
            "INVALID_ARGUMENT",
            r"temperature must be 0 \(greedy\) or from 1e-06 to 100, got -0\.1",
        ),
        ([1], {"temperature": float("nan")}, "INVALID_ARGUMENT", "temperature .* got nan"),
        ([1], {"temperature": 1e-46}, "INVALID_ARGUMENT", "temperature must be 0 .* got 1e-46"),
        ([1], {"repetition_penalty": 1e-38}, "INVALID_ARGUMENT", "from 0.01 to 100, got 1e-38"),
        ([1], {"top_p": 0.0}, "INVALID_ARGUMENT", "top_p"),
        ([1], {"top_k": -1}, "INVALID_ARGUMENT", "top_k"),
        ([1], {"min_p": 1.5}, "INVALID_ARGUMENT", r"min_p .* got 1\.5"),
        ([1], {"repetition_penalty": 0.0}, "INVALID_ARGUMENT", "repetition_penalty"),
        (
            [1],
            {"presence_penalty": 2.5},
            "INVALID_ARGUMENT",
            "presence_penalty must be from -2 to 2, got 2.5",
        ),
        (
            [1],
            {"frequency_penalty": float("nan")},
            "INVALID_ARGUMENT",
            "frequency_penalty must be from -2 to 2",
        ),
        ([1], {"logit_bias": {3: 101.0}}, "INVALID_ARGUMENT", "from -100 to 100, got 101.0 of token 3"),
        ([1], {"logit_bias": {300: 1.0}}, "INVALID_ARGUMENT", "token id 300 at position 0 of logit_bias"),
        (
            [1],
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "INVALID_ARGUMENT",
            "logit_bias must name at most 1024 tokens, got 1025",
        ),
        ([1], {"logprobs": 21}, "INVALID_ARGUMENT", "logprobs must be from 0 to 20, got 21"),
        ([1], {"prompt_logprobs": 21}, "INVALID_ARGUMENT", "prompt_logprobs must be from 0 to 20, got 21"),
        ([1], {"n": 17}, "INVALID_ARGUMENT", "n must be from 1 to 16, got 17"),
        ([1], {"seed": -1}, "INVALID_ARGUMENT", "seed"),
        ([1], {"stop": [""]}, "INVALID_ARGUMENT", "stop string must not be empty"),
        ([1], {"stop": ["x"] * 17}, "INVALID_ARGUMENT", "at most 16 strings, got 17"),
        ([1], {"stop": ["x" * 1025]}, "INVALID_ARGUMENT", "at most 1024 bytes, got 1025"),
        ([1], {"stop_ids": [999]}, "INVALID_ARGUMENT", "token id 999 at position 0 of stop_ids"),
        ([1], {"stop_ids": [1] * 65}, "INVALID_ARGUMENT", "stop_ids must be at most 64, got 65"),
        ([1], {"request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id must be at most 128"),
        ([1], {"request_id": "a\nb"}, "INVALID_ARGUMENT", "printable"),
        ([1], {"window": 3}, "INVALID_ARGUMENT", "window must be 0 .* or from 4 .* got 3"),
        ([1], {"window": -1}, "INVALID_ARGUMENT", "window .* got -1"),
        ([1], {"window": 2**24 + 1}, "INVALID_ARGUMENT", "window .* to 16777216 tokens, got 16777217"),
        ([1], {"sinks": 4}, "INVALID_ARGUMENT", "sinks 4 need a window beside them: set window too"),
        ([1], {"window": 8, "sinks": 9}, "INVALID_ARGUMENT", r"from 0 to the window \(8 tokens\), got 9"),
        ([1], {"window": 8, "sinks": -1}, "INVALID_ARGUMENT", "sinks .* got -1"),
        ([1], {"window": 8, "max_tokens": 2**24}, "INVALID_ARGUMENT", "16777217 tokens: .* at most 16777216"),
        (
            [1],
            {"max_tokens": 512},
            "INVALID_ARGUMENT",
            "513 tokens: .* 512 tokens; a request with a window may",
        ),
        (
            [1],
            {"session_id": "x" * 129},
            "INVALID_ARGUMENT",
            "session_id must be at most 128 .* got 129: 'xxx",
        ),
        ([1], {"session_state": "closed"}, "INVALID_ARGUMENT", "STATE_CLOSED needs .* set session_id too"),
        ([1], {"session_state": "open"}, "INVALID_ARGUMENT", "STATE_OPEN needs .* set session_id too"),
        ([1], {"expected_output_tokens": -1}, "INVALID_ARGUMENT", "expected_output_tokens .* got -1"),
        ([1], {"expected_output_tokens": 2**24 + 1}, "INVALID_ARGUMENT", "to 16777216, got 16777217"),
        ([1], {"tenant": "nothing"}, "PERMISSION_DENIED", "unknown tenant 'nothing'"),
        ([1], {"worker": "w9"}, "NOT_FOUND", "unknown worker 'w9': there are w0, w1"),
        ([1], {"worker": "x" * 50_000}, "NOT_FOUND", "unknown worker 'xxx"),
        ([{"role": "boss", "content": "x"}], {}, "INVALID_ARGUMENT", "role .* got 'boss'"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    client: Client, prompt: Any, options: dict[str, Any], status: str, named: str
) -> None:
    with pytest.raises(ClientError, match=named) as refused:
        completion(client.generate(prompt, **options))

    assert refused.value.status == status
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("x" * 6145, "prompt of 6145 bytes is too long: max_context 512 tokens .* 12 bytes are 6144 bytes"),
        ([{"role": "user", "content": "x" * 6145}], "prompt of 6145 bytes .* 6144 bytes"),
        ([{"role": "user", "content": ""}] * 1000, r"prompt of \d+ bytes .* 6144 bytes"),
        ([1] * (CONTEXT + 1), "prompt of 513 tokens is too long: max_context is 512 tokens"),
    ],
    ids=["text", "chat", "messages", "ids"],
)
def test_a_prompt_too_long_for_any_tokens_is_refused_for_generate_and_lookup(
    client: Client, prompt: Any, named: str
) -> None:
    for ask in (lambda: completion(client.generate(prompt)), lambda: client.lookup(prompt)):
        with pytest.raises(ClientError, match=named) as refused:
            ask()
        assert refused.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize(("messages", "is_taken"), [(8192, True), (8193, False)])
def test_a_chat_has_so_many_messages_and_no_more(text: Text, messages: int, is_taken: bool) -> None:
    """400,000 empty ones held a tokenizer's thread for 30 s; each costs a token at least, where the context is large."""
    chat = [{"role": "user", "content": ""}] * messages
    with serving(text, max_context=2**22) as served, connect(served.endpoint) as client:
        if is_taken:
            assert client.lookup(chat)["prompt_tokens"] > messages
            return
        for ask in (lambda: completion(client.generate(chat)), lambda: client.lookup(chat)):
            with pytest.raises(
                ClientError, match="chat must have at most 8192 messages, got 8193"
            ) as refused:
                ask()
            assert refused.value.status == "INVALID_ARGUMENT"


def test_an_empty_message_costs_a_token_before_any_is_rendered(text: Text) -> None:
    message = {"role": "user", "content": ""}
    text.encode_chat([message] * 10, 1000)

    with pytest.raises(TextError, match=r"prompt of \d+ bytes is too long: max_context 1000 tokens"):
        text.encode_chat([message] * 1001, 1000)


@pytest.mark.parametrize("char", ["x", "\N{SNOWMAN}"])
def test_bounds_of_a_stop_string_are_in_bytes_and_those_of_an_id_in_characters(
    client: Client, char: str
) -> None:
    most = char * (1024 // len(char.encode()))
    completion(client.generate("ab", max_tokens=1, stop=[most] * 16, request_id=char * 128))

    refused: list[tuple[dict[str, Any], str]] = [
        ({"stop": [most + char]}, "a stop string must be at most 1024 bytes"),
        ({"stop": ["x"] * 17}, "stop must be at most 16 strings, got 17"),
        ({"request_id": char * 129}, "request_id must be at most 128 printable characters"),
    ]
    for options, named in refused:
        with pytest.raises(ClientError, match=named) as error:
            completion(client.generate("ab", max_tokens=1, **options))
        assert error.value.status == "INVALID_ARGUMENT"


def test_an_id_that_is_taken_while_a_prompt_is_read_is_taken(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were free when they came; the one that is read first has the id, and the other one leaves it alone."""
    may_end, reading = threading.Event(), threading.Event()
    encode = text._encode

    def slow(prompt: str, *, add_special_tokens: bool) -> list[int]:
        if len(prompt) > 4096:
            reading.set()
            assert may_end.wait(120)
        return encode(prompt[:8], add_special_tokens=add_special_tokens)

    monkeypatch.setattr(text, "_encode", slow)
    with (
        serving(text, is_manual=True) as served,
        connect(served.endpoint) as client,
        ThreadPoolExecutor(2) as clients,
    ):
        [worker] = served.workers
        options: dict[str, Any] = {"max_tokens": 2, "request_id": "r", "timeout_s": 30}
        late = clients.submit(lambda: completion(client.generate("x" * 5000, **options)))
        assert reading.wait(120)
        first = clients.submit(lambda: completion(client.generate("ab", **options)))
        assert eventually(lambda: bool(worker.running))
        may_end.set()

        with pytest.raises(ClientError, match="'r' is in flight") as refused:
            late.result(120)
        assert refused.value.status == "ALREADY_EXISTS"
        for _ in range(2):
            served.call(worker.step)
        assert first.result(120)["text"] == "ab"
        assert eventually(lambda: served.core.in_flight == 0)


def test_others_are_served_while_long_prompts_are_read(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, reading = threading.Event(), threading.Semaphore(0)
    encode = text._encode

    def slow(prompt: str, *, add_special_tokens: bool) -> list[int]:
        if len(prompt) > 4096:
            reading.release()
            assert may_end.wait(120)
        return encode(prompt, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(text, "_encode", slow)
    with (
        serving(text) as served,
        connect(served.endpoint) as client,
        ThreadPoolExecutor(3) as clients,
    ):
        prompts = ["x" * 5000, "y" * 5000, [{"role": "user", "content": "z" * 5000}]]
        calls = [
            clients.submit(lambda prompt=prompt: completion(client.generate(prompt))) for prompt in prompts
        ]
        try:
            assert reading.acquire(timeout=120)
            assert completion(client.generate("ab", max_tokens=2))["text"] == "ab"
            assert client.status()["endpoint"] == served.endpoint
            assert not any(call.done() for call in calls)
        finally:
            may_end.set()
        for call in calls:
            with pytest.raises(ClientError, match="max_context"):
                call.result(120)


def test_the_smallest_context_of_all_workers_is_everybodys(text: Text) -> None:
    with serving(text, workers=2, max_context=100) as served, connect(served.endpoint) as client:
        for worker in ("w0", "w1"):
            result = completion(client.generate([1] * 90, worker=worker))
            assert result["usage"]["completion_tokens"] == 10
            for prompt, options, named in (
                ([1] * 90, {"max_tokens": 11}, "101 tokens: max_context is 100"),
                ([1] * 100, {}, "prompt of 100 tokens leaves no room .* max_context is 100 tokens"),
                ([1] * 101, {}, "prompt of 101 tokens .* max_context is 100 tokens"),
            ):
                with pytest.raises(ClientError, match=named) as refused:
                    completion(client.generate(prompt, worker=worker, **options))  # type: ignore[arg-type]
                assert refused.value.status == "INVALID_ARGUMENT"


def test_a_prompt_that_l1_is_too_small_for_is_refused_with_the_setting() -> None:
    short = replace(echo_info("w0"), is_l1_short=True)
    named = r"max_context is 100 tokens \(what tiers\.l1\.bytes holds\)"
    with serving(infos=[short], max_context=100) as served, connect(served.endpoint) as client:
        refused = client.generate([1] * 101)
        with pytest.raises(ClientError, match=named):
            completion(refused)


def test_a_request_without_prompt_is_refused(shared: Served) -> None:
    channel, stub = raw(shared.endpoint)

    with channel, pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(inference_pb2.GenerateRequest()))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "send one of text, token_ids or chat" in refused.value.details()


def test_a_chat_for_a_model_without_template_is_refused(tmp_path: Path) -> None:
    plain = Text.load(make_byte_tokenizer(tmp_path, template=""))

    with (
        serving(plain) as served,
        connect(served.endpoint) as client,
        pytest.raises(ClientError, match="no chat template") as refused,
    ):
        completion(client.generate([{"role": "user", "content": "hi"}]))

    assert refused.value.status == "FAILED_PRECONDITION"


def test_values_that_no_field_can_hold_are_the_clients_error(client: Client) -> None:
    for options in ({"max_tokens": 2**40}, {"n": "many"}):
        with pytest.raises(ClientError) as refused:
            completion(client.generate([1], **options))  # type: ignore[arg-type]
        assert refused.value.exit_code == 2


def test_an_oversized_message_is_refused_and_the_next_one_is_served(text: Text) -> None:
    config = GrpcConfig(port=0, max_message_bytes=65536)
    with serving(text, config=config) as served, connect(served.endpoint) as client:
        with pytest.raises(ClientError, match="larger than max") as refused:
            completion(client.generate("x" * 70_000))

        assert refused.value.status == "RESOURCE_EXHAUSTED"
        assert completion(client.generate("ab", max_tokens=2))["text"] == "ab"


def test_garbage_on_the_port_harms_nothing(shared: Served, client: Client) -> None:
    host, port = shared.endpoint.split(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for junk in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", preface + b"\xff" * 1000, bytes(range(256)) * 50):
        # The server may hang up at any byte.
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    assert completion(client.generate("ab", max_tokens=2))["text"] == "ab"


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_more_sequences_than_a_worker_takes_are_refused_until_some_end(text: Text) -> None:
    with serving(text, is_manual=True, max_sequences=3) as served, connect(served.endpoint) as client:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1, 2], max_tokens=1, n=2))
        assert eventually(lambda: served.core.in_flight == 1)

        with pytest.raises(ClientError, match="2 sequences in flight, at most 3") as refused:
            completion(client.generate([1], n=2))
        served.call(served.workers[0].step)
        list(call)

        assert refused.value.status == "RESOURCE_EXHAUSTED"
        later = stub.Generate(_request([1], max_tokens=1, n=3))
        assert eventually(lambda: served.core.in_flight == 1)
        served.call(served.workers[0].step)
        assert len(list(later)) == 3
        channel.close()


def test_a_workers_full_queue_is_told_and_leaves_nothing(text: Text) -> None:
    with serving(text, max_waiting=0) as served, connect(served.endpoint) as client:
        with pytest.raises(ClientError, match="at most 0 are taken") as refused:
            completion(client.generate([1]))

        assert refused.value.status == "RESOURCE_EXHAUSTED"
        assert served.core.in_flight == 0


def test_a_request_id_in_flight_is_taken_until_its_request_has_ended(text: Text) -> None:
    with serving(text, is_manual=True) as served, connect(served.endpoint) as client:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1], max_tokens=1, request_id="same"))
        assert eventually(lambda: served.core.in_flight == 1)

        with pytest.raises(ClientError, match="'same' is in flight") as refused:
            completion(client.generate([1], request_id="same"))
        served.call(served.workers[0].step)
        list(call)

        assert refused.value.status == "ALREADY_EXISTS"
        assert eventually(lambda: served.core.in_flight == 0)
        again = stub.Generate(_request([1], max_tokens=1, request_id="same"))
        assert eventually(lambda: served.core.in_flight == 1)
        served.call(served.workers[0].step)
        assert len(list(again)) == 1
        channel.close()


def test_a_client_that_takes_nothing_costs_no_more_than_its_tokens(text: Text) -> None:
    """Chunks it doesn't take are joined: what waits for it is its tokens, not a queue of messages."""
    with serving(text, is_manual=True) as served:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1, 2], max_tokens=400, logprobs=2, request_id="slow"))
        assert eventually(lambda: served.core.in_flight == 1)

        def all_steps_at_once() -> None:
            for _ in range(400):
                served.workers[0].step()

        served.call(all_steps_at_once)
        chunks = list(call)

        assert len(chunks) < 10
        assert sum(len(chunk.token_ids) for chunk in chunks) == 400
        assert sum(len(chunk.logprobs) for chunk in chunks) == 400
        channel.close()


def _request(ids: list[int], request_id: str = "", **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=ids),
        sampling=inference_pb2.Sampling(**sampling),
    )


# ---- clients that leave, workers that die ----------------------------------------------------------------------------


def test_what_a_stalled_client_leaves_unread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of millions of tokens would else fill the gateway's memory at the model's speed."""
    monkeypatch.setattr(gateway_streams, "MAX_UNREAD_BYTES", 50 * 4)  # token ids alone
    with serving(is_manual=True) as served, connect(served.endpoint) as client, ThreadPoolExecutor(1) as pool:
        worker = served.workers[0]
        call = pool.submit(lambda: completion(client.generate([1], window=8, max_tokens=10**6, n=2)))
        assert eventually(lambda: bool(worker.running))

        def steps_without_a_pause() -> int:
            for _ in range(60):
                worker.step()
            [stream] = served.core.workers["w0"].streams.values()
            return sum(len(sequence.unread) for sequence in stream.sequences)

        assert served.call(steps_without_a_pause) == 0, "what nothing will read is dropped"
        with pytest.raises(ClientError, match="too slowly: 51 tokens in 204 bytes wait") as refused:
            call.result(120)
        assert refused.value.status == "RESOURCE_EXHAUSTED"
        assert eventually(lambda: served.core.in_flight == 0)
        assert len(worker.cancelled) >= 1


def test_a_client_that_leaves_has_its_request_cancelled(text: Text) -> None:
    with serving(text, is_manual=True) as served:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1, 2], max_tokens=400, request_id="left"))
        assert eventually(lambda: served.core.in_flight == 1)
        served.call(served.workers[0].step)
        next(call)

        channel.close()

        assert eventually(lambda: served.core.in_flight == 0)
        assert [*map(client_id, served.workers[0].cancelled)] == ["left"]
        assert served.workers[0].stopped == []
        assert served.core.workers["w0"].sequences == 0


def test_a_deadline_cancels_the_request(text: Text) -> None:
    with serving(text, is_manual=True) as served, connect(served.endpoint) as client:
        with pytest.raises(ClientError) as late:
            completion(client.generate([1], request_id="late", timeout_s=2.0))

        assert late.value.status == "DEADLINE_EXCEEDED"
        assert eventually(lambda: [*map(client_id, served.workers[0].cancelled)] == ["late"])
        assert eventually(lambda: served.core.in_flight == 0)


def test_a_cancellation_does_not_overtake_its_request(text: Text) -> None:
    with serving(text, is_manual=True) as served, connect(served.endpoint) as client:
        worker = served.workers[0]
        may_pass, submit = asyncio.Event(), worker.submit

        async def slow(request: EngineRequest) -> None:
            await may_pass.wait()
            await submit(request)

        worker.submit = slow  # type: ignore[method-assign]
        with pytest.raises(ClientError):
            completion(client.generate([1], request_id="late", timeout_s=2.0))
        assert eventually(lambda: not served.core._streams["late"].is_over_at_worker)
        assert eventually(lambda: served.core._streams["late"].is_abandoned)
        assert worker.cancelled == []

        served.call(may_pass.set)

        assert eventually(lambda: [*map(client_id, worker.cancelled)] == ["late"])
        assert eventually(lambda: served.core.in_flight == 0)
        assert worker.running == {}


def test_closing_the_clients_iterator_cancels_the_request(text: Text) -> None:
    with serving(text, is_manual=True) as served, connect(served.endpoint) as client:
        chunks = client.generate([1, 2], request_id="closed", max_tokens=400)
        step = served.loop.call_soon_threadsafe
        timer = _every(step, served.workers[0].step, lambda: served.core.in_flight == 1)
        next(chunks)
        timer()

        chunks.close()  # type: ignore[attr-defined]

        assert eventually(lambda: [*map(client_id, served.workers[0].cancelled)] == ["closed"])


def _every(post: Any, step: Any, when: Any) -> Any:
    """Post one step as soon as it is due, from a thread; the result waits for that thread."""
    import threading

    def run() -> None:
        assert eventually(when)
        post(step)

    thread = threading.Thread(target=run)
    thread.start()
    return thread.join


def test_a_dead_worker_is_told_by_its_name_and_others_go_on(text: Text) -> None:
    with serving(text, workers=2, is_manual=True) as served, connect(served.endpoint) as client:
        channel, stub = raw(served.endpoint)
        kept = stub.Generate(_inference([1], "w1"))
        assert eventually(lambda: served.core.in_flight == 1)

        served.call(served.core.lose_worker, "w0", "its process ended")
        served.call(served.workers[1].step)

        assert len(list(kept)) == 1
        with pytest.raises(ClientError, match="worker w0 is down"):
            completion(client.generate([1], worker="w0"))
        health = {worker["id"]: worker["health"] for worker in client.status()["workers"]}
        assert health == {"w0": "dead", "w1": "healthy"}
        channel.close()


def _inference(ids: list[int], worker: str) -> inference_pb2.GenerateRequest:
    request = _request(ids, max_tokens=1)
    request.worker = worker
    return request


def test_a_workers_error_reaches_its_client(text: Text) -> None:
    with serving(text, is_manual=True) as served:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1], request_id="bad"))
        assert eventually(lambda: served.core.in_flight == 1)
        assert eventually(lambda: served.workers[0].running)
        error = Output(
            served.workers[0].name_of("bad"),
            0,
            (),
            finish_reason=FinishReason.ERROR,
            error="the output was not a number",
        )

        served.call(served.core.on_outputs, "w0", [error])

        with pytest.raises(grpc.RpcError, match="not a number") as failed:
            list(call)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert eventually(lambda: served.core.in_flight == 0)
        channel.close()


def test_late_outputs_of_unknown_requests_are_dropped(shared: Served, client: Client) -> None:
    shared.call(shared.core.on_outputs, "w0", [Output("never heard of", 0, (1,))])

    assert completion(client.generate([1], max_tokens=1))["token_ids"] == [1]


def test_stopping_refuses_new_requests_and_finishes_those_in_flight(text: Text) -> None:
    with serving(text, is_manual=True) as served, connect(served.endpoint) as client:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1], max_tokens=1))
        assert eventually(lambda: served.core.in_flight == 1)

        served.call(served.core.stop)
        with pytest.raises(ClientError, match="is stopping") as refused:
            completion(client.generate([1]))
        served.call(served.workers[0].step)

        assert refused.value.status == "UNAVAILABLE"
        assert len(list(call)) == 1
        channel.close()


def test_requests_past_the_grace_are_cancelled_at_their_worker(text: Text) -> None:
    with serving(text, is_manual=True) as served:
        channel, stub = raw(served.endpoint)
        call = stub.Generate(_request([1], request_id="long"))
        assert eventually(lambda: served.core.in_flight == 1)

        served.call(served.server.stop, 0.1)
        served.call(served.core.settle)

        with pytest.raises(grpc.RpcError):
            list(call)
        assert [*map(client_id, served.workers[0].cancelled)] == ["long"]
        assert served.core.in_flight == 0
        channel.close()
