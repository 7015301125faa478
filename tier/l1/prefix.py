"""Finds which pages of a prompt are cached in L1, and which cached pages go first. Pure: moves no bytes, reads no clock.

One radix tree per root key. A node holds a *run*: consecutive pages that nothing branches off from, with their tokens
and frames. Runs are cut at page boundaries where chains of pages diverge, and where a path that is in use ends.
Tokens are compared themselves, not hashes of them, so a match can't be wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tier.l1.prefix_node import TOKEN_BYTES, Node, Phase, Root
from kvtier.tier.pages.identity import TokenIds
from kvtier.tier.pages.page import PageMissing, RootKey
from kvtier.tier.policy.base import Candidates, Lru, Policy, Row, Use, Victim

Frames = npt.NDArray[np.int32]  # [pages]

MOVED = 1 << 62  # `start` of a node that went up in another one, which is then its parent; behind every depth
NOTHING_TOLD = Use(0, 0)

Piece = tuple[Row | None, int]  # so many pages, and the row that has their history, if they have one


@dataclass(slots=True, eq=False)
class Path:
    """A prefix of a chain of cached pages, as its user holds it: the first `depth` pages under `root`.

    Opaque beside `root`, `depth` and `pinned`. It can be pinned until the next eviction or removal, which may take its
    pages; pinned, it stays right whatever happens to the tree.
    """

    root: RootKey
    depth: int
    _node: Node
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


class PrefixIndex:
    """The radix trees over the pages in one worker's L1. Owned and called by that worker's step loop alone.

    `now` comes from the caller, in seconds of one clock, and never goes back. `match` changes nothing. Each run is a row
    of the `policy`, which is told when a request begins to use a path (`begin`, or `extend` over pages that are there)
    and when it lets it go (`unpin`); `insert` and `touch` do both at once. Unpinned leaves are candidates for eviction,
    in the set that `leaves` names for their root.

    Invariants (`check()` re-derives them):
    1. A pinned path ends where its node's run ends, so `pins` is exact to the page. When a run is split the upper part
       is a new node with the same count; when two are fused the lower one stays: paths that end in it need no change.
    2. The candidates are exactly the nodes without pins and children; of an unpinned node all below is unpinned.
    3. num_pages and evictable_pages count the pages of all nodes, and of those without pins.
    4. Children of a node differ in their first page; a frame is in the tree once.
    5. All pages of a run have one history, or are of one request that goes on (Phase.NEW).
    """

    def __init__(
        self,
        page_tokens: int,
        policy: Policy | None = None,
        *,
        leaves: Callable[[RootKey], Candidates] | None = None,
        on_leave: Callable[[Row, list[int], bool], None] | None = None,
    ) -> None:
        """`policy` is Lru by default, `leaves` one set for all roots.

        `on_leave` takes over the row of pages that leave; it hears their frames, deepest first, and whether the policy
        takes them to be in use. Without it the policy forgets them.
        """
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be positive, got {page_tokens}")
        self.page_tokens = page_tokens
        self.policy = policy or Lru()
        self.num_pages = 0
        self.evictable_pages = 0
        self._all_leaves = self.policy.candidates()
        self._leaves_of = leaves or (lambda root: self._all_leaves)
        self._on_leave: Callable[[Row, list[int], bool], None] | None = on_leave
        self._page_bytes = TOKEN_BYTES * page_tokens
        self._roots: dict[RootKey, Root] = {}
        self._nodes: dict[Row, Node] = {}
        self._pinned: set[Path] = set()
        # Counts evictions and removals: an unpinned path from before one may name pages that left.
        self._epoch = 0

    def wire(
        self, leaves: Callable[[RootKey], Candidates], on_leave: Callable[[Row, list[int], bool], None]
    ) -> None:
        """Set what the constructor takes under these names, while nothing is cached or as it was before."""
        self._leaves_of, self._on_leave = leaves, on_leave

    # What is cached

    def match(self, root: RootKey, tokens: TokenIds, limit: int | None = None) -> Match:
        """The longest cached prefix of the first `limit` tokens of a prompt (all of them by default).

        A caller that needs the last token computed passes len(tokens) - 1. `partial` is the best of the children that share
        the next token, where there are more than PARTIAL_CANDIDATES of them the best of the newest.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        data = _token_bytes(tokens if limit is None else tokens[:limit])
        top = self._roots.get(root)
        if top is None:
            return Match(_NO_FRAMES, 0, None, Path(root, 0, self._new_root(root), self._epoch))
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

    def is_in_use(self, path: Path) -> bool:
        """Something has pinned all pages of a path that was just made."""
        return path.pinned or path._node.pins > 0

    def nodes(self) -> Iterator[Node]:
        """The top of each tree and its runs, parents before children; the tree must not change meanwhile."""
        for root in self._roots.values():
            yield from self._subtree(root)

    # Use

    def pin(self, path: Path) -> None:
        """Keep the path's pages until `unpin`. Raises PageMissing when something was evicted since the path was made."""
        assert not path.pinned, "path pinned twice"
        self._end_run_at(path)
        if path.depth == 0:
            path._node = self._roots.setdefault(path.root, self._new_root(path.root))
        path.pinned = True
        self._pinned.add(path)
        self._pin_up(path._node, None)

    def begin(self, path: Path, now: float) -> None:
        """A request begins to use a pinned path."""
        assert path.pinned, "only a pinned path can be used"
        self._use_up(path._node, None, now)

    def unpin(
        self, path: Path, now: float, use: Use | None = NOTHING_TOLD, *, only_last: bool = False
    ) -> None:
        """Let the path's pages go; match again before using the path again.

        `use` is what a request leaves behind that is over, None when none has used them. With `only_last` the request
        goes on elsewhere, on the same pages: only those that nothing else has pinned are released.
        """
        assert path.pinned, "path unpinned twice"
        path.pinned = False
        self._pinned.remove(path)
        leaf = node = path._node
        released: list[Node] = []
        while node.parent is not None:
            node.pins -= 1
            if not node.pins:
                self.evictable_pages += len(node.frames)
            if use is not None and not (only_last and node.pins):
                node.last_use_s = now
                released.append(node)
            node = node.parent
        node.pins -= 1
        self._forget_if_empty(node)
        if use is not None:
            self._release(released, use, now)
        self._offer(leaf)
        self._fuse_up(leaf)

    def touch(self, path: Path, now: float) -> None:
        """Count a path as used now. Raises PageMissing when it isn't pinned and something was evicted since it was made."""
        if not path.pinned:
            self._end_run_at(path)
        self._touch_up(path._node, Use(path.depth, 0), now)

    # Growth

    def insert(
        self, root: RootKey, tokens: TokenIds, frames: Frames, now: float, *, nbytes: int = 1
    ) -> Inserted:
        """Put a chain of whole pages, `nbytes` each, in from its first page on; `frames[i]` holds `tokens[i * page_tokens :]`.

        Pages the tree holds already keep the tree's frames. The returned path isn't pinned.
        """
        data = self._checked(tokens, frames)
        top = self._roots.get(root)
        if top is None:
            top = self._roots[root] = self._new_root(root)
        before = self.num_pages
        node, known = self._graft(top, data, frames, (), len(frames), nbytes, now)
        self._touch_up(node, Use(len(frames), self.num_pages - before), now)
        self._offer(node)
        self._fuse_up(node)
        inserted = _inserted(Path(root, len(frames), node, self._epoch), known, frames)
        self._forget_if_empty(top)
        return inserted

    def extend(
        self,
        path: Path,
        tokens: TokenIds,
        frames: Frames,
        now: float,
        *,
        created: int = 1,
        nbytes: int = 1,
        pieces: Sequence[Piece] = (),
    ) -> Inserted:
        """Put further whole pages, `nbytes` each, behind a pinned path, which then includes them; its length doesn't matter.

        The path's request brings `created` new pages in all. `pieces`, where there are any, cover all of the further
        pages; of pages that the tree has they must know no row. The result speaks of the further pages only.
        """
        assert path.pinned, "only a pinned path can be extended"
        data = self._checked(tokens, frames)
        above = path._node
        is_own = above.phase is Phase.NEW and above.pins == 1
        if is_own and above.children is None and above.parent is not None and not pieces:
            # No other path ends here, so a longer run keeps pins exact.
            above.tokens += data
            above.frames.frombytes(frames.tobytes())
            above.last_use_s = now
            self.policy.grow(above.row, len(frames))
            self.num_pages += len(frames)
            path.depth += len(frames)
            return Inserted(path, [], frames)
        node, known = self._graft(above, data, frames, pieces, created, nbytes, now)
        self._pin_up(node, above)
        self._use_up(node, above, now)
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

    def has_run(self, row: Row) -> bool:
        """Whether the policy's row is a run of a tree."""
        return row in self._nodes

    def evict(self, pages: int, now: float) -> list[int]:
        """Drop at most `pages` unpinned pages, as the policy says; their frames, each before its parent's."""
        return [frame for run in self.evict_runs(pages, now) for frame in run.frames]

    def evict_runs(self, pages: int, now: float) -> list[Evicted]:
        """As `evict`, with what `explain` wants to know. Only where all roots share one set of leaves."""
        runs: list[Evicted] = []
        while pages > 0 and (victims := self._all_leaves.victims(pages, now)):
            for victim in victims:
                runs.append(self.evict_run(victim))
                pages -= victim.pages
        return runs

    def pages_of(self, row: Row) -> int:
        """Pages of the run that the policy names so."""
        return len(self._nodes[row].frames)

    def frames_of(self, victim: Victim) -> list[int]:
        """The frames of what a set of leaves names."""
        return self._nodes[victim.row].frames[-victim.pages :].tolist()

    def evict_run(self, victim: Victim) -> Evicted:
        """Drop what a set of leaves names."""
        leaf = self._nodes[victim.row]
        deepest = leaf.end - 1
        taken = self._cut(leaf, len(leaf.frames) - victim.pages)
        return Evicted(taken, deepest, leaf.last_use_s)

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
        pending: list[Node] = list(self._roots.values())
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
        frames: list[int] = []
        rows: set[Row] = set()
        evictable_pages = 0
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
                is_leaf = not node.pins and node.children is None
                assert (node.row in node.leaves) == is_leaf, "candidates are the leaves without pins"
                assert node.leaves is root.leaves, "a run among another tree's leaves"
                assert self._nodes[node.row] is node, "a row names another run"
                rows.add(node.row)
                frames += node.frames
                evictable_pages += 0 if node.pins else len(node.frames)
        assert not pins and rows == self._nodes.keys(), "nodes outside the trees"
        assert evictable_pages == self.evictable_pages, "evictable_pages"
        assert len(set(frames)) == len(frames) == self.num_pages, "num_pages, or a frame twice"

    def _count_pins(self) -> dict[Node, int]:
        pins: dict[Node, int] = {}
        for path in self._pinned:
            assert path.pinned and path.depth == path._node.end, "a pinned path doesn't end with its run"
            node: Node | None = path._node
            while node is not None:
                pins[node] = pins.get(node, 0) + 1
                top, node = node, node.parent
            assert top is self._roots.get(path.root), "a pinned path hangs in no tree"
        return pins

    def _check_children(self, node: Node) -> None:
        for head, entry in (node.children or {}).items():
            group = [entry] if isinstance(entry, Node) else list(entry.values())
            assert isinstance(entry, Node) or len(entry) > 1, "a group of one"
            for child in group:
                page = bytes(child.tokens[: self._page_bytes])
                assert child.parent is node and child.start == node.end, "a child out of place"
                assert page[:TOKEN_BYTES] == head, "a child under another's first token"
                assert isinstance(entry, Node) or entry[page] is child, "a child under another's first page"

    # Inside

    def _checked(self, tokens: TokenIds, frames: Frames) -> bytes:
        data = _token_bytes(tokens)
        if frames.dtype != np.int32 or frames.ndim != 1:
            raise ValueError(f"frames must be int32 [pages], got {frames.dtype} {list(frames.shape)}")
        if len(data) != len(frames) * self._page_bytes:
            held = len(frames) * self.page_tokens
            raise ValueError(f"{len(frames)} frames hold {held} tokens, got {len(tokens)}")
        return data

    def _walk(self, node: Node, data: bytes, end: int) -> tuple[Node, Node | None, int, list[array[int]]]:
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

    def _partial(self, node: Node, inside: Node | None, depth: int, rest: bytes) -> tuple[int, int] | None:
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

    def _graft(
        self,
        top: Node,
        data: bytes,
        frames: Frames,
        pieces: Sequence[Piece],
        created: int,
        nbytes: int,
        now: float,
    ) -> tuple[Node, bytes]:
        """Make the chain `data` exist below `top`, its end a node's end.

        Returns the node it ends in, and the frames (int32) of the pages that were there before.
        """
        node, inside, at, runs = self._walk(top, data, len(data))
        known = b"".join(runs)  # now: the runs may grow
        pages = at // self._page_bytes
        if inside is not None:
            node = self._split(inside, top.end + pages - inside.start)
        self.num_pages += len(frames) - pages
        self.evictable_pages += len(frames) - pages
        for row, count in _behind(pieces or [(None, len(frames))], pages):
            phase = Phase.USED
            if row is None:
                row, phase = self.policy.add(count, node.end, nbytes, created, now), Phase.NEW
            end = pages + count
            text = bytearray(data[pages * self._page_bytes : end * self._page_bytes])
            run = array("i", frames[pages:end].tobytes())
            child = Node(text, run, node.end, node, row, phase, top.leaves)
            if node.children is None:
                node.leaves.discard(node.row)
            node.add(child, self._page_bytes)
            self._nodes[row] = child
            node, pages = child, end
        return node, known

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a run after `pages` pages; returns the new upper node, which the caller touches or pins."""
        cut = pages * self._page_bytes
        assert node.parent is not None and 0 < pages < len(node.frames)
        is_candidate = not node.pins and node.children is None
        if is_candidate:
            node.leaves.discard(node.row)
        row, node.row = node.row, self.policy.split(node.row, pages)
        upper = Node(
            node.tokens[:cut], node.frames[:pages], node.start, node.parent, row, node.phase, node.leaves
        )
        node.parent.replace(upper, self._page_bytes)
        node.tokens = node.tokens[cut:]
        node.frames = node.frames[pages:]
        node.start += pages
        node.parent = upper
        upper.add(node, self._page_bytes)
        upper.pins = node.pins
        upper.last_use_s = node.last_use_s
        self._nodes[upper.row], self._nodes[node.row] = upper, node
        if is_candidate:
            node.leaves.add(node.row)
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

    def _touch_up(self, node: Node, use: Use, now: float) -> None:
        touched: list[Node] = []
        while node.parent is not None:
            node.last_use_s = now
            touched.append(node)
            node = node.parent
        self._release(touched, use, now)

    def _release(self, nodes: list[Node], use: Use, now: float) -> None:
        """Tell the policy that a request lets these nodes go, the deepest first given. Those still pinned are used on."""
        if not nodes:
            return
        nodes.reverse()
        self._reuse([node for node in nodes if node.phase is Phase.AGING], now)
        behind = [max(0, use.pages - node.end) for node in nodes]
        self.policy.release([node.row for node in nodes], behind, use, now)
        for node in nodes:
            node.phase = Phase.AGING
        self._reuse([node for node in nodes if node.pins], now)

    def _reuse(self, nodes: list[Node], now: float) -> None:
        if nodes:
            self.policy.reuse([node.row for node in nodes], now)
            for node in nodes:
                node.phase = Phase.USED

    def _use_up(self, node: Node, above: Node | None, now: float) -> None:
        """A request uses `node` and what is above it, up to but without `above`."""
        aging: list[Node] = []
        while node.parent is not None and node is not above:
            if node.phase is Phase.AGING:
                aging.append(node)
            node = node.parent
        aging.reverse()
        self._reuse(aging, now)

    def _pin_up(self, node: Node | None, above: Node | None) -> None:
        """Add a pin to `node` and what is above it, up to but without `above`."""
        while node is not above:
            assert node is not None
            if not node.pins and node.parent is not None:
                if node.children is None:
                    node.leaves.discard(node.row)
                self.evictable_pages -= len(node.frames)
            node.pins += 1
            node = node.parent

    def _offer(self, node: Node) -> None:
        """Put a run among the leaves where it is one."""
        is_leaf = node.children is None and not node.pins and node.parent is not None
        if is_leaf and node.row not in node.leaves:
            node.leaves.add(node.row)

    def _fuse_up(self, node: Node) -> None:
        """From `node` to the root, make one run of a node and its only child where nothing tells them apart.

        Without this a sequence that repeats another would leave a node for each page it sealed.
        """
        while node.parent is not None:
            above = node.parent
            child = node.only_child()
            if child is not None and self._alike(node, child):
                self._fuse(node, child)
            node = above

    def _fuse(self, upper: Node, lower: Node) -> None:
        """Append a node's only child to its run; the child stays, since paths may end in it."""
        assert upper.parent is not None
        upper.tokens += lower.tokens
        upper.frames += lower.frames
        lower.tokens, lower.frames = upper.tokens, upper.frames
        lower.start, lower.parent = upper.start, upper.parent
        lower.parent.replace(lower, self._page_bytes)
        self.policy.join(upper.row, lower.row)
        del self._nodes[upper.row]
        upper.start, upper.parent, upper.children = MOVED, lower, None

    def _alike(self, node: Node, only_child: Node) -> bool:
        """Whether no pinned path ends between the two, and the policy needs not tell them apart."""
        if node.pins != only_child.pins or node.phase is not only_child.phase:
            return False
        return node.phase is Phase.NEW or self.policy.alike(node.row, only_child.row)

    def _cut(self, leaf: Node, keep: int) -> list[int]:
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
            if self._on_leave is None:
                self.policy.cut(leaf.row, len(taken))
            else:
                self._on_leave(self.policy.split(leaf.row, keep), taken, leaf.phase is not Phase.AGING)
            return taken
        leaf.parent.drop(leaf, self._page_bytes)
        leaf.leaves.discard(leaf.row)
        del self._nodes[leaf.row]
        if self._on_leave is None:
            self.policy.forget(leaf.row)
        else:
            self._on_leave(leaf.row, taken, leaf.phase is not Phase.AGING)
        self._offer(leaf.parent)
        self._forget_if_empty(leaf.parent)
        return taken

    def _remove_from(self, top: Node, first: int) -> Removed:
        """Drop `top`'s pages from its `first` on and all below, pinned nodes excepted."""
        taken: list[int] = []
        pinned_pages = 0
        for node in reversed(list(self._subtree(top))):
            keep = first if node is top else 0
            if node.pins:
                pinned_pages += len(node.frames) - keep
                continue
            node.leaves.discard(node.row)  # what its last pages were to its set is over
            taken += self._cut(node, keep)
            if keep:
                self._offer(node)
        return Removed(taken, pinned_pages)

    def _subtree(self, top: Node) -> Iterator[Node]:
        """`top` and all below it, parents before children; without recursion, since chains can be long."""
        pending = [top]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.all_children())

    def _forget_if_empty(self, node: Node) -> None:
        if isinstance(node, Root) and not node.children and not node.pins:
            self._roots.pop(node.key, None)

    def _new_root(self, key: RootKey) -> Root:
        return Root(key, self._leaves_of(key))


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


def _behind(pieces: Sequence[Piece], pages: int) -> Iterator[Piece]:
    """The pieces without their first `pages` pages, which have no history of their own."""
    for row, count in pieces:
        skipped = min(count, pages)
        assert not skipped or row is None, "a page that is here has a row elsewhere"
        pages -= skipped
        if count > skipped:
            yield row, count - skipped
