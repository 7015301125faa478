"""Finds which pages of a prompt are cached in L1, and which cached pages go first. Pure: moves no bytes, reads no clock.

One radix tree per root key. A node holds a *run*: consecutive pages that nothing branches off from, with their tokens
and frames. Runs are cut at page boundaries where chains of pages diverge, and where a path that is in use ends.
Tokens are compared themselves, not hashes of them, so a match can't be wrong.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tier.identity import TokenIds
from kvtier.tier.page import PageMissing, RootKey

Frames = npt.NDArray[np.int32]  # [pages]

TOKEN_BYTES = 4
PARTIAL_CANDIDATES = 16  # chosen by hand; bounds the work of a match where many pages share a first token
MOVED = 1 << 62  # `start` of a node that went up in another one, which is then its parent; behind every depth


@dataclass(slots=True, eq=False)
class Path:
    """A prefix of a chain of cached pages, as its user holds it: the first `depth` pages under `root`.

    Opaque beside `root`, `depth` and `pinned`. It can be pinned until the next eviction or removal, which may take its
    pages; pinned, it stays right whatever happens to the tree.
    """

    root: RootKey
    depth: int
    _node: _Node
    _epoch: int
    pinned: bool = False


class Match(NamedTuple):
    """What of a prompt is cached: whole pages first, then perhaps the head of one more page.

    `tokens` counts those of whole pages. `partial` is (frame, tokens): that frame's first tokens, at least one and fewer
    than a page, are the prompt's next ones. It isn't pinned with `node`: copy from it before the next eviction.
    """

    frames: Frames  # [tokens / page_tokens], read-only
    tokens: int
    partial: tuple[int, int] | None
    node: Path


class Inserted(NamedTuple):
    """The path of the pages just inserted, and which of the caller's frames the tree did not take.

    `frames` are the tree's for the same pages as the caller's: use them from now on, and free `duplicates`, which hold
    the same tokens in frames the tree knows nothing about.
    """

    node: Path
    duplicates: list[int]
    frames: Frames  # [pages given]; the caller's own array where all are its own


class Evicted(NamedTuple):
    """Pages of one run that left the tree, deepest first; they were used last at `last_use_s`."""

    frames: list[int]
    depth: int  # position of the deepest one in its chain, 0 for a chain's first page
    last_use_s: float


class Removed(NamedTuple):
    """What an administrator's removal took, and how many pages it had to leave because they are pinned."""

    frames: list[int]
    pinned_pages: int


class CachedPage(NamedTuple):
    """One page of the tree, for listings."""

    root: RootKey
    depth: int
    frame: int
    tokens: TokenIds  # [page_tokens]
    last_use_s: float
    pinned: bool


