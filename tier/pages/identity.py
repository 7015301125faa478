"""Makes the keys by which pages are found: a key can't match bytes of other weights, tenant or format. Pure.

`PageKey = blake2b-256(parent_key, tokens)` keyed with the tenant's salt, chained from a root that digests everything
a page's bytes depend on beside its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvtier.tier.pages.page import PageKey, RootKey

TokenIds = npt.NDArray[np.int32]  # [tokens]

CONTENT_TOKENS = 16  # tokens by which a prompt is recognised whatever its identity, the page size included


def root_key(fields: Mapping[str, str]) -> RootKey:
    """Digest of tagged, length-prefixed fields, in sorted order of their names.

    `fields` is what `explain` shows, so values are readable text (digests in hex).
    """
    h = blake2b(digest_size=32, person=b"kvtier.root")
    for name in sorted(fields):
        for part in (name.encode(), fields[name].encode()):
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)
    return RootKey(h.digest())


def tenant_digest(tenant: str) -> bytes:
    """16 bytes that stand for a tenant's name in envelopes, catalogues and messages."""
    return blake2b(tenant.encode(), digest_size=16, person=b"kvtier.tenant").digest()


def tenant_salt(tenant: str, secret: str = "") -> bytes:
    """The 64-byte hash key of a tenant; the same after a restart. `secret` is the tenant's salt from the config."""
    key = blake2b(secret.encode(), digest_size=64).digest()
    return blake2b(tenant.encode(), digest_size=64, key=key, person=b"kvtier.salt").digest()


def session_number(salt: bytes, session_id: str) -> int:
    """From 1 to 2**63 - 1: stands for a tenant's session where only whether two are the same matters; 0 is no session."""
    h = blake2b(session_id.encode(), digest_size=8, key=salt, person=b"kvtier.session")
    return int.from_bytes(h.digest(), "little") >> 1 or 1


def page_keys(
    parent: RootKey | PageKey, salt: bytes, tokens: TokenIds, page_tokens: int, include_partial: bool = False
) -> list[PageKey]:
    """Keys of the full pages of `tokens`, chained behind `parent`.

    With `include_partial` a last page that isn't full gets a key too (a preempted sequence's tail): the key digests
    the tokens' number with the tokens, so it never equals a full page's.
    """
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * page_tokens
    end = len(data) if include_partial else len(data) - len(data) % step
    keys: list[PageKey] = []
    previous: bytes = parent
    for start in range(0, end, step):
        previous = blake2b(previous + data[start : min(start + step, end)], digest_size=32, key=salt).digest()
        keys.append(PageKey(previous))
    return keys


def content_digest(salt: bytes, chain: Sequence[int] | TokenIds) -> bytes:
    """16 bytes for the first CONTENT_TOKENS tokens of a chain, whatever its root and page size.

    Lets `explain` see that only the identity differs.
    """
    data = np.asarray(chain[:CONTENT_TOKENS], dtype="<i4").tobytes()
    return blake2b(data, digest_size=16, key=salt, person=b"kvtier.content").digest()
