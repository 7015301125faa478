"""Tiers in virtual time: the node's own Coordinator below, the policies above, and what a chain of them saves."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.lab.replay.chain_node import ChainNode
from kvtier.lab.replay.chain_tiers import ChainModel
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Costs, Kind, PolicySettings, Use

LRU = PolicySettings(name="lru")
RVI = PolicySettings(draw=8, per_draw=2)
USE = Use(0, 0, 100, Kind.TURN)


def chain_of(*runs: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Page ids of a request, as runs of (first, number)."""
    return np.concatenate([np.arange(first, first + number) for first, number in runs]).astype(np.int64)


def tiers(l1: int, l2: int, l3: int, l4: int) -> dict[str, int]:
    return {"L1": l1, "L2": l2, "L3": l3, "L4": l4}


@pytest.mark.parametrize("policy", [LRU, RVI], ids=["lru", "rvi"])
@pytest.mark.parametrize("write", ["through", "demote"])
def test_a_page_is_found_in_the_tier_that_it_sank_to(
    policy: PolicySettings, write: Literal["through", "demote"]
) -> None:
    model = ChainModel(tiers(4, 4, 8, 64), policy, write=write)
    for n in range(12):
        assert model.request(chain_of((100 * n, 4)), USE, float(n)) == 0
        model.check()

    assert model.request(chain_of((1100, 4)), USE, 20.0) == 4
    assert model.totals.hits == {"L1": 4, "L2": 0, "L3": 0, "L4": 0}
    assert model.request(chain_of((0, 4)), USE, 21.0) == 4

    assert model.totals.hits["L4"] == 4 and model.evicted_pages == 0
    assert 0 < model.totals.ssd_writes <= 48 and model.totals.moved > 48
    model.check()


@pytest.mark.parametrize("policy", [LRU, RVI], ids=["lru", "rvi"])
def test_prompts_longer_than_l3_lose_no_page_on_their_way(policy: PolicySettings) -> None:
    model = ChainModel(tiers(16, 8, 12, 256), policy)
    for n in range(9):
        hits = model.request(chain_of((1000 * (n % 3), 60)), USE, float(n))
        model.check()
        assert hits == (0 if n < 3 else 60)

    assert model.evicted_pages == 0
    assert model.totals.hits["L4"] >= 6 * (60 - 16 - 8 - 12)


def test_what_comes_up_from_l4_leaves_the_rest_of_l3_alone() -> None:
    node = ChainNode(LRU, "demote", 64, 512, 1, Costs(1.0, 64.0))
    long, resident = list(range(200)), list(range(200, 260))
    for node.now, ids in enumerate((long, resident)):
        assert node.take_up(0, 0, ids) == (0, 0)
        above = [None, *ids]
        node.bring_down(0, [(ids[depth], above[depth], depth) for depth in reversed(range(len(ids)))])
        node.check()

    from_l3, from_l4 = node.take_up(0, 0, long[:100])
    assert from_l3 + from_l4 == 100 and from_l4 >= 90
    node.check()

    from_l3, from_l4 = node.take_up(0, 0, resident)
    assert from_l3 + from_l4 == 60 and from_l3 >= 60 - 17


def test_time_saved_is_what_hits_save_less_what_loads_take() -> None:
    costs = Costs(1.0, 2.0)  # pages of depth 0, 1, 2, 3 take 1, 1.5, 2, 2.5 s
    model = ChainModel(tiers(2, 2, 2, 16), LRU, load_s=dict(zip(tiers(1, 1, 1, 1), (0.0, 0.1, 0.2, 0.3), strict=True)), costs=costs)  # fmt: skip
    model.request(chain_of((0, 4)), USE, 0.0)
    assert model.totals.recompute_s == model.totals.recompute_all_s == 7.0 and model.totals.time_saved == 0.0

    before = model.totals.copy()
    model.request(chain_of((0, 4)), USE, 1.0)

    done = model.totals.since(before)
    assert done.hits == {"L1": 2, "L2": 2, "L3": 0, "L4": 0}
    assert done.loads_s == pytest.approx(0.2) and done.recompute_s == 0.0
    assert done.time_saved == pytest.approx(1 - 0.2 / 7.0)


@pytest.mark.parametrize("policy", [LRU, RVI], ids=["lru", "rvi"])
def test_what_nothing_will_use_again_is_hardly_written_when_pages_are_demoted(policy: PolicySettings) -> None:
    through = ChainModel(tiers(8, 8, 32, 64), policy, write="through")
    demote = ChainModel(tiers(8, 8, 32, 64), policy, write="demote")
    for n in range(150):
        is_over = n % 3 > 0  # two of three sessions ask once and end
        pages = chain_of((1000 * n, 4) if is_over else (10 * (n % 11), 8))
        use = Use(0, 0, 100, Kind.TURN, session=n + 1 if is_over else n % 11 + 1000, closed=is_over)
        for model in (through, demote):
            model.request(pages, use, float(n))

    assert demote.totals.ssd_writes < 0.6 * through.totals.ssd_writes
    in_l4 = demote._node.coordinator.admin.pages(None, TierName.SSD, 1 << 60, 150.0)
    assert in_l4 and all(int.from_bytes(bytes.fromhex(page.key), "little") < 1000 for page in in_l4)
    assert sum(demote.totals.hits.values()) >= sum(through.totals.hits.values())


def test_workers_share_what_is_below_and_take_from_each_other() -> None:
    model = ChainModel(tiers(16, 0, 8, 64), LRU, workers=2)
    model.request(chain_of((0, 4)), USE, 0.0)
    model.request(chain_of((100, 4)), USE, 1.0)
    model.request(chain_of((0, 2), (200, 2)), USE, 2.0)
    model.check()
    assert model.totals.hits == {"L1": 2, "L2": 0, "L3": 0, "L4": 0}


def test_a_chain_without_a_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="a chain needs pages for L1, L2, L3"):
        ChainModel({"L1": 1, "L2": 1, "L3": 1, "L4": 0})


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(2, 12), st.integers(0, 24)),
    write=st.sampled_from(["through", "demote"]),
    policy=st.sampled_from([LRU, RVI]),
    workers=st.integers(1, 2),
    requests=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 8)), max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_what_is_hit_was_there_and_no_tier_is_too_full(
    sizes: tuple[int, int, int, int],
    write: Literal["through", "demote"],
    policy: PolicySettings,
    workers: int,
    requests: list[tuple[int, int, int]],
) -> None:
    model = ChainModel(tiers(*sizes), policy, workers=workers, write=write)
    known: set[int] = set()
    for now, (branch, shared, own) in enumerate(requests):
        pages = chain_of((0, shared), (100 * (1 + 4 * branch + shared), own))
        before = model.totals.copy()

        hits = model.request(pages, USE, float(now)) if len(pages) else 0

        model.check()
        assert sum(model.totals.since(before).hits.values()) == hits
        assert hits <= next((n for n, page in enumerate(pages.tolist()) if page not in known), len(pages))
        known.update(pages.tolist())
        assert model.evicted_pages >= len(known) - sum(sizes)
