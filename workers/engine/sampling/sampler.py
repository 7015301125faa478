"""Chooses the next tokens. Pure: what a row gets depends on its own logits, parameters and position, never on its batch.

Randomness is a counter, not a stream: the number for (seed, sequence index, position) is always the same, so a resumed
sequence repeats nothing and changes nothing. Order: logit_bias, min_tokens, repetition, frequency and presence penalty,
temperature, top-k, top-p, min-p; ties at a threshold are all kept.

Probabilities are added as whole numbers, of which the likeliest token has 2**40. Such sums are exact, so they are the
same in any order, on any device, and in any batch; what has less than one part of 2**40 of the likeliest never comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.workers.engine.sampling.seen_tokens import SeenTokens
from kvtier.workers.requests.api import SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

SCALE = 2.0**40  # of the likeliest token; sums over a vocabulary of 2**22 stay below 2**63
LOW_BITS = 15  # of a float32 between 0 and 1, whose order is that of its bits; the others are as many
BUCKETS = 1 << LOW_BITS
FEW = 4096  # numbers are sorted at once; measured, anything from 1,024 to 16,384 is alike
LARGEST = torch.finfo(torch.float32).max


@dataclass(slots=True)
class SampleRow:
    """One row's part: what to sample by, and the position of the token to be sampled.

    `seen` has its tokens so far, where a penalty needs them; `banned` are ids that must not come yet (min_tokens).
    """

    params: SamplingParams
    index: int
    position: int
    seen: SeenTokens | None
    banned: frozenset[int]


@dataclass(slots=True)
class Sampled:
    """One token per row, None where the row's logits were no numbers; log probabilities where they were asked for."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]


