"""A CacheNode that is restarted on a disk that can't be written: without L4, whose pages are there for a later start."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chaos_root import Disk, Unable, disk
from node_kit import PAYLOAD_BYTES, SLOT_BYTES, SMALL_BYTES, Peer, wait_until
from tier_pages import VARIANT, entry_of, page_key, write_page

from kvtier.cluster.machines.l4_folders import l4_folder
from kvtier.cluster.node import CacheNodeProcess
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.stores.base import Outcome, Place
from kvtier.tier.stores.ssd.store import open_ssd

DISK_BYTES = 40 << 20
both_stores = pytest.mark.parametrize("store", ["slab", "lmdb"])


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    try:
        with disk(tmp_path / "l4", DISK_BYTES) as made:
            yield made
    except Unable as unable:
        pytest.skip(f"this machine can't make it: {unable}")


@contextmanager
def node(
    folder: Path, small: Disk, store: Any, *, needs_l4: bool = True, awaits_clears: bool = False
) -> Iterator[CacheNodeProcess]:
    process = CacheNodeProcess(
        node_id="node-0",
        socket_path=str(folder / "run" / "sock"),
        payload_bytes=PAYLOAD_BYTES,
        l3_bytes=16 * SLOT_BYTES,
        l4_path=str(small.folder),
        l4_bytes=16 << 20,
        l4_store=store,
        min_payload_bytes=SMALL_BYTES,
        needs_l4=needs_l4,
        policy=PolicySettings(),
        write="through",
        shares={},
        awaits_clears=awaits_clears,
    )
    try:
        yield process
        process.check()
    finally:
        process.stop(0.0)


def fill(folder: Path, small: Disk, store: str) -> None:
    """Three pages are in L4 when the node has ended."""
    with node(folder, small, store) as process:
        peer = Peer(folder)
        peer.store(0, 3)
        wait_until(lambda: process.idle() and process.stats().tiers[TierName.SSD].pages == 3)
        peer.close()


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def came_from(peer: Peer, num_pages: int) -> list[str]:
    return [page.came_from for page in peer.fetch(0, num_pages)[0]]


@both_stores
def test_a_node_made_again_goes_on_without_l4_and_finds_its_pages_once_the_disk_is_repaired(
    tmp_path: Path, small: Disk, store: str
) -> None:
    folder = l4_folder(small.folder, "node-0")
    fill(tmp_path, small, store)
    before = content(folder)
    small.settle()
    small.fail()

    with (
        pytest.raises(OSError, match=r"^tiers\.l4\.path: .*Read-only .*--set tiers\.l4\.bytes=0"),
        node(tmp_path, small, store),
    ):
        pass
    with node(tmp_path, small, store, needs_l4=False) as process:
        [note] = process.notes()
        assert note.startswith(f"L4 is off: {folder} can't be used: Read-only file system; ")
        assert process.health() is None
        peer = Peer(tmp_path)
        assert came_from(peer, 3) == []
        peer.store(0, 2)
        assert came_from(peer, 2) == ["L3"] * 2
        wait_until(process.idle)
        assert process.stats().tiers[TierName.SSD].pages == 0
        [left] = process.clear().left
        assert (left.tier, left.error) == (TierName.SSD, "EROFS") and left.detail.startswith(
            "L4 is off, since "
        )
        assert came_from(peer, 2) == []
        peer.close()
    assert content(folder) == before

    small.unmount()
    small.mount()
    with node(tmp_path, small, store, needs_l4=False) as process:
        assert process.notes() == []
        peer = Peer(tmp_path)
        assert came_from(peer, 3) == ["L4"] * 3
        wait_until(process.idle)
        peer.close()


@both_stores
def test_a_clear_on_a_disk_that_broke_is_deferred_and_done_before_the_repaired_disk_is_served(
    tmp_path: Path, small: Disk, store: str
) -> None:
    ada = tenant_digest("ada")
    with node(tmp_path, small, store) as process:
        peer = Peer(tmp_path)
        peer.store(0, 3)
        wait_until(lambda: process.idle() and process.stats().tiers[TierName.SSD].pages == 3)
        small.settle()
        small.fail()

        cleared = process.clear("ada", 7)

        assert set(cleared.pages.outcomes()) == {Outcome.DEFERRED}
        assert {(left.tier, left.error) for left in cleared.left} <= {
            (TierName.SSD, name) for name in ("EROFS", "EIO")
        }
        assert cleared.left and came_from(peer, 3) == []
        peer.close()
    small.unmount()
    small.mount()
    with node(tmp_path, small, store, awaits_clears=True) as process:
        peer = Peer(tmp_path)
        assert came_from(peer, 3) == []
        process.know([(ada, 7)])
        assert came_from(peer, 3) == []
        peer.close()
    with node(tmp_path, small, store) as process:
        assert process.stats().tiers[TierName.SSD].pages == 0 and process.clears() == [(ada, 7)]


@both_stores
def test_a_node_made_again_on_a_full_disk_serves_its_pages(tmp_path: Path, small: Disk, store: str) -> None:
    """A catalogue that is sound is used where it lies: opening it needs no room."""
    fill(tmp_path, small, store)
    small.fill()

    for room_is_made in (False, True):
        if room_is_made:
            small.make_room()
        with node(tmp_path, small, store, needs_l4=False) as process:
            assert process.notes() == []
            peer = Peer(tmp_path)
            assert came_from(peer, 3) == ["L4"] * 3
            wait_until(process.idle)
            peer.close()


def test_a_disk_with_less_room_than_l4_was_promised_keeps_what_is_left_for_others(
    tmp_path: Path, small: Disk
) -> None:
    """A segment that the disk refuses gives back what it took of it, and pages go on in those there are."""
    payload = 2**20
    folder = small.folder / "l4"
    tier = open_ssd(folder, 2 * DISK_BYTES, "slab", slot_bytes(payload))
    refused = 0
    written: dict[int, Place] = {}
    while refused < 3:
        place = tier.allocator.alloc(slot_bytes(payload))
        assert place is not None
        try:
            write_page(tier, place, len(written), payload)
            tier.commit([entry_of(len(written), place, payload)])
            written[len(written)] = place
        except OSError as error:
            assert error.errno == errno.ENOSPC
            refused += 1
    assert len(written) >= 8

    (small.folder / "something's").write_bytes(bytes(2**20))
    number, place = 1000, written.pop(0)
    write_page(tier, place, number, payload)
    tier.commit([entry_of(number, place, payload)], [(page_key(0), VARIANT)])
    tier.close()

    again = open_ssd(folder, 2 * DISK_BYTES, "slab", slot_bytes(payload))
    assert again.notes == [] and len(again.recovered) == len(written) + 1
    again.close()
