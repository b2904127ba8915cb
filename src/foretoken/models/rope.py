"""Rotary frequencies of a checkpoint, plain and scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor | None:
    """float32 [head_dim / 2], or None for a kind of scaling that is not computed here.

    ``default`` (RoFormer, 2104.09864), ``linear`` and ``llama3`` (Llama 3.1's wavelength bands).
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = settings.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = settings.get("rope_type") or settings.get("type") or "default"
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (base**exponents)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / settings["factor"]
    if kind == "llama3":
        return _llama3(frequencies, settings)
    return None


def _llama3(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / settings["factor"] + blend * frequencies
