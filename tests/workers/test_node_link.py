"""A worker's connection to its node: when the slab is pinned for the worker's GPU."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from node_kit import FIELDS, PAYLOAD_BYTES, SPEC, running

from kvtier.tier.protocol.messages import Hello
from kvtier.workers.node_io.node_link import Connected, LinkEvent, NodeLink

HELLO = Hello("w0", "1", {SPEC: PAYLOAD_BYTES}, {SPEC: PAYLOAD_BYTES}, FIELDS)
PATIENCE_S = 120.0


class Cudart:
    """Stands where the CUDA runtime would; keeps what is registered. `error` is its answer to each registration."""

    def __init__(self, error: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self._error = error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if not self._error:
            self.registered[address] = nbytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@contextmanager
def connected(folder: Path, pin_slab: bool) -> Iterator[NodeLink]:
    """A link to a node's cache, past its Connected."""
    events: queue.Queue[LinkEvent] = queue.Queue()
    with running(folder):
        link = NodeLink(str(folder / "run" / "sock"), HELLO, 1, events.put, pin_slab=pin_slab)
        link.start()
        event = events.get(timeout=PATIENCE_S)
        assert isinstance(event, Connected) and link.take_connection(event)
        try:
            yield link
        finally:
            link.close()


def use(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)


def test_the_slab_is_pinned_before_the_connection_counts_and_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = Cudart()
    use(monkeypatch, cudart)

    with connected(tmp_path, pin_slab=True) as link:
        while_connected = dict(cudart.registered)
        is_up = link.is_up

    assert is_up and len(while_connected) == 1 and cudart.registered == {}


def test_a_slab_that_cannot_be_pinned_is_used_all_the_same_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = Cudart(error=2)
    use(monkeypatch, cudart)

    with (
        caplog.at_level(logging.WARNING, "kvtier.workers.node_io.node_link"),
        connected(tmp_path, True) as link,
    ):
        is_up, can_save = link.is_up, link.can_save(PAYLOAD_BYTES)

    assert is_up and can_save
    assert [record.levelname for record in caplog.records if "L3 stays unpinned" in record.message] == [
        "WARNING"
    ]


def test_a_worker_on_the_cpu_pins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    use(monkeypatch, cudart)

    with connected(tmp_path, pin_slab=False):
        pass

    assert cudart.calls == 0
