"""Rotary frequencies of a checkpoint, plain and scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("default", "linear", "llama3")


def rope_kind(config: Mapping[str, Any]) -> str:
    """How the checkpoint scales its positions; only ``KINDS`` are computed here."""
    settings = _settings(config)
    return settings.get("rope_type") or settings.get("type") or "default"


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: plain (RoFormer, 2104.09864), ``linear``, or ``llama3`` (wavelength bands)."""
    settings, kind = _settings(config), rope_kind(config)
    base = settings.get("rope_theta") or config.get("rope_theta") or 10000.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (base**exponents)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / settings["factor"]
    if kind == "llama3":
        return _llama3(frequencies, settings)
    raise ValueError(f"rope scaling {kind!r} is not computed here; known: {', '.join(KINDS)}")


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _llama3(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / settings["factor"] + blend * frequencies
