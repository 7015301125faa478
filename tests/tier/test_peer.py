"""Pages from peers, without a network: the stream, what is checked of it, the breaker, and which fetches run how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from peer_stub import PAGE_TOKENS, ROOT, SPEC, TENANT, VARIANT, envelope_of, key_of, payload_of

from kvtier.tier.pages.page import PACKED_ENVELOPE_BYTES, Envelope, PageCorrupt
from kvtier.tier.protocol.events import Note
from kvtier.tier.protocol.messages import MAX_TEXT, Fetch, Fetched, FetchPage, Grant
from kvtier.tier.transport.fetch_runs import (
    Asked,
    Begin,
    Came,
    Cancelled,
    FetchCommand,
    FetchEvent,
    FetchLimits,
    FetchRef,
    Interrupt,
    NodeLost,
    PeerRuns,
    Ran,
    Tell,
    Ticked,
)
from kvtier.tier.transport.frames import (
    FRAME_BYTES,
    HEAD_BYTES,
    Ending,
    Expected,
    FailureKind,
    PageHead,
    PageReader,
    PagesRequest,
    Piece,
    page_head,
    request_of,
)
from kvtier.tier.transport.peer_health import OPEN_AFTER, OPEN_FIRST_S, OPEN_LAST_S, Breaker

NBYTES = 1000


def request(first: int = 0, count: int = 4, **changes: Any) -> PagesRequest:
    keys = tuple(key_of(number) for number in range(first, first + count))
    whole = PagesRequest(ROOT, TENANT, PAGE_TOKENS, first, keys, bytes(count), VARIANT, SPEC, NBYTES)
    return replace(whole, **changes)


def fetch_of(
    fetch_id: int,
    peer: str = "away",
    first: int = 0,
    count: int = 4,
    deadline_s: float = 10.0,
    nbytes: int = NBYTES,
) -> Fetch:
    pages = [
        FetchPage(Grant(1000 * fetch_id + number, 1, nbytes), key_of(number), VARIANT, SPEC)
        for number in range(first, first + count)
    ]
    return Fetch(fetch_id, peer, "host:1", ROOT, TENANT, PAGE_TOKENS, first, pages, deadline_s)


# ---- the stream --------------------------------------------------------------------------------------------------


class Collected:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.pages: list[tuple[Envelope, bytes]] = []
        self.flushes = 0

    def take(self, pieces: Iterable[Piece]) -> None:
        for packed, data in pieces:
            if packed is not None:
                self.pages.append((Envelope.unpack(packed), b""))
            envelope, before = self.pages[-1]
            self.pages[-1] = (envelope, before + bytes(data))

    def flush(self) -> None:
        self.flushes += 1


def stream_of(numbers: range, nbytes: int) -> list[bytes]:
    return [
        page_head(envelope_of(number, nbytes).pack(), nbytes) + payload_of(number, nbytes)
        for number in numbers
    ]


@given(st.integers(1, 6), st.integers(1, 3000), st.integers(1, 3000))
def test_pages_come_out_of_frames_as_they_went_in(count: int, nbytes: int, frame_bytes: int) -> None:
    """However a large page's payload is cut; a head stands whole in one frame."""
    frames: list[bytes] = []
    for page in stream_of(range(count), nbytes):
        cuts = range(HEAD_BYTES + frame_bytes, len(page), frame_bytes)
        edges = [0, *cuts, len(page)]
        frames += [page[start:end] for start, end in pairwise(edges)]
    sink = Collected()
    reader = PageReader(sink, nbytes)

    for frame in frames:
        reader.feed(memoryview(frame))
    reader.end()

    assert [(envelope.depth, payload) for envelope, payload in sink.pages] == [
        (number, payload_of(number, nbytes)) for number in range(count)
    ]
    assert sink.flushes == len(frames)


