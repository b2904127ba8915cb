"""The bundled pair on real prompts: one text per seed, whatever the proposer, depth, batch or precision."""

from __future__ import annotations

import pytest

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.models.linear import can_pack

PROMPTS = FUNCTIONS[:4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 0}, {"temperature": 0.0}], ids=["seeded", "greedy"])
def test_one_text(dtype: str, params: dict[str, float]) -> None:
    pair = LLM(dtype=dtype)
    if not can_pack(pair.target.dtype, pair.target.device):
        pytest.skip(f"rows are not promised to be independent in {dtype} on this machine")
    lookup = LLM(zoo.path("target"), speculative_config={"method": "ngram"}, dtype=dtype)

    def texts(llm: LLM, depth: int, batch: int) -> list[tuple[int, ...]]:
        settings = SamplingParams(max_tokens=40, ignore_eos=True, speculative_tokens=depth, **params)  # type: ignore[arg-type]
        parts = [PROMPTS[i : i + batch] for i in range(0, len(PROMPTS), batch)]
        return [o.outputs[0].token_ids for part in parts for o in llm.generate(part, settings)]

    plain = texts(pair, depth=0, batch=1)
    for batch in (1, 4):
        assert texts(lookup, 4, batch) == plain
        for depth in (1, 4, 8):
            assert texts(pair, depth, batch) == plain, (depth, batch)


def test_the_draft_earns_its_keep() -> None:
    """A floor far under what the card says, so that a broken draft or tokenizer is noticed."""
    outputs = LLM().generate(FUNCTIONS, SamplingParams(max_tokens=48, temperature=0, ignore_eos=True))
    drafts = sum(o.stats.drafts for o in outputs)
    accepted = sum(o.stats.accepted for o in outputs)
    assert 1 + accepted / drafts > 1.8
