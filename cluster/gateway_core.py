"""The gateway's requests in flight: admits them, hands them to workers, and brings the workers' outputs back.

Everything here runs on one event loop, so nothing needs a lock. Workers are behind `WorkerPort`; that they are Ray
actors is known to gateway.py alone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from kvtier.cluster.config import MAX_STREAM_TOKENS
from kvtier.cluster.gateway_requests import (
    DEFAULT_TENANT,
    Limit,
    Prompted,
    Refusal,
    checked_id,
    prompt_ids,
    prompt_size,
    sampling_params,
    stop_strings,
    windowed,
)
from kvtier.cluster.gateway_signals import signals
from kvtier.cluster.gateway_streams import Stream
from kvtier.proto import inference_pb2
from kvtier.tier.base import Outcome, PageInfo
from kvtier.tier.identity import tenant_salt
from kvtier.tier.page import TierName
from kvtier.tier.recorder import RecordingStatus
from kvtier.tier.stats import Snapshot
from kvtier.workers.api import EngineRequest, Explanation, Output, QueueFull, WorkerInfo
from kvtier.workers.model_text import Text

log = logging.getLogger(__name__)

THREADED_PROMPT = 4096  # tokenizing more takes milliseconds that running streams would feel
LAST_WORD_S = 10.0  # a worker that doesn't end a cancelled request in this time is not waited for
WORKER_ROLE = "decode"
HEALTH_S = 5.0  # an owner that doesn't answer in this time is not well
HEALTHY, UNHEALTHY, DEAD = "healthy", "unhealthy", "dead"
Outcomes = list[tuple[bytes, Outcome]]
Tenant = str | bytes | None  # by name; by digest where the configuration doesn't know it; None: all


class OwnerDown(Exception):
    """A worker or node is gone for good; the message says how that is known."""


class OwnerPort(Protocol):
    """What the Cache verbs call of each that holds pages. All raise OwnerDown. Only nodes are asked by digest.

    `health` is None when all is well, else what isn't. `record` raises RecordingError, and see recorder.file_of;
    `stop_recording` is None where nothing was recorded.
    """

    async def health(self) -> str | None: ...
    async def stats(self) -> Snapshot: ...
    async def pages(self, tenant: Tenant, tier: TierName | None, limit: int) -> list[PageInfo]: ...
    async def pin(self, keys: list[bytes]) -> Outcomes: ...
    async def unpin(self, keys: list[bytes]) -> Outcomes: ...
    async def evict(self, keys: list[bytes], tier: TierName | None) -> Outcomes: ...
    async def clear(self, tenant: Tenant) -> Outcomes: ...
    async def verify(self, keys: list[bytes] | None) -> Outcomes: ...
    async def record(self, path: str, max_bytes: int, is_only: bool) -> RecordingStatus: ...
    async def stop_recording(self) -> RecordingStatus | None: ...


async def asked_health(port: OwnerPort) -> tuple[str, str]:
    """An owner's health by its own word, and what is wrong with it."""
    try:
        async with asyncio.timeout(HEALTH_S):
            wrong = await port.health()
    except OwnerDown as error:
        return DEAD, str(error)
    except Refusal as refusal:
        return UNHEALTHY, refusal.message
    except TimeoutError:
        return UNHEALTHY, f"it does not answer within {HEALTH_S:g} s"
    return (HEALTHY, "") if wrong is None else (UNHEALTHY, wrong)


class NodePort(OwnerPort, Protocol):
    """A CacheNode. `notes` are one-line notices, `pid` is that of its process now."""

    async def notes(self) -> list[str]: ...
    async def pid(self) -> int: ...


class WorkerPort(OwnerPort, Protocol):
    """A decode worker. `submit` raises ValueError for a request it can't take, QueueFull, and RuntimeError once it
    takes no more. A request that is cancelled `is_stopped` has given its whole answer, which a stop string ended.
    """

    async def submit(self, request: EngineRequest) -> None: ...
    async def cancel(self, request_id: str, is_stopped: bool) -> None: ...
    async def explain(self, request_id: str) -> Explanation | None: ...


class Worker:
    """A worker as the gateway sees it."""

    def __init__(self, info: WorkerInfo, port: WorkerPort) -> None:
        self.info = info
        self.port = port
        self.streams: dict[str, Stream] = {}  # by request id, until it has said its last word on them
        self.sequences = 0  # of these streams
        self.down: str | None = None  # why it is gone
        self.chosen = 0  # number of the last choice that fell on it


