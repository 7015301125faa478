"""What of a configuration chooses the pages that leave, as workers and nodes take it."""

from __future__ import annotations

from dataclasses import replace

from kvtier.cluster.config.deployment import load_config
from kvtier.cluster.config.policies import digest_shares, policy_settings, request_weights, tenant_shares
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.policy.base import PolicySettings, ScoreWeights
from kvtier.workers.scheduling.scheduler import PREEMPTION

TENANTS = "tenants=[{name: default}, {name: acme, share: 0.25}, {name: whole, share: 1}]"


def test_what_is_configured_chooses() -> None:
    config = load_config(
        None,
        (
            "cache.policy=score",
            "cache.exponent=1",
            "cache.guard=false",
            "cache.weights={recency: 0.1, memory: -0.2, remaining: 0}",
        ),
    )

    settings = policy_settings(config)

    assert (settings.name, settings.exponent, settings.guard) == ("score", 1.0, False)
    assert settings.weights == ScoreWeights(0.1, -0.2, 0.0)


def test_the_defaults_are_those_of_the_policies() -> None:
    assert policy_settings(load_config(None)) == PolicySettings()


def test_running_requests_have_weights_of_their_own() -> None:
    config = load_config(None, ("worker.preemption={memory: 0.7}", "cache.weights={memory: 0.1}"))

    assert request_weights(config) == replace(PREEMPTION, memory=0.7)
    assert request_weights(load_config(None)) == PREEMPTION


def test_only_tenants_that_may_not_take_all_have_a_share() -> None:
    config = load_config(None, (TENANTS,))

    assert tenant_shares(config) == {"acme": 0.25}
    assert digest_shares(config) == {tenant_digest("acme"): 0.25}
