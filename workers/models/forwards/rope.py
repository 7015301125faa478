"""Rotary position embedding of a step's rows, at any position, and the second rotation by which streams see their sinks.

RoPE (Su et al., arXiv 2104.09864) is relative: a key's score depends on how far the query's angle is ahead. Attention
sinks (Xiao et al., arXiv 2309.17453) want the first keys at positions relative to the window, which move with each
token. Turning each query back by so much, once more, gives them what turning all cached keys would.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.ops import IntArray, StepPlan

_T = TypeVar("_T", bound=np.generic)
Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, float32 [rows, D / 2] each


class Rope:
    """The angles of one rope. `own_window` is the window of the model itself: with it alone, a sequence is no stream."""

    def __init__(self, frequencies: torch.Tensor, factor: float, own_window: int) -> None:
        """`frequencies` float32 [D / 2], radians a token; `factor` multiplies cosines and sines (YaRN's, else 1)."""
        self._frequencies: npt.NDArray[np.float32] = frequencies.float().cpu().numpy()
        self._factor = np.float32(factor)
        self._own_window = own_window

    def is_of(self, frequencies: torch.Tensor, factor: float) -> bool:
        """Whether it turns by these frequencies and this factor."""
        own = torch.from_numpy(self._frequencies)
        return own.shape == frequencies.shape and bool(
            torch.allclose(own, frequencies.float().cpu(), rtol=1e-6, atol=0.0)
            and abs(float(self._factor) - factor) < 1e-6
        )

    def rows(self, positions: IntArray, plan: StepPlan) -> Turns:
        """How to turn q and k of rows at `positions`: from float32 angles, as transformers does; streams from float64.

        A float32 angle at position 2^20 is off by up to 0.03 radians, which no model was trained with.
        """
        angles = (positions.astype(np.float32)[:, None] * self._frequencies).astype(np.float64)
        streams = self.streams(plan, len(positions))
        if streams is not None:
            far = positions[streams].astype(np.float64)
            angles[streams] = far[:, None] * self._frequencies.astype(np.float64)
        return _turns(angles, self._factor)

    def streams(self, plan: StepPlan, rows: int) -> npt.NDArray[np.bool_] | None:
        """Which rows are of sequences with a window that isn't the model's, or with sinks; None when none is."""
        flags = (plan.windows != self._own_window) & (plan.windows > 0) | (plan.sinks > 0)
        return _by_row(plan, flags, rows) if flags.any() else None

    def sink_rows(self, positions: IntArray, plan: StepPlan) -> Turns | None:
        """How to turn q once more for the sinks' keys, which see a row at t as if at min(t, sinks + window - 1).

        None when no sequence has sinks and a window. Rows of the others aren't turned.
        """
        last = np.where((plan.windows > 0) & (plan.sinks > 0), plan.sinks + plan.windows - 1, 0)
        if not last.any():
            return None
        last = _by_row(plan, last, len(positions))
        back = np.where(last > 0, np.minimum(positions, last) - positions, 0).astype(np.float64)
        return _turns(back[:, None] * self._frequencies.astype(np.float64), np.float32(1.0))


def _turns(angles: npt.NDArray[np.float64], factor: np.float32) -> Turns:
    cos, sin = np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor
    return torch.from_numpy(cos), torch.from_numpy(sin)


def _by_row(plan: StepPlan, values: npt.NDArray[_T], rows: int) -> npt.NDArray[_T]:
    """A value of each sequence, by row; 0 for rows of no sequence."""
    out = np.zeros(rows, values.dtype)
    within = np.arange(plan.lengths.sum()) - np.repeat(np.cumsum(plan.lengths) - plan.lengths, plan.lengths)
    out[np.repeat(plan.starts, plan.lengths) + within] = np.repeat(values, plan.lengths)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rows x [rows, heads, D] turned: column j with column j + D / 2. cos and sin [rows, 1, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def spread(turns: Turns, device: torch.device, dtype: torch.dtype) -> Turns:
    """Cosines and sines as `rotate` takes them: [rows, 1, D]."""
    cos, sin = (t.to(device).repeat(1, 2).unsqueeze(1).to(dtype) for t in turns)
    return cos, sin
