"""Ways to other nodes' pages: gRPC streams, and the memory of nodes on the same machine. Kept open between fetches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from kvtier.cluster.transfer import local as exchange_local
from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.local import LocalChannel
from kvtier.cluster.transfer.node_link import NodeGone, NodeSession
from kvtier.proto import page_transfer_pb2
from kvtier.tier.transport.fetch_runs import PeerName
from kvtier.tier.transport.frames import (
    Call,
    Ending,
    FailureKind,
    Interrupted,
    PageChannel,
    PageReader,
    PageSink,
    PagesRequest,
    PeerFailed,
)

MAX_IDLE = 32  # channels that are kept open while nothing is fetched
# Where the memory of a peer on this machine is, is asked when it goes, as its cache restarts; while it is out of reach,
# by a fetch so much later, each time in a row twice as long.
ASK_FIRST_S, ASK_LAST_S = 1.0, 60.0

# What becomes of a channel: kept for the next fetch, closed (its connection may be stuck), or closed with all others to
# that peer, and the peer asked again who it is.
After = Literal["keep", "close", "forget"]

_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)


class GrpcChannel:
    """A PageChannel over one connection of its own."""

    def __init__(self, name: PeerName, node_id: str, secret: str, tls: wire.TlsKeys | None) -> None:
        """`name` is the peer's, `node_id` that of the node that asks."""
        self._peer_id, address = name
        self._node_id = node_id
        self._metadata = ((wire.SECRET_KEY, secret), (wire.NODE_KEY, node_id))
        if tls is None:
            self._channel = grpc.insecure_channel(address, wire.CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            self._channel = grpc.secure_channel(address, credentials, wire.CHANNEL_OPTIONS)
        self._meet = self._channel.unary_unary(
            wire.MEET,
            page_transfer_pb2.MeetRequest.SerializeToString,
            page_transfer_pb2.MeetReply.FromString,
        )
        self._fetch = self._channel.unary_stream(
            wire.FETCH, page_transfer_pb2.FetchRequest.SerializeToString, None
        )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def meet(self, call: Call) -> page_transfer_pb2.MeetReply:
        """Ask who answers there. Raises PeerFailed when it is not the node meant, and as `fetch` does."""
        message = page_transfer_pb2.MeetRequest(protocol=wire.PROTOCOL, node_id=self._node_id)
        rpc = self._meet.future(message, timeout=call.left_s(), metadata=self._metadata)
        call.on_interrupt(rpc.cancel)
        try:
            reply: page_transfer_pb2.MeetReply = rpc.result()
        except grpc.FutureCancelledError as error:
            raise (
                Interrupted if call.is_interrupted else PeerFailed("lost", "it cancelled the call")
            ) from error
        except grpc.RpcError as error:
            raise _failure(error, call) from error
        if reply.protocol != wire.PROTOCOL or reply.node_id != self._peer_id:
            detail = f"there answers node {reply.node_id} with protocol {reply.protocol}, not {wire.PROTOCOL}"
            raise PeerFailed("refused", f"node {self._peer_id}: {detail}")
        return reply

    def fetch(self, request: PagesRequest, sink: PageSink, call: Call) -> Ending:
        """Take the peer's frames. See PageChannel."""
        message = wire.to_message(request, self._peer_id, call.left_s())
        reader = PageReader(sink, request.payload_bytes)
        rpc = self._fetch(message, timeout=call.left_s(), metadata=self._metadata)
        call.on_interrupt(rpc.cancel)
        try:
            for data in rpc:
                found = wire.read_frame(data)
                if isinstance(found, Ending):
                    reader.end()
                    return found
                reader.feed(found)
            reader.end()
        except grpc.RpcError as error:
            raise _failure(error, call) from error
        except NodeGone as error:
            raise PeerFailed("away", str(error)) from error
        finally:
            rpc.cancel()  # type: ignore[no-untyped-call]
        raise PeerFailed("refused", f"node {self._peer_id} ended the stream without a word")


def _failure(error: Any, call: Call) -> PeerFailed | Interrupted:
    """What a call's end means."""
    if call.is_interrupted:
        return Interrupted()
    code, details = error.code(), error.details()
    kind: FailureKind = "lost"
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC says it of a message that is too large for us, too.
        kind = "corrupt" if "larger than max" in (details or "") else "busy"
    elif code == grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = "slow"
    elif code in _REFUSALS:
        kind = "refused"
    return PeerFailed(kind, f"{code.name}: {details}"[:500])


@dataclass(slots=True)
class _Met:
    """What is known of a peer that answered; `local` where its memory can be reached."""

    is_near: bool  # on this machine
    local: NodeSession | None = None
    ask_at: float = 0.0  # by then its memory may be within reach again
    wait_s: float = ASK_FIRST_S
    said: str = ""  # why it is not

    @property
    def is_within_reach(self) -> bool:
        """Its memory is, now."""
        return self.local is not None and not self.local.lost.is_set()

    def begins_to_ask(self, now: float) -> bool:
        """Whether a fetch asks where its memory is; those that come next don't."""
        if not self.is_near or self.is_within_reach or now < self.ask_at:
            return False
        self.ask_at = now + self.wait_s
        self.wait_s = min(2 * self.wait_s, ASK_LAST_S)
        return True


class Channels:
    """Owns the open channels, idle ones and sessions with peers on the same machine. Any thread may use it."""

    def __init__(
        self,
        node_id: str,
        worker_id: str,
        secret: str,
        note: Callable[[str], None],
        *,
        tls: wire.TlsKeys | None = None,
        uses_memory: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`uses_memory`: pages of nodes on the same machine are copied there, not sent."""
        self._node_id = node_id
        self._worker_id = worker_id
        self._secret = secret
        self._note = note
        self._tls = tls
        self._clock = clock
        self._boot_id = wire.boot_id() if uses_memory else None
        self._lock = threading.Lock()  # guards the two below; held for no more than a dict operation
        self._idle: dict[PeerName, list[GrpcChannel]] = {}  # the latest used last
        self._met: dict[PeerName, _Met] = {}
        # One thread at a time connects to sockets of peers: a second connection fences the first. Taken before _lock.
        self._meeting = threading.Lock()

    def open(self, name: PeerName, call: Call) -> PageChannel:
        """A channel to a peer; hand it back with `done`. Raises PeerFailed, Interrupted."""
        with self._lock:
            met = self._met.get(name)
            if met is not None and met.local is not None and met.is_within_reach:
                return LocalChannel(met.local)
            asks = met is None or met.begins_to_ask(self._clock())
            kept = self._take_idle(name)
        if kept is not None and not asks:
            return kept
        channel = kept or GrpcChannel(name, self._node_id, self._secret, self._tls)
        try:
            local = self._reach(name, channel.meet(call)) if asks else None
        except BaseException:
            channel.close()
            raise
        self._forget_older(name)
        if local is None:
            return channel
        self.done(name, channel, "keep")
        return LocalChannel(local)

    def done(self, name: PeerName, channel: PageChannel, after: After) -> None:
        """A channel from `open` is used no more."""
        closing: list[PageChannel] = []
        sessions: list[NodeSession] = []
        with self._lock:
            if after != "keep" or name not in self._met:  # the peer is at another address by now
                closing.append(channel)
            if after == "forget":
                closing += self._idle.pop(name, [])
                met = self._met.pop(name, None)
                if met is not None and met.local is not None:
                    sessions.append(met.local)
            elif after == "keep" and name in self._met and isinstance(channel, GrpcChannel):
                idle = self._idle.pop(name, [])
                self._idle[name] = [*idle, channel]
                closing += self._too_many()
        for old in closing:
            old.close()
        for session in sessions:
            session.close()

    def close(self) -> None:
        """Close what is idle; nothing is fetched any more."""
        with self._lock:
            channels = [channel for idle in self._idle.values() for channel in idle]
            sessions = [met.local for met in self._met.values() if met.local is not None]
            self._idle, self._met = {}, {}
        for channel in channels:
            channel.close()
        for session in sessions:
            session.close()

    def _take_idle(self, name: PeerName) -> GrpcChannel | None:
        """Inside the lock only."""
        idle = self._idle.get(name)
        if not idle:
            return None
        kept = idle.pop()
        if not idle:
            del self._idle[name]
        return kept

    def _forget_older(self, name: PeerName) -> None:
        """The node answers at this address: let go of what is kept for those that it had before."""
        closing: list[GrpcChannel] = []
        sessions: list[NodeSession] = []
        with self._lock:
            for old in {*self._idle, *self._met}:
                if old[0] == name[0] and old != name:
                    closing += self._idle.pop(old, [])
                    met = self._met.pop(old, None)
                    if met is not None and met.local is not None:
                        sessions.append(met.local)
        for channel in closing:
            channel.close()
        for session in sessions:
            session.close()

    def _too_many(self) -> list[GrpcChannel]:
        """Those idle the longest, beyond the bound."""
        closing: list[GrpcChannel] = []
        while sum(len(idle) for idle in self._idle.values()) > MAX_IDLE:
            oldest = next(iter(self._idle))
            closing.append(self._idle[oldest].pop(0))
            if not self._idle[oldest]:
                del self._idle[oldest]
                met = self._met.get(oldest)
                if met is not None and met.local is None:
                    del self._met[oldest]
        return closing

    def _reach(self, name: PeerName, reply: page_transfer_pb2.MeetReply) -> NodeSession | None:
        """Remember a peer that answered; the session with its CacheNode, when that is within reach."""
        is_near = reply.boot_id == self._boot_id and reply.node_id != self._node_id
        with self._meeting:
            with self._lock:
                met = self._met.get(name) or _Met(is_near, ask_at=self._clock() + ASK_FIRST_S)
            if is_near and not met.is_within_reach:
                met.local = self._connect(name, reply, met)
            if met.local is not None:  # and when it goes, the next fetch asks at once
                met.ask_at, met.wait_s, met.said = 0.0, ASK_FIRST_S, ""
            with self._lock:
                self._met[name] = met
            return met.local

    def _connect(self, name: PeerName, reply: page_transfer_pb2.MeetReply, met: _Met) -> NodeSession | None:
        if not reply.socket_path:
            return None  # its cache is away, or it doesn't share its memory
        try:
            return exchange_local.connect(
                reply.socket_path, self._worker_id, reply.node_id, reply.incarnation
            )
        except (OSError, ValueError) as error:
            if str(error) != met.said:
                met.said = str(error)
                self._note(f"pages of node {name[0]}, on this machine, come by gRPC: {error}")
            return None
