"""Which machines of a Ray cluster become nodes, under which ids, and what is said when there are too few."""

from __future__ import annotations

import pytest

from kvtier.cluster import placement
from kvtier.cluster.config import Config, load_config
from kvtier.cluster.placement import (
    Machine,
    Placement,
    PlacementError,
    bundles,
    gpu_refusal,
    gpus_per_rank,
    places,
)
from kvtier.cluster.raylets import raylet_resource, shared_out


def configured(*overrides: str) -> Config:
    return load_config(None, ("ray.address=auto", *overrides))


def machine(address: str, *, cpus: float = 8, gpus: float = 0, raylet: int | None = None) -> Machine:
    resources = {"CPU": cpus, f"node:{address}": 1.0}
    if gpus:
        resources["GPU"] = gpus
    if raylet is not None:
        resources[raylet_resource(raylet)] = 1.0
    return Machine(f"id-{address}-{raylet}", f"host-{address}", address, resources)


def test_a_node_takes_a_cpu_for_each_worker_and_no_gpu_where_there_is_none() -> None:
    machines = [machine("10.0.0.1"), machine("10.0.0.2")]

    assert bundles(configured("worker.count=3"), machines) == [{"CPU": 3.0}]


def test_with_gpus_about_every_rank_takes_one() -> None:
    machines = [machine("10.0.0.1", cpus=2), machine("10.0.0.2", gpus=8)]
    config = configured("worker.count=4", "worker.tensor_parallel=2", "nodes.count=0")

    assert bundles(config, machines) == [{"CPU": 4.0, "GPU": 8.0}]


def test_a_machine_with_fewer_gpus_than_workers_computes_on_its_cpu() -> None:
    assert gpus_per_rank(configured("worker.count=2"), [machine("10.0.0.1", gpus=1)]) == 0
    assert (
        gpus_per_rank(configured("worker.count=2", "worker.gpus=0.5"), [machine("10.0.0.1", gpus=1)]) == 0.5
    )


def test_a_node_that_takes_more_gpus_than_any_machine_has_is_refused_with_the_way_out() -> None:
    """Rather than waited for: machines that join are seldom larger."""
    ranks = configured("worker.count=8", "worker.gpus=1", "worker.tensor_parallel=2")
    machines = [machine("10.0.0.1"), machine("10.0.0.2", gpus=8)]

    refusal = gpu_refusal(ranks, machines)
    assert "takes 16 GPUs" in refusal and "more than 8" in refusal and "--set worker.count=4" in refusal
    assert "tensor_parallel" in gpu_refusal(
        configured("worker.count=1", "worker.gpus=1", "worker.tensor_parallel=16"), machines
    )

    fitting = configured("worker.count=4", "worker.gpus=1", "worker.tensor_parallel=2")
    assert gpu_refusal(fitting, machines) == ""
    assert gpu_refusal(ranks, machines[:1]) == "", "a head may have no GPU, and the others join later"
    assert gpu_refusal(configured("worker.count=8"), [machine("10.0.0.1", gpus=1)]) == ""


def test_such_a_node_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(seconds: float) -> None:
        raise AssertionError("it is waited for")

    monkeypatch.setattr(placement, "machines_now", lambda: [machine("10.0.0.2", gpus=8)])
    monkeypatch.setattr(placement.time, "sleep", waited)
    config = configured("worker.count=8", "worker.gpus=1", "worker.tensor_parallel=2")

    with pytest.raises(PlacementError, match="--set worker.count=4"):
        Placement(config).reserve(lambda step: None)


def test_zero_nodes_means_all_that_fit() -> None:
    """The head of a cluster often gives no CPU, and is no node then."""
    machines = [machine("10.0.0.1", cpus=0), *(machine(f"10.0.0.{n}") for n in range(2, 5))]

    assert len(bundles(configured("nodes.count=0"), machines)) == 3


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("nodes.count=3",), ["nodes.count 3", "1 CPU", "has 2", "10.0.0.1 (8 CPU)", "10.0.0.2 (4 CPU)"]),
        (("nodes.count=0", "worker.count=16"), ["1 machine", "16 CPU", "has 0"]),
        (("worker.gpus=1",), ["1 CPU and 1 GPU", "has 0"]),
    ],
)
def test_too_few_machines_are_told_with_what_there_is(overrides: tuple[str, ...], named: list[str]) -> None:
    with pytest.raises(PlacementError) as caught:
        bundles(configured(*overrides), [machine("10.0.0.1"), machine("10.0.0.2", cpus=4)])

    for part in named:
        assert part in str(caught.value)


def test_each_of_several_raylets_on_a_machine_gets_its_own_bundle() -> None:
    config = load_config(None, ("ray.raylets=2", "nodes.count=2"))
    machines = [machine("127.0.0.1", raylet=number) for number in range(2)]

    first, second = bundles(config, machines)

    assert raylet_resource(0) in first and raylet_resource(1) in second


def test_nodes_are_numbered_by_address_whatever_ray_answers() -> None:
    machines = [machine(f"10.0.0.{n}") for n in (10, 9, 2)]

    found = places({0: machines[0].ray_id, 1: machines[2].ray_id, 2: machines[1].ray_id}, machines)

    assert [(place.node_id, place.machine.address, place.bundle) for place in found] == [
        ("node-0", "10.0.0.2", 1),
        ("node-1", "10.0.0.9", 2),
        ("node-2", "10.0.0.10", 0),
    ]


def test_raylets_of_one_machine_are_numbered_as_they_were_started() -> None:
    machines = [machine("127.0.0.1", raylet=1), machine("127.0.0.1", raylet=0)]

    found = places({0: machines[1].ray_id, 1: machines[0].ray_id}, machines)

    assert [place.bundle for place in found] == [0, 1]


@pytest.mark.parametrize(
    ("gpus", "raylets", "shares"),
    [
        ([], 2, [[], []]),
        (["0"], 2, [["0"], ["0"]]),
        (["0", "1"], 2, [["0"], ["1"]]),
        (["4", "5", "6", "7", "8"], 2, [["4", "5"], ["6", "7"]]),
        (["0", "1", "2"], 1, [["0", "1", "2"]]),
    ],
)
def test_raylets_share_the_gpus_of_a_machine(gpus: list[str], raylets: int, shares: list[list[str]]) -> None:
    assert shared_out(gpus, raylets) == shares
