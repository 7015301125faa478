"""Weighs what a Locate's pages cost from L4, from other nodes and by computing them, and takes the cheapest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from kvtier.tier.node.lookup import Hit, Lookup, Sources
from kvtier.tier.node.remote.sources import L4, Compute, Plan, Prices, Refused, Run, Way, cheapest
from kvtier.tier.node.state.fetches import Peer
from kvtier.tier.node.state.in_flight import InFlight
from kvtier.tier.node.state.peer_frames import PeerFrames
from kvtier.tier.node.state.records import Page, Worker
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.protocol.messages import Locate, Missing, Remote

MAX_SOURCES = 4  # nodes that one Locate weighs; hints name the best first, and a few are enough
COPIED_LAST_BYTES = (
    2 * 2**20
)  # that are copied to L1 behind all loads: what comes at once, a frame of a transfer
LATE = "this node's exchange is stalled: it owes an answer"


@dataclass(slots=True)
class _Offers:
    """What other nodes may give to one Locate. Way n is that of node n - 1 of `peers`, for new pages one of `remotes`."""

    remotes: list[Remote] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    refusal: tuple[str, str] | None = None  # why one that was hinted at isn't asked

    def having(self, page: int) -> tuple[int, ...]:
        """The ways by which a page may be had."""
        return tuple(number for number, remote in enumerate(self.remotes, L4 + 1) if remote.pages > page)


@dataclass(frozen=True, slots=True)
class _Row:
    """A chain's pages behind page `first`, cut into runs, as far as they can be had; `stop` says why not further."""

    first: int
    pages: list[Page | bool]
    runs: list[Run]
    stop: tuple[str, str] | None = None

    @property
    def end(self) -> int:
        """The page behind the last of them."""
        return self.runs[-1].end if self.runs else self.first


