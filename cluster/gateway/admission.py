"""How requests come in: checked, tokenized, sent to where their pages are. cluster/gateway/in_flight.py has them from there on.

Everything here runs on one event loop, so nothing needs a lock. Workers are behind `WorkerPort`; that they are Ray
actors is known to cluster/gateway/actor.py alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from kvtier.cluster.config.deployment import MAX_STREAM_TOKENS
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.in_flight import LAST_WORD_S, InFlightRequests
from kvtier.cluster.gateway.owners.locations import Holders
from kvtier.cluster.gateway.ports import WorkerPort
from kvtier.cluster.gateway.requests.reading import (
    DEFAULT_TENANT,
    Limit,
    Prompted,
    Refusal,
    checked_id,
    prompt_ids,
    prompt_size,
    quoted,
    sampling_params,
    stop_strings,
    windowed,
)
from kvtier.cluster.gateway.requests.signals import signals
from kvtier.cluster.gateway.streams.streams import Stream
from kvtier.cluster.routing.router import Policy
from kvtier.proto import inference_pb2
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.identity import page_keys, root_key, tenant_salt
from kvtier.tier.pages.page import PageKey
from kvtier.workers.models.text import Text
from kvtier.workers.requests.api import DEFAULT_SAMPLING, EngineRequest, SamplingParams, WorkerInfo

# Tokenizing more, or hashing so many tokens, takes milliseconds that running streams would feel.
THREADED_PROMPT = 4096

STOPPING = "the service is stopping: send the request again once it runs (`kvtier up`)"
STOPPED = (
    "the service was stopped before the answer was whole: send the request again once it runs (`kvtier up`); "
    "what was computed of it and saved is found then"
)


class GatewayCore(InFlightRequests):
    """Requests in flight. Owned by the event loop it is used on.

    Each holds at most its max_tokens of output, and at most gateway_streams.MAX_UNREAD_BYTES that its client hasn't
    read; see InFlightRequests for how many there are.
    """

    def __init__(
        self,
        workers: Iterable[tuple[WorkerInfo, WorkerPort]],
        text: Text | None,
        tenants: Mapping[str, str],
        max_sequences: int,
        window: int = 0,
        *,
        holders: Holders | None = None,
        policy: Policy = "prefix",
        clears: Clears | None = None,
        sampling: SamplingParams = DEFAULT_SAMPLING,
    ) -> None:
        """`tenants` maps names to the secrets of the configuration; `window` is that of requests that set none, or 0.

        `holders` is where to ask for a prompt's pages, `policy` how workers are chosen,
        `clears` are the clear epochs, their owner's to change, that requests tell their workers. `sampling` has what
        requests leave unset.
        """
        super().__init__(workers, max_sequences, policy, clears or Clears())
        self.text = text
        self.tenants = frozenset(tenants)
        self._holders = holders
        self._root = root_key(self.info.root_fields)
        self._salts = {name: tenant_salt(name, secret) for name, secret in tenants.items()}
        self._window = window
        self._sampling = sampling
        self._is_stopping = False
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @property
    def max_context(self) -> int:
        """Of a sequence, prompt and output: any worker must be able to hold it."""
        return self._workers.max_context or self.info.max_context

    def stop(self) -> None:
        """Admit no more."""
        self._is_stopping = True

    def end_streams(self, why: str) -> None:
        """Tell the clients of all requests in flight that they get no more."""
        for stream in list(self._streams.values()):
            stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE, why))

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- a client's side ---------------------------------------------------------------------------------------

    async def generate(
        self, message: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        """A request's chunks. Raises Refusal; closing the iterator, or cancelling its task, cancels the request."""
        stream = await self._admit(message)
        try:
            while not stream.is_drained:
                await self._wait(stream)
                for chunk in stream.drain():
                    yield chunk
        finally:
            self._let_go(stream)

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
        return Limit(self.max_context, is_l1_short=self._workers.is_l1_short)

    async def prompt_ids(self, message: Prompted, limit: Limit) -> tuple[int, ...]:
        """The prompt's token ids; long text is read off the loop. Raises Refusal."""
        limits = (self.info.vocab_size, limit)
        if prompt_size(message) < THREADED_PROMPT:
            return prompt_ids(message, self.text, *limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, prompt_ids, message, self.text, *limits)

    def tenant(self, name: str) -> str:
        """The tenant a message names. Raises Refusal for an unknown one."""
        tenant = name or DEFAULT_TENANT
        if tenant not in self.tenants:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"unknown tenant {quoted(tenant)}")
        return tenant

    async def _admit(self, message: inference_pb2.GenerateRequest) -> Stream:
        arrived_s = time.time()
        if self._is_stopping:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, STOPPING)
        tenant = self.tenant(message.tenant)
        request_id = checked_id(message.request_id, secrets.token_hex(8))
        self._check_unused(request_id)
        stops = stop_strings(message.sampling, self.text)
        told = signals(message, self._salts[tenant])
        window, sinks = windowed(message, self.info.page_tokens)
        limit = self.limit(window)
        ids = await self.prompt_ids(message, limit)
        sampling = sampling_params(
            message.sampling, len(ids), limit, self.info.vocab_size, secrets.randbits(63), self._sampling
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
        held = await self._held(request)
        self._check_unused(request_id)  # again: another may have taken it while this prompt was read
        continues = message.WhichOneof("prompt") != "chat"
        stream = Stream(request, self.text, stops, self.info.eos_ids, continues)
        self._place(stream, held, wanted=message.worker)
        self._streams[request_id] = stream
        return stream

    async def _held(self, request: EngineRequest) -> list[Held]:
        """Who holds pages of a prompt, as far as the directory knows them by the keys of plain requests."""
        is_plain = request.use_cache and not (request.window or self._window or request.lossy)
        if self._holders is None or not is_plain or len(self._workers) < 2:
            return []
        return self.addresses.hear(await self._holders.lookup(await self._keys(request)))

    async def _keys(self, request: EngineRequest) -> list[PageKey]:
        ids, root, salt = request.token_ids, self._root, self._salts[request.tenant]

        def make() -> list[PageKey]:
            return page_keys(root, salt, np.asarray(ids, np.int32), self.info.page_tokens)

        if len(ids) < THREADED_PROMPT:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)
