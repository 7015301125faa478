"""The node's cache as it runs: real threads, a real socket, a real disk."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_kit import (
    FIELDS,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    SMALL_BYTES,
    SMALL_VARIANT,
    VARIANT,
    Peer,
    running,
    service_in,
    wait_until,
)

from kvtier.lab.recordings import opened
from kvtier.tier.node.executor.mover import load_roots, load_stored_before
from kvtier.tier.node.recording import NODE
from kvtier.tier.node.service import STAGING_SLOTS, CacheService, ServiceStopped
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import HEADER_BYTES, PageCorrupt, TierName
from kvtier.tier.protocol.events import (
    Answer,
    Clear,
    ClearPages,
    Command,
    Continue,
    Drain,
    Event,
    Evict,
    HoldsChanged,
    Note,
    Pin,
    StoredBefore,
    Unpin,
    Verify,
)
from kvtier.tier.record import checkpoint
from kvtier.tier.record.format import RecordingError
from kvtier.tier.record.rerun import rerun
from kvtier.tier.stores.base import Outcome, Place
from kvtier.tier.stores.ssd.store import SsdTier

both_stores = pytest.mark.parametrize("store", ["slab", "lmdb"])


def settle(service: CacheService) -> None:
    wait_until(service.idle)
    service.check()


def written_one_by_one(folder: Path, num_pages: int) -> list[bytes]:
    """Keys of pages that L4 of a stopped node has, each with a last use of its own."""
    with running(folder) as service:
        peer = Peer(folder)
        keys = peer.store(0, num_pages)
        settle(service)
        peer.close()
    return list(keys)


def pages_in(service: CacheService, tier: TierName) -> int:
    return service.stats().tiers[tier].pages


@both_stores
def test_pages_sink_rise_and_outlive_a_restart(tmp_path: Path, store: str) -> None:
    with running(tmp_path, store=store) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 6)
        in_l3, _ = peer.fetch(0, 6)
        settle(service)
        assert service.evict(keys, TierName.HOST) == [(key, Outcome.ACCEPTED) for key in keys]
        from_l4, missing = peer.fetch(0, 7)
        settle(service)

        assert [page.came_from for page in in_l3] == ["L3"] * 6
        assert [page.came_from for page in from_l4] == ["L4"] * 6
        assert missing is not None and (missing.page, missing.reason) == (6, "never_stored")
        counters = service.stats().tiers
        assert counters[TierName.SSD].demoted_pages == counters[TierName.HOST].promoted_pages == 6
        peer.close()

    with running(tmp_path, store=store) as service:
        assert pages_in(service, TierName.SSD) == 6 and service.notes() == []
        peer = Peer(tmp_path)
        again, _ = peer.fetch(0, 6)
        assert [page.came_from for page in again] == ["L4"] * 6
        assert {outcome for _, outcome in service.verify()} == {Outcome.ACCEPTED}
        peer.close()


@both_stores
def test_demoted_pages_are_on_the_disk_only_when_they_have_left_l3_or_the_node_has_stopped(
    tmp_path: Path, store: str
) -> None:
    with running(tmp_path, l3_pages=16, store=store, write="demote") as service:
        peer = Peer(tmp_path)
        peer.store(0, 8)
        settle(service)
        assert pages_in(service, TierName.SSD) == 0

        peer.store(1000, 8)
        peer.store(2000, 8)
        settle(service)
        counters = service.stats().tiers
        assert counters[TierName.SSD].policy == "rvi" and 8 <= counters[TierName.SSD].pages < 24
        assert [len(peer.fetch(start, 8)[0]) for start in (0, 1000, 2000)] == [8, 8, 8]
        peer.close()

    with running(tmp_path, store=store) as service:
        assert pages_in(service, TierName.SSD) == 24
        assert {outcome for _, outcome in service.verify()} == {Outcome.ACCEPTED}


def test_a_tenant_keeps_to_its_share_of_both_tiers(tmp_path: Path) -> None:
    with running(tmp_path, l3_pages=16, shares={tenant_digest("ada"): 0.25}) as service:
        ada, eve = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="eve")
        eve.store(0, 6)
        for start in range(0, 5000, 1000):
            ada.store(start, 4)
        settle(service)

        assert len(service.pages("ada", TierName.HOST)) <= 4
        assert len(eve.fetch(0, 6)[0]) == 6
        ada.close()
        eve.close()


@both_stores
def test_more_pages_than_l3_and_l4_hold_push_the_oldest_out(tmp_path: Path, store: str) -> None:
    with running(tmp_path, l3_pages=8, l4_bytes=4 << 20, store=store) as service:
        peer = Peer(tmp_path)
        for i in range(60):
            peer.store(1000 * i, 4)
        settle(service)

        counters = service.stats().tiers
        assert counters[TierName.HOST].used_bytes <= counters[TierName.HOST].capacity_bytes == 8 * SLOT_BYTES
        assert counters[TierName.SSD].used_bytes <= counters[TierName.SSD].capacity_bytes < 4 << 20
        assert counters[TierName.SSD].evicted_pages > 0
        newest, _ = peer.fetch(59_000, 4)
        assert len(newest) == 4
        assert {outcome for _, outcome in service.verify()} == {Outcome.ACCEPTED}
        peer.close()
    files = sum(file.stat().st_blocks * 512 for file in (tmp_path / "l4").iterdir())
    assert files <= 4 << 20


def test_a_chain_longer_than_l3_comes_up_from_l4(tmp_path: Path) -> None:
    with running(tmp_path, l3_pages=2) as service:
        peer = Peer(tmp_path)
        peer.store(0, 50)
        settle(service)

        pages, missing = peer.fetch(0, 50)

        assert len(pages) == 50 and missing is None
        settle(service)
        peer.close()


def test_questions_and_finished_transfers_may_come_at_the_same_moment(tmp_path: Path) -> None:
    """Threads switch after a few instructions, so that one posts while the loop looks through what has come."""
    over = threading.Event()

    def post(service: CacheService) -> None:
        while not over.is_set():
            if len(service._inbox) < 2000:
                service._post([Note("a page came")])

    interval = sys.getswitchinterval()
    with running(tmp_path) as service:
        thread = threading.Thread(target=post, args=(service,))
        thread.start()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(150):
                assert service.pages("ada") == []
        finally:
            sys.setswitchinterval(interval)
            over.set()
            thread.join()
        assert service.health() is None


def test_two_workers_share_what_either_stored(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        one, other = Peer(tmp_path, "w0"), Peer(tmp_path, "w1")
        one.store(0, 3)

        pages, _ = other.fetch(0, 3)

        assert len(pages) == 3
        infos = service.pages("ada", TierName.HOST)
        assert [info.tokens for info in infos] == [16] * 3 and {info.owner for info in infos} == {"n0"}
        assert service.pages("eve") == [] and len(service.pages(limit=2)) == 2
        one.close()
        other.close()


def test_pages_are_found_by_their_keys_in_each_tier_and_variant(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer, other = Peer(tmp_path), Peer(tmp_path, "w1", tenant="eve")
        keys = [*peer.store(0, 4), *other.store(0, 2)]
        settle(service)
        service.evict(keys[1:2], TierName.HOST)
        service.evict(keys[2:3], TierName.SSD)
        settle(service)
        asked = [keys[1], bytes(32), keys[2], keys[5], keys[0]]

        listed = {(info.key, info.tier, info.variant) for info in service.pages()}
        assert {(info.key, info.tier, info.variant) for info in service.pages_of(asked)} == {
            one for one in listed if bytes.fromhex(one[0]) in asked
        }
        assert service.pages_of([bytes(32)]) == service.held([bytes(32)]) == []
        held = {
            (asked[at].hex(), one.tier, one.variant)
            for one in service.held(asked)
            for at in one.marks(len(asked)).nonzero()[0]
        }
        assert held == {one for one in listed if bytes.fromhex(one[0]) in asked}
        assert len(held) == 2 * 4 - 2
        heads = [keys[0].hex()[:20], keys[5].hex(), "0" * 20]
        assert service.keys_with(heads, 2) == [[keys[0]], [keys[5]], []]
        peer.close()
        other.close()


def test_a_long_listing_asks_the_loop_for_a_few_pages_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, l3_pages=32) as service:
        ada, eve = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="eve")
        ada.store(0, 12)
        last = eve.store(0, 2)
        settle(service)
        whole = {(info.key, info.tier) for info in service.pages()}
        looked_at: list[int] = []
        look = service._coordinator.admin.pages

        def count(tenant: Any, tier: Any, limit: int, now: float, among: Any) -> Any:
            looked_at.append(len(among))
            return look(tenant, tier, limit, now, among)

        monkeypatch.setattr("kvtier.tier.node.service.LIST_STEP", 3)
        monkeypatch.setattr(service._coordinator.admin, "pages", count)

        assert {(info.key, info.tier) for info in service.pages()} == whole
        assert max(looked_at) == 3
        assert {bytes.fromhex(info.key) for info in service.pages("eve", TierName.HOST)} == set(last)
        assert len(service.pages(limit=9)) == 9
        looked_at.clear()
        assert len(service.pages(limit=2)) == 2 and looked_at == [3]  # of these it need not look further
        ada.close()
        eve.close()


def test_what_the_tiers_hold_is_asked_for_a_few_pages_at_a_time_and_told_of_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes and leaves between two parts is told by `on_holds`, as a directory's feed wants it."""
    changed: dict[bytes, bool] = {}

    def on_holds(change: HoldsChanged) -> None:
        if change.tier is TierName.HOST:
            changed.update(dict.fromkeys(change.came, True) | dict.fromkeys(change.left, False))

    with running(tmp_path, l3_pages=32, on_holds=on_holds) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 12)
        settle(service)
        looked_at: list[int] = []
        look = service._coordinator.admin.holds

        def count(among: Any) -> Any:
            looked_at.append(len(among))
            if len(looked_at) == 2:  # one that was listed goes, and one that is listed later
                evict = Evict(0, (keys[0], keys[-1]), TierName.HOST)
                for command in service._coordinator.handle(evict, time.monotonic()):
                    if isinstance(command, HoldsChanged):
                        on_holds(command)
            return look(among)

        monkeypatch.setattr("kvtier.tier.node.service.LIST_STEP", 3)
        monkeypatch.setattr(service._coordinator.admin, "holds", count)
        changed.clear()

        held = set(service.holds()[TierName.HOST])

        assert max(looked_at) == 3 and len(looked_at) == 4
        told = (held | {key for key, is_here in changed.items() if is_here}) - {
            key for key, is_here in changed.items() if not is_here
        }
        assert told == set(keys[1:-1])
        peer.close()


