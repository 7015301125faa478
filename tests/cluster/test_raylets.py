"""A raylet that dies is started again, and where that fails it is tried again after a pause."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvtier.cluster.config.deployment import load_config
from kvtier.cluster.machines import raylets
from kvtier.cluster.machines.leftovers import descendants
from kvtier.cluster.machines.raylets import Raylets


class FakeNode:
    """Ray's daemons of a raylet. `failure` is raised when they are to be ended."""

    def __init__(self, *, lives: bool, failure: Exception | None = None) -> None:
        self.lives = lives
        self.failure = failure

    def remaining_processes_alive(self) -> bool:
        return self.lives

    def kill_all_processes(self, **options: bool) -> None:
        if self.failure is not None:
            raise self.failure


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(raylets, "time", made)
    return made


def two(node: FakeNode) -> Raylets:
    made = Raylets(load_config(None, ("ray.raylets=2", "nodes.count=2")).ray, 1, 1, Path("unused"))
    made._more[1] = node  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    "failure",
    [
        OSError("no room"),
        subprocess.TimeoutExpired("raylet", 5),
        Exception("The current node timed out during startup"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_raylet_that_cannot_be_started_again_is_tried_ever_more_slowly(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    tries: list[float] = []
    ours = two(FakeNode(lives=False))

    def started(number: int) -> Any:
        tries.append(clock.now)
        raise failure

    monkeypatch.setattr(ours, "_started", started)
    said: list[str] = []
    for _ in range(400):
        said += ours.restart()
        clock.now += 0.5

    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == sorted(pauses) and pauses[0] >= raylets.REVIVE_S
    assert pauses[-1] <= raylets.REVIVE_MOST_S + 0.5
    assert len(said) == len(tries) and all("raylet 1 died, and is tried again in" in line for line in said)

    back = FakeNode(lives=True)
    monkeypatch.setattr(ours, "_started", lambda number: back)
    clock.now += raylets.REVIVE_MOST_S
    assert ours.restart() == ["raylet 1 died, and is started again"]
    assert ours.restart() == []


def test_one_whose_daemons_cannot_be_ended_does_not_end_the_deployment(clock: Clock) -> None:
    failure = subprocess.TimeoutExpired("raylet", 5)
    [line] = two(FakeNode(lives=False, failure=failure)).restart()

    assert "raylet 1 died, and is tried again in 2 s" in line


def test_what_was_started_of_a_raylet_that_failed_is_ended(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = two(FakeNode(lives=False))
    children: list[subprocess.Popen[bytes]] = []

    def started(number: int) -> Any:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        raise OSError("no room")

    monkeypatch.setattr(ours, "_started", started)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ours.restart()
        children[0].wait(120)

        assert other.poll() is None
        assert children[0].pid not in [pid for pid, _ in descendants()]
        other.communicate(b"\n", timeout=300)
