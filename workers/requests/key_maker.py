"""Makes the keys of a worker's pages from tokens; where a recording is run again, there are no tokens, it is told them. Pure."""

from __future__ import annotations

from kvtier.tier.pages.identity import TokenIds, content_digest, page_keys
from kvtier.tier.pages.page import PageKey, RootKey

_KEY_BYTES = 32


class KeyMaker:
    """Owned by the step loop. `noted`: what it has made is to be kept here; `told`: what it has to give out, the last first.

    Each of both has one entry for each call of `keys`: the keys, joined.
    """

    def __init__(self) -> None:
        self.noted: list[bytes] | None = None
        self.told: list[bytes] | None = None

    def keys(
        self,
        parent: RootKey | PageKey,
        salt: bytes,
        tokens: TokenIds,
        page_tokens: int,
        *,
        include_partial: bool = False,
    ) -> list[PageKey]:
        """See identity.page_keys. AssertionError where it was told none."""
        if self.told is not None:
            assert self.told, "a page's key is asked for that nobody asked for when it was recorded"
            joined = self.told.pop()
            return [PageKey(joined[i : i + _KEY_BYTES]) for i in range(0, len(joined), _KEY_BYTES)]
        made = page_keys(parent, salt, tokens, page_tokens, include_partial)
        if self.noted is not None:
            self.noted.append(b"".join(made))
        return made

    def content(self, salt: bytes, tokens: TokenIds) -> bytes:
        """See identity.content_digest; b"" where there are no tokens: no decision hangs on it."""
        return content_digest(salt, tokens) if self.told is None else b""
