"""The Ray actor that exchanges pages with other nodes: one process per node, between its CacheNode and its peers.

It serves this node's pages (cluster/transfer/server.py) and fetches theirs (cluster/transfer/client.py). Page bytes go between its
sockets and the slab's slots; none goes through a Ray call.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from typing import Any, Literal

import ray

from kvtier.cluster.machines.addresses import own_address
from kvtier.cluster.transfer.channels import Channels
from kvtier.cluster.transfer.client import Fetcher
from kvtier.cluster.transfer.node_link import NodeLink
from kvtier.cluster.transfer.server import ExchangeServer
from kvtier.cluster.transfer.wire import TlsFiles
from kvtier.tier.transport.fetch_runs import FetchLimits
from kvtier.workers.machine.endpoints import Endpoint, bare_host

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 8  # threads of the actor
PULSE = {"heartbeat": 1}  # a thread of its own, so that calls that wait don't make it look stalled
STOP_GRACE_S = 0.5
MAX_NOTES = 64
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt


class PageExchangeProcess:
    """What the actor's process runs; `PageExchange` is this class as a Ray actor.

    `secret` is the deployment's: only who knows it is served. `host` and `port` are listened at (0: any free port; a
    network such as 10.1.0.0/16: this machine's address in it),
    `advertise` is the host that others reach it by ("": `host`, or this node's address where that is a wildcard).
    `in_flight_bytes` bounds what is fetched at once, `streams` the fetches from one peer at once, `deadline_s` each
    fetch; `max_streams` bounds the calls served at once, and one whose peer takes nothing for `stall_s` is ended; a
    peer slower than `min_bytes_per_s` after `grace_s` is given up. `same_host` "auto": pages of nodes on this machine are
    copied in memory, "off": they are sent like all others. Raises OSError, with the way out, when it can't listen.
    """

    def __init__(
        self,
        node_id: str,
        socket_path: str,
        host: str,
        port: int,
        secret: str,
        in_flight_bytes: int = 64 * 2**20,
        deadline_s: float = 5.0,
        streams: int = 2,
        same_host: Literal["auto", "off"] = "auto",
        *,
        advertise: str = "",
        max_streams: int = 16,
        stall_s: float = 5.0,
        grace_s: float = 1.5,
        min_bytes_per_s: float = 2**20,
        tls: TlsFiles | None = None,
    ) -> None:
        if not secret:
            raise ValueError("an exchange needs the deployment's secret, got an empty one")
        keep_freed_memory()
        host = bare_host(own_address(host))
        self._node_id = node_id
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        keys = None if tls is None else tls.read()
        worker_id = f"exchange:{node_id}"
        uses_memory = same_host == "auto"
        limits = FetchLimits(
            in_flight_bytes=in_flight_bytes,
            streams=streams,
            deadline_s=deadline_s,
            grace_s=grace_s,
            min_bytes_per_s=min_bytes_per_s,
        )
        self._channels = Channels(node_id, worker_id, secret, self._note, tls=keys, uses_memory=uses_memory)
        self._fetcher = Fetcher(limits, self._channels, self._note)
        self._link = NodeLink(socket_path, worker_id, self._fetcher.order, self._fetcher.lost, self._note)
        self._server = ExchangeServer(
            node_id,
            self._link,
            secret,
            self._note,
            max_streams=max_streams,
            stall_s=stall_s,
            tls=keys,
            is_shared=uses_memory,
        )
        bound = self._server.start(host, port)
        self._address = str(Endpoint(bare_host(advertise) if advertise else _reachable(host), bound))
        self._fetcher.start()
        self._link.start()
        self._is_stopped = False

    def info(self) -> dict[str, Any]:
        """{"node_id", "address", "pid"}; `address` is the HOST:PORT that peers reach it at."""
        return {"node_id": self._node_id, "address": self._address, "pid": os.getpid()}

    def health(self) -> str | None:
        """None when all is well, else what isn't, in one line."""
        if self._is_stopped:
            return f"the exchange of node {self._node_id} is stopped"
        if not self._link.is_alive:
            return "the thread that keeps to the node's cache has ended"
        if (stuck := self._fetcher.health()) is not None:
            return stuck
        return None if self._link.session is not None else f"the cache of node {self._node_id} is away"

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> float:
        """Seconds since the thread that decides on fetches turned: 0, once it has answered."""
        self._fetcher.stats()
        return 0.0

    def stats(self) -> dict[str, Any]:
        """Counts since its start: see ExchangeServer.stats and Fetcher.stats; one dictionary."""
        return {**self._server.stats(), **self._fetcher.stats()}

    def notes(self) -> list[str]:
        """The latest one-line notices; the latest last."""
        return list(self._notes)

    def stop(self) -> None:
        """End all calls and fetches, and let go of the node. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._server.stop(STOP_GRACE_S)
        self._fetcher.stop()
        self._link.close()
        self._channels.close()

    def _note(self, text: str) -> None:
        self._notes.append(text)
        log.warning("%s", text)


def keep_freed_memory() -> None:
    """Let malloc keep what frames are made of: memory fresh from the kernel costs several times their copy."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc: its allocator does as it does
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_TOP_PAD, 64 << 20)


def _reachable(host: str) -> str:
    if not Endpoint(host, 0).is_everywhere:
        return host
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


PageExchange = ray.remote(  # type: ignore[call-overload]  # Ray's types lack both
    num_cpus=0, max_concurrency=CALLS_AT_ONCE, concurrency_groups=PULSE
)(PageExchangeProcess)
