"""What a page is: its shape, its format, its envelope and its checksum. Pure; performs no I/O.

A page holds the keys and values of `page_tokens` consecutive tokens for all layers, in one contiguous run of bytes
that is the same in every tier (page-first). Inside lies one record per layer, head-major:
`K [num_kv_heads, page_tokens, head_dim] | V [num_kv_heads, page_tokens, head_dim]`, padded to 256 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import NewType

import xxhash

PageKey = NewType("PageKey", bytes)  # 32 bytes: what a page contains (identity.py makes it)
RootKey = NewType("RootKey", bytes)  # 32 bytes: everything a page's bytes depend on beside its tokens

Buffer = bytes | bytearray | memoryview

ALIGN_BYTES = 4096  # O_DIRECT's alignment, and the granularity of L3 and L4 slots
HEADER_BYTES = 4096  # the envelope's room at the head of a slot
RECORD_ALIGN_BYTES = 256
LAYOUT_VERSION = 1
MIN_PAGE_TOKENS, MAX_PAGE_TOKENS = 1, 4096


class PageCorrupt(Exception):
    """A copy of a page is not what its envelope says. Drop the copy; the reader gets a miss."""


class PageMissing(Exception):
    """A tier doesn't hold the page. Recompute, or look further down."""


class TierFull(Exception):
    """A tier has no free slot of the size asked for. Make room, or drop."""


class TierName(StrEnum):
    """The tiers by the names users see."""

    HBM = "L1"
    PEER = "L2"
    HOST = "L3"
    SSD = "L4"
    REMOTE = "remote"


