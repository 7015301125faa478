"""All that can happen to a worker's L1. An event holds plain values, and names sequences by number, pages by frame. Pure.

`apply` is what it does, and its result what comes of it; `said` is that result in plain values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvtier.tier.pages.page import PageFormat, PageKey, RootKey, TierName
from kvtier.tier.policy.base import Costs, Kind, Use
from kvtier.tier.protocol.messages import Missing, PageRef
from kvtier.workers.paging.frames import Op, PageRecord, SaveState
from kvtier.workers.requests.api import EngineRequest, FinishReason
from kvtier.workers.requests.sequence import Load, Request, Sequence, Tenancy
from kvtier.workers.scheduling.l1_answers import Answer, Says, of_records, of_step
from kvtier.workers.scheduling.scheduler import Step

if TYPE_CHECKING:
    from kvtier.workers.scheduling.l1 import L1

T = TypeVar("T")


class Event(msgspec.Struct, Generic[T], frozen=True, array_like=True, kw_only=True):
    """Something happens. `keys` are the page keys that were made meanwhile, see KeyMaker.noted: a recording has them."""

    keys: tuple[bytes, ...] = ()

    def apply(self, l1: L1, now: float) -> T:
        """Do it."""
        raise NotImplementedError

    def said(self, result: T) -> list[Answer]:
        """What came of it."""
        return [] if result is None else [Says(result)]

    def with_keys(self, keys: list[bytes]) -> Event[T]:
        """The same event with these keys."""
        return msgspec.structs.replace(self, keys=tuple(keys)) if keys else self


# ---- requests and steps ------------------------------------------------------------------------------------------


class Add(Event[Request], frozen=True):
    """A request comes, whose sequences have the numbers from `number` on and at most `longest` tokens.

    Sequences that are resumed begin at once, each with the tokens that it has; else the others follow the first one.
    """

    number: int
    spec: EngineRequest
    tenancy: Tenancy
    submitted_s: float
    wall_s: float
    turn: int
    longest: int

    def apply(self, l1: L1, now: float) -> Request:
        request = Request(self.spec, self.number, self.tenancy, self.submitted_s, self.wall_s, self.turn)
        begin = range(self.spec.sampling.n) if self.spec.is_resumed else range(1)
        for index in begin:
            if index not in self.spec.ended:
                l1.scheduler.add(l1.new_sequence(request, index, self.longest))
        return request

    def said(self, result: Request) -> list[Answer]:
        return []


class Siblings(Event[list[Sequence]], frozen=True):
    """A prompt has been computed: its request's other sequences begin, up to number `last`."""

    number: int
    last: int
    longest: int

    def apply(self, l1: L1, now: float) -> list[Sequence]:
        request = l1.sequences[self.number].request
        return [
            l1.new_sequence(request, number - request.number, self.longest)
            for number in range(self.number + 1, self.last + 1)
        ]

    def said(self, result: list[Sequence]) -> list[Answer]:
        return [Says([seq.number for seq in result])]


class Schedule(Event[Step], frozen=True):
    """A step begins. `free_slots`: L3 slots at hand for preempted sequences' pages, by their bytes."""

    can_load: bool
    free_slots: dict[int, int]

    def apply(self, l1: L1, now: float) -> Step:
        step = l1.scheduler.schedule(now, can_load=self.can_load, free_slots=self.free_slots)
        l1.rows = step.rows
        return step

    def said(self, result: Step) -> list[Answer]:
        return of_step(result)


class Computed(Event[list[PageRecord]], frozen=True):
    """All rows of the step have been computed; pages that are newly cached."""

    def apply(self, l1: L1, now: float) -> list[PageRecord]:
        rows, l1.rows = l1.rows, []
        return [record for row in rows for record in l1.scheduler.advance(row, now)]

    def said(self, result: list[PageRecord]) -> list[Answer]:
        return of_records(result)


class Measured(Event[None], frozen=True):
    """What recomputing a page costs."""

    costs: Costs

    def apply(self, l1: L1, now: float) -> None:
        l1.table.policy.costs = self.costs


class Fork(Event[list[Op]], frozen=True):
    """A sibling is to share the pages of its prompt, or waits. What is to be done at once."""

    number: int

    def apply(self, l1: L1, now: float) -> list[Op]:
        child = l1.sequences[self.number]
        return l1.scheduler.fork(child.request.sequences[0], child, now)

    def said(self, result: list[Op]) -> list[Answer]:
        return [*result]


class Sampled(Event[list[int]], frozen=True):
    """Sequences have one more token each; a request's first one closes its account. The numbers of those that had it."""

    numbers: list[int]
    tokens: list[int]

    def apply(self, l1: L1, now: float) -> list[int]:
        firsts: list[int] = []
        for number, token in zip(self.numbers, self.tokens, strict=True):
            seq = l1.sequences[number]
            if seq.request.usage is None:
                seq.request.count_usage()
                firsts.append(number)
            seq.append(token, now)
        return firsts


