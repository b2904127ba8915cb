"""``foretoken audit`` on the tiny pair, on a fake server, and on an engine that a fake server plays."""

import json
from contextlib import contextmanager

import pytest
from tests.audit.endpoint.fake import Behaviour, serving
from tests.audit.endpoint.tasks import PROMPTS
from tests.audit.endpoint.test_engines import Fake, through
from tests.cli.conftest import prompts_file

from foretoken.audit import Audit, Check, CheckOutcome
from foretoken.audit.endpoint.engines import EnginePair
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


@pytest.fixture
def prompts(tmp_path):
    return prompts_file(tmp_path, PROMPTS)


@pytest.mark.slow
def test_an_audit_writes_its_record_and_page(run, prompts, tmp_path):
    output, page = tmp_path / "audit.json", tmp_path / "audit.html"
    with serving(Behaviour()) as url:
        files = ("--prompts", str(prompts), "--output", str(output), "--html", str(page))
        result = run("audit", "--endpoint", url, "--model", "table", "--budget", "8ktokens", *files).ok()
    record = json.loads(output.read_text())
    assert record["outcome"] == "passed" and record["summary"] in result.out
    assert "requests" in result.err and "(power 0.9)" in result.err  # before
    assert record["subject"]["spent"]["speculative"]["requests"] > 0
    spent = sum(side["tokens"] for side in record["subject"]["spent"].values())
    assert spent == pytest.approx(record["subject"]["plan"]["tokens"], rel=0.2)
    assert "structured output" in page.read_text() and "honoured" in page.read_text()
    assert not output.with_name("audit.json.partial").exists()


def test_costs_alone(run, prompts):
    behaviour = Behaviour()
    with serving(behaviour) as url:
        dry = ("--endpoint", url, "--model", "table", "--budget", "20ktokens", "--prompts", str(prompts))
        result = run("audit", *dry, "--dry-run", "--json")
    assert result.code == 0 and json.loads(result.out)["plan"]["tokens"] == pytest.approx(20_000, rel=0.1)
    assert len(behaviour.seen) < 10
    assert f"{len(behaviour.seen)} requests and" in result.err and "are spent already" in result.err
    assert json.loads(result.out)["plan"]["sent"]["requests"] == len(behaviour.seen)


@pytest.mark.slow
def test_an_audit_goes_on_where_it_stopped(run, prompts, tmp_path):
    output = tmp_path / "audit.json"
    with serving(Behaviour(trouble="fails", healthy=20)) as url:
        words = ("--endpoint", url, "--model", "table", "--budget", "4ktokens", "--prompts", str(prompts))
        first = run("audit", *words, "--output", str(output), "--retries", "0")
        assert first.code == 3 and "inconclusive, because" in first.out
        second = run("audit", *words, "--output", str(output), "--retries", "0")
    assert second.code == 3
    spent = json.loads(output.read_text())["subject"]["spent"]
    assert sum(side["resumed"] for side in spent.values()) > 10
    assert output.with_name("audit.json.partial").exists()


@pytest.fixture
def words(prompts, monkeypatch):
    """Options of an audit of vLLM, which a fake server plays."""
    asked = []

    @contextmanager
    def started(name, model, config):
        asked.append((name, str(model), config))
        with serving(Behaviour()) as url:
            yield EnginePair(name, "table", Fake(through(url, speculative_tokens=0)), Fake(through(url)))

    monkeypatch.setattr("foretoken.audit.endpoint.engines.started", started)
    return asked, ("--engine", "vllm", "--budget", "4ktokens", "--prompts", str(prompts))


@pytest.mark.slow
def test_an_engine_is_audited_like_a_server(run, words):
    asked, options = words
    result = run("audit", *options, "--model", "m", "--draft-model", "d", "--json")
    record = json.loads(result.out)
    assert result.code in (0, 3) and record["subject"]["server"] == "vllm", result.err
    assert record["subject"]["endpoint"] == "vllm 1.0"
    ((name, model, config),) = asked
    assert (name, model, config.model, config.method_in_force) == ("vllm", "m", "d", "draft_model")
    assert "generated tokens" in result.err


@pytest.mark.parametrize(
    "args, said",
    [
        ((), "vllm is audited with draft_model or ngram, not with 'auto'; name one"),
        (("--speculative-config", '{"method": "none"}'), "there is nothing to audit: the method is 'none'"),
    ],
)
def test_an_engine_needs_a_way_to_speculate(run, args, said):
    run("audit", "--engine", "vllm", "--model", "m", *args).refused(said)
