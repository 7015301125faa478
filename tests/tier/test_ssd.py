"""L4 over restarts and damage: what was recorded comes back, what is damaged is healed or fresh, and is said."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
from tier_pages import (
    TENANT,
    VARIANT,
    entry_of,
    envelope_of,
    flip_bit,
    flip_on_disk,
    page_key,
    payload_of,
    read_page,
    used_on_disk,
    write_page,
)

from kvtier.tier.pages.page import PageCorrupt, PageMissing, slot_bytes
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.ssd import slab
from kvtier.tier.stores.ssd.layout import Layout, Store
from kvtier.tier.stores.ssd.records import pack_record, record_key
from kvtier.tier.stores.ssd.store import SsdTier, open_ssd

PAGE_BYTES = 40 * 1024
SLOT_BYTES = slot_bytes(PAGE_BYTES)
CAPACITY = 12 * 2**20
STORES: list[Store] = ["slab", "lmdb"]
OTHER_STORE: dict[Store, Store] = {"slab": "lmdb", "lmdb": "slab"}
OTHER_TENANT = b"another tenant.."


def open_l4(folder: Path, store: Store = "slab", capacity: int = CAPACITY, slot: int = SLOT_BYTES) -> SsdTier:
    return open_ssd(folder / "l4", capacity, store, slot)


def fill(tier: SsdTier, numbers: range, tenant: bytes = TENANT) -> dict[int, Place]:
    """Write pages and record them in one commit."""
    places: dict[int, Place] = {}
    for number in numbers:
        place = tier.allocator.alloc(SLOT_BYTES)
        assert place is not None
        write_page(tier, place, number, PAGE_BYTES, tenant)
        places[number] = place
    tier.commit([entry_of(number, place, PAGE_BYTES, tenant) for number, place in places.items()])
    return places


def recovered_numbers(tier: SsdTier, among: range) -> list[int]:
    """Which of these pages came back; each is held against its right bytes."""
    numbers = {page_key(number): number for number in among}
    found: list[int] = []
    for entry in tier.recovered:
        number = numbers[entry.envelope.key]
        read_page(tier, entry.place, number, PAGE_BYTES)
        found.append(number)
    tier.allocator.check()
    assert tier.allocator.used_bytes == SLOT_BYTES * len(found)
    return sorted(found)


# ---- a sound folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_recorded_pages_come_back_after_a_restart_in_order_of_last_use(tmp_path: Path, store: Store) -> None:
    tier = open_l4(tmp_path, store)
    places = fill(tier, range(20))
    tier.close()

    again = open_l4(tmp_path, store)

    expected = [entry_of(number, place, PAGE_BYTES) for number, place in places.items()]
    assert again.recovered == sorted(expected, key=lambda entry: entry.last_use_s)
    assert recovered_numbers(again, range(20)) == list(range(20))
    assert again.notes == []
    again.close()


@pytest.mark.parametrize("store", STORES)
def test_dropped_pages_do_not_come_back_and_uses_are_updated(tmp_path: Path, store: Store) -> None:
    tier = open_l4(tmp_path, store)
    places = fill(tier, range(4))
    used = entry_of(2, places[2], PAGE_BYTES)
    used.uses, used.last_use_s = 77, 2e9

    tier.commit([used], [(page_key(0), VARIANT), (page_key(3), VARIANT), (page_key(99), VARIANT)])
    tier.close()

    again = open_l4(tmp_path, store)
    assert recovered_numbers(again, range(4)) == [1, 2]
    assert again.recovered[-1] == used
    again.close()


@pytest.mark.parametrize("store", STORES)
def test_all_files_together_stay_within_the_budget(tmp_path: Path, store: Store) -> None:
    tier = open_l4(tmp_path, store)
    assert tier.page_capacity_bytes > 0.7 * CAPACITY
    held: list[tuple[int, Place]] = []

    for number in range(3 * tier.page_capacity_bytes // SLOT_BYTES):
        place = tier.allocator.alloc(SLOT_BYTES)
        if place is None:
            old, place = held.pop(0)
            tier.commit([], [(page_key(old), VARIANT)])
        write_page(tier, place, number, PAGE_BYTES)
        tier.commit([entry_of(number, place, PAGE_BYTES)])
        held.append((number, place))
        assert used_on_disk(tmp_path / "l4") <= CAPACITY
    tier.close()

    again = open_l4(tmp_path, store)
    assert len(again.recovered) == len(held) == tier.page_capacity_bytes // SLOT_BYTES
    assert used_on_disk(tmp_path / "l4") <= CAPACITY
    again.close()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("capacity", [4 * 2**20, 10 * 2**20, 300 * 2**20])
def test_any_budget_is_used_nearly_whole_and_never_exceeded(
    tmp_path: Path, store: Store, capacity: int
) -> None:
    tier = open_l4(tmp_path, store, capacity=capacity)

    assert 0 < tier.page_capacity_bytes < capacity
    assert tier.page_capacity_bytes % tier.segment_bytes == 0
    if capacity > 100 * 2**20:
        assert tier.page_capacity_bytes > 0.9 * capacity
    tier.close()


def test_a_budget_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no room for a page"):
        open_l4(tmp_path, capacity=SLOT_BYTES)


def test_a_second_opener_is_told_who_has_the_folder(tmp_path: Path) -> None:
    tier = open_l4(tmp_path)

    with pytest.raises(OSError, match=f"process {os.getpid()}") as caught:
        open_l4(tmp_path)

    assert caught.value.errno == errno.EBUSY
    tier.close()
    open_l4(tmp_path).close()


def test_nothing_else_can_look_into_the_folder(tmp_path: Path) -> None:
    tier = open_l4(tmp_path)
    fill(tier, range(1))

    assert stat.S_IMODE((tmp_path / "l4").stat().st_mode) == 0o700
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "l4").iterdir() if "-lock" not in path.name
    )
    tier.close()


def test_a_disk_without_direct_io_serves_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "_takes_direct_io", lambda folder: False)

    tier = open_l4(tmp_path)

    assert len(tier.notes) == 1 and "O_DIRECT" in tier.notes[0]
    fill(tier, range(5))
    tier.close()


@pytest.mark.parametrize("store", STORES)
def test_a_batch_writes_every_page_but_the_one_whose_bytes_are_wrong(tmp_path: Path, store: Store) -> None:
    tier = open_l4(tmp_path, store)
    pages = []
    for number in range(9):
        place = tier.allocator.alloc(SLOT_BYTES)
        assert place is not None
        payload = payload_of(number, PAGE_BYTES)
        bytes_there = payload_of(99, PAGE_BYTES) if number == 4 else payload
        pages.append((place, envelope_of(number, payload), bytes_there))

    results = tier.write_batch(pages)

    assert [type(result) for result in results] == [type(None)] * 4 + [PageCorrupt] + [type(None)] * 4
    for number, (place, _, _) in enumerate(pages):
        if number != 4:
            read_page(tier, place, number, PAGE_BYTES)
    with pytest.raises(PageMissing):
        read_page(tier, pages[4][0], 4, PAGE_BYTES)
    assert tier.write_batch([]) == []
    tier.close()


# ---- refusals of the disk --------------------------------------------------------------------------------------


def test_a_failed_slot_write_is_an_oserror_and_leaves_the_other_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_l4(tmp_path)
    places = fill(tier, range(3))

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        place = tier.allocator.alloc(SLOT_BYTES)
        assert place is not None
        with pytest.raises(OSError, match="No space left"):
            write_page(tier, place, 7, PAGE_BYTES)
        page = (place, envelope_of(7, payload_of(7, PAGE_BYTES)), payload_of(7, PAGE_BYTES))
        assert [type(result) for result in tier.write_batch([page, page])] == [OSError, OSError]
    tier.allocator.free(place)

    with pytest.raises(PageMissing):
        read_page(tier, place, 7, PAGE_BYTES)
    assert all(read_page(tier, place, number, PAGE_BYTES) for number, place in places.items())
    fill(tier, range(7, 8))
    tier.close()


def test_a_short_write_is_an_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_l4(tmp_path)
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: 4096)

    with pytest.raises(OSError, match="wrote 4096 bytes"):
        fill(tier, range(1))

    tier.close()


def test_a_full_catalogue_is_an_oserror_and_keeps_what_it_has(tmp_path: Path) -> None:
    """A catalogue sized for large pages fills up when small ones are recorded: the commit fails as a whole."""
    tier = open_l4(tmp_path, slot=slot_bytes(2**20))
    places = fill(tier, range(3))

    with pytest.raises(OSError) as caught:
        tier.commit(entry_of(number, Place(0, number), 64) for number in range(100, 4000))

    assert caught.value.errno == errno.ENOSPC
    tier.commit([], [(page_key(0), VARIANT)])
    tier.close()
    again = open_l4(tmp_path, slot=slot_bytes(2**20))
    assert recovered_numbers(again, range(3)) == [1, 2]
    assert places
    again.close()


@pytest.mark.parametrize("store", STORES)
def test_a_tier_told_of_its_small_pages_has_catalogue_and_segments_for_them(
    tmp_path: Path, store: Store
) -> None:
    large, small = slot_bytes(2**17), slot_bytes(4096)
    tier = open_ssd(tmp_path / "l4", 16 * 2**20, store, large, min_slot_bytes=small)

    assert tier.page_capacity_bytes >= 8 * tier.segment_bytes, "a size needs segments of its own"
    entries = []
    while (place := tier.allocator.alloc(small)) is not None:
        entries.append(entry_of(len(entries), place, 4096))
    for at in range(0, len(entries), 64):
        tier.commit(entries[at : at + 64])
    tier.commit(entries)  # all uses change at once: each leaf of the catalogue is written again

    assert len(entries) * small > 0.9 * tier.page_capacity_bytes
    tier.close()


@pytest.mark.parametrize("small", [4096, 2 * SLOT_BYTES])
def test_a_smallest_slot_that_cannot_be_is_refused(tmp_path: Path, small: int) -> None:
    with pytest.raises(ValueError, match="min_slot_bytes"):
        open_ssd(tmp_path / "l4", 16 * 2**20, "slab", SLOT_BYTES, min_slot_bytes=small)


def test_a_full_lmdb_file_fails_the_write_and_keeps_what_it_has(tmp_path: Path) -> None:
    tier = open_l4(tmp_path, "lmdb")
    places = fill(tier, range(3))
    slots = tier.segment_bytes // SLOT_BYTES

    with pytest.raises(OSError) as caught:  # no owner would give out places past the last segment
        for number in range(2 * CAPACITY // SLOT_BYTES):
            write_page(tier, Place(1000 + number // slots, number % slots), 100 + number, PAGE_BYTES)

    assert caught.value.errno == errno.ENOSPC
    assert all(read_page(tier, place, number, PAGE_BYTES) for number, place in places.items())
    tier.close()


# ---- damage ----------------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def truncated_to(share: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


DAMAGES: dict[str, Damage] = {
    "deleted": lambda path: path.unlink(),
    "empty": truncated_to(0.0),
    "half": truncated_to(0.5),
    "last byte gone": lambda path: os.truncate(path, path.stat().st_size - 1),
    "garbage": garbage,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_catalogue_is_rebuilt_from_the_slots(tmp_path: Path, damage: Damage) -> None:
    tier = open_l4(tmp_path)
    fill(tier, range(30))
    tier.close()
    damage(tmp_path / "l4" / "catalogue.mdb")

    again = open_l4(tmp_path)

    assert recovered_numbers(again, range(30)) == list(range(30))
    assert len(again.notes) == 1 and "30 pages found" in again.notes[0]
    fill(again, range(30, 40))
    again.close()
    third = open_l4(tmp_path)
    assert recovered_numbers(third, range(40)) == list(range(40))
    assert third.notes == []
    third.close()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_catalogue_of_an_lmdb_store_is_rebuilt_from_the_values(
    tmp_path: Path, damage: Damage
) -> None:
    tier = open_l4(tmp_path, "lmdb")
    fill(tier, range(30))
    tier.close()
    damage(tmp_path / "l4" / "catalogue.mdb")

    again = open_l4(tmp_path, "lmdb")

    assert recovered_numbers(again, range(30)) == list(range(30))
    assert len(again.notes) == 1 and "30 pages found" in again.notes[0]
    again.close()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_values_of_an_lmdb_store_are_lost_and_counted(tmp_path: Path, damage: Damage) -> None:
    tier = open_l4(tmp_path, "lmdb")
    fill(tier, range(30))
    tier.close()
    damage(tmp_path / "l4" / "pages.mdb")

    again = open_l4(tmp_path, "lmdb")

    assert again.recovered == []
    assert len(again.notes) == 1 and "of pages are lost; 30 pages dropped" in again.notes[0]
    places = fill(again, range(30, 40))
    assert all(read_page(again, place, number, PAGE_BYTES) for number, place in places.items())
    again.close()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("store", "name"), [("slab", "catalogue.mdb"), ("lmdb", "pages.mdb")])
def test_a_flipped_bit_anywhere_in_an_lmdb_file_serves_no_wrong_page(
    tmp_path: Path, store: Store, name: str, seed: int
) -> None:
    """The flip may lie in a record, the tree, the free list, a page's bytes or unused space."""
    tier = open_l4(tmp_path, store)
    places = fill(tier, range(30))
    tier.commit([], [(page_key(number), VARIANT) for number in range(5)])
    rng = random.Random(seed)
    path = tmp_path / "l4" / name
    tier.close()
    flip_bit(path, rng.randrange(min(path.stat().st_size, 64 * 1024)), rng.randrange(8))

    again = open_l4(tmp_path, store)

    lost = 0
    for entry in again.recovered:
        number = next(n for n in places if page_key(n) == entry.envelope.key)
        try:
            read_page(again, entry.place, number, PAGE_BYTES)
        except (PageCorrupt, PageMissing):
            lost += 1
    assert lost <= 1
    gone = 25 - len(again.recovered)
    assert gone <= 0 or (store == "lmdb" and f"{gone} pages dropped" in again.notes[0])
    assert len(again.notes) <= 1
    fill(again, range(50, 60))
    again.close()


