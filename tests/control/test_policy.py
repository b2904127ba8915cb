"""The draft policy: acceptance, lengths, minimum acceptance, copied text, trials."""

import math
import random

import pytest
import torch

from foretoken.control.acceptance import PendingDraft, Rates, SourceRecord, Survival
from foretoken.control.allocation import Allocation, min_acceptance
from foretoken.control.fixed import Fixed
from foretoken.control.memory import MemoryWatch
from foretoken.control.policy import Repetition
from foretoken.core.devices import Memory
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.costs.model import CostModel

from .world import PLAIN, Outcome, World, chance, flat, policy


def world(right: Outcome, max_tokens: int = 16, **kwargs) -> World:
    made = World(policy(max_tokens), right, **kwargs)
    made.warm_up(made.controller.costs)
    return made


def seconds(controller, right: Outcome, tokens: int = 1500) -> float:
    made = World(controller, right)
    if controller.costs is not None:
        made.warm_up(controller.costs)
    made.add()
    made.run(tokens)
    return made.elapsed


# acceptance by rank


def test_survival_of_a_chain_is_learned_for_all_depths_at_once() -> None:
    survival = Survival(4)
    for i in range(200):
        survival.observe(4, Draft.chain([0] * 4), tuple(range((1, 2)[i % 2])))
    assert survival.accepted() == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=0.08)
    assert survival.exists() == pytest.approx([1.0] * 4)


def test_depths_that_were_never_tried_follow_from_those_that_were() -> None:
    survival = Survival(8)
    numbers = chance(0.5)
    for _ in range(400):
        depth = 0
        while depth < 3 and numbers(0, 0, 0):
            depth += 1
        survival.observe(3, Draft.chain([0] * 3), tuple(range(depth)))
    assert survival.accepted()[5] == pytest.approx(0.5**6, abs=0.02)
    assert all(a >= b for a, b in zip(survival.accepted(), survival.accepted()[1:], strict=False))


def test_ranks_of_a_tree_follow_its_scores() -> None:
    survival = Survival(3)
    scores = (-2.0, -0.1, -0.5)
    tree = Draft.tree([1, 2, 3], (-1, -1, 1), scores=scores)
    for _ in range(200):
        survival.observe(3, tree, (1,))
    assert survival.accepted() == pytest.approx([1.0, 0.0, 0.0], abs=0.08)


def test_a_draft_that_is_shorter_than_requested_costs_no_rows() -> None:
    survival = Survival(4)
    for i in range(200):
        full = i % 2 == 0
        survival.observe(4, Draft.chain([0] * 4) if full else Draft.empty(), (0, 1, 2, 3) if full else ())
    assert survival.accepted() == pytest.approx([0.5] * 4, abs=0.06)
    assert survival.exists() == pytest.approx([0.5] * 4, abs=0.06)


def test_nodes_that_were_not_verified_cost_no_rows() -> None:
    survival = Survival(4)
    for _ in range(200):
        survival.observe(4, Draft.chain([0] * 4), (), verified=1)
    assert survival.exists() == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=0.1)


def test_a_request_starts_from_what_others_showed_and_soon_follows_its_own_drafts() -> None:
    prior = Survival(4, memory=256.0)
    for _ in range(100):
        prior.observe(4, Draft.chain([0] * 4), ())
    request = Survival(4, prior)
    assert request.accepted()[0] < 0.1
    for _ in range(12):
        request.observe(4, Draft.chain([0] * 4), (0, 1, 2, 3))
    assert request.accepted()[0] > 0.7


# acceptance by claim


def test_a_pending_draft_follows_the_text() -> None:
    draft = PendingDraft(Draft.tree([5, 6, 7, 8], (-1, 0, 1, 0)), start=2, cells=[0] * 4)
    rates = Rates()
    assert not draft.follow([1, 2], rates)
    assert not draft.follow([1, 2, 5], rates)
    assert draft.depth == 1 and not draft.missed([1, 2, 5])
    assert draft.follow([1, 2, 5, 9], rates)
    assert draft.depth == 1 and draft.missed([1, 2, 5, 9])
    right = PendingDraft(Draft.chain([5, 6]), start=2)
    assert right.follow([1, 2, 5, 6, 4]) and right.depth == 2 and not right.missed([1, 2, 5, 6, 4])


