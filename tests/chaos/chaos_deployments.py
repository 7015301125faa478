"""Faults that need deployments of their own, since they need another one, end it, or are made by the system."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil
from chaos_deployment import ONE_NODE, Deployment, deployed
from chaos_load import Reference, reference
from chaos_scene import MIDDLE, SHORT, Missed, Scene
from chaos_system import disk_fails, disk_full, machine_lost
from tiny_models import make_tiny_llama


@dataclass(frozen=True)
class OwnFault:
    """A row of docs/faults.md whose deployments begin and end with it. `make` gets a folder that is there and empty."""

    name: str
    seen: str
    make: Callable[[Path, Path, Reference, Random], None]
    in_suite: bool = False  # the normal test suite tries it too


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
        load.until_given(scene.rng.randint(0, 40))
        was_over = load.is_over
        process.kill()
        scene.finish(load)
        there.has_returned("worker-1", 1)
        scene.end(asked[:3])
    if was_over or not lent:
        raise Missed("no page was lent" if not lent else "all requests had ended")


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
        was_over = load.is_over
        one.kill("worker-0")
        one.kill("cache node node-0")
        beside.finish(load)
        for part in ("worker-0", "cache node node-0"):
            one.has_returned(part, 1)
        here.end(asked)
        assert _pids(two) == pids, "a process of the other cluster is not what it was"
        one.down()
        assert _pids(two) == pids, "a process of the other cluster is not what it was"
        beside.end(asked)
    if was_over:
        raise Missed("all requests had ended")


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
        there.leave()
        there.remove()


def all_die(
    folder: Path, model: Path, right: Reference, rng: Random, of: Callable[[Deployment], psutil.Process]
) -> None:
    """A process is killed without which nothing runs. What it leaves behind is cleaned up, and the next start is warm."""
    with deployed(folder / "there", model, ONE_NODE) as there:
        scene = Scene(there, right, rng)
        kept = scene.questions(2, MIDDLE, 8)
        scene.ask(kept)
        there.settled()
        victim = of(there)
        load = scene.load(scene.questions(4, SHORT, 200))
        load.until_given(rng.randint(0, 200))
        was_over = load.is_over
        victim.kill()
        scene.finish(load, may_fail=True)
        there.ended()
        there.up()
        assert scene.ask([kept[0]])[0].cached.get("L4"), "what was on the disk is gone"
        scene.end(kept)
    if was_over:
        raise Missed("all requests had ended")


def supervisor(there: Deployment) -> psutil.Process:
    assert there.supervisor
    return there.supervisor


def raylet_of_the_head(there: Deployment) -> psutil.Process:
    return next(process for process in there.shell.processes() if process.name() == "raylet")


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
        in_suite=True,
    ),
    OwnFault(
        "a machine is cut off for a while, with all that runs there (packets dropped)",
        "a pause of half a minute in its streams: they go on at another machine with the same tokens",
        partial(machine_lost, comes_back=True),
    ),
    OwnFault(
        "a machine is cut off for good",
        "as above; what runs there ends by itself within some minutes",
        partial(machine_lost, comes_back=False),
    ),
    OwnFault(
        "the file system of L4 is full, for its catalogue too",
        "as when the disk is full, above",
        disk_full,
    ),
    OwnFault(
        "the kernel makes the file system of L4 read-only, under open files",
        "as when the disk is read-only, above; once it is repaired and the service started again, all is found",
        disk_fails,
    ),
    OwnFault(
        "the supervisor is killed",
        "UNAVAILABLE, and nothing serves any more: `kvtier down` cleans up, and the next `kvtier up` is warm from L4",
        partial(all_die, of=supervisor),
    ),
    OwnFault(
        "the head of Ray dies",
        "as above",
        partial(all_die, of=raylet_of_the_head),
    ),
]
