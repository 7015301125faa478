"""Ends what a deployment has started, known by process id and start, and removes its Ray session folder.

A start is told by the kernel's count of clock ticks since boot, never by the clock on the wall: one that is set
must not make processes look dead, or like others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import psutil

_TERM_WAIT_S = 5.0
_KILL_WAIT_S = 5.0
_START_FIELD = 22 - 3  # of /proc/PID/stat, counted from the one behind the name, which is the third

Stamp = tuple[
    int, str
]  # process id, and boot and tick of its start: together they never name another process


def stamp_of(pid: int) -> Stamp:
    """Raises psutil.NoSuchProcess."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    return pid, f"{_boot()}/{stat.rpartition(')')[2].split()[_START_FIELD]}"  # a name may have any characters


@cache
def _boot() -> str:
    """Ticks start over with each boot, and records outlive it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def descendants() -> list[Stamp]:
    """All processes that this one has started, and theirs."""
    stamps = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            stamps.append(stamp_of(process.pid))
        except psutil.NoSuchProcess:
            continue
    return stamps


def alive(stamps: Iterable[Stamp]) -> list[psutil.Process]:
    """Those that still run."""
    found = []
    for stamp in stamps:
        try:
            process = psutil.Process(stamp[0])
            if stamp_of(process.pid) == stamp and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def lasting(stamps: Iterable[Stamp]) -> set[Stamp]:
    """Those whose processes still run."""
    return {stamp for stamp in stamps if alive([stamp])}


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


def kill(stamps: Iterable[Stamp]) -> None:
    """SIGKILL, and no wait for the end."""
    _each(alive(stamps), psutil.Process.kill)


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
