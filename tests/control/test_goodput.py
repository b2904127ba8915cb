from __future__ import annotations

import pytest
import torch

from foretoken.control.fixed import Fixed
from foretoken.control.goodput import floors
from foretoken.control.goodput_controller import Goodput, never
from foretoken.control.ledger import Ledger
from foretoken.control.survival import Survival
from foretoken.core.draft import Draft
from foretoken.core.part import DraftPart
from foretoken.core.sampling import SamplingLaw
from foretoken.core.verdict import Verdict
from foretoken.costs.model import CostModel
from foretoken.costs.tuning import Tuning

from .world import PLAIN, World, chance, flat


def world(right, max_tokens: int = 16, prunes=never, **kwargs) -> World:
    return World(Goodput(max_tokens, CostModel(), prunes=prunes), right, **kwargs)


def seconds(controller, right, tokens: int = 1500, **kwargs) -> float:
    one = World(controller, right, **kwargs)
    one.add()
    one.run(tokens)
    return one.elapsed


# Survival


def test_survival_of_a_chain_is_learned_for_all_depths_at_once():
    survival = Survival(4)
    for i in range(200):
        survival.observe(4, Draft.chain([0] * 4), Verdict(tuple(range((1, 2)[i % 2])), 0))
    assert survival.accepted() == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=0.08)
    assert survival.exists() == pytest.approx([1.0] * 4)


def test_depths_that_were_never_tried_follow_from_those_that_were():
    survival = Survival(8)
    numbers = chance(0.5)
    for _ in range(400):
        depth = 0
        while depth < 3 and numbers(0, 0, 0):
            depth += 1
        survival.observe(3, Draft.chain([0] * 3), Verdict(tuple(range(depth)), 0))
    assert survival.accepted()[5] == pytest.approx(0.5**6, abs=0.02)
    assert all(a >= b for a, b in zip(survival.accepted(), survival.accepted()[1:], strict=False))


def test_ranks_of_a_tree_follow_its_scores():
    survival = Survival(3)
    scores = torch.tensor([-2.0, -0.1, -0.5])
    tree = Draft(torch.tensor([1, 2, 3]), (-1, -1, 1), scores=scores)
    for _ in range(200):
        survival.observe(3, tree, Verdict((1,), 0))
    assert survival.accepted() == pytest.approx([1.0, 0.0, 0.0], abs=0.08)


def test_a_draft_that_is_shorter_than_asked_for_costs_no_rows():
    survival = Survival(4)
    for i in range(200):
        full = i % 2 == 0
        survival.observe(4, Draft.chain([0] * 4) if full else Draft.empty(), Verdict((0, 1, 2, 3) if full else (), 0))
    assert survival.accepted() == pytest.approx([0.5] * 4, abs=0.06)
    assert survival.exists() == pytest.approx([0.5] * 4, abs=0.06)


def test_a_request_begins_with_what_others_showed_and_soon_goes_its_own_way():
    prior = Survival(4, memory=256.0)
    for _ in range(100):
        prior.observe(4, Draft.chain([0] * 4), Verdict((), 0))
    own = Survival(4, prior)
    assert own.accepted()[0] < 0.1
    for _ in range(12):
        own.observe(4, Draft.chain([0] * 4), Verdict((0, 1, 2, 3), 0))
    assert own.accepted()[0] > 0.7


# Budgets


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 0.95])
def test_nearly_as_good_as_the_best_depth(share):
    best = min(seconds(Fixed(k), chance(share)) for k in (0, 1, 2, 3, 4, 6, 8, 12, 16))
    assert seconds(Goodput(16, CostModel()), chance(share)) < 1.06 * best


