"""The gateway before real workers with a tiny model: the same tokens, wherever a request is prefilled, cut and resumed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_kit import Served
from gateway_kit import serving as gateway_serving
from waiting import until
from worker_kit import Client as WorkerClient
from worker_kit import Slowed, caching, keys, serving, tiny_runner

from kvtier.cli.client import Client, completion, connect
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.tier.node.service import CacheService
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.requests.api import EngineRequest, Explanation, Output, WorkerInfo, WorkerStopped
from kvtier.workers.scheduling.scheduler import PROMPT_LOGITS

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "max_tokens": 40,
    "n": 2,
    "temperature": 0.8,
    "seed": 11,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 4.0},
    "logprobs": 1,
}


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


class Port:
    """A worker in this process, as the gateway calls it."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self.asked: list[EngineRequest] = []

    async def submit(self, request: EngineRequest) -> None:
        self._worker.submit(request)
        self.asked.append(request)

    async def cancel(self, request_id: str, is_stopped: bool) -> None:
        self._worker.cancel(request_id, is_stopped=is_stopped)

    async def explain(self, request_id: str) -> Explanation | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, self._worker.explain, request_id)
        except WorkerStopped as error:
            raise OwnerDown(str(error)) from error

    async def health(self) -> str | None:
        return self._worker.error


class World:
    """Workers of one node, each with its runner, and a gateway before them."""

    def __init__(
        self, client: Client, served: Served, service: CacheService, workers: list[WorkerClient]
    ) -> None:
        self.client = client
        self.served = served
        self.service = service
        self.workers = workers
        self.runners: list[Slowed] = []
        self.ports: list[Port] = []

    def ask(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        return completion(self.client.generate(tokens, **{**OPTIONS, "timeout_s": 60, **options}))

    def is_quiet(self) -> bool:
        return self.served.core.in_flight == 0 and all(
            client.worker.idle() for client in self.workers if client.worker.is_healthy()
        )


@contextmanager
def world(model: Path, folder: Path, *roles: str) -> Iterator[World]:
    with ExitStack() as stack:
        service = stack.enter_context(caching(folder))
        runners = [tiny_runner(model, 200) for _ in roles]
        workers = [
            stack.enter_context(serving(runner, folder / "s", worker_id=f"w{number}", role=role))
            for number, (runner, role) in enumerate(zip(runners, roles, strict=True))
        ]
        infos: list[WorkerInfo] = [client.worker.info() for client in workers]
        served = stack.enter_context(gateway_serving(None, infos=infos))
        made = World(stack.enter_context(connect(served.endpoint)), served, service, workers)
        made.runners = runners
        made.ports = [Port(client.worker) for client in workers]
        for port, info, client in zip(made.ports, infos, workers, strict=True):
            served.call(served.core.attach, info, port)
            client.worker._loop.outputs._sink = to_gateway(served, info.worker_id)
        yield made
        until(made.is_quiet, "nothing is left at any worker")


def to_gateway(served: Served, worker_id: str) -> Any:
    def sink(outputs: list[Output]) -> None:
        served.loop.call_soon_threadsafe(served.core.on_outputs, worker_id, outputs)

    return sink


def told(result: dict[str, Any]) -> list[Any]:
    return [
        (one["token_ids"], one["finish_reason"], [p["logprob"] for p in one["logprobs"]])
        for one in result["sequences"]
    ]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for (ids, reason, logprobs), (ids2, reason2, logprobs2) in zip(told(one), told(other), strict=True):
        assert (ids, reason) == (ids2, reason2)
        assert logprobs == pytest.approx(logprobs2, abs=1e-4)


def test_a_prompt_prefilled_at_one_worker_goes_on_at_another_with_the_same_tokens(
    tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = prompt(200, 1)
    with world(tiny_llama, tmp_path, "prefill", "decode") as made:
        whole = made.ask(tokens, worker="w1", no_cache=True)
        made.runners[1].rows = 0
        split = made.ask(tokens, request_id="split")
        explained = made.client.explain("split")
        decoded = made.runners[1].rows
        counted = [client.worker.stats().totals.requests for client in made.workers]

    same(split, whole)
    assert [request.is_prefill_only for request in made.ports[0].asked] == [True]
    assert [len(request.resumed) for request in made.ports[1].asked] == [0, 2]
    assert decoded <= 2 * (40 + 16), "the prompt's whole pages came through the node"
    assert split["usage"]["computed_tokens"] == 200, "counted where it was prefilled"
    assert counted == [1, 1], "each request once"
    assert [move["worker"] for move in explained["moves"]] == ["w1"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_prompt_told_in_part_is_told_to_its_end_where_its_request_goes_on(
    tiny_llama: Path, tmp_path: Path, chunks: int
) -> None:
    """Its first worker breaks in the middle of the prompt; the other one tells all of it, of which the rest is taken."""
    tokens = prompt(3 * PROMPT_LOGITS, 6)
    asked: dict[str, Any] = {"max_tokens": 4, "logprobs": 0, "prompt_logprobs": 3}
    with world(tiny_llama, tmp_path, "both", "both") as made:
        whole = made.ask(tokens, worker="w1", **asked)
        steps = 0

        def end(batch: Any) -> None:
            nonlocal steps
            steps += 1
            if steps > chunks:
                raise RuntimeError("the model broke")

        made.runners[0].before = end
        moved = made.ask(tokens, worker="w0", **asked)
        made.runners[0].before = lambda batch: None

    assert len(whole["prompt_logprobs"]) == len(tokens) - 1
    assert {len(entry["top"]) for entry in whole["prompt_logprobs"]} == {3}
    assert moved["prompt_logprobs"] == whole["prompt_logprobs"]
    assert [one["token_ids"] for one in moved["sequences"]] == [
        one["token_ids"] for one in whole["sequences"]
    ]


@pytest.mark.parametrize("how", ["stops", "breaks"])
@pytest.mark.parametrize("after", [1, 17, 33])
def test_a_worker_that_ends_in_the_middle_costs_no_token(
    tiny_llama: Path, tmp_path: Path, how: str, after: int
) -> None:
    tokens = prompt(90, 2)
    with world(tiny_llama, tmp_path, "both", "both") as made:
        whole = made.ask(tokens, worker="w1", no_cache=True)
        for client in made.workers:
            client.worker.evict(keys(client.worker))
        steps = 0

        def end(batch: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == after + 1:
                if how == "breaks":
                    raise RuntimeError("the model broke")
                threading.Thread(target=made.workers[0].worker.stop).start()

        made.runners[0].before = end
        moved = made.ask(tokens, worker="w0", request_id="moved")
        explained = made.client.explain("moved")

    same(moved, whole)
    assert [move["worker"] for move in explained["moves"]] == ["w1"]
    assert made.ports[1].asked[-1].resumed
