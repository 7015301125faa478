"""Pages for the tests of the tiers: a page's bytes follow from its number, so any reader can tell a wrong one."""

from __future__ import annotations

import mmap
import os
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvtier.tier.pages.page import Envelope, PageKey, RootKey, page_checksum, slot_bytes
from kvtier.tier.stores.base import CatalogueEntry, Place, Tier

SPEC = b"spec of tests..."
TENANT = b"tenant of tests."
VARIANT = "bf16"


def page_key(number: int) -> PageKey:
    return PageKey(blake2b(b"page %d" % number, digest_size=32).digest())


def payload_of(number: int, nbytes: int) -> memoryview:
    """The one right payload of page `number`."""
    return memoryview(np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)).cast("B")


def envelope_of(number: int, payload: memoryview, tenant: bytes = TENANT, variant: str = VARIANT) -> Envelope:
    key = page_key(number)
    checksum = page_checksum(key, variant, SPEC, payload)
    root = RootKey(b"r" * 32)
    return Envelope(
        key, variant, SPEC, len(payload), checksum, root, page_key(number - 1), tenant, number % 100, 16
    )


def entry_of(number: int, place: Place, nbytes: int, tenant: bytes = TENANT) -> CatalogueEntry:
    envelope = envelope_of(number, payload_of(number, nbytes), tenant)
    return CatalogueEntry(
        envelope, place, slot_bytes(nbytes), number, b"c" * 16, uses=number % 7, last_use_s=1e9 + number
    )


def write_page(tier: Tier, place: Place, number: int, nbytes: int, tenant: bytes = TENANT) -> Envelope:
    payload = payload_of(number, nbytes)
    envelope = envelope_of(number, payload, tenant)
    tier.write(place, envelope, payload)
    return envelope


def read_page(tier: Tier, place: Place, number: int, nbytes: int) -> Envelope:
    """Read page `number` and hold it against the right bytes; the tier's own exceptions pass through."""
    out = new_slot(slot_bytes(nbytes))
    envelope = tier.read(place, page_key(number), VARIANT, out)
    assert out[4096 : 4096 + nbytes] == payload_of(number, nbytes), f"page {number} has wrong bytes"
    assert Envelope.unpack(out) == envelope
    return envelope


def new_slot(nbytes: int) -> memoryview:
    """A slot's memory, 4 KiB aligned."""
    return memoryview(mmap.mmap(-1, nbytes))


def flip_on_disk(folder: Path, needle: bytes) -> int:
    """Flip one bit in the middle of every occurrence of `needle` in the files of a folder; how many there were."""
    flipped = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        at = content.find(needle)
        while at >= 0:
            flip_bit(path, at + len(needle) // 2, 3)
            flipped += 1
            at = content.find(needle, at + 1)
    return flipped


def flip_bit(path: Path, offset: int, bit: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes((byte ^ 1 << bit,)), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def used_on_disk(folder: Path) -> int:
    """Bytes that a folder's files take, by their length or their blocks, whichever is more."""
    stats = [path.stat() for path in folder.rglob("*")]
    return sum(max(stat.st_size, stat.st_blocks * 512) for stat in stats)
