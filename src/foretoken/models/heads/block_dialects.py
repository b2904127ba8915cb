"""Writes block drafters in the layouts of other engines.

The tensors are the same in all of them. vLLM and SGLang read the originals' layout: z-lab's for DFlash, DeepSpec's
for DSpark. speculators nests the layers' settings, counts layers by their inputs, and needs a vocabulary head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.heads.block import BlockHead
from foretoken.models.heads.dialects import Written

BLOCK_DIALECTS = ("original", "vllm", "sglang", "speculators")


def write_block(head: BlockHead, dialect: str, vocabulary: Tensor | None = None, verifier: str = "") -> Written:
    """Returns ``head`` in the layout ``dialect``.

    Args:
        head: the head.
        dialect: one of ``BLOCK_DIALECTS``.
        vocabulary: the target's vocabulary head [V, H], for a head without its own.
        verifier: the target's name or folder, which the layout of speculators contains.

    Raises:
        InvalidRequest: the layout does not support such heads.
    """
    if dialect not in BLOCK_DIALECTS:
        raise InvalidRequest(f"block drafters have no dialect {dialect!r}; known: {', '.join(BLOCK_DIALECTS)}")
    if dialect == "speculators":
        return _nested(head, verifier), _with_vocabulary(head, vocabulary)
    if head.from_newest != (head.method == "dspark"):
        raise InvalidRequest(
            "sample_from_anchor differs from this method's fixed value in the originals' layout; only the layout of "
            "speculators has a key for it"
        )
    return (_dspark(head) if head.method == "dspark" else _dflash(head)), dict(head.tensors)


def _layers(head: BlockHead) -> dict[str, Any]:
    dtype = str(head.tensors["fc.weight"].dtype).removeprefix("torch.")
    kinds = head.layer.get("layer_types") or ["full_attention"] * head.layers
    mapped = {"draft_vocab_size": head.draft_vocab} if head.draft_vocab != head.vocab else {}
    layer = {**head.layer, "vocab_size": head.vocab, "layer_types": kinds, "tie_word_embeddings": False, **mapped}
    return layer | {"attention_bias": False, "torch_dtype": dtype}


def _originals(head: BlockHead, architecture: str) -> dict[str, Any]:
    kinds = head.layer.get("layer_types", [])
    usual = tuple(kind == "sliding_attention" for kind in kinds) or (False,) * head.layers
    stated = {} if head.ordered == usual else {"is_causal": head.ordered[0]}
    return {"architectures": [architecture], **_layers(head), "block_size": head.block, **stated}


def _dflash(head: BlockHead) -> dict[str, Any]:
    section = {"mask_token_id": head.mask_token, "target_layer_ids": [tap - 1 for tap in head.taps]}
    return {**_originals(head, "DFlashDraftModel"), "dflash_config": section}


def _dspark(head: BlockHead) -> dict[str, Any]:
    return {
        **_originals(head, "Qwen3DSparkModel"),
        "mask_token_id": head.mask_token,
        "target_layer_ids": [tap - 1 for tap in head.taps],
        **_heads(head),
    }


def _heads(head: BlockHead) -> dict[str, Any]:
    return {
        "markov_rank": head.markov_rank,
        "markov_head_type": "gated" if head.gated else "vanilla",
        "enable_confidence_head": head.confident,
        "confidence_head_with_markov": head.confident_of,
    }


def _nested(head: BlockHead, verifier: str) -> dict[str, Any]:
    name = "DSparkSpeculator" if head.method == "dspark" else "DFlashSpeculator"
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.depth, "verifier_accept_k": 1}
    layer = _layers(head)
    dtype = layer.pop("torch_dtype")
    return {
        "architectures": [name],
        "speculators_model_type": head.method,
        "speculators_config": {
            "algorithm": head.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        "block_size": head.block,
        "mask_token_id": head.mask_token,
        "aux_hidden_state_layer_ids": list(head.taps),
        "sample_from_anchor": head.from_newest,
        "sliding_window_non_causal": not any(head.ordered),
        "torch_dtype": dtype,
        **(_heads(head) if head.method == "dspark" else {}),
    }


def _with_vocabulary(head: BlockHead, vocabulary: Tensor | None) -> dict[str, Tensor]:
    """Returns the tensors with a vocabulary head, and with both maps between the vocabularies if these differ."""
    tensors = dict(head.tensors)
    if "lm_head.weight" not in tensors:
        if vocabulary is None:
            raise InvalidRequest(
                "the layout of speculators needs a vocabulary head; name the target with --target to write it out"
            )
        if tuple(vocabulary.shape) != (head.vocab, head.hidden):
            raise InvalidRequest(
                f"this head was made for a target with a vocabulary head of {head.vocab} x {head.hidden}, not of "
                f"{' x '.join(map(str, vocabulary.shape))}"
            )
        tensors["lm_head.weight"] = vocabulary.to(tensors["fc.weight"].dtype)
    if head.draft_vocab != head.vocab and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(head.vocab, dtype=torch.bool).index_fill_(0, head.ids(), True)
    return tensors
