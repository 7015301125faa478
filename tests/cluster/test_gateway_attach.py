"""Workers that come, come back, or have only lost their connection to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from gateway_kit import EchoWorker, echo_info

from kvtier.cluster.gateway import attach as gateway_attach
from kvtier.cluster.gateway.admission import GatewayCore
from kvtier.cluster.gateway.attach import Attachments
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.server import GatewayError
from kvtier.cluster.gateway.streams.outputs import OutputReceiver
from kvtier.workers.engine.outputs import OutputSender
from kvtier.workers.requests.api import WorkerInfo


class Echo(EchoWorker):
    """An echoing worker that connects as a real one does. `is_dead`: nothing reaches it."""

    is_dead = False
    connections = 0
    asked = 0  # who it is
    is_deaf = False  # it answers nothing
    sender: OutputSender | None = None

    async def about(self) -> WorkerInfo:
        self.asked += 1
        if self.is_dead:
            raise OwnerDown("its process ended")
        return self.info

    async def connect_gateway(self, address: str, secret: bytes) -> None:
        self._check_alive()
        while self.is_deaf:
            await asyncio.sleep(0.002)
        self.connections += 1
        self.sender = OutputSender.connect(address, secret, self.info.worker_id)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise OwnerDown("its process ended")

    def hang_up(self) -> None:
        assert self.sender is not None
        self.sender.close()


class Port:
    """An Echo as the gateway calls it: `info` is a question there."""

    def __init__(self, echo: Echo) -> None:
        self.echo = echo

    def __getattr__(self, name: str) -> object:
        return getattr(self.echo, name)

    async def info(self) -> WorkerInfo:
        return await self.echo.about()


class Gateway:
    """A gateway's core with its receiver, before workers w0 and w1."""

    def __init__(self) -> None:
        self.echoes = [Echo(echo_info(name)) for name in ("w0", "w1")]
        self.ports = [Port(echo) for echo in self.echoes]
        self.core = GatewayCore(
            zip([echo.info for echo in self.echoes], self.ports, strict=True), None, {"default": ""}, 64
        )  # type: ignore[arg-type]
        self.receiver = OutputReceiver((), self.core.on_outputs, lambda *lost: self.attachments.lost(*lost))
        self.attachments: Attachments

    def is_up(self, name: str) -> bool:
        worker = self.core.workers.get(name)
        return worker is not None and worker.down is None and self.receiver.is_connected(name)


def refuse_strangers(info: WorkerInfo) -> None:
    if info.root_fields != {"model": "echo"}:
        raise GatewayError("another model")


@asynccontextmanager
async def connected() -> AsyncIterator[Gateway]:
    made = Gateway()
    address = await made.receiver.start("127.0.0.1")
    made.attachments = Attachments(made.core, made.receiver, address, refuse_strangers)
    await made.attachments.connect({p.echo.info.worker_id: p for p in made.ports})  # type: ignore[misc]
    try:
        yield made
    finally:
        made.attachments.close()
        made.receiver.close()
        made.core.close()
        for echo in made.echoes:
            if echo.sender is not None:
                echo.sender.close()
        await asyncio.sleep(0)


async def until(question: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not question():
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_attach, "RETRY_S", (0.01,) * 5)


def test_a_worker_that_only_lost_its_connection_is_connected_again() -> None:
    async def story() -> None:
        async with connected() as gateway:
            assert gateway.is_up("w0") and gateway.is_up("w1")

            gateway.echoes[0].hang_up()

            await until(lambda: gateway.core.workers["w0"].down is not None)
            await until(lambda: gateway.is_up("w0"))
            assert [echo.connections for echo in gateway.echoes] == [2, 1]

    asyncio.run(story())


def test_a_worker_that_stays_away_is_told_of_once_and_looked_for_on_and_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with connected() as gateway:
            gateway.echoes[0].is_dead = True
            gateway.echoes[0].hang_up()
            await until(lambda: "does not come back by itself" in caplog.text)
            asked = gateway.echoes[0].asked

            await until(lambda: gateway.echoes[0].asked > asked + 3)
            assert not gateway.is_up("w0") and gateway.is_up("w1")
            gateway.echoes[0].is_dead = False
            await until(lambda: gateway.is_up("w0"))
            await until(lambda: not gateway.attachments._tasks)
            assert caplog.text.count("does not come back by itself") == 1

    asyncio.run(story())


def test_one_life_of_a_worker_is_attached_once_by_the_first_caller() -> None:
    async def story() -> None:
        async with connected() as gateway:
            new = Echo(echo_info("w2"))
            port = Port(new)
            attached = await asyncio.gather(*(gateway.attachments.attach(port) for _ in range(3)))  # type: ignore[arg-type]
            gateway.echoes.append(new)

            assert attached == ["w2"] * 3
            assert new.connections == 1
            worker = gateway.core.workers["w2"]
            assert await gateway.attachments.attach(port) == "w2"  # type: ignore[arg-type]
            assert gateway.core.workers["w2"] is worker

    asyncio.run(story())


