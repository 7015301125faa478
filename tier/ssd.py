"""L4: the pages on the node's SSD, and the LMDB catalogue that finds them again after a restart.

A folder holds: `lock`, `layout`, `catalogue.mdb`, and the page bytes in slab files (store "slab": O_DIRECT, fast) or
in `pages.mdb` (store "lmdb": one file of LMDB values, simple). All files together stay within one byte budget.

What survives what. A killed process loses nothing that was committed: LMDB writes to the page cache, never in place.
A power cut loses at most recent pages. With slabs, commits aren't flushed one by one (a flush takes as long as
writing ten pages), so it can also leave the catalogue half written; then it is rebuilt from the slots' headers. With
store "lmdb", which has nothing to rebuild from, each commit is flushed, except for LMDB's meta page: sound in any case.
A record can point at a slot that holds another page or half of one; the slot's envelope and checksum tell, so such a
record is a miss. LMDB has no checksums of its own, and a damaged file can kill the process that maps it. So a child
process checks the old catalogue and copies its records into a new file; this process maps only that. When the child
fails, the catalogue is rebuilt from the slots' headers (slab), or the folder started fresh (lmdb), but not because
the disk has no room for the copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

import lmdb
import msgspec
import xxhash

from kvtier.tier.base import CatalogueEntry, Place, SegmentAllocator
from kvtier.tier.lmdb_format import Damaged, check_database
from kvtier.tier.page import (
    HEADER_BYTES,
    PACKED_ENVELOPE_BYTES,
    Buffer,
    Envelope,
    PageCorrupt,
    PageKey,
    PageMissing,
    TierName,
    expect_envelope,
    slot_bytes,
)
from kvtier.tier.slab import PROBE_FILE, SlabFiles, sync_folder
from kvtier.tier.ssd_layout import (
    CLEARS_FILE,
    LAYOUT_FILE,
    LOCK_FILE,
    MIN_SEGMENT_SLOTS,
    ROOTS_FILE,
    STORED_FILE,
    Layout,
    Plan,
    Store,
)

PageId = tuple[PageKey, str]  # key, variant

RECORD_VERSION = 1
CHECK_BATCH = 4096  # records of one transaction of the copy that the check makes
_NO_COPY = 3  # how the child exits that can't write it

_CATALOGUE, _PAGES, _LOCK, _COPY = "catalogue.mdb", "pages.mdb", LOCK_FILE, "catalogue.new"


def open_ssd(
    path: str | Path,
    capacity_bytes: int,
    store: Store,
    slot_bytes: int,
    *,
    min_slot_bytes: int | None = None,
    check_timeout_s: float = 30.0,
    rebuild_s: float = 60.0,
) -> SsdTier:
    """Open the L4 folder `path`, or make it; pages of an earlier run are in `recovered`.

    `capacity_bytes` bounds all files of the folder together; `slot_bytes` is the size of the largest pages' slots, and
    `min_slot_bytes` of the smallest (None: all are alike; others may be allocated too). `check_timeout_s` bounds the check of the old catalogue, `rebuild_s` the time after which
    a rebuild from slot headers makes do with what it has found.

    A folder made here is closed to other users; one that is there keeps its mode, and what isn't ours in it is left
    alone. Damage never raises: it is healed or the folder starts empty, and `notes` says so in one line. Raises
    ValueError for a budget that holds no page and for a folder of other things, OSError(EBUSY) when another process
    has the folder open, and OSError for a disk that refuses.
    """
    plan = Plan(capacity_bytes, slot_bytes, slot_bytes if min_slot_bytes is None else min_slot_bytes)
    folder = Path(path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours_or_empty(folder):
        raise ValueError(
            f"{folder} is not empty and holds no kvtier pages: name an empty folder or a new one"
        )
    lock = _lock(folder)
    try:
        return _open_locked(folder, plan, store, lock, check_timeout_s, rebuild_s)
    except BaseException:
        os.close(lock)
        raise


class SsdTier:
    """L4's I/O, and its catalogue.

    `write`, `read` and `wipe` may run on several threads at once, on different places. `commit` and `sync` are for
    one thread only, the owner's LMDB writer. The order that keeps every instant right: a page's slot, then its
    record; a drop's record, then its slot may be given to another page.

    `allocator` hands out places; it is the owner's from here on, with the recovered pages' places taken.
    """

    name = TierName.SSD

    def __init__(
        self,
        pages: _PageStore,
        catalogue: _Catalogue,
        layout: Layout,
        folder: Path,
        allocator: SegmentAllocator,
        recovered: list[CatalogueEntry],
        lost: list[CatalogueEntry],
        notes: list[str],
        lock: int,
    ) -> None:
        self.allocator = allocator
        self.recovered = recovered  # sorted by last use, the latest last
        self.lost = lost  # were in the catalogue, but their place in the files is gone
        self.notes = notes  # one line for each thing the operator should know of how it came up
        self.page_capacity_bytes = allocator.capacity_bytes
        self.segment_bytes = allocator.segment_bytes
        self._pages = pages
        self._catalogue = catalogue
        self._layout = layout
        self._folder = folder
        self._lock: int | None = lock
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="l4-writer-2")

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        """Check the payload against its envelope and put both into the slot.

        PageCorrupt when they differ (nothing is written); OSError when the disk refuses, the slot's content is then
        undefined and its page absent. A payload that lies in an L3 slot is written from where it lies.
        """
        size = slot_bytes(envelope.payload_bytes)
        if (place.index + 1) * size > self.segment_bytes:
            raise IndexError(f"{place} is past a segment of {self.segment_bytes} bytes in slots of {size}")
        envelope.verify(payload)
        self._pages.write(place, envelope, payload)

    def write_batch(
        self, pages: Sequence[tuple[Place, Envelope, Buffer]]
    ) -> list[OSError | PageCorrupt | None]:
        """`write` for each page, two at a time, so that one is checked while the disk takes another.

        What became of each, in their order. The places are all different; two batches don't overlap in time.
        """
        todo = deque(enumerate(pages))
        results: list[OSError | PageCorrupt | None] = [None] * len(pages)

        def work() -> None:
            while True:
                try:
                    index, (place, envelope, payload) = todo.popleft()
                except IndexError:
                    return  # this thread or the other one took the last page
                try:
                    self.write(place, envelope, payload)
                except (OSError, PageCorrupt) as error:
                    results[index] = error

        helper = self._helper.submit(work) if len(pages) > 1 else None
        work()
        if helper is not None and not helper.cancel():
            helper.result()
        return results

    def read(self, place: Place, key: PageKey, variant: str, out: memoryview) -> Envelope:
        """Fill `out`, an L3 slot, header first, and check what arrived. `out` is undefined after an exception.

        PageMissing: the slot holds no page or another one. PageCorrupt: what it holds isn't whole. OSError: the disk.
        """
        self._pages.read(place, out)
        envelope = expect_envelope(out[:PACKED_ENVELOPE_BYTES], key, variant)
        if HEADER_BYTES + envelope.payload_bytes > len(out):
            raise PageCorrupt(f"envelope says {envelope.payload_bytes} bytes, the slot has {len(out)}")
        envelope.verify(out[HEADER_BYTES : HEADER_BYTES + envelope.payload_bytes])
        return envelope

    def wipe(self, place: Place) -> None:
        """Overwrite the slot's header. To forget a tenant for good, say `forget` too."""
        self._pages.wipe(place)

    def commit(self, puts: Iterable[CatalogueEntry], drops: Iterable[PageId] = ()) -> None:
        """Record pages and forget others in one transaction, drops first. Putting a page again updates its uses.

        Raises OSError, ENOSPC when the catalogue is full; then nothing of it was done. One writer thread is the
        caller's duty.
        """
        self._catalogue.commit(puts, drops)

    def forget(self, tenant: bytes | None) -> None:
        """No page that the tenant (16-byte digest; None: anyone) wrote before this comes back in a rebuild.

        Slots that were given up earlier without a wipe keep their old header until they are reused; this is what
        makes those dead as well. Durable when it returns. It touches neither slots nor records: drop and wipe those.
        """
        self._layout.forget(tenant)
        self._layout.save(self._folder)
        self._pages.era = self._layout.era

    def sync(self) -> None:
        """Have everything written so far survive a power cut."""
        self._pages.sync()
        self._catalogue.sync()

    def close(self) -> None:
        """Close all files and let the folder go. Idempotent; no other call may be running."""
        if self._lock is None:
            return
        self._helper.shutdown()
        self._pages.close()
        self._catalogue.close()
        os.close(self._lock)
        self._lock = None


