"""Serves a node's pages to the exchanges of other nodes: out of leased L3 slots, as frames of a gRPC stream.

Each page's lease ends soon after its bytes are in a frame, and all that a call holds ends with the call, however it ends.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.node_link import NodeGone, NodeLink, NodeSession
from kvtier.cluster.transfer.sender import PageSender
from kvtier.proto import page_transfer_pb2
from kvtier.tier.transport.frames import PagesRequest
from kvtier.workers.machine.endpoints import Endpoint

log = logging.getLogger(__name__)

Context = grpc.ServicerContext

MAX_WAIT_S = 60.0  # of one call
SPARE_THREADS = 4  # beside those of the streams: for Meet, and to refuse
PEERS_COUNTED = 256


@dataclass(slots=True)
class ServedCounts:
    """What one peer was given."""

    calls: int = 0
    pages: int = 0
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """One Fetch being served."""

    context: Context
    peer: str
    until: float
    sending_since: float | None = None  # a frame waits for the peer to take it since then
    sender: PageSender | None = None
    is_stalled: bool = False


class _Doorkeeper(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses strangers by what their call begins with: no thread waits for the message, and nothing reads it."""

    def __init__(
        self,
        is_ours: Callable[[Iterable[tuple[str, str | bytes]]], bool],
        refuse: Callable[[Any, Context], NoReturn],
    ) -> None:
        self._is_ours = is_ours
        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if self._is_ours(handler_call_details.invocation_metadata):
            return continuation(handler_call_details)
        return self._refusal


