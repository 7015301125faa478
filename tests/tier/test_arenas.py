"""Arenas that several processes open, and the descriptors that travel with the socket's messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from node_kit import FIELDS, PAYLOAD_BYTES, SPEC
from waiting import until

from kvtier.tier.l1.arena import Arena as L1Arena
from kvtier.tier.l1.arena import ArenaShare, new_shared_arena, open_peer
from kvtier.tier.protocol.events import FromWorker, WorkerGone
from kvtier.tier.protocol.ipc import NodeClient, NodeServer
from kvtier.tier.protocol.messages import Arena, Grant, Granted, Hello, NewRoot, Welcome

CPU = torch.device("cpu")
LONG = Granted([Grant(2**31 + slot, 2**31, 4096) for slot in range(30_000)])  # 300 KB and more


def hello(name: str, arena_bytes: int = 0) -> Hello:
    return Hello(name, f"life of {name}", {SPEC: PAYLOAD_BYTES}, {}, FIELDS, arena_bytes=arena_bytes)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Node:
    """A server that welcomes all, on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.server = NodeServer(folder / "s", None)
        self.gone: list[str] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            for event in self.server.poll(None):
                if isinstance(event, WorkerGone):
                    self.gone.append(event.worker.worker_id)
                elif isinstance(event.message, Hello):
                    self.server.send(event.worker, Welcome("n0", "i", 0))
                elif isinstance(event.message, NewRoot):
                    self.answer(event)

    def answer(self, event: FromWorker) -> None:
        """A worker names lenders, and hears of their arenas between long messages."""
        assert isinstance(event.message, NewRoot)
        for lender in event.message.root_fields:
            self.server.send(event.worker, LONG)
            self.server.send(event.worker, Arena(f"life of {lender}", 4096, b""))

    def close(self) -> None:
        self._is_over = True
        self.server.wake()
        self._thread.join()
        self.server.close()


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    made = Node(folder)
    try:
        yield made
    finally:
        made.close()


class PeerExport:
    """A client that lends an arena."""

    def __init__(self, folder: Path, name: str) -> None:
        self.arena, self.share = new_shared_arena(4, 1024)
        assert self.share.fd is not None
        self.lifeline, held = os.pipe2(os.O_NONBLOCK)
        self.inode = os.fstat(self.share.fd).st_ino
        self.client = NodeClient.connect(
            folder / "s",
            hello(name, self.share.nbytes),
            lambda message: None,
            lambda: None,
            arena_fds=(held, self.share.fd),
        )
        os.close(held)

    def close(self) -> None:
        self.client.close()
        self.share.close()
        os.close(self.lifeline)

    @property
    def is_let_go(self) -> bool:
        try:
            return not os.read(self.lifeline, 1)
        except BlockingIOError:
            return False


def test_each_arena_comes_with_its_own_descriptors_however_the_stream_is_cut(tmp_path: Path) -> None:
    before = open_fds()
    heard: list[Any] = []
    with node(tmp_path):
        lenders = {name: PeerExport(tmp_path, name) for name in "abcde"}
        borrower = NodeClient.connect(tmp_path / "s", hello("z"), heard.append, lambda: None)
        borrower.send(NewRoot(dict.fromkeys("cabedc", "")))
        until(lambda: sum(isinstance(message, Arena) for message in heard) == 5, "all arenas come")
        for name, lender in lenders.items():
            lifeline, memfd = borrower.take_arena_fds(f"life of {name}")
            assert os.fstat(memfd).st_ino == lender.inode
            os.close(lifeline)
            os.close(memfd)
            assert borrower.take_arena_fds(f"life of {name}") == []
        borrower.close()
        for lender in lenders.values():
            lender.close()
            lender.arena = torch.empty(0)  # its mapping has a descriptor of its own
    until(lambda: not open_fds() - before, "what was opened is closed")


def test_a_lifeline_is_open_as_long_as_the_node_or_a_peer_may_use_the_arena(tmp_path: Path) -> None:
    heard: list[Any] = []
    with node(tmp_path) as running:
        lender = PeerExport(tmp_path, "a")
        borrower = NodeClient.connect(tmp_path / "s", hello("z"), heard.append, lambda: None)
        borrower.send(NewRoot({"a": ""}))
        until(lambda: any(isinstance(message, Arena) for message in heard), "the arena comes")
        lender.client.close()
        until(lambda: running.gone == ["a"], "the node lets its descriptors go")
        assert not lender.is_let_go

        borrower.close()

        until(lambda: lender.is_let_go, "nothing holds it")
        lender.close()


def test_a_peer_that_dies_before_it_has_read_holds_nothing(tmp_path: Path) -> None:
    before = open_fds()
    with node(tmp_path) as running:
        lender = PeerExport(tmp_path, "a")
        borrower = NodeClient.connect(tmp_path / "s", hello("z"), lambda message: None, lambda: None)
        borrower.send(NewRoot(dict.fromkeys("aaaa", "")))
        borrower.close()
        until(lambda: "z" in running.gone, "the node hears of it")
        lender.client.close()
        until(lambda: lender.is_let_go, "nothing holds it")
        lender.close()
        lender.arena = torch.empty(0)  # its mapping has a descriptor of its own
    until(lambda: not open_fds() - before, "what was opened is closed")


def test_a_hello_that_lends_without_descriptors_is_no_hello(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        with pytest.raises(ConnectionError):
            NodeClient.connect(
                tmp_path / "s", hello("a", 4096), lambda message: None, lambda: None, timeout_s=5.0
            )
        until(lambda: running.server.notes, "it is noted")
        assert "an arena with 0 descriptors" in running.server.notes[0]


def test_what_one_process_writes_another_reads() -> None:
    tensor, share = new_shared_arena(4, 1000)
    assert share.fd is not None and share.nbytes == 4000
    peer = open_peer(share.nbytes, share.fd, b"", CPU)
    mine, own = L1Arena(new_shared_arena(4, 1000)[0]), L1Arena(tensor)
    page = np.random.default_rng(0).bytes(1000)

    mine.copy_in(2, memoryview(page))
    mine.copy_to_peer(2, peer, 3000, 1000)
    assert bytes(tensor[3].numpy()) == page and not tensor[:3].any()
    own.move(3, 0, 1000)
    mine.copy_from_peer(1, peer, 0, 1000)

    view = mine.host_bytes(1, 1000)
    assert view is not None and bytes(view) == page
    with pytest.raises(ValueError, match="1000 bytes at 3001 end behind a peer's arena of 4000"):
        mine.copy_from_peer(1, peer, 3001, 1000)
    peer.close()
    share.close()


def test_an_arena_that_could_shrink_or_is_too_small_is_not_opened() -> None:
    _, share = new_shared_arena(1, 4096)
    with pytest.raises(ValueError, match="can't lie in a file of"):
        open_peer(1 << 30, share.fd, b"", CPU)
    share.close()
    with pytest.raises(ValueError, match="can't be opened on cpu"):
        open_peer(4096, None, b"", CPU)
    loose = ArenaShare(4096, os.memfd_create("loose"))
    assert loose.fd is not None
    os.ftruncate(loose.fd, 4096)
    with pytest.raises(ValueError, match="may shrink"):
        open_peer(4096, loose.fd, b"", CPU)
    loose.close()