class Leaving(Event[tuple[Use, list[list[PageKey]]]], frozen=True):
    """A sequence is about to be over: what it leaves behind, and the keys of the pages that it used, by layer group."""

    number: int
    kind: Kind

    def apply(self, l1: L1, now: float) -> tuple[Use, list[list[PageKey]]]:
        seq, page_tokens = l1.sequences[self.number], l1.table.page_tokens
        use = seq.use(self.kind, page_tokens)
        keys = [seq.page_keys(use.pages, page_tokens, group) for group in range(len(seq.groups))]
        if not seq.is_plain:
            keys = [
                [chain[page] for page in pages.held(0, use.pages)]
                for chain, pages in zip(keys, seq.groups, strict=True)
            ]
        return use, keys


class Finish(Event[None], frozen=True):
    """A sequence is over; its pages go back, cached ones stay cached.

    Where that is in the middle of a step, its rows are out of it: nothing has been computed for them.
    """

    number: int
    reason: FinishReason
    kind: Kind

    def apply(self, l1: L1, now: float) -> None:
        seq = l1.sequences.pop(self.number)
        if l1.rows:
            l1.rows = [row for row in l1.rows if row.seq is not seq]
        l1.scheduler.finish(seq, now, self.reason, self.kind)


class Retenant(Event[None], frozen=True):
    """From now on a request's pages are found elsewhere: its tenant's were cleared."""

    number: int
    tenancy: Tenancy

    def apply(self, l1: L1, now: float) -> None:
        l1.sequences[self.number].request.tenancy = self.tenancy


# ---- loads -------------------------------------------------------------------------------------------------------


def _load_of(l1: L1, number: int) -> Load:
    load = l1.sequences[number].load
    assert load is not None, f"sequence {number} loads nothing"
    return load


class Found(Event[None], frozen=True):
    """The node has answered: a prefix of so many pages, for which these are there or coming."""

    number: int
    pages: int
    refs: list[PageRef]
    missing: Missing | None

    def apply(self, l1: L1, now: float) -> None:
        _load_of(l1, self.number).locate(self.pages, self.refs, self.missing)


class Cut(Event[None], frozen=True):
    """A load's pages from this one on won't be used."""

    number: int
    missing: Missing

    def apply(self, l1: L1, now: float) -> None:
        _load_of(l1, self.number).cut(self.missing.page, self.missing)


class GiveUp(Event[None], frozen=True):
    """A load waits no longer."""

    number: int
    reason: str
    detail: str

    def apply(self, l1: L1, now: float) -> None:
        _load_of(l1, self.number).give_up(self.reason, self.detail)


class Place(Event[int | None], frozen=True):
    """A page comes up: the frame for it, with a copy into it started; None, and the load is cut, without room."""

    number: int
    ref: PageRef
    format: PageFormat

    def apply(self, l1: L1, now: float) -> int | None:
        return l1.scheduler.place(l1.sequences[self.number], self.ref, self.format, now)


class Arrive(Event[None], frozen=True):
    """A page that its load still wants is in its frame, verified; the copy has ended."""

    number: int
    ref: PageRef
    tier: TierName

    def apply(self, l1: L1, now: float) -> None:
        l1.scheduler.arrive(l1.sequences[self.number], self.ref, self.tier, now)


class LoadOver(Event[int], frozen=True):
    """A load is complete: its sequence runs, with what came. The pages of its prefix."""

    number: int

    def apply(self, l1: L1, now: float) -> int:
        seq = l1.sequences[self.number]
        seq.lease = None
        return l1.scheduler.loaded(seq, now)


# ---- saves -------------------------------------------------------------------------------------------------------


class TakeOps(Event[list[Op]], frozen=True):
    """What is to be done to frames now."""

    def apply(self, l1: L1, now: float) -> list[Op]:
        return l1.table.take_ops()

    def said(self, result: list[Op]) -> list[Answer]:
        return [*result]


class TakeDue(Event[list[PageRecord]], frozen=True):
    """Pages whose saving was put off until now."""

    def apply(self, l1: L1, now: float) -> list[PageRecord]:
        return l1.table.take_due()

    def said(self, result: list[PageRecord]) -> list[Answer]:
        return of_records(result)


class SetAside(Event[list[PageRecord]], frozen=True):
    """What leaves next is chosen; those pages."""

    def apply(self, l1: L1, now: float) -> list[PageRecord]:
        return l1.table.set_aside(now)

    def said(self, result: list[PageRecord]) -> list[Answer]:
        return of_records(result)


class StartSave(Event[None], frozen=True):
    """The cached page in this frame is being copied down."""

    frame: int

    def apply(self, l1: L1, now: float) -> None:
        record = l1.table.record(self.frame)
        assert record is not None, f"frame {self.frame} holds no cached page"
        record.save = SaveState.SAVING
        l1.table.start_copy(self.frame)


