"""Chooses the next tokens. What a row gets depends on its own logits, parameters and position, never on its batch.

Randomness is a counter, not a stream: the number for (seed, sequence index, position) is always the same, so a resumed
sequence repeats nothing and changes nothing. Order of the filters: repetition penalty, min_tokens, temperature, top-k,
top-p, min-p; ties at a threshold are all kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.workers.api import SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class SampleRow:
    """One row's part: what to sample by, and the position of the token to be sampled.

    `tokens` are all tokens so far (for the repetition penalty), `banned` the ids that must not come yet (min_tokens).
    """

    params: SamplingParams
    index: int
    position: int
    tokens: npt.NDArray[np.int32]
    banned: frozenset[int]


@dataclass(slots=True)
class Sampled:
    """One token per row, None where the row's logits were no numbers; log probabilities where they were asked for."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]


def is_plain(params: SamplingParams) -> bool:
    """Whether the most likely token is all that is wanted once min_tokens have come."""
    return params.temperature == 0.0 and params.repetition_penalty == 1.0 and not params.logprobs


def sample_greedy(logits: torch.Tensor) -> list[int | None]:
    """The most likely token of each row of float [rows, vocab]; None where the row has no finite maximum."""
    if logits.device.type != "cpu":
        best, places = (t.cpu() for t in logits.max(dim=-1))
        values: list[float] = best.tolist()
        tokens: list[int] = places.tolist()
    else:  # eight times as fast as torch's, and like it takes a NaN for the maximum
        rows = logits.numpy()
        tokens = rows.argmax(axis=-1).tolist()
        values = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    return [
        token if -math.inf < value < math.inf else None for token, value in zip(tokens, values, strict=True)
    ]


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> Sampled:
    """Sample every row of float32 [rows, vocab]; `logits` is left as it is.

    Log probabilities are the model's own, before any filter.
    """
    assert len(rows) == len(logits)
    work = logits.clone()
    for i, row in enumerate(rows):
        _penalise(work[i], row)
    tokens = sample_greedy(work)
    host = work.cpu().numpy()
    for i, row in enumerate(rows):
        if row.params.temperature > 0.0 and tokens[i] is not None:
            tokens[i] = _draw(host[i], row)
    return Sampled(tokens, [_logprobs(logits[i], rows[i], tokens[i]) for i in range(len(rows))])


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) of one token: 53 bits of Philox-4x64 keyed by (seed, index), at this position."""
    bits = int(np.random.Philox(key=seed | index << 64, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _penalise(row_logits: torch.Tensor, row: SampleRow) -> None:
    penalty = row.params.repetition_penalty
    if penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.tokens).astype(np.int64)).to(row_logits.device)
        values = row_logits[seen]
        row_logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.banned:
        row_logits[torch.tensor(sorted(row.banned), device=row_logits.device)] = -torch.inf


def _draw(logits: Floats, row: SampleRow) -> int:
    """The token of a row with a temperature. `logits` [vocab] has a finite maximum."""
    params = row.params
    # Weights are probabilities up to a factor, the largest is 1: a tiny temperature can't overflow.
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    floor = _top_k_floor(weights, params.top_k)
    if params.top_p < 1.0:
        floor = max(floor, _top_p_floor(weights[weights >= floor], params.top_p))
    floor = max(floor, np.float32(params.min_p))
    kept = np.flatnonzero(weights >= floor) if floor > 0 else np.arange(len(weights))
    cumulative = weights[kept].cumsum(dtype=np.float64)
    chance = uniform(params.seed, row.index, row.position) * cumulative[-1]
    # The first token whose cumulative weight exceeds the draw, so one that has a weight. Rounding may put the draw at
    # the very end; the last token that adds to the sum is meant then.
    place = min(
        int(np.searchsorted(cumulative, chance, side="right")),
        int(np.searchsorted(cumulative, cumulative[-1])),
    )
    return int(kept[place])


def _top_k_floor(weights: Floats, k: int) -> np.float32:
    """Weight of the k-th most likely token; 0 when all may come."""
    if not 0 < k < len(weights):
        return np.float32(0)
    floor: np.float32 = np.partition(weights, len(weights) - k)[len(weights) - k]
    return floor


def _top_p_floor(weights: Floats, p: float) -> np.float32:
    """Weight of the last of the most likely tokens that together have probability p."""
    total = weights.sum(dtype=np.float64)
    # Tokens below this have less than 1 - p together, so the nucleus is above it: only few are left to sort.
    ordered = np.sort(weights[weights >= np.float32((1.0 - p) * total / len(weights))])[::-1]
    enough = int(np.searchsorted(ordered.cumsum(dtype=np.float64), p * total))
    floor: np.float32 = ordered[min(enough, len(ordered) - 1)]
    return floor


def _logprobs(logits: torch.Tensor, row: SampleRow, token: int | None) -> TokenLogprobs | None:
    if not row.params.logprobs or token is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
    values, ids = logprobs.topk(min(row.params.logprobs, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
