"""Pooled sequences: windows, layer groups, decay and lossy formats, against a model that knows what each row attends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from l1_worlds import INT4C, INT8, RAW, drive, workload
from scheduler_kit import Machine, namespace_of

from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import ChainNeeds, Recipe, Window
from kvtier.workers.paging.frames import SaveState
from kvtier.workers.requests.api import FinishReason
from kvtier.workers.requests.sequence import Namespace


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_workload_ends_with_each_row_attending_what_its_recipe_and_window_say(seed: int) -> None:
    drive(workload(Random(seed)), meddle=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_people_do_meanwhile_no_frame_is_lost(seed: int) -> None:
    drive(workload(Random(seed)), meddle=True)


def machine(needs: ChainNeeds, capacity: int = 400, **changes: float) -> tuple[Machine, Namespace]:
    shape = {"page_tokens": 4, "max_batch_tokens": 16, "max_sequences": 4, **changes}
    sizes = {needs.recipe.write: 4, INT4C: 1}
    return Machine(capacity, rng=Random(0), pages=(sizes,), **shape), namespace_of("kind", (needs,))  # type: ignore[arg-type]


STREAM = ChainNeeds(Recipe(RAW), Window(8, 2))
DECAY = ChainNeeds(Recipe(INT8, INT4C, 4, 4, stride_tokens=8))


def test_a_stream_holds_its_sinks_and_its_window_however_long_it_gets() -> None:
    made, kind = machine(STREAM, has_node=False)
    made.submit("a", [1] * 40, 300, namespace=kind)

    made.run()

    chunk, window, sinks = 16 // 4, 8 // 4 + 1, 1
    assert made.most_held <= sinks + window + chunk
    assert made.table.dropped_pages > 70
    assert made.table.counts.total() <= sinks + window + chunk


def test_twenty_thousand_tokens_of_a_stream_cost_the_same_at_each_step() -> None:
    """Pages, and Python objects beside keys and tokens, that a late step touches are those of an early one."""
    made, kind = machine(STREAM, has_node=False)
    seq = made.submit("a", [1] * 8, 20_000, namespace=kind).sequences[0]
    lookups = []
    for _ in range(20_000):
        step = made.scheduler.schedule(made.now, can_load=False, free_slots={})
        made.table.take_ops()
        (row,) = step.rows
        made.scheduler.advance(row, made.now)
        seq.append(row.start % 50, made.now)
        lookups.append(
            (seq.num_held, len(made.table.frames.records), len(seq.groups[0].run(seq.num_pages).frames))
        )
        if seq.ends_with(60):
            break
    made.scheduler.finish(seq, made.now, FinishReason.LENGTH)

    assert seq.length == 20_008
    assert max(lookups[15_000:]) == max(lookups[1000:2000])
    made.scheduler.check()


def test_pages_that_left_a_stream_stay_until_they_are_saved() -> None:
    made, kind = machine(STREAM, has_node=True, slots=0)
    made.submit("a", [1] * 40, 1, namespace=kind)
    made.run()
    left = [record for record, is_held in made.table.cached() if record.leaves]
    assert left and all(record.is_spent and not made.table.frames.is_held(record.frame) for record in left)

    for record in left:
        assert made.table.saved(record, True, made.now) is False

    assert not any(made.table.is_cached(record) for record in left)


def test_what_a_request_with_the_same_prompt_starts_from_stays_in_l1() -> None:
    made, kind = machine(STREAM, has_node=False)
    made.submit("a", [1] * 30, 60, namespace=kind)
    made.run()
    again = made.submit("b", [1] * 30, 1, namespace=kind)

    made.run()

    assert again.usage is not None
    assert again.usage.cached_tokens["L1"] == 28
    assert made.table.counts.total() < 12


def test_a_stream_goes_on_from_where_an_earlier_one_ended() -> None:
    for length in range(30, 38):
        made, kind = machine(STREAM, has_node=False)
        made.submit("a", [1] * 30, length - 29, namespace=kind)
        made.run()
        turn = made.submit("b", [1] * 30 + made.outputs["a", 0] + [2] * 9, 1, namespace=kind)

        made.run()

        assert turn.usage is not None
        assert turn.usage.cached_tokens["L1"] == length // 4 * 4


def test_pages_are_converted_once_and_only_when_the_recipe_says() -> None:
    made, kind = machine(DECAY, has_node=False)
    made.submit("a", [1] * 40, 9, namespace=kind)
    made.run()

    pages = (47 // 8 * 8 - 4) // 4 - 1  # up to `recent` before the last boundary, without the sinks' page
    assert made.table.converted_pages == pages
    converted = [record for record, _ in made.table.cached() if record.made_from]
    assert {record.depth for record in converted} == set(range(1, 1 + pages))
    assert all(record.made_from == "int8" and record.format is INT4C for record in converted)

    made.submit("b", [1] * 40, 9, namespace=kind)
    made.run()

    assert made.table.converted_pages == pages


def formats_by_depth(made: Machine) -> dict[int, set[PageFormat]]:
    found: dict[int, set[PageFormat]] = {}
    for record, _ in made.table.cached():
        found.setdefault(record.depth, set()).add(record.format)
    return found


def test_a_page_that_was_converted_leaves_with_its_last_holder() -> None:
    made, kind = machine(DECAY, max_batch_tokens=64, has_node=False)
    made.submit("a", [1] * 47, 30, namespace=kind)
    made.submit("b", [1] * 47 + [2], 1, namespace=kind)

    made.run()

    found = formats_by_depth(made)
    start = (44 // 8 * 8 - 4) // 4  # from here on a request with the same prompt wants its pages as written
    assert all(found[depth] == {INT4C} for depth in range(1, start))
    assert all(found[depth] == {INT8, INT4C} for depth in range(start, 44 // 4))
    assert made.table.distinct == {0: len({record.key for record, _ in made.table.cached()})}
    assert made.table.dropped_pages >= start - 1


def test_a_page_that_was_converted_stays_until_it_is_saved() -> None:
    made, kind = machine(DECAY, has_node=True, slots=0)
    made.submit("a", [1] * 47, 30, namespace=kind)
    made.run()
    spent = [record for record, _ in made.table.cached() if record.is_spent]
    assert {record.depth for record in spent} == set(range(1, (75 // 8 * 8 - 4) // 4))

    for record in spent:
        assert made.table.saved(record, True, made.now) is False

    assert all(len(formats) == 1 for formats in formats_by_depth(made).values())
    made.scheduler.check()


def test_of_a_streams_pages_beyond_its_prompt_those_it_ends_with_are_saved() -> None:
    made, kind = machine(STREAM, has_node=True)
    made.submit("a", [1] * 24, 400, namespace=kind)
    made.run()
    while any(record.save is not SaveState.CLEAN for record, _ in made.table.cached()):
        made.end_saves(1.0)
    turn = made.submit("b", [1] * 24 + made.outputs["a", 0] + [2] * 9, 1, namespace=kind)
    made.clear(kind)

    made.run()

    assert turn.usage is not None
    assert turn.usage.cached_tokens["L3"] == 423 // 4 * 4
    assert len(made.node) <= 24 // 4 + 3 + 9 // 4 + 1


def test_a_page_that_a_prompt_starts_from_is_saved_though_another_stream_put_it_off() -> None:
    made, kind = machine(STREAM, has_node=True, slots=0)
    first = made.submit("a", [1] * 8, 400, namespace=kind).sequences[0]
    while first.length < 41:
        made.step()
    assert any(record.is_put_off for record, _ in made.table.cached())

    made.submit("b", first.tokens[:41].tolist(), 1, namespace=kind)
    made.step()

    assert not any(record.is_put_off for record, _ in made.table.cached() if record.depth < 40 // 4)


def test_a_page_that_was_converted_goes_before_all_others() -> None:
    made, kind = machine(DECAY, capacity=64, has_node=False)
    made.submit("a", [1] * 40, 9, namespace=kind)
    made.run()
    spent = [record for record, _ in made.table.cached() if record.is_spent]
    assert spent and all(record.format is INT8 for record in spent)
    kept = [record for record, _ in made.table.cached() if not record.is_spent]

    while made.table.evicted_pages < len(spent):
        assert made.table.take(0, INT8, 1, made.now)

    assert not any(made.table.is_cached(record) for record in spent)
    assert all(made.table.is_cached(record) for record in kept)


def test_a_sequence_whose_cached_pages_need_more_room_than_it_does_goes_on_without_them() -> None:
    """The same pages under a recipe that lets none decay fill L1; converting them needs room that only they take."""
    late = ChainNeeds(Recipe(INT8, INT4C, 1000, 0, stride_tokens=8))
    made, kind = machine(late, capacity=48, has_node=False)
    soon = namespace_of("kind", (DECAY,))
    made.submit("a", [1] * 48, 1, namespace=kind)
    made.run()
    again = made.submit("b", [1] * 48, 1, namespace=soon)

    made.run()

    assert again.usage is not None
    assert again.usage.computed_tokens == 48


def test_a_borrowed_frame_is_free_when_its_copy_ends() -> None:
    made, _ = machine(DECAY, has_node=False)
    frame = made.table.borrow(0, INT4C, 0.0)
    assert frame is not None
    assert made.table.used_bytes == 1
    assert made.table.limbo == 1

    made.table.end_copy(frame)

    assert made.table.used_bytes == made.table.limbo == 0
    made.scheduler.check()


def test_a_size_that_starves_gets_a_slab_whose_pages_move_and_nothing_is_evicted_for_it() -> None:
    made, _ = machine(ChainNeeds(Recipe(RAW)), capacity=160, has_node=False)  # 5 slabs of 8 raw pages
    for i in range(9):
        made.submit(str(i), [i] * 16, 1, use_cache=i % 2 == 0)
    made.run()
    cached = made.table.counts[0, RAW]
    assert 24 > cached > 16

    frames = [made.table.borrow(0, INT4C, made.now) for _ in range(60)]
    made.do(made.table.take_ops())

    assert None not in frames
    assert made.table.evicted_pages == 0
    for frame in frames:
        assert frame is not None
        made.table.end_copy(frame)
    again = made.submit("again", [0] * 16, 1)
    made.run()
    assert again.usage is not None
    assert again.usage.cached_tokens["L1"] == 15


def test_a_lossy_request_takes_the_lossy_page_and_an_exact_one_never_does() -> None:
    made, exact = machine(ChainNeeds(Recipe(RAW)))
    needs = (ChainNeeds(Recipe(RAW), any_variant=True),)
    lossy = namespace_of("lossy", needs, exact, INT4C)
    made.submit("a", [1] * 17, 1, namespace=exact)
    made.run()
    while len(made.node) < 4:
        made.end_saves(1.0)
    for (key, format), page in list(made.node.items()):
        del made.node[key, format]
        page.format = INT4C
        made.node[key, INT4C] = page
    made.clear(exact)

    taken = made.submit("b", [1] * 17, 1, namespace=lossy)
    made.run()
    other = made.submit("c", [1] * 17, 1, namespace=exact)
    made.run()

    assert other.usage is not None and taken.usage is not None
    assert other.usage.computed_tokens == 17
    assert taken.usage.cached_tokens["L3"] == 16
    assert made.table.counts[0, INT4C] == 4


def test_a_hybrid_loads_no_page_that_left_its_window() -> None:
    needs = (ChainNeeds(Recipe(RAW)), ChainNeeds(Recipe(RAW), Window(8)))
    kind = namespace_of("hybrid", needs)
    made = Machine(400, 4, 16, 4, Random(0), slots=100, pages=({RAW: 4}, {RAW: 2}))
    made.submit("a", [1] * 41, 1, namespace=kind)
    made.run()
    while len(made.node) < 20:
        made.end_saves(1.0)
    made.clear(kind)
    again = made.submit("b", [1] * 41, 1, namespace=kind)

    made.run()

    assert again.usage is not None
    assert again.usage.cached_tokens["L3"] == 40
    assert sorted(made.loaded_pages) == [*((0, page) for page in range(10)), (1, 8), (1, 9)]


def test_fill_counts_cached_and_own_pages() -> None:
    made, kind = machine(STREAM, has_node=False)
    made.submit("a", [1] * 14, 4, namespace=kind)
    made.step()

    pages, tokens = made.table.fill(made.scheduler.active)

    assert (pages, tokens) == (4, 14)


def test_a_request_that_fits_only_as_a_stream_is_taken_as_one() -> None:
    made, _ = machine(STREAM, capacity=40)
    made.scheduler.check_fits(1000, 1000, (STREAM,))

    with pytest.raises(
        ValueError, match="need 500 pages of 4 tokens at once, 2000 bytes; L1 has 40, cut in 4 parts"
    ):
        made.scheduler.check_fits(1000, 1001, (ChainNeeds(Recipe(RAW)),))


def test_a_pinned_page_keeps_those_before_it() -> None:
    made, kind = machine(STREAM, capacity=60, has_node=False)
    made.submit("a", [1] * 12, 1, namespace=kind)
    made.run()
    pages = sorted((record for record, _ in made.table.cached()), key=lambda record: record.depth)
    assert made.table.pin(pages[-1].key) is True
    assert made.table.is_pinned(pages[0].key)

    made.submit("b", [2] * 36, 1, use_cache=True, namespace=kind)
    made.run()

    assert all(made.table.is_cached(record) for record in pages)
    assert made.table.remove(pages[0].key, made.now) is False
    assert made.table.unpin(pages[-1].key, made.now) is True
    assert not made.table.has(pages[0].key)
    made.scheduler.check()
