"""A plan recovers the truth of a simulated engine of known cost and acceptance, and refuses to guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.endpoint.client import EndpointClient
from foretoken.endpoint.dialects import DIALECTS, ServerKind
from foretoken.endpoint.side import Abilities, Side
from foretoken.plan.endpoint import PlannedEndpoint, ServerPair, plan_endpoint, run
from foretoken.plan.endpoint.outcome import OWN, EndpointPlan

from .simulated import PROMPTS, SimulatedEngine, SimulatedSender, close

NOWHERE = "http://127.0.0.1:9"


def planned(monkeypatch, engine, kind=ServerKind.VLLM, sender=None, **options) -> EndpointPlan:
    """A plan of a simulated engine, without any request."""
    end = PlannedEndpoint(
        ServerPair(NOWHERE, "sim", baseline=NOWHERE, kind=kind),
        **{"concurrency": (1, 4, 8), "depth": engine.depth} | options,
    )
    speculative = Side("speculative", EndpointClient(NOWHERE), "sim", DIALECTS[kind], {}, Abilities())
    plain = replace(speculative, name="plain")
    fake = sender or SimulatedSender(engine, end.max_tokens)
    monkeypatch.setattr(run, "WaveSender", lambda *arguments: fake)
    monkeypatch.setattr(run._Planning, "_sides", lambda self: (plain, speculative))
    return plan_endpoint(end, PROMPTS)


def own_rows(plan):
    assert not plan.because, plan.because
    return {(row.depth, row.concurrency): row for row in plan.rows if row.name == OWN}


@pytest.mark.parametrize(
    "engine", [SimulatedEngine(), SimulatedEngine(one_token_chunks=True), SimulatedEngine(told=False)]
)
def test_measured_speedups_are_the_engines(monkeypatch, engine):
    rows = own_rows(planned(monkeypatch, engine))
    for concurrency in (1, 4, 8):
        row = rows[engine.depth, concurrency]
        assert row.measured
        assert row.low < engine.speedup(engine.depth, concurrency) < row.high
        assert close(row.speedup, engine.speedup(engine.depth, concurrency), 0.1)


@pytest.mark.parametrize("fixed, draft", [(0.0, 0.003), (0.003, 0.002), (0.001, 0.0005)])
def test_other_depths_are_foretold(monkeypatch, fixed, draft):
    engine = SimulatedEngine(fixed=fixed, draft=draft)
    rows = own_rows(planned(monkeypatch, engine))
    for (depth, concurrency), row in rows.items():
        truth = engine.speedup(depth, concurrency)
        assert row.low < truth < row.high, (depth, concurrency, row, truth)
        assert close(row.speedup, truth, 0.13), (depth, concurrency, row.speedup, truth)


def test_a_switch_for_a_request_measures_two_depths(monkeypatch):
    engine = SimulatedEngine(fixed=0.004, draft=0.002)
    plan = planned(monkeypatch, engine, ServerKind.FORETOKEN)
    assert {row.depth for row in plan.rows if row.measured} == {4, 8}
    for (depth, concurrency), row in own_rows(plan).items():
        if depth <= 8:
            assert close(row.speedup, engine.speedup(depth, concurrency), 0.1), (depth, concurrency)


def test_an_earlier_plan_at_another_depth_helps(monkeypatch):
    engine = SimulatedEngine(fixed=0.006, draft=0.001)
    earlier = planned(monkeypatch, replace(engine, depth=2)).to_dict()
    rows = own_rows(planned(monkeypatch, replace(engine, depth=6), earlier=[earlier]))
    for depth in (1, 2, 3, 4, 5, 6, 8):
        assert close(rows[depth, 4].speedup, engine.speedup(depth, 4), 0.1), depth


def test_it_says_above_how_many_requests_to_switch_off(monkeypatch):
    engine = SimulatedEngine(row=0.003)  # rows are dear, so that a crowd gains nothing
    truth = next(n for n in range(1, 64) if engine.speedup(4, n) <= 1.0) - 1
    choice = planned(monkeypatch, engine, concurrency=(1, 4, 8, 16, 32)).choice
    depth = choice.row.depth
    truth = next(n for n in range(1, 64) if engine.speedup(depth, n) <= 1.0) - 1
    assert choice.off_low <= truth <= (choice.off_high or 64)
    assert abs(choice.off_above - truth) <= max(2, truth // 4)
    assert choice.limit.depths[-1][2] < choice.limit.depths[0][2]


def test_the_engines_own_words_are_ready_to_paste(monkeypatch):
    dear = SimulatedEngine(row=0.003)
    current = {"method": "draft_model", "model": "D"}
    (line,) = planned(monkeypatch, dear, concurrency=(1, 4, 16, 32), current=current).paste
    assert line.startswith("--speculative-config '{") and "num_speculative_tokens_per_batch_size" in line
    assert '"method": "draft_model"' in line
    lines = planned(monkeypatch, SimulatedEngine(), ServerKind.LLAMACPP).paste
    assert any("--spec-draft-n-max" in line for line in lines)
    useless = planned(monkeypatch, SimulatedEngine(rate=0.0, spread=0.0, draft=0.01), ServerKind.LLAMACPP)
    assert useless.choice.row is None and useless.paste == ("--spec-type none",) and useless.choice.sure


@pytest.mark.parametrize(
    "engine, fault, said",
    [
        (SimulatedEngine(lies=1.6), {}, "impossible"),
        (SimulatedEngine(lies=0.4), {}, "tokens per pass, but"),
        (SimulatedEngine(rate=0.0, spread=0.0, told=False, batched=True), {}, "tells nothing about its drafts"),
        (SimulatedEngine(), {"others": 2.0}, "for other requests"),
        (SimulatedEngine(), {"fails_above": 0}, "does not stream a text: 429"),
    ],
)
def test_it_cannot_tell_because(monkeypatch, engine, fault, said):
    plan = planned(monkeypatch, engine, sender=SimulatedSender(engine, 64, **fault))
    assert said in plan.because and not plan.rows and plan.choice is None


def test_crowds_that_fail_are_left_out_with_the_reason(monkeypatch):
    engine = SimulatedEngine()
    sender = SimulatedSender(engine, 64, slots=4)
    plan = planned(monkeypatch, engine, sender=sender)
    assert {row.concurrency for row in plan.rows} == {1, 4}
    assert "nothing is told about 8 requests at once, because the server does not decode so many" in plan.notes[0]
