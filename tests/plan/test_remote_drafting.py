"""Drafting on another machine, predicted from the rows of a plan."""

import json
from typing import Any

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.plan.candidates import PlanRow
from foretoken.plan.outcome import Plan, rendered
from foretoken.plan.page import page
from foretoken.plan.simulator import LOCAL, REMOTE_STRATEGIES, check_rtt, conditional, remote_drafting
from foretoken.plan.strategies import sequential_seconds

from .made_up import plan_row

CHANCE = 0.8


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.plan.simulator.TOKENS", 150)


def row(depth: int, target: float, step: float, name: str = "draft_model d", **changed: Any) -> PlanRow:
    tokens = (1 - CHANCE ** (depth + 1)) / (1 - CHANCE)
    seconds = target + depth * step
    facts: dict[str, Any] = {
        "name": name,
        "tokens_per_pass": tokens,
        "config": {"method": "draft_model", "model": "d", "num_speculative_tokens": depth},
        "step_seconds": seconds,
        "draft_seconds": depth * step,
        "plain_seconds": target,
        "acceptance": tuple(CHANCE ** (i + 1) for i in range(depth)),
    }
    return plan_row("draft_model", depth, tokens * target / seconds, **facts | changed)


def chain(target: float, step: float, **changed: Any) -> list[PlanRow]:
    return [row(depth, target, step, **changed) for depth in range(1, 9)]


def test_chances_are_those_of_each_position():
    assert conditional((0.8, 0.4, 0.1)) == pytest.approx((0.8, 0.5, 0.25))
    assert conditional((0.5, 0.0, 0.0)) == (0.5, 0.0)
    assert conditional(()) == (0.0,)


def test_far_away_nothing_pays_and_near_by_a_slow_draft_does():
    slow = chain(0.030, 0.008)
    near, far = (remote_drafting(slow, rtt)[0] for rtt in (0.0, 0.5))
    assert [way.strategy for way in near.options] == [LOCAL, *REMOTE_STRATEGIES]
    assert near.best.strategy in ("pearl", "dsi") and near.best.speedup > near.local.speedup
    assert "draft there" in near.verdict
    assert far.best.speedup < 1.0 < far.local.speedup and "draft here" in far.verdict
    hopeless = remote_drafting(chain(0.030, 0.200), 0.5)[0]
    assert "plain decoding" in hopeless.verdict


def test_waiting_across_the_network_takes_what_it_takes_on_paper(monkeypatch):
    monkeypatch.setattr("foretoken.plan.simulator.REMOTE_STRATEGIES", ("si",))
    monkeypatch.setattr("foretoken.plan.simulator.TOKENS", 1000)
    result = remote_drafting(chain(0.030, 0.003), 0.010)[0]
    si = next(way for way in result.options if way.strategy == "si")
    paper = max(0.030 / sequential_seconds(CHANCE, depth, 0.030, 0.003, 0.010) for depth in range(1, 9))
    assert si.speedup == pytest.approx(paper, rel=0.06)


def test_the_best_chains_of_each_temperature_are_told_one_request_at_a_time():
    rows = [
        *chain(0.03, 0.003, name="a"),
        *chain(0.03, 0.006, name="b"),
        *chain(0.03, 0.012, name="c"),
        *chain(0.03, 0.003, name="a", temperature=1.0),
        *chain(0.03, 0.001, name="many", batch=4),
        row(8, 0.03, 0.001, "tree", config={"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 8}),
        row(8, 0.03, 0.001, "other", method="ngram"),
    ]
    result = remote_drafting(rows, 0.01)
    assert [(each.name, each.temperature) for each in result] == [("a", 0.0), ("b", 0.0), ("a", 1.0)]
    assert remote_drafting(rows[-2:], 0.01) == ()


def test_it_is_told_on_the_terminal_in_json_and_on_the_page():
    rows = chain(0.030, 0.008)
    plan = Plan(tuple(rows), (), remote_drafting=remote_drafting(rows, 0.01))
    record = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert record["remote_drafting"][0]["rtt"] == 0.01
    assert record["remote_drafting"][0]["best"] in record["remote_drafting"][0]["options"]
    told = [str(part) for part in rendered(plan)]
    assert plan.remote_drafting[0].verdict in told and any("drafting 10 ms away" in part for part in told)
    html = page(plan, {})
    assert "Drafting on another machine" in html and plan.remote_drafting[0].verdict in html
    assert "Drafting on another machine" not in page(Plan(tuple(rows), ()), {})


def test_invalid_round_trip_times_and_batches_are_refused():
    check_rtt(None, (4,))
    check_rtt(10.0, (1, 4))
    with pytest.raises(InvalidRequest, match="--rtt must be"):
        check_rtt(-1.0, (1,))
    with pytest.raises(InvalidRequest, match="one request at a time"):
        check_rtt(10.0, (4,))
