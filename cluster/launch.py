"""Starts a deployment, part by part, watches it, and stops it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from kvtier.cluster.actors import Actors
from kvtier.cluster.config import Config
from kvtier.cluster.life import Kind, Member
from kvtier.cluster.placement import Place, Placement, PlacementError
from kvtier.cluster.raylets import Raylets, RayUnavailable
from kvtier.cluster.scout import Ground, ScoutError, cores_here, scouted
from kvtier.cluster.stored import StoredPages, latent_refusal, stored_pages
from kvtier.cluster.watch import Part, Watch, first_line, handles, last_line, log, made, start_gateway, who

DRAIN_S = 30.0  # for pages that are not on SSD yet
FINISH_S = 5.0  # for requests that are running
_STOP_EXTRA_S = 15.0  # for closing what has been drained
_POLL_S = 0.1


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
        self._parts: list[Part] = []
        self._watch: Watch | None = None
        self.endpoint = ""
        self.has_tokenizer = False
        self.notes: list[str] = []  # what nodes say of how they came up, such as a damaged L4: one line each

    def start(self, progress: Progress, ray_started: Callable[[], None]) -> None:
        """Start everything and wait until it is ready. Raises LaunchError; `stop` must follow in any case.

        `ray_started` is called once Ray runs: it has replaced the process's signal handlers by then.
        """
        if refusal := latent_refusal(self._model, self._config):
            raise LaunchError(refusal)
        progress("starting Ray" if self._config.ray.is_ours else "joining the Ray cluster")
        try:
            with ThreadPoolExecutor(1) as beside:
                loading = beside.submit(_load, self._model, self._config)
                # On this thread, since Ray's daemons die with the thread that starts them.
                self._raylets.start()
                ray_started()
                stored = loading.result()
            places = self._placement.reserve(progress)
            grounds = self._grounds(places, progress)
        except (RayUnavailable, PlacementError, ScoutError) as error:
            raise LaunchError(str(error)) from error
        actors = Actors(self._config, self._model, stored, self._placement, grounds, self._ray_dir)
        self._start_parts(actors, places, progress)

    def look(self) -> list[str]:
        """One line for each part that has died or is back since the last call; nothing is waited for."""
        assert self._watch is not None
        if not self._raylets.is_alive():
            return []
        return [*self._raylets.revive(), *self._watch.look(time.monotonic())]

    def hopeless(self) -> str:
        """Why nobody can be served any more; "" while all is well, or may be well again."""
        assert self._watch is not None
        if not self._raylets.is_alive():
            return "Ray died"
        return self._watch.hopeless()

    def stop(self, progress: Progress) -> None:
        """Stop from the gateway downwards, each part as far as it still lives, then Ray."""
        if not ray.is_initialized():
            return
        if self._raylets.is_alive():
            if (
                self.endpoint
            ):  # else nothing has been served, and actors that are loading would not hear of it
                self._stop_parts(progress)
            if not self._config.ray.is_ours:
                self._end_parts()
        progress("stopping Ray" if self._config.ray.is_ours else "leaving the Ray cluster")
        self._raylets.stop()

    # ---- start -------------------------------------------------------------------------------------------------------

    def _grounds(self, places: Sequence[Place], progress: Progress) -> dict[int, Ground]:
        if self._config.ray.is_ours:
            here = Ground(self._model, self._cache, cores_here())
            return {place.number: here for place in places}
        return scouted(self._placement, places, self._config.model.path, progress)

    def _start_parts(self, actors: Actors, places: Sequence[Place], progress: Progress) -> None:
        progress("loading the model")
        self._parts = self._made(actors, places)
        gateway = self._parts[-1]
        answers = [(part, part.handle.__ray_call__.remote(who)) for part in self._parts]
        for part, answer in answers:
            part.process = _await(part.name, answer, lambda: progress("loading the model"))
        progress("opening the gateway")
        listening = start_gateway(self._parts)
        self.endpoint = _await("gateway", listening, lambda: progress("opening the gateway"))
        gateway.make = partial(
            actors.gateway, int(self.endpoint.rsplit(":", 1)[1])
        )  # the same port from now on
        status = _await("gateway", gateway.handle.status.remote(), lambda: None)
        self.has_tokenizer = bool(status.model.tokenizer_digest)
        self.notes = [f"{each.id}: {' '.join(note.split())}" for each in status.nodes for note in each.notes]
        self._watch = Watch(self._parts)
        self.notes += self._watch.look(time.monotonic())  # the directory is told of all

    def _made(self, actors: Actors, places: Sequence[Place]) -> list[Part]:
        """Workers first, which take longest; the gateway last."""
        per_node = self._config.worker.count
        parts: list[Part] = []
        for place in places:
            is_here = self._is_here(place)
            for number in range(place.number * per_node, (place.number + 1) * per_node):
                worker = Member(f"worker-{number}", Kind.WORKER, place.node_id)
                parts.append(made(worker, partial(actors.worker, place, number), is_here=is_here))
        for place in places:
            is_here = self._is_here(place)
            node = Member(f"cache node {place.node_id}", Kind.NODE, place.node_id)
            parts.append(made(node, partial(actors.node, place), is_here=is_here))
            if len(places) > 1:
                exchange = Member(f"exchange of {place.node_id}", Kind.EXCHANGE, place.node_id)
                parts.append(made(exchange, partial(actors.exchange, place), is_here=is_here))
        if len(places) * per_node > 1:
            parts.append(made(Member("directory", Kind.DIRECTORY), actors.directory, is_here=True))
        make_gateway = partial(actors.gateway, self._config.grpc.port)
        parts.append(made(Member("gateway", Kind.GATEWAY), make_gateway, is_here=True))
        return parts

    def _is_here(self, place: Place) -> bool:
        return self._config.ray.is_ours or place.machine.ray_id == ray.get_runtime_context().get_node_id()

    # ---- stop --------------------------------------------------------------------------------------------------------

    def _stop_parts(self, progress: Progress) -> None:
        for step, kind, limit_s, *arguments in (
            ("finishing requests", Kind.GATEWAY, FINISH_S, FINISH_S),
            ("stopping workers", Kind.WORKER, DRAIN_S, DRAIN_S),
            ("stopping transfers", Kind.EXCHANGE, 0.0),
            ("saving pages to SSD", Kind.NODE, DRAIN_S, DRAIN_S),
        ):
            if found := handles(self._parts, kind):
                progress(step)
                _stop(found, limit_s, *arguments)

    def _end_parts(self) -> None:
        """At once, rather than when the cluster notices that we left: what they hold is free for the next one."""
        for part in self._parts:
            with suppress(RayError):
                ray.kill(part.handle, no_restart=True)
        self._placement.release()


def _processes(config: Config) -> tuple[int, int]:
    """Those of each node: workers, cache and exchange; and those of the first one beside them: gateway and directory."""
    raylets, workers = config.ray.raylets, config.worker.count
    return workers + (1 if raylets == 1 else 2), 1 if workers * raylets == 1 else 2


def _load(model: Path, config: Config) -> StoredPages:
    """Import what runs in the actors, which takes torch and so takes seconds, and look at the model."""
    import kvtier.cluster.gateway
    import kvtier.cluster.node
    import kvtier.workers.actor  # noqa: F401

    try:
        return stored_pages(model, config)
    except (ValueError, OSError) as error:
        raise LaunchError(f"model {model}: {error}") from error


def _await(name: str, ref: Any, progress: Callable[[], None]) -> Any:
    """The result of an actor's call; `progress` is called meanwhile. LaunchError names the part and why."""
    while not ray.wait([ref], timeout=_POLL_S)[0]:
        progress()
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise LaunchError(f"{name} can't start: {first_line(error.cause)}") from error
    except RayActorError as error:
        raise LaunchError(f"{name} can't start: {last_line(error)}") from error


def _stop(handles: Sequence[Any], limit_s: float, *arguments: float) -> None:
    refs = [handle.stop.remote(*arguments) for handle in handles]
    done = ray.wait(refs, num_returns=len(refs), timeout=limit_s + _STOP_EXTRA_S)[0]
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            log.warning("a part did not stop cleanly: %s", last_line(error))
