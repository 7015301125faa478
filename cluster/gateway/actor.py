"""The gateway's Ray actor: builds the gateway out of worker and node handles, and translates Ray's failures."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import grpc
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from kvtier.cluster.config.deployment import GrpcConfig, TenantConfig
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.admission import GatewayCore
from kvtier.cluster.gateway.attach import CONNECT_S, Attachments
from kvtier.cluster.gateway.cache_api.cache import CacheApi, Node
from kvtier.cluster.gateway.cache_api.clears import Clearer, ClearRecord
from kvtier.cluster.gateway.owners.ask import Shared, Silence, within
from kvtier.cluster.gateway.owners.locations import Holders
from kvtier.cluster.gateway.owners.part_states import PartState, show
from kvtier.cluster.gateway.owners.status import Condition
from kvtier.cluster.gateway.ports import HEALTH_S, HEALTHY, UNHEALTHY, Outcomes, OwnerDown, Tenant, Told
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.cluster.gateway.server import GatewayError, GatewayServer
from kvtier.cluster.gateway.streams.outputs import OutputReceiver
from kvtier.cluster.routing.router import Policy
from kvtier.proto import inference_pb2
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.protocol.results import Cleared, ManyOutcomes
from kvtier.tier.record.writer import RecordingStatus
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import PageInfo
from kvtier.workers.engine.heartbeat import TURN_S
from kvtier.workers.models.files.sampling import recommended_sampling
from kvtier.workers.models.text import Text, TextError
from kvtier.workers.requests.api import (
    DEFAULT_SAMPLING,
    EngineRequest,
    Explanation,
    SamplingParams,
    WorkerInfo,
    WorkerStopped,
)

log = logging.getLogger(__name__)


class GatewayActor:
    """The one door of a deployment. An async actor: all its state belongs to its event loop.

    `start` is called once, when workers and nodes are ready; `stop` before they go. It must run as an async Ray actor
    (`Gateway`), on the node whose address clients use. Where it dies, a new one is started alike, on the same port: the
    workers end what the old one asked for. Who comes back is told by `attach_worker`, `attach_node`, `attach_exchange`.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str,
        grpc_config: GrpcConfig,
        tenants: tuple[TenantConfig, ...],
        max_sequences: int,
        window: int = 0,
        sinks: int = 0,
        routing: Policy = "prefix",
        workers: int = 0,
        clears_folder: str = "",
        node_ids: Sequence[str] = (),
        sampling: Literal["kvtier", "model"] = "kvtier",
    ) -> None:
        """`max_sequences`: of one worker, running and waiting together; more are refused.

        `window` and `sinks` are those of requests that set none; 0: the model's own attention. `routing` is how workers
        are chosen, `workers` how many there may be, alive at the start or not.
        The numbers of all clears are kept in `clears_folder`, "" for nowhere. `node_ids` are all nodes that there are.
        `sampling` says whose defaults requests take: "model", those of its generation_config.json.
        """
        self._record = ClearRecord(Path(clears_folder) if clears_folder else None)
        self._node_ids = tuple(node_ids)
        self._model_name = model_name
        self._sampling_of = Path(model_path) if sampling == "model" else None
        self._grpc_config = grpc_config
        self._tenants = {tenant.name: tenant.salt for tenant in tenants}
        self._max_sequences = max_sequences
        self._window = window
        self._sinks = sinks
        self._routing: Policy = routing
        self._worker_count = workers
        self._text: Text | None = None
        self._text_error: TextError | None = None  # raised by `start`: what a constructor raises, Ray wraps
        try:
            self._text = Text.load(model_path)
        except TextError as error:
            self._text_error = error
        self._endpoint = ""
        self._since_s = 0.0
        self._directory: RayDirectory | None = None
        self._states: list[PartState] = []
        self._status = Shared(self._asked_status)
        self._looking: asyncio.Task[None] | None = None
        self._core: GatewayCore
        self._cache: CacheApi
        self._clearer: Clearer
        self._receiver: OutputReceiver
        self._attachments: Attachments
        self._server: GatewayServer

    def _sampling(self) -> SamplingParams:
        try:
            return recommended_sampling(self._sampling_of) if self._sampling_of else DEFAULT_SAMPLING
        except ValueError as error:
            raise GatewayError(f"{error}; model.sampling: kvtier doesn't use it") from error

    async def start(
        self,
        workers: Sequence[ActorHandle[Any]],
        nodes: Sequence[ActorHandle[Any]],
        directory: ActorHandle[Any] | None = None,
        exchanges: Sequence[ActorHandle[Any]] = (),
    ) -> str:
        """Connect to everything and listen; returns HOST:PORT. Raises GatewayError.

        Workers that are dead, or silent, are left out until they are attached. `directory` is asked who holds a prompt's pages;
        `exchanges` are the nodes' (PageExchange), which workers are told of that go on where another one prefilled.
        """
        if self._text_error is not None:
            raise GatewayError(str(self._text_error))
        ports = list(map(RayWorker, workers))
        there, silent = await _living(ports)
        infos = [info for info, _ in there]
        check_agreement(infos, self._text)
        self._directory = None if directory is None else RayDirectory(directory)
        loop = asyncio.get_running_loop()
        self._record.load()
        self._core = GatewayCore(
            there,
            self._text,
            self._tenants,
            self._max_sequences,
            self._window,
            holders=None if self._directory is None else Holders(self._directory, loop.time),
            policy=self._routing,
            clears=self._record.clears,
            sampling=self._sampling(),
        )
        self._clearer = Clearer(self._record)
        found = await asyncio.gather(*map(_node, nodes))
        self._cache = CacheApi(self._core, found, self._tenants, self._clearer, self._node_ids)
        await self._cache.attach_nodes()
        await asyncio.gather(*map(self._attach_if_living, exchanges))
        await self._connect_outputs({info.worker_id: port for info, port in there})
        for port in silent:
            self._attachments.look_for(port)
        self._looking = loop.create_task(self._look())
        calls = max(len(workers), self._worker_count) * self._max_sequences
        self._server = GatewayServer(self._core, self._cache, self.status, self._grpc_config, calls)
        self._endpoint = await self._server.start()
        self._since_s = time.time()
        gc.freeze()  # what was loaded stays: collections need not look at it
        return self._endpoint

    async def attach_worker(self, handle: ActorHandle[Any]) -> str:
        """A worker is there, new or restarted: it takes requests from now on. Its id. Raises GatewayError."""
        return await self._attachments.attach(RayWorker(handle))

    async def detach_worker(self, worker_id: str) -> bool:
        """A worker takes no more requests; those that it has go on at others. Whether it was there."""
        return self._attachments.detach(worker_id)

    async def attach_exchange(self, handle: ActorHandle[Any]) -> None:
        """A node's exchange is there, new or restarted, maybe at another address. Raises GatewayError."""
        try:
            info: dict[str, Any] = await within(CONNECT_S, handle.info.remote())
        except RayActorError as error:
            raise GatewayError("the exchange to attach is dead: start it first") from error
        except Silence as silence:
            raise GatewayError(f"the exchange to attach {silence}: try again") from silence
        self._core.addresses.attach(info["node_id"], info["address"])

    async def detach_exchange(self, node_id: str) -> None:
        """A node's exchange is gone: nothing is told of its address any more, until one is attached."""
        if self._endpoint:
            self._core.addresses.drop(node_id)

    async def _attach_if_living(self, exchange: ActorHandle[Any]) -> None:
        try:
            await self.attach_exchange(exchange)
        except GatewayError as error:
            log.warning("the gateway starts without an exchange, which costs hints: %s", error)

    async def attach_node(self, handle: ActorHandle[Any]) -> None:
        """A node is there, new or restarted. Raises GatewayError."""
        try:
            node = await within(CONNECT_S, _node(handle))
            await self._cache.attach_node(node)
        except (RayActorError, OwnerDown) as error:
            raise GatewayError("the node to attach is dead: start it first") from error
        except (Silence, Refusal, RuntimeError, TimeoutError) as error:
            why = error.message if isinstance(error, Refusal) else str(error)
            raise GatewayError(f"the node to attach {why}: try again") from error

    async def _connect_outputs(self, workers: Mapping[str, RayWorker]) -> None:
        self._receiver = OutputReceiver(
            (), self._core.on_outputs, lambda worker_id, reason: self._attachments.lost(worker_id, reason)
        )
        address = await self._receiver.start(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

        def check(info: WorkerInfo) -> None:
            check_agreement([self._core.info, info], self._text)

        told = self._record.clears.numbers
        self._attachments = Attachments(self._core, self._receiver, address, check, told)
        await self._attachments.connect(workers)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self._core.look()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, give those in flight `grace_s`, cancel the rest, and close."""
        if not self._endpoint:
            return  # it never listened
        self._core.stop()
        await self._server.stop(grace_s)
        await self._core.settle()
        if self._looking is not None:
            self._looking.cancel()
        self._attachments.close()
        self._clearer.close()
        self._receiver.close()
        self._core.close()

    async def attach_directory(self, handle: ActorHandle[Any]) -> None:
        """The directory was restarted: this one is asked from now on."""
        if self._directory is not None:
            self._directory.is_now(handle)

    async def hear_states(self, states: list[PartState]) -> None:
        """How parts are that others watch, until the next call."""
        self._states = states

    async def heartbeat(self) -> float:
        """Seconds since the event loop turned: 0, since it is what answers."""
        return 0.0

    async def status(self) -> inference_pb2.StatusReply:
        """What is running, as `kvtier status` shows it."""
        return await self._status.answer()

    async def _asked_status(self) -> inference_pb2.StatusReply:
        info = self._core.info
        reply = inference_pb2.StatusReply(
            endpoint=self._endpoint,
            model=inference_pb2.ModelStatus(
                name=self._model_name,
                dtype=info.dtype,
                max_context=self._core.max_context,
                vocab_size=info.vocab_size,
                page_tokens=info.page_tokens,
                page_bytes=info.page_bytes,
                tokenizer_digest=info.tokenizer_digest,
                chat_template_digest=self._text.chat_template_digest if self._text else "",
                recipe=info.root_fields.get("recipe", ""),
                window=self._window,
                sinks=self._sinks,
            ),
            nodes=await self._cache.node_statuses(),
            workers=await self._core.worker_statuses(),
            tenants=sorted(self._tenants),
            version=version("kvtier"),
            gateway_pid=os.getpid(),
            in_flight=self._core.in_flight,
            since=self._since_s,
            directory=await self._directory.status() if self._directory else None,
        )
        return show(self._states, reply)


Gateway = ray.remote(num_cpus=0)(GatewayActor)


def check_agreement(infos: Sequence[WorkerInfo], text: Text | None) -> None:
    """Workers and gateway must speak of the same model. Raises GatewayError naming who differs in what."""
    digest = text.digest if text else ""
    first = infos[0]
    for info in infos:
        if info.tokenizer_digest != digest:
            raise GatewayError(
                f"worker {info.worker_id} has tokenizer {info.tokenizer_digest or 'none'}, the gateway "
                f"{digest or 'none'}: their model folders differ"
            )
        for name, value in first.root_fields.items():
            if info.root_fields.get(name) != value:
                raise GatewayError(
                    f"workers {first.worker_id} and {info.worker_id} differ in {name}: {value} and "
                    f"{info.root_fields.get(name, 'none')}"
                )


class RayOwner:
    """A worker or node behind its Ray handle: OwnerDown when it has died, Refusal when it can't be reached now."""

    def __init__(self, handle: ActorHandle[Any], name: str) -> None:
        self._handle = handle
        self._name = name

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except ActorUnavailableError as error:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, f"{self._name} can't be reached now: try again"
            ) from error
        except RayActorError as error:
            raise OwnerDown(f"{self._name}'s process ended") from error
        except RayTaskError as error:
            if isinstance(error.cause, WorkerStopped):
                raise OwnerDown(f"{self._name} takes nothing more: {error.cause}") from error
            raise error.cause from None  # as it was raised there, without Ray's traceback in its text

    async def health(self) -> str | None:
        wrong: str | None = await self._call("health")
        return wrong

    async def stats(self) -> Snapshot:
        snapshot: Snapshot = await self._call("stats")
        return snapshot

    async def pages(self, tenant: Tenant, tier: TierName | None, limit: int) -> list[PageInfo]:
        pages: list[PageInfo] = await self._call("pages", tenant, tier, limit)
        return pages

    async def pages_of(self, keys: list[bytes]) -> list[PageInfo]:
        pages: list[PageInfo] = await self._call("pages_of", keys)
        return pages

    async def held(self, keys: bytes) -> list[HeldKeys]:
        held: list[HeldKeys] = await self._call("held", keys)
        return held

    async def keys_with(self, heads: list[str], limit: int) -> list[list[bytes]]:
        found: list[list[bytes]] = await self._call("keys_with", heads, limit)
        return found

    async def pin(self, keys: list[bytes]) -> Outcomes:
        outcomes: Outcomes = await self._call("pin", keys)
        return outcomes

    async def unpin(self, keys: list[bytes]) -> Outcomes:
        outcomes: Outcomes = await self._call("unpin", keys)
        return outcomes

    async def evict(self, keys: list[bytes], tier: TierName | None) -> Outcomes:
        outcomes: Outcomes = await self._call("evict", keys, tier)
        return outcomes

    async def evict_all(self, tier: TierName | None) -> ManyOutcomes:
        outcomes: ManyOutcomes = await self._call("evict_all", tier)
        return outcomes

    async def clear(self, tenant: Tenant, number: int) -> Cleared:
        cleared: Cleared = await self._call("clear", tenant, number)
        return cleared

    async def know(self, told: Told) -> None:
        await self._call("know", told)

    async def verify(self, keys: list[bytes]) -> Outcomes:
        outcomes: Outcomes = await self._call("verify", keys)
        return outcomes

    async def verify_all(self) -> ManyOutcomes:
        outcomes: ManyOutcomes = await self._call("verify_all")
        return outcomes


