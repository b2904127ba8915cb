"""The rule whose parts are replaced is exact as it stands, for every law of a draft; with a part replaced it is not."""

from __future__ import annotations

import pytest
from tests.exactness.decode_step import Pair, argmax, drawn, drawn_tree, fixed_tree, table, top_plus_tree

from foretoken.audit.controls import PLANTS, sequential
from foretoken.core.context import Exactness
from foretoken.core.law import PointMass
from foretoken.verify import choose

P, Q = table(3, 1), table(3, 2)
PROPOSERS = {
    "fixed chain": argmax(Q),
    "fixed tree": fixed_tree([0, 1, 1, 2], [-1, -1, 0, 1]),
    "drawn chain": drawn(Q),
    "siblings i.i.d.": drawn_tree(Q, (2, 1), replace=True),
    "siblings without replacement": drawn_tree(Q, (2, 1), replace=False),
    "top plus drawn": top_plus_tree(Q, (2, 1)),
}


@pytest.mark.parametrize("propose", PROPOSERS.values(), ids=PROPOSERS.keys())
@pytest.mark.slow
def test_as_it_stands_it_is_exact(propose):
    assert Pair(P, propose, verifier=sequential(), budget=lambda g: 2).gap(length=3) < 1e-12


@pytest.mark.parametrize("error", PLANTS)
@pytest.mark.parametrize("propose", PROPOSERS.values(), ids=PROPOSERS.keys())
def test_a_plant_is_wrong_for_every_draft(propose, error):
    verifier = PLANTS[error](PointMass(), Exactness.DISTRIBUTION)
    assert Pair(P, propose, verifier=verifier, budget=lambda g: 2).gap(length=2) > 0.01


def test_plants_leave_other_grades_alone():
    for rule in PLANTS.values():
        assert rule(PointMass(), Exactness.TRAJECTORY) is choose(PointMass(), Exactness.TRAJECTORY)
