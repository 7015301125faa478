#!/usr/bin/env python3
"""All kernels on one GPU: checked against torch on the device first, then timed against what its memory could do.

  bench/gpu.py [--budget 270] [--only decode] [--out gpu.json] [--report docs/gpu-results.md]
  bench/gpu.py --dry       tiny shapes in Triton's interpreter on the CPU; checks the script itself

Rows are written to --out as they are made; a run that is cut off, or that --budget (seconds) ends, is taken up where it
stopped by running it again. Rows of another device, of another torch or triton, or of other kernels don't count, and
failed checks are restarted. Most of a run is compiling, one kernel after the other, so what matters most comes first:
checks of Llama-3-8B's heads in pages of 64 tokens and of latents, what a copy reaches, the speeds of an engine's main
work; then all other checks, then all other speeds. Any failed check makes the exit code 1, once all rows are made.
Floors are bytes over the copy bandwidth measured in the same run, with --only too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from common import machine, row_texts, write_section
from gpu_checks import (  # before anything that imports triton
    DEVICE,
    DRY,
    NAMES,
    QUANTIZED,
    Latents,
    Row,
    Shape,
    Want,
    check_attention,
    check_convert,
    check_dense,
    check_engine,
    check_fixed_splits,
    check_gather,
    check_latent,
    check_read_latents,
    check_write,
    check_write_latents,
    latent_layout,
    layout,
    units,
)

# isort: split
import numpy as np
import torch
import triton

from kvtier.kernels import ops
from kvtier.kernels.gather import gather_pages
from kvtier.kernels.ops import Format, KVLayout, PlanSequence, StepPlan, make_plan
from kvtier.kernels.triton_kernels import TritonKernels

PEAK_TFLOPS = 989.0  # dense bfloat16 of an H100 or H200; other cards say so in the table

LLAMA8 = Shape("Llama-3-8B", 32, 8, 128)
SMOL = Shape("SmolLM2", 9, 3, 64)
SHAPES = (LLAMA8, Shape("Llama-2-7B", 32, 32, 128), SMOL, Shape("Qwen-MQA", 16, 1, 128))
CHECKED_TOO = (SMOL, Shape("odd", 7, 1, 80), Shape("three quarters", 16, 1, 96), Shape("wide", 16, 2, 256))
TINY = Shape("tiny", 4, 2, 64)
DEEPSEEK = Latents(4, 32, 16) if DRY else Latents(128, 512, 64)
FEW = (Format.RAW, Format.FP8, Format.INT4C)  # one of each way to read a row


class Run:
    """The rows made so far, in a file; a row that is there and didn't fail isn't made again."""

    def __init__(self, out: Path, budget_s: float, only: str) -> None:
        self.out, self.only = out, only
        self.end_s = time.monotonic() + budget_s
        self.head = {
            "device": "interpreter" if DRY else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "sources": sources_digest(),
        }
        self.rows: dict[str, Row] = {}
        self.left_out = 0
        if out.is_file():
            kept = json.loads(out.read_text())
            if all(kept.get(name) == value for name, value in self.head.items()):
                self.rows = {name: row for name, row in kept["rows"].items() if row.get("ok") is not False}
            else:
                print(f"{out} is of another device, other versions or other kernels: starting afresh")

    def row(self, name: str, make: Callable[[], Row], *, always: bool = False) -> None:
        """Make a row, unless it is there, `only` leaves it out (not where `always`), or time is up."""
        if (self.only not in name and not always) or name in self.rows:
            return
        if time.monotonic() > self.end_s:
            self.left_out += 1
            return
        start = time.monotonic()
        try:
            made = make()
        except torch.AcceleratorError:
            raise  # the device answers nothing more in this process
        except (triton.TritonError, RuntimeError) as error:  # a kernel doesn't compile or fit: others may
            made = {"ok": False, "failure": f"{type(error).__name__}: {error}"[:300]}
        made["took_s"] = round(time.monotonic() - start, 2)
        self.rows[name] = made
        self.save()
        print(f"{name:44} " + "  ".join(row_texts(made)), flush=True)

    def save(self) -> None:
        """Write all rows."""
        content = {**self.head, "machine": machine(), "rows": self.rows}
        self.out.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def failed(self) -> list[str]:
        """Checks that didn't hold."""
        return [name for name, row in self.rows.items() if row.get("ok") is False]


