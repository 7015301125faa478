"""Lent frames that are wanted back while their borrowers are busy: a process of its own, and reads in the middle."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lending_kit import borrower_and_lender, fill, l2, prompts, uncached, worker
from waiting import until
from worker_kit import caching

from kvtier.tier.l1.arena import Arena, PeerArena
from kvtier.tier.pages.page import TierName

pytestmark = pytest.mark.slow

ROUNDS = 6


def test_a_lender_gets_its_frames_from_a_busy_process_again_and_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Each round needs more of the lender's L1 than is left beside what it has lent."""
    own = [prompts(4, pages=14, seed=seed) for seed in range(ROUNDS)]
    with caching(tmp_path) as service, worker(tiny_llama, tmp_path, "lender", 64, 0.75) as lender:
        expected = [uncached(lender, asked) for asked in own]
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        frames = lender.worker._loop.table.frames
        with borrowing_process(tiny_llama, tmp_path) as borrower:
            assert borrower.stdout is not None and borrower.stdin is not None
            assert borrower.stdout.readline() == "busy\n"
            for asked, tokens in zip(own, expected, strict=True):
                read = l2(service).promoted_pages
                until(lambda: l2(service).promoted_pages > read, "the borrower reads")  # noqa: B023
                lent = len(frames.lent)

                assert lender.together(asked) == tokens

                until(lambda: len(frames.lent) < lent, "frames are back")  # noqa: B023
                lender.worker.evict([bytes.fromhex(page.key) for page in lender.worker.pages(limit=1000)])
                until(lambda: frames.lent, "frames are lent again")
            borrower.stdin.close()
            prompts_asked, found, wrong = map(int, borrower.stdout.readline().split())
            assert borrower.wait(120) == 0
        assert prompts_asked >= 8 and found > 0 and wrong == 0
        until(lender.worker.idle, "nothing is under way")
        lender.worker.check()
        assert l2(service).corrupt_pages == 0
        assert l2(service).used_bytes == l2(service).pages * 8192  # neither granted nor read


def test_frames_that_are_read_stay_until_the_read_ends_and_all_others_come_at_once(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, own = prompts(8), prompts(4, pages=14, seed=1)
    reads, may_end = threading.Event(), threading.Event()
    copy = Arena.copy_from_peer

    def held(self: Arena, frame: int, peer: PeerArena, offset: int, nbytes: int) -> None:
        reads.set()
        may_end.wait(120)
        copy(self, frame, peer, offset, nbytes)

    with borrower_and_lender(tiny_llama, tmp_path) as (service, borrower, lender):
        expected, expected_own = uncached(lender, asked), uncached(borrower, own)
        fill(service, borrower, asked)
        assert l2(service).pages > 0
        monkeypatch.setattr(Arena, "copy_from_peer", held)
        running = [borrower.send(p) for p in asked]
        assert reads.wait(120)
        lent = set(lender.worker._loop.table.frames.lent)

        assert lender.together(own) == expected_own

        left = set(lender.worker._loop.table.frames.lent)
        assert left and left < lent, "what is read stays, all else came home"
        may_end.set()
        assert [borrower.result(name).tokens for name in running] == expected
        until(lambda: not lender.worker._loop.pager._peer_export.is_waiting, "all that was asked for is back")
        assert borrower.worker.stats().tiers[TierName.PEER].hit_tokens > 0
        assert l2(service).corrupt_pages == 0
        lender.worker.check()


@contextmanager
def borrowing_process(llama: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A busy worker in a process of its own, that borrows."""
    script = Path(__file__).parents[1] / "kits" / "borrowing_process.py"
    command = [sys.executable, str(script), str(llama), str(folder / "s")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
