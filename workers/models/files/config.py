"""Reads a model's config.json through transformers, which knows what the file leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.workers.models.files.files import read_config

_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


def load_config(folder: Path) -> Any:
    """The config of a folder as transformers has it, its defaults filled in. Raises ValueError where there is none."""
    read_config(folder)  # says what is wrong with the file itself
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # config classes check their fields, each in its own way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"transformers can't read the config of {folder}: {reason}") from error


def settings_of(config: Any) -> dict[str, Any]:
    """All settings of a config, without what says only where and by whom it was read."""
    settings: dict[str, Any] = config.to_dict()
    return {name: value for name, value in settings.items() if name not in _NOT_OF_THE_MODEL}


def causal_class(config: Any) -> str:
    """The name of transformers' causal LM for a config; "" when it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ""))
