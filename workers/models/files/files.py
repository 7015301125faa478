"""Finds a model's files: a Hugging Face folder, a hub id, or a GGUF file, which is converted once."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*"]
_WAY_OUT = "give a folder or a .gguf file as model.path"
_CHUNK_BYTES = 8 * 2**20
_MAX_FINGERPRINTS = 256


def resolve_model(path: str, cache_dir: Path) -> Path:
    """The Hugging Face folder of `path`: itself, a converted .gguf file, or a hub id's files.

    Converted files are kept under `cache_dir`. Raises FileNotFoundError with the way out.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.suffix == ".gguf":
        if not local.is_file():
            raise FileNotFoundError(f"no such GGUF file: {path}")
        folder = cache_dir / "models" / f"{local.stem}-{file_digest(local)[:16]}"
        if not folder.is_dir():
            from kvtier.workers.models.files.gguf import convert_gguf

            convert_gguf(local, folder)
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or not path:
        raise FileNotFoundError(f"no such model folder: {path!r}")
    return _from_hub(path)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"model {name!r} is no local folder and the hub can't be reached to download it; {_WAY_OUT}"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"model {name!r} is no local folder and no usable hub id ({first}); {_WAY_OUT}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises FileNotFoundError or ValueError."""
    file = folder / "config.json"
    try:
        text = file.read_text()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} is no model folder: it has no config.json") from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    match config:
        case dict():
            return config
        case other:
            raise ValueError(f"{file} must hold a mapping, got {other!r:.40}")


def tensor_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, sorted by name: model.safetensors, else those that its index names.

    Without either, all .safetensors files. Raises FileNotFoundError when there are none, ValueError for a bad index.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is no index of weight files: {error}") from error
        files = sorted(folder / name for name in names if (folder / name).is_file())
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no .safetensors files")
    return files


def file_digest(file: Path) -> str:
    """blake2b-256 of a file's content, in hex."""
    h = blake2b(digest_size=32)
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            h.update(chunk)
    return h.hexdigest()


def weights_fingerprint(folder: Path, cache_dir: Path) -> str:
    """Digest of the tensor files' names and contents, in hex.

    A file's digest is kept in `cache_dir`/fingerprints.json under its inode, size, mtime and ctime in nanoseconds, so
    that a start need not read the weights twice. A cache that can't be read or written only costs time.
    """
    store = cache_dir / "fingerprints.json"
    known = _read_fingerprints(store)
    fresh: dict[str, str] = {}
    h = blake2b(digest_size=32)
    for file in tensor_files(folder):
        stamp = _stamp(file)
        digest = known.get(stamp) or file_digest(file)
        if _stamp(file) == stamp:
            fresh[stamp] = digest
        for part in (file.name, digest):
            h.update(len(part).to_bytes(4, "little") + part.encode())
    if not fresh.keys() <= known.keys():
        _write_fingerprints(store, known | fresh)
    return h.hexdigest()


def _stamp(file: Path) -> str:
    s = file.stat()
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


def _read_fingerprints(store: Path) -> dict[str, str]:
    try:
        known = json.loads(store.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str) and len(v) == 64}


def _write_fingerprints(store: Path, known: dict[str, str]) -> None:
    kept = dict(list(known.items())[-_MAX_FINGERPRINTS:])
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=store.parent, prefix=".fingerprints-")
        with os.fdopen(handle, "w") as stream:
            json.dump(kept, stream)
        os.replace(name, store)
    except OSError as error:
        log.info("weights fingerprints aren't cached: %s", error)