@given(st.data())
def test_a_stream_that_is_cut_short_is_seen(data: st.DataObject) -> None:
    whole = b"".join(stream_of(range(2), 500))
    end = data.draw(st.integers(1, len(whole) - 1).filter(lambda end: end != len(whole) // 2))
    reader = PageReader(Collected(), 500)

    with pytest.raises(PageCorrupt):
        reader.feed(memoryview(whole[:end]))
        reader.end()


def test_a_length_that_is_not_the_one_asked_for_is_seen() -> None:
    page = page_head(envelope_of(0, 500).pack(), 499) + payload_of(0, 499)

    with pytest.raises(PageCorrupt, match="499 bytes came, 500"):
        PageReader(Collected(), 500).feed(memoryview(page))


# ---- what is checked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"key": key_of(9)}, "not one of those asked for"),
        ({"variant": "int8"}, "format"),
        ({"spec_digest": b"another spec...."}, "shape"),
        ({"root": bytes(32)}, "root"),
        ({"tenant": b"another tenant.."}, "tenant"),
        ({"payload_bytes": NBYTES + 1}, "payload_bytes"),
        ({"depth": 2}, "depth"),
        ({"parent": bytes(32)}, "parent"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": PAGE_TOKENS + 1}, "tokens"),
        ({"made_from": "nothing known"}, "from format"),
    ],
)
def test_a_page_that_is_not_what_was_asked_for_is_seen(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(PageCorrupt, match=what):
        Expected(request()).take(envelope_of(1, NBYTES, **changes).pack())


def test_an_envelope_says_which_page_it_is_and_what_only_it_can_say() -> None:
    envelope = envelope_of(6, NBYTES, made_from="int8", tokens=3)

    head = Expected(request(first=5, count=3)).take(envelope.pack())

    assert head == PageHead(1, key_of(6), "int8", key_of(5), 6, 3, envelope.checksum)


@given(st.integers(0, 8 * PACKED_ENVELOPE_BYTES - 1), st.integers(0, 1))
def test_any_flipped_bit_of_an_envelope_is_seen(bit: int, number: int) -> None:
    packed = bytearray(envelope_of(number, NBYTES).pack())
    packed[bit // 8] ^= 1 << bit % 8

    with pytest.raises(PageCorrupt):
        Expected(request()).take(bytes(packed))


@given(st.integers(0, PACKED_ENVELOPE_BYTES - 9), st.integers(1, 255))
def test_an_envelope_that_lies_with_a_right_checksum_is_seen_where_we_know_better(
    at: int, change: int
) -> None:
    """All but the payload's checksum, which the payload is compared with, and another number of tokens that may be."""
    truth = envelope_of(1, NBYTES)
    packed = bytearray(truth.pack())
    packed[at] ^= change
    packed[-8:] = xxhash.xxh3_64(bytes(packed[:-8])).digest()
    expected = Expected(request())

    try:
        head = expected.take(bytes(packed))
    except PageCorrupt:
        assert len(expected) == len(request().keys), "it may come yet"
    else:
        assert (head.key, head.parent, head.depth, head.made_from) == (truth.key, truth.parent, 1, "")
        assert 1 <= head.tokens <= PAGE_TOKENS
        assert head.tokens != truth.tokens or head.checksum != truth.checksum


def test_an_envelope_whose_variant_is_no_text_is_seen() -> None:
    packed = bytearray(envelope_of(0, NBYTES).pack())
    packed[38:40] = b"\xff\xfe"  # behind magic, version and key
    packed[-8:] = xxhash.xxh3_64(bytes(packed[:-8])).digest()

    with pytest.raises(PageCorrupt, match="no text"):
        Expected(request()).take(bytes(packed))


def test_pages_may_come_in_any_order_and_once() -> None:
    expected = Expected(request(first=5, count=3))
    for number in (7, 5, 6):
        expected.take(envelope_of(number, NBYTES).pack())

    assert len(expected) == 0
    with pytest.raises(PageCorrupt, match="not one of those asked for"):
        expected.take(envelope_of(6, NBYTES).pack())


def test_pages_that_came_before_are_not_asked_for_again() -> None:
    rest = request(count=3).without({key_of(1)})

    assert list(rest.held) == [0, 1, 0]
    with pytest.raises(PageCorrupt):
        Expected(rest).take(envelope_of(1, NBYTES).pack())
    assert list(rest.locate("r").chains[0].held) != [0, 0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": ()},
        {"keys": (b"short",), "held": b"\0"},
        {"held": b""},
        {"root": b""},
        {"variant": "unheard of"},
        {"page_tokens": 0},
        {"page_tokens": 2**16},
        {"first_page": 2**21},
        {"payload_bytes": 0},
        {"payload_bytes": 2**31},
    ],
)
def test_a_request_that_cannot_be_is_named(changes: dict[str, Any]) -> None:
    assert request(**changes).malformed() is not None
    assert request().malformed() is None


def test_a_fetch_of_pages_of_two_kinds_is_refused() -> None:
    fetch = fetch_of(1)
    fetch.pages[1] = FetchPage(Grant(3, 1, 77), key_of(1), VARIANT, SPEC)

    with pytest.raises(ValueError, match="2 kinds"):
        request_of(fetch)


# ---- the breaker -------------------------------------------------------------------------------------------------


def test_the_breaker_opens_after_some_failures_in_a_row_and_twice_as_long_each_time() -> None:
    breaker = Breaker()
    now, waits = 0.0, []
    for _ in range(OPEN_AFTER - 1):
        assert not breaker.failed(now, is_probe=breaker.begin())
        assert breaker.why_not(now) is None
    for _ in range(7):
        assert breaker.failed(now, is_probe=breaker.begin())
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        assert breaker.why_not(breaker.open_until - 0.01) is not None
        now = breaker.open_until
        assert breaker.why_not(now) is None

    assert waits == [OPEN_FIRST_S, 10.0, 20.0, 40.0, OPEN_LAST_S, OPEN_LAST_S, OPEN_LAST_S]


def test_one_probe_at_a_time_closes_the_breaker() -> None:
    breaker = Breaker()
    for _ in range(OPEN_AFTER):
        breaker.failed(0.0, is_probe=breaker.begin())
    assert breaker.state(1.0) == "open"
    assert breaker.state(OPEN_FIRST_S) == "half-open"

    assert breaker.begin()
    assert breaker.why_not(OPEN_FIRST_S) is not None
    assert not breaker.failed(OPEN_FIRST_S, is_probe=False), "one that began before it opened"
    breaker.ended(is_probe=True)
    assert breaker.why_not(OPEN_FIRST_S) is None
    breaker.begin()
    breaker.succeeded()

    assert breaker.state(OPEN_FIRST_S) == "closed"
    assert not breaker.failed(OPEN_FIRST_S, is_probe=breaker.begin())


# ---- which fetches run -------------------------------------------------------------------------------------------


@dataclass
class Driver:
    """Drives PeerRuns by hand."""

    limits: FetchLimits = FetchLimits(grace_s=1.0, min_bytes_per_s=1000.0)  # noqa: RUF009

    def __post_init__(self) -> None:
        self.runs = PeerRuns(self.limits)
        self.now = 0.0
        self.begun: dict[FetchRef, list[Begin]] = {}
        self.told: list[Fetched] = []
        self.interrupted: list[FetchRef] = []
        self.notes: list[str] = []

    def __call__(self, event: FetchEvent, at: float | None = None) -> list[FetchCommand]:
        self.now = self.now if at is None else at
        commands = self.runs.handle(event, self.now)
        self.runs.check()
        for command in commands:
            match command:
                case Begin():
                    self.begun.setdefault(command.ref, []).append(command)
                case Tell():
                    self.told.append(command.message)
                case Interrupt():
                    self.interrupted.append(command.ref)
                case Note():
                    self.notes.append(command.text)
        return commands

    def come(self, ref: FetchRef, *numbers: int) -> None:
        self(Came(ref, tuple(key_of(number) for number in numbers), len(numbers) * NBYTES))

    def fail(self, ref: FetchRef, kind: FailureKind = "refused") -> None:
        self(Ran(ref, kind, Ending(detail="of the test")))


def test_a_peers_own_words_for_its_end_fill_no_table_and_make_no_message_too_long() -> None:
    drive = Driver()
    for number in range(20):
        drive(Asked(1, fetch_of(number)))
        drive(Ran((1, number), None, Ending(f"word {number}", "x" * 10**6)))

    assert {told.reason for told in drive.told} == {"load_failed"}
    assert all(len(told.detail) == MAX_TEXT for told in drive.told)
    (peer,) = drive.runs.peers().values()
    assert peer.failures == {"load_failed": 20}


def test_a_fetch_ends_with_what_came_and_why_the_rest_did_not() -> None:
    drive = Driver()
    drive(Asked(1, fetch_of(7)))
    drive.come((1, 7), 0, 1)
    drive(Ran((1, 7), None, Ending("evicted", "the peer dropped it")), at=0.5)

    (told,) = drive.told
    assert told.failed == [(key_of(2), VARIANT), (key_of(3), VARIANT)]
    assert (told.reason, told.detail) == ("evicted", "the peer dropped it")
    assert (told.nbytes, told.seconds, told.is_over) == (2 * NBYTES, 0.5, True)
    assert drive.runs.is_idle


def test_a_lost_connection_is_tried_once_more_for_the_rest_only() -> None:
    drive = Driver()
    drive(Asked(1, fetch_of(1)))
    drive.come((1, 1), 0)
    drive.fail((1, 1), "lost")

    first, second = drive.begun[(1, 1)]
    assert list(first.request.held) == [0, 0, 0, 0]
    assert list(second.request.held) == [1, 0, 0, 0]
    assert drive.told == []
    drive.fail((1, 1), "lost")
    assert drive.told[0].reason == "load_failed"
    assert len(drive.begun[(1, 1)]) == 2


@pytest.mark.parametrize("kind", ["busy", "corrupt", "refused", "slow", "away"])
def test_nothing_else_is_tried_again(kind: FailureKind) -> None:
    drive = Driver()
    drive(Asked(1, fetch_of(1)))
    drive.fail((1, 1), kind)

    assert len(drive.begun[(1, 1)]) == 1
    assert len(drive.told) == 1


def test_a_peer_that_fails_again_and_again_is_left_alone_and_then_asked_once() -> None:
    drive = Driver()
    for number in range(OPEN_AFTER):
        drive(Asked(1, fetch_of(number)))
        drive.fail((1, number))
    assert len(drive.notes) == 1

    drive(Asked(1, fetch_of(10)))
    assert (1, 10) not in drive.begun
    assert "left alone" in drive.told[-1].detail
    drive(Asked(1, fetch_of(11)), at=OPEN_FIRST_S)
    drive(Asked(1, fetch_of(12)))
    assert (1, 11) in drive.begun
    assert drive.told[-1].fetch_id == 12, "one probe is enough"
    drive.come((1, 11), 0, 1, 2, 3)
    drive(Ran((1, 11), None, Ending()))
    drive(Asked(1, fetch_of(13)))
    assert (1, 13) in drive.begun


@pytest.mark.parametrize("kind", ["busy", "away"])
def test_a_busy_peer_is_not_one_that_fails(kind: FailureKind) -> None:
    drive = Driver()
    for number in range(2 * OPEN_AFTER):
        drive(Asked(1, fetch_of(number)))
        drive.fail((1, number), kind)

    assert len(drive.begun) == 2 * OPEN_AFTER


def test_a_peer_that_sent_a_damaged_page_is_asked_to_look_first_until_it_ends_one_well() -> None:
    drive = Driver()
    for number in range(3):
        drive(Asked(1, fetch_of(number)))
        if number == 0:
            drive.fail((1, number), "corrupt")
        else:
            drive.come((1, number), 0, 1, 2, 3)
            drive(Ran((1, number), None, Ending()))

    assert [drive.begun[(1, number)][0].request.checks for number in range(3)] == [False, True, False]
    assert drive.told[0].reason == "corrupt"


def test_a_silent_peer_is_given_up_after_the_grace_and_one_that_is_slow_as_soon_as_it_is() -> None:
    drive = Driver()
    drive(Asked(1, fetch_of(1)))
    drive(Asked(1, fetch_of(2, "other")))
    drive.come((1, 2), 0)  # 1,000 bytes: good for one more second
    assert drive.runs.next_at() == 1.0
    drive(Ticked(), at=1.0)
    assert drive.interrupted == [(1, 1)]
    assert drive.runs.next_at() == 2.0
    drive(Ticked(), at=2.0)
    assert drive.interrupted == [(1, 1), (1, 2)]
    assert drive.told == [], "their slots are still being written to"

    drive.fail((1, 1), "slow")
    assert drive.told[0].reason == "deadline"
    assert "gave 0 bytes" in drive.told[0].detail


def test_a_fetch_that_waits_for_its_turn_ends_at_its_deadline() -> None:
    drive = Driver(FetchLimits(streams=1, grace_s=1000.0))
    drive(Asked(1, fetch_of(1, deadline_s=50.0)))
    drive(Asked(1, fetch_of(2, deadline_s=3.0)))
    assert drive.runs.next_at() == 3.0
    drive(Ticked(), at=3.0)

    assert [told.fetch_id for told in drive.told] == [2]
    assert drive.told[0].reason == "deadline"


def test_a_cancelled_fetch_is_ended_when_its_run_lets_go_and_blames_nothing() -> None:
    drive = Driver()
    for number in range(2 * OPEN_AFTER):
        drive(Asked(1, fetch_of(number)))
        drive(Cancelled((1, number)))
        assert len(drive.told) == number
        drive.fail((1, number), "slow")
    drive(Cancelled((1, 99)))

    assert len(drive.told) == 2 * OPEN_AFTER
    assert drive.notes == []


def test_the_fetches_of_a_lost_node_are_told_to_nothing() -> None:
    drive = Driver(FetchLimits(streams=1))
    drive(Asked(1, fetch_of(1)))
    drive(Asked(1, fetch_of(2)))
    drive(NodeLost(1))
    assert drive.interrupted == [(1, 1)]
    drive(Asked(2, fetch_of(1)))
    drive.fail((1, 1), "away")

    assert drive.told == []
    assert list(drive.begun) == [(1, 1), (2, 1)]


def test_one_peer_takes_half_of_the_room_and_others_pass_it() -> None:
    drive = Driver(FetchLimits(in_flight_bytes=8 * NBYTES, streams=4))
    for number, peer in enumerate(["a", "a", "b", "c"]):
        drive(Asked(1, fetch_of(number, peer)))
    assert list(drive.begun) == [(1, 0), (1, 2)]
    drive.fail((1, 0))

    assert list(drive.begun) == [(1, 0), (1, 2), (1, 1)]


def test_a_fetch_larger_than_all_room_runs_alone() -> None:
    drive = Driver(FetchLimits(in_flight_bytes=NBYTES))
    drive(Asked(1, fetch_of(1)))
    drive(Asked(1, fetch_of(2, "other", count=1)))
    assert list(drive.begun) == [(1, 1)]
    drive.fail((1, 1))
    assert list(drive.begun) == [(1, 1), (1, 2)]


def test_past_the_bound_fetches_are_refused() -> None:
    drive = Driver(FetchLimits(waiting=1))
    drive(Asked(1, fetch_of(1)))
    drive(Asked(1, fetch_of(2)))

    assert (drive.told[0].fetch_id, drive.told[0].reason) == (2, "no_room")


def test_a_peer_that_says_all_was_sent_when_it_was_not_is_to_blame() -> None:
    drive = Driver()
    drive(Asked(1, fetch_of(1)))
    drive.come((1, 1), 0)
    drive(Ran((1, 1), None, Ending()))

    assert drive.told[0].reason == "load_failed"
    ((_, peer),) = drive.runs.peers().items()
    assert peer.breaker.failures == 1


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: one answer per fetch, which names all pages that did not come."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = FetchLimits(
            in_flight_bytes=10 * NBYTES, streams=2, runs=4, waiting=8, peers=3, deadline_s=20.0
        )
        self.runs = PeerRuns(self.limits)
        self.now = 0.0
        self.session = 1
        self.asked: dict[FetchRef, Fetch] = {}  # and not answered
        self.running: dict[FetchRef, Begin] = {}
        self.came: dict[FetchRef, set[bytes]] = {}
        self.interrupted: set[FetchRef] = set()
        self.void: set[FetchRef] = set()
        self.last_id = 0

    def say(self, event: FetchEvent) -> None:
        for command in self.runs.handle(event, self.now):
            match command:
                case Begin():
                    assert command.ref not in self.running
                    self.running[command.ref] = command
                case Interrupt():
                    assert command.ref in self.running
                    self.interrupted.add(command.ref)
                case Tell():
                    self.answer((command.session, command.message.fetch_id), command.message)
                case Note():
                    pass

    def answer(self, ref: FetchRef, message: Fetched) -> None:
        assert ref not in self.running, "told while its slots are in use"
        fetch = self.asked.pop(ref)
        came = self.came.pop(ref)
        assert {key for key, _ in message.failed} == {page.key for page in fetch.pages} - came
        assert message.nbytes == len(came) * NBYTES
        assert bool(message.reason) == bool(message.failed) or message.reason == "corrupt"

    @rule(peer=st.sampled_from("abcde"), count=st.integers(1, 12), deadline_s=st.floats(0.0, 30.0))
    def ask(self, peer: str, count: int, deadline_s: float) -> None:
        self.last_id += 1
        fetch = fetch_of(self.last_id, peer, count=count, deadline_s=deadline_s)
        ref = (self.session, self.last_id)
        self.asked[ref], self.came[ref] = fetch, set()
        self.say(Asked(self.session, fetch))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.running)))
        begin = self.running[ref]
        left = [key for key, held in zip(begin.request.keys, begin.request.held, strict=True) if not held]
        keys = [key for key in left if ref in self.void or key not in self.came[ref]]
        if keys:
            key = data.draw(st.sampled_from(keys))
            if ref not in self.void:
                self.came[ref].add(key)
            self.say(Came(ref, (key,), NBYTES))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(), failure=st.sampled_from([None, "lost", "busy", "corrupt", "refused", "slow", "away"])
    )
    def end(self, data: st.DataObject, failure: FailureKind | None) -> None:
        ref = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[ref]
        self.interrupted.discard(ref)
        reason = data.draw(st.sampled_from(["", "evicted"]))
        self.say(Ran(ref, failure, Ending(reason, "of the test")))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.say(Cancelled(data.draw(st.sampled_from(sorted(self.asked)))))

    @rule()
    def lose(self) -> None:
        gone = set(self.asked)
        self.void |= gone & set(self.running)
        for ref in gone:
            del self.asked[ref], self.came[ref]
        self.say(NodeLost(self.session))
        self.session += 1

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.say(Ticked())

    @invariant()
    def holds(self) -> None:
        self.runs.check()
        at = self.runs.next_at()
        assert at is None or at >= self.now, "what is due was left undone"
        assert set(self.running) - self.void <= set(self.asked)
        for ref in set(self.running) - self.interrupted - self.void:
            assert self.running[ref].deadline > self.now

    def teardown(self) -> None:
        while self.running:
            ref = next(iter(self.running))
            del self.running[ref]
            self.say(Ran(ref, "refused", Ending(detail="the end")))
        assert self.runs.is_idle
        assert not self.asked


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_a_frame_is_small_enough_for_the_fast_path() -> None:
    assert HEAD_BYTES < 4096 < FRAME_BYTES <= 4 * 2**20
