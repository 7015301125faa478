"""All that decides in a worker's L1 as one state machine: which pages it has, and who computes what in a step. Pure.

What happens to it is an event (workers/scheduling/l1_events.py), and nothing else changes it. So its state and the events after it are all
there is to know, and a recording of them can be run again (workers/scheduling/recorded.py). Reading it is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.key_maker import KeyMaker
from kvtier.workers.requests.sequence import Request, Sequence
from kvtier.workers.scheduling.l1_answers import Answer, Drops
from kvtier.workers.scheduling.scheduler import Row, Scheduler

if TYPE_CHECKING:
    from kvtier.workers.scheduling.l1_events import Event

T = TypeVar("T")


class Tap(Protocol):
    """Who listens, until it `is_over`: recorder.Recorder."""

    @property
    def is_over(self) -> bool: ...
    def heard(
        self, event: object, now: float, answer: object, counters: Callable[[], object]
    ) -> None: ...  # an event, and what came of it
    def broke(
        self, event: object, now: float, error: BaseException
    ) -> None: ...  # an event that was too much


class L1:
    """The page table and the scheduler of one worker. Owned by the step loop; `now` never goes back.

    `sequences` are those that aren't over, by their numbers, `rows` those of the step that is being computed. What the
    ids in `eos_ids` end isn't decided here, and nothing here hangs on which tokens there are: only on whether two
    sequences begin with the same ones.
    """

    def __init__(self, table: PageTable, scheduler: Scheduler, eos_ids: tuple[int, ...] = ()) -> None:
        self.table = table
        self.scheduler = scheduler
        self.eos_ids = eos_ids
        self.sequences: dict[int, Sequence] = {}
        self.rows: list[Row] = []
        self.key_maker = KeyMaker()
        self._tap: Tap | None = None

    def hear(self, event: Event[T], now: float) -> T:
        """An event happens; what it says is its result."""
        if self._tap is None:
            return event.apply(self, now)
        return self._hear_tapped(event, now, self._tap)

    def tap(self, tap: Tap | None) -> None:
        """From now on `tap` hears of all events; nobody does, with None."""
        self._tap = tap
        self.table.left = None if tap is None else []

    def answers(self, event: Event[T], result: T) -> list[Answer]:
        """All that came of an event, the pages that left meanwhile included. To be asked for once."""
        answers = event.said(result)
        if self.table.left:
            answers += map(Drops, self.table.left)
            self.table.left = []
        return answers

    def counters(self) -> Mapping[str, Any]:
        """What a run and a rerun must agree on beside the answers: counts, and how far each sequence is."""
        table, scheduler = self.table, self.scheduler
        return {
            "used_bytes": table.used_bytes,
            "pages": sorted((group, format.value, n) for (group, format), n in table.counts.items() if n),
            "evicted_pages": table.evicted_pages,
            "dropped_pages": table.dropped_pages,
            "converted_pages": table.converted_pages,
            "remembered_pages": len(table.ghosts),
            "pinned": sorted(table.pinned),
            "limbo": table.limbo,
            "lent_bytes": table.lent_bytes,
            "copies": table.copies_in_flight,
            "policy": table.policy.state,
            "fallbacks": table.policy.fallbacks,
            "preemptions": scheduler.preemptions,
            "waiting": [_progress(seq) for seq in scheduler.waiting],
            "active": [_progress(seq) for seq in scheduler.active],
        }

    # For events

    def new_sequence(self, request: Request, index: int, longest: int) -> Sequence:
        """One of a request's sequences, of at most `longest` tokens."""
        seq = Sequence(request, index, self.table.page_tokens, self.eos_ids, longest, self.key_maker)
        request.sequences.append(seq)
        self.sequences[seq.number] = seq
        return seq

    def _hear_tapped(self, event: Event[T], now: float, tap: Tap) -> T:
        if tap.is_over:
            self.tap(None)
            return event.apply(self, now)
        noted = self.key_maker.noted = []
        try:
            result = event.apply(self, now)
        except BaseException as error:
            tap.broke(event.with_keys(noted), now, error)
            raise
        finally:
            self.key_maker.noted = None
        tap.heard(event.with_keys(noted), now, self.answers(event, result), self.counters)
        return result


def _progress(seq: Sequence) -> tuple[int, str, int, int, int]:
    return seq.number, seq.state.value, seq.length, seq.computed, seq.num_held
