#!/usr/bin/env python3
"""Pages fetched from another node over loopback, as a share of what the same gRPC stack gives to raw bytes.

  bench/transfer.py [--page-kib 64,256,1024] [--mib 32] [--streams 1,2,4] [--nixl PYTHON] [--rounds 15] [--json FILE]

Ours: out of the slab of a CacheNode (a process of its own), through its exchange (another), into slots here, each page
checked. Against it, in the same rounds, from the same exchange process: frames of the same size without a header, made
before and thrown away here, over the same gRPC stack with the same options; a plain socket, received into the same slots;
the channel for nodes on one machine, copied from slab to slab and checked; and NIXL (UCX) reading the same bytes, where
PYTHON can import nixl (default: this one). Times are of all pages, after connections stand.
Goal: 70 % of raw gRPC with as many streams.

NIXL works without a GPU, but its packages bring CUDA's, so it wants an environment of its own (6 GB):
  python3 -m venv nixl && nixl/bin/pip install nixl nixl-cu12 numpy && bench/transfer.py --nixl nixl/bin/python
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
from common import Figure, argument_parser, finish, interleave, throughput

from kvtier.cluster.transfer import local as exchange_local
from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.actor import PageExchangeProcess, keep_freed_memory
from kvtier.cluster.transfer.channels import GrpcChannel
from kvtier.cluster.transfer.client import Run
from kvtier.cluster.transfer.local import LocalChannel
from kvtier.cluster.transfer.sink import SlotSink
from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import (
    ALIGN_BYTES,
    HEADER_BYTES,
    Envelope,
    PageKey,
    RootKey,
    page_checksum,
    slot_bytes,
)
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import (
    Fetch,
    FetchPage,
    Grant,
    Granted,
    Hello,
    Stored,
    StoredPage,
    ToWorker,
    WantSlots,
)
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier
from kvtier.tier.transport.frames import FRAME_BYTES, PagesRequest, request_of

ROOT, TENANT, SPEC, VARIANT = b"r" * 32, b"t" * 16, b"s" * 16, "bf16"
SECRET = "of the bench"
GOAL = 0.7
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """What one measurement moves: `count` pages of `nbytes`."""

    nbytes: int
    count: int

    @property
    def total_bytes(self) -> int:
        """Payloads only."""
        return self.nbytes * self.count

    def key(self, number: int) -> PageKey:
        """Of a page of the chain."""
        return PageKey(number.to_bytes(4, "little") + bytes(28))

    def payload(self, number: int) -> bytes:
        """Its bytes."""
        return self.key(number) * (self.nbytes // 32)


# ---- the other node's processes ----------------------------------------------------------------------------------


def serve_node(shape: Shape, folder: Path) -> None:
    """A CacheNode with the pages in L3."""
    l3_bytes = (2 * shape.count + 16) * slot_bytes(shape.nbytes)
    service = CacheService("away", folder / "run" / "sock", shape.nbytes, l3_bytes, folder / "l4", 0)
    service.start()
    try:
        fill(shape, folder / "run" / "sock")
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        service.stop(0.0)


def fill(shape: Shape, path: Path) -> None:
    """Store the chain as a worker does."""
    granted: list[Grant] = []
    changed = threading.Condition()

    def hear(message: ToWorker) -> None:
        assert isinstance(message, Granted)
        with changed:
            granted.extend(message.grants)
            changed.notify_all()

    hello = Hello("writer", "1", {SPEC: shape.nbytes}, {SPEC: shape.nbytes}, {"weights": "bench"})
    client = NodeClient.connect(path, hello, hear, lambda: None)
    for number in range(shape.count):
        with changed:
            if not granted:
                client.send(WantSlots(8, shape.nbytes))
                assert changed.wait_for(lambda: bool(granted), DEADLINE_S)
            grant = granted.pop()
        key, payload = shape.key(number), shape.payload(number)
        parent = bytes(shape.key(number - 1)) if number else ROOT
        checksum = page_checksum(key, VARIANT, SPEC, payload)
        envelope = Envelope(
            key, VARIANT, SPEC, shape.nbytes, checksum, RootKey(ROOT), parent, TENANT, number, 16
        )
        assert client.slab is not None
        client.slab.write(Place(0, grant.slot), envelope, payload)
        page = StoredPage(grant, key, VARIANT, "", SPEC, ROOT, parent, TENANT, number, 16, checksum, b"")
        client.send(Stored([page]))
    client.close()


def serve_exchange(shape: Shape, folder: Path) -> None:
    """Its exchange, and beside it the raw gRPC stream and the plain socket."""
    keep_freed_memory()
    path = str(folder / "run" / "sock")
    exchange = PageExchangeProcess("away", path, "127.0.0.1", 0, SECRET)
    frame = os.urandom(FRAME_BYTES)
    per_frame = max(1, FRAME_BYTES // shape.nbytes) * shape.nbytes
    data = frame[: min(per_frame, FRAME_BYTES)]

    def get(request: bytes, context: Any) -> Iterator[bytes]:
        for _ in range(int(request)):
            yield data

    server = grpc.server(ThreadPoolExecutor(8), options=wire.SERVER_OPTIONS)
    handlers = {"Get": grpc.unary_stream_rpc_method_handler(get)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_socket, args=(listener, os.urandom(shape.nbytes)), daemon=True).start()
    print(
        json.dumps(
            {
                "exchange": exchange.info()["address"],
                "raw": f"127.0.0.1:{port}",
                "socket": listener.getsockname()[1],
                "raw_bytes": len(data),
            }
        ),
        flush=True,
    )
    sys.stdin.read()
    exchange.stop()
    server.stop(0)


def serve_socket(listener: socket.socket, page: bytes) -> None:
    """Each connection: four bytes ask for so many pages."""

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while ask := connection.recv(4):
            for _ in range(int.from_bytes(ask, "little")):
                connection.sendall(page)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


@contextmanager
def process(*arguments: str, log: int | IO[str] = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with its stdin; its stderr goes to `log`."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert child.stdin is not None
    try:
        yield child
    finally:
        child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- this side ---------------------------------------------------------------------------------------------------


class Slots:
    """This node's slab, in the place of a NodeSession: grants are all there, and nothing is told."""

    def __init__(self, shape: Shape) -> None:
        step = slot_bytes(shape.nbytes) // ALIGN_BYTES
        self.grants = [Grant(number * step, 1, shape.nbytes) for number in range(shape.count)]
        self.host = HostTier(shape.count * slot_bytes(shape.nbytes))

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Always allowed."""
        yield

    def slot(self, grant: Grant) -> memoryview:
        """Of the slab."""
        return self.host.slot(Place(0, grant.slot), grant.payload_bytes)

    def send(self, message: Any) -> None:
        """Nothing listens."""


class Streams:
    """The pages in `count` parts, each fetched by a thread of its own over a channel of its own."""

    def __init__(self, shape: Shape, slots: Slots, count: int, pool: ThreadPoolExecutor) -> None:
        self.shape, self.slots, self._pool = shape, slots, pool
        each = shape.count // count
        self.parts = [range(at * each, (at + 1) * each) for at in range(count)]
        self._orders = {part.start: self._order(part) for part in self.parts}

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return sum(len(part) for part in self.parts) * self.shape.nbytes

    def each(self, work: Callable[[int, range], None]) -> Callable[[], None]:
        """`work(number, pages)` for all parts at once."""

        def run() -> None:
            list(self._pool.map(work, range(len(self.parts)), self.parts))

        return run

    def _order(self, part: range) -> Fetch:
        """As it comes from the node."""
        grants, key = self.slots.grants, self.shape.key
        pages = [FetchPage(grants[number], key(number), VARIANT, SPEC) for number in part]
        return Fetch(1, "away", "", ROOT, TENANT, 16, part.start, pages, DEADLINE_S)

    def fetch(self, channel: Any, part: range) -> None:
        """Ours: through a PageChannel into the slots."""
        fetch = self._orders[part.start]
        request: PagesRequest = request_of(fetch)
        came: list[bytes] = []
        sink = SlotSink(self.slots, fetch, request, lambda keys, nbytes: came.extend(keys))  # type: ignore[arg-type]
        ending = channel.fetch(request, sink, Run(time.monotonic() + DEADLINE_S))
        assert not ending.reason and len(came) == len(part), ending

    def receive(self, connection: socket.socket, part: range) -> None:
        """The plain socket, into the slots."""
        nbytes = self.shape.nbytes
        connection.sendall(len(part).to_bytes(4, "little"))
        for number in part:
            payload = self.slots.slot(self.slots.grants[number])[HEADER_BYTES : HEADER_BYTES + nbytes]
            at = 0
            while at < nbytes:
                at += connection.recv_into(payload[at:])


def raw(get: Any, part: range, shape: Shape, frame_bytes: int) -> None:
    """Raw messages of the same stack, thrown away."""
    wanted = len(part) * shape.nbytes
    got = 0
    for data in get(str(-(-wanted // frame_bytes)).encode()):
        got += len(data)
    assert got >= wanted


class Far:
    """Connections to the other node's processes, `count` of each kind."""

    def __init__(self, there: dict[str, Any], count: int) -> None:
        self.raw_bytes: int = there["raw_bytes"]
        self.channels = [GrpcChannel(("away", there["exchange"]), "home", SECRET, None) for _ in range(count)]
        reply = wait_for_cache(self.channels[0])
        self.local = exchange_local.connect(reply.socket_path, "exchange:home", "away", reply.incarnation)
        self._raw_channels = [grpc.insecure_channel(there["raw"], wire.CHANNEL_OPTIONS) for _ in range(count)]
        self.raws = [channel.unary_stream("/raw/Get") for channel in self._raw_channels]
        self.sockets = [socket.create_connection(("127.0.0.1", there["socket"])) for _ in range(count)]

    def close(self) -> None:
        """All of them."""
        self.local.close()
        for opened in (*self.channels, *self._raw_channels, *self.sockets):
            opened.close()

    def contenders(self, part: Streams) -> dict[str, Callable[[], None]]:
        """What is timed, for so many streams."""

        def plain(number: int, pages: range) -> None:
            raw(self.raws[number], pages, part.shape, self.raw_bytes)

        return {
            "raw": part.each(plain),
            "ours": part.each(lambda number, pages: part.fetch(self.channels[number], pages)),
            "socket": part.each(lambda number, pages: part.receive(self.sockets[number], pages)),
            "same host": part.each(lambda number, pages: part.fetch(LocalChannel(self.local), pages)),
        }


