"""A decode worker: a step loop on a thread of its own, and the calls that other threads make to it.

The loop tells its sink something in every heartbeat.TURN_S even where it has nothing to do, so that a worker that is
stalled is told from one that is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvtier.tier.pages.page import PageKey, TierName
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.engine.requests import Submitted
from kvtier.workers.engine.step_loop import Call, Cancelled, CancelledAll, StepLoop, Stop
from kvtier.workers.node_io.admin import Outcomes
from kvtier.workers.requests.api import (
    EngineRequest,
    Explanation,
    Output,
    QueueFull,
    WorkerInfo,
    WorkerStopped,
)
from kvtier.workers.runner.runner import ModelRunner
from kvtier.workers.scheduling.settings import EngineSettings

T = TypeVar("T")
ADMIN_TIMEOUT_S = 60.0  # a step of a large prefill takes seconds, not minutes


class DecodeWorker:
    """Serves requests on one model. Public methods may be called from any thread; outputs go to `sink`.

    `sink` gets one list per step, on the step loop's thread, and must neither block nor raise; an empty one tells that
    the loop turns, where nothing else has for TURN_S. `tenants` maps names to the salts of their keys. Without
    `socket_path`, or while nothing answers there, L1 is the only tier.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineSettings,
        *,
        worker_id: str,
        node_id: str,
        socket_path: str | None,
        tenants: Mapping[str, bytes],
        sink: Callable[[list[Output]], None],
        tokenizer_digest: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.node_id = node_id
        self._settings = settings
        self._tokenizer_digest = tokenizer_digest
        self._loop = StepLoop(
            runner, settings, worker_id=worker_id, socket_path=socket_path, tenants=tenants, sink=sink
        )

    def start(self) -> None:
        """Start the step loop, and connect to the node in the background."""
        self._loop.thread.start()

    def submit(self, spec: EngineRequest) -> None:
        """Queue a request. Raises ValueError for one that can't be served, QueueFull, WorkerStopped."""
        self._loop.requests.validate(spec)
        self._refuse_if_over()
        if self._loop.waiting + len(self._loop.inbox) >= self._settings.max_waiting:
            raise QueueFull(
                f"worker {self.worker_id} has {self._settings.max_waiting} requests waiting: try again later"
            )
        if not self._loop.inbox.offer(Submitted(spec, time.monotonic(), time.time())):
            raise QueueFull(
                f"worker {self.worker_id} is {self._loop.inbox.capacity} calls behind: try again later"
            )

    def cancel(self, request_id: str, *, is_stopped: bool = False) -> None:
        """End a request, if it isn't over. Its pages are free within a step, or when a copy in flight ends.

        `is_stopped`: its client has the whole answer, which a stop string ended. The cache learns from it as such.
        """
        self._loop.inbox.put(Cancelled(request_id, is_stopped))

    def cancel_all(self) -> None:
        """End all requests that were submitted before: nothing reads what they give."""
        self._loop.inbox.put(CancelledAll())

    def info(self) -> WorkerInfo:
        """What this worker serves."""
        longest = self._loop.requests.longest_context()
        return WorkerInfo(
            worker_id=self.worker_id,
            node_id=self.node_id,
            pid=os.getpid(),
            model_name=self._loop.runner.model_name,
            vocab_size=self._loop.runner.vocab_size,
            max_context=longest,
            is_l1_short=longest < self._loop.namespaces.longest(self._loop.namespaces.kind_of(0, 0, False)),
            eos_ids=self._loop.eos_ids,
            dtype=self._loop.runner.dtype,
            page_tokens=self._loop.page_tokens,
            page_bytes=sum(
                group.specs[self._loop.runner.recipe.write].nbytes for group in self._loop.runner.groups
            ),
            tokenizer_digest=self._tokenizer_digest,
            root_fields=self._loop.runner.root_fields(),
            role=self._settings.role,
        )

    @property
    def error(self) -> str | None:
        """Why the worker is out of order; None while it is well."""
        return self._loop.error or self._loop.runner.error

    def wait_failed(self, close_s: float) -> str | None:
        """Wait until the step loop has ended: why, if by an error, at most `close_s` after its last outputs are sent."""
        self._loop.has_ended.wait()
        if self._loop.error is not None:
            self._loop.thread.join(close_s)
        return self._loop.error

    def is_healthy(self) -> bool:
        """The step loop runs."""
        return self._loop.thread.is_alive() and self.error is None

    def heartbeat(self) -> float:
        """Seconds since the step loop last turned; it does while it has nothing to do, and while it makes kernels."""
        return self._loop.heartbeat.read()

    @property
    def is_connected(self) -> bool:
        """The node's cache answers."""
        return self._loop.link.is_up

    def stats(self) -> Snapshot:
        """This worker's counters: L1's own, and what its requests found in the tiers below."""
        return self._call(self._loop.snapshot)

    def explain(self, request_id: str) -> Explanation | None:
        """Where a request's prompt was found, and why not all of it; None when it isn't remembered."""
        return self._call(lambda: self._loop.metrics.explanation(request_id))

    def pages(
        self, tenant: str | None = None, tier: TierName | None = None, limit: int = 1000
    ) -> list[PageInfo]:
        """At most `limit` cached pages of a tenant (None: of all); none of another tier than L1."""
        if tier not in (None, TierName.HBM):
            return []
        return self._call(lambda: self._loop.l1_admin.pages(tenant, limit))

    def pages_of(self, keys: list[bytes]) -> list[PageInfo]:
        """The pages of these keys in L1, in each format."""
        return self._call(lambda: self._loop.l1_admin.pages_of(keys))

    def held(self, keys: list[bytes]) -> list[HeldKeys]:
        """Which of these keys L1 has, by format."""
        return self._call(lambda: self._loop.l1_admin.held(keys))

    def pin(self, keys: list[bytes]) -> Outcomes:
        """Keep pages in L1, and those before them. REJECTED past the bound, half of L1's pages."""
        return self._in_parts(keys, self._loop.l1_admin.pin)

    def unpin(self, keys: list[bytes]) -> Outcomes:
        """Undo `pin`."""
        return self._in_parts(keys, self._loop.l1_admin.unpin)

    def evict(self, keys: list[bytes] | None) -> Outcomes:
        """Drop pages (None: all) from L1, and those behind. REJECTED: it is pinned. DEFERRED: when its users end."""
        if keys is None:
            return self._on_all(self._loop.l1_admin.evict)
        here = set(
            self._call(lambda: self._loop.l1_admin.here(keys))
        )  # one may go with another, of an earlier part
        outcomes = self._in_parts(keys, self._loop.l1_admin.evict)
        return [
            (key, Outcome.ACCEPTED if one is Outcome.MISSING and key in here else one)
            for key, one in outcomes
        ]

    def clear(self, tenant: str | None = None, number: int = 0) -> Outcomes:
        """Drop a tenant's pages (None: of all). DEFERRED: not found any more, gone when its users end.

        `number` is the clear's epoch (tier/pages/clear_epochs.py): requests and the node may know of it first, and then it is done here
        before anything else of the tenant's. 0: it has none. Most go in parts. The last step takes all that is left at that moment, and ends the identity that they have been
        found by.
        """
        dropped = self._on_all(self._loop.l1_admin.drop, tenant)
        outcomes: dict[bytes, Outcome] = {
            key: outcome for key, outcome in dropped if outcome is not Outcome.REJECTED
        }
        outcomes |= dict(self._call(lambda: self._loop.requests.clear(tenant, number)))
        return list(outcomes.items())

    def know(self, told: Iterable[tuple[bytes, int]]) -> None:
        """Apply the clears that are told and were missed here."""
        for tenant, number in self._call(lambda: self._loop.l1_admin.behind(told)):
            self.clear(tenant, number)

    def verify(self, keys: list[bytes] | None = None) -> Outcomes:
        """Check pages (None: all) against their checksums; a bad one is dropped, and then MISSING."""
        return (
            self._on_all(self._loop.l1_admin.verify)
            if keys is None
            else self._in_parts(keys, self._loop.l1_admin.verify)
        )

    def _on_all(self, verb: Callable[[list[bytes]], Outcomes], tenant: str | None = None) -> Outcomes:
        """A verb on all pages of a tenant (None: of all); what has left before its turn is left out."""
        keys = self._call(lambda: self._loop.l1_admin.deepest_first(tenant))
        return self._in_parts(keys, lambda part: verb(self._loop.l1_admin.here(part)))

    def _in_parts(self, keys: list[bytes], verb: Callable[[list[bytes]], Outcomes]) -> Outcomes:
        """A verb on these pages, few in one turn of the step loop, which would stall for too long otherwise."""
        outcomes: Outcomes = []
        for start in range(0, len(keys), self._loop.part_pages):
            outcomes += self._call(partial(verb, keys[start : start + self._loop.part_pages]))
        return outcomes

    def holds(self) -> list[bytes]:
        """Keys of all pages that L1 has."""
        return self._call(lambda: [*self._loop.table.keys()])

    def follow_holds(self, on_holds: Callable[[list[PageKey], list[PageKey]], None] | None) -> None:
        """From now on `on_holds` is told, once a step at most, which pages came to L1 and which left it, by their keys.

        It is called on the step loop, and must neither block nor raise. None: nothing is told.
        """
        self._call(lambda: self._loop.follow(on_holds))

    def idle(self) -> bool:
        """No request, no copy, nothing left to save."""
        return self._call(self._loop.is_idle)

    def check(self) -> None:
        """Re-derive all counts from scratch; AssertionError where one differs."""
        self._call(self._loop.check)

    def stop(self, drain_s: float = 0.0) -> None:
        """Cancel what runs, save what is unsaved for at most `drain_s`, and end. Idempotent."""
        self._loop.inbox.put(Stop(time.monotonic() + drain_s))
        if self._loop.thread.ident is None:
            self._loop.close()
        else:
            self._loop.thread.join()

    def _refuse_if_over(self) -> None:
        if self._loop.is_over or self.error is not None:
            raise WorkerStopped(self.error or "the worker has stopped")

    def _call(self, function: Callable[[], T]) -> T:
        self._refuse_if_over()
        result: Future[T] = Future()
        if not self._loop.inbox.offer(Call(function, result)):
            raise QueueFull(
                f"worker {self.worker_id} is {self._loop.inbox.capacity} calls behind: try again later"
            )
        return result.result(timeout=ADMIN_TIMEOUT_S)
