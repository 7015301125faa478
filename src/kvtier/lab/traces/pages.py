"""Gives the pages of a trace dense numbers, in order of first appearance, each with one parent. Pure; works on runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Requests as runs of consecutive page ids: request r has the runs from `first[r]` to `first[r + 1]`."""

    first: Ids  # [requests + 1]
    starts: Ids  # [runs]
    lengths: Ids  # [runs]


@dataclass(frozen=True, slots=True)
class Numbered:
    """The same requests with dense ids."""

    runs: Runs
    distinct: int
    split: int  # pages that got a number of their own because their id had come after another parent before


def number_pages(raw: Runs, space: Ids) -> Numbered:
    """Number the pages that raw ids stand for; equal ids are equal pages in the same space only. `space`: [requests].

    Between two ids at which any run begins or ends, all ids always come together: such a *piece* is numbered at once.
    """
    run_space = np.repeat(space, np.diff(raw.first))
    begin, end, points = _cut_points(raw, run_space)
    pieces = _concatenated_ranges(begin, end - begin)
    length = np.diff(points, append=0)  # of each piece; the last of a space is in no run
    first = _running(end - begin)[raw.first]
    parent = _parents(pieces, first)
    nodes, piece_of = _nodes(pieces, parent)
    base = _running(length[piece_of])
    known = int(length[np.unique(piece_of)].sum())
    runs = _joined(Runs(first, base[nodes], length[pieces]))
    return Numbered(runs, int(base[-1]), int(base[-1]) - known)


def concatenated(starts: Ids, lengths: Ids) -> Ids:
    """The ids of runs, one behind the other."""
    return _concatenated_ranges(starts, lengths)


def _cut_points(raw: Runs, run_space: Ids) -> tuple[Ids, Ids, Ids]:
    """By run, the cut points at which it begins and ends; and the id at each point, by space and then by id."""
    values = np.concatenate((raw.starts, raw.starts + raw.lengths))
    spaces = np.concatenate((run_space, run_space))
    order = np.lexsort((values, spaces))
    values, spaces = values[order], spaces[order]
    is_new = np.ones(len(values), np.bool_)
    is_new[1:] = (np.diff(values) != 0) | (np.diff(spaces) != 0)
    rank = np.empty(len(values), np.int64)
    rank[order] = np.cumsum(is_new) - 1
    return rank[: len(raw.starts)], rank[len(raw.starts) :], values[is_new]


def _parents(pieces: Ids, first: Ids) -> Ids:
    """The piece before each in its request; -1 at a request's head."""
    parent = np.roll(pieces, 1)
    heads = first[:-1]
    parent[heads[heads < first[1:]]] = -1
    return parent


def _nodes(pieces: Ids, parent: Ids) -> tuple[Ids, Ids]:
    """What stands for each piece where it comes, numbered by first appearance; and the piece of each number."""
    firsts = np.zeros(int(pieces.max(initial=-1)) + 1, np.int64)
    firsts[pieces[::-1]] = np.arange(len(pieces))[::-1]  # the first of equal ones is written last
    if not np.array_equal(parent, parent[firsts[pieces]]):
        return _nodes_by_parent(pieces, parent)
    appear = np.flatnonzero(firsts[pieces] == np.arange(len(pieces)))
    number = np.empty_like(firsts)
    number[pieces[appear]] = np.arange(len(appear))
    return number[pieces], pieces[appear]


def _nodes_by_parent(pieces: Ids, parent: Ids) -> tuple[Ids, Ids]:
    """The same where a piece comes after several others: it is another page after each."""
    known: dict[tuple[int, int], int] = {}
    nodes = np.empty_like(pieces)
    before = -1
    for at, (piece, above) in enumerate(zip(pieces.tolist(), parent.tolist(), strict=True)):
        before = known.setdefault((before if above >= 0 else -1, piece), len(known))
        nodes[at] = before
    return nodes, np.array([piece for _, piece in known], np.int64)


def _joined(runs: Runs) -> Runs:
    """Runs that go on where the one before ended become one."""
    goes_on = np.zeros(len(runs.starts), np.bool_)
    goes_on[1:] = runs.starts[1:] == (runs.starts + runs.lengths)[:-1]
    heads = runs.first[:-1]
    goes_on[heads[heads < runs.first[1:]]] = False
    kept = np.flatnonzero(~goes_on)
    ends = _running(runs.lengths)
    lengths = np.diff(np.append(ends[kept], ends[-1]))
    return Runs(_running(~goes_on)[runs.first], runs.starts[kept], lengths)


def _concatenated_ranges(starts: Ids, lengths: Ids) -> Ids:
    total = _running(lengths)
    return np.repeat(starts - total[:-1], lengths) + np.arange(total[-1])


def _running(values: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Ids:
    """Sums of all before each, and of all: one longer than the values."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums
