"""``foretoken bench`` on the tiny pair; ``bench serve``: a server of ours under load, and its refusals."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from foretoken import zoo
from foretoken.bench.http_load import LoadedServer, LoadResult, Percentiles, VllmLoadedServer, filler, own
from foretoken.bench.page import load_page, load_table, speedup_lines
from foretoken.bench.peers import registry
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.probe.answers import Arrival, Failed, ServerAnswer
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
def nowhere(monkeypatch, tmp_path, own_cache, preloaded_python):
    monkeypatch.setattr(registry, "folder", lambda: tmp_path / "peers")


def short(pair) -> tuple[str, ...]:
    return ("--target", str(pair.target), "--draft", str(pair.draft), "--count", "2", "--max-tokens", "8")


@pytest.mark.slow
def test_a_race_runs_each_system_in_a_process_and_names_what_is_missing(run, tiny_pair, nowhere, tmp_path):
    """Ours and transformers, each in a process of its own; a peer that is not set up is one line."""
    files = tmp_path / "race.json", tmp_path / "race.html"
    options = "--depth 2 --repeats 1 --temperature 0 --temperature 1 --peers transformers,vllm"
    result = run(f"bench race {options} --output {files[0]} --html {files[1]}", *short(tiny_pair)).ok()
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


@pytest.mark.slow
def test_race_of_a_ragged_batch(run, tiny_pair, nowhere, tmp_path):
    file = tmp_path / "race.json"
    options = f"--prompts {prompts(tmp_path)} --batch 3 --depth 2 --repeats 1 --peers none --output {file}"
    config = ("--speculative-config", '{"method": "ngram", "prompt_lookup_max": 2}')
    run(f"bench race {options}", *short(tiny_pair), "--count", "4", *config).ok()
    rows = json.loads(file.read_text())["rows"]
    assert [(r["method"], r["batch"], r["identical_texts"], r["texts"]) for r in rows] == [
        ("plain", 3, 4, 4),
        ("ngram", 3, 4, 4),
    ]


@pytest.mark.slow
def test_a_race_without_a_draft_model(run, tiny_pair, nowhere, tmp_path):
    file = tmp_path / "target.gguf"
    quantize_checkpoint(tiny_pair.target, file, "Q8_0")
    short_race = ["--peers", "none", "--count", "1", "--max-tokens", "6", "--repeats", "1", "--depth", "2", "--json"]
    ngram = ("--speculative-config", '{"method": "ngram"}')
    record = json.loads(run("bench", "race", "--target", str(file), *short_race, *ngram).ok().out)
    assert [row["method"] for row in record["rows"]] == ["plain", "ngram"] and record["setting"]["draft"] is None
    drafted = ("--speculative-config", '{"method": "draft_model"}')
    result = run("bench", "race", "--target", str(file), *short_race, *ngram, *drafted)
    result.refused("name its draft too, or a method without a draft model")


@pytest.mark.slow
def test_a_race_over_one_long_prompt(run, tiny_pair, nowhere):
    """More tokens than the target's positions, in plain decoding alone."""
    short_race = ["--max-tokens", "4", "--repeats", "1", "--peers", "none", "--json"]
    config = ("--speculative-config", '{"method": "none"}')
    result = run("bench", "race", "--target", str(tiny_pair.target), "--prompts", "5000", *short_race, *config).ok()
    record = json.loads(result.out)
    assert [(row["method"], row["texts"]) for row in record["rows"]] == [("plain", 1)]
    assert record["setting"]["prompts"] == "1 of prompts of 5000 tokens" and record["rows"][0]["resident_bytes"] > 0


