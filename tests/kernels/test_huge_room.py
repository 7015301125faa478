"""Weights lie side by side in huge pages, and what loading left behind goes back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.kernels.memory import HugeRoom


@given(sizes=st.lists(st.integers(0, 5000), max_size=30), chunk=st.sampled_from([0, 4096, 1 << 21]))
def test_buffers_of_a_room_are_apart_and_aligned(sizes: list[int], chunk: int) -> None:
    room = HugeRoom(chunk)

    taken = [room.take(size) for size in sizes]
    for number, buffer in enumerate(taken):
        buffer.fill_(number)

    assert [len(buffer) for buffer in taken] == sizes
    assert all(bool((buffer == number).all()) for number, buffer in enumerate(taken))
    assert all(buffer.data_ptr() % 64 == 0 for buffer in taken if len(buffer))


def test_small_buffers_share_their_pages() -> None:
    room = HugeRoom()

    buffers = [room.take(1000) for _ in range(100)]

    assert len({buffer.untyped_storage().data_ptr() for buffer in buffers}) == 1
    assert isinstance(buffers[0], torch.Tensor)
