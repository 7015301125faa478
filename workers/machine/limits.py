"""What this process may use of its machine: the one place that reads CPU quotas, memory limits and the like."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvtier.workers.machine import cgroups

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the machine and of all control groups in which this process is. None: no limit."""

    cores: int  # physical ones, or fewer by the quota: threads that compute
    cpu_quota: float | None  # CPUs
    memory_bytes: int
    memory_free_bytes: int
    memory_file: str  # the folder of the group whose limit that is; "" where the machine's memory is
    shm_bytes: int  # of /dev/shm
    shm_free_bytes: int
    open_files: int | None  # of one process, as far as it may raise it
    locked_bytes: int | None  # likewise


def read_limits(root: Path = _ROOT) -> Limits:
    """As they are now. `root` holds the proc folder and the mounts that it names."""
    memory = psutil.virtual_memory()
    total, free, where = memory.total, memory.available, ""
    for folder, files in _groups(root, "memory", cgroups.MEMORY_FILES):
        limit = cgroups.memory_limit(files)
        if limit is None:
            continue
        if limit < total:
            total, where = limit, folder
        free = min(free, max(0, limit - cgroups.memory_used(files)))
    shm = _disk(root / "dev/shm")
    return Limits(
        cores_here(root),
        cpu_quota(root),
        total,
        free,
        where,
        *shm,
        _hard(resource.RLIMIT_NOFILE),
        _hard(resource.RLIMIT_MEMLOCK),
    )


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs that all groups of this process leave it; None for no quota."""
    found = [cgroups.cpu_quota(files) for _, files in _groups(root, "cpu", cgroups.CPU_FILES)]
    return min((quota for quota in found if quota is not None), default=None)


def cores_here(root: Path = _ROOT) -> int:
    """Physical cores that this process may use. More threads than a quota lets run are stopped in turn, all together."""
    return _within_quota(min(psutil.cpu_count(logical=False) or 1, cpus_here(root)), root)


def cpus_here(root: Path = _ROOT) -> int:
    """The same with each thread of a core: for processes that each work for themselves."""
    return _within_quota(len(os.sched_getaffinity(0)), root)


def oom_kills(root: Path = _ROOT) -> int | None:
    """How many processes beside this one, in its group or else on the machine, the kernel has killed for memory so far."""
    for _, files in _groups(root, "memory", cgroups.MEMORY_FILES):
        if (kills := cgroups.oom_kills(files)) is not None:
            return kills
        break  # an ancestor counts kills of its other children too
    return cgroups.oom_kills_of_machine(_text(root / "proc/vmstat"))


def _within_quota(count: int, root: Path) -> int:
    quota = cpu_quota(root)
    return max(1, count if quota is None else min(count, math.floor(quota)))


def _groups(root: Path, controller: str, names: tuple[str, ...]) -> Iterator[tuple[str, cgroups.Files]]:
    """Folder and files of each group, this process's own first."""
    process = root / "proc/self"
    for folder in cgroups.folders(_text(process / "cgroup"), _text(process / "mountinfo"), controller):
        inside = root / folder.lstrip("/")
        yield folder, {name: _text(inside / name) for name in names if (inside / name).exists()}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _disk(folder: Path) -> tuple[int, int]:
    """Bytes in all, and free ones."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _hard(limit: int) -> int | None:
    _, hard = resource.getrlimit(limit)
    return None if hard == resource.RLIM_INFINITY else hard
