"""What a worker and its node's CacheNode say to each other, over a Unix socket (tier/protocol/ipc.py). Pure data.

The messages of a worker are events of the coordinator as they stand; its replies are commands. Page bytes never
travel here: they lie in the slots of the shared slab that the messages name.

The range of each field stands at its type and is checked when a message is decoded; what takes two fields to see stands
in tier/protocol/rules.py. So a message that was heard is one that all arithmetic on it can bear.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from kvtier.tier.policy.base import Kind

# ---- ranges ----------------------------------------------------------------------------------------------------
# Integers fit numpy's int64, and those that are counted in columns of 32 bits can be added to there. No float may be
# infinite or NaN: each has a largest value, and NaN is in no range.

MAX_DEPTH = 2**30 - 1  # of a page in its chain
MAX_FIRST_PAGE = 2**20  # of the longest streams that are looked up, 2**24 tokens in pages of 16
MAX_CHAINS = 64  # layer groups of one model; anything above a handful will do
MAX_REMOTES = 64  # hints of one Locate
MAX_NAME = 256  # characters of a worker's or node's name or address
MAX_TEXT = 2**16  # characters of a sentence for people

WriteMode = Literal["through", "demote"]  # `tiers.write` of a deployment

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]  # of a page, a root, or the page before
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]  # of a tenant, a spec, or a page's content
DigestOrNone = Annotated[bytes, Meta(max_length=16)]  # a Digest, or b"" where there is none
Variant = Annotated[str, Meta(pattern=r"^[!-~]{1,16}\Z")]  # an envelope has 16 bytes for it
VariantOrNone = Annotated[str, Meta(pattern=r"^[!-~]{0,16}\Z")]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
RequestId = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Fields = Annotated[dict[Name, Text], Meta(max_length=256)]

Count = Annotated[int, Meta(ge=0, le=2**30 - 1)]  # of pages, tokens or turns
Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # of clears (tier/pages/clear_epochs.py); 0: none
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # a generation, a session or a transfer
Tokens = Annotated[int, Meta(ge=1, le=2**16 - 1)]  # of one page
Position = Annotated[int, Meta(ge=0, le=2**40)]  # of a token; a distance between two
PageNumber = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]
PayloadBytes = Annotated[int, Meta(ge=1, le=2**40)]
Offset = Annotated[int, Meta(ge=0, le=2**50)]  # into a slab or an arena, and their sizes
NumBytes = Annotated[int, Meta(ge=0, le=2**50)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
DoublePages = Annotated[
    float, Meta(ge=0.0, le=1e12)
]  # see tier/protocol/rules.py for what is between 0 and 1

PageRef = tuple[
    Annotated[int, Meta(ge=0, lt=MAX_CHAINS)], PageNumber
]  # which chain, and which page of the sequence


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The right to one L3 slot; ends by the holder's release or its proven death.

    The slot begins at byte slot * ALIGN_BYTES of the slab and holds an envelope and `payload_bytes` of a page.
    """

    slot: Offset
    generation: Number
    payload_bytes: PayloadBytes


