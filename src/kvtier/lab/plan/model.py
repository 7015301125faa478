"""Finds the model that `kvtier plan --model` names: a preset, a config.json, or a Hugging Face folder. Loads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.lab.plan.model_numbers import ModelNumbers, read_numbers
from kvtier.lab.plan.model_presets import preset, unknown
from kvtier.workers.models.files.store import default_cache


def find_model(name: str) -> ModelNumbers:
    """The numbers of a model; a folder's weights count as they lie there. Raises ValueError or OSError."""
    if not name:
        raise ValueError(unknown(name))
    given = Path(name).expanduser()
    if given.is_dir():
        return _read(given / "config.json", given.resolve().name)
    if given.is_file():
        return _read(given, given.stem if given.stem != "config" else given.resolve().parent.name)
    if (found := preset(name)) is not None:
        own_name, config = found
        return read_numbers(config, own_name)
    pulled = default_cache() / "models" / name
    if (pulled / "config.json").is_file():
        return _read(pulled / "config.json", name)
    raise ValueError(unknown(name))


def _read(file: Path, name: str) -> ModelNumbers:
    if not file.is_file():
        raise ValueError(f"{file.parent} is no model folder: it has no config.json")
    config = _mapping(file)
    weights = weights_bytes(file.parent) if file.name == "config.json" else None
    return read_numbers(config, name, weights)


def weights_bytes(folder: Path) -> int | None:
    """Bytes of a folder's safetensors: what their index says, else their sizes. None where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        metadata = _mapping(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and total > 0:
            return int(total)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _mapping(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, or no JSON
        raise ValueError(f"{file} is no JSON: {error}") from error
    match found:
        case dict():
            return found
        case other:
            raise ValueError(f"{file} must hold a mapping, got {other!r:.40}")
