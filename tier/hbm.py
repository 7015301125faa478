"""L1: the arena of page frames beside the model. Hands frames out and moves page bytes in, out and between them.

The same code on a CPU, where the arena is RAM, and on a GPU: only this file knows the difference.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt
import torch

from kvtier.tier.page import PageSpec

HUGE_PAGE_BYTES = 2 << 20

Bytes = npt.NDArray[np.uint8]


def new_arena(num_frames: int, page_bytes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Zeroed uint8 [num_frames, page_bytes]. On a CPU every byte is touched, in huge pages where the kernel gives them.

    Raises ValueError for a shape that can't be, OSError or torch.OutOfMemoryError when there is no room.
    """
    if num_frames < 1 or page_bytes < 1:
        raise ValueError(f"an arena needs frames and bytes, got {num_frames} frames of {page_bytes} bytes")
    device = torch.device(device)
    if device.type != "cpu":
        return torch.zeros(num_frames, page_bytes, dtype=torch.uint8, device=device)
    nbytes = num_frames * page_bytes
    # Private: huge pages of shared memory are another, usually closed, switch of the kernel.
    memory = mmap.mmap(
        -1, -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).zero_().view(num_frames, page_bytes)


class FrameAllocator:
    """Which frames of an arena are free. Pure; owned by the worker's step loop.

    Invariant: used_bytes == page_bytes * frames handed out <= capacity_bytes.
    """

    def __init__(self, num_frames: int, page_bytes: int) -> None:
        if num_frames < 0 or page_bytes < 1:
            raise ValueError(f"num_frames {num_frames} and page_bytes {page_bytes} must be positive")
        self.num_frames = num_frames
        self.page_bytes = page_bytes
        self._free = list(range(num_frames - 1, -1, -1))  # the next one last
        self._used = bytearray(num_frames)

    @property
    def free_frames(self) -> int:
        """Frames that can be handed out now."""
        return len(self._free)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all frames."""
        return self.num_frames * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames handed out."""
        return (self.num_frames - len(self._free)) * self.page_bytes

    def alloc(self, frames: int) -> list[int] | None:
        """So many frames, or None and nothing taken when there are fewer."""
        if frames > len(self._free):
            return None
        keep = len(self._free) - frames
        taken = self._free[keep:]
        taken.reverse()
        del self._free[keep:]
        for frame in taken:
            self._used[frame] = 1
        return taken

    def free(self, frames: list[int]) -> None:
        """Give frames back; the ones given back last are handed out first."""
        for frame in frames:
            assert self._used[frame], f"frame {frame} freed twice"
            self._used[frame] = 0
        self._free += frames

    def check(self) -> None:
        """Re-derive the counts; AssertionError where one differs."""
        assert len(set(self._free)) == len(self._free) == self.num_frames - sum(self._used), "free frames"
        assert not any(self._used[frame] for frame in self._free), "a frame both free and used"


class Arena:
    """The copies of L1, on a view of the runner's arena (uint8 [num_frames, page_bytes]).

    Every call may come from any thread; two at once must not touch the same frame. Copies of whole pages release the
    GIL. On a GPU, `copy_in` and `copy_out` run on a stream of their own, after what is queued on the caller's current
    stream (the default one in a copy thread), and are done when they return: pass memory registered as pinned, or the
    driver stages it. The others are queued on the current stream, in order with the model's forward.
    """

    def __init__(self, arena: torch.Tensor) -> None:
        if arena.dtype != torch.uint8 or arena.ndim != 2 or not arena.is_contiguous():
            raise ValueError(
                f"arena must be contiguous uint8 [frames, bytes], got {arena.dtype} {list(arena.shape)}"
            )
        self.num_frames, self.page_bytes = arena.shape
        self._arena = arena
        self._host: Bytes | None = arena.numpy() if arena.device.type == "cpu" else None
        self._stream: torch.cuda.Stream | None = None
        if arena.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def copy_in(self, frame: int, payload: memoryview) -> None:
        """Fill a frame from host memory of exactly one page."""
        self._expect(frame, payload)
        if self._host is not None:
            self._host[frame] = np.frombuffer(payload, np.uint8)
        else:
            self._transfer(self._arena[frame], torch.frombuffer(payload, dtype=torch.uint8))

    def copy_out(self, frame: int, out: memoryview) -> None:
        """Write a frame's bytes into writable host memory of exactly one page."""
        self._expect(frame, out)
        if self._host is not None:
            np.frombuffer(out, np.uint8)[:] = self._host[frame]
        else:
            self._transfer(torch.frombuffer(out, dtype=torch.uint8), self._arena[frame])

    def copy_page(self, src: int, dst: int) -> None:
        """Copy a whole frame over another."""
        self._expect_two(src, dst)
        if self._host is not None:
            self._host[dst] = self._host[src]
        else:
            self._arena[dst].copy_(self._arena[src])

    def copy_head(self, src: int, dst: int, tokens: int, spec: PageSpec) -> None:
        """Copy keys and values of a page's first `tokens` tokens into another frame, whose other bytes stay."""
        self._expect_two(src, dst)
        assert 0 <= tokens <= spec.page_tokens
        if self._host is not None:
            self._host_rows(dst, spec)[..., :tokens, :] = self._host_rows(src, spec)[..., :tokens, :]
        else:
            self._device_rows(dst, spec)[..., :tokens, :] = self._device_rows(src, spec)[..., :tokens, :]

    def zero_tail(self, frame: int, from_token: int, spec: PageSpec) -> None:
        """Zero a page's keys and values from a token on, so that what lies there can't depend on history."""
        self._expect(frame)
        assert 0 <= from_token <= spec.page_tokens
        if self._host is not None:
            self._host_rows(frame, spec)[..., from_token:, :] = 0
        else:
            self._device_rows(frame, spec)[..., from_token:, :] = 0

    def _expect(self, frame: int, buffer: memoryview | None = None) -> None:
        assert 0 <= frame < self.num_frames, f"no frame {frame} among {self.num_frames}"
        if buffer is not None and buffer.nbytes != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes, got {buffer.nbytes}")

    def _expect_two(self, src: int, dst: int) -> None:
        assert src != dst, f"frame {src} copied over itself"
        self._expect(src)
        self._expect(dst)

    def _transfer(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._arena.device))
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)
        self._stream.synchronize()

    def _host_rows(self, frame: int, spec: PageSpec) -> Bytes:
        """[layers, k and v, heads, page_tokens, bytes of a head's row], a view."""
        assert self._host is not None and spec.nbytes == self.page_bytes
        shape, strides = _rows_layout(spec)
        return np.ndarray(shape, np.uint8, self._host, frame * self.page_bytes, strides)

    def _device_rows(self, frame: int, spec: PageSpec) -> torch.Tensor:
        """[layers, k and v, heads, page_tokens, bytes of a head's row], a view."""
        assert spec.nbytes == self.page_bytes
        shape, strides = _rows_layout(spec)
        return self._arena.as_strided(shape, strides, self._arena.storage_offset() + frame * self.page_bytes)


def _rows_layout(spec: PageSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, in bytes, of a page's rows: a record's padding lies between its end and the next layer."""
    row = spec.head_dim * spec.format.element_bytes
    head = spec.page_tokens * row
    return (
        (spec.num_layers, 2, spec.num_kv_heads, spec.page_tokens, row),
        (spec.record_bytes, spec.half_record_bytes, head, row, 1),
    )