def test_all_of_a_tier_is_evicted_a_few_pages_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tier.node.service.LIST_STEP", 3)
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 8)
        settle(service)

        assert sorted(service.evict(None, TierName.HOST)) == sorted((key, Outcome.ACCEPTED) for key in keys)
        assert {info.tier for info in service.pages()} == {TierName.SSD} and len(service.pages()) == 8
        assert service.evict(None, TierName.HOST) == []
        assert sorted(service.evict(None)) == sorted((key, Outcome.ACCEPTED) for key in keys)
        assert service.pages() == []
        peer.close()


def test_the_loop_turns_between_parts_of_what_is_asked_of_many_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that clears or checks all of a large cache in one turn is killed, since it is stalled."""
    monkeypatch.setattr("kvtier.tier.node.service.LIST_STEP", 3)
    with running(tmp_path) as service:
        ada, eve = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="eve")
        keys, others = ada.store(0, 8), eve.store(0, 2)
        settle(service)
        sizes: list[int] = []
        handle = service._coordinator.handle

        def watched(event: Event, now: float) -> list[Command]:
            commands = handle(event, now)
            if isinstance(event, Pin | Unpin | Evict | ClearPages | Clear | Verify):
                sizes.extend(len(c.results) for c in commands if isinstance(c, Answer))
            return commands

        monkeypatch.setattr(service._coordinator, "handle", watched)
        accepted = [(key, Outcome.ACCEPTED) for key in keys]

        assert service.pin(keys) == service.unpin(keys) == service.verify(keys) == accepted
        assert dict(service.verify()) == dict.fromkeys([*keys, *others], Outcome.ACCEPTED)
        assert sorted(service.clear("ada")) == sorted(accepted)
        assert sorted(service.clear()) == sorted((key, Outcome.ACCEPTED) for key in others)
        assert max(sizes) == 3 and service.pages() == []
        ada.close()
        eve.close()


def test_questions_are_answered_while_l4_is_recovered_and_workers_are_heard_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = written_one_by_one(tmp_path, 6)
    seen: list[int] = []
    answer = CacheService._answer_those_that_look
    is_asked = threading.Event()

    def between(service: CacheService) -> None:
        if not seen:
            is_asked.wait(30.0)
            wait_until(lambda: len(service._inbox) == 2)  # pages and idle; holds comes behind the recovery
        seen.append(len(service._coordinator.admin.page_ids()))
        answer(service)

    monkeypatch.setattr(CacheService, "_answer_those_that_look", between)
    with running(tmp_path, limits=Limits(part=1)) as service, ThreadPoolExecutor() as threads:
        pages, idle = threads.submit(service.pages), threads.submit(service.idle)
        peer = threads.submit(lambda: Peer(tmp_path).fetch(0, 6)[0])
        is_asked.set()

        assert len(pages.result(30.0)) < 6 and not idle.result(30.0)
        assert sorted(service.holds()[TierName.SSD]) == sorted(keys)
        assert [page.came_from for page in peer.result(30.0)] == ["L4"] * 6
        assert seen[0] == 1 and seen == sorted(seen) and seen[-1] == 6


def test_a_stop_while_l4_is_recovered_comes_at_once_and_costs_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = written_one_by_one(tmp_path, 6)
    parts: list[None] = []
    is_stopping = threading.Event()

    def between(service: CacheService) -> None:
        parts.append(None)
        assert is_stopping.wait(30.0)
        wait_until(lambda: service.health() is not None)

    with monkeypatch.context() as patched:
        patched.setattr(CacheService, "_answer_those_that_look", between)
        service = service_in(tmp_path, limits=Limits(part=1))
        service.start()
        stopper = threading.Thread(target=service.stop)
        stopper.start()
        is_stopping.set()
        stopper.join(30.0)
        assert not stopper.is_alive() and len(parts) == 1

    with running(tmp_path) as again:
        assert sorted(again.holds()[TierName.SSD]) == sorted(keys) and again.notes() == []


def test_a_stop_writes_out_what_l3_alone_holds_a_few_pages_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Event] = []
    with running(tmp_path, limits=Limits(part=2), write="demote") as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 8)
        handle = service._coordinator.handle

        def watched(event: Event, now: float) -> list[Command]:
            if isinstance(event, Drain | Continue):
                parts.append(event)
            return handle(event, now)

        monkeypatch.setattr(service._coordinator, "handle", watched)
        assert pages_in(service, TierName.SSD) == 0
        peer.close()

    assert len(parts) == 4 and isinstance(parts[0], Drain)
    with running(tmp_path) as again:
        assert sorted(again.holds()[TierName.SSD]) == sorted(keys)


@both_stores
def test_what_is_stored_while_a_clear_runs_is_cleared_too_and_comes_back_from_no_rebuild(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tier.node.service.LIST_STEP", 3)
    with running(tmp_path, store=store) as service:
        ada, bob = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="bob")
        keys, others = ada.store(0, 7), bob.store(0, 2)
        settle(service)
        stored: list[bytes] = []
        evicted: set[bytes] = set()
        ask = service._verb

        def store_between(*args: Any, **more: Any) -> list[tuple[bytes, Outcome]]:
            """Behind each part the worker stores again: once what is cleared already, else what was never here. Some of it
            leaves again, which wipes no slot."""
            found = ask(*args, **more)
            if len(stored) < 12:
                stored.extend(ada.store(1000 * len(stored), 4))
                wait_until(service.idle)  # they are in L4, stamped as written in the clear's midst
                evicted.update(stored[-2:])
                ask(lambda ticket: Evict(ticket, tuple(stored[-2:]), None))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(service, "_verb", store_between)
            cleared = service.clear("ada")

        assert stored[:4] == keys[:4]
        assert {*keys, *stored} - evicted <= {key for key, _ in cleared} <= {*keys, *stored}
        assert service.pages("ada") == []
        _, missing = ada.fetch(0, 4)
        assert missing is not None and (missing.page, missing.reason) == (0, "cleared")
        ada.close()
        bob.close()
    (tmp_path / "l4" / "catalogue.mdb").unlink()  # so that the slots' own headers are all there is

    with running(tmp_path, store=store) as service:
        assert service.pages("ada") == []
        if store == "slab":
            assert {bytes.fromhex(page.key) for page in service.pages("bob")} == {*others}


def test_another_tenant_never_finds_them(tmp_path: Path) -> None:
    with running(tmp_path):
        ada, eve = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="eve")
        ada.store(0, 3)

        pages, missing = eve.fetch(0, 3)

        assert pages == [] and missing is not None and missing.reason == "never_stored"
        ada.close()
        eve.close()


def test_a_killed_workers_slots_come_back(tmp_path: Path) -> None:
    with running(tmp_path, l3_pages=8) as service:
        program = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from pathlib import Path\n"
            "from node_kit import PAYLOAD_BYTES, Peer\n"
            "from kvtier.tier.protocol.messages import Granted, WantSlots\n"
            "peer = Peer(Path(sys.argv[2]))\n"
            "peer.store(0, 2, hold_for='preempted')\n"
            "peer.client.send(WantSlots(2, PAYLOAD_BYTES)); peer.hear(Granted)\n"
            "print('ready', flush=True); sys.stdin.read()\n"
        )
        helpers = Path(__file__).parents[1] / "kits"
        worker = subprocess.Popen(
            [sys.executable, "-c", program, str(helpers), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None and worker.stdin is not None
        assert worker.stdout.readline() == "ready\n"
        assert service.stats().tiers[TierName.HOST].used_bytes == 4 * SLOT_BYTES and not service.idle()

        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()

        settle(service)
        assert service.stats().tiers[TierName.HOST].used_bytes == 2 * SLOT_BYTES
        survivor = Peer(tmp_path, "w1")
        assert len(survivor.fetch(0, 2)[0]) == 2
        survivor.close()
        worker.stdin.close()
        worker.stdout.close()


def test_bytes_changed_in_l3_are_dropped_and_the_copy_in_l4_serves(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 3)
        settle(service)
        grant = peer.fetch(0, 3)[0][1].grant
        peer.client.slot(grant)[HEADER_BYTES] ^= 1

        peer.fetch(0, 3)  # the worker finds it and says so
        pages, _ = peer.fetch(0, 3)

        assert [page.came_from for page in pages] == ["L3", "L4", "L3"]
        assert service.stats().tiers[TierName.HOST].corrupt_pages == 1
        peer.client.slot(pages[2].grant)[HEADER_BYTES] ^= 1
        wait_until(service.idle)
        assert service.verify(keys) == [
            (keys[0], Outcome.ACCEPTED),
            (keys[1], Outcome.ACCEPTED),
            (keys[2], Outcome.CLIPPED),
        ]
        peer.close()


def test_bytes_changed_on_the_disk_are_a_miss_and_one_note(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 3)
        settle(service)
        peer.close()
    slab = next(file for file in (tmp_path / "l4").iterdir() if file.name.startswith("slab-"))
    content = bytearray(slab.read_bytes())
    at = content.index(keys[1] * 8)
    content[at] ^= 1
    slab.write_bytes(content)

    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        pages, missing = peer.fetch(0, 3)

        assert [page.page for page in pages if page.page[1] < 1] == [(0, 0)]
        assert missing is not None and (missing.page, missing.reason) == (1, "corrupt")
        assert service.stats().tiers[TierName.SSD].corrupt_pages == 1
        assert len([note for note in service.notes() if keys[1].hex()[:16] in note]) == 1
        again, why = peer.fetch(0, 3)
        assert len(again) == 1 and why is not None and why.reason == "corrupt"
        peer.close()


def test_a_page_whose_bytes_are_wrong_never_reaches_l4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SsdTier, place: Place, envelope: Any, payload: Any) -> None:
        raise PageCorrupt("not what its envelope says")

    monkeypatch.setattr(SsdTier, "write", refuse)
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        peer.store(0, 1)
        settle(service)

        assert pages_in(service, TierName.SSD) == pages_in(service, TierName.HOST) == 0
        assert service.stats().tiers[TierName.HOST].corrupt_pages == 1
        peer.close()


@pytest.mark.parametrize("call", ["write", "commit"])
def test_a_disk_that_refuses_writes_costs_l4_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(self: SsdTier, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SsdTier, call, refuse)
        with running(tmp_path, drain_s=1.0) as service:
            peer = Peer(tmp_path)
            peer.store(0, 3)
            settle(service)

            assert pages_in(service, TierName.HOST) == 3 and pages_in(service, TierName.SSD) == 0
            assert len(peer.fetch(0, 3)[0]) == 3
            assert any("No space left" in note for note in service.notes())
            patched.undo()
            peer.close()
            # Once the disk takes writes again, stopping saves what only L3 holds.

    with running(tmp_path) as service:
        assert pages_in(service, TierName.SSD) == 3


def test_a_node_says_that_its_l4_folder_was_deleted_and_serves_on_without_it(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 2)
        settle(service)
        assert pages_in(service, TierName.SSD) == 2
        service.evict(keys, TierName.HOST)

        shutil.rmtree(tmp_path / "l4")

        wait_until(lambda: any("its files were deleted while the node runs" in n for n in service.notes()))
        pages, missing = peer.fetch(0, 2)
        assert pages == [] and missing is not None
        peer.store(0, 2)
        assert len(peer.fetch(0, 2)[0]) == 2
        settle(service)
        service.check()
        peer.close()


def test_a_disk_that_refuses_reads_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SsdTier, *args: Any) -> None:
        raise OSError(5, "Input/output error")

    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 2)
        settle(service)
        service.evict(keys, TierName.HOST)
        monkeypatch.setattr(SsdTier, "read", refuse)

        pages, missing = peer.fetch(0, 2)

        assert pages == [] and missing is not None and missing.reason == "load_failed"
        settle(service)
        peer.close()


@both_stores
def test_cleared_pages_are_gone_after_a_restart_too(tmp_path: Path, store: str) -> None:
    with running(tmp_path, store=store) as service:
        ada, bob = Peer(tmp_path, "w0"), Peer(tmp_path, "w1", tenant="bob")
        ada.store(0, 4)
        bob.store(0, 2)
        settle(service)

        cleared = service.clear("ada")

        assert [outcome for _, outcome in cleared] == [Outcome.ACCEPTED] * 4
        _, missing = ada.fetch(0, 4)
        assert missing is not None and (missing.page, missing.reason) == (0, "cleared")
        ada.close()
        bob.close()
    (tmp_path / "l4" / "catalogue.mdb").unlink()  # so that the slots' own headers are all there is

    with running(tmp_path, store=store) as service:
        assert service.pages("ada") == []
        if store == "slab":
            assert len(service.pages("bob")) == 2


def test_nothing_that_a_worker_sent_before_a_clear_survives_it(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        for i in range(20):
            peer.store(0, 3)

            service.clear("ada")

            assert service.pages("ada") == [], f"round {i}"
        peer.close()


def test_pinned_pages_stay_and_evict_says_so(tmp_path: Path) -> None:
    with running(tmp_path, l3_pages=8) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 2)
        settle(service)
        assert service.pin(keys) == [(key, Outcome.ACCEPTED) for key in keys]
        for i in range(1, 10):
            peer.store(1000 * i, 4)
        settle(service)

        assert service.evict(keys) == [(key, Outcome.REJECTED) for key in keys]
        assert [page.came_from for page in peer.fetch(0, 2)[0]] == ["L3"] * 2
        wait_until(service.idle)
        assert service.unpin([*keys, b"?" * 32]) == [
            *((key, Outcome.ACCEPTED) for key in keys),
            (b"?" * 32, Outcome.MISSING),
        ]
        assert service.evict(keys) == [(key, Outcome.ACCEPTED) for key in keys]
        peer.close()


def test_a_miss_after_a_change_of_identity_names_the_field(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        peer.store(0, 2)
        settle(service)
        peer.close()

    with running(tmp_path):
        peer = Peer(tmp_path, fields={**FIELDS, "epoch": "1"})
        pages, missing = peer.fetch(0, 2)

        assert pages == [] and missing is not None
        assert missing.reason == "identity_differs" and "epoch is '1', stored with '0'" in missing.detail
        peer.close()


def test_a_change_of_the_page_size_is_named_like_any_other_field(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path, fields={**FIELDS, "page_tokens": "16"})
        peer.store(0, 4)
        settle(service)
        peer.close()

    with running(tmp_path):
        peer = Peer(tmp_path, fields={**FIELDS, "page_tokens": "64"}, page_tokens=64)
        _, missing = peer.fetch(0, 1)

        assert missing is not None and missing.reason == "identity_differs"
        assert missing.detail.endswith("page_tokens is '64', stored with '16'")
        peer.close()


def test_a_page_evicted_before_a_restart_is_known_to_have_been_there(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        other, peer = Peer(tmp_path, "w0", fields={**FIELDS, "epoch": "1"}), Peer(tmp_path, "w1")
        other.store(0, 2)
        keys = peer.store(0, 2)
        settle(service)
        service.evict(keys)
        other.close()
        peer.close()

    with running(tmp_path):
        peer = Peer(tmp_path)
        _, missing = peer.fetch(0, 2)

        assert missing is not None and missing.reason == "evicted"
        assert missing.detail.startswith("stored before under this identity")
        peer.close()


def test_pages_whose_slab_file_is_gone_are_lost_and_said_to_be(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        peer.store(0, 2)
        settle(service)
        peer.close()
    for slab in (tmp_path / "l4").glob("slab-*"):
        slab.unlink()

    with running(tmp_path):
        peer = Peer(tmp_path)
        _, missing = peer.fetch(0, 2)

        assert missing is not None and missing.reason == "lost"
        assert "was gone when the node started" in missing.detail
        peer.close()


@both_stores
def test_small_pages_sink_rise_and_outlive_a_restart_beside_large_ones(tmp_path: Path, store: str) -> None:
    with running(tmp_path, store=store) as service:
        peer = Peer(tmp_path)
        peer.store(0, 4)
        keys = peer.store(0, 9, variant=SMALL_VARIANT)
        settle(service)
        assert service.stats().tiers[TierName.SSD].variants == {VARIANT: 4, SMALL_VARIANT: 9}
        service.evict(keys, TierName.HOST)

        exact, missing = peer.fetch(0, 9)
        lossy, nothing = peer.fetch(0, 9, lossy=True)

        assert [page.came_from for page in exact] == ["L4"] * 4
        assert missing is not None and missing.reason == "never_stored"
        assert [page.variant for page in lossy] == [VARIANT] * 4 + [SMALL_VARIANT] * 5 and nothing is None
        assert [page.came_from for page in lossy] == ["L3"] * 4 + ["L4"] * 5
        settle(service)
        peer.close()

    with running(tmp_path, store=store) as service:
        held = service.stats().tiers[TierName.SSD]
        assert held.page_bytes == 4 * PAYLOAD_BYTES + 9 * SMALL_BYTES
        made = {(info.variant, info.made_from) for info in service.pages("ada")}
        assert made == {(VARIANT, ""), (SMALL_VARIANT, VARIANT)}
        peer = Peer(tmp_path)
        assert service.stats().tiers[TierName.SSD].raw_bytes == 9 * PAYLOAD_BYTES
        assert len(peer.fetch(0, 9, lossy=True)[0]) == 9
        assert {outcome for _, outcome in service.verify()} == {Outcome.ACCEPTED}
        peer.close()


def test_l4_keeps_only_its_own_formats(tmp_path: Path) -> None:
    with running(tmp_path, l4_variants=frozenset({SMALL_VARIANT})) as service:
        peer = Peer(tmp_path)
        peer.store(0, 3)
        peer.store(0, 3, variant=SMALL_VARIANT)
        settle(service)

        assert service.stats().tiers[TierName.SSD].variants == {SMALL_VARIANT: 3}
        assert service.stats().tiers[TierName.HOST].variants == {VARIANT: 3, SMALL_VARIANT: 3}
        peer.close()

    with running(tmp_path, l4_variants=frozenset({SMALL_VARIANT})):
        peer = Peer(tmp_path)
        exact, missing = peer.fetch(0, 3)
        lossy, _ = peer.fetch(0, 3, lossy=True)
        assert exact == [] and missing is not None
        assert (missing.page, missing.reason) == (0, "variant"), missing
        assert [page.variant for page in lossy] == [SMALL_VARIANT] * 3
        peer.close()


def test_a_rebuilt_catalogue_knows_what_pages_were_made_from(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        peer.store(0, 3, variant=SMALL_VARIANT)
        settle(service)
        peer.close()
    (tmp_path / "l4" / "catalogue.mdb").unlink()

    with running(tmp_path) as service:
        assert [info.made_from for info in service.pages("ada")] == [VARIANT] * 3


@pytest.mark.parametrize("content", [b"", b"no json", b'{"zz": {}}', b"[1]"])
def test_damaged_tables_that_explain_misses_are_empty_ones(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "roots.json").write_bytes(content)
    (tmp_path / "stored.msgpack").write_bytes(content)
    assert load_roots(tmp_path) == []
    assert load_stored_before(tmp_path) == StoredBefore()


def test_all_files_of_l4_are_the_users_own_even_in_a_folder_open_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "l4"
    folder.mkdir()
    folder.chmod(0o755)
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        peer.store(0, 2)
        settle(service)
        peer.close()

    assert folder.stat().st_mode & 0o777 == 0o755
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert set(modes.values()) == {0o600} and {"roots.json", "stored.msgpack", "layout"} <= modes.keys()


@pytest.mark.parametrize("l3_pages", [0, 1])
def test_without_l3_and_l4_the_node_serves_and_all_is_a_miss(tmp_path: Path, l3_pages: int) -> None:
    with running(tmp_path, l3_pages=l3_pages, l4_bytes=0) as service:
        peer = Peer(tmp_path)
        pages, missing = peer.fetch(0, 2)

        assert pages == [] and missing is not None and missing.reason == "cache_off"
        assert peer.client.slab is None and peer.client.welcome.slab_bytes == 0
        assert [note for note in service.notes() if "L3 is off" in note] == service.notes()
        assert len(service.notes()) == l3_pages  # what is turned off by 0 needs no note
        assert service.idle() and service.verify() == [] and service.clear() == []
        peer.close()


@pytest.mark.parametrize("l3_pages", [0, 1])
def test_l4_without_l3_is_reached_through_a_few_slots(tmp_path: Path, l3_pages: int) -> None:
    with running(tmp_path, l3_pages=l3_pages) as service:
        peer = Peer(tmp_path)
        peer.store(0, 30)
        settle(service)

        pages, missing = peer.fetch(0, 30)

        assert len(pages) == 30 and missing is None
        assert service.stats().tiers[TierName.HOST].capacity_bytes == STAGING_SLOTS * SLOT_BYTES
        assert pages_in(service, TierName.SSD) == 30
        (note,) = service.notes()
        assert note.startswith(f"L3 is {STAGING_SLOTS} pages, to reach L4 through")
        settle(service)
        peer.close()


def test_without_l4_pages_live_in_l3_and_leave_no_file(tmp_path: Path) -> None:
    with running(tmp_path, l4_bytes=0) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 2)
        assert len(peer.fetch(0, 2)[0]) == 2
        assert service.stats().tiers[TierName.SSD].capacity_bytes == 0
        assert service.clear("ada") == [(key, Outcome.ACCEPTED) for key in keys]
        peer.close()
    assert not (tmp_path / "l4").exists()


def test_stopping_twice_is_stopping_once_and_calls_are_refused_after(tmp_path: Path) -> None:
    service = CacheService(
        "n0", tmp_path / "run" / "sock", PAYLOAD_BYTES, 4 * SLOT_BYTES, tmp_path / "l4", 8 << 20
    )
    others = set(threading.enumerate())
    service.stop(0)
    service.start()
    own = set(threading.enumerate()) - others
    service.stop(0)
    service.stop(0)

    assert {thread.name for thread in own} >= {"cache-loop", "l4-writer"}
    assert not any(thread.is_alive() for thread in own)
    assert service.health() == "the cache of node n0 is stopped"
    with pytest.raises(ServiceStopped, match="stopped"):
        service.stats()


def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    with running(tmp_path):
        second = CacheService(
            "n1", tmp_path / "run2" / "sock", PAYLOAD_BYTES, 4 * SLOT_BYTES, tmp_path / "l4", 16 << 20
        )
        before = set(threading.enumerate())
        with pytest.raises(OSError):
            second.start()  # another process could have the folder; here it is this one
        assert set(threading.enumerate()) <= before
    with running(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_fails_tells_its_callers_and_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        monkeypatch.setattr(service._coordinator, "handle", lambda event, now: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            service.pin([b"?" * 32])

        assert peer.is_closed.wait(120)
        peer.close()
        wait_until(lambda: service.health() == "the cache of node n0 is failed")
        assert "ZeroDivisionError" in service.notes()[-1]
        with pytest.raises(ServiceStopped, match="failed"):
            service.stats()


class Died(BaseException):
    """What no part of the service knows."""


@pytest.mark.parametrize(
    "error", [MemoryError(), KeyError("k"), Died()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("thread", ["l4-writer", "l4-reader"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_the_nodes_failure_at_once_and_hangs_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str, error: BaseException
) -> None:
    def die(*_: object) -> None:
        raise error

    failed = threading.Event()
    with running(tmp_path, on_failed=failed.set) as service:
        assert service._ssd is not None
        peer = Peer(tmp_path)
        if thread == "l4-writer":
            monkeypatch.setattr(service._ssd, "write_batch", die)
            peer.store(0, 1)
        else:
            keys = peer.store(0, 3)
            settle(service)
            monkeypatch.setattr(service._ssd, "read", die)
            with pytest.raises(ServiceStopped):
                service.verify(keys)

        assert failed.wait(120)
        assert service.health() == "the cache of node n0 is failed"
        assert any(thread in note and type(error).__name__ in note for note in service.notes())
        assert peer.is_closed.wait(120)
        peer.close()
        stopping = threading.Thread(target=service.stop, args=(1.0,))
        stopping.start()
        stopping.join(120)
        assert not stopping.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_for_the_disk_hears_that_its_thread_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise MemoryError

    with running(tmp_path) as service:
        assert service._ssd is not None
        monkeypatch.setattr(service._ssd, "sync", die)

        with pytest.raises(ServiceStopped):
            service.clear()


def test_a_node_serves_on_while_its_state_is_written_and_that_is_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million pages take half a minute."""
    goes_on = tmp_path / "goes-on"
    dump = checkpoint.dump

    def slowly(*args: Any) -> bytes:
        wait_until(goes_on.exists)
        return dump(*args)

    monkeypatch.setattr(checkpoint, "dump", slowly)
    with running(tmp_path) as service, ThreadPoolExecutor() as threads:
        peer = Peer(tmp_path)
        peer.store(0, 2)
        settle(service)
        recording = threads.submit(service.record, tmp_path / "x.kvrec")
        wait_until(lambda: service.recording() is not None)
        keys = peer.store(5000, 3)
        assert [page.came_from for page in peer.fetch(5000, 3)[0]] == ["L3"] * 3
        assert dict(service.clear("eve")) == {} and not recording.done()
        goes_on.touch()

        assert recording.result(60.0).ended == ""
        peer.fetch(0, 2)
        settle(service)
        service.stop_recording()
        peer.close()

    with opened(tmp_path / "x.kvrec") as reader:
        node = checkpoint.load(reader.state(), NODE.modules)
        node.check()
        assert len(node.admin.page_ids()) == 2 and not {key for key, _ in node.admin.page_ids()} & {*keys}
    with opened(tmp_path / "x.kvrec") as reader:
        verdict = rerun(reader, NODE)
    assert verdict.difference is None and verdict.events > 5


