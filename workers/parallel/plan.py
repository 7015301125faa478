"""The plan of a tensor parallel group: what its leader decided, in numbered steps, and who has answered. Pure.

Rank 0 leads: it alone schedules, and keeps L1's page table. Each call that touches the model or the arena becomes a step,
which goes to the other ranks in order; a rank applies step n after step n - 1 and votes on nothing. Frames have the
same numbers on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvtier.workers.runner.runner import GroupPages, SequenceRows, StepBatch

MAX_UNANSWERED = 256  # steps on their way; a group that lags so far behind is waited for


# ---- leader -> rank


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first frame: load the model so, and meet the others at `store`. `options` are load_runner's."""

    rank: int
    ranks: int
    path: str
    options: dict[str, Any]
    store: str
    collective_s: float


class Pages(msgspec.Struct, frozen=True, array_like=True):
    """GroupPages; arrays are int32, formats uint8 or b"" for none."""

    frames: bytes
    formats: bytes
    sink_pages: int
    first_page: int
    window: int
    sinks: int


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """SequenceRows."""

    start: int
    length: int
    context: int
    pages: list[Pages]


class Forward(msgspec.Struct, frozen=True, tag=True):
    """One step of the model. The logits are the leader's alone, so no rank is asked for any."""

    token_ids: bytes  # int32 [rows]
    positions: bytes  # int32 [rows]
    sequences: list[Rows]


class CopyHead(msgspec.Struct, frozen=True, tag=True):
    """Copy the first `tokens` tokens of a page of the whole shape `spec` into another frame."""

    source: int
    target: int
    tokens: int
    spec: bytes


class Move(msgspec.Struct, frozen=True, tag=True):
    """Copy `units` units over others."""

    source: int
    target: int
    units: int


class Convert(msgspec.Struct, frozen=True, tag=True):
    """ModelRunner.convert."""

    group: int
    sources: list[int]
    source_format: str
    targets: list[int]
    target_format: str


class SlotPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of the whole shape `spec` in slot `slot` (Grant.slot), and a rank's share of it in `frame`."""

    slot: int
    frame: int
    spec: bytes
    tokens: int


class CopyIn(msgspec.Struct, frozen=True, tag=True):
    """Fill frames from slots that the leader has verified, and leased."""

    pages: list[SlotPage]


class CopyOut(msgspec.Struct, frozen=True, tag=True):
    """Write what this rank saves of the frames into slots that the leader was granted."""

    pages: list[SlotPage]


class OpenSlab(msgspec.Struct, frozen=True, tag=True):
    """Map the node's slab. Its descriptor rides along, then one of the leader's connection to the node.

    A rank keeps the latter as long as it maps the slab: the node takes the leader's grants back when the last
    descriptor of the connection is closed, so never while a rank may still write into a slot.
    """

    nbytes: int


class CloseSlab(msgspec.Struct, frozen=True, tag=True):
    """Let the slab and the connection go; no copy is under way."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End."""


Body = Forward | CopyHead | Move | Convert | CopyIn | CopyOut | OpenSlab | CloseSlab | Stop


class Step(msgspec.Struct, frozen=True, tag=True):
    """Step `number` of the plan, from 1."""

    number: int
    body: Body


ToRank = Begin | Step

# ---- rank -> leader


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The rank runs, and is about to load the model."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; all ranks must say the same."""

    units: int
    root_fields: dict[str, str]


class Done(msgspec.Struct, frozen=True, tag=True):
    """Step `number` is applied, but for the pages in `failed`, by their place in the step, with the reason."""

    number: int
    failed: dict[int, str] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank can't go on, so the group can't."""

    reason: str


FromRank = Joined | Ready | Done | Failed


class GroupBroken(RuntimeError):
    """A rank is gone or doesn't answer: the group ends as a whole."""


@dataclass(slots=True)
class _Unanswered:
    sent_s: float
    name: str
    ranks: set[int]
    failed: dict[int, str] = field(default_factory=dict)


