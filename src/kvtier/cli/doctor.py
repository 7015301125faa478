"""`kvtier doctor`: looks at this machine and says what would stop or slow a deployment, and the way out."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvtier.cli.checks import Check, folder_checks, limit_checks, weights_bytes
from kvtier.cli.common import CliError, human_bytes, out, print_json, settings, state_dir
from kvtier.cli.connection import JsonOption
from kvtier.cli.folders import first_existing
from kvtier.cli.state import StateFolder
from kvtier.cli.supervisor import cannot_listen
from kvtier.cli.tables import table
from kvtier.cli.up import SetOption
from kvtier.workers.machine.endpoints import Endpoint
from kvtier.workers.machine.limits import read_limits
from kvtier.workers.models.files.store import default_cache, known, list_models

if TYPE_CHECKING:
    from kvtier.cluster.config.deployment import Config

_SHOWN = {"ok": Text("ok", "green"), "warn": Text("warn", "yellow"), "fail": Text("FAIL", "red")}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(doctor)


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="The config to check for; default: local.yaml.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine for a deployment. Exit code 1 if anything would keep it from running.

    \b
    Examples:
      kvtier doctor
      kvtier doctor cluster/local.yaml --set tiers.l3.bytes=16GiB
    """
    checked = settings(config, overrides or ())
    checks = [check for look in _LOOKS for check in look(checked)]
    failed = [check for check in checks if check.level == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        rows = [
            (_SHOWN[c.level], c.name, c.found + (f"\n-> {c.way_out}" if c.way_out else "")) for c in checks
        ]
        out.print(table(None, ("", "check", "found"), rows, keys=2))
    if failed:
        raise CliError(f"{len(failed)} checks failed: " + ", ".join(check.name for check in failed))


def _python(config: Config) -> list[Check]:
    return [Check("python", "ok", f"{platform.python_version()} at {sys.executable}")]


def _packages(config: Config) -> list[Check]:
    checks = []
    for name in ("torch", "triton", "ray", "transformers", "grpcio", "lmdb"):
        try:
            checks.append(Check(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, "fail", "not installed", "make setup"))
    return checks


def _compiler(config: Config) -> list[Check]:
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    if found:
        return [Check("compiler", "ok", found)]
    return [
        Check(
            "compiler",
            "warn",
            "no C++ compiler",
            "install g++: attention on CPU is several times faster with it",
        )
    ]


def _cuda(config: Config) -> list[Check]:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return [Check("cuda", "ok", names)]
    return [Check("cuda", "ok", "no GPU: every tier is there all the same, L1 in RAM")]


def _limits(config: Config) -> list[Check]:
    model = _model_folder(config)
    weights = weights_bytes(model) if model else 0
    return limit_checks(config, read_limits(), weights, _computes_on_gpus(config))


def _computes_on_gpus(config: Config) -> bool:
    import torch

    return config.worker.gpus != 0 and torch.cuda.is_available()


def _disk(config: Config) -> list[Check]:
    need = config.tiers.l4.bytes * config.ray.raylets
    if need == 0:
        return [Check("disk", "ok", "L4 is off")]
    folder = first_existing(Path(config.tiers.l4.path or default_cache()).expanduser().absolute())
    free = shutil.disk_usage(folder).free
    found = f"{human_bytes(free)} free at {folder}, L4 takes up to {human_bytes(need)}"
    way_out = "a smaller tiers.l4.bytes, or tiers.l4.path on a larger disk"
    checks = [Check("disk", "ok", found) if free > need else Check("disk", "warn", found, way_out)]
    return [*checks, _direct_io(folder)]


def _direct_io(folder: Path) -> Check:
    """Write one aligned block past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, 4096) as block:
            descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwrite(descriptor, block, 0)
            finally:
                os.close(descriptor)
    except OSError as error:
        way_out = "put tiers.l4.path on a local disk (ext4, xfs, btrfs), or use --set tiers.l4.store=lmdb"
        return Check("direct I/O", "warn", f"{folder}: {error.strerror}", way_out)
    return Check("direct I/O", "ok", f"works at {folder}")


def _huge_pages(config: Config) -> list[Check]:
    checks = []
    for name, setting in (("huge pages (L1)", "enabled"), ("huge pages (L3)", "shmem_enabled")):
        file = Path("/sys/kernel/mm/transparent_hugepage") / setting
        try:
            text = file.read_text()
        except OSError:
            checks.append(
                Check(
                    name, "warn", f"no {file}", "a kernel with transparent huge pages copies a little faster"
                )
            )
            continue
        now = text.partition("[")[2].partition("]")[0]
        if now in ("always", "madvise", "advise", "within_size"):
            checks.append(Check(name, "ok", now))
        else:
            checks.append(
                Check(
                    name, "warn", now, f"faster copies: echo advise > {file}, as root (madvise for `enabled`)"
                )
            )
    return checks


def _lmdb(config: Config) -> list[Check]:
    """In a child: a broken LMDB build dies by a signal."""
    code = (
        "import lmdb, sys\n"
        "with lmdb.open(sys.argv[1], map_size=1 << 20) as env:\n"
        "    with env.begin(write=True) as txn: txn.put(b'k', b'v')\n"
        "    with env.begin() as txn: assert txn.get(b'k') == b'v'\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, check=False
        )
    if done.returncode == 0:
        return [Check("lmdb works", "ok", "reads what it writes")]
    said = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    return [Check("lmdb works", "fail", said, "reinstall it: pip install --force-reinstall lmdb")]


def _port(config: Config) -> list[Check]:
    host, port = config.grpc.host, config.grpc.port
    running = StateFolder(state_dir()).running()
    if running and running.endpoint and Endpoint.parse(running.endpoint).port == port:
        return [
            Check("port", "ok", f"{running.endpoint} is served by the running deployment (pid {running.pid})")
        ]
    if problem := cannot_listen(host, port):
        return [Check("port", "fail", *problem)]
    return [Check("port", "ok", f"{Endpoint(host, port)} is free")]


def _model(config: Config) -> list[Check]:
    path = config.model.path
    if model := known(path):
        row = next(row for row in list_models(default_cache()) if row["name"] == model.name)
        if row["pulled"]:
            return [Check("model", "ok", f"{model.name} at {row['path']}")]
        return [
            Check(
                "model",
                "warn",
                f"{model.name} is not here yet",
                "kvtier model pull (`kvtier up` does it too)",
            )
        ]
    if Path(path).expanduser().exists():
        return [Check("model", "ok", path)]
    if path.count("/") == 1 and path[0] not in "./~":
        return [
            Check(
                "model",
                "warn",
                f"{path} is no local folder",
                "`kvtier up` fetches it from the Hugging Face hub",
            )
        ]
    return [Check("model", "fail", f"no {path}", "--set model.path=FOLDER, or a name from `kvtier model ls`")]


def _l1(config: Config) -> list[Check]:
    """Whether the longest request fits."""
    from kvtier.cluster.machines.stored_pages import longest_in_l1

    if (model := _model_folder(config)) is None:
        return []
    try:
        longest, context = longest_in_l1(model, config)
    except (ValueError, OSError) as error:
        return [Check("L1", "fail", f"model {model}: {error}", "--set model.path=FOLDER of another one")]
    found = f"holds requests of {longest:,} tokens, and the context is {context:,}"
    if longest >= context:
        return [Check("L1", "ok", found)]
    way_out = f"longer ones are refused: raise tiers.l1.bytes, or set model.max_context {longest} or less"
    return [Check("L1", "fail" if config.model.max_context else "warn", found, way_out)]


def _model_folder(config: Config) -> Path | None:
    """Of a model that is here already."""
    if model := known(config.model.path):
        row = next(row for row in list_models(default_cache()) if row["name"] == model.name)
        return Path(row["path"]) if row["pulled"] else None
    folder = Path(config.model.path).expanduser()
    return folder if (folder / "config.json").is_file() else None


_LOOKS: tuple[Callable[[Config], list[Check]], ...] = (
    _python,
    _packages,
    _compiler,
    _cuda,
    _limits,
    folder_checks,
    _disk,
    _huge_pages,
    _lmdb,
    _port,
    _model,
    _l1,
)
