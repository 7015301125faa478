"""Workers that lend and borrow in tests: one with a small L1, and idle peers that lend it theirs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from waiting import until
from worker_kit import PAGE_TOKENS, Client, caching, serving, settle, tiny_runner

from kvtier.tier.l1.arena import Arena
from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.stats import TierCounters
from kvtier.workers.paging.copier import PageCopies
from kvtier.workers.paging.frame_checks import DeviceChecks

LRU = PolicySettings(name="lru")
NOTHING = 0.01  # of a small L1: a worker with this share lends no frame, and borrows


def prompts(count: int, pages: int = 6, seed: int = 0) -> list[list[int]]:
    made: list[list[int]] = (
        np.random.default_rng(seed).integers(0, 512, (count, pages * PAGE_TOKENS + 5)).tolist()
    )
    return made


@contextmanager
def worker(
    llama: Path,
    folder: Path,
    name: str,
    pages: int,
    share: float,
    *,
    as_on_gpu: bool = False,
    **options: Any,
) -> Iterator[Client]:
    """A worker that lends at most `share` of its L1; `as_on_gpu`: it checks what it borrows as on a GPU."""
    runner = tiny_runner(llama, pages, share_arena=True)
    if as_on_gpu:
        copies = PageCopies(Arena(runner.arena), DeviceChecks(runner.arena))
        runner.open_l1 = lambda: (Arena(runner.arena), copies)  # type: ignore[attr-defined]
    with serving(runner, folder / "s", worker_id=name, l2_share=share, policy=LRU, **options) as client:
        yield client


@contextmanager
def borrower_and_lender(
    llama: Path, folder: Path, *, small: int = 24, **options: Any
) -> Iterator[tuple[CacheService, Client, Client]]:
    """A worker whose L1 holds `small` pages, and an idle one that has lent it 48 frames."""
    with ExitStack() as stack:
        service = stack.enter_context(caching(folder))
        lender = stack.enter_context(worker(llama, folder, "lender", 64, 0.75, **options))
        until(lambda: l2(service).capacity_bytes, "frames are lent")
        borrower = stack.enter_context(worker(llama, folder, "borrower", small, NOTHING, **options))
        yield service, borrower, lender


def l2(service: CacheService) -> TierCounters:
    return service.stats().tiers[TierName.PEER]


def uncached(client: Client, asked: list[list[int]]) -> list[list[int]]:
    return [client.generate(p, use_cache=False).tokens for p in asked]


def fill(service: CacheService, client: Client, asked: list[list[int]]) -> list[list[int]]:
    """Ask one after the other, until all copies have ended."""
    tokens = []
    for p in asked:
        tokens.append(client.generate(p).tokens)
        settle(client.worker, service)
    return tokens


@contextmanager
def lending_process(llama: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An idle worker in a process of its own, that lends."""
    script = Path(__file__).parent / "lending_process.py"
    process = subprocess.Popen([sys.executable, str(script), str(llama), str(folder / "s")])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
