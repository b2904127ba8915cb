"""Tails and power beside scipy's."""

from __future__ import annotations

import pytest
from scipy import stats
from tests.exactness import gtest

from foretoken.audit.tally import chi2_tail, detectable, g_test, noncentrality, normal_tail


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
