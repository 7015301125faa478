"""The gateway as it is deployed: a Ray actor before worker and node actors, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import grpc
import psutil
import pytest
import ray
from gateway_kit import EchoWorker, echo_info, folder_digest, make_byte_tokenizer
from small_ray import kill, small_ray
from waiting import until

from kvtier.cli.client import ClientError, completion, connect
from kvtier.cluster.config.deployment import GrpcConfig, TenantConfig
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.actor import Gateway, GatewayActor, check_agreement
from kvtier.cluster.gateway.server import GatewayError
from kvtier.proto import inference_pb2, inference_pb2_grpc
from kvtier.workers.actor import CALLS_AT_ONCE, DecodeWorkerActor
from kvtier.workers.engine.heartbeat import TURN_S
from kvtier.workers.engine.outputs import OutputSender
from kvtier.workers.models.text import Text
from kvtier.workers.requests.api import EngineRequest, Output, SamplingParams
from kvtier.workers.scheduling.settings import EngineSettings

pytestmark = pytest.mark.slow

TENANTS = (TenantConfig(name="default"),)
PATIENCE_S = 300.0  # of a busy machine; no law hangs on it
Role = Literal["both", "prefill", "decode"]


class EchoActor:
    """An echoing worker, or a node, as a Ray actor that sends its outputs as a real worker does."""

    def __init__(self, worker_id: str, digest: str, *, is_endless: bool = False, role: Role = "both") -> None:
        info = replace(echo_info(worker_id, digest, role=role), pid=os.getpid())
        self._worker = EchoWorker(info, is_manual=is_endless)
        self._sender: OutputSender | None = None
        self._beating: asyncio.Future[None]  # tells that it turns, as a step loop does

    async def info(self) -> Any:
        return self._worker.info

    async def connect_gateway(self, address: str, secret: bytes) -> None:
        self._sender = OutputSender.connect(address, secret, self._worker.info.worker_id)
        self._worker.sink = self._send
        self._beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            self._send("", [])
            await asyncio.sleep(TURN_S)

    def _send(self, worker_id: str, outputs: list[Output]) -> None:
        assert self._sender is not None
        self._sender.send(outputs)

    async def submit(self, request: EngineRequest) -> None:
        await self._worker.submit(request)
        if self._worker.is_manual:
            self._worker.step()

    async def step(self) -> None:
        self._worker.step()

    async def running(self) -> list[str]:
        return list(self._worker.running)

    async def submitted(self) -> list[EngineRequest]:
        return self._worker.submitted

    async def explain(self, request_id: str) -> Any:
        return await self._worker.explain(request_id)

    async def cancel(self, request_id: str, is_stopped: bool) -> None:
        await self._worker.cancel(request_id, is_stopped)

    async def stats(self) -> Any:
        return await self._worker.stats()

    async def health(self) -> str | None:
        return None

    async def know(self, told: list[tuple[bytes, int]]) -> None:
        await self._worker.know(told)

    async def refuse(self) -> None:
        self._worker.max_waiting = 0


class DirectoryActor:
    """Says of every prompt that one node holds two pages of it."""

    async def lookup(self, keys: bytes) -> list[Held]:
        return [Held("n7", "", "L4", "peer:7", 2)] if len(keys) == 16 else []


class ExchangeActor:
    """A node's exchange that only says where it is."""

    async def info(self) -> dict[str, Any]:
        return {"node_id": "n0", "address": "host:9", "pid": os.getpid()}


class NodeActor:
    """A node that holds nothing."""

    async def info(self) -> dict[str, Any]:
        return {"id": "n0", "pid": os.getpid()}

    async def health(self) -> str | None:
        return None

    async def notes(self) -> list[str]:
        return ["started fresh"]

    async def clears(self) -> list[tuple[bytes, int]]:
        return []

    async def know(self, told: list[tuple[bytes, int]]) -> None:
        pass

    async def stats(self) -> Any:
        from kvtier.tier.stats import Snapshot

        return Snapshot()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A small local Ray."""
    with small_ray():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte tokenizer's folder."""
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def _echo(worker_id: str, folder: Path, *, is_endless: bool = False, role: Role = "both") -> Any:
    digest = folder_digest(folder)
    return ray.remote(num_cpus=0)(EchoActor).remote(worker_id, digest, is_endless=is_endless, role=role)


