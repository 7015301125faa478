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

from kvtier.tier.base import Place
from kvtier.tier.host import HostTier
from kvtier.tier.page import PageCorrupt, slot_bytes

PAGE_BYTES = 360 * 1024
SLOT_BYTES = slot_bytes(PAGE_BYTES)

WORKER = """
import sys
from kvtier.tier.base import Place
from kvtier.tier.host import HostTier
from tier_pages import read_page, write_page
fd, nbytes, slot_bytes, page_bytes = map(int, sys.argv[1:])
tier = HostTier.attach(fd, nbytes, slot_bytes)
read_page(tier, Place(0, 0), 1, page_bytes)
write_page(tier, Place(0, 1), 2, page_bytes)
tier.close()
"""


def test_a_worker_process_sees_and_writes_the_same_slots() -> None:
    tier = HostTier(4 * SLOT_BYTES, SLOT_BYTES)
    write_page(tier, Place(0, 0), 1, PAGE_BYTES)

    sizes = [str(n) for n in (tier.fd, tier.capacity_bytes, SLOT_BYTES, PAGE_BYTES)]
    subprocess.run(
        [sys.executable, "-c", WORKER, *sizes],
        pass_fds=(tier.fd,),
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )

    read_page(tier, Place(0, 1), 2, PAGE_BYTES)
    tier.close()


def test_capacity_is_rounded_down_to_whole_slots() -> None:
    tier = HostTier(3 * SLOT_BYTES + SLOT_BYTES - 1, SLOT_BYTES)

    assert (tier.num_slots, tier.capacity_bytes) == (3, 3 * SLOT_BYTES)
    assert os.fstat(tier.fd).st_size == tier.capacity_bytes
    with pytest.raises(IndexError):
        tier.slot(Place(0, 3))
    with pytest.raises(IndexError):
        tier.slot(Place(1, 0))
    tier.close()


@pytest.mark.parametrize(("capacity", "slot"), [(SLOT_BYTES - 1, SLOT_BYTES), (2**20, 4096), (2**20, 5000)])
def test_sizes_that_hold_no_page_are_refused(capacity: int, slot: int) -> None:
    with pytest.raises(ValueError, match="slot"):
        HostTier(capacity, slot)


def test_attaching_more_than_the_slab_has_is_refused() -> None:
    tier = HostTier(2 * SLOT_BYTES, SLOT_BYTES)

    with pytest.raises(ValueError, match="can't lie"):
        HostTier.attach(tier.fd, 3 * SLOT_BYTES, SLOT_BYTES)

    tier.close()


def test_nobody_can_shrink_the_slab_under_a_reader() -> None:
    tier = HostTier(2 * SLOT_BYTES, SLOT_BYTES)

    with pytest.raises(PermissionError):
        os.ftruncate(tier.fd, SLOT_BYTES)

    tier.close()


def test_touching_ahead_changes_no_byte_written_meanwhile() -> None:
    tier = HostTier(256 * SLOT_BYTES, SLOT_BYTES)

    for index in range(tier.num_slots):
        tier.slot(Place(0, index))[:8] = index.to_bytes(8, "little")
    assert tier._toucher is not None
    tier._toucher.join()

    for index in range(tier.num_slots):
        assert int.from_bytes(tier.slot(Place(0, index))[:8], "little") == index
    assert tier.touched_bytes in (0, tier.capacity_bytes)  # 0: a kernel that can't
    tier.close()


def test_close_stops_the_touching_thread() -> None:
    before = threading.active_count()

    HostTier(512 * SLOT_BYTES, SLOT_BYTES).close()

    assert threading.active_count() == before


def test_a_view_that_outlives_the_tier_stays_readable() -> None:
    tier = HostTier(2 * SLOT_BYTES, SLOT_BYTES)
    tier.slot(Place(0, 1))[:4] = b"kept"
    view = tier.slot(Place(0, 1))

    tier.close()

    assert view[:4] == b"kept"
    with pytest.raises(ValueError, match="closed"):
        _ = tier.fd


def test_a_slot_is_aligned_for_direct_io() -> None:
    tier = HostTier(3 * SLOT_BYTES, SLOT_BYTES)

    addresses = [np.frombuffer(tier.slot(Place(0, n)), np.uint8).ctypes.data for n in range(3)]

    assert all(address % 4096 == 0 for address in addresses)
    tier.close()


def test_an_envelope_that_names_more_bytes_than_the_slot_has_is_corrupt() -> None:
    big = HostTier(slot_bytes(2 * PAGE_BYTES), slot_bytes(2 * PAGE_BYTES))
    write_page(big, Place(0, 0), 1, 2 * PAGE_BYTES)
    small = HostTier(SLOT_BYTES, SLOT_BYTES)
    small.slot(Place(0, 0))[:4096] = big.slot(Place(0, 0))[:4096]

    with pytest.raises(PageCorrupt):
        read_page(small, Place(0, 0), 1, PAGE_BYTES)
    with pytest.raises(ValueError, match="slot takes"):
        write_page(small, Place(0, 0), 1, 2 * PAGE_BYTES)

    big.close()
    small.close()


def test_pinning_without_a_gpu_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tier = HostTier(SLOT_BYTES, SLOT_BYTES)

    assert tier.register_pinned() is False

    tier.close()
