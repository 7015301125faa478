"""What tests share: kits whose assertions say as much as those of tests, and waits that end by what they wait for."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from waiting import eventually, until

HERE = Path(__file__).parent
KITS = [file.stem for file in sorted(HERE.glob("*.py")) if not file.stem.startswith(("test_", "conftest"))]


@pytest.mark.parametrize("kit", [*KITS, "triton_kit", "ptx_emulator"])
def test_an_assertion_of_a_kit_that_fails_says_both_sides(kit: str) -> None:
    spec = find_spec(kit)

    assert spec is not None
    assert type(spec.loader).__name__ == "AssertionRewritingHook"


def test_a_wait_ends_at_the_first_true_answer_and_says_what_did_not_come() -> None:
    answers = iter([0, "", "there"])

    assert until(lambda: next(answers), "an answer") == "there"
    with pytest.raises(AssertionError, match="not within 0.01 s: the rain"):
        until(lambda: False, "the rain", 0.01)
    assert eventually(list, 0.01) == []


def test_a_wait_asks_once_more_when_its_time_is_up() -> None:
    """A thread that gets no turn meanwhile has still asked what is now true."""
    began = time.monotonic()

    assert until(lambda: time.monotonic() - began > 0.05, "the time", 0.05)