LABELS = {
    "raw": "raw gRPC messages",
    "ours": "PageTransfer, checked",
    "socket": "plain socket, unchecked",
    "same host": "same-host memory, checked",
}


def measure(shape: Shape, streams: list[int], rounds: int, nixl: str | None) -> list[Figure]:
    """All contenders of one page size."""
    figures: list[Figure] = []
    here = str(Path(__file__))
    arguments = [str(shape.nbytes), str(shape.count)]
    with (
        tempfile.TemporaryDirectory(prefix="kv") as name,
        ThreadPoolExecutor(max(streams)) as pool,
        process(here, "--role", "node", name, *arguments) as node,
        process(here, "--role", "exchange", name, *arguments) as exchange,
    ):
        assert node.stdout is not None and exchange.stdout is not None
        assert node.stdout.readline() == "ready\n", "the node did not start"
        slots = Slots(shape)
        far = Far(json.loads(exchange.stdout.readline()), max(streams))
        for count in streams:
            part = Streams(shape, slots, count, pool)
            seconds = interleave(far.contenders(part), rounds)
            for key, label in LABELS.items():
                goal = GOAL if key == "ours" else None
                figure = throughput(seconds, key, part.total_bytes, "" if key == "raw" else "raw", goal)
                figure.name = f"{label}, {count} stream{'s' * (count > 1)}"
                figures.append(figure)
        far.close()
    if nixl is not None:
        figures += measure_nixl(nixl, shape, rounds, figures[0])
    return figures


