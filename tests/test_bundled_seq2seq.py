"""The bundled encoder-decoders: one text per seed whatever drafts, and transformers' greedy text."""

from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import repairs

DRAFTS: dict[str, dict[str, Any]] = {
    "draft": {"method": "draft_model", "model": str(zoo.path("seq2seq-draft"))},
    "tree": {"method": "draft_model", "model": str(zoo.path("seq2seq-draft")), "tree": "sampled"},
    "auto": {"method": "auto", "model": str(zoo.path("seq2seq-draft"))},
    "lookup": {"method": "ngram"},
    "source": {"method": "prediction"},
    "first layers": {"method": "early_exit"},
}
TASKS = [list(task.source) for task in repairs(zoo.path("seq2seq-target"), 4)]


def texts(llm: LLM, prompts: list[list[int]], temperature: float, tokens: int = 24) -> list[tuple[int, ...]]:
    settings = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, settings)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_one_text_for_a_seed_alone_and_together(dtype: str) -> None:
    plain = LLM(zoo.path("seq2seq-target"), speculative_config={"method": "none"}, dtype=dtype)
    if not plain.target.batch_invariant:
        pytest.skip("rows are not promised to be independent here")
    expected = {t: [texts(plain, [task], t)[0] for task in TASKS] for t in (0.0, 1.0)}
    for name, config in DRAFTS.items():
        llm = LLM(zoo.path("seq2seq-target"), speculative_config={**config, "num_speculative_tokens": 6}, dtype=dtype)
        for temperature, alone in expected.items():
            assert texts(llm, TASKS, temperature) == alone, (name, temperature)
            assert texts(llm, TASKS[:1], temperature) == alone[:1], (name, temperature)


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers() -> None:
    from transformers import AutoModelForSeq2SeqLM

    module = AutoModelForSeq2SeqLM.from_pretrained(zoo.path("seq2seq-target"), dtype=torch.float32)
    llm = LLM(zoo.path("seq2seq-target"), zoo.path("seq2seq-draft"), dtype="float32")
    theirs = [
        tuple(module.generate(torch.tensor([task]), max_new_tokens=40, do_sample=False)[0, 1:].tolist())
        for task in TASKS
    ]
    assert texts(llm, TASKS, 0.0, tokens=40) == theirs


@pytest.mark.slow
def test_the_draft_is_worth_something() -> None:
    llm = LLM(zoo.path("seq2seq-target"), zoo.path("seq2seq-draft"), dtype="float32")
    outputs = llm.generate(TASKS, SamplingParams(max_tokens=60, temperature=0, speculative_tokens=8))
    assert sum(output.stats.mean_acceptance_length for output in outputs) / len(outputs) > 4
