"""What a worker's L1 says to each event, in a form that is compared and written down: numbers and keys, no objects. Pure.

Operations on frames (frames.Op) are said as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvtier.tier.pages.page import PageFormat, PageKey
from kvtier.workers.paging.frames import Op, PageRecord
from kvtier.workers.requests.sequence import Load, Sequence
from kvtier.workers.scheduling.scheduler import Demotion, Step


class Computes(msgspec.Struct, frozen=True, array_like=True):
    """A row of the step: tokens [start, start + length) of a sequence; `samples` when a token follows."""

    number: int
    start: int
    length: int
    samples: bool


class Demotes(msgspec.Struct, frozen=True, array_like=True):
    """A sequence is preempted; `pages` (group, depth, frame, tokens, format, key) go down, held under this lease."""

    number: int
    lease: int
    pages: list[tuple[int, int, int, int, PageFormat, PageKey]]


class Loads(msgspec.Struct, frozen=True, array_like=True):
    """A sequence asks for pages below L1. By layer group their keys, those under the other root, and what L1 has."""

    number: int
    lease: int
    first_page: int
    chains: list[tuple[list[PageKey], list[PageKey], bytes]]
    last_position: int
    tail_tokens: int
    deadline_s: float


class EndsLease(msgspec.Struct, frozen=True, array_like=True):
    """What the node holds under this lease isn't needed any more."""

    lease: int


class BreaksPins(msgspec.Struct, frozen=True, array_like=True):
    """A request needs the room of so many pages that an administrator had pinned."""

    pages: int


class Saves(msgspec.Struct, frozen=True, array_like=True):
    """A cached page may be saved."""

    frame: int
    key: PageKey


class Drops(msgspec.Struct, frozen=True, array_like=True):
    """A page has left L1's cache: evicted, spent, or removed."""

    key: PageKey


class Says(msgspec.Struct, frozen=True, array_like=True):
    """A plain answer."""

    value: Any


Answer = Computes | Demotes | Loads | EndsLease | BreaksPins | Saves | Drops | Says | Op


def of_step(step: Step) -> list[Answer]:
    """All that a step is."""
    answers: list[Answer] = [
        Computes(row.seq.number, row.start, row.length, row.samples) for row in step.rows
    ]
    answers += step.ops
    answers += map(_demotes, step.demotions)
    answers += map(_loads, step.loads)
    answers += [EndsLease(lease_number(lease)) for lease in step.leases_over]
    answers += of_records(step.converted)
    if step.broken_pins:
        answers.append(BreaksPins(step.broken_pins))
    return answers


def of_records(records: list[PageRecord]) -> list[Answer]:
    """Pages that may be saved."""
    return [Saves(record.frame, record.key) for record in records]


def lease_number(lease: str | None) -> int:
    """A worker numbers its leases; what stands before the number is a request's id."""
    return 0 if lease is None else int(lease.rpartition(":")[2])


def _demotes(demotion: Demotion) -> Demotes:
    pages = [
        (page.group, page.depth, page.frame, page.tokens, page.format, page.key) for page in demotion.pages
    ]
    return Demotes(demotion.seq.number, lease_number(demotion.seq.lease), pages)


def _loads(seq: Sequence) -> Loads:
    load = seq.load
    assert load is not None
    return Loads(
        number=seq.number,
        lease=lease_number(load.lease),
        first_page=load.first_page,
        chains=_chains(load),
        last_position=load.last_position,
        tail_tokens=load.tail_tokens,
        deadline_s=load.deadline_s,
    )


def _chains(load: Load) -> list[tuple[list[PageKey], list[PageKey], bytes]]:
    return [(list(chain.keys), list(chain.other_keys), chain.held) for chain in load.chains]
