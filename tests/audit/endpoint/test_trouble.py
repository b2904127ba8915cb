"""Servers that fail, stall, limit, lie or close: inconclusive with the reason, and never a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.audit.endpoint import audit_endpoint
from foretoken.audit.endpoint.distribution import distribution
from foretoken.audit.endpoint.parameters import Treatment, exact_findings
from foretoken.audit.result import CheckOutcome
from foretoken.core.errors import ForetokenError, InvalidRequest

from .fake import Behaviour, serving
from .tasks import PROMPTS, SIZES, Patience, endpoint, tasked

REASONS = {
    "fails": "500: out of memory",
    "limits": "429: slow down (tried 2 times)",
    "stalls": "no answer within 2 s",
    "closes": "peer closed connection",
    "garbage": "not one of OpenAI's API",
}
PATIENT = Patience(timeout=60.0, retries=1, pause=0.01)
IMPATIENT = Patience(timeout=2.0, retries=0, pause=0.01)


@pytest.mark.parametrize("healthy", [0, 12])
@pytest.mark.parametrize("trouble", REASONS)
def test_a_server_in_trouble_is_no_pass(trouble, healthy):
    with serving(Behaviour(trouble=trouble, healthy=healthy)) as url:
        patience = IMPATIENT if trouble == "stalls" else PATIENT
        result = audit_endpoint(endpoint(url, patience=patience), PROMPTS)
    assert result.outcome is CheckOutcome.INCONCLUSIVE
    assert "inconclusive, because" in result.checks[0 if healthy == 0 else 1].evidence
    assert any(REASONS[trouble] in check.evidence for check in result.checks), [c.evidence for c in result.checks]


def test_log_probabilities_of_no_distribution_are_named():
    with tasked(Behaviour(trouble="lies"), replace(SIZES, sampled=4, sampled_plain=2)) as task:
        _, own, control = distribution(task)
    assert own.outcome is control.outcome is CheckOutcome.INCONCLUSIVE
    assert "log-probabilities are false" in own.evidence


def test_closed_streams_are_named():
    with tasked(Behaviour(trouble="closes streams")) as task:
        (found,) = (each for each in exact_findings(task) if each.parameter == "stream")
    assert found.speculative is Treatment.UNANSWERED and found.outcome is CheckOutcome.INCONCLUSIVE
    assert "peer closed connection" in found.how


def test_nothing_listens():
    result = audit_endpoint(endpoint("http://127.0.0.1:9", patience=IMPATIENT), PROMPTS)
    assert result.outcome is CheckOutcome.INCONCLUSIVE
    assert "gave no text" in result.checks[0].evidence and "127.0.0.1:9" in result.checks[0].evidence


def test_a_wrong_key_is_an_error_of_the_user():
    with serving(Behaviour(key="right")) as url, pytest.raises(ForetokenError, match=r"401: a wrong key.*--api-key"):
        audit_endpoint(endpoint(url, key="wrong"), PROMPTS)


def test_a_budget_too_small_is_refused():
    with serving(Behaviour()) as url, pytest.raises(InvalidRequest, match="at least 4,000 tokens"):
        audit_endpoint(endpoint(url, budget=100), PROMPTS)


@pytest.mark.slow
def test_without_a_plain_side_there_is_no_pass():
    with serving(Behaviour(owner="somebody", chat_only=True)) as url:
        result = audit_endpoint(endpoint(url), PROMPTS)
    assert result.subject["api"] == "chat/completions" and result.subject["server"] == "openai"
    assert result.outcome is CheckOutcome.INCONCLUSIVE
    assert "--baseline" in next(check.evidence for check in result.checks if check.name == "greedy parity")
