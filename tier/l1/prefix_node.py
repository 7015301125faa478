"""Runs of pages, the nodes of the prefix index's radix trees, and how the children of one are found. Pure."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from itertools import islice

from kvtier.tier.pages.page import RootKey
from kvtier.tier.policy.base import Candidates, Row

TOKEN_BYTES = 4
PARTIAL_CANDIDATES = 16  # chosen by hand; bounds the work of a match where many pages share a first token


class Phase(Enum):
    """What the policy was last told of a run: requests that use it and let it go take turns."""

    NEW = "new"  # used by the request that brought it, never released
    USED = "used"  # in use again
    AGING = "aging"  # released


class Node:
    """A run of pages. `start` is the depth of its first page; `pins` counts the pinned paths through its whole run.

    Children are found by the first token of their first page; those that share it stand in a dict by the whole first
    page, newest last (an OrderedDict, whose newest are found in O(1) whatever was removed).
    """

    __slots__ = (
        *("children", "frames", "last_use_s", "leaves", "parent", "phase", "pins", "row", "start", "tokens"),
    )

    def __init__(
        self,
        tokens: bytearray,
        frames: array[int],
        start: int,
        parent: Node | None,
        row: Row,
        phase: Phase,
        leaves: Candidates,
    ) -> None:
        self.tokens = tokens
        self.frames = frames
        self.start = start
        self.parent = parent
        self.row = row
        self.phase = phase
        self.leaves = leaves  # of its whole tree
        self.children: dict[bytes, Node | OrderedDict[bytes, Node]] | None = None
        self.pins = 0
        self.last_use_s = 0.0

    @property
    def end(self) -> int:
        """Depth behind its last page."""
        return self.start + len(self.frames)

    def candidate(self, data: bytes, at: int, page_bytes: int) -> Node | None:
        """The only child whose first page may be the one at `data[at:]`; its tokens are still to be compared."""
        if self.children is None:
            return None
        entry = self.children.get(data[at : at + TOKEN_BYTES])
        if entry is None or isinstance(entry, Node):
            return entry
        return entry.get(data[at : at + page_bytes])

    def similar(self, head: bytes) -> list[Node]:
        """Children whose first token is `head`'s, newest first, at most PARTIAL_CANDIDATES."""
        entry = self.children.get(head[:TOKEN_BYTES]) if self.children else None
        if entry is None:
            return []
        if isinstance(entry, Node):
            return [entry]
        return list(islice(reversed(entry.values()), PARTIAL_CANDIDATES))

    def add(self, child: Node, page_bytes: int) -> None:
        """Hang in a child whose first page no other child has."""
        if self.children is None:
            self.children = {}
        page = bytes(child.tokens[:page_bytes])
        entry = self.children.get(page[:TOKEN_BYTES])
        if entry is None:
            self.children[page[:TOKEN_BYTES]] = child
        elif isinstance(entry, Node):
            other = bytes(entry.tokens[:page_bytes])
            self.children[page[:TOKEN_BYTES]] = OrderedDict({other: entry, page: child})
        else:
            entry[page] = child

    def replace(self, child: Node, page_bytes: int) -> None:
        """Put `child` in the place of the child with the same first page."""
        assert self.children is not None
        head = bytes(child.tokens[:TOKEN_BYTES])
        entry = self.children[head]
        if isinstance(entry, Node):
            self.children[head] = child
        else:
            entry[bytes(child.tokens[:page_bytes])] = child

    def drop(self, child: Node, page_bytes: int) -> None:
        """Take a child out."""
        assert self.children is not None
        head = bytes(child.tokens[:TOKEN_BYTES])
        entry = self.children[head]
        if isinstance(entry, Node):
            del self.children[head]
            if not self.children:
                self.children = None
        else:
            del entry[bytes(child.tokens[:page_bytes])]
            if len(entry) == 1:
                (self.children[head],) = entry.values()

    def only_child(self) -> Node | None:
        """The child of a node that has just one."""
        if self.children is None or len(self.children) > 1:
            return None
        (entry,) = self.children.values()
        return entry if isinstance(entry, Node) else None

    def all_children(self) -> Iterator[Node]:
        """Every child once; the tree must not change meanwhile."""
        for entry in self.children.values() if self.children else ():
            if isinstance(entry, Node):
                yield entry
            else:
                yield from entry.values()


class Root(Node):
    """The top of one tree; has no pages of its own, and its row means nothing."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey, leaves: Candidates) -> None:
        super().__init__(bytearray(), array("i"), 0, None, -1, Phase.USED, leaves)
        self.key = key
