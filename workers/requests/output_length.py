"""Estimates how many tokens running sequences will still give, from how long answers of their class were. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

from kvtier.workers.requests.api import EngineRequest

CLASSES = 1024  # about 1 MB
STEP = 1.25  # each bucket of lengths ends so much later than the one before; chosen by hand
HALVE_AT = 512.0  # answers of a class: from there on the older ones fade
FEW = 4.0  # answers that the first guess counts as

Class = tuple[str, int, bool]


def _buckets() -> tuple[int, ...]:
    """The longest answer of each bucket, up to a million tokens."""
    ends = [1]
    while ends[-1] < 1 << 20:
        ends.append(max(ends[-1] + 1, int(ends[-1] * STEP)))
    return tuple(ends)


_ENDS = _buckets()


class Expected:
    """How long answers were, by tenant, size of max_tokens, and whether a tool may be called. Owned by the step loop.

    At most CLASSES classes; those that no answer came of for longest are forgotten first. The first guess, as long as a
    class has few answers, is half of what is left of max_tokens.
    """

    def __init__(self) -> None:
        self._lengths: OrderedDict[Class, list[float]] = OrderedDict()

    def learn(self, spec: EngineRequest, tokens: int) -> None:
        """An answer ended, with so many tokens."""
        name = _class_of(spec)
        counts = self._lengths.setdefault(name, [0.0] * len(_ENDS))
        self._lengths.move_to_end(name)
        counts[_bucket(tokens)] += 1.0
        if sum(counts) > HALVE_AT:
            counts[:] = [count / 2.0 for count in counts]
        if len(self._lengths) > CLASSES:
            self._lengths.popitem(last=False)

    def remaining(self, spec: EngineRequest, tokens: int, most: int) -> float:
        """Tokens still to come, above 0 and at most `most`, after so many; the client's guess goes before ours."""
        if most <= 0:
            return 0.0
        if spec.expected_output_tokens > tokens:
            return float(min(most, spec.expected_output_tokens - tokens))
        counts = self._lengths.get(_class_of(spec), [])
        weight, total = FEW, FEW * 0.5 * most
        for i in range(_bucket(tokens), len(counts)):
            more = min(_middle(i), tokens + most) - tokens
            if counts[i] and more > 0:
                weight += counts[i]
                total += counts[i] * more
        return min(float(most), max(1.0, total / weight))

    def __len__(self) -> int:
        return len(self._lengths)


def _class_of(spec: EngineRequest) -> Class:
    return spec.tenant, spec.sampling.max_tokens.bit_length(), bool(spec.tool_stop_ids)


def _bucket(tokens: int) -> int:
    return min(bisect_left(_ENDS, tokens), len(_ENDS) - 1)


def _middle(bucket: int) -> float:
    """Tokens of an answer in the middle of a bucket."""
    return 0.5 * (_ENDS[bucket - 1] + 1 + _ENDS[bucket]) if bucket else 1.0
