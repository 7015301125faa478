"""What the directory believes of those who tell it, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.cluster.directory.core import FORGET_S, LEASE_S, MAX_HELD, DirectoryCore
from kvtier.cluster.directory.locations import Held
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import KEY_BYTES, Batch, Change, Source

L1, L2, L3, L4 = TierName.HBM, TierName.PEER, TierName.HOST, TierName.SSD
NODE = Source("node:n0", "life", "n0", "", "host:1")
OTHER = Source("node:n1", "life", "n1", "", "host:2")
WORKER = Source("worker:w0", "life", "n0", "w0", "host:1")


def keys(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(KEY_BYTES, "big") for n in numbers)


def came(tier: TierName, *numbers: int) -> Change:
    return Change(tier, keys(*numbers), b"")


def all_of(source: Source, *changes: Change, number: int = 0) -> Batch:
    """A snapshot in one batch."""
    return Batch(source, number, changes, opens=True, closes=True)


PROMPT = keys(*range(1, 11))


def test_a_prompt_is_found_at_each_that_has_its_first_pages() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, *range(1, 6))), 0.0)
    directory.publish(all_of(OTHER, came(L3, *range(3, 11))), 0.0)
    directory.publish(all_of(WORKER, came(L1, 1, 2, 4)), 0.0)

    assert directory.lookup(PROMPT, 1.0) == [
        Held("n0", "", L3, "host:1", 5),
        Held("n0", "", L4, "host:1", 5),
        Held("n0", "w0", L1, "host:1", 2),
    ]
    assert directory.lookup(keys(77), 1.0) == []
    assert directory.lookup(b"", 1.0) == []


def test_a_slower_tier_is_named_with_what_the_faster_ones_of_its_node_have_beside_it() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L4, 5, 6, 7), came(L3, 3, 4, 8), came(L2, 1, 2, 9)), 0.0)
    directory.publish(all_of(OTHER, came(L4, 10)), 0.0)

    found = directory.lookup(PROMPT, 0.0)

    assert {held.tier: held.pages for held in found} == {L2: 2, L3: 4, L4: 9}
    assert {held.node_id for held in found} == {"n0"}


def test_a_batch_that_is_missing_is_noticed_and_all_is_told_again() -> None:
    directory = DirectoryCore()
    assert directory.publish(Batch(NODE, 4, (came(L3, 1),)), 0.0) == "snapshot"  # nothing is known of it
    assert directory.lookup(PROMPT, 0.0) == []
    assert directory.publish(all_of(NODE, came(L3, 1), number=5), 0.0) == "ok"
    assert directory.publish(Batch(NODE, 6, (came(L3, 2),)), 0.0) == "ok"

    assert directory.publish(Batch(NODE, 8, (came(L3, 3),)), 0.0) == "snapshot"
    assert directory.publish(Batch(NODE, 9, (came(L3, 4),)), 0.0) == "snapshot"
    assert [held.pages for held in directory.lookup(PROMPT, 0.0) if held.tier is L3] == [2]  # still believed
    assert not directory.stats(0.0).holders[0].is_whole

    assert directory.publish(all_of(NODE, came(L3, 1, 2, 3), number=10), 0.0) == "ok"
    assert directory.publish(Batch(NODE, 11, ()), 0.0) == "ok"
    assert [held.pages for held in directory.lookup(PROMPT, 0.0) if held.tier is L3] == [3]
    assert directory.stats(0.0).snapshots_asked == 3


def test_a_batch_that_comes_twice_changes_nothing() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, 1)), 0.0)
    second, third = Batch(NODE, 1, (came(L3, 2),)), Batch(NODE, 2, (Change(L3, b"", keys(2)),))

    assert [directory.publish(batch, 0.0) for batch in (second, third, second, third)] == ["ok"] * 4

    assert {held.pages for held in directory.lookup(PROMPT, 0.0)} == {1}


def test_until_a_snapshot_ends_what_was_known_before_is_believed_too() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, 1, 2, 3)), 0.0)

    directory.publish(Batch(NODE, 1, (came(L3, 1),), opens=True), 0.0)
    assert {held.pages for held in directory.lookup(PROMPT, 0.0)} == {3}
    directory.publish(Batch(NODE, 2, (came(L3, 2), Change(L3, b"", keys(1)))), 0.0)
    assert directory.lookup(PROMPT, 0.0) == []  # what left, left
    directory.publish(Batch(NODE, 3, (came(L3, 1),)), 0.0)
    directory.publish(Batch(NODE, 4, (), closes=True), 0.0)
    directory.check()

    assert {held.pages for held in directory.lookup(PROMPT, 0.0)} == {2}
    assert directory.lookup(keys(3), 0.0) == []


def test_a_snapshot_that_begins_again_leaves_nothing_of_the_one_before() -> None:
    directory = DirectoryCore()
    directory.publish(Batch(NODE, 0, (came(L3, 1, 9),), opens=True), 0.0)

    directory.publish(Batch(NODE, 1, (came(L3, 1),), opens=True), 0.0)
    directory.publish(Batch(NODE, 2, (), closes=True), 0.0)
    directory.check()

    assert directory.lookup(keys(9), 0.0) == [] and len(directory.lookup(keys(1), 0.0)) == 2


def test_a_new_life_has_nothing_of_the_old_one() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(WORKER, came(L1, 1, 2)), 0.0)
    reborn = replace(WORKER, incarnation="next life")

    assert directory.publish(Batch(reborn, 0, (came(L1, 3),)), 1.0) == "snapshot"
    directory.publish(Batch(reborn, 1, (came(L1, 1),), opens=True), 1.0)
    directory.check()

    assert [held.pages for held in directory.lookup(PROMPT, 1.0)] == [1]
    assert directory.publish(Batch(WORKER, 1, ()), 1.0) == "snapshot"  # the old one, late
    assert directory.publish(Batch(reborn, 2, (), closes=True), 1.0) == "ok"


def test_who_is_not_heard_of_is_not_named_and_then_forgotten() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, 1)), 0.0)
    directory.publish(all_of(OTHER, came(L3, 1)), 0.0)

    directory.publish(Batch(OTHER, 1, ()), LEASE_S)
    assert {held.node_id for held in directory.lookup(PROMPT, LEASE_S)} == {"n0", "n1"}
    assert {held.node_id for held in directory.lookup(PROMPT, LEASE_S + 0.1)} == {"n1"}
    directory.publish(Batch(NODE, 1, ()), LEASE_S + 5)  # it was only slow
    assert {held.node_id for held in directory.lookup(PROMPT, LEASE_S + 5)} == {"n0", "n1"}

    late = LEASE_S + 5 + FORGET_S
    directory.publish(Batch(OTHER, 2, ()), late - 6)
    directory.publish(Batch(OTHER, 3, ()), late + 0.1)
    directory.check()
    stats = directory.stats(late + 0.1)
    assert [holder.name for holder in stats.holders] == ["node:n1"] and stats.entries == 1
    assert directory.publish(Batch(NODE, 2, ()), late + 1) == "snapshot"


def test_numbers_of_holders_are_used_again() -> None:
    directory = DirectoryCore()
    for life in range(100):
        directory.publish(all_of(replace(NODE, incarnation=str(life)), came(L3, life)), 0.0)
        directory.check()

    assert directory._next_block <= 3
    assert directory.stats(0.0).entries == 1


def test_what_a_node_says_it_lacks_is_forgotten() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, 1, 2, 3), came(L4, 1, 2, 3)), 0.0)
    directory.publish(all_of(OTHER, came(L3, 1, 2, 3)), 0.0)
    directory.publish(all_of(WORKER, came(L1, 1, 2, 3)), 0.0)

    directory.wrong("n0", L3, keys(2))
    pages = {(held.node_id, held.tier): held.pages for held in directory.lookup(PROMPT, 0.0)}
    assert pages == {("n0", L3): 1, ("n0", L4): 3, ("n1", L3): 3, ("n1", L4): 3, ("n0", L1): 3}

    directory.wrong("n0", None, keys(1))
    assert {(held.node_id, held.worker_id) for held in directory.lookup(PROMPT, 0.0)} == {
        ("n1", ""),
        ("n0", "w0"),
    }
    assert directory.stats(0.0).wrong_pages == 2


def test_a_full_directory_takes_no_more_sources_and_counts_what_it_refuses() -> None:
    directory = DirectoryCore(max_entries=3, max_sources=1)

    assert directory.publish(all_of(NODE, came(L3, 1, 2, 3, 4)), 0.0) == "ok"
    assert directory.publish(all_of(OTHER, came(L3, 1)), 0.0) == "ok"
    assert directory.publish(Batch(OTHER, 1, (came(L3, 2),)), 0.0) == "ok"

    stats = directory.stats(0.0)
    assert (stats.entries, stats.refused_pages, stats.refused_batches) == (3, 1, 2)
    assert {held.node_id for held in directory.lookup(PROMPT, 0.0)} == {"n0"}
    directory.publish(Batch(OTHER, 2, ()), FORGET_S + 1)
    assert directory.publish(Batch(OTHER, 3, ()), FORGET_S + 1) == "snapshot"  # there is room now


def test_an_answer_names_those_with_the_longest_prefixes() -> None:
    directory = DirectoryCore()
    for i in range(MAX_HELD + 40):
        worker = replace(WORKER, name=f"worker:{i}", worker_id=str(i))
        directory.publish(all_of(worker, came(L1, *range(1, 2 + i % 5))), 0.0)

    found = directory.lookup(PROMPT, 0.0)

    assert len(found) == MAX_HELD
    assert [held.pages for held in found] == sorted((held.pages for held in found), reverse=True)


def test_keys_of_a_wrong_length_and_unknown_tiers_are_refused_whole() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE), 0.0)

    with pytest.raises(ValueError, match="8 bytes each.*got 9 bytes"):
        directory.lookup(bytes(9), 0.0)
    with pytest.raises(ValueError, match="got 7"):
        directory.publish(Batch(NODE, 1, (came(L3, 1), Change(L3, bytes(7), b""))), 0.0)
    with pytest.raises(ValueError, match="tier remote"):
        directory.publish(Batch(NODE, 1, (came(L3, 1), came(TierName.REMOTE, 1))), 0.0)

    assert directory.stats(0.0).entries == 0
    assert directory.publish(Batch(NODE, 1, ()), 0.0) == "ok"


def test_a_new_life_that_has_told_nothing_yet_keeps_no_page_of_the_old_one() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, 1)), 0.0)
    new = replace(NODE, incarnation="its next life")

    assert directory.publish(Batch(new, 7, ()), LEASE_S) == "snapshot"

    assert directory.lookup(PROMPT, LEASE_S + 1.0) == []


def test_a_new_life_is_forgotten_no_earlier_and_others_no_later_than_by_their_last_word() -> None:
    directory = DirectoryCore()
    directory.publish(all_of(NODE, came(L3, 1)), 0.0)
    directory.publish(all_of(OTHER, came(L3, 2)), 1.0)
    directory.publish(all_of(replace(NODE, incarnation="its next life"), came(L3, 1)), 30.0)

    directory.lookup(PROMPT, 1.0 + FORGET_S + 1.0)

    assert [holder.node_id for holder in directory.stats(62.0).holders] == [NODE.node_id]
    directory.check()
