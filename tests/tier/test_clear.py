"""A clear on a real node: what the disk refuses is named and tried again, and a clear that is cut short is finished."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from node_kit import PAYLOAD_BYTES, SLOT_BYTES, Peer, running, wait_until
from tier_pages import TENANT, VARIANT, entry_of, page_key, payload_of

from kvtier.tier.node.executor.mover import Mover
from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import HEADER_BYTES, TierName
from kvtier.tier.protocol.events import CommitCatalogue, Event, ForgetTenant, MarkClear, Note, WritePage
from kvtier.tier.stores.base import Outcome, Uncleared
from kvtier.tier.stores.host import HostTier
from kvtier.tier.stores.ssd.catalogue import CATALOGUE, read_catalogue
from kvtier.tier.stores.ssd.clear_file import ClearFile, mark_unused
from kvtier.tier.stores.ssd.store import SsdTier, open_ssd

KITS = Path(__file__).parents[1] / "kits"
ADA, BOB = tenant_digest("ada"), tenant_digest("bob")
both_stores = pytest.mark.parametrize("store", ["slab", "lmdb"])
STEPS = ("commit", "wipe", "forget", "sync")


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def fill(service: CacheService, folder: Path) -> None:
    """Four pages of ada's and two of bob's are in L4."""
    for tenant, pages in (("ada", 4), ("bob", 2)):
        peer = Peer(folder, tenant, tenant=tenant)
        peer.store(0, pages)
        peer.close()
    wait_until(service.idle)
    assert service.stats().tiers[TierName.SSD].pages == 6


def found(folder: Path, tenant: str, pages: int) -> int:
    """How many pages of a tenant a worker finds."""
    peer = Peer(folder, f"finder of {tenant}", tenant=tenant)
    pages_found, _ = peer.fetch(0, pages)
    peer.close()
    return len(pages_found)


# ---- a disk that refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@both_stores
def test_a_clear_that_the_disk_refuses_says_so_and_is_done_once_the_disk_takes_it(
    tmp_path: Path, store: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tier.node.service.CLEAR_AGAIN_S", 0.02)
    with running(tmp_path, store=store) as service:
        fill(service, tmp_path)
        with monkeypatch.context() as disk:
            disk.setattr(SsdTier, step, refuse)

            outcomes = service.clear("ada")

            assert len(outcomes) == 4 and Outcome.DEFERRED in dict(outcomes).values()
            [left] = service.uncleared()
            assert (left.tier, left.error) == (TierName.SSD, "EROFS") and "Read-only" in left.detail
            assert found(tmp_path, "ada", 4) == 0
            assert sum("is tried again" in note for note in service.notes()) == 1
        wait_until(lambda: not service.uncleared())
        wait_until(lambda: "what a disk refused of a clear is done now" in service.notes())
        assert service.clear("ada") == []
    assert ClearFile.load(tmp_path / "l4").unfinished == {}

    with running(tmp_path, store=store):
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)


@both_stores
def test_a_clear_that_the_disk_refused_until_the_node_ended_is_finished_by_the_next_start(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repro of an operator's clear on a file system that turned read-only, and was repaired after a restart."""
    with running(tmp_path, store=store) as service:
        fill(service, tmp_path)
        for step in STEPS:
            monkeypatch.setattr(SsdTier, step, refuse)

        assert [outcome for _, outcome in service.clear("ada")] == [Outcome.DEFERRED] * 4
        assert {left.detail.partition(" in L4")[0] for left in service.uncleared()} == {
            "dropping records",
            "wiping slots",
            "clearing a tenant",
            "syncing",
        }
    monkeypatch.undo()

    with running(tmp_path, store=store) as service:
        assert any("a clear was cut short, and is finished: 4 pages" in note for note in service.notes())
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)


