"""What a node has under way: loads, writes, fetches, saves on demand, verifications. Pure data."""

from __future__ import annotations

from collections import deque

from kvtier.tier.node.state.fetches import Fetches
from kvtier.tier.node.state.records import (
    Bandwidth,
    Check,
    CopyTime,
    Job,
    Load,
    Page,
    RemoteLoad,
    Saving,
    SsdCopy,
    Write,
)
from kvtier.tier.node.state.tables import NodeTables
from kvtier.tier.pages.page import slot_bytes
from kvtier.tier.protocol.events import PageId


class InFlight:
    """What is on its way: loads from L4, writes to L4, fetches from other nodes, saves on demand, verifications.

    `max_write_bytes` are slots of pages on their way to L4, `max_rising_bytes` of those on their way up.
    """

    def __init__(self, tables: NodeTables, page_bytes: int | None) -> None:
        self._tables = tables
        limits, capacity_bytes = tables.limits, tables.slots.capacity_bytes
        # Bytes of slots in flight; one page more than none may always be.
        self.max_write_bytes = min(limits.write_bytes, capacity_bytes // 2)
        # ... on their way up: a sixteenth of L3, of a small one as much as may be read at once, up to a quarter.
        read_bytes = limits.reads * slot_bytes(page_bytes or 1)
        self.max_promoting_bytes = max(capacity_bytes // 16, min(read_bytes, capacity_bytes // 4))
        self.arriving: dict[int, Load | RemoteLoad] = {}  # by slot
        self.queue: dict[Load, None] = {}
        self.queued_bytes = 0  # payloads of the queued loads
        self.reads: dict[int, Load] = {}
        self.read_bytes = 0  # slots of the reads
        self.promoting_bytes = 0  # slots of the copies that rise
        self.to_write: dict[Page, None] = {}
        self.writes: dict[int, Write] = {}
        self.write_bytes = 0  # slots of the writes
        self.writing: dict[PageId, Write] = {}
        self.leaving: dict[SsdCopy, Page] = {}  # dropped from the catalogue, still being read
        self.fetches = Fetches(limits, capacity_bytes)
        self.saves: dict[PageId, Saving] = {}
        self.jobs: deque[Job] = deque()
        self.checks: dict[int, Check] = {}
        self.bandwidth = Bandwidth()
        self.copy_time = CopyTime()

    def host_load_s(self, size: int) -> float:
        """Seconds that bringing a page up from L3 takes; 0.0 while not measured."""
        return size * self.copy_time.byte_s

    def ssd_load_s(self, size: int) -> float:
        """Seconds that bringing a page up from L4 takes; 0.0 while not measured."""
        bandwidth = self.bandwidth.measured(self._tables.now)
        return 0.0 if bandwidth is None else size / bandwidth + self.host_load_s(size)
