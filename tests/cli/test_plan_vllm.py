"""``foretoken plan --engine vllm``, with a small package in vLLM's place that emits what the depth allows."""

from __future__ import annotations

import json
import sys

import pytest

FAKE = """
from time import sleep
from types import SimpleNamespace as Box

__version__ = "0"


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
        depth = (self.config or {}).get("num_speculative_tokens", 0)
        if self.scheduler.dynamic_sd_lookup is not None:
            depth = self.scheduler.dynamic_sd_lookup[1]
        elif self.runner.drafter.depth is not None:
            depth = self.runner.drafter.depth
        sleep(0.002)
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
def cache(monkeypatch, tmp_path, own_cache):
    (tmp_path / "vllm.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def short(tiny_pair) -> str:
    models = f"--engine-python {sys.executable} --model {tiny_pair.target} --draft-model {tiny_pair.draft}"
    return f"plan --engine vllm {models} --count 2 --max-tokens 10 --temperature 0"


@pytest.mark.slow
def test_a_plan_for_vllm_says_what_to_paste_there(run, tiny_pair, cache):
    files = cache / "plan.json", cache / "plan.html"
    own = '{"method": "suffix", "num_speculative_tokens": 1}'
    configs = ("--speculative-config", own, "--speculative-config", '{"method": "ngram_gpu"}')
    result = run(f"{short(tiny_pair)} --output {files[0]} --html {files[1]} --batch 2", *configs)
    assert result.code == 0, result.err
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
def test_what_cannot_be_planned_there_is_one_line(run, tiny_pair, cache, options, words):
    result = run(short(tiny_pair), *options)
    assert result.code == 1
    *stages, error = result.err.splitlines()
    assert error.startswith("foretoken: error: ") and words in error
    assert all(stage.endswith("vLLM starts") for stage in stages)
