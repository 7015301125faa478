"""The publisher's thread: what it does when nothing answers, and that the owner of the pages never waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from kvtier.cluster.directory.core import DirectoryCore
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import KEY_BYTES, SOON_KEYS, Batch, Feed, Reply, Source
from kvtier.workers import actor as actor_module
from kvtier.workers.engine import kv_publisher as publisher_module
from kvtier.workers.engine.kv_publisher import MAX_NOTED, Holds, Outlet, Publisher, PublishError

L3 = TierName.HOST
SOURCE = Source("node:n0", "life", "n0", "", "host:1")


def key(number: int) -> bytes:
    return (number + 1).to_bytes(32, "little")


class Node:
    """The owner of some pages, and a directory that can be cut off."""

    def __init__(self) -> None:
        self.directory = DirectoryCore()
        self.lock = threading.Lock()  # of the directory
        self.pages: set[int] = set()
        self.is_cut = self.is_busy = False
        self.sends = self.snapshots = 0
        self.publisher = Publisher(Feed(SOURCE, (L3,)), self.send, self.snapshot, "n0")

    def send(self, batch: Batch) -> Reply:
        self.sends += 1
        if self.is_cut:
            raise PublishError("the line is cut")
        with self.lock:
            return self.directory.publish(batch, 0.0)

    def snapshot(self) -> Holds:
        self.snapshots += 1
        if self.is_busy:
            raise PublishError("the owner is busy")
        return {L3: [key(number) for number in list(self.pages)]}

    def change(self, came: set[int], left: set[int] | None = None) -> None:
        left = left or set()
        self.pages = (self.pages | came) - left
        self.publisher.note(L3, [key(number) for number in came], [key(number) for number in left])

    def is_known(self) -> bool:
        """The directory believes what is true."""
        with self.lock:
            return self.directory.stats(0.0).entries == len(self.pages) and all(
                self.directory.lookup(key(number)[:KEY_BYTES], 0.0) for number in list(self.pages)[:100]
            )


@contextmanager
def running(node: Node) -> Iterator[Node]:
    node.publisher.start()
    try:
        yield node
    finally:
        node.publisher.close()


def test_what_was_there_and_what_changes_is_told() -> None:
    node = Node()
    node.pages = {1, 2, 3}
    with running(node):
        until(node.is_known, "the snapshot is told")

        node.change({4, 5}, {1})
        until(node.is_known, "the change is told")

        node.directory = DirectoryCore()  # it starts again
        until(node.is_known, "all is told again")
    assert node.publisher.outages == 0


def test_an_outage_is_one_line_in_the_log_and_loses_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LAST_RETRY_S", 0.01)
    node = Node()
    with running(node), caplog.at_level(logging.WARNING):
        until(node.is_known, "the snapshot is told")
        node.is_cut = True
        node.change(set(range(100, 2000)))
        sends = node.sends
        until(lambda: node.sends > sends + 5, "it is tried again and again")
        node.change(set(range(3000, 4000)), {100, 101})
        node.is_cut = False
        until(node.is_known, "all of it is told afterwards")

    said = [record.message for record in caplog.records if "isn't told" in record.message]
    assert node.publisher.outages == 1 and len(said) == 1 and "the line is cut" in said[0]


def test_a_fault_in_sending_is_one_traceback_in_the_log_and_all_is_told_afterwards(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LAST_RETRY_S", 0.01)
    node = Node()
    answer, faults = node.send, iter(range(5))

    def faulty(batch: Batch) -> Reply:
        if next(faults, None) is not None:
            raise KeyError("a fault")
        return answer(batch)

    node.pages = {1, 2, 3}
    node.publisher = Publisher(Feed(SOURCE, (L3,)), faulty, node.snapshot, "n0")
    with running(node), caplog.at_level(logging.WARNING):
        until(node.is_known, "the snapshot is told")
        node.change({4}, {1})
        until(node.is_known, "the change is told")

    told = [record for record in caplog.records if "isn't told" in record.message]
    assert node.publisher.outages == len(told) == 1
    assert told[0].exc_info is not None and "KeyError('a fault')" in told[0].message


def test_an_owner_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "LAST_RETRY_S", 0.01)
    node = Node()
    node.is_busy = True
    with running(node):
        until(lambda: node.snapshots > 3, "it is asked again")
        node.change({1, 2})
        node.is_busy = False
        until(node.is_known, "the snapshot is told")


def mute() -> tuple[Node, threading.Event, threading.Event]:
    """A node whose directory is silent; set once it is asked, and to be set for it to answer."""
    node, entered, is_over = Node(), threading.Event(), threading.Event()
    answer = node.send

    def silent(batch: Batch) -> Reply:
        entered.set()
        is_over.wait()
        return answer(batch)

    node.publisher = Publisher(Feed(SOURCE, (L3,)), silent, node.snapshot)
    return node, entered, is_over


def test_the_owner_does_not_wait_while_the_directory_is_silent() -> None:
    node, entered, is_over = mute()
    with running(node):
        assert entered.wait(120)
        for number in range(100):  # returns, though nothing takes them
            node.change({number})
        is_over.set()
        until(node.is_known, "all of it is told afterwards")


def test_more_than_can_be_kept_meanwhile_ends_in_a_snapshot() -> None:
    node, entered, is_over = mute()
    with running(node):
        assert entered.wait(120)
        node.change({1, 2})
        node.publisher.note(L3, [key(1)] * MAX_NOTED, [])
        assert node.publisher._num_noted == 0  # nothing is kept any more
        node.change({3}, {1})
        is_over.set()
        until(node.is_known, "the snapshot is told")
    assert node.snapshots == 2


def test_many_keys_are_sent_before_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "TICK_S", 3600.0)
    node = Node()
    with running(node):
        until(node.is_known, "the snapshot is told")
        node.change(set(range(1, SOON_KEYS + 1)))
        until(node.is_known, "they are told")


def test_after_close_nothing_is_sent() -> None:
    node = Node()
    with running(node):
        until(node.is_known, "the snapshot is told")
    sends = node.sends

    node.change({1})
    node.publisher.close()

    assert node.sends == sends and not node.publisher._thread.is_alive()
    Publisher(Feed(SOURCE, (L3,)), node.send, node.snapshot).close()  # one that never began


def test_changes_go_to_the_publisher_that_was_connected_last() -> None:
    first, second, outlet = Node(), Node(), Outlet()
    outlet(L3, [key(1)], [])  # nothing hears it
    outlet.connect(first.publisher)
    until(first.is_known, "the first one is told")
    second.pages = {7}
    outlet.connect(second.publisher)
    assert not first.publisher._thread.is_alive()

    second.pages.add(8)
    outlet(L3, [key(8)], [])
    until(second.is_known, "the second one is told")
    outlet.close()

    assert first.directory.stats(0.0).entries == 0
    assert not second.publisher._thread.is_alive()


def test_while_a_late_call_goes_on_no_other_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    is_late = True

    def call(batch: str) -> str:
        calls.append(batch)
        return batch

    def get(ref: str, timeout: float) -> str:
        if is_late:
            raise actor_module.RayError("late")
        return "ok"

    ray = SimpleNamespace(get=get, wait=lambda refs, timeout: ([], refs) if is_late else (refs, []))
    monkeypatch.setattr(actor_module, "ray", ray)
    directory = SimpleNamespace(publish=SimpleNamespace(remote=call))
    send: Any = actor_module.sender_to(directory)

    for batch in ("a", "b", "c"):
        with pytest.raises(PublishError):
            send(batch)
    assert calls == ["a"]
    is_late = False
    assert send("d") == "ok" and calls == ["a", "d"]
