"""Simulated workers against the closed forms, and against what the papers say of their strategies."""

import math
import sys
from itertools import product

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.plan.simulator import pays, simulate, sweep
from foretoken.plan.strategies import STRATEGIES, Setting, best_window, sequential_seconds, servers_needed

TARGET = 0.030


# Seconds per token, derived from the algorithms; a: acceptance, g: lookahead, t and d: passes, r: round trip.


def distributed_seconds(a: float, g: int, t: float, d: float, r: float = 0.0) -> float:
    """DSI: a run of G accepted tokens and the recovered one ends with the pass requested after ceil(G/g) blocks.

    E[ceil(G/g)] = a / (1 - a^g). With ``servers_needed`` servers and g d <= t + r; else an upper bound.
    """
    return d if a == 1.0 else (1 - a) * (t + r + g * d * a / (1 - a**g))


def parallel_tokens(a: float, g: int) -> float:
    """Tokens per step of PEARL, a Markov chain of the states pre-verify and post-verify."""
    return sum(a**k for k in range(g)) / (1 + a - a**g)


def parallel_seconds(a: float, g: int, t: float, d: float, r: float = 0.0) -> float:
    return max(g * d, t + r) / parallel_tokens(a, g)


def paces(setting: Setting, strategies=STRATEGIES) -> dict[str, float]:
    """Seconds a token."""
    return {one.strategy: one.seconds / one.tokens for one in simulate(setting, strategies)}


@pytest.mark.parametrize("alpha, depth, rtt", list(product((0.3, 0.7, 0.9), (1, 4), (0.0, 0.04))))
@pytest.mark.slow
def test_the_simulator_agrees_with_the_closed_forms(alpha, depth, rtt):
    draft = TARGET / (4.1 if (depth > 1) == (rtt > 0) else 8.1)  # both with every other value
    servers = servers_needed(TARGET + rtt, draft, depth)
    result = paces(Setting(TARGET, draft, (alpha,), depth, servers, rtt, 4000, seed=2))
    window = best_window(alpha, TARGET, draft, rtt)
    expected = {
        "plain": TARGET,
        "si": sequential_seconds(alpha, depth, TARGET, draft, rtt),
        "dsi": distributed_seconds(alpha, depth, TARGET, draft, rtt),
        "pearl": parallel_seconds(alpha, depth, TARGET, draft, rtt),
        "dsd": sequential_seconds(alpha, window, TARGET, draft, rtt),
    }
    assert result == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("alpha, depth, share", [(0.0, 3, 0.6), (0.5, 1, 0.9), (0.8, 5, 0.2), (1.0, 4, 0.1)])
def test_distributed_speculation_is_never_slower(alpha, depth, share):
    draft = share * TARGET
    servers = servers_needed(TARGET, draft, depth)
    result = {one.strategy: one for one in simulate(Setting(TARGET, draft, (alpha,), depth, servers, tokens=1000))}
    minimum = max(min(draft, TARGET), (1.0 - alpha) * TARGET)
    maximum = min(TARGET, sequential_seconds(alpha, depth, TARGET, draft))
    assert result["dsi"].over_plain >= 0.999 and result["dsi"].over_si >= 0.999
    assert 0.95 * minimum <= result["dsi"].seconds / result["dsi"].tokens <= 1.05 * maximum


def test_one_server_is_never_slower_than_plain_whatever_the_draft():
    for alpha, share in product((0.0, 0.4, 0.9), (0.1, 0.9, 3.0)):
        (result,) = simulate(Setting(TARGET, share * TARGET, (alpha,), tokens=300), ("dsi",))
        assert result.over_plain >= 0.999


@pytest.mark.parametrize(
    "target, draft, depth, servers", [(30, 5, 1, 6), (30, 5, 5, 2), (30, 10, 3, 1), (33.3, 2.5, 2, 7)]
)
def test_servers_by_the_paper_s_formula(target, draft, depth, servers):
    assert servers_needed(target, draft, depth) == servers


def test_servers_help_until_none_has_to_wait():
    draft = TARGET / 6.1
    paths = [paces(Setting(TARGET, draft, (0.9,), 1, n, tokens=3000), ("dsi",))["dsi"] for n in (1, 2, 4, 7, 12)]
    assert paths[0] > paths[1] > paths[2] > paths[3] * 1.01
    assert paths[4] == pytest.approx(paths[3], rel=1e-6)


