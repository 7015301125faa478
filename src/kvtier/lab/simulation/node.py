"""A node of a simulated cluster: the real Coordinator, whose reads, writes, copies and fetches take virtual time. Pure.

Pages have keys and no bytes. Workers and the exchange are played here, as far as the coordinator can tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from kvtier.lab.simulation.parts import (
    BATCH,
    ENVELOPE,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    SPEC,
    UNSAVED,
    VARIANT,
    Agenda,
    Hardware,
    Link,
    NodeSizes,
    Pull,
    locate,
    segment_slots,
    stored_page,
)
from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.remote.fetching import EXCHANGE
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Costs, PolicySettings, Use
from kvtier.tier.protocol.events import (
    Event,
    FromWorker,
    HoldsChanged,
    ReadDone,
    ReadPage,
    Send,
    WorkerRef,
    WriteDone,
    WritePage,
)
from kvtier.tier.protocol.messages import (
    Copied,
    Fetch,
    Fetched,
    FetchPage,
    Finished,
    Granted,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Located,
    PageRef,
    Release,
    Remote,
    ReturnSlots,
    Stored,
    ToNode,
    ToWorker,
    WantSlots,
    WriteMode,
)
from kvtier.tier.stores.base import SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots


@dataclass(slots=True, eq=False)
class Serving:
    """A fetch of another node's, served from here."""

    fetch: Fetch
    reader: SimNode
    begun: float
    pages: dict[int, FetchPage]  # that haven't gone out
    in_flight: int = 0
    sent: int = 0  # pages
    reason: str = "never_stored"


class PageSource(Protocol):
    """The other nodes, by id."""

    def __call__(self, node_id: str) -> SimNode | None: ...


