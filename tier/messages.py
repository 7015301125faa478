"""What a worker and its node's CacheNode say to each other, over a Unix socket (tier/ipc.py). Pure data.

The messages of a worker are events of the coordinator as they stand; its replies are commands. Page bytes never
travel here: they lie in the slots of the shared slab that the messages name.
"""

from __future__ import annotations

import msgspec


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The right to one L3 slot; ends by the holder's release or its proven death."""

    slot: int
    generation: int


# ---- worker -> CacheNode ---------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker; `incarnation` is new at each start of the worker."""

    worker_id: str
    incarnation: str
    spec_digest: bytes
    payload_bytes: int
    root_fields: dict[str, str]  # what its root key digests, so that explain can name a field that differs


class WantSlots(msgspec.Struct, frozen=True, tag=True):
    """Refill of the worker's stock of slots to write sealed pages into. Answered by Granted, maybe with fewer."""

    count: int


class ReturnSlots(msgspec.Struct, frozen=True, tag=True):
    """Slots of the stock given back unused."""

    grants: list[Grant]


class StoredPage(msgspec.Struct, frozen=True, array_like=True):
    """One page that the worker has written, envelope first, into a granted slot."""

    grant: Grant
    key: bytes
    variant: str
    root: bytes
    parent: bytes
    tenant: bytes
    depth: int
    tokens: int
    checksum: bytes
    content: bytes  # content_digest of the chain when depth == 0, else b""


class Stored(msgspec.Struct, frozen=True, tag=True):
    """Pages are sealed in their slots. With `hold_for` they stay leased to that request (preemption by demotion)."""

    pages: list[StoredPage]
    hold_for: str | None = None


class Locate(msgspec.Struct, frozen=True, tag=True):
    """Which pages of a chain does the node have? Leases what it finds and starts promotions.

    `keys` are the pages past what the worker's L1 holds, in chain order; `first_content` is the content digest of
    the prompt (b"" if L1 held its first page). `recompute_s` is what computing one page costs the worker now;
    where loading a run of pages from L4 would take longer than that, they are Missing "costlier" (0: always load).
    """

    request_id: str
    root: bytes
    tenant: bytes
    keys: list[bytes]
    variant: str
    recompute_s: float
    first_content: bytes = b""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """Pages `indexes` of the request's Locate have been copied from L3 into L1: their leases end.

    `corrupt` are those of them whose checksum failed (drop the copy, count it). The numbers feed the statistics.
    """

    request_id: str
    indexes: list[int]
    nbytes: int
    seconds: float
    corrupt: list[int] = []


class Release(msgspec.Struct, frozen=True, tag=True):
    """Ends the request's leases and pending loads of pages at or past `from_index` of its Locate.

    0 ends all, pages held for it (`Stored.hold_for`) too. Harmless when there is nothing to end.
    """

    request_id: str
    from_index: int = 0


ToNode = Hello | WantSlots | ReturnSlots | Stored | Locate | Copied | Release


# ---- CacheNode -> worker ---------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers Hello; the slab's file descriptor rides along (SCM_RIGHTS)."""

    node_id: str
    incarnation: str
    slab_bytes: int
    slot_bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answers a Hello that can't be served (another page size than the slab's); the connection closes."""

    reason: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Answers WantSlots."""

    grants: list[Grant]


class HostPage(msgspec.Struct, frozen=True, array_like=True):
    """Page `index` of the Locate is sealed in this slot and leased to the request."""

    index: int
    grant: Grant
    checksum: bytes
    tokens: int
    from_ssd: bool  # it was read up from L4 for this request, so it counts as an L4 hit


class Missing(msgspec.Struct, frozen=True, tag_field="kind", tag="missing"):
    """Why page `index` of a Locate is not to be had; the first such page ends the chain.

    reason: never_stored | evicted | lost | identity_differs | load_failed | corrupt | deadline | costlier | no_room |
    cleared | cache_off (a worker adds partial_page for the tokens behind the last whole page)
    `detail` is one readable sentence (which tier, score, when; which field differs and how).
    """

    index: int
    reason: str
    detail: str


class Located(msgspec.Struct, frozen=True, tag=True):
    """Answers Locate at once. Pages [0, len(host) + len(loading)) are there or coming, the rest is missing.

    More pages may be loading than L3 has slots: the node reads as slots come free, so the worker, which has reserved
    its L1 frames first, must copy each Loaded page at once and say Copied.
    """

    request_id: str
    host: list[HostPage]
    loading: list[int]
    missing: Missing | None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Pages of an earlier Located.loading are in L3 now, leased."""

    request_id: str
    pages: list[HostPage]


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Page `missing.index` and all behind it in the Locate's chain will not come. Leases before it stand."""

    request_id: str
    missing: Missing


ToWorker = Welcome | Refused | Granted | Located | Loaded | LoadFailed
