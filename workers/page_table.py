"""Decides which L1 frame holds what: free, a sequence's own, or a cached page of the prefix index. Pure: copies nothing.

A frame is free exactly when no sequence holds it, the index doesn't have it, and no copy to or from it is in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtier.tier.hbm import FrameAllocator
from kvtier.tier.identity import TokenIds, content_digest
from kvtier.tier.page import PageKey, RootKey
from kvtier.tier.prefix import Frames, Path, PrefixIndex
from kvtier.workers.sequence import Sequence

GHOSTS = 16384  # keys of evicted pages remembered for `explain`; about 3 MB


class SaveState(StrEnum):
    """Whether a cached page has a copy below L1."""

    DIRTY = "dirty"
    SAVING = "saving"
    CLEAN = "clean"


@dataclass(slots=True)
class PageRecord:
    """What is known of a cached page. `checksum` is b"" until it is taken."""

    key: PageKey
    tokens: bytes  # int32, one page
    parent: bytes
    root: RootKey
    tree: RootKey
    tenant: bytes
    content: bytes
    depth: int
    save: SaveState
    checksum: bytes = b""
    uses: int = 0
    last_use_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyHead:
    """Copy the first `tokens` tokens of a page into another frame, before the next forward."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Ghost:
    """When a page left L1, and when it had been used last."""

    evicted_s: float
    last_use_s: float


