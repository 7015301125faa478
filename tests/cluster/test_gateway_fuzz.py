"""Any value of any field of both services is answered, or refused by its name: nothing a client sends ends as INTERNAL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from gateway_kit import Served, make_byte_tokenizer, serving
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from waiting import eventually

from kvtier.proto import cache_pb2, inference_pb2
from kvtier.workers.models.text import Text

METHODS: list[MethodDescriptor] = [
    method
    for file in (inference_pb2.DESCRIPTOR, cache_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]
CLIENTS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
WORDS = [
    *(
        "",
        "default",
        "acme",
        "w0",
        "n0",
        "L1",
        "L4",
        "remote",
        "user",
        "closed",
        "ab" * 32,
        "abcd",
        "#",
        "r#1.2",
    ),
    *("x" * 3000, "\N{GRINNING FACE}" * 2000, "\n\t\0", "{{7*7}}", "<|im_start|>", "e\u0301\u202e"),
    *("/", "//", "/..", "/tmp/..", "/tmp/a\0b", "/tmp/" + "n" * 300, "/nowhere/at/all", "relative/path"),
]


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """What a field may be set to, its edges above all."""
    kind = field.cpp_type
    if field.name == "max_tokens":
        return st.sampled_from([-(2**31), -1, 0, 1, 2, 4])  # an echo that is asked for more takes long
    if kind in RANGES:
        low, high = RANGES[kind]
        edges = [v for v in (low, -1, 0, 1, 16, 17, 64, 2**24, 2**24 + 1, high) if low <= v <= high]
        return st.sampled_from(edges) | st.integers(0, 300)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from([0.0, 1.0, 1e-320, 1e-46, -1.0, 100.0]) | st.floats(width=32)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([-1, 0, 1, 2, 99])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=64)
    return st.sampled_from(WORDS) | st.text(max_size=8)


def is_list(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor) -> Message:
    """A message of any kind, each field of which is set or isn't."""
    made: Message = message_factory.GetMessageClass(kind)()
    fill(draw, made)
    return made


def fill(draw: st.DrawFn, made: Message) -> None:
    for field in made.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            getattr(made, field.name).update(draw(st.dictionaries(values(key), values(value), max_size=20)))
        elif field.message_type is not None:
            for _ in range(draw(st.integers(1, 3)) if is_list(field) else 1):
                fill(draw, getattr(made, field.name).add() if is_list(field) else getattr(made, field.name))
        elif is_list(field):
            getattr(made, field.name).extend(draw(st.lists(values(field), max_size=20)))
        else:
            setattr(made, field.name, draw(values(field)))


def ask(channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> grpc.RpcError | None:
    """What a call is refused with."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(path, lambda sent: sent, lambda came: came)
    try:
        answer = call(data, timeout=30)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error
    return None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    text = Text.load(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    with serving(text) as served:
        yield served
        assert eventually(lambda: served.core.in_flight == 0)
        assert all(worker.sequences == 0 for worker in served.core.workers.values())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_whatever_a_client_sends_is_answered_or_refused_by_name(
    served: Served, method: MethodDescriptor
) -> None:
    many = settings(
        max_examples=150 if method.name == "Generate" else 40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    @many
    @given(message=messages(method.input_type))
    def holds(message: Message) -> None:
        check(ask(channel, method, message.SerializeToString()))

    with grpc.insecure_channel(served.endpoint) as channel:
        holds()


def check(error: grpc.RpcError | None) -> None:
    if error is not None:
        assert error.code() in CLIENTS_FAULT, f"{error.code()}: {error.details()}"
        assert error.details()


@settings(max_examples=60, deadline=None)
@given(method=st.sampled_from(METHODS), data=st.binary(max_size=200))
@example(method=METHODS[0], data=b"\x0a\xff\xff\xff\xff\x0f")
def test_bytes_that_are_no_message_are_the_clients_fault(
    served: Served, method: MethodDescriptor, data: bytes
) -> None:
    with grpc.insecure_channel(served.endpoint) as channel:
        check(ask(channel, method, data))


@pytest.mark.parametrize("path", ["/", "//", "/..", "/tmp/a\0b", "/tmp/" + "n" * 300, "relative", ""])
def test_a_path_that_can_t_be_a_recording_is_refused_and_shown(served: Served, path: str) -> None:
    [record] = [method for method in METHODS if method.name == "Record"]
    with grpc.insecure_channel(served.endpoint) as channel:
        error = ask(channel, record, cache_pb2.RecordRequest(path=path).SerializeToString())

    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert repr(path)[:-1][:100] in (error.details() or "")


@pytest.mark.parametrize("char", ["x", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("field", ["tenant", "worker", "request_id", "session_id"])
def test_a_refusal_that_shows_what_was_sent_reaches_the_client_whatever_that_is(
    served: Served, field: str, char: str
) -> None:
    """Percent-encoded in the trailers, 2000 emoji took more than a client reads."""
    [generate] = [method for method in METHODS if method.name == "Generate"]
    for length in (300, 2000, 20000):
        ids = inference_pb2.TokenIds(ids=[1])
        message = inference_pb2.GenerateRequest(token_ids=ids, **{field: char * length})
        with grpc.insecure_channel(served.endpoint) as channel:
            error = ask(channel, generate, message.SerializeToString())

        assert error is not None and error.code() in CLIENTS_FAULT - {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert char * 100 in (error.details() or "")
        assert len(error.details() or "") < 400
