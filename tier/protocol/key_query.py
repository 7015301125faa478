"""Questions about pages by their keys, or by keys' first digits, with answers that are small whatever is held. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.tier.pages.page import TierName

PAGE_KEY_BYTES = 32
CHUNK_KEYS = 1 << 15  # looked through in one go: a few milliseconds
_SORTED_DIGITS = 16  # of a key, that fit a 64-bit number

Marks = npt.NDArray[np.bool_]  # [keys]
_Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """Of which keys asked for a sealed copy is in this tier and variant: a bit a key, the first key the highest bit."""

    tier: TierName
    variant: str
    bits: bytes  # [keys / 8, rounded up]

    @classmethod
    def of(cls, found: Mapping[tuple[TierName, str], Iterable[int]], num_keys: int) -> list[HeldKeys]:
        """From the positions of the keys that were found."""
        held = []
        for (tier, variant), positions in found.items():
            marks = np.zeros(num_keys, np.bool_)
            marks[list(positions)] = True
            held.append(cls(tier, variant, np.packbits(marks).tobytes()))
        return held

    def marks(self, num_keys: int) -> Marks:
        """A flag a key. Raises ValueError where it was asked for another number of keys."""
        if len(self.bits) != -(-num_keys // 8):
            raise ValueError(f"{len(self.bits)} bytes say nothing of {num_keys} keys, a bit each")
        return np.unpackbits(np.frombuffer(self.bits, np.uint8), count=num_keys).view(np.bool_)


def split_keys(joined: bytes) -> list[bytes]:
    """Page keys that follow each other. Raises ValueError for bytes that aren't a whole number of them."""
    if len(joined) % PAGE_KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of keys, {PAGE_KEY_BYTES} each")
    return [joined[at : at + PAGE_KEY_BYTES] for at in range(0, len(joined), PAGE_KEY_BYTES)]


def keys_with(keys: Sequence[bytes], heads: Sequence[str], limit: int) -> list[list[bytes]]:
    """For each head, hex digits in lower case, at most `limit` of the keys that begin with it, each once.

    Goes through all keys, sorted by chunks: about 0.2 us a key, and little for each head and chunk.
    """
    lows, highs = _numbers(heads, "0"), _numbers(heads, "f")
    found: list[dict[bytes, None]] = [{} for _ in heads]
    for start in range(0, len(keys), CHUNK_KEYS):
        chunk = keys[start : start + CHUNK_KEYS]
        whole = np.frombuffer(b"".join(chunk), np.uint8).reshape(len(chunk), PAGE_KEY_BYTES)
        numbers = np.ascontiguousarray(whole[:, : _SORTED_DIGITS // 2]).view(">u8").reshape(-1)
        order = np.argsort(numbers)
        numbers = numbers[order]
        begins = np.searchsorted(numbers, lows, "left")
        ends = np.searchsorted(numbers, highs, "right")
        for number in np.flatnonzero(begins < ends).tolist():
            near = (chunk[at] for at in order[begins[number] : ends[number]])
            _add(found[number], near, heads[number], limit)
    return [list(some) for some in found]


def _add(found: dict[bytes, None], near: Iterator[bytes], head: str, limit: int) -> None:
    new = (key for key in near if key not in found and key.hex().startswith(head))
    for key in islice(dict.fromkeys(new), limit - len(found)):
        found[key] = None


def _numbers(heads: Sequence[str], rest: str) -> _Numbers:
    """The heads as numbers of their first digits, with those that are missing set to `rest`."""
    return np.array([int(head[:_SORTED_DIGITS].ljust(_SORTED_DIGITS, rest), 16) for head in heads], np.uint64)
