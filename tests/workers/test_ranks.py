"""Which pages leave L1: tenants' shares, pages set aside, and what is remembered of those that left."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import Strict

from kvtier.tier.pages.page import PageFormat, PageKey, RootKey
from kvtier.tier.policy.base import Lru, Use, Victim
from kvtier.workers.paging.frames import PageRecord, SaveState
from kvtier.workers.paging.ghosts import Ghost, Ghosts
from kvtier.workers.paging.page_cache import PageCache
from kvtier.workers.paging.page_pool import PagePool
from kvtier.workers.paging.ranks import Leaves, Ranks

RAW = PageFormat.FP32
TENANTS = [b"a" * 16, b"b" * 16, b"c" * 16]
SHARES = {TENANTS[0]: 0.3, TENANTS[1]: 0.5}
CAPACITY = 10


def key(i: int) -> PageKey:
    return PageKey(i.to_bytes(32, "big"))


def record(i: int, tenant: bytes, frame: int) -> PageRecord:
    root = RootKey(b"r" * 32)
    return PageRecord(
        *(frame, 0, RAW, 1, key(i), b"", root, root, root, tenant, b"", 0, SaveState.DIRTY),
        is_pooled=True,
    )


def fill(cache: PageCache, i: int, tenant: bytes, now: float) -> PageRecord | None:
    """Cache a page of a tenant's, used once and let go."""
    frames = cache.take(0, RAW, 1, now)
    if not frames:
        return None
    page = record(i, tenant, frames[0])
    cache.cache_in_pool(page, 1, now)
    cache.release_pooled([page], Use(1, 1), now)
    cache.drop(page.frame, now)
    return page


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_while_a_tenant_is_over_its_share_only_its_own_pages_leave(steps: list[tuple[int, bool]]) -> None:
    """Some pages are held for good: then even a tenant over its share has nothing to give."""
    policy = Strict()
    cache = PageCache(CAPACITY, 1, 1, ({RAW: 1},), policy, SHARES)
    here: list[PageRecord] = []
    held: set[PageKey] = set()
    for now, (who, is_held) in enumerate(steps):
        of = {t: [page for page in here if page.tenant == t] for t in TENANTS}
        over = [t for t in SHARES if len(of[t]) > SHARES[t] * CAPACITY and {p.key for p in of[t]} - held]

        page = fill(cache, now, TENANTS[who], float(now))

        left = [page for page in here if not cache.is_cached(page)]
        here = [page for page in here if cache.is_cached(page)]
        if over:
            assert all(page.tenant in over for page in left)
        elif left:
            oldest = min((p for p in [*here, *left] if p.key not in held), key=lambda page: page.last_use_s)
            assert left == [oldest]
        if page is not None:
            here.append(page)
            if is_held and len(held) < CAPACITY - 1:
                cache.hold(page)
                held.add(page.key)
    for page in here:
        assert cache.is_cached(page)


def test_what_is_set_aside_leaves_before_all_others_unless_it_is_used() -> None:
    policy = Lru()
    rows = [policy.add(2, 0, 1, 1, float(i)) for i in range(3)]
    leaves = Leaves(policy.candidates())
    for row in rows:
        leaves.add(row)

    leaves.choose_to_evict(Victim(rows[0], 1), 5)
    leaves.choose_to_evict(Victim(rows[1], 2), 10)

    assert [*leaves.aside()] == [(rows[0], 1), (rows[1], 2)]
    assert leaves.victims(9, 3.0) == [(rows[2], 2)]
    assert len(leaves) == 3 and all(row in leaves for row in rows)
    leaves.discard(rows[0])
    assert (leaves.aside_bytes, rows[0] in leaves) == (10, False)


def test_what_is_set_aside_of_a_run_in_part_is_known_until_it_is_used_or_all_of_it_is() -> None:
    policy = Lru()
    rows = [policy.add(3, 0, 1, 1, 0.0) for _ in range(2)]
    leaves = Leaves(policy.candidates())
    for row in rows:
        leaves.add(row)
        leaves.choose_to_evict(Victim(row, 1), 5, is_all=False)

    assert [*leaves.partly_aside()] == [(rows[0], 1), (rows[1], 1)]
    leaves.choose_to_evict(Victim(rows[0], 3), 15, is_all=True)
    assert [*leaves.partly_aside()] == [(rows[1], 1)]
    leaves.discard(rows[1])
    assert [*leaves.partly_aside()] == []
    assert leaves.aside_bytes == 15


