"""The slowdown budget: whatever a proposer does, text takes hardly longer than without it."""

import random
from statistics import median

import pytest

from foretoken.control.config import FixedConfig
from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.errors import InvalidRequest

from .world import PLAIN, World, chance, flat, policy

ALLOWANCE, START = 0.01, 4.0


def guarded(max_tokens: int = 8, fixed: bool = False, allowance: float = ALLOWANCE) -> DraftPolicy:
    return policy(max_tokens, allowance, constant=fixed)


def lost(world: World) -> float:
    """Plain steps lost beyond the allowance."""
    return (world.elapsed - world.plain - ALLOWANCE * world.elapsed) / world.rows(1)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("step", [0.0, 0.0005, 0.004, PLAIN])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_random_draft_costs_the_allowance_at_most(fixed, step, batch):
    world = World(guard := guarded(fixed=fixed), chance(0.02), step=step, read=step / 16)
    world.warm_up(guard.costs)
    for _ in range(batch):
        world.add(prompt=200)
    world.run(200 * batch)
    assert lost(world) * world.rows(1) / world.rows(batch) < START + 1.0
    if not fixed:
        assert world.elapsed < 1.03 * world.plain


@pytest.mark.parametrize("fixed", [True, False])
def test_a_draft_as_large_as_the_target_is_left_alone(fixed):
    world = World(guarded(fixed=fixed), chance(1.0), step=PLAIN, read=0.001)
    world.add(prompt=100)
    world.run(600)
    assert lost(world) < START + 6.0  # the first draft's cost is not known before it is made
    before = world.elapsed - world.plain
    world.run(600)
    assert world.elapsed - world.plain - before < 0.02 * 600 * PLAIN


def test_a_gain_licenses_no_long_loss():
    """Right for 200 tokens, then wrong for 1000, again and again."""
    world = World(guarded(fixed=True), lambda s, position, depth: position % 1200 < 200, step=0.002)
    world.add()
    world.run(200)
    for _ in range(5):
        before = world.elapsed - world.plain
        world.run(1000)
        assert world.elapsed - world.plain - before < (16.0 + 2.0 + 0.01 * 1000) * PLAIN
        world.run(200)
    assert world.elapsed < world.plain


@pytest.mark.parametrize("fixed", [True, False])
def test_an_adversary_who_is_wrong_whenever_it_matters(fixed):
    """Right exactly as long as it has lost more than gained."""
    world = World(guarded(fixed=fixed), lambda *_: False, step=0.003)
    world.right = lambda *_: world.elapsed > world.plain + 2 * PLAIN
    world.add()
    world.run(4000)
    assert lost(world) < START + 1.0


def test_costs_that_change():
    """Drafting becomes thirty times dearer, then passes by rows do."""
    world = World(guarded(fixed=True), chance(0.7), step=0.001)
    world.add()
    world.run(1000)
    assert world.elapsed < 0.7 * world.plain
    for change in ("step", "rows"):
        before = world.elapsed - world.plain
        if change == "step":
            world.step = 0.030
        else:
            world.step, world.rows = 0.001, lambda rows: PLAIN * (1.0 + 1.5 * (rows - 1))
        world.run(1500)
        assert world.elapsed - world.plain - before < (16.0 + 20.0 + 0.02 * 1500) * PLAIN
        if change == "step":
            world.step = 0.001
            world.run(3000)


def test_batches_that_change():
    world = World(guarded(), lambda sequence, position, depth: False, step=0.001, read=0.0001)
    waves = (1, 16, 3, 8, 1, 12)
    for wave in waves:
        members = [world.add(prompt=64) for _ in range(wave)]
        world.run(100 * wave)
        for member in members:
            world.end(member)
    assert world.elapsed < 1.03 * world.plain


def test_a_good_draft_is_let_be():
    for fixed in (True, False):
        world = World(guarded(max_tokens=4, fixed=fixed), chance(0.8), step=0.0005)
        world.add()
        world.run(2000)
        free = World(Fixed(4), chance(0.8), step=0.0005)
        free.add()
        free.run(2000)
        assert world.elapsed < 1.04 * free.elapsed


def test_a_disturbance_is_not_the_proposers_doing():
    world = World(guarded(max_tokens=4, fixed=True), chance(0.8), step=0.0005)
    world.add()
    world.run(500)
    world.rows = lambda rows: 100 * flat(rows)
    world.decode()
    world.rows = flat
    drafted = len(world.drafted)
    world.run(300)
    assert sum(k > 0 for k in world.drafted[drafted:]) > 0.9 * len(world.drafted[drafted:])


