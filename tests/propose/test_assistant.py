"""Assistants of Gemma 4 through the whole engine: every text is that of plain decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.dense import module
from tests.models.heads.assistant_files import CHANGES, saved_assistant
from tests.models.tiny import only_runner

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest

pytestmark = pytest.mark.slow

PREFIX = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 4
PROMPTS = [PREFIX + "for i in range", "x = 1", PREFIX + "print(", "a b a b a b a b", PREFIX[:100], "import os\n" * 9]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 3}}
# By the number of sequences: sampling and draft length, so that any two of the three meet.
PAIRS = {1: (("greedy", 5), ("sampled", 1)), 8: (("greedy", 1), ("sampled", 5))}


@pytest.fixture(scope="module")
def target(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 with an assistant beside it. Its logits are sharp, so that drafts are accepted now and then."""
    folder = tmp_path_factory.mktemp("target")
    built = module("gemma4", **CHANGES)
    with torch.no_grad():
        built.model.norm.weight.mul_(2)
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved_assistant(folder / "heads" / "assistant", clusters=True)
    return folder


@pytest.fixture(scope="module")
def wanted(target: Path) -> dict[str, list[str]]:
    with only_runner("compiled"):
        llm = LLM(target, dtype="float32", max_num_seqs=1, max_model_len=512)
    return {sampling: texts(llm, sampling, 0) for sampling in SAMPLING}


def texts(llm: LLM, sampling: str, speculative_tokens: int, max_tokens: int = 24) -> list[str]:
    own: dict[str, Any] = {"max_tokens": max_tokens, "speculative_tokens": speculative_tokens, **SAMPLING[sampling]}
    return [o.outputs[0].text for o in llm.generate(PROMPTS, SamplingParams(ignore_eos=True, **own))]


@pytest.mark.parametrize("tree", ["chain", "top_k", "sampled"])
def test_every_text_is_that_of_plain_decoding(tree: str, target: Path, wanted: dict[str, list[str]]) -> None:
    config = {"method": "assistant", "tree": tree, "top_k": 2}
    for sequences in (1, 8):
        llm = LLM(target, speculative_config=config, dtype="float32", max_num_seqs=sequences, max_model_len=512)
        for sampling, length in PAIRS[sequences]:
            assert texts(llm, sampling, length) == wanted[sampling], (sequences, sampling, length)


def test_preemption_and_prefix_hits(target: Path) -> None:
    plain = LLM(target, dtype="float32", max_num_seqs=1, max_model_len=384)
    llm = LLM(
        target,
        speculative_config={"method": "assistant"},
        dtype="float32",
        max_num_seqs=8,
        max_model_len=384,
        kv_cache_memory_bytes=512 * plain.target.kv_bytes_per_token,
        enable_prefix_caching=True,
    )
    for sampling in SAMPLING:
        wanted = texts(plain, sampling, 0, max_tokens=120)
        assert texts(llm, sampling, 4, max_tokens=120) == wanted
    usage = llm.engine.scheduler.usage
    assert usage.preemptions and usage.prefix_hits
    llm.target.check()


def test_other_number_formats(target: Path) -> None:
    int8: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}
    for options in ({"dtype": "bfloat16"}, int8):
        plain = LLM(target, max_num_seqs=1, max_model_len=512, **options)
        llm = LLM(target, speculative_config={"method": "assistant"}, max_num_seqs=8, max_model_len=512, **options)
        for sampling in SAMPLING:
            assert texts(llm, sampling, 4) == texts(plain, sampling, 0)


def test_an_assistant_is_no_draft_model(target: Path) -> None:
    with pytest.raises(InvalidRequest, match="method 'assistant'"):
        LLM(target, str(target / "heads" / "assistant"), speculative_config={"method": "draft_model"}, dtype="float32")
    assert LLM(target, str(target / "heads" / "assistant"), dtype="float32").methods == ("auto", "assistant")
