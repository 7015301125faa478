"""Looks at a machine before anything is started there: what it has, and whether kvtier and the model are to be had."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from kvtier.cluster.config.deployment import Config
from kvtier.cluster.config.nodes import TransferConfig, TransferTls
from kvtier.cluster.machines.addresses import own_address
from kvtier.cluster.machines.code_digest import Sources, sources_here, sources_refusal
from kvtier.cluster.machines.l4_folders import Kept, kept_in, l4_root
from kvtier.cluster.machines.placement import Place
from kvtier.workers.machine.limits import cores_here
from kvtier.workers.models.files.store import ModelError, default_cache, resolve


class NodeProbeError(RuntimeError):
    """A machine can't be used; the message names it, and the way out."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a machine offers. `model` is the model's folder there, `cache` kvtier's; `cores` are those we may use at once, and
    `kept` the folders of L4 on its disk."""

    model: Path
    cache: Path
    cores: int
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True, slots=True)
class _Report:
    model: str
    cache: str
    cores: int
    kept: tuple[Kept, ...]
    wrong: str  # why the machine can't be used


def tls_refusal(tls: TransferTls | None) -> str:
    """Why nodes can't show each other these files, here; "" when they can."""
    if tls is None:
        return ""
    for name, path in (("cert", tls.cert), ("key", tls.key), ("ca", tls.ca)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            return f"transfer.tls.{name}: can't read {path}: {error.strerror}"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, OSError) as error:
        return f"transfer.tls: {tls.cert} and {tls.key} are no certificate and its key: {error}"
    try:
        context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as error:
        return f"transfer.tls.ca: {tls.ca} is no certificate in PEM: {error}"
    return ""


def look(ours: Sources, model: str, l4_path: str, deployment: str, transfer: TransferConfig) -> _Report:
    """Runs on the machine that is looked at. `ours` are those of who asks; `model` is as the configuration names it, and is
    fetched if need be."""
    cache = default_cache()
    root = l4_root(l4_path, cache, deployment)
    folder, kept = "", list[Kept]()
    wrong = sources_refusal(sources_here(), ours) or tls_refusal(transfer.tls) or _host_refusal(transfer.host)
    if not wrong:
        try:
            folder = str(resolve(model, cache))
        except ModelError as error:
            wrong = f"{error} (it must find model.path {model} too)"
        try:
            kept = kept_in(root)
        except OSError as error:
            wrong = f"tiers.l4.path: can't read {root}: {error.strerror}"
    return _Report(folder, str(cache), cores_here(), tuple(kept), wrong)


def _host_refusal(host: str) -> str:
    try:
        own_address(host)
    except OSError as error:
        return str(error)
    return ""


class NodeProbe:
    """Looks at machines for a deployment, as tasks of Ray."""

    def __init__(self, config: Config) -> None:
        self._look = ray.remote(num_cpus=0, max_retries=0)(look)
        self._about = (sources_here(), config.model.path, config.tiers.l4.path, config.name, config.transfer)

    def ask(self, strategy: Any) -> Any:
        """Look at the machine on which this strategy puts a task: the call that will tell what it found."""
        return self._look.options(scheduling_strategy=strategy).remote(*self._about)

    def ground(self, place: Place, answer: Any) -> NodeInfo:
        """What was found. Raises ScoutError, naming the machine."""
        where = f"{place.node_id} ({place.machine.address})"
        try:
            report: _Report = ray.get(answer)
        except RayTaskError as error:
            raise NodeProbeError(_import_sentence(where, error)) from error
        except RayError as error:
            raise NodeProbeError(
                f"{where} can't be looked at: {str(error).strip().splitlines()[0]}"
            ) from error
        if report.wrong:
            raise NodeProbeError(f"{where}: {report.wrong}")
        return NodeInfo(Path(report.model), Path(report.cache), report.cores, report.kept)


def _import_sentence(where: str, error: RayTaskError) -> str:
    last = str(error).strip().splitlines()[-1].strip()
    if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
        return f"{where} can't import kvtier ({last}): install it in the Python that Ray runs with there"
    return f"{where} can't be looked at: {last}; is the same kvtier installed there?"