@pytest.mark.parametrize(("store", "name"), [("slab", "catalogue.mdb"), ("lmdb", "pages.mdb")])
def test_a_flipped_bit_anywhere_in_a_meta_page_never_ends_the_process(
    tmp_path: Path, store: Store, name: str
) -> None:
    """LMDB believes sizes, flags, addresses and page numbers there; a child opens the folder, writes and reads."""
    tier = open_l4(tmp_path, store)
    fill(tier, range(30))
    tier.commit([], [(page_key(number), VARIANT) for number in range(5)])
    tier.close()
    files = [
        tmp_path / "l4" / each for each in ("catalogue.mdb", "pages.mdb") if (tmp_path / "l4" / each).exists()
    ]
    whole = {file: file.read_bytes() for file in files}

    for offset in range(160):
        for file, content in whole.items():
            file.write_bytes(content)
        flip_bit(tmp_path / "l4" / name, offset % 2 * 4096 + offset, offset % 8)
        child = os.fork()
        if child == 0:
            try:
                again = open_l4(tmp_path, store)
                again.commit(
                    [entry_of(number, Place(0, 50 + number), PAGE_BYTES) for number in range(50, 60)]
                )
                again.close()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFEXITED(status), f"bit {offset % 8} of byte {offset}: signal {os.WTERMSIG(status)}"


