"""A cluster in virtual time: the real routing, directory, coordinators and L1 policies; only computing is played. Pure.

Requests come at their times, and those that continue another one not before its answer has been read. Each goes to a
worker as the gateway would choose it, brings up what its node can, computes the rest in the worker's queue, and gives
its tokens. Pages become known to the directory as its sources tell it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from kvtier.cluster.directory.core import DirectoryCore
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.routing.fleet import Fleet, Load
from kvtier.cluster.routing.router import Choice, Policy, Speed, choose
from kvtier.cluster.routing.router import Costs as RoutingCosts
from kvtier.lab.replay.chain_upper import Upper
from kvtier.lab.simulation.node import SimNode
from kvtier.lab.simulation.parts import PAGE_TOKENS, ROOT, Agenda, Hardware, NodeSizes, Pull
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Costs, Kind, PolicySettings, Use
from kvtier.tier.protocol.kv_events import KEY_BYTES, Batch, Feed, Reply, Source
from kvtier.tier.protocol.messages import WriteMode

COSTS = Costs(
    20e-3, 64.0
)  # of a page of 512 tokens of an 8 B model, as in src/kvtier/lab/replay/chain_tiers.py
NODE_TIERS = (TierName.PEER, TierName.HOST, TierName.SSD)
POLL_S = 0.1  # between two looks at what a source has to tell
TELL_S = 0.02  # until a batch is there


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `pages` are numbers of whole pages, head first; `parent` is the request that it continues, if any."""

    arrival_s: float
    pages: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How a cluster is made, and how fast it is."""

    workers: int
    workers_per_node: int = 8
    l1_pages: int = 256  # of a worker; tiers of its node, by worker of a node
    l3_pages: int = 320
    l4_pages: int = 1920
    policy: PolicySettings = PolicySettings()  # noqa: RUF009  frozen
    write: WriteMode = "through"
    hardware: Hardware = Hardware()  # noqa: RUF009  frozen
    costs: Costs = COSTS
    token_s: float = 15e-3  # between two tokens of an answer
    decode_s: float = 0.3e-3  # of a worker's time that a token takes, in a batch
    least_prefill: float = 0.25  # of a worker's time that is left to prompts, however many answers it gives
    think_s: float = 1.0  # at least, between an answer and what continues it


class Directory(Protocol):
    """What a simulation needs of a DirectoryCore; a benchmark puts one between that takes the time."""

    def publish(self, batch: Batch, now: float) -> Reply: ...

    def lookup(self, keys: bytes, now: float) -> list[Held]: ...


class Chooser(Protocol):
    """routing.choose."""

    def __call__(
        self,
        prompt_tokens: int,
        page_tokens: int,
        fleet: Fleet,
        held: Iterable[Held],
        costs: RoutingCosts,
        policy: Policy,
    ) -> Choice: ...


@dataclass(slots=True, eq=False)
class Job:
    """A request at a worker. `hits` are its pages by the tier that had them."""

    number: int
    request: SimRequest
    keys: list[bytes]
    worker: SimWorker
    arrived_s: float
    expected_tokens: int = 0  # as the gateway thinks it will compute
    hits: dict[str, int] = field(default_factory=dict)
    cached: int = 0  # pages
    begun_s: float = 0.0
    first_token_s: float | None = None


@dataclass(slots=True, eq=False)
class SimWorker:
    """A worker's queue: prompts one behind the other, while the answers under way take their share."""

    number: int
    node: SimNode
    place: int  # among the node's workers
    l1: Upper
    load: Load
    feed: Feed
    queue: deque[Job] = field(default_factory=deque)
    head: Job | None = None
    work_s: float = 0.0  # of the head that is left
    since_s: float = 0.0
    decoding: int = 0
    version: int = 0  # of the head's expected end
    busy_s: float = 0.0  # that prompts took, alone on the worker


