"""The cached pages that no radix tree holds, by key and format, and which of them go first. Pure.

A sequence that doesn't attend all of its pages, or has them in several formats, needs some pages of a chain and not
others. So pages are found one by one, a chain may have holes, and each page is kept by those who hold its frame.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from kvtier.tier.page import PageFormat, PageKey
from kvtier.workers.frames import PageRecord

FIRST = float("-inf")  # a last use before all others


class PagePool:
    """Owned by the page table. `evictable` counts, by size in bytes, the pages that nobody holds.

    Those used longest ago go first, of pages let go at once those let go first: callers begin with the deepest. Before
    them all go pages that are spent or leave.
    """

    def __init__(self) -> None:
        self.pages: dict[tuple[PageKey, PageFormat], PageRecord] = {}
        self.counts: Counter[tuple[int, PageFormat]] = Counter()  # pages by layer group and format
        self.distinct: Counter[int] = Counter()  # by layer group, each once in whatever formats it is here
        self.evictable: Counter[int] = Counter()
        self._formats: Counter[PageKey] = Counter()  # in which a page is here
        self._spent: OrderedDict[PageRecord, None] = OrderedDict()
        self._unheld: OrderedDict[PageRecord, None] = OrderedDict()

    def get(self, key: PageKey, format: PageFormat) -> PageRecord | None:
        """The page, if it is here."""
        return self.pages.get((key, format))

    def add(self, record: PageRecord) -> None:
        """A page that somebody holds."""
        assert (record.key, record.format) not in self.pages, "a page twice"
        self.pages[record.key, record.format] = record
        self.counts[record.group, record.format] += 1
        self.distinct[record.group] += record.key not in self._formats
        self._formats[record.key] += 1

    def held(self, record: PageRecord) -> None:
        """Somebody holds the page from now on, maybe one more."""
        queue = self._queue(record)
        if record in queue:
            del queue[record]
            self.evictable[record.nbytes] -= 1

    def unheld(self, record: PageRecord, now: float) -> None:
        """Its last holder let it go."""
        record.last_use_s = now
        self._queue(record)[record] = None
        self.evictable[record.nbytes] += 1

    def spend(self, record: PageRecord) -> None:
        """Its holder has it in another format, or it left a window: it goes first, once nobody holds it."""
        assert record not in self._unheld and record not in self._spent
        record.is_spent = True

    def want(self, record: PageRecord) -> None:
        """A request starts from the page that somebody holds: it doesn't go first, and not at once."""
        assert record not in self._unheld and record not in self._spent
        record.uses += 1
        record.is_spent = record.leaves = False

    @property
    def oldest_s(self) -> float | None:
        """When the page that goes first was used last; None when all are held."""
        if self._spent:
            return FIRST
        return next(iter(self._unheld)).last_use_s if self._unheld else None

    def oldest(self) -> PageRecord:
        """The page that goes first."""
        return next(iter(self._spent or self._unheld))

    def remove(self, record: PageRecord) -> None:
        """Nobody finds the page any more."""
        del self.pages[record.key, record.format]
        self.counts[record.group, record.format] -= 1
        self._formats[record.key] -= 1
        if not self._formats[record.key]:
            del self._formats[record.key]
            self.distinct[record.group] -= 1
        self.held(record)

    def check(self, is_held: Callable[[int], bool]) -> None:
        """Re-derive the counts and queues; AssertionError where one differs."""
        unheld = {record for record in self.pages.values() if not is_held(record.frame)}
        assert unheld == {*self._spent, *self._unheld}, "pages that nobody holds"
        assert all(record.is_spent for record in self._spent), "a page goes first that isn't spent"
        assert not any(record.is_spent for record in self._unheld), "a spent page waits its turn"
        assert +self.counts == Counter((r.group, r.format) for r in self.pages.values()), "counts of pages"
        groups = {record.key: record.group for record in self.pages.values()}
        assert +self.distinct == Counter(groups.values()), "pages in whatever formats"
        assert self._formats == Counter(key for key, _ in self.pages), "formats of pages"
        assert +self.evictable == Counter(record.nbytes for record in unheld), "evictable pages"
        uses = [record.last_use_s for record in self._unheld]
        assert uses == sorted(uses), "eviction order isn't by last use"
        for (key, format), record in self.pages.items():
            assert record.key == key and record.format is format and record.is_pooled, (
                "a page under another's name"
            )

    def _queue(self, record: PageRecord) -> OrderedDict[PageRecord, None]:
        return self._spent if record.is_spent else self._unheld
