"""Which deaths of processes were the kernel's doing, for lack of memory: it says only how many it has killed. Pure."""

from __future__ import annotations

_REMEMBERED_S = 30.0  # a death is seen, at the latest, so long after the kernel counted it


class MemoryKills:
    """Kills that have been counted and explain no death yet."""

    def __init__(self, count: int | None) -> None:
        """`count`: how many there had been before; None where the kernel doesn't say."""
        self._count = count
        self._unexplained: list[float] = []  # when each was seen

    def count(self, count: int | None, now: float) -> None:
        """So many there have been by now."""
        if count is not None and self._count is not None:
            self._unexplained += [now] * (count - self._count)
        self._count = count
        self._unexplained = [seen for seen in self._unexplained if now - seen < _REMEMBERED_S]

    def explains(self) -> bool:
        """Whether a death that has just been seen was such a kill, which then explains no other."""
        if not self._unexplained:
            return False
        self._unexplained.pop(0)
        return True


def memory_sentence(limit_bytes: int, where: str) -> str:
    """Why a part died that was killed for memory, and the way out. `where`: the folder of the group that sets the limit, ""
    where it is the machine's memory."""
    limit = f"{limit_bytes / 2**30:.1f} GiB"
    whose = f"the limit of {limit} at {where}" if where else f"the machine's {limit}"
    return f"the kernel killed it for memory ({whose}): lower tiers.l1.bytes or tiers.l3.bytes, or allow more"
