"""Pages between nodes: what one exchange has, the other's node gets, checked, over gRPC and through shared memory."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from peer_stub import (
    PAGE_TOKENS,
    SECRET,
    StubNode,
    envelope_of,
    exchange,
    key_of,
    payload_of,
    stub,
)
from waiting import until

from kvtier.cluster.transfer import channels as exchange_channels
from kvtier.cluster.transfer import wire as exchange_wire
from kvtier.cluster.transfer.actor import PageExchangeProcess
from kvtier.cluster.transfer.node_link import is_damaged
from kvtier.cluster.transfer.wire import TlsFiles
from kvtier.tier.pages.page import HEADER_BYTES, PACKED_ENVELOPE_BYTES, page_checksum
from kvtier.tier.protocol.messages import Grant, HostPage


class Pair:
    """Two nodes with an exchange each; `home` fetches from `away`."""

    def __init__(
        self, home: StubNode, away: StubNode, here: PageExchangeProcess, there: PageExchangeProcess
    ) -> None:
        self.home, self.away, self.here, self.there = home, away, here, there
        self.address: str = there.info()["address"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(stack: ExitStack, folder: Path, same_host: str = "off", nbytes: int = 4096, **options: Any) -> Pair:
    home = stack.enter_context(stub(folder, "home", nbytes=nbytes))
    away = stack.enter_context(stub(folder, "away", nbytes=nbytes))
    here = stack.enter_context(exchange("home", home.path, same_host=same_host, **options))
    there = stack.enter_context(exchange("away", away.path, same_host=same_host, **options))
    return Pair(home, away, here, there)


@pytest.mark.parametrize("same_host", ["off", "auto"])
@pytest.mark.parametrize("nbytes", [512, 4096, 300_000, 5_000_000])
def test_pages_come_whole_in_all_sizes(stack: ExitStack, tmp_path: Path, same_host: str, nbytes: int) -> None:
    world = pair(stack, tmp_path, same_host, nbytes)
    world.away.put(*range(20))

    fetch = world.home.order("away", world.address, range(3, 20))

    ended = world.home.ended(fetch)
    assert (ended.failed, ended.reason, ended.nbytes) == ([], "", 17 * nbytes)
    assert ended.seconds > 0
    assert world.home.stored(fetch) == set(range(3, 20))
    until(lambda: world.away.num_leases() == 0, "all leases end")
    peers = {ref.worker_id for ref in world.away.workers}
    assert ("exchange:home" in peers) == (same_host == "auto"), "memory is used where it may be"
    assert world.here.stats()["fetched"]["away"]["pages"] == 17
    if same_host == "off":
        served = until(lambda: world.there.stats()["served"].get("home"), "it is counted")
        assert served["calls"] == 1


def test_calls_of_strangers_that_send_nothing_hold_nothing_up(stack: ExitStack, tmp_path: Path) -> None:
    """Each held a thread until its message came: twenty of them kept all peers out."""
    world = pair(stack, tmp_path)
    world.away.put(0)
    never = threading.Event()
    stack.callback(never.set)

    def nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    channel = stack.enter_context(grpc.insecure_channel(world.address))
    calls = [
        channel.stream_stream(method)(nothing()) for method in (exchange_wire.MEET, exchange_wire.FETCH) * 50
    ]

    codes = {call.code() for call in calls}
    fetch = world.home.order("away", world.address, range(1))

    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert world.home.ended(fetch).failed == []
    garbage = channel.unary_stream(exchange_wire.FETCH)(b"\xff\xff\xff")
    assert garbage.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_pages_come_as_they_are_loaded_in_any_order(stack: ExitStack, tmp_path: Path, same_host: str) -> None:
    world = pair(stack, tmp_path, same_host)
    world.away.put(*range(6))
    world.away.held_back |= {1, 3, 5}

    fetch = world.home.order("away", world.address, range(6))
    until(lambda: world.home.stored(fetch) == {0, 2, 4}, "what is at hand comes at once")
    until(lambda: world.away.num_leases() == 0, "what was sent is held no longer")
    for number in (5, 1, 3):
        world.away.load(number)
        until(lambda number=number: number in world.home.stored(fetch), f"page {number} comes")  # type: ignore[misc]

    assert world.home.ended(fetch).failed == []


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_where_the_chain_ends_there_the_reason_is_the_peers(
    stack: ExitStack, tmp_path: Path, same_host: str
) -> None:
    world = pair(stack, tmp_path, same_host)
    world.away.put(0, 1)

    fetch = world.home.order("away", world.address, range(4))

    ended = world.home.ended(fetch)
    assert [key for key, _ in ended.failed] == [page.key for page in fetch.pages[2:]]
    assert (ended.reason, ended.detail) == ("evicted", "page 2 is gone")
    assert world.home.stored(fetch) == {0, 1}
    assert world.here.stats()["fetched"]["away"]["failures"] == {"evicted": 1}
    assert world.here.stats()["fetched"]["away"]["breaker"] == "closed"


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_a_cancelled_fetch_lets_go_of_the_peers_pages(
    stack: ExitStack, tmp_path: Path, same_host: str
) -> None:
    world = pair(stack, tmp_path, same_host, grace_s=60.0)
    world.away.put(*range(3))
    world.away.held_back.add(2)
    fetch = world.home.order("away", world.address, range(3))
    until(lambda: world.home.stored(fetch) == {0, 1}, "the first pages come")

    world.home.cancel(fetch)

    assert len(world.home.ended(fetch).failed) == 1
    until(lambda: not world.away.leases, "the peer's request is released")
    world.away.load(2)
    again = world.home.order("away", world.address, range(3))
    assert world.home.ended(again).failed == []


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_a_fetch_ends_at_its_deadline_and_lets_go(stack: ExitStack, tmp_path: Path, same_host: str) -> None:
    world = pair(stack, tmp_path, same_host, grace_s=60.0)
    world.away.put(*range(3))
    world.away.held_back.add(2)

    fetch = world.home.order("away", world.address, range(3), deadline_s=0.5)

    ended = world.home.ended(fetch)
    assert (ended.reason, len(ended.failed)) == ("deadline", 1)
    until(lambda: not world.away.leases, "the peer's request is released")


@pytest.mark.parametrize("at", [None, 0, 40, PACKED_ENVELOPE_BYTES - 1], ids=str)
@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_a_damaged_copy_is_dropped_where_it_lies(
    stack: ExitStack, tmp_path: Path, same_host: str, at: int | None
) -> None:
    """By gRPC the first fetch only sees it: the peer is asked to look in the next one, finds it, and is not to blame."""
    world = pair(stack, tmp_path, same_host)
    world.away.put(*range(4))
    world.away.spoil(2, at)

    for _ in range(1 if same_host == "auto" else 2):
        fetch = world.home.order("away", world.address, range(4))
        ended = world.home.ended(fetch)
        assert ended.reason == "corrupt"
        assert world.home.stored(fetch) == {0, 1}

    until(lambda: not world.away.has(2), "the peer has dropped it")
    assert world.home.ended(world.home.order("away", world.address, range(4))).reason == "evicted"
    assert world.here.stats()["fetched"]["away"]["breaker"] == "closed"


@pytest.mark.parametrize(
    "changes", [{"key": key_of(8)}, {"variant": "int8"}, {"spec_digest": b"another spec...."}]
)
@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_another_whole_page_in_a_slot_is_dropped_as_a_damaged_one_is(
    stack: ExitStack, tmp_path: Path, same_host: str, changes: dict[str, Any]
) -> None:
    """Its own checksum fits, so only what the node says of the slot shows that it is another one."""
    world = pair(stack, tmp_path, same_host)
    world.away.put(*range(4))
    world.away.overwrite(2, payload_of(8, 4096), **changes)

    for _ in range(1 if same_host == "auto" else 2):
        fetch = world.home.order("away", world.address, range(4))
        assert world.home.ended(fetch).reason == "corrupt"
        assert world.home.stored(fetch) == {0, 1}

    until(lambda: not world.away.has(2), "the peer has dropped it")
    assert world.here.stats()["fetched"]["away"]["breaker"] == "closed"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"key": key_of(8)},
        {"variant": "int8"},
        {"spec_digest": b"another spec...."},
        {"tokens": PAGE_TOKENS - 1},
        {"payload": payload_of(8, 512)},
    ],
    ids=["what it says", "key", "variant", "spec", "tokens", "payload"],
)
def test_a_slot_is_whole_only_where_it_holds_just_what_its_node_says(change: dict[str, Any]) -> None:
    """Each change is a whole page by its own checksums."""
    payload = change.get("payload", payload_of(2, 512))
    said = envelope_of(2, 512)
    fields = {name: value for name, value in change.items() if name != "payload"}
    found = envelope_of(2, 512, **fields)
    checksum = page_checksum(found.key, found.variant, found.spec_digest, payload)
    packed = envelope_of(2, 512, **fields, checksum=checksum).pack()
    slot = bytearray(packed.ljust(HEADER_BYTES, b"\0") + payload)
    page = HostPage(
        *((0, 2), Grant(0, 1, 512), said.key, said.variant, said.spec_digest, said.checksum, said.tokens),
        came_from="L3",
    )

    assert is_damaged(page, memoryview(slot)) == bool(change)

    for at in (5, HEADER_BYTES + 77):
        slot[at] ^= 1
        assert is_damaged(page, memoryview(slot)), "a bit has flipped"
        slot[at] ^= 1


def test_more_calls_than_are_served_at_once_are_refused_for_now(stack: ExitStack, tmp_path: Path) -> None:
    world = pair(stack, tmp_path, max_streams=1, grace_s=60.0)
    world.away.put(*range(3))
    world.away.held_back.add(0)
    first = world.home.order("away", world.address, range(1))
    until(lambda: world.there.stats()["streams"] == 1, "the first is served")

    second = world.home.order("away", world.address, range(1, 3))

    assert world.home.ended(second).reason == "no_room"
    assert world.here.stats()["fetched"]["away"]["breaker"] == "closed"
    world.away.load(0)
    assert world.home.ended(first).failed == []


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_when_the_peers_cache_dies_its_pages_fail_and_come_again_when_it_is_back(
    stack: ExitStack, tmp_path: Path, same_host: str
) -> None:
    world = pair(stack, tmp_path, same_host, grace_s=60.0)
    world.away.put(*range(3))
    world.away.held_back.add(2)
    fetch = world.home.order("away", world.address, range(3))
    until(lambda: world.home.stored(fetch) == {0, 1}, "the first pages come")

    world.away.close()

    assert world.home.ended(fetch).reason == "load_failed"
    until(lambda: world.there.health() is not None, "the exchange says so")
    back = stack.enter_context(stub(tmp_path, "away"))
    back.put(*range(3))
    until(lambda: world.there.health() is None, "it is connected again")
    again = world.home.order("away", world.address, range(3))
    assert world.home.ended(again).failed == []
    assert world.home.stored(again) == {0, 1, 2}


def test_when_its_own_cache_dies_an_exchange_serves_the_next_one(stack: ExitStack, tmp_path: Path) -> None:
    world = pair(stack, tmp_path, grace_s=60.0)
    world.away.put(*range(3))
    world.away.held_back.add(2)
    fetch = world.home.order("away", world.address, range(3))
    until(lambda: world.home.stored(fetch) == {0, 1}, "the first pages come")

    world.home.close()

    until(lambda: not world.away.leases, "the peer's request is released")
    back = stack.enter_context(stub(tmp_path, "home"))
    again = back.order("away", world.address, range(2))
    assert back.ended(again).failed == [], "the same number, from another life, is another fetch"
    assert back.stored(again) == {0, 1}


def test_where_the_memory_cannot_be_reached_pages_come_by_grpc(stack: ExitStack, tmp_path: Path) -> None:
    world = pair(stack, tmp_path, "auto")
    world.away.put(0)
    Path(world.away.path).unlink()

    assert world.home.ended(world.home.order("away", world.address, range(1))).failed == []
    assert any("come by gRPC" in note for note in world.here.notes())


def test_after_a_peers_cache_restarted_unasked_its_memory_is_reached_again(
    stack: ExitStack, tmp_path: Path
) -> None:
    """While nothing was fetched: no call failed, so nothing told of it, and the pages came by gRPC for good."""
    world = pair(stack, tmp_path, "auto")
    world.away.put(*range(3))
    assert world.home.ended(world.home.order("away", world.address, range(2))).failed == []
    assert world.there.stats()["served"] == {}

    world.away.close()
    until(lambda: world.there.health() is not None, "its exchange notices")
    back = stack.enter_context(stub(tmp_path, "away"))
    back.put(*range(3))
    until(lambda: world.there.health() is None, "its exchange is connected again")
    fetch = world.home.order("away", world.address, range(3))

    assert world.home.ended(fetch).failed == []
    assert "exchange:home" in {ref.worker_id for ref in back.workers}
    assert world.there.stats()["served"] == {}, "nothing came by gRPC"


def test_memory_that_was_out_of_reach_is_reached_by_a_later_fetch(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_channels, "ASK_FIRST_S", 0.0)
    world = pair(stack, tmp_path, "auto")
    world.away.put(*range(2))
    path = Path(world.away.path)
    path.rename(tmp_path / "elsewhere")
    assert world.home.ended(world.home.order("away", world.address, range(1))).failed == []
    assert "exchange:home" not in {ref.worker_id for ref in world.away.workers}

    (tmp_path / "elsewhere").rename(path)

    assert world.home.ended(world.home.order("away", world.address, range(2))).failed == []
    assert "exchange:home" in {ref.worker_id for ref in world.away.workers}


def test_another_node_at_the_path_is_not_taken_for_the_peer(stack: ExitStack, tmp_path: Path) -> None:
    world = pair(stack, tmp_path, "auto")
    world.away.put(0)
    other = stack.enter_context(stub(tmp_path, "other"))
    other.put(0)
    Path(world.away.path).unlink()
    Path(world.away.path).symlink_to(other.path)

    assert world.home.ended(world.home.order("away", world.address, range(1))).failed == []
    assert any("answers node other" in note for note in world.here.notes())
    until(lambda: not other.workers, "it is let go of")


def test_what_is_asked_of_an_exchange_without_a_cache_fails(stack: ExitStack, tmp_path: Path) -> None:
    home = stack.enter_context(stub(tmp_path, "home"))
    stack.enter_context(exchange("home", home.path))
    lonely = PageExchangeProcess("away", str(tmp_path / "no such"), "127.0.0.1", 0, SECRET)
    stack.callback(lonely.stop)

    ended = home.ended(home.order("away", lonely.info()["address"], range(2)))

    assert ended.reason == "load_failed"
    assert "the cache of node away is away" in ended.detail
    assert lonely.health() == "the cache of node away is away"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=r"set transfer\.port to another"):
            PageExchangeProcess("home", str(tmp_path / "s"), "127.0.0.1", port, SECRET)


def test_with_tls_both_sides_show_a_certificate(stack: ExitStack, tmp_path: Path) -> None:
    authority = trustme.CA()
    pair_of = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    pair_of.private_key_pem.write_to_path(tmp_path / "key")
    pair_of.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    files = TlsFiles(str(tmp_path / "cert"), str(tmp_path / "key"), str(tmp_path / "ca"))
    world = pair(stack, tmp_path, tls=files)
    world.away.put(0, 1)
    plain = stack.enter_context(stub(tmp_path, "plain"))
    stack.enter_context(exchange("plain", plain.path))

    assert world.home.ended(world.home.order("away", world.address, range(2))).failed == []
    assert plain.ended(plain.order("away", world.address, range(2))).reason == "load_failed"


def test_a_stopped_exchange_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def once(name: str) -> None:
        with ExitStack() as stack:
            world = pair(stack, tmp_path / name, "auto")
            world.away.put(*range(4))
            assert world.home.ended(world.home.order("away", world.address, range(4))).failed == []

    def mine() -> list[str]:
        return [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(("exchange", "node-client"))
        ]

    once("first")  # what gRPC keeps for good is there from now on
    until(lambda: not mine(), "its threads end")
    before = len(os.listdir("/proc/self/fd"))

    for number in range(3):
        once(str(number))

    until(lambda: not mine(), "its threads end")
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "its descriptors are closed")
