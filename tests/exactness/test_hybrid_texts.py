"""Models with recurrent layers through the whole engine: every text is that of plain decoding, byte for byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks
from tests.models.heads import tiny as heads
from tests.models.tiny import ARCHITECTURES, Tiny, only_runner

from foretoken import LLM, SamplingParams
from foretoken.models.formats.checkpoint import load_config

pytestmark = pytest.mark.slow

TARGETS = ("qwen3.5", "lfm2")
PREFIX = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 6
PROMPTS = [PREFIX + "for i in range", "x = 1", PREFIX + "print(", "a b a b a b a b", PREFIX[:200], "import os\n" * 9]
METHODS: dict[str, dict[str, Any]] = {
    "auto": {"method": "auto"},
    "draft model": {"method": "draft_model"},
    "tree of a draft model": {"method": "draft_model", "tree": "top_k", "top_k": 2},
    "drawn tree": {"method": "draft_model", "tree": "sampled", "top_k": 2},
    "its first layers": {"method": "early_exit", "exit_layer": 1},
    "its weights at four bits": {"method": "self_quantized"},
    "block drafter": {"method": "dspark"},
    "lookup": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
# By the number of sequences: sampling and draft length, so that any two of the three meet.
PAIRS = {1: (("greedy", 5), ("sampled", 1)), 8: (("greedy", 1), ("sampled", 5))}
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 3}}


@pytest.fixture(scope="module")
def saved(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves an architecture with a tokenizer. Its texts repeat themselves, so that drafts are accepted."""

    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tiny = ARCHITECTURES[name]
        module = Tiny(tiny.family, {**tiny.config, "vocab_size": 400}).build()
        with torch.no_grad():
            module.get_output_embeddings().weight.mul_(2)
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def texts(llm: LLM, sampling: str, speculative_tokens: int, max_tokens: int = 24) -> list[str]:
    own = {"max_tokens": max_tokens, "speculative_tokens": speculative_tokens, **SAMPLING[sampling]}
    own["speculative_method"] = llm.methods[0]
    params = SamplingParams(ignore_eos=True, **own)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    return saved(request.param)


@pytest.fixture(scope="module")
def wanted(target: Path) -> dict[str, list[str]]:
    """Plain decoding, one request at a time."""
    with only_runner("compiled"):
        llm = LLM(target, dtype="float32", max_num_seqs=1, max_model_len=512)
    return {sampling: texts(llm, sampling, speculative_tokens=0) for sampling in SAMPLING}


@pytest.mark.parametrize("method", METHODS)
def test_every_proposer_and_batch(method, target, wanted, saved, tmp_path):
    """The draft model has recurrent layers of its own: the target's first layers would agree, these seldom do."""
    config = dict(METHODS[method])
    if config["method"] in ("auto", "draft_model"):
        config["model"] = str(target if config.get("tree") is None else saved("qwen3-next"))
    if config["method"] == "dspark":
        hidden = load_config(target)["hidden_size"]
        config["model"] = str(heads.save(tmp_path, *blocks.dspark(vocab=400, target_hidden=hidden, mask=399)))
    for sequences in (1, 8):
        llm = LLM(target, speculative_config=config, dtype="float32", max_num_seqs=sequences, max_model_len=512)
        for sampling, length in PAIRS[sequences]:
            assert texts(llm, sampling, speculative_tokens=length) == wanted[sampling]


def test_preemption_and_prefix_hits(target: Path) -> None:
    """Little memory preempts running requests; shared prefixes are found in the middle of prompts."""
    plain = LLM(target, dtype="float32", max_num_seqs=1, max_model_len=384)
    each, state = plain.target.kv_bytes_per_token, plain.target.state_bytes
    llm = LLM(
        target,
        speculative_config={"method": "ngram"},
        dtype="float32",
        max_num_seqs=8,
        max_model_len=384,
        kv_cache_memory_bytes=640 * each + 3 * state,
        enable_prefix_caching=True,
    )
    for sampling in SAMPLING:
        wanted = texts(plain, sampling, 0, max_tokens=130)
        for length in (0, 4):
            assert texts(llm, sampling, length, max_tokens=130) == wanted
    usage = llm.engine.scheduler.usage
    assert usage.preemptions and usage.prefix_hits
    llm.target.check()


@pytest.mark.parametrize("dtype, quantization", [("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4")])
def test_every_number_format(dtype: str, quantization: str | None, target: Path) -> None:
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "max_model_len": 512}
    plain = LLM(target, max_num_seqs=1, **options)
    llm = LLM(target, speculative_config={"method": "draft_model", "model": str(target)}, max_num_seqs=8, **options)
    for sampling in SAMPLING:
        assert texts(llm, sampling, speculative_tokens=4) == texts(plain, sampling, speculative_tokens=0)
