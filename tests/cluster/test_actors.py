"""What a deployment's configuration says reaches the parts that it is said of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cluster import node as node_module
from kvtier.cluster.config.deployment import load_config
from kvtier.cluster.machines.homes import Home
from kvtier.cluster.machines.node_probe import NodeInfo
from kvtier.cluster.node import CacheNodeProcess
from kvtier.cluster.supervisor.actors import Actors
from kvtier.tier.pages.page import slot_bytes


def test_the_deadline_of_transfers_is_that_of_a_nodes_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    maker = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made.update))
    monkeypatch.setattr(node_module, "CacheNode", maker)
    config = load_config(None, ("transfer.deadline_ms=9500",))
    parts: Any = SimpleNamespace(sizes=(4096,), l4_variants=None, on=lambda _: None)
    place: Any = SimpleNamespace(number=0, node_id="node-0")
    home = Home(place, NodeInfo(tmp_path, tmp_path, 1))

    Actors(config, tmp_path, parts, parts, 1, tmp_path, tmp_path).node(home)

    sizes = {"l3_bytes": 8 * slot_bytes(4096), "l4_bytes": 0, "socket_path": str(tmp_path / "run" / "s")}
    node = CacheNodeProcess(**{**made, **sizes})
    try:
        coordinator = node._service._coordinator
        assert coordinator is not None and coordinator.limits.fetch_deadline_s == 9.5
    finally:
        node.stop(0.0)


def test_only_a_nodes_first_start_needs_l4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []
    maker = SimpleNamespace(
        options=lambda **_: SimpleNamespace(remote=lambda **to: made.append((to["node_id"], to["needs_l4"])))
    )
    monkeypatch.setattr(node_module, "CacheNode", maker)
    parts: Any = SimpleNamespace(sizes=(4096,), l4_variants=None, on=lambda _: None)
    actors = Actors(load_config(None, ()), tmp_path, parts, parts, 2, tmp_path, tmp_path)

    for number in (0, 1, 1, 0, 1):
        place: Any = SimpleNamespace(number=number, node_id=f"node-{number}")
        actors.node(Home(place, NodeInfo(tmp_path, tmp_path, 1)))

    assert made == [
        ("node-0", True),
        ("node-1", True),
        ("node-1", False),
        ("node-0", False),
        ("node-1", False),
    ]
