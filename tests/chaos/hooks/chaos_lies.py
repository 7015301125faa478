"""Frames of pages in which one page is not what it should be. Pure but for the randomness that it is given.

A frame is made of whole pages: packed envelope, length of the payload, payload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from kvtier.tier.pages.page import PACKED_ENVELOPE_BYTES, Envelope, page_checksum

LENGTH = struct.Struct("<Q")
HEAD_BYTES = PACKED_ENVELOPE_BYTES + LENGTH.size

Page = tuple[bytes, bytes]  # head, payload


def pages_of(data: bytes) -> list[Page]:
    """The pages of a frame. ValueError where it is not made of whole pages: then no lie can be told in it."""
    pages: list[Page] = []
    while data:
        (nbytes,) = LENGTH.unpack(data[PACKED_ENVELOPE_BYTES:HEAD_BYTES].ljust(LENGTH.size, b"\0"))
        page, data = data[: HEAD_BYTES + nbytes], data[HEAD_BYTES + nbytes :]
        if len(page) != HEAD_BYTES + nbytes or nbytes != Envelope.unpack(page).payload_bytes:
            raise ValueError(f"a frame ends within a page of {nbytes} bytes")
        pages.append((page[:HEAD_BYTES], page[HEAD_BYTES:]))
    return pages


def lied(data: bytes, lie: str, rng: Random) -> bytes:
    """The frame with one of its pages changed as `lie` names."""
    pages = pages_of(data)
    at = rng.randrange(len(pages))
    pages[at] = LIES[lie](*pages[at], rng)
    return b"".join(part for page in pages for part in page)


def _bit(head: bytes, payload: bytes, rng: Random) -> Page:
    """Damage: the checksum does not fit."""
    at, bit = rng.randrange(len(payload)), 1 << rng.randrange(8)
    return head, payload[:at] + bytes([payload[at] ^ bit]) + payload[at + 1 :]


def _short(head: bytes, payload: bytes, rng: Random) -> Page:
    """Damage: what comes next lies where the end of the payload should."""
    return head, payload[: rng.randrange(len(payload))]


def _another(field: str) -> Callable[[bytes, bytes, Random], Page]:
    """A whole page, with checksums that fit, which is not the one asked for: of another `field`."""

    def lie(head: bytes, payload: bytes, rng: Random) -> Page:
        envelope = Envelope.unpack(head)
        envelope = replace(envelope, **{field: rng.randbytes(len(getattr(envelope, field)))})
        whole = page_checksum(envelope.key, envelope.variant, envelope.spec_digest, payload)
        return replace(envelope, checksum=whole).pack() + head[PACKED_ENVELOPE_BYTES:], payload

    return lie


DAMAGE: Sequence[str] = ("bit", "short")
OTHERS: Sequence[str] = ("key", "spec_digest", "tenant", "root")
LIES: dict[str, Callable[[bytes, bytes, Random], Page]] = {
    "bit": _bit,
    "short": _short,
    **{field: _another(field) for field in OTHERS},
}
