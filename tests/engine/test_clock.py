"""Times of a step's phases on a device, whose events the host reads without waiting."""

from __future__ import annotations

import pytest
import torch

from foretoken.core import devices
from foretoken.engine.clock import StepClock


class Event:
    """An event of a device whose clock stands at ``now``."""

    now, reached = 0.0, 1e9

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "an event that was not reached has no time"
        return (later.at - self.at) * 1e3


def test_times_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    host = iter([0.0, 1.0, 2.0, 3.0, 6.0, 7.0, 7.5])
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(host))
    clock = StepClock(torch.device("cuda"))
    for now in (0.0, 4.0, 9.0, 10.0, 14.0, 14.5):  # the host is busy elsewhere between the fourth and the fifth
        Event.now = now
        clock.start() if now == 0.0 else clock.lap()
    Event.now, Event.reached = 20.0, 15.0  # the device is late with the last part
    times = clock.timings(1, 0)
    assert (times.propose, times.score, times.verify, times.commit) == (4.0, 5.0, 1.5, 0.5)
