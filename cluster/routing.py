"""Chooses the worker of a request: the one that is expected to give its first token soonest. Pure.

A worker's time to a request's first token is the time to compute what is queued there and what of the prompt it finds
nowhere, and to load what it does find: its own L1 costs nothing, the tiers of its node little, another node's more. So a
conversation stays where its pages are, until the queue there costs more than computing them anew elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Policy = Literal["prefix", "least_loaded", "round_robin"]

MAX_REMOTES = 3  # holders that a worker's node is told of; the second is for where the first doesn't answer
FORGET = 0.9  # of what was measured, at each new measurement: about ten count
NODE_TIERS = ("L2", "L3", "L4")  # of a node, the cheapest first


@dataclass(frozen=True, slots=True)
class Held:
    """A holder's longest prefix of a prompt: `pages` pages in a tier of a node, or in the L1 of one of its workers.

    `worker_id` is "" for the node's own tiers; `address` is the HOST:PORT of the node's exchange, "" where there is none.
    """

    node_id: str
    worker_id: str
    tier: str
    address: str
    pages: int


@dataclass(slots=True)
class Load:
    """What a worker has to do, as far as the gateway knows. Owned by the gateway."""

    queued_tokens: int = 0  # prompt tokens sent there that are yet to be computed, as was expected
    sequences: int = 0  # in flight


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that may be chosen. `chosen` is the number of the last choice that fell on it."""

    worker_id: str
    node_id: str
    load: Load
    chosen: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that things take. The first guesses are a CPU's; what is measured replaces them."""

    token_s: float = 1e-3  # to compute a prompt token
    l2_page_s: float = 1e-5
    l3_page_s: float = 2e-5
    l4_page_s: float = 5e-5
    remote_page_s: float = 2e-4
    remote_s: float = 2e-3  # before a transfer's first page
    # What a running sequence weighs, in queued tokens: more evens out the number of sequences, less keeps them warm.
    sequence_tokens: float = 8.0
    # The share of a worker's time that it takes from prompts, as routing sees it. Without it new conversations gather
    # where the first ones left the system prompt, past workers that are idle. In bench/routing.py a sequence takes 0.02, and
    # 0.05 does best: what is queued is only roughly known, so idle workers are worth more than they seem.
    sequence_share: float = 0.05

    @classmethod
    def of_pages(cls, page_bytes: int) -> Costs:
        """Guesses for pages of this size: bytes per second of shared memory, of an SSD, of a network."""
        return cls(
            l2_page_s=page_bytes / 10e9,
            l3_page_s=page_bytes / 5e9,
            l4_page_s=page_bytes / 2e9,
            remote_page_s=page_bytes / 1e9,
        )

    def page_s(self, tier: str) -> float:
        """To load a page from a tier of the worker's node."""
        return {"L2": self.l2_page_s, "L3": self.l3_page_s, "L4": self.l4_page_s}[tier]


