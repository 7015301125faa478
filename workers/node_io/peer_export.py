"""Lends a worker's idle L1 frames to its peers on the node, and takes them back when it runs short of room.

What is lent stays L1's own, in a role of its own (workers/paging/frames.py): neither free nor cached until nothing can write into it any
more. The node says so of frames that it is asked for. Where the connection ends first, the arena's lifeline does: a pipe
that all hold open who may write into the arena, and nothing else.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping

from kvtier.tier.l1.arena import SlabAllocator
from kvtier.tier.protocol.messages import Lend, LentFrame, Reclaim
from kvtier.workers.node_io.node_link import NodeLink
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.sequence import Sequence, SequenceState
from kvtier.workers.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

RESERVE_PARTS = 8  # one part in so many of L1 is kept free beside what runs and waits
BATCH_PARTS = 32  # frames are lent, and asked for, by so large a part of L1: fewer messages
PATIENCE_S = 1.0  # for frames that were asked for; a borrower gives them up within a step of its own
STARVED_S = 10.0  # longer than that nothing waits for room that only overdue frames can give
POLL_S = 0.05  # between looks at the lifelines of connections that are over


def to_lend(table: PageTable, missing: Mapping[int, int], share: float) -> tuple[int, int]:
    """Size, and how many frames of it, that aren't needed soon: `missing` are. At most `share` of L1 is lent.

    Of several sizes each gets an equal part of that, in slabs.
    """
    slabs = table.frames.slabs
    if len(slabs.sizes) == 1:
        (size,) = slabs.sizes
        spare = slabs.free[size] - missing.get(size, 0) - slabs.per_slab(size) // RESERVE_PARTS
        room = int(share * slabs.per_slab(size)) - len(table.frames.lent)
        count, least = min(spare, room), slabs.per_slab(size) // BATCH_PARTS
    else:
        needed = sum(_slabs(slabs, s, n - slabs.free[s]) for s, n in missing.items())
        spare = slabs.free_slabs - needed - -(-slabs.num_slabs // RESERVE_PARTS)
        lent = {slabs.slab_of(frame): slabs.size_of(frame) for frame in table.frames.lent}
        by_size = Counter(lent.values())
        size = min(slabs.sizes, key=lambda size: (by_size[size], -size))
        room = min(
            int(share * slabs.num_slabs) - len(lent),
            -(-int(share * slabs.num_slabs) // len(slabs.sizes)) - by_size[size],
        )
        count, least = min(spare, room) * slabs.per_slab(size), 1
    return size, count if count >= max(1, least) else 0


def to_take_back(table: PageTable, missing: Mapping[int, int], asked: Mapping[int, object]) -> list[int]:
    """Frames that are lent and needed soon, since `missing` fit beside all that something holds only with them.

    A batch more than that; of several sizes whole slabs. `asked` are on their way.
    """
    slabs, frames = table.frames.slabs, table.frames
    pages = {size: slabs.used[size] + missing.get(size, 0) for size in slabs.sizes}
    for size, count in table.evictable().items():
        pages[size] -= count
    left = [frame for frame in frames.lent if frame not in asked]
    if len(slabs.sizes) == 1:
        (size,) = slabs.sizes
        short = pages[size] - slabs.per_slab(size) - len(asked)
        if short <= 0 and not table.lent_wanted:
            return []
        return left[: max(0, short) + max(1, slabs.per_slab(size) // BATCH_PARTS)]
    short = sum(_slabs(slabs, size, count) for size, count in pages.items()) - slabs.num_slabs
    short -= len(set(map(slabs.slab_of, asked)))
    if short <= 0 and not table.lent_wanted:
        return []
    wanted = [*dict.fromkeys(map(slabs.slab_of, left))][: max(0, short) + 1]
    return [frame for frame in left if slabs.slab_of(frame) in wanted]


def starved(scheduler: Scheduler) -> Sequence | None:
    """Who can't go on in what is left of L1 beside the frames that are lent, though nothing else runs.

    One that loads isn't meant: that ends at a deadline of its own.
    """
    table, active = scheduler.table, scheduler.active
    seq = next(iter(active or scheduler.waiting), None)
    if seq is None or not table.frames.lent or len(active) > 1 or seq.state is SequenceState.LOADING:
        return None
    tokens = seq.computed + 1 if active else min(seq.length + 1, seq.final_tokens)
    missing: Counter[int] = Counter()
    table.add_missing(missing, seq, tokens, table.page_tokens)
    return None if table.has_room(missing) else seq


def _slabs(slabs: SlabAllocator, size: int, pages: int) -> int:
    return -(-max(0, pages) // slabs.per_slab(size))


class PeerExport:
    """What a worker has lent, and to which node's peers. Owned by the step loop.

    At most `share` of L1 is lent; 0.0: nothing is, ever.
    """

    def __init__(self, scheduler: Scheduler, link: NodeLink, share: float) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._link = link
        self._share = share
        self._lifeline: int | None = None  # of this connection, where the node knows the arena
        self._asked: dict[int, float] = {}  # frames, and when they were asked for; earliest first
        self._orphans: list[tuple[int, list[int]]] = []  # lifelines that may be open yet, and what was lent
        self._looked_s = 0.0  # at the orphans' lifelines
        self._missed_s: float | None = None  # since when something waits while there are orphans
        # While frames are overdue: who is starved, how many tokens of it are computed, and since when.
        self._starved: tuple[Sequence, int, float] | None = None

    @property
    def is_waiting(self) -> bool:
        """Frames were asked for, and the node hasn't said yet that they are back."""
        return bool(self._asked)

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to look at."""
        times = [] if self._starved is None else [self._starved[2] + STARVED_S]
        if self._orphans:
            times.append(self._looked_s + POLL_S)
        elif self._asked and not self._table.lent_overdue:
            times.append(next(iter(self._asked.values())) + PATIENCE_S)
        return min(times, default=None)

    def came(self, lifeline: int | None) -> None:
        """A connection stands; its lifeline's read end is this object's from now on."""
        self._lifeline = lifeline

    def went(self) -> None:
        """The connection is over: what is lent may be written into until its lifeline is closed."""
        lifeline, self._lifeline = self._lifeline, None
        self._asked.clear()
        if lifeline is None:
            return
        orphaned = {frame for _, frames in self._orphans for frame in frames}
        frames = [frame for frame in self._table.frames.lent if frame not in orphaned]
        if frames:
            self._orphans.append((lifeline, frames))
        else:
            os.close(lifeline)

    def reclaimed(self, offsets: list[int], now: float) -> None:
        """The node says that nothing uses these frames any more."""
        unit_bytes = self._table.frames.unit_bytes
        frames = [offset // unit_bytes for offset in offsets]
        for frame in frames:
            self._asked.pop(frame, None)
        self._table.take_back(frames)

    def balance(self, now: float) -> None:
        """Lend what is idle, ask for what is needed. After a step, which says what that is."""
        if self._lifeline is None or not self._link.is_up:
            return
        lent = self._table.frames.lent
        if not lent and not self._has_free():
            return
        missing = self._scheduler.needed_soon()
        if lent:
            coming = {**self._asked, **dict.fromkeys(f for _, frames in self._orphans for f in frames)}
            self._ask(to_take_back(self._table, missing, coming), now)
            if self._asked:
                return
        for _ in self._table.frames.slabs.sizes:
            size, count = to_lend(self._table, missing, self._share)
            if count:
                self._lend(self._table.frames.lend(size, count), size)

    def _has_free(self) -> bool:
        table = self._table
        return RESERVE_PARTS * (table.capacity_bytes - table.used_bytes) > table.capacity_bytes

    def _lend(self, frames: list[int], size: int) -> None:
        unit_bytes = self._table.frames.unit_bytes
        if frames:
            self._link.send(Lend([LentFrame(frame * unit_bytes, size * unit_bytes) for frame in frames]))

    def _ask(self, frames: list[int], now: float) -> None:
        if frames:
            self._asked.update(dict.fromkeys(frames, now))
            unit_bytes = self._table.frames.unit_bytes
            self._link.send(Reclaim([frame * unit_bytes for frame in frames]))

    def expire(self, now: float) -> None:
        """Look at what no event tells of. Before a step, which may go on then."""
        if self._orphans:
            self._look_at_orphans(now)
        since = self._waits_since(now)
        if since is not None and now - since >= PATIENCE_S and not self._table.lent_overdue:
            late = len(self._asked) + sum(len(frames) for _, frames in self._orphans)
            log.warning("%d frames lent to peers don't come back; going on without", late)
            self._table.lent_overdue = True

    def given_up(self, now: float) -> Sequence | None:
        """A sequence that has waited long enough for frames that don't come back: its request is to end here.

        Nothing else bounds its wait. Whatever it computes meanwhile restarts it. Before each step.
        """
        if self._starved is None and not self._table.lent_overdue:
            return None
        seq = starved(self._scheduler)
        if seq is None:
            self._starved = None
        elif self._starved is None or self._starved[:2] != (seq, seq.computed):
            self._starved = seq, seq.computed, now
        elif now - self._starved[2] >= STARVED_S:
            self._starved = None
            return seq
        return None

    def _waits_since(self, now: float) -> float | None:
        """Since when frames are asked for; orphans, of which nothing can be asked, since something waits for them."""
        if not (self._orphans and self._table.lent_wanted):
            self._missed_s = None
        elif self._missed_s is None:
            self._missed_s = now
        return next(iter(self._asked.values()), self._missed_s)

    def _look_at_orphans(self, now: float) -> None:
        self._looked_s = now
        left: list[tuple[int, list[int]]] = []
        for lifeline, frames in self._orphans:
            if _is_closed(lifeline):
                os.close(lifeline)
                self._table.take_back(frames)
            else:
                left.append((lifeline, frames))
        self._orphans = left

    def close(self) -> None:
        """Nothing is taken back any more."""
        for lifeline, _ in self._orphans:
            os.close(lifeline)
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._lifeline, self._orphans = None, []

    def check(self) -> None:
        """What is asked for, and what is an orphan, is lent; AssertionError where it isn't."""
        lent = self._table.frames.lent
        assert self._asked.keys() <= lent.keys(), "frames are asked for that aren't lent"
        orphaned = [frame for _, frames in self._orphans for frame in frames]
        assert len(set(orphaned)) == len(orphaned) and lent.keys() >= set(orphaned), (
            "orphans that aren't lent"
        )
        assert lent.keys() == set(orphaned) or self._lifeline is not None, "frames lent to nothing"
        assert self._share or not lent


def _is_closed(lifeline: int) -> bool:
    """Nothing holds the pipe's write end any more."""
    try:
        return not os.read(lifeline, 1)
    except BlockingIOError:
        return False