def test_a_node_that_stops_while_its_state_is_written_waits_for_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "dump", lambda *_: threading.Event().wait())
    with ThreadPoolExecutor() as threads:
        with running(tmp_path) as service:
            recording = threads.submit(service.record, tmp_path / "x.kvrec")
            wait_until(lambda: service.recording() is not None)
        with pytest.raises(RecordingError, match="the node stopped"):
            recording.result(30.0)
    assert not (tmp_path / "x.kvrec").exists()


def test_a_state_whose_writer_is_killed_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "dump", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with running(tmp_path) as service:
        with pytest.raises(RecordingError, match="the process that writes it ended with -9"):
            service.record(tmp_path / "x.kvrec")
        assert service.health() is None


def test_a_state_that_cannot_be_written_ends_the_recording_with_its_reason_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """msgpack counts the bytes of one piece in 32 bits: the state of some 3 million pages takes more."""
    encode = msgspec.msgpack.encode

    def too_long(what: object) -> bytes:
        return encode(memoryview(mmap.mmap(-1, 2**32 + 1))) if isinstance(what, tuple) else encode(what)

    with running(tmp_path) as service:
        peer = Peer(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr("msgspec.msgpack.encode", too_long)
            with pytest.raises(RecordingError, match="can't be written: .* 2\\*\\*32"):
                service.record(tmp_path / "x.kvrec")

        assert not (tmp_path / "x.kvrec").exists()
        assert service.health() is None and len(peer.store(0, 2)) == 2
        peer.close()
        assert service.record(tmp_path / "y.kvrec").ended == ""


def test_what_each_tier_has_is_told_as_it_changes_and_whole_when_asked(tmp_path: Path) -> None:
    told: dict[TierName, set[bytes]] = {tier: set() for tier in TierName}

    def on_holds(change: HoldsChanged) -> None:
        told[change.tier] |= set(change.came)
        told[change.tier] -= set(change.left)

    with running(tmp_path, on_holds=on_holds) as service:
        peer = Peer(tmp_path)
        keys = peer.store(0, 6)
        peer.store(100, 2, variant=SMALL_VARIANT)  # made from others: of no use to other nodes
        settle(service)
        service.evict(keys[:2], TierName.HOST)

        assert told[TierName.HOST] == set(keys[2:]) and told[TierName.SSD] == set(keys)
        assert {tier: set(held) for tier, held in service.holds().items() if held} == {
            tier: held for tier, held in told.items() if held
        }
        peer.close()

    for held in told.values():
        held.clear()
    with running(tmp_path, on_holds=on_holds) as service:
        assert set(service.holds()[TierName.SSD]) == set(keys) and not any(told.values())
