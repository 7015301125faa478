"""A node's Coordinator in virtual time: its workers ask, take up and bring down pages, and its I/O takes no time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import Envelope, PageKey, RootKey, slot_bytes
from kvtier.tier.policy.base import Costs, PolicySettings, Use
from kvtier.tier.protocol.events import (
    Event,
    FromWorker,
    ReadDone,
    ReadPage,
    Send,
    WorkerRef,
    WriteDone,
    WritePage,
)
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Finished,
    Grant,
    Granted,
    Hello,
    Loaded,
    Locate,
    Located,
    PageRef,
    Stored,
    StoredPage,
    ToNode,
    ToWorker,
    WantSlots,
    WriteMode,
)
from kvtier.tier.stores.base import SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots

PAYLOAD_BYTES = 4096  # of the pages that the Coordinator is told of, which have no bytes
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
PAGE_TOKENS = 16  # likewise: it never sees a token
PARTS = 16  # of L3: pages come down one such part at a time, so that each part is ranked before the next needs slots
SPEC, ROOT, TENANT, CHECKSUM = b"s" * 16, b"r" * 32, b"t" * 16, b"c" * 16
VARIANT = "bf16"
ENVELOPE = Envelope(
    PageKey(ROOT), VARIANT, SPEC, PAYLOAD_BYTES, CHECKSUM, RootKey(ROOT), ROOT, TENANT, 0, PAGE_TOKENS
)


class ChainNode:
    """L3 of `l3` pages and L4 of `l4`, serving `workers`. Pages are known by numbers."""

    def __init__(
        self, settings: PolicySettings, write: WriteMode, l3: int, l4: int, workers: int, costs: Costs
    ) -> None:
        self.coordinator = Coordinator(
            node_id="replay",
            incarnation="1",
            host=HostSlots(l3 * SLOT_BYTES, _segment_slots(l3) * SLOT_BYTES),
            ssd=SegmentAllocator(l4 * SLOT_BYTES, _segment_slots(l4) * SLOT_BYTES) if l4 else None,
            limits=Limits(gone=1, keys_per_locate=1 << 30, persist_every=1 << 30),  # nothing is to outlive it
            policy=settings,
            write=write,
            page_bytes=PAYLOAD_BYTES,
        )
        self.written_pages = 0  # to L4
        self._costs = costs
        self.now = 0.0  # of all that happens; its driver sets it
        self._keys: list[bytes] = []
        self._reads: deque[ReadPage] = deque()
        self._writes: deque[WritePage] = deque()
        self._up: list[PageRef] = []  # pages that are leased and not yet copied
        self._located = Located("", 0, [], [], None)
        self._grants: list[Grant] = []
        self._part = max(1, l3 // PARTS)
        self._refs = [WorkerRef(f"w{number}", "1") for number in range(workers)]
        for ref in self._refs:
            sizes = {SPEC: PAYLOAD_BYTES}
            hello = Hello.of_worker(ref.worker_id, "1", sizes, sizes, {}, write)
            self._tell(FromWorker(ref, hello))

    def take_up(self, worker: int, first: int, ids: Sequence[int]) -> tuple[int, int]:
        """Bring up what a prefix has here behind its first `first` pages: pages from L3, and from L4."""
        keys = self._keys_of(ids)[first:]
        chain = Chain(keys, [], bytes(len(keys)), VARIANT, "", 0, 0, PAGE_TOKENS, 0, 0, False)
        end = PAGE_TOKENS * len(ids)
        self._say(worker, Locate("r", ROOT, TENANT, PAGE_TOKENS, first, end, [chain], 0.0))
        located = self._located
        self._up += [page.page for page in located.host]
        self._copy(worker)
        while self._reads or self._writes:
            self._end_one()
            self._copy(worker)
        return len(located.host), len(located.loading)

    def finished(self, worker: int, ids: Sequence[int], use: Use) -> None:
        """A request is over."""
        message = Finished(
            "r",
            [self._keys_of(ids)],
            use.new_pages,
            use.output_tokens,
            int(use.kind),
            use.turn,
            use.session,
            use.closed,
            use.open,
            0.0,
            self._costs.page_s,
            self._costs.double_pages,
        )
        self._say(worker, message)
        self._settle()

    def bring_down(self, worker: int, pages: Sequence[tuple[int, int | None, int]]) -> None:
        """Store pages (number, its parent's, depth) in L3, in this order."""
        done = 0
        while done < len(pages):
            self._say(worker, WantSlots(min(self._part, len(pages) - done), PAYLOAD_BYTES))
            self._settle()
            grants, self._grants = self._grants, []
            assert grants, "L3 has no slot, though nothing is in flight"
            part = pages[done : done + len(grants)]
            self._say(worker, Stored([self._stored(*one) for one in zip(grants, part, strict=True)]))
            self._settle()
            done += len(grants)

    def numbers(self) -> set[int]:
        """The pages that L3 or L4 holds."""
        pages = self.coordinator.admin.pages(None, None, 1 << 60, self.now)
        return {int.from_bytes(bytes.fromhex(page.key), "little") for page in pages}

    def check(self) -> None:
        """The Coordinator's tables agree, and it waits for nothing."""
        self.coordinator.check()
        assert self.coordinator.is_idle and not (self._up or self._grants)

    def _keys_of(self, ids: Sequence[int]) -> list[bytes]:
        keys = self._keys
        for number in range(len(keys), max(ids, default=-1) + 1):
            keys.append(number.to_bytes(32, "little"))
        return [keys[number] for number in ids]

    def _stored(self, grant: Grant, page: tuple[int, int | None, int]) -> StoredPage:
        number, parent, depth = page
        above = ROOT if parent is None else self._keys[parent]
        return StoredPage(
            grant,
            self._keys[number],
            VARIANT,
            "",
            SPEC,
            ROOT,
            above,
            TENANT,
            depth,
            PAGE_TOKENS,
            CHECKSUM,
            b"",
        )

    def _say(self, worker: int, message: ToNode) -> None:
        self._tell(FromWorker(self._refs[worker], message))

    def _tell(self, event: Event) -> None:
        for command in self.coordinator.handle(event, self.now):
            match command:
                case Send():
                    self._hear(command.message)
                case ReadPage():
                    self._reads.append(command)
                case WritePage():
                    self._writes.append(command)
                case _:
                    pass

    def _hear(self, message: ToWorker) -> None:
        match message:
            case Located():
                self._located = message
            case Loaded():
                self._up += [page.page for page in message.pages]
            case Granted():
                self._grants += message.grants
            case _:
                pass

    def _settle(self) -> None:
        """All I/O ends."""
        while self._reads or self._writes:
            self._end_one()

    def _end_one(self) -> None:
        """The read that was asked for first ends, or the write."""
        if self._reads:
            self._tell(ReadDone(self._reads.popleft().transfer, ENVELOPE))
        else:
            self.written_pages += 1
            self._tell(WriteDone(self._writes.popleft().transfer))

    def _copy(self, worker: int) -> None:
        """The worker copies what is leased to it, before anything else goes on."""
        if self._up:
            up, self._up = self._up, []
            self._say(worker, Copied("r", up, 0, 0.0))


def _segment_slots(pages: int) -> int:
    """Slots of a segment such that no page of the capacity is lost; the more, the less there is to book."""
    return next(slots for slots in range(min(64, max(1, pages // 4)), 0, -1) if pages % slots == 0)
