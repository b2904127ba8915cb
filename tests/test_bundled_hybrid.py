"""The bundled hybrid mixture of experts: one text per seed whatever drafts, and that of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS

from .models.adapters import save_adapter
from .models.test_native import needs_kernels

PROMPTS = FUNCTIONS[:4]
CONFIGS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp"},
    "mtp chain": {"method": "mtp", "top_k": 1},
    "draft tree": {"method": "draft_model", "model": str(zoo.path("draft")), "tree": "sampled"},
    "auto": {"method": "auto", "model": str(zoo.path("draft"))},
    "suffix": {"method": "suffix"},
}


def opened(dtype: str = "bfloat16", **options: Any) -> LLM:
    return LLM(zoo.path("hybrid-target"), dtype=dtype, max_model_len=256, **options)


def write(
    llm: LLM, temperature: float, batch: int, tokens: int = 16, prompts: Sequence[str] = PROMPTS, **options: Any
) -> list[Sequence[int]]:
    """Continues all prompts, ``batch`` at once, each with its own seed."""
    texts: list[Sequence[int]] = []
    for start in range(0, len(prompts), batch):
        params = [
            SamplingParams(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True, **options)
            for i in range(start, start + batch)
        ]
        texts += [output.outputs[0].token_ids for output in llm.generate(prompts[start : start + batch], params)]
    return texts


def test_its_mtp_layer_drafts_by_default_and_is_accepted_often() -> None:
    """A bound far below the card's figure, so that a broken layer is noticed."""
    llm = opened("float32")
    assert llm.methods == ("auto", "mtp")
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, speculative_tokens=3)
    stats = [output.stats for output in llm.generate(FUNCTIONS[:6], params)]
    assert 1 + sum(s.accepted for s in stats) / sum(s.drafts for s in stats) > 2.2


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.slow
def test_every_proposer_writes_the_text_of_plain_decoding(dtype: str) -> None:
    options = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    plain = opened(**options, speculative_config={"method": "none"})
    expected = {temperature: write(plain, temperature, 1) for temperature in (0.0, 1.0)}
    for number, (name, config) in enumerate(CONFIGS.items()):
        llm = opened(**options, speculative_config=config)
        batches = (1, 4) if number % 2 else (4, 1)
        for (temperature, texts), batch in zip(expected.items(), batches, strict=True):
            assert write(llm, temperature, batch) == texts, (name, temperature, batch)


@needs_kernels
@pytest.mark.slow
def test_prefix_cache_hits_and_a_short_memory_change_no_text() -> None:
    long = [FUNCTIONS[i] + "pass\n\n\n" + FUNCTIONS[i + 1] for i in range(4)]
    large = opened(kv_cache_memory_bytes=2**30, enable_prefix_caching=True)
    plain = write(large, 1.0, 1, 100, long, speculative_tokens=0)
    assert write(large, 1.0, 4, 100, long) == plain
    tokens = sum(len(large.tokenizer.encode(text)) + 70 for text in long)  # so that some wait
    size = tokens * large.engine.usage.kv_bytes_per_token + 4 * large.target.state_bytes
    small = opened(kv_cache_memory_bytes=size)
    assert write(small, 1.0, 4, 100, long) == plain
    assert large.engine.usage.prefix_hits


@needs_kernels
@pytest.mark.slow
def test_adapters_of_all_its_layers_change_no_text_by_drafts_or_neighbours(tmp_path: Path) -> None:
    attention = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "v_proj", "o_proj"]
    experts = ["experts.gate_up_proj", "experts.down_proj", "mlp.gate", "shared_expert.up_proj", "shared_expert_gate"]
    path, names = zoo.path("hybrid-target"), ["mixers", "experts", None, "mixers"]
    adapters = {
        "mixers": save_adapter(tmp_path / "mixers", path, attention, seed=1, size=0.05),
        "experts": save_adapter(tmp_path / "experts", path, experts, seed=2, size=0.05),
    }
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    plain = opened(speculative_config={"method": "none"}, lora=adapters)
    texts = {name: [str(output) for output in plain.generate(PROMPTS, params, lora_request=name)] for name in {*names}}
    assert len({tuple(text) for text in texts.values()}) == 3
    expected = [texts[name][i] for i, name in enumerate(names)]
    for config in ({"method": "mtp"}, CONFIGS["draft tree"]):
        llm = opened(speculative_config=config, lora=adapters, enable_prefix_caching=True)
        for _ in range(2):  # then with prefix-cache hits
            assert [str(output) for output in llm.generate(PROMPTS, params, lora_request=names)] == expected


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = zoo.path("hybrid-target")
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [AutoTokenizer.from_pretrained(path)(prompt)["input_ids"] for prompt in PROMPTS[:2]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ours = [output.outputs[0].token_ids for output in opened("float32").generate(prompts, params)]
    for prompt, text in zip(prompts, ours, strict=True):
        out = module.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        assert tuple(out[0, len(prompt) :].tolist()) == text
