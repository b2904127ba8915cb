"""The audit as a whole."""

import json
from dataclasses import replace
from itertools import count

import pytest
from tests.audit.mutants import RULES
from tests.audit.toys import drafting, subject, work

from foretoken import LLM
from foretoken.audit import Audit, Check, CheckOutcome, audit
from foretoken.audit.implementations import Foretoken
from foretoken.audit.run import SHARES, measured_speed
from foretoken.audit.subject import CONTROL, AuditSpeed
from foretoken.core.errors import InvalidRequest

PROMPTS = ["0123", "45", "678901", "2"]


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """One on which a twentieth of a second passes whenever it is read: audits do as much on any machine."""
    read = count()
    for module in ("run", "subject", "negative"):
        monkeypatch.setattr(f"foretoken.audit.{module}.monotonic", lambda: next(read) / 20)
    monkeypatch.setattr("foretoken.audit.run.measured_speed", lambda *_: AuditSpeed())


class Slow(Foretoken):
    """A subject that takes a second for 32 tokens, by a clock that nothing else moves."""

    now = 0.0

    def generate(self, prompts, settings):
        result = super().generate(prompts, settings)
        type(self).now += sum(len(text.tokens) for text in result) / 32
        return result

    def logits(self, prompt, text):
        type(self).now += 0.2
        return super().logits(prompt, text)


@pytest.fixture
def slow(monkeypatch):
    for module in ("run", "subject", "negative"):
        monkeypatch.setattr(f"foretoken.audit.{module}.monotonic", lambda: Slow.now)
    monkeypatch.setattr("foretoken.audit.run.measured_speed", measured_speed)
    return subject(kind=Slow)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [60.0, 300.0])
def test_the_budget_is_kept_by_a_slow_model(slow, budget):
    result = audit(slow, PROMPTS, budget=budget)
    assert 0.5 * budget < result.seconds < 1.1 * budget, [(check.name, check.seconds) for check in result.checks]
    assert not any(check.outcome is CheckOutcome.FAILED for check in result.checks), result.to_dict()


def test_a_budget_that_cannot_be_kept_is_reported_at_once(slow):
    class Stopped(Exception):
        pass

    def stop(least: float) -> None:
        raise Stopped(least)

    started = Slow.now
    with pytest.raises(Stopped) as stopped:
        audit(slow, PROMPTS, budget=10.0, too_short=stop)
    assert Slow.now - started < 5.0  # two texts, which measure the speed
    least = stopped.value.args[0]
    result = audit(slow, PROMPTS, budget=10.0)
    assert 10.0 < result.seconds < 1.2 * least


def test_as_many_texts_are_checked_as_fit(monkeypatch):
    monkeypatch.setattr("foretoken.audit.subject.monotonic", lambda: 100.0)
    task = replace(work(subject()), deadline=110.0, speed=AuditSpeed(0.5, 0.25))
    assert [task.fitting(16, 1), task.fitting(16, 4), task.fitting(16, 1, 1), task.fitting(16, 1000)] == [16, 5, 13, 1]
    assert replace(task, deadline=90.0).fitting(16, 1) == 1
    assert replace(task, deadline=90.0, speed=AuditSpeed()).fitting(16, 1) == 16


def test_without_drafts_there_is_nothing_to_audit(tiny_pair):
    with pytest.raises(InvalidRequest, match="there is nothing to audit: the method is 'none'"):
        audit(LLM(tiny_pair.target, speculative_config={"method": "none"}))


@pytest.mark.slow
def test_an_honest_engine():
    seen = []
    result = audit(subject(), PROMPTS, budget=4.0, watch=lambda name, share: seen.append((name, share)))
    assert [check.name for check in result.checks] == list(SHARES)
    assert result.outcome in (CheckOutcome.PASSED, CheckOutcome.INCONCLUSIVE), result.summary
    assert [c for c in result.checks if c.outcome is CheckOutcome.FAILED] == []
    assert list(dict.fromkeys(name for name, _ in seen)) == list(SHARES)
    assert all(0.0 <= share <= 1.0 for _, share in seen)
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert record["outcome"] == result.outcome and len(record["checks"]) == len(SHARES)


@pytest.mark.slow
def test_a_wrong_one():
    result = audit(subject(drafting(strength=0.9), rule=RULES["rejects whenever p < q"]), PROMPTS, budget=3.0)
    assert result.outcome is CheckOutcome.FAILED
    assert "sampled distribution" in result.summary and result.summary.endswith("failed")


@pytest.mark.slow
def test_an_llm(tiny_pair):
    llm = LLM(tiny_pair.target, tiny_pair.draft, speculative_config={"method": "draft_model"}, max_model_len=256)
    result = audit(llm, ["def f(", "x = 1"], budget=1.0)
    assert not any(check.outcome is CheckOutcome.FAILED for check in result.checks), result.to_dict()
    assert result.subject["method"] == "draft_model"


def check(name: str, outcome: CheckOutcome) -> Check:
    return Check(name, outcome, "")


def test_the_verdict_needs_the_control():
    fine, control = check("a", CheckOutcome.PASSED), check(CONTROL, CheckOutcome.PASSED)
    skipped, doubtful = check("b", CheckOutcome.SKIPPED), check(CONTROL, CheckOutcome.INCONCLUSIVE)
    assert Audit({}, (fine, skipped, control), 1.0).outcome is CheckOutcome.PASSED
    assert Audit({}, (fine, doubtful), 1.0).outcome is CheckOutcome.INCONCLUSIVE
    assert Audit({}, (fine,), 1.0).outcome is CheckOutcome.INCONCLUSIVE
    assert Audit({}, (fine, doubtful, check("c", CheckOutcome.FAILED)), 1.0).outcome is CheckOutcome.FAILED


@pytest.mark.parametrize(
    "options, said",
    [
        ({"budget": 0}, "budget must be a number of at least 1"),
        ({"temperature": 0.0}, "temperature must be a number of at least 0.05"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"prompts": []}, "prompts must be a list of one text at least"),
        ({"prompts": ["12", ""]}, "prompt 2 is empty"),
    ],
)
def test_invalid_audits_are_refused(options, said):
    with pytest.raises(InvalidRequest, match=said):
        audit(subject(), **{"prompts": PROMPTS} | options)
