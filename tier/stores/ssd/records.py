"""The catalogue's records as bytes: what lies behind the key of a page. Pure."""

from __future__ import annotations

import msgspec
import xxhash

from kvtier.tier.pages.page import Envelope, PageCorrupt, PageKey
from kvtier.tier.stores.base import CatalogueEntry, Place

PageId = tuple[PageKey, str]  # key, variant

RECORD_VERSION = 1


class BadRecord(Exception):
    """A catalogue value isn't what was written."""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """A value's body; before it a version byte, behind it its checksum."""

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


def record_key(key: PageKey, variant: str) -> bytes:
    """The key under which a page's record lies; they are all of one length."""
    return key + variant.encode().ljust(16, b"\0")


def page_id(entry: CatalogueEntry) -> PageId:
    """Which page a record is about."""
    return entry.envelope.key, entry.envelope.variant


def key_of(entry: CatalogueEntry) -> bytes:
    """The key under which this record lies."""
    return record_key(entry.envelope.key, entry.envelope.variant)


def pack_record(name: bytes, entry: CatalogueEntry) -> bytes:
    """The value under key `name`."""
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


def unpack_record(name: bytes, value: bytes) -> CatalogueEntry:
    """Raises BadRecord."""
    if len(value) < 10 or xxhash.xxh3_64(name + value[:-8]).digest() != value[-8:]:
        raise BadRecord("a record's checksum differs")
    if value[0] != RECORD_VERSION:
        raise BadRecord(f"a record has version {value[0]}, this program reads {RECORD_VERSION}")
    try:
        record = _decode(memoryview(value)[1:-8])
        envelope = Envelope.unpack(record.envelope)
    except (msgspec.DecodeError, PageCorrupt) as error:
        raise BadRecord(f"a record can't be read: {error}") from error
    return CatalogueEntry(
        envelope,
        Place(record.segment, record.index),
        record.slot_bytes,
        record.generation,
        record.content,
        record.uses,
        record.last_use_s,
    )
