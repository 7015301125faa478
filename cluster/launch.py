"""Takes the configuration apart: starts Ray, the cache node, the workers and the gateway, and stops them again."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from kvtier.cluster.config import Config
from kvtier.cluster.leftovers import Stamp, alive
from kvtier.cluster.policies import digest_shares, policy_settings, request_weights, tenant_shares

log = logging.getLogger(__name__)

DRAIN_S = 30.0  # for pages that are not on SSD yet
FINISH_S = 5.0  # for requests that are running
_STOP_EXTRA_S = 15.0  # for closing what has been drained
_POLL_S = 0.1
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray refuses less than 75 MiB; no page bytes ever go there
_NODE_ID = "node-0"
_LATENT_FORMATS = ("auto", "fp8", "")  # what pages of latents can be


class LaunchError(RuntimeError):
    """The deployment can't start; the message says which part, why, and the way out."""


class Progress(Protocol):
    """Told what is being done; called often while something is waited for. It may raise to break off."""

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None: ...


@dataclass(slots=True)
class _Part:
    """One actor, and its process once it runs."""

    name: str
    handle: Any
    process: Stamp | None = None
    asked: Any = None  # the call that will tell its process once Ray has started it again

    @property
    def is_alive(self) -> bool:
        return bool(self.process and alive([self.process]))


@dataclass(frozen=True, slots=True)
class _Classes:
    """What the actors run, and the bytes of the pages that workers will store, smallest first."""

    gateway: Any
    node: Any
    worker: Any
    page_bytes: list[int]
    l4_variants: frozenset[str] | None  # the formats of the pages that go to L4; None: all


