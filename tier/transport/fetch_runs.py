"""Which fetches from other nodes run, for how long, and how each ends. Pure: `handle(event, now) -> commands`.

Bounded in bytes, in runs at once and per peer; a peer that fails again and again is left alone for a while.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from kvtier.tier.protocol.events import Note
from kvtier.tier.protocol.messages import MAX_TEXT, REASONS, Fetch, Fetched
from kvtier.tier.transport.frames import Ending, FailureKind, PagesRequest, left_of, request_of
from kvtier.tier.transport.peer_health import PeerRecord

FetchRef = tuple[int, int]  # connection to the node, the Fetch's number there
PeerName = tuple[str, str]  # node id, address: an exchange that comes back elsewhere is another peer

_REASONS: dict[FailureKind, str] = {
    "lost": "load_failed",
    "busy": "no_room",
    "corrupt": "corrupt",
    "refused": "load_failed",
    "slow": "deadline",
    "away": "load_failed",
    "broke": "broke",
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The bounds of a node's fetches."""

    in_flight_bytes: int = (
        64 * 2**20
    )  # of payloads in slots that are being filled; one larger Fetch runs alone
    # From one peer at once, each a stream. One is quickest: medians of four runs of bench/transfer.py on two cores, GB/s by
    # 1, 2 and 4 streams: 1.56, 1.41, 1.32 in pages of 64 KiB; 1.80, 1.60, 1.45 of 256 KiB; 1.86, 1.78, 1.57 of 1 MiB.
    # But what waits for its node's SSD or workers must not hold up what is in memory there.
    streams: int = 2
    runs: int = 16  # at once, from all peers
    waiting: int = 1024
    peers: int = 256  # whose failures and counts are remembered
    deadline_s: float = 60.0  # of a Fetch that allows itself more
    grace_s: float = 1.5  # before a peer must be as fast as ...
    min_bytes_per_s: float = 2**20  # ... this: a slower one only holds slots


