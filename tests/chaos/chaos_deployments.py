"""Faults that need deployments of their own: a lender of L2, a second cluster, other weights under the same name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos_deployment import ONE_NODE, Deployment, deployed
from chaos_load import Reference, reference
from chaos_scene import MIDDLE, Missed, Scene
from tiny_models import make_tiny_llama


@dataclass(frozen=True)
class OwnFault:
    """A row of docs/faults.md whose deployments begin and end with it. `make` gets a folder that is there and empty."""

    name: str
    seen: str
    make: Callable[[Path, Path, Reference, Random], None]


def lender_dies(folder: Path, model: Path, right: Reference, rng: Random) -> None:
    """Two workers of one node: what leaves the L1 of one lies in idle frames of the other, which is killed."""
    with deployed(
        folder / "pair", model, ONE_NODE, worker__count=2, tiers__l1__bytes="1MiB", cache__load="always"
    ) as there:
        scene = Scene(there, right, rng)
        asked = scene.questions(12, MIDDLE, 8)
        scene.ask(asked, "worker-0")
        lent = scene.tier("L2", "pages")
        process = there.process("worker-1")
        load = scene.load(asked, "worker-0")
        scene.pause(0.6)
        process.kill()
        scene.finish(load)
        there.has_returned("worker-1", 1)
        scene.end(asked[:3])
    if not lent:
        raise Missed("no page was lent")


def two_clusters(folder: Path, model: Path, right: Reference, rng: Random) -> None:
    """Side by side: neither sees the other's pages, and what dies in one is nothing to the other."""
    with deployed(folder / "one", model, ONE_NODE) as one, deployed(folder / "two", model, ONE_NODE) as two:
        here, beside = Scene(one, right, rng), Scene(two, right, rng)
        asked = here.questions(3, MIDDLE, 8)
        here.ask(asked)
        first = here.questions(1, MIDDLE, 8)
        here.ask(first)
        assert not beside.ask(first)[0].cached, "a page of the other cluster"
        pids = _pids(two)
        load = beside.load(beside.questions(6, MIDDLE, 24))
        one.kill("worker-0")
        one.kill("cache node node-0")
        beside.finish(load)
        one.has_returned("worker-0", 1)
        here.end(asked)
        assert _pids(two) == pids, "a process of the other cluster is not what it was"
        one.down()
        assert _pids(two) == pids, "a process of the other cluster is not what it was"
        beside.end(asked)


def other_weights(folder: Path, model: Path, right: Reference, rng: Random) -> None:
    """The model's folder holds other weights at the next start: nothing of the old ones is found, and with the old ones
    back all is."""
    served, other = folder / "model", folder / "other"
    shutil.copytree(model, served)
    other.mkdir()
    make_tiny_llama(other, seed=rng.randrange(1, 1000))
    there = Deployment(folder / "there", served, ONE_NODE)
    try:
        there.up()
        scene = Scene(there, right, rng)
        asked = scene.questions(4, MIDDLE, 8)
        scene.ask(asked)
        there.settled()
        there.down()
        _replace(served, other)
        there.up()
        with reference(other) as other_right:
            beside = Scene(there, other_right, rng)
            first = beside.ask([asked[0]])[0]
            assert not first.cached, f"found with other weights: {first.cached}"
            beside.ask(asked)
        there.settled()
        there.down()
        _replace(served, model)
        there.up()
        assert scene.ask([asked[0]])[0].cached.get("L4"), "the pages of these weights are gone"
        scene.end(asked)
    finally:
        if there.is_up:
            there.down()
        there.remove()


def _pids(there: Deployment) -> set[int]:
    return {part["pid"] for part in there.parts().values()} | {there.process("gateway").pid}


def _replace(folder: Path, by: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(by, folder)


OWN_FAULTS = [
    OwnFault(
        "a worker that lends L2 is killed with others' pages",
        "slower answers: its pages are read from below, or computed",
        lender_dies,
    ),
    OwnFault(
        "two clusters run on one machine, and one dies",
        "nothing: neither sees the other's pages or ends its processes",
        two_clusters,
    ),
    OwnFault(
        "a restart with other weights under the same name",
        "a cold start: pages of the old weights are never found",
        other_weights,
    ),
]
