"""The workers that routing chooses from, as rows of arrays: kept from request to request, counts changed in place. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FIRST_ROWS = 16  # grows twofold


class Fleet:
    """Owned by the gateway. Each worker has a row, which it keeps until it is removed; others take its place then.

    `counts` is [3, rows]: queued tokens, sequences, and the number of the last choice that fell on it; 0 where nothing is.
    """

    def __init__(self) -> None:
        self.counts: IntArray = np.zeros((3, FIRST_ROWS), np.int64)
        self._loads: dict[str, Load] = {}  # by the worker's id
        self._free = list(range(FIRST_ROWS - 1, -1, -1))
        self._places: _Places | None = None  # None: something came or went

    def __len__(self) -> int:
        return len(self._loads)

    def __getitem__(self, row: int) -> Load:
        return self._seen.by_row[row]

    def add(self, worker_id: str, node_id: str) -> Load:
        """A worker, or another life of one, comes: nothing is queued there."""
        self.remove(worker_id)
        if not self._free:
            self._grow()
        load = self._loads[worker_id] = Load(self, self._free.pop(), worker_id, node_id)
        self._places = None
        return load

    def remove(self, worker_id: str) -> None:
        """A worker isn't there any more; what its Load is told from now on is told to nothing. Idempotent."""
        load = self._loads.pop(worker_id, None)
        if load is None:
            return
        alone = Fleet()
        alone.counts[:, 0] = self.counts[:, load.row]
        self.counts[:, load.row] = 0
        self._free.append(load.row)
        load.fleet, load.row = alone, 0
        self._places = None

    def get(self, worker_id: str) -> Load | None:
        """None for a worker that isn't there."""
        return self._loads.get(worker_id)

    @property
    def rows(self) -> IntArray:
        """Of all workers, ascending."""
        return self._seen.rows

    @property
    def row_numbers(self) -> Mapping[str, int]:
        """Each worker's row, by its id."""
        return self._seen.row_numbers

    @property
    def nodes(self) -> IntArray:
        """The number of each row's node; 0 where nothing is."""
        return self._seen.nodes

    @property
    def node_numbers(self) -> Mapping[str, int]:
        """Of each node that has a worker, from 1 on."""
        return self._seen.numbers

    @property
    def _seen(self) -> _Places:
        if self._places is None:
            self._places = _Places(self._loads, self.counts.shape[1])
        return self._places

    def _grow(self) -> None:
        rows = self.counts.shape[1]
        self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)], axis=1)
        self._free = list(range(2 * rows - 1, rows - 1, -1))


class _Places:
    """Who is in which row, and at which node."""

    def __init__(self, loads: Mapping[str, Load], rows: int) -> None:
        self.by_row = {load.row: load for load in loads.values()}
        self.row_numbers = {worker_id: load.row for worker_id, load in loads.items()}
        self.rows: IntArray = np.array(sorted(self.by_row), np.int64)
        self.nodes: IntArray = np.zeros(rows, np.int64)
        self.numbers: dict[str, int] = {}
        for row, load in self.by_row.items():
            self.nodes[row] = self.numbers.setdefault(load.node_id, len(self.numbers) + 1)


class Load:
    """What a worker has to do, as far as the gateway knows: its row. Owned by its Fleet."""

    __slots__ = ("fleet", "node_id", "row", "worker_id")

    def __init__(self, fleet: Fleet, row: int, worker_id: str, node_id: str) -> None:
        self.fleet = fleet
        self.row = row
        self.worker_id = worker_id
        self.node_id = node_id

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens sent there that are yet to be computed, as was expected."""
        return int(self.fleet.counts[0, self.row])

    @queued_tokens.setter
    def queued_tokens(self, tokens: int) -> None:
        self.fleet.counts[0, self.row] = tokens

    @property
    def sequences(self) -> int:
        """In flight."""
        return int(self.fleet.counts[1, self.row])

    @sequences.setter
    def sequences(self, sequences: int) -> None:
        self.fleet.counts[1, self.row] = sequences

    @property
    def chosen(self) -> int:
        """Number of the last choice that fell on it; 0: none did."""
        return int(self.fleet.counts[2, self.row])

    @chosen.setter
    def chosen(self, number: int) -> None:
        self.fleet.counts[2, self.row] = number
