"""A budget becomes numbers of texts, and what they cost is predicted."""

from __future__ import annotations

import pytest

from foretoken.audit.endpoint.task import Sizes


@pytest.mark.parametrize("tokens", [8_000, 20_000, 60_000, 500_000])
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("each", [False, True])
def test_the_plan_fills_the_budget(tokens, sides, each):
    costs = Sizes.of(tokens, sides, each).costs(sides, 50.0, each, not each)
    assert sum(cost["tokens"] for cost in costs.values()) == pytest.approx(tokens, rel=0.25)


def test_a_larger_budget_samples_more():
    sampled = [Sizes.of(tokens, 2, False).sampled for tokens in (8_000, 20_000, 60_000)]
    assert sampled == sorted(sampled) and sampled[-1] > 10 * sampled[0] / 2


def test_scoring_one_token_at_a_time_costs_a_request_each():
    sizes = Sizes.of(20_000, 2, True)
    texts = sizes.sampled + sizes.sampled_plain
    assert sizes.costs(2, 10.0, True, False)["sampled distribution"]["requests"] == texts * (1 + sizes.sampled_tokens)