def _node() -> Any:
    return ray.remote(num_cpus=0)(NodeActor).remote()


def test_requests_cross_real_processes_and_a_killed_workers_fail_at_once(cluster: None, folder: Path) -> None:
    gateway = Gateway.remote(str(folder), "echo", GrpcConfig(port=0), TENANTS, 64)
    doomed, other, node = _echo("w0", folder, is_endless=True), _echo("w1", folder), _node()
    endpoint = ray.get(gateway.start.remote([doomed, other], [node]), timeout=PATIENCE_S)

    with connect(endpoint) as client, grpc.insecure_channel(endpoint) as channel:
        # A request, and what is running.
        result = completion(client.generate("hello ", max_tokens=12, worker="w1"))
        assert result["text"] == "hello hello "
        assert client.stats()["requests"] == 4
        status = client.status()
        assert (status["endpoint"], status["model"]["name"]) == (endpoint, "echo")
        assert [(w["id"], w["node"], w["role"]) for w in status["workers"]] == [
            ("w0", "n0", "both"),
            ("w1", "n0", "both"),
        ]
        pids = {part["pid"] for part in [*status["workers"], *status["nodes"]]}
        assert len(pids | {status["gateway_pid"], os.getpid()}) == 5

        # What a worker raises arrives without Ray's traceback.
        ray.get(other.refuse.remote())
        with pytest.raises(ClientError, match="^0 requests are waiting") as refused:
            completion(client.generate("hello ", worker="w1"))
        assert refused.value.status == "RESOURCE_EXHAUSTED"

        # A worker dies in the middle of a request, while no call to it is under way, and no other one takes it.
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="abc", worker="w0"), timeout=PATIENCE_S
        )
        assert next(call).text == "a"
        ray.kill(doomed)
        with pytest.raises(grpc.RpcError) as failed:
            next(call)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "worker w0 went down" in failed.value.details()
        assert "worker w1 did not take the request: 0 requests are waiting" in failed.value.details()
        assert [w["health"] for w in client.status()["workers"]] == ["dead", "healthy"]
        with pytest.raises(ClientError, match="worker w0 is down"):
            completion(client.generate("ab", worker="w0"))

        # A node dies, and is found dead when asked.
        ray.kill(node)
        until(lambda: client.status()["nodes"][0]["health"] == "dead", "the node is found dead")
        assert client.stats()["requests"] == 4

    ray.get(gateway.stop.remote(1.0), timeout=PATIENCE_S)
    with pytest.raises(ClientError, match="nothing answers"):
        connect(endpoint)