class SaveAnew(Event[None], frozen=True):
    """The cached page in this frame was saved, and has no copy below any more."""

    frame: int

    def apply(self, l1: L1, now: float) -> None:
        record = l1.table.record(self.frame)
        assert record is not None, f"frame {self.frame} holds no cached page"
        record.save = SaveState.DIRTY


class Saved(Event[bool], frozen=True):
    """A save of the cached page in this frame is over. Whether the page is still cached."""

    frame: int
    is_written: bool

    def apply(self, l1: L1, now: float) -> bool:
        record = l1.table.record(self.frame)
        assert record is not None, f"frame {self.frame} holds no cached page"
        return l1.table.saved(record, self.is_written, now)


class StartCopy(Event[None], frozen=True):
    """A copy from or into a frame begins."""

    frame: int

    def apply(self, l1: L1, now: float) -> None:
        l1.table.start_copy(self.frame)


class EndCopies(Event[None], frozen=True):
    """Copies from or into these frames are over."""

    frames: list[int]

    def apply(self, l1: L1, now: float) -> None:
        for frame in self.frames:
            l1.table.end_copy(frame)


class Borrow(Event[int | None], frozen=True):
    """A frame of nobody's, with a copy into it started, where there is room."""

    group: int
    format: PageFormat

    def apply(self, l1: L1, now: float) -> int | None:
        return l1.table.borrow(self.group, self.format, now)


class LendOut(Event[list[int]], frozen=True):
    """Free frames, at most `count` of a size in units, are lent to the worker's peers; which."""

    size: int
    count: int

    def apply(self, l1: L1, now: float) -> list[int]:
        return l1.table.frames.lend(self.size, self.count)


class TakeBack(Event[None], frozen=True):
    """Nobody reads or writes these lent frames any more."""

    frames: list[int]

    def apply(self, l1: L1, now: float) -> None:
        l1.table.frames.take_back(self.frames)
        l1.table.lent_overdue = False


class LentOverdue(Event[None], frozen=True):
    """Lent frames that were asked for don't come: whoever waits for them makes room elsewhere."""

    def apply(self, l1: L1, now: float) -> None:
        l1.table.lent_overdue = True


class PreemptedSaved(Event[None], frozen=True):
    """A preempted sequence's pages have been copied down; where the node doesn't hold them for it, its lease is void."""

    number: int
    is_held: bool

    def apply(self, l1: L1, now: float) -> None:
        seq = l1.sequences[self.number]
        seq.copies = 0
        if not self.is_held:
            seq.lease = None


# ---- the node ----------------------------------------------------------------------------------------------------


class NodeCame(Event[None], frozen=True):
    """A node came (back): nothing is saved there. `can_save`: it takes pages."""

    can_save: bool

    def apply(self, l1: L1, now: float) -> None:
        l1.table.can_save = self.can_save
        l1.table.unsaved()


class NodeWent(Event[None], frozen=True):
    """Nothing can be saved any more."""

    def apply(self, l1: L1, now: float) -> None:
        l1.table.can_save = False


class LeasesOver(Event[None], frozen=True):
    """What was held below for these preempted sequences is void."""

    numbers: list[int]

    def apply(self, l1: L1, now: float) -> None:
        for number in self.numbers:
            l1.sequences[number].lease = None


# ---- administration ----------------------------------------------------------------------------------------------


class Pin(Event[bool | None], frozen=True):
    """Keep a page, and all before it; None when it isn't here, False past the bound."""

    key: PageKey

    def apply(self, l1: L1, now: float) -> bool | None:
        return l1.table.pin(self.key)


class Unpin(Event[bool], frozen=True):
    """Undo Pin."""

    key: PageKey

    def apply(self, l1: L1, now: float) -> bool:
        return l1.table.unpin(self.key, now)


class Remove(Event[bool | None], frozen=True):
    """Evict a page; None when it isn't here, False when it waits for its holders."""

    key: PageKey

    def apply(self, l1: L1, now: float) -> bool | None:
        return l1.table.remove(self.key, now)


class ClearTree(Event[None], frozen=True):
    """Evict every page of a tree, which is never matched again."""

    tree: RootKey

    def apply(self, l1: L1, now: float) -> None:
        l1.table.clear(self.tree, now)


EVENTS: tuple[type[Event[Any]], ...] = (
    *(Add, Siblings, Schedule, Computed, Measured, Fork, Sampled, Leaving, Finish, Retenant),
    *(Found, Cut, GiveUp, Place, Arrive, LoadOver),
    *(TakeOps, TakeDue, SetAside, StartSave, SaveAnew, Saved, StartCopy, EndCopies, Borrow, PreemptedSaved),
    *(LendOut, TakeBack, LentOverdue),
    *(NodeCame, NodeWent, LeasesOver, Pin, Unpin, Remove, ClearTree),
)