class PageTable:
    """All frames of one worker's L1, and its prefix index. Owned by the step loop; `now` never goes back.

    Invariants (`check()`): free + held + cached + in copy == capacity, each frame in as many roles as its counts say;
    a sequence's pages are its path in the index, then frames that it holds.
    """

    def __init__(self, num_frames: int, page_tokens: int, page_bytes: int) -> None:
        if num_frames < 1:
            raise ValueError(f"num_frames must be positive, got {num_frames}")
        self.capacity = num_frames
        self.frames = FrameAllocator(num_frames, page_bytes)
        self.page_tokens = page_tokens
        self.index = PrefixIndex(page_tokens)
        self.by_key: dict[PageKey, int] = {}
        self.ghosts: OrderedDict[PageKey, Ghost] = OrderedDict()
        self.pinned: dict[PageKey, Path] = {}  # by an administrator
        self.evicted_pages = 0
        self._users: dict[RootKey, int] = {}  # sequences whose path is in the tree
        self._doomed: set[PageKey] = set()  # to be evicted as soon as nobody holds them
        self._dead: set[RootKey] = set()  # cleared trees that still have users
        self.limbo = 0  # frames of nobody that a copy keeps from being free
        self._holders = [0] * num_frames
        self._copies = [0] * num_frames
        self._records: list[PageRecord | None] = [None] * num_frames

    # Room

    @property
    def available(self) -> int:
        """Frames free now, or once unpinned cached pages are evicted."""
        return self.frames.free_frames + self.index.evictable_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def record(self, frame: int) -> PageRecord | None:
        """The cached page in this frame."""
        return self._records[frame]

    def copies_of(self, frame: int) -> int:
        """Copies from or into the frame under way."""
        return self._copies[frame]

    def start_copy(self, frame: int) -> None:
        """A copy from or into the frame begins: it won't be free before `end_copy`."""
        self._copies[frame] += 1

    def end_copy(self, frame: int) -> None:
        """The copy is over."""
        self._copies[frame] -= 1
        if not self._copies[frame] and not self._holders[frame] and self._records[frame] is None:
            self.limbo -= 1
            self.frames.free([frame])

    def take(self, count: int, now: float) -> list[int]:
        """At most `count` frames for one holder; cached pages are evicted where too few are free."""
        while self.frames.free_frames < count and self.index.evictable_pages:
            self._uncache(self.index.evict(count - self.frames.free_frames), now)
        taken = self.frames.alloc(min(count, self.frames.free_frames))
        assert taken is not None
        for frame in taken:
            self._holders[frame] = 1
        return taken

    def drop(self, frame: int) -> None:
        """A holder lets the frame go."""
        self._holders[frame] -= 1
        self._free_if_unused(frame)

    # A sequence's pages

    def adopt(self, seq: Sequence, now: float) -> None:
        """Give a sequence that holds nothing the pages of its tokens that are cached, all but its last token's."""
        assert seq.num_pages == 0 and seq.path is None
        seq.computed = 0
        if seq.request.spec.use_cache:
            tree = seq.request.tenancy.tree
            match = self.index.match(tree, seq.tokens[: seq.length], seq.length - 1)
            self._hold(seq, match.node, match.frames)
            seq.head_tokens = match.partial[1] if match.partial else 0

    def readopt(self, seq: Sequence, now: float) -> CopyHead | None:
        """Match again before the first token is computed: others may have cached more meanwhile.

        Where the next page shares its first tokens with a cached one, those are to be copied into a frame of its own.
        """
        if not seq.request.spec.use_cache or seq.num_pages != seq.num_cached:
            return None
        own = self.take(1, now)  # before the match: an eviction may take the page that it names
        before = seq.path
        assert before is not None
        match = self.index.match(before.root, seq.tokens[: seq.length], seq.length - 1)
        if match.tokens > seq.computed:
            self._hold(seq, match.node, match.frames)
            self._let_go(before, now)
        if not own:
            return None
        seq.frames[seq.num_pages] = own[0]
        seq.num_pages += 1
        if match.partial is None:
            return None
        source, count = match.partial
        seq.computed += count
        return CopyHead(source, own[0], count)

    def grow(self, seq: Sequence, tokens: int, now: float) -> int:
        """Add pages until `tokens` tokens fit or no frame is to be had; how many tokens fit now."""
        missing = self.pages_for(tokens) - seq.num_pages
        if missing > 0:
            frames = self.take(missing, now)
            seq.frames[seq.num_pages : seq.num_pages + len(frames)] = frames
            seq.num_pages += len(frames)
        return seq.num_pages * self.page_tokens

    def trim(self, seq: Sequence, pages: int) -> None:
        """Give up the pages from `pages` on; they must be the sequence's own."""
        assert pages >= seq.num_cached
        while seq.num_pages > pages:
            seq.num_pages -= 1
            self.drop(int(seq.frames[seq.num_pages]))

    def seal(self, seq: Sequence, now: float) -> list[int]:
        """Put the sequence's newly filled pages into the index; the frames of those that weren't there before.

        Where the index has the page already the sequence goes over to that copy, and its own is freed.
        """
        full = seq.computed // self.page_tokens
        first = seq.num_cached
        if full <= first or seq.path is None:
            return []
        tokens = seq.tokens[first * self.page_tokens : full * self.page_tokens]
        own = seq.frames[first:full].copy()
        inserted = self.index.extend(seq.path, tokens, own, now)
        keys = seq.page_keys(full, self.page_tokens)
        seq.frames[first:full] = inserted.frames
        seq.num_cached = full
        duplicates = set(inserted.duplicates)
        sealed = []
        for i, frame in enumerate(own.tolist(), start=first):
            if frame not in duplicates:
                self._records[frame] = self._new_record(seq, i, keys, now)
                if seq.path.root not in self._dead:
                    self.by_key[keys[i]] = frame
                sealed.append(frame)
            self.drop(frame)
        return sealed

    def release(self, seq: Sequence, now: float) -> None:
        """Take all pages from a sequence; cached ones stay cached, its own become free once no copy needs them."""
        self.trim(seq, seq.num_cached)
        if seq.path is not None:
            for frame in seq.frames[: seq.num_cached].tolist():
                record = self._records[frame]
                assert record is not None
                record.last_use_s = now
            self._let_go(seq.path, now)
            seq.path = None
        seq.num_pages = seq.num_cached = seq.computed = 0

    def fork(self, parent: Sequence, child: Sequence, now: float) -> list[CopyHead] | None:
        """Share the parent's computed pages with a sequence of the same prompt; its partial tail is to be copied.

        None, and the child holds nothing, when there is no frame for the tail.
        """
        full, tail = divmod(parent.computed, self.page_tokens)
        own = self.take(1, now) if tail else []
        if tail and not own:
            return None
        if parent.path is not None:
            match = self.index.match(parent.path.root, parent.tokens[: full * self.page_tokens])
            assert len(match.frames) == full == parent.num_cached, "a computed prompt's full pages are cached"
            self._hold(child, match.node, match.frames)
        else:
            child.frames[:full] = parent.frames[:full]
            for frame in child.frames[:full].tolist():
                self._holders[frame] += 1
        child.num_pages = full
        child.computed = parent.computed
        if not own:
            return []
        child.frames[full] = own[0]
        child.num_pages += 1
        return [CopyHead(int(parent.frames[full]), own[0], tail)]

    def touch(self, seq: Sequence) -> None:
        """Count a use of the cached pages a new request starts from."""
        for frame in seq.frames[: seq.num_cached].tolist():
            record = self._records[frame]
            assert record is not None
            record.uses += 1

    # Administration

    def is_dead(self, tree: RootKey) -> bool:
        """The tree was cleared: its last pages go with their holders."""
        return tree in self._dead

    def cached(self) -> Iterator[tuple[int, PageRecord, bool]]:
        """Every cached page: its frame, its record, whether anyone holds it."""
        for page in self.index.pages():
            record = self._records[page.frame]
            assert record is not None
            yield page.frame, record, page.pinned

    def pin(self, key: PageKey) -> bool | None:
        """Keep a page, and so all before it, from eviction; None when it isn't here, False past the bound."""
        frame = self.by_key.get(key)
        if frame is None:
            return None
        if key in self.pinned:
            return True
        if len(self.pinned) >= self.capacity // 2:
            return False
        record = self._records[frame]
        assert record is not None
        tokens = self._chain_tokens(record)
        path = self.index.match(record.tree, tokens).node
        self.index.pin(path)
        self.pinned[key] = path
        return True

    def unpin(self, key: PageKey, now: float) -> bool:
        """Undo `pin`; False when the page isn't pinned."""
        path = self.pinned.pop(key, None)
        if path is None:
            return False
        self.index.unpin(path, now)
        return True

    def break_pins(self, now: float) -> int:
        """Undo all of an administrator's pins, so that a request can go on; how many there were."""
        keys = list(self.pinned)
        for key in keys:
            self.unpin(key, now)
        return len(keys)

    def remove(self, key: PageKey, now: float) -> bool | None:
        """Evict a page and what hangs on it; None when it isn't here, False when that waits for its holders."""
        frame = self.by_key.get(key)
        if frame is None:
            return None
        record = self._records[frame]
        assert record is not None
        removed = self.index.remove(record.tree, self._chain_tokens(record))
        assert removed is not None
        self._uncache(removed.frames, now)
        self._doomed.discard(key)
        if key not in self.by_key:
            return True
        self._doomed.add(key)
        return False

    def clear(self, tree: RootKey, now: float) -> tuple[int, int]:
        """Evict every page of a tree that is never matched again; (pages gone, pages whose holders still need them).

        The latter can't be found any more, and go with their last holder.
        """
        for key, path in list(self.pinned.items()):
            if path.root == tree:
                self.unpin(key, now)
        before = self.evicted_pages
        self._dead.add(tree)
        for _, record, _ in self.cached():
            if record.tree == tree:
                self.by_key.pop(record.key, None)
        held = self._bury(tree, now)
        return self.evicted_pages - before, held

    def is_pinned(self, key: PageKey) -> bool:
        """An administrator's pin keeps the page, by itself or by a page behind it."""
        frame = self.by_key.get(key)
        record = None if frame is None else self._records[frame]
        if record is None or not self.pinned:
            return False
        return any(self._is_behind(pinned, record) for pinned in self.pinned)

    def fill(self, sequences: list[Sequence]) -> tuple[int, int]:
        """Pages held, cached or by sequences, and the tokens that are filled in them."""
        pages = self.index.num_pages
        tokens = pages * self.page_tokens
        own: set[int] = set()
        for seq in sequences:
            for i in range(seq.num_cached, seq.num_pages):
                frame = int(seq.frames[i])
                filled = min(self.page_tokens, max(0, seq.computed - i * self.page_tokens))
                if filled and frame not in own:  # siblings share the pages of an uncached prompt
                    own.add(frame)
                    tokens += filled
        return pages + len(own), tokens

    # Self-check

    def check(self, sequences: list[Sequence]) -> None:
        """Re-derive every count from the sequences and the index; AssertionError where one differs."""
        self.index.check()
        cached = {page.frame for page in self.index.pages()}
        holders = [0] * self.capacity
        for seq in sequences:
            for i, frame in enumerate(seq.frames[: seq.num_pages].tolist()):
                if i < seq.num_cached:
                    assert frame in cached, f"sequence {seq.number} holds page {i} that isn't cached"
                else:
                    holders[frame] += 1
            assert (seq.path.depth if seq.path else 0) == seq.num_cached, "path and cached pages differ"
        assert holders == self._holders, "holders differ from the sequences' pages"
        self.frames.check()
        in_use = limbo = 0
        for frame in range(self.capacity):
            assert (self._records[frame] is not None) == (frame in cached), f"record of frame {frame}"
            used = holders[frame] > 0 or frame in cached
            in_use += used or self._copies[frame] > 0
            limbo += not used and self._copies[frame] > 0
        assert in_use + self.frames.free_frames == self.capacity, "frames leaked, or in two roles"
        assert limbo == self.limbo, f"limbo is {self.limbo}, {limbo} counted"
        for key, frame in self.by_key.items():
            record = self._records[frame]
            assert record is not None and record.key == key, "by_key names another page"

    @property
    def copies_in_flight(self) -> int:
        """Copies from or into frames; 0 when idle."""
        return sum(self._copies)

    # Inside

    def _hold(self, seq: Sequence, path: Path, frames: Frames) -> None:
        self.index.pin(path)
        self._users[path.root] = self._users.get(path.root, 0) + 1
        seq.path = path
        seq.frames[: len(frames)] = frames
        seq.num_pages = seq.num_cached = len(frames)
        seq.computed = len(frames) * self.page_tokens

    def _let_go(self, path: Path, now: float) -> None:
        self.index.unpin(path, now)
        self._users[path.root] -= 1
        if not self._users[path.root]:
            del self._users[path.root]
        if path.root in self._dead:
            self._bury(path.root, now)
        for key in list(self._doomed):
            if self.remove(key, now) is None:
                self._doomed.discard(key)

    def _bury(self, tree: RootKey, now: float) -> int:
        """Evict what nobody holds of a dead tree; pages that somebody does."""
        removed = self.index.clear(tree)
        self._uncache(removed.frames, now)
        if tree not in self._users:
            self._dead.discard(tree)
        return removed.pinned_pages

    def _new_record(self, seq: Sequence, depth: int, keys: list[PageKey], now: float) -> PageRecord:
        assert seq.path is not None
        tenancy = seq.request.tenancy
        return PageRecord(
            key=keys[depth],
            tokens=seq.tokens[depth * self.page_tokens : (depth + 1) * self.page_tokens].tobytes(),
            parent=keys[depth - 1] if depth else tenancy.root,
            root=tenancy.root,
            tree=seq.path.root,
            tenant=tenancy.digest,
            content=b"" if depth else content_digest(tenancy.salt, seq.tokens[: seq.length]),
            depth=depth,
            save=SaveState.CLEAN if depth < seq.stored_pages else SaveState.DIRTY,
            last_use_s=now,
        )

    def _uncache(self, frames: list[int], now: float) -> None:
        for frame in frames:
            record = self._records[frame]
            assert record is not None
            self._records[frame] = None
            self.evicted_pages += 1
            if self.by_key.get(record.key) == frame:
                del self.by_key[record.key]
                self.ghosts[record.key] = Ghost(now, record.last_use_s)
                if len(self.ghosts) > GHOSTS:
                    self.ghosts.popitem(last=False)
            self._free_if_unused(frame)

    def _free_if_unused(self, frame: int) -> None:
        if self._holders[frame] or self._records[frame] is not None:
            return
        if self._copies[frame]:
            self.limbo += 1
        else:
            self.frames.free([frame])

    def _is_behind(self, key: PageKey, record: PageRecord) -> bool:
        """Whether the page `key` is `record`'s page or follows it in a chain."""
        at = self._records[self.by_key[key]]
        while at is not None and at.depth > record.depth:
            at = self._records[self.by_key[PageKey(at.parent)]]
        return at is record

    def _chain_tokens(self, record: PageRecord) -> TokenIds:
        """Tokens of the page's chain, from its first page to it."""
        chain = [record.tokens]
        while record.depth:
            parent = self._records[self.by_key[PageKey(record.parent)]]
            assert parent is not None
            record = parent
            chain.append(record.tokens)
        return np.frombuffer(b"".join(reversed(chain)), np.int32)
