"""Writes EAGLE heads and block drafters in the formats of other engines.

The tensors are the same in all of them. EAGLE's formats differ in the name of the first layer (``midlayer.*`` or
``layers.0.*``) and in config.json. vLLM and SGLang read block drafters in the originals' layouts: z-lab's for DFlash,
DeepSpec's for DSpark. speculators nests the layers' settings, and needs a vocabulary head.
"""

from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.heads.block import BlockHead
from foretoken.models.heads.eagle import MASK, EagleHead
from foretoken.models.heads.files import TAPS_KEY, check_vocabulary_head

_MASK_KEYS = ("pard_token", "mask_token_id")  # vLLM's and speculators' names for the mask token
EAGLE_DIALECTS = ("sglang", "vllm", "speculators")
Written = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json, and the tensors of model.safetensors."""


def write_eagle(
    head: EagleHead, dialect: str, taps: tuple[int, ...] | None = None, verifier: str | None = None
) -> Written:
    """Returns ``head`` in the format ``dialect``. Raises InvalidRequest if the format does not support such heads.

    Args:
        taps: indices of the inputs of the tapped layers; None for the head's.
        verifier: the target's name or folder, which the speculators format contains.
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
    windows = {"layer_types": ["sliding_attention"] * head.layers, "sliding_window": head.window}
    return {
        **head.layer,
        **(windows if head.window else {}),
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
        "speculators_config": _proposal(kind, 4, verifier or ""),
        "transformer_layer_config": {**_common(head), "architectures": ["LlamaForCausalLM"]},
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        "torch_dtype": _common(head)["torch_dtype"],
        "norm_before_residual": head.norm_before_residual,
        **_switches(head),
        **({"eagle_aux_hidden_state_layer_ids": list(ids)} if ids else {}),
        **({TAPS_KEY: list(inputs)} if inputs is not None else {}),
    }


def _proposal(algorithm: str, tokens: int, verifier: str) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": verifier, "architectures": []},
    }


def _switches(head: EagleHead) -> dict[str, Any]:
    """Returns the options that are on, and P-EAGLE's mask token; other engines do not know all of them."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switches: dict[str, Any] = {name: True for name in names if getattr(head, name)}
    return switches if head.mask_token is None else switches | dict.fromkeys(_MASK_KEYS, head.mask_token)


BLOCK_DIALECTS = ("original", "vllm", "sglang", "speculators")


def write_block(head: BlockHead, dialect: str, vocabulary: Tensor | None = None, verifier: str = "") -> Written:
    """Returns ``head`` in the layout ``dialect``. Raises InvalidRequest if the layout does not support such heads.

    Args:
        vocabulary: the target's vocabulary head [V, H], for a head without its own.
        verifier: the target's name or folder, which the layout of speculators contains.
    """
    if dialect not in BLOCK_DIALECTS:
        raise InvalidRequest(f"block drafters have no dialect {dialect!r}; known: {', '.join(BLOCK_DIALECTS)}")
    if dialect == "speculators":
        if any(
            ordered and kind != "sliding_attention" for ordered, kind in zip(head.ordered, _kinds(head), strict=True)
        ):
            raise InvalidRequest(
                "in the layout of speculators rows of full attention see their whole block, in this head only the rows "
                "before; write it for original, vllm or sglang"
            )
        return _nested(head, verifier), _with_vocabulary(head, vocabulary)
    if head.from_newest != (head.method == "dspark"):
        raise InvalidRequest(
            "sample_from_anchor differs from this method's fixed value in the originals' layout; only the layout of "
            "speculators has a key for it"
        )
    return (_dspark(head) if head.method == "dspark" else _dflash(head)), dict(head.tensors)


def _kinds(head: BlockHead) -> list[str]:
    return head.layer.get("layer_types") or ["full_attention"] * head.layers


def _block_layers(head: BlockHead) -> dict[str, Any]:
    dtype = str(head.tensors["fc.weight"].dtype).removeprefix("torch.")
    mapped = {"draft_vocab_size": head.draft_vocab} if head.draft_vocab != head.vocab else {}
    layer = {
        **head.layer,
        "vocab_size": head.vocab,
        "layer_types": _kinds(head),
        "tie_word_embeddings": False,
        **mapped,
    }
    return layer | {"attention_bias": False, "torch_dtype": dtype}


def _originals(head: BlockHead, architecture: str) -> dict[str, Any]:
    usual = tuple(kind == "sliding_attention" for kind in _kinds(head))
    stated = {} if head.ordered == usual else {"is_causal": head.ordered[0]}
    return {"architectures": [architecture], **_block_layers(head), "block_size": head.block, **stated}


def _dflash(head: BlockHead) -> dict[str, Any]:
    section = {"mask_token_id": head.mask_token, "target_layer_ids": [tap - 1 for tap in head.taps]}
    causal = {"causal_head": True} if head.causal else {}
    return {**_originals(head, "DFlashDraftModel"), "dflash_config": {**section, **causal}}


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
    layer = _block_layers(head)
    dtype = layer.pop("torch_dtype")
    return {
        "architectures": [name],
        "speculators_model_type": head.method,
        "speculators_config": _proposal(head.method, head.depth, verifier),
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
        check_vocabulary_head(vocabulary, head.vocab, head.hidden)
        tensors["lm_head.weight"] = vocabulary.to(tensors["fc.weight"].dtype)
    if head.draft_vocab != head.vocab and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(head.vocab, dtype=torch.bool).index_fill_(0, head.ids(), True)
    return tensors
