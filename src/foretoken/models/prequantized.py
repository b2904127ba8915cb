"""Checkpoints that were quantised before: which of them are int8 as computed here, and how their tensors are called.

Read are two writers' files with symmetric int8 weights, one scale per output channel, and activations quantised
symmetrically row by row as they come: compressed-tensors (``int-quantized``, as llm-compressor saves W8A8) and
torchao (``Int8DynamicActivationInt8WeightConfig`` version 2, per row). Matrices they left alone stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Schema, parse
from foretoken.models.quantize import Int8

READ = (
    "read are int8 weights with a symmetric scale per channel and dynamic symmetric int8 activations per token, saved "
    "by compressed-tensors (int-quantized) or torchao (Int8DynamicActivationInt8WeightConfig, PerRow)"
)


class QuantizationGroup(Schema):
    """One of compressed-tensors' groups of modules."""

    format: str | None = None
    weights: dict[str, Any] | None = None
    input_activations: dict[str, Any] | None = None


class Quantization(Schema):
    """config.json's ``quantization_config``, by any writer."""

    quant_method: str | None = None
    format: str | None = None
    config_groups: dict[str, QuantizationGroup] | None = None


def check_prequantized(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that the weights are quantised already. Raises ModelLoadError where not as above."""
    settings = config.get("quantization_config")
    if not settings:
        return False
    method = parse(Quantization, settings, "config.json's quantization_config").quant_method
    found = {"compressed-tensors": _compressed_tensors, "torchao": _torchao}.get(method or "", lambda _: f"{method}")(
        settings
    )
    if found is not None:
        raise ModelLoadError(f"the checkpoint is quantised in a way that is not computed here ({found}); {READ}")
    return True


def read_int8(weights: Mapping[str, Tensor], name: str) -> Int8 | None:
    """The matrix of the product ``name`` under either writer's names, None where it is not int8."""
    if f"{name}._weight_qdata" in weights:
        values, scales = weights[f"{name}._weight_qdata"], weights.get(f"{name}._weight_scale")
        offset = weights.get(f"{name}._weight_zero_point")
    elif f"{name}.weight_scale" in weights:
        values, scales = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
        offset = weights.get(f"{name}.weight_zero_point")
    else:
        return None
    if values.dtype != torch.int8 or values.ndim != 2 or scales is None or scales.numel() != values.shape[0]:
        raise ModelLoadError(f"the matrix of {name!r} is not int8 with one scale per channel; {READ}")
    if offset is not None and bool(offset.any()):
        raise ModelLoadError(f"the matrix of {name!r} has zero points; {READ}")
    return Int8(values, scales.to(torch.float32, copy=True).flatten())


def _compressed_tensors(settings: Mapping[str, Any]) -> str | None:
    """What is not as above, None where all is."""
    groups = list((settings.get("config_groups") or {}).values())
    layout = {group.get("format") or settings.get("format") for group in groups}
    if not groups or not layout <= {"int-quantized", "naive-quantized"}:
        return f"format {', '.join(sorted(map(str, layout))) or settings.get('format')}"
    for group in groups:
        for part, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
            told = group.get(part) or {}
            asked = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
            for key, value in asked.items():
                if told.get(key) != value:
                    return f"{part} with {key} {told.get(key)}"
        if group.get("output_activations"):
            return "quantised output activations"
    return next((key for key in ("kv_cache_scheme", "sparsity_config", "transform_config") if settings.get(key)), None)


def _torchao(settings: Mapping[str, Any]) -> str | None:
    kinds = settings.get("quant_type") or {}
    told = kinds.get("default") if isinstance(kinds, Mapping) and len(kinds) == 1 else None
    if not isinstance(told, Mapping) or told.get("_type") != "Int8DynamicActivationInt8WeightConfig":
        return f"torchao {told.get('_type') if isinstance(told, Mapping) else kinds}"
    data = _object(told.get("_data"))
    granularity = data.get("granularity")
    each = granularity if isinstance(granularity, list) else [granularity]
    per_row = all(isinstance(g, Mapping) and g.get("_type") == "PerRow" for g in each)
    symmetric = _object(data.get("act_mapping_type")).get("_data") == "SYMMETRIC"
    if told.get("_version") != 2 or not per_row or not symmetric or data.get("weight_only_decode"):
        return "torchao's int8 with other settings"
    if settings.get("include_input_output_embeddings"):
        return "a quantised embedding"
    return None


def _object(value: Any) -> Mapping[str, Any]:
    """``value`` where it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
