"""Starts a deployment, part by part, watches it, and stops it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from kvtier.cluster.config.deployment import Config
from kvtier.cluster.health.memory_watch import MemoryWatch
from kvtier.cluster.health.supervision import ABSENT_S, Kind, Member
from kvtier.cluster.machines.homes import Home, Homes, NoHome
from kvtier.cluster.machines.node_probe import NodeInfo, NodeProbe, NodeProbeError, tls_refusal
from kvtier.cluster.machines.placement import Place, Placement, PlacementError
from kvtier.cluster.machines.raylets import Raylets, RayUnavailable
from kvtier.cluster.machines.stored_pages import StoredPages, l1_notice, latent_refusal, stored_pages
from kvtier.cluster.supervisor.actors import Actors
from kvtier.cluster.supervisor.watch import Part, Watch, first_line, last_line, log, made, start_gateway, who
from kvtier.workers.machine.endpoints import Endpoint
from kvtier.workers.machine.limits import cores_here

DRAIN_S = 30.0  # for pages that are not on SSD yet
FINISH_S = 5.0  # for requests that are running
_STOP_EXTRA_S = 15.0  # for closing what has been drained
_POLL_S = 0.1
_ABSENT_STARTS = 4  # as long as so many of the first start, which found the model on a disk that was as cold


class LaunchError(RuntimeError):
    """The deployment can't start; the message says which part, why, and the way out."""


class Progress(Protocol):
    """Told what is being done; called often while something is waited for. It may raise to break off."""

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None: ...


