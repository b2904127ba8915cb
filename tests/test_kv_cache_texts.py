"""Every text is that of plain decoding with the same KV cache, however it is written; int8 is a target of its own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS

from .models.test_native import needs_kernels

pytestmark = pytest.mark.slow
# Other caches on CPUs are tested in tests/exactness and tests/engine.
CACHES = [pytest.param(("cpu", "int8"), marks=needs_kernels, id="cpu-int8")]
if torch.cuda.is_available():
    CACHES += [pytest.param(("cuda", kind), id=f"cuda-{kind}") for kind in ("int8", "auto")]
PROMPTS = [*FUNCTIONS[:4], *(text + "    # checked\n" for text in FUNCTIONS[:4])]
CONFIGS: dict[str, dict[str, Any]] = {
    "chain": {"method": "draft_model", "model": str(zoo.path("draft"))},
    "tree": {"method": "draft_model", "model": str(zoo.path("draft")), "tree": "top_k"},
    "sampled tree": {"method": "draft_model", "model": str(zoo.path("draft")), "tree": "sampled"},
    "heads": {"method": "eagle3"},
    "early exit": {"method": "early_exit"},
    "quantized copy": {"method": "self_quantized"},
    "lookup": {"method": "ngram"},
}


@pytest.fixture(scope="module", params=CACHES)
def cache(request: pytest.FixtureRequest) -> dict[str, str]:
    device, kind = request.param
    return {"device": device, "kv_cache_dtype": kind}


def opened(cache: dict[str, str], **options: Any) -> LLM:
    return LLM(zoo.path("target"), dtype="bfloat16", max_model_len=256, **cache, **options)


def write(llm: LLM, temperature: float, batch: int, max_tokens: int = 16, **options: Any) -> list[Sequence[int]]:
    """Continues all prompts, ``batch`` at once, each with its own seed."""
    texts: list[Sequence[int]] = []
    for start in range(0, len(PROMPTS), batch):
        seeds = range(start, start + batch)
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True, **options)
            for i in seeds
        ]
        texts += [output.outputs[0].token_ids for output in llm.generate(PROMPTS[start : start + batch], params)]
    return texts


@pytest.fixture(scope="module")
def plain(cache: dict[str, str]) -> dict[float, list[Sequence[int]]]:
    llm = opened(cache)
    return {temperature: write(llm, temperature, 1, speculative_tokens=0) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_proposer_writes_the_text_of_plain_decoding(name, cache, plain):
    llm = opened(cache, speculative_config=CONFIGS[name])
    batches = [1, 8]
    if list(CONFIGS).index(name) % 2:  # any two of method, temperature and batch meet
        batches.reverse()
    for (temperature, texts), batch in zip(plain.items(), batches, strict=True):
        assert write(llm, temperature, batch) == texts, (temperature, batch)


@pytest.mark.parametrize("name", ["chain", "tree", "quantized copy"])
def test_preemption_and_prefix_cache_hits_change_no_text(name: str, cache: dict[str, str]) -> None:
    """The cache holds little more than the longest sequence, so that others are preempted as they grow."""

    def loaded(size: int) -> LLM:
        return opened(cache, speculative_config=CONFIGS[name], kv_cache_memory_bytes=size, enable_prefix_caching=True)

    large = loaded(2**30)
    plain = write(large, 1.0, 1, speculative_tokens=0, max_tokens=70)
    small = loaded(320 * 2**30 // large.engine.usage.kv_capacity)
    for _ in range(2):
        assert write(small, 1.0, 8, max_tokens=70) == plain
    usage = small.engine.usage
    assert usage.preemptions and usage.prefix_hits


@needs_kernels
def test_twice_as_many_tokens_fit() -> None:
    capacities = [
        LLM(
            zoo.path("target"),
            speculative_config={"method": "ngram"},
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=2**27,
        ).engine.usage.kv_capacity
        for kv_cache_dtype in ("auto", "int8")
    ]
    assert 1.8 < capacities[1] / capacities[0] < 2
