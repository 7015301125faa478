"""Lookups of chains that decay, that a window cuts, that accept lossy pages: what comes up, and why no more does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from cache_world import (
    FP8,
    INT4C,
    PAGE_TOKENS,
    ROOT,
    Kind,
    SimWorker,
    World,
    chain_keys,
    chain_of,
    checksum_of,
    key_of,
    stored_page,
    tenant_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.node.state.records import Holdings, Limits
from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import Envelope, PageKey, RootKey, TierName
from kvtier.tier.protocol.events import Clear, Drain, Evict, FromWorker, Pin, Send, Unpin, Verify
from kvtier.tier.protocol.messages import LoadFailed, Locate, Located, NewRoot, Stored
from kvtier.tier.stats import TierCounters
from kvtier.tier.stores.base import Outcome

TENANT = "ada"
SIZES: dict[Kind, int] = {(0, FP8): 3 * 4096, (0, INT4C): 4096, (1, FP8): 2 * 4096}
FULL, DECAYED, OTHER_GROUP = SIZES
# Of 8 pages the first is a sink, the last 2 are recent; pages 1 to 5 decay.
DECAY: dict[str, Any] = {"variant": FP8, "decayed": INT4C, "recent": 2 * PAGE_TOKENS, "sinks": PAGE_TOKENS}
LOSSY: dict[str, Any] = {"variant": FP8, "decayed": INT4C, "recent": 1 << 30, "any_variant": True}
PATH = "abcdefgh"


def world_of(num_slots: int = 32, **more: Any) -> tuple[World, SimWorker]:
    world = World(num_slots, 64, payloads=SIZES, **more)
    return world, world.connect()


def put(world: World, worker: SimWorker, depths: str, kind: Kind, path: str = PATH) -> None:
    """Store some pages of a chain ("0123"), and let them sink."""
    for depth in map(int, depths):
        world.want(worker, 1, kind)
        world.finish_all()
        made_from = FP8 if kind == DECAYED else ""
        assert (
            world.store(worker, TENANT, path[: depth + 1], first=depth, kind=kind, made_from=made_from) == 1
        )
    world.finish_all()


def found(located: Located) -> list[tuple[int, str]]:
    """Page and format of what L3 serves at once."""
    return sorted((page.page[1], page.variant) for page in located.host)


def reason(located: Located) -> tuple[int, str]:
    assert located.missing is not None
    return located.missing.page, located.missing.reason


def test_each_page_comes_in_the_format_that_its_age_asks_for() -> None:
    world, worker = world_of()
    put(world, worker, "01234567", FULL)
    put(world, worker, "12345", DECAYED)

    located = world.locate(worker, "r", TENANT, PATH, chains=[chain_of(chain_keys(TENANT, PATH), **DECAY)])

    formats = [FP8, *[INT4C] * 5, FP8, FP8]
    assert found(located) == list(enumerate(formats)) and located.missing is None


def test_a_page_that_should_have_decayed_comes_as_it_was_written_where_it_must() -> None:
    world, worker = world_of()
    put(world, worker, "01234567", FULL)
    put(world, worker, "23", DECAYED)

    located = world.locate(worker, "r", TENANT, PATH, chains=[chain_of(chain_keys(TENANT, PATH), **DECAY)])

    assert located.missing is None
    assert found(located) == [(n, INT4C if n in (2, 3) else FP8) for n in range(8)]


def test_a_decayed_page_will_not_do_where_a_recent_one_is_wanted_and_the_prefix_shrinks() -> None:
    world, worker = world_of()
    put(world, worker, "01234", FULL)
    put(world, worker, "567", DECAYED)

    located = world.locate(worker, "r", TENANT, PATH, chains=[chain_of(chain_keys(TENANT, PATH), **DECAY)])

    # A prefix of 8 needs pages 6 and 7 as written, one of 6 needs 4 and 5; one of 5 has 3 and 4.
    assert located.pages == 5 and reason(located) == (5, "variant")
    assert located.missing is not None
    assert located.missing.detail == f"it is here, but not as {FP8}"


def test_pages_that_l1_has_are_neither_leased_nor_loaded() -> None:
    world, worker = world_of()
    put(world, worker, "01234567", FULL)
    # Page 1 lies in L1 as written and only wants converting, page 7 lies there decayed and won't do.
    held = bytes([1, 1, 2, 0, 0, 0, 1, 2])

    located = world.locate(
        worker, "r", TENANT, PATH, chains=[chain_of(chain_keys(TENANT, PATH), held=held, **DECAY)]
    )

    assert located.pages == 8 and found(located) == [(n, FP8) for n in (3, 4, 5, 7)]


def test_pages_outside_the_window_are_neither_leased_nor_loaded() -> None:
    world, worker = world_of()
    put(world, worker, "01234567", FULL)
    world.ask(Evict, tuple(chain_keys(TENANT, PATH)), TierName.HOST)
    chain = chain_of(chain_keys(TENANT, PATH), variant=FP8, window=2 * PAGE_TOKENS, window_sinks=4)

    located = world.locate(worker, "r", TENANT, PATH, chains=[chain], last_position=8 * PAGE_TOKENS)

    assert located.pages == 8 and located.missing is None
    # A row at position 128 attends the keys past 96, and those before 4.
    assert located.loading == [(0, 0), (0, 6), (0, 7)]
    assert len(world.reads) == 3
    world.settle()


def test_a_window_makes_do_without_what_left_it() -> None:
    world, worker = world_of()
    put(world, worker, "0567", FULL)
    plain = chain_of(chain_keys(TENANT, PATH), variant=FP8)
    windowed = chain_of(chain_keys(TENANT, PATH), variant=FP8, window=2 * PAGE_TOKENS, window_sinks=4)

    assert reason(world.locate(worker, "r1", TENANT, PATH, chains=[plain])) == (1, "never_stored")
    assert world.locate(worker, "r2", TENANT, PATH, chains=[windowed]).pages == 8


def test_all_layer_groups_must_have_what_they_need() -> None:
    world, worker = world_of()
    put(world, worker, "01234567", FULL)
    put(world, worker, "23456", OTHER_GROUP)
    chains = [
        chain_of(chain_keys(TENANT, PATH), variant=FP8),
        chain_of(chain_keys(TENANT, PATH, 1), variant=FP8, window=2 * PAGE_TOKENS),
    ]

    located = world.locate(worker, "r", TENANT, PATH, chains=chains)

    assert located.pages == 7 and reason(located) == (7, "never_stored")
    assert located.missing is not None and located.missing.detail.startswith("page 7 of layer group 1: ")
    first = [page.page[1] for page in located.host if page.page[0] == 0]
    second = [page.page[1] for page in located.host if page.page[0] == 1]
    assert first == list(range(7)) and second == [5, 6]


def test_a_lossy_request_takes_what_an_exact_one_misses_and_prefers_the_exact_page() -> None:
    world, worker = world_of()
    put(world, worker, "013", FULL)
    put(world, worker, "123", DECAYED)
    path, keys = PATH[:4], chain_keys(TENANT, PATH[:4])
    lossy_keys = chain_keys(
        TENANT, path, 2
    )  # of another root: what is computed behind lossy pages goes there

    exact = world.locate(worker, "r1", TENANT, path, chains=[chain_of(keys, variant=FP8)])
    lossy = world.locate(worker, "r2", TENANT, path, chains=[chain_of(lossy_keys, other_keys=keys, **LOSSY)])

    assert found(exact) == [(0, FP8), (1, FP8)] and reason(exact) == (2, "never_stored")
    assert found(lossy) == [(0, FP8), (1, FP8), (2, INT4C), (3, FP8)] and lossy.missing is None


def test_an_exact_request_says_that_only_a_lossy_page_is_here() -> None:
    world, worker = world_of()
    put(world, worker, "0", FULL)
    put(world, worker, "1", DECAYED)
    decaying = chain_of(chain_keys(TENANT, "ab"), **DECAY)

    located = world.locate(worker, "r", TENANT, "ab", chains=[decaying])

    assert reason(located) == (1, "variant")


def test_loads_cost_what_they_weigh_and_what_l3_has_of_another_format_does_instead() -> None:
    world, worker = world_of()
    put(world, worker, "0123", FULL)
    put(world, worker, "1", DECAYED)
    path, keys = PATH[:4], chain_keys(TENANT, PATH[:4])
    world.ask(Evict, (keys[1],), TierName.HOST)
    put(world, worker, "1", FULL)  # as written it is in L3, decayed in L4 only
    chain = chain_of(keys, variant=FP8, decayed=INT4C)

    cheap = world.locate(worker, "r1", TENANT, path, chains=[chain], recompute_s=1e-12)
    loading = world.locate(worker, "r2", TENANT, path, chains=[chain])

    # Nothing need be computed for want of the decayed page, so any load costs more than that.
    assert cheap.missing is None and (1, FP8) in found(cheap) and not cheap.loading
    assert loading.loading == [(0, 1)]
    world.settle()
    world.ask(Evict, tuple(keys[2:]), TierName.HOST)
    plain = chain_of(keys, variant=FP8)
    page_s = SIZES[FULL] * (
        1e-9 + world.node.in_flight.copy_time.byte_s
    )  # read, and copied to L1 behind that
    dear = world.locate(worker, "r3", TENANT, path, chains=[plain], recompute_s=0.99 * page_s)
    worth_it = world.locate(worker, "r3", TENANT, path, chains=[plain], recompute_s=1.01 * page_s)
    assert reason(dear) == (2, "costlier") and len(worth_it.loading) == 2
    world.settle()


def test_a_failed_load_ends_the_prefix_in_all_chains() -> None:
    world, worker = world_of()
    put(world, worker, "0123", FULL)
    put(world, worker, "0123", OTHER_GROUP)
    both = (*chain_keys(TENANT, "abcd"), *chain_keys(TENANT, "abcd", 1))
    world.ask(Evict, both, TierName.HOST)
    chains = [chain_of(chain_keys(TENANT, "abcd", group), variant=FP8) for group in (0, 1)]
    world.locate(worker, "r", TENANT, "abcd", chains=chains)
    worker.messages.clear()

    which = next(i for i, read in enumerate(world.reads) if read.key == key_of(TENANT, "ab"))
    world.finish_read("corrupt", which)

    (failed,) = [m for m in worker.messages if isinstance(m, LoadFailed)]
    assert (failed.missing.page, failed.missing.reason) == (1, "corrupt")
    assert worker.coming["r"] == {(0, 0), (1, 0)}
    world.settle()
    assert world.node.is_idle


def test_without_a_node_what_l1_has_still_makes_the_prefix() -> None:
    world = World(0, 0, payloads=SIZES)
    worker = world.connect()
    chain = chain_of(chain_keys(TENANT, PATH), variant=FP8, held=bytes([1, 1, 1, 0, 0, 0, 0, 0]))

    located = world.locate(worker, "r", TENANT, PATH, chains=[chain])

    assert located.pages == 3 and reason(located) == (3, "cache_off")


def test_a_worker_is_not_offered_formats_it_does_not_know() -> None:
    world, worker = world_of()
    put(world, worker, "01", FULL)
    put(world, worker, "1", DECAYED)
    other = world.connect("w1", payloads={FULL: SIZES[FULL]})
    chain = chain_of(chain_keys(TENANT, "ab"), variant=FP8, decayed=INT4C)

    assert found(world.locate(other, "r", TENANT, "ab", chains=[chain])) == [(0, FP8), (1, FP8)]


# ---- what goes to L4, and what is said of it ---------------------------------------------------------------------


def test_only_the_formats_of_l4_go_there_and_those_leave_l3_first() -> None:
    world, worker = world_of(8, ssd_variants=frozenset({INT4C}))
    put(world, worker, "01", FULL)
    put(world, worker, "01", DECAYED)
    keys = chain_keys(TENANT, "ab")

    assert world.held(TierName.SSD) == {(key, INT4C) for key in keys}
    here = world.held(TierName.HOST)
    for i in range(12):
        world.want(worker, 1, OTHER_GROUP)
        world.store(worker, TENANT, "x" * (i + 1), first=i, kind=OTHER_GROUP)
        before, here = here, world.held(TierName.HOST)
        if (keys[0], FP8) not in here:
            break
    assert not {(key, INT4C) for key in keys} & before, "what L4 has was to go first"
    assert all(variant == INT4C for _, variant in world.held(TierName.SSD))
    assert world.node.is_written


def test_a_page_says_what_it_was_made_from_also_after_a_restart() -> None:
    world, worker = world_of()
    put(world, worker, "1", FULL)
    put(world, worker, "1", DECAYED)
    said = {(i.tier, i.variant, i.made_from) for i in world.node.admin.pages(None, None, 9, world.now)}

    after = World(32, 64, payloads=SIZES, recovered=list(world.catalogue.values()), disk=world.disk)

    assert {(tier, FP8, "") for tier in (TierName.HOST, TierName.SSD)} <= said
    assert {(tier, INT4C, FP8) for tier in (TierName.HOST, TierName.SSD)} <= said
    again = {(i.tier, i.variant, i.made_from) for i in after.node.admin.pages(None, None, 9, after.now)}
    assert again == {(TierName.SSD, FP8, ""), (TierName.SSD, INT4C, FP8)}


def test_verbs_by_key_act_on_every_format_of_the_page() -> None:
    world, worker = world_of()
    put(world, worker, "0", FULL)
    put(world, worker, "0", DECAYED)
    key = key_of(TENANT, "a")

    def do(verb: type, *more: object) -> Outcome:
        ticket = world.ask(verb, (key,), *more)
        world.finish_all()
        return dict(world.answers[ticket])[key]

    assert do(Verify) is Outcome.ACCEPTED
    assert do(Pin) is Outcome.ACCEPTED
    assert all(info.pinned for info in world.node.admin.pages(None, None, 9, world.now))
    assert do(Evict, None) is Outcome.REJECTED
    assert do(Unpin) is Outcome.ACCEPTED
    assert do(Evict, TierName.HOST) is Outcome.ACCEPTED
    assert world.held(TierName.HOST) == set() and len(world.held(TierName.SSD)) == 2
    ticket = world.ask(Clear, tenant_of(TENANT))
    world.finish_all()
    assert world.answers[ticket] == ((key, Outcome.ACCEPTED),) * 2
    assert world.held(TierName.SSD) == set()


def test_a_chain_keeps_its_head_whatever_formats_its_pages_are_in() -> None:
    """A page behind it in another format makes a page an inner one: what stays can still be found."""
    world = World(4, 0, payloads=SIZES, host_segment_slots=1)
    worker = world.connect()
    for depth, kind in ((0, FULL), (1, DECAYED)):
        world.want(worker, 1, kind)
        world.store(worker, TENANT, "ab"[: depth + 1], first=depth, kind=kind)

    world.want(worker, 1, FULL)
    world.store(worker, TENANT, "x", kind=FULL)
    world.now += 1
    world.want(worker, 1, OTHER_GROUP)

    assert (key_of(TENANT, "a"), FP8) in world.held(TierName.HOST)


def test_a_page_computed_again_is_served_with_its_own_checksum() -> None:
    """Its bytes may differ from those of the copy in L4 that was computed in another batch."""
    world, worker = world_of()
    put(world, worker, "0", FULL)
    world.ask(Evict, (key_of(TENANT, "a"),), TierName.HOST)
    world.want(worker, 1, FULL)
    grant = worker.grants.pop()
    page = msgspec.structs.replace(stored_page(grant, TENANT, "a", kind=FULL), checksum=b"!" * 16)
    world.fill(grant, (page.key, FP8))
    heard = [
        command.message.host[0].checksum
        for event in (
            FromWorker(worker.ref, Stored([page])),
            FromWorker(
                worker.ref,
                Locate(
                    "r", ROOT, tenant_of(TENANT), PAGE_TOKENS, 0, 16, [chain_of([page.key], variant=FP8)], 0.0
                ),
            ),
        )
        for command in world.node.handle(event, world.now)
        if isinstance(command, Send) and isinstance(command.message, Located)
    ]

    assert heard == [b"!" * 16]
    assert next(iter(world.catalogue.values())).envelope.checksum == checksum_of(page.key, FP8)


def test_tiers_say_what_their_pages_would_take_unquantized() -> None:
    world, worker = world_of()
    put(world, worker, "012", FULL)
    put(world, worker, "1", DECAYED)
    world.ask(Evict, (key_of(TENANT, "a"),), TierName.HOST)

    tiers = world.node.snapshot().tiers

    held = 2 * SIZES[FULL] + SIZES[DECAYED]
    assert tiers[TierName.HOST].variants == {FP8: 2, INT4C: 1} and tiers[TierName.HOST].pages == 3
    assert (tiers[TierName.HOST].page_bytes, tiers[TierName.HOST].raw_bytes) == (held, 4 * SIZES[FULL])
    assert tiers[TierName.SSD].variants == {FP8: 3, INT4C: 1}
    assert tiers[TierName.SSD].page_bytes == held + SIZES[FULL]
    assert tiers[TierName.SSD].raw_bytes == 6 * SIZES[FULL], "three keys, one of them in two formats"
    after = World(32, 64, payloads=SIZES, recovered=list(world.catalogue.values()), disk=world.disk)
    before = after.node.snapshot().tiers[TierName.SSD]
    assert before.raw_bytes == 3 * SIZES[FULL]  # no worker has said yet
    after.connect()
    assert after.node.snapshot().tiers[TierName.SSD].raw_bytes == 6 * SIZES[FULL]


KINDS = [("bf16", b"a", 16), (FP8, b"b", 8), (INT4C, b"c", 5)]
RAW_BYTES = {b"a": 16, b"b": 16, b"c": 16}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KINDS)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_key_takes_raw_bytes_once_whatever_it_is_held_in(
    toggles: list[tuple[int, tuple[str, bytes, int]]],
) -> None:
    holdings, held, counters = Holdings(), set[tuple[int, tuple[str, bytes, int]]](), TierCounters()
    for page in toggles:
        key, kind = page
        variant, spec, nbytes = kind
        envelope = Envelope(
            PageKey(bytes([key]) * 32), variant, spec, nbytes, b"", RootKey(ROOT), ROOT, b"", 0, PAGE_TOKENS
        )
        others = frozenset(k for other, k in held if other == key and k != kind)
        (holdings.remove if page in held else holdings.add)(envelope, others)
        held ^= {page}

        holdings.describe(counters, RAW_BYTES)

        assert counters.raw_bytes == 16 * len({key for key, _ in held})
        assert counters.page_bytes == sum(nbytes for _, (_, _, nbytes) in held)
        assert counters.variants == Counter(variant for _, (variant, _, _) in held)
        assert counters.pages == len(held)


# ---- what a page was made from goes first ------------------------------------------------------------------

ALIKE: dict[Kind, int] = {FULL: 4096, DECAYED: 4096}  # one size: it alone decides nothing about who goes
EXACT: dict[str, Any] = {"variant": FP8}


def one_by_one(world: World, worker: SimWorker, pages: list[tuple[str, Kind]], *, sink: bool = True) -> None:
    """Store first pages of chains, each a second after the other."""
    for path, kind in pages:
        world.want(worker, 1, kind)
        made_from = FP8 if kind == DECAYED else ""
        assert world.store(worker, TENANT, path, kind=kind, made_from=made_from) == 1
        world.now += 1
        if sink:
            world.finish_all()


def use(world: World, worker: SimWorker, path: str) -> list[tuple[int, str]]:
    """A request reads an 8-bit page; what it got at once."""
    chain = chain_of(chain_keys(TENANT, path), **EXACT)
    got = found(world.locate(worker, "r", TENANT, path, chains=[chain]))
    world.settle()
    world.now += 1
    return got


def alike_world(num_slots: int, ssd_slots: int, **more: Any) -> tuple[World, SimWorker]:
    world = World(num_slots, ssd_slots, payloads=ALIKE, host_segment_slots=1, segment_slots=1, **more)
    return world, world.connect()


OLD, HERE, SMALL = (key_of(TENANT, "o"), FP8), (key_of(TENANT, "a"), FP8), (key_of(TENANT, "a"), INT4C)
THREE = [("o", FULL), ("a", FULL), ("a", DECAYED)]


def goes_first(tier: TierName, *, then: str = "", **more: Any) -> set[tuple[bytes, str]]:
    """Which of the THREE a tier with room for just them gives up for one page more, after a use of `then`."""
    world, worker = alike_world(*((4, 32) if tier is TierName.HOST else (16, 3)), **more)
    one_by_one(world, worker, THREE)
    if then:
        assert use(world, worker, then) == [(0, FP8)], "it is served while it is here"
    for n in range(2):
        before = world.held(tier)
        one_by_one(world, worker, [(f"{n}", FULL)])
        if gone := before - world.held(tier):
            return gone
    raise AssertionError("nothing went")


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.SSD])
def test_the_original_of_a_decayed_page_goes_before_all_that_are_older(tier: TierName) -> None:
    assert goes_first(tier) == {HERE}


@pytest.mark.parametrize("tier", [TierName.HOST, TierName.SSD])
def test_a_later_use_makes_an_original_a_page_like_any_other(tier: TierName) -> None:
    assert goes_first(tier, then="a") == {OLD}


def test_the_original_of_a_page_made_for_l4_alone_is_as_good_as_any() -> None:
    world, worker = alike_world(4, 32, ssd_variants=frozenset({INT4C}))
    one_by_one(world, worker, [("a", DECAYED), ("o", FULL), ("a", FULL), ("a", DECAYED)])
    for n in range(3):
        one_by_one(world, worker, [(f"{n}", FULL)])

    assert OLD not in world.held(TierName.HOST) and HERE in world.held(TierName.HOST)


def test_an_original_that_waits_for_l4_when_its_decayed_page_comes_is_not_written() -> None:
    world, worker = alike_world(16, 32, limits=Limits(writes=1))
    one_by_one(world, worker, THREE, sink=False)
    world.finish_all()

    assert world.held(TierName.SSD) == {OLD, SMALL} and HERE in world.held(TierName.HOST)
    world.tell(Drain())
    world.finish_all()
    assert world.held(TierName.SSD) == {OLD, SMALL}


def test_an_original_that_was_not_written_is_once_it_is_used() -> None:
    world, worker = alike_world(16, 32, limits=Limits(writes=1))
    one_by_one(world, worker, THREE, sink=False)
    world.finish_all()

    assert use(world, worker, "a") == [(0, FP8)]

    assert world.held(TierName.SSD) == {OLD, HERE, SMALL}


def test_an_original_that_a_request_holds_is_written() -> None:
    world, worker = alike_world(16, 32, limits=Limits(writes=1))
    one_by_one(world, worker, THREE[:1], sink=False)
    world.want(worker, 2, FULL)
    world.store(worker, TENANT, "a", kind=FULL, hold_for="r")
    one_by_one(world, worker, THREE[2:], sink=False)
    world.finish_all()

    assert world.held(TierName.SSD) == {OLD, HERE, SMALL}


def test_an_original_whose_decayed_page_is_lost_is_kept_like_any_other() -> None:
    world, worker = alike_world(16, 32, limits=Limits(writes=1))
    one_by_one(world, worker, THREE, sink=False)
    world.locate(worker, "r", TENANT, "a", chains=[chain_of([SMALL[0]], decayed=INT4C, **EXACT)])

    world.copied(worker, "r", [0], corrupt=[0])

    world.finish_all()
    assert world.held(TierName.SSD) == {OLD, HERE}


def test_an_original_that_is_pinned_stays() -> None:
    world, worker = alike_world(16, 32, limits=Limits(writes=1))
    one_by_one(world, worker, THREE[:2], sink=False)
    world.ask(Pin, (HERE[0],))
    one_by_one(world, worker, THREE[2:], sink=False)
    world.finish_all()

    assert world.held(TierName.SSD) == {OLD, HERE, SMALL}


@pytest.mark.parametrize(("used_after_s", "goes"), [(0.0, HERE), (10.0, OLD)], ids=["unused", "used since"])
def test_an_original_goes_first_also_after_a_restart_unless_it_was_used_later_than_what_was_made_of_it(
    used_after_s: float, goes: tuple[bytes, str]
) -> None:
    world, worker = alike_world(16, 3)
    one_by_one(world, worker, THREE)
    kept = []
    for page, entry in world.catalogue.items():
        used_s = entry.last_use_s + (used_after_s if page == HERE else 0.0)
        kept.append(replace(entry, last_use_s=used_s - world.now))  # the next start is later
    after = World(
        16, 3, payloads=ALIKE, host_segment_slots=1, segment_slots=1, recovered=kept, disk=world.disk
    )

    one_by_one(after, after.connect(), [("n", FULL)])

    assert {OLD, HERE, SMALL} - after.held(TierName.SSD) == {goes}


def test_further_roots_explain_misses_and_are_bounded() -> None:
    world = World(8, 8, limits=Limits(roots=3))
    worker = world.connect(fields={"weights": "w", "window": "0"})
    windowed = {"weights": "w", "window": "64"}
    world.say(worker, NewRoot(windowed))
    content = b"c" * 16
    world.want(worker, 1)
    world.store(worker, TENANT, "a", content=content, root=root_key({"weights": "w", "window": "0"}))

    located = world.locate(worker, "r", TENANT, "z", content=content, root=root_key(windowed))

    assert located.missing is not None and located.missing.reason == "identity_differs"
    assert located.missing.detail.endswith("window is '64', stored with '0'")
    assert root_key(windowed) in dict(world.saved_roots)
    for n in range(10):
        world.say(worker, NewRoot({"weights": str(n)}))
    assert len(world.saved_roots) == 3


def test_a_root_named_twice_is_saved_once() -> None:
    world = World(8, 8)
    worker = world.connect()
    world.say(worker, NewRoot({"window": "1"}))
    saved = world.saved_roots
    world.saved_roots = ()

    world.say(worker, NewRoot({"window": "1"}))

    assert world.saved_roots == () and len(saved) == 2
