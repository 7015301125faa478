"""The tables that all parts of a coordinator look at. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtier.tier.node.state.misses import Misses, at
from kvtier.tier.node.state.ranking import Histories
from kvtier.tier.node.state.records import Limits, Page, Worker
from kvtier.tier.node.state.shares import Shares
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Policy
from kvtier.tier.protocol.events import PageId, WorkerRef
from kvtier.tier.stores.base import SegmentAllocator
from kvtier.tier.stores.host_slots import HostSlots


class NodeTables:
    """What all parts of a coordinator look at: the pages, the workers, the tiers' allocators, the policy, the time.

    `ssd_variants` are those that go to L4 (None: all). `clears` are those that what is here has been cleared by.
    """

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: str,
        limits: Limits,
        host: HostSlots,
        ssd: SegmentAllocator | None,
        ssd_variants: frozenset[str] | None,
        policy: Policy,
        max_ghosts: int,
        shares: Mapping[bytes, float],
        demotes: bool,
        wall_offset_s: float,
        now: float,
        clears: Clears,
    ) -> None:
        self.node_id, self.incarnation = node_id, incarnation
        self.limits = limits
        self.now = now
        self.wall_offset_s = wall_offset_s
        self.pages: dict[PageId, Page] = {}
        self.variants: Counter[str] = Counter()  # pages of each variant
        self.children: dict[bytes, int] = {}  # pages here whose parent has this key, where there are any
        self.misses = Misses(limits.gone, limits.roots, limits.contents)
        self.clear_epochs = clears
        self.policy = policy
        self.histories: Histories[bytes] = Histories(policy, max_ghosts)
        self.shares = Shares(shares, host.capacity_bytes, 0 if ssd is None else ssd.capacity_bytes)
        self.demotes = demotes
        self.slots = host
        self.ssd = ssd
        self.ssd_variants = ssd_variants
        self.ssd_generation = 0
        self.workers: dict[WorkerRef, Worker] = {}
        self.sizes: Counter[int] = Counter()  # slot size -> live workers that use it
        self.raw_payloads: dict[bytes, int] = {}  # spec digest -> bytes in the model's raw format
        self.exchange: Worker | None = None  # of this node, where there is one that is heard
        self.num_exchanges = 0  # of the workers
        self.draining = False
        self.quiesced = False

    # ---- pages made from others ----------------------------------------------------------------------------

    def original(self, page: Page) -> Page | None:
        """The page that this one was made from, where the node has it and it isn't wanted for itself.

        Where L4 keeps formats of its own, every page is made into those, which says nothing of the original.
        """
        made_from = page.envelope.made_from
        kept = self.ssd_variants
        if made_from in ("", page.id[1]) or (kept is not None and not {made_from, page.id[1]} <= kept):
            return None
        return self.pages.get((page.id[0], made_from))

    def is_converted(self, page: Page) -> bool:
        """Is a page here that was made from this one?"""
        return any(self.original(other) is page for other in self.named(page.envelope.key))

    def goes_to_l4(self, page: Page) -> bool:
        """Whether pages such as this one go to L4."""
        return (
            self.ssd is not None
            and page.slot_bytes <= self.ssd.segment_bytes
            and (self.ssd_variants is None or page.id[1] in self.ssd_variants)
        )

    def live(self) -> list[Worker]:
        return list(self.workers.values())

    def named(self, key: bytes) -> list[Page]:
        """The pages of a key, one per variant."""
        pages = self.pages
        return [page for variant in self.variants if (page := pages.get((key, variant))) is not None]

    def wall(self) -> str:
        return at(self.now + self.wall_offset_s)

    def by_policy(self, page: Page, tier: TierName) -> str:
        if page.host is not None or page.ssd is not None:
            return ""  # it hasn't left the node
        if page.superseded:
            idle_s = max(0.0, self.now - page.last_use)
            return f"evicted from {tier} for a page made from it, idle {idle_s:.1f} s, at {self.wall()}"
        return f"evicted from {tier} by {self.policy.describe(page.row, self.now)}, at {self.wall()}"

    def by_request(self, tier: TierName) -> str:
        return f"evicted from {tier} by request at {self.wall()}"
