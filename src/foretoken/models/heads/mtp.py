"""Reads multi-token-prediction layers (DeepSeek-V3, 2412.19437, section 2.2) in the layouts of several families.

They compute proj([norm(embedding of token i + 1), norm(hidden state i)]), a decoder layer of the family, a norm,
and the target's vocabulary head. They differ in names, and in the order of the two halves.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.families.config import text_part
from foretoken.models.families.layers import Layer
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Source, layer_at
from foretoken.models.formats.memory import check_fits, weight_bytes
from foretoken.models.formats.prequantized import unpacked
from foretoken.models.formats.quantize import Quantizer, floats
from foretoken.models.formats.reader import TensorReader, located
from foretoken.models.formats.weights import LayerWeights, NormWeight
from foretoken.models.heads.files import MAX_HEADS

HIDDEN_KEY = "foretoken_mtp"  # our key in config.json: the hidden states that the layers were trained on


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of a family's tensors, without ``.weight``; {} stands for the number of an MTP layer."""

    layer: str  # prefix of the decoder layer's names
    embedding_norm: str
    hidden_norm: str
    projection: str  # the matrix of both, [H, 2H]
    norm: str  # norm before the vocabulary head, which may be the target's
    hidden_first: bool = False  # whether the projection's input has the hidden state first
    appended: bool = False  # whether the layers are numbered after the target's, under the same prefix


def _within(layer: str, embedding: str, hidden: str, projection: str, norm: str, **order: bool) -> MtpLayout:
    """Returns a layout whose names all begin with the layer's prefix."""
    return MtpLayout(layer, layer + embedding, layer + hidden, layer + projection, layer + norm, **order)


LAYOUTS = (
    # Qwen3-Next, Qwen3.5 and their relatives, EXAONE 4.5 and K-EXAONE: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct
    MtpLayout("mtp.layers.{}.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    # DeepSeek-V3, GLM-4.5, GLM-4.7-Flash and others: https://huggingface.co/deepseek-ai/DeepSeek-V3
    _within("layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", appended=True),
    # Hy3: https://huggingface.co/tencent/Hy3-preview
    _within("layers.{}.", "enorm", "hnorm", "eh_proj", "final_layernorm", appended=True),
    # MiMo: https://huggingface.co/XiaomiMiMo/MiMo-7B-RL
    _within(
        "model.mtp_layers.{}.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
    ),
    # ERNIE 4.5, with the target's final norm: https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT
    MtpLayout("mtp_block.{}.", "mtp_emb_norm.{}", "mtp_hidden_norm.{}", "mtp_linear_proj.{}", "norm"),
)


@dataclass(frozen=True, slots=True, eq=False)
class MtpLayer:
    """One MTP layer."""

    architecture: Architecture  # a decoder of this layer alone
    weights: LayerWeights  # the decoder layer
    embedding_norm: Tensor  # weight of the norm of embeddings, float32 [H]
    hidden_norm: Tensor  # weight of the norm of hidden states, float32 [H]
    projection: Tensor  # the matrix of [embedding, hidden state], [H, 2H]
    norm: NormWeight  # norm before the vocabulary head


def has_mtp(path: Path) -> bool:
    """Returns whether a checkpoint's folder, or a GGUF file, has MTP layers that are computed here."""
    config = _config(path)
    if unsupported(config) is not None:
        return False
    return bool(_listed(unpacked(open_weights(path), config), Architecture.of(config)))


def read_mtp(path: Path, dtype: torch.dtype, quantizer: Quantizer | None = None) -> list[MtpLayer]:
    """Reads the MTP layers of a checkpoint, in their order.

    Args:
        path: the target's folder, or one with the layers alone.
        quantizer: quantizes their matrices; None leaves them as they are.
    """
    config = _config(path)
    reason = unsupported(config)
    if reason is not None:
        raise ModelLoadError(f"the MTP layers in {path} are not computed here: {reason}")
    weights, a = unpacked(open_weights(path), config), Architecture.of(config)
    layers = _listed(weights, a)
    if not layers:
        projections = (layout.projection.format(a.layers if layout.appended else 0) for layout in LAYOUTS)
        names = ", ".join(dict.fromkeys(f"{name}.weight" for name in projections))
        raise ModelLoadError(f"{path} has no multi-token-prediction layers; their projections are named {names}")
    reader = Source(weights, a, dtype, quantizer).reader
    return [_layer(reader, a, layout, prefix, number) for layout, prefix, number in layers]


def check_mtp_fits(path: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelLoadError if the MTP layers of a checkpoint that is not quantized do not fit the device's memory."""
    config = _config(path)
    if config.get("quantization_config") or unsupported(config) is not None:
        return
    weights = open_weights(path)
    prefixes = tuple(p + layout.layer.format(n) for layout, p, n in _listed(weights, Architecture.of(config)))
    copies = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's, which are not read
    shapes = {n: s for n, s in weights.shapes.items() if n.startswith(prefixes) and not n.endswith(copies)}
    check_fits(weight_bytes(shapes, dtype, bits=None), device, f"MTP in {path}")


def hidden_states_of(path: Path) -> dict[str, bool]:
    """Returns config.json's statement of the hidden states that the layers were trained on; see ``taps.py``."""
    value = load_config(path).get(HIDDEN_KEY)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, bool) for v in value.values()):
        raise ModelLoadError(f"{path / 'config.json'} must have true or false in {HIDDEN_KEY}, got {value!r}")
    return dict(value)


