"""Fetches pages from other nodes, as the node's cache orders: runs what tier/transport/fetch_runs.py decides.

One thread decides; a run has a thread of its own, which copies each page into its slot as it comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from kvtier.cluster.transfer.channels import After, Channels
from kvtier.cluster.transfer.node_link import NodeGone, NodeSession, Order, run_or_exit
from kvtier.cluster.transfer.sink import SlotSink
from kvtier.tier.pages.page import PageCorrupt
from kvtier.tier.protocol.events import Note
from kvtier.tier.protocol.messages import Fetch
from kvtier.tier.transport.fetch_runs import (
    Asked,
    Begin,
    Came,
    Cancelled,
    FetchEvent,
    FetchLimits,
    FetchRef,
    Interrupt,
    NodeLost,
    PeerRuns,
    Ran,
    Tell,
    Ticked,
)
from kvtier.tier.transport.frames import Ending, FailureKind, Interrupted, PeerFailed

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
STUCK_S = 10.0  # a fetch that isn't over so long after its deadline is a fault
_AFTER: dict[FailureKind, After] = {
    "lost": "forget",
    "busy": "keep",
    "corrupt": "close",
    "refused": "forget",
    "slow": "close",
    "away": "keep",
    "broke": "close",
}


class Run:
    """A Call: one run of a fetch, which the deciding thread may interrupt."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline  # of the monotonic clock
        self._lock = threading.Lock()  # guards the two below; an interrupt is called outside
        self._is_interrupted = False
        self._interrupts: list[Callable[[], object]] = []

    @property
    def is_interrupted(self) -> bool:
        """Nothing waits any more."""
        return self._is_interrupted

    def left_s(self) -> float:
        """Seconds until the deadline, 0 when it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    def on_interrupt(self, interrupt: Callable[[], object]) -> None:
        """What lets the run's present wait end."""
        with self._lock:
            if not self._is_interrupted:
                self._interrupts.append(interrupt)
                return
        interrupt()

    def interrupt(self) -> None:
        """End the run's waits, now and from now on."""
        with self._lock:
            self._is_interrupted = True
            interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt()


