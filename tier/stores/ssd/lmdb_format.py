"""Checks the structure of an LMDB file by reading it, without LMDB: a damaged file can then do no harm. Only reads.

LMDB maps its file and believes it; a flipped bit in a page number, a size or the free list crashes the process or
makes it overwrite live pages later. This reads the format of LMDB 0.9 (data version 1, `mdb.c`: MDB_page, MDB_node,
MDB_meta) and requires what LMDB takes for granted: each page is where it says it is, is used once, and is not free.
Values are handed to `visit` and not looked at; they have their own checksums.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

_PAGE = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, address, map size; behind a page header
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction
_NODE = struct.Struct("<HHHH")  # size or page number low, high, flags, key size
_HEAD_BYTES = _PAGE.size
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 0x01, 0x02, 0x04, 0x08
_BIG_DATA = 0x01  # the node's data is the number of an overflow page
_NO_ROOT = 2**64 - 1
_NO_SUBDIR, _INTEGER_KEY = (
    0x4000,
    0x08,
)  # flags: the file's, which lie in its free list's record, and that list's own
_MAX_DEPTH = 32


class Damaged(Exception):
    """The file isn't a sound LMDB database; the message says where."""


Visit = Callable[[bytes, Callable[[], bytes]], None]


def _ignore(key: bytes, data: Callable[[], bytes]) -> None:
    pass


