"""Process memory: malloc thresholds, and large buffers in huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64


def raise_malloc_thresholds() -> bool:
    """Let glibc keep freed buffers instead of giving them back; call it once, before torch allocates anything large.

    Fresh memory costs about ten times a copy on virtual machines, because each page of it is a fault. False where the
    C library has no such switch.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    accepted = [mallopt(name, value) == 1 for name, value in settings]
    return all(accepted)


def give_back() -> None:
    """Let the kernel have what was freed: once, after a model was loaded, whose garbage is as large as the model."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # a C library without it keeps what it has
        ctypes.CDLL(None).malloc_trim(0)


class HugeRoom:
    """Hands out buffers in huge pages side by side: one by one, each would end in a page of its own, half empty."""

    def __init__(self, chunk_bytes: int = 32 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], not touched yet; aligned to a cache line. It keeps its neighbours' memory alive."""
        size = -(-nbytes // _LINE_BYTES) * _LINE_BYTES
        if size > len(self._left):
            self._left = huge_bytes(max(size, self._chunk_bytes))
        taken, self._left = self._left[:nbytes], self._left[size:]
        return taken


def huge_bytes(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] in huge pages where the kernel gives them, not touched yet."""
    size = max(1, -(-nbytes // _HUGE_PAGE_BYTES)) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
