"""How long a prefix a worker can have, what of it must come up to L1, and why it is no longer. Pure.

One Locate against the pages that the node has and those that L1 has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain as joined
from itertools import islice

from kvtier.tier.node.state.records import Page
from kvtier.tier.pages.recipe import HAS_DECAYED, HAS_WRITTEN, ChainNeeds, longest_hit
from kvtier.tier.protocol.events import PageId
from kvtier.tier.protocol.messages import Chain, Locate, PageRef, Remote
from kvtier.tier.protocol.rules import needs_of

Find = Callable[[bytes, str], Page | None]
Sources = tuple[Remote, ...]


@dataclass(slots=True)
class Hit:
    """A prefix of `pages` pages: those of them that the node must bring, and those to be fetched from other nodes.

    `fetched` are these: of each, the nodes that are said to have it, the one to ask first. `unsaved` are those that
    only a worker may have, in its L1.
    """

    pages: int
    needed: list[tuple[PageRef, Page]]
    fetched: list[tuple[PageRef, Sources]] = field(default_factory=list)
    unsaved: list[PageRef] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Page `page` of chain `chain` is what a longer prefix lacks first.

    It was looked for as `wanted`, the best one first. `is_here`: in another format, that won't do.
    """

    chain: int
    page: int
    wanted: tuple[PageId, ...]
    is_here: bool