def target_embedding(path: Path, dtype: torch.dtype) -> Tensor:
    """Returns the embedding of a target [V, H], which heads share."""
    config = _config(path)
    weights, a = unpacked(open_weights(path), config), Architecture.of(config)
    reader = Source(weights, a, dtype).reader
    name = reader.base + a.names.embedding
    return floats(reader.grouped(name) or reader.get(f"{name}.weight"), dtype)


def _config(path: Path) -> dict[str, Any]:
    """Returns config.json, of a multimodal checkpoint its language model's."""
    config = load_config(path)
    return text_part(config) or config


def _listed(weights: Container[str], a: Architecture) -> list[tuple[MtpLayout, str, int]]:
    """Returns layout, prefix of names, and number of each MTP layer in ``weights``."""
    base, _ = located(weights, a.names)
    for layout in LAYOUTS:
        first = a.layers if layout.appended else 0
        for prefix in (base,) if layout.appended else ("", base, base.removesuffix("model.")):
            layers: list[tuple[MtpLayout, str, int]] = []
            while _holds(weights, f"{prefix}{layout.layer.format(first + len(layers))}{_norm_of(a)}"):
                layers.append((layout, prefix, first + len(layers)))
                if len(layers) > MAX_HEADS:
                    break
            names = (layout.projection, layout.norm)
            if layers and all(_holds(weights, f"{prefix}{name.format(first)}") for name in names):
                return layers
    return []


def _norm_of(a: Architecture) -> str:
    """Returns the name of a norm of layers with attention."""
    before = any(layer.norms.mixer for layer in a.stack if layer.attention)
    return a.names.norm if before else a.names.after_mixer


def _holds(weights: Container[str], name: str) -> bool:
    """Returns whether a weight has this name, plain or quantized by torchao."""
    return any(f"{name}.{part}" in weights for part in ("weight", "_weight_qdata"))


def _layer(reader: TensorReader, a: Architecture, layout: MtpLayout, prefix: str, number: int) -> MtpLayer:
    def name(template: str) -> str:
        return prefix + template.format(number)

    at = name(layout.layer)
    single = replace(a, stack=(_kind(a, reader.weights, at),), recurrence=None, vocab=1, tied=False)
    exact = replace(reader, quantize=None)
    projection = floats(exact.matrix(name(layout.projection), a.hidden, 2 * a.hidden), reader.dtype)
    return MtpLayer(
        architecture=single,
        weights=layer_at(single, reader, at, 0),
        embedding_norm=reader.norm(name(layout.embedding_norm), a.hidden),
        hidden_norm=reader.norm(name(layout.hidden_norm), a.hidden),
        projection=projection.roll(a.hidden, 1).contiguous() if layout.hidden_first else projection,
        norm=NormWeight(reader.norm(name(layout.norm), a.hidden)),
    )


def _kind(a: Architecture, weights: Mapping[str, Tensor], at: str) -> Layer:
    """Returns the kind of an MTP layer: that of the target's last layer with full attention.

    The names of its tensors decide whether its MLP is dense or has experts. If full attention has no rotary positions
    (EXAONE), the layer has them and a window, as in vLLM. Raises ModelLoadError if the target has no such layer.
    """
    dense = _holds(weights, f"{at}{a.names.up[0]}")
    layers = [layer for layer in a.stack if layer.attention and (layer.experts is None) == dense]
    if not layers and dense:
        layers = [replace(layer, mlp="gated", experts=None) for layer in a.stack if layer.attention]
    if not layers:
        raise ModelLoadError(f"the MTP layer {at} has experts, but config.json describes none")
    layers = [layer for layer in layers if layer.rope >= 0] or layers
    return next((layer for layer in reversed(layers) if not layer.window), layers[-1])
