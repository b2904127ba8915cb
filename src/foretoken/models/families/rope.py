"""Rotary frequencies that a config.json asks for, plain and scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("default", "linear", "llama3", "factors")


def rope_settings(config: Mapping[str, Any], layer_type: str = "full_attention") -> dict[str, Any]:
    """Returns the rotary settings of one kind of layer as a flat dict with ``rope_type`` and ``rope_theta``.

    Older files have the base beside ``rope_scaling``, newer ones have all settings in ``rope_parameters``. Gemma 3 has
    a set for each kind of layer or, in older files, a separate base for the sliding layers.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = config.get("rope_theta")
    if "full_attention" in settings or "sliding_attention" in settings:
        settings = settings.get(layer_type) or {}
    elif layer_type == "sliding_attention":
        settings, base = {}, config.get("rope_local_base_freq")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    theta = settings.get("rope_theta") or base or 10000.0
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return {**settings, "rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial}


def computes_rope(settings: Mapping[str, Any]) -> bool:
    """Returns whether ``inverse_frequencies`` supports these settings.

    It rotates whole heads, with frequencies that do not depend on the length of a sequence.
    """
    return settings["rope_type"] in KINDS and settings["partial_rotary_factor"] == 1.0


def inverse_frequencies(settings: Mapping[str, Any], head_dim: int) -> Tensor:
    """Returns the frequencies, float32 [head_dim / 2].

    Computed are the plain ones (RoFormer, 2104.09864), ``linear``, ``llama3`` (wavelength bands), and ``factors``: one
    for each frequency, which is divided by it (GGUF files of Llama 3).
    """
    kind = settings["rope_type"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (settings["rope_theta"] ** exponents)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / settings["factor"]
    if kind == "factors":
        return frequencies / torch.tensor(settings["factors"])
    if kind == "llama3":
        return _llama3(frequencies, settings)
    raise ValueError(f"rope scaling {kind!r} is not computed here; known: {', '.join(KINDS)}")


def _llama3(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / settings["factor"] + blend * frequencies
