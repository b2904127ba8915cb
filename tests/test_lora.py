"""LoRA adapters through the facade: one text per request, whatever drafts and whatever shares the batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, ForetokenError, LoRARequest, SamplingParams, zoo
from foretoken.cli.main import main

from .models.adapters import ATTENTION, MLP, save_adapter
from .models.tiny import ARCHITECTURES, Tiny, only_runner

PROMPTS = ["def greet(name):\n", "x", "class Ü:  # 🙂\n" * 9, "for i in range(10):\n"]
NAMES = ["attention", None, "all", "attention"]
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
    "tree": {"method": "draft_model", "num_speculative_tokens": 8, "tree": "top_k"},
    "lookup": {"method": "ngram", "num_speculative_tokens": 4},
    "early exit": {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3},
    "quantized copy": {"method": "self_quantized", "num_speculative_tokens": 4},
}


@pytest.fixture(scope="module")
def adapters(tiny_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "attention": save_adapter(folder / "attention", tiny_pair.target, ATTENTION, rank=4, seed=1),
        "all": save_adapter(folder / "all", tiny_pair.target, ATTENTION + MLP, rank=2, seed=2),
    }


@pytest.fixture(scope="module")
def plain(tiny_pair: Any, adapters: dict[str, Path]) -> LLM:
    return LLM(tiny_pair.target, speculative_config={"method": "none"}, dtype="float32", lora=adapters)


def texts(llm: LLM, names: Any = NAMES, prompts: Any = PROMPTS, **params: Any) -> list[str]:
    settings = SamplingParams(**{"max_tokens": 24, **params}, ignore_eos=True)
    return [o.outputs[0].text for o in llm.generate(prompts, settings, lora_request=names)]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}], ids=["greedy", "sampled"])
def test_text_with_drafts_equals_plain_decoding(tiny_pair, adapters, plain, drafter, params):
    expected = [texts(plain, name, prompt, **params)[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    draft = tiny_pair.draft if "draft_model" in DRAFTERS[drafter].values() else None
    config = {**DRAFTERS[drafter], "control": "fixed"}
    llm = LLM(tiny_pair.target, draft, speculative_config=config, dtype="float32", lora=adapters)
    assert texts(llm, **params) == expected
    assert [texts(llm, name, prompt, **params)[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_heads_on_hidden_states_draft_for_every_adapter(method: str, tmp_path: Path) -> None:
    target = zoo.path("target")
    adapters = {"x": save_adapter(tmp_path / "x", target, ["q_proj", "down_proj"], seed=1, size=0.1)}
    options: dict[str, Any] = {"dtype": "float32", "lora": adapters, "enable_prefix_caching": True}
    config = {"method": method, "num_speculative_tokens": 4, "control": "fixed"}
    heads, plain = (LLM(target, speculative_config=c, **options) for c in (config, {"num_speculative_tokens": 0}))
    code = "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(" * 4
    prompts = [code, code, "import json\n"]
    names = ["x", None, "x"]
    expected = texts(plain, names, prompts, temperature=0.0)
    assert expected[0] != expected[1]
    for _ in range(2):  # then with prefix-cache hits
        assert texts(heads, names, prompts, temperature=0.0) == expected


# Targets of adapters by architecture.
OTHER_LAYERS = {
    "qwen3.5-experts": ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "v_proj", "up_proj", "down_proj", "gate"],
    "deepseek-v3": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "shared_experts.up_proj"],
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHER_LAYERS)
def test_other_layers_change_no_text_by_drafts_caches_and_preemption(architecture, tokenizer, tmp_path):
    tiny, path = ARCHITECTURES[architecture], tmp_path / "model"
    Tiny(tiny.family, {**tiny.config, "vocab_size": 400}).save(path)
    tokenizer.save_pretrained(path)
    adapters = {
        str(seed): save_adapter(tmp_path / str(seed), path, OTHER_LAYERS[architecture], seed=seed, size=0.1)
        for seed in (1, 2)
    }
    prompts = ["x = 1\n" * 20, "x = 1\n" * 20 + "y", "a b a b a b", "x = 1\n" * 20, "import os\n" * 9, "x"]
    names = ["1", None, "2", "1", "1", "2"]
    options: dict[str, Any] = {"dtype": "float32", "lora": adapters, "max_model_len": 240}
    tree = {"method": "draft_model", "num_speculative_tokens": 6, "tree": "top_k", "control": "fixed"}
    with only_runner("compiled"):
        plain = LLM(path, speculative_config={"method": "none"}, max_num_seqs=1, **options)
        room = 280 * plain.target.kv_bytes_per_token + 2 * plain.target.state_bytes
        lookup = {"speculative_config": {"method": "ngram"}, "kv_cache_memory_bytes": room}
        copying = LLM(path, enable_prefix_caching=True, **lookup, **options)
        growing = LLM(path, path, speculative_config=tree, **options)
        for sampling in ({"temperature": 0.0, "max_tokens": 80}, {"seed": 3}):
            expected = texts(plain, names, prompts, **sampling)
            assert expected != texts(plain, None, prompts, **sampling)
            assert [texts(llm, names, prompts, **sampling) for llm in (copying, copying, growing)] == [expected] * 3
    usage = copying.engine.scheduler.usage
    assert usage.preemptions and usage.prefix_hits


def test_preempted_requests_keep_their_adapter(tiny_pair: Any, adapters: dict[str, Path], plain: LLM) -> None:
    options = {"max_model_len": 250, "kv_cache_memory_bytes": 320 * plain.target.kv_bytes_per_token}
    llm = LLM(tiny_pair.target, dtype="float32", lora=adapters, **options)
    params = SamplingParams(max_tokens=130, ignore_eos=True, temperature=0)
    expected = [o.outputs[0].text for o in plain.generate(PROMPTS, params, lora_request=NAMES)]
    assert [o.outputs[0].text for o in llm.generate(PROMPTS, params, lora_request=NAMES)] == expected
    assert llm.engine.usage.preemptions > 0


def test_prompts_with_one_beginning_share_no_cache_across_adapters(tiny_pair, adapters, plain):
    llm = LLM(tiny_pair.target, dtype="float32", lora=adapters, enable_prefix_caching=True)
    prompt, params = "x = 'größe'\n" * 20, SamplingParams(max_tokens=12, temperature=0)
    for expected_cached in (False, True):
        for name in ("all", None, "attention"):
            (output,) = llm.generate(prompt, params, lora_request=name)
            assert bool(output.stats.cached) == expected_cached
            assert output.outputs[0].text == plain.generate(prompt, params, lora_request=name)[0].outputs[0].text


def test_an_adapter_is_chosen_by_name_by_request_and_by_parameter(tiny_pair, adapters, plain):
    (expected,) = texts(plain, "all", "x", temperature=0.0)
    assert expected != texts(plain, None, "x", temperature=0.0)[0]
    assert texts(plain, None, "x", temperature=0.0, lora="all") == [expected]
    llm = LLM(tiny_pair.target, dtype="float32")
    request = LoRARequest("later", 1, str(adapters["all"]))
    assert texts(llm, request, "x", temperature=0.0) == [expected]
    assert texts(llm, [request, "later"], ["x", "x"], temperature=0.0) == [expected] * 2
    pieces = llm.stream("x", SamplingParams(max_tokens=24, ignore_eos=True, temperature=0), lora_request="later")
    assert "".join(piece.text for piece in pieces) == expected


def test_a_name_of_an_unloaded_adapter_shares_nothing_with_the_next(tiny_pair, adapters, plain):
    llm = LLM(tiny_pair.target, dtype="float32", enable_prefix_caching=True)
    prompt, params = "x = 'größe'\n" * 20, SamplingParams(max_tokens=12, temperature=0)
    for name in ("all", "attention", "all"):
        llm.load_lora("changing", adapters[name])
        expected = str(plain.generate(prompt, params, lora_request=name)[0])
        for cached in (False, True):
            (output,) = llm.generate(prompt, params, lora_request="changing")
            assert str(output) == expected and bool(output.stats.cached) == cached
        llm.unload_lora("changing")
        with pytest.raises(ForetokenError, match="'changing' is not loaded; loaded: none"):
            llm.generate(prompt, params, lora_request="changing")
    assert llm.target.adapters == ()
    with pytest.raises(ForetokenError, match="'changing' is not loaded"):
        llm.unload_lora("changing")


def test_unfinished_requests_keep_an_adapter_that_is_unloaded(tiny_pair, adapters, plain):
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", lora={"all": adapters["all"]})
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
    pieces = llm.stream("x", params, lora_request="all")
    first = next(pieces).text
    llm.unload_lora("all")
    llm.load_lora("all", adapters["attention"])
    assert len(llm.target.adapters) == 2
    assert first + "".join(piece.text for piece in pieces) == str(plain.generate("x", params, lora_request="all")[0])
    llm.sweep_adapters()
    assert len(llm.target.adapters) == 1
    assert texts(llm, "all", "x", temperature=0.0) == texts(plain, "attention", "x", temperature=0.0)


def test_the_command_generates_with_an_adapter(tiny_pair, adapters, plain, capsys):
    options = ["--model", str(tiny_pair.target), "--dtype", "float32", "--max-tokens", "12", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["generate", "x", *options, "--lora", str(adapters["all"])])
    params = SamplingParams(max_tokens=12, temperature=0)
    (expected,) = plain.generate("x", params, lora_request="all")
    assert not ended.value.code and json.loads(capsys.readouterr().out)["text"] == str(expected)


def test_adapters_are_refused_before_the_model_is_read(adapters: dict[str, Path]) -> None:
    with pytest.raises(ForetokenError, match="in one process"):
        LLM("no/model", lora=adapters, tensor_parallel_size=2)
    with pytest.raises(ForetokenError, match="there is no folder '/nowhere'"):
        LLM(zoo.path("target"), dtype="no dtype", lora={"x": "/nowhere"})


def test_wrong_choices_are_refused(plain: LLM, adapters: dict[str, Path]) -> None:
    with pytest.raises(ForetokenError, match="'other' is not loaded; loaded: attention, all"):
        plain.generate("x", lora_request="other")
    with pytest.raises(ForetokenError, match="1 lora_request for 2 prompts"):
        plain.generate(["x", "y"], lora_request=["all"])
    for wrong in (3, ["all", 3], {"all": "x"}):
        with pytest.raises(ForetokenError, match="must be the name of an adapter or a LoRARequest"):
            plain.generate(["x", "y"], lora_request=wrong)  # type: ignore[arg-type]
    with pytest.raises(ForetokenError, match="lora must be the name"):
        SamplingParams(lora=3)  # type: ignore[arg-type]
    with pytest.raises(ForetokenError, match="a LoRA adapter 'all' already"):
        plain.load_lora("all", adapters["attention"])
    with pytest.raises(ForetokenError, match="must be a string that is not empty"):
        plain.load_lora("", adapters["attention"])
    with pytest.raises(ForetokenError, match="there is no folder '/nowhere'"):
        plain.load_lora("new", "/nowhere")
