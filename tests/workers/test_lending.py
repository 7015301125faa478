"""L2 with real workers on a real node's cache: one with a small L1, and idle peers that lend it theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lending_kit import (
    LRU,
    NOTHING,
    borrower_and_lender,
    fill,
    l2,
    lending_process,
    prompts,
    uncached,
    worker,
)
from waiting import until
from worker_kit import PAGE_TOKENS, Client, caching, page_sizes, serving, tiny_runner

from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import Arena, FramesGranted, Hello, RecallFrames, WantFrames
from kvtier.workers.requests.api import FinishReason

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("write", "as_on_gpu"), [("through", False), ("demote", False), ("through", True)])
def test_pages_that_leave_l1_come_back_from_a_peer_with_the_same_tokens(
    tiny_llama: Path, tmp_path: Path, write: str, as_on_gpu: bool
) -> None:
    asked = prompts(8)
    options: dict[str, Any] = {"write": write, "as_on_gpu": as_on_gpu}
    with borrower_and_lender(tiny_llama, tmp_path, **options) as (service, borrower, lender):
        expected = uncached(lender, asked)
        assert fill(service, borrower, asked) == expected
        assert l2(service).pages > 0

        found = [borrower.generate(p) for p in asked]

        assert [result.tokens for result in found] == expected
        assert sum(result.cached.get("L2", 0) for result in found) >= 6 * PAGE_TOKENS
        hits = borrower.worker.stats().tiers[TierName.PEER]
        assert hits.hit_tokens == sum(result.cached.get("L2", 0) for result in found)
        assert hits.lookups_tokens >= hits.hit_tokens
        last = borrower.worker.explain(f"r{2 * len(asked)}")
        assert last is not None and {note.tier for note in last.notes} <= {"L1", "L2", "L3", "computed"}
        assert l2(service).corrupt_pages == 0


def test_a_lender_that_gets_busy_has_its_frames_back_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    asked, own = prompts(8), prompts(4, pages=12, seed=1)
    with borrower_and_lender(tiny_llama, tmp_path) as (service, borrower, lender):
        expected, expected_own = uncached(borrower, asked), uncached(borrower, own)
        fill(service, borrower, asked)
        assert l2(service).pages > 0
        lent = lender.worker.stats().tiers[TierName.HBM].used_bytes, l2(service).capacity_bytes

        running = [borrower.send(p) for p in asked]
        assert lender.together(own) == expected_own

        assert l2(service).capacity_bytes < lent[1]
        assert [borrower.result(name).tokens for name in running] == expected
        lender.worker.check()


def test_a_request_that_needs_all_of_a_lenders_l1_gets_it(tiny_llama: Path, tmp_path: Path) -> None:
    asked, (long,) = prompts(8), prompts(1, pages=61, seed=2)
    with borrower_and_lender(tiny_llama, tmp_path) as (service, borrower, lender):
        (expected,) = uncached(lender, [long])
        until(lambda: l2(service).capacity_bytes, "frames are lent again")
        fill(service, borrower, asked)

        result = lender.generate(long)

        assert result.tokens == expected
        assert lender.worker.stats().totals.requests == 2


@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("damage", ["one bit", "another page"])
def test_a_damaged_page_in_a_lent_frame_is_a_miss_and_counted(
    tiny_llama: Path, tmp_path: Path, damage: str, as_on_gpu: bool
) -> None:
    asked = prompts(8)
    with borrower_and_lender(tiny_llama, tmp_path, as_on_gpu=as_on_gpu) as (service, borrower, lender):
        expected = uncached(lender, asked)
        fill(service, borrower, asked)
        arena, lent = lender.worker._loop.runner.arena, list(lender.worker._loop.table.frames.lent)
        if damage == "one bit":
            arena[lent, 7] ^= 1
        else:
            arena[lent] = arena[lent[1:] + lent[:1]]

        found = [borrower.generate(p) for p in asked]

        assert [result.tokens for result in found] == expected
        until(lambda: l2(service).corrupt_pages, "the damage is counted")
        assert "L2" not in found[0].cached
        assert any("dropped from L2" in note for note in service.notes())


def test_a_lender_that_is_killed_costs_its_pages_and_no_token(tiny_llama: Path, tmp_path: Path) -> None:
    asked = prompts(8)
    with caching(tmp_path) as service, lending_process(tiny_llama, tmp_path) as process:
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        with worker(tiny_llama, tmp_path, "borrower", 24, NOTHING) as borrower:
            expected = uncached(borrower, asked)
            fill(service, borrower, asked)
            assert l2(service).pages > 0
            running = [borrower.send(p) for p in asked + asked]
            borrower.first(running[0])

            process.kill()

            assert [borrower.result(name).tokens for name in running] == expected + expected
            until(lambda: not l2(service).capacity_bytes, "the node hears that the lender is gone")
            assert l2(service).pages == 0
            until(
                lambda: not borrower.worker._loop.pager._peer_import._arenas, "the borrower lets its arena go"
            )


def test_without_a_node_lent_frames_come_home_once_nothing_can_write_into_them(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """A borrower that the dead node can't speak for any more may still be copying into them."""
    opened: list[Arena] = []
    with ExitStack() as stack:
        service = stack.enter_context(caching(tmp_path))
        lender = stack.enter_context(worker(tiny_llama, tmp_path, "lender", 64, 0.75))
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        runner = lender.worker._loop.runner
        payloads = {spec.digest: spec.nbytes for spec in runner.groups[0].specs.values()}
        hello = Hello("borrower", "1", payloads, payloads, runner.root_fields())
        client = NodeClient.connect(tmp_path / "s", hello, opened.append, lambda: None)  # type: ignore[arg-type]
        until(lambda: opened, "the borrower hears of the arena")
        fds = client.take_arena_fds(opened[0].lender)
        service.stop(0)
        until(lambda: not lender.worker.is_connected, "the lender hears that the node is gone")

        assert lender.generate(prompts(1)[0]).tokens
        assert len(lender.worker._loop.table.frames.lent) == 48
        client.close()
        for fd in fds:
            os.close(fd)

        until(lambda: not lender.worker._loop.table.frames.lent, "all frames are home")


