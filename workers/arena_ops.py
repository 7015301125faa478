"""Does in L1's arena what the page table decided: copies of heads, moves, conversions, in the order decided."""

from __future__ import annotations

import numpy as np

from kvtier.tier.hbm import Arena
from kvtier.workers.frames import Convert, CopyHead, Move, Op
from kvtier.workers.runner import ModelRunner


class ArenaOps:
    """Owned by the step loop. On a GPU all of it is queued on the stream of the forward, in order with it."""

    def __init__(self, arena: Arena, runner: ModelRunner) -> None:
        self._arena = arena
        self._runner = runner

    def run(self, ops: list[Op]) -> None:
        """Each reads what those before it wrote."""
        for op in ops:
            match op:
                case CopyHead():
                    spec = self._runner.groups[op.group].specs[op.format]
                    self._arena.copy_head(op.source, op.target, op.tokens, spec)
                case Move():
                    self._arena.move(op.source, op.target, op.nbytes)
                case Convert():
                    self._runner.convert(
                        op.group,
                        np.array(op.sources, np.int32),
                        op.source_format,
                        np.array(op.targets, np.int32),
                        op.target_format,
                    )