class _PageStore(Protocol):
    """Where page bytes lie: slab files, or LMDB values."""

    era: int

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None: ...

    def read(self, place: Place, out: memoryview) -> None: ...

    def wipe(self, place: Place) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


# ---- opening ---------------------------------------------------------------------------------------------------


def _open_locked(
    folder: Path, plan: Plan, store: Store, lock: int, check_timeout_s: float, rebuild_s: float
) -> SsdTier:
    notes: list[str] = []
    damage: str | None = None
    layout = _usable_layout(folder, plan, store, notes)
    if layout is None:
        layout = _start_fresh(folder, plan, store)
    else:
        damage = _check_in_child(folder, plan, store, check_timeout_s)
        if damage is not None and store == "lmdb":
            notes.append(f"L4 at {folder}: {damage}; started empty")
            layout = _start_fresh(folder, plan, store)
    num_segments = plan.page_bytes(store) // layout.segment_bytes
    pages = _open_pages(folder, plan, store, layout, num_segments)
    try:
        if isinstance(pages, SlabFiles) and not pages.direct:
            notes.append(
                f"L4 at {folder}: O_DIRECT is refused here, pages go through the page cache (slower)"
            )
        catalogue = _Catalogue.open(folder, plan, store)
        try:
            allocator = SegmentAllocator(num_segments * layout.segment_bytes, layout.segment_bytes)
            lost: list[CatalogueEntry] = []
            if damage is not None and isinstance(pages, SlabFiles):
                found, ended = _rebuild(pages, layout, allocator, rebuild_s)
                catalogue.commit(found, ())
                notes.append(
                    f"L4 at {folder}: {damage}; catalogue rebuilt from slot headers, {len(found)} pages found"
                    + ("" if ended else f" in the {rebuild_s:g} s it may take")
                )
            else:
                found, lost = _claim(catalogue, pages, allocator)
                catalogue.commit((), [(entry.envelope.key, entry.envelope.variant) for entry in lost])
                if lost:
                    notes.append(
                        f"L4 at {folder}: {len(lost)} pages dropped, their place in the files is gone"
                    )
            found.sort(key=lambda entry: entry.last_use_s)
            return SsdTier(pages, catalogue, layout, folder, allocator, found, lost, notes, lock)
        except BaseException:
            catalogue.close()
            raise
    except BaseException:
        pages.close()
        raise