def test_the_step_of_a_jagged_curve_is_not_climbed():
    def rows(n: int) -> float:
        return PLAIN * (1.0 if n <= 4 else 2.5)

    costs = CostModel()
    one = World(Goodput(16, costs), chance(0.9), rows=rows, step=0.0001)
    one.warm_up(costs)
    one.add()
    one.run(1500)
    late = one.drafted[len(one.drafted) // 2 :]
    assert sum(k == 3 for k in late) > 0.9 * len(late)


def test_a_decision_made_in_little_room_does_not_stand_where_there_is_more():
    """Any rows more double a pass: a single node never pays, many do."""
    costs = CostModel()
    made = World(Goodput(16, costs), chance(0.95), rows=lambda rows: PLAIN * (1.0 if rows == 1 else 2.0))
    made.warm_up(costs)
    made.add()
    made.run(400)
    contexts = list(made.contexts.values())
    assert made.controller.budgets(contexts, [1]) == [0]
    assert made.controller.budgets(contexts, [16])[0] > 1


def test_nodes_go_where_they_are_worth_most():
    one = world(lambda sequence, position, depth: sequence == 0, step=0.0001)
    one.add()
    one.add()
    one.run(600)
    drafted = [one.decode() for _ in range(30)]
    assert sum(b[0] for b in drafted) > 8 * 30
    assert sum(b[1] for b in drafted) < 30


def test_drafting_that_cannot_pay_is_not_tried():
    one = world(chance(1.0), step=1.5 * PLAIN)
    one.add()
    one.run(300)
    before = len(one.drafted)
    one.run(300)
    assert sum(one.drafted[before:]) == 0


def test_tries_become_rare():
    one = world(chance(0.0))
    one.add()
    one.run(2000)
    tries = [i for i, k in enumerate(one.drafted) if k and i > 200]
    assert 1 < len(tries) < 12


def test_it_comes_back_when_the_text_turns():
    one = world(lambda sequence, position, depth: position > 600)
    one.add()
    one.run(600)
    steps = len(one.drafted)
    one.run(1500)
    assert len(one.drafted) - steps < 600


def test_greedy_requests_teach_nothing_about_others():
    one = world(lambda sequence, position, depth: sequence % 2 == 0, max_tokens=4)
    greedy, drawn = SamplingLaw(temperature=0.0), SamplingLaw()
    for law in (greedy, drawn, greedy, drawn):
        member = one.add(law=law)
        one.run(150)
        one.end(member)
    one.add(law=greedy)
    one.decode()
    assert one.decode()[0] == 4
    one.add(law=drawn)
    one.decode()
    assert one.decode()[1] == 0


def two_parts(right, **kwargs) -> World:
    """A model, and something that drafts for free: right in the second hundred tokens of four."""
    costs = CostModel()
    always = {"prunes": lambda context: True, "parts": lambda context: (DraftPart.ALL, DraftPart.FREE)}
    one = World(
        Goodput(16, costs, Ledger(0.005), **always),
        right,
        free_right=lambda sequence, position, depth: position // 100 % 4 == 1,
        free_step=0.0002,
        **kwargs,
    )
    one.warm_up(costs)
    one.add()
    return one


def test_what_is_free_drafts_where_the_model_does_not_pay():
    one = two_parts(chance(0.9), step=PLAIN)
    one.run(2000)
    assert sum(map(bool, one.by_model)) < 0.02 * len(one.drafted)  # tried, while the warm-up left a doubt
    assert sum(map(bool, one.drafted)) > 40 and one.elapsed < 0.9 * one.plain
    rows = [drafted for drafted in one.drafted if drafted]
    assert len(rows) < 0.5 * len(one.drafted)  # only where it was right


def test_a_model_that_pays_drafts_with_what_is_free():
    one = two_parts(chance(0.8))
    one.run(1000)
    assert sum(map(bool, one.by_model)) > 0.8 * len(one.drafted)
    assert one.contexts[1].part is DraftPart.ALL


@pytest.mark.parametrize("light, part", [(2 * PLAIN, DraftPart.MODEL), (PLAIN / 2, DraftPart.ALL)])
def test_a_mixtures_model_drafts_alone_where_a_plain_step_is_short(light, part):
    costs = CostModel(Tuning(light=light))
    both = {"prunes": lambda context: True, "parts": lambda context: tuple(DraftPart)}
    one = World(Goodput(16, costs, **both), chance(0.7))
    one.warm_up(costs)
    one.add()
    one.run(400)
    assert one.contexts[1].part is part
    assert (max(one.drafted) == 16) == (part is DraftPart.ALL)  # what prunes gets its whole budget


def test_neither_drafts_where_neither_pays():
    one = two_parts(chance(0.0))
    one.run(90)  # before what is free is right for the first time
    one.free_right = chance(0.0)
    one.run(2000)
    assert sum(one.drafted[-800:]) < 80 and one.elapsed < 1.01 * one.plain


def test_room_and_the_requests_own_depth_are_kept():
    one = world(chance(0.9))
    contexts = [one.contexts[one.add(depth=depth)] for depth in (None, 3, 0)]
    one.run(200)
    budgets = one.controller.budgets(contexts, [2, 10, 10])
    assert budgets[0] <= 2 and budgets[1:] == [3, 0]
    assert one.controller.budgets(contexts, [0, 1, 0]) == [0, 1, 0]


def test_a_first_token_is_not_kept_waiting_by_a_dear_proposer():
    dear = world(chance(0.9), step=0.002, read=0.0005)
    dear.add()
    dear.run(200)
    dear.add(prompt=400)
    assert dear.decode()[1] == 0


def test_forgotten_requests_leave_nothing_behind():
    one = world(chance(0.7))
    member = one.add()
    one.run(100)
    controller = one.controller
    assert isinstance(controller, Goodput)
    assert controller.num_known == 1
    one.end(member)
    assert controller.num_known == 0
    assert flat(1) == PLAIN


# Floors


def test_a_token_pays_from_the_share_of_a_token_that_its_seconds_are_worth():
    costs = CostModel()
    costs.calibrate({1: 0.020, 5: 0.0208, 9: 0.040, 17: 0.040}, {1: 0.0005, 16: 0.008})
    below = floors(16, 1, 1.0, 1, 100.0, costs)
    assert below[:4] == pytest.approx([0.07] * 4)  # 0.2 ms for the row and 0.5 ms to draft it, at 100 tokens per second
    assert below[4] == pytest.approx(0.53)
    assert below[8:] == pytest.approx([0.05] * 8)


def test_a_row_that_costs_much_pays_as_a_step_to_rows_that_cost_nothing():
    costs = CostModel()
    costs.calibrate({1: 0.020, 2: 0.030, 17: 0.030}, {16: 0.0})
    assert floors(1, 1, 1.0, 1, 50.0, costs)[0] == pytest.approx(0.5)
    assert floors(2, 1, 1.0, 1, 50.0, costs)[0] < 0.3


@pytest.mark.parametrize("prunes", [True, False])
def test_only_what_leaves_out_what_does_not_pay_is_told_what_does(prunes):
    one = world(chance(0.8), prunes=lambda context: prunes)
    one.warm_up(one.controller.costs)
    member = one.contexts[one.add()]
    one.run(100)
    assert bool(member.floors) == prunes
    assert not prunes or max(one.drafted) == 16


def test_a_request_with_its_own_draft_length_has_no_floors():
    one = world(chance(0.8), prunes=lambda context: True)
    one.warm_up(one.controller.costs)
    member = one.contexts[one.add(depth=3)]
    one.run(40)
    assert member.floors == () and max(one.drafted) == 3


def test_a_warm_up_that_other_programs_delayed_does_not_stop_drafting_for_ever():
    one = world(chance(0.9), step=0.0005)
    one.warm_up(one.controller.costs)
    one.controller.costs.drafting.scale(200.0)
    for _ in range(12):
        member = one.add()
        one.run(64)
        one.end(member)
    assert any(one.drafted[-32:])
