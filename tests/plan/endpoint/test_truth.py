"""A plan recovers the truth of a simulated engine of known cost and acceptance, and refuses to guess."""

from dataclasses import replace

import pytest

from foretoken.core.errors import ForetokenError
from foretoken.plan.endpoint import PlannedEndpoint, ServerPair, plan_endpoint, run
from foretoken.plan.endpoint.outcome import OWN, EndpointPlan, EndpointPredictor, EndpointRow
from foretoken.plan.endpoint.statistics import EndpointAcceptance, PassSeconds, SpeedModel
from foretoken.probe.client import EndpointClient
from foretoken.probe.server import DIALECTS, CannotTellError, ServerKind, Side
from foretoken.probe.workload import draft_length

from .simulated import PROMPTS, SimulatedEngine, SimulatedSender, close

NOWHERE = "http://127.0.0.1:9"


def planned(monkeypatch, engine, kind=ServerKind.VLLM, sender=None, **options) -> EndpointPlan:
    """A plan of a simulated engine, without any request."""
    end = PlannedEndpoint(
        ServerPair(NOWHERE, "sim", baseline=NOWHERE, kind=kind),
        **{"concurrency": (1, 4, 8), "depth": engine.depth} | options,
    )
    speculative = Side("speculative", EndpointClient(NOWHERE), "sim", DIALECTS[kind])
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


def test_passes_are_timed_by_themselves_where_streams_show_them(monkeypatch):
    """Five texts, some of which are drafted well and others are not, still tell the seconds of a pass."""
    plan = planned(monkeypatch, SimulatedEngine(spread=0.2), concurrency=(1, 4), max_tokens=32)
    known = plan.predictor.speeds.speculative[4, 1]
    assert known.width < 0.1 and close(known.seconds, SimulatedEngine().seconds(1, 4), 0.05)


@pytest.mark.parametrize("fixed, draft", [(0.0, 0.003), (0.003, 0.002), (0.001, 0.0005)])
def test_other_depths_are_predicted(monkeypatch, fixed, draft):
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
    (hint, length) = planned(monkeypatch, SimulatedEngine(), ServerKind.SGLANG).paste
    assert hint.startswith("# beside") and length.startswith("--speculative-num-steps ")
    useless = planned(monkeypatch, SimulatedEngine(rate=0.0, spread=0.0, draft=0.01), ServerKind.LLAMACPP)
    assert useless.choice.row is None and useless.paste == ("--spec-type none",) and useless.choice.sure