class RayWorker(RayOwner):
    """A decode worker; "a worker" until it has said which."""

    def __init__(self, handle: ActorHandle[Any]) -> None:
        super().__init__(handle, "a worker")

    async def info(self) -> WorkerInfo:
        info: WorkerInfo = await self._call("info")
        self._name = info.worker_id
        return info

    async def connect_gateway(self, address: str, secret: bytes) -> None:
        await self._call("connect_gateway", address, secret)

    async def submit(self, request: EngineRequest) -> None:
        await self._call("submit", request)

    async def cancel(self, request_id: str, is_stopped: bool) -> None:
        await self._call("cancel", request_id, is_stopped)

    async def explain(self, request_id: str) -> Explanation | None:
        explanation: Explanation | None = await self._call("explain", request_id)
        return explanation


class RayNode(RayOwner):
    """A CacheNode."""

    async def notes(self) -> list[str]:
        notes: list[str] = await self._call("notes")
        return notes

    async def pid(self) -> int:
        info: dict[str, Any] = await self._call("info")
        pid: int = info["pid"]
        return pid

    async def clears(self) -> Told:
        told: Told = await self._call("clears")
        return told

    async def record(self, path: str, max_bytes: int, is_only: bool) -> RecordingStatus:
        status: RecordingStatus = await self._call("record", path, max_bytes, is_only)
        return status

    async def stop_recording(self) -> RecordingStatus | None:
        status: RecordingStatus | None = await self._call("stop_recording")
        return status


