"""What vLLM's process is started with. vLLM itself is not needed."""

from __future__ import annotations

import pytest

from foretoken.bench.peers.protocol import Setup
from foretoken.bench.peers.vllm import speculation


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup("vllm", "plain", "t"), None),
        (
            Setup("vllm", "draft_model", "t", "d", depth=4, options=(("tree", '"ranked"'),)),
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 4},
        ),
        (
            Setup("vllm", "ngram", "t", depth=2, options=(("prompt_lookup_max", "3"),)),
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        ),
        (
            Setup("vllm", "eagle3", "t", "h", depth=8, options=(("parallel_drafting", "true"),)),
            {"method": "eagle3", "model": "h", "num_speculative_tokens": 8, "parallel_drafting": True},
        ),
    ],
    ids=lambda value: value.method if isinstance(value, Setup) else "",
)
def test_a_method_has_vllms_keys(setup: Setup, expected: dict[str, object] | None) -> None:
    assert speculation(setup) == expected
