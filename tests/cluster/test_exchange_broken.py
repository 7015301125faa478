"""An exchange with a fault of its own: what it was to fetch is computed, and what can't go on is begun again."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from peer_stub import exchange, stub
from waiting import until

from kvtier.cluster.transfer import client as exchange_client


def test_a_fault_in_a_run_is_logged_and_counted_and_blames_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(exchange_client, "SlotSink", broken)
    with stub(tmp_path, "home") as home, exchange("home", home.path, same_host="off") as here:
        with caplog.at_level(logging.ERROR):
            ended = home.ended(home.order("away", "127.0.0.1:1", range(2)))

        assert len(ended.failed) == 2 and ended.reason == "broke"
        assert "a fault of ours" in caplog.text
        peer = here.stats()["fetched"]["away"]
        assert peer["failures"] == {"broke": 1} and peer["breaker"] == "closed"


def test_a_run_that_does_not_end_shows_in_the_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_well = threading.Event()

    def stuck(*_: Any) -> None:
        is_well.wait(120)
        raise TypeError("a fault of ours")

    monkeypatch.setattr(exchange_client, "SlotSink", stuck)
    monkeypatch.setattr(exchange_client, "STUCK_S", 0.1)
    with (
        stub(tmp_path, "home") as home,
        exchange("home", home.path, same_host="off", deadline_s=0.1) as here,
    ):
        try:
            home.order("away", "127.0.0.1:1", range(2))
            until(lambda: "after its deadline" in (here.health() or ""), "the health says it")
        finally:
            is_well.set()
        until(lambda: here.health() is None, "all is well again")


def test_a_deciding_thread_that_is_stalled_gives_no_pulse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_well = threading.Event()

    def stuck(*_: Any) -> list[Any]:
        is_well.wait(120)
        return []

    with stub(tmp_path, "home") as home, exchange("home", home.path, same_host="off") as here:
        assert here.heartbeat() == 0.0
        monkeypatch.setattr(exchange_client, "STATS_TIMEOUT_S", 0.1)
        monkeypatch.setattr(here._fetcher._runs, "handle", stuck)
        try:
            here._fetcher.lost(-1)
            with pytest.raises(TimeoutError):
                here.heartbeat()
        finally:
            is_well.set()
        until(lambda: here.health() is None, "all is well again")


def test_when_the_deciding_thread_has_a_fault_the_process_ends() -> None:
    program = (
        "import threading\n"
        "from kvtier.cluster.transfer.channels import Channels\n"
        "from kvtier.cluster.transfer.client import Fetcher\n"
        "from kvtier.tier.transport.fetch_runs import FetchLimits, PeerRuns\n"
        "def fault(*_): raise KeyError('a fault of ours')\n"
        "PeerRuns.handle = fault\n"
        "fetcher = Fetcher(FetchLimits(), Channels('n0', 'w', 's', print), print)\n"
        "fetcher.start(); fetcher.lost(1); threading.Event().wait(120)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1 and "a fault of ours" in ended.stderr


def test_when_the_thread_of_the_nodes_connection_has_a_fault_the_process_ends() -> None:
    program = (
        "import threading\n"
        "from kvtier.cluster.transfer.node_link import NodeLink, NodeSession\n"
        "def fault(*_): raise ValueError('a message that is none')\n"
        "NodeSession.connect = fault\n"
        "NodeLink('/nowhere', 'w', print, print, print).start(); threading.Event().wait(120)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1 and "a message that is none" in ended.stderr
