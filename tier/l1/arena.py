"""L1: the arena of pages beside the model. Hands out frames of any page size, moves bytes in, out and between them.

The same code on a CPU, where the arena is RAM, and on a GPU: only this file knows the difference.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvtier.tier.l1.frame_fences import FrameFences
from kvtier.tier.pages.page import PageSpec

HUGE_PAGE_BYTES = 2 << 20
# More slabs: less to move when a size needs one, more places lost at their ends. Chosen by hand.
MIN_SLABS, MIN_SLAB_PAGES, MAX_SLAB_PAGES = 64, 8, 64

Bytes = npt.NDArray[np.uint8]
Fences = FrameFences[torch.cuda.Event]


def new_fences(arena: torch.Tensor) -> Fences | None:
    """Fences of an arena (uint8 [units, unit bytes]) on a GPU, marked by the runner that queues work on it; None in host memory."""
    if arena.device.type != "cuda":
        return None

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(arena.device))
        return event

    return FrameFences(len(arena), record)


def new_arena(num_units: int, unit_bytes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Zeroed uint8 [num_units, unit_bytes]. On a CPU every byte is touched, in huge pages where the kernel gives them.

    Raises ValueError for a shape that can't be, OSError or torch.OutOfMemoryError when there is no room.
    """
    if num_units < 1 or unit_bytes < 1:
        raise ValueError(f"an arena needs units and bytes, got {num_units} units of {unit_bytes} bytes")
    device = torch.device(device)
    if device.type != "cpu":
        return torch.zeros(num_units, unit_bytes, dtype=torch.uint8, device=device)
    nbytes = num_units * unit_bytes
    # Private: huge pages of shared memory are another, usually closed, switch of the kernel.
    memory = mmap.mmap(
        -1, -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).zero_().view(num_units, unit_bytes)


