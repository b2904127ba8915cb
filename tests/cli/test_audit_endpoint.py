"""``foretoken audit --endpoint`` on a fake server."""

from __future__ import annotations

import json

import pytest
from tests.audit.endpoint.fake import Behaviour, serving
from tests.audit.endpoint.tasks import PROMPTS


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return file


@pytest.mark.slow
def test_an_audit_writes_its_record_and_page(run, prompts, tmp_path):
    output, page = tmp_path / "audit.json", tmp_path / "audit.html"
    with serving(Behaviour()) as url:
        files = ("--prompts", str(prompts), "--output", str(output), "--html", str(page))
        result = run("audit", "--endpoint", url, "--model", "table", "--budget", "8ktokens", *files)
    assert result.code == 0, result.out + result.err
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
