"""``foretoken plan`` on the tiny pair, on a server of a simulated engine, and with a small package in vLLM's place."""

import json
import sys

import pytest
from tests.cli.conftest import prompts_file
from tests.plan.endpoint.simulated import PROMPTS, StreamingBehaviour, streaming


@pytest.fixture
def cache(own_cache, tmp_path):
    return tmp_path


def short(tiny_pair) -> str:
    return f"plan --model {tiny_pair.target} --draft-model {tiny_pair.draft} --count 3 --max-tokens 8 --turns 3"


@pytest.mark.slow
def test_a_plan_says_what_to_do(run, tiny_pair, cache):
    files = cache / "plan.json", cache / "plan.html"
    options = "--temperature 0 --batch 1 --batch 2"
    result = run(f"{short(tiny_pair)} {options} --output {files[0]} --html {files[1]}").ok()
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
    prompts = prompts_file(cache, ["def f(", "import os"])
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    options = f"--model {tiny_pair.target} --prompts {prompts} --max-tokens 8 --turns 3 --temperature 0.8 --color never"
    result = run(f"plan {options}", "--speculative-config", config).ok()
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
    run(*command, "--count", "4").refused("completion")


def test_impossible_plans_are_refused_in_one_line(run, tiny_pair, cache):
    for option, value, words in (
        ("--speculative-config", '{"method": "none"}', "leave"),
        ("--speculative-config", "{", "is not JSON"),
        ("--heads", str(tiny_pair.target), "no heads that are known"),
        ("--prompts", "/nowhere.jsonl", "cannot read the prompts"),
    ):
        assert run(short(tiny_pair), option, value).refused(words).err.count("\n") == 1


@pytest.mark.slow
def test_drafting_on_another_machine_is_predicted_beside_it(run, tiny_pair, cache, monkeypatch):
    monkeypatch.setattr("foretoken.plan.simulator.TOKENS", 100)
    files = cache / "plan.json", cache / "plan.html"
    command = (short(tiny_pair), "--temperature", "0", "--rtt", "5")
    result = run(*command, "--output", str(files[0]), "--html", str(files[1])).ok()
    assert "drafting 5 ms away, speedup over plain, simulated" in result.out
    (actual,) = json.loads(files[0].read_text())["remote_drafting"]
    assert [option["strategy"] for option in actual["options"]] == ["local", "si", "dsd", "pearl", "dsi"]
    assert actual["rtt"] == 0.005 and actual["verdict"] in result.out
    assert "Drafting on another machine" in files[1].read_text()


@pytest.fixture
def prompts(tmp_path):
    return prompts_file(tmp_path, PROMPTS)


