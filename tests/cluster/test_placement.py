"""Which machines of a Ray cluster become nodes, under which ids, and what is said when there are too few."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.config.deployment import Config, load_config
from kvtier.cluster.machines import placement
from kvtier.cluster.machines.l4_folders import Kept
from kvtier.cluster.machines.placement import (
    Machine,
    Place,
    Placement,
    PlacementError,
    bundles,
    gpu_refusal,
    gpus_per_rank,
    places,
    returning,
    settled,
    unused,
)
from kvtier.cluster.machines.raylets import raylet_resource, shared_out


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


class Joining:
    """A cluster in virtual time: so many machines of 8 CPUs from each of these seconds on."""

    def __init__(self, *since: float) -> None:
        self.now = 1000.0
        self._since = [self.now + second for second in since]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def machines(self) -> list[Machine]:
        return [machine(f"10.0.0.{n}") for n, since in enumerate(self._since) if since <= self.now]


def reserved(monkeypatch: pytest.MonkeyPatch, joining: Joining, *overrides: str) -> tuple[int, list[str]]:
    """How many bundles are asked of Ray, and what was said before that."""
    said: list[str] = []
    asked: list[dict[str, float]] = []

    def group(bundles: list[dict[str, float]], **_: str) -> object:
        asked.extend(bundles)
        return object()

    table = {"state": "CREATED", "bundles_to_node_id": {}}
    monkeypatch.setattr(placement, "time", joining)
    monkeypatch.setattr(placement, "machines_now", joining.machines)
    monkeypatch.setattr(placement, "placement_group", group)
    monkeypatch.setattr(placement, "placement_group_table", lambda _: table)
    Placement(configured(*overrides)).reserve(lambda step: None if step in said else said.append(step))
    return len(asked), said


def test_all_that_join_are_waited_for_until_no_other_has_come_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray up` comes back with the head alone; the other hosts install what they need, one sooner than another."""
    joining = Joining(0, 5, 24, 43, 43 + placement.JOINED_S + 5)

    taken, said = reserved(monkeypatch, joining, "nodes.count=0")

    assert taken == 4
    assert [line.split(",")[0] for line in said] == [f"{n} machine(s) fit" for n in (1, 2, 3, 4)]
    assert joining.now == pytest.approx(1043 + placement.JOINED_S, abs=1)


def test_a_cluster_that_never_stops_growing_is_taken_as_it_is_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joining = Joining(*range(0, 1000, 10))

    taken, _ = reserved(monkeypatch, joining, "nodes.count=0")

    assert taken == placement.JOIN_WAIT_S // 10 + 1


def test_a_number_of_nodes_is_taken_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    joining = Joining(0, 7, 8)

    taken, said = reserved(monkeypatch, joining, "nodes.count=2")

    assert taken == 2 and joining.now == pytest.approx(1007, abs=0.5)
    assert len(said) == 1 and "(1 so far)" in said[0]


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


def test_a_machine_that_leaves_while_it_is_taken_is_told_in_a_sentence() -> None:
    there, gone = machine("10.0.0.1"), machine("10.0.0.2")

    with pytest.raises(PlacementError, match="left the Ray cluster"):
        places({0: there.ray_id, 1: gone.ray_id}, [there])


def test_raylets_of_one_machine_are_numbered_as_they_were_started() -> None:
    machines = [machine("127.0.0.1", raylet=1), machine("127.0.0.1", raylet=0)]

    found = places({0: machines[1].ray_id, 1: machines[0].ray_id}, machines)

    assert [place.bundle for place in found] == [0, 1]


def placed(*addresses: int) -> list[Place]:
    """On machines of these addresses, bundle by bundle."""
    machines = [machine(f"10.0.0.{n}") for n in addresses]
    return places({bundle: one.ray_id for bundle, one in enumerate(machines)}, machines)


def kept(*nodes: int, used_s: float = 100.0, disk: str = "disk") -> list[Kept]:
    return [Kept(number, used_s, f"/{disk}/node-{number}") for number in nodes]


def ids(settled_places: list[Place]) -> dict[str, str]:
    return {place.machine.address: place.node_id for place in settled_places}


def test_machines_without_pages_become_nodes_by_their_addresses() -> None:
    there = placed(3, 1, 2)

    assert ids(settled(there, {0: [], 1: [], 2: []})) == {
        "10.0.0.1": "node-0",
        "10.0.0.2": "node-1",
        "10.0.0.3": "node-2",
    }


def test_a_machine_that_has_another_address_now_is_the_node_whose_pages_it_has() -> None:
    """Of three the first got a new lease, 10.0.0.9: by addresses alone all three would have become others."""
    there = placed(2, 3, 9)

    found = settled(there, {0: kept(1), 1: kept(2), 2: kept(0)})

    assert ids(found) == {"10.0.0.9": "node-0", "10.0.0.2": "node-1", "10.0.0.3": "node-2"}
    assert [place.number for place in found] == [0, 1, 2]


def test_a_new_machine_takes_the_id_that_nothing_has_pages_of() -> None:
    found = settled(placed(1, 2, 3), {0: [], 1: kept(0), 2: kept(2)})

    assert ids(found) == {"10.0.0.1": "node-1", "10.0.0.2": "node-0", "10.0.0.3": "node-2"}


def test_of_a_deployment_that_shrank_every_machine_keeps_its_id() -> None:
    found = settled(placed(1, 2), {0: kept(2), 1: kept(0)})

    assert [(place.number, place.node_id) for place in found] == [(0, "node-0"), (1, "node-2")]


def test_machines_that_share_a_disk_share_out_its_ids() -> None:
    shared = kept(0, 1, 2)

    found = settled(placed(1, 2, 3), dict.fromkeys(range(3), shared))

    assert sorted(ids(found).values()) == ["node-0", "node-1", "node-2"]
    assert unused([(place, shared) for place in found]) == []


def test_of_two_disks_with_a_nodes_pages_the_latest_used_keeps_the_id_and_the_other_is_told() -> None:
    old, new = kept(0, used_s=100.0), kept(0, used_s=200.0)

    found = settled(placed(1, 2), {0: old, 1: new})

    assert ids(found) == {"10.0.0.1": "node-1", "10.0.0.2": "node-0"}
    [line] = unused([(found[0], new), (found[1], old)])
    assert line.startswith("node-1 (10.0.0.1): /disk/node-0 has pages of node-0")


def test_a_machine_that_comes_is_the_node_that_has_lost_its_own_and_whose_pages_it_has() -> None:
    first, second, _ = placed(1, 2, 3)

    assert returning([first, second], kept(1)) == second
    assert returning([first], kept(1)) is None, "the node of these pages is well where it is"
    assert returning([first, second], []) is None
    assert returning([first, second], [*kept(0, used_s=5.0), *kept(1, used_s=9.0)]) == second


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_disks_have_ids_differ_and_nothing_leaves_pages_that_only_it_has(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 5))
    there = placed(*range(1, count + 1))
    on_disks = {
        number: kept(*data.draw(st.sets(st.integers(0, 6), max_size=1)), used_s=data.draw(st.floats(1, 9)))
        for number in range(count)
    }

    found = settled(there, on_disks)

    assert len({place.node for place in found}) == count
    assert [place.number for place in found] == list(range(count))
    assert sorted(place.bundle for place in found) == list(range(count))
    holders = [one.number for folders in on_disks.values() for one in folders]
    before = {place.bundle: place.number for place in there}
    for place in found:
        for one in on_disks[before[place.bundle]]:
            assert place.node == one.number or holders.count(one.number) > 1


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
