#!/usr/bin/env python3
"""What a request, and a token, cost a gateway's process: its real core and gRPC server, workers that answer at once.

  bench/scale_gateway.py [--workers 1000] [--requests 400] [--prompt 3072] [--streams 32] [--json FILE]

A client in a process of its own asks for answers of 1 token and of --tokens, `--streams` at a time; the gateway's CPU
time (all its threads) divided by requests is the cost of a request with its first token, and the difference by tokens
that of a token. Workers give a token to each of their sequences in one step, and a step's outputs come together, as over
their sockets, whose reading is not counted; no text is made, since prompts are token ids. The directory answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc.aio
from common import argument_parser, machine

from kvtier.cluster.config.deployment import GrpcConfig
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.admission import GatewayCore
from kvtier.cluster.gateway.cache_api.cache import CacheApi
from kvtier.cluster.gateway.owners.locations import Holders
from kvtier.cluster.gateway.server import GatewayServer
from kvtier.proto import inference_pb2, inference_pb2_grpc
from kvtier.workers.requests.api import EngineRequest, FinishReason, Output, Timings, Usage, WorkerInfo

VOCABULARY = 32000
CLIENT = "--as-client"
PAGE_TOKENS, PAGE_BYTES = 64, 64 * 131072
TIMINGS = Timings(0.1, 0.0, 50.0, 51.0, 100.0)


def info(number: int) -> WorkerInfo:
    """Of worker `number`, eight a node."""
    return WorkerInfo(
        worker_id=f"w{number}",
        node_id=f"n{number // 8}",
        pid=os.getpid(),
        model_name="none",
        vocab_size=VOCABULARY,
        max_context=1 << 17,
        eos_ids=(2,),
        dtype="bfloat16",
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
        tokenizer_digest="",
        root_fields={"model": "none"},
    )


class Workers:
    """Answer what they are sent, a token for each sequence in a step."""

    def __init__(self, core: GatewayCore | None = None) -> None:
        self.core = core
        self._live: dict[str, dict[str, tuple[EngineRequest, int]]] = {}
        self._task: asyncio.Task[None] | None = None

    def take(self, worker_id: str, request: EngineRequest) -> None:
        """A request is there."""
        self._live.setdefault(worker_id, {})[request.request_id] = (request, 0)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._step())

    async def _step(self) -> None:
        assert self.core is not None
        while self._live:
            await asyncio.sleep(0.001)
            for worker_id in list(self._live):
                live = self._live[worker_id]
                self.core.on_outputs(worker_id, [self._output(live, *one) for one in list(live.values())])
                if not live:
                    del self._live[worker_id]

    def _output(
        self, live: dict[str, tuple[EngineRequest, int]], request: EngineRequest, given: int
    ) -> Output:
        given += 1
        is_last = given == request.sampling.max_tokens
        usage = Usage(len(request.token_ids), given, len(request.token_ids), {})
        if is_last:
            del live[request.request_id]
        else:
            live[request.request_id] = (request, given)
        reason = FinishReason.LENGTH if is_last else None
        shown = usage if is_last or given == 1 else None
        return Output(request.request_id, 0, (given + 10,), (), reason, shown, TIMINGS if shown else None)


class Port:
    """One worker. Of all that the gateway may ask, only this is asked here."""

    def __init__(self, worker_id: str, workers: Workers) -> None:
        self._worker_id, self._workers = worker_id, workers

    async def submit(self, request: EngineRequest) -> None:
        self._workers.take(self._worker_id, request)

    async def cancel(self, request_id: str, is_stopped: bool) -> None:
        pass

    async def health(self) -> str | None:
        return None


class NoHolders:
    """A directory that knows nothing."""

    async def lookup(self, keys: bytes) -> Sequence[Held]:
        return ()


async def ask(endpoint: str, requests: int, tokens: int, prompt: int, streams: int) -> None:
    """The client: so many requests, `streams` at once."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        room = asyncio.Semaphore(streams)

        async def one(number: int) -> None:
            ids = [(7 * number + 13 * place) % VOCABULARY for place in range(prompt)]
            message = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=ids),
                sampling=inference_pb2.Sampling(max_tokens=tokens, ignore_eos=True),
            )
            async with room:
                got = 0
                async for chunk in stub.Generate(message):
                    got += len(chunk.token_ids)
                assert got == tokens, f"{got} tokens came of {tokens}"

        await asyncio.gather(*map(one, range(requests)))


async def cpu_s(endpoint: str, requests: int, tokens: int, args: argparse.Namespace) -> float:
    """What the gateway, which is this process, spends on requests of another process."""
    command = (requests, tokens, args.prompt, args.streams)
    begin = time.process_time()
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, CLIENT, endpoint, *map(str, command)
    )
    assert await client.wait() == 0, "the client failed"
    return time.process_time() - begin


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve, ask, and divide."""
    workers = Workers()
    ports: Any = [(info(number), Port(f"w{number}", workers)) for number in range(args.workers)]
    holders = Holders(NoHolders(), asyncio.get_running_loop().time)
    core = workers.core = GatewayCore(ports, None, {"default": ""}, 256, holders=holders)
    reply = inference_pb2.StatusReply()

    async def status() -> inference_pb2.StatusReply:
        return reply

    verbs = CacheApi(core, [], {"default": ""})
    server = GatewayServer(core, verbs, status, GrpcConfig(port=0), 256 * args.workers)
    endpoint = await server.start()
    await cpu_s(endpoint, 20, 2, args)  # all that is done once
    short = await cpu_s(endpoint, args.requests, 1, args)
    long = await cpu_s(endpoint, args.requests, args.tokens, args)
    core.stop()
    await server.stop(0.0)
    core.close()
    token_s = (long - short) / args.requests / (args.tokens - 1)
    return {
        "workers": args.workers,
        "prompt tokens": args.prompt,
        "streams": args.streams,
        "request with its first token, ms of CPU": 1e3 * short / args.requests,
        "further token, us of CPU": 1e6 * token_s,
    }


def main() -> None:
    """Print the figures."""
    if CLIENT in sys.argv:
        endpoint, *numbers = sys.argv[2:]
        asyncio.run(ask(endpoint, *map(int, numbers)))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=400, help="of each length (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=65, help="of the longer answers (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=3072, help="tokens (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="at once (default: %(default)s)")
    args = parser.parse_args()
    print(machine())
    figures = asyncio.run(measure(args))
    for name, value in figures.items():
        print(f"{name:<44} {value:>10,.3g}" if isinstance(value, float) else f"{name:<44} {value:>10,}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
