"""Where the nodes of a deployment live: on which machine, and what it offers. A machine that is gone may be replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray

from kvtier.cluster.machines.node_probe import NodeInfo, NodeProbe, NodeProbeError
from kvtier.cluster.machines.placement import (
    Machine,
    Place,
    Placement,
    machines_now,
    returning,
    settled,
    unused,
)

_POLL_S = 0.1
_SEE_EVERY_S = 1.0  # where the bundles lie
_AGAIN_S = 30.0  # before a machine that could not be used is looked at again


class NoHome(Exception):
    """A node has no machine now that its parts could be made on; the message says why."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a node's parts are made."""

    place: Place
    ground: NodeInfo


@dataclass(slots=True)
class _Look:
    answer: Any  # the call that will tell what a machine offers
    refusal: str = ""  # why it can't be used
    again_at: float = 0.0


class Homes:
    """Owned by the supervisor's main thread. Nothing waits but `find`.

    A node stays where it is until its machine leaves the Ray cluster. Ray then moves its bundle to another machine that
    fits, and its parts are made there once that one has been looked at. Where that machine's disk has the pages of
    another node that has lost its machine, the two swap their bundles: no node starts over beside its own pages.
    """

    def __init__(self, placement: Placement, scout: NodeProbe, here: NodeInfo | None) -> None:
        """`here`: what this machine offers, where all nodes are on it; None: each is looked at."""
        self._placement = placement
        self._scout = scout
        self._here = here
        self._homes: list[Home] = []  # by the places' numbers
        self._machines: dict[int, Machine] = {}  # by bundle
        self._seen_at: float | None = None
        self._looks: dict[str, _Look] = {}  # by the machine's id in Ray
        self.notes: list[str] = []  # for people, until something takes them

    def find(self, progress: Callable[[str], None]) -> list[Home]:
        """Take the machines, and look at each. Raises PlacementError, and ScoutError naming the first bad one."""
        places = self._placement.reserve(progress)
        grounds = {
            place.number: ground
            for place, ground in zip(places, self._grounds(places, progress), strict=True)
        }
        kept = {number: ground.kept for number, ground in grounds.items()}
        by_bundle = {place.bundle: grounds[place.number] for place in places}
        self._homes = [Home(place, by_bundle[place.bundle]) for place in settled(places, kept)]
        self.notes += unused([(home.place, home.ground.kept) for home in self._homes])
        return self._homes

    def of(self, number: int) -> Home:
        """Where a node's parts can be made now, by its place's number. Raises NoHome."""
        machine = self._seen().get(self._homes[number].place.bundle)
        place = self._homes[number].place
        if machine is None:
            raise NoHome(
                f"no machine of the Ray cluster has room for {place.node_id}; one that joins is taken"
            )
        if machine.ray_id != place.machine.ray_id:
            self._move(number, machine)
        return self._homes[number]

    def is_here(self, number: int) -> bool:
        """Whether a node's parts run on this machine."""
        if self._here is not None:
            return True
        return bool(self._homes[number].place.machine.ray_id == ray.get_runtime_context().get_node_id())

    def out_of_reach(self, node_id: str, is_silent: bool) -> str:
        """Where a node is whose parts could not be told to stop and may run on; "" where they are gone. `is_silent`: some
        gave no answer, though Ray doesn't know that they died."""
        [place] = [home.place for home in self._homes if home.place.node_id == node_id]
        is_gone = place.machine.ray_id not in {machine.ray_id for machine in machines_now()}
        return place.machine.address if is_silent or is_gone else ""

    def _grounds(self, places: list[Place], progress: Callable[[str], None]) -> list[NodeInfo]:
        if self._here is not None:
            return [self._here] * len(places)
        asked = [self._scout.ask(self._placement.on(place)) for place in places]
        while len(ray.wait(asked, num_returns=len(asked), timeout=_POLL_S)[0]) < len(asked):
            progress("looking at the machines, and for the model there")
        return [self._scout.ground(place, answer) for place, answer in zip(places, asked, strict=True)]

    def _seen(self) -> dict[int, Machine]:
        now = time.monotonic()
        if self._seen_at is None or now - self._seen_at >= _SEE_EVERY_S:
            self._machines, self._seen_at = self._placement.machines(), now
        return self._machines

    def _move(self, number: int, machine: Machine) -> None:
        """To the machine on which its bundle lies now. Raises NoHome while that can't be."""
        before = self._homes[number]
        moved = replace(before.place, machine=machine)
        ground = self._here or self._looked_at(moved)
        lost = [home.place for home in self._homes if not self._is_at_home(home.place)]
        owner = returning(lost, ground.kept) or before.place
        place = replace(owner, bundle=moved.bundle, machine=machine)
        if owner.number != number:  # they swap their bundles
            self._homes[number] = replace(before, place=replace(before.place, bundle=owner.bundle))
        self._homes[owner.number] = Home(place, ground)
        self.notes.append(f"{place.node_id} goes on at {machine.address}")
        if owner.number != number:
            raise NoHome(f"the machine at {machine.address} has the pages of {place.node_id}")

    def _is_at_home(self, place: Place) -> bool:
        machine = self._seen().get(place.bundle)
        return machine is not None and machine.ray_id == place.machine.ray_id

    def _looked_at(self, place: Place) -> NodeInfo:
        """What a machine offers that is new to us. Raises NoHome."""
        ray_id, now = place.machine.ray_id, time.monotonic()
        look = self._looks.get(ray_id)
        if look is None or (look.refusal and now >= look.again_at):
            look = self._looks[ray_id] = _Look(self._scout.ask(self._placement.on(place)))
        if not look.refusal and not ray.wait([look.answer], timeout=0)[0]:
            raise NoHome(f"the machine at {place.machine.address} is looked at, and for the model there")
        if not look.refusal:
            try:
                ground = self._scout.ground(place, look.answer)
            except NodeProbeError as error:
                look.refusal, look.again_at = str(error), now + _AGAIN_S
            else:
                del self._looks[ray_id]
                return ground
        raise NoHome(look.refusal)
