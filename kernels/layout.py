"""Says where keys and values lie in the page arena, and which rows of a step attend what. Holds no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a page's bytes: `num_layers` records, each `K [H, P, D] | V [H, P, D]`, `record_bytes` apart."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    record_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: a row of the arena."""
        return self.num_layers * self.record_bytes


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The sequences of one step; made once, shared by all layers.

    Sequence s has the rows [starts[s], starts[s] + lengths[s]); its last row is at position contexts[s] - 1 and its
    page i, holding positions [i * page_tokens, ...), is frame frames[first_frames[s] + i]. A row that belongs to no
    sequence attends nothing.
    """

    starts: IntArray  # [sequences]
    lengths: IntArray  # [sequences]
    contexts: IntArray  # [sequences]
    first_frames: IntArray  # [sequences]
    frames: IntArray  # [all pages]

    @property
    def num_sequences(self) -> int:
        """How many sequences take part."""
        return len(self.starts)


def make_plan(sequences: Iterable[tuple[int, int, int, IntArray]], page_tokens: int) -> StepPlan:
    """A plan from (first row, rows, context, frames) of each sequence. Raises ValueError when frames are too few."""
    starts: list[int] = []
    lengths: list[int] = []
    contexts: list[int] = []
    first_frames: list[int] = []
    frames: list[IntArray] = []
    total = 0
    for start, length, context, pages in sequences:
        need = -(-context // page_tokens)
        if length > context or len(pages) < need:
            raise ValueError(f"{context} tokens, {length} of them new, need {need} pages, got {len(pages)}")
        starts.append(start)
        lengths.append(length)
        contexts.append(context)
        first_frames.append(total)
        frames.append(pages[:need])
        total += need
    return StepPlan(
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        contexts=np.array(contexts, np.int32),
        first_frames=np.array(first_frames, np.int32),
        frames=np.ascontiguousarray(np.concatenate(frames), np.int32) if frames else np.zeros(0, np.int32),
    )


def check_rows(x: torch.Tensor, arena: torch.Tensor, layout: KVLayout, heads: int | None = None) -> None:
    """Raise ValueError unless x [rows, heads, head_dim] and the arena are what `layout` says.

    `heads` None: any multiple of the KV heads.
    """
    if x.dtype != layout.dtype:
        raise ValueError(f"rows must be {layout.dtype} like the pages, got {x.dtype}")
    if x.dim() != 3 or x.shape[2] != layout.head_dim:
        raise ValueError(f"rows must be [rows, heads, {layout.head_dim}], got {list(x.shape)}")
    if x.shape[1] % layout.num_kv_heads or x.shape[1] != (heads or x.shape[1]):
        raise ValueError(f"heads must be {heads or f'a multiple of {layout.num_kv_heads}'}, got {x.shape[1]}")
    if arena.dtype != torch.uint8 or arena.dim() != 2 or arena.shape[1] != layout.page_bytes:
        raise ValueError(
            f"arena must be uint8 [frames, {layout.page_bytes}], got {arena.dtype} {list(arena.shape)}"
        )
