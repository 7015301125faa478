"""The slab of L3: shared memory that workers map, of a size that can't change."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tier_pages import read_page, write_page

from kvtier.tier.pages.page import ALIGN_BYTES, PageCorrupt, slot_bytes
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier

PAGE_BYTES = 360 * 1024
SLOT_BYTES = slot_bytes(PAGE_BYTES)


def place(number: int) -> Place:
    """Where the slots of such pages lie, one behind the other."""
    return Place(0, number * SLOT_BYTES // ALIGN_BYTES)


WORKER = """
import sys
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier
from tier_pages import read_page, write_page
fd, nbytes, other, page_bytes = map(int, sys.argv[1:])
tier = HostTier.attach(fd, nbytes)
read_page(tier, Place(0, 0), 1, page_bytes)
write_page(tier, Place(0, other), 2, page_bytes)
tier.close()
"""


def test_a_worker_process_sees_and_writes_the_same_slots() -> None:
    tier = HostTier(4 * SLOT_BYTES)
    write_page(tier, place(0), 1, PAGE_BYTES)

    sizes = [str(n) for n in (tier.fd, tier.capacity_bytes, place(1).index, PAGE_BYTES)]
    subprocess.run(
        [sys.executable, "-c", WORKER, *sizes],
        pass_fds=(tier.fd,),
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "kits")},
    )

    read_page(tier, place(1), 2, PAGE_BYTES)
    tier.close()


def test_a_slot_lies_within_the_slab() -> None:
    tier = HostTier(3 * SLOT_BYTES + 1)

    assert os.fstat(tier.fd).st_size == tier.capacity_bytes == 3 * SLOT_BYTES
    assert len(tier.slot(place(2), PAGE_BYTES)) == SLOT_BYTES
    for outside in (place(3), Place(0, place(2).index + 1), Place(1, 0), Place(0, -1)):
        with pytest.raises(IndexError):
            tier.slot(outside, PAGE_BYTES)
    tier.close()


def test_pages_of_several_sizes_lie_beside_each_other() -> None:
    tier = HostTier(2**20)
    sizes = {0: 4096, 2: 40_000, 13: 100, 15: 300_000}

    for index, nbytes in sizes.items():
        write_page(tier, Place(0, index), index, nbytes)

    for index, nbytes in sizes.items():
        read_page(tier, Place(0, index), index, nbytes)
    tier.close()


@pytest.mark.parametrize("capacity", [-1, 0, 4095, 8191])
def test_a_slab_that_holds_no_page_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="no room for one slot"):
        HostTier(capacity)


def test_attaching_more_than_the_slab_has_is_refused() -> None:
    tier = HostTier(2 * SLOT_BYTES)

    for nbytes in (3 * SLOT_BYTES, 0, SLOT_BYTES - 1):
        with pytest.raises(ValueError, match="can't lie"):
            HostTier.attach(tier.fd, nbytes)

    tier.close()


def test_nothing_can_shrink_the_slab_under_a_reader() -> None:
    tier = HostTier(2 * SLOT_BYTES)

    with pytest.raises(PermissionError):
        os.ftruncate(tier.fd, SLOT_BYTES)

    tier.close()


def test_touching_ahead_changes_no_byte_written_meanwhile() -> None:
    tier = HostTier(256 * SLOT_BYTES)

    for index in range(256):
        tier.slot(place(index), PAGE_BYTES)[:8] = index.to_bytes(8, "little")
    assert tier._toucher is not None
    tier._toucher.join()

    for index in range(256):
        assert int.from_bytes(tier.slot(place(index), PAGE_BYTES)[:8], "little") == index
    assert tier.touched_bytes in (0, tier.capacity_bytes)  # 0: a kernel that can't
    tier.close()


def test_close_stops_the_touching_thread() -> None:
    before = set(threading.enumerate())

    HostTier(512 * SLOT_BYTES).close()

    assert set(threading.enumerate()) <= before


def test_a_view_that_outlives_the_tier_stays_readable() -> None:
    tier = HostTier(2 * SLOT_BYTES)
    tier.slot(place(1), PAGE_BYTES)[:4] = b"kept"
    view = tier.slot(place(1), PAGE_BYTES)

    tier.close()

    assert view[:4] == b"kept"
    with pytest.raises(ValueError, match="closed"):
        _ = tier.fd


def test_a_slot_is_aligned_for_direct_io() -> None:
    tier = HostTier(3 * SLOT_BYTES)

    addresses = [np.frombuffer(tier.slot(place(n), PAGE_BYTES), np.uint8).ctypes.data for n in range(3)]

    assert all(address % 4096 == 0 for address in addresses)
    tier.close()


def test_an_envelope_that_names_more_bytes_than_the_slab_has_is_corrupt() -> None:
    big = HostTier(slot_bytes(2 * PAGE_BYTES))
    write_page(big, Place(0, 0), 1, 2 * PAGE_BYTES)
    small = HostTier(SLOT_BYTES)
    small.slot(Place(0, 0), PAGE_BYTES)[:4096] = big.slot(Place(0, 0), PAGE_BYTES)[:4096]

    with pytest.raises(PageCorrupt, match="the slab ends before"):
        read_page(small, Place(0, 0), 1, PAGE_BYTES)
    with pytest.raises(ValueError, match="the slab ends after"):
        write_page(small, Place(0, 0), 1, 2 * PAGE_BYTES)

    big.close()
    small.close()


def test_pinning_without_a_gpu_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tier = HostTier(SLOT_BYTES)

    assert tier.register_pinned() is False

    tier.close()