@pytest.mark.parametrize("store", STORES)
def test_one_bad_record_costs_no_other_its_uses(tmp_path: Path, store: Store) -> None:
    tier = open_l4(tmp_path, store)
    places = fill(tier, range(6))
    tier.close()
    stored = pack_record(record_key(page_key(3), VARIANT), entry_of(3, places[3], PAGE_BYTES))
    assert flip_on_disk(tmp_path / "l4", stored) == 1

    again = open_l4(tmp_path, store)

    assert recovered_numbers(again, range(6)) == list(range(6))
    uses = {entry.envelope.key: entry.uses for entry in again.recovered}
    assert [uses[page_key(number)] for number in range(6)] == [0, 1, 2, 0, 4, 5]
    assert len(again.notes) == 1 and "a record's checksum differs (1 such)" in again.notes[0]
    again.close()


def test_a_rebuild_that_takes_long_finds_all_pages_and_leaves_their_bytes_to_be_verified_when_read(
    tmp_path: Path,
) -> None:
    page_bytes = 200 * 1024  # a slot whose header alone is read
    size = slot_bytes(page_bytes)
    tier = open_l4(tmp_path, slot=size)
    places = {number: tier.allocator.alloc(size) for number in range(6)}
    for number, place in places.items():
        assert place is not None
        write_page(tier, place, number, page_bytes)
        tier.commit([entry_of(number, place, page_bytes)])
    tier.close()
    assert flip_on_disk(tmp_path / "l4", bytes(payload_of(3, page_bytes)[1000:1032])) == 1
    (tmp_path / "l4" / "catalogue.mdb").unlink()

    again = open_ssd(tmp_path / "l4", CAPACITY, "slab", size, verify_s=0.0)

    assert {entry.envelope.key for entry in again.recovered} == {page_key(number) for number in range(6)}
    for number, place in places.items():
        assert place is not None
        if number == 3:
            with pytest.raises(PageCorrupt):
                read_page(again, place, number, page_bytes)
        else:
            read_page(again, place, number, page_bytes)
    again.close()


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_a_damaged_slab_file_costs_only_its_pages(tmp_path: Path, damage: str) -> None:
    tier = open_l4(tmp_path, capacity=40 * 2**20)
    slots = tier.segment_bytes // SLOT_BYTES
    fill(tier, range(slots + 10))
    tier.close()
    first = min((tmp_path / "l4").glob("slab-*"))
    if damage == "deleted":
        first.unlink()
        expected = list(range(slots, slots + 10))
    else:
        os.truncate(first, 5 * SLOT_BYTES + 100)
        expected = [*range(5), *range(slots, slots + 10)]

    again = open_l4(tmp_path, capacity=40 * 2**20)

    assert recovered_numbers(again, range(slots + 10)) == expected
    assert len(again.notes) == 1 and f"{slots + 10 - len(expected)} pages dropped" in again.notes[0]
    fill(again, range(1000, 1000 + slots))
    again.close()
    third = open_l4(tmp_path, capacity=40 * 2**20)
    assert len(third.recovered) == len(expected) + slots and third.notes == []
    third.close()


