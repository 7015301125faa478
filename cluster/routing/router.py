"""Chooses the worker of a request: the one that is expected to give its first token soonest. Pure.

A worker's time to a request's first token is the time to compute what is queued there and what of the prompt it finds
nowhere, and to load what it does find: its own L1 costs nothing, the tiers of its node little, another node's more. So a
conversation stays where its pages are, until the queue there costs more than computing them again elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtier.cluster.directory.locations import Held
from kvtier.cluster.routing.fleet import Fleet, IntArray, Load

Policy = Literal["prefix", "least_loaded", "round_robin"]

FloatArray = npt.NDArray[np.float64]

MAX_REMOTES = 3  # holders that a worker's node is told of; the second is for where the first doesn't answer
FORGET = 0.9  # of what was measured, at each new measurement: about ten count
NODE_TIERS = ("L2", "L3", "L4")  # of a node, the cheapest first
_PLACES = {tier: place for place, tier in enumerate(NODE_TIERS, 1)}  # 0 is that of its workers' L1
_Found = tuple[
    tuple[int, ...], tuple[int, int]
]  # pages in the tiers of one's node; those that the best other node can send, and how many of them lie below its L1


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
    pages: list[int] = field(default_factory=lambda: [0] * (1 + len(NODE_TIERS)))  # by place
    address: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        """Of those that can send: pages that its exchange can send, some once a worker has saved them; and of these, those
        that are below L1 already. Negative, so that the best comes first.
        """
        below = max(self.pages[1:])
        return -max(below, self.pages[0]), -below


class _Reach:
    """Who holds how much of one prompt, by worker and by node."""

    def __init__(
        self, prompt_tokens: int, page_tokens: int, fleet: Fleet, held: Iterable[Held], costs: Costs
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._page_tokens = page_tokens
        self._fleet = fleet
        self._costs = costs
        self._own: dict[int, int] = {}  # pages in L1, by the worker's row
        self._nodes: dict[str, _Node] = {}  # that have any
        self._read(held)
        self._senders = sorted((*node.rank, name) for name, node in self._nodes.items() if node.address)
        while self._senders and not self._senders[-1][0]:
            self._senders.pop()  # it is said to hold no page
        most = [(-reach, -below) for reach, below, _ in self._senders[:2]] + [(0, 0)] * 2
        best = self._senders[0][2] if self._senders else ""
        # What is found at a node, by number: pages in its tiers, and those that the best other node can send. Many are
        # alike, and 0 is that of nodes that have nothing.
        found: dict[_Found, int] = {((0,) * len(NODE_TIERS), most[0]): 0}
        self._found = {
            name: found.setdefault((tuple(node.pages[1:]), most[name == best]), len(found))
            for name, node in self._nodes.items()
        }
        self._kinds = list(found)

    def _read(self, held: Iterable[Held]) -> None:
        """Often hundreds: all has the first page of a common prompt."""
        nodes, own, rows = self._nodes, self._own, self._fleet.row_numbers
        for node_id, worker_id, tier, address, pages in held:
            if worker_id:
                row, place = rows.get(worker_id), 0
                if row is None or pages <= own.get(row, 0):
                    continue
                own[row] = pages
            elif tier in _PLACES:
                place = _PLACES[tier]
            else:
                continue
            node = nodes.get(node_id)
            if node is None:
                node = nodes[node_id] = _Node()
            node.address = address or node.address
            if pages > (known := node.pages)[place]:
                known[place] = pages

    def soonest(self, rows: IntArray) -> int:
        """Of these rows, the one where the first token is expected soonest."""
        costs = self._costs
        queued, sequences = self._fleet.counts[:2, rows]
        load_s, compute_s = self._plan_seconds(rows)
        compute_s = compute_s + queued * costs.token_s
        sequence_s = costs.sequence_tokens * costs.token_s
        seconds = load_s + compute_s * (1.0 + sequences * costs.sequence_share) + sequences * sequence_s
        return _turn(self._fleet, rows[seconds == seconds.min()])

    def _plan_seconds(self, rows: IntArray) -> FloatArray:
        """To load, and to compute, what a request needs at each worker: [2, rows].

        Workers that find as much are all alike: planned once.
        """
        fleet, numbers, kinds = self._fleet, self._fleet.node_numbers, len(self._kinds)
        by_node = np.zeros(1 + len(numbers), np.int64)
        for name, found in self._found.items():
            by_node[numbers.get(name, 0)] = found
        by_node[0] = 0  # that of nodes without workers, whom nothing asks about
        alike = by_node[fleet.nodes]
        own_pages = np.fromiter(self._own.values(), np.int64, len(self._own))
        alike[np.fromiter(self._own, np.int64, len(self._own))] += kinds * own_pages
        alike = alike[rows]
        is_there = np.zeros(kinds * (1 + int(own_pages.max(initial=0))), np.bool_)
        is_there[alike] = True
        seconds = np.empty((2, len(is_there)))
        token_s = self._costs.token_s
        for number in np.flatnonzero(is_there).tolist():
            plan = self._plan(*divmod(number, kinds))
            seconds[:, number] = plan.load_s, plan.computed_tokens * token_s
        return seconds[:, alike]

    def _plan(self, own: int, found: int) -> _Plan:
        """Of a worker that has `own` pages, at a node of this kind."""
        costs, (tiers, elsewhere) = self._costs, self._kinds[found]
        page_s = costs.token_s * self._page_tokens  # to compute it
        at, seconds = own, 0.0
        for tier, held in zip(NODE_TIERS, tiers, strict=True):
            pages, each = held - at, costs.page_s(tier)
            if pages > 0 and each < page_s:
                at, seconds = at + pages, seconds + pages * each
        reach, below = elsewhere
        pages, unsaved = reach - at, max(0, reach - max(at, below))
        transfer_s = costs.remote_s + pages * costs.remote_page_s + unsaved * costs.l3_page_s
        if pages > 0 and transfer_s < pages * page_s:
            at, seconds = at + pages, seconds + transfer_s
        # The last token is always computed: the answer begins with what follows it.
        return _Plan(seconds, max(1, self._prompt_tokens - at * self._page_tokens))

    def choice(self, best: Load) -> Choice:
        """This worker."""
        own = self._own.get(best.row, 0)
        plan = self._plan(own, self._found.get(best.node_id, 0))
        return Choice(best.worker_id, self._remotes(best.node_id, own), plan.computed_tokens)

    def _remotes(self, node_id: str, own: int) -> tuple[tuple[str, str, int], ...]:
        """Other nodes that can send more than this one has below L1, or its worker itself."""
        node = self._nodes.get(node_id)
        here = max([own, *node.pages[1:]] if node else [own])
        others = [
            (name, self._nodes[name].address, -reach)
            for reach, _, name in self._senders
            if name != node_id and -reach > here
        ]
        return tuple(others[:MAX_REMOTES])


def choose(
    prompt_tokens: int,
    page_tokens: int,
    fleet: Fleet,
    held: Iterable[Held],
    costs: Costs,
    policy: Policy = "prefix",
    rows: IntArray | None = None,
) -> Choice:
    """The worker for a prompt of so many tokens, of which `held` says who has how much. Raises ValueError without workers.

    Of workers that are equally good, the one with the fewest sequences, then the one that was chosen longest ago. `rows`
    are those that may be chosen, by default all. A thousand are gone through in a fraction of a millisecond.
    """
    rows = fleet.rows if rows is None else rows
    if not len(rows):
        raise ValueError("there is no worker to choose")
    reach = _Reach(prompt_tokens, page_tokens, fleet, held, costs)
    match policy:
        case "prefix":
            best = reach.soonest(rows)
        case "least_loaded":
            queued = fleet.counts[0, rows]
            best = _turn(fleet, rows[queued == queued.min()])
        case "round_robin":
            best = int(rows[fleet.counts[2, rows].argmin()])
    return reach.choice(fleet[best])


def _turn(fleet: Fleet, rows: IntArray) -> int:
    """Who of equally good workers comes first."""
    if len(rows) > 1:
        sequences = fleet.counts[1, rows]
        rows = rows[sequences == sequences.min()]
    return int(rows[fleet.counts[2, rows].argmin()])
