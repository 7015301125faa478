"""A checkpoint's tensors: mapped from its files, dequantized as they are read, and compared with what a model has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvtier.workers.models.files.config import load_config
from kvtier.workers.models.files.files import read_config, tensor_files
from kvtier.workers.models.files.quantized import (
    BLOCK_SCALES,
    BLOCKS,
    MXFP4,
    SCALES,
    STORED,
    ZERO_POINT,
    dequantize,
    is_companion,
    scheme_of,
    unpack_mxfp4,
)

_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NAMED = 4  # tensors that a message names
# Constants that older checkpoints hold and that models compute themselves.
_INERT = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|\.position_ids|_float_tensor)$"
)


class Checkpoint:
    """The tensors of a model's folder in their files' memory, by name. Owns the mapping until `close`.

    Of a quantized checkpoint it gives the numbers that the stored ones stand for. Raises ValueError, naming it, for a
    quantization that isn't known and for tensors that are no plain numbers and have no scale.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.config = load_config(folder)
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"{folder} holds an adapter (adapter_config.json), which can't be applied: merge it"
            )
        try:
            self._scheme = scheme_of(read_config(folder))
        except ValueError as error:
            raise ValueError(f"{folder} isn't supported: {error}") from error
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config  # it is this class that dequantizes
        self._files: dict[str, Any] = {}
        try:
            for file in tensor_files(folder):
                handle: Any = safe_open(file, framework="pt")
                self._files.update(dict.fromkeys(handle.keys(), handle))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder} has weights that can't be read: {error}") from error
        self._packed = self._packed_names()
        self._check_stored()

    def close(self) -> None:
        """Let go of the files. Their memory goes once nothing that `get` gave without a copy is left."""
        self._files.clear()

    @property
    def names(self) -> list[str]:
        """Those of its weights, in order; without scales."""
        parts = {name + end for name in self._packed for end in (BLOCKS, BLOCK_SCALES)}
        stored = (name for name in self._files if self._scheme is None or not is_companion(name))
        return sorted([*(name for name in stored if name not in parts), *self._packed])

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor it has."""
        if name in self._packed:
            experts, outputs, groups, _ = self.shape(name + BLOCKS)
            return experts, 32 * groups, outputs
        return tuple(self._files[name].get_slice(name).get_shape())

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, in its own dtype (dequantized: float32) or this one. Plain ones lie in the file's memory."""
        if name in self._packed:
            values = unpack_mxfp4(self._stored(name + BLOCKS), self._stored(name + BLOCK_SCALES))
            return values if dtype is None else values.to(dtype)
        tensor = self._stored(name)
        if tensor.dtype in STORED and self._scheme is not None:
            zero = name + ZERO_POINT
            tensor = dequantize(
                name,
                tensor,
                self._stored(self._scale_of(name) or ""),
                self._stored(zero) if zero in self._files else None,
                self._scheme,
            )
        return tensor if dtype is None else tensor.to(dtype)

    def state_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """All weights, as transformers loads them: read one by one, when it asks for them by `[...]`."""
        return {name: _Lazy(self, name, dtype) for name in self.names}

    def _packed_names(self) -> frozenset[str]:
        """Weights that lie in two tensors, their blocks and the blocks' scales."""
        if self._scheme is None or self._scheme.name != MXFP4:
            return frozenset()
        ends = (name.removesuffix(BLOCKS) for name in self._files if name.endswith(BLOCKS))
        return frozenset(name for name in ends if name + BLOCK_SCALES in self._files)

    def _stored(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def _scale_of(self, name: str) -> str | None:
        return next((name + end for end in SCALES if name + end in self._files), None)

    def _check_stored(self) -> None:
        for name in self.names:
            if name in self._packed:
                continue
            dtype = _dtype_of(self._files[name].get_slice(name).get_dtype())
            if dtype in _PLAIN or _INERT.search(name):
                continue
            if self._scheme and dtype in STORED and self._scale_of(name):
                continue
            method = f"it is quantized by {self._scheme.name}" if self._scheme else "it names no quantization"
            raise ValueError(
                f"{self.folder} isn't supported: tensor {name} is stored as {dtype or 'an unknown type'}"
                f" {list(self.shape(name))} without a scale of its own, and by config.json {method}"
            )


class _Lazy:
    """A tensor of a checkpoint that is read when it is asked for, as a slice of a safetensors file is."""

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
        self._checkpoint, self._name, self._dtype = checkpoint, name, dtype
        self.shape = torch.Size(checkpoint.shape(name))
        self.dtype = dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, at: Any) -> torch.Tensor:
        tensor = self._checkpoint.get(self._name)[at]
        if tensor.dim() < 2:  # a vector kept in the memory of the files keeps all of it
            tensor = tensor.clone()
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _dtype_of(stored: str) -> torch.dtype | None:
    """torch's dtype for a name of the safetensors format."""
    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I8": torch.int8,
        "U8": torch.uint8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "BOOL": torch.bool,
    }.get(stored)


def check_fit(
    folder: Path,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[tuple[str, Any, Any]],
) -> None:
    """Raise ValueError unless the tensors of a folder are those of its model.

    `missing` ones the model has and the files don't, `unexpected` ones the other way round; `mismatched` are names with
    the shape of the file and the one of the model. Nothing is ever guessed or made at random in their place.
    """
    wrong = [
        f"{name} is {list(found)} in the files and {list(wanted)} by config.json"
        for name, found, wanted in sorted(mismatched, key=lambda each: each[0])
    ]
    if wrong:
        raise ValueError(f"{folder} isn't the model that its config.json describes: {_some(wrong)}")
    lacking = sorted(missing)
    if lacking:
        hint = _absent_files(folder)
        raise ValueError(f"{folder} lacks {len(lacking)} of the model's tensors: {_some(lacking)}{hint}")
    spare = sorted(name for name in unexpected if not _INERT.search(name))
    if spare:
        raise ValueError(
            f"{folder} has {len(spare)} tensors that the model of its config.json doesn't: {_some(spare)}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _absent_files(folder: Path) -> str:
    """Which of the files that the index names aren't there, in words."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ""
    files = set(json.loads(index.read_text())["weight_map"].values())
    absent = sorted(file for file in files if not (folder / file).is_file())
    return f"; files that its index names aren't there: {_some(absent)}" if absent else ""
