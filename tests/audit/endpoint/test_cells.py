"""Audits of a server without one: cells of distributions, two hypotheses of a parameter, sizes of samples."""

import math

import pytest

from foretoken.audit.endpoint.distribution import Cells, FalseLogprobsError, TunedSampling, TwoHypotheses, tuned, whole
from foretoken.audit.endpoint.parameters import Treatment
from foretoken.audit.endpoint.task import Sizes
from foretoken.probe.answers import TokenPlace

TOP = tuple((name, math.log(p)) for name, p in (("a", 0.5), ("b", 0.25), ("c", 0.1)))
CHANGED, UNCHANGED = (0.8, 0.2, 0.0), (0.5, 0.3, 0.2)


def place(token: str) -> TokenPlace:
    return TokenPlace(token, None, TOP)


def test_the_rest_is_one_cell():
    cells = whole(place("elsewhere"))
    assert cells.probs == pytest.approx((0.5, 0.25, 0.1, 0.15)) and cells.at == 3
    assert whole(place("b")).at == 1


def test_a_rest_that_is_only_rounding_joins_the_least_likely_token():
    top = (("b", math.log(0.7)), ("a", math.log(0.29999)))
    assert whole(TokenPlace("c", None, top)) == Cells(pytest.approx((0.3, 0.7), abs=1e-4), 0)


@pytest.mark.parametrize("top", [(("a", 0.5),), (("a", math.log(0.8)), ("b", math.log(0.3))), (("a", math.nan),)])
def test_log_probabilities_of_no_distribution_are_refused(top):
    with pytest.raises(FalseLogprobsError):
        whole(TokenPlace("a", None, top))


@pytest.mark.parametrize(
    "tuning, expected",
    [
        (TunedSampling(temperature=0.5), (0.25, 0.0625, 0.01)),
        (TunedSampling(bias={"b": math.log(2.0)}), (0.5, 0.5, 0.1)),
        (TunedSampling(presence_penalty=math.log(2.0)), (0.25, 0.25, 0.1)),
        (TunedSampling(frequency_penalty=math.log(2.0)), (0.125, 0.25, 0.1)),
        (TunedSampling(frequency_penalty=math.log(2.0), window=3), (0.125, 0.125, 0.1)),
        (TunedSampling(top_k=2), (0.5, 0.25, 0.0)),
        (TunedSampling(top_p=0.6), (0.5, 0.25, 0.0)),
        (TunedSampling(min_p=0.3), (0.5, 0.25, 0.0)),
    ],
)
def test_sampling_parameters(tuning, expected):
    cells = tuned(place("b"), tuning, ("c", "b"), ("a", "a"))
    assert cells is not None and cells.at == 1
    assert cells.probs == pytest.approx((*(each / sum(expected) for each in expected), 0.0))


def test_a_token_outside_is_impossible_under_a_filter_alone():
    assert tuned(place("z"), TunedSampling(temperature=0.5), (), ()) is None
    cells = tuned(place("z"), TunedSampling(top_k=2), (), ())
    assert cells is not None and cells.probs[cells.at] == 0.0


@pytest.mark.parametrize(
    "tuning", [TunedSampling(top_k=3), TunedSampling(top_p=0.75), TunedSampling(min_p=0.5), TunedSampling(top_p=0.95)]
)
def test_places_that_rounding_or_unknown_tokens_decide_are_left_out(tuning):
    assert tuned(place("a"), tuning, (), ()) is None


@pytest.mark.parametrize(
    "probs, top_p, expected",
    [
        ((0.5, 0.1134, 0.113, 0.1), 0.56, None),  # either of the second and third completes the nucleus
        ((0.5, 0.113, 0.1134, 0.1), 0.56, None),
        ((0.5, 0.1134, 0.113, 0.02), 0.65, (0.5, 0.1134, 0.113, 0.0)),  # both are inside, in either order
        ((0.7, 0.1134, 0.113, 0.02), 0.6, (0.7, 0.0, 0.0, 0.0)),  # both are outside
    ],
)
def test_near_ties_at_the_edge_of_the_nucleus_are_left_out(probs, top_p, expected):
    names = "abcd"
    cells = tuned(
        TokenPlace("a", None, tuple(zip(names, map(math.log, probs), strict=True))), TunedSampling(top_p=top_p), (), ()
    )
    if expected is None:
        assert cells is None
    else:
        assert cells.probs == pytest.approx((*(p / sum(expected) for p in expected), 0.0))


@pytest.mark.parametrize(
    "counts, expected",
    [
        ((80, 20, 0), Treatment.HONOURED),
        ((50, 30, 20), Treatment.IGNORED),
        ((78, 20, 2), Treatment.OTHER),
        ((4, 1, 0), Treatment.UNDECIDED),
        ((0, 0, 0), Treatment.UNDECIDED),
    ],
)
def test_counts_decide_how_a_parameter_was_applied(counts, expected):
    hypotheses = TwoHypotheses()
    for cell, count in enumerate(counts):
        for _ in range(count):
            hypotheses.add(CHANGED, UNCHANGED, cell)
    assert hypotheses.treatment(1e-4) is expected


def test_a_certain_token_says_nothing():
    """Its scores are constant, and their sums are 0 but for rounding."""
    hypotheses = TwoHypotheses()
    for _ in range(50):
        hypotheses.add((0.1 + 0.2 + 0.7, 0.0), (1.0, 0.0), 0)
        hypotheses.add((1.0 / 3.0, 2.0 / 3.0), (1.0 / 3.0, 2.0 / 3.0), 0)
    assert hypotheses.treatment(1e-4) is Treatment.UNDECIDED


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
