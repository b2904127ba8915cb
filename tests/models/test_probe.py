"""The check of a module on loading: it detects differences from the module alone at all lengths, and is cheap."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoConfig, GPTNeoForCausalLM, MistralConfig, MistralForCausalLM

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.hf.model import HFModel
from foretoken.models.hf.probe import agrees
from foretoken.models.hf.runner import HFRunner
from foretoken.models.runners.pass_plan import PassPlan

from .families import difference, tiny
from .tiny import GROUPED, Tiny

pytestmark = pytest.mark.slow

LENGTHS = (40, 5, 2)
ORIGINAL = 60  # longer than the texts of the check, shorter than a tiny module's maximum length
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "short_mscale": 1.0,
    "long_mscale": 1.3,
    "original_max_position_embeddings": ORIGINAL,
}


def phimoe() -> Any:
    """A module whose rotary scale follows the longest sequence of a pass, in code of its own."""
    config = {**GROUPED, "num_local_experts": 2, "original_max_position_embeddings": ORIGINAL}
    return Tiny("Phimoe", {**config, "rope_parameters": LONGROPE}).build()


class Unchecked(HFModel):
    """A model whose constructor checks nothing."""

    def _check_once(self, max_length: int) -> None:
        pass


class WithoutWindows(HFRunner):
    def _masks(self, plan: PassPlan) -> Tensor | dict[str, Tensor]:
        self._window = 0
        return super()._masks(plan)


class WithoutTrees(HFRunner):
    def _masks(self, plan: PassPlan) -> Tensor | dict[str, Tensor]:
        return super()._masks(replace(plan, parts=[replace(p, draft=Draft.chain(p.draft.ids)) for p in plan.parts]))


class WithoutPositions(HFRunner):
    def compute(self, plan: PassPlan, states: bool) -> Any:
        rows = [row for part in plan.parts for row in range(part.first, part.end)]
        return super().compute(replace(plan, positions=rows), states)


def wrong(module: Any, kind: type[HFRunner]) -> Unchecked:
    model = Unchecked(module)
    model.runner = kind(module, model.max_length)
    return model


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "modernbert-decoder", "gpt_oss", "olmo3"])
def test_an_ignored_window_is_detected(family: str) -> None:
    module = tiny(family)
    assert agrees(Unchecked(module), LENGTHS)
    assert not agrees(wrong(module, WithoutWindows), LENGTHS)


@pytest.mark.parametrize("kind", [WithoutTrees, WithoutPositions])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_an_ignored_tree_is_detected(family: str, kind: type[HFRunner]) -> None:
    module = tiny(family)
    assert agrees(Unchecked(module), LENGTHS)
    assert not agrees(wrong(module, kind), LENGTHS)


@pytest.mark.parametrize("kinds", [["global", "local"], ["global"]])
def test_attention_that_counts_rows_is_refused_even_if_a_short_text_agrees(kinds: list[str]) -> None:
    config = GPTNeoConfig(
        vocab_size=101,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        window_size=256,
        max_position_embeddings=512,
        attention_types=[[kinds, 2 // len(kinds)]],
    )
    with pytest.raises(ModelLoadError, match=r"GPTNeoForCausalLM cannot be served.*padded rows.*its neighbours"):
        HFModel(GPTNeoForCausalLM(config).eval())


def test_a_module_correct_up_to_a_length_is_refused_beyond_it() -> None:
    with pytest.raises(
        ModelLoadError, match=rf"original_max_position_embeddings of {ORIGINAL}.*max_model_len to at most"
    ):
        HFModel(phimoe())
    module = phimoe()
    assert difference(HFModel(module, ORIGINAL), module) < 1e-3
    with pytest.raises(ModelLoadError, match="max_model_len"):
        HFModel(module, ORIGINAL + 1)


class Two(MistralForCausalLM):
    """A user's class that cannot be built from a configuration alone."""

    def __init__(self, config: Any, more: int) -> None:
        super().__init__(config)
        self.more = more


def test_a_class_without_a_copy_is_checked_itself_up_to_its_window() -> None:
    near = Two(MistralConfig(**{**GROUPED, "sliding_window": 30}), 1).eval()
    assert difference(HFModel(near), near) < 1e-3
    config = MistralConfig(**{**GROUPED, "sliding_window": 1500, "max_position_embeddings": 4096})
    with pytest.raises(ModelLoadError, match=r"sliding_window of 1500.*tiny copy.*at most 1500"):
        HFModel(Two(config, 1).eval())
    assert HFModel(Two(config, 1).eval(), 1500).max_length == 1500


def test_the_module_itself_computes_a_few_rows_and_only_once() -> None:
    module = Tiny("Mistral", {**GROUPED, "sliding_window": 300}).build()
    rows = []
    module.register_forward_pre_hook(lambda _, __, inputs: rows.append(inputs["input_ids"].numel()), with_kwargs=True)
    HFModel(module)
    assert 0 < sum(rows) < 40
    checked = len(rows)
    HFModel(module)
    HFModel(module, 400)
    assert len(rows) == checked


def test_a_longer_maximum_that_goes_beyond_a_window_is_checked_again() -> None:
    module = phimoe()
    HFModel(module, ORIGINAL)
    with pytest.raises(ModelLoadError):
        HFModel(module)


def test_the_global_random_state_does_not_change() -> None:
    module = Tiny("Phimoe", {**GROUPED, "num_local_experts": 2}).build()
    before = torch.random.get_rng_state()
    HFModel(module)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_precision_is_checked_with_its_own_tolerance() -> None:
    module = tiny("qwen2").to(torch.bfloat16)
    assert HFModel(module).dtype == torch.bfloat16