class Speed:
    """Measures what a prompt token costs. Owned by the gateway."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._tokens = 0.0
        self._seconds = 0.0

    def measure(self, tokens: int, seconds: float) -> None:
        """A worker computed so many prompt tokens of one request in this time, whatever else it did meanwhile."""
        if tokens < 1 or seconds <= 0.0:
            return
        self._tokens = FORGET * self._tokens + tokens
        self._seconds = FORGET * self._seconds + seconds
        self.costs = replace(self.costs, token_s=self._seconds / self._tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker; who on other nodes holds more of the prompt than its node does, the best first; tokens it will compute."""

    worker_id: str
    remotes: tuple[tuple[str, str, int], ...]  # node, address of its exchange, pages
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a worker with so much of a prompt at hand gets the rest of it."""

    load_s: float
    computed_tokens: int


@dataclass(slots=True)
class _Node:
    tiers: dict[str, int] = field(default_factory=dict)  # pages, by tier
    below: int = 0  # pages in its own tiers, which its exchange can send
    address: str = ""


class _Reach:
    """Who holds how much of one prompt, by worker and by node."""

    def __init__(self, prompt_tokens: int, page_tokens: int, held: Iterable[Held], costs: Costs) -> None:
        self._prompt_tokens = prompt_tokens
        self._page_tokens = page_tokens
        self._costs = costs
        self._own: dict[str, int] = {}  # pages in L1, by worker
        self._nodes: dict[str, _Node] = {}  # that have any in their own tiers
        self._plans: dict[tuple[str, int], _Plan] = {}
        for one in held:  # often hundreds: everybody has the first page of a common prompt
            if one.worker_id:
                if one.pages > self._own.get(one.worker_id, 0):
                    self._own[one.worker_id] = one.pages
            elif one.tier in NODE_TIERS:
                self._add(one)
        self._senders = sorted(
            ((name, node) for name, node in self._nodes.items() if node.address and node.below),
            key=lambda pair: (-pair[1].below, pair[0]),
        )

    def _add(self, one: Held) -> None:
        node = self._nodes.get(one.node_id)
        if node is None:
            node = self._nodes[one.node_id] = _Node()
        node.address = one.address or node.address
        node.tiers[one.tier] = max(node.tiers.get(one.tier, 0), one.pages)
        node.below = max(node.below, one.pages)

    def plan(self, worker: WorkerView) -> _Plan:
        """Workers of a node that have as much of their own are all alike: planned once. So are nodes that have nothing."""
        own = self._own.get(worker.worker_id, 0)
        node_id = worker.node_id if worker.node_id in self._nodes else ""
        key = node_id, own
        if key not in self._plans:
            self._plans[key] = self._make_plan(worker.node_id, own)
        return self._plans[key]

    def soonest(self, workers: Sequence[WorkerView]) -> WorkerView:
        """Where the first token is expected soonest. Goes through a thousand workers in a fraction of a millisecond."""
        costs, own = self._costs, self._own
        token_s, sequence_s, share = (
            costs.token_s,
            costs.sequence_tokens * costs.token_s,
            costs.sequence_share,
        )
        plans: dict[tuple[str, int] | str, tuple[float, float]] = {}  # by node, and pages of their own
        best, best_s = workers[0], float("inf")
        for worker in workers:
            load, node_id = worker.load, worker.node_id
            key = (node_id, own[worker.worker_id]) if worker.worker_id in own else node_id
            known = plans.get(key)
            if known is None:
                plan = self.plan(worker)
                known = plans[key] = plan.computed_tokens * token_s, plan.load_s
            compute_s, load_s = known
            compute_s += load.queued_tokens * token_s
            seconds = load_s + compute_s * (1.0 + load.sequences * share) + load.sequences * sequence_s
            if seconds < best_s or (seconds == best_s and _turn(worker) < _turn(best)):
                best, best_s = worker, seconds
        return best

    def _make_plan(self, node_id: str, own: int) -> _Plan:
        costs, node = self._costs, self._nodes.get(node_id)
        page_s = costs.token_s * self._page_tokens  # to compute it
        at, seconds = own, 0.0
        for tier in NODE_TIERS if node else ():
            assert node is not None
            pages, each = node.tiers.get(tier, 0) - at, costs.page_s(tier)
            if pages > 0 and each < page_s:
                at, seconds = at + pages, seconds + pages * each
        pages = next((other.below for name, other in self._senders if name != node_id), 0) - at
        transfer_s = costs.remote_s + pages * costs.remote_page_s
        if pages > 0 and transfer_s < pages * page_s:
            at, seconds = at + pages, seconds + transfer_s
        # The last token is always computed: the answer begins with what follows it.
        return _Plan(seconds, max(1, self._prompt_tokens - at * self._page_tokens))

    def remotes(self, worker: WorkerView) -> tuple[tuple[str, str, int], ...]:
        """Other nodes that can send more than the worker's own has below L1 or the worker itself."""
        node = self._nodes.get(worker.node_id)
        own = self._own.get(worker.worker_id, 0)
        here = max(own, node.below if node else 0)
        others = [
            (name, other.address, other.below)
            for name, other in self._senders
            if name != worker.node_id and other.below > here
        ]
        return tuple(others[:MAX_REMOTES])


def choose(
    prompt_tokens: int,
    page_tokens: int,
    workers: Sequence[WorkerView],
    held: Iterable[Held],
    costs: Costs,
    policy: Policy = "prefix",
) -> Choice:
    """The worker for a prompt of so many tokens, of which `held` says who has how much. Raises ValueError without workers.

    Of workers that are equally good, the one with the fewest sequences, then the one that was chosen longest ago.
    """
    if not workers:
        raise ValueError("there is no worker to choose")
    reach = _Reach(prompt_tokens, page_tokens, held, costs)
    match policy:
        case "prefix":
            best = reach.soonest(workers)
        case "least_loaded":
            best = min(workers, key=lambda worker: (worker.load.queued_tokens, *_turn(worker)))
        case "round_robin":
            best = min(workers, key=lambda worker: worker.chosen)
    return Choice(best.worker_id, reach.remotes(best), reach.plan(best).computed_tokens)


def _turn(worker: WorkerView) -> tuple[int, int]:
    """Who of equally good workers comes first."""
    return worker.load.sequences, worker.chosen