@pytest.mark.slow
def test_a_plan_writes_its_record_and_page(run, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("foretoken.plan.endpoint.outcome._WIDEST", 1e9)  # other programs disturb short passes
    output, page = tmp_path / "plan.json", tmp_path / "plan.html"
    with streaming(StreamingBehaviour()) as url, streaming(StreamingBehaviour(), speculative=False) as plain:
        words = ("--endpoint", url, "--baseline", plain, "--model", "sim", "--max-tokens", "24")
        words += ("--concurrency", "1", "--concurrency", "2", "--prompts", str(prompts))
        config = ("--speculative-config", '{"method": "draft_model", "model": "D"}')
        result = run("plan", *words, *config, "--output", str(output), "--html", str(page)).ok()
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


FAKE = """
from types import SimpleNamespace as Box

from foretoken.bench.peers import vllm as peer

__version__ = "0"
now = 0.0
peer.perf_counter = lambda: now  # every step takes the same time, however busy the machine is


class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, detokenize):
        assert max_tokens > 0
        self.max_tokens = max_tokens


class Drafter:
    made = 0

    def __init__(self, config):
        Drafter.made += 1
        self.depth = self.texts = None

    def load_model(self, model):
        model.compute_logits = len


class LLM:
    def __init__(self, target, max_model_len, max_num_seqs, enable_prefix_caching, speculative_config=None, **engine):
        if engine.get("dtype") == "float16":
            raise ValueError("no float16 here")
        if (speculative_config or {}).get("method") == "custom_class":
            assert engine["additional_config"] == {"foretoken": {"method": "mixture"}}, engine
        if (speculative_config or {}).get("method") == "ngram_gpu":
            raise ValueError("no GPU here")
        self.config = speculative_config
        self.llm_engine = self
        self.running = {}
        self.scheduler = Box(dynamic_sd_lookup=None)
        self.vllm_config = None
        self.runner = Box(drafter=Drafter(None), model=Box())
        worker = Box(worker=Box(model_runner=self.runner))
        core = Box(scheduler=self.scheduler, model_executor=Box(driver_worker=worker))
        self.engine_core = Box(engine_core=core)

    def add_request(self, name, prompt, params):
        self.running[name] = [0, params.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        global now
        depth = (self.config or {}).get("num_speculative_tokens", 0)
        if self.scheduler.dynamic_sd_lookup is not None:
            depth = self.scheduler.dynamic_sd_lookup[1]
        elif self.runner.drafter.depth is not None:
            depth = self.runner.drafter.depth
        now += 0.002
        outputs = []
        for name, (done, limit) in list(self.running.items()):
            done = min(limit, done + (1 + depth if done else 1))
            self.running[name][0] = done
            outputs.append(Box(request_id=name, outputs=[Box(token_ids=list(range(done)))]))
            if done == limit:
                del self.running[name]
        return outputs
"""


@pytest.fixture
def vllm_cache(monkeypatch, tmp_path, own_cache):
    (tmp_path / "vllm.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def short_vllm(tiny_pair) -> str:
    models = f"--engine-python {sys.executable} --model {tiny_pair.target} --draft-model {tiny_pair.draft}"
    return f"plan --engine vllm {models} --count 2 --max-tokens 10 --temperature 0"


@pytest.mark.slow
def test_a_plan_for_vllm_says_what_to_paste_there(run, tiny_pair, vllm_cache):
    files = vllm_cache / "plan.json", vllm_cache / "plan.html"
    own = '{"method": "suffix", "num_speculative_tokens": 1}'
    configs = ("--speculative-config", own, "--speculative-config", '{"method": "ngram_gpu"}')
    result = run(f"{short_vllm(tiny_pair)} --output {files[0]} --html {files[1]} --batch 2", *configs).ok()
    assert "no GPU here" in result.err and "planned without it" in result.err
    for words in ("temperature 0, batch 2", "ngram", "suffix, recycling", "speculative_config={", "vLLM"):
        assert words in result.out
    assert "transformers  " not in result.out
    record = json.loads(files[0].read_text())
    assert record["engine"] == "vllm" and set(record["exports"]) == {"vllm"}
    assert record["best"]["num_speculative_tokens"] == 8, "nine tokens in one pass of the same time"
    assert len(record["rows"]) == 8 + 7 + 7 + 1
    assert files[1].read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "options, words",
    [
        (("--engine-python", "/nowhere/python"), "no vLLM at"),
        (("--engine", "other"), "expected foretoken, or vllm"),
        (("--quantization", "int8"), "--engine-args"),
        (("--engine-args", "["), "is not JSON"),
        (("--engine-args", "[]"), "must be a JSON object"),
        (("--dtype", "float16"), "no float16 here"),
        (("--speculative-config", "{}"), "needs a 'method'"),
    ],
)
def test_impossible_plans_for_vllm_are_refused_in_one_line(run, tiny_pair, vllm_cache, options, words):
    result = run(short_vllm(tiny_pair), *options)
    assert result.code == 1
    *stages, error = result.err.splitlines()
    assert error.startswith("foretoken: error: ") and words in error
    assert all(stage.endswith("vLLM starts") for stage in stages)
