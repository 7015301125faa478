"""What of a message between worker and node takes several of its fields to see; the ranges of each are at its type. Pure."""

from __future__ import annotations

from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import HAS_DECAYED, HAS_WRITTEN, ChainNeeds, Recipe, Window
from kvtier.tier.protocol.messages import Chain, Copied, Fetch, Finished, Locate, Stored, StoredPage


def malformed(message: object) -> str | None:
    """What can't be of a message that was decoded, as in "it sent ..."; None when all is well."""
    match message:
        case Stored():
            return next((wrong for page in message.pages if (wrong := _page(page))), None)
        case Locate():
            return _locate(message)
        case Copied():
            return None if set(message.corrupt) <= set(message.pages) else "corrupt pages that it didn't copy"
        case Finished():
            return _finished(message)
        case Fetch():
            return None if message.pages else "a Fetch of no pages"
    return None


def needs_of(chain: Chain) -> ChainNeeds:
    """A chain's needs as tier/pages/recipe.py has them. ValueError for formats or numbers that can't be."""
    decayed = PageFormat(chain.decayed) if chain.decayed else None
    recipe = Recipe(
        PageFormat(chain.variant), decayed, chain.recent_tokens, chain.sink_tokens, chain.stride_tokens
    )
    return ChainNeeds(recipe, Window(chain.window_tokens, chain.window_sinks), chain.any_variant)


def _page(page: StoredPage) -> str | None:
    if len(page.content) not in (0, 16):
        return f"a page with a content digest of {len(page.content)} bytes, 0 or 16 expected"
    return None


def _locate(message: Locate) -> str | None:
    length = len(message.chains[0].keys)
    for chain in message.chains:
        wrong = _chain(chain, length)
        if wrong is not None:
            return wrong
    if len(message.first_content) not in (0, 16):
        return f"a content digest of {len(message.first_content)} bytes, 0 or 16 expected"
    return _double_pages(message.recompute_s, message.double_pages, may_be_none=True)


def _chain(chain: Chain, length: int) -> str | None:
    lengths = len(chain.keys), len(chain.held), len(chain.other_keys) or length
    if lengths != (length, length, length):
        return f"a chain of {lengths} keys, held bits and other keys, {length} expected of each"
    if len(chain.spec_digest) not in (0, 16):
        return f"a spec digest of {len(chain.spec_digest)} bytes, 0 or 16 expected"
    if chain.decayed == chain.variant:
        return f"pages in {chain.variant!r} that decay into the same"
    most = HAS_WRITTEN | (HAS_DECAYED if chain.decayed else 0)
    if chain.held and max(chain.held) > most:
        return f"held bits of {max(chain.held)}, at most {most} expected"
    try:
        needs_of(chain)
    except ValueError as error:
        return str(error)
    return None


def _finished(message: Finished) -> str | None:
    if any(len(set(keys)) < len(keys) for keys in message.keys):
        return "a request that has used a page twice"
    return _double_pages(message.page_s, message.double_pages, may_be_none=False)


def _double_pages(page_s: float, double_pages: float, *, may_be_none: bool) -> str | None:
    """Costs that grow by more than the first page's with each page are no measurement; 0: all pages cost the same."""
    if double_pages >= 1.0 or (double_pages == 0.0 and (may_be_none or page_s == 0.0)):
        return None
    return f"pages of which the one at depth {double_pages:g} costs twice as much as the first"