class RayDirectory:
    """The directory of who holds which pages."""

    def __init__(self, handle: ActorHandle[Any]) -> None:
        self._handle = handle
        self._pid = 0
        self._condition = Condition(time.time())

    def is_now(self, handle: ActorHandle[Any]) -> None:
        """It was restarted."""
        self._handle = handle

    async def status(self) -> inference_pb2.DirectoryStatus:
        """As `kvtier status` shows it."""
        try:
            async with asyncio.timeout(HEALTH_S):
                asked = self._handle.info.remote(), self._handle.stats.remote()
                answers: list[Any] = await asyncio.gather(*asked)
        except (RayError, TimeoutError) as error:
            why = f"it does not answer: {type(error).__name__}"
            since = self._condition.is_now(UNHEALTHY, time.time())
            return inference_pb2.DirectoryStatus(pid=self._pid, health=UNHEALTHY, detail=why, since=since)
        info, stats = answers
        if info["pid"] != self._pid:  # another life of it
            self._pid, self._condition = info["pid"], Condition(time.time())
        return inference_pb2.DirectoryStatus(
            pid=self._pid,
            health=HEALTHY,
            since=self._condition.is_now(HEALTHY, time.time()),
            entries=stats.entries,
            holders=len(stats.holders),
            nbytes=stats.nbytes,
        )

    async def lookup(self, keys: bytes) -> list[Held]:
        """Holders of a prompt's pages. Raises OwnerDown when it can't say."""
        try:
            found = await self._handle.lookup.remote(keys)
        except RayError as error:
            raise OwnerDown(f"the directory does not answer: {type(error).__name__}") from error
        return [*map(Held._make, found)]


async def _living(workers: Sequence[RayWorker]) -> tuple[list[tuple[WorkerInfo, RayWorker]], list[RayWorker]]:
    """Those that say what they are, and those that may live and don't. Raises GatewayError when there is none to begin with."""
    answers = list(zip(await asyncio.gather(*map(_info, workers)), workers, strict=True))
    there = [(info, port) for info, port in answers if isinstance(info, WorkerInfo)]
    if not there:
        raise GatewayError("no worker lives, or none answers: start one first")
    return there, [port for info, port in answers if isinstance(info, Silence)]


async def _info(worker: RayWorker) -> WorkerInfo | Silence | None:
    """None: it is dead."""
    try:
        return await within(CONNECT_S, worker.info())
    except (OwnerDown, Refusal, Silence) as error:
        log.error("the gateway starts without a worker: %s", error)
        if isinstance(error, OwnerDown):
            return None
        return error if isinstance(error, Silence) else Silence(CONNECT_S)


async def _node(handle: ActorHandle[Any]) -> Node:
    info = await handle.info.remote()
    return Node(info["id"], info["pid"], RayNode(handle, info["id"]), info.get("host", ""))
