"""What a machine's limits and folders mean for a configuration: one finding for each, with what to lower or raise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtier.cli.common import human_bytes, human_count, state_dir
from kvtier.cli.folders import STATE_BYTES, TMP, TMP_BYTES, problem
from kvtier.cluster.machines.l4_folders import l4_root
from kvtier.workers.machine.limits import Limits
from kvtier.workers.models.files.store import default_cache

if TYPE_CHECKING:
    from kvtier.cluster.config.deployment import Config

Level = Literal["ok", "warn", "fail"]

_PROCESSES_BYTES = 1536 * 2**20  # Ray's daemons and our processes beside weights and tiers; measured, roughly
_OBJECT_STORE_BYTES = 80 * 2**20  # of each raylet, in /dev/shm
_OWN_FILES = 320  # of a process beside its clients' connections; measured, roughly, with what Ray and administration take
_FEWEST_FILES = 64  # with fewer Ray and the parts don't start


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `found` is what is, `way_out` what to do unless all is well."""

    name: str
    level: Level
    found: str
    way_out: str = ""

    @property
    def notice(self) -> str:
        """In one line."""
        return f"{self.name}: {self.found}; {self.way_out}"


def has_gpus() -> bool:
    """Whether this machine has GPUs, told without torch, whose import takes seconds."""
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def weights_bytes(model: Path) -> int:
    """Of a model's folder, as they are on disk."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def folder_checks(config: Config) -> list[Check]:
    """Of all that a deployment writes on this machine."""
    tmp_bytes = TMP_BYTES + (_OBJECT_STORE_BYTES * config.ray.raylets if config.ray.is_ours else 0)
    cache, l4 = default_cache(), config.tiers.l4
    checks = [
        _folder(
            "temporary folder",
            TMP,
            tmp_bytes,
            "Ray and our sockets need it: free some of it, or mount a tmpfs there",
        ),
        _folder("state folder", state_dir(), STATE_BYTES, "set KVTIER_STATE to another folder"),
    ]
    if l4.bytes and config.ray.is_ours:
        root = l4_root(l4.path, cache, config.name)
        checks.append(
            _folder("L4 folder", root, 0, "set tiers.l4.path to another folder, or tiers.l4.bytes=0")
        )
    kept = _folder("cache folder", cache, 0, "set KVTIER_CACHE to another folder")
    if kept.level == "fail":  # models and kernels that are there already serve
        kept = replace(kept, level="warn", way_out=f"{kept.way_out}, or nothing new can be put there")
    return [*checks, kept]


def _folder(name: str, folder: Path, need_bytes: int, way_out: str) -> Check:
    if wrong := problem(folder, need_bytes):
        return Check(name, "fail", wrong, way_out)
    return Check(name, "ok", str(folder))


def limit_checks(config: Config, limits: Limits, weights_bytes: int, on_gpus: bool) -> list[Check]:
    """Of what one process or container may use. `weights_bytes`: of the model's files, 0 where they aren't here yet;
    `on_gpus`: L1 and weights lie in GPUs' memory."""
    return [
        _cpus(config, limits),
        _memory(config, limits, weights_bytes, on_gpus),
        _shared_memory(config, limits),
        _open_files(config, limits),
        _locked_memory(config, limits, on_gpus),
    ]


