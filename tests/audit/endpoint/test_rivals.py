"""Whether samples are those of a parameter or those without it."""

from __future__ import annotations

import pytest

from foretoken.audit.endpoint.findings import Treatment
from foretoken.audit.endpoint.tuned import Rivals

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
    rivals = Rivals()
    for cell, count in enumerate(counts):
        for _ in range(count):
            rivals.add(CHANGED, UNCHANGED, cell)
    assert rivals.treatment(1e-4) is expected


def test_a_certain_token_says_nothing():
    """Its scores are constant, and their sums are 0 but for rounding."""
    rivals = Rivals()
    for _ in range(50):
        rivals.add((0.1 + 0.2 + 0.7, 0.0), (1.0, 0.0), 0)
        rivals.add((1.0 / 3.0, 2.0 / 3.0), (1.0 / 3.0, 2.0 / 3.0), 0)
    assert rivals.treatment(1e-4) is Treatment.UNDECIDED