def _is_ours_or_empty(folder: Path) -> bool:
    """Whether files of ours may be made and deleted here. A damaged folder of ours is ours still."""
    names = set(os.listdir(folder)) - {"lost+found"}  # an empty file system has that
    try:
        Layout.load(folder)
        return True
    except (OSError, ValueError, msgspec.DecodeError):
        pass
    databases = {_CATALOGUE, _PAGES}
    if any(map(SlabFiles.is_slab, names)) or names >= {_LOCK, LAYOUT_FILE, _CATALOGUE}:
        return True
    ours = {_LOCK, LAYOUT_FILE, *databases, *(f"{name}-lock" for name in databases), _COPY, PROBE_FILE}
    small = (LAYOUT_FILE, ROOTS_FILE, STORED_FILE, CLEARS_FILE)
    ours |= {*small, *(f"{name}.new" for name in small)}
    if names <= ours and names & databases:
        return True
    # A first start cut short leaves its lock alone. Anybody could have chosen that name, but not for a process id.
    return not names or (names == {_LOCK} and _is_pid((folder / _LOCK).read_bytes()))


def _is_pid(content: bytes) -> bool:
    return content == b"" or content.strip().isdigit()


def _usable_layout(folder: Path, plan: Plan, store: Store, notes: list[str]) -> Layout | None:
    """The folder's layout when its files can be taken over; None (and a note) when it must start fresh."""
    try:
        layout = Layout.load(folder)
    except FileNotFoundError:
        if any((folder / name).exists() for name in (_CATALOGUE, _PAGES)):
            notes.append(f"L4 at {folder}: its layout file is gone; started empty")
        return None
    except (ValueError, msgspec.DecodeError) as error:
        notes.append(f"L4 at {folder}: {error}; started empty")
        return None
    if layout.store != store:
        notes.append(f"L4 at {folder}: it was store {layout.store!r} and is {store!r} now; started empty")
        return None
    if store == "lmdb" and _size_of(folder / _PAGES) > plan.pages_map_bytes:
        notes.append(f"L4 at {folder}: it is larger than its new budget; started empty")
        return None
    suits = MIN_SEGMENT_SLOTS * plan.slot_bytes <= layout.segment_bytes <= plan.page_bytes(store)
    if not suits and layout.segment_bytes != plan.segment_bytes(store):
        notes.append(
            f"L4 at {folder}: segments of {layout.segment_bytes} bytes don't suit the new sizes; started empty"
        )
        return None
    return layout