class _Node:
    """A run of pages. `start` is the depth of its first page; `pins` counts the pinned paths through its whole run.

    Children are found by the first token of their first page; those that share it stand in a dict by the whole first
    page, newest last (an OrderedDict, whose newest are found in O(1) whatever was removed).
    """

    __slots__ = ("children", "frames", "last_use_s", "parent", "pins", "start", "tokens")

    def __init__(self, tokens: bytearray, frames: array[int], start: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.frames = frames
        self.start = start
        self.parent = parent
        self.children: dict[bytes, _Node | OrderedDict[bytes, _Node]] | None = None
        self.pins = 0
        self.last_use_s = 0.0

    @property
    def end(self) -> int:
        """Depth behind its last page."""
        return self.start + len(self.frames)

    def candidate(self, data: bytes, at: int, page_bytes: int) -> _Node | None:
        """The only child whose first page may be the one at `data[at:]`; its tokens are still to be compared."""
        if self.children is None:
            return None
        entry = self.children.get(data[at : at + TOKEN_BYTES])
        if entry is None or isinstance(entry, _Node):
            return entry
        return entry.get(data[at : at + page_bytes])

    def similar(self, head: bytes) -> list[_Node]:
        """Children whose first token is `head`'s, newest first, at most PARTIAL_CANDIDATES."""
        entry = self.children.get(head[:TOKEN_BYTES]) if self.children else None
        if entry is None:
            return []
        if isinstance(entry, _Node):
            return [entry]
        return list(islice(reversed(entry.values()), PARTIAL_CANDIDATES))

    def add(self, child: _Node, page_bytes: int) -> None:
        """Hang in a child whose first page no other child has."""
        if self.children is None:
            self.children = {}
        page = bytes(child.tokens[:page_bytes])
        entry = self.children.get(page[:TOKEN_BYTES])
        if entry is None:
            self.children[page[:TOKEN_BYTES]] = child
        elif isinstance(entry, _Node):
            other = bytes(entry.tokens[:page_bytes])
            self.children[page[:TOKEN_BYTES]] = OrderedDict({other: entry, page: child})
        else:
            entry[page] = child

    def replace(self, child: _Node, page_bytes: int) -> None:
        """Put `child` in the place of the child with the same first page."""
        assert self.children is not None
        head = bytes(child.tokens[:TOKEN_BYTES])
        entry = self.children[head]
        if isinstance(entry, _Node):
            self.children[head] = child
        else:
            entry[bytes(child.tokens[:page_bytes])] = child

    def drop(self, child: _Node, page_bytes: int) -> None:
        """Take a child out."""
        assert self.children is not None
        head = bytes(child.tokens[:TOKEN_BYTES])
        entry = self.children[head]
        if isinstance(entry, _Node):
            del self.children[head]
            if not self.children:
                self.children = None
        else:
            del entry[bytes(child.tokens[:page_bytes])]
            if len(entry) == 1:
                (self.children[head],) = entry.values()

    def only_child(self) -> _Node | None:
        """The child of a node that has just one."""
        if self.children is None or len(self.children) > 1:
            return None
        (entry,) = self.children.values()
        return entry if isinstance(entry, _Node) else None

    def all_children(self) -> Iterator[_Node]:
        """Every child once; the tree must not change meanwhile."""
        for entry in self.children.values() if self.children else ():
            if isinstance(entry, _Node):
                yield entry
            else:
                yield from entry.values()


class _Root(_Node):
    """The top of one tree; has no pages of its own."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey) -> None:
        super().__init__(bytearray(), array("i"), 0, None)
        self.key = key


class PrefixIndex:
    """The radix trees over the pages in one worker's L1. Owned and called by that worker's step loop alone.

    `now` comes from the caller, in seconds of one clock, and never goes back. `match` changes nothing; a path counts as
    used when it is inserted, touched or unpinned. Eviction takes the pages used longest ago, tails of chains first.

    Invariants (`check()` re-derives them):
    1. A pinned path ends where its node's run ends, so `pins` is exact to the page. When a run is split the upper part
       is a new node with the same count; when two are fused the lower one stays: paths that end in it need no change.
    2. `_lru` holds exactly the nodes without pins, each before its parent, by last use: so its first one is a leaf.
    3. num_pages and evictable_pages count the pages of all nodes, and of those without pins.
    4. Children of a node differ in their first page; a frame is in the tree once.
    """

    def __init__(self, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be positive, got {page_tokens}")
        self.page_tokens = page_tokens
        self.num_pages = 0
        self.evictable_pages = 0
        self._page_bytes = TOKEN_BYTES * page_tokens
        self._roots: dict[RootKey, _Root] = {}
        self._lru: OrderedDict[_Node, None] = OrderedDict()
        self._pinned: set[Path] = set()
        # Counts evictions and removals: an unpinned path from before one may name pages that left.
        self._epoch = 0

    # What is cached

    def match(self, root: RootKey, tokens: TokenIds, limit: int | None = None) -> Match:
        """The longest cached prefix of the first `limit` tokens of a prompt (all of them by default).

        Whoever needs the last token computed passes len(tokens) - 1. `partial` is the best of the children that share
        the next token, where there are more than PARTIAL_CANDIDATES of them the best of the newest.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        data = _token_bytes(tokens if limit is None else tokens[:limit])
        top = self._roots.get(root)
        if top is None:
            return Match(_NO_FRAMES, 0, None, Path(root, 0, _Root(root), self._epoch))
        page_bytes = self._page_bytes
        node, inside, at, runs = self._walk(top, data, len(data) - len(data) % page_bytes)
        pages = at // page_bytes
        rest = data[at : at + page_bytes]
        return Match(
            frames=np.frombuffer(b"".join(runs), np.int32),
            tokens=pages * self.page_tokens,
            partial=self._partial(node, inside, pages, rest) if rest else None,
            node=Path(root, pages, node if inside is None else inside, self._epoch),
        )

    def pages(self) -> Iterator[CachedPage]:
        """Every page, parents before children; the tree must not change meanwhile."""
        for root in self._roots.values():
            for node in self._subtree(root):
                tokens = np.frombuffer(bytes(node.tokens), np.int32).reshape(-1, self.page_tokens)
                for i, frame in enumerate(node.frames):
                    yield CachedPage(
                        root.key, node.start + i, frame, tokens[i], node.last_use_s, node.pins > 0
                    )

    # Use

    def pin(self, path: Path) -> None:
        """Keep the path's pages until `unpin`. Raises PageMissing when something was evicted since the path was made."""
        assert not path.pinned, "path pinned twice"
        self._end_run_at(path)
        if path.depth == 0:
            path._node = self._roots.setdefault(path.root, _Root(path.root))
        path.pinned = True
        self._pinned.add(path)
        self._pin_up(path._node, None)

    def unpin(self, path: Path, now: float) -> None:
        """Let the path's pages go, used last now. Match again before using the path again."""
        assert path.pinned, "path unpinned twice"
        path.pinned = False
        self._pinned.remove(path)
        node = path._node
        while node.parent is not None:
            node.last_use_s = now
            node.pins -= 1
            if not node.pins:
                self._lru[node] = None
                self.evictable_pages += len(node.frames)
            node = node.parent
        node.pins -= 1
        self._forget_if_empty(node)
        self._fuse_up(path._node)

    def touch(self, path: Path, now: float) -> None:
        """Count a path as used now. Raises PageMissing when it isn't pinned and something was evicted since it was made."""
        if not path.pinned:
            self._end_run_at(path)
        self._touch_up(path._node, now)

    # Growth

    def insert(self, root: RootKey, tokens: TokenIds, frames: Frames, now: float) -> Inserted:
        """Put a chain of whole pages in from its first page on; `frames[i]` holds `tokens[i * page_tokens :]`.

        Pages the tree holds already keep the tree's frames. The returned path isn't pinned.
        """
        data = self._checked(tokens, frames)
        top = self._roots.get(root)
        if top is None:
            top = self._roots[root] = _Root(root)
        node, known = self._graft(top, data, frames)
        self._touch_up(node, now)
        inserted = _inserted(Path(root, len(frames), node, self._epoch), known, frames)
        self._forget_if_empty(top)
        return inserted

    def extend(self, path: Path, tokens: TokenIds, frames: Frames, now: float) -> Inserted:
        """Put further whole pages behind a pinned path, which then includes them; its length doesn't matter.

        The result speaks of the further pages only.
        """
        assert path.pinned, "only a pinned path can be extended"
        data = self._checked(tokens, frames)
        above = path._node
        if above.children is None and above.pins == 1 and above.parent is not None:
            # No other path ends here, so a longer run keeps pins exact.
            above.tokens += data
            above.frames.frombytes(frames.tobytes())
            above.last_use_s = now
            self.num_pages += len(frames)
            path.depth += len(frames)
            return Inserted(path, [], frames)
        node, known = self._graft(above, data, frames)
        self._pin_up(node, above)
        node.last_use_s = now
        path._node = node
        path.depth += len(frames)
        self._fuse_up(node)
        return _inserted(path, known, frames)

    def follow(self, moved: Mapping[int, int]) -> None:
        """Pages have moved to other frames. Walks the whole tree."""
        for root in self._roots.values():
            for node in self._subtree(root):
                for i, frame in enumerate(node.frames):
                    if frame in moved:
                        node.frames[i] = moved[frame]

    # Decline

    @property
    def oldest_s(self) -> float | None:
        """When the pages that go first were used last; None when all are pinned."""
        return next(iter(self._lru)).last_use_s if self._lru else None

    def evict(self, pages: int) -> list[int]:
        """Drop at most `pages` unpinned pages, used longest ago first; their frames, each before its parent's."""
        return [frame for run in self.evict_runs(pages) for frame in run.frames]

    def evict_runs(self, pages: int) -> list[Evicted]:
        """As `evict`, with what `explain` wants to know. O(1) per page whatever the tree holds."""
        runs: list[Evicted] = []
        while pages > 0 and self._lru:
            leaf = next(iter(self._lru))
            deepest = leaf.end - 1
            taken = self._cut(leaf, max(0, len(leaf.frames) - pages))
            runs.append(Evicted(taken, deepest, leaf.last_use_s))
            pages -= len(taken)
        return runs

    def remove(self, root: RootKey, tokens: TokenIds) -> Removed | None:
        """Drop the last page of this chain and everything behind it, pinned pages excepted; None when it isn't there."""
        data = _token_bytes(tokens)
        if not data or len(data) % self._page_bytes:
            raise ValueError(f"{len(tokens)} tokens are no whole pages of {self.page_tokens}")
        top = self._roots.get(root)
        if top is None:
            return None
        node, inside, at, _ = self._walk(top, data, len(data))
        if at < len(data):
            return None
        holder = node if inside is None else inside
        return self._remove_from(holder, at // self._page_bytes - 1 - holder.start)

    def remove_frames(self, frames: Collection[int]) -> Removed:
        """Drop these frames' pages and everything behind them, pinned pages excepted. Walks the whole tree."""
        wanted = set(frames)
        taken: list[int] = []
        pinned = 0
        pending: list[_Node] = list(self._roots.values())
        while pending:
            node = pending.pop()
            first = next((i for i, frame in enumerate(node.frames) if frame in wanted), None)
            if first is None:
                pending.extend(node.all_children())
                continue
            removed = self._remove_from(node, first)
            taken += removed.frames
            pinned += removed.pinned_pages
        return Removed(taken, pinned)

    def clear(self, root: RootKey | None = None) -> Removed:
        """Drop every page of one root, or of all, pinned pages excepted."""
        tops = [top for key, top in self._roots.items() if root in (None, key)]
        removed = [self._remove_from(child, 0) for top in tops for child in list(top.all_children())]
        return Removed([f for r in removed for f in r.frames], sum(r.pinned_pages for r in removed))

    # Self-check

    def check(self) -> None:
        """Re-derive every count and link from scratch; AssertionError where one differs. Walks everything."""
        pins = self._count_pins()
        place = {node: i for i, node in enumerate(self._lru)}
        frames: list[int] = []
        evictable_pages = evictable_nodes = 0
        for root in self._roots.values():
            assert root.children or root.pins, "an empty tree was kept"
            for node in self._subtree(root):
                assert node.pins == pins.pop(node, 0), "pins differ from the pinned paths"
                self._check_children(node)
                if node.parent is None:
                    continue
                assert len(node.tokens) == len(node.frames) * self._page_bytes > 0, (
                    "a run's tokens and frames"
                )
                assert (node in place) == (not node.pins), "evictable nodes are those without pins"
                frames += node.frames
                if not node.pins:
                    evictable_nodes += 1
                    evictable_pages += len(node.frames)
                    assert place[node] < place.get(node.parent, len(place)), "a node stands behind its parent"
        uses = [node.last_use_s for node in self._lru]
        assert uses == sorted(uses), "eviction order isn't by last use"
        assert not pins and evictable_nodes == len(place), "nodes outside the trees"
        assert evictable_pages == self.evictable_pages, "evictable_pages"
        assert len(set(frames)) == len(frames) == self.num_pages, "num_pages, or a frame twice"

    def _count_pins(self) -> dict[_Node, int]:
        pins: dict[_Node, int] = {}
        for path in self._pinned:
            assert path.pinned and path.depth == path._node.end, "a pinned path doesn't end with its run"
            node: _Node | None = path._node
            while node is not None:
                pins[node] = pins.get(node, 0) + 1
                top, node = node, node.parent
            assert top is self._roots.get(path.root), "a pinned path hangs in no tree"
        return pins

    def _check_children(self, node: _Node) -> None:
        for head, entry in (node.children or {}).items():
            group = [entry] if isinstance(entry, _Node) else list(entry.values())
            assert isinstance(entry, _Node) or len(entry) > 1, "a group of one"
            for child in group:
                page = bytes(child.tokens[: self._page_bytes])
                assert child.parent is node and child.start == node.end, "a child out of place"
                assert page[:TOKEN_BYTES] == head, "a child under another's first token"
                assert isinstance(entry, _Node) or entry[page] is child, "a child under another's first page"

    # Inside

    def _checked(self, tokens: TokenIds, frames: Frames) -> bytes:
        data = _token_bytes(tokens)
        if frames.dtype != np.int32 or frames.ndim != 1:
            raise ValueError(f"frames must be int32 [pages], got {frames.dtype} {list(frames.shape)}")
        if len(data) != len(frames) * self._page_bytes:
            held = len(frames) * self.page_tokens
            raise ValueError(f"{len(frames)} frames hold {held} tokens, got {len(tokens)}")
        return data

    def _walk(self, node: _Node, data: bytes, end: int) -> tuple[_Node, _Node | None, int, list[array[int]]]:
        """Follow `data[:end]` (whole pages) down from `node`.

        Returns the deepest node matched to its end, the child in whose run the way ends (None at a node's end), the
        bytes matched, and their frames.
        """
        page_bytes = self._page_bytes
        at = 0
        runs: list[array[int]] = []
        while at < end:
            child = node.candidate(data, at, page_bytes)
            if child is None:
                break
            run = child.tokens
            if data.startswith(run, at):
                runs.append(child.frames)
                at += len(run)
                node = child
                continue
            if len(run) > end - at and run.startswith(data[at:end]):
                pages = (end - at) // page_bytes
            else:
                pages = _common_tokens(run, data, at, end) // self.page_tokens
            if not pages:
                break
            runs.append(child.frames[:pages])
            return node, child, at + pages * page_bytes, runs
        return node, None, at, runs

    def _partial(self, node: _Node, inside: _Node | None, depth: int, rest: bytes) -> tuple[int, int] | None:
        """The page at `depth` whose head is longest in common with `rest`: (frame, tokens)."""
        if inside is not None:
            i = depth - inside.start
            page = inside.tokens[i * self._page_bytes : (i + 1) * self._page_bytes]
            shared = _common_head(page, rest)
            return (inside.frames[i], shared) if shared else None
        best: tuple[int, int] | None = None
        for child in node.similar(rest):
            shared = _common_head(child.tokens[: self._page_bytes], rest)
            if best is None or shared > best[1]:
                best = child.frames[0], shared
        return best

    def _graft(self, top: _Node, data: bytes, frames: Frames) -> tuple[_Node, bytes]:
        """Make the chain `data` exist below `top`, its end a node's end.

        Returns the node it ends in, and the frames (int32) of the pages that were there before.
        """
        node, inside, at, runs = self._walk(top, data, len(data))
        known = b"".join(runs)  # now: the runs may grow
        pages = at // self._page_bytes
        if inside is not None:
            node = self._split(inside, top.end + pages - inside.start)
        if at == len(data):
            return node, known
        new = array("i", frames[pages:].tobytes())
        self.num_pages += len(new)
        self.evictable_pages += len(new)
        if node.children is None and not node.pins and node.parent is not None:
            node.tokens += data[at:]
            node.frames += new
            return node, known
        child = _Node(bytearray(data[at:]), new, node.end, node)
        node.add(child, self._page_bytes)
        self._lru[child] = None
        return child, known

    def _split(self, node: _Node, pages: int) -> _Node:
        """Cut a run after `pages` pages; returns the new upper node, which the caller touches or pins."""
        cut = pages * self._page_bytes
        assert node.parent is not None and 0 < pages < len(node.frames)
        upper = _Node(node.tokens[:cut], node.frames[:pages], node.start, node.parent)
        node.parent.replace(upper, self._page_bytes)
        node.tokens = node.tokens[cut:]
        node.frames = node.frames[pages:]
        node.start += pages
        node.parent = upper
        upper.add(node, self._page_bytes)
        upper.pins = node.pins
        upper.last_use_s = node.last_use_s
        if not upper.pins:
            self._lru[upper] = None
        return upper

    def _end_run_at(self, path: Path) -> None:
        """Make the path end with its node's run, whatever was split since the path was made."""
        if path._epoch != self._epoch:
            raise PageMissing("pages were evicted or removed since the match; match again")
        node = path._node
        while (
            node.start >= path.depth and node.parent is not None
        ):  # the run was split, or went up in another
            node = node.parent
        path._node = node if node.end == path.depth else self._split(node, path.depth - node.start)

    def _touch_up(self, node: _Node, now: float) -> None:
        while node.parent is not None:
            node.last_use_s = now
            if not node.pins:
                self._lru.move_to_end(node)
            node = node.parent

    def _pin_up(self, node: _Node | None, above: _Node | None) -> None:
        """Add a pin to `node` and what is above it, up to but without `above`."""
        while node is not above:
            assert node is not None
            if not node.pins and node.parent is not None:
                del self._lru[node]
                self.evictable_pages -= len(node.frames)
            node.pins += 1
            node = node.parent

    def _fuse_up(self, node: _Node) -> None:
        """From `node` to the root, make one run of a node and its only child where nothing tells them apart.

        Without this a sequence that repeats another would leave a node for each page it sealed.
        """
        while node.parent is not None:
            above = node.parent
            child = node.only_child()
            if child is not None and _alike(node, child):
                self._fuse(node, child)
            node = above

    def _fuse(self, upper: _Node, lower: _Node) -> None:
        """Append a node's only child to its run; the child stays, since paths may end in it."""
        assert upper.parent is not None
        upper.tokens += lower.tokens
        upper.frames += lower.frames
        lower.tokens, lower.frames = upper.tokens, upper.frames
        lower.start, lower.parent = upper.start, upper.parent
        lower.parent.replace(lower, self._page_bytes)
        if not upper.pins:
            del self._lru[upper]
        upper.start, upper.parent, upper.children = MOVED, lower, None

    def _cut(self, leaf: _Node, keep: int) -> list[int]:
        """Drop the pages of an unpinned leaf behind its first `keep`; their frames, deepest first."""
        assert not leaf.pins and leaf.children is None and leaf.parent is not None
        taken = leaf.frames[keep:].tolist()
        taken.reverse()
        self._epoch += 1
        self.num_pages -= len(taken)
        self.evictable_pages -= len(taken)
        if keep:
            del leaf.frames[keep:]
            del leaf.tokens[keep * self._page_bytes :]
        else:
            leaf.parent.drop(leaf, self._page_bytes)
            del self._lru[leaf]
            self._forget_if_empty(leaf.parent)
        return taken

    def _remove_from(self, top: _Node, first: int) -> Removed:
        """Drop `top`'s pages from its `first` on and all below, pinned nodes excepted."""
        taken: list[int] = []
        pinned_pages = 0
        for node in reversed(list(self._subtree(top))):
            keep = first if node is top else 0
            if node.pins:
                pinned_pages += len(node.frames) - keep
            else:
                taken += self._cut(node, keep)
        return Removed(taken, pinned_pages)

    def _subtree(self, top: _Node) -> Iterator[_Node]:
        """`top` and all below it, parents before children; without recursion, since chains can be long."""
        pending = [top]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.all_children())

    def _forget_if_empty(self, node: _Node) -> None:
        if isinstance(node, _Root) and not node.children and not node.pins:
            self._roots.pop(node.key, None)


def _alike(node: _Node, only_child: _Node) -> bool:
    """Whether no pinned path ends between the two, and they are evicted one right after the other."""
    same_use = node.pins > 0 or node.last_use_s == only_child.last_use_s  # unpinning sets it for both
    return node.pins == only_child.pins and same_use


_NO_FRAMES: Frames = np.empty(0, np.int32)


def _token_bytes(tokens: TokenIds) -> bytes:
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise ValueError(f"tokens must be int32 [tokens], got {tokens.dtype} {list(tokens.shape)}")
    return tokens.tobytes()


def _common_tokens(run: bytearray, data: bytes, at: int, end: int) -> int:
    """How many tokens `run` and `data[at:end]` share from their beginning."""
    count = min(len(run), end - at) // TOKEN_BYTES
    differ = np.frombuffer(run, np.int32, count) != np.frombuffer(data, np.int32, count, at)
    first = int(differ.argmax())
    return first if differ[first] else count


def _common_head(page: bytearray, rest: bytes) -> int:
    """How many tokens a page and the at most page-long `rest` share from their beginning.

    As little-endian integers their lowest differing bit lies in the first token that differs.
    """
    a, b = int.from_bytes(page[: len(rest)], "little"), int.from_bytes(rest, "little")
    differ = a ^ b
    if not differ:
        return len(rest) // TOKEN_BYTES
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


def _inserted(path: Path, known: bytes, frames: Frames) -> Inserted:
    if frames.tobytes().startswith(known):
        return Inserted(path, [], frames)
    tree = np.frombuffer(known, np.int32)
    own = frames[: len(tree)]
    return Inserted(path, own[own != tree].tolist(), np.concatenate((tree, frames[len(tree) :])))
