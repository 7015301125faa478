"""A request is counted before it is parsed, and must come in time: neither holds the gateway's loop, nor others' places."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from gateway_kit import serving
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli.client import ClientError, completion, connect
from kvtier.cluster.gateway import server as gateway_server
from kvtier.cluster.gateway.requests import wire as gateway_wire
from kvtier.cluster.gateway.requests.wire import excess
from kvtier.proto import cache_pb2, inference_pb2

REQUEST = inference_pb2.GenerateRequest
KIND = REQUEST.DESCRIPTOR
GENERATE = "/kvtier.v1.Inference/Generate"


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def chat_of(messages: int) -> REQUEST:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user")] * messages)
    return REQUEST(chat=chat)


@given(
    ids=st.lists(st.integers(0, 2**62), max_size=60),
    stops=st.lists(st.text(max_size=5), max_size=30),
    messages=st.integers(0, 30),
    bound=st.integers(0, 60),
)
@settings(max_examples=200, deadline=None)
def test_what_is_counted_is_what_is_there(
    ids: list[int], stops: list[str], messages: int, bound: int
) -> None:
    plain = REQUEST(token_ids=inference_pb2.TokenIds(ids=ids), sampling=inference_pb2.Sampling(stop=stops))
    chat = chat_of(messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_wire, "MAX_NUMBERS", bound)
        too_many_ids = excess(plain.SerializeToString(), KIND)
        patch.setattr(gateway_wire, "MAX_NUMBERS", 10**9)
        patch.setattr(gateway_wire, "MAX_FIELDS", bound)
        too_many_fields = excess(chat.SerializeToString(), KIND)

    assert bool(too_many_ids) == (len(ids) > bound)
    assert bool(too_many_fields) == (1 + 2 * messages > bound)


@given(data=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_counted_without_an_error(data: bytes) -> None:
    assert excess(data, KIND) == ""


def test_ids_that_are_not_packed_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_wire, "MAX_FIELDS", 100)
    ids = b"\x08\x05" * 101  # TokenIds.ids, each with its tag
    number = KIND.fields_by_name["token_ids"].number

    assert "at most 100 fields" in excess(varint(number << 3 | 2) + varint(len(ids)) + ids, KIND)


@pytest.mark.parametrize(
    ("request_of", "named"),
    [
        (
            lambda: REQUEST(token_ids=inference_pb2.TokenIds(ids=[5] * (2**20 + 1)), window=16),
            "1048576 numbers",
        ),
        (lambda: chat_of(60_001), "120000 fields"),
        (lambda: cache_pb2.KeysRequest(keys=["ab"] * 100_001), "keys must be at most 100000"),
    ],
    ids=["ids", "messages", "keys"],
)
def test_a_request_of_too_many_parts_is_refused_by_the_number(request_of: Any, named: str) -> None:
    message = request_of()
    path = GENERATE if isinstance(message, REQUEST) else "/kvtier.v1.Cache/Pin"
    with serving() as served, grpc.insecure_channel(served.endpoint) as channel:
        make = channel.unary_stream if isinstance(message, REQUEST) else channel.unary_unary
        call = make(path, lambda sent: sent.SerializeToString(), lambda came: came)
        with pytest.raises(grpc.RpcError) as refused:
            list(call(message, timeout=60))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in (refused.value.details() or "")


def test_a_call_that_sends_no_request_ends_and_leaves_its_place_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_server, "REQUEST_S", 0.3)
    monkeypatch.setattr(gateway_server, "ADMIN_RPCS", 4)
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    with (
        serving(max_sequences=4) as served,
        connect(served.endpoint) as client,
        grpc.insecure_channel(served.endpoint) as channel,
        ExitStack() as stack,
    ):
        stack.callback(never.set)
        calls = [channel.stream_stream(GENERATE)(nothing()) for _ in range(8)]
        codes = {call.code() for call in calls}
        ended = channel.stream_stream(GENERATE)(iter(()))

        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert calls[0].details() == "no request came in 0.3 s"
        assert ended.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert completion(client.generate([1], max_tokens=1))["token_ids"] == [1]
        with pytest.raises(ClientError, match="unknown tenant"):
            completion(client.generate([1], tenant="nothing"))
