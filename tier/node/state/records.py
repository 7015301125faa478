"""What the coordinator keeps of pages, copies, workers, requests and transfers. Pure data."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier.tier.node.state.ranking import Fifo, Order
from kvtier.tier.pages.page import Envelope, PageKey, RootKey, TierName, slot_bytes
from kvtier.tier.policy.base import Policy, Row
from kvtier.tier.protocol.events import PageId, WorkerRef
from kvtier.tier.protocol.messages import Grant, Hello, PageRef, PeerGrant, Remote, StoredPage
from kvtier.tier.stats import TierCounters
from kvtier.tier.stores.base import CatalogueEntry, PageInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a coordinator's tables and of what it has in flight."""

    writes: int = 32  # pages on their way to L4 at once; more batch better, fewer leave more of L3 evictable
    write_bytes: int = 128 * 2**20  # ... and their bytes
    reads: int = 16  # pages on their way up at once; enough to keep the reader threads fed
    verifies: int = 4
    part: int = 1024  # pages of one part of long work: 25 ms at most
    workers: int = 256
    requests_per_worker: int = 4096
    keys_per_locate: int = 100_000
    gone: int = 65536  # pages whose leaving `explain` can still tell
    roots: int = 256
    specs: int = 256  # page shapes and formats whose raw size is known; those past it count as they are
    sizes_per_worker: int = 64
    contents: int = 4096
    contents_unsaved: int = 256  # new prompts that a killed node may forget
    persist_every: int = 512  # used pages whose use the catalogue doesn't know yet
    evictions_per_write: int = (
        1024  # L4 pages that one event may push out for a page, of another size perhaps
    )
    fetches: int = 16  # from other nodes at once
    fetches_per_peer: int = 4  # ... of one node; more hide its latency, fewer leave more to what comes next
    fetch_pages: int = 64  # pages of one Fetch; more batch better, fewer make a lost one cheaper
    fetch_queue: int = 65536  # pages that wait to be fetched
    fetch_deadline_s: float = 5.0  # of one Fetch
    peers: int = 256  # nodes whose speed is remembered
    saves: int = 65536  # pages that workers are to save for other nodes
    lent_frames: int = 2**20  # of all workers together


@dataclass(slots=True, eq=False)
class HostCopy:
    """A sealed page in an L3 slot. It is findable while `page.host is self`, and stays until its readers are gone."""

    page: Page
    grant: Grant
    envelope: Envelope  # of these bytes: a page computed twice may have other bytes in L4
    readers: int = 0  # leases, holds, and transfers that read it
    leases: int = 0  # those of the readers that are workers about to copy it
    holds: int = 0  # ... that are preempted requests
    promoting: bool = False  # it came from L4 for its leases, and one of them still stands
    leave: bool = False  # to be dropped when the readers are gone


@dataclass(slots=True, eq=False)
class SsdCopy:
    """A sealed page in L4. It is findable while `page.ssd is self`, and its slot stays until its readers are gone."""

    entry: CatalogueEntry
    readers: int = 0  # loads, queued ones too, and verifications
    leave: bool = False
    wipe: bool = False


@dataclass(slots=True, eq=False)
class PeerFrame:
    """A frame of `lender`'s arena that its peers may use. It is free, granted to `holder`, or has a `copy` in it."""

    lender: Worker
    offset: int
    nbytes: int
    holder: Worker | None = None
    grant: PeerGrant | None = None  # the holder's, or the one that the copy came by
    copy: PeerCopy | None = None
    is_leaving: bool = False  # the lender wants it back


@dataclass(slots=True, eq=False)
class PeerCopy:
    """A page in a peer's frame. It is findable while `page.peer is self`; the frame is its own until its readers are gone."""

    page: Page
    frame: PeerFrame
    checksum: bytes  # as of its LentPage
    readers: int = 0  # leases


class Leaving(IntEnum):
    """Whether a page's slot in L3 is to be free soon. With `write="through"` pages only STAY."""

    STAYS = 0
    SINKS = 1  # as soon as L4 has it
    GOES = 2  # it is a leaf, and not worth its place in L4