def test_a_drop_that_the_disk_refused_goes_with_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the record outlives its page, and takes the place of another one at the next start."""
    with running(tmp_path) as service:
        fill(service, tmp_path)
        peer = Peer(tmp_path)
        with monkeypatch.context() as disk:
            disk.setattr(SsdTier, "commit", refuse)
            service.evict(peer.keys(0, 4))
            wait_until(lambda: any("takes no records" in note for note in service.notes()))
        peer.store(1000, 1)
        wait_until(service.idle)
        peer.close()
    with running(tmp_path):
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)


# ---- a node that is killed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "step", "number"),
    [*(("slab", step, 7) for step in (*STEPS, "end")), ("slab", "wipe", 0), ("lmdb", "wipe", 7)],
)
def test_a_clear_that_a_kill_cut_short_is_finished_before_the_node_serves_again(
    tmp_path: Path, store: str, step: str, number: int
) -> None:
    with running(tmp_path, store=store) as service:
        fill(service, tmp_path)
    killed = subprocess.run(
        [sys.executable, KITS / "clearing_process.py", tmp_path, store, step, str(number)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(KITS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert ADA in ClearFile.load(tmp_path / "l4").unfinished

    with running(tmp_path, store=store) as service:
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)
        assert dict(service.clears()).get(ADA, 0) == number
    assert ClearFile.load(tmp_path / "l4").unfinished == {}


def test_a_page_whose_record_was_on_its_way_when_its_tenant_was_cleared_is_not_in_the_catalogue_then(
    tmp_path: Path,
) -> None:
    """Its bytes were written, its record was to come with the next commit; a kill just behind the clear must not find it."""
    ssd = open_ssd(tmp_path, 16 << 20, "slab", SLOT_BYTES)
    host = HostTier(4 * SLOT_BYTES)
    heard: list[Event | Note] = []

    def died(part: str, error: BaseException) -> None:
        raise error

    mover = Mover(host, ssd, tmp_path, heard.extend, died, ClearFile.load(tmp_path))
    other = b"another tenant.."
    ready, left = threading.Event(), list[tuple[Uncleared, ...]]()
    mover.barrier(lambda _: bool(ready.wait(30)))  # so that all of it is one batch
    for number, tenant in ((1, TENANT), (2, other)):
        place = ssd.allocator.alloc(SLOT_BYTES)
        assert place is not None
        entry = entry_of(number, place, PAYLOAD_BYTES, tenant)
        slot = number * SLOT_BYTES // HEADER_BYTES
        host_slot = memoryview(mover._payload(slot, entry.envelope))
        host_slot[:] = payload_of(number, PAYLOAD_BYTES)
        mover.submit(WritePage(number, slot, entry))
    mover.submit(MarkClear(((TENANT, 5),)))
    mover.submit(CommitCatalogue((), ((page_key(1), VARIANT),)))
    mover.submit(ForgetTenant(TENANT))
    done = threading.Event()
    mover.barrier(lambda what: (left.append(what), done.set())[1])
    ready.set()
    assert done.wait(30)

    assert [entry.envelope.tenant for entry in read_catalogue(tmp_path / CATALOGUE)[0]] == [other]
    assert left == [()]
    mover.close()
    ssd.close()
    host.close()


# ---- epochs ------------------------------------------------------------------------------------------------------


def test_a_page_saved_by_a_worker_that_has_not_heard_of_its_tenants_clear_is_not_taken_in(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as service:
        slow, other, current = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="bob"), Peer(tmp_path, "w2")
        service.clear("ada", 7)
        current.cleared = 7

        slow.store(0, 2)
        other.store(0, 2)
        assert found(tmp_path, "ada", 2) == 0 and found(tmp_path, "bob", 2) == 2
        current.store(0, 2)
        assert found(tmp_path, "ada", 2) == 2
        for peer in (slow, other, current):
            peer.close()


@pytest.mark.parametrize("how", ["locate", "store"])
def test_a_node_that_missed_a_clear_does_it_before_it_serves_a_worker_that_knows_of_it(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tier.node.service.CLEAR_AGAIN_S", 0.02)
    with running(tmp_path) as service:
        fill(service, tmp_path)
        peer = Peer(tmp_path, "w0")
        peer.cleared = 9
        if how == "store":
            peer.store(5000, 1)
        else:
            assert peer.fetch(0, 4)[0] == []
        wait_until(lambda: service.clears() == [(ADA, 9)])
        assert found(tmp_path, "ada", 4) == 0 and found(tmp_path, "bob", 2) == 2
        wait_until(lambda: ClearFile.load(tmp_path / "l4").unfinished == {})
        peer.close()
    with running(tmp_path) as service:
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)
        assert service.clears() == [(ADA, 9)]


@pytest.mark.parametrize("told", [[(ADA, 5)], [(b"", 5)], []])
def test_a_node_that_was_away_serves_nothing_until_it_has_applied_the_clears_that_it_missed(
    tmp_path: Path, told: list[tuple[bytes, int]]
) -> None:
    with running(tmp_path) as service:
        fill(service, tmp_path)
    with running(tmp_path, awaits_clears=True) as service:
        peer = Peer(tmp_path)
        pages, missing = peer.fetch(0, 4)
        assert pages == [] and missing is not None and "cleared while it was away" in missing.detail
        peer.close()

        service.know(told)

        wanted = {((ADA, 5),): (0, 2), ((b"", 5),): (0, 0), (): (4, 2)}[tuple(told)]
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == wanted
        service.know(told)  # of no consequence any more
        assert service.clears() == told


def test_a_node_that_missed_the_clears_of_many_tenants_that_it_has_nothing_of_serves_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each clear waits for the disk a few times: a node that is new to a deployment must not do so for all there ever were."""
    with running(tmp_path) as service:
        fill(service, tmp_path)
    many = [(bytes([i % 256, i // 256]) * 8, 10 + i) for i in range(1, 600)]
    saves: list[int] = []
    save = ClearFile.save

    def counted(file: ClearFile) -> None:
        saves.append(1)
        save(file)

    monkeypatch.setattr(ClearFile, "save", counted)
    with running(tmp_path, awaits_clears=True) as service:
        service.know([*many, (ADA, 5000)])

        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)
        assert sorted(service.clears()) == sorted([*many, (ADA, 5000)])
    assert len(saves) < 10
    with running(tmp_path, awaits_clears=True) as service:
        assert Clears(service.clears()).behind([*many, (ADA, 5000)]) == []


def test_what_a_node_has_applied_outlasts_its_catalogue_and_its_layout(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        fill(service, tmp_path)
        service.clear("ada", 3)
        service.clear(None, 4)
        service.clear("bob", 5)
    for name in ("catalogue.mdb", "layout"):
        (tmp_path / "l4" / name).unlink()
    with running(tmp_path) as service:
        assert service.clears() == [(b"", 4), (BOB, 5)]


def test_a_damaged_record_of_clears_is_said_and_lets_the_gateway_clear_again(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.clear("ada", 3)
        fill_with = Peer(tmp_path)
        fill_with.cleared = 3
        fill_with.store(0, 4)
        wait_until(service.idle)
        fill_with.close()
    file = tmp_path / "l4" / "clears"
    file.write_bytes(file.read_bytes().replace(b"3", b"4"))

    with running(tmp_path, awaits_clears=True) as service:
        assert any("the record of clears" in note and "is damaged" in note for note in service.notes())
        service.know([(ADA, 3)])
        assert found(tmp_path, "ada", 4) == 0


def test_a_folder_that_nothing_uses_is_cleared_by_its_next_user(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        fill(service, tmp_path)
        assert not mark_unused(tmp_path / "l4", ADA, 5), "it is in use"
    assert not mark_unused(tmp_path / "run", ADA, 5), "it has no pages"

    assert mark_unused(tmp_path / "l4", ADA, 5)

    with running(tmp_path) as service:
        assert (found(tmp_path, "ada", 4), found(tmp_path, "bob", 2)) == (0, 2)
        assert service.clears() == [(ADA, 5)]


# ---- the table ---------------------------------------------------------------------------------------------------


def test_tables_of_clears_join_to_the_same_in_any_order() -> None:
    from itertools import permutations

    clears: list[tuple[bytes | None, int]] = [(ADA, 1), (BOB, 2), (None, 3), (ADA, 4), (BOB, 3)]
    made = []
    for order in permutations(clears):
        table = Clears()
        for tenant, number in order:
            table.note(tenant, number)
        made.append(
            (sorted(table.numbers()), table.of(ADA), table.of(BOB), table.of(b"c" * 16), table.latest)
        )
    assert set(map(str, made)) == {str(([(b"", 3), (ADA, 4)], 4, 3, 3, 4))}


def test_a_part_that_has_applied_what_it_is_behind_by_is_behind_no_more() -> None:
    told = [(b"", 3), (ADA, 4), (BOB, 2)]
    table = Clears([(ADA, 1)])
    assert table.behind(told) == [(None, 3), (ADA, 4)]
    for tenant, number in table.behind(told):
        table.note(tenant, number)
    assert table.behind(told) == [] and table.behind([(BOB, 4)]) == [(BOB, 4)]


def test_past_its_bound_a_table_takes_its_oldest_clear_for_everyones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tier.pages.clear_epochs.MAX_TENANTS", 2)
    table = Clears([(bytes([i]) * 16, i) for i in (1, 2, 3, 4)])
    assert table.numbers() == [(b"", 2), (b"\3" * 16, 3), (b"\4" * 16, 4)]
    assert table.of(b"never".ljust(16)) == 2
