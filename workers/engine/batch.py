"""Builds the batch of a step from the scheduler's rows, in arrays that are allocated once."""

from __future__ import annotations

import numpy as np

from kvtier.workers.engine.sampling.prompt_logprobs import PromptLogprobs
from kvtier.workers.runner.runner import GroupPages, SequenceRows, StepBatch
from kvtier.workers.scheduling.scheduler import Row


class BatchBuilder:
    """Owned by the step loop. A batch is valid until the next one is built."""

    def __init__(self, page_tokens: int, max_batch_tokens: int, prompt_logprobs: PromptLogprobs) -> None:
        self._page_tokens = page_tokens
        self._prompt_logprobs = prompt_logprobs
        self._token_ids = np.zeros(max_batch_tokens, np.int32)
        self._positions = np.zeros(max_batch_tokens, np.int32)
        self._counting = np.arange(max_batch_tokens, dtype=np.int32)

    def build(self, rows: list[Row]) -> StepBatch:
        """Token ids, positions and pages of these rows; logits of those that sample, then of prompt tokens to be told."""
        token_ids, positions = self._token_ids, self._positions
        page_tokens = self._page_tokens
        sequences: list[SequenceRows] = []
        logit_rows: list[int] = []
        prompt_rows: list[int] = []  # behind those that sample
        at = 0
        for row in rows:
            seq, start, length = row.seq, row.start, row.length
            end = start + length
            if length == 1:
                token_ids[at] = seq.tokens[start]
                positions[at] = start
            else:
                token_ids[at : at + length] = seq.tokens[start:end]
                np.add(self._counting[:length], start, out=positions[at : at + length])
            pages = tuple(
                GroupPages(*group.run(-(-end // page_tokens)), needs.window.tokens, needs.window.sinks)
                for group, needs in zip(seq.groups, seq.request.namespace.needs, strict=True)
            )
            sequences.append(SequenceRows(at, length, end, pages))
            prompt_rows.extend(range(at, at + self._prompt_logprobs.rows(row)))
            at += length
            if row.samples:
                logit_rows.append(at - 1)
        wanted = np.array(logit_rows + prompt_rows, np.int32)
        return StepBatch(token_ids[:at], positions[:at], sequences, wanted)
