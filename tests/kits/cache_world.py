"""A world for the coordinator to act in: workers, slots and a disk as plain dicts, which distrust every command.

It carries commands out when told to, keeps what each slot truly holds, and asserts that no command or message lets two
parties use one slot, reads what isn't there, or offers a worker another page than the one it asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import ALIGN_BYTES, Envelope, TierName, slot_bytes
from kvtier.tier.pages.recipe import HAS_DECAYED, HAS_WRITTEN, ChainNeeds
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol import ipc
from kvtier.tier.protocol.events import (
    Answer,
    BeginClear,
    CatchUp,
    Clear,
    Command,
    CommitCatalogue,
    Continue,
    Disconnect,
    Event,
    Failure,
    ForgetTenant,
    FromWorker,
    HintWrong,
    HoldsChanged,
    MarkClear,
    Note,
    PageId,
    ReadDone,
    ReadFailed,
    ReadPage,
    SaveRoots,
    SaveStored,
    Send,
    StoredBefore,
    Verified,
    VerifyPage,
    WipeSlots,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.protocol.messages import (
    Arena,
    ArenaGone,
    CancelFetch,
    Chain,
    Copied,
    Fetch,
    Fetched,
    FetchPage,
    Finished,
    FramesGranted,
    Grant,
    Granted,
    Hello,
    HostPage,
    Lend,
    LentFrame,
    LentPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    PageRef,
    PeerGrant,
    PeerPage,
    RecallFrames,
    Reclaim,
    Reclaimed,
    Refused,
    Release,
    Remote,
    ReturnFrames,
    SavePages,
    Stored,
    StoredInPeer,
    StoredPage,
    ToNode,
    ToWorker,
    Unsaved,
    WantSlots,
    Welcome,
    WriteMode,
)
from kvtier.tier.protocol.rules import needs_of
from kvtier.tier.stores.base import CatalogueEntry, Outcome, Place, SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots, host_slots

PAYLOAD_BYTES = 4096
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
BF16, FP8, INT4C = "bf16", "fp8_e4m3", "int4c"
Kind = tuple[int, str]  # layer group and variant: what has a size of its own
ONE_SIZE: dict[Kind, int] = {(0, BF16): PAYLOAD_BYTES}
FIELDS = {"weights": "w", "epoch": "0"}
ROOT = b"r" * 32
PAGE_TOKENS = 16
LRU = PolicySettings(name="lru")


_MADE: dict[bytes, tuple[str, str, int]] = {}  # the key of a page -> its tenant, path and layer group


def digest(*parts: object, size: int = 32) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=size).digest()


def tenant_of(name: str) -> bytes:
    return digest("tenant", name, size=16)


def key_of(tenant: str, path: str, group: int = 0) -> bytes:
    """A chain is a path such as "abba", a page one of its prefixes."""
    key = digest("page", tenant, path, *([group] if group else []))
    _MADE[key] = (tenant, path, group)
    return key


def chain_keys(tenant: str, path: str, group: int = 0) -> list[bytes]:
    return [key_of(tenant, path[: i + 1], group) for i in range(len(path))]


def spec_of(kind: Kind) -> bytes:
    return digest("spec", kind, size=16)


def checksum_of(key: bytes, variant: str = BF16) -> bytes:
    return digest("sum", key, variant, size=16)


def hello_of(
    name: str,
    incarnation: str,
    payloads: dict[Kind, int],
    fields: dict[str, str] = FIELDS,
    brings_down: bool = False,
) -> Hello:
    """A worker whose pages have these sizes; unquantized they would take twice as much."""
    sizes = {spec_of(kind): nbytes for kind, nbytes in payloads.items()}
    raw = {spec: 2 * nbytes for spec, nbytes in sizes.items()}
    return Hello(name, incarnation, sizes, raw, fields, brings_down)


def stored_page(
    grant: Grant,
    tenant: str,
    path: str,
    *,
    kind: Kind = (0, BF16),
    made_from: str = "",
    root: bytes = ROOT,
    content: bytes = b"",
) -> StoredPage:
    """The last page of a chain."""
    group, variant = kind
    key = key_of(tenant, path, group)
    depth = len(path) - 1
    return StoredPage(
        grant=grant,
        key=key,
        variant=variant,
        made_from=made_from,
        spec_digest=spec_of(kind),
        root=root,
        parent=key_of(tenant, path[:-1], group) if depth else root,
        tenant=tenant_of(tenant),
        depth=depth,
        tokens=PAGE_TOKENS,
        checksum=checksum_of(key, variant),
        content=content if depth == 0 else b"",
    )


def chain_of(
    keys: list[bytes],
    *,
    variant: str = BF16,
    decayed: str = "",
    recent: int = 0,
    sinks: int = 0,
    stride: int = PAGE_TOKENS,
    window: int = 0,
    window_sinks: int = 0,
    any_variant: bool = False,
    held: bytes = b"",
    other_keys: list[bytes] | None = None,
    spec: bytes = b"",
) -> Chain:
    """A chain of a Locate; a plain one unless told otherwise."""
    held = held or bytes(len(keys))
    return Chain(
        keys,
        other_keys or [],
        held,
        variant,
        decayed,
        recent,
        sinks,
        stride,
        window,
        window_sinks,
        any_variant,
        spec,
    )


def can_serve(need: ChainNeeds, present: bytes, pages: int, position: int, page_tokens: int) -> bool:
    """The rule of tier/pages/recipe.py, page by page: do these pages serve rows from `position` on?"""
    return all(
        present[page] & wanted_bits(need, page, position, page_tokens)
        for page in range(pages)
        if need.window.needs(page, position, page_tokens)
    )


def wanted_bits(need: ChainNeeds, page: int, position: int, page_tokens: int) -> int:
    """The bits of presence any of which will do."""
    wanted = need.recipe.format_at(page, position, page_tokens)
    exact = wanted is need.recipe.write and not need.any_variant
    return HAS_WRITTEN if exact else HAS_WRITTEN | HAS_DECAYED


@dataclass(eq=False)
class SimWorker:
    ref: WorkerRef
    payloads: dict[Kind, int]
    grants: list[Grant] = field(default_factory=list)
    asked: dict[str, Locate] = field(default_factory=dict)  # request -> its latest Locate
    leases: dict[str, dict[PageRef, HostPage]] = field(default_factory=dict)
    coming: dict[str, set[PageRef]] = field(default_factory=dict)
    messages: list[ToWorker] = field(default_factory=list)
    # Of an exchange: its fetches under way, with the pages that have not come, and those nothing waits for.
    fetches: dict[int, tuple[Fetch, list[FetchPage]]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    # Of one that lends or borrows: its own frames that are lent, and those that are granted to it or it reads.
    lent: dict[int, int] = field(default_factory=dict)
    asked_back: set[int] = field(default_factory=set)
    stock: list[PeerGrant] = field(default_factory=list)
    recalled: list[PeerGrant] = field(default_factory=list)
    arenas: set[str] = field(default_factory=set)
    peer_leases: dict[str, dict[PageRef, PeerPage]] = field(default_factory=dict)
    knows: dict[bytes | None, int] = field(default_factory=dict)  # clears that it has heard of
    asked_in_clear: set[str] = field(
        default_factory=set
    )  # requests whose latest Locate came while their tenant was cleared
    to_save: dict[PageId, None] = field(
        default_factory=dict
    )  # that another node asks for, and it owes a word on

    def knows_of(self, tenant: bytes) -> int:
        """The number of the latest clear of a tenant that it has heard of."""
        return max(self.knows.get(tenant, 0), self.knows.get(None, 0))

    @property
    def is_exchange(self) -> bool:
        return self.ref.worker_id.startswith("exchange:")


class World:
    def __init__(
        self,
        num_slots: int,
        ssd_slots: int,
        limits: Limits | None = None,
        recovered: list[CatalogueEntry] | None = None,
        disk: dict[Place, PageId] | None = None,
        segment_slots: int = 2,
        lost: list[CatalogueEntry] | None = None,
        roots: tuple[tuple[bytes, dict[str, str]], ...] = (),
        stored_before: StoredBefore | None = None,
        payloads: dict[Kind, int] = ONE_SIZE,
        host_segment_slots: int | None = None,
        ssd_variants: frozenset[str] | None = None,
        policy: PolicySettings = LRU,
        write: WriteMode = "through",
        shares: Mapping[str, float] | None = None,
        directory: bool = True,
    ) -> None:
        """`num_slots`, `ssd_slots` and segments in slots of the largest of `payloads`."""
        self.now = 100.0
        self.payloads = payloads
        self.host: dict[int, PageId] = {}  # slot -> the page whose bytes lie in it
        self.spans: dict[int, int] = {}  # slot -> units of ALIGN_BYTES of what was last put there
        self.peers: dict[tuple[str, int], PageId] = {}  # lender and offset -> the page whose bytes lie there
        self.bad: set[int] = set()  # slots of L3 whose page was found corrupt
        self.disk: dict[Place, PageId] = dict(disk or {})
        self.catalogue: dict[PageId, CatalogueEntry] = {}
        self.workers: dict[WorkerRef, SimWorker] = {}
        self.reads: deque[ReadPage] = deque()
        self.checks: deque[VerifyPage] = deque()
        self.writer: deque[WritePage | CommitCatalogue | WipeSlots | MarkClear | ForgetTenant] = deque()
        # What was made before its tenant's latest clear: slots of L3 that nothing may be leased, places in L4 to be wiped.
        self.cleared_slots: set[int] = set()
        self.cleared_frames: set[tuple[str, int]] = set()  # the same in L2, by lender and offset
        self.to_wipe: set[Place] = set()
        self.number = 0  # of the latest clear that has one
        self.applied: dict[bytes | None, int] = {}  # tenant -> number of the clear that the node has heard of
        self.clearing: set[tuple[bytes | None, int]] = set()  # clears that have begun, with their numbers
        self.to_catch_up: deque[tuple[bytes, int]] = deque()
        self.answers: dict[int, tuple[tuple[bytes, Outcome], ...]] = {}
        self.notes: list[str] = []
        self.wrong: list[tuple[str, bytes]] = []  # what the directory heard that a node has not
        self.saved_roots: tuple[tuple[bytes, dict[str, str]], ...] = ()
        self.saved_before = StoredBefore()
        self.ticket = 0
        self._asked: dict[int, int] = {}  # generation of a grant -> the place of its page in its Fetch
        largest = slot_bytes(max(payloads.values()))
        allocator = SegmentAllocator(ssd_slots * largest, segment_slots * largest) if ssd_slots else None
        if host_segment_slots is None:
            slots = host_slots(num_slots * largest, largest)
        else:
            slots = HostSlots(num_slots * largest, host_segment_slots * largest)
        for entry in recovered or []:
            assert allocator is not None and allocator.take(entry.place, entry.slot_bytes)
            self.catalogue[entry.envelope.key, entry.envelope.variant] = entry
        self.node = Coordinator(
            node_id="n0",
            incarnation="i",
            host=slots,
            ssd=allocator,
            ssd_variants=ssd_variants,
            recovered=recovered or [],
            lost=lost or [],
            roots=roots,
            stored_before=stored_before,
            wall_offset_s=1e9,
            now=self.now,
            limits=limits,
            policy=policy,
            write=write,
            shares={tenant_of(tenant): share for tenant, share in (shares or {}).items()},
            page_bytes=max(payloads.values()),
            directory=directory,
        )
        self.node.check()
        self.told = {
            tier: set(keys) for tier, keys in self.node.admin.holds().items()
        }  # as a directory knows it

    def applied_of(self, tenant: bytes) -> int:
        """The number of the latest clear of a tenant that the node has heard of."""
        return max(self.applied.get(tenant, 0), self.applied.get(None, 0))

    def _clear_begins(self, tenant: bytes | None, number: int) -> None:
        self.clearing.add((tenant, number))
        self.applied[tenant] = max(number, self.applied.get(tenant, 0))

    def is_clearing(self, tenant: bytes) -> bool:
        """Whether a clear of a tenant has begun and is not over."""
        return any(whose in (None, tenant) for whose, _ in self.clearing)

    def _is_cleared(self, tenant: bytes | None, number: int) -> None:
        self.clearing.discard((tenant, number))
        self._is_of_before(tenant)

    def _is_of_before(self, tenant: bytes | None) -> None:
        """All that is here of a tenant now must never be found again, and what L4 has of it must be wiped."""

        def is_its(page: PageId) -> bool:
            return tenant is None or (page[0] in _MADE and tenant == tenant_of(_MADE[page[0]][0]))

        self.cleared_slots |= {slot for slot, page in self.host.items() if is_its(page)}
        self.cleared_frames |= {frame for frame, page in self.peers.items() if is_its(page)}
        in_l4 = {
            (bytes.fromhex(i.key), i.variant) for i in self.node.admin.pages(None, TierName.SSD, 10**9, 0.0)
        }
        self.to_wipe |= {self.catalogue[page].place for page in in_l4 if is_its(page)}
        self.to_wipe |= {read.place for read in self.reads if is_its((read.key, read.variant))}
        self.to_wipe |= {
            order.entry.place
            for order in self.writer
            if isinstance(order, WritePage) and tenant in (None, order.entry.envelope.tenant)
        }

    def _are_from_before(self, pages: Iterable[StoredPage]) -> None:
        """Pages by a worker that hasn't heard of a clear of their tenant are from before it."""
        self.cleared_slots |= {p.grant.slot for p in pages if p.cleared < self.applied_of(p.tenant)}

    # ---- events into the coordinator ---------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        if isinstance(event, BeginClear):
            self._clear_begins(event.tenant, event.number)
        if isinstance(event, Clear):
            self._clear_begins(event.tenant, event.number)
            self._is_cleared(event.tenant, event.number)
        commands = self.node.handle(event, self.now)
        for command in commands:
            self._obey(command)
        self.node.check()
        holds = [command.tier for command in commands if isinstance(command, HoldsChanged)]
        assert len(set(holds)) == len(holds), "a tier is told of twice"
        assert self.told == {tier: set(keys) for tier, keys in self.node.admin.holds().items()}

    def say(self, worker: SimWorker, message: ToNode) -> list[ToWorker]:
        """A worker speaks, in what the node's socket lets through; what it hears back at once."""
        worker.messages.clear()
        known = self.node.tables.workers.get(worker.ref)
        for tenant, number in _told(message) if known is not None and not known.fenced else ():
            if number > self.applied_of(tenant):
                self._clear_begins(tenant, number)
        if isinstance(message, Locate):
            worker.asked_in_clear.discard(message.request_id)
            if self.is_clearing(message.tenant):
                worker.asked_in_clear.add(message.request_id)
        (heard,) = ipc.MessageReader(ToNode).feed(ipc.frame(message))
        self.tell(FromWorker(worker.ref, heard))  # type: ignore[arg-type]  # the decoder's union
        return list(worker.messages)

    def connect(
        self,
        name: str = "w0",
        incarnation: str = "1",
        fields: dict[str, str] | None = None,
        payloads: dict[Kind, int] | None = None,
        brings_down: bool = True,
        arena_bytes: int = 0,
        saves: bool = False,
    ) -> SimWorker:
        worker = SimWorker(WorkerRef(name, incarnation), self.payloads if payloads is None else payloads)
        self.workers[worker.ref] = worker
        own = FIELDS if fields is None else fields
        hello = hello_of(name, incarnation, worker.payloads, own, brings_down)
        hello = msgspec.structs.replace(hello, arena_bytes=arena_bytes, saves_when_asked=saves)
        replies = self.say(worker, hello)
        assert [type(reply) for reply in replies] == [Welcome] + [Arena] * len(worker.arenas)
        return worker

    def connect_exchange(self, node_id: str = "n0", incarnation: str = "1") -> SimWorker:
        """The exchange of a node; that of "n0" is the one that fetches for this node."""
        exchange = SimWorker(WorkerRef(f"exchange:{node_id}", incarnation), {})
        self.workers[exchange.ref] = exchange
        hello = Hello(exchange.ref.worker_id, incarnation, {}, {}, {}, role="exchange")
        assert [type(reply) for reply in self.say(exchange, hello)] == [Welcome]
        return exchange

    def die(self, worker: SimWorker) -> None:
        del self.workers[worker.ref]
        for frame in [frame for frame in self.peers if frame[0] == worker.ref.incarnation]:
            del self.peers[frame]
        self.tell(WorkerGone(worker.ref))
        for other in self.workers.values():
            assert worker.ref.incarnation not in other.arenas, "nothing told of a lender that is gone"

    # ---- L2 ------------------------------------------------------------------------------------------------------

    def lend(self, worker: SimWorker, offsets: Iterable[int], nbytes: int = PAYLOAD_BYTES) -> None:
        """A worker lends frames, those of `offsets` (in frames of that size) that it hasn't lent already."""
        spans = [(offset * nbytes, nbytes) for offset in offsets]
        frames = [
            LentFrame(at, size)
            for at, size in spans
            if all(
                at + size <= other or other + other_size <= at for other, other_size in worker.lent.items()
            )
        ]
        worker.lent.update({frame.offset: frame.nbytes for frame in frames})
        self.say(worker, Lend(frames))

    def reclaim(self, worker: SimWorker, offsets: Iterable[int]) -> None:
        wanted = [offset for offset in offsets if offset in worker.lent]
        worker.asked_back.update(wanted)
        self.say(worker, Reclaim(wanted))

    def store_in_peers(self, worker: SimWorker, pages: Iterable[tuple[str, str]], **wrong: Any) -> int:
        """Copy the last page of each chain (tenant, path) into a frame of the stock, as far as that goes; how many."""
        lent = []
        for (tenant, path), grant in zip(pages, list(worker.stock), strict=False):
            worker.stock.remove(grant)
            key = key_of(tenant, path)
            self.peers[grant.lender, grant.offset] = (key, BF16)
            known = worker.knows_of(tenant_of(tenant))
            page = LentPage(grant, key, BF16, spec_of((0, BF16)), checksum_of(key), PAGE_TOKENS, known)
            if known < self.applied_of(tenant_of(tenant)):
                self.cleared_frames.add((grant.lender, grant.offset))
            else:
                self.cleared_frames.discard((grant.lender, grant.offset))
            lent.append(msgspec.structs.replace(page, **wrong))
        worker.recalled = [grant for grant in worker.recalled if grant in worker.stock]
        self.say(worker, StoredInPeer(lent))
        return len(lent)

    def return_frames(self, worker: SimWorker, grants: Iterable[PeerGrant]) -> None:
        given = list(grants)
        worker.stock = [grant for grant in worker.stock if grant not in given]
        worker.recalled = [grant for grant in worker.recalled if grant not in given]
        self.say(worker, ReturnFrames(given))

    def copied_from_peers(
        self, worker: SimWorker, request: str, pages: Iterable[int], corrupt: Iterable[int] = ()
    ) -> None:
        refs = [(0, page) for page in pages]
        for ref in refs:
            worker.peer_leases[request].pop(ref, None)
        self.say(
            worker, Copied(request, refs, len(refs) * PAYLOAD_BYTES, 0.001, [(0, page) for page in corrupt])
        )

    def _use_frame(self, grant: PeerGrant) -> None:
        """A frame is about to be written by others than before: nothing may use it."""
        frame = grant.lender, grant.offset
        for worker in self.workers.values():
            assert all((g.lender, g.offset) != frame for g in worker.stock), "a granted frame is given away"
            for leases in worker.peer_leases.values():
                read = [(page.grant.lender, page.grant.offset) for page in leases.values()]
                assert frame not in read, "a leased frame is given away"
        self.peers.pop(frame, None)

    def _lease_peer(self, worker: SimWorker, request: str, page: PeerPage) -> None:
        asked = worker.asked[request]
        assert request not in worker.asked_in_clear, "a page is looked up while its tenant is being cleared"
        frame = page.grant.lender, page.grant.offset
        assert frame not in self.cleared_frames, "a page from before its tenant's clear is served"
        assert page.grant.lender in worker.arenas, "a page in an arena that the worker doesn't know"
        assert page.grant.lender != worker.ref.incarnation, "a worker reads its own frames"
        assert page.key == asked.chains[page.page[0]].keys[page.page[1] - asked.first_page]
        assert self.peers[page.grant.lender, page.grant.offset] == (page.key, page.variant), (
            "the frame holds another page"
        )
        assert page.checksum == checksum_of(page.key, page.variant)
        worker.peer_leases[request][page.page] = page

    def want(self, worker: SimWorker, count: int, kind: Kind = (0, BF16)) -> None:
        self.say(worker, WantSlots(count, self.payloads[kind]))

    def store(
        self,
        worker: SimWorker,
        tenant: str,
        path: str,
        *,
        first: int = 0,
        hold_for: str | None = None,
        content: bytes = b"",
        root: bytes = ROOT,
        kind: Kind = (0, BF16),
        made_from: str = "",
    ) -> int:
        """Store the pages of a chain from `first` on, as far as the worker's stock goes; how many."""
        pages = []
        for depth in range(first, len(path)):
            grant = next((g for g in worker.grants if g.payload_bytes == self.payloads[kind]), None)
            if grant is None:
                break
            worker.grants.remove(grant)
            page = stored_page(
                grant, tenant, path[: depth + 1], kind=kind, made_from=made_from, root=root, content=content
            )
            page = msgspec.structs.replace(page, cleared=worker.knows_of(page.tenant))
            self.fill(grant, (page.key, page.variant))
            pages.append(page)
        self._are_from_before(pages)
        self.say(worker, Stored(pages, hold_for))
        return len(pages)

    def save_asked(self, worker: SimWorker, count: int, root: bytes = ROOT) -> int:
        """Store the first pages that the worker is asked for, as far as its stock goes; how many."""
        pages = []
        for page_id in list(worker.to_save)[:count]:
            tenant, path, group = _MADE[page_id[0]]
            kind = group, page_id[1]
            grant = next((g for g in worker.grants if g.payload_bytes == worker.payloads[kind]), None)
            if grant is None:
                break
            worker.grants.remove(grant)
            del worker.to_save[page_id]
            self.fill(grant, page_id)
            page = stored_page(grant, tenant, path, kind=kind, root=root)
            pages.append(msgspec.structs.replace(page, cleared=worker.knows_of(page.tenant)))
        self._are_from_before(pages)
        self.say(worker, Stored(pages))
        return len(pages)

    def refuse_asked(self, worker: SimWorker, count: int) -> None:
        """The worker has not the first pages that it is asked for."""
        pages = list(worker.to_save)[:count]
        for page_id in pages:
            del worker.to_save[page_id]
        self.say(worker, Unsaved(pages))

    def locate(
        self,
        worker: SimWorker,
        request: str,
        tenant: str,
        path: str,
        *,
        recompute_s: float = 0.0,
        content: bytes = b"",
        root: bytes = ROOT,
        first: int = 0,
        chains: list[Chain] | None = None,
        last_position: int | None = None,
        remotes: Iterable[tuple[str, int]] = (),
    ) -> Located:
        """Look a chain up, or several (`chains`; their keys are the caller's to cut at `first`)."""
        if chains is None:
            chains = [chain_of(chain_keys(tenant, path)[first:], spec=spec_of((0, BF16)))]
        if last_position is None:
            last_position = PAGE_TOKENS * (first + len(chains[0].keys))
        locate = Locate(
            request, root, tenant_of(tenant), PAGE_TOKENS, first, last_position, chains, recompute_s, content,
            [Remote(node_id, f"{node_id}:1", pages) for node_id, pages in remotes],
        )  # fmt: skip
        locate = msgspec.structs.replace(locate, cleared=worker.knows_of(locate.tenant))
        worker.asked[request] = locate
        worker.leases[request] = {}
        worker.peer_leases[request] = {}
        worker.coming[request] = set()
        self._present = [self._presence(worker, locate, number) for number in range(len(chains))]
        heard = self.say(worker, locate)
        (located,) = [m for m in heard if isinstance(m, Located)]
        return located

    def _presence(self, worker: SimWorker, locate: Locate, number: int) -> bytes:
        """The HAS_ bits of all pages of the sequence, by what the node says it holds of what the worker can read."""
        chain = locate.chains[number]
        here = {
            (bytes.fromhex(i.key), i.variant)
            for i in self.node.admin.pages(locate.tenant, None, 10**9, self.now)
            if i.state == "sealed"
            and (
                i.root == locate.root.hex() and not i.made_from
                if worker.is_exchange
                else (number, i.variant) in worker.payloads
            )
        }
        bits = bytearray(chain.held)
        for i, key in enumerate(chain.keys):
            for name in (key, *chain.other_keys[i : i + 1]):
                bits[i] |= HAS_WRITTEN if (name, chain.variant) in here else 0
                bits[i] |= HAS_DECAYED if chain.decayed and (name, chain.decayed) in here else 0
        return bytes((HAS_WRITTEN | HAS_DECAYED,)) * locate.first_page + bytes(bits)

    def copied(
        self,
        worker: SimWorker,
        request: str,
        pages: Iterable[int | PageRef],
        corrupt: Iterable[int | PageRef] = (),
    ) -> None:
        """Pages by their place in the sequence are those of the first chain."""
        refs = [page if isinstance(page, tuple) else (0, page) for page in pages]
        bad = [page if isinstance(page, tuple) else (0, page) for page in corrupt]
        nbytes = 0
        for ref in refs:
            page = worker.leases[request].pop(ref, None)
            if page is not None:
                nbytes += page.grant.payload_bytes
                if ref in bad:
                    self.bad.add(page.grant.slot)
        self.say(worker, Copied(request, refs, nbytes, 0.001, bad))

    def finished(
        self,
        worker: SimWorker,
        tenant: str,
        path: str,
        *,
        groups: int = 1,
        new_pages: int = 1,
        kind: int = 0,
        session: int = 0,
        closed: bool = False,
        seconds: float = 0.0,
        costs: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """A request for a chain is over."""
        keys = [chain_keys(tenant, path, group) for group in range(groups)]
        page_s, double_pages = costs
        self.say(
            worker,
            Finished("r", keys, new_pages, 8, kind, 0, session, closed, False, seconds, page_s, double_pages),
        )

    def arrive(self, exchange: SimWorker, fetch_id: int, count: int = 1, **wrong: Any) -> None:
        """The next pages of a fetch come; `wrong` are fields of the first one that aren't as asked for."""
        fetch, pages = exchange.fetches[fetch_id]
        came = [pages.pop(0) for _ in range(min(count, len(pages)))]
        stored = []
        for page in came:
            tenant, path, group = _MADE[page.key]
            one = stored_page(
                page.grant, tenant, path, kind=(group, page.variant), root=fetch.root, content=b""
            )
            assert (one.key, one.spec_digest, one.tenant) == (page.key, page.spec_digest, fetch.tenant)
            assert one.depth == fetch.first_page + self._asked[page.grant.generation]
            one = msgspec.structs.replace(one, **(wrong if page is came[0] else {}))
            self.fill(page.grant, (one.key, one.variant))
            stored.append(one)
        self.say(exchange, Stored(stored))

    def end_fetch(
        self, exchange: SimWorker, fetch_id: int, reason: str = "", failed: int = 0, is_over: bool = True
    ) -> None:
        """The next `failed` pages of a fetch won't come, and if it is over, none that hasn't."""
        fetch, pages = exchange.fetches[fetch_id]
        lost = [pages.pop(0) for _ in range(min(failed, len(pages)))]
        if is_over:
            del exchange.fetches[fetch_id]
            exchange.cancelled.discard(fetch_id)
        keys = [(page.key, page.variant) for page in lost]
        came = len(fetch.pages) - len(pages) - len(lost)
        nbytes = sum(page.grant.payload_bytes for page in fetch.pages[:came])
        self.say(exchange, Fetched(fetch_id, keys, reason, "simulated", nbytes, 0.001, is_over))

    def release(self, worker: SimWorker, request: str, from_page: int = 0) -> None:
        leases, coming = worker.leases.get(request, {}), worker.coming.get(request, set())
        peers = worker.peer_leases.get(request, {})
        for ref in [ref for ref in peers if ref[1] >= from_page]:
            del peers[ref]
        for ref in [ref for ref in leases if ref[1] >= from_page]:
            del leases[ref]
        coming -= {ref for ref in coming if ref[1] >= from_page}
        self.say(worker, Release(request, from_page))

    def ask(self, make: type, *args: object) -> int:
        self.ticket += 1
        self.tell(make(self.ticket, *args))
        return self.ticket

    # ---- the I/O, one piece at a time --------------------------------------------------------------------------

    def finish_read(self, failure: Failure | None = None, which: int = 0) -> None:
        self.reads.rotate(-(which % len(self.reads)))
        read = self.reads.popleft()
        self.now += 0.001
        found = self.disk.get(read.place)
        if failure is not None:
            self.tell(ReadFailed(read.transfer, failure, f"simulated {failure}"))
        elif found != (read.key, read.variant):
            self.tell(ReadFailed(read.transfer, "missing", "the slot holds another page"))
        else:
            self._fill(read.slot, read.payload_bytes, found)
            if read.place in self.to_wipe:
                self.cleared_slots.add(read.slot)
            self.tell(ReadDone(read.transfer, self.catalogue_envelope(read)))

    def catalogue_envelope(self, read: ReadPage) -> Envelope:
        """The envelope as it lies in the slot; its record may be dropped already."""
        return Envelope(
            read.key, read.variant, b"s" * 16, read.payload_bytes, checksum_of(read.key, read.variant), ROOT, ROOT,
            b"t" * 16, 0, PAGE_TOKENS,
        )  # type: ignore[arg-type]  # fmt: skip

    def finish_write(self, failure: Failure | None = None) -> None:
        """The writer's next order, whatever it is."""
        order = self.writer.popleft()
        match order:
            case CommitCatalogue():
                for page in order.drops:
                    self.catalogue.pop(page, None)
                for entry in order.puts:
                    assert (entry.envelope.key, entry.envelope.variant) in self.catalogue, (
                        "uses of a dropped page"
                    )
                    self.catalogue[entry.envelope.key, entry.envelope.variant] = entry
            case WipeSlots():
                for place in order.places:
                    assert all(e.place != place for e in self.catalogue.values()), "a listed slot is wiped"
                    self.disk.pop(place, None)
                    self.to_wipe.discard(place)
            case MarkClear() | ForgetTenant():
                pass
            case WritePage():
                place = order.entry.place
                page = (order.entry.envelope.key, order.entry.envelope.variant)
                assert all(e.place != place for e in self.catalogue.values()), "a listed slot is overwritten"
                assert all(read.place != place for read in self.reads), (
                    "a slot is overwritten while it is read"
                )
                assert self.host[order.slot] == page, "the slot to write from holds another page"
                assert order.entry.slot_bytes == slot_bytes(order.entry.envelope.payload_bytes)
                if order.slot in self.bad:
                    failure = "corrupt"
                if failure is not None:
                    if failure == "corrupt":
                        self.bad.add(order.slot)
                    self.disk.pop(place, None)
                    self.tell(WriteFailed(order.transfer, failure, f"simulated {failure}"))
                else:
                    self.disk[place] = page
                    self.catalogue[page] = order.entry
                    self.tell(WriteDone(order.transfer))

    def finish_check(self, failure: Failure | None = None) -> None:
        check = self.checks.popleft()
        page = (check.envelope.key, check.envelope.variant)
        held = self.host.get(check.place.index) if check.tier is TierName.HOST else self.disk.get(check.place)
        assert held == page, "verification reads a slot that holds another page"
        if check.tier is TierName.HOST:
            if check.place.index in self.bad:
                failure = "corrupt"
            if failure is not None:
                self.bad.add(check.place.index)
        self.tell(Verified(check.transfer, failure, "simulated"))

    def finish_all(self) -> None:
        """All I/O, and all that it entails."""
        while self.reads or self.writer or self.checks or self.node.has_more:
            if self.node.has_more:
                self.tell(Continue())
            while self.writer:
                self.finish_write()
            while self.checks:
                self.finish_check()
            if self.reads:
                self.finish_read()

    def finish_fetches(self) -> bool:
        """All pages that are being fetched come; whether there were any."""
        running = [(e, number) for e in self.workers.values() if e.is_exchange for number in e.fetches]
        for exchange, number in running:
            self.arrive(exchange, number, len(exchange.fetches[number][1]))
            self.end_fetch(exchange, number)
        return bool(running)

    def finish_writes(self) -> None:
        """All that the writer has to do."""
        while self.writer:
            self.finish_write()

    def settle(self) -> None:
        """Workers copy what they get at once, as they promise; the I/O goes on: nothing is left waiting."""
        progress = True
        while progress:
            self.finish_all()
            progress = self.finish_fetches()
            for worker in list(self.workers.values()):
                if worker.to_save:
                    progress = True
                    self.refuse_asked(worker, len(worker.to_save))
                for request in list(worker.leases):
                    if worker.leases[request]:
                        progress = True
                        self.copied(worker, request, list(worker.leases[request]))
                    if worker.peer_leases[request]:
                        self.copied_from_peers(
                            worker, request, [page for _, page in worker.peer_leases[request]]
                        )
        for worker in self.workers.values():
            assert not any(worker.coming.values()), "a load never came"

    # ---- commands ----------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        match command:
            case Send():
                worker = self.workers.get(command.worker)
                assert worker is not None, "a message to a worker that is gone"
                self._hear(worker, command.message)
            case Disconnect() | SaveRoots() | SaveStored() | Note():
                if isinstance(command, Note):
                    self.notes.append(command.text)
                if isinstance(command, SaveRoots):
                    self.saved_roots = command.roots
                if isinstance(command, SaveStored):
                    self.saved_before = command.before
            case ReadPage():
                self._take_over(command.slot, command.payload_bytes)
                self.reads.append(command)
            case VerifyPage():
                self.checks.append(command)
            case WritePage() | CommitCatalogue() | WipeSlots() | MarkClear() | ForgetTenant():
                self.writer.append(command)
            case Answer():
                self.answers[command.ticket] = command.results
            case HoldsChanged():
                assert not set(command.came) & set(command.left)
                self.told[command.tier] |= set(command.came)
                self.told[command.tier] -= set(command.left)
            case CatchUp():
                self.to_catch_up.append((command.tenant, command.number))
            case HintWrong():
                self.wrong.append((command.node_id, command.key))

    def _hear(self, worker: SimWorker, message: ToWorker) -> None:
        worker.messages.append(message)
        match message:
            case Granted():
                assert len({grant.payload_bytes for grant in message.grants}) <= 1
                for grant in message.grants:
                    self._take_over(grant.slot, grant.payload_bytes)
                    worker.grants.append(grant)
            case Located():
                for page in message.host:
                    self._lease(worker, message.request_id, page)
                for lent in message.peer:
                    self._lease_peer(worker, message.request_id, lent)
                worker.coming[message.request_id] = set(message.loading)
                self._judge(worker.asked[message.request_id], message)
            case Loaded():
                for page in message.pages:
                    worker.coming[message.request_id].remove(page.page)
                    self._lease(worker, message.request_id, page)
            case LoadFailed():
                coming = worker.coming[message.request_id]
                peers = worker.peer_leases[message.request_id]
                assert any(page == message.missing.page for _, page in (*coming, *peers))
                for ref in [ref for ref in peers if peers[ref].grant.lender not in self._alive()]:
                    del peers[ref]
                coming -= {ref for ref in coming if ref[1] >= message.missing.page}
            case SavePages():
                assert message.pages and not worker.is_exchange
                worker.to_save.update(dict.fromkeys(message.pages))
            case Fetch():
                self._fetch(worker, message)
            case CancelFetch():
                assert message.fetch_id in worker.fetches and message.fetch_id not in worker.cancelled
                worker.cancelled.add(message.fetch_id)
            case Arena():
                worker.arenas.add(message.lender)
            case ArenaGone():
                worker.arenas.remove(message.lender)
                worker.stock = [grant for grant in worker.stock if grant.lender != message.lender]
                worker.recalled = [grant for grant in worker.recalled if grant.lender != message.lender]
            case FramesGranted():
                for peer in message.grants:
                    assert peer.lender in worker.arenas and peer.lender != worker.ref.incarnation
                    self._use_frame(peer)
                    worker.stock.append(peer)
            case RecallFrames():
                assert all(grant in worker.stock for grant in message.grants)
                worker.recalled += message.grants
            case Reclaimed():
                for offset in message.offsets:
                    self._use_frame(PeerGrant(worker.ref.incarnation, offset, 0, 0))
                    worker.asked_back.remove(offset)
                    del worker.lent[offset]
            case Welcome() | Refused():
                pass

    def _alive(self) -> set[str]:
        return {worker.ref.incarnation for worker in self.workers.values()}

    def _fetch(self, exchange: SimWorker, fetch: Fetch) -> None:
        """Pages to fetch are asked for once, and follow each other in a chain that begins where it is said to."""
        assert exchange.ref.worker_id == "exchange:n0" and fetch.node_id != "n0"
        assert fetch.address == f"{fetch.node_id}:1" and 0 < len(fetch.pages) <= self.node.limits.fetch_pages
        assert fetch.fetch_id not in exchange.fetches
        assert fetch.cleared == self.applied_of(fetch.tenant), (
            "another node is asked for less than what is known"
        )
        under_way = [
            p.key for f, pages in exchange.fetches.values() for p in pages if f.node_id == fetch.node_id
        ]
        for number, page in enumerate(fetch.pages):
            tenant, path, _ = _MADE[page.key]
            assert len(path) - 1 == fetch.first_page + number and tenant_of(tenant) == fetch.tenant
            assert not number or _MADE[fetch.pages[number - 1].key][1] == path[:-1], "not one chain"
            assert page.key not in under_way or exchange.cancelled, "a page is fetched twice"
            self._take_over(page.grant.slot, page.grant.payload_bytes)
            self._asked[page.grant.generation] = number
        exchange.fetches[fetch.fetch_id] = (fetch, list(fetch.pages))

    def _judge(self, asked: Locate, located: Located) -> None:
        """The prefix has what it needs, nothing else comes, and no longer one was to be had."""
        end = asked.first_page + len(asked.chains[0].keys)
        assert (located.missing is None) == (located.pages == end)
        assert located.missing is None or located.missing.page == located.pages
        position = min(located.pages * PAGE_TOKENS, asked.last_position)
        lacking = {
            (number, page)
            for number, chain in enumerate(asked.chains)
            for page in range(asked.first_page, located.pages)
            if needs_of(chain).window.needs(page, position, PAGE_TOKENS)
            and not chain.held[page - asked.first_page]
            & wanted_bits(needs_of(chain), page, position, PAGE_TOKENS)
        }
        there = [page.page for page in (*located.host, *located.peer)] + located.loading
        assert len(set(there)) == len(there) and set(there) == lacking, "not what the prefix needs"
        if (
            located.missing is not None
            and located.missing.reason in ("costlier", "no_room", "cache_off")
            or (self.is_clearing(asked.tenant))
        ):
            return
        for pages in range(located.pages + 1, end + 1):
            position = min(pages * PAGE_TOKENS, asked.last_position)
            served = zip(asked.chains, self._present, strict=True)
            assert not all(can_serve(needs_of(c), p, pages, position, PAGE_TOKENS) for c, p in served)

    def _lease(self, worker: SimWorker, request: str, page: HostPage) -> None:
        asked = worker.asked[request]
        number, index = page.page
        chain = asked.chains[number]
        index -= asked.first_page
        keys = (chain.keys[index], *chain.other_keys[index : index + 1])
        assert page.key in keys and page.variant in (chain.variant, chain.decayed), "a page nothing asked for"
        assert self.host[page.grant.slot] == (page.key, page.variant), "the slot holds another page"
        assert page.grant.slot not in self.bad, "a corrupt copy is served again"
        assert request not in worker.asked_in_clear, "a page is looked up while its tenant is being cleared"
        assert page.grant.slot not in self.cleared_slots, "a page from before its tenant's clear is served"
        assert page.checksum == checksum_of(page.key, page.variant)
        of = self.payloads if worker.is_exchange else worker.payloads
        sizes = {spec_of(kind): nbytes for kind, nbytes in of.items()}
        assert sizes[page.spec_digest] == page.grant.payload_bytes, "a page of a spec the worker doesn't know"
        worker.leases[request][page.page] = page

    def fill(self, grant: Grant, page: PageId) -> None:
        """A worker writes a page into a granted slot."""
        self._fill(grant.slot, grant.payload_bytes, page)

    def _fill(self, slot: int, payload_bytes: int, page: PageId) -> None:
        self.cleared_slots.discard(slot)
        self.host[slot] = page
        self.spans[slot] = slot_bytes(payload_bytes) // ALIGN_BYTES

    def _take_over(self, slot: int, payload_bytes: int) -> None:
        """These bytes are about to be overwritten: nothing may use any of them."""
        units = range(slot, slot + slot_bytes(payload_bytes) // ALIGN_BYTES)

        def overlaps(other: int, nbytes: int) -> bool:
            return other < units.stop and units.start < other + slot_bytes(nbytes) // ALIGN_BYTES

        for worker in self.workers.values():
            for grant in worker.grants:
                assert not overlaps(grant.slot, grant.payload_bytes), "a granted slot is given away"
            for leases in worker.leases.values():
                for page in leases.values():
                    assert not overlaps(page.grant.slot, page.grant.payload_bytes), (
                        "a leased slot is given away"
                    )
            for _, pages in worker.fetches.values():
                for coming in pages:
                    assert not overlaps(coming.grant.slot, coming.grant.payload_bytes), (
                        "a slot that a page is fetched into is given away"
                    )
        for read in self.reads:
            assert not overlaps(read.slot, read.payload_bytes), "two transfers into one slot"
        for write in self.writer:
            if isinstance(write, WritePage):
                assert not overlaps(write.slot, write.entry.envelope.payload_bytes), "a source is overwritten"
        for check in self.checks:
            if check.tier is TierName.HOST:
                assert not overlaps(check.place.index, check.envelope.payload_bytes)
        for old in [old for old in self.host if old < units.stop and units.start < old + self.spans[old]]:
            del self.host[old], self.spans[old]
            self.bad.discard(old)

    # ---- what is where, by the world's own book ----------------------------------------------------------------

    def held(self, tier: TierName) -> set[PageId]:
        """What the coordinator says a tier holds; checked against what is truly there."""
        infos = self.node.admin.pages(None, tier, 10**9, self.now)
        pages = {(bytes.fromhex(i.key), i.variant) for i in infos if i.state == "sealed"}
        if tier is TierName.HOST:
            assert pages <= set(self.host.values())
        if tier is TierName.PEER:
            assert pages <= set(self.peers.values())
        return pages


def _told(message: ToNode) -> list[tuple[bytes, int]]:
    """Tenants that a message is about, with the clears that its sender has heard of."""
    if isinstance(message, Locate):
        return [(message.tenant, message.cleared)]
    return [(page.tenant, page.cleared) for page in message.pages] if isinstance(message, Stored) else []


def assert_nothing_leaks(world: World) -> None:
    """All workers go, all pages too, and L3 is empty."""
    for worker in list(world.workers.values()):
        world.die(worker)
    world.finish_all()
    world.ask(Clear, None)
    world.finish_all()
    assert world.node.is_idle
    assert world.node.snapshot().tiers[TierName.HOST].used_bytes == 0