class Launched:
    """A deployment. Made, started, watched and stopped by one supervisor, on its main thread."""

    def __init__(self, config: Config, model: Path, cache: Path, ray_dir: Path) -> None:
        """`model` is a Hugging Face folder; `ray_dir` a short, empty folder, the caller's to remove.

        `environment.prepare` must have run before this module was imported.
        """
        self._config = config
        self._model = model
        self._cache = cache
        self._ray_dir = ray_dir
        self._raylets = Raylets(config.ray, *_processes(config), ray_dir)
        self._placement = Placement(config)
        here = NodeInfo(model, cache, cores_here()) if config.ray.is_ours else None
        self._homes = Homes(self._placement, NodeProbe(config), here)
        self._parts: list[Part] = []
        self._watch: Watch | None = None
        self._memory = MemoryWatch()
        self.endpoint = ""
        self.has_tokenizer = False
        self.notes: list[str] = []  # what nodes say of how they came up, such as a damaged L4: one line each

    def start(self, progress: Progress, ray_started: Callable[[], None]) -> None:
        """Start everything and wait until it is ready. Raises LaunchError; `stop` must follow in any case.

        `ray_started` is called once Ray runs: it has replaced the process's signal handlers by then.
        """
        if refusal := latent_refusal(self._model, self._config):
            raise LaunchError(refusal)
        if self._config.ray.is_ours and (refusal := tls_refusal(self._config.transfer.tls)):
            raise LaunchError(refusal)
        progress("starting Ray" if self._config.ray.is_ours else "joining the Ray cluster")
        try:
            with ThreadPoolExecutor(1) as beside:
                loading = beside.submit(_load, self._model, self._config)
                # On this thread, since Ray's daemons die with the thread that starts them.
                self._raylets.start()
                ray_started()
                stored, l1_notice = loading.result()
            places = [home.place for home in self._homes.find(progress)]
        except (RayUnavailable, PlacementError, NodeProbeError) as error:
            raise LaunchError(str(error)) from error
        if l1_notice:
            self.notes.append(l1_notice)
        actors = Actors(
            self._config, self._model, stored, self._placement, len(places), self._ray_dir, self._cache
        )
        self._start_parts(actors, places, progress)

    def look(self) -> list[str]:
        """One line for each part that has died or is back since the last call; nothing is waited for."""
        assert self._watch is not None
        if not self._raylets.is_alive():
            return []
        return [*self._raylets.restart(), *self._watch.look(time.monotonic()), *self._homes_say()]

    def hopeless(self) -> str:
        """Why nothing can be served any more; "" while all is well, or may be well again."""
        assert self._watch is not None
        if not self._raylets.is_alive():
            killed = self._memory.reason()
            return f"Ray died: {killed}" if killed else "Ray died"
        return self._watch.hopeless()

    def stop(self, progress: Progress) -> list[str]:
        """Stop from the gateway downwards, each part as far as it still lives, then Ray. One line for each node that was
        out of reach, where parts may run on for a while."""
        left: list[str] = []
        if not ray.is_initialized():
            return left
        if self._raylets.is_alive():
            if (
                self.endpoint
            ):  # else nothing has been served, and actors that are loading would not hear of it
                left = self._left(self._stop_parts(progress))
            if not self._config.ray.is_ours:
                self._end_parts()
        progress("stopping Ray" if self._config.ray.is_ours else "leaving the Ray cluster")
        self._raylets.stop()
        return left

    # ---- start -------------------------------------------------------------------------------------------------------

    def _start_parts(self, actors: Actors, places: Sequence[Place], progress: Progress) -> None:
        progress("loading the model")
        began = time.monotonic()
        try:
            self._parts = self._made(actors, places)
        except NoHome as error:  # it left while others were looked at
            raise LaunchError(str(error)) from error
        gateway = self._parts[-1]
        answers = [(part, part.handle.__ray_call__.remote(who)) for part in self._parts]
        for part, answer in answers:
            part.process = self._await(part.name, answer, lambda: progress("loading the model"))
        progress("opening the gateway")
        listening = start_gateway(self._parts)
        self.endpoint = self._await("gateway", listening, lambda: progress("opening the gateway"))
        gateway.make = partial(
            actors.gateway, Endpoint.parse(self.endpoint).port
        )  # the same port from now on
        status = self._await("gateway", gateway.handle.status.remote(), lambda: None)
        self.has_tokenizer = bool(status.model.tokenizer_digest)
        self.notes += [f"{each.id}: {' '.join(note.split())}" for each in status.nodes for note in each.notes]
        absent_s = max(ABSENT_S, _ABSENT_STARTS * (time.monotonic() - began))
        self._watch = Watch(self._parts, self._config.cluster.stalled_after_s, absent_s, self._memory)
        self.notes += self._watch.look(time.monotonic())  # the directory is told of all
        self.notes += self._homes_say()

    def _await(self, name: str, ref: Any, progress: Callable[[], None]) -> Any:
        """The result of an actor's call; `progress` is called meanwhile. LaunchError names the part and why."""
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            self._memory.look()
            progress()
        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise LaunchError(f"{name} can't start: {first_line(error.cause)}") from error
        except RayError as error:
            raise LaunchError(f"{name} can't start: {self._memory.reason() or last_line(error)}") from error

    def _made(self, actors: Actors, places: Sequence[Place]) -> list[Part]:
        """Workers first, which take longest; the gateway last."""
        per_node = self._config.worker.count
        parts: list[Part] = []
        for place in places:
            for number in range(place.number * per_node, (place.number + 1) * per_node):
                worker = Member(f"worker-{number}", Kind.WORKER, place.node_id)
                parts.append(self._made_at(place, worker, partial(actors.worker, number=number)))
        for place in places:
            node = Member(f"cache node {place.node_id}", Kind.NODE, place.node_id)
            parts.append(self._made_at(place, node, actors.node))
            if len(places) > 1:
                exchange = Member(f"exchange of {place.node_id}", Kind.EXCHANGE, place.node_id)
                parts.append(self._made_at(place, exchange, actors.exchange))
        if len(places) * per_node > 1:
            directory = Member("directory", Kind.DIRECTORY)
            parts.append(made(directory, actors.directory, is_here=_always))
        make_gateway = partial(actors.gateway, self._config.grpc.port)
        parts.append(made(Member("gateway", Kind.GATEWAY), make_gateway, is_here=_always))
        return parts

    def _made_at(self, place: Place, member: Member, make: Callable[[Home], Any]) -> Part:
        """A part of a node, made wherever that is now."""
        number, homes = place.number, self._homes
        return made(member, lambda: make(homes.of(number)), is_here=partial(homes.is_here, number))

    def _homes_say(self) -> list[str]:
        said, self._homes.notes = self._homes.notes, []
        return said

    # ---- stop --------------------------------------------------------------------------------------------------------

    def _stop_parts(self, progress: Progress) -> dict[str, bool]:
        """By node: whether some of its parts said nothing, or all that did not stop are known to be dead."""
        unheard: dict[str, bool] = {}
        for step, kind, limit_s, *arguments in (
            ("finishing requests", Kind.GATEWAY, FINISH_S, FINISH_S),
            ("stopping workers", Kind.WORKER, DRAIN_S, DRAIN_S),
            ("stopping transfers", Kind.EXCHANGE, 0.0),
            ("saving pages to SSD", Kind.NODE, DRAIN_S, DRAIN_S),
        ):
            if found := [part for part in self._parts if part.member.kind is kind]:
                progress(step)
                for part, is_silent in _stop(found, limit_s, *arguments):
                    unheard[part.member.node] = is_silent or unheard.get(part.member.node, False)
        return unheard

    def _left(self, unheard: dict[str, bool]) -> list[str]:
        if self._config.ray.is_ours:
            return []  # all of it is here, and is ended with Ray
        unheard.pop("", None)  # the gateway and the directory, which are here too
        where = {node: self._homes.out_of_reach(node, silent) for node, silent in unheard.items()}
        return [
            f"{node} ({address}) could not be reached: what runs there yet is ended by Ray, some minutes after it was cut off"
            for node, address in sorted(where.items())
            if address
        ]

    def _end_parts(self) -> None:
        """At once, rather than when the cluster notices that we left: what they hold is free for the next one."""
        for part in self._parts:
            with suppress(RayError):
                ray.kill(part.handle, no_restart=True)
        self._placement.release()