def test_another_life_takes_the_place_of_one_that_nothing_knows_to_be_gone() -> None:
    async def story() -> None:
        async with connected() as gateway:
            again = Echo(replace(echo_info("w0"), pid=12345))
            gateway.echoes.append(again)
            before = gateway.core.workers["w0"]

            await gateway.attachments.attach(Port(again))  # type: ignore[arg-type]

            assert before.down == "it was restarted"
            assert gateway.is_up("w0") and gateway.core.workers["w0"].info.pid == 12345

    asyncio.run(story())


@pytest.mark.parametrize(
    ("info", "wrong", "named"),
    [
        (replace(echo_info("w2"), root_fields={"model": "other"}), None, "another model"),
        (echo_info("w2"), "the step loop has ended", "worker w2 is not well: the step loop has ended"),
    ],
)
def test_a_worker_that_is_not_fit_is_not_attached(info: WorkerInfo, wrong: str | None, named: str) -> None:
    async def story() -> None:
        async with connected() as gateway:
            with pytest.raises(GatewayError, match=named):
                await gateway.attachments.attach(Port(Echo(info, wrong=wrong)))  # type: ignore[arg-type]
            assert "w2" not in gateway.core.workers

    asyncio.run(story())


@pytest.mark.parametrize("question", ["info", "health", "connect_gateway"])
def test_a_worker_that_answers_nothing_is_not_waited_for(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it came: the next try finds the way free."""
    monkeypatch.setattr(gateway_attach, "CONNECT_S", 0.1)

    async def story() -> None:
        async with connected() as gateway:
            new = Echo(echo_info("w2"))
            gateway.echoes.append(new)
            port = Port(new)

            async def hang(*_: object) -> None:
                await asyncio.Event().wait()

            setattr(port, question, hang)
            with pytest.raises(GatewayError, match=r"does not answer within 0\.1 s"):
                await gateway.attachments.attach(port)  # type: ignore[arg-type]
            assert "w2" not in gateway.core.workers

            monkeypatch.setattr(gateway_attach, "CONNECT_S", 20.0)
            assert await gateway.attachments.attach(Port(new)) == "w2"  # type: ignore[arg-type]

    asyncio.run(story())


def test_a_worker_that_is_taken_out_is_not_looked_for() -> None:
    async def story() -> None:
        async with connected() as gateway:
            gateway.echoes[0].hang_up()
            await until(lambda: gateway.core.workers["w0"].down is not None)
            assert gateway.attachments.detach("w0")
            await until(lambda: not gateway.attachments._tasks)

            assert list(gateway.core.workers) == ["w1"]
            assert gateway.echoes[0].connections == 1

    asyncio.run(story())


async def start(gateway: Gateway) -> None:
    address = await gateway.receiver.start("127.0.0.1")
    gateway.attachments = Attachments(gateway.core, gateway.receiver, address, refuse_strangers)
    await gateway.attachments.connect({p.echo.info.worker_id: p for p in gateway.ports})  # type: ignore[misc]


def test_a_worker_that_does_not_connect_at_the_start_is_left_out_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_attach, "CONNECT_S", 0.2)

    async def story() -> None:
        made = Gateway()
        made.echoes[0].is_deaf = True
        await start(made)
        assert made.core.workers["w0"].down is not None and made.is_up("w1")

        made.echoes[0].is_deaf = False
        await until(lambda: made.is_up("w0"))
        made.attachments.close()
        made.receiver.close()
        made.core.close()

    asyncio.run(story())


def test_where_nothing_connects_at_the_start_it_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_attach, "CONNECT_S", 0.1)

    async def story() -> None:
        made = Gateway()
        made.echoes[0].is_dead = made.echoes[1].is_deaf = True
        with pytest.raises(GatewayError, match=r"w0: .*its process ended; worker w1: .*not within 0\.1 s"):
            await start(made)
        await until(lambda: not made.attachments._tasks)
        made.receiver.close()
        made.core.close()

    asyncio.run(story())


def test_a_worker_that_did_not_say_who_it_is_is_attached_when_it_does() -> None:
    async def story() -> None:
        async with connected() as gateway:
            silent = Echo(echo_info("w2"))
            gateway.echoes.append(silent)
            said = asyncio.Event()

            async def about() -> WorkerInfo:
                await said.wait()
                return silent.info

            silent.about = about  # type: ignore[method-assign]
            gateway.attachments.look_for(Port(silent))  # type: ignore[arg-type]
            said.set()

            await until(lambda: gateway.is_up("w2"))

    asyncio.run(story())


def test_a_worker_that_is_dead_at_the_start_is_left_out_until_it_is_back() -> None:
    async def story() -> None:
        made = Gateway()
        made.echoes[0].is_dead = True
        address = await made.receiver.start("127.0.0.1")
        made.attachments = Attachments(made.core, made.receiver, address, refuse_strangers)
        await made.attachments.connect({p.echo.info.worker_id: p for p in made.ports})  # type: ignore[misc]
        assert made.core.workers["w0"].down is not None and made.is_up("w1")

        made.echoes[0].is_dead = False
        await until(lambda: made.is_up("w0"))

        made.attachments.close()
        made.receiver.close()
        made.core.close()
        for echo in made.echoes:
            echo.hang_up()

    asyncio.run(story())