def test_a_rebuild_passes_over_a_page_with_a_flipped_bit(tmp_path: Path) -> None:
    tier = open_l4(tmp_path)
    fill(tier, range(6))
    tier.close()
    assert flip_on_disk(tmp_path / "l4", bytes(payload_of(3, PAGE_BYTES)[1000:1032])) == 1
    (tmp_path / "l4" / "catalogue.mdb").unlink()

    again = open_l4(tmp_path)

    assert recovered_numbers(again, range(6)) == [0, 1, 2, 4, 5]
    again.close()


# ---- forgetting ------------------------------------------------------------------------------------------------


def test_a_rebuild_does_not_bring_back_wiped_pages(tmp_path: Path) -> None:
    tier = open_l4(tmp_path)
    places = fill(tier, range(6))
    tier.commit([], [(page_key(number), VARIANT) for number in (1, 2)])
    tier.wipe(places[1])
    tier.wipe(places[2])
    tier.close()
    (tmp_path / "l4" / "catalogue.mdb").unlink()

    again = open_l4(tmp_path)

    assert recovered_numbers(again, range(6)) == [0, 3, 4, 5]
    again.close()


def test_a_rebuild_does_not_bring_back_a_forgotten_tenants_stale_copies(tmp_path: Path) -> None:
    """Page 1 is evicted (its slot keeps the old header), then the tenant is cleared: nothing wipes that slot."""
    tier = open_l4(tmp_path)
    fill(tier, range(3))
    tier.commit([], [(page_key(1), VARIANT)])
    fill(tier, range(10, 12), OTHER_TENANT)

    tier.forget(TENANT)
    fill(tier, range(20, 22), TENANT)
    tier.close()
    (tmp_path / "l4" / "catalogue.mdb").unlink()

    again = open_l4(tmp_path)
    assert recovered_numbers(again, range(30)) == [10, 11, 20, 21]
    again.forget(None)
    fill(again, range(25, 26))
    again.close()
    (tmp_path / "l4" / "catalogue.mdb").unlink()
    third = open_l4(tmp_path)
    assert recovered_numbers(third, range(30)) == [25]
    third.close()


