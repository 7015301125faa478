"""Looks at the kernel's count of processes that it has killed for memory, and says of a part's death that it was one."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtier.cluster.health.memory_kills import MemoryKills, memory_sentence
from kvtier.workers.machine.limits import oom_kills, read_limits


class MemoryWatch:
    """Of this machine, or this process's own control group. Owned by the supervisor's main thread."""

    def __init__(self, read: Callable[[], int | None] = oom_kills) -> None:
        self._read = read
        self._kills = MemoryKills(read())

    def look(self) -> None:
        """To be called often: a kill that is long over explains no death."""
        self._kills.count(self._read(), time.monotonic())

    def reason(self) -> str:
        """Why a process died whose death has just been seen; "" where memory isn't known to be the reason."""
        self.look()
        if not self._kills.explains():
            return ""
        limits = read_limits()
        return memory_sentence(limits.memory_bytes, limits.memory_file)