def has_penalty(params: SamplingParams) -> bool:
    """Whether the tokens so far change what comes."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def is_plain(params: SamplingParams) -> bool:
    """Whether the most likely token is all that is wanted once min_tokens have come."""
    return not (params.temperature or params.logprobs or params.logit_bias or has_penalty(params))


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

    Log probabilities are the model's own, before anything is done to them.
    """
    assert len(rows) == len(logits)
    tokens = sample_greedy(logits)
    valid = [i for i, token in enumerate(tokens) if token is not None]
    for part in _parts([i for i in valid if rows[i].banned or not is_plain(rows[i].params)], logits):
        work = logits[part]
        _edit(work, [rows[i] for i in part])
        _choose(work, rows, part, tokens)
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [i for i in valid if rows[i].params.logprobs and tokens[i] is not None]
    for part in _parts(wanted, logits):
        chosen = torch.tensor([tokens[i] for i in part], device=logits.device)
        most = max(rows[i].params.logprobs for i in part)
        for i, one in zip(part, token_logprobs(logits[part], chosen, most), strict=True):
            logprobs[i] = TokenLogprobs(one.logprob, one.top[: rows[i].params.logprobs])
    return Sampled(tokens, logprobs)


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> list[TokenLogprobs]:
    """Log probabilities of the tokens `chosen`, int64 [rows], and of each row's `most` likeliest; float32 [rows, vocab]."""
    values, ids = logits.topk(min(max(most, 1), logits.shape[-1]))
    top = values[:, :1]
    total = top.double() + _exp(logits - top).sum(dim=-1, keepdim=True, dtype=torch.float64).log()
    values, ids = values[:, :most], ids[:, :most]
    mine = (logits.gather(1, chosen[:, None]).double() - total)[:, 0].tolist()
    likeliest = (values.double() - total).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, row_ids, row_values in zip(mine, ids.tolist(), likeliest, strict=True)
    ]


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) of one token: 53 bits of Philox-4x64 keyed by (seed, index), at this position."""
    bits = int(np.random.Philox(key=seed | index << 64, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _parts(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """What is done at once: all rows on a GPU, which they keep busy together; one on a CPU, whose caches hold it."""
    if logits.device.type == "cpu":
        return [[row] for row in rows]
    return [rows] if rows else []


# ---- what changes logits -----------------------------------------------------------------------------------------


def _edit(work: torch.Tensor, rows: list[SampleRow]) -> None:
    """Bias, bans and penalties, in place. Finite logits stay so but for the banned, whatever is done to them."""
    flat, vocab = work.view(-1), work.shape[1]
    bias = [
        (i * vocab + token, value) for i, row in enumerate(rows) for token, value in row.params.logit_bias
    ]
    if bias:
        places, values = (torch.tensor(part, device=work.device) for part in zip(*bias, strict=True))
        flat[places] = flat[places] + values.float()
    banned = [i * vocab + token for i, row in enumerate(rows) for token in row.banned]
    if banned:
        flat[torch.tensor(banned, device=work.device)] = -torch.inf
    seen = [(i, row.params, row.seen) for i, row in enumerate(rows) if row.seen is not None]
    if not seen:
        return
    places = torch.cat([one.ids + i * vocab for i, _, one in seen])
    given = torch.cat([one.given for _, _, one in seen])
    numbers = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in seen]
    lengths = torch.tensor([len(one.ids) for _, _, one in seen], device=work.device)
    by_row = torch.tensor(numbers, dtype=torch.float32, device=work.device)
    if len(seen) > 1:
        by_row = by_row.repeat_interleave(lengths, 0, output_size=len(places))
    repetition, frequency, presence = by_row.unbind(1)
    before = flat[places]
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * given + presence * (given > 0)
    flat[places] = torch.where(before.isinf(), before, after.clamp_(-LARGEST, LARGEST))


# ---- what chooses ------------------------------------------------------------------------------------------------


def _choose(work: torch.Tensor, rows: list[SampleRow], part: list[int], tokens: list[int | None]) -> None:
    """Put the tokens of these rows, whose edited logits are `work`, into `tokens`."""
    for i, token in zip(part, sample_greedy(work), strict=True):
        tokens[i] = token
    random = [k for k, i in enumerate(part) if rows[i].params.temperature > 0.0 and tokens[i] is not None]
    if not random:
        return
    places = [part[k] for k in random]
    if work.device.type == "cpu":
        drawn = [draw_row(work[k].numpy(), rows[part[k]]) for k in random]
    else:
        drawn = draw_rows(work[random], [rows[i] for i in places])
    for i, token in zip(places, drawn, strict=True):
        tokens[i] = token


def draw_row(logits: Floats, row: SampleRow) -> int:
    """The token of a row with a temperature, on a CPU. `logits` [vocab] has a finite maximum."""
    # Probabilities up to a factor, the largest is 1: a tiny temperature can't overflow.
    with np.errstate(over="ignore"):  # minus infinity is right: nothing is left of such a token
        weights = logits - logits.max()
        weights /= np.float32(row.params.temperature)
    np.exp(weights, out=weights)
    mass = (weights * np.float32(SCALE)).astype(np.int64)
    kept = _kept(weights.view(np.int32), mass, row.params)
    cumulative = mass.cumsum() if kept is None else mass[kept].cumsum()
    total = int(cumulative[-1])
    # The first token whose cumulative mass exceeds the draw, so one that has some. There is one: a number below 1 times
    # the total rounds to less than the total, whatever that is.
    target = int(uniform(row.params.seed, row.index, row.position) * float(total))
    place = int(cumulative.searchsorted(target, side="right"))
    return place if kept is None else int(kept[place])


def _kept(bits: Ints, mass: Longs, params: SamplingParams) -> Longs | None:
    """The tokens that top-k, top-p and min-p leave, in order; None: all. `bits` and `mass` are the tokens' own."""
    kept: Longs | None = None
    least = int(np.float32(params.min_p).view(np.int32))
    if 0 < params.top_k < len(bits):
        kept = np.flatnonzero(bits >= _floor(bits, None, params.top_k))
        bits, mass = bits[kept], mass[kept]
    if params.top_p < 1.0:
        total = int(mass.sum())
        wanted = min(max(math.ceil(params.top_p * float(total)), 1), total)
        # Tokens with less than this have less than 1 - p together, so the nucleus is above it: few are left, mostly.
        near = np.flatnonzero(mass >= int((1.0 - params.top_p) * total / len(mass)))
        least = max(least, _floor(bits[near], mass[near], wanted))
    if least > 0:
        left = np.flatnonzero(bits >= least)
        kept = left if kept is None else kept[left]
    return kept


