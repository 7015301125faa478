"""Ends what a deployment has started, known by process id and create time, and removes its Ray session folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

_TERM_WAIT_S = 5.0
_KILL_WAIT_S = 5.0
_SAME_START_S = (
    1.0  # create times come from clock ticks and the boot time, so they are read back a little apart
)

Stamp = tuple[int, float]  # process id and create time: together they never name another process


def descendants() -> list[Stamp]:
    """All processes that this one has started, and theirs."""
    stamps = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            stamps.append((process.pid, process.create_time()))
        except psutil.NoSuchProcess:
            continue
    return stamps


def alive(stamps: Iterable[Stamp]) -> list[psutil.Process]:
    """Those that still run."""
    found = []
    for pid, created in stamps:
        try:
            process = psutil.Process(pid)
            if (
                abs(process.create_time() - created) < _SAME_START_S
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def end(stamps: Iterable[Stamp], *, at_once: bool = False) -> int:
    """SIGTERM, then SIGKILL for those that stay (`at_once`: SIGKILL alone); how many there were."""
    processes = alive(stamps)
    if not at_once:
        _each(processes, psutil.Process.terminate)
        psutil.wait_procs(processes, timeout=_TERM_WAIT_S)
    left = [process for process in processes if process.is_running()]
    _each(left, psutil.Process.kill)
    psutil.wait_procs(left, timeout=_KILL_WAIT_S)
    return len(processes)


def remove(folder: Path) -> bool:
    """Delete a folder with all in it; whether there was one."""
    there = folder.is_dir()
    shutil.rmtree(folder, ignore_errors=True)
    return there


def _each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            act(process)
        except psutil.NoSuchProcess:
            continue
