"""Where the parts of a deployment run: one placement group over the Ray cluster, one bundle of it for each node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from kvtier.cluster.config.deployment import Config
from kvtier.cluster.machines.l4_folders import Kept, node_name
from kvtier.cluster.machines.raylets import raylet_resource

JOIN_WAIT_S = 600.0  # for machines of a cluster that is just starting: they may install all that kvtier needs
JOINED_S = 20.0  # nodes.count 0 takes those that fit once so long no other has come
FREE_WAIT_S = 60.0  # for what other jobs of the cluster have taken
_FREE_SOON_S = 0.5  # what takes longer is told
_POLL_S = 0.1
_SOON_POLL_S = 0.01
_TINY = 0.001  # of a resource that only says where a bundle must lie


class PlacementError(RuntimeError):
    """The nodes can't be had; the message says what is there and the way out."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the Ray cluster."""

    ray_id: str
    host: str
    address: str
    resources: Mapping[str, float]

    def fits(self, bundle: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0) >= amount for name, amount in bundle.items())

    def __str__(self) -> str:
        has = [f"{self.resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in self.resources]
        return f"{self.address} ({', '.join(has) or 'no CPU'})"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node of the deployment runs. `number` counts from 0; `bundle` is its index in the placement group.

    `node` is the number in its id: it belongs to the pages on the machine's disk, and so it may be any.
    """

    number: int
    bundle: int
    machine: Machine
    node: int

    @property
    def node_id(self) -> str:
        return node_name(self.node)


# ---- what is asked for: pure -------------------------------------------------------------------------------------


def gpus_per_rank(config: Config, machines: Sequence[Machine]) -> float:
    """GPUs of each rank: as configured, or 1 where some machine has enough for all of a node's workers."""
    wanted = config.worker.gpus
    if wanted != "auto":
        return wanted
    needed = config.worker.count * config.worker.tensor_parallel
    return 1.0 if any(machine.resources.get("GPU", 0) >= needed for machine in machines) else 0.0


def gpu_refusal(config: Config, machines: Sequence[Machine]) -> str:
    """Why no node can be had where there are machines with GPUs, and none with as many as a node takes; "" otherwise."""
    worker = config.worker
    needed = bundle_of(config, gpus_per_rank(config, machines)).get("GPU", 0.0)
    most = max((machine.resources.get("GPU", 0.0) for machine in machines), default=0.0)
    if not 0 < most < needed:
        return ""
    per_worker = needed / worker.count
    fitting = int(most // per_worker)
    way_out = (
        f"--set worker.count={fitting}" if fitting else f"a tensor_parallel that {most:g} GPUs are enough for"
    )
    return (
        f"a node of worker.count {worker.count} with worker.tensor_parallel {worker.tensor_parallel} takes {needed:g} GPUs, "
        f"and no machine of the Ray cluster has more than {most:g}: {way_out}"
    )


def bundle_of(config: Config, gpus: float) -> dict[str, float]:
    """What one node takes: a CPU for each worker, which their own threads may well exceed, and its GPUs."""
    gpu = gpus * config.worker.count * config.worker.tensor_parallel
    return {"CPU": float(config.worker.count), **({"GPU": gpu} if gpu else {})}


def bundles(config: Config, machines: Sequence[Machine]) -> list[dict[str, float]]:
    """One bundle a node. Raises PlacementError when there are fewer machines that fit."""
    one = bundle_of(config, gpus_per_rank(config, machines))
    fitting = sum(machine.fits(one) for machine in machines)
    count = config.nodes.count or fitting
    if not count or fitting < count:
        raise PlacementError(
            f"nodes.count {config.nodes.count} needs {count or 1} machine(s) with {_told(one)} each, and the Ray cluster has "
            f"{fitting}: {'; '.join(map(str, machines)) or 'no machine at all'}"
        )
    if config.ray.raylets > 1:  # all on this machine: each bundle says which
        return [one | {raylet_resource(number): _TINY} for number in range(count)]
    return [one] * count


def places(bundle_to_ray_id: Mapping[int, str], machines: Sequence[Machine]) -> list[Place]:
    """The nodes, numbered by their machines' addresses. Raises PlacementError for a bundle on none of these machines."""
    by_id = {machine.ray_id: machine for machine in machines}
    if not by_id.keys() >= set(bundle_to_ray_id.values()):
        raise PlacementError("a machine left the Ray cluster just after it was taken: try again")
    found = [(by_id[ray_id], bundle) for bundle, ray_id in bundle_to_ray_id.items()]
    found.sort(key=lambda pair: (_sortable(pair[0].address), _raylet(pair[0]), pair[0].ray_id))
    return [Place(number, bundle, machine, number) for number, (machine, bundle) in enumerate(found)]


def settled(places: Sequence[Place], kept: Mapping[int, Sequence[Kept]]) -> list[Place]:
    """The same places, each under the id of the node whose pages its disk has, in the order of these ids.

    `kept` are the folders on the disks, by the places' numbers. Where two disks have the same node's, the one that was
    used last keeps the id, and places that share a disk share out its ids. Who has none gets the lowest that is free.
    """
    claims = sorted((-one.used_s, place.number, one.number) for place in places for one in kept[place.number])
    nodes: dict[int, int] = {}  # by the places' numbers
    claimed: set[int] = set()
    for _, number, node in claims:
        if number not in nodes and node not in claimed:
            nodes[number] = node
            claimed.add(node)
    free = (node for node in count() if node not in claimed)
    for place in places:
        if place.number not in nodes:
            nodes[place.number] = next(free)
    ordered = sorted(places, key=lambda place: nodes[place.number])
    return [replace(place, number=number, node=nodes[place.number]) for number, place in enumerate(ordered)]


def returning(lost: Sequence[Place], kept: Sequence[Kept]) -> Place | None:
    """Which of the places that have lost their machines is the node whose pages are on this disk: the latest used."""
    by_node = {place.node: place for place in lost}
    found = sorted((one for one in kept if one.number in by_node), key=lambda one: one.used_s)
    return by_node[found[-1].number] if found else None


def unused(kept: Sequence[tuple[Place, Sequence[Kept]]]) -> list[str]:
    """One line for each folder of pages on these places' disks that none of them uses. Places that share a disk all have
    its folders."""
    used = {(one.path, one.used_s) for place, there in kept for one in there if one.number == place.node}
    return [
        f"{place.node_id} ({place.machine.address}): {one.path} has pages of {node_name(one.number)}, which isn't there "
        "any more: remove that folder to have its room"
        for place, there in kept
        for one in there
        if (one.path, one.used_s) not in used
    ]


def _told(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items() if name in ("CPU", "GPU"))


def _sortable(address: str) -> tuple[tuple[int, int | str], ...]:
    """So that 10.0.0.9 comes before 10.0.0.10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in address.split("."))


def _raylet(machine: Machine) -> int:
    return next((number for number in range(16) if raylet_resource(number) in machine.resources), 0)


class Settled:
    """Tells how long a number has been the same. Pure."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._since = 0.0

    def seconds(self, number: int, now: float) -> float:
        """Since it first was what it is now, as far as it was told."""
        if number != self._number:
            self._number, self._since = number, now
        return now - self._since


# ---- what Ray is asked for ---------------------------------------------------------------------------------------


def machines_now() -> list[Machine]:
    """The nodes of the Ray cluster that live."""
    return [
        Machine(
            node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], dict(node["Resources"])
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


class Placement:
    """The deployment's placement group. Owned by the supervisor's main thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._group: PlacementGroup | None = None
        self.gpus_per_rank = 0.0

    def reserve(self, progress: Callable[[str], None]) -> list[Place]:
        """Take a bundle of each node, waiting for machines that are about to join. Raises PlacementError."""
        wanted = self._wait_for_machines(progress)
        self._group = placement_group(wanted, strategy="STRICT_SPREAD", name=f"kvtier-{self._config.name}")
        deadline = time.monotonic() + FREE_WAIT_S
        while placement_group_table(self._group)["state"] != "CREATED":
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"{len(wanted)} machine(s) of the Ray cluster did not have {_told(wanted[0])} free within {FREE_WAIT_S:g} s: "
                    "stop other jobs there, or ask for less (worker.count, worker.gpus, nodes.count)"
                )
            if time.monotonic() > deadline - FREE_WAIT_S + _FREE_SOON_S:
                progress("waiting for free CPUs and GPUs")
            time.sleep(_SOON_POLL_S)
        return self.places()

    def places(self) -> list[Place]:
        """Where the bundles lie now."""
        assert self._group is not None
        table: dict[str, Any] = placement_group_table(self._group)
        return places(table["bundles_to_node_id"], machines_now())

    def machines(self) -> dict[int, Machine]:
        """By bundle: the machine that it lies on, of those that live. Ray moves a bundle whose machine has died."""
        assert self._group is not None
        table: dict[str, Any] = placement_group_table(self._group)
        living = {machine.ray_id: machine for machine in machines_now()}
        found = table["bundles_to_node_id"].items()
        return {bundle: living[ray_id] for bundle, ray_id in found if ray_id in living}

    def on(self, place: Place) -> PlacementGroupSchedulingStrategy:
        """The strategy that puts an actor on a node."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, place.bundle)

    def release(self) -> None:
        """Give the bundles back, and with them end what still runs in them."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _wait_for_machines(self, progress: Callable[[str], None]) -> list[dict[str, float]]:
        settled, joins = Settled(), not self._config.ray.is_ours
        began = time.monotonic()
        while True:
            machines, now = machines_now(), time.monotonic()
            waited_s = now - began
            self.gpus_per_rank = gpus_per_rank(self._config, machines)
            one = bundle_of(self._config, self.gpus_per_rank)
            try:
                wanted = bundles(self._config, machines)
            except PlacementError:
                if refusal := gpu_refusal(
                    self._config, machines
                ):  # nothing that joins is likely to be larger
                    raise PlacementError(refusal) from None
                if not joins or waited_s >= JOIN_WAIT_S:
                    raise
                fitting = sum(machine.fits(one) for machine in machines)
                progress(
                    f"waiting for {self._config.nodes.count or 1} machine(s) with {_told(one)} each to join the Ray cluster "
                    f"({fitting} so far)"
                )
            else:
                takes_all = joins and not self._config.nodes.count
                if not takes_all or settled.seconds(len(wanted), now) >= JOINED_S or waited_s >= JOIN_WAIT_S:
                    return wanted
                progress(
                    f"{len(wanted)} machine(s) fit, with {_told(one)} each; waiting {JOINED_S:g} s for others to join"
                )
            time.sleep(_POLL_S)


def here() -> NodeAffinitySchedulingStrategy:
    """The strategy that puts an actor on the machine of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
