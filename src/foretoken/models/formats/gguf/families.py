"""The architectures of GGUF files as the config.json and tensor names that the runtime knows.

llama.cpp changes some tensors when it converts a checkpoint: the rows of Llama's queries and keys are interleaved for
its rotary kernel, Gemma's norms have their offset of 1 added, Llama 3's rotary scaling becomes a tensor of factors. The
differences are stated here and undone in ``weights.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.gguf.cursor import StoredArray
from foretoken.models.formats.gguf.header import Header

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scale is that of hidden / heads
_IGNORED = {"rope_freqs.weight"}  # part of the configuration
_NEEDS_OTHER = {
    "expert_count",
    "attention.temperature_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "attention.max_alibi_bias",
    "residual_scale",
    "embedding_scale",
    "nextn_predict_layers",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GRANITE = {part: name.replace("mlp.experts", "block_sparse_moe") for part, name in _ROUTED.items()} | {
    "ffn_gate_inp": "block_sparse_moe.router.layer"
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_BARE = {"attn_sinks"}  # tensors whose names in the checkpoint have no suffix
_BIASES = {"attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv"} | set(_ROUTED)  # gpt-oss has those of experts


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """An architecture of GGUF that the runtime computes.

    Attributes:
        model_type: its name in config.json.
        names: names of a layer's tensors in the checkpoint, by their names in the file.
        interleaved: whether the rows of queries and keys are stored in pairs (x[i], x[i + head_dim / 2]).
        norm_offset: offset that the file's norm weights include.
        settings: returns the fields of config.json that only this family has.
        reads: keys of ``_NEEDS_OTHER`` that ``settings`` reads.
    """

    model_type: str
    names: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    settings: Callable[[_Metadata], dict[str, Any]] | None = None
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The keys of one architecture in a header."""

    header: Header
    architecture: str

    def get(self, key: str, kinds: tuple[type, ...] = (int,), default: Any = None) -> Any:
        """Returns the value of ``architecture.key``, or the default. Raises ModelLoadError for another type."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is default:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelLoadError(
                f"{self.header.path} has {self.architecture}.{key} = {shortened(value)}; expected "
                f"{' or '.join(kind.__name__ for kind in kinds)}"
            )
        return value

    def need(self, key: str, kinds: tuple[type, ...] = (int,)) -> Any:
        """Returns the value of ``architecture.key``. Raises ModelLoadError if it is missing or of another type."""
        value = self.get(key, kinds)
        if value is None:
            raise ModelLoadError(f"{self.header.path} lacks the key {self.architecture}.{key}; is it complete?")
        return value

    def number(self, key: str) -> float | None:
        """Returns a number as it was before rounding to float32; None if the file has none."""
        value = self.get(key, (float, int))
        return None if value is None else _shortest(value)


def _window(m: _Metadata) -> dict[str, Any]:
    return {"sliding_window": m.get("attention.sliding_window") or None}


def _gemma2(m: _Metadata) -> dict[str, Any]:
    layers, heads = m.need("block_count"), m.need("attention.head_count")
    big = layers == _GEMMA_27B[m.architecture]
    settings = _window(m) | {
        "query_pre_attn_scalar": m.need("embedding_length") / heads if big else _head_dim(m),
        "attn_logit_softcapping": m.number("attn_logit_softcapping"),
        "final_logit_softcapping": m.number("final_logit_softcapping"),
    }
    if m.architecture == "gemma2":  # llama.cpp's defaults are those of transformers
        settings = {key: value for key, value in settings.items() if value is not None}
    return settings


def _gemma3(m: _Metadata) -> dict[str, Any]:
    settings = _gemma2(m) | {"rope_local_base_freq": m.number("rope.freq_base_swa") or 1e4}
    key = "attention.sliding_window_pattern"
    if isinstance(m.header.metadata.get(f"{m.architecture}.{key}"), StoredArray):
        sliding = m.header.array(f"{m.architecture}.{key}") or []
        kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
        return settings | {"layer_types": kinds[: m.need("block_count")]}
    return settings | {"sliding_window_pattern": m.get(key, default=6)}


def _experts(normalized: bool) -> Callable[[_Metadata], dict[str, Any]]:
    """Returns a function for the fields of experts; ``normalized``: what llama.cpp takes for the architecture."""

    def settings(m: _Metadata) -> dict[str, Any]:
        return {
            "num_experts": m.need("expert_count"),
            "num_experts_per_tok": m.need("expert_used_count"),
            "moe_intermediate_size": m.get("expert_feed_forward_length") or m.need("feed_forward_length"),
            "shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length", default=0) or None,
            "norm_topk_prob": m.get("expert_weights_norm", (bool,), normalized),
        }

    return settings


def _gpt_oss(m: _Metadata) -> dict[str, Any]:
    return _window(m) | _experts(True)(m)


def _granitemoe(m: _Metadata) -> dict[str, Any]:
    return _experts(True)(m) | {
        "attention_multiplier": m.number("attention.scale") or _head_dim(m) ** -0.5,
        "embedding_multiplier": m.number("embedding_scale") or 1.0,
        "residual_multiplier": m.number("residual_scale") or 1.0,
        "logits_scaling": m.number("logit_scale") or 1.0,
    }


_COUNT = frozenset({"expert_count"})
_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_LLAMA = GGUFFamily("llama", _LAYER, interleaved=True)
_MIXTRAL_FAMILY = GGUFFamily("mixtral", _LAYER | _MIXTRAL, interleaved=True, settings=_experts(True), reads=_COUNT)
_GEMMA_NAMES = _LAYER | _SANDWICH
FAMILIES = {
    "llama": _LLAMA,
    "mistral": GGUFFamily("mistral", _LAYER, interleaved=True, settings=_window),
    "mistral3": _LLAMA,
    "smollm3": GGUFFamily("smollm3", _LAYER, interleaved=True),
    "qwen2": GGUFFamily("qwen2", _LAYER),
    "qwen3": GGUFFamily("qwen3", _LAYER | _HEAD_NORMS),
    "qwen2moe": GGUFFamily("qwen2_moe", _LAYER | _ROUTED | _SHARED, settings=_experts(False), reads=_COUNT),
    "qwen3moe": GGUFFamily("qwen3_moe", _LAYER | _HEAD_NORMS | _ROUTED, settings=_experts(True), reads=_COUNT),
    "olmoe": GGUFFamily("olmoe", _LAYER | _HEAD_NORMS | _ROUTED, settings=_experts(False), reads=_COUNT),
    "granitemoe": GGUFFamily(
        "granitemoe", _LAYER | _GRANITE, interleaved=True, settings=_granitemoe, reads=_COUNT | _SCALES
    ),
    "gpt-oss": GGUFFamily("gpt_oss", _LAYER | _ROUTED | _GPT_OSS, settings=_gpt_oss, reads=_COUNT),
    "phi3": GGUFFamily("phi3", _LAYER | _FUSED, settings=_window),
    "gemma": GGUFFamily("gemma", _LAYER, norm_offset=1.0),
    "gemma2": GGUFFamily("gemma2", _GEMMA_NAMES, norm_offset=1.0, settings=_gemma2),
    "gemma3": GGUFFamily("gemma3_text", _GEMMA_NAMES | _HEAD_NORMS, norm_offset=1.0, settings=_gemma3),
}


def family_of(header: Header) -> tuple[str, GGUFFamily]:
    """Returns the name of a file's architecture and its description.

    Raises:
        ModelLoadError: the runtime does not support the architecture.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelLoadError(
            f"{header.path} has the architecture {shortened(name)}; GGUF files are computed of {', '.join(FAMILIES)}"
        )
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return name, _MIXTRAL_FAMILY
    return name, FAMILIES[name]