class SimNode:
    """Owned by a Simulation. `holds` hears what its tiers have and no longer have.

    `parents`, of all nodes together, is what the envelopes of pages say of the ones before them.
    """

    def __init__(
        self,
        node_id: str,
        agenda: Agenda,
        sizes: NodeSizes,
        workers: int,
        policy: PolicySettings,
        *,
        write: WriteMode = "through",
        hardware: Hardware = Hardware(),  # noqa: B008  frozen
        costs: Costs = Costs(20e-3, 64.0),  # noqa: B008  frozen
        peers: PageSource = lambda node_id: None,
        parents: dict[bytes, bytes] | None = None,
        holds: Callable[[TierName, Iterable[bytes], Iterable[bytes]], None] = lambda tier, came, left: None,
    ) -> None:
        self.node_id = node_id
        self.read_pages = self.written_pages = self.fetched_pages = self.unsaved_pages = 0
        self.coordinator = Coordinator(
            node_id=node_id,
            incarnation="1",
            host=HostSlots(sizes.l3 * SLOT_BYTES, segment_slots(sizes.l3) * SLOT_BYTES),
            ssd=SegmentAllocator(sizes.l4 * SLOT_BYTES, segment_slots(sizes.l4) * SLOT_BYTES)
            if sizes.l4
            else None,
            limits=Limits(gone=1, keys_per_locate=1 << 30),
            policy=policy,
            write=write,
            page_bytes=PAYLOAD_BYTES,
            directory=True,
        )
        self._agenda = agenda
        self._hardware = hardware
        self._costs = costs
        self._peers = peers
        self._holds = holds
        self._parents: dict[bytes, bytes] = {} if parents is None else parents
        self._ssd, self._network = Link(hardware.l4_lanes), Link()
        self._copies = [Link() for _ in range(workers)]
        self._pulls: dict[str, Pull] = {}
        self._servings: dict[str, Serving] = {}
        self._to_save: list[dict[bytes, tuple[bytes, int]]] = [{} for _ in range(workers)]
        self._serve_ids = count()
        self._refs = [WorkerRef(f"w{number}", "1") for number in range(workers)]
        self._numbers = {ref: number for number, ref in enumerate(self._refs)}
        self._exchange = WorkerRef(EXCHANGE + node_id, "1")
        for ref in self._refs:
            kinds = {SPEC: PAYLOAD_BYTES}
            hello = Hello.of_worker(ref.worker_id, "1", kinds, kinds, {}, write, answers_saves=False)
            self._tell(ref, hello)
        self._tell(self._exchange, Hello(self._exchange.worker_id, "1", {}, {}, {}, role="exchange"))

    # ---- what workers do -------------------------------------------------------------------------------------------

    def pull(
        self,
        request_id: str,
        worker: int,
        keys: Sequence[bytes],
        own: int,
        remotes: Sequence[tuple[str, str, int]],
        done: Callable[[Pull], None],
    ) -> None:
        """Bring up what can be had of a prefix behind the `own` pages that L1 has; `done` is called when it is there."""
        pull = self._pulls[request_id] = Pull(request_id, worker, own, done)
        if own < len(keys):
            page_s = self._costs.recompute_s((own + len(keys)) / 2)
            message = locate(request_id, keys[own:], own, page_s, [Remote(*remote) for remote in remotes])
            self._tell(self._refs[worker], message)
        self._end_if_over(pull)

    def save(self, worker: int, pages: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Pages (key, the parent's, depth) are to be stored in L3, as slots are granted."""
        waiting = self._to_save[worker]
        for key, parent, depth in pages:
            if len(waiting) < UNSAVED:
                waiting[key] = (parent, depth)
                self._parents[key] = parent
            else:
                self.unsaved_pages += 1
        if waiting:
            self._tell(self._refs[worker], WantSlots(len(waiting), PAYLOAD_BYTES))

    def finished(self, request_id: str, worker: int, keys: Sequence[bytes], use: Use, seconds: float) -> None:
        """A request is over."""
        message = Finished(
            request_id,
            [list(keys)],
            use.new_pages,
            use.output_tokens,
            int(use.kind),
            use.turn,
            use.session,
            use.closed,
            use.open,
            seconds,
            self._costs.page_s,
            self._costs.double_pages,
        )
        self._tell(self._refs[worker], message)

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _tell(self, ref: WorkerRef, message: ToNode) -> None:
        self._handle(FromWorker(ref, message))

    def _handle(self, event: Event) -> None:
        for command in self.coordinator.handle(event, self._agenda.now):
            match command:
                case Send():
                    self._hear(command.worker, command.message)
                case ReadPage():
                    self.read_pages += 1
                    self._after_ssd(ReadDone(command.transfer, ENVELOPE))
                case WritePage():
                    self.written_pages += 1
                    self._after_ssd(WriteDone(command.transfer))
                case HoldsChanged():
                    self._holds(command.tier, command.came, command.left)
                case _:
                    pass

    def _after_ssd(self, event: Event) -> None:
        end = self._ssd.take(self._agenda.now, self._hardware.l4_s)
        self._agenda.at(end, lambda: self._handle(event))

    def _hear(self, ref: WorkerRef, message: ToWorker) -> None:
        match message:
            case Located() | Loaded() | LoadFailed() if ref == self._exchange:
                self._hear_serving(self._servings.get(message.request_id), message)
            case Located() | Loaded() | LoadFailed():
                self._hear_pull(self._pulls.get(message.request_id), message)
            case Granted():
                self._granted(self._numbers[ref], message)
            case Fetch():
                self._fetch(message)
            case _:
                pass

    def _granted(self, worker: int, message: Granted) -> None:
        waiting, spare = self._to_save[worker], list(message.grants)
        stored = []
        while spare and waiting:
            key = next(iter(waiting))
            parent, depth = waiting.pop(key)
            stored.append(stored_page(FetchPage(spare.pop(), key, VARIANT, SPEC), parent, depth))
        # Not from within `handle`: its commands are carried out in their order first.
        if stored:
            self._soon(self._refs[worker], Stored(stored))
        if spare:
            self._soon(self._refs[worker], ReturnSlots(spare))

    def _soon(self, ref: WorkerRef, message: ToNode) -> None:
        self._agenda.at(self._agenda.now, lambda: self._tell(ref, message))

    # ---- pages on their way up -------------------------------------------------------------------------------------

    def _hear_pull(self, pull: Pull | None, message: Located | Loaded | LoadFailed) -> None:
        if pull is None:
            return
        match message:
            case Located():
                pull.end = message.pages
                pull.waiting = {page for _, page in message.loading} | {page.page[1] for page in message.host}
                self._copy(pull, message.host)
            case Loaded():
                self._copy(pull, message.pages)
            case LoadFailed():
                pull.end = min(pull.end, message.missing.page)
                pull.waiting = {page for page in pull.waiting if page < pull.end}
                self._agenda.at(self._agenda.now, lambda: self._end_if_over(pull))

    def _copy(self, pull: Pull, pages: Sequence[HostPage]) -> None:
        if pages:
            seconds = len(pages) * self._hardware.l3_s
            end = self._copies[pull.worker].take(self._agenda.now, seconds)
            self._agenda.at(end, lambda: self._copied(pull, pages, seconds))

    def _copied(self, pull: Pull, pages: Sequence[HostPage], seconds: float) -> None:
        for page in pages:
            pull.came[page.page[1]] = page.came_from
            pull.waiting.discard(page.page[1])
        refs = [page.page for page in pages]
        copied = Copied(pull.request_id, refs, len(pages) * PAYLOAD_BYTES, seconds)
        self._tell(self._refs[pull.worker], copied)
        self._end_if_over(pull)

    def _end_if_over(self, pull: Pull) -> None:
        if not pull.waiting and self._pulls.pop(pull.request_id, None) is pull:
            pull.done(pull)

    # ---- from node to node -----------------------------------------------------------------------------------------

    def _fetch(self, fetch: Fetch) -> None:
        """This node's exchange asks the other node's."""
        peer = self._peers(fetch.node_id)
        if peer is None:
            failed = [(page.key, page.variant) for page in fetch.pages]
            self._soon(self._exchange, Fetched(fetch.fetch_id, failed, "load_failed", "no such node", 0, 0.0))
            return
        begins = self._agenda.now + self._hardware.remote_first_s
        self._agenda.at(begins, lambda: peer.serve(fetch, self))

    def serve(self, fetch: Fetch, reader: SimNode) -> None:
        """Send pages that another node asks for."""
        pages = dict(enumerate(fetch.pages, fetch.first_page))
        request_id = f"serve{next(self._serve_ids)}"
        serving = Serving(fetch, reader, self._agenda.now, pages)
        self._servings[request_id] = serving
        keys = [page.key for page in fetch.pages]
        self._tell(self._exchange, locate(request_id, keys, fetch.first_page, 0.0, []))

    def _hear_serving(self, serving: Serving | None, message: Located | Loaded | LoadFailed) -> None:
        if serving is None:
            return
        match message:
            case Located():
                if message.missing is not None:
                    serving.reason = message.missing.reason
                self._cut(serving, message.pages)
                self._send_pages(message.request_id, serving, message.host)
            case Loaded():
                self._send_pages(message.request_id, serving, message.pages)
            case LoadFailed():
                serving.reason = message.missing.reason
                self._cut(serving, message.missing.page)
        self._end_serving(message.request_id, serving)

    def _cut(self, serving: Serving, end: int) -> None:
        """Pages from there on aren't here."""
        for page in [page for page in serving.pages if page >= end]:
            del serving.pages[page]

    def _send_pages(self, request_id: str, serving: Serving, pages: Sequence[HostPage]) -> None:
        """Each batch goes over both nodes' links; what would come too late is not sent."""
        agenda, page_s = self._agenda, self._hardware.remote_s
        deadline = serving.begun + serving.fetch.deadline_s
        for first in range(0, len(pages), BATCH):
            refs = [page.page for page in pages[first : first + BATCH]]
            batch = [serving.pages.pop(page) for _, page in refs if page in serving.pages]
            ours = self._network.take(agenda.now, len(batch) * page_s)
            theirs = serving.reader._network.take(agenda.now, len(batch) * page_s)
            end = max(ours, theirs)
            if end > deadline:
                serving.reason, batch, end = "deadline", [], deadline
            serving.in_flight += 1
            agenda.at(end, partial(self._sent, request_id, serving, refs, batch))

    def _sent(self, request_id: str, serving: Serving, refs: list[PageRef], batch: list[FetchPage]) -> None:
        serving.in_flight -= 1
        serving.sent += len(batch)
        self._tell(self._exchange, Copied(request_id, refs, len(batch) * PAYLOAD_BYTES, 0.0))
        serving.reader.fetched_from(serving.fetch, batch)
        self._end_serving(request_id, serving)

    def _end_serving(self, request_id: str, serving: Serving) -> None:
        if serving.pages or serving.in_flight or self._servings.pop(request_id, None) is None:
            return
        seconds = self._agenda.now - serving.begun
        nbytes = serving.sent * PAYLOAD_BYTES
        fetched = Fetched(serving.fetch.fetch_id, [], serving.reason, "", nbytes, seconds)
        self._soon(self._exchange, Release(request_id))
        self._agenda.at(self._agenda.now, lambda: serving.reader.fetch_ended(fetched))

    def fetched_from(self, fetch: Fetch, batch: Sequence[FetchPage]) -> None:
        """Pages have come from another node."""
        depths = {page.key: depth for depth, page in enumerate(fetch.pages, fetch.first_page)}
        stored = [stored_page(page, self._parents[page.key], depths[page.key]) for page in batch]
        self.fetched_pages += len(stored)
        if stored:
            self._tell(self._exchange, Stored(stored))

    def fetch_ended(self, fetched: Fetched) -> None:
        """No more comes of a fetch."""
        self._tell(self._exchange, fetched)
