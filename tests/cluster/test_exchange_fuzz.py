"""Random bytes between exchanges: what isn't whole and asked for is never stored, and no one's process ends."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lying_peer import GOOD, NBYTES, home_of, lying, page
from peer_stub import envelope_of, exchange, key_of, stub

from kvtier.cluster.transfer import wire
from kvtier.tier.pages.page import PageCorrupt, page_checksum
from kvtier.tier.protocol.messages import REASONS
from kvtier.tier.transport import peer_health as peer_record
from kvtier.tier.transport.frames import Ending, Expected, PageHead, PageReader, PagesRequest, Piece

STREAM = GOOD + page(2) + page(3)


def request_of(num_pages: int) -> PagesRequest:
    first = envelope_of(0, NBYTES)
    keys = tuple(key_of(number) for number in range(num_pages))
    return PagesRequest(
        root=first.root,
        tenant=first.tenant,
        page_tokens=first.tokens,
        first_page=0,
        keys=keys,
        held=bytes(num_pages),
        variant=first.variant,
        spec_digest=first.spec_digest,
        payload_bytes=NBYTES,
    )


class Sink:
    """Takes pages as SlotSink does, without slots."""

    def __init__(self, request: PagesRequest) -> None:
        self._request, self._expected = request, Expected(request)
        self._head: PageHead | None = None
        self._payload = b""
        self.whole: dict[int, bytes] = {}

    def take(self, pieces: Iterable[Piece]) -> None:
        for packed, data in pieces:
            if packed is not None:
                self._head, self._payload = self._expected.take(bytes(packed)), b""
            assert self._head is not None
            self._payload += bytes(data)
            if len(self._payload) == NBYTES:
                head = self._head
                checksum = page_checksum(
                    key_of(head.index), self._request.variant, self._request.spec_digest, self._payload
                )
                if checksum != head.checksum:
                    raise PageCorrupt("checksum differs")
                self.whole[head.index] = self._payload

    def flush(self) -> None:
        pass


def tampered(random: Random, data: bytes) -> bytes:
    """Bytes changed, cut out, put in twice or put in."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        at = random.randrange(max(1, len(changed)))
        match random.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del changed[at : at + random.choice([1, 8, 400, 5000])]
            case 2:
                changed[at:at] = changed[at : at + random.choice([1, 8, 400, 5000])]
            case _:
                changed[at:at] = random.randbytes(random.choice([1, 8, 400]))
    return bytes(changed)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_a_stream_that_was_tampered_with_gives_only_whole_pages_or_none(seed: int) -> None:
    random = Random(seed)
    data = tampered(random, STREAM)
    sink = Sink(request_of(4))
    reader = PageReader(sink, NBYTES)
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(4)))
    try:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            reader.feed(memoryview(data)[start:end])
        reader.end()
    except PageCorrupt:
        pass
    whole = Sink(request_of(4))
    PageReader(whole, NBYTES).feed(memoryview(STREAM))
    assert sink.whole.items() <= whole.whole.items()


@given(data=st.binary(max_size=64) | st.integers(0, 2**32).map(lambda seed: tampered(Random(seed), FRAME)))
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
@example(b"\x0b" * 1000)  # groups in groups
@settings(max_examples=300)
def test_what_is_no_frame_is_said_to_be_none(data: bytes) -> None:
    try:
        found = wire.read_frame(data)
    except PageCorrupt:
        return
    assert isinstance(found, (memoryview, Ending))


FRAME = wire.ending_frame(Ending("evicted", "it is gone"), 3)


def test_a_peer_that_sends_anything_is_told_of_in_our_words_and_stores_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_record, "OPEN_AFTER", 1000)  # it is asked again however often it fails
    random = Random(11)

    def frames(request: Any, context: Any) -> Iterator[bytes]:
        yield wire.pages_frame([GOOD])
        match random.randrange(4):
            case 0:
                yield wire.pages_frame([tampered(random, page(2))])
            case 1:
                yield tampered(random, wire.pages_frame([page(2)]))
            case 2:
                yield random.randbytes(1000)
            case _:
                yield wire.ending_frame(Ending("word " * 100, "x" * 2**20), 2)

    with ExitStack() as stack:
        address = lying(stack, frames)
        home, here = home_of(stack, tmp_path)
        for _ in range(12):
            fetch = home.order("away", address, range(4))
            ended = home.ended(fetch)
            assert ended.reason in REASONS and home.stored(fetch) <= {0, 1, 2}
            assert home.stored(fetch) >= {0, 1}, "what came whole stays"
        assert here.health() is None and set(here.stats()["fetched"]["away"]["failures"]) <= REASONS


def test_bytes_that_are_no_call_end_no_exchange(tmp_path: Path) -> None:
    random = Random(5)
    junk = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.randbytes(4096),
        *(random.randbytes(random.choice([1, 64, 4096])) for _ in range(10)),
    ]
    with ExitStack() as stack:
        home, _ = home_of(stack, tmp_path)
        away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
        away.put(0, 1)
        there = stack.enter_context(exchange("away", away.path, same_host="off"))
        address = there.info()["address"]
        host, _, port = address.rpartition(":")
        for data in junk:
            with socket.create_connection((host, int(port)), timeout=30.0) as connection:
                connection.sendall(data)

        fetch = home.order("away", address, range(2))

        assert home.ended(fetch).reason == "" and home.stored(fetch) == {0, 1}
        assert there.health() is None