class Pricing:
    """Chooses where the pages of a lookup come from, by what was measured."""

    def __init__(self, tables: NodeTables, in_flight: InFlight, frames: PeerFrames) -> None:
        self._tables, self._in_flight, self._frames = tables, in_flight, frames

    def cheapest(self, worker: Worker, message: Locate, lookup: Lookup) -> tuple[Hit, Missing | None]:
        """The prefix of a simple chain that is there soonest; why it is no longer, unless nothing has more."""
        first, offers = message.first_page, self._offers(worker, message, lookup)
        row = self._row(worker, message, lookup, offers)
        compute = compute_of(message)
        payload_bytes = self._payload_bytes(worker, message, row)
        prices = Prices(
            self._ways(offers, payload_bytes),
            compute,
            self._in_flight.copy_time.byte_s * payload_bytes,
            max(1, COPIED_LAST_BYTES // max(1, payload_bytes)),
            self._tables.limits.fetch_queue - self._in_flight.fetches.queued,
            message.patience_s or inf,
            message.busy_s,
        )
        plan = cheapest(first, lookup.end, row.runs, prices)
        hit, why = self._hit(worker, row, plan, offers), row.stop
        if plan.refused is not None:
            self._try_one(hit, worker, row, offers, compute)
        if plan.refused is not None and hit.pages < row.end:
            why = "costlier", self._why_costlier(plan.refused, offers)
        elif plan.is_full:
            why = (
                "no_room",
                f"{self._in_flight.fetches.queued} pages wait to be fetched from other nodes already",
            )
        elif why is None and hit.pages < lookup.end:
            why = offers.refusal
        return hit, None if why is None else Missing(hit.pages, *why)

    # ---- who has what ----------------------------------------------------------------------------------------------

    def _offers(self, worker: Worker, message: Locate, lookup: Lookup) -> _Offers:
        """The nodes that a Locate may have pages fetched from."""
        offers = _Offers()
        is_known = message.chains[0].spec_digest in worker.hello.payloads
        if self._tables.exchange is None or worker.is_exchange or not is_known:
            return offers
        for remote in message.remotes:
            if remote.node_id == self._tables.node_id or remote.pages <= message.first_page:
                continue
            if len(offers.remotes) == MAX_SOURCES or remote.node_id in (r.node_id for r in offers.remotes):
                continue
            if self.is_exchange_late():
                offers.refusal = "deadline", LATE
                return offers
            peer = self._in_flight.fetches.peer(remote.node_id, keep=offers.peers)
            if peer is None:
                offers.refusal = (
                    "no_room",
                    f"{self._tables.limits.peers} nodes are being fetched from already",
                )
                continue
            offers.remotes.append(remote)
            offers.peers.append(peer)
        return offers

    def is_exchange_late(self) -> bool:
        """It should have ended one of its fetches by now, whether anything waits for it or not."""
        return any(
            self._tables.now > fetch.late_at and fetch.exchange is self._tables.exchange
            for fetch in self._in_flight.fetches.running.values()
        )

    def _row(self, worker: Worker, message: Locate, lookup: Lookup, offers: _Offers) -> _Row:
        chain, first = message.chains[0], message.first_page
        coming, names = (
            self._in_flight.fetches.coming,
            {peer.node_id: n for n, peer in enumerate(offers.peers, L4 + 1)},
        )
        reach = max((remote.pages for remote in offers.remotes), default=0)
        pages = lookup.row(reach)
        runs: list[Run] = []
        changes = sorted({remote.pages for remote in offers.remotes}, reverse=True)
        having = offers.having(first)
        for at, page in enumerate(pages, first):
            while changes and at >= changes[-1]:
                changes.pop()
                having = offers.having(at)
            ways, is_coming = (() if page else having), False
            if not isinstance(page, bool) and not self._is_resident(worker, page):
                is_coming = page.load is not None
                ways = (L4,) if is_coming else (L4, *having)
            load = None
            if ways and not is_coming and not worker.is_exchange:  # two nodes would wait for each other
                load = coming.get((chain.keys[at - first], chain.variant))
            if load is not None:
                if (load.tenant, load.spec_digest) != (message.tenant, chain.spec_digest):
                    why = "identity_differs", "a page of this key comes for another tenant or shape"
                    return _Row(first, pages[: at - first], runs, why)
                if load.node_id not in names:
                    names[load.node_id] = L4 + 1 + len(offers.peers)
                    offers.peers.append(self._in_flight.fetches.peers[load.node_id])
                ways, is_coming = (names[load.node_id],), True
            if runs and (runs[-1].ways, runs[-1].is_coming) == (ways, is_coming):
                runs[-1] = Run(at + 1, ways, is_coming)
            else:
                runs.append(Run(at + 1, ways, is_coming))
        return _Row(first, pages, runs)

    def _payload_bytes(self, worker: Worker, message: Locate, row: _Row) -> int:
        """Of a page of the chain."""
        here = next((page.envelope.payload_bytes for page in row.pages if not isinstance(page, bool)), 0)
        return worker.hello.payloads.get(message.chains[0].spec_digest, here)

    # ---- what it takes ---------------------------------------------------------------------------------------------

    def _ways(self, offers: _Offers, payload_bytes: int) -> list[Way]:
        """L4, then the nodes, behind what is asked of each already."""
        bytes_s = self._in_flight.bandwidth.at(self._tables.now)
        ways = [Way(self._bytes_ahead() / bytes_s, payload_bytes / bytes_s)]
        for peer in offers.peers:
            start_s = peer.speed.load_s(peer.ahead_bytes)
            ways.append(Way(start_s, payload_bytes * peer.speed.byte_s, peer.is_doubtful(self._tables.now)))
        return ways

    def _bytes_ahead(self) -> int:
        """Payloads that are to be read from L4 before what is asked for now."""
        return self._in_flight.queued_bytes + sum(
            load.page.envelope.payload_bytes for load in self._in_flight.reads.values()
        )

    def costlier(self, pages: Sequence[Page], compute_s: float) -> str | None:
        """Whether loading pages from L4 takes longer than computing, in a sentence; else None."""
        nbytes = sum(page.envelope.payload_bytes for page in pages if page.load is None)
        load_s = (self._bytes_ahead() + nbytes) / self._in_flight.bandwidth.at(self._tables.now)
        return None if load_s <= compute_s else self._slow_l4(load_s, compute_s)

    def _slow_l4(self, load_s: float, compute_s: float) -> str:
        ahead = len(self._in_flight.queue) + len(self._in_flight.reads)
        return (
            f"loading from L4 would take {load_s * 1e3:.1f} ms ({ahead} pages ahead), "
            f"computing {compute_s * 1e3:.1f} ms"
        )

    def _why_costlier(self, refused: Refused, offers: _Offers) -> str:
        if refused.is_late:
            return f"loading more would take {refused.load_s * 1e3:.1f} ms, longer than the worker waits for"
        if refused.way == L4:
            return self._slow_l4(refused.load_s, refused.compute_s)
        peer = offers.peers[refused.way - L4 - 1]
        return (
            f"fetching from node {peer.node_id} would take {refused.load_s * 1e3:.1f} ms "
            f"({peer.ahead_bytes} bytes ahead), computing {refused.compute_s * 1e3:.1f} ms"
        )

    # ---- what is taken ---------------------------------------------------------------------------------------------

    def _hit(self, worker: Worker, row: _Row, plan: Plan, offers: _Offers) -> Hit:
        """The pages of a plan, each by its way."""
        hit = Hit(row.first, [])
        for run, way in zip(row.runs, plan.choices, strict=False):
            self._extend(hit, worker, row, min(run.end, plan.end), way, offers)
        return hit

    def _extend(
        self, hit: Hit, worker: Worker, row: _Row, end: int, way: int | None, offers: _Offers
    ) -> None:
        """Add the pages before `end` to a hit: what isn't in L3, or on its way there, comes by `way`."""
        for at in range(hit.pages, end):
            page = row.pages[at - row.first]
            if isinstance(page, Page) and (way in (None, L4) or page.load or self._is_resident(worker, page)):
                hit.needed.append(((0, at), page))
            elif page is not True:
                assert way is not None
                hit.fetched.append(((0, at), _sources(offers, way, at)))
        hit.pages = end

    def _is_resident(self, worker: Worker, page: Page) -> bool:
        """It is in L3, or in L2 where this worker can read it."""
        return page.host is not None or self._frames.copy_for(worker, page) is not None

    def _try_one(self, hit: Hit, worker: Worker, row: _Row, offers: _Offers, compute: Compute) -> None:
        """Add one Fetch of a node, whatever that takes, where nothing else tells how fast the node is."""
        most = min(
            self._tables.limits.fetch_pages, self._tables.limits.fetch_queue - self._in_flight.fetches.queued
        )
        for way, (remote, peer) in enumerate(zip(offers.remotes, offers.peers, strict=False), L4 + 1):
            end = min(remote.pages, row.end, hit.pages + most)
            compute_s = compute.between(hit.pages, end)
            if end > hit.pages and peer.is_idle and peer.speed.may_try(compute_s, self._tables.now):
                peer.speed.tries(self._tables.now)
                self._extend(hit, worker, row, end, way, offers)
                return


def compute_of(message: Locate) -> Compute:
    """What computing the pages of a Locate takes."""
    mid = message.first_page + 0.5 * len(message.chains[0].keys)
    return Compute.at(message.recompute_s, mid, message.double_pages)


def _sources(offers: _Offers, way: int, page: int) -> Sources:
    """The nodes that a page may be fetched from, that of the way first. A page that comes already needs none."""
    ways = [number for number in offers.having(page) if number != way]
    first = [way] if way <= len(offers.remotes) else []
    return tuple(offers.remotes[number - L4 - 1] for number in (*first, *ways))