class GatewayCore:
    """Requests in flight. Owned by the event loop it is used on.

    Bounds: at most `max_sequences` sequences per worker are in flight; each holds at most its max_tokens of output, and
    those of a request gateway_streams.MAX_UNREAD_TOKENS together. A request id is taken until its call has ended and
    its worker has said its last word on it.
    """

    def __init__(
        self,
        workers: Iterable[tuple[WorkerInfo, WorkerPort]],
        text: Text | None,
        tenants: Mapping[str, str],
        max_sequences: int,
        window: int = 0,
    ) -> None:
        """`tenants` maps names to the secrets of the configuration; `window` is that of requests that set none, or 0."""
        self.workers = {info.worker_id: Worker(info, port) for info, port in workers}
        if not self.workers:
            raise ValueError("a gateway needs at least one worker")
        self.info = next(iter(self.workers.values())).info
        # Of a sequence, prompt and output: any worker must be able to hold it.
        self.max_context = min(worker.info.max_context for worker in self.workers.values())
        self.text = text
        self.tenants = frozenset(tenants)
        self._salts = {name: tenant_salt(name, secret) for name, secret in tenants.items()}
        self._max_sequences = max_sequences
        self._window = window
        self._streams: dict[str, Stream] = {}
        self._choices = 0
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()  # cancellations under way, at most one per stream
        self.unhealthy = asyncio.Event()  # no worker is left
        self._tokenizers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @property
    def in_flight(self) -> int:
        """Requests whose call or whose work has not ended."""
        return len(self._streams)

    def stop(self) -> None:
        """Admit no more."""
        self._is_stopping = True

    async def settle(self) -> None:
        """Until the cancellations under way are done, which each have a time limit."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Let the threads go."""
        self._tokenizers.shutdown(wait=False, cancel_futures=True)

    async def worker_statuses(self) -> list[inference_pb2.WorkerStatus]:
        """Workers as `kvtier status` shows them; asks each how it is."""
        return list(await asyncio.gather(*(self._worker_status(worker) for worker in self.workers.values())))

    async def _worker_status(self, worker: Worker) -> inference_pb2.WorkerStatus:
        health, detail = (DEAD, worker.down) if worker.down is not None else await asked_health(worker.port)
        if health == DEAD:
            self.lose_worker(worker.info.worker_id, detail)
        return inference_pb2.WorkerStatus(
            id=worker.info.worker_id,
            node=worker.info.node_id,
            pid=worker.info.pid,
            role=WORKER_ROLE,
            health=health,
            detail=detail,
            in_flight=len(worker.streams),
        )

    # ---- a client's side ---------------------------------------------------------------------------------------

    async def generate(
        self, message: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        """A request's chunks. Raises Refusal; closing the iterator, or cancelling its task, cancels the request."""
        stream = await self._admit(message)
        submitted = asyncio.ensure_future(self._submit(stream))
        try:
            await asyncio.shield(submitted)
            while not stream.is_drained:
                await self._wait(stream)
                for chunk in stream.drain():
                    yield chunk
        finally:
            self._let_go(stream, submitted)

    async def _wait(self, stream: Stream) -> None:
        if not stream.is_complete or stream.is_over_at_worker:
            await stream.wait()
            return
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await stream.wait()
        except TimeoutError:
            self._end_at_worker(stream)

    def limit(self, window: int = 0) -> Limit:
        """How long a sequence of a request with this window may be (0: it sets none)."""
        if window or self._window:
            return Limit(MAX_STREAM_TOKENS, is_windowed=True)
        return Limit(self.max_context)

    async def prompt_ids(self, message: Prompted, limit: Limit) -> tuple[int, ...]:
        """The prompt's token ids; long text is read off the loop. Raises Refusal."""
        limits = (self.info.vocab_size, limit)
        if prompt_size(message) < THREADED_PROMPT:
            return prompt_ids(message, self.text, *limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizers, prompt_ids, message, self.text, *limits)

    def tenant(self, name: str) -> str:
        """The tenant a message names. Raises Refusal for an unknown one."""
        tenant = name or DEFAULT_TENANT
        if tenant not in self.tenants:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"unknown tenant {tenant!r}")
        return tenant

    async def _admit(self, message: inference_pb2.GenerateRequest) -> Stream:
        arrived_s = time.time()
        if self._is_stopping:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
        tenant = self.tenant(message.tenant)
        request_id = checked_id(message.request_id, secrets.token_hex(8))
        self._check_unused(request_id)
        stops = stop_strings(message.sampling, self.text)
        told = signals(message, self._salts[tenant])
        window, sinks = windowed(message, self.info.page_tokens)
        limit = self.limit(window)
        ids = await self.prompt_ids(message, limit)
        sampling = sampling_params(
            message.sampling, len(ids), limit, self.info.vocab_size, secrets.randbits(63)
        )
        request = EngineRequest(
            request_id,
            tenant,
            ids,
            sampling,
            use_cache=not message.cache.no_cache,
            window=window,
            sinks=sinks,
            lossy=message.cache.lossy,
            arrived_s=arrived_s,
            session=told.session,
            session_closed=told.session_closed,
            session_open=told.session_open,
            turn=told.turn,
            expected_output_tokens=told.expected_output_tokens,
            tool_stop_ids=self.text.tool_stop_ids if self.text else (),
        )
        self._check_unused(request_id)  # again: another may have taken it while this prompt was read
        worker = self._pick(message.worker, sampling.n)
        stream = Stream(request, worker.info.worker_id, self.text, stops, self.info.eos_ids)
        self._streams[request_id] = worker.streams[request_id] = stream
        worker.sequences += sampling.n
        return stream

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"request {request_id!r} is in flight")

    def _pick(self, wanted: str, sequences: int) -> Worker:
        """The worker asked for, or the one with the fewest sequences in flight, in turn among equals."""
        if wanted:
            candidates = [self._named(wanted)]
        else:
            candidates = [worker for worker in self.workers.values() if worker.down is None]
        if not candidates:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "no worker is healthy")
        best = min(candidates, key=lambda worker: (worker.sequences, worker.chosen))
        if best.sequences + sequences > self._max_sequences:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"worker {best.info.worker_id} has {best.sequences} sequences in flight, at most {self._max_sequences} "
                "are taken: try again later",
            )
        self._choices += 1
        best.chosen = self._choices
        return best

    def _named(self, worker_id: str) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"unknown worker {worker_id!r}: there are {', '.join(self.workers)}",
            )
        if worker.down is not None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker_id} is down: {worker.down}")
        return worker

    async def _submit(self, stream: Stream) -> None:
        worker = self.workers[stream.worker_id]
        try:
            await worker.port.submit(stream.request)
        except (OwnerDown, RuntimeError) as error:  # RuntimeError: its step loop has ended
            self.lose_worker(stream.worker_id, str(error))
        except QueueFull as error:
            self._end_at_worker(stream)
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        except ValueError as error:
            self._end_at_worker(stream)
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _let_go(self, stream: Stream, submitted: asyncio.Future[None]) -> None:
        stream.abandon()
        if stream.is_over_at_worker:
            del self._streams[stream.request.request_id]
        else:
            self._spawn(self._cancel(stream, submitted))

    async def _cancel(self, stream: Stream, submitted: asyncio.Future[None]) -> None:
        """End a request that its client no longer wants, and forget it when its worker has."""
        # A cancel that overtakes its submit would cancel nothing.
        await asyncio.gather(submitted, return_exceptions=True)
        try:
            await self._cancel_at_worker(stream)
            async with asyncio.timeout(LAST_WORD_S):
                await stream.wait_over()
        except TimeoutError:
            log.warning("worker %s did not end request %s", stream.worker_id, stream.request.request_id)
        finally:
            self._end_at_worker(stream)
            del self._streams[stream.request.request_id]

    async def _cancel_at_worker(self, stream: Stream) -> None:
        worker = self.workers[stream.worker_id]
        if worker.down is not None or stream.is_over_at_worker:
            return
        try:
            await worker.port.cancel(stream.request.request_id, stream.is_complete)
        except OwnerDown as error:
            self.lose_worker(stream.worker_id, str(error))
        except Refusal as refusal:
            log.warning("request %s can't be cancelled: %s", stream.request.request_id, refusal.message)

    def _end_at_worker(self, stream: Stream) -> None:
        """The worker has, or is taken to have, said its last word: its room is free. Idempotent."""
        stream.conclude()
        worker = self.workers[stream.worker_id]
        if worker.streams.pop(stream.request.request_id, None) is not None:
            worker.sequences -= stream.request.sampling.n

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- a worker's side ---------------------------------------------------------------------------------------

    def on_outputs(self, worker_id: str, outputs: Iterable[Output]) -> None:
        """What one step of a worker gave. Outputs of requests nobody knows any more are dropped."""
        streams = self.workers[worker_id].streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            stream.take(output)
            if output.finish_reason is not None and stream.is_over_at_worker:
                self._end_at_worker(stream)
            elif (stream.is_complete or stream.is_overfull) and not stream.is_cancelling:
                stream.is_cancelling = True
                self._spawn(self._cancel_at_worker(stream))

    def lose_worker(self, worker_id: str, reason: str) -> None:
        """A worker is gone: its requests fail with UNAVAILABLE."""
        worker = self.workers[worker_id]
        if worker.down is not None:
            return
        worker.down = reason
        log.error("worker %s is down: %s", worker_id, reason)
        if all(other.down is not None for other in self.workers.values()):
            self.unhealthy.set()
        for stream in list(worker.streams.values()):
            self._end_at_worker(stream)
            stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker_id} went down: {reason}"))
