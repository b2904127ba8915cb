"""``foretoken bench`` on the tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.bench.peers import registry
from foretoken.quantize import quantize_checkpoint

REQUIRED = {
    "system",
    "method",
    "num_speculative_tokens",
    "temperature",
    "batch",
    "tokens_per_second",
    "decode_tokens_per_second",
    "tokens_per_pass",
    "identical_to_plain",
    "quantization",
    "tokens_per_second_spread",
}


@pytest.fixture
def nowhere(monkeypatch, tmp_path, own_cache):
    monkeypatch.setattr(registry, "folder", lambda: tmp_path / "peers")


def short(pair) -> tuple[str, ...]:
    return ("--target", str(pair.target), "--draft", str(pair.draft), "--count", "2", "--max-tokens", "8")


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_a_race_runs_each_system_in_a_process_and_names_what_is_missing(run, tiny_pair, nowhere, tmp_path):
    """Ours and transformers, each in a process of its own; a peer that is not set up is one line."""
    files = tmp_path / "race.json", tmp_path / "race.html"
    options = "--depth 2 --repeats 1 --temperature 0 --temperature 1 --peers transformers,vllm"
    result = run(f"bench race {options} --output {files[0]} --html {files[1]}", *short(tiny_pair))
    assert result.code == 0, result.err
    said = result.err.splitlines()
    assert "vllm is not set up" in said.pop(1)
    assert said == ["setting up ...", "race: 8 turns", "testing sampled texts ..."]
    record = json.loads(files[0].read_text())
    rows = record["rows"]
    assert set(rows[0]) >= REQUIRED
    assert [(r["system"], r["method"], r["num_speculative_tokens"], r["temperature"]) for r in rows] == [
        (system, *rest, t)
        for t in (0, 1)
        for system in ("foretoken", "transformers")
        for rest in (("plain", 0), ("draft_model", 2))
    ]
    assert rows[1]["identical_to_plain"] is True and rows[-1]["identical_to_plain"] is None
    assert all(row["tokens_per_second"] > 0 and row["tokens_per_pass"] >= 1 for row in rows)
    assert record["setting"]["peers"].keys() == {"transformers"}
    assert "foretoken at its best depth over transformers speculative" in result.out
    assert files[1].read_text().startswith("<!DOCTYPE html>")


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_race_of_a_ragged_batch(run, tiny_pair, nowhere, tmp_path):
    file = tmp_path / "race.json"
    options = f"--prompts {prompts(tmp_path)} --batch 3 --depth 2 --repeats 1 --peers none --output {file}"
    config = ("--speculative-config", '{"method": "ngram", "prompt_lookup_max": 2}')
    result = run(f"bench race {options}", *short(tiny_pair), "--count", "4", *config)
    assert result.code == 0, result.err
    rows = json.loads(file.read_text())["rows"]
    assert [(r["method"], r["batch"], r["identical_texts"], r["texts"]) for r in rows] == [
        ("plain", 3, 4, 4),
        ("ngram", 3, 4, 4),
    ]


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_a_race_without_a_draft_model(run, tiny_pair, nowhere, tmp_path):
    file = tmp_path / "target.gguf"
    quantize_checkpoint(tiny_pair.target, file, "Q8_0")
    short_race = ["--peers", "none", "--count", "1", "--max-tokens", "6", "--repeats", "1", "--depth", "2", "--json"]
    ngram = ("--speculative-config", '{"method": "ngram"}')
    result = run("bench", "race", "--target", str(file), *short_race, *ngram)
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert [row["method"] for row in record["rows"]] == ["plain", "ngram"] and record["setting"]["draft"] is None
    drafted = ("--speculative-config", '{"method": "draft_model"}')
    result = run("bench", "race", "--target", str(file), *short_race, *ngram, *drafted)
    assert result.code == 1 and "name its draft too, or a method without a draft model" in result.err


def prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    texts = ["def f(", "import os\n" * 9, "class A:\n    pass\n", "x = 1"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_costs_are_tabled_beside_their_floor(run, tiny_pair):
    models = ("--model", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    small = ("--rows", "1,2", "--context", "16,32", "--turns", "2")
    result = run("bench", "costs", *models, *small, "--parts", "passes,transformers,startup")
    assert result.code == 0, result.err
    for word in ("x limit", "transformers ms", "start to first token", "processor"):
        assert word in result.out
    assert [line.split(":")[0] for line in result.err.splitlines()] == [
        "passes",
        *(f"a step of {folder.name}" for folder in (tiny_pair.draft, tiny_pair.target)),
        "starting fresh processes ...",
    ]


@pytest.mark.slow
def test_costs_as_json(run, tiny_pair):
    models = ("--model", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    record = json.loads(run("bench", "costs", *models, "--parts", "steps", "--json").out)
    assert set(record["steps"]) == {"temperature 0", "temperature 1", "seeded"}
    assert 0 < record["steps"]["seeded"]["outside"] < 1
    assert record["setting"]["command"]


@pytest.mark.slow
def test_a_tiny_cell_of_the_table(run, tiny_pair, nowhere, tmp_path):
    files = [tmp_path / name for name in ("record.jsonl", "table.json", "table.html")]
    arguments = [*short(tiny_pair), "--only", "completion, T=0, bf16, batch 1", "--repeats", "1", "--peers", "none"]
    arguments += ["--fixed", '{"method": "suffix", "num_speculative_tokens": 2}', "--record", str(files[0])]
    for _ in range(2):  # the second one finds all in the record
        result = run("bench", "table", *arguments, "--output", str(files[1]), "--html", str(files[2]))
        assert result.code == 0, result.err
        assert "completion, T=0, bf16, batch 1" in result.out
    cell = json.loads(files[1].read_text())["cells"][0]
    assert [row["method"] for row in cell["rows"]] == ["plain", "default", "suffix"]
    assert files[2].read_text().startswith("<!DOCTYPE html>")
    wrong = run("bench", "table", *short(tiny_pair), "--only", "telepathy")
    assert wrong.code and "the cells are: completion" in wrong.err
