"""Connects workers to the gateway: those that come, come back, or have only lost their connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from itertools import count
from typing import Protocol

from kvtier.cluster.gateway.in_flight import InFlightRequests
from kvtier.cluster.gateway.owners.ask import Silence, within
from kvtier.cluster.gateway.ports import OwnerDown, Told, WorkerPort
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.cluster.gateway.server import GatewayError
from kvtier.cluster.gateway.streams.outputs import OutputReceiver
from kvtier.workers.requests.api import WorkerInfo

CONNECT_S = 30.0  # for a worker to say who it is, and to open its output connection
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # pauses before each try; the last one again and again

log = logging.getLogger(__name__)


class AttachedPort(WorkerPort, Protocol):
    """A worker that can be connected. Raises OwnerDown and Refusal."""

    async def info(self) -> WorkerInfo: ...
    async def connect_gateway(self, address: str, secret: bytes) -> None: ...


class Attachments:
    """Owned by the gateway's event loop. `check` raises GatewayError for a worker that speaks of another model."""

    def __init__(
        self,
        flights: InFlightRequests,
        receiver: OutputReceiver,
        address: str,
        check: Callable[[WorkerInfo], None],
        told: Callable[[], Told] = list,
    ) -> None:
        """`address` is where `receiver` listens; `told` gives the clears that who comes may have missed."""
        self._in_flight = flights
        self._receiver = receiver
        self._address = address
        self._check = check
        self._told = told
        self._ports: dict[str, AttachedPort] = {}
        self._attaching: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # about one for each worker

    async def connect(self, ports: Mapping[str, AttachedPort]) -> None:
        """At the start: workers that the gateway knows, by id. Who doesn't connect is left out and looked for.

        Raises GatewayError where nothing does.
        """
        self._ports.update(ports)
        for worker_id in ports:
            self._receiver.expect(worker_id)
        failures = await asyncio.gather(*(self._open(worker_id, port) for worker_id, port in ports.items()))
        if not any(map(self._receiver.is_connected, ports)):
            self.close()
            raise GatewayError("; ".join(filter(None, failures)) or "no worker stays connected")

    async def _open(self, worker_id: str, port: AttachedPort) -> str:
        """Why it is left out; "" when it is connected."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await port.know(self._told())
                await port.connect_gateway(self._address, self._receiver.secret)
                await self._receiver.wait_complete(CONNECT_S, worker_id)
        except (OwnerDown, Refusal, OSError, TimeoutError) as error:
            why = f"it can't connect its outputs: {str(error) or f'not within {CONNECT_S:g} s'}"
            self._receiver.forget(worker_id)
            self.lost(worker_id, why)
            return f"worker {worker_id}: {why}"
        return ""

    async def attach(self, port: AttachedPort) -> str:
        """A worker is there, new or restarted, and takes requests from now on. Its id. Raises GatewayError.

        One that leaves any of its questions unanswered for CONNECT_S is not attached.
        """
        try:
            info = await within(CONNECT_S, port.info())
            async with self._attaching.setdefault(info.worker_id, asyncio.Lock()):
                if not self._is_connected(info):
                    await self._connect(info, port)
        except (OwnerDown, Refusal) as error:
            raise GatewayError(f"the worker can't be attached: {error}") from error
        except Silence as silence:
            raise GatewayError(f"the worker to attach {silence}: try again") from silence
        return info.worker_id

    def detach(self, worker_id: str) -> bool:
        """A worker takes no more requests; those that it has go on at others. Whether it was there."""
        was_there = self._in_flight.detach(worker_id)
        self._ports.pop(worker_id, None)
        self._receiver.forget(worker_id)
        return was_there

    def lost(self, worker_id: str, reason: str) -> None:
        """A worker's connection has ended. Its process may live, or be started again: it is looked for."""
        self._in_flight.lose_worker(worker_id, reason)
        port = self._ports.get(worker_id)
        if port is not None:
            self._spawn(self._look_for(worker_id, port))

    def look_for(self, port: AttachedPort) -> None:
        """A worker that did not say in time who it is: it is attached as soon as it does."""
        self._spawn(self._look_for("", port))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Look for nothing any more."""
        for task in self._tasks:
            task.cancel()

    async def _look_for(self, worker_id: str, port: AttachedPort) -> None:
        """Until it is attached, or known to be gone. A worker whose id isn't known is a process that may still live."""
        for attempt in count(1):
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S)) - 1])
            if worker_id and not self._is_missed(worker_id, port):
                return  # taken out, or attached by another
            try:
                found = await self.attach(port)
            except GatewayError as error:
                if not worker_id and isinstance(error.__cause__, OwnerDown):
                    return  # it is attached when it has been restarted
                if attempt == len(RETRY_S):
                    name, pause_s = worker_id or "that says nothing", RETRY_S[-1]
                    log.error(
                        "worker %s does not come back by itself, tried every %g s: %s", name, pause_s, error
                    )
            else:
                log.warning("worker %s is connected%s", found, " again" if worker_id else "")
                return

    def _is_missed(self, worker_id: str, port: AttachedPort) -> bool:
        worker = self._in_flight.workers.get(worker_id)
        return worker is not None and worker.down is not None and self._ports.get(worker_id) is port

    def _is_connected(self, info: WorkerInfo) -> bool:
        """This life of the worker is: attached by another meanwhile."""
        worker = self._in_flight.workers.get(info.worker_id)
        if worker is None or worker.down is not None or not self._receiver.is_connected(info.worker_id):
            return False
        return (worker.info.node_id, worker.info.pid) == (info.node_id, info.pid)

    async def _connect(self, info: WorkerInfo, port: AttachedPort) -> None:
        worker_id = info.worker_id
        self._check(info)
        wrong = await within(CONNECT_S, port.health())
        if wrong is not None:
            raise GatewayError(f"worker {worker_id} is not well: {wrong}")
        await within(CONNECT_S, port.know(self._told()))
        self._in_flight.lose_worker(worker_id, "it was restarted")
        self._receiver.expect(worker_id)
        try:
            await within(CONNECT_S, port.connect_gateway(self._address, self._receiver.secret))
            await self._receiver.wait_complete(CONNECT_S, worker_id)
        except (OwnerDown, Refusal, OSError, TimeoutError, Silence) as error:
            self._receiver.forget(worker_id)
            raise GatewayError(f"worker {worker_id} can't connect its outputs: {error}") from error
        if not self._receiver.is_connected(worker_id):
            raise GatewayError(f"worker {worker_id} is gone again: attach it when it is back")
        self._ports[worker_id] = port
        self._in_flight.attach(info, port)
