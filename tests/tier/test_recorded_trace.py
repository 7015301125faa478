"""A recording's requests as a trace: what `kvtier replay` makes of it is what was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from cache_world import LRU, PAGE_TOKENS, World, chain_keys, chain_of, tenant_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recording_kit import a_life, recorded

from kvtier.lab.traces.trace import Source, Trace, read_trace
from kvtier.tier.node.recording import NODE
from kvtier.tier.policy.base import Kind
from kvtier.tier.protocol.events import FromWorker, WorkerRef
from kvtier.tier.protocol.messages import Finished, Locate, Stored
from kvtier.tier.record.format import RecordingReader
from kvtier.tier.record.rerun import heard
from kvtier.tier.record.trace_export import Collector

REF = WorkerRef("w0", "1")


def collected(data: bytes) -> Collector:
    collector = Collector()
    for event, now in heard(RecordingReader([data]), NODE):
        collector.take(event, now)
    return collector


def trace_of(collector: Collector) -> Trace:
    return read_trace([Source("recorded", [line.encode() for line in collector.lines({"trace": "t"})])])


def rows_of(collector: Collector) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(collector.lines({}))[1:]]


def asked(
    name: str, path: str, first: int = 0, worker: WorkerRef = REF, tokens: int = PAGE_TOKENS
) -> FromWorker:
    chain = chain_of(chain_keys("ada", path)[first:])
    lookup = Locate(name, b"r" * 32, tenant_of("ada"), tokens, first, tokens * len(path), [chain], 0.0)
    return FromWorker(worker, lookup)


def done(
    name: str,
    path: str,
    output: int,
    seconds: float,
    kind: Kind = Kind.UNKNOWN,
    session: int = 0,
    turn: int = 0,
) -> FromWorker:
    keys = [chain_keys("ada", path)]
    return FromWorker(
        REF, Finished(name, keys, 1, output, kind, turn, session, False, False, seconds, 0.0, 0.0)
    )


def taken(events: Sequence[tuple[float, FromWorker]]) -> Collector:
    collector = Collector()
    for now, event in events:
        collector.take(event, now)
    return collector


def test_finished_requests_have_their_moment_pages_answer_session_and_end() -> None:
    collector = taken(
        [
            (10.0, asked("a:0:1", "abc")),
            (14.0, asked("b:0:2", "abx")),
            (15.0, done("b", "abxyz", 2 * PAGE_TOKENS, 1.0, Kind.TOOL, session=77, turn=3)),
            (20.0, done("a", "abcd", PAGE_TOKENS - 1, 10.0, Kind.TURN, session=5)),
        ]
    )

    assert rows_of(collector) == [
        {"t": 0.0, "s": 0, "i": 3 * PAGE_TOKENS + 1, "o": PAGE_TOKENS - 1, "h": [0, 4], "f": "end_turn"},
        {
            "t": 4.0,
            "s": 1,
            "i": 3 * PAGE_TOKENS,
            "o": 2 * PAGE_TOKENS,
            "h": [0, 2, 4, 1],
            "f": "tool_use",
            "turn": 3,
        },
    ]
    trace = trace_of(collector)
    assert trace.page_tokens == PAGE_TOKENS and trace.references == 7 and trace.distinct_pages == 5
    assert [trace.use(1, 3).kind, trace.use(1, 3).turn, trace.use(1, 3).session] == [Kind.TOOL, 3, 2]


def test_a_request_that_has_not_finished_has_its_longest_lookup() -> None:
    collector = taken([(1.0, asked("a:0:1", "ab")), (2.0, asked("a:1:2", "abc")), (3.0, asked("a:0:3", "a"))])

    assert rows_of(collector) == [{"t": 0.0, "s": -1, "i": 3 * PAGE_TOKENS, "o": 0, "h": [0, 3]}]


def test_the_head_of_a_chain_that_l1_held_is_found_by_what_was_stored() -> None:
    world = World(16, 0, policy=LRU)
    worker = world.connect()
    node = recorded(world)
    world.locate(worker, "known", "ada", "abcd", first=3)
    world.locate(worker, "unknown", "ada", "xyz", first=2)
    world.want(worker, 4)
    assert world.store(worker, "ada", "abcd", first=1) == 3

    collector = collected(node.ended())

    assert [row["h"] for row in rows_of(collector)] == [[0, 4]] and collector.headless == 1


def test_pages_of_another_size_are_left_out_and_counted() -> None:
    other = WorkerRef("w1", "1")
    collector = taken(
        [
            (1.0, asked("a", "ab")),
            (2.0, asked("b", "ab", worker=other, tokens=64)),
            (3.0, asked("c", "abc")),
        ]
    )

    header = json.loads(next(collector.lines({"trace": "mine"})))

    assert header["block"] == PAGE_TOKENS and header["trace"] == "mine"
    assert header["left_out"] == {"headless": 0, "other_page_size": 1} and collector.other_sizes == 1
    assert len(header["approximate"]) >= 3


def test_a_recording_without_requests_is_a_header() -> None:
    assert len(list(taken([]).lines({}))) == 1


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None, phases=[Phase.generate])
def test_any_life_makes_a_trace_that_can_be_read(seed: int) -> None:
    collector = collected(a_life(seed).ended())
    lines = list(collector.lines({"trace": "t"}))
    rows = [json.loads(line) for line in lines[1:]]

    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)
    if rows:
        trace = trace_of(collector)
        assert len(trace) == len(rows) and not trace.split_pages
        assert trace.references == sum(sum(row["h"][1::2]) for row in rows)


@pytest.mark.parametrize("message", [Stored([])])
def test_what_is_no_request_is_none(message: Stored) -> None:
    assert rows_of(taken([(1.0, FromWorker(REF, message))])) == []