@dataclass(slots=True, eq=False)
class Page:
    """What the node knows of one (key, variant) that at least one tier holds."""

    id: PageId
    envelope: Envelope
    row: Row  # of the policy
    last_use: float
    content: bytes = b""
    owner: bytes = b""  # its tenant, where that has a share of the tiers
    uses: int = 0
    pinned: bool = False
    superseded: bool = (
        False  # a page made from it came after its last use: first to be evicted, in both tiers
    )
    leaving: Leaving = Leaving.STAYS
    user: WorkerRef | None = None  # the worker that has used it
    shared: bool = False  # others have, too
    above: WorkerRef | None = None  # exclusive in this worker's L1, its `user`: copies here are evicted first
    host: HostCopy | None = None
    ssd: SsdCopy | None = None
    peer: PeerCopy | None = None  # in L2, beside one in L3 or L4
    load: Load | None = None
    host_order: Order[Page] | None = None  # the order its copy in L3 is evicted by; see `_settle`
    own_host_order: Order[Page] | None = None  # ... and that of its owner's pages, where it has one
    ssd_order: Order[Page] | None = None
    own_ssd_order: Order[Page] | None = None
    peer_order: Order[Page] | None = None
    slot_bytes: int = field(init=False)  # of its slots in L3 and L4

    def __post_init__(self) -> None:
        self.slot_bytes = slot_bytes(self.envelope.payload_bytes)


class HostRank(IntEnum):
    """What of L3 goes first; see `_settle`."""

    SPENT = 0
    CLEAN = 1
    SINKING = 2
    LEAF = 3
    INNER = 4


class SsdRank(IntEnum):
    """What of L4 goes first; see `_settle`."""

    SPENT = 0
    SPARE = 1
    LEAF = 2
    INNER = 3


def host_orders(policy: Policy, *, demotes: bool) -> list[Order[Page]]:
    """An order per HostRank, of pages of one slot size. Where pages are demoted, the first three have been chosen."""
    return [
        Order(Fifo() if demotes and rank <= HostRank.SINKING else policy.candidates()) for rank in HostRank
    ]


def ssd_orders(policy: Policy, *, demotes: bool) -> list[Order[Page]]:
    """An order per SsdRank. Where pages are demoted, spare copies go first that have been so for longest."""
    return [Order(Fifo() if demotes and rank <= SsdRank.SPARE else policy.candidates()) for rank in SsdRank]


@dataclass(frozen=True, slots=True)
class Emptying:
    """A segment of L3 that gives out no more slots, so that slots of `slot_bytes` can take its place."""

    segment: int
    slot_bytes: int


Kind = tuple[str, bytes, int]  # variant, spec digest, payload bytes


def kind_of(envelope: Envelope) -> Kind:
    """What `Holdings` counts a page by."""
    return envelope.variant, envelope.spec_digest, envelope.payload_bytes


class Holdings:
    """What a tier holds, and what it would take in the model's raw format, where a key takes room once.

    Keys are counted by the kinds of their pages here, which are few, so that no key is kept.
    """

    def __init__(self) -> None:
        self.keys: Counter[frozenset[Kind]] = Counter()

    def add(self, envelope: Envelope, others: frozenset[Kind]) -> None:
        """A page came; `others` are the kinds of the pages of its key that the tier holds besides."""
        self._move(others, others | {kind_of(envelope)})

    def remove(self, envelope: Envelope, others: frozenset[Kind]) -> None:
        """A page left; `others` are the kinds of the pages of its key that the tier still holds."""
        self._move(others | {kind_of(envelope)}, others)

    def _move(self, before: frozenset[Kind], after: frozenset[Kind]) -> None:
        self.keys[after] += 1
        self.keys[before] -= 1
        if not self.keys[before]:
            del self.keys[before]
        self.keys.pop(frozenset(), None)

    def describe(self, counters: TierCounters, raw_payloads: Mapping[bytes, int]) -> None:
        """Put it into a tier's counters; a page of a spec without a known raw size counts as it is."""
        counters.variants = {}
        counters.pages = counters.page_bytes = counters.raw_bytes = 0
        for kinds, keys in self.keys.items():
            counters.raw_bytes += keys * max(raw_payloads.get(spec, nbytes) for _, spec, nbytes in kinds)
            for variant, _, payload_bytes in kinds:
                counters.pages += keys
                counters.page_bytes += keys * payload_bytes
                counters.variants[variant] = counters.variants.get(variant, 0) + keys