def test_rates_are_unbiased_by_texts_that_end() -> None:
    """Chains right with probability 0.8 a token, of which only two tokens are ever known."""
    numbers = chance(0.8)
    record = SourceRecord(Rates(memory=1e9), copies=True)
    for _ in range(3000):
        right = [numbers(0, 0, depth) for depth in range(4)]
        record.open, record.streak = [], 0
        record.add(Draft.chain([1, 1, 1, 1]), 0)
        record.settle([int(right[0]), int(right[1])])
    record.streak = 0
    assert record.add(Draft.chain([1, 1, 1, 1]), 0) == pytest.approx([0.8] * 4, abs=0.03)


def test_nodes_of_a_model_have_the_rates_at_which_its_claims_came_true() -> None:
    """It is right in 6 of 10 where it claims 0.95, and then in 1 of 10 where it claims 0.55."""
    generator = torch.Generator().manual_seed(0)
    draft = Draft.tree([1, 1], (-1, 0), scores=(math.log(0.95), math.log(0.95 * 0.55)))
    record = SourceRecord(Rates(memory=1e9), copies=False)
    assert record.add(draft, 0) == pytest.approx([0.95, 0.55], abs=1e-6)
    record.open = []
    for _ in range(2000):
        record.add(draft, 0)
        first, second = torch.rand(2, generator=generator).tolist()
        record.settle([int(first < 0.6), int(second < 0.1), 0])
    assert record.add(draft, 0) == pytest.approx([0.6, 0.1], abs=0.06)


def test_the_line_of_a_cell_is_its_rate() -> None:
    shared = Rates()
    request = shared.for_request()
    for i in range(30):
        (request if i % 2 else shared).add(3, i % 3 == 0)
    for base in (0.1, 0.6):
        a, b = request.line(3)
        assert a + b * base == pytest.approx(request.of(3, base))
        assert request.line(4) == (0.0, 1.0)


def test_a_streak_ends_with_the_first_miss() -> None:
    record = SourceRecord(Rates(), copies=True)
    record.add(Draft.chain([1, 2]), 0)
    record.settle([1, 2, 3])
    assert record.streak == 2
    record.add(Draft.chain([4, 5]), 3)
    record.settle([1, 2, 3, 4, 9])
    assert record.streak == 0


# lengths of a model


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 0.95])
def test_nearly_as_good_as_the_best_constant_length(share: float) -> None:
    best = min(seconds(Fixed(length), chance(share)) for length in (0, 1, 2, 3, 4, 6, 8, 12, 16))
    assert seconds(policy(), chance(share)) < 1.06 * best


