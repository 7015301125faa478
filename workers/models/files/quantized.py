"""Quantized checkpoints: which are known, and the numbers that their tensors stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED = (
    "FP8 in blocks or with one scale (quant_method fp8), compressed-tensors of 8 bits"
    " (int-quantized, float-quantized, naive-quantized) and gpt-oss's mxfp4"
)
STORED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # what quantized weights are stored as
SCALES = ("_scale_inv", "_scale")  # behind a weight's name; both multiply, whatever the first one's name says
ZERO_POINT = "_zero_point"
MXFP4 = "mxfp4"
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"  # behind the name of a weight in mxfp4
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by its lower three bits; the fourth is the sign
# Beside weights, of activations and caches, which are computed in the compute dtype here.
_UNUSED = ("_scale_inv", "_scale", ZERO_POINT, "_shape", "_g_idx")
_COMPRESSED = ("int-quantized", "float-quantized", "naive-quantized", "dense")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantized. `block` is rows and columns that share a scale, where config.json says so."""

    name: str
    block: tuple[int, int] | None = None


def scheme_of(settings: Mapping[str, Any]) -> Scheme | None:
    """The scheme that a config.json's settings name; None for plain weights. Raises ValueError for one not known."""
    found = settings.get("quantization_config") or settings.get("compression_config")
    if not found:
        return None
    method = str(found.get("quant_method", "unnamed"))
    refusal = _refusal(method, found)
    if refusal:
        raise ValueError(
            f"its weights are quantized by {method}{refusal}, which can't be loaded; supported: {SUPPORTED};"
            " or take the unquantized model"
        )
    block = found.get("weight_block_size")
    return Scheme(method, (int(block[0]), int(block[1])) if block else None)


def _refusal(method: str, found: Mapping[str, Any]) -> str | None:
    """What of the settings isn't known, as words behind the method's name; None when all is."""
    if method in ("fp8", MXFP4):
        return None
    if method != "compressed-tensors":
        bits = found.get("bits") or {True: 4}.get(bool(found.get("load_in_4bit"))) or found.get("num_bits")
        return f" in {bits} bits" if bits else ""
    groups = dict(found.get("config_groups") or {})
    formats = {str(found.get("format", "unnamed"))} | {
        str(group["format"]) for group in groups.values() if group.get("format")
    }
    strange = sorted(formats - {*_COMPRESSED, "mixed-precision"})
    if strange:
        return f" in the format {', '.join(strange)}"
    bits = {(group.get("weights") or {}).get("num_bits", 8) for group in groups.values()} - {8}
    if bits:
        return f" in {', '.join(str(b) for b in sorted(bits))} bits"
    if str((found.get("sparsity_config") or {}).get("format") or "dense") != "dense":
        return " with sparse weights"
    if (found.get("transform_config") or {}).get("config_groups"):
        return " with transforms"
    return None


def is_companion(name: str) -> bool:
    """Whether a tensor of a quantized checkpoint says only how others are scaled."""
    return name.endswith(_UNUSED)


def dequantize(
    name: str, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """float32 values of a stored weight [..., rows, columns]. Raises ValueError where the scale doesn't fit it."""
    values = weight.float()
    if zero is not None:
        values = values - _spread(name, zero.float(), values.shape, scheme)
    return values * _spread(name, scale.float(), values.shape, scheme)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [experts, inputs, outputs] of blocks uint8 [experts, outputs, groups, 16], two numbers in a byte, the
    lower four bits first, and scales uint8 [experts, outputs, groups], powers of two."""
    table = torch.tensor([*_FP4, *(-x for x in _FP4)])
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(table[pairs.int()], scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(-2, -1).contiguous()


def _spread(name: str, scale: torch.Tensor, shape: torch.Size, scheme: Scheme) -> torch.Tensor:
    """A scale for each value of a weight of this shape, or what broadcasts to it."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows, columns = shape[-2:] if len(shape) > 1 else (shape[-1], 1)
    if scale.dim() == len(shape) - 1 and scale.shape == shape[:-1]:
        scale = scale[..., None]  # one for each row
    if scale.dim() == len(shape) and scale.shape[:-2] == shape[:-2]:
        if scheme.block is not None:
            high, wide = scheme.block
            if scale.shape[-2:] == (-(-rows // high), -(-columns // wide)):
                tall = scale.repeat_interleave(high, -2)[..., :rows, :]
                return tall.repeat_interleave(wide, -1)[..., :columns]
        elif scale.shape[-2] in (1, rows) and columns % scale.shape[-1] == 0:
            return scale.repeat_interleave(columns // scale.shape[-1], -1)
    blocks = f" in blocks of {scheme.block[0]} x {scheme.block[1]}" if scheme.block else ""
    raise ValueError(
        f"the scale of {name} has shape {list(scale.shape)}, which doesn't fit a weight of {list(shape)}{blocks}"
    )
