"""What became of pages over all their owners: outcomes by key, added up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from kvtier.cluster.gateway.ports import Outcomes
from kvtier.proto import cache_pb2
from kvtier.tier.protocol.results import ManyOutcomes, number_of, outcomes_of
from kvtier.tier.stores.base import Outcome

MAX_EXCEPTIONS = 10_000  # keys listed by verbs that name none

_NUMBERS = {
    Outcome.ACCEPTED: cache_pb2.OUTCOME_ACCEPTED,
    Outcome.CLIPPED: cache_pb2.OUTCOME_CLIPPED,
    Outcome.DEFERRED: cache_pb2.OUTCOME_DEFERRED,
    Outcome.REJECTED: cache_pb2.OUTCOME_REJECTED,
    Outcome.MISSING: cache_pb2.OUTCOME_MISSING,
}
_NO_NUMBERS, _NO_BITS = np.zeros(0, np.uint64), np.zeros(0, np.uint8)


def of_each(keys: Sequence[str], answers: Iterable[tuple[str, Outcomes]]) -> cache_pb2.OutcomesReply:
    """The reply of a verb that names keys; what owners said of some of them, by their ids."""
    # A page may have left since its owner was found: MISSING says nothing beside another's answer.
    owners = _by_key(
        (owner_id, [(key, outcome) for key, outcome in outcomes if outcome is not Outcome.MISSING])
        for owner_id, outcomes in answers
    )
    reply = cache_pb2.OutcomesReply()
    for key in keys:
        _add_result(reply, key, owners.get(key, {}))
    reply.counts.update(Counter(merged_outcome(owners.get(key, {}).values()).value for key in keys))
    return reply


def of_all(answers: Sequence[tuple[str, ManyOutcomes]]) -> cache_pb2.OutcomesReply:
    """The reply of a verb that names no keys: all counted, those not ACCEPTED listed.

    Takes about 0.2 us a page: not for an event loop, where there are many.
    """
    arrays = [many.arrays() for _, many in answers]
    numbers = np.concatenate([_NO_NUMBERS, *(some for some, _ in arrays)])
    bits = np.concatenate([_NO_BITS, *(some for _, some in arrays)])
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(order) else order
    reply = cache_pb2.OutcomesReply()
    counts: Counter[str] = Counter()
    together = np.bitwise_or.reduceat(bits[order], starts) if len(order) else bits
    for mask, pages in zip(*np.unique(together, return_counts=True), strict=True):
        counts[merged_outcome(outcomes_of(int(mask))).value] += int(pages)
    reply.counts.update(counts)
    ends = np.cumsum([len(some) for some, _ in arrays])
    named = dict.fromkeys(key for _, many in answers for key in many.named)
    for key in islice(named, MAX_EXCEPTIONS):
        number = np.uint64(number_of(key))
        first, last = np.searchsorted(ordered, number, "left"), np.searchsorted(ordered, number, "right")
        seen: dict[str, list[Outcome]] = {}
        for position in order[first:last]:
            owner_id, _ = answers[int(np.searchsorted(ends, position, "right"))]
            seen.setdefault(owner_id, []).extend(outcomes_of(int(bits[position])))
        _add_result(reply, key.hex(), {owner: merged_outcome(some) for owner, some in seen.items()})
    return reply


def merged_outcome(outcomes: Iterable[Outcome]) -> Outcome:
    """One outcome over those of all owners of a key: later where one will follow, in part where they differ."""
    seen = set(outcomes)
    if not seen:
        return Outcome.MISSING
    if len(seen) == 1:
        return seen.pop()
    if seen == {Outcome.ACCEPTED, Outcome.DEFERRED}:
        return Outcome.DEFERRED
    return Outcome.CLIPPED


def _by_key(answers: Iterable[tuple[str, Outcomes]]) -> dict[str, dict[str, Outcome]]:
    owners: dict[str, dict[str, Outcome]] = {}
    for owner_id, outcomes in answers:
        for key, outcome in outcomes:
            owners.setdefault(key.hex(), {})[owner_id] = outcome
    return owners


def _add_result(reply: cache_pb2.OutcomesReply, key: str, by_owner: Mapping[str, Outcome]) -> None:
    reply.results.add(
        key=key,
        outcome=_NUMBERS[merged_outcome(by_owner.values())],
        owners={owner: _NUMBERS[outcome] for owner, outcome in by_owner.items()},
    )