@pytest.mark.parametrize("ratio", [3.0, 5.0, 10.0])
@pytest.mark.slow
def test_pearl_s_best_draft_length_is_the_ratio_of_the_speeds(ratio):
    at = {depth: parallel_seconds(0.9, depth, TARGET, TARGET / ratio) for depth in range(1, 25)}
    assert min(at, key=at.__getitem__) == ratio
    near = range(1, 2 * int(ratio))
    simulated = {d: paces(Setting(TARGET, TARGET / ratio, (0.9,), d, tokens=3000), ("pearl",))["pearl"] for d in near}
    assert min(simulated, key=simulated.__getitem__) == pytest.approx(ratio, abs=1)


def test_pearl_gains_with_the_ratio_and_beats_waiting_where_drafts_are_good():
    gains = []
    for ratio in (2, 4, 8, 12):
        (result,) = simulate(Setting(TARGET, TARGET / ratio, (0.9,), ratio, tokens=3000), ("pearl",))
        gains.append(result.over_plain)
        best = min(sequential_seconds(0.9, depth, TARGET, TARGET / ratio) for depth in range(1, 33))
        assert best > TARGET / result.over_plain
    assert gains == sorted(gains)
    assert parallel_tokens(1.0, 6) == 6 and parallel_tokens(0.0, 6) == 1


def test_a_round_trip_favours_longer_windows_and_ends_the_gain():
    result = sweep(Setting(TARGET, 0.005, (0.8,), 5, 4, tokens=2000), "rtt", [0.0, 0.02, 0.05, 0.2])
    assert [each[0].strategy for each in result.outcomes] == ["plain"] * 4
    for at in range(1, 5):
        gains = [each[at].over_plain for each in result.outcomes]
        assert gains == sorted(gains, reverse=True)
    assert pays(result.outcomes[0]) is not None and pays(result.outcomes[-1]) is None
    windows = [best_window(0.8, TARGET, 0.005, rtt) for rtt in result.values]
    assert windows == sorted(windows) and windows[0] < windows[-1]


def test_a_strategy_slower_than_plain_is_never_recommended():
    assert pays(simulate(Setting(TARGET, 0.005, (0.8,), 5, 4, 0.2, 300), ("dsi",))) is None


def test_acceptance_by_position_follows_the_round():
    draft = TARGET / 5
    result = paces(Setting(TARGET, draft, (1.0, 0.0), 3, tokens=300), ("si",))["si"]
    assert result == pytest.approx((3 * draft + TARGET) / 2)


def test_the_same_seed_gives_the_same_figures():
    setting = Setting(TARGET, 0.005, (0.8, 0.6), 4, 3, 0.01, 400, seed=7)
    assert simulate(setting, repeats=2) == simulate(setting, repeats=2)
    other = Setting(TARGET, 0.005, (0.8, 0.6), 4, 3, 0.01, 400, seed=8)
    assert simulate(setting)[2].seconds != simulate(other)[2].seconds


def test_counts_of_a_simulation_are_consistent():
    for one in simulate(Setting(TARGET, 0.005, (0.7,), 5, 2, tokens=500)):
        assert one.wasted == one.drafted - one.accepted >= 0
        assert 0 <= one.drafting <= 1 and 0 < one.verifying <= 1
        assert one.tokens >= 500 and math.isfinite(one.over_si)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"target": 0.0}, "must take time"),
        ({"draft": -1.0}, "draft must be a number"),
        ({"acceptance": ()}, "acceptance must hold"),
        ({"acceptance": (0.5, 1.5)}, "position 2"),
        ({"depth": 0}, "depth"),
        ({"verifiers": 0}, "verifiers"),
        ({"rtt": math.nan}, "rtt"),
        ({"tokens": 10**9}, "tokens"),
    ],
)
def test_bad_settings_are_refused(changed, words):
    good = {"target": TARGET, "draft": 0.005, "acceptance": (0.8,)}
    with pytest.raises(InvalidRequest, match=words):
        Setting(**(good | changed))


def test_bad_questions_are_refused(monkeypatch):
    setting = Setting(TARGET, 0.005, (0.8,), tokens=20)
    with pytest.raises(InvalidRequest, match="no strategy 'fast'"):
        simulate(setting, ("fast",))
    with pytest.raises(InvalidRequest, match="cannot sweep 'depth'"):
        sweep(setting, "depth", [1.0])
    with pytest.raises(InvalidRequest, match="no values"):
        sweep(setting, "rtt", [])
    with pytest.raises(InvalidRequest, match="whole numbers"):
        sweep(setting, "verifiers", [1.5])
    with pytest.raises(InvalidRequest, match="must take time"):
        servers_needed(TARGET, 0.0, 3)
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(InvalidRequest, match=r"foretoken\[simulate\]"):
        simulate(setting)