def test_a_killed_workers_request_goes_on_at_another_and_it_comes_back(cluster: None, folder: Path) -> None:
    gateway = Gateway.remote(str(folder), "echo", GrpcConfig(port=0), TENANTS, 64)
    doomed, other = _echo("w0", folder, is_endless=True), _echo("w1", folder)
    endpoint = ray.get(gateway.start.remote([doomed, other], [_node()]), timeout=PATIENCE_S)

    with connect(endpoint) as client:
        chunks = client.generate("abcd", max_tokens=9, worker="w0", request_id="r", timeout_s=PATIENCE_S)
        text = next(chunks).text
        ray.get(doomed.step.remote())
        text += next(chunks).text
        ray.kill(doomed)
        assert text + "".join(chunk.text for chunk in chunks) == "abcdabcda"
        [move] = client.explain("r")["moves"]
        assert (move["worker"], move["tokens"]) == ("w1", 2)
        assert "w0 went down" in move["reason"]

        # It is restarted: as another process of the same name.
        again = _echo("w0", folder)
        assert ray.get(gateway.attach_worker.remote(again), timeout=PATIENCE_S) == "w0"
        assert completion(client.generate("ab", max_tokens=4, worker="w0"))["text"] == "abab"
        assert [w["health"] for w in client.status()["workers"]] == ["healthy", "healthy"]

        # A stranger, with another tokenizer, is not taken.
        with pytest.raises(GatewayError, match="worker w2 has tokenizer 0123"):
            stranger = ray.remote(num_cpus=0)(EchoActor).remote("w2", "0123")
            ray.get(gateway.attach_worker.remote(stranger), timeout=PATIENCE_S)

        # One more joins, and one leaves.
        third = _echo("w2", folder)
        assert ray.get(gateway.attach_worker.remote(third), timeout=PATIENCE_S) == "w2"
        assert ray.get(gateway.detach_worker.remote("w1"))
        assert {w["id"] for w in client.status()["workers"]} == {"w0", "w2"}
        assert completion(client.generate("ab", max_tokens=4, worker="w2"))["text"] == "abab"
    ray.get(gateway.stop.remote(1.0), timeout=PATIENCE_S)


def test_nothing_waits_for_a_worker_whose_process_is_stalled(cluster: None, folder: Path) -> None:
    gateway = Gateway.remote(str(folder), "echo", GrpcConfig(port=0), TENANTS, 64)
    hung, other = _echo("w0", folder, is_endless=True), _echo("w1", folder)
    endpoint = ray.get(gateway.start.remote([hung, other], [_node()]), timeout=PATIENCE_S)

    with connect(endpoint) as client, ThreadPoolExecutor(8) as pool:

        def ask(**options: Any) -> dict[str, Any] | str:
            try:
                return completion(client.generate("abcd", **options))
            except ClientError as error:
                return error.status

        def health() -> list[str]:
            return [worker["health"] for worker in client.status()["workers"]]

        running = client.generate("abcd", max_tokens=60, worker="w0", timeout_s=PATIENCE_S)
        text = next(iter(running)).text
        process = psutil.Process(client.status()["workers"][0]["pid"])
        process.suspend()
        try:
            # Before anything knows: what it is sent ends by its deadline, and others are served meanwhile.
            late = [pool.submit(ask, worker="w0", timeout_s=3.0) for _ in range(8)]
            while not all(call.done() for call in late):
                assert ask(max_tokens=4, worker="w1", timeout_s=PATIENCE_S)["text"] == "abcd"  # type: ignore[index]
            assert [call.result() for call in late] == ["DEADLINE_EXCEEDED"] * 8

            until(lambda: health() == ["stalled", "healthy"], "it is seen to stall")
            assert {ask(max_tokens=4, timeout_s=PATIENCE_S)["worker"] for _ in range(4)} == {"w1"}  # type: ignore[index]
        finally:
            process.resume()
        until(lambda: health() == ["healthy", "healthy"], "it is heard of again")
        until(lambda: len(ray.get(hung.running.remote())) == 1, "what came too late is called off")

        # What it ran when it was stalled is killed with it, and goes on elsewhere.
        process.suspend()
        process.kill()
        assert text + "".join(chunk.text for chunk in running) == 15 * "abcd"
    ray.get(gateway.stop.remote(1.0), timeout=PATIENCE_S)


