"""L4's files of LMDB: the catalogue, and with store "lmdb" the pages. Who opens them has checked them (tier/stores/ssd/healing.py)."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import lmdb

from kvtier.tier.pages.page import (
    HEADER_BYTES,
    PACKED_ENVELOPE_BYTES,
    Buffer,
    Envelope,
    PageCorrupt,
    PageMissing,
    slot_bytes,
)
from kvtier.tier.stores.base import CatalogueEntry, Place
from kvtier.tier.stores.ssd.lmdb_format import Damaged, check_database
from kvtier.tier.stores.ssd.records import BadRecord, PageId, key_of, pack_record, record_key, unpack_record
from kvtier.tier.stores.ssd.slab import FoundPage

CATALOGUE, PAGES = "catalogue.mdb", "pages.mdb"
BATCH = 4096  # records of one transaction while a catalogue is made


class Catalogue:
    """(key, variant) -> entry in one LMDB file; small values only, so that all of it stays in memory.

    One thread uses it, and the folder's lock keeps other processes away: so it needs no lock file of LMDB.
    """

    def __init__(self, path: Path, map_bytes: int, *, flush: bool) -> None:
        """Open the file, or make an empty one."""
        with as_os_errors(path):
            self._env = _open(path, map_bytes, readahead=False, flush=flush, lock=False)

    def commit(self, puts: Iterable[CatalogueEntry], drops: Iterable[PageId]) -> None:
        """Drops first; OSError, and nothing of it was done, where the disk or the budget refuses."""
        with as_os_errors(), self._env.begin(write=True) as txn:
            for key, variant in drops:
                txn.delete(record_key(key, variant))
            for entry in puts:
                name = key_of(entry)
                txn.put(name, pack_record(name, entry))

    def fill(self, entries: Iterable[CatalogueEntry]) -> None:
        """Put these into an empty catalogue and have them on the disk."""
        in_order = iter(sorted(entries, key=key_of))
        while batch := list(islice(in_order, BATCH)):
            with as_os_errors(), self._env.begin(write=True) as txn:
                for entry in batch:
                    name = key_of(entry)
                    txn.put(name, pack_record(name, entry), append=True)
        self.sync()

    def sync(self) -> None:
        """Have all commits survive a power cut."""
        with as_os_errors():
            self._env.sync(True)

    def close(self) -> None:
        """Idempotent."""
        self._env.close()


def read_catalogue(path: Path) -> tuple[list[CatalogueEntry], str | None]:
    """The records of a catalogue, read without LMDB; and what is wrong with it, None: LMDB may use it.

    Where only records are damaged the others are given; of a file whose structure is damaged none. OSError when
    it can't be read, but for a sector that is bad (EIO): that is damage.
    """
    entries: list[CatalogueEntry] = []
    bad: list[str] = []

    def visit(key: bytes, data: Callable[[], bytes]) -> None:
        try:
            entries.append(unpack_record(key, data()))
        except BadRecord as error:
            bad.append(str(error))

    try:
        check_database(path, visit)
    except Damaged as error:
        return [], str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return [], f"{path.name}: {error.strerror}"
    return entries, f"{bad[0]} ({len(bad)} such)" if bad else None


# ---- store "lmdb" ----------------------------------------------------------------------------------------------


class LmdbPages:
    """Page bytes as LMDB values in one file: per place one value for the envelope and its stamp, one for the payload.

    The stamp is the era in which the page was written, as in a slab's slot. `era` is raised by its owner.
    """

    direct = True  # nothing is to be said of how it does its I/O

    def __init__(self, folder: Path, map_bytes: int, slot_bytes: int, era: int) -> None:
        """Open the file, or make an empty one. `slot_bytes` is the size of the largest pages' slots."""
        self.era = era
        self._path = folder / PAGES
        self._sizes: dict[int, int] = {}  # segment -> the slot size that all its values have
        # Readahead: measured 74 MB/s without and 42 with for cold values of 256 KiB, 50 and 158 for 2 MiB.
        self._env = open_pages(self._path, map_bytes, readahead=slot_bytes >= 2**20)

    @property
    def present(self) -> Collection[int]:
        """Segments that have a file of their own."""
        return ()

    def use(self, segments: Collection[int]) -> None:
        """Any segment may be written."""

    def is_gone(self) -> bool:
        """Whether something deleted the file; what is written goes nowhere then."""
        return not os.path.exists(self._path)

    def holds(self, place: Place, size: int) -> bool:
        """Whether there is a page of this size."""
        with as_os_errors(self._path), self._env.begin(buffers=True) as txn:
            envelope = txn.get(_place_key(place, _ENVELOPE))
            return envelope is not None and _slot_bytes_of(envelope) == size

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        """In one transaction."""
        size = slot_bytes(envelope.payload_bytes)
        with as_os_errors(), self._env.begin(write=True) as txn:
            if self._sizes.get(place.segment) != size:
                self._drop_other_sizes(txn, place.segment, size)
            txn.put(_place_key(place, _ENVELOPE), envelope.pack() + _STAMP.pack(self.era))
            txn.put(_place_key(place, _PAYLOAD), payload)
        self._sizes[place.segment] = size

    def read(self, place: Place, out: memoryview) -> None:
        """Header and payload. PageMissing where there is none."""
        with as_os_errors(), self._env.begin(buffers=True) as txn:
            header = txn.get(_place_key(place, _ENVELOPE))
            payload = txn.get(_place_key(place, _PAYLOAD))
            if header is None or payload is None:
                raise PageMissing("the slot holds no page")
            if HEADER_BYTES + len(payload) > len(out):
                raise ValueError(f"out has {len(out)} bytes, the page needs {HEADER_BYTES + len(payload)}")
            out[: len(header)] = header
            _copy(out[HEADER_BYTES : HEADER_BYTES + len(payload)], payload)

    def wipe(self, place: Place) -> None:
        """Delete the page's values."""
        with as_os_errors(), self._env.begin(write=True) as txn:
            txn.delete(_place_key(place, _ENVELOPE))
            txn.delete(_place_key(place, _PAYLOAD))

    def scan(self, verify_s: float) -> Iterator[FoundPage]:
        """Every page there is, by its place; all are verified when they are read."""
        modified_s = os.stat(self._path).st_mtime
        with as_os_errors(self._path), self._env.begin(buffers=True) as txn, txn.cursor() as cursor:
            for name, value in cursor.iternext(keys=True, values=True):
                segment, index, part = _PLACE_KEY.unpack(name)
                size = _slot_bytes_of(value) if part == _ENVELOPE else None
                if size is not None:
                    era = _era_of(value)
                    yield FoundPage(Envelope.unpack(value), Place(segment, index), size, era, modified_s)

    @property
    def unreadable(self) -> int:
        """Slots that the latest scan could not read."""
        return 0

    def growth(self, place: Place, size: int) -> int:
        """Bytes by which the file may grow when this place is written."""
        return 2 * size

    def taken_bytes(self) -> int:
        """Bytes of the file, but for the two pages of one without values."""
        return max(0, os.stat(self._path).st_size - 2 * mmap.PAGESIZE)

    def delete_others(self) -> None:
        """There are no files of segments."""

    def _drop_other_sizes(self, txn: lmdb.Transaction, segment: int, size: int) -> None:
        """A segment whose slots were all given up now serves another size: what it held must make room."""
        stale: list[Buffer] = []
        with txn.cursor() as cursor:
            cursor.set_range(_place_key(Place(segment, 0), _ENVELOPE))
            for name, value in cursor:
                number, index, part = _PLACE_KEY.unpack(name)
                if number != segment:
                    break
                if part == _ENVELOPE and _slot_bytes_of(value) != size:
                    stale += (name, _place_key(Place(number, index), _PAYLOAD))
        for old in stale:
            txn.delete(old)

    def sync(self) -> None:
        """Have all that was written survive a power cut."""
        with as_os_errors():
            self._env.sync(True)

    def close(self) -> None:
        """Idempotent."""
        self._env.close()


