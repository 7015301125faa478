"""Does in L1's arena what the page table decided: copies of heads, moves, conversions, in the order decided."""

from __future__ import annotations

import numpy as np

from kvtier.workers.paging.copier import FrameCopies
from kvtier.workers.paging.frames import Convert, CopyHead, Move, Op
from kvtier.workers.runner.runner import ModelRunner


class ArenaOps:
    """Owned by the step loop. On a GPU all of it is queued on the stream of the forward, in order with it."""

    def __init__(self, frames: FrameCopies, runner: ModelRunner) -> None:
        self._frames = frames
        self._runner = runner

    def run(self, ops: list[Op]) -> None:
        """Each reads what those before it wrote."""
        for op in ops:
            match op:
                case CopyHead():
                    spec = self._runner.groups[op.group].specs[op.format]
                    self._frames.copy_head(op.source, op.target, op.tokens, spec)
                case Move():
                    self._frames.move(op.source, op.target, op.nbytes)
                case Convert():
                    self._runner.convert(
                        op.group,
                        np.array(op.sources, np.int32),
                        op.source_format,
                        np.array(op.targets, np.int32),
                        op.target_format,
                    )
