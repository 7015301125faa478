"""Takes from the configuration what chooses the pages, and the running requests, that leave a tier. Pure."""

from __future__ import annotations

from kvtier.cluster.config.deployment import Config
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.policy.base import PolicySettings, ScoreWeights


def policy_settings(config: Config) -> PolicySettings:
    """By which workers and nodes choose the pages that leave."""
    cache = config.cache
    return PolicySettings(
        name=cache.policy,
        exponent=cache.exponent,
        guard=cache.guard,
        weights=ScoreWeights(**cache.weights.model_dump()),
    )


def request_weights(config: Config) -> ScoreWeights:
    """Of the score by which workers choose the running request that makes room."""
    return ScoreWeights(**config.worker.preemption.model_dump())


def tenant_shares(config: Config) -> dict[str, float]:
    """The most of each tier that a tenant's pages may take, by its name; without those that may take all."""
    return {tenant.name: tenant.share for tenant in config.tenants if tenant.share < 1}


def digest_shares(config: Config) -> dict[bytes, float]:
    """The same by the tenants' digests, which are all that a node knows of them."""
    return {tenant_digest(name): share for name, share in tenant_shares(config).items()}
