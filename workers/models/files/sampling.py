"""The sampling that a model's makers recommend, by its generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.workers.requests.api import SamplingParams

_TAKEN: tuple[tuple[str, type], ...] = (
    ("temperature", float),
    ("top_k", int),
    ("top_p", float),
    ("min_p", float),
    ("repetition_penalty", float),
)


def recommended_sampling(folder: Path) -> SamplingParams:
    """Defaults for what a request leaves unset; what the file leaves open, or a folder without one, changes nothing.

    With `do_sample: false` tokens are chosen greedily. Raises ValueError, naming the file, for one that can't be.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        values = {name: kind(found[name]) for name, kind in _TAKEN if found.get(name) is not None}
        if found.get("do_sample") is False:
            values["temperature"] = 0.0
        params = SamplingParams(**values)
        params.validate()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} can't give sampling defaults: {error}") from error
    return params