def copy_pages(source: Path, target: Path, map_bytes: int, entries: Sequence[CatalogueEntry]) -> None:
    """Copy the values of these pages into a new file, in their order, until it is full."""
    with (
        as_os_errors(source),
        open_pages(source, 0) as old,
        open_pages(target, map_bytes, flush=False) as new,
    ):
        try:
            for entry in entries:
                with old.begin(buffers=True) as reader, new.begin(write=True) as writer:
                    for part in (_ENVELOPE, _PAYLOAD):
                        name = _place_key(entry.place, part)
                        if (value := reader.get(name)) is not None:
                            writer.put(name, value)
        except lmdb.MapFullError:
            pass
        new.sync(True)


def _slot_bytes_of(packed: Buffer) -> int | None:
    try:
        return slot_bytes(Envelope.unpack(packed).payload_bytes)
    except PageCorrupt:
        return None


def _era_of(packed: Buffer) -> int:
    """0 in values of a program that wrote no stamps: any clear since makes those dead."""
    stamp = bytes(packed[PACKED_ENVELOPE_BYTES:])
    return int(_STAMP.unpack(stamp)[0]) if len(stamp) == _STAMP.size else 0


_ENVELOPE, _PAYLOAD = 0, 1
_PLACE_KEY = struct.Struct(">IIB")
_STAMP = struct.Struct("<Q")


def _place_key(place: Place, part: int) -> bytes:
    return _PLACE_KEY.pack(place.segment, place.index, part)


def _copy(out: memoryview, source: memoryview) -> None:
    import numpy as np  # not at the top: only this store has a use for it

    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


# ---- LMDB, with care -------------------------------------------------------------------------------------------


def open_pages(
    path: Path, map_bytes: int, *, readahead: bool = False, flush: bool = True
) -> lmdb.Environment:
    """The file of pages, which is read by several threads; `map_bytes` 0: as large as it is."""
    with as_os_errors(path):
        return _open(path, map_bytes, readahead=readahead, flush=flush, lock=True)


def _open(path: Path, map_bytes: int, *, readahead: bool, flush: bool, lock: bool) -> lmdb.Environment:
    """A file to write. No writemap: with it a full disk kills the process, and a stray pointer is in the file."""
    lock_file = path.with_name(f"{path.name}-lock")
    if os.path.lexists(lock_file):  # a reader table of a killed process, or of a program that used one here
        os.unlink(lock_file)
    return lmdb.open(
        str(path),
        map_size=map_bytes,
        subdir=False,
        mode=0o600,
        metasync=False,
        sync=flush,
        writemap=False,
        readahead=readahead,
        max_dbs=0,
        lock=lock,
    )


class as_os_errors:
    """Turns LMDB's errors into the OSError that callers of a disk expect."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case lmdb.MapFullError():
                raise OSError(errno.ENOSPC, "the LMDB file has reached its share of the budget") from error
            case lmdb.Error():
                code = getattr(error, "code", 0)
                about = () if self._path is None else (str(self._path),)
                raise OSError(code if code > 0 else errno.EIO, f"LMDB: {error}", *about) from error
