"""Which pages a prefix needs, and in which format: the search over counts against the sentence it implements."""

from __future__ import annotations

import pytest
from cache_world import can_serve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.pages import recipe
from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import HAS_DECAYED, HAS_WRITTEN, ChainNeeds, Recipe, Window, longest_hit

PAGE_TOKENS = 16

recipes = st.one_of(
    st.just(Recipe(PageFormat.BF16)),
    st.builds(
        Recipe,
        write=st.just(PageFormat.FP8),
        decayed=st.just(PageFormat.INT4C),
        recent_tokens=st.sampled_from([0, 8, 16, 40]),
        sink_tokens=st.sampled_from([0, 4, 16, 40]),
        stride_tokens=st.sampled_from([16, 32]),
    ),
)
windows = st.one_of(
    st.just(Window()),
    st.builds(Window, tokens=st.integers(1, 80), sinks=st.sampled_from([0, 4, 16, 20, 40])),
)
needs = st.builds(ChainNeeds, recipes, windows, st.booleans())


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[ChainNeeds], list[bytes], int, int]:
    """Chains' needs and presence, pages known to be usable, and the last position."""
    chains = draw(st.lists(needs, min_size=1, max_size=3))
    pages = draw(st.integers(0, 12))
    mostly = st.sampled_from([0, 1, 2, 3, 3, 3, 3])
    present = []
    for need in chains:
        known = HAS_WRITTEN | HAS_DECAYED if need.any_variant or not need.recipe.is_uniform else HAS_WRITTEN
        bits = draw(st.lists(mostly, min_size=pages, max_size=pages))
        present.append(bytes(b & known for b in bits))
    first = draw(st.integers(0, pages))
    return chains, present, first, draw(st.integers(0, PAGE_TOKENS * (pages + 1)))


@given(lookup=lookups())
@settings(max_examples=300, deadline=None)
def test_the_longest_hit_is_the_longest_prefix_that_every_chain_can_serve(
    lookup: tuple[list[ChainNeeds], list[bytes], int, int],
) -> None:
    chains, present, first, last_position = lookup

    found = longest_hit(chains, present, first, last_position, PAGE_TOKENS)

    pages = len(present[0])
    fits = [
        n
        for n in range(first + 1, pages + 1)
        if all(
            can_serve(c, p, n, min(n * PAGE_TOKENS, last_position), PAGE_TOKENS)
            for c, p in zip(chains, present, strict=True)
        )
    ]
    assert found == max(fits, default=first)


def test_a_long_prompt_of_which_little_is_here_is_looked_at_page_by_page_where_something_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends at which the last page is missing are no prefix, however many there are."""
    looked: list[int] = []
    serves = recipe._Chain.serves
    monkeypatch.setattr(
        recipe._Chain, "serves", lambda chain, n, at: looked.append(n) or serves(chain, n, at)
    )
    present = bytes([HAS_WRITTEN] * 3) + bytes(10**6)
    need = ChainNeeds(Recipe(PageFormat.BF16), Window(4 * PAGE_TOKENS, 1))

    assert longest_hit([need], [present], 0, len(present) * PAGE_TOKENS, PAGE_TOKENS) == 3
    assert len(looked) <= 2


@given(
    window=windows,
    page=st.integers(0, 12),
    position=st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_a_page_is_needed_when_a_row_from_the_position_on_attends_a_key_of_it(
    window: Window, page: int, position: int
) -> None:
    keys = range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    attended = any(
        not window.tokens or j > position - window.tokens or j < window.sinks for j in keys
    )  # a later row's window begins later: the first row attends all that any attends of the past

    assert window.needs(page, position, PAGE_TOKENS) == attended


@given(recipe=recipes, page=st.integers(0, 12), position=st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_a_page_that_has_decayed_never_comes_back(recipe: Recipe, page: int, position: int) -> None:
    before = recipe.format_at(page, position, PAGE_TOKENS)
    after = recipe.format_at(page, position + recipe.rows_until_decay(position), PAGE_TOKENS)

    for row in range(position, position + min(64, recipe.rows_until_decay(position))):
        assert recipe.format_at(page, row, PAGE_TOKENS) is before
    assert before is recipe.write or after is before


def test_recipes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="takes a page at once"):
        Recipe(PageFormat.INT4C)
    with pytest.raises(ValueError, match="recent_tokens -1"):
        Recipe(PageFormat.FP8, PageFormat.INT4C, recent_tokens=-1)
    with pytest.raises(ValueError, match="stride_tokens 0 must be positive"):
        Recipe(PageFormat.FP8, PageFormat.INT4C, stride_tokens=0)
