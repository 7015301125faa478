"""What a sequence needs of its pages, and in which format, as a function of positions alone. Pure.

A recipe says in which format the pages behind a row are, a window which of them the row attends. Both depend on the
row's position and on nothing else, so what is stored under a key doesn't depend on how a prompt was cut into chunks,
on what else ran, or on where a page came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from kvtier.tier.pages.page import PageFormat

DECAY_STRIDE_TOKENS = 128  # pages decay this many tokens at a time; anything from 64 to 512 behaves alike


@dataclass(frozen=True, slots=True)
class Recipe:
    """In which formats the pages of a sequence are kept.

    New tokens are written as `write`. With `decayed`, full pages that end at or before `recent_tokens` before the last
    multiple of `stride_tokens` are in that format, but for those that hold the first `sink_tokens`. Raises ValueError
    for numbers that can't be.
    """

    write: PageFormat
    decayed: PageFormat | None = None
    recent_tokens: int = 0
    sink_tokens: int = 0
    stride_tokens: int = DECAY_STRIDE_TOKENS

    def __post_init__(self) -> None:
        if not self.write.is_token_wise:
            raise ValueError(f"new tokens can't be written as {self.write}: it takes a page at once")
        if self.recent_tokens < 0 or self.sink_tokens < 0 or self.stride_tokens < 1:
            raise ValueError(
                f"recent_tokens {self.recent_tokens} and sink_tokens {self.sink_tokens} must not be negative, "
                f"stride_tokens {self.stride_tokens} must be positive"
            )

    @property
    def is_uniform(self) -> bool:
        """All pages are in one format, whatever their age."""
        return self.decayed is None

    def sink_pages(self, page_tokens: int) -> int:
        """Pages from the first one on that never decay."""
        return -(-self.sink_tokens // page_tokens)

    def decay_end(self, position: int, page_tokens: int) -> int:
        """Pages [sink_pages, decay_end) are in the decayed format for a row at `position`; page_tokens divides stride."""
        if self.decayed is None:
            return 0
        boundary = position // self.stride_tokens * self.stride_tokens - self.recent_tokens
        return max(0, boundary // page_tokens)

    def format_at(self, page: int, position: int, page_tokens: int) -> PageFormat:
        """The format of a page for a row at `position`."""
        if self.decayed is None or page < self.sink_pages(page_tokens):
            return self.write
        return self.decayed if page < self.decay_end(position, page_tokens) else self.write

    def rows_until_decay(self, position: int) -> int:
        """Rows from `position` on that see the same formats: a prefill chunk holds no more."""
        if self.decayed is None:
            return 1 << 30
        return self.stride_tokens - position % self.stride_tokens

    def __str__(self) -> str:
        """What root keys and tables say."""
        if self.decayed is None:
            return self.write.value
        return (
            f"{self.write.value} to {self.decayed.value} (recent {self.recent_tokens}, sinks {self.sink_tokens}, "
            f"stride {self.stride_tokens})"
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A row at position t attends the keys j <= t with j > t - tokens or j < sinks; `tokens` 0 means all keys."""

    tokens: int = 0
    sinks: int = 0

    def sink_pages(self, page_tokens: int) -> int:
        """Pages from the first one on that hold sinks."""
        return -(-self.sinks // page_tokens) if self.tokens else 0

    def first_page(self, position: int, page_tokens: int) -> int:
        """The first page behind the sinks' that rows at `position` or later attend."""
        if not self.tokens:
            return 0
        return max(self.sink_pages(page_tokens), max(0, position - self.tokens + 1) // page_tokens)

    def needs(self, page: int, position: int, page_tokens: int) -> bool:
        """Whether rows at `position` or later attend keys of a page."""
        return page < self.sink_pages(page_tokens) or page >= self.first_page(position, page_tokens)


@dataclass(frozen=True, slots=True)
class ChainNeeds:
    """What of one layer group's pages a prefix must have to be usable.

    `any_variant`: the decayed format will do for every page (a request that accepts lossy pages).
    """

    recipe: Recipe
    window: Window = Window()
    any_variant: bool = False


HAS_WRITTEN, HAS_DECAYED = 1, 2  # bits of a page's presence

_IS_ANY = bytes([0, *[1] * 255])  # any bits: 1
Span = tuple[int, int]  # pages [first, end); empty where end <= first


def longest_hit(
    needs: list[ChainNeeds], present: list[bytes], first: int, last_position: int, page_tokens: int
) -> int:
    """The largest number of pages n such that every chain has what rows from min(n pages, last_position) on need.

    `present[c][i]` are the HAS_ bits of page i of chain c (HAS_DECAYED only where the chain has such a format); `first`
    pages are known to be usable. A page that should be decayed may be there as it was written: the worker converts it.
    The answer is at least `first`. O(pages).
    """
    pages = min(map(len, present), default=0)
    chains: list[_Chain] = []
    for need, bits in zip(needs, present, strict=True):
        if not need.window.tokens:  # all pages are needed, so none behind the first that isn't there
            gone = bits.find(0, 0, pages)
            pages = pages if gone < 0 else gone
        if need.window.tokens or not (need.any_variant or need.recipe.is_uniform):
            chains.append(_Chain(need, bits, page_tokens))
    n = pages
    while n > first:
        position = min(n * page_tokens, last_position)
        if all(chain.serves(n, position) for chain in chains):
            return n
        n = min([n - 1, *(chain.longest_within(n - 1) for chain in chains)])
    return first


class _Chain:
    """One chain's pages, as running counts of those that a prefix can't be made of."""

    def __init__(self, need: ChainNeeds, present: bytes, page_tokens: int) -> None:
        self._need, self._page_tokens = need, page_tokens
        self._present = present.translate(_IS_ANY)
        self._absent = [0, *accumulate(not bits for bits in present)]
        wanted = 0xFF if need.any_variant else HAS_WRITTEN
        self._unwritten = [0, *accumulate(not bits & wanted for bits in present)]

    def longest_within(self, n: int) -> int:
        """No prefix of at most n pages that is longer than this can serve: its last page isn't there."""
        if self._need.window.tokens == 1:
            return n  # the last page isn't attended
        return self._present.rfind(1, 0, n) + 1

    def serves(self, n: int, position: int) -> bool:
        """Whether the first n pages have what rows from `position` on need."""
        window, recipe, page_tokens = self._need.window, self._need.recipe, self._page_tokens
        attended: list[Span] = [
            (0, min(n, window.sink_pages(page_tokens))),
            (window.first_page(position, page_tokens), n),
        ]
        kept = recipe.sink_pages(page_tokens)
        as_written: list[Span] = [(0, kept), (max(kept, recipe.decay_end(position, page_tokens)), n)]
        if any(_count(self._absent, *span) for span in attended):
            return False
        return not any(
            _count(self._unwritten, max(a, b), min(a_end, b_end))
            for a, a_end in attended
            for b, b_end in as_written
        )


def _count(sums: list[int], first: int, end: int) -> int:
    return sums[end] - sums[first] if first < end else 0
