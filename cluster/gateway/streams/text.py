"""Finds stop strings in text that arrives in pieces, and says what may be shown already. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class StopScanner:
    """Scans one sequence's text. Owned by its stream.

    What `push` has given out never changes by later text: the longest end of the text that may begin a stop string is
    held back. The stop string that ends first wins, of several that end together the longest; neither depends on how
    the text was cut into pieces. Holds back fewer characters than the longest stop string has.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        if any(not stop for stop, _ in self._stops):
            raise ValueError("a stop string must not be empty")
        self._matched = [0] * len(self._stops)  # per stop: how much of its head the text now ends with
        self._heads = frozenset(stop[0] for stop, _ in self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was met); after a stop, push no more."""
        if not self._held and self._heads.isdisjoint(text):
            return text, False
        for position, char in enumerate(text):
            cut = self._advance(char)
            if cut:
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[:-cut], True
        seen = self._held + text
        shown = len(seen) - max(self._matched)
        self._held = seen[shown:]
        return seen[:shown], False

    def flush(self) -> str:
        """The text held back, for a sequence that ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop string that ends with this character; 0: none does."""
        cut = 0
        for which, (stop, borders) in enumerate(self._stops):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[which] = matched
            if matched == len(stop):
                cut = max(cut, matched)
        return cut


def _borders(stop: str) -> list[int]:
    """For each head of `stop`, the length of its longest proper head that it also ends with (Knuth, Morris, Pratt)."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length - 1]
        if stop[length] == stop[position]:
            length += 1
        borders[position] = length
    return borders