# ---- worker -> CacheNode ---------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker; `incarnation` is new at each start of the worker.

    `payloads` are the bytes of a page, by spec digest, of every format and layer group that it may store or load;
    `raw_payloads` what the same tokens take in the model's raw format. `root_fields` is what its root key digests, so
    that explain can name a field that differs. A worker that `brings_down` stores a page before L1 drops it, also one that
    it has copied up: where pages are demoted, the node's copies of what only that worker uses are evicted first. One that
    `saves_when_asked` answers SavePages: L1 keeps pages there that it hasn't stored.

    An "exchange" is no decode worker: it serves the node's pages to other nodes and fetches theirs (tier/transport/frames.py). It may
    locate and copy pages of any shape, stores into the slots of a Fetch only, and has no payloads of its own.

    A worker with `arena_bytes` lends frames to its peers on the node (`Lend`). Two file descriptors ride along: the write
    end of the arena's lifeline, a pipe that nothing writes into, and its memfd; or the lifeline alone, where `arena_handle`
    is what another process opens the arena by on a GPU. Who may write into the arena holds its lifeline, so once that is
    closed the lender knows that nothing can, whatever became of the node.
    """

    worker_id: Name
    incarnation: Name
    payloads: dict[Digest, PayloadBytes]
    raw_payloads: dict[Digest, PayloadBytes]
    root_fields: Fields
    brings_down: bool = False
    role: Literal["worker", "exchange"] = "worker"
    arena_bytes: NumBytes = 0
    arena_handle: Annotated[bytes, Meta(max_length=2**16)] = b""
    saves_when_asked: bool = False

    @classmethod
    def of_worker(
        cls,
        worker_id: str,
        incarnation: str,
        payloads: dict[bytes, int],
        raw_payloads: dict[bytes, int],
        root_fields: dict[str, str],
        write: WriteMode,
        *,
        arena_bytes: int = 0,
        arena_handle: bytes = b"",
        answers_saves: bool = True,
    ) -> Self:
        """The Hello of a decode worker whose deployment has `tiers.write: write`; replay and simulation say the same.

        `answers_saves` is False for a simulated worker, which has no pages to save when another node asks.
        """
        demotes = write == "demote"
        return cls(
            worker_id=worker_id,
            incarnation=incarnation,
            payloads=payloads,
            raw_payloads=raw_payloads,
            root_fields=root_fields,
            brings_down=demotes,
            arena_bytes=arena_bytes,
            arena_handle=arena_handle,
            saves_when_asked=demotes and answers_saves,
        )


class NewRoot(msgspec.Struct, frozen=True, tag=True):
    """The worker stores pages under one more root: another layer group, another window, or a lossy recipe."""

    root_fields: Fields


class WantSlots(msgspec.Struct, frozen=True, tag=True):
    """Refill of the worker's stock of slots for pages of one size; replaces its last wish for that size.

    Answered by Granted, maybe with fewer, when there are any.
    """

    count: Count
    payload_bytes: PayloadBytes


class ReturnSlots(msgspec.Struct, frozen=True, tag=True):
    """Slots of the stock given back unused."""

    grants: list[Grant]


class StoredPage(msgspec.Struct, frozen=True, array_like=True):
    """One page that the worker has written, envelope first, into a granted slot."""

    grant: Grant
    key: Key
    variant: Variant
    made_from: VariantOrNone  # the variant it was converted from; "" when the model computed it
    spec_digest: Digest
    root: Key
    parent: Key
    tenant: Digest
    depth: PageNumber
    tokens: Tokens
    checksum: Digest
    content: DigestOrNone  # content_digest of the chain when depth == 0, else b""
    cleared: Epoch = 0  # of the tenant, that the worker knew of when it began to write


class Stored(msgspec.Struct, frozen=True, tag=True):
    """Pages are sealed in their slots. With `hold_for` they stay leased to that request (preemption by demotion)."""

    pages: list[StoredPage]
    hold_for: RequestId | None = None


class Unsaved(msgspec.Struct, frozen=True, tag=True):
    """Answers SavePages, where some of its pages (key, variant) won't be Stored: L1 hasn't them, or they aren't to go down."""

    pages: list[tuple[Key, Variant]]


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """One layer group's pages of a lookup, and what of them a prefix must have (tier/pages/recipe.py says it in code).

    `keys` are those of the pages from the Locate's `first_page` on. `held` has the recipe.HAS_ bits of what L1 has of
    each, one byte per key. Where `other_keys` isn't empty a page under the other key will do as well. With `any_variant`
    `decayed` will do for every page; where the recipe is uniform, `recent_tokens` above all positions says so.
    """

    keys: list[Key]
    other_keys: list[Key]
    held: bytes
    variant: Variant
    decayed: VariantOrNone  # "" where there is no such format
    recent_tokens: Position
    sink_tokens: Position
    stride_tokens: Annotated[int, Meta(ge=1, le=2**40)]
    window_tokens: Position
    window_sinks: Position
    any_variant: bool
    spec_digest: DigestOrNone = b""  # of pages of `variant`: how large one is that no tier here holds yet