def _floor(bits: Ints, amounts: Longs | None, wanted: int) -> int:
    """The largest bits such that the amounts (None: 1 each) of what has as many or more sum to `wanted`, at least 1.

    `bits` are those of float32 numbers from 0 to 1. Many are not sorted: their amounts are added up in buckets by the
    high bits, and what is in the bucket that decides is sorted.
    """
    if len(bits) > FEW:
        high = bits >> LOW_BITS
        sums = np.bincount(high, minlength=BUCKETS) if amounts is None else _sums(high, amounts)
        downwards = sums[::-1].cumsum()
        place = int(downwards.searchsorted(wanted))
        bucket = BUCKETS - 1 - place
        wanted -= int(downwards[place] - sums[bucket])
        inside = np.flatnonzero(high == bucket)
        bits, amounts = bits[inside], None if amounts is None else amounts[inside]
    order = np.argsort(bits)[::-1]
    place = wanted - 1 if amounts is None else int(amounts[order].cumsum().searchsorted(wanted))
    return int(bits[order[place]])


def _sums(buckets: Ints, amounts: Longs) -> Longs:
    sums = torch.zeros(BUCKETS, dtype=torch.int64)  # numpy adds whole numbers by place half as fast
    sums.scatter_add_(0, torch.from_numpy(buckets).long(), torch.from_numpy(amounts))
    return sums.numpy()


def draw_rows(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """What draw_row says of each row of `logits` [rows, vocab], with all steps on their device, for all rows at once."""

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    params, vocab = [row.params for row in rows], logits.shape[1]
    temperature = column([p.temperature for p in params], torch.float32)
    weights = _exp((logits - logits.max(dim=-1, keepdim=True).values) / temperature)
    bits, mass = weights.view(torch.int32), (weights * SCALE).long()
    best = torch.zeros_like(bits[:, :1])
    if any(0 < p.top_k < vocab for p in params):
        wanted = column([p.top_k if p.top_k < vocab else 0 for p in params], torch.int64)
        best = _floors(bits, torch.ones_like(mass), wanted)
    if any(p.top_p < 1.0 for p in params):
        left = mass * (bits >= best)
        total = left.sum(dim=-1, keepdim=True)
        share = column([p.top_p for p in params], torch.float64)
        nucleus = (share * total).ceil().long().clamp(min=1).minimum(total)
        best = best.maximum(_floors(bits, left, torch.where(share < 1.0, nucleus, 0)))
    best = best.maximum(column([p.min_p for p in params], torch.float32).view(torch.int32))
    cumulative = (mass * (bits >= best)).cumsum(dim=-1)
    total = cumulative[:, -1:]
    chance = column([uniform(row.params.seed, row.index, row.position) for row in rows], torch.float64)
    target = (chance * total).long()
    drawn: list[int] = torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()
    return drawn


def _floors(bits: torch.Tensor, amounts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """_floor of each row, int32 [rows, 1]; 0 where nothing is wanted. `wanted` is int64 [rows, 1]."""
    high = bits >> LOW_BITS
    bucket, above = _buckets(high, amounts, wanted)
    low, _ = _buckets(bits & BUCKETS - 1, amounts * (high == bucket), wanted - above)
    return torch.where(wanted > 0, bucket << LOW_BITS | low, 0).int()


def _buckets(
    buckets: torch.Tensor, amounts: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest bucket of each row that reaches what is wanted with all above it, and the amount above it."""
    sums = amounts.new_zeros(len(buckets), BUCKETS).scatter_add_(1, buckets.long(), amounts)
    downwards = sums.flip(-1).cumsum(dim=-1)
    place = torch.searchsorted(downwards, wanted).clamp(max=BUCKETS - 1)
    bucket = BUCKETS - 1 - place
    return bucket, downwards.gather(1, place) - sums.gather(1, bucket)


def _exp(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cpu":
        return values.exp()
    return torch.from_numpy(np.exp(values.numpy()))  # five times as fast as torch's