def wait_for_cache(channel: GrpcChannel) -> Any:
    """The exchange's reply once it is connected to its node."""
    until = time.monotonic() + DEADLINE_S
    while True:
        reply = channel.meet(Run(until))
        if reply.socket_path:
            return reply
        assert time.monotonic() < until, "the exchange did not reach its node"
        time.sleep(0.02)


def measure_nixl(python: str, shape: Shape, rounds: int, reference: Figure) -> list[Figure]:
    """NIXL's own agents in two processes; rounds of its own, right after ours."""
    script = str(Path(__file__).with_name("transfer_nixl.py"))
    done = subprocess.run(
        [python, script, str(shape.nbytes), str(shape.count), str(rounds)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        print(f"NIXL did not run: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return []
    figures = []
    for name, seconds in json.loads(done.stdout.strip().splitlines()[-1]).items():
        samples = [shape.total_bytes / s / 1e9 for s in seconds]
        share = statistics.median(samples) / reference.value
        figures.append(Figure(name, samples, "GB/s", "raw gRPC messages, 1 stream", share))
    return figures


def main() -> int:
    """Measure, print, write."""
    if sys.argv[1:2] == ["--role"]:
        role, folder, nbytes, count = sys.argv[2:]
        {"node": serve_node, "exchange": serve_exchange}[role](Shape(int(nbytes), int(count)), Path(folder))
        return 0
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--page-kib", default="64,256,1024", help="page sizes (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=32, help="moved in each round (default: %(default)s)")
    parser.add_argument("--streams", default="1,2,4", help="at once (default: %(default)s)")
    parser.add_argument(
        "--nixl", metavar="PYTHON", default=sys.executable, help="one that has nixl; '' for none"
    )
    options = parser.parse_args()
    keep_freed_memory()
    streams = [int(count) for count in options.streams.split(",")]
    tables = {}
    for kib in options.page_kib.split(","):
        nbytes = int(kib) * 1024
        shape = Shape(nbytes, max(max(streams), options.mib * 2**20 // nbytes))
        tables[f"pages of {kib} KiB, {shape.total_bytes >> 20} MiB a round"] = measure(
            shape, streams, options.rounds, options.nixl or None
        )
    return finish(tables, options.json)


if __name__ == "__main__":
    sys.exit(main())
