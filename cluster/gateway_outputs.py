"""Takes the workers' output connections (workers/outputs.py) on the gateway's event loop."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable

from kvtier.workers.api import Output
from kvtier.workers.outputs import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameReader, unpack_hello, unpack_outputs

log = logging.getLogger(__name__)


class OutputReceiver:
    """Listens for workers, one connection each. Owned by the loop that started it.

    `on_outputs` gets each step's outputs, in order; `on_lost` is told when a worker's connection ends, which is when
    its process does. What doesn't begin with this gateway's secret is cut off.
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
        self._missing = set(worker_ids)  # not yet connected
        self._is_complete = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listen on a free port; returns HOST:PORT."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def wait_complete(self, timeout_s: float) -> None:
        """Until every worker has connected. Raises TimeoutError naming those that haven't."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_complete.wait()
        except TimeoutError:
            missing = ", ".join(sorted(self._missing))
            raise TimeoutError(f"workers that did not connect within {timeout_s:g} s: {missing}") from None

    def close(self) -> None:
        """Take nothing more; the workers' ends close. Nobody is reported lost."""
        self._on_lost = lambda worker_id, reason: None
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    # ---- called by connections -----------------------------------------------------------------------------------

    def opened(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def greeted(self, frame: bytes) -> str:
        """The worker that a first frame is from. Raises ValueError when it is none of ours."""
        hello = unpack_hello(frame)
        if not hmac.compare_digest(hello.secret, self.secret):
            raise ValueError("it doesn't know the secret")
        if hello.worker_id not in self._missing:
            raise ValueError(f"no worker {hello.worker_id!r} is expected")
        self._missing.discard(hello.worker_id)
        if not self._missing:
            self._is_complete.set()
        return hello.worker_id

    def took(self, worker_id: str, outputs: list[Output]) -> None:
        self._on_outputs(worker_id, outputs)

    def closed(self, connection: _Connection, worker_id: str | None, reason: str) -> None:
        self._connections.discard(connection)
        if worker_id is not None:
            self._on_lost(worker_id, reason)


class _Connection(asyncio.Protocol):
    def __init__(self, receiver: OutputReceiver) -> None:
        self._receiver = receiver
        self._reader = FrameReader(MAX_HELLO_BYTES)
        self._worker_id: str | None = None
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._receiver.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except ValueError as error:
            log.warning("a connection to the output port is cut off: %s", error)
            self.close()

    def _take(self, frame: bytes) -> None:
        if self._worker_id is None:
            self._worker_id = self._receiver.greeted(frame)
            self._reader.max_bytes = MAX_FRAME_BYTES
        else:
            self._receiver.took(self._worker_id, unpack_outputs(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self._receiver.closed(
            self,
            self._worker_id,
            f"its output connection closed, as when its process ends{f' ({error})' if error else ''}",
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
