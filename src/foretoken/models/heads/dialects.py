"""Writes EAGLE heads in the formats of other engines.

The tensors are the same in all of them; the name of the first layer (``midlayer.*`` or ``layers.0.*``) and config.json
differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.heads.eagle import MASK, EagleHead
from foretoken.models.heads.files import TAPS_KEY

_MASK_KEYS = ("pard_token", "mask_token_id")  # vLLM's and speculators' names for the mask token
EAGLE_DIALECTS = ("sglang", "vllm", "speculators")
Written = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json, and the tensors of model.safetensors."""


def write_eagle(
    head: EagleHead, dialect: str, taps: tuple[int, ...] | None = None, verifier: str | None = None
) -> Written:
    """Returns ``head`` in the format ``dialect``.

    Args:
        head: the head.
        dialect: one of ``EAGLE_DIALECTS``.
        taps: indices of the inputs of the tapped layers; None for the head's.
        verifier: the target's name or folder, which the speculators format contains.

    Raises:
        InvalidRequest: the format does not support such heads.
    """
    if dialect not in EAGLE_DIALECTS or (head.version != 3 and dialect == "speculators"):
        raise InvalidRequest(
            f"an EAGLE-{head.version} head has no dialect {dialect!r}; known: {', '.join(EAGLE_DIALECTS)} "
            "(speculators for EAGLE-3 only)"
        )
    if dialect == "sglang" and head.version == 3 and head.layers > 1:
        raise InvalidRequest(f"SGLang's form of EAGLE-3 has one layer, this head {head.layers}; write it for vllm")
    tensors = dict(head.tensors)
    if head.version == 3:
        tensors = _with_maps(head, tensors)
    if dialect == "sglang" and head.version == 3:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if head.mask_token is not None:
        tensors[MASK] = tensors[MASK].view((1, 1, -1) if dialect == "speculators" else (1, -1))
    inputs = taps if taps is not None else head.taps if head.exact else None
    config = _speculators(head, inputs, verifier) if dialect == "speculators" else _plain(head, dialect, inputs)
    return config, tensors


def _with_maps(head: EagleHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds both maps between the vocabularies if these differ; other engines refuse them if they are equal."""
    ids = head.ids()
    if torch.equal(ids, torch.arange(head.vocab)):
        return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    used = torch.zeros(head.vocab, dtype=torch.bool)
    used[ids] = True
    maps = {"d2t": ids - torch.arange(head.draft_vocab), "t2d": used}
    return {**maps, **tensors}


def _common(head: EagleHead) -> dict[str, Any]:
    return {
        **head.layer,
        "model_type": "llama",
        "num_hidden_layers": head.layers,
        "vocab_size": head.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.tensors["fc.weight"].dtype).removeprefix("torch."),
    }


def _plain(head: EagleHead, dialect: str, inputs: tuple[int, ...] | None) -> dict[str, Any]:
    if head.version != 3:
        return {
            **_common(head),
            "architectures": ["LlamaForCausalLMEagle" if dialect == "sglang" else "EagleLlamaForCausalLM"],
        }
    # SGLang adds 1 to explicit ids; vLLM does not.
    shift = 1 if dialect == "sglang" else 0
    ids = [i - shift for i in inputs] if inputs is not None else list(head.taps or ())
    config = {
        **_common(head),
        "architectures": ["LlamaForCausalLMEagle3" if dialect == "sglang" else "Eagle3LlamaForCausalLM"],
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        **_switches(head),
    }
    if ids:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return config | ({TAPS_KEY: list(inputs)} if inputs is not None else {})


def _speculators(head: EagleHead, inputs: tuple[int, ...] | None, verifier: str | None) -> dict[str, Any]:
    ids = inputs or head.taps
    kind = "eagle3" if head.mask_token is None else "peagle"
    return {
        "architectures": ["Eagle3Speculator" if head.mask_token is None else "PEagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier or "", "architectures": []},
        },
        "transformer_layer_config": {**_common(head), "architectures": ["LlamaForCausalLM"]},
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        "torch_dtype": _common(head)["torch_dtype"],
        "norm_before_residual": head.norm_before_residual,
        **_switches(head),
        **({"eagle_aux_hidden_state_layer_ids": list(ids)} if ids else {}),
        **({TAPS_KEY: list(inputs)} if inputs is not None else {}),
    }


def _switches(head: EagleHead) -> dict[str, Any]:
    """Returns the options that are on, and P-EAGLE's mask token; other engines do not know all of them."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switches: dict[str, Any] = {name: True for name in names if getattr(head, name)}
    return switches if head.mask_token is None else switches | dict.fromkeys(_MASK_KEYS, head.mask_token)
