import pytest

from foretoken.control.fixed import Fixed
from foretoken.control.memory import MemoryWatch
from foretoken.core.context import Context
from foretoken.core.devices import Memory
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams

GIB = 2**30
CONTEXT = Context(0, [0], 1, SamplingLaw(), Streams(0))


def watched(*read_and_clock) -> Fixed:
    return Fixed(8, MemoryWatch(8, *read_and_clock))


class Machine:
    """4 GiB, of which so much is free; time passes by a second a look."""

    def __init__(self) -> None:
        self.free, self.now = GIB, 0.0
        self.controller = watched(lambda: Memory(self.free, 4 * GIB), lambda: self.now)

    def budget(self, looks: int = 1, depth: int | None = None) -> int:
        context = Context(0, [0], 1, SamplingLaw(), Streams(0), depth=depth)
        for _ in range(looks):
            self.now += 1.0
            budget = self.controller.budgets([context], [100])[0]
        return budget


def test_drafting_shrinks_stops_and_comes_back():
    machine = Machine()
    assert machine.budget() == 8
    machine.free = int(0.05 * 4 * GIB)
    assert [machine.budget() for _ in range(5)] == [4, 2, 1, 0, 0]
    machine.free = GIB
    assert machine.budget(5) == 0  # not at once
    assert [machine.budget(20) for _ in range(4)] == [1, 2, 4, 8]
    assert machine.budget(200) == 8


def test_it_stops_at_once_when_little_is_left():
    machine = Machine()
    machine.free = int(0.02 * 4 * GIB)
    assert machine.budget() == 0
    assert machine.budget(depth=100) == 0


def test_between_the_two_thresholds_nothing_changes():
    machine = Machine()
    machine.free = int(0.05 * 4 * GIB)
    assert machine.budget() == 4
    machine.free = int(0.1 * 4 * GIB)
    assert machine.budget(500) == 4


def test_nothing_is_limited_where_nothing_can_be_known():
    controller = watched(lambda: None)
    assert controller.budgets([CONTEXT], [100]) == [8]


def test_it_looks_seldom():
    looks = []

    def read() -> Memory:
        looks.append(1)
        return Memory(GIB, 4 * GIB)

    controller = watched(read, lambda: 1.0)
    for _ in range(100):
        controller.budgets([CONTEXT], [100])
    assert len(looks) == 1


@pytest.mark.parametrize("free, looks", [(2.0, 10), (0.4, 40), (0.2, 200)])
def test_it_looks_more_often_the_less_there_is(free, looks):
    """Within ten seconds."""
    seen, now = [], [0.0]

    def read() -> Memory:
        seen.append(1)
        return Memory(int(free * GIB), 4 * GIB)

    controller = watched(read, lambda: now[0])
    for i in range(1000):
        now[0] = i / 100
        controller.budgets([CONTEXT], [100])
    assert looks * 0.8 <= len(seen) <= looks + 1


def test_a_step_of_no_requests_has_no_budgets():
    assert watched(lambda: None).budgets([], []) == []
