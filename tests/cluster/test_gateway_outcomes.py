"""Outcomes of very many pages, added up over owners, against a dict of all of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtier.cluster.gateway.cache_api import results as gateway_outcomes
from kvtier.cluster.gateway.cache_api.results import merged_outcome, of_all
from kvtier.proto import cache_pb2
from kvtier.tier.protocol import results as outcomes
from kvtier.tier.protocol.results import NUMBER_BYTES, ManyOutcomes
from kvtier.tier.stores.base import Outcome

KEYS = st.integers(0, 12).map(lambda number: number.to_bytes(NUMBER_BYTES, "big") + bytes([number]) * 24)
ANSWERS = st.lists(st.lists(st.tuples(KEYS, st.sampled_from(Outcome)), max_size=20), max_size=4)


@given(ANSWERS)
def test_pages_are_counted_once_however_many_have_them_and_named_where_not_all_was_done(
    answers: list[list[tuple[bytes, Outcome]]],
) -> None:
    """An owner may have a page more than once, in several formats: its outcome is that of all of them together."""
    reply = of_all([(f"n{number}", ManyOutcomes.of(answer)) for number, answer in enumerate(answers)])

    owners: dict[bytes, dict[str, list[Outcome]]] = {}
    for number, answer in enumerate(answers):
        for key, outcome in answer:
            owners.setdefault(key, {}).setdefault(f"n{number}", []).append(outcome)
    merged = {key: merged_outcome([o for some in by.values() for o in some]) for key, by in owners.items()}
    assert dict(reply.counts) == Counter(outcome.value for outcome in merged.values())
    told = {result.key: result for result in reply.results}
    assert set(told) == {key.hex() for key, outcome in merged.items() if outcome is not Outcome.ACCEPTED}
    assert len(told) == len(reply.results)
    for key, by_owner in owners.items():
        if result := told.get(key.hex()):
            said = {owner: f"OUTCOME_{merged_outcome(some).value}" for owner, some in by_owner.items()}
            assert {
                owner: cache_pb2.Outcome.Name(outcome) for owner, outcome in result.owners.items()
            } == said


def test_of_many_that_were_not_done_a_bounded_number_is_named_and_all_are_counted() -> None:
    pages = [(number.to_bytes(32, "little"), Outcome.REJECTED) for number in range(3 * outcomes.MAX_NAMED)]
    here, there = ManyOutcomes.of(pages[: len(pages) // 2]), ManyOutcomes.of(pages[len(pages) // 2 :])

    reply = of_all([("n0", here), ("n1", there)])

    assert reply.counts == {"REJECTED": len(pages)}
    assert len(reply.results) == gateway_outcomes.MAX_EXCEPTIONS
    assert len(here.named) == outcomes.MAX_NAMED
    assert len(here.numbers) + len(here.codes) == 9 * len(pages) // 2
