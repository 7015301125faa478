"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.gateway.streams.text import StopScanner

# A small alphabet makes overlaps and false starts common.
_WORDS = st.text(alphabet="ab\N{SNOWMAN}", max_size=12)
_STOPS = st.lists(st.text(alphabet="ab\N{SNOWMAN}", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: at the stop string that ends first, of several the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


@settings(deadline=None)
@given(pieces=st.lists(_WORDS, max_size=6), stops=_STOPS)
def test_the_text_shown_is_the_text_before_the_first_stop_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    scanner = StopScanner(stops)
    shown, is_stopped = "", False

    for piece in pieces:
        new, is_stopped = scanner.push(piece)
        shown += new
        if is_stopped:
            break
    if not is_stopped:
        shown += scanner.flush()

    whole = "".join(pieces)
    cut = first_stop(whole, stops)
    assert is_stopped == (cut is not None)
    assert shown == (whole if cut is None else whole[:cut])


@settings(deadline=None)
@given(pieces=st.lists(_WORDS, max_size=6), stops=_STOPS)
def test_less_than_the_longest_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    pushed = shown = 0

    for piece in pieces:
        new, is_stopped = scanner.push(piece)
        if is_stopped:
            break
        pushed += len(piece)
        shown += len(new)

        assert pushed - shown < max(map(len, stops), default=1)


def test_text_that_begins_no_stop_is_shown_at_once() -> None:
    scanner = StopScanner(["STOP", "\n\n"])

    assert scanner.push("a S") == ("a ", False)
    assert scanner.push("TO") == ("", False)
    assert scanner.push("W\n") == ("STOW", False)
    assert scanner.push("x") == ("\nx", False)
    assert scanner.push("..STOP..") == ("..", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopScanner(["a", ""])
