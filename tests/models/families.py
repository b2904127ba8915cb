"""Tiny modules of transformers' causal families, and the difference of a wrapped module from the module alone."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.hf.tiny_random import boundaries, tiny_of

TREE = Draft.tree([9, 8, 8, 7, 7], (-1, -1, 0, 1, 1))  # tokens recur, in the tree and below one node
DRAFTS = (TREE, Draft.chain([9, 8, 7]), Draft.empty(), TREE, Draft.chain([5]))
LENGTHS = (2, 45, 5, 1, 20)  # one is long enough to be prefilled by itself; windows are 4 tokens
# Sizes of a published model where a configuration's defaults do not fit together, and smaller heads for speed.
OVERRIDES: dict[str, dict[str, Any]] = {
    "codegen": {"n_embd": 256, "n_head": 16, "rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    "gemma2": {"head_dim": 32},
    "gemma3n_text": {"head_dim": 32, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    "gemma4_text": {"head_dim": 32, "hidden_size_per_layer_input": 16},
    "gptj": {"n_embd": 256, "n_head": 16, "rotary_dim": 8},
}


def tiny(family: str, **more: Any) -> Any:
    """Returns a tiny random module of a model type with windows of a few tokens; None if it cannot be built."""
    config = CONFIG_MAPPING[family](**OVERRIDES.get(family, {}), **more)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    return tiny_of(kind, config, boundaries(config.get_text_config(), 1 << 30))


def difference(model: Model, module: Any) -> float:
    """Returns the largest difference of a logit from a plain pass over that path alone, over a few steps.

    The batches are ragged, with trees, chains and empty drafts, and the accepted paths do not lie in adjacent rows. The
    unit is the standard deviation of the logits.
    """
    worst = 0.0
    handles = [model.open(_text(length, length)) for length in LENGTHS]
    for step in range(3):
        drafts = DRAFTS[step:] + DRAFTS[:step]
        for handle, draft, scores in zip(handles, drafts, model.score(handles, drafts), strict=True):
            for node in range(-1, len(draft)):
                text = [*handle.tokens, *(draft.ids[i] for i in draft.path(node))]
                alone = _alone(module, text)
                worst = max(worst, float((scores.logits[node + 1].float() - alone).abs().max() / alone.std()))
        model.commit(handles, [[*(d.ids[i] for i in d.path(len(d) - 1)), 30 + step] for d in drafts])
    for handle in handles:
        model.close(handle)
    return worst


def _alone(module: Any, text: list[int]) -> Tensor:
    """Returns the logits after ``text`` as transformers computes them."""
    with torch.no_grad():
        logits: Tensor = module(torch.tensor([text]), use_cache=False).logits[0, -1]
    return logits


def _text(count: int, seed: int) -> list[int]:
    return [3 + (17 * seed + 7 * at) % 61 for at in range(count)]