class Remote(msgspec.Struct, frozen=True, array_like=True):
    """Another node is said to hold a sequence's pages before page `pages`, as written, in all chains.

    `address` is the HOST:PORT of its exchange. It is a hint: what isn't there is a miss.
    """

    node_id: Name
    address: Name
    pages: Count


class Locate(msgspec.Struct, frozen=True, tag=True):
    """How long a prefix can be had? Leases the pages that it needs and L1 lacks, and starts promotions.

    All pages before `first_page` are in L1. The chains are of one length; the prefix is the longest that every chain
    can serve (recipe.longest_hit), `last_position` the last position whose row may follow it. A last page may be a
    partial one (a preempted sequence's tail). `first_content` is the content digest of the prompt (b"" if L1 held its
    first page). `recompute_s` is what computing one page costs the worker now, on average over the chain (0: always
    load), and `double_pages` the depth at which one costs twice as much as the first (0: all cost the same). A page comes
    from L4 or from one of `remotes`, the best one first, whichever has it sooner; where that takes longer than computing,
    or than the `patience_s` that the worker waits (0: however long), pages are Missing "costlier". The worker computes
    none of them before `busy_s`, since it computes others first.
    """

    request_id: RequestId
    root: Key  # of the first chain
    tenant: Digest
    page_tokens: Tokens
    first_page: Annotated[int, Meta(ge=0, le=MAX_FIRST_PAGE)]
    last_position: Position
    chains: Annotated[list[Chain], Meta(min_length=1, max_length=MAX_CHAINS)]
    recompute_s: Seconds
    first_content: DigestOrNone = b""
    remotes: Annotated[list[Remote], Meta(max_length=MAX_REMOTES)] = []
    double_pages: DoublePages = 0.0
    patience_s: Seconds = 0.0
    busy_s: Seconds = 0.0
    cleared: Epoch = 0  # of the tenant, as far as who asks knows: a node that is behind clears first


CameFrom = Literal["L3", "L4", "remote"]


class Copied(msgspec.Struct, frozen=True, tag=True):
    """These pages of the request's Locate have been copied from L3 into L1: their leases end.

    `corrupt` are those of them whose checksum failed (drop the copy, count it). The numbers feed the statistics.
    """

    request_id: RequestId
    pages: list[PageRef]
    nbytes: NumBytes
    seconds: Seconds
    corrupt: list[PageRef] = []


class Release(msgspec.Struct, frozen=True, tag=True):
    """Ends the request's leases and pending loads of pages of the sequence at or past `from_page`, in all chains.

    0 ends all, pages held for it (`Stored.hold_for`) too. Harmless when there is nothing to end.
    """

    request_id: RequestId
    from_page: PageNumber = 0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A request that used the cache is over: what the next use of its pages is foretold from (score.Use).

    `keys` are, by layer group, those of its chain's full pages, head first; of a stream those it still holds. `kind` is
    a score.Kind; `seconds` have passed since it was admitted, when its pages were used. `page_s` and `double_pages` are
    the worker's score.Costs of recomputing, 0.0 while not measured.
    """

    request_id: RequestId
    keys: Annotated[list[list[Key]], Meta(max_length=MAX_CHAINS)]
    new_pages: Count
    output_tokens: Count
    kind: Annotated[int, Meta(ge=0, lt=len(Kind))]
    turn: Count
    session: Number
    closed: bool
    open: bool
    seconds: Seconds
    page_s: Seconds
    double_pages: DoublePages


# ---- exchange -> CacheNode -------------------------------------------------------------------------------------


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """A Fetch is over, or `failed` of its pages won't come; what came was `Stored` before, into the Fetch's grants.

    `reason` is one of Missing's, `detail` a sentence. `nbytes` and `seconds` feed the estimate of the peer's speed.
    The grants of pages that failed are given back by this message.
    """

    fetch_id: Number
    failed: list[tuple[Key, Variant]]  # key, variant
    reason: Name
    detail: Text
    nbytes: NumBytes
    seconds: Seconds
    is_over: bool = True


# ---- a worker that lends frames, and one that borrows them (L2) --------------------------------------------------


class LentFrame(msgspec.Struct, frozen=True, array_like=True):
    """`nbytes` from byte `offset` of the lender's arena."""

    offset: Offset
    nbytes: PayloadBytes


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Frames of the worker's arena that its peers may use until they are reclaimed."""

    frames: list[LentFrame]


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """The lender wants these frames (by offset) back: answered by Reclaimed as they come free."""

    offsets: list[Offset]


