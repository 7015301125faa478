"""The processes of bench/cluster.py: caches, exchanges and slow wires, and what is said to them.

Run as a script it is one of those processes: it says in a line of JSON what it is, then answers each line of its stdin
by one of JSON, and ends with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from transfer import SECRET, process

from kvtier.cluster.transfer.actor import PageExchangeProcess
from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import TierName

WAIT_S = 120.0  # for what takes seconds
WIRE_BYTES = 65536  # passed on at once
BURST_S = 0.005  # what a wire may make up of the time in which it had nothing to pass on, or slept too long

Role = Literal["cache", "exchanges", "wires"]
Answers = Mapping[str, Callable[[], Any]]


# ---- the processes -----------------------------------------------------------------------------------------------


def converse(first: Any, answers: Answers) -> None:
    """Say what is here, then answer until stdin ends."""
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def run_cache(node_id: str, folder: str, page_bytes: str, l3_bytes: str) -> None:
    """A CacheNode with an L3 and nothing below."""
    path = Path(folder)
    service = CacheService(node_id, path / "sock", int(page_bytes), int(l3_bytes), path / "l4", 0)

    def forget() -> int:
        held = [bytes.fromhex(page.key) for page in service.pages(tier=TierName.HOST, limit=100_000)]
        service.evict(held, TierName.HOST)
        return len(held)

    service.start()
    try:
        converse({}, {"is_idle": service.idle, "forget": forget})
    finally:
        service.stop(0.0)


def run_exchanges(socket_path: str, *peers: str) -> None:
    """Exchanges of one cache, each NAME=SAME_HOST; says each one's address by its name.

    To who fetches, every one is a node of its own, whose speed it learns.
    """
    exchanges = []
    for peer in peers:
        name, same_host = peer.split("=")
        mode: Literal["auto", "off"] = "auto" if same_host == "auto" else "off"
        exchanges.append(PageExchangeProcess(name, socket_path, "127.0.0.1", 0, SECRET, same_host=mode))
    try:
        converse(
            {exchange.info()["node_id"]: exchange.info()["address"] for exchange in exchanges},
            {"is_up": lambda: all(exchange.health() is None for exchange in exchanges)},
        )
    finally:
        for exchange in exchanges:
            exchange.stop()


class Wire:
    """A port that stands for another one, and passes back at most `bytes_s`, over all its connections together."""

    def __init__(self, host: str, port: int, bytes_s: float) -> None:
        self._target = host, port
        self._bytes_s = bytes_s
        self._free_at = 0.0

    async def open(self) -> int:
        """The port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            connection = socket.socket()
            # What a far sender has on its way is little: a call that is cancelled leaves as little to pass on.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * WIRE_BYTES)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, self._target)
            there, back = await asyncio.open_connection(sock=connection)
            await asyncio.gather(self._pass_on(reader, back, False), self._pass_on(there, writer, True))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_back: bool) -> None:
        try:
            while data := await source.read(WIRE_BYTES):
                if is_back:
                    await self._take_turn(len(data))
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()

    async def _take_turn(self, nbytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._bytes_s
        await asyncio.sleep(max(0.0, self._free_at - now))


def run_wires(*wires: str) -> None:
    """Wires, each BYTES_PER_SECOND=HOST:PORT of what it leads to; says their addresses in that order."""

    async def open_all() -> list[str]:
        addresses = []
        for wire in wires:
            bytes_s, _, target = wire.partition("=")
            host, _, port = target.rpartition(":")
            addresses.append(f"127.0.0.1:{await Wire(host, int(port), float(bytes_s)).open()}")
        return addresses

    loop = asyncio.new_event_loop()
    addresses = loop.run_until_complete(open_all())
    threading.Thread(target=loop.run_forever, name="wires", daemon=True).start()
    converse(addresses, {})


ROLES: dict[Role, Callable[..., None]] = {
    "cache": run_cache,
    "exchanges": run_exchanges,
    "wires": run_wires,
}


# ---- this side ---------------------------------------------------------------------------------------------------


class Part:
    """One of those processes, seen from here."""

    def __init__(self, name: str, child: Any, log: IO[str]) -> None:
        self._name = name
        self._child = child
        self._log = log
        self.said: Any = self._read()

    def ask(self, question: str) -> Any:
        """Its answer."""
        print(question, file=self._child.stdin, flush=True)
        return self._read()

    def until(self, question: str) -> None:
        """Wait for a yes."""
        wait_for(lambda: self.ask(question), f"{self._name}: {question}")

    def _read(self) -> Any:
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self._name} ended early:\n{self._log.read()}")
        return json.loads(line)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Until it is true. SystemExit where that takes more than WAIT_S."""
    until = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"waited {WAIT_S:.0f} s in vain for {what}")
        time.sleep(0.005)


@contextmanager
def part(name: str, role: Role, *arguments: object) -> Iterator[Part]:
    """One of those processes, which ends with the block."""
    with (
        tempfile.TemporaryFile("w+") as log,
        process(str(Path(__file__)), role, *map(str, arguments), log=log) as child,
    ):
        yield Part(name, child, log)


@dataclass(frozen=True)
class Peer:
    """A node that pages are fetched from: over a wire of `bytes_s`, by gRPC as fast as it goes, or out of its memory."""

    node_id: str
    label: str
    same_host: Literal["auto", "off"] = "off"
    bytes_s: float | None = None

    @classmethod
    def all(cls, mb_s: list[float]) -> list[Peer]:
        """One of each speed in MB/s, the slowest first; then those that nothing slows."""
        slow = [cls(f"away-{speed:g}", f"{speed:g} MB/s", bytes_s=speed * 1e6) for speed in sorted(mb_s)]
        return [*slow, cls("away-grpc", "gRPC"), cls("away", "same host", "auto")]


if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])  # type: ignore[index]  # by `part` only
