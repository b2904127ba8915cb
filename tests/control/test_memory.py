from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.control.controls import CONTROLS, build, most, parse
from foretoken.control.doze import Doze
from foretoken.control.fixed import Fixed
from foretoken.control.goodput import Goodput
from foretoken.control.guard import Guard
from foretoken.control.memory import Free, Memory, MemoryWatch
from foretoken.control.tempo import Tempo
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams

GIB = 2**30
CONTEXT = Context(0, [0], 1, SamplingLaw(), Streams(0))


class Machine:
    """4 GiB, of which so much is free; time passes by a second a look."""

    def __init__(self) -> None:
        self.free, self.now = GIB, 0.0
        self.watch = MemoryWatch(Fixed(8), lambda: Memory(self.free, 4 * GIB), lambda: self.now)

    def budget(self, looks: int = 1, depth: int | None = None) -> int:
        context = Context(0, [0], 1, SamplingLaw(), Streams(0), depth=depth)
        for _ in range(looks):
            self.now += 1.0
            budget = self.watch.budgets([context], [100])[0]
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
    watch = MemoryWatch(Fixed(8), lambda: None)
    assert watch.budgets([CONTEXT], [100]) == [8]


def test_it_looks_seldom():
    looks = []

    def read() -> Memory:
        looks.append(1)
        return Memory(GIB, 4 * GIB)

    watch = MemoryWatch(Fixed(8), read, lambda: 1.0)
    for _ in range(100):
        watch.budgets([CONTEXT], [100])
    assert len(looks) == 1


@pytest.mark.parametrize("free, looks", [(2.0, 10), (0.4, 40), (0.2, 200)])
def test_it_looks_more_often_the_less_there_is(free, looks):
    """Within ten seconds."""
    seen, now = [], [0.0]

    def read() -> Memory:
        seen.append(1)
        return Memory(int(free * GIB), 4 * GIB)

    watch = MemoryWatch(Fixed(8), read, lambda: now[0])
    for i in range(1000):
        now[0] = i / 100
        watch.budgets([CONTEXT], [100])
    assert looks * 0.8 <= len(seen) <= looks + 1


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


PROC = {"meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n"}


@pytest.mark.parametrize(
    "group, where, current, limit",
    [
        ("0::/box/inner", "box/", "memory.current", "memory.max"),
        ("0::/", "", "memory.current", "memory.max"),
        ("4:cpu,memory:/box", "memory/box/", "memory.usage_in_bytes", "memory.limit_in_bytes"),
    ],
)
def test_the_tightest_limit_counts(tmp_path, group, where, current, limit):
    """A control group of either version, be it the process's own or one above it."""
    proc = files(tmp_path / "proc", PROC | {"self/cgroup": group + "\n"})
    name = "inactive_file" if limit == "memory.max" else "total_inactive_file"
    groups = files(
        tmp_path / "groups",
        {where + limit: str(GIB), where + current: str(GIB - 1000), where + "memory.stat": f"anon 5\n{name} 400\n"},
    )
    assert Free(torch.device("cpu"), proc, groups)() == Memory(1400, GIB)


def test_without_limits_the_machine_counts(tmp_path):
    proc = files(tmp_path / "proc", PROC | {"self/cgroup": "0::/\n"})
    groups = files(tmp_path / "groups", {"memory.max": "max", "memory.current": "7"})
    assert Free(torch.device("cpu"), proc, groups)() == Memory(4 * GIB, 8 * GIB)


def test_where_nothing_is_told_nothing_is_known(tmp_path, monkeypatch):
    assert Free(torch.device("cpu"), tmp_path, tmp_path)._machine() is None
    real = Free(torch.device("cpu"))()
    assert real is None or real.free >= 0


# names


def test_controllers_by_name():
    tempo = Tempo()
    dozing = build(parse("goodput"), 16, torch.device("cpu"), tempo)
    assert isinstance(dozing, Doze)
    watched = dozing.inner
    assert isinstance(watched, MemoryWatch) and isinstance(watched.inner, Guard)
    assert isinstance(watched.inner.inner, Goodput)
    plain = build(parse({"name": "fixed", "memory": False}), 4, torch.device("cpu"), tempo)
    assert plain == Fixed(4)
    guard = build(parse({"name": "fixed", "guard": True, "memory": False}), 4, torch.device("cpu"), tempo)
    assert isinstance(guard, Doze) and isinstance(guard.inner, Guard) and guard.inner.inner == Fixed(4)


def test_most_nodes():
    assert most(parse("goodput"), 4, given=False) == 16
    assert most(parse("goodput"), 32, given=False) == 32
    assert most(parse("goodput"), 4, given=True) == 4
    assert most(parse({"name": "goodput", "max_tokens": 6}), 4, given=False) == 6
    assert most(parse("goodput"), 0, given=False) == 0
    assert most(parse("fixed"), 4, given=False) == 4


@pytest.mark.parametrize(
    "control, message",
    [
        ("fastest", "one of fixed, goodput, got 'fastest'"),
        ({"guard": True}, "one of fixed, goodput"),
        (3, "one of fixed, goodput"),
        ({"name": "fixed", "depth": 3}, "unknown key.s. in control: depth; known: name, allowance, guard, memory"),
        ({"name": "goodput", "guard": 1}, "guard of control must be true or false"),
        ({"name": "goodput", "max_tokens": 0}, "max_tokens of control must be an integer from 1 to 4096"),
        ({"name": "goodput", "allowance": "much"}, "allowance must be a number"),
    ],
)
def test_wrong_configurations_are_refused(control, message):
    with pytest.raises(InvalidRequest, match=message):
        parse(control)
    assert set(CONTROLS) == {"fixed", "goodput"}


def test_a_round_of_nobody_is_granted_nothing():
    assert MemoryWatch(Fixed(8), lambda: None).budgets([], []) == []