@dataclass(frozen=True, slots=True)
class _Question:
    """Another thread asks for the statistics."""

    answer: Future[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Begin nothing more; the thread ends when nothing runs."""


class Fetcher:
    """Carries out the fetches of one exchange. Its methods may be called from any thread."""

    def __init__(self, limits: FetchLimits, channels: Channels, note: Callable[[str], None]) -> None:
        self._runs = PeerRuns(limits)
        self._channels = channels
        self._note = note
        # Bounded by what the node orders: it grants a slot for each page of a Fetch.
        self._inbox: SimpleQueue[FetchEvent | tuple[NodeSession, Fetch] | _Question | _Stop] = SimpleQueue()
        self._sessions: dict[int, NodeSession] = {}  # that have ordered something
        self._running: dict[FetchRef, Run] = {}
        self._is_stopping = False
        self._pool = ThreadPoolExecutor(limits.runs, thread_name_prefix="exchange-fetch")
        self._thread = threading.Thread(
            target=lambda: run_or_exit(self._loop), name="exchange-fetches", daemon=True
        )
        self._busy_since: float | None = None  # of the deciding thread, with one item

    def start(self) -> None:
        """Take orders."""
        self._thread.start()

    def order(self, session: NodeSession, order: Order) -> None:
        """The node wants pages, or no more."""
        if isinstance(order, Fetch):
            self._inbox.put((session, order))
        else:
            self._inbox.put(Cancelled((session.number, order.fetch_id)))

    def lost(self, session: int) -> None:
        """A connection to the node is over."""
        self._inbox.put(NodeLost(session))

    def stats(self) -> dict[str, Any]:
        """{"fetched": {peer: {"pages", "bytes", "failures": {reason: fetches}, "breaker"}}, "fetches": now}."""
        question = _Question(Future())
        self._inbox.put(question)
        return question.answer.result(STATS_TIMEOUT_S)

    def health(self) -> str | None:
        """None when all orders are dealt with in time, else what isn't, in one line."""
        now, busy_since = time.monotonic(), self._busy_since
        if not self._thread.is_alive():
            return "the thread that decides on fetches has ended"
        if busy_since is not None and now - busy_since > STUCK_S:
            return f"the thread that decides on fetches is stalled for {now - busy_since:.0f} s"
        late_s = max((now - run.deadline for run in self._running.copy().values()), default=0.0)
        return f"a fetch goes on {late_s:.0f} s after its deadline" if late_s > STUCK_S else None

    def stop(self) -> None:
        """Interrupt what runs, and end."""
        self._inbox.put(_Stop())
        self._thread.join()
        self._pool.shutdown()

    # ---- the deciding thread -----------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not (self._is_stopping and self._runs.is_idle):
            self._busy_since = None
            item = self._next()
            self._busy_since = time.monotonic()
            match item:
                case _Question():
                    item.answer.set_result(self._stats())
                case _Stop():
                    self._is_stopping = True
                    for number in list(self._sessions):
                        self._handle(NodeLost(number))
                case (session, fetch):
                    if not self._is_stopping:
                        self._sessions[session.number] = session
                        self._handle(Asked(session.number, fetch))
                case _:
                    if isinstance(item, Ran):
                        del self._running[item.ref]
                    self._handle(item)
                    if isinstance(item, NodeLost):
                        self._sessions.pop(item.session, None)

    def _next(self) -> Any:
        """What comes next, or Ticked when that is due."""
        at = self._runs.next_at()
        try:
            return self._inbox.get(timeout=None if at is None else max(0.0, at - time.monotonic()))
        except Empty:
            return Ticked()

    def _handle(self, event: FetchEvent) -> None:
        for command in self._runs.handle(event, time.monotonic()):
            match command:
                case Begin():
                    run = self._running[command.ref] = Run(command.deadline)
                    self._pool.submit(self._run, command, run, self._sessions[command.ref[0]])
                case Interrupt():
                    self._running[command.ref].interrupt()
                case Tell():
                    self._tell(self._sessions[command.session], command)
                case Note():
                    self._note(command.text)

    def _tell(self, session: NodeSession, command: Tell) -> None:
        try:
            session.send(command.message)
        except NodeGone:
            pass  # its end, which comes next, says that all of it is void

    def _stats(self) -> dict[str, Any]:
        now = time.monotonic()
        fetched: dict[str, dict[str, Any]] = {}
        for (node_id, address), peer in self._runs.peers().items():
            # An exchange that came back at another address goes on where the earlier one ended.
            before = fetched.get(node_id, {"pages": 0, "bytes": 0, "failures": {}})
            fetched[node_id] = {
                "address": address,
                "pages": before["pages"] + peer.pages,
                "bytes": before["bytes"] + peer.nbytes,
                "failures": dict(Counter(before["failures"]) + peer.failures),
                "breaker": peer.breaker.state(now),
            }
        return {"fetched": fetched, "fetches": len(self._running)}

    # ---- a run's thread ----------------------------------------------------------------------------------------

    def _run(self, begin: Begin, run: Run, session: NodeSession) -> None:
        ran = Ran(begin.ref, "broke", Ending(detail="this node's exchange has a fault: see its log"))
        try:
            failure, ending = self._outcome(begin, run, session)
            ran = Ran(begin.ref, failure, ending)
        finally:
            if ran.failure == "broke":  # what goes up from here is seen by nothing
                what = "a fetch from node %s broke; its pages are computed"
                log.error(what, begin.fetch.node_id, exc_info=True)  # noqa: LOG014  it goes up meanwhile
            self._inbox.put(ran)

    def _outcome(self, begin: Begin, run: Run, session: NodeSession) -> tuple[FailureKind | None, Ending]:
        name = (begin.fetch.node_id, begin.fetch.address)

        def came(keys: tuple[bytes, ...], nbytes: int) -> None:
            self._inbox.put(Came(begin.ref, keys, nbytes))

        sink = SlotSink(session, begin.fetch, begin.request, came)
        try:
            channel = self._channels.open(name, run)
            after: After = "forget"
            try:
                ending = channel.fetch(begin.request, sink, run)
                after = "keep"
            except (PageCorrupt, Interrupted):
                after = "close"
                raise
            except PeerFailed as failed:
                after = _AFTER[failed.kind]
                raise
            finally:
                try:
                    sink.flush()  # what came whole before it failed stays
                finally:
                    self._channels.done(name, channel, after)
            return None, ending
        except PeerFailed as failed:
            return failed.kind, Ending(detail=failed.detail)
        except PageCorrupt as error:
            return "corrupt", Ending(detail=str(error))
        except NodeGone as error:
            return "away", Ending(detail=str(error))
        except Interrupted:
            return "slow", Ending(detail="it was interrupted")
