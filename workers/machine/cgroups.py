"""What the files of Linux control groups say, versions 1 and 2, alone and mounted side by side. Pure: reads no file.

A limit holds for all groups below it, so each is looked for from a process's own group up to the highest that is mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NO_LIMIT = 2**60  # version 1 says "none" as the largest number of whole pages
_OCTAL = re.compile(r"\\([0-7]{3})")  # mountinfo's way to write a space

CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
MEMORY_FILES = (
    *("memory.max", "memory.high", "memory.current", "memory.events"),
    *("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    "memory.stat",
)

Files = Mapping[str, str]  # text by name, of those that are there


@dataclass(frozen=True, slots=True)
class _Mount:
    controllers: frozenset[str]  # of version 1; empty for version 2
    root: str  # the group that is mounted
    point: str


def folders(cgroup: str, mountinfo: str, controller: str) -> list[str]:
    """Folders of the groups in which a process is for a controller, its own first, by /proc/PID/cgroup and mountinfo."""
    membership = _membership(cgroup, controller)
    if membership is None:
        return []
    path, is_v1 = membership
    mounts = [
        mount
        for mount in _mounts(mountinfo)
        if (controller in mount.controllers if is_v1 else not mount.controllers)
    ]
    if not mounts:
        return []
    mount, below = next(
        ((mount, below) for mount in mounts if (below := _below(path, mount.root)) is not None),
        (mounts[0], ""),  # a container may see the folder of its group without the way that leads there
    )
    parts = [part for part in below.split("/") if part]
    return ["/".join([mount.point.rstrip("/"), *parts[:end]]) for end in range(len(parts), -1, -1)]


def cpu_quota(files: Files) -> float | None:
    """CPUs that a group may use at once, over time; None for all."""
    if "cpu.max" in files:
        quota, _, period = files["cpu.max"].strip().partition(" ")
    else:
        quota, period = files.get("cpu.cfs_quota_us", ""), files.get("cpu.cfs_period_us", "")
    used, of = _number(quota), _number(period)
    return used / of if used and of and used > 0 else None


def memory_limit(files: Files) -> int | None:
    """Bytes above which a group's processes are killed, or stalled until they use less; None for no limit."""
    found = [_number(files.get(name, "")) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits = [limit for limit in found if limit is not None and 0 <= limit < _NO_LIMIT]
    return min(limits, default=None)


def memory_used(files: Files) -> int:
    """Bytes that a group can't give back: file pages are dropped when others need memory."""
    used = _number(files.get("memory.current", "")) or _number(files.get("memory.usage_in_bytes", "")) or 0
    stat = _fields(files.get("memory.stat", ""))
    files_bytes = sum(
        stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file")
    )
    return max(0, used - files_bytes)


def oom_kills(files: Files) -> int | None:
    """How many processes of a group the kernel has killed for memory; None where it doesn't say."""
    for name in ("memory.events", "memory.oom_control"):
        if (kills := _fields(files.get(name, "")).get("oom_kill")) is not None:
            return kills
    return None


def oom_kills_of_machine(vmstat: str) -> int | None:
    """The same for all processes, by /proc/vmstat."""
    return _fields(vmstat).get("oom_kill")


def _membership(cgroup: str, controller: str) -> tuple[str, bool] | None:
    """The path of the group of a controller, and whether that is one of version 1."""
    unified: tuple[str, bool] | None = None
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and controller in controllers.split(","):
            return path, True
        if separator and number == "0" and not controllers:
            unified = path, False
    return unified


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        before, after = head.split(), tail.split()
        if len(before) < 5 or len(after) < 3 or after[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(after[2].split(",")) if after[0] == "cgroup" else frozenset()
        yield _Mount(controllers, _unescaped(before[3]), _unescaped(before[4]))


def _below(path: str, root: str) -> str | None:
    """A group's path from the one that is mounted; None where it doesn't lie below that."""
    if ".." in path.split("/"):
        return None
    if root == "/":
        return path
    return path[len(root) :] if path == root or path.startswith(f"{root}/") else None


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(text: str) -> int | None:
    """None for "max" and for what is no number."""
    try:
        return int(text)
    except ValueError:
        return None
