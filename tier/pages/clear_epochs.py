"""Clear epochs: the number of each tenant's latest clear, as far as a part knows. Pure.

A part that has applied clears up to a number holds nothing of the tenant from before it. Numbers only grow, and two tables
are joined by the larger number of each tenant, so parts may be told in any order and as often as one likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAX_TENANTS = (
    65_536  # of a table; past it the oldest clear counts for all tenants: more is cleared then, never less
)
MAX_NUMBER = 2**63 - 1
EVERYONE = b""  # stands for all tenants where a tenant's digest is expected

Tenant = bytes | None  # a tenant's digest; None: all tenants


class Clears:
    """The table. `floor` is the number of the latest clear of all tenants."""

    def __init__(self, numbers: Iterable[tuple[bytes, int]] = ()) -> None:
        """`numbers` are as `numbers()` gives them."""
        self._floor = 0
        self._tenants: dict[bytes, int] = {}  # the oldest clear first
        for tenant, number in sorted(numbers, key=lambda pair: pair[1]):
            self.note(tenant or None, number)

    def of(self, tenant: bytes) -> int:
        """The number of the latest clear of a tenant's pages; 0: there was none."""
        return max(self._floor, self._tenants.get(tenant, 0))

    @property
    def latest(self) -> int:
        """The largest number there is."""
        return max(self._floor, next(reversed(self._tenants.values()), 0))

    def note(self, tenant: Tenant, number: int) -> bool:
        """A tenant (None: everyone) was cleared under this number; False where that was known."""
        if tenant is None:
            if number <= self._floor:
                return False
            self._floor = number
            self._tenants = {one: at for one, at in self._tenants.items() if at > number}
            return True
        if number <= self.of(tenant):
            return False
        self._tenants.pop(tenant, None)
        is_latest = number >= self.latest
        self._tenants[tenant] = number
        if not is_latest:  # told late: the oldest stay first
            self._tenants = dict(sorted(self._tenants.items(), key=lambda pair: pair[1]))
        while len(self._tenants) > MAX_TENANTS:
            self._floor = self._tenants.pop(next(iter(self._tenants)))
        return True

    def behind(self, told: Iterable[tuple[bytes, int]]) -> list[tuple[Tenant, int]]:
        """The clears that `told` has and this table lacks, the oldest first."""
        pairs = sorted(told, key=lambda pair: pair[1])
        floor = max((number for tenant, number in pairs if tenant == EVERYONE), default=0)
        missing: list[tuple[Tenant, int]] = [(None, floor)] if floor > self._floor else []
        known = max(floor, self._floor)
        missing += [
            (tenant, number)
            for tenant, number in pairs
            if tenant != EVERYONE and number > max(known, self._tenants.get(tenant, 0))
        ]
        return missing

    def numbers(self) -> list[tuple[bytes, int]]:
        """All of it, the clear of all tenants under EVERYONE."""
        floor = [(EVERYONE, self._floor)] if self._floor else []
        return [*floor, *self._tenants.items()]

    def check(self) -> None:
        """The table is bounded, the oldest clear first, and has nothing that the floor says already."""
        numbers = list(self._tenants.values())
        assert len(numbers) <= MAX_TENANTS and numbers == sorted(numbers)
        assert all(number > self._floor for number in numbers)

    def copy(self) -> Clears:
        """A table of its own."""
        made = Clears()
        made._floor, made._tenants = self._floor, dict(self._tenants)
        return made


def to_json(numbers: Iterable[tuple[bytes, int]]) -> dict[str, int]:
    """For a file: digests in hex."""
    return {tenant.hex(): number for tenant, number in numbers}


def from_json(numbers: Mapping[str, int]) -> list[tuple[bytes, int]]:
    """What `to_json` made. Raises ValueError for anything else."""
    found = [(bytes.fromhex(tenant), number) for tenant, number in numbers.items()]
    for tenant, number in found:
        if len(tenant) not in (0, 16) or not 0 < number <= MAX_NUMBER:
            raise ValueError(f"clear {number} of tenant {tenant.hex() or 'everyone'}")
    return found
