"""Imports the eviction policies of other installed packages, once in each process that makes policies."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from kvtier.tier.policy.registry import policy_names

GROUP = "kvtier.policies"


class PolicyUnusable(ValueError):
    """A package's policy can't be imported; the message names both."""


@cache
def load_policies() -> tuple[str, ...]:
    """Import every module that is an entry point of `kvtier.policies`; the names of all policies. Raises PolicyUnusable."""
    for point in sorted(entry_points(group=GROUP)):
        try:
            point.load()
        except Exception as error:
            package = "a package" if point.dist is None else point.dist.name
            raise PolicyUnusable(
                f"the policy {point.name} of {package} can't be loaded: {error!r}"
            ) from error
    return policy_names()
