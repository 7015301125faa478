"""A runner's decode and prefill against a bare torch loop over the same weights, in turns, with ratios.

python bench/model.py MODEL [--dtype bfloat16] [--threads 2] [--batches 1,8] [--contexts 64,512,1755]

The loop is what a small torch worker can reach: fused matrices, contiguous preallocated keys and values, no pages, no
module tree. Each figure is the median of all rounds; a round runs both sides one after the other, so that other load
on the machine meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from kvtier.kernels.ops import make_plan, raise_malloc_thresholds
from kvtier.workers.models.base import page_spec, read_shape
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.formats import DTYPES
from kvtier.workers.models.forwards.lean import LeanWeights, load_rope
from kvtier.workers.runner.runner import GroupPages, IntArray, Runner, SequenceRows, StepBatch, load_runner

UNIFORM_FORMATS = (
    "auto",
    "fp8",
    "int8",
    "k8v4",
    "int4",
)  # pages are never converted: frames are page numbers


class TorchLoop:
    """A Llama in the fewest torch calls, one contiguous cache per layer."""

    def __init__(self, folder: Path, dtype: torch.dtype, batch: int, positions: int) -> None:
        shape = read_shape(folder)
        weights = LeanWeights(Checkpoint(folder), shape, dtype, torch.device("cpu"))
        self.shape = shape
        self.embedding, self.norm = weights.embedding, weights.norm
        self.head = self.embedding if weights.head is None else weights.head
        self.layers = [weights.layer(i) for i in range(shape.num_layers)]
        self.gate_up = [torch.cat([w.gate, w.up]) for w in self.layers]
        turns = load_rope(Checkpoint(folder), shape).rows(
            np.arange(positions, dtype=np.int32), make_plan([], 1)
        )
        self.cos, self.sin = (t.repeat(1, 2).to(dtype) for t in turns)
        size = (batch, shape.num_kv_heads, positions, shape.head_dim)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in self.layers]
        self.values = [torch.zeros(size, dtype=dtype) for _ in self.layers]

    def rotate(self, x: torch.Tensor, at: int) -> torch.Tensor:
        half, end = x.shape[-1] // 2, at + x.shape[-2]
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos[at:end] + turned * self.sin[at:end]

    def forward(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        """The most likely token after tokens [batch, n], whose first is at position `at`."""
        s, (batch, n) = self.shape, tokens.shape
        x = F.embedding(tokens, self.embedding)
        for i, w in enumerate(self.layers):
            y = F.linear(F.rms_norm(x, (s.hidden,), w.attention_norm, s.norm_eps), w.qkv)
            heads = y.view(batch, n, -1, s.head_dim).transpose(1, 2)
            turned = self.rotate(heads[:, : s.num_heads + s.num_kv_heads], at)
            keys, values = self.keys[i][:batch, :, : at + n], self.values[i][:batch, :, : at + n]
            keys[:, :, at:], values[:, :, at:] = (
                turned[:, s.num_heads :],
                heads[:, s.num_heads + s.num_kv_heads :],
            )
            q = turned[:, : s.num_heads]
            if n == 1:
                grouped = q.reshape(batch, s.num_kv_heads, -1, s.head_dim)
                out = F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, 1, -1)
            else:
                out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
                out = out.transpose(1, 2).reshape(batch, n, -1)
            x = x + F.linear(out, w.out)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,), w.mlp_norm, s.norm_eps), self.gate_up[i]).chunk(
                2, -1
            )
            x = x + F.linear(F.silu(gate) * up, w.down)
        logits = F.linear(F.rms_norm(x[:, -1], (s.hidden,), self.norm, s.norm_eps), self.head)
        return logits.argmax(-1)


class Paged:
    """A runner that serves `batch` sequences at once."""

    def __init__(self, runner: Runner, batch: int, positions: int) -> None:
        pages = -(-positions // runner.page_tokens)
        self.runner = runner
        self.pages = [
            (GroupPages(np.arange(i * pages, (i + 1) * pages, dtype=np.int32)),) for i in range(batch)
        ]

    def prefill(self, tokens: IntArray) -> None:
        """Tokens [batch, n] from position 0, one sequence after the other."""
        for ids, pages in zip(tokens, self.pages, strict=False):
            n = len(ids)
            rows = [SequenceRows(0, n, n, pages)]
            batch = StepBatch(ids, np.arange(n, dtype=np.int32), rows, np.array([n - 1], np.int32))
            self.runner.forward(batch).argmax(-1)

    def decode(self, tokens: IntArray, at: int) -> None:
        """One token of each sequence at position `at`."""
        rows = [SequenceRows(i, 1, at + 1, self.pages[i]) for i in range(len(tokens))]
        every = np.arange(len(tokens), dtype=np.int32)
        self.runner.forward(StepBatch(tokens, np.full_like(every, at), rows, every)).argmax(-1)


def seconds(calls: list[Callable[[], object]]) -> list[float]:
    """How long each call takes."""
    took = []
    for call in calls:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return took


def main() -> None:
    """Print a table and, with --json, the same as JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a Llama-family model")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--contexts", default="64,512,1755")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--native", default="auto", choices=["auto", "off", "require"])
    parser.add_argument("--cache-format", default="auto", choices=UNIFORM_FORMATS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    raise_malloc_thresholds()
    batches = [int(b) for b in options.batches.split(",")]
    contexts = [int(c) for c in options.contexts.split(",")]
    positions = max(contexts) + options.steps
    runner = load_runner(
        str(options.model),
        dtype=options.dtype,
        page_tokens=16,
        l1_bytes=_arena_bytes(options.model, options.dtype, max(batches), positions),
        numerics="auto",
        forward="auto",
        threads=options.threads,
        max_context=0,
        max_batch_tokens=max(2048, *contexts),
        epoch=0,
        native=options.native,
        cache_format=options.cache_format,
    )
    loop = TorchLoop(options.model, DTYPES[options.dtype], max(batches), positions)
    paged = Paged(runner, max(batches), positions)
    if not options.json:
        print(f"{options.model.name} {options.dtype}, {options.threads} threads, tokens/s (median of rounds)")
        print(f"{'':34}{'runner':>9}{'torch loop':>12}{'ratio':>8}")
    with torch.inference_mode():
        for batch in batches:
            for context in contexts:
                _compare(paged, loop, batch, context, options)


def _arena_bytes(folder: Path, dtype: str, batch: int, positions: int) -> int:
    return page_spec(str(folder), dtype, 16).nbytes * (batch * -(-positions // 16) + 1)


def _compare(paged: Paged, loop: TorchLoop, batch: int, context: int, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    vocab = paged.runner.vocab_size
    times: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for _ in range(options.rounds):
        tokens = rng.integers(0, vocab, (batch, context)).astype(np.int32)
        steps = rng.integers(0, vocab, (options.steps, batch)).astype(np.int32)
        theirs = torch.from_numpy(tokens.astype(np.int64))
        next_tokens = torch.from_numpy(steps.astype(np.int64))[..., None]
        ours = seconds([partial(paged.prefill, tokens)])
        our_steps = seconds([partial(paged.decode, steps[i], context + i) for i in range(options.steps)])
        baseline = seconds([partial(loop.forward, theirs, 0)])
        their_steps = seconds(
            [partial(loop.forward, next_tokens[i], context + i) for i in range(options.steps)]
        )
        times["prefill"] += zip(ours, baseline, strict=True)
        times["decode"] += zip(our_steps, their_steps, strict=True)
    for phase, pairs in times.items():
        count = batch * (context if phase == "prefill" else 1)
        ours, baseline = (count / statistics.median(p[side] for p in pairs) for side in (0, 1))
        name = f"{phase} batch {batch} context {context}"
        if options.json:
            row = {"name": name, "runner": ours, "torch_loop": baseline, "ratio": ours / baseline}
            print(json.dumps(row | {"dtype": options.dtype, "threads": options.threads}))
        else:
            print(f"{name:34}{ours:9.0f}{baseline:12.0f}{ours / baseline:8.2f}")


if __name__ == "__main__":
    main()
