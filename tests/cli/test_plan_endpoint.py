"""``foretoken plan --endpoint`` on a server of a simulated engine."""

from __future__ import annotations

import json

import pytest
from tests.plan.endpoint.simulated import PROMPTS, StreamingBehaviour, streaming


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return file


@pytest.mark.slow
def test_a_plan_writes_its_record_and_page(run, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("foretoken.plan.endpoint.outcome._WIDEST", 1e9)  # other programs disturb short passes
    output, page = tmp_path / "plan.json", tmp_path / "plan.html"
    with streaming(StreamingBehaviour()) as url, streaming(StreamingBehaviour(), speculative=False) as plain:
        words = ("--endpoint", url, "--baseline", plain, "--model", "sim", "--max-tokens", "24")
        words += ("--concurrency", "1", "--concurrency", "2", "--prompts", str(prompts))
        config = ("--speculative-config", '{"method": "draft_model", "model": "D"}')
        result = run("plan", *words, *config, "--output", str(output), "--html", str(page))
    assert result.code == 0, result.out + result.err
    assert "requests" in result.err and "minutes" in result.err  # before
    record = json.loads(output.read_text())
    assert record["outcome"] == "plan" and record["verdict"][0] in result.out
    assert "--speculative-config" in result.out
    assert "Speedup by concurrency" in page.read_text() and "suffix" in page.read_text()
    assert not output.with_name("plan.json.partial").exists()


def test_no_plan_has_a_reason_and_a_code(run, prompts, tmp_path):
    page = tmp_path / "plan.html"
    words = ("--endpoint", "http://127.0.0.1:9", "--model", "sim", "--retries", "0", "--prompts", str(prompts))
    result = run("plan", *words, "--html", str(page))
    assert result.code == 3 and "cannot tell, because" in result.out
    assert "Cannot tell, because" in page.read_text()
    shown = run("plan", *words, "--json")
    assert shown.code == 3 and json.loads(shown.out)["outcome"] == "cannot tell"


def test_costs_alone(run, prompts):
    with streaming(StreamingBehaviour()) as url, streaming(StreamingBehaviour(), speculative=False) as plain:
        words = ("--endpoint", url, "--baseline", plain, "--model", "sim", "--concurrency", "2")
        result = run("plan", *words, "--prompts", str(prompts), "--dry-run", "--json", "--max-tokens", "24")
    costs = json.loads(result.out)["costs"]
    assert result.code == 0 and costs["requests"] == 20
    assert costs["sent"] == {
        "requests": 10,
        "tokens": 204,
    }  # a first one and warm-up waves to each side, and two probes
    assert "10 requests and 204 generated tokens are spent already" in " ".join(result.err.split())
