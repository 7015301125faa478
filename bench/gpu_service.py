#!/usr/bin/env python3
"""A whole worker on one GPU: the same tokens from every tier, copies beside PCIe, frames shared by two processes.

  bench/gpu_service.py [--model smollm2-135m-instruct] [--out gpu-service.json] [--report docs/gpu-results.md]
  bench/gpu_service.py --dry       tiny models on the CPU; checks the script itself

For SmolLM2 and a small random DeepSeek-V3: a prompt is computed, found in L1 (HBM), evicted to L3 (pinned memory) and
found there, evicted to L4 (SSD) and found there; the tokens must be the same each time. That is promised of SmolLM2 in
bfloat16 with invariant numerics, and in float32 of DeepSeek, whose rounding (not its tokens) may depend on the chunk.
Another prompt goes first, so that no time to a first token holds the compiling of kernels. Exit code 1 when tokens
differ, when pages come back from the slab with other bytes or the slab can't be pinned, or when a page that another
process reads through CUDA IPC (shared memory without a GPU) has other bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import machine, row_texts, write_section
from torch import multiprocessing

from kvtier.tier.l1.arena import Arena
from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.identity import tenant_salt
from kvtier.tier.pages.page import ALIGN_BYTES, HEADER_BYTES, TierName, slot_bytes
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier
from kvtier.workers.engine.worker import DecodeWorker
from kvtier.workers.models.files.store import default_cache, resolve
from kvtier.workers.requests.api import EngineRequest, Output, SamplingParams
from kvtier.workers.runner.runner import Runner, load_runner
from kvtier.workers.scheduling.settings import EngineSettings

PATIENCE_S = 120.0


@dataclass
class Client:
    """Takes a worker's outputs; one request at a time."""

    outputs: list[Output] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def sink(self, outputs: list[Output]) -> None:
        """Called by the worker's loop."""
        with self.came:
            self.outputs += outputs
            self.came.notify_all()

    def generate(self, worker: DecodeWorker, prompt: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
        """Tokens, where the prompt came from, and milliseconds to the first token."""
        with self.came:
            self.outputs.clear()
        name = f"r{time.monotonic_ns()}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        worker.submit(EngineRequest(name, "default", prompt, sampling, arrived_s=time.time()))
        with self.came:
            if not self.came.wait_for(lambda: self.outputs and self.outputs[-1].finish_reason, PATIENCE_S):
                raise TimeoutError(f"no answer in {PATIENCE_S} s")
            last = self.outputs[-1]
            tokens = [token for output in self.outputs for token in output.token_ids]
        if last.usage is None or last.timings is None:
            raise RuntimeError(f"the request failed: {last.error}")
        found = {tier: n for tier, n in last.usage.cached_tokens.items() if n}
        return {"tokens": tokens, "found": found, "ttft_ms": last.timings.ttft, "load_ms": last.timings.load}


@contextmanager
def running(runner: Runner, folder: Path) -> Iterator[tuple[DecodeWorker, CacheService, Client]]:
    """A worker over a node's cache, in this process."""
    sizes = [spec.nbytes for group in runner.groups for spec in group.specs.values()]
    room = 512 * slot_bytes(max(sizes))
    socket = folder / "node.sock"
    service = CacheService(
        "n0", socket, max(sizes), room, folder / "l4", 2 * room, min_payload_bytes=min(sizes)
    )
    service.start()
    client = Client()
    worker = DecodeWorker(
        runner,
        EngineSettings(
            max_batch_tokens=runner.max_batch_tokens, always_load=True, load_deadline_ms=1e3 * PATIENCE_S
        ),
        worker_id="w0",
        node_id="n0",
        socket_path=str(socket),
        tenants={"default": tenant_salt("default")},
        sink=client.sink,
    )
    worker.start()
    try:
        until(lambda: worker.is_connected)
        yield worker, service, client
        worker.check()
        service.check()
    finally:
        worker.stop()
        service.stop(0.0)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("it didn't come to be")
        time.sleep(0.01)


def through_the_tiers(runner: Runner, tokens: int, answer: int) -> dict[str, Any]:
    """The same prompt computed, then from L1, L3 and L4; before, another one for the kernels' sake, cold and from L1."""
    other, prompt = (
        tuple(int(t) for t in torch.arange(first, first + tokens) * 7919 % (runner.vocab_size - 1) + 1)
        for first in (1, 0)
    )
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, running(runner, Path(folder)) as (worker, service, client):

        def settle() -> None:
            until(lambda: worker.idle() and service.idle())

        for _ in range(2):
            client.generate(worker, other, answer)
            settle()
        found["computed"] = client.generate(worker, prompt, answer)
        settle()
        found["L1"] = client.generate(worker, prompt, answer)
        for tier in (TierName.HOST, TierName.SSD):
            settle()
            worker.evict([bytes.fromhex(page.key) for page in worker.pages(limit=1 << 20)])
            if tier is TierName.SSD:
                keys = [bytes.fromhex(page.key) for page in service.pages(tier=TierName.HOST, limit=1 << 20)]
                service.evict(keys, TierName.HOST)
            found[tier.value] = client.generate(worker, prompt, answer)
    first = found["computed"]["tokens"]
    same = all(result["tokens"] == first for result in found.values())
    where = {
        name: set(result["found"]) == ({name} if name != "computed" else set())
        for name, result in found.items()
    }
    times = {f"ttft_ms {name}": result["ttft_ms"] for name, result in found.items()}
    return {
        "ok": same and all(where.values()),
        "same_tokens": same,
        "found_where_expected": all(where.values()),
        **times,
    }


def graphs(path: str, l1_bytes: int, tokens: int, answer: int) -> dict[str, Any]:
    """The same answer by launched and by replayed decode steps, in float32, and what a step of each took."""
    row: dict[str, Any] = {}
    answers: list[list[int]] = []
    for name, is_on in (("launched", False), ("replayed", True)):
        runner = load(path, "float32", "fast", l1_bytes, cuda_graphs=is_on)
        with tempfile.TemporaryDirectory() as folder, running(runner, Path(folder)) as (worker, _, client):
            prompt = tuple(int(t) for t in torch.arange(tokens) * 7919 % (runner.vocab_size - 1) + 1)
            client.generate(worker, prompt, 4)
            began = time.perf_counter()
            answers.append(client.generate(worker, prompt, answer)["tokens"])
            row[f"step_ms {name}"] = 1e3 * (time.perf_counter() - began) / answer
        runner.close()
    return {"ok": answers[0] == answers[1], "same_tokens": answers[0] == answers[1], **row}


def copies(device: torch.device, page_bytes: int, pages: int) -> dict[str, Any]:
    """Pages between L1 and slots of a node's slab, as a worker's copy threads move them, beside one plain copy of as many
    bytes to and from memory that torch pinned: what the bus gives.
    """
    capacity = pages * slot_bytes(page_bytes)
    arena = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=device)
    before, l1 = arena.clone(), Arena(arena)
    with (
        ThreadPoolExecutor(2) as threads,
        closing(HostTier(capacity)) as node,
        closing(HostTier.attach(node.fd, capacity)) as slab,
    ):
        try:
            pinned = device.type == "cuda" and threads.submit(slab.register_pinned).result()
        except RuntimeError as error:
            print(f"the slab can't be pinned: {error}")
            pinned = False
        step = slot_bytes(page_bytes) // ALIGN_BYTES
        slots = [slab.slot(Place(0, i * step), page_bytes)[HEADER_BYTES:] for i in range(pages)]

        def each(copy: Callable[[int, memoryview], None], workers: int) -> None:
            """All pages, on so many threads."""
            if workers == 1:
                _copy_all(copy, slots, range(pages))
            else:
                parts = [range(i, pages, workers) for i in range(workers)]
                list(threads.map(lambda part: _copy_all(copy, slots, part), parts))

        gb = 1e-9 * pages * page_bytes
        found: dict[str, float] = {}
        for workers in (1, 2):
            name = f"{workers} thread{'s' if workers > 1 else ''}"
            found[f"down_gbps, {name}"] = gb / seconds(device, lambda n=workers: each(l1.copy_out, n))
            arena.zero_()
            found[f"up_gbps, {name}"] = gb / seconds(device, lambda n=workers: each(l1.copy_in, n))
        same = torch.equal(arena, before)
        for slot in slots:
            slot.release()
    plain = torch.zeros(pages, page_bytes, dtype=torch.uint8)
    plain = plain.pin_memory() if device.type == "cuda" else plain
    found["plain_down_gbps"] = gb / seconds(device, lambda: plain.copy_(arena, non_blocking=True))
    found["plain_up_gbps"] = gb / seconds(device, lambda: arena.copy_(plain, non_blocking=True))
    return {
        "ok": same and pinned == (device.type == "cuda"),
        "page_bytes": page_bytes,
        "pinned": pinned,
        **found,
    }


