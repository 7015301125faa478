"""Two real nodes with their exchanges: a worker's hint brings another node's pages into its own node's L3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import node_kit
import pytest
from node_kit import PAGE_TOKENS, PAYLOAD_BYTES, SLOT_BYTES, SPEC, Peer, payload_of, running
from peer_stub import exchange
from waiting import until

from kvtier.tier.pages.page import HEADER_BYTES, PageKey, TierName, page_checksum
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Missing,
    Remote,
    SavePages,
    Unsaved,
)
from kvtier.tier.transport.peer_health import OPEN_AFTER

PAGES = 12


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ask(
    reader: Peer, keys: list[PageKey], address: str, name: str = "r", page_s: float = 0.0
) -> tuple[list[HostPage], Missing | None]:
    """Locate a chain, with the hint that node `away` has all of it; what came, checked, and what didn't.

    A page takes `page_s` to compute; 0: it is fetched whatever that takes.
    """
    chain = Chain(list(keys), [], bytes(len(keys)), node_kit.VARIANT, "", 0, 0, 1, 0, 0, False, SPEC)
    last = len(keys) * PAGE_TOKENS
    remotes = [Remote("away", address, len(keys))]
    reader.client.send(
        Locate(name, reader.root, reader.tenant, PAGE_TOKENS, 0, last, [chain], page_s, b"", remotes)
    )
    located = reader.hear(Located)
    pages, missing = list(located.host), located.missing
    copy(reader, name, located.host)
    coming = set(located.loading)
    while coming:
        message = reader.hear(Loaded, LoadFailed)
        if isinstance(message, LoadFailed):
            missing = message.missing
            coming = {ref for ref in coming if ref[1] < message.missing.page}
        else:
            coming -= {page.page for page in message.pages}
            pages += message.pages
            copy(reader, name, message.pages)
    return pages, missing


def copy(reader: Peer, name: str, pages: list[HostPage]) -> None:
    for page in pages:
        payload = reader.client.slot(page.grant)[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
        assert payload == payload_of(page.key)
        assert page_checksum(page.key, page.variant, page.spec_digest, payload) == page.checksum
    if pages:
        reader.client.send(Copied(name, [page.page for page in pages], len(pages) * PAYLOAD_BYTES, 1e-4))


@pytest.mark.parametrize("same_host", ["off", "auto"])
@pytest.mark.parametrize("tier", [TierName.HOST, TierName.SSD])
def test_a_hint_brings_the_pages_of_another_node(
    stack: ExitStack, tmp_path: Path, same_host: str, tier: TierName
) -> None:
    home = stack.enter_context(running(tmp_path / "home", l3_pages=64, node_id="home"))
    away = stack.enter_context(running(tmp_path / "away", l3_pages=64, node_id="away"))
    stack.enter_context(exchange("home", str(tmp_path / "home/run/sock"), same_host=same_host))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock"), same_host=same_host))
    writer = stack.enter_context(worker(tmp_path / "away"))
    keys = writer.store(0, PAGES)
    if tier is TierName.SSD:
        until(away.idle, "the pages are in L4")
        away.evict(keys, TierName.HOST)
    reader = stack.enter_context(worker(tmp_path / "home"))

    pages, missing = ask(reader, keys, there.info()["address"])

    assert missing is None
    assert {page.key for page in pages} == set(keys)
    assert {page.came_from for page in pages} == {"remote"}
    until(away.idle, "the other node holds nothing for it")
    until(home.idle, "this one neither")
    away.check()
    again, _ = ask(reader, keys, there.info()["address"], "again")
    assert {page.came_from for page in again} <= {"L3", "L4"}


@pytest.mark.parametrize("same_host", ["off", "auto"])
@pytest.mark.parametrize("saved", [PAGES, 3, 0])
def test_pages_that_only_a_worker_there_has_come_once_it_has_saved_them(
    stack: ExitStack, tmp_path: Path, same_host: str, saved: int
) -> None:
    home = stack.enter_context(running(tmp_path / "home", l3_pages=256, node_id="home"))
    away = stack.enter_context(running(tmp_path / "away", l3_pages=64, node_id="away"))
    stack.enter_context(exchange("home", str(tmp_path / "home/run/sock"), same_host=same_host))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock"), same_host=same_host))
    writer = stack.enter_context(worker(tmp_path / "away", saves=True))
    reader = stack.enter_context(worker(tmp_path / "home"))
    keys = writer.keys(0, PAGES)

    def answer() -> list[bytes]:
        asked = writer.hear(SavePages).pages
        writer.store(0, saved)
        if saved < PAGES:
            writer.client.send(Unsaved(asked[saved:]))
        return [key for key, _ in asked]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer)
        pages, missing = ask(reader, keys, there.info()["address"])

    assert asked.result() == keys
    assert {page.key for page in pages} == set(keys[:saved])
    assert {page.came_from for page in pages} <= {"remote"}
    assert (PAGES if missing is None else missing.page) == saved
    until(away.idle, "the other node holds nothing for it")
    until(home.idle, "this one neither")
    away.check()


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_a_worker_there_that_says_nothing_costs_a_short_wait_and_nothing_is_to_blame(
    stack: ExitStack, tmp_path: Path, same_host: str
) -> None:
    """A busy worker made its node one that is slow: it was left alone, and what it had was computed."""
    home = stack.enter_context(running(tmp_path / "home", l3_pages=256, node_id="home"))
    away = stack.enter_context(running(tmp_path / "away", l3_pages=64, node_id="away"))
    here = stack.enter_context(exchange("home", str(tmp_path / "home/run/sock"), same_host=same_host))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock"), same_host=same_host))
    silent = stack.enter_context(worker(tmp_path / "away", saves=True))
    reader = stack.enter_context(worker(tmp_path / "home"))
    address = there.info()["address"]

    for number in range(OPEN_AFTER):
        keys = silent.keys(10_000 * number, PAGES)
        pages, missing = ask(reader, keys, address, f"r{number}")

        assert pages == []
        assert missing is not None and (missing.page, missing.reason) == (0, "unsaved")

    until(away.idle, "nothing is waited for there")
    until(home.idle, "nor here")
    away.check()
    peer = here.stats()["fetched"]["away"]
    assert peer["breaker"] == "closed" and peer["failures"] == {"unsaved": OPEN_AFTER}
    assert not [note for note in home.notes() if "don't come" in note]
    # Had the waits been taken for its latency, it would be too far away for pages that are computed so quickly.
    keys = silent.store(50_000, PAGES)
    pages, missing = ask(reader, keys, address, "again", page_s=0.01)
    assert missing is None and {page.came_from for page in pages} == {"remote"}


def test_what_comes_of_a_worker_that_is_busy_then_stands(stack: ExitStack, tmp_path: Path) -> None:
    home = stack.enter_context(running(tmp_path / "home", l3_pages=256, node_id="home"))
    away = stack.enter_context(running(tmp_path / "away", l3_pages=64, node_id="away"))
    here = stack.enter_context(exchange("home", str(tmp_path / "home/run/sock")))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock")))
    silent = stack.enter_context(worker(tmp_path / "away", saves=True))
    reader = stack.enter_context(worker(tmp_path / "home"))
    keys = silent.keys(0, PAGES)
    silent.store(0, 3)

    pages, missing = ask(reader, keys, there.info()["address"])

    assert {page.key for page in pages} == set(keys[:3])
    assert missing is not None and (missing.page, missing.reason) == (3, "unsaved")
    until(away.idle, "nothing is waited for there")
    until(home.idle, "nor here")
    assert here.stats()["fetched"]["away"]["breaker"] == "closed"


def test_a_wrong_hint_costs_one_miss(stack: ExitStack, tmp_path: Path) -> None:
    home = stack.enter_context(running(tmp_path / "home", l3_pages=64, node_id="home"))
    stack.enter_context(running(tmp_path / "away", l3_pages=64, node_id="away"))
    stack.enter_context(exchange("home", str(tmp_path / "home/run/sock")))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock")))
    writer = stack.enter_context(worker(tmp_path / "away"))
    writer.store(0, 3)
    reader = stack.enter_context(worker(tmp_path / "home"))
    keys = reader.keys(0, PAGES)

    pages, missing = ask(reader, keys, there.info()["address"])

    assert {page.key for page in pages} == set(keys[:3])
    assert missing is not None
    assert missing.page == 3
    until(home.idle, "nothing is left in flight")


def test_pages_of_another_tenant_do_not_come(stack: ExitStack, tmp_path: Path) -> None:
    """Even when a key is asked for under another tenant's digest."""
    stack.enter_context(running(tmp_path / "home", l3_pages=64, node_id="home"))
    stack.enter_context(running(tmp_path / "away", l3_pages=64, node_id="away"))
    stack.enter_context(exchange("home", str(tmp_path / "home/run/sock")))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock")))
    writer = stack.enter_context(worker(tmp_path / "away"))
    keys = writer.store(0, 3)
    reader = stack.enter_context(worker(tmp_path / "home", tenant="eve"))

    pages, missing = ask(reader, keys, there.info()["address"])

    assert pages == []
    assert missing is not None


