"""Request traces: every form gives the same requests, what is broken is named, and pages are numbered right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.lab.traces.formats import MAX_PAGES, TraceError
from kvtier.lab.traces.pages import Runs, concatenated, number_pages
from kvtier.lab.traces.trace import Source, Trace, read_trace
from kvtier.tier.policy.base import Kind

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 3052, "input_length": 600, "output_length": 7, "hash_ids": [46, 90]},
    {"timestamp": 3052.5, "input_length": 2048, "output_length": 1, "hash_ids": [46, 47, 91, 92]},
]
OURS = [
    {"trace": "own", "block": 512, "license": "Apache-2.0"},
    {"t": 0.0, "s": -1, "i": 1100, "o": 52, "h": [46, 3]},
    {"t": 3.052, "s": -1, "i": 600, "o": 7, "h": [46, 1, 90, 1]},
    {"t": 3.0525, "s": -1, "i": 2048, "o": 1, "h": [46, 2, 91, 2]},
]
BAILIAN = [
    {"chat_id": 7, "parent_chat_id": -1, "type": "text", "turn": 1, "hash_ids": [5, 6]},
    {"chat_id": 8, "parent_chat_id": -1, "type": "search", "turn": 1, "hash_ids": [5, 9]},
    {"chat_id": 9, "parent_chat_id": 7, "type": "text", "turn": 2, "hash_ids": [5, 6, 10]},
    {"chat_id": 20, "parent_chat_id": 9, "type": "text", "turn": 3, "hash_ids": [5, 6, 10, 11]},
    {"chat_id": 21, "parent_chat_id": 3, "type": "text", "turn": 4, "hash_ids": [30]},
    {"chat_id": 22, "parent_chat_id": 3, "type": "text", "turn": 4, "hash_ids": [30, 31]},
]
TIMES = {"timestamp": 61.5, "input_length": 40, "output_length": 3}


def lines(rows: Iterable[dict[str, Any] | str | bytes]) -> list[bytes]:
    """Rows as the lines of a file."""
    encoded = (row if isinstance(row, str | bytes) else json.dumps(row) for row in rows)
    return [row if isinstance(row, bytes) else row.encode() + b"\n" for row in encoded]


def read(*files: Sequence[dict[str, Any] | str | bytes], **options: Any) -> Trace:
    """Files called a, b, ... as one trace."""
    return read_trace([Source("abcd"[at], lines(rows)) for at, rows in enumerate(files)], **options)


def pages(trace: Trace) -> list[list[int]]:
    """Page ids of all requests."""
    return [trace.pages(request).tolist() for request in range(len(trace))]


def test_mooncake_lines_are_requests_of_512_token_pages() -> None:
    trace = read(MOONCAKE)

    assert trace.page_tokens == 512
    assert trace.arrival_s.tolist() == [0, 3.052, 3.0525]
    assert pages(trace) == [[0, 1, 2], [0, 3], [0, 1, 4, 5]]
    assert trace.input_tokens.tolist() == [1100, 600, 2048]
    assert trace.output_tokens.tolist() == [52, 7, 1]
    assert (trace.references, trace.distinct_pages, trace.span_s) == (9, 6, 3.0525)
    assert trace.page_counts().tolist() == [3, 2, 4]
    assert not trace.session.any() and not trace.kind.any() and not trace.turn.any()


def test_our_form_gives_what_mooncakes_gives() -> None:
    ours, theirs = read(OURS), read(MOONCAKE)

    assert pages(ours) == pages(theirs)
    assert ours.arrival_s.tolist() == theirs.arrival_s.tolist()
    assert ours.input_tokens.tolist() == theirs.input_tokens.tolist()


def test_bailian_chats_that_hang_together_are_one_session() -> None:
    trace = read([{**row, **TIMES} for row in BAILIAN])

    assert trace.page_tokens == 16
    assert trace.session.tolist() == [1, 2, 1, 1, 3, 3]
    assert trace.turn.tolist() == [1, 1, 2, 3, 4, 4]
    assert trace.arrival_s.tolist() == 6 * [61.5]
    assert pages(trace) == [[0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [5], [5, 6]]
    assert trace.session_ends().tolist() == [False, True, False, True, False, True]


def test_why_an_answer_ended_and_its_session_reach_the_policy() -> None:
    reasons = [{"f": "tool_use"}, {"f": "end_turn"}, {"f": "max_tokens"}, {}, {"f": None}]
    rows = [{"t": 1, "s": 0, "i": 1, "o": 9, "h": [0, 1], "turn": 2, **reason} for reason in reasons]

    trace = read([{"block": 64}, *rows])

    uses = [trace.use(request, 1) for request in range(5)]
    assert [use.kind for use in uses] == [Kind.TOOL, Kind.TURN, Kind.OTHER, Kind.UNKNOWN, Kind.UNKNOWN]
    assert {(use.pages, use.output_tokens, use.turn, use.session, use.closed) for use in uses} == {
        (1, 9, 2, 1, False)
    }
    assert trace.use(0, 1, closed=True).closed


def test_requests_without_a_session_end_none() -> None:
    rows = [{"t": at, "s": session, "i": 1, "h": [0, 1]} for at, session in enumerate((-1, 4, -1, 4, 0))]

    assert read([{"block": 64}, *rows]).session_ends().tolist() == [False, False, False, True, True]


def test_files_are_merged_by_time_and_share_neither_pages_nor_sessions() -> None:
    first = [{"block": 512}, {"t": 1, "s": 0, "i": 1, "h": [0, 2]}, {"t": 9, "s": 1, "i": 1, "h": [0, 1]}]
    second = [{"block": 512}, {"t": 5, "s": 0, "i": 1, "h": [0, 2]}]

    trace = read(first, second)

    assert trace.arrival_s.tolist() == [1, 5, 9]
    assert trace.session.tolist() == [1, 3, 2]
    assert pages(trace) == [[0, 1], [2, 3], [0]]


def test_files_of_one_trace_that_were_put_together_share_both() -> None:
    part = [{"block": 512}, {"t": 1, "s": 0, "i": 1, "h": [0, 2]}]

    trace = read([*part, *part])

    assert pages(trace) == [[0, 1], [0, 1]]
    assert trace.session.tolist() == [1, 1]


def test_lines_out_of_order_are_put_in_order_of_time() -> None:
    trace = read([MOONCAKE[2], MOONCAKE[0], MOONCAKE[1]])

    assert trace.arrival_s.tolist() == [0, 3.052, 3.0525]
    assert pages(trace) == [[0, 1, 2], [0, 3], [0, 1, 4, 5]]


def test_ids_that_a_header_calls_a_sessions_own_are_not_shared() -> None:
    header = {"block": 64, "ids": "block content hashes, local to a session ('s')"}
    rows = [{"t": at, "s": s, "i": 1, "h": [0, 2]} for at, s in enumerate((0, 1, 0))]

    assert pages(read([header, *rows])) == [[0, 1], [2, 3], [0, 1]]


def test_an_id_that_comes_after_another_parent_is_another_page_there() -> None:
    rows = [[1, 2, 3], [7, 2, 3], [1, 2, 3, 4], [2]]

    trace = read([{**MOONCAKE[0], "hash_ids": ids} for ids in rows])

    assert pages(trace) == [[0, 1, 2], [3, 4, 5], [0, 1, 2, 6], [7]]
    assert trace.distinct_pages == 8
    assert trace.split_pages == 3  # 2 and 3 after 7, and 2 at a head


def test_an_id_that_comes_twice_in_a_prompt_is_two_pages() -> None:
    trace = read([{**MOONCAKE[0], "hash_ids": [1, 1, 1]}])

    assert pages(trace) == [[0, 1, 2]]


def test_hashes_may_have_all_64_bits() -> None:
    ids = [2**64 - 1, 2**63, 0, 12345678901234567890]

    trace = read([{**MOONCAKE[0], "hash_ids": ids}, {**MOONCAKE[1], "hash_ids": ids[:2]}])

    assert pages(trace) == [[0, 1, 2, 3], [0, 1]]


def test_a_prompt_shorter_than_a_page_may_have_none() -> None:
    trace = read([MOONCAKE[0], {**MOONCAKE[1], "hash_ids": []}, MOONCAKE[2]])

    assert pages(trace) == [[0, 1, 2], [], [0, 1, 3, 4]]
    assert trace.page_counts().tolist() == [3, 0, 4]


def test_a_trace_of_requests_without_pages_is_empty_but_one() -> None:
    trace = read([{**MOONCAKE[0], "hash_ids": []}])

    assert (len(trace), trace.references, trace.distinct_pages) == (1, 0, 0)


def test_tokens_a_page_count_as_given_only_where_the_file_does_not_say() -> None:
    assert read(MOONCAKE, page_tokens=16).page_tokens == 16
    assert read(OURS, page_tokens=16).page_tokens == 512
    assert read(OURS[1:], page_tokens=16).page_tokens == 16


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "Input data was truncated"),
        ("nonsense", "JSON is malformed: invalid character"),
        (b"\xff\xfe\n", "JSON is malformed"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ({"timestamp": 1, "input_length": 5, "output_length": 3}, "missing required field `hash_ids`"),
        ({**MOONCAKE[0], "hash_ids": [1, "x"]}, r"Expected `int`, got `str` - at `\$.hash_ids\[1\]`"),
        ({**MOONCAKE[0], "hash_ids": [1, 2.5]}, r"Expected `int`, got `float` - at `\$.hash_ids\[1\]`"),
        ({**MOONCAKE[0], "hash_ids": [-1, 2**63]}, "page ids must be integers of 64 bits"),
        ({**MOONCAKE[0], "hash_ids": [2**70]}, "."),
        ({**MOONCAKE[0], "hash_ids": [2**63 - 1]}, "the page id 9223372036854775807 can't be"),
        ({**MOONCAKE[0], "input_length": -3}, r"Expected `int` >= 0 - at `\$.input_length`"),
        ({**MOONCAKE[0], "input_length": True}, "Expected `int`, got `bool`"),
        ({**MOONCAKE[0], "timestamp": "noon"}, r"Expected `float`, got `str` - at `\$.timestamp`"),
        ('{"timestamp": NaN, "hash_ids": []}', "JSON is malformed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_line_is_named_by_file_and_number_or_left_out(bad: dict[str, Any] | str, why: str) -> None:
    rows = [MOONCAKE[0], "", bad, MOONCAKE[1]]

    with pytest.raises(TraceError, match=rf"^a line 3: .*{why}.* \(--skip-bad goes on"):
        read(rows)
    trace = read(rows, skip_bad=True)

    assert pages(trace) == [[0, 1, 2], [0, 3]]
    assert trace.skipped_lines == 1
    assert trace.first_skipped.startswith("a line 3: ")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"t": 1, "i": 1, "h": [0, 1, 2]}, "pairs of a first id and a length, got 3 numbers"),
        ({"t": 1, "i": 1, "h": [0, 0]}, "at least 1 long, got 0"),
        ({"t": 1, "i": 1, "h": [0, MAX_PAGES + 1]}, "more than 16,777,216"),
        ({"t": 1, "i": 1, "h": [2**62, 1]}, "less than 2.62"),
        ({"t": 1, "h": [0, 1]}, "missing required field `i`"),
        ({"t": 1, "i": 1, "h": [0, 1], "s": "x"}, "Expected `int`, got `str`"),
        ({"block": 16}, "a header with block 16 after pages of 512"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_line_of_our_form_is_named(bad: dict[str, Any], why: str) -> None:
    with pytest.raises(TraceError, match=rf"^a line 3: .*{why}"):
        read([*OURS[:2], bad])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "a has no requests"),
        (["", OURS[0]], "a has no requests"),
        ([{"arrived": 3, "tokens": 4}], "a line 1: it has arrived, tokens, which is no form that is known"),
        (["[]"], "a line 1: no JSON object"),
        (
            [{"trace": "azure", "block": 0}],
            "a line 1: block is 0: this trace has lengths and times but no pages",
        ),
        ([{"block": "big"}], "a line 1: block must be a count of tokens, got 'big'"),
        ([OURS[1]], "a line 1: no header with `block` comes before it: give --block-tokens"),
        ([{"trace": "x"}, OURS[1]], "a line 1: block must be a count of tokens, got None"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_is_no_trace_is_said_to_be_none(rows: list[Any], why: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(rows)

    assert str(caught.value).startswith(why)


def test_a_file_with_broken_lines_only_says_what_the_first_is() -> None:
    with pytest.raises(TraceError, match="^a has no requests; a line 1: .*truncated"):
        read(["{", "{"], skip_bad=True)


def test_files_with_pages_of_other_sizes_are_refused() -> None:
    with pytest.raises(TraceError, match="^b has pages of 16 tokens and a file before it of 512"):
        read(MOONCAKE, [{**BAILIAN[0], **TIMES}])


# ---- numbering against a model ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(-3, 6), max_size=8)), max_size=10),
)
def test_numbering_by_pieces_is_numbering_page_by_page(rows: list[tuple[int, list[int]]]) -> None:
    known: dict[tuple[int, ...], int] = {}
    expected = []
    for space, ids in rows:
        chains = [(space, *ids[: at + 1]) for at in range(len(ids))]
        expected.append([known.setdefault(chain, len(known)) for chain in chains])

    lengths = [len(ids) for _, ids in rows]
    first = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    flat = np.array([page for _, ids in rows for page in ids], np.int64)
    found = number_pages(
        Runs(first, flat, np.ones_like(flat)), np.array([space for space, _ in rows], np.int64)
    )

    bounds = found.runs.first
    runs = [slice(*bounds[at : at + 2]) for at in range(len(rows))]
    assert [concatenated(found.runs.starts[r], found.runs.lengths[r]).tolist() for r in runs] == expected
    assert found.distinct == len(known)
    pairs = {(space, page) for space, ids in rows for page in ids}
    assert found.split == len(known) - len(pairs)
    joined = [found.runs.starts[r][1:] != (found.runs.starts[r] + found.runs.lengths[r])[:-1] for r in runs]
    assert all(part.all() for part in joined)
