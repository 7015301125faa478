"""What every tier below L1 promises (`Tier` of tier/stores/base.py), held by each of them through one suite.

Another tier joins by adding its factory to TIERS.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tier_pages import (
    VARIANT,
    envelope_of,
    flip_on_disk,
    new_slot,
    page_key,
    payload_of,
    read_page,
    write_page,
)

from kvtier.tier.pages.page import ALIGN_BYTES, Envelope, PageCorrupt, PageMissing, slot_bytes
from kvtier.tier.stores.base import Place, Tier
from kvtier.tier.stores.host import HostTier
from kvtier.tier.stores.ssd import slab
from kvtier.tier.stores.ssd.layout import Store
from kvtier.tier.stores.ssd.store import open_ssd

PAGE_BYTES = 40 * 1024 + 256  # no whole number of 4 KiB
SLOT_BYTES = slot_bytes(PAGE_BYTES)
NUM_PLACES = 24


@dataclass
class Case:
    """A tier, places in it that are free, and a way to damage what it stores."""

    tier: Tier
    places: list[Place]
    flip: Callable[[Place, bytes], None]  # flips a bit of this run of bytes where the tier keeps the place


def host_case(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    tier = HostTier(NUM_PLACES * SLOT_BYTES)

    def flip(place: Place, needle: bytes) -> None:
        slot = tier.slot(place, PAGE_BYTES)
        slot[bytes(slot).index(needle)] ^= 1

    places = [Place(0, index * SLOT_BYTES // ALIGN_BYTES) for index in range(NUM_PLACES)]
    return Case(tier, places, flip)


def ssd_case(folder: Path, store: Store) -> Case:
    tier = open_ssd(folder / "l4", 16 * 2**20, store, SLOT_BYTES)
    places = [place for _ in range(NUM_PLACES) if (place := tier.allocator.alloc(SLOT_BYTES))]

    def flip(place: Place, needle: bytes) -> None:
        assert flip_on_disk(folder / "l4", needle) == 1

    return Case(tier, places, flip)


def slab_case(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ssd_case(folder, "slab")


def buffered_slab_case(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(slab, "_takes_direct_io", lambda folder: False)
    return ssd_case(folder, "slab")


def lmdb_case(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ssd_case(folder, "lmdb")


TIERS = {"host": host_case, "slab": slab_case, "slab-buffered": buffered_slab_case, "lmdb": lmdb_case}


@pytest.fixture(params=TIERS.values(), ids=TIERS.keys())
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    case: Case = request.param(tmp_path, monkeypatch)
    yield case
    case.tier.close()


def test_a_page_comes_back_as_it_was_written(case: Case) -> None:
    written = [write_page(case.tier, place, n, PAGE_BYTES) for n, place in enumerate(case.places)]

    read = [read_page(case.tier, place, n, PAGE_BYTES) for n, place in enumerate(case.places)]

    assert read == written


@pytest.mark.parametrize("nbytes", [256, 4096, 4097, PAGE_BYTES // 4096 * 4096])
def test_pages_of_other_lengths_come_back_too(case: Case, nbytes: int) -> None:
    # Each in a segment of its own: a segment serves one slot size.
    place = Place(case.places[-1].segment, 0)

    write_page(case.tier, place, 1, nbytes)

    assert read_page(case.tier, place, 1, nbytes).payload_bytes == nbytes


def test_memory_that_is_not_aligned_is_written_and_read_as_well(case: Case) -> None:
    payload = payload_of(3, PAGE_BYTES)
    shifted = memoryview(bytearray(b"x" + bytes(payload)))[1:]
    case.tier.write(case.places[0], envelope_of(3, payload), shifted)
    out = memoryview(bytearray(SLOT_BYTES + 1))[1:]

    case.tier.read(case.places[0], page_key(3), VARIANT, out)

    assert out[4096 : 4096 + PAGE_BYTES] == payload


def test_a_slot_never_written_is_a_miss(case: Case) -> None:
    write_page(case.tier, case.places[0], 0, PAGE_BYTES)

    with pytest.raises(PageMissing):
        read_page(case.tier, case.places[1], 1, PAGE_BYTES)


def test_another_key_than_the_slot_holds_is_a_miss(case: Case) -> None:
    write_page(case.tier, case.places[0], 1, PAGE_BYTES)

    with pytest.raises(PageMissing):
        case.tier.read(case.places[0], page_key(2), VARIANT, new_slot(SLOT_BYTES))


def test_another_variant_than_the_slot_holds_is_a_miss(case: Case) -> None:
    write_page(case.tier, case.places[0], 1, PAGE_BYTES)

    with pytest.raises(PageMissing):
        case.tier.read(case.places[0], page_key(1), "fp32", new_slot(SLOT_BYTES))


@pytest.mark.parametrize("at", [0, PAGE_BYTES // 2, PAGE_BYTES - 32])
def test_a_flipped_payload_bit_is_never_served(case: Case, at: int) -> None:
    write_page(case.tier, case.places[0], 1, PAGE_BYTES)

    case.flip(case.places[0], bytes(payload_of(1, PAGE_BYTES)[at : at + 32]))

    with pytest.raises(PageCorrupt):
        read_page(case.tier, case.places[0], 1, PAGE_BYTES)


def test_a_flipped_bit_of_the_envelope_is_never_served(case: Case) -> None:
    write_page(case.tier, case.places[0], 1, PAGE_BYTES)

    case.flip(case.places[0], page_key(0))  # the parent's key, which only the envelope holds

    with pytest.raises(PageCorrupt):
        read_page(case.tier, case.places[0], 1, PAGE_BYTES)


@pytest.mark.parametrize(
    "mislabel",
    [
        lambda envelope: replace(envelope, variant="fp32"),
        lambda envelope: replace(envelope, key=page_key(2)),
        lambda envelope: replace(envelope, spec_digest=b"another spec...."),
    ],
    ids=["variant", "key", "spec"],
)
def test_a_mislabelled_page_is_refused_or_never_served(
    case: Case, mislabel: Callable[[Envelope], Envelope]
) -> None:
    """Right bytes under a wrong name must fail: the checksum covers the name."""
    payload = payload_of(1, PAGE_BYTES)
    wrong = mislabel(envelope_of(1, payload))

    with pytest.raises(PageCorrupt):
        case.tier.write(case.places[0], wrong, payload)
        case.tier.read(case.places[0], wrong.key, wrong.variant, new_slot(SLOT_BYTES))


def test_a_wiped_slot_is_a_miss_and_its_neighbours_stand(case: Case) -> None:
    for n, place in enumerate(case.places[:3]):
        write_page(case.tier, place, n, PAGE_BYTES)

    case.tier.wipe(case.places[1])
    case.tier.wipe(case.places[5])  # never written: nothing to do

    with pytest.raises(PageMissing):
        read_page(case.tier, case.places[1], 1, PAGE_BYTES)
    read_page(case.tier, case.places[0], 0, PAGE_BYTES)
    read_page(case.tier, case.places[2], 2, PAGE_BYTES)


def test_a_reused_slot_holds_only_the_new_page(case: Case) -> None:
    for n, place in enumerate(case.places[:3]):
        write_page(case.tier, place, n, PAGE_BYTES)

    write_page(case.tier, case.places[1], 11, PAGE_BYTES)

    read_page(case.tier, case.places[1], 11, PAGE_BYTES)
    with pytest.raises(PageMissing):
        read_page(case.tier, case.places[1], 1, PAGE_BYTES)
    read_page(case.tier, case.places[0], 0, PAGE_BYTES)
    read_page(case.tier, case.places[2], 2, PAGE_BYTES)


def test_threads_on_different_places_do_not_disturb_each_other(case: Case) -> None:
    def work(thread: int) -> int:
        rng = random.Random(thread)
        mine = case.places[thread::4]
        held: dict[Place, int] = {}
        for step in range(60):
            place = rng.choice(mine)
            if rng.random() < 0.5:
                held[place] = thread * 1000 + step
                write_page(case.tier, place, held[place], PAGE_BYTES)
            elif place in held:
                read_page(case.tier, place, held[place], PAGE_BYTES)
        for place, number in held.items():
            read_page(case.tier, place, number, PAGE_BYTES)
        return len(held)

    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(work, range(4)))

    assert all(held)


def test_close_can_be_called_twice(case: Case) -> None:
    case.tier.close()
    case.tier.close()
