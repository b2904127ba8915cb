"""Tiny random assistants of Gemma 4, saved by transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.dense import GEMMA4
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

VOCAB, WIDTH = 400, 64  # of the target, which is the case "gemma4" of ``dense.py``
CHANGES: dict[str, int] = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}


@contextmanager
def all_shared() -> Iterator[None]:
    """Inside, layers that all read the keys and values of others can be built, which transformers 5.23 refuses."""
    own = Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Any) -> list[str | None]:
        count = config.num_hidden_layers
        listed: list[str | None] = ["reuse"] * count if config.num_kv_shared_layers == count else own(config)
        return listed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


def assistant(clusters: bool, **changes: Any) -> Any:
    """A random float32 module, the same every time. No weight of a norm is 1."""
    torch.manual_seed(17)
    layers = {
        **GEMMA4,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": 0,
        "hidden_size": 32,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": None,
        **changes,
    }
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**layers),
        backbone_hidden_size=WIDTH,
        use_ordered_embeddings=clusters,
        num_centroids=20,
        centroid_intermediate_top_k=3,
    )
    with all_shared():
        module = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * 0.6 / parameter.shape[-1] ** 0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.9)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB))
    return module.float().eval()


def saved_assistant(folder: Path, clusters: bool, **changes: Any) -> Any:
    """Saves an assistant. Returns the module."""
    module = assistant(clusters, **changes)
    module.save_pretrained(folder)
    return module
