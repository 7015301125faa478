"""Copies that outlast what they were begun for: a clear, a connection, the key that a page was found by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until
from worker_kit import (
    PATIENCE_S,
    Client,
    Slowed,
    caching,
    keys,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    tiny_runner,
)

from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.stores.base import Outcome
from kvtier.workers.engine.step_loop import Copied
from kvtier.workers.paging.copier import Job, SaveJob


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


@pytest.fixture(scope="module")
def runner(tiny_llama: Path) -> Slowed:
    return tiny_runner(tiny_llama, 256)


class HeldSaves:
    """Saves that wait, on the copy thread, until `go`."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        copies = client.worker._loop._copier._copies
        do: Callable[[Job], None] = copies.do

        def wait_and_do(job: Job) -> None:
            if isinstance(job, SaveJob):
                self.begun.set()
                assert self.go.wait(PATIENCE_S)
            do(job)

        monkeypatch.setattr(copies, "do", wait_and_do)


@pytest.mark.parametrize(("number", "is_heard_by"), [(0, "the worker"), (7, "the worker"), (7, "a request")])
def test_a_page_that_is_being_saved_while_its_tenant_is_cleared_does_not_come_back_below(
    runner: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_heard_by: str
) -> None:
    with caching(tmp_path) as service, serving(runner, tmp_path / "s") as client:
        saves = HeldSaves(client, monkeypatch)
        client.generate(prompt(40))
        assert saves.begun.wait(PATIENCE_S)

        service.clear("default", number)
        if is_heard_by == "the worker":
            client.worker.clear("default", number)
        else:
            client.cleared = number
            assert client.generate(prompt(40), max_tokens=1).cached == {}
            client.worker.evict(None)
        saves.go.set()
        settle(client.worker, service)
        left = [page for page in service.pages() if page.depth < 40 // 16]

        if is_heard_by == "the worker":
            assert left == []
            assert client.generate(prompt(40)).cached == {}
        settle(client.worker, service)
        assert client.generate(prompt(40)).cached != {}


def test_a_worker_that_is_behind_saves_nothing_that_the_node_takes_for_made_since_the_clear(
    runner: Slowed, tmp_path: Path
) -> None:
    """The node was cleared, the worker hears of it later: what it saves meanwhile is from before."""
    with caching(tmp_path) as service, serving(runner, tmp_path / "s") as client:
        service.clear("default", 7)
        client.generate(prompt(40))
        settle(client.worker, service)
        assert service.pages() == [] and client.worker.pages() != []

        client.worker.know([(tenant_digest("default"), 7)])
        assert client.worker.pages() == []
        client.generate(prompt(40))
        settle(client.worker, service)
        assert len({page.key for page in service.pages()}) == 2


def test_a_worker_that_reconnects_while_its_tenant_is_cleared_brings_nothing_back(
    runner: Slowed, tmp_path: Path
) -> None:
    """It gives a node that came back all that its L1 has: the node was cleared meanwhile, the worker not yet."""
    with serving(runner, tmp_path / "s", connected=False) as client:
        with caching(tmp_path, l4_bytes=0) as service:
            until(lambda: client.worker.is_connected, "the worker is connected")
            client.generate(prompt(40))
            client.generate(prompt(40), tenant="other")
            settle(client.worker, service)
        with caching(tmp_path, l4_bytes=0) as service:
            service.clear("default", 7)
            until(lambda: client.worker.is_connected, "it is connected again")
            settle(client.worker, service)
            assert {page.tenant for page in service.pages()} == {tenant_digest("other").hex()}

            client.worker.clear("default", 7)
            assert client.generate(prompt(40)).cached == {}
            settle(client.worker, service)
            assert len(service.pages("default")) == 2


def test_a_request_that_knows_of_a_later_clear_finds_nothing_from_before_it(
    runner: Slowed, tmp_path: Path
) -> None:
    """Neither in the L1 of a worker that missed the clear, nor at a node that did."""
    with caching(tmp_path) as service, serving(runner, tmp_path / "s") as client:
        client.generate(prompt(40))
        client.generate(prompt(40), tenant="other")
        settle(client.worker, service)
        client.cleared = 9

        assert client.generate(prompt(40)).cached == {}
        assert client.generate(prompt(40)).cached == {"L1": 32}
        client.cleared = 0
        assert client.generate(prompt(40), tenant="other").cached == {"L1": 32}
        done = [(tenant_digest("default"), 9)]  # by a thread of the node's own
        until(lambda: service.clears() == done, "the node has done the clear that it missed")


def test_a_save_of_an_earlier_connection_is_told_to_no_later_node(
    runner: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that a copy is over may come late; its slot was the earlier node's to give."""
    with serving(runner, tmp_path / "s", connected=False) as client:
        inbox = client.worker._loop.inbox
        put, late = inbox.put, list[Any]()

        def hold_words_of_saves(event: Any) -> None:
            if isinstance(event, Copied) and isinstance(event.job, SaveJob):
                late.append(event)
            else:
                put(event)

        with caching(tmp_path, l4_bytes=0):
            until(lambda: client.worker.is_connected, "the worker is connected")
            monkeypatch.setattr(inbox, "put", hold_words_of_saves)
            client.generate(prompt(40))
            until(lambda: bool(late), "a save is over")
        until(lambda: not client.worker.is_connected, "the node is gone")
        with caching(tmp_path, l4_bytes=0) as service:
            until(lambda: client.worker.is_connected, "it is back")
            monkeypatch.setattr(inbox, "put", put)
            for event in late:
                put(event)
            settle(client.worker, service)

            assert [note for note in service.notes() if "isn't granted to it" in note] == []
            assert len(service.pages()) == 2, "what was not saved is saved there"
            sink_to_l3(client.worker, service)
            assert client.generate(prompt(40)).cached == {"L3": 32}, "what it took lies in its slots"


def test_slots_stay_mapped_while_a_copy_uses_them(
    runner: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node goes away in the midst of a save: the connection is let go only when the copy is over."""
    order: list[str] = []
    with serving(runner, tmp_path / "s", connected=False) as client:
        worker = client.worker
        with caching(tmp_path, l4_bytes=0):
            until(lambda: worker.is_connected, "the worker is connected")
            saves = HeldSaves(client, monkeypatch)
            done, wait_idle, drop = (
                worker._loop._copier._done,
                worker._loop._copier.wait_idle,
                worker._loop.link._drop_client,
            )

            def note_done(job: Job) -> None:
                order.append("a copy is over")
                done(job)

            def open_and_wait() -> None:
                saves.go.set()  # the step loop waits for copies: they may go on
                wait_idle()

            def note_drop() -> None:
                order.append("slots are let go")
                drop()
                saves.go.set()

            monkeypatch.setattr(worker._loop._copier, "_done", note_done)
            monkeypatch.setattr(worker._loop._copier, "wait_idle", open_and_wait)
            monkeypatch.setattr(worker._loop.link, "_drop_client", note_drop)
            client.generate(prompt(40))
            assert saves.begun.wait(PATIENCE_S)
        until(lambda: "slots are let go" in order, "the connection is over")
        until(lambda: "a copy is over" in order, "the copy is over")
        assert order[0] == "a copy is over"


def test_a_page_that_was_found_by_another_key_is_whole_by_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    """A lossy request takes an exact page: in L1 it goes by the lossy key, and its checksum is of the exact one."""
    lossy = tiny_runner(tiny_llama, 128, l4_format="int4c")
    with (
        caching(tmp_path, page_bytes=page_sizes(lossy), l4_variants=frozenset({"int4c"})) as service,
        serving(lossy, tmp_path / "s") as client,
    ):
        client.generate(prompt(100), max_tokens=1)
        sink_to_l3(client.worker, service)
        assert client.generate(prompt(100), max_tokens=1, lossy=True).cached == {"L3": 96}
        settle(client.worker, service)

        assert keys(client.worker)
        assert {outcome for _, outcome in client.worker.verify()} == {Outcome.ACCEPTED}
        sink_to_l3(client.worker, service)
        assert client.generate(prompt(100), max_tokens=1, lossy=True).cached == {"L3": 96}
