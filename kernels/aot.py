"""Compiles every kernel for GPUs that aren't there, and fails where one spills, doesn't fit, or got slower.

  python -m kvtier.kernels.aot [--targets sm_90,gfx942] [--only decode] [--update] [--json FILE] [--assembly FOLDER]

Needs nothing but triton, whose wheel carries the assemblers. The hot loop is the shortest loop that holds matrix
instructions; its issue cycles per 64 tokens are its instructions times the warps of a program over the four schedulers
of a multiprocessor: a loop is bound by memory only where they stay well below the cycles that its bytes take.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from kvtier.kernels.variants import MAX_STACK_BYTES, AotVariant, Target

MODULES = ("gqa", "mla", "write", "gather", "combine")
TABLE = Path(__file__).with_name("aot_table.json")  # what review sees of a change
# Most that a program may have: "shared memory per thread block" in the CUDA programming guide's table of compute capabilities.
SHARED_BYTES: dict[Target, int] = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
SCHEDULERS = 4  # of an NVIDIA multiprocessor, and SIMD units of an AMD compute unit

_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_SASS_MATRIX = ("HMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA", "UTCHMMA", "UTCQMMA")
_SASS_LOCAL = ("LDL", "STL")
_GCN = re.compile(r"^(?:(\.LBB\w+):|\s+([a-z]+_\w+)\b([^;\n]*))", re.MULTILINE)
_GCN_LOCAL = ("scratch_load", "scratch_store")


@dataclass(frozen=True, slots=True)
class Built:
    """What one variant became."""

    target: str
    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    spills: int  # accesses to local memory, anywhere
    loop: int  # instructions of the hot loop; 0: it has none
    loop_spills: int
    cycles: int | None  # issue cycles per 64 tokens of the hot loop
    seconds: float
    max_stack_bytes: int = MAX_STACK_BYTES

    def trouble(self, limit: int | None) -> list[str]:
        """What the gate objects to; `limit` is the table's number of cycles."""
        found: list[str] = []
        if self.loop_spills:
            found.append(f"{self.loop_spills} accesses to local memory in the hot loop")
        if self.stack_bytes > self.max_stack_bytes:
            found.append(f"a stack of {self.stack_bytes} bytes, at most {self.max_stack_bytes} are allowed")
        room = SHARED_BYTES[self.target]  # type: ignore[index]
        if self.shared_bytes > room:
            found.append(f"{self.shared_bytes} bytes of shared memory, the target has {room}")
        if self.cycles is not None and limit is None:
            found.append("no number of cycles in the table (--update writes it)")
        elif self.cycles is not None and limit is not None and self.cycles > limit:
            found.append(f"{self.cycles} issue cycles per 64 tokens, the table says {limit}")
        return found


def variants(target: Target) -> dict[str, AotVariant]:
    """All variants of a target, by name."""
    found: dict[str, AotVariant] = {}
    for module in MODULES:
        for variant in importlib.import_module(f"kvtier.kernels.{module}").aot_variants(target):
            if variant.name in found:
                raise ValueError(f"two variants for {target} are named {variant.name}")
            found[variant.name] = variant
    return found


