"""L4: the pages on the node's SSD, and the LMDB catalogue that finds them again after a restart.

A folder holds: `lock`, `layout`, `catalogue.mdb`, and the page bytes in slab files (store "slab": O_DIRECT, fast) or
in `pages.mdb` (store "lmdb": one file of LMDB values, simple); and perhaps `aside`, pages of other sizes. All files together
stay within one byte budget. How it is opened and healed: tier/stores/ssd/opening.py decides, tier/stores/ssd/healing.py acts.

What survives what. A killed process loses nothing that was committed: LMDB writes to the page cache, never in place.
A power cut loses at most recent pages. With slabs, commits aren't flushed one by one (a flush takes as long as
writing ten pages), so it can also leave the catalogue half written; then it is rebuilt from the slots' headers. With
store "lmdb" each commit is flushed, except for LMDB's meta page: sound in any case. A record can point at a slot that holds
another page or half of one; the slot's envelope and checksum tell, so such a record is a miss. LMDB has no checksums of its
own, and a damaged file can kill the process that maps it: so its structure is checked by reading it before it is mapped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kvtier.tier.pages.page import (
    HEADER_BYTES,
    PACKED_ENVELOPE_BYTES,
    Buffer,
    Envelope,
    PageCorrupt,
    PageKey,
    TierName,
    expect_envelope,
    slot_bytes,
)
from kvtier.tier.stores.base import CatalogueEntry, Place
from kvtier.tier.stores.ssd.catalogue import CATALOGUE, PAGES
from kvtier.tier.stores.ssd.healing import Opened, open_files
from kvtier.tier.stores.ssd.layout import (
    CLEARS_FILE,
    LAYOUT_FILE,
    LOCK_FILE,
    ROOTS_FILE,
    STORED_FILE,
    Layout,
    Plan,
    Store,
    read_file,
)
from kvtier.tier.stores.ssd.moves import FOLDERS, OLD, delete_folder
from kvtier.tier.stores.ssd.records import PageId, page_id
from kvtier.tier.stores.ssd.slab import PROBE_FILE, SlabFiles

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def open_ssd(
    path: str | Path,
    capacity_bytes: int,
    store: Store,
    slot_bytes: int,
    *,
    min_slot_bytes: int | None = None,
    verify_s: float = 60.0,
) -> SsdTier:
    """Open the L4 folder `path`, or make it; pages of an earlier run are in `recovered`.

    `capacity_bytes` bounds all files of the folder together; `slot_bytes` is the size of the largest pages' slots, and
    `min_slot_bytes` of the smallest (None: all are alike; others may be allocated too). It takes as long as the catalogue
    has records, some microseconds each. A damaged one is rebuilt from the slots, whose pages are verified for `verify_s`,
    and after that when they are read.

    A folder made here is closed to other users; one that is there keeps its mode, and what isn't ours in it is left
    alone. Damage never raises: it is healed, and `notes` says what was lost in one line. Raises ValueError for a budget
    that holds no page and for a folder of other things, OSError(EBUSY) when another process has the folder open, and
    OSError for a disk that refuses; nothing is lost then.
    """
    plan = Plan(capacity_bytes, slot_bytes, slot_bytes if min_slot_bytes is None else min_slot_bytes)
    folder = Path(path)
    _make_folder(folder)
    if not _is_ours_or_empty(folder):
        raise ValueError(
            f"{folder} is not empty and holds no kvtier pages: name an empty folder or a new one"
        )
    lock = _lock(folder)
    try:
        return SsdTier(folder, open_files(folder, plan, store, verify_s), lock)
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

    def __init__(self, folder: Path, opened: Opened, lock: int) -> None:
        kept = opened.kept
        self.allocator = kept.allocator
        self.recovered = kept.found  # sorted by last use, the latest last
        self.lost = kept.lost  # were in the catalogue, but their place is gone, or there is no room for them
        self.notes = opened.notes  # one line for each thing the operator should know of how it came up
        self.page_capacity_bytes = kept.allocator.capacity_bytes
        self.segment_bytes = kept.allocator.segment_bytes
        self._pages = opened.pages
        self._catalogue = opened.catalogue
        self._owed: dict[PageId, None] = dict.fromkeys(map(page_id, kept.lost))  # drops to be committed
        self._layout = opened.layout
        self._folder = folder
        self._lock: int | None = lock
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="l4-writer-2")
        self._aside = opened.aside
        self._room_bytes = opened.plan.store_bytes
        self._making_room = threading.Lock()  # guards `_aside` between the threads that write
        self._is_settled = False
        self._is_gone = False
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._say: Callable[[str], None] = self.notes.append

    def watch(self, say: Callable[[str], None], every_s: float = 1.0) -> None:
        """Tell from now on, on any thread, what happens to the folder. Where it is deleted all fails from then on.

        `notes` have been told by now, so what they call deleted is deleted.
        """
        self._say = say
        self._settle()
        self._watcher = threading.Thread(
            target=self._watch_on, args=(every_s,), name="l4-watcher", daemon=True
        )
        self._watcher.start()

    def write(self, place: Place, envelope: Envelope, payload: Buffer) -> None:
        """Check the payload against its envelope and put both into the slot.

        PageCorrupt when they differ (nothing is written); OSError when the disk refuses, the slot's content is then
        undefined and its page absent. A payload that lies in an L3 slot is written from where it lies.
        """
        size = slot_bytes(envelope.payload_bytes)
        if (place.index + 1) * size > self.segment_bytes:
            raise IndexError(f"{place} is past a segment of {self.segment_bytes} bytes in slots of {size}")
        envelope.verify(payload)
        self._expect_folder()
        if not self._is_settled:
            self._settle()
        self._make_room(place, size)
        try:
            self._pages.write(place, envelope, payload)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._give_up_aside(
                max(size, self._pages.growth(place, size))
            ):
                raise
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
        self._expect_folder()
        self._pages.read(place, out)
        envelope = expect_envelope(out[:PACKED_ENVELOPE_BYTES], key, variant)
        if HEADER_BYTES + envelope.payload_bytes > len(out):
            raise PageCorrupt(f"envelope says {envelope.payload_bytes} bytes, the slot has {len(out)}")
        envelope.verify(out[HEADER_BYTES : HEADER_BYTES + envelope.payload_bytes])
        return envelope

    def wipe(self, place: Place) -> None:
        """Overwrite the slot's header. To forget a tenant for good, say `forget` too."""
        self._expect_folder()
        self._pages.wipe(place)

    def commit(self, puts: Iterable[CatalogueEntry], drops: Iterable[PageId] = ()) -> None:
        """Record pages and forget others in one transaction, drops first. Putting a page again updates its uses.

        Raises OSError, ENOSPC when the catalogue is full; then nothing of it was done, and the drops are owed: the next
        commit does them too. So no record is ever put while an older one of its place is there. One writer thread is
        the caller's duty.
        """
        self._owed.update(dict.fromkeys(drops))
        self._expect_folder()
        self._catalogue.commit(puts, self._owed)
        self._owed.clear()

    def forget(self, tenant: bytes | None) -> None:
        """No page that the tenant (16-byte digest; None: anyone) wrote before this comes back in a rebuild.

        Slots that were given up earlier without a wipe keep their old header until they are reused; this is what
        makes those dead as well. Durable when it returns. It touches neither slots nor records: drop and wipe those.
        """
        self._expect_folder()
        with self._making_room:
            if self._aside is not None and not self._aside.forget(tenant):
                self._give(self._aside.nbytes)
        self._layout.forget(tenant)
        self._layout.save(self._folder)
        self._pages.era = self._layout.era

    def sync(self) -> None:
        """Have everything written so far survive a power cut."""
        self._expect_folder()
        self._pages.sync()
        self._catalogue.sync()

    def close(self) -> None:
        """Close all files and let the folder go. Idempotent; no other call may be running."""
        if self._lock is None:
            return
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        self._helper.shutdown()
        if not self._is_gone:
            self._settle()
        if self._owed and not self._is_gone:
            with suppress(OSError):  # what is still owed the next start finds, and says
                self.commit(())
        self._pages.close()
        self._catalogue.close()
        os.close(self._lock)
        self._lock = None

    # ---- the folder ----------------------------------------------------------------------------------------------

    def _watch_on(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            if self._lacks_files():
                self._is_gone = True
                self._say(
                    f"L4 at {self._folder}: its files were deleted while the node runs; L4 is off, and its pages are"
                    " misses, until the node restarts"
                )
                return

    def _lacks_files(self) -> bool:
        """Whether a file that is in use has been deleted or moved. A disk that can't say isn't asked again at once."""
        assert self._lock is not None
        try:
            there, ours = os.stat(self._folder / LOCK_FILE), os.fstat(self._lock)
            os.stat(self._folder / CATALOGUE)
            os.stat(self._folder / LAYOUT_FILE)
            return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or self._pages.is_gone()
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _expect_folder(self) -> None:
        if self._is_gone:
            raise OSError(errno.ENOENT, "the files of L4 were deleted", str(self._folder))

    def _settle(self) -> None:
        """Delete what lay aside before, and of what lies aside what the budget has no room for."""
        with self._making_room:
            if self._is_settled:
                return
            self._is_settled = True
            try:
                delete_folder(self._folder / OLD)
                if self._aside is not None:
                    excess = self._pages.taken_bytes() + self._aside.nbytes - self._room_bytes
                    if excess > 0 or self._aside.is_empty:
                        self._give(excess)
            except OSError as error:
                self._say(f"L4 at {self._folder}: what lay aside can't be deleted: {error}")

    def _make_room(self, place: Place, size: int) -> None:
        """Within the budget, what lies aside gives way to a page that comes."""
        if self._aside is None:
            return
        with self._making_room:
            if self._aside is not None:
                wanted = self._pages.taken_bytes() + self._pages.growth(place, size)
                excess = wanted + self._aside.nbytes - self._room_bytes
                if excess > 0:
                    self._give(excess)

    def _give_up_aside(self, nbytes: int) -> bool:
        """The disk is full: so many bytes of what lies aside go. Whether there were any."""
        with self._making_room:
            if self._aside is None:
                return False
            self._give(nbytes)
            return True

    def _give(self, nbytes: int) -> None:
        assert self._aside is not None
        self._say(f"L4 at {self._folder}: {self._aside.give(nbytes)}")
        if self._aside.is_empty:
            self._aside = None


# ---- the folder before it is opened ------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    """And those above it."""
    if not os.path.isdir(folder):
        with suppress(FileExistsError):  # who lists it is told what that is
            os.makedirs(folder.parent, exist_ok=True)
            os.mkdir(folder, 0o700)


def _is_ours_or_empty(folder: Path) -> bool:
    """Whether files of ours may be made and deleted here. A damaged folder of ours is ours still."""
    names = set(os.listdir(folder)) - {"lost+found"}  # an empty file system has that
    with suppress(OSError, ValueError):
        Layout.load(folder)
        return True
    databases = {CATALOGUE, PAGES}
    if any(map(SlabFiles.is_slab, names)) or names >= {LOCK_FILE, LAYOUT_FILE, CATALOGUE}:
        return True
    files = {LAYOUT_FILE, ROOTS_FILE, STORED_FILE, CLEARS_FILE, *databases}
    ours = {LOCK_FILE, PROBE_FILE, *files, *FOLDERS}
    ours |= {f"{name}-lock" for name in databases} | {f"{name}.new" for name in files}
    if names <= ours and names & (databases | FOLDERS):
        return True
    # A first start cut short leaves its lock alone. Anybody could have chosen that name, but not for a process id.
    return not names or (names == {LOCK_FILE} and _is_pid(read_file(folder / LOCK_FILE)))


def _is_pid(content: bytes) -> bool:
    return content == b"" or content.strip().isdigit()


def _lock(folder: Path) -> int:
    """Take the folder for this process, until the descriptor closes or the process dies."""
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = f"{os.getpid()}\n".encode()
        os.pwrite(fd, ours, 0)  # before the file is cut: a disk that is full takes no new block
        os.ftruncate(fd, len(ours))
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise OSError(
            errno.EBUSY, f"another CacheNode (process {holder}) has this L4 folder open", str(folder)
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd
