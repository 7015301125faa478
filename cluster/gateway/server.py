"""The gRPC server of the gateway: services, limits, keep-alive, TLS, health and reflection."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtier.cluster.config.deployment import GrpcConfig, TLSConfig
from kvtier.cluster.gateway.admission import STOPPED, GatewayCore
from kvtier.cluster.gateway.cache_api.cache import CacheApi
from kvtier.cluster.gateway.requests.reading import Refusal, invalid
from kvtier.cluster.gateway.requests.wire import excess
from kvtier.cluster.machines.addresses import bind_error
from kvtier.proto import cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
from kvtier.workers.machine.endpoints import Endpoint
from kvtier.workers.requests.api import QueueFull

log = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name

MAX_MESSAGE_CHARS = 1000  # of a status message ...
MAX_MESSAGE_BYTES = 4096  # ... and what it takes in the trailers, of which clients take 8 KiB in all
TELL_S = 1.0  # for clients to hear why their streams end
_METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (inference_pb2.DESCRIPTOR, cache_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}

ADMIN_RPCS = 256  # calls at once beside Generate: health watchers, statistics

REQUEST_S = 10.0  # from the beginning of a call until its request is there
PARSED_AT_ONCE_BYTES = 64 * 2**10  # whatever is in them: some milliseconds

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class GatewayError(RuntimeError):
    """The gateway can't start; the message says why and the way out."""


