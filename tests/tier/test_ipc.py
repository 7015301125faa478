"""The socket between workers and node: frames, garbage, slow peers, and whose close means what."""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from node_kit import FIELDS, PAYLOAD_BYTES, SPEC, Peer, hello_of, plain_chain, running, wait_until

from kvtier.tier.node.service import CacheService
from kvtier.tier.protocol import ipc
from kvtier.tier.protocol import parts as message_parts
from kvtier.tier.protocol.events import FromWorker, WorkerGone, WorkerRef
from kvtier.tier.protocol.ipc import Garbage, MessageReader, NodeClient, NodeRefused, NodeServer, frame
from kvtier.tier.protocol.messages import (
    Grant,
    Granted,
    Hello,
    Loaded,
    Locate,
    Located,
    Release,
    ToNode,
    WantSlots,
    Welcome,
)

HELLO = hello_of("w0")


@contextmanager
def raw_socket(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(120)
        raw.connect(str(folder / "run" / "sock"))
        yield raw


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ends(raw: socket.socket) -> bool:
    """The node says no more on this connection."""
    try:
        while raw.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


# ---- frames ------------------------------------------------------------------------------------------------------


def test_frames_are_read_however_the_stream_is_cut() -> None:
    messages: list[ToNode] = [HELLO, WantSlots(3, PAYLOAD_BYTES), Release("r", 2)]
    stream = b"".join(frame(message) for message in messages)

    for size in (1, 3, 7, len(stream)):
        reader = MessageReader(ToNode)
        got = [m for at in range(0, len(stream), size) for m in reader.feed(stream[at : at + size])]
        assert got == messages


@pytest.mark.parametrize(
    "garbage",
    [struct.pack("<I", 2**31), struct.pack("<I", 3) + b"\xc1\xc1\xc1", frame(Welcome("n", "i", 1))],
    ids=["too long", "no msgpack", "a message of the other side"],
)
def test_bytes_that_are_no_message_are_garbage(garbage: bytes) -> None:
    with pytest.raises(Garbage):
        MessageReader(ToNode).feed(garbage)


def test_a_message_too_long_to_be_taken_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most"):
        frame(Release("x" * ipc.MAX_FRAME_BYTES))


# ---- descriptors -------------------------------------------------------------------------------------------------


def test_a_process_without_descriptors_accepts_again_when_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "ACCEPT_AGAIN_S", 0.05)
    with running(tmp_path) as service:
        first = Peer(tmp_path, "first")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
            late.settimeout(120)
            with no_descriptors():
                late.connect(str(tmp_path / "run" / "sock"))
                wait_until(lambda: any("is accepted for now" in note for note in service.notes()))
                assert len(first.store(0, 1)) == 1  # those that are connected are served
            late.sendall(frame(HELLO))
            assert late.recv(1)  # it was not lost
        assert sum("is accepted for now" in note for note in service.notes()) == 1
        assert service.health() is None
        first.close()


# ---- connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        frame(WantSlots(1, PAYLOAD_BYTES)),
        frame(HELLO) + frame(HELLO),
    ],
    ids=["http", "random", "no hello", "two hellos"],
)
def test_garbage_ends_its_connection_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    with running(tmp_path) as service:
        good = Peer(tmp_path, "good")
        with raw_socket(tmp_path) as raw:
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            assert ends(raw)

        assert good.store(0, 2)
        wait_until(lambda: any("disconnected" in note for note in service.notes()) or garbage[:3] == b"GET")
        good.close()