@dataclass(slots=True, eq=False)
class Request:
    """A worker's request as far as this node serves it. Pages are those of its latest Locate."""

    worker: Worker
    request_id: str
    leases: dict[PageRef, HostCopy] = field(default_factory=dict)
    peer_leases: dict[PageRef, PeerCopy] = field(default_factory=dict)
    waits: dict[PageRef, Load | RemoteLoad | Saving] = field(default_factory=dict)
    held: dict[HostCopy, None] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Nothing is leased to it and nothing is coming."""
        return not (self.leases or self.peer_leases or self.waits or self.held)


@dataclass(slots=True, eq=False)
class Worker:
    ref: WorkerRef
    hello: Hello
    grants: dict[int, Grant] = field(default_factory=dict)  # its stock, by slot
    stock: Counter[int] = field(default_factory=Counter)  # grants of each slot size
    requests: dict[str, Request] = field(default_factory=dict)
    lent: dict[int, PeerFrame] = field(default_factory=dict)  # its own frames that peers may use, by offset
    lent_at: list[int] = field(default_factory=list)  # those offsets, in order
    borrowed: dict[tuple[str, int], PeerFrame] = field(
        default_factory=dict
    )  # granted to it, by lender and offset
    borrowed_sizes: Counter[int] = field(default_factory=Counter)  # grants of each size of frames
    unopened: set[str] = field(default_factory=set)  # lenders whose arenas it can't open
    fenced: bool = False  # heard no more; its grants and leases stand until it is gone
    sizes: frozenset[int] = field(init=False)  # slot sizes of its pages

    def __post_init__(self) -> None:
        self.sizes = frozenset(map(slot_bytes, self.hello.payloads.values()))

    @property
    def is_exchange(self) -> bool:
        """It moves pages between nodes; it computes none, so it uses none."""
        return self.hello.role == "exchange"


@dataclass(slots=True, eq=False)
class Load:
    """A page's way from L4 to L3: queued while `transfer` is None. Abandoned when `page.load is not self`."""

    page: Page
    source: SsdCopy
    queued_at: float
    waiters: dict[tuple[Request, PageRef], None] = field(default_factory=dict)
    transfer: int | None = None
    grant: Grant | None = None


@dataclass(slots=True, eq=False)
class RemoteLoad:
    """A page's way from another node to L3: queued while `fetch` is None. Abandoned when `Fetches.coming` has it not.

    It is of no tier here yet, so this says all that is known of it: page `depth` of the chain under `root`.
    """

    id: PageId
    spec_digest: bytes
    payload_bytes: int
    root: bytes
    parent: bytes  # key of the page before it; b"" where that isn't known
    tenant: bytes
    depth: int
    tokens: int
    content: bytes  # digest of its prompt, at depth 0
    owner: bytes  # as of a Page
    node_id: str
    address: str
    queued_at: float
    others: tuple[Remote, ...]  # that are said to have it too: one of them is asked where the first one fails
    compute_s: float  # what not having it costs those who wait; inf: it is fetched whatever that takes
    late_at: float | None = None  # when the first Fetch of it was to end
    waiters: dict[tuple[Request, PageRef], None] = field(default_factory=dict)
    fetch: int | None = None
    grant: Grant | None = None
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.slot_bytes = slot_bytes(self.payload_bytes)


@dataclass(slots=True, eq=False)
class Saving:
    """A page's way from a worker's L1 to L3, since another node asks for it. No tier here has it yet."""

    id: PageId
    root: bytes
    tenant: bytes
    spec_digest: bytes
    asked: dict[Worker, None]  # one of these may have it
    waiters: dict[tuple[Request, PageRef], None] = field(default_factory=dict)

    def fits(self, envelope: Envelope) -> bool:
        """Whether what was saved is what is asked for."""
        found = envelope.root, envelope.tenant, envelope.spec_digest, envelope.made_from
        return found == (self.root, self.tenant, self.spec_digest, "")