# ---- another folder than this program's --------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version":99}\n', None])
@pytest.mark.parametrize("store", STORES)
def test_an_unreadable_layout_is_made_again_from_the_files(
    tmp_path: Path, store: Store, content: bytes | None
) -> None:
    tier = open_l4(tmp_path, store)
    fill(tier, range(3))
    tier.close()
    layout = tmp_path / "l4" / "layout"
    layout.unlink() if content is None else layout.write_bytes(content)

    again = open_l4(tmp_path, store)

    assert recovered_numbers(again, range(3)) == [0, 1, 2]
    assert len(again.notes) == 1 and "its layout file" in again.notes[0] and "made again" in again.notes[0]
    again.close()
    third = open_l4(tmp_path, store)
    assert recovered_numbers(third, range(3)) == [0, 1, 2] and third.notes == []
    third.close()


def test_who_was_cleared_stays_so_where_the_layout_that_said_it_is_lost(tmp_path: Path) -> None:
    """Page 1 was evicted and its slot keeps its header; with the layout the clear that made it dead is forgotten."""
    tier = open_l4(tmp_path)
    fill(tier, range(3))
    tier.commit([], [(page_key(number), VARIANT) for number in range(3)])
    tier.forget(TENANT)
    tier.close()
    (tmp_path / "l4" / "layout").unlink()
    (tmp_path / "l4" / "catalogue.mdb").unlink()

    again = open_l4(tmp_path)

    assert again.recovered == []
    assert any("0 pages found" in note for note in again.notes)
    again.close()


def modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["notes.txt", "lock", "layout", "catalogue.mdb/inner"])
@pytest.mark.parametrize("store", STORES)
def test_a_folder_of_other_things_is_refused_and_left_as_it_was(
    tmp_path: Path, store: Store, name: str
) -> None:
    folder = tmp_path / "l4"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("dear diary")
    (folder / "another.txt").write_text("mine")
    folder.chmod(0o755)
    before = modes(folder)

    with pytest.raises(
        ValueError, match=f"{folder} is not empty and holds no kvtier pages: name an empty folder"
    ):
        open_l4(tmp_path, store)

    assert modes(folder) == before and stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert (folder / name).read_text() == "dear diary"


@pytest.mark.parametrize("name", ["lock", "layout"])
def test_one_file_by_a_name_of_ours_does_not_make_a_folder_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / "l4").mkdir()
    (tmp_path / "l4" / name).write_text("dear diary")

    with pytest.raises(ValueError, match="holds no kvtier pages"):
        open_l4(tmp_path)

    assert (tmp_path / "l4" / name).read_text() == "dear diary"


@pytest.mark.parametrize("within", [[], ["lost+found"], ["lock"]])
def test_an_empty_folder_keeps_its_mode_and_a_new_one_is_the_users_own(
    tmp_path: Path, within: list[str]
) -> None:
    folder = tmp_path / "l4"
    folder.mkdir()
    for name in within:  # a new file system, or a first start that was cut short
        (folder / name).write_text("123\n")
    folder.chmod(0o755)

    open_l4(tmp_path).close()
    open_l4(tmp_path / "new").close()

    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert set(modes(folder).values()) - {0o644} == {0o600}
    assert stat.S_IMODE((tmp_path / "new" / "l4").stat().st_mode) == 0o700


