"""What a deployment's processes find in their environment, of the cluster that it starts or joins."""

from __future__ import annotations

from kvtier.cluster.machines.environment import prepare


def test_a_users_own_niceness_of_workers_is_kept() -> None:
    """Ray would give them 15: the leavings of all else that runs."""
    chosen, unset, joined = {"RAY_worker_niceness": "5"}, dict[str, str](), dict[str, str]()

    prepare(chosen)
    prepare(unset)
    prepare(joined, is_ours=False)

    assert chosen["RAY_worker_niceness"] == "5"
    assert unset["RAY_worker_niceness"] == "0"
    assert "RAY_worker_niceness" not in joined, "a running cluster has started its raylets already"


def test_only_a_cluster_of_our_own_gets_a_token_of_ours() -> None:
    ours, joined = dict[str, str](), dict[str, str]()
    prepare(ours)
    prepare(joined, is_ours=False)

    assert ours["RAY_AUTH_MODE"] == "token" and len(ours["RAY_AUTH_TOKEN"]) == 64
    assert "RAY_AUTH_TOKEN" not in joined