def _start_fresh(folder: Path, plan: Plan, store: Store) -> Layout:
    """Delete our files, and only ours. The layout file comes last, so that a start cut short is seen as one."""
    for name in (LAYOUT_FILE, f"{LAYOUT_FILE}.new"):
        (folder / name).unlink(missing_ok=True)
    SlabFiles.delete_all(folder)
    _delete_database(folder, _PAGES)
    _delete_database(folder, _CATALOGUE)
    _Catalogue.open(folder, plan, store).close()
    if store == "lmdb":
        _LmdbPages(folder, plan).close()
    layout = Layout(store, plan.segment_bytes(store))
    layout.save(folder)
    return layout


def _open_pages(
    folder: Path, plan: Plan, store: Store, layout: Layout, num_segments: int
) -> SlabFiles | _LmdbPages:
    if store == "slab":
        return SlabFiles(folder, num_segments, layout.segment_bytes, layout.era)
    return _LmdbPages(folder, plan)


def _claim(
    catalogue: _Catalogue, pages: SlabFiles | _LmdbPages, allocator: SegmentAllocator
) -> tuple[list[CatalogueEntry], list[CatalogueEntry]]:
    """Entries whose place exists, the latest used first to choose; and the others."""
    found: list[CatalogueEntry] = []
    lost: list[CatalogueEntry] = []
    for entry in sorted(catalogue.entries(), key=lambda entry: -entry.last_use_s):
        if pages.holds(entry.place, entry.slot_bytes) and allocator.take(entry.place, entry.slot_bytes):
            found.append(entry)
        else:
            lost.append(entry)
    return found, lost


def _rebuild(
    pages: SlabFiles, layout: Layout, allocator: SegmentAllocator, rebuild_s: float
) -> tuple[list[CatalogueEntry], bool]:
    """Entries for the pages that lie whole in the slab files; whether the scan came to its end."""
    deadline = time.monotonic() + rebuild_s
    found: dict[PageId, CatalogueEntry] = {}
    for page in pages.scan():
        envelope = page.envelope
        page_id = (envelope.key, envelope.variant)
        wanted = page_id not in found and not layout.is_dead(envelope.tenant, page.era)
        if wanted and allocator.take(page.place, page.slot_bytes):
            found[page_id] = CatalogueEntry(
                envelope, page.place, page.slot_bytes, generation=0, last_use_s=page.modified_s
            )
        if time.monotonic() > deadline:
            return list(found.values()), False
    return list(found.values()), True


def _lock(folder: Path) -> int:
    """Take the folder for this process, until the descriptor closes or the process dies."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise OSError(
            errno.EBUSY, f"another CacheNode (process {holder}) has this L4 folder open", str(folder)
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


# ---- the catalogue ---------------------------------------------------------------------------------------------


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """A catalogue value's body; before it a version byte, behind it its checksum."""

    envelope: bytes
    segment: int
    index: int
    slot_bytes: int
    generation: int
    content: bytes
    uses: int
    last_use_s: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class _BadRecord(Exception):
    """A catalogue value isn't what was written."""


