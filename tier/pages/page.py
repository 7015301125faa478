"""What a page is: its shape, its format, its envelope and its checksum. Pure; performs no I/O.

A page holds the keys and values of `page_tokens` consecutive tokens for all layers of one layer group, in one
contiguous run of bytes that is the same in every tier (page-first). Inside lies one record per layer, head-major:
`K codes [H, P, ..] | V codes [H, P, ..] | K scales | V scales`, padded to 256 bytes. A record of a model with latent
attention (MLA) is `latent [P, rank] | rope key [P, rope_dim] | scales`, stored once for all heads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import NewType

import xxhash

PageKey = NewType("PageKey", bytes)  # 32 bytes: what a page contains (tier/pages/identity.py makes it)
RootKey = NewType("RootKey", bytes)  # 32 bytes: everything a page's bytes depend on beside its tokens

Buffer = bytes | bytearray | memoryview

ALIGN_BYTES = 4096  # O_DIRECT's alignment, and the granularity of L3 and L4 slots
HEADER_BYTES = 4096  # the envelope's room at the head of a slot
RECORD_ALIGN_BYTES = 256
LAYOUT_VERSION = 2
MIN_PAGE_TOKENS, MAX_PAGE_TOKENS = 1, 4096
MIN_QUANTIZED_PAGE_TOKENS = 16


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
    """How numbers are stored in a page. The value is also the page's variant name.

    Scales are float16 and lie in the record. A nibble of column j lies in the low half of byte j of its row for
    j < head_dim / 2, else in the high half of byte j - head_dim / 2. "Asymmetric" means number = code * scale + zero.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8_e4m3"  # e4m3fn codes; one scale per head and token, for K and for V
    INT8 = "int8"  # code + 128 is stored; one scale per head and token, for K and for V
    K8V4 = "k8v4"  # K as INT8; V in asymmetric nibbles per head and token
    INT4 = "int4"  # asymmetric nibbles per head and token; K is rotated by a Hadamard matrix (kernels/reference.py)
    INT4C = "int4c"  # full pages only: K in asymmetric nibbles per head and channel, V per head and token

    @property
    def is_raw(self) -> bool:
        """Numbers are stored as they are, in a floating-point type, without scales."""
        return self in (PageFormat.FP32, PageFormat.FP16, PageFormat.BF16)

    @property
    def is_token_wise(self) -> bool:
        """A token's bytes depend on no other token of its page."""
        return self is not PageFormat.INT4C

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored number of a raw format."""
        if not self.is_raw:
            raise ValueError(f"{self} has no whole bytes for each number; see PageSpec.sections")
        return 4 if self is PageFormat.FP32 else 2


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a record: `[heads, tokens, row_bytes]` at `offset`. `tokens` is 1 where a row serves the whole page."""

    offset: int
    heads: int
    tokens: int
    row_bytes: int

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.offset + self.heads * self.tokens * self.row_bytes


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class PageSpec:
    """Shape and format of the pages of one layer group; part of a page's identity.

    `rope_dim` above 0 means latent attention: `num_kv_heads` is 1, `head_dim` the latent's rank, and `rope_dim` the
    size of the key that carries the position. `rope_format` is the raw format of that key where the latent is FP8.
    Raises ValueError for a shape that can't be.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int = 16
    format: PageFormat = PageFormat.BF16
    layout_version: int = LAYOUT_VERSION
    rope_dim: int = 0
    rope_format: PageFormat = PageFormat.BF16

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
        if not self.format.is_raw and self.page_tokens < MIN_QUANTIZED_PAGE_TOKENS:
            raise ValueError(
                f"pages of format {self.format} hold at least {MIN_QUANTIZED_PAGE_TOKENS} tokens, got {self.page_tokens}"
            )
        if not self.format.is_raw and self.head_dim % 8:
            raise ValueError(f"format {self.format} needs a head_dim that 8 divides, got {self.head_dim}")
        if self.rope_dim:
            self._check_latent()

    def _check_latent(self) -> None:
        if self.rope_dim < 0 or self.rope_dim % 8:
            raise ValueError(f"rope_dim must be a multiple of 8, got {self.rope_dim}")
        if self.num_kv_heads != 1:
            raise ValueError(
                f"latents are shared by all heads: num_kv_heads must be 1, got {self.num_kv_heads}"
            )
        if not (self.format.is_raw or self.format is PageFormat.FP8) or not self.rope_format.is_raw:
            raise ValueError(
                f"latents are stored in a floating-point type or as {PageFormat.FP8}, got {self.format} with rope keys"
                f" in {self.rope_format}"
            )

    @property
    def is_latent(self) -> bool:
        """The pages hold latents of MLA instead of keys and values."""
        return self.rope_dim > 0

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The parts of a record, in order: K codes, V codes, K scales, V scales; those of no bytes too.

        Latent pages: latents, rope keys, scales of the latents, and an empty one.
        """
        heads, tokens, dim = self.num_kv_heads, self.page_tokens, self.head_dim
        if self.is_latent:
            raw = self.format.is_raw
            rope = self.format if raw else self.rope_format
            rows = [(tokens, dim * self.format.element_bytes if raw else dim)]
            rows += [(tokens, self.rope_dim * rope.element_bytes), (tokens, 0 if raw else 2), (tokens, 0)]
        elif self.format.is_raw:
            row = dim * self.format.element_bytes
            rows = [(tokens, row), (tokens, row), (tokens, 0), (tokens, 0)]
        else:
            rows = {
                PageFormat.FP8: [(tokens, dim), (tokens, dim), (tokens, 2), (tokens, 2)],
                PageFormat.INT8: [(tokens, dim), (tokens, dim), (tokens, 2), (tokens, 2)],
                PageFormat.K8V4: [(tokens, dim), (tokens, dim // 2), (tokens, 2), (tokens, 4)],
                PageFormat.INT4: [(tokens, dim // 2), (tokens, dim // 2), (tokens, 4), (tokens, 4)],
                PageFormat.INT4C: [(tokens, dim // 2), (tokens, dim // 2), (1, 4 * dim), (tokens, 4)],
            }[self.format]
        found: list[Section] = []
        at = 0
        for row_tokens, row_bytes in rows:
            found.append(Section(at, heads, row_tokens, row_bytes))
            at = found[-1].end
        return tuple(found)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one layer's record, padding included; layer l starts at l * record_bytes."""
        return _round_up(self.sections[-1].end, RECORD_ALIGN_BYTES)

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
            self.rope_dim,
            self.rope_format.value if self.is_latent and not self.format.is_raw else "",
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
