"""Takes the workers' output connections (workers/engine/outputs.py) on the gateway's event loop."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable

from kvtier.tier.protocol.frames import FrameReader
from kvtier.workers.engine.outputs import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    keep_alive,
    unpack_hello,
    unpack_outputs,
)
from kvtier.workers.requests.api import Output

HELLO_S = 5.0  # a connection that doesn't say in this time whose it is is cut off
MAX_STRANGERS = 256  # connections that haven't said it yet: for one more the oldest is cut off

log = logging.getLogger(__name__)


class OutputReceiver:
    """Listens for workers, one connection each. Owned by the loop that started it.

    `on_outputs` gets each step's outputs, in order; `on_lost` is told when a worker's connection ends, which is when
    its process does, or KEEPALIVE_S after its machine stops answering. What doesn't begin with this gateway's secret is cut off, and so is who isn't expected.
    """

    def __init__(
        self,
        worker_ids: Iterable[str],
        on_outputs: Callable[[str, list[Output]], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._missing = {worker_id: asyncio.Event() for worker_id in worker_ids}  # set as they connect
        self._current: dict[str, _Connection] = {}  # of the workers that are connected
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}  # of these, those that have not said who they are
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listen on a free port; returns HOST:PORT."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def expect(self, worker_id: str) -> None:
        """A worker, new or restarted, may connect once. The connection that one of its id has ends without a word."""
        self.forget(worker_id)
        self._missing[worker_id] = asyncio.Event()

    def forget(self, worker_id: str) -> None:
        """A worker is expected no more; its connection ends without a word."""
        self._missing.pop(worker_id, None)
        connection = self._current.pop(worker_id, None)
        if connection is not None:
            connection.close()

    async def wait_complete(self, timeout_s: float, worker_id: str | None = None) -> None:
        """Until every worker that is expected, or this one, has connected. Raises TimeoutError naming those that haven't."""
        waited = [name for name in self._missing if worker_id in (None, name)]
        try:
            async with asyncio.timeout(timeout_s):
                for is_there in [self._missing[name] for name in waited]:
                    await is_there.wait()
        except TimeoutError:
            missing = ", ".join(sorted(name for name in waited if name in self._missing))
            raise TimeoutError(f"workers that did not connect within {timeout_s:g} s: {missing}") from None

    def is_connected(self, worker_id: str) -> bool:
        """It has connected, and is not lost."""
        return worker_id in self._current

    def close(self) -> None:
        """Take nothing more; the workers' ends close. Nothing is reported lost."""
        self._on_lost = lambda worker_id, reason: None
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    # ---- called by connections -----------------------------------------------------------------------------------

    def opened(self, connection: _Connection) -> None:
        """A worker says hello at once, so that strangers, however many, keep none out: the oldest one goes."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cut_off(f"{MAX_STRANGERS} connections have said no hello yet")
        self._connections.add(connection)
        self._strangers[connection] = None

    def greeted(self, connection: _Connection, frame: bytes) -> str:
        """The worker that a connection's first frame is from. Raises ValueError when it is none of ours."""
        hello = unpack_hello(frame)
        if not hmac.compare_digest(hello.secret, self.secret):
            raise ValueError("it doesn't know the secret")
        if hello.worker_id not in self._missing:
            raise ValueError(f"no worker {hello.worker_id!r} is expected")
        self._strangers.pop(connection, None)
        self._missing.pop(hello.worker_id).set()
        self._current[hello.worker_id] = connection
        return hello.worker_id

    def took(self, connection: _Connection, worker_id: str, outputs: list[Output]) -> None:
        if self._current.get(worker_id) is connection:
            self._on_outputs(worker_id, outputs)

    def closed(self, connection: _Connection, worker_id: str | None, reason: str) -> None:
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        if worker_id is not None and self._current.get(worker_id) is connection:
            del self._current[worker_id]
            self._on_lost(worker_id, reason)


class _Connection(asyncio.Protocol):
    def __init__(self, receiver: OutputReceiver) -> None:
        self._receiver = receiver
        self._reader = FrameReader(MAX_HELLO_BYTES)
        self._worker_id: str | None = None
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None  # for the hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        self._receiver.opened(self)
        self._deadline = asyncio.get_running_loop().call_later(
            HELLO_S, self.cut_off, f"no hello in {HELLO_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        for worker_id, outputs in self._read(data):
            self._receiver.took(self, worker_id, outputs)

    def _read(self, data: bytes) -> list[tuple[str, list[Output]]]:
        """What `data` brings. Junk cuts the connection off; what an output does to its taker is the taker's."""
        read: list[tuple[str, list[Output]]] = []
        try:
            for frame in self._reader.feed(data):
                if self._worker_id is None:
                    self._worker_id = self._receiver.greeted(self, frame)
                    self._reader.max_bytes = MAX_FRAME_BYTES
                    self._end_deadline()
                else:
                    read.append((self._worker_id, unpack_outputs(frame)))
        except ValueError as error:
            self.cut_off(str(error))
        return read

    def cut_off(self, why: str) -> None:
        """End it at once."""
        log.warning("a connection to the output port is cut off: %s", why)
        self._end_deadline()
        if self._transport is not None:
            self._transport.abort()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, error: Exception | None) -> None:
        self._end_deadline()
        self._receiver.closed(
            self,
            self._worker_id,
            f"its output connection closed, as when its process ends{f' ({error})' if error else ''}",
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