def test_a_stopped_borrower_whose_node_died_keeps_no_request_of_the_lender_waiting(
    tiny_llama: Path, tmp_path: Path
) -> None:
    own = prompts(4, pages=12, seed=3)
    opened: list[Any] = []
    with ExitStack() as stack:
        service = stack.enter_context(caching(tmp_path))
        lender = stack.enter_context(worker(tiny_llama, tmp_path, "lender", 64, 0.75))
        expected = uncached(lender, own)
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        runner = lender.worker._loop.runner
        payloads = {spec.digest: spec.nbytes for spec in runner.groups[0].specs.values()}
        hello = Hello("borrower", "1", payloads, payloads, runner.root_fields())
        client = NodeClient.connect(tmp_path / "s", hello, opened.append, lambda: None)
        stack.callback(client.close)
        until(lambda: opened, "the arena is told of")
        fds = client.take_arena_fds(opened[0].lender)
        service.stop(0)
        until(lambda: not lender.worker.is_connected, "the node is gone")

        assert lender.together(own) == expected  # in the room that is left

        assert lender.worker._loop.table.frames.lent
        lender.worker.check()
        for fd in fds:
            os.close(fd)
        until(lambda: not lender.worker._loop.table.frames.lent, "the frames come home")


def test_after_a_nodes_restart_workers_lend_and_borrow_again(tiny_llama: Path, tmp_path: Path) -> None:
    asked = prompts(8)
    with ExitStack() as stack:
        with caching(tmp_path) as service:
            lender = stack.enter_context(worker(tiny_llama, tmp_path, "lender", 64, 0.75))
            until(lambda: l2(service).capacity_bytes, "frames are lent")
            borrower = stack.enter_context(worker(tiny_llama, tmp_path, "borrower", 24, NOTHING))
            expected = fill(service, borrower, asked)
            assert l2(service).pages > 0
        with caching(tmp_path) as service:
            until(lambda: l2(service).capacity_bytes == 48 * 8192, "all frames are lent again")
            until(lambda: borrower.worker.is_connected, "the borrower is back")

            assert fill(service, borrower, asked) == expected

            assert l2(service).pages > 0
            borrower.worker.stop()
            lender.worker.stop()


