"""Requests go on where their worker is lost, stops, or only prefills: over real gRPC, with workers that echo."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from drive_kit import Drive, driving
from gateway_kit import EchoWorker, echo_info, make_byte_tokenizer, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually, until

from kvtier.cli.client import Client, ClientError, completion, connect
from kvtier.cluster.gateway import in_flight as gateway_flights
from kvtier.cluster.gateway.in_flight import MAX_MOVES
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.cluster.gateway.streams import streams as gateway_streams
from kvtier.workers.models.text import Text
from kvtier.workers.requests.api import EngineRequest, FinishReason, Output, QueueFull, Timings

PROMPT = "abc STOP def \N{SNOWMAN}\N{SNOWMAN} "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """The byte tokenizer."""
    loaded = Text.load(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def steady(text: Text) -> Iterator[Client]:
    """A gateway whose workers never die: what it gives is what others must give too."""
    with serving(text) as served, connect(served.endpoint) as client:
        yield client


def as_told(result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on every worker."""
    sequences = result.get("sequences") or [result]
    kept = ("text", "token_ids", "logprobs", "finish_reason")
    return {
        "sequences": [{name: one.get(name) for name in kept} for one in sequences],
        "usage": result["usage"],
    }


# ---- a worker is lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", ["STOP", "\N{SNOWMAN}\N{SNOWMAN}", "never"])
def test_text_tokens_and_logprobs_are_the_same_wherever_workers_are_lost(
    text: Text, steady: Client, n: int, stop: str
) -> None:
    options: dict[str, Any] = {"n": n, "stop": [stop], "max_tokens": 40, "logprobs": 2, "seed": 5}
    expected = as_told(completion(steady.generate(PROMPT, **options)))

    @settings(max_examples=12, deadline=None)
    @given(first=st.integers(0, 12), then=st.lists(st.integers(1, 12), max_size=MAX_MOVES - 1))
    def same(first: int, then: list[int]) -> None:
        cuts = [first, *then]
        with driving(text, workers=MAX_MOVES + 1) as drive:
            call = drive.ask(PROMPT, **options)
            for cut in cuts:
                holder = next((one for one in drive.workers if one.running), None)
                if holder is None:
                    break
                drive.step(holder, cut)
                drive.lose(holder)
                if not eventually(lambda: any(one.running for one in drive.workers) or call.done(), 30.0):
                    break
            assert as_told(drive.finish(call)) == expected

    same()


def test_what_is_over_is_not_computed_again(text: Text) -> None:
    """Of three sequences, one has met its stop string when the worker dies."""
    with driving(text) as drive:
        call = drive.ask("ab", n=2, max_tokens=6, request_id="two")
        first = drive.holder()
        drive.step(first, 2)
        end = Output(first.name_of("two"), 1, (9,), finish_reason=FinishReason.LENGTH)
        del first.running[first.name_of("two")][1]
        drive.served.call(drive.served.core.on_outputs, first.info.worker_id, [end])
        drive.lose(first)
        second = drive.holder()

        [request] = second.submitted
        assert (request.resumed, request.ended) == (((97, 98), (97, 98, 9)), (1,))
        assert drive.served.core.workers[second.info.worker_id].sequences == 1
        result = drive.finish(call)

    assert [one["token_ids"] for one in result["sequences"]] == [[97, 98] * 3, [97, 98, 9]]


def test_the_next_worker_gets_an_id_that_late_outputs_of_the_first_one_don_t_have(text: Text) -> None:
    with driving(text) as drive:
        call = drive.ask("abcd", max_tokens=8, request_id="mine")
        first = drive.holder()
        drive.step(first, 3)
        drive.lose(first)
        second = drive.holder()
        late = [Output(one.name_of("mine"), 0, (1,)) for one in (first, second)]
        drive.served.call(drive.served.core.on_outputs, first.info.worker_id, late)

        result = drive.finish(call)

    assert (result["text"], result["request_id"]) == ("abcdabcd", "mine")
    assert first.name_of("mine") != second.name_of("mine")


