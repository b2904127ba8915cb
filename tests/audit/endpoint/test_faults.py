"""Servers whose speculation is wrong are detected by the check made for it; a server that fails is inconclusive."""

from dataclasses import replace

import pytest
from tests.serve.conftest import running

from foretoken import LLM
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.endpoint import distribution as checks
from foretoken.audit.endpoint.distribution import distribution
from foretoken.audit.endpoint.parameters import Treatment, exact_findings
from foretoken.audit.endpoint.parity import parity
from foretoken.audit.subject import CheckOutcome
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.errors import ForetokenError, InvalidRequest

from .fake import FAULTS, Behaviour, serving
from .tasks import PROMPTS, SIZES, Patience, endpoint, tasked

DISTRIBUTION = ("residual",)
PARITY = {"greedy": "greedy parity", "penalties": "greedy parity", "logprobs": "log-probabilities"}
TUNED = {"temperature": "temperature", "top_p": "top_p", "bonus": "top_k"}
EXACT = {"stop": "stop", "seed": "seed", "length": "max_tokens"}


def test_every_fault_has_its_test():
    assert sorted([*DISTRIBUTION, *PARITY, *TUNED, *EXACT]) == sorted(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *DISTRIBUTION])
def test_the_sampled_distribution(fault):
    with tasked(Behaviour(fault)) as task:
        plain, own, control = distribution(task)
    assert plain.outcome is CheckOutcome.PASSED, plain.evidence
    assert own.outcome is (CheckOutcome.FAILED if fault else CheckOutcome.PASSED), own.evidence
    assert control.outcome is CheckOutcome.PASSED, control.evidence


@pytest.mark.parametrize("fault", ["", *PARITY])
def test_greedy_texts_and_log_probabilities(fault):
    with tasked(Behaviour(fault), replace(SIZES, parity_tokens=32)) as task:
        checks = {check.name: check for check in parity(task)}
    wrong = [name for name, check in checks.items() if check.outcome is CheckOutcome.FAILED]
    assert wrong == ([PARITY[fault]] if fault else []), checks


@pytest.mark.slow
@pytest.mark.parametrize("chat_only", [False, True])
@pytest.mark.parametrize("fault", ["", *TUNED])
def test_parameters_that_change_the_distribution(fault, chat_only, monkeypatch):
    names = [TUNED[fault]] if fault else [*TUNED.values(), *["presence_penalty"] * chat_only]
    monkeypatch.setattr(checks, "TUNINGS", {name: checks.TUNINGS[name] for name in names})
    with tasked(Behaviour(fault, chat_only=chat_only)) as task:
        found = checks.tuned_findings(task)
    assert {each.plain for each in found} == {Treatment.HONOURED}, found
    for each in found:
        assert (each.speculative is Treatment.HONOURED) is not bool(fault), each
        assert each.outcome is (CheckOutcome.FAILED if fault else CheckOutcome.PASSED)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *EXACT])
def test_parameters_that_show_in_a_text(fault):
    with tasked(Behaviour(fault)) as task:
        found = exact_findings(task)
    wrong = [each.parameter for each in found if each.outcome is CheckOutcome.FAILED]
    assert wrong == ([EXACT[fault]] if fault else []), found
    assert ("characters from there" in found[0].how) is (fault == "stop")  # which ends texts late
    assert {each.plain for each in found} <= {Treatment.HONOURED, Treatment.UNDECIDED}


def test_a_refused_parameter_is_named_with_the_servers_words():
    with tasked(Behaviour(refused=("seed", "bad_words"))) as task:
        found = {each.parameter: each for each in exact_findings(task)}
    assert found["seed"].speculative is found["bad_words"].plain is Treatment.REFUSED
    assert "seed is not supported" in found["seed"].how
    assert found["seed"].outcome is CheckOutcome.PASSED  # speculation changes nothing


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


@pytest.mark.slow
def test_our_server(tiny_pair):
    llm = LLM(tiny_pair.target, tiny_pair.draft, max_model_len=512, speculative_config={"num_speculative_tokens": 3})
    with running(llm) as server:
        model = server.client.models.list().data[0].id
        endpoint = Endpoint(server.url, model, budget=4000, checkpoint=str(tiny_pair.target))
        result = audit_endpoint(endpoint, [function[:60] for function in FUNCTIONS])
    failed = [check for check in result.checks if check.outcome is CheckOutcome.FAILED]
    assert not failed, [check.evidence for check in failed]
    assert result.subject["server"] == "foretoken" and result.subject["plain_by"] == '{"speculative_tokens": 0}'
    checks = {check.name: check for check in result.checks}
    for name in ("speculation", "greedy parity", "log-probabilities", "sampled distribution", "other parameters"):
        assert checks[name].outcome is CheckOutcome.PASSED, checks[name].evidence
