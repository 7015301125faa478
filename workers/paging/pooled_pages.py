"""What sequences do whose rows don't attend all pages alike: windows, layer groups, decaying and lossy formats. Pure.

Which pages such a sequence holds, and in which format, is a function of the position of its next row alone
(tier/pages/recipe.py): pages that left the window are let go, and pages that are old enough are converted before the row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvtier.tier.pages.page import PageFormat, PageKey, TierName
from kvtier.tier.pages.recipe import HAS_DECAYED, HAS_WRITTEN, ChainNeeds, longest_hit
from kvtier.tier.policy.base import Use
from kvtier.tier.protocol.messages import Missing, PageRef
from kvtier.workers.models.formats import FORMAT_CODES
from kvtier.workers.paging.frames import Convert, CopyHead, PageRecord, SaveState
from kvtier.workers.paging.page_cache import PageCache
from kvtier.workers.requests.sequence import Load, LoadChain, Sequence


def pages_needed(need: ChainNeeds, tokens: int, chunk: int, page_tokens: int) -> tuple[int, int]:
    """The most pages, written and in its other format, that a sequence has at once while `tokens` tokens are computed.

    Rows are computed by `chunk` tokens. The two peaks needn't come together. What a lossy sequence holds in the other
    format it doesn't hold as written, which takes more room: only the first such page counts.
    """
    recipe, window = need.recipe, need.window
    written, decayed = -(-tokens // page_tokens), 0
    if recipe.decayed is not None:
        kept = recipe.sink_pages(page_tokens)
        recent = -(-(recipe.recent_tokens + recipe.stride_tokens) // page_tokens) + 1
        decayed = max(0, recipe.decay_end(tokens, page_tokens) - kept)
        written = min(written, kept + recent)
    if window.tokens:
        behind, ahead = -(-(window.tokens - 1) // page_tokens), (page_tokens + chunk - 2) // page_tokens
        most = window.sink_pages(page_tokens) + behind + 1 + ahead
        written, decayed = min(written, most), min(decayed, most)
    return written, decayed + need.any_variant


class PooledPages:
    """The page table's part for pooled sequences. Changes the pages of sequences; the cache is its caller's too."""

    def __init__(self, cache: PageCache) -> None:
        self.converted: list[PageRecord] = []  # new pages, since they were asked for last
        self.due: list[PageRecord] = []  # put off until now, since they were asked for last
        self._cache = cache
        self._page_tokens = cache.page_tokens

    # Beginning

    def adopt(self, seq: Sequence, limit: int) -> None:
        """Give a sequence that holds nothing the longest prefix of at most `limit` pages that L1 can serve alone."""
        needs, page_tokens = seq.request.namespace.needs, self._page_tokens
        pages = min(limit, (seq.length - 1) // page_tokens)
        present = [self._present(seq, group, pages) for group in range(len(needs))]
        pages = longest_hit(list(needs), present, 0, seq.length - 1, page_tokens)
        for group in range(len(needs)):
            for page in self._pages_for(seq, group, 0, pages, pages * page_tokens):
                record = self._choose(seq, group, page, pages * page_tokens)
                assert record is not None, "a page of the hit is gone"
                self._cache.hold(record)
                seq.groups[group].put(page, record.frame, FORMAT_CODES[record.format])
        self._begin_at(seq, pages, pages * page_tokens)

    def touch(self, seq: Sequence) -> None:
        """A new request starts from the pages that the sequence holds."""
        for pages in seq.groups:
            for page in pages.held(0, seq.num_cached):
                record = self._cache.record(int(pages.frames[page]))
                if record is not None:
                    self._cache.pool.want(record)
                    self._put_off_no_more(record)

    def fork(self, parent: Sequence, child: Sequence, now: float) -> bool:
        """Share the parent's computed pages; its partial tail is to be copied. False when there is no room for that."""
        cache, tail = self._cache, parent.computed % self._page_tokens
        full = parent.computed // self._page_tokens
        for group, theirs in enumerate(parent.groups):
            format = parent.request.namespace.needs[group].recipe.write
            mine = child.groups[group]
            mine.reserve(full + 1)
            for page in theirs.held(0, full):
                cache.frames.hold(int(theirs.frames[page]))
            assert mine.formats is not None and theirs.formats is not None
            mine.frames[:full] = theirs.frames[:full]
            mine.formats[:full] = theirs.formats[:full]
            mine.num_pages, mine.first_page, mine.settled = full, theirs.first_page, theirs.settled
            if tail:
                own = cache.take(group, format, 1, now)
                if not own:
                    return False
                mine.put(full, own[0], FORMAT_CODES[format])
                mine.num_pages += 1
        for group, theirs in enumerate(parent.groups if tail else ()):
            format = parent.request.namespace.needs[group].recipe.write
            source, target = int(theirs.frames[full]), int(child.groups[group].frames[full])
            cache.frames.add_op(CopyHead(group, source, target, tail, format))
        child.num_cached, child.computed = parent.num_cached, parent.computed
        return True

    # Going on

    def is_ready(self, seq: Sequence, tokens: int) -> bool:
        """Its pages are as rows at its position want them, and `tokens` tokens have a place."""
        for need, pages in zip(seq.request.namespace.needs, seq.groups, strict=True):
            if pages.num_pages * self._page_tokens < tokens:
                return False
            if pages.settled < need.recipe.decay_end(seq.computed, self._page_tokens):
                return False
        return True

    def grow(self, seq: Sequence, tokens: int, now: float) -> int:
        """Convert what has become old enough, then add pages until `tokens` tokens fit; how many do."""
        if not all(self._settle(seq, group, now) for group in range(len(seq.groups))):
            return seq.computed
        wanted = -(-tokens // self._page_tokens)
        for pages in seq.groups:
            pages.reserve(wanted)
        first = seq.num_pages
        # Layer groups grow together: one that took all the room would leave the others none.
        ends = range(first + 1, wanted + 1) if len(seq.groups) > 1 else [wanted]
        all(self._extend(seq, group, end, now) for end in ends for group in range(len(seq.groups)))
        return seq.num_pages * self._page_tokens

    def seal(self, seq: Sequence, now: float) -> list[PageRecord]:
        """Put newly filled pages into the pool; those that weren't there before.

        Where the pool has the page already the sequence goes over to that copy, and its own is freed.
        """
        full = seq.computed // self._page_tokens
        first, seq.num_cached = seq.num_cached, full
        if self._cache.is_dead(seq.tree):
            return []
        sealed = []
        for group in range(len(seq.groups)):
            for page in seq.groups[group].held(first, full):
                record = self._seal_page(seq, group, page, now)
                if record is not None:
                    sealed.append(record)
        return sealed

    def begin(self, seq: Sequence, now: float) -> None:
        """The sequence is admitted: it begins to use the pages that it holds."""
        for group in range(len(seq.groups)):
            self._cache.pool.begin(self._records(seq, group), now)

    def slide(self, seq: Sequence, now: float) -> None:
        """Let the pages go that rows from its position on don't attend, nor those behind its last full page.

        What leaves a stream has no claim to stay in L1, but for what a request with the same prompt starts from, and
        what was asked for again before. Of its pages beyond the prompt only those are saved that it holds when it ends
        or is preempted: a stream without end would fill all tiers with what nothing attends. What leaves one of several
        layer groups others attend still: it stays while there is room.
        """
        namespace, page_tokens = seq.request.namespace, self._page_tokens
        full = seq.computed // page_tokens
        for need, pages in zip(namespace.needs, seq.groups, strict=True):
            first = need.window.first_page(full * page_tokens, page_tokens)
            prompt = (seq.request.prompt_tokens - 1) // page_tokens
            prompt_first = need.window.first_page(prompt * page_tokens, page_tokens)
            left = list(pages.held(pages.sink_pages, first))
            if left:
                records = self._cache.records_in(pages.frames[left].tolist())
                use = replace(seq.use_so_far(page_tokens), open=False)
                self._cache.release_pooled(records, use, now, only_last=True)
            for page in left:
                frame = int(pages.frames[page])
                record = self._cache.record(frame)
                is_wanted = prompt_first <= page < prompt
                if record is not None and namespace.is_stream and not is_wanted and not record.uses:
                    record.leaves = True
                    self._cache.pool.spend(record)
                self._cache.drop(frame, now)
            pages.first_page = max(pages.first_page, first)

    def release(self, seq: Sequence, now: float, use: Use | None, *, only_last: bool) -> None:
        """Take all pages from a sequence, the deepest first; those whose saving was put off are due."""
        if use is not None:
            for group in range(len(seq.groups)):
                self._cache.release_pooled(self._records(seq, group), use, now, only_last=only_last)
        held = [(page, int(pages.frames[page])) for pages in seq.groups for page in pages.held()]
        for pages in seq.groups:
            pages.empty()
        if seq.load is not None:
            held += [(page, frame) for (_, page, _), frame in seq.load.parts.items()]
            seq.load.parts = {}
        for _, frame in sorted(held, key=lambda part: -part[0]):
            record = self._cache.record(frame)
            if record is not None:
                self._put_off_no_more(record)
            self._cache.drop(frame, now)

    # Room

    def missing(self, seq: Sequence, tokens: int, chunk: int) -> Counter[int]:
        """Pages, by size in units, that it may need beside those it holds until `tokens` tokens are computed."""
        missing: Counter[int] = Counter()
        namespace = seq.request.namespace
        for group in range(len(seq.groups)):
            need, other = namespace.needs[group], namespace.other_format(group)
            written, decayed = pages_needed(need, tokens, chunk, self._page_tokens)
            here = self._held_by_code(seq, group)
            if other is not None:
                held = here[FORMAT_CODES[other]]
                if need.any_variant:  # what it holds in the lossy format instead needs no written page
                    written = max(1, written - max(0, held - decayed))
                missing[self._cache.size_of(group, other)] += max(0, decayed - held)
            held = here[FORMAT_CODES[need.recipe.write]]
            missing[self._cache.size_of(group, need.recipe.write)] += max(0, written - held)
        return missing

    # Loads

    def plan_load(self, seq: Sequence, lease: str, started_s: float, deadline_s: float) -> Load | None:
        """Which pages to look for below L1 behind those adopted; holds what L1 has of them. None for none."""
        page_tokens, namespace = self._page_tokens, seq.request.namespace
        pages, tail = divmod(seq.saved or seq.length - 1, page_tokens)
        if not seq.saved:
            tail = 0
        last_position = seq.saved if tail else seq.length - 1
        first, total = seq.num_cached, pages + bool(tail)
        if total <= first:
            return None
        parts: dict[tuple[int, int, PageFormat], int] = {}
        chains: list[LoadChain] = []
        position = min(total * page_tokens, last_position)
        for group, need in enumerate(namespace.needs):
            keys = seq.page_keys(pages, page_tokens, group)[first:]
            held = bytearray(total - first)
            for page in self._pages_for(seq, group, first, pages, position):
                record = self._choose(seq, group, page, position)
                if record is not None:
                    self._cache.hold(record)
                    parts[group, page, record.format] = record.frame
                    held[page - first] = HAS_WRITTEN if record.format is need.recipe.write else HAS_DECAYED
            if tail:
                keys.append(seq.tail_key(seq.saved, page_tokens, group))
            others = self._other_keys(seq, group, len(keys), seq.saved if tail else pages * page_tokens)
            chains.append(LoadChain(keys, others, bytes(held), need, namespace.lossy_format))
        kept = frozenset((group, page) for group, page, _ in parts)
        return Load(lease, first, chains, last_position, started_s, deadline_s, tail, parts=parts, kept=kept)

    def place(self, seq: Sequence, ref: PageRef, format: PageFormat, now: float) -> int | None:
        """A frame, with a copy into it started, for a page that comes up; None, and the load is cut, without room."""
        load = seq.load
        assert load is not None and load.wants(ref)
        group, page = ref
        taken = self._cache.take(group, format, 1, now)
        if not taken:
            load.cut(page, Missing(page, "no_room", "L1 had no room for it when it came"))
            return None
        assert (group, page, format) not in load.parts, f"page {page} of group {group} comes up twice"
        load.parts[group, page, format] = taken[0]
        load.placed[ref] = format
        self._cache.start_copy(taken[0])
        return taken[0]

    def arrive(self, seq: Sequence, ref: PageRef, tier: TierName, now: float) -> None:
        """A page has come up: others can find it, and it is converted at once where it is to be.

        So the pages of a load never take more room than the sequence would have needed to compute them.
        """
        load = seq.load
        assert load is not None
        load.arrive(ref, tier)
        group, page = ref
        if load.tail_tokens and page == load.pages - 1:
            return
        format = load.placed[ref]
        frame = load.parts[group, page, format]
        if not self._cache.is_dead(seq.tree):
            key = seq.page_key(page, self._page_tokens, group)
            record = self._new_record(seq, group, page, key, frame, format, self._cache.save_loaded)
            frame = self._share(seq, record, now)
            load.parts[group, page, format] = frame
            known = self._cache.record(frame)
            if known is not None:
                known.uses += 1  # it is wanted a second time
        recipe = seq.request.namespace.needs[group].recipe
        position = min(load.wanted * self._page_tokens, load.last_position)
        wanted = recipe.format_at(page, position, self._page_tokens)
        if format is recipe.write and wanted is not format:
            target = self._convert(seq, group, page, wanted, now)
            if target is None:
                load.cut(page, Missing(page, "no_room", f"L1 had no room for it as {wanted}"))
            else:
                load.parts[group, page, wanted] = target
                self._drop_spent(seq, group, page, load.parts.pop((group, page, format)), now)

    def loaded(self, seq: Sequence, now: float) -> int:
        """The load is over: take what of it makes the longest prefix, let the rest go. The pages of the prefix."""
        load = seq.load
        assert load is not None
        page_tokens, needs = self._page_tokens, seq.request.namespace.needs
        present = [self._loaded_bits(load, group) for group in range(len(needs))]
        pages = longest_hit(list(needs), present, load.first_page, load.last_position, page_tokens)
        position = min(pages * page_tokens, load.last_position)
        seq.load = None
        for group, need in enumerate(needs):
            seq.groups[group].reserve(pages)
            for page in seq.groups[group].held(
                need.window.sink_pages(page_tokens), need.window.first_page(position, page_tokens)
            ):
                self._cache.drop(int(seq.groups[group].frames[page]), now)
            for page in self._pages_for(seq, group, load.first_page, pages, position):
                format = self._loaded_format(load, seq, group, page, position)
                frame = load.parts.pop((group, page, format))
                seq.groups[group].put(page, frame, FORMAT_CODES[format])
        full = min(pages, load.pages - bool(load.tail_tokens))
        computed = full * page_tokens + (load.tail_tokens if pages > full else 0)
        self._begin_at(seq, pages, computed)
        seq.num_cached = full
        for _, frame in sorted(load.parts.items(), key=lambda part: -part[0][1]):
            self._cache.drop(frame, now)
        return pages

    # Inside

    def _begin_at(self, seq: Sequence, pages: int, computed: int) -> None:
        """Its pages before `pages` are in place; those of them that rows at `computed` don't attend aren't held."""
        for need, mine in zip(seq.request.namespace.needs, seq.groups, strict=True):
            mine.num_pages, mine.settled = pages, 0
            mine.first_page = max(mine.first_page, need.window.first_page(computed, self._page_tokens))
        seq.num_cached, seq.computed = pages, computed

    def _pages_for(self, seq: Sequence, group: int, first: int, end: int, position: int) -> list[int]:
        """The pages from `first` to before `end` that rows from `position` on attend."""
        window = seq.request.namespace.needs[group].window
        sinks = window.sink_pages(self._page_tokens)
        low = window.first_page(position, self._page_tokens)
        return [*range(first, min(sinks, end)), *range(max(first, low), end)]

    def _present(self, seq: Sequence, group: int, pages: int) -> bytes:
        """The HAS_ bits of the first pages in the pool."""
        found = self._cache.pool.pages
        write = seq.request.namespace.needs[group].recipe.write
        other = seq.request.namespace.other_format(group)
        keys = seq.page_keys(pages, self._page_tokens, group)
        bits = bytearray(HAS_WRITTEN if (key, write) in found else 0 for key in keys)
        if other is not None:
            for page, key in enumerate(keys):
                if (key, other) in found:
                    bits[page] |= HAS_DECAYED
        return bytes(bits)

    def _choose(self, seq: Sequence, group: int, page: int, position: int) -> PageRecord | None:
        """The page in the pool for rows at `position`: as they want it, else as it can be used too."""
        recipe = seq.request.namespace.needs[group].recipe
        key = seq.page_key(page, self._page_tokens, group)
        for format in self._usable(seq, group, recipe.format_at(page, position, self._page_tokens)):
            record = self._cache.pool.get(key, format)
            if record is not None:
                return record
        return None

    def _usable(self, seq: Sequence, group: int, wanted: PageFormat) -> list[PageFormat]:
        """The formats that will do where one is wanted, best first."""
        namespace = seq.request.namespace
        formats = [wanted]
        if namespace.needs[group].recipe.write is not wanted:
            formats.append(namespace.needs[group].recipe.write)
        other = namespace.other_format(group)
        if namespace.needs[group].any_variant and other is not None and other is not wanted:
            formats.append(other)
        return formats

    def _loaded_bits(self, load: Load, group: int) -> bytes:
        bits = bytearray([HAS_WRITTEN | HAS_DECAYED]) * load.first_page + bytearray(
            load.wanted - load.first_page
        )
        write = load.chains[group].needs.recipe.write
        for part_group, page, format in load.parts:
            is_coming = load.placed.get((group, page)) is format and (group, page) not in load.came
            if part_group == group and page < load.wanted and not is_coming:
                bits[page] |= HAS_WRITTEN if format is write else HAS_DECAYED
        return bytes(bits)

    def _loaded_format(self, load: Load, seq: Sequence, group: int, page: int, position: int) -> PageFormat:
        wanted = load.chains[group].needs.recipe.format_at(page, position, self._page_tokens)
        return next(f for f in self._usable(seq, group, wanted) if (group, page, f) in load.parts)

    def _extend(self, seq: Sequence, group: int, end: int, now: float) -> bool:
        """Add pages of its own up to page `end`; False when there is no room for all."""
        pages, format = seq.groups[group], seq.request.namespace.needs[group].recipe.write
        for frame in self._cache.take(group, format, end - pages.num_pages, now):
            pages.put(pages.num_pages, frame, FORMAT_CODES[format])
            pages.num_pages += 1
        return pages.num_pages >= end

    def _settle(self, seq: Sequence, group: int, now: float) -> bool:
        """Convert the pages that rows at its position want in the decayed format; False when there is no room."""
        recipe, pages = seq.request.namespace.needs[group].recipe, seq.groups[group]
        end = recipe.decay_end(seq.computed, self._page_tokens)
        if recipe.decayed is None or end <= pages.settled:
            return True
        assert pages.formats is not None
        write, code = FORMAT_CODES[recipe.write], FORMAT_CODES[recipe.decayed]
        for page in pages.held(max(pages.settled, recipe.sink_pages(self._page_tokens)), end):
            if pages.formats[page] != write:
                continue
            target = self._convert(seq, group, page, recipe.decayed, now)
            if target is None:
                pages.settled = page
                return False
            source = int(pages.frames[page])
            pages.put(page, target, code)
            self._drop_spent(seq, group, page, source, now)
        pages.settled = end
        return True

    def _convert(self, seq: Sequence, group: int, page: int, format: PageFormat, now: float) -> int | None:
        """A frame with the sequence's written page in another format, held; None when there is no room."""
        cache = self._cache
        source = self._written_frame(seq, group, page)
        record = cache.record(source)
        known = None if record is None else cache.pool.get(record.key, format)
        if known is not None:
            cache.hold(known)
            if not self._is_put_off(seq, page):
                self._put_off_no_more(known)
            return known.frame
        taken = cache.take(group, format, 1, now)
        if not taken:
            return None
        source = self._written_frame(seq, group, page)  # it may have moved
        write = seq.request.namespace.needs[group].recipe.write
        cache.frames.add_op(Convert(group, [source], write, [taken[0]], format))
        cache.converted_pages += 1
        if record is not None:
            made = self._new_record(seq, group, page, record.key, taken[0], format, SaveState.DIRTY)
            made.made_from = write.value
            cache.cache_in_pool(made, seq.request.created_pages(self._page_tokens), now)
            self.converted.append(made)
        return taken[0]

    def _written_frame(self, seq: Sequence, group: int, page: int) -> int:
        write = seq.request.namespace.needs[group].recipe.write
        if seq.load is not None and (group, page, write) in seq.load.parts:
            return seq.load.parts[group, page, write]
        return int(seq.groups[group].frames[page])

    def _drop_spent(self, seq: Sequence, group: int, page: int, frame: int, now: float) -> None:
        """Let a page go that the sequence has in another format now.

        It leaves L1, where requests that end earlier in the text would want it: they find it below. While nothing can
        be saved there, what a request with the same prompt starts from stays as long as there is room.
        """
        record = self._cache.record(frame)
        if record is not None:
            prompt = (seq.request.prompt_tokens - 1) // self._page_tokens
            recipe = seq.request.namespace.needs[group].recipe
            wanted = recipe.format_at(page, prompt * self._page_tokens, self._page_tokens)
            is_start = page < prompt and wanted is recipe.write
            record.leaves = self._cache.can_save or not is_start
            self._cache.pool.spend(record)
        self._cache.drop(frame, now)

    def _is_put_off(self, seq: Sequence, page: int) -> bool:
        """The page isn't saved while the sequence goes on: a stream's, beyond its prompt."""
        is_prompt = (page + 1) * self._page_tokens <= seq.request.prompt_tokens
        return seq.request.namespace.is_stream and not is_prompt

    def _put_off_no_more(self, record: PageRecord) -> None:
        if record.is_put_off:
            record.is_put_off = False
            self.due.append(record)

    def _seal_page(self, seq: Sequence, group: int, page: int, now: float) -> PageRecord | None:
        write = seq.request.namespace.needs[group].recipe.write
        own = int(seq.groups[group].frames[page])
        key = seq.page_key(page, self._page_tokens, group)
        record = self._new_record(seq, group, page, key, own, write, SaveState.DIRTY)
        frame = self._share(seq, record, now)
        seq.groups[group].frames[page] = frame
        return record if frame == own else None

    def _share(self, seq: Sequence, record: PageRecord, now: float) -> int:
        """Put a page into the pool; the frame to be used from now on: its own, or that of the copy that is there."""
        known = self._cache.pool.get(record.key, record.format)
        if known is None:
            self._cache.cache_in_pool(record, seq.request.created_pages(self._page_tokens), now)
            return record.frame
        self._cache.hold(known)
        if not record.is_put_off:
            self._put_off_no_more(known)
        self._cache.drop(record.frame, now)
        return known.frame

    def _records(self, seq: Sequence, group: int) -> list[PageRecord]:
        """The cached pages that it holds in a group, head first."""
        pages = seq.groups[group]
        frames = pages.frames[list(pages.held())].tolist()
        if seq.load is not None:
            frames += [frame for (part, _, _), frame in seq.load.parts.items() if part == group]
        return sorted(self._cache.records_in(frames), key=lambda record: record.depth)

    def _new_record(
        self,
        seq: Sequence,
        group: int,
        page: int,
        key: PageKey,
        frame: int,
        format: PageFormat,
        save: SaveState,
    ) -> PageRecord:
        namespace, page_tokens = seq.request.namespace, self._page_tokens
        return PageRecord(
            frame=frame,
            group=group,
            format=format,
            nbytes=self._cache.groups[group][format],
            key=key,
            tokens=seq.tokens[page * page_tokens : (page + 1) * page_tokens].tobytes(),
            parent=seq.parent_key(page, page_tokens, group),
            root=namespace.roots[group],
            tree=seq.tree,
            tenant=namespace.digest,
            content=b"" if page else seq.content(),
            depth=page,
            save=save,
            is_pooled=True,
            is_put_off=save is SaveState.DIRTY and self._is_put_off(seq, page),
        )

    def _held_by_code(self, seq: Sequence, group: int) -> Counter[int]:
        """Pages it holds in a group, by the code of their format; its load's too."""
        pages = seq.groups[group]
        assert pages.formats is not None
        codes = Counter(pages.formats[: min(pages.sink_pages, pages.num_pages)].tolist())
        codes.update(pages.formats[pages.first_page : pages.num_pages].tolist())
        if seq.load is not None:
            codes.update(FORMAT_CODES[format] for part, _, format in seq.load.parts if part == group)
        return codes

    def _other_keys(self, seq: Sequence, group: int, pages: int, tokens: int) -> list[PageKey]:
        """The last `pages` keys, up to `tokens` tokens, under the root of exact requests; [] when there is none."""
        namespace = seq.request.namespace
        if not namespace.other_roots:
            return []
        keys = seq.keys_under(namespace.other_roots[group], tokens, self._page_tokens)
        return keys[len(keys) - pages :]
