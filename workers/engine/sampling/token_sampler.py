"""Draws a step's tokens for a worker's sequences: keeps what their penalties go by, and finds the row that raises."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from kvtier.workers.engine.sampling.sampler import SampleRow, has_penalty, is_plain, sample, sample_greedy
from kvtier.workers.engine.sampling.seen_tokens import SeenTokens
from kvtier.workers.requests.api import TokenLogprobs
from kvtier.workers.requests.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Drawn:
    """A token of each sequence, None where it has none; `faults` has what a row raised, by its place."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None] | None
    faults: dict[int, Exception] = field(default_factory=dict)


class TokenSampler:
    """Owned by the step loop. It remembers tokens of active sequences with a penalty, and of no others."""

    def __init__(self) -> None:
        self._seen: dict[int, SeenTokens] = {}

    def draw(self, seqs: list[Sequence], logits: torch.Tensor) -> Drawn:
        """A token of each sequence, by its row of float32 [sequences, vocab].

        What a row gets does not depend on its batch, so where the batch raises each row is drawn alone.
        """
        try:
            return self._draw(seqs, logits)
        except Exception as error:  # noqa: BLE001  # whose it is, is found below
            first = error
        drawn = Drawn([], [])
        assert drawn.logprobs is not None
        for i, seq in enumerate(seqs):
            try:
                alone = self._draw([seq], logits[i : i + 1])
            except Exception as error:  # noqa: BLE001  # it ends its request, whatever it is
                drawn.faults[i], alone = error, Drawn([None], None)
            drawn.tokens += alone.tokens
            drawn.logprobs += alone.logprobs or [None]
        if not drawn.faults:
            log.warning("a batch of %d rows was sampled row by row", len(seqs), exc_info=first)
        return drawn

    def forget(self, seq: Sequence) -> None:
        """The sequence is over, or gives no token for a while: what is remembered of it can be made again."""
        self._seen.pop(seq.number, None)

    def check(self, active: list[Sequence]) -> None:
        """AssertionError where it remembers a sequence that isn't active."""
        assert self._seen.keys() <= {seq.number for seq in active}, (
            "tokens seen of a sequence that is not active"
        )

    def _draw(self, seqs: list[Sequence], logits: torch.Tensor) -> Drawn:
        if all(is_plain(seq.request.spec.sampling) and not _bans(seq) for seq in seqs):
            return Drawn(sample_greedy(logits), None)
        with torch.inference_mode():
            sampled = sample(logits, [self._row(seq, logits) for seq in seqs])
        return Drawn(sampled.tokens, sampled.logprobs)

    def _row(self, seq: Sequence, logits: torch.Tensor) -> SampleRow:
        params = seq.request.spec.sampling
        seen = None
        if has_penalty(params):
            seen = self._seen.get(seq.number)
            if seen is None:
                seen = SeenTokens(params, seq.request.prompt_tokens, logits.shape[1], logits.device)
                self._seen[seq.number] = seen
            seen.follow(seq.tokens[: seq.length])
        return SampleRow(
            params=params,
            index=seq.index,
            position=seq.length,
            seen=seen,
            banned=seq.stop_ids if _bans(seq) else frozenset(),
        )


def _bans(seq: Sequence) -> bool:
    """Whether a token that would end it must not come yet."""
    return seq.completion_tokens < seq.request.spec.sampling.min_tokens