@dataclass(slots=True, eq=False)
class Write:
    """A page's way from L3 to L4; `entry.place` is reserved."""

    page: Page
    copy: HostCopy
    entry: CatalogueEntry
    wipe: bool = False  # the page was cleared meanwhile


@dataclass(slots=True, eq=False)
class Job:
    """A Verify call."""

    ticket: int
    keys: tuple[bytes, ...]
    todo: deque[tuple[PageId, TierName]]
    running: int = 0
    seen: set[bytes] = field(default_factory=set)  # keys of which a copy was there
    corrupt: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Check:
    job: Job
    page: Page
    copy: HostCopy | SsdCopy


class Bandwidth:
    """Bytes per second of L4 reads while any are under way, averaged with more weight on the recent."""

    PRIOR = (
        1e9  # until measured, and again when the measurement is old: one bad moment must not end all loads
    )
    WINDOW_S = 0.005
    TRUSTED_S = 60.0
    WEIGHT = 0.2

    def __init__(self) -> None:
        self._average = self.PRIOR
        self._measured_at: float | None = None
        self._since = 0.0
        self._bytes = 0

    def started(self, now: float) -> None:
        """Reads begin after a pause."""
        self._since, self._bytes = now, 0

    def finished(self, nbytes: int, now: float) -> None:
        """One read is done."""
        self._bytes += nbytes
        elapsed = now - self._since
        if elapsed >= self.WINDOW_S:
            self._average += self.WEIGHT * (self._bytes / elapsed - self._average)
            self._measured_at = now
            self._since, self._bytes = now, 0

    def measured(self, now: float) -> float | None:
        """The estimate now, where there is a recent measurement."""
        if self._measured_at is None or now - self._measured_at > self.TRUSTED_S:
            return None
        return self._average

    def at(self, now: float) -> float:
        """The estimate now."""
        return self.measured(now) or self.PRIOR


class CopyTime:
    """Seconds that a byte takes from L3 to L1, averaged with more weight on the recent; 0.0 until measured.

    A copy that a stopped process began, or that its worker says nonsense of, counts as a slow one: a thousand times as long
    would keep L4 from being read for hundreds of copies.
    """

    WEIGHT = 0.05
    MOST = 1e-6  # of one copy; 1 MB/s

    def __init__(self) -> None:
        self.byte_s = 0.0

    def copied(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        if nbytes > 0 and seconds > 0:
            measured = min(seconds / nbytes, self.MOST)
            self.byte_s += (self.WEIGHT if self.byte_s else 1.0) * (measured - self.byte_s)


def envelope_of(stored: StoredPage) -> Envelope:
    """The envelope of a page that was stored."""
    return Envelope(
        key=PageKey(stored.key),
        variant=stored.variant,
        spec_digest=stored.spec_digest,
        payload_bytes=stored.grant.payload_bytes,
        checksum=stored.checksum,
        root=RootKey(stored.root),
        parent=stored.parent,
        tenant=stored.tenant,
        depth=stored.depth,
        tokens=stored.tokens,
        made_from=stored.made_from,
    )


def parent_key(page: Page) -> bytes | None:
    """The key of the page before this one in its chain, whatever its format; None for a first page."""
    return None if page.envelope.depth == 0 else page.envelope.parent


def page_info(
    node_id: str, page: Page, envelope: Envelope, tier: TierName, readers: int, state: str, now: float
) -> PageInfo:
    """A copy of a page, for those who ask what is where."""
    return PageInfo(
        key=envelope.key.hex(),
        tier=tier,
        owner=node_id,
        tenant=envelope.tenant.hex(),
        root=envelope.root.hex(),
        parent=envelope.parent.hex(),
        variant=envelope.variant,
        depth=envelope.depth,
        tokens=envelope.tokens,
        nbytes=envelope.payload_bytes,
        uses=page.uses,
        idle_s=max(0.0, now - page.last_use),
        pinned=page.pinned,
        readers=readers,
        state=state,
        made_from=envelope.made_from,
    )
