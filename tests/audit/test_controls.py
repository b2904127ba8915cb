"""The negative control: exact unless a component is replaced; tails and power beside scipy's."""

import pytest
from scipy import stats
from tests.exactness import gtest
from tests.exactness.decode_step import Pair, argmax, drawn, drawn_tree, fixed_tree, table, top_plus_tree

from foretoken.audit.negative import PLANTS, sequential
from foretoken.audit.tally import chi2_tail, detectable, g_test, noncentrality, normal_tail
from foretoken.core.context import Exactness
from foretoken.core.draft import PointMass
from foretoken.verify import choose


@pytest.mark.parametrize("statistic, dof", [(0.5, 1), (19.0, 19), (60.0, 19), (400.0, 250)])
def test_tails_are_those_of_scipy(statistic, dof):
    assert chi2_tail(statistic, dof) == pytest.approx(stats.chi2.sf(statistic, dof), rel=1e-9)
    assert normal_tail(-2.5) == pytest.approx(2 * stats.norm.sf(2.5))


@pytest.mark.parametrize("dof", [1, 19, 120])
@pytest.mark.parametrize("level", [1e-3, 2e-5])
def test_power_is_that_of_the_noncentral_law(dof, level):
    assert noncentrality(dof, level) == pytest.approx(gtest.noncentrality(dof, level), rel=1e-6)


def test_a_detectable_shift_is_found_nine_times_in_ten():
    critical = stats.norm.isf(5e-4)
    assert stats.norm.sf(critical - detectable(1e-3)) == pytest.approx(0.9)


def test_g_test_agrees_with_the_one_that_tests_use():
    law = {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.115, 4: 0.01}
    counts = {0: 480, 1: 270, 2: 130, 3: 105, 4: 15}
    ours = g_test(list(counts.values()), [1000 * p for p in law.values()], 1e-3)
    other = gtest.g_test(counts, law)
    assert (ours.dof, ours.statistic) == (other.dof, pytest.approx(other.statistic))
    assert ours.p_value == pytest.approx(other.p_value)
    assert ours.moved == pytest.approx(other.delta, rel=1e-6)


def test_cells_that_expect_little_are_pooled():
    fit = g_test([2, 3, 95], [1.0, 2.0, 97.0], 1e-3)
    assert fit.dof == 0 and fit.p_value == 1.0
    assert g_test([1, 99], [0.0, 100.0], 1e-3).p_value == 0.0


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
