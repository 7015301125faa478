"""The gateway as it is deployed: a Ray actor before worker and node actors, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from gateway_kit import EchoWorker, echo_info, folder_digest, make_byte_tokenizer
from waiting import eventually

from kvtier.cli.client import ClientError, completion, connect
from kvtier.cluster.config import GrpcConfig, TenantConfig
from kvtier.cluster.gateway import Gateway, GatewayActor, check_agreement
from kvtier.cluster.gateway_server import GatewayError
from kvtier.proto import inference_pb2, inference_pb2_grpc
from kvtier.workers.api import EngineRequest, Output
from kvtier.workers.model_text import Text
from kvtier.workers.outputs import OutputSender

TENANTS = (TenantConfig(name="default"),)


class EchoActor:
    """An echoing worker, or a node, as a Ray actor that sends its outputs as a real worker does."""

    def __init__(self, worker_id: str, digest: str, *, is_endless: bool = False) -> None:
        self._worker = EchoWorker(
            replace(echo_info(worker_id, digest), pid=os.getpid()), is_manual=is_endless
        )
        self._sender: OutputSender | None = None

    async def info(self) -> Any:
        return self._worker.info

    async def connect_gateway(self, address: str, secret: bytes) -> None:
        self._sender = OutputSender.connect(address, secret, self._worker.info.worker_id)
        self._worker.sink = self._send

    def _send(self, worker_id: str, outputs: list[Output]) -> None:
        assert self._sender is not None
        self._sender.send(outputs)

    async def submit(self, request: EngineRequest) -> None:
        await self._worker.submit(request)
        if self._worker.is_manual:
            self._worker.step()

    async def cancel(self, request_id: str, is_stopped: bool) -> None:
        await self._worker.cancel(request_id, is_stopped)

    async def stats(self) -> Any:
        return await self._worker.stats()

    async def health(self) -> str | None:
        return None

    async def refuse(self) -> None:
        self._worker.max_waiting = 0


class NodeActor:
    """A node that holds nothing."""

    async def info(self) -> dict[str, Any]:
        return {"id": "n0", "pid": os.getpid()}

    async def health(self) -> str | None:
        return None

    async def notes(self) -> list[str]:
        return ["started fresh"]

    async def stats(self) -> Any:
        from kvtier.tier.stats import Snapshot

        return Snapshot()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A small local Ray."""
    tests = str(Path(__file__).resolve().parents[1])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": tests}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte tokenizer's folder."""
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def _echo(worker_id: str, folder: Path, *, is_endless: bool = False) -> Any:
    return ray.remote(num_cpus=0)(EchoActor).remote(worker_id, folder_digest(folder), is_endless=is_endless)


def _node() -> Any:
    return ray.remote(num_cpus=0)(NodeActor).remote()


def test_requests_cross_real_processes_and_a_killed_workers_fail_at_once(cluster: None, folder: Path) -> None:
    gateway = Gateway.remote(str(folder), "echo", GrpcConfig(port=0), TENANTS, 64)
    doomed, other, node = _echo("w0", folder, is_endless=True), _echo("w1", folder), _node()
    endpoint = ray.get(gateway.start.remote([doomed, other], [node]), timeout=60)

    with connect(endpoint) as client, grpc.insecure_channel(endpoint) as channel:
        # A request, and what is running.
        result = completion(client.generate("hello ", max_tokens=12, worker="w1"))
        assert result["text"] == "hello hello "
        assert client.stats()["requests"] == 4
        status = client.status()
        assert (status["endpoint"], status["model"]["name"]) == (endpoint, "echo")
        assert [(w["id"], w["node"], w["role"]) for w in status["workers"]] == [
            ("w0", "n0", "decode"),
            ("w1", "n0", "decode"),
        ]
        pids = {part["pid"] for part in [*status["workers"], *status["nodes"]]}
        assert len(pids | {status["gateway_pid"], os.getpid()}) == 5

        # What a worker raises arrives without Ray's traceback.
        ray.get(other.refuse.remote())
        with pytest.raises(ClientError, match="^0 requests are waiting") as refused:
            completion(client.generate("hello ", worker="w1"))
        assert refused.value.status == "RESOURCE_EXHAUSTED"

        # A worker dies in the middle of a request, while no call to it is under way.
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="abc", worker="w0"), timeout=30
        )
        assert next(call).text == "a"
        ray.kill(doomed)
        with pytest.raises(grpc.RpcError) as failed:
            next(call)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "worker w0 went down" in failed.value.details()
        assert [w["health"] for w in client.status()["workers"]] == ["dead", "healthy"]
        with pytest.raises(ClientError, match="worker w0 is down"):
            completion(client.generate("ab", worker="w0"))

        # A node dies, and is found dead when asked.
        ray.kill(node)
        assert eventually(lambda: client.status()["nodes"][0]["health"] == "dead")
        assert client.stats()["requests"] == 4

    ray.get(gateway.stop.remote(1.0), timeout=30)
    with pytest.raises(ClientError, match="nothing answers"):
        connect(endpoint)


def test_a_tokenizer_that_differs_from_a_workers_is_a_loud_error(folder: Path) -> None:
    text = Text.load(folder)
    same, other = echo_info("w0", folder_digest(folder)), echo_info("w1", "0123")

    check_agreement([same], text)

    with pytest.raises(GatewayError, match="worker w1 has tokenizer 0123, the gateway"):
        check_agreement([same, other], text)
    with pytest.raises(GatewayError, match="the gateway none"):
        check_agreement([same], None)


def test_workers_that_differ_in_their_root_are_named_with_the_field() -> None:
    one = echo_info("w0")
    other = replace(echo_info("w1"), root_fields={"model": "another"})

    with pytest.raises(GatewayError, match="w0 and w1 differ in model: echo and another"):
        check_agreement([one, other], None)


def test_a_damaged_tokenizer_is_told_by_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    gateway = GatewayActor(str(tmp_path), "echo", GrpcConfig(port=0), TENANTS, 64)

    with pytest.raises(GatewayError, match="can't read the tokenizer"):
        asyncio.run(gateway.start([], []))