@pytest.mark.slow
def test_an_encoder_decoder_races_on_repairs(run, nowhere):
    """Every prompt generates as many tokens as its fixed code has."""
    models = ["--target", str(zoo.path("seq2seq-target")), "--draft", str(zoo.path("seq2seq-draft"))]
    short_race = ["--prompts", "repairs", "--count", "1", "--depth", "4", "--repeats", "1", "--peers", "none", "--json"]
    configs = [{"method": "draft_model"}, {"method": "prediction"}]
    configs += [{"method": "mixture", "members": [{"method": "draft_model", "model": models[-1]}, configs[1]]}]
    words = [word for config in configs for word in ("--speculative-config", json.dumps(config))]
    rows = json.loads(run("bench", "race", *models, *short_race, *words).ok().out)["rows"]
    assert [row["method"] for row in rows] == ["plain", "draft_model", "prediction", "mixture"]
    assert all(row["identical_to_plain"] for row in rows) and rows[1]["tokens_per_pass"] > 1.5


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
    result = run("bench", "costs", *models, *small, "--parts", "passes,transformers,startup").ok()
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
        result = run("bench", "table", *arguments, "--output", str(files[1]), "--html", str(files[2])).ok()
        assert "completion, T=0, bf16, batch 1" in result.out
    cell = json.loads(files[1].read_text())["cells"][0]
    assert [row["method"] for row in cell["rows"]] == ["plain", "default", "suffix"]
    assert files[2].read_text().startswith("<!DOCTYPE html>")
    wrong = run("bench", "table", *short(tiny_pair), "--only", "telepathy")
    assert wrong.code and "the cells are: completion" in wrong.err


def answered(began: float, times: list[float], tokens: int, **more: int) -> ServerAnswer:
    arrivals = tuple(Arrival(time - began, None, 1) for time in times)
    return ServerAnswer("", began=began, arrivals=arrivals, prompt_tokens=10, tokens=tokens, **more)


def test_figures_of_answers() -> None:
    answers = [answered(0, [1, 2, 4], 7, cached_tokens=5), answered(1, [4], 1), Failed("429: no")]
    result = LoadResult.of("short", 2, answers, 4.0)
    assert (result.requests, result.failed, result.error) == (3, 1, "429: no")
    assert result.output_tokens_per_second == 2 and result.requests_per_second == 0.5
    assert result.prompt_tokens == 10 and result.cached_share == 0.25
    assert result.ttft is not None and result.ttft.p50 == 2 and result.itl is not None and result.itl.p50 == 1.5
    assert result.tpot == Percentiles(0.5, 0.5, 0.5)
    nothing = LoadResult.of("short", 2, [ServerAnswer("")], 1.0)
    assert nothing.ttft is None and nothing.failed == 1 and nothing.error == "an answer had no text"
    page = load_page({"date": "today"}, [result, nothing])
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page and "http" not in page.split("</style>")[1]
    assert load_table([result, nothing]).row_count == 2


def test_the_gain_of_a_shared_prefix() -> None:
    def result(name: str, first: float) -> LoadResult:
        return LoadResult.of(f"agents, {name}", 8, [answered(0, [first, 9], 3)], 9.0)

    (line,) = speedup_lines([result("cold", 4.0), result("warm", 0.5)])
    assert "8 at once: first token 8.0x sooner" in line and speedup_lines([result("cold", 1.0)]) == []


def test_no_prompt_repeats_another() -> None:
    assert own("x") != own("x") and own("") == "" and len(filler(1000)) == 3200


@pytest.mark.parametrize("line", ["data: {", 'data: {"usage": {}}', "data: 3"])
def test_an_event_that_is_not_openais_is_an_error_of_its_request(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.bench.http_load.listed_models", lambda url, key: [{"id": "m"}])
    answering = httpx.MockTransport(lambda request: httpx.Response(200, text=f"{line}\n\n"))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=answering))
    result = LoadedServer("http://x", None, None, {}).run("short", ["a", "b"], 2)
    assert (result.requests, result.failed) == (2, 2) and result.error


def test_requests_take_the_lengths_of_answers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.bench.http_load.listed_models", lambda url, key: [{"id": "m"}])
    asked: list[int | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content).get("max_tokens"))
        return httpx.Response(200, text="data: [DONE]\n\n")

    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
    LoadedServer("http://x", None, None, {}, (8, 9)).run("short", ["a", "b", "c"], 1)
    LoadedServer("http://x", None, None, {"max_tokens": 5}).run("short", ["a"], 1)
    assert asked == [8, 9, 8, 5]