def check_database(path: Path, visit: Visit = _ignore) -> None:
    """Raise Damaged unless LMDB can use this file safely; OSError when it can't be read.

    `visit` is given each key and a call for its value, in the order of the keys, before it is known that all is sound.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Damaged(f"{path.name} is gone") from None
    try:
        _Reader(fd, path.name).check(visit)
    finally:
        os.close(fd)


class _Reader:
    """One pass over one file; `used` marks the pages that have been met."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.page_bytes = 0
        self.used = bytearray()

    def check(self, visit: Visit) -> None:
        head = os.pread(self.fd, 4096, 0)
        if len(head) < 4096:
            raise self._damaged("it is shorter than a page")
        # md_pad of the free-list tree is the page size
        (self.page_bytes,) = struct.unpack_from("<I", head, _HEAD_BYTES + _META.size)
        if self.page_bytes not in (4096, 8192, 16384, 32768, 65536):
            raise self._damaged(f"its page size is {self.page_bytes}")
        _, last_page, free, main = max((self._meta(number) for number in (0, 1)), key=lambda meta: meta[0])
        self.used = bytearray(last_page + 1)
        self.used[:2] = b"\1\1"
        self._tree(main, visit, integer_keys=False)
        free_ids: list[int] = []
        self._tree(free, lambda key, data: free_ids.extend(self._free_ids(data())), integer_keys=True)
        for number in free_ids:
            self._use(number, 1)

    def _meta(self, number: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        page = self._page(number)
        _, _, flags, _, _ = _PAGE.unpack_from(page)
        magic, version, _, _ = _META.unpack_from(page, _HEAD_BYTES)
        if flags != _META_PAGE or magic != _MAGIC or version != _VERSION:
            raise self._damaged(f"meta page {number} has magic {magic:x}, version {version}")
        at = _HEAD_BYTES + _META.size
        free, main = _DB.unpack_from(page, at), _DB.unpack_from(page, at + _DB.size)
        if free[1] & ~_NO_SUBDIR != _INTEGER_KEY or main[1]:
            raise self._damaged(f"meta page {number} has flags {free[1]:#x}, {main[1]:#x}")
        last_page, transaction = _TAIL.unpack_from(page, at + 2 * _DB.size)
        # A file may end before `last_page`, where the last pages are free and were never written; not by much.
        if last_page < 1 or last_page > 4 * (os.fstat(self.fd).st_size // self.page_bytes) + 2**20:
            raise self._damaged(f"meta page {number} counts {last_page} pages")
        return transaction, last_page, free, main

    def _tree(
        self,
        db: tuple[int, ...],
        visit: Visit,
        integer_keys: bool,
    ) -> None:
        """Walk a tree in key order; depth, counts and order must be what its record says."""
        _, _, depth, branches, leaves, overflows, entries, root = db
        if root == _NO_ROOT:
            if entries:
                raise self._damaged(f"{entries} entries under no root")
            return
        if not 1 <= depth <= _MAX_DEPTH:
            raise self._damaged(f"a tree of depth {depth}")
        counted = [0, 0, 0, 0]
        previous = b""  # the key before this one, in the tree's order
        todo = [(root, 1, b"")]
        while todo:
            number, level, least = (
                todo.pop()
            )  # all keys under it are at least `least`, and `previous` is less
            page = self._page(number)
            self._use(number, 1)
            is_leaf = level == depth
            own, _, flags, lower, upper = _PAGE.unpack_from(page)
            if own != number or flags != (_LEAF if is_leaf else _BRANCH):
                raise self._damaged(f"page {number} says it is page {own} of kind {flags:#x}")
            if not _HEAD_BYTES < lower <= upper <= self.page_bytes or lower % 2:
                raise self._damaged(f"page {number} has bounds {lower}, {upper}")
            if previous and previous >= least:
                raise self._damaged(f"page {number} isn't in the order of its parent")
            counted[1 if is_leaf else 0] += 1
            extents: list[tuple[int, int]] = []
            children: list[tuple[int, int, bytes]] = []
            for offset in struct.unpack_from(f"<{(lower - _HEAD_BYTES) // 2}H", page, _HEAD_BYTES):
                if not upper <= offset <= self.page_bytes - _NODE.size:
                    raise self._damaged(f"page {number} has a node at {offset}")
                low, high, node_flags, key_bytes = _NODE.unpack_from(page, offset)
                end = offset + _NODE.size + key_bytes
                if end > self.page_bytes:
                    raise self._damaged(f"page {number} has a key of {key_bytes} bytes")
                key = page[offset + _NODE.size : end]
                order = key[::-1] if integer_keys else key
                if not is_leaf:
                    # the first node of a branch page needs no key: its parent's says where it starts
                    bound = order if children else least
                    if children and bound <= children[-1][2]:
                        raise self._damaged(f"page {number} has keys out of order")
                    children.append((low | high << 16 | node_flags << 32, level + 1, bound))
                    extents.append((offset, end))
                    continue
                if order < least or (counted[3] and order <= previous):
                    raise self._damaged(f"page {number} has keys out of order")
                previous = order
                counted[3] += 1
                size = low | high << 16
                if node_flags == _BIG_DATA and end + 8 <= self.page_bytes:
                    (first,) = struct.unpack_from("<Q", page, end)
                    counted[2] += self._overflow(first, size)
                    visit(key, lambda first=first, size=size: self._overflow_data(first, size))  # type: ignore[misc]
                    extents.append((offset, end + 8))
                elif node_flags == 0 and end + size <= self.page_bytes:
                    visit(key, lambda page=page, end=end, size=size: page[end : end + size])  # type: ignore[misc]
                    extents.append((offset, end + size))
                else:
                    raise self._damaged(f"page {number} has a node of {size} bytes, flags {node_flags:#x}")
            self._tile(number, upper, extents)
            todo.extend(reversed(children))
        if counted != [branches, leaves, overflows, entries]:
            raise self._damaged(f"a tree counts {[branches, leaves, overflows, entries]} and has {counted}")

    def _tile(self, number: int, upper: int, extents: list[tuple[int, int]]) -> None:
        """LMDB keeps the nodes of a page without gaps, each rounded up to an even size, up to the page's end."""
        at = upper
        for start, end in sorted(extents):
            if start != at:
                raise self._damaged(f"page {number} has a node at {start}, {at} expected")
            at = end + end % 2
        if at != self.page_bytes:
            raise self._damaged(f"page {number} has nodes up to {at}")

    def _overflow(self, first: int, size: int) -> int:
        """Pages of the overflow run of `size` bytes that starts at page `first`."""
        header = os.pread(self.fd, _HEAD_BYTES, first * self.page_bytes) if first < len(self.used) else b""
        if len(header) < _HEAD_BYTES:
            raise self._damaged(f"a value lies at page {first}")
        own, _, flags, low, high = _PAGE.unpack(header)
        pages = int(low | high << 16)
        if own != first or flags != _OVERFLOW or pages * self.page_bytes < _HEAD_BYTES + size:
            raise self._damaged(f"page {first} says it is page {own} of kind {flags:#x}")
        self._use(first, pages)
        if (first + pages) * self.page_bytes > os.fstat(self.fd).st_size:
            raise self._damaged("it is truncated")
        return pages

    def _overflow_data(self, first: int, size: int) -> bytes:
        return os.pread(self.fd, size, first * self.page_bytes + _HEAD_BYTES)

    def _free_ids(self, data: bytes) -> list[int]:
        """Page numbers of one record of the free list: their count, then the numbers, falling."""
        numbers = list(struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8]))
        if not numbers or numbers[0] >= len(numbers):
            raise self._damaged("a record of the free list has a wrong length")
        numbers = numbers[1 : numbers[0] + 1]
        if any(a <= b for a, b in pairwise(numbers)):
            raise self._damaged("the free list is out of order")
        return numbers

    def _page(self, number: int) -> bytes:
        page = os.pread(self.fd, self.page_bytes, number * self.page_bytes) if number < 2**40 else b""
        if len(page) < self.page_bytes:
            raise self._damaged(f"page {number} is past its end")
        return page

    def _use(self, first: int, count: int) -> None:
        end = first + count
        if first < 2 or end > len(self.used):
            raise self._damaged(f"page {first} is out of range")
        if self.used.count(1, first, end):
            raise self._damaged(f"page {first} is used twice")
        self.used[first:end] = b"\1" * count

    def _damaged(self, what: str) -> Damaged:
        return Damaged(f"{self.name}: {what}")