def test_a_client_that_guesses_a_name_at_a_worker_gets_another_one(text: Text) -> None:
    with driving(text) as drive:
        first = drive.ask("abcd", max_tokens=8, request_id="mine", worker="w0")
        name = drive.workers[0].name_of("mine")
        second = drive.ask("efgh", max_tokens=8, request_id=name, worker="w0")

        assert len(drive.workers[0].running) == 2
        assert [drive.finish(call)["text"] for call in (first, second)] == ["abcdabcd", "efghefgh"]


def test_a_late_output_of_an_old_request_is_no_token_of_a_new_one_of_its_id(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is in a long step: it has not ended the old one when the gateway stops waiting for that."""

    async def deaf(request_id: str, is_stopped: bool) -> None:
        return None

    monkeypatch.setattr(gateway_flights, "LAST_WORD_S", 0.05)
    with driving(text, workers=1) as drive:
        [worker] = drive.workers
        worker.cancel = deaf  # type: ignore[method-assign]
        with pytest.raises(ClientError):
            completion(drive.client.generate("abcd", request_id="x", timeout_s=3.0))
        assert eventually(lambda: drive.served.core.in_flight == 0)
        [old] = worker.running
        call = drive.ask("efgh", max_tokens=4, request_id="x")
        drive.served.call(drive.served.core.on_outputs, "w0", [Output(old, 0, (1,)), Output("x", 0, (2,))])

        assert drive.finish(call)["text"] == "efgh"


def test_what_a_worker_takes_after_all_has_left_is_called_off_there(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_flights, "LAST_WORD_S", 0.05)
    with driving(text, workers=1) as drive:
        [worker] = drive.workers
        gate, submit = drive.served.call(asyncio.Event), worker.submit

        async def slow(request: EngineRequest) -> None:
            await gate.wait()
            await submit(request)

        worker.submit = slow  # type: ignore[method-assign]
        with pytest.raises(ClientError):
            completion(drive.client.generate("abcd", max_tokens=400, request_id="x", timeout_s=3.0))
        assert eventually(lambda: drive.served.core.in_flight == 0)
        assert worker.submitted == worker.cancelled == []
        drive.served.call(gate.set)

        assert eventually(lambda: len(worker.cancelled) == 1 and not worker.running)
        assert worker.cancelled == [worker.name_of("x")]


def test_a_request_moves_so_often_and_then_fails_naming_worker_and_reason(text: Text) -> None:
    with driving(text, workers=MAX_MOVES + 2) as drive:
        call = drive.ask("abcd", max_tokens=80)
        lost = []
        for _ in range(MAX_MOVES + 1):
            holder = drive.holder()
            drive.step(holder, 2)
            lost.append(holder.info.worker_id)
            drive.lose(holder, "it was unplugged")

        with pytest.raises(ClientError) as failed:
            call.result(120)

    assert len(set(lost)) == MAX_MOVES + 1
    assert failed.value.status == "UNAVAILABLE"
    assert f"worker {lost[-1]} went down: it was unplugged" in str(failed.value)
    assert f"another worker {MAX_MOVES} times already" in str(failed.value)


def test_the_last_workers_requests_fail_at_once(text: Text) -> None:
    with driving(text, workers=1) as drive:
        call = drive.ask("abcd", max_tokens=80)
        drive.lose(drive.holder())

        with pytest.raises(ClientError, match="w0 went down: its process ended; no other worker") as failed:
            call.result(120)

    assert failed.value.status == "UNAVAILABLE"


def test_a_full_worker_takes_nothing_elses_requests(text: Text) -> None:
    with driving(text, max_sequences=2) as drive:
        calls = [drive.ask("ab", max_tokens=4, n=2, worker=name) for name in ("w0", "w1")]
        drive.lose(drive.workers[0])

        with pytest.raises(ClientError, match="w0 went down.* w1 has 2 sequences in flight") as failed:
            calls[0].result(120)
        assert failed.value.status == "UNAVAILABLE"
        drive.finish(calls[1])


def test_what_has_given_too_many_tokens_is_not_moved(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_streams, "MAX_MOVED_TOKENS", 5)
    with driving(text) as drive:
        short, long = (drive.ask("ab", max_tokens=9, worker="w0", request_id=name) for name in "sl")
        drive.step(drive.workers[0], 5)
        drive.workers[0].running.pop(drive.workers[0].name_of("s"))
        drive.step(drive.workers[0])
        drive.lose(drive.workers[0])

        with pytest.raises(ClientError, match="has given too many tokens, 6"):
            long.result(120)
        assert drive.finish(short)["text"] == "ababababa"


def test_a_worker_that_stops_gives_its_requests_to_others(text: Text) -> None:
    with driving(text) as drive:
        call = drive.ask("abcd", max_tokens=8, n=2, request_id="r")
        first = drive.holder()
        drive.step(first, 3)
        first.running.clear()
        stopping = [
            Output(
                first.name_of("r"),
                index,
                (),
                finish_reason=FinishReason.CANCELLED,
                error="the worker is stopping",
            )
            for index in range(2)
        ]
        drive.served.call(drive.served.core.on_outputs, first.info.worker_id, stopping)

        assert drive.holder(but=first) is not first
        assert [one["text"] for one in drive.finish(call)["sequences"]] == ["abcdabcd"] * 2
        assert drive.served.core.workers[first.info.worker_id].down is None


@pytest.mark.parametrize(
    ("error", "is_down"),
    [
        (OwnerDown("its process ended"), True),
        (RuntimeError("the step loop has ended"), True),
        (Refusal(grpc.StatusCode.UNAVAILABLE, "w can't be reached now"), False),
    ],
)
def test_a_worker_that_can_t_take_a_request_leaves_it_to_another(
    text: Text, error: Exception, is_down: bool
) -> None:
    async def refuse(request: EngineRequest) -> None:
        raise error

    with driving(text) as drive:
        drive.workers[0].submit = refuse  # type: ignore[method-assign]
        call = drive.ask("abcd", max_tokens=8, worker="w0")

        assert drive.finish(call)["text"] == "abcdabcd"
        assert (drive.served.core.workers["w0"].down is not None) == is_down
        # Where it only can't be reached, what it may have heard is called off.
        assert eventually(lambda: bool(drive.workers[0].cancelled) != is_down)


def test_a_full_queue_elsewhere_is_no_error_of_a_request_that_moves(text: Text) -> None:
    async def full(request: EngineRequest) -> None:
        raise QueueFull("1 requests are waiting")

    with driving(text, workers=3) as drive:
        call = drive.ask("abcd", max_tokens=8, worker="w0")
        drive.step(drive.workers[0], 2)
        drive.workers[1].submit = full  # type: ignore[method-assign]
        drive.lose(drive.workers[0])

        assert drive.finish(call)["text"] == "abcdabcd"
        assert drive.workers[2].submitted


def test_what_a_submit_raises_unforeseen_ends_its_request_alone(text: Text) -> None:
    async def broken(request: EngineRequest) -> None:
        raise KeyError("nothing thought of this")

    with driving(text) as drive:
        drive.workers[0].submit = broken  # type: ignore[method-assign]
        with pytest.raises(ClientError, match="KeyError: 'nothing thought of this'") as failed:
            completion(drive.client.generate("ab", worker="w0", timeout_s=120))
        assert failed.value.status == "INTERNAL"


def test_a_client_that_leaves_ends_its_request_where_it_is_now(text: Text) -> None:
    with driving(text) as drive:
        chunks = drive.client.generate("abcd", max_tokens=400, request_id="left", worker="w0")
        taken: Future[Any] = Future()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: taken.set_result(next(iter(chunks))))
            until(lambda: drive.workers[0].running, "it runs")
            drive.step(drive.workers[0])
            taken.result(120)
        drive.lose(drive.workers[0])
        until(lambda: drive.workers[1].running, "it goes on")

        chunks.close()  # type: ignore[attr-defined]

        assert eventually(lambda: drive.workers[1].cancelled == [drive.workers[1].name_of("left")])
        assert drive.workers[0].cancelled == []


def test_nothing_moves_a_request_that_its_client_has_left(text: Text) -> None:
    async def deaf(request_id: str, is_stopped: bool) -> None:
        return None

    with driving(text) as drive:
        drive.workers[0].cancel = deaf  # type: ignore[method-assign]
        with pytest.raises(ClientError) as late:
            completion(drive.client.generate([1], worker="w0", timeout_s=3.0))
        until(
            lambda: all(s.is_abandoned for s in drive.served.core._streams.values()), "the gateway knows it"
        )
        drive.lose(drive.workers[0])

        assert late.value.status == "DEADLINE_EXCEEDED"
        assert eventually(lambda: drive.served.core.in_flight == 0)
        assert drive.workers[1].submitted == []


def test_usage_and_times_are_the_first_workers_up_to_the_first_token(text: Text) -> None:
    with driving(text) as drive:
        call = drive.ask("abcdefgh", max_tokens=4, request_id="r", worker="w0")
        first = Timings(queue=1.0, load=2.0, prefill=3.0, ttft=10.0, decode=0.0)
        last = Timings(queue=5.0, load=6.0, prefill=7.0, ttft=110.0, decode=20.0)
        [sequence] = drive.workers[0].running[drive.workers[0].name_of("r")]
        output = replace(sequence.next_output(None), timings=first)
        drive.served.call(drive.served.core.on_outputs, "w0", [output])
        drive.lose(drive.workers[0])
        until(lambda: drive.workers[1].running, "it goes on")
        drive.step(drive.workers[1], 2)
        [sequence] = drive.workers[1].running.pop(drive.workers[1].name_of("r"))
        output = sequence.next_output(None)
        assert output.usage is not None
        usage = replace(output.usage, cached_tokens={"L3": 8}, computed_tokens=0)
        drive.served.call(drive.served.core.on_outputs, "w1", [replace(output, timings=last, usage=usage)])
        result = call.result(120)

    assert result["usage"]["computed_tokens"] == 4
    assert result["usage"]["completion_tokens"] == 4
    # From the first token to the last: 100 ms to the next worker's first, and its 20.
    assert result["timings_ms"] == {"queue": 1.0, "load": 2.0, "prefill": 3.0, "ttft": 10.0, "decode": 120.0}


def test_explain_says_that_a_request_has_moved_and_why(text: Text) -> None:
    with driving(text) as drive:
        call = drive.ask("abcd", max_tokens=8, request_id="r", worker="w0")
        drive.step(drive.workers[0], 3)
        drive.lose(drive.workers[0])
        drive.finish(call)
        moved = drive.client.explain("r")
        drive.finish(drive.ask("ab", max_tokens=2, request_id="stayed"))
        stayed = drive.client.explain("stayed")

    assert (moved["request_id"], moved["worker"], moved["prompt_tokens"]) == ("r", "w1", 4)
    assert moved["moves"] == [{"worker": "w1", "tokens": 3, "reason": "w0 went down: its process ended"}]
    assert stayed["moves"] == []


def test_explain_finds_what_a_gateway_before_had_moved(text: Text) -> None:
    with driving(text) as drive:
        call = drive.ask("abcd", max_tokens=8, request_id="r", worker="w0")
        drive.lose(drive.workers[0])
        drive.finish(call)
        drive.served.core._latest.clear()

        assert drive.client.explain("r")["worker"] == "w1"


# ---- workers come and go -----------------------------------------------------------------------------------------


def test_a_worker_that_comes_back_takes_requests_again(text: Text) -> None:
    with driving(text, workers=1) as drive:
        old = drive.workers[0]
        assert is_serving(drive)
        drive.lose(old)
        assert eventually(lambda: not is_serving(drive))
        with pytest.raises(ClientError, match="no worker is healthy"):
            completion(drive.client.generate("ab"))

        new = EchoWorker(old.info, sink=drive.served.core.on_outputs, is_manual=True)
        drive.workers[0] = new
        drive.served.call(drive.served.core.attach, new.info, new)

        assert eventually(lambda: is_serving(drive))
        assert drive.finish(drive.ask("ab", max_tokens=4, worker="w0"))["text"] == "abab"


def is_serving(drive: Drive) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(drive.served.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=120)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_late_news_of_an_old_life_don_t_end_the_new_one(text: Text) -> None:
    with driving(text) as drive:
        core = drive.served.core
        old = core.workers["w0"]
        new = EchoWorker(drive.workers[0].info, sink=core.on_outputs, is_manual=True)
        drive.served.call(core.attach, new.info, new)

        drive.served.call(core.lose, old, "found out late")

        assert core.workers["w0"].down is None and old.down is not None


def test_counters_of_an_old_life_stay_in_the_sum(text: Text) -> None:
    with driving(text) as drive:
        before = drive.client.stats()["requests"]
        new = EchoWorker(drive.workers[0].info, sink=drive.served.core.on_outputs, is_manual=True)
        drive.served.call(drive.served.core.attach, new.info, new)
        after = drive.client.stats()["requests"]

    assert (before, after) == (4, 6)


def test_a_worker_that_is_taken_out_is_known_no_more_and_its_requests_go_on(text: Text) -> None:
    with driving(text) as drive:
        call = drive.ask("abcd", max_tokens=8, worker="w0")
        drive.step(drive.workers[0], 3)

        assert drive.served.call(drive.served.core.detach, "w0")
        assert not drive.served.call(drive.served.core.detach, "w0")
        drive.workers[0].running.clear()

        with pytest.raises(ClientError, match="unknown worker 'w0': there are w1"):
            completion(drive.client.generate("x", worker="w0"))
        assert drive.finish(call)["text"] == "abcdabcd"
        assert [worker["id"] for worker in drive.client.status()["workers"]] == ["w1"]


# ---- prefill and decode ------------------------------------------------------------------------------------------


@contextmanager
def split(text: Text, *more: Any) -> Iterator[Drive]:
    """A worker that prefills on one node, and one that decodes on another."""
    digest = text.digest
    infos = [
        echo_info("p0", digest, "n0", "prefill"),
        echo_info("d0", digest, "n1", "decode"),
        *more,
    ]
    with driving(text, infos=infos) as drive:
        drive.served.core.addresses.attach("n0", "host:1")
        drive.served.core.addresses.attach("n1", "host:2")
        yield drive


def test_a_request_is_prefilled_at_one_worker_and_goes_on_at_another(text: Text, steady: Client) -> None:
    with split(text) as drive:
        prefiller, decoder = drive.workers
        call = drive.ask("abcdefgh", max_tokens=5, n=2, request_id="r")
        result = drive.finish(call)
        told = drive.client.explain("r")
        [first], [second] = prefiller.submitted, decoder.submitted
    expected = completion(steady.generate("abcdefgh", max_tokens=5, n=2, request_id="r"))

    assert as_told(result) == as_told(expected)
    assert result["worker"] == "p0"
    assert (first.is_prefill_only, first.resumed, first.remotes) == (True, (), ())
    assert (second.is_prefill_only, second.resumed) == (False, ((97,), (97,)))
    assert second.remotes == (("n0", "host:1", 2),)
    assert told["moves"] == [{"worker": "d0", "tokens": 2, "reason": "p0 prefilled it"}]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [("abc", {}), ("abcdefgh", {"no_cache": True}), ("abcdefgh", {"max_tokens": 1})],
    ids=["no whole page", "no cache", "one token"],
)
def test_what_leaves_nothing_to_hand_over_is_decoded_at_once(
    text: Text, prompt: str, options: dict[str, Any]
) -> None:
    with split(text) as drive:
        drive.finish(drive.ask(prompt, **{"max_tokens": 4, **options}))

        assert [len(worker.submitted) for worker in drive.workers] == [0, 1]


def test_where_one_role_is_missing_the_other_one_does_both(text: Text) -> None:
    for lost in (0, 1):
        with split(text) as drive:
            drive.lose(drive.workers[lost])
            result = drive.finish(drive.ask("abcdefgh", max_tokens=9))
            [request] = drive.workers[1 - lost].submitted

        assert result["text"] == "abcdefgha"
        assert not request.is_prefill_only


def test_a_decoder_that_is_lost_after_a_handover_leaves_it_to_who_is_there(text: Text) -> None:
    with split(text) as drive:
        prefiller, decoder = drive.workers
        call = drive.ask("abcdefgh", max_tokens=9)
        drive.step(prefiller, 2)
        until(lambda: decoder.running, "it is handed over")
        drive.step(decoder, 3)
        drive.lose(decoder)

        assert drive.finish(call)["text"] == "abcdefgha"
        assert [request.is_prefill_only for request in prefiller.submitted] == [True, False]
        assert prefiller.submitted[1].resumed == ((97, 98, 99, 100),)


def test_where_decoders_are_full_the_prefiller_goes_on_itself(text: Text) -> None:
    digest = text.digest
    infos = [echo_info("p0", digest, "n0", "prefill"), echo_info("d0", digest, "n1", "decode")]
    with driving(text, infos=infos, max_sequences=1) as drive:
        prefiller, decoder = drive.workers
        first = drive.ask("abcdefgh", max_tokens=9)
        drive.step(prefiller, 2)
        until(lambda: decoder.running, "it is handed over")
        second = drive.ask("hgfedcba", max_tokens=9)
        drive.step(prefiller, 2)

        until(lambda: len(prefiller.submitted) == 3, "it goes on where it was prefilled")
        with pytest.raises(ClientError, match="1 sequences in flight") as refused:
            completion(drive.client.generate("abc", max_tokens=9))
        assert refused.value.status == "RESOURCE_EXHAUSTED"
        assert [drive.finish(call)["text"] for call in (first, second)] == ["abcdefgha", "hgfedcbah"]


def test_a_prefiller_that_is_lost_before_its_last_word_costs_nothing_that_was_given(text: Text) -> None:
    with split(text, echo_info("p1", text.digest, "n2", "prefill")) as drive:
        call = drive.ask("abcdefgh", max_tokens=9, worker="p0")
        drive.step(drive.workers[0])
        drive.lose(drive.workers[0])
        result = drive.finish(call)

        assert result["text"] == "abcdefgha"
        assert [len(worker.submitted) for worker in drive.workers] == [1, 1, 0]


def test_a_stop_string_in_the_first_token_ends_it_where_it_was_prefilled(text: Text) -> None:
    with split(text) as drive:
        result = drive.finish(drive.ask("abcdefgh", max_tokens=9, stop=["a"]))

        assert (result["text"], result["finish_reason"]) == ("", "stop")
        assert drive.workers[1].submitted == []


def test_a_worker_that_does_both_needs_no_handover(text: Text) -> None:
    infos = [echo_info(name, text.digest) for name in ("w0", "w1")]
    with driving(text, infos=infos) as drive:
        drive.finish(drive.ask("abcdefgh", max_tokens=3))

        assert not any(r.is_prefill_only for worker in drive.workers for r in worker.submitted)