def test_a_borrower_that_keeps_what_is_recalled_stops_nothing(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = prompts(4, pages=12, seed=3)
    with caching(tmp_path) as service, worker(tiny_llama, tmp_path, "lender", 64, 0.75) as lender:
        expected = [lender.generate(p, use_cache=False, max_tokens=64).tokens for p in own]
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        with borrowed_for_good(lender, tmp_path) as heard:
            assert lender.together(own, max_tokens=64) == expected

            assert any(isinstance(message, RecallFrames) for message in heard)
            assert "don't come back; going on without" in caplog.text
        until(lender.worker.idle, "all frames are back")


@pytest.mark.parametrize("cache_format", ["timedecay", "fp8"])
def test_workers_with_pages_of_several_sizes_lend_and_borrow_whole_slabs(
    tiny_llama: Path, tmp_path: Path, cache_format: str
) -> None:
    asked, own = prompts(40, pages=8), prompts(6, pages=8, seed=4)
    options: dict[str, Any] = {"cache_format": cache_format, "recent_tokens": 32}
    with ExitStack() as stack:
        runners = [tiny_runner(tiny_llama, pages, share_arena=True, **options) for pages in (160, 48)]
        service = stack.enter_context(caching(tmp_path, page_bytes=page_sizes(runners[0])))
        lender = stack.enter_context(
            serving(runners[0], tmp_path / "s", worker_id="lender", l2_share=0.75, policy=LRU)
        )
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        borrower = stack.enter_context(
            serving(runners[1], tmp_path / "s", worker_id="borrower", l2_share=NOTHING, policy=LRU)
        )
        expected = [borrower.generate(p).tokens for p in asked]

        running = [borrower.send(p) for p in asked]
        tokens = lender.together(own)

        assert [borrower.result(name).tokens for name in running] == expected
        assert tokens == fill(service, lender, own)
        assert l2(service).demoted_pages > 0


@pytest.mark.parametrize(("pages", "max_tokens"), [(62, 8), (60, 60)], ids=["at its start", "on its way"])
def test_who_needs_the_room_that_a_borrower_never_gives_back_is_told_so(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, max_tokens: int
) -> None:
    monkeypatch.setattr("kvtier.workers.node_io.peer_export.STARVED_S", 0.5)
    (large, other), (small,) = prompts(2, pages=pages, seed=5), prompts(1)
    with caching(tmp_path) as service, worker(tiny_llama, tmp_path, "lender", 64, 0.75) as lender:
        (expected,) = uncached(lender, [small])
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        with borrowed_for_good(lender, tmp_path):
            asked, behind = lender.send(large, max_tokens=max_tokens), lender.send(small)

            told = lender.result(asked)

            assert told.reason is FinishReason.CANCELLED
            assert "peers don't give back the room" in str(told.last.error)
            assert bool(told.tokens) == (max_tokens > 8)
            assert lender.result(behind).tokens == expected

            cancelled = lender.send(other, max_tokens=max_tokens)
            lender.worker.cancel(cancelled)
            assert lender.result(cancelled).last.error is None
            lender.worker.check()
        until(lender.worker.idle, "all frames are back")
        assert len(lender.generate(large, max_tokens=max_tokens).tokens) == max_tokens


@contextmanager
def borrowed_for_good(lender: Client, folder: Path) -> Iterator[list[object]]:
    """A borrower that holds all the stock that it can get, and answers nothing; what it hears."""
    runner = lender.worker._loop.runner
    payloads = {spec.digest: spec.nbytes for spec in runner.groups[0].specs.values()}
    heard: list[object] = []
    hello = Hello("borrower", "1", payloads, payloads, runner.root_fields())
    client = NodeClient.connect(folder / "s", hello, heard.append, lambda: None)
    client.send(WantFrames(16, next(iter(payloads.values()))))
    until(lambda: any(isinstance(message, FramesGranted) for message in heard), "frames are granted")
    try:
        yield heard
    finally:
        client.close()