def _cpus(config: Config, limits: Limits) -> Check:
    if limits.cpu_quota is None:
        return Check("cpus", "ok", f"{limits.cores} physical cores")
    found = f"a CPU quota leaves {limits.cpu_quota:g} CPUs"
    workers = config.worker.count * config.ray.raylets
    threads = config.worker.threads or max(1, limits.cores // workers)
    if workers * threads > max(1.0, limits.cpu_quota):
        fitting = max(1, limits.cores // workers)
        return Check(
            "cpus",
            "warn",
            f"{found} to {workers} x {threads} threads of workers, which are all stopped when it is used up",
            f"--set worker.threads={fitting}, fewer workers, or a larger quota",
        )
    return Check("cpus", "ok", f"{found}: {threads} threads for each worker")


def memory_need(config: Config, weights_bytes: int, on_gpus: bool) -> int:
    """Bytes of this machine's memory that a deployment takes."""
    workers = config.worker.count
    l1_bytes = 0 if on_gpus else config.tiers.l1.bytes * workers * config.worker.tensor_parallel
    weights = 0 if on_gpus else weights_bytes * workers
    return (l1_bytes + weights + config.tiers.l3.bytes + _PROCESSES_BYTES) * config.ray.raylets


def _memory(config: Config, limits: Limits, weights_bytes: int, on_gpus: bool) -> Check:
    need, have = memory_need(config, weights_bytes, on_gpus), limits.memory_free_bytes
    whole = f" of the {human_bytes(limits.memory_bytes)} that {limits.memory_file} allows"
    beside = "" if weights_bytes or on_gpus else ", weights come on top"
    what = "tiers, weights and processes" if weights_bytes and not on_gpus else "tiers and processes"
    found = (
        f"{human_bytes(have)}{whole if limits.memory_file else ''} are free; {what} take up to {human_bytes(need)}"
        f"{beside}"
    )
    if have < need:
        way_out = "smaller tiers: --set tiers.l1.bytes=... --set tiers.l3.bytes=..."
        if limits.memory_file:
            way_out += ", or a container with more memory"
        return Check("memory", "fail", found, way_out)
    if have < 1.25 * need:
        return Check("memory", "warn", found, "close other programs, or use smaller tiers")
    return Check("memory", "ok", found)


def _shared_memory(config: Config, limits: Limits) -> Check:
    need = _OBJECT_STORE_BYTES * config.ray.raylets
    found = f"{human_bytes(limits.shm_free_bytes)} of {human_bytes(limits.shm_bytes)} free in /dev/shm"
    if limits.shm_free_bytes >= need or not config.ray.is_ours:
        return Check("shared memory", "ok", found)
    return Check(
        "shared memory",
        "warn",
        f"{found}: Ray keeps its {human_bytes(need)} of objects in /tmp instead, and tensor parallel GPUs may not start",
        "docker run --shm-size=1g; in Kubernetes mount an emptyDir of medium Memory at /dev/shm",
    )


def _open_files(config: Config, limits: Limits) -> Check:
    have = limits.open_files
    if have is None:
        return Check("open files", "ok", "no limit")
    worker = config.worker
    clients = (worker.max_sequences + worker.max_waiting) * worker.count * max(1, config.nodes.count)
    found = f"a process may open {human_count(have)}"
    if have >= _OWN_FILES + clients:
        return Check("open files", "ok", found)
    way_out = "ulimit -Hn, docker run --ulimit nofile=65536, or fewer clients: --set worker.max_waiting=..."
    if have < _FEWEST_FILES:
        return Check("open files", "fail", f"{found}; at least {_FEWEST_FILES} are needed", way_out)
    fit = max(0, have - _OWN_FILES)
    return Check(
        "open files",
        "warn",
        f"{found}, which may be used up by more than {human_count(fit)} clients; {human_count(clients)} requests are taken",
        way_out,
    )


def _locked_memory(config: Config, limits: Limits, on_gpus: bool) -> Check:
    have, need = limits.locked_bytes, config.tiers.l3.bytes if on_gpus else 0
    if have is None:
        return Check("locked memory", "ok", "no limit")
    found = f"a process may lock {human_bytes(have)}"
    if need == 0:
        return Check("locked memory", "ok", f"{found}; none is needed without a GPU")
    if have >= need:
        return Check("locked memory", "ok", found)
    return Check(
        "locked memory",
        "warn",
        f"{found}; L3 of {human_bytes(need)} is pinned for GPUs, which some drivers count",
        "ulimit -l unlimited, docker run --ulimit memlock=-1, or a smaller tiers.l3.bytes",
    )
