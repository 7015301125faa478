"""How an L4 folder is laid out: what its byte budget is spent on, and the file that says what the folder is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from kvtier.tier.pages.page import ALIGN_BYTES, HEADER_BYTES
from kvtier.tier.stores.ssd.slab import sync_folder

Store = Literal["slab", "lmdb"]

LAYOUT_FILE = "layout"
LOCK_FILE = "lock"
CLEARS_FILE = "clears"  # tier/stores/ssd/clear_file.py
ROOTS_FILE, STORED_FILE = "roots.json", "stored.msgpack"  # what explains misses; of no use to anything else
FORMAT_VERSION = 1  # of the folder: raise it when files of an older program can't be read
MIN_SEGMENT_BYTES = 8 * 2**20
MIN_MIXED_SEGMENT_BYTES = 2**20  # where pages are of several sizes: each needs segments of its own
SEGMENTS = 64  # a segment is about 1/64 of the tier
MIN_SEGMENT_SLOTS = 8
MAX_CLEARED_TENANTS = 1024

# Catalogue bytes per page: a record takes about 310, a B-tree in random order is two thirds full, and a commit that
# touches every leaf needs each of them twice. The copy at open is dense.
_MAP_BYTES_PER_PAGE = 1024
_COPY_BYTES_PER_PAGE = 512
_MAP_SPARE_BYTES = 512 * 1024
_SMALL_FILES_BYTES = 256 * 1024  # layout, locks, folders


@dataclass(frozen=True, slots=True)
class Plan:
    """How a byte budget is cut up. ValueError when it holds no page."""

    capacity_bytes: int
    slot_bytes: int  # of the largest pages: segments are made for these
    min_slot_bytes: int  # of the smallest pages: the catalogue has room for as many as there can be
    num_records: int = 0  # that a catalogue has already: of smaller pages there can be more

    def __post_init__(self) -> None:
        if not HEADER_BYTES < self.min_slot_bytes <= self.slot_bytes:
            raise ValueError(
                f"min_slot_bytes must be above {HEADER_BYTES} and at most {self.slot_bytes}, got {self.min_slot_bytes}"
            )
        if self.slot_bytes <= HEADER_BYTES or self.slot_bytes % ALIGN_BYTES:
            raise ValueError(f"slot_bytes must be a multiple of {ALIGN_BYTES}, got {self.slot_bytes}")
        if self.store_bytes < self.slot_bytes:
            raise ValueError(
                f"L4 of {self.capacity_bytes} bytes has no room for a page of {self.slot_bytes} and its catalogue"
            )

    @property
    def num_pages(self) -> int:
        """The catalogue is sized for so many: pages of the smallest size that the whole budget would hold, or more."""
        return max(self.num_records, max(0, self.capacity_bytes) // self.min_slot_bytes)

    @property
    def map_bytes(self) -> int:
        """The catalogue's most."""
        return _round_up(_MAP_SPARE_BYTES + _MAP_BYTES_PER_PAGE * self.num_pages)

    @property
    def max_records(self) -> int:
        """Records that a catalogue made in the order of its keys has room for."""
        return (self.map_bytes - _MAP_SPARE_BYTES // 2) // _COPY_BYTES_PER_PAGE

    @property
    def copy_bytes(self) -> int:
        """The most of the catalogue that is made beside a damaged one."""
        return _round_up(_MAP_SPARE_BYTES // 2 + _COPY_BYTES_PER_PAGE * self.num_pages)

    @property
    def store_bytes(self) -> int:
        """What is left for page bytes and, in LMDB, their overhead."""
        return self.capacity_bytes - self.map_bytes - self.copy_bytes - _SMALL_FILES_BYTES

    def for_records(self, num_records: int, store: Store, segment_bytes: int) -> Plan:
        """The plan for a folder whose catalogue has so many records, as far as they leave room for a segment."""
        try:
            plan = replace(self, num_records=num_records)
        except ValueError:
            return self
        return plan if plan.page_bytes(store) >= segment_bytes else self

    @property
    def pages_map_bytes(self) -> int:
        """The most of the file of LMDB values."""
        return self.store_bytes // ALIGN_BYTES * ALIGN_BYTES

    def page_bytes(self, store: Store) -> int:
        """What is left for pages."""
        if store == "slab":
            return self.store_bytes
        return max(0, self.store_bytes - self._lmdb_overhead_bytes())

    def _lmdb_overhead_bytes(self) -> int:
        """What LMDB needs beside the pages: B-tree and free list, and runs that wait for old readers to end.

        A payload and LMDB's own 16-byte head take at most a slot's bytes, so a page never takes more than its slot.
        """
        per_page = 1024 * (self.store_bytes // self.min_slot_bytes)
        return _MAP_SPARE_BYTES + 12 * self.slot_bytes + per_page + self.store_bytes // 64

    def segment_bytes(self, store: Store) -> int:
        """The segment size for a new folder: whole slots, and all of the budget used."""
        pages = self.page_bytes(store)
        if pages < self.slot_bytes:
            raise ValueError(
                f"L4 of {self.capacity_bytes} bytes has no room for a page of {self.slot_bytes} in store {store!r}"
            )
        is_mixed = self.min_slot_bytes < self.slot_bytes
        least = MIN_MIXED_SEGMENT_BYTES if is_mixed else MIN_SEGMENT_BYTES
        wanted = max(pages // SEGMENTS, least, MIN_SEGMENT_SLOTS * self.slot_bytes)
        count = max(1, pages // wanted)
        return pages // count // self.slot_bytes * self.slot_bytes


@dataclass(slots=True)
class Layout:
    """The file `layout`: what the folder is, and which tenants were cleared when.

    `era` goes up with each clear. A slot whose stamp is of an era before its tenant's in `cleared`, or before
    `floor`, is dead: a rebuild passes it over. With more than MAX_CLEARED_TENANTS the oldest clear becomes the floor,
    for all tenants: a rebuild then finds less, never more.
    """

    store: str
    segment_bytes: int
    era: int = 0
    floor: int = 0
    cleared: dict[str, int] = field(default_factory=dict)  # tenant digest in hex -> era of its last clear
    aside_era: int | None = None  # of a folder that is set aside: its era before the first clear since
    version: int = FORMAT_VERSION

    def forget(self, tenant: bytes | None) -> None:
        """The tenant (None: everyone) is cleared now."""
        self.era += 1
        if tenant is None:
            self.cleared.clear()
            self.floor = self.era
            return
        self.cleared.pop(tenant.hex(), None)
        self.cleared[tenant.hex()] = self.era
        while len(self.cleared) > MAX_CLEARED_TENANTS:
            self.floor = self.cleared.pop(next(iter(self.cleared)))

    def is_dead(self, tenant: bytes, era: int) -> bool:
        """Whether a slot of this tenant, stamped in this era, was cleared since."""
        return era < max(self.floor, self.cleared.get(tenant.hex(), 0))

    def forget_aside(self, tenant: bytes | None) -> None:
        """As `forget`, while the folder is set aside: all that the tenant has there is older than this."""
        if self.aside_era is None:
            self.aside_era = self.era
        self.forget(tenant)

    def was_cleared_aside(self, tenant: bytes) -> bool:
        """Whether the tenant was cleared while the folder was set aside."""
        return self.aside_era is not None and self.is_dead(tenant, self.aside_era)

    def save(self, folder: Path) -> None:
        """Replace the file in one step that a power cut can't split."""
        body = msgspec.json.encode(self)
        checked = body + b"\n" + xxhash.xxh3_64(body).hexdigest().encode() + b"\n"
        replace_file(folder / LAYOUT_FILE, checked, durable=True)

    @classmethod
    def load(cls, folder: Path) -> Layout:
        """Raises OSError, OtherFormat, or another ValueError saying what is wrong with it."""
        body, _, digest = read_file(folder / LAYOUT_FILE).partition(b"\n")
        if xxhash.xxh3_64(body).hexdigest().encode() != digest.strip():
            raise ValueError("its layout file is damaged")
        try:
            version = msgspec.json.decode(body).get("version")
            if version != FORMAT_VERSION:
                raise OtherFormat(f"it has format {version}, this program reads {FORMAT_VERSION}")
            return msgspec.json.decode(body, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"its layout file can't be read: {error}") from error


class OtherFormat(ValueError):
    """A folder of another version of this program."""


def read_file(path: Path) -> bytes:
    """All of a small file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes, *, durable: bool) -> None:
    """Put a small file in the place of another in one step; `durable`: on the disk when this returns."""
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, path)
    if durable:
        sync_folder(path.parent)


def _round_up(n: int) -> int:
    return -(-n // ALIGN_BYTES) * ALIGN_BYTES