class Launched:
    """A deployment on this machine. Made, started and stopped by one supervisor, on its main thread."""

    def __init__(self, config: Config, model: Path, cache: Path, ray_dir: Path) -> None:
        """`model` is a Hugging Face folder; `ray_dir` a short, empty folder, the caller's to remove.

        `environment.prepare` must have run before this module was imported.
        """
        self._config = config
        self._model = model
        self._cache = cache
        self._socket = ray_dir / "node.sock"
        self._ray_dir = ray_dir
        self._node: _Part | None = None
        self._workers: list[_Part] = []
        self._gateway: _Part | None = None
        self.endpoint = ""
        self.has_tokenizer = False
        self.notes: list[str] = []  # what nodes say of how they came up, such as a damaged L4: one line each

    def start(self, progress: Progress, ray_started: Callable[[], None]) -> None:
        """Start everything and wait until it is ready. Raises LaunchError; `stop` must follow in any case.

        `ray_started` is called once Ray runs: it has replaced the process's signal handlers by then.
        """
        if refusal := latent_refusal(self._model, self._config):
            raise LaunchError(refusal)
        progress("starting Ray")
        with ThreadPoolExecutor(1) as beside:
            loading = beside.submit(_load_classes, self._model, self._config)
            # On this thread, since Ray's daemons die with the thread that starts them.
            _start_ray(self._config, self._ray_dir)
            ray_started()
            classes = loading.result()
        self._start_actors(classes, progress)

    def _start_actors(self, classes: _Classes, progress: Progress) -> None:
        progress("loading the model")
        self._workers = [self._new_worker(classes, number) for number in range(self._config.worker.count)]
        self._node = self._new_node(classes)
        self._gateway = self._new_gateway(classes)
        answers = [(part, part.handle.info.remote()) for part in (self._node, *self._workers)]
        node, *workers = [_await(part, ref, lambda: progress("loading the model")) for part, ref in answers]
        progress("opening the gateway")
        handles = [part.handle for part in self._workers]
        listening = self._gateway.handle.start.remote(handles, [self._node.handle])
        self.endpoint = _await(self._gateway, listening, lambda: progress("opening the gateway"))
        status = _await(self._gateway, self._gateway.handle.status.remote(), lambda: None)
        self.has_tokenizer = bool(status.model.tokenizer_digest)
        self.notes = [f"{each.id}: {' '.join(note.split())}" for each in status.nodes for note in each.notes]
        pids = (node["pid"], *(worker.pid for worker in workers), status.gateway_pid)
        for part, pid in zip((self._node, *self._workers, self._gateway), pids, strict=True):
            part.process = _stamp(pid)

    def died(self) -> list[str]:
        """Parts that have died since the last call. Ray starts the cache node again; requests go on without it."""
        parts = [part for part in (self._node, *self._workers, self._gateway) if part and part.process]
        gone = [part for part in parts if not part.is_alive]
        for part in gone:
            part.process = None
        return [part.name for part in gone]

    def came_back(self) -> list[str]:
        """The cache node, once when Ray has started it again; from then on `died` watches it. Doesn't wait for it."""
        node = self._node
        if node is None or node.process:
            return []
        if node.asked is None:
            node.asked = node.handle.info.remote()
        if not ray.wait([node.asked], timeout=0)[0]:
            return []
        answer, node.asked = node.asked, None
        # Where it is not there yet, or gone again, the next look asks anew.
        with suppress(RayError, psutil.NoSuchProcess):
            node.process = _stamp(ray.get(answer)["pid"])
        return [node.name] if node.process else []

    def can_serve(self) -> bool:
        """Whether the gateway and at least one worker live."""
        return bool(self._gateway and self._gateway.is_alive and any(part.is_alive for part in self._workers))

    def stop(self, progress: Progress) -> None:
        """Stop from the gateway downwards, each part as far as it still lives, then Ray."""
        if not ray.is_initialized():
            return
        if self.endpoint:  # else nothing has been served, and actors that are loading would not hear of it
            self._stop_actors(progress)
        progress("stopping Ray")
        ray.shutdown()

    def _stop_actors(self, progress: Progress) -> None:
        for step, parts, limit_s in (
            ("finishing requests", [self._gateway], FINISH_S),
            ("stopping workers", self._workers, DRAIN_S),
            ("saving pages to SSD", [self._node], DRAIN_S),
        ):
            progress(step)
            _stop([part for part in parts if part], limit_s)

    def _new_node(self, classes: _Classes) -> _Part:
        tiers = self._config.tiers
        l4_path = tiers.l4.path or str(self._cache / "l4" / self._config.name)
        handle = classes.node.options(max_restarts=-1).remote(
            node_id=_NODE_ID,
            socket_path=str(self._socket),
            payload_bytes=classes.page_bytes[-1],
            l3_bytes=tiers.l3.bytes,
            l4_path=str(Path(l4_path).expanduser().absolute()),
            l4_bytes=tiers.l4.bytes,
            l4_store=tiers.l4.store,
            min_payload_bytes=classes.page_bytes[0],
            l4_variants=classes.l4_variants,
            policy=policy_settings(self._config),
            write=tiers.write,
            shares=digest_shares(self._config),
        )
        return _Part(f"cache node {_NODE_ID}", handle)

    def _new_worker(self, classes: _Classes, number: int) -> _Part:
        config = self._config
        name = f"worker-{number}"
        # What its runtime_env sets is in our environment already; with one, Ray would start it a second later.
        handle = classes.worker.options(runtime_env={}).remote(
            worker_id=name,
            node_id=_NODE_ID,
            socket_path=str(self._socket),
            model_path=str(self._model),
            tenants={tenant.name: tenant.salt for tenant in config.tenants},
            dtype=config.model.dtype,
            page_tokens=config.page_tokens,
            l1_bytes=config.tiers.l1.bytes,
            numerics=config.numerics,
            forward=config.model.forward,
            threads=worker_threads(config),
            max_context=config.model.max_context,
            max_batch_tokens=config.worker.max_batch_tokens,
            max_sequences=config.worker.max_sequences,
            max_waiting=config.worker.max_waiting,
            load=config.cache.load,
            load_deadline_ms=config.cache.load_deadline_ms,
            epoch=config.cache.epoch,
            cache_format=config.cache.format,
            recent_tokens=config.cache.recent_tokens,
            decay_sinks=config.cache.sink_tokens,
            l4_format=config.tiers.l4.format,
            window=config.model.window,
            sinks=config.model.sinks,
            policy=policy_settings(config),
            write=config.tiers.write,
            shares=tenant_shares(config),
            preemption=request_weights(config),
        )
        return _Part(name, handle)

    def _new_gateway(self, classes: _Classes) -> _Part:
        config = self._config
        name = config.model.name or Path(config.model.path).name
        at_once = config.worker.max_sequences + config.worker.max_waiting
        handle = classes.gateway.remote(
            str(self._model),
            name,
            config.grpc,
            config.tenants,
            at_once,
            config.model.window,
            config.model.sinks,
        )
        return _Part("gateway", handle)


