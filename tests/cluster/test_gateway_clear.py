"""What the gateway says of a clear: each part by name, and what is left to be done there; and who hears of it later."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import EchoWorker, Served, echo_info, page_info, serving
from waiting import until

from kvtier.cli.client import connect
from kvtier.cluster.gateway.cache_api import cache as gateway_cache
from kvtier.cluster.gateway.cache_api import clears as gateway_clears
from kvtier.cluster.gateway.cache_api.cache import Node
from kvtier.cluster.gateway.cache_api.clears import ClearRecord
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import TierName
from kvtier.tier.stores.base import Uncleared
from kvtier.tier.stores.ssd.clear_file import ClearFile

DEFAULT, ACME = tenant_digest("default"), tenant_digest("acme")


def a_node(node_id: str = "n0", pages: int = 1) -> EchoWorker:
    held = {
        f"{i:02x}" * 32: page_info(f"{i:02x}" * 32, TierName.SSD, node_id, "default") for i in range(pages)
    }
    return EchoWorker(replace(echo_info("cache", node_id=node_id), node_id=node_id), pages_held=held)


async def silence(*_: object) -> None:
    await asyncio.Event().wait()


async def gone(*_: object) -> Any:
    raise OwnerDown("its process ended")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(nodes=[a_node("n0", 2), a_node("n1", 3)], clears=tmp_path, expected=["n0", "n1"]) as made:
        yield made


def cleared(served: Served, tenant: str = "default") -> dict[str, tuple[str, int, str, str]]:
    """Part -> outcome, pages, tier and error."""
    with connect(served.endpoint) as client:
        parts = client.pages_clear(tenant=tenant)["parts"]
    assert all(bool(part["detail"]) == (part["outcome"] != "ACCEPTED") for part in parts)
    return {part["part"]: (part["outcome"], part["pages"], part["tier"], part["error"]) for part in parts}


def port(served: Served, number: int) -> Any:
    return served.cache.nodes[number].port


def test_each_part_of_a_clear_is_told_with_the_pages_that_it_had(served: Served) -> None:
    assert cleared(served) == {
        "w0": ("ACCEPTED", 0, "", ""),
        "n0": ("ACCEPTED", 2, "", ""),
        "n1": ("ACCEPTED", 3, "", ""),
    }


def test_a_node_that_is_down_is_named_and_applies_the_clear_when_it_is_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once as the gateway knows it already, once as it finds out by asking."""
    monkeypatch.setattr(port(served, 0), "clear", gone)
    for _ in range(2):
        assert cleared(served)["n0"] == ("DEFERRED", 0, "L4", "")
    assert served.cache.nodes[0].down is not None
    back = a_node("n0")

    served.call(served.cache.attach_node, Node("n0", 2, back))

    number = served.clearer.record.clears.of(DEFAULT)
    assert number and back.applied.of(DEFAULT) == number


def test_a_part_that_says_nothing_is_named_and_told_again_until_it_has_heard(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_cache, "WORK_S", 0.1)
    monkeypatch.setattr(gateway_clears, "AGAIN_S", (0.01, 0.05))
    node, worker = port(served, 1), served.workers[0]
    with monkeypatch.context() as stopped:
        for one in (node, worker):
            stopped.setattr(one, "clear", silence)
            stopped.setattr(one, "know", silence)
        parts = cleared(served)
        assert parts["n1"] == parts["w0"] == ("DEFERRED", 0, "", "") and parts["n0"][0] == "ACCEPTED"

    number = served.clearer.record.clears.of(DEFAULT)
    until(lambda: node.applied.of(DEFAULT) == worker.applied.of(DEFAULT) == number, "both have heard", 10)


def test_no_page_counts_as_cleared_while_a_node_that_may_have_it_has_not_said_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(served.endpoint) as client:
        assert client.pages_clear(tenant="default")["counts"] == {"ACCEPTED": 3}
        monkeypatch.setattr(port(served, 0), "clear", gone)
        assert client.pages_clear(tenant="default")["counts"] == {"DEFERRED": 3}


def test_what_a_disk_refuses_and_folders_that_no_node_uses_are_named(served: Served) -> None:
    refused = Uncleared(TierName.SSD, "EROFS", "wiping slots in L4 failed: read-only")
    unused = ("/pages/node-7 on here", Uncleared(TierName.SSD, "", "no node that runs uses it"))
    port(served, 0).left, port(served, 0).unused, port(served, 1).unused = (refused,), (unused,), (unused,)

    parts = cleared(served)

    assert parts["n0"] == ("DEFERRED", 2, "L4", "EROFS")
    assert parts["/pages/node-7 on here"] == ("DEFERRED", 0, "L4", "")
    assert list(parts)[-1] in ("n1", "w0"), "what is left comes first"


def test_a_node_that_was_never_attached_is_named(tmp_path: Path) -> None:
    with serving(nodes=[a_node("n0")], clears=tmp_path, expected=["n0", "n1"]) as served:
        assert cleared(served)["n1"] == ("DEFERRED", 0, "L4", "")


def test_a_clear_whose_number_no_file_has_is_rejected_where_something_is_left_to_be_done(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: ClearFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(ClearFile, "save", refuse)
        assert "gateway" not in cleared(served), "all parts have done it"
        disk.setattr(port(served, 0), "clear", gone)
        assert cleared(served)["gateway"] == ("REJECTED", 0, "", "ENOSPC")
    assert "gateway" not in cleared(served)


def test_numbers_of_clears_outlast_the_gateway_and_grow_whatever_the_clock_does(tmp_path: Path) -> None:
    async def numbers(wall_s: float) -> list[int]:
        record = ClearRecord(tmp_path / "new", lambda: wall_s)
        record.load()
        return [await record.begin(DEFAULT), await record.begin(None), await record.begin(ACME)]

    first, second = asyncio.run(numbers(1000.0)), asyncio.run(numbers(900.0))
    assert first + second == [1_000_000, 1_000_001, 1_000_002, 1_000_003, 1_000_004, 1_000_005]
    third = ClearRecord(tmp_path / "new")
    third.load()
    assert third.clears.numbers() == [(b"", 1_000_004), (ACME, 1_000_005)]


def test_a_gateway_learns_from_nodes_what_its_record_has_lost_and_tells_the_others(tmp_path: Path) -> None:
    knowing, lacking = a_node("n0"), a_node("n1")
    knowing.applied.note(DEFAULT, 77)

    with serving(nodes=[knowing, lacking], clears=tmp_path) as served:
        assert lacking.applied.of(DEFAULT) == 77
        late = a_node("n2")
        late.applied.note(ACME, 78)
        served.call(served.cache.attach_node, Node("n2", 3, late))
        until(lambda: knowing.applied.of(ACME) == lacking.applied.of(ACME) == 78, "all have heard", 10)
        assert served.clearer.record.clears.numbers() == [(DEFAULT, 77), (ACME, 78)]


def test_a_request_tells_its_worker_the_latest_clear_of_its_tenant(served: Served) -> None:
    with connect(served.endpoint) as client:
        client.pages_clear(tenant="default")
        list(client.generate([1, 2, 3], max_tokens=1))

    number = served.clearer.record.clears.of(DEFAULT)
    assert [request.cleared for request in served.workers[0].submitted] == [number] and number > 0