def test_a_margin_takes_what_the_policy_values_least_and_more_of_a_run_where_nothing_else_is_left() -> None:
    cache = PageCache(8, 1, 1, ({RAW: 1},))
    cache.watermark_bytes = 3
    cache.can_save = True
    pages = [fill(cache, i, TENANTS[2], float(i)) for i in range(8)]

    chosen = cache.choose_to_evict(8.0)

    assert chosen == pages[:3]
    assert cache.choose_to_evict(9.0) == []
    assert pages[1] is not None and pages[0] is not None
    pages[1].save = SaveState.CLEAN
    assert len(cache.take(0, RAW, 1, 10.0)) == 1
    assert not cache.is_cached(pages[1]), "the clean one goes first"
    assert len(cache.take(0, RAW, 1, 11.0)) == 1
    assert not cache.is_cached(pages[0])


def test_of_a_tenant_over_its_share_pages_are_set_aside_whatever_is_of_others() -> None:
    cache = PageCache(CAPACITY, 1, 1, ({RAW: 1},), shares={TENANTS[0]: 0.2})
    cache.watermark_bytes = 3
    cache.can_save = True
    others = [fill(cache, i, TENANTS[2], float(i)) for i in range(9)]
    own = [fill(cache, 10 + i, TENANTS[0], 10.0 + i) for i in range(2)]
    assert cache.choose_to_evict(12.0) == others[1:4]

    own.append(fill(cache, 12, TENANTS[0], 12.0))

    assert cache.choose_to_evict(13.0) == own
    assert cache.choose_to_evict(13.0) == []


def test_a_large_margin_is_made_whole_many_pages_at_once() -> None:
    cache = PageCache(64, 1, 1, ({RAW: 1},))
    cache.watermark_bytes = 32
    cache.can_save = True
    for i in range(36):
        fill(cache, i, TENANTS[2], float(i))
    assert not cache.is_below_watermark
    fill(cache, 36, TENANTS[2], 36.0)

    assert cache.is_below_watermark
    assert len(cache.choose_to_evict(37.0)) == 5
    assert not cache.is_below_watermark


def test_where_copies_below_are_lost_pages_that_were_set_aside_are_chosen_again() -> None:
    cache = PageCache(8, 1, 1, ({RAW: 1},))
    cache.watermark_bytes = 3
    cache.can_save = True
    pages = [fill(cache, i, TENANTS[2], float(i)) for i in range(8)]
    chosen = cache.choose_to_evict(8.0)
    for page in chosen:
        page.save = SaveState.CLEAN
    assert cache.choose_to_evict(9.0) == []

    cache.node_came(can_save=True)

    assert cache.choose_to_evict(10.0) == chosen == pages[:3]


def test_evicted_pages_are_remembered_up_to_a_bound_and_come_back_with_their_rows() -> None:
    policy = Strict()
    ghosts = Ghosts(policy, 2)
    rows = [policy.add(1, i, 1, 1, 0.0) for i in range(3)]
    policy.release(rows, [0, 0, 0], Use(0, 0), 1.0)
    for i, row in enumerate(rows):
        ghosts.push(key(i), Ghost(row, 4, 2.0, 1.0))

    assert (len(ghosts), key(0) in ghosts) == (2, False)
    assert [*policy.in_use] == rows[1:]
    told = ghosts.explain([key(9), key(1), key(2)], first=4)
    assert [(s.start, s.end, s.text) for s in told] == [(5, 7, "lru, score = idle 1.0 s")]
    ghosts.begin([key(1)], 3.0)
    assert policy.in_use == {rows[1]: True, rows[2]: False}
    assert ghosts.revive_all([key(9), key(8), key(1), key(2)], 4, 3.0) == [
        (None, 2),
        (rows[1], 1),
        (rows[2], 1),
    ]
    assert all(policy.in_use.values())


def test_a_page_that_comes_back_in_another_size_begins_again() -> None:
    policy = Strict()
    ghosts = Ghosts(policy, 2)
    row = policy.add(1, 0, 1, 1, 0.0)
    ghosts.push(key(0), Ghost(row, 4, 2.0, 1.0, in_use=True))

    assert ghosts.pop(key(0), 2, 3.0) is None
    assert len(ghosts) == 0 and not policy.in_use


def test_pages_of_the_pool_are_released_once_however_many_hold_them() -> None:
    policy = Strict()
    ranks = Ranks(policy, {}, 1)
    pool = PagePool(policy, ranks)
    page = record(0, TENANTS[0], 0)
    page.row = policy.add(1, 0, 1, 1, 0.0)
    pool.add(page)

    pool.release([page], Use(1, 1), 1.0)
    assert not policy.in_use[page.row]
    pool.begin([page], 2.0)
    pool.begin([page], 2.0)
    assert policy.in_use[page.row]
