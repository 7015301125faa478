"""SegmentAllocator against a dict of what is handed out."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.tier.stores.base import Place, SegmentAllocator

KIB = 1024
SIZES = [8 * KIB, 12 * KIB, 36 * KIB, 100 * KIB]


class AllocatorMachine(RuleBasedStateMachine):
    """The model: place -> slot size, for everything handed out."""

    @initialize(
        capacity=st.integers(0, 1000 * KIB), segment=st.sampled_from([40 * KIB, 100 * KIB, 128 * KIB])
    )
    def start(self, capacity: int, segment: int) -> None:
        self.allocator = SegmentAllocator(capacity, segment)
        self.held: dict[Place, int] = {}
        self.closed: set[int] = set()

    def _sizes_of_segments(self) -> dict[int, int]:
        return {place.segment: size for place, size in self.held.items()}

    def _has_room(self, size: int) -> bool:
        slots = self.allocator.segment_bytes // size
        segments = self._sizes_of_segments()
        if slots and len(segments) < self.allocator.num_segments:
            return True
        used = [
            place.segment
            for place, held in self.held.items()
            if held == size and place.segment not in self.closed
        ]
        return any(used.count(segment) < slots for segment in set(used))

    @rule(size=st.sampled_from(SIZES))
    def alloc(self, size: int) -> None:
        has_room = self._has_room(size)

        place = self.allocator.alloc(size)

        assert (place is not None) == has_room
        if place is not None:
            assert place not in self.held
            assert (place.index + 1) * size <= self.allocator.segment_bytes
            assert self._sizes_of_segments().get(place.segment, size) == size
            self.held[place] = size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.held)))

        self.allocator.free(place)

        del self.held[place]
        self.closed &= self._sizes_of_segments().keys()

    @rule(size=st.sampled_from(SIZES))
    def alloc_where_the_size_is(self, size: int) -> None:
        segments = {segment for segment, held in self._sizes_of_segments().items() if held == size}

        place = self.allocator.alloc(size, may_start=False)

        if place is not None:
            assert place.segment in segments - self.closed and place not in self.held
            self.held[place] = size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self._sizes_of_segments())))
        self.allocator.close(segment)
        self.closed.add(segment)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def reopen(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.closed)))
        self.allocator.reopen(segment)
        self.closed.remove(segment)

    @rule(segment=st.integers(0, 12), index=st.integers(0, 16), size=st.sampled_from(SIZES))
    def take(self, segment: int, index: int, size: int) -> None:
        place = Place(segment, index)
        possible = (
            segment < self.allocator.num_segments
            and (index + 1) * size <= self.allocator.segment_bytes
            and place not in self.held
            and self._sizes_of_segments().get(segment, size) == size
        )

        assert self.allocator.take(place, size) == possible

        if possible:
            self.held[place] = size

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert self.allocator.used_bytes == sum(self.held.values())
            assert all(self.allocator.slot_size(place) == size for place, size in self.held.items())
            assert dict(self.allocator.segments()) == self._sizes_of_segments()
            for segment in self._sizes_of_segments():
                assert set(self.allocator.used_in(segment)) == {p for p in self.held if p.segment == segment}


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_a_freed_segment_serves_another_size() -> None:
    allocator = SegmentAllocator(100 * KIB, 100 * KIB)
    places = [allocator.alloc(20 * KIB) for _ in range(5)]
    assert allocator.alloc(20 * KIB) is None
    assert allocator.alloc(50 * KIB) is None

    for place in places:
        assert place is not None
        allocator.free(place)

    assert allocator.alloc(50 * KIB) is not None
    allocator.check()


def test_a_catalogue_of_many_pages_is_claimed_in_linear_time() -> None:
    """One segment of 50,000 slots: a list search per claim would take minutes."""
    allocator = SegmentAllocator(50_000 * 8 * KIB, 50_000 * 8 * KIB)

    assert all(allocator.take(Place(0, index), 8 * KIB) for index in range(50_000))

    assert allocator.alloc(8 * KIB) is None


def test_a_place_that_its_segment_does_not_have_leaves_the_segment_free() -> None:
    """A damaged catalogue may name any place; the segment it names was begun and never free again."""
    allocator = SegmentAllocator(40_960, 40_960)

    assert not allocator.take(Place(0, 1), 36_864)

    allocator.check()
    assert allocator.alloc(4_096) == Place(0, 0)