def build(target: Target, name: str, assembly: Path | None = None) -> Built:
    """Compile one variant. Raises what triton raises where that fails."""
    import triton
    from triton.compiler import ASTSource

    variant = variants(target)[name]
    start = time.perf_counter()
    source = ASTSource(
        fn=variant.kernel, signature=variant.signature, constexprs=variant.constexprs, attrs=variant.attrs
    )
    compiled = triton.compile(source, target=_gpu(target), options=dict(variant.options))
    registers, stack, spills, text = _nvidia(compiled) if target != "gfx942" else _amd(compiled)
    loop, loop_spills = _sass_loop(text) if target != "gfx942" else _gcn_loop(text)
    if assembly is not None:
        (assembly / f"{target}_{name}.s").write_text(text)
    cycles = None
    if variant.tile_tokens:
        if not loop:
            raise ValueError(f"{name} for {target} has no loop with matrix instructions")
        warps = int(variant.options.get("num_warps", 4))
        cycles = -(-loop * warps * 64 // (SCHEDULERS * variant.tile_tokens))
    return Built(
        target=target,
        name=name,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=int(compiled.metadata.shared),
        spills=spills,
        loop=loop,
        loop_spills=loop_spills,
        cycles=cycles,
        seconds=time.perf_counter() - start,
        max_stack_bytes=variant.max_stack_bytes,
    )


def _gpu(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", target, 64) if target == "gfx942" else GPUTarget("cuda", int(target[3:]), 32)


def _nvidia(compiled: Any) -> tuple[int, int, int, str]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(what: str) -> str:
            return subprocess.run([tool, what, file.name], check=True, capture_output=True, text=True).stdout

        usage, text = dump("-res-usage"), dump("-sass")
    spills = sum(operation.startswith(_SASS_LOCAL) for _, operation, _ in _SASS.findall(text))
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), spills, text


def _amd(compiled: Any) -> tuple[int, int, int, str]:
    text: str = compiled.asm["amdgcn"]
    spills = sum(operation.startswith(_GCN_LOCAL) for _, operation, _ in _GCN.findall(text))
    return (
        _number(r"\.vgpr_count:\s+(\d+)", text),
        _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        spills,
        text,
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the assembler's output has no {pattern}")
    return int(match.group(1))


def _sass_loop(text: str) -> tuple[int, int]:
    """Instructions and local-memory accesses of the shortest loop that holds matrix instructions; (0, 0) without."""
    code = [(int(at, 16), operation, rest) for at, operation, rest in _SASS.findall(text)]
    loops = []
    for end, operation, rest in code:
        jump = re.search(r"0x([0-9a-f]+)", rest) if operation.startswith("BRA") else None
        if jump and int(jump.group(1), 16) < end:
            loops.append([op for at, op, _ in code if int(jump.group(1), 16) <= at <= end])
    return _shortest(loops, _SASS_MATRIX, _SASS_LOCAL)


def _gcn_loop(text: str) -> tuple[int, int]:
    labels: dict[str, int] = {}
    code: list[str] = []
    loops = []
    for label, operation, rest in _GCN.findall(text):
        if label:
            labels[label] = len(code)
            continue
        code.append(operation)
        jump = re.search(r"\.LBB\w+", rest) if operation.startswith(("s_cbranch", "s_branch")) else None
        if jump and jump.group(0) in labels:
            loops.append(code[labels[jump.group(0)] :])
    return _shortest(loops, ("v_mfma",), _GCN_LOCAL)


def _shortest(loops: list[list[str]], matrix: tuple[str, ...], local: tuple[str, ...]) -> tuple[int, int]:
    hot = [loop for loop in loops if any(op.startswith(matrix) for op in loop)]
    if not hot:
        return 0, 0
    loop = min(hot, key=len)
    return len(loop), sum(op.startswith(local) for op in loop)


def build_all(
    targets: list[Target], only: str, assembly: Path | None
) -> Iterator[tuple[Target, str, Built | BaseException]]:
    """Every variant of the targets, compiled in as many processes as there are cores, in order."""
    wanted = [(target, name) for target in targets for name in variants(target) if only in name]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count() or 1, context) as pool:
        jobs = [pool.submit(build, target, name, assembly) for target, name in wanted]
        for (target, name), job in zip(wanted, jobs, strict=True):
            error = job.exception()
            yield target, name, job.result() if error is None else error


def read_table() -> dict[str, dict[str, int]]:
    """Committed issue cycles by target and variant."""
    if not TABLE.is_file():
        return {}
    table: dict[str, dict[str, int]] = json.loads(TABLE.read_text())["cycles"]
    return table


def main(arguments: list[str] | None = None) -> int:
    """The gate; 1 on trouble."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets", default=",".join(get_args(Target)), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument(
        "--update", action="store_true", help="write the issue cycles found into the committed table"
    )
    parser.add_argument("--json", type=Path, help="write everything found to this file")
    parser.add_argument("--assembly", type=Path, help="write each variant's assembly into this folder")
    options = parser.parse_args(arguments)
    targets = [target for target in options.targets.split(",") if target]
    unknown = sorted(set(targets) - set(get_args(Target)))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(get_args(Target))}")
    if options.assembly is not None:
        options.assembly.mkdir(parents=True, exist_ok=True)
    # Both for the processes that compile: the interpreter compiles nothing, and newer triton changes the default.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    table = read_table()
    built: list[Built] = []
    troubles = 0
    print(
        f"{'target':7} {'variant':34} {'regs':>4} {'stack':>5} {'shared':>7} {'loop':>5} {'cycles':>6} {'table':>5}  seconds"
    )
    for target, name, result in build_all(targets, options.only, options.assembly):
        if isinstance(result, BaseException):
            troubles += 1
            print(
                f"{target:7} {name:34} FAILED: {type(result).__name__}: {str(result).strip()[-300:]}",
                flush=True,
            )
            continue
        built.append(result)
        limit = result.cycles if options.update else table.get(target, {}).get(name)
        objections = result.trouble(limit)
        troubles += bool(objections)
        print(
            _line(result, table.get(target, {}).get(name))
            + "".join(f"\n    TROUBLE: {o}" for o in objections),
            flush=True,
        )
    if not built and not troubles:
        print(f"no variant's name contains {options.only!r}")
        return 1
    if options.update:
        _write_table(table, built)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(b) for b in built], indent=1) + "\n")
    print(f"{len(built)} variants compiled, {troubles} in trouble")
    return 1 if troubles else 0


def _line(b: Built, limit: int | None) -> str:
    def text(value: int | None) -> str:
        return "" if value is None else str(value)

    return (
        f"{b.target:7} {b.name:34} {b.registers:4} {b.stack_bytes:5} {b.shared_bytes:7} {b.loop or '':>5} "
        f"{text(b.cycles):>6} {text(limit):>5}  {b.seconds:.1f}"
    )


def _write_table(table: dict[str, dict[str, int]], built: list[Built]) -> None:
    import triton

    for b in built:
        if b.cycles is not None:
            table.setdefault(b.target, {})[b.name] = b.cycles
    ordered = {target: dict(sorted(names.items())) for target, names in sorted(table.items())}
    TABLE.write_text(json.dumps({"triton": triton.__version__, "cycles": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