def test_a_worker_whose_calls_all_wait_for_its_step_loop_still_tells_that_it_is_stalled(
    cluster: None, tiny_llama: Path
) -> None:
    def stall(actor: Any) -> None:
        actor._runner.forward = lambda batch: threading.Event().wait()

    worker = DecodeWorkerActor.remote(
        worker_id="w0",
        node_id="n0",
        socket_path=None,
        model_path=str(tiny_llama),
        tenants={"default": ""},
        engine=EngineSettings(),
        dtype="float32",
        page_tokens=16,
        l1_bytes=1 << 20,
        max_context=1024,
    )
    assert ray.get(worker.heartbeat.remote(), timeout=300) < 60.0  # loading a model is no stall

    ray.get(worker.__ray_call__.remote(stall), timeout=PATIENCE_S)
    sampling = SamplingParams(max_tokens=4)
    ray.get(
        worker.submit.remote(EngineRequest("r", "default", tuple(range(40)), sampling)), timeout=PATIENCE_S
    )

    def heartbeat() -> float:
        return float(ray.get(worker.heartbeat.remote(), timeout=PATIENCE_S))

    # Before that its loop may still answer, and after it none is answered.
    until(lambda: heartbeat() > 3 * TURN_S, "its heartbeat is missed")
    waiting = [worker.stats.remote() for _ in range(2 * CALLS_AT_ONCE)]
    before = heartbeat()
    until(lambda: heartbeat() > before, "it is missed all the longer")
    assert not ray.wait(waiting, timeout=0)[0]
    ray.kill(worker)


def test_a_new_gateway_takes_the_old_ones_port_and_workers(cluster: None, folder: Path) -> None:
    first = Gateway.remote(str(folder), "echo", GrpcConfig(port=0), TENANTS, 64)
    worker, dead, node = _echo("w0", folder), _echo("w1", folder), _node()
    endpoint = ray.get(first.start.remote([worker, dead], [node]), timeout=PATIENCE_S)
    port = int(endpoint.rpartition(":")[2])
    with grpc.insecure_channel(endpoint) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="abc", sampling=inference_pb2.Sampling(max_tokens=500)),
            timeout=PATIENCE_S,
        )
        next(call)
        ray.kill(first)
        with pytest.raises(grpc.RpcError) as failed:
            list(call)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    kill(dead)

    second = Gateway.remote(str(folder), "echo", GrpcConfig(port=port), TENANTS, 64)
    assert ray.get(second.start.remote([worker, dead], [node]), timeout=PATIENCE_S) == endpoint

    with connect(endpoint) as client:
        assert completion(client.generate("ab", max_tokens=4))["text"] == "abab"
        assert [w["id"] for w in client.status()["workers"]] == ["w0"]
    ray.get(second.stop.remote(1.0), timeout=PATIENCE_S)


def test_hints_come_from_the_directory_and_from_where_a_prompt_was_prefilled(
    cluster: None, folder: Path
) -> None:
    gateway = Gateway.remote(str(folder), "echo", GrpcConfig(port=0), TENANTS, 64)
    workers = [_echo("p0", folder, role="prefill"), _echo("d0", folder, role="decode")]
    directory = ray.remote(num_cpus=0)(DirectoryActor).remote()
    exchange = ray.remote(num_cpus=0)(ExchangeActor).remote()
    endpoint = ray.get(gateway.start.remote(workers, [_node()], directory, [exchange]), timeout=PATIENCE_S)

    assert ray.get(directory.lookup.remote(b""), timeout=PATIENCE_S) == []

    def pair() -> tuple[EngineRequest, EngineRequest]:
        result = completion(client.generate("abcdefgh", max_tokens=9))
        assert (result["text"], result["worker"]) == ("abcdefgha", "p0")
        first, second = (ray.get(worker.submitted.remote())[-1] for worker in workers)
        return first, second

    with connect(endpoint) as client:
        # On a busy machine the directory's answer may come too late, which costs a hint and no more.
        first, second = until(
            lambda: next((p for p in [pair()] if p[0].remotes), None), "a hint comes in time"
        )
        assert (first.remotes, first.is_prefill_only) == ((("n7", "peer:7", 2),), True)
        # Both workers are of one node, which has the pages below L1: nothing else is asked for them.
        assert (second.remotes, second.resumed) == ((), ((97,),))

        ray.kill(directory)
        for _ in range(5):
            assert completion(client.generate("abcdefgh", max_tokens=2))["text"] == "ab"
    ray.get(gateway.stop.remote(1.0), timeout=PATIENCE_S)


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
