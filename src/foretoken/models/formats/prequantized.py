"""Checkpoints that are already quantized to int8, as compressed-tensors and torchao write them.

Supported are symmetric int8 weights with one scale per output channel, and activations that are quantized dynamically
and symmetrically row by row: compressed-tensors (``int-quantized``, as llm-compressor saves W8A8) and torchao
(``Int8DynamicActivationInt8WeightConfig`` version 2, per row). Matrices that were not quantized stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Schema, parse
from foretoken.models.formats.quantize import Int8

SUPPORTED = (
    "supported are int8 weights with a symmetric scale per channel and dynamic symmetric int8 activations per token, "
    "saved by compressed-tensors (int-quantized) or torchao (Int8DynamicActivationInt8WeightConfig, PerRow)"
)


class QuantizationGroup(Schema):
    """The quantization of one group of modules in compressed-tensors."""

    format: str | None = None
    weights: dict[str, Any] | None = None
    input_activations: dict[str, Any] | None = None


class Quantization(Schema):
    """The ``quantization_config`` of config.json, whichever tool wrote it."""

    quant_method: str | None = None
    format: str | None = None
    config_groups: dict[str, QuantizationGroup] | None = None


def check_prequantized(config: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint's weights are quantized.

    Raises:
        ModelLoadError: they are quantized in a way that is not supported.
    """
    settings = config.get("quantization_config")
    if not settings:
        return False
    method = parse(Quantization, settings, "config.json's quantization_config").quant_method
    checks = {"compressed-tensors": _compressed_tensors, "torchao": _torchao}
    unsupported = checks[method](settings) if method in checks else f"{method}"
    if unsupported is not None:
        raise ModelLoadError(
            f"the checkpoint is quantised in a way that is not computed here ({unsupported}); {SUPPORTED}"
        )
    return True


def read_int8(weights: Mapping[str, Tensor], name: str) -> Int8 | None:
    """Returns the weight of the linear layer ``name``; None if it is not quantized.

    Raises:
        ModelLoadError: it is not int8 with one scale per output channel and without zero points.
    """
    if f"{name}._weight_qdata" in weights:
        values, scales = weights[f"{name}._weight_qdata"], weights.get(f"{name}._weight_scale")
        offset = weights.get(f"{name}._weight_zero_point")
    elif f"{name}.weight_scale" in weights:
        values, scales = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
        offset = weights.get(f"{name}.weight_zero_point")
    else:
        return None
    if values.dtype != torch.int8 or values.ndim != 2 or scales is None or scales.numel() != values.shape[0]:
        raise ModelLoadError(f"the matrix of {name!r} is not int8 with one scale per channel; {SUPPORTED}")
    if offset is not None and bool(offset.any()):
        raise ModelLoadError(f"the matrix of {name!r} has zero points; {SUPPORTED}")
    return Int8(values, scales.to(torch.float32, copy=True).flatten())


def _compressed_tensors(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting that is not supported; None if all are."""
    groups = list((settings.get("config_groups") or {}).values())
    layout = {group.get("format") or settings.get("format") for group in groups}
    if not groups or not layout <= {"int-quantized", "naive-quantized"}:
        return f"format {', '.join(sorted(map(str, layout))) or settings.get('format')}"
    for group in groups:
        for part, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
            scheme = group.get(part) or {}
            expected = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
            for key, value in expected.items():
                if scheme.get(key) != value:
                    return f"{part} with {key} {scheme.get(key)}"
        if group.get("output_activations"):
            return "quantised output activations"
    return next((key for key in ("kv_cache_scheme", "sparsity_config", "transform_config") if settings.get(key)), None)


def _torchao(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting that is not supported; None if all are."""
    kinds = settings.get("quant_type") or {}
    scheme = kinds.get("default") if isinstance(kinds, Mapping) and len(kinds) == 1 else None
    if not isinstance(scheme, Mapping) or scheme.get("_type") != "Int8DynamicActivationInt8WeightConfig":
        return f"torchao {scheme.get('_type') if isinstance(scheme, Mapping) else kinds}"
    data = _object(scheme.get("_data"))
    granularity = data.get("granularity")
    each = granularity if isinstance(granularity, list) else [granularity]
    per_row = all(isinstance(g, Mapping) and g.get("_type") == "PerRow" for g in each)
    symmetric = _object(data.get("act_mapping_type")).get("_data") == "SYMMETRIC"
    if scheme.get("_version") != 2 or not per_row or not symmetric or data.get("weight_only_decode"):
        return "torchao's int8 with other settings"
    if settings.get("include_input_output_embeddings"):
        return "a quantised embedding"
    return None


def _object(value: Any) -> Mapping[str, Any]:
    """Returns ``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