class PeerGrant(msgspec.Struct, frozen=True, array_like=True):
    """The right to one lent frame of `lender`'s arena (a worker's incarnation); ends as a Grant does."""

    lender: Name
    offset: Offset
    generation: Number
    payload_bytes: PayloadBytes


class WantFrames(msgspec.Struct, frozen=True, tag=True):
    """Refill of the worker's stock of peers' frames for pages of one size; replaces its last wish for that size."""

    count: Count
    payload_bytes: PayloadBytes


class ReturnFrames(msgspec.Struct, frozen=True, tag=True):
    """Peers' frames given back unused."""

    grants: list[PeerGrant]


class ArenaUnopened(msgspec.Struct, frozen=True, tag=True):
    """This worker can't open a peer's arena: nothing in it is to be leased or granted to it."""

    lender: Name
    reason: Text


class LentPage(msgspec.Struct, frozen=True, array_like=True):
    """One page that the worker has copied into a peer's frame; it has a sealed copy in L3 or L4 too, else it is dropped.

    `checksum` is what a read of the frame is checked by: on a GPU a digest that was taken there.
    """

    grant: PeerGrant
    key: Key
    variant: Variant
    spec_digest: Digest
    checksum: Digest
    tokens: Tokens
    cleared: Epoch = 0  # as in StoredPage


class StoredInPeer(msgspec.Struct, frozen=True, tag=True):
    """Pages lie in peers' frames."""

    pages: list[LentPage]


ToNode = (
    Hello
    | NewRoot
    | WantSlots
    | ReturnSlots
    | Stored
    | Unsaved
    | Locate
    | Copied
    | Release
    | Finished
    | Fetched
    | Lend
    | Reclaim
    | WantFrames
    | ReturnFrames
    | ArenaUnopened
    | StoredInPeer
)


# ---- CacheNode -> worker ---------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers Hello; the slab's file descriptor rides along (SCM_RIGHTS)."""

    node_id: Name
    incarnation: Name
    slab_bytes: NumBytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answers a Hello that can't be served (pages too large for the slab's segments); the connection closes."""

    reason: str


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Answers WantSlots; the grants are of one size."""

    grants: list[Grant]


class HostPage(msgspec.Struct, frozen=True, array_like=True):
    """Page `page` of a chain of the Locate is sealed in this slot and leased to the request."""

    page: PageRef
    grant: Grant
    key: Key
    variant: Variant
    spec_digest: Digest
    checksum: Digest
    tokens: Tokens
    came_from: CameFrom  # "L4": it was read up for this request, "remote": fetched from another node


REASONS = frozenset(
    (
        *(
            "never_stored",
            "evicted",
            "lost",
            "identity_differs",
            "variant",
            "load_failed",
            "corrupt",
            "deadline",
        ),
        *("costlier", "no_room", "cleared", "cache_off", "unsaved", "partial_page"),
    )
)


class Missing(msgspec.Struct, frozen=True, tag_field="kind", tag="missing"):
    """Why the prefix ends before page `page` of the sequence.

    `reason` is one of REASONS ("partial_page" is a worker's, for the tokens behind the last whole page). "variant": the
    page is here, but only in a lossier or later format than the request takes. "unsaved": only L1 of another node's worker may
    have it, and that worker was busy.
    `detail` is one readable sentence (which tier, score, when; which field differs and how).
    """

    page: PageNumber
    reason: str
    detail: str


