"""L3: the node's slab of shared memory, in which pages of any size lie in slots. Moves bytes; decides nothing.

The slab is a memfd, so that it has no name to leak, and it lives exactly as long as a process maps it or holds its
descriptor. Workers map it too (`attach`): a page goes between their arena and a slot by one copy, with no message.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tier.pages.page import (
    ALIGN_BYTES,
    HEADER_BYTES,
    PACKED_ENVELOPE_BYTES,
    Buffer,
    Envelope,
    PageCorrupt,
    PageKey,
    TierName,
    expect_envelope,
    page_hasher,
    slot_bytes,
)
from kvtier.tier.stores.base import Place

# Pieces of a checked copy: the copy leaves them in the core's own cache, so the checksum costs no memory traffic.
# Measured on one machine (1 MiB of L2 per core); anything from 128 to 512 KiB behaves alike.
_PIECE_BYTES = 256 * 1024
_TOUCH_BYTES = 16 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module doesn't name it


class HostTier:
    """A slab in which a slot, 4 KiB of header and a payload, may begin at any multiple of ALIGN_BYTES.

    `Place(0, n)` is the slot that begins at byte n * ALIGN_BYTES; which there are is their owner's to know (tier/stores/host_slots.py).
    Owns the mapping. The owner of the tier makes it (constructor), a worker maps the same memory (`attach`). Safe
    from any thread as long as no two use the same slot at once, which is what grants and leases are for.
    """

    name = TierName.HOST

    def __init__(self, capacity_bytes: int, *, pretouch: bool = True) -> None:
        """Make a slab: `capacity_bytes` rounded down to whole ALIGN_BYTES. ValueError when not even a slot fits."""
        nbytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        if nbytes <= HEADER_BYTES:
            raise ValueError(f"L3 of {capacity_bytes} bytes has no room for one slot")
        fd = os.memfd_create("kvtier-l3", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # A size that can't change: no holder of the descriptor can turn another's access into SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map_slab(fd, nbytes, pretouch)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, pretouch: bool = True) -> HostTier:
        """Map a slab that another process made. Keeps a duplicate of `fd`; the one given stays the caller's."""
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size or nbytes % ALIGN_BYTES:
            raise ValueError(f"{nbytes} bytes in units of {ALIGN_BYTES} can't lie in a slab of {size} bytes")
        tier = cls.__new__(cls)
        own = os.dup(fd)
        try:
            tier._map_slab(own, nbytes, pretouch)
        except BaseException:
            os.close(own)
            raise
        return tier

    def _map_slab(self, fd: int, nbytes: int, pretouch: bool) -> None:
        self._fd: int | None = fd
        self.capacity_bytes = nbytes
        self.touched_bytes = 0  # how far this process has the slab's memory in hand; speed only
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages for shared memory: 4 KiB pages do
        self._view = memoryview(self._map)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)  # [capacity_bytes]
        self._pinned = False
        self._closing = threading.Event()
        self._toucher: threading.Thread | None = None
        if pretouch:
            self._toucher = threading.Thread(target=self._touch, name="l3-pretouch", daemon=True)
            self._toucher.start()

    @property
    def fd(self) -> int:
        """The memfd, to be sent to workers (SCM_RIGHTS)."""
        if self._fd is None:
            raise ValueError("the slab is closed")
        return self._fd

    def slot(self, place: Place, payload_bytes: int) -> memoryview:
        """The whole slot of a page of that size, header first, writable and 4 KiB aligned."""
        start = self._start(place)
        nbytes = slot_bytes(payload_bytes)
        if start + nbytes > self.capacity_bytes:
            raise IndexError(f"a slot of {nbytes} bytes at {place} is past a slab of {self.capacity_bytes}")
        return self._view[start : start + nbytes]

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        """Put a page into a slot. Trusts the payload: it is checked when it is read, and before it sinks to L4."""
        nbytes = len(payload)
        start = self._start(place)
        room = self.capacity_bytes - start - HEADER_BYTES
        if nbytes != envelope.payload_bytes or nbytes > room:
            raise ValueError(
                f"page of {nbytes} bytes, envelope says {envelope.payload_bytes}, the slab ends after {room}"
            )
        body = start + HEADER_BYTES
        np.copyto(self._bytes[body : body + nbytes], np.frombuffer(payload, np.uint8))
        self._view[start : start + PACKED_ENVELOPE_BYTES] = envelope.pack()

    def read(self, place: Place, key: PageKey, variant: str, out: memoryview) -> Envelope:
        """Copy a page into `out`, header first, checking what arrives there."""
        start = self._start(place)
        envelope = expect_envelope(self._view[start : start + PACKED_ENVELOPE_BYTES], key, variant)
        nbytes = envelope.payload_bytes
        if nbytes > self.capacity_bytes - start - HEADER_BYTES:
            raise PageCorrupt(f"envelope says {nbytes} bytes, which the slab ends before")
        if len(out) < HEADER_BYTES + nbytes:
            raise ValueError(f"out has {len(out)} bytes, the page needs {HEADER_BYTES + nbytes}")
        target = out[HEADER_BYTES : HEADER_BYTES + nbytes]
        source = self._bytes[start + HEADER_BYTES : start + HEADER_BYTES + nbytes]
        hasher = page_hasher(key, variant, envelope.spec_digest)
        for at in range(0, nbytes, _PIECE_BYTES):
            piece = target[at : at + _PIECE_BYTES]
            np.copyto(np.frombuffer(piece, np.uint8), source[at : at + _PIECE_BYTES])
            hasher.update(piece)
        if hasher.digest() != envelope.checksum:
            raise PageCorrupt(f"checksum of page {key.hex()[:16]} in L3 slot {place.index} differs")
        out[:PACKED_ENVELOPE_BYTES] = self._view[start : start + PACKED_ENVELOPE_BYTES]
        return envelope

    def wipe(self, place: Place) -> None:
        """Zero the slot's header."""
        start = self._start(place)
        self._bytes[start : start + HEADER_BYTES] = 0

    def register_pinned(self) -> bool:
        """Pin the slab for this process's GPU, so that copies run at the bus's speed; False without CUDA.

        Takes as long as touching the whole slab. `close` undoes it. Raises RuntimeError when CUDA is there and refuses
        (the lock limit, usually). CUDA remembers that error for the calling thread, whose next launch would raise it
        again: call this on a thread that launches nothing.
        """
        import torch

        if not torch.cuda.is_available():
            return False
        if self._pinned:
            return True
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(self._bytes.ctypes.data, self.capacity_bytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"cudaHostRegister of {self.capacity_bytes} bytes failed with error {int(error)}"
            )
        self._pinned = True
        return True

    def close(self) -> None:
        """Stop touching and unmap. A slot's view still held by someone keeps the memory until it goes."""
        if self._fd is None:
            return
        self._closing.set()
        if self._toucher is not None:
            self._toucher.join()
        if self._pinned:
            import torch

            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self._bytes.ctypes.data)
            self._pinned = False
        os.close(self._fd)
        self._fd = None
        self._bytes = np.empty(0, np.uint8)
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # views are out: the mapping goes with the last of them

    def _start(self, place: Place) -> int:
        start = place.index * ALIGN_BYTES
        if place.segment != 0 or not 0 <= start < self.capacity_bytes - HEADER_BYTES:
            raise IndexError(f"{place} is no slot of a slab of {self.capacity_bytes} bytes")
        return start

    def _touch(self) -> None:
        """Have the kernel hand out the slab's pages before a copy needs them; changes no byte of it.

        First touch costs ten times a copy. The slab is usable meanwhile: a slot ahead of this just costs its faults.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # ctypes releases the GIL; mmap.madvise doesn't
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address = self._bytes.ctypes.data
        for start in range(0, self.capacity_bytes, _TOUCH_BYTES):
            if self._closing.is_set():
                return
            length = min(_TOUCH_BYTES, self.capacity_bytes - start)
            if madvise(address + start, length, _MADV_POPULATE_WRITE) != 0:
                return  # an older kernel, or memory is short: slots get their memory when they are written
            self.touched_bytes = start + length
