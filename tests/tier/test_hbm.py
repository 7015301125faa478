"""L1's frames and copies beside loops over bytes. A CUDA device, where there is one, runs the same tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.hbm import Arena, FrameAllocator, new_arena
from kvtier.tier.page import PageFormat, PageSpec

SPECS = [
    PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_tokens=4, format=PageFormat.BF16),
    PageSpec(
        num_layers=3, num_kv_heads=1, head_dim=5, page_tokens=8, format=PageFormat.FP32
    ),  # padded records
    PageSpec(num_layers=1, num_kv_heads=2, head_dim=1, page_tokens=1, format=PageFormat.FP16),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]

each_spec = pytest.mark.parametrize("spec", SPECS, ids=["whole-records", "padded-records", "one-token"])
each_device = pytest.mark.parametrize("device", DEVICES)


def filled(spec: PageSpec, device: str, frames: int = 4) -> torch.Tensor:
    arena = new_arena(frames, spec.nbytes, device)
    arena.copy_(
        torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    )
    return arena


def bytes_of_tokens(spec: PageSpec, tokens: range) -> set[int]:
    """Offsets in a page of all keys and values of these tokens, by the words of PageSpec's docstring."""
    element = spec.format.element_bytes
    half = spec.num_kv_heads * spec.page_tokens * spec.head_dim * element
    record = -(-2 * half // 256) * 256
    return {
        layer * record + kv * half + ((head * spec.page_tokens + token) * spec.head_dim + i) * element + b
        for layer in range(spec.num_layers)
        for kv in range(2)
        for head in range(spec.num_kv_heads)
        for token in tokens
        for i in range(spec.head_dim)
        for b in range(element)
    }


@each_device
@each_spec
def test_a_page_copied_in_comes_out_the_same_and_touches_no_other_frame(spec: PageSpec, device: str) -> None:
    tensor = filled(spec, device)
    before = tensor.clone()
    arena = Arena(tensor)
    payload = np.random.default_rng(1).bytes(spec.nbytes)
    out = bytearray(spec.nbytes)

    arena.copy_in(2, memoryview(payload))
    arena.copy_out(2, memoryview(out))

    assert bytes(out) == payload
    before[2] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    assert torch.equal(tensor, before)


@each_device
@each_spec
def test_copy_page_copies_one_frame(spec: PageSpec, device: str) -> None:
    tensor = filled(spec, device)
    expected = tensor.clone()
    expected[0] = expected[3]

    Arena(tensor).copy_page(3, 0)

    assert torch.equal(tensor, expected)


@each_device
@each_spec
def test_copy_head_copies_exactly_the_first_tokens_rows(spec: PageSpec, device: str) -> None:
    for tokens in range(spec.page_tokens + 1):
        tensor = filled(spec, device)
        expected = tensor.cpu().clone()
        for at in bytes_of_tokens(spec, range(tokens)):
            expected[1, at] = expected[2, at]

        Arena(tensor).copy_head(2, 1, tokens, spec)

        assert torch.equal(tensor.cpu(), expected)


@each_device
@each_spec
def test_zero_tail_zeroes_exactly_the_rows_behind(spec: PageSpec, device: str) -> None:
    for from_token in range(spec.page_tokens + 1):
        tensor = filled(spec, device)
        expected = tensor.cpu().clone()
        for at in bytes_of_tokens(spec, range(from_token, spec.page_tokens)):
            expected[1, at] = 0

        Arena(tensor).zero_tail(1, from_token, spec)

        assert torch.equal(tensor.cpu(), expected)


def test_copies_work_on_a_view_into_a_larger_arena() -> None:
    spec = SPECS[0]
    whole = filled(spec, "cpu")
    before = whole.clone()

    Arena(whole[1:]).copy_head(0, 1, spec.page_tokens, spec)

    assert torch.equal(whole[2], before[1])
    assert torch.equal(whole[[0, 1, 3]], before[[0, 1, 3]])


def test_a_buffer_of_another_size_is_refused() -> None:
    spec = SPECS[0]
    arena = Arena(filled(spec, "cpu"))

    with pytest.raises(ValueError, match=f"{spec.nbytes} bytes, got 1"):
        arena.copy_in(0, memoryview(b"x"))
    with pytest.raises(ValueError, match=f"{spec.nbytes} bytes, got 2"):
        arena.copy_out(0, memoryview(bytearray(2)))


@pytest.mark.parametrize("frame", [-1, 4])
def test_a_frame_out_of_range_is_refused(frame: int) -> None:
    spec = SPECS[0]
    arena = Arena(filled(spec, "cpu"))

    with pytest.raises(AssertionError, match="no frame"):
        arena.copy_in(frame, memoryview(bytearray(spec.nbytes)))
    with pytest.raises(AssertionError, match="no frame"):
        arena.copy_page(0, frame)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 8), torch.zeros(8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8).T],
    ids=["float32", "1-d", "transposed"],
)
def test_a_tensor_that_is_no_arena_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        Arena(tensor)


def test_a_new_arena_is_zeroed_and_resident_and_outlives_its_maker() -> None:
    frames, page_bytes = 64, 100_000

    arena = new_arena(frames, page_bytes)

    assert arena.shape == (frames, page_bytes) and not arena.any()
    first, last = arena.data_ptr(), arena.data_ptr() + arena.nbytes - 1
    assert resident_bytes(first, last) >= arena.nbytes
    with pytest.raises(ValueError, match="0 frames"):
        new_arena(0, 1)


def resident_bytes(first: int, last: int) -> int:
    """Rss of the mappings that hold these addresses."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(x, 16) for x in head.split("-"))
            inside = start <= last and end > first
        elif inside and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40), st.integers(0, 20))
def test_frames_are_handed_out_once_within_the_budget(steps: list[tuple[bool, int]], num_frames: int) -> None:
    allocator = FrameAllocator(num_frames, page_bytes=10)
    held: list[int] = []
    for give_back, n in steps:
        if give_back:
            allocator.free(held[:n])
            del held[:n]
        else:
            frames = allocator.alloc(n)
            assert (frames is None) == (n > num_frames - len(held))
            held += frames or []
        allocator.check()
        assert len(set(held)) == len(held) and set(held) <= set(range(num_frames))
        assert allocator.used_bytes == 10 * len(held) <= allocator.capacity_bytes == 10 * num_frames
        assert allocator.free_frames == num_frames - len(held)


def test_a_frame_freed_twice_is_noticed() -> None:
    allocator = FrameAllocator(2, page_bytes=1)
    frames = allocator.alloc(1)
    assert frames is not None
    allocator.free(frames)

    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(frames)
