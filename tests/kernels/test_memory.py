"""Process memory helpers."""

from __future__ import annotations

import subprocess
import sys

import torch

from kvtier.kernels.memory import huge_bytes


def test_huge_bytes_are_zero_and_writable_at_any_size() -> None:
    for nbytes in (1, 4097, (2 << 20) + 5):
        memory = huge_bytes(nbytes)
        assert memory.shape == (nbytes,) and memory.dtype == torch.uint8 and not memory.any()
        memory.fill_(7)
        assert bool((memory == 7).all())


def test_raising_malloc_thresholds_says_whether_the_c_library_took_them() -> None:
    """In a process of its own, which it changes for good; glibc takes them."""
    code = (
        "import platform; from kvtier.kernels.memory import raise_malloc_thresholds as raise_thresholds;"
        "assert raise_thresholds() == (platform.libc_ver()[0] == 'glibc')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