class GatewayServer:
    """One listening port. Owned by the event loop that started it."""

    def __init__(
        self,
        core: GatewayCore,
        cache: CacheApi,
        status: Callable[[], Awaitable[inference_pb2.StatusReply]],
        config: GrpcConfig,
        max_generates: int,
    ) -> None:
        self._core = core
        self._config = config
        self._watch: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            options=_options(config.max_message_bytes, max_generates),
            maximum_concurrent_rpcs=max_generates + ADMIN_RPCS,
            interceptors=(_ReadableRequests(),),
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(_Inference(core, status), self._server)  # type: ignore[no-untyped-call]
        cache_pb2_grpc.add_CacheServicer_to_server(_Cache(cache), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE, CACHE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listen; returns the endpoint as clients on this machine reach it. Raises GatewayError."""
        host = self._config.host
        port = self._bind(host, self._config.port)
        await self._set_serving(True)
        await self._server.start()
        self._watch = asyncio.ensure_future(self._watch_health())
        return str(Endpoint(host, port).from_here())

    async def _watch_health(self) -> None:
        while True:
            await self._core.health_changed.wait()
            self._core.health_changed.clear()
            await self._set_serving(self._core.is_healthy)

    async def _set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", INFERENCE, CACHE):
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, give running ones `grace_s`, then tell the clients of the rest, and cancel them."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.ensure_future(self._server.stop(grace_s + TELL_S))
        await asyncio.wait([stopping], timeout=grace_s)
        self._core.end_streams(STOPPED)
        await stopping

    def _bind(self, host: str, port: int) -> int:
        address = str(Endpoint(host, port))
        credentials = _credentials(self._config.tls) if self._config.tls else None
        try:
            if credentials is not None:
                bound = self._server.add_secure_port(address, credentials)
            else:
                bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise GatewayError(_why_not(host, port)) from error
        if not bound:
            raise GatewayError(_why_not(host, port))
        return bound


def _options(max_message_bytes: int, max_generates: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_concurrent_streams", max_generates + ADMIN_RPCS),
        ("grpc.so_reuseport", 0),  # a port that is in use is an error
        # A decode may be silent for long: pings of ours find dead clients, and clients may ping as they like.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _credentials(tls: TLSConfig) -> grpc.ServerCredentials:
    cert, key = _pem(tls.cert, "cert"), _pem(tls.key, "key")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise GatewayError(
            f"grpc.tls: {tls.cert} and {tls.key} are no certificate and its key: {error}"
        ) from error
    client_ca = _pem(tls.client_ca, "client_ca") if tls.client_ca else None
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)


def _pem(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise GatewayError(f"grpc.tls.{name}: can't read {path}: {error.strerror}") from error


def _why_not(host: str, port: int) -> str:
    """Why nothing can listen there; gRPC itself only says that it failed."""
    where = Endpoint(host, port)
    error = bind_error(where)
    reason = error.strerror or str(error) if error else "it can't be bound"
    return f"can't listen on {where}: {reason}; set grpc.port to another (0: any free one)"


class _ReadableRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers bytes that are no request of a method of ours with INVALID_ARGUMENT; gRPC itself says UNKNOWN.

    A call whose request does not come within REQUEST_S is ended: it takes the place of others. A long one is looked
    through on another thread first, so that parsing it is no long turn of the loop.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = _METHODS.get(handler_call_details.method)
        return handler if method is None or handler is None else _checked(handler, method)


def _checked(handler: Any, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    """As a handler of a stream of requests, which is the same on the wire: only such a one reads its request itself."""
    answer = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def checked(requests: Any, context: Context) -> Any:
        return await answer(await _read(context, handler.request_deserializer, method), context)

    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(checked, None, handler.response_serializer)


async def _read(context: Context, deserialize: Callable[[bytes], T], method: MethodDescriptor) -> T:
    """The request of a call."""
    try:
        async with asyncio.timeout(REQUEST_S):
            data = await context.read()
    except TimeoutError:
        await _refuse(
            context, Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came in {REQUEST_S:g} s")
        )
    if not isinstance(data, bytes):
        await _refuse(context, invalid(f"the call ended without a request of {method.name}"))
    if len(data) > PARSED_AT_ONCE_BYTES:
        loop = asyncio.get_running_loop()
        if too_much := await loop.run_in_executor(None, excess, data, method.input_type):
            await _refuse(context, invalid(too_much))
    try:
        return deserialize(data)
    except DecodeError:
        await _refuse(context, invalid(f"the message is no request of {method.name}"))


def fitting(message: str) -> str:
    """As much of a status message as its trailers hold: percent-encoded it has at most MAX_MESSAGE_BYTES."""
    size = 0
    for position, char in enumerate(message[:MAX_MESSAGE_CHARS]):
        size += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if size > MAX_MESSAGE_BYTES:
            return message[:position]
    return message[:MAX_MESSAGE_CHARS]


async def _refuse(context: Context, refusal: Refusal) -> NoReturn:
    await context.abort(refusal.code, fitting(refusal.message))
    raise AssertionError("abort returns never")


async def _answer(context: Context, work: Awaitable[T]) -> T:
    try:
        return await work
    except Refusal as refusal:
        await _refuse(context, refusal)
    except QueueFull as error:
        await _refuse(context, Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)))
    except Exception as error:
        log.exception("a call failed")
        await _refuse(context, Refusal(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))


class _Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, core: GatewayCore, status: Callable[[], Awaitable[inference_pb2.StatusReply]]) -> None:
        self._core = core
        self._status = status

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        await _answer(context, self._generate(request, context))

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        async with aclosing(self._core.generate(request)) as chunks:
            async for chunk in chunks:
                await context.write(chunk)

    async def Status(self, request: inference_pb2.StatusRequest, context: Context) -> Any:
        return await _answer(context, self._status())


class _Cache(cache_pb2_grpc.CacheServicer):
    def __init__(self, verbs: CacheApi) -> None:
        self._verbs = verbs

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.stats())

    async def Lookup(self, request: cache_pb2.LookupRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.lookup(request))

    async def Explain(self, request: cache_pb2.ExplainRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.explain(request))

    async def ListPages(self, request: cache_pb2.ListPagesRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.list_pages(request))

    async def ShowPage(self, request: cache_pb2.ShowPageRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.show_page(request))

    async def Pin(self, request: cache_pb2.KeysRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.pin(request))

    async def Unpin(self, request: cache_pb2.KeysRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.unpin(request))

    async def Evict(self, request: cache_pb2.EvictRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.evict(request))

    async def Clear(self, request: cache_pb2.ClearRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.clear(request))

    async def Verify(self, request: cache_pb2.KeysRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.verify(request))

    async def Record(self, request: cache_pb2.RecordRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.record(request))

    async def StopRecord(self, request: cache_pb2.StopRecordRequest, context: Context) -> Any:
        return await _answer(context, self._verbs.stop_record(request))
