"""What pages in lent frames are checked by, on a CPU; a CUDA device, where there is one, gives the same digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.pages.page import PageFormat, PageKey, PageSpec, page_checksum
from kvtier.workers.paging.frame_checks import SEED, DeviceChecks, FramePage, HostChecks, page_checks

KEY, OTHER = PageKey(b"k" * 32), PageKey(b"o" * 32)
SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_tokens=4, format=PageFormat.BF16)
SMALL = PageSpec(num_layers=1, num_kv_heads=2, head_dim=16, page_tokens=4, format=PageFormat.BF16)
WORDS = SPEC.nbytes // 4


def arena_of(units: int = 6, seed: int = 0) -> torch.Tensor:
    """Units of a SMALL page's size."""
    drawn = np.random.default_rng(seed).integers(0, 256, (units, SMALL.nbytes), np.uint8)
    return torch.from_numpy(drawn)


def digest(arena: torch.Tensor, frame: int = 0, key: PageKey = KEY, spec: PageSpec = SPEC) -> bytes:
    (taken,) = DeviceChecks(arena).take([FramePage(frame, key, spec)])
    return taken


def by_hand(payload: bytes, key: PageKey, spec: PageSpec) -> bytes:
    """The digest as integers of any length have it."""
    words = np.frombuffer(payload, np.int32).tolist()
    drawn = [int(m) | 1 for m in np.random.PCG64(SEED).random_raw(2 * len(words))]
    lanes = [
        sum(w * m for w, m in zip(words, drawn[at : at + len(words)], strict=True)) % 2**64
        for at in (0, len(words))
    ]
    sums = b"".join(lane.to_bytes(8, "little") for lane in lanes)
    return page_checksum(key, spec.format.value, spec.digest, sums)


def test_a_digest_is_two_sums_of_a_pages_words_and_its_names() -> None:
    arena = arena_of()
    payload = arena.numpy().tobytes()

    assert digest(arena, 2) == by_hand(payload[2 * SMALL.nbytes :][: SPEC.nbytes], KEY, SPEC)
    assert len({digest(arena), digest(arena, key=OTHER), digest(arena, spec=SMALL), digest(arena, 1)}) == 4


def test_many_pages_of_several_sizes_are_digested_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.workers.paging.frame_checks.MOST_BYTES", 2 * SPEC.nbytes)
    arena = arena_of(32)
    pages = [FramePage(2 * i, KEY if i % 3 else OTHER, SMALL if i % 4 == 1 else SPEC) for i in range(15)]

    assert DeviceChecks(arena).take(pages) == [digest(arena, *page) for page in pages]
    assert DeviceChecks(arena).take([]) == []


@given(
    st.dictionaries(st.integers(0, WORDS - 1), st.integers(1, 2**32 - 1), min_size=1, max_size=WORDS),
    st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_changed_is_found(changes: dict[int, int], seed: int) -> None:
    arena = arena_of(2, seed)
    before = digest(arena)

    words = arena.numpy().reshape(-1).view(np.uint32)
    for word, bits in changes.items():
        words[word] ^= bits

    assert digest(arena) != before


@pytest.mark.parametrize("bit", range(32))
def test_one_data_line_that_fails_is_found_in_any_two_words(bit: int) -> None:
    """Sums of whole 64-bit words would cancel out where their highest bits flip in pairs."""
    arena = arena_of(2)
    before = digest(arena)
    words = arena.numpy().reshape(-1).view(np.uint32)
    for first in range(0, WORDS, 7):
        for second in range(first + 1, WORDS, 11):
            words[[first, second]] ^= np.uint32(1 << bit)
            assert digest(arena) != before
            words[[first, second]] ^= np.uint32(1 << bit)
    assert digest(arena) == before


def test_pages_that_changed_places_or_were_moved_by_a_word_are_found() -> None:
    arena = arena_of(2)
    before = digest(arena)
    words = arena.numpy().reshape(-1).view(np.uint32)

    words[[3, 4]] = words[[4, 3]]
    swapped = digest(arena)
    words[[3, 4]] = words[[4, 3]]
    words[:] = np.roll(words, 1)

    assert len({before, swapped, digest(arena)}) == 3


def test_in_host_memory_it_is_the_checksum_of_all_tiers() -> None:
    arena = arena_of()
    payload = arena.numpy().tobytes()[: SPEC.nbytes]
    checks = page_checks(arena)

    assert isinstance(checks, HostChecks) and checks.are_checksums
    assert checks.take([FramePage(0, KEY, SPEC)]) == [
        page_checksum(KEY, SPEC.format.value, SPEC.digest, payload)
    ]


def test_an_arena_whose_units_are_no_words_is_refused() -> None:
    with pytest.raises(ValueError, match="units of 30 bytes aren't whole words"):
        DeviceChecks(torch.zeros(4, 30, dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_digests() -> None:
    arena = arena_of(32)
    pages = [FramePage(2 * i, KEY, SPEC) for i in range(15)]
    on_gpu = page_checks(arena.cuda())

    assert isinstance(on_gpu, DeviceChecks)
    assert on_gpu.take(pages) == DeviceChecks(arena).take(pages)
