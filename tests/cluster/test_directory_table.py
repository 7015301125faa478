"""The table of who holds which pages, against a dict of sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.directory import table as directory_table
from kvtier.cluster.directory.hash_table import Keys
from kvtier.cluster.directory.table import DirectoryTable, bits_of, leading

HOLDERS = st.integers(0, 70)
# Few enough to meet again; the multiples begin to look for their slots at the same one.
KEYS = st.lists(
    st.one_of(st.integers(0, 40), st.integers(1, 20).map(lambda n: n << 40), st.integers(0, 2**64 - 1))
)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "drop", "collect", "look"]), HOLDERS, KEYS), max_size=40
)


def array(keys: Iterable[int]) -> Keys:
    return np.array(list(keys), np.uint64)


@given(ACTIONS, st.sampled_from([1, directory_table.MOVED]))
@settings(max_examples=300, deadline=None)
def test_the_table_says_what_a_dict_of_sets_says(
    actions: list[tuple[str, int, list[int]]], moved: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            directory_table, "MOVED", moved
        )  # so few that pages lie in old and in new slots for long
        compare(actions)


def compare(actions: list[tuple[str, int, list[int]]]) -> None:
    table, model = DirectoryTable(min_slots=8), defaultdict[int, set[int]](set)
    asked: list[int] = []

    for action, holder, keys in actions:
        asked += keys
        match action:
            case "add":
                table.add(holder, array(keys))
                for key in keys:
                    model[key or 1].add(holder)
            case "remove":
                table.remove(holder, array(keys))
                for key in keys:
                    model[key or 1].discard(holder)
            case "drop":
                table.drop(1 << holder | 1 << 3)
                for holders in model.values():
                    holders -= {holder, 3}
            case "collect":
                table._collect()
        table.check()
        assert len(table) == sum(map(bool, model.values()))
        assert table.longest(array(keys)) == leading_of(model, keys)

    assert table.longest(array(asked)) == leading_of(model, asked)
    for key in asked:
        assert set(table.longest(array([key]))) == model[key or 1]


def leading_of(model: dict[int, set[int]], keys: list[int]) -> dict[int, int]:
    """How many of the first pages each holder has."""
    holders = set().union(*model.values())
    runs = {h: len(list(takewhile(lambda key: h in model[key or 1], keys))) for h in holders}  # noqa: B023
    return {holder: pages for holder, pages in runs.items() if pages}


def test_a_table_that_grows_and_is_emptied_again_finds_all_that_is_in_it() -> None:
    table = DirectoryTable()
    keys = np.random.default_rng(0).integers(1, 2**64 - 1, 50_000, np.uint64)

    for start in range(0, len(keys), 1000):
        table.add(start // 10_000, keys[start : start + 1000])
        table.check()
    assert len(table) == len(keys)
    assert table.longest(keys) == {0: 10_000}
    assert table.longest(keys[20_000:]) == {2: 10_000}
    grown = table.nbytes

    for holder in range(5):
        table.drop_holder(holder)
        table.check()
        assert len(table) == len(keys) - 10_000 * (holder + 1)
    for start in range(0, 4 * len(keys), 1000):  # slots of pages that left are used again
        some = np.random.default_rng([1, start]).integers(1, 2**64 - 1, 1000, np.uint64)
        table.add(1, some)
        table.remove(1, some)
    table.check()
    assert len(table) == 0 and table.nbytes < grown


def test_pages_beyond_the_bound_are_refused_and_counted() -> None:
    table = DirectoryTable(max_entries=100)
    keys = np.arange(1, 151, dtype=np.uint64)

    table.add(1, keys[:90])
    table.add(2, keys)
    table.check()

    assert len(table) == 100 and table.refused_pages == 50
    assert table.longest(keys) == {1: 90, 2: 100}
    table.remove(1, keys)
    table.remove(2, keys[:50])
    table.add(3, keys[110:])
    assert len(table) == 90 and table.refused_pages == 50


def test_sets_of_holders_beyond_the_bound_are_refused_until_others_are_free() -> None:
    table = DirectoryTable(max_sets=40)
    keys = np.arange(1, 101, dtype=np.uint64)

    for holder in range(100):  # page i is held by 0 to i: a hundred different sets
        table.add(holder, keys[holder:])
    table.check()
    assert table.num_sets <= 40 and table.refused_pages > 0

    for holder in range(100):
        table.drop_holder(holder)
    table.add(7, keys)
    table.check()
    assert table.longest(keys) == {7: 100}


def test_sets_that_no_page_has_any_more_make_room_for_others() -> None:
    table = DirectoryTable(max_sets=64)
    key = np.array([5], np.uint64)

    for holder in range(500):  # each time another set of two
        table.add(holder, key)
        table.remove(holder - 1, key) if holder else None
    table.check()

    assert table.refused_pages == 0 and table.longest(key) == {499: 1}


def test_sets_are_looked_through_for_unused_ones_only_now_and_then_when_all_are_in_use() -> None:
    """When none could be freed, every batch would go through the whole table in vain."""
    table = DirectoryTable(max_sets=16)
    keys = np.arange(1, 101, dtype=np.uint64)
    for holder in range(40):
        table.add(holder, keys[holder:])

    before = table._wait_for
    for holder in range(40):
        table.add(holder, keys[holder:])

    assert table._wait_for == before
    assert before <= directory_table.COLLECT_AGAIN + table.refused_pages


def test_a_prompt_of_many_runs_is_cut_where_the_first_page_is_nobodys() -> None:
    table = DirectoryTable()
    keys = np.random.default_rng(1).integers(1, 2**64 - 1, 2000, np.uint64)
    for end in range(100, 2001, 100):
        table.add(end // 100, keys[:end])
    table.remove(20, keys[:1])
    for holder in range(21):
        table.remove(holder, keys[1500:1501])

    runs = table.runs(keys)

    assert [end for _, end in runs] == [1, *range(100, 1501, 100)]
    assert table.longest(keys) == {h: min(100 * h, 1500) for h in range(1, 20)}


def test_bits_are_numbered_from_the_lowest() -> None:
    assert bits_of(1 << 200 | 1 << 3 | 1) == [0, 3, 200]
    assert leading([(0b111, 2), (0b011, 5), (0b100, 9)]) == {2: 2, 0: 5, 1: 5}
    assert leading([]) == {}
