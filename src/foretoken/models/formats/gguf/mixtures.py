"""Types of the tensors of a GGUF file, by the rules of llama.cpp's ``llama-quantize``.

A mixture such as Q4_K_M spends more bits on the output matrix, on values and on ``ffn_down`` of some layers. If a
type's
blocks do not divide a row, another type replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

_K = GGMLQuantizationType
_F = LlamaFileType


@dataclass(frozen=True, slots=True)
class FileType:
    """A file type of llama.cpp.

    Attributes:
        kind: the type of most matrices.
        file_type: its number in the file.
    """

    kind: GGMLQuantizationType
    file_type: LlamaFileType


MIXTURES = {
    "F32": FileType(_K.F32, _F.ALL_F32),
    "F16": FileType(_K.F16, _F.MOSTLY_F16),
    "BF16": FileType(_K.BF16, _F.MOSTLY_BF16),
    "Q8_0": FileType(_K.Q8_0, _F.MOSTLY_Q8_0),
    "Q6_K": FileType(_K.Q6_K, _F.MOSTLY_Q6_K),
    "Q5_K_M": FileType(_K.Q5_K, _F.MOSTLY_Q5_K_M),
    "Q5_K_S": FileType(_K.Q5_K, _F.MOSTLY_Q5_K_S),
    "Q5_1": FileType(_K.Q5_1, _F.MOSTLY_Q5_1),
    "Q5_0": FileType(_K.Q5_0, _F.MOSTLY_Q5_0),
    "Q4_K_M": FileType(_K.Q4_K, _F.MOSTLY_Q4_K_M),
    "Q4_K_S": FileType(_K.Q4_K, _F.MOSTLY_Q4_K_S),
    "Q4_1": FileType(_K.Q4_1, _F.MOSTLY_Q4_1),
    "Q4_0": FileType(_K.Q4_0, _F.MOSTLY_Q4_0),
    "Q3_K_L": FileType(_K.Q3_K, _F.MOSTLY_Q3_K_L),
    "Q3_K_M": FileType(_K.Q3_K, _F.MOSTLY_Q3_K_M),
    "Q3_K_S": FileType(_K.Q3_K, _F.MOSTLY_Q3_K_S),
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