def _copy_all(copy: Callable[[int, memoryview], None], slots: list[memoryview], frames: range) -> None:
    for frame in frames:
        copy(frame, slots[frame])


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The best of a few times; what copies wait for other work isn't theirs."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _read_frames(asked: Any, answered: Any) -> None:
    """The other process: copies the frames that it is shown into memory of its own, and sends their sums."""
    frames: torch.Tensor = asked.get()
    own = torch.empty_like(frames)
    own.copy_(frames)
    if frames.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    own.copy_(frames)
    if frames.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    answered.put((own.to(torch.int64).sum(1).tolist(), seconds))
    del frames


def shared_frames(device: torch.device, page_bytes: int, pages: int) -> dict[str, Any]:
    """Two processes, one arena: the reader sees the writer's bytes without a copy through the host."""
    arena = torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=device)
    if device.type == "cpu":
        arena.share_memory_()
    context = multiprocessing.get_context("spawn")
    asked, answered = context.Queue(), context.Queue()
    reader = context.Process(target=_read_frames, args=(asked, answered))
    reader.start()
    asked.put(arena)
    sums, seconds = answered.get(timeout=PATIENCE_S)
    reader.join(PATIENCE_S)
    same = sums == arena.to(torch.int64).sum(1).tolist()
    return {"ok": same and reader.exitcode == 0, "gbps": 1e-9 * arena.numel() / seconds}


