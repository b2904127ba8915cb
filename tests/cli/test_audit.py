"""``foretoken audit`` on the tiny pair."""

from __future__ import annotations

import json

import pytest

from foretoken.audit import Audit, Check, CheckOutcome
from foretoken.audit.subject import AuditSpeed
from foretoken.cli.options import ModelOptions


@pytest.mark.slow
def test_an_audit_names_every_check_and_its_outcome(run, pair, tmp_path, short_audits):
    file = tmp_path / "audit.json"
    result = run("audit", "--budget", "1s", "--no-float32", "--output", str(file))
    assert result.code in (0, 3), result.out + result.err
    record = json.loads(file.read_text())
    assert {0: "passed", 3: "inconclusive"}[result.code] == record["outcome"]
    for check in record["checks"]:
        assert check["name"] in result.out and check["outcome"] != "failed"
    assert result.out.splitlines()[-1].startswith(record["outcome"].upper())
    assert record["summary"] in result.out
    assert "\x1b" not in result.out
    stages = [line.split("%  ")[1] for line in result.err.splitlines()]
    assert stages == ["loading the models", *(check["name"] for check in record["checks"])]


@pytest.mark.slow
def test_transformers_is_audited_with_the_checks_that_it_can_have(run, pair, short_audits):
    lookup = ("--speculative-config", '{"method": "ngram"}')
    result = run("audit", "--engine", "transformers", *lookup, "--budget", "1s", "--temperature", "0.8")
    assert result.code in (0, 3), result.out + result.err
    assert "engine transformers" in result.out and "skipped" in result.out


@pytest.mark.parametrize(
    "given", [{}, {"model": "m", "draft_model": "d"}, {"model": "m", "speculative_config": '{"model": "d"}'}]
)
def test_a_draft_model_drafts_alone_in_other_engines(given):
    assert ModelOptions(**given).pair()[1].method == "draft_model"


@pytest.mark.parametrize(
    "outcome, code", [(CheckOutcome.PASSED, 0), (CheckOutcome.FAILED, 1), (CheckOutcome.INCONCLUSIVE, 3)]
)
def test_the_verdict_is_the_exit_code(run, pair, monkeypatch, outcome, code):
    checks = (Check("negative control", CheckOutcome.PASSED, "found"), Check("a check", outcome, "some evidence"))
    monkeypatch.setattr("foretoken.audit.run.audit", lambda *_, **__: Audit({"model": "m"}, checks, 3.0))
    result = run("audit", "--color", "always")
    assert result.code == code
    assert f"{outcome.upper()} in 3 s" in result.out.splitlines()[-1]
    assert "\x1b[" in result.out and "some evidence" in result.out


def test_a_budget_that_is_too_short_is_refused_with_the_least(run, pair, monkeypatch):
    monkeypatch.setattr("foretoken.audit.run.measured_speed", lambda *_: AuditSpeed(10.0, 1.0))
    result = run("audit", "--budget", "30s")
    assert result.code == 1 and result.out == ""
    error = result.err.splitlines()[-1]
    assert error.startswith("foretoken: error: --budget 30s is too short here: one text for every check takes about 3")
    assert error.endswith("give a larger budget, or --no-float32")


def test_without_drafts_there_is_nothing_to_audit(run, pair):
    result = run("audit", "--speculative-config", '{"method": "none"}')
    assert result.code == 1 and result.out == ""
    assert "there is nothing to audit: the method is 'none'" in result.err.splitlines()[-1]


def test_help_names_the_exit_codes(run):
    assert "0 passed, 1 failed, 3 inconclusive" in " ".join(run("audit", "--help").out.split())
