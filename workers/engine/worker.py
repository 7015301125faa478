"""The decode worker: one thread that schedules, computes, samples and answers, over one model and its L1.

Everything a worker knows belongs to its step loop. Others put events into its inbox: requests and admin calls from
outside, messages of the node's cache, finished page copies. The loop sleeps when there is nothing to do, and turns once in
heartbeat.TURN_S all the same, so that one that is stalled is told from one that is idle.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import PageKey, TierName
from kvtier.tier.policy.base import PolicySettings, ScoreWeights
from kvtier.tier.policy.plugins import load_policies
from kvtier.tier.policy.registry import make_policy
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.protocol.messages import Hello, NewRoot, WriteMode
from kvtier.tier.stats import Snapshot, TierCounters
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.engine.handoff import Handoffs
from kvtier.workers.engine.heartbeat import TURN_S, Heartbeat
from kvtier.workers.engine.inbox import Inbox
from kvtier.workers.engine.metrics import RequestMetrics
from kvtier.workers.engine.prefill_costs import PrefillCosts
from kvtier.workers.engine.sampling.prompt_logprobs import PromptLogprobs
from kvtier.workers.engine.sampling.token_sampler import TokenSampler
from kvtier.workers.node_io.admin import L1Admin, Outcomes
from kvtier.workers.node_io.arena_ops import ArenaOps
from kvtier.workers.node_io.namespaces import Kind, Namespaces
from kvtier.workers.node_io.node_link import (
    Connected,
    ConnectionLost,
    ConnectionRefused,
    LinkEvent,
    NodeLink,
    NodeMessage,
)
from kvtier.workers.node_io.pager import Pager
from kvtier.workers.node_io.peer_export import PeerExport
from kvtier.workers.node_io.peer_import import PeerImport
from kvtier.workers.paging.copier import Copier, Job
from kvtier.workers.paging.frames import PageRecord, SaveState
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.api import (
    MAX_TOLD_PROMPT,
    WORKER_FAILED,
    EngineRequest,
    Explanation,
    FinishReason,
    Output,
    QueueFull,
    TokenLogprobs,
    WorkerInfo,
    WorkerStopped,
)
from kvtier.workers.requests.sequence import Request, Sequence, SequenceState
from kvtier.workers.requests.sessions import Turns
from kvtier.workers.runner.runner import GroupPages, ModelRunner, SequenceRows, StepBatch
from kvtier.workers.runner.step_timer import step_timer
from kvtier.workers.scheduling.scheduler import PREEMPTION, Row, Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")
ADMIN_TIMEOUT_S = 60.0  # a step of a large prefill takes seconds, not minutes
MARGIN_SHARE = (
    4  # of L1, at most, is saved ahead of need where pages are saved when they leave: two steps' prefill
)
L2_MARGIN_PARTS = 8  # one part in so many of L1 is chosen ahead of need, to go to peers
MOST_BORROWED = 32  # of peers' frames in stock, for each size of page
ADMIN_CALLS = 256  # waiting at once, cancellations included
# What a verb on all pages does in one turn of the step loop: checksums of so many bytes take some 10 ms, as evicting so
# many pages does.
PART_BYTES = 64 << 20
PART_PAGES = 1024


@dataclass(frozen=True, slots=True)
class _Submitted:
    spec: EngineRequest
    submitted_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Cancelled:
    request_id: str
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class _CancelledAll:
    pass


@dataclass(frozen=True, slots=True)
class _Copied:
    job: Job


@dataclass(frozen=True, slots=True)
class _Call:
    """Run `function` on the step loop. Its result, or what it raises, goes into `result`."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline_s: float


_Event = _Submitted | _Cancelled | _CancelledAll | _Copied | _Call | _Stop | LinkEvent


