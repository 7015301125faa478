"""Moves pages between L3 and L4 as the coordinator orders, on a few threads, and answers with events. Decides nothing.

Two threads read; one writes, and is the only one that touches LMDB's write side. A failed piece of I/O becomes an
event, whatever the disk or the page's bytes did.
"""

# mypy: enable-error-code="exhaustive-match"

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from kvtier.tier.node.executor.clearing import Clearing
from kvtier.tier.pages.clear_epochs import Tenant
from kvtier.tier.pages.page import (
    HEADER_BYTES,
    Envelope,
    PageCorrupt,
    PageKey,
    PageMissing,
    TierName,
    slot_bytes,
)
from kvtier.tier.protocol.events import (
    CommitCatalogue,
    Event,
    Failure,
    ForgetTenant,
    MarkClear,
    Note,
    PageId,
    ReadDone,
    ReadFailed,
    ReadPage,
    SaveRoots,
    SaveStored,
    StoredBefore,
    Verified,
    VerifyPage,
    WipeSlots,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.stores.base import CatalogueEntry, Place, Uncleared
from kvtier.tier.stores.host import HostTier
from kvtier.tier.stores.ssd.clear_file import ClearFile
from kvtier.tier.stores.ssd.layout import ROOTS_FILE, STORED_FILE, replace_file
from kvtier.tier.stores.ssd.store import SsdTier

MAX_WRITES_PER_COMMIT = 16  # pages; a commit waits for the disk, so it is shared


@dataclass(frozen=True, slots=True)
class _Barrier:
    done: Callable[[tuple[Uncleared, ...]], None]


Read = ReadPage | VerifyPage
Write = WritePage | CommitCatalogue | WipeSlots | MarkClear | ForgetTenant | SaveRoots | SaveStored
_Order = CommitCatalogue | WipeSlots | MarkClear | ForgetTenant | SaveRoots | SaveStored | _Barrier


class Mover:
    """The threads that do a node's page I/O. `post` takes events from any of them; it must not block.

    A refusal of the disk or a damaged page is an event. Whatever else a thread raises ends it, and `died` is told which one
    and why, on that thread: what is queued for it is never done.

    The owner keeps the tiers and closes them after `close`. What only explains misses is kept in `folder`, beside L4.
    """

    def __init__(
        self,
        host: HostTier,
        ssd: SsdTier,
        folder: Path,
        post: Callable[[Sequence[Event | Note]], None],
        died: Callable[[str, BaseException], None],
        clears: ClearFile,
        num_readers: int = 2,
    ) -> None:
        self._host, self._ssd, self._folder = host, ssd, folder
        self._post, self._died = post, died
        self._clearing = Clearing(ssd, clears, lambda text: post([Note(text)]))  # the writer's
        self._to_read: SimpleQueue[Read | None] = SimpleQueue()
        self._to_write: SimpleQueue[Write | _Barrier | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(self._read_on,), name=f"l4-reader-{i}", daemon=True)
            for i in range(num_readers)
        ]
        self._threads.append(
            threading.Thread(target=self._run, args=(self._write_on,), name="l4-writer", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def submit(self, command: Read | Write) -> None:
        """Carry out a command; writes in the order of their submission."""
        match command:
            case ReadPage() | VerifyPage():
                self._to_read.put(command)
            case WritePage() | CommitCatalogue() | WipeSlots() | MarkClear() | ForgetTenant():
                self._to_write.put(command)
            case SaveRoots() | SaveStored():
                self._to_write.put(command)

    def barrier(self, done: Callable[[tuple[Uncleared, ...]], None]) -> None:
        """Call `done`, on the writer's thread, when all that was submitted before is on the disk, with what isn't: what has
        failed since the start, and failed again just now."""
        self._to_write.put(_Barrier(done))

    def close(self) -> None:
        """Do what is queued, sync, and end the threads."""
        for _ in self._threads[:-1]:
            self._to_read.put(None)
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  told to the owner, whose end it is
            self._died(f"thread {threading.current_thread().name}", error)

    # ---- readers -----------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        spare = mmap.mmap(-1, HEADER_BYTES)
        while (command := self._to_read.get()) is not None:
            match command:
                case ReadPage():
                    self._post([self._read(command)])
                case VerifyPage():
                    if len(spare) < slot_bytes(command.envelope.payload_bytes):
                        spare = mmap.mmap(-1, slot_bytes(command.envelope.payload_bytes))
                    self._post([self._verify(command, spare)])

    def _read(self, command: ReadPage) -> ReadDone | ReadFailed:
        slot = self._host.slot(Place(0, command.slot), command.payload_bytes)
        try:
            envelope = self._ssd.read(command.place, command.key, command.variant, slot)
        except (OSError, PageCorrupt, PageMissing) as error:
            return ReadFailed(command.transfer, _failure(error), str(error))
        return ReadDone(command.transfer, envelope)

    def _verify(self, command: VerifyPage, spare: mmap.mmap) -> Verified:
        wanted = command.envelope
        try:
            if command.tier is TierName.HOST:
                wanted.verify(self._payload(command.place.index, wanted))
            else:
                with memoryview(spare) as out:
                    found = self._ssd.read(command.place, wanted.key, wanted.variant, out)
                if found.checksum != wanted.checksum:
                    raise PageCorrupt("the slot holds other bytes than the catalogue says")
        except (OSError, PageCorrupt, PageMissing) as error:
            return Verified(command.transfer, _failure(error), str(error))
        return Verified(command.transfer, None)

    def _payload(self, slot: int, envelope: Envelope) -> memoryview:
        payload_bytes = envelope.payload_bytes
        return self._host.slot(Place(0, slot), payload_bytes)[HEADER_BYTES : HEADER_BYTES + payload_bytes]

    # ---- the writer --------------------------------------------------------------------------------------------

    def _write_on(self) -> None:
        """One commit per round: the records of the pages written in the round before, and what is dropped now.

        So a page's bytes are in its slot before its record is, and a dropped page's record is gone before its slot
        is written again: a coordinator reuses the slot of a drop only in a write that it orders later.
        """
        written: list[WritePage] = []
        while True:
            batch, is_last = self._next_batch(wait=not written)
            self._commit(written, [c for c in batch if isinstance(c, CommitCatalogue)])
            written = []
            for command in _runs(batch):
                match command:
                    case list():
                        written += self._write(command)
                    case WipeSlots():
                        self._clearing.wipe(command.places)
                    case MarkClear():
                        self._clearing.begin(command.clears)
                    case ForgetTenant():
                        written = self._forget(written, command.tenant)
                    case SaveRoots():
                        self._attempt("saving identities", partial(save_roots, self._folder, command.roots))
                    case SaveStored():
                        self._attempt(
                            "saving which prompts were stored",
                            partial(save_stored_before, self._folder, command.before),
                        )
                    case _Barrier():
                        self._commit(written, ())
                        written = []
                        command.done(self._clearing.settle())
                    case CommitCatalogue():
                        pass  # committed above
            if is_last:
                self._commit(written, ())
                self._clearing.settle()
                return

    def _next_batch(self, *, wait: bool) -> tuple[list[Write | _Barrier], bool]:
        """What is queued, up to MAX_WRITES_PER_COMMIT pages; and whether the end was among it."""
        batch: list[Write | _Barrier] = []
        num_pages = 0
        while num_pages < MAX_WRITES_PER_COMMIT:
            try:
                command = self._to_write.get(block=wait and not batch)
            except Empty:
                break
            if command is None:
                return batch, True
            batch.append(command)
            num_pages += isinstance(command, WritePage)
        return batch, False

    def _commit(self, written: Sequence[WritePage], commits: Iterable[CommitCatalogue]) -> None:
        # Of one page the later order counts: a put of its uses, then its drop.
        puts: dict[PageId, CatalogueEntry] = {
            (c.entry.envelope.key, c.entry.envelope.variant): c.entry for c in written
        }
        drops: dict[PageId, None] = {}
        for commit in commits:
            for entry in commit.puts:
                puts[entry.envelope.key, entry.envelope.variant] = entry
            for page in commit.drops:
                puts.pop(page, None)
                drops[page] = None
        if not puts and not drops:
            return
        drops = self._clearing.with_undropped(drops)
        dropped = [(PageKey(key), variant) for key, variant in drops]
        events: list[Event | Note]
        try:
            self._ssd.commit(puts.values(), dropped)
            self._clearing.dropped()
            events = [WriteDone(c.transfer) for c in written]
        except OSError as error:
            events = [WriteFailed(c.transfer, "io", str(error)) for c in written]
            events.append(Note(f"L4's catalogue takes no records: {error}"))
            self._clearing.not_dropped(drops)
            if puts and dropped:  # a full catalogue takes drops still
                self._attempt("dropping L4 records", partial(self._drop, dropped))
        self._post(events)

    def _drop(self, pages: Iterable[tuple[PageKey, str]]) -> None:
        self._ssd.commit((), pages)
        self._clearing.dropped()

    def _forget(self, written: list[WritePage], tenant: Tenant) -> list[WritePage]:
        """A tenant's clear ends. Its pages that were written and have no record yet get none; the others."""
        cleared = [c for c in written if tenant in (None, c.entry.envelope.tenant)]
        if cleared:
            self._post([WriteDone(c.transfer) for c in cleared])
        self._clearing.forget(tenant)
        return [c for c in written if c not in cleared]

    def _write(self, commands: Sequence[WritePage]) -> list[WritePage]:
        """Write these pages' bytes; those that are in their slots now."""
        errors = self._ssd.write_batch(
            [(c.entry.place, c.entry.envelope, self._payload(c.slot, c.entry.envelope)) for c in commands]
        )
        failed = [
            WriteFailed(command.transfer, _failure(error), str(error))
            for command, error in zip(commands, errors, strict=True)
            if error is not None
        ]
        if failed:
            self._post(failed)
        for command, error in zip(commands, errors, strict=True):
            if error is None:
                self._clearing.written(command.entry.place)
        return [command for command, error in zip(commands, errors, strict=True) if error is None]

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Do what nothing waits for; a disk that refuses leaves a note."""
        try:
            action()
        except OSError as error:
            self._post([Note(f"{what} failed: {error}")])


def _runs(batch: Iterable[Write | _Barrier]) -> Iterator[list[WritePage] | _Order]:
    """The batch in its order, writes that follow each other taken together: the disk takes two at once."""
    writes: list[WritePage] = []
    for command in batch:
        if isinstance(command, WritePage):
            writes.append(command)
            continue
        if writes:
            yield writes
            writes = []
        yield command
    if writes:
        yield writes


def save_roots(folder: Path, roots: Sequence[tuple[bytes, dict[str, str]]]) -> None:
    """Replace the table of identities."""
    table = {root.hex(): fields for root, fields in roots}
    replace_file(folder / ROOTS_FILE, msgspec.json.encode(table), durable=False)


def load_roots(folder: Path) -> list[tuple[bytes, dict[str, str]]]:
    """The table that SaveRoots wrote; empty when there is none or it can't be read: it only explains misses."""
    try:
        table = msgspec.json.decode((folder / ROOTS_FILE).read_bytes(), type=dict[str, dict[str, str]])
        return [(bytes.fromhex(root), fields) for root, fields in table.items()]
    except (OSError, ValueError):
        return []


def save_stored_before(folder: Path, before: StoredBefore) -> None:
    """Replace the table of prompts."""
    replace_file(folder / STORED_FILE, msgspec.msgpack.encode(before), durable=False)


def load_stored_before(folder: Path) -> StoredBefore:
    """The table that SaveStored wrote; empty when there is none or it can't be read: it only explains misses."""
    try:
        return msgspec.msgpack.decode((folder / STORED_FILE).read_bytes(), type=StoredBefore)
    except (OSError, ValueError):
        return StoredBefore()


def _failure(error: OSError | PageCorrupt | PageMissing) -> Failure:
    match error:
        case PageCorrupt():
            return "corrupt"
        case PageMissing():
            return "missing"
        case OSError():
            return "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io"
