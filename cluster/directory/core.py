"""Decides what the directory believes: who holds which pages, as they say it themselves. Pure: hears no clock, no network.

All of it is soft state. A source is asked for a snapshot when its batches have a gap, or when nothing is known of
it; who isn't heard of is not named any more. What a lookup says is a hint, and a wrong one costs a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvtier.cluster.directory.hash_table import Keys
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.directory.table import DirectoryTable, Run, leading
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import KEY_BYTES, Batch, Change, Reply, Source

LEASE_S = 10.0  # a source is named in lookups until it wasn't heard of for so long
FORGET_S = 60.0  # and then forgotten
MAX_SOURCES = 4096
MAX_HELD = 512  # holders in one answer, those with the longest prefixes

# A source takes two blocks of holder numbers at most: one of what it has, one that a snapshot fills meanwhile.
TIERS = (TierName.HBM, TierName.PEER, TierName.HOST, TierName.SSD)
BLOCK = len(TIERS)
_PLACE = {tier: place for place, tier in enumerate(TIERS)}
_L2, _L3 = _PLACE[TierName.PEER], _PLACE[TierName.HOST]


@dataclass(frozen=True, slots=True)
class HolderStats:
    """One source. `is_whole` when no snapshot of it is awaited, `silent_s` since it was heard of last."""

    name: str
    node_id: str
    worker_id: str
    address: str
    is_whole: bool
    silent_s: float


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """Counts since the directory began, and what it has now."""

    entries: int
    nbytes: int
    holder_sets: int
    holders: tuple[HolderStats, ...]
    lookups: int
    batches: int
    snapshots_asked: int
    refused_pages: int  # for which there was no room
    refused_batches: int  # of sources for which there was none
    wrong_pages: int


@dataclass(slots=True)
class _Teller:
    """What is known of one source."""

    source: Source
    block: int  # of holder numbers
    heard_s: float
    arriving: int | None = None  # the block that a snapshot fills, whose end is awaited
    next_number: int | None = None  # None: a batch was missed, and only one that opens a snapshot is taken


class DirectoryCore:
    """Owned by its caller. `now` is monotonic and never goes back.

    At most `max_entries` pages and `max_sources` sources are kept; what is more is refused and counted.
    """

    def __init__(self, max_entries: int = 16_000_000, max_sources: int = MAX_SOURCES) -> None:
        self._table = DirectoryTable(max_entries)
        self._max_sources = max_sources
        self._tellers: OrderedDict[str, _Teller] = OrderedDict()  # by name; the one heard of last is last
        self._by_block: dict[int, _Teller] = {}
        self._free: list[int] = []  # blocks, a heap: low numbers make short sets
        self._next_block = 0
        self._l2s = self._l3s = 0  # the bits of all blocks for these tiers
        self._lookups = self._batches = self._asked = self._refused = self._wrong = 0

    # ---- sources -------------------------------------------------------------------------------------------------

    def publish(self, batch: Batch, now: float) -> Reply:
        """A source tells. "snapshot": it must tell all again, its next batch one that `opens`.

        Raises ValueError for keys that aren't a whole number of KEY_BYTES, or of a tier that nothing tells of.
        """
        self._batches += 1
        changes = [
            (_place(change), parse_keys(change.came), parse_keys(change.left)) for change in batch.changes
        ]
        self._forget(now)
        teller = self._tellers.get(batch.source.name)
        if teller is None and len(self._tellers) >= self._max_sources:
            self._refused += 1
            return "ok"  # there will be no room for its snapshot either
        if teller is not None and teller.source == batch.source:
            teller.heard_s = now
            self._tellers.move_to_end(batch.source.name)
        if teller is None or teller.source != batch.source:
            if not batch.opens:
                return self._ask()
            teller = self._meet(batch.source, now)
        if teller.next_number is not None and batch.number < teller.next_number:
            return "ok"  # it came before
        if batch.opens:
            self._open(teller)
        elif batch.number != teller.next_number:
            teller.next_number = None
            return self._ask()
        teller.next_number = batch.number + 1
        for place, came, left in changes:
            self._change(teller, place, came, left)
        if batch.closes:
            self._close(teller)
        return "ok"

    def _ask(self) -> Reply:
        self._asked += 1
        return "snapshot"

    def _meet(self, source: Source, now: float) -> _Teller:
        """A source, or a new life of one: what the old one had is gone."""
        known = self._tellers.get(source.name)
        if known is not None:
            self._free_blocks(*_blocks(known))
        teller = _Teller(source, self._take_block(), now)
        self._tellers[source.name] = self._by_block[teller.block] = teller
        self._tellers.move_to_end(source.name)
        return teller

    def _open(self, teller: _Teller) -> None:
        """A snapshot fills a block of its own; until it ends, what was there before it is believed too."""
        if teller.arriving is not None:
            self._free_blocks(teller.arriving)
        teller.arriving = self._take_block()
        self._by_block[teller.arriving] = teller

    def _change(self, teller: _Teller, place: int, came: Keys, left: Keys) -> None:
        filled = teller.block if teller.arriving is None else teller.arriving
        self._table.add(BLOCK * filled + place, came)
        for block in {teller.block, filled}:
            self._table.remove(BLOCK * block + place, left)

    def _close(self, teller: _Teller) -> None:
        if teller.arriving is not None:
            old, teller.block, teller.arriving = teller.block, teller.arriving, None
            self._free_blocks(old)

    def _forget(self, now: float) -> None:
        blocks: list[int] = []  # all in one go: that costs a pass over the table
        while self._tellers:
            name, teller = next(iter(self._tellers.items()))
            if now - teller.heard_s <= FORGET_S:
                break
            blocks += _blocks(teller)
            del self._tellers[name]
        self._free_blocks(*blocks)

    # ---- blocks of holder numbers --------------------------------------------------------------------------------

    def _take_block(self) -> int:
        if self._free:
            return heappop(self._free)
        block, self._next_block = self._next_block, self._next_block + 1
        self._l2s |= 1 << (BLOCK * block + _L2)
        self._l3s |= 1 << (BLOCK * block + _L3)
        return block

    def _free_blocks(self, *blocks: int) -> None:
        if blocks:
            self._table.drop(sum(((1 << BLOCK) - 1) << BLOCK * block for block in blocks))
        for block in blocks:
            del self._by_block[block]
            heappush(self._free, block)

    # ---- questions -----------------------------------------------------------------------------------------------

    def lookup(self, keys: bytes, now: float) -> list[Held]:
        """Who has the first of these pages, whose keys' prefixes (KEY_BYTES each) follow each other; the longest first.

        Raises ValueError for bytes that aren't a whole number of prefixes.
        """
        self._lookups += 1
        self._forget(now)
        runs = [(self._with_faster(bits), end) for bits, end in self._table.runs(parse_keys(keys))]
        best: dict[tuple[str, int], int] = {}  # of a source's two blocks, while a snapshot goes on
        for holder, pages in leading(_joined(runs)).items():
            block, place = divmod(holder, BLOCK)
            teller = self._by_block[block]
            name = teller.source.name, place
            if now - teller.heard_s <= LEASE_S and pages > best.get(name, 0):
                best[name] = pages
        longest = sorted(best.items(), key=lambda item: -item[1])[:MAX_HELD]
        return [self._held(name, place, pages) for (name, place), pages in longest]

    def _held(self, name: str, place: int, pages: int) -> Held:
        source = self._tellers[name].source
        return Held(source.node_id, source.worker_id, TIERS[place], source.address, pages)

    def _with_faster(self, bits: int) -> int:
        """The holders of a page: a node's tier that has it, and those slower ones that are named with it."""
        bits |= (bits & self._l2s) << 1
        return bits | (bits & self._l3s) << 1

    def wrong(self, node_id: str, tier: TierName | None, keys: bytes) -> None:
        """A node said that it doesn't have these pages in a tier, or (None) in none but its workers' L1.

        Raises ValueError as `lookup` does.
        """
        pages = parse_keys(keys)
        self._wrong += len(pages)
        places = [_PLACE[tier]] if tier is not None else [p for p in range(BLOCK) if TIERS[p] != TierName.HBM]
        for block, teller in self._by_block.items():
            if teller.source.node_id == node_id:
                for place in places:
                    self._table.remove(BLOCK * block + place, pages)

    def stats(self, now: float) -> DirectoryStats:
        """What there is, and what happened so far."""
        holders = [
            HolderStats(
                name=name,
                node_id=teller.source.node_id,
                worker_id=teller.source.worker_id,
                address=teller.source.address,
                is_whole=teller.arriving is None and teller.next_number is not None,
                silent_s=max(0.0, now - teller.heard_s),
            )
            for name, teller in sorted(self._tellers.items())
        ]
        return DirectoryStats(
            entries=len(self._table),
            nbytes=self._table.nbytes,
            holder_sets=self._table.num_sets,
            holders=tuple(holders),
            lookups=self._lookups,
            batches=self._batches,
            snapshots_asked=self._asked,
            refused_pages=self._table.refused_pages,
            refused_batches=self._refused,
            wrong_pages=self._wrong,
        )

    def check(self) -> None:
        """Re-derive what can be; AssertionError where it differs."""
        self._table.check()
        blocks = {block: teller for teller in self._tellers.values() for block in _blocks(teller)}
        assert blocks == self._by_block, "blocks of no source"
        assert sorted([*blocks, *self._free]) == list(range(self._next_block)), "blocks lost, or in two roles"


def _blocks(teller: _Teller) -> list[int]:
    return [teller.block] if teller.arriving is None else [teller.block, teller.arriving]


def parse_keys(prefixes: bytes) -> Keys:
    """Prefixes of keys, KEY_BYTES each, as the numbers that the table knows."""
    if len(prefixes) % KEY_BYTES:
        raise ValueError(
            f"keys must be {KEY_BYTES} bytes each, the first ones of the key; got {len(prefixes)} bytes"
        )
    return np.frombuffer(prefixes, "<u8").astype(np.uint64, copy=False)


def _place(change: Change) -> int:
    place = _PLACE.get(change.tier)
    if place is None:
        raise ValueError(f"nothing tells of tier {change.tier}: use one of {', '.join(TIERS)}")
    return place


def _joined(runs: list[Run]) -> list[Run]:
    """Runs with equal sets behind each other, as one."""
    joined: list[Run] = []
    for bits, end in runs:
        if joined and joined[-1][0] == bits:
            joined.pop()
        joined.append((bits, end))
    return joined
