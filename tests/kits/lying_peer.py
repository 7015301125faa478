"""A peer that sends whatever a test wants it to, for tests of the exchange that asks it for pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from peer_stub import StubNode, envelope_of, exchange, payload_of, stub

from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.actor import PageExchangeProcess
from kvtier.proto import page_transfer_pb2
from kvtier.tier.transport.frames import page_head

NBYTES = 4096
Frames = Callable[[page_transfer_pb2.FetchRequest, grpc.ServicerContext], Iterator[bytes]]


class LyingPeer:
    """A gRPC server that says of itself what an exchange says, and sends any frames."""

    def __init__(self, frames: Frames) -> None:
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool)
        handlers = {
            "Meet": grpc.unary_unary_rpc_method_handler(
                self._meet,
                page_transfer_pb2.MeetRequest.FromString,
                page_transfer_pb2.MeetReply.SerializeToString,
            ),
            "Fetch": grpc.unary_stream_rpc_method_handler(
                frames, page_transfer_pb2.FetchRequest.FromString, None
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _meet(self, request: Any, context: Any) -> page_transfer_pb2.MeetReply:
        return page_transfer_pb2.MeetReply(protocol=wire.PROTOCOL, node_id="away")

    def close(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()


def lying(stack: ExitStack, frames: Frames) -> str:
    peer = LyingPeer(frames)
    stack.callback(peer.close)
    return peer.address


def home_of(stack: ExitStack, folder: Path, **options: Any) -> tuple[StubNode, PageExchangeProcess]:
    home = stack.enter_context(stub(folder, "home", nbytes=NBYTES))
    return home, stack.enter_context(exchange("home", home.path, same_host="off", **options))


def page(number: int, payload: bytes | None = None, **changes: Any) -> bytes:
    envelope = envelope_of(number, NBYTES, **changes)
    return page_head(envelope.pack(), envelope.payload_bytes) + (payload or payload_of(number, NBYTES))


GOOD = page(0) + page(1)
