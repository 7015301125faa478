"""Makes the kernels under test: plain torch, and our compiled code for this CPU and for a plainer one."""

from __future__ import annotations

import functools
import platform
from typing import Literal

from kvtier.kernels.cpu.build import BuildError, find_compiler
from kvtier.kernels.ops import NativeKernels, TorchKernels
from kvtier.workers.models.files.store import default_cache

Kind = Literal["torch", "native", "portable"]


def _kinds() -> tuple[Kind, ...]:
    try:
        find_compiler()
    except BuildError:  # such a machine has plain torch only, and that is what is tested there
        return ("torch",)
    if platform.machine() != "x86_64":
        return ("torch", "native")
    return ("torch", "native", "portable")


KINDS = _kinds()
COMPILED = tuple(kind for kind in KINDS if kind != "torch")


@functools.cache
def kernels(kind: Kind, threads: int = 2) -> TorchKernels | NativeKernels:
    """The kernels of a kind; "portable" uses no instruction newer than AVX2, and so all the plain paths."""
    if kind == "torch":
        return TorchKernels()
    return NativeKernels(default_cache(), threads, "native" if kind == "native" else "x86-64-v3")
