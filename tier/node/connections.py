"""Connects, fences and disconnects workers and exchanges. Pure."""

from __future__ import annotations

from collections import Counter

from kvtier.tier.node.leases import Leases
from kvtier.tier.node.remote.fetching import RemoteFetches
from kvtier.tier.node.remote.save_on_demand import SaveOnDemand
from kvtier.tier.node.residency.l3_room import L3Room
from kvtier.tier.node.residency.peer_memory import PeerMemory
from kvtier.tier.node.residency.residency import Residency
from kvtier.tier.node.state.outbox import Outbox
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import HEADER_BYTES, slot_bytes
from kvtier.tier.protocol.events import Disconnect, SaveRoots, Send, WorkerRef
from kvtier.tier.protocol.messages import Hello, Refused, Welcome


class Connections:
    """Decides which workers are served, and frees what a gone one had."""

    def __init__(
        self,
        tables: NodeTables,
        out: Outbox,
        frames: PeerFrames,
        residency: Residency,
        l3: L3Room,
        peers: PeerMemory,
        remote: RemoteFetches,
        saves: SaveOnDemand,
        leases: Leases,
    ) -> None:
        self._tables, self._out, self._frames = tables, out, frames
        self._residency, self._l3, self._peers = residency, l3, peers
        self._remote, self._saves, self._leases = remote, saves, leases
        self.bad_messages = 0

    def hello(self, ref: WorkerRef, hello: Hello) -> None:
        if ref in self._tables.workers:
            return
        refusal = self._refusal(hello)
        if refusal is not None:
            self._out.commands.append(Send(ref, Refused(refusal)))
            self._out.commands.append(Disconnect(ref, refusal))
            return
        for older in self._tables.live():
            if older.ref.worker_id == ref.worker_id:
                self._fence(older, "a newer start of the same worker has connected")
        worker = self._tables.workers[ref] = Worker(ref, hello)
        if worker.is_exchange:
            self._remote.exchange_came(worker)
            return
        self._tables.sizes.update(worker.sizes)
        for spec, nbytes in hello.raw_payloads.items():
            self._tables.raw_payloads.pop(spec, None)
            self._tables.raw_payloads[spec] = nbytes
        while len(self._tables.raw_payloads) > self._tables.limits.specs:
            del self._tables.raw_payloads[next(iter(self._tables.raw_payloads))]
        self.learn_root(hello.root_fields)
        self._out.send(
            worker, Welcome(self._tables.node_id, self._tables.incarnation, self._tables.slots.capacity_bytes)
        )
        self._peers.meet(worker)

    def _refusal(self, hello: Hello) -> str | None:
        """Returns why a worker can't be served; None if it can."""
        if len(self._tables.workers) >= self._tables.limits.workers:
            return f"{self._tables.limits.workers} workers are connected, no more are served"
        if hello.role == "exchange":
            return "an exchange has no pages of its own, this one names some" if hello.payloads else None
        if not 0 < len(hello.payloads) <= self._tables.limits.sizes_per_worker:
            return f"the worker names {len(hello.payloads)} kinds of pages, 1 to {self._tables.limits.sizes_per_worker} are served"
        if hello.arena_bytes and hello.incarnation in self._frames.lenders:
            return f"a worker of incarnation {hello.incarnation} lends frames already"
        largest, smallest = max(hello.payloads.values()), min(hello.payloads.values())
        if smallest <= 0:
            return f"pages of {smallest} bytes can't be"
        if slot_bytes(largest) > self._tables.slots.segment_bytes:
            return (
                f"pages of {largest} bytes can't go into L3: it was made for pages of at most "
                f"{self._tables.slots.segment_bytes - HEADER_BYTES} bytes when the node started"
            )
        return None

    def learn_root(self, fields: dict[str, str]) -> None:
        root = root_key(fields)
        if not self._tables.misses.knows_root(root):
            self._tables.misses.add_root(root, fields)
            self._out.commands.append(SaveRoots(self._tables.misses.roots()))

    def worker_gone(self, ref: WorkerRef) -> None:
        worker = self._tables.workers.pop(ref, None)
        if worker is None:
            return
        worker.fenced = True
        self._forget_wants(worker)
        self._tables.sizes -= Counter(worker.sizes)
        if worker.is_exchange:
            self._remote.exchange_gone(worker)
        self._saves.saves_no_more(worker)
        self._residency.settle_above(ref)
        for request in list(worker.requests.values()):
            self._leases.release(request, 0)
        self._l3.return_slots(worker, worker.grants.values())
        self._peers.peer_gone(worker)

    def blame(self, worker: Worker, wrong: str | None) -> None:
        """Ends the connection of a worker whose message can't be right by what the node knows."""
        if wrong is not None:
            self.bad_messages += 1
            self._fence(worker, wrong)

    def _fence(self, worker: Worker, reason: str) -> None:
        if not worker.fenced:
            worker.fenced = True
            self._forget_wants(worker)
            self._out.commands.append(Disconnect(worker.ref, reason))
            if worker.is_exchange:
                self._remote.exchange_went(worker)
            self._saves.saves_no_more(worker)

    def _forget_wants(self, worker: Worker) -> None:
        self._peers.forget_frame_wants(worker)
        for want in [want for want in self._l3.wants if want[0] is worker]:
            del self._l3.wants[want]
