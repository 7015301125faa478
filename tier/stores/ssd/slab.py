"""Slab files: preallocated files cut in page slots, read and written with O_DIRECT. Knows slots, not catalogues.

A segment is one file. Its name carries its slot size, so that a rebuild can find the slots of a file whose catalogue
is lost. A slot's header repeats the page's identity (the envelope) and a stamp: the era in which it was written.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtier.tier.pages.page import (
    ALIGN_BYTES,
    HEADER_BYTES,
    PACKED_ENVELOPE_BYTES,
    Buffer,
    Envelope,
    PageCorrupt,
    PageMissing,
    slot_bytes,
)
from kvtier.tier.stores.base import Place

PROBE_FILE = "probe.tmp"
_NAME = re.compile(r"slab-(\d{5})\.(\d+)")
_STAMP = struct.Struct("<4sQ")  # magic, era
_STAMP_MAGIC = b"KVS1"
_STAMPED_BYTES = PACKED_ENVELOPE_BYTES + _STAMP.size + 8
assert _STAMPED_BYTES <= HEADER_BYTES
_SCAN_BYTES = 2 * 2**20  # of one read of a scan: enough for the disk's full speed
_HEADERS_ALONE_BYTES = 2**17  # slots from this size on are skipped over quicker than they are read


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page found whole in a slab file, without a catalogue."""

    envelope: Envelope
    place: Place
    slot_bytes: int
    era: int
    modified_s: float  # when its file was last written, wall clock


@dataclass(slots=True)
class _Segment:
    fd: int
    slot_bytes: int
    is_allocated: bool = False