# ---- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The node wants pages."""

    session: int  # which connection to the node
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Came:
    """Pages are whole in their slots and told to the node; `nbytes` came since the last time, of whole pages or not."""

    ref: FetchRef
    keys: tuple[bytes, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Ran:
    """The run is over and touches no slot any more. `failure` None: the peer ended it, as `ending` says."""

    ref: FetchRef
    failure: FailureKind | None
    ending: Ending  # of a failure: its `detail` only


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The node waits for a Fetch no more."""

    ref: FetchRef


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The connection to the node is over, and all that was asked on it is void."""

    session: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """`next_at` has come."""


FetchEvent = Asked | Came | Ran | Cancelled | NodeLost | Ticked


# ---- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Run a Fetch, or the rest of it once more. Answered by Came and Ran."""

    ref: FetchRef
    fetch: Fetch
    request: PagesRequest
    deadline: float  # on the clock of `now`


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End a run at once. Answered by its Ran."""

    ref: FetchRef


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the node how a Fetch ended."""

    session: int
    message: Fetched


FetchCommand = Begin | Interrupt | Tell | Note


# ---- the machine -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Fetch:
    """A Fetch that isn't over. Invariant: it holds bytes of the budget from its first Begin to its last Ran."""

    ref: FetchRef
    fetch: Fetch
    request: PagesRequest
    peer: PeerName
    asked_at: float
    deadline: float
    state: Literal["waiting", "running", "stopping"] = "waiting"
    came: set[bytes] = field(default_factory=set)
    began_at: float = 0.0  # of the first run
    run_at: float = 0.0  # of this one
    run_bytes: int = 0
    held_bytes: int = 0  # of the budget
    runs: int = 0
    stop: Ending | None = None  # why it is being stopped
    blames_peer: bool = False  # for that
    is_probe: bool = False
    is_void: bool = False  # its node is gone: nothing is told


class PeerRuns:
    """Owns every Fetch from Asked to Fetched, and the record of every peer. One owner calls it, from one thread.

    Each Fetch is answered by exactly one Fetched, unless its node is lost: when nothing touches its slots any more, and
    as soon after its deadline as its run lets go.
    """

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._fetches: dict[FetchRef, _Fetch] = {}  # in the order asked
        self._peers: dict[PeerName, PeerRecord] = {}  # the latest asked last
        self._out: list[FetchCommand] = []
        self._now = 0.0

    def handle(self, event: FetchEvent, now: float) -> list[FetchCommand]:
        """Take one event; `now` never goes back. Commands are to be carried out in their order."""
        self._now = now
        self._apply(event)
        self._expire()
        self._pump()
        self._forget_peers()
        out, self._out = self._out, []
        return out

    def next_at(self) -> float | None:
        """When Ticked is due, on the clock of `now`; None: not before another event."""
        times = [fetch.deadline for fetch in self._fetches.values() if fetch.state != "stopping"]
        times += [self._too_slow_at(fetch) for fetch in self._fetches.values() if fetch.state == "running"]
        return min(times, default=None)

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._fetches

    def peers(self) -> dict[PeerName, PeerRecord]:
        """What is known of each peer, the one asked least recently first."""
        return dict(self._peers)

    def check(self) -> None:
        """Re-derive every count; AssertionError says what doesn't hold."""
        held = [fetch for fetch in self._fetches.values() if fetch.state != "waiting"]
        for name, peer in self._peers.items():
            mine = [fetch for fetch in held if fetch.peer == name]
            assert peer.runs == len(mine) <= self._limits.streams, name
            assert peer.in_flight_bytes == sum(fetch.held_bytes for fetch in mine), name
        assert len(held) <= self._limits.runs
        total = sum(fetch.held_bytes for fetch in held)
        assert total <= self._limits.in_flight_bytes or len(held) == 1, total
        assert all(fetch.held_bytes == 0 for fetch in self._fetches.values() if fetch.state == "waiting")
        assert len(self._peers) <= max(
            self._limits.peers, len({fetch.peer for fetch in self._fetches.values()})
        )
        assert len(self._fetches) <= self._limits.waiting

    # ---- events ------------------------------------------------------------------------------------------------

    def _apply(self, event: FetchEvent) -> None:
        match event:
            case Asked():
                self._asked(event.session, event.fetch)
            case Came():
                self._came(self._fetches[event.ref], event)
            case Ran():
                self._ran(self._fetches[event.ref], event)
            case Cancelled():
                if event.ref in self._fetches:
                    why = Ending("deadline", "nothing waits for it any more")
                    self._stop(self._fetches[event.ref], why, blames_peer=False)
            case NodeLost():
                for fetch in [fetch for fetch in self._fetches.values() if fetch.ref[0] == event.session]:
                    fetch.is_void = True
                    self._stop(fetch, Ending("load_failed", "the node's cache went away"), blames_peer=False)
            case Ticked():
                pass

    def _asked(self, session: int, fetch: Fetch) -> None:
        ref = (session, fetch.fetch_id)
        try:
            if ref in self._fetches:
                raise ValueError("a Fetch of this number runs")
            request = request_of(fetch)
        except ValueError as error:
            self._tell(session, fetch, set(), Ending("load_failed", f"it can't be fetched: {error}"), 0.0)
            return
        if len(self._fetches) >= self._limits.waiting:
            detail = f"{self._limits.waiting} fetches wait already, no more are taken"
            self._tell(session, fetch, set(), Ending("no_room", detail), 0.0)
            return
        name = (fetch.node_id, fetch.address)
        self._peers[name] = self._peers.pop(name) if name in self._peers else PeerRecord()
        deadline = self._now + min(max(fetch.deadline_s, 0.0), self._limits.deadline_s)
        self._fetches[ref] = _Fetch(ref, fetch, request, name, self._now, deadline)

    def _came(self, fetch: _Fetch, event: Came) -> None:
        fetch.came.update(event.keys)
        fetch.run_bytes += event.nbytes
        peer = self._peers[fetch.peer]
        peer.pages += len(event.keys)
        peer.nbytes += len(event.keys) * fetch.request.payload_bytes

    def _ran(self, fetch: _Fetch, event: Ran) -> None:
        peer = self._peers[fetch.peer]
        if self._is_worth_a_retry(fetch, event):
            self._begin(fetch)
            return
        peer.runs -= 1
        peer.in_flight_bytes -= fetch.held_bytes
        is_bad, ending = self._judge(fetch, event)
        if is_bad:
            if peer.breaker.failed(self._now, is_probe=fetch.is_probe):
                self._out.append(
                    Note(f"node {fetch.peer[0]} is asked for no pages for a while: {ending.detail}")
                )
        elif event.failure is None and fetch.stop is None:
            peer.breaker.succeeded()
            peer.is_doubted &= ending.reason == "corrupt"
        else:
            peer.breaker.ended(is_probe=fetch.is_probe)
        if event.failure == "corrupt":
            peer.is_doubted = True
            self._out.append(Note(f"a page from node {fetch.peer[0]} was dropped: {ending.detail}"))
        self._end(fetch, ending)

    def _is_worth_a_retry(self, fetch: _Fetch, event: Ran) -> bool:
        return (
            event.failure == "lost"
            and fetch.stop is None
            and fetch.runs == 1
            and self._now < fetch.deadline
            and len(fetch.came) < len(fetch.fetch.pages)
        )

    def _judge(self, fetch: _Fetch, event: Ran) -> tuple[bool, Ending]:
        """Whether the peer is to blame, and how the Fetch ends."""
        if event.failure == "corrupt":
            return True, Ending("corrupt", event.ending.detail)
        if len(fetch.came) == len(fetch.fetch.pages):
            return False, Ending()
        if fetch.stop is not None:
            return fetch.blames_peer, fetch.stop
        if event.failure is not None:
            is_bad = event.failure not in ("busy", "away", "broke")
            return is_bad, Ending(_REASONS[event.failure], event.ending.detail)
        if not event.ending.reason:
            return True, Ending(
                "load_failed", f"node {fetch.peer[0]} says that it sent all, and pages are missing"
            )
        return False, event.ending

    # ---- time and room -----------------------------------------------------------------------------------------

    def _too_slow_at(self, fetch: _Fetch) -> float:
        """When the run is slower than it may be, if nothing more comes."""
        return fetch.run_at + self._limits.grace_s + fetch.run_bytes / self._limits.min_bytes_per_s

    def _expire(self) -> None:
        for fetch in list(self._fetches.values()):
            if fetch.state == "stopping":
                continue
            if self._now >= fetch.deadline:
                # A peer that gave pages at a fair speed isn't to blame that there were too many.
                is_bad = fetch.state == "running" and not fetch.run_bytes
                detail = f"it did not come within {self._now - fetch.asked_at:.2f} s"
                self._stop(fetch, Ending("deadline", detail), blames_peer=is_bad)
            elif fetch.state == "running" and self._now >= self._too_slow_at(fetch):
                run_s = self._now - fetch.run_at
                detail = f"node {fetch.peer[0]} gave {fetch.run_bytes} bytes in {run_s:.2f} s"
                self._stop(fetch, Ending("deadline", detail), blames_peer=True)

    def _pump(self) -> None:
        """Begin what may begin; in the order asked, but those from a busy peer let others pass."""
        limits = self._limits
        runs = sum(fetch.state != "waiting" for fetch in self._fetches.values())
        total = sum(fetch.held_bytes for fetch in self._fetches.values())
        for fetch in [fetch for fetch in self._fetches.values() if fetch.state == "waiting"]:
            peer = self._peers[fetch.peer]
            why_not = peer.breaker.why_not(self._now)
            if why_not is not None:
                self._end(fetch, Ending("load_failed", f"node {fetch.peer[0]}: {why_not}"))
                continue
            nbytes = len(fetch.fetch.pages) * fetch.request.payload_bytes
            # One peer gets half of the room, so that a slow one can't keep all others' slots waiting.
            is_greedy = peer.runs > 0 and peer.in_flight_bytes + nbytes > limits.in_flight_bytes // 2
            if peer.runs >= limits.streams or is_greedy:
                continue
            if runs >= limits.runs or (runs and total + nbytes > limits.in_flight_bytes):
                break
            runs, total = runs + 1, total + nbytes
            fetch.held_bytes, fetch.began_at = nbytes, self._now
            peer.runs += 1
            peer.in_flight_bytes += nbytes
            fetch.is_probe = peer.breaker.begin()
            self._begin(fetch)

    def _begin(self, fetch: _Fetch) -> None:
        fetch.state = "running"
        fetch.runs += 1
        fetch.run_at, fetch.run_bytes = self._now, 0
        request = fetch.request.without(fetch.came)
        if self._peers[fetch.peer].is_doubted:
            request = replace(request, checks=True)
        self._out.append(Begin(fetch.ref, fetch.fetch, request, fetch.deadline))

    def _stop(self, fetch: _Fetch, why: Ending, *, blames_peer: bool) -> None:
        """End a Fetch: at once if it waits, else when its run has let go of the slots."""
        if fetch.state == "waiting":
            self._end(fetch, why)
        elif fetch.state == "running":
            fetch.state, fetch.stop, fetch.blames_peer = "stopping", why, blames_peer
            self._out.append(Interrupt(fetch.ref))

    def _end(self, fetch: _Fetch, ending: Ending) -> None:
        del self._fetches[fetch.ref]
        ending = _in_our_words(ending)
        if ending.reason:
            self._peers[fetch.peer].failures[ending.reason] += 1
        if not fetch.is_void:
            seconds = self._now - fetch.began_at if fetch.runs else 0.0
            self._tell(fetch.ref[0], fetch.fetch, fetch.came, ending, seconds)

    def _tell(self, session: int, fetch: Fetch, came: set[bytes], ending: Ending, seconds: float) -> None:
        failed = [(page.key, page.variant) for page in left_of(fetch, came)]
        nbytes = sum(page.grant.payload_bytes for page in fetch.pages if page.key in came)
        message = Fetched(fetch.fetch_id, failed, ending.reason, ending.detail, nbytes, seconds)
        self._out.append(Tell(session, message))

    def _forget_peers(self) -> None:
        """Keep the latest; one from which something is being fetched stays."""
        too_many = len(self._peers) - self._limits.peers
        if too_many > 0:
            busy = {fetch.peer for fetch in self._fetches.values()}
            for name in [name for name in self._peers if name not in busy][:too_many]:
                del self._peers[name]


def _in_our_words(ending: Ending) -> Ending:
    """What another node says of its end, so that no table grows by its words and the CacheNode takes the message."""
    is_known = ending.reason in ("", *REASONS, *_REASONS.values())
    reason = ending.reason if is_known else "load_failed"
    return Ending(reason, ending.detail[:MAX_TEXT])
