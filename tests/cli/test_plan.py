"""``foretoken plan`` as a user meets it, on the tiny pair."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def cache(own_cache, tmp_path):
    return tmp_path


def short(tiny_pair) -> str:
    return f"plan --model {tiny_pair.target} --draft-model {tiny_pair.draft} --count 3 --max-tokens 8 --turns 3"


@pytest.mark.slow
def test_a_plan_says_what_to_do(run, tiny_pair, cache):
    files = cache / "plan.json", cache / "plan.html"
    options = "--temperature 0 --batch 1 --batch 2"
    result = run(f"{short(tiny_pair)} {options} --output {files[0]} --html {files[1]}")
    assert result.code == 0, result.err
    assert "\x1b" not in result.out
    for words in ("temperature 0, batch 1", "temperature 0, batch 2", "plain", "draft_model draft", "recycling"):
        assert words in result.out
    assert "do not speculate" in result.out or "best:" in result.out
    record = json.loads(files[0].read_text())
    assert len(record["rows"]) == 2 * (8 + 2 + 2 + 2 + 2)
    assert {
        "method",
        "config",
        "num_speculative_tokens",
        "temperature",
        "batch",
        "tokens_per_pass",
        "interval",
        "speedup",
        "low",
        "high",
        "acceptance",
        "estimator",
    } <= record["rows"][0].keys()
    assert set(record["costs"]) == {"target", "draft"} and record["costs"]["target"][0]["rows"] == 1
    assert len(record["choices"]) == 2 and record["prompts"] == "3 of our own functions"
    assert {each["temperature"] for each in record["predictors"]} == {0.0}
    assert files[1].read_text().startswith("<!DOCTYPE html>")
    assert list((cache / "cache" / "costs").glob("*.json"))


def test_prompts_and_configurations_of_ones_own(run, tiny_pair, cache):
    prompts = cache / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"prompt": "import os"}\n')
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    options = f"--model {tiny_pair.target} --prompts {prompts} --max-tokens 8 --turns 3 --temperature 0.8 --color never"
    result = run(f"plan {options}", "--speculative-config", config)
    assert result.code == 0, result.err
    assert "temperature 0.8, batch 1" in result.out and "prompt_lookup_max 2" in result.out


@pytest.mark.slow
def test_texts_that_the_target_wrote_before_are_taken(run, tiny_pair, cache):
    prompts = cache / "prompts.jsonl"
    line = {"prompt": "for i in", "completion": " range(10):\n    print(i)\n"}
    prompts.write_text("".join(json.dumps(line) + "\n" for _ in range(3)))
    command = (short(tiny_pair), "--prompts", str(prompts), "--temperature", "1", "--output", str(cache / "plan.json"))
    assert run(*command).code == 0
    rows = json.loads((cache / "plan.json").read_text())["rows"]
    depth_1 = next(row for row in rows if row["method"] == "draft_model")
    assert depth_1["tokens_per_pass_low"] == pytest.approx(depth_1["tokens_per_pass"]), "three times the same text"
    prompts.write_text(prompts.read_text() + '{"prompt": "x"}\n')
    result = run(*command, "--count", "4")
    assert result.code == 1 and "completion" in result.err


@pytest.mark.parametrize(
    "options, words",
    [
        (("--speculative-config", '{"method": "none"}'), "leave"),
        (("--speculative-config", "{"), "is not JSON"),
        (("--heads", "TARGET"), "no heads that are known"),
        (("--prompts", "/nowhere.jsonl"), "cannot read the prompts"),
    ],
)
def test_what_cannot_be_planned_is_one_line(run, tiny_pair, cache, options, words):
    result = run(short(tiny_pair), *(str(tiny_pair.target) if word == "TARGET" else word for word in options))
    assert result.code == 1
    assert words in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize("command", [("plan",), ("audit",), ("bench", "race"), ("generate", "x")])
def test_where_no_file_can_be_is_said_before_any_work(command, run, tmp_path):
    result = run(*command, "--html", str(tmp_path / "missing" / "page.html"))
    assert result.code == 1
    assert "expected the name of a file in a folder that exists" in result.err
    assert result.out == ""


@pytest.mark.slow
def test_drafting_on_another_machine_is_predicted_beside_it(run, tiny_pair, cache, monkeypatch):
    monkeypatch.setattr("foretoken.plan.simulation.remote_drafting.TOKENS", 100)
    files = cache / "plan.json", cache / "plan.html"
    command = (short(tiny_pair), "--temperature", "0", "--rtt", "5")
    result = run(*command, "--output", str(files[0]), "--html", str(files[1]))
    assert result.code == 0, result.err
    assert "drafting 5 ms away, speedup over plain, simulated" in result.out
    (actual,) = json.loads(files[0].read_text())["remote_drafting"]
    assert [option["strategy"] for option in actual["options"]] == ["local", "si", "dsd", "pearl", "dsi"]
    assert actual["rtt"] == 0.005 and actual["verdict"] in result.out
    assert "Drafting on another machine" in files[1].read_text()
