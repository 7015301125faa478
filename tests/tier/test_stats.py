"""How owners' counters add up while owners come, go, and restart."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.pages.page import TierName
from kvtier.tier.stats import Ledger, RequestTotals, Snapshot, TierCounters, has_restarted, lasting

HELD = {
    "capacity_bytes",
    "used_bytes",
    "pages",
    "page_bytes",
    "raw_bytes",
    "used_page_tokens",
    "held_page_tokens",
}


def a_snapshot(scale: int) -> Snapshot:
    """Counters that grow with `scale` and keep the law; what is held doesn't grow."""
    counted = (10 * scale, 4 * scale, scale, scale, scale, scale, scale, scale)
    tier = TierCounters(
        100, 40, 4, *counted, page_bytes=30, raw_bytes=60, variants={"fp8_e4m3": 3, "int4c": 1}
    )
    tier.loads_s.append(0.5)
    totals = RequestTotals(
        scale, 10 * scale, 6 * scale, 4 * scale, scale, scale, used_page_tokens=30, held_page_tokens=40
    )
    return Snapshot({TierName.HBM: tier}, totals)


def counts(snapshot: Snapshot) -> dict[str, int]:
    """Every counter, by its name."""
    parts = [*((name.value, tier) for name, tier in snapshot.tiers.items()), ("totals", snapshot.totals)]
    return {
        f"{where} {f.name}": getattr(part, f.name)
        for where, part in parts
        for f in fields(part)
        if f.name not in HELD | {"loads_s", "variants"}
    }


def test_what_lasts_is_what_was_counted_and_not_what_is_held() -> None:
    before = a_snapshot(3)

    kept = lasting(before)

    assert counts(kept) == counts(before)
    for part in (kept.tiers[TierName.HBM], kept.totals):
        assert all(getattr(part, f.name) == 0 for f in fields(part) if f.name in HELD)
    assert not kept.tiers[TierName.HBM].loads_s and not kept.tiers[TierName.HBM].variants
    assert before.tiers[TierName.HBM].capacity_bytes == 100
    assert len(before.tiers[TierName.HBM].loads_s) == 1


def test_an_owner_has_restarted_when_any_counter_fell_and_not_when_it_holds_less() -> None:
    before = a_snapshot(3)
    emptied = a_snapshot(3)
    emptied.tiers[TierName.HBM] = replace(emptied.tiers[TierName.HBM], used_bytes=0, pages=0, variants={})
    one_fell = a_snapshot(9)
    one_fell.tiers[TierName.HBM] = replace(one_fell.tiers[TierName.HBM], corrupt_pages=2)

    assert not has_restarted(before, before)
    assert not has_restarted(before, emptied)
    assert not has_restarted(Snapshot(), before)
    assert has_restarted(before, one_fell)
    assert has_restarted(before, a_snapshot(0))
    assert has_restarted(before, Snapshot())


def test_policies_that_differ_are_all_named_and_none_is_left_of_an_owner_that_is_gone() -> None:
    ledger = Ledger()
    for owner, policy in (("w0", "rvi"), ("w1", "rvi, lru for now"), ("w2", "rvi")):
        ledger.record(owner, Snapshot({TierName.HBM: TierCounters(policy=policy, fallbacks=2)}))

    all_three = ledger.total().tiers[TierName.HBM]
    ledger.lose("w1")
    without = ledger.total().tiers[TierName.HBM]

    assert (all_three.policy, all_three.fallbacks) == ("rvi; rvi, lru for now", 6)
    assert (without.policy, without.fallbacks) == ("rvi", 6)


OWNERS = ("w0", "w1", "n0")


@given(
    st.lists(
        st.tuples(st.sampled_from(OWNERS), st.sampled_from(["count", "restart", "lose"]), st.integers(0, 5))
    )
)
def test_no_counter_of_the_sum_falls_and_only_the_living_hold(steps: list[tuple[str, str, int]]) -> None:
    ledger = Ledger()
    scales: dict[str, int] = {}
    before = counts(ledger.total())

    for owner, step, number in steps:
        if step == "lose":
            scales.pop(owner, None)
            ledger.lose(owner)
        else:
            scales[owner] = number + (scales.get(owner, 0) if step == "count" else 0)
            ledger.record(owner, a_snapshot(scales[owner]))
        total = ledger.total()
        now = counts(total)
        assert all(now[name] >= value for name, value in before.items())
        assert now["L1 hit_tokens"] + now["totals computed_tokens"] == now["totals prompt_tokens"]
        assert total.tiers[TierName.HBM].capacity_bytes == 100 * len(scales)
        assert total.tiers[TierName.HBM].raw_bytes == 60 * len(scales)
        assert total.tiers[TierName.HBM].variants.get("int4c", 0) == len(scales)
        assert total.totals.held_page_tokens == 40 * len(scales)
        before = now


def test_an_owner_that_starts_again_goes_on_from_its_old_counts() -> None:
    ledger = Ledger()

    for scale in (5, 0, 2, 3):
        ledger.record("n0", a_snapshot(scale))

    assert ledger.total().totals.requests == 8