def sources_digest() -> str:
    """Of all kernels and of this script: what a row depends on beside the device."""
    here = Path(__file__)
    digest = blake2b(digest_size=16)
    for path in (*sorted(Path(ops.__file__).parent.glob("*.py")), here, here.with_name("gpu_checks.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def random_arena(kv: KVLayout, format: Format, pages: int) -> tuple[torch.Tensor, ops.IntArray]:
    """Pages whose bytes are finite numbers in every format, and their frames in scattered order."""
    step = units(kv, format)
    arena = torch.randint(0, 60, (pages * step + 1, kv.unit_bytes), dtype=torch.uint8, device=DEVICE)
    frames = np.random.default_rng(0).permutation(pages).astype(np.int32) * step
    return arena, frames


def decode_plan(kv: KVLayout, format: Format, frames: ops.IntArray, batch: int, context: int) -> StepPlan:
    """One row for each of `batch` sequences of `context` tokens."""
    pages = -(-context // kv.page_tokens)
    codes = np.full(pages, format, np.uint8)
    parts = [PlanSequence(i, 1, context, frames[i * pages : (i + 1) * pages], codes) for i in range(batch)]
    return make_plan(parts, kv.page_tokens)


def milliseconds(f: Callable[[], object]) -> float:
    """Median of many calls on the device."""
    if DRY:
        start = time.perf_counter()
        f()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    return float(do_bench(f, warmup=10, rep=50, return_mode="median"))


# ---- speed ----------------------------------------------------------------------------------------------------


def copy_bandwidth() -> Row:
    """What the device's memory gives a plain copy: bytes read and written per second."""
    nbytes = (1 << 20) if DRY else (4 << 30)
    a = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    ms = milliseconds(lambda: b.copy_(a))
    return {"ms": ms, "gbps": 2e-6 * nbytes / ms}


def decode_speed(
    k: TritonKernels,
    shape: Shape,
    page: int,
    format: Format,
    batch: int,
    context: int,
    layers: int,
    gbps: float,
) -> Row:
    """One layer's decode, another layer at each call, so that no cache helps; the floor is its bytes' time."""
    kv = layout(shape, page, layers)
    pages = batch * -(-context // page)
    arena, frames = random_arena(kv, format, pages)
    plan = decode_plan(kv, format, frames, batch, context)
    q = torch.randn(batch, shape.query_heads, shape.dim, device=DEVICE).to(kv.dtype)
    turn = itertools.cycle(range(layers))
    ms = milliseconds(lambda: k.paged_attention(q, arena, kv, plan, next(turn), shape.dim**-0.5))
    nbytes = pages * kv.records[format].nbytes
    return {
        "us": 1e3 * ms,
        "floor_us": nbytes / gbps / 1e3,
        "of_floor": nbytes / gbps / 1e6 / ms,
        "gbps": nbytes / ms / 1e6,
    }


def latent_speed(k: TritonKernels, format: Format, batch: int, context: int, layers: int, gbps: float) -> Row:
    """Absorbed decode of DeepSeek-V3's 128 heads: bound by the matrix units, not by bytes."""
    heads, rank, rope = DEEPSEEK.heads, DEEPSEEK.rank, DEEPSEEK.rope
    kv = latent_layout(DEEPSEEK, layers, write=format)
    pages = batch * -(-context // 64)
    arena, frames = random_arena(kv, format, pages)
    plan = decode_plan(kv, format, frames, batch, context)
    q = torch.randn(batch, heads, rank + rope, device=DEVICE).to(kv.dtype)
    turn = itertools.cycle(range(layers))
    ms = milliseconds(lambda: k.latent_attention(q, arena, kv, plan, next(turn), (rank + rope) ** -0.5))
    nbytes = pages * kv.records[format].nbytes
    flops = 2.0 * heads * (2 * rank + rope) * context * batch
    return {
        "us": 1e3 * ms,
        "tflops": flops / ms / 1e9,
        "of_peak": flops / ms / 1e9 / PEAK_TFLOPS,
        "gbps": nbytes / ms / 1e6,
        "bytes_floor_us": nbytes / gbps / 1e3,
    }


def prefill_speed(k: TritonKernels, shape: Shape, format: Format, rows: int, context: int) -> Row:
    """A chunk of one prompt over its cached prefix and itself."""
    kv = layout(shape, 64, 1)
    pages = -(-context // 64)
    arena, frames = random_arena(kv, format, pages)
    plan = make_plan([PlanSequence(0, rows, context, frames, np.full(pages, format, np.uint8))], 64)
    q = torch.randn(rows, shape.query_heads, shape.dim, device=DEVICE).to(kv.dtype)
    ms = milliseconds(lambda: k.paged_attention(q, arena, kv, plan, 0, shape.dim**-0.5))
    pairs = rows * (context - rows) + rows * (rows + 1) / 2
    tflops = 4.0 * pairs * shape.query_heads * shape.dim / ms / 1e9
    return {"ms": ms, "tflops": tflops, "of_peak": tflops / PEAK_TFLOPS}


def gather_speed(page_bytes: int, pages: int, gbps: float) -> Row:
    """Whole pages into one staging buffer."""
    shape = Shape("bytes", 1, 1, 128)
    layers = max(1, page_bytes // (64 * 128 * 4))
    kv = layout(shape, 64, layers)
    arena, frames = random_arena(kv, Format.RAW, pages)
    ms = milliseconds(lambda: gather_pages(arena, kv, frames, Format.RAW))
    nbytes = 2 * pages * kv.page_bytes(Format.RAW)
    return {"us": 1e3 * ms, "gbps": nbytes / ms / 1e6, "of_copy": nbytes / ms / 1e6 / gbps}


def convert_speed(k: TritonKernels, shape: Shape, pages: int, layers: int, gbps: float) -> Row:
    """Decay of FP8 pages to INT4C, all layers in one launch."""
    kv = layout(shape, 64, layers)
    step = units(kv, Format.FP8)
    arena, _ = random_arena(kv, Format.FP8, 2 * pages)
    order = np.random.default_rng(0).permutation(2 * pages).astype(np.int32) * step
    ms = milliseconds(
        lambda: k.convert_pages(arena, kv, order[:pages], Format.FP8, order[pages:], Format.INT4C)
    )
    nbytes = pages * (kv.page_bytes(Format.FP8) + kv.page_bytes(Format.INT4C))
    return {"us": 1e3 * ms, "gbps": nbytes / ms / 1e6, "of_copy": nbytes / ms / 1e6 / gbps}


# ---- the run --------------------------------------------------------------------------------------------------


def main_checks(run: Run, k: TritonKernels) -> None:
    """What the main speeds run: a fast wrong kernel is worth nothing."""
    shape, page, rows = (TINY, 16, 10) if DRY else (LLAMA8, 64, 70)
    for format in FEW if DRY else Format:
        name = f"{shape.name} {NAMES[format]} page {page}"
        for title, want in (
            ("decode", Want(long=not DRY)),
            ("prefill", Want(rows=rows)),
            ("decode, window", Want(long=not DRY, window=24, sinks=4)),
            ("prefill, window", Want(rows=rows, window=24, sinks=4)),
        ):
            run.row(f"check {title} {name}", partial(check_attention, k, shape, page, format, want))
        if format is not Format.INT4C:
            run.row(f"check write {name}", partial(check_write, k, shape, page, format))
    for source in (Format.FP8, Format.INT8):
        name = f"check convert {NAMES[source]} to int4c"
        run.row(name, partial(check_convert, k, layout(shape, page, 2), source, Format.INT4C))
    for format in (Format.RAW, Format.FP8):
        run.row(f"check mla decode {NAMES[format]}", partial(check_latent, k, DEEPSEEK, format))
        run.row(f"check mla write {NAMES[format]}", partial(check_write_latents, k, DEEPSEEK, format))
    run.row("check mla read", partial(check_read_latents, k, DEEPSEEK))
    run.row("check dense", partial(check_dense, k))
    run.row("check gather", partial(check_gather, shape))
    run.row("check engine", partial(check_engine, shape))


def other_checks(run: Run, k: TritonKernels) -> None:
    """Options, other numbers, other pages, other shapes."""
    shape, page, rows = (TINY, 16, 5) if DRY else (LLAMA8, 64, 70)
    for format in FEW[1:2] if DRY else FEW:
        name = f"{shape.name} {NAMES[format]} page {page}"
        for title, change in (
            ("second query", Want(window=24, sinks=4, second_query=True)),
            ("sink logits", Want(logits=True)),
            ("softcap", Want(softcap=1.0)),
            ("all options", Want(window=24, sinks=4, second_query=True, logits=True, softcap=1.0)),
            ("float32", Want(dtype=torch.float32)),
        ):
            for kind, count in (("decode", 1), ("prefill", rows)):
                want = replace(change, rows=count)
                run.row(
                    f"check {kind}, {title} {name}", partial(check_attention, k, shape, page, format, want)
                )
    for format in (Format.RAW, Format.FP8):
        title = f"float32 {NAMES[format]}"
        run.row(f"check write {title}", partial(check_write, k, shape, page, format, torch.float32))
        run.row(f"check mla decode {title}", partial(check_latent, k, DEEPSEEK, format, torch.float32))
        run.row(f"check mla write {title}", partial(check_write_latents, k, DEEPSEEK, format, torch.float32))
    run.row("check mla read float32", partial(check_read_latents, k, DEEPSEEK, torch.float32))
    run.row("check dense float32", partial(check_dense, k, torch.float32))

    fixed = TritonKernels(DEVICE, invariant=True)
    for format in FEW[1:2] if DRY else FEW:
        run.row(
            f"check fixed splits {NAMES[format]}",
            partial(check_fixed_splits, fixed, shape, page, format),
        )
    run.row("check mla fixed splits", partial(check_latent, fixed, DEEPSEEK, Format.RAW))

    for target in QUANTIZED:
        name = f"check convert bf16 to {NAMES[target]}"
        run.row(name, partial(check_convert, k, layout(shape, page, 2), Format.RAW, target))
    run.row(
        "check mla convert bf16 to fp8",
        partial(check_convert, k, latent_layout(DEEPSEEK, 2), Format.RAW, Format.FP8),
    )
    if DRY:
        return
    for other, format in itertools.product((16, 32), Format):
        name = f"{shape.name} {NAMES[format]} page {other}"
        run.row(f"check decode {name}", partial(check_attention, k, shape, other, format, Want(long=True)))
        run.row(f"check prefill {name}", partial(check_attention, k, shape, other, format, Want(rows=rows)))
    for other_shape, format in itertools.product(CHECKED_TOO, Format):
        name = f"{other_shape.name} {NAMES[format]} page {page}"
        for kind, want in (("decode", Want(long=True)), ("prefill", Want(rows=rows))):
            run.row(f"check {kind} {name}", partial(check_attention, k, other_shape, page, format, want))
        if format is not Format.INT4C:
            run.row(f"check write {name}", partial(check_write, k, other_shape, page, format))


def copy_speed(run: Run) -> float:
    """GB/s of a plain copy, without which there is no floor; 0.0 where time was up."""
    run.row("copy", copy_bandwidth, always=True)
    gbps: float = run.rows.get("copy", {}).get("gbps", 0.0)
    return gbps


def main_speeds(run: Run, k: TritonKernels, gbps: float) -> None:
    """What an engine does most, first."""
    if DRY:
        sizes: tuple[int, int, int] = (2, 100, 2)
        run.row("decode tiny int4c", partial(decode_speed, k, TINY, 64, Format.INT4C, *sizes, gbps))
        run.row("mla tiny", partial(latent_speed, k, Format.RAW, *sizes, gbps))
        run.row("prefill tiny", partial(prefill_speed, k, TINY, Format.RAW, 20, 90))
        run.row("gather tiny", partial(gather_speed, 1 << 15, 3, gbps))
        run.row("convert tiny", partial(convert_speed, k, TINY, 2, 2, gbps))
        return
    for format in (Format.FP8, Format.RAW, Format.INT4C, Format.INT8, Format.K8V4, Format.INT4):
        run.row(
            f"decode {LLAMA8.name} {NAMES[format]} page 64 b32 8k",
            partial(decode_speed, k, LLAMA8, 64, format, 32, 8192, 8, gbps),
        )
    for format in (Format.RAW, Format.FP8):
        for batch, context in ((1, 32768), (32, 4096), (128, 4096)):
            run.row(
                f"mla {NAMES[format]} b{batch} {context // 1024}k",
                partial(latent_speed, k, format, batch, context, 8, gbps),
            )
    for format in (Format.RAW, Format.FP8):
        run.row(f"prefill {NAMES[format]} 4k of 4k", partial(prefill_speed, k, LLAMA8, format, 4096, 4096))
        run.row(f"prefill {NAMES[format]} 2k of 16k", partial(prefill_speed, k, LLAMA8, format, 2048, 16384))
    for page_bytes in (1 << 20, 4 << 20):
        run.row(
            f"gather {page_bytes >> 20} MiB", partial(gather_speed, page_bytes, (1 << 30) // page_bytes, gbps)
        )
    run.row("convert fp8 to int4c", partial(convert_speed, k, LLAMA8, 256, 32, gbps))


def other_speeds(run: Run, k: TritonKernels, gbps: float) -> None:
    """Other pages, other spreads of the same bytes, other shapes."""
    if DRY:
        return
    for page in (16, 32):
        for format in (Format.FP8, Format.RAW, Format.INT4C):
            run.row(
                f"decode {LLAMA8.name} {NAMES[format]} page {page} b32 8k",
                partial(decode_speed, k, LLAMA8, page, format, 32, 8192, 8, gbps),
            )
    for layers in (1, 32):  # the same bytes, spread over 32 times the address space: what page-first costs
        run.row(
            f"decode {LLAMA8.name} fp8 of {layers} layers b32 4k",
            partial(decode_speed, k, LLAMA8, 64, Format.FP8, 32, 4096, layers, gbps),
        )
    for shape, format in itertools.product(SHAPES, (Format.FP8, Format.INT4C)):
        for batch, context in ((1, 32768), (128, 4096)):
            name = f"decode {shape.name} {NAMES[format]} page 64 b{batch} {context // 1024}k"
            run.row(name, partial(decode_speed, k, shape, 64, format, batch, context, 4, gbps))


def report(run: Run, path: Path) -> None:
    """Put the table into a Markdown file."""
    device = "Triton's interpreter" if DRY else torch.cuda.get_device_name()
    checked = [row for name, row in run.rows.items() if name.startswith("check")]
    lines = [
        f"Kernels on {device}; torch {torch.__version__}; {time.strftime('%Y-%m-%d', time.gmtime())}.",
        f"Checks: {sum(bool(row['ok']) for row in checked)} of {len(checked)} hold.",
        "",
        "| what | measured |",
        "|---|---|",
    ]
    for name, row in run.rows.items():
        if row.get("ok") is True:
            continue
        values = ", ".join(row_texts({key: value for key, value in row.items() if key != "took_s"}))
        lines.append(f"| {name} | {values} |")
    write_section(path, "bench/gpu.py", lines)


def main() -> int:
    """1 when a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="tiny shapes in the interpreter, without a GPU")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds (default: %(default)s)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-dry.json" if DRY else "gpu.json"),
        help="rows, kept for the next run (default: %(default)s)",
    )
    parser.add_argument("--report", type=Path, help="write the Markdown table into this file")
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry runs tiny shapes without one")
    run = Run(options.out, options.budget, options.only)
    kernels = TritonKernels(DEVICE)
    main_checks(run, kernels)
    if gbps := copy_speed(run):
        main_speeds(run, kernels, gbps)
    other_checks(run, kernels)
    if gbps:
        other_speeds(run, kernels, gbps)
    if options.report is not None:
        report(run, options.report)
    print(f"{len(run.rows)} rows, {len(run.failed)} checks failed, {run.left_out} rows left for the next run")
    for name in run.failed:
        print(f"FAILED: {name}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