class Lookup:
    """Answers one Locate; `find` says what the node has. The chains are looked at as far as `max_keys` in all."""

    def __init__(self, message: Locate, find: Find, max_keys: int) -> None:
        self._message = message
        self._first = message.first_page
        self._page_tokens = message.page_tokens
        length = len(message.chains[0].keys)
        self._length = min(length, max_keys // len(message.chains))
        self.is_cut = self._length < length
        self._chains = [_Known(chain, find, self._length) for chain in message.chains]

    @property
    def end(self) -> int:
        """The longest prefix that could be asked for."""
        return self._first + self._length

    def longest(self) -> Hit:
        """The longest prefix."""
        return self._hit(resident=False)

    def longest_resident(self) -> Hit:
        """The longest prefix for which nothing must be read from L4."""
        return self._hit(resident=True)

    @property
    def is_simple(self) -> bool:
        """One chain of which every page is attended, as it was written: each page is had on its own, whatever the end."""
        chain = self._message.chains[0]
        is_exact = not (chain.decayed or chain.other_keys or chain.any_variant)
        return len(self._chains) == 1 and self._chains[0].is_plain and is_exact

    def row(self, reach: int) -> list[Page | bool]:
        """Of a simple chain, page by page: the page that is here, True where L1 has it, False where nothing has.

        As far as the first that nothing has at or behind page `reach` of the sequence.
        """
        (known,) = self._chains
        return known.row(reach - self._first)

    def blocked_at(self, pages: int) -> Blocked:
        """What a prefix longer than `pages` pages, the longest there is, lacks first."""
        position = self._position(pages + 1)
        for number, known in enumerate(self._chains):
            behind = pages - self._first  # of a plain chain all that is before is there, or is fetched
            attended = known.attended(self._first, pages + 1, position, self._page_tokens)
            for index in (behind,) if known.is_plain else attended:
                found = known.blocked(index, self._first, position, self._page_tokens)
                if found is not None:
                    return Blocked(number, self._first + index, *found)
        raise AssertionError("nothing is lacking")

    def _hit(self, *, resident: bool) -> Hit:
        chains = self._chains
        if all(known.is_plain for known in chains):
            pages = self._first + min(known.first_absent(resident) for known in chains)
        else:
            known_pages = bytes((HAS_WRITTEN | HAS_DECAYED,)) * self._first
            present = [known_pages + known.present(resident) for known in chains]
            needs = [known.needs for known in chains]
            pages = longest_hit(needs, present, self._first, self._message.last_position, self._page_tokens)
        position = self._position(pages)
        needed: list[tuple[PageRef, Page]] = []
        for number, known in enumerate(chains):
            if known.is_plain and not resident:
                needed += known.all_to_bring(number, self._first, pages)
                continue
            for index in known.attended(self._first, pages, position, self._page_tokens):
                page = known.to_bring(index, self._first, position, self._page_tokens, resident)
                if page is not None:
                    needed.append(((number, self._first + index), page))
        return Hit(pages, needed)

    def _position(self, pages: int) -> int:
        return min(pages * self._page_tokens, self._message.last_position)


class _Known:
    """What is known of one chain's pages; indexes count from the Locate's first page."""

    def __init__(self, chain: Chain, find: Find, length: int) -> None:
        self._chain = chain
        self._find = find
        self._length = length
        self.is_plain = not chain.window_tokens and (chain.any_variant or not chain.decayed)
        # A plain chain is found as far as its first gap: all behind it is of no use.
        self._written: list[Page | None] = []
        self._decayed: list[Page | None] = []
        self._gap = length  # of a plain chain: pages before the first that is nowhere
        for index, key in enumerate(islice(chain.keys, length)):
            written = find(key, chain.variant)
            decayed = find(key, chain.decayed) if chain.decayed else None
            if chain.other_keys:
                other = chain.other_keys[index]
                written = written or find(other, chain.variant)
                decayed = decayed or (find(other, chain.decayed) if chain.decayed else None)
            self._written.append(written)
            self._decayed.append(decayed)
            if self.is_plain and written is None and decayed is None and not chain.held[index]:
                self._gap = index
                break

    def row(self, reach: int) -> list[Page | bool]:
        """Of a simple chain: see Lookup."""
        held, row = self._chain.held, []
        for index in range(self._length):
            if index == len(self._written):
                self._written.append(self._find(self._chain.keys[index], self._chain.variant))
                self._decayed.append(None)
            page: Page | bool = bool(held[index]) or self._written[index] or False
            if page is False and index >= reach:
                break
            row.append(page)
        return row

    @cached_property
    def needs(self) -> ChainNeeds:
        """What a prefix must have of it."""
        return needs_of(self._chain)

    def first_absent(self, resident: bool) -> int:
        """Of a plain chain: pages before the first that is nowhere."""
        held = self._chain.held
        if not resident:
            return self._gap
        for index, (written, decayed) in enumerate(zip(self._written, self._decayed, strict=True)):
            if not (held[index] or _has(written, resident) or _has(decayed, resident)):
                return index
        return self._gap

    def all_to_bring(self, number: int, first: int, pages: int) -> list[tuple[PageRef, Page]]:
        """Of a plain chain: what serves best of each page of a prefix that L1 lacks."""
        found = zip(self._chain.held, self._written, self._decayed, strict=False)
        return [
            ((number, first + index), page)
            for index, (held, written, decayed) in enumerate(islice(found, pages - first))
            if not held and (page := written or decayed) is not None
        ]

    def present(self, resident: bool) -> bytes:
        """The HAS_ bits of all pages."""
        pages = zip(self._chain.held, self._written, self._decayed, strict=False)
        return bytes(
            held
            | (HAS_WRITTEN if _has(written, resident) else 0)
            | (HAS_DECAYED if _has(decayed, resident) else 0)
            for held, written, decayed in pages
        )

    def attended(self, first: int, pages: int, position: int, page_tokens: int) -> Iterable[int]:
        """The pages of a prefix, from page `first` of the sequence on, that rows from `position` on attend."""
        if not self._chain.window_tokens:
            return range(pages - first)
        window = self.needs.window
        goes_to_l4 = min(pages, window.sink_pages(page_tokens))
        low = max(first, window.first_page(position, page_tokens))
        return joined(range(goes_to_l4 - first), range(low - first, pages - first))

    def to_bring(
        self, index: int, first: int, position: int, page_tokens: int, resident: bool
    ) -> Page | None:
        """The page that serves best; None where what L1 has will do."""
        as_written = self._is_wanted_as_written(first + index, position, page_tokens)
        exact = as_written and not self._chain.any_variant
        if self._chain.held[index] & (HAS_WRITTEN if exact else HAS_WRITTEN | HAS_DECAYED):
            return None
        written, decayed = self._written[index], self._decayed[index]
        for page in (written, decayed) if as_written else (decayed, written):
            if page is not None and _has(page, resident):
                return page
        raise AssertionError("a page of the prefix is nowhere")

    def blocked(
        self, index: int, first: int, position: int, page_tokens: int
    ) -> tuple[tuple[PageId, ...], bool] | None:
        """What a page was looked for as, and whether it is here in another format; None where it will do."""
        chain = self._chain
        as_written = self._is_wanted_as_written(first + index, position, page_tokens)
        bits = chain.held[index]
        bits |= HAS_WRITTEN if self._written[index] is not None else 0
        bits |= HAS_DECAYED if self._decayed[index] is not None else 0
        if bits & (HAS_WRITTEN if as_written and not chain.any_variant else HAS_WRITTEN | HAS_DECAYED):
            return None
        variants = [chain.variant]
        if chain.decayed and (chain.any_variant or not as_written):
            variants.insert(len(variants) if as_written else 0, chain.decayed)
        keys = [chain.keys[index], *chain.other_keys[index : index + 1]]
        return tuple((key, variant) for variant in variants for key in keys), bits != 0

    def _is_wanted_as_written(self, page: int, position: int, page_tokens: int) -> bool:
        if self.is_plain:
            return True
        recipe = self.needs.recipe
        return recipe.format_at(page, position, page_tokens) is recipe.write


def _has(page: Page | None, resident: bool) -> bool:
    return page is not None and (not resident or page.host is not None or page.peer is not None)