def test_it_comes_back():
    world = World(guarded(), lambda sequence, position, depth: position > 1000, step=0.0005)
    world.add()
    world.run(1000)
    assert world.elapsed < 1.02 * world.plain
    before, plain = world.elapsed, world.plain
    world.run(1500)
    assert world.elapsed - before < 0.5 * (world.plain - plain)


def test_a_request_that_names_its_depth_has_it():
    world = World(guard := guarded(), chance(0.0), step=PLAIN)
    world.add(depth=5)
    world.add(depth=0)
    world.add()
    assert all(world.decode()[:2] == [5, 0] for _ in range(60))
    assert guard.ledger.balance is None or guard.ledger.balance > -10 * PLAIN


def test_the_cost_of_reading_the_prompt_is_counted_before_drafting():
    """Once the cost of reading is known, a long prompt is not read by a proposer that was no good."""
    world = World(guarded(), chance(0.0), step=0.0005, read=0.002)
    first = world.add(prompt=20)
    world.run(300)
    world.end(first)
    world.add(prompt=2000)
    before = world.elapsed - world.plain
    world.run(300)
    assert world.elapsed - world.plain - before < 8 * PLAIN


def test_plain_steps_are_timed_again():
    world = World(guarded(max_tokens=4, fixed=True), chance(0.8), step=0.0005)
    world.add()
    world.run(8000)
    plain = sum(k == 0 for k in world.drafted)
    assert 3 < plain < 0.03 * len(world.drafted)


def test_a_wrong_allowance_is_refused():
    with pytest.raises(InvalidRequest, match="allowance must be a number from 0 to 1"):
        FixedConfig(allowance=2.0)


def wander(world: World, numbers: random.Random, slow: float, share: float) -> float:
    """In a ``share`` of the steps the machine becomes 1.6 times as slow, or fast again; and there is noise."""
    slow = 2.6 - slow if numbers.random() < share else slow
    now = slow * numbers.gauss(1.0, 0.03)
    world.rows, world.step = lambda rows: now * flat(rows), 0.0006 * now
    return slow


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_whose_speed_wanders_makes_no_gain_of_a_loss(seed):
    """Plain steps timed in a slow spell do not excuse drafts that are made in a fast one."""
    numbers = random.Random(seed)
    world = World(guard := guarded(max_tokens=16, allowance=0.005), chance(0.02, seed), step=0.0006)
    world.warm_up(guard.costs)
    slow = 1.0
    for _ in range(3):
        member = world.add(prompt=100)
        for _ in range(128):
            slow = wander(world, numbers, slow, 1 / 30)
            world.decode()
        world.end(member)
    assert world.elapsed < 1.03 * world.plain


@pytest.mark.parametrize("slower", [1.1, 1.25, 1.6])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_plain_step_that_was_disturbed_excuses_no_drafts(slower, batch):
    """Until the next one is timed, every step with a draft in it looks like a gain."""
    world = World(guard := guarded(max_tokens=16, allowance=0.005), chance(0.02), step=0.0006)
    world.warm_up(guard.costs)
    for _ in range(batch):
        world.add(prompt=100)
    world.rows = lambda rows: slower * flat(rows)
    for _ in range(3):
        world.decode()
    world.rows = flat
    world.run(256 * batch)
    assert world.elapsed < 1.02 * world.plain


@pytest.mark.parametrize(
    ("batch", "share", "least"), [(1, 0.02, 0.98), (16, 0.02, 0.98), (1, 0.3, 1.1), (16, 0.8, 1.2)]
)
def test_a_machine_that_jumps_between_two_speeds(batch, share, least):
    """A plain step timed in a fast spell is no reason to leave a good draft alone in a slow one."""
    speedups = []
    for seed in range(9):
        world = World(
            guard := guarded(max_tokens=16, allowance=0.005), chance(share, seed), step=0.0006, read=0.0000375
        )
        world.warm_up(guard.costs)
        for _ in range(batch):
            world.add(prompt=100)
        numbers, slow = random.Random(seed), 1.0
        for _ in range(256):
            slow = wander(world, numbers, slow, 0.12)
            world.decode()
        speedups.append(world.plain / world.elapsed)
    assert min(speedups) > 0.97 and median(speedups) > least
