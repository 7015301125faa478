"""What a node knows of the worth of its pages: one policy over all of them, those that left it included. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from kvtier.tier.policy.base import Candidates, Policy, Row, Use, Victim

DRAWN = 16  # pages that a policy may choose at once; the rest of a choice holds until uses change their worth


class Ranked(Protocol):
    """What an order asks of its members. A member's row never changes while it is in."""

    row: Row


T = TypeVar("T", bound=Ranked)
K = TypeVar("K", bound=Hashable)


class Fifo(Candidates):
    """Rows that have been chosen to leave already, in the order in which they were."""

    def __init__(self) -> None:
        self._rows: dict[Row, None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return row in self._rows

    def add(self, row: Row) -> None:
        assert row not in self._rows
        self._rows[row] = None

    def discard(self, row: Row) -> None:
        self._rows.pop(row, None)

    def check(self) -> None:
        """It holds its members alone."""

    def victims(self, pages: int, now: float) -> list[Victim]:
        return [Victim(row, 1) for row in islice(self._rows, pages)]


class Order(Generic[T]):
    """Pages in the order in which they leave, as a policy has it."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.members: dict[Row, T] = {}  # to look at
        self._drawn: list[Row] = []  # what leaves next, the first one last; some may have left since
        self.drawn_in = 0  # the owner's number of what has been used by then; see `redraw`

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, member: T) -> bool:
        return self.members.get(member.row) is member

    def add(self, member: T) -> None:
        """Put a member in; it must not be in yet."""
        self.members[member.row] = member
        self.candidates.add(member.row)
        if (
            len(self._drawn) == 1
        ):  # a policy that names one at a time is exact: the new one may come before it
            self._drawn.clear()

    def discard(self, member: T) -> None:
        """Take a member out; no matter if it isn't in."""
        row = member.row
        if self.members.pop(row, None) is not None:
            self.candidates.discard(row)

    def lowest(self, now: float) -> T | None:
        """The member that leaves first, still in; None when empty."""
        if not self.members:
            return None
        drawn = self._drawn
        while drawn:
            member = self.members.get(drawn[-1])
            if member is not None:
                return member
            drawn.pop()
        drawn.extend(victim.row for victim in reversed(self.candidates.victims(DRAWN, now)))
        return self.members[drawn[-1]]

    def redraw(self, used: int = 0) -> None:
        """Pages were used, for the `used`th time: what was to leave next may be worth more now."""
        self._drawn.clear()
        self.drawn_in = used

    def check(self) -> None:
        """The candidates are the members."""
        assert len(self.candidates) == len(self.members)
        assert all(row in self.candidates and row == member.row for row, member in self.members.items())
        self.candidates.check()


class Histories(Generic[K]):
    """The rows of a policy by the keys of their pages, of up to `max_ghosts` pages that aren't here too.

    A page that comes takes over the row of its key, if there is one. Of several pages of one key, such as one as
    written and one made from it, each has a row of its own, and the last to leave leaves its row behind. Owned by the
    owner of the policy.
    """

    def __init__(self, policy: Policy, max_ghosts: int) -> None:
        self.policy = policy
        self.max_ghosts = max_ghosts
        self._ghosts: OrderedDict[K, Row] = OrderedDict()  # used longest ago first
        self._new: set[Row] = set()  # of pages that no request has let go yet
        self._using: set[Row] = set()  # of pages that a request has begun to use and not let go yet

    def came(self, key: K, depth: int, nbytes: int, now: float) -> Row:
        """The row of a page that is here from now on."""
        row = self._ghosts.pop(key, None)
        if row is None:
            row = self.policy.add(1, depth, nbytes, 1, now)
            self._new.add(row)
        return row

    def left(self, key: K, row: Row) -> None:
        """A page is no longer here; its row is in no set of candidates."""
        if row in self._new:
            self._forget(row)
        else:
            self._remember(key, row)
            self._trim()

    def is_new(self, row: Row) -> bool:
        """Whether no request that used the page has let it go yet."""
        return row in self._new

    def renew(self, row: Row, depth: int, nbytes: int, created: int, now: float) -> Row:
        """Another row for a new page, now that it is known how many pages its request brought."""
        self._forget(row)
        row = self.policy.add(1, depth, nbytes, created, now)
        self._new.add(row)
        return row

    def elsewhere(self, key: K, depth: int, nbytes: int, created: int, now: float) -> Row | None:
        """The row of a page that isn't here, for a use that `end` tells at once; None where none is kept of such."""
        row = self._ghosts.get(key)
        if row is not None:
            self._ghosts.move_to_end(key)
        elif self.max_ghosts:
            row = self.policy.add(1, depth, nbytes, created, now)
            self._remember(key, row)
            self._new.add(row)
        return row

    def begin(self, rows: Iterable[Row], now: float) -> None:
        """A request begins, or began, to use these pages."""
        known = [row for row in rows if row not in self._new and row not in self._using]
        if known:
            self.policy.reuse(known, now)
            self._using.update(known)

    def end(self, rows: Sequence[Row], behind: Sequence[int], use: Use, began: float, now: float) -> None:
        """A request that began to use these pages lets them go; `behind` each lie so many of its pages."""
        self.begin(rows, began)
        if rows:
            self.policy.release(rows, behind, use, now)
        self._new.difference_update(rows)
        self._using.difference_update(rows)
        self._trim()

    def check(self, here: set[Row]) -> None:
        """The bounds hold, given the rows of the pages that are here."""
        ghosts = set(self._ghosts.values())
        assert len(ghosts) == len(self._ghosts) <= self.max_ghosts and not here & ghosts
        assert self._new <= here and self._using <= here | ghosts
        assert self.policy.num_rows == len(here) + len(ghosts), "a row that no page has"

    def _remember(self, key: K, row: Row) -> None:
        older = self._ghosts.pop(key, None)
        if older is not None:
            self._forget(older)
        self._ghosts[key] = row

    def _trim(self) -> None:
        while len(self._ghosts) > self.max_ghosts:
            self._forget(self._ghosts.popitem(last=False)[1])

    def _forget(self, row: Row) -> None:
        self._new.discard(row)
        self._using.discard(row)
        self.policy.forget(row)
