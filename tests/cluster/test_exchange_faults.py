"""Peers that are wrong, slow, silent or gone: no page of theirs is stored unless it is whole and the one asked for."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from lying_peer import GOOD, NBYTES, home_of, lying, page
from peer_stub import SECRET, StubNode, envelope_of, exchange, key_of, payload_of, stub
from waiting import until

from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.actor import PageExchangeProcess
from kvtier.cluster.transfer.channels import Channels
from kvtier.proto import page_transfer_pb2
from kvtier.tier.transport.frames import Ending
from kvtier.tier.transport.peer_health import OPEN_AFTER


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


WRONG: dict[str, list[bytes]] = {
    "a flipped bit in a payload": [wire.pages_frame([GOOD, page(2, flipped(payload_of(2, NBYTES), 77))])],
    "a flipped bit in an envelope": [wire.pages_frame([GOOD, flipped(page(2), 50)])],
    "another page's key": [wire.pages_frame([GOOD, page(8, parent=key_of(7))])],
    "another page under the key": [wire.pages_frame([GOOD, page(2, payload_of(3, NBYTES))])],
    "another shape": [wire.pages_frame([GOOD, page(2, spec_digest=b"another shape...")])],
    "another format": [wire.pages_frame([GOOD, page(2, variant="int8")])],
    "another tenant": [wire.pages_frame([GOOD, page(2, tenant=b"another tenant..")])],
    "other weights": [wire.pages_frame([GOOD, page(2, root=bytes(32))])],
    "the same page twice": [wire.pages_frame([GOOD, page(1)])],
    "a longer page": [wire.pages_frame([GOOD, page(2, payload_of(2, NBYTES + 1), payload_bytes=NBYTES + 1)])],
    "a truncated frame": [wire.pages_frame([GOOD, page(2)[:-1]]), wire.ending_frame(Ending(), 3)],
    "a truncated head": [wire.pages_frame([GOOD, page(2)[:100]])],
    "no message": [wire.pages_frame([GOOD]), b"\xff\xff\xff\xff"],
    "a length beyond the message": [wire.pages_frame([GOOD]), b"\x0a\xff\xff\x03" + page(2)],
    "a message too large to be taken": [wire.pages_frame([GOOD]), bytes(wire.MAX_FRAME_BYTES + 1)],
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_dropped_and_what_came_before_stays(
    stack: ExitStack, tmp_path: Path, what: str
) -> None:
    address = lying(stack, lambda request, context: iter([*WRONG[what], wire.ending_frame(Ending(), 4)]))
    home, here = home_of(stack, tmp_path)

    fetch = home.order("away", address, range(4))

    ended = home.ended(fetch)
    assert ended.reason == "corrupt", ended
    assert [key for key, _ in ended.failed] == [key_of(2), key_of(3)]
    assert home.stored(fetch) == {0, 1}
    assert here.stats()["fetched"]["away"]["failures"] == {"corrupt": 1}
    assert any("from node away was dropped" in note for note in here.notes())


def test_what_came_whole_stays_whatever_becomes_of_the_channel(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a fault of ours")

    address = lying(stack, lambda request, context: iter([wire.pages_frame([GOOD, page(2)[:-1]])]))
    home, _ = home_of(stack, tmp_path)
    monkeypatch.setattr(Channels, "done", broken)

    fetch = home.order("away", address, range(4))

    assert home.ended(fetch).reason == "broke"
    assert home.stored(fetch) == {0, 1}


def test_a_stream_without_an_ending_is_a_failure(stack: ExitStack, tmp_path: Path) -> None:
    address = lying(stack, lambda request, context: iter([wire.pages_frame([GOOD])]))
    home, _ = home_of(stack, tmp_path)

    fetch = home.order("away", address, range(4))

    assert home.ended(fetch).reason == "load_failed"
    assert home.stored(fetch) == {0, 1}


def test_another_deployment_gives_and_gets_nothing(stack: ExitStack, tmp_path: Path) -> None:
    home, _ = home_of(stack, tmp_path)
    away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
    away.put(0, 1)
    there = stack.enter_context(exchange("away", away.path, secret="another deployment's"))

    fetch = home.order("away", there.info()["address"], range(2))

    ended = home.ended(fetch)
    assert (ended.reason, len(ended.failed)) == ("load_failed", 2)
    assert "not of this deployment" in ended.detail
    assert there.stats()["refused"] == {"UNAUTHENTICATED": 1}
    assert there.stats()["served"] == {}


def test_a_call_without_a_secret_or_with_nonsense_is_refused(stack: ExitStack, tmp_path: Path) -> None:
    away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
    there = stack.enter_context(exchange("away", away.path))
    channel = stack.enter_context(grpc.insecure_channel(there.info()["address"]))
    fetch = channel.unary_stream(wire.FETCH, page_transfer_pb2.FetchRequest.SerializeToString, None)
    secret = ((wire.SECRET_KEY, SECRET),)

    for metadata, message, code in (
        ((), page_transfer_pb2.FetchRequest(node_id="away"), grpc.StatusCode.UNAUTHENTICATED),
        (secret, page_transfer_pb2.FetchRequest(node_id="home"), grpc.StatusCode.NOT_FOUND),
        (secret, page_transfer_pb2.FetchRequest(node_id="away"), grpc.StatusCode.INVALID_ARGUMENT),
        (
            secret,
            page_transfer_pb2.FetchRequest(node_id="away", keys=bytes(33)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            list(fetch(message, metadata=metadata, timeout=120))
        assert refused.value.code() == code  # type: ignore[attr-defined]
    assert len(away.workers) == 1, "the node did not hear of it"


def test_another_node_at_the_address_is_not_asked(stack: ExitStack, tmp_path: Path) -> None:
    home, _ = home_of(stack, tmp_path)
    away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
    there = stack.enter_context(exchange("away", away.path))

    ended = home.ended(home.order("elsewhere", there.info()["address"], range(2)))

    assert ended.reason == "load_failed"
    assert "there answers node away" in ended.detail


def test_a_silent_peer_is_given_up_and_holds_nothing_up(stack: ExitStack, tmp_path: Path) -> None:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    home, here = home_of(stack, tmp_path, grace_s=0.5, streams=1)
    away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
    there = stack.enter_context(exchange("away", away.path))
    away.put(0)

    stuck = home.order("silent", f"127.0.0.1:{silent.getsockname()[1]}", range(2), deadline_s=60.0)
    fine = home.order("away", there.info()["address"], range(1))

    assert home.ended(fine).failed == []
    assert home.ends(stuck) == []
    ended = home.ended(stuck)
    assert (ended.reason, len(ended.failed)) == ("deadline", 2)
    assert 0.5 <= ended.seconds < 20.0
    assert here.stats()["fetches"] == 0


def test_a_peer_that_is_not_there_is_left_alone_after_some_tries(stack: ExitStack, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    home, here = home_of(stack, tmp_path, grace_s=20.0)

    for _ in range(OPEN_AFTER):
        assert home.ended(home.order("away", address, range(1))).reason == "load_failed"

    ended = home.ended(home.order("away", address, range(1)))
    assert "is left alone" in ended.detail
    assert here.stats()["fetched"]["away"]["breaker"] == "open"


class Proxy:
    """Passes bytes on between clients and `address`; `back` says how, for connection number 0, 1, ...

    It gets the two sockets and passes what the server says to the client; the other direction is passed on whole.
    """

    def __init__(
        self, address: str, back: Callable[[int, socket.socket, socket.socket, threading.Event], None]
    ):
        self._target = address.rpartition(":")[::2]
        self._back = back
        self.ending = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self.ending.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            server = socket.create_connection((self._target[0], int(self._target[1])))
            arguments = (self.connections, server, client, self.ending)
            self.connections += 1
            for work, given in ((forward, (client, server, self.ending)), (self._back, arguments)):
                self._threads.append(threading.Thread(target=work, args=given, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join(120)
        self._listener.close()


def forward(
    source: socket.socket, target: socket.socket, ending: threading.Event, most: int = 1 << 62
) -> None:
    """Pass on at most so many bytes."""
    passed = 0
    while not ending.is_set() and passed < most:
        try:
            if not select.select([source], [], [], 0.05)[0]:
                continue
            data = source.recv(min(65536, most - passed))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
        except (OSError, ValueError):
            return
        passed += len(data)


def reset(*sockets: socket.socket) -> None:
    """End connections by a reset, not by a close."""
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()


@contextmanager
def proxy(address: str, back: Callable[..., None]) -> Iterator[Proxy]:
    made = Proxy(address, back)
    try:
        yield made
    finally:
        made.close()


def far_pair(
    stack: ExitStack, folder: Path, back: Callable[..., None], count: int, nbytes: int, **options: Any
) -> tuple[StubNode, PageExchangeProcess, Proxy, StubNode]:
    home = stack.enter_context(stub(folder, "home", nbytes=nbytes))
    here = stack.enter_context(exchange("home", home.path, same_host="off", **options))
    away = stack.enter_context(stub(folder, "away", nbytes=nbytes))
    there = stack.enter_context(exchange("away", away.path, stall_s=0.5))
    away.put(*range(count))
    between = stack.enter_context(proxy(there.info()["address"], back))
    return home, here, between, away


def test_after_a_reset_in_the_middle_the_rest_is_asked_for_once_more(
    stack: ExitStack, tmp_path: Path
) -> None:
    def back(number: int, server: socket.socket, client: socket.socket, ending: threading.Event) -> None:
        forward(server, client, ending, 9_000_000 if number == 0 else 1 << 62)
        if number == 0:
            reset(client, server)

    home, here, between, away = far_pair(stack, tmp_path, back, 16, 2**20, grace_s=20.0)

    fetch = home.order("away", between.address, range(16))

    assert home.ended(fetch).failed == []
    assert home.stored(fetch) == set(range(16))
    assert between.connections == 2
    assert here.stats()["fetched"]["away"]["pages"] == 16, "none came twice"
    until(lambda: not away.leases, "the peer's requests are released")


def test_after_two_resets_what_came_stays_and_the_rest_fails(stack: ExitStack, tmp_path: Path) -> None:
    def back(number: int, server: socket.socket, client: socket.socket, ending: threading.Event) -> None:
        forward(server, client, ending, 5_000_000)
        reset(client, server)

    home, _, between, away = far_pair(stack, tmp_path, back, 16, 2**20, grace_s=20.0)

    fetch = home.order("away", between.address, range(16))

    ended = home.ended(fetch)
    assert ended.reason == "load_failed"
    assert {key_of(number) for number in home.stored(fetch)} | {key for key, _ in ended.failed} == {
        key_of(number) for number in range(16)
    }
    assert between.connections == 2
    until(lambda: not away.leases, "the peer's requests are released")


def test_a_peer_at_a_kilobyte_a_second_is_given_up_long_before_the_deadline(
    stack: ExitStack, tmp_path: Path
) -> None:
    def back(number: int, server: socket.socket, client: socket.socket, ending: threading.Event) -> None:
        forward(server, client, ending, 4_000)  # the connection and the first answers
        while not ending.wait(0.1):
            forward(server, client, ending, 100)

    home, here, between, away = far_pair(stack, tmp_path, back, 4, 2**20, grace_s=1.0)

    fetch = home.order("away", between.address, range(4), deadline_s=60.0)

    ended = home.ended(fetch)
    assert ended.reason == "deadline"
    assert len(ended.failed) == 4
    assert ended.seconds < 30.0
    until(lambda: not away.leases, "the peer's request is released")
    assert here.stats()["fetches"] == 0


def test_a_caller_that_takes_nothing_is_hung_up_on_and_its_leases_end(
    stack: ExitStack, tmp_path: Path
) -> None:
    away = stack.enter_context(stub(tmp_path, "away", nbytes=2**20))
    there = stack.enter_context(exchange("away", away.path, stall_s=0.4))
    away.put(*range(40))
    channel = stack.enter_context(grpc.insecure_channel(there.info()["address"], wire.CHANNEL_OPTIONS))
    fetch = channel.unary_stream(wire.FETCH, page_transfer_pb2.FetchRequest.SerializeToString, None)
    message = page_transfer_pb2.FetchRequest(
        node_id="away",
        root=envelope_of(0, 1).root,
        tenant=envelope_of(0, 1).tenant,
        page_tokens=16,
        keys=b"".join(key_of(number) for number in range(40)),
        variant="bf16",
        spec_digest=envelope_of(0, 1).spec_digest,
        payload_bytes=2**20,
        wait_ms=60_000,
    )

    call = fetch(message, metadata=((wire.SECRET_KEY, SECRET),), timeout=60)
    next(call)

    until(lambda: there.stats()["streams"] == 0, "the stream is ended")
    until(lambda: not away.leases, "its leases end")
    assert any("took no pages" in note for note in there.notes())
    call.cancel()


def test_a_caller_that_goes_away_frees_what_was_held_for_it(stack: ExitStack, tmp_path: Path) -> None:
    away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
    there = stack.enter_context(exchange("away", away.path))
    away.put(*range(4))
    away.held_back.add(3)
    home, here = home_of(stack, tmp_path, grace_s=60.0)
    fetch = home.order("away", there.info()["address"], range(4))
    until(lambda: home.stored(fetch) == {0, 1, 2}, "what is at hand comes")

    here.stop()

    until(lambda: not away.leases, "the request is released")
    until(lambda: there.stats()["streams"] == 0, "the stream is ended")
