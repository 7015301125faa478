"""The cached pages that no radix tree holds, by key and format, and which of them go first. Pure.

A sequence that doesn't attend all of its pages, or has them in several formats, needs some pages of a chain and not
others. So pages are found one by one, a chain may have holes, and each page is kept by those who hold its frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.tier.pages.page import PageFormat, PageKey
from kvtier.tier.policy.base import Policy, Row, Use
from kvtier.workers.paging.frames import PageRecord
from kvtier.workers.paging.ranks import Ranks


class PagePool:
    """Owned by the page table. `evictable` counts, by size in bytes, the pages that nothing holds.

    Each page is a row of the policy, and once nothing holds it a candidate for eviction. Before all candidates go pages
    that are spent or leave.
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.pages: dict[tuple[PageKey, PageFormat], PageRecord] = {}
        self.counts: Counter[tuple[int, PageFormat]] = Counter()  # pages by layer group and format
        self.distinct: Counter[int] = Counter()  # by layer group, each once in whatever formats it is here
        self.evictable: Counter[int] = Counter()
        self._policy = policy
        self._ranks = ranks
        self._formats: Counter[PageKey] = Counter()  # in which a page is here
        self._by_row: dict[Row, PageRecord] = {}

    def get(self, key: PageKey, format: PageFormat) -> PageRecord | None:
        """The page, if it is here."""
        return self.pages.get((key, format))

    def by_row(self, row: Row) -> PageRecord | None:
        """The page that the policy names so."""
        return self._by_row.get(row)

    def add(self, record: PageRecord) -> None:
        """A page that something holds, with its row."""
        assert (record.key, record.format) not in self.pages, "a page twice"
        self._by_row[record.row] = record
        self.pages[record.key, record.format] = record
        self.counts[record.group, record.format] += 1
        self.distinct[record.group] += record.key not in self._formats
        self._formats[record.key] += 1

    def held(self, record: PageRecord) -> None:
        """Something holds the page from now on, maybe one more."""
        if not self._is_unheld(record):
            return
        rank = self._ranks.of(record.tenant)
        rank.leaves.discard(record.row)
        rank.spent.pop(record, None)
        self.evictable[record.nbytes] -= 1

    def unheld(self, record: PageRecord, now: float) -> None:
        """Its last holder let it go."""
        record.last_use_s = now
        rank = self._ranks.of(record.tenant)
        if record.is_spent:
            rank.spent[record] = None
        else:
            rank.leaves.add(record.row)
        self.evictable[record.nbytes] += 1

    def spend(self, record: PageRecord) -> None:
        """Its holder has it in another format, or it left a window: it goes first, once nothing holds it."""
        assert not self._is_unheld(record)
        record.is_spent = True

    def want(self, record: PageRecord) -> None:
        """A request starts from the page that something holds: it doesn't go first, and not at once."""
        assert not self._is_unheld(record)
        record.uses += 1
        record.is_spent = record.leaves = False

    def begin(self, records: Sequence[PageRecord], now: float) -> None:
        """A request begins to use these pages: the policy hears of those that were released."""
        rows = [record.row for record in records if not record.in_use]
        if rows:
            self._policy.reuse(rows, now)
            for record in records:
                record.in_use = True

    def release(self, records: Sequence[PageRecord], use: Use, now: float) -> None:
        """A request that used these pages, head first, is about to let them go."""
        if not records:
            return
        self.begin(records, now)
        behind = [max(0, use.pages - record.depth - 1) for record in records]
        self._policy.release([record.row for record in records], behind, use, now)
        for record in records:
            record.in_use = False

    def remove(self, record: PageRecord) -> None:
        """Nothing finds the page any more. Its row is the caller's to end."""
        del self.pages[record.key, record.format]
        del self._by_row[record.row]
        self.counts[record.group, record.format] -= 1
        self._formats[record.key] -= 1
        if not self._formats[record.key]:
            del self._formats[record.key]
            self.distinct[record.group] -= 1
        self.held(record)

    def check(self, is_held: Callable[[int], bool]) -> None:
        """Re-derive the counts and queues; AssertionError where one differs."""
        unheld = {record for record in self.pages.values() if not is_held(record.frame)}
        for record in self.pages.values():
            rank = self._ranks.of(record.tenant)
            is_free = record in unheld
            assert (record in rank.spent) == (is_free and record.is_spent), "pages that go first"
            assert (record.row in rank.leaves) == (is_free and not record.is_spent), "pages that may leave"
        assert self._by_row == {record.row: record for record in self.pages.values()}, "rows of pages"
        assert +self.counts == Counter((r.group, r.format) for r in self.pages.values()), "counts of pages"
        groups = {record.key: record.group for record in self.pages.values()}
        assert +self.distinct == Counter(groups.values()), "pages in whatever formats"
        assert self._formats == Counter(key for key, _ in self.pages), "formats of pages"
        assert +self.evictable == Counter(record.nbytes for record in unheld), "evictable pages"
        for (key, format), record in self.pages.items():
            assert record.key == key and record.format is format and record.is_pooled, (
                "a page under another's name"
            )

    def _is_unheld(self, record: PageRecord) -> bool:
        rank = self._ranks.of(record.tenant)
        return record in rank.spent or record.row in rank.leaves