def test_a_half_sent_frame_at_the_end_is_no_message(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        with raw_socket(tmp_path) as raw:
            raw.sendall(frame(HELLO)[:-3])
        peer = Peer(tmp_path)
        assert len(peer.store(0, 1)) == 1
        peer.close()
        assert service.health() is None


def test_the_socket_lies_in_a_folder_for_this_user_only(tmp_path: Path) -> None:
    with running(tmp_path):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert not (tmp_path / "run" / "sock").exists()


def test_a_socket_path_too_long_for_the_kernel_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 107 bytes"):
        NodeServer(tmp_path / ("x" * 120), None)


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_CONNECTIONS", 1)
    with running(tmp_path) as service:
        first = Peer(tmp_path)
        with pytest.raises(ConnectionError):
            Peer(tmp_path, "w1")
        assert len(first.store(0, 1)) == 1
        wait_until(lambda: any("was refused" in note for note in service.notes()))
        first.close()


def test_a_connection_that_says_no_hello_is_dropped_and_one_that_said_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "HELLO_S", 0.2)
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        with raw_socket(tmp_path) as silent, raw_socket(tmp_path) as halfway:
            halfway.sendall(frame(HELLO)[:-1])
            assert ends(silent) and ends(halfway)

        assert len(peer.store(0, 1)) == 1
        peer.close()
        wait_until(lambda: sum("has said no Hello in 0.2 s" in note for note in service.notes()) == 2)


def test_silent_connections_however_many_keep_no_worker_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_STRANGERS", 3)
    monkeypatch.setattr(ipc, "MAX_CONNECTIONS", 4)
    with running(tmp_path), ExitStack() as stack:
        silent = [stack.enter_context(raw_socket(tmp_path)) for _ in range(6)]
        peer = Peer(tmp_path)

        assert len(peer.store(0, 1)) == 1
        assert all(map(ends, silent[:3])), "the oldest ones make room"
        peer.close()


def test_a_worker_that_makes_the_node_say_too_much_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 8)
        last = len(keys) * peer.page_tokens
        locate = Locate("r", peer.root, peer.tenant, peer.page_tokens, 0, last, [plain_chain(keys)], 0.0)
        monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", len(frame(locate)))  # it fits, and its answer doesn't
        peer.client.send(locate)
        assert peer.is_closed.wait(120)
        peer.close()
        assert service.health() is None


def test_no_node_is_a_connection_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no CacheNode answers"):
        NodeClient.connect(tmp_path / "none", HELLO, lambda message: None, lambda: None)


def test_a_worker_with_other_pages_is_refused_with_the_reason(tmp_path: Path) -> None:
    with running(tmp_path):
        hello = Hello("w0", "1", {SPEC: PAYLOAD_BYTES + 4096}, {}, FIELDS)
        with pytest.raises(NodeRefused, match="pages of 20480 bytes can't go into L3"):
            NodeClient.connect(tmp_path / "run" / "sock", hello, lambda message: None, lambda: None)


def test_the_same_incarnation_is_served_once_at_a_time(tmp_path: Path) -> None:
    with running(tmp_path):
        first = Peer(tmp_path)
        with pytest.raises(NodeRefused, match="connected with this incarnation already"):
            Peer(tmp_path)
        first.close()

        def again() -> bool:
            try:
                Peer(tmp_path).close()
            except NodeRefused:
                return False
            return True

        wait_until(again)


def test_a_connection_that_comes_as_another_ends_is_heard_after_that_end(tmp_path: Path) -> None:
    server = NodeServer(tmp_path / "run" / "sock", None)
    ref = WorkerRef("w0", "1")
    with raw_socket(tmp_path) as first:
        first.sendall(frame(HELLO))
        heard = [*server.poll(30.0), *server.poll(30.0)]
    with raw_socket(tmp_path) as second:
        server._accept()  # before the first one's end is read
        second.sendall(frame(HELLO))
        while len(heard) < 3:
            heard += server.poll(30.0)
    server.close()

    assert heard == [FromWorker(ref, HELLO), WorkerGone(ref), FromWorker(ref, HELLO)]


