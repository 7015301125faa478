"""Clears reach the pages of nodes that don't run, in folders beside that of one that does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node_kit import PAYLOAD_BYTES, SLOT_BYTES, SMALL_BYTES, Peer, wait_until

from kvtier.cluster.node import CacheNodeProcess
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.results import Cleared


@contextmanager
def node(folder: Path, node_id: str) -> Iterator[CacheNodeProcess]:
    """A node whose folder is one of those in `folder`/l4."""
    process = CacheNodeProcess(
        node_id=node_id,
        socket_path=str(folder / node_id / "run" / "sock"),
        payload_bytes=PAYLOAD_BYTES,
        l3_bytes=16 * SLOT_BYTES,
        l4_path=str(folder / "l4"),
        l4_bytes=16 << 20,
        min_payload_bytes=SMALL_BYTES,
        policy=PolicySettings(),
        write="through",
        shares={},
    )
    try:
        yield process
        process.check()
    finally:
        process.stop(1.0)


def store(folder: Path, node_id: str, process: CacheNodeProcess) -> None:
    """Two pages of ada's and one of bob's are in L4."""
    for tenant, pages in (("ada", 2), ("bob", 1)):
        peer = Peer(folder / node_id, tenant, tenant=tenant)
        peer.store(0, pages)
        peer.close()
    wait_until(process.idle)


def found(folder: Path, node_id: str, tenant: str) -> int:
    peer = Peer(folder / node_id, f"finder of {tenant}", tenant=tenant)
    pages, _ = peer.fetch(0, 2 if tenant == "ada" else 1)
    peer.close()
    return len(pages)


def named(cleared: Cleared) -> list[str]:
    return [folder.partition(" on ")[0] for folder, _ in cleared.unused]


def test_a_folder_that_no_running_node_uses_is_named_and_cleared_when_it_is_used_again(
    tmp_path: Path,
) -> None:
    with node(tmp_path, "node-3") as gone:
        store(tmp_path, "node-3", gone)
    with node(tmp_path, "node-1") as other, node(tmp_path, "node-0") as process:
        store(tmp_path, "node-1", other)

        cleared = process.clear("ada", 7)

        assert named(cleared) == [str(tmp_path / "l4" / "node-3")] and not cleared.left
        assert [left.tier for _, left in cleared.unused] == [TierName.SSD]
        assert found(tmp_path, "node-1", "ada") == 2, "a node that runs is asked itself"

    with node(tmp_path, "node-3") as back:
        assert (found(tmp_path, "node-3", "ada"), found(tmp_path, "node-3", "bob")) == (0, 1)
        assert [number for _, number in back.clears()] == [7]
