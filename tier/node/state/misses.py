"""Knows why a page is not there: which tier dropped it and when, or which field of its identity differs. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvtier.tier.protocol.events import PageId, StoredBefore

MAX_ROOTS_PER_CONTENT = 8  # anything more than the handful of identities a deployment goes through will do


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
        self._first_pages: OrderedDict[PageId, bytes] = OrderedDict()  # ever stored -> tenant
        self.unsaved = 0  # changes of what `stored_before` tells since it was last asked

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

    def add_content(self, tenant: bytes, content: bytes, root: bytes, page: PageId) -> None:
        """A prompt that begins with this content is stored under `root`; `page` is its first page."""
        known = self._contents.setdefault((tenant, content), {})
        self.unsaved += root not in known or page not in self._first_pages
        known.pop(root, None)
        known[root] = None
        if len(known) > MAX_ROOTS_PER_CONTENT:
            del known[next(iter(known))]
        self._contents.move_to_end((tenant, content))
        if len(self._contents) > self.max_contents:
            self._contents.popitem(last=False)
        self._first_pages[page] = tenant
        self._first_pages.move_to_end(page)
        if len(self._first_pages) > self.max_contents:
            self._first_pages.popitem(last=False)

    def forget_tenant(self, tenant: bytes | None) -> None:
        """Forget the prompts of a tenant (None: of all)."""
        for known in [k for k in self._contents if tenant is None or k[0] == tenant]:
            del self._contents[known]
        for page in [p for p, owner in self._first_pages.items() if tenant is None or owner == tenant]:
            del self._first_pages[page]
        self.unsaved += 1

    def tenants(self) -> set[bytes]:
        """Those that prompts are known of."""
        return {tenant for tenant, _ in self._contents} | set(self._first_pages.values())

    def stored_before(self) -> StoredBefore:
        """What is to be remembered over a restart."""
        self.unsaved = 0
        return StoredBefore(
            tuple((tenant, content, tuple(roots)) for (tenant, content), roots in self._contents.items()),
            tuple((key, variant, tenant) for (key, variant), tenant in self._first_pages.items()),
        )

    def recall(self, before: StoredBefore) -> None:
        """Take over what an earlier life remembered; before anything is added."""
        for tenant, content, roots in before.contents[-self.max_contents :]:
            if roots:
                self._contents[tenant, content] = dict.fromkeys(roots[-MAX_ROOTS_PER_CONTENT:])
        for key, variant, tenant in before.first_pages[-self.max_contents :]:
            self._first_pages[key, variant] = tenant

    def why(self, pages: Collection[PageId], root: bytes, tenant: bytes, first_content: bytes) -> Gone:
        """Why a page is in no tier, in none of the formats it was looked for in (the best one first).

        `first_content` is b"" for all but the first page of a prompt.
        """
        for page in pages:
            gone = self._gone.get(page)
            if gone is not None:
                return gone
        if any(self._first_pages.get(page) == tenant for page in pages):
            return Gone(
                "evicted", "stored before under this identity; when and why it left is not known any more"
            )
        known = self._contents.get((tenant, first_content), {}) if first_content else {}
        if known and root not in known:
            return Gone("identity_differs", self._difference(root, list(known)))
        return Gone("never_stored", "no page with these tokens and this identity was stored here")

    def check(self) -> None:
        """All tables are within their bounds."""
        assert len(self._gone) <= self.max_gone
        assert len(self._roots) <= self.max_roots
        assert len(self._contents) <= self.max_contents
        assert all(0 < len(known) <= MAX_ROOTS_PER_CONTENT for known in self._contents.values())
        assert len(self._first_pages) <= self.max_contents

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
            return f"these first tokens were stored under another identity, root {others[-1].hex()[:16]}"
        return "these first tokens were stored under another identity: " + "; ".join(best)