class _Catalogue:
    """(key, variant) -> entry in one LMDB file; small values only, so that all of it stays in memory."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env

    @classmethod
    def open(cls, folder: Path, plan: Plan, store: Store) -> _Catalogue:
        _delete_lock_file(folder, _CATALOGUE)
        return cls(_open_env(folder / _CATALOGUE, plan.map_bytes, readahead=False, flush=store == "lmdb"))

    def entries(self) -> Iterator[CatalogueEntry]:
        """All entries, in the order of their keys."""
        with self._env.begin() as txn, txn.cursor() as cursor:
            for key, value in cursor:
                yield _unpack_entry(key, value)

    def commit(self, puts: Iterable[CatalogueEntry], drops: Iterable[PageId]) -> None:
        with _as_os_errors(), self._env.begin(write=True) as txn:
            for key, variant in drops:
                txn.delete(_record_key(key, variant))
            for entry in puts:
                name = _record_key(entry.envelope.key, entry.envelope.variant)
                txn.put(name, _pack_entry(name, entry))

    def sync(self) -> None:
        with _as_os_errors():
            self._env.sync(True)

    def close(self) -> None:
        self._env.close()


def _record_key(key: PageKey, variant: str) -> bytes:
    return key + variant.encode().ljust(16, b"\0")


def _pack_entry(name: bytes, entry: CatalogueEntry) -> bytes:
    body = bytes((RECORD_VERSION,)) + _encode(
        _Record(
            entry.envelope.pack(),
            entry.place.segment,
            entry.place.index,
            entry.slot_bytes,
            entry.generation,
            entry.content,
            entry.uses,
            entry.last_use_s,
        )
    )
    return body + xxhash.xxh3_64(name + body).digest()


def _check_record(name: bytes, value: bytes) -> None:
    if len(value) < 10 or xxhash.xxh3_64(name + value[:-8]).digest() != value[-8:]:
        raise _BadRecord("a record's checksum differs")
    if value[0] != RECORD_VERSION:
        raise _BadRecord(f"a record has version {value[0]}, this program reads {RECORD_VERSION}")


def _unpack_entry(name: bytes, value: bytes) -> CatalogueEntry:
    _check_record(name, value)
    record = _decode(memoryview(value)[1:-8])
    return CatalogueEntry(
        Envelope.unpack(record.envelope),
        Place(record.segment, record.index),
        record.slot_bytes,
        record.generation,
        record.content,
        record.uses,
        record.last_use_s,
    )


# ---- store "lmdb" ----------------------------------------------------------------------------------------------


class _LmdbPages:
    """Page bytes as LMDB values in one file: per place one value for the envelope, one for the payload."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.era = 0  # nothing is ever rebuilt from this store, so no stamps
        self._sizes: dict[int, int] = {}  # segment -> the slot size that all its values have
        _delete_lock_file(folder, _PAGES)
        # Readahead: measured 74 MB/s without and 42 with for cold values of 256 KiB, 50 and 158 for 2 MiB.
        readahead = plan.slot_bytes >= 2**20
        self._env = _open_env(folder / _PAGES, plan.pages_map_bytes, readahead, flush=True)

    def holds(self, place: Place, size: int) -> bool:
        with self._env.begin(buffers=True) as txn:
            return txn.get(_place_key(place, _ENVELOPE)) is not None

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        size = slot_bytes(envelope.payload_bytes)
        with _as_os_errors(), self._env.begin(write=True) as txn:
            if self._sizes.get(place.segment) != size:
                self._drop_other_sizes(txn, place.segment, size)
            txn.put(_place_key(place, _ENVELOPE), envelope.pack())
            txn.put(_place_key(place, _PAYLOAD), payload)
        self._sizes[place.segment] = size

    def read(self, place: Place, out: memoryview) -> None:
        with _as_os_errors(), self._env.begin(buffers=True) as txn:
            header = txn.get(_place_key(place, _ENVELOPE))
            payload = txn.get(_place_key(place, _PAYLOAD))
            if header is None or payload is None:
                raise PageMissing("the slot holds no page")
            if HEADER_BYTES + len(payload) > len(out):
                raise ValueError(f"out has {len(out)} bytes, the page needs {HEADER_BYTES + len(payload)}")
            out[: len(header)] = header
            _copy(out[HEADER_BYTES : HEADER_BYTES + len(payload)], payload)

    def wipe(self, place: Place) -> None:
        with _as_os_errors(), self._env.begin(write=True) as txn:
            txn.delete(_place_key(place, _ENVELOPE))
            txn.delete(_place_key(place, _PAYLOAD))

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
        with _as_os_errors():
            self._env.sync(True)

    def close(self) -> None:
        self._env.close()


def _slot_bytes_of(packed: Buffer) -> int | None:
    try:
        return slot_bytes(Envelope.unpack(packed).payload_bytes)
    except PageCorrupt:
        return None


_ENVELOPE, _PAYLOAD = 0, 1
_PLACE_KEY = struct.Struct(">IIB")


def _place_key(place: Place, part: int) -> bytes:
    return _PLACE_KEY.pack(place.segment, place.index, part)


def _copy(out: memoryview, source: memoryview) -> None:
    import numpy as np  # not at the top: the checking child has no use for it, and it would be half its start

    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