def config_of(header: Header) -> dict[str, Any]:
    """Returns the config.json that the metadata describes.

    Raises:
        ModelLoadError: a key is missing or wrong, or has a value that the runtime does not support.
    """
    name, family = family_of(header)
    m = _Metadata(header, name)
    for key in _NEEDS_OTHER - family.reads:
        if value := header.metadata.get(f"{name}.{key}"):
            raise ModelLoadError(f"{header.path} has {name}.{key} = {shortened(value)}, which is not computed here")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.path} lacks the matrix token_embd.weight; is it complete?")
    head_dim = _head_dim(m)
    if m.get("attention.value_length", default=head_dim) != head_dim:
        raise ModelLoadError(f"{header.path} has keys and values of different lengths, which is not computed here")
    config = {
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": m.need("embedding_length"),
        "intermediate_size": m.need("feed_forward_length"),
        "num_hidden_layers": m.need("block_count"),
        "num_attention_heads": m.need("attention.head_count"),
        "num_key_value_heads": m.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": m.need("context_length"),
        "rms_norm_eps": _shortest(m.need("attention.layer_norm_rms_epsilon", (float,))),
        "rope_theta": m.number("rope.freq_base") or 10000.0,
        "partial_rotary_factor": m.get("rope.dimension_count", default=head_dim) / head_dim,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if family.settings is not None:
        config |= family.settings(m)
    scaling = _rope_scaling(m)
    return config | ({"rope_scaling": scaling} if scaling else {})


def checkpoint_name(family: GGUFFamily, name: str) -> str | None:
    """Returns a tensor's name in the checkpoint; None for a tensor that is not a weight.

    Raises:
        KeyError: the name is unknown.
    """
    if name in _IGNORED or name.endswith(".attn_rot_embd.weight"):
        return None
    if block := _BLOCK.fullmatch(name):
        layer, part, suffix = block.groups()
        if suffix == "bias" and part not in _BIASES:
            raise KeyError(name)
        return f"model.layers.{layer}.{family.names[part]}" + ("" if part in _BARE else f".{suffix}")
    return _ENDS[name]


def gguf_name(family: GGUFFamily, name: str) -> str:
    """Returns the name in a GGUF file of a checkpoint's tensor. Raises KeyError if it is unknown."""
    if name in (ends := {known: stored for stored, known in _ENDS.items()}):
        return ends[name]
    match = re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)", name)
    parts = {known: stored for stored, known in family.names.items()}
    if match is None or match[2] not in parts or (match[3] == "bias" and parts[match[2]] not in _BIASES):
        raise KeyError(name)
    return f"blk.{match[1]}.{parts[match[2]]}.{match[3]}"


