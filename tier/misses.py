"""Knows why a page is not there: which tier dropped it and when, or which field of its identity differs. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvtier.tier.events import PageId


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a page left its last tier: a reason of messages.Missing, and one sentence."""

    reason: str
    detail: str


def at(wall_s: float) -> str:
    """A moment as users read it."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds")


class Misses:
    """The node's memory of pages that left it, and of the identities under which prompts were stored.

    Owned by the coordinator. All tables are bounded, the oldest entries go first. A prompt is known by its content
    digest, which is salted per tenant and looked up with the tenant: nothing is ever told across tenants.
    """

    def __init__(self, max_gone: int, max_roots: int, max_contents: int) -> None:
        self.max_gone, self.max_roots, self.max_contents = max_gone, max_roots, max_contents
        self._gone: OrderedDict[PageId, Gone] = OrderedDict()
        self._roots: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._contents: OrderedDict[tuple[bytes, bytes], dict[bytes, None]] = OrderedDict()

    def left(self, page: PageId, reason: str, detail: str) -> None:
        """A page left its last tier."""
        self._gone[page] = Gone(reason, detail)
        self._gone.move_to_end(page)
        if len(self._gone) > self.max_gone:
            self._gone.popitem(last=False)

    def came(self, page: PageId) -> None:
        """A page is here (again)."""
        self._gone.pop(page, None)

    def knows_root(self, root: bytes) -> bool:
        """Are this root's fields in the table?"""
        return root in self._roots

    def add_root(self, root: bytes, fields: Mapping[str, str]) -> None:
        """Keep a root's fields."""
        self._roots[root] = dict(fields)
        self._roots.move_to_end(root)
        if len(self._roots) > self.max_roots:
            self._roots.popitem(last=False)

    def roots(self) -> tuple[tuple[bytes, dict[str, str]], ...]:
        """The table of roots, oldest first."""
        return tuple(self._roots.items())

    def add_content(self, tenant: bytes, content: bytes, root: bytes) -> None:
        """A prompt that begins with this content is stored under `root`."""
        known = self._contents.setdefault((tenant, content), {})
        known.pop(root, None)
        known[root] = None
        if len(known) > 8:  # anything more than the handful of identities a deployment goes through will do
            del known[next(iter(known))]
        self._contents.move_to_end((tenant, content))
        if len(self._contents) > self.max_contents:
            self._contents.popitem(last=False)

    def forget_tenant(self, tenant: bytes | None) -> None:
        """Forget the prompts of a tenant (None: of all)."""
        for known in [k for k in self._contents if tenant is None or k[0] == tenant]:
            del self._contents[known]

    def why(self, page: PageId, root: bytes, tenant: bytes, first_content: bytes) -> Gone:
        """Why a page is in no tier. `first_content` is b"" for all but the first page of a prompt."""
        gone = self._gone.get(page)
        if gone is not None:
            return gone
        others = [r for r in self._contents.get((tenant, first_content), {}) if r != root]
        if first_content and others:
            return Gone("identity_differs", self._difference(root, others))
        return Gone("never_stored", "no page with these tokens and this identity was stored here")

    def check(self) -> None:
        """All tables are within their bounds."""
        assert len(self._gone) <= self.max_gone
        assert len(self._roots) <= self.max_roots
        assert len(self._contents) <= self.max_contents
        assert all(0 < len(known) <= 8 for known in self._contents.values())

    def _difference(self, root: bytes, others: list[bytes]) -> str:
        here = self._roots.get(root)
        best: list[str] | None = None
        for other in reversed(others):
            there = self._roots.get(other)
            if here is None or there is None:
                continue
            differing = [
                f"{name} is {here.get(name, 'absent')!r}, stored with {there.get(name, 'absent')!r}"
                for name in sorted(here.keys() | there.keys())
                if here.get(name) != there.get(name)
            ]
            if best is None or len(differing) < len(best):
                best = differing
        if not best:
            return f"the same tokens were stored under another identity, root {others[-1].hex()[:16]}"
        return "the same tokens were stored under another identity: " + "; ".join(best)
