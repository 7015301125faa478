"""Runs decode workers in tests: collects their outputs, waits for what should come, and checks that nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from waiting import until

from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.identity import tenant_salt
from kvtier.tier.pages.page import (
    ALIGN_BYTES,
    HEADER_BYTES,
    Envelope,
    PageCorrupt,
    PageFormat,
    TierName,
    slot_bytes,
)
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import Hello, WriteMode
from kvtier.tier.stores.base import Place
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.requests.api import (
    EngineRequest,
    FinishReason,
    Output,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from kvtier.workers.runner.runner import Runner, StepBatch, load_runner
from kvtier.workers.scheduling.settings import EngineSettings

PATIENCE_S = 120.0
PAGE_TOKENS = 16


class Result:
    """All outputs of one sequence."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = list(outputs)
        self.last = self.outputs[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [logprobs for output in self.outputs for logprobs in output.logprobs]

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason

    @property
    def usage(self) -> Usage:
        assert self.last.usage is not None
        return self.last.usage

    @property
    def cached(self) -> dict[str, int]:
        """Prompt tokens found, by tier, where there are any."""
        return {tier: tokens for tier, tokens in self.usage.cached_tokens.items() if tokens}


class Client:
    """A worker's one client: its sink, and the requests sent so far."""

    def __init__(self) -> None:
        self.steps: list[list[Output]] = []
        self.cleared = 0  # clear epoch that requests tell
        self.worker: DecodeWorker
        self._outputs: dict[tuple[str, int], list[Output]] = {}
        self._came = threading.Condition()
        self._sent = 0

    def sink(self, outputs: list[Output]) -> None:
        with self._came:
            self.steps.append(outputs)
            for output in outputs:
                self._outputs.setdefault((output.request_id, output.index), []).append(output)
            self._came.notify_all()

    def send(
        self,
        prompt: Sequence[int],
        *,
        tenant: str = "default",
        use_cache: bool = True,
        window: int = 0,
        sinks: int = 0,
        lossy: bool = False,
        **sampling: Any,
    ) -> str:
        """Submit a request; its id."""
        self._sent += 1
        name = f"r{self._sent}"
        params = SamplingParams(**{"max_tokens": 8, **sampling})
        self.worker.submit(
            EngineRequest(
                name,
                tenant,
                tuple(prompt),
                params,
                use_cache,
                window,
                sinks,
                lossy,
                arrived_s=time.time(),
                cleared=self.cleared,
            )
        )
        return name

    def result(self, name: str, index: int = 0, patience_s: float = PATIENCE_S) -> Result:
        """Wait for a sequence's end."""
        with self._came:
            assert self._came.wait_for(lambda: self._is_over(name, index), patience_s), f"{name} doesn't end"
            return Result(self._outputs[name, index])

    def first(self, name: str) -> None:
        """Wait for a request's first output."""
        with self._came:
            assert self._came.wait_for(lambda: (name, 0) in self._outputs, PATIENCE_S), (
                f"{name} doesn't begin"
            )

    def generate(self, prompt: Sequence[int], **options: Any) -> Result:
        """Send a request and wait for its end; the usage law holds."""
        result = self.result(self.send(prompt, **options))
        usage = result.usage
        assert sum(usage.cached_tokens.values()) + usage.computed_tokens == usage.prompt_tokens == len(prompt)
        return result

    def together(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Tokens of requests that run at once."""
        return [self.result(name).tokens for name in [self.send(p, **options) for p in prompts]]

    def is_over(self, name: str, index: int = 0) -> bool:
        """Whether a sequence has ended."""
        with self._came:
            return self._is_over(name, index)

    def _is_over(self, name: str, index: int) -> bool:
        outputs = self._outputs.get((name, index))
        return bool(outputs) and outputs[-1].finish_reason is not None


class Slowed:
    """A runner that computes what another does, counts rows, and does what a test tells it to in between."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.rows = 0
        self.conversions: list[tuple[PageFormat, PageFormat, int]] = []  # from, to, pages
        self.before: Callable[[StepBatch], None] = lambda batch: None
        self.after: Callable[[StepBatch, torch.Tensor], torch.Tensor] = lambda batch, logits: logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.before(batch)
        self.rows += len(batch.token_ids)
        return self.after(batch, self._runner.forward(batch))

    def convert(
        self, group: int, sources: Any, source_format: PageFormat, targets: Any, target_format: PageFormat
    ) -> None:
        self.conversions.append((source_format, target_format, len(sources)))
        self._runner.convert(group, sources, source_format, targets, target_format)


def tiny_runner(
    folder: Path, pages: int, max_batch_tokens: int = 256, page_tokens: int = PAGE_TOKENS, **options: Any
) -> Slowed:
    """A tiny model with room in L1 for so many pages of the tiny Llama in float32."""
    page_bytes = page_tokens * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, head size, float32
    runner = load_runner(
        str(folder),
        **{
            "dtype": "float32",
            "page_tokens": page_tokens,
            "l1_bytes": pages * page_bytes,
            "numerics": "auto",
            "forward": "auto",
            "threads": 1,
            "max_context": 2048,
            "max_batch_tokens": max_batch_tokens,
            "epoch": 0,
            "native": "off",
            **options,
        },
    )
    return Slowed(runner)


def page_sizes(runner: Slowed) -> list[int]:
    """Bytes of the pages that a runner's cache may hold."""
    return [spec.nbytes for group in runner.groups for spec in group.specs.values()]


@contextmanager
def serving(
    runner: Slowed, socket_path: Path | None = None, *, connected: bool = True, **options: Any
) -> Iterator[Client]:
    """A worker with a client; at the end all counts are checked, and nothing may be left in use."""
    client = Client()
    known = {field.name for field in fields(EngineSettings)}
    settings = {"max_batch_tokens": 256, "max_sequences": 8, "load_deadline_ms": 20_000.0}
    settings |= {name: value for name, value in options.items() if name in known}
    worker = DecodeWorker(
        runner,  # type: ignore[arg-type]  # passes everything on
        EngineSettings(**settings),
        **{
            "worker_id": "w0",
            "node_id": "n0",
            "socket_path": None if socket_path is None else str(socket_path),
            "tenants": {name: tenant_salt(name) for name in ("default", "other")},
            "sink": client.sink,
            **{name: value for name, value in options.items() if name not in known},
        },
    )
    client.worker = worker
    worker.start()
    try:
        if socket_path is not None and connected:
            until(lambda: worker.is_connected, "the worker connects to its node")
        yield client
        if worker.is_healthy():
            until(worker.idle, "the worker is idle")
            worker.check()
    finally:
        worker.stop()


@contextmanager
def caching(
    folder: Path,
    l3_pages: int = 256,
    l4_bytes: int = 32 << 20,
    page_bytes: Sequence[int] = (8192,),
    l4_variants: frozenset[str] | None = None,
    l4_folder: Path | None = None,
    write: WriteMode = "through",
) -> Iterator[CacheService]:
    """A node's cache on a socket in `folder`, for pages of these sizes; its L3 has room for so many of the largest."""
    service = CacheService(
        "n0",
        folder / "s",
        max(page_bytes),
        l3_pages * slot_bytes(max(page_bytes)),
        l4_folder or folder / "l4",
        l4_bytes,
        min_payload_bytes=min(page_bytes),
        l4_variants=l4_variants,
        write=write,
    )
    service.start()
    try:
        yield service
        if service.health() is None:
            until(service.idle, "the node's cache is idle")
            service.check()
    finally:
        service.stop(0)


def keys(worker: DecodeWorker) -> list[bytes]:
    """Keys of all pages in L1."""
    return [bytes.fromhex(page.key) for page in worker.pages(limit=100_000)]


def settle(worker: DecodeWorker, service: CacheService) -> None:
    """Until every full page is where it belongs."""
    until(lambda: worker.idle() and service.idle(), "worker and node are idle")


def sink_to_l3(worker: DecodeWorker, service: CacheService) -> None:
    """Leave L1 empty, so that the next request finds its pages in L3."""
    settle(worker, service)
    worker.evict(keys(worker))
    assert worker.pages() == []


def sink_to_l4(worker: DecodeWorker, service: CacheService) -> None:
    """Leave L1 and L3 empty, so that the next request finds its pages in L4."""
    sink_to_l3(worker, service)
    held = [bytes.fromhex(page.key) for page in service.pages(tier=TierName.HOST, limit=100_000)]
    service.evict(held, TierName.HOST)
    assert service.pages(tier=TierName.HOST) == []


def flip_bit(socket_path: Path, runner: Slowed, depth: int) -> None:
    """Damage the payloads of the pages at `depth` in L3."""
    with l3_pages(socket_path, runner) as pages:
        for envelope, payload in pages:
            if envelope.depth == depth:
                payload[5] ^= 1


@contextmanager
def l3_pages(socket_path: Path, runner: Slowed) -> Iterator[list[tuple[Envelope, memoryview]]]:
    """Every page in L3, envelope and payload, through a mapping of one's own."""
    payloads = {spec.digest: spec.nbytes for group in runner.groups for spec in group.specs.values()}
    hello = Hello("vandal", "1", payloads, payloads, runner.root_fields())
    client = NodeClient.connect(socket_path, hello, lambda message: None, lambda: None)
    found: list[tuple[Envelope, memoryview]] = []
    slab = client.slab
    assert slab is not None
    for unit in range(slab.capacity_bytes // ALIGN_BYTES - 1):
        head = slab.slot(Place(0, unit), 0)
        try:
            envelope = Envelope.unpack(head)
        except PageCorrupt:
            continue
        finally:
            head.release()
        slot = slab.slot(Place(0, unit), envelope.payload_bytes)
        found.append((envelope, slot[HEADER_BYTES : HEADER_BYTES + envelope.payload_bytes]))
        slot.release()
    try:
        yield found
    finally:
        for _, payload in found:
            payload.release()
        client.close()