@dataclass(slots=True)
class ArenaShare:
    """What other processes of this user open an arena of `nbytes` by: its memfd, or a handle where it is on a GPU."""

    nbytes: int
    fd: int | None
    handle: bytes = b""

    def close(self) -> None:
        """The memfd is sent to nothing any more; who has it keeps it. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def new_shared_arena(
    num_units: int, unit_bytes: int, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, ArenaShare]:
    """As `new_arena`, of memory that other processes can open (`open_peer`).

    On a CPU its pages are small where the kernel gives shared memory no huge ones.
    """
    device = torch.device(device)
    if device.type != "cpu":
        arena = new_arena(num_units, unit_bytes, device)
        return arena, ArenaShare(arena.nbytes, None, share_handle(arena))
    if num_units < 1 or unit_bytes < 1:
        raise ValueError(f"an arena needs units and bytes, got {num_units} units of {unit_bytes} bytes")
    nbytes = num_units * unit_bytes
    whole = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    fd = os.memfd_create("kvtier-l1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, whole)
        # A size that can't change: no holder of the descriptor can turn another's access into SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(fd, whole, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        arena = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).zero_().view(num_units, unit_bytes)
    except BaseException:
        os.close(fd)
        raise
    return arena, ArenaShare(nbytes, fd)


def share_handle(arena: torch.Tensor) -> bytes:
    """What `open_peer` opens an arena on a GPU by, in another process of this machine. Raises RuntimeError."""
    parts = arena.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return msgspec.msgpack.encode(list(parts))


class PeerArena:
    """Another process's arena, as this one reads and writes it. From any thread; `close` once no copy touches it."""

    def __init__(self, memory: torch.Tensor, mapping: mmap.mmap | None) -> None:
        """`memory`: uint8 [bytes]."""
        self.nbytes = memory.numel()
        self.memory = memory
        self._mapping = mapping

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """A frame: a view. Raises ValueError for one that doesn't lie in the arena."""
        if not 0 < nbytes <= self.nbytes - offset or offset < 0:
            raise ValueError(f"{nbytes} bytes at {offset} end behind a peer's arena of {self.nbytes}")
        return self.memory[offset : offset + nbytes]

    def close(self) -> None:
        """Let it go. Idempotent."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view is out: the mapping goes with it
                mapping.close()


def open_peer(nbytes: int, fd: int | None, handle: bytes, device: torch.device) -> PeerArena:
    """Open what a peer shares, for a worker on `device`; `fd` stays the caller's. Raises ValueError, OSError or RuntimeError."""
    if handle:
        return PeerArena(_open_handle(nbytes, handle, device), None)
    if fd is None or device.type != "cpu":
        raise ValueError(f"a peer's arena in host memory can't be opened on {device}")
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise ValueError(f"a peer's arena of {nbytes} bytes can't lie in a file of {size}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("a peer's arena lies in a file that may shrink under its readers")
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return PeerArena(torch.frombuffer(mapping, dtype=torch.uint8), mapping)


def _open_handle(nbytes: int, handle: bytes, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        raise ValueError(f"a peer's arena on a GPU can't be opened on {device}")
    _, *parts = msgspec.msgpack.decode(handle, type=tuple[int, bytes, int, int, bytes, int, bytes, bool])
    # The number of the device is the peer's, which may see other ones: here the memory is reached from our own.
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts)
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    memory.set_(storage)
    if memory.numel() < nbytes:
        raise ValueError(f"a peer's arena of {nbytes} bytes, {memory.numel()} were shared")
    return memory[:nbytes]


class SlabAllocator:
    """Which units of an arena are free, for pages of one or several sizes. Pure; owned by the worker's step loop.

    Sizes are in units; a frame is a page's first unit. The arena is cut in slabs of equal size, each of which serves one
    page size at a time and is free again when its last page is. With one size there is one slab, and frames of one unit
    are page numbers.

    `used` and `free` count, by size, pages handed out and places left in that size's slabs. A size with a slab's worth
    of free places can give up any of its slabs, once the pages of that slab have moved to them.
    """

    def __init__(self, num_units: int, sizes: Iterable[int]) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        if not self.sizes or self.sizes[0] < 1 or num_units < self.sizes[-1]:
            raise ValueError(f"{num_units} units can't hold a page of each of the sizes {self.sizes}")
        self.num_units = num_units
        self.num_slabs = _slabs_for(num_units // self.sizes[-1], len(self.sizes))
        self.slab_units = num_units // self.num_slabs
        self.used = dict.fromkeys(self.sizes, 0)
        self.free = dict.fromkeys(self.sizes, 0)
        self._size: list[int | None] = [None] * self.num_slabs
        self._taken: list[set[int]] = [set() for _ in range(self.num_slabs)]
        self._places: list[list[int]] = [[] for _ in range(self.num_slabs)]  # free ones, the next one last
        # By size, the slabs with a free place, in order of opening.
        self._open: dict[int, dict[int, None]] = {size: {} for size in self.sizes}
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        if len(self.sizes) == 1:
            self._begin(self._free_slabs.pop(), self.sizes[0])

    @property
    def used_units(self) -> int:
        """Units of the pages handed out."""
        return sum(size * pages for size, pages in self.used.items())

    def per_slab(self, size: int) -> int:
        """Pages of a size that a slab holds."""
        return self.slab_units // size

    def can_hold(self, pages: Mapping[int, int]) -> bool:
        """Whether so many pages by size fit into the arena, if each lies where it takes least room. From any thread."""
        return sum(-(-count // self.per_slab(size)) for size, count in pages.items()) <= self.num_slabs

    def size_of(self, frame: int) -> int:
        """The size that the frame was handed out for."""
        size = self._size[frame // self.slab_units]
        assert size is not None and frame in self._taken[frame // self.slab_units], f"frame {frame} is free"
        return size

    def alloc(self, size: int, count: int) -> list[int]:
        """At most `count` frames for pages of a size: those that are free."""
        frames: list[int] = []
        opened = self._open[size]
        while len(frames) < count and (opened or self._free_slabs):
            if not opened:
                self._begin(self._free_slabs.pop(), size)
            slab = next(iter(opened))
            places = self._places[slab]
            keep = max(0, len(places) - count + len(frames))
            taken = places[keep:]
            taken.reverse()
            del places[keep:]
            self._taken[slab].update(taken)
            frames += taken
            if not places:
                del opened[slab]
        self.used[size] += len(frames)
        self.free[size] -= len(frames)
        return frames

    def alloc_slab(self, size: int) -> list[int]:
        """All places of one slab that nothing uses, for pages of a size; none where there is no such slab."""
        if not self._free_slabs:
            return []
        self._begin(self._free_slabs.pop(), size)
        slab = next(reversed(self._open[size]))
        places, self._places[slab] = self._places[slab], []
        places.reverse()
        self._taken[slab].update(places)
        del self._open[size][slab]
        self.used[size] += len(places)
        self.free[size] -= len(places)
        return places

    @property
    def free_slabs(self) -> int:
        """Slabs that nothing uses."""
        return len(self._free_slabs)

    def slab_of(self, frame: int) -> int:
        """The slab that a frame lies in."""
        return frame // self.slab_units

    def give_back(self, frame: int) -> None:
        """A frame is free; the one given back last is handed out first."""
        slab = frame // self.slab_units
        taken, size = self._taken[slab], self._size[slab]
        assert size is not None and frame in taken, f"frame {frame} freed twice"
        taken.remove(frame)
        self._places[slab].append(frame)
        self.used[size] -= 1
        self.free[size] += 1
        if taken or len(self.sizes) == 1:
            self._open[size][slab] = None
        else:
            self._end(slab, size)

    def surplus(self, but: int) -> int | None:
        """A size other than `but` that can give up a slab; the one with most slabs' worth of free places."""
        sizes = [s for s in self.sizes if s != but and self.free[s] >= self.per_slab(s)]
        return max(sizes, key=lambda size: self.free[size] // self.per_slab(size), default=None)

    def vacate(self, size: int, in_copy: Container[int]) -> dict[int, int] | None:
        """Empty a size's emptiest slab without a frame in `in_copy`: where each of its pages is to move, which are
        handed out, while their old places count as free. None when each slab has such a frame.
        """
        assert self.free[size] >= self.per_slab(size), f"the pages of a slab of size {size} fit nowhere else"
        slabs = [slab for slab, served in enumerate(self._size) if served == size]
        for slab in sorted(slabs, key=lambda slab: len(self._taken[slab])):
            if not any(frame in in_copy for frame in self._taken[slab]):
                break
        else:
            return None
        self._open[size].pop(slab, None)  # its own places are no target
        old = sorted(self._taken[slab])
        new = self.alloc(size, len(old))
        for frame in old:
            self.give_back(frame)
        return dict(zip(old, new, strict=True))

    def check(self) -> None:
        """Re-derive the counts; AssertionError where one differs."""
        for size in self.sizes:
            slabs = [slab for slab, served in enumerate(self._size) if served == size]
            assert self.used[size] == sum(len(self._taken[slab]) for slab in slabs), (
                f"used pages of size {size}"
            )
            assert self.free[size] == sum(len(self._places[slab]) for slab in slabs), f"places of size {size}"
            assert self._open[size].keys() == {s for s in slabs if self._places[s]}, (
                f"open slabs of size {size}"
            )
            for slab in slabs:
                first = slab * self.slab_units
                places = range(first, first + self.per_slab(size) * size, size)
                known = [*self._taken[slab], *self._places[slab]]
                assert sorted(known) == list(places), f"places of slab {slab}"
                assert self._taken[slab] or len(self.sizes) == 1, f"slab {slab} serves nothing and isn't free"
        free = {slab for slab, served in enumerate(self._size) if served is None}
        assert free == set(self._free_slabs) and len(free) == len(self._free_slabs), "free slabs"

    def _begin(self, slab: int, size: int) -> None:
        first, places = slab * self.slab_units, self.per_slab(size)
        self._size[slab] = size
        self._places[slab] = list(range(first + (places - 1) * size, first - 1, -size))
        self._open[size][slab] = None
        self.free[size] += places

    def _end(self, slab: int, size: int) -> None:
        self.free[size] -= len(self._places[slab])
        self._size[slab] = None
        self._places[slab] = []
        self._open[size].pop(slab, None)
        self._free_slabs.append(slab)


def _slabs_for(pages: int, sizes: int) -> int:
    """Slabs of an arena for so many pages of the largest size: where it can be two for each size, of 8 to 64 pages."""
    if sizes == 1:
        return 1
    per_slab = min(MAX_SLAB_PAGES, max(MIN_SLAB_PAGES, pages // MIN_SLABS))
    return max(min(2 * sizes, pages), pages // per_slab)


class Arena:
    """The copies of L1, on a view of the runner's arena (uint8 [units, unit_bytes]); frame f begins at unit f.

    Every call may come from any thread; two at once must not touch the same frame. Copies of whole pages release the
    GIL. On a GPU, `copy_in`, `copy_out`, `zero_tail` and the copies from and to peers run on a stream of their own, and are
    done when they return: pass memory registered as pinned, or the driver stages it. They wait for the work that last used
    their frame (`fences`), or, without fences, for all that is queued on the caller's current stream (the default one in a
    copy thread). The others are queued on the current stream, in order with the model's forward.
    """

    def __init__(self, arena: torch.Tensor, fences: Fences | None = None) -> None:
        """`fences` are those that the arena's runner marks, on a GPU."""
        if arena.dtype != torch.uint8 or arena.ndim != 2 or not arena.is_contiguous():
            raise ValueError(
                f"arena must be contiguous uint8 [units, bytes], got {arena.dtype} {list(arena.shape)}"
            )
        self.num_units, self.unit_bytes = arena.shape
        self._bytes = arena.view(-1)
        self._host: Bytes | None = self._bytes.numpy() if arena.device.type == "cpu" else None
        self._fences = fences
        self._stream: torch.cuda.Stream | None = None
        if arena.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def copy_in(self, frame: int, payload: memoryview) -> None:
        """Fill a frame's first bytes from host memory: a whole page."""
        place = self._place(frame, payload.nbytes)
        if self._host is not None:
            self._host[place] = np.frombuffer(payload, np.uint8)
        else:
            self._fill(frame, self._bytes[place], torch.frombuffer(payload, dtype=torch.uint8))

    def copy_out(self, frame: int, out: memoryview) -> None:
        """Write a frame's first bytes into writable host memory: a whole page."""
        place = self._place(frame, out.nbytes)
        if self._host is not None:
            np.frombuffer(out, np.uint8)[:] = self._host[place]
        else:
            self._read(frame, torch.frombuffer(out, dtype=torch.uint8), self._bytes[place])

    def copy_from_peer(self, frame: int, peer: PeerArena, offset: int, nbytes: int) -> None:
        """Fill a frame's first bytes from a peer's arena: a whole page."""
        dst, src = self._bytes[self._place(frame, nbytes)], peer.part(offset, nbytes)
        if self._host is not None:
            _copy_in_host_memory(dst, src)
        else:
            self._fill(frame, dst, src)

    def copy_to_peer(self, frame: int, peer: PeerArena, offset: int, nbytes: int) -> None:
        """Write a frame's first bytes into a peer's arena: a whole page."""
        dst, src = peer.part(offset, nbytes), self._bytes[self._place(frame, nbytes)]
        if self._host is not None:
            _copy_in_host_memory(dst, src)
        else:
            self._read(frame, dst, src)

    def host_bytes(self, frame: int, nbytes: int) -> memoryview | None:
        """A frame's first bytes, where the arena is host memory."""
        return None if self._host is None else self._host[self._place(frame, nbytes)].data

    def move(self, src: int, dst: int, nbytes: int) -> None:
        """Copy a frame's first bytes over those of another frame."""
        source, target = self._place(src, nbytes), self._place(dst, nbytes)
        assert source.stop <= target.start or target.stop <= source.start, f"frames {src} and {dst} overlap"
        if self._host is not None:
            self._host[target] = self._host[source]
        else:
            self._bytes[target].copy_(self._bytes[source])
            self._mark(src, dst, nbytes)

    def copy_head(self, src: int, dst: int, tokens: int, spec: PageSpec) -> None:
        """Copy what a page holds of its first `tokens` tokens into another frame, whose other bytes stay."""
        assert src != dst, f"frame {src} copied over itself"
        assert 0 <= tokens <= spec.page_tokens
        if self._host is not None:
            for source, target in zip(
                self._host_rows(self._host, src, spec), self._host_rows(self._host, dst, spec), strict=True
            ):
                target[..., :tokens, :] = source[..., :tokens, :]
        else:
            for rows, other in zip(self._device_rows(src, spec), self._device_rows(dst, spec), strict=True):
                other[..., :tokens, :] = rows[..., :tokens, :]
            self._mark(src, dst, spec.nbytes)

    def zero_tail(self, frame: int, from_token: int, spec: PageSpec) -> None:
        """Zero what a page holds of its tokens from one on, so that what lies there can't depend on history."""
        assert 0 <= from_token <= spec.page_tokens
        if self._host is not None:
            for rows in self._host_rows(self._host, frame, spec):
                rows[..., from_token:, :] = 0
        else:
            with self._on_stream(self._last_use(frame, spec.nbytes)):
                for parts in self._device_rows(frame, spec):
                    parts[..., from_token:, :] = 0

    def _place(self, frame: int, nbytes: int) -> slice:
        start = frame * self.unit_bytes
        assert 0 <= frame < self.num_units, f"no frame {frame} among {self.num_units}"
        if not 0 < nbytes <= self._bytes.numel() - start:
            raise ValueError(
                f"a page of {nbytes} bytes at unit {frame} of {self.num_units} ends behind the arena"
            )
        return slice(start, start + nbytes)

    def _fill(self, frame: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy into a frame, once nothing queued reads or writes it any more."""
        with self._on_stream(self._last_use(frame, dst.numel())):
            dst.copy_(src, non_blocking=True)

    def _read(self, frame: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy out of a frame, once nothing queued writes it any more; forwards may read it meanwhile."""
        fence = None if self._fences is None else self._fences.last_write(*self._units(frame, src.numel()))
        with self._on_stream(fence):
            dst.copy_(src, non_blocking=True)

    @contextlib.contextmanager
    def _on_stream(self, fence: torch.cuda.Event | None) -> Iterator[None]:
        """Queue work on the copy stream behind `fence`, and wait for it."""
        stream = self._stream
        if stream is None:  # a device without streams: work is queued in order
            yield
            return
        if self._fences is None:
            stream.wait_stream(torch.cuda.current_stream(self._bytes.device))
        elif fence is not None:
            stream.wait_event(fence)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _last_use(self, frame: int, nbytes: int) -> torch.cuda.Event | None:
        return None if self._fences is None else self._fences.last_use(*self._units(frame, nbytes))

    def _mark(self, src: int, dst: int, nbytes: int) -> None:
        """A copy between frames is queued on the current stream."""
        if self._fences is not None:
            self._fences.mark(np.arange(*self._units(src, nbytes)), np.arange(*self._units(dst, nbytes)))

    def _units(self, frame: int, nbytes: int) -> tuple[int, int]:
        return frame, frame + -(-nbytes // self.unit_bytes)

    def _host_rows(self, host: Bytes, frame: int, spec: PageSpec) -> list[Bytes]:
        """[layers, heads, page_tokens, bytes of a row] for each section of the page's records; views."""
        start = self._place(frame, spec.nbytes).start
        return [
            np.ndarray(shape, np.uint8, host, start + at, strides)
            for shape, strides, at in _rows_layout(spec)
        ]

    def _device_rows(self, frame: int, spec: PageSpec) -> list[torch.Tensor]:
        """As `_host_rows`, on the arena's device."""
        start = self._bytes.storage_offset() + self._place(frame, spec.nbytes).start
        return [
            self._bytes.as_strided(shape, strides, start + at) for shape, strides, at in _rows_layout(spec)
        ]


def _copy_in_host_memory(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Releases the GIL, and wakes no other thread, as torch's copy may."""
    np.copyto(dst.numpy(), src.numpy())


_Four = tuple[int, int, int, int]


def _rows_layout(spec: PageSpec) -> list[tuple[_Four, _Four, int]]:
    """Shape, strides and offset, in bytes, of the rows of each section: [layers, heads, page_tokens, bytes of a row]."""
    if not spec.format.is_token_wise:
        raise ValueError(f"a page of format {spec.format} has no bytes of single tokens")
    return [
        (
            (spec.num_layers, section.heads, section.tokens, section.row_bytes),
            (spec.record_bytes, section.tokens * section.row_bytes, section.row_bytes, 1),
            section.offset,
        )
        for section in spec.sections
        if section.row_bytes
    ]
