"""Ten ways in which a server's speculation can be wrong: each is found by the check that is made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.audit.endpoint import tuned
from foretoken.audit.endpoint.distribution import distribution
from foretoken.audit.endpoint.parameters import Treatment, exact_findings
from foretoken.audit.endpoint.parity import parity
from foretoken.audit.result import CheckOutcome

from .fake import FAULTS, Behaviour
from .tasks import SIZES, tasked

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
@pytest.mark.parametrize("fault", ["", *TUNED])
def test_parameters_that_change_the_distribution(fault, monkeypatch):
    names = [TUNED[fault]] if fault else list(TUNED.values())
    monkeypatch.setattr(tuned, "TUNINGS", {name: tuned.TUNINGS[name] for name in names})
    with tasked(Behaviour(fault)) as task:
        found = tuned.tuned_findings(task)
    assert {each.plain for each in found} == {Treatment.HONOURED}, found
    for each in found:
        assert (each.speculative is Treatment.HONOURED) is not bool(fault), each
        assert each.outcome is (CheckOutcome.FAILED if fault else CheckOutcome.PASSED)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *TUNED])
def test_parameters_of_a_server_that_has_chats_alone(fault, monkeypatch):
    names = [TUNED[fault]] if fault else [*TUNED.values(), "presence_penalty"]
    monkeypatch.setattr(tuned, "TUNINGS", {name: tuned.TUNINGS[name] for name in names})
    with tasked(Behaviour(fault, chat_only=True)) as task:
        found = tuned.tuned_findings(task)
    for each in found:
        assert each.plain is Treatment.HONOURED, found
        assert each.outcome is (CheckOutcome.FAILED if fault else CheckOutcome.PASSED), each


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
