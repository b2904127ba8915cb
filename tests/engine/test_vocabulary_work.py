"""A step's work over a large vocabulary: kernels do it, torch operators only pass tensors on."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.conftest import WIDE_VOCABULARY, Pair
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken import LLM, SamplingParams
from foretoken.core.native import sampling as native

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.kernels() is None, reason="there are no compiled kernels")]
# They allocate, or give a tensor another shape or type that it has already.
PASSING_ON = {
    *("alias", "detach", "empty", "index", "lift_fresh", "resolve_conj", "resolve_neg", "select", "slice"),
    *("split_with_sizes", "squeeze", "to", "unsqueeze", "view"),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "seeded": {"temperature": 1.0, "seed": 1},
    "trajectory": {"temperature": 1.0, "seed": 1, "exactness": "trajectory"},
    "filters": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {5: 3.0}},
    "bad_words": {"bad_words": ["for"]},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False},
    "allowed": {"allowed_token_ids": list(range(300))},
    "grammar": {"structured_outputs": {"regex": "[a-z]+"}, "ignore_eos": False},
    "both": {"structured_outputs": {"regex": "[a-z]+"}, "allowed_token_ids": list(range(399)), "ignore_eos": False},
    "logprobs": {"logprobs": 5},
}


class VocabularyOperators(TorchDispatchMode):
    """Counts torch operators that compute with at least a row of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        wide = any(isinstance(each, torch.Tensor) and each.numel() >= WIDE_VOCABULARY for each in (*args, result))
        if wide and (name not in PASSING_ON or (name == "index" and result.numel() >= WIDE_VOCABULARY)):
            self.counts[name] += 1
        return result


@pytest.fixture(scope="module", params=["recycling", "draft_model"])
def wide_llm(request: pytest.FixtureRequest, wide_pair: Pair) -> LLM:
    model = {"model": str(wide_pair.draft)} if request.param == "draft_model" else {}
    return LLM(wide_pair.target, speculative_config={"method": request.param, **model})


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("depth", [0, 3])
def test_no_torch_operator_computes_over_a_vocabulary(wide_llm: LLM, name: str, depth: int) -> None:
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | PARAMETERS[name]
    params = SamplingParams(**options, speculative_tokens=depth)
    with VocabularyOperators() as operators:
        (output,) = wide_llm.generate("def greet", params)
    assert output.outputs[0].token_ids
    assert not operators.counts
