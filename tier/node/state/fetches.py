"""What is to come from other nodes: which pages, in what order they are asked for, and how fast each node is. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import exp, inf

from kvtier.tier.node.state.records import Limits, RemoteLoad, Worker
from kvtier.tier.protocol.events import PageId
from kvtier.tier.protocol.messages import Remote

WINDOW_SHARE = 8  # pages on their way from other nodes take at most one in so many of L3's slots
PEER_SHARE = 2  # ... and those from one node one in so many of these: a slow node leaves room to the others
LEAST_SCALE = 0.25  # a guess makes a node at most so much quicker than it was taken for
DOUBT_S = 10.0  # after a failure, or until pages come, a node is asked only for what no other has
DEADLINE_SHARE = 8  # a Fetch has as many pages as are expected in one part in so many of its deadline
PROBE_BYTES = 2**20  # may be on their way from a node of which nothing is known; one page always
STREAM_BYTES_S = (
    4 * 2**20
)  # a node has as many fetches at once as leave so much to each: exchanges have a floor


class PeerSpeed:
    """How long a node takes until its first page comes, and its bytes per second from then on. Owned by a Peer.

    Both are averages with more weight on the recent: one bad moment must not end all fetches. What wasn't measured for
    TRUSTED_S is taken for true until it is measured again, then for nothing; for that a single Fetch is tried that seems
    too dear. The bytes are those of all its fetches together, since they share what carries them.
    """

    PRIOR_LATENCY_S = 0.002
    PRIOR_BYTES_S = 1e9
    WINDOW_S = 0.005
    SHORT_S = 0.001  # the last window of a fetch tells something if it is so long
    BURST_SHARE = 16  # in one part in so many of the time to the first batch, more came together with it
    LONG_S = 0.25  # what breaks off after so long tells how slow it was
    BATCH_BYTES = 2 * 2**20  # may have come that nothing was told of
    TRUSTED_S = 60.0
    TRY_S = 10.0
    WEIGHT = 0.25  # of a new latency
    MEMORY_S = 1.0  # of transfers that the bytes per second are an average over, weighted by time: pages come in bursts

    def __init__(self) -> None:
        self._latency_s, self._bytes_s = self.PRIOR_LATENCY_S, self.PRIOR_BYTES_S
        self._latency_at: float | None = None
        self._bytes_at: float | None = None
        self._guessed_at: float | None = None
        self._sum_bytes = self._sum_s = 0.0  # of what was measured lately
        self._since = 0.0
        self._bytes = 0
        # Of what is under way: seconds until the first bytes, and those bytes; None before, and once they are used.
        self._first: tuple[float, int] | None = None
        self._is_first = True
        self._try_at = -inf

    def began(self, now: float) -> None:
        """A fetch begins, and nothing else is on its way."""
        self._use_first(now)
        self._since, self._bytes, self._first, self._is_first = now, 0, None, True

    def came(self, nbytes: int, now: float) -> None:
        """So many bytes are here."""
        if self._is_first:
            self._first, self._is_first = (now - self._since, nbytes), False
            self._since = now
            if self.is_known(now):
                self._use_first(now)
            else:
                self._guess(nbytes, self._first[0], now)
            return
        self._bytes += nbytes
        if now - self._since >= max(self.WINDOW_S, self._burst_s):
            self._end_window(now)

    def ended(self, now: float) -> None:
        """None of its fetches is under way any more."""
        if self._bytes and now - self._since >= max(self.SHORT_S, self._burst_s):
            self._end_window(now)
        self._use_first(now)

    def failed(self, now: float, *, was_slow: bool) -> None:
        """A fetch under way broke off: how long that took says what its first bytes take at least, or all of them."""
        elapsed, most = now - self._since, self._bytes + self.BATCH_BYTES
        expected = elapsed * self._bytes_s
        if was_slow and elapsed >= self.LONG_S and (most < expected or not self.is_known(now)):
            self._measure_bytes_s(min(most, expected), elapsed, now)
        if self._is_first and elapsed > self._latency_s:
            self._add_latency(elapsed, now)

    def waited(self, now: float) -> None:
        """What was to come was waited for at the other node: that time says nothing of how it sends."""
        if not self._is_first:
            self._since, self._bytes = now, 0

    def is_new(self, now: float) -> bool:
        """Nothing is known of its bytes per second, not even what one batch told."""
        return self._is_old(self._bytes_at, now) and self._is_old(self._guessed_at, now)

    def is_known(self, now: float) -> bool:
        """Its bytes per second have been measured lately."""
        return not self._is_old(self._bytes_at, now)

    def may_try(self, compute_s: float, now: float) -> bool:
        """Its bytes per second aren't known, and it is time to find out by one fetch, whatever is assumed of them.

        Not where it is known that it takes longer than computing until the first byte comes.
        """
        is_slow = not self._is_old(self._latency_at, now) and self._latency_s >= compute_s
        return self._is_old(self._bytes_at, now) and now >= self._try_at and not is_slow

    def tries(self, now: float) -> None:
        """That fetch goes out: the next one not before TRY_S have passed."""
        self._try_at = now + self.TRY_S

    def load_s(self, nbytes: int) -> float:
        """How long so many bytes will take."""
        return self._latency_s + nbytes * self.byte_s

    @property
    def byte_s(self) -> float:
        """How long one byte takes, once they come."""
        return 1.0 / self._bytes_s

    @property
    def _burst_s(self) -> float:
        """What the first window must be longer than, while nothing else tells how fast a node is."""
        return 0.0 if self._first is None else self._first[0] / self.BURST_SHARE

    def _guess(self, nbytes: int, seconds: float, now: float) -> None:
        """So much came at once. That is one number and not two: both are taken to be as much off as their sum is."""
        self._bytes_s /= max(LEAST_SCALE, seconds / self.load_s(nbytes))
        self._guessed_at = now

    def _end_window(self, now: float) -> None:
        elapsed = now - self._since
        self._measure_bytes_s(self._bytes, elapsed, now)
        self._since, self._bytes = now, 0
        self._use_first(now)

    def _use_first(self, now: float) -> None:
        """The bytes per second are known: what the first bytes took beyond these is the latency."""
        if self._first is not None:
            first_s, nbytes = self._first
            self._add_latency(first_s - nbytes / self._bytes_s, now)
            self._first = None

    def _measure_bytes_s(self, nbytes: float, seconds: float, now: float) -> None:
        keep = 0.0 if self._is_old(self._bytes_at, now) else exp(-seconds / self.MEMORY_S)
        self._sum_bytes = keep * self._sum_bytes + nbytes
        self._sum_s = keep * self._sum_s + seconds
        self._bytes_s = self._sum_bytes / self._sum_s
        self._bytes_at = now

    def _add_latency(self, measured_s: float, now: float) -> None:
        weight = 1.0 if self._is_old(self._latency_at, now) else self.WEIGHT
        self._latency_s += weight * (max(0.0, measured_s) - self._latency_s)
        self._latency_at = now

    def _is_old(self, at: float | None, now: float) -> bool:
        return at is None or now - at > self.TRUSTED_S


@dataclass(slots=True, eq=False)
class Peer:
    """Another node, as far as this one fetches from it."""

    node_id: str
    speed: PeerSpeed = field(default_factory=PeerSpeed)
    queue: dict[RemoteLoad, None] = field(default_factory=dict)
    ahead_bytes: int = 0  # payloads of what is queued or on its way
    running: int = 0  # fetches
    slot_bytes: int = 0  # of what is on its way
    is_failing: bool = False  # its last fetch broke off; said once
    failed_at: float = -inf  # when it did, unless pages have come since

    @property
    def is_idle(self) -> bool:
        """Nothing is to come from it."""
        return not (self.queue or self.running)

    def is_doubtful(self, now: float) -> bool:
        """What others have is rather fetched from these."""
        return now - self.failed_at < DOUBT_S


@dataclass(slots=True, eq=False)
class Running:
    """A Fetch in flight: the slots of `pages` are granted to `exchange` until each is Stored, or the Fetch is over."""

    fetch_id: int
    exchange: Worker
    peer: Peer
    pages: dict[PageId, RemoteLoad]
    late_at: float  # nothing waits for it any more from then on, whatever the exchange does
    is_cancelled: bool = False
    is_cleared: bool = False  # its tenant's pages were cleared since: none of it is taken in


class Fetches:
    """The loads from other nodes, queued by node, and the fetches in flight. Owned by CacheState.

    `coming` has at most one load of a page, queued or in flight; what is in flight and not in it is abandoned: its slot
    is bound still, and nothing waits for it. A queued load is waited for.
    """

    def __init__(self, limits: Limits, capacity_bytes: int) -> None:
        self.limits = limits
        self.max_slot_bytes = capacity_bytes // WINDOW_SHARE  # in flight; one page may always be
        self.coming: dict[PageId, RemoteLoad] = {}
        self.peers: dict[str, Peer] = {}
        self.running: dict[int, Running] = {}
        self.queued = 0
        self.slot_bytes = 0  # of the loads in flight
        self._doubtful: dict[Running, None] = {}  # lately lost something who waited

    @property
    def is_idle(self) -> bool:
        """Nothing is queued or in flight."""
        return not (self.queued or self.running)

    def peer(self, node_id: str, keep: Collection[Peer] = ()) -> Peer | None:
        """A node by its name; None when all that are remembered are busy or to be kept, and no more may be."""
        peer = self.peers.pop(node_id, None)
        if peer is None:
            if len(self.peers) >= self.limits.peers:
                idle = next(
                    (name for name, other in self.peers.items() if other.is_idle and other not in keep), None
                )
                if idle is None:
                    return None
                del self.peers[idle]
            peer = Peer(node_id)
        self.peers[node_id] = peer  # the latest last
        return peer

    # ---- the queue -----------------------------------------------------------------------------------------------

    def add(self, load: RemoteLoad) -> None:
        """Queue the load of a page that isn't coming; its peer is known."""
        assert load.id not in self.coming
        self.coming[load.id] = load
        peer = self.peers[load.node_id]
        peer.queue[load] = None
        peer.ahead_bytes += load.payload_bytes
        self.queued += 1

    def move(self, load: RemoteLoad, remote: Remote) -> None:
        """A load that failed, and is in no Fetch any more, is queued again, to another node that is known."""
        assert self.coming.pop(load.id) is load
        load.node_id, load.address = remote.node_id, remote.address
        load.fetch = load.grant = None
        self.add(load)

    def forget(self, page: PageId) -> RemoteLoad | None:
        """A page isn't to come any more, since it is here or won't come; its load, where there is one."""
        load = self.coming.pop(page, None)
        if load is not None and load.fetch is None:
            self._leave_queue(load)
            self.peers[load.node_id].ahead_bytes -= load.payload_bytes
        return load

    def unwanted(self, load: RemoteLoad) -> None:
        """Nothing waits for a load any more: a queued one is given up, one in flight goes on with those beside it."""
        if load.fetch is None:
            if self.coming.get(load.id) is load:
                self.forget(load.id)
        elif load.fetch in self.running:
            self._doubtful[self.running[load.fetch]] = None

    def take_unwanted(self) -> list[Running]:
        """Fetches that nothing waits for since this was asked last."""
        doubtful, self._doubtful = self._doubtful, {}
        return [
            fetch
            for fetch in doubtful
            if self.running.get(fetch.fetch_id) is fetch
            and not fetch.is_cancelled
            and not any(load.waiters for load in fetch.pages.values())
        ]

    def waiting(self) -> list[Peer]:
        """Nodes of which something is queued."""
        return [peer for peer in self.peers.values() if peer.queue] if self.queued else []

    def next_run(self, peer: Peer, now: float) -> list[RemoteLoad]:
        """What may be fetched from a node now, in one Fetch: pages that follow each other in one chain.

        A window that has filled up gives out no single pages: it waits until a good part of it is free.
        """
        if not peer.queue or len(self.running) >= self.limits.fetches:
            return []
        first, speed = next(iter(peer.queue)), peer.speed
        at_once = int(1.0 / (STREAM_BYTES_S * speed.byte_s))
        if peer.running >= min(self.limits.fetches_per_peer, max(2, at_once)):
            return []
        size, most = first.slot_bytes, self.max_slot_bytes // PEER_SHARE
        if speed.is_new(now):
            most = min(most, max(PROBE_BYTES, size))
        free = min(self.max_slot_bytes - self.slot_bytes, most - peer.slot_bytes) // size
        if not self.running:
            free = max(free, 1)
        if free <= 0:
            return []
        in_time = self.limits.fetch_deadline_s / (DEADLINE_SHARE * first.payload_bytes * speed.byte_s)
        run = _run(peer.queue, max(1, min(self.limits.fetch_pages, int(in_time))))
        return run[:free] if free >= min(len(run), max(1, most // size // 4)) else []

    def sizes_waited_for(self, now: float) -> set[int]:
        """Slot sizes of the pages that could be fetched now, if there were slots."""
        return {run[0].slot_bytes for peer in self.waiting() if (run := self.next_run(peer, now))}

    # ---- fetches ---------------------------------------------------------------------------------------------------

    def begin(self, fetch: Running, now: float) -> None:
        """A Fetch goes out; its loads have their grants and were the first of their queue."""
        if not fetch.peer.slot_bytes:
            fetch.peer.speed.began(now)
        fetch.peer.running += 1
        self.running[fetch.fetch_id] = fetch
        for load in fetch.pages.values():
            self._leave_queue(load)
            load.fetch = fetch.fetch_id
            self.slot_bytes += load.slot_bytes
            fetch.peer.slot_bytes += load.slot_bytes

    def end_page(self, load: RemoteLoad) -> None:
        """A page of a Fetch has come or won't; its slot is no longer the exchange's."""
        assert load.fetch is not None
        fetch = self.running[load.fetch]
        del fetch.pages[load.id]
        fetch.peer.ahead_bytes -= load.payload_bytes
        fetch.peer.slot_bytes -= load.slot_bytes
        self.slot_bytes -= load.slot_bytes

    def end(self, fetch: Running, now: float) -> None:
        """A Fetch is over, and so are all its pages."""
        assert not fetch.pages
        del self.running[fetch.fetch_id]
        fetch.peer.running -= 1
        if not fetch.peer.running:
            fetch.peer.speed.ended(now)
        self._doubtful.pop(fetch, None)

    def check(self) -> None:
        """Re-derive every counter; AssertionError names what doesn't hold."""
        queued = [load for peer in self.peers.values() for load in peer.queue]
        flying = [load for fetch in self.running.values() for load in fetch.pages.values()]
        assert len(queued) == self.queued and len(self.running) <= self.limits.fetches
        assert len(self.peers) <= self.limits.peers
        assert self.slot_bytes == sum(load.slot_bytes for load in flying)
        assert len(flying) <= 1 or self.slot_bytes <= self.max_slot_bytes
        for node_id, peer in self.peers.items():
            assert peer.node_id == node_id
            fetches = [fetch for fetch in self.running.values() if fetch.peer is peer]
            assert peer.running == len(fetches) <= self.limits.fetches_per_peer
            its = [*peer.queue, *(load for fetch in fetches for load in fetch.pages.values())]
            assert peer.slot_bytes == sum(
                load.slot_bytes for fetch in fetches for load in fetch.pages.values()
            )
            assert peer.ahead_bytes == sum(load.payload_bytes for load in its)
        for fetch_id, fetch in self.running.items():
            assert fetch.fetch_id == fetch_id and self.peers[fetch.peer.node_id] is fetch.peer
            for page, load in fetch.pages.items():
                assert load.id == page and load.fetch == fetch_id and load.grant is not None
                assert self.coming.get(page) is load or not load.waiters, "an abandoned page is waited for"
        for load in queued:
            assert load.fetch is None and load.grant is None and load.waiters
            assert self.coming[load.id] is load
        known = {*queued, *flying}
        assert all(load in known and load.id == page for page, load in self.coming.items())

    def _leave_queue(self, load: RemoteLoad) -> None:
        del self.peers[load.node_id].queue[load]
        self.queued -= 1


def _run(queue: dict[RemoteLoad, None], most: int) -> list[RemoteLoad]:
    """The first loads of a queue, at most so many, as far as each is of the page behind the one before."""
    run: list[RemoteLoad] = []
    for load in queue:
        if run and (len(run) == most or not _follows(run[-1], load)):
            break
        run.append(load)
    return run


def _follows(before: RemoteLoad, load: RemoteLoad) -> bool:
    """One Fetch can ask for both."""
    return (
        (before.id[0], before.depth + 1, before.late_at) == (load.parent, load.depth, load.late_at)
        and (before.address, before.root, before.tenant) == (load.address, load.root, load.tenant)
        and (before.id[1], before.spec_digest, before.tokens) == (load.id[1], load.spec_digest, load.tokens)
        and before.payload_bytes == load.payload_bytes
    )
