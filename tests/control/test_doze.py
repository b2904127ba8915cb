"""Left alone while nothing is drafted: the same rounds draft the same, and deciding is rare."""

from __future__ import annotations

import pytest

from foretoken.control.base import Controller
from foretoken.control.doze import Doze
from foretoken.control.fixed import Fixed
from foretoken.control.goodput import Goodput
from foretoken.control.guard import Guard
from foretoken.control.memory import Memory, MemoryWatch
from foretoken.control.tempo import Tempo

from .world import PLAIN, World, chance


class Counted(Controller):
    """How often ``inner`` is asked and told."""

    def __init__(self, inner: Controller) -> None:
        self.inner, self.asked, self.told = inner, 0, 0

    def budgets(self, contexts, rooms):
        self.asked += 1
        return self.inner.budgets(contexts, rooms)

    def observe(self, steps):
        self.told += 1
        self.inner.observe(steps)

    def rest(self):
        return self.inner.rest()

    def rested(self, rounds):
        self.inner.rested(rounds)

    def forget(self, context):
        self.inner.forget(context)


def world(right, *, dozing: bool = True, fixed: bool = False, **kwargs) -> tuple[World, Counted]:
    tempo = Tempo()
    counted = Counted(Guard(Fixed(8) if fixed else Goodput(16, tempo), tempo))
    made = World(Doze(counted) if dozing else counted, right, **kwargs)
    made.rehearse(tempo)
    counted.asked = counted.told = 0
    return made, counted


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("step", [0.0005, PLAIN / 4, PLAIN])
def test_the_same_rounds_draft_the_same(batch, step):
    """Wrong for long, then right: a try that was due is made when it was due, and what lands is found."""
    drafted = []
    for dozing in (True, False):
        made, counted = world(lambda s, position, depth: position > 400, dozing=dozing, step=step)
        for _ in range(batch):
            made.add()
        while made.tokens < 600 * batch:
            made.round()
        drafted.append(made.drafted)
        rounds = len(made.drafted)
        assert counted.asked == counted.told
        assert counted.asked < 0.75 * rounds if dozing else counted.asked == rounds
    assert drafted[0] == drafted[1]


def test_what_is_too_slow_is_hardly_ever_thought_about():
    made, counted = world(chance(1.0), step=PLAIN)
    for _ in range(4):
        made.add()
    for _ in range(512):
        made.round()
    assert not any(made.drafted) and counted.asked < 0.2 * 512


def test_an_account_that_is_empty_fills_while_nobody_looks():
    """A fixed number under the guard, always wrong: what may be lost does not depend on how often that is checked."""
    drafted = []
    for dozing in (True, False):
        made, counted = world(chance(0.0), dozing=dozing, fixed=True)
        made.add()
        for _ in range(2000):
            made.round()
        drafted.append(sum(map(bool, made.drafted)))
        assert made.elapsed < 1.01 * made.plain
        assert not dozing or counted.asked < 0.7 * 2000
    assert drafted[0] == pytest.approx(drafted[1], rel=0.05)


def test_who_joins_or_leaves_is_noticed():
    made, counted = world(chance(0.0), step=PLAIN)
    made.add()
    while counted.asked == len(made.drafted):
        made.round()
    asked = counted.asked
    other = made.add()
    made.round()
    assert counted.asked == asked + 1
    while counted.asked == asked + 1:
        made.round()
    made.end(other)
    asked = counted.asked
    made.round()
    assert counted.asked == asked + 1


def test_where_memory_is_short_nobody_sleeps():
    tempo = Tempo()
    watch = MemoryWatch(Goodput(16, tempo), lambda: Memory(free=0, limit=2**30), clock=lambda: 0.0)
    made = World(Doze(counted := Counted(watch)), chance(0.0))
    made.add()
    for _ in range(64):
        made.round()
    assert counted.asked == 64
