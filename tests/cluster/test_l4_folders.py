"""A node is known again by its folder, wherever its machine has an address."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvtier.cluster.machines.l4_folders import Kept, kept_in, l4_folder, l4_refusal, l4_root
from kvtier.cluster.node import CacheNodeProcess
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.stores.ssd.layout import LAYOUT_FILE
from kvtier.tier.stores.ssd.store import open_ssd


def used(folder: Path, at_s: float) -> Path:
    """A node's folder, as it is after a start."""
    folder.mkdir(exist_ok=True)
    (folder / LAYOUT_FILE).write_text("")
    os.utime(folder / LAYOUT_FILE, (at_s, at_s))
    return folder


def test_a_folder_that_cannot_be_had_is_told_by_its_key_with_the_way_out(tmp_path: Path) -> None:
    """Real errors: of a folder that can't be made, and of one that another node has open."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError) as below_a_file:
        open_ssd(file / "l4" / "node-0", 2**24, "slab", 8192, min_slot_bytes=8192)
    said = l4_refusal(below_a_file.value, file / "l4" / "node-0")
    assert said.startswith(f"tiers.l4.path: {file / 'l4' / 'node-0'} can't be used: Not a directory; ")

    first = open_ssd(tmp_path / "node-0", 2**24, "slab", 8192, min_slot_bytes=8192)
    try:
        with pytest.raises(OSError) as taken:
            open_ssd(tmp_path / "node-0", 2**24, "slab", 8192, min_slot_bytes=8192)
    finally:
        first.close()
    said = l4_refusal(taken.value, tmp_path / "node-0")
    assert f"another CacheNode (process {os.getpid()})" in said and "--set name=" in said

    assert l4_refusal(OSError(errno.ENOMEM, "no memory"), file) == ""
    assert l4_refusal(OSError(errno.ENOENT, "none", "/run/other/node-0.sock"), tmp_path / "node-0") == ""


def test_a_node_that_cannot_have_its_folder_says_which_key_is_to_blame(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match=r"^tiers\.l4\.path: .*node-0 can't be used: Not a directory; "):
        node(tmp_path, tmp_path / "file", needs_l4=True)


def test_a_node_made_again_does_without_a_folder_that_it_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    process = node(tmp_path, tmp_path / "file", needs_l4=False)
    try:
        [note] = process.notes()
        assert note.startswith(f"L4 is off: {tmp_path / 'file' / 'node-0'} can't be used: Not a directory; ")
        assert process.health() is None
        tiers = process.stats().tiers
        assert tiers[TierName.HOST].capacity_bytes and not tiers[TierName.SSD].capacity_bytes
    finally:
        process.stop(0.0)


def test_a_node_made_again_waits_for_a_folder_that_another_has_open(tmp_path: Path) -> None:
    first = open_ssd(tmp_path / "node-0", 2**24, "slab", 8192, min_slot_bytes=8192)
    try:
        with pytest.raises(OSError, match="another CacheNode"):
            node(tmp_path, tmp_path, needs_l4=False)
    finally:
        first.close()


def node(folder: Path, l4: Path, *, needs_l4: bool) -> CacheNodeProcess:
    """The first node, with its socket below `folder`."""
    return CacheNodeProcess(
        node_id="node-0",
        socket_path=str(folder / "run" / "s"),
        payload_bytes=4096,
        l3_bytes=2**20,
        l4_path=str(l4),
        l4_bytes=2**24,
        needs_l4=needs_l4,
        policy=PolicySettings(),
        write="through",
        shares={},
    )


def test_each_node_keeps_its_pages_in_a_folder_of_its_own(tmp_path: Path) -> None:
    assert l4_folder(tmp_path, "node-0") == tmp_path / "node-0"
    assert l4_folder(tmp_path, "node-1") == tmp_path / "node-1"


def test_pages_of_a_time_without_such_folders_stay_those_of_the_first_node(tmp_path: Path) -> None:
    used(tmp_path, 100.0)

    assert l4_folder(tmp_path, "node-0") == tmp_path
    assert l4_folder(tmp_path, "node-1") == tmp_path / "node-1"
    assert kept_in(tmp_path) == [Kept(0, kept_in(tmp_path)[0].used_s, str(tmp_path))]


def test_a_disk_tells_whose_pages_it_has_and_when_they_were_used(tmp_path: Path) -> None:
    later, sooner = used(tmp_path / "node-11", 300.0), used(tmp_path / "node-2", 200.0)
    for other in ("node-01", "node-x", "others", "node-5"):
        (tmp_path / other).mkdir()

    assert kept_in(tmp_path) == [Kept(2, 200.0, str(sooner)), Kept(11, 300.0, str(later))]
    assert kept_in(tmp_path / "nowhere") == []


def test_the_folder_of_all_nodes_is_the_configured_one_or_in_the_cache(tmp_path: Path) -> None:
    assert l4_root("", tmp_path, "mine") == tmp_path / "l4" / "mine"
    assert l4_root("/mnt/nvme", tmp_path, "mine") == Path("/mnt/nvme")
    assert l4_root("~/pages", tmp_path, "mine") == Path.home() / "pages"
