"""Looks at a machine before anything is started there: what it has, and whether kvtier and the model are to be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from kvtier.cluster.placement import Place, Placement
from kvtier.workers.model_store import ModelError, default_cache, resolve

_POLL_S = 0.1


class ScoutError(RuntimeError):
    """A machine can't be used; the message names it, and the way out."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a machine offers. `model` is the model's folder there, `cache` kvtier's; `cores` are those we may use."""

    model: Path
    cache: Path
    cores: int


@dataclass(frozen=True, slots=True)
class _Report:
    version: str
    model: str
    cache: str
    cores: int
    wrong: str  # why the model can't be had


def cores_here() -> int:
    """Physical cores that this process may use."""
    return max(1, min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0))))


def look(model: str) -> _Report:
    """Runs on the machine that is looked at. `model` is as the configuration names it; it is fetched if need be."""
    cache = default_cache()
    try:
        folder, wrong = str(resolve(model, cache)), ""
    except ModelError as error:
        folder, wrong = "", str(error)
    return _Report(version("kvtier"), folder, str(cache), cores_here(), wrong)


def scouted(
    placement: Placement, places: Sequence[Place], model: str, progress: Callable[[str], None]
) -> dict[int, Ground]:
    """The ground of each place, by its number, all looked at at once. Raises ScoutError naming the first bad one."""
    remote_look = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = [remote_look.options(scheduling_strategy=placement.on(place)).remote(model) for place in places]
    while len(ray.wait(asked, num_returns=len(asked), timeout=_POLL_S)[0]) < len(asked):
        progress("looking at the machines, and for the model there")
    return {place.number: _ground(place, answer, model) for place, answer in zip(places, asked, strict=True)}


def _ground(place: Place, answer: Any, model: str) -> Ground:
    where = f"{place.node_id} ({place.machine.address})"
    try:
        report: _Report = ray.get(answer)
    except RayTaskError as error:
        raise ScoutError(_import_sentence(where, error)) from error
    except RayError as error:
        raise ScoutError(f"{where} can't be looked at: {str(error).strip().splitlines()[0]}") from error
    ours = version("kvtier")
    if report.version != ours:
        raise ScoutError(
            f"{where} has kvtier {report.version}, and this machine {ours}: install the same there"
        )
    if report.wrong:
        raise ScoutError(f"{where}: {report.wrong} (it must find model.path {model} too)")
    return Ground(Path(report.model), Path(report.cache), report.cores)


def _import_sentence(where: str, error: RayTaskError) -> str:
    last = str(error).strip().splitlines()[-1].strip()
    if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
        return f"{where} can't import kvtier ({last}): install it in the Python that Ray runs with there"
    return f"{where} can't be looked at: {last}"
