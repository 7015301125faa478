"""The gateway's Ray actor: builds the gateway out of worker and node handles, and translates Ray's failures."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import grpc
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from kvtier.cluster.config import GrpcConfig, TenantConfig
from kvtier.cluster.gateway_cache import CacheVerbs, Node
from kvtier.cluster.gateway_core import GatewayCore, Outcomes, OwnerDown, Tenant
from kvtier.cluster.gateway_outputs import OutputReceiver
from kvtier.cluster.gateway_requests import Refusal
from kvtier.cluster.gateway_server import GatewayError, GatewayServer
from kvtier.proto import inference_pb2
from kvtier.tier.base import PageInfo
from kvtier.tier.page import TierName
from kvtier.tier.recorder import RecordingStatus
from kvtier.tier.stats import Snapshot
from kvtier.workers.api import EngineRequest, Explanation, WorkerInfo
from kvtier.workers.model_text import Text, TextError

CONNECT_S = 30.0  # for workers to open their output connections


class GatewayActor:
    """The one door of a deployment. An async actor: all its state belongs to its event loop.

    `start` is called once, when workers and nodes are ready; `stop` before they go. It must run as an async Ray actor
    (`Gateway`), on the node whose address clients use.
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
    ) -> None:
        """`max_sequences`: of one worker, running and waiting together; more are refused.

        `window` and `sinks` are those of requests that set none; 0: the model's own attention.
        """
        self._model_name = model_name
        self._grpc_config = grpc_config
        self._tenants = {tenant.name: tenant.salt for tenant in tenants}
        self._max_sequences = max_sequences
        self._window = window
        self._sinks = sinks
        self._text: Text | None = None
        self._text_error: TextError | None = None  # raised by `start`: what a constructor raises, Ray wraps
        try:
            self._text = Text.load(model_path)
        except TextError as error:
            self._text_error = error
        self._endpoint = ""
        self._core: GatewayCore
        self._cache: CacheVerbs
        self._receiver: OutputReceiver
        self._server: GatewayServer

    async def start(self, workers: Sequence[ActorHandle[Any]], nodes: Sequence[ActorHandle[Any]]) -> str:
        """Connect to everything and listen; returns HOST:PORT. Raises GatewayError."""
        if self._text_error is not None:
            raise GatewayError(str(self._text_error))
        infos: list[WorkerInfo] = list(await asyncio.gather(*(handle.info.remote() for handle in workers)))
        check_agreement(infos, self._text)
        ports = [RayWorker(handle, info.worker_id) for handle, info in zip(workers, infos, strict=True)]
        self._core = GatewayCore(
            zip(infos, ports, strict=True), self._text, self._tenants, self._max_sequences, self._window
        )
        self._cache = CacheVerbs(self._core, await asyncio.gather(*map(_node, nodes)), self._tenants)
        await self._connect_outputs(infos, workers)
        self._server = GatewayServer(
            self._core, self._cache, self.status, self._grpc_config, len(infos) * self._max_sequences
        )
        self._endpoint = await self._server.start()
        gc.freeze()  # what was loaded stays: collections need not look at it
        return self._endpoint

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, give those in flight `grace_s`, cancel the rest, and close."""
        if not self._endpoint:
            return  # it never listened
        self._core.stop()
        await self._server.stop(grace_s)
        await self._core.settle()
        self._receiver.close()
        self._core.close()

    async def status(self) -> inference_pb2.StatusReply:
        """What is running, as `kvtier status` shows it."""
        info = self._core.info
        return inference_pb2.StatusReply(
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
        )

    async def _connect_outputs(
        self, infos: Sequence[WorkerInfo], workers: Sequence[ActorHandle[Any]]
    ) -> None:
        worker_ids = [info.worker_id for info in infos]
        self._receiver = OutputReceiver(worker_ids, self._core.on_outputs, self._core.lose_worker)
        address = await self._receiver.start(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        secret = self._receiver.secret
        await asyncio.gather(*(handle.connect_gateway.remote(address, secret) for handle in workers))
        try:
            await self._receiver.wait_complete(CONNECT_S)
        except TimeoutError as error:
            raise GatewayError(str(error)) from error


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

    async def pin(self, keys: list[bytes]) -> Outcomes:
        outcomes: Outcomes = await self._call("pin", keys)
        return outcomes

    async def unpin(self, keys: list[bytes]) -> Outcomes:
        outcomes: Outcomes = await self._call("unpin", keys)
        return outcomes

    async def evict(self, keys: list[bytes], tier: TierName | None) -> Outcomes:
        outcomes: Outcomes = await self._call("evict", keys, tier)
        return outcomes

    async def clear(self, tenant: Tenant) -> Outcomes:
        outcomes: Outcomes = await self._call("clear", tenant)
        return outcomes

    async def verify(self, keys: list[bytes] | None) -> Outcomes:
        outcomes: Outcomes = await self._call("verify", keys)
        return outcomes

    async def record(self, path: str, max_bytes: int, is_only: bool) -> RecordingStatus:
        status: RecordingStatus = await self._call("record", path, max_bytes, is_only)
        return status

    async def stop_recording(self) -> RecordingStatus | None:
        status: RecordingStatus | None = await self._call("stop_recording")
        return status


class RayWorker(RayOwner):
    """A decode worker."""

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


async def _node(handle: ActorHandle[Any]) -> Node:
    info = await handle.info.remote()
    return Node(info["id"], info["pid"], RayNode(handle, info["id"]))
