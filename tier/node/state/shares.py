"""How much of a node's tiers each tenant may fill. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.tier.pages.page import TierName

UNLIMITED = b""  # owner of the pages of all tenants that may fill a tier


class Shares:
    """The bytes of slots that tenants with a share below 1 hold of L3 and L4. Owned by CacheState.

    `shares` is by tenant digest: the most of each tier that its pages may take.
    """

    def __init__(self, shares: Mapping[bytes, float], host_bytes: int, ssd_bytes: int) -> None:
        self._most = {
            TierName.HOST: {tenant: int(share * host_bytes) for tenant, share in shares.items() if share < 1},
            TierName.SSD: {tenant: int(share * ssd_bytes) for tenant, share in shares.items() if share < 1},
        }
        self.held = {tier: dict.fromkeys(most, 0) for tier, most in self._most.items()}
        self._over: dict[TierName, dict[bytes, None]] = {tier: {} for tier in self._most}

    def owner(self, tenant: bytes) -> bytes:
        """The tenant, where it has a share, else UNLIMITED."""
        return tenant if tenant in self._most[TierName.HOST] else UNLIMITED

    def take(self, tier: TierName, owner: bytes, nbytes: int) -> None:
        """A slot of a tier is an owner's from now on; of fewer than 0 bytes, no longer."""
        if not owner:
            return
        self.held[tier][owner] += nbytes
        if self.excess(tier, owner):
            self._over[tier][owner] = None
        else:
            self._over[tier].pop(owner, None)

    def excess(self, tier: TierName, owner: bytes, more: int = 0) -> int:
        """Bytes that an owner is over its share of a tier, with so many more."""
        return max(0, self.held[tier][owner] + more - self._most[tier][owner]) if owner else 0

    def over(self, tier: TierName) -> list[bytes]:
        """The owners that are over their share of a tier, first those that have been for longest."""
        return list(self._over[tier])
