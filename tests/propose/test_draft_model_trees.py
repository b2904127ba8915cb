"""Trees on the bundled pair: one text per seed, and more accepted than by chains of as many nodes."""

from functools import cache
from typing import Any

import pytest

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.models.runners.linear import can_pack
from foretoken.speculation import Builder, SpeculativeConfig

PROMPTS = FUNCTIONS[:4]
CONFIGS: dict[str, dict[str, Any]] = {
    "top_k": {"tree": "top_k"},
    "sampled": {"tree": "sampled", "top_k": 3},
    "greedy_multi": {"tree": "greedy_multi", "num_steps": 3},
    "early exit, chain": {"method": "early_exit", "exit_layer": 5},
    "early exit, tree": {"method": "early_exit", "tree": "sampled"},
}


@cache
def bundled(dtype: str) -> LLM:
    return LLM(dtype=dtype)


def speculating(llm: LLM, config: dict[str, Any]) -> LLM:
    """The same target with another proposer."""
    draft = None if "method" in config else str(zoo.path("draft"))
    builder = Builder(llm.target, llm.tokenizer, zoo.path("target"), lambda path: llm_draft(llm))
    llm.engine.proposer = builder.build(SpeculativeConfig.of({"model": draft, **config}))
    return llm


@cache
def llm_draft(llm: LLM) -> Any:
    return LLM(zoo.path("draft"), speculative_config={"method": "none"}, dtype=llm.target.dtype).target


def texts(llm: LLM, nodes: int, prompts: tuple[str, ...], **params: Any) -> list[tuple[int, ...]]:
    settings = SamplingParams(max_tokens=16, ignore_eos=True, speculative_tokens=nodes, **params)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, settings)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [{"temperature": 0.8, "seed": 1}, {"temperature": 0.0}], ids=["seeded", "greedy"])
@pytest.mark.slow
def test_texts_do_not_depend_on_the_draft(dtype: str, params: dict[str, Any]) -> None:
    llm = bundled(dtype)
    if not can_pack(llm.target.dtype, llm.target.device):
        pytest.skip(f"rows are not promised to be independent in {dtype} on this machine")
    plain, alone = texts(llm, 0, PROMPTS, **params), (dtype == "bfloat16") ^ ("seed" in params)
    for number, (name, config) in enumerate(CONFIGS.items()):
        speculating(llm, config)
        if number % 2 == alone:  # any two of method, dtype, sampling and batch meet
            assert texts(llm, 7, PROMPTS, **params) == plain, name
        else:
            assert texts(llm, 7, PROMPTS[2:3], **params) == plain[2:3], name


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "seeded"])
@pytest.mark.slow
def test_trees_accept_more_than_chains_of_the_same_size(params: dict[str, Any]) -> None:
    llm = bundled("float32")

    def num_steps(config: dict[str, Any]) -> int:
        settings = SamplingParams(max_tokens=64, ignore_eos=True, speculative_tokens=8, **params)
        return sum(o.stats.steps for o in speculating(llm, config).generate(FUNCTIONS, settings))

    assert num_steps({"tree": "top_k"}) < 0.97 * num_steps({})