def test_a_peers_node_killed_in_the_middle_costs_its_pages_only(stack: ExitStack, tmp_path: Path) -> None:
    """A node in a process of its own, killed -9 between two lookups; it comes back with what L4 has."""
    home = stack.enter_context(running(tmp_path / "home", l3_pages=64, node_id="home"))
    stack.enter_context(exchange("home", str(tmp_path / "home/run/sock"), grace_s=20.0))
    child = stack.enter_context(node_process(tmp_path / "away"))
    there = stack.enter_context(exchange("away", str(tmp_path / "away/run/sock")))
    writer = stack.enter_context(worker(tmp_path / "away"))
    first, second = writer.store(0, 4), writer.store(10_000, 4)
    reader = stack.enter_context(worker(tmp_path / "home"))
    assert ask(reader, first, there.info()["address"])[1] is None

    child.kill()
    child.wait()
    until(lambda: there.health() is not None, "its exchange notices")

    pages, missing = ask(reader, second, there.info()["address"], "while it is gone")
    assert pages == []
    assert missing is not None
    until(home.idle, "nothing is left in flight")
    stack.enter_context(node_process(tmp_path / "away"))
    until(lambda: there.health() is None, "its exchange is connected again")
    again = stack.enter_context(worker(tmp_path / "away", incarnation="2"))
    third = again.store(20_000, 4)
    pages, missing = ask(reader, third, there.info()["address"], "when it is back")
    assert missing is None
    assert {page.key for page in pages} == set(third)


@contextmanager
def worker(
    folder: Path, incarnation: str = "1", tenant: str = "ada", *, saves: bool = False
) -> Iterator[Peer]:
    peer = Peer(folder, incarnation=incarnation, tenant=tenant, saves=saves)
    try:
        yield peer
    finally:
        peer.close()


@contextmanager
def node_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A CacheNode named `away` that can be killed."""
    program = (
        "import sys, time; from kvtier.tier.node.service import CacheService\n"
        f"s = CacheService('away', {str(folder / 'run/sock')!r}, {PAYLOAD_BYTES}, {64 * SLOT_BYTES},"
        f" {str(folder / 'l4')!r}, {16 << 20}, min_payload_bytes={node_kit.SMALL_BYTES})\n"
        "s.start(); print('ready', flush=True); sys.stdin.read(); s.stop(1.0)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.stdin.close()
        try:
            child.wait(120)
        finally:
            child.kill()
            child.stdout.close()
