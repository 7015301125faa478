"""Which pages of L1 each sequence holds: plain ones a path of the prefix index, all others pages of the pool. Pure.

A sequence's pages that aren't full, and all those of a request that doesn't use the cache, are its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtier.tier.l1.prefix import Frames, Path, Piece
from kvtier.tier.pages.page import PageFormat, PageKey, TierName
from kvtier.tier.pages.recipe import ChainNeeds
from kvtier.tier.policy.base import Policy, Use
from kvtier.tier.protocol.messages import PageRef
from kvtier.workers.paging.frames import CopyHead, PageRecord, SaveState
from kvtier.workers.paging.page_cache import NO_SHARES, PageCache
from kvtier.workers.paging.pooled_pages import PooledPages, pages_needed
from kvtier.workers.requests.sequence import Load, LoadChain, Sequence


class PageTable(PageCache):
    """All of one worker's L1. Owned by the step loop; `now` never goes back.

    Invariants (`check()`): free + held + cached + in copy == capacity, each frame in as many roles as its counts say;
    a plain sequence's pages are its path in the index, then frames that it holds; of another one's pages it holds each
    frame.
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
        super().__init__(num_units, unit_bytes, page_tokens, groups, policy, shares)
        self._pooled = PooledPages(self)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    # Room

    def most_needed(self, needs: tuple[ChainNeeds, ...], tokens: int) -> Counter[int]:
        """The most pages, by size in units, that a sequence of so many tokens takes alone. From any thread."""
        needed: Counter[int] = Counter()
        for group, need in enumerate(needs):
            write = need.recipe.write
            written, decayed = pages_needed(need, tokens, self.page_tokens, self.page_tokens)
            needed[self.size_of(group, write)] += written
            others = [self.size_of(group, format) for format in self.groups[group] if format is not write]
            if decayed and others:
                decayed_to = need.recipe.decayed
                needed[max(others) if decayed_to is None else self.size_of(group, decayed_to)] += decayed
        return needed

    def add_missing(self, missing: Counter[int], seq: Sequence, tokens: int, chunk: int) -> None:
        """Add the pages, by size in units, that it may need beside those it holds until `tokens` tokens are computed.

        Rows are computed by at most `chunk` tokens at once.
        """
        if seq.is_plain:
            count = self.pages_for(tokens) - seq.groups[0].num_pages
            missing[self.size_of(0, self._write(seq))] += max(0, count)
        else:
            missing.update(self._pooled.missing(seq, tokens, chunk))

    def is_ready(self, seq: Sequence, tokens: int) -> bool:
        """Rows up to `tokens` tokens can be computed, as far as its pages go."""
        if seq.is_plain:
            return seq.groups[0].num_pages * self.page_tokens >= tokens
        return self._pooled.is_ready(seq, tokens)

    def take_converted(self) -> list[PageRecord]:
        """Cached pages that were made from others since this was called last; to be saved."""
        made, self._pooled.converted = self._pooled.converted, []
        return made

    @property
    def has_due(self) -> bool:
        """`take_due` would give some."""
        return bool(self._pooled.due or self.due)

    def take_due(self) -> list[PageRecord]:
        """Cached pages, since this was called last, whose saving was put off until now."""
        due, self._pooled.due, self.due = self._pooled.due + self.due, [], []
        return due

    # A sequence's pages

    def adopt(self, seq: Sequence, now: float, limit: int = 1 << 30) -> None:
        """Give a sequence that holds nothing its cached pages, at most `limit`, but for its last token's."""
        assert seq.num_held == 0 and seq.path is None
        seq.computed = seq.num_cached = 0
        seq.tree = seq.request.namespace.tree
        self._holding[seq] = None
        if not seq.request.spec.use_cache:
            return
        self._enter_tree(seq.tree, seq.request.namespace.digest)
        if seq.is_plain:
            tokens = min(seq.length - 1, limit * self.page_tokens)
            match = self.index.match(seq.tree, seq.tokens[: seq.length], tokens)
            self._hold_path(seq, match.node, match.frames)
            seq.head_tokens = match.partial[1] if match.partial else 0
        else:
            self._pooled.adopt(seq, limit)

    def begin(self, seq: Sequence, now: float) -> None:
        """The sequence is admitted: a request begins to use the pages that it adopted, and those that left L1."""
        request = seq.request
        if not request.spec.use_cache:
            return
        if seq.path is not None:
            self.index.begin(seq.path, now)
        elif not seq.is_plain:
            self._pooled.begin(seq, now)
        for group in range(len(seq.groups)):
            keys = seq.page_keys(seq.length // self.page_tokens, self.page_tokens, group)[seq.num_cached :]
            if group == 0 and request.admitted_s is None:
                request.evicted = self.ghosts.explain(keys, seq.num_cached)
            self.ghosts.begin(keys, now)

    def readopt(self, seq: Sequence, now: float) -> None:
        """Match again before the first token is computed: others may have cached more meanwhile.

        Where the next page shares its first tokens with a cached one, those are to be copied into a frame of its own.
        """
        if seq.path is None or seq.groups[0].num_pages != seq.num_cached:
            return
        own = self.take(
            0, self._write(seq), 1, now
        )  # before the match: an eviction may take the page that it names
        before, pages = seq.path, seq.groups[0]
        match = self.index.match(before.root, seq.tokens[: seq.length], seq.length - 1)
        if match.tokens > seq.computed:
            self._hold_path(seq, match.node, match.frames)
            self.index.begin(match.node, now)
            self.index.unpin(before, now, None)
        if not own:
            return
        pages.reserve(pages.num_pages + 1)
        pages.frames[pages.num_pages] = own[0]
        pages.num_pages += 1
        if match.partial is not None:
            source, count = match.partial
            seq.computed += count
            self.frames.add_op(CopyHead(0, source, own[0], count, self._write(seq)))

    def grow(self, seq: Sequence, tokens: int, now: float) -> int:
        """Add pages until `tokens` tokens fit or no frame is to be had; how many tokens fit now.

        Pages that rows from its position on want in another format are converted before.
        """
        if not seq.is_plain:
            return self._pooled.grow(seq, tokens, now)
        pages = seq.groups[0]
        missing = self.pages_for(tokens) - pages.num_pages
        if missing > 0:
            frames = self.take(0, self._write(seq), missing, now)
            pages.reserve(pages.num_pages + len(frames))
            pages.frames[pages.num_pages : pages.num_pages + len(frames)] = frames
            pages.num_pages += len(frames)
        return pages.num_pages * self.page_tokens

    def seal(self, seq: Sequence, now: float) -> list[PageRecord]:
        """Put the sequence's newly filled pages into the cache; those that weren't there before.

        Where the cache has the page already the sequence goes over to that copy, and its own is freed.
        """
        full = seq.computed // self.page_tokens
        if full <= seq.num_cached or not seq.request.spec.use_cache:
            return []
        return self._seal_path(seq, full, now) if seq.is_plain else self._pooled.seal(seq, now)

    def slide(self, seq: Sequence, now: float) -> None:
        """Let a pooled sequence's pages go that rows from its position on don't attend."""
        self._pooled.slide(seq, now)

    def release(self, seq: Sequence, now: float, use: Use | None = None, *, only_last: bool = False) -> None:
        """Take all pages from a sequence; cached ones stay cached, its own become free once no copy needs them.

        `use` is what it leaves behind; None when it has used nothing yet. With `only_last` siblings of it go on.
        """
        if seq not in self._holding:
            return
        del self._holding[seq]
        if seq.is_plain:
            self._release_plain(seq, now, use, only_last)
        else:
            self._pooled.release(seq, now, use, only_last=only_last)
        if seq.request.spec.use_cache:
            self._leave_tree(seq.tree, now)
        seq.num_cached = seq.computed = 0

    def fork(self, parent: Sequence, child: Sequence, now: float) -> bool:
        """Share the parent's computed pages with a sequence of the same prompt; its partial tail is to be copied.

        False, and the child holds nothing, when there is no frame for the tail.
        """
        child.tree = parent.tree
        self._holding[child] = None
        if child.request.spec.use_cache:
            self._enter_tree(child.tree, child.request.namespace.digest)
        fork = self._fork_plain if parent.is_plain else self._pooled.fork
        if fork(parent, child, now):
            return True
        self.release(child, now)
        return False

    def touch(self, seq: Sequence) -> None:
        """Count a use of the cached pages a new request starts from."""
        if not seq.is_plain:
            self._pooled.touch(seq)
            return
        for frame in seq.groups[0].frames[: seq.num_cached].tolist():
            self.frames.records[frame].uses += 1

    # Loads

    def plan_load(self, seq: Sequence, lease: str, started_s: float, deadline_s: float) -> Load | None:
        """Which pages to look for below L1 behind those adopted; None when there are none.

        All whole pages of the known tokens, and the tail that a preemption saved. A plain sequence's pages get their
        frames with `grow`, the others' with `place`.
        """
        if not seq.request.spec.use_cache:
            return None
        if not seq.is_plain:
            return self._pooled.plan_load(seq, lease, started_s, deadline_s)
        page_tokens = self.page_tokens
        pages, tail = divmod(seq.saved or seq.length, page_tokens)
        if not seq.saved:
            tail = 0
            if pages * page_tokens == seq.length and seq.computed + seq.head_tokens == seq.length - 1:
                return None  # L1 has all but the last token, which is computed anyhow
        keys = seq.page_keys(pages, page_tokens)[seq.num_cached :]
        if tail and seq.num_cached <= pages:
            keys.append(seq.tail_key(seq.saved, page_tokens))
        else:
            tail = 0
        if not keys:
            return None
        chain = LoadChain(keys, [], bytes(len(keys)), seq.request.namespace.needs[0], None)
        return Load(lease, seq.num_cached, [chain], seq.length - 1, started_s, deadline_s, tail)

    def place(self, seq: Sequence, ref: PageRef, format: PageFormat, now: float) -> int | None:
        """The frame for a page that comes up, with a copy into it started; None, and the load is cut, without room.

        Take and do the queued operations before the copy: one of them may read the frame.
        """
        if not seq.is_plain:
            return self._pooled.place(seq, ref, format, now)
        frame = int(seq.groups[0].frames[ref[1]])
        self.start_copy(frame)
        return frame

    def arrive(self, seq: Sequence, ref: PageRef, tier: TierName, now: float) -> None:
        """A page that came up is in its frame, verified; the copy has ended."""
        assert seq.load is not None
        if seq.is_plain:
            seq.load.arrive(ref, tier)
        else:
            self._pooled.arrive(seq, ref, tier, now)

    def loaded(self, seq: Sequence, now: float) -> int:
        """The sequence's load is over: use what came. The pages of its prefix now."""
        load = seq.load
        assert load is not None and load.is_complete
        if not seq.is_plain:
            pages = self._pooled.loaded(seq, now)
        else:
            seq.load = None
            pages = load.wanted
            self._trim(seq, pages, now)
            seq.computed = pages * self.page_tokens
            if load.tail_tokens and pages == load.pages:
                seq.computed += load.tail_tokens - self.page_tokens
            seq.computed = min(seq.computed, seq.length - 1)
        seq.stored_pages = pages
        self.seal(seq, now)
        return pages

    # For people

    def fill(self, sequences: list[Sequence]) -> tuple[int, int]:
        """Pages held, cached or by sequences, and the tokens that are filled in them."""
        cached = self.frames.records.keys()
        own: dict[int, int] = {}  # siblings share the pages of an uncached prompt
        for seq in sequences:
            for pages in seq.groups:
                for i in pages.held(seq.num_cached if seq.is_plain else 0):
                    filled = min(self.page_tokens, max(0, seq.computed - i * self.page_tokens))
                    if filled and int(pages.frames[i]) not in cached:
                        own[int(pages.frames[i])] = filled
        return len(cached) + len(own), len(cached) * self.page_tokens + sum(own.values())

    # Self-check

    def check(self, sequences: list[Sequence]) -> None:
        """Re-derive every count from the sequences and the cache; AssertionError where one differs."""
        holders: Counter[int] = Counter()
        for seq in sequences:
            first = seq.num_cached if seq.is_plain else 0
            for pages in seq.groups:
                holders.update(int(pages.frames[i]) for i in pages.held(first))
            if seq.is_plain:
                assert (seq.path.depth if seq.path else 0) == seq.num_cached, "path and cached pages differ"
                for frame in seq.groups[0].frames[: seq.num_cached].tolist():
                    assert frame in self.frames.records, (
                        f"sequence {seq.number} holds a page that isn't cached"
                    )
            elif seq.load is not None:
                holders.update(seq.load.parts.values())
        self.check_cache(holders)
        assert set(sequences) == self._holding.keys(), "sequences whose pages would not be followed"
        users = Counter(seq.tree for seq in sequences if seq.request.spec.use_cache)
        assert users == self._users, "users of trees"

    # Plain sequences

    def _write(self, seq: Sequence) -> PageFormat:
        return seq.request.namespace.needs[0].recipe.write

    def _hold_path(self, seq: Sequence, path: Path, frames: Frames) -> None:
        self.index.pin(path)
        seq.path = path
        pages = seq.groups[0]
        pages.reserve(len(frames))
        pages.frames[: len(frames)] = frames
        pages.num_pages = seq.num_cached = len(frames)
        seq.computed = len(frames) * self.page_tokens

    def _seal_path(self, seq: Sequence, full: int, now: float) -> list[PageRecord]:
        assert seq.path is not None
        first, pages = seq.num_cached, seq.groups[0]
        tokens = seq.tokens[first * self.page_tokens : full * self.page_tokens]
        own = pages.frames[first:full].copy()
        keys = seq.page_keys(full, self.page_tokens)
        inserted = self.index.extend(
            seq.path,
            tokens,
            own,
            now,
            created=seq.request.created_pages(self.page_tokens),
            nbytes=self.groups[0][self._write(seq)],
            pieces=self._pieces(seq, keys[first:], now),
        )
        pages.frames[first:full] = inserted.frames
        seq.num_cached = full
        duplicates = set(inserted.duplicates)
        sealed = []
        for depth, frame in enumerate(own.tolist(), start=first):
            if frame not in duplicates:
                record = self._plain_record(seq, depth, keys, frame, now)
                self.cache_in_tree(record)
                sealed.append(record)
            self.frames.let_go(frame)
        return sealed

    def _pieces(self, seq: Sequence, keys: list[PageKey], now: float) -> list[Piece]:
        """The histories of pages that come back, in a tree where they can be found."""
        if self.is_dead(seq.tree):
            return []
        here = next((i for i, key in enumerate(keys) if key not in self._in_tree), len(keys))
        pieces = self.ghosts.revive_all(keys[here:], self.groups[0][self._write(seq)], now)
        return [(None, here), *pieces] if here and pieces else pieces

    def _plain_record(
        self, seq: Sequence, depth: int, keys: list[PageKey], frame: int, now: float
    ) -> PageRecord:
        namespace, format = seq.request.namespace, self._write(seq)
        return PageRecord(
            frame=frame,
            group=0,
            format=format,
            nbytes=self.groups[0][format],
            key=keys[depth],
            tokens=seq.tokens[depth * self.page_tokens : (depth + 1) * self.page_tokens].tobytes(),
            parent=keys[depth - 1] if depth else namespace.root,
            root=namespace.root,
            tree=seq.tree,
            tenant=namespace.digest,
            content=b"" if depth else seq.content(),
            depth=depth,
            save=self.save_loaded if depth < seq.stored_pages else SaveState.DIRTY,
            is_pooled=False,
            last_use_s=now,
        )

    def _trim(self, seq: Sequence, pages: int, now: float) -> None:
        """Give up the pages from `pages` on; they must be the sequence's own."""
        assert pages >= seq.num_cached
        mine = seq.groups[0]
        while mine.num_pages > pages:
            mine.num_pages -= 1
            self.drop(int(mine.frames[mine.num_pages]), now)

    def _release_plain(self, seq: Sequence, now: float, use: Use | None, only_last: bool) -> None:
        self._trim(seq, seq.num_cached, now)
        if seq.path is not None:
            for frame in seq.groups[0].frames[: seq.num_cached].tolist() if use is not None else ():
                self.frames.records[frame].last_use_s = now
            self.index.unpin(seq.path, now, use, only_last=only_last)
            seq.path = None
        seq.groups[0].empty()

    def _fork_plain(self, parent: Sequence, child: Sequence, now: float) -> bool:
        full, tail = divmod(parent.computed, self.page_tokens)
        own = self.take(0, self._write(parent), 1, now) if tail else []
        if tail and not own:
            return False
        theirs, mine = parent.groups[0], child.groups[0]
        if parent.path is not None:
            match = self.index.match(parent.path.root, parent.tokens[: full * self.page_tokens])
            assert len(match.frames) == full == parent.num_cached, "a computed prompt's full pages are cached"
            self._hold_path(child, match.node, match.frames)
        else:
            mine.reserve(full)
            mine.frames[:full] = theirs.frames[:full]
            for frame in mine.frames[:full].tolist():
                self.frames.hold(frame)
        mine.num_pages = full
        child.computed = parent.computed
        if own:
            mine.reserve(full + 1)
            mine.frames[full] = own[0]
            mine.num_pages += 1
            self.frames.add_op(CopyHead(0, int(theirs.frames[full]), own[0], tail, self._write(parent)))
        return True
