"""L1's frames and copies beside loops over bytes. A CUDA device, where there is one, runs the same tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.l1.arena import Arena, SlabAllocator, new_arena
from kvtier.tier.l1.frame_fences import FrameFences
from kvtier.tier.pages.page import PageFormat, PageSpec

SPECS = {
    "whole-records": PageSpec(
        num_layers=2, num_kv_heads=2, head_dim=16, page_tokens=4, format=PageFormat.BF16
    ),
    "padded-records": PageSpec(
        num_layers=3, num_kv_heads=1, head_dim=5, page_tokens=8, format=PageFormat.FP32
    ),
    "one-token": PageSpec(num_layers=1, num_kv_heads=2, head_dim=1, page_tokens=1, format=PageFormat.FP16),
    "fp8": PageSpec(num_layers=2, num_kv_heads=2, head_dim=8, format=PageFormat.FP8),
    "k8v4": PageSpec(num_layers=2, num_kv_heads=1, head_dim=16, format=PageFormat.K8V4),
    "int4": PageSpec(num_layers=1, num_kv_heads=2, head_dim=8, format=PageFormat.INT4),
    "latents": PageSpec(num_layers=2, num_kv_heads=1, head_dim=16, format=PageFormat.FP8, rope_dim=8),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_device = pytest.mark.parametrize("device", DEVICES)


def filled(spec: PageSpec, device: str, frames: int = 4) -> torch.Tensor:
    arena = new_arena(frames, spec.nbytes, device)
    arena.copy_(
        torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    )
    return arena


def bytes_of_tokens(spec: PageSpec, tokens: range) -> set[int]:
    """Offsets in a page of all that it holds of these tokens: codes, and the scales that belong to a token."""
    return {
        layer * spec.record_bytes
        + section.offset
        + (head * section.tokens + token) * section.row_bytes
        + byte
        for layer in range(spec.num_layers)
        for section in spec.sections
        for head in range(section.heads)
        for token in tokens
        for byte in range(section.row_bytes)
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
def test_pages_of_any_size_lie_at_their_first_unit(device: str) -> None:
    tensor = new_arena(8, 100, device)
    arena = Arena(tensor)
    long, short = bytes(range(250)), b"x" * 100

    arena.copy_in(1, memoryview(long))
    arena.copy_in(4, memoryview(short))
    arena.move(1, 5, 250)
    arena.copy_in(1, memoryview(short))

    out = bytearray(250)
    arena.copy_out(5, memoryview(out))
    assert bytes(out) == long
    flat = bytes(tensor.cpu().numpy().reshape(-1))
    assert flat == bytes(100) + short + long[100:] + bytes(50) + short + long + bytes(50)


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
    spec = SPECS["whole-records"]
    whole = filled(spec, "cpu")
    before = whole.clone()

    Arena(whole[1:]).copy_head(0, 1, spec.page_tokens, spec)

    assert torch.equal(whole[2], before[1])
    assert torch.equal(whole[[0, 1, 3]], before[[0, 1, 3]])


def test_a_page_that_ends_behind_the_arena_is_refused() -> None:
    arena = Arena(new_arena(4, 10))

    arena.copy_in(2, memoryview(bytes(20)))
    with pytest.raises(ValueError, match="a page of 21 bytes at unit 2 of 4 ends behind the arena"):
        arena.copy_in(2, memoryview(bytes(21)))
    with pytest.raises(ValueError, match="a page of 31 bytes at unit 1 of 4"):
        arena.copy_out(1, memoryview(bytearray(31)))


@pytest.mark.parametrize("frame", [-1, 4])
def test_a_frame_out_of_range_is_refused(frame: int) -> None:
    arena = Arena(new_arena(4, 10))

    with pytest.raises(AssertionError, match="no frame"):
        arena.copy_in(frame, memoryview(bytes(10)))
    with pytest.raises(AssertionError, match="no frame"):
        arena.move(frame, 0, 10)


def test_frames_that_overlap_are_not_copied_over_each_other() -> None:
    with pytest.raises(AssertionError, match="frames 1 and 2 overlap"):
        Arena(new_arena(4, 10)).move(1, 2, 20)


def test_a_page_without_bytes_of_single_tokens_has_no_head_or_tail() -> None:
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=8, format=PageFormat.INT4C)
    arena = Arena(filled(spec, "cpu"))

    with pytest.raises(ValueError, match="int4c has no bytes of single tokens"):
        arena.copy_head(0, 1, 3, spec)
    with pytest.raises(ValueError, match="int4c has no bytes of single tokens"):
        arena.zero_tail(0, 3, spec)


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
    with pytest.raises(ValueError, match="0 units"):
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
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40), st.integers(1, 20))
def test_frames_of_one_size_are_page_numbers_handed_out_once(
    steps: list[tuple[bool, int]], num_frames: int
) -> None:
    slabs = SlabAllocator(num_frames, [1])
    held: list[int] = []
    for give_back, n in steps:
        if give_back:
            for frame in held[:n]:
                slabs.give_back(frame)
            del held[:n]
        else:
            frames = slabs.alloc(1, n)
            assert len(frames) == min(n, num_frames - len(held))
            held += frames
        slabs.check()
        assert len(set(held)) == len(held) and set(held) <= set(range(num_frames))
        assert slabs.used_units == len(held) == num_frames - slabs.free[1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
    st.integers(5, 400),
    st.lists(st.tuples(st.sampled_from(["alloc", "free", "vacate"]), st.integers(0, 40)), max_size=60),
)
def test_pages_of_several_sizes_never_overlap_and_can_always_be_brought_together(
    sizes: list[int], num_units: int, steps: list[tuple[str, int]]
) -> None:
    slabs = SlabAllocator(num_units, sizes)
    held: dict[int, int] = {}  # frame -> size
    for step, n in steps:
        size = sizes[n % len(sizes)]
        if step == "alloc":
            held.update(dict.fromkeys(slabs.alloc(size, n), size))
        elif step == "free":
            for frame in sorted(held, key=lambda frame: frame * 7919 % 101)[:n]:
                slabs.give_back(frame)
                del held[frame]
        else:
            starved = slabs.surplus(size)
            moved = {} if starved is None else slabs.vacate(starved, in_copy=())
            assert moved is not None
            held = {moved.get(frame, frame): size for frame, size in held.items()}
        slabs.check()
        units = [unit for frame, size in held.items() for unit in range(frame, frame + size)]
        assert len(set(units)) == len(units) == slabs.used_units
        assert all(0 <= unit < num_units for unit in units)
        assert all(slabs.size_of(frame) == size for frame, size in held.items())
    while (freed := slabs.surplus(but=0)) is not None and len(sizes) > 1:
        moved = slabs.vacate(freed, in_copy=())
        assert moved is not None
        held = {moved.get(frame, frame): size for frame, size in held.items()}
    pages = {size: list(held.values()).count(size) for size in sizes}
    assert slabs.can_hold(pages)


def test_a_slab_with_a_copy_in_it_is_not_emptied() -> None:
    slabs = SlabAllocator(80, [1, 5])  # 4 slabs of 20 units
    frames = slabs.alloc(5, 8)
    for frame in (frames[1], frames[2], frames[3], frames[5]):
        slabs.give_back(frame)

    assert slabs.surplus(but=1) == 5
    assert slabs.vacate(5, in_copy={frames[0], frames[4]}) is None
    moved = slabs.vacate(5, in_copy={frames[4]})

    assert moved is not None
    assert list(moved) == [frames[0]]
    assert sorted(slabs.alloc(1, 61)) == [*range(20), *range(40, 80)]


@pytest.mark.parametrize(("num_units", "sizes"), [(4, [5]), (4, [1, 5]), (4, []), (4, [0])])
def test_an_arena_without_room_for_a_page_of_each_size_is_refused(num_units: int, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="4 units can't hold"):
        SlabAllocator(num_units, sizes)


def test_a_slab_is_at_most_a_64th_of_a_large_arena_and_holds_8_pages_of_a_small_one() -> None:
    assert SlabAllocator(1_000_000, [1, 10]).slab_units <= 1_000_000 // 64
    assert SlabAllocator(1600, [1, 10]).slab_units == 80


def test_a_frame_freed_twice_is_noticed() -> None:
    slabs = SlabAllocator(2, [1])
    (frame,) = slabs.alloc(1, 1)
    slabs.give_back(frame)

    with pytest.raises(AssertionError, match="freed twice"):
        slabs.give_back(frame)


def test_copies_that_are_queued_mark_the_units_of_both_frames() -> None:
    """What `move` and `copy_head` queue on a device is waited for by the page copies behind it."""
    spec = SPECS["fp8"]
    units = 3 * -(-spec.nbytes // 100)
    tensor = new_arena(units, 100)
    fences: FrameFences[int] = FrameFences(units, iter(range(1, 9)).__next__)
    arena = Arena(tensor, fences)  # type: ignore[arg-type]
    arena._host = None  # as on a device
    size = units // 3
    tensor[:size] = 7

    arena.move(0, size, spec.nbytes)
    arena.copy_head(size, 2 * size, spec.page_tokens, spec)

    assert tensor.view(-1)[100 * size : 100 * size + spec.nbytes].eq(7).all()
    assert [fences.last_write(n * size, (n + 1) * size) for n in range(3)] == [None, 1, 2]
    assert [fences.last_use(n * size, (n + 1) * size) for n in range(3)] == [1, 2, 2]
    assert fences.last_write(2 * size - 1, 2 * size) == 1, "the last unit of a page that fills it in part"
