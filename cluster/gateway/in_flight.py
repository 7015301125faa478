"""Requests in flight, on their way from worker to worker: placed, submitted, moved, handed over, and let go.

A request whose worker is lost goes on at another one, which computes its prompt and what it has given, as far as that
isn't cached, and gives the same tokens from there on (EngineRequest.resumed). So does one whose worker only prefills.

Everything here runs on one event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.owners.ask import together
from kvtier.cluster.gateway.owners.locations import Addresses
from kvtier.cluster.gateway.owners.suspects import Suspects
from kvtier.cluster.gateway.owners.workers import Worker, Workers
from kvtier.cluster.gateway.ports import DEAD, HEALTHY, STALLED, OwnerDown, WorkerPort, asked_health
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.cluster.gateway.streams.streams import Attempt, Stream
from kvtier.cluster.routing.router import Policy
from kvtier.proto import inference_pb2
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.identity import tenant_digest
from kvtier.workers.engine.heartbeat import TURN_S
from kvtier.workers.requests.api import (
    WORKER_FAILED,
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    WorkerInfo,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

LAST_WORD_S = 10.0  # a worker that doesn't end a cancelled request in this time is not waited for
MAX_MOVES = (
    3  # of a request to another worker since its own was lost: more outlives more, but a bad one breaks more
)
REMEMBERED = 1024  # latest requests: where they were, for `explain`


class InFlightRequests:
    """Owned by the event loop it is used on. GatewayCore adds how requests come in.

    At most `max_sequences` sequences per worker are in flight. A request id is taken until its call has ended and its
    worker has said its last word on it, or isn't waited for any longer. At workers every attempt has a name that no
    other one ever has, so what a worker says late is never taken for another request's.
    """

    def __init__(
        self,
        workers: Iterable[tuple[WorkerInfo, WorkerPort]],
        max_sequences: int,
        policy: Policy,
        clears: Clears,
    ) -> None:
        there = list(workers)
        if not there:
            raise ValueError("a gateway needs at least one worker")
        self.info = there[0][0]
        self.addresses = Addresses()
        self._clears = clears  # to be read
        self.health_changed = asyncio.Event()  # whether any worker is well may be another answer now
        self._workers = Workers(max_sequences, self.info.page_bytes, policy)
        for info, port in there:
            self._workers.add(info, port)
        self._streams: dict[str, Stream] = {}
        self._suspects = Suspects()
        self._left: dict[str, Worker] = {}  # of suspects that wait: where they were
        self._nonce = secrets.token_hex(4)  # of this gateway: workers may know the names that others gave
        self._attempts = 0
        self._latest: OrderedDict[str, list[Attempt]] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = (
            set()
        )  # submissions and cancellations under way, a few per stream
        self._submitting: dict[str, asyncio.Task[bool]] = {}  # by the name at the worker
        self._unwanted: set[str] = set()  # of these, what nothing waits for any more

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Those there are, by id; those that are down too, as long as they may come back."""
        return self._workers.by_id

    @property
    def is_healthy(self) -> bool:
        """A worker is there to take requests."""
        return self._workers.is_any_well

    @property
    def in_flight(self) -> int:
        """Requests whose call or whose work has not ended."""
        return len(self._streams)

    async def settle(self) -> None:
        """Until the cancellations under way are done, or as long as they may take."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORD_S)

    async def worker_statuses(self) -> list[inference_pb2.WorkerStatus]:
        """Workers as `kvtier status` shows them; asks each how it is."""
        return await together(map(self._worker_status, list(self._workers)))

    async def _worker_status(self, worker: Worker) -> inference_pb2.WorkerStatus:
        health, detail = await self._health(worker)
        if health == DEAD:
            self.lose(worker, detail)
        return inference_pb2.WorkerStatus(
            id=worker.info.worker_id,
            node=worker.info.node_id,
            pid=worker.info.pid,
            role=worker.info.role,
            health=health,
            detail=detail,
            in_flight=len(worker.streams),
            since=worker.condition.is_now(health, time.time()),
        )

    async def _health(self, worker: Worker) -> tuple[str, str]:
        if worker.down is not None:
            return DEAD, worker.down
        if worker.is_stalled:
            return STALLED, f"nothing is heard of it for {worker.unheard * TURN_S:g} s"
        return await asked_health(worker.port)

    def attempts(self, request_id: str) -> list[Attempt]:
        """Where the latest request of this id was, from worker to worker; none when it isn't remembered."""
        return self._latest.get(request_id, [])

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"request {request_id!r} is in flight")

    # ---- from worker to worker ---------------------------------------------------------------------------------

    def _place(
        self, stream: Stream, held: Iterable[Held], *, wanted: str = "", avoid: frozenset[str] = frozenset()
    ) -> None:
        """The stream begins, or goes on, at the best worker. Raises Refusal where there is none for it."""
        picked = self._workers.pick(stream, self.info.page_tokens, held, wanted=wanted, avoid=avoid)
        name = self._name_at_worker(stream)
        self._workers.place(picked, name, stream)
        request = replace(
            stream.begin(picked.choice.worker_id, name),
            is_prefill_only=picked.is_prefill_only,
            cleared=self._clears.of(tenant_digest(stream.request.tenant)),
            remotes=picked.choice.remotes if stream.request.use_cache else (),
        )
        self._remember(stream)
        submitting = self._submitting[name] = self._spawn(self._submit(stream, picked.worker, request))
        submitting.add_done_callback(lambda task: self._submitted(stream, picked.worker, name, task))

    def _name_at_worker(self, stream: Stream) -> str:
        """What nothing else is ever called there. The client's id is what is before the last #."""
        self._attempts += 1
        return f"{stream.request.request_id}#{self._nonce}.{self._attempts}"

    async def _submit(self, stream: Stream, worker: Worker, request: EngineRequest) -> bool:
        """Whether the worker has taken it."""
        try:
            await worker.port.submit(request)
            return True
        except (OwnerDown, RuntimeError) as error:  # RuntimeError: its step loop has ended
            self.lose(worker, str(error))
        except (QueueFull, ValueError, Refusal) as error:
            if worker.streams.get(request.request_id) is stream:
                self._not_taken(stream, worker, error)
        return False

    def _submitted(self, stream: Stream, worker: Worker, name: str, task: asyncio.Task[bool]) -> None:
        self._submitting.pop(name, None)
        worker.answered(name)
        is_unwanted = name in self._unwanted
        self._unwanted.discard(name)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if is_unwanted and task.result():  # its cancellation gave up before the worker had heard of it
                self._spawn(self._cancel_attempt(worker, name))
            return
        log.error("request %s could not be submitted", stream.request.request_id, exc_info=error)
        if stream.attempts[-1].request_id == name:
            self._end_at_worker(stream)
            stream.fail(Refusal(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def _not_taken(self, stream: Stream, worker: Worker, error: QueueFull | ValueError | Refusal) -> None:
        """A worker refuses a request, or can't be reached. Where that is no fault of the request it goes elsewhere."""
        if isinstance(error, Refusal):
            self._spawn(
                self._cancel_attempt(worker, stream.attempts[-1].request_id)
            )  # it may have come through
        elif len(stream.attempts) == 1:
            code = grpc.StatusCode.INVALID_ARGUMENT
            if isinstance(error, QueueFull):
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            self._end_at_worker(stream)
            stream.fail(Refusal(code, str(error)))
            return
        self._move(stream, worker, f"did not take the request: {error}")
        self._try_suspects()

    def _move(self, stream: Stream, worker: Worker, why: str) -> None:
        """Its worker does nothing more for it: it goes on at another one, or fails saying `why`."""
        self._end_at_worker(stream)
        if stream.is_settled:
            return
        stream.leave(why)
        request_id = stream.request.request_id
        self._suspects.left(request_id)
        stopped = _story(stream)
        if stream.moves >= MAX_MOVES:
            stopped += f"; the request had gone on at another worker {MAX_MOVES} times already"
        elif not stream.can_move:
            stopped += f"; the request has given too many tokens, {stream.given_tokens}, to go on elsewhere"
        elif self._suspects.is_suspect(request_id):
            self._left[request_id] = worker
            return
        else:
            self._go_on(stream, worker, frozenset({worker.info.worker_id}))
            return
        stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE, stopped))

    def _go_on(self, stream: Stream, left: Worker, avoid: frozenset[str]) -> None:
        """It has left a worker, and goes to another one; it fails where there is none."""
        stopped = _story(stream)
        stream.moves += 1
        try:
            self._place(stream, self._left_at(left, stream), avoid=avoid)
        except Refusal as refusal:
            stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE, f"{stopped}; {refusal.message}"))
        else:
            log.warning("request %s goes on at %s: %s", stream.request.request_id, stream.worker_id, stopped)

    def _try_suspects(self) -> None:
        """Let suspects go on, each at a worker that tries no other one; the rest wait until one has been tried."""
        for request_id in self._suspects.waiting:
            stream, left = self._streams[request_id], self._left.get(request_id)
            if left is None or stream.is_settled:
                continue  # it ends
            trying = {*self._suspects.trials.values()}
            free = self._workers.able(stream, left) - trying
            if trying and not free:
                continue
            avoid = {*self._workers.by_id} - free if free else {left.info.worker_id}
            self._go_on(stream, left, frozenset(avoid))
            if stream.failure is None:
                del self._left[request_id]
                self._suspects.begin(request_id, stream.worker_id)

    def _refuse(self, stream: Stream) -> None:
        """Workers died under it, one after the other, and it was tried alone: it goes nowhere any more."""
        self._end_at_worker(stream)
        told = f"{_story(stream)}: the request is not moved on, since it was running there each time and gave nothing"
        log.error(
            "request %s of tenant %s is refused: %s", stream.request.request_id, stream.request.tenant, told
        )
        stream.fail(Refusal(grpc.StatusCode.INTERNAL, told))

    def _hand_off(self, stream: Stream, worker: Worker) -> None:
        """Its worker has prefilled it: it goes on at one that decodes."""
        stream.leave("prefilled it")
        try:
            self._place(stream, self._left_at(worker, stream))
        except Refusal as refusal:
            what = f"{_story(stream)}; {refusal.message}"
            stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE, what))

    def _left_at(self, worker: Worker, stream: Stream) -> list[Held]:
        """What a worker leaves of a stream in the tiers of its node."""
        if not stream.request.use_cache:
            return []
        node_id, tokens = worker.info.node_id, len(stream.request.token_ids)
        if len(stream.sequences) == 1:
            tokens += stream.given_tokens
        pages = tokens // self.info.page_tokens
        return [Held(node_id, "", "L3", self.addresses.of(node_id), pages)]

    def _remember(self, stream: Stream) -> None:
        self._latest[stream.request.request_id] = stream.attempts
        self._latest.move_to_end(stream.request.request_id)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)

    # ---- the end of a stream -----------------------------------------------------------------------------------

    def _let_go(self, stream: Stream) -> None:
        stream.abandon()
        if stream.is_over_at_worker:
            self._forget(stream)
        else:
            self._spawn(self._cancel(stream))

    async def _cancel(self, stream: Stream) -> None:
        """End a request that its client no longer wants, and forget it when its worker has."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._cancel_at_worker(stream)
                await stream.wait_over()
        except TimeoutError:
            log.warning("worker %s did not end request %s", stream.worker_id, stream.request.request_id)
        finally:
            self._end_at_worker(stream)
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        request_id = stream.request.request_id
        del self._streams[request_id]
        self._left.pop(request_id, None)
        if self._suspects.over(request_id):
            self._try_suspects()

    async def _cancel_at_worker(self, stream: Stream) -> None:
        worker = self._worker_of(stream)
        if worker is None or worker.down is not None or stream.is_over_at_worker:
            return
        await self._cancel_attempt(worker, stream.attempts[-1].request_id, is_stopped=stream.is_complete)

    async def _cancel_attempt(self, worker: Worker, request_id: str, *, is_stopped: bool = False) -> None:
        submitting = self._submitting.get(request_id)
        if submitting is not None:  # a cancel that overtakes its submit would cancel nothing
            await asyncio.wait((submitting,))
        if worker.down is not None:
            return
        try:
            await worker.port.cancel(request_id, is_stopped)
        except OwnerDown as error:
            self.lose(worker, str(error))
        except Refusal as refusal:
            log.warning("request %s can't be cancelled: %s", request_id, refusal.message)

    def _worker_of(self, stream: Stream) -> Worker | None:
        """Where it is; None when that worker has been taken out, or has come back as another one."""
        worker = self._workers.get(stream.worker_id)
        is_there = worker is not None and stream.attempts[-1].request_id in worker.streams
        return worker if is_there else None

    def _end_at_worker(self, stream: Stream) -> None:
        """The worker has, or is taken to have, said its last word: its room is free. Idempotent."""
        worker, name = self._worker_of(stream), stream.attempts[-1].request_id
        if name in self._submitting and not stream.is_over_at_worker:
            self._unwanted.add(name)
        stream.conclude()
        if worker is not None:
            worker.let_go(name)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- a worker's side ---------------------------------------------------------------------------------------

    def on_outputs(self, worker_id: str, outputs: Iterable[Output]) -> None:
        """What one step of a worker gave. Outputs of requests nothing knows any more are dropped."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if worker.unheard and self._workers.hear(worker):
            worker.condition.is_now(HEALTHY, time.time())
            log.info("worker %s is heard of again", worker_id)
        failed = ""
        for output in outputs:
            stream = worker.streams.get(output.request_id)
            if output.error is not None and output.error.startswith(WORKER_FAILED):
                failed = output.error
            elif stream is not None:
                self._on_output(worker, stream, output)
        if failed:
            self.lose(worker, failed)

    def _on_output(self, worker: Worker, stream: Stream, output: Output) -> None:
        reason = output.finish_reason
        if reason is FinishReason.CANCELLED and not (stream.is_cancelling or stream.is_settled):
            self._move(stream, worker, f"gave the request up: {output.error or 'it is stopping'}")
            self._try_suspects()
            return
        if output.token_ids and stream.queued_tokens:
            worker.computed(stream)
            if not stream.has_given:  # else what was computed is more than the prompt
                self._workers.measure(output)
        stream.take(output)
        if output.token_ids and stream.has_gone_on and self._suspects.gave(stream.request.request_id):
            self._try_suspects()
        if reason is not None and stream.is_over_at_worker:
            self._end_at_worker(stream)
            if not stream.is_settled:  # some of its sequences were only prefilled
                self._hand_off(stream, worker)
        elif (stream.is_complete or stream.is_overfull) and not stream.is_cancelling:
            stream.is_cancelling = True
            self._spawn(self._cancel_at_worker(stream))

    def attach(self, info: WorkerInfo, port: WorkerPort) -> None:
        """A worker is there, new or restarted. What one of its id before was doing goes on elsewhere."""
        before = self._workers.get(info.worker_id)
        if before is not None:
            self.lose(before, "it was restarted")
        self._workers.add(info, port)
        self.health_changed.set()
        self._try_suspects()

    def look(self) -> None:
        """To be called once in TURN_S: a worker that nothing is heard of gets nothing more that others can take."""
        for worker in self._workers.look():
            worker.condition.is_now(STALLED, time.time())
            log.info("worker %s is stalled with %d requests", worker.info.worker_id, len(worker.streams))

    def detach(self, worker_id: str) -> bool:
        """A worker is taken out; what it was doing goes on elsewhere. Whether it was there."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        self.lose(worker, "it was taken out", is_ordered=True)
        self._workers.remove(worker_id)
        return True

    def lose_worker(self, worker_id: str, reason: str) -> None:
        """The worker of this id is gone."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self.lose(worker, reason)

    def lose(self, worker: Worker, reason: str, *, is_ordered: bool = False) -> None:
        """A worker is gone: its requests go on at others, or fail with UNAVAILABLE. Idempotent.

        Where that was not ordered it may be one of them that ended it: see Suspects.
        """
        if worker.down is not None:
            return
        self._workers.mark_down(worker, reason)
        worker.condition.is_now(DEAD, time.time())
        log.error("worker %s is down: %s", worker.info.worker_id, reason)
        self.health_changed.set()
        streams = sorted(worker.streams.values(), key=lambda stream: not stream.has_gone_on)
        culprits: set[str] = set()
        if not is_ordered:
            live = [stream for stream in streams if not stream.is_settled]
            for stream in live:
                if stream.attempts[-1].request_id in self._submitting:  # the worker never said that it has it
                    self._suspects.left(stream.request.request_id)
            ids = [stream.request.request_id for stream in live]
            culprits = self._suspects.died(worker.info.worker_id, ids)
        for stream in streams:
            if stream.request.request_id in culprits:
                stream.leave(f"went down: {reason}")
                self._refuse(stream)
            else:
                self._move(stream, worker, f"went down: {reason}")
        self._try_suspects()


def _story(stream: Stream) -> str:
    """Which workers a request was at, and why it isn't any more."""
    return "; ".join(
        f"worker {attempt.worker_id} {attempt.left}" for attempt in stream.attempts if attempt.left
    )