class Ledger:
    """Which steps were sent, and who has yet to answer. Owned by the group's link; reads no clock.

    `error` says why the group is broken. What is kept is bounded by MAX_UNANSWERED steps and those not yet taken.
    """

    def __init__(self, ranks: Iterable[int], patience_s: float) -> None:
        """`ranks`: those that steps go to."""
        self.error: str | None = None
        self._ranks = frozenset(ranks)
        self._poll_timeout_s = patience_s
        self._next = 1
        self._unanswered: dict[int, _Unanswered] = {}
        self._wanted: set[int] = set()
        self._results: dict[int, dict[int, str]] = {}

    @property
    def has_room(self) -> bool:
        """Another step may be sent."""
        return len(self._unanswered) < MAX_UNANSWERED

    def number(self, name: str, now: float, *, wanted: bool) -> int:
        """The next step's number. `wanted`: something will `take` its result."""
        number, self._next = self._next, self._next + 1
        self._unanswered[number] = _Unanswered(now, name, set(self._ranks))
        if wanted:
            self._wanted.add(number)
        return number

    def done(self, rank: int, answer: Done) -> str | None:
        """A rank has applied a step. What is wrong with the answer; None when nothing is."""
        step = self._unanswered.get(answer.number)
        if step is None or rank not in step.ranks:
            return f"rank {rank} answered step {answer.number}, which it wasn't asked for"
        step.ranks.remove(rank)
        for place, why in answer.failed.items():
            step.failed.setdefault(place, f"rank {rank}: {why}")
        if step.ranks:
            return None
        del self._unanswered[answer.number]
        if answer.number in self._wanted:
            self._results[answer.number] = step.failed
        return None

    def take(self, number: int) -> dict[int, str] | None:
        """What failed of a step on any rank; None while a rank hasn't answered. Raises GroupBroken."""
        if number in self._results:
            self._wanted.discard(number)
            return self._results.pop(number)
        if self.error is not None:
            raise GroupBroken(self.error)
        return None

    def fail(self, reason: str) -> bool:
        """The group is broken; False when it was before."""
        if self.error is not None:
            return False
        self.error = reason
        return True

    def overdue(self, now: float) -> str | None:
        """Who hasn't answered for too long, and what."""
        for number, step in self._unanswered.items():  # the oldest first
            if now - step.sent_s > self._poll_timeout_s:
                ranks = ", ".join(map(str, sorted(step.ranks)))
                return (
                    f"rank {ranks} has not answered step {number} ({step.name}) for {now - step.sent_s:.1f} s"
                )
            break
        return None


class Order:
    """A rank's place in the plan."""

    def __init__(self) -> None:
        self.applied = 0

    def next(self, number: int) -> None:
        """Raise GroupBroken unless this is the step behind the last one."""
        if number != self.applied + 1:
            raise GroupBroken(f"step {number} came after step {self.applied}")
        self.applied = number


def forward_step(batch: StepBatch) -> Forward:
    """A batch as the other ranks hear of it."""
    return Forward(
        batch.token_ids.tobytes(),
        batch.positions.tobytes(),
        [
            Rows(
                s.start,
                s.length,
                s.context,
                [
                    Pages(
                        np.asarray(p.frames, np.int32).tobytes(),
                        b"" if p.formats is None else p.formats.tobytes(),
                        p.sink_pages,
                        p.first_page,
                        p.window,
                        p.sinks,
                    )
                    for p in s.pages
                ],
            )
            for s in batch.sequences
        ],
    )


def batch_of(step: Forward) -> StepBatch:
    """The batch of a step, without wanted logits."""
    return StepBatch(
        np.frombuffer(step.token_ids, np.int32).copy(),
        np.frombuffer(step.positions, np.int32).copy(),
        [
            SequenceRows(
                s.start,
                s.length,
                s.context,
                tuple(
                    GroupPages(
                        np.frombuffer(p.frames, np.int32).copy(),
                        np.frombuffer(p.formats, np.uint8).copy() if p.formats else None,
                        p.sink_pages,
                        p.first_page,
                        p.window,
                        p.sinks,
                    )
                    for p in s.pages
                ),
            )
            for s in step.sequences
        ],
        np.empty(0, np.int32),
    )