def _head_dim(m: _Metadata) -> int:
    heads = m.need("attention.head_count")
    if heads < 1:
        raise ModelLoadError(f"{m.header.path} has {m.architecture}.attention.head_count = {heads}; expected 1 or more")
    length: int = m.get("attention.key_length") or m.need("embedding_length") // heads
    if length < 1:
        raise ModelLoadError(f"{m.header.path} has heads of {length} numbers; expected 1 or more")
    return length


def _rope_scaling(m: _Metadata) -> dict[str, Any] | None:
    """Returns the rotary scaling of the file; None if it has none."""
    kind = m.get("rope.scaling.type", (str,), "none")
    factors = m.header.tensors.get("rope_freqs.weight")
    if any(name in m.header.tensors for name in ("rope_factors_long.weight", "rope_factors_short.weight")):
        kind = "longrope"
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": m.number("rope.scaling.factor") or 1.0}
    if kind == "yarn" and m.architecture == "gpt-oss":
        original = m.need("rope.scaling.original_context_length")
        factor = m.number("rope.scaling.factor") or 1.0
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "truncate": False}
    if kind != "none":
        raise ModelLoadError(f"{m.header.path} scales its positions by {shortened(kind)}, which is not computed here")
    if factors is None:
        return None
    if factors.kind != GGMLQuantizationType.F32 or factors.shape != (_head_dim(m) // 2,):
        raise ModelLoadError(
            f"{m.header.path} has rope_freqs.weight {factors.shape} of {factors.kind.name}; "
            f"expected float32 ({_head_dim(m) // 2},)"
        )
    values = np.fromfile(factors.path, np.float32, factors.shape[0], offset=factors.start)
    return {"rope_type": "factors", "factors": [float(value) for value in values]}


def _shortest(value: float) -> float:
    """Returns the shortest decimal number that rounds to the same float32: 1e-6 for 9.99999997e-07."""
    return value if not math.isfinite(value) else float(str(np.float32(value)))
