"""Who hears that a deployment stops: what is silent may run on where it is, what is dead does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from small_ray import kill, small_ray

from kvtier.cluster.health.supervision import Kind, Member
from kvtier.cluster.supervisor import launch
from kvtier.cluster.supervisor.launch import _stop
from kvtier.cluster.supervisor.watch import Part

pytestmark = pytest.mark.slow


class Stoppable:
    """A part that stops, or that never answers."""

    def stop(self) -> None:
        pass

    def hang(self) -> None:
        threading.Event().wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with small_ray(1):
        yield


def test_what_does_not_answer_is_silent_and_what_is_dead_is_not(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither was named, and `kvtier down` said that all was stopped."""
    monkeypatch.setattr(launch, "_STOP_EXTRA_S", 10.0)
    actor: Any = ray.remote(num_cpus=0)(Stoppable)
    parts = {name: part_of(name, actor.remote()) for name in ("well", "dead", "silent")}
    ray.get([part.handle.stop.remote() for part in parts.values()], timeout=300)
    parts["silent"].handle.hang.remote()
    kill(parts["dead"].handle)

    unheard = {part.name: is_silent for part, is_silent in _stop([*parts.values()], 0.0)}

    assert unheard == {"dead": False, "silent": True}


def part_of(name: str, handle: Any) -> Part:
    return Part(Member(name, Kind.WORKER, name), lambda: handle, lambda: False, handle)