class ExchangeServer:
    """One listening port. `start`, then `stop`; all else may be called from any thread.

    At most `max_streams` Fetch calls are served at once; one whose peer takes nothing for `stall_s` is ended.
    """

    def __init__(
        self,
        node_id: str,
        link: NodeLink,
        secret: str,
        note: Callable[[str], None],
        *,
        max_streams: int,
        stall_s: float,
        tls: wire.TlsKeys | None = None,
        is_shared: bool = True,
    ) -> None:
        """`is_shared`: exchanges on the same machine are told where the CacheNode's socket is."""
        self._node_id = node_id
        self._link = link
        self._secret = secret.encode()
        self._note = note
        self._max_streams = max_streams
        self._stall_s = stall_s
        self._tls = tls
        self._is_shared = is_shared
        self._boot_id = wire.boot_id()
        self._lock = threading.Lock()  # guards the three below; held for no more than a dict operation
        self._streams: dict[_Stream, None] = {}
        self._served: dict[str, ServedCounts] = {}
        self._refused: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="exchange-stalls", daemon=True)
        self._pool = ThreadPoolExecutor(max_streams + SPARE_THREADS, thread_name_prefix="exchange-serve")
        self._server = grpc.server(
            self._pool,
            options=wire.SERVER_OPTIONS,
            maximum_concurrent_rpcs=4 * (max_streams + SPARE_THREADS),
            interceptors=[_Doorkeeper(self._is_ours, self._refuse_stranger)],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))

    def _handlers(self) -> Any:
        return grpc.method_handlers_generic_handler(
            wire.SERVICE,
            {
                "Meet": grpc.unary_unary_rpc_method_handler(
                    self._meet,
                    page_transfer_pb2.MeetRequest.FromString,
                    page_transfer_pb2.MeetReply.SerializeToString,
                ),
                "Fetch": grpc.unary_stream_rpc_method_handler(
                    self._fetch, page_transfer_pb2.FetchRequest.FromString, None
                ),
            },
        )

    def start(self, host: str, port: int) -> int:
        """Listen; the port. Raises OSError with the way out."""
        address = str(Endpoint(host, port))
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                pair = (self._tls.key, self._tls.cert)
                credentials = grpc.ssl_server_credentials([pair], self._tls.ca, require_client_auth=True)
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(wire.why_not_bound(Endpoint(host, port))) from error
        if not bound:
            raise OSError(wire.why_not_bound(Endpoint(host, port)))
        self._server.start()
        self._watcher.start()
        return bound

    def stop(self, grace_s: float) -> None:
        """Take no more calls, give running ones `grace_s`, then end them."""
        self._stopping.set()
        self._server.stop(grace_s).wait()
        self._watcher.join()
        self._pool.shutdown()

    def stats(self) -> dict[str, Any]:
        """{"served": {peer: {"calls", "pages", "bytes"}}, "refused": {why: calls}, "streams": now}."""
        with self._lock:
            served = {
                peer: {"calls": counts.calls, "pages": counts.pages, "bytes": counts.nbytes}
                for peer, counts in self._served.items()
            }
            return {"served": served, "refused": dict(self._refused), "streams": len(self._streams)}

    # ---- calls -------------------------------------------------------------------------------------------------

    def _meet(self, message: page_transfer_pb2.MeetRequest, context: Context) -> page_transfer_pb2.MeetReply:
        self._admit(context)
        session = self._link.session if self._is_shared else None
        return page_transfer_pb2.MeetReply(
            protocol=wire.PROTOCOL,
            node_id=self._node_id,
            boot_id=self._boot_id,
            socket_path="" if session is None else self._link.socket_path,
            incarnation="" if session is None else session.incarnation,
        )

    def _fetch(self, message: page_transfer_pb2.FetchRequest, context: Context) -> Iterator[bytes]:
        peer = self._admit(context)
        if message.node_id != self._node_id:
            self._refuse(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"this is node {self._node_id}, node {message.node_id!r} is asked for",
            )
        request = wire.from_message(message)
        wrong = request.malformed()
        if wrong is not None:
            self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, wrong)
        session = self._link.session
        if session is None:
            self._refuse(context, grpc.StatusCode.UNAVAILABLE, f"the cache of node {self._node_id} is away")
        waits_s = [MAX_WAIT_S, message.wait_ms / 1000]
        time_left_s = context.time_remaining()
        if time_left_s is not None:
            waits_s.append(time_left_s)
        stream = _Stream(context, peer, time.monotonic() + min(waits_s))
        if not self._begin(stream):
            self._refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_streams} calls are served already"
            )
        try:
            yield from self._serve(stream, session, request)
        except NodeGone as error:
            if not context.is_active():
                return
            self._refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            with self._lock:
                del self._streams[stream]

    def _admit(self, context: Context) -> str:
        """The id of the node that asks."""
        metadata = {key: value for key, value in context.invocation_metadata()}
        return str(metadata.get(wire.NODE_KEY, ""))[:128]

    def _is_ours(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """The caller is of this deployment."""
        given = dict(metadata).get(wire.SECRET_KEY, "")
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._secret)

    def _refuse_stranger(self, message: Any, context: Context) -> NoReturn:
        self._refuse(
            context,
            grpc.StatusCode.UNAUTHENTICATED,
            "the caller is not of this deployment: its secret is another one, or missing",
        )

    def _refuse(self, context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
        with self._lock:
            self._refused[code.name] += 1
            is_first = self._refused[code.name] == 1
        if is_first:  # the others are counted
            self._note(f"a call for pages by {context.peer()} was refused: {why}")
        context.abort(code, why)
        raise AssertionError("abort returns never")

    def _begin(self, stream: _Stream) -> bool:
        with self._lock:
            if len(self._streams) >= self._max_streams:
                return False
            self._streams[stream] = None
            self._counts(stream.peer).calls += 1
            return True

    def _counts(self, peer: str) -> ServedCounts:
        """Of a peer; those past the bound share one line."""
        if peer not in self._served and len(self._served) >= PEERS_COUNTED:
            peer = "others"
        return self._served.setdefault(peer, ServedCounts())

    def _watch(self) -> None:
        """End streams whose peer takes nothing."""
        while not self._stopping.wait(self._stall_s / 4):
            now = time.monotonic()
            with self._lock:
                streams = list(self._streams)
            for stream in streams:
                since = stream.sending_since
                if since is not None and now - since > self._stall_s and not stream.is_stalled:
                    self._end_stalled(stream)

    def _end_stalled(self, stream: _Stream) -> None:
        """Its thread may be stuck in the connection until that breaks; what it holds is not."""
        stream.is_stalled = True
        self._note(f"node {stream.peer} took no pages for {self._stall_s:g} s: its call was ended")
        stream.context.cancel()  # type: ignore[no-untyped-call]
        if stream.sender is not None:
            stream.sender.end()

    # ---- one stream --------------------------------------------------------------------------------------------

    def _serve(self, stream: _Stream, session: NodeSession, request: PagesRequest) -> Iterator[bytes]:
        reading = session.read(request)
        sender = stream.sender = PageSender(session, reading, request)
        try:
            stream.context.add_callback(reading.wake)
            for frame in sender.frames(lambda: self._left_s(stream)):
                stream.sending_since = time.monotonic()
                yield frame
                stream.sending_since = None
            if not stream.context.is_active():
                return
            if sender.ending is None:
                self._refuse(
                    stream.context, grpc.StatusCode.DEADLINE_EXCEEDED, "the pages did not come up in time"
                )
            yield wire.ending_frame(sender.ending, sender.num_pages)
        finally:
            sender.end()
            with self._lock:
                counts = self._counts(stream.peer)
                counts.pages += sender.num_pages
                counts.nbytes += sender.nbytes

    def _left_s(self, stream: _Stream) -> float:
        """Seconds for which the call may wait on; 0 when it is over."""
        return max(0.0, stream.until - time.monotonic()) if stream.context.is_active() else 0.0