@pytest.mark.parametrize(
    "engine, fault, said",
    [
        (SimulatedEngine(lies=1.6), {}, "impossible"),
        (SimulatedEngine(lies=0.4), {}, "tokens per pass, but"),
        (SimulatedEngine(rate=0.0, spread=0.0, told=False, batched=True), {}, "reports nothing about its drafts"),
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
    assert "8 requests at once are skipped, because the server does not decode all of them" in plan.notes[0]


class PlainCrowds(SimulatedSender):
    """Drafts only while fewer than 8 requests run."""

    def send(self, side, prompts, tag):
        if len(prompts) < 8:
            return super().send(side, prompts, tag)
        return SimulatedSender(replace(self.engine, depth=0), self.max_tokens).send(side, prompts, tag)


def test_drafts_that_depend_on_the_concurrency_give_no_plan(monkeypatch):
    engine = SimulatedEngine()
    plan = planned(monkeypatch, engine, sender=PlainCrowds(engine, 64), concurrency=(1, 4, 16))
    assert "tokens per pass depend on the concurrency" in plan.because


@pytest.mark.parametrize("told", [True, False])
def test_a_draft_length_below_the_servers_gives_no_plan(monkeypatch, told):
    assert (
        "2 is not the server's draft length"
        in planned(monkeypatch, SimulatedEngine(depth=6, told=told), depth=2).because
    )


def test_a_server_that_drafts_less_tells_no_other_draft_lengths(monkeypatch):
    plan = planned(monkeypatch, SimulatedEngine(depth=3), depth=8)
    assert {depth for depth, _ in own_rows(plan)} == {8} and "other draft lengths" in plan.notes[0]


@pytest.mark.parametrize("rate, depth", [(0.9, 4), (0.4, None)])
def test_the_draft_length_is_taken_from_bursts_that_recur(rate, depth):
    engine = SimulatedEngine(rate=rate, spread=0.0, told=False)
    speculative = Side("speculative", EndpointClient(NOWHERE), "sim", DIALECTS[ServerKind.VLLM])
    waves = [SimulatedSender(engine, 64).send(speculative, [prompt], prompt) for prompt in PROMPTS[:4]]
    waves = [replace(wave, counted=None) for wave in waves]
    if depth:
        assert draft_length(speculative, waves) == depth
    else:
        with pytest.raises(CannotTellError, match="--depth"):
            draft_length(speculative, waves)


def test_a_loss_before_gains_does_not_switch_speculation_off():
    seconds = {1: 0.045, 4: 0.022, 16: 0.028}
    speeds = SpeedModel(
        {number: PassSeconds(0.02, 0.01) for number in seconds},
        {(4, number): PassSeconds(each, 0.01, 2.0) for number, each in seconds.items()},
    )
    acceptance = {4: EndpointAcceptance(4, None, 100.0, ((2.0, 2.0),) * 4)}
    whole = EndpointPredictor(acceptance, speeds, [], [1, 4, 16])
    assert whole._off(4)[0] is None


def row(name: str, concurrency: int, speedup: float) -> EndpointRow:
    config = None if name == OWN else {"method": name}
    figures = {"tokens_per_pass": 2.0, "tokens_per_pass_low": 2.0, "tokens_per_pass_high": 2.0, "acceptance": ()}
    ends = {"speedup": speedup, "low": speedup * 0.99, "high": speedup * 1.01, "plain_tokens_per_second": 1.0}
    return EndpointRow(name=name, method=name, config=config, depth=4, concurrency=concurrency, **figures, **ends)


def test_a_gain_at_one_concurrency_does_not_beat_gains_at_all():
    speeds = SpeedModel(
        {number: PassSeconds(0.02, 0.01) for number in (1, 4, 16)},
        {(4, number): PassSeconds(0.02, 0.01, 1.9) for number in (1, 4, 16)},
    )
    acceptance = {4: EndpointAcceptance(4, None, 100.0, ((2.0, 2.0),) * 4)}
    whole = EndpointPredictor(acceptance, speeds, [], [1, 4, 16])
    owns = [row(OWN, number, 1.9) for number in (1, 4, 16)]
    assert whole.choice([row("ngram", 1, 2.0), *owns]).row.name == OWN
    alone = whole.choice([row("ngram", 1, 9.0), *owns])
    assert alone.row.name == "ngram" and not alone.sure and alone.off_above == 1
    assert alone.limit.depths == ((1, 1, 4), (2, None, 0))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda record: record["setting"].update(model="other"), "model other instead of sim"),
        (lambda record: record["setting"].update(temperature=1.0), "temperature"),
        (lambda record: record["measured"]["speculative"][0].__setitem__(0, 0), "draft lengths of at least 1"),
        (lambda record: record["measured"]["plain"][0].__setitem__(1, 0.0), "records that plan --endpoint wrote"),
        (lambda record: record["measured"]["speculative"][0].__setitem__(2, float("nan")), "finite times"),
    ],
)
def test_an_earlier_plan_of_something_else_is_refused(monkeypatch, change, said):
    engine = SimulatedEngine()
    earlier = planned(monkeypatch, replace(engine, depth=2)).to_dict()
    change(earlier)
    with pytest.raises(ForetokenError, match=said):
        planned(monkeypatch, engine, earlier=[earlier])
