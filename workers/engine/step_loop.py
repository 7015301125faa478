"""The step loop of a worker: admit, schedule, forward, sample, send."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import PageKey, PageSpec, TierName
from kvtier.tier.policy.plugins import load_policies
from kvtier.tier.policy.registry import make_policy
from kvtier.tier.protocol.messages import Hello, NewRoot
from kvtier.tier.stats import Snapshot, TierCounters
from kvtier.workers.engine.batch import BatchBuilder
from kvtier.workers.engine.heartbeat import TURN_S, Heartbeat
from kvtier.workers.engine.inbox import Inbox
from kvtier.workers.engine.metrics import RequestMetrics
from kvtier.workers.engine.outputs import StepOutputs
from kvtier.workers.engine.requests import Requests, Submitted, refused
from kvtier.workers.engine.sampling.prompt_logprobs import PromptLogprobs
from kvtier.workers.engine.sampling.token_sampler import TokenSampler
from kvtier.workers.engine.tokens import TokenOutputs
from kvtier.workers.node_io.admin import L1Admin
from kvtier.workers.node_io.arena_ops import ArenaOps
from kvtier.workers.node_io.namespaces import Namespaces
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
from kvtier.workers.requests.api import FinishReason, Output, WorkerStopped
from kvtier.workers.requests.sequence import Sequence, SequenceState
from kvtier.workers.runner.prefill_costs import PrefillCosts
from kvtier.workers.runner.runner import ModelRunner, StepBatch
from kvtier.workers.runner.step_timer import step_timer
from kvtier.workers.scheduling.scheduler import Row, Scheduler
from kvtier.workers.scheduling.settings import EngineSettings

log = logging.getLogger(__name__)

WATERMARK_SHARE = (
    4  # of L1, at most, is saved ahead of need where pages are saved when they leave: two steps' prefill
)
L2_WATERMARK_PARTS = 8  # one part in so many of L1 is chosen ahead of need, to go to peers
MOST_BORROWED = 32  # of peers' frames in stock, for each size of page
ADMIN_CALLS = 256  # waiting at once, cancellations included
# What a verb on all pages does in one turn of the step loop: checksums of so many bytes take some 10 ms, as evicting so
# many pages does.
PART_BYTES = 64 << 20
PART_PAGES = 1024


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A request is to end; `is_stopped`: its client has the whole answer."""

    request_id: str
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class CancelledAll:
    """All requests are to end."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy job is over."""

    job: Job


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` on the step loop. Its result, or what it raises, goes into `result`."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """End what runs, save until `deadline_s`, and end."""

    deadline_s: float


Event = Submitted | Cancelled | CancelledAll | Copied | Call | Stop | LinkEvent


class StepLoop:
    """Everything that a worker's loop owns. `inbox` and what is said to be for any thread aside, only its thread touches it."""

    error: str | None  # why the loop has ended, where a fault ended it
    has_ended: threading.Event  # and its last outputs are sent
    heartbeat: Heartbeat
    _stop_at_s: float | None

    def run(self) -> None:
        """Admit, schedule, forward, sample, send; until `Stop` is done or a step fails."""
        self.link.start()
        busy = False
        try:
            while not self._is_finished():
                for event in self.inbox.take(0 if busy else self._poll_timeout_s()):
                    self._handle(event)
                self.heartbeat.turned()
                self.pager.expire(time.monotonic())
                self.requests.give_up_starved(time.monotonic())
                busy = self._step()
                self.outputs.send(is_due=True)
                self.pager.flush(time.monotonic())
                self._tell_holds()
                if self.requests.handoffs:
                    self.requests.end_handoffs(time.monotonic())
        except Exception as error:
            log.exception("the step loop failed")
            self.error = f"{type(error).__name__}: {error}"
            self.requests.fail_all(self.error)
        finally:
            self.has_ended.set()
            self.close()

    def _step(self) -> bool:
        """One step; whether the next one can follow at once."""
        scheduler = self.scheduler
        if not scheduler.unfinished:
            self.waiting = 0
            return False
        now = time.monotonic()
        step = scheduler.schedule(now, can_load=self.link.is_up, free_slots=self.link.stock())
        self.waiting = len(scheduler.waiting)
        # Before anything else may read or write the frames that these name.
        self.ops.run(step.ops)
        for demotion in step.demotions:
            self.pager.demote(demotion)
            self.sampler.forget(demotion.seq)
        for lease in step.leases_over:
            self.pager.release(lease)
        for seq in step.loads:
            self._locate(seq, now)
        if step.broken_pins:
            log.warning("%d pinned pages were unpinned: a request needed their room in L1", step.broken_pins)
        had_rows = bool(step.rows)
        rows, batch = self._rows(now)
        if batch is not None:
            self._compute(rows, batch, step.converted)
        elif step.converted:
            self.pager.save(step.converted, now)
        elif not (
            had_rows
            or step.ops
            or step.demotions
            or step.loads
            or self.pager.in_flight
            or self.table.lent_bytes
        ):
            raise RuntimeError(f"{scheduler.unfinished} sequences, and none can go on")
        return bool(had_rows or step.ops or step.demotions)

    def _compute(self, rows: list[Row], batch: StepBatch, converted: list[PageRecord]) -> None:
        is_prefill = len(batch.token_ids) - len(rows) >= self.page_tokens  # a decode row costs more
        if is_prefill:
            self._timer.begin()
        logits = self.runner.forward(batch)
        if is_prefill:
            self._timer.end([(_attended(row), row.length) for row in rows])
        now = time.monotonic()
        self._measure(now)
        to_save = converted + self.scheduler.computed(now)
        sampled = [row.seq for row in rows if row.samples]
        if len(logits) > len(sampled):
            logits, sampled = self.tokens.tell_prompts(rows, sampled, logits, now)
        self.tokens.sample(sampled, logits, now)
        if to_save:
            self.outputs.send()  # saving can wait for a moment, clients shouldn't
            self.pager.save(to_save, now)

    def _rows(self, now: float) -> tuple[list[Row], StepBatch | None]:
        """The step's rows, and the batch of them; rows that raise end with their requests, and the others stay."""
        while rows := list(self.scheduler.rows):
            try:
                return rows, self.batch.build(rows)
            except Exception:
                for row in rows:
                    self._try_alone(row, now)
                if len(self.scheduler.rows) == len(rows):
                    raise  # none of them did it
        return [], None

    def _try_alone(self, row: Row, now: float) -> None:
        if row.seq.state is SequenceState.FINISHED:
            return
        try:
            self.batch.build([row])
        except Exception as error:  # noqa: BLE001  # likewise
            self.requests.end_faulty(row.seq.request, "building its rows", error, now)

    def _locate(self, seq: Sequence, now: float) -> None:
        if seq.state is SequenceState.FINISHED:
            return  # with a sibling that raised
        try:
            self.pager.locate(seq)
        except Exception as error:  # noqa: BLE001  # it ends its request, whatever it is
            self.requests.end_faulty(seq.request, "asking for its pages", error, now)

    def _measure(self, now: float) -> None:
        measured = list(self._timer.finished())
        for rows, seconds in measured:
            self._costs.measure(rows, seconds)
        if measured:
            self.table.policy.costs = self._costs.costs

    def _handle(self, event: Event) -> None:
        match event:
            case Submitted():
                self.requests.accept(event)
            case Cancelled():
                self.requests.cancel(event.request_id, is_stopped=event.is_stopped)
            case CancelledAll():
                self.requests.cancel_all()
            case Copied():
                self.pager.on_copied(event.job, time.monotonic())
            case Call():
                if event.result.set_running_or_notify_cancel():
                    _answer(event)
            case Stop():
                self._begin_stop(event.deadline_s)
            case Connected() | ConnectionLost() | ConnectionRefused() | NodeMessage():
                self.pager.on_link(event, time.monotonic())

    def _poll_timeout_s(self) -> float:
        """How long the loop may sleep when no event comes."""
        deadlines = (self.pager.next_deadline_s, self.requests.handoffs.next_deadline_s, self._stop_at_s)
        times = [t for t in deadlines if t is not None]
        return min(TURN_S, max(0.001, min(times) - time.monotonic())) if times else TURN_S

    def _begin_stop(self, deadline_s: float) -> None:
        if self._stop_at_s is None:
            self._stop_at_s = deadline_s
            self.requests.stop()

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineSettings,
        *,
        worker_id: str,
        socket_path: str | None,
        tenants: Mapping[str, bytes],
        sink: Callable[[list[Output]], None],
    ) -> None:
        """Makes all parts; `thread` is not started."""
        l2_share = settings.l2_share
        if l2_share and runner.share is None:
            raise ValueError(
                f"l2_share {l2_share} needs an arena that peers can open: load_runner(share_arena=True)"
            )
        load_policies()
        specs = _specs(runner)
        self.runner = runner
        self.page_tokens = runner.page_tokens
        self.outputs = StepOutputs(sink)
        self.inbox: Inbox[Event] = Inbox(settings.max_waiting + ADMIN_CALLS)
        self.table = _page_table(runner, settings)
        # Some configs name ids that the model has no logits for: none of them can ever come.
        self.eos_ids = tuple(token for token in runner.eos_ids if 0 <= token < runner.vocab_size)
        self.scheduler = Scheduler(
            self.table,
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=min(settings.max_sequences, settings.max_batch_tokens),
            load_deadline_s=settings.load_deadline_ms / 1e3,
            weights=settings.preemption,
            eos_ids=self.eos_ids,
        )
        stock = _stock(runner, settings)
        self._share = runner.share if l2_share else None
        hello = _hello(runner, settings, worker_id)
        frames, copies = runner.open_l1()
        self.link = NodeLink(
            socket_path,
            hello,
            stock,
            self.inbox.put,
            pin_slab=runner.arena.device.type == "cuda",  # a group's processors read slots, not its GPUs
            share=self._share,
            follow=copies.follow,
        )
        self.namespaces = Namespaces(runner, tenants, lambda fields: self.link.send(NewRoot(fields)))
        self.ops = ArenaOps(frames, runner)
        self._copier = Copier(copies, settings.copy_threads, lambda job: self.inbox.put(Copied(job)))
        self.pager = Pager(
            scheduler=self.scheduler,
            link=self.link,
            copier=self._copier,
            ops=self.ops,
            roots=self.namespaces,
            groups=runner.groups,
            l4_format=runner.l4_format,
            memory=runner.arena.numpy() if runner.arena.device.type == "cpu" else None,
            lender=PeerExport(self.scheduler, self.link, l2_share),
            borrower=PeerImport(
                self.table,
                self.link,
                {spec.digest: spec for spec in specs},
                runner.device,
                min(stock, MOST_BORROWED) if l2_share else 0,
            ),
            is_through=settings.write == "through",
            always_load=settings.always_load,
        )
        self._on_holds: Callable[[list[PageKey], list[PageKey]], None] | None = None
        self.part_pages = max(1, min(PART_PAGES, PART_BYTES // max(spec.nbytes for spec in specs)))
        self.metrics = RequestMetrics(self.table, worker_id, has_l2=l2_share > 0)
        self.l1_admin = L1Admin(
            worker_id=worker_id,
            roots=self.namespaces,
            table=self.table,
            pager=self.pager,
            groups=runner.groups,
            raw_format=runner.raw_format,
            clock=time.monotonic,
        )
        self._costs = PrefillCosts(runner.page_tokens)
        self._timer = step_timer(runner.device)
        self.sampler = TokenSampler()
        prompt_logprobs = PromptLogprobs()
        self.requests = Requests(
            runner=runner,
            namespaces=self.namespaces,
            scheduler=self.scheduler,
            pager=self.pager,
            link=self.link,
            l1_admin=self.l1_admin,
            sampler=self.sampler,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            outputs=self.outputs,
        )
        self.tokens = TokenOutputs(
            scheduler=self.scheduler,
            ops=self.ops,
            requests=self.requests,
            sampler=self.sampler,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            outputs=self.outputs,
        )
        self.batch = BatchBuilder(runner.page_tokens, settings.max_batch_tokens, prompt_logprobs)
        self._stop_at_s = None
        self.error = None
        self.is_over = False
        self.has_ended = threading.Event()  # the loop has, and its last outputs are sent
        self.waiting = 0  # requests queued, as of the last step
        self.thread = threading.Thread(target=self.run, name=f"step-loop-{worker_id}", daemon=True)
        self.heartbeat = Heartbeat(self.thread)

    # What other threads ask, by `Call`

    def _is_finished(self) -> bool:
        if self._stop_at_s is None:
            return False
        return self.pager.is_quiet or time.monotonic() >= self._stop_at_s

    def _tell_holds(self) -> None:
        if self._on_holds is not None and self.table.touched:
            self._on_holds(*self.table.take_changes())

    def follow(self, on_holds: Callable[[list[PageKey], list[PageKey]], None] | None) -> None:
        """See DecodeWorker.follow_holds."""
        self._on_holds = on_holds
        self.table.touched = None if on_holds is None else {}

    def snapshot(self) -> Snapshot:
        """See DecodeWorker.stats."""
        level1 = self.l1_admin.counters()
        level1.add(self.metrics.tiers[TierName.HBM])
        below: dict[TierName, TierCounters] = {
            tier: replace(counters)
            for tier, counters in self.metrics.tiers.items()
            if tier is not TierName.HBM
        }
        held, filled = self.table.fill(self.scheduler.active)
        totals = replace(
            self.metrics.totals,
            used_page_tokens=filled,
            held_page_tokens=held * self.page_tokens,
        )
        return Snapshot({TierName.HBM: level1, **below}, totals)

    def is_idle(self) -> bool:
        """No request, no copy, nothing left to save."""
        return not self.requests.live and not self.requests.handoffs and self.pager.is_quiet

    def check(self) -> None:
        """Re-derive all counts from scratch; AssertionError where one differs."""
        self.scheduler.check()
        self.metrics.check()
        self.pager.check()
        self.sampler.check(self.scheduler.active)
        sequences = [seq for request in self.requests.live.values() for seq in request.sequences]
        unfinished = sum(seq.state is not SequenceState.FINISHED for seq in sequences)
        assert unfinished == self.scheduler.unfinished, "sequences of no request"
        if self.is_idle():
            assert not self.table.copies_in_flight and not self.table.limbo, "copies of an idle worker"
            assert not self.scheduler.claims, "claims of an idle worker"

    def close(self) -> None:
        """After this nothing waits for the loop: what comes too late is answered here."""
        self.is_over = True
        self._copier.close()
        self.pager.close()
        self.link.close()
        if self._share is not None:
            self._share.close()
        for event in self.inbox.take(0):
            match event:
                case Call():
                    event.result.set_exception(WorkerStopped(self.error or "the worker has stopped"))
                case Submitted():
                    self.outputs.pending += refused(
                        event.spec, FinishReason.CANCELLED, "the worker has stopped"
                    )
                case Connected():
                    event.close()
                case _:
                    pass
        self.outputs.send()


def _specs(runner: ModelRunner) -> list[PageSpec]:
    return [spec for group in runner.groups for spec in group.specs.values()]


def _stock(runner: ModelRunner, settings: EngineSettings) -> int:
    """Slots of L3 that a worker has at hand: two steps' prefill."""
    return max(16, 2 * -(-settings.max_batch_tokens // runner.page_tokens))


def _page_table(runner: ModelRunner, settings: EngineSettings) -> PageTable:
    units, unit_bytes = runner.arena.shape
    largest = max(spec.nbytes for spec in _specs(runner))
    table = PageTable(
        units,
        unit_bytes,
        runner.page_tokens,
        tuple({format: spec.nbytes for format, spec in group.specs.items()} for group in runner.groups),
        make_policy(settings.policy, max(1, runner.arena.nbytes // largest)),
        {tenant_digest(name): share for name, share in settings.shares.items()},
    )
    if settings.write == "demote":
        ahead = min(_stock(runner, settings) * largest, runner.arena.nbytes // WATERMARK_SHARE)
        table.save_loaded = SaveState.DIRTY
        table.watermark_bytes = max(1, ahead)
    elif settings.l2_share:
        table.watermark_bytes = max(1, runner.arena.nbytes // L2_WATERMARK_PARTS)
    return table


def _hello(runner: ModelRunner, settings: EngineSettings, worker_id: str) -> Hello:
    share = runner.share if settings.l2_share else None
    specs = _specs(runner)
    return Hello.of_worker(
        worker_id,
        uuid.uuid4().hex,
        payloads={spec.digest: spec.nbytes for spec in specs},
        raw_payloads={spec.digest: replace(spec, format=runner.raw_format).nbytes for spec in specs},
        root_fields=runner.root_fields(),
        write=settings.write,
        arena_bytes=0 if share is None else share.nbytes,
        arena_handle=b"" if share is None else share.handle,
    )


def _attended(row: Row) -> int:
    """Tokens before the row's first one that it attends."""
    namespace = row.seq.request.namespace
    return min(row.start, namespace.needs[0].window.tokens) if namespace.is_stream else row.start


def _answer(call: Call) -> None:
    try:
        call.result.set_result(call.function())
    except Exception as error:  # noqa: BLE001  # it belongs to the caller, whatever it is
        call.result.set_exception(error)