class PageFormat(StrEnum):
    """How numbers are stored in a page. The value is also the page's variant name."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored number."""
        return 4 if self is PageFormat.FP32 else 2


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class PageSpec:
    """Shape and format of the pages of one layer group; part of a page's identity.

    Raises ValueError for a shape that can't be.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int = 16
    format: PageFormat = PageFormat.BF16
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if not MIN_PAGE_TOKENS <= self.page_tokens <= MAX_PAGE_TOKENS or self.page_tokens & (
            self.page_tokens - 1
        ):
            raise ValueError(
                f"page_tokens must be a power of two from {MIN_PAGE_TOKENS} to {MAX_PAGE_TOKENS}, "
                f"got {self.page_tokens}"
            )
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @cached_property
    def half_record_bytes(self) -> int:
        """Bytes of the K part of a record; V lies right behind it."""
        return self.num_kv_heads * self.page_tokens * self.head_dim * self.format.element_bytes

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one layer's record, padding included; layer l starts at l * record_bytes."""
        return _round_up(2 * self.half_record_bytes, RECORD_ALIGN_BYTES)

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of one page."""
        return self.num_layers * self.record_bytes

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds this page below L1: envelope and payload, 4 KiB aligned."""
        return slot_bytes(self.nbytes)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this spec in envelopes and catalogues."""
        fields = (
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.page_tokens,
            self.format.value,
            self.layout_version,
        )
        return blake2b(repr(fields).encode(), digest_size=16, person=b"kvtier.spec").digest()


def slot_bytes(payload_bytes: int) -> int:
    """Bytes of an L3 or L4 slot for a payload: 4 KiB header + payload, rounded up to 4 KiB."""
    return HEADER_BYTES + _round_up(payload_bytes, ALIGN_BYTES)


def page_hasher(key: bytes, variant: str, spec_digest: bytes) -> xxhash.xxh3_128:
    """The page checksum before any payload: feed it the payload in pieces where they are hot in cache."""
    h = xxhash.xxh3_128(key)
    h.update(variant.encode().ljust(16, b"\0"))
    h.update(spec_digest)
    return h


def page_checksum(key: bytes, variant: str, spec_digest: bytes, payload: Buffer) -> bytes:
    """xxh3-128 over key, variant, spec digest and payload, so that a mislabelled page fails too."""
    h = page_hasher(key, variant, spec_digest)
    h.update(payload)
    return h.digest()


_ENVELOPE_MAGIC = b"KVTP"
_ENVELOPE_VERSION = 1
# magic, version, key, variant, made_from, spec digest, payload bytes, checksum, root, parent, tenant digest, depth, tokens
_ENVELOPE = struct.Struct("<4sH32s16s16s16sQ16s32s32s16sIH")
_HEADER_SUM = struct.Struct("<8s")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Goes with a page's bytes wherever they go below L1: at the head of its slot, and in front of it on the wire.

    `parent` is the key of the page before this one (the root key for the first page), `depth` the page's position in
    its chain (0 for the first), `tokens` how many of its page_tokens are filled, `tenant` the 16-byte digest of the
    tenant's name, `made_from` the variant the bytes were converted from ("" when computed by the model).
    """

    key: PageKey
    variant: str
    spec_digest: bytes
    payload_bytes: int
    checksum: bytes
    root: RootKey
    parent: bytes
    tenant: bytes
    depth: int
    tokens: int
    made_from: str = ""

    def pack(self) -> bytes:
        """The envelope as bytes, its own checksum last (at most HEADER_BYTES)."""
        body = _ENVELOPE.pack(
            _ENVELOPE_MAGIC,
            _ENVELOPE_VERSION,
            self.key,
            self.variant.encode(),
            self.made_from.encode(),
            self.spec_digest,
            self.payload_bytes,
            self.checksum,
            self.root,
            self.parent,
            self.tenant,
            self.depth,
            self.tokens,
        )
        return body + xxhash.xxh3_64(body).digest()

    @classmethod
    def unpack(cls, header: Buffer) -> Envelope:
        """Read an envelope off the head of a slot; PageCorrupt when it is no whole envelope of this version."""
        if len(header) < PACKED_ENVELOPE_BYTES:
            raise PageCorrupt(f"envelope of {len(header)} bytes, {PACKED_ENVELOPE_BYTES} expected")
        body = bytes(header[: _ENVELOPE.size])
        if bytes(header[_ENVELOPE.size : PACKED_ENVELOPE_BYTES]) != xxhash.xxh3_64(body).digest():
            raise PageCorrupt("envelope checksum differs")
        (
            magic,
            version,
            key,
            variant,
            made_from,
            spec,
            length,
            checksum,
            root,
            parent,
            tenant,
            depth,
            tokens,
        ) = _ENVELOPE.unpack(body)
        if magic != _ENVELOPE_MAGIC or version != _ENVELOPE_VERSION:
            raise PageCorrupt(f"envelope magic {magic!r} version {version}, {_ENVELOPE_VERSION} expected")
        return cls(
            key=PageKey(key),
            variant=variant.rstrip(b"\0").decode(),
            spec_digest=spec,
            payload_bytes=length,
            checksum=checksum,
            root=RootKey(root),
            parent=parent,
            tenant=tenant,
            depth=depth,
            tokens=tokens,
            made_from=made_from.rstrip(b"\0").decode(),
        )

    def verify(self, payload: Buffer) -> None:
        """Raise PageCorrupt unless `payload` is exactly the bytes this envelope names."""
        if len(payload) != self.payload_bytes:
            raise PageCorrupt(f"page of {len(payload)} bytes, envelope says {self.payload_bytes}")
        if page_checksum(self.key, self.variant, self.spec_digest, payload) != self.checksum:
            raise PageCorrupt(f"checksum of page {self.key.hex()[:16]} differs")


PACKED_ENVELOPE_BYTES = _ENVELOPE.size + _HEADER_SUM.size
assert PACKED_ENVELOPE_BYTES <= HEADER_BYTES
_NO_MAGIC = bytes(len(_ENVELOPE_MAGIC))


def expect_envelope(header: Buffer, key: PageKey, variant: str) -> Envelope:
    """The envelope at the head of a slot that should hold page (key, variant).

    Raises PageMissing for a wiped or never written slot and for one that holds another page, PageCorrupt for a
    damaged envelope.
    """
    if header[: len(_NO_MAGIC)] == _NO_MAGIC:
        raise PageMissing("the slot holds no page")
    envelope = Envelope.unpack(header)
    if envelope.key != key or envelope.variant != variant:
        raise PageMissing(
            f"the slot holds {envelope.key.hex()[:16]} as {envelope.variant}, not {key.hex()[:16]} as {variant}"
        )
    return envelope