class Simulation:
    """Owned by its caller. `run` plays all requests; `jobs` are then in the order of their arrivals."""

    def __init__(
        self,
        shape: Shape,
        requests: Sequence[SimRequest],
        routing: Policy,
        *,
        directory: Directory | None = None,
        chooser: Chooser = choose,
    ) -> None:
        self.shape = shape
        self.jobs: list[Job] = []
        self.agenda = Agenda()
        self.directory: Directory = DirectoryCore(max_sources=1 << 14) if directory is None else directory
        self._requests = requests
        self._routing: Policy = routing
        self._choose = chooser
        self._parents: dict[bytes, bytes] = {}
        self._keys: dict[int, bytes] = {}
        self._places: dict[
            int, tuple[bytes, bytes, int]
        ] = {}  # key, the parent's, depth; where pages are demoted
        self._children: dict[int, list[int]] = {}
        self._over = 0  # requests
        self._choices = 0
        self._fleet = Fleet()
        hardware, page_s = shape.hardware, shape.costs.page_s
        self._speed = Speed(
            RoutingCosts(
                token_s=page_s / PAGE_TOKENS,
                l3_page_s=hardware.l3_s,
                l4_page_s=hardware.l4_s,
                remote_page_s=hardware.remote_s,
                remote_s=hardware.remote_first_s,
            )
        )
        self._feeds: list[Feed] = []
        self.nodes: dict[str, SimNode] = {}
        self.workers: list[SimWorker] = []
        while len(self.workers) < shape.workers:
            self._add_node(min(shape.workers_per_node, shape.workers - len(self.workers)))

    def _add_node(self, workers: int) -> None:
        shape, node_id = self.shape, f"n{len(self.nodes)}"
        feed = self._feed(Source(f"node:{node_id}", "1", node_id, "", f"{node_id}:1"), NODE_TIERS)
        node = self.nodes[node_id] = SimNode(
            node_id,
            self.agenda,
            NodeSizes(workers * shape.l3_pages, workers * shape.l4_pages),
            workers,
            shape.policy,
            write=shape.write,
            hardware=shape.hardware,
            costs=shape.costs,
            peers=self._node,
            parents=self._parents,
            holds=feed.note,
        )
        for place in range(workers):
            number = len(self.workers)
            name = f"w{number}"
            source = Source(f"worker:{name}", "1", node_id, name, f"{node_id}:1")
            self.workers.append(
                SimWorker(
                    number,
                    node,
                    place,
                    Upper(shape.policy, [shape.l1_pages], 0, shape.costs),
                    self._fleet.add(name, node_id),
                    self._feed(source, (TierName.HBM,)),
                )
            )

    def _node(self, node_id: str) -> SimNode | None:
        return self.nodes.get(node_id)

    def run(self, tick: Callable[[int], None] = lambda done: None) -> None:
        """Until all requests are over; `tick` hears how many are."""
        for number, request in enumerate(self._requests):
            if request.parent is None:
                self._come(number, request.arrival_s)
            else:
                assert request.parent < number, "a request continues an earlier one"
                self._children.setdefault(request.parent, []).append(number)
        told = 0
        while self._over < len(self._requests) and self.agenda.step():
            if self._over > told:
                told = self._over
                tick(told)
        assert self._over == len(self._requests), "requests that never end"

    # ---- the gateway -----------------------------------------------------------------------------------------------

    def _come(self, number: int, when: float) -> None:
        self.agenda.at(when, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        request, now = self._requests[number], self.agenda.now
        keys = [self._key(page) for page in request.pages]
        held = self.directory.lookup(b"".join(key[:KEY_BYTES] for key in keys), now) if keys else []
        choice = self._choose(
            request.input_tokens,
            PAGE_TOKENS,
            self._fleet,
            held,
            self._speed.costs,
            self._routing,
        )
        worker = self.workers[int(choice.worker_id[1:])]
        self._choices += 1
        worker.load.chosen = self._choices
        worker.load.queued_tokens += choice.computed_tokens
        worker.load.sequences += 1
        job = Job(number, request, keys, worker, now, choice.computed_tokens)
        self.jobs.append(job)
        own = worker.l1.prefix(0, request.pages)
        worker.node.pull(
            f"r{number}", worker.place, keys, own, choice.remotes, lambda pull: self._pulled(job, own, pull)
        )

    def _key(self, page: int) -> bytes:
        key = self._keys.get(page)
        if key is None:
            key = self._keys[page] = blake2b(page.to_bytes(8, "little"), digest_size=32).digest()
        return key

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _pulled(self, job: Job, own: int, pull: Pull) -> None:
        job.hits = {"L1": own, **pull.hits()}
        job.cached = own + sum(count for tier, count in job.hits.items() if tier != "L1")
        job.worker.queue.append(job)
        if job.worker.head is None:
            self._next(job.worker)

    def _next(self, worker: SimWorker) -> None:
        if worker.queue:
            worker.head = worker.queue.popleft()
            self._begin(worker, worker.head)
            self._foretell(worker)

    def _foretell(self, worker: SimWorker) -> None:
        """When the head will be computed, if nothing changes; what was foretold before doesn't count any more."""
        worker.version += 1
        version, worker.since_s = worker.version, self.agenda.now
        end = self.agenda.now + worker.work_s / self._share(worker)
        self.agenda.at(end, lambda: self._computed(worker, version))

    def _share(self, worker: SimWorker) -> float:
        """Of a worker's time that its prompts get."""
        answers = worker.decoding * self.shape.decode_s / self.shape.token_s
        return max(self.shape.least_prefill, 1.0 - answers)

    def _begin(self, worker: SimWorker, job: Job) -> None:
        """Its pages may have come to L1 by another request's work while it waited."""
        own = worker.l1.prefix(0, job.request.pages)
        if own > job.cached:
            job.hits["L1"] = job.hits.get("L1", 0) + own - job.cached
            job.cached = own
        job.begun_s = self.agenda.now
        worker.work_s = self._compute_s(job)
        worker.busy_s += worker.work_s

    def _compute_s(self, job: Job) -> float:
        """Of the tokens behind the cached pages, one at least."""
        end = job.request.input_tokens / PAGE_TOKENS
        pages = max(1 / PAGE_TOKENS, end - job.cached)
        return pages * self.shape.costs.recompute_s(max(0.0, end - pages / 2))

    def _computed(self, worker: SimWorker, version: int) -> None:
        job = worker.head
        if version != worker.version or job is None:
            return
        now = job.first_token_s = self.agenda.now
        worker.head = None
        computed = max(1, job.request.input_tokens - PAGE_TOKENS * job.cached)
        worker.load.queued_tokens -= job.expected_tokens
        self._speed.measure(computed, now - job.begun_s)
        self._keep(worker, job)
        worker.decoding += 1
        self._next(worker)
        answer_s = job.request.output_tokens * self.shape.token_s
        self.agenda.at(now + answer_s, lambda: self._end(worker, job))

    def _keep(self, worker: SimWorker, job: Job) -> None:
        """The prompt's pages are in L1, and go below as the node saves them."""
        ids, now = job.request.pages, self.agenda.now
        if not ids:
            return
        own = worker.l1.prefix(0, ids)
        worker.l1.use(0, ids, self._use(job), now)
        worker.feed.note(TierName.HBM, job.keys[own:], ())
        gone, _ = worker.l1.lower(0, now)
        worker.feed.note(TierName.HBM, (), [self._key(page) for page in gone])
        before = [ROOT, *job.keys[:-1]]
        pages = list(zip(job.keys, before, range(len(ids)), strict=True))
        if self.shape.write == "through":
            worker.node.save(worker.place, pages[job.cached :])
        else:
            self._places.update(zip(ids, pages, strict=True))
            worker.node.save(worker.place, [self._places[page] for page in gone])

    def _use(self, job: Job) -> Use:
        pages = len(job.request.pages)
        return Use(pages, pages - min(pages, job.cached), job.request.output_tokens, Kind.UNKNOWN)

    def _end(self, worker: SimWorker, job: Job) -> None:
        if worker.head is not None:
            worker.work_s -= (self.agenda.now - worker.since_s) * self._share(worker)
        worker.decoding -= 1
        worker.load.sequences -= 1
        if worker.head is not None:
            self._foretell(worker)
        if job.keys:
            seconds = self.agenda.now - job.arrived_s
            worker.node.finished(f"r{job.number}", worker.place, job.keys, self._use(job), seconds)
        self._over += 1
        for number in self._children.pop(job.number, ()):
            self._come(number, max(self._requests[number].arrival_s, self.agenda.now + self.shape.think_s))

    # ---- what the directory hears ----------------------------------------------------------------------------------

    def _feed(self, source: Source, tiers: tuple[TierName, ...]) -> Feed:
        feed = Feed(source, tiers)
        self._feeds.append(feed)
        self.agenda.at(POLL_S * len(self._feeds) / 7 % POLL_S, lambda: self._poll(feed))
        feed.announce_snapshot()
        feed.begin_snapshot({})
        return feed

    def _poll(self, feed: Feed) -> None:
        batch = feed.take(self.agenda.now)
        if batch is None:
            self.agenda.at(self.agenda.now + POLL_S, lambda: self._poll(feed))
        else:
            self.agenda.at(self.agenda.now + TELL_S, lambda: self._tell(feed, batch))

    def _tell(self, feed: Feed, batch: Batch) -> None:
        reply = self.directory.publish(batch, self.agenda.now)
        feed.answered(reply)
        assert reply == "ok", "no batch is lost here, and no lease ends"
        self._poll(feed)