def _always() -> bool:
    return True


def _processes(config: Config) -> tuple[int, int]:
    """Those of each node: workers, cache and exchange; and those of the first one beside them: gateway and directory."""
    raylets, workers = config.ray.raylets, config.worker.count
    return workers + (1 if raylets == 1 else 2), 1 if workers * raylets == 1 else 2


def _load(model: Path, config: Config) -> tuple[StoredPages, str]:
    """Import what runs in the actors, which takes torch and so takes seconds, and look at the model: its pages, and what is
    to be said of L1."""
    import kvtier.cluster.gateway.actor
    import kvtier.cluster.node
    import kvtier.workers.actor  # noqa: F401

    try:
        stored, notice = stored_pages(model, config), l1_notice(model, config)
    except (ValueError, OSError) as error:
        raise LaunchError(f"model {model}: {error}") from error
    if notice and config.model.max_context:  # something asked for so much
        raise LaunchError(notice)
    return stored, notice


def _stop(parts: Sequence[Part], limit_s: float, *arguments: float) -> Iterator[tuple[Part, bool]]:
    """Each of these that can't have heard of it, and whether it is silent: not known to be dead."""
    calls = [part.handle.stop.remote(*arguments) for part in parts]
    done = set(ray.wait(calls, num_returns=len(calls), timeout=limit_s + _STOP_EXTRA_S)[0])
    for part, call in zip(parts, calls, strict=True):
        if call not in done:
            log.warning("%s did not stop in time", part.name)
            yield part, True
            continue
        try:
            ray.get(call)
        except RayError as error:
            log.warning("%s did not stop cleanly: %s", part.name, last_line(error))
            if isinstance(error, RayActorError):
                yield part, not isinstance(error, ActorDiedError)
