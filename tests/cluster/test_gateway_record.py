"""Record over real gRPC: nodes with real caches record into files that run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateway_kit import serving
from node_kit import Peer, running
from recording_node import recording_node

from kvtier.cli.client import Client, ClientError, connect
from kvtier.lab.recordings import verified


@pytest.fixture(params=[1, 2])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """The folders of one node, or of two."""
    yield [tmp_path / f"n{number}" for number in range(request.param)]


@pytest.fixture
def client(nodes: list[Path]) -> Iterator[Client]:
    with ExitStack() as stack:
        made = []
        for folder in nodes:
            folder.mkdir()
            made.append(recording_node(stack.enter_context(running(folder, node_id=folder.name))))
        served = stack.enter_context(serving(nodes=made))
        yield stack.enter_context(connect(served.endpoint))


def test_each_node_records_into_a_file_of_its_own(nodes: list[Path], client: Client, tmp_path: Path) -> None:
    names = [folder.name for folder in nodes]
    started = client.record_start(str(tmp_path / "run.kvrec.gz"), max_bytes=2**24, nodes=names)
    for folder in nodes:
        peer = Peer(folder)
        peer.store(0, 3)
        peer.close()
    stopped = client.record_stop()

    names = ["run.kvrec.gz"] if len(nodes) == 1 else ["run.n0.kvrec.gz", "run.n1.kvrec.gz"]
    assert [one["path"] for one in started["recordings"]] == [str(tmp_path / name) for name in names]
    assert [one["owner"] for one in stopped["recordings"]] == [folder.name for folder in nodes]
    assert all(one["ended"] == "" for one in started["recordings"])
    for one in stopped["recordings"]:
        verdict = verified(Path(one["path"]))
        assert one["ended"] == "it was stopped" and one["events"] == verdict.events > 3
        assert one["nbytes"] == Path(one["path"]).stat().st_size
        assert verdict.difference is None and not verdict.is_torn


def test_where_one_cannot_none_does(nodes: list[Path], client: Client, tmp_path: Path) -> None:
    last = tmp_path / ("run.kvrec" if len(nodes) == 1 else f"run.{nodes[-1].name}.kvrec")
    last.write_text("mine")
    names = [folder.name for folder in nodes]

    with pytest.raises(ClientError, match=f"{nodes[-1].name}: .*is there already") as refusal:
        client.record_start(str(tmp_path / "run.kvrec"), nodes=names)
    again = client.record_start(str(tmp_path / "other.kvrec"), nodes=names)

    assert refusal.value.exit_code == 2 and last.read_text() == "mine"
    assert len(again["recordings"]) == len(nodes)
    with pytest.raises(ClientError, match="already: stop that first"):
        client.record_start(str(tmp_path / "third.kvrec"), nodes=names)


def test_all_nodes_record_unless_some_are_named(nodes: list[Path], client: Client, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="node 'w0' isn't running: there are n0"):
        client.record_start(str(tmp_path / "x.kvrec"), nodes=["n0", "w0"])
    started = client.record_start(str(tmp_path / "one.kvrec"), nodes=["n0"])
    assert [one["path"] for one in started["recordings"]] == [str(tmp_path / "one.kvrec")]
    assert all(one["ended"] for one in client.record_stop()["recordings"])

    all_started = client.record_start(str(tmp_path / "all.kvrec"))
    assert len(all_started["recordings"]) == len(nodes)


def test_what_cannot_be_recorded_is_refused(client: Client, tmp_path: Path) -> None:
    for path, max_bytes, why in (
        ("here.kvrec", 0, "path must be absolute"),
        (str(tmp_path / "x"), 17, "at least"),
        (str(tmp_path / "no" / "x"), 0, "No such file"),
    ):
        with pytest.raises(ClientError, match=why):
            client.record_start(path, max_bytes=max_bytes, nodes=["n0"])
    with pytest.raises(ClientError, match="nothing is being recorded") as refusal:
        client.record_stop()
    assert refusal.value.exit_code == 4
