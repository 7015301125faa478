"""A hash table from 64-bit keys to small numbers in two numpy arrays, looked through for many keys at once. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]  # [pages]
Places = npt.NDArray[np.int64]  # [pages], numbers of slots
SetIds = npt.NDArray[np.uint32]

MAX_FILL = 0.7  # of the slots; from 0.5 to 0.8 behaves alike


class Slots:
    """A power of two of slots, each with a key and its number; 0 is the number of all keys that aren't here.

    Keys are taken for random bits, and none is 0, which marks a slot that was never used. A key is never removed: those
    with the number 0 are left behind when all others move to other slots.
    """

    def __init__(self, size: int) -> None:
        self.keys: Keys = np.zeros(size, np.uint64)
        self.ids: SetIds = np.zeros(size, np.uint32)
        self._last = size - 1
        self._used = 0

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.keys.nbytes + self.ids.nbytes

    def has_room(self, new: int) -> bool:
        """Whether so many keys more can be placed."""
        return self._used + new <= MAX_FILL * len(self)

    def find(self, keys: Keys) -> Places:
        """Where the keys are; -1 for those that aren't here."""
        found = np.full(len(keys), -1, np.int64)
        rest, at, step = np.arange(len(keys)), self._first(keys), 0
        while len(rest):
            here = self.keys[at]
            is_it = here == keys[rest]
            found[rest[is_it]] = at[is_it]
            goes_on = ~is_it & (here != 0)
            step += 1  # steps of 1, 2, 3 .. come by every slot
            rest, at = rest[goes_on], (at[goes_on] + step) & self._last
        return found

    def place(self, keys: Keys) -> Places:
        """Where the keys are, which are distinct and have room; those that weren't here are now, with the number 0."""
        places = np.empty(len(keys), np.int64)
        rest, at, step = np.arange(len(keys)), self._first(keys), 0
        while len(rest):
            wanted = keys[rest]
            is_free = self.keys[at] == 0
            self.keys[at[is_free]] = wanted[is_free]  # where several want one slot, one of them gets it
            is_it = self.keys[at] == wanted
            places[rest[is_it]] = at[is_it]
            self._used += int(np.count_nonzero(is_it & is_free))
            step += 1
            rest, at = rest[~is_it], (at[~is_it] + step) & self._last
        return places

    def put(self, keys: Keys, ids: SetIds) -> None:
        """Place distinct keys with these numbers."""
        assert self.has_room(len(keys))
        self.ids[self.place(keys)] = ids

    def ids_of(self, keys: Keys) -> SetIds:
        """The numbers of keys."""
        places = self.find(keys)
        ids = self.ids[places]  # at -1, of keys that aren't here, lies another one's
        ids[places < 0] = 0
        return ids

    def held(self) -> tuple[Keys, SetIds]:
        """All keys with another number than 0, and those."""
        is_held = self.ids != 0
        return self.keys[is_held], self.ids[is_held]

    def check(self) -> None:
        """Re-derive the counts; AssertionError where one differs."""
        assert self._used == np.count_nonzero(self.keys), "used slots"
        assert self._used <= MAX_FILL * len(self), "too many keys"
        assert not np.any(self.ids[self.keys == 0]), "a number without a key"

    def _first(self, keys: Keys) -> Places:
        return (keys & np.uint64(self._last)).astype(np.int64)


def no_zero(keys: Keys) -> Keys:
    """Keys as they are placed: 0 is taken for another one."""
    return np.where(keys == 0, np.uint64(1), keys)


def distinct(keys: Keys) -> Keys:
    """Keys as they are placed, each once."""
    return np.unique(no_zero(keys))
