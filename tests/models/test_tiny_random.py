"""Tiny random copies: the boundaries that they cross, and the properties of the module that they keep."""

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen2Config,
)

from foretoken.models.hf.tiny_random import LENGTH, WINDOW, boundaries, tiny_of, tiny_random

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}


def tiny(kind: str, config: Any) -> Any:
    """A copy of the class ``kind`` that crosses every boundary."""
    return tiny_of(getattr(transformers, kind), config, boundaries(config.get_text_config(), 1 << 20))


def test_boundaries_are_the_windows_and_rotary_lengths_that_a_sequence_exceeds() -> None:
    gemma = Gemma3TextConfig(sliding_window=512)
    assert boundaries(gemma, 513) == {"sliding_window": 512}
    assert boundaries(gemma, 512) == {}
    assert boundaries(LlamaConfig(), 1 << 20) == {}
    assert boundaries(Qwen2Config(), 1 << 20) == {}  # max_window_layers is no length
    phi = Phi3Config(rope_parameters=LONGROPE, max_position_embeddings=131072)
    assert boundaries(phi, 131072)["original_max_position_embeddings"] == 4096
    assert "original_max_position_embeddings" not in boundaries(phi, 4096)


def test_a_copy_keeps_kinds_of_layers_and_widths_of_heads() -> None:
    config = Gemma3TextConfig(sliding_window=512)  # five of six layers slide
    module = tiny("Gemma3ForCausalLM", config)
    assert module.config.layer_types == ["sliding_attention", "full_attention"]
    assert module.config.head_dim == config.head_dim and module.config.sliding_window == WINDOW
    assert config.num_hidden_layers == 26 and config.sliding_window == 512, "the original changed"


def test_layers_that_share_keys_and_values_go_on_sharing_them() -> None:
    config = Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=6)
    module = tiny("Gemma4ForCausalLM", config)
    assert isinstance(module, Gemma4ForCausalLM)
    assert 0 < module.config.num_kv_shared_layers < module.config.num_hidden_layers < 12


def test_text_and_image_models_are_copied_with_their_own_class() -> None:
    config = Gemma3Config()
    module = tiny("Gemma3ForConditionalGeneration", config)
    assert isinstance(module, Gemma3ForConditionalGeneration)
    assert sum(p.numel() for p in module.parameters()) < 60_000_000
    assert module.config.text_config.sliding_window == WINDOW


def test_a_copy_crosses_the_original_length_of_longrope() -> None:
    config = Phi3Config(rope_parameters=LONGROPE, max_position_embeddings=131072)
    rope = tiny("Phi3ForCausalLM", config).config.rope_parameters
    assert rope["original_max_position_embeddings"] < LENGTH < 4096
    assert rope["long_factor"] == LONGROPE["long_factor"]


def test_every_parameter_is_random_and_the_same_every_time() -> None:
    first, second = (tiny("LlamaForCausalLM", LlamaConfig()) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) and one.dtype == torch.float32 and one.std() > 0


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), torch.nn.ModuleList()])
def test_no_copy_of_other_modules(module: Any) -> None:
    assert tiny_random(module, {}) is None


def test_no_copy_where_sizes_do_not_fit() -> None:
    assert tiny_of(LlamaForCausalLM, Gemma3Config(), {}) is None