def test_a_newer_start_of_a_worker_fences_the_older_one(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        older = Peer(tmp_path, incarnation="1")
        newer = Peer(tmp_path, incarnation="2")

        assert older.is_closed.wait(120)
        older.close()
        newer.store(0, 2)

        assert any("a newer start" in note for note in service.notes())
        newer.close()


def test_a_client_hears_that_the_node_is_gone_once_and_not_of_its_own_close(tmp_path: Path) -> None:
    with running(tmp_path):
        leaving, staying = Peer(tmp_path, "leaving"), Peer(tmp_path, "staying")
        leaving.close()
        leaving.close()

    assert staying.is_closed.wait(120)
    with pytest.raises(ConnectionError):
        staying.client.send(WantSlots(1, PAYLOAD_BYTES))
    staying.close()
    assert not leaving.is_closed.is_set()


def test_a_client_whose_message_is_too_long_ends_its_connection_and_raises_nothing_else(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)

        with pytest.raises(ConnectionError, match=r"Release can't be sent: .* at most"):
            peer.client.send(Release("x" * ipc.MAX_FRAME_BYTES))
        assert peer.is_closed.wait(120)
        peer.close()

        assert service.health() is None


def test_a_long_list_crosses_in_parts_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_parts, "MAX_ITEMS", 3)
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 8)  # one Stored
        last = len(keys) * peer.page_tokens
        peer.client.send(
            Locate("r", peer.root, peer.tenant, peer.page_tokens, 0, last, [plain_chain(keys)], 0.0)
        )

        located, first, second = peer.hear(Located), peer.hear(Loaded), peer.hear(Loaded)

        came = [page.page for page in (*located.host, *first.pages, *second.pages)]
        assert came == [(0, i) for i in range(8)]
        assert located.loading == came[3:]
        peer.client.send(Release("r"))
        peer.close()
        wait_until(service.idle)


def test_close_may_be_called_from_the_callback(tmp_path: Path) -> None:
    done = threading.Event()

    def close() -> None:
        client.close()
        done.set()

    with running(tmp_path):
        client = NodeClient.connect(tmp_path / "run" / "sock", HELLO, lambda message: None, close)

    assert done.wait(120)


def test_sending_never_waits_for_the_node(tmp_path: Path) -> None:
    """A node that is busy: its loop isn't there at all while the worker sends more than any socket buffer holds."""
    server = NodeServer(tmp_path / "run" / "sock", None)
    clients: list[NodeClient] = []
    connecting = threading.Thread(
        target=lambda: clients.append(
            NodeClient.connect(server.path, HELLO, lambda message: None, lambda: None)
        )
    )
    connecting.start()
    ref = WorkerRef("w0", "1")
    while not any(isinstance(event, FromWorker) for event in server.poll(1.0)):
        pass
    server.send(ref, Welcome("n0", "i", 0))
    server.flush()
    connecting.join()

    messages = [Release(f"request {i} {'x' * 1000}") for i in range(2000)]
    for message in messages:
        clients[0].send(message)

    heard: list[object] = []
    while len(heard) < len(messages):
        heard += [event.message for event in server.poll(1.0) if isinstance(event, FromWorker)]
    assert heard == messages
    clients[0].close()
    while WorkerGone(ref) not in server.poll(1.0):
        pass
    server.close()


def test_a_worker_that_does_not_read_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_UNSENT_BYTES", 100_000)
    server = NodeServer(tmp_path / "run" / "sock", None)
    with raw_socket(tmp_path) as raw:
        raw.sendall(frame(HELLO))
        ref = WorkerRef("w0", "1")
        while not server.poll(1.0):
            pass

        for _ in range(100_000):
            server.send(ref, Granted([Grant(1, 1, PAYLOAD_BYTES)] * 1000))
            server.flush()
            if server.notes:
                break

        assert "bytes unread" in server.notes[0]
        raw.sendall(frame(WantSlots(1, PAYLOAD_BYTES)))
        assert server.poll(0.05) == []  # heard no more, and not gone either
        assert ends(raw)
    assert server.poll(30.0) == [WorkerGone(ref)]
    server.close()


def test_the_service_can_be_started_where_a_killed_one_left_its_socket(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "run" / "sock"))

    with running(tmp_path) as service:
        Peer(tmp_path).close()
        assert isinstance(service, CacheService)