class PeerPage(msgspec.Struct, frozen=True, array_like=True):
    """Page `page` of a chain of the Locate lies in a frame of a peer's arena (L2) and is leased to the request."""

    page: PageRef
    grant: PeerGrant
    key: Key
    variant: Variant
    spec_digest: Digest
    checksum: Digest  # as of the LentPage
    tokens: Tokens
    made_from: VariantOrNone


class Located(msgspec.Struct, frozen=True, tag=True):
    """Answers Locate at once: the prefix has `pages` pages, of which those that L1 lacks and needs are there or coming.

    More pages may be loading than L3 has slots: the node reads as slots come free, so the worker, which has reserved
    its L1 frames first, must copy each Loaded page at once and say Copied.

    `saving` are those of `loading` that a worker is asked for (SavePages): it may be in a long step, or stopped.
    """

    request_id: str
    pages: PageNumber
    host: list[HostPage]
    loading: list[PageRef]
    missing: Missing | None
    peer: list[PeerPage] = []
    saving: list[PageRef] = []


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Pages of an earlier Located.loading are in L3 now, leased."""

    request_id: str
    pages: list[HostPage]
    peer: list[PeerPage] = []  # in frames of peers, where they were too many for the Located


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Page `missing.page` will not come, and none behind it, in any chain. Leases before it stand."""

    request_id: str
    missing: Missing


class SavePages(msgspec.Struct, frozen=True, tag=True):
    """Another node asks for these pages (key, variant), as the model computed them: those that L1 has are to be Stored soon,
    though the worker may know them to be saved: the node has them no more.
    """

    pages: list[tuple[Key, Variant]]


class FramesGranted(msgspec.Struct, frozen=True, tag=True):
    """Answers WantFrames; the grants are of one size."""

    grants: list[PeerGrant]


class RecallFrames(msgspec.Struct, frozen=True, tag=True):
    """Their lenders want these back: those still in stock are returned (ReturnFrames), the others are Stored soon."""

    grants: list[PeerGrant]


class Reclaimed(msgspec.Struct, frozen=True, tag=True):
    """Answers Reclaim, maybe in parts: nothing reads or writes these frames any more."""

    offsets: list[Offset]


class Arena(msgspec.Struct, frozen=True, tag=True):
    """A peer's arena may be opened. What rode along with its Hello rides along."""

    lender: Name
    nbytes: NumBytes
    handle: bytes


class ArenaGone(msgspec.Struct, frozen=True, tag=True):
    """A peer is gone, and all that was in its frames."""

    lender: Name


class FetchPage(msgspec.Struct, frozen=True, array_like=True):
    """One page to fetch, into the granted slot."""

    grant: Grant
    key: Key
    variant: Variant
    spec_digest: Digest


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """To an exchange: get these pages, which follow each other in one chain from page `first_page` on, from a node.

    Each that came whole is `Stored` (batches of a few), and `Fetched` ends it within `deadline_s` seconds.
    """

    fetch_id: Number
    node_id: Name
    address: Name
    root: Key
    tenant: Digest
    page_tokens: Tokens
    first_page: PageNumber
    pages: list[FetchPage]
    deadline_s: Seconds
    cleared: Epoch = 0  # of the tenant, here: as of Locate


class CancelFetch(msgspec.Struct, frozen=True, tag=True):
    """To an exchange: nothing waits for a Fetch any more. It is still ended by `Fetched`."""

    fetch_id: Number


ToWorker = (
    Welcome
    | Refused
    | Granted
    | Located
    | Loaded
    | LoadFailed
    | SavePages
    | FramesGranted
    | RecallFrames
    | Reclaimed
    | Arena
    | ArenaGone
    | Fetch
    | CancelFetch
)