def tiny_model(folder: Path, kind: str) -> Path:
    """A small random model: `llama` or `deepseek`."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    common = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    made: Any
    if kind == "llama":
        made = LlamaForCausalLM(LlamaConfig(**common, num_hidden_layers=2, num_key_value_heads=2))
    else:
        made = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **common,
                num_hidden_layers=3,
                num_key_value_heads=4,
                first_k_dense_replace=1,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                n_group=2,
                topk_group=1,
                kv_lora_rank=512,
                q_lora_rank=32,
                qk_nope_head_dim=32,
                qk_rope_head_dim=64,
                v_head_dim=32,
            )
        )
    made.save_pretrained(folder)
    return folder


def load(path: str, dtype: str, numerics: str, l1_bytes: int, *, cuda_graphs: bool = False) -> Runner:
    """The model with its arena, on the device that is there."""
    return load_runner(
        path,
        dtype=dtype,
        page_tokens=16,
        l1_bytes=l1_bytes,
        numerics=numerics,
        forward="auto",
        threads=2,
        max_context=4096,
        max_batch_tokens=1024,
        epoch=0,
        cuda_graphs=cuda_graphs,
    )


def report(rows: dict[str, dict[str, Any]], device: str, path: Path) -> None:
    """Put the table into a Markdown file."""
    lines = [
        f"The whole worker on {device}; torch {torch.__version__}.",
        "",
        "| what | measured |",
        "|---|---|",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | {', '.join(row_texts(row))} |")
    write_section(path, "bench/gpu_service.py", lines)


def main() -> int:
    """1 when tokens or bytes differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    parser.add_argument("--report", type=Path, help="write the Markdown table into this file")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry runs tiny models without one")
    device = torch.device("cpu" if options.dry else "cuda")
    name = "the CPU" if options.dry else torch.cuda.get_device_name()
    tokens, answer = (100, 4) if options.dry else (2000, 32)
    page_bytes, pages = (1 << 16, 8) if options.dry else (1 << 20, 512)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        llama = (
            tiny_model(Path(folder) / "llama", "llama")
            if options.dry
            else resolve(options.model, default_cache())
        )
        models = {
            "tiers, small Llama" if options.dry else f"tiers, {options.model}": (
                llama,
                "bfloat16",
                "invariant",
            ),
            "tiers, small DeepSeek-V3": (
                tiny_model(Path(folder) / "deepseek", "deepseek"),
                "float32",
                "auto",
            ),
        }
        for title, (path, dtype, numerics) in models.items():
            runner = load(str(path), dtype, numerics, (64 << 20) if options.dry else (1 << 30))
            rows[title] = through_the_tiers(runner, tokens, answer)
            runner.close()
        l1_bytes = (64 << 20) if options.dry else (1 << 30)
        rows["decode by CUDA graphs"] = graphs(str(llama), l1_bytes, tokens, answer)
    rows["copies"] = copies(device, page_bytes, pages)
    rows["frames of another process"] = shared_frames(device, page_bytes, pages)
    for title, row in rows.items():
        print(f"{title:32} " + "  ".join(row_texts(row)))
    if options.out is not None:
        options.out.write_text(
            json.dumps({"device": name, "machine": machine(), "rows": rows}, indent=1) + "\n"
        )
    if options.report is not None:
        report(rows, name, options.report)
    return 0 if all(row.get("ok", True) for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
