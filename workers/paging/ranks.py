"""Which cached pages may leave L1, and whose go first: those of tenants that have more than their share. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from kvtier.tier.policy.base import Candidates, Policy, Row, Victim
from kvtier.workers.paging.frames import PageRecord

LOOKED_AT = 8  # runs set aside of which the best one leaves, or grows; a bound on the work


class Leaves(Candidates):
    """The candidates of a policy, but for those set aside: named to leave next, so that they can be saved before."""

    def __init__(self, ranked: Candidates, among: Candidates | None = None) -> None:
        """`among` holds all that is in `ranked`, and others: what leaves first of more than these is chosen there."""
        self._among = among
        self._ranked = ranked
        self.aside_bytes = 0
        # Pages at the end of a run, and their bytes; set aside longest ago first.
        self._aside: OrderedDict[Row, tuple[int, int]] = OrderedDict()
        self._partly: dict[Row, None] = {}  # those of them of whose run there is more

    def __len__(self) -> int:
        return len(self._ranked) + len(self._aside)

    def __contains__(self, row: Row) -> bool:
        return row in self._ranked or row in self._aside

    def add(self, row: Row) -> None:
        self._ranked.add(row)
        if self._among is not None:
            self._among.add(row)

    def discard(self, row: Row) -> None:
        if row in self._aside:
            self.aside_bytes -= self._aside.pop(row)[1]
            self._partly.pop(row, None)
        else:
            self._ranked.discard(row)
            if self._among is not None:
                self._among.discard(row)

    def victims(self, pages: int, now: float) -> list[Victim]:
        return self._ranked.victims(pages, now)

    def check(self) -> None:
        self._ranked.check()
        assert self._partly.keys() <= self._aside.keys()
        assert self.aside_bytes == sum(nbytes for _, nbytes in self._aside.values())

    def choose_to_evict(self, victim: Victim, nbytes: int, *, is_all: bool = True) -> None:
        """It, so many bytes, leaves next, unless it is used before. `is_all`: of its run; it may have been part of it."""
        self.discard(victim.row)
        if not is_all:
            self._partly[victim.row] = None
        self._aside[victim.row] = victim.pages, nbytes
        self.aside_bytes += nbytes

    def put_back(self) -> None:
        """Nothing is set aside any more."""
        for row in list(self._aside):
            self.discard(row)
            self.add(row)

    def partly_aside(self) -> Iterator[Victim]:
        """What is set aside of runs of which there is more."""
        return (Victim(row, self._aside[row][0]) for row in self._partly)

    def aside(self) -> Iterator[Victim]:
        """What is set aside, longest ago first."""
        return (Victim(row, pages) for row, (pages, _) in self._aside.items())


@dataclass(slots=True, eq=False)
class Rank:
    """Cached pages that may leave, of one tenant that has a share of its own or of all others. `spent` ones go first."""

    leaves: Leaves
    share_bytes: float = inf
    used_bytes: int = 0  # of cached pages, those that are held too
    spent: OrderedDict[PageRecord, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.spent) + len(self.leaves)


class Ranks:
    """Owned by the page cache. `shares` are at most 1, by the digest of a tenant; who isn't there may have all.

    One set has the candidates of all tenants, so that choosing among all costs the same however many there are.
    """

    def __init__(self, policy: Policy, shares: Mapping[bytes, float], capacity_bytes: int) -> None:
        self._policy = policy
        self._everyone = policy.candidates()
        self._common = Rank(Leaves(self._everyone))
        self._own = {
            tenant: Rank(Leaves(policy.candidates(), self._everyone), share * capacity_bytes)
            for tenant, share in shares.items()
            if share < 1.0
        }
        self._all = [self._common, *self._own.values()]

    def of(self, tenant: bytes | None) -> Rank:
        """Where a tenant's pages are ranked."""
        return self._common if tenant is None else self._own.get(tenant, self._common)

    def spent(self) -> PageRecord | None:
        """A page that goes before all that `victims` names."""
        return next((next(iter(rank.spent)) for rank in self._turn() if rank.spent), None)

    def victims(self, pages: int, now: float) -> list[Victim]:
        """What leaves first, of at most `pages` pages; none when nothing can."""
        over = self._over()
        if not over:
            return self._everyone.victims(pages, now)
        named = [victims for rank in over if (victims := rank.leaves.victims(pages, now))]
        return min(named, key=lambda victims: self._policy.value(victims[0].row, now), default=[])

    def aside(self) -> Iterator[tuple[Leaves, Victim]]:
        """Some of what is set aside, of each tenant's the longest ago first."""
        turn = self._turn()
        most = max(1, LOOKED_AT // len(turn))
        return ((rank.leaves, victim) for rank in turn for victim in islice(rank.leaves.aside(), most))

    def partly_aside(self) -> Iterator[Victim]:
        """The same of what is set aside of runs of which there is more."""
        turn = self._turn()
        most = max(1, LOOKED_AT // len(turn))
        return (victim for rank in turn for victim in islice(rank.leaves.partly_aside(), most))

    def put_back(self) -> None:
        """Nothing is set aside any more."""
        for rank in self._all:
            rank.leaves.put_back()

    @property
    def aside_bytes(self) -> int:
        """What is set aside of those that something may leave of now."""
        return sum(rank.leaves.aside_bytes for rank in self._turn())

    def check(self, records: Iterable[PageRecord]) -> None:
        """Re-derive the bytes; AssertionError where they differ."""
        used = {id(rank): 0 for rank in self._all}
        for record in records:
            used[id(self.of(record.tenant))] += record.nbytes
        for rank in self._all:
            assert rank.used_bytes == used[id(rank)], "bytes of a tenant's cached pages"

    def _turn(self) -> list[Rank]:
        """Those that something may leave of: while a tenant has more than its share, nothing else's pages."""
        return self._over() or self._all

    def _over(self) -> list[Rank]:
        return [rank for rank in self._own.values() if rank.used_bytes > rank.share_bytes and len(rank)]