PROGRAM = """#!{python}
import json, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
prompts = [json.loads(line)["prompt"] for line in open(value("--dataset-path"), encoding="utf-8")]
if "fail" in prompts:
    sys.exit("cannot reach the server")
assert words[:2] == ["bench", "serve"] and value("--num-prompts") == str(len(prompts)) and "--ignore-eos" in words
record = {{"duration": 4.0, "ttfts": [1.0, 0.0], "itls": [[0.5, 0.5], []], "input_lens": [10, 10],
           "output_lens": [6, 0], "errors": ["", "refused"]}}
json.dump(record, open(value("--result-dir") + "/" + value("--result-filename"), "w"))
"""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, own_cache: Path, tmp_path: Path) -> VllmLoadedServer:
    """A server that a program in the place of vLLM's loads."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("foretoken.bench.http_load.listed_models", lambda *_: [{"id": "m"}])
    return VllmLoadedServer("http://x", None, None, {"max_tokens": 6, "temperature": 0.0}, "tokenizer")


def test_figures_of_vllms_load_generator(loaded: VllmLoadedServer) -> None:
    result = loaded.run("short", ["a", "b"], 2)
    assert (result.requests, result.failed, result.error) == (2, 1, "refused")
    assert result.output_tokens_per_second == 1.5 and result.ttft is not None and result.ttft.p50 == 1
    assert result.itl is not None and result.itl.p99 == 0.5 and result.prompt_tokens == 10


def test_a_generator_that_fails_or_is_missing(loaded: VllmLoadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForetokenError, match="vllm bench serve failed: cannot reach the server"):
        loaded.run("short", ["fail"], 1)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InvalidRequest, match="no vllm program"):
        VllmLoadedServer("http://x", None, None, {}, "tokenizer")


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_a_server_of_ours_under_load(run, tiny_pair, tmp_path: Path) -> None:
    files = tmp_path / "load.json", tmp_path / "load.html"
    options = f"--model {tiny_pair.target} --draft-model {tiny_pair.draft} --dtype float32"
    sizes = ("--long-tokens", "40", "--shared-tokens", "30", "--agents", "2", "--max-tokens", "4", "--requests", "1")
    places = ("--output", str(files[0]), "--html", str(files[1]))
    result = run("bench", "serve", "--server-options", options, "--concurrency", "1,2", *sizes, *places, "--json").ok()
    record = json.loads(result.out)
    assert record == json.loads(files[0].read_text()) and "<svg" in files[1].read_text()
    runs = [(each["workload"], each["concurrency"]) for each in record["results"]]
    assert runs == [
        *(("short", 1), ("short", 2), ("long", 1), ("long", 2), ("shared", 1), ("shared", 2)),
        *(("agents, cold", 1), ("agents, warm", 1), ("agents, cold", 2), ("agents, warm", 2)),
    ]
    assert not any(each["failed"] for each in record["results"])
    assert all(each["ttft"]["p50"] > 0 and each["output_tokens_per_second"] > 0 for each in record["results"])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--workloads", "tiny"), "unknown workload 'tiny'; known: short"),
        (("--generator", "wrk"), "unknown --generator 'wrk'; known: foretoken, vllm"),
        (("--concurrency", "0"), "--concurrency must be positive integers"),
        (("--url", "http://127.0.0.1:1"), "does not answer as OpenAI's API does"),
        (("--url", "http://x", "--server-options", "-h"), "omit --url"),
        (("--server-options", "--model /no/such"), "the server did not start: foretoken: error:"),
    ],
)
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_invalid_loads_are_refused(run, arguments: tuple[str, ...], words: str) -> None:
    assert "Traceback" not in run("bench", "serve", *arguments).refused(words).err
