"""What ranks have of a model's heads and of a page's bytes: together all of it, in the layout of a page of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.tier.pages.page import PageFormat, PageSpec
from kvtier.workers.models.formats import LayerGroup, unit_bytes_of
from kvtier.workers.models.shards.share import WHOLE, Share, share_unit_bytes
from kvtier.workers.parallel.pages import RankPages

FORMATS = tuple(f for f in PageFormat if f is not PageFormat.FP16)


def groups_of(kv_heads: int, *formats: PageFormat, rope_dim: int = 0) -> tuple[LayerGroup, ...]:
    specs = {
        format: PageSpec(
            num_layers=3, num_kv_heads=kv_heads, head_dim=24, page_tokens=16, format=format, rope_dim=rope_dim
        )
        for format in formats
    }
    return (LayerGroup((0, 1, 2), 0, specs),)


def ranks_of(
    kv_heads: int, ranks: int, *formats: PageFormat, rope_dim: int = 0
) -> tuple[tuple[LayerGroup, ...], list[RankPages], list[torch.Tensor]]:
    """The whole pages, and each rank's arena of 12 of them."""
    whole = groups_of(kv_heads, *formats, rope_dim=rope_dim)
    pages, arenas = [], []
    for rank in range(ranks):
        share = Share(rank, ranks)
        own = whole if rope_dim else groups_of(len(share.kv_heads(kv_heads)), *formats)
        units = 12 * -(-max(s.nbytes for s in whole[0].specs.values()) // unit_bytes_of(whole))
        arena = torch.zeros(units, share_unit_bytes(own, whole, unit_bytes_of(whole)), dtype=torch.uint8)
        arenas.append(arena)
        pages.append(RankPages(arena, share, own, whole))
    return whole, pages, arenas


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 2), (4, 4), (2, 4), (1, 3), (6, 3)])
def test_ranks_have_all_heads_between_them_and_each_is_saved_once(kv_heads: int, ranks: int) -> None:
    shares = [Share(rank, ranks) for rank in range(ranks)]
    whole = groups_of(kv_heads, PageFormat.BF16)[0].specs[PageFormat.BF16]
    saved = [head for share in shares if share.saves(whole) for head in share.kv_heads(kv_heads)]

    assert saved == list(range(kv_heads))
    assert [head for share in shares for head in share.heads(12)] == list(range(12))
    assert [column for share in shares for column in share.columns(161)] == list(range(161))
    for share in shares:
        needed = {head * kv_heads // 12 for head in share.heads(12)}
        assert needed <= set(share.kv_heads(kv_heads))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 2), (2, 4)])
def test_a_page_that_went_through_all_ranks_is_the_same_page(
    format: PageFormat, kv_heads: int, ranks: int
) -> None:
    whole, pages, arenas = ranks_of(kv_heads, ranks, format)
    spec = whole[0].specs[format]
    page = np.random.default_rng(0).integers(1, 256, spec.nbytes, np.uint8)
    used = spec.sections[-1].end
    page.reshape(spec.num_layers, -1)[:, used:] = 0  # padding

    for rank in pages:
        rank.copy_in(5, page.data, spec.digest)
    out = np.full(spec.nbytes, 7, np.uint8)
    for rank in reversed(pages):
        rank.copy_out(5, out.data, spec.digest, spec.page_tokens)

    assert np.array_equal(out, page)
    others = [arena[torch.arange(len(arena)) != 5] for arena in arenas]
    assert not any(other.any() for other in others)


def test_latents_are_whole_on_each_rank_and_written_by_the_first() -> None:
    whole, pages, arenas = ranks_of(1, 2, PageFormat.BF16, rope_dim=8)
    spec = whole[0].specs[PageFormat.BF16]
    page = np.random.default_rng(0).integers(0, 256, spec.nbytes, np.uint8)
    for rank in pages:
        rank.copy_in(0, page.data, spec.digest)
    assert torch.equal(arenas[0], arenas[1])

    out = np.zeros(spec.nbytes, np.uint8)
    pages[1].copy_out(0, out.data, spec.digest, spec.page_tokens)
    assert not out.any()
    pages[0].copy_out(0, out.data, spec.digest, spec.page_tokens)
    assert out.any()


def test_the_tail_of_a_page_that_is_not_full_goes_down_as_zeros() -> None:
    whole, pages, _ = ranks_of(2, 2, PageFormat.FP32)
    spec = whole[0].specs[PageFormat.FP32]
    page = np.full(spec.nbytes, 9, np.uint8)
    for rank in pages:
        rank.copy_in(1, page.data, spec.digest)

    for rank in pages:
        rank.copy_out(1, page.data, spec.digest, 3)

    keys = page.reshape(spec.num_layers, -1)[:, : spec.sections[0].end].reshape(3, 2, 16, 24 * 4)
    assert (keys[:, :, :3] == 9).all() and not keys[:, :, 3:].any()


@pytest.mark.parametrize("formats", [(PageFormat.FP32,), (PageFormat.FP8, PageFormat.INT4C), FORMATS])
@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 2), (2, 4), (8, 8), (1, 2)])
def test_frames_have_the_same_numbers_on_all_ranks(
    formats: tuple[PageFormat, ...], kv_heads: int, ranks: int
) -> None:
    """No page reaches over more units of a rank's arena than the whole page over whole ones."""
    whole = groups_of(kv_heads, *formats)
    whole_unit = unit_bytes_of(whole)
    own = groups_of(len(Share(0, ranks).kv_heads(kv_heads)), *formats)

    unit = share_unit_bytes(own, whole, whole_unit)

    for format, spec in whole[0].specs.items():
        assert -(-own[0].specs[format].nbytes // unit) <= -(-spec.nbytes // whole_unit)
    assert share_unit_bytes(whole, whole, whole_unit) == whole_unit
    assert WHOLE.kv_heads(kv_heads) == range(kv_heads)
