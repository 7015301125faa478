"""The words of finding pages on the gateway: what owners say of keys and of heads of keys, put together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.cluster.gateway.requests.reading import invalid, quoted
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.key_query import HeldKeys, Marks

MIN_KEY_DIGITS = 4
KEY_DIGITS = 64
MAX_KEYS = 100_000  # in one request
MAX_HEADS = 1_000  # of them keys that aren't whole: each owner looks for these through all it holds
MAX_ALIKE = 16  # keys that an owner names for a head; more of them say no more than that it is too short
SHOWN_ALIKE = 3
SHOWN_DIGITS = 16  # of such a key
FIRST_KEYS = 64  # that owners are asked for at once; each time twice as many
MOST_KEYS = 2048  # 64 KB to each owner
MAX_ROWS = 10_000  # copies that owners who are asked at once may answer with, where more than one is

TIER_ORDER = {tier.value: position for position, tier in enumerate(TierName)}


@dataclass(frozen=True, slots=True)
class Alike:
    """The keys that begin with a head, as far as their owners name them; there are others where `is_cut`."""

    head: str
    keys: list[str]
    is_cut: bool

    def whole(self) -> str | None:
        """The key that is meant; None where nothing holds one. Raises Refusal where several may be."""
        if len(self.keys) < 2:
            return self.keys[0] if self.keys else None
        shown = ", ".join(key[: max(SHOWN_DIGITS, len(self.head) + 4)] for key in self.keys[:SHOWN_ALIKE])
        at_least = "at least " if self.is_cut else ""
        if (more := len(self.keys) - SHOWN_ALIKE) > 0:
            shown += f", and {at_least}{more} more"
        raise invalid(
            f"{at_least}{len(self.keys)} pages have keys that begin with {self.head}: give more digits ({shown})"
        )


def checked_keys(given: Sequence[str]) -> list[str]:
    """Keys and heads of keys as hex digits in lower case. Raises Refusal."""
    if not given:
        raise invalid("keys must name at least one page")
    if len(given) > MAX_KEYS:
        raise invalid(f"keys must be at most {MAX_KEYS}, got {len(given)}")
    keys = [checked_key(key) for key in given]
    if (heads := len(heads_of(keys))) > MAX_HEADS:
        raise invalid(f"of the keys at most {MAX_HEADS} may be given by their first digits, got {heads}")
    return keys


def checked_key(key: str) -> str:
    """One of them. Raises Refusal."""
    digits = key.strip().lower()
    if not MIN_KEY_DIGITS <= len(digits) <= KEY_DIGITS or set(digits) - set("0123456789abcdef"):
        raise invalid(f"a key is {MIN_KEY_DIGITS} to {KEY_DIGITS} hex digits, got {quoted(key)}")
    return digits


def heads_of(keys: Iterable[str]) -> list[str]:
    """Those of the keys that aren't whole, each once."""
    return list(dict.fromkeys(key for key in keys if len(key) < KEY_DIGITS))


def alike_limit(num_heads: int) -> int:
    """Keys that an owner may name for each of so many heads: two at least, which tell that the head is too short."""
    return max(2, MAX_ALIKE // num_heads)


def alike(heads: Sequence[str], answers: Iterable[Sequence[Sequence[bytes]]], limit: int) -> dict[str, Alike]:
    """The keys of each head, from the owners' lists: at most `limit` keys a head."""
    keys: list[set[bytes]] = [set() for _ in heads]
    is_cut = [False] * len(heads)
    for answer in answers:
        for number, found in enumerate(answer):
            keys[number].update(found)
            is_cut[number] |= len(found) >= limit
    return {
        head: Alike(head, sorted(key.hex() for key in found), cut)
        for head, found, cut in zip(heads, keys, is_cut, strict=True)
    }


def parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Keys as they are asked for: few at first, since most prompts are held nowhere."""
    start, size = 0, FIRST_KEYS
    while start < len(keys):
        yield keys[start : start + size]
        start, size = start + size, min(2 * size, MOST_KEYS)


def held_first(answers: Iterable[Sequence[HeldKeys]], num_keys: int) -> list[tuple[list[str], list[str]]]:
    """Of the first keys, up to one that nothing holds: the tiers that do, L1 first, and the variants, by name."""
    marks: dict[tuple[str, str], Marks] = {}
    for answer in answers:
        for held in answer:
            name, new = (held.tier.value, held.variant), held.marks(num_keys)
            marks[name] = new | marks[name] if name in marks else new
    found = []
    for position in range(num_keys):
        names = [name for name, held_here in marks.items() if held_here[position]]
        if not names:
            break
        tiers = sorted({tier for tier, _ in names}, key=TIER_ORDER.__getitem__)
        found.append((tiers, sorted({variant for _, variant in names})))
    return found


def held_of(answer: Sequence[HeldKeys], keys: Sequence[bytes]) -> list[bytes]:
    """Those of the keys that an owner has, in whatever tier and variant."""
    marks = [held.marks(len(keys)) for held in answer]
    return [key for key, *is_held in zip(keys, *marks, strict=True) if any(is_held)]


def checked_tier(name: str) -> TierName | None:
    """A tier by its name; None for "", which is any. Raises Refusal."""
    if name and name not in TIER_ORDER:
        raise invalid(f"tier must be one of {', '.join(TIER_ORDER)}, got {quoted(name)}")
    return TierName(name) if name else None
