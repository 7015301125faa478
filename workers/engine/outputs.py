"""Carries a worker's outputs to its gateway: one connection, one message per step, in order.

A Ray call per step costs both ends more than a millisecond of CPU, and async actors may run calls out of order; this
costs a tenth, keeps the order, and a broken connection tells the gateway at once that its worker died.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvtier.tier.protocol.frames import pack_frame
from kvtier.workers.engine.heartbeat import TURN_S
from kvtier.workers.machine.endpoints import Endpoint
from kvtier.workers.requests.api import Output

MAX_HELLO_BYTES = 4096
MAX_FRAME_BYTES = 64 * 2**20  # of one step's outputs; a longer one can't be ours
# A gateway that takes nothing for so long, or falls so far behind, is gone.
UNSENT_S = 30.0
MAX_UNSENT_BYTES = MAX_FRAME_BYTES
KEEPALIVE_S = (
    20  # a machine that answers nothing for so long is gone: less finds it sooner, more bears a slow network
)
MAX_SENT_BYTES = 2**32 - 1  # in one frame: its length has four bytes


class StepOutputs:
    """What the step loop has to tell and hasn't yet. `sink` gets a list a step, on its thread, and must not block."""

    def __init__(self, sink: Callable[[list[Output]], None]) -> None:
        self.pending: list[Output] = []
        self._sink = sink
        self._told_s = 0.0  # when the sink was last told anything

    def send(self, *, is_due: bool = False) -> None:
        """`is_due`: the loop has turned, which is told even if there is nothing else to tell."""
        now = time.monotonic()
        if self.pending or (is_due and now - self._told_s >= TURN_S):
            outputs, self.pending = self.pending, []
            self._told_s = now
            self._sink(outputs)


class OutputHello(msgspec.Struct, frozen=True):
    """First frame of a connection. `secret` was handed to the worker by the gateway it connects to."""

    worker_id: str
    secret: bytes


_encoder = msgspec.msgpack.Encoder()
_output_decoder = msgspec.msgpack.Decoder(list[Output])
_UNREADABLE = (msgspec.DecodeError, RecursionError)  # the latter: of lists in lists in lists
_hello_decoder = msgspec.msgpack.Decoder(OutputHello)


class OutputSender:
    """The worker's end. Its step loop alone calls `send`, at least once in heartbeat.TURN_S.

    `send` waits for nothing, so that a gateway that is stalled has no worker stall with it: what the connection
    doesn't take goes with the next call.
    """

    def __init__(self, connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        """`connection` blocks."""
        self._socket = connection
        self._clock = clock
        self._unsent = bytearray()
        self._taken_s = 0.0  # when the gateway last took something, or had everything

    @classmethod
    def connect(cls, address: str, secret: bytes, worker_id: str, timeout_s: float = 10.0) -> OutputSender:
        """Connect to a gateway's HOST:PORT. Raises OSError when nothing takes the connection."""
        where = Endpoint.parse(address)
        connection = socket.create_connection((where.host, where.port), timeout=timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
            # Keep-alive looks at silent connections only, and this one says something every second.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * UNSENT_S))
            connection.sendall(pack_frame(_encoder.encode(OutputHello(worker_id, secret)), MAX_HELLO_BYTES))
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def send(self, outputs: list[Output]) -> None:
        """Send what a step gave. Raises OSError when the gateway is gone; the connection is of no use then."""
        now = self._clock()
        if not self._unsent:
            self._taken_s = now
        self._unsent += pack_frame(_encoder.encode(outputs), MAX_SENT_BYTES)
        with suppress(BlockingIOError):
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            del self._unsent[:sent]
            self._taken_s = now
        if now - self._taken_s >= UNSENT_S:
            raise TimeoutError(f"it has taken nothing for {now - self._taken_s:.0f} s")
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise OSError(
                f"it is {len(self._unsent)} bytes behind, at most {MAX_UNSENT_BYTES} are kept for it"
            )

    def wait_closed(self) -> None:
        """Until the gateway's end closes, or ours does: it never says anything. For a thread that does nothing else."""
        with suppress(OSError):
            while self._socket.recv(1):
                pass

    def close(self) -> None:
        """Let the connection go, and who waits for that. Idempotent. From any thread."""
        with suppress(OSError):  # the other end may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def keep_alive(connection: socket.socket) -> None:
    """Have a connection end when the other end's machine, or the way there, is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def unpack_hello(frame: bytes) -> OutputHello:
    """Raises ValueError when the frame is none."""
    try:
        return _hello_decoder.decode(frame)
    except _UNREADABLE as error:
        raise ValueError(f"no hello of a worker: {error}") from error


def unpack_outputs(frame: bytes) -> list[Output]:
    """Raises ValueError when the frame is none."""
    try:
        return _output_decoder.decode(frame)
    except _UNREADABLE as error:
        raise ValueError(f"no outputs of a worker: {error}") from error
