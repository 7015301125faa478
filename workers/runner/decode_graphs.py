"""Replays decode steps as captured graphs: one launch from the host in place of some ten for each layer.

A step of n decode rows runs in the smallest bucket that holds them. Rows up to the bucket's size belong to no sequence:
they attend nothing and write nothing. A graph is captured the second time that its bucket is wanted with the same page
formats; before each replay the tensors that it reads, the model's inputs and the kernels' tables, are overwritten in place.
What has no graph runs as ever, so a graph is never needed for a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvtier.kernels.ops import FixedShape, Format, ShapeExceeded, StepPlan
from kvtier.workers.models.base import ModelStep
from kvtier.workers.models.forwards.lean import StepInputs

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_GRAPHS = 32  # each keeps its activations: some megabytes
MAX_PAGES = 1 << 20  # places for page numbers in a graph's table, 4 bytes each

Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


class Model(Protocol):
    """A forward in two parts, the second of which is work on the device alone."""

    def inputs(self, step: ModelStep) -> StepInputs:
        """A step's tensors, copied to the device."""

    def run(self, inputs: StepInputs, plan: StepPlan, arena: torch.Tensor) -> torch.Tensor:
        """The step's logits."""


class Tables(Protocol):
    """What kernels keep of a plan on the device (kernels/plans.py)."""

    def pin(self, plan: StepPlan) -> None:
        """Keep it at its addresses."""

    def refill(self, plan: StepPlan, by: StepPlan) -> None:
        """Overwrite it. Raises ShapeExceeded."""


class Key(NamedTuple):
    """What a graph depends on beside the contents of its tensors."""

    rows: int
    formats: tuple[Format, ...]
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class _Graph:
    plan: StepPlan
    inputs: StepInputs
    logits: torch.Tensor  # [rows of the bucket, vocab]
    replay: Replay


class DecodeGraphs:
    """The graphs of one model over one arena. Owned by the step loop."""

    def __init__(
        self,
        model: Model,
        tables: Sequence[Tables],
        arena: torch.Tensor,
        capture: Capture,
        *,
        max_rows: int,
        pages_per_row: int,
        buckets: Sequence[int] = BUCKETS,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        """`tables` are those of all kernels that the model's decode steps run; `pages_per_row` is a context's most."""
        self._model = model
        self._tables = tables
        self._arena = arena
        self._capture = capture
        self._pages_per_row = pages_per_row
        self._buckets = tuple(bucket for bucket in sorted(buckets) if bucket <= max_rows)
        self._max_graphs = max_graphs
        self._seen: set[Key] = set()
        self._graphs: dict[Key, _Graph] = {}
        self.replays = 0

    def forward(self, step: ModelStep) -> torch.Tensor | None:
        """Logits of a decode step, which the next replay overwrites; None for a step that has no graph yet, or can't."""
        padded = self._padded(step)
        if padded is None:
            return None
        inputs = self._model.inputs(padded)
        plan = padded.plans[0]
        assert plan.shape is not None
        key = Key(plan.shape.rows, plan.shape.formats, inputs.sink_cos is not None)
        try:
            graph = self._graphs.get(key) or self._captured(key, plan, inputs)
            if graph is None:
                return None
            for tables in self._tables:
                tables.refill(graph.plan, plan)
        except ShapeExceeded:
            return None
        for target, source in zip(graph.inputs, inputs, strict=True):
            if target is not None and source is not None:
                target.copy_(source)
        graph.replay()
        self.replays += 1
        return graph.logits[: len(step.token_ids)]

    def _captured(self, key: Key, plan: StepPlan, inputs: StepInputs) -> _Graph | None:
        if key not in self._seen:
            if len(self._seen) < self._max_graphs:
                self._seen.add(key)
            return None
        self._model.run(inputs, plan, self._arena)  # compiles kernels, and makes the tables that are pinned
        for tables in self._tables:
            tables.pin(plan)
        replay, logits = self._capture(lambda: self._model.run(inputs, plan, self._arena))
        graph = self._graphs[key] = _Graph(plan, inputs, logits, replay)
        return graph

    def _padded(self, step: ModelStep) -> ModelStep | None:
        """The step in its bucket; None if it isn't one of decode rows only, all of which are sampled, or is too large."""
        rows = len(step.token_ids)
        plan = step.plans[0]
        bucket = next((bucket for bucket in self._buckets if bucket >= rows), 0)
        if not bucket or len(step.plans) > 1 or plan.num_sequences != rows or len(step.logit_rows) != rows:
            return None
        if not (
            np.array_equal(plan.starts, np.arange(rows)) and np.array_equal(step.logit_rows, plan.starts)
        ):
            return None
        pages = min(MAX_PAGES, bucket * self._pages_per_row)
        formats = tuple(Format(code) for code in np.unique(plan.formats).tolist())
        return ModelStep(
            _zero_padded(step.token_ids, bucket),
            _zero_padded(step.positions, bucket),
            (replace(plan, shape=FixedShape(bucket, formats, pages)),),
            np.arange(bucket, dtype=np.int32),
        )


def _zero_padded(values: Any, rows: int) -> Any:
    return np.concatenate([values, np.zeros(rows - len(values), values.dtype)])


def cuda_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs, which share one pool of memory: only one of them is replayed at a time."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(function: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Copy threads go on with their own streams meanwhile: only what this thread calls is captured.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            logits = function()
        return graph.replay, logits

    return capture
