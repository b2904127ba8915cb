"""The bundled pair on real prompts: one text per seed, whatever the proposer, depth, batch or precision."""

from typing import Any, NamedTuple

import pytest
from tests.real import real_model

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.models.runners.linear import can_pack

PROMPTS = FUNCTIONS[:4]


class Bundled(NamedTuple):
    pair: LLM
    lookup: LLM


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bundled(request: pytest.FixtureRequest) -> Bundled:
    pair = LLM(dtype=request.param)
    if not can_pack(pair.target.dtype, pair.target.device):
        pytest.skip(f"rows are not promised to be independent in {request.param} on this machine")
    return Bundled(pair, LLM(zoo.path("target"), speculative_config={"method": "ngram"}, dtype=request.param))


@pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 0}, {"temperature": 0.0}], ids=["seeded", "greedy"])
@pytest.mark.slow
def test_one_text(bundled: Bundled, params: dict[str, float]) -> None:
    pair, lookup = bundled

    def texts(llm: LLM, depth: int, batch: int) -> list[tuple[int, ...]]:
        settings = SamplingParams(max_tokens=16, ignore_eos=True, speculative_tokens=depth, **params)  # type: ignore[arg-type]
        parts = [PROMPTS[i : i + batch] for i in range(0, len(PROMPTS), batch)]
        return [o.outputs[0].token_ids for part in parts for o in llm.generate(part, settings)]

    plain, greedy = texts(pair, depth=0, batch=1), params["temperature"] == 0.0
    assert texts(lookup, 4, 4 if greedy else 1) == plain
    # each depth alone and in a batch, one of them greedy and the other one sampled
    for depth, batch in ((1, 1), (4, 4), (8, 1)) if greedy else ((1, 4), (4, 1), (8, 4)):
        assert texts(pair, depth, batch) == plain, (depth, batch)


CONFIGS = [  # trees of the draft, and early exit, are in tests/propose/test_draft_model_trees.py
    {"method": "eagle3"},
    {"method": "eagle3", "top_k": 1},
    {"method": "mtp"},
    {"method": "medusa"},
    {"method": "blockwise"},
    {"method": "vocabulary", "model": str(zoo.path("draft"))},
    {"method": "auto", "model": str(zoo.path("draft"))},
    {"method": "suffix"},
    {"method": "recycling"},
    {"method": "self_quantized"},
    {"method": "self_quantized", "tree": "sampled"},
    {"method": "mixture", "members": [{"method": "self_quantized"}, {"method": "suffix"}]},
    {"method": "mixture", "members": [{"method": "eagle3"}, {"method": "suffix"}, {"method": "recycling"}]},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(c.get(k, "")) for k in ("method", "tree")))
@pytest.mark.slow
def test_every_proposer_writes_the_same_text(config: dict[str, Any], plain_text: dict[float, list[Any]]) -> None:
    llm = LLM(zoo.path("target"), speculative_config=config, dtype="float32")
    if not llm.target.batch_invariant:
        pytest.skip("rows are not promised to be independent in float32 on this machine")
    batches = [1, len(PROMPTS)]
    if CONFIGS.index(config) % 2:  # any two of method, temperature and batch meet
        batches.reverse()
    for (temperature, plain), batch in zip(plain_text.items(), batches, strict=True):
        assert write(llm, temperature, batch) == plain, (temperature, batch)


@pytest.fixture(scope="module")
def plain_text() -> dict[float, list[Any]]:
    llm = LLM(zoo.path("target"), speculative_config={"method": "none"}, dtype="float32")
    return {temperature: write(llm, temperature, 1) for temperature in (0.0, 1.0)}


def write(llm: LLM, temperature: float, batch: int) -> list[Any]:
    """Four functions, ``batch`` at once, each with its own seed."""
    texts = []
    for start in range(0, len(PROMPTS), batch):
        params = [
            SamplingParams(max_tokens=16, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(start, start + batch)
        ]
        texts += [o.outputs[0].token_ids for o in llm.generate(PROMPTS[start : start + batch], params)]
    return texts


def test_the_draft_is_accepted_often() -> None:
    """A bound far below the card's figure, so that a broken draft or tokenizer is noticed."""
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, speculative_tokens=4)
    outputs = LLM().generate(FUNCTIONS, params)
    drafts = sum(o.stats.drafts for o in outputs)
    accepted = sum(o.stats.accepted for o in outputs)
    assert 1 + accepted / drafts > 1.8


@pytest.mark.slow
@pytest.mark.real
def test_the_head_of_smollm2_drafts_chains_and_changes_no_text() -> None:
    target = real_model("smollm2")
    config = {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 5, "control": "fixed"}
    plain, drafted = LLM(target, speculative_config={"method": "none"}), LLM(target, speculative_config=config)
    messages = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Count to ten.")]
    for params in (SamplingParams(max_tokens=40, temperature=0.0), SamplingParams(max_tokens=40, seed=3)):
        expected, outputs = (llm.chat(messages, params) for llm in (plain, drafted))
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
        stats = [o.outputs[0].stats for o in outputs]
        assert sum(s.steps for s in stats) < 0.8 * sum(s.tokens for s in stats)
