"""Distributions over the likeliest tokens and the rest."""

from __future__ import annotations

import math

import pytest

from foretoken.audit.endpoint.distribution import Cells, FalseLogprobsError, whole
from foretoken.audit.endpoint.tuned import TunedSampling, tuned
from foretoken.probe.answers import TokenPlace

TOP = tuple((name, math.log(p)) for name, p in (("a", 0.5), ("b", 0.25), ("c", 0.1)))


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
def test_what_no_distribution_can_have(top):
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
