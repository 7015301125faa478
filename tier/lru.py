"""The order in which pages leave a tier: least recently used first, of one chain the tail first. Pure."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """What an order asks of its members; `last_use` may grow while the member is in it."""

    last_use: float

    @property
    def depth(self) -> int:
        """Position in the chain: of two pages used at once, the deeper one leaves first."""


T = TypeVar("T", bound=Ranked)


class Lru(Generic[T]):
    """Members by (last_use, -depth), the smallest first. All is O(log n) amortised; a use costs nothing.

    A member is touched by writing its `last_use`: its entry in the heap is then a lower bound, put right when it
    comes to the top. Entries of members that left are dropped there too, and by `_bound`.
    """

    def __init__(self) -> None:
        self._members: dict[T, None] = {}
        self._heap: list[tuple[float, int, int, T]] = []
        self._ticket = count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: T) -> bool:
        return member in self._members

    def add(self, member: T) -> None:
        """Put a member in; it must not be in yet."""
        assert member not in self._members
        self._members[member] = None
        heapq.heappush(self._heap, (member.last_use, -member.depth, next(self._ticket), member))
        self._bound()

    def discard(self, member: T) -> None:
        """Take a member out; no matter if it isn't in."""
        self._members.pop(member, None)
        self._bound()

    def oldest(self) -> T | None:
        """The member that leaves first, still in; None when empty."""
        heap = self._heap
        while heap:
            stamp, _, _, member = heap[0]
            if member in self._members:
                if member.last_use <= stamp:
                    return member
                heapq.heapreplace(heap, (member.last_use, -member.depth, next(self._ticket), member))
            else:
                heapq.heappop(heap)
        return None

    def check(self) -> None:
        """Every member has an entry that doesn't overstate its age's bound, and the heap is bounded."""
        assert len(self._heap) <= 2 * len(self._members) + 64
        listed: dict[T, float] = {}
        for stamp, _, _, member in self._heap:
            listed[member] = min(stamp, listed.get(member, stamp))
        for member in self._members:
            assert listed[member] <= member.last_use

    def _bound(self) -> None:
        """Rebuild the heap once stale entries outnumber the members: no more work than what made them stale."""
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(m.last_use, -m.depth, next(self._ticket), m) for m in self._members]
            heapq.heapify(self._heap)