# ---- LMDB, with care -------------------------------------------------------------------------------------------


def _open_env(path: Path, map_bytes: int, readahead: bool, flush: bool) -> lmdb.Environment:
    """A file to write. No writemap: with it a full disk kills the process, and a stray pointer is in the file."""
    with _as_os_errors():
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
        )


class _as_os_errors:
    """Turns LMDB's errors into the OSError that callers of a disk expect."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case lmdb.MapFullError():
                raise OSError(errno.ENOSPC, "the LMDB file has reached its share of the budget") from error
            case lmdb.Error():
                raise OSError(errno.EIO, f"LMDB: {error}") from error


def _delete_database(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    _delete_lock_file(folder, name)


def _delete_lock_file(folder: Path, name: str) -> None:
    """A reader table left by a killed process; the folder's lock says that no other process is there."""
    (folder / f"{name}-lock").unlink(missing_ok=True)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ---- the check, in a process of its own ------------------------------------------------------------------------


def _check_in_child(folder: Path, plan: Plan, store: Store, timeout_s: float) -> str | None:
    """Have a child read the catalogue and write a sound copy of it, and put the copy in its place.

    None, or what is wrong with the files; then neither they nor anything of them is in use, and the catalogue is
    gone. Store "lmdb" has nothing to rebuild it from: OSError, and all is as it was, where only the copy can't be written.
    """
    copy = folder / _COPY
    copy.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvtier.tier.ssd",
        "--check",
        str(folder),
        store,
        str(plan.copy_bytes),
    ]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        damage = f"checking the catalogue took more than {timeout_s:g} s"
    else:
        if child.returncode == 0:
            os.replace(copy, folder / _CATALOGUE)
            sync_folder(folder)
            return None
        if child.returncode < 0:
            damage = f"the catalogue can't be used (signal {-child.returncode} while reading it)"
        else:
            reason = (child.stderr.strip().splitlines() or [f"exit {child.returncode}"])[-1]
            if child.returncode == _NO_COPY and store == "lmdb":
                copy.unlink(missing_ok=True)
                raise OSError(errno.EIO, f"its catalogue can't be copied ({reason})")
            damage = f"the catalogue can't be used ({reason})"
    copy.unlink(missing_ok=True)
    _delete_database(folder, _CATALOGUE)
    return damage


class _CopyRefused(Exception):
    """The disk takes no copy, which says nothing of the catalogue."""


def _check_main(folder: Path, store: str, copy_bytes: int) -> None:
    """The child: exits 0 when every record was right and is in the copy; dies, or exits with a reason else: _NO_COPY where
    no record was found wrong."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        check_database(folder / _CATALOGUE)
        if store == "lmdb":
            check_database(folder / _PAGES)
        _copy_catalogue(folder / _CATALOGUE, folder / _COPY, copy_bytes)
    except (Damaged, _BadRecord, PageCorrupt, lmdb.Error, msgspec.DecodeError, OSError) as error:
        _exit(error, 1)
    except _CopyRefused as error:
        _exit(error, _NO_COPY)


def _exit(reason: Exception, code: int) -> None:
    print(f"{reason}".replace("\n", " "), file=sys.stderr)
    sys.exit(code)


@contextmanager
def _copying() -> Iterator[None]:
    """Tells LMDB's errors of the copy from those of what is copied. A catalogue past its budget is of no use either way."""
    try:
        yield
    except lmdb.MapFullError:
        raise
    except lmdb.Error as error:
        raise _CopyRefused(error) from error


def _copy_catalogue(path: Path, copy: Path, copy_bytes: int) -> None:
    source = lmdb.open(str(path), subdir=False, readonly=True, lock=False, create=False, max_dbs=0)
    with _copying():
        target = lmdb.open(
            str(copy), map_size=copy_bytes, subdir=False, mode=0o600, lock=False, sync=False, max_dbs=0
        )
    with source, target, source.begin() as txn, txn.cursor() as cursor:
        records = iter(cursor)
        while batch := list(islice(records, CHECK_BATCH)):
            for name, value in batch:
                _unpack_entry(name, value)
            with _copying(), target.begin(write=True) as writer:
                for name, value in batch:
                    writer.put(name, value, append=True)
        with _copying():
            target.sync(True)


if __name__ == "__main__":
    _check_main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
