"""The cached pages of one worker's L1: allocates frames, evicts, and serves an administrator's verbs. Pure.

Pages of plain sequences lie in radix trees, those of all others in a pool. Pure: copies nothing, reads no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType

import numpy as np

from kvtier.tier.l1.prefix import Path, PrefixIndex
from kvtier.tier.pages.identity import TokenIds
from kvtier.tier.pages.page import PageFormat, PageKey, RootKey
from kvtier.tier.policy.base import Candidates, Lru, Policy, Row, Use, Victim
from kvtier.workers.paging.frames import Frames, Op, PageRecord, SaveState
from kvtier.workers.paging.ghosts import EXPLAINED, MOST, Ghost, Ghosts
from kvtier.workers.paging.page_pool import PagePool
from kvtier.workers.paging.ranks import Leaves, Ranks
from kvtier.workers.requests.sequence import Sequence

# Pages that go together, in an L1 of thousands, where choosing several costs little more than choosing one: not by Lru.
AT_ONCE = 8
MARGIN_PARTS = 8  # a margin is made whole when so large a part of it is missing, by many pages at once
NO_SHARES: Mapping[bytes, float] = MappingProxyType({})


class PageCache:
    """Owned by the step loop; `now` never goes back. `groups` are the bytes of a page by format, by layer group.

    Room for a page is made, in this order: a free place; a slab of another size whose pages fit elsewhere, which move;
    the cached page of any size that the policy values least. So no size can keep a slab that another needs, and what
    counts as held is all that can stand in a request's way. A tenant with a share below 1 gives its own pages first
    while more of L1 than that is its.

    `can_save` is the worker's to set: pages can be saved below L1. Where they aren't saved before they must leave,
    `watermark_bytes` of L1 are either free or chosen to be evicted (`choose_to_evict`), and pages that were dropped early are `due` to be saved. A page
    that was loaded from below has the state `save_loaded`: DIRTY where the node's copy of it is evicted first, since
    the page is then saved when it leaves (`Hello.brings_down`).
    """

    def __init__(
        self,
        num_units: int,
        unit_bytes: int,
        page_tokens: int,
        groups: tuple[Mapping[PageFormat, int], ...],
        policy: Policy | None = None,
        shares: Mapping[bytes, float] = NO_SHARES,
    ) -> None:
        """`shares` of L1 are by the digest of a tenant. The policy is Lru by default."""
        self.page_tokens = page_tokens
        self.groups = groups
        self.policy = policy or Lru()
        self.frames = Frames(num_units, unit_bytes, [nbytes for group in groups for nbytes in group.values()])
        self._ranks = Ranks(self.policy, shares, num_units * unit_bytes)
        self.index = PrefixIndex(page_tokens, self.policy)
        self.wire()
        self.pool = PagePool(self.policy, self._ranks)
        capacity = num_units // self.frames.slabs.sizes[-1]
        self.ghosts = Ghosts(self.policy, min(MOST, max(EXPLAINED, int(self.policy.ghosts * capacity))))
        self.pinned: dict[PageKey, Path | list[PageRecord]] = {}  # by an administrator
        self.evicted_pages = 0
        self.dropped_pages = 0  # that had left a stream's window, or been converted
        self.converted_pages = 0
        self.can_save = False
        self.watermark_bytes = 0
        self.save_loaded = SaveState.CLEAN
        self.due: list[PageRecord] = []  # since they were asked for last
        # Keys of pages that came or left since they were taken out (`take_changes`); None: nothing does.
        self.touched: dict[PageKey, None] | None = None
        self.must_wait = False  # room that was asked for last is there once copies end, or in the next step
        self.lent_wanted = False  # in this step something waits for frames that are lent
        self.lent_overdue = False  # they have been asked for long ago: nothing waits for them any more
        self._now = 0.0  # while pages leave the index
        self._max_pins = capacity // 2
        self._at_once = 1 if isinstance(self.policy, Lru) else min(AT_ONCE, 1 + capacity // 256)
        self._formats = tuple({format for group in groups for format in group})
        self._in_tree: dict[PageKey, PageRecord] = {}
        self._in_trees: tuple[PageFormat, int] | None = None  # format and size of pages in the radix trees
        self._holding: dict[Sequence, None] = {}  # those whose pages must be followed where they move
        self._users: Counter[RootKey] = Counter()  # sequences that give pages to a tree or take them from it
        self._tenants: dict[RootKey, bytes] = {}  # of trees with users
        # To be evicted as soon as nothing holds them; in order, so that another process goes through them alike.
        self._doomed: dict[PageKey, None] = {}
        self._dead: set[RootKey] = set()  # cleared trees that still have users

    def wire(self) -> None:
        """Connects the index and the policy with this cache."""
        self.index.wire(self._leaves_of_tree, self._bury_run)

    # What is here

    @property
    def counts(self) -> Counter[tuple[int, PageFormat]]:
        """Cached pages by layer group and format."""
        counts = +self.pool.counts
        if self._in_trees is not None and self.index.num_pages:
            counts[0, self._in_trees[0]] += self.index.num_pages
        return counts

    @property
    def distinct(self) -> Counter[int]:
        """Cached pages by layer group, each once in whatever formats it is here."""
        distinct = +self.pool.distinct
        if self.index.num_pages:
            distinct[0] += self.index.num_pages
        return distinct

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self.frames.slabs.num_units * self.frames.unit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames that aren't free."""
        return self.frames.slabs.used_units * self.frames.unit_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of the frames that the worker's peers use."""
        return self.frames.lent_units * self.frames.unit_bytes

    @property
    def limbo(self) -> int:
        """Frames without a holder that a copy keeps from being free."""
        return self.frames.limbo

    @property
    def copies_in_flight(self) -> int:
        """Copies from or into frames; 0 when idle."""
        return self.frames.copies_in_flight

    def start_copy(self, frame: int) -> None:
        """Begins a copy from or into a frame: it is neither freed nor moved before `end_copy`."""
        self.frames.start_copy(frame)

    def end_copy(self, frame: int) -> None:
        """Ends a copy."""
        self.frames.end_copy(frame)

    def copies_of(self, frame: int) -> int:
        """Copies from or into the frame under way."""
        return self.frames.copies_of(frame)

    @property
    def has_ops(self) -> bool:
        """True if `take_ops` would return any."""
        return self.frames.has_ops

    def take_ops(self) -> list[Op]:
        """Returns the operations on frames that must run, in this order, before anything else touches them."""
        return self.frames.take_ops()

    def record(self, frame: int) -> PageRecord | None:
        """Returns the cached page in a frame; None if there is none."""
        return self.frames.records.get(frame)

    def records_in(self, frames: list[int]) -> list[PageRecord]:
        """Returns those of these frames that hold cached pages."""
        records = self.frames.records
        return [records[frame] for frame in frames if frame in records]

    def is_cached(self, record: PageRecord) -> bool:
        """Returns whether the page is still cached."""
        return self.frames.records.get(record.frame) is record

    def records_of(self, key: PageKey) -> list[PageRecord]:
        """Returns the cached pages of a key, one for each format."""
        if key in self._in_tree:
            return [self._in_tree[key]]
        return [record for format in self._formats if (record := self.pool.get(key, format)) is not None]

    def has(self, key: PageKey) -> bool:
        """Returns whether a page of this key is cached, in any format."""
        return bool(self.records_of(key))

    def keys(self) -> list[PageKey]:
        """Of all pages that can be found."""
        return list(dict.fromkeys([*self._in_tree, *(key for key, _ in self.pool.pages)]))

    def take_changes(self) -> tuple[list[PageKey], list[PageKey]]:
        """Of the pages that came or left since the last time, those that can be found now, and those that can't."""
        if not self.touched:
            return [], []
        touched, self.touched = self.touched, {}
        found = {key: self.has(key) for key in touched}
        return [key for key in found if found[key]], [key for key in found if not found[key]]

    def cached(self) -> Iterator[tuple[PageRecord, bool]]:
        """Every cached page, and whether anyone holds it."""
        for page in self.index.pages():
            yield self.frames.records[page.frame], page.pinned
        for record in self.pool.pages.values():
            yield record, self.frames.is_held(record.frame)

    def is_held(self, record: PageRecord) -> bool:
        """Returns whether a cached page has a holder, as `cached` does."""
        if record.is_pooled:
            return self.frames.is_held(record.frame)
        return self.index.is_in_use(self.index.match(record.tree, self._chain_tokens(record)).node)

    # Room

    def size_of(self, group: int, format: PageFormat) -> int:
        """Returns a page's size in units."""
        return self.frames.units(self.groups[group][format])

    def has_room(self, missing: Mapping[int, int]) -> bool:
        """Returns whether so many more pages, by size in units, fit beside all held pages."""
        slabs = self.frames.slabs
        pages = Counter(slabs.used)
        pages.update(missing)
        pages.subtract(self.evictable())
        return slabs.can_hold(pages)

    def take(self, group: int, format: PageFormat, count: int, now: float) -> list[int]:
        """At most `count` frames for one holder. Pages of other sizes may move, the given frames can't meanwhile."""
        size = self.size_of(group, format)
        self.must_wait = False
        taken = self.frames.take(size, count)
        while len(taken) < count and self._make_room(size, count - len(taken), now):
            taken += self.frames.take(size, count - len(taken))
        return taken

    def wait_for_lent(self) -> bool:
        """Asks for lent frames. Returns whether room will come by that."""
        if not self.frames.lent or self.lent_overdue:
            return False
        self.lent_wanted = True
        return True

    def evictable(self) -> Counter[int]:
        """Cached pages that nothing holds, by size in units."""
        pages: Counter[int] = Counter()
        for nbytes, count in self.pool.evictable.items():
            pages[self.frames.units(nbytes)] += count
        if self._in_trees is not None:
            pages[self._in_trees[1]] += self.index.evictable_pages
        return pages

    def take_back(self, frames: Iterable[int]) -> None:
        """Takes back lent frames that peers no longer read or write."""
        self.frames.take_back(frames)
        self.lent_overdue = False

    def borrow(self, group: int, format: PageFormat, now: float) -> int | None:
        """Returns a frame without a holder, with a copy into it begun; it is free again when the copy ends. None without room."""
        taken = self.take(group, format, 1, now)
        if not taken:
            return None
        self.frames.start_copy(taken[0])
        self.frames.let_go(taken[0])
        return taken[0]

    def drop(self, frame: int, now: float) -> None:
        """Removes a holder of a frame."""
        record = self.frames.records.get(frame)
        if self.frames.let_go(frame) and record is not None and record.is_pooled:
            if record.key in self._doomed:
                self._uncache(record, now)
                if not self.has(record.key):
                    self._doomed.pop(record.key, None)
            elif record.leaves and not self._must_be_saved(record):
                self._leave(record, now)
            else:
                self.pool.unheld(record, now)
                if record.leaves and self.watermark_bytes:
                    self.due.append(record)

    def hold(self, record: PageRecord) -> None:
        """Adds a holder to a page of the pool."""
        self.frames.hold(record.frame)
        self.pool.held(record)

    def release_pooled(
        self, records: list[PageRecord], use: Use, now: float, *, only_last: bool = False
    ) -> None:
        """A request is about to drop these pages of the pool that it used, head first; see PrefixIndex.unpin."""
        shared = [record for record in records if self.frames.holders_of(record.frame) > 1]
        if only_last:
            records = [record for record in records if self.frames.holders_of(record.frame) == 1]
        self.pool.release(records, use, now)
        self.pool.begin(shared, now)

    def start_save(self, record: PageRecord) -> None:
        """Begins to save a page."""
        record.save = SaveState.SAVING
        self.start_copy(record.frame)

    def saved(self, record: PageRecord, is_written: bool, now: float) -> bool:
        """Ends a save. Returns whether the page is still cached: it may have stayed only to be saved."""
        if not self.is_cached(record):
            return False
        record.save = SaveState.CLEAN if is_written else SaveState.DIRTY
        if record.leaves and not self.frames.is_held(record.frame) and not self._must_be_saved(record):
            self._leave(record, now)
            return False
        return True

    def cache_in_pool(self, record: PageRecord, created: int, now: float) -> None:
        """The page, in a frame that something holds, can be found from now on. Its request brings `created` new ones."""
        self._cache(record)
        row = self.ghosts.pop(record.key, record.nbytes, now)
        record.row = self.policy.add(1, record.depth, record.nbytes, created, now) if row is None else row
        self.pool.add(record)

    def cache_in_tree(self, record: PageRecord) -> None:
        """The page, which the index has, can be found from now on, unless its tree is dead."""
        self._cache(record)
        if self._in_trees is None:
            self._in_trees = record.format, self.frames.units(record.nbytes)
        if record.tree not in self._dead:
            self._in_tree[record.key] = record

    def _make_room(self, size: int, missing: int, now: float) -> bool:
        other = self.frames.slabs.surplus(size)
        if other is None:
            return self._evict(missing, now)
        moved = self.frames.empty_slab(other)
        if moved is None and self.lent_overdue:
            return self._evict(missing, now)
        if moved is None:
            self.must_wait = True
            self.wait_for_lent()  # the slab may be a lent one that has come back in part
            return False
        self.index.follow(moved)
        for seq in self._holding:
            for pages in seq.groups:
                pages.follow(moved)
            if seq.load is not None:
                seq.load.parts = {part: moved.get(frame, frame) for part, frame in seq.load.parts.items()}
        return True

    def _evict(self, missing: int, now: float) -> bool:
        """Evicts the page with the lowest value. Returns False if every cached page is held."""
        spent = self._ranks.spent()
        if spent is not None:
            self._uncache(spent, now)
            return True
        is_only_size = len(self.frames.slabs.sizes) == 1
        aside = self._next_aside(SaveState.CLEAN) or self._next_aside(SaveState.DIRTY)
        if aside is None:
            victims = self._ranks.victims(max(missing, self._at_once) if is_only_size else 1, now)
            for victim in victims:
                self._drop_victim(victim, now)
            if victims:
                return True
            aside = self._next_aside(SaveState.SAVING)
        if aside is not None:
            leaves, victim = aside
            self._drop_victim(victim, now)
            if victim.row in leaves:  # more of the run is here
                leaves.discard(victim.row)
                leaves.add(victim.row)
        return aside is not None

    def _drop_victim(self, victim: Victim, now: float) -> None:
        record = self.pool.by_row(victim.row)
        if record is None:
            self._now = now
            self._uncache_tree(self.index.evict_run(victim).frames)
        else:
            self._uncache(record, now)

    def _records_of_victim(self, victim: Victim) -> list[PageRecord]:
        record = self.pool.by_row(victim.row)
        return self.records_in(self.index.frames_of(victim)) if record is None else [record]

    # What leaves next

    @property
    def is_below_watermark(self) -> bool:
        """True if `choose_to_evict` has enough to choose to be worth calling."""
        slack = self.watermark_bytes // (MARGIN_PARTS * self._largest_bytes)
        return bool(self.watermark_bytes) and self._pages_below_watermark() > slack

    def choose_to_evict(self, now: float) -> list[PageRecord]:
        """Chooses pages to evict until they and the free frames make `watermark_bytes`. Returns them.

        They leave before all others, those first that have a copy below by then; one that is used meanwhile stays.
        """
        chosen: list[PageRecord] = []
        while (pages := self._pages_below_watermark()) > 0:
            victims = self._next_to_set_aside(pages, now)
            if not victims:
                break
            for victim in victims:
                records = self._records_of_victim(victim)
                nbytes = sum(record.nbytes for record in records)
                leaves = self._ranks.of(records[0].tenant).leaves
                leaves.choose_to_evict(victim, nbytes, is_all=victim.pages == self._pages_of(victim.row))
                chosen += records
        return chosen

    def node_came(self, *, can_save: bool) -> None:
        """Marks all pages unsaved, for a node that has connected, and forgets which were chosen to be evicted."""
        self.can_save = can_save
        for record, _ in self.cached():
            if record.save is SaveState.CLEAN:
                record.save = SaveState.DIRTY
        self._ranks.put_back()

    def _pages_below_watermark(self) -> int:
        missing = self.watermark_bytes - (self.capacity_bytes - self.used_bytes) - self._ranks.aside_bytes
        return -(-missing // self._largest_bytes)

    @property
    def _largest_bytes(self) -> int:
        return self.frames.slabs.sizes[-1] * self.frames.unit_bytes

    def _next_to_set_aside(self, pages: int, now: float) -> list[Victim]:
        """Returns the span with the lowest value, the rest of one whose end is chosen included."""
        victims = self._ranks.victims(pages, now)
        least = self.policy.value(victims[0].row, now) if victims else inf
        for row, aside in self._ranks.partly_aside():
            value, longest = self.policy.value(row, now), self._pages_of(row)
            if longest > aside and (value <= least or not victims):
                least, victims = value, [Victim(row, min(longest, aside + pages))]
        return victims

    def _pages_of(self, row: Row) -> int:
        return self.index.pages_of(row) if self.pool.by_row(row) is None else 1

    def _next_aside(self, save: SaveState) -> tuple[Leaves, Victim] | None:
        """Returns the first chosen span whose pages are all CLEAN, or of which some are not.

        A page under a copy counts as being saved: its frame is of no use to anyone before that ends.
        """
        for leaves, victim in self._ranks.aside():
            states = {
                SaveState.SAVING if self.frames.copies_of(record.frame) else record.save
                for record in self._records_of_victim(victim)
            }
            if save in states and (save is not SaveState.CLEAN or len(states) == 1):
                return leaves, victim
        return None

    def _touch(self, key: PageKey) -> None:
        if self.touched is not None:
            self.touched[key] = None

    def _cache(self, record: PageRecord) -> None:
        self._touch(record.key)
        self.frames.cache(record)
        self._ranks.of(record.tenant).used_bytes += record.nbytes

    def _must_be_saved(self, record: PageRecord) -> bool:
        return self.can_save and record.save is not SaveState.CLEAN and not record.is_put_off

    def _leave(self, record: PageRecord, now: float) -> None:
        self._uncache(record, now)
        self.evicted_pages -= 1
        self.dropped_pages += 1

    def _bury_run(self, row: Row, frames: list[int], in_use: bool) -> None:
        """Gives the row of pages that leave the radix trees to their ghosts, deepest first."""
        for left in range(len(frames) - 1, -1, -1):
            record = self.frames.records[frames[len(frames) - 1 - left]]
            own = self.policy.split(row, left) if left else row
            if self._in_tree.get(record.key) is record:
                del self._in_tree[record.key]
                ghost = Ghost(own, record.nbytes, self._now, record.last_use_s, in_use)
                self.ghosts.push(record.key, ghost)
            else:  # it is of a dead tree
                self.policy.forget(own)

    def _uncache_tree(self, frames: list[int]) -> None:
        """These pages have left the radix trees."""
        for frame in frames:
            record = self.frames.records[frame]
            self._ranks.of(record.tenant).used_bytes -= record.nbytes
            self._touch(record.key)
        self.frames.uncache(frames)
        self.evicted_pages += len(frames)

    def _uncache(self, record: PageRecord, now: float) -> None:
        """A page of the pool leaves; its frame is free once nothing holds it and no copy needs it."""
        self.pool.remove(record)
        if self.has(record.key):  # in another format
            self.policy.forget(record.row)
        else:
            ghost = Ghost(record.row, record.nbytes, now, record.last_use_s, record.in_use)
            self.ghosts.push(record.key, ghost)
        self._ranks.of(record.tenant).used_bytes -= record.nbytes
        self._touch(record.key)
        self.frames.uncache([record.frame])
        self.evicted_pages += 1

    # Users of trees

    def _leaves_of_tree(self, tree: RootKey) -> Candidates:
        return self._ranks.of(self._tenants.get(tree)).leaves

    def _enter_tree(self, tree: RootKey, tenant: bytes) -> None:
        self._users[tree] += 1
        self._tenants[tree] = tenant

    def _leave_tree(self, tree: RootKey, now: float) -> None:
        self._users[tree] -= 1
        if not self._users[tree]:
            del self._users[tree], self._tenants[tree]
        if tree in self._dead:
            self._bury(tree, now)
        for key in list(self._doomed):
            if self.remove(key, now) is None:
                self._doomed.pop(key, None)

    def _bury(self, tree: RootKey, now: float) -> int:
        """Evict what nothing holds of a dead radix tree; pages that something does."""
        self._now = now
        removed = self.index.clear(tree)
        self._uncache_tree(removed.frames)
        if tree not in self._users:
            self._dead.discard(tree)
        return removed.pinned_pages

    # Administration

    def is_dead(self, tree: RootKey) -> bool:
        """The tree was cleared: its last pages go with their holders."""
        return tree in self._dead

    def pin(self, key: PageKey) -> bool | None:
        """Keep a page, and all before it that are here, from eviction; None when it isn't here, False past the bound."""
        records = self.records_of(key)
        if not records:
            return None
        if key in self.pinned:
            return True
        if len(self.pinned) >= self._max_pins:
            return False
        if records[0].is_pooled:
            chain = self._pooled_chain(records)
            for record in chain:
                self.hold(record)
            self.pinned[key] = chain
        else:
            path = self.index.match(records[0].tree, self._chain_tokens(records[0])).node
            self.index.pin(path)
            self.pinned[key] = path
        return True

    def unpin(self, key: PageKey, now: float) -> bool:
        """Undo `pin`; False when the page isn't pinned."""
        pinned = self.pinned.pop(key, None)
        if pinned is None:
            return False
        if isinstance(pinned, Path):
            self.index.unpin(pinned, now, None)
        else:
            for record in pinned:
                self.drop(record.frame, now)
        return True

    def break_pins(self, now: float) -> int:
        """Undo all of an administrator's pins, so that a request can go on; how many there were."""
        keys = list(self.pinned)
        for key in keys:
            self.unpin(key, now)
        return len(keys)

    def is_pinned(self, key: PageKey) -> bool:
        """An administrator's pin keeps the page, by itself or by a page behind it."""
        records = self.records_of(key) if self.pinned else []
        for pinned_key, pinned in self.pinned.items():
            if isinstance(pinned, Path):
                if any(not r.is_pooled and self._is_behind(pinned_key, r) for r in records):
                    return True
            elif any(record in pinned for record in records):
                return True
        return False

    def remove(self, key: PageKey, now: float) -> bool | None:
        """Evict a page, in a radix tree with what hangs on it; None when it isn't here, False when it waits for its
        holders.
        """
        records = self.records_of(key)
        if not records:
            return None
        for record in records:
            if not record.is_pooled:
                self._now = now
                removed = self.index.remove(record.tree, self._chain_tokens(record))
                assert removed is not None
                self._uncache_tree(removed.frames)
            elif not self.frames.is_held(record.frame):
                self._uncache(record, now)
        self._doomed.pop(key, None)
        if not self.has(key):
            return True
        self._doomed[key] = None
        return False

    def clear(self, tree: RootKey, now: float) -> tuple[int, int]:
        """Evict every page of a tree that is never matched again; (pages gone, pages whose holders still need them).

        The latter can't be found any more, and go with their last holder.
        """
        for key in list(self.pinned):
            if any(record.tree == tree for record in self.records_of(key)):
                self.unpin(key, now)
        self._dead.add(tree)
        before, held = self.evicted_pages, 0
        for record in [record for record, _ in self.cached() if record.tree == tree]:
            if record.is_pooled:
                held += self.frames.is_held(record.frame)
                self._uncache(record, now)
            else:
                self._in_tree.pop(record.key, None)
                self._touch(record.key)
        pooled = held
        held += self._bury(tree, now)
        return self.evicted_pages - before - pooled, held

    def _pooled_chain(self, records: list[PageRecord]) -> list[PageRecord]:
        """These pages and, as far as the chain has no hole, all before them; the deepest first."""
        chain: list[PageRecord] = []
        while records:
            chain += records
            records = self.records_of(PageKey(records[0].parent)) if records[0].depth else []
        return chain

    def _is_behind(self, key: PageKey, record: PageRecord) -> bool:
        """Whether the page `key` is `record`'s page or follows it in a chain of a radix tree."""
        at = self._in_tree[key]
        while at.depth > record.depth:
            at = self._in_tree[PageKey(at.parent)]
        return at is record

    def _chain_tokens(self, record: PageRecord) -> TokenIds:
        """Tokens of a page's chain in a radix tree, from its first page to it."""
        chain = [record.tokens]
        while record.depth:
            record = self._in_tree[PageKey(record.parent)]
            chain.append(record.tokens)
        return np.frombuffer(b"".join(reversed(chain)), np.int32)

    # Self-check

    def check_cache(self, holders: Counter[int]) -> None:
        """Re-derive every count; `holders` are the sequences' holds by frame. AssertionError where one differs."""
        self.index.check()
        for pinned in self.pinned.values():
            if not isinstance(pinned, Path):
                holders.update(record.frame for record in pinned)
        self.frames.check(holders)
        self.pool.check(self.frames.is_held)
        self.ghosts.check()
        self._ranks.check(self.frames.records.values())
        records = self.frames.records
        in_tree = {page.frame for page in self.index.pages()}
        for frame, record in records.items():
            assert record.is_pooled == (frame not in in_tree), f"frame {frame} is cached in the wrong place"
        pooled = {id(record) for record in records.values() if record.is_pooled}
        assert pooled == {id(record) for record in self.pool.pages.values()}, "pages of the pool"
        assert in_tree <= records.keys(), "a page of a radix tree without a record"
        assert +self.counts == Counter((r.group, r.format) for r in records.values()), (
            "counts of cached pages"
        )
        for key, record in self._in_tree.items():
            assert records[record.frame] is record and record.key == key, "a key names another page"
