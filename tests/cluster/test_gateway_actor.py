"""What the gateway's actor makes of handles that answer, are dead, or say nothing; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_kit import echo_info
from ray.exceptions import RayActorError

from kvtier.cluster.config.deployment import GrpcConfig
from kvtier.cluster.gateway import actor as gateway
from kvtier.cluster.gateway.actor import GatewayActor, RayWorker
from kvtier.cluster.gateway.owners.locations import Addresses
from kvtier.cluster.gateway.server import GatewayError
from kvtier.cluster.health.supervision import Kind, Lost, Member
from kvtier.cluster.supervisor.watch import Part, Watch
from kvtier.proto import inference_pb2
from kvtier.workers.requests.api import WorkerInfo


def handle(**methods: Callable[..., Awaitable[Any]]) -> Any:
    """An actor's handle with these methods."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


async def dead(*_: object) -> Any:
    raise RayActorError


async def silent(*_: object) -> Any:
    await asyncio.Event().wait()


def saying(answer: object) -> Any:
    async def info() -> object:
        return answer

    return handle(info=info)


@pytest.fixture
def actor(tmp_path: Any) -> GatewayActor:
    """A gateway that serves, as far as exchanges are concerned."""
    made = GatewayActor(str(tmp_path), "echo", GrpcConfig(port=0), (), 4, workers=8)
    made._core = SimpleNamespace(addresses=Addresses())  # type: ignore[assignment]
    made._endpoint = "here"
    return made


def test_an_exchange_that_cannot_be_attached_is_an_error_so_that_it_is_tried_again(
    actor: GatewayActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "CONNECT_S", 0.05)

    async def story() -> None:
        await actor.attach_exchange(saying({"node_id": "node-1", "address": "host:7"}))
        for method, why in ((dead, "is dead"), (silent, "does not answer")):
            with pytest.raises(GatewayError, match=why):
                await actor.attach_exchange(handle(info=method))
            await actor._attach_if_living(handle(info=method))  # at the start the others don't wait for it

    asyncio.run(story())
    assert actor._core.addresses.of("node-1") == "host:7"


def test_nothing_is_told_of_an_exchange_that_is_lost(actor: GatewayActor) -> None:
    for node_id, address in (("node-0", "host:6"), ("node-1", "host:7")):
        actor._core.addresses.attach(node_id, address)
    asyncio.run(actor.detach_exchange("node-1"))
    asyncio.run(actor.detach_exchange("node-1"))

    assert [actor._core.addresses.of(node_id) for node_id in ("node-0", "node-1")] == ["host:6", ""]


def test_the_supervisor_tells_the_gateway_of_a_lost_exchange_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ask = SimpleNamespace(remote=lambda *_: None)
    gateway_handle = SimpleNamespace(
        detach_exchange=SimpleNamespace(remote=told.append), heartbeat=ask, health=ask, hear_states=ask
    )
    members = [
        Member("gateway", Kind.GATEWAY),
        *(Member(f"exchange of node-{n}", Kind.EXCHANGE, f"node-{n}") for n in range(2)),
        Member("cache node node-1", Kind.NODE, "node-1"),
    ]
    parts = [Part(one, lambda: None, lambda: False, gateway_handle, (1, one.name)) for one in members]
    watch = Watch(parts, 60.0)
    lost = {"exchange of node-1", "cache node node-1"}
    monkeypatch.setattr(watch, "_seen", lambda part: [Lost(part.name, "")] if part.name in lost else [])

    assert "exchange of node-1 died" in watch.look(1.0)
    assert told == ["node-1"]


def test_a_node_that_answers_nothing_is_not_waited_for(
    actor: GatewayActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "CONNECT_S", 0.05)

    with pytest.raises(GatewayError, match="the node to attach does not answer"):
        asyncio.run(actor.attach_node(handle(info=silent)))


def test_a_worker_that_says_nothing_at_the_start_is_left_out_and_one_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "CONNECT_S", 0.05)
    info = echo_info("w0")

    async def story() -> None:
        well, mute, gone = (RayWorker(one) for one in (saying(info), handle(info=silent), handle(info=dead)))
        there, left_out = await gateway._living([well, mute, gone])
        assert [(told.worker_id, port) for told, port in there] == [("w0", well)]
        assert left_out == [mute]
        with pytest.raises(GatewayError, match="no worker lives, or none answers"):
            await gateway._living([mute, gone])

    asyncio.run(story())


def test_watchers_of_the_status_share_an_answer(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GatewayActor] = []

    async def ask(actor: GatewayActor) -> inference_pb2.StatusReply:
        asked.append(actor)
        return inference_pb2.StatusReply(endpoint="here")

    monkeypatch.setattr(GatewayActor, "_asked_status", ask)
    made = GatewayActor(str(tmp_path), "echo", GrpcConfig(port=0), (), 4)

    async def story() -> list[inference_pb2.StatusReply]:
        return await asyncio.gather(*(made.status() for _ in range(8)))

    assert [reply.endpoint for reply in asyncio.run(story())] == ["here"] * 8
    assert len(asked) == 1


def test_room_for_calls_is_that_of_all_workers_there_may_be(
    actor: GatewayActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    class Server:
        def __init__(self, core: object, cache: object, status: object, config: object, calls: int) -> None:
            limits.append(calls)

        async def start(self) -> str:
            return "here"

    async def connect(workers: dict[str, RayWorker]) -> None:
        assert list(workers) == ["w0"]

    told: WorkerInfo = echo_info("w0")
    monkeypatch.setattr(gateway, "GatewayServer", Server)
    monkeypatch.setattr(gateway.gc, "freeze", lambda: None)
    monkeypatch.setattr(actor, "_connect_outputs", connect)
    asyncio.run(actor.start([saying(told), handle(info=dead)], []))
    actor._core.close()

    assert limits == [8 * 4]