def test_the_step_of_a_jagged_curve_is_not_climbed() -> None:
    made = world(chance(0.9), rows=lambda rows: PLAIN * (1.0 if rows <= 4 else 2.5), step=0.0001)
    made.add()
    made.run(1500)
    late = made.drafted[len(made.drafted) // 2 :]
    assert sum(length == 3 for length in late) > 0.9 * len(late)


def test_nodes_go_to_the_request_that_accepts_most() -> None:
    made = world(lambda sequence, position, depth: sequence == 0, step=0.0001)
    made.add()
    made.add()
    made.run(600)
    drafted = [made.decode() for _ in range(30)]
    assert sum(lengths[0] for lengths in drafted) > 8 * 30
    assert sum(lengths[1] for lengths in drafted) < 30


def test_trials_become_rare() -> None:
    made = world(chance(0.0))
    made.add()
    made.run(2000)
    trials = [step for step, length in enumerate(made.drafted) if length and step > 200]
    assert 1 < len(trials) < 24


def test_drafting_comes_back_when_the_text_turns() -> None:
    made = world(lambda sequence, position, depth: position > 600)
    made.add()
    made.run(600)
    steps = len(made.drafted)
    made.run(1500)
    assert len(made.drafted) - steps < 600


def test_greedy_requests_teach_nothing_about_others() -> None:
    made = world(lambda sequence, position, depth: sequence % 2 == 0, max_tokens=4)
    greedy, sampled = SamplingLaw(temperature=0.0), SamplingLaw()
    for law in (greedy, sampled, greedy, sampled):
        member = made.add(law=law)
        made.run(150)
        made.end(member)
    made.add(law=greedy)
    made.decode()
    assert made.decode()[0] == 4
    made.add(law=sampled)
    made.decode()
    assert made.decode()[1] == 0


def test_the_tokens_left_and_a_requests_own_length_are_kept() -> None:
    made = world(chance(0.9))
    contexts = [made.contexts[made.add(depth=depth)] for depth in (None, 3, 0)]
    made.run(200)
    budgets = made.controller.budgets(contexts, [2, 10, 10])
    assert budgets[0] <= 2 and budgets[1:] == [3, 0]
    assert made.controller.budgets(contexts, [0, 1, 0]) == [0, 1, 0]


def test_a_request_with_its_own_length_keeps_no_other_from_drafting() -> None:
    """No step of the batch is plain, so that none can be timed."""
    made = world(chance(0.9))
    made.add(depth=3)
    made.add()
    drafted = [made.decode() for _ in range(64)]
    assert all(own == 3 for own, _ in drafted) and sum(other for _, other in drafted) > 64


def test_a_first_token_does_not_wait_for_an_expensive_model() -> None:
    made = world(chance(0.9), step=0.002, read=0.0005)
    made.add()
    made.run(200)
    made.add(prompt=400)
    assert made.decode()[1] == 0


def test_a_warm_up_that_other_programs_delayed_does_not_stop_drafting_for_good() -> None:
    made = world(chance(0.9), step=0.0005)
    made.controller.costs.calibrate({}, {depth: 0.1 * depth for depth in (1, 2, 4, 8)})
    for _ in range(12):
        member = made.add()
        made.run(64)
        made.end(member)
    assert any(made.drafted[-32:])


def test_forgotten_requests_leave_nothing_behind() -> None:
    made = world(chance(0.7), copied=chance(0.2))
    member = made.add()
    made.run(100)
    assert made.controller.num_known == 1
    made.end(member)
    assert made.controller.num_known == 0
    assert flat(1) == PLAIN


# copied text


def test_copied_text_is_verified_only_where_it_is_right() -> None:
    """Right in the second hundred tokens of four; no model is profitable."""
    made = world(chance(0.9), step=PLAIN, copied=lambda sequence, position, depth: position // 100 % 4 == 1)
    made.add()
    made.run(2000)
    assert sum(map(bool, made.by_model)) < 0.02 * len(made.drafted)
    assert made.elapsed < 0.9 * made.plain
    assert sum(map(bool, made.drafted)) < 0.5 * len(made.drafted)


def test_verification_starts_within_eight_tokens_of_a_repetition() -> None:
    made = world(chance(0.0), step=PLAIN, copied=lambda sequence, position, depth: position >= 400)
    made.add()
    made.run(400)
    steps = len(made.drafted)
    made.run(60)
    assert next(step for step, length in enumerate(made.drafted[steps:]) if length) <= 8


def test_repetitions_are_noticed_at_the_third_token_and_rarely_elsewhere() -> None:
    repetition, numbers = Repetition(), random.Random(0)
    tokens = [numbers.randrange(50_000) for _ in range(3000)]
    wrong = 0
    for end in range(1, len(tokens) + 1):
        repetition.update(tokens[:end])
        wrong += repetition.now
    assert wrong < 0.1 * len(tokens)
    seen = []
    for token in tokens[500:520]:
        tokens.append(token)
        repetition.update(tokens)
        seen.append(repetition.now)
    assert all(seen[2:])


def test_a_profitable_model_drafts_beside_copied_text() -> None:
    made = world(chance(0.8), copied=lambda sequence, position, depth: position // 100 % 4 == 1)
    made.add()
    made.run(1000)
    assert sum(map(bool, made.by_model)) > 0.5 * len(made.drafted)


def test_nothing_is_drafted_where_nothing_is_profitable() -> None:
    made = world(chance(0.0), copied=chance(0.0))
    made.add()
    made.run(2000)
    assert sum(made.drafted[-800:]) < 80 and made.elapsed < 1.01 * made.plain


def test_nodes_are_kept_as_long_as_they_are_worth_their_rows() -> None:
    """A row costs a tenth of a step, the eighth and later ones three steps."""
    made = policy()
    made.costs.calibrate({1: 1.0, 8: 1.7, 9: 4.7, 17: 12.0}, {})
    assert made.keep([0.3, 0.05], 8, 1)[0] == [0]
    assert made.keep([0.9, 0.9, 0.8], 2, 1)[0] == [0, 1]
    assert made.keep([0.2, 0.9, 0.5], 8, 1)[0] == [1, 2, 0]
    assert made.keep([], 8, 1) == ([], 0.0)
    nodes, value = made.keep([0.99] * 12, 16, 1)
    assert len(nodes) == 7 and value == pytest.approx(7 * 0.99 - 0.7)
    assert policy().keep([0.5, 0.001], 8, 1)[0] == [0]  # before anything was timed


def test_the_slowdown_budget_limits_the_rows() -> None:
    made = policy(allowance=0.005)
    made.costs.calibrate({1: 1.0, 17: 17.0}, {})
    made.ledger.balance = 2.5
    assert len(made.keep([1.1] * 8, 8, 1)[0]) == 2


# where chains end


def test_a_token_is_profitable_from_the_tokens_that_its_seconds_yield() -> None:
    costs = CostModel()
    costs.calibrate({1: 0.020, 5: 0.0208, 9: 0.040, 17: 0.040}, {1: 0.0005, 16: 0.008})
    below = min_acceptance(Allocation([16], [0.0], [0.0], rate=100.0), 0, 1, costs)
    assert below[:4] == pytest.approx([0.07] * 4)  # 0.2 ms for the row and 0.5 ms to draft it, at 100 tokens per second
    assert below[4] == pytest.approx(0.53)
    assert below[8:] == pytest.approx([0.05] * 8)


def test_an_expensive_row_counts_as_a_step_to_rows_that_cost_nothing() -> None:
    costs = CostModel()
    costs.calibrate({1: 0.020, 2: 0.030, 17: 0.030}, {16: 0.0})
    assert min_acceptance(Allocation([1], [0.0], [0.0], rate=50.0), 0, 1, costs)[0] == pytest.approx(0.5)
    below = min_acceptance(Allocation([2], [0.0], [0.0], rate=50.0), 0, 1, costs)
    assert below[0] == pytest.approx(0.5 / (1.0 + costs.tuning.prior_acceptance)) and below[1] == 0.0


@pytest.mark.parametrize("early", [True, False])
def test_drafts_that_end_early_get_the_longest_length_and_a_minimum(early: bool) -> None:
    made = world(chance(0.8))
    made.proposer.model.proposer.ends_early = lambda context: early
    member = made.contexts[made.add()]
    made.run(100)
    assert (member.end is not None) == early
    assert not early or max(made.drafted) == 16


def test_a_request_with_its_own_draft_length_has_no_minimum() -> None:
    made = world(chance(0.8))
    made.proposer.model.proposer.ends_early = lambda context: True
    member = made.contexts[made.add(depth=3)]
    made.run(40)
    assert member.end is None and max(made.drafted) == 3


# rest


def test_most_steps_of_a_request_that_drafts_nothing_are_not_observed() -> None:
    made, observed = world(chance(1.0), step=PLAIN), 0
    made.add()
    for _ in range(512):
        made.decode()
        observed += not made.controller.resting
    assert sum(map(bool, made.drafted)) <= 6 and observed < 0.4 * 512


@pytest.mark.parametrize(("requests", "least", "most"), [(1, 64, 64), (8, 8, 8)])
def test_an_idle_batch_decides_in_one_of_eight_steps(requests: int, least: int, most: int) -> None:
    made, decided = world(chance(0.0), step=PLAIN), set[int]()
    for _ in range(requests):
        made.add()
    for _ in range(64):  # the first trials
        made.decode()
    due = made.controller._due
    made.controller._due = lambda *of: decided.add(made.controller.step) or due(*of)
    made.controller._drafted, trials = False, sum(map(bool, made.drafted))
    for _ in range(64):
        made.decode()
    assert least <= len(decided) <= most + 4 * (sum(map(bool, made.drafted)) - trials)


def test_a_trial_that_costs_too_much_is_not_considered_again_in_every_decision() -> None:
    made, decided = world(chance(0.0), step=PLAIN), 0
    made.add()
    made.run(64)
    made.controller._allowed = lambda batch: 0.0
    decide = made.controller._decide

    def counted(*args: object) -> None:
        nonlocal decided
        decided += 1
        decide(*args)

    made.controller._decide = counted
    made.run(512)
    assert 1 <= decided <= 32  # of 64 decisions that hold for eight steps


def test_the_slowdown_budget_fills_while_steps_are_not_observed() -> None:
    made = World(policy(8, 0.005, constant=True), chance(0.0))
    made.warm_up(made.controller.costs)
    made.add()
    for _ in range(2000):
        made.decode()
    assert sum(map(bool, made.drafted)) > 4 and made.elapsed < 1.01 * made.plain


@pytest.mark.parametrize("requests", [1, 4])
def test_memory_is_watched_in_every_step(requests: int) -> None:
    clock: list[int] = []
    watch = MemoryWatch(16, lambda: Memory(free=0, limit=2**30), clock=lambda: clock.append(1) or 0.0)
    made = World(policy(memory=watch), chance(0.0))
    for _ in range(requests):
        made.add()
    for _ in range(64):
        made.decode()
    assert len(clock) == 64 and not any(made.drafted)
