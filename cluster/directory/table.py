"""Which of many holders have which of millions of pages, by 64-bit prefixes of their keys: 12 to 34 bytes a page. Pure.

A hash table of numpy arrays: beside each key lies the number of a set of holders, which is kept once, as the bits of one
int, however many pages have it. Every operation takes many keys at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.cluster.directory.hash_table import MAX_FILL, Keys, Places, SetIds, Slots, distinct, no_zero

Run = tuple[int, int]  # the set of holders, as bits, and behind how many pages it ends

MIN_SLOTS = 1 << 12
SHRINK = 4  # times, at most, that new slots are fewer than the old ones
FIRST_LOOKED_UP = 256  # pages; most prompts end or are unknown before
CHUNK = 1 << 18  # slots that are gone through at once, so that nothing as large as the table is allocated
MOVED = 1 << 15  # old slots that are emptied with each change: milliseconds
# Or more: while S new slots fill, 0.23 S keys are added at least, and the old ones are 4 S at most, so that 18 would do.
MOVED_PER_KEY = 32
COLLECT_AGAIN = 1 << 16  # refused pages between two looks for sets that nothing uses any more


class DirectoryTable:
    """`holders` are small ints from 0 on; a holder that is dropped may be used again for another one.

    At most `max_entries` pages and `max_sets` different sets of holders are kept: what is more is refused and counted
    in `refused_pages`. Keys are taken for random bits. Pages with equal prefixes are one page here.
    """

    def __init__(
        self, max_entries: int = 16_000_000, max_sets: int = 1 << 17, min_slots: int = MIN_SLOTS
    ) -> None:
        self.refused_pages = 0
        self._max_entries = max_entries
        self._max_sets = max_sets
        self._len = 0  # pages that something holds
        # A page that something holds lies in one of them. From the old ones, while there are any, pages move to the others.
        self._slots = Slots(min_slots)
        self._old: Slots | None = None
        self._moved = 0  # old slots, from the first on
        self._min_slots = min_slots
        self._sets: list[int] = [0]  # by id; those of `_free` are 0
        self._id_of: dict[int, int] = {0: 0}
        self._free: list[int] = []
        self._collect_at = min(max_sets, 1024)  # sets
        self._wait_for = 0  # refused pages, before sets are collected again

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        """Bytes of the table; those of the sets are estimated."""
        of_sets = sum(64 + bits.bit_length() // 7 for bits in self._sets)
        return self._slots.nbytes + (0 if self._old is None else self._old.nbytes) + 2 * of_sets

    @property
    def num_sets(self) -> int:
        """Different sets of holders."""
        return len(self._id_of)

    # ---- changes -------------------------------------------------------------------------------------------------

    def add(self, holder: int, keys: Keys) -> None:
        """The holder has these pages, from now on or already."""
        keys = self._with_room(distinct(keys))
        self._move_on(max(MOVED, MOVED_PER_KEY * len(keys)))
        self._grow(len(keys))
        self._pull(keys)
        self._change(self._slots.place(keys), add=1 << holder, drop=0)

    def remove(self, holder: int, keys: Keys) -> None:
        """The holder doesn't have these pages, any more or at all."""
        keys = distinct(keys)
        self._move_on(MOVED)
        self._pull(keys)
        places = self._slots.find(keys)
        self._change(places[places >= 0], add=0, drop=1 << holder)

    def _change(self, places: Places, add: int, drop: int) -> None:
        before = self._slots.ids[places]
        after = self._changed(before, add, drop)
        self._slots.ids[places] = after
        self._len += int(np.count_nonzero(after)) - int(np.count_nonzero(before))

    def drop(self, holders: int) -> None:
        """These holders, given as bits, have nothing any more. Costs one pass over the table if they had anything."""
        new_ids = np.arange(len(self._sets), dtype=np.uint32)
        touched = [(i, bits) for i, bits in enumerate(self._sets) if bits & holders]
        if not touched:
            return
        for i, bits in touched:
            del self._id_of[bits]
            self._sets[i] = 0
        for i, bits in touched:
            left = bits & ~holders
            merged = self._id_of.get(left)
            if merged is None:
                merged = self._id_of[left] = i
                self._sets[i] = left
            else:
                self._free.append(i)
            new_ids[i] = merged
        self._len = 0
        for ids in self._all_ids():
            ids[:] = new_ids[ids]
            self._len += int(np.count_nonzero(ids))

    def drop_holder(self, holder: int) -> None:
        """The holder has nothing any more."""
        self.drop(1 << holder)

    # ---- questions -----------------------------------------------------------------------------------------------

    def runs(self, keys: Keys) -> list[Run]:
        """Who holds the pages, from the first on until one that nothing holds: runs of pages with the same set."""
        runs: list[Run] = []
        start, size = 0, FIRST_LOOKED_UP
        while start < len(keys):
            ids = self._ids_of(keys[start : start + size])
            nobodys = np.flatnonzero(ids == 0)
            end = int(nobodys[0]) if len(nobodys) else len(ids)
            self._add_runs(runs, ids[:end], start)
            if end < len(ids):
                break
            start, size = start + size, 4 * size
        return runs

    def longest(self, keys: Keys) -> dict[int, int]:
        """How many pages, from the first on, each holder has; those with none aren't in it."""
        return leading(self.runs(keys))

    def _add_runs(self, runs: list[Run], ids: SetIds, start: int) -> None:
        if not len(ids):
            return
        ends = [*(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
        for end in ends:
            bits = self._sets[ids[end - 1]]
            if runs and runs[-1][0] == bits:
                runs.pop()
            runs.append((bits, start + end))

    # ---- slots ---------------------------------------------------------------------------------------------------

    def _ids_of(self, keys: Keys) -> SetIds:
        keys = no_zero(keys)
        ids = self._slots.ids_of(keys)
        if self._old is not None:
            is_missing = ids == 0
            ids[is_missing] = self._old.ids_of(keys[is_missing])
        return ids

    def _with_room(self, keys: Keys) -> Keys:
        """Those of the keys that max_entries leaves room for: all that are here, and the first of the others."""
        room = self._max_entries - self._len
        if len(keys) <= room:
            return keys
        is_new = self._ids_of(keys) == 0
        is_taken = ~is_new | (np.cumsum(is_new) <= room)
        self.refused_pages += len(keys) - int(np.count_nonzero(is_taken))
        taken: Keys = keys[is_taken]
        return taken

    def _grow(self, new: int) -> None:
        """Make room for so many keys more: others move into larger slots with this change and the next ones."""
        if self._slots.has_room(new):
            return
        assert self._old is None, "the old slots aren't empty, and the new ones are full"
        size = max(self._min_slots, len(self._slots) // SHRINK)
        while self._len + new > MAX_FILL * size / 1.5:  # so that the next time is far away
            size *= 2
        self._old, self._slots, self._moved = self._slots, Slots(size), 0

    def _move_on(self, slots: int) -> None:
        """Bring what lies in so many of the old slots into the new ones."""
        if self._old is None:
            return
        start, self._moved = self._moved, self._moved + slots
        keys, ids = self._old.keys[start : self._moved], self._old.ids[start : self._moved]
        is_held = ids != 0
        self._slots.put(keys[is_held], ids[is_held])
        ids[is_held] = 0
        if self._moved >= len(self._old):
            self._old = None

    def _pull(self, keys: Keys) -> None:
        """Bring those of the keys that lie in the old slots into the new ones: only there they are changed."""
        if self._old is not None:
            places = self._old.find(keys)
            places = places[places >= 0]
            places = places[self._old.ids[places] != 0]
            self._slots.put(self._old.keys[places], self._old.ids[places])
            self._old.ids[places] = 0

    def _all_ids(self) -> Iterator[SetIds]:
        """The ids of all slots, in parts, to be read or written."""
        for slots in (self._slots, self._old):
            if slots is not None:
                for start in range(0, len(slots), CHUNK):
                    yield slots.ids[start : start + CHUNK]

    # ---- sets ----------------------------------------------------------------------------------------------------

    def _changed(self, ids: SetIds, add: int, drop: int) -> SetIds:
        """The sets after holders came to each or left it."""
        if len(self._id_of) >= self._collect_at:
            self._collect()
        distinct, which, counts = np.unique(ids, return_inverse=True, return_counts=True)
        after = distinct.copy()
        for i, (old, count) in enumerate(zip(distinct.tolist(), counts.tolist(), strict=True)):
            after[i] = self._intern((self._sets[old] | add) & ~drop, old, count)
        return after[which]

    def _intern(self, bits: int, otherwise: int, pages: int) -> int:
        """The id of a set; the other one where there is no room for it."""
        known = self._id_of.get(bits)
        if known is not None:
            return known
        if len(self._id_of) >= self._max_sets:
            self.refused_pages += pages
            return otherwise
        if self._free:
            new = self._free.pop()
            self._sets[new] = bits
        else:
            new = len(self._sets)
            self._sets.append(bits)
        self._id_of[bits] = new
        return new

    def _collect(self) -> None:
        """Forget the sets that no page has. Costs a pass over the table, and so must not come often."""
        if len(self._id_of) >= self._max_sets and self.refused_pages < self._wait_for:
            return
        is_used = np.zeros(len(self._sets), bool)
        for ids in self._all_ids():
            is_used[ids] = True
        is_used[0] = True
        for i in np.flatnonzero(~is_used).tolist():
            if self._sets[i]:
                del self._id_of[self._sets[i]]
                self._sets[i] = 0
                self._free.append(i)
        self._collect_at = min(self._max_sets, max(1024, 2 * len(self._id_of)))
        if len(self._id_of) > self._max_sets * 7 // 8:
            self._wait_for = self.refused_pages + COLLECT_AGAIN

    # ---- self-check ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Re-derive the counts; AssertionError where one differs."""
        self._slots.check()
        keys, ids = self._slots.held()
        if self._old is not None:
            self._old.check()
            more_keys, more_ids = self._old.held()
            keys, ids = np.concatenate((keys, more_keys)), np.concatenate((ids, more_ids))
        assert len(np.unique(keys)) == len(keys) == self._len <= self._max_entries, (
            "pages that something holds"
        )
        assert all(self._sets[i] == bits for bits, i in self._id_of.items()), "a set under another's id"
        assert len(self._id_of) + len(self._free) == len(self._sets), "ids of no set"
        assert set(np.unique(ids).tolist()) <= set(self._id_of.values()), "a page with a forgotten set"


def leading(runs: Sequence[Run]) -> dict[int, int]:
    """How many pages, from the first on, each holder has; those with none aren't in it."""
    if not runs:
        return {}
    found: dict[int, int] = {}
    still, pages = runs[0][0], 0
    for bits, end in runs:
        for holder in bits_of(still & ~bits):
            found[holder] = pages
        still &= bits
        if not still:
            break
        pages = end
    found.update(dict.fromkeys(bits_of(still), pages))
    return found


def bits_of(bits: int) -> list[int]:
    """The numbers of the bits that are set, rising."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