class SlabFiles:
    """The slab files of one folder, of `segment_bytes` each, made when they are first written.

    Different slots may be used from different threads at once. `era` goes into the stamp of each slot written; its
    owner raises it.
    """

    def __init__(self, folder: Path, segment_bytes: int, era: int) -> None:
        """Take over the files there are; `use` says which of them stay."""
        self.era = era
        self.unreadable = 0  # slots that the latest scan could not read
        self._folder = folder
        self._usable: Collection[int] = ()
        self._segment_bytes = segment_bytes
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
        self.direct = _takes_direct_io(folder)
        self._segments: dict[int, _Segment] = {}
        self._lock = threading.Lock()  # guards making, opening and renaming files; never held during page I/O
        self._edges: deque[mmap.mmap] = deque()  # spare buffers for headers and tails, one per thread at work
        self._names: dict[int, str] = {}
        self._found_bytes: dict[int, int] = {}  # sizes of the files as they were found
        self._others: list[str] = []  # files that can't be of use
        for name in names:
            segment, size = _number_of(name), os.stat(folder / name).st_size
            if segment in self._names or size > segment_bytes:
                self._others.append(name)
            else:
                self._names[segment] = name
                self._found_bytes[segment] = size

    @property
    def present(self) -> Collection[int]:
        """Segments that have a file."""
        return self._names.keys()

    def use(self, segments: Collection[int]) -> None:
        """These segments may be written from now on; `delete_others` deletes the files of others."""
        self._usable = frozenset(segments)

    def delete_others(self) -> None:
        """Delete the files that are of no use."""
        for number in [number for number in self._names if number not in self._usable]:
            self._others.append(self._names.pop(number))
            if (segment := self._segments.pop(number, None)) is not None:
                os.close(segment.fd)
        while self._others:
            os.unlink(self._folder / self._others[-1])
            self._others.pop()

    def is_gone(self) -> bool:
        """Whether something deleted a file that is in use; what is written there goes nowhere."""
        with self._lock:
            return any(os.fstat(segment.fd).st_nlink == 0 for segment in self._segments.values())

    @staticmethod
    def is_slab(name: str) -> bool:
        """Whether a slab file could have this name."""
        return _NAME.fullmatch(name) is not None

    def growth(self, place: Place, size: int) -> int:
        """Bytes by which the files grow when this place is written."""
        return 0 if place.segment in self._names else self._segment_bytes

    def taken_bytes(self) -> int:
        """Bytes of the files, as they are when each is whole."""
        return len(self._names) * self._segment_bytes

    def holds(self, place: Place, size: int) -> bool:
        """Whether a slot of `size` bytes lies whole in the files as they were found."""
        name = self._names.get(place.segment)
        return (
            name is not None
            and _slot_bytes_of(name) == size
            and (place.index + 1) * size <= self._found_bytes[place.segment]
        )

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        """One write of header and payload. An aligned payload (an L3 slot's) goes to the disk from where it lies."""
        size = slot_bytes(envelope.payload_bytes)
        segment = self._for_writing(place.segment, size)
        offset = self._offset(place, size)
        whole = len(payload) // ALIGN_BYTES * ALIGN_BYTES
        edges = self._take_edges()
        try:
            edges[:_STAMPED_BYTES] = _stamped(envelope, self.era)
            view = memoryview(edges)
            pieces: list[Buffer] = [view[:HEADER_BYTES]]
            if whole:
                pieces.append(memoryview(payload)[:whole])
            if rest := len(payload) - whole:
                edges[HEADER_BYTES : HEADER_BYTES + rest] = bytes(payload[whole:])
                edges[HEADER_BYTES + rest :] = bytes(ALIGN_BYTES - rest)
                pieces.append(view[HEADER_BYTES:])
            self._write(segment.fd, pieces, offset, size)
        finally:
            self._edges.append(edges)

    def read(self, place: Place, out: memoryview) -> None:
        """Read a whole slot into `out`, which is at least as large. An aligned `out` is filled by the disk itself.

        Raises PageMissing where nothing was ever written, PageCorrupt where the file ends early.
        """
        segment = self._for_reading(place.segment)
        size = segment.slot_bytes
        if len(out) < size:
            raise ValueError(f"out has {len(out)} bytes, the slot {size}")
        got = self._read(segment.fd, out[:size], self._offset(place, size))
        if got != size:
            raise PageCorrupt(f"slab file {place.segment} ends inside slot {place.index}")

    def wipe(self, place: Place) -> None:
        """Zero the slot's header; a slot of a file that isn't there has none."""
        try:
            segment = self._for_reading(place.segment)
        except PageMissing:
            return
        edges = self._take_edges()
        try:
            edges[:HEADER_BYTES] = bytes(HEADER_BYTES)
            offset = self._offset(place, segment.slot_bytes)
            self._write(segment.fd, [memoryview(edges)[:HEADER_BYTES]], offset, HEADER_BYTES)
        finally:
            self._edges.append(edges)

    def scan(self, verify_s: float) -> Iterator[FoundPage]:
        """Every page in the files as they were found: envelope and stamp are right, and for `verify_s` the checksum too.

        After that time it goes by the headers, which takes far less: pages are verified when they are read anyway.
        """
        until = time.monotonic() + verify_s
        self.unreadable = 0
        for number in sorted(self._names):
            segment = self._for_reading(number)
            size = segment.slot_bytes
            modified_s = os.fstat(segment.fd).st_mtime
            at_once = max(1, _SCAN_BYTES // size)
            num_slots = self._found_bytes[number] // size
            with mmap.mmap(-1, at_once * size) as buffer, memoryview(buffer) as out:
                for first in range(0, num_slots, at_once):
                    verify = time.monotonic() < until
                    last = min(first + at_once, num_slots)
                    for index, slot in self._slots(segment, first, last, out, verify):
                        with slot:
                            page = _page_in(slot, size, verify)
                        if page is not None:
                            yield FoundPage(page[0], Place(number, index), size, page[1], modified_s)

    def _slots(
        self, segment: _Segment, first: int, last: int, out: memoryview, whole: bool
    ) -> Iterator[tuple[int, memoryview]]:
        """These slots, or, where that is quicker, their headers. What can't be read is counted and left out."""
        size = segment.slot_bytes
        if whole or size < _HEADERS_ALONE_BYTES:
            got: int | None = None
            with suppress(OSError):  # then it is read in parts
                got = self._read(segment.fd, out[: (last - first) * size], first * size)
            if got is not None:
                for at in range(got // size):
                    yield first + at, out[at * size : (at + 1) * size]
                return
        wanted = size if whole else HEADER_BYTES
        for index in range(first, last):
            try:
                if self._read(segment.fd, out[:wanted], index * size) == wanted:
                    yield index, out[:wanted]
            except OSError:
                self.unreadable += 1

    def sync(self) -> None:
        """Have the disk's own cache written out."""
        with self._lock:
            fds = [segment.fd for segment in self._segments.values()]
        for fd in fds:
            os.fdatasync(fd)

    def close(self) -> None:
        """Close the files. Idempotent."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.fd)
            self._segments.clear()
            self._names.clear()

    def _offset(self, place: Place, size: int) -> int:
        if place.index < 0 or (place.index + 1) * size > self._segment_bytes:
            raise IndexError(f"{place} is past a segment of {self._segment_bytes} bytes in slots of {size}")
        return place.index * size

    def _take_edges(self) -> mmap.mmap:
        try:
            return self._edges.pop()
        except IndexError:
            return mmap.mmap(-1, HEADER_BYTES + ALIGN_BYTES)

    def _for_reading(self, number: int) -> _Segment:
        segment = self._segments.get(number)
        if segment is not None:
            return segment
        with self._lock:
            if number in self._segments:
                return self._segments[number]
            name = self._names.get(number)
            if name is None:
                raise PageMissing(f"slab file {number} isn't there")
            return self._open(number, name)

    def _for_writing(self, number: int, size: int) -> _Segment:
        """The segment, in slots of `size`: its owner gives a segment another size only when all its slots are free."""
        segment = self._segments.get(number)
        if segment is not None and segment.slot_bytes == size and segment.is_allocated:
            return segment
        if number not in self._usable:
            raise IndexError(f"segment {number} is none of the {len(self._usable)} there are")
        with self._lock:
            name = f"slab-{number:05d}.{size}"
            if (old := self._names.get(number)) not in (None, name):
                os.rename(self._folder / str(old), self._folder / name)
                self._names[number] = name
                sync_folder(self._folder)
            if (segment := self._segments.get(number)) is None:
                segment = self._open(number, name)
            segment.slot_bytes = size
            if not segment.is_allocated:
                self._allocate(number, segment)
            return segment

    def _allocate(self, number: int, segment: _Segment) -> None:
        """Have the disk set aside all of a segment. What a disk that is full gave of it is given back."""
        before = os.fstat(segment.fd).st_size
        try:
            os.posix_fallocate(segment.fd, 0, self._segment_bytes)
        except OSError:
            with suppress(OSError):
                os.ftruncate(segment.fd, before)
                if not before:
                    os.unlink(self._folder / self._names.pop(number))
                    os.close(self._segments.pop(number).fd)
            raise
        segment.is_allocated = True

    def _open(self, number: int, name: str) -> _Segment:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        fd = os.open(self._folder / name, flags, 0o600)
        self._names[number] = name
        self._segments[number] = segment = _Segment(fd, _slot_bytes_of(name))
        return segment

    def _write(self, fd: int, pieces: list[Buffer], offset: int, size: int) -> None:
        try:
            written = os.pwritev(fd, pieces, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            # The payload isn't aligned (it is no slot): through a buffer that is.
            with mmap.mmap(-1, size) as buffer:
                at = 0
                for piece in pieces:
                    buffer[at : at + len(piece)] = piece
                    at += len(piece)
                written = os.pwrite(fd, buffer, offset)
        if written != size:
            raise OSError(errno.EIO, f"wrote {written} bytes of {size}")
        if not self.direct:
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def _read(self, fd: int, out: memoryview, offset: int) -> int:
        try:
            got = os.preadv(fd, [out], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            with mmap.mmap(-1, len(out)) as buffer:
                got = os.preadv(fd, [buffer], offset)
                out[:got] = buffer[:got]
        if not self.direct:
            os.posix_fadvise(fd, offset, len(out), os.POSIX_FADV_DONTNEED)
        return got


def _number_of(name: str) -> int:
    return int(name[5:10])


def _slot_bytes_of(name: str) -> int:
    return int(name.rpartition(".")[2])


def _stamped(envelope: Envelope, era: int) -> bytes:
    head = envelope.pack() + _STAMP.pack(_STAMP_MAGIC, era)
    return head + xxhash.xxh3_64(head).digest()


def _unstamp(header: memoryview) -> tuple[Envelope, int]:
    head = bytes(header[: _STAMPED_BYTES - 8])
    magic, era = _STAMP.unpack_from(head, PACKED_ENVELOPE_BYTES)
    if magic != _STAMP_MAGIC or bytes(header[len(head) : _STAMPED_BYTES]) != xxhash.xxh3_64(head).digest():
        raise PageCorrupt("stamp differs")
    return Envelope.unpack(head), int(era)


def _page_in(slot: memoryview, size: int, verify: bool) -> tuple[Envelope, int] | None:
    """Envelope and era of the page in a slot of `size` bytes, of which the header is enough if it isn't verified."""
    try:
        envelope, era = _unstamp(slot)
        if slot_bytes(envelope.payload_bytes) != size:
            return None
        if verify:
            with slot[HEADER_BYTES : HEADER_BYTES + envelope.payload_bytes] as payload:
                envelope.verify(payload)
    except PageCorrupt:
        return None
    return envelope, era


def _takes_direct_io(folder: Path) -> bool:
    """Whether files here take O_DIRECT in 4 KiB units; file systems in memory and on networks may not.

    A disk without room for the probe takes it, as far as one can tell.
    """
    path = folder / PROBE_FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        with suppress(FileNotFoundError):
            os.unlink(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        with mmap.mmap(-1, ALIGN_BYTES) as buffer:
            return os.pwrite(fd, buffer, 0) == ALIGN_BYTES and os.preadv(fd, [buffer], 0) == ALIGN_BYTES
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)
        os.unlink(path)


def sync_folder(folder: Path) -> None:
    """Make names made, changed or deleted in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
