"""What a simulated node is made of: a clock, links that pages go over, and pages without bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from kvtier.tier.pages.page import Envelope, PageKey, RootKey, slot_bytes
from kvtier.tier.protocol.messages import Chain, FetchPage, Locate, Remote, StoredPage

PAYLOAD_BYTES = 4096  # that the coordinator is told; it only ever divides them by seconds
SLOT_BYTES = slot_bytes(PAYLOAD_BYTES)
PAGE_TOKENS = 512
SPEC, ROOT, TENANT, CHECKSUM, VARIANT = b"s" * 16, b"r" * 32, b"t" * 16, b"c" * 16, "bf16"
ENVELOPE = Envelope(
    PageKey(ROOT), VARIANT, SPEC, PAYLOAD_BYTES, CHECKSUM, RootKey(ROOT), ROOT, TENANT, 0, PAGE_TOKENS
)
BATCH = 8  # pages that an exchange says to have stored at once
UNSAVED = 1024  # pages of a worker that wait for slots; more are not saved


class Agenda:
    """What is to happen in virtual time, in order; at one time, as it was put in. Owns the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at that time, or now if it is past."""
        heappush(self._heap, (max(when, self.now), next(self._order), call))

    def step(self) -> bool:
        """The next thing happens; False: there is none."""
        if not self._heap:
            return False
        self.now, _, call = heappop(self._heap)
        call()
        return True


class Link:
    """What carries so many pages at once, in the order they come."""

    def __init__(self, lanes: int = 1) -> None:
        self._free = [0.0] * lanes
        heapify(self._free)

    def take(self, now: float, seconds: float) -> float:
        """When what comes now, and takes so long, is through."""
        end = max(now, self._free[0]) + seconds
        heapreplace(self._free, end)
        return end


@dataclass(frozen=True, slots=True)
class Hardware:
    """Seconds that a page takes, and how many at once. The first are those of src/kvtier/lab/replay/chain_tiers.py's LOAD_S."""

    l3_s: float = 1.3e-3  # L3 to L1; each worker has its own link
    l4_s: float = 11e-3  # read from L4 or written there
    l4_lanes: int = 4  # SSDs of a node
    remote_s: float = 3e-3  # from a node and to one; each has one link
    remote_first_s: float = 1e-3  # before the first page of a fetch


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """Pages of a node's tiers."""

    l3: int
    l4: int


@dataclass(slots=True, eq=False)
class Pull:
    """Pages of one request on their way up. `end` falls where some won't come; `hits` are pages by where they came from."""

    request_id: str
    worker: int
    end: int
    done: Callable[[Pull], None]
    waiting: set[int] = field(default_factory=set)
    came: dict[int, str] = field(default_factory=dict)

    def hits(self) -> dict[str, int]:
        """Pages before the end, by tier."""
        tiers = [tier for page, tier in self.came.items() if page < self.end]
        return {tier: tiers.count(tier) for tier in set(tiers)}


def locate(
    request_id: str, keys: Sequence[bytes], first: int, page_s: float, remotes: list[Remote]
) -> Locate:
    """Asks for a prefix behind its `first` pages; `page_s` is what computing one takes, 0: always load."""
    chain = Chain(list(keys), [], bytes(len(keys)), VARIANT, "", 0, 0, 1, 0, 0, False, SPEC)
    end = PAGE_TOKENS * (first + len(keys))
    return Locate(request_id, ROOT, TENANT, PAGE_TOKENS, first, end, [chain], page_s, b"", remotes)


def stored_page(page: FetchPage, parent: bytes, depth: int) -> StoredPage:
    """A page in a slot."""
    kept = page.grant, page.key, VARIANT, "", SPEC, ROOT, parent, TENANT, depth, PAGE_TOKENS
    return StoredPage(*kept, CHECKSUM, b"")


def segment_slots(pages: int) -> int:
    """Slots of a segment such that no page of the capacity is lost; the more, the less there is to book."""
    return next(slots for slots in range(min(64, max(1, pages // 4)), 0, -1) if pages % slots == 0)