class DecodeWorker:
    """Serves requests on one model. Public methods may be called from any thread; outputs go to `sink`.

    `sink` gets one list per step, on the step loop's thread, and must neither block nor raise; an empty one tells that
    the loop turns, where nothing else has for TURN_S. `tenants` maps names to the salts of their keys. Without
    `socket_path`, or while nothing answers there, L1 is the only tier.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        worker_id: str,
        node_id: str,
        socket_path: str | None,
        tenants: Mapping[str, bytes],
        sink: Callable[[list[Output]], None],
        max_batch_tokens: int = 2048,
        max_sequences: int = 64,
        max_waiting: int = 1024,
        always_load: bool = False,
        load_deadline_ms: float = 2000.0,
        copy_threads: int = 2,
        tokenizer_digest: str = "",
        policy: PolicySettings | None = None,
        write: WriteMode = "through",
        shares: Mapping[str, float] = MappingProxyType({}),
        preemption: ScoreWeights = PREEMPTION,
        role: Literal["both", "prefill", "decode"] = "both",
        l2_share: float = 0.0,
    ) -> None:
        """`policy` chooses what leaves L1, by default rvi; `shares` are the most of it that a tenant's pages may take, by
        its name; `preemption` has the weights of a running sequence's score. `write`: full pages are copied down at
        once, or, with "demote", when they must leave. `role` is told to the gateway; any worker does what it is sent.
        `l2_share` of L1 at most is lent to the node's other workers while it is idle; above 0 theirs is used, too.
        """
        if l2_share and runner.share is None:
            raise ValueError(
                f"l2_share {l2_share} needs an arena that peers can open: load_runner(share_arena=True)"
            )
        load_policies()
        units, unit_bytes = runner.arena.shape
        specs = [spec for group in runner.groups for spec in group.specs.values()]
        self.worker_id = worker_id
        self.node_id = node_id
        self._runner = runner
        self._page_tokens = runner.page_tokens
        self._sink = sink
        self._max_waiting = max_waiting
        self._tokenizer_digest = tokenizer_digest
        self._role: Literal["both", "prefill", "decode"] = role
        self._inbox: Inbox[_Event] = Inbox(max_waiting + ADMIN_CALLS)
        self._table = PageTable(
            units,
            unit_bytes,
            runner.page_tokens,
            tuple({format: spec.nbytes for format, spec in group.specs.items()} for group in runner.groups),
            make_policy(
                policy or PolicySettings(),
                max(1, runner.arena.nbytes // max(spec.nbytes for spec in specs)),
            ),
            {tenant_digest(name): share for name, share in shares.items()},
        )
        # Some configs name ids that the model has no logits for: none of them can ever come.
        self._eos_ids = tuple(token for token in runner.eos_ids if 0 <= token < runner.vocab_size)
        self._scheduler = Scheduler(
            self._table,
            max_batch_tokens=max_batch_tokens,
            max_sequences=min(max_sequences, max_batch_tokens),
            load_deadline_s=load_deadline_ms / 1e3,
            weights=preemption,
            eos_ids=self._eos_ids,
        )
        stock = max(16, 2 * -(-max_batch_tokens // runner.page_tokens))
        if write == "demote":
            largest = max(spec.nbytes for spec in specs)
            self._table.save_loaded = SaveState.DIRTY
            self._table.watermark_bytes = max(1, min(stock * largest, runner.arena.nbytes // MARGIN_SHARE))
        elif l2_share:
            self._table.watermark_bytes = max(1, runner.arena.nbytes // L2_MARGIN_PARTS)
        self._share = runner.share if l2_share else None
        hello = Hello.of_worker(
            worker_id,
            uuid.uuid4().hex,
            payloads={spec.digest: spec.nbytes for spec in specs},
            raw_payloads={spec.digest: replace(spec, format=runner.raw_format).nbytes for spec in specs},
            root_fields=runner.root_fields(),
            write=write,
            arena_bytes=0 if self._share is None else self._share.nbytes,
            arena_handle=b"" if self._share is None else self._share.handle,
        )
        frames, copies = runner.open_l1()
        self._link = NodeLink(
            socket_path,
            hello,
            stock,
            self._inbox.put,
            pin_slab=runner.arena.device.type == "cuda",  # a group's processors read slots, not its GPUs
            share=self._share,
            follow=copies.follow,
        )
        self._roots = Namespaces(runner, tenants, lambda fields: self._link.send(NewRoot(fields)))
        self._ops = ArenaOps(frames, runner)
        self._copier = Copier(copies, copy_threads, lambda job: self._inbox.put(_Copied(job)))
        self._pager = Pager(
            scheduler=self._scheduler,
            link=self._link,
            copier=self._copier,
            ops=self._ops,
            roots=self._roots,
            groups=runner.groups,
            l4_format=runner.l4_format,
            memory=runner.arena.numpy() if runner.arena.device.type == "cpu" else None,
            lender=PeerExport(self._scheduler, self._link, l2_share),
            borrower=PeerImport(
                self._table,
                self._link,
                {spec.digest: spec for spec in specs},
                runner.device,
                min(stock, MOST_BORROWED) if l2_share else 0,
            ),
            is_through=write == "through",
            always_load=always_load,
        )
        self._on_holds: Callable[[list[PageKey], list[PageKey]], None] | None = None
        self._part_pages = max(1, min(PART_PAGES, PART_BYTES // max(spec.nbytes for spec in specs)))
        self._incarnation = hello.incarnation
        self._requests: dict[str, Request] = {}
        self._handoffs = Handoffs()
        self._request_metrics = RequestMetrics(self._table, worker_id, has_l2=l2_share > 0)
        self._l1_admin = L1Admin(
            worker_id=worker_id,
            roots=self._roots,
            table=self._table,
            pager=self._pager,
            groups=runner.groups,
            raw_format=runner.raw_format,
            clock=time.monotonic,
        )
        self._outputs: list[Output] = []
        self._next_number = 0
        self._costs = PrefillCosts(runner.page_tokens)
        self._timer = step_timer(runner.device)
        self._turns = Turns()
        self._sampler = TokenSampler()
        self._prompt_logprobs = PromptLogprobs()
        self._stop_at_s: float | None = None
        self._error: str | None = None
        self._is_over = False
        self._has_ended = threading.Event()  # the loop has, and its last outputs are sent
        self._waiting = 0  # requests queued, as of the last step
        # Filled again at each step, so that a step allocates little.
        self._token_ids = np.zeros(max_batch_tokens, np.int32)
        self._positions = np.zeros(max_batch_tokens, np.int32)
        self._counting = np.arange(max_batch_tokens, dtype=np.int32)
        self._thread = threading.Thread(target=self._run, name=f"step-loop-{worker_id}", daemon=True)
        self._heartbeat = Heartbeat(self._thread)
        self._told_s = 0.0  # when the sink was last told anything

    # For anyone, from any thread

    def start(self) -> None:
        """Start the step loop, and connect to the node in the background."""
        self._thread.start()

    def submit(self, spec: EngineRequest) -> None:
        """Queue a request. Raises ValueError for one that can't be served, QueueFull, WorkerStopped."""
        self._validate(spec)
        self._refuse_if_over()
        if self._waiting + len(self._inbox) >= self._max_waiting:
            raise QueueFull(
                f"worker {self.worker_id} has {self._max_waiting} requests waiting: try again later"
            )
        if not self._inbox.offer(_Submitted(spec, time.monotonic(), time.time())):
            raise QueueFull(
                f"worker {self.worker_id} is {self._inbox.capacity} calls behind: try again later"
            )

    def cancel(self, request_id: str, *, is_stopped: bool = False) -> None:
        """End a request, if it isn't over. Its pages are free within a step, or when a copy in flight ends.

        `is_stopped`: its client has the whole answer, which a stop string ended. The cache learns from it as such.
        """
        self._inbox.put(_Cancelled(request_id, is_stopped))

    def cancel_all(self) -> None:
        """End all requests that were submitted before: nothing reads what they give."""
        self._inbox.put(_CancelledAll())

    def info(self) -> WorkerInfo:
        """What this worker serves."""
        longest = self._longest_context()
        return WorkerInfo(
            worker_id=self.worker_id,
            node_id=self.node_id,
            pid=os.getpid(),
            model_name=self._runner.model_name,
            vocab_size=self._runner.vocab_size,
            max_context=longest,
            is_l1_short=longest < self._roots.longest(self._roots.kind_of(0, 0, False)),
            eos_ids=self._eos_ids,
            dtype=self._runner.dtype,
            page_tokens=self._page_tokens,
            page_bytes=sum(group.specs[self._runner.recipe.write].nbytes for group in self._runner.groups),
            tokenizer_digest=self._tokenizer_digest,
            root_fields=self._runner.root_fields(),
            role=self._role,
        )

    @property
    def error(self) -> str | None:
        """Why the worker is out of order; None while it is well."""
        return self._error or self._runner.error

    def wait_failed(self, close_s: float) -> str | None:
        """Wait until the step loop has ended: why, if by an error, at most `close_s` after its last outputs are sent."""
        self._has_ended.wait()
        if self._error is not None:
            self._thread.join(close_s)
        return self._error

    def is_healthy(self) -> bool:
        """The step loop runs."""
        return self._thread.is_alive() and self.error is None

    def heartbeat(self) -> float:
        """Seconds since the step loop last turned; it does while it has nothing to do, and while it makes kernels."""
        return self._heartbeat.read()

    @property
    def is_connected(self) -> bool:
        """The node's cache answers."""
        return self._link.is_up

    def stats(self) -> Snapshot:
        """This worker's counters: L1's own, and what its requests found in the tiers below."""
        return self._call(self._snapshot)

    def explain(self, request_id: str) -> Explanation | None:
        """Where a request's prompt was found, and why not all of it; None when it isn't remembered."""
        return self._call(lambda: self._request_metrics.explanation(request_id))

    def pages(
        self, tenant: str | None = None, tier: TierName | None = None, limit: int = 1000
    ) -> list[PageInfo]:
        """At most `limit` cached pages of a tenant (None: of all); none of another tier than L1."""
        if tier not in (None, TierName.HBM):
            return []
        return self._call(lambda: self._l1_admin.pages(tenant, limit))

    def pages_of(self, keys: list[bytes]) -> list[PageInfo]:
        """The pages of these keys in L1, in each format."""
        return self._call(lambda: self._l1_admin.pages_of(keys))

    def held(self, keys: list[bytes]) -> list[HeldKeys]:
        """Which of these keys L1 has, by format."""
        return self._call(lambda: self._l1_admin.held(keys))

    def pin(self, keys: list[bytes]) -> Outcomes:
        """Keep pages in L1, and those before them. REJECTED past the bound, half of L1's pages."""
        return self._in_parts(keys, self._l1_admin.pin)

    def unpin(self, keys: list[bytes]) -> Outcomes:
        """Undo `pin`."""
        return self._in_parts(keys, self._l1_admin.unpin)

    def evict(self, keys: list[bytes] | None) -> Outcomes:
        """Drop pages (None: all) from L1, and those behind. REJECTED: it is pinned. DEFERRED: when its users end."""
        if keys is None:
            return self._on_all(self._l1_admin.evict)
        here = set(
            self._call(lambda: self._l1_admin.here(keys))
        )  # one may go with another, of an earlier part
        outcomes = self._in_parts(keys, self._l1_admin.evict)
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
        dropped = self._on_all(self._l1_admin.drop, tenant)
        outcomes: dict[bytes, Outcome] = {
            key: outcome for key, outcome in dropped if outcome is not Outcome.REJECTED
        }
        outcomes |= dict(self._call(lambda: self._clear(tenant, number)))
        return list(outcomes.items())

    def know(self, told: Iterable[tuple[bytes, int]]) -> None:
        """Apply the clears that are told and were missed here."""
        for tenant, number in self._call(lambda: self._l1_admin.behind(told)):
            self.clear(tenant, number)

    def verify(self, keys: list[bytes] | None = None) -> Outcomes:
        """Check pages (None: all) against their checksums; a bad one is dropped, and then MISSING."""
        return (
            self._on_all(self._l1_admin.verify)
            if keys is None
            else self._in_parts(keys, self._l1_admin.verify)
        )

    def _on_all(self, verb: Callable[[list[bytes]], Outcomes], tenant: str | None = None) -> Outcomes:
        """A verb on all pages of a tenant (None: of all); what has left before its turn is left out."""
        keys = self._call(lambda: self._l1_admin.deepest_first(tenant))
        return self._in_parts(keys, lambda part: verb(self._l1_admin.here(part)))

    def _in_parts(self, keys: list[bytes], verb: Callable[[list[bytes]], Outcomes]) -> Outcomes:
        """A verb on these pages, few in one turn of the step loop, which would stall for too long otherwise."""
        outcomes: Outcomes = []
        for start in range(0, len(keys), self._part_pages):
            outcomes += self._call(partial(verb, keys[start : start + self._part_pages]))
        return outcomes

    def holds(self) -> list[bytes]:
        """Keys of all pages that L1 has."""
        return self._call(lambda: [*self._table.keys()])

    def follow_holds(self, on_holds: Callable[[list[PageKey], list[PageKey]], None] | None) -> None:
        """From now on `on_holds` is told, once a step at most, which pages came to L1 and which left it, by their keys.

        It is called on the step loop, and must neither block nor raise. None: nothing is told.
        """
        self._call(lambda: self._follow(on_holds))

    def idle(self) -> bool:
        """No request, no copy, nothing left to save."""
        return self._call(self._is_idle)

    def check(self) -> None:
        """Re-derive all counts from scratch; AssertionError where one differs."""
        self._call(self._check)

    def stop(self, drain_s: float = 0.0) -> None:
        """Cancel what runs, save what is unsaved for at most `drain_s`, and end. Idempotent."""
        self._inbox.put(_Stop(time.monotonic() + drain_s))
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join()

    # The step loop

    def _run(self) -> None:
        self._link.start()
        busy = False
        try:
            while not self._is_finished():
                for event in self._inbox.take(0 if busy else self._poll_timeout_s()):
                    self._handle(event)
                self._heartbeat.turned()
                self._pager.expire(time.monotonic())
                self._give_up_starved(time.monotonic())
                busy = self._step()
                self._send_outputs(is_due=True)
                self._pager.flush(time.monotonic())
                self._tell_holds()
                if self._handoffs:
                    self._end_handoffs(time.monotonic())
        except Exception as error:
            log.exception("the step loop failed")
            self._error = f"{type(error).__name__}: {error}"
            self._fail_all()
        finally:
            self._has_ended.set()
            self._close()

    def _poll_timeout_s(self) -> float:
        """How long the loop may sleep when no event comes."""
        deadlines = (self._pager.next_deadline_s, self._handoffs.next_deadline_s, self._stop_at_s)
        times = [t for t in deadlines if t is not None]
        return min(TURN_S, max(0.001, min(times) - time.monotonic())) if times else TURN_S

    def _is_finished(self) -> bool:
        if self._stop_at_s is None:
            return False
        return self._pager.is_quiet or time.monotonic() >= self._stop_at_s

    def _handle(self, event: _Event) -> None:
        match event:
            case _Submitted():
                self._accept(event)
            case _Cancelled():
                self._cancel(event)
            case _CancelledAll():
                self._cancel_all()
            case _Copied():
                self._pager.on_copied(event.job, time.monotonic())
            case _Call():
                if event.result.set_running_or_notify_cancel():
                    _answer(event)
            case _Stop():
                self._begin_stop(event.deadline_s)
            case Connected() | ConnectionLost() | ConnectionRefused() | NodeMessage():
                self._pager.on_link(event, time.monotonic())

    def _step(self) -> bool:
        """One step; whether the next one can follow at once."""
        scheduler = self._scheduler
        if not scheduler.unfinished:
            self._waiting = 0
            return False
        now = time.monotonic()
        step = scheduler.schedule(now, can_load=self._link.is_up, free_slots=self._link.stock())
        self._waiting = len(scheduler.waiting)
        # Before anything else may read or write the frames that these name.
        self._ops.run(step.ops)
        for demotion in step.demotions:
            self._pager.demote(demotion)
            self._sampler.forget(demotion.seq)
        for lease in step.leases_over:
            self._pager.release(lease)
        for seq in step.loads:
            self._locate(seq, now)
        if step.broken_pins:
            log.warning("%d pinned pages were unpinned: a request needed their room in L1", step.broken_pins)
        had_rows = bool(step.rows)
        rows, batch = self._rows(now)
        if batch is not None:
            self._compute(rows, batch, step.converted)
        elif step.converted:
            self._pager.save(step.converted, now)
        elif not (
            had_rows
            or step.ops
            or step.demotions
            or step.loads
            or self._pager.in_flight
            or self._table.lent_bytes
        ):
            raise RuntimeError(f"{scheduler.unfinished} sequences, and none can go on")
        return bool(had_rows or step.ops or step.demotions)

    def _locate(self, seq: Sequence, now: float) -> None:
        if seq.state is SequenceState.FINISHED:
            return  # with a sibling that raised
        try:
            self._pager.locate(seq)
        except Exception as error:  # noqa: BLE001  # it ends its request, whatever it is
            self._end_faulty(seq.request, "asking for its pages", error, now)

    def _rows(self, now: float) -> tuple[list[Row], StepBatch | None]:
        """The step's rows, and the batch of them; rows that raise end with their requests, and the others stay."""
        while rows := list(self._scheduler.rows):
            try:
                return rows, self._batch(rows)
            except Exception:
                for row in rows:
                    self._try_alone(row, now)
                if len(self._scheduler.rows) == len(rows):
                    raise  # none of them did it
        return [], None

    def _try_alone(self, row: Row, now: float) -> None:
        if row.seq.state is SequenceState.FINISHED:
            return
        try:
            self._batch([row])
        except Exception as error:  # noqa: BLE001  # likewise
            self._end_faulty(row.seq.request, "building its rows", error, now)

    def _end_faulty(self, request: Request, doing: str, error: Exception, now: float) -> None:
        """What one request raised ends that request, with its reason, and nothing else."""
        log.error("request %s ends: %s failed", request.spec.request_id, doing, exc_info=error)
        why = f"{doing} failed: {type(error).__name__}: {error}"
        self._end_request(request, FinishReason.ERROR, now, why)

    def _compute(self, rows: list[Row], batch: StepBatch, converted: list[PageRecord]) -> None:
        is_prefill = len(batch.token_ids) - len(rows) >= self._page_tokens  # a decode row costs more
        if is_prefill:
            self._timer.begin()
        logits = self._runner.forward(batch)
        if is_prefill:
            self._timer.end([(_attended(row), row.length) for row in rows])
        now = time.monotonic()
        self._measure(now)
        to_save = converted + self._scheduler.computed(now)
        sampled = [row.seq for row in rows if row.samples]
        if len(logits) > len(sampled):
            logits, sampled = self._tell_prompts(rows, sampled, logits, now)
        self._sample(sampled, logits, now)
        if to_save:
            self._send_outputs()  # saving can wait for a moment, clients shouldn't
            self._pager.save(to_save, now)

    def _batch(self, rows: list[Row]) -> StepBatch:
        token_ids, positions = self._token_ids, self._positions
        page_tokens = self._page_tokens
        sequences: list[SequenceRows] = []
        logit_rows: list[int] = []
        prompt_rows: list[int] = []  # behind those that sample
        at = 0
        for row in rows:
            seq, start, length = row.seq, row.start, row.length
            end = start + length
            if length == 1:
                token_ids[at] = seq.tokens[start]
                positions[at] = start
            else:
                token_ids[at : at + length] = seq.tokens[start:end]
                np.add(self._counting[:length], start, out=positions[at : at + length])
            pages = tuple(
                GroupPages(*group.run(-(-end // page_tokens)), needs.window.tokens, needs.window.sinks)
                for group, needs in zip(seq.groups, seq.request.namespace.needs, strict=True)
            )
            sequences.append(SequenceRows(at, length, end, pages))
            prompt_rows.extend(range(at, at + self._prompt_logprobs.rows(row)))
            at += length
            if row.samples:
                logit_rows.append(at - 1)
        wanted = np.array(logit_rows + prompt_rows, np.int32)
        return StepBatch(token_ids[:at], positions[:at], sequences, wanted)

    def _measure(self, now: float) -> None:
        measured = list(self._timer.finished())
        for rows, seconds in measured:
            self._costs.measure(rows, seconds)
        if measured:
            self._table.policy.costs = self._costs.costs

    # Sampling and outputs

    def _tell_prompts(
        self, rows: list[Row], sampled: list[Sequence], logits: torch.Tensor, now: float
    ) -> tuple[torch.Tensor, list[Sequence]]:
        """Log probabilities of prompt tokens, whose logits lie behind those that sample; what is left to sample."""
        at = len(sampled)
        for row in rows:
            count = self._prompt_logprobs.rows(row)
            mine, at = logits[at : at + count], at + count
            if not count or row.seq.state is SequenceState.FINISHED:
                continue
            try:
                output = self._prompt_logprobs.output(row, mine)
            except Exception as error:  # noqa: BLE001  # it ends its request, whatever it is
                self._end_faulty(row.seq.request, "reading its prompt's log probabilities", error, now)
                continue
            if output is not None:
                self._outputs.append(output)
        left = [i for i, seq in enumerate(sampled) if seq.state is not SequenceState.FINISHED]
        return logits[left], [sampled[i] for i in left]

    def _sample(self, seqs: list[Sequence], logits: torch.Tensor, now: float) -> None:
        if not seqs:
            return
        assert len(logits) == len(seqs)
        picks = list(range(len(seqs)))
        for i, seq in enumerate(seqs[:]):
            siblings = self._siblings(seq, now)
            seqs += siblings
            picks += [i] * len(siblings)
        if len(picks) > len(logits):
            logits = logits[picks]
        drawn = self._sampler.draw(seqs, logits)
        tokens, logprobs = drawn.tokens, drawn.logprobs
        for seq in seqs:
            if seq.state is SequenceState.WAITING:
                self._ops.run(self._scheduler.fork(seq.request.sequences[0], seq, now))
                if seq.state is SequenceState.WAITING:
                    self._sampler.forget(seq)
        firsts = self._append(seqs, tokens, now)
        for i, seq in enumerate(seqs):
            if i in drawn.faults and seq.state is not SequenceState.FINISHED:
                self._end_faulty(seq.request, "sampling", drawn.faults[i], now)
            self._take(seq, tokens[i], logprobs[i] if logprobs else None, now, is_first=seq in firsts)

    def _append(self, seqs: list[Sequence], tokens: list[int | None], now: float) -> list[Sequence]:
        """Give each sequence its token, but for those that a sibling before them takes along: it has none.

        Those whose token is their request's first.
        """
        sampled = [token for token in tokens if token is not None]
        if len(sampled) < len(seqs):
            seqs, sampled = _before_their_ends(seqs, tokens)
        return self._scheduler.sampled(seqs, sampled, now)

    def _siblings(self, seq: Sequence, now: float) -> list[Sequence]:
        """The other sequences of a request whose prompt has just been computed; made now."""
        request = seq.request
        if request.usage is not None or request.spec.sampling.n == 1 or request.spec.is_resumed:
            return []
        return self._scheduler.siblings(seq, self._longest(request.spec))

    def _take(
        self, seq: Sequence, token: int | None, logprobs: TokenLogprobs | None, now: float, *, is_first: bool
    ) -> None:
        """One sequence's new token, which it has: tell the client, and end the sequence where it ends."""
        request = seq.request
        if seq.state is SequenceState.FINISHED:
            return  # a sibling's bad logits ended the whole request
        if token is None:
            self._end_request(request, FinishReason.ERROR, now, "the model's output was not a number")
            return
        if is_first:
            self._request_metrics.count(request, now)
        reason = seq.ends_with(token)
        last = reason is not None
        self._outputs.append(
            Output(
                request_id=request.spec.request_id,
                index=seq.index,
                token_ids=(token,),
                logprobs=(logprobs,) if logprobs is not None else (),
                finish_reason=reason,
                usage=request.usage_of(seq.completion_tokens) if is_first or last else None,
                timings=request.timings(now) if is_first or last else None,
            )
        )
        if reason is not None:
            self._retire(seq, reason, now)
        elif request.spec.is_prefill_only:
            self._hand_off(seq, now)

    def _send_outputs(self, *, is_due: bool = False) -> None:
        """`is_due`: the loop has turned, which is told even if there is nothing else to tell."""
        now = time.monotonic()
        if self._outputs or (is_due and now - self._told_s >= TURN_S):
            outputs, self._outputs = self._outputs, []
            self._told_s = now
            self._sink(outputs)

    # Requests

    def _validate(self, spec: EngineRequest) -> None:
        spec.sampling.validate()
        spec.validate_resumed()
        if not spec.token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        if spec.tenant not in self._roots.tenants:
            raise ValueError(f"unknown tenant {spec.tenant!r}")
        vocab_size = self._runner.vocab_size
        stops = spec.sampling.stop_ids
        biased = tuple(token for token, _ in spec.sampling.logit_bias)
        for tokens in filter(None, (spec.token_ids, *spec.resumed, stops, biased)):
            for token in (min(tokens), max(tokens)):
                if not 0 <= token < vocab_size:
                    raise ValueError(f"token {token} is not in the vocabulary of {vocab_size} tokens")
        if spec.sampling.prompt_logprobs and len(spec.token_ids) > MAX_TOLD_PROMPT:
            raise ValueError(
                f"prompt_logprobs are told of prompts of at most {MAX_TOLD_PROMPT} tokens, got {len(spec.token_ids)}"
            )
        if spec.sampling.min_tokens and len({*stops, *self._eos_ids}) >= vocab_size:
            raise ValueError(f"min_tokens needs a token that ends nothing, and all {vocab_size} are stop ids")
        kind = self._kind(spec)
        length, longest = len(spec.token_ids), self._roots.longest(kind)
        if length >= longest:
            raise ValueError(f"prompt of {length} tokens leaves no room in the context of {longest}")
        answer = min(spec.sampling.max_tokens, longest - length)
        if any(len(tokens) >= answer for index, tokens in enumerate(spec.resumed) if index not in spec.ended):
            raise ValueError(
                f"resumed leaves no room behind a prompt of {length} tokens in the context of {longest}"
            )
        self._scheduler.check_fits(length, answer, self._roots.needs_of(kind))
        if spec.request_id in self._requests or spec.request_id in self._handoffs:
            raise ValueError(f"request {spec.request_id!r} is in flight already")

    def _accept(self, event: _Submitted) -> None:
        spec = event.spec
        if spec.sampling.prompt_logprobs:
            spec = replace(spec, use_cache=False)
        if self._stop_at_s is not None:
            self._outputs += _refused(spec, FinishReason.CANCELLED, "the worker is stopping")
            return
        if spec.request_id in self._requests or spec.request_id in self._handoffs:
            self._outputs += _refused(spec, FinishReason.ERROR, "its id is in flight already")
            return
        for tenant, number in self._l1_admin.behind([(tenant_digest(spec.tenant), spec.cleared)]):
            self._clear(tenant, number)
        namespace = self._roots.namespace(spec.tenant, self._kind(spec))
        turn = self._turns.count(spec.session, spec.turn, closed=spec.session_closed)
        self._requests[spec.request_id] = self._scheduler.submit(
            spec,
            self._next_number,
            namespace,
            self._longest(spec),
            submitted_s=event.submitted_s,
            wall_s=event.wall_s,
            turn=turn,
        )
        self._next_number += spec.sampling.n

    def _longest(self, spec: EngineRequest) -> int:
        return self._roots.longest(self._kind(spec))

    def _kind(self, spec: EngineRequest) -> Kind:
        return self._roots.kind_of(spec.window, spec.sinks, spec.lossy)

    def _longest_context(self) -> int:
        """Tokens that a request without a window of its own may have, prompt and answer."""
        kind = self._roots.kind_of(0, 0, False)
        needs = self._roots.needs_of(kind)
        fits, too_long = 0, self._roots.longest(kind) + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            try:
                self._scheduler.check_fits(middle, 1, needs)
                fits = middle
            except ValueError:
                too_long = middle
        return fits

    def _cancel(self, event: _Cancelled) -> None:
        request = self._requests.get(event.request_id)
        reason = FinishReason.STOP if event.is_stopped else FinishReason.CANCELLED
        now = time.monotonic()
        if request is not None:
            self._end_request(request, reason, now)
        self._outputs += self._handoffs.end(event.request_id, reason, now)

    def _cancel_all(self) -> None:
        now = time.monotonic()
        for request in list(self._requests.values()):
            self._end_request(request, FinishReason.CANCELLED, now)
        self._outputs += self._handoffs.end_all(FinishReason.CANCELLED, now)

    def _hand_off(self, seq: Sequence, now: float) -> None:
        """A sequence has given the one token that it was to give here: its last word comes when its pages are saved."""
        _, keys = self._scheduler.use_of(seq, seq.kind(FinishReason.PREFILLED))
        self._handoffs.begin(seq.request, seq.index, (key for chain in keys for key in chain), now)
        self._retire(seq, FinishReason.PREFILLED, now)

    def _end_handoffs(self, now: float) -> None:
        new = self._handoffs.take_new()
        if new:
            self._pager.save_now([record for key in new for record in self._table.records_of(key)], now)
        self._outputs += self._handoffs.over(now, self._is_saved)
        self._send_outputs()

    def _is_saved(self, key: PageKey) -> bool:
        """There is nothing to wait for: the page is below L1, or not to be saved from here any more."""
        if not self._link.is_up:
            return True
        return all(record.save is SaveState.CLEAN for record in self._table.records_of(key))

    def _end_request(
        self, request: Request, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        """End every sequence of the request that isn't over, those not made yet too."""
        self._request_metrics.totals.failed_requests += reason is FinishReason.ERROR
        over = {seq.index for seq in request.sequences if seq.state is SequenceState.FINISHED}
        over.update(request.spec.ended)
        made = {seq.index: seq for seq in request.sequences}
        for index in range(request.spec.sampling.n):
            if index in over:
                continue
            tokens = made[index].completion_tokens if index in made else 0
            self._outputs.append(
                Output(
                    request_id=request.spec.request_id,
                    index=index,
                    token_ids=(),
                    finish_reason=reason,
                    usage=request.usage_of(tokens),
                    timings=request.timings(now),
                    error=error,
                )
            )
        for seq in request.sequences:
            if seq.index not in over:
                self._retire(seq, reason, now)
        if request.spec.request_id in self._requests:
            self._close_request(request)

    def _give_up_starved(self, now: float) -> None:
        seq = self._pager.given_up(now)
        if seq is not None:
            why = "peers don't give back the room in L1 that was lent to them, and it needs that"
            self._end_request(seq.request, FinishReason.CANCELLED, now, why)

    def _retire(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence is over: its pages go back; cached ones stay cached."""
        kind = seq.kind(reason)
        if reason is not FinishReason.PREFILLED:  # else it isn't over, and will be elsewhere
            self._pager.finished(seq, kind, now)
        self._pager.forget(seq)
        self._sampler.forget(seq)
        self._scheduler.finish(seq, now, reason, kind)
        request = seq.request
        request.unfinished -= 1
        if not request.unfinished:
            self._close_request(request)

    def _close_request(self, request: Request) -> None:
        del self._requests[request.spec.request_id]
        self._prompt_logprobs.forget(request)
        self._request_metrics.close(request, time.monotonic())

    def _begin_stop(self, deadline_s: float) -> None:
        if self._stop_at_s is None:
            self._stop_at_s = deadline_s
            for request in list(self._requests.values()):
                self._end_request(request, FinishReason.CANCELLED, time.monotonic(), "the worker is stopping")
            self._outputs += self._handoffs.end_all(FinishReason.PREFILLED, time.monotonic())
            self._send_outputs()
            self._pager.save_all(time.monotonic())

    def _fail_all(self) -> None:
        """The loop can't go on: nothing may wait for it."""
        for request in self._requests.values():
            self._outputs += _refused(request.spec, FinishReason.CANCELLED, f"{WORKER_FAILED}: {self._error}")
        self._requests.clear()
        self._outputs += self._handoffs.end_all(FinishReason.PREFILLED, time.monotonic())
        self._send_outputs()

    def _close(self) -> None:
        """After this nothing waits for the loop: what comes too late is answered here."""
        self._is_over = True
        self._copier.close()
        self._pager.close()
        self._link.close()
        if self._share is not None:
            self._share.close()
        for event in self._inbox.take(0):
            match event:
                case _Call():
                    event.result.set_exception(WorkerStopped(self._error or "the worker has stopped"))
                case _Submitted():
                    self._outputs += _refused(event.spec, FinishReason.CANCELLED, "the worker has stopped")
                case Connected():
                    event.close()
                case _:
                    pass
        self._send_outputs()

    def _refuse_if_over(self) -> None:
        if self._is_over or self.error is not None:
            raise WorkerStopped(self.error or "the worker has stopped")

    # Administration, on the step loop

    def _call(self, function: Callable[[], T]) -> T:
        self._refuse_if_over()
        result: Future[T] = Future()
        if not self._inbox.offer(_Call(function, result)):
            raise QueueFull(
                f"worker {self.worker_id} is {self._inbox.capacity} calls behind: try again later"
            )
        return result.result(timeout=ADMIN_TIMEOUT_S)

    def _follow(self, on_holds: Callable[[list[PageKey], list[PageKey]], None] | None) -> None:
        self._on_holds = on_holds
        self._table.touched = None if on_holds is None else {}

    def _tell_holds(self) -> None:
        if self._on_holds is not None and self._table.touched:
            self._on_holds(*self._table.take_changes())

    def _snapshot(self) -> Snapshot:
        level1 = self._l1_admin.counters()
        level1.add(self._request_metrics.tiers[TierName.HBM])
        below: dict[TierName, TierCounters] = {
            tier: replace(counters)
            for tier, counters in self._request_metrics.tiers.items()
            if tier is not TierName.HBM
        }
        held, filled = self._table.fill(self._scheduler.active)
        totals = replace(
            self._request_metrics.totals,
            used_page_tokens=filled,
            held_page_tokens=held * self._page_tokens,
        )
        return Snapshot({TierName.HBM: level1, **below}, totals)

    def _clear(self, tenant: str | None, number: int = 0) -> Outcomes:
        requests = self._requests.values()
        outcomes = self._l1_admin.clear(tenant, [request.namespace for request in requests], number)
        for request in requests:
            request.namespace = self._roots.namespace(request.spec.tenant, self._kind(request.spec))
        return outcomes

    def _is_idle(self) -> bool:
        return not self._requests and not self._handoffs and self._pager.is_quiet

    def _check(self) -> None:
        self._scheduler.check()
        self._request_metrics.check()
        self._pager.check()
        self._sampler.check(self._scheduler.active)
        sequences = [seq for request in self._requests.values() for seq in request.sequences]
        unfinished = sum(seq.state is not SequenceState.FINISHED for seq in sequences)
        assert unfinished == self._scheduler.unfinished, "sequences of no request"
        if self._is_idle():
            assert not self._table.copies_in_flight and not self._table.limbo, "copies of an idle worker"
            assert not self._scheduler.claims, "claims of an idle worker"


def _attended(row: Row) -> int:
    """Tokens before the row's first one that it attends."""
    namespace = row.seq.request.namespace
    return min(row.start, namespace.needs[0].window.tokens) if namespace.is_stream else row.start


def _before_their_ends(seqs: list[Sequence], tokens: list[int | None]) -> tuple[list[Sequence], list[int]]:
    """Those that have a token, with it, but for those behind a sibling that has none."""
    ended: set[Request] = set()
    left: list[Sequence] = []
    sampled: list[int] = []
    for seq, token in zip(seqs, tokens, strict=True):
        if token is None:
            ended.add(seq.request)
        elif seq.request not in ended:
            left.append(seq)
            sampled.append(token)
    return left, sampled


def _refused(spec: EngineRequest, reason: FinishReason, error: str) -> list[Output]:
    """The last word on each sequence of a request that this worker does nothing more for."""
    wanted = (index for index in range(spec.sampling.n) if index not in spec.ended)
    return [Output(spec.request_id, index, (), finish_reason=reason, error=error) for index in wanted]


def _answer(call: _Call) -> None:
    try:
        call.result.set_result(call.function())
    except Exception as error:  # noqa: BLE001  # it belongs to the caller, whatever it is
        call.result.set_exception(error)