def worker_threads(config: Config) -> int:
    """Threads of each worker: as configured, else the physical cores we may use, shared out."""
    if config.worker.threads:
        return config.worker.threads
    cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    return max(1, cores // config.worker.count)


def _start_ray(config: Config, folder: Path) -> None:
    if config.ray.address != "local":
        ray.init(address=config.ray.address, log_to_driver=False, configure_logging=False)
        return
    try:
        ray.init(
            address="local",
            num_cpus=config.worker.count + 2,  # processes that Ray starts at once; our actors ask for none
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",  # holds by what environment.prepare has set
            _temp_dir=str(folder),
        )
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise LaunchError(f"Ray doesn't start: {_first_line(error)}") from error


def _load_classes(model: Path, config: Config) -> _Classes:
    """Import what runs in the actors, which takes torch and so takes seconds, and look at the model."""
    from kvtier.cluster.gateway import Gateway
    from kvtier.cluster.node import CacheNode
    from kvtier.workers.actor import DecodeWorkerActor

    try:
        return _Classes(Gateway, CacheNode, DecodeWorkerActor, *stored_pages(model, config))
    except (ValueError, OSError) as error:
        raise LaunchError(f"model {model}: {error}") from error


def latent_refusal(model: Path, config: Config) -> str:
    """Why a model that keeps latents can't have the configured formats; "" when it can, or keeps none.

    Reads config.json alone, at once. What else is wrong with the model is found when it is loaded.
    """
    cache, l4 = config.cache.format, config.tiers.l4.format
    try:
        shape = json.loads((model / "config.json").read_text())
        is_latent, name = bool(shape.get("kv_lora_rank")), (shape.get("architectures") or ["a model"])[0]
    except (OSError, ValueError, AttributeError):
        return ""
    if not is_latent:
        return ""
    if cache not in _LATENT_FORMATS:
        return f"cache.format {cache} can't be for {name}, which keeps latents: use auto or fp8"
    if l4 not in _LATENT_FORMATS:
        instead = "leave it empty" if cache == "fp8" else "use fp8, or leave it empty"
        return f"tiers.l4.format {l4} can't be for {name}, which keeps latents: {instead}"
    return ""


def stored_pages(model: Path, config: Config) -> tuple[list[int], frozenset[str] | None]:
    """The sizes of the pages that workers will store, smallest first, and the formats that go to L4 (None: all).

    Raises ValueError or OSError for a model that can't be served.
    """
    from kvtier.tier.page import PageFormat
    from kvtier.workers.formats import choose_l4_format, choose_recipe, raw_format
    from kvtier.workers.model import layer_groups, read_shape

    raw = raw_format(config.model.dtype)
    recipe = choose_recipe(
        config.cache.format,
        raw=raw,
        eight_bit=PageFormat.FP8,  # workers may choose INT8, which is as large
        page_tokens=config.page_tokens,
        recent_tokens=config.cache.recent_tokens,
        decay_sinks=config.cache.sink_tokens,
    )
    l4 = choose_l4_format(config.tiers.l4.format, config.page_tokens)
    formats = [format for format in (recipe.write, recipe.decayed, l4) if format is not None]
    groups = layer_groups(read_shape(model), raw, config.page_tokens, formats)
    sizes = sorted({spec.nbytes for group in groups for spec in group.specs.values()})
    return sizes, None if l4 is None else frozenset({l4.value})


def _stamp(pid: int) -> Stamp:
    return pid, psutil.Process(pid).create_time()


def _await(part: _Part, ref: Any, progress: Callable[[], None]) -> Any:
    """The result of an actor's call; `progress` is called meanwhile. LaunchError names the part and why."""
    while not ray.wait([ref], timeout=_POLL_S)[0]:
        progress()
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise LaunchError(f"{part.name} can't start: {_first_line(error.cause)}") from error
    except RayActorError as error:
        raise LaunchError(f"{part.name} can't start: {_last_line(error)}") from error


def _stop(parts: Sequence[_Part], limit_s: float) -> None:
    refs = [part.handle.stop.remote(limit_s) for part in parts]
    done = ray.wait(refs, num_returns=len(refs), timeout=limit_s + _STOP_EXTRA_S)[0] if refs else []
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            log.warning("a part did not stop cleanly: %s", _last_line(error))


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(error: object) -> str:
    """Of a traceback in text: what was raised, without its class."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return re.sub(r"^[\w.]*(Error|Exception): ", "", line)
