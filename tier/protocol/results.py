"""What became of very many pages, in few bytes, for those who count outcomes over many owners. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.tier.stores.base import Outcome, Uncleared

NUMBER_BYTES = (
    8  # of a key, by which pages are counted: of 2**28 pages two are alike with a chance of 1 in 500
)
MAX_NAMED = 10_000  # keys that are told whole

_CODES = {outcome: code for code, outcome in enumerate(Outcome)}


@dataclass(frozen=True, slots=True)
class ManyOutcomes:
    """An outcome for each of an owner's pages, 9 bytes a page; those not ACCEPTED are named, at most MAX_NAMED."""

    numbers: bytes  # [pages]: the first NUMBER_BYTES of each key
    codes: bytes  # [pages]: positions in Outcome
    named: list[bytes]  # whole keys

    @classmethod
    def of(cls, outcomes: Sequence[tuple[bytes, Outcome]]) -> ManyOutcomes:
        """From a verb's answer."""
        return cls(
            numbers=b"".join([key[:NUMBER_BYTES] for key, _ in outcomes]),
            codes=bytes([_CODES[outcome] for _, outcome in outcomes]),
            named=list(
                islice((key for key, outcome in outcomes if outcome is not Outcome.ACCEPTED), MAX_NAMED)
            ),
        )

    def outcomes(self) -> list[Outcome]:
        """Of each page, in their order."""
        every = list(Outcome)
        return [every[code] for code in self.codes]

    def arrays(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """The numbers, in no order that means anything, and of each outcome a bit (see outcomes_of)."""
        numbers = np.frombuffer(self.numbers, np.uint64)
        return numbers, np.left_shift(np.uint8(1), np.frombuffer(self.codes, np.uint8))


@dataclass(frozen=True, slots=True)
class Cleared:
    """What an owner did of a clear: what became of its pages, and what it couldn't do yet.

    `unused` are folders of nodes that don't run, which it found beside its own: whatever uses one next clears it first; or
    the error says why that can't be put down there.
    """

    pages: ManyOutcomes
    left: tuple[Uncleared, ...] = ()
    unused: tuple[tuple[str, Uncleared], ...] = ()


def outcomes_of(bits: int) -> list[Outcome]:
    """The outcomes that bits of arrays, put together, stand for."""
    return [outcome for outcome, code in _CODES.items() if bits >> code & 1]


def number_of(key: bytes) -> int:
    """What stands for a key in arrays."""
    return int(np.frombuffer(key[:NUMBER_BYTES], np.uint64)[0])
