"""Questions by key and by head of key, against the plain way to answer them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol import key_query as by_key
from kvtier.tier.protocol.key_query import PAGE_KEY_BYTES, HeldKeys, keys_with, split_keys

# Few first bytes, so that heads are shared; ends of zeros and ones, where numbers of digits begin and end.
KEYS = st.builds(
    lambda head, fill, last: (head + bytes([fill]) * PAGE_KEY_BYTES)[: PAGE_KEY_BYTES - 1] + bytes([last]),
    st.lists(st.sampled_from([0x00, 0x12, 0x1F, 0xFF]), max_size=12).map(bytes),
    st.sampled_from([0x00, 0x7F, 0xFF]),
    st.integers(0, 255),
)


def begin_with(keys: Iterable[bytes], head: str) -> set[bytes]:
    return {key for key in keys if key.hex().startswith(head)}


@settings(deadline=None)
@given(
    keys=st.lists(KEYS, max_size=40),
    cuts=st.lists(st.tuples(KEYS, st.integers(4, 64)), max_size=8),
    limit=st.integers(1, 5),
    chunk=st.integers(1, 40),
)
def test_keys_are_found_by_any_head_and_no_more_than_asked_for(
    keys: list[bytes], cuts: list[tuple[bytes, int]], limit: int, chunk: int
) -> None:
    heads = [key.hex()[:digits] for key, digits in cuts]
    heads += [key.hex()[:digits] for key, (_, digits) in zip(keys, cuts, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_key, "CHUNK_KEYS", chunk)
        found = keys_with(keys, heads, limit)

    assert len(found) == len(heads)
    for head, some in zip(heads, found, strict=True):
        right = begin_with(keys, head)
        assert len(some) == len(set(some)) == min(limit, len(right))
        assert set(some) <= right


@given(
    num_keys=st.integers(0, 70),
    found=st.dictionaries(
        st.tuples(st.sampled_from(TierName), st.sampled_from(["fp32", "int4c"])),
        st.sets(st.integers(0, 69)),
        max_size=4,
    ),
)
def test_what_is_held_is_said_in_a_bit_a_key(
    num_keys: int, found: dict[tuple[TierName, str], set[int]]
) -> None:
    found = {name: {at for at in positions if at < num_keys} for name, positions in found.items()}

    held = HeldKeys.of(found, num_keys)

    assert {(one.tier, one.variant): set(one.marks(num_keys).nonzero()[0].tolist()) for one in held} == found
    assert all(len(one.bits) == -(-num_keys // 8) for one in held)


def test_an_answer_to_another_question_is_refused() -> None:
    [held] = HeldKeys.of({(TierName.HBM, "fp32"): [3]}, 8)

    with pytest.raises(ValueError, match="1 bytes say nothing of 9 keys"):
        held.marks(9)


def test_joined_keys_are_split_where_they_are_whole() -> None:
    keys = [bytes([number]) * PAGE_KEY_BYTES for number in range(3)]

    assert split_keys(b"".join(keys)) == keys
    assert split_keys(b"") == []
    with pytest.raises(ValueError, match="33 bytes are no whole number of keys, 32 each"):
        split_keys(bytes(33))


def test_of_many_keys_that_are_alike_few_are_named() -> None:
    keys = [bytes([0x12, 0x34]) + number.to_bytes(30, "big") for number in range(100_000)]
    head = keys[70_000].hex()[:62]  # all but the last byte

    alike, none, last = keys_with(keys, ["1234", "1235", head], 300)

    assert (len(alike), none) == (300, [])
    assert set(last) == {key for key in keys if key[:31] == keys[70_000][:31]}
