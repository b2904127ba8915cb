"""A checkpoint's settings as a GGUF file has them: the inverse of ``families.py``, and the types of tensors.

Keys and tensors are those of llama.cpp's converter. A setting without a key is refused: the metadata is read back and
must describe the same architecture.

Types follow the rules of llama.cpp's ``llama-quantize``. A mixture such as Q4_K_M spends more bits on the output
matrix, on values and on ``ffn_down`` of some layers. If a type's blocks do not divide a row, another type replaces it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, RopeScalingType
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.rope import inverse_frequencies, rope_settings
from foretoken.models.formats.gguf.families import GGUFFamily

WRITTEN = {  # by config.json's ``model_type``; llama.cpp's converter writes Llama's name for Mistral
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def stored_rows(family: GGUFFamily, a: Architecture, name: str, tensor: Tensor) -> Tensor:
    """Returns a tensor of the checkpoint as llama.cpp stores it: norms with their offset, rotary rows in pairs."""
    if a.norm_offset and name.endswith("norm.weight"):
        return tensor.float() + a.norm_offset
    heads = {"q_proj": a.heads, "k_proj": a.kv_heads}.get(name.split(".")[-2], 0)
    if not family.interleaved or not heads:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def add_settings(writer: GGUFWriter, config: Mapping[str, Any], a: Architecture) -> None:
    rope = rope_settings(config)
    writer.add_vocab_size(a.vocab)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(a.hidden)
    writer.add_block_count(a.layers)
    writer.add_feed_forward_length(a.intermediate)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_layer_norm_rms_eps(a.eps)
    writer.add_rope_dimension_count(a.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if a.family in ("phi3", "gemma2", "gemma3_text"):
        _add_windows(writer, config, a)


def _add_windows(writer: GGUFWriter, config: Mapping[str, Any], a: Architecture) -> None:
    """Adds the keys of families with sliding windows: Phi 3 and Gemma 2 and 3."""
    writer.add_sliding_window(max(a.windows))
    if a.attention_softcap:
        writer.add_attn_logit_softcapping(a.attention_softcap)
    if a.final_softcap:
        writer.add_final_logit_softcapping(a.final_softcap)
    if a.family == "gemma3_text":
        writer.add_rope_freq_base_swa(rope_settings(config, "sliding_attention")["rope_theta"])
        period = a.windows.index(0) + 1 if 0 in a.windows else a.layers + 1
        if period not in (6, a.layers + 1):
            writer.add_sliding_window_pattern(period)


def rope_factors(config: Mapping[str, Any], a: Architecture) -> NDArray[np.float32] | None:
    """Returns the divisors of the rotary frequencies, if the file needs a tensor of them (Llama 3)."""
    rope = rope_settings(config)
    if rope["rope_type"] not in ("llama3", "factors"):
        return None
    plain = inverse_frequencies({**rope, "rope_type": "default"}, a.head_dim)
    return (plain / a.frequencies[0]).numpy()


def check_same(a: Architecture, stored: Architecture) -> None:
    """Raises InvalidRequest unless a file describes the architecture of its checkpoint."""
    for name in ("windows", "rope", *(field.name for field in fields(Architecture))):
        value, other = getattr(a, name), getattr(stored, name)
        if name == "family":
            continue
        if name == "frequencies":
            same = len(value) == len(other) and all(
                torch.allclose(x, y, rtol=1e-5) for x, y in zip(value, other, strict=True)
            )
        else:
            same = math.isclose(value, other, rel_tol=1e-6) if isinstance(value, float) else value == other
        if not same:
            raise InvalidRequest(
                f"a GGUF file has no key for this model's {name.replace('_', ' ')}; llama.cpp would compute another "
                "model; choose int8 or int4, which are written as a folder"
            )


_K = GGMLQuantizationType


class FileType(NamedTuple):
    """The type of most matrices of a file type of llama.cpp, and its number in the file."""

    kind: GGMLQuantizationType
    file_type: LlamaFileType


MIXTURES = {
    name: FileType(
        GGMLQuantizationType[re.sub("_[SML]$", "", name)],
        LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"],
    )
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
        *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S"),
    )
}
_FLOATS = (_K.F32, _K.F16, _K.BF16)
_FALLBACK = {_K.Q3_K: _K.Q4_0, _K.Q4_K: _K.Q5_0, _K.Q5_K: _K.Q5_1, _K.Q6_K: _K.Q8_0}


def tensor_type(mixture: str, name: str, shape: tuple[int, ...], layers: int, tied: bool) -> GGMLQuantizationType:
    """Returns the type of a tensor.

    Args:
        mixture: a name of ``MIXTURES``.
        name: the tensor's name in the file.
        shape: (out, in) or (size,).
        layers: number of layers.
        tied: whether the embedding is the output matrix as well.
    """
    kind = MIXTURES[mixture].kind
    if len(shape) < 2:
        return _K.F32
    if kind in _FLOATS:
        return kind
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        divided = shape[1] % GGML_QUANT_SIZES[kind][0] == 0
        kind = _K.Q6_K if divided and kind != _K.Q8_0 else _K.Q8_0
    elif name != "token_embd.weight":
        _, layer, part, _ = name.split(".")
        kind = _layer_type(mixture, part, int(layer), layers)
    for _ in range(2):
        if shape[1] % GGML_QUANT_SIZES[kind][0]:
            kind = _FALLBACK.get(kind, _K.F16)
    return kind


def _layer_type(mixture: str, part: str, layer: int, layers: int) -> GGMLQuantizationType:
    """Returns the type of a layer's matrix, before its shape is considered."""
    kind = MIXTURES[mixture].kind
    important = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if part in ("attn_v", "attn_qkv"):
        by_mixture = {
            "Q3_K_L": _K.Q5_K,
            "Q3_K_M": _K.Q5_K if layer < 2 else _K.Q4_K,
            "Q4_K_S": _K.Q5_K if layer < 4 else kind,
            "Q4_K_M": _K.Q6_K if important else kind,
            "Q5_K_M": _K.Q6_K if important else kind,
        }
    elif part == "ffn_down":
        by_mixture = {
            "Q3_K_L": _K.Q5_K,
            "Q3_K_M": _K.Q5_K if layer < layers // 16 else _K.Q4_K,
            "Q4_K_S": _K.Q5_K if layer < layers // 8 else kind,
            "Q4_K_M": _K.Q6_K if important else kind,
            "Q5_K_M": _K.Q6_K if important else kind,
        }
    elif part == "attn_output":
        by_mixture = {"Q3_K_L": _K.Q5_K, "Q3_K_M": _K.Q4_K}
    else:
        by_mixture = {}
    return by_mixture.get(mixture, kind)
