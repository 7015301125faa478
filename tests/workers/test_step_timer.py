"""A step's cost is what the device took for it, not what queueing it took."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvtier.workers.runner.step_timer import DeviceTimer, HostTimer, step_timer


@dataclass
class Device:
    """A stream on which time passes only when it is told to."""

    now_ms: float = 0.0
    queued: list[FakeEvent] = field(default_factory=list)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def reach(self, count: int, ms: float) -> None:
        """The device gets to the next events, `ms` after each other."""
        for _ in range(count):
            self.now_ms += ms
            self.queued.pop(0).at_ms = self.now_ms


@dataclass
class FakeEvent:
    device: Device
    at_ms: float | None = None

    def record(self) -> None:
        self.device.queued.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.at_ms is not None and end_event.at_ms is not None
        return end_event.at_ms - self.at_ms


def test_a_queued_step_has_no_cost_until_the_device_is_behind_it() -> None:
    device = Device()
    timer = DeviceTimer(device.event)
    timer.begin()
    timer.end([(0, 512)])
    assert timer.finished() == []
    device.reach(1, 7.0)
    assert timer.finished() == []
    device.reach(1, 40.0)
    assert timer.finished() == [([(0, 512)], 0.04)]
    assert timer.finished() == []


def test_steps_queued_behind_each_other_are_told_apart() -> None:
    device = Device()
    timer = DeviceTimer(device.event)
    for chunk in range(3):
        timer.begin()
        timer.end([(512 * chunk, 512)])
    device.reach(6, 10.0)
    assert timer.finished() == [([(0, 512)], 0.01), ([(512, 512)], 0.01), ([(1024, 512)], 0.01)]


def test_steps_past_the_bound_are_not_measured() -> None:
    device = Device()
    timer = DeviceTimer(device.event, max_pending=2)
    for chunk in range(5):
        timer.begin()
        timer.end([(chunk, 1)])
    assert len(device.queued) == 4
    device.reach(4, 1.0)
    assert [rows for rows, _ in timer.finished()] == [[(0, 1)], [(1, 1)]]
    timer.begin()
    timer.end([(5, 1)])
    device.reach(2, 1.0)
    assert [rows for rows, _ in timer.finished()] == [[(5, 1)]]


def test_on_a_processor_a_step_is_over_when_its_forward_returns() -> None:
    times = iter([1.0, 1.25])
    timer = HostTimer(lambda: next(times))
    timer.begin()
    timer.end([(0, 16)])
    assert timer.finished() == [([(0, 16)], 0.25)]
    assert timer.finished() == []
    assert isinstance(step_timer(torch.device("cpu")), HostTimer)
