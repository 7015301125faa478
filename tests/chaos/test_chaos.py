"""Any one of them dies: no wrong token, no hang, no leak; `make chaos` tries every fault, and these more often.

Real processes: two raylets, a cache, an exchange and a worker with a tiny random model each, a directory, a gateway.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chaos_deployment import Deployment, two_nodes
from chaos_deployments import OWN_FAULTS, OwnFault
from chaos_faults import FAULTS, Fault
from chaos_load import Answer, Question, Reference, judge, reference
from chaos_root import Unable
from chaos_run import BEGIN, END, SEEN, TABLE, Tally, report
from chaos_scene import TRIES, Missed, Scene, until_hit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOME = [fault for fault in FAULTS if fault.in_suite]
SOME_OWN = [fault for fault in OWN_FAULTS if fault.in_suite]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Deployment]:
    with two_nodes(tmp_path_factory.mktemp("chaos"), tiny_llama) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def right(tiny_llama: Path) -> Iterator[Reference]:
    with reference(tiny_llama) as made:
        yield made


# Before `there` is made: one deployment at a time.
@pytest.mark.parametrize("fault", SOME_OWN, ids=[fault.name for fault in SOME_OWN])
def test_nor_when(fault: OwnFault, tmp_path: Path, tiny_llama: Path, right: Reference) -> None:
    def make(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        fault.make(folder, tiny_llama, right, rng)

    rng = at_random()
    until_hit(make)


@pytest.mark.parametrize("fault", SOME, ids=[fault.name for fault in SOME])
def test_no_wrong_token_no_hang_no_leak_when(fault: Fault, there: Deployment, right: Reference) -> None:
    rng = at_random()
    until_hit(lambda number: fault.make(Scene(there, right, rng)))


def at_random() -> random.Random:
    """What a fault goes by; a failed test shows the seed."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


# ---- the kit -----------------------------------------------------------------------------------------------------

QUESTION = Question((1, 2, 3), 4)
WHOLE = Answer(QUESTION, tokens=[7, 8, 9, 5], is_over=True)
FAILED = Answer(QUESTION, tokens=[7, 8], status="UNAVAILABLE", error="a worker is gone", is_over=True)


def test_right_tokens_and_clear_failures_pass() -> None:
    assert judge([WHOLE], [[7, 8, 9, 5]]) == 0
    assert judge([WHOLE, FAILED], [[7, 8, 9, 5]] * 2, may_fail=True) == 1


@pytest.mark.parametrize(
    ("answer", "may_fail"),
    [
        (replace(WHOLE, tokens=[7, 8, 9, 6]), True),
        (replace(WHOLE, tokens=[7, 8, 9]), True),
        (replace(WHOLE, tokens=[7, 8, 9, 5, 5]), True),
        (FAILED, False),
        (replace(FAILED, tokens=[7, 9]), True),
        (replace(FAILED, status="DEADLINE_EXCEEDED"), True),
        (replace(FAILED, status="INTERNAL"), True),
        (replace(FAILED, status=""), True),
    ],
)
def test_a_wrong_token_a_hang_and_an_unclear_failure_do_not(answer: Answer, may_fail: bool) -> None:
    with pytest.raises(AssertionError):
        judge([answer], [[7, 8, 9, 5]], may_fail)


def test_every_fault_has_a_row_in_the_document() -> None:
    rows = (ROOT / "docs" / "faults.md").read_text().partition(BEGIN)[2].partition(END)[0].split("\n")

    assert rows[1:3] == TABLE
    assert [tuple(row.split(" | ")[:2]) for row in rows[3:-1]] == [
        (f"| {name}", seen) for name, seen in SEEN.items()
    ]


@pytest.mark.parametrize(
    ("raised", "tried", "missed", "broken"),
    [
        ([], 1, 0, 0),
        ([Missed("over")], 2, 1, 0),
        ([AssertionError("a leak")], 1, 0, 1),
        ([Missed("over"), AssertionError("a leak")], 1, 0, 1),
        ([Missed("over")] * TRIES, 1, 0, 1),
        ([Unable("no root")], 0, 0, 0),
    ],
)
def test_a_fault_that_hits_nothing_is_tried_again_and_then_breaks_the_law(
    raised: list[Exception], tried: int, missed: int, broken: int
) -> None:
    def make(number: int) -> None:
        if number < len(raised):
            raise raised[number]

    tally = Tally()
    said = tally.count("a fault", make)

    assert (tally.tried.total(), tally.missed.total(), len(tally.broken)) == (tried, missed, broken)
    assert all(str(each) in said for each in raised[-1:] or ["holds"])


def test_a_report_adds_to_the_counts_and_leaves_the_rest(tmp_path: Path) -> None:
    document = tmp_path / "faults.md"
    first, second, *_ = SEEN
    document.write_text(f"before\n{BEGIN}\n| {first} | old words | 3 (and 1 not in time) |\n{END}\nafter\n")

    report(document, Tally(Counter({first: 2, second: 1}), Counter({second: 1})))

    lines = document.read_text().splitlines()
    assert (lines[:2], lines[-2:]) == (["before", BEGIN], [END, "after"])
    assert lines[2:6] == [
        *TABLE,
        f"| {first} | {SEEN[first]} | 5 (and 1 not in time) |",
        f"| {second} | {SEEN[second]} | 0 (and 1 not in time) |",
    ]
