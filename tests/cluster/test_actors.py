"""What a deployment's configuration says reaches the parts that it is said of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cluster import node as node_module
from kvtier.cluster.actors import Actors
from kvtier.cluster.config import load_config
from kvtier.cluster.node import CacheNodeProcess
from kvtier.tier.page import slot_bytes


def test_the_deadline_of_transfers_is_that_of_a_nodes_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    maker = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made.update))
    monkeypatch.setattr(node_module, "CacheNode", maker)
    config = load_config(None, ("transfer.deadline_ms=9500",))
    parts: Any = SimpleNamespace(sizes=(4096,), l4_variants=None, on=lambda _: None)
    place: Any = SimpleNamespace(number=0, node_id="node-0")
    grounds: Any = {0: SimpleNamespace(cache=tmp_path)}

    Actors(config, tmp_path, parts, parts, grounds, tmp_path).node(place)

    sizes = {"l3_bytes": 8 * slot_bytes(4096), "l4_bytes": 0, "socket_path": str(tmp_path / "run" / "s")}
    node = CacheNodeProcess(**{**made, **sizes})
    try:
        coordinator = node._service._coordinator
        assert coordinator is not None and coordinator.limits.fetch_deadline_s == 9.5
    finally:
        node.stop(0.0)
