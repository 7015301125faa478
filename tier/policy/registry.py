"""The live policies by name. Pure."""

from __future__ import annotations

from kvtier.tier.policy.base import Lru, Policy, PolicySettings
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.policy.weighted import WeightedScore

NAMES = ("rvi", "score", "lru")


def make_policy(settings: PolicySettings, capacity_pages: int) -> Policy:
    """A policy for an owner of about `capacity_pages`; raises ValueError for a name that isn't one of NAMES."""
    match settings.name:
        case "rvi":
            return Guarded(settings, capacity_pages) if settings.guard else Rvi(settings)
        case "score":
            return WeightedScore(settings)
        case "lru":
            return Lru()
        case other:
            raise ValueError(f"cache.policy must be one of {', '.join(NAMES)}, got {other!r}")
