"""Decisions hold: the same steps draft the same, and deciding and observing are rare while nothing is drafted."""

from __future__ import annotations

import pytest

from foretoken.control.capped import Capped
from foretoken.control.goodput_controller import Goodput
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.core.free_memory import Memory
from foretoken.costs.model import CostModel
from foretoken.costs.tuning import Tuning

from .world import PLAIN, World, chance


def counted(controller: Capped) -> Capped:
    """``controller``, which counts how often it decides and observes."""
    decide, observe = controller.decide, controller.observe

    def deciding(batch):
        controller.decided += 1
        return decide(batch)

    def observing(contexts, steps):
        controller.observed += 1
        observe(contexts, steps)

    controller.decided = controller.observed = 0
    controller.decide, controller.observe = deciding, observing
    return controller


def world(right, *, resting: bool = True, fixed: bool = False, **kwargs) -> tuple[World, Capped]:
    tuning = Tuning() if resting else Tuning(skipped=0)
    costs = CostModel(tuning)
    controller = counted(Capped(8, costs, Ledger(0.005)) if fixed else Goodput(16, costs, Ledger(0.005)))
    made = World(controller, right, **kwargs)
    made.warm_up(costs)
    return made, controller


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("step", [0.0005, PLAIN / 4, PLAIN])
def test_the_same_steps_draft_the_same(batch, step):
    """Wrong for long, then right: a try that was due is made when it was due, and what lands is found."""
    drafted = []
    for resting in (True, False):
        made, controller = world(lambda s, position, depth: position > 400, resting=resting, step=step)
        for _ in range(batch):
            made.add()
        while made.tokens < 600 * batch:
            made.decode()
        drafted.append(made.drafted)
        steps = len(made.drafted)
        assert controller.decided <= controller.observed
        assert controller.observed < 0.75 * steps if resting else controller.observed == steps
    assert drafted[0] == drafted[1]


def test_what_is_too_slow_is_hardly_ever_thought_about():
    made, controller = world(chance(1.0), step=PLAIN)
    for _ in range(4):
        made.add()
    for _ in range(512):
        made.decode()
    assert sum(map(bool, made.drafted)) <= controller.tuning.hold  # one decision proves the warm-up right
    assert controller.observed < 0.25 * 512


def test_an_account_that_is_empty_fills_while_nobody_looks():
    """A fixed number under the guard, always wrong: what may be lost does not depend on how often that is checked."""
    drafted = []
    for resting in (True, False):
        made, controller = world(chance(0.0), resting=resting, fixed=True)
        made.add()
        for _ in range(2000):
            made.decode()
        drafted.append(sum(map(bool, made.drafted)))
        assert made.elapsed < 1.01 * made.plain
        assert not resting or controller.observed < 0.7 * 2000
    assert drafted[0] == pytest.approx(drafted[1], rel=0.05)


def test_who_joins_or_leaves_is_noticed():
    made, controller = world(chance(0.0), step=PLAIN)
    made.add()
    while controller.observed == len(made.drafted):
        made.decode()
    asked = controller.observed
    other = made.add()
    made.decode()
    assert controller.observed == asked + 1
    while controller.observed == asked + 1:
        made.decode()
    made.end(other)
    asked = controller.observed
    made.decode()
    assert controller.observed == asked + 1


def test_memory_is_watched_in_every_step():
    clock = []
    watch = MemoryWatch(16, lambda: Memory(free=0, limit=2**30), clock=lambda: clock.append(1) or 0.0)
    made = World(Goodput(16, CostModel(), memory=watch), chance(0.0))
    made.add()
    for _ in range(64):
        made.decode()
    assert len(clock) == 64 and not any(made.drafted)
