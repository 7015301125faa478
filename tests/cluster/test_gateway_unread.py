"""What a slow client leaves is kept in few bytes, and reaches it whole, in chunks that it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway_kit import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually, until

from kvtier.cli.client import ClientError, completion, connect
from kvtier.cluster.config.deployment import GrpcConfig
from kvtier.cluster.gateway.streams import streams as gateway_streams
from kvtier.cluster.gateway.streams import unread as gateway_unread
from kvtier.cluster.gateway.streams.unread import Unread
from kvtier.proto import inference_pb2
from kvtier.workers.requests.api import TokenLogprobs

SMALLEST_MESSAGE = 65536  # of grpc.max_message_bytes


def likely(token_id: int, tops: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5 * token_id, tuple((2**32 - 1 - i, -0.25 * i) for i in range(tops)))


steps = st.one_of(
    st.tuples(st.just("tokens"), st.integers(1, 400)),
    st.tuples(st.just("text"), st.text(max_size=300) | st.just("\N{SNOWMAN}" * 20_000)),
    st.tuples(st.just("take"), st.just(0)),
)


@given(steps=st.lists(steps, max_size=20), tops=st.sampled_from([None, 0, 1, 20]))
@settings(max_examples=150, deadline=None)
def test_all_that_was_given_comes_out_in_order_in_chunks_of_few_bytes(
    steps: list[tuple[str, int | str]], tops: int | None
) -> None:
    unread = Unread()
    ids: list[int] = []
    text = ""
    chunks: list[inference_pb2.GenerateChunk] = []

    def take() -> None:
        chunks.append(inference_pb2.GenerateChunk(request_id="x" * 128))
        assert unread.fill(chunks[-1]) == len(chunks[-1].token_ids)

    for step, what in steps:
        if step == "tokens":
            new = list(range(len(ids), len(ids) + int(what)))
            unread.add(new, () if tops is None else [likely(one, tops) for one in new])
            ids += new
        elif step == "text":
            unread.add_text(str(what))
            text += str(what)
        elif unread:
            take()
        waiting = len(ids) - sum(len(chunk.token_ids) for chunk in chunks)
        shown = sum(len(chunk.text) for chunk in chunks)
        assert len(unread) == waiting
        assert bool(unread) == (waiting > 0 or len(text) > shown)
        assert unread.nbytes <= 4 * (len(text) - shown) + 2 * waiting * (9 + 8 * (tops or 0))
    while unread:
        take()

    assert "".join(chunk.text for chunk in chunks) == text
    assert [one for chunk in chunks for one in chunk.token_ids] == ids
    told = [one for chunk in chunks for one in chunk.logprobs]
    assert [one.logprob for one in told] == ([] if tops is None else [-0.5 * one for one in ids])
    assert all([(t.id, t.logprob) for t in one.top] == list(likely(0, tops or 0).top) for one in told)
    assert all(len(chunk.logprobs) in (0, len(chunk.token_ids)) for chunk in chunks)
    assert all(chunk.ByteSize() <= SMALLEST_MESSAGE - 1000 for chunk in chunks)
    assert unread.nbytes == 0


def test_a_token_with_20_logprobs_takes_some_hundred_bytes() -> None:
    """As objects of Python it took 2.4 KB."""
    unread = Unread()
    unread.add([7] * 1000, [likely(7, 20)] * 1000)

    assert unread.nbytes <= 200 * 1000


def test_a_slow_client_gets_all_logprobs_in_messages_that_it_takes() -> None:
    config = GrpcConfig(port=0, max_message_bytes=SMALLEST_MESSAGE)
    with (
        serving(config=config, is_manual=True) as served,
        connect(served.endpoint) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        [worker] = served.workers
        call = pool.submit(lambda: list(client.generate([5, 6], max_tokens=500, logprobs=20, n=2)))
        until(lambda: worker.running, "it runs")

        def all_steps() -> None:
            while worker.running:
                worker.step()

        served.call(all_steps)  # in one turn: nothing is drained meanwhile
        chunks = call.result(60)

    assert sum(len(chunk.token_ids) for chunk in chunks) == 1000
    assert sum(len(chunk.logprobs or ()) for chunk in chunks) == 1000
    assert completion(chunks)["usage"]["completion_tokens"] == 1000


def test_what_waits_for_a_stalled_client_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_streams, "MAX_UNREAD_BYTES", 4000)
    with serving(is_manual=True) as served, connect(served.endpoint) as client, ThreadPoolExecutor(1) as pool:
        [worker] = served.workers
        call = pool.submit(lambda: completion(client.generate([1], window=8, max_tokens=10**6, logprobs=2)))
        assert eventually(lambda: bool(worker.running))

        def steps_without_a_pause() -> None:
            for _ in range(300):
                worker.step()

        served.call(steps_without_a_pause)
        with pytest.raises(ClientError, match=r"1[56]\d tokens in 40\d\d bytes wait for it, at most 4000"):
            call.result(60)


def test_the_smallest_message_holds_the_longest_chunk() -> None:
    assert 2 * gateway_unread.MAX_CHUNK_BYTES + 2000 <= SMALLEST_MESSAGE