@pytest.mark.parametrize("store", STORES)
def test_other_files_beside_ours_stay_even_when_it_starts_empty(tmp_path: Path, store: Store) -> None:
    tier = open_l4(tmp_path, store)
    fill(tier, range(3))
    tier.close()
    (tmp_path / "l4" / "notes.txt").write_text("mine")
    again = open_l4(tmp_path, store)
    assert recovered_numbers(again, range(3)) == [0, 1, 2]
    again.close()

    fresh = open_l4(tmp_path, OTHER_STORE[store])

    assert fresh.recovered == [] and len(fresh.notes) == 1
    assert (tmp_path / "l4" / "notes.txt").read_text() == "mine"
    fresh.close()


def test_a_folder_of_a_later_format_is_set_aside_and_is_said(tmp_path: Path) -> None:
    tier = open_l4(tmp_path)
    fill(tier, range(3))
    tier.close()
    layout = Layout.load(tmp_path / "l4")
    layout.version = 99
    layout.save(tmp_path / "l4")

    again = open_l4(tmp_path)

    assert again.recovered == []
    assert len(again.notes) == 1 and "format 99" in again.notes[0]
    assert f"3 pages of other sizes are set aside in {tmp_path / 'l4' / 'aside'}" in again.notes[0]
    again.close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    tier = open_l4(tmp_path)
    (tmp_path / "l4" / "notes.txt").write_text("mine")
    tier.close()
    (tmp_path / "l4" / "layout").write_bytes(b"nonsense")

    open_l4(tmp_path).close()

    assert (tmp_path / "l4" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("store", STORES)
def test_a_smaller_budget_keeps_the_pages_used_last_and_says_how_many_go(
    tmp_path: Path, store: Store
) -> None:
    tier = open_l4(tmp_path, store, capacity=40 * 2**20)
    num_pages = tier.page_capacity_bytes // SLOT_BYTES
    fill(tier, range(num_pages))
    tier.close()

    again = open_l4(tmp_path, store, capacity=30 * 2**20)

    kept = recovered_numbers(again, range(num_pages))
    assert len(kept) > 0.8 * again.page_capacity_bytes // SLOT_BYTES > 0
    assert kept == list(range(num_pages - len(kept), num_pages))
    assert len(again.notes) == 1 and f"{num_pages - len(kept)} pages dropped" in again.notes[0]
    assert used_on_disk(tmp_path / "l4") <= 30 * 2**20
    again.close()
    larger = open_l4(tmp_path, store, capacity=60 * 2**20)
    assert recovered_numbers(larger, range(num_pages)) == kept and larger.notes == []
    assert larger.page_capacity_bytes > again.page_capacity_bytes
    larger.close()


@pytest.mark.parametrize("store", STORES)
def test_a_segment_that_changes_its_slot_size_serves_the_new_pages_only(tmp_path: Path, store: Store) -> None:
    small_bytes = 8 * 1024
    tier = open_l4(tmp_path, store)
    places = fill(tier, range(tier.page_capacity_bytes // SLOT_BYTES))
    tier.commit([], [(page_key(number), VARIANT) for number in places])
    for place in places.values():
        tier.allocator.free(place)

    small = {n: tier.allocator.alloc(slot_bytes(small_bytes)) for n in range(1000, 1300)}
    for number, place in small.items():
        assert place is not None
        write_page(tier, place, number, small_bytes)
        tier.commit([entry_of(number, place, small_bytes)])
    tier.close()

    again = open_l4(tmp_path, store)
    assert len(again.recovered) == 300
    for number, place in small.items():
        assert place is not None
        read_page(again, place, number, small_bytes)
    again.close()


# ---- pages of other sizes ----------------------------------------------------------------------------------------

OTHER_SLOT = slot_bytes(2**20)  # its segments are none that this file's folders have
OTHER_CAPACITY = 80 * 2**20


@pytest.mark.parametrize("store", STORES)
def test_pages_of_other_sizes_are_set_aside_and_come_back_with_their_sizes(
    tmp_path: Path, store: Store
) -> None:
    tier = open_l4(tmp_path, store, capacity=OTHER_CAPACITY)
    fill(tier, range(30))
    tier.close()

    other = open_l4(tmp_path, OTHER_STORE[store], capacity=OTHER_CAPACITY)

    assert other.recovered == []
    assert len(other.notes) == 1 and f"30 pages of other sizes are set aside in {tmp_path}" in other.notes[0]
    fill(other, range(100, 110))
    other.close()
    again = open_l4(tmp_path, store, capacity=OTHER_CAPACITY)
    assert recovered_numbers(again, range(30)) == list(range(30))
    assert len(again.notes) == 1 and "10 pages of other sizes are set aside" in again.notes[0]
    assert len(list((tmp_path / "l4").glob("aside*"))) == 1
    again.close()


def test_what_lies_aside_goes_used_longest_ago_first_when_its_room_is_needed_and_is_counted(
    tmp_path: Path,
) -> None:
    tier = open_l4(tmp_path, capacity=OTHER_CAPACITY)
    num_pages = tier.page_capacity_bytes // SLOT_BYTES
    fill(tier, range(num_pages))
    tier.close()
    told: list[str] = []
    other = open_l4(tmp_path, capacity=OTHER_CAPACITY, slot=OTHER_SLOT * 2)
    assert f"{num_pages} pages of other sizes" in other.notes[0]
    other.watch(told.append)
    assert told == []

    fill(other, range(1000, 1001))
    other.close()

    assert used_on_disk(tmp_path / "l4") <= OTHER_CAPACITY
    (deleted,) = [int(note.split(": ")[1].split()[0]) for note in told]
    again = open_l4(tmp_path, capacity=OTHER_CAPACITY)
    assert recovered_numbers(again, range(num_pages)) == list(range(deleted, num_pages))
    assert any(f"{deleted} pages dropped" in note for note in again.notes)
    again.close()


def test_who_is_cleared_while_the_pages_lie_aside_does_not_come_back(tmp_path: Path) -> None:
    """Not by the catalogue, nor by a rebuild, and what is stored after that stays."""
    tier = open_l4(tmp_path, capacity=OTHER_CAPACITY)
    fill(tier, range(3))
    fill(tier, range(10, 12), OTHER_TENANT)
    tier.close()
    other = open_l4(tmp_path, "lmdb", capacity=OTHER_CAPACITY)
    other.forget(TENANT)
    other.close()

    for rebuilds in (False, True):
        again = open_l4(tmp_path, capacity=OTHER_CAPACITY)
        stored = [20] if rebuilds else []
        assert recovered_numbers(again, range(30)) == [10, 11, *stored]
        assert not any("dropped" in note for note in again.notes)
        if not rebuilds:
            fill(again, range(20, 21))
        again.close()
        (tmp_path / "l4" / "catalogue.mdb").unlink()


# ---- what happens to the folder under a running node --------------------------------------------------------------


def test_a_folder_that_is_deleted_under_a_running_tier_is_noticed_and_its_pages_are_not_served(
    tmp_path: Path,
) -> None:
    tier = open_l4(tmp_path)
    places = fill(tier, range(3))
    told: SimpleQueue[str] = SimpleQueue()
    tier.watch(told.put, every_s=0.01)

    shutil.rmtree(tmp_path / "l4")

    assert "its files were deleted while the node runs" in told.get(timeout=30.0)
    with pytest.raises(OSError, match="were deleted"):
        read_page(tier, places[0], 0, PAGE_BYTES)
    with pytest.raises(OSError, match="were deleted"):
        fill(tier, range(7, 8))
    tier.close()
    again = open_l4(tmp_path)
    assert again.recovered == [] and again.notes == []
    again.close()


def test_a_drop_whose_commit_failed_is_done_by_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_l4(tmp_path)
    places = fill(tier, range(3))
    zombie = entry_of(1, places[1], PAGE_BYTES)
    zombie.last_use_s = 5e9  # used after all others: it would win the place
    tier.commit([zombie])
    too_many = [entry_of(number, Place(0, number), 64) for number in range(10_000, 30_000)]
    with pytest.raises(OSError):
        tier.commit(too_many, [(page_key(1), VARIANT)])

    write_page(tier, places[1], 9, PAGE_BYTES)
    tier.commit([entry_of(9, places[1], PAGE_BYTES)])
    tier.close()

    again = open_l4(tmp_path)
    assert recovered_numbers(again, range(10)) == [0, 2, 9]
    assert again.notes == []
    again.close()
