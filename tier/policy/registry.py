"""The policies by name: kvtier's own, and those that other packages register. Pure.

A policy of another package is a class or function under `register_policy` in a module that the package names as an entry
point of the group `kvtier.policies`; tier/policy/plugins.py imports those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvtier.tier.policy.base import Lru, Policy, PolicySettings
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.policy.weighted import WeightedScore

Make = Callable[[PolicySettings, int], Policy]
M = TypeVar("M", bound=Callable[..., Policy])

_POLICIES: dict[str, Make] = {}


def register_policy(name: str) -> Callable[[M], M]:
    """Registers a class, made with the settings, or a function of the settings and the owner's capacity in pages.

    Raises ValueError for a name that another policy has.
    """

    def register(made: M) -> M:
        if name in _POLICIES:
            raise ValueError(f"a policy named {name!r} is registered already")
        _POLICIES[name] = (lambda settings, _: made(settings)) if isinstance(made, type) else made
        return made

    return register


def policy_names() -> tuple[str, ...]:
    """Names of the policies that are registered, kvtier's own first."""
    return tuple(_POLICIES)


def make_policy(settings: PolicySettings, capacity_pages: int) -> Policy:
    """A policy for an owner of about `capacity_pages`; raises ValueError for a name that isn't registered."""
    if settings.name not in _POLICIES:
        raise ValueError(unknown_policy(settings.name))
    return _POLICIES[settings.name](settings, capacity_pages)


def unknown_policy(name: str) -> str:
    """What is wrong with a name that isn't registered."""
    return f"cache.policy must be one of {', '.join(_POLICIES)}, got {name!r}"


@register_policy("rvi")
def _rvi(settings: PolicySettings, capacity_pages: int) -> Policy:
    return Guarded(settings, capacity_pages) if settings.guard else Rvi(settings)


register_policy("score")(WeightedScore)


@register_policy("lru")
def _lru(settings: PolicySettings, capacity_pages: int) -> Policy:
    return Lru()
