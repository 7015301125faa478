"""Runs the few PTX instructions of our kernels' inline assembly on numpy, because the interpreter can't."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

Words = npt.NDArray[np.uint32]


def emulate(
    asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:  # as tl.inline_asm_elementwise
    """Run the instructions on packed 32-bit words, as every thread would."""
    (arg,) = args
    outputs = dtype if isinstance(dtype, tuple) else (dtype,)
    registers_each = pack * 2 // 4  # all results are float16
    num_registers = registers_each * len(outputs)
    assert constraints == ",".join(["=&r"] * num_registers + ["r"])
    data = np.ascontiguousarray(arg.handle.data).reshape(-1)
    registers = {f"${num_registers}": data.view(np.uint32)}
    for line in filter(None, (part.strip() for part in re.sub(r"[{}](?=\s*(\.reg|$))", "", asm).split(";"))):
        if not line.startswith(".reg"):
            step(line, registers)
    results = []
    for i in range(len(outputs)):
        words = np.stack([registers[f"${i * registers_each + j}"] for j in range(registers_each)], -1)
        halves = np.ascontiguousarray(words).view(np.float16).reshape(arg.handle.data.shape)
        results.append(
            tl.tensor(type(arg.handle)(halves, tl.float16), tl.block_type(tl.float16, list(halves.shape)))
        )
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def step(line: str, registers: dict[str, Words]) -> None:
    """One instruction."""
    name, rest = line.split(None, 1)
    if split := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest):
        assert name == "mov.b32"
        low, high, source = split.groups()
        registers[low], registers[high] = registers[source] & 0xFFFF, registers[source] >> 16
        return
    target, *operands = (x.strip() for x in rest.split(","))
    values = [registers[x] if x in registers else np.uint32(int(x, 0)) for x in operands]
    match name:
        case "mov.b32":
            result = values[0]
        case "and.b32":
            result = values[0] & values[1]
        case "shr.u32":
            result = values[0] >> values[1]
        case "shl.b32":
            result = values[0] << values[1]
        case "lop3.b32":
            assert values[3] == 0xEA
            result = values[0] & values[1] | values[2]
        case "prmt.b32":
            both = values[0].astype(np.uint64) | np.uint64(values[1]) << np.uint64(32)
            result = sum(
                (both >> np.uint64(8 * (int(values[2]) >> 4 * i & 7)) & np.uint64(0xFF)) << np.uint64(8 * i)
                for i in range(4)
            )
        case "sub.f16x2":
            x, y = (
                np.ascontiguousarray(np.broadcast_to(v, values[0].shape)).view(np.float16) for v in values
            )
            result = (x - y).view(np.uint32)
        case "cvt.rn.f16x2.e4m3x2":
            codes = torch.from_numpy(values[0].astype(np.uint16).view(np.uint8))
            result = codes.view(torch.float8_e4m3fn).half().numpy().view(np.uint32)
        case _:
            raise AssertionError(f"what does {line} do?")
    registers[target] = np.asarray(result).astype(np.uint32)
