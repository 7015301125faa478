"""What exchanges say to each other over gRPC, as bytes: proto/page_transfer.proto, less copies of the pages.

Frames of pages are FetchFrame messages, written and read here without protobuf's own copies of their one long field.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from kvtier.cluster.machines.addresses import bind_error
from kvtier.proto import page_transfer_pb2
from kvtier.tier.pages.page import Buffer, PageCorrupt
from kvtier.tier.transport.frames import FRAME_BYTES, KEY_BYTES, Ending, PagesRequest
from kvtier.workers.machine.endpoints import Endpoint

PROTOCOL = 1
SERVICE = page_transfer_pb2.DESCRIPTOR.services_by_name["PageTransfer"].full_name
MEET, FETCH = f"/{SERVICE}/Meet", f"/{SERVICE}/Fetch"
SECRET_KEY, NODE_KEY = "kvtier-secret", "kvtier-node"
MAX_FRAME_BYTES = 2 * FRAME_BYTES  # that are received in one message; ours are at most FRAME_BYTES and some
MAX_REQUEST_BYTES = 2**20
# Channels don't share connections, so that each stream has one of its own; pings find a peer that is cut off.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # a port that is in use is an error
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),  # what was sent and isn't taken for so long breaks a connection too
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
_PAGES = b"\x0a"  # FetchFrame.pages: field 1, length-delimited
_MAX_VARINT_BYTES = 5  # lengths below 2**35


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a deployment with TLS between its nodes, mutual: each shows `cert`, signed by what is in `ca`."""

    cert: str
    key: str
    ca: str

    def read(self) -> TlsKeys:
        """What is in the files. OSError when one can't be read."""
        return TlsKeys(Path(self.cert).read_bytes(), Path(self.key).read_bytes(), Path(self.ca).read_bytes())


@dataclass(frozen=True, slots=True)
class TlsKeys:
    """The content of TlsFiles."""

    cert: bytes
    key: bytes
    ca: bytes


def boot_id() -> str:
    """The same on one running kernel only: processes that share memory could be there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def why_not_bound(where: Endpoint) -> str:
    """Why nothing can listen there; gRPC itself only says that it failed."""
    reason, way_out = "it can't be bound", "set transfer.port to another (0: any free one)"
    if error := bind_error(where):
        reason = error.strerror or str(error)
        is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        if is_of_host:
            way_out = "leave transfer.host empty, or set it to a network that each node has an address in, such as 10.1.0.0/16"
    return f"can't listen on {where}: {reason}; {way_out}"


# ---- requests --------------------------------------------------------------------------------------------------


def to_message(request: PagesRequest, node_id: str, wait_s: float) -> page_transfer_pb2.FetchRequest:
    """A request to the exchange of a node."""
    return page_transfer_pb2.FetchRequest(
        node_id=node_id,
        root=request.root,
        tenant=request.tenant,
        page_tokens=request.page_tokens,
        first_page=request.first_page,
        keys=b"".join(request.keys),
        held=request.held if any(request.held) else b"",
        variant=request.variant,
        spec_digest=request.spec_digest,
        payload_bytes=request.payload_bytes,
        wait_ms=max(1, int(wait_s * 1000)),
        checks=request.checks,
        cleared=request.cleared,
    )


def from_message(message: page_transfer_pb2.FetchRequest) -> PagesRequest:
    """A request as it came; check it with `malformed`. A key that is cut short makes it so."""
    joined = message.keys
    keys = tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
    return PagesRequest(
        root=message.root,
        tenant=message.tenant,
        page_tokens=message.page_tokens,
        first_page=message.first_page,
        keys=keys,
        held=message.held or bytes(len(keys)),
        variant=message.variant,
        spec_digest=message.spec_digest,
        payload_bytes=message.payload_bytes,
        checks=message.checks,
        cleared=message.cleared,
    )


# ---- frames ----------------------------------------------------------------------------------------------------


def pages_frame(parts: Sequence[Buffer]) -> bytes:
    """A FetchFrame whose `pages` are these parts, copied once."""
    length = sum(map(len, parts))
    return b"".join((_PAGES, _varint(length), *parts))


def ending_frame(ending: Ending, num_pages: int) -> bytes:
    """The FetchFrame that ends a stream."""
    wire = page_transfer_pb2.Ending(pages=num_pages, reason=ending.reason, detail=ending.detail)
    return page_transfer_pb2.FetchFrame(ending=wire).SerializeToString()


def read_frame(data: bytes) -> memoryview | Ending:
    """The pages of a frame, without a copy where it is as `pages_frame` makes it; or how the stream ends.

    Raises PageCorrupt for anything else.
    """
    if data[:1] == _PAGES:
        length, at = _read_varint(data, 1)
        if at + length == len(data):
            return memoryview(data)[at:]
    try:
        frame = page_transfer_pb2.FetchFrame.FromString(data)
    except DecodeError as error:
        raise PageCorrupt(f"a frame of {len(data)} bytes that is no message") from error
    if frame.HasField("ending"):
        return Ending(frame.ending.reason, frame.ending.detail)
    return memoryview(frame.pages)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Value and the index behind it; nonsense for nonsense, which then fails to match the length."""
    value = 0
    for count, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    return value, len(data) + 1
