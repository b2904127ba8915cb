"""Whether samples are those of a parameter or those without it."""

from __future__ import annotations

import pytest

from foretoken.audit.endpoint.parameters import Treatment
from foretoken.audit.endpoint.tuned import TwoHypotheses

CHANGED, UNCHANGED = (0.8, 0.2, 0.0), (0.5, 0.3, 0.2)


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
def test_treatments(counts, expected):
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
